"""The differentiable pieces of the draft's layer, each in plain torch, and on a GPU by the kernels of `eagle3.kernels`.

Two ideas save time and memory against plain autograd, on every device:
- a weight is cast to the compute dtype once for all steps, and every product that reads it adds its gradient straight
  into one fp32 buffer (`Weight`), instead of autograd summing a tensor per step;
- a norm of what is not trained (the embedding, the target's states) is folded into the weight it feeds (`cast_weight`'s
  `scale`): its gradient is then a column sum over that weight, with no product back to the norm's input.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F

Key = tuple[slice, slice]
ALL: Key = (slice(None), slice(None))
ATTENTION_BLOCK = 256  # rows of one dense block on the CPU


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether this tensor's operations run as Triton kernels: on a GPU, or anywhere under Triton's interpreter."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


class GradBuffer:
    """A gradient that its readers add up themselves; made, as zeros, when first asked for.

    It must not hold the tensor that it is the gradient of: autograd's node for that tensor holds it.
    """

    def __init__(self, like: torch.Tensor, dtype: torch.dtype) -> None:
        self._options = {"size": like.shape, "dtype": dtype, "device": like.device}
        self._tensor: torch.Tensor | None = None
        self.scale: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            self._tensor = torch.zeros(**self._options)
        return self._tensor

    def take(self, direct: torch.Tensor | None) -> torch.Tensor:
        """The whole gradient, with what came through autograd itself; the buffer is empty afterwards."""
        total, self._tensor = self.tensor, None
        if self.scale is not None:
            total *= self.scale
        return total if direct is None else total.add_(direct)


@dataclass(frozen=True)
class Weight:
    """A matrix [out, in] in the compute dtype, and the part `key` of the buffer that collects its gradient."""

    value: torch.Tensor
    _buffer: GradBuffer = field(repr=False)
    _key: Key = ALL

    def rows(self, start: int | None, stop: int | None) -> "Weight":
        """The rows start..stop, as a weight of its own."""
        return Weight(self.value[start:stop], self._buffer, (slice(start, stop), self._key[1]))

    def columns(self, start: int | None, stop: int | None) -> "Weight":
        """The columns start..stop, as a weight of its own."""
        return Weight(self.value[:, start:stop], self._buffer, (self._key[0], slice(start, stop)))

    def accumulate(self, grad_out: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add grad_out^T [out, n] @ inputs [n, in] to the gradient, in the buffer's precision."""
        into = self._buffer.tensor[self._key]
        if into.is_cuda and into.dtype != grad_out.dtype:  # cuBLAS widens as it adds
            torch.ops.aten.addmm.dtype_out(into, grad_out.t(), inputs, into.dtype, out=into)
        else:
            into.addmm_(grad_out.t().to(into.dtype), inputs.to(into.dtype))

    def scale_by(self, factor: torch.Tensor) -> None:
        """The whole gradient is to be multiplied by `factor` at the end (the same from each reader)."""
        self._buffer.scale = factor


def cast_weight(masters: Sequence[torch.Tensor], dtype: torch.dtype, scale: torch.Tensor | None = None) -> Weight:
    """The masters [out_i, in], one above the other, in `dtype`; the first len(scale) columns are times `scale`."""
    if len(masters) == 1 and masters[0].dtype == dtype and not masters[0].requires_grad:
        return Weight(masters[0], GradBuffer(masters[0], dtype))
    value = torch.empty(sum(map(len, masters)), masters[0].shape[1], dtype=dtype, device=masters[0].device)
    buffer = GradBuffer(value, torch.promote_types(masters[0].dtype, torch.float32))
    return Weight(_Cast.apply(buffer, value, scale, *masters), buffer)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer, value, scale, *masters):  # noqa: ANN001, ANN205
        ctx.set_materialize_grads(False)
        ctx.buffer, ctx.sizes = buffer, [len(m) for m in masters]
        ctx.save_for_backward(scale, *(masters if scale is not None else ()))
        scaled = 0 if scale is None else len(scale)
        for part, master in zip(value.split(ctx.sizes), masters, strict=True):
            part[:, scaled:].copy_(master[:, scaled:])
            if scaled:
                torch.mul(master[:, :scaled], scale, out=part[:, :scaled])
        return value

    @staticmethod
    def backward(ctx: Any, direct):  # noqa: ANN001, ANN205
        parts = ctx.buffer.take(direct).split(ctx.sizes)
        scale, *masters = ctx.saved_tensors
        if scale is None:
            return None, None, None, *parts
        grad_scale = torch.zeros_like(scale)
        for part, master in zip(parts, masters, strict=True):
            grad_scale += (part[:, : len(scale)] * master[:, : len(scale)]).sum(0)
            part[:, : len(scale)] *= scale
        return None, None, grad_scale, *parts


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [n, in] @ weight^T [in, out]."""
    return _Linear.apply(x, weight.value, weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, value, weight):  # noqa: ANN001, ANN205
        ctx.weight = weight if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(x, value)
        return x @ value.t()

    @staticmethod
    def backward(ctx: Any, grad):  # noqa: ANN001, ANN205
        x, value = ctx.saved_tensors
        if ctx.weight is not None:
            ctx.weight.accumulate(grad, x)
        return grad @ value if ctx.needs_input_grad[0] else None, None, None


def swiglu_linear(gate_up: torch.Tensor, down: Weight) -> torch.Tensor:
    """(silu(gate) * up) @ down^T for gate_up [n, 2F]; the product's input is recomputed in the backward pass."""
    return _SwigluLinear.apply(gate_up, down.value, down)


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up, value, weight):  # noqa: ANN001, ANN205
        ctx.weight = weight if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(gate_up, value)
        return swiglu(gate_up) @ value.t()

    @staticmethod
    def backward(ctx: Any, grad):  # noqa: ANN001, ANN205
        gate_up, value = ctx.saved_tensors
        grad_gate_up, activated = swiglu_backward(gate_up, grad @ value)
        if ctx.weight is not None:
            ctx.weight.accumulate(grad, activated)
        return grad_gate_up, None, None


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [n, 2F]."""
    if has_kernels(gate_up):
        from eagle3 import kernels

        return kernels.swiglu(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(gate_up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient by gate_up [n, 2F] for a gradient [n, F] of `swiglu`, and swiglu(gate_up) again."""
    if has_kernels(gate_up):
        from eagle3 import kernels

        return kernels.swiglu_backward(gate_up, grad)
    gate, up = gate_up.chunk(2, -1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat([grad_gate, grad * silu], -1), silu * up


def add_norm(
    x: torch.Tensor, branch: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """total = x + branch [n, H] (or x alone) and RMSNorm(total) * weight; the norm itself in at least fp32."""
    if has_kernels(x):
        from eagle3 import kernels

        return kernels.AddNorm.apply(x, branch, weight, eps)
    total = x if branch is None else x + branch
    wide = torch.promote_types(x.dtype, torch.float32)
    return total, F.rms_norm(total.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


@dataclass(frozen=True)
class Rotary:
    """cos and sin [positions, head_dim / 2]: pairs are (i, i + head_dim / 2), as in Llama."""

    cos: torch.Tensor
    sin: torch.Tensor


def add_embedding_half(
    x: torch.Tensor,
    embedded: "Shared",
    column: int,
    tokens: torch.Tensor,
    rotary: Rotary,
    positions: torch.Tensor,
    heads: Sequence[tuple[int, bool]],
) -> list[torch.Tensor]:
    """Projections x [n, w] of the hidden half plus those of the embedding half, as heads, rotated to their position.

    `embedded` [T, C] holds the embedding half's projections of every token; row r takes columns column..column + w of
    token `tokens[r]`. `heads` are (number of heads, whether rotated), in column order; returns [n, heads, head_dim]
    for each.
    """
    if has_kernels(x):
        from eagle3 import kernels

        return list(
            kernels.AddEmbeddingHalf.apply(x, embedded.value, embedded, column, tokens, rotary, positions, heads)
        )
    total = x + embedded.value[:, column : column + x.shape[1]].index_select(0, tokens)
    cos, sin = rotary.cos[positions, None].to(x.dtype), rotary.sin[positions, None].to(x.dtype)
    head_dim = 2 * rotary.cos.shape[1]
    parts = total.split([n * head_dim for n, _ in heads], -1)
    parts = [p.unflatten(-1, (-1, head_dim)) for p in parts]
    return [_rotate(p, cos, sin) if turn else p for p, (_, turn) in zip(parts, heads, strict=True)]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Shared:
    """A tensor that several steps read. With kernels, they add its gradient to the one buffer `grad` themselves."""

    def __init__(self, tensor: torch.Tensor, grad_dtype: torch.dtype | None = None) -> None:
        """`grad_dtype`: the buffer's; at least fp32 by default."""
        self.grad = GradBuffer(tensor, grad_dtype or torch.promote_types(tensor.dtype, torch.float32))
        self.value = _Shared.apply(tensor, self.grad) if has_kernels(tensor) else tensor

    def take_rows(self, rows: torch.Tensor) -> "Shared":
        return Shared(take_rows(self.value, rows), self.value.dtype)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor, buffer):  # noqa: ANN001, ANN205
        ctx.set_materialize_grads(False)
        ctx.buffer, ctx.dtype = buffer, tensor.dtype
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, direct):  # noqa: ANN001, ANN205
        return ctx.buffer.take(direct).to(ctx.dtype), None


@dataclass(frozen=True)
class KeyRanges:
    """For each query row, in ascending order, the first-step keys it sees: packed rows first..last, both included."""

    first: torch.Tensor
    last: torch.Tensor

    @cached_property
    def blocks(self) -> list[tuple[slice, slice]]:
        """Query rows in blocks of one sample, and the keys that any of them sees."""
        firsts, lasts = self.first.tolist(), self.last.tolist()
        found, start = [], 0
        for row in range(1, len(firsts) + 1):
            if row == len(firsts) or firsts[row] != firsts[start] or row - start == ATTENTION_BLOCK:
                found.append((slice(start, row), slice(firsts[start], lasts[row - 1] + 1)))
                start = row
        return found


def attend(
    q: torch.Tensor, keys: Shared, values: Shared, own: Sequence[tuple[Shared, Shared]], ranges: KeyRanges
) -> torch.Tensor:
    """Attention of q [n, heads, d] over the first step's keys [T, kv_heads, d] in `ranges` and the rows' own keys.

    `own` holds k and v [n, kv_heads, d] of the steps since; row r sees its own row r of them. Returns [n, heads * d].
    """
    if has_kernels(q):
        from eagle3 import kernels

        shared = [keys, values, *(each for pair in own for each in pair)]
        return kernels.Attend.apply(q, ranges, shared, *(each.value for each in shared))
    out = [
        _attend_block(
            q[rows], keys.value[seen], values.value[seen], [(k.value[rows], v.value[rows]) for k, v in own], visible
        )
        for rows, seen in ranges.blocks
        for visible in [torch.arange(seen.start, seen.stop, device=q.device) <= ranges.last[rows, None]]
    ]
    return torch.cat(out)


def _attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: Sequence, visible: torch.Tensor
) -> torch.Tensor:
    """Dense attention of m rows over n keys (`visible` [m, n]) and their own keys."""
    m, heads, d = q.shape
    kv_heads = k.shape[1]
    q = (q * d**-0.5).view(m, kv_heads, -1, d).permute(1, 2, 0, 3)  # [kv_heads, group, m, d]
    scores = q.flatten(1, 2) @ k.permute(1, 2, 0)
    scores = scores.view(*q.shape[:3], -1).masked_fill(~visible, float("-inf"))
    own_scores = [(q * ok.transpose(0, 1)[:, None]).sum(-1, keepdim=True) for ok, _ in own]
    weight = torch.cat([scores, *own_scores], -1).softmax(-1)
    shared, *rest = weight.split([len(k)] + [1] * len(own), -1)
    out = (shared.flatten(1, 2) @ v.transpose(0, 1)).view(q.shape)
    for w, (_, ov) in zip(rest, own, strict=True):
        out = out + w * ov.transpose(0, 1)[:, None]
    return out.permute(2, 0, 1, 3).reshape(m, heads * d)


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x[rows] for distinct rows [n]: a gradient by copying, which is the same in every run."""
    return _TakeRows.apply(x, rows)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, rows):  # noqa: ANN001, ANN205
        ctx.save_for_backward(rows)
        ctx.count = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad):  # noqa: ANN001, ANN205
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, rows, grad), None
