"""The evaluation's JSON (figures.py) as tables for a person, at most 120 columns wide."""

from collections.abc import Iterator, Sequence
from typing import Any

from eagle3.benchmarks import ALL
from eagle3.passes import Json

WIDTH = 120
POSITIONS_SHOWN = 7  # as many as EAGLE-3 trains
ACCEPTED_OFTEN = 0.2  # one more drafted token adds about as much as the last one: a fifth of a token pays for itself
DIFFERENCES = (
    "How to read differing answers: a pass that checks several tokens adds up in another order than one for a single",
    "token, so in 16 bits two nearly equal logits can change places: a few answers that part late, with a plausible",
    "token on both sides, are that. Many, some that part at their first tokens, or any in float32 are a fault.",
)


def table(result: Json) -> Iterator[str]:
    """The result as lines."""
    measurements, best = result["measurements"], result["best"]
    labels = _labels(measurements)
    yield f"{result['definition']};"
    yield f"greedy, at most {result['settings']['max_tokens']:,} tokens an answer; ms/token: after the first, mean and"
    yield "median; speed-up: of tokens/s and of the mean ms/token against the target alone at the same concurrency"
    yield from (f"draft {label}: {draft or 'the one of the server'}" for draft, label in labels.items())
    yield ""
    yield from _columns(OVERVIEW, [_overview(m, labels) for m in measurements])
    if best is not None:
        yield from _details(measurements[best], labels)
    for comparison in result["comparisons"]:
        yield from ["", *_comparison(comparison, labels)]
    yield from _differing(measurements, labels)
    if best is not None:
        yield from ["", *_verdict(result, labels)]


def _labels(measurements: Sequence[Json]) -> dict[str | None, str]:
    """A short name for each draft: A, B, ..., or its number after Z."""
    drafts = list(dict.fromkeys(m["draft"] for m in measurements if m["num_speculative_tokens"]))
    return {draft: chr(ord("A") + n) if n < 26 else str(n + 1) for n, draft in enumerate(drafts)}


OVERVIEW = (
    "draft", "drafted", "conc.", "length", "95% interval", "tokens/s", "speed-up", "ms/token", "median", "speed-up",
    "1st ms", "identical",
)  # fmt: skip


def _overview(measurement: Json, labels: dict[str | None, str]) -> list[str]:
    row, is_plain = measurement["benchmarks"][ALL], not measurement["num_speculative_tokens"]
    name = "plain" if is_plain else "draft"
    return [
        "none" if is_plain else labels[measurement["draft"]],
        "-" if is_plain else str(measurement["num_speculative_tokens"]),
        str(measurement["concurrency"]),
        *_acceptance(row),
        _number(row[f"tokens_per_s_{name}"], ".1f"),
        _number(row.get("speed_up"), ".2f", "x"),
        _number(row[f"ms_per_token_{name}"], ".2f"),
        _number(row[f"median_ms_per_token_{name}"], ".2f"),
        _number(row.get("speed_up_per_token"), ".2f", "x"),
        _number(row[f"ms_to_first_token_{name}"], ".0f"),
        _identical(row),
    ]


def _acceptance(row: Json) -> list[str]:
    return [_number(row.get("acceptance_length"), ".2f"), _interval(row.get("acceptance_length_interval"), ".2f")]


def _identical(row: Json) -> str:
    return "-" if row.get("identical") is None else f"{row['identical']} of {row['prompts']}"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _interval(value: Sequence[float] | None, form: str) -> str:
    return "-" if value is None else f"{value[0]:{form}} to {value[1]:{form}}"


def _columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows under heads: the first column to the left, the others to the right."""
    widths = [max(len(line[k]) for line in (heads, *rows)) for k in range(len(heads))]
    for line in (heads, *rows):
        first, *rest = line
        yield "  ".join([first.ljust(widths[0]), *(t.rjust(w) for t, w in zip(rest, widths[1:], strict=True))]).rstrip()


def _name(measurement: Json, labels: dict[str | None, str]) -> str:
    draft = f"draft {labels[measurement['draft']]}, " if len(labels) > 1 else ""
    return f"{draft}{measurement['num_speculative_tokens']} drafted, concurrency {measurement['concurrency']}"


def _details(measurement: Json, labels: dict[str | None, str]) -> Iterator[str]:
    """By benchmark and by category, of the best measurement."""
    yield ""
    yield f"{_name(measurement, labels)}; by position: share of drafts whose 1st, 2nd, ... token was accepted"
    heads = ["benchmark", "prompts", "length", "95% interval", "by position", "tokens/s", "speed-up", "identical"]
    rows = [
        [
            _cut(name), str(row["prompts"]), *_acceptance(row), _positions(row),
            _number(row["tokens_per_s_draft"], ".1f"), _number(row["speed_up"], ".2f", "x"), _identical(row),
        ]
        for name, row in measurement["benchmarks"].items()
    ]  # fmt: skip
    yield from _columns(heads, rows)
    if past_end := measurement["benchmarks"][ALL]["accepted_past_end"]:
        yield (
            f"(intervals and categories leave out {past_end:,} tokens that were accepted past the end of an answer: "
            "this vLLM"
        )
        yield "does not tell what each answer accepted, it is taken from its steps)"
    if measurement["benchmarks"][ALL]["acceptance_length_interval"] is None:
        yield "(no intervals and categories: there is one prompt only, or it is not known what each answer accepted;"
        yield " a vLLM server tells it with --per-request-spec-decode-metrics detailed)"
    found = measurement["categories"] or {}
    if len(found) > max(len(measurement["benchmarks"]) - 1, 1):
        heads = ["category", "prompts", "length", "95% interval", "by position", "ms/token", "speed-up"]
        yield ""
        yield from _columns(heads, [_category(name, row) for name, row in found.items()])


def _category(name: str, row: Json) -> list[str]:
    return [
        _cut(name), str(row["prompts"]), *_acceptance(row), _positions(row),
        _number(row["ms_per_token_draft"], ".2f"), _number(row["speed_up_per_token"], ".2f", "x"),
    ]  # fmt: skip


def _positions(row: Json) -> str:
    shares = row["acceptance_by_position"]
    more = " .." if len(shares) > POSITIONS_SHOWN else ""
    return " ".join(f"{share:>4.0%}" for share in shares[:POSITIONS_SHOWN]) + more


def _cut(name: str, width: int = 16) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}~"


def _comparison(comparison: Json, labels: dict[str | None, str]) -> Iterator[str]:
    a, b = labels[comparison["baseline"]], labels[comparison["draft"]]
    yield (
        f"draft {b} beside draft {a}, {comparison['num_speculative_tokens']} drafted, concurrency "
        f"{comparison['concurrency']}; 95% intervals by paired bootstrap over prompts"
    )
    heads = ["benchmark", "prompts", f"draft {a}", f"draft {b}", "difference", "95% interval", "ratio", "95% interval"]
    rows = [
        [
            _cut(name), str(row["prompts"]), *(f"{length:.2f}" for length in row["acceptance_lengths"]),
            f"{row['difference']:+.3f}", _interval(row["difference_interval"], "+.3f"),
            f"{row['ratio']:.3f}", _interval(row["ratio_interval"], ".3f"),
        ]
        for name, row in comparison["benchmarks"].items()
    ]  # fmt: skip
    yield from _columns(heads, rows)


def _differing(measurements: Sequence[Json], labels: dict[str | None, str]) -> Iterator[str]:
    """Where the first differing answers of each measurement part, and how to read it."""
    found = [m for m in measurements if m.get("differing")]
    for measurement in found:
        row = measurement["benchmarks"][ALL]
        yield ""
        yield f"{_name(measurement, labels)}: {len(row['different'])} of {row['prompts']} answers differ from plain"
        for shown in measurement["differing"]:
            yield f"  {shown['id']}, token {shown['position'] + 1}, after {shown['before']!r}:"
            yield f"    plain {_token(shown, 'plain')}, with draft {_token(shown, 'draft')}"
    if found:
        yield from ["", *DIFFERENCES]


def _token(row: Json, name: str) -> str:
    token, text = row[f"{name}_token"], row[f"{name}_text"]
    return "(ended)" if token is None else f"{text!r} ({token})" if text is not None else str(token)


def _tokens_per_s(measurement: Json) -> float:
    return measurement["benchmarks"][ALL]["tokens_per_s_draft"]


def _verdict(result: Json, labels: dict[str | None, str]) -> Iterator[str]:
    """The best number of drafted tokens, of all drafts and of each."""
    measurements = result["measurements"]
    best = measurements[result["best"]]
    yield f"best: {_name(best, labels)} ({result['best_rule']})"
    drafted = [m for m in measurements if m["num_speculative_tokens"] and m["concurrency"] == best["concurrency"]]
    for draft, label in labels.items() if len(labels) > 1 else ():
        own = max((m for m in drafted if m["draft"] == draft), key=_tokens_per_s)
        yield f"      draft {label} alone: {own['num_speculative_tokens']} drafted, {_tokens_per_s(own):.1f} tokens/s"
    yield from _hints(measurements, labels)


def _hints(measurements: Sequence[Json], labels: dict[str | None, str]) -> Iterator[str]:
    """Where the last of the most drafted tokens is still accepted often."""
    most = max(m["num_speculative_tokens"] for m in measurements)
    last: dict[Any, float] = {
        m["draft"]: m["benchmarks"][ALL]["acceptance_by_position"][-1]
        for m in measurements
        if m["num_speculative_tokens"] == most
    }
    for draft, share in last.items():
        if share >= ACCEPTED_OFTEN:
            of = f" of draft {labels[draft]}" if len(labels) > 1 else ""
            yield (
                f"hint: token {most}{of} is still accepted in {share:.0%} of the passes; more are worth trying: "
                f"--num-speculative-tokens {most + 1} {most + 2}"
            )
