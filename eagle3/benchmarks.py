"""The prompts that a draft is measured on: files by path, or by a benchmark's name (data/get_prompts.py makes them)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3 import conversations, files, sources
from eagle3.chat import Chat
from eagle3.conversations import Drop, Drops, Message

NAMES = ("mt_bench", "humaneval", "gsm8k")
ALL = "all"  # the name of their sum
FOLDER = Path(__file__).parents[1] / "data" / "prompts"


@dataclass(frozen=True)
class Prompt:
    """One prompt of a benchmark. `ids`: rendered by the target's chat template; None if only a server renders it."""

    id: str
    category: str | None
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    ids: list[int] | None

    @cached_property
    def key(self) -> str:
        """A hash of what is asked."""
        return files.sha256_json([self.messages, self.tools] if self.ids is None else self.ids)


Benchmarks = dict[str, list[Prompt]]


def locate(asked: Sequence[Path]) -> dict[str, Path]:
    """The file of each --prompts by the benchmark's name. ValueError for one that is not there, or two of one name."""
    found: dict[str, Path] = {}
    for path in asked:
        name, file = _benchmark_of(path)
        if name in found:
            raise ValueError(f"--prompts {path}: {found[name]} is called {name!r} too; rename one of them")
        if name == ALL:
            raise ValueError(f"--prompts {path}: {ALL!r} is the name of all benchmarks together; rename the file")
        found[name] = file
    return found


def _benchmark_of(path: Path) -> tuple[str, Path]:
    if path.exists():
        sources.expand([path], "--prompts")  # refuses a folder without files
        return _stem(path), path
    if str(path) not in NAMES:
        raise ValueError(f"--prompts {path}: no such file (give a path, or one of {', '.join(NAMES)})")
    file = FOLDER / f"{path}.jsonl"
    if not file.is_file():
        raise ValueError(
            f"--prompts {path}: {file} is not there; make it with: python data/get_prompts.py data/prompts"
        )
    return str(path), file


def _stem(path: Path) -> str:
    """`a` of a.jsonl and of a.jsonl.gz."""
    while path.suffix.lower() in (*sources.SUFFIXES, ".gz", ".zst"):
        path = path.with_suffix("")
    return path.name


def read(path: Path, chat: Chat | None, room: int | None, limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of a file; unusable ones are counted and printed.

    `chat` renders them, `room` is how many tokens a prompt may have. ValueError if none is left, or one stands twice.
    """
    drops, prompts = Drops(), dict[str, Prompt]()
    contents, places = dict[str, str](), dict[str, str]()
    later_turns = 0
    for read_prompt in conversations.read_prompts([path], drops):
        if len(prompts) == limit:
            break
        try:
            prompt = _prompt(read_prompt, chat, room)
        except Drop as drop:
            drops.add(read_prompt.where, drop)
            continue
        if prompt.id in prompts:
            raise ValueError(
                f"--prompts {path}: prompt {prompt.id!r} stands twice, at {places[prompt.id]} and {read_prompt.where}; "
                "take one out, or it counts twice"
            )
        if prompt.key in contents:
            drops.add(read_prompt.where, Drop("duplicate", f"{prompt.id!r} asks what {contents[prompt.key]!r} asks"))
            continue
        prompts[prompt.id], places[prompt.id], contents[prompt.key] = prompt, read_prompt.where, prompt.id
        later_turns += read_prompt.later_turns
    print(*_notes(path, drops, later_turns), sep="", end="")
    if not prompts:
        raise ValueError(f"--prompts {path}: no usable prompt" if drops.total else f"--prompts {path}: is empty")
    return list(prompts.values())


def _prompt(found: conversations.Prompt, chat: Chat | None, room: int | None) -> Prompt:
    ids = chat.prompt_ids(found.messages, found.tools) if chat else None
    if ids is not None and room is not None and len(ids) > room:
        raise Drop("too_long", f"{len(ids):,} tokens, {room:,} fit with an answer")
    return Prompt(found.id, found.category, found.messages, found.tools, ids)


def _notes(path: Path, drops: Drops, later_turns: int) -> Iterator[str]:
    if drops.total:
        yield f"{path}: {drops.total:,} rows are left out\n"
        yield from (f"{line}\n" for line in drops.lines())
    if later_turns:
        yield f"{path}: first turns only; {later_turns:,} later ones are left out, they need the answer before them\n"
