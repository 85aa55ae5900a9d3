"""The draft model: one Llama layer over the target's hidden states, with parameters named as vLLM reads them.

Only weights and sizes live here; how they are run over training rows is `eagle3.ttt`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn

from eagle3.layers import NUM_DRAFT_LAYERS
from eagle3.target import EMBEDDING, FINAL_NORM, HEAD, Target
from eagle3.vocab import DraftVocab

INIT_STD = 0.02  # at most; wide layers start with outputs of variance one, lest attention start as a hard choice
MLA_FAMILY_FFN = 2 / 3  # of the target's dense FFN: 12,288 of 18,432, as the published Kimi-K2.5 draft has it
LOGIT_CHANGES = ("logit_scale", "logits_scaling", "final_logit_softcapping")  # config keys that we do not reproduce
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
ONE_PLUS_NORM = ("gemma", "qwen3_5", "recurrent_gemma")  # model types whose final norm multiplies by 1 + weight


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Sizes and flags of a draft; every default is written here and nowhere else."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: dict[str, Any]
    """Transformers' `rope_parameters`: rope_type, rope_theta and, with yarn, all of the target's yarn."""
    max_positions: int
    target_vocab_size: int
    draft_vocab_size: int
    norm_before_residual: bool = True
    """The residual stream starts as hidden_norm(h) instead of h."""
    norm_before_fc: bool = False
    """fc reads the three states normed together, as one vector of 3H."""
    fc_norm: bool = True
    """fc reads each of the three states normed alone."""
    norm_output: bool = False
    """The next step reads norm(h') instead of h'."""

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("draft: --norm-before-fc and --fc-norm exclude each other; add --no-fc-norm")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"draft: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"draft: head_dim must be even for rotary positions, found {self.head_dim}")
        if not 0 < self.draft_vocab_size <= self.target_vocab_size:
            sizes = f"{self.draft_vocab_size} of {self.target_vocab_size}"
            raise ValueError(f"draft: draft_vocab_size must be from 1 to the target's, found {sizes}")

    @classmethod
    def for_target(cls, target: Target, vocab: DraftVocab, **overrides: Any) -> Self:
        """Sizes fit for a target, its rotary positions carried over whole; `overrides` win.

        ValueError if the target computes its logits in a way that the teacher does not reproduce.
        """
        _check_plain_head(target)
        sizes = {
            "hidden_size": target.hidden_size,
            "norm_eps": target.norm_eps,
            "rope": rope_parameters(target.text),
            "max_positions": target.max_positions,
            "target_vocab_size": target.vocab_size,
            "draft_vocab_size": vocab.size,
        }
        layer = _mla_layer(target) if "kv_lora_rank" in target.text else _llama_layer(target)
        return cls(**(sizes | layer | overrides))

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def _check_plain_head(target: Target) -> None:
    if changed := [k for k in LOGIT_CHANGES if target.text.get(k) not in (None, 1.0)]:
        raise ValueError(f"{target.path}/config.json: {changed[0]} changes the target's logits, which is not supported")
    if str(target.text.get("model_type", "")).startswith(ONE_PLUS_NORM):
        raise ValueError(f"{target.path}: the final norm of {target.text['model_type']} is x * (1 + w): not supported")


def _llama_layer(target: Target) -> dict[str, int]:
    heads = target.num_heads
    return {
        "intermediate_size": target.text["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": target.text.get("num_key_value_heads") or heads,
        "head_dim": target.text.get("head_dim") or target.hidden_size // heads,
    }


def _mla_layer(target: Target) -> dict[str, int]:
    """A plain multi-head layer for an MLA target: heads as wide as its values, at most twice the hidden size in all."""
    head_dim = target.text["v_head_dim"]
    heads = target.num_heads
    if heads * head_dim > 2 * target.hidden_size:
        heads = max(target.hidden_size // head_dim, 1)
    ffn = round(target.text["intermediate_size"] * MLA_FAMILY_FFN)
    return {
        "intermediate_size": -(-ffn // 64) * 64,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
    }


def rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """A target's rotary settings in Transformers' `rope_parameters` schema, from that or the older two keys."""
    found = dict(text.get("rope_scaling") or {}) | dict(text.get("rope_parameters") or {})
    found.setdefault("rope_theta", text.get("rope_theta", 10000.0))
    found["rope_type"] = found.get("rope_type") or found.pop("type", "default")
    found.pop("type", None)
    return found


class _Attention(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * config.hidden_size, config.q_size, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, config.kv_size, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, config.kv_size, bias=False)
        self.o_proj = nn.Linear(config.q_size, config.hidden_size, bias=False)


class _Mlp(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            setattr(self, name, nn.RMSNorm(config.hidden_size, eps=config.norm_eps))
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)


class Draft(nn.Module):
    """The draft's weights, under the names of the exported tensors.

    Trained weights are fp32 masters. `embed_tokens.weight` [V, H] and `lm_head.weight` [D, H] are copies of the
    target's, frozen unless asked otherwise, in the target's own dtype while frozen.
    """

    def __init__(self, config: DraftConfig, *, compute_dtype: torch.dtype | None = None) -> None:
        """`compute_dtype`: of activations and matrix products; by default bfloat16 on a GPU, else the masters'."""
        super().__init__()
        self.config = config
        self._compute_dtype = compute_dtype
        self._rotary: tuple[torch.Tensor, float] | None = None  # `rotary_frequencies`, once needed
        self.embed_tokens = nn.Embedding(config.target_vocab_size, config.hidden_size)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(NUM_DRAFT_LAYERS * config.hidden_size, eps=config.norm_eps)
        if config.fc_norm:
            norms = (nn.RMSNorm(config.hidden_size, eps=config.norm_eps) for _ in range(NUM_DRAFT_LAYERS))
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(NUM_DRAFT_LAYERS * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(config)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)

    @classmethod
    def create(
        cls,
        config: DraftConfig,
        embedding: torch.Tensor,
        head_rows: torch.Tensor,
        *,
        train_head: bool = False,
        train_embedding: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> Self:
        """A new draft around the target's `embedding` [V, H] and `head_rows` [D, H] (its rows of the draft vocabulary).

        Matrices start normal with `initial_std` from torch's global generator, norms at one, and fc as what passes on
        the last of the three states: the residual stream then begins in the space that the target's head reads.
        """
        _check_shape("embedding", embedding, (config.target_vocab_size, config.hidden_size))
        _check_shape("head_rows", head_rows, (config.draft_vocab_size, config.hidden_size))
        with torch.device("meta"):
            draft = cls(config, compute_dtype=compute_dtype)
        draft.embed_tokens.weight = _copied(embedding, train_embedding)
        draft.lm_head.weight = _copied(head_rows, train_head)
        for module in (m for m in draft.modules() if getattr(m, "weight", None) is not None and m.weight.is_meta):
            weight = torch.empty_like(module.weight, device=embedding.device, dtype=torch.float32)
            nn.init.ones_(weight) if weight.ndim == 1 else nn.init.normal_(weight, std=initial_std(weight.shape[1]))
            module.weight = nn.Parameter(weight)
        nn.init.zeros_(draft.fc.weight)
        nn.init.eye_(draft.fc.weight[:, -config.hidden_size :])
        return draft

    @property
    def layer(self) -> _Layer:
        return self.layers[0]

    @property
    def input_scale(self) -> torch.Tensor | None:
        """The weights [3H] of the norms before fc; None where there are none."""
        if self.config.norm_before_fc:
            return self.input_norm.weight
        return torch.cat([norm.weight for norm in self.fc_norm]) if self.config.fc_norm else None

    @property
    def compute_dtype(self) -> torch.dtype:
        weight = self.fc.weight
        return self._compute_dtype or (torch.bfloat16 if weight.is_cuda else weight.dtype)

    def forward(self, compute: Callable[..., Any], *args: Any) -> Any:
        """`compute(self, *args)`: what computes on the weights goes through here, so that hooks of DDP or FSDP run."""
        return compute(self, *args)

    def rotary_table(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [positions, head_dim / 2] on the weights' device, float32 (float64 when computing in that)."""
        device, dtype = self.fc.weight.device, torch.promote_types(self.compute_dtype, torch.float32)
        if self._rotary is None or self._rotary[0].device != device:
            frequencies, factor = rotary_frequencies(self.config)
            self._rotary = frequencies.to(device), factor
        frequencies, factor = self._rotary
        angle = torch.arange(positions, device=device, dtype=dtype)[:, None] * frequencies.to(dtype)
        return angle.cos() * factor, angle.sin() * factor


def initial_std(inputs: int) -> float:
    """The standard deviation that a matrix with this many inputs starts with."""
    return min(INIT_STD, inputs**-0.5)


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"draft: {name} must be {list(expected)}, found {list(tensor.shape)}")


def _copied(tensor: torch.Tensor, trained: bool) -> nn.Parameter:
    """A trained copy is an fp32 master of its own; a frozen one may share the given tensor's memory."""
    return nn.Parameter(tensor.float().clone() if trained else tensor, requires_grad=trained)


def rotary_frequencies(config: DraftConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32 [head_dim / 2] and the factor on cos and sin, by Transformers' own rope code."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters=dict(config.rope),
    )
    rotary = LlamaRotaryEmbedding(llama)
    return rotary.inv_freq.detach(), rotary.attention_scaling


@dataclass(frozen=True)
class Teacher:
    """The target's own last step: final norm, then its head's rows of the draft vocabulary."""

    norm: torch.Tensor = field(repr=False)  # [H]
    eps: float
    head: torch.Tensor = field(repr=False)  # [D, H]

    @classmethod
    def for_target(cls, target: Target, vocab: DraftVocab) -> Self:
        """Loads the final norm and the head's rows of the draft vocabulary."""
        return cls(target.load(FINAL_NORM), target.norm_eps, head_rows(target, vocab))

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.norm.to(device), self.eps, self.head.to(device))

    @torch.no_grad()
    def logits(self, states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Logits [n, D] in `dtype` of last-layer states [n, H], which come from before the final norm."""
        wide = torch.promote_types(dtype, torch.float32)
        normed = nn.functional.rms_norm(states.to(wide), (states.shape[-1],), self.norm.to(wide), self.eps)
        return normed.to(dtype) @ self.head.to(dtype).t()


def head_rows(target: Target, vocab: DraftVocab) -> torch.Tensor:
    """The target's head rows of the draft vocabulary [D, H]."""
    head = target.load(HEAD)
    return head if vocab.ids is None else head[torch.from_numpy(vocab.ids)]


def embedding(target: Target) -> torch.Tensor:
    """The target's input embedding [V, H]."""
    return target.load(EMBEDDING)
