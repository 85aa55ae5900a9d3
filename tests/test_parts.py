"""One training over parts that come and go: one schedule, one optimizer, one held-out split."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from states_folder import flip_a_byte, random_samples, write_hidden_states
from training_run import LAYER_IDS, SCRIPT, draft_vocab, planned

from eagle3 import checkpoint, parts
from eagle3.optim import learning_rate
from eagle3.parts import Course, Parts
from eagle3.ranks import Ranks
from eagle3.shards import ShardSet, copy_samples, shard_name
from eagle3.target import Target
from eagle3.train import Trainer, evaluate, run_training

ROOT = SCRIPT.parent
EACH = {"batch_tokens": 20, "log_interval": 1, "checkpoint_interval": 5}  # a step a sample, a line a step


@pytest.fixture(scope="module")
def folders(tiny_llama, tmp_path_factory):
    """Twenty samples of one length: the whole set under 0, its halves under 1 and 2."""
    folder = tmp_path_factory.mktemp("parts")
    samples = random_samples([20] * 20, num_layers=4, hidden_size=64, vocab_size=512)

    def written(number):
        part = (number, 2) if number else None
        return write_hidden_states(
            folder / str(number), Target.open(tiny_llama), samples, LAYER_IDS, draft_vocab(), part=part
        )

    return {number: written(number) for number in (0, 1, 2)}


def records(folder, kind="train"):
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [entry for entry in entries if entry["kind"] == kind]


def last_state(run):
    return checkpoint.load(run.folder, checkpoint.steps_on_disk(run.folder)[-1])


@pytest.fixture(scope="module")
def half_way(tiny_llama, folders, tmp_path_factory):
    """A run that has been trained on part 1 of 2, which is then gone."""
    folder = tmp_path_factory.mktemp("half-way")
    here = shutil.copytree(folders[1], folder / "part-1")
    assert run_training(planned(tiny_llama, here, folder / "run", **EACH))
    shutil.rmtree(here)
    return folder / "run"


@pytest.fixture
def run_folder(half_way, tmp_path):
    return shutil.copytree(half_way, tmp_path / "run")


def test_two_parts_have_the_steps_and_rates_of_one_uninterrupted_schedule(tiny_llama, folders, tmp_path):
    """2 epochs of 20 samples in one set are 40 steps, and so are those of the halves; the optimizer counts on."""
    whole = planned(tiny_llama, folders[0], tmp_path / "whole", eval_fraction=0, **EACH)
    assert run_training(whole)
    for number in (1, 2):
        run = planned(tiny_llama, folders[number], tmp_path / "parts", eval_fraction=0, **EACH)
        assert run_training(run)
    rates = [[(entry["step"], entry["lr"]) for entry in records(r.folder)] for r in (whole, run)]
    assert rates[0] == rates[1] == [(i + 1, learning_rate(i, 40, 2, 3e-3)) for i in range(40)]
    assert last_state(run)["optimizer.fc.weight.step"] == last_state(whole)["optimizer.fc.weight.step"] == 40
    position = run.position()
    assert (position.step, position.parts_done, position.finished) == (40, 2, True)


def test_each_part_takes_its_share_of_the_schedule_whatever_its_length():
    """Parts of 10 and 30 steps: the first ends and the second begins half-way down, and the last rate is near 0.

    By hand: 20 and then 60 steps in all, no warm-up. Step 5 is at 5/20; the second part's step 15 at (30 + 15)/60.
    """
    first = Course.of(Parts([1], 2), 0, 0, 10, None)
    second = Course.of(Parts([2], 2), 1, 10, 30, None)
    assert (first.end, first.num_steps, second.end, second.num_steps) == (10, 20, 40, 40)
    assert first.learning_rate(5, 0, 1.0) == pytest.approx(learning_rate(1, 4, 0, 1.0))
    assert second.learning_rate(10, 0, 1.0) == pytest.approx(0.5)
    assert second.learning_rate(25, 0, 1.0) == pytest.approx(learning_rate(3, 4, 0, 1.0))
    rates = [c.learning_rate(step, 0, 1.0) for c in (first, second) for step in range(c.start, c.end)]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 0.001


def test_max_steps_are_shared_by_the_parts():
    """Ten steps over three parts are 3, 3 and 4; two parts at once take both their shares."""
    lengths = [Course.of(Parts([n], 3), n - 1, 0, 99, 10).steps for n in (1, 2, 3)]
    assert lengths == [3, 3, 4]
    assert Course.of(Parts([2, 3], 3), 1, 3, 99, 10).steps == 7
    assert Course.of(Parts([1], 1), 0, 0, 99, 10).steps == 10


def test_fewer_steps_than_parts_are_refused(tiny_llama, folders, tmp_path):
    """A part without a step would never be done."""
    with pytest.raises(ValueError, match="--max-steps 1: fewer than the 2 parts that share them"):
        planned(tiny_llama, folders[1], tmp_path, max_steps=1, **EACH)


def test_a_damaged_sample_is_not_kept(folders, tmp_path):
    """The copy would have a checksum that holds."""
    damaged = shutil.copytree(folders[1], tmp_path / "damaged")
    flip_a_byte(damaged / shard_name(0), "hidden_states")
    data = ShardSet(damaged)
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors: sample 's\d' does not match its checksum"):
        copy_samples(data, range(len(data)), tmp_path / "kept")


def test_a_run_stopped_inside_its_second_part_goes_on_bit_for_bit(
    tiny_llama, folders, half_way, run_folder, tmp_path, monkeypatch
):
    """Weights, moments, random state, and where it stands, equal those of a run that was not stopped."""
    whole = planned(tiny_llama, folders[2], shutil.copytree(half_way, tmp_path / "whole"), **EACH)
    assert run_training(whole)
    calls = []
    with monkeypatch.context() as patch:

        def rate_then_signal(*args):
            calls.append(args)
            if len(calls) == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            return learning_rate(*args)

        patch.setattr(parts, "learning_rate", rate_then_signal)
        assert not run_training(planned(tiny_llama, folders[2], run_folder, **EACH))
    stopped = planned(tiny_llama, folders[2], run_folder, **EACH)
    assert (stopped.position().step, stopped.position().parts_done, stopped.position().part_start) == (24, 1, 16)
    assert run_training(stopped)
    assert whole.position() == stopped.position()
    states = last_state(whole), last_state(stopped)
    assert states[0].keys() == states[1].keys()
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []


def test_the_samples_held_out_of_the_first_part_judge_the_whole_run(tiny_llama, folders, half_way, run_folder):
    """They outlive their part, no part trains on them, and the next part begins where that one ended."""
    first = ShardSet(folders[1])
    kept = ShardSet(half_way / "held_out")
    assert len(kept) == 2 and set(kept.sample_ids) < set(first.sample_ids)
    trainer = Trainer.start(planned(tiny_llama, folders[2], run_folder, **EACH), Ranks.join())
    data = trainer.run.states.data
    assert sorted(data.sample_ids[i] for i in trainer.samples.train) == sorted(data.sample_ids)
    assert set(kept.sample_ids).isdisjoint(data.sample_ids)
    last = records(half_way, "eval")[-1]
    again = evaluate(trainer)
    assert {key: last[key] for key in again} == again


def test_what_is_kept_is_what_was_stored(folders, tmp_path):
    """Ids, masks, states and their checksums, across shards; fp8 with its scales."""
    data = ShardSet(folders[0])
    copy_samples(data, [1, 2, 7, 19], tmp_path)
    kept = ShardSet(tmp_path)
    assert kept.sample_ids == ["s1", "s2", "s7", "s19"] and kept.shared == data.shared
    assert [len(shard) for shard in kept.shards] == [2, 1, 1]
    assert all(shard.faults() == [] for shard in kept.shards)
    for found, wanted in zip(kept, map(data.__getitem__, (1, 2, 7, 19)), strict=True):
        assert torch.equal(found.hidden_states, wanted.hidden_states)
        assert torch.equal(found.input_ids, wanted.input_ids) and torch.equal(found.loss_mask, wanted.loss_mask)


def test_a_part_that_was_trained_is_passed_over_by_name(tiny_llama, folders, run_folder, capsys):
    """The same command again does nothing, says which part is done, and marks it for the script that deletes it."""
    (run_folder / "part-00001-of-00002.done").unlink()
    before = sorted(run_folder.rglob("*"))
    assert run_training(planned(tiny_llama, folders[1], run_folder, **EACH))
    assert capsys.readouterr().out == f"part 1/2 was trained before, at step 16: the draft is {run_folder}/draft\n"
    assert sorted({*run_folder.rglob("*")} - {*before}) == [run_folder / "part-00001-of-00002.done"]


def test_a_part_out_of_turn_is_refused_by_name(tiny_llama, folders, run_folder, tmp_path):
    """Part 2 first; part 3 after part 1; parts 1 and 2 together once 1 is trained."""
    with pytest.raises(ValueError, match=r"part 2/2 is given, but 0 of 2 parts are trained: part 1/2 is next"):
        planned(tiny_llama, folders[2], tmp_path / "new", **EACH)
    with pytest.raises(ValueError, match=r"part 1/2 and 2/2 is given, but 1 of 2 parts are trained: part 2/2 is next"):
        planned(tiny_llama, [folders[1], folders[2]], run_folder, **EACH)
    with pytest.raises(ValueError, match=r"part 3/4 is given, but 1 of 4 parts are trained: part 2/4 is next"):
        Parts([3], 4).check_turn(1)


def test_a_part_of_another_set_or_other_settings_is_refused_by_name(tiny_llama, folders, run_folder, tmp_path):
    """Another number of parts, the whole set, another rate, a folder without the samples that judge the run."""
    thirds = random_samples([20] * 20, 4, 64, 512)
    other = write_hidden_states(
        tmp_path / "third", Target.open(tiny_llama), thirds, LAYER_IDS, draft_vocab(), part=(2, 3)
    )
    with pytest.raises(ValueError, match=r"holds a run with another data\.parts: expected 2, found 3"):
        planned(tiny_llama, other, run_folder, **EACH)
    with pytest.raises(ValueError, match=r"holds a run with another data\.parts: expected 2, found 1"):
        planned(tiny_llama, folders[0], run_folder, **EACH)
    with pytest.raises(ValueError, match=r"holds a run with another settings\.lr: expected 0\.003, found 0\.1"):
        planned(tiny_llama, folders[2], run_folder, lr=0.1, **EACH)
    shutil.rmtree(run_folder / "held_out")
    with pytest.raises(ValueError, match=r"held_out: missing; it holds the samples of the first part"):
        planned(tiny_llama, folders[2], run_folder, **EACH)


def test_all_parts_together_are_the_whole_set(tiny_llama, folders, tmp_path, capsys):
    """Given in any order they are one set of 20 samples, trained on in one go, with nothing kept aside."""
    run = planned(tiny_llama, [folders[2], folders[1]], tmp_path / "run", **EACH)
    assert run.states.parts == Parts([1, 2], 2)
    assert sorted(run.states.data.sample_ids) == sorted(ShardSet(folders[0]).sample_ids)
    assert run_training(run)
    assert (run.position().step, run.position().finished) == (32, True)
    assert len(list(run.folder.glob("part-0000?-of-00002.done"))) == 2
    assert "data: 16 samples to train on" in capsys.readouterr().out
    assert not (run.folder / "held_out").exists()


def test_folders_that_are_not_parts_of_one_set_are_refused(tiny_llama, folders, tmp_path):
    """The same part twice, a part and a whole set."""
    with pytest.raises(ValueError, match=r"expected different parts of one set, found 1/2, 1/2"):
        planned(tiny_llama, [folders[1], shutil.copytree(folders[1], tmp_path / "twin")], tmp_path / "run")
    with pytest.raises(ValueError, match=r"are not parts of one set: part: expected 'of 1', found 'of 2'"):
        planned(tiny_llama, [folders[0], folders[1]], tmp_path / "run")


def documented_loop() -> str:
    """The shell loop of docs/training.md, with two parts."""
    text = (ROOT / "docs" / "training.md").read_text()
    block = text.split("## Over parts")[1].split("    n=8\n")[1]
    lines = block.split("\n\n")[0].splitlines()
    assert all(line.startswith("    ") for line in lines)
    return "n=2\n" + "\n".join(line.removeprefix("    ") for line in lines)


EXTRACT = """#!/bin/sh
case "$1" in 02_extract_hidden_states.py) ;; *) exit 9 ;; esac
for last; do :; done
mkdir -p data/hidden_states
cp -rL parts/${last%/*} data/hidden_states/$(printf 'part-%05d-of-%05d' ${last%/*} ${last#*/})
"""


def test_the_documented_loop_trains_over_parts_and_goes_on_where_it_was_killed(tiny_llama, folders, tmp_path):
    """As it stands in docs/training.md, 02 replaced by a copy: each part is there only while it is trained on.

    The first time it dies in its second part, the second time it extracts that part alone.
    """
    (tmp_path / "parts").mkdir()
    for number in (1, 2):
        (tmp_path / "parts" / str(number)).symlink_to(folders[number])
    (tmp_path / "configs").mkdir()
    flags = {"model-path": tiny_llama, "output-dir": "out", "epochs": 1, "ttt-steps": 2, "eval-fraction": 0.2}
    text = "train:\n" + "".join(f"  {k}: {v}\n" for k, v in flags.items()) + "  track: []\n"
    (tmp_path / "configs" / "kimi_k25.yaml").write_text(text)
    commands = {
        "python": EXTRACT,
        "torchrun": f'#!/bin/sh\nshift 3\nPYTHONPATH={ROOT} exec {sys.executable} {SCRIPT} "$@"\n',
    }
    (tmp_path / "bin").mkdir()
    for name, content in commands.items():
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def loop():
        command = ["bash", "-c", documented_loop()]
        return subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)

    (tmp_path / "parts" / "2").unlink()
    first = loop()
    assert first.returncode == 1 and "part 1/2 is trained, part 2/2 is next" in first.stdout, first.stderr
    assert list((tmp_path / "data" / "hidden_states").iterdir()) == []
    (tmp_path / "parts" / "2").symlink_to(folders[2])
    second = loop()
    assert second.returncode == 0 and "resumed: out/checkpoints/" in second.stdout, second.stderr
    assert second.stdout.splitlines()[-1].startswith("done: ")
    assert list((tmp_path / "data" / "hidden_states").iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "out").glob("*.done")) == [
        "part-00001-of-00002.done",
        "part-00002-of-00002.done",
    ]
