"""Which prompts a draft is measured on: by name or path, each once, of several turns the first."""

import json
from pathlib import Path

import pytest

from eagle3 import benchmarks, chat
from eagle3.target import Target


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(name, text):
    return {"id": name, "messages": [{"role": "user", "content": text}]}


@pytest.fixture(scope="module")
def llama(tiny_llama):
    return chat.load(Target.open(tiny_llama))


def test_a_name_is_the_file_that_get_prompts_makes(tmp_path, monkeypatch):
    """mt_bench is data/prompts/mt_bench.jsonl, where that is; a path stays what it is, without its suffixes as name."""
    monkeypatch.setattr(benchmarks, "FOLDER", tmp_path)
    made, own = write(tmp_path / "mt_bench.jsonl", asked("a", "b")), write(tmp_path / "own.v2.jsonl.gz")
    assert benchmarks.locate([Path("mt_bench"), own]) == {"mt_bench": made, "own.v2": own}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["gsm8k"], "gsm8k.jsonl is not there; make it with: python data/get_prompts.py data/prompts"),
        (["nothing.jsonl"], "--prompts nothing.jsonl: no such file .* one of mt_bench, humaneval, gsm8k"),
        (["{}/empty"], "--prompts .*/empty: no such file, or a folder without .jsonl"),
        (["{}/a.jsonl", "{}/b/a.jsonl"], "is called 'a' too"),
        (["{}/all.jsonl"], "'all' is the name of all benchmarks together"),
    ],
)
def test_what_is_not_there_is_refused_by_its_flag(tmp_path, monkeypatch, names, said):
    """The message names --prompts, the file, and the command or the names that help."""
    monkeypatch.setattr(benchmarks, "FOLDER", tmp_path)
    monkeypatch.chdir(tmp_path)
    for folder in ("b", "empty"):
        (tmp_path / folder).mkdir()
    for name in ("a.jsonl", "b/a.jsonl", "all.jsonl"):
        write(tmp_path / name, asked("a", "b"))
    with pytest.raises(ValueError, match=said):
        benchmarks.locate([Path(name.format(tmp_path)) for name in names])


def test_the_first_turn_alone_is_asked(llama, tmp_path, capsys):
    """MT-Bench's second turn needs the answer to the first: it is left out, and said once for the file."""
    rows = [{"question_id": n, "category": "writing", "turns": [f"one {n}", "two"]} for n in range(3)]
    prompts = benchmarks.read(write(tmp_path / "mt.jsonl", *rows), llama, 100, None)
    assert [p.ids for p in prompts] == [llama.prompt_ids([{"role": "user", "content": f"one {n}"}]) for n in range(3)]
    assert [(p.id, p.category) for p in prompts] == [("0", "writing"), ("1", "writing"), ("2", "writing")]
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and "first turns only; 3 later ones are left out" in out


def test_one_prompt_twice_is_refused_naming_both_lines(llama, tmp_path):
    """Two rows of one id, or one prompt without an id twice, would count twice."""
    with pytest.raises(ValueError, match=r"prompt 'a' stands twice, at p.jsonl:1 and p.jsonl:3"):
        benchmarks.read(write(tmp_path / "p.jsonl", asked("a", "x"), asked("b", "y"), asked("a", "z")), llama, 99, None)
    with pytest.raises(ValueError, match=r"stands twice, at q.jsonl:1 and q.jsonl:2"):
        benchmarks.read(write(tmp_path / "q.jsonl", {"prompt": "x"}, {"prompt": "x"}), llama, 99, None)


def test_what_cannot_be_used_is_counted(llama, tmp_path, capsys):
    """The same question under another id, a prompt too long, a row that is none: why, and the others stay."""
    rows = [asked("a", "x"), asked("b", "x"), asked("c", "y " * 200), {"no": "prompt"}, asked("d", "z")]
    prompts = benchmarks.read(write(tmp_path / "p.jsonl", *rows), llama, 100, None)
    assert [p.id for p in prompts] == ["a", "d"]
    out = capsys.readouterr().out
    assert "3 rows are left out" in out
    assert "p.jsonl:2: 'b' asks what 'a' asks" in out and "too_long: 1" in out and "unknown_format: 1" in out


@pytest.mark.parametrize(("rows", "said"), [([], "is empty"), ([{"no": 1}], "no usable prompt")])
def test_a_file_without_prompts_is_refused(llama, tmp_path, rows, said):
    """An evaluation of nothing has no figures."""
    with pytest.raises(ValueError, match=rf"--prompts .*p.jsonl: {said}"):
        benchmarks.read(write(tmp_path / "p.jsonl", *rows), llama, 100, None)


def test_the_limit_counts_usable_prompts(llama, tmp_path):
    """--limit 2 takes the first two that can be asked."""
    path = write(tmp_path / "p.jsonl", {"no": 1}, *(asked(name, name) for name in "abc"))
    assert [p.id for p in benchmarks.read(path, llama, 100, 2)] == ["a", "b"]
