"""Tiny random float32 targets for speculators 0.3.0 on vLLM 0.16, and Transformers' states for them.

llama            6 layers, plain RoPE
deepseek         DeepseekV3, 61 layers as Kimi-K2.5 has, experts, yarn
kimi             the same weights inside KimiK25ForConditionalGeneration, tokenizer with code of its own
deepseek-short   3 layers, for the failures that come before any forward
llama-4-scaling  deepseek-short with a llama_4_scaling that starts at position 8
gemma            a model whose forward does more than embed, layers and norm
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 256
LLAMA_4_SCALING = {"original_max_position_embeddings": 8, "beta": 0.5}
LAYER_IDS = {
    "llama": [5, 0, 2],  # in this order: speculators returned them ascending
    "deepseek": [2, 30, 58, 60],
    "kimi": [2, 30, 58, 60],
    "deepseek-short": [0, 1, 2],
    "llama-4-scaling": [0, 1, 2],
    "gemma": [0, 1],
}
TOKENIZER_CODE = """\
from transformers import PreTrainedTokenizerFast


class TinyTokenizer(PreTrainedTokenizerFast):
    pass
"""
IMAGE_PROCESSOR_CODE = """\
from transformers.image_processing_utils import BaseImageProcessor


class TinyImageProcessor(BaseImageProcessor):
    num_frames_per_chunk = 4

    def media_tokens_calculator(self, media):
        return 1
"""
CONFIG_CODE = "from vllm.transformers_utils.configs.kimi_k25 import KimiK25Config\n"


def llama_model() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def deepseek_model(num_layers: int) -> PreTrainedModel:
    """Yarn as Kimi has it (vLLM on CPU rotates plain RoPE wrongly for this family); sizes that TP=2 divides. Every
    token takes all four experts: a choice would fall differently in two implementations at a near tie."""
    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=48,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=4,
        n_shared_experts=1,
        moe_intermediate_size=64,
        intermediate_size=128,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.827,
        max_position_embeddings=262144,
        initializer_range=0.1,
        rope_theta=50000.0,
        rope_scaling={
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    return DeepseekV3ForCausalLM(config)


def gemma_model() -> PreTrainedModel:
    config = GemmaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.2,
    )
    return GemmaForCausalLM(config)


def save_tokenizer(folder: Path) -> None:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1))


def save(model: PreTrainedModel, folder: Path) -> None:
    """Save the target; the same seed for all, so that deepseek and kimi have the same weights."""
    model.float().save_pretrained(folder)
    save_tokenizer(folder)


def wrap_as_kimi(deepseek: Path, folder: Path) -> None:
    """The deepseek target inside the Kimi-K2.5 wrapper; config and tokenizer with remote code, as the real one."""
    folder.mkdir()
    tensors = load_file(deepseek / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    text_config = json.loads((deepseek / "config.json").read_text()) | {"model_type": "kimi_k2"}
    vision_config = {
        "patch_size": 14,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
    }
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "auto_map": {"AutoConfig": "configuration_kimi.KimiK25Config"},
        "text_config": text_config,
        "vision_config": vision_config,
        "media_placeholder_token_id": 5,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "configuration_kimi.py").write_text(CONFIG_CODE)
    (folder / "tokenization_tiny.py").write_text(TOKENIZER_CODE)
    (folder / "image_processing_tiny.py").write_text(IMAGE_PROCESSOR_CODE)
    processor = {
        "image_processor_type": "TinyImageProcessor",
        "auto_map": {"AutoImageProcessor": "image_processing_tiny.TinyImageProcessor"},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    save_tokenizer(folder)
    change_json(
        folder / "tokenizer_config.json",
        tokenizer_class="TinyTokenizer",
        auto_map={"AutoTokenizer": [None, "tokenization_tiny.TinyTokenizer"]},
    )


def build_targets(root: Path) -> None:
    torch.manual_seed(0)
    save(llama_model(), root / "llama")
    save(deepseek_model(61), root / "deepseek")
    wrap_as_kimi(root / "deepseek", root / "kimi")
    save(deepseek_model(3), root / "deepseek-short")
    save(DeepseekV3ForCausalLM.from_pretrained(root / "deepseek-short"), root / "llama-4-scaling")
    change_json(root / "llama-4-scaling" / "config.json", llama_4_scaling=LLAMA_4_SCALING)
    save(gemma_model(), root / "gemma")


@contextlib.contextmanager
def scaled_queries(model: PreTrainedModel) -> Iterator[None]:
    """Transformers' DeepseekV3 knows no llama_4_scaling: multiply the queries (rotation is linear) by
    1 + beta * ln(1 + floor(position / original)), one sample at a time, so that row == position."""

    def scale(_module: torch.nn.Module, _inputs: tuple, queries: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(queries.shape[1], dtype=torch.float64)
        periods = torch.floor(positions / LLAMA_4_SCALING["original_max_position_embeddings"])
        return queries * (1 + LLAMA_4_SCALING["beta"] * torch.log(1 + periods)).float()[None, :, None]

    hooks = [layer.self_attn.q_b_proj.register_forward_hook(scale) for layer in model.model.layers]
    yield
    for hook in hooks:
        hook.remove()


class Reference:
    """Transformers' states of one target: what `layer_ids` put out, before the final norm. Kept by sample."""

    def __init__(self, root: Path, name: str):
        cls = LlamaForCausalLM if name == "llama" else DeepseekV3ForCausalLM
        self.model = cls.from_pretrained(root / name, dtype=torch.float32).eval()
        self.layer_ids = LAYER_IDS[name]
        self.is_scaled = name == "llama-4-scaling"
        self.known = {}

    def states(self, ids: list[int]) -> list[torch.Tensor]:
        """One [tokens, hidden] per layer id."""
        key = tuple(ids)
        if key not in self.known:
            self.known[key] = self.computed_states(ids)
        return self.known[key]

    @torch.no_grad()
    def computed_states(self, ids: list[int]) -> list[torch.Tensor]:
        found = {}

        def keep(layer_id: int) -> object:
            def hook(_module: torch.nn.Module, _inputs: tuple, output: object) -> None:
                found[layer_id] = (output[0] if isinstance(output, tuple) else output)[0]

            return hook

        layers = self.model.model.layers
        hooks = [layers[layer_id].register_forward_hook(keep(layer_id)) for layer_id in self.layer_ids]
        with scaled_queries(self.model) if self.is_scaled else contextlib.nullcontext():
            self.model.model(torch.tensor([ids]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return [found[layer_id] for layer_id in self.layer_ids]
