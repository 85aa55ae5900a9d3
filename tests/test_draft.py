"""The draft's sizes, its weights' names, and its layer: speculators' own model computes the same from them."""

import numpy as np
import pytest
import torch
from reference_draft import reference_rows, small_batch, small_config, small_draft

from bench.train_step import Case, agreement, measure, our_rows, peer_batch, peer_model, peer_rows
from eagle3.draft import Draft, DraftConfig, Teacher, rope_parameters, rotary_frequencies
from eagle3.target import Target
from eagle3.vocab import DraftVocab

KIMI_ROPE = {
    "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
KIMI = {
    "num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840, "num_attention_heads": 64,
    "num_key_value_heads": 64, "intermediate_size": 18432, "kv_lora_rank": 512, "v_head_dim": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144, "rope_theta": 50000.0,
    "rope_scaling": {"type": "yarn"} | {k: v for k, v in KIMI_ROPE.items() if k != "rope_type"},
}  # fmt: skip
LLAMA = {
    "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}  # fmt: skip


def target(text: dict, tmp_path) -> Target:
    return Target(tmp_path, {"text_config": text}, text)


def test_draft_for_kimi_is_the_published_one(tmp_path):
    """H 7168, FFN 12288, 64 heads of 128, theta 50000 and all of yarn (case X3), from the target's config alone."""
    config = DraftConfig.for_target(target(KIMI, tmp_path), DraftVocab(163840, np.arange(32000)))
    sizes = (config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim)
    assert sizes == (7168, 12288, 64, 64, 128)
    assert config.rope == KIMI_ROPE | {"rope_theta": 50000.0}
    assert (config.draft_vocab_size, config.target_vocab_size, config.max_positions) == (32000, 163840, 262144)


def test_draft_for_an_mla_target_with_too_many_heads(tmp_path):
    """DeepSeek-V3's 128 heads of 128 are more than twice its width: as many as fill it, 7168 / 128 = 56."""
    config = DraftConfig.for_target(target(KIMI | {"num_attention_heads": 128}, tmp_path), DraftVocab(163840))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (56, 56, 128)


def test_draft_for_llama_has_its_layer_and_overrides_win(tmp_path):
    """Heads, grouped keys, FFN and rope as the target's; an override is taken as given."""
    config = DraftConfig.for_target(target(LLAMA, tmp_path), DraftVocab(128256), norm_output=True, intermediate_size=64)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (32, 8, 128, 64)
    assert config.norm_output and config.rope == LLAMA["rope_parameters"]


@pytest.mark.parametrize(
    ("extra", "named"),
    [({"final_logit_softcapping": 30.0}, "final_logit_softcapping"), ({"model_type": "gemma3_text"}, "gemma3_text")],
)
def test_a_target_whose_logits_we_would_get_wrong_is_refused(extra, named, tmp_path):
    """A cap on the logits or a final norm of x * (1 + w) would teach wrong probabilities, silently."""
    with pytest.raises(ValueError, match=named):
        DraftConfig.for_target(target(LLAMA | extra, tmp_path), DraftVocab(128256))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"head_dim": 7}, "even"),
        ({"draft_vocab_size": 51}, "51 of 50"),
        ({"norm_before_fc": True}, "--norm-before-fc and --fc-norm exclude each other; add --no-fc-norm"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, message):
    """Each with the number that is wrong."""
    with pytest.raises(ValueError, match=message):
        small_config(**sizes)


def test_embedding_of_another_size_is_refused():
    """Expected and found shapes are named."""
    config = small_config()
    with pytest.raises(ValueError, match=r"embedding must be \[50, 24\], found \[49, 24\]"):
        Draft.create(config, torch.zeros(49, 24), torch.zeros(30, 24))


def test_old_and_new_rope_keys_mean_the_same():
    """`rope_theta` + `rope_scaling` (with `type`) and `rope_parameters` give one schema."""
    old = rope_parameters({"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 2.0}})
    new = rope_parameters({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 2.0}})
    assert old == new == {"rope_type": "yarn", "rope_theta": 5e4, "factor": 2.0}
    assert rope_parameters({}) == {"rope_type": "default", "rope_theta": 10000.0}


def test_yarn_of_kimi_leaves_the_scale_of_attention_alone():
    """mscale == mscale_all_dim: the factor on cos and sin is 1. Without the two keys q.k would grow 2.005 times."""
    rope = KIMI_ROPE | {"rope_theta": 50000.0}
    assert rotary_frequencies(small_config(rope=rope))[1] == 1.0
    for key in ("mscale", "mscale_all_dim"):
        rope.pop(key)
    assert rotary_frequencies(small_config(rope=rope))[1] ** 2 == pytest.approx((0.1 * np.log(64) + 1) ** 2)


def test_frozen_weights_are_shared_and_trained_ones_are_masters():
    """A frozen head is the given tensor itself; a trained one an fp32 copy."""
    config = small_config()
    embedding, head = torch.randn(50, 24, dtype=torch.bfloat16), torch.randn(30, 24, dtype=torch.bfloat16)
    frozen = Draft.create(config, embedding, head)
    assert frozen.lm_head.weight.data_ptr() == head.data_ptr() and not frozen.lm_head.weight.requires_grad
    trained = Draft.create(config, embedding, head, train_head=True)
    assert trained.lm_head.weight.dtype == torch.float32 and trained.lm_head.weight.requires_grad
    assert all(p.dtype == torch.float32 for p in trained.parameters() if p.requires_grad)


def test_a_new_draft_passes_on_the_last_of_the_three_states():
    """fc [H, 3H] is (0, 0, identity), every norm is one, and the other matrices are random."""
    draft = Draft.create(small_config(), torch.randn(50, 24), torch.randn(30, 24))
    assert torch.equal(draft.fc.weight, torch.cat([torch.zeros(24, 48), torch.eye(24)], 1))
    trained = {name: p for name, p in draft.named_parameters() if p.requires_grad and name != "fc.weight"}
    assert all((p == 1).all() if p.ndim == 1 else p.std() > 0 for p in trained.values())


def test_weights_have_the_exported_names():
    """The names that vLLM reads (case X5: `layers.0.*`)."""
    layer = "layers.0."
    attention = [f"{layer}self_attn.{p}_proj.weight" for p in "qkvo"]
    mlp = [f"{layer}mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    norms = [f"{layer}{n}.weight" for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
    norms += [f"fc_norm.{i}.weight" for i in range(3)]
    whole = ["embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight"]
    assert set(small_draft(small_config())[0].state_dict()) == {*attention, *mlp, *norms, *whole}


def test_bfloat16_master_updates_are_not_lost():
    """Case T5: 50 AdamW steps at 1e-4 in bfloat16 compute move every norm weight off 1.0."""
    from eagle3.ttt import supervised_counts, training_loss

    config = small_config()
    torch.manual_seed(0)
    draft = Draft.create(config, torch.randn(50, 24), torch.randn(30, 24), compute_dtype=torch.bfloat16)
    teacher = Teacher(torch.ones(24), config.norm_eps, draft.lm_head.weight.data)
    batch = small_batch(config, ["0001111111"], torch.bfloat16)
    weights = 1 / supervised_counts(batch.loss_mask, batch.offsets, 2)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(50):
        optimizer.zero_grad()
        training_loss(draft, teacher, batch, weights).loss.backward()
        optimizer.step()
    norms = {n: p for n, p in draft.named_parameters() if p.ndim == 1}
    assert len(norms) == 7 and all((p != 1).all() for p in norms.values())


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"norm_before_residual": False},
        {"norm_output": True},
        {"fc_norm": False, "norm_before_fc": True, "norm_output": True},
        {"fc_norm": False},
        {"num_kv_heads": 4},
    ],
    ids=str,
)
def test_speculators_model_computes_the_same(flags):
    """Our weights in speculators' Eagle3DraftModel, by name: the KL of every row at every step that both supervise."""
    config = small_config(draft_vocab_size=50, **flags)
    draft, teacher = small_draft(config, torch.float32)
    case = Case(config, samples=2, length=12, steps=3, supervised=0.75, device=torch.device("cpu"), dtype=torch.float32)
    batch = small_batch(config, ["000111111111"] * 2, torch.float32)
    ours = our_rows(case, draft, teacher, batch)
    theirs = peer_rows(case, peer_model(draft, teacher, "eager"), peer_batch(case, batch))
    found = agreement(case, ours, theirs)
    assert found["rows_both_supervise"] == 2 * (8 + 7 + 6)
    expected = {(row, step) for row, step, *_ in reference_rows(draft, teacher, batch, 3)}
    assert {tuple(at) for at in (~ours.isnan()).nonzero().tolist()} == expected


def test_the_benchmark_compares_both_sides():
    """bench/train_step.py yields ours, the agreement, speculators' and the ratio of the two, on a CPU."""
    config = small_config(draft_vocab_size=50)
    case = Case(config, samples=2, length=12, steps=3, supervised=0.75, device=torch.device("cpu"), dtype=torch.float32)
    ours, peer, agreed, ratio = measure([case], repeats=1, ours_only=False, attention="sdpa")
    assert (ours["side"], peer["side"]) == ("ours", "speculators 0.9.0")
    assert agreed["agreement"]["rows_both_supervise"] == 2 * (8 + 7 + 6)
    assert ratio["ratio"] == {0.75: round(ours["tokens_per_s"] / peer["tokens_per_s"], 2)}
