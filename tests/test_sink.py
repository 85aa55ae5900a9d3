"""What rank 0 does with captured rows: when a shard gets its name, and what is refused."""

import numpy as np
import pytest
import torch

from eagle3 import files, shards
from eagle3.capture import Request, Span
from eagle3.sink import ShardSink

LENGTHS = [3, 5]
REQUESTS = [Request(f"r{i}", 0, i, f"s{i}", length) for i, length in enumerate(LENGTHS)]
SPANS = [Span(REQUESTS[0], 0, 0, 3), Span(REQUESTS[1], 0, 3, 8)]
SHARED = {"layer_ids": [0, 1], "layer_convention": "x", "versions": {}, "target": {}}


def content() -> shards.ShardContent:
    return shards.ShardContent(
        index=0, sample_ids=["s0", "s1"], offsets=np.array([0, 3, 8]), input_ids=np.arange(8, dtype=np.int32),
        loss_mask=np.ones(8, np.uint8),
    )  # fmt: skip


def opened(folder, dtype=torch.float32) -> ShardSink:
    """A sink with one open shard of two samples, of 3 and 5 tokens."""
    sink = ShardSink(folder, shards.ShardFormat(2, 4, dtype, SHARED), torch.device("cpu"), 8)
    sink.open([content().message()])
    return sink


def take(sink: ShardSink, states: torch.Tensor) -> None:
    sink.stage(states, SPANS)
    sink.send()


def test_a_shard_is_published_once_it_is_written_and_checked(tmp_path):
    """Whichever comes last, the rows or the self-check's word on every sample, gives the shard its name."""
    for folder, actions in {"rows last": "cr", "check last": "rc"}.items():
        (tmp_path / folder).mkdir()
        sink = opened(tmp_path / folder)
        for action in actions:
            assert shards.shard_paths(tmp_path / folder) == []
            take(sink, torch.ones(8, 2, 4)) if action == "r" else sink.checked(REQUESTS)
        sink.close()
        assert sink.status() == {"finished": [0], "rows": 8, "faults": []}
        assert [p.name for p in shards.shard_paths(tmp_path / folder)] == ["shard-00000.safetensors"]


def test_a_sink_goes_on_after_it_was_closed(tmp_path):
    """An engine that gets several batches of shards closes after each: the next one finds everything as at first."""
    sink = opened(tmp_path)
    for _ in range(2):
        take(sink, torch.ones(8, 2, 4))
        sink.checked(REQUESTS)
        sink.close()
        assert sink.status()["finished"] == [0]
        shards.shard_paths(tmp_path)[0].unlink()
        sink.open([content().message()])


def test_a_thread_that_comes_late_finds_its_shard_published(tmp_path):
    """A writer thread that reports its piece after the shard was published and reported is no fault."""
    sink = opened(tmp_path)
    late = sink._writers[0]
    take(sink, torch.ones(8, 2, 4))
    sink.checked(REQUESTS)
    sink.close()
    assert sink.status()["finished"] == [0]
    sink._publish_if_ready(late)
    assert sink.status() == {"finished": [], "rows": 8, "faults": []}


def test_a_shard_with_an_unchecked_sample_is_not_published(tmp_path):
    """All rows are written, one of two samples has passed the self-check: no final name, and nothing is left over."""
    sink = opened(tmp_path)
    take(sink, torch.ones(8, 2, 4))
    sink.checked(REQUESTS[:1])
    sink.close()
    assert sink.status() == {"finished": [], "rows": 8, "faults": []}
    assert shards.shard_paths(tmp_path) == [] == files.leftovers(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_found(tmp_path, dtype, value, capfd):
    """Wherever it is, in either storage type: the fault names the sample, and the shard gets no name."""
    states = torch.ones(8, 2, 4)
    states[7, 1, 2] = value
    sink = opened(tmp_path, dtype)
    take(sink, states)
    sink.checked(REQUESTS)
    sink.close()
    assert sink.status()["faults"] == ["ValueError: sample 's1': the captured states are not all finite"]
    assert "ValueError" in capfd.readouterr().err
    assert shards.shard_paths(tmp_path) == []
