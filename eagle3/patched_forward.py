"""Capture route 2: DeepseekV2's forward with its auxiliary states returned, for a vLLM whose own lacks them (0.16).

The wrappers around the model (DeepseekV3ForCausalLM, KimiK25ForConditionalGeneration) hand on what its forward
returns, and the model runner takes (hidden_states, auxiliary states) as it does from vLLM's own EAGLE-3 models.
"""

import inspect
from collections.abc import Collection
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

FORWARD = ["input_ids", "positions", "intermediate_tensors", "inputs_embeds"]
LAYER_CALL = ["positions", "hidden_states", "residual", "llama_4_scaling"]


def misfits(decoder: Any) -> list[str]:
    """Why this decoder's forward can't be replaced by ours; empty if it can. Judged by signatures, not by version."""
    found = []
    if not hasattr(decoder.config, "scoring_func"):
        found.append(f"{type(decoder).__name__} is not of the DeepseekV2 family (its config has no scoring_func)")
    for name, function, expected in (
        ("forward", type(decoder).forward, ["self", *FORWARD]),
        ("layer", decoder.layers[0].forward, LAYER_CALL),
    ):
        if (given := list(inspect.signature(function).parameters)) != expected:
            found.append(f"its {name} takes ({', '.join(given)}), expected ({', '.join(expected)})")
    if not hasattr(decoder, "embed_input_ids"):
        found.append("it has no embed_input_ids")
    return found


def llama_4_scaling(config: Any, positions: "Tensor") -> "Tensor | None":
    """1 + beta * ln(1 + floor(position / original_max_position_embeddings)), [tokens, 1, 1]; None where the config
    has no llama_4_scaling. What DeepseekV2Model.forward computes once for all its layers."""
    scaling = getattr(config, "llama_4_scaling", None)
    if scaling is None:
        return None
    periods = torch.floor(positions / scaling["original_max_position_embeddings"])
    return (1 + scaling["beta"] * torch.log(1 + periods))[..., None, None]


def patch(decoder: Any, aux_ids: Collection[int]) -> None:
    """Make the decoder's forward return (hidden_states [tokens, H], [the input of layer k for k in aux_ids, ascending])
    instead of hidden_states alone; k = number of layers is the last layer's output before the final norm."""
    wanted = frozenset(aux_ids)

    def forward(
        self: Any,
        input_ids: "Tensor | None",
        positions: "Tensor",
        intermediate_tensors: Any,
        inputs_embeds: "Tensor | None" = None,
    ) -> "tuple[Tensor, list[Tensor]]":
        assert intermediate_tensors is None, "states of earlier pipeline stages would be lost"
        hidden_states = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        residual, captured = None, []
        scaling = llama_4_scaling(self.config, positions)
        for layer_id, layer in enumerate(self.layers, 1):
            hidden_states, residual = layer(positions, hidden_states, residual, scaling)
            if layer_id in wanted:
                captured.append(hidden_states + residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states, captured

    decoder.forward = MethodType(forward, decoder)
