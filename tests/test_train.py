"""The training loop: what stops it, what it survives, and that the same command always ends in the same weights."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from states_folder import flip_a_byte, random_samples, write_hidden_states
from training_run import LAYER_IDS, SCRIPT, arguments, draft_vocab, planned, script, write_states

from eagle3 import checkpoint, cli, files, parts, train
from eagle3.draft import NORM_FLAGS, DraftConfig
from eagle3.files import locked
from eagle3.metrics import check_trackers, means_of
from eagle3.optim import learning_rate
from eagle3.ranks import Ranks
from eagle3.shards import METADATA, shard_name
from eagle3.target import Target
from eagle3.train import Trainer, evaluate, run_training
from eagle3.vocab import DraftVocab


@pytest.fixture(scope="module")
def states(tiny_llama, tmp_path_factory):
    return write_states(tmp_path_factory.mktemp("train") / "states", tiny_llama)


@pytest.fixture(scope="module")
def uninterrupted(tiny_llama, states, tmp_path_factory):
    """A run of two epochs of five packs, two a step: six steps, each epoch's last with one pack."""
    run = planned(tiny_llama, states, tmp_path_factory.mktemp("run"), grad_accumulation=2)
    assert run_training(run)
    return run


def last_state(run):
    return checkpoint.load(run.folder, checkpoint.steps_on_disk(run.folder)[-1])


def records(folder, kind="train"):
    """What the run recorded, by step."""
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {entry["step"]: entry for entry in entries if entry["kind"] == kind}


def assert_equal(expected, found):
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def ask_to_stop_after(monkeypatch, step):
    """A SIGTERM arrives while step `step` (0-based) computes its learning rate."""

    def learning_rate_then_signal(at, *args):
        if round(at) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return learning_rate(at, *args)

    monkeypatch.setattr(parts, "learning_rate", learning_rate_then_signal)


def test_the_learning_rate_rises_over_the_warm_up_and_falls_by_a_cosine():
    """Ten steps, two of warm-up: a half, whole, then cosine from whole at step 2 to nearly nothing at step 9."""
    rates = [learning_rate(step, 10, 2, 1.0) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.5)
    assert rates[9] == pytest.approx((1 + np.cos(np.pi * 7 / 8)) / 2)


def test_means_and_acceptance_length_by_hand():
    """10 rows at step 0, 6 at step 1, none at step 2; two drafts served: 1 + 5/10 + 3/6."""
    table = torch.tensor([[20.0, 9, 0], [8, 3, 0], [5, 3, 0], [10, 6, 0]], dtype=torch.float64)
    means = means_of(table, decay=0.8, num_drafts=2)
    assert means["loss_by_step"] == [2.0, 1.5, 0.0]
    assert means["loss"] == pytest.approx(2.0 + 0.8 * 1.5)
    assert means["accuracy"] == [0.8, 0.5, 0.0]
    assert means["accepted"] == [0.5, 0.5, 0.0]
    assert means["acceptance_length"] == 2.0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stopped_run_goes_on_to_the_same_weights_bit_for_bit(tiny_llama, states, tmp_path, monkeypatch, optimizer):
    """Weights, optimizer, learning rate, data order and random state: stopped in mid-epoch equals not stopped."""
    flags = {"optimizer": optimizer, "grad_accumulation": 2}
    whole = planned(tiny_llama, states, tmp_path / "whole", "--train-head", **flags)
    assert run_training(whole)
    args = (tiny_llama, states, tmp_path / "stopped", "--train-head")
    with monkeypatch.context() as patch:
        ask_to_stop_after(patch, 3)
        assert not run_training(planned(*args, **flags))
    assert checkpoint.steps_on_disk(tmp_path / "stopped")[-1] == 5  # asked in its fourth step, agreed on in the fifth
    stopped = planned(*args, **flags)
    assert run_training(stopped)
    assert_equal(last_state(whole), last_state(stopped))
    assert whole.position() == stopped.position()
    recorded = [records(run.folder) for run in (whole, stopped)]
    assert list(recorded[0]) == list(recorded[1]) == [2, 4, 6]
    assert [entries[4]["loss"] for entries in recorded] == [recorded[0][4]["loss"]] * 2


def test_two_ranks_equal_one_and_one_goes_on_where_two_stopped(tiny_llama, states, uninterrupted, tmp_path):
    """Loss and weights are normalised over all ranks, a rank without a pack joins in, and data order is the same."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(SCRIPT)]
    command += arguments(tiny_llama, states, tmp_path)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=300)
    run = planned(tiny_llama, states, tmp_path)
    for name, tensor in last_state(uninterrupted).items():
        torch.testing.assert_close(last_state(run)[name], tensor, rtol=1e-4, atol=1e-6)
    for entry in [*records(tmp_path).values(), *records(tmp_path, "eval").values()]:
        assert all(0 <= share <= 1 for share in entry["accuracy"] + entry["accepted"])
    os.rename(checkpoint.folder_of(tmp_path, 6), tmp_path / "two-ranks")
    assert run.position().step == 3
    assert run_training(run)
    assert run.position().packs_per_step == 2
    for name, tensor in last_state(uninterrupted).items():
        torch.testing.assert_close(last_state(run)[name], tensor, rtol=1e-4, atol=1e-6)


def test_the_script_stops_with_130_then_finishes_with_0_then_says_that_it_is_finished(
    tiny_llama, states, tmp_path, monkeypatch, capsys
):
    """A rerun of the same command resumes by itself, or says that there is nothing left to do."""
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, *arguments(tiny_llama, states, tmp_path)])

    def run_script():
        with pytest.raises(SystemExit) as ended:
            cli.run(script.parser(), script.check, script.work)
        return ended.value.code, capsys.readouterr().out

    with monkeypatch.context() as patch:
        ask_to_stop_after(patch, 0)
        code, out = run_script()
    assert (code, out.splitlines()[-1]) == (130, "stopped after step 2 of 10: the same command goes on from there")
    code, out = run_script()
    assert code == 0 and f"resumed: {tmp_path}/checkpoints/step-000002" in out and "done: 10 steps" in out
    before = sorted(tmp_path.rglob("*"))
    code, out = run_script()
    assert code == 0 and out == f"finished before, at step 10: the draft is {tmp_path}/draft\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_two_ranks_refuse_once_and_leave_together(tiny_llama, states, tmp_path):
    """torchrun's log has the refusal one time, not one a rank, and every rank's exit code is 2."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(SCRIPT)]
    command += arguments(tiny_llama, states, tmp_path, ttt_steps=100)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.stderr.count("error: --ttt-steps 100: expected 1 to 16") == 1
    assert re.findall(r"exitcode +: (-?\d+) \(pid", ended.stderr) == ["2", "2"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"ttt_steps": 100}, r"--ttt-steps 100: expected 1 to 16 \(7 in EAGLE-3"),
        ({"num_speculative_tokens": 1000}, r"--num-speculative-tokens 1000: expected 1 to 16 \(3 to 5 are usual"),
    ],
)
def test_a_chain_of_drafts_that_no_target_would_accept_is_refused(tiny_llama, states, tmp_path, flags, said):
    """The range is named."""
    with pytest.raises(ValueError, match=said):
        planned(tiny_llama, states, tmp_path, **flags)


def test_a_damaged_sample_is_named_when_it_is_read(tiny_llama, states, tmp_path):
    """One bit of the states: the run ends before it learns from them, with shard, sample and remedy."""
    folder = shutil.copytree(states, tmp_path / "states")
    flip_a_byte(folder / shard_name(1), "hidden_states")
    run = planned(tiny_llama, folder, tmp_path / "run", eval_fraction=0)
    said = (
        rf"{shard_name(1)}: sample 's\d' does not match its checksum; 02_extract_hidden_states.py .* redoes the shard"
    )
    with pytest.raises(ValueError, match=said):
        run_training(run)


def test_damaged_ids_are_refused_before_the_training(tiny_llama, states, tmp_path):
    """They are read at the start anyway, and looked at then."""
    folder = shutil.copytree(states, tmp_path / "states")
    flip_a_byte(folder / shard_name(1), "loss_mask")
    with pytest.raises(ValueError, match=rf"{shard_name(1)}: ids, mask or offsets do not match their checksum; 02_"):
        planned(tiny_llama, folder, tmp_path / "run")


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_counted(tiny_llama, tmp_path, monkeypatch, capsys):
    """One sample with a NaN: its steps change nothing; above the share of such steps the run ends and says why."""
    samples = random_samples([20] * 10, num_layers=4, hidden_size=64, vocab_size=512)
    samples[4][2][15] = torch.nan
    target = Target.open(tiny_llama)
    folder = write_hidden_states(tmp_path / "states", target, samples, LAYER_IDS, draft_vocab())
    run = planned(tiny_llama, folder, tmp_path / "run", batch_tokens=40, eval_fraction=0, log_interval=1)
    assert run_training(run)
    assert (run.position().step, run.position().skipped) == (10, 2)
    assert all(tensor.isfinite().all() for tensor in last_state(run).values())
    assert capsys.readouterr().out.count("gradient norm nan, step skipped") == 2
    assert len(records(run.folder)) == 8
    monkeypatch.setattr(train, "MAX_SKIPPED", 1)
    with pytest.raises(RuntimeError, match=r"2 of \d+ steps had a gradient that is not finite"):
        run_training(planned(tiny_llama, folder, tmp_path / "ended", batch_tokens=40, eval_fraction=0))


def test_every_norm_moves_even_at_a_small_rate(tiny_llama, states, tmp_path):
    """Masters are fp32: with bf16 ones, updates of 1e-4 left every norm weight at exactly 1.0."""
    run = planned(tiny_llama, states, tmp_path, lr=1e-4, epochs=5)
    assert run_training(run)
    norms = {name: tensor for name, tensor in last_state(run).items() if name.startswith("draft.") and tensor.ndim == 1}
    assert len(norms) == 7
    assert all(tensor.dtype == torch.float32 and not (tensor == 1).any() for tensor in norms.values())


def test_evaluation_changes_nothing(tiny_llama, states, tmp_path):
    """No gradient, no mode, no random number is left behind, and the held-out samples are never trained on."""
    trainer = Trainer.start(planned(tiny_llama, states, tmp_path), Ranks.join())
    before = train.state(trainer.draft, trainer.optimizer)
    means = evaluate(trainer)
    assert_equal(before, train.state(trainer.draft, trainer.optimizer))
    assert trainer.draft.training and all(p.grad is None for p in trainer.draft.parameters())
    assert means == evaluate(trainer)
    held_out = {sample for samples in trainer.eval_packs for sample in samples}
    assert len(held_out) == 4 and held_out.isdisjoint(trainer.schedule.samples)


def test_a_run_that_learns_lowers_its_loss(tiny_llama, states, tmp_path):
    """By more than a tenth in six steps, at a rate for so few of them."""
    run = planned(tiny_llama, states, tmp_path, grad_accumulation=2, lr=1e-2)
    assert run_training(run)
    losses = [entry["loss"] for entry in records(run.folder).values()]
    assert losses[-1] < 0.9 * losses[0]


def test_the_default_norms_are_those_of_the_draft():
    """The flags, which are there before torch is, and the draft's own configuration say the same."""
    flags = script.parser().parse(arguments(Path("target"), Path("states"), Path("run")))
    assert {name: getattr(flags, name) for name in NORM_FLAGS} == {n: getattr(DraftConfig, n) for n in NORM_FLAGS}


def test_a_run_exports_its_best(uninterrupted):
    """The export stands beside the run's best checkpoint, which is kept."""
    assert all(entry["tflops"] > 0 and entry["mfu"] is None for entry in records(uninterrupted.folder).values())
    evaluated = records(uninterrupted.folder, "eval")
    lengths = {step: entry["acceptance_length"] for step, entry in evaluated.items()}
    position = uninterrupted.position()
    assert lengths[position.best_step] == position.best_length == max(lengths.values())
    assert (uninterrupted.folder / "draft" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"lr": 1e-3}, r"settings\.lr: expected 0\.003, found 0\.001"),
        ({"seed": 1}, r"settings\.seed: expected 0, found 1"),
        ({"optimizer": "muon"}, r"settings\.optimizer: expected 'adamw', found 'muon'"),
    ],
)
def test_a_run_goes_on_with_no_other_settings(tiny_llama, states, uninterrupted, flags, named):
    """Refused before any work, by the name of the setting."""
    with pytest.raises(ValueError, match=f"--output-dir .* holds a run with another {named}"):
        planned(tiny_llama, states, uninterrupted.folder, **({"grad_accumulation": 2} | flags))


def test_a_run_goes_on_with_no_other_data(tiny_llama, uninterrupted, tmp_path):
    """Other samples are another run."""
    samples = random_samples([20] * 10, num_layers=4, hidden_size=64, vocab_size=512)
    other = write_hidden_states(tmp_path, Target.open(tiny_llama), samples, LAYER_IDS, draft_vocab())
    with pytest.raises(ValueError, match=r"holds a run with another part\.samples: expected"):
        planned(tiny_llama, other, uninterrupted.folder, grad_accumulation=2)


def test_a_run_goes_on_with_no_other_vocabulary(tiny_llama, states, uninterrupted, tmp_path):
    """A map made again from other counts would name other tokens than the rows of the checkpoint's head (T4)."""
    other = shutil.copytree(states, tmp_path / "states")
    DraftVocab(512, np.arange(400)).save(other)
    with pytest.raises(ValueError, match=r"holds a run with another .*draft_vocab: expected"):
        planned(tiny_llama, other, uninterrupted.folder, grad_accumulation=2)


def test_states_that_cannot_be_trained_on_are_refused(tiny_llama, tmp_path):
    """Unfinished, of an unknown layer convention, of another target: said before any weight is read."""
    samples = random_samples([20] * 10, num_layers=4, hidden_size=64, vocab_size=512)
    target = Target.open(tiny_llama)

    def refusal(name, **changes):
        folder = write_hidden_states(tmp_path / name, target, samples, LAYER_IDS, draft_vocab(), **changes)
        if name == "unfinished":
            (folder / shard_name(1)).unlink()
        if name == "foreign":
            shutil.copy(folder / shard_name(1), folder / shard_name(4))
        if name == "no vocabulary":
            (folder / "draft_vocab.json").unlink()
        if name in ("num_shards", "settings"):
            files.write_json(
                folder / METADATA, {k: v for k, v in files.read_json(folder / METADATA).items() if k != name}
            )
        if name == "ids":
            files.write_json(folder / "draft_vocab.json", files.read_json(folder / "draft_vocab.json") | {"ids": "all"})
        with pytest.raises(ValueError) as refused:
            planned(tiny_llama, folder, tmp_path / "run")
        return str(refused.value)

    assert "unfinished, it has 3 of 4 shards" in refusal("unfinished")
    said = "shard-00004.safetensors is not of this set, whose metadata.json says 4 shards (5 are there)"
    assert said in refusal("foreign")
    assert "has no draft_vocab.json; 02_extract_hidden_states.py copies it" in refusal("no vocabulary")
    for key in ("num_shards", "settings"):
        assert f"metadata.json: has no {key!r}, so it is not as 02_extract" in refusal(key)
    assert "ids/draft_vocab.json: " in refusal("ids")
    assert "unknown convention, 'input of layer'" in refusal("convention", layer_convention="input of layer")
    other = target.fingerprint | {"weights": "0" * 64}
    assert "made with another target: its weights (expected" in refusal("other", target=other)
    with pytest.raises(ValueError, match=r"has no metadata\.json; 02_extract_hidden_states\.py writes such a folder"):
        planned(tiny_llama, tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_go_where_the_states_are(tiny_llama, states, tmp_path):
    """Both keep a status.json, and who deletes the states of a part would delete the draft: refused however spelled."""
    before = sorted(path.name for path in states.iterdir())
    with pytest.raises(ValueError, match="--output-dir .*: holds the hidden states themselves; name another folder"):
        planned(tiny_llama, states, states / "." / ".." / states.name)
    assert sorted(path.name for path in states.iterdir()) == before


def test_a_tracker_that_is_not_installed_is_refused_by_name(tiny_llama, states, tmp_path):
    """Said before the training, not at its first line."""
    check_trackers(["tensorboard"])
    with pytest.raises(ValueError, match=r"--track no_such_tracker: the package is not installed"):
        check_trackers(["no_such_tracker"])


def test_samples_without_an_answer_are_refused(tiny_llama, tmp_path):
    """All masks zero: the loss would be a healthy-looking 0."""
    samples = [(ids, mask * 0, states) for ids, mask, states in random_samples([20] * 10, 4, 64, 512)]
    folder = write_hidden_states(tmp_path / "states", Target.open(tiny_llama), samples, LAYER_IDS, draft_vocab())
    with pytest.raises(ValueError, match="no sample has two generated tokens in a row to learn from"):
        planned(tiny_llama, folder, tmp_path / "run")


def test_a_second_run_in_the_same_folder_is_refused(tiny_llama, states, tmp_path):
    """Two runs would remove each other's checkpoints."""
    with locked(tmp_path), pytest.raises(ValueError, match=rf"--output-dir {tmp_path}: another run writes there"):
        run_training(planned(tiny_llama, states, tmp_path))


def test_a_batch_without_supervised_rows_is_harmless(tiny_llama, tmp_path):
    """Most packs hold only a prompt: the others are trained on as if they were alone."""
    samples = random_samples([20] * 10, num_layers=4, hidden_size=64, vocab_size=512)
    for _, mask, _ in samples[1:]:
        mask[:] = 0
    folder = write_hidden_states(tmp_path / "states", Target.open(tiny_llama), samples, LAYER_IDS, draft_vocab())
    run = planned(tiny_llama, folder, tmp_path / "run", batch_tokens=20, eval_fraction=0, log_interval=1, epochs=1)
    assert run_training(run)
    norms = [entry["grad_norm"] for entry in records(run.folder).values()]
    assert len(norms) == 10 and sorted(norm > 0 for norm in norms) == [False] * 9 + [True]
    assert run.position().skipped == 0
