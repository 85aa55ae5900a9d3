"""What the stages have left in a folder: which outputs there are, found by their own formats, and what they came to.

Nothing here imports torch, so that a look at a run is quick.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from eagle3 import cli, files

DEPTH = 2  # folders below the one that is looked at
STATUS, META, METADATA, SETTINGS, EVALUATION = (
    "status.json", ".meta.json", "metadata.json", "settings.json", "evaluation.json",
)  # fmt: skip
METRICS = "metrics.jsonl"
NOT_LOOKED_INTO = ("checkpoints", "tensorboard")
FORMATS = {
    "eagle3-answers/": "generate",
    "eagle3-prepared/": "prepare",
    "eagle3-hidden-states/": "extract",
    "eagle3-evaluation/": "evaluate",
}
HEAD_BYTES = 256  # in which a file of ours names its format


@dataclass(frozen=True)
class Output:
    """What one stage wrote. `place`: its folder, or the one file that it writes."""

    stage: str
    place: Path

    @property
    def writes_a_file(self) -> bool:
        return self.stage in ("generate", "evaluate")

    @property
    def status_file(self) -> Path:
        return status_beside(self.place) if self.writes_a_file else self.place / STATUS

    @property
    def file(self) -> Path:
        """The file that describes it."""
        if self.stage == "generate":
            return self.place.with_name(self.place.name + META)
        return self.place / {"train": SETTINGS}.get(self.stage, METADATA) if not self.writes_a_file else self.place

    @property
    def content(self) -> dict[str, Any]:
        return files.read_json(self.file)


def status_beside(file: Path) -> Path:
    """Where a stage that writes this one file keeps its status."""
    return file.with_name(f"{file.name}.{STATUS}")


def find(folder: Path) -> list[Output]:
    """The outputs in `folder` and DEPTH folders below, in the order of the stages, then of their age.

    ValueError naming a file that has one of our names and is broken.
    """
    found = {_output(path) for below in _folders(folder, DEPTH) for path in sorted(below.glob("*.json"))} - {None}
    return sorted(found, key=lambda o: (cli.STAGES.index(o.stage), _age(o), str(o.place)))


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
        for name in names:
            if name not in NOT_LOOKED_INTO:
                yield from _folders(folder / name, depth - 1)


def _output(path: Path) -> Output | None:
    """The output that a JSON file belongs to; None for a file that is not ours."""
    if path.name == STATUS or path.name.endswith(f".{STATUS}"):
        stage = files.read_json(path).get("stage")
        place = path.parent if path.name == STATUS else path.with_name(path.name.removesuffix(f".{STATUS}"))
        return Output(stage, place) if stage in cli.STAGES else None
    stage = _stage_of(path)
    if stage is None:
        if path.name in (METADATA, SETTINGS, EVALUATION) or path.name.endswith(META):
            files.read_json(path)  # of others, or broken
        return None
    if stage == "generate":
        return Output(stage, path.with_name(path.name.removesuffix(META)))
    return Output(stage, path if stage == "evaluate" else path.parent)


def check_output_folder(folder: Path, stage: str) -> None:
    """ValueError if a stage cannot write its output here, or if a model or another stage's output would be spoilt."""
    files.check_folder("--output-dir", folder)
    if (folder / "config.json").is_file():
        raise ValueError(f"--output-dir {folder}: has a config.json, so it is a model's folder; choose another folder")
    for path in (folder / METADATA, folder / SETTINGS):
        found = path.is_file() and _stage_of(path)
        if found and found != stage:
            raise ValueError(
                f"--output-dir {folder}: holds the output of another stage ({found}); choose another folder"
            )


def _age(output: Output) -> float:
    """When it was last written to, as far as its describing file tells."""
    return output.file.stat().st_mtime if output.file.is_file() else 0.0


def _stage_of(path: Path) -> str | None:
    """The stage that describes its output in this file, by the file's beginning."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES).decode(errors="replace")
    if path.name == SETTINGS and '"command"' in head:
        return "train"
    return next((stage for text, stage in FORMATS.items() if f'"format": "{text}' in head), None)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong over the content of a file into a ValueError that names it."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
        fault = f"has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: not as the stage writes it: {fault}") from error
    except ValueError as error:
        if str(path.parent) in str(error):  # it names its file
            raise
        raise ValueError(f"{path}: {error}") from error


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of a training, oldest first; a line without its end is still being written.

    ValueError naming the line that is broken.
    """
    path = folder / METRICS
    records = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True) if path.is_file() else [], 1):
        if not line.endswith("\n"):
            break
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not valid JSON: {error}") from None
        if not isinstance(records[-1], dict) or not {"kind", "step"} <= records[-1].keys():
            raise ValueError(f"{path}:{number}: not a record of a training: it has no kind and step")
    return records


def best(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The held-out evaluation with the highest estimated acceptance length, which is the exported draft's."""
    return max((r for r in records if r["kind"] == "eval"), key=lambda r: r["acceptance_length"], default=None)


def result(output: Output) -> str | None:
    """What a finished output came to, in a line; None while it is unfinished. ValueError if its file is broken."""
    if not output.file.is_file():
        return None
    with reading(output.file):
        return RESULTS[output.stage](output)


def _generated(output: Output) -> str | None:
    counts = output.content.get("counts")
    return counts and f"{counts['kept']:,} of {counts['rows_in']:,} conversations, {counts['answered']:,} answers"


def _prepared(output: Output) -> str:
    counts, statistics = output.content["counts"], output.content["statistics"]
    return (
        f"{counts['samples']:,} samples, {statistics['tokens']:,} tokens, {statistics['supervised_share']:.1%} of them "
        f"supervised; {counts['kept']:,} of {counts['rows_in']:,} rows kept"
    )


def _extracted(output: Output) -> str | None:
    from eagle3 import shards

    content = output.content
    if len(shards.shard_paths(output.place)) < content["num_shards"]:
        return None
    return f"{content['num_samples']:,} samples, {content['num_tokens']:,} tokens; shards: {content['num_shards']:,}"


def _trained(output: Output) -> str | None:
    records = read_metrics(output.place)
    steps = [r for r in records if r["kind"] == "train"]
    if not steps or steps[-1]["eta_s"]:
        return None
    held_out = best(records)
    estimated = f", estimated acceptance length {held_out['acceptance_length']:.2f}" if held_out else ""
    return f"{steps[-1]['step']:,} steps{estimated}"


def _evaluated(output: Output) -> str | None:
    from eagle3 import figures

    content = output.content
    figures.check_format(content)
    row = content["benchmarks"].get("all")
    if not (content["finished"] and row):
        return None
    speed = "" if row["speed_up"] is None else f", speed-up {row['speed_up']:.2f}x"
    same = "" if row["identical"] is None else f", {row['identical']:,} of {row['prompts']:,} answers identical"
    return f"acceptance length {row['acceptance_length']:.2f}{speed}{same}"


RESULTS = {
    "generate": _generated,
    "prepare": _prepared,
    "extract": _extracted,
    "train": _trained,
    "evaluate": _evaluated,
}


def process_lives(process: int, since: datetime) -> bool:
    """Whether a process of this machine that was there at `since` still runs; another one may have its number now."""
    import psutil

    try:
        found = psutil.Process(process)
        return found.create_time() <= since.timestamp() + 1 and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
