"""Prepared samples for the eye: supervised tokens marked, on a terminal, in plain text, or in a browser."""

import html
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path

from eagle3 import files
from eagle3.prepared import Row

Decode = Callable[[list[int]], str]
GREEN, RESET = "\033[32;1m", "\033[0m"
PAGE = """<!doctype html><meta charset="utf-8"><title>Prepared data</title>
<style>body{{font:14px sans-serif;margin:2em auto;max-width:60em}}
pre{{white-space:pre-wrap;background:#f4f4f4;padding:1em}}
mark{{background:#b6e8b6}}</style>
<h1>Prepared data</h1><pre>{summary}</pre>
<p>The first samples. <mark>Supervised text</mark> is what the target itself generates.</p>
{samples}
"""


def spans(row: Row, decode: Decode) -> Iterator[tuple[bool, str]]:
    """The row's text in runs of one mask value, (supervised, text): a token alone may end in a character."""
    pairs = zip(row.loss_mask.tolist(), row.input_ids.tolist(), strict=True)
    for mask, run in groupby(pairs, key=lambda pair: pair[0]):
        yield bool(mask), decode([i for _, i in run])


def as_text(row: Row, decode: Decode, colour: bool | None = None) -> str:
    """The row with its supervised text green on a terminal, in [[ ]] elsewhere."""
    colour = sys.stdout.isatty() if colour is None else colour
    before, after = (GREEN, RESET) if colour else ("[[", "]]")
    text = "".join(f"{before}{text}{after}" if supervised else text for supervised, text in spans(row, decode))
    return f"{_title(row)}\n{text}"


def write_html(path: Path, summary: str, rows: Iterable[Row], decode: Decode) -> None:
    """A page with the summary and the rows, supervised text marked."""
    samples = "".join(f"<h3>{html.escape(_title(row))}</h3><pre>{_marked(row, decode)}</pre>\n" for row in rows)
    with files.atomic(path) as temporary:
        temporary.write_text(PAGE.format(summary=html.escape(summary), samples=samples), encoding="utf-8")


def _marked(row: Row, decode: Decode) -> str:
    parts = ((supervised, html.escape(text)) for supervised, text in spans(row, decode))
    return "".join(f"<mark>{text}</mark>" if supervised else text for supervised, text in parts)


def _title(row: Row) -> str:
    return f"{row.id}: {len(row.input_ids):,} tokens, {int(row.loss_mask.sum()):,} supervised"
