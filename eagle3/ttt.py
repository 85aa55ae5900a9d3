"""Training-time test: the loss of a draft over all of its steps, computed only where it counts.

For a sample x_0..x_{T-1}, with f_t the three auxiliary states and g_t the last layer's state at t, row t at step i
    reads    the embedding of x_{t+1+i}, and fc(f_t) (i = 0) or what row t gave at step i-1
    sees     the first step's keys of rows <= t of its sample, and its own keys of steps 1..i, at position t+i
    predicts x_{t+2+i}, taught by softmax(head(final_norm(g_{t+1+i}))) over the draft vocabulary
    counts   if the target generated x_{t+1}..x_{t+2+i} without a gap (loss mask 1), all of the same sample
so in serving terms: x_{t+1} was sampled by the target, and the draft is at its (i+1)-th guess since.

What is saved, exactly (EAGLE-3's loss is unchanged):
- the embedding half of q, k and v depends on the token alone: computed once, not at every step;
- rows that count at no step give only their first keys and values; every later row of work is a row that counts;
- a row that counts at step i also counts at all steps before, and row t+1 then counts up to step i-1: so the teacher's
  logits are needed only at t+1 for the rows that count at step 0, once, and row number r of those finds its
  teacher of step i at number r+i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn import functional as F

from eagle3 import ops
from eagle3.batches import PackedBatch
from eagle3.draft import Draft, Teacher
from eagle3.layers import NUM_DRAFT_LAYERS
from eagle3.loss import LOSSES, Loss, Targets, head_loss

KEEP_SHARE = 0.95  # rows that no longer count are dropped once those that do are at most this share of all at work


@dataclass(frozen=True)
class StepOutput:
    """`loss`: the weighted scalar to differentiate. The rest is detached, [steps], over the rows that count at a step.

    `loss_sums`: unweighted; `correct`: rows whose argmax is the teacher's; `accepted`: rows correct at this step and
    all before; `counts`: rows.
    """

    loss: torch.Tensor
    loss_sums: torch.Tensor
    correct: torch.Tensor
    accepted: torch.Tensor
    counts: torch.Tensor


def supervised_depth(loss_mask: torch.Tensor, offsets: Sequence[int], steps: int) -> torch.Tensor:
    """At how many steps, 0 to `steps`, each row of a packed batch counts: int64 [T], from loss_mask bool [T]."""
    total = len(loss_mask)
    index = torch.arange(total + 1, device=loss_mask.device)
    bounds = torch.tensor([*offsets, total], device=loss_mask.device)
    end = bounds[torch.searchsorted(bounds, index[:-1], right=True)]  # of the row's own sample
    gap = torch.where(loss_mask & (index[:-1] < offsets[-1]), total, index[:-1])
    next_gap = gap.flip(0).cummin(0).values.flip(0)
    run = F.pad(torch.minimum(next_gap, end) - index[:-1], (0, 1))  # generated tokens in a row from here on
    inside = index[1:] < end  # the row's next token is of the same sample
    return ((run[1:] - 1) * inside).clamp(0, steps)


def supervised_counts(loss_mask: torch.Tensor, offsets: Sequence[int], steps: int) -> torch.Tensor:
    """N_i, the number of rows that count at each step: int64 [steps]."""
    return counts_of(supervised_depth(loss_mask, offsets, steps), steps)


def counts_of(depth: torch.Tensor, steps: int) -> torch.Tensor:
    """Rows of these depths that count at each step: int64 [steps]."""
    return (depth[:, None] > torch.arange(steps, device=depth.device)).sum(0)


@dataclass(frozen=True)
class Rows:
    """The rows at work at some step, ascending: packed index, their sample's first row, depth, and number at step 0."""

    index: torch.Tensor
    first: torch.Tensor
    depth: torch.Tensor
    number: torch.Tensor

    def __len__(self) -> int:
        return len(self.index)

    def take(self, kept: torch.Tensor) -> Self:
        return type(self)(self.index[kept], self.first[kept], self.depth[kept], self.number[kept])

    def tokens(self, step: int, total: int) -> torch.Tensor:
        """The tokens x_{t+1+step} that the rows read; distinct, and any for rows that no longer count."""
        return (self.index + 1 + step) % total

    def positions(self, step: int) -> torch.Tensor:
        return self.index - self.first + step

    def target_row(self, step: int) -> torch.Tensor:
        """The number of the row whose teacher teaches this one at a step; -1 where it does not count."""
        return torch.where(self.depth > step, self.number + step, -1)

    @property
    def key_ranges(self) -> ops.KeyRanges:
        return ops.KeyRanges(self.first, self.index)


@dataclass(frozen=True)
class Layout:
    """Where a batch's rows lie: each packed row's position in its sample [T], the rows that count at step 0, and how
    many count at each step."""

    positions: torch.Tensor
    rows: Rows
    counts: list[int]

    @classmethod
    def of(cls, batch: PackedBatch, steps: int) -> Self:
        """Found where the loss mask is: on the CPU, nothing has to wait for the GPU."""
        depth = supervised_depth(batch.loss_mask, batch.offsets, steps)
        bounds = torch.tensor([*batch.offsets, len(depth)], device=depth.device)  # padding is one more sample
        starts = bounds[:-1].repeat_interleave(bounds.diff(), output_size=len(depth))
        index = depth.nonzero()[:, 0]
        rows = torch.stack([index, starts[index], depth[index], torch.arange(len(index), device=depth.device)])
        positions = torch.arange(len(depth), device=depth.device) - starts
        device = batch.hidden_states.device
        return cls(_move(positions, device), Rows(*_move(rows, device)), counts_of(depth, steps).tolist())


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To a GPU by way of pinned memory: a plain copy would wait for all work that is queued there."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def training_loss(
    draft: Draft, teacher: Teacher, batch: PackedBatch, weights: torch.Tensor, *, loss: Loss = "kl"
) -> StepOutput:
    """The loss of `len(weights)` steps over a packed batch: sum_i weights[i] * (sum of the losses of rows that count).

    `weights` [steps] on the batch's device must be finite; for the loss of EAGLE-3 they are 0.8**i / N_i, with N_i
    the sum of `supervised_counts` over all batches and ranks of an optimizer step. `draft` may be wrapped in DDP or
    FSDP. A batch without a row that counts gives a zero loss with zero gradients for every trained weight.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss: expected one of {', '.join(LOSSES)}, found {loss!r}")
    return draft(_training_loss, teacher, batch, weights, loss)


def _training_loss(draft: Draft, teacher: Teacher, batch: PackedBatch, weights: torch.Tensor, loss: Loss) -> StepOutput:
    layout = Layout.of(batch, len(weights))
    if not len(layout.rows):
        return _no_rows(draft, weights)
    taught = batch.hidden_states[layout.rows.index + 1, NUM_DRAFT_LAYERS]
    targets = Targets.of(teacher.logits(taught, draft.compute_dtype))
    return _Unroll(draft, batch, layout, len(weights)).loss(targets, weights, loss)


def _no_rows(draft: Draft, weights: torch.Tensor) -> StepOutput:
    loss = sum((p * 0).sum() for p in draft.parameters() if p.requires_grad)
    zeros = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
    return StepOutput(loss, zeros.float(), zeros, zeros, zeros)


@dataclass(frozen=True)
class _Weights:
    """The draft's matrices in the compute dtype. `embed` and `hidden` are the two halves of q, k, v on one another."""

    fc: ops.Weight
    embed: ops.Weight
    hidden: ops.Weight
    out: ops.Weight
    gate_up: ops.Weight
    down: ops.Weight
    head: ops.Weight

    @classmethod
    def of(cls, draft: Draft) -> Self:
        dtype, layer, hidden_size = draft.compute_dtype, draft.layer, draft.config.hidden_size
        attention, mlp = layer.self_attn, layer.mlp
        halves = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        qkv = ops.cast_weight(halves, dtype, scale=layer.input_layernorm.weight)
        return cls(
            fc=ops.cast_weight([draft.fc.weight], dtype, scale=draft.input_scale),
            embed=qkv.columns(None, hidden_size),
            hidden=qkv.columns(hidden_size, None),
            out=ops.cast_weight([attention.o_proj.weight], dtype),
            gate_up=ops.cast_weight([mlp.gate_proj.weight, mlp.up_proj.weight], dtype),
            down=ops.cast_weight([mlp.down_proj.weight], dtype),
            head=ops.cast_weight([draft.lm_head.weight], dtype),
        )


class _Unroll:
    """One forward pass over all steps of a batch."""

    def __init__(self, draft: Draft, batch: PackedBatch, layout: Layout, steps: int) -> None:
        self.draft, self.config, self.layer = draft, draft.config, draft.layer
        self.positions, self.rows, self.counts = layout.positions, layout.rows, layout.counts
        self.weights = _Weights.of(draft)
        self.total = len(batch.input_ids)
        self.rotary = ops.Rotary(*draft.rotary_table(self._longest(batch.offsets) + steps))
        self.q_heads = (self.config.num_heads, True)
        self.kv_heads = [(self.config.num_kv_heads, True), (self.config.num_kv_heads, False)]
        self.embedded = ops.Shared(self._embedding_half(batch.input_ids))
        self.own: list[tuple[ops.Shared, ops.Shared]] = []
        self.hidden, self.normed = self._fused_states(batch)

    def loss(self, targets: Targets, weights: torch.Tensor, loss: Loss) -> StepOutput:
        """Runs the steps, until no row counts any more."""
        total, steps = torch.zeros_like(weights[0]), len(weights)
        sums = torch.zeros_like(weights)
        correct, accepted = torch.zeros(2, steps, dtype=torch.int64, device=weights.device)
        alive = torch.ones(len(self.rows), dtype=torch.bool, device=weights.device)
        counts = counts_of(self.rows.depth, steps)
        q = self._first_projections()
        for step, count in enumerate(self.counts):
            if not count:
                break
            if step:
                alive = self._drop_rows(step, count, alive)
                q = self._projections(step)
            target_row = self.rows.target_row(step)
            output = self._layer(q)
            term, losses, right = head_loss(output, self.weights.head, targets, target_row, weights[step], loss)
            alive = alive & right
            total = total + term
            sums[step], correct[step], accepted[step] = losses.sum(), right.sum(), alive.sum()
        return StepOutput(total, sums, correct, accepted, counts)

    def _longest(self, offsets: Sequence[int]) -> int:
        return max(b - a for a, b in zip([0, *offsets], [*offsets, self.total], strict=True))

    def _embedding_half(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The embedding half of q, k, v of every token [T, C]; the norm's weight is folded into the matrix."""
        dtype = self.draft.compute_dtype
        wide = torch.promote_types(dtype, torch.float32)
        embeddings = F.embedding(input_ids, self.draft.embed_tokens.weight).to(wide)
        unit = F.rms_norm(embeddings, embeddings.shape[-1:], eps=self.config.norm_eps).to(dtype)
        return ops.linear(unit, self.weights.embed)

    def _fused_states(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """fc of the three states of every row [T, H], and that normed; the input norms' weights are folded into fc."""
        states = batch.hidden_states[:, :NUM_DRAFT_LAYERS].to(self.draft.compute_dtype)
        if self.config.fc_norm:
            states = F.rms_norm(states, states.shape[2:], eps=self.config.norm_eps)
        states = states.flatten(1)
        if self.config.norm_before_fc:
            states = F.rms_norm(states, states.shape[1:], eps=self.config.norm_eps)
        return self._norm(ops.linear(states, self.weights.fc), None, self.layer.hidden_norm)

    def _norm(self, x: torch.Tensor, branch: torch.Tensor | None, norm: torch.nn.RMSNorm) -> tuple:
        return ops.add_norm(x, branch, norm.weight, self.config.norm_eps)

    def _first_projections(self) -> torch.Tensor:
        """Keys and values of all rows, kept; then only the rows that count go on. Returns their queries."""
        q_size = self.config.q_size
        tokens = (torch.arange(self.total, device=self.positions.device) + 1) % self.total
        kv = ops.linear(self.normed, self.weights.hidden.rows(q_size, None))
        keys, values = self._with_embedding(kv, q_size, tokens, self.positions, self.kv_heads)
        self.keys, self.values = ops.Shared(keys), ops.Shared(values)
        self.normed = ops.take_rows(self.normed, self.rows.index)
        if not self.config.norm_before_residual:
            self.hidden = ops.take_rows(self.hidden, self.rows.index)
        q = ops.linear(self.normed, self.weights.hidden.rows(None, q_size))
        return self._with_embedding(q, 0, self.rows.tokens(0, self.total), self.rows.positions(0), [self.q_heads])[0]

    def _projections(self, step: int) -> torch.Tensor:
        """Queries of a later step; its keys and values join the rows' own."""
        self.hidden, self.normed = self._norm(self.hidden, None, self.layer.hidden_norm)
        tokens, positions = self.rows.tokens(step, self.total), self.rows.positions(step)
        qkv = ops.linear(self.normed, self.weights.hidden)
        q, k, v = self._with_embedding(qkv, 0, tokens, positions, [self.q_heads, *self.kv_heads])
        self.own.append((ops.Shared(k, k.dtype), ops.Shared(v, v.dtype)))
        return q

    def _with_embedding(
        self, x: torch.Tensor, column: int, tokens: torch.Tensor, positions: torch.Tensor, heads: list[tuple[int, bool]]
    ) -> list[torch.Tensor]:
        return ops.add_embedding_half(x, self.embedded, column, tokens, self.rotary, positions, heads)

    def _layer(self, q: torch.Tensor) -> torch.Tensor:
        """Attention and MLP; leaves the next step's input in `hidden`, returns the head's input [n, H]."""
        residual = self.normed if self.config.norm_before_residual else self.hidden
        attended = ops.attend(q, self.keys, self.values, self.own, self.rows.key_ranges)
        middle, normed = self._norm(
            residual, ops.linear(attended, self.weights.out), self.layer.post_attention_layernorm
        )
        mlp = ops.swiglu_linear(ops.linear(normed, self.weights.gate_up), self.weights.down)
        self.hidden, output = self._norm(middle, mlp, self.draft.norm)
        if self.config.norm_output:
            self.hidden = output
        return output

    def _drop_rows(self, step: int, count: int, alive: torch.Tensor) -> torch.Tensor:
        """Leaves out the rows that no longer count, once it pays; a few that stay have loss weight 0."""
        if count > KEEP_SHARE * len(self.rows):
            return alive
        kept = (self.rows.depth > step).nonzero()[:, 0]
        self.rows = self.rows.take(kept)
        self.hidden = ops.take_rows(self.hidden, kept)
        self.own = [(k.take_rows(kept), v.take_rows(kept)) for k, v in self.own]
        return alive[kept]
