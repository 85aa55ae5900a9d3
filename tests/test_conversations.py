"""Every way people keep conversations is read into one form, and every row that cannot be is a drop with its reason."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest
import zstandard

from eagle3 import conversations
from eagle3.conversations import (
    Conversation,
    Drop,
    Drops,
    Tokens,
    detect,
    parse,
    read_prompts,
    split_reasoning,
)
from eagle3.sources import Raw, expand, read_raw

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def row(content: dict | bytes, **kwargs) -> Conversation | Tokens:
    return parse(Raw("f", 1, content), **kwargs)


def dropped(content: dict | bytes, **kwargs) -> str:
    with pytest.raises(Drop) as caught:
        row(content, **kwargs)
    return caught.value.reason


@pytest.mark.parametrize(
    ("content", "format"),
    [
        ({"messages": HI}, "messages"),
        ({"messages": json.dumps(HI)}, "messages"),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, "sharegpt"),
        ({"conversations": HI}, "sharegpt"),
        ({"instruction": "hi", "input": "", "output": "yo"}, "alpaca"),
        ({"prompt": "hi", "response": "yo"}, "prompt"),
        ({"prompt": HI[:1], "completion": HI[1:]}, "prompt"),
    ],
)
def test_formats_read_alike(content, format):
    """One conversation in every format gives the same messages and the same content key."""
    assert detect(content) == format
    made = row(content)
    assert made.messages == HI
    assert made.format == format
    assert made.key == row({"messages": HI}).key


def test_alpaca_input_history_and_system():
    """Alpaca's input follows its instruction; history and system come before them."""
    made = row({"instruction": "a", "input": "b", "output": "c", "system": "s", "history": [["q", "r"]]})
    texts = [(m["role"], m["content"]) for m in made.messages]
    assert texts == [("system", "s"), ("user", "q"), ("assistant", "r"), ("user", "a\nb"), ("assistant", "c")]


def test_tokenised_row():
    """A row of ids and mask is taken as it is; one that does not fit is a drop."""
    made = row({"id": 7, "input_ids": [5, 6], "loss_mask": [0, 1]})
    assert (made.id, made.input_ids, made.loss_mask) == ("7", [5, 6], [0, 1])
    assert row({"messages": HI, "input_ids": [5], "loss_mask": [1], "finish_reason": "length"}).cut
    for bad in (
        {"input_ids": [5, 6], "loss_mask": [1]},
        {"input_ids": [5, 6]},
        {"input_ids": [], "loss_mask": []},
        {"input_ids": [5, -1], "loss_mask": [0, 1]},
        {"input_ids": [5, 6], "loss_mask": [0, 2]},
        {"input_ids": [5, "6"], "loss_mask": [0, 1]},
    ):
        assert dropped(bad) == "bad_tokens"


def test_d4_null_content_and_arguments():
    """D4: null, empty and missing content are one thing, and so are arguments as object and as JSON text."""
    made = []
    for content in ({"content": None}, {"content": ""}, {}):
        for arguments in ({"a": "é"}, '{"a": "é"}'):
            call = {"function": {"name": "f", "arguments": arguments}}
            made.append(row({"messages": [HI[0], {"role": "assistant", "tool_calls": [call], **content}]}))
    assert {one.key for one in made} == {made[0].key}
    assert made[0].messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}],
    }


def test_d6_tools_column():
    """D6: tools absent, null, "[]", a list, broken JSON: four rows and one counted drop."""
    tool = {"name": "f", "parameters": {}}
    for tools, expected in (
        ({}, None),
        ({"tools": None}, None),
        ({"tools": "[]"}, None),
        ({"tools": ""}, None),
        ({"tools": [tool]}, [{"type": "function", "function": tool}]),
        ({"tools": json.dumps([tool])}, [{"type": "function", "function": tool}]),
    ):
        assert row({"messages": HI, **tools}).tools == expected
    for bad in ("{bad json", {"name": "f"}, [1], [{"x": 1}]):
        assert dropped({"messages": HI, "tools": bad}) == "bad_tools"


def test_d7_roles():
    """D7: role names go through a table; tool results are never the assistant's; an unknown one is a drop by name."""
    made = row(
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                {"from": "observation", "value": "42"},
                {"from": "gpt", "value": "b"},
            ]
        }
    )
    assert [m["role"] for m in made.messages] == ["user", "assistant", "tool", "assistant"]
    assert made.messages[2]["tool_call_id"] == "functions.f:0"
    assert row({"messages": [{"role": "developer", "content": "x"}, *HI]}).messages[0]["role"] == "developer"
    with pytest.raises(Drop, match="unknown_role: 'laguna_s'"):
        row({"messages": [HI[0], {"role": "laguna_s", "content": "x"}]})
    roles = {"user": "user", "laguna_s": "assistant"}
    mapped = row({"messages": [HI[0], {"role": "laguna_s", "content": "x"}]}, roles=roles)
    assert mapped.messages[1] == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{bad", "bad_json"),
        (b"[1]", "bad_json"),
        (b"\xff\xfe{", "bad_json"),
        (b"[" * 100_000, "bad_json"),
        ({"text": "hi"}, "unknown_format"),
        ({}, "unknown_format"),
        ({"messages": []}, "empty_conversation"),
        ({"messages": "[broken"}, "bad_conversation"),
        ({"messages": {"role": "user"}}, "bad_conversation"),
        ({"messages": ["hi"]}, "bad_conversation"),
        ({"messages": [{"role": "user", "content": 5}]}, "bad_content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "bad_text"),
        ({"messages": HI, "tools": [{"name": "f", "description": "\ud800"}]}, "bad_text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "not_text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "not_text"),
        ({"messages": [HI[0], {"role": "assistant", "content": "", "reasoning": 5}]}, "bad_reasoning"),
        (
            {"messages": [HI[0], {"role": "assistant", "content": "<think>a</think>b", "thinking": "c"}]},
            "bad_reasoning",
        ),
        ({"messages": [HI[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "bad_tool_call"),
        (
            {"messages": [HI[0], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "bad_tool_call",
        ),
        (
            {"messages": [HI[0], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[]"}]}]},
            "bad_tool_call",
        ),
        ({"instruction": "a", "output": "b", "history": ["x"]}, "bad_conversation"),
    ],
)
def test_unusable_rows(content, reason):
    """Each fault of a row is a drop of its own reason, never an exception of another kind."""
    assert dropped(content) == reason


def test_d15_parts():
    """D15: one text part is the string; several stay parts."""
    one = row({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, HI[1]]})
    assert one.messages == HI
    two = row({"messages": [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, HI[1]]})
    assert two.messages[0]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b", ("a", "b")),
        ("\n<think>\na\n</think>\n\nb", ("\na\n", "\n\nb")),
        ("a</think>b", ("a", "b")),
        ("</think>b", ("", "b")),
        ("plain", ("", "plain")),
        ("about <think>a</think>b", ("", "about <think>a</think>b")),
        ("<think>a", ("", "<think>a")),
    ],
)
def test_split_reasoning(text, expected):
    """Reasoning is split off at the start of an answer, with or without its opening tag, and nowhere else."""
    assert split_reasoning(text) == expected


ODD_LINES = (
    b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": 1, "a": 2}', b'{"a": 12345678901234567890123}',
    b'{"a": 1.0}', rb'{"a": "\ud83d\ude00"}', rb'{"a": "\ud800"}', b"\xef\xbb\xbf{}", '{"a": "é"}'.encode("utf-16"),
    b'{"a": "\xff"}', b"{} x", b'{"a": 1,}', b"{'a': 1}", b'{"a": "\t"}', b"null", b"", b'{"a": %s}' % (b"9" * 5000),
)  # fmt: skip


@pytest.mark.parametrize("line", ODD_LINES, ids=lambda line: repr(line[:24]))
def test_odd_lines_are_read_as_json_reads_them(line):
    """The quick reader takes and refuses what Python's json does, and a refusal has json's words."""
    found = []
    for read in (json.loads, conversations._parsed):
        try:
            found.append(repr(read(line)))
        except ValueError as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_d17_identity():
    """D17: a row's id is its own, else a hash of its content."""
    assert row({"messages": HI, "id": 5}).id == "5"
    assert row({"messages": HI, "conversation_id": "c"}).id == "c"
    one, other = row({"messages": HI}), row({"messages": HI[:1]})
    assert one.id == row({"messages": HI, "meta": 1}).id != other.id
    said = json.dumps([HI, None], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    assert one.id == hashlib.sha256(said.encode()).hexdigest()[:32], "the same on every machine"


def write_files(folder: Path, rows: list[dict]) -> list[Path]:
    """The same rows as every kind of file."""
    import pyarrow
    import pyarrow.parquet
    from datasets import Dataset

    lines = "".join(json.dumps(r) + "\n" for r in rows).encode()
    array = json.dumps(rows, indent=2).encode()
    contents = {
        "a.jsonl": lines,
        "a.json": array,
        "a.jsonl.gz": gzip.compress(lines),
        "a.jsonl.zst": zstandard.compress(lines[:200]) + zstandard.compress(lines[200:]),
        "b.json.gz": gzip.compress(array),
        "bom.json": b"\xef\xbb\xbf \n" + array,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet", row_group_size=3)
    Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return [*(folder / name for name in contents), folder / "a.parquet", folder / "saved"]


def test_files_of_every_kind(tmp_path):
    """JSON lines, arrays, gzip, zstd (of two frames), Parquet and a saved dataset give the same rows in order."""
    rows = [{"id": str(k), "messages": [{"role": "user", "content": f"q{k} 你好"}, HI[1]]} for k in range(7)]
    rows[0]["tools"] = None
    rows.append({"id": "t", "messages": HI, "tools": [{"name": "f", "parameters": {"x": 1}}]})
    for path in write_files(tmp_path, rows):
        raws = list(read_raw(path))
        made = [parse(raw) for raw in raws]
        assert [m.id for m in made] == [r["id"] for r in rows], path
        assert [m.key for m in made] == [row(r).key for r in rows], path
        assert raws[-1].line == 8 or path.suffix == ".jsonl"
        assert raws[-1].read == pytest.approx(1.0), path


def test_array_elements_across_chunks(tmp_path):
    """An array element is decoded wherever the read boundary falls; a broken array is named."""
    from eagle3.sources import _array_rows

    path = tmp_path / "a.json"
    rows = [{"k": "é" * k, "n": k} for k in range(5)]
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1))
    for chunk in range(1, 40):
        with open(path, "rb") as file:
            assert list(_array_rows(path, file, chunk)) == rows
    for broken in ("[{}", '[{"a": }]', "[{} x]", "["):
        path.write_text(broken)
        with pytest.raises(ValueError, match="a.json"):
            list(read_raw(path))


def test_damaged_files_are_named(tmp_path):
    """A file cut short or of another kind than its name says is an error that names it."""
    whole = gzip.compress(json.dumps({"messages": HI}).encode() * 100)
    for name, content in (
        ("a.jsonl.gz", whole[: len(whole) // 2]),
        ("b.jsonl.gz", b"no gzip"),
        ("a.jsonl.zst", b"no zstd"),
        ("a.parquet", b"PAR1"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            list(read_raw(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", json.dumps({"messages": HI}, indent=2), "one JSON object over several lines.*write it on one line"),
        ("a.jsonl", json.dumps({"data": [HI]}, indent=1), "one JSON object over several lines"),
        ("a.csv", "prompt,response\nhi,yo\n", "begins with b'prompt,response', which is no JSON"),
        ("a.txt", "hello\n", "begins with b'hello', which is no JSON"),
        ("a.arrow", "ARROW1\0\0", "begins with b'ARROW1"),
    ],
)
def test_a_file_of_another_form_is_explained(tmp_path, name, content, said):
    """A file that is no rows at all is refused: what was found, and which forms are taken."""
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"{name}: {said}.*"):
        list(read_raw(path))
    with pytest.raises(ValueError, match="expected JSON lines .an object a line., a JSON array, Parquet, or a folder"):
        list(read_raw(path))


def test_a_broken_first_line_is_one_row(tmp_path):
    """In a file that is called JSON a first line that is none is a drop like any other line, not the end of the run."""
    for first in ("{bad", "# a comment", ""):
        path = tmp_path / "a.jsonl"
        path.write_text(f"{first}\n{json.dumps({'messages': HI})}\n")
        assert [raw.line for raw in read_raw(path)] == ([1, 2] if first else [2])


def test_expand(tmp_path):
    """Paths, globs and folders name files in order, each once; one that names nothing is refused."""
    for name in ("b.jsonl", "a.jsonl", "x.txt"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/c.parquet").write_bytes(b"")
    (tmp_path / "data/dataset_infos.json").write_text("{}")
    assert [p.name for p in expand([tmp_path / "*.jsonl", tmp_path / "a.jsonl"])] == ["a.jsonl", "b.jsonl"]
    assert [p.name for p in expand([tmp_path / "data"])] == ["c.parquet"]
    with pytest.raises(ValueError, match="no such file"):
        expand([tmp_path / "nothing*.jsonl"])


def test_prompts(tmp_path):
    """A prompt is a conversation up to its last user turn, with id, category and place."""
    path = tmp_path / "p.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
        {"prompt": "hi"},
        {"messages": [*HI, {"role": "user", "content": "more"}, HI[1]]},
        {"messages": [{"role": "system", "content": "s"}]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    drops = Drops()
    made = list(read_prompts([path], drops))
    assert [[m["content"] for m in p.messages] for p in made] == [["one"], ["hi"], ["hi", "yo", "more"]]
    assert [p.later_turns for p in made] == [1, 0, 0]
    assert (made[0].id, made[0].category, made[0].where) == ("81", "writing", "p.jsonl:1")
    assert drops.counts == {"no_user_turn": 1}
    with pytest.raises(ValueError, match="p.jsonl:4: not a prompt: no_user_turn"):
        list(read_prompts([path]))


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"messages": [{"role": ["user"], "content": "hi"}, HI[1]]}, "unknown_role"),
        ({"messages": [{"role": {}, "content": "hi"}, HI[1]]}, "unknown_role"),
        ({"messages": [HI[0], HI[1] | {"tool_calls": 3}]}, "bad_tool_call"),
        ({"messages": [HI[0], HI[1] | {"tool_calls": {"a": 1}}]}, "bad_tool_call"),
        ({"messages": [HI[0], HI[1] | {"tool_calls": DEEP}]}, "bad_tool_call"),
        ({"messages": DEEP}, "bad_conversation"),
        ({"messages": HI, "tools": DEEP}, "bad_tools"),
        ({"instruction": "hi", "output": "yo", "history": 3}, "bad_conversation"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "tokenizer": {"a": 1}}, "bad_tokens"),
    ],
)
def test_a_field_of_another_type_drops_its_row_alone(content, reason):
    """One odd row among millions is counted under a reason; it must not end the run."""
    assert dropped(content) == reason
    assert dropped(json.dumps(content).encode()) == reason
