"""Measuring running vLLM servers: answers streamed from the OpenAI API, acceptance from the counters in /metrics.

Nobody else may use the server meanwhile: its counters are of all its clients. What each answer accepted is known only
from a server that runs with `--per-request-spec-decode-metrics detailed` (vLLM 0.32). Prefix caching, on by default,
makes first tokens come sooner when the prompts are sent again, at another concurrency or by a second run.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3 import files, server
from eagle3.benchmarks import Benchmarks, Prompt
from eagle3.measure import WARM_UP_TOKENS, difference
from eagle3.passes import Answer, Json, Measurement, Pass, Setup
from eagle3.progress import Progress
from eagle3.server import Server

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionChunk

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
GENERATED, BUSY = "vllm:generation_tokens", ("vllm:num_requests_running", "vllm:num_requests_waiting")
SETTLE_S = 10.0  # how long the counters may lag behind the last answer
TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What all requests of an evaluation have in common. `rendered`: what the servers made of a prompt, by its key."""

    benchmarks: Benchmarks
    max_tokens: int
    template_kwargs: dict[str, Any]
    rendered: dict[str, list[int]] = field(default_factory=dict)

    def check_rendered(self, prompt: Prompt, ids: list[int]) -> None:
        """ValueError if a server makes other tokens of a prompt than the target at hand, or than the other server."""
        expected = self.rendered.setdefault(prompt.key, prompt.ids or ids)
        if ids != expected:
            raise ValueError(
                f"prompt {prompt.id!r}: a server makes {len(ids)} tokens of it, not the {len(expected)} that the "
                f"{'target at hand' if prompt.ids else 'other server'} makes: another target or chat template"
            )


@dataclass(frozen=True)
class Counters:
    """What a server has counted since its start. `speculative`: empty without a draft (names as in passes.Pass)."""

    generated: int
    busy: int
    speculative: Json

    @property
    def num_drafts(self) -> int:
        return len(self.speculative.get("accepted_tokens_per_pos", ()))


def connect(flag: str, url: str, *, with_draft: bool) -> tuple[Server, int]:
    """The server, and how many tokens it drafts. ValueError naming the flag if it is not what the flag means."""
    found = server.connect(url)
    counters = read_counters(url)
    if with_draft and not counters.num_drafts:
        raise ValueError(
            f"{flag} {url}: its /metrics have no {BY_POSITION}: it serves {found.model!r} without a draft "
            "(start it with `vllm serve DRAFT`, or --speculative-config)"
        )
    if not with_draft and counters.num_drafts:
        raise ValueError(f"{flag} {url}: it drafts {counters.num_drafts} tokens; expected the target alone")
    if counters.busy:
        raise ValueError(f"{flag} {url}: {counters.busy} requests are under way: another client is using it")
    return found, counters.num_drafts


def check_same_target(drafted: Server, plain: Server, draft: Path | None) -> None:
    """ValueError if the two servers do not serve one target, going by their names and by the draft's."""
    names = _target_names(drafted.model) | (_target_names(str(draft)) if draft else set())
    if not names & _target_names(plain.model):
        raise ValueError(
            f"--base-url serves {drafted.model!r}, --plain-url serves {plain.model!r}: expected one target (if it is "
            "one, start both with the same --served-model-name, or name the draft's folder with --draft)"
        )


def _target_names(model: str) -> set[str]:
    """The last part of a served name, and of the target that it names if it is the folder of a draft."""
    config = Path(model) / "config.json"
    content = files.read_json(config) if config.is_file() else {}
    target = content.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    return {Path(name).name for name in (model, target) if name}


def read_counters(base_url: str) -> Counters:
    """The counters in a server's /metrics, summed over its engines. ValueError if it has none."""
    import httpx
    from prometheus_client.parser import text_string_to_metric_families

    url = base_url.rstrip("/").removesuffix("/v1") + "/metrics"
    try:
        response = httpx.get(url, timeout=server.CONNECT_S).raise_for_status()
    except httpx.HTTPError as error:
        raise ValueError(f"--base-url {base_url}: no metrics at {url} ({error}); is it a vLLM server?") from None
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            if name == BY_POSITION:
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0) + sample.value
            sums[name] = sums.get(name, 0) + sample.value
    if GENERATED not in sums:
        raise ValueError(f"--base-url {base_url}: {url} has no {GENERATED}; is it a vLLM server?")
    speculative: Json = {ours: int(sums[name]) for name, ours in COUNTERS.items() if name in sums}
    if positions:
        speculative["accepted_tokens_per_pos"] = [int(positions[k]) for k in sorted(positions)]
    return Counters(int(sums[GENERATED]), int(sum(sums.get(name, 0) for name in BUSY)), speculative)


def measure(found: Server, asking: Asking, setups: Sequence[Setup]) -> Iterator[Measurement]:
    """Put every benchmark through the server at each setup's concurrency.

    ValueError when another client uses it. ConnectionError when an answer fails: what was timed is then worth nothing.
    """
    from openai import AsyncOpenAI, Timeout

    timeout = Timeout(TIMEOUT_S, connect=server.CONNECT_S)
    with asyncio.Runner() as runner:
        client = AsyncOpenAI(base_url=found.base_url, api_key=server.key(), max_retries=0, timeout=timeout)
        first = next(iter(asking.benchmarks.values()))[0]
        runner.run(_ask(client, found, first, asking, WARM_UP_TOKENS))
        for setup in setups:
            what = f"{found.base_url}, concurrency {setup.concurrency}"
            with Progress(what, sum(map(len, asking.benchmarks.values())), "prompts") as progress:
                passes = {}
                for name, prompts in asking.benchmarks.items():
                    before, start = read_counters(found.base_url), time.perf_counter()
                    answers = runner.run(_ask_all(client, found, prompts, asking, setup.concurrency, progress))
                    seconds = time.perf_counter() - start
                    tokens = sum(len(a.ids) for a in answers)
                    passes[name] = Pass(answers, seconds, _counted(found.base_url, before, tokens))
            yield Measurement(setup, passes)


def _counted(base_url: str, before: Counters, tokens: int) -> Json:
    """What the server counted for our answers of so many tokens. ValueError if it made others too."""
    deadline = time.monotonic() + SETTLE_S
    while (now := read_counters(base_url)).generated - before.generated < tokens and time.monotonic() < deadline:
        time.sleep(0.05)
    generated = now.generated - before.generated
    if generated != tokens:
        why = "another client is using it" if generated > tokens else "is it one server of several behind one address?"
        raise ValueError(
            f"--base-url {base_url}: it counts {generated:,} generated tokens, our answers have {tokens:,}: {why}"
        )
    return difference(now.speculative, before.speculative)


async def _ask_all(
    client: "AsyncOpenAI",
    found: Server,
    prompts: Sequence[Prompt],
    asking: Asking,
    concurrency: int,
    progress: Progress,
) -> list[Answer]:
    free = asyncio.Semaphore(concurrency)

    async def one(prompt: Prompt) -> Answer:
        async with free:
            answer = await _ask(client, found, prompt, asking, asking.max_tokens)
        progress.update(1)
        return answer

    return await asyncio.gather(*map(one, prompts))


async def _ask(client: "AsyncOpenAI", found: Server, prompt: Prompt, asking: Asking, max_tokens: int) -> Answer:
    import openai

    answer, sent = Answer(prompt.id, prompt.category), time.perf_counter()
    try:
        stream = await client.chat.completions.create(
            **server.asked(found, prompt.messages, prompt.tools, asking.template_kwargs),
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            _take(answer, chunk, time.perf_counter() - sent)
            if prompt_ids := (chunk.model_extra or {}).get("prompt_token_ids"):
                asking.check_rendered(prompt, prompt_ids)
    except openai.APIError as error:
        raise ConnectionError(
            f"--base-url {found.base_url}: no answer to {prompt.id!r}: {type(error).__name__}: {error}"
        ) from error
    return answer


def _take(answer: Answer, chunk: "ChatCompletionChunk", seconds: float) -> None:
    """Add what a chunk of the stream brought, `seconds` after the request was sent."""
    if ids := [i for choice in chunk.choices for i in (choice.model_extra or {}).get("token_ids") or ()]:
        if not answer.ids:
            answer.first_token_s = seconds
        answer.ids += ids
        answer.last_token_s = seconds
    told = ((chunk.model_extra or {}).get("metrics") or {}).get("speculative_decoding")
    if told is not None and sum(told["acceptance_histogram"]) == len(told.get("per_step_accepted", ())):
        answer.accepted = list(told.get("per_step_accepted", ()))
    if chunk.usage and chunk.usage.completion_tokens != len(answer.ids):
        raise ValueError(
            f"answer to {answer.id!r}: the server gives {len(answer.ids)} token ids for "
            f"{chunk.usage.completion_tokens} tokens; a vLLM that understands return_token_ids is needed"
        )
