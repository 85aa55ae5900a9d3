"""Extraction without a target: known states are replayed through the real driver, sink, transfer, writer and resume.

    python -m tests.replay MODEL DATA.jsonl FOLDER KILLS [SEED]

kills a replayed extraction at KILLS random points (SIGKILL, children forked from this warmed process), checks after
each kill that what is there is whole and untouched, lets the last set finish, and compares it byte for byte with an
uninterrupted run's. Prints one line of JSON: kills, completed sets, finished shards that kills left to build on.
"""

import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import torch

from eagle3 import capture, extract, files, shards
from eagle3.sink import ShardSink

STEP_TOKENS = 128


class Replay:
    """Stands where vLLM's LLM stands: chunks the queued prompts into steps and hands over each row's known state.

    `states` is a function of (sample id, tokens) that gives [tokens, layers, hidden].
    """

    def __init__(self, extraction: extract.Extraction, states, step_s: float = 0.0) -> None:
        plan = capture.CapturePlan(str(extraction.folder), extraction.metadata["shared"])
        form = plan.shard_format(extraction.target.hidden_size)
        self.sink = ShardSink(extraction.folder, form, torch.device("cpu"), STEP_TOKENS)
        self.states, self.step_s = states, step_s
        self.queue: deque[list] = deque()  # [capture.Request, rows done]
        self.llm_engine = self.engine_core = self

    def collective_rpc(self, method, args=()):
        calls = {"open_shards": self.sink.open, "capture_status": self.status, "close_capture": self.sink.close}
        return [calls[method](*args)]

    def status(self):
        return self.sink.status() | {"check": "self-check: replayed"}

    def add_request(self, request_id, prompt, params):
        shard, sample, name = params.extra_args[capture.SAMPLE_KEY]
        request = capture.Request(request_id, shard, sample, name, len(prompt["prompt_token_ids"]))
        self.queue.append([request, 0])

    def has_unfinished_requests(self):
        return bool(self.queue)

    def step(self):
        """One engine step of up to STEP_TOKENS rows."""
        time.sleep(self.step_s)
        spans, rows, ended = [], [], []
        room = STEP_TOKENS
        while room and self.queue:
            request, done = self.queue[0]
            count = min(room, request.length - done)
            start = STEP_TOKENS - room
            spans.append(capture.Span(request, done, start, start + count))
            rows.append(self.states(request.sample_id, request.length)[done : done + count])
            self.queue[0][1] += count
            room -= count
            if spans[-1].ends:
                self.queue.popleft()
                ended.append(request)
        self.sink.stage(torch.cat(rows), spans)
        self.sink.send()
        self.sink.checked(ended)
        return [
            SimpleNamespace(request_id=r.request_id, finished=True, prompt_token_ids=range(r.length)) for r in ended
        ]

    def shutdown(self):
        """The engine's end; nothing to give back."""


def random_states(layers: int, hidden: int):
    """States that depend on the sample's id alone."""

    def states(sample_id: str, tokens: int) -> torch.Tensor:
        seed = int(files.sha256(sample_id.encode())[:8], 16)
        return torch.randn(tokens, layers, hidden, generator=torch.Generator().manual_seed(seed))

    return states


def run(extraction: extract.Extraction, **changes) -> None:
    """A whole extraction into its folder, as 02 does it, the engine replaced."""
    states = changes.pop("states", None) or random_states(len(extraction.layer_ids), extraction.target.hidden_size)
    step_s = changes.pop("step_s", 0.0)
    with files.locked(extraction.folder):
        extract.extract(extraction, start=lambda e: Replay(e, states, step_s), **changes)


def start_slowly(extraction: extract.Extraction) -> Replay:
    """A replayed engine that takes its time, and leaves its process id beside the output folder."""
    (extraction.folder.parent / f"engine-{os.getpid()}").touch()
    return Replay(extraction, random_states(4, 64), step_s=0.1)


def in_child(extraction: extract.Extraction, after_s: float | None) -> int:
    """Run in a forked child, killed after `after_s` seconds; its wait status (0: it had finished)."""
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as log:
            os.dup2(log.fileno(), 1)
            code = 1
            try:
                run(extraction)
                code = 0
            finally:
                os._exit(code)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def finished(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of change of each finished shard."""
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in shards.shard_paths(folder)}


def contents(folder: Path) -> dict[str, str]:
    return {p.name: files.sha256_file(p) for p in shards.shard_paths(folder)}


def kill_again_and_again(planned, folder: Path, kills: int, seed: int) -> dict[str, int]:
    """See the module's docstring. AssertionError where something was lost."""
    whole = planned(folder / "whole")
    began = time.perf_counter()
    assert in_child(whole, None) == 0
    duration, reference = time.perf_counter() - began, contents(whole.folder)
    chance, completed, built_on = random.Random(seed), 0, 0
    extraction = planned(folder / "killed-0")
    killed = 0
    while killed < kills:
        before = finished(extraction.folder)
        built_on += len(before)
        status = in_child(extraction, chance.uniform(0, duration))
        after = finished(extraction.folder)
        assert before.items() <= after.items(), "a finished shard was touched"
        for name, digest in contents(extraction.folder).items():
            assert digest == reference[name], f"{name} is under its final name but not whole"
        if status == 0:
            completed += 1
            check_complete(extraction, reference)
            extraction = planned(folder / f"killed-{completed}")
        else:
            assert os.WTERMSIG(status) == signal.SIGKILL, "the run failed before it was killed"
            killed += 1
    assert in_child(extraction, None) == 0
    check_complete(extraction, reference)
    return {"kills": killed, "completed": completed, "built_on": built_on, "shards": len(reference)}


def check_complete(extraction: extract.Extraction, reference: dict[str, str]) -> None:
    """Each sample once, every checksum right, every byte as in the uninterrupted run, nothing left over."""
    assert contents(extraction.folder) == reference
    data = shards.ShardSet(extraction.folder)
    assert data.sample_ids == [row.id for row in extraction.rows]
    assert [shard.faults() for shard in data.shards] == [[]] * len(data.shards)
    assert list(extraction.folder.glob("*.tmp")) == list(extraction.folder.glob(".*.tmp")) == []


def main() -> None:
    model, data, folder, kills, *seed = sys.argv[1:]
    from vllm import SamplingParams  # noqa: F401 - so that a forked child starts at once

    options = extract.Options(
        model_path=Path(model), prepared_data=Path(data), output_dir=Path(folder), batch_size=2, max_seq_len=64,
        layer_ids=[1, 2, 3, 5], shard_bytes=1_000_000,
    )  # fmt: skip
    target = extract.open_target(options)
    content = extract.read_data(options, target)

    def planned(folder: Path) -> extract.Extraction:
        return extract.plan(dataclasses.replace(options, output_dir=folder), target, *content)

    print(json.dumps(kill_again_and_again(planned, Path(folder), int(kills), int(seed[0]) if seed else 0)))


if __name__ == "__main__":
    main()
