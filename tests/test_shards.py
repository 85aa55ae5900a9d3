"""Shards: what is written is what is read, a final name is always whole, and any damage is found and named."""

import json

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle3 import shards
from eagle3.shards import Shard, ShardContent, ShardFormat, ShardSet, ShardWriter

LENGTHS = (3, 5, 1)
SHARED = {"layer_ids": [1, 2, 3, 4], "layer_convention": "x"}


def content(index=0, ids=("a", "b", "ü")) -> ShardContent:
    total = sum(LENGTHS)
    return ShardContent(
        index=index,
        sample_ids=[f"{i}{index}" for i in ids],
        offsets=np.cumsum([0, *LENGTHS]),
        input_ids=np.arange(total, dtype=np.int32),
        loss_mask=(np.arange(total) % 2).astype(np.uint8),
    )


def states_of(total=9, seed=0):
    return torch.randn(total, 4, 16, generator=torch.Generator().manual_seed(seed))


def stored(states, dtype):
    return shards.quantise_fp8(states) if dtype == torch.float8_e4m3fn else (states.to(dtype), None)


def write(folder, dtype=torch.float32, index=0):
    """A shard whose samples arrive last first, the middle one in two pieces."""
    writer = ShardWriter(folder, content(index), ShardFormat(4, 16, dtype, SHARED))
    states, scale = stored(states_of(), dtype)

    def put(sample, row, start, stop):
        writer.write(sample, row, states[start:stop], None if scale is None else scale[start:stop])

    put(2, 0, 8, 9)
    put(1, 0, 3, 6)
    put(0, 0, 0, 3)
    assert not writer.complete
    put(1, 3, 6, 8)
    return writer.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_what_is_written_is_what_is_read(tmp_path, dtype):
    """Every dtype, samples out of order and in pieces: the stored values come back exactly, ids and masks too."""
    path = write(tmp_path, dtype)
    expected, scale = stored(states_of(), dtype)
    shard = Shard(path)
    assert shard.faults() == []
    assert shard.shared == SHARED | {"format": shards.FORMAT}
    for index, (start, stop) in enumerate([(0, 3), (3, 8), (8, 9)]):
        values, scales = shard.stored(index)
        assert torch.equal(values.view(torch.uint8), expected[start:stop].view(torch.uint8))
        assert scale is None or torch.equal(scales, scale[start:stop])
        sample = shard.sample(index)
        assert sample.input_ids.tolist() == list(range(start, stop))
        assert sample.loss_mask.tolist() == [i % 2 == 1 for i in range(start, stop)]


def test_any_safetensors_reader_reads_a_shard(tmp_path):
    """The file is plain safetensors: the library's own loader gives the tensors with their names and shapes."""
    tensors = load_file(write(tmp_path, torch.float8_e4m3fn))
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "offsets": (4,), "scale": (9, 4), "input_ids": (9,), "hidden_states": (9, 4, 16), "loss_mask": (9,),
    }  # fmt: skip


def test_fp8_error_is_below_its_step(tmp_path):
    """e4m3 has 3 mantissa bits: with one scale a token and layer no value is off by more than 1/16 of itself, or by
    half the smallest step of the row."""
    states = states_of()
    values, scale = shards.quantise_fp8(states)
    error = (values.float() * scale[..., None] - states).abs()
    smallest = scale[..., None] * 2.0**-10
    assert (error <= torch.maximum(states.abs() / 16, smallest) * 1.001).all()
    assert torch.equal(shards.quantise_fp8(torch.zeros(1, 4, 16))[0].float(), torch.zeros(1, 4, 16))


def test_rows_out_of_order_are_refused(tmp_path):
    """A gap within a sample, or more rows than it has, is named and not written."""
    writer = ShardWriter(tmp_path, content(), ShardFormat(4, 16, torch.float32, SHARED))
    with pytest.raises(RuntimeError, match=r"sample 'b0': expected rows from 0 up to 5, captured 2 to 4"):
        writer.write(1, 2, states_of(2))
    with pytest.raises(RuntimeError, match=r"captured 0 to 4"):
        writer.write(0, 0, states_of(4))
    with pytest.raises(RuntimeError, match="not every sample has all its rows"):
        writer.finish()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_sample_that_starts_again_replaces_its_rows(tmp_path):
    """A preempted request is computed again from row 0: the last values count, and the checksum is theirs."""
    writer = ShardWriter(tmp_path, content(), ShardFormat(4, 16, torch.float32, SHARED))
    states = states_of()
    writer.write(1, 0, states_of(2, seed=9))
    for sample, (start, stop) in enumerate([(0, 3), (3, 8), (8, 9)]):
        writer.write(sample, 0, states[start:stop])
    shard = Shard(writer.finish())
    assert shard.faults() == []
    assert torch.equal(shard.sample(1).hidden_states, states[3:8])


def test_finishing_is_claimed_once(tmp_path):
    """Of the threads that see a complete shard exactly one finishes it."""
    writer = ShardWriter(tmp_path, content(), ShardFormat(4, 16, torch.float32, SHARED))
    assert not writer.claim_finish()
    for sample, (start, stop) in enumerate([(0, 3), (3, 8), (8, 9)]):
        writer.write(sample, 0, states_of()[start:stop])
    assert [writer.claim_finish() for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("name", ["hidden_states", "scale", "input_ids", "loss_mask", "offsets"])
def test_one_flipped_bit_is_found(tmp_path, name):
    """A flipped bit in any tensor is a fault that names the file, and the sample where there is one."""
    path = write(tmp_path, torch.float8_e4m3fn)
    raw = bytearray(path.read_bytes())
    header = int.from_bytes(raw[:8], "little")
    start, end = json.loads(raw[8 : 8 + header])[name]["data_offsets"]
    raw[8 + header + (start + end) // 2] ^= 1
    path.write_bytes(raw)
    try:
        faults = Shard(path).faults()
    except ValueError as error:  # damaged offsets may not even open
        faults = [str(error)]
    assert faults
    assert all(str(path) in fault for fault in faults)
    if name in ("hidden_states", "scale"):
        assert faults == [f"{path}: sample 'b0' does not match its checksum"]


@pytest.mark.parametrize(
    ("said", "damaged"),
    [
        ("[1, 2, 3, 4]", "[0, 2, 3, 4]"),  # another layer
        ('\\"a0\\"', '\\"c0\\"'),  # another sample
        ('"index": "0"', '"index": "1"'),
        ('"F32"', '"I32"'),
        ("[9, 4, 16]", "[9, 16, 4]"),
        ('"sample_ids"', '"sample_idr"'),
        ('"checksums"', '"checksumz"'),
        ('"checksum_tokens"', '"checksum_tokenz"'),
        ('"checksum_header"', '"checksum_headez"'),
        ('"layer_convention"', '"layer_conventiom"'),
    ],
)
def test_a_header_that_was_changed_does_not_open(tmp_path, said, damaged):
    """Whatever a header says, one character of it changed: refused by name. Its layer ids decide what 03 trains on."""
    path = write(tmp_path)
    raw = path.read_bytes()
    assert raw.count(said.encode()) == 1
    path.write_bytes(raw.replace(said.encode(), damaged.encode()))
    with pytest.raises(ValueError, match=f"{path}: not a whole shard: its header does not match its checksum"):
        Shard(path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_shard_cut_short_does_not_open(tmp_path, keep):
    """Empty, without a whole header, without its data or one byte short: refused by name; as a set with the remedy."""
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{path.name}: not a whole shard"):
        Shard(path)
    with pytest.raises(ValueError, match=f"{path.name}: not a whole shard: .*; 02_extract_hidden_states.py .*redoes"):
        ShardSet(tmp_path)


def test_nothing_stands_under_the_final_name_before_the_end(tmp_path):
    """Until `finish`, the folder holds a hidden temporary file only."""
    writer = ShardWriter(tmp_path, content(), ShardFormat(4, 16, torch.float32, SHARED))
    writer.write(0, 0, states_of()[:3])
    assert shards.shard_paths(tmp_path) == []
    assert [p.name.startswith(".") for p in tmp_path.iterdir()] == [True]


def test_a_set_is_one_sequence(tmp_path):
    """Samples of all shards in order, with their lengths."""
    write(tmp_path, index=0)
    write(tmp_path, index=1)
    states = ShardSet(tmp_path)
    assert [s.id for s in states] == ["a0", "b0", "ü0", "a1", "b1", "ü1"]
    assert states.lengths.tolist() == [3, 5, 1, 3, 5, 1]
    assert states[4].id == "b1"


def test_shards_that_do_not_belong_together_are_refused(tmp_path):
    """Another layer choice in one shard, or a sample twice, is named."""
    write(tmp_path, index=0)
    writer = ShardWriter(tmp_path, content(1), ShardFormat(4, 16, torch.float32, SHARED | {"layer_ids": [0, 2, 3, 4]}))
    for sample, (start, stop) in enumerate([(0, 3), (3, 8), (8, 9)]):
        writer.write(sample, 0, states_of()[start:stop])
    second = writer.finish()
    with pytest.raises(ValueError, match=r"layer_ids: expected \[1, 2, 3, 4\], found \[0, 2, 3, 4\]"):
        ShardSet(tmp_path)
    second.write_bytes((tmp_path / shards.shard_name(0)).read_bytes())
    with pytest.raises(ValueError, match="sample 'a0' is in the shards more than once"):
        ShardSet(tmp_path)
    with pytest.raises(ValueError, match="no shards there"):
        ShardSet(tmp_path / "nowhere")


def test_plan_depends_on_lengths_alone():
    """10 bytes a token, 100 bytes a shard: as many samples as fit, and one that is larger on its own."""
    assert shards.plan_shards([4, 6, 1, 30, 2], 10, 100) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert shards.plan_shards([], 10, 100) == []


def test_bytes_of_a_kimi_token():
    """57,344 bytes of states in bf16, half of it plus four scales in fp8; 5 bytes for id and mask."""
    assert shards.bytes_per_token(4, 7168, torch.bfloat16) == 57_344 + 5
    assert shards.bytes_per_token(4, 7168, torch.float8_e4m3fn) == 28_672 + 16 + 5


def test_a_message_carries_the_content():
    """What the driver sends to the worker, as vLLM's RPC encodes it, is the same content there."""
    sent = content()
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.message()))
    received = ShardContent.receive(message)
    assert received.sample_ids == sent.sample_ids
    assert np.array_equal(received.offsets, sent.offsets)
    assert received.input_ids.dtype == np.int32
    assert received.loss_mask.dtype == np.uint8
