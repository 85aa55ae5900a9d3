"""The evaluation stage: real vLLM with and without drafts on the same prompts, greedily.

The target alone is measured once; each draft with each number of drafted tokens has an engine of its own, which
answers at each concurrency in turn (as many requests are under way as that says). With `base_url` running servers are
measured in place of engines. figures.py has the definitions of all figures and of the JSON.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from eagle3 import benchmarks, chat, drafts, engine, figures, files, measure, passes, runs, served
from eagle3.benchmarks import Benchmarks
from eagle3.passes import Json, Measurement, Setup
from eagle3.status import Status
from eagle3.target import Target

MOST_DRAFTS = 64  # a 65th drafted token would have to survive 64 others


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags of 04. `model_path` None: the first draft's target; no number of drafted tokens: the draft's own."""

    prompts: list[Path]
    draft: list[Path] = field(default_factory=list)
    model_path: Path | None = None
    num_speculative_tokens: list[int] = field(default_factory=list)
    max_tokens: int = 256
    concurrency: list[int] = field(default_factory=lambda: [1])
    limit: int | None = None
    base_url: str | None = None
    plain_url: str | None = None
    tp_size: int = 1
    gpu_memory_utilization: float = 0.9
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    min_acceptance: float | None = None
    output: Path | None = None


Measure = Callable[[Sequence[Setup]], Iterator[Measurement]]


@dataclass(frozen=True)
class Evaluation:
    """A checked plan: `setups` in the order to measure them, `measure` for those that differ in concurrency alone.

    `settings`: what all figures depend on; `reusable`: whether figures of equal settings are of the same thing, which
    nobody knows of a server.
    """

    options: Options
    target: str
    setups: list[Setup]
    settings: Json
    measure: Measure
    decode: figures.Decode | None
    reusable: bool


def plan_evaluation(options: Options) -> Evaluation:
    """Check drafts, target, prompts and servers before anything loads. ValueError names what does not fit."""
    if bad := [n for n in options.num_speculative_tokens if n > MOST_DRAFTS]:
        raise ValueError(f"--num-speculative-tokens {bad[0]}: expected at most {MOST_DRAFTS}")
    if options.output:
        files.check_file("--output", options.output, options.prompts)
        check_replaceable(options.output)
    files_of = benchmarks.locate(options.prompts)
    if options.base_url:
        return _plan_served(options, files_of)
    if options.plain_url:
        raise ValueError("--plain-url: goes with --base-url, the server with the draft")
    if not options.draft:
        raise ValueError("--draft: missing; name the draft's folder, or a server that has one with --base-url")
    return _plan_engines(options, files_of)


def check_replaceable(output: Path) -> None:
    """ValueError if there is a file of that name and it is no evaluation."""
    if not output.is_file():
        return
    try:
        found = str(files.read_json(output).get("format"))
    except ValueError as error:
        raise ValueError(f"--output {error}; remove the file to measure anew, or name another one") from None
    if not found.startswith(figures.FORMAT.split("/")[0]):
        raise ValueError(f"--output {output}: holds something else than an evaluation; name another file")


def _plan_engines(options: Options, files_of: dict[str, Path]) -> Evaluation:
    """Engines of our own."""
    found = [drafts.open_draft(folder) for folder in options.draft]
    target = Target.open(options.model_path or found[0].target_path)
    drafts.check_different(found)
    for draft in found:
        with runs.reading(draft.folder / "config.json"):
            drafts.check_fit(draft, target)
        drafts.warn(draft, target, options.chat_template_kwargs, options.num_speculative_tokens)
    concurrencies = sorted(set(options.concurrency))
    plain = [Setup(0, c) for c in concurrencies]
    drafted = [
        Setup(n, c, str(draft.folder), draft.sha256)
        for draft in found
        for n in sorted(set(options.num_speculative_tokens)) or [draft.num_speculative_tokens]
        for c in concurrencies
    ]
    model_chat, read = _read(options, files_of, target, max(s.num_drafts for s in drafted), None)
    serving = measure.Serving(
        target=target,
        benchmarks=read,
        stop_ids=model_chat.stop_ids,
        max_tokens=options.max_tokens,
        max_num_seqs=concurrencies[-1],
        tp_size=options.tp_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
    )
    settings = _settings(options, read) | {
        "target": target.fingerprint,
        "tp_size": options.tp_size,
        "versions": engine.versions(),
        "device": engine.device_name(),
    }
    return Evaluation(
        options,
        str(target.path),
        plain + drafted,
        settings,
        lambda setups: measure.measure(serving, setups),
        model_chat.decode,
        reusable=True,
    )


def _plan_served(options: Options, files_of: dict[str, Path]) -> Evaluation:
    """Running servers. The target at hand, if --model-path or --draft has one, renders the prompts for comparison."""
    if options.num_speculative_tokens:
        raise ValueError("--num-speculative-tokens: a running server has its own; leave the flag out with --base-url")
    if len(options.draft) > 1:
        raise ValueError("--draft: a server has one draft; name that one, or none, with --base-url")
    draft = drafts.open_draft(options.draft[0]) if options.draft else None
    drafted, num_drafts = served.connect("--base-url", options.base_url, with_draft=True)
    servers = {options.base_url: drafted}
    if options.plain_url:
        servers[options.plain_url], _ = served.connect("--plain-url", options.plain_url, with_draft=False)
        served.check_same_target(drafted, servers[options.plain_url], draft and draft.folder)
    path = options.model_path or (draft and draft.target_path_if_there)
    room = min((s.max_model_len for s in servers.values() if s.max_model_len), default=None)
    model_chat, read = _read(options, files_of, Target.open(path) if path else None, num_drafts, room)
    asking = served.Asking(benchmarks=read, max_tokens=options.max_tokens, template_kwargs=options.chat_template_kwargs)
    concurrencies = sorted(set(options.concurrency))
    setups = [Setup(0, c, url=options.plain_url) for c in concurrencies if options.plain_url]
    folder = str(draft.folder) if draft else None
    setups += [Setup(num_drafts, c, folder, url=options.base_url) for c in concurrencies]
    return Evaluation(
        options,
        drafted.model,
        setups,
        _settings(options, read) | {"servers": {url: s.model for url, s in servers.items()}},
        lambda same: served.measure(servers[same[0].url], asking, same),
        model_chat and model_chat.decode,
        reusable=False,
    )


def _read(
    options: Options, files_of: dict[str, Path], target: Target | None, num_drafts: int, room: int | None
) -> tuple[chat.Chat | None, Benchmarks]:
    """The target's chat, and the prompts that fit into `room` tokens, or the target's own, with answer and drafts."""
    room = min(limit for limit in (room, target and target.max_positions, 1 << 62) if limit)
    left = room - options.max_tokens - num_drafts - 1
    if left < 1:
        raise ValueError(f"--max-tokens {options.max_tokens}: the target takes {room:,} tokens of prompt and answer")
    model_chat = None
    if target:
        model_chat = chat.load(target, options.trust_remote_code, options.chat_template_kwargs)
    found = {name: benchmarks.read(path, model_chat, left, options.limit) for name, path in files_of.items()}
    few = {name: len(prompts) for name, prompts in found.items() if len(prompts) < max(options.concurrency)}
    for name, count in few.items():
        print(f"WARNING: {name} has {count} prompts, so there are never {max(options.concurrency)} answers at a time")
    return model_chat, found


def _settings(options: Options, read: Benchmarks) -> Json:
    return {
        "prompts": {name: files.sha256_json([p.key for p in prompts]) for name, prompts in read.items()},
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "chat_template_kwargs": options.chat_template_kwargs,
    }


def evaluate(evaluation: Evaluation) -> Json:
    """Measure what the output does not have yet; the output is written after each measurement. Returns the JSON."""
    output = evaluation.options.output
    with Status(runs.status_beside(output), "evaluate") if output else nullcontext():
        return _evaluate(evaluation)


def _evaluate(evaluation: Evaluation) -> Json:
    known = {m.setup.key: m for m in measured_before(evaluation)}
    done = [Measurement(s, known[s.key].passes) for s in evaluation.setups if s.key in known]
    missing = [s for s in evaluation.setups if s.key not in known]
    if done:
        print(f"{len(done)} of {len(evaluation.setups)} measurements are in {evaluation.options.output} already")
    if not missing:
        return _write(evaluation, done)
    for _, group in groupby(missing, key=lambda s: (s.draft, s.num_drafts)):
        for measurement in evaluation.measure(list(group)):
            done.append(measurement)
            result = _write(evaluation, done)
    return result


def _write(evaluation: Evaluation, done: list[Measurement]) -> Json:
    """The JSON of what is measured so far, which the output holds from now on."""
    order = [s.key for s in evaluation.setups]
    done = sorted(done, key=lambda m: order.index(m.setup.key))
    finished = len(done) == len(order)
    result = figures.result(done, evaluation.settings, evaluation.target, evaluation.decode, finished=finished)
    if output := evaluation.options.output:
        output.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(output, result)
    return result


def measured_before(evaluation: Evaluation) -> list[Measurement]:
    """The measurements in the output that were made with these very settings; says what differs if they were not."""
    output = evaluation.options.output
    if output is None or not output.is_file():
        return []
    if not evaluation.reusable:
        print(f"measuring anew, {output} is written over: nobody knows whether a server is still the same")
        return []
    content = files.read_json(output)
    found = {k: content.get(k) for k in ("format", "settings")}
    wanted = json.loads(json.dumps({"format": figures.FORMAT, "settings": evaluation.settings}))
    if difference := files.first_difference(wanted, found):
        print(f"measuring anew, {output} is of another evaluation: {difference}")
        return []
    with runs.reading(output):
        return passes.from_json(content)


def check_acceptance(result: Json, least: float | None) -> None:
    """ValueError if the best measurement's acceptance length is below `least`."""
    reached = result["benchmarks"][benchmarks.ALL]["acceptance_length"]
    if least is not None and reached < least:
        raise ValueError(f"acceptance length {reached:.3f} is below --min-acceptance {least}")
