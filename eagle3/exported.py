"""An exported draft, read back: is it what vLLM and speculators take, and of which target is it?

Nothing here needs the draft that was exported: what is checked is the folder, before it gets its final name.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eagle3 import files
from eagle3.draft import NORM_FLAGS
from eagle3.layers import NUM_DRAFT_LAYERS
from eagle3.target import EMBEDDING, HEAD, Target, check_same_target

TARGET_FINGERPRINT = "target_fingerprint"  # our own key of config.json; vLLM and speculators pass over it
FLAGS = dict.fromkeys(NORM_FLAGS) | {"tie_word_embeddings": False}  # None: either value, but it must be written,
# since the defaults of vLLM and speculators differ
NO_SPECULATORS = "the export was not loaded by speculators: it is not installed here"


def check_target(config: dict[str, Any], target: Target, where: str) -> None:
    """ValueError naming what differs when a draft with this config.json was trained for another target than `target`.

    A draft that does not say for which it was trained (made by others) passes.
    """
    if TARGET_FINGERPRINT in config:
        check_same_target(target.fingerprint, config[TARGET_FINGERPRINT], where)


def check_export(folder: Path) -> str | None:
    """RuntimeError naming what vLLM or speculators would not take of the draft in `folder`.

    Returns what could not be checked here, None if all was.
    """
    config = files.read_json(folder / "config.json")
    faults = served_faults(config, folder / "model.safetensors")
    installed = find_spec("speculators") is not None
    if installed and not faults:
        faults = speculators_faults(folder)
    if faults:
        raise RuntimeError(f"{folder}: the exported draft would not be served: {'; '.join(faults)}")
    return None if installed else NO_SPECULATORS


def served_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """The tensors that vLLM 0.32's Eagle3LlamaForCausalLM loads for this config.json, and their shapes."""
    layer = config["transformer_layer_config"]
    hidden, ffn, vocab = layer["hidden_size"], layer["intermediate_size"], layer["vocab_size"]
    heads, kv_heads = (layer[key] * layer["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        EMBEDDING: [vocab, hidden],
        HEAD: [config["draft_vocab_size"], hidden],
        "fc.weight": [hidden, NUM_DRAFT_LAYERS * hidden],
        "norm.weight": [hidden],
        "layers.0.self_attn.q_proj.weight": [heads, 2 * hidden],
        "layers.0.self_attn.k_proj.weight": [kv_heads, 2 * hidden],
        "layers.0.self_attn.v_proj.weight": [kv_heads, 2 * hidden],
        "layers.0.self_attn.o_proj.weight": [hidden, heads],
        "layers.0.mlp.gate_proj.weight": [ffn, hidden],
        "layers.0.mlp.up_proj.weight": [ffn, hidden],
        "layers.0.mlp.down_proj.weight": [hidden, ffn],
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"layers.0.{norm}.weight": [hidden] for norm in norms}
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = [NUM_DRAFT_LAYERS * hidden]
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": [hidden] for i in range(NUM_DRAFT_LAYERS)}
    if config["draft_vocab_size"] != vocab:
        shapes |= {"d2t": [config["draft_vocab_size"]], "t2d": [vocab]}
    return shapes


def served_faults(config: dict[str, Any], weights: Path) -> list[str]:
    """What vLLM would refuse or read otherwise than we meant it: flags, auxiliary ids, tensors, maps."""
    faults = [
        f"config.json: {key} must be {'true or false' if wanted is None else str(wanted).lower()}, it is {found!r}"
        for key, wanted in FLAGS.items()
        if not isinstance(found := config.get(key), bool) or wanted not in (None, found)
    ]
    if faults:
        return faults  # they say which tensors there are
    ids = config["eagle_aux_hidden_state_layer_ids"]
    if len(ids) != NUM_DRAFT_LAYERS or ids != sorted(set(ids)) or ids[0] < 1:
        faults.append(f"config.json: eagle_aux_hidden_state_layer_ids must be three ascending ids from 1, found {ids}")
    with safe_open(weights, "pt") as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        wanted = served_shapes(config)
        if difference := files.first_difference(wanted, found):
            return [*faults, f"model.safetensors: shape of {difference}"]
        dtypes = {name: file.get_slice(name).get_dtype() for name in found}
        whole = {"d2t": "I64", "t2d": "BOOL"}
        faults += [
            f"model.safetensors: {name} is {dtype}"
            for name, dtype in dtypes.items()
            if (dtype != whole[name] if name in whole else not dtype.startswith(("F", "BF")))
        ]
        return faults + (_map_faults(file.get_tensor("d2t"), file.get_tensor("t2d")) if "d2t" in found else [])


def _map_faults(d2t: torch.Tensor, t2d: torch.Tensor) -> list[str]:
    """`d2t` int64 [D] holds offsets: draft id j is target id j + d2t[j]; `t2d` bool [V] marks exactly those."""
    ids = torch.arange(len(d2t)) + d2t
    same = torch.equal(ids, t2d.nonzero()[:, 0])
    return [] if same else ["model.safetensors: d2t and t2d name different tokens, or d2t holds no ascending offsets"]


def speculators_faults(folder: Path) -> list[str]:
    """What differs between the folder's tensors and those of the model that speculators makes of the folder."""
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from transformers import PreTrainedModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar for a few tensors, in the log of each export
    try:
        config = SpeculatorModelConfig.from_pretrained(folder)
        model_class = SpeculatorModel.registered_model_class_from_config(config)
        with torch.random.fork_rng(devices=[]):
            # speculators' own from_pretrained goes on to read the target, whose config may ask to run its code
            model = PreTrainedModel.from_pretrained.__func__(model_class, folder, config=config)
    except Exception as error:
        return [f"speculators cannot load it: {type(error).__name__}: {error}"]
    loaded = {name: t for name, t in model.state_dict().items() if not name.startswith("verifier_")}
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        if odd := sorted(names ^ loaded.keys()):
            return [f"speculators' model has other tensors: {', '.join(odd)}"]
        differ = [n for n in sorted(names) if not torch.equal(loaded[n], file.get_tensor(n).to(loaded[n].dtype))]
    return [f"speculators reads other values of {', '.join(differ)}"] if differ else []
