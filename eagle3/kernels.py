# ruff: noqa: ANN001, ANN202, SIM108 (kernel arguments are pointers and numbers; a kernel branches by `if`)
"""Triton kernels of the training step, for a GPU (or, slowly, anywhere under TRITON_INTERPRET=1).

Each computes what the plain torch beside its call in `eagle3.ops` or `eagle3.loss` does, in fp32 inside, rounded once.
None of them depends on a shape at compile time except head and hidden sizes, so batches of any lengths and masks
reuse the same binaries. None uses atomics: a run repeats bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from eagle3.loss import Targets
    from eagle3.ops import KeyRanges, Rotary, Shared

LOG2_E = 1.4426950408889634
VOCABULARY_BLOCK, VOCABULARY_WARPS = 4096, 16
COLUMN_BLOCK = 1024
OWN_ROWS = 32


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


# --- residual sum and RMSNorm --------------------------------------------------------------------------------------


@triton.jit
def _add_norm_forward(
    x, branch, weight, total, normed, rstd, size, eps, HAS_BRANCH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = row * size + column
    value = tl.load(x + at, inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        value += tl.load(branch + at, inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + at, value, inside)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    tl.store(rstd + row, scale)
    tl.store(normed + at, value * scale * tl.load(weight + column, inside, other=0.0), inside)


@triton.jit
def _add_norm_backward(
    total, weight, rstd, grad_total, grad_normed, grad, grad_weight, rows, size,
    HAS_TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes every num_programs-th row and leaves its own sum for the weight's gradient."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    w = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    for turn in range(tl.cdiv(rows - program, tl.num_programs(0))):
        row = program + turn * tl.num_programs(0)
        at = row * size + column
        scale = tl.load(rstd + row)
        unit = tl.load(total + at, inside, other=0.0).to(tl.float32) * scale
        out = tl.load(grad_normed + at, inside, other=0.0).to(tl.float32)
        weight_sum += out * unit
        out *= w
        result = scale * (out - unit * (tl.sum(out * unit) / size))
        if HAS_TOTAL:
            result += tl.load(grad_total + at, inside, other=0.0).to(tl.float32)
        tl.store(grad + at, result, inside)
    tl.store(grad_weight + program * size + column, weight_sum, inside)


class AddNorm(torch.autograd.Function):
    """(x + branch, RMSNorm(x + branch) * weight); x itself comes back where there is no branch."""

    @staticmethod
    def forward(ctx: Any, x, branch, weight, eps):  # noqa: ANN001, ANN205
        ctx.set_materialize_grads(False)
        rows, size = x.shape
        total = x if branch is None else torch.empty_like(x)
        normed = torch.empty_like(x)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(size)
        _add_norm_forward[(rows,)](
            x, branch, weight, total, normed, rstd, size, eps, branch is not None, block, num_warps=_warps(block)
        )
        ctx.has_branch = branch is not None
        ctx.save_for_backward(total, weight, rstd)
        return total, normed

    @staticmethod
    def backward(ctx: Any, grad_total, grad_normed):  # noqa: ANN001, ANN205
        total, weight, rstd = ctx.saved_tensors
        rows, size = total.shape
        if grad_normed is None:
            return grad_total, grad_total if ctx.has_branch else None, None, None
        block = triton.next_power_of_2(size)
        programs = min(rows, 2 * _multiprocessors(total.device))
        grad = torch.empty_like(total)
        grad_weight = torch.empty(programs, size, dtype=torch.float32, device=total.device)
        has_total = grad_total is not None
        grad_total = grad_total.contiguous() if has_total else None
        _add_norm_backward[(programs,)](
            total, weight, rstd, grad_total, grad_normed.contiguous(), grad, grad_weight, rows, size,
            has_total, block, num_warps=_warps(block),
        )  # fmt: skip
        return grad, grad if ctx.has_branch else None, grad_weight.sum(0).to(weight.dtype), None


def _warps(block: int) -> int:
    return max(4, min(16, block // 512))


# --- gated activation ----------------------------------------------------------------------------------------------


@triton.jit
def _swiglu_forward(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, inside).to(tl.float32)
    tl.store(out + row * size + column, gate * tl.sigmoid(gate) * up, inside)


@triton.jit
def _swiglu_backward(gate_up, grad_out, grad, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    at_gate = row * 2 * size + column
    gate = tl.load(gate_up + at_gate, inside).to(tl.float32)
    up = tl.load(gate_up + at_gate + size, inside).to(tl.float32)
    g = tl.load(grad_out + row * size + column, inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(grad + at_gate, g * up * (sigmoid + silu * (1 - sigmoid)), inside)
    tl.store(grad + at_gate + size, g * silu, inside)
    tl.store(out + row * size + column, silu * up, inside)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.swiglu`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    _swiglu_forward[(rows, triton.cdiv(size, COLUMN_BLOCK))](gate_up, out, size, COLUMN_BLOCK)
    return out


def swiglu_backward(gate_up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.swiglu_backward`."""
    rows, size = grad.shape
    grad_gate_up, out = torch.empty_like(gate_up), torch.empty_like(grad)
    grid = (rows, triton.cdiv(size, COLUMN_BLOCK))
    _swiglu_backward[grid](gate_up, grad.contiguous(), grad_gate_up, out, size, COLUMN_BLOCK)
    return grad_gate_up, out


# --- projections of the two halves, rotated ------------------------------------------------------------------------


@triton.jit
def _rotate_forward(
    x, x_stride, embedded, embedded_stride, tokens, positions, cos, sin, out, heads,
    HALF: tl.constexpr, TURN: tl.constexpr, HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] [heads, 2 * HALF] = rotation by positions[row] of x[row] + embedded[tokens[row]]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    j = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < heads) & (j < HALF)
    at = head * (2 * HALF) + j
    embedded += tl.load(tokens + row) * embedded_stride
    a = tl.load(x + row * x_stride + at, inside, other=0.0).to(tl.float32)
    b = tl.load(x + row * x_stride + at + HALF, inside, other=0.0).to(tl.float32)
    a += tl.load(embedded + at, inside, other=0.0).to(tl.float32)
    b += tl.load(embedded + at + HALF, inside, other=0.0).to(tl.float32)
    if TURN:
        position = tl.load(positions + row) * HALF
        c = tl.load(cos + position + j, j < HALF, other=0.0)
        s = tl.load(sin + position + j, j < HALF, other=0.0)
        a, b = a * c - b * s, b * c + a * s
    out += row * heads * (2 * HALF)
    tl.store(out + at, a, inside)
    tl.store(out + at + HALF, b, inside)


@triton.jit
def _rotate_backward(
    grad_out, grad_x, x_stride, grad_embedded, embedded_stride, tokens, positions, cos, sin, heads,
    HALF: tl.constexpr, TURN: tl.constexpr, HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """grad_x[row] = grad_out[row] rotated back, also added to grad_embedded[tokens[row]] (tokens are distinct)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    j = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (head < heads) & (j < HALF)
    at = head * (2 * HALF) + j
    grad_out += row * heads * (2 * HALF)
    a = tl.load(grad_out + at, inside, other=0.0).to(tl.float32)
    b = tl.load(grad_out + at + HALF, inside, other=0.0).to(tl.float32)
    if TURN:
        position = tl.load(positions + row) * HALF
        c = tl.load(cos + position + j, j < HALF, other=0.0)
        s = tl.load(sin + position + j, j < HALF, other=0.0)
        a, b = a * c + b * s, b * c - a * s
    grad_x += row * x_stride
    tl.store(grad_x + at, a, inside)
    tl.store(grad_x + at + HALF, b, inside)
    grad_embedded += tl.load(tokens + row) * embedded_stride
    tl.store(grad_embedded + at, tl.load(grad_embedded + at, inside) + a, inside)
    tl.store(grad_embedded + at + HALF, tl.load(grad_embedded + at + HALF, inside) + b, inside)


class AddEmbeddingHalf(torch.autograd.Function):
    """See `ops.add_embedding_half`; the embedding half's gradient goes to `shared.grad`."""

    @staticmethod
    def forward(ctx: Any, x, embedded, shared: "Shared", column, tokens, rotary: "Rotary", positions, heads):  # noqa: ANN001, ANN205
        ctx.shared, ctx.column, ctx.rotary, ctx.heads = shared, column, rotary, heads
        ctx.save_for_backward(tokens, positions)
        ctx.x_shape = x.shape
        half = rotary.cos.shape[1]
        parts = []
        for start, (count, turn) in zip(_starts(heads, 2 * half), heads, strict=True):
            out = x.new_empty(len(x), count, 2 * half)
            grid, blocks = _head_grid(len(x), count, half)
            _rotate_forward[grid](
                x[:, start:], x.stride(0), embedded[:, column + start :], embedded.stride(0), tokens, positions,
                rotary.cos, rotary.sin, out, count, half, turn, **blocks,
            )  # fmt: skip
            parts.append(out)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads):  # noqa: ANN002, ANN205
        tokens, positions = ctx.saved_tensors
        half, rotary = ctx.rotary.cos.shape[1], ctx.rotary
        grad_x = grads[0].new_empty(ctx.x_shape)
        into = ctx.shared.grad.tensor
        for start, (count, turn), grad in zip(_starts(ctx.heads, 2 * half), ctx.heads, grads, strict=True):
            grid, blocks = _head_grid(len(grad), count, half)
            _rotate_backward[grid](
                grad.contiguous(), grad_x[:, start:], grad_x.stride(0), into[:, ctx.column + start :], into.stride(0),
                tokens, positions, rotary.cos, rotary.sin, count, half, turn, **blocks,
            )  # fmt: skip
        return grad_x, *[None] * 7


def _starts(heads: Sequence[tuple[int, bool]], head_dim: int) -> list[int]:
    """The first column of each group of heads."""
    counts = [count for count, _ in heads]
    return [sum(counts[:i]) * head_dim for i in range(len(counts))]


def _head_grid(rows: int, heads: int, half: int) -> tuple[tuple[int, int], dict[str, int]]:
    half_block = triton.next_power_of_2(half)
    head_block = min(triton.next_power_of_2(heads), max(1, 2048 // half_block))
    return (rows, triton.cdiv(heads, head_block)), {"HEAD_BLOCK": head_block, "HALF_BLOCK": half_block}


# --- attention -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tiles:
    """Rows and keys of one block, warps and pipeline stages, of a kernel."""

    rows: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        return {"ROWS": self.rows, "KEYS": self.keys, "num_warps": self.warps, "num_stages": self.stages}


@cache
def _tiles(dtype: torch.dtype, head_dim: int, device: torch.device) -> dict[str, _Tiles]:
    """Chosen by measurement on an H200; smaller ones where shared memory is (SM120: 99 KB) or in fp32."""
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 0
    if dtype.itemsize == 2 and shared >= 160 << 10 and head_dim <= 128:
        return {"forward": _Tiles(64, 64, 4, 3), "query": _Tiles(64, 32, 4, 3), "key": _Tiles(64, 64, 4, 2)}
    if dtype.itemsize == 2 and head_dim <= 128:
        return {"forward": _Tiles(64, 64, 4, 2), "query": _Tiles(64, 32, 4, 2), "key": _Tiles(32, 64, 4, 2)}
    return {"forward": _Tiles(32, 32, 4, 1), "query": _Tiles(32, 32, 4, 1), "key": _Tiles(32, 32, 4, 1)}


@triton.jit
def _forward_keys(
    q, k, v, low, high, best, total, out, start, stop, kv_stride, scale, SIZE: tl.constexpr, MASKED: tl.constexpr,
    KEYS: tl.constexpr, SIZE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One pass of the online softmax over the keys start..stop; in base 2."""
    d = tl.arange(0, SIZE_BLOCK)
    for first in range(start, stop, KEYS):
        key = first + tl.arange(0, KEYS)
        inside = (key < stop)[:, None] & (d < SIZE)[None, :]
        at = key.to(tl.int64)[:, None] * kv_stride + d[None, :]
        keys = tl.load(k + at, inside, other=0.0)
        score = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        if MASKED:
            score = tl.where((key[None, :] >= low[:, None]) & (key[None, :] <= high[:, None]), score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)  # no key seen so far
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weight, 1)
        values = tl.load(v + at, inside, other=0.0)
        out = tl.dot(weight.to(values.dtype), values, out * shrink[:, None], input_precision=PRECISION)
        best = new_best
    return best, total, out


@triton.jit
def _attend_forward(
    q, k, v, own_k, own_v, out, lse, first, last, rows, scale, HEADS: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A block of rows and one head: their own keys, then the first step's keys first..last of each."""
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the longest ranges are the last of a sample
    head = tl.program_id(1)
    kv_head = head // GROUP
    kv_stride: tl.constexpr = HEADS // GROUP * SIZE
    row = begin + tl.arange(0, ROWS)
    d = tl.arange(0, SIZE_BLOCK)
    inside = (row < rows)[:, None] & (d < SIZE)[None, :]
    at_q = row.to(tl.int64)[:, None] * (HEADS * SIZE) + head * SIZE + d[None, :]
    at_own = row.to(tl.int64)[:, None] * kv_stride + kv_head * SIZE + d[None, :]
    query = tl.load(q + at_q, inside, other=0.0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, SIZE_BLOCK), tl.float32)
    for j in tl.static_range(len(own_k)):
        key = tl.load(own_k[j] + at_own, inside, other=0.0).to(tl.float32)
        score = tl.sum(query.to(tl.float32) * key, 1) * scale
        new_best = tl.maximum(best, score)
        shrink, weight = tl.exp2(best - new_best), tl.exp2(score - new_best)
        value = tl.load(own_v[j] + at_own, inside, other=0.0).to(tl.float32)
        acc = acc * shrink[:, None] + weight[:, None] * value
        total = total * shrink + weight
        best = new_best
    low = tl.load(first + row, row < rows, other=0)
    high = tl.load(last + row, row < rows, other=-1)
    final = tl.minimum(begin + ROWS, rows) - 1
    start, stop = tl.load(first + begin).to(tl.int32), tl.load(last + final).to(tl.int32) + 1
    seen_by_all = tl.maximum(tl.load(last + begin).to(tl.int32) + 1 - tl.load(first + final).to(tl.int32), 0)
    one_sample = tl.load(first + final) == tl.load(first + begin)
    middle = start + tl.where(one_sample, seen_by_all // KEYS * KEYS, 0)
    k += kv_head * SIZE
    v += kv_head * SIZE
    best, total, acc = _forward_keys(
        query, k, v, low, high, best, total, acc, start, middle, kv_stride, scale, SIZE, False,
        KEYS, SIZE_BLOCK, PRECISION,
    )  # fmt: skip
    best, total, acc = _forward_keys(
        query, k, v, low, high, best, total, acc, middle, stop, kv_stride, scale, SIZE, True,
        KEYS, SIZE_BLOCK, PRECISION,
    )  # fmt: skip
    tl.store(out + at_q, acc / total[:, None], inside)
    tl.store(lse + head.to(tl.int64) * rows + row, best + tl.log2(total), row < rows)


@triton.jit
def _query_keys(
    q, grad_out, k, v, low, high, lse, delta, grad, start, stop, kv_stride, scale, SIZE: tl.constexpr,
    MASKED: tl.constexpr, KEYS: tl.constexpr, SIZE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, SIZE_BLOCK)
    for first in range(start, stop, KEYS):
        key = first + tl.arange(0, KEYS)
        inside = (key < stop)[:, None] & (d < SIZE)[None, :]
        at = key.to(tl.int64)[:, None] * kv_stride + d[None, :]
        keys = tl.load(k + at, inside, other=0.0)
        values = tl.load(v + at, inside, other=0.0)
        weight = tl.exp2(tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale - lse[:, None])
        if MASKED:
            weight = tl.where((key[None, :] >= low[:, None]) & (key[None, :] <= high[:, None]), weight, 0.0)
        grad_weight = tl.dot(grad_out, tl.trans(values), input_precision=PRECISION)
        grad_score = weight * (grad_weight - delta[:, None])
        grad = tl.dot(grad_score.to(keys.dtype), keys, grad, input_precision=PRECISION)
    return grad


@triton.jit
def _attend_backward_query(
    q, k, v, own_k, own_v, out, grad_out, lse, delta, grad_q, first, last, rows, scale, root, HEADS: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries of one head; leaves delta = sum(out * grad_out) for the other kernels."""
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head = tl.program_id(1)
    kv_head = head // GROUP
    kv_stride: tl.constexpr = HEADS // GROUP * SIZE
    row = begin + tl.arange(0, ROWS)
    d = tl.arange(0, SIZE_BLOCK)
    inside = (row < rows)[:, None] & (d < SIZE)[None, :]
    at_q = row.to(tl.int64)[:, None] * (HEADS * SIZE) + head * SIZE + d[None, :]
    at_own = row.to(tl.int64)[:, None] * kv_stride + kv_head * SIZE + d[None, :]
    query = tl.load(q + at_q, inside, other=0.0)
    g = tl.load(grad_out + at_q, inside, other=0.0)
    row_delta = tl.sum(tl.load(out + at_q, inside, other=0.0).to(tl.float32) * g.to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * rows + row, row_delta, row < rows)
    row_lse = tl.load(lse + head.to(tl.int64) * rows + row, row < rows, other=float("inf"))
    grad = tl.zeros((ROWS, SIZE_BLOCK), tl.float32)
    for j in tl.static_range(len(own_k)):
        key = tl.load(own_k[j] + at_own, inside, other=0.0).to(tl.float32)
        value = tl.load(own_v[j] + at_own, inside, other=0.0).to(tl.float32)
        weight = tl.exp2(tl.sum(query.to(tl.float32) * key, 1) * scale - row_lse)
        grad_weight = tl.sum(g.to(tl.float32) * value, 1)
        grad += (weight * (grad_weight - row_delta))[:, None] * key
    low = tl.load(first + row, row < rows, other=0)
    high = tl.load(last + row, row < rows, other=-1)
    final = tl.minimum(begin + ROWS, rows) - 1
    start, stop = tl.load(first + begin).to(tl.int32), tl.load(last + final).to(tl.int32) + 1
    seen_by_all = tl.maximum(tl.load(last + begin).to(tl.int32) + 1 - tl.load(first + final).to(tl.int32), 0)
    one_sample = tl.load(first + final) == tl.load(first + begin)
    middle = start + tl.where(one_sample, seen_by_all // KEYS * KEYS, 0)
    k += kv_head * SIZE
    v += kv_head * SIZE
    grad = _query_keys(
        query, g, k, v, low, high, row_lse, row_delta, grad, start, middle, kv_stride, scale, SIZE, False,
        KEYS, SIZE_BLOCK, PRECISION,
    )  # fmt: skip
    grad = _query_keys(
        query, g, k, v, low, high, row_lse, row_delta, grad, middle, stop, kv_stride, scale, SIZE, True,
        KEYS, SIZE_BLOCK, PRECISION,
    )  # fmt: skip
    tl.store(grad_q + at_q, grad * root, inside)


@triton.jit
def _attend_backward_own(
    q, own_k, own_v, grad_own_k, grad_own_v, grad_out, lse, delta, rows, scale, root, HEADS: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of the own keys and values of a block of rows, for one kv head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kv_head = tl.program_id(1)
    d = tl.arange(0, SIZE_BLOCK)
    inside = (row < rows)[:, None] & (d < SIZE)[None, :]
    at_own = row.to(tl.int64)[:, None] * (HEADS // GROUP * SIZE) + kv_head * SIZE + d[None, :]
    for j in tl.static_range(len(own_k)):
        key = tl.load(own_k[j] + at_own, inside, other=0.0).to(tl.float32)
        value = tl.load(own_v[j] + at_own, inside, other=0.0).to(tl.float32)
        grad_key = tl.zeros((ROWS, SIZE_BLOCK), tl.float32)
        grad_value = tl.zeros((ROWS, SIZE_BLOCK), tl.float32)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            at_q = row.to(tl.int64)[:, None] * (HEADS * SIZE) + head * SIZE + d[None, :]
            at_row = head.to(tl.int64) * rows + row
            query = tl.load(q + at_q, inside, other=0.0).to(tl.float32)
            g = tl.load(grad_out + at_q, inside, other=0.0).to(tl.float32)
            row_lse = tl.load(lse + at_row, row < rows, other=float("inf"))
            weight = tl.exp2(tl.sum(query * key, 1) * scale - row_lse)
            grad_value += weight[:, None] * g
            grad_score = weight * (tl.sum(g * value, 1) - tl.load(delta + at_row, row < rows, other=0.0))
            grad_key += grad_score[:, None] * query
        grad_key = grad_key * root + tl.load(grad_own_k[j] + at_own, inside, other=0.0)
        grad_value += tl.load(grad_own_v[j] + at_own, inside, other=0.0)
        tl.store(grad_own_k[j] + at_own, grad_key, inside)
        tl.store(grad_own_v[j] + at_own, grad_value, inside)


@triton.jit
def _key_rows(
    q, grad_out, keys, values, lse, delta, first, last, key, grad_k, grad_v, start, stop, q_stride, scale,
    SIZE: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, SIZE_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, SIZE_BLOCK)
    for begin in range(start, stop, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = (row < stop)[:, None] & (d < SIZE)[None, :]
        at = row.to(tl.int64)[:, None] * q_stride + d[None, :]
        query = tl.load(q + at, inside, other=0.0)
        row_lse = tl.load(lse + row, row < stop, other=float("inf"))
        weight = tl.exp2(tl.dot(keys, tl.trans(query), input_precision=PRECISION) * scale - row_lse[None, :])
        if MASKED:
            low = tl.load(first + row, row < stop, other=0)
            high = tl.load(last + row, row < stop, other=-1)
            weight = tl.where((key[:, None] >= low[None, :]) & (key[:, None] <= high[None, :]), weight, 0.0)
        g = tl.load(grad_out + at, inside, other=0.0)
        grad_v = tl.dot(weight.to(g.dtype), g, grad_v, input_precision=PRECISION)
        grad_weight = tl.dot(values, tl.trans(g), input_precision=PRECISION)
        row_delta = tl.load(delta + row, row < stop, other=0.0)
        grad_score = weight * (grad_weight - row_delta[None, :])
        grad_k = tl.dot(grad_score.to(query.dtype), query, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit
def _attend_backward_key(
    q, k, v, grad_out, lse, delta, grad_k, grad_v, first, last, bounds, rows, keys, scale, root, HEADS: tl.constexpr,
    GROUP: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """Adds the gradients of a block of first-step keys and values of one kv head to grad_k and grad_v (fp32).

    `bounds` [blocks, 4]: the rows that see any key of a block, and in between those that see all of them.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    kv_stride: tl.constexpr = HEADS // GROUP * SIZE
    key = block * KEYS + tl.arange(0, KEYS)
    d = tl.arange(0, SIZE_BLOCK)
    inside = (key < keys)[:, None] & (d < SIZE)[None, :]
    at = key.to(tl.int64)[:, None] * kv_stride + kv_head * SIZE + d[None, :]
    start = tl.load(bounds + block * 4)
    full = tl.load(bounds + block * 4 + 1)
    full_stop = tl.load(bounds + block * 4 + 2)
    stop = tl.load(bounds + block * 4 + 3)
    if start < stop:
        block_k = tl.load(k + at, inside, other=0.0)
        block_v = tl.load(v + at, inside, other=0.0)
        sum_k = tl.zeros((KEYS, SIZE_BLOCK), tl.float32)
        sum_v = tl.zeros((KEYS, SIZE_BLOCK), tl.float32)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            head_q, head_g = q + head * SIZE, grad_out + head * SIZE
            head_lse, head_delta = lse + head.to(tl.int64) * rows, delta + head.to(tl.int64) * rows
            sum_k, sum_v = _key_rows(
                head_q, head_g, block_k, block_v, head_lse, head_delta, first, last, key, sum_k, sum_v, start, full,
                HEADS * SIZE, scale, SIZE, True, ROWS, SIZE_BLOCK, PRECISION,
            )  # fmt: skip
            sum_k, sum_v = _key_rows(
                head_q, head_g, block_k, block_v, head_lse, head_delta, first, last, key, sum_k, sum_v, full, full_stop,
                HEADS * SIZE, scale, SIZE, False, ROWS, SIZE_BLOCK, PRECISION,
            )  # fmt: skip
            sum_k, sum_v = _key_rows(
                head_q, head_g, block_k, block_v, head_lse, head_delta, first, last, key, sum_k, sum_v, full_stop, stop,
                HEADS * SIZE, scale, SIZE, True, ROWS, SIZE_BLOCK, PRECISION,
            )  # fmt: skip
        tl.store(grad_k + at, tl.load(grad_k + at, inside, other=0.0) + sum_k * root, inside)
        tl.store(grad_v + at, tl.load(grad_v + at, inside, other=0.0) + sum_v, inside)


def _row_bounds(ranges: "KeyRanges", keys: int, block: int) -> torch.Tensor:
    """For each block of keys, int32 [blocks, 4]: rows start..stop see some key of it, full..full_stop all of them.

    Rows are ascending by both ends of their range, so each bound is a place in one of the two.
    """
    low = torch.arange(0, keys, block, device=ranges.first.device)
    high = (low + block - 1).clamp_max(keys - 1)
    start = torch.searchsorted(ranges.last, low)
    stop = torch.searchsorted(ranges.first, high, right=True)
    full = torch.searchsorted(ranges.last, high).minimum(stop)
    full_stop = torch.searchsorted(ranges.first, low, right=True).clamp_max(stop).maximum(full)
    return torch.stack([start, full.maximum(start), full_stop.maximum(start), stop], 1).to(torch.int32)


class Attend(torch.autograd.Function):
    """See `ops.attend`; `shared` are the first step's keys and values, then own ones in turn, tensors beside them.

    Their gradients go to their buffers.
    """

    @staticmethod
    def forward(ctx: Any, q, ranges: "KeyRanges", shared: "list[Shared]", k, v, *own):  # noqa: ANN001, ANN002, ANN205
        rows, heads, size = q.shape
        out = torch.empty_like(q)
        lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
        tiles = _tiles(q.dtype, size, q.device)["forward"]
        _attend_forward[(triton.cdiv(rows, tiles.rows), heads)](
            q, k, v, own[::2], own[1::2], out, lse, ranges.first, ranges.last, rows, size**-0.5 * LOG2_E,
            **_sizes(q, k), **tiles.options(), PRECISION=_precision(q),
        )  # fmt: skip
        ctx.ranges, ctx.buffers = ranges, [each.grad for each in shared]
        ctx.save_for_backward(q, k, v, out, lse, *own)
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, grad_out):  # noqa: ANN001, ANN205
        q, k, v, out, lse, *own = ctx.saved_tensors
        grad_k, grad_v, *grad_own = [buffer.tensor for buffer in ctx.buffers]
        own_k, own_v = tuple(own[::2]), tuple(own[1::2])
        grad_out, first, last = grad_out.contiguous(), ctx.ranges.first, ctx.ranges.last
        (rows, heads, size), (total, kv_heads, _) = q.shape, k.shape
        grad_q, delta = torch.empty_like(q), torch.empty_like(lse)
        scale, root = size**-0.5 * LOG2_E, size**-0.5
        tiles, shape, precision = _tiles(q.dtype, size, q.device), _sizes(q, k), {"PRECISION": _precision(q)}
        _attend_backward_query[(triton.cdiv(rows, tiles["query"].rows), heads)](
            q, k, v, own_k, own_v, out, grad_out, lse, delta, grad_q, first, last, rows, scale, root,
            **shape, **tiles["query"].options(), **precision,
        )  # fmt: skip
        if own:
            _attend_backward_own[(triton.cdiv(rows, OWN_ROWS), kv_heads)](
                q, own_k, own_v, tuple(grad_own[::2]), tuple(grad_own[1::2]), grad_out, lse, delta, rows, scale, root,
                **shape, ROWS=OWN_ROWS, num_warps=4,
            )  # fmt: skip
        bounds = _row_bounds(ctx.ranges, total, tiles["key"].keys)
        _attend_backward_key[(len(bounds), kv_heads)](
            q, k, v, grad_out, lse, delta, grad_k, grad_v, first, last, bounds, rows, total, scale, root,
            **shape, **tiles["key"].options(), **precision,
        )  # fmt: skip
        return grad_q, *[None] * (4 + len(own))


def _sizes(q: torch.Tensor, k: torch.Tensor) -> dict[str, int]:
    heads, size = q.shape[1:]
    block = max(16, triton.next_power_of_2(size))
    return {"HEADS": heads, "GROUP": heads // k.shape[1], "SIZE": size, "SIZE_BLOCK": block}


def _precision(tensor: torch.Tensor) -> str:
    """Full fp32 products for fp32 tensors, instead of tf32."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


# --- losses --------------------------------------------------------------------------------------------------------


@triton.jit
def _load_logits(row, column, size):
    return tl.load(row + column, column < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _teacher_stats(logits, lse, neg_entropy, label, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best, total, dot, best_at = float("-inf"), 0.0, 0.0, 0
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = _load_logits(logits + row * size, column, size)
        block_best, block_at = tl.max(value, 0, return_indices=True)
        best_at = tl.where(block_best > best, start + block_at, best_at)
        new_best = tl.maximum(best, block_best)
        weight = tl.exp(value - new_best)
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weight)
        dot = dot * shrink + tl.sum(tl.where(column < size, weight * value, 0.0))
        best = new_best
    row_lse = best + tl.log(total)
    tl.store(lse + row, row_lse)
    tl.store(neg_entropy + row, dot / total - row_lse)
    tl.store(label + row, best_at)


@triton.jit
def _draft_stats(logits, teacher, teacher_lse, size, LOSS: tl.constexpr, BLOCK: tl.constexpr):
    """Maximum and log-sum-exp of a row of logits, and their mean under the teacher (not for ce).

    Sums stay spread over the block's lanes until the end; only the running maximum is reduced at every block.
    """
    best = float("-inf")
    lanes, dots = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = _load_logits(logits, column, size)
        new_best = tl.maximum(best, tl.max(value, 0))
        lanes = lanes * tl.exp(best - new_best) + tl.exp(value - new_best)
        best = new_best
        if LOSS != 1:
            p = tl.exp(_load_logits(teacher, column, size) - teacher_lse)
            dots += tl.where(column < size, p * value, 0.0)
    return best, best + tl.log(tl.sum(lanes)), tl.sum(dots)


@triton.jit
def _overlap(logits, draft_lse, teacher, teacher_lse, size, BLOCK: tl.constexpr):
    """sum min(p, q), and the sum of q over q < p."""
    overlap, below = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        p = tl.exp(_load_logits(teacher, column, size) - teacher_lse)
        q = tl.exp(_load_logits(logits, column, size) - draft_lse)
        overlap += tl.minimum(p, q)
        below += tl.where(q < p, q, 0.0)
    return tl.sum(overlap), tl.sum(below)


@triton.jit
def _score_rows(
    logits, teacher, lse, neg_entropy, label, target_row, row_weight, losses, correct, size, LK_DECAY,
    LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its loss, whether its argmax is the teacher's, and its logits replaced by weight x gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * size
    target = tl.load(target_row + row)
    if target < 0:
        for start in range(0, size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(logits + column, tl.zeros((BLOCK,), tl.float32), column < size)
        tl.store(losses + row, 0.0)
        tl.store(correct + row, False)
    else:
        teacher += target * size
        teacher_lse = tl.load(lse + target)
        taught = tl.load(label + target)
        taught_logit = tl.load(logits + taught).to(tl.float32)
        best, draft_lse, dot = _draft_stats(logits, teacher, teacher_lse, size, LOSS, BLOCK)
        if LOSS == 1:
            loss = draft_lse - taught_logit
        else:
            loss = tl.load(neg_entropy + target) - dot + draft_lse
        mix, below = 1.0, 0.0
        if LOSS == 2:
            accepted, below = _overlap(logits, draft_lse, teacher, teacher_lse, size, BLOCK)
            mix = tl.exp(-LK_DECAY * accepted)
            loss = mix * loss + (1 - mix) * (1 - accepted)
        tl.store(losses + row, loss)
        weight = tl.load(row_weight)
        earlier = tl.zeros((BLOCK,), tl.int32)  # columns before the taught one that are as likely
        for start in range(0, size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = _load_logits(logits, column, size)
            earlier |= ((value == best) & (column < taught)).to(tl.int32)
            q = tl.exp(value - draft_lse)
            if LOSS == 1:
                grad = q - tl.where(column == taught, 1.0, 0.0)
            else:
                p = tl.exp(_load_logits(teacher, column, size) - teacher_lse)
                grad = q - p
                if LOSS == 2:
                    grad = mix * grad + (1 - mix) * q * (below - tl.where(q < p, 1.0, 0.0))
            tl.store(logits + column, grad * weight, column < size)
        tl.store(correct + row, (taught_logit == best) & (tl.max(earlier, 0) == 0))


def teacher_stats(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """lse, sum p log p and argmax of logits [n, D], all [n]."""
    rows, size = logits.shape
    lse, neg_entropy = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    label = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _teacher_stats[(rows,)](logits, lse, neg_entropy, label, size, _vocabulary_block(size), num_warps=VOCABULARY_WARPS)
    return lse, neg_entropy, label


def score_rows(
    logits: torch.Tensor, targets: "Targets", target_row: torch.Tensor, weight: torch.Tensor, loss: int, lk_decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `loss.score_rows`; `loss` 0: kl, 1: ce, 2: lk."""
    rows, size = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    correct = torch.empty(rows, dtype=torch.bool, device=logits.device)
    _score_rows[(rows,)](
        logits, targets.logits, targets.lse, targets.neg_entropy, targets.label, target_row, weight, losses, correct,
        size, lk_decay, loss, _vocabulary_block(size), num_warps=VOCABULARY_WARPS,
    )  # fmt: skip
    return losses, correct


def _vocabulary_block(size: int) -> int:
    return min(VOCABULARY_BLOCK, triton.next_power_of_2(size))
