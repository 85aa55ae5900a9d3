"""What an extraction says of itself: a line every few seconds in the log, status.json for scripts, sound counts."""

import os
import time
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from eagle3 import files
from eagle3.progress import Progress

if TYPE_CHECKING:
    from eagle3.extract import Extraction

STATUS = "status.json"
STATUS_EVERY_S = 5.0


class Watch:
    """Counts a run over the shards `missing`; a context manager whose end says what became of every sample.

    status.json has `state` (loading, extracting, stopping; done, stopped, failed), `samples` (input = written + skipped
    + failed once the run has ended; a sample counts as written when its shard has its final name), `tokens`, rates,
    `eta_s`, `self_check`, `last_error`, `process` and the time of the update.
    """

    def __init__(self, extraction: "Extraction", missing: list[int]) -> None:
        self._extraction, self._missing = extraction, missing
        self._state, self._error = "loading", None
        self._done = len(extraction.rows) - extraction.samples_of(missing)
        self._rows_written, self._check = 0, ""
        self._progress: Progress | None = None
        self._updated = 0.0

    def start(self) -> None:
        """The target is loaded: rates count from here."""
        total, todo = self._extraction.num_tokens, self._extraction.tokens_of(self._missing)
        self._state = "extracting"
        self._progress = Progress("extract", total, "tokens", done=total - todo)
        self._write_status()

    def stopping(self) -> None:
        self._state = "stopping"

    def sample_done(self, tokens: int) -> None:
        """One more sample has left the engine."""
        assert self._progress is not None
        self._done += 1
        self._progress.update(tokens, self._note())
        if time.monotonic() - self._updated >= STATUS_EVERY_S:
            self._write_status()

    def worker_says(self, rows_written: int, check: str) -> None:
        """What the worker last reported: rows in files, and the self-check's line."""
        self._rows_written, self._check = rows_written, check

    def counts(self) -> dict[str, int]:
        """input, skipped (in shards of an earlier run), written (in shards of this run), and the rest, by the files."""
        left = self._extraction.unpublished(self._missing)
        todo, failed = self._extraction.samples_of(self._missing), self._extraction.samples_of(left)
        total = len(self._extraction.rows)
        return {"input": total, "skipped": total - todo, "written": todo - failed, "failed": failed}

    def __enter__(self) -> "Watch":
        self._write_status()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.__exit__(kind, error, trace)
        if error is None:
            self._state = "done"
        else:
            self._state = "stopped" if isinstance(error, InterruptedError | KeyboardInterrupt) else "failed"
            self._error = f"{type(error).__name__}: {error}"
        self._write_status()
        counts = self.counts()
        print(self._check or "self-check: no sample ran")
        print(
            f"samples: {counts['written']:,} written + {counts['skipped']:,} skipped (finished before) + "
            f"{counts['failed']:,} {'failed' if self._state != 'stopped' else 'to do'} = {counts['input']:,} input; "
            f"under {self._extraction.folder}",
            flush=True,
        )

    def _gigabytes(self) -> tuple[float, float]:
        """GB in files so far, and GB/s."""
        assert self._progress is not None
        written = self._rows_written * self._extraction.token_bytes / 1e9
        return written, written / max(self._progress.seconds, 1e-9)

    def _note(self) -> str:
        written, rate = self._gigabytes()
        return (
            f"{self._done:,}/{len(self._extraction.rows):,} samples  {written:.2f} GB  {rate:.2f} GB/s  {self._check}"
        )

    def _write_status(self) -> None:
        status: dict[str, Any] = {"state": self._state, "samples": self._samples()}
        if self._progress is not None:
            written, rate = self._gigabytes()
            status |= {
                "tokens": {"input": self._progress.total, "done": self._progress.done},
                "tokens_per_s": self._progress.rate,
                "eta_s": self._progress.eta_s,
                "gb_written": written,
                "gb_per_s": rate,
            }
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        status |= {"self_check": self._check, "last_error": self._error, "process": os.getpid(), "updated": now}
        try:
            files.write_json(self._extraction.folder / STATUS, status)
        except OSError as error:  # a full disk must not hide what the run itself has to say
            print(f"{STATUS}: not updated: {error}", flush=True)
        self._updated = time.monotonic()

    def _samples(self) -> dict[str, int]:
        counts = self.counts()
        if self._state not in ("done", "stopped", "failed"):
            counts["failed"] = 0
        return counts | {"done": self._done}
