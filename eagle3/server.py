"""A running OpenAI-compatible server of the target, asked for answers in place of an engine of our own."""

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3 import conversations
from eagle3.conversations import Drop, Message
from eagle3.dialogues import Answer

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

RETRIES = 8  # the client waits 0.5 s before the first and up to 8 s before the later ones: half a minute in all
TIMEOUT_S = 3600.0  # for one answer: a long thinking one in a full server
CONNECT_S = 10.0


@dataclass(frozen=True)
class Server:
    """A server that answers: the model that it serves, and how many tokens of prompt and answer it takes if it says."""

    base_url: str
    model: str
    max_model_len: int | None


@dataclass(frozen=True)
class Question:
    """One answer to ask for. `prompt_ids`: what the server should make of the messages; `sampling`: the API's names."""

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    prompt_ids: list[int]
    sampling: dict[str, Any]


def connect(base_url: str) -> Server:
    """Ask the server what it serves. ValueError if it does not answer, or serves nothing."""
    import openai

    try:
        models = openai.OpenAI(base_url=base_url, api_key=key(), timeout=CONNECT_S).models.list().data
    except openai.APIConnectionError as error:
        raise ValueError(f"--base-url {base_url}: no server answers there ({error.__cause__ or error})") from None
    except openai.APIError as error:
        raise ValueError(f"--base-url {base_url}: {error} (expected a URL such as http://HOST:8000/v1)") from None
    if not models:
        raise ValueError(f"--base-url {base_url}: it serves no model")
    return Server(base_url, models[0].id, (models[0].model_extra or {}).get("max_model_len"))


def key() -> str:
    """What the client sends as its key."""
    return os.environ.get("OPENAI_API_KEY", "none")  # a server without a key takes any


def stream(server: Server, questions: Iterator[Question], concurrency: int) -> Iterator[Answer]:
    """Ask the questions, `concurrency` at a time, and yield the answers as they come.

    `questions` is asked for more after each answer, also when it had no more before. ConnectionError when the server
    does not answer after RETRIES more tries.
    """
    from openai import AsyncOpenAI, Timeout

    pending: set[asyncio.Task[Answer]] = set()
    timeout = Timeout(TIMEOUT_S, connect=CONNECT_S)
    with asyncio.Runner() as runner:
        client = AsyncOpenAI(base_url=server.base_url, api_key=key(), max_retries=RETRIES, timeout=timeout)
        while True:
            while len(pending) < concurrency and (question := next(questions, None)) is not None:
                pending.add(runner.get_loop().create_task(_ask(client, server, question)))
            if not pending:
                return
            done, pending = runner.run(_first(pending))
            for task in done:
                yield task.result()


async def _first(pending: set["asyncio.Task[Answer]"]) -> tuple[set, set]:
    return await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)


async def _ask(client: "AsyncOpenAI", server: Server, question: Question) -> Answer:
    import openai

    try:
        completion = await client.chat.completions.create(
            **asked(server, question.messages, question.tools, question.template_kwargs), **question.sampling
        )
        return _answer(question, completion)
    except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
        return Answer(question.id, refusal=Drop("server_refuses", str(error)))
    except Drop as drop:
        return Answer(question.id, refusal=drop)
    except openai.APIError as error:
        raise ConnectionError(
            f"--base-url {server.base_url}: no answer to {question.id!r} (at most {RETRIES} retries): "
            f"{type(error).__name__}: {error}; the same command goes on from here"
        ) from error


def asked(
    server: Server, messages: list[Message], tools: list[dict[str, Any]] | None, template_kwargs: dict[str, Any]
) -> dict[str, Any]:
    """What each chat request of ours says, besides how to sample and whether to stream."""
    import openai

    return {
        "model": server.model,
        "messages": [_as_sent(m) for m in messages],
        "tools": tools or openai.omit,
        "extra_body": {"return_token_ids": True, "chat_template_kwargs": template_kwargs},
    }


def _as_sent(message: Message) -> Message:
    """A message as the API has it: arguments of tool calls as JSON text, reasoning under both names in use."""
    sent = {k: v for k, v in message.items() if k != "tool_calls"}
    if "reasoning" in message:
        sent["reasoning_content"] = message["reasoning"]
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [
            c | {"function": c["function"] | {"arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False)}}
            for c in calls
        ]
    return sent


def _answer(question: Question, completion: "ChatCompletion") -> Answer:
    """The answer by its token ids where the server gives them. Drop when its prompt is not the one expected."""
    choice = completion.choices[0]
    prompt_ids = (completion.model_extra or {}).get("prompt_token_ids")
    if prompt_ids is not None and prompt_ids != question.prompt_ids:
        raise Drop(
            "other_prompt",
            f"the server makes {len(prompt_ids)} prompt tokens of {question.id!r}, not the {len(question.prompt_ids)} "
            "of --model-path: it serves another model or chat template",
        )
    said = choice.message.model_dump(exclude_none=True)
    ids = (choice.model_extra or {}).get("token_ids")
    num_tokens = completion.usage.completion_tokens if completion.usage else len(ids or ())
    message = None if ids is not None else conversations.answer(said.get("content", ""), said)
    return Answer(question.id, choice.finish_reason, num_tokens, ids, message)
