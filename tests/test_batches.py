"""Packed batches: every sample once an epoch, one order for any number of ranks, states as they were stored."""

import itertools

import numpy as np
import pytest
import torch
from states_folder import random_samples, write_shards

from eagle3.batches import Schedule, check_fit, loss_mask, pack, read_ahead, read_pack, split
from eagle3.shards import Shard, ShardSet

LENGTHS = [5, 9, 3, 12, 7, 4, 10]
CPU = torch.device("cpu")


@pytest.fixture
def samples():
    return random_samples(LENGTHS, num_layers=4, hidden_size=8, vocab_size=50)


@pytest.fixture
def data(tmp_path, samples):
    write_shards(tmp_path / "states", samples)
    return ShardSet(tmp_path / "states")


def test_the_split_of_12501_samples_at_a_fifth_is_disjoint_and_complete():
    """Both halves are cut at one boundary: int(12501 * 0.2) and int(-0.8 * 12501) once gave both halves one sample."""
    ids = [f"row-{i}" for i in range(12501)]
    train, held_out = split(ids, 0.2)
    assert (len(train), len(held_out)) == (10001, 2500)
    assert sorted(train + held_out) == list(range(12501))


def test_the_split_does_not_depend_on_the_order_of_the_samples():
    """A sample that was held out stays so when the shards are in another order."""
    ids = [f"row-{i}" for i in range(100)]
    held_out = {ids[i] for i in split(ids, 0.3)[1]}
    backwards = ids[::-1]
    assert {backwards[i] for i in split(backwards, 0.3)[1]} == held_out
    assert len(held_out) == 30


def test_a_split_with_an_empty_half_is_refused_and_none_is_asked_for_by_zero():
    """0.1 of four samples rounds to none, 0.9 of four to all."""
    for fraction, count in ((0.1, 0), (0.9, 4)):
        with pytest.raises(ValueError, match=rf"--eval-fraction {fraction}: of 4 samples {count} would be held out"):
            split(list("abcd"), fraction)
    assert split(list("abcd"), 0) == ([0, 1, 2, 3], [])


def test_best_fit_by_hand():
    """5 opens a pack (2 free), 4 another (3 free), 3 fits the second alone, 2 the first."""
    assert pack(np.array([5, 4, 3, 2]), range(4), 7) == [[0, 3], [1, 2]]


def test_every_epoch_has_every_sample_once_within_the_budget_and_in_another_order():
    """Packing neither loses nor repeats a sample, and the order depends on seed and epoch alone."""
    lengths = np.random.default_rng(1).integers(1, 100, 300)
    schedule = Schedule(lengths, list(range(0, 300, 2)), budget=128, packs_per_step=4, seed=7, epochs=2)
    first, second = schedule.epoch(0), schedule.epoch(1)
    for steps in (first, second):
        packs = list(itertools.chain(*steps))
        assert sorted(itertools.chain(*packs)) == schedule.samples
        assert all(lengths[p].sum() <= 128 for p in packs)
        assert all(len(step) == 4 for step in steps[:-1])
        assert lengths[schedule.samples].sum() / (128 * len(packs)) > 0.9
    assert first != second
    assert first == Schedule(lengths, schedule.samples, 128, 4, 7, 2).epoch(0)
    assert first != Schedule(lengths, schedule.samples, 128, 4, 8, 2).epoch(0)


def test_a_schedule_goes_on_where_it_stopped_in_the_middle_of_an_epoch():
    """The steps from number k on are those of the uninterrupted schedule, for every k, epochs' ends included."""
    schedule = Schedule(np.full(10, 5), list(range(10)), budget=10, packs_per_step=2, seed=0, epochs=2)
    whole = list(schedule.steps())
    assert len(whole) == len(schedule) == 6
    assert [epoch for epoch, _ in whole] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])
    for first in range(7):
        assert list(schedule.steps(first)) == whole[first:]


def test_a_sample_longer_than_a_pack_is_refused_by_name(data):
    """Nothing is dropped silently: the number, the longest one's name and the length that would do."""
    check_fit(data, 12)
    with pytest.raises(ValueError, match=r"--batch-tokens 9: 2 of 7 samples .* 's3' with 12 tokens"):
        check_fit(data, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pack_holds_what_was_stored(tmp_path, samples, dtype):
    """Ids, mask and states of each sample lie at its offsets, in the captured dtype, across shards."""
    write_shards(tmp_path, samples, dtype=dtype)
    batch = read_pack(ShardSet(tmp_path), [6, 0, 3]).to("cpu")
    assert batch.offsets == [0, 10, 15, 27]
    assert batch.hidden_states.dtype == dtype
    assert (batch.input_ids.dtype, batch.loss_mask.dtype) == (torch.int64, torch.bool)
    for place, (start, end) in zip([6, 0, 3], itertools.pairwise(batch.offsets), strict=True):
        ids, mask, states = samples[place]
        assert batch.input_ids[start:end].tolist() == ids.tolist()
        assert batch.loss_mask[start:end].tolist() == mask.astype(bool).tolist()
        assert torch.equal(batch.hidden_states[start:end], states.to(dtype))


def test_fp8_states_arrive_as_the_shards_own_reader_gives_them(tmp_path, samples):
    """The scales travel beside the bytes and are applied on the device."""
    write_shards(tmp_path, samples, dtype=torch.float8_e4m3fn)
    data = ShardSet(tmp_path)
    batch = read_pack(data, [4, 1])
    assert batch.hidden_states.dtype == torch.float8_e4m3fn
    expected = torch.cat([data[4].hidden_states, data[1].hidden_states])
    assert torch.equal(batch.to("cpu").hidden_states, expected)


def test_batches_come_in_order_and_an_error_of_a_reading_thread_is_raised(data):
    """Threads read ahead; the order is the schedule's, and a sample that does not exist is no silence."""
    packs = [[0], [1, 2], [3], [4], [5], [6], [0, 1]]
    offsets = [batch.offsets for batch in read_ahead(data, packs, CPU)]
    assert offsets == [[0, 5], [0, 9, 12], [0, 12], [0, 7], [0, 4], [0, 10], [0, 5, 14]]
    with pytest.raises(IndexError):
        list(read_ahead(data, [[0], [99]], CPU))


def test_the_mask_of_a_step_is_known_without_reading_states(data, samples):
    """What the global row counts are made of."""
    mask, offsets = loss_mask(data, [5, 2])
    assert offsets == [0, 4, 7]
    assert mask.tolist() == [bool(m) for m in [*samples[5][1], *samples[2][1]]]
    assert loss_mask(data, [])[1] == [0]


def test_a_sample_is_held_against_its_checksum_the_first_time_only(data, monkeypatch):
    """Every byte is looked at once; later epochs cost nothing."""
    looked_at = []
    monkeypatch.setattr(Shard, "_checksum_of", lambda shard, tensors: looked_at.append(len(tensors[0])) or "")
    with pytest.raises(ValueError, match="sample 's1' does not match its checksum"):
        read_pack(data, [1])
    monkeypatch.undo()
    read_pack(data, [1])
    monkeypatch.setattr(Shard, "_checksum_of", lambda shard, tensors: looked_at.append(len(tensors[0])) or "")
    read_pack(data, [1])
    assert looked_at == [9]
