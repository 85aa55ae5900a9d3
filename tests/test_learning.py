"""bench/learning.py: speculators' own trainer sees what ours sees, and the comparison's arithmetic by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from states_folder import random_samples, write_hidden_states
from training_run import LAYER_IDS, draft_vocab

from bench import speculators_trainer, train_step
from bench.learning import Recipe, Study, acceptance_lengths, counts, parse, ratio, recipes_of, train
from eagle3 import files
from eagle3.batches import read_pack, split
from eagle3.draft import Draft, DraftConfig, Teacher, embedding
from eagle3.states import HiddenStates
from eagle3.target import Target

LENGTH, SAMPLES, HELD_OUT = 24, 10, 0.2


@pytest.fixture(scope="module")
def states_path(tiny_llama, tmp_path_factory):
    """Random states of ten samples, all of one length."""
    target = Target.open(tiny_llama)
    samples = random_samples([LENGTH] * SAMPLES, 4, target.hidden_size, target.vocab_size)
    return write_hidden_states(
        tmp_path_factory.mktemp("learning") / "states", target, samples, LAYER_IDS, draft_vocab()
    )


@pytest.fixture(scope="module")
def states(states_path, tiny_llama):
    return HiddenStates.open(states_path, Target.open(tiny_llama))


@pytest.fixture(scope="module")
def converted(states, tmp_path_factory):
    folder = tmp_path_factory.mktemp("learning") / "converted"
    speculators_trainer.convert(states, HELD_OUT, folder)
    return folder


def their_dataset(states, folder, half):
    from speculators.train.data import ArrowDataset

    share = speculators_trainer.flags(states, HELD_OUT, 64, 1, 0)["train-data-ratio"]
    kind = torch.float32
    return ArrowDataset(64, folder, on_missing="raise", train_ratio=share, split=half, hidden_states_dtype=kind)


@pytest.mark.parametrize(("half", "index"), [("train", 0), ("val", 1)])
def test_their_own_loader_reads_the_same_samples_in_the_same_halves(states, converted, half, index):
    """Row t: the three layers at t, the last layer, the id and the mask at t + 1, position t + 1."""
    from speculators.models.eagle3.data import shift_batch

    dataset, ours = their_dataset(states, converted, half), split(states.data.sample_ids, HELD_OUT)[index]
    assert len(dataset) == len(ours)
    for place, number in enumerate(ours):
        row, sample = shift_batch(dataset[place]), states.data[number]
        assert torch.equal(row["hidden_states"], sample.hidden_states[:-1, :3].flatten(1))
        assert torch.equal(row["verifier_last_hidden_states"], sample.hidden_states[1:, 3])
        assert torch.equal(row["input_ids"], sample.input_ids[1:])
        assert torch.equal(row["loss_mask"].bool(), sample.loss_mask[1:])
        assert row["position_ids"].tolist() == list(range(1, LENGTH))


def test_with_equal_weights_each_row_has_the_same_loss_at_each_step(states, converted, tiny_llama):
    """Their model on their own loader's batch of the converted files, ours on the shards: KL by row and step."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    order, target = split(states.data.sample_ids, HELD_OUT)[0], Target.open(tiny_llama)
    config = DraftConfig.for_target(target, states.vocab)
    case = train_step.Case(config, len(order), LENGTH, 4, 2 / 3, torch.device("cpu"), torch.float32)
    torch.manual_seed(0)
    teacher = Teacher.for_target(target, states.vocab)
    draft = Draft.create(config, embedding(target).float(), teacher.head)
    dataset = their_dataset(states, converted, "train")
    collate = CollateFn(case.tokens, config.hidden_size, dtype=torch.float32, preprocess=shift_batch)
    batch = collate([dataset[i] for i in range(len(order))])
    assert batch.pop("error_records") == 0
    peer = train_step.peer_rows(case, train_step.peer_model(draft, teacher, "sdpa"), batch)
    ours = train_step.our_rows(case, draft, teacher, read_pack(states.data, order))
    found = train_step.agreement(case, ours, peer)
    assert found["rows_both_supervise"] == int((~ours.isnan()).sum()) == len(order) * sum(range(12, 16))
    assert found["mean_kl"] > 0.1


def test_the_epochs_of_their_loop_hold_the_steps_and_no_more():
    """Ten samples of 24 tokens, 48 a step: five steps an epoch, whatever the seed."""
    assert [speculators_trainer.epochs([24] * 10, 48, steps, 3) for steps in (1, 5, 6, 10, 11)] == [1, 1, 2, 2, 3]


@pytest.mark.slow
def test_both_trainers_run_as_many_steps_and_leave_drafts_of_the_same_layers_and_vocabulary(
    states_path, tiny_llama, tmp_path
):
    """Both real trainers by their command lines; speculators' head starts as the teacher's, so the maps are right."""
    config = tmp_path / "config.yaml"
    config.write_text("train: {batch-tokens: 64, ttt-steps: 3, epochs: 3, eval-fraction: 0.2}\n")
    paths = ["--model-path", tiny_llama, "--hidden-states", states_path, "--output", tmp_path / "out"]
    words = [*paths, "--prompts", "none.jsonl", "--config", config, "--tune-lr", "0.001"]
    study = Study.of(parse(list(map(str, words))))
    assert study.steps == 3 * 4
    study.convert()
    ours, theirs = (train(study, recipe, 1e-3, 0) for recipe in recipes_of(study.args))
    drafts = [load_file(f"{side.draft}/model.safetensors") for side in (ours, theirs)]
    configs = [files.read_json(Path(side.draft, "config.json")) for side in (ours, theirs)]
    for key in ("eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "norm_before_residual"):
        assert configs[0][key] == configs[1][key]
    for key in ("d2t", "t2d", "embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(drafts[0][key].to(drafts[1][key].dtype), drafts[1][key]), key  # theirs is bfloat16
    lines = Path(ours.draft).with_name("metrics.jsonl").read_text().splitlines()
    state = torch.load(f"{theirs.draft}/scheduler_state_dict.pt", weights_only=True)
    assert json.loads(lines[-1])["step"] == 12 and (state if isinstance(state, dict) else state[0])["last_epoch"] <= 12
    assert ours.held_out >= 1 and theirs.held_out >= 1
    assert train(study, recipes_of(study.args)[1], 1e-3, 0) == theirs, "finished trainings are not done again"


def prompts(*rows):
    """Counts of a benchmark: for each prompt (accepted tokens, passes) of each draft."""
    return np.array(rows)


def test_the_ratio_of_acceptance_lengths_by_hand():
    """Lengths 1 + 9/6 = 2.5 and 1 + 6/6 = 2; of two prompts, a draw is AA, AB (half of all draws) or BB."""
    a, b = [(6, 3), (3, 3)], [(3, 3), (3, 3)]
    first, other = slice(0, 1), slice(1, 2)
    assert ratio(acceptance_lengths([prompts(a, b)]), first, other) == {"ratio": 1.25, "low": 1.0, "high": 1.5}
    kept = ratio(acceptance_lengths([prompts(a), prompts(b)]), first, other)
    assert kept == {"ratio": 1.25, "low": 1.25, "high": 1.25}, "a benchmark keeps its number of prompts"
    assert ratio(acceptance_lengths([prompts(a, b)]), first, first) == {"ratio": 1, "low": 1, "high": 1}, (
        "both see the same prompts"
    )


def test_a_recipe_is_the_mean_of_its_seeds():
    """Lengths 2 and 3 of two seeds against 2."""
    lengths = acceptance_lengths([prompts([(3, 3), (6, 3), (3, 3)])])
    assert ratio(lengths, slice(0, 2), slice(2, 3))["ratio"] == 1.25


def test_counts_are_those_of_the_draft():
    """04 measures the target alone as well, which accepts nothing."""
    answers = [
        {"measurement": n, "benchmark": name, "accepted": accepted}
        for n, name, accepted in [(0, "x", None), (0, "y", None), (1, "x", [3, 0]), (1, "x", [2]), (1, "y", [0, 0])]
    ]
    found = counts({"answers": answers})
    assert {name: table.tolist() for name, table in found.items()} == {"x": [[3, 2], [2, 1]], "y": [[0, 2]]}


def test_recipes_without_a_name_or_with_one_name_twice_are_refused():
    rest = ["--model-path", "m", "--hidden-states", "h", "--prompts", "p", "--output", "o"]
    with pytest.raises(ValueError, match="different names"):
        recipes_of(parse([*rest, "--ours", "a=--loss kl", "a=--loss ce"]))
    with pytest.raises(ValueError, match="different names"):
        recipes_of(parse([*rest, "--ours", "=--loss kl"]))
    found = recipes_of(parse([*rest, "--ours", "a=--loss ce --lr 1e-3", "--speculators"]))
    assert found == [Recipe("a", True, ["--loss", "ce", "--lr", "1e-3"])] and found[0].has_lr
