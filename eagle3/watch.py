"""What an extraction says of itself: a line every few seconds in the log, status.json for scripts, sound counts."""

from types import TracebackType
from typing import TYPE_CHECKING, Any

from eagle3 import runs
from eagle3.progress import Progress
from eagle3.status import ENDED, Status

if TYPE_CHECKING:
    from eagle3.extract import Extraction

STATUS = runs.STATUS


class Watch:
    """Counts a run over the shards `missing`; a context manager whose end says what became of every sample.

    status.json (see eagle3/status.py) has the states loading, extracting and stopping before done, stopped or failed;
    `samples` (input = written + skipped + failed once the run has ended; a sample counts as written when its shard has
    its final name), `gb_written`, `gb_per_s` and `self_check`.
    """

    def __init__(self, extraction: "Extraction", missing: list[int]) -> None:
        self._extraction, self._missing = extraction, missing
        self._done = len(extraction.rows) - extraction.samples_of(missing)
        self._rows_written, self._check = 0, ""
        self._progress: Progress | None = None
        self._status = Status(extraction.folder / STATUS, "extract", "loading", self._own)

    def start(self) -> None:
        """The target is loaded: rates count from here."""
        total, todo = self._extraction.num_tokens, self._extraction.tokens_of(self._missing)
        self._status.state = "extracting"
        self._progress = self._status.work = Progress("extract", total, "tokens", done=total - todo)
        self._status.write()

    def stopping(self) -> None:
        self._status.state = "stopping"

    def sample_done(self, tokens: int) -> None:
        """One more sample has left the engine."""
        assert self._progress is not None
        self._done += 1
        self._progress.update(tokens, self._note())

    def worker_says(self, rows_written: int, check: str) -> None:
        """What the worker last reported: rows in files, and the self-check's line."""
        self._rows_written, self._check = rows_written, check
        if self._progress is not None:
            self._progress.update(0, self._note())

    def counts(self) -> dict[str, int]:
        """input, skipped (in shards of an earlier run), written (in shards of this run), and the rest, by the files."""
        left = self._extraction.unpublished(self._missing)
        todo, failed = self._extraction.samples_of(self._missing), self._extraction.samples_of(left)
        total = len(self._extraction.rows)
        return {"input": total, "skipped": total - todo, "written": todo - failed, "failed": failed}

    def __enter__(self) -> "Watch":
        self._status.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.__exit__(kind, error, trace)
        self._status.__exit__(kind, error, trace)
        counts, stopped = self.counts(), self._status.state == "stopped"
        print(self._check or "self-check: no sample ran")
        print(
            f"samples: {counts['written']:,} written + {counts['skipped']:,} skipped (finished before) + "
            f"{counts['failed']:,} {'to do' if stopped else 'failed'} = {counts['input']:,} input; "
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

    def _own(self) -> dict[str, Any]:
        entries: dict[str, Any] = {"samples": self._samples()}
        if self._progress is not None:
            written, rate = self._gigabytes()
            entries |= {"gb_written": written, "gb_per_s": rate}
        return entries | {"self_check": self._check}

    def _samples(self) -> dict[str, int]:
        counts = self.counts()
        if self._status.state not in ENDED:
            counts["failed"] = 0
        return counts | {"done": self._done}
