"""The drafts that an evaluation measures, checked against the target before anything loads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from eagle3 import files
from eagle3.export import TEMPLATE_KWARGS
from eagle3.exported import TARGET_FINGERPRINT, check_target
from eagle3.target import Target

FILES = ("config.json", "model.safetensors")
NEEDED = (
    ("speculators_config", "verifier", "name_or_path"),
    ("speculators_config", "proposal_methods", 0, "speculative_tokens"),
    ("transformer_layer_config", "hidden_size"),
    ("transformer_layer_config", "vocab_size"),
)  # entries of config.json


@dataclass(frozen=True)
class DraftFolder:
    """An exported draft on disk."""

    folder: Path
    config: dict[str, Any]

    @property
    def verifier(self) -> dict[str, Any]:
        return self.config["speculators_config"]["verifier"]

    @property
    def num_speculative_tokens(self) -> int:
        """How many tokens it drafts by itself."""
        return self.config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]

    @property
    def target_path_if_there(self) -> Path | None:
        """The folder of the target that it was trained for, if it is on this machine."""
        path = Path(self.verifier["name_or_path"] or "")
        return path if (path / "config.json").is_file() else None

    @property
    def target_path(self) -> Path:
        """The same; ValueError if it is not there."""
        if self.target_path_if_there is None:
            raise ValueError(
                f"--draft {self.folder}: its target {self.verifier['name_or_path']} is not there; name it with "
                "--model-path"
            )
        return self.target_path_if_there

    @cached_property
    def sha256(self) -> dict[str, str]:
        return {name: files.sha256_file(self.folder / name) for name in FILES}

    @property
    def trained_steps(self) -> int | None:
        """The steps of training-time test that its training left in settings.json; None if that is not beside it."""
        settings = self.folder.parent / "settings.json"
        content = files.read_json(settings) if settings.is_file() else {}
        return content.get("settings", {}).get("ttt_steps")


def open_draft(folder: Path) -> DraftFolder:
    """The draft in a folder. ValueError if it is not an exported draft."""
    for name in FILES:
        if not (folder / name).is_file():
            raise ValueError(f"--draft {folder}: has no {name}; give the `draft` folder that 03_train_draft.py wrote")
    config = files.read_json(folder / "config.json")
    if (found := config.get("speculators_model_type")) != "eagle3":
        raise ValueError(f"--draft {folder}: expected speculators_model_type 'eagle3', found {found!r}")
    for keys in NEEDED:
        try:
            reduce(getitem, keys, config)
        except (LookupError, TypeError):
            name = ".".join(map(str, keys))
            raise ValueError(f"--draft {folder}: its config.json has no {name}; export it again with stage 3") from None
    with files.open_tensors(folder / "model.safetensors"):
        return DraftFolder(folder, config)


def check_different(drafts: Sequence[DraftFolder]) -> None:
    """ValueError if two folders hold one draft."""
    if len(drafts) < 2:
        return
    seen: dict[tuple[str, ...], Path] = {}
    for draft in drafts:
        first = seen.setdefault(tuple(draft.sha256.values()), draft.folder)
        if first is not draft.folder:
            raise ValueError(f"--draft {draft.folder}: is the same draft as {first}; there is nothing to compare")


def check_fit(draft: DraftFolder, target: Target) -> None:
    """ValueError if the draft was made for another target."""
    layer, where = draft.config["transformer_layer_config"], f"--draft {draft.folder}"
    for key, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if layer[key] != expected:
            raise ValueError(f"{where}: its {key} is {layer[key]}, the target's is {expected}")
    architectures = draft.verifier.get("architectures")
    if architectures and architectures != target.architectures:
        raise ValueError(f"{where}: was trained for a {architectures[0]}, the target is {target.architectures}")
    last = max(draft.config.get("eagle_aux_hidden_state_layer_ids") or [0])
    if last > target.num_layers:
        raise ValueError(f"{where}: reads the states before layer {last}, the target has {target.num_layers} layers")
    check_target(draft.config, target, where)


def warn(draft: DraftFolder, target: Target, template_kwargs: dict[str, Any], numbers: Sequence[int]) -> None:
    """Say what may explain a low acceptance: another mode, a target of another name, more tokens than trained."""
    trained = draft.config.get(TEMPLATE_KWARGS)
    if trained not in (None, template_kwargs):
        print(
            f"WARNING: the draft was trained with --chat-template-kwargs {json.dumps(trained)}, "
            f"not {json.dumps(template_kwargs)}"
        )
    name = Path(draft.verifier["name_or_path"] or "").name
    if TARGET_FINGERPRINT not in draft.config and name not in ("", target.path.resolve().name):
        print(f"WARNING: --draft {draft.folder} was trained for a target called {name!r}, not {target.path}")
    steps = draft.trained_steps
    if steps is not None and any(n > steps for n in numbers):
        print(
            f"WARNING: --draft {draft.folder} was trained with {steps} steps of training-time test: tokens after the "
            f"{steps}th are drafted from states that it has not seen"
        )
