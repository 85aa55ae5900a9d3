"""00_generate_responses.py: turn by turn with the target's own answers, every row accounted for, never asked twice.

Most tests ask a small HTTP server in place of a model, since only so can a test say what is answered; the last ones run
a real engine and a real `vllm serve`.
"""

import json
import runpy
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from chat_server import ChatServer, completion
from chat_targets import target_folder
from vllm_server import vllm_serve

from eagle3 import chat, dialogues, engine, generate
from eagle3 import server as server_module
from eagle3.conversations import Drops
from eagle3.target import Target
from tests import stages

EOS = "<|im_end|>"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def prompt(row_id: str, *texts: str) -> dict:
    return {"id": row_id, "messages": [user(text) for text in texts]}


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def llama(tiny_llama) -> chat.Chat:
    return chat.load(Target.open(tiny_llama))


@pytest.fixture
def answers(llama):
    """A server's reply: the last message in capitals, with its token ids."""

    def reply(request: dict, text: str | None = None) -> tuple[int, dict]:
        text = request["messages"][-1]["content"].upper() if text is None else text
        return completion(text, token_ids=llama.encode(text + EOS))

    return reply


@pytest.fixture
def run(tiny_llama, tmp_path, monkeypatch, capfd):
    """Run the script on rows against a server, in this process: exit code, everything printed, and the output file."""

    def run(rows, server: ChatServer, *flags: object):
        argv = ["00_generate_responses.py", *arguments(tiny_llama, tmp_path, rows, server), *flags]
        monkeypatch.setattr(sys, "argv", list(map(str, argv)))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(stages.ROOT / "00_generate_responses.py"), run_name="__main__")
        captured = capfd.readouterr()
        return SimpleNamespace(returncode=ended.value.code, stdout=captured.out + captured.err), output_of(tmp_path)

    return run


def output_of(folder):
    return folder / "answers.jsonl"


def arguments(model, folder, rows, server):
    return (
        "--model-path", model, "--input", write(folder / "prompts.jsonl", rows), "--output", output_of(folder),
        "--base-url", server.url, "--max-tokens", 32,
    )  # fmt: skip


def counts(output) -> dict:
    found = json.loads((output.parent / "answers.jsonl.meta.json").read_text())["counts"]
    assert found["rows_in"] == found["kept"] + sum(found["dropped"].values())
    return found


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("u", ["u"]),
        ("su", ["su"]),
        ("uau", ["u", "u"]),  # the answer in the input gives way to the target's own
        ("uaua", ["u", "u"]),
        ("uu", ["u", "u"]),  # a benchmark's turns
        ("uctau", ["uct", "u"]),  # c: an assistant's call of a tool, t: its result
        ("ucttct", ["ucttct"]),
        ("au", ["au"]),  # a greeting is no answer
        ("s", []),
    ],
)
def test_turns(roles, expected):
    """What is put before the target for each of its answers, worked out by hand."""
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool", "c": "assistant"}
    messages = [{"role": names[r], "content": r, **({"tool_calls": [{"id": "1"}]} if r == "c" else {})} for r in roles]
    assert ["".join(m["content"] for m in turn) for turn in dialogues.turns_of(messages)] == expected


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "one"},
        {"question": "one"},
        {"turns": ["one"]},
        {"prompt": [user("one")]},
        {"messages": [user("one")]},
        {"messages": [user([{"type": "text", "text": "one"}]), assistant("given")]},
        {"conversations": [{"from": "human", "value": "one"}]},
        {"instruction": "one"},
    ],
)
def test_every_kind_of_prompt_is_asked(llama, tmp_path, row):
    """A prompt alone, in each format, is one turn to answer, with the ids of the template's prompt."""
    path, drops = write(tmp_path / "p.jsonl", [row]), Drops()
    (dialogue,) = dialogues.read([path], llama, 4096, None, drops)
    assert dialogue.turns == [[user("one")]] and dialogue.prompt_ids == llama.prompt_ids([user("one")])
    assert not drops.total


def test_conversations_go_on_with_the_targets_own_answers(run, answers, llama):
    """The second prompt holds the answer that came to the first, not the one of the input, and the row's ids are the
    prompt's, the answer's, the next prompt's: supervised exactly where the server generated."""
    rows = [{"id": "a", "messages": [user("one"), assistant("of the input"), user("two")]}, prompt("b", "three")]
    with ChatServer(answers) as server:
        result, output = run(rows, server)
    assert result.returncode == 0, result.stdout
    asked = [[m["content"] for m in r["messages"]] for r in server.requests]
    assert sorted(asked) == [["one"], ["one", "ONE", "two"], ["three"]]
    first, second = read(output)
    assert [m["content"] for m in first["messages"]] == ["one", "ONE", "two", "TWO"]
    said = [i for i, m in zip(first["input_ids"], first["loss_mask"], strict=True) if m]
    assert llama.decode(said) == f"ONE{EOS}TWO{EOS}"
    assert llama.decode(first["input_ids"]) == llama.prompt_text(first["messages"][:3]) + f"TWO{EOS}"
    assert (first["id"], second["id"]) == ("a", "b")
    assert counts(output)["answered"] == 3


def test_a_row_of_its_own_where_the_next_prompt_differs(run, llama):
    """An answer in ids that the tokenizer would not choose: the next prompt has other ids, so each turn is a row with
    exactly what was generated."""
    letters = [llama.encode(c)[0] for c in "river"]
    ids = [*letters, *llama.encode(EOS)]
    assert llama.encode(f"river{EOS}") != ids
    with ChatServer(lambda request: completion("river", token_ids=ids)) as server:
        result, output = run([prompt("a", "one", "two")], server)
    assert result.returncode == 0, result.stdout
    rows = read(output)
    assert [row["id"] for row in rows] == ["a#1", "a#2"]
    assert [sum(row["loss_mask"]) for row in rows] == [6, 6]
    assert all(row["input_ids"][-6:] == ids for row in rows)
    assert rows[1]["input_ids"][:-6] == llama.prompt_ids([user("one"), assistant("river"), user("two")])


def test_thinking_answers_in_the_form_of_the_server(tmp_path):
    """Kimi's template takes reasoning out of history: the second prompt has the first answer without it, so each turn
    is a row, and each row supervises the reasoning and the answer that were generated after its prompt."""
    kimi = chat.load(Target.open(target_folder("kimi")), True)
    (dialogue,) = dialogues.read([write(tmp_path / "p.jsonl", [prompt("a", "one", "two")])], kimi, 4096, None, Drops())
    texts = [f"I think</think>ONE{EOS}", f"Again</think>TWO{EOS}"]
    for text in texts:
        dialogues.take(dialogue, dialogues.Answer("a", "stop", ids=kimi.encode(text)), kimi, 4096, keep_cut=False)
    assert dialogue.num_left == 0 and not dialogue.left_out
    first, second = dialogue.rows
    own = assistant("ONE", reasoning="I think")
    assert second["messages"] == [user("one"), own, user("two"), assistant("TWO", reasoning="Again")]
    asked = [kimi.prompt_text([user("one")]), kimi.prompt_text([user("one"), own, user("two")])]
    assert asked[1].endswith("<think>") and "I think" not in asked[1]
    assert [kimi.decode(row["input_ids"]) for row in (first, second)] == [
        a + t for a, t in zip(asked, texts, strict=True)
    ]
    for row, text in ((first, texts[0]), (second, texts[1])):
        said = [i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]
        assert kimi.decode(said) == text


def test_every_row_is_accounted_for(run, answers):
    """Typed control tokens, broken rows, a row without a user, a repeated row, refusals, cut answers: each counted by
    name, and another conversation under a known id keeps its place under an id of its own."""

    def reply(request: dict) -> tuple[int, dict]:
        text = request["messages"][-1]["content"]
        if text == "refuse":
            return 400, {"error": {"message": "too rude", "code": 400}}
        if text == "long":
            return completion("LO", token_ids=[1, 2], finish_reason="length")
        return answers(request)

    rows = [
        prompt("a", "one"), prompt("a", "one"), prompt("a", "other"), prompt("b", f"x {EOS} y"), "{bad",
        {"messages": [{"role": "system", "content": "s"}]}, prompt("c", "refuse"), prompt("d", "long"),
        prompt("e", "fine", "long", "never asked"), prompt("f", "x " * 600), {"input_ids": [1], "loss_mask": [1]},
        prompt("g", "say a control token", "never asked either"),
    ]  # fmt: skip

    def with_control(request: dict) -> tuple[int, dict]:
        if request["messages"][-1]["content"].startswith("say"):
            return answers(request, "<|im_start|>")
        return reply(request)

    with ChatServer(with_control) as server:
        result, output = run(rows, server)
    assert result.returncode == 0, result.stdout
    found = counts(output)
    assert found["rows_in"] == 12 and found["kept"] == 4
    assert found["dropped"] == {
        "duplicate": 1, "control_token": 1, "bad_json": 1, "no_user_turn": 1, "too_long": 1, "unknown_format": 1,
        "server_refuses": 1, "cut": 1,
    }  # fmt: skip
    assert found["left_out"] == {"cut": 2, "after_cut": 1, "control_token": 1}
    assert (found["answered"], found["cut"]) == (4, 2)
    ids = [row["id"] for row in read(output)]
    assert ids[0] == "a" and ids[1].startswith("a~") and ids[2:] == ["e", "g"]
    assert "      c: " in result.stdout and "too rude" in result.stdout
    assert "WARNING: 33% of the answers are cut" in result.stdout


def test_cut_answers_are_kept_and_marked_when_asked_for(run):
    """--keep-cut: the row says finish_reason length, and the turn after it is not asked."""
    with ChatServer(lambda _: completion("LO", token_ids=[1, 2], finish_reason="length")) as server:
        result, output = run([prompt("a", "long", "next")], server, "--keep-cut")
    (row,) = read(output)
    assert (row["finish_reason"], row["loss_mask"][-2:]) == ("length", [1, 1])
    assert counts(output)["left_out"] == {"after_cut": 1}
    assert len(server.requests) == 1


def test_nothing_left_is_no_output(run):
    """When every answer is cut there is no file, and the error says why and what to do."""
    with ChatServer(lambda _: completion("LO", token_ids=[1, 2], finish_reason="length")) as server:
        result, output = run([prompt("a", "long")], server)
    assert result.returncode == 1 and not output.exists()
    assert "no answer is left (cut: 1); for cut ones raise --max-tokens, or --keep-cut" in result.stdout


def test_messages_only_from_a_server_without_token_ids(run, tiny_llama, tmp_path):
    """One row a conversation, with reasoning in its own field, which stage 1 takes as a conversation."""
    with ChatServer(lambda _: completion("four", reasoning_content="2 + 2")) as server:
        result, output = run([prompt("a", "one", "two")], server)
    assert result.returncode == 0, result.stdout
    (row,) = read(output)
    assert "input_ids" not in row
    own = assistant("four", reasoning="2 + 2")
    assert row["messages"] == [user("one"), own, user("two"), own]
    assert server.requests[1]["messages"][1] == own | {"reasoning_content": "2 + 2"}
    stages.succeed(
        "01_prepare_data.py", "--model-path", tiny_llama, "--input", output, "--output-dir", tmp_path / "prepared",
        "--draft-vocab-size", 300,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "more", "left_out"),
    [
        ([assistant("welcome"), user("one")], {}, {"given_answer": 1}),
        ([user("one"), user("two")], {"tool_calls": [{"function": {"name": "f"}}]}, {"calls_tool": 1}),
    ],
)
def test_what_cannot_be_had_from_a_server_without_token_ids(run, messages, more, left_out):
    """An answer of the input could not be told from the target's own; a tool that it calls has nobody to run it."""
    rows = [prompt("a", "fine"), {"id": "b", "messages": messages}]
    with ChatServer(lambda request: completion("ok", **(more if len(request["messages"]) == 1 else {}))) as server:
        result, output = run(rows, server)
    assert result.returncode == 0, result.stdout
    assert counts(output)["left_out"] == left_out


def test_what_is_asked(run, answers, tmp_path):
    """Sampling flags, template kwargs and at most --batch-size requests at a time; each conversation its own seed."""
    with ChatServer(answers, delay=0.05) as server:
        rows = [prompt(f"p{i}", f"question {i}") for i in range(12)]
        result, _ = run(rows, server, "--batch-size", 3, "--temperature", 0.7, "--top-p", 0.9, "--seed", 5)
    assert result.returncode == 0, result.stdout
    assert server.most_at_a_time == 3
    assert {(r["temperature"], r["top_p"], r["max_tokens"]) for r in server.requests} == {(0.7, 0.9, 32)}
    assert len({r["seed"] for r in server.requests}) == 12
    assert all(r["return_token_ids"] and r["chat_template_kwargs"] == {} for r in server.requests)
    assert "tokens/s" in result.stdout and "ETA" in result.stdout


def test_a_busy_server_is_asked_again(run, answers):
    """503 and 429 are tried again after a pause; nothing is lost."""
    failures = iter([(503, {"error": {"message": "busy"}}), (429, {"error": {"message": "slow down"}})])
    with ChatServer(lambda request: next(failures, None) or answers(request)) as server:
        result, output = run([prompt("a", "one")], server)
    assert result.returncode == 0, result.stdout
    assert len(server.requests) == 3 and len(read(output)) == 1


def test_a_server_that_goes_away(run, answers, monkeypatch):
    """Exit code 1 and the cause after the last try; what was answered is kept, and the same command goes on from it."""
    monkeypatch.setattr(server_module, "RETRIES", 1)
    rows = [prompt(f"p{i}", f"question {i}") for i in range(3)]

    def reply(request: dict) -> tuple[int, dict]:
        up = len(server.requests) <= 2 or len(server.requests) > 4
        return answers(request) if up else (500, {"error": {"message": "out of memory"}})

    with ChatServer(reply) as server:
        result, output = run(rows, server, "--batch-size", 1)
        assert result.returncode == 1 and not output.exists() and "Traceback" not in result.stdout
        assert (
            "no answer to 'p2' (at most 1 retries): InternalServerError" in result.stdout
            and "out of memory" in result.stdout
        )
        result, output = run(rows, server, "--batch-size", 1)
    assert "conversations: 3, 2 of them finished before" in result.stdout
    assert result.returncode == 0 and len(read(output)) == 3 and len(server.requests) == 5


def test_another_model_behind_the_url_is_named(run, answers):
    """A server whose prompt has other token ids than --model-path gives: the run stops early and says so."""

    def reply(request: dict) -> tuple[int, dict]:
        status, content = answers(request)
        return status, content | {"prompt_token_ids": [1, 2, 3]}

    with ChatServer(reply) as server:
        result, output = run([prompt(f"p{i}", f"question {i}") for i in range(40)], server, "--batch-size", 1)
    assert result.returncode == 1 and not output.exists()
    assert "the server makes 3 prompt tokens of 'p9'" in result.stdout
    assert "it serves another model or chat template" in result.stdout
    assert len(server.requests) == generate.MAX_REFUSED


def test_no_server_is_refused_before_work(run):
    """Exit code 2 and the URL, when nothing listens there."""
    with ChatServer(lambda _: (500, {})) as server:
        pass
    result, output = run([prompt("a", "one")], server)
    assert result.returncode == 2 and not output.exists()
    assert f"--base-url {server.url}: no server answers there" in result.stdout


def test_killed_at_any_time_it_goes_on(run, tiny_llama, tmp_path, answers):
    """kill -9 twice in the middle of writing, the last time with a line half-written: the same command ends with
    every conversation once, in order, and asks again only those that were under way."""
    rows = [prompt(f"p{i}", f"question {i}", f"and then {i}") for i in range(60)]
    with ChatServer(answers, delay=0.1) as server:
        command = [sys.executable, "00_generate_responses.py"]
        command += map(str, (*arguments(tiny_llama, tmp_path, rows, server), "--batch-size", 4))
        part = tmp_path / "answers.jsonl.part"
        for _ in range(2):
            before = part.stat().st_size if part.exists() else 0
            process = subprocess.Popen(command, cwd=stages.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            while not part.exists() or part.stat().st_size < before + 1500:
                assert process.poll() is None, process.stdout.read().decode()
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            process.wait()
        whole = part.read_bytes().count(b"\n")
        assert 0 < whole < 60
        with open(part, "ab") as file:
            file.write(b'{"id": "p59", "rows": [{"id": "p5')
        last = subprocess.run(command, cwd=stages.ROOT, text=True, capture_output=True)
        asked = len(server.requests)
        again, _ = run(rows, server, "--batch-size", 4)
    assert last.returncode == again.returncode == 0, last.stdout + last.stderr
    assert f"conversations: 60, {whole} of them finished before" in last.stdout
    found = read(output_of(tmp_path))
    assert [row["id"] for row in found] == [f"p{i}" for i in range(60)]
    for i, row in enumerate(found):
        assert [m["content"] for m in row["messages"]][1::2] == [f"QUESTION {i}", f"AND THEN {i}"]
    assert 120 <= asked <= 120 + 2 * 4 * 2  # twice, four conversations of two turns were under way
    assert not part.exists() and "finished before" in again.stdout and len(server.requests) == asked


def test_overwrite_starts_anew(run, answers):
    """--overwrite asks everything again and leaves one output of the new settings."""
    with ChatServer(answers) as server:
        assert run([prompt("a", "one")], server)[0].returncode == 0
        result, output = run([prompt("a", "one")], server, "--max-tokens", 8, "--overwrite")
    assert result.returncode == 0 and len(server.requests) == 2 and len(read(output)) == 1


def test_two_runs_cannot_write_one_file(tmp_path):
    """The second is refused by name while the first holds the file."""
    part = tmp_path / "answers.jsonl.part"
    with generate._locked(part), pytest.raises(ValueError, match="another run is writing it"), generate._locked(part):
        pass


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max-tokens", 8), "max_tokens: expected 32, found 8"),
        (("--temperature", 0.5), "temperature: expected 0.0, found 0.5"),
        (("--keep-cut",), "keep_cut: expected False, found True"),
    ],
)
def test_other_settings_in_one_file_are_refused(run, answers, flags, said):
    """Answers of two settings do not mix: refused before work, naming the setting."""
    with ChatServer(answers) as server:
        assert run([prompt("a", "one")], server)[0].returncode == 0
        result, _ = run([prompt("a", "one")], server, *flags)
    assert result.returncode == 2 and said in result.stdout


def test_answers_of_two_template_settings_do_not_mix(tmp_path, monkeypatch):
    """00 goes on under the same --chat-template-kwargs alone, before and after its end: others are refused with the
    key and both values. 01 drops each of its rows under others, naming both."""
    monkeypatch.setattr(server_module, "RETRIES", 0)
    kimi = chat.load(Target.open(target_folder("kimi")), True)
    good = completion("yes", token_ids=kimi.encode(f"I think</think>yes{EOS}"))
    common = ("--model-path", target_folder("kimi"), "--trust-remote-code")
    output, instant = output_of(tmp_path), ("--chat-template-kwargs", '{"thinking": false}')
    refused = "begun with other settings: chat_template_kwargs.thinking: expected None, found False"
    replies = iter([good, (500, {"error": {"message": "out of memory"}}), good, good])
    with ChatServer(lambda _: next(replies)) as server:
        flags = (
            *common,
            *arguments("", tmp_path, [prompt("a", "one"), prompt("b", "two")], server)[2:],
            "--batch-size",
            1,
        )
        assert stages.run_here("00_generate_responses.py", *flags)[0] == 1
        code, said = stages.run_here("00_generate_responses.py", *flags, *instant)
        assert code == 2 and refused in said
        assert stages.run_here("00_generate_responses.py", *flags)[0] == 0
        code, said = stages.run_here("00_generate_responses.py", *flags, *instant)
        assert code == 2 and refused in said
    assert len(server.requests) == 3 and len(read(output)) == 2
    flags = (*common, "--input", output, "--output-dir", tmp_path / "prepared", "--draft-vocab-size", 300)
    code, said = stages.run_here("01_prepare_data.py", *flags, *instant)
    assert code == 1 and "other_template_kwargs: 2" in said
    assert "made with --chat-template-kwargs {}, this run has {'thinking': False}" in said
    assert stages.run_here("01_prepare_data.py", *flags)[0] == 0


@pytest.fixture(scope="module")
def talkative(tiny_llama, tmp_path_factory):
    """The tiny Llama with a stop token in eight, so that its answers end before long."""
    folder = tmp_path_factory.mktemp("talkative")
    for path in tiny_llama.iterdir():
        (folder / path.name).symlink_to(path)
    generation = folder / "generation_config.json"
    generation.unlink(missing_ok=True)
    generation.write_text(json.dumps({"eos_token_id": [511, *range(0, 509, 8)]}))
    return folder


@pytest.mark.slow
def test_a_real_server_and_the_engine_say_the_same(talkative, tmp_path):
    """Greedy answers to whole conversations: `vllm serve` and the offline engine give the same token ids in the same
    rows, each generated after exactly the prompt that the template makes of the conversation so far."""
    texts = ["Hello there", "Name a river.", "And another one?"]
    rows = [prompt(f"p{i}", *[f"{text} {i}" for text in texts]) for i in range(8)]
    common = ("--model-path", talkative, "--input", write(tmp_path / "prompts.jsonl", rows), "--max-tokens", 200)
    engines, served = tmp_path / "engine.jsonl", tmp_path / "served.jsonl"
    stages.succeed("00_generate_responses.py", *common, "--output", engines)
    with open(tmp_path / "server.log", "w") as log, vllm_serve(talkative, log) as url:
        stages.succeed("00_generate_responses.py", *common, "--output", served, "--base-url", url)
    found = read(served)
    assert found == read(engines)
    model = chat.load(Target.open(talkative))
    assert sum(row["id"].endswith("#3") for row in found) >= 4
    for row in found:
        said = sum(row["loss_mask"])
        assert row["loss_mask"] == [0] * (len(row["input_ids"]) - said) + [1] * said
        assert row["input_ids"][-1] in model.stop_ids and row["finish_reason"] == "stop"
        assert row["input_ids"][:-said] == model.prompt_ids(row["messages"][:-1])


@pytest.mark.slow
def test_killed_with_an_engine_it_leaves_none_and_goes_on(talkative, tmp_path):
    """kill -9 of the driver while its engine answers: every process of the engine ends by itself, and the same command
    ends with each conversation once, with the finished ones as they were."""
    rows = [prompt(f"p{i}", f"Hello there {i}") for i in range(60)]
    output = output_of(tmp_path)
    part = output.with_name("answers.jsonl.part")
    flags = ["--model-path", talkative, "--input", write(tmp_path / "prompts.jsonl", rows), "--output", output]
    flags += ["--max-tokens", 200, "--batch-size", 4, "--keep-cut"]
    command = [sys.executable, "00_generate_responses.py", *map(str, flags)]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=stages.ROOT, stdout=log, stderr=subprocess.STDOUT)
        while not part.exists() or part.stat().st_size < 1500:
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.02)
        engines = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
    assert engines
    _, alive = psutil.wait_procs(engines, timeout=60)
    assert not alive
    lines = part.read_bytes().splitlines(keepends=True)
    before = {entry["id"]: entry["rows"] for entry in (json.loads(line) for line in lines if line.endswith(b"\n"))}
    said = stages.succeed("00_generate_responses.py", *flags)
    assert f"conversations: 60, {len(before)} of them finished before" in said and 0 < len(before) < 60
    found = read(output)
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    assert [[row] for row in found if row["id"] in before] == [
        before[i] for i in sorted(before, key=lambda i: int(i[1:]))
    ]


@pytest.fixture
def one_engine(talkative, monkeypatch):
    """A real engine that every run of 00 in this process is given."""
    from vllm import LLM

    llm: LLM = engine.start(talkative, tp_size=1, gpu_memory_utilization=0.5, max_model_len=300, dtype="float32")
    with monkeypatch.context() as patched:
        patched.setattr(engine, "start", lambda *_, **__: llm)
        patched.setattr(engine, "stop", lambda _: None)
        yield llm
    engine.stop(llm)


@pytest.mark.slow
def test_sampling_with_a_real_engine(talkative, one_engine, tmp_path):
    """With --temperature and --top-p one seed gives the same answers twice, also in other company, and another seed
    others; greedy answers are those of plain vLLM after the template's own prompts."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    rows = [prompt(f"p{i}", f"Hello there {i}") for i in range(16)]
    path = write(tmp_path / "prompts.jsonl", rows)

    def answer(name: str, *flags: object) -> dict[str, list[int]]:
        output = tmp_path / f"{name}.jsonl"
        common = ("--model-path", talkative, "--input", path, "--output", output, "--max-tokens", 100, "--keep-cut")
        code, said = stages.run_here("00_generate_responses.py", *common, *flags)
        assert code == 0, said
        return {row["id"]: row["input_ids"][row["loss_mask"].index(1) :] for row in read(output)}

    warm = ("--temperature", 1.0, "--top-p", 0.9, "--seed")
    first = answer("first", *warm, 1)
    assert answer("again", *warm, 1, "--batch-size", 3) == first
    other = answer("other", *warm, 2)
    assert sum(other[i] != first[i] for i in first) >= 14
    tokenizer = AutoTokenizer.from_pretrained(talkative)
    ids = [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False) for row in rows
    ]
    plain = one_engine.generate(
        [{"prompt_token_ids": i} for i in ids], SamplingParams(max_tokens=100, temperature=0, detokenize=False)
    )
    expected = {row["id"]: list(made.outputs[0].token_ids) for row, made in zip(rows, plain, strict=True)}
    assert answer("greedy") == expected
