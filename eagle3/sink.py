"""Rank 0's end of the capture: rows of samples in, finished shards out. Nothing here knows vLLM.

A shard is published when all its rows are written and the self-check has passed all its samples.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from eagle3.capture import Request, Span
from eagle3.shards import ShardContent, ShardFormat, ShardWriter
from eagle3.transfer import Piece, Transfer

FINISHERS = 4  # threads that wait for the disk as shards are published, apart from those that write rows


class ShardSink:
    """Open shards, hand their rows over step by step, and ask now and then how it goes."""

    def __init__(self, folder: Path, form: ShardFormat, device: torch.device, max_rows: int) -> None:
        """`max_rows` is the largest number of rows of a step."""
        self._folder, self._form = folder, form
        self._transfer = Transfer(device, form, max_rows)
        self._finishers = ThreadPoolExecutor(FINISHERS, thread_name_prefix="shard-finisher")
        self._publishing: list[Future] = []
        self._writers: dict[int, ShardWriter] = {}
        self._unchecked: dict[int, int] = {}  # samples of each shard
        self._finished: SimpleQueue[int] = SimpleQueue()

    def open(self, messages: list[dict[str, Any]]) -> None:
        """Create the temporary files of the shards that the next rows belong to."""
        try:
            for content in map(ShardContent.receive, messages if not self._transfer.errors else []):
                self._writers[content.index] = ShardWriter(self._folder, content, self._form)
                self._unchecked[content.index] = len(content.sample_ids)
        except OSError as error:
            self._transfer.errors.append(error)

    def stage(self, states: torch.Tensor, spans: list[Span]) -> None:
        """A step's states [rows, layers, hidden] and whose rows they are; they leave the device with `send`."""
        if not self._transfer.errors:
            self._transfer.stage(states, [self._piece(s) for s in spans], self._publish_if_ready)

    def send(self) -> None:
        """Start what was staged on its way into the files. Waits only for a full ring."""
        self._transfer.send()

    def checked(self, requests: list[Request]) -> None:
        """These samples have passed the self-check."""
        for request in requests if not self._transfer.errors else []:
            self._unchecked[request.shard] -= 1
            self._publish_if_ready(self._writers[request.shard])

    def status(self) -> dict[str, Any]:
        """What happened since the last call (`finished` shards) and so far (`rows` written, `faults`)."""
        finished = [self._finished.get() for _ in range(self._finished.qsize())]
        for index in finished:
            del self._writers[index], self._unchecked[index]
            self._transfer.forget(index)
        faults = [f"{type(e).__name__}: {e}" for e in self._transfer.errors]
        return {"finished": finished, "rows": self._transfer.rows_written, "faults": faults}

    def close(self) -> None:
        """Wait for the writers, then remove the temporary files of unfinished shards."""
        self._transfer.drain()
        wait(self._publishing)
        self._publishing.clear()
        for writer in self._writers.values():
            writer.abandon()

    def _piece(self, span: Span) -> Piece:
        request = span.request
        return Piece(self._writers[request.shard], request.sample, span.row, span.start, span.stop)

    def _publish_if_ready(self, writer: ShardWriter) -> None:
        # a writer thread may come here last of all, when `status` has already dropped the published shard
        if not self._unchecked.get(writer.content.index) and writer.claim_finish():
            self._publishing.append(self._finishers.submit(self._publish, writer))

    def _publish(self, writer: ShardWriter) -> None:
        try:
            writer.finish()
            self._finished.put(writer.content.index)
        except BaseException as error:
            self._transfer.fail(error)
