"""Extraction with a real engine: every schedule, wrong layers, kills, both routes; and the refusal of every flag."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from eagle3 import capture, cli, cluster, extract, files, prepared, shards, vocab
from eagle3.shards import ShardSet
from eagle3.target import Target
from tests import hf_states, replay, stages

LAYERS = [1, 2, 3, 5]
KIMI_LAYERS = [2, 30, 58, 60]
LENGTHS = [37, 5, 48, 64, 1, 40, 33, 44, 64, 39, 41, 2]
TWIN, KIN = 8, 6  # have the tokens of sample 3, and its first 32: a block of vLLM's cache


def write_prepared(folder, model_path, lengths=LENGTHS, vocab_size=None):
    """Random prepared samples of these lengths; the last two thirds of each are supervised."""
    folder.mkdir(parents=True)
    target, rng = Target.open(model_path), np.random.default_rng(0)
    tokens = [rng.integers(0, vocab_size or target.vocab_size, n).astype(np.int32) for n in lengths]
    if lengths == LENGTHS:
        tokens[TWIN] = tokens[3]
        tokens[KIN][:32] = tokens[3][:32]
    with open(folder / prepared.DATA, "w") as file:
        for i, ids in enumerate(tokens):
            mask = (np.arange(len(ids)) >= len(ids) // 3).astype(np.uint8)
            prepared.write_row(file, prepared.Row(f"s{i}", ids, mask))
    vocab.DraftVocab(target.vocab_size).save(folder)
    prepared.write_metadata(folder, {"target": target.fingerprint, "settings": {}})
    return folder / prepared.DATA


@pytest.fixture(scope="module")
def data(tiny_llama, tmp_path_factory):
    return write_prepared(tmp_path_factory.mktemp("data") / "prepared", tiny_llama)


def flags(model, data, output, **changes):
    given = {"model-path": model, "prepared-data": data, "output-dir": output, "batch-size": 1, "max-seq-len": 64}
    given["layer-ids"] = LAYERS
    given |= {k.replace("_", "-"): v for k, v in changes.items()}
    listed = [x for k, v in given.items() for x in (f"--{k}", *(v if isinstance(v, list) else [v]))]
    return ["02_extract_hidden_states.py", *listed]


def options(model, data, output, **changes) -> extract.Options:
    given = extract.Options(
        model_path=model, prepared_data=data, output_dir=output, batch_size=1, max_seq_len=64, layer_ids=LAYERS
    )
    return dataclasses.replace(given, **changes)


def run_in_process(planned: extract.Extraction, **changes) -> None:
    with files.locked(planned.folder):
        extract.extract(planned, **changes)


def test_every_schedule_gives_the_same_states(tiny_llama, data, tmp_path):
    """Chunks of 16 tokens, four prompts at a time, a KV cache of five blocks, so that prompts are preempted and start
    again; samples of 1 token, of exactly --max-seq-len, twice the same, two with one beginning, small shards: every row
    equals Transformers' (E3, E4)."""
    started = []

    def start(extraction):
        block = 32 * 6 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, heads, head size, bytes
        started.append(
            extract.start_engine(
                extraction, block_size=32, kv_cache_memory_bytes=5 * block, long_prefill_token_threshold=16,
                scheduler_reserve_full_isl=False, disable_log_stats=False,
            )
        )  # fmt: skip
        return started[0]

    planned = extract.plan_extraction(options(tiny_llama, data, tmp_path / "states", shard_bytes=100_000))
    assert len(planned.plan) > 2
    run_in_process(planned, start=start)
    counters = {m.name: m.value for m in started[0].get_metrics() if hasattr(m, "value")}
    assert counters["vllm:num_preemptions"] > 0
    assert not started[0].llm_engine.vllm_config.cache_config.enable_prefix_caching
    states = ShardSet(tmp_path / "states")
    assert states.lengths.tolist() == LENGTHS
    assert states.sample_ids == [f"s{i}" for i in range(len(LENGTHS))]
    assert states[TWIN].input_ids.tolist() == states[3].input_ids.tolist()
    assert states[KIN].input_ids[:32].tolist() == states[3].input_ids[:32].tolist()
    assert hf_states.worst_error(tiny_llama, states) < 1e-4
    assert shards.verify(tmp_path / "states") == []


@pytest.mark.slow
def test_a_compiled_target_gives_the_same_states(tiny_llama, data, tmp_path):
    """With --compile the first step is computed both ways and agrees; every row of that step and of the compiled ones
    after it equals Transformers'."""
    planned = extract.plan_extraction(options(tiny_llama, data, tmp_path / "states", compile=True))
    run_in_process(planned)
    assert hf_states.worst_error(tiny_llama, ShardSet(tmp_path / "states")) < 1e-4


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ("OffByOneWorker", "layer 1: what was captured is not what decoder layer 1 put out"),
        pytest.param("WrongLastLayerWorker", "it is not the last layer's output", marks=pytest.mark.slow),
        pytest.param("ThreeLayersWorker", "the target returned 3 layers, expected 4", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_layer_stops_the_run(tiny_llama, data, tmp_path, worker, said, capfd):
    """Captured one layer off on purpose, or one too few, the run stops, says what disagrees, and leaves no shard behind
    (E1, E2)."""
    planned = extract.plan_extraction(
        options(tiny_llama, data, tmp_path / "states", worker=f"tests.wrong_layer_worker.{worker}")
    )
    with pytest.raises(RuntimeError) as stopped:
        run_in_process(planned)
    log = capfd.readouterr()
    assert said in str(stopped.value) + log.out + log.err
    assert list((tmp_path / "states").glob("shard*")) == []


@pytest.mark.slow
def test_a_worker_out_of_memory_ends_the_run(tiny_llama, data, tmp_path, capfd):
    """An exception of a real worker: its traceback in the log, the samples in flight named, no engine left."""
    worker, before = "tests.oom_worker.OutOfMemoryWorker", engines_of(os.getpid())
    planned = extract.plan_extraction(options(tiny_llama, data, tmp_path / "states", worker=worker))
    with pytest.raises(RuntimeError, match=r"\d+ samples were in flight: s\d+, s.*; its traceback is above"):
        run_in_process(planned)
    log = "".join(capfd.readouterr())
    assert "Traceback" in log and "oom_worker.py" in log and "OutOfMemoryError: CUDA out of memory. Tried to" in log
    assert list((tmp_path / "states").glob("shard*")) == []
    assert files.read_json(tmp_path / "states" / "status.json")["state"] == "failed"
    assert engines_of(os.getpid()) == before


@pytest.mark.slow
def test_killed_workers_and_drivers_of_a_real_run(tiny_llama, tmp_path):
    """kill -9 of the engine: exit code 1, the samples in flight named, no hang. SIGTERM while loading, and Ctrl-C,
    which the engine hears too: ends at once. kill -9 of the driver: no process is left. Then the same command: finished
    shards untouched, and every row equals Transformers' (E11)."""
    lengths = np.random.default_rng(2).integers(30, 65, 3000).tolist()
    data = write_prepared(tmp_path / "prepared", tiny_llama, lengths)
    out = tmp_path / "states"
    command = [sys.executable, "-c", SMALL_SHARDS, *map(str, flags(tiny_llama, data, out)[1:])]
    log = (tmp_path / "log").open("w+")

    def start():
        return subprocess.Popen(
            command, cwd=stages.ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip

    def start_to_load():
        run = start()
        wait_for(lambda: files.read_json(out / "status.json")["state"] == "loading" and engines_of(run.pid), run)
        return run, engines_of(run.pid)

    run = start()
    wait_for(lambda: len(shards.shard_paths(out)) >= 2, run)
    for engine in engines_of(run.pid):
        engine.kill()
    assert run.wait(timeout=120) == 1
    text = (tmp_path / "log").read_text()
    assert "samples were in flight: s" in text
    assert files.read_json(out / "status.json")["state"] == "failed"
    run, family = start_to_load()
    time.sleep(3)  # into vLLM's own waiting
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(timeout=60) == cli.INTERRUPTED
    assert psutil.wait_procs(family, timeout=20)[1] == []
    assert "interrupted by Ctrl-C; the same command goes on" in (tmp_path / "log").read_text()
    run, family = start_to_load()
    run.terminate()
    assert run.wait(timeout=60) == cli.INTERRUPTED
    assert psutil.wait_procs(family, timeout=20)[1] == []
    assert "stopped on request while the target was loading" in (tmp_path / "log").read_text()
    run = start()
    done = len(shards.shard_paths(out))
    wait_for(lambda: len(shards.shard_paths(out)) >= done + 2, run)
    family = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    before = replay.finished(out)
    assert start().wait(timeout=300) == 0
    assert before.items() <= replay.finished(out).items()
    assert shards.verify(out) == []
    assert hf_states.worst_error(tiny_llama, ShardSet(out)) < 1e-4


SMALL_SHARDS = """
import sys
sys.argv[0] = "02_extract_hidden_states.py"
from eagle3 import extract
extract.Options.__init__.__kwdefaults__["shard_bytes"] = 200_000
import runpy
runpy.run_path("02_extract_hidden_states.py", run_name="__main__")
"""


def engines_of(pid: int) -> list[psutil.Process]:
    """vLLM's processes below a process."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a short-lived one, such as lscpu
            if process.name().startswith("VLLM"):
                found.append(process)
    return found


def wait_for(condition, run) -> None:
    end = time.monotonic() + 200
    while not condition():
        assert run.poll() is None and time.monotonic() < end, "the run ended, or came to nothing, before it was killed"
        time.sleep(0.01)


@pytest.mark.slow
def test_int4_experts(tiny_kimi, tiny_kimi_int4, tmp_path):
    """The target with INT4 experts inside Kimi's wrapper gives the states of the same numbers unquantised."""
    data = write_prepared(tmp_path / "prepared", tiny_kimi_int4, [5, 30, 64], vocab_size=1000)
    planned = extract.plan_extraction(
        options(
            tiny_kimi_int4, data, tmp_path / "states", layer_ids=KIMI_LAYERS, worker="tests.int4_worker.Int4Capture"
        )
    )
    run_in_process(planned)
    assert hf_states.worst_error(tiny_kimi, ShardSet(tmp_path / "states")) < 1e-4


@pytest.mark.slow
def test_the_patched_route_gives_the_same_states(tiny_kimi, tmp_path, capfd):
    """The installed vLLM's Kimi with the patched forward forced on it equals Transformers as the other route does."""
    data = write_prepared(tmp_path / "prepared", tiny_kimi, [5, 30, 64], vocab_size=1000)
    planned = extract.plan_extraction(
        options(tiny_kimi, data, tmp_path / "states", layer_ids=KIMI_LAYERS, worker="tests.patched_worker.PatchedRoute")
    )
    run_in_process(planned)
    assert "capture route: patched DeepseekV2Model.forward" in capfd.readouterr().out
    assert hf_states.worst_error(tiny_kimi, ShardSet(tmp_path / "states")) < 1e-4


@pytest.mark.slow
def test_rehearsal_of_the_tiny_kimi(tiny_kimi, tmp_path):
    """--rehearse with the real command's flags: two steps of dummy weights are captured, written, read back; nothing
    stays behind but the lock."""
    data = write_prepared(tmp_path / "prepared", tiny_kimi, [64, 64, 30, 5], vocab_size=1000)
    log = stages.succeed(*flags(tiny_kimi, data, tmp_path / "out", layer_ids=KIMI_LAYERS), "--rehearse")
    assert "rehearsal: 2 samples, 128 tokens, dummy weights" in log
    assert "rehearsal passed in" in log
    assert [p.name for p in (tmp_path / "out").iterdir()] == [".lock"]


# What follows needs no engine: everything is refused before one is started.


def refused(*command) -> str:
    """The one line of a command that must be refused before any work: exit code 2."""
    code, log = stages.run_here(*command)
    assert code == 2, log
    assert "Traceback" not in log
    return log.strip().splitlines()[-1]


def test_a_layer_that_is_not_there_is_refused(tiny_kimi, tmp_path):
    """Layer id 61 of 61 layers (0 to 60), unordered ids, and a last id that is not the last layer."""
    data = write_prepared(tmp_path / "prepared", tiny_kimi, [8])

    def said(*ids):
        return refused(*flags(tiny_kimi, data, tmp_path / "out", layer_ids=list(ids)))

    assert "--layer-ids: 61 is not a layer: the target has 61 layers, 0 to 60" in said(2, 30, 58, 61)
    assert "strictly ascending" in said(30, 2, 58, 60)
    assert "the last id must be the target's last layer, 60; found 59" in said(2, 30, 58, 59)
    assert "three" not in said(2, 30, 60) and "expected 3 draft layers and the last layer" in said(2, 30, 60)
    assert not (tmp_path / "out").exists()


def test_data_of_another_tokenizer_is_refused(tiny_kimi, data, tmp_path):
    """Data prepared with the tiny Llama's tokenizer does not run through the tiny Kimi."""
    line = refused(*flags(tiny_kimi, data, tmp_path / "out", layer_ids=[2, 30, 58, 60]))
    assert "was made with another target: its config (" in line and "and tokenizer (" in line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp_size": 3}, "--tp-size 3: does not divide"),
        ({"max_seq_len": 63}, "--max-seq-len 63: 2 of 12 samples are longer, the longest (s3) has 64 tokens"),
        ({"max_seq_len": 100_000}, "--max-seq-len 100000: the target has"),
        ({"batch_size": 0}, "--batch-size"),
        ({"no_such_flag": 1}, "unrecognized arguments: --no-such-flag"),
        ({"model_path": "/no/such/model"}, "--model-path /no/such/model: no such folder"),
        ({"prepared_data": "/no/such/file.jsonl"}, "--prepared-data /no/such/file.jsonl: no such file"),
    ],
)
def test_flags_that_cannot_work_are_refused(tiny_llama, data, tmp_path, changes, said):
    """One clear line that names the flag, exit code 2, nothing written."""
    assert said in refused(*flags(tiny_llama, data, tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_a_draft_vocabulary_of_another_preparation_is_refused(tiny_llama, tmp_path):
    """It would go along with the states: a sound file, of the right target, but not written with the data."""
    data = write_prepared(tmp_path / "prepared", tiny_llama, [8])
    vocab.DraftVocab(Target.open(tiny_llama).vocab_size, np.arange(9)).save(data.parent)
    line = refused(*flags(tiny_llama, data, tmp_path / "out"))
    assert "draft_vocab.json: was changed after it was prepared" in line


@pytest.mark.parametrize(
    ("ids", "mask", "name", "said"),
    [
        ("[1.7, 2]", "[0, 1]", '"a"', "got `float`"),
        ("[true, 2]", "[0, 1]", '"a"', "got `bool`"),
        ('["1", 2]', "[0, 1]", '"a"', "got `str`"),
        ("[1, 2]", "[0, 1.5]", '"a"', "got `float`"),
        ("[1, 99999999999]", "[0, 1]", '"a"', "out of bounds"),
        ("[1, 2]", "[0, 1]", "null", "Expected `str`, got `null`"),
        ("[1, 2]", "[0, 1]", '""', "Expected `str` of length >= 1"),
        ("[" * 100_000, "[0]", '"a"', "Expected `int`, got `array`"),
    ],
)
def test_a_row_of_other_types_is_no_row(ids, mask, name, said):
    """Nothing is rounded, or taken for a number or a name."""
    line = f'{{"id": {name}, "input_ids": {ids}, "loss_mask": {mask}}}'
    with pytest.raises(ValueError, match="data:3: not a prepared row .*" + re.escape(said)):
        prepared.parse_row(line, "data:3")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nonsense", "expected HOST:PORT, auto"),
        ("http://nowhere", "expected HOST:PORT, auto"),
        ("127.0.0.1:1", "nobody answers there"),
    ],
)
def test_a_ray_address_is_tried_before_the_load(address, said, monkeypatch):
    """Ray itself would try for minutes, and with the engines already planned."""
    monkeypatch.setattr(cluster, "find_spec", lambda _: True)
    with pytest.raises(ValueError, match=f"--ray-address {address}: {said}"):
        cluster.check_address(address)
    cluster.check_address("auto")


def test_damaged_data_is_refused(tiny_llama, data, tmp_path):
    """An empty file, a line that is no row, a changed file: named with file and line."""
    folder = tmp_path / "prepared"
    folder.mkdir()
    for source in data.parent.iterdir():
        (folder / source.name).write_bytes(source.read_bytes())
    copy = folder / data.name
    copy.write_text("")
    assert "was changed after it was prepared" in refused(*flags(tiny_llama, copy, tmp_path / "out"))
    metadata = json.loads((folder / prepared.METADATA).read_text())
    prepared.write_metadata(folder, {k: v for k, v in metadata.items() if k not in ("format", "data_sha256")})
    assert "holds no samples" in refused(*flags(tiny_llama, copy, tmp_path / "out"))
    copy.write_text('{"id": "a", "input_ids": [1, 2], "loss_mask": [1]}\n')
    prepared.write_metadata(folder, {k: v for k, v in metadata.items() if k not in ("format", "data_sha256")})
    line = refused(*flags(tiny_llama, copy, tmp_path / "out"))
    assert f"{copy}:1: has 2 input_ids but 1 loss_mask entries" in line


def test_another_setting_in_the_same_folder_is_refused(tiny_llama, data, tmp_path):
    """A folder begun with other layers is refused naming the key; a broken shard is redone."""
    planned = extract.plan_extraction(options(tiny_llama, data, tmp_path))
    files.write_json(tmp_path / shards.METADATA, planned.metadata)
    extract.check_folder(planned)
    other = extract.plan_extraction(options(tiny_llama, data, tmp_path, layer_ids=[0, 2, 3, 5]))
    with pytest.raises(ValueError, match=r"shared.layer_ids: expected \[1, 2, 3, 5\], found \[0, 2, 3, 5\]"):
        extract.check_folder(other)
    (tmp_path / shards.shard_name(0)).write_bytes(b"")
    assert extract.missing_shards(planned) == list(range(len(planned.plan)))
    assert shards.shard_paths(tmp_path) == []


def test_a_second_run_into_one_folder_is_refused(tiny_llama, data, tmp_path):
    """While one process holds the folder, another gets one line that names the first."""
    program = "import sys, pathlib\nfrom eagle3 import files\nwith files.locked(pathlib.Path(sys.argv[1])): pass"
    command = [sys.executable, "-c", program, tmp_path]
    with files.locked(tmp_path):
        second = subprocess.run(command, cwd=stages.ROOT, text=True, capture_output=True)
    assert f"another run writes there (process {os.getpid()})" in second.stderr
    assert subprocess.run(command, cwd=stages.ROOT).returncode == 0


def test_a_disk_that_is_too_small_is_refused(tiny_llama, data, tmp_path, monkeypatch):
    """The need is printed and compared with what is free before anything loads."""
    planned = extract.plan_extraction(options(tiny_llama, data, tmp_path))
    monkeypatch.setattr(extract.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(ValueError, match="the disk has 10 free"):
        extract.check_disk(planned, [0])


def test_check_only_stops_before_the_load(tiny_llama, data, tmp_path):
    """--check-only says what it found and writes nothing."""
    log = stages.succeed(*flags(tiny_llama, data, tmp_path / "out"), "--check-only")
    assert f"12 samples, {sum(LENGTHS)} tokens, the longest 64" in log
    assert "ok       set_aux_hidden_state_layers: LlamaForCausalLM" in log
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enable_prefix_caching": True}, "prefix caching is on: tokens found in the cache are not computed"),
        (
            {"pipeline_parallel_size": 2},
            r"pipeline parallelism \(2 stages\): .* states of earlier stages would be lost",
        ),
    ],
)
def test_engines_that_would_lose_rows_are_refused(tiny_llama, changes, said):
    """The worker looks at vLLM's own configuration: as we start it, it passes; each dangerous setting is refused with
    the reason (E4, E10)."""
    from vllm.engine.arg_utils import EngineArgs

    given = {"model": str(tiny_llama), "skip_tokenizer_init": True, "max_model_len": 65}
    given |= {"enable_prefix_caching": False, "async_scheduling": False}
    config = EngineArgs(**given).create_engine_config()
    capture.check_engine(config)
    with pytest.raises(ValueError, match=said):
        capture.check_engine(EngineArgs(**given | changes).create_engine_config())
    config.scheduler_config.async_scheduling = True  # never so on CPU
    with pytest.raises(ValueError, match="asynchronous scheduling is on"):
        capture.check_engine(config)
