"""The slow, obvious draft: one row and one token at a time with a growing list of keys, plain formulas, no batching.

Everything fast in eagle3.ttt must equal this. Written from the definition in eagle3.ttt's docstring alone.
"""

import torch
from torch.nn import functional as F

from eagle3.batches import PackedBatch
from eagle3.draft import Draft, DraftConfig, Teacher, rotary_frequencies
from eagle3.shards import Sample
from eagle3.vocab import DraftVocab

SMALL = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "norm_eps": 1e-5,
    "rope": {"rope_type": "default", "rope_theta": 100.0},
    "max_positions": 64,
    "target_vocab_size": 50,
    "draft_vocab_size": 30,
}


def small_config(**overrides) -> DraftConfig:
    return DraftConfig(**(SMALL | overrides))


def small_draft(config: DraftConfig, dtype=torch.float64, seed=0, **flags) -> tuple[Draft, Teacher]:
    """A draft with lively random weights (norms too), and a teacher over rows of the same head.

    Not too lively: where the steps amplify rounding, no two correct programs agree.
    """
    torch.manual_seed(seed)
    embedding = torch.randn(config.target_vocab_size, config.hidden_size)
    head = torch.randn(config.draft_vocab_size, config.hidden_size) * 0.5
    draft = Draft.create(config, embedding, head.clone(), **flags)
    for weight in draft.parameters():
        if weight.requires_grad:
            weight.data.add_(torch.randn_like(weight) * 0.7 * weight.shape[-1] ** -0.5)
    draft.to(dtype)
    return draft, Teacher(torch.rand(config.hidden_size).to(dtype) + 0.5, config.norm_eps, head.to(dtype))


def small_batch(config: DraftConfig, masks: list[str], dtype=torch.float64, seed=0, padding=0) -> PackedBatch:
    """One sample for each mask, e.g. "0001110"; `padding` rows of junk after the last."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(m) for m in masks]
    total = sum(lengths) + padding
    return PackedBatch(
        input_ids=torch.randint(config.target_vocab_size, (total,), generator=generator),
        hidden_states=torch.randn(total, 4, config.hidden_size, generator=generator, dtype=torch.float64).to(dtype),
        loss_mask=torch.tensor([c == "1" for m in masks for c in m] + [True] * padding),
        offsets=[sum(lengths[:i]) for i in range(len(lengths) + 1)],
    )


def reference_rows(draft: Draft, teacher: Teacher, batch: PackedBatch, steps: int):
    """Yields (packed row, step, draft logits [D], teacher logits [D]) of every row that counts, sample by sample."""
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids, mask = batch.input_ids[start:end], batch.loss_mask[start:end].tolist()
        states = batch.hidden_states[start:end]
        fused = [_fused(draft, s) for s in states]
        cache = [_key_value(draft, fused[t], ids[t + 1], t) for t in range(len(ids) - 1)]
        for t in range(len(ids) - 1):
            hidden, keys = fused[t], cache[: t + 1]
            for i in range(steps):
                if t + 2 + i >= len(ids) or not all(mask[t + 1 : t + 3 + i]):
                    break
                if i:
                    keys = [*keys, _key_value(draft, hidden, ids[t + 1 + i], t + i)]
                hidden, logits = _layer(draft, hidden, ids[t + 1 + i], t + i, keys)
                normed = F.rms_norm(states[t + 1 + i, 3], teacher.norm.shape, teacher.norm, teacher.eps)
                yield start + t, i, logits, teacher.head @ normed


def reference_loss(draft: Draft, teacher: Teacher, batch: PackedBatch, weights: torch.Tensor, loss: str = "kl"):
    """The weighted loss, and per step: loss sums, correct, accepted, counts."""
    steps = len(weights)
    sums = [torch.zeros((), dtype=weights.dtype) for _ in range(steps)]
    correct, accepted, counts = torch.zeros(3, steps, dtype=torch.int64)
    alive = {}
    for row, step, logits, taught in reference_rows(draft, teacher, batch, steps):
        right = bool(logits.argmax() == taught.argmax())
        alive[row] = alive.get(row, True) and right
        sums[step] = sums[step] + row_loss(logits, taught, loss)
        correct[step] += right
        accepted[step] += alive[row]
        counts[step] += 1
    return sum(w * s for w, s in zip(weights, sums, strict=True)), torch.stack(sums).detach(), correct, accepted, counts


def row_loss(logits: torch.Tensor, taught: torch.Tensor, loss: str) -> torch.Tensor:
    p, q = taught.softmax(0), logits.softmax(0)
    kl = (p * (p.log() - q.log())).sum()
    if loss == "kl":
        return kl
    if loss == "ce":
        return -q.log()[taught.argmax()]
    overlap = torch.minimum(p, q).sum()
    mix = torch.exp(-3 * overlap.detach())
    return mix * kl + (1 - mix) * (1 - overlap)


def walk(draft: Draft, vocab: DraftVocab, sample: Sample, num_drafts: int) -> list[int]:
    """Accepted drafts of each pass when `sample`, whose answer is greedy, is served: row r, then r + accepted + 1.

    The first pass drafts on the prompt's last row. Passes whose drafts could reach past the last token are left out.
    """
    ids, row = sample.input_ids, int(sample.loss_mask.int().argmax()) - 1
    fused = [_fused(draft, s) for s in sample.hidden_states]
    cache = [_key_value(draft, fused[t], ids[t + 1], t) for t in range(len(ids) - 1)]
    passes = []
    while row + 1 + num_drafts < len(ids):
        passes.append(_accepted(draft, vocab, ids, fused[row], cache[: row + 1], row, num_drafts))
        row += passes[-1] + 1
    return passes


def _accepted(draft: Draft, vocab: DraftVocab, ids, hidden, keys, row: int, num_drafts: int) -> int:
    """How many drafts on `row` are the target's own next tokens."""
    for i in range(num_drafts):
        if i:
            keys = [*keys, _key_value(draft, hidden, ids[row + 1 + i], row + i)]
        hidden, logits = _layer(draft, hidden, ids[row + 1 + i], row + i, keys)
        guess = int(logits.argmax())
        if guess + vocab.d2t[guess] != ids[row + 2 + i]:
            return i
    return num_drafts


def _fused(draft: Draft, states):
    """fc of the first three states [3, H] of a row, normed as the flags say."""
    parts, eps = list(states[:3]), draft.config.norm_eps
    if draft.config.fc_norm:
        parts = [F.rms_norm(p, p.shape, norm.weight, eps) for p, norm in zip(parts, draft.fc_norm, strict=True)]
    together = torch.cat(parts)
    if draft.config.norm_before_fc:
        together = F.rms_norm(together, together.shape, draft.input_norm.weight, eps)
    return draft.fc.weight @ together


def _inputs(draft: Draft, hidden, token):
    layer, eps = draft.layers[0], draft.config.norm_eps
    embedded = draft.embed_tokens.weight[token]
    normed = F.rms_norm(hidden, hidden.shape, layer.hidden_norm.weight, eps)
    return normed, torch.cat([F.rms_norm(embedded, embedded.shape, layer.input_layernorm.weight, eps), normed])


def _rotate(draft: Draft, heads, position):
    """heads [n, d] turned in the plane of coordinates j and j + d/2, by theta^(-2j/d) a position, or by yarn."""
    half = heads.shape[1] // 2
    rope = draft.config.rope
    factor = 1.0
    frequencies = rope["rope_theta"] ** (-torch.arange(half, dtype=heads.dtype) / half)
    if rope["rope_type"] != "default":  # Transformers' own yarn
        frequencies, factor = rotary_frequencies(draft.config)
    angle = position * frequencies.to(heads.dtype)
    cos, sin = factor * angle.cos(), factor * angle.sin()
    a, b = heads[:, :half], heads[:, half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], 1)


def _key_value(draft: Draft, hidden, token, position):
    attention, head_dim = draft.layers[0].self_attn, draft.config.head_dim
    _, x = _inputs(draft, hidden, token)
    key = _rotate(draft, (attention.k_proj.weight @ x).view(-1, head_dim), position)
    return key, (attention.v_proj.weight @ x).view(-1, head_dim)


def _layer(draft: Draft, hidden, token, position, keys_values):
    config, layer = draft.config, draft.layers[0]
    normed, x = _inputs(draft, hidden, token)
    q = _rotate(draft, (layer.self_attn.q_proj.weight @ x).view(config.num_heads, config.head_dim), position)
    out = []
    for head, query in enumerate(q):
        kv_head = head * config.num_kv_heads // config.num_heads
        keys = torch.stack([k[kv_head] for k, _ in keys_values])
        values = torch.stack([v[kv_head] for _, v in keys_values])
        out.append((keys @ query / config.head_dim**0.5).softmax(0) @ values)
    residual = normed if config.norm_before_residual else hidden
    x = residual + layer.self_attn.o_proj.weight @ torch.cat(out)
    y = F.rms_norm(x, x.shape, layer.post_attention_layernorm.weight, config.norm_eps)
    x = x + layer.mlp.down_proj.weight @ (F.silu(layer.mlp.gate_proj.weight @ y) * (layer.mlp.up_proj.weight @ y))
    normed = F.rms_norm(x, x.shape, draft.norm.weight, config.norm_eps)
    return normed if config.norm_output else x, draft.lm_head.weight @ normed
