"""speculators 0.3.0 and 0.4.0 on vLLM 0.16, CPU: each failure as it comes, then the repaired files.

Every run is a process of its own, as a user's is, with the wheel unpacked into a folder in front of site-packages.
"""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import targets
import torch
from safetensors.torch import load_file
from speculators_wheels import unpack

import fix_custom_worker as fix

HERE = Path(__file__).parent
TOLERANCE = 1e-4  # relative, fp32: norm of the difference over norm of Transformers' states
LENGTHS = {
    "one": [17],
    "three": [5, 33, 20],
    "fourteen": [40, 7, 19, 3, 64, 11, 28, 90, 5, 33, 21, 2, 50, 16],
    "chunked": [3000, 2500, 1800, 1500, 900, 37],  # 9,737 tokens; 8,192 fit one forward
}
MAX_MODEL_LEN = 4096


def batch(name: str) -> list[list[int]]:
    draw = random.Random(name)
    return [[draw.randrange(3, targets.VOCAB_SIZE) for _ in range(length)] for length in LENGTHS[name]]


@dataclass
class Run:
    """What one process of run_generator.py left."""

    code: int
    log: str
    tensors: dict
    facts: dict

    def states(self, call: int, sample: int) -> list[torch.Tensor]:
        names = [f"{call}/{sample}/{index}" for index in range(len(self.tensors))]
        return [self.tensors[name] for name in names if name in self.tensors]


@pytest.fixture
def run(models, tmp_path):
    """run(site, target, batches, tp, **options) in a process of its own."""

    def start(site: Path, target: str, batches: list, tp: int = 1, cache_gib: int = 2, **options: object) -> Run:
        options = {"max_model_len": MAX_MODEL_LEN, "tensor_parallel_size": tp} | options
        job = {
            "model": str(models / target),
            "layer_ids": targets.LAYER_IDS[target],
            "calls": batches,
            "options": options,
        }
        (tmp_path / "job.json").write_text(json.dumps(job))
        environment = os.environ | {
            "PYTHONPATH": str(site),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_MLA_DISABLE": "1",  # "MLA is not supported on CPU." in 0.16
            "OMP_NUM_THREADS": "1",
        }
        out = tmp_path / "states.safetensors"
        process = subprocess.run(
            [sys.executable, str(HERE / "run_generator.py"), str(tmp_path / "job.json"), str(out)],
            env=environment,
            stdin=subprocess.DEVNULL,  # as under nohup: nobody answers a question
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        lines = [line for line in process.stdout.splitlines() if line.startswith('{"errors"')]
        facts = json.loads(lines[-1]) if lines else {}
        return Run(process.returncode, process.stdout, load_file(out) if lines else {}, facts)

    return start


def repaired_site(version: str, site: Path) -> Path:
    unpack(version, site)
    assert fix.main(["--apply", "--site", str(site)]) == fix.FINE
    return site


def partly_repaired_site(version: str, site: Path, names: set, edits: dict | None = None) -> Path:
    """A site with the repairs of these names only, and further replacements of text."""
    unpack(version, site)
    known = {repair.name for repair in fix.REPAIRS if version in repair.shipped}
    assert names <= known, names - known
    for file in (fix.WORKER, fix.GENERATOR):
        path = site / "speculators" / "data_generation" / file
        source = path.read_text()
        for repair in fix.repairs_of(file, version):
            if repair.name in names:
                source = source.replace(repair.shipped[version], repair.repaired)
        for old, new in (edits or {}).items():
            source = source.replace(old, new)
        path.write_text(source)
    return site


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.float() - expected).norm() / expected.norm())


def worst_error(run: Run, reference: targets.Reference, calls: list) -> float:
    """Over all samples and layers of all calls; also checks that each sample came back in its place, in fp32."""
    worst = 0.0
    for call, samples in enumerate(calls):
        for sample, ids in enumerate(samples):
            assert run.tensors[f"{call}/{sample}/input_ids"].tolist() == ids
            states, expected = run.states(call, sample), reference.states(ids)
            assert len(states) == len(expected)
            assert {layer.dtype for layer in states} == {torch.float32}
            worst = max([worst, *(relative_error(*pair) for pair in zip(states, expected, strict=True))])
    print(f"worst relative error {worst:.1e}")
    return worst


def test_the_contract_of_the_pair_names_three_calls_and_the_repairs_fit(tmp_path):
    """Read off the installed vLLM 0.16: errors 2, 6 and 7 are seen without a run; nothing breaks once repaired."""
    site = unpack("0.3.0", tmp_path / "site")
    command = [sys.executable, str(Path(fix.__file__)), "--check"]
    process = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True)
    assert process.returncode == fix.NEEDS_PATCH, process.stderr
    lines = process.stdout.splitlines()
    repaired = [line.partition("repaired by --apply: ")[2] for line in lines if "repaired by --apply: " in line]
    assert repaired == ["unexpected", "missing", "missing"]
    assert "BREAKS" not in process.stdout and sum(line.endswith(" fits") for line in lines) > 40


# What each failure needs repaired to come up, in the order in which a user met them. Errors 3-11 come after the load.
CHAIN = [
    ("tokenizer's remote code", "kimi", "contains custom code"),
    ("scheduler config", "deepseek-short", "is_encoder_decoder\n  Field required"),
    ("gate only", "deepseek-short", "DeepseekV3ForCausalLM does not support hidden state extraction"),
    ("model gate", "kimi", "'KimiK25ForConditionalGeneration' object has no attribute 'model'"),
    ("KV cache memory", "deepseek-short", "Found no NVIDIA driver"),
    ("KV cache config", "deepseek-short", "unexpected keyword argument 'kv_cache_specs'"),
    ("scheduler's block size", "deepseek-short", "missing 1 required positional argument: 'block_size'"),
    ("embed method", "deepseek-short", "'DeepseekV2Model' object has no attribute 'get_input_embeddings'"),
    ("prefix caching off", "deepseek-short", "assert len(request.block_hashes) >= num_full_blocks"),
    ("result", "deepseek-short", "Boolean value of Tensor with more than one value is ambiguous"),
    ("sampling", "deepseek-short", "State error: sample_tokens() must be called"),
]
# No failure of the eleven, but the tiny Kimi has no vision weights, nor a processor that takes images.
TEXT_ONLY = {"model config", "checkpoint's dtype", "dtype argument"}
# Half repairs, which only the chain needs: one failure of a place repaired, the next one of it left.
HALF_REPAIRS = {
    "gate only": {"if not supports_eagle3(model):": "if False:"},
    "result": {"captured_states_list[0]": "captured_states_list"},
    "sampling": {
        "self.executor.execute_model(scheduler_output)\n": "self.executor.execute_model(scheduler_output)\n"
        "            self.executor.sample_tokens(None)\n"
    },
}


def chain_site(names: list, site: Path, others: set = frozenset()) -> Path:
    """0.3.0 with the failures of these names repaired, whole or half, and other repairs."""
    edits = {}
    for name in names:
        # "model gate" is what comes after "gate only", and takes the place as shipped
        edits |= HALF_REPAIRS.get(name, {}) if not (name == "gate only" and "model gate" in names) else {}
    return partly_repaired_site("0.3.0", site, {*names, *others} - HALF_REPAIRS.keys(), edits)


@pytest.mark.parametrize("number", range(1, len(CHAIN) + 1))
def test_each_failure_of_the_unpatched_pair_comes_when_those_before_it_are_repaired(run, tmp_path, number):
    """Eleven failures, one after the other: with the first n-1 repaired, run fails with the text of the n-th."""
    names = [name for name, _, _ in CHAIN[: number - 1]]
    _, target, message = CHAIN[number - 1]
    site = chain_site(names, tmp_path / "site", TEXT_ONLY if target == "kimi" and number > 1 else set())
    result = run(site, target, [batch("three"), batch("three")])
    text = result.log + str(result.facts)
    assert message in text, text[-3000:]
    failed_calls = {"result": {"0", "1"}, "sampling": {"1"}}.get(CHAIN[number - 1][0])  # the others end the process
    assert set(result.facts["errors"]) == failed_calls if failed_calls else result.code != 0


def test_with_the_eleven_errors_gone_the_states_are_wrong_and_nothing_says_so(run, reference, tmp_path):
    """The faults that raise nothing: bfloat16 for a float32 checkpoint, layers in another order than asked for, wrong
    states and short rows for more than 8,192 tokens, requests held by the worker, an assertion that arrives empty."""
    site = chain_site([name for name, _, _ in CHAIN], tmp_path / "site")
    calls = [batch("three"), batch("chunked")]
    result = run(site, "llama", calls)
    assert result.code == 0 and not result.facts["errors"]
    assert {tensor.dtype for name, tensor in result.tensors.items() if "input_ids" not in name} == {torch.bfloat16}
    assert [len(held) for held in result.facts["workers_hold"]] == [3 + 2]  # of the last step of each call
    assert "Worker failed with error ''" in result.facts["bare_assertion"]
    asked, expected = result.states(0, 0), reference("llama").states(calls[0][0])
    ascending = [targets.LAYER_IDS["llama"].index(layer_id) for layer_id in sorted(targets.LAYER_IDS["llama"])]
    assert relative_error(asked[0], expected[0]) > 0.5  # another layer's
    assert all(relative_error(asked[i], expected[index]) < 0.05 for i, index in enumerate(ascending))  # bfloat16
    rows = [len(result.states(1, sample)[0]) for sample in range(len(calls[1]))]
    assert sum(rows) < sum(LENGTHS["chunked"])
    third, expected = result.states(1, 3)[0], reference("llama").states(calls[1][3])[ascending[0]]
    assert relative_error(third, expected) > 0.5  # whole, but the rows of somebody else


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("target", ["llama", "deepseek", "kimi"])
def test_repaired_0_3_0_gives_the_states_of_transformers(run, reference, tmp_path, target, tp):
    """Calls in a row of 1, 3 and 14 samples and of more than 8,192 tokens: equal states, nothing held afterwards."""
    calls = [batch(name) for name in LENGTHS]
    result = run(repaired_site("0.3.0", tmp_path / "site"), target, calls, tp)
    assert result.code == 0 and not result.facts["errors"], result.log[-3000:]
    assert worst_error(result, reference(target), calls) < TOLERANCE
    assert result.facts["workers_hold"] == [[]] * tp and result.facts["scheduler_holds"] == []
    assert "Asynchronous scheduling is disabled" in result.log
    assert "in bare_assertion" in result.facts["bare_assertion"]
    assert "AssertionError" in result.facts["bare_assertion"]


@pytest.mark.parametrize(("target", "tp"), [("llama", 2), ("deepseek", 1), ("kimi", 1)])
def test_repaired_0_4_0_gives_the_states_of_transformers(run, reference, tmp_path, target, tp):
    """The same for 0.4.0."""
    calls = [batch(name) for name in LENGTHS]
    result = run(repaired_site("0.4.0", tmp_path / "site"), target, calls, tp)
    assert result.code == 0 and not result.facts["errors"], result.log[-3000:]
    assert worst_error(result, reference(target), calls) < TOLERANCE
    assert result.facts["workers_hold"] == [[]] * tp and result.facts["scheduler_holds"] == []
    assert "Asynchronous scheduling is disabled" in result.log


def test_unpatched_0_4_0_refuses_the_tokenizer_of_kimi(run, tmp_path):
    """0.4.0's first: the tokenizer's remote code."""
    result = run(unpack("0.4.0", tmp_path / "site"), "kimi", [batch("one")])
    assert result.code != 0 and "contains custom code" in result.log


def test_unpatched_0_4_0_mixes_the_samples_of_a_batch_of_fourteen(run, reference, tmp_path):
    """0.4.0's others: sorted() puts req_0_10 before req_0_2, so that sample 2 comes back as sample 10; and async
    scheduling is on. Only the KV cache's size is repaired, without which 0.4.0 does not start on CPU."""
    site = partly_repaired_site("0.4.0", tmp_path / "site", {"KV cache memory"})
    calls = [batch("fourteen")]
    result = run(site, "llama", calls)
    assert result.code == 0, result.log[-3000:]
    came_back = [result.tensors[f"0/{sample}/input_ids"].tolist() for sample in range(14)]
    assert came_back == [calls[0][i] for i in (0, 1, 10, 11, 12, 13, 2, 3, 4, 5, 6, 7, 8, 9)]
    assert "Asynchronous scheduling is enabled" in result.log
    assert [len(held) for held in result.facts["workers_hold"]] == [14]


def test_llama_4_scaling_reaches_the_layers(run, reference, tmp_path):
    """A DeepseekV3 whose config has llama_4_scaling from position 8 on: Transformers' states with scaled queries."""
    calls = [batch("three")]
    result = run(repaired_site("0.3.0", tmp_path / "site"), "llama-4-scaling", calls)
    assert result.code == 0 and not result.facts["errors"], result.log[-3000:]
    assert worst_error(result, reference("llama-4-scaling"), calls) < TOLERANCE
    unscaled = worst_error(result, reference("deepseek-short"), calls)
    assert unscaled > 100 * TOLERANCE  # the same weights: the scaling is what makes the difference


@pytest.mark.parametrize("target", ["llama-4-scaling", "gemma"])
def test_a_forward_that_differs_from_vllms_own_is_refused_at_the_first_batch(run, tmp_path, target):
    """Without the repair of the layer call the scaling is left out; Gemma scales its embeddings, which no version of
    speculators does. Both would give wrong states without a word."""
    site = repaired_site("0.3.0", tmp_path / "site")
    worker = site / "speculators" / "data_generation" / fix.WORKER
    repair = next(repair for repair in fix.REPAIRS if repair.name == "layer call")
    if target == "llama-4-scaling":
        worker.write_text(worker.read_text().replace(repair.repaired, repair.shipped["0.3.0"]))
    result = run(site, target, [batch("three")])
    assert result.facts, result.log[-3000:]
    assert "of vLLM disagree: relative error" in result.facts["errors"]["0"]
    assert "_proving_forward" in result.facts["errors"]["0"]


def test_a_sample_longer_than_the_kv_cache_fails_by_name_and_the_next_call_works(run, reference, tmp_path):
    """61 layers leave room for some 11,000 tokens in 1 GiB: 12,500 don't fit, and are not returned short."""
    long = [[3 + i % 250 for i in range(12_500)]]
    calls = [long, batch("three")]
    site = repaired_site("0.3.0", tmp_path / "site")
    result = run(site, "deepseek", calls, cache_gib=1, max_model_len=16_384)
    assert "token_ids[0] has 12500 tokens, but the rows captured" in result.facts["errors"]["0"]
    assert all(
        relative_error(found, expected) < TOLERANCE
        for sample, ids in enumerate(calls[1])
        for found, expected in zip(result.states(1, sample), reference("deepseek").states(ids), strict=True)
    )
    assert result.facts["workers_hold"] == [[]]
