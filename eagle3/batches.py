"""Hidden states -> packed batches: the held-out split, the packing of an epoch, and the threads that read ahead.

A pack is a list of samples that together fit --batch-tokens; an optimizer step is a list of packs, dealt to the ranks
in turn. Which samples make which step depends on the seed and the epoch alone, never on the number of ranks.
"""

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from eagle3.shards import ShardSet

Pack = list[int]  # indices of samples in the ShardSet

READ_AHEAD = 4  # packs


@dataclass(frozen=True)
class PackedBatch:
    """Samples one after another, T tokens in all.

    `input_ids` int64 [T], `hidden_states` [T, 4, H] as captured (three auxiliary layers, then the last), `loss_mask`
    bool [T], `offsets` the first row of each sample and then T; `scale` float32 [T, 4] while the states are fp8.
    """

    input_ids: torch.Tensor
    hidden_states: torch.Tensor
    loss_mask: torch.Tensor
    offsets: list[int]
    scale: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The batch on `device`; fp8 states become bfloat16 there, so that half the bytes travel.

        The loss mask stays on the CPU, where the rows that count are found without waiting for the device.
        """
        ids, states = (t.to(device, non_blocking=True) for t in (self.input_ids, self.hidden_states))
        if self.scale is not None:
            states = (states.float() * self.scale.to(device, non_blocking=True)[..., None]).to(torch.bfloat16)
        return PackedBatch(ids, states, self.loss_mask, self.offsets)


def split(sample_ids: Sequence[str], eval_fraction: float) -> tuple[Pack, Pack]:
    """The samples to train on and the held-out ones, each ascending; disjoint, and together all.

    Samples are ranked by a hash of their ids and the first `eval_fraction` of them is held out, so neither the seed
    nor the order of the shards moves a sample across. ValueError if a half of a split would be empty.
    """
    num_held_out = round(len(sample_ids) * eval_fraction)  # the one boundary that both halves are cut at
    if eval_fraction > 0 and not 0 < num_held_out < len(sample_ids):
        raise ValueError(
            f"--eval-fraction {eval_fraction}: of {len(sample_ids)} samples {num_held_out} would be held out; choose a "
            "fraction that leaves samples on both sides, or 0 for no held-out split"
        )
    ranked = sorted(
        range(len(sample_ids)), key=lambda i: (xxhash.xxh3_64_digest(sample_ids[i].encode()), sample_ids[i])
    )
    return sorted(ranked[num_held_out:]), sorted(ranked[:num_held_out])


def pack(lengths: np.ndarray, samples: Iterable[int], budget: int) -> list[Pack]:
    """Best fit: each sample, in the order given, joins the fullest pack that still has room for it.

    `lengths` int64 [all samples] in tokens, each at most `budget`. Lengths 5, 4, 3, 2 with budget 7 give the packs
    [0, 3], [1, 2].
    """
    packs: list[Pack] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, pack), ascending
    for sample in samples:
        length = int(lengths[sample])
        at = bisect.bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, into = rooms.pop(at)
        else:
            room, into = budget, len(packs)
            packs.append([])
        packs[into].append(int(sample))
        if room > length:
            bisect.insort(rooms, (room - length, into))
    return packs


def check_fit(data: ShardSet, budget: int) -> None:
    """ValueError naming the samples that no pack of `budget` tokens can hold."""
    too_long = np.flatnonzero(data.lengths > budget)
    if len(too_long):
        worst = int(data.lengths.argmax())
        raise ValueError(
            f"--batch-tokens {budget}: {len(too_long)} of {len(data)} samples are longer, the longest is "
            f"{data.sample_ids[worst]!r} with {data.lengths[worst]} tokens; give --batch-tokens {data.lengths[worst]}"
        )


@dataclass(frozen=True)
class Schedule:
    """Which samples make which optimizer step: `epochs` passes over `samples`, shuffled and packed anew for each."""

    lengths: np.ndarray
    samples: Pack
    budget: int
    packs_per_step: int
    seed: int
    epochs: int

    def epoch(self, epoch: int) -> list[list[Pack]]:
        """The steps of one epoch; the last may hold fewer packs than the others."""
        order = np.random.default_rng((self.seed, epoch)).permutation(self.samples)
        packs = pack(self.lengths, order, self.budget)
        return [packs[i : i + self.packs_per_step] for i in range(0, len(packs), self.packs_per_step)]

    def steps(self, first: int = 0) -> Iterator[tuple[float, list[Pack]]]:
        """Every step from number `first` on, with the epochs that are done when it is."""
        for epoch in range(self.epochs):
            steps = self.epoch(epoch)
            for index in range(first, len(steps)):
                yield epoch + (index + 1) / len(steps), steps[index]
            first = max(first - len(steps), 0)

    def __len__(self) -> int:
        """The number of optimizer steps."""
        return sum(len(self.epoch(epoch)) for epoch in range(self.epochs))


def loss_mask(data: ShardSet, samples: Iterable[int]) -> tuple[torch.Tensor, list[int]]:
    """`loss_mask` bool [T] and `offsets` of some samples, without reading their states."""
    masks = [shard.loss_mask[shard.rows(index)] for shard, index in map(data.locate, samples)]
    offsets = [0, *itertools.accumulate(map(len, masks))]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *masks]).astype(bool)), offsets


def read_pack(data: ShardSet, samples: Pack, pin_memory: bool = False) -> PackedBatch:
    """Copy one pack's samples out of the mapped shards."""
    found = [data.locate(sample) for sample in samples]
    ids = [torch.from_numpy(shard.input_ids[shard.rows(index)].astype(np.int64)) for shard, index in found]
    states, scales = zip(*(shard.verified(index) for shard, index in found), strict=True)
    mask, offsets = loss_mask(data, samples)
    return PackedBatch(
        input_ids=_joined(ids, pin_memory),
        hidden_states=_joined(states, pin_memory),
        loss_mask=_joined([mask], pin_memory),
        offsets=offsets,
        scale=None if scales[0] is None else _joined(scales, pin_memory),
    )


def _joined(parts: Sequence[torch.Tensor], pin_memory: bool) -> torch.Tensor:
    rows = sum(map(len, parts))
    out = torch.empty(rows, *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=pin_memory)
    for part, end in zip(parts, itertools.accumulate(map(len, parts)), strict=True):
        out[end - len(part) : end] = part  # copied without the interpreter's lock, so threads read side by side
    return out


def read_ahead(data: ShardSet, packs: Iterable[Pack], device: torch.device) -> Iterator[PackedBatch]:
    """The packs as batches on `device`, in order; threads read the next READ_AHEAD of them meanwhile.

    On CUDA they pass through pinned memory, and the next batch is copied over while the current one is in use.
    """
    cuda = device.type == "cuda"
    batches = _read_in_threads(data, packs, threads=READ_AHEAD if cuda else 1, pin_memory=cuda)
    return _copy_ahead(batches, device) if cuda else (batch.to(device) for batch in batches)


def _read_in_threads(data: ShardSet, packs: Iterable[Pack], threads: int, pin_memory: bool) -> Iterator[PackedBatch]:
    waiting: deque[Future[PackedBatch]] = deque()
    with ThreadPoolExecutor(threads, "read-ahead") as pool:
        try:
            for samples in packs:
                waiting.append(pool.submit(read_pack, data, samples, pin_memory))
                if len(waiting) > READ_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _copy_ahead(batches: Iterable[PackedBatch], device: torch.device) -> Iterator[PackedBatch]:
    """Each batch on the GPU, its successor's copy already under way on a stream of its own."""
    copies = torch.cuda.Stream(device)
    moving: deque[tuple[PackedBatch, torch.cuda.Event]] = deque()
    for batch in batches:
        with torch.cuda.stream(copies):
            moving.append((batch.to(device), copies.record_event()))
        if len(moving) > 1:
            yield _hand_over(*moving.popleft())
    while moving:
        yield _hand_over(*moving.popleft())


def _hand_over(batch: PackedBatch, copied: torch.cuda.Event) -> PackedBatch:
    stream = torch.cuda.current_stream()
    stream.wait_event(copied)
    for tensor in (batch.input_ids, batch.hidden_states):
        tensor.record_stream(stream)  # or its memory would be free for the next copy while this stream still reads it
    return batch
