"""Conversations that the target answers turn by turn, each prompt with the target's own earlier answers.

What it said becomes rows to train on, with the exact token ids where they are known.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3 import conversations, sources
from eagle3.chat import Chat
from eagle3.conversations import Drop, Drops, Message
from eagle3.sources import Raw


@dataclass(frozen=True)
class Answer:
    """What came for the conversation `id`: token ids, else a message; or a server's refusal."""

    id: str
    finish_reason: str = ""
    num_tokens: int = 0
    ids: list[int] | None = None
    message: Message | None = None
    refusal: Drop | None = None


@dataclass
class Dialogue:
    """A conversation under way: before answer k the target gets `turns[k]` on top of `messages`, what was said so far.

    `prompt_ids`: the prompt of the answer that comes next; `rows`: what is to be trained on so far.
    """

    id: str
    key: str
    turns: list[list[Message]]
    tools: list[dict[str, Any]] | None
    category: str | None
    messages: list[Message]
    prompt_ids: list[int]
    answered: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def num_left(self) -> int:
        return len(self.turns) - self.answered - sum(self.left_out.values())


def turns_of(messages: list[Message]) -> list[list[Message]]:
    """The messages put before the target for each of its answers.

    It answers each user turn and the last result of tools. An answer in the input is left out for its own; calls of
    tools stay with their results, since nothing here could run those that it would make itself.
    """
    turns: list[list[Message]] = []
    given: list[Message] = []
    for message, after in zip(messages, [*messages[1:], {}], strict=True):
        calls = bool(message.get("tool_calls"))
        if message["role"] == "assistant" and not calls and turns and not given:
            continue
        given.append(message)
        follows = after.get("tool_calls") or after.get("role") == "tool"
        if message["role"] in ("user", "tool") and not follows:
            turns.append(given)
            given = []
    return turns


def read(inputs: Iterable[Path], chat: Chat, room: int, limit: int | None, drops: Drops) -> Iterator[Dialogue]:
    """The conversations that can be asked, `limit` at most, each with its first prompt; `drops` counts the other rows.

    Another conversation under the id of an earlier one gets an id of its own.
    """
    seen: dict[str, str] = {}
    for path in sources.expand(inputs):
        for raw in sources.read_raw(path):
            if len(seen) == limit:
                return
            try:
                dialogue = _dialogue(raw, chat, room)
                if seen.get(dialogue.id, dialogue.key) != dialogue.key:
                    dialogue.id += f"~{dialogue.key[:12]}"
                if dialogue.id in seen:
                    raise Drop("duplicate", f"{dialogue.id!r} came before with the same content")
            except Drop as drop:
                drops.add(raw.where, drop)
                continue
            seen[dialogue.id] = dialogue.key
            yield dialogue


def _dialogue(raw: Raw, chat: Chat, room: int) -> Dialogue:
    row = conversations.parse(raw)
    if isinstance(row, conversations.Tokens):
        raise Drop("unknown_format", "token ids are no prompt")
    turns = turns_of(row.messages)
    if not turns:
        raise Drop("no_user_turn", f"its roles are {', '.join(m['role'] for m in row.messages)}")
    chat.check_text([m for turn in turns for m in turn], row.tools)
    dialogue = Dialogue(row.id, row.key, turns, row.tools, row.category, list(turns[0]), [])
    _render(dialogue, chat, room)
    return dialogue


def _render(dialogue: Dialogue, chat: Chat, room: int) -> None:
    dialogue.prompt_ids = chat.prompt_ids(dialogue.messages, dialogue.tools)
    if (length := len(dialogue.prompt_ids)) >= room:
        raise Drop("too_long", f"{length} tokens, {room} fit with an answer")


def longest(dialogue: Dialogue, chat: Chat, max_tokens: int) -> int:
    """At most how many tokens its last prompt and answer have; the JSON of the later turns stands for their headers."""
    later = dialogue.turns[1:]
    more = len(chat.encode(json.dumps(later, ensure_ascii=False))) if later else 0
    return len(dialogue.prompt_ids) + more + len(dialogue.turns) * max_tokens


def take(dialogue: Dialogue, answer: Answer, chat: Chat, room: int, keep_cut: bool) -> None:
    """Add an answer to its conversation and bring up the next turn; what cannot be had is left out under a reason."""
    cut = answer.finish_reason == "length"
    try:
        if cut and not keep_cut:
            raise Drop("cut", "by a length limit")
        message = _add(dialogue, answer, chat)
        if not dialogue.num_left:
            return
        if cut:
            raise Drop("after_cut", "nobody would go on after half an answer")
        if message.get("tool_calls"):
            raise Drop("calls_tool", "nothing here runs a tool")
        chat.check_text([message])
        dialogue.messages += dialogue.turns[dialogue.answered]
        _render(dialogue, chat, room)
    except Drop as drop:
        dialogue.left_out[drop.reason] = dialogue.num_left


def _add(dialogue: Dialogue, answer: Answer, chat: Chat) -> Message:
    """Add the answer to the conversation's messages and to what is trained on; returns it as a message."""
    message = answer.message
    if answer.ids is not None:
        ended = answer.ids[-1:] and answer.ids[-1] in chat.stop_ids
        message = conversations.answer(chat.decode(answer.ids[:-1] if ended else answer.ids))
    elif any(m["role"] == "assistant" for turn in dialogue.turns for m in turn):
        raise Drop("given_answer", "without token ids it could not be told from the target's own")
    dialogue.messages.append(message)
    _add_tokens(dialogue, answer.ids)
    tools = {"tools": dialogue.tools} if dialogue.tools else {}
    dialogue.rows[-1] |= {"messages": list(dialogue.messages), "finish_reason": answer.finish_reason, **tools}
    dialogue.answered += 1
    return message


def _add_tokens(dialogue: Dialogue, ids: list[int] | None) -> None:
    """Continue the last row where the prompt continues its ids as they stand, else begin one; without ids one row."""
    known = dialogue.rows[-1].get("input_ids", []) if dialogue.rows else None
    if known is None or (ids is not None and dialogue.prompt_ids[: len(known)] != known):
        dialogue.rows.append({})
    if ids is None:
        return
    row = dialogue.rows[-1]
    before, mask = row.get("input_ids", []), row.get("loss_mask", [])
    new = dialogue.prompt_ids[len(before) :]
    row |= {"input_ids": before + new + ids, "loss_mask": mask + [0] * len(new) + [1] * len(ids)}
