"""The generation stage: the target's own answers to prompts, so that the draft trains on what it will have to draft.

A conversation is answered turn by turn, each prompt with the target's own earlier answers. FILE.jsonl gets its rows:
the messages, and the exact token ids and loss mask, which stage 1 takes as they are: no rendering and tokenising anew
that could differ from what the target said. While it runs, each finished conversation is a line of FILE.jsonl.part; the
same command goes on from there. Memory holds the ids of the conversations and those under way, not their text.
"""

import fcntl
import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from eagle3 import chat, dialogues, engine, files, runs, server, sources
from eagle3.conversations import Drops
from eagle3.dialogues import Answer, Dialogue
from eagle3.progress import Progress
from eagle3.shards import dtype_name
from eagle3.status import Status
from eagle3.target import Target

if TYPE_CHECKING:
    from vllm import RequestOutput

QUEUED_PROMPT_TOKENS = 1 << 16
FORMAT = "eagle3-answers/2"
CUT_WARNING = 0.1  # share of answers cut by the length above which the user is told
MAX_REFUSED = 10  # requests that a server may refuse while it refuses more than it answers


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags of 00."""

    model_path: Path
    input: list[Path]
    output: Path
    max_tokens: int
    temperature: float
    base_url: str | None = None
    top_p: float = 1.0
    seed: int = 0
    batch_size: int = 64
    tp_size: int = 1
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    limit: int | None = None
    keep_cut: bool = False
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """A checked plan.

    `turns`: how many answers each usable conversation wants, by id, in the order of the input; `drops`: the other rows;
    `settings`: what a run that goes on must agree with.
    """

    options: Options
    chat: chat.Chat
    server: server.Server | None
    turns: dict[str, int]
    drops: Drops
    settings: dict[str, Any]
    max_model_len: int
    overwrite: bool

    @property
    def part(self) -> Path:
        return self.options.output.with_name(self.options.output.name + ".part")

    @property
    def settings_file(self) -> Path:
        return self.options.output.with_name(self.options.output.name + ".meta.json")

    @property
    def finished(self) -> bool:
        return self.options.output.is_file() and not self.overwrite


def plan_generation(options: Options, *, overwrite: bool = False) -> Generation:
    """Read and render the prompts and check them against the target. ValueError names what does not fit."""
    files.check_file("--output", options.output, sources.expand(options.input))
    target = Target.open(options.model_path)
    model_chat = chat.load(target, options.trust_remote_code, options.chat_template_kwargs)
    connected = server.connect(options.base_url) if options.base_url else None
    limits = (options.max_model_len, connected and connected.max_model_len, target.max_positions)
    room = min(limit for limit in limits if limit)
    drops, turns, need = Drops(), {}, 0
    for dialogue in dialogues.read(options.input, model_chat, room, options.limit, drops):
        turns[dialogue.id] = len(dialogue.turns)
        need = max(need, dialogues.longest(dialogue, model_chat, options.max_tokens))
    print(*drops.lines(), sep="\n", end="\n" if drops.total else "")
    if not turns:
        raise ValueError(f"--input {' '.join(map(str, options.input))}: no usable prompt")
    settings = {
        "format": FORMAT,
        "target": target.fingerprint,
        "inputs": [sources.input_hash(path) for path in sources.expand(options.input)],
        **{k: v for k, v in asdict(options).items() if k in ("max_tokens", "temperature", "top_p", "seed", "limit")},
        "keep_cut": options.keep_cut,
        "chat_template_kwargs": options.chat_template_kwargs,
    }
    max_model_len = min(room, need)  # no more KV cache than the prompts need
    generation = Generation(options, model_chat, connected, turns, drops, settings, max_model_len, overwrite)
    _check_output(generation)
    return generation


def _check_output(generation: Generation) -> None:
    output, settings_file = generation.options.output, generation.settings_file
    if generation.overwrite:
        return
    if settings_file.is_file():
        found = files.read_json(settings_file)
        found.pop("counts", None)
        if difference := files.first_difference(found, generation.settings):
            raise ValueError(f"--output {output}: begun with other settings: {difference} (or use --overwrite)")
    elif output.exists():
        raise ValueError(f"--output {output}: exists and was not written by this stage (or use --overwrite)")


def generate(generation: Generation) -> None:
    """Answer every conversation that is not finished yet, then write the output in the order of the input."""
    generation.part.parent.mkdir(parents=True, exist_ok=True)
    with _locked(generation.part) as file, Status(runs.status_beside(generation.options.output), "generate"):
        if generation.overwrite:
            file.truncate(0)
            generation.options.output.unlink(missing_ok=True)
        files.write_json(generation.settings_file, generation.settings)
        journal = Journal(file)
        print(f"conversations: {len(generation.turns):,}, {len(journal.places):,} of them finished before")
        refused = Drops()
        if len(journal.places) < len(generation.turns):
            _answer_rest(generation, journal, refused)
        print(*refused.lines(), sep="\n", end="\n" if refused.total else "")
        counts = _write_output(generation, journal, refused)
        generation.part.unlink()
    print(*_report(generation.options, counts), sep="\n")


@contextmanager
def _locked(part: Path) -> Iterator[IO[bytes]]:
    """The open .part file, held for this process alone. ValueError if another run writes it."""
    with open(part, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{part}: another run is writing it") from None
        yield file


class Journal:
    """The finished conversations, a line each (see `_entry`); `places`: where in the file each of them begins.

    What a kill left half-written is cut off; a line that is no JSON is made again.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.places = file, dict[str, int]()
        file.seek(0)
        end = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                self.places[json.loads(line)["id"]] = end
            except ValueError:
                print(f"one line of {file.name} is damaged: its conversation is answered again")
            end += len(line)
        file.truncate(end)

    def append(self, entry: dict[str, Any]) -> None:
        self.places[entry["id"]] = self.file.seek(0, 2)
        self.file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        self.file.flush()

    def read(self, dialogue_id: str) -> dict[str, Any]:
        self.file.seek(self.places[dialogue_id])
        return json.loads(self.file.readline())


class Requests:
    """The dialogues to ask, in turn: one under way before a new one.

    An iterator that may go on after its end, since an answer can bring the next question; so what is made of it must be
    a map, as a generator that has ended once has ended for good.
    """

    def __init__(self, fresh: Iterator[Dialogue]) -> None:
        self.fresh = fresh
        self.next_turns: deque[Dialogue] = deque()
        self.asked: dict[str, Dialogue] = {}

    def __iter__(self) -> "Requests":
        return self

    def __next__(self) -> Dialogue:
        dialogue = self.next_turns.popleft() if self.next_turns else next(self.fresh)
        self.asked[dialogue.id] = dialogue
        return dialogue


def _answer_rest(generation: Generation, journal: Journal, refused: Drops) -> None:
    """Ask whatever the journal does not have. A server's refusals are counted in `refused`, and asked again next time.

    ValueError when a server refuses more than it answers.
    """
    options, room = generation.options, generation.max_model_len
    fresh = dialogues.read(options.input, generation.chat, room, options.limit, Drops())
    requests = Requests(d for d in fresh if d.id not in journal.places)
    turns = generation.turns
    done = sum(turns[i] for i in journal.places)
    start, tokens, answered = time.monotonic(), 0, 0
    with Progress("generate", sum(turns.values()), "answers", done=done) as progress:
        for answer in _answers(generation, requests):
            dialogue = requests.asked.pop(answer.id)
            before = dialogue.num_left
            if answer.refusal:
                refused.add(answer.id, answer.refusal)
                progress.update(before)
                if refused.total >= MAX_REFUSED and refused.total > answered:
                    raise ValueError(f"--base-url {options.base_url}: {answer.refusal}")
                continue
            dialogues.take(dialogue, answer, generation.chat, room, options.keep_cut)
            if dialogue.num_left:
                requests.next_turns.append(dialogue)
            else:
                journal.append(_entry(generation, dialogue))
            answered, tokens = answered + 1, tokens + answer.num_tokens
            rate = tokens / (time.monotonic() - start)
            progress.update(before - dialogue.num_left, f"{tokens:,} tokens, {rate:,.0f} tokens/s")


def _answers(generation: Generation, requests: Requests) -> Iterator[Answer]:
    """What the target says to each request, as it comes: by the running server, else by an engine started here."""
    options = generation.options
    if generation.server:
        asked = map(partial(_question, generation), requests)
        yield from server.stream(generation.server, asked, options.batch_size)
        return
    llm = engine.start(
        options.model_path,
        tp_size=options.tp_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_model_len=generation.max_model_len,
        dtype=dtype_name(engine.dtype_for(generation.chat.target)),
        max_num_seqs=options.batch_size,
        seed=options.seed,
    )
    try:
        asked = map(partial(_request, generation), requests)
        yield from map(_as_answer, engine.stream(llm, asked, QUEUED_PROMPT_TOKENS))
    finally:
        engine.stop(llm)


def _sampling(generation: Generation, dialogue: Dialogue) -> dict[str, Any]:
    """How the next answer is sampled; the seed is the conversation's own, whatever runs beside it."""
    options = generation.options
    seed = int(files.sha256(f"{options.seed} {dialogue.id}".encode())[:8], 16)
    return {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": None if options.temperature == 0 else seed,
        "max_tokens": min(options.max_tokens, generation.max_model_len - len(dialogue.prompt_ids)),
    }


def _request(generation: Generation, dialogue: Dialogue) -> engine.Request:
    from vllm import SamplingParams

    stop_ids = generation.chat.stop_ids
    params = SamplingParams(**_sampling(generation, dialogue), stop_token_ids=stop_ids, detokenize=False)
    return engine.Request(dialogue.id, dialogue.prompt_ids, params)


def _as_answer(output: "RequestOutput") -> Answer:
    said = output.outputs[0]
    return Answer(output.request_id, said.finish_reason, len(said.token_ids), ids=list(said.token_ids))


def _question(generation: Generation, dialogue: Dialogue) -> server.Question:
    kwargs = generation.options.chat_template_kwargs
    return server.Question(
        dialogue.id, dialogue.messages, dialogue.tools, kwargs, dialogue.prompt_ids, _sampling(generation, dialogue)
    )


def _entry(generation: Generation, dialogue: Dialogue) -> dict[str, Any]:
    """A finished conversation as a line of the journal."""
    shared = {
        "tokenizer": generation.settings["target"]["tokenizer"],
        "chat_template_kwargs": generation.options.chat_template_kwargs,
        **({"category": dialogue.category} if dialogue.category else {}),
    }
    several = len(dialogue.rows) > 1
    ids = [f"{dialogue.id}#{n}" if several else dialogue.id for n in range(1, len(dialogue.rows) + 1)]
    rows = [{"id": i, **row, **shared} for i, row in zip(ids, dialogue.rows, strict=True)]
    return {"id": dialogue.id, "rows": rows, "answered": dialogue.answered, "left_out": dialogue.left_out}


@dataclass
class Counts:
    """rows_in == kept + the sum of dropped; the answers that those rows ask for == answered + the sum of left_out."""

    rows_in: int
    dropped: dict[str, int]
    kept: int = 0
    rows: int = 0
    answered: int = 0
    cut: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    def add(self, entry: dict[str, Any]) -> None:
        rows, left_out = entry["rows"], entry["left_out"]
        self.answered += entry["answered"]
        self.cut += "cut" in left_out or (bool(rows) and rows[-1]["finish_reason"] == "length")
        self.kept += bool(rows)
        self.rows += len(rows)
        for reason, count in left_out.items():
            # a cut answer is one, with the turns that it keeps from being asked
            split = {"cut": 1, "after_cut": count - 1} if reason == "cut" else {reason: count}
            for name, number in split.items():
                self.left_out[name] = self.left_out.get(name, 0) + number
        if not rows:
            reason = next(iter(left_out))
            self.dropped[reason] = self.dropped.get(reason, 0) + 1


def _write_output(generation: Generation, journal: Journal, refused: Drops) -> Counts:
    """The rows in the order of the input, and the counts beside the settings. ValueError if there is no row."""
    dropped = dict(generation.drops.counts)
    for reason, count in refused.counts.items():
        dropped[reason] = dropped.get(reason, 0) + count
    counts = Counts(len(generation.turns) + generation.drops.total, dropped)
    with files.atomic(generation.options.output) as temporary:
        with open(temporary, "w") as file:
            for dialogue_id in filter(journal.places.__contains__, generation.turns):
                entry = journal.read(dialogue_id)
                counts.add(entry)
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in entry["rows"])
        assert counts.rows_in == counts.kept + sum(counts.dropped.values()), "conversations were lost"
        if not counts.kept:
            why = ", ".join(f"{reason}: {count:,}" for reason, count in counts.dropped.items())
            raise ValueError(f"no answer is left ({why}); for cut ones raise --max-tokens, or --keep-cut")
        files.write_json(generation.settings_file, {**generation.settings, "counts": asdict(counts)})
    return counts


def _report(options: Options, counts: Counts) -> Iterator[str]:
    """What was made; a warning when many answers were cut by the length."""
    dropped = sum(counts.dropped.values())
    yield f"done: {counts.rows_in:,} conversations = {counts.kept:,} kept + {dropped:,} dropped -> {options.output}"
    yield from (f"  dropped, {reason}: {count:,}" for reason, count in counts.dropped.items())
    yield f"      {counts.rows:,} rows with {counts.answered:,} answers"
    yield from (f"  left out, {reason}: {count:,}" for reason, count in counts.left_out.items() if count)
    fate = "kept and marked" if options.keep_cut else "left out"
    yield f"      {counts.cut:,} answers were cut by --max-tokens {options.max_tokens} ({fate})"
    made = counts.answered + (0 if options.keep_cut else counts.cut)
    if counts.cut > CUT_WARNING * made:
        yield f"WARNING: {counts.cut / made:.0%} of the answers are cut; a larger --max-tokens gives whole ones"
