"""Device -> pinned ring on a side stream -> writer threads -> shard files.

One ring slot holds the states of one engine step. The engine waits only when every slot is still being written:
back-pressure is bounded by `slots` x the size of a step, whatever the size of the data.
"""

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from eagle3.shards import ShardFormat, ShardWriter, quantise_fp8

SLOTS = 3  # one filling, one in flight, one being written
WRITER_THREADS = 8


@dataclass(frozen=True)
class Piece:
    """Rows of one sample in a step: `start`..`stop` of the step are rows from `row` of sample `sample` of a shard."""

    writer: ShardWriter
    sample: int
    row: int
    start: int
    stop: int


@dataclass
class Slot:
    """One step's states on the host: `states` [rows, layers, hidden], `scale` [rows, layers] with fp8."""

    states: torch.Tensor
    scale: torch.Tensor | None
    finite: torch.Tensor


class Transfer:
    """Moves captured states from the device to shard files without making the engine wait for a disk that keeps up."""

    def __init__(self, device: torch.device, form: ShardFormat, max_rows: int) -> None:
        """`max_rows` is the largest number of rows of a step."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: SimpleQueue[Slot] = SimpleQueue()
        self._pool = ThreadPoolExecutor(WRITER_THREADS, thread_name_prefix="shard-writer")
        self._last_of: dict[tuple[int, int], Future] = {}
        self._lock = threading.Lock()
        self._staged: tuple[torch.Tensor, list[Piece], Callable[[ShardWriter], None]] | None = None
        self.errors: list[BaseException] = []
        self.rows_written = 0
        pin = self._stream is not None
        for _ in range(SLOTS):
            states = torch.empty(max_rows, form.num_layers, form.hidden_size, dtype=form.dtype, pin_memory=pin)
            scale = torch.empty(max_rows, form.num_layers, pin_memory=pin) if form.has_scale else None
            self._free.put(Slot(states, scale, torch.empty(max_rows, dtype=torch.bool, pin_memory=pin)))

    def stage(self, states: torch.Tensor, pieces: list[Piece], done: Callable[[ShardWriter], None]) -> None:
        """Keep a step's states [rows, layers, hidden] on the device until `send`; the engine's stream still makes them.

        `done(writer)` is called from a writer thread after each piece is in its shard's file. The first exception of
        a writer thread is printed with its traceback and kept in `errors`; nothing is written after it.
        """
        assert self._staged is None, "the step before was not sent"
        self._staged = states, pieces, done
        if self._stream is not None:  # here: by the time of `send` the engine's stream has the next step to do
            self._stream.wait_stream(torch.cuda.current_stream())

    def send(self) -> None:
        """Start the copy of what was staged, if anything was, and its way to the files. Waits only for a full ring."""
        if self._staged is None:
            return
        (states, pieces, done), self._staged = self._staged, None
        slot = self._free.get()
        copied = self._copy(states, slot)
        remaining = [len(pieces)]
        for piece in pieces:
            key = (piece.writer.content.index, piece.sample)
            before = self._last_of.get(key)
            self._last_of[key] = self._pool.submit(self._write, slot, piece, copied, before, remaining, done)

    def _copy(self, states: torch.Tensor, slot: Slot) -> "torch.cuda.Event | None":
        """Start the copy of a step into a slot; the event that says when it is there (None: it is there)."""
        if self._stream is None:
            self._fill(states, slot)
            return None
        with torch.cuda.stream(self._stream):
            self._fill(states, slot)
        states.record_stream(self._stream)
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def _fill(self, states: torch.Tensor, slot: Slot) -> None:
        rows = len(states)
        if slot.scale is None:
            # not finite where a value is not, nor where the sum passes 3e38; the cheapest way to know
            witness = states.sum(-1, dtype=torch.float32)
        else:
            states, witness = quantise_fp8(states)
            slot.scale[:rows].copy_(witness, non_blocking=True)
        slot.finite[:rows].copy_(torch.isfinite(witness).all(1), non_blocking=True)
        slot.states[:rows].copy_(states, non_blocking=True)

    def _write(
        self,
        slot: Slot,
        piece: Piece,
        copied: "torch.cuda.Event | None",
        before: Future | None,
        remaining: list[int],
        done: Callable[[ShardWriter], None],
    ) -> None:
        try:
            if before is not None:  # a sample's rows are written in order
                before.result()
            if copied is not None:
                copied.synchronize()
            if not self.errors:
                self._write_piece(slot, piece)
                with self._lock:
                    self.rows_written += piece.stop - piece.start
                done(piece.writer)
        except BaseException as error:
            self.fail(error)
        finally:
            with self._lock:
                remaining[0] -= 1
                last = remaining[0] == 0
            if last:
                self._free.put(slot)

    @staticmethod
    def _write_piece(slot: Slot, piece: Piece) -> None:
        rows = slice(piece.start, piece.stop)
        if not bool(slot.finite[rows].all()):
            name = piece.writer.content.sample_ids[piece.sample]
            raise ValueError(f"sample {name!r}: the captured states are not all finite")
        scale = None if slot.scale is None else slot.scale[rows]
        piece.writer.write(piece.sample, piece.row, slot.states[rows], scale)

    def fail(self, error: BaseException) -> None:
        """Called where `error` is handled: print its traceback, and write nothing any more."""
        traceback.print_exc()
        self.errors.append(error)

    def drain(self) -> None:
        """Send what is staged and wait until everything is written."""
        self.send()
        for future in list(self._last_of.values()):
            future.result()

    def forget(self, shard: int) -> None:
        """Drop the bookkeeping of a shard that is finished."""
        self._last_of = {key: future for key, future in self._last_of.items() if key[0] != shard}
