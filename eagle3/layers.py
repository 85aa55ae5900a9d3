"""Which layer is "layer k": the one convention of this project, and its translation for vLLM.

`--layer-ids 2 30 58 60` are the OUTPUTS of the 0-based decoder layers: o(k) = hidden + residual after layer k, so
o(n-1) of an n-layer target is the stream before its final norm. vLLM's auxiliary id k is the stream BEFORE layer
k, so o(k) is vLLM's k + 1. The last id feeds the teacher's head; the ids before it feed the draft.
"""

from collections.abc import Sequence

CONVENTION = "output of 0-based decoder layer, hidden + residual, before the final norm"
NUM_DRAFT_LAYERS = 3


def eagle_layer_ids(num_layers: int) -> list[int]:
    """The preset of EAGLE, SpecForge, TorchSpec and vLLM's default: o(1), o(n//2 - 1), o(n-4), and the last layer.

    vLLM's default auxiliary ids are (2, n//2, n-3), each one more than ours. ValueError below 8 layers, where two of
    these are one.
    """
    ids = [1, num_layers // 2 - 1, num_layers - 4, num_layers - 1]
    if len(set(ids)) < len(ids) or ids != sorted(ids) or ids[0] < 0:
        raise ValueError(f"--layer-ids: a target of {num_layers} layers is too small for the default choice: give them")
    return ids


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> list[int]:
    """The ids as a list; ValueError unless they are three ascending ids and then the last layer."""
    ids = list(layer_ids)
    last = num_layers - 1
    if len(ids) != NUM_DRAFT_LAYERS + 1:
        raise ValueError(f"--layer-ids: expected {NUM_DRAFT_LAYERS} draft layers and the last layer, found {ids}")
    if bad := [i for i in ids if not 0 <= i <= last]:
        raise ValueError(f"--layer-ids: {bad[0]} is not a layer: the target has {num_layers} layers, 0 to {last}")
    if any(a >= b for a, b in zip(ids[:-1], ids[1:], strict=True)):
        raise ValueError(f"--layer-ids: expected strictly ascending ids, found {ids}")
    if ids[-1] != last:
        raise ValueError(f"--layer-ids: the last id must be the target's last layer, {last}; found {ids[-1]}")
    return ids


def vllm_aux_ids(layer_ids: Sequence[int]) -> list[int]:
    """The ids under which vLLM returns our layers' outputs (its id k is the input of layer k)."""
    return [i + 1 for i in layer_ids]


def draft_aux_ids(layer_ids: Sequence[int]) -> list[int]:
    """What the exported draft asks of vLLM: the auxiliary ids of the layers it was trained on, last layer excluded."""
    return vllm_aux_ids(layer_ids[:-1])
