"""Conversations to token ids and loss mask, by the target's own tokenizer and chat template.

A token is supervised when the target generates it after a prompt as the server renders it. So an answer is always
`prompt + completion`: the prompt is the template's rendering of the turns before it with the generation prompt, and
the completion is what the target has to say from there on, its end-of-turn token included. Role headers and think tags
that the generation prompt supplies are prompt; what a template writes after an end of turn is the next turn's prompt.

Templates that rewrite history (reasoning is taken out of earlier turns) give one sample an answer, each in the form in
which the server would generate it. Where the next prompt continues the sample as it stands, the same sample goes on.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from eagle3 import files, sandbox
from eagle3.conversations import THINK_CLOSE, THINK_OPEN, Conversation, Drop, Message
from eagle3.target import Target
from eagle3.tokenizer import (
    any_of,
    check_tokenizer,
    decoder,
    encoder,
    known_ids,
    load_tokenizer,
    quick_patterns,
    same_text,
)

TURNS = ("each", "last")
PROBE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
MANY_ANSWERS = 8  # from which on rendering every prompt whole takes longer than the text itself
LOOK_BACK = 64  # characters at the end of a text that hold a prompt's header, or an answer's end of turn
OPENING = re.compile(rf"(?:{THINK_OPEN}\s*)?(?:{THINK_CLOSE}\s*)?\Z")
GENERATION_TAG = re.compile(r"{%-?\s*generation\b")
MACRO = re.compile(r"{%-?\s*macro\b.*?\bendmacro\b", re.DOTALL)
PARTS_LOOP = re.compile(r"""\bfor\s+\w+\s+in\s+(?:\w+(?:\.content\b|\[["']content["']\])|content\b)""")
THOUGHT = re.compile(rf"\s*(?:{THINK_OPEN}(.*?))?{THINK_CLOSE}", re.DOTALL)


@dataclass
class Sample:
    """Token ids and loss mask of one training sample; `answers` counts its supervised turns, `text` is what it says."""

    text: str
    input_ids: list[int]
    loss_mask: list[int]
    answers: int = 0


@dataclass(frozen=True)
class Turn:
    """The answer at `place` of a conversation: after `prompt` the target says `completion`."""

    place: int
    prompt: str
    completion: str
    lost_reasoning: bool


@dataclass
class Samples:
    """A conversation's samples, and what of it was left out: answers by reason, and reasoning that no sample has."""

    samples: list[Sample] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    reasoning_left_out: int = 0

    def leave_out(self, reason: str, answers: int = 1) -> None:
        if answers:
            self.left_out[reason] = self.left_out.get(reason, 0) + answers


class Chat:
    """A target's tokenizer and chat template, with the template's own settings in `template_kwargs`."""

    def __init__(self, target: Target, tokenizer: Any, template_kwargs: dict[str, Any]) -> None:
        self.target, self.tokenizer, self.template_kwargs = target, tokenizer, template_kwargs
        self.encode, self.decode = encoder(tokenizer, self.control_tokens), decoder(tokenizer)
        self._headers: dict[str, list[int]] = {}

    @cached_property
    def template(self) -> str:
        """The template's source, of all named templates where there are several."""
        source = self.tokenizer.chat_template
        return "\n".join(source.values()) if isinstance(source, dict) else source

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Text and id of the tokens that give a conversation its structure, which no message's text may hold."""
        added = {str(token): i for i, token in self.tokenizer.added_tokens_decoder.items()}
        special = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        reserved = getattr(self.tokenizer, "special_tokens", None)  # of tiktoken's remote code: all of them
        added |= reserved if isinstance(reserved, dict) else {}
        special |= set(added) - {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        return {t: i for t, i in added.items() if t.strip() == t != "" and (t in special or t in self.template)}

    @cached_property
    def num_tokens(self) -> int:
        """The tokens that the tokenizer knows and config.json counts: many a vocab_size is rounded up."""
        return min(self.target.vocab_size, 1 + known_ids(self.tokenizer)[-1])

    @cached_property
    def special_ids(self) -> list[int]:
        """Ids that belong into every draft vocabulary: control and special tokens and the stop tokens."""
        return sorted({*self.control_tokens.values(), *self.tokenizer.all_special_ids, *self.stop_ids})

    @cached_property
    def stop_ids(self) -> list[int]:
        """Ids at which the server stops: eos of generation_config.json, of config.json and of the tokenizer."""
        path = self.target.path / "generation_config.json"
        generation = files.read_json(path) if path.is_file() else {}
        found = (generation.get("eos_token_id"), self.target.text.get("eos_token_id"), self.tokenizer.eos_token_id)
        return sorted({i for eos in found if eos is not None for i in (eos if isinstance(eos, list) else [eos])})

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template loops over the parts of a content: then the server passes a list on as it is."""
        return PARTS_LOOP.search(MACRO.sub("", self.template)) is not None

    @cached_property
    def _turn_tokens(self) -> list[str]:
        """Control tokens that the target may not have inside an answer's text: those that end or start turns."""
        visible = {str(t) for t in self.tokenizer.added_tokens_decoder.values() if not t.special}
        return [t for t, i in self.control_tokens.items() if t not in visible or i in self.stop_ids]

    @cached_property
    def _spoken(self) -> re.Pattern[str]:
        return any_of(self._turn_tokens)

    @cached_property
    def _spoken_anywhere(self) -> list[re.Pattern[str]]:
        return quick_patterns(self._turn_tokens)

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return any_of(self.control_tokens)

    @cached_property
    def _control_anywhere(self) -> list[re.Pattern[str]]:
        return quick_patterns(self.control_tokens)

    @cached_property
    def probe(self) -> Sample:
        """The sample of PROBE, a one-question conversation; it shows how the template writes a turn."""
        try:
            return self.samples(Conversation(PROBE), 1 << 20).samples[0]
        except Drop as drop:
            raise ValueError(
                f"{self.target.path}: its chat template cannot write a plain conversation: {drop}"
            ) from None

    def describe(self) -> str:
        """In words: what the generation prompt ends with, what ends a turn, and what is odd about it."""
        prompt = self.prompt_text(PROBE[:1])
        end = self.probe.input_ids[-1]
        line = f"answers follow {prompt[-24:]!r}, turns end with {self.decode([end])!r} ({end})"
        if end not in self.stop_ids:
            line += f"; WARNING: that is no stop token of the target ({self.stop_ids})"
        said, tagged = self.probe.text[len(prompt) :], self._tagged()
        if tagged is not None and tagged.strip() not in said:
            line += f"; WARNING: its generation tags mark {tagged!r}, but the target has to say {said!r}"
        return line

    def _tagged(self) -> str | None:
        """What the template's own `{% generation %}` tags mark in PROBE; None without tags or without offsets."""
        if not (GENERATION_TAG.search(self.template) and self.tokenizer.is_fast):
            return None
        made = self.tokenizer.apply_chat_template(
            PROBE, return_dict=True, return_assistant_tokens_mask=True, **self.template_kwargs
        )
        return self.decode([i for i, m in zip(made["input_ids"], made["assistant_masks"], strict=True) if m])

    def prompt_text(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """The rendered messages with the generation prompt. Drop when the template rejects them."""
        return self._render(messages, tools, add_generation_prompt=True)

    def prompt_ids(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """The ids that the server's engine gets for these messages. Drop when the template rejects them."""
        return self.encode(self.prompt_text(messages, tools))

    def _render(self, messages: list[Message], tools: list[dict[str, Any]] | None, add_generation_prompt: bool) -> str:
        try:
            return self._apply(self._as_served(messages), _tools_as_served(tools), add_generation_prompt)
        except Exception as error:  # a template raises what it likes, and calls into any Python
            raise Drop("template_rejects", f"{type(error).__name__}: {error}") from None

    def _apply(self, messages: list[Message], tools: Any, add_generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **self.template_kwargs
        )

    def _as_served(self, messages: list[Message]) -> list[Message]:
        """The messages as vLLM hands them to the template (its renderers/chat_utils.py and renderers/hf.py)."""
        served = [self._message_as_served(m) for m in messages]
        if any(m["role"] == "developer" for m in served) and not re.search(r"""["']developer["']""", self.template):
            served = _developer_as_system(served)
        return served

    def _message_as_served(self, message: Message) -> Message:
        served = {k: v for k, v in message.items() if k != "reasoning"}
        if isinstance(message["content"], list) and not (self.takes_parts and message["role"] != "tool"):
            served["content"] = joined(message["content"])
        if "reasoning" in message:
            served["reasoning"] = served["reasoning_content"] = message["reasoning"]
        return served

    def samples(self, conversation: Conversation, max_tokens: int, turns: str = "each") -> Samples:
        """The training samples of a conversation, not yet cut at `max_tokens`.

        Prompts of `max_tokens` or more are not tried, since nothing supervised would remain. Raises Drop for a
        conversation from which nothing can be learnt.
        """
        self._check(conversation)
        answers = [j for j, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        answers = answers[-1:] if turns == "last" else answers
        said = [j for j in answers if not _is_empty(conversation, j)]
        if not said:
            raise Drop("empty_answer", "no assistant turn says anything")
        result = self._write(conversation, said, max_tokens, append=len(said) == len(answers) >= MANY_ANSWERS)
        result.leave_out("empty_answer", len(answers) - len(said))
        if not result.samples:
            raise Drop("prompt_too_long", f"its prompt has {max_tokens} tokens or more, so no answer is within reach")
        return result

    def _write(self, conversation: Conversation, answers: list[int], max_tokens: int, append: bool) -> Samples:
        """The samples of the answers at these places; `append`: by `_appended` where that gives the same."""
        if append:
            result, last = self._collect(self._appended(conversation, answers), len(answers), max_tokens)
            if last and last.prompt == self.prompt_text(conversation.messages[: last.place], conversation.tools):
                return result
        return self._collect(self._rendered(conversation, answers), len(answers), max_tokens)[0]

    def _collect(self, turns: Iterator[Turn | None], num_turns: int, max_tokens: int) -> tuple[Samples, Turn | None]:
        """The samples that the answers make until a prompt is too long, and the last answer that was looked at."""
        result, turn = Samples(), None
        for n, turn in enumerate(turns):
            if turn is None:
                break
            if not self._append(result.samples, turn, max_tokens):
                result.leave_out("prompt_too_long", num_turns - n)
                break
            result.reasoning_left_out += turn.lost_reasoning
        return result, turn

    def _rendered(self, conversation: Conversation, answers: list[int]) -> Iterator[Turn]:
        """Each answer with its prompt, which is rendered whole."""
        for place in answers:
            before = conversation.messages[:place]
            prompt = self.prompt_text(before, conversation.tools)
            yield Turn(place, prompt, *self.completion(prompt, before, conversation, place))

    def _appended(self, conversation: Conversation, answers: list[int]) -> Iterator[Turn | None]:
        """The same where the template only appends, with work that grows with the text and not with its square.

        A prompt is rendered after no more than the exchange before it, and what it adds to that is appended to the text
        so far. None, and the end, where that exchange is not rendered as it was said.
        """
        messages, tools = conversation.messages, conversation.tools
        lead, start, text, completion = messages[: _last_user(messages, answers[0])], 0, "", ""
        for last, place in zip([None, *answers[:-1]], answers, strict=True):
            before = messages[:place] if last is None else [*lead, *messages[start:place]]
            prompt = self.prompt_text(before, tools)
            known = "" if last is None else self.prompt_text([*lead, *messages[start:last]], tools) + completion
            if not prompt.startswith(known):
                yield None
                return
            text += completion + prompt[len(known) :]
            completion, lost = self.completion(prompt, before, conversation, place)
            yield Turn(place, text, completion, lost)
            start = _last_user(messages, place)

    def _check(self, conversation: Conversation) -> None:
        """Drop a conversation whose roles or texts can train nothing."""
        roles = [m["role"] for m in conversation.messages]
        for reason, role in (("no_user_turn", "user"), ("no_assistant_turn", "assistant")):
            if role not in roles:
                raise Drop(reason, f"its roles are {', '.join(roles)}")
        if next(r for r in roles if r not in ("system", "developer")) == "assistant":
            raise Drop("assistant_first", "an answer before any question")
        for message in conversation.messages:
            if message["role"] == "assistant" and _starts_thinking(message) and not conversation.cut:
                raise Drop("unclosed_reasoning", f"{THINK_OPEN} without {THINK_CLOSE} at the start of an answer")
        self.check_text(conversation.messages, conversation.tools)

    def check_text(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> None:
        """Drop what holds the text of a control token, since the server reads that as the control token."""
        for message in messages:
            patterns = self._spoken_anywhere if message["role"] == "assistant" else self._control_anywhere
            if found := _search(patterns, [v for k, v in message.items() if k != "role"]):
                raise Drop("control_token", f"{found!r} inside the text of a {message['role']} turn")
        if found := _search(self._control_anywhere, tools):
            raise Drop("control_token", f"{found!r} inside a tool's declaration")

    def completion(
        self, prompt: str, before: list[Message], conversation: Conversation, place: int
    ) -> tuple[str, bool]:
        """What the target generates for the answer at `place` after `prompt`, which is the rendering of `before`.

        Also whether the answer's reasoning had to be left out.

        Where the template's own rendering continues the prompt and keeps the reasoning, it is that. Otherwise the
        template rewrites the turn as history, and the reasoning goes back to where the generation prompt opened it.
        """
        message, opening = conversation.messages[place], _opening(prompt)
        cut = _is_cut(conversation, place)
        if cut and (text := _unfinished(opening, message)) is not None:
            return text, False
        reasoning = message.get("reasoning", "")
        instant = opening.rstrip().endswith(THINK_CLOSE)  # the prompt itself says that there is no reasoning
        if reasoning and instant:
            message, reasoning = _without_reasoning(message), ""
        tail = self._turn_text(prompt.removesuffix(opening), before, message, conversation.tools)
        thought = THOUGHT.match(tail)
        if THINK_CLOSE not in self.template:  # no reasoning, or in tags of its own
            text, reasoning = tail, reasoning if reasoning.strip() in tail else ""
        elif tail.startswith(opening) and (thought.group(1) or "" if thought else "").strip() == reasoning.strip():
            text = tail[len(opening) :]
        else:
            answer = tail[thought.end() :] if thought else tail
            text = _reasoned(opening, reasoning) + (answer if opening == THINK_OPEN else answer.lstrip("\n"))
        _check_written(text, message)
        lost = bool(conversation.messages[place].get("reasoning")) and not reasoning
        return (_without_end(text, message) if cut else self._to_end_of_turn(text, message)), lost

    def _turn_text(self, head: str, before: list[Message], message: Message, tools: list[dict[str, Any]] | None) -> str:
        """The template's own rendering of the turn `message` after the text `head`, the rendering of `before`.

        Where this turn makes the template take the reasoning out of the turns before it, it is rendered after turns
        that have none, since only its own text is wanted.
        """
        full = self._render([*before, message], tools, add_generation_prompt=False)
        if full.startswith(head):
            return full[len(head) :]
        before = [_without_reasoning(m) for m in before]
        prompt = self.prompt_text(before, tools)
        head = prompt.removesuffix(_opening(prompt))
        full = self._render([*before, message], tools, add_generation_prompt=False)
        if not full.startswith(head):
            raise Drop("template_rewrites_prompt", f"{full[-40:]!r} stands after another text than its prompt")
        return full[len(head) :]

    def _to_end_of_turn(self, text: str, message: Message) -> str:
        """`text` up to its last control token, when only whitespace follows.

        Without one, the token that ends the turn is the one with which the next turn starts, if that is a stop token.
        """
        ends = [m.end() for m in self._spoken.finditer(text, max(0, len(text) - LOOK_BACK))]
        if not ends:
            return text + self._next_turn[bool(message.get("tool_calls"))]
        return text if text[ends[-1] :].strip() else text[: ends[-1]]

    @cached_property
    def _next_turn(self) -> tuple[str, str]:
        """The stop tokens with which a user's turn and a tool's result start right after an answer; empty if none."""
        result = {"role": "tool", "content": "x", "tool_call_id": "0"}
        return self._first_token({"role": "user", "content": "x"}), self._first_token(result)

    def _first_token(self, turn: Message) -> str:
        try:
            before, whole = (self._render([*PROBE, *more], None, add_generation_prompt=False) for more in ([], [turn]))
        except Drop:
            return ""
        first = self._spoken.match(whole, len(before)) if whole.startswith(before) else None
        return first.group() if first and self.control_tokens[first.group()] in self.stop_ids else ""

    def _append(self, samples: list[Sample], turn: Turn, max_tokens: int) -> bool:
        """Continue the last sample with this answer where its prompt does, else begin one; False if too long."""
        prompt, completion = turn.prompt, turn.completion
        last = samples[-1] if samples else None
        more = None
        if last and prompt.startswith(last.text):
            more = self._continuation(last.text, prompt[len(last.text) :], exact=True)
        sample = last if more is not None else Sample("", [], [])
        ids = self.encode(prompt) if more is None else more
        if len(sample.input_ids) + len(ids) >= max_tokens:
            return False
        answer = self._continuation(prompt, completion)
        if not answer:
            raise Drop("unsafe_boundary", f"the tokenizer cannot continue {prompt[-20:]!r} with {completion[:20]!r}")
        sample.text = prompt + completion
        sample.input_ids += ids + answer
        sample.loss_mask += [0] * len(ids) + [1] * len(answer)
        sample.answers += 1
        if more is None:
            samples.append(sample)
        return True

    def _continuation(self, text: str, more: str, exact: bool = False) -> list[int] | None:
        """Ids of `more` after `text`, whose ids stand. None if there are none.

        Only the end of `text` from its last control token on takes part, since no token reaches across one. Where a
        token of the whole would reach across the border, the ids of `text` stay as the server made them, and those
        of `more` are its own (`exact`: None).
        """
        starts = [m.start() for m in self._control.finditer(text, max(0, len(text) - LOOK_BACK))]
        header = text[starts[-1] :] if starts else text
        before = self._headers.get(header)
        if before is None:
            before = self.encode(header)
            if len(header) <= LOOK_BACK and len(self._headers) < 1024:
                self._headers[header] = before
        whole = self.encode(header + more)
        if whole[: len(before)] == before:
            return whole[len(before) :]
        if exact:
            return None
        alone = self.encode(more)
        return alone if same_text(self.decode(before + alone), header + more) else None


def joined(parts: list[dict[str, str]]) -> str:
    """Text parts as one string, as vLLM joins them."""
    return "\n".join(part["text"] for part in parts)


def _without_reasoning(message: Message) -> Message:
    return {k: v for k, v in message.items() if k != "reasoning"}


def _opening(prompt: str) -> str:
    """The think tags, opened or closed, with which a generation prompt ends; mostly none."""
    return OPENING.search(prompt, max(0, len(prompt) - LOOK_BACK)).group()


def _unfinished(opening: str, message: Message) -> str | None:
    """What the target wrote when it was cut inside its reasoning; None when it came to its answer."""
    content = message["content"] if isinstance(message["content"], str) else joined(message["content"])
    reasoning = message.get("reasoning", "")
    opened = opening.rstrip().endswith(THINK_OPEN)
    if reasoning:
        return None if content else _reasoned(opening, reasoning).partition(THINK_CLOSE)[0].rstrip("\n")
    if _starts_thinking(message):
        return content.lstrip().removeprefix(THINK_OPEN).lstrip("\n") if opened else content
    return content if opened else None


def _is_cut(conversation: Conversation, place: int) -> bool:
    return conversation.cut and all(m["role"] != "assistant" for m in conversation.messages[place + 1 :])


def _is_empty(conversation: Conversation, place: int) -> bool:
    """Whether an answer says and calls nothing; one that was cut in its reasoning says that."""
    message = conversation.messages[place]
    content = message["content"]
    text = joined(content) if isinstance(content, list) else content
    unfinished = message.get("reasoning") and _is_cut(conversation, place)
    return not (text.strip() or message.get("tool_calls") or unfinished)


def _last_user(messages: list[Message], place: int) -> int:
    """The place of the last user turn before `place`; 0 if there is none."""
    return next((j for j in reversed(range(place)) if messages[j]["role"] == "user"), 0)


def _starts_thinking(message: Message) -> bool:
    return isinstance(message["content"], str) and message["content"].lstrip().startswith(THINK_OPEN)


def _reasoned(opening: str, reasoning: str) -> str:
    """Reasoning as the target writes it after `opening`, closed: line breaks as the generation prompt has them."""
    if opening.rstrip().endswith(THINK_CLOSE) or (not opening and not reasoning):
        return ""
    if opening == THINK_OPEN:
        return f"{reasoning}{THINK_CLOSE}"
    written = "" if opening else f"{THINK_OPEN}\n"
    return f"{written}{reasoning.strip(chr(10))}\n{THINK_CLOSE}\n\n"


def _without_end(text: str, message: Message) -> str:
    """The completion up to the end of the message's own text, since a cut answer never came to its end."""
    content = message["content"]
    last = (content[-1]["text"] if isinstance(content, list) else content).rstrip()
    return text[: text.rindex(last) + len(last)] if last in text else text


def _check_written(text: str, message: Message) -> None:
    """Drop an answer whose words or tool calls the template leaves out: what remains is nothing that was said."""
    content = message["content"]
    said = [content] if isinstance(content, str) else [part["text"] for part in content]
    called = [call["function"]["name"] for call in message.get("tool_calls", ())]
    if missing := next((part for part in (*said, *called) if part.strip() not in text), None):
        raise Drop("template_loses_text", f"the rendered answer has no {missing[:40]!r}")


def _developer_as_system(messages: list[Message]) -> list[Message]:
    """What vLLM does for a template that knows no developer: one system message in front."""
    messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    system = [m["content"] for m in messages if m["role"] == "system"]
    if len(system) == 1 and messages[0]["role"] == "system":
        return messages
    texts = (joined(c) if isinstance(c, list) else c for c in system)
    merged = {"role": "system", "content": "\n\n".join(t for t in texts if t)}
    return [merged, *(m for m in messages if m["role"] != "system")]


def _tools_as_served(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tool declarations with the keys, in the order, in which vLLM's server passes them on."""
    return tools and [{"type": "function", "function": _function_as_served(t["function"])} for t in tools]


def _function_as_served(function: dict[str, Any]) -> dict[str, Any]:
    served = {key: function.get(key) for key in ("name", "description", "parameters")}
    return served | ({"strict": function["strict"]} if function.get("strict") is not None else {})


def _search(patterns: list[re.Pattern[str]], value: Any) -> str | None:
    """A match of one of the patterns in any string, key or value, of a JSON value."""
    return next((m.group() for text in _strings(value) for p in patterns if (m := p.search(text))), None)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def load(target: Target, trust_remote_code: bool = False, template_kwargs: dict[str, Any] | None = None) -> Chat:
    """The target's tokenizer and template, checked. ValueError saying what is wrong with them."""
    tokenizer = load_tokenizer(target, trust_remote_code)
    if not tokenizer.chat_template:
        raise ValueError(f"{target.path}: has no chat template (chat_template.jinja, or in tokenizer_config.json)")
    chat = Chat(target, tokenizer, template_kwargs or {})
    check_tokenizer(target, tokenizer, chat.encode, chat.control_tokens)
    assert any(chat.probe.loss_mask), "nothing is supervised"
    sandbox.quicken(tokenizer.get_chat_template())
    for key in chat.template_kwargs:
        if not re.search(rf"\b{re.escape(key)}\b", chat.template):
            raise ValueError(f"--chat-template-kwargs: the target's chat template knows no {key!r}")
    return chat
