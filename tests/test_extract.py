"""Extraction on a tiny Llama: chunked prefill, batches larger than a step, wrong layers caught, and every refusal."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from eagle3 import extract, files, prepared, shards, vocab
from eagle3.shards import ShardSet
from eagle3.target import Target
from tests import hf_states, stages

LAYERS = [1, 2, 3, 5]
LENGTHS = [37, 5, 48, 64, 1, 40, 33, 44, 64, 39, 41, 2]


def write_prepared(folder, model_path, lengths=LENGTHS, vocab_size=None):
    """Random prepared samples of these lengths; the last two thirds of each are supervised."""
    folder.mkdir(parents=True)
    target, rng = Target.open(model_path), np.random.default_rng(0)
    with open(folder / prepared.DATA, "w") as file:
        for i, n in enumerate(lengths):
            mask = (np.arange(n) >= n // 3).astype(np.uint8)
            ids = rng.integers(0, vocab_size or target.vocab_size, n).astype(np.int32)
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


def test_chunked_prefill_and_batches_larger_than_a_step(tiny_llama, data, tmp_path):
    """12 samples of 1 to 64 tokens, 64 tokens a step, so that prompts are cut into chunks and mixed in steps: every
    row equals Transformers', and small shards (2 KB a token) leave several files."""
    planned = extract.plan_extraction(options(tiny_llama, data, tmp_path / "states", shard_bytes=100_000))
    assert len(planned.plan) > 2
    run_in_process(planned)
    states = ShardSet(tmp_path / "states")
    assert states.lengths.tolist() == LENGTHS
    assert states.sample_ids == [f"s{i}" for i in range(len(LENGTHS))]
    assert hf_states.worst_error(tiny_llama, states) < 1e-4
    assert [s.faults() for s in states.shards] == [[]] * len(planned.plan)


def run_in_process(planned: extract.Extraction) -> None:
    with files.locked(planned.folder):
        extract.extract(planned)


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ("OffByOneWorker", "layer 1: what was captured is not what decoder layer 1 put out"),
        ("WrongLastLayerWorker", "it is not the last layer's output"),
    ],
)
def test_a_wrong_layer_stops_the_run(tiny_llama, data, tmp_path, worker, said):
    """Captured one layer off on purpose, the run stops, says what disagrees, and leaves no shard behind."""
    planned = extract.plan_extraction(
        options(tiny_llama, data, tmp_path / "states", worker=f"tests.wrong_layer_worker.{worker}")
    )
    with pytest.raises(RuntimeError, match=said):
        run_in_process(planned)
    assert list((tmp_path / "states").glob("*shard*")) == []


# What follows needs no engine: everything is refused before one is started.


def refused(*command) -> str:
    """The one line of a command that must be refused before any work: exit code 2."""
    result = stages.run(*command)
    assert result.returncode == 2, result.stdout
    assert "Traceback" not in result.stdout
    return result.stdout.strip().splitlines()[-1]


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
    assert "was made with another target" in line and "tokenizer" in line or "config" in line


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
    extract.files.write_json(tmp_path / shards.METADATA, planned.metadata)
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
