"""The prepared data: tokenized_data.jsonl (ids and loss mask), metadata.json and draft_vocab.json beside it.

A row is {"id": str, "input_ids": [int], "loss_mask": [0 or 1]}, the two lists of one length; 1 marks a token that
the target itself would generate. metadata.json holds the format, the target's fingerprint, the settings and the counts.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from eagle3 import files

FORMAT = "eagle3-prepared/1"
DATA, METADATA = "tokenized_data.jsonl", "metadata.json"


@dataclass(frozen=True)
class Row:
    """One sample: `input_ids` int32 [tokens], `loss_mask` uint8 [tokens]."""

    id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray

    @property
    def title(self) -> str:
        """Its id and sizes, for a person."""
        return f"{self.id}: {len(self.input_ids):,} tokens, {int(self.loss_mask.sum()):,} supervised"


def row_line(row_id: str, input_ids: list[int], loss_mask: list[int]) -> bytes:
    """One line of a tokenized_data.jsonl, its newline included; msgspec makes it in a twentieth of json's time."""
    assert len(input_ids) == len(loss_mask), row_id
    return msgspec.json.encode({"id": row_id, "input_ids": input_ids, "loss_mask": loss_mask}) + b"\n"


def write_row(file: IO[str], row: Row) -> None:
    """Append one row to an open tokenized_data.jsonl."""
    file.write(row_line(row.id, row.input_ids.tolist(), row.loss_mask.tolist()).decode())


def parse_row(line: str | bytes, where: str) -> Row:
    """One line as a Row; ValueError naming `where` and the fault for a line that is not a sound sample."""
    try:
        content = json.loads(line)
        row_id, ids, mask = content["id"], content["input_ids"], content["loss_mask"]
        row = Row(str(row_id), np.asarray(ids, np.int32), np.asarray(mask, np.uint8))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{where}: not a prepared row (id, input_ids, loss_mask): {error!r}") from None
    if row.input_ids.ndim != 1 or len(row.input_ids) == 0:
        raise ValueError(f"{where}: input_ids must be a non-empty list of token ids")
    if row.input_ids.min() < 0:
        raise ValueError(f"{where}: input_ids holds {row.input_ids.min()}, expected ids from 0")
    if row.loss_mask.shape != row.input_ids.shape:
        raise ValueError(f"{where}: has {len(row.input_ids)} input_ids but {row.loss_mask.size} loss_mask entries")
    if row.loss_mask.max() > 1:
        raise ValueError(f"{where}: loss_mask holds {row.loss_mask.max()}, expected only 0 and 1")
    return row


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a tokenized_data.jsonl in file order; ValueError names file and line of a bad one."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            yield parse_row(line, f"{path}:{number}")


def write_metadata(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write metadata.json; the last file of a preparation, so its presence means that the data is whole."""
    content = {"format": FORMAT, "data_sha256": files.sha256_file(folder / DATA), **settings}
    files.write_json(folder / METADATA, content)


def read_metadata(data: Path) -> dict[str, Any]:
    """The metadata beside a tokenized_data.jsonl. ValueError if the pair is missing, foreign or does not match."""
    if not data.is_file():
        raise ValueError(f"--prepared-data {data}: no such file (01_prepare_data.py writes it)")
    path = data.with_name(METADATA)
    if not path.is_file():
        raise ValueError(f"{path}: missing, so {data.name} is unfinished or not from 01_prepare_data.py; run it again")
    metadata = files.read_json(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT!r}, found {metadata.get('format')!r}")
    if missing := [key for key in ("data_sha256", "target") if key not in metadata]:
        raise ValueError(f"{path}: has no {missing[0]!r}, so it is not as 01_prepare_data.py wrote it; run it again")
    if metadata["data_sha256"] != (found := files.sha256_file(data)):
        raise ValueError(f"{data}: was changed after it was prepared (sha256 {found[:12]}..., see {path})")
    return metadata
