"""The evaluation's figures, worked out by hand from small passes, and what it refuses before anything loads."""

import json
from types import SimpleNamespace

import pytest

from eagle3 import evaluate
from tests import stages


def answered(*answers, seconds, **counters) -> evaluate.Pass:
    """A pass with these (tokens, accepted) answers."""
    made = [
        evaluate.Answer(evaluate.Prompt(f"p{i}", None, [1]), list(ids), list(accepted))
        for i, (ids, accepted) in enumerate(answers)
    ]
    return evaluate.Pass(made, seconds, counters)


PLAIN = answered(([5, 6, 7, 8], []), ([5, 9], []), seconds=3.0)
DRAFTED = answered(
    ([5, 6, 7, 8], [2]), ([5, 4], [0]), seconds=2.0, drafts=4, draft_tokens=12, accepted_tokens=6,
    accepted_tokens_per_pos=[3, 2, 1],
)  # fmt: skip


def test_figures_of_a_benchmark():
    """4 drafts with 6 accepted: length 1 + 6/4; by position 3/4, 2/4, 1/4; 6 tokens in 3 s against 2 s; one differs."""
    row = evaluate._row([PLAIN], [DRAFTED])
    assert row == {
        "prompts": 2,
        "tokens": 6,
        "acceptance_length": 2.5,
        "acceptance_by_position": [0.75, 0.5, 0.25],
        "tokens_per_s_plain": 2.0,
        "tokens_per_s_draft": 3.0,
        "speed_up": 1.5,
        "identical": 1,
        "different": ["p1"],
    }


def test_all_benchmarks_together_are_weighted_by_their_drafts():
    """6 of 4 drafts and 0 of 2 drafts accepted make 1 + 6/6 in all, not the mean of the two lengths."""
    other = answered(
        ([1], []), seconds=1.0, drafts=2, draft_tokens=6, accepted_tokens=0, accepted_tokens_per_pos=[0] * 3
    )
    row = evaluate._row([PLAIN, answered(([1], []), seconds=1.0)], [DRAFTED, other])
    assert row["acceptance_length"] == 2.0
    assert row["acceptance_by_position"] == [0.5, 2 / 6, 1 / 6]
    assert row["tokens_per_s_draft"] == pytest.approx(7 / 3)


def test_the_same_settings_are_not_measured_twice(tmp_path, monkeypatch, capsys):
    """A result of these very settings is taken from its file; of others it is measured anew, saying what differs."""
    output = tmp_path / "evaluation.json"
    settings = {"num_speculative_tokens": 3, "draft": {"config.json": "a"}}
    monkeypatch.setattr(evaluate, "settings_of", lambda _: settings)
    assert evaluate.measured_before(SimpleNamespace(), output) is None
    output.write_text(json.dumps({"settings": settings}))
    assert evaluate.measured_before(SimpleNamespace(), output) == {"settings": settings}
    output.write_text(json.dumps({"settings": settings | {"num_speculative_tokens": 5}}))
    assert evaluate.measured_before(SimpleNamespace(), output) is None
    assert "num_speculative_tokens: expected 5, found 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda draft: None, "has no config.json"),
        (lambda draft: (draft / "config.json").write_text("{}"), "has no model.safetensors"),
        (
            lambda draft: [(draft / n).write_text("{}") for n in ("config.json", "model.safetensors")],
            "expected speculators_model_type 'eagle3', found None",
        ),
        (
            lambda draft: [(draft / n).write_text("[]") for n in ("config.json", "model.safetensors")],
            "expected speculators_model_type 'eagle3', found None",
        ),
        (
            lambda draft: [
                (draft / n).write_text('{"speculators_model_type": "eagle3"}')
                for n in ("config.json", "model.safetensors")
            ],
            "its config.json has no 'speculators_config'",
        ),
    ],
)
def test_a_folder_that_is_no_draft_is_refused(tmp_path, make, said):
    """One line with what is missing, exit code 2, before any engine."""
    make(tmp_path)
    result = stages.run("04_evaluate_draft.py", "--draft", tmp_path, "--prompts", tmp_path / "none.jsonl")
    assert result.returncode == 2
    assert said in result.stdout.strip().splitlines()[-1]
