"""The evaluation's figures, worked out by hand from small passes; what is measured again and what is not; refusals."""

import json
from dataclasses import replace
from functools import reduce
from operator import getitem
from types import SimpleNamespace

import pytest
import torch

from eagle3 import bootstrap, drafts, evaluate, figures, files, measure, passes, tables
from eagle3.draft import Draft, DraftConfig, Teacher, embedding
from eagle3.export import export
from eagle3.passes import Answer, Measurement, Pass, Setup
from eagle3.target import Target
from eagle3.vocab import DraftVocab
from tests import stages


def answer(name, ids, accepted=None, *, category=None, first=0.5, last=2.0):
    return Answer(name, category, ids, accepted, first, last)


def passed(*answers, seconds, num_drafts=3):
    """A pass whose counters are those of its answers; without a draft where nothing was accepted."""
    drafted = answers[0].accepted is not None
    counters = figures.counted(answers, num_drafts) if drafted else {}
    return Pass(list(answers), seconds, counters)


PLAIN = passed(answer("p0", [5, 6, 7, 8], last=3.5), answer("p1", [5, 9], last=1.5), seconds=3.0)
DRAFTED = passed(
    answer("p0", [5, 6, 7, 8], [2], last=2.0), answer("p1", [5, 4], [3, 1, 0], last=1.0), seconds=2.0
)  # fmt: skip


def step(ids, *, finished=False, told=None):
    """What an engine step brings for a request: all its tokens so far."""
    spec = {} if told is None else {"spec_decode_metrics": SimpleNamespace(per_step_accepted=told)}
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, **spec)], finished=finished)


@pytest.mark.parametrize(("told", "expected"), [(None, [2, 0]), ([2, 3], [2, 3])])
def test_what_each_pass_accepted_is_read_from_the_steps(told, expected):
    """Steps of 1, 3 and 1 tokens: the prompt's own, then 2 + 1 and 0 + 1. A vLLM that tells it also knows that the
    last pass accepted 3, of which the answer's end left one token."""
    taken = Answer("a", None, accepted=[])
    for seconds, output in enumerate([step([5]), step([5, 6, 7, 8]), step([5, 6, 7, 8, 9], finished=True, told=told)]):
        measure.take(taken, output, float(seconds))
    assert (taken.ids, taken.accepted) == ([5, 6, 7, 8, 9], expected)
    assert (taken.first_token_s, taken.last_token_s, taken.ms_per_token) == (0.0, 2.0, 500.0)


def measured(num_drafts, concurrency, draft=None, **benchmarks):
    sha256 = {"config.json": draft} if draft else None
    return Measurement(Setup(num_drafts, concurrency, draft, sha256), benchmarks)


def test_figures_of_a_benchmark():
    """4 passes with 6 accepted: length 1 + 6/4; by position 3/4, 2/4, 1/4; 6 tokens in 3 s against 2 s; one differs.

    Time per token: (3.5 - 0.5) / 3 = 1 s and (1.5 - 0.5) / 1 = 1 s without, 0.5 s and 0.5 s with the draft.
    """
    row = figures.row([DRAFTED], [PLAIN])
    interval = row.pop("acceptance_length_interval")
    assert row == {
        "prompts": 2,
        "tokens": 6,
        "acceptance_length": 2.5,
        "acceptance_by_position": [0.75, 0.5, 0.25],
        "accepted_past_end": 0,
        "tokens_per_s_plain": 2.0,
        "tokens_per_s_draft": 3.0,
        "speed_up": 1.5,
        "ms_per_token_plain": 1000.0,
        "median_ms_per_token_plain": 1000.0,
        "ms_to_first_token_plain": 500.0,
        "ms_per_token_draft": 500.0,
        "median_ms_per_token_draft": 500.0,
        "ms_to_first_token_draft": 500.0,
        "speed_up_per_token": 2.0,
        "speed_up_per_token_interval": [2.0, 2.0],
        "identical": 1,
        "different": ["p1"],
    }
    assert interval == pytest.approx([1 + 4 / 3, 3.0])  # twice p1: 8 of 6; twice p0: 4 of 2


def test_all_benchmarks_together_are_weighted_by_their_passes():
    """6 accepted in 4 passes and 0 in 2 make 1 + 6/6 in all, not the mean of the two lengths."""
    other = passed(answer("q", [1], [0, 0]), seconds=1.0)
    row = figures.row([DRAFTED, other], [PLAIN, passed(answer("q", [1]), seconds=1.0)])
    assert row["acceptance_length"] == 2.0
    assert row["acceptance_by_position"] == [0.5, 2 / 6, 1 / 6]
    assert row["tokens_per_s_draft"] == pytest.approx(7 / 3)
    assert row["ms_per_token_draft"] == 500.0  # one token has no time between tokens


def test_without_the_target_alone_nothing_is_compared():
    """Speed-up and identity are null, not 1 or "all", when the plain target was not measured."""
    row = figures.row([DRAFTED], None)
    compared = ("speed_up", "speed_up_per_token", "tokens_per_s_plain", "identical", "different")
    assert [row[name] for name in compared] == [None] * 5
    assert row["acceptance_length"] == 2.5 and row["tokens_per_s_draft"] == 3.0


def test_tokens_that_belong_to_no_answer_are_told():
    """A vLLM that does not say what each answer accepted: its counters have more than the steps, by this many."""
    counted = DRAFTED.counters | {"accepted_tokens": 8}
    row = figures.row([replace(DRAFTED, counters=counted)], None)
    assert (row["acceptance_length"], row["accepted_past_end"]) == (3.0, 2)


def test_unknown_acceptance_of_single_answers_gives_no_interval():
    """A server that counts only the whole: the length from its counters, no interval and no categories."""
    unknown = replace(DRAFTED, answers=[replace(a, accepted=None) for a in DRAFTED.answers])
    row = figures.row([unknown], [PLAIN])
    assert row["acceptance_length"] == 2.5 and row["acceptance_length_interval"] is None
    assert figures.categories(measured(3, 1, b=unknown), None) is None


def test_categories_go_over_benchmarks():
    """Prompts of one category in two benchmarks are one row: 1 + (2 + 1) / (1 + 1); 1 + 3 / 3 for the other."""
    one = passed(answer("a", [1, 2], [2], category="code"), answer("b", [1], [3, 0, 0], category="talk"), seconds=1)
    two = passed(answer("c", [1, 2], [1], category="code"), seconds=1)
    found = figures.categories(measured(3, 1, one=one, two=two), None)
    assert {name: (row["prompts"], row["acceptance_length"]) for name, row in found.items()} == {
        "code": (2, 2.5),
        "talk": (1, 2.0),
    }
    assert found["code"]["acceptance_by_position"] == [1.0, 0.5, 0.0]


def test_a_difference_is_shown_where_it_begins():
    """The first token that differs, both texts, and the text before; an answer that stopped has none there."""
    plain = passed(answer("p", [1, 2, 3, 4]), answer("q", [1, 2]), answer("r", [7]), seconds=1)
    drafted = passed(answer("p", [1, 2, 9, 4], [0]), answer("q", [1, 2, 3], [0]), answer("r", [7], []), seconds=1)
    shown = figures.differing(measured(3, 1, b=drafted), measured(0, 1, b=plain), lambda ids: "-".join(map(str, ids)))
    assert [(d["id"], d["position"], d["before"], d["plain_text"], d["draft_text"]) for d in shown] == [
        ("p", 2, "1-2", "3", "9"),
        ("q", 2, "1-2", None, "3"),
    ]


def grid():
    """Two drafts with 2 and 3 drafted tokens at concurrency 1 and 4, and the target alone."""
    plain = passed(*(answer(f"p{i}", [1, 2, 3, 4]) for i in range(4)), seconds=4)

    def drafted(more, seconds, num_drafts):
        answers = [answer(f"p{i}", [1, 2, 3, 4], [min(i % 2 + more, 2), 0], last=1.5) for i in range(4)]
        return passed(*answers, seconds=seconds, num_drafts=num_drafts)

    return [
        measured(0, 1, b=plain),
        measured(0, 4, b=plain),
        measured(2, 1, "one", b=drafted(0, 3.0, 2)),
        measured(2, 4, "one", b=drafted(0, 0.1, 2)),
        measured(3, 1, "one", b=drafted(0, 2.0, 3)),
        measured(2, 1, "two", b=drafted(1, 2.5, 2)),
    ]


def result_of(found, finished=True):
    settings = {"max_tokens": 4}
    return json.loads(json.dumps(figures.result(found, settings, "target", None, finished=finished)))


def test_the_best_is_the_fastest_at_the_lowest_concurrency():
    """16 tokens in 2 s with 3 drafted, faster than with 2; the 0.1 s at concurrency 4 do not count."""
    result = result_of(grid())
    assert result["best"] == 4
    assert result["benchmarks"] == result["measurements"][4]["benchmarks"]
    assert result["benchmarks"]["all"]["speed_up"] == 2.0
    said = "\n".join(tables.table(result))
    assert "best: draft A, 3 drafted, concurrency 1 (highest tokens/s over all benchmarks at the lowest" in said
    assert "draft A alone: 3 drafted, 8.0 tokens/s" in said and "draft B alone: 2 drafted, 6.4 tokens/s" in said


def test_drafts_are_compared_on_the_same_prompts():
    """Draft two accepts 1, 2, 1, 2 where one accepts 0, 1, 0, 1, in two passes each: 1.75 to 1.25, always 0.5 more."""
    (comparison,) = result_of(grid())["comparisons"]
    assert (comparison["baseline"], comparison["draft"], comparison["num_speculative_tokens"]) == ("one", "two", 2)
    row = comparison["benchmarks"]["all"]
    assert row["acceptance_lengths"] == [1.25, 1.75]
    assert (row["difference"], row["difference_interval"]) == (0.5, [0.5, 0.5])
    assert row["ratio"] == 1.4 and row["ratio_interval"][0] < 1.4 < row["ratio_interval"][1]


def test_a_hint_says_when_more_drafted_tokens_are_worth_trying():
    """Draft two accepts its second of 2 tokens in 25% of passes; with 3 the third is never accepted: no hint."""
    of_two = [m for m in grid() if m.setup.draft != "one"]
    assert "token 2 is still accepted in 25% of the passes" in list(tables.table(result_of(of_two)))[-1]
    assert "hint" not in "\n".join(tables.table(result_of(grid())))


def test_tables_fit_120_columns(monkeypatch):
    """Long names of drafts, benchmarks and categories, 64 drafted tokens, a thousand prompts: no line is wider."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", bootstrap.BLOCK)
    name = "a-benchmark-with-a-very-long-name-of-its-own"
    answers = [answer(f"{name}/{i}", [i, 2], [64] * 10, category=f"{name} {i % 3}") for i in range(1000)]
    plain = [replace(a, ids=[0, 1], accepted=None) for a in answers]
    found = [measured(0, 512, **{name: passed(*plain, seconds=0.001)})]
    found += [measured(64, 512, f"/{name}/{n}", **{name: passed(*answers, seconds=1, num_drafts=64)}) for n in "ab"]
    lines = list(tables.table(result_of(found)))
    legend = [line for line in lines if line.startswith("draft ") and ": /" in line]
    assert len(legend) == 2
    assert not [line for line in lines if line not in legend and len(line) > 120]


def test_the_json_gives_back_what_was_measured():
    """What is read from the file is what was measured: figures of a continued run rest on it."""
    assert passes.from_json(result_of(grid())) == grid()


class Engines:
    """Measures from `grid()`; breaks after `most` measurements."""

    def __init__(self, most=99):
        self.asked, self.most = [], most

    def __call__(self, setups):
        for setup in setups:
            if len(self.asked) == self.most:
                raise RuntimeError("out of memory")
            self.asked.append(setup)
            yield next(m for m in grid() if m.setup == setup)


def planned(output, engines, settings=None):
    options = evaluate.Options(prompts=[], output=output)
    setups = [m.setup for m in grid()]
    return evaluate.Evaluation(options, "t", setups, settings or {"max_tokens": 4}, engines, None, reusable=True)


def test_a_run_that_broke_goes_on_where_it_was(tmp_path, capsys):
    """After 3 of 6 measurements the file holds those 3, unfinished; the same command measures the other 3 alone."""
    output = tmp_path / "evaluation.json"
    first, second, third = Engines(most=3), Engines(), Engines()
    with pytest.raises(RuntimeError):
        evaluate.evaluate(planned(output, first))
    half = files.read_json(output)
    assert (half["finished"], len(half["measurements"]), half["best"]) == (False, 3, 2)
    assert files.read_json(tmp_path / "evaluation.json.status.json")["state"] == "failed"
    result = evaluate.evaluate(planned(output, second))
    assert [m.setup for m in grid()] == first.asked + second.asked
    assert json.loads(output.read_text()) == json.loads(json.dumps(result)) and result["finished"]
    assert evaluate.evaluate(planned(output, third)) == result and not third.asked
    assert "6 of 6 measurements are in" in capsys.readouterr().out


def test_figures_of_other_settings_are_not_taken_over(tmp_path, capsys):
    """Other lengths of answers are another evaluation: all is measured anew, saying what differs; so is a file of an
    earlier format."""
    output, engines = tmp_path / "evaluation.json", Engines()
    evaluate.evaluate(planned(output, Engines()))
    evaluate.evaluate(planned(output, engines, {"max_tokens": 5}))
    assert len(engines.asked) == 6
    assert "settings.max_tokens: expected 5, found 4" in capsys.readouterr().out
    output.write_text('{"format": "eagle3-evaluation/1", "settings": {}}')
    evaluate.evaluate(planned(output, Engines()))
    assert "format: expected 'eagle3-evaluation/2', found 'eagle3-evaluation/1'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"format": "eagle3-evaluation/2", "settings"', "not valid JSON: "),
        ("[1, 2]", "expected a JSON object, found list; remove the file to measure anew, or name another one"),
        ('{"command": "03_train_draft.py"}', "holds something else than an evaluation; name another file"),
    ],
)
def test_nothing_but_an_evaluation_is_written_over(draft, prompts, tmp_path, content, said):
    """A damaged file, or one of another stage, under the name of --output: refused before the load and left alone."""
    output = tmp_path / "settings.json"
    output.write_text(content)
    refused = refusal("--draft", draft, "--prompts", prompts, "--output", output)
    assert f"--output {output}: " in refused and said in refused
    assert output.read_text() == content


def test_figures_that_are_not_whole_are_named(tmp_path):
    """An evaluation of these settings whose measurements were edited: the file and what it lacks, not a traceback."""
    output = tmp_path / "evaluation.json"
    evaluate.evaluate(planned(output, Engines()))
    files.write_json(output, files.read_json(output) | {"answers": [{}]})
    with pytest.raises(ValueError, match="evaluation.json: not as the stage writes it: has no 'id'"):
        evaluate.evaluate(planned(output, Engines()))


def test_below_the_wanted_acceptance_the_run_fails():
    """--min-acceptance 1.5 fails a best draft of 1.25 and passes one of 1.5: CI looks at the exit code."""
    result = result_of(grid())
    with pytest.raises(ValueError, match=r"acceptance length 1.250 is below --min-acceptance 1.5"):
        evaluate.check_acceptance(result, 1.5)
    evaluate.check_acceptance(result, 1.25)
    evaluate.check_acceptance(result, None)


@pytest.fixture(scope="module")
def draft(tiny_llama, tmp_path_factory):
    """A draft of the tiny Llama, untrained."""
    torch.manual_seed(0)
    target, vocab = Target.open(tiny_llama), DraftVocab(512)
    made = Draft.create(
        DraftConfig.for_target(target, vocab), embedding(target), Teacher.for_target(target, vocab).head
    )
    folder = tmp_path_factory.mktemp("run") / "draft"
    export(folder, made, target, vocab, [1, 2, 4, 5], 3)
    return folder


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"id": "a", "prompt": "Hello"}\n')
    return path


def changed(draft, folder, **changes):
    """A copy of the draft's folder with other entries in its config.json."""
    folder.mkdir()
    for path in draft.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = files.read_json(folder / "config.json")
    for key, value in changes.items():
        part = config["transformer_layer_config"] if key in ("hidden_size", "vocab_size") else config
        part[key] = value
    files.write_json(folder / "config.json", config)
    return folder


def refusal(*flags):
    """The last line of a script that must refuse."""
    code, log = stages.run_here("04_evaluate_draft.py", *flags)
    assert code == 2, log
    return log.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num-speculative-tokens", 3, 65], "--num-speculative-tokens 65: expected at most 64"),
        (["--max-tokens", 10**9], "--max-tokens 1000000000: the target takes 2,048 tokens of prompt and answer"),
        (["--plain-url", "http://127.0.0.1:9/v1"], "--plain-url: goes with --base-url"),
        (["--base-url", "http://127.0.0.1:9/v1"], "--base-url http://127.0.0.1:9/v1: no server answers there"),
        (["--base-url", "u", "--num-speculative-tokens", 3], "--num-speculative-tokens: a running server has its own"),
        (["--prompts", "none.jsonl"], "--prompts none.jsonl: no such file"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_before_anything_loads(draft, prompts, flags, said):
    """Exit code 2 and one line that names the flag."""
    assert said in refusal("--draft", draft, "--prompts", prompts, *flags)


def test_without_a_draft_there_is_nothing_to_measure(prompts):
    """Neither a folder nor a server: the flag is named."""
    assert "--draft: missing" in refusal("--prompts", prompts)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 128}, "its hidden_size is 128, the target's is 64"),
        ({"vocab_size": 32000}, "its vocab_size is 32000, the target's is 512"),
        (
            {"eagle_aux_hidden_state_layer_ids": [3, 31, 59]},
            "reads the states before layer 59, the target has 6 layers",
        ),
        ({"target_fingerprint": {"config": "x"}}, "was made with another target"),
        ({"target_fingerprint": "x"}, "other/config.json: not as the stage writes it"),
    ],
)
def test_a_draft_of_another_target_is_refused(draft, prompts, tmp_path, changes, said):
    """Before vLLM would load it and accept nothing."""
    assert said in refusal("--draft", changed(draft, tmp_path / "other", **changes), "--prompts", prompts)


def test_two_folders_of_one_draft_are_refused(draft, prompts, tmp_path):
    """A comparison of a draft with itself would show that they are equal."""
    copy = changed(draft, tmp_path / "copy")
    assert f"is the same draft as {draft}" in refusal("--draft", draft, copy, "--prompts", prompts)


def test_more_drafted_tokens_than_were_trained_are_warned_of(draft, tiny_llama, tmp_path, capsys):
    """4 drafted tokens of a draft that was trained on 3 steps: said, not refused."""
    copy = changed(draft, tmp_path / "draft")
    (tmp_path / "settings.json").write_text('{"settings": {"ttt_steps": 3}}')
    drafts.warn(drafts.open_draft(copy), Target.open(tiny_llama), {}, [3])
    assert capsys.readouterr().out == ""
    drafts.warn(drafts.open_draft(copy), Target.open(tiny_llama), {}, [3, 4])
    assert "was trained with 3 steps of training-time test" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ({}, "has no config.json"),
        ({"config.json": "{}"}, "has no model.safetensors"),
        ({"config.json": "{}", "model.safetensors": ""}, "expected speculators_model_type 'eagle3', found None"),
        ({"config.json": "[]", "model.safetensors": ""}, "config.json: expected a JSON object, found list"),
    ],
)
def test_a_folder_that_is_no_draft_is_refused(tmp_path, contents, said):
    """One line with what is missing, before any engine."""
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=str(tmp_path)) as refused:
        drafts.open_draft(tmp_path)
    assert said in str(refused.value)


@pytest.mark.parametrize("keys", drafts.NEEDED)
def test_a_draft_whose_config_lacks_an_entry_is_refused(draft, tmp_path, keys):
    """Each entry that is read of it is named when it is not there, or what holds it is of another kind."""
    folder = changed(draft, tmp_path / "draft")
    config = files.read_json(folder / "config.json")
    del reduce(getitem, keys[:-1], config)[keys[-1]]
    files.write_json(folder / "config.json", config)
    with pytest.raises(ValueError, match=f"its config.json has no {'.'.join(map(str, keys))};"):
        drafts.open_draft(folder)
    files.write_json(folder / "config.json", config | {keys[0]: "x"})
    with pytest.raises(ValueError, match=f"its config.json has no {keys[0]}"):
        drafts.open_draft(folder)


@pytest.mark.parametrize("size", [0, 4, 1000])
def test_a_draft_whose_weights_are_cut_short_is_refused(draft, prompts, tmp_path, size):
    """A copy that broke off: found before the target loads, naming the file."""
    copy = changed(draft, tmp_path / "copy")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    assert f"{weights}: not a whole safetensors file" in refusal("--draft", copy, "--prompts", prompts)
