"""The evaluation stage: real vLLM with and without the draft on the same prompts, greedily.

Acceptance length = accepted draft tokens + 1 (the target's own token) for each pass of the target that checked a
draft. It is counted for every prompt from what each engine step adds to it, and for the whole from vLLM's counters.
"""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle3 import chat, conversations, engine, files
from eagle3.export import TEMPLATE_KWARGS
from eagle3.progress import Progress
from eagle3.target import Target

if TYPE_CHECKING:
    from vllm import LLM

FORMAT = "eagle3-evaluation/1"
QUEUED_PROMPT_TOKENS = 1 << 16
DRAFT_FILES = ("config.json", "model.safetensors")
COUNTER = "vllm:spec_decode_num_"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags of 04. `model_path` None: the target that the draft names."""

    draft: Path
    prompts: list[Path]
    model_path: Path | None = None
    num_speculative_tokens: int | None = None
    max_tokens: int = 256
    concurrency: int = 1
    limit: int | None = None
    tp_size: int = 1
    gpu_memory_utilization: float = 0.9
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    min_acceptance: float | None = None


@dataclass(frozen=True)
class Prompt:
    """One prompt of a benchmark, rendered."""

    id: str
    category: str | None
    ids: list[int]


@dataclass(frozen=True)
class Evaluation:
    """A checked plan: the prompts of each benchmark, and how many tokens are drafted."""

    options: Options
    target: Target
    chat: chat.Chat
    benchmarks: dict[str, list[Prompt]]
    num_drafts: int

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.benchmarks.values()))

    @property
    def max_model_len(self) -> int:
        longest = max(len(p.ids) for prompts in self.benchmarks.values() for p in prompts)
        return longest + self.options.max_tokens + self.num_drafts + 1


def plan_evaluation(options: Options) -> Evaluation:
    """Check draft, target and prompts before anything loads. ValueError names what does not fit."""
    config = read_draft_config(options.draft)
    speculators = config["speculators_config"]
    model_path = options.model_path or Path(speculators["verifier"]["name_or_path"] or "")
    if options.model_path is None and not model_path.is_dir():
        raise ValueError(f"--draft {options.draft}: its target {model_path} is not there; name it with --model-path")
    target = Target.open(model_path)
    _check_fit(options.draft, config, target)
    _warn_of_another_mode(options, config)
    model_chat = chat.load(target, options.trust_remote_code, options.chat_template_kwargs)
    num_drafts = options.num_speculative_tokens or speculators["proposal_methods"][0]["speculative_tokens"]
    names = [path.stem for path in options.prompts]
    if len(set(names)) != len(names):
        raise ValueError(f"--prompts: two files have one name: {', '.join(sorted(names))}")
    room = target.max_positions - options.max_tokens - num_drafts - 1
    benchmarks = {p.stem: read_benchmark(p, model_chat, room, options.limit) for p in options.prompts}
    return Evaluation(options, target, model_chat, benchmarks, num_drafts)


def read_draft_config(draft: Path) -> dict[str, Any]:
    """The draft's config.json. ValueError if the folder is not an exported draft."""
    for name in DRAFT_FILES:
        if not (draft / name).is_file():
            raise ValueError(f"--draft {draft}: has no {name}; give the `draft` folder that 03_train_draft.py wrote")
    config = files.read_json(draft / "config.json")
    found = config.get("speculators_model_type") if isinstance(config, dict) else None
    if found != "eagle3":
        raise ValueError(f"--draft {draft}: expected speculators_model_type 'eagle3', found {found!r}")
    if missing := [key for key in ("speculators_config", "transformer_layer_config") if key not in config]:
        raise ValueError(f"--draft {draft}: its config.json has no {missing[0]!r}; export it again with stage 3")
    return config


def _check_fit(draft: Path, config: dict[str, Any], target: Target) -> None:
    layer = config["transformer_layer_config"]
    for key, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if layer[key] != expected:
            raise ValueError(f"--draft {draft}: its {key} is {layer[key]}, the target's is {expected}")


def _warn_of_another_mode(options: Options, config: dict[str, Any]) -> None:
    """Say so when the prompts are rendered otherwise than the draft's data was: a thinking target says other things."""
    trained, asked = config.get(TEMPLATE_KWARGS), options.chat_template_kwargs
    if trained not in (None, asked):
        print(
            f"WARNING: the draft was trained with --chat-template-kwargs {json.dumps(trained)}, not {json.dumps(asked)}"
        )


def read_benchmark(path: Path, model_chat: chat.Chat, room: int, limit: int | None) -> list[Prompt]:
    """The first `limit` prompts of a file, rendered; unusable ones are printed. ValueError if none is left."""
    drops, prompts = conversations.Drops(), []
    for prompt in conversations.read_prompts([path], drops):
        if limit is not None and len(prompts) == limit:
            break
        try:
            ids = model_chat.prompt_ids(prompt.messages, prompt.tools)
            if len(ids) > room:
                raise conversations.Drop("too_long", f"{len(ids)} tokens, {room} fit with an answer")
        except conversations.Drop as drop:
            drops.add(prompt.where, drop)
            continue
        prompts.append(Prompt(prompt.id, prompt.category, ids))
    for line in drops.lines():
        print(line)
    if not prompts:
        raise ValueError(f"--prompts {path}: no usable prompt")
    return prompts


@dataclass
class Answer:
    """What came for one prompt: `ids` the generated tokens, `accepted` the drafts accepted in each checking pass."""

    prompt: Prompt
    ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Pass:
    """One benchmark through one engine. `counters`: vLLM's own, see `read_counters`; empty without a draft."""

    answers: list[Answer]
    seconds: float
    counters: dict[str, Any]

    @property
    def tokens(self) -> int:
        return sum(len(a.ids) for a in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def measure(evaluation: Evaluation) -> dict[str, Any]:
    """Both engines over all benchmarks, one after the other, and the result as JSON."""
    plain = run_engine(evaluation, with_draft=False)
    return summarise(evaluation, plain, run_engine(evaluation, with_draft=True))


def run_engine(evaluation: Evaluation, *, with_draft: bool) -> dict[str, Pass]:
    """Start the engine with or without the draft and put every benchmark through it."""
    llm = start_engine(evaluation, with_draft=with_draft)
    what = "with draft" if with_draft else "plain"
    try:
        _warm_up(llm, evaluation)
        with Progress(what, evaluation.num_prompts, "prompts") as progress:
            return {
                name: run_benchmark(llm, prompts, evaluation, progress)
                for name, prompts in evaluation.benchmarks.items()
            }
    finally:
        engine.stop(llm)


def start_engine(evaluation: Evaluation, *, with_draft: bool) -> "LLM":
    """vLLM with the target, and the draft where asked for."""
    options, more = evaluation.options, {}
    if with_draft:
        more["speculative_config"] = {
            "model": str(options.draft),
            "method": "eagle3",
            "num_speculative_tokens": evaluation.num_drafts,
        }
        if engine.on_cpu() and "kv_lora_rank" in evaluation.target.text:
            more["worker_cls"] = "eagle3.cpu_worker.DraftWorker"
    return engine.start(
        evaluation.target.path,
        tp_size=options.tp_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_model_len=min(evaluation.max_model_len, evaluation.target.max_positions),
        dtype=str(engine.dtype_for(evaluation.target)).removeprefix("torch."),
        max_num_seqs=options.concurrency,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **more,
    )


def _warm_up(llm: "LLM", evaluation: Evaluation) -> None:
    """A few tokens for the first prompt, so that no first-call cost is in the figures."""
    first = next(iter(evaluation.benchmarks.values()))[0]
    for _ in engine.stream(llm, [engine.Request("warm-up", first.ids, _params(evaluation, 8))], 1):
        pass


def _params(evaluation: Evaluation, max_tokens: int) -> Any:
    from vllm import SamplingParams

    stop = evaluation.chat.stop_ids
    return SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=stop, detokenize=False)


def run_benchmark(llm: "LLM", prompts: list[Prompt], evaluation: Evaluation, progress: Progress) -> Pass:
    """Answer the prompts at the asked concurrency, noting what each engine step adds to each."""
    before = read_counters(llm)
    answers = {p.id: Answer(p) for p in prompts}
    start = time.perf_counter()
    for output in engine.steps(llm, _requests(prompts, evaluation), QUEUED_PROMPT_TOKENS):
        answer, ids = answers[output.request_id], output.outputs[0].token_ids
        if answer.ids:  # the first token comes from the prompt's own pass, which checks no draft
            answer.accepted.append(len(ids) - len(answer.ids) - 1)
        answer.ids = list(ids)
        if output.finished:
            progress.update(1)
    seconds = time.perf_counter() - start
    return Pass(list(answers.values()), seconds, _difference(read_counters(llm), before))


def _requests(prompts: list[Prompt], evaluation: Evaluation) -> Iterator[engine.Request]:
    for prompt in prompts:
        yield engine.Request(prompt.id, prompt.ids, _params(evaluation, evaluation.options.max_tokens))


def read_counters(llm: "LLM") -> dict[str, Any]:
    """vLLM's speculative counters: drafts, draft_tokens, accepted_tokens, accepted_tokens_per_pos (a list)."""
    found = {m.name.removeprefix(COUNTER): m for m in llm.get_metrics() if m.name.startswith(COUNTER)}
    return {name: np.array(getattr(m, "values", None) or m.value) for name, m in found.items()}


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {name: (value - before.get(name, 0)).tolist() for name, value in after.items()}


def settings_of(evaluation: Evaluation) -> dict[str, Any]:
    """What the figures depend on: two evaluations of equal settings need not be measured twice."""
    options = evaluation.options
    return {
        "draft": {name: files.sha256_file(options.draft / name) for name in DRAFT_FILES},
        "target": evaluation.target.fingerprint,
        "prompts": {n: files.sha256_json([p.ids for p in ps]) for n, ps in evaluation.benchmarks.items()},
        "num_speculative_tokens": evaluation.num_drafts,
        "max_tokens": options.max_tokens,
        "concurrency": options.concurrency,
        "temperature": 0,
        "tp_size": options.tp_size,
        "versions": engine.versions(),
    }


def measured_before(evaluation: Evaluation, output: Path | None) -> dict[str, Any] | None:
    """The result in `output` if it was measured with these very settings; says what differs if it was not."""
    if output is None or not output.is_file():
        return None
    result = files.read_json(output)
    difference = files.first_difference(result.get("settings"), settings_of(evaluation))
    if difference:
        print(f"measuring anew, {output} is of other settings: {difference}")
    return None if difference else result


def summarise(evaluation: Evaluation, plain: dict[str, Pass], drafted: dict[str, Pass]) -> dict[str, Any]:
    """The result as JSON: settings, and a row for each benchmark and for all of them."""
    rows = {name: _row([plain[name]], [drafted[name]]) for name in evaluation.benchmarks}
    rows["all"] = _row(list(plain.values()), list(drafted.values()))
    options = evaluation.options
    return {
        "format": FORMAT,
        "definition": "acceptance length = accepted draft tokens + 1 a pass of the target that checks a draft",
        "draft": str(options.draft),
        "target": str(evaluation.target.path),
        "settings": settings_of(evaluation),
        "benchmarks": rows,
        "answers": [
            {
                "benchmark": name,
                "id": a.prompt.id,
                "category": a.prompt.category,
                "tokens": a.ids,
                "accepted": a.accepted,
            }
            for name, drafted_pass in drafted.items()
            for a in drafted_pass.answers
        ],
    }


def _row(plain: list[Pass], drafted: list[Pass]) -> dict[str, Any]:
    counters = [p.counters for p in drafted]
    drafts = sum(c["drafts"] for c in counters)
    per_position = np.sum([c["accepted_tokens_per_pos"] for c in counters], axis=0) / max(drafts, 1)
    pairs = [(a, b) for p, d in zip(plain, drafted, strict=True) for a, b in zip(p.answers, d.answers, strict=True)]
    different = [a.prompt.id for a, b in pairs if a.ids != b.ids]
    plain_rate = sum(p.tokens for p in plain) / sum(p.seconds for p in plain)
    drafted_rate = sum(p.tokens for p in drafted) / sum(p.seconds for p in drafted)
    return {
        "prompts": len(pairs),
        "tokens": sum(p.tokens for p in drafted),
        "acceptance_length": 1 + sum(c["accepted_tokens"] for c in counters) / max(drafts, 1),
        "acceptance_by_position": per_position.tolist(),
        "tokens_per_s_plain": plain_rate,
        "tokens_per_s_draft": drafted_rate,
        "speed_up": drafted_rate / plain_rate,
        "identical": len(pairs) - len(different),
        "different": different,
    }


def table(result: dict[str, Any]) -> Iterable[str]:
    """The result as lines for a person."""
    settings = result["settings"]
    num_drafts = settings["num_speculative_tokens"]
    positions = "  ".join(f"pos {i + 1}" for i in range(num_drafts))
    yield f"acceptance length = accepted + 1, {num_drafts} drafts, greedy, concurrency {settings['concurrency']}"
    yield f"{'benchmark':<14} prompts  accept. length  {positions}  tok/s plain  tok/s draft  speed-up  identical"
    for name, row in result["benchmarks"].items():
        by_position = "  ".join(f"{p:>5.1%}" for p in row["acceptance_by_position"])
        yield (
            f"{name:<14} {row['prompts']:>7}  {row['acceptance_length']:>14.2f}  {by_position}  "
            f"{row['tokens_per_s_plain']:>11.1f}  {row['tokens_per_s_draft']:>11.1f}  {row['speed_up']:>7.2f}x  "
            f"{row['identical']:>4} of {row['prompts']}"
        )
