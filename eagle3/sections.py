"""The sections of a run's report: from each stage's files to the facts, tables and figures that the page shows.

Each function gives a mapping for templates/report.html, or what is missing and the command that makes it. ValueError
naming the file that is not as its stage writes it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from statistics import median
from typing import Any

from eagle3 import charts, files, marked, prepared, runs, shards
from eagle3.charts import Series
from eagle3.marked import Decode
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
NUM_SAMPLES, SAMPLE_TOKENS = 3, 600  # shown


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
        """The text of token ids; the ids themselves without a tokenizer. ValueError for one that it does not know."""
        if not self.decode:
            return "".join(f"{i} " for i in ids)
        try:
            return self.decode(ids)
        except (LookupError, OverflowError):
            raise ValueError(f"one of the token ids {ids} is none of the target's tokenizer") from None


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
        return source(outputs) | {
            "tiles": [*_generated_tiles(run), *_data_tiles(counts, statistics, vocab)],
            "bars": list(_data_bars(counts, statistics, drops, vocab["coverage"])),
            "drops": [
                {"reason": reason, "count": count, "examples": counts["dropped_examples"].get(reason, [])}
                for reason, count in drops
            ],
            "settings": content["settings"] | {"inputs": ", ".join(content["inputs"])},
        }


def source(outputs: Sequence[Output]) -> Section:
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
    """How the hidden states were extracted: all parts together of a set that was made in parts."""
    outputs = run.of("extract")
    if not outputs:
        return run.missing("extract")
    newest = outputs[0]
    if not newest.file.is_file():
        return run.missing("extract") | {"what": f"{newest.place} is unfinished: its metadata.json is"}
    with runs.reading(newest.file):
        content = newest.content
        parts, older = _parts(outputs, content["settings"]["data_sha256"])
        shared = content["shared"]
        versions = {f"version of {name}": value for name, value in shared.get("versions", {}).items()}
        tiles = [*_set_tiles(parts), _layers_tile(shared)]
        settings = content["settings"] | {"layer_convention": shared["layer_convention"]} | versions
    status = files.read_json(newest.status_file) if newest.status_file.is_file() else {}
    with runs.reading(newest.status_file):
        if "tokens_per_s" in status:
            note = f"tokens/s; {status['gb_per_s']:.3f} GB/s to the disk" + " (the newest part)" * (len(parts) > 1)
            tiles.append(Tile("Extraction rate", f"{status['tokens_per_s']:,.0f}", note))
        check = status.get("self_check", "").removeprefix("self-check: ")
    return source([*parts[:1], *older]) | {
        "tiles": tiles,
        "self_check": check and f"Self-check: {check}",
        "settings": settings,
    }


def _parts(outputs: list[Output], data: str) -> tuple[list[Output], list[Output]]:
    """The outputs that hold states of the same prepared data, and the others."""
    same = {o: o.file.is_file() and o.content["settings"]["data_sha256"] == data for o in outputs}
    return [o for o in outputs if same[o]], [o for o in outputs if not same[o]]


def _set_tiles(parts: list[Output]) -> Iterator[Tile]:
    contents = [o.content for o in parts]
    samples, tokens, planned = (sum(c[key] for c in contents) for key in ("num_samples", "num_tokens", "num_shards"))
    paths = [path for o in parts for path in shards.shard_paths(o.place)]
    there, size = len(paths), sum(path.stat().st_size for path in paths)
    yield Tile("Samples", f"{samples:,}", f"{tokens:,} tokens" + f" in {len(parts)} parts" * (len(parts) > 1))
    yield Tile("Shards", f"{planned:,}" if there == planned else f"{there:,} of {planned:,}", f"{size / 1e9:,.2f} GB")


def _layers_tile(shared: Section) -> Tile:
    note = f"outputs, 0-based; stored as {shared['storage_dtype']}"
    return Tile("Layers", " ".join(map(str, shared["layer_ids"])), note)


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
        return source(outputs) | {
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
    with runs.reading(found[0]):
        return {"rows": [_sample_row(run, row) for row in rows], "fault": run.fault}


def _sample_row(run: Run, row: prepared.Row) -> Section:
    mask = row.loss_mask.tolist()
    made = marked.pieces(row.input_ids[:SAMPLE_TOKENS].tolist(), run.text)
    runs_of = groupby(made, key=lambda piece: bool(mask[piece.last]))
    return {
        "title": row.title,
        "cut": cut(len(mask), SAMPLE_TOKENS),
        "runs": [
            (supervised, [{"text": shown(p.text), "title": _named(p, supervised)} for p in pieces])
            for supervised, pieces in runs_of
        ],
    }


def _named(piece: marked.Piece, supervised: bool) -> str:
    where = f"token {piece.first}" if piece.first == piece.last else f"tokens {piece.first} to {piece.last}"
    return f"{where}, id {', '.join(map(str, piece.ids))}{', supervised' if supervised else ''}"


def shown(text: str) -> str:
    """A line's end can be seen, so that a mark on it can."""
    return text.replace("\n", "↵\n")


def cut(length: int, most: int) -> str:
    return f"and {length - most:,} more tokens" if length > most else ""
