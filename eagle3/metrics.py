"""What a training says about itself: sums over rows, the estimated acceptance length, one line, one JSONL record."""

import importlib.util
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from eagle3 import files
from eagle3.ranks import Ranks
from eagle3.ttt import StepOutput

FILE = "metrics.jsonl"


class Sums:
    """Sums over supervised rows by step position, kept on the device: [loss, correct, accepted, rows] x [steps]."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.table = torch.zeros(4, steps, dtype=torch.float64, device=device)

    def add(self, output: StepOutput) -> None:
        rows = (output.loss_sums, output.correct, output.accepted, output.counts)
        self.table += torch.stack([row.detach().to(self.table.dtype) for row in rows])

    def means(self, ranks: Ranks, decay: float, num_drafts: int) -> dict[str, Any]:
        """Means over all ranks' rows; the sums start anew. See `means_of`."""
        table = self.table.clone()
        self.table.zero_()
        ranks.sum(table)
        return means_of(table.cpu(), decay, num_drafts)


def means_of(table: torch.Tensor, decay: float, num_drafts: int) -> dict[str, Any]:
    """`loss` (the decayed sum over steps of the mean loss), and by step position `loss_by_step`, `accuracy` (the
    draft's first choice is the teacher's) and `accepted` (so it is at this and all earlier steps).

    `acceptance_length` = 1 + the sum of `accepted` over the first `num_drafts` steps: tokens that one forward pass
    of the target yields, the bonus token included, if every supervised row were as likely to be drafted from.
    """
    loss, correct, accepted, rows = table
    rows = rows.clamp(min=1)
    by_step = (loss / rows).tolist()
    chain = (accepted / rows).tolist()
    return {
        "loss": sum(decay**i * value for i, value in enumerate(by_step)),
        "loss_by_step": by_step,
        "accuracy": (correct / rows).tolist(),
        "accepted": chain,
        "acceptance_length": 1 + sum(chain[:num_drafts]),
    }


class Window:
    """What happened since the last line: sums, gradient norms, tokens and operations of all ranks, seconds of waiting
    for data."""

    def __init__(self, ttt_steps: int, device: torch.device) -> None:
        self.sums = Sums(ttt_steps, device)
        self.norms: list[float] = []
        self._restart()

    def _restart(self) -> None:
        self.start, self.waited = time.perf_counter(), 0.0
        self.tokens, self.flops = 0, 0.0

    def add(self, sums: Sums, norm: float) -> None:
        self.sums.table += sums.table
        self.norms.append(norm)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting for data."""
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block out of the time."""
        start = time.perf_counter()
        yield
        self.start += time.perf_counter() - start

    def rates(self, world: int, peak: float | None) -> dict[str, float | None]:
        """`tokens_per_s` of all ranks, `tflops` and `mfu` of each of `world`, `step_s` and `data_wait_share` of this
        one; the time starts anew. `peak`: operations a second that one could do; without it there is no `mfu`."""
        seconds = time.perf_counter() - self.start
        rates = {
            "tokens_per_s": self.tokens / seconds,
            "tflops": self.flops / seconds / world / 1e12,
            "mfu": self.flops / seconds / world / peak if peak else None,
            "step_s": seconds / len(self.norms),
            "data_wait_share": self.waited / seconds,
        }
        self._restart()
        return rates


def memory_gb(device: torch.device) -> float:
    """Peak memory of this process in GB: the GPU's, or main memory without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def line(values: dict[str, Any], num_steps: int, num_epochs: int) -> str:
    """One fixed-width line on the steps since the last one."""
    accepted = " ".join(f"{100 * share:4.1f}" for share in values["accepted"])
    mfu = "   -" if values["mfu"] is None else f"{100 * values['mfu']:3.0f}%"
    return (
        f"step {values['step']:6d}/{num_steps} {100 * values['step'] / num_steps:5.1f}%  "
        f"epoch {values['epoch']:6.2f}/{num_epochs}  loss {values['loss']:8.4f}  grad {values['grad_norm']:8.3f}  "
        f"lr {values['lr']:.2e}  accepted % {accepted}  length {values['acceptance_length']:4.2f}  "
        f"{values['tokens_per_s']:9,.0f} tok/s  mfu {mfu}  wait {100 * values['data_wait_share']:4.1f}%  "
        f"{values['memory_gb']:5.1f} GB  ETA {timedelta(seconds=round(values['eta_s']))}"
    )


def check_trackers(names: list[str]) -> None:
    """ValueError naming the package that a chosen tracker needs and that is not installed."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ValueError(f"--track {missing[0]}: the package is not installed (pip install {missing[0]})")


class Recorder:
    """Appends every record to metrics.jsonl and passes its numbers on to the trackers chosen."""

    def __init__(self, run: Path, trackers: list[str], settings: dict[str, Any], step: int) -> None:
        """A run that goes on at `step` forgets what it recorded of later steps."""
        run.mkdir(parents=True, exist_ok=True)
        self.path = run / FILE
        kept = self.path.read_text().splitlines() if self.path.is_file() else []
        with files.atomic(self.path) as temporary:
            temporary.write_text("".join(f"{text}\n" for text in kept if json.loads(text)["step"] <= step))
        self.sinks = [SINKS[name](run, settings, step) for name in trackers]

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """`kind` is train or eval; `values` holds `step`, numbers and lists by step position."""
        with open(self.path, "a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")
        for sink in self.sinks:
            sink(values["step"], flat(kind, values))


def flat(kind: str, values: dict[str, Any]) -> dict[str, float]:
    """`{"loss": 1.0, "accepted": [0.5]}` of kind train -> `{"train/loss": 1.0, "train/accepted_0": 0.5}`."""
    numbers: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, list):
            numbers |= {f"{kind}/{key}_{i}": item for i, item in enumerate(value)}
        elif key != "step" and value is not None:
            numbers[f"{kind}/{key}"] = value
    return numbers


def _tensorboard(run: Path, settings: dict[str, Any], step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run / "tensorboard", purge_step=step + 1)

    def sink(at: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, at)
        writer.flush()

    return sink


def _wandb(run: Path, settings: dict[str, Any], step: int) -> Any:
    import wandb

    session = wandb.init(project="eagle3-train", name=run.resolve().name, dir=run, config=settings)
    return lambda at, numbers: session.log(numbers, step=at)


def _mlflow(run: Path, settings: dict[str, Any], step: int) -> Any:
    import mlflow

    mlflow.set_experiment("eagle3-train")
    mlflow.start_run(run_name=run.resolve().name)
    mlflow.log_params(settings)
    return lambda at, numbers: mlflow.log_metrics(numbers, step=at)


SINKS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
