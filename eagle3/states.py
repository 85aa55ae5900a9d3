"""The folders that 02_extract_hidden_states.py writes, opened for training: shards, metadata.json, draft_vocab.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3 import files, layers, vocab
from eagle3.parts import Parts
from eagle3.shards import METADATA, ShardSet, load_vocab, parse_part, read_metadata, shard_name, shard_paths
from eagle3.target import Target, check_same_target
from eagle3.vocab import DraftVocab


@dataclass(frozen=True)
class HiddenStates:
    """Captured states that fit the target at hand, whole and of a known layer convention.

    `template_kwargs`: the settings of the chat template with which the data was prepared; `prepared`: its hash, None
    where 02 did not say; `parts`: which of its parts these are.
    """

    data: ShardSet
    vocab: DraftVocab
    template_kwargs: dict[str, Any]
    prepared: str | None
    parts: Parts

    @classmethod
    def open(cls, folder: Path, target: Target) -> "HiddenStates":
        """ValueError naming what is wrong when the folder is unfinished, foreign or of another target."""
        return cls.open_all([folder], target)

    @classmethod
    def open_all(cls, folders: Sequence[Path], target: Target) -> "HiddenStates":
        """Several parts of one set as one; ValueError also if they do not belong together."""
        found = {folder: _read_metadata(folder) for folder in folders}
        for folder, metadata in found.items():
            _check_shards(folder, metadata["num_shards"])
        parts = {folder: _part_of(metadata) for folder, metadata in found.items()}
        ordered = sorted(folders, key=lambda folder: parts[folder])
        metadata = found[ordered[0]]
        draft_vocab = _load_vocab(ordered[0], metadata)
        _check_together(ordered, found, parts)
        prepared = metadata["prepared"]
        states = cls(
            ShardSet(*ordered),
            draft_vocab,
            prepared.get("settings", {}).get("chat_template_kwargs", {}),
            metadata["settings"].get("data_sha256"),
            Parts([parts[folder][0] for folder in ordered], parts[ordered[0]][1]),
        )
        states._check(ordered[0], target, sum(m["num_samples"] for m in found.values()))
        return states

    @property
    def layer_ids(self) -> list[int]:
        return self.data.shared["layer_ids"]

    @property
    def identity(self) -> dict[str, Any]:
        """What all parts of a set have in common."""
        return {
            "target": self.data.shared["target"],
            "layer_ids": self.layer_ids,
            "storage_dtype": self.data.shared["storage_dtype"],
            "draft_vocab": self.vocab.fingerprint,
            "prepared_data": self.prepared,
            "parts": self.parts.total,
        }

    @property
    def part_identity(self) -> dict[str, Any]:
        """What two runs over the same parts have in common, and no others."""
        samples = {"ids": self.data.sample_ids, "lengths": self.data.lengths.tolist()}
        return {"numbers": self.parts.numbers, "samples": files.sha256_json(samples)}

    def _check(self, folder: Path, target: Target, num_samples: int) -> None:
        shared = self.data.shared
        for shard in self.data.shards:
            shard.check_tokens()
        if (convention := shared.get("layer_convention")) != layers.CONVENTION:
            raise ValueError(
                f"{folder}: its layers are counted by an unknown convention, {convention!r}; expected "
                f"{layers.CONVENTION!r}. Extract the states again with this version"
            )
        check_same_target(target.fingerprint, shared["target"], f"--hidden-states {folder}")
        layers.check_layer_ids(self.layer_ids, target.num_layers)
        if len(self.data) != num_samples:
            raise ValueError(f"{folder}: expected {num_samples} samples, the shards hold {len(self.data)}")
        remedy = "run 01_prepare_data.py and 02_extract_hidden_states.py again"
        self.vocab.check_target(folder, target.vocab_size, remedy)


def _read_metadata(folder: Path) -> dict[str, Any]:
    if not (folder / METADATA).is_file():
        raise ValueError(
            f"--hidden-states {folder}: has no {METADATA}; 02_extract_hidden_states.py writes such a folder"
        )
    return read_metadata(folder)


def _check_shards(folder: Path, expected: int) -> None:
    """ValueError if shards of the set are missing, or others lie among them."""
    names = {shard_name(index) for index in range(expected)}
    found = {path.name for path in shard_paths(folder)}
    if foreign := sorted(found - names):
        raise ValueError(
            f"--hidden-states {folder}: {foreign[0]} is not of this set, whose {METADATA} says {expected} shards "
            f"({len(found)} are there); remove what does not belong to it"
        )
    if found != names:
        raise ValueError(
            f"--hidden-states {folder}: unfinished, it has {len(found)} of {expected} shards; run "
            "02_extract_hidden_states.py again with the same flags, it goes on where it stopped"
        )


def _load_vocab(folder: Path, metadata: dict[str, Any]) -> DraftVocab:
    if not (folder / vocab.FILE).is_file():
        raise ValueError(
            f"--hidden-states {folder}: has no {vocab.FILE}; 02_extract_hidden_states.py copies it from beside the "
            "prepared data: run it again with the same flags, or copy the file"
        )
    return load_vocab(folder, metadata)


def _part_of(metadata: dict[str, Any]) -> tuple[int, int]:
    """(number, total) of 02's --part; (1, 1) of a whole set."""
    return parse_part(metadata["settings"].get("part") or "1/1")


def _check_together(
    folders: Sequence[Path], metadata: dict[Path, dict[str, Any]], parts: dict[Path, tuple[int, int]]
) -> None:
    """ValueError unless the folders are different parts of one set with one draft vocabulary."""
    first, *others = folders
    for folder in others:
        settings = {f: metadata[f]["settings"] | {"part": f"of {parts[f][1]}"} for f in (first, folder)}
        if difference := files.first_difference(settings[first], settings[folder]):
            raise ValueError(f"--hidden-states: {first} and {folder} are not parts of one set: {difference}")
        vocabularies = [_load_vocab(f, metadata[f]).fingerprint for f in (first, folder)]
        if vocabularies[0] != vocabularies[1]:
            raise ValueError(f"--hidden-states: {first} and {folder} have different draft vocabularies")
    if len({parts[folder] for folder in folders}) < len(folders):
        names = ", ".join(f"{number}/{total}" for number, total in parts.values())
        raise ValueError(f"--hidden-states: expected different parts of one set, found {names}")
