"""The exported draft: every key and tensor that vLLM reads, and the same numbers in speculators' own model."""

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from states_folder import model_samples
from training_run import LAYER_IDS, draft_vocab

from eagle3 import export as module
from eagle3 import exported, files
from eagle3.batches import PackedBatch
from eagle3.draft import NORM_FLAGS, Draft, DraftConfig, Teacher, embedding
from eagle3.export import export, tensors
from eagle3.initial import InitialDraft
from eagle3.target import Target
from eagle3.ttt import training_loss
from eagle3.vocab import DraftVocab

NAMES = {
    "embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight", "layers.0.hidden_norm.weight",
    "layers.0.input_layernorm.weight",
    "layers.0.post_attention_layernorm.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight", "layers.0.self_attn.o_proj.weight", "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight", "fc_norm.0.weight", "fc_norm.1.weight",
    "fc_norm.2.weight",
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def new_draft(path, vocab, **overrides):
    """A draft with random norms as well, so that a norm that is left out or misplaced shows."""
    torch.manual_seed(0)
    target = Target.open(path)
    teacher = Teacher.for_target(target, vocab)
    draft = Draft.create(DraftConfig.for_target(target, vocab, **overrides), embedding(target), teacher.head)
    for parameter in draft.parameters():
        if parameter.requires_grad:
            parameter.data += (
                0.3 * torch.randn_like(parameter) if parameter.ndim == 1 else 0.1 * torch.randn_like(parameter)
            )
    return target, draft, teacher


def test_config_of_a_kimi_draft(tiny_kimi, tmp_path):
    """States of layers 2, 30, 58 are vLLM's inputs of layers 3, 31, 59; every flag and the whole yarn are written."""
    target, draft, _ = new_draft(tiny_kimi, DraftVocab(1024))
    export(tmp_path / "draft", draft, target, DraftVocab(1024), [2, 30, 58, 60], 5)
    config = files.read_json(tmp_path / "draft" / "config.json")
    layer = config.pop("transformer_layer_config")
    assert config.pop("target_fingerprint") == target.fingerprint
    dtype = config.pop("dtype")
    assert config == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 1024,
        "eagle_aux_hidden_state_layer_ids": [3, 31, 59],
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0, "verifier_accept_k": 1}
            ],
            "verifier": {
                "architectures": ["KimiK25ForConditionalGeneration"],
                "name_or_path": str(tiny_kimi.resolve()),
            },
        },
    }
    scaling = target.text["rope_scaling"]
    assert layer["model_type"] == "llama" and layer["vocab_size"] == 1024 and layer["dtype"] == dtype
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"] == target.text["rope_theta"]
    for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        assert layer["rope_parameters"][key] == layer["rope_scaling"][key] == scaling[key]
    assert layer["rope_parameters"]["rope_type"] == layer["rope_scaling"]["rope_type"] == "yarn"
    assert layer["max_position_embeddings"] == target.text["max_position_embeddings"]


def test_offsets_and_head_rows_of_a_reduced_vocabulary(tiny_llama, tmp_path):
    """Ids 2, 5, 9 are draft ids 0, 1, 2: offsets 2, 4, 7, and rows 2, 5, 9 of the target's head, not 2, 4, 7."""
    vocab = DraftVocab(512, np.array([2, 5, 9]))
    target, draft, _ = new_draft(tiny_llama, vocab)
    export(tmp_path / "draft", draft, target, vocab, LAYER_IDS, 3)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert stored.keys() == NAMES | {"d2t", "t2d"}
    assert stored["d2t"].dtype == torch.int64 and stored["d2t"].tolist() == [2, 4, 7]
    assert stored["t2d"].dtype == torch.bool and stored["t2d"].nonzero()[:, 0].tolist() == [2, 5, 9]
    assert torch.equal(stored["lm_head.weight"], target.load("lm_head.weight")[[2, 5, 9]])
    assert torch.equal(stored["embed_tokens.weight"], target.load("embed_tokens.weight"))
    assert stored["fc.weight"].shape == (64, 3 * 64)


def test_a_full_vocabulary_has_no_maps_and_the_weights_take_the_targets_dtype(tiny_llama):
    """Neither d2t nor t2d; bfloat16 where the target is, but the embedding is left as it is stored."""
    _, draft, _ = new_draft(tiny_llama, DraftVocab(512))
    written = tensors(draft, DraftVocab(512), torch.bfloat16)
    assert written.keys() == NAMES
    assert written.pop("embed_tokens.weight").dtype == torch.float32
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


def test_an_export_replaces_the_last_one_whole(tiny_llama, tmp_path):
    """What is mapped by a server stays readable, and nothing else is left in the folder."""
    target, draft, _ = new_draft(tiny_llama, DraftVocab(512))
    export(tmp_path / "draft", draft, target, DraftVocab(512), LAYER_IDS, 3)
    mapped = load_file(tmp_path / "draft" / "model.safetensors")
    before = draft.fc.weight.detach().clone()
    draft.fc.weight.data += 1
    export(tmp_path / "draft", draft, target, DraftVocab(512), LAYER_IDS, 3)
    assert torch.equal(mapped["fc.weight"], before)
    assert torch.equal(load_file(tmp_path / "draft" / "model.safetensors")["fc.weight"], before + 1)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


@pytest.fixture(scope="module")
def sample(tiny_llama):
    return model_samples(tiny_llama, LAYER_IDS, count=1)[0]


def speculators_losses(folder, sample, steps):
    """KL sums by step, over the rows that we count, from the logits of speculators' model loaded from `folder`."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    ids, mask, states = (torch.as_tensor(part) for part in sample)
    logits, taught = [], []
    model.lm_head.register_forward_hook(lambda _m, _a, out: logits.append(out[0]))
    model.verifier_lm_head.register_forward_hook(lambda _m, _a, out: taught.append(out[0]))
    with torch.no_grad():
        model(
            hidden_states=states[None, :-1, :3].flatten(2),
            input_ids=ids[None, 1:],
            document_ids=torch.zeros(1, len(ids) - 1, dtype=torch.long),
            loss_mask=mask[None, 1:].bool(),
            verifier_last_hidden_states=states[None, 1:, 3],
            ttt_steps=steps,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
    first = int(mask.nonzero()[0]) - 1  # the row before the answer is the first that counts
    sums = []
    for step, rows in enumerate(logits):
        counted = range(first, len(ids) - 2 - step)
        p = taught[0][[row + step for row in counted]].log_softmax(-1)
        sums.append((p.exp() * (p - rows[list(counted)].log_softmax(-1))).sum())
    return torch.stack(sums)


@pytest.mark.parametrize(
    ("vocab", "overrides"),
    [
        (draft_vocab(), {}),
        (DraftVocab(512), {"norm_before_residual": False}),
        (draft_vocab(), {"rope": YARN, "num_kv_heads": 1, "norm_output": True}),
        (draft_vocab(), {"fc_norm": False, "norm_before_fc": True, "norm_output": True}),
        (draft_vocab(), {"norm_before_residual": False, "fc_norm": False}),
    ],
)
def test_speculators_computes_the_same_from_the_export(tiny_llama, tmp_path, sample, vocab, overrides):
    """Reloaded by the library whose layout it is, the draft's logits are ours: at every step, under every flag."""
    target, draft, teacher = new_draft(tiny_llama, vocab, **overrides)
    export(tmp_path / "draft", draft, target, vocab, LAYER_IDS, 3, {"thinking": False})
    ids, mask, states = sample
    batch = PackedBatch(torch.from_numpy(ids).long(), states, torch.from_numpy(mask).bool(), [0, len(ids)])
    ours = training_loss(draft, teacher, batch, torch.ones(4))
    assert ours.counts.tolist() == [23, 22, 21, 20]  # of 24 generated tokens, the first is no draft's
    torch.testing.assert_close(ours.loss_sums, speculators_losses(tmp_path / "draft", sample, 4), rtol=1e-5, atol=1e-4)


def test_a_draft_can_be_the_start_of_another(tiny_llama, tmp_path):
    """Our export, and the same weights under EAGLE's names with the full vocabulary, give back every weight."""
    target, draft, _ = new_draft(tiny_llama, DraftVocab(512), fc_norm=False)
    export(tmp_path / "ours", draft, target, DraftVocab(512), LAYER_IDS, 3)
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    (tmp_path / "eagle").mkdir()
    save_file(
        {name.replace("layers.0.", "midlayer."): tensor for name, tensor in stored.items()},
        tmp_path / "eagle" / "model.safetensors",
    )
    files.write_json(
        tmp_path / "eagle" / "config.json", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}}
    )
    for folder, normed in (("ours", True), ("eagle", False)):
        initial = InitialDraft.open(tmp_path / folder, LAYER_IDS, target.num_layers)
        assert initial.flags == {
            "norm_before_residual": normed, "norm_before_fc": False, "fc_norm": False, "norm_output": False
        }  # fmt: skip
        _, other, _ = new_draft(tiny_llama, draft_vocab(), fc_norm=False)
        if folder == "ours":
            other = Draft.create(draft.config, draft.embed_tokens.weight.detach(), torch.zeros(512, 64))
            initial.load_into(other, DraftVocab(512))
            rows = slice(None)
        else:
            initial.load_into(other, draft_vocab())
            rows = torch.from_numpy(draft_vocab().ids)
        for name, tensor in other.state_dict().items():
            expected = draft.state_dict()[name]
            assert torch.equal(tensor, expected[rows] if name == "lm_head.weight" else expected), name


def test_a_start_from_other_layers_or_another_vocabulary_is_refused(tiny_llama, tmp_path):
    """Both sets of auxiliary ids are named; a head of other tokens cannot be taken over."""
    vocab = DraftVocab(512, np.array([2, 5, 9]))
    target, draft, _ = new_draft(tiny_llama, vocab)
    export(tmp_path / "draft", draft, target, vocab, [0, 2, 4, 5], 3)
    with pytest.raises(ValueError, match=r"was trained on the auxiliary ids \[1, 3, 5\], these .* of \[2, 3, 5\]"):
        InitialDraft.open(tmp_path / "draft", LAYER_IDS, 6)
    initial = InitialDraft.open(tmp_path / "draft", [0, 2, 4, 5], 6)
    with pytest.raises(ValueError, match="its draft vocabulary is another one"):
        initial.load_into(draft, DraftVocab(512, np.array([2, 5, 8])))
    with pytest.raises(ValueError, match=r"--init-from .*: has no config\.json"):
        InitialDraft.open(tmp_path, LAYER_IDS, 6)
    (tmp_path / "half").mkdir()
    for name in ("config.json", "model.safetensors"):
        content = (tmp_path / "draft" / name).read_bytes()
        (tmp_path / "half" / name).write_bytes(content[: 10**3] if name == "model.safetensors" else content)
    with pytest.raises(ValueError, match="half/model.safetensors: not a whole safetensors file"):
        InitialDraft.open(tmp_path / "half", [0, 2, 4, 5], 6)
    config = files.read_json(tmp_path / "draft" / "config.json")
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    files.write_json(tmp_path / "draft" / "config.json", config)
    with pytest.raises(ValueError, match="has 2 decoder layers; drafts of one layer are trained here"):
        InitialDraft.open(tmp_path / "draft", [0, 2, 4, 5], 6)


def published(tiny_llama, folder, change=None):
    """An export of a reduced vocabulary into `folder`; `change(temporary)` happens before it is read back."""
    vocab = draft_vocab()
    target, draft, _ = new_draft(tiny_llama, vocab)
    if change is None:
        return export(folder, draft, target, vocab, LAYER_IDS, 3)
    with mock.patch.object(module, "flush_folder", change):
        return export(folder, draft, target, vocab, LAYER_IDS, 3)


def rewritten(**changes):
    """A change of some tensors of model.safetensors; None leaves one out."""

    def change(folder):
        stored = load_file(folder / "model.safetensors") | changes
        save_file({k: v for k, v in stored.items() if v is not None}, folder / "model.safetensors")

    return change


def reconfigured(**changes):
    def change(folder):
        files.write_json(folder / "config.json", files.read_json(folder / "config.json") | changes)

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (rewritten(**{"norm.weight": None}), r"shape of norm\.weight: expected \[64\], found None"),
        (rewritten(**{"fc.weight": torch.zeros(64, 256)}), r"fc\.weight: expected \[64, 192\], found \[64, 256\]"),
        (rewritten(**{"midlayer.x": torch.zeros(1)}), r"shape of midlayer\.x: expected None, found \[1\]"),
        (rewritten(d2t=torch.zeros(400, dtype=torch.int32)), "d2t is I32"),
        (rewritten(d2t=torch.zeros(400, dtype=torch.int64)), "d2t and t2d name different tokens"),
        (rewritten(**{"norm.weight": torch.zeros(64, dtype=torch.int64)}), r"norm\.weight is I64"),
        (reconfigured(fc_norm=None), r"fc_norm must be true or false, it is None"),
        (reconfigured(norm_before_residual="yes"), r"norm_before_residual must be true or false, it is 'yes'"),
        (
            reconfigured(eagle_aux_hidden_state_layer_ids=[2, 3, 5, 6]),
            r"three ascending ids from 1, found \[2, 3, 5, 6",
        ),
        (reconfigured(speculators_config={}), "speculators cannot load it: ValidationError"),
    ],
)
def test_an_export_that_would_not_be_served_never_gets_its_name(tiny_llama, tmp_path, change, named):
    """It is read back first, names, shapes, dtypes, flags and maps; the draft that was there stays as it was."""
    published(tiny_llama, tmp_path / "draft")
    before = {path.name: path.read_bytes() for path in (tmp_path / "draft").iterdir()}
    with pytest.raises(RuntimeError, match=rf"the exported draft would not be served: .*{named}"):
        published(tiny_llama, tmp_path / "draft", change)
    assert {path.name: path.read_bytes() for path in (tmp_path / "draft").iterdir()} == before


def test_without_speculators_the_rest_is_checked_and_that_is_said(tiny_llama, tmp_path, monkeypatch):
    """One line, no error; with it there is nothing to say."""
    assert published(tiny_llama, tmp_path / "draft") is None
    monkeypatch.setattr(exported, "find_spec", lambda name: None)
    assert published(tiny_llama, tmp_path / "draft") == exported.NO_SPECULATORS
    with pytest.raises(RuntimeError, match="fc_norm"):
        published(tiny_llama, tmp_path / "draft", reconfigured(fc_norm=None))


def test_reading_an_export_back_leaves_the_random_state_alone(tiny_llama, tmp_path):
    """A run that evaluates more often would otherwise go on with other random numbers."""
    published(tiny_llama, tmp_path / "draft")
    state = torch.get_rng_state()
    assert exported.check_export(tmp_path / "draft") is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_draft_names_its_target(tiny_llama, tiny_kimi, tmp_path):
    """The fingerprint that all stages compare; another target is refused by what differs, an unknown origin is not."""
    published(tiny_llama, tmp_path / "draft")
    config = files.read_json(tmp_path / "draft" / "config.json")
    exported.check_target(config, Target.open(tiny_llama), "--draft out/draft")
    with pytest.raises(ValueError, match=r"--draft out/draft was made with another target: its config \(expected"):
        exported.check_target(config, Target.open(tiny_kimi), "--draft out/draft")
    config.pop("target_fingerprint")
    exported.check_target(config, Target.open(tiny_kimi), "--draft out/draft")


@pytest.mark.parametrize(
    ("vocab", "overrides"),
    [
        (draft_vocab(), {}),
        pytest.param(DraftVocab(512), {"fc_norm": False, "norm_before_fc": True}, marks=pytest.mark.slow),
        pytest.param(draft_vocab(), {"fc_norm": False, "norm_output": True}, marks=pytest.mark.slow),
    ],
    ids=["normed each", "normed together, full vocabulary", "not normed"],
)
def test_vllms_own_draft_model_takes_the_export(tiny_llama, tmp_path, vocab, overrides):
    """Its Eagle3LlamaForCausalLM, built without memory or engine, reads every flag as we meant it, loads every tensor
    and misses none."""
    target, draft, _ = new_draft(tiny_llama, vocab, **overrides)
    export(tmp_path / "draft", draft, target, vocab, LAYER_IDS, 3)
    script = Path(__file__).with_name("vllm_draft.py")
    command = [sys.executable, script, tiny_llama, tmp_path / "draft"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    assert found["missing"] == [] and found["layers"] == [2, 3, 5]
    assert found["flags"] == {flag: getattr(draft.config, flag) for flag in NORM_FLAGS}
    assert ("model.input_norm.weight" in found["shapes"]) == draft.config.norm_before_fc
    assert ("model.fc_norm.2.weight" in found["shapes"]) == draft.config.fc_norm
    assert found["shapes"]["model.fc.weight"] == [64, 192]
    assert ("draft_id_to_target_id" in found["shapes"]) == (vocab.ids is not None)
