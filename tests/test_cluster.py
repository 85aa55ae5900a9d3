"""Extraction on a local Ray of several engines, one of them killed on the way."""

import dataclasses
import threading
import time

import numpy as np
import psutil
import pytest

from eagle3 import cluster, extract, files, shards
from tests import hf_states, replay
from tests.test_extract import LAYERS, write_prepared

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="Ray is an optional extra")


def planned(model, folder, num_samples, shard_bytes) -> extract.Extraction:
    lengths = np.random.default_rng(1).integers(1, 65, num_samples).tolist()
    data = write_prepared(folder / "prepared", model, lengths)
    options = extract.Options(
        model_path=model, prepared_data=data, output_dir=folder / "states", batch_size=2, max_seq_len=64,
        layer_ids=LAYERS, shard_bytes=shard_bytes, ray_address="local",
    )  # fmt: skip
    return extract.plan_extraction(options)


def kill_an_engine(folder) -> None:
    """Once the first shard is there, SIGKILL one of the actors."""
    while not shards.shard_paths(folder):
        time.sleep(0.01)
    below = psutil.Process().children(recursive=True)
    next(p for p in below if " ".join(p.cmdline()).startswith("ray::Engine")).kill()


def run_with_a_kill(extraction: extract.Extraction, **changes) -> None:
    killer = threading.Thread(target=kill_an_engine, args=(extraction.folder,))
    killer.start()
    with files.locked(extraction.folder):
        extract.extract(extraction, drive=cluster.many_engines, **changes)
    killer.join()


def test_an_engine_that_dies_is_replaced(tiny_llama, tmp_path, capfd):
    """Replayed engines share the shards; one is killed, another takes its place, and the set is bitwise that of one
    engine, each sample once, the counts adding up."""
    extraction = planned(tiny_llama, tmp_path, 300, 500_000)
    run_with_a_kill(extraction, start=replay.start_slowly)
    log = capfd.readouterr().out
    assert "ray: an engine died" in log
    assert "300 written + 0 skipped (finished before) + 0 failed = 300 input" in log
    assert len(list(tmp_path.glob("engine-*"))) >= 3
    assert shards.verify(extraction.folder) == []
    alone = dataclasses.replace(extraction.options, output_dir=tmp_path / "alone", ray_address=None)
    single = extract.plan_extraction(alone)
    replay.run(single)
    assert replay.contents(extraction.folder) == replay.contents(single.folder)


def test_real_engines_share_the_work(tiny_llama, tmp_path, capfd):
    """Two vLLM engines on the CPU, one killed with its actor: every row equals Transformers', no process is left."""
    extraction = planned(tiny_llama, tmp_path, 1500, 400_000)
    run_with_a_kill(extraction)
    log = capfd.readouterr().out
    assert "ray: 2 engines" in log and "ray: an engine died" in log
    assert shards.verify(extraction.folder) == []
    assert hf_states.worst_error(tiny_llama, shards.ShardSet(extraction.folder)) < 1e-4
    time.sleep(2)
    assert [p for p in psutil.Process().children(recursive=True) if p.name().startswith("VLLM")] == []
