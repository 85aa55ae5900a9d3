"""Measuring in an engine of our own: every benchmark, greedily, at each concurrency, with or without a draft."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3 import engine
from eagle3.benchmarks import Benchmarks, Prompt
from eagle3.passes import Answer, Json, Measurement, Pass, Setup
from eagle3.progress import Progress
from eagle3.shards import dtype_name
from eagle3.target import Target

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

WARM_UP_TOKENS = 8
COUNTER = "vllm:spec_decode_num_"
NO_LIMIT = 1 << 62  # of prompt tokens under way: the concurrency alone limits them


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What every engine of an evaluation has in common. `max_num_seqs`: the largest concurrency of them all."""

    target: Target
    benchmarks: Benchmarks
    stop_ids: list[int]
    max_tokens: int
    max_num_seqs: int
    tp_size: int
    gpu_memory_utilization: float

    def max_model_len(self, num_drafts: int) -> int:
        """The longest prompt with its answer, and room for a whole draft at its end."""
        longest = max(len(p.ids) for prompts in self.benchmarks.values() for p in prompts)
        return min(longest + self.max_tokens + num_drafts + 1, self.target.max_positions)

    def params(self, max_tokens: int) -> "SamplingParams":
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=self.stop_ids, detokenize=False)


def measure(serving: Serving, setups: Sequence[Setup]) -> Iterator[Measurement]:
    """Start one engine for setups that differ in concurrency alone, and yield what each of them measured."""
    first = setups[0]
    llm = start_engine(serving, first)
    try:
        _warm_up(llm, serving)
        for setup in setups:
            what = f"{'plain' if first.is_plain else f'{first.num_drafts} drafted'}, concurrency {setup.concurrency}"
            with Progress(what, sum(map(len, serving.benchmarks.values())), "prompts") as progress:
                passes = {
                    name: run_benchmark(llm, serving, prompts, setup, progress)
                    for name, prompts in serving.benchmarks.items()
                }
            yield Measurement(setup, passes)
    finally:
        engine.stop(llm)


def start_engine(serving: Serving, setup: Setup) -> "LLM":
    """vLLM with the target, and the draft where the setup has one."""
    return engine.start(
        serving.target.path,
        tp_size=serving.tp_size,
        gpu_memory_utilization=serving.gpu_memory_utilization,
        max_model_len=serving.max_model_len(setup.num_drafts),
        dtype=dtype_name(engine.dtype_for(serving.target)),
        max_num_seqs=serving.max_num_seqs,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **({} if setup.is_plain else _with_draft(serving.target, setup)),
    )


def _with_draft(target: Target, setup: Setup) -> dict[str, Any]:
    more: dict[str, Any] = {
        "speculative_config": {"model": setup.draft, "method": "eagle3", "num_speculative_tokens": setup.num_drafts}
    }
    if engine.on_cpu() and "kv_lora_rank" in target.text:
        more["worker_cls"] = "eagle3.cpu_worker.DraftWorker"
    if engine.understands("per_request_spec_decode_metrics"):
        more["per_request_spec_decode_metrics"] = "detailed"
    return more


def _warm_up(llm: "LLM", serving: Serving) -> None:
    """A few tokens for the first prompt, so that no first-call cost is in the figures."""
    first = next(iter(serving.benchmarks.values()))[0]
    for _ in engine.stream(llm, [engine.Request("warm-up", first.ids, serving.params(WARM_UP_TOKENS))], 1):
        pass


@dataclass
class _Clock:
    """When each request was sent, and the requests."""

    serving: Serving
    prompts: Sequence[Prompt]
    sent: dict[str, float] = field(default_factory=dict)

    def requests(self) -> Iterator[engine.Request]:
        params = self.serving.params(self.serving.max_tokens)
        for prompt in self.prompts:
            self.sent[prompt.id] = time.perf_counter()
            yield engine.Request(prompt.id, prompt.ids, params)


def run_benchmark(llm: "LLM", serving: Serving, prompts: Sequence[Prompt], setup: Setup, progress: Progress) -> Pass:
    """Answer the prompts, as many at a time as the setup says, noting what each engine step adds to each and when."""
    before, clock = read_counters(llm), _Clock(serving, prompts)
    answers = {p.id: Answer(p.id, p.category, accepted=None if setup.is_plain else []) for p in prompts}
    start = time.perf_counter()
    for output in engine.steps(llm, clock.requests(), NO_LIMIT, at_most=setup.concurrency):
        take(answers[output.request_id], output, time.perf_counter() - clock.sent[output.request_id])
        if output.finished:
            progress.update(1)
    seconds = time.perf_counter() - start
    return Pass(list(answers.values()), seconds, difference(read_counters(llm), before))


def take(answer: Answer, output: "RequestOutput", seconds: float) -> None:
    """Add what one engine step brought, `seconds` after the request was sent.

    vLLM 0.32 tells at the end what each pass accepted. From an earlier one it is what a step adds less the target's own
    token, without what it accepted past the answer's end.
    """
    completion = output.outputs[0]
    ids = completion.token_ids
    if not answer.ids:
        answer.first_token_s = seconds  # it comes from the prompt's own pass, which checks no draft
    elif answer.accepted is not None:
        answer.accepted.append(len(ids) - len(answer.ids) - 1)
    answer.ids, answer.last_token_s = list(ids), seconds
    if output.finished and (told := getattr(completion, "spec_decode_metrics", None)) is not None:
        answer.accepted = list(told.per_step_accepted)


def read_counters(llm: "LLM") -> Json:
    """vLLM's speculative counters: drafts, draft_tokens, accepted_tokens, accepted_tokens_per_pos (a list)."""
    found = {m.name.removeprefix(COUNTER): m for m in llm.get_metrics() if m.name.startswith(COUNTER)}
    return {name: getattr(m, "values", None) or m.value for name, m in found.items()}


def difference(after: Json, before: Json) -> Json:
    """What was counted in between."""
    return {name: (np.array(value) - np.array(before.get(name, 0))).tolist() for name, value in after.items()}
