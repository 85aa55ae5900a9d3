"""Build a tiny Kimi-K2.5 with random weights: everything of the large one that a pipeline can trip over, in 40 MB.

    python data/make_tiny_kimi.py data/targets/tiny_kimi
    python data/make_tiny_kimi.py data/targets/tiny_kimi_int4 --int4

The folder has the layout of the published checkpoint: the multimodal wrapper with its names and config keys, 61
layers, several shards with an index, a slow tokenizer in remote code, the chat template, special tokens in the same
order. Of one seed, the plain and the INT4 folder hold the same numbers: the experts lie on the INT4 grid in both.
"""

import argparse
import base64
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.common import DATA, directory_size, new_directory, run_builder, train_bpe
from eagle3.files import write_json

if TYPE_CHECKING:
    import torch

NUM_MERGEABLE = 960
NUM_RESERVED = 64  # as in tiny_kimi/tokenization_kimi.py; 256 in the large model
VOCAB_SIZE = NUM_MERGEABLE + NUM_RESERVED
SHARD_SIZE = "8MB"
GROUP_SIZE = 32  # weights that share one INT4 scale
INT4_NOTE = (
    "note: vLLM has no INT4 expert kernel for a CPU without AMX; there the tests run this folder through a worker that "
    "dequantises the experts at load (tests only). Real INT4 kernels need a GPU."
)

# Distance of each named special token from the first one, as in the published tokenizer (there the first is 163584).
CONTROL_TOKENS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|im_system|>": 10,
    "<|im_middle|>": 17,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "[UNK]": NUM_RESERVED - 2,
    "[PAD]": NUM_RESERVED - 1,
}
# Marked "special": false there: decoding with skip_special_tokens keeps them, for the reasoning and tool parsers.
VISIBLE_TOKENS = {
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<think>": 22,
    "</think>": 23,
}
SPECIAL_IDS = {token: NUM_MERGEABLE + offset for token, offset in (CONTROL_TOKENS | VISIBLE_TOKENS).items()}

QUANTIZATION_CONFIG = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP_SIZE,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def text_config(num_layers: int) -> dict[str, Any]:
    """The language model's config. kv_lora_rank 512 and rope head 64 are what vLLM's MLA on CPU takes."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 48,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.1,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": SPECIAL_IDS["[BOS]"],
        "eos_token_id": SPECIAL_IDS["<|im_end|>"],
        "pad_token_id": SPECIAL_IDS["[PAD]"],
    }


def model_config(num_layers: int, int4: bool) -> dict[str, Any]:
    """config.json. Kimi-K2.5 keeps the quantization config inside text_config, and so does this."""
    text = text_config(num_layers)
    if int4:
        text["quantization_config"] = QUANTIZATION_CONFIG
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "float32",
        "text_config": text,
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "patch_size": 14,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "pos_emb_time": 4,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
        },
        "projection_hidden_size": 32,
        "image_token_id": SPECIAL_IDS["<|media_pad|>"],
        "media_placeholder_token_id": SPECIAL_IDS["<|media_pad|>"],
        "video_token_id": VOCAB_SIZE,
        "vision_start_token_id": SPECIAL_IDS["<|media_begin|>"],
        "vision_end_token_id": SPECIAL_IDS["<|media_end|>"],
        "bos_token_id": SPECIAL_IDS["[BOS]"],
        "eos_token_id": SPECIAL_IDS["<|im_end|>"],
        "pad_token_id": SPECIAL_IDS["[PAD]"],
        "tie_word_embeddings": False,
    }


def preprocessor_config() -> dict[str, Any]:
    """What vLLM reads of the image processor, even for text."""
    return {
        "media_proc_cfg": {
            "patch_size": 14,
            "merge_kernel_size": 2,
            "temporal_merge_kernel_size": 4,
            "in_patch_limit": 64,
            "in_patch_limit_each_frame": 64,
            "in_patch_limit_video": None,
            "patch_limit_on_one_side": 8,
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        }
    }


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json. eos is [EOS] although turns end with <|im_end|>, as in the published file."""
    special = {i: token for token, i in SPECIAL_IDS.items()}
    return {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {
            str(i): {
                "content": special[i],
                "special": special[i] not in VISIBLE_TOKENS,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
            }
            for i in sorted(special)
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "additional_special_tokens": [t for t in CONTROL_TOKENS if t not in ("[BOS]", "[EOS]", "[UNK]", "[PAD]")],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 262144,
    }


def write_tiktoken_model(path: Path) -> None:
    """Train the mergeable ranks and write them as a tiktoken file: one `base64(bytes) rank` a line."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    from data.tiny_kimi.tokenization_kimi import PATTERN

    char_to_byte = {char: byte for byte, char in bytes_to_unicode().items()}
    vocab = train_bpe(NUM_MERGEABLE, PATTERN).get_vocab()
    ranked = sorted(vocab, key=vocab.get)
    encoded = (base64.b64encode(bytes(char_to_byte[char] for char in token)).decode() for token in ranked)
    path.write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(encoded)))


def write_tokenizer(folder: Path) -> None:
    """The tokenizer's files: tiktoken.model, its remote code, its config, the chat template."""
    write_tiktoken_model(folder / "tiktoken.model")
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    for name in ("tokenization_kimi.py", "chat_template.jinja"):
        shutil.copyfile(DATA / "tiny_kimi" / name, folder / name)


def randomize(name: str, tensor: "torch.Tensor", num_layers: int) -> None:
    """Change in place what plain initialisation leaves unfit for tests.

    Gains of 1 and router biases of 0 would hide code that forgets them. The last token must outweigh the mean of its
    context, or greedy decoding repeats one token: large embeddings, and residual branches scaled as in GPT-2.
    """
    if re.search(r"norm\d?\.weight$", name):
        tensor.uniform_(0.5, 1.5)
    elif name.endswith("e_score_correction_bias"):
        tensor.normal_(std=0.05)
    elif name.endswith("embed_tokens.weight"):
        tensor.normal_()
    elif name.endswith("lm_head.weight"):
        tensor.normal_(std=0.4)
    elif re.search(r"(o_proj|down_proj)(\.weight)?$", name):
        tensor.mul_((2 * num_layers) ** -0.5)


def random_weights(config: dict[str, Any], seed: int) -> dict[str, "torch.Tensor"]:
    """The model's bfloat16 tensors under Transformers' names."""
    import torch
    from safetensors.torch import load_file
    from transformers import Kimi_K25Config
    from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25ForConditionalGeneration

    with torch.random.fork_rng(devices=[]), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        model = Kimi_K25ForConditionalGeneration(Kimi_K25Config(**config))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            randomize(name, tensor, config["text_config"]["num_hidden_layers"])
        model.to(torch.bfloat16).save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def published_name(name: str) -> str:
    """The published checkpoint's (and vLLM's) name of a tensor that Transformers 5.19 saves under another one."""
    if name.startswith("language_model."):
        name = name.replace(".blocks.", ".layers.")
    name = name.replace("model.mm_projector.", "mm_projector.")
    return name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")


def is_routed_expert(name: str) -> bool:
    return re.search(r"mlp\.experts\.\d+\.(gate|up|down)_proj\.weight$", name) is not None


def quantize(weight: "torch.Tensor") -> tuple["torch.Tensor", "torch.Tensor"]:
    """INT4 codes [out, in] int8 and scales [out, in / 32] bfloat16 of a weight [out, in].

    Scales keep four significant bits, so code * scale has at most eight and is exact in bfloat16.
    """
    import torch

    groups = weight.float().unflatten(1, (-1, GROUP_SIZE))
    fraction, exponent = torch.frexp(groups.abs().amax(-1) / 7)
    scales = torch.ldexp(torch.ceil(fraction * 16) / 16, exponent)
    codes = torch.round(groups / scales[..., None]).clamp(-8, 7).to(torch.int8)
    return codes.flatten(1), scales.to(torch.bfloat16)


def dequantize(codes: "torch.Tensor", scales: "torch.Tensor") -> "torch.Tensor":
    """The bfloat16 weight [out, in] of INT4 codes and scales; exact."""
    return (codes.unflatten(1, (-1, GROUP_SIZE)) * scales[..., None]).flatten(1)


def published_tensors(name: str, weight: "torch.Tensor", int4: bool) -> dict[str, "torch.Tensor"]:
    """The checkpoint's tensors for one weight: a routed expert is on the INT4 grid, and packed if `int4`."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    if not is_routed_expert(name):
        return {name: weight.contiguous()}
    codes, scales = quantize(weight)
    if not int4:
        return {name: dequantize(codes, scales)}
    return {
        f"{name}_packed": pack_to_int32(codes, 4),
        f"{name}_scale": scales,
        f"{name}_shape": torch.tensor(weight.shape, dtype=torch.int32),
    }


def write_weights(folder: Path, config: dict[str, Any], int4: bool, seed: int) -> None:
    """The weight shards and model.safetensors.index.json."""
    from huggingface_hub import save_torch_state_dict

    tensors: dict[str, torch.Tensor] = {}
    for name, weight in random_weights(config, seed).items():
        tensors |= published_tensors(published_name(name), weight, int4)
    save_torch_state_dict(tensors, folder, max_shard_size=SHARD_SIZE)


def make_tiny_kimi(out_dir: Path | str, *, int4: bool = False, num_layers: int = 61, seed: int = 0) -> Path:
    """Write a tiny Kimi-K2.5 to the new folder `out_dir` and return it.

    Raises ValueError if `out_dir` exists, or has fewer than two layers (one dense, one of experts).
    """
    if num_layers < 2:
        raise ValueError(f"expected at least 2 layers (one dense, one of experts), found {num_layers}")
    with new_directory(Path(out_dir)) as folder:
        config = model_config(num_layers, int4)
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", {"eos_token_id": SPECIAL_IDS["<|im_end|>"]})
        write_json(folder / "preprocessor_config.json", preprocessor_config())
        write_tokenizer(folder)
        write_weights(folder, model_config(num_layers, int4=False), int4, seed)
    return Path(out_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--int4", action="store_true", help="routed experts as compressed-tensors INT4")
    parser.add_argument("--layers", type=int, default=61, help="decoder layers (default: 61, as the large one)")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: 0)")

    def build(args: argparse.Namespace) -> str:
        path = make_tiny_kimi(args.out_dir, int4=args.int4, num_layers=args.layers, seed=args.seed)
        if args.int4:
            print(INT4_NOTE)
        shards = len(list(path.glob("model-*.safetensors")))
        return f"{path}: {args.layers} layers, {shards} weight shards, {directory_size(path) / 1e6:.1f} MB"

    run_builder(parser, build)


if __name__ == "__main__":
    main()
