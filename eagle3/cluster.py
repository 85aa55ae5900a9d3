"""Extraction by several engines of a Ray cluster: each an actor with its own GPUs, one set of shards as the result.

The driver hands out batches of missing shards; an engine writes them into the common folder, which every machine sees
at the same path, as it does the model, the data and this repository. An engine that dies is replaced, and what it left
unfinished is handed out again. Ray is optional: `pip install ray`.
"""

import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3 import engine, files
from eagle3.extract import CaptureFault, Extraction, Run, conclude, on_sigterm
from eagle3.watch import Watch

if TYPE_CHECKING:
    from eagle3.extract import Start

BATCH_SHARDS = 16  # handed to an engine at once: its queue runs dry once in this many shards
CONNECT_S = 5.0
MAX_DEATHS = 3  # in a row without a shard finished between them
REPOSITORY = Path(__file__).resolve().parent.parent


class Report:
    """Stands where a run's Watch stands: keeps what the worker said, for the driver."""

    def __init__(self) -> None:
        self.rows, self.check = 0, ""

    def start(self) -> None:
        """The driver counts."""

    def stopping(self) -> None:
        """The driver stops by handing out no more."""

    def sample_done(self, tokens: int) -> None:
        """The driver counts finished batches."""

    def worker_says(self, rows_written: int, check: str) -> None:
        self.rows, self.check = rows_written, check


class Engine:
    """One engine in a process of its own: a Ray actor."""

    def __init__(self, extraction: Extraction, start: "Start") -> None:
        self.extraction, self.llm = extraction, start(extraction)

    def make(self, indices: list[int]) -> tuple[int, str]:
        """Make these shards; the rows written by this engine so far and its self-check's line."""
        report = Report()
        Run(self.extraction, self.llm, report).over(indices)
        return report.rows, report.check

    def stop(self) -> None:
        engine.stop(self.llm)


@dataclass
class Batch:
    """Shards that an engine is at work on."""

    actor: Any
    shards: list[int]


class Cluster:
    """Keeps every engine busy until all shards are there."""

    def __init__(self, extraction: Extraction, missing: list[int], watch: Watch, start: "Start") -> None:
        import ray

        self.ray, self.extraction, self.watch = ray, extraction, watch
        self.shared = ray.put(extraction)
        self.start = start
        kind = "CPU" if engine.on_cpu() else "GPU"
        each = extraction.options.tp_size
        self.resources = {f"num_{kind.lower()}s": each}
        available = int(ray.cluster_resources().get(kind, 0)) // each
        if not available:
            raise ValueError(f"--ray-address: the cluster has fewer than {each} {kind}s, one engine needs as many")
        self.num_engines = min(available, len(missing))
        size = max(1, min(BATCH_SHARDS, len(missing) // (2 * self.num_engines)))
        self.waiting = deque(missing[i : i + size] for i in range(0, len(missing), size))
        self.at_work: dict[Any, Batch] = {}
        self.said: dict[Any, tuple[int, str]] = {}
        self.deaths, self.stopping = 0, False

    def over(self) -> None:
        """RuntimeError if engines die again and again, CaptureFault if one finds the states wrong."""
        print(f"ray: {self.num_engines} engines, {len(self.waiting)} batches of shards", flush=True)
        self.watch.start()
        for _ in range(self.num_engines):
            self._give(self._new_engine())
        while self.at_work:
            (ready,), _ = self.ray.wait(list(self.at_work))
            self._take(ready, self.at_work.pop(ready))

    def stop(self) -> None:
        print("stopping: every engine finishes the shards it has", flush=True)
        self.stopping = True
        self.watch.stopping()

    def _new_engine(self) -> Any:
        # not restarted by Ray: a new actor shows in the log
        actor = self.ray.remote(**self.resources)(Engine)
        return actor.remote(self.shared, self.start)

    def _give(self, actor: Any) -> None:
        if self.waiting and not self.stopping:
            shards = self.waiting.popleft()
            self.at_work[actor.make.remote(shards)] = Batch(actor, shards)
        else:
            actor.stop.remote()

    def _take(self, ready: Any, batch: Batch) -> None:
        """Count what an engine finished and give it more; replace it if it died."""
        try:
            self.said[batch.actor] = self.ray.get(ready)
        except self.ray.exceptions.RayError as error:
            self._replace(batch, error)
            return
        self.deaths = 0
        self._count(batch.shards)
        self._give(batch.actor)

    def _replace(self, batch: Batch, error: Exception) -> None:
        cause = getattr(error, "cause", None)
        if isinstance(cause, CaptureFault):
            raise cause
        left = self.extraction.unpublished(batch.shards)
        self.deaths = 0 if len(left) < len(batch.shards) else self.deaths + 1
        self._count([i for i in batch.shards if i not in left])
        print(f"ray: an engine died, {len(left)} of its shards are handed out again: {cause or error}", flush=True)
        if self.deaths >= MAX_DEATHS:
            raise RuntimeError(f"{MAX_DEATHS} engines died one after another without finishing a shard") from error
        self.ray.kill(batch.actor)
        if left:
            self.waiting.appendleft(left)
        if self.waiting:
            self._give(self._new_engine())

    def _count(self, shards: list[int]) -> None:
        """Tell the watch of every sample of these shards."""
        rows = sum(rows for rows, _ in self.said.values())
        self.watch.worker_says(rows, next((check for _, check in reversed(self.said.values())), ""))
        for index in shards:
            for sample in self.extraction.plan[index]:
                self.watch.sample_done(len(self.extraction.rows[sample].input_ids))


def check_address(address: str) -> None:
    """ValueError if Ray is not installed or nobody listens at the address: Ray itself would try for minutes."""
    if find_spec("ray") is None:
        raise ValueError("--ray-address: Ray is not installed in this Python (pip install ray)")
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        raise ValueError(f"--ray-address {address}: expected HOST:PORT, auto (this machine's) or local (a new cluster)")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, OverflowError, ValueError) as error:
        raise ValueError(f"--ray-address {address}: nobody answers there ({error})") from None


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A connection to the cluster at `address` ("auto": the one of this machine; "local": a new one on it)."""
    import ray

    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    environment = {"env_vars": {"PYTHONPATH": path}}
    try:
        ray.init(address, runtime_env=environment, include_dashboard=None if address != "local" else False)
    except ConnectionError as error:
        raise ValueError(f"--ray-address {address}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


def many_engines(extraction: Extraction, missing: list[int], watch: Watch, start: "Start") -> None:
    """Make the shards `missing` with every engine that the cluster has room for."""
    with connected(extraction.options.ray_address):
        cluster = Cluster(extraction, missing, watch, start)
        with on_sigterm(cluster.stop):
            cluster.over()
    for leftover in files.leftovers(extraction.folder):  # of engines that died
        leftover.unlink()
    conclude(extraction, missing, stopping=cluster.stopping)
