"""A draft that a training starts from: a folder in the layout of speculators, or of EAGLE (`midlayer.*`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from eagle3 import files, layers
from eagle3.draft import NORM_FLAGS, Draft
from eagle3.target import HEAD
from eagle3.vocab import DraftVocab

OPTIONAL = ("d2t", "t2d", "embed_tokens.weight")  # the embedding is always the target's


@dataclass(frozen=True)
class InitialDraft:
    """A draft on disk, trained on the outputs of `layer_ids`' first three."""

    folder: Path
    flags: dict[str, bool]
    """The `NORM_FLAGS` it was trained with."""

    @classmethod
    def open(cls, folder: Path, layer_ids: Sequence[int], num_layers: int) -> "InitialDraft":
        """ValueError if it is no draft, or read other layers of the target than the states at hand hold."""
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise ValueError(f"--init-from {folder}: has no {name}, so it is not a draft's folder")
        config = files.read_json(folder / "config.json")
        if (count := (config.get("transformer_layer_config") or config).get("num_hidden_layers", 1)) != 1:
            raise ValueError(f"--init-from {folder}: has {count} decoder layers; drafts of one layer are trained here")
        wanted, found = layers.draft_aux_ids(layer_ids), _aux_ids(config, num_layers)
        if found != wanted:
            raise ValueError(
                f"--init-from {folder}: was trained on the auxiliary ids {found}, these hidden states are those of "
                f"{wanted} (--layer-ids {' '.join(map(str, layer_ids))})"
            )
        with files.open_tensors(folder / "model.safetensors"):
            pass  # whole; what is in it is looked at when it is loaded
        # vLLM's defaults where the key is absent: true in the layout of speculators, false in the other
        defaults = {"norm_before_residual": "speculators_model_type" in config}
        found = defaults | config | (config.get("eagle_config") or {})
        return cls(folder, {flag: bool(found.get(flag)) for flag in NORM_FLAGS})

    def load_into(self, draft: Draft, vocab: DraftVocab) -> None:
        """Overwrite every weight of `draft` but its embedding. ValueError for a missing tensor or another size."""
        stored = load_file(self.folder / "model.safetensors")
        stored = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
        stored[HEAD] = _head_rows(self.folder, stored, vocab)
        weights = {name: p for name, p in draft.state_dict().items() if name not in OPTIONAL}
        if set(weights) != set(stored) - set(OPTIONAL):
            odd = sorted(set(weights) ^ (set(stored) - set(OPTIONAL)))
            raise ValueError(f"--init-from {self.folder}: its tensors are not those of this draft: {', '.join(odd)}")
        for name, weight in weights.items():
            if stored[name].shape != weight.shape:
                sizes = f"{list(stored[name].shape)}, this draft's {list(weight.shape)}"
                raise ValueError(f"--init-from {self.folder}: {name} is {sizes}")
            weight.copy_(stored[name])


def _aux_ids(config: dict[str, Any], num_layers: int) -> list[int]:
    key = "eagle_aux_hidden_state_layer_ids"
    found = config.get(key) or (config.get("eagle_config") or {}).get(key)
    return found or layers.draft_aux_ids(layers.eagle_layer_ids(num_layers))


def _head_rows(folder: Path, stored: dict[str, torch.Tensor], vocab: DraftVocab) -> torch.Tensor:
    """The initial head's rows for the draft vocabulary at hand."""
    head = stored[HEAD]
    ids = stored["d2t"].numpy() + np.arange(len(head)) if "d2t" in stored else None
    wanted = vocab.ids
    if ids is None and wanted is not None and len(head) == vocab.target_size:
        return head[torch.from_numpy(wanted)]
    if not np.array_equal(*(np.arange(vocab.target_size) if i is None else i for i in (ids, wanted))):
        raise ValueError(f"--init-from {folder}: its draft vocabulary is another one than the hidden states'")
    return head
