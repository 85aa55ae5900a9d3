"""The folder that 02_extract_hidden_states.py writes, opened for training: shards, metadata.json, draft_vocab.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3 import files, layers
from eagle3.shards import FORMAT, METADATA, ShardSet, shard_paths
from eagle3.target import Target, check_same_target
from eagle3.vocab import DraftVocab


@dataclass(frozen=True)
class HiddenStates:
    """Captured states that fit the target at hand, whole and of a known layer convention.

    `template_kwargs`: the settings of the chat template with which the data was prepared.
    """

    data: ShardSet
    vocab: DraftVocab
    template_kwargs: dict[str, Any]

    @classmethod
    def open(cls, folder: Path, target: Target) -> "HiddenStates":
        """ValueError naming what is wrong when the folder is unfinished, foreign or of another target."""
        metadata = _read_metadata(folder)
        found = len(shard_paths(folder))
        if found != metadata["num_shards"]:
            raise ValueError(
                f"--hidden-states {folder}: unfinished, it has {found} of {metadata['num_shards']} shards; run "
                "02_extract_hidden_states.py again with the same flags, it goes on where it stopped"
            )
        template_kwargs = metadata["prepared"].get("settings", {}).get("chat_template_kwargs", {})
        states = cls(ShardSet(folder), DraftVocab.load(folder), template_kwargs)
        states._check(folder, target, metadata)
        return states

    @property
    def layer_ids(self) -> list[int]:
        return self.data.shared["layer_ids"]

    @property
    def identity(self) -> dict[str, Any]:
        """What two runs on the same data have in common, and no others."""
        samples = {"ids": self.data.sample_ids, "lengths": self.data.lengths.tolist()}
        return {
            "target": self.data.shared["target"],
            "layer_ids": self.layer_ids,
            "storage_dtype": self.data.shared["storage_dtype"],
            "draft_vocab": self.vocab.fingerprint,
            "samples": files.sha256_json(samples),
        }

    def _check(self, folder: Path, target: Target, metadata: dict[str, Any]) -> None:
        shared = self.data.shared
        if (convention := shared.get("layer_convention")) != layers.CONVENTION:
            raise ValueError(
                f"{folder}: its layers are counted by an unknown convention, {convention!r}; expected "
                f"{layers.CONVENTION!r}. Extract the states again with this version"
            )
        check_same_target(target.fingerprint, shared["target"], f"--hidden-states {folder}")
        layers.check_layer_ids(self.layer_ids, target.num_layers)
        if len(self.data) != metadata["num_samples"]:
            raise ValueError(f"{folder}: expected {metadata['num_samples']} samples, the shards hold {len(self.data)}")
        if self.vocab.target_size != target.vocab_size:
            raise ValueError(
                f"{folder}/draft_vocab.json: made for a target of {self.vocab.target_size} tokens, this one has "
                f"{target.vocab_size}; run 01_prepare_data.py and 02_extract_hidden_states.py again"
            )


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    if not path.is_file():
        raise ValueError(
            f"--hidden-states {folder}: has no {METADATA}; 02_extract_hidden_states.py writes such a folder"
        )
    metadata = files.read_json(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT!r}, found {metadata.get('format')!r}")
    return metadata
