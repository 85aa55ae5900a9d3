"""The draft as vLLM serves it: config.json and model.safetensors in the layout of speculators.

The embedding is written bit for bit as the target has it, and vLLM, seeing them equal, serves both from one copy. vLLM
could do without it, but speculators 0.9.0 computes with uninitialised memory where it is absent (it looks for NaN to
tell that it was not loaded).
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3 import files, layers
from eagle3.checkpoint import flush_folder
from eagle3.draft import NORM_FLAGS, Draft, DraftConfig
from eagle3.exported import TARGET_FINGERPRINT, check_export
from eagle3.shards import dtype_name
from eagle3.target import EMBEDDING, Target
from eagle3.vocab import DraftVocab

SPECULATORS_VERSION = "0.9.0"  # whose layout this is
TEMPLATE_KWARGS = "chat_template_kwargs"  # our own key of config.json; vLLM and speculators pass over it


def export(
    folder: Path,
    draft: Draft,
    target: Target,
    vocab: DraftVocab,
    layer_ids: Sequence[int],
    num_speculative_tokens: int,
    template_kwargs: dict[str, Any] | None = None,
    *,
    publish: bool = True,
) -> str | None:
    """Write the draft as `folder`, in place of what was there; the folder is whole as soon as it has its name.

    Before it gets that name it is read back (see `exported.check_export`): RuntimeError if it would not be served, and
    then what was there stays. Returns what could not be checked. `template_kwargs`: the settings of the chat template
    with which its data was made, for stage 4 to compare. `publish` False writes and checks only, and leaves nothing.
    """
    temporary = files.temporary_name(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    dtype = target_dtype(target)
    content = config(draft.config, target, layer_ids, num_speculative_tokens, dtype)
    if template_kwargs is not None:
        content[TEMPLATE_KWARGS] = template_kwargs
    files.write_json(temporary / "config.json", content)
    save_file(tensors(draft, vocab, dtype), temporary / "model.safetensors", {"format": "pt"})
    flush_folder(temporary)
    unchecked = check_export(temporary)
    if publish:
        _replace(folder, temporary)
    shutil.rmtree(temporary, ignore_errors=True)
    return unchecked


def _replace(folder: Path, temporary: Path) -> None:
    replaced = folder.with_name(f".{folder.name}.replaced{files.TEMPORARY_SUFFIX}")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.replace(folder, replaced)  # a server that has its files mapped keeps them
    files.publish(temporary, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def tensors(draft: Draft, vocab: DraftVocab, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What the file holds: weights in `dtype`, the embedding as it is; d2t int64 [D], t2d bool [V] if reduced."""
    weights = {
        name: weight.to("cpu", weight.dtype if name == EMBEDDING else dtype).contiguous()
        for name, weight in draft.state_dict().items()
    }
    if vocab.ids is None:
        return weights
    return weights | {"d2t": torch.from_numpy(vocab.d2t), "t2d": torch.from_numpy(vocab.t2d)}


def config(
    draft: DraftConfig, target: Target, layer_ids: Sequence[int], num_speculative_tokens: int, dtype: torch.dtype
) -> dict[str, Any]:
    """config.json, with every flag written out: speculators and vLLM have different defaults."""
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": draft.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": layers.draft_aux_ids(layer_ids),
        **{flag: getattr(draft, flag) for flag in NORM_FLAGS},
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        TARGET_FINGERPRINT: target.fingerprint,
        "dtype": dtype_name(dtype),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": target.architectures, "name_or_path": str(target.path.resolve())},
        },
        "transformer_layer_config": transformer_layer_config(draft, dtype),
    }


def transformer_layer_config(draft: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The decoder layer in the terms of a Llama config, rope in Transformers' new and old schema."""
    scaling = {k: v for k, v in draft.rope.items() if k != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": draft.num_heads,
        "num_key_value_heads": draft.num_kv_heads,
        "head_dim": draft.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": draft.norm_eps,
        "max_position_embeddings": draft.max_positions,
        "vocab_size": draft.target_vocab_size,
        "rope_parameters": dict(draft.rope),
        "rope_theta": draft.rope["rope_theta"],
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "tie_word_embeddings": False,
        "dtype": dtype_name(dtype),
    }


def target_dtype(target: Target) -> torch.dtype:
    """The dtype in which the target computes, so that the draft is served in it."""
    name = target.text.get("dtype") or target.text.get("torch_dtype") or target.config.get("dtype")
    name = name or target.config.get("torch_dtype") or "bfloat16"
    return getattr(torch, name.removeprefix("torch."))
