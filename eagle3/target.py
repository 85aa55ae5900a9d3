"""The target's folder, read without loading the model or running its code: config, fingerprint, a few weights."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3 import files

if TYPE_CHECKING:
    import torch

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "tokenization_*.py", "tool_declaration_ts.py",
)  # fmt: skip
VOLATILE_CONFIG = ("_name_or_path", "transformers_version")  # differ between copies of the same target
EMBEDDING, FINAL_NORM, HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"
PREFIXES = ("model.", "language_model.model.")  # of a plain causal LM, and inside Kimi's wrapper


@dataclass(frozen=True)
class Target:
    """A target on disk. `config` is its whole config.json, `text` the part that describes the language model."""

    path: Path
    config: dict[str, Any]
    text: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> "Target":
        """Read the folder's config.json. ValueError if it is no folder of a model."""
        path = Path(path)
        if not path.is_dir():
            raise ValueError(f"--model-path {path}: no such folder (give a local folder with config.json)")
        if not (path / "config.json").is_file():
            raise ValueError(f"--model-path {path}: has no config.json, so it is not a model's folder")
        config = files.read_json(path / "config.json")
        target = cls(path, config, config.get("text_config") or config)
        for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
            target._count(key)
        return target

    @property
    def num_layers(self) -> int:
        return self._count("num_hidden_layers")

    @property
    def hidden_size(self) -> int:
        return self._count("hidden_size")

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: at least the number of tokens that the tokenizer knows."""
        return self._count("vocab_size")

    @property
    def num_heads(self) -> int:
        return self._count("num_attention_heads")

    @property
    def max_positions(self) -> int:
        return self._count("max_position_embeddings")

    def _count(self, key: str) -> int:
        """A number of the language model's config. ValueError if it is not there, or is none."""
        value = self.text.get(key) if isinstance(self.text, dict) else None
        if type(value) is not int or value < 1:
            found = "has no" if value is None else f"expected a number from 1, found {value!r} as"
            raise ValueError(f"{self.path}/config.json: {found} {key!r}, so it is not a language model's")
        return value

    @property
    def norm_eps(self) -> float:
        return self.text["rms_norm_eps"]

    @property
    def architectures(self) -> list[str]:
        found = self.config.get("architectures") or []
        if not isinstance(found, list):
            raise ValueError(f"{self.path}/config.json: expected a list of architectures, found {found!r}")
        return found

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        path = self.path / "tokenizer_config.json"
        return files.read_json(path) if path.is_file() else {}

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja source of the chat template, from its own file or the tokenizer's config; None if there is none."""
        own = self.path / "chat_template.jinja"
        if own.is_file():
            return files.read_text(own)
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several named templates
            named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
            template = named[0].get("template") if named else None
        if template is not None and not isinstance(template, str):
            raise ValueError(f"{self.path}/tokenizer_config.json: its chat_template is no text: {template!r}"[:200])
        return template

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """What every stage compares: hashes of the config, tokenizer, chat template and weights, and the class name.

        `weights` hashes each weight file's name and size and the final norm's values: cheap, and different for
        two trainings of one architecture.
        """
        config = {k: v for k, v in self.config.items() if k not in VOLATILE_CONFIG}
        return {
            "config": files.sha256_json(config),
            "tokenizer_class": str(self.tokenizer_config.get("tokenizer_class", "unknown")),
            "tokenizer": files.sha256_json({p.name: files.sha256_file(p) for p in self.tokenizer_files}),
            "chat_template": files.sha256((self.chat_template or "").encode()),
            "weights": self._weights_hash(),
        }

    @property
    def tokenizer_files(self) -> list[Path]:
        return sorted({p for pattern in TOKENIZER_FILES for p in self.path.glob(pattern)})

    def _weights_hash(self) -> str:
        weight_files = sorted(self.path.glob("*.safetensors"))
        sizes = {p.name: p.stat().st_size for p in weight_files}
        norm = self.load(FINAL_NORM).float().numpy().tobytes() if weight_files else b""
        return files.sha256(json.dumps(sizes).encode() + norm)

    @cached_property
    def weight_files(self) -> dict[str, Path]:
        """Which file holds each tensor. ValueError if the folder has no safetensors weights."""
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            found = files.read_json(index).get("weight_map")
            if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
                raise ValueError(f"{index}: has no weight_map from tensors to files; copy or download it again")
            return {name: self.path / file for name, file in found.items()}
        single = self.path / "model.safetensors"
        if not single.is_file():
            raise ValueError(f"{self.path}: has neither model.safetensors nor model.safetensors.index.json")
        with files.open_tensors(single) as file:
            return dict.fromkeys(file.keys(), single)

    def check_weights(self) -> None:
        """ValueError naming a weight file that is missing or not whole; only the headers are read.

        A folder without any safetensors passes: a rehearsal needs none.
        """
        stored = any(self.path.glob("*.safetensors*"))
        for path in sorted(set(self.weight_files.values())) if stored else ():
            if not path.is_file():
                raise ValueError(f"{path}: missing, though the index names it; copy or download it again")
            with files.open_tensors(path):
                pass

    def load(self, name: str) -> "torch.Tensor":
        """One of EMBEDDING [V, H], FINAL_NORM [H], HEAD [V, H], found by its exact name, in its stored dtype.

        A tied head is the embedding. ValueError if the tensor is not there under exactly one name.
        """
        if name == HEAD and self.text.get("tie_word_embeddings", self.config.get("tie_word_embeddings", False)):
            name = EMBEDDING
        stems = ("", "language_model.") if name == HEAD else PREFIXES
        found = [stem + name for stem in stems if stem + name in self.weight_files]
        if len(found) != 1:
            wanted = " or ".join(stem + name for stem in stems)
            raise ValueError(f"{self.path}: expected one tensor named {wanted}, found {len(found)}")
        path = self.weight_files[found[0]]
        with files.open_tensors(path) as file:
            if found[0] not in file.keys():  # noqa: SIM118
                raise ValueError(f"{path}: does not hold {found[0]}, though the index says so; download it again")
            return file.get_tensor(found[0])


def check_same_target(expected: dict[str, str], found: dict[str, str], where: str) -> None:
    """ValueError naming all that differs when `where` was made with another target than the one at hand."""
    names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if names:
        parts = [f"{name} (expected {_short(expected.get(name))}, found {_short(found.get(name))})" for name in names]
        raise ValueError(f"{where} was made with another target: its {' and '.join(parts)}")


def _short(value: Any) -> Any:
    """The beginning of a hash; a name as it is."""
    return value[:12] if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else value
