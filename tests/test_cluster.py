"""Extraction on a local Ray of several engines, one of them killed on the way; the engines are replays of known states
(tests/replay.py), everything else is the real thing."""

import dataclasses
import os
import signal
import threading
import time

import numpy as np
import pytest

from eagle3 import extract, shards
from tests import replay
from tests.test_extract import LAYERS, write_prepared

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="Ray is an optional extra")


@pytest.fixture
def planned(tiny_llama, tmp_path):
    lengths = np.random.default_rng(1).integers(1, 65, 300).tolist()
    data = write_prepared(tmp_path / "prepared", tiny_llama, lengths)
    options = extract.Options(
        model_path=tiny_llama, prepared_data=data, output_dir=tmp_path / "states", batch_size=2, max_seq_len=64,
        layer_ids=LAYERS, shard_bytes=500_000, ray_address="local",
    )  # fmt: skip
    return extract.plan_extraction(options)


def kill_an_engine(folder) -> None:
    """Once the first shard is there, SIGKILL one of the engines."""
    while not shards.shard_paths(folder):
        time.sleep(0.01)
    name = sorted(p.name for p in folder.parent.glob("engine-*"))[0]
    os.kill(int(name.removeprefix("engine-")), signal.SIGKILL)


def test_an_engine_that_dies_is_replaced(planned, tmp_path, capfd):
    """Engines share the shards; one is killed, another takes its place, and the set is bitwise that of one engine, each
    sample once, the counts adding up."""
    killer = threading.Thread(target=kill_an_engine, args=(planned.folder,))
    killer.start()
    with extract.files.locked(planned.folder):
        extract.extract(planned, start=replay.start_slowly)
    killer.join()
    log = capfd.readouterr().out
    assert "ray: an engine died" in log
    assert "300 written + 0 skipped (finished before) + 0 failed = 300 input" in log
    engines = list(tmp_path.glob("engine-*"))
    assert len(engines) >= 3
    assert shards.verify(planned.folder) == []
    alone = dataclasses.replace(planned.options, output_dir=tmp_path / "alone", ray_address=None)
    single = extract.plan_extraction(alone)
    replay.run(single)
    assert replay.contents(planned.folder) == replay.contents(single.folder)
