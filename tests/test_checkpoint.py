"""Checkpoints: whole or absent, equal to what was saved, the last few and the best kept."""

import pytest
import torch

from eagle3 import checkpoint
from eagle3.checkpoint import Position
from eagle3.ranks import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))
IDENTITY = {"settings": {"lr": 0.1, "seed": 3}}


def test_what_comes_back_is_what_was_saved(tmp_path):
    """Every dtype and shape, scalars included, and the position, without a pickle in the folder."""
    tensors = {
        "draft.fc.weight": torch.randn(3, 5),
        "optimizer.fc.weight.step": torch.tensor(7.0),
        "half": torch.randn(4).bfloat16(),
        "random": torch.get_rng_state(),
    }
    position = Position(step=12, tokens=345, skipped=1, packs_per_step=2, best_step=6, best_length=1.5)
    folder = checkpoint.save(tmp_path, tensors, position, IDENTITY, ALONE)
    assert folder == tmp_path / "checkpoints" / "step-000012"
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    loaded = checkpoint.load(tmp_path, 12)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
    assert checkpoint.read_position(tmp_path, 12) == (position, IDENTITY)


def test_a_save_that_was_killed_leaves_no_checkpoint(tmp_path, monkeypatch):
    """The folder gets its name last, and the next save clears what was left."""
    tensors = {"a": torch.ones(2)}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.files, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, tensors, Position(step=5), IDENTITY, ALONE)
    assert checkpoint.steps_on_disk(tmp_path) == []
    checkpoint.save(tmp_path, tensors, Position(step=6), IDENTITY, ALONE)
    checkpoint.prune(tmp_path, keep=2, best_step=None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000006"]


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    """Of steps 1 to 5 with the best at 2 and two kept: 2, 4 and 5."""
    for step in range(1, 6):
        checkpoint.save(tmp_path, {"a": torch.ones(1)}, Position(step=step), IDENTITY, ALONE)
    checkpoint.prune(tmp_path, keep=2, best_step=2)
    assert checkpoint.steps_on_disk(tmp_path) == [2, 4, 5]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_other_settings_are_named(tmp_path):
    """The first key that differs, with both values."""
    checkpoint.save(tmp_path, {"a": torch.ones(1)}, Position(step=1), IDENTITY, ALONE)
    with pytest.raises(ValueError, match=r"holds a run with another settings\.seed: expected 3, found 4"):
        stored = checkpoint.read_position(tmp_path, 1)[1]
        checkpoint.check_same_run(tmp_path, stored, {"settings": {"lr": 0.1, "seed": 4}})


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"position": {"steps": 1}}'])
def test_a_damaged_position_is_named(tmp_path, content):
    """What is no position of ours is a ValueError with the file's name: what to go on from is not guessed."""
    path = checkpoint.folder_of(tmp_path, 7) / checkpoint.POSITION
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ValueError, match=f"^{path}: "):
        checkpoint.read_position(tmp_path, 7)
