"""01_prepare_data.py: every row is accounted for, what is written is right, and stale or useless data is refused."""

import json
import os
import runpy
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from chat_targets import assistant, target_folder, user

from eagle3 import chat, files, prepare, prepared, vocab
from eagle3.target import Target

SCRIPT = Path(__file__).resolve().parents[1] / "01_prepare_data.py"
GOOD = {"messages": [user("Hello there"), assistant("General remarks")]}


def write(path: Path, *rows: dict | str) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


@pytest.fixture
def script(tmp_path, monkeypatch, capfd):
    """Run the script on rows: (exit code, output folder, everything printed)."""

    def run(
        rows: list[dict | str] | Path, *flags: str, target: str = "kimi", out: str = "out"
    ) -> tuple[int, Path, str]:
        path = rows if isinstance(rows, Path) else write(tmp_path / "in.jsonl", *rows)
        folder = tmp_path / out
        arguments = ["--model-path", str(target_folder(target)), "--trust-remote-code", "--input", str(path)]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments, "--output-dir", str(folder), *flags])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        captured = capfd.readouterr()
        return ended.value.code, folder, captured.out + captured.err

    return run


def counts(folder: Path) -> dict:
    found = json.loads((folder / "metadata.json").read_text())["counts"]
    assert found["rows_in"] == found["kept"] + sum(found["dropped"].values())
    return found


def rows_of(folder: Path) -> list[prepared.Row]:
    return list(prepared.read_rows(folder / "tokenized_data.jsonl"))


def test_outputs_agree(script):
    """Hash, counts, token counts, vocabulary and statistics of a run agree with the rows that were written."""
    rows = [GOOD, {"prompt": "a", "response": "b 你好", "id": "x"}, "{bad"]
    code, folder, _ = script(rows, "--draft-vocab-size", "100")
    made = rows_of(folder)
    metadata = prepared.read_metadata(folder / "tokenized_data.jsonl")
    assert code == 0 and [r.id for r in made][1] == "x"
    assert metadata["target"] == Target.open(target_folder("kimi")).fingerprint
    supervised = Counter(int(i) for r in made for i in r.input_ids[r.loss_mask == 1])
    stored = json.loads((folder / "token_counts.json").read_text())
    assert dict(zip(stored["ids"], stored["counts"], strict=True)) == supervised
    assert metadata["statistics"]["tokens"] == sum(len(r.input_ids) for r in made)
    assert metadata["statistics"]["supervised"] == supervised.total()
    assert metadata["statistics"]["length_percentiles"]["100"] == max(len(r.input_ids) for r in made)
    chosen = vocab.DraftVocab.load(folder)
    kimi = chat.load(Target.open(target_folder("kimi")), True)
    assert chosen.size == 100 and {*supervised, *kimi.special_ids} <= set(chosen.ids.tolist())
    assert metadata["draft_vocab"]["coverage"] == 1.0


def test_d6_tools_column(script):
    """D6: of five rows whose tools are absent, null, "[]", a list and broken JSON, one is dropped."""
    tools = [{}, {"tools": None}, {"tools": "[]"}, {"tools": [{"name": "f"}]}, {"tools": "{bad json"}]
    rows = [{"messages": [user(f"q{k}"), assistant("a")], **t} for k, t in enumerate(tools)]
    code, folder, _ = script(rows)
    assert (code, counts(folder)["kept"], counts(folder)["dropped"]) == (0, 4, {"bad_tools": 1})
    assert len(rows_of(folder)) == 4


def test_d7_unknown_role(script):
    """D7: an unknown role is dropped with its name and line, and read as another one by --role."""
    rows = [GOOD, {"messages": [user("a"), {"role": "laguna_s", "content": "b"}]}]
    code, folder, printed = script(rows)
    assert code == 0 and counts(folder)["dropped"] == {"unknown_role": 1}
    assert "in.jsonl:2: 'laguna_s'" in printed
    code, folder, _ = script(rows, "--role", "laguna_s=assistant", "--overwrite")
    assert code == 0 and counts(folder)["dropped"] == {}


def test_d8_bad_row_between_good_ones(script):
    """D8: a row that starts with the assistant, or that the template rejects, is one drop; the others stay."""
    call = {"name": "f", "arguments": {}}
    bad = [
        {"messages": [assistant("first"), user("a"), assistant("b")]},
        {"messages": [user("a"), assistant("", tool_calls=[call, call])]},
    ]
    code, folder, _ = script([GOOD, *bad, {"messages": [user("x"), assistant("y")]}], target="llama3")
    assert code == 0 and counts(folder)["kept"] == 2
    assert counts(folder)["dropped"] == {"assistant_first": 1, "template_rejects": 1}
    code, folder, printed = script(bad, target="llama3", out="none")
    assert code == 1 and "0 usable rows of 2" in printed


def test_d9_nothing_to_learn(script):
    """D9: four kinds of empty conversation have four reasons; a file of them alone writes no dataset and fails."""
    system = {"role": "system", "content": "s"}
    rows = [{"messages": m} for m in ([], [system], [user("a")], [user("a"), assistant("")])]
    code, folder, printed = script(rows)
    assert code == 1 and "0 usable rows of 4; no dataset was written" in printed
    for reason in ("empty_conversation: 1", "no_user_turn: 1", "no_assistant_turn: 1", "empty_answer: 1"):
        assert reason in printed
    assert {p.name for p in folder.iterdir()} == {".lock", "status.json"}
    code, _, printed = script(["", " "], out="blank")
    assert code == 1 and printed.rstrip().endswith("--input: there are no rows in it; no dataset was written")


def row_of_length(length: int) -> dict:
    """A row that has `length` tokens on the llama3 target."""
    llama = chat.load(Target.open(target_folder("llama3")), True)
    prompt = len(llama.prompt_ids([user("q")]))
    answer = "".join("1 " for _ in range(length)).strip()
    while prompt + len(llama.encode(answer)) + 1 > length:
        answer = answer[:-1]
    assert prompt + len(llama.encode(answer)) + 1 == length
    return {"id": str(length), "messages": [user("q"), assistant(answer)]}


def test_d10_truncation(script):
    """D10: at 64 tokens a long question is dropped, a long answer is cut and gets no invented end, 64 stay whole."""
    rows = [
        {"id": "a", "messages": [user("1 " * 200), assistant("yes")]},
        {"id": "b"} | {"messages": row_of_length(90)["messages"]},
        row_of_length(64),
        row_of_length(65),
    ]
    code, folder, printed = script(rows, "--max-seq-len", "64", target="llama3")
    made = {r.id: r for r in rows_of(folder)}
    end = chat.load(Target.open(target_folder("llama3")), True).stop_ids
    assert code == 0 and list(made) == ["b", "64", "65"]
    assert all(len(r.input_ids) == len(r.loss_mask) == 64 for r in made.values())
    assert made["64"].input_ids[-1] in end and not {made["b"].input_ids[-1], made["65"].input_ids[-1]} & set(end)
    found = counts(folder)
    assert found["dropped"] == {"prompt_too_long": 1} and found["answers_clipped"] == 2
    assert "WARNING: 67% of the answers" in printed


def test_turns_beyond_the_length_are_counted(script):
    """Answers whose prompt is already too long are left out and counted; the earlier ones are kept."""
    turns = [m for k in range(20) for m in (user(f"question {k}"), assistant(f"answer {k}"))]
    code, folder, _ = script([{"messages": turns}], "--max-seq-len", "100", target="llama3")
    found = counts(folder)
    assert code == 0 and found["kept"] == found["samples"] == 1
    assert found["answers"] + found["answers_left_out"]["prompt_too_long"] == 20


def test_d17_identity(script):
    """D17: of two equal rows one is kept, its id a hash of its content; one id of different rows is told apart."""
    other = {"messages": [user("a"), assistant("c")]}
    code, folder, _ = script(
        [GOOD, GOOD, {"id": "1"} | GOOD, {"id": "1"} | other, {"id": "1", "prompt": "p", "response": "r"}]
    )
    assert code == 0 and counts(folder)["dropped"] == {"duplicate": 2}
    ids = [r.id for r in rows_of(folder)]
    assert len(ids[0]) == 32 and ids[1] == "1" and ids[2].startswith("1~") and len(set(ids)) == 3


def test_d17_stale_output(script, tmp_path):
    """D17: the same command again does nothing; another setting, input, or template is refused by name."""
    code, folder, _ = script([GOOD])
    before = (folder / "metadata.json").stat().st_mtime_ns
    code, _, printed = script([GOOD])
    assert code == 0 and "nothing to do" in printed and (folder / "metadata.json").stat().st_mtime_ns == before
    for rows, flags, named in (
        ([GOOD], ["--max-seq-len", "99"], "settings.max_seq_len: expected 2048, found 99"),
        ([GOOD], ["--chat-template-kwargs", '{"thinking": false}'], "settings.chat_template_kwargs"),
        ([GOOD, GOOD], [], "inputs.in.jsonl"),
    ):
        code, _, printed = script(rows, *flags)
        assert code == 2 and named in printed and "--overwrite" in printed
    code, _, printed = script([GOOD], target="llama3")
    assert code == 2 and "target." in printed
    code, _, _ = script([GOOD], "--max-seq-len", "99", "--overwrite")
    assert code == 0 and prepared.read_metadata(folder / "tokenized_data.jsonl")["settings"]["max_seq_len"] == 99


def test_another_version_is_refused(script):
    """Data of another version of this program or of the tokenizers is not taken for finished: named, with both."""
    _, folder, _ = script([GOOD])
    metadata = json.loads((folder / "metadata.json").read_text())
    for package, now in metadata["versions"].items():
        old = metadata | {"versions": metadata["versions"] | {package: "0.0.1"}}
        (folder / "metadata.json").write_text(json.dumps(old))
        code, _, printed = script([GOOD])
        assert code == 2 and f"versions.{package}: expected '0.0.1', found '{now}'" in printed
    assert set(metadata["versions"]) == {"eagle3-train", "transformers", "tokenizers"}


def test_answers_of_another_mode(script):
    """Rows that say with which template settings they were made are dropped under others, as ids and as messages."""
    instant, ids = {"chat_template_kwargs": {"thinking": False}}, {"input_ids": [5, 6], "loss_mask": [0, 1]}
    rows = [GOOD | instant, ids | instant, {"prompt": "p", "response": "r"} | {"chat_template_kwargs": {}}]
    code, folder, printed = script(rows)
    assert code == 0 and counts(folder)["dropped"] == {"other_template_kwargs": 2}
    assert "made with --chat-template-kwargs {'thinking': False}, this run has {}" in printed
    code, folder, _ = script(rows, "--chat-template-kwargs", '{"thinking": false}', out="instant")
    assert code == 0 and counts(folder)["dropped"] == {"other_template_kwargs": 1}


def test_min_kept(script):
    """Fewer usable rows than --min-kept percent: non-zero, no dataset."""
    code, folder, printed = script([GOOD, "{bad"], "--min-kept", "51")
    assert code == 1 and "only 50.0% of the rows are usable (--min-kept 51)" in printed
    assert {p.name for p in folder.iterdir()} == {".lock", "status.json"}
    assert script([GOOD, "{bad"], "--min-kept", "50")[0] == 0


def test_generated_rows_keep_their_ids(script):
    """Token ids that the target really generated are taken as they are, unless another tokenizer made them."""
    mine = Target.open(target_folder("kimi")).fingerprint["tokenizer"]
    row = GOOD | {"id": "g", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    rows = [row | {"tokenizer": mine}, row | {"tokenizer": "0" * 64}, row | {"input_ids": [5, 6, 1 << 20]}]
    code, folder, _ = script([*rows, row | {"loss_mask": [0, 0, 0]}])
    (made,) = rows_of(folder)
    assert code == 0 and made.input_ids.tolist() == [5, 6, 7] and made.loss_mask.tolist() == [0, 1, 1]
    assert counts(folder)["dropped"] == {"other_tokenizer": 1, "bad_tokens": 1, "no_supervised_token": 1}


def test_ids_of_a_padded_vocabulary_are_no_tokens(script, tmp_path):
    """config.json counts 1,100, the tokenizer knows 1,024: id 1023 is a token, id 1024 drops its row, by line."""
    folder = shutil.copytree(target_folder("kimi"), tmp_path / "padded")
    config = files.read_json(folder / "config.json")
    files.write_json(folder / "config.json", config | {"text_config": config["text_config"] | {"vocab_size": 1100}})
    rows = [{"input_ids": [5, token], "loss_mask": [0, 1]} for token in (1023, 1024)]
    code, out, printed = script(rows, "--model-path", str(folder))
    assert code == 0 and [row.input_ids.tolist() for row in rows_of(out)] == [[5, 1023]]
    assert counts(out)["dropped"] == {"bad_tokens": 1} and "id 1024, but the target has 1024 tokens" in printed


def test_workers_write_the_same(script, tmp_path):
    """Two processes write, byte for byte, what one writes, with the same counts."""
    rows = [{"messages": [user(f"q{k}"), assistant(f"a{k} " * (k % 7 + 1))]} for k in range(300)]
    rows[100] = {"messages": []}
    rows[200] = rows[199]
    path = write(tmp_path / "many.jsonl", *rows)
    _, one, _ = script(path, "--workers", "1", out="one")
    code, two, _ = script(path, "--workers", "2", out="two")
    assert code == 0 and counts(one)["kept"] == 298
    for name in ("tokenized_data.jsonl", "draft_vocab.json", "metadata.json", "token_counts.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_formats_are_found_out_printed_and_overridable(script, tmp_path):
    """Several files, globs and formats in one run, each row by its own keys; what was found is printed and counted, and
    --format reads every row one way."""
    alpaca = {"instruction": "a", "output": "b"}
    rows = [
        *(GOOD, {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "c"}]}, alpaca),
        *({"prompt": "p", "response": "r"}, {"input_ids": [5, 6], "loss_mask": [0, 1]}),
    ]
    (tmp_path / "b.json").write_text(json.dumps([{"prompt": "q", "response": "r"}]))
    path = write(tmp_path / "in.jsonl", *rows)
    code, folder, printed = script(path, "--input", str(path), str(tmp_path / "*.json"))
    assert code == 0 and f"{path} (messages, sharegpt, alpaca, prompt, tokenized)" in printed
    assert f"{tmp_path / 'b.json'} (prompt)" in printed
    assert counts(folder)["formats"] == {"messages": 1, "sharegpt": 1, "alpaca": 1, "prompt": 2, "tokenized": 1}
    code, folder, printed = script([GOOD | alpaca], "--format", "alpaca", out="alpaca")
    assert code == 0 and "in.jsonl (alpaca)" in printed and counts(folder)["formats"] == {"alpaca": 1}
    assert "b<|im_end|>" in chat.load(Target.open(target_folder("kimi")), True).decode(
        rows_of(folder)[0].input_ids.tolist()
    )


def test_one_name_in_two_folders(script, tmp_path):
    """Two input files of one name are both read and both part of what a second run compares."""
    for name, row in (("a", GOOD), ("b", {"prompt": "a", "response": "b"})):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "x.jsonl", row)
    pattern = tmp_path / "*" / "x.jsonl"
    assert script(pattern)[0] == 0
    write(tmp_path / "a" / "x.jsonl", GOOD, GOOD)
    code, folder, printed = script(pattern)
    assert code == 2 and "inputs.x.jsonl" in printed and counts(folder)["kept"] == 2


def test_fault_in_our_code_names_the_row(script, monkeypatch):
    """An exception that is no drop ends the run with its traceback and the row's place; exit code 1."""
    monkeypatch.setattr(prepare.Rows, "_conversation", lambda *_: 1 / 0)
    code, folder, printed = script([GOOD])
    assert code == 1 and "in.jsonl:1: ZeroDivisionError: division by zero" in printed and "Traceback" in printed
    assert {p.name for p in folder.iterdir()} == {".lock", "status.json"}


def test_config_file(script, tmp_path):
    """Flags may stand in a YAML file, mappings included; one given on the command line wins."""
    config = tmp_path / "c.yaml"
    config.write_text(
        "prepare:\n  chat_template_kwargs: {thinking: false}\n  max_seq_len: 99\n  draft_vocab_size: 200\n"
    )
    code, folder, _ = script([GOOD], "--config", str(config), "--draft-vocab-size", "300")
    made = json.loads((folder / "metadata.json").read_text())["settings"]
    assert (code, made["max_seq_len"], made["draft_vocab_size"]) == (0, 99, 300)
    assert made["chat_template_kwargs"] == {"thinking": False}


def die(raws):
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_worker_is_told(script, tmp_path, monkeypatch):
    """A worker that the system kills ends the run with a cause, non-zero, and leaves no dataset."""
    monkeypatch.setattr(prepare, "_work", die)
    code, folder, printed = script([GOOD], "--workers", "2")
    assert code == 1 and "a worker process was killed" in printed
    assert {p.name for p in folder.iterdir()} == {".lock", "status.json"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft-vocab-size", "10"], "--draft-vocab-size 10: too small"),
        (["--chat-template-kwargs", "[1]"], "expected a JSON object"),
        (["--role", "x=boss"], "expected NAME=system"),
        (["--input", "nothing.jsonl"], "--input nothing.jsonl: no such file"),
        (["--max-seq-len", "300000"], "the target takes at most 262144 tokens"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_refused_before_any_row_is_read(script, flags, message):
    """A wrong flag is one line, exit code 2, and no output folder."""
    code, folder, printed = script([GOOD], *flags)
    assert code == 2 and message in printed and not folder.exists()


def test_empty_file_is_refused(script, tmp_path):
    """An empty input file is named."""
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    code, _, printed = script(path)
    assert code == 2 and "empty.jsonl: the file is empty" in printed


def test_show_and_report(script):
    """--show marks the supervised text by brackets, report.html by <mark>; both hold what the target would say."""
    code, folder, printed = script([{"messages": [user("a<b"), assistant("x<y")]}], "--show", "1")
    assert code == 0 and "<|im_assistant|>assistant<|im_middle|><think>[[</think>x<y<|im_end|>]]" in printed
    page = (folder / "report.html").read_text()
    marked = '&lt;think&gt;<mark class="supervised">&lt;/think&gt;x&lt;y&lt;|im_end|&gt;</mark>'
    assert marked in page and "a&lt;b" in page


def test_t4_vocabulary_maps():
    """T4: d2t holds offsets, t2d their targets; special tokens are kept; unseen ids fill what seen ones leave."""
    seen = np.zeros(12, np.int64)
    seen[[2, 5, 9]] = 7
    three = vocab.choose(seen, 3, always=[])
    assert three.d2t.tolist() == [2, 4, 7]
    assert (np.arange(3) + three.d2t).tolist() == np.flatnonzero(three.t2d).tolist() == [2, 5, 9]
    assert vocab.choose(seen, 5, always=[]).ids.tolist() == [0, 1, 2, 5, 9]
    assert vocab.choose(seen, 3, always=[11]).ids.tolist() == [2, 5, 11]
    assert vocab.coverage(vocab.choose(seen, 3, always=[11]), seen) == pytest.approx(2 / 3)
    full = vocab.choose(seen, 12, always=[11])
    assert full.ids is None and full.size == 12 and full.t2d.all() and not full.d2t.any()
    with pytest.raises(ValueError, match="too small for the target's 2 special"):
        vocab.choose(seen, 1, always=[0, 1])
