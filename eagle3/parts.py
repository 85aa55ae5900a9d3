"""Parts: a set of states too large for the disk, extracted, trained on and deleted one part after another.

    02 --part 1/3, 03 on it, delete it; 02 --part 2/3, 03 on it, ...

makes one training: one schedule of the learning rate, one optimizer, one held-out split. A set that was extracted
whole is part 1 of 1.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from eagle3 import files
from eagle3.batches import Pack, split
from eagle3.optim import learning_rate
from eagle3.shards import ShardSet, copy_samples, part_name

HELD_OUT = "held_out"  # in the run's folder


@dataclass(frozen=True)
class Parts:
    """Which parts are at hand: ascending numbers from 1, of `total`."""

    numbers: list[int]
    total: int

    def __str__(self) -> str:
        return " and ".join(f"{number}/{self.total}" for number in self.numbers)

    @property
    def last(self) -> int:
        return self.numbers[-1]

    @property
    def all_at_once(self) -> bool:
        return len(self.numbers) == self.total

    @property
    def markers(self) -> list[str]:
        """The names of the files that say that these parts are trained."""
        return [f"{part_name(number, self.total)}.done" for number in self.numbers]

    def check_turn(self, done: int) -> None:
        """ValueError unless these parts are the next ones after the first `done`, or were all trained before."""
        if self.last > done and self.numbers != list(range(done + 1, done + 1 + len(self.numbers))):
            raise ValueError(
                f"--hidden-states: part {self} is given, but {done} of {self.total} parts are trained: part "
                f"{done + 1}/{self.total} is next. Extract that one with 02_extract_hidden_states.py --part"
            )


@dataclass(frozen=True)
class Samples:
    """What to train on, indices of the run's data, and what is held out, `held_out` indices of `held_out_data`.

    While a run takes its parts one after another, the samples held out of the first stay in the run's folder: all
    evaluations are on the same ones, and all other parts are trained on whole.
    """

    train: Pack
    held_out_data: ShardSet
    held_out: Pack

    @classmethod
    def of(cls, data: ShardSet, eval_fraction: float, parts_done: int, run: Path) -> "Samples":
        """ValueError if the samples that were held out before are gone, or are to be trained on."""
        kept = run / HELD_OUT
        if not (parts_done and eval_fraction):
            train, held_out = split(data.sample_ids, eval_fraction)
            return cls(train, data, held_out)
        if not kept.is_dir():
            raise ValueError(f"{kept}: missing; it holds the samples of the first part that this run is judged by")
        held_out_data = ShardSet(kept)
        if both := sorted(set(held_out_data.sample_ids) & set(data.sample_ids)):
            raise ValueError(f"--hidden-states: sample {both[0]!r} is held out in {kept}; this is no other part")
        return cls(list(range(len(data))), held_out_data, list(range(len(held_out_data))))

    def keep(self, run: Path) -> None:
        """Copy what is held out into the run's folder, if it is not there: its part may be deleted."""
        if self.held_out and not (run / HELD_OUT).exists():
            temporary = files.temporary_name(run / HELD_OUT)
            copy_samples(self.held_out_data, self.held_out, temporary)
            files.publish(temporary, run / HELD_OUT)


@dataclass(frozen=True)
class Course:
    """Where the parts at hand lie in the schedule over all parts, in which every part takes the same share.

    So the rates of a step are those of the same place in a schedule whose parts were all as long as these: nothing has
    to be known of the parts that are still to be extracted but their number.

    `start`: the run's step at which these parts begin; `steps`: their steps; `done`, `at_hand`, `total`: parts.
    """

    start: int
    steps: int
    done: int
    at_hand: int
    total: int

    @classmethod
    def of(cls, parts: Parts, done: int, start: int, available: int, max_steps: int | None) -> "Course":
        """`available`: the steps that the parts at hand give; `max_steps`: the most that all parts may take."""
        at_hand, total = len(parts.numbers), parts.total
        if max_steps is not None:
            available = min(available, max_steps * (done + at_hand) // total - max_steps * done // total)
        return cls(start, available, done, at_hand, total)

    @property
    def end(self) -> int:
        """The run's step after the last one of these parts."""
        return self.start + self.steps

    @property
    def num_steps(self) -> int:
        """Steps of the whole run, if the parts to come are like these."""
        return self.start + round(self.steps * (self.total - self.done) / self.at_hand)

    def learning_rate(self, step: int, warmup_fraction: float, peak: float) -> float:
        """The rate of the run's step number `step`; see `optim.learning_rate`."""
        share = self.steps / self.at_hand
        whole = share * self.total
        warmup = math.ceil(warmup_fraction * whole)
        return learning_rate(share * self.done + step - self.start, whole, warmup, peak)
