"""The rows of input files as they stand, one at a time, so that a file of any size takes little memory.

A file is JSON lines, a JSON array or Parquet (the first two also as .gz or .zst), or a folder that `datasets` saved.
"""

import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import zstandard

from eagle3 import files

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
FORMS = "JSON lines (an object a line), a JSON array, Parquet, or a folder that `datasets` saved"
BETWEEN_ELEMENTS = re.compile(r"[\s,]*")
FOLDER_INFO = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


@dataclass(frozen=True)
class Raw:
    """One row as it stands in a file: an undecoded JSON line or a decoded object, and its file and line number.

    `read`: the share of the file that has been read with it, 0 to 1.
    """

    file: str
    line: int
    content: bytes | dict[str, Any] = field(repr=False)
    read: float = 0.0

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def expand(patterns: Iterable[Path | str], flag: str = "--input") -> list[Path]:
    """The input files that paths, globs and folders name, in order. ValueError for one that names nothing."""
    found: list[Path] = []
    for pattern in map(str, patterns):
        path = Path(pattern)
        if path.is_dir():
            inside = [path] if _is_saved_dataset(path) else _folder_files(path)
        else:
            inside = [path] if path.is_file() else [Path(p) for p in sorted(glob.glob(pattern, recursive=True))]
        if not inside:
            raise ValueError(f"{flag} {pattern}: no such file, or a folder without {', '.join(SUFFIXES)} files")
        found += [p for p in inside if p not in found]
    return found


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _folder_files(folder: Path) -> list[Path]:
    readable = (p for p in folder.rglob("*") if _suffix(p) in SUFFIXES and p.name not in FOLDER_INFO)
    return sorted(p for p in readable if not any(part.startswith(".") for part in p.relative_to(folder).parts))


def _suffix(path: Path) -> str:
    """The suffix that names the format: `.jsonl` of `a.jsonl.gz`."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in (".gz", ".zst") else path.suffix.lower()


def input_hash(path: Path) -> str:
    """A hash of an input file, or of all files of a dataset folder."""
    if path.is_file():
        return files.sha256_file(path)
    return files.sha256_json({str(p.relative_to(path)): files.sha256_file(p) for p in path.rglob("*") if p.is_file()})


def read_raw(path: Path) -> Iterator[Raw]:
    """The rows of one input file in order, one at a time. ValueError naming the file if it is not what it says."""
    reader = _dataset_rows if path.is_dir() else _parquet_rows if _suffix(path) == ".parquet" else _json_rows
    try:
        for number, (content, read) in enumerate(reader(path), 1):
            if not isinstance(content, bytes) or content.strip():
                yield Raw(path.name, number, content, read)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"{path}: cannot be read to its end: {error!r}") from error


def _open(path: Path, file: IO[bytes]) -> IO[bytes]:
    """The open file, through its decompressor where the name says so."""
    if path.suffix.lower() == ".gz":
        return gzip.open(file, "rb")
    if path.suffix.lower() == ".zst":
        return io.BufferedReader(
            zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)
        )
    return file


def _json_rows(path: Path) -> Iterator[tuple[bytes | dict[str, Any], float]]:
    """Lines, or the elements of an array when the first character is `[`."""
    size = max(path.stat().st_size, 1)
    with open(path, "rb") as file:
        head = b""
        stream = _open(path, file)
        while not head.strip() and (more := stream.read(4096)):
            head = more
        file.seek(0)
        stream = _open(path, file)
        head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
        is_array = head.startswith(b"[")
        _check_form(path, head)
        for row in _array_rows(path, stream) if is_array else stream:
            yield row, min(file.tell() / size, 1.0)


def _check_form(path: Path, head: bytes) -> None:
    """ValueError for a file of another form, by its beginning: else each of its lines would be a row of broken JSON."""
    first = head.split(b"\n", 1)[0].strip()
    if first == b"{":
        raise ValueError(
            f"{path}: one JSON object over several lines; expected {FORMS}: write it on one line, or in [ ]"
        )
    if first[:1] not in (b"", b"{", b"[") and _suffix(path) not in SUFFIXES:
        raise ValueError(f"{path}: begins with {first[:40]!r}, which is no JSON; expected {FORMS}")


def _array_rows(path: Path, file: IO[bytes], chunk: int = 1 << 20) -> Iterator[dict[str, Any]]:
    """The elements of a JSON array, decoded one at a time so that a large file takes little memory."""
    text, scan = io.TextIOWrapper(file, encoding="utf-8-sig"), json.JSONDecoder().raw_decode
    buffer, at = "", 0
    while not (buffer := buffer.lstrip()):
        buffer = text.read(chunk)
    assert buffer[0] == "[", path
    buffer = buffer[1:]
    while not buffer.startswith("]", at := BETWEEN_ELEMENTS.match(buffer, at).end()):
        try:
            element, end = scan(buffer, at)
        except ValueError:
            end = len(buffer)
        if end < len(buffer):  # at the end of the buffer a number might go on
            yield element
            at = end
        elif more := text.read(max(chunk, len(buffer) - at)):
            buffer, at = buffer[at:] + more, 0
        else:
            raise ValueError(f"{path}: the JSON array is broken near its element {buffer[at : at + 40]!r}")


def _parquet_rows(path: Path) -> Iterator[tuple[dict[str, Any], float]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file, done = pyarrow.parquet.ParquetFile(path), 0
        for batch in file.iter_batches(batch_size=256):
            done += len(batch)
            yield from ((_without_nulls(row), done / file.metadata.num_rows) for row in batch.to_pylist())
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: cannot be read as Parquet: {error}") from None


def _dataset_rows(folder: Path) -> Iterator[tuple[dict[str, Any], float]]:
    from datasets import DatasetDict, load_from_disk

    dataset = load_from_disk(str(folder))
    if isinstance(dataset, DatasetDict):
        if "train" not in dataset and len(dataset) != 1:
            raise ValueError(f"{folder}: has the splits {', '.join(dataset)}: name one of their folders")
        dataset = dataset["train"] if "train" in dataset else next(iter(dataset.values()))
    yield from ((_without_nulls(row), n / len(dataset)) for n, row in enumerate(dataset, 1))


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct of a column all keys, null where a row had none: take those out again."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value
