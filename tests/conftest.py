"""Fixtures that the tests share. Tiny targets are built once and kept under data/cache, keyed by what makes them."""

import fcntl
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from data import make_tiny_kimi, make_tiny_llama
from data.common import CACHE, DATA

SOURCES = [
    *(DATA / name for name in ("common.py", "tiny_corpus.txt", "make_tiny_kimi.py", "make_tiny_llama.py")),
    *sorted((DATA / "tiny_kimi").glob("*.*")),
]


def built_once(name: str, build: Callable[[Path], object]) -> Path:
    """The folder that `build` writes, kept between runs until one of SOURCES changes; safe for concurrent runs."""
    key = hashlib.sha256(b"\0".join(path.read_bytes() for path in SOURCES)).hexdigest()[:12]
    folder = CACHE / "tests" / f"{name}-{key}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            build(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_kimi() -> Path:
    """A 61-layer tiny Kimi-K2.5 (read only)."""
    return built_once("tiny_kimi", make_tiny_kimi.make_tiny_kimi)


@pytest.fixture(scope="session")
def tiny_kimi_int4() -> Path:
    """The tiny Kimi-K2.5 of the same numbers with INT4 experts (read only)."""
    return built_once("tiny_kimi_int4", lambda folder: make_tiny_kimi.make_tiny_kimi(folder, int4=True))


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """A 6-layer tiny Llama (read only)."""
    return built_once("tiny_llama", make_tiny_llama.make_tiny_llama)


@pytest.fixture(scope="session")
def finished_run(tiny_llama, tmp_path_factory) -> Path:
    """The folder of a run on the tiny Llama, from 01 to 04 (read only)."""
    from tests.run_folder import write_run

    return write_run(tmp_path_factory.mktemp("finished") / "run", tiny_llama)
