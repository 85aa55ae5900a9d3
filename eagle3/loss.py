"""What a draft row is scored by: losses between the teacher's and the draft's logits, with their gradients.

With p the teacher's and q the draft's softmax over the draft vocabulary, in fp32, a row's loss is
    kl   sum p (log p - log q)                                    gradient by the draft's logits   q - p
    ce   -log q[argmax p]                                                                          q - onehot
    lk   w kl + (1 - w) (1 - a), a = sum min(p, q), w = exp(-3 a)           w (q - p) + (1 - w) q (s - [q < p])
where s = sum of q over q < p, and w is held constant. a is the rate at which speculative sampling accepts the draft's
token; lk is the hybrid of Samarin et al., "LK Losses" (arXiv 2602.23881): KL's strong gradient while the two
disagree, acceptance itself once they do not.

The head's product and its loss are taken in chunks of rows, the gradient at once in the forward pass, so that logits
of tokens x vocabulary never exist in fp32, nor for more than a chunk.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from eagle3 import ops

Loss = Literal["kl", "ce", "lk"]
LOSSES: tuple[str, ...] = get_args(Loss)
LK_DECAY = 3.0
CHUNK_ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 24}  # logits of one chunk: enough rows to fill the device


@dataclass(frozen=True)
class Targets:
    """The teacher's logits [n, D] with what each row's softmax needs: lse, sum p log p, argmax, all [n]."""

    logits: torch.Tensor
    lse: torch.Tensor
    neg_entropy: torch.Tensor
    label: torch.Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, logits: torch.Tensor) -> "Targets":
        """All of it from the logits, by chunks of rows."""
        if ops.has_kernels(logits):
            from eagle3 import kernels

            return cls(logits, *kernels.teacher_stats(logits))
        parts = [_teacher_stats(chunk) for chunk in logits.split(_chunk_rows(logits))]
        return cls(logits, *(torch.cat(column) for column in zip(*parts, strict=True)))


def _teacher_stats(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = _wide(logits)
    lse = wide.logsumexp(-1)
    log_p = wide - lse[:, None]
    return lse, _dot(log_p.exp(), log_p), logits.argmax(-1)


def head_loss(
    hidden: torch.Tensor, head: ops.Weight, targets: Targets, target_row: torch.Tensor, weight: torch.Tensor, loss: Loss
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores `hidden` [n, H] by `head` [D, H] against the rows `target_row` [n] of the targets (-1: not scored).

    Returns the sum of the rows' losses times `weight` (a scalar tensor), which alone carries a gradient, the rows'
    losses [n] and whether each row's argmax is the teacher's [n].
    """
    return _HeadLoss.apply(hidden, head.value, head, targets, target_row, weight, loss)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, value, head, targets, target_row, weight, loss):  # noqa: ANN001, ANN205
        ctx.set_materialize_grads(False)
        grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        train_head = ctx.needs_input_grad[1]
        losses, correct = [], []
        size = _chunk_rows(hidden, value.shape[0])
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = hidden[part] @ value.t()
            score, right = score_rows(logits, targets, target_row[part], weight, loss)  # logits become their gradient
            losses.append(score)
            correct.append(right)
            if grad is not None:
                torch.mm(logits, value, out=grad[part])
            if train_head:
                head.accumulate(logits, hidden[part])
        ctx.head, ctx.train_head = head, train_head
        ctx.save_for_backward(grad)
        row_loss, correct = torch.cat(losses), torch.cat(correct)
        ctx.mark_non_differentiable(row_loss, correct)
        return row_loss.sum() * weight, row_loss, correct

    @staticmethod
    def backward(ctx: Any, grad_total, *_):  # noqa: ANN001, ANN205
        (grad,) = ctx.saved_tensors
        if ctx.train_head:
            ctx.head.scale_by(grad_total)
        return (None if grad is None else grad * grad_total.to(grad.dtype), *[None] * 6)


def score_rows(
    logits: torch.Tensor, targets: Targets, target_row: torch.Tensor, weight: torch.Tensor, loss: Loss
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [n] and argmax agreement [n] of the draft's logits [n, D], which become `weight` x their gradient."""
    if ops.has_kernels(logits):
        from eagle3 import kernels

        return kernels.score_rows(logits, targets, target_row, weight, LOSSES.index(loss), LK_DECAY)
    scored = target_row >= 0
    row = target_row.clamp_min(0)
    draft, log_p = _wide(logits), _wide(targets.logits[row]) - targets.lse[row, None]
    label = targets.label[row]
    correct = scored & (logits.argmax(-1) == label)
    score, grad = _FORMULAS[loss](draft, log_p, label)
    logits.copy_(grad.mul_((weight * scored)[:, None]))
    return score * scored, correct


def _kl(draft: torch.Tensor, log_p: torch.Tensor, label: torch.Tensor) -> tuple:
    p, log_q = log_p.exp(), draft - draft.logsumexp(-1, keepdim=True)
    score = _dot(p, log_p - log_q)  # by differences: a sum less a sum would cancel digits
    return score, log_q.exp_().sub_(p)


def _ce(draft: torch.Tensor, log_p: torch.Tensor, label: torch.Tensor) -> tuple:
    lse = draft.logsumexp(-1)
    score = lse - draft.gather(-1, label[:, None])[:, 0]
    grad = (draft - lse[:, None]).exp_()
    return score, grad.scatter_add_(-1, label[:, None], -torch.ones_like(score)[:, None])


def _lk(draft: torch.Tensor, log_p: torch.Tensor, label: torch.Tensor) -> tuple:
    kl, kl_grad = _kl(draft, log_p, label)
    p, q = log_p.exp(), draft.softmax(-1)
    below = q < p
    accepted, mass_below = torch.minimum(p, q).sum(-1), (q * below).sum(-1)
    mix = (-LK_DECAY * accepted).exp()
    grad = mix[:, None] * kl_grad + (1 - mix)[:, None] * q * (mass_below[:, None] - below.to(q.dtype))
    return mix * kl + (1 - mix) * (1 - accepted), grad


_FORMULAS = {"kl": _kl, "ce": _ce, "lk": _lk}


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vecdot(a, b)


def _chunk_rows(tensor: torch.Tensor, vocabulary: int | None = None) -> int:
    """Rows of a chunk: evenly sized, at most CHUNK_ELEMENTS logits each."""
    rows = len(tensor)
    chunks = -(-rows * (vocabulary or tensor.shape[1]) // CHUNK_ELEMENTS[tensor.device.type])
    return -(-rows // chunks)
