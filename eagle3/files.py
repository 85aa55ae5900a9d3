"""Files that are whole or absent: atomic writes, JSON, hashes."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from safetensors import safe_open

TEMPORARY_SUFFIX = ".tmp"
LOCK = ".lock"


def temporary_name(path: Path) -> Path:
    """The name under which this process writes `path` before renaming it: same folder, unique to the process."""
    return path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")


def publish(temporary: Path, path: Path) -> None:
    """Rename a written and fsynced temporary file to its final name, durably."""
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yields a temporary path to write; it becomes `path`, flushed to disk, only if the block ends without error."""
    temporary = temporary_name(path)
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(p for p in (folder.resolve(), *folder.resolve().parents) if p.exists())


def check_folder(flag: str, folder: Path) -> None:
    """ValueError naming the flag if the folder is not there, writable, and could not be made."""
    above = existing(folder)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{flag} {folder}: {above} is not a folder that this user can write to")


def check_file(flag: str, path: Path, inputs: Iterable[Path] = ()) -> None:
    """ValueError naming the flag if no file could be written at `path`, or if it is one of the inputs."""
    if path.is_dir():
        raise ValueError(f"{flag} {path}: is a folder; name a file")
    if path.resolve() in {p.resolve() for p in inputs}:
        raise ValueError(f"{flag} {path}: is an input of this very run; name another file")
    check_folder(flag, path.parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder for this process; ValueError if another run holds it. Clears leftover temporary files."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise ValueError(
                f"--output-dir {folder}: another run writes there (process {lock.read().strip()})"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        for leftover in leftovers(folder):
            print(f"removed {leftover.name}, left over from a run that was killed")
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        yield


def leftovers(folder: Path) -> list[Path]:
    """Temporary files in a folder; those of a run that was killed, while none holds the folder."""
    return sorted(folder.glob(f".*{TEMPORARY_SUFFIX}"))


def holder(folder: Path) -> str | None:
    """The process that holds the folder (see `locked`); None if it is free. Changes nothing."""
    try:
        with open(folder / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except OSError:
        return (folder / LOCK).read_text().strip()
    return None


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically, indented, keys in the order given."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a ValueError names the file when it holds something else."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def read_text(path: Path) -> str:
    """Read UTF-8, whatever the locale; a ValueError names the file when it holds something else."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from None


def check_entries(path: Path, content: dict[str, Any], expected: dict[str, type], writer: str) -> None:
    """ValueError naming the file if an entry is missing or of another type, so not as `writer` left it."""
    for key, kind in expected.items():
        if not isinstance(content.get(key), kind) or isinstance(content[key], bool):
            found = f"has {key!r}: {content[key]!r}" if key in content else f"has no {key!r}"
            raise ValueError(f"{path}: {found[:100]}, so it is not as {writer} wrote it")


def open_tensors(path: Path) -> "safe_open":
    """Open a safetensors file for torch, a context manager; a ValueError names the file when it is not whole."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}; copy or download it again") from None


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_json(content: Any) -> str:
    """The hash of a JSON value that does not depend on the order of its keys."""
    return sha256(json.dumps(content, sort_keys=True).encode())


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def first_difference(expected: Any, found: Any, path: str = "") -> str | None:
    """Names the first place where two JSON values differ, as `key.path: expected X, found Y`; None if equal."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in list(expected) + [k for k in found if k not in expected]:
            inner = first_difference(expected.get(key), found.get(key), f"{path}.{key}" if path else str(key))
            if inner:
                return inner
        return None
    return None if expected == found else f"{path}: expected {expected!r}, found {found!r}"
