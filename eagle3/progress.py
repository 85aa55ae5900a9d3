"""Progress of long work: a bar on a terminal, one plain line every few seconds in a log."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

from eagle3 import status

EVERY_S = 5.0


class Progress:
    """Counts `unit`s of `total`. Use as a context manager; `update(n)` after each piece of work.

    The stage's status file, if it keeps one, hears of it too (see `status.Status`).
    """

    def __init__(self, what: str, total: int, unit: str, *, done: int = 0) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = self.start_done = done
        self.start = self.last_line = time.monotonic()
        self.note = ""
        terminal = sys.stderr.isatty()
        self.bar = tqdm(total=total, desc=what, unit=f" {unit}", initial=done, unit_scale=True) if terminal else None

    def update(self, n: int, note: str = "") -> None:
        """Add `n` units; `note` is shown at the end of the line."""
        self.done += n
        self.note = note
        if self.bar is not None:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(n)
        elif time.monotonic() - self.last_line >= EVERY_S:
            self._print()
        status.tell(self)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start

    @property
    def rate(self) -> float:
        """Units a second since the start."""
        return (self.done - self.start_done) / max(self.seconds, 1e-9)

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at this rate; None while nothing is done."""
        return (self.total - self.done) / self.rate if self.rate else None

    def line(self) -> str:
        """`what  done/total unit (percent)  rate unit/s  ETA h:mm:ss  note`."""
        percent = 100 * self.done / self.total if self.total else 100.0
        eta = "unknown" if self.eta_s is None else _clock(self.eta_s)
        text = f"{self.what}  {self.done:,}/{self.total:,} {self.unit} ({percent:.1f}%)"
        return f"{text}  {self.rate:,.1f} {self.unit}/s  ETA {eta}  {self.note}".rstrip()

    def _print(self) -> None:
        print(self.line(), flush=True)
        self.last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()
        else:
            self._print()
        status.tell(self)


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
