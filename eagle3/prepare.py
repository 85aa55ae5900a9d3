"""The preparation stage: input files -> tokenized_data.jsonl, draft_vocab.json, report.html, metadata.json.

One process reads rows and writes samples in order; worker processes parse, render and tokenise. Only a few chunks of
rows are under way at any time, so memory does not grow with the data. The counts of metadata.json add up: `rows_in` is
`kept` plus every reason of `dropped`; the kept conversations make `samples` lines.
"""

import os
import signal
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from itertools import compress, islice
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import numpy as np

from eagle3 import __version__, chat, conversations, files, prepared, report, runs, sources, vocab
from eagle3.conversations import Drop, Drops
from eagle3.progress import Progress
from eagle3.sources import Raw
from eagle3.status import Status
from eagle3.target import Target

CHUNK_ROWS = 64
CHUNKS_A_WORKER = 4
WORKER_BYTES = 4 << 20  # of input for each worker process: starting one takes seconds, in which another does as much
REPORT, TOKEN_COUNTS = "report.html", "token_counts.json"
CUT_WARNING = 0.10
REPORT_SAMPLES = 20


@dataclass(frozen=True)
class Settings:
    """All that decides what is written for given input and target."""

    max_seq_len: int = 2048
    draft_vocab_size: int = 32000
    turns: str = "each"
    format: str = "auto"
    roles: dict[str, str] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """One preparation: `inputs` are files, `settings` what is compared on a second run, the rest is how it runs."""

    target: Target
    chat: chat.Chat
    inputs: list[Path]
    output: Path
    settings: Settings
    trust_remote_code: bool
    workers: int
    min_kept: float
    show: int
    overwrite: bool

    @cached_property
    def description(self) -> dict[str, Any]:
        """What a finished output folder must have been made with: target, settings, versions and input."""
        inputs: dict[str, str] = {}
        for path in self.inputs:
            name = path.name if path.name not in inputs else f"{path.name} ({len(inputs) + 1})"
            inputs[name] = sources.input_hash(path)
        return {
            "target": self.target.fingerprint,
            "settings": asdict(self.settings),
            "versions": {"eagle3-train": __version__} | {p: version(p) for p in ("transformers", "tokenizers")},
            "inputs": inputs,
        }


@dataclass(frozen=True)
class Line:
    """One sample as it is written, its number of tokens, and its supervised ids int32 [n]."""

    id: str
    text: bytes
    length: int
    supervised: np.ndarray


@dataclass
class Kept:
    """What a worker made of one usable row."""

    key: str
    format: str
    lines: list[Line]
    answers: int
    clipped: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    reasoning_left_out: int = 0


Outcome = tuple[str, Kept | Drop]  # where the row stands (file:line), and what became of it


class Rows:
    """Turns raw rows into samples; a worker process holds one."""

    def __init__(self, chat: chat.Chat, settings: Settings) -> None:
        self.chat, self.settings = chat, settings
        self.roles = conversations.ROLES | settings.roles

    def outcomes(self, raws: list[Raw]) -> list[Outcome]:
        return [(raw.where, self._outcome(raw)) for raw in raws]

    def _outcome(self, raw: Raw) -> Kept | Drop:
        try:
            row = conversations.parse(raw, self.settings.format, self.roles)
            self._check_template_kwargs(row.template_kwargs)
            return self._tokens(row) if isinstance(row, conversations.Tokens) else self._conversation(row)
        except Drop as drop:
            return drop
        except Exception as error:
            raise RuntimeError(f"{raw.where}: {type(error).__name__}: {error}") from error

    def _check_template_kwargs(self, found: dict[str, Any] | None) -> None:
        expected = self.settings.chat_template_kwargs
        if found not in (None, expected):
            raise Drop("other_template_kwargs", f"made with --chat-template-kwargs {found}, this run has {expected}")

    def _tokens(self, row: conversations.Tokens) -> Kept:
        if max(row.input_ids) >= self.chat.num_tokens:
            raise Drop("bad_tokens", f"id {max(row.input_ids)}, but the target has {self.chat.num_tokens} tokens")
        expected = self.chat.target.fingerprint["tokenizer"]
        if row.tokenizer not in (None, expected):
            raise Drop(
                "other_tokenizer", f"made with the tokenizer {row.tokenizer[:12]}, the target's is {expected[:12]}"
            )
        line = self._line(row.id, row.input_ids, row.loss_mask)
        if not len(line.supervised):
            raise Drop("no_supervised_token", f"no 1 among the first {line.length} entries of its loss_mask")
        clipped = row.cut or len(row.input_ids) > line.length
        return Kept(row.key, row.format, [line], answers=1, clipped=int(clipped))

    def _conversation(self, row: conversations.Conversation) -> Kept:
        made = self.chat.samples(row, self.settings.max_seq_len, self.settings.turns)
        several = len(made.samples) > 1
        return Kept(
            key=row.key,
            format=row.format,
            lines=[
                self._line(f"{row.id}#{n}" if several else row.id, s.input_ids, s.loss_mask)
                for n, s in enumerate(made.samples, 1)
            ],
            answers=sum(s.answers for s in made.samples),
            clipped=max(row.cut, sum(len(s.input_ids) > self.settings.max_seq_len for s in made.samples)),
            left_out=made.left_out,
            reasoning_left_out=made.reasoning_left_out,
        )

    def _line(self, row_id: str, ids: list[int], mask: list[int]) -> Line:
        ids, mask = ids[: self.settings.max_seq_len], mask[: self.settings.max_seq_len]
        supervised = np.fromiter(compress(ids, mask), np.int32)
        return Line(row_id, prepared.row_line(row_id, ids, mask), len(ids), supervised)


class Seen:
    """Which hashes and ids have come before. A temporary database on disk, so that memory stays flat."""

    def __init__(self) -> None:
        self.database = sqlite3.connect("")
        self.database.execute("CREATE TABLE seen (key TEXT PRIMARY KEY) WITHOUT ROWID")

    def add(self, key: str) -> bool:
        """Whether `key` is new."""
        return self.database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (key,)).rowcount == 1


class Tally:
    """Everything that is counted over the rows."""

    def __init__(self, vocab_size: int, max_seq_len: int) -> None:
        self.rows_in = self.kept = self.samples = 0
        self.answers = self.clipped = self.reasoning_left_out = 0
        self.drops = Drops()
        self.formats: dict[str, int] = {}
        self.left_out: dict[str, int] = {}
        self.token_counts = np.zeros(vocab_size, np.int64)
        self.lengths = np.zeros(max_seq_len + 1, np.int64)

    def keep(self, kept: Kept) -> None:
        self.kept += 1
        self.samples += len(kept.lines)
        self.answers += kept.answers
        self.clipped += kept.clipped
        self.reasoning_left_out += kept.reasoning_left_out
        self.formats[kept.format] = self.formats.get(kept.format, 0) + 1
        for reason, count in kept.left_out.items():
            self.left_out[reason] = self.left_out.get(reason, 0) + count
        for line in kept.lines:
            self.lengths[line.length] += 1
            np.add.at(self.token_counts, line.supervised, 1)

    @property
    def tokens(self) -> int:
        return int(self.lengths @ np.arange(len(self.lengths)))

    @property
    def supervised(self) -> int:
        return int(self.token_counts.sum())

    @property
    def cut_share(self) -> float:
        """The share of answers that the length cuts off, wholly or in part, 0 to 1."""
        beyond = self.left_out.get("prompt_too_long", 0)
        return (self.clipped + beyond) / max(self.answers + beyond, 1)

    def counts(self) -> dict[str, Any]:
        """The counts of metadata.json. rows_in == kept + the sum of dropped."""
        assert self.rows_in == self.kept + self.drops.total, "rows were lost"
        return {
            "rows_in": self.rows_in,
            "kept": self.kept,
            "dropped": self.drops.counts,
            "dropped_examples": self.drops.examples,
            "formats": self.formats,
            "samples": self.samples,
            "answers": self.answers,
            "answers_clipped": self.clipped,
            "answers_left_out": self.left_out,
            "reasoning_left_out": self.reasoning_left_out,
        }

    def statistics(self) -> dict[str, Any]:
        """Token statistics: numbers of tokens; lengths in tokens a sample."""
        below = np.cumsum(self.lengths)
        percentile = {p: int(np.searchsorted(below, below[-1] * p / 100)) for p in (50, 90, 99)}
        return {
            "tokens": self.tokens,
            "supervised": self.supervised,
            "supervised_share": self.supervised / max(self.tokens, 1),
            "length_mean": self.tokens / max(self.samples, 1),
            "length_percentiles": percentile | {100: int(np.flatnonzero(self.lengths)[-1])},
        }


def default_workers(inputs: Iterable[Path]) -> int:
    """A worker for each core that this process may use, as far as the input is worth it."""
    size = sum(p.stat().st_size for path in inputs for p in ([path] if path.is_file() else path.rglob("*")))
    return max(1, min(len(os.sched_getaffinity(0)), size // WORKER_BYTES))


def check(plan: Plan) -> bool:
    """Refuse with ValueError what can be refused before rows are read; return whether there is nothing left to do."""
    runs.check_output_folder(plan.output, "prepare")
    files.check_file("--output-dir", plan.output / prepared.DATA, plan.inputs)
    longest = plan.target.text.get("max_position_embeddings", plan.settings.max_seq_len)
    if plan.settings.max_seq_len > longest:
        raise ValueError(f"--max-seq-len {plan.settings.max_seq_len}: the target takes at most {longest} tokens")
    vocab.choose(np.zeros(plan.target.vocab_size), plan.settings.draft_vocab_size, plan.chat.special_ids)
    return _is_done(plan)


def _is_done(plan: Plan) -> bool:
    """Whether the output folder already holds this very preparation. ValueError if it holds another one."""
    path = plan.output / prepared.METADATA
    if plan.overwrite or not (path.is_file() and (plan.output / prepared.DATA).is_file()):
        return False
    found = files.read_json(path)
    expected = {"format": prepared.FORMAT, **plan.description}
    if difference := files.first_difference({k: found.get(k) for k in expected}, expected):
        raise ValueError(f"{plan.output} holds other data: its {difference}; --overwrite replaces it")
    prepared.read_metadata(plan.output / prepared.DATA)  # else stage 2 would refuse what is called done here
    return True


def clear(folder: Path) -> None:
    """Remove an earlier preparation, its metadata first, so that what remains never looks whole."""
    for name in (prepared.METADATA, prepared.DATA, vocab.FILE, TOKEN_COUNTS, REPORT):
        (folder / name).unlink(missing_ok=True)


def run(plan: Plan) -> list[str]:
    """Prepare everything, write the output folder, and return the summary. ValueError if too little is usable."""
    with files.locked(plan.output), Status(plan.output / runs.STATUS, "prepare"):
        clear(plan.output)
        tally = Tally(plan.target.vocab_size, plan.settings.max_seq_len)
        with files.atomic(plan.output / prepared.DATA) as temporary:
            with open(temporary, "wb") as file, ExitStack() as stack:
                _write_samples(plan, tally, file, _outcomes(plan, stack))
            check_enough(tally, plan.min_kept)
        return _finish(plan, tally)


def _finish(plan: Plan, tally: Tally) -> list[str]:
    """Write the files that follow from the counts, metadata.json last, and return the summary."""
    chosen = vocab.choose(tally.token_counts, plan.settings.draft_vocab_size, plan.chat.special_ids)
    chosen.save(plan.output)
    _write_token_counts(plan.output / TOKEN_COUNTS, tally.token_counts)
    summary = list(_summary(tally, chosen, plan))
    first = islice(prepared.read_rows(plan.output / prepared.DATA), REPORT_SAMPLES)
    report.write_html(plan.output / REPORT, "\n".join(summary), first, plan.chat.decode)
    prepared.write_metadata(
        plan.output,
        {
            **plan.description,
            "counts": tally.counts(),
            "statistics": tally.statistics(),
            "draft_vocab": {"size": chosen.size, "coverage": vocab.coverage(chosen, tally.token_counts)},
        },
    )
    return summary


def describe(plan: Plan) -> Iterator[str]:
    """What is about to be done, line by line."""
    yield f"target     {plan.target.path} ({type(plan.chat.tokenizer).__name__}, {plan.target.vocab_size:,} tokens)"
    yield f"template   {plan.chat.describe()}"
    for path in plan.inputs:
        yield f"input      {path} ({_formats(path, plan.settings)})"
    yield f"workers    {plan.workers}"


def _formats(path: Path, settings: Settings) -> str:
    """The formats of the first rows of a file."""
    if settings.format != "auto":
        return settings.format
    found = {}
    for raw in islice(sources.read_raw(path), CHUNK_ROWS):
        try:
            found[conversations.parse(raw, roles=conversations.ROLES | settings.roles).format] = True
        except Drop as drop:
            found.setdefault(f"rows not usable: {drop.reason}", True)
    return ", ".join(found) or "no rows"


def show(plan: Plan) -> Iterator[str]:
    """The first samples of the output folder, supervised text marked."""
    for row in islice(prepared.read_rows(plan.output / prepared.DATA), plan.show):
        yield report.as_text(row, plan.chat.decode)


def _summary(tally: Tally, chosen: vocab.DraftVocab, plan: Plan) -> Iterator[str]:
    yield f"rows       {tally.rows_in:,} in = {tally.kept:,} kept + {tally.drops.total:,} dropped"
    yield from tally.drops.lines()
    share = tally.supervised / tally.tokens
    yield f"samples    {tally.samples:,} with {tally.tokens:,} tokens, {tally.supervised:,} supervised ({share:.1%})"
    yield f"answers    {tally.answers:,} trained on, {tally.clipped:,} of them cut by a length limit"
    for reason, count in tally.left_out.items():
        yield f"  left out, {reason}: {count:,}"
    if tally.reasoning_left_out:
        yield f"  without their reasoning, which this template's target does not write: {tally.reasoning_left_out:,}"
    if tally.cut_share > CUT_WARNING:
        limit = f"--max-seq-len {plan.settings.max_seq_len}"
        yield f"WARNING: {tally.cut_share:.0%} of the answers came cut or are cut by {limit}: their ends are not learnt"
    inside = vocab.coverage(chosen, tally.token_counts)
    distinct = int(np.count_nonzero(tally.token_counts))
    yield f"vocabulary {chosen.size:,} of {chosen.target_size:,} tokens hold {inside:.2%} of the supervised tokens"
    if distinct < chosen.size < chosen.target_size:
        yield f"  only {distinct:,} distinct tokens are supervised: tokens that never are fill the rest"


def check_enough(tally: Tally, min_kept: float) -> None:
    """ValueError if no row, or less than `min_kept` percent of the rows, can be used."""
    if not tally.rows_in:
        raise ValueError("--input: there are no rows in it; no dataset was written")
    percent = 100 * tally.kept / tally.rows_in
    if tally.kept and percent >= min_kept:
        return
    why = "0 usable rows" if not tally.kept else f"only {percent:.1f}% of the rows are usable (--min-kept {min_kept:g})"
    reasons = "\n".join(tally.drops.lines())
    raise ValueError(f"{why} of {tally.rows_in:,}; no dataset was written. Dropped:\n{reasons}".rstrip("\n"))


def _write_token_counts(path: Path, counts: np.ndarray) -> None:
    """How often each id is supervised, without those that never are."""
    seen = np.flatnonzero(counts)
    with files.atomic(path) as temporary:
        temporary.write_text(f'{{"ids": {seen.tolist()}, "counts": {counts[seen].tolist()}}}\n')


def _write_samples(plan: Plan, tally: Tally, file: IO[bytes], outcomes: Iterator[tuple[float, list[Outcome]]]) -> None:
    seen = Seen()
    total = sum(max(p.stat().st_size >> 10, 1) for p in plan.inputs)
    with Progress("prepare", total, "KiB") as progress:
        for read, chunk in outcomes:
            for where, outcome in chunk:
                _write_outcome(tally, file, seen, where, outcome)
            progress.update(round(read * total) - progress.done, f"{tally.rows_in:,} rows, {tally.tokens:,} tokens")


def _write_outcome(tally: Tally, file: IO[bytes], seen: Seen, where: str, outcome: Kept | Drop) -> None:
    tally.rows_in += 1
    if isinstance(outcome, Kept) and not seen.add(f"content {outcome.key}"):
        outcome = Drop("duplicate", "the same content came before")
    if isinstance(outcome, Drop):
        tally.drops.add(where, outcome)
        return
    tally.keep(outcome)
    for line in outcome.lines:
        file.write(line.text if seen.add(f"id {line.id}") else _renamed(line, outcome.key, seen))


def _renamed(line: Line, key: str, seen: Seen) -> bytes:
    """The line under an id of its own, since another row has its id: the stages after this one go by ids."""
    row = prepared.parse_row(line.text, line.id)
    new = f"{line.id}~{key[:12]}"
    while not seen.add(f"id {new}"):
        new += "~"
    return prepared.row_line(new, row.input_ids.tolist(), row.loss_mask.tolist())


def _outcomes(plan: Plan, stack: ExitStack) -> Iterator[tuple[float, list[Outcome]]]:
    """The outcomes of all rows in order, chunk by chunk, each with the share of the input that is read by then."""
    chunks = _chunks(plan.inputs)
    if plan.workers == 1:
        rows = Rows(plan.chat, plan.settings)
        yield from ((read, rows.outcomes(raws)) for read, raws in chunks)
        return
    arguments = (str(plan.target.path), plan.trust_remote_code, plan.settings)
    pool = ProcessPoolExecutor(plan.workers, get_context("spawn"), _start_worker, arguments)
    stack.callback(pool.shutdown, cancel_futures=True)
    try:
        yield from _in_order(pool, _work, chunks, plan.workers * CHUNKS_A_WORKER)
    except BrokenProcessPool:
        raise RuntimeError("a worker process was killed (out of memory?); fewer --workers need less memory") from None


def _in_order(
    pool: ProcessPoolExecutor, work: Callable[[Any], Any], chunks: Iterator[tuple[float, Any]], ahead: int
) -> Iterator[tuple[float, Any]]:
    """Results in the order of the chunks; at most `ahead` chunks are read and not yet given on."""
    waiting: deque[tuple[float, Future[Any]]] = deque()
    for read, chunk in chunks:
        waiting.append((read, pool.submit(work, chunk)))
        if len(waiting) >= ahead:
            done, future = waiting.popleft()
            yield done, future.result()
    while waiting:
        done, future = waiting.popleft()
        yield done, future.result()


def _chunks(inputs: list[Path]) -> Iterator[tuple[float, list[Raw]]]:
    sizes = [max(p.stat().st_size, 1) for p in inputs]
    before = 0
    for path, size in zip(inputs, sizes, strict=True):
        rows = sources.read_raw(path)
        while chunk := list(islice(rows, CHUNK_ROWS)):
            yield (before + chunk[-1].read * size) / sum(sizes), chunk
        before += size


_rows: Rows | None = None  # of this worker process


def _start_worker(target: str, trust_remote_code: bool, settings: Settings) -> None:
    global _rows
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends its workers
    _rows = Rows(chat.load(Target.open(Path(target)), trust_remote_code, settings.chat_template_kwargs), settings)


def _work(raws: list[Raw]) -> list[Outcome]:
    assert _rows is not None
    return _rows.outcomes(raws)
