"""The evaluation's figures from what was measured, and the JSON that 04 writes.

    format, definition, target
    settings       what all measurements share; a run with equal settings takes over those that the file has
    finished       false while measurements are missing (the file is written after each)
    best, best_rule    the number of the best measurement, null while there is none, and how it was chosen
    benchmarks     the rows of the best measurement: a row for each benchmark, and `all`
    measurements   in the order measured, each {draft, draft_sha256, url, num_speculative_tokens, concurrency, passes,
                   benchmarks, categories, differing}. num_speculative_tokens 0: the target alone. `passes`: seconds and
                   vLLM's counters of each benchmark. `differing`: the first rows whose greedy answers differ
    comparisons    of each further draft with the first one, on the same prompts
    answers        one for each prompt of each measurement: {measurement (its number), benchmark, id, category, tokens,
                   accepted (by pass of the target; null where not known), first_token_s, last_token_s}

A row: prompts; with a draft tokens, acceptance_length with its 95% interval over prompts (bootstrap.py; null where
vLLM does not tell what each answer accepted), acceptance_by_position (share of drafts whose k-th token was accepted),
accepted_past_end (accepted tokens that belong to no prompt's count, see measure.take); tokens_per_s_*; time per output
token, (last - first token) / (tokens - 1) of each answer, in ms: mean ms_per_token_*, median_ms_per_token_*; median
ms_to_first_token_*; * is `plain` and `draft`. speed_up is the ratio of tokens/s, speed_up_per_token that of the mean
times per token, with its interval. identical and different: answers that are, and the ids of those that are not,
those of the target alone at the same concurrency. What needs the target alone is null where it was not measured.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from eagle3 import bootstrap, passes
from eagle3.benchmarks import ALL
from eagle3.passes import Answer, Json, Measurement, Pass

FORMAT = "eagle3-evaluation/2"
DEFINITION = "acceptance length = accepted draft tokens + 1 (the target's own) a pass of the target that checks a draft"
BEST_RULE = "highest tokens/s over all benchmarks at the lowest concurrency"
DIFFERENCES_SHOWN = 3
CONTEXT_TOKENS = 8  # before a difference

Decode = Callable[[list[int]], str]


def check_format(content: Json) -> None:
    """ValueError if an evaluation's JSON is of another version of this format."""
    if (found := content["format"]) != FORMAT:
        raise ValueError(f"expected format {FORMAT!r}, found {found!r}; 04_evaluate_draft.py measures it anew")


def result(
    measurements: Sequence[Measurement], settings: Json, target: str, decode: Decode | None, *, finished: bool
) -> Json:
    """The whole JSON, see above. `decode`: text of token ids, where the target's tokenizer is at hand."""
    entries = [_entry(m, plain_of(m, measurements), decode) for m in measurements]
    best = best_of(measurements)
    return {
        "format": FORMAT,
        "definition": DEFINITION,
        "target": target,
        "settings": settings,
        "finished": finished,
        "best": best,
        "best_rule": BEST_RULE,
        "benchmarks": {} if best is None else entries[best]["benchmarks"],
        "measurements": entries,
        "comparisons": list(comparisons(measurements)),
        "answers": [a for n, m in enumerate(measurements) for a in passes.answers_as_json(n, m)],
    }


def _entry(measurement: Measurement, plain: Measurement | None, decode: Decode | None) -> Json:
    more = {"benchmarks": rows(measurement, plain)}
    if not measurement.setup.is_plain:
        more |= {"categories": categories(measurement, plain), "differing": differing(measurement, plain, decode)}
    return passes.as_json(measurement) | more


def plain_of(measurement: Measurement, measurements: Iterable[Measurement]) -> Measurement | None:
    """The target alone at the same concurrency."""
    concurrency = measurement.setup.concurrency
    return next((m for m in measurements if m.setup.is_plain and m.setup.concurrency == concurrency), None)


def best_of(measurements: Sequence[Measurement]) -> int | None:
    """The number of the best measurement by BEST_RULE; None if there is none."""
    candidates = _at_lowest_concurrency(measurements)
    return max(candidates, key=lambda n: _throughput(list(measurements[n].passes.values())), default=None)


def _at_lowest_concurrency(measurements: Sequence[Measurement]) -> list[int]:
    """The numbers of the measurements with a draft at the lowest concurrency that was measured."""
    drafted = [n for n, m in enumerate(measurements) if not m.setup.is_plain]
    lowest = min((measurements[n].setup.concurrency for n in drafted), default=None)
    return [n for n in drafted if measurements[n].setup.concurrency == lowest]


def _throughput(measured: Sequence[Pass]) -> float:
    return sum(p.tokens for p in measured) / sum(p.seconds for p in measured)


def rows(measurement: Measurement, plain: Measurement | None) -> Json:
    """A row for each benchmark and for all of them together."""
    is_plain = measurement.setup.is_plain
    return {
        name: row(
            None if is_plain else [measurement.passes[n] for n in group],
            None if plain is None else [plain.passes[n] for n in group],
        )
        for name, group in _groups(measurement).items()
    }


def _groups(measurement: Measurement) -> dict[str, list[str]]:
    """The benchmarks that go into each row."""
    return {name: [name] for name in measurement.passes} | {ALL: list(measurement.passes)}


def row(drafted: Sequence[Pass] | None, plain: Sequence[Pass] | None) -> Json:
    """The figures of some benchmarks with a draft and without; None: not measured."""
    speeds = {"plain": plain and _throughput(plain), "draft": drafted and _throughput(drafted)}
    content = {
        "prompts": sum(len(p.answers) for p in drafted or plain),
        **(acceptance(drafted) if drafted else {}),
        **{f"tokens_per_s_{name}": speed for name, speed in speeds.items()},
    }
    if drafted:
        content["speed_up"] = speeds["draft"] / speeds["plain"] if plain else None
    return content | latency(drafted, plain) | (identity(drafted, plain) if drafted else {})


def acceptance(drafted: Sequence[Pass]) -> Json:
    """Acceptance length, its interval and its positions, from vLLM's counters and from the answers."""
    counters = [p.counters for p in drafted]
    drafts, accepted = (sum(c[name] for c in counters) for name in ("drafts", "accepted_tokens"))
    by_position = np.sum([c["accepted_tokens_per_pos"] for c in counters], axis=0) / max(drafts, 1)
    sums = [_sums(p.answers) for p in drafted]
    told = all(s is not None for s in sums)
    return {
        "tokens": sum(p.tokens for p in drafted),
        "acceptance_length": 1 + accepted / max(drafts, 1),
        "acceptance_length_interval": bootstrap.ratio_interval(sums, plus=1) if told else None,
        "acceptance_by_position": by_position.tolist(),
        "accepted_past_end": accepted - int(sum(s[:, 0].sum() for s in sums)) if told else None,
    }


def _sums(answers: Sequence[Answer]) -> np.ndarray | None:
    """[answers, 2]: accepted tokens, and passes that checked a draft; None where they are not known."""
    if any(a.accepted is None for a in answers):
        return None
    return np.array([[sum(a.accepted), len(a.accepted)] for a in answers])


def latency(drafted: Sequence[Pass] | None, plain: Sequence[Pass] | None) -> Json:
    """Time per output token and to the first one, and the speed-up by the former."""
    content: Json = {}
    for name, measured in (("plain", plain), ("draft", drafted)):
        answers = [a for p in measured or () for a in p.answers]
        times = [ms for a in answers if (ms := a.ms_per_token) is not None]
        content[f"ms_per_token_{name}"] = float(np.mean(times)) if times else None
        content[f"median_ms_per_token_{name}"] = float(np.median(times)) if times else None
        first = [1000 * a.first_token_s for a in answers]
        content[f"ms_to_first_token_{name}"] = float(np.median(first)) if first else None
    if drafted:
        both = [_times(p, d) for p, d in zip(plain, drafted, strict=True)] if plain else []
        plain_ms, draft_ms = np.concatenate(both).sum(axis=0) if both else (0, 0)
        content["speed_up_per_token"] = float(plain_ms / draft_ms) if draft_ms else None
        content["speed_up_per_token_interval"] = bootstrap.ratio_interval(both) if both else None
    return content


def _times(plain: Pass, drafted: Pass) -> np.ndarray:
    """[answers, 2]: ms per token of the target alone and with the draft, where both are known."""
    pairs = [(a.ms_per_token, b.ms_per_token) for a, b in zip(plain.answers, drafted.answers, strict=True)]
    return np.array([pair for pair in pairs if None not in pair]).reshape(-1, 2)


def identity(drafted: Sequence[Pass], plain: Sequence[Pass] | None) -> Json:
    """How many greedy answers are those of the target alone, and which are not."""
    if plain is None:
        return {"identical": None, "different": None}
    different = [d.id for _, _, d in _differing(drafted, plain)]
    return {"identical": sum(len(p.answers) for p in drafted) - len(different), "different": different}


def _differing(drafted: Sequence[Pass], plain: Sequence[Pass]) -> list[tuple[int, Answer, Answer]]:
    """(number of the pass, the target's answer, the answer with the draft) of each that differs."""
    numbered = enumerate(zip(plain, drafted, strict=True))
    pairs = [(n, a, b) for n, (p, d) in numbered for a, b in zip(p.answers, d.answers, strict=True)]
    return [(n, a, b) for n, a, b in pairs if a.ids != b.ids]


def differing(measurement: Measurement, plain: Measurement | None, decode: Decode | None) -> list[Json]:
    """The first few differing answers: where they part, and both tokens there with the text before."""
    if plain is None:
        return []
    names = list(measurement.passes)
    found = _differing([measurement.passes[n] for n in names], [plain.passes[n] for n in names])
    return [
        {"benchmark": names[n], "id": b.id, **_parting(a.ids, b.ids, decode)} for n, a, b in found[:DIFFERENCES_SHOWN]
    ]


def _parting(plain: list[int], drafted: list[int], decode: Decode | None) -> Json:
    """Where two answers part. An answer that ends there has no token (null)."""
    position = next(k for k, (a, b) in enumerate(zip_longest(plain, drafted)) if a != b)
    tokens = [ids[position] if position < len(ids) else None for ids in (plain, drafted)]
    texts = [None if token is None or decode is None else decode([token]) for token in tokens]
    before = plain[max(position - CONTEXT_TOKENS, 0) : position]
    return {
        "position": position,
        "before": decode(before) if decode else None,
        "plain_token": tokens[0],
        "draft_token": tokens[1],
        "plain_text": texts[0],
        "draft_text": texts[1],
    }


def categories(measurement: Measurement, plain: Measurement | None) -> Json | None:
    """A row for each category of prompts, of all benchmarks; None where acceptance by answer is not known."""
    every = [a for p in measurement.passes.values() for a in p.answers]
    if any(a.accepted is None for a in every):
        return None
    names = dict.fromkeys(a.category for a in every if a.category is not None)
    return {name: _category(name, measurement, plain) for name in names}


def _category(name: str, measurement: Measurement, plain: Measurement | None) -> Json:
    drafted = _only(measurement, name)
    targets = _only(plain, name) if plain else None
    return {"prompts": sum(len(p.answers) for p in drafted), **acceptance(drafted), **latency(drafted, targets)}


def _only(measurement: Measurement, category: str) -> list[Pass]:
    """The answers of one category, counted from what each pass accepted; their seconds are not known."""
    found = []
    for measured in measurement.passes.values():
        if answers := [a for a in measured.answers if a.category == category]:
            found.append(Pass(answers, 0.0, counted(answers, measurement.setup.num_drafts)))
    return found


def counted(answers: Iterable[Answer], num_drafts: int) -> Json:
    """What vLLM's counters say of these answers alone."""
    accepted = np.array([n for a in answers for n in a.accepted or ()], dtype=int)
    return {
        "drafts": len(accepted),
        "accepted_tokens": int(accepted.sum()),
        "accepted_tokens_per_pos": [int((accepted > k).sum()) for k in range(num_drafts)],
    }


def comparisons(measurements: Sequence[Measurement]) -> Iterable[Json]:
    """Each further draft beside the first one, with equally many drafted tokens, at the lowest concurrency."""
    at_lowest = [measurements[n] for n in _at_lowest_concurrency(measurements)]
    for first in at_lowest:
        if first.setup.draft == at_lowest[0].setup.draft:
            same_number = (m for m in at_lowest if m.setup.num_drafts == first.setup.num_drafts)
            yield from (_comparison(first, m) for m in same_number if m.setup.draft != first.setup.draft)


def _comparison(first: Measurement, other: Measurement) -> Json:
    return {
        "baseline": first.setup.draft,
        "draft": other.setup.draft,
        "num_speculative_tokens": first.setup.num_drafts,
        "concurrency": first.setup.concurrency,
        "benchmarks": {
            name: compare([first.passes[n] for n in group], [other.passes[n] for n in group])
            for name, group in _groups(first).items()
        },
    }


def compare(first: Sequence[Pass], other: Sequence[Pass]) -> Json:
    """Acceptance length of two drafts on the same prompts, difference and ratio with 95% intervals."""
    strata = [np.hstack([_sums(a.answers), _sums(b.answers)]) for a, b in zip(first, other, strict=True)]
    sums = np.concatenate(strata).sum(axis=0)
    lengths = [1 + float(sums[0] / max(sums[1], 1)), 1 + float(sums[2] / max(sums[3], 1))]
    intervals: tuple[Any, Any] = bootstrap.compared(strata) or (None, None)
    return {
        "prompts": sum(map(len, strata)),
        "acceptance_lengths": lengths,
        "difference": lengths[1] - lengths[0],
        "difference_interval": intervals[0],
        "ratio": lengths[1] / lengths[0],
        "ratio_interval": intervals[1],
    }
