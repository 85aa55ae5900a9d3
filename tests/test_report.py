"""The page on a run: what is in the folder is on it; what is missing is named, and what is broken is refused."""

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from unittest import mock

import pytest
from chat_targets import target_folder

from eagle3 import charts, cli, files, marked, pages, report, runs, sections
from eagle3.passes import Measurement, Setup
from eagle3.target import Target
from eagle3.tokenizer import load_tokenizer
from tests.run_folder import HOSTILE, SHARES, drafted_pass, evaluation

VOID = {"meta", "link", "br", "rect", "path", "circle", "img", "input", "hr"}


class Reader(HTMLParser):
    """Text of a page by the id of its section, all tags' attributes, and what was opened and not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open, self.section, self.texts, self.attributes = [], "header", {}, []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.attributes.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attributes)["id"]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> closes another"

    def handle_data(self, data):
        self.texts[self.section] = self.texts.get(self.section, "") + data


def make(run, *flags) -> tuple[int, str]:
    """Exit code and log of the command."""
    log, argv = io.StringIO(), ["report", str(run), *flags]
    with (
        mock.patch.object(sys, "argv", argv),
        redirect_stdout(log),
        redirect_stderr(log),
        pytest.raises(SystemExit) as end,
    ):
        cli.run(report.parser(), report.check, report.work)
    return end.value.code, log.getvalue()


@pytest.fixture(scope="module")
def page(finished_run, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("page") / "page.html"
    code, log = make(finished_run, "--output", str(path))
    assert code == 0 and f"report: {path}" in log
    return path.read_text()


@pytest.fixture(scope="module")
def read(page) -> Reader:
    return Reader(page)


@pytest.fixture
def copied(finished_run, tmp_path):
    """The run, to be damaged."""
    return shutil.copytree(finished_run, tmp_path / "run")


def test_the_page_is_whole_and_needs_nothing_else(page, read):
    """Tags are balanced; nothing is fetched: no src, no address but inside the page, no script."""
    assert read.open == []
    for tag, attributes in read.attributes:
        assert tag != "script" and "src" not in attributes
        assert attributes.get("href", "#").startswith(("#", "data:"))
    assert "@import" not in page and "url(" not in page


def test_the_rows_are_accounted_for(read):
    """5 rows: 2 kept, a duplicate, one without an answer and one that is no JSON dropped, each under its reason."""
    text = read.texts["data"]
    assert re.search(r"Rows in\s*5\s*2 kept, 3 dropped", text)
    for reason in ("duplicate", "bad_json", "no_assistant_turn"):
        assert re.search(rf"{reason}1\S*chats\.jsonl:\d: ", text)
    assert "supervised" in text and "in the draft vocabulary" in text


def test_text_from_data_is_escaped(page, read):
    """What a conversation says is text on the page, never markup."""
    assert HOSTILE not in page and "<script" not in page
    assert HOSTILE in read.texts["sample"].replace("↵", "")


def test_training_has_a_line_for_each_position_with_its_values_to_point_at(finished_run, read):
    """Loss and acceptance of 3 positions, training and held out; the last record's figures are in the hover titles."""
    records = runs.read_metrics(finished_run)
    last = [r for r in records if r["kind"] == "eval"][-1]
    text = read.texts["training"]
    for figure in ("Loss, training", "Loss, held out", "Accepted, training", "Accepted, held out", "training step"):
        assert figure in text
    for k in range(3):
        assert f"step {last['step']:,}, position {k + 1}: {last['loss_by_step'][k]:.3f}" in text
        assert f"step {last['step']:,}, position {k + 1}: {last['accepted'][k]:.1%}" in text
    assert f"{runs.best(records)['acceptance_length']:.2f}" in text


def test_benchmarks_beside_what_is_published(read):
    """mt_bench: passes accept 3, 0, 1 and 1, so 1 + 5/4 = 2.25; the house's own one accepts nothing, 1.00."""
    text = read.texts["benchmarks"]
    assert re.search(r"mt_bench\s*2\s*2\.25", text) and re.search(r"house\s*2\s*1\.00", text)
    assert "this run, MT-Bench: 2.25 with 3 drafted tokens" in text
    assert "2.687" in text and "3.490" in text and "2.82–3.02" in text
    assert "3 of 4" in text  # identical answers


def test_answers_show_what_each_pass_accepted_and_rejected(read):
    """The first answer: a token of the prompt's pass, then passes with 3, 0 and 1 of 3 drafted tokens accepted."""
    titles = [a["title"] for tag, a in read.attributes if a.get("class") == "pass"]
    assert titles[0] == "from the pass over the prompt"
    assert titles[1:4] == [f"{n} accepted, {3 - n} rejected" for n in SHARES]
    assert "acceptance length 2.33, 8 tokens in 4 passes" in read.texts["answers"]


def test_several_drafts_and_numbers_of_drafted_tokens(copied, tiny_llama):
    """The best one's table first, the others, its categories and the comparison behind it, speed over the number."""
    answers = {
        "mt_bench": [("m0", "writing", [1, 2, 3], [0, 0]), ("m1", "math", [4, 5], [0])],
        "house": [("h0", None, [1, 2, 3], [0, 0]), ("h1", None, [4, 5], [0])],
    }
    more = [
        Measurement(
            Setup(number, 4, name, {"weights": name}),
            {benchmark: drafted_pass(found, number, 9.0) for benchmark, found in answers.items()},
        )
        for number, name in ((5, str(copied / "draft")), (3, "other/draft"))
    ]
    files.write_json(copied / "evaluation.json", evaluation(copied, tiny_llama, *more))
    assert make(copied)[0] == 0
    text = Reader((copied / report.PAGE).read_text()).texts["benchmarks"]
    assert text.index(f"Best: 3 drafted tokens, concurrency 4, draft {copied / 'draft'}") < text.index("More tables: 4")
    assert "By category: 3 drafted tokens" in text and "5 drafted tokens, concurrency 4" in text
    assert "other/draft beside" in text and "Speed by drafted tokens" in text


def test_an_evaluation_under_way_says_that_it_is(copied):
    """What is measured so far is shown, and that the rest is missing."""
    content = files.read_json(copied / "evaluation.json")
    files.write_json(copied / "evaluation.json", content | {"finished": False})
    assert make(copied)[0] == 0
    assert "Measurements are missing" in Reader((copied / report.PAGE).read_text()).texts["benchmarks"]


def test_parts_of_the_states_are_counted_together(copied):
    """20 samples in 7 shards twice over: 40 samples, 14 shards, in 2 parts."""
    for part in ("part-00001-of-00002", "part-00002-of-00002"):
        shutil.copytree(copied / "hidden_states", copied / "parts" / part)
    shutil.rmtree(copied / "hidden_states")
    assert make(copied)[0] == 0
    text = Reader((copied / report.PAGE).read_text()).texts["states"]
    assert re.search(r"Samples\s*40\s*1,356 tokens in 2 parts", text) and re.search(r"Shards\s*14", text)


@pytest.mark.parametrize(
    ("gone", "section", "what", "command"),
    [
        ("prepared", "sample", "The prepared data is missing", "01_prepare_data.py"),
        ("hidden_states", "states", "The extraction of hidden states is missing", "02_extract_hidden_states.py"),
        ("settings.json", "training", "The training is missing", "03_train_draft.py"),
        ("evaluation.json", "benchmarks", "The evaluation in vLLM is missing", "04_evaluate_draft.py"),
    ],
)
def test_a_stage_that_is_missing_is_named_with_its_command(copied, gone, section, what, command):
    """The other sections are there all the same, exit code 0."""
    path = copied / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    (copied / runs.STATUS).unlink(missing_ok=True)
    code, _ = make(copied)
    texts = Reader((copied / report.PAGE).read_text()).texts
    assert code == 0 and what in texts[section] and f"python {command}" in texts[section]
    assert sum("is missing. This makes it:" in text for text in texts.values()) <= 2


def first_id(key: str, token: int) -> Callable[[str], str]:
    """The damage that makes `token` the first id of each list of this name."""
    return lambda text: re.sub(rf'("{key}": ?\[\s*)\d+', rf"\g<1>{token}", text)


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("prepared/metadata.json", lambda t: t[:50], "prepared/metadata.json: not valid JSON"),
        (
            "prepared/metadata.json",
            lambda t: t.replace('"rows_in"', '"rows"'),
            "metadata.json: not as the stage writes it",
        ),
        ("metrics.jsonl", lambda t: "{}}\n" + t, "metrics.jsonl:1: not valid JSON"),
        ("metrics.jsonl", lambda t: '{"step": 1}\n' + t, "metrics.jsonl:1: not a record of a training"),
        ("metrics.jsonl", lambda t: t.replace('"accepted"', '"x"'), "metrics.jsonl: not as the stage writes it"),
        ("evaluation.json", lambda t: "", "evaluation.json: not valid JSON"),
        ("evaluation.json", lambda t: t.replace('"answers"', '"x"'), "evaluation.json: not as the stage writes it"),
        ("evaluation.json", lambda t: t.replace("evaluation/2", "evaluation/1"), "found 'eagle3-evaluation/1'"),
        (
            "hidden_states/metadata.json",
            lambda t: t.replace('"shared"', '"x"'),
            "metadata.json: not as the stage writes",
        ),
        ("draft/config.json", lambda t: "{}", "draft/config.json: not as the stage writes it"),
        ("prepared/tokenized_data.jsonl", first_id("input_ids", -1), "data.jsonl:1: input_ids holds -1"),
        ("evaluation.json", first_id("tokens", -1), "is none of the target's tokenizer"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(copied, file, damage, said):
    """Exit code 2, the file and the fault in the last line, and no page."""
    path = copied / file
    path.write_text(damage(path.read_text()))
    code, log = make(copied)
    assert code == 2 and said in log.splitlines()[-1] and str(copied) in log.splitlines()[-1]
    assert not (copied / report.PAGE).exists()


def test_an_id_that_the_tokenizer_does_not_have_is_named_with_its_file(copied):
    """In the prepared data, too: tiktoken raises there, other tokenizers write nothing."""
    path = copied / "prepared/tokenized_data.jsonl"
    path.write_text(first_id("input_ids", 1024)(path.read_text()))
    model = load_tokenizer(Target.open(target_folder("kimi")), True).model
    with pytest.raises(ValueError, match=rf"^{path}: one of the token ids \[1024\] is none"):
        sections.sample(sections.Run(copied, runs.find(copied), model.decode))


def test_a_folder_without_any_stage_is_refused(tmp_path):
    """Exit code 2 in one line, for no folder and for an empty one."""
    assert make(tmp_path / "nowhere") == (
        2,
        f"python -m eagle3.report: error: {tmp_path / 'nowhere'}: no such folder\n",
    )
    code, log = make(tmp_path)
    assert code == 2 and "no stage has written anything here" in log


def test_without_a_tokenizer_the_ids_are_shown_and_why(finished_run, tmp_path):
    """A target that has gone: the page says so where text would be, and shows token ids."""
    run = sections.Run(finished_run, runs.find(finished_run), None, "the target is not there.")
    text = Reader(report.page(run)).texts["answers"]
    assert "since the target is not there" in text and "40 " in text


def test_a_metrics_line_that_is_being_written_is_no_fault(tmp_path):
    """The last line without its end is left out, as long as the training may still be writing it."""
    (tmp_path / runs.METRICS).write_text('{"kind": "train", "step": 1}\n{"kind": "tr')
    assert runs.read_metrics(tmp_path) == [{"kind": "train", "step": 1}]


@pytest.mark.parametrize(
    ("low", "high", "options", "expected"),
    [
        (0, 12.7, {}, [0, 5, 10, 15]),
        (0, 0.35, {}, pytest.approx([0, 0.1, 0.2, 0.3, 0.4])),
        (1, 3, {"whole": True}, [1, 2, 3]),
        (20, 170, {"whole": True}, [0, 50, 100, 150, 200]),
        (0, 0, {}, pytest.approx([0, 0.1])),
        (7, 7, {"whole": True}, [7, 8]),
    ],
)
def test_ticks_are_round_and_hold_all(low, high, options, expected):
    """1, 2 or 5 times a power of ten apart; the first at most the lowest value, the last at least the highest."""
    found = charts.ticks(low, high, **options)
    assert found == expected and found[0] <= low and found[-1] >= high


def test_labels_keep_their_distance():
    """Three labels wanted at 100, 101 and 180 in 0 to 185: 14 apart, in their order, none outside."""
    assert charts.spread([101, 180, 100], 14, 0, 185) == [114, 180, 100]
    assert charts.spread([184, 184], 14, 0, 185) == [171, 185]


def test_a_long_line_is_thinned_evenly_with_its_ends():
    """1,000 points become 60, the first and the last among them, no gap over 17."""
    points = [(float(k), 0.0, "") for k in range(1000)]
    xs = [x for x, _, _ in charts.thin(points)]
    assert (len(xs), xs[0], xs[-1]) == (60, 0.0, 999.0)
    assert max(b - a for a, b in zip(xs, xs[1:], strict=False)) <= 17


BYTES = dict(enumerate([b"a", b" \xf0\x9f", b"\x91\x8b", b"b"]))


def decode(ids: list[int]) -> str:
    return b"".join(BYTES[i] for i in ids).decode(errors="replace")


def test_pieces_are_whole_characters_and_lose_nothing():
    """A waving hand of two tokens is one piece; the pieces joined are the text."""
    found = marked.pieces([0, 1, 2, 3], decode)
    assert [(p.text, p.first, p.last) for p in found] == [("a", 0, 0), (" 👋", 1, 2), ("b", 3, 3)]
    assert "".join(p.text for p in found) == decode([0, 1, 2, 3])


def test_passes_take_all_tokens_and_the_last_one_may_be_cut():
    """a | aab | (b): the prompt's pass gives 1 token, the next accepts 2 and adds its own, the last is cut to 1."""
    found = list(marked.passes([0, 0, 0, 3, 3], [2, 1], 3, decode))
    assert [("".join(p.text for p, _ in f.pieces), f.accepted, f.rejected) for f in found] == [
        ("a", 0, None), ("aab", 2, 1), ("b", 1, 2),
    ]  # fmt: skip
    assert [accepted for _, accepted in found[1].pieces] == [True, True, False]


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio of two colours, #rrggbb or #rgb."""

    def luminance(colour):
        digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
        channels = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_from_their_background(theme):
    """Text has at least 4.5:1 on paper and on panels, in both themes; marks are text too (their labels)."""
    css = (pages.TEMPLATES / "style.css").read_text()
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", css.split("}")[theme]))
    for name in ("ink", "soft", "link", "good", "bad", "busy", *(f"c{k}" for k in range(1, charts.NUM_STYLES + 1))):
        for background in ("paper", "panel"):
            assert contrast(colours[name], colours[background]) >= 4.5, (name, background)
    for text, background in (("ink", "good-back"), ("ink", "bad-back")):
        assert contrast(colours[text], colours[background]) >= 4.5


def test_the_page_of_prepared_data_marks_what_is_supervised(finished_run):
    """Stage 1's own page, in the same style."""
    text = (finished_run / "prepared" / "report.html").read_text()
    assert '<mark class="supervised">' in text and "&lt;script&gt;" in text and "<script" not in text
    assert json.loads((finished_run / "prepared" / "status.json").read_text())["state"] == "done"
    assert files.read_json(finished_run / "prepared" / "metadata.json")["counts"]["kept"] == 2
