"""The prepared data: tokenized_data.jsonl (ids and loss mask), metadata.json and draft_vocab.json beside it.

A row is {"id": str, "input_ids": [int], "loss_mask": [0 or 1]}, the two lists of one length; 1 marks a token that
the target itself would generate. metadata.json holds the format, hashes of the two other files, the target's
fingerprint, the settings and the counts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec
import numpy as np

from eagle3 import files, vocab

FORMAT = "eagle3-prepared/2"
DATA, METADATA = "tokenized_data.jsonl", "metadata.json"
HASHED = {"data_sha256": DATA, "draft_vocab_sha256": vocab.FILE}  # an entry of the metadata for each file


class _Line(msgspec.Struct):
    """A line of the file as JSON: types are strict, so that no 1.5 is taken for a token."""

    id: Annotated[str, msgspec.Meta(min_length=1)]
    input_ids: list[int]
    loss_mask: list[int]


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
        found = msgspec.json.decode(line, type=_Line)
        row = Row(found.id, np.asarray(found.input_ids, np.int32), np.asarray(found.loss_mask, np.uint8))
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{where}: not a prepared row (id, input_ids, loss_mask): {error}") from None
    if len(row.input_ids) == 0:
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
    hashes = {key: files.sha256_file(folder / name) for key, name in HASHED.items()}
    files.write_json(folder / METADATA, {"format": FORMAT, **hashes, **settings})


def read_metadata(data: Path) -> dict[str, Any]:
    """The metadata beside a tokenized_data.jsonl. ValueError if the pair is missing, foreign or does not match."""
    if data.is_dir():
        raise ValueError(f"--prepared-data {data}: is a folder; name its {DATA}")
    if not data.is_file():
        raise ValueError(f"--prepared-data {data}: no such file (01_prepare_data.py writes it)")
    path = data.with_name(METADATA)
    if not path.is_file():
        raise ValueError(f"{path}: missing, so {data.name} is unfinished or not from 01_prepare_data.py; run it again")
    metadata = files.read_json(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT!r}, found {metadata.get('format')!r}")
    try:
        expected = {"target": dict, "settings": dict, **dict.fromkeys(HASHED, str)}
        files.check_entries(path, {"settings": {}} | metadata, expected, "01_prepare_data.py")
    except ValueError as error:
        raise ValueError(f"{error}; run it again with --overwrite") from None
    for key, file in {"data_sha256": data, "draft_vocab_sha256": data.with_name(vocab.FILE)}.items():
        if not file.is_file():
            raise ValueError(f"{file}: missing; run 01_prepare_data.py again with --overwrite, it writes the file")
        if metadata[key] != (found := files.sha256_file(file)):
            raise ValueError(
                f"{file}: was changed after it was prepared (sha256 {found[:12]}..., see {path}); run "
                "01_prepare_data.py again with --overwrite"
            )
    return metadata
