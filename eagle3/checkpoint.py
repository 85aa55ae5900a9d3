"""Checkpoints of a training run. On disk:

    RUN/checkpoints/step-000120/          whole as soon as it has this name
        shard-*.safetensors               torch.distributed.checkpoint's own, each rank's share; no pickle
        position.json                     where the run stood, which settings and data it had

The tensors are the trained weights (fp32), the optimizer's state and the random state. Frozen weights are the
target's own and are not stored.
"""

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from eagle3 import files, runs
from eagle3.ranks import Ranks

POSITION = "position.json"


@dataclass
class Position:
    """Where a run stands after `step` optimizer steps."""

    step: int = 0
    tokens: int = 0  # trained on so far, prompts included
    skipped: int = 0  # steps whose gradient was not finite
    packs_per_step: int = 0  # fixed when the run begins, whatever number of ranks goes on with it
    best_step: int | None = None
    best_length: float = 0.0  # estimated acceptance length on the held-out split
    parts_done: int = 0  # parts of the set that were trained to their end
    part_start: int = 0  # the step at which the parts at hand begin; equal to `step` between two parts
    finished: bool = False


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06}"


def steps_on_disk(run: Path) -> list[int]:
    """The steps that have a whole checkpoint, ascending."""
    found = (run / "checkpoints").glob(f"step-*/{POSITION}")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def save(
    run: Path, tensors: dict[str, torch.Tensor], position: Position, identity: dict[str, Any], ranks: Ranks
) -> Path:
    """Write one checkpoint, every rank its share, and give it its final name."""
    folder = folder_of(run, position.step)
    temporary = _temporary(folder)
    if ranks.first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    ranks.barrier()
    with _alone_is_fine():
        dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(temporary), save_distributed=True))
    if ranks.first:
        files.write_json(temporary / POSITION, {"position": asdict(position), **identity})
        flush_folder(temporary)
        files.publish(temporary, folder)
    ranks.barrier()
    return folder


def load(run: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, on the CPU."""
    reader = HuggingFaceStorageReader(str(folder_of(run, step)))
    stored = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    with _alone_is_fine():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder_of(run, step))))
    return tensors


def read_position(run: Path, step: int) -> tuple[Position, dict[str, Any]]:
    """Where the run stood, and its identity: the settings and data that it had. ValueError for a damaged file."""
    path = folder_of(run, step) / POSITION
    stored = files.read_json(path)
    with runs.reading(path):
        return Position(**stored.pop("position")), stored


def check_same_run(run: Path, stored: dict[str, Any], identity: dict[str, Any]) -> None:
    """ValueError naming the first setting or datum in which the run in `run` differs from `identity`."""
    if difference := files.first_difference(stored, identity):
        raise ValueError(
            f"--output-dir {run} holds a run with another {difference}; give this run its own folder, or the flags of "
            "that one to go on with it"
        )


def prune(run: Path, keep: int, best_step: int | None) -> None:
    """Remove all checkpoints but the last `keep` and the best, and what a killed run left half-written."""
    for step in steps_on_disk(run)[:-keep]:
        if step != best_step:
            folder = folder_of(run, step)
            os.replace(folder, _temporary(folder))  # so that no half-removed checkpoint bears a checkpoint's name
    for leftover in (run / "checkpoints").glob(f".*{files.TEMPORARY_SUFFIX}"):
        shutil.rmtree(leftover)


def flush_folder(folder: Path) -> None:
    """Make sure that every file of a folder is on the disk."""
    for path in folder.iterdir():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{files.TEMPORARY_SUFFIX}")  # the same for all ranks


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
