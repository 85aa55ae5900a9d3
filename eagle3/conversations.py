"""Conversations as people keep them, read into one form; what cannot be used is dropped under a named reason.

A row is OpenAI `messages`, ShareGPT `conversations`, Alpaca columns, a prompt alone, or token ids; each row is
recognised by itself, so one file may mix them. In the one form a message has `role`, `content` (a string; a list of
text parts only when there are several), and where given `reasoning`, `tool_calls` (their arguments an object),
`tool_call_id` and `name`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from eagle3 import files
from eagle3.sources import Raw, expand, read_raw

Message = dict[str, Any]

ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "function_call": "assistant", "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool",
    "function_response": "tool", "ipython": "tool",
}  # fmt: skip
ID_KEYS = ("id", "conversation_id", "uuid", "question_id", "prompt_id", "task_id")
KEY_LENGTH = 32  # hexadecimal digits of a content hash
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
TEXT_PARTS = ("text", "input_text", "output_text")
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class Drop(ValueError):
    """A row that cannot be used: `reason` is counted, `detail` says what was found."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.reason, self.detail)


class Drops:
    """Dropped rows by reason: how many, and where and why the first few were."""

    SHOWN = 3

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, list[str]] = {}

    def add(self, where: str, drop: Drop) -> None:
        self.counts[drop.reason] = self.counts.get(drop.reason, 0) + 1
        examples = self.examples.setdefault(drop.reason, [])
        if len(examples) < self.SHOWN:
            examples.append(f"{where}: {drop.detail}")

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def lines(self) -> Iterator[str]:
        """A line for each reason, most frequent first, and one for each example under it."""
        for reason, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            yield f"  {reason}: {count:,}"
            yield from (f"      {example}" for example in self.examples[reason])


@dataclass(frozen=True)
class Conversation:
    """Messages in the one form. `cut`: the last answer was stopped by a length limit, so it has no end of turn.

    `key`: a hash of what is said, the same for two copies of one conversation; also the id of one that came without.
    `template_kwargs`: with which settings of the chat template the answers came, where the row says so.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    id: str = ""
    key: str = ""
    category: str | None = None
    cut: bool = False
    template_kwargs: dict[str, Any] | None = None
    format: str = "messages"


@dataclass(frozen=True)
class Tokens:
    """A row that came tokenised: `input_ids` and `loss_mask` of one length; `tokenizer`: its hash, where given.

    `template_kwargs`: with which settings of the chat template it was made, where the row says so.
    """

    input_ids: list[int]
    loss_mask: list[int]
    id: str
    key: str
    tokenizer: str | None = None
    cut: bool = False
    template_kwargs: dict[str, Any] | None = None
    format: str = "tokenized"


@dataclass(frozen=True)
class Prompt:
    """What a target is asked: the messages up to the last user turn, and `where` (file:line) they stand.

    `later_turns`: user turns that were left out, since they need the answer to the one before (MT-Bench's second).
    """

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    category: str | None
    where: str
    later_turns: int = 0


def parse(raw: Raw, format: str = "auto", roles: Mapping[str, str] = ROLES) -> Conversation | Tokens:
    """A row in the one form. Drop with the reason if it cannot be used."""
    row = _decode(raw.content)
    format = detect(row) if format == "auto" else format
    if format == "tokenized":
        return _tokens(row)
    messages = [_message(m, roles) for m in _turns(row, format)]
    tools = _tools(_first(row, ("tools", "functions")))
    _name_tool_calls(messages)
    category = _first(row, ("category", "task", "source"))
    key = _key([messages, tools])
    return Conversation(
        messages=messages,
        tools=tools,
        id=_row_id(row, key),
        key=key,
        category=None if category is None else str(category),
        cut=_is_cut(row),
        template_kwargs=row.get("chat_template_kwargs"),
        format=format,
    )


def _key(content: Any) -> str:
    """The hash of a row's content. Drop when its text is no Unicode: JSON can spell half of a surrogate pair."""
    try:
        return files.sha256(msgspec.json.encode(content, order="deterministic"))[:KEY_LENGTH]
    except UnicodeEncodeError as error:
        raise Drop("bad_text", f"half of a surrogate pair, {error.object[error.start]!r}") from None


def _row_id(row: Mapping[str, Any], key: str) -> str:
    row_id = _first(row, ID_KEYS)
    return key if row_id is None else str(row_id).encode("utf-8", "backslashreplace").decode()


def _is_cut(row: Mapping[str, Any]) -> bool:
    return row.get("finish_reason") == "length"


def _decode(content: bytes | dict[str, Any]) -> dict[str, Any]:
    if isinstance(content, bytes):
        try:
            content = _parsed(content)
        except ValueError as error:
            raise Drop("bad_json", str(error)) from None
        except RecursionError:
            raise Drop("bad_json", "nested too deeply") from None
    if not isinstance(content, dict):
        raise Drop("bad_json", f"expected an object, found {type(content).__name__}")
    return content


def _parsed(line: bytes) -> Any:
    """The value of a line of JSON: msgspec takes half of json's time, which takes more and says what is wrong."""
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        return json.loads(line)


def detect(row: Mapping[str, Any]) -> str:
    """The format of a row: messages, sharegpt, alpaca, prompt or tokenized. Drop if it is none of them."""
    has = {key for key, value in row.items() if value is not None}
    if "input_ids" in has:
        return "tokenized"
    if "messages" in has:
        return "messages"
    if has & {"conversations", "conversation"}:
        return "sharegpt"
    if "instruction" in has:
        return "alpaca"
    if has & {"prompt", "question", "turns"}:
        return "prompt"
    raise Drop("unknown_format", f"its keys are {', '.join(map(str, row)) or 'none'}")


def _turns(row: Mapping[str, Any], format: str) -> list[Any]:
    """The row's turns as they are written, system prompt first."""
    turns = READERS[format](row)
    if isinstance(turns, str):
        turns = _json_string(turns, "bad_conversation")
    if not isinstance(turns, list):
        raise Drop("bad_conversation", f"expected a list of turns, found {type(turns).__name__}")
    if not turns:
        raise Drop("empty_conversation", "it has no turns")
    system = row.get("system") or row.get("system_prompt")
    return [{"role": "system", "content": system}, *turns] if isinstance(system, str) and system else turns


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    """instruction, input, output, and LLaMA-Factory's `history` of [question, answer] pairs."""
    question = "\n".join(str(row[k]) for k in ("instruction", "input") if row.get(k))
    history = row.get("history") or []
    if not isinstance(history, list):
        raise Drop("bad_conversation", f"history must be a list, found {type(history).__name__}")
    turns = [turn for pair in history for turn in _pair(pair)]
    answer = _first(row, ("output", "response"))
    return [*turns, _user(question), *([] if answer is None else [_assistant(answer)])]


def _pair(pair: Any) -> tuple[Message, Message]:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise Drop("bad_conversation", "history must hold [question, answer] pairs")
    return _user(pair[0]), _assistant(pair[1])


def _prompt(row: Mapping[str, Any]) -> list[Message]:
    """prompt (a string or messages) with or without its response; `turns` holds a user's turns one after the other."""
    prompt = _first(row, ("prompt", "question", "turns"))
    asked = prompt if isinstance(prompt, list) else [prompt]
    turns = [_user(turn) if not isinstance(turn, dict) else turn for turn in asked]
    answer = _first(row, ("response", "completion"))
    return [*turns, *(answer if isinstance(answer, list) else [] if answer is None else [_assistant(answer)])]


READERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "messages": lambda row: row.get("messages"),
    "sharegpt": lambda row: _first(row, ("conversations", "conversation")),
    "alpaca": _alpaca,
    "prompt": _prompt,
}
FORMATS = ("auto", *READERS, "tokenized")


def _user(text: Any) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: Any) -> Message:
    return {"role": "assistant", "content": text}


def _first(row: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((row[k] for k in keys if row.get(k) is not None), None)


def _json_string(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Drop(reason, f"{error} in {text[:40]!r}") from None
    except RecursionError:
        raise Drop(reason, f"nested too deeply: {text[:40]!r}") from None


def _tokens(row: Mapping[str, Any]) -> Tokens:
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise Drop("bad_tokens", "input_ids must be a list of token ids")
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(m in (0, 1) for m in mask):
        raise Drop("bad_tokens", f"loss_mask must hold {len(ids)} entries of 0 or 1, one for each of input_ids")
    if not isinstance(row.get("tokenizer", ""), str | None):
        raise Drop("bad_tokens", f"tokenizer must be a hash, found {row['tokenizer']!r:.40}")
    key = _key([ids, mask])
    return Tokens(
        input_ids=ids,
        loss_mask=[int(m) for m in mask],
        id=_row_id(row, key),
        key=key,
        tokenizer=row.get("tokenizer"),
        cut=_is_cut(row),
        template_kwargs=row.get("chat_template_kwargs"),
    )


def _message(turn: Any, roles: Mapping[str, str]) -> Message:
    """One turn in the one form."""
    if not isinstance(turn, dict):
        raise Drop("bad_conversation", f"expected a turn with role and content, found {type(turn).__name__}")
    name = _first(turn, ("role", "from"))
    if not isinstance(name, str) or name not in roles:
        raise Drop("unknown_role", repr(name))
    role = roles[name]
    content, reasoning = _content(_first(turn, ("content", "value")))
    message: Message = {"role": role, "content": content}
    if role == "assistant":
        if name == "function_call":
            message["content"], turn = "", {"tool_calls": [_json_string(str(content), "bad_tool_call")]}
        message |= _answer(turn, message["content"], reasoning)
    elif role == "tool" and turn.get("tool_call_id") is not None:
        message["tool_call_id"] = str(turn["tool_call_id"])
    if isinstance(turn.get("name"), str):
        message["name"] = turn["name"]
    return message


def _content(content: Any) -> tuple[str | list[dict[str, str]], str]:
    """Text (or its parts where there are several) and the reasoning that stands among the parts."""
    if content is None:
        return "", ""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        raise Drop("bad_content", f"expected a string or a list of parts, found {type(content).__name__}")
    texts, reasoning = [], ""
    for part in content:
        kind = "text" if isinstance(part, str) else part.get("type", "text") if isinstance(part, dict) else None
        text = part if isinstance(part, str) else _first(part, ("text", "thinking")) if kind else None
        if kind not in (*TEXT_PARTS, "thinking") or not isinstance(text, str):
            raise Drop("not_text", f"content part of type {kind!r}: this pipeline trains on text alone")
        if kind == "thinking":
            reasoning += text
        else:
            texts.append({"type": "text", "text": text})
    return (texts if len(texts) > 1 else texts[0]["text"] if texts else ""), reasoning


def _answer(turn: Mapping[str, Any], content: Any, reasoning: str) -> Message:
    """content, reasoning and tool_calls of an assistant turn."""
    given = _first(turn, REASONING_KEYS) or reasoning
    if not isinstance(given, str):
        raise Drop("bad_reasoning", f"expected a string, found {type(given).__name__}")
    inline, content = split_reasoning(content)
    if given and inline and given.strip() != inline.strip():
        raise Drop("bad_reasoning", "one reasoning in its own field and another one inside the content")
    message: Message = {"content": content}
    if given or inline:
        message["reasoning"] = given or inline
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
    if isinstance(calls, str):
        calls = _json_string(calls, "bad_tool_call")
    if not isinstance(calls, list):
        raise Drop("bad_tool_call", f"expected a list of calls, found {type(calls).__name__}")
    if calls:
        message["tool_calls"] = [_tool_call(c) for c in calls]
    return message


def answer(text: str, fields: Mapping[str, Any] | None = None) -> Message:
    """A target's answer as it was generated, as a message: reasoning that a closing tag ends is split off.

    `fields`: what a server gives beside the text, reasoning and tool calls. Drop if they are not sound.
    """
    return {"role": "assistant", **_answer(fields or {}, text, "")}


def split_reasoning(content: Any) -> tuple[str, Any]:
    """Reasoning and answer of `<think>reasoning</think>answer`, also where the prompt supplied the opening tag.

    The whitespace of both is kept as it stands. A text without the closing tag has no reasoning.
    """
    if not isinstance(content, str):
        return "", content
    before, closed, after = content.partition(THINK_CLOSE)
    lead, opened, inside = before.partition(THINK_OPEN)
    if not closed or (opened and lead.strip()):
        return "", content
    return (inside if opened else before), after


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Drop("bad_tool_call", f"expected an object with a function's name, found {str(call)[:60]}")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        arguments = _json_string(arguments, "bad_tool_call")
    if not isinstance({} if arguments in (None, "") else arguments, dict):
        raise Drop("bad_tool_call", f"arguments must be a JSON object, found {type(arguments).__name__}")
    known = {"id": str(call["id"])} if call.get("id") is not None else {}
    return known | {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}


def _name_tool_calls(messages: list[Message]) -> None:
    """Give calls without an id the one that a server gives: `functions.NAME:COUNT`; their results follow in order."""
    calls = [call for m in messages for call in m.get("tool_calls", ())]
    for count, call in enumerate(calls):
        call.setdefault("id", f"functions.{call['function']['name']}:{count}")
    results = [m for m in messages if m["role"] == "tool"]
    if len(results) == len(calls):
        for call, result in zip(calls, results, strict=True):
            result.setdefault("tool_call_id", call["id"])


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tool declarations as a list of {"type": "function", "function": {...}}; None where there are none."""
    if isinstance(tools, str):
        tools = _json_string(tools, "bad_tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise Drop("bad_tools", f"expected a list of objects, found {str(tools)[:60]}")
    tools = [t if "function" in t else {"type": "function", "function": t} for t in tools]
    if not all(isinstance(t["function"], dict) and isinstance(t["function"].get("name"), str) for t in tools):
        raise Drop("bad_tools", "a tool without a function's name")
    return tools


def read_prompts(paths: Iterable[Path | str], drops: Drops | None = None) -> Iterator[Prompt]:
    """The prompts of some files: each conversation up to its last user turn, of `turns` the first one.

    A row that is no prompt is counted in `drops`; without `drops` it is a ValueError naming its file and line.
    """
    for path in expand(paths):
        for raw in read_raw(path):
            try:
                yield _as_prompt(parse(raw), raw.where)
            except Drop as drop:
                if drops is None:
                    raise ValueError(f"{path}:{raw.line}: not a prompt: {drop}") from None
                drops.add(raw.where, drop)


def _as_prompt(row: Conversation | Tokens, where: str) -> Prompt:
    if isinstance(row, Tokens):
        raise Drop("unknown_format", "token ids are no prompt")
    asked = [k for k, m in enumerate(row.messages) if m["role"] == "user"]
    if not asked:
        raise Drop("no_user_turn", f"its roles are {', '.join(m['role'] for m in row.messages)}")
    unanswered = [k for k in asked if k + 1 in asked] if row.format == "prompt" else []
    end = min([*unanswered, asked[-1]])
    later_turns = sum(k > end for k in asked)
    return Prompt(row.id, row.messages[: end + 1], row.tools, row.category, where, later_turns)
