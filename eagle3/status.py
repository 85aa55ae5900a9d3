"""What each stage says of itself while it runs, and `python -m eagle3.status DIR...`, which shows it at a glance.

    python -m eagle3.status out/demo            # all stages of a run
    python -m eagle3.status data/hidden_states  # one stage's folder

A stage keeps status.json in the folder that it writes, or NAME.status.json beside the one file that it writes:
`stage`; `state` (running, or the stage's own word for it; done, stopped, failed); how far it is, `unit` naming what is
counted, as `UNIT: {input, done}`, `UNIT_per_s` and `eta_s`; `last_error`; `process` and `host`; `updated`. It is
replaced atomically, at most every few seconds. A state that is not final, of a process that is gone, means killed.
"""

import argparse
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from eagle3 import cli, files, runs

EVERY_S = 5.0
ENDED = ("done", "stopped", "failed")


class Work(Protocol):
    """How far something is: `done` of `total` `unit`s, `rate` a second, `eta_s` seconds to go (None: unknown)."""

    what: str
    unit: str

    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def rate(self) -> float: ...
    @property
    def eta_s(self) -> float | None: ...


@dataclass(frozen=True)
class Counted:
    """A `Work` of given numbers."""

    what: str
    unit: str
    done: int
    total: int
    rate: float
    eta_s: float | None


class Status:
    """The status file of one stage; a context manager whose end says how the stage ended.

    `more()` gives the stage's own entries at each writing. Inside the block every `Progress` of the process is in it.
    """

    current: "Status | None" = None

    def __init__(
        self, path: Path, stage: str, state: str = "running", more: Callable[[], dict[str, Any]] | None = None
    ) -> None:
        self.path, self.stage, self.state = path, stage, state
        self.more = more or dict
        self.work: Work | None = None
        self.last_error: str | None = None
        self.updated = 0.0

    def update(self, work: Work) -> None:
        """Note how far the stage is, and write it if the last time was a while ago."""
        self.work = work
        if time.monotonic() - self.updated >= EVERY_S:
            self.write()

    def write(self) -> None:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        content = {
            "stage": self.stage,
            "state": self.state,
            **(_counts(self.work) if self.work else {}),
            **self.more(),
            "last_error": self.last_error,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "updated": now,
        }
        try:
            files.write_json(self.path, content)
        except OSError as error:  # a full disk must not hide what the run itself has to say
            print(f"{self.path.name}: not updated: {error}", flush=True)
        self.updated = time.monotonic()

    def __enter__(self) -> "Status":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.outer, Status.current = Status.current, self
        self.write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Status.current = self.outer
        if error is not None:
            self.state = "stopped" if isinstance(error, InterruptedError | KeyboardInterrupt) else "failed"
            self.last_error = f"{type(error).__name__}: {error}"
        elif self.state not in ENDED:
            self.state = "done"
        self.write()


def _counts(work: Work) -> dict[str, Any]:
    return {
        "doing": work.what,
        "unit": work.unit,
        work.unit: {"input": work.total, "done": work.done},
        f"{work.unit}_per_s": work.rate,
        "eta_s": work.eta_s,
    }


def tell(work: Work) -> None:
    """Let the status file of the stage that this process runs, if it keeps one, say how far `work` is."""
    if Status.current is not None:
        Status.current.update(work)


@dataclass(frozen=True)
class Row:
    """A stage as it stands. `state`: not begun, running, done, stopped, failed, killed, unknown or broken."""

    stage: str
    where: str = ""
    state: str = "not begun"
    progress: str = ""
    rate: str = ""
    eta: str = ""
    updated: str = ""
    notes: tuple[str, ...] = ()


def rows(folder: Path) -> list[Row]:
    """Every stage that left something in a run's folder, the missing ones as not begun; or the one of its own folder.

    ValueError if there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    outputs = runs.find(folder)
    found = [_row(output, folder) for output in outputs]
    if outputs and all(output.place == folder and output.stage != "train" for output in outputs):
        return found
    there = {row.stage for row in found}
    return sorted(found + [Row(s) for s in cli.STAGES if s not in there], key=lambda row: cli.STAGES.index(row.stage))


def _row(output: runs.Output, folder: Path) -> Row:
    where = os.path.relpath(output.place, folder)
    try:
        result = runs.result(output)
        if output.status_file.is_file():
            return _of_status(output, where, files.read_json(output.status_file), result)
    except ValueError as error:
        return Row(output.stage, where, "broken", notes=(str(error),))
    if result:
        return Row(output.stage, where, "done", notes=(result,))
    return Row(output.stage, where, "unknown", notes=("begun, not finished, and it keeps no status file",))


def _of_status(output: runs.Output, where: str, content: dict[str, Any], result: str | None) -> Row:
    with runs.reading(output.status_file):
        updated = datetime.fromisoformat(content["updated"])
        state, note = _state(content, updated)
        unit = content.get("unit")
        counts = content.get(unit) or {}
        notes = (note, content["last_error"] if state in ("failed", "stopped") else None, result)
        return Row(
            output.stage,
            where,
            state,
            _progress(unit, counts) if unit else "",
            _rate(content[f"{unit}_per_s"], unit) if unit else "",
            _clock(content["eta_s"]) if unit and state == "running" else "",
            _ago(updated),
            tuple(n for n in notes if n),
        )


def _state(content: dict[str, Any], updated: datetime) -> tuple[str, str | None]:
    """The state for a person, and what else there is to say of it."""
    state = content["state"]
    if state in ENDED:
        return state, None
    doing = content.get("doing") if state == "running" else state
    if content["host"] != socket.gethostname():
        return "running", f"{doing or state}; on {content['host']}, not looked at from here"
    if not runs.process_lives(content["process"], updated):
        return "killed", f"process {content['process']} is gone; the same command goes on where it was"
    return "running", f"{doing or 'starting'}, process {content['process']}"


def _progress(unit: str, counts: dict[str, int]) -> str:
    done, total = counts["done"], counts["input"]
    return f"{done:,} of {total:,} {unit} ({done / max(total, 1):.0%})"


def _rate(rate: float, unit: str) -> str:
    return f"{rate:,.1f} {unit}/s" if rate >= 1 else f"{rate:.2g} {unit}/s"


def _clock(seconds: float | None) -> str:
    return "unknown" if seconds is None else str(timedelta(seconds=round(seconds)))


def _ago(moment: datetime) -> str:
    """How long ago, in its largest unit."""
    seconds = max((datetime.now().astimezone() - moment).total_seconds(), 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def table(folder: Path) -> Iterator[str]:
    """The folder's stages as lines."""
    cells = [["stage", "state", "progress", "rate", "ETA", "updated", "where"]]
    found = rows(folder)
    cells += [[r.stage, r.state, r.progress, r.rate, r.eta, r.updated, r.where] for r in found]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    yield str(folder)
    yield f"  {lines[0]}"
    for row, line in zip(found, lines[1:], strict=True):
        yield f"  {line}"
        yield from (f"  {'':<{widths[0]}}  {' '.join(note.split())}" for note in row.notes)


def parser() -> cli.Tool:
    p = cli.Tool("python -m eagle3.status", __doc__)
    p.add_argument("folders", type=Path, nargs="+", metavar="DIR", help="a run's folder, or that of one stage")
    return p


def check(args: argparse.Namespace) -> list[str]:
    return [line for folder in args.folders for line in table(folder)]


if __name__ == "__main__":
    cli.run(parser(), check, lambda lines: print(*lines, sep="\n"))
