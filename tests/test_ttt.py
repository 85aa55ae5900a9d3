"""The training-time test equals drafting one token at a time, row by row and weight by weight."""

import pytest
import torch
from reference_draft import reference_loss, small_batch, small_config, small_draft

from eagle3.batches import PackedBatch
from eagle3.ttt import supervised_counts, supervised_depth, training_loss

MASKS = {
    "prompt then answer": ["0000111111"],
    "different lengths": ["00011111", "0111111111111", "001111"],
    "several spans and gaps": ["0110111101111110", "1111001", "0101011"],
    "all": ["11111111", "111111"],
    "some samples without answers": ["000000", "0001111", "0"],
    "runs too short to count": ["0100100", "0110110110011"],
    "one row": ["000011"],
}
FLAGS = [
    {},
    {"norm_before_residual": False},
    {"norm_output": True},
    {"norm_before_residual": False, "norm_output": True},
    {"fc_norm": False},
    {"fc_norm": False, "norm_before_fc": True},
    {"norm_before_residual": False, "fc_norm": False, "norm_before_fc": True, "norm_output": True},
    {"num_kv_heads": 4},
    {"num_kv_heads": 1},
    {"draft_vocab_size": 50},
]


def step_weights(batch, steps, dtype=torch.float64):
    counts = supervised_counts(batch.loss_mask, batch.offsets, steps)
    return 0.8 ** torch.arange(steps, dtype=dtype) / counts.clamp_min(1)


def gradients(draft, loss):
    names, weights = zip(*((n, p) for n, p in draft.named_parameters() if p.requires_grad), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights, allow_unused=True), strict=True))


def assert_equal_to_reference(draft, teacher, batch, steps, loss="kl"):
    weights = step_weights(batch, steps)
    found = training_loss(draft, teacher, batch, weights, loss=loss)
    total, sums, correct, accepted, counts = reference_loss(draft, teacher, batch, weights, loss)
    torch.testing.assert_close(found.loss_sums, sums)
    torch.testing.assert_close(found.loss, total)
    assert (found.correct.tolist(), found.accepted.tolist()) == (correct.tolist(), accepted.tolist())
    assert found.counts.tolist() == counts.tolist()
    expected = gradients(draft, total)
    for name, grad in gradients(draft, found.loss).items():
        torch.testing.assert_close(grad, expected[name], msg=lambda m, n=name: f"{n}: {m}")


def test_rows_of_a_ten_token_sample():
    """By hand: ids 0..9, mask 1 on 4..7. Row 3 (the prompt's last) reads x4 and is taught x5, x6, x7 at steps 0, 1, 2;
    row 4 is taught x6, x7; row 5 x7; nothing else counts, at no step."""
    mask = torch.tensor([c == "1" for c in "0000111100"])
    assert supervised_depth(mask, [0, 10], 7).tolist() == [0, 0, 0, 3, 2, 1, 0, 0, 0, 0]
    assert supervised_counts(mask, [0, 10], 7).tolist() == [3, 2, 1, 0, 0, 0, 0]


def test_rows_never_reach_into_the_next_sample():
    """Two samples of five tokens, all generated: each alone has rows of depth 3, 2, 1 (x0 has no row before it)."""
    mask = torch.ones(12, dtype=torch.bool)
    assert supervised_depth(mask, [0, 5, 10], 7).tolist() == [3, 2, 1, 0, 0, 3, 2, 1, 0, 0, 0, 0]
    assert supervised_depth(mask, [0, 5, 10], 2).tolist() == [2, 2, 1, 0, 0, 2, 2, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("steps", [1, 4])
def test_equals_sequential_drafting_for_any_mask(masks, steps):
    """Losses, acceptance counts and the gradient of every weight are those of drafting token by token."""
    config = small_config()
    assert_equal_to_reference(*small_draft(config), small_batch(config, masks), steps)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_equals_sequential_drafting_for_any_layout(flags):
    """The same for norm flags, grouped heads, and the full vocabulary."""
    config = small_config(**flags)
    assert_equal_to_reference(*small_draft(config), small_batch(config, MASKS["several spans and gaps"]), steps=3)


@pytest.mark.parametrize("loss", ["kl", "ce", "lk"])
@pytest.mark.parametrize("train", [False, True])
def test_equals_sequential_drafting_for_any_loss(loss, train):
    """The same for each loss, with head and embedding frozen or trained."""
    config = small_config()
    draft, teacher = small_draft(config, train_head=train, train_embedding=train)
    assert_equal_to_reference(draft, teacher, small_batch(config, MASKS["different lengths"]), 3, loss)


def test_incoming_gradient_scales_every_weight_once():
    """2 x loss has twice the gradients, the trained head's included, which is formed in the forward pass."""
    config = small_config()
    draft, teacher = small_draft(config, train_head=True, train_embedding=True)
    batch = small_batch(config, MASKS["different lengths"])
    once, twice = (
        gradients(draft, factor * training_loss(draft, teacher, batch, step_weights(batch, 3)).loss)
        for factor in (1, 2)
    )
    for name, grad in once.items():
        torch.testing.assert_close(2 * grad, twice[name])


def test_packing_changes_nothing():
    """A packed with B: the sums are those of A alone plus those of B alone; padding adds nothing (also SpecForge's
    T2 and the packing case T8: no row reaches into its neighbour)."""
    config = small_config()
    draft, teacher = small_draft(config)
    masks = ["0001111111", "011111", "00110111"]
    packed = small_batch(config, masks, padding=5)
    weights = torch.ones(4, dtype=torch.float64)
    whole = training_loss(draft, teacher, packed, weights)
    parts = []
    for start, end in zip(packed.offsets[:-1], packed.offsets[1:], strict=True):
        rows = slice(start, end)
        alone = PackedBatch(
            packed.input_ids[rows], packed.hidden_states[rows], packed.loss_mask[rows], [0, end - start]
        )
        parts.append(training_loss(draft, teacher, alone, weights))
    torch.testing.assert_close(whole.loss, sum(p.loss for p in parts))
    torch.testing.assert_close(whole.loss_sums, sum(p.loss_sums for p in parts))
    assert whole.counts.tolist() == sum(p.counts for p in parts).tolist()


@pytest.mark.parametrize("what", ["auxiliary state", "token", "last state"])
def test_a_row_sees_nothing_after_it(what):
    """Change f_{t+1}, or x_{t+2} and later, or g: losses of rows that may not depend on it are bitwise the same.

    Step 0 of rows <= t reads f up to t and x up to t+1; g reaches the loss only through its own row's teacher."""
    config = small_config()
    draft, teacher = small_draft(config)
    batch = small_batch(config, ["00111111111111"])
    t = 6
    states, ids = batch.hidden_states.clone(), batch.input_ids.clone()
    if what == "auxiliary state":
        states[t + 1 :, :3] += 1
    elif what == "token":
        ids[t + 2 :] = (ids[t + 2 :] + 1) % config.target_vocab_size
    else:
        states[t + 2 :, 3] += 1
    changed = PackedBatch(ids, states, batch.loss_mask, batch.offsets)
    mask = batch.loss_mask.clone()
    mask[t + 3 :] = False  # rows up to t, at the steps whose tokens are all before the change
    weights = torch.ones(1, dtype=torch.float64)
    before, after = (
        training_loss(draft, teacher, PackedBatch(b.input_ids, b.hidden_states, mask, b.offsets), weights)
        for b in (batch, changed)
    )
    assert before.counts.tolist() == [t]  # rows 1..t
    assert before.loss.item() == after.loss.item()
    whole_before, whole_after = (training_loss(draft, teacher, b, weights) for b in (batch, changed))
    assert whole_before.loss.item() != whole_after.loss.item()


def test_nothing_to_learn_is_a_zero_with_gradients():
    """No supervised row: loss 0, every trained weight has a gradient of zeros (so that no rank waits for another)."""
    config = small_config()
    draft, teacher = small_draft(config)
    found = training_loss(draft, teacher, small_batch(config, ["0000", "010"]), torch.ones(3, dtype=torch.float64))
    assert found.loss.item() == 0 and found.counts.tolist() == [0, 0, 0]
    assert all(g is not None and not g.any() for g in gradients(draft, found.loss).values())


def test_float32_is_close_to_float64():
    """The fp32 path loses no more than rounding."""
    config = small_config()
    draft, teacher = small_draft(config)
    batch = small_batch(config, MASKS["different lengths"])
    exact = training_loss(draft, teacher, batch, step_weights(batch, 4)).loss.item()
    draft, teacher = small_draft(config, torch.float32)
    batch = small_batch(config, MASKS["different lengths"], torch.float32)
    assert training_loss(draft, teacher, batch, step_weights(batch, 4, torch.float32)).loss.item() == pytest.approx(
        exact, rel=1e-5
    )


def test_unknown_loss_is_refused_by_name():
    """The message names the losses there are."""
    config = small_config()
    with pytest.raises(ValueError, match="kl, ce, lk, found 'mse'"):
        training_loss(*small_draft(config), small_batch(config, ["0111"]), torch.ones(1), loss="mse")
