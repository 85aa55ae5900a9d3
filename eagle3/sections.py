"""The sections of a run's report: from each stage's files to the facts, tables and figures that the page shows.

Each function gives a mapping for templates/report.html, or what is missing and the command that makes it. ValueError
naming the file that is not as its stage writes it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from statistics import median
from typing import Any

from eagle3 import charts, files, marked, prepared, runs
from eagle3.charts import Series
from eagle3.marked import Decode
from eagle3.published import NAMES, PUBLISHED
from eagle3.runs import Output

Section = dict[str, Any]
WHAT = {
    "prepare": "The prepared data is",
    "extract": "The extraction of hidden states is",
    "train": "The training is",
    "evaluate": "The evaluation in vLLM is",
}
COMMANDS = {
    "prepare": "python 01_prepare_data.py --model-path TARGET --input {run}/answers.jsonl --output-dir {run}/prepared",
    "extract": "python 02_extract_hidden_states.py --model-path TARGET \\\n"
    "    --prepared-data {run}/prepared/tokenized_data.jsonl --output-dir {run}/hidden_states",
    "train": "python 03_train_draft.py --model-path TARGET --hidden-states {run}/hidden_states --output-dir {run}",
    "evaluate": "python 04_evaluate_draft.py --draft {run}/draft --prompts FILE.jsonl --output {run}/evaluation.json",
}
NUM_SAMPLES, SAMPLE_TOKENS, ANSWER_TOKENS = 3, 600, 400  # shown


@dataclass(frozen=True)
class Run:
    """A run's folder. `decode`: None where the tokenizer could not be loaded, `fault` says why."""

    folder: Path
    outputs: list[Output]
    decode: Decode | None = None
    fault: str = ""

    def of(self, stage: str) -> list[Output]:
        """The outputs of a stage, the newest first."""
        return [o for o in reversed(self.outputs) if o.stage == stage]

    def missing(self, stage: str) -> Section:
        return {"what": WHAT[stage], "command": COMMANDS[stage].format(run=self.folder)}

    def text(self, ids: list[int]) -> str:
        """The text of token ids; the ids themselves without a tokenizer."""
        return self.decode(ids) if self.decode else "".join(f"{i} " for i in ids)


@dataclass(frozen=True)
class Tile:
    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Part:
    name: str
    count: int
    css: str


@dataclass(frozen=True)
class Bar:
    """Parts of a whole, counted in `unit`s."""

    title: str
    unit: str
    parts: list[Part]


def data(run: Run) -> Section:
    """What became of the rows and of their tokens; the data of the hidden states says it where they are apart."""
    outputs = run.of("prepare") or run.of("extract")
    if not outputs:
        return run.missing("prepare")
    newest = outputs[0]
    with runs.reading(newest.file):
        content = newest.content if newest.stage == "prepare" else newest.content["prepared"]
        counts, statistics, vocab = content["counts"], content["statistics"], content["draft_vocab"]
        drops = sorted(counts["dropped"].items(), key=lambda item: -item[1])
        return _source(outputs) | {
            "tiles": [*_generated_tiles(run), *_data_tiles(counts, statistics, vocab)],
            "bars": list(_data_bars(counts, statistics, drops, vocab["coverage"])),
            "drops": [
                {"reason": reason, "count": count, "examples": counts["dropped_examples"].get(reason, [])}
                for reason, count in drops
            ],
            "settings": content["settings"] | {"inputs": ", ".join(content["inputs"])},
        }


def _source(outputs: Sequence[Output]) -> Section:
    return {"source": str(outputs[0].place), "others": [str(o.place) for o in outputs[1:]]}


def _generated_tiles(run: Run) -> Iterator[Tile]:
    for output in run.of("generate")[:1]:
        if output.file.is_file() and (counts := output.content.get("counts")):
            with runs.reading(output.file):
                note = f"to {counts['rows_in']:,} conversations; {counts['cut']:,} cut by the length"
                yield Tile("The target's own answers", f"{counts['answered']:,}", note)


def _data_tiles(counts: Section, statistics: Section, vocab: Section) -> Iterator[Tile]:
    lengths = statistics["length_percentiles"]
    yield Tile(
        "Rows in", f"{counts['rows_in']:,}", f"{counts['kept']:,} kept, {sum(counts['dropped'].values()):,} dropped"
    )
    yield Tile(
        "Samples", f"{counts['samples']:,}", f"{counts['answers']:,} answers, {counts['answers_clipped']:,} of them cut"
    )
    yield Tile("Tokens", f"{statistics['tokens']:,}", f"{statistics['supervised_share']:.1%} of them supervised")
    yield Tile(
        "Tokens a sample",
        f"{lengths['50']:,}",
        f"median; mean {statistics['length_mean']:,.0f}, longest {lengths['100']:,}",
    )
    yield Tile(
        "Draft vocabulary", f"{vocab['size']:,}", f"tokens, {vocab['coverage']:.2%} of the supervised ones are in it"
    )


def _data_bars(counts: Section, statistics: Section, drops: list[tuple[str, int]], coverage: float) -> Iterator[Bar]:
    dropped = [Part(f"dropped: {reason}", count, f"part{2 + k % 7}") for k, (reason, count) in enumerate(drops)]
    yield Bar("What became of the rows", "rows", [Part("kept", counts["kept"], "part1"), *dropped])
    supervised = statistics["supervised"]
    rest = statistics["tokens"] - supervised
    parts = [Part("supervised", supervised, "part3"), Part("prompts and templates", rest, "rest")]
    yield Bar("Tokens", "tokens", parts)
    inside = round(coverage * supervised)
    parts = [Part("in the draft vocabulary", inside, "part4"), Part("outside", supervised - inside, "rest")]
    yield Bar("Supervised tokens", "tokens", parts)


def states(run: Run) -> Section:
    """How the hidden states were extracted: all parts of a set that was made in parts together."""
    outputs = run.of("extract")
    if not outputs:
        return run.missing("extract")
    newest = outputs[0]
    if not newest.file.is_file():
        return run.missing("extract") | {"what": f"{newest.place} is unfinished: its metadata.json is"}
    status = files.read_json(newest.status_file) if newest.status_file.is_file() else {}
    with runs.reading(newest.file):
        content = newest.content
        shared = content["shared"]
        there, planned = runs.num_shards(newest.place), content["num_shards"]
        size = sum(path.stat().st_size for path in newest.place.glob("shard-*.safetensors"))
        tiles = [
            Tile("Samples", f"{content['num_samples']:,}", f"{content['num_tokens']:,} tokens"),
            Tile("Shards", f"{there:,} of {planned:,}" if there < planned else f"{planned:,}", f"{size / 1e9:,.2f} GB"),
            Tile(
                "Layers",
                " ".join(map(str, shared["layer_ids"])),
                f"outputs, 0-based; stored as {shared['storage_dtype']}",
            ),
        ]
    with runs.reading(newest.status_file):
        if "tokens_per_s" in status:
            note = f"{status['gb_per_s']:.3f} GB/s to the disk; {status['state']}"
            tiles.append(Tile("Extraction rate", f"{status['tokens_per_s']:,.0f}", f"tokens/s; {note}"))
    versions = {f"version of {name}": value for name, value in shared.get("versions", {}).items()}
    check = str(status.get("self_check", "")).removeprefix("self-check: ")
    return _source(outputs) | {
        "tiles": tiles,
        "self_check": check and f"Self-check: {check}",
        "settings": content["settings"] | {"layer_convention": shared["layer_convention"]} | versions,
    }


def training(run: Run) -> Section:
    """The curves of the newest training."""
    outputs = run.of("train")
    if not outputs:
        return run.missing("train")
    folder = outputs[0].place
    settings = outputs[0].content if outputs[0].file.is_file() else {}
    records = runs.read_metrics(folder)
    with runs.reading(folder / runs.METRICS):
        trained, held_out = ([r for r in records if r["kind"] == kind] for kind in ("train", "eval"))
        estimated = list(_estimated(runs.best(records)))
        return _source(outputs) | {
            "headline": estimated,
            "tiles": [*estimated, *_training_tiles(trained)],
            "charts": [c for c in _training_charts(trained, held_out) if c],
            "settings": settings.get("settings", {}) | {"command": settings.get("command", "")},
        }


def _estimated(best: Section | None) -> Iterator[Tile]:
    if best:
        note = f"on held-out samples, best at step {best['step']:,}"
        yield Tile("Acceptance length, estimated", f"{best['acceptance_length']:.2f}", note)


def _training_tiles(trained: list[Section]) -> Iterator[Tile]:
    if trained:
        last = trained[-1]
        yield Tile(
            "Steps",
            f"{last['step']:,}",
            f"{last['epoch']:.3g} epochs" + (f", {last['skipped']:,} skipped" * bool(last["skipped"])),
        )
        yield Tile(
            "Loss", f"{last['loss']:.3f}", f"at the end; {trained[0]['loss']:.3f} at step {trained[0]['step']:,}"
        )
        yield Tile("Training rate", f"{median(r['tokens_per_s'] for r in trained):,.0f}", "tokens/s, median")
        yield Tile("Peak memory", f"{max(r['memory_gb'] for r in trained):,.1f} GB", "of one process")
        yield Tile("Waiting for data", f"{median(r['data_wait_share'] for r in trained):.1%}", "of the time, median")


def _training_charts(trained: list[Section], held_out: list[Section]) -> Iterator[charts.Chart | None]:
    both = {"training": trained, "held out": held_out}
    for title, key, label, shares in (
        ("Loss", "loss_by_step", "loss a token", False),
        ("Accepted", "accepted", "share accepted up to here", True),
    ):
        span = _range([r[key] for r in trained + held_out])
        for name, records in both.items():
            lines = _by_position(records, key, shares)
            yield charts.chart(f"{title}, {name}", "training step", label, lines, shares=shares, y_range=span)
    lengths = [Series(n, k, _lengths(n, records), dashed=k > 1) for k, (n, records) in enumerate(both.items(), 1)]
    label = "tokens a pass of the target"
    yield charts.chart("Estimated acceptance length", "training step", label, lengths, from_zero=False)
    for title, key, unit, style in (
        ("Speed", "tokens_per_s", "tokens/s", 3),
        ("Gradient norm", "grad_norm", "norm", 4),
        ("Learning rate", "lr", "rate", 5),
    ):
        points = [(r["step"], r[key], f"step {r['step']:,}: {r[key]:,.4g} {unit}") for r in trained]
        yield charts.chart(title, "training step", unit, [Series("", style, points)])


def _lengths(name: str, records: list[Section]) -> list[charts.Point]:
    found = [(r["step"], r["acceptance_length"]) for r in records]
    return [(step, length, f"step {step:,}, {name}: {length:.3f}") for step, length in found]


def _range(lists: list[list[float]]) -> tuple[float, float] | None:
    values = [value for found in lists for value in found]
    return (min(values), max(values)) if values else None


def _by_position(records: list[Section], key: str, shares: bool) -> list[Series]:
    """A line for each position of the training-time test."""
    form = "{:.1%}" if shares else "{:.3f}"
    return [
        Series(
            f"position {k + 1}",
            1 + k % charts.NUM_STYLES,
            [
                (r["step"], r[key][k], f"step {r['step']:,}, position {k + 1}: {form.format(r[key][k])}")
                for r in records
            ],
        )
        for k in range(max((len(r[key]) for r in records), default=0))
    ]


def sample(run: Run) -> Section:
    """The first samples, their supervised tokens told apart."""
    found = [o.place / prepared.DATA for o in run.of("prepare")]
    if not found or not found[0].is_file():
        return run.missing("prepare")
    rows = list(islice(prepared.read_rows(found[0]), NUM_SAMPLES))
    return {"rows": [_sample_row(run, row) for row in rows], "fault": run.fault}


def _sample_row(run: Run, row: prepared.Row) -> Section:
    mask = row.loss_mask.tolist()
    made = marked.pieces(row.input_ids[:SAMPLE_TOKENS].tolist(), run.text)
    runs_of = groupby(made, key=lambda piece: bool(mask[piece.last]))
    return {
        "title": f"{row.id}: {len(mask):,} tokens, {sum(mask):,} supervised",
        "cut": _cut(len(mask), SAMPLE_TOKENS),
        "runs": [
            (supervised, [{"text": _shown(p.text), "title": _named(p, supervised)} for p in pieces])
            for supervised, pieces in runs_of
        ],
    }


def _named(piece: marked.Piece, supervised: bool) -> str:
    where = f"token {piece.first}" if piece.first == piece.last else f"tokens {piece.first} to {piece.last}"
    return f"{where}, id {', '.join(map(str, piece.ids))}{', supervised' if supervised else ''}"


def _shown(text: str) -> str:
    """A line's end can be seen, so that a mark on it can."""
    return text.replace("\n", "↵\n")


def _cut(length: int, most: int) -> str:
    return f"and {length - most:,} more tokens" if length > most else ""


@dataclass(frozen=True)
class Measured:
    """One measurement of an evaluation that has a draft, and the answers that came of it."""

    name: str
    num_drafts: int
    rows: dict[str, Section]
    answers: list[Section] = field(default_factory=list)


def measured(content: Section) -> list[Measured]:
    """The measurements with a draft, the best one first."""
    entries = content["measurements"]
    order = sorted(range(len(entries)), key=lambda n: n != content["best"])
    several = len({m["draft"] for m in entries if m["num_speculative_tokens"]}) > 1
    return [
        Measured(
            f"{Path(m['draft'] or m['url'] or '')}: " * several
            + f"{m['num_speculative_tokens']} drafted tokens, concurrency {m['concurrency']}",
            m["num_speculative_tokens"],
            m["benchmarks"],
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
        found = measured(content)
        if not found:
            return run.missing("evaluate") | {
                "what": f"{outputs[0].place} has no measurement with a draft yet, so it is"
            }
        best = found[0]
        return _source(outputs) | {
            "headline": list(_headline(best)),
            "max_tokens": content["settings"]["max_tokens"],
            "tables": [_table(m, "best: " * (m is best and len(found) > 1)) for m in found],
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


def _table(found: Measured, prefix: str) -> Section:
    positions = [f"pos. {k + 1}" for k in range(found.num_drafts)]
    heads = [
        "benchmark",
        "prompts",
        "acceptance length",
        *positions,
        "tok/s plain",
        "tok/s draft",
        "speed-up",
        "identical",
    ]
    return {"caption": prefix + found.name, "heads": heads, "rows": [(n, _cells(row)) for n, row in found.rows.items()]}


def _cells(row: Section) -> list[str]:
    interval = row.get("acceptance_length_interval")
    between = f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else ""
    return [
        f"{row['prompts']:,}",
        f"{row['acceptance_length']:.2f}{between}",
        *(f"{share:.1%}" for share in row["acceptance_by_position"]),
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
        Series(
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
        "cut": _cut(len(tokens), ANSWER_TOKENS),
        "passes": [_pass(p) for p in marked.passes(tokens[:ANSWER_TOKENS], accepted, best.num_drafts, run.text)],
    }


def _pass(found: marked.Pass) -> Section:
    told = found.rejected is not None
    return {
        "accepted": [_shown(piece.text) for piece, accepted in found.pieces if accepted],
        "own": "".join(_shown(piece.text) for piece, accepted in found.pieces if not accepted),
        "marks": ("●" * found.accepted, "○" * found.rejected) if told else None,
        "title": f"{found.accepted} accepted, {found.rejected} rejected" if told else "from the pass over the prompt",
    }
