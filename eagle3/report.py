"""One page on a whole run: `python -m eagle3.report RUN_DIR [--output FILE.html]`.

RUN_DIR is the folder that the stages wrote to (or one above them): the page shows what each of them left there, and
names what is missing with the command that makes it. One file, without network: it can be sent to somebody.

Prepared samples alone, for stage 1: `as_text` for a terminal, `write_html` for a browser.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import groupby
from pathlib import Path

from eagle3 import __version__, charts, cli, files, outcome, pages, runs, sections, status
from eagle3.marked import Decode
from eagle3.prepared import Row
from eagle3.target import Target, check_same_target

GREEN, RESET = "\033[32;1m", "\033[0m"
SYMBOLS = {"done": "✓", "running": "▶", "failed": "✗", "killed": "✗", "broken": "✗", "stopped": "‖", "not begun": "○"}
PAGE = "report.html"


def spans(row: Row, decode: Decode) -> Iterator[tuple[bool, str]]:
    """The row's text in runs of one mask value, (supervised, text): a token alone may end in a character."""
    pairs = zip(row.loss_mask.tolist(), row.input_ids.tolist(), strict=True)
    for mask, run in groupby(pairs, key=lambda pair: pair[0]):
        yield bool(mask), decode([i for _, i in run])


def as_text(row: Row, decode: Decode, colour: bool | None = None) -> str:
    """The row with its supervised text green on a terminal, in [[ ]] elsewhere."""
    colour = cli.colours(sys.stdout) if colour is None else colour
    before, after = (GREEN, RESET) if colour else ("[[", "]]")
    text = "".join(f"{before}{text}{after}" if supervised else text for supervised, text in spans(row, decode))
    return f"{row.title}\n{text}"


def write_html(path: Path, summary: str, rows: Iterable[Row], decode: Decode) -> None:
    """A page with the summary and the rows, supervised text marked."""
    shown = [{"title": row.title, "spans": list(spans(row, decode))} for row in rows]
    pages.write(path, pages.render("prepared.html", summary=summary, rows=shown))


def open_run(folder: Path, model_path: Path | None, trust_remote_code: bool) -> sections.Run:
    """Find what the stages left. ValueError for no such folder, nothing in it, or a file that is broken."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    outputs = runs.find(folder)
    if not outputs:
        raise ValueError(f"{folder}: no stage has written anything here, or in the {runs.DEPTH} folders below")
    return sections.Run(folder, outputs, *_decoder(outputs, model_path, trust_remote_code))


def _decoder(outputs: list[runs.Output], model_path: Path | None, trust: bool) -> tuple[Decode | None, str]:
    """How ids become text, by the target named, else the one that the run names; or why that is not possible."""
    from eagle3 import tokenizer

    path = model_path or target_of(outputs)
    if path is None or not path.is_dir():
        return None, f"the target {path or ''} is not there (name it with --model-path)."
    target = Target.open(path)
    if model_path:
        _check_target(outputs, target)
    try:
        loaded = tokenizer.load_tokenizer(target, trust)
    except ValueError as error:
        return None, f"the tokenizer was not loaded: {error}."
    return tokenizer.decoder(loaded), ""


def _check_target(outputs: list[runs.Output], target: Target) -> None:
    for output in outputs:
        if output.stage == "prepare" and output.file.is_file():
            with runs.reading(output.file):
                check_same_target(target.fingerprint, output.content["target"], str(output.place))


def target_of(outputs: list[runs.Output]) -> Path | None:
    """The target's folder, as the exported draft or the evaluation names it."""
    for output in outputs:
        path = output.place / "draft" / "config.json"
        if output.stage == "train" and path.is_file():
            with runs.reading(path):
                return Path(files.read_json(path)["speculators_config"]["verifier"]["name_or_path"])
        if output.stage == "evaluate" and output.file.is_file():
            with runs.reading(output.file):
                return Path(output.content["target"])
    return None


def page(run: sections.Run) -> str:
    """The whole report. ValueError naming a file that is not as its stage writes it."""
    training, evaluation = sections.training(run), outcome.evaluation(run)
    target = target_of(run.outputs)
    return pages.render(
        "report.html",
        name=run.folder.resolve().name,
        folder=run.folder,
        target=target or "not named yet",
        lead=f"An EAGLE-3 draft for {target.name if target else 'a target that is not named yet'}",
        headline=evaluation.get("headline", []) + training.get("headline", []),
        stages=status.rows(run.folder),
        symbols=SYMBOLS,
        most_points=charts.MOST_POINTS,
        numbers={stage: f"{k:02}" for k, stage in enumerate(cli.STAGES)},
        data=sections.data(run),
        states=sections.states(run),
        training=training,
        sample=sections.sample(run),
        evaluation=evaluation,
        version=__version__,
        now=datetime.now().astimezone().strftime("%d %B %Y, %H:%M"),
    )


def parser() -> cli.Tool:
    p = cli.Tool("python -m eagle3.report", __doc__)
    p.add_argument("run", type=Path, metavar="RUN_DIR", help="the folder that the stages wrote to, such as out/demo")
    p.add_argument("--output", type=Path, metavar="FILE.html", help=f"where the page goes (default: RUN_DIR/{PAGE})")
    cli.add_model(p, required=False)
    return p


def check(args: argparse.Namespace) -> tuple[Path, str]:
    """Where the page goes, and the page: whatever is wrong with the files is found here."""
    output = args.output or args.run / PAGE
    files.check_file("--output", output)
    return output, page(open_run(args.run, args.model_path, args.trust_remote_code))


def work(plan: tuple[Path, str]) -> None:
    output, content = plan
    output.parent.mkdir(parents=True, exist_ok=True)
    pages.write(output, content)
    print(f"report: {output} ({len(content.encode()) / 1e3:,.0f} kB)")


if __name__ == "__main__":
    cli.run(parser(), check, work)
