"""The evaluation in a run's report: what vLLM measured, what is published, and answers token by token."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from eagle3 import charts, figures, marked, runs, sections
from eagle3.published import NAMES, PUBLISHED
from eagle3.sections import Run, Section, Tile

ANSWER_TOKENS = 400  # shown


@dataclass(frozen=True)
class Measured:
    """One measurement of an evaluation that has a draft, and the answers that came of it."""

    setup: str
    num_drafts: int
    rows: dict[str, Section]
    categories: dict[str, Section]
    answers: list[Section]

    @property
    def name(self) -> str:
        return f"{self.num_drafts} drafted tokens, {self.setup}"


def measured(content: Section) -> list[Measured]:
    """The measurements with a draft, the best one first."""
    entries = content["measurements"]
    order = sorted(range(len(entries)), key=lambda n: n != content["best"])
    several = len({m["draft"] for m in entries if m["num_speculative_tokens"]}) > 1
    return [
        Measured(
            f"concurrency {m['concurrency']}" + f", draft {m['draft']}" * several,
            m["num_speculative_tokens"],
            m["benchmarks"],
            m["categories"] or {},
            [a for a in content["answers"] if a["measurement"] == n],
        )
        for n in order
        if (m := entries[n])["num_speculative_tokens"]
    ]


def evaluation(run: Run) -> Section:
    """Acceptance and speed as vLLM has them, beside the training's estimate and what is published."""
    outputs = [o for o in run.of("evaluate") if o.file.is_file()]
    if not outputs:
        return run.missing("evaluate")
    with runs.reading(outputs[0].file):
        content = outputs[0].content
        figures.check_format(content)
        found = measured(content)
        if not found:
            return run.missing("evaluate") | {
                "what": f"{outputs[0].place} has no measurement with a draft yet, so it is"
            }
        best = found[0]
        return sections.source(outputs) | {
            "unfinished": "" if content["finished"] else "Measurements are missing: the same command makes them.",
            "headline": list(_headline(best)),
            "max_tokens": content["settings"]["max_tokens"],
            "tables": [_table(best, "Best: " * (len(found) > 1))],
            "more": [*_categories(best), *(_table(m) for m in found[1:]), *_comparisons(content["comparisons"])],
            "by_drafts": _by_drafts(found),
            "positions": _positions(run, best),
            "positions_note": "Share of drafts whose tokens up to here were all accepted.",
            "beside": _beside(best),
            "published": _published(best),
            "answers": _answers(run, best),
            "no_answers": "What each pass accepted is not known for single answers of this measurement.",
            "settings": {k: v for k, v in content["settings"].items() if not isinstance(v, dict)},
            "fault": run.fault,
        }


def _headline(best: Measured) -> Iterator[Tile]:
    row = best.rows["all"]
    note = f"tokens a pass of the target, {best.num_drafts} drafted"
    yield Tile("Acceptance length, measured", f"{row['acceptance_length']:.2f}", note)
    if row["speed_up"] is not None:
        note = f"{row['tokens_per_s_draft']:,.1f} against {row['tokens_per_s_plain']:,.1f} tokens/s"
        yield Tile("Speed-up in vLLM", f"{row['speed_up']:.2f}×", note)
    if row["identical"] is not None:
        yield Tile("Identical answers", f"{row['identical']:,} of {row['prompts']:,}", "with and without the draft")


def _table(found: Measured, prefix: str = "") -> Section:
    positions = [f"pos. {k + 1}" for k in range(found.num_drafts)]
    speeds = ("tok/s plain", "tok/s draft", "speed-up", "identical")
    heads = ["benchmark", "prompts", "acceptance length", *positions, *speeds]
    return {"caption": prefix + found.name, "heads": heads, "rows": [(n, _cells(row)) for n, row in found.rows.items()]}


def _categories(best: Measured) -> Iterator[Section]:
    """By category of prompt, where there are several."""
    if len(best.categories) > 1:
        heads = ["category", "prompts", "acceptance length", *(f"pos. {k + 1}" for k in range(best.num_drafts))]
        rows = [(name, _accepted(row)) for name, row in best.categories.items()]
        yield {"caption": f"By category: {best.name}", "heads": heads, "rows": rows}


def _comparisons(found: list[Section]) -> Iterator[Section]:
    """Each further draft beside the first one, on the same prompts."""
    for c in found:
        rows = [
            (
                name,
                [
                    f"{row['prompts']:,}",
                    *(f"{length:.2f}" for length in row["acceptance_lengths"]),
                    f"{row['difference']:+.3f}{_between(row['difference_interval'], '+.3f')}",
                ],
            )
            for name, row in c["benchmarks"].items()
        ]
        caption = f"{c['draft']} beside {c['baseline']}, {c['num_speculative_tokens']} drafted tokens"
        heads = ["benchmark", "prompts", "the latter", "the former", "difference"]
        yield {"caption": caption, "heads": heads, "rows": rows}


def _by_drafts(found: list[Measured]) -> charts.Chart | None:
    """Tokens a second over the number of drafted tokens, where several were measured; the target alone as a line."""
    if len({m.num_drafts for m in found}) < 2:
        return None
    lines: dict[str, list[Measured]] = {}
    for m in sorted(found, key=lambda m: m.num_drafts):
        lines.setdefault(m.setup, []).append(m)
    series = []
    for k, (setup, measurements) in enumerate(lines.items()):
        for kind in ("draft", "plain"):
            rates = [(m.num_drafts, m.rows["all"][f"tokens_per_s_{kind}"]) for m in measurements]
            points = [(n, rate, f"{n} drafted, {setup}, {kind}: {rate:,.1f} tokens/s") for n, rate in rates if rate]
            label = kind if len(lines) == 1 else f"{kind} {k + 1}"
            series.append(charts.Series(label, 1 + k % charts.NUM_STYLES, points, dashed=kind == "plain"))
    return charts.chart("Speed by drafted tokens", "drafted tokens", "tokens/s", series)


def _between(interval: list[float] | None, form: str) -> str:
    return f" ({interval[0]:{form}} to {interval[1]:{form}})" if interval else ""


def _accepted(row: Section) -> list[str]:
    length = f"{row['acceptance_length']:.2f}{_between(row['acceptance_length_interval'], '.2f')}"
    return [f"{row['prompts']:,}", length, *(f"{share:.1%}" for share in row["acceptance_by_position"])]


def _cells(row: Section) -> list[str]:
    return [
        *_accepted(row),
        _or_dash(row["tokens_per_s_plain"], ",.1f"),
        _or_dash(row["tokens_per_s_draft"], ",.1f"),
        _or_dash(row["speed_up"], ".2f", "×"),
        "–" if row["identical"] is None else f"{row['identical']:,} of {row['prompts']:,}",
    ]


def _or_dash(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"


def _positions(run: Run, best: Measured) -> charts.Chart | None:
    """Accepted up to each position: every benchmark, and the training's estimate for the same draft."""
    lines = {name: row["acceptance_by_position"] for name, row in best.rows.items()}
    trained = run.of("train")
    held_out = runs.best(runs.read_metrics(trained[0].place)) if trained else None
    if held_out:
        lines["held out"] = held_out["accepted"][: best.num_drafts]
    series = [
        charts.Series(
            name,
            1 + k % charts.NUM_STYLES,
            [(n, share, f"{name}, position {n}: {share:.1%}") for n, share in enumerate(shares, 1)],
            dashed=name == "held out",
        )
        for k, (name, shares) in enumerate(lines.items())
    ]
    return charts.chart("Acceptance by position", "drafted token", "accepted", series, shares=True)


def _published(best: Measured) -> Section:
    """The same numbers as a table: this run, then the published drafts."""
    own = _lengths_of(best)
    heads = list(dict.fromkeys([*own, *(p.benchmark for p in PUBLISHED)]))
    rows = [{"style": 1, "draft": "this run", "cells": [_or_dash(own.get(h), ".2f") for h in heads]}]
    for draft in dict.fromkeys(p.draft for p in PUBLISHED):
        found = {p.benchmark: p.text for p in PUBLISHED if p.draft == draft}
        rows.append({"style": _published_style(draft), "draft": draft, "cells": [found.get(h, "–") for h in heads]})
    return {"heads": heads, "rows": rows}


def _lengths_of(best: Measured) -> dict[str, float]:
    """Acceptance length by the benchmark's usual name."""
    return {NAMES.get(name, name): row["acceptance_length"] for name, row in best.rows.items() if name != "all"}


def _published_style(draft: str) -> int:
    return 2 + list(dict.fromkeys(p.draft for p in PUBLISHED)).index(draft)


def _beside(best: Measured) -> charts.Strip:
    """This run's acceptance lengths and the published ones, by benchmark."""
    groups: dict[str, list[charts.Value]] = {}
    for name, length in _lengths_of(best).items():
        value = charts.Value(length, 1, f"this run, {name}: {length:.2f} with {best.num_drafts} drafted tokens")
        groups.setdefault(name, []).append(value)
    for p in PUBLISHED:
        value = charts.Value(p.length, _published_style(p.draft), f"{p.draft}, {p.benchmark}: {p.text}", p.to)
        groups.setdefault(p.benchmark, []).append(value)
    return charts.strip("Beside published drafts", "acceptance length", groups, 1.0)


def _answers(run: Run, best: Measured) -> list[Section]:
    """Of each benchmark the answer that accepted most, the middle one and the one that accepted least."""
    known = [a for a in best.answers if a["accepted"]]
    groups = groupby(known, key=lambda a: a["benchmark"])
    found = {name: sorted(answers, key=_length_of, reverse=True) for name, answers in groups}
    return [
        {
            "name": name,
            "answers": [_answer(run, best, rank, answers[k]) for rank, k in _ranks(len(answers)).items()],
        }
        for name, answers in found.items()
    ]


def _ranks(count: int) -> dict[str, int]:
    return {"Best": 0} | ({"Median": count // 2} if count > 2 else {}) | ({"Worst": count - 1} if count > 1 else {})


def _length_of(answer: Section) -> float:
    return 1 + sum(answer["accepted"]) / len(answer["accepted"])


def _answer(run: Run, best: Measured, rank: str, answer: Section) -> Section:
    category = f" ({answer['category']})" if answer["category"] not in (None, answer["benchmark"]) else ""
    tokens, accepted = answer["tokens"], answer["accepted"]
    return {
        "rank": rank,
        "title": f"{answer['id']}{category}: acceptance length {_length_of(answer):.2f}, {len(tokens):,} tokens in "
        f"{len(accepted) + 1:,} passes",
        "cut": sections.cut(len(tokens), ANSWER_TOKENS),
        "passes": [_pass(p) for p in marked.passes(tokens[:ANSWER_TOKENS], accepted, best.num_drafts, run.text)],
    }


def _pass(found: marked.Pass) -> Section:
    told = found.rejected is not None
    return {
        "accepted": [sections.shown(piece.text) for piece, accepted in found.pieces if accepted],
        "own": "".join(sections.shown(piece.text) for piece, accepted in found.pieces if not accepted),
        "marks": ("●" * found.accepted, "○" * found.rejected) if told else None,
        "title": f"{found.accepted} accepted, {found.rejected} rejected" if told else "from the pass over the prompt",
    }
