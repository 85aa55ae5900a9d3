"""The checks before the load: each refusal by name, and what the table says of a machine that fits."""

import ast
import functools
import os
import shutil
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file

from eagle3 import extract, files, gpus, preflight, vllm_source
from eagle3.target import Target
from tests.test_extract import options, write_prepared

GIB = 1 << 30
H200_TOTAL = 150_754_820_096  # 140.4 GiB


class StandIn:
    """Stands for the module pynvml: two H200s, a process on the second.

    The values of an idle H200 (its rows were printed on such a machine); the processes are made up.
    """

    class NVMLError(Exception):
        pass

    def __init__(self, free=(150_121_611_264, 150_121_611_264), capability=(9, 0), processes=()):
        self.free, self.capability, self.processes = free, capability, list(processes)

    def nvmlInit(self):  # noqa: N802
        self.open = True

    def nvmlShutdown(self):  # noqa: N802
        self.open = False

    def __getattr__(self, name):
        recorded = {
            "nvmlDeviceGetCount": lambda: len(self.free),
            "nvmlDeviceGetHandleByIndex": lambda i: i,
            "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-b": 1}[uuid],
            "nvmlDeviceGetIndex": lambda i: i,
            "nvmlDeviceGetName": lambda i: "NVIDIA H200",
            "nvmlDeviceGetMemoryInfo": lambda i: SimpleNamespace(free=self.free[i], total=H200_TOTAL),
            "nvmlDeviceGetCudaComputeCapability": lambda i: self.capability,
            "nvmlDeviceGetComputeRunningProcesses": lambda i: self.processes if i == 1 else [],
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
            "nvmlSystemGetDriverVersion": lambda: "580.159.04",
        }
        return recorded[name]


def test_a_free_machine_is_described():
    """Two free H200s: memory, driver and backend are said; NVML is closed again."""
    nvml = StandIn()
    machine = gpus.read_machine(nvml)
    assert not nvml.open
    assert [g.index for g in machine.gpus] == [0, 1]
    assert gpus.check_memory(machine, 2, 0.9, 100 * GIB) == (
        "2 x NVIDIA H200, at least 139.8 of 140.4 GiB free; weights 50.0 GiB a rank"
    )
    assert gpus.check_driver(machine, "13.0") == "driver 580.159.04 runs CUDA 13.0, torch is built for 13.0"


def test_visible_devices_are_followed():
    """CUDA_VISIBLE_DEVICES by number or UUID chooses and orders; an empty one hides all."""
    assert [g.index for g in gpus.read_machine(StandIn(), "1,0").gpus] == [1, 0]
    assert [g.index for g in gpus.read_machine(StandIn(), "GPU-b").gpus] == [1]
    with pytest.raises(ValueError, match="--tp-size 1: only 0 GPUs are visible"):
        gpus.check_memory(gpus.read_machine(StandIn(), ""), 1, 0.9, 0)


def test_a_gpu_that_others_hold_is_refused_with_their_names():
    """GPU 1 has 20 GiB free of 140.4 and 0.8 of it are wanted: the process that holds the rest is named (E11)."""
    holder = SimpleNamespace(pid=os.getpid(), usedGpuMemory=118 * GIB)
    elsewhere = SimpleNamespace(pid=2**22 - 1, usedGpuMemory=None)
    machine = gpus.read_machine(StandIn((150_121_611_264, 20 * GIB), processes=[holder, elsewhere]))
    assert gpus.check_memory(machine, 1, 0.8, GIB)
    with pytest.raises(ValueError, match="GPU 1: 20.0 of 140.4 GiB are free") as refused:
        gpus.check_memory(machine, 2, 0.8, GIB)
    assert f"process {os.getpid()} (" in str(refused.value) and "118.0 GiB" in str(refused.value)
    assert "another container, unknown)" in str(refused.value)


def test_weights_that_cannot_fit_are_refused():
    """540 GB on two GPUs of 140 GiB."""
    with pytest.raises(ValueError, match=r"GPU 0: 251 GiB of weights a rank do not fit .* raise --tp-size 2"):
        gpus.check_memory(gpus.read_machine(StandIn()), 2, 0.9, 540 * 10**9)


def test_a_driver_older_than_torchs_cuda_is_refused():
    """CUDA 13 driver: torch for 13.2 runs (same generation), torch for 14.0 does not, a CPU torch is said to be one."""
    machine = gpus.read_machine(StandIn())
    assert gpus.check_driver(machine, "13.2")
    with pytest.raises(ValueError, match="runs CUDA up to 13.0, torch was built for 14.0"):
        gpus.check_driver(machine, "14.0")
    with pytest.raises(ValueError, match="without CUDA"):
        gpus.check_driver(machine, None)


def test_no_driver_is_refused():
    """NVML that does not start is one clear line."""
    nvml = StandIn()
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(StandIn.NVMLError("Driver Not Loaded"))
    with pytest.raises(ValueError, match="the NVIDIA driver does not answer: Driver Not Loaded"):
        gpus.read_machine(nvml)


def test_attention_backend_by_capability(monkeypatch):
    """MLA: Hopper has FlashAttention's, Blackwell B200 FlashInfer's, SM120 Triton's alone; the environment wins."""
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)
    found = [gpus.attention_backend(c, True).split(",")[0] for c in ((8, 0), (9, 0), (10, 0), (12, 0))]
    assert found == ["TRITON_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "TRITON_MLA"]
    assert "only dense MLA kernel for SM120" in gpus.attention_backend((12, 0), True)
    assert gpus.attention_backend((9, 0), False) == "FLASH_ATTN"
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHMLA")
    assert gpus.attention_backend((9, 0), True).startswith("FLASHMLA")


class Names:
    """Stands for vLLM's enum of backends: every member is its own name."""

    def __getattr__(self, name):
        return name


def test_backends_are_those_of_the_installed_vllm(monkeypatch):
    """What we say is chosen first is first in vLLM's own list, for each generation with and without MLA.

    vllm.platforms.cuda does not import without CUDA, so its function is taken from the source.
    """
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)
    tree = ast.parse((vllm_source.installed() / "platforms/cuda.py").read_text())
    function = next(n for n in tree.body if getattr(n, "name", "") == "_get_backend_priorities")
    scope = {"AttentionBackendEnum": Names(), "cache": functools.cache}
    exec("from __future__ import annotations\n" + ast.unparse(function), scope)
    first = {
        (major, mla): scope["_get_backend_priorities"](mla, DeviceCapability(major, 0))[0]
        for major in (9, 10, 12)
        for mla in (True, False)
    }
    assert {k: gpus.attention_backend((k[0], 0), k[1]).split(",")[0] for k in first} == first


def test_the_rows_about_gpus(tiny_kimi, tmp_path, monkeypatch):
    """One GPU machine's rows: memory, driver, attention for MLA, and a note where no compiler is found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    table = preflight.Table()
    wanted = options(tiny_kimi, tmp_path, tmp_path, tp_size=2)
    preflight.examine_gpus(table, gpus.read_machine(StandIn(capability=(12, 0))), wanted, Target.open(tiny_kimi))
    rows = {name: (verdict, found) for name, verdict, found in table.rows}
    assert rows["GPU memory"][0] == rows["driver"][0] == "ok"
    assert rows["attention"] == ("ok", "compute capability 12.0: TRITON_MLA, the only dense MLA kernel for SM120")
    assert rows["compiler"][0] == "note" and "no nvcc" in rows["compiler"][1]
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert preflight._cuda_compiler() == str(nvcc)


def test_all_refusals_are_shown_at_once(tiny_llama, tmp_path):
    """A foreign data file does not hide that the folder cannot be written: both are rows, the first is the error."""
    data = write_prepared(tmp_path / "prepared", tiny_llama, [8])
    (tmp_path / "file").touch()
    wanted = options(tiny_llama, data, tmp_path / "file", max_seq_len=7)
    table, extraction = preflight.examine(wanted)
    assert extraction is None
    assert [name for name, verdict, _ in table.rows if verdict == "REFUSED"] == ["data", "output folder"]
    with pytest.raises(ValueError, match=r"--max-seq-len 7: 1 of 1 samples .* \(and 1 more, see above\)"):
        preflight.require(wanted)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", {"num_attention_heads": None}, "has no 'num_attention_heads'"),
        ("config.json", {"max_position_embeddings": "64"}, "found '64' as 'max_position_embeddings'"),
        ("config.json", {"num_hidden_layers": "six"}, "found 'six' as 'num_hidden_layers'"),
        ("config.json", {"hidden_size": True}, "found True as 'hidden_size'"),
        ("config.json", {"text_config": [1]}, "has no 'num_hidden_layers'"),
        ("config.json", {"architectures": 5}, "expected a list of architectures, found 5"),
        ("tokenizer_config.json", {"chat_template": 7}, "its chat_template is no text: 7"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": 7}]}, "is no text: 7"),
        ("model.safetensors.index.json", {"metadata": {}}, "has no weight_map"),
        ("model.safetensors.index.json", {"weight_map": {"a": 3}}, "has no weight_map"),
    ],
)
def test_a_broken_folder_of_a_model_is_refused_naming_the_file(tiny_llama, tmp_path, file, content, said):
    """A config without what the checks need, or with something else there, is a refusal: no note, no traceback."""
    data, model = write_prepared(tmp_path / "prepared", tiny_llama, [8]), tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    if "chat_template" in content:
        (model / "chat_template.jinja").unlink(missing_ok=True)
    before = files.read_json(model / file) if (model / file).is_file() else {}
    files.write_json(model / file, before | content)
    table, extraction = preflight.examine(options(model, data, tmp_path / "out"))
    assert extraction is None
    assert f"{model}/{file}: " in table.refusals[0] and said in table.refusals[0]


def test_a_chat_template_that_is_no_text_is_named(tiny_llama, tmp_path):
    """Text files are read as UTF-8 whatever the locale says, and the file is named when it is none."""
    shutil.copytree(tiny_llama, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="model/chat_template.jinja: not UTF-8 text"):
        Target.open(tmp_path / "model").chat_template  # noqa: B018


def test_an_index_that_names_the_wrong_file_is_refused(tiny_llama, tmp_path):
    """As when files of two downloads are mixed: a whole file, without the tensor that the index promises."""
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    save_file({"other": torch.zeros(1)}, model / "other.safetensors")
    names = dict.fromkeys(Target.open(model).weight_files, "other.safetensors")
    files.write_json(model / "model.safetensors.index.json", {"weight_map": names})
    with pytest.raises(
        ValueError, match="other.safetensors: does not hold model.norm.weight, though the index says so"
    ):
        Target.open(model).fingerprint  # noqa: B018


def test_json_nested_without_end_is_refused(tmp_path):
    """Python's parser gives up with a RecursionError."""
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        Target.open(tmp_path)


def test_prepared_metadata_with_another_type_is_refused(tiny_llama, tmp_path):
    """A target that is no mapping, or holds no hashes, is not as stage 1 wrote it."""
    data = write_prepared(tmp_path / "prepared", tiny_llama, [8])
    path = data.with_name("metadata.json")
    whole = files.read_json(path)
    for target, said in (("a", "has 'target': 'a'"), (None, "has 'target': None"), ({"config": 7}, "another target")):
        files.write_json(path, whole | {"target": target})
        table, _ = preflight.examine(options(tiny_llama, data, tmp_path / "out"))
        assert said in table.refusals[0]


def test_host_memory_is_bounded_and_compared(tiny_llama, tmp_path):
    """Three steps of 64 tokens x 1,029 bytes, whatever the data; a step of a thousand billion tokens is refused."""
    data = write_prepared(tmp_path / "prepared", tiny_llama, [8])
    planned = extract.plan_extraction(options(tiny_llama, data, tmp_path / "out"))
    assert planned.ring_bytes == 3 * 64 * (4 * 64 * 4 + 5)
    table, _ = preflight.examine(options(tiny_llama, data, tmp_path / "out", batch_size=10**9))
    assert [r for r in table.refusals if "GB for states on their way" in r]


def test_leftover_engines_are_found(tmp_path):
    """A process titled as vLLM's engines whose driver is dead is named; one with a driver is not."""
    program = textwrap.dedent("""
        import os, time
        from setproctitle import setproctitle
        if os.fork():
            os._exit(0)
        setproctitle("VLLM::EngineCore")
        open("pid", "w").write(str(os.getpid()))
        time.sleep(60)
    """)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.01)
    orphan = psutil.Process(int((tmp_path / "pid").read_text()))
    try:
        found = [p for p in preflight._engine_processes() if p[0] == orphan.pid]
        assert [title for _, title, _ in found] == ["VLLM::EngineCore"]
        above_it = ["/sbin/init"]  # of a machine; in a container process 1 may be anything
        with pytest.raises(LookupError, match=f"VLLM::EngineCore of a run that died .*: kill {orphan.pid}"):
            preflight._no_leftover_engines([(orphan.pid, "VLLM::EngineCore", above_it)])
    finally:
        orphan.kill()
    driven = (7, "VLLM::Worker_TP0", ["VLLM::EngineCore", "python 02_extract_hidden_states.py", "/sbin/init"])
    assert preflight._no_leftover_engines([driven]) == "none left over"


@pytest.mark.parametrize(
    "architecture", ["KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM"]
)
def test_the_route_read_from_source_is_that_of_the_class(architecture):
    """Reading the installed vLLM's source says what importing the class says."""
    from vllm.model_executor.models.registry import ModelRegistry

    found = vllm_source.capture_route(architecture, True, vllm_source.installed())
    model = ModelRegistry._try_load_model_cls(architecture)
    assert found.startswith("set_aux_hidden_state_layers") == hasattr(model, "set_aux_hidden_state_layers")


DEEPSEEK = """
class DeepseekV2DecoderLayer:
    def forward(self, positions, hidden_states, residual, llama_4_scaling=None): ...
class DeepseekV2Model:
    def embed_input_ids(self, ids): ...
    def forward(self, input_ids, positions, intermediate_tensors, inputs_embeds=None): ...
class DeepseekV2ForCausalLM: ...
class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM): ...
"""


def test_a_vllm_without_the_interface_takes_the_patched_route(tmp_path):
    """As in 0.16: DeepseekV3 by the patched forward, another family or another signature refused with the reason."""
    models = tmp_path / vllm_source.MODELS
    models.mkdir(parents=True)
    registry = '_M = {"DeepseekV3ForCausalLM": ("deepseek_v2", "DeepseekV3ForCausalLM"), "Own": ("own", "Own")}'
    (models / "registry.py").write_text(registry)
    (models / "deepseek_v2.py").write_text(DEEPSEEK)
    (models / "own.py").write_text("from .deepseek_v2 import DeepseekV2ForCausalLM as B\nclass Own(B): ...")
    said = vllm_source.capture_route("DeepseekV3ForCausalLM", True, tmp_path)
    assert said.startswith("patched DeepseekV2Model.forward: DeepseekV3ForCausalLM in deepseek_v2.py has no")
    assert vllm_source.capture_route("Own", True, tmp_path).startswith("patched")
    with pytest.raises(ValueError, match="not of the DeepseekV2 family"):
        vllm_source.capture_route("DeepseekV3ForCausalLM", False, tmp_path)
    with pytest.raises(LookupError, match="does not name Absent"):
        vllm_source.capture_route("Absent", True, tmp_path)
    older = tmp_path / "older"
    (older / vllm_source.MODELS).mkdir(parents=True)
    (older / vllm_source.MODELS / "registry.py").write_text(registry)
    changed = DEEPSEEK.replace(", llama_4_scaling=None", "")
    (older / vllm_source.MODELS / "deepseek_v2.py").write_text(changed)
    with pytest.raises(
        ValueError, match=r"DeepseekV2DecoderLayer.forward takes \['self', 'positions', 'hidden_states'"
    ):
        vllm_source.capture_route("DeepseekV3ForCausalLM", True, older)
