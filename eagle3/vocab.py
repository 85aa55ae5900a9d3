"""The draft vocabulary: which target tokens the draft can propose, and the maps that vLLM reads."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3 import files, runs

FORMAT = "eagle3-draft-vocab/1"
FILE = "draft_vocab.json"


@dataclass(frozen=True)
class DraftVocab:
    """`ids`: ascending target ids of the draft's tokens, int64 [D]; None for the full vocabulary of V tokens."""

    target_size: int
    ids: np.ndarray | None = None

    @property
    def size(self) -> int:
        return self.target_size if self.ids is None else len(self.ids)

    @property
    def d2t(self) -> np.ndarray:
        """OFFSETS int64 [D]: the target id of draft id j is j + d2t[j]."""
        return np.zeros(self.size, np.int64) if self.ids is None else self.ids - np.arange(self.size)

    @property
    def t2d(self) -> np.ndarray:
        """bool [V]: whether a target id is in the draft vocabulary."""
        inside = np.zeros(self.target_size, bool)
        inside[self.ids if self.ids is not None else slice(None)] = True
        return inside

    @property
    def fingerprint(self) -> str:
        ids = "all" if self.ids is None else self.ids.tolist()
        return files.sha256_json({"target_size": self.target_size, "ids": ids})

    def save(self, folder: Path) -> None:
        """Write draft_vocab.json into `folder`."""
        ids = None if self.ids is None else self.ids.tolist()
        content: dict[str, Any] = {"format": FORMAT, "target_size": self.target_size, "size": self.size}
        files.write_json(folder / FILE, content | {"fingerprint": self.fingerprint, "ids": ids})

    @classmethod
    def load(cls, folder: Path) -> "DraftVocab":
        """Read draft_vocab.json; ValueError if it is missing, foreign or does not match its fingerprint."""
        if not (folder / FILE).is_file():
            raise ValueError(f"{folder / FILE}: missing; run 01_prepare_data.py again, it writes the file")
        content = files.read_json(folder / FILE)
        if content.get("format") != FORMAT:
            raise ValueError(f"{folder / FILE}: expected format {FORMAT!r}, found {content.get('format')!r}")
        with runs.reading(folder / FILE):
            ids = None if content["ids"] is None else np.asarray(content["ids"], np.int64)
            vocab, fingerprint = cls(content["target_size"], ids), content["fingerprint"]
        if vocab.fingerprint != fingerprint:
            raise ValueError(f"{folder / FILE}: does not match its own fingerprint; run 01_prepare_data.py again")
        return vocab

    def check_target(self, folder: Path, target_size: int, remedy: str) -> None:
        """ValueError naming the file in `folder` if it was made for a target of another number of tokens."""
        if self.target_size != target_size:
            raise ValueError(
                f"{folder / FILE}: made for a target of {self.target_size} tokens, this one has {target_size}; {remedy}"
            )


def choose(counts: np.ndarray, size: int, always: Iterable[int]) -> DraftVocab:
    """The `size` most frequent tokens of `counts` int64 [V], the ids of `always` (special, stop) among them.

    Ties go to the lower id. When fewer than `size` tokens were seen, the lowest unseen ids fill the rest, since a
    row of the head costs the same either way. `size` of V or more is the full vocabulary.
    """
    if size >= len(counts):
        return DraftVocab(len(counts))
    kept = sorted(set(always))
    if len(kept) > size:
        raise ValueError(f"--draft-vocab-size {size}: too small for the target's {len(kept)} special and stop tokens")
    weight = counts.astype(np.int64)
    weight[kept] = np.iinfo(np.int64).max
    ids = np.sort(np.argsort(-weight, kind="stable")[:size])
    return DraftVocab(len(counts), ids)


def coverage(vocab: DraftVocab, counts: np.ndarray) -> float:
    """The share of counted supervised tokens that lie inside the draft vocabulary, 0 to 1."""
    return float(counts[vocab.t2d].sum() / max(counts.sum(), 1))
