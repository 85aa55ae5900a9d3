"""04 against running servers: figures from /metrics and the stream, and every server that cannot be measured refused.

Most tests ask a small HTTP server that counts as vLLM does, since only so can a test say what it counts; the last one
measures real vLLM servers.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from chat_server import ChatServer, completion
from hf_states import load_target
from vllm_server import vllm_serve

from eagle3 import chat, files, served
from eagle3.draft import Draft, DraftConfig, Teacher, embedding
from eagle3.export import export
from eagle3.target import Target
from eagle3.vocab import DraftVocab
from tests import stages

QUESTIONS, MAX_TOKENS = [f"Question {i}?" for i in range(8)], 40
PER_PASS = [2, 0, 1]  # what every answer's passes accept: 1 + 2+1 + 0+1 + 1+1 = 7 tokens


class Counted:
    """A vLLM server with a draft of two tokens (or none), as its clients see it."""

    def __init__(self, *, drafted=True, detailed=False, foreign=0, running=0, model="m", prompt_ids=(1, 2)):
        self.drafted, self.detailed, self.foreign, self.running = drafted, detailed, foreign, running
        self.prompt_ids, self.answers, self.generated = list(prompt_ids), 0, 100
        self.server = ChatServer(self.reply, metrics=self.metrics, model=model)

    def reply(self, request):
        ids = list(range(7))[: request["max_tokens"]]
        self.generated += len(ids) + self.foreign
        self.answers += len(ids) == 7
        status, content = completion("x", token_ids=ids)
        content["prompt_token_ids"] = self.prompt_ids
        if self.detailed:
            spec = {"acceptance_histogram": [1, 1, 1], "per_step_accepted": PER_PASS}
            content["metrics"] = {"speculative_decoding": spec}
        return status, content

    def metrics(self):
        """Two engines of one server: vLLM gives a sample for each."""
        counters = {"generation_tokens": [self.generated - 40, 40]}
        if self.drafted:
            counters |= {
                "spec_decode_num_drafts": [3 * self.answers, 5],
                "spec_decode_num_draft_tokens": [6 * self.answers, 10],
                "spec_decode_num_accepted_tokens": [3 * self.answers, 1],
            }
        lines = [f'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{engine="0"}} {self.running}']
        for name, values in counters.items():
            lines.append(f"# TYPE vllm:{name}_total counter")
            lines += [f'vllm:{name}_total{{engine="{k}"}} {v}' for k, v in enumerate(values)]
        if self.drafted:
            lines.append("# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter")
            for position, count in enumerate((2 * self.answers, self.answers)):
                labels = f'{{engine="0",position="{position}"}}'
                lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{labels} {count}")
        return "\n".join(lines) + "\n"


@pytest.fixture
def run(tmp_path):
    """A function that measures servers with 04 itself: exit code, log, JSON (None if there is none)."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "category": "abc"[i % 3], "prompt": f"question {i}"} for i in range(6)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tmp_path / "evaluation.json"

    def measured(drafted, plain=None, *flags):
        with drafted.server, (plain or Counted(drafted=False)).server as other:
            flags += ("--plain-url", other.url) if plain else ()
            code, log = stages.run_here(
                "04_evaluate_draft.py", "--base-url", drafted.server.url, "--prompts", prompts, "--output", output,
                *flags,
            )  # fmt: skip
        return SimpleNamespace(code=code, log=log, json=files.read_json(output) if output.exists() else None)

    return measured


def test_acceptance_is_what_the_server_counted_for_our_prompts(run):
    """6 answers of 3 passes and 3 accepted tokens: 1 + 18/18; position 1 in 12 of 18 passes, position 2 in 6 of 18.

    What was counted before (by a second engine, and in the warm-up) does not count. Every answer has 7 tokens.
    """
    result = run(Counted(), Counted(drafted=False), "--concurrency", 2, 1)
    assert result.code == 0, result.log
    asked = [(m["num_speculative_tokens"], m["concurrency"]) for m in result.json["measurements"]]
    assert asked == [(0, 1), (0, 2), (2, 1), (2, 2)]
    row = result.json["benchmarks"]["all"]
    assert (row["prompts"], row["tokens"], row["acceptance_length"]) == (6, 42, 2.0)
    assert row["acceptance_by_position"] == pytest.approx([12 / 18, 6 / 18])
    assert (row["identical"], row["different"]) == (6, [])
    assert row["tokens_per_s_draft"] > 0 and row["speed_up"] > 0 and row["ms_per_token_draft"] > 0


def test_what_is_not_known_is_not_made_up(run):
    """No interval and no categories where the server tells nothing of single answers: null, and said in the table."""
    result = run(Counted())
    assert result.json["benchmarks"]["all"]["acceptance_length_interval"] is None
    assert result.json["measurements"][0]["categories"] is None
    assert "it is not known what each answer accepted" in result.log
    assert result.json["benchmarks"]["all"]["speed_up"] is None


def test_a_server_that_tells_what_each_answer_accepted_gives_intervals(run):
    """With per-request metrics every answer has its passes, so there are categories and an interval."""
    result = run(Counted(detailed=True))
    assert [a["accepted"] for a in result.json["answers"]] == [PER_PASS] * 6
    row = result.json["benchmarks"]["all"]
    assert row["acceptance_length_interval"] == [2.0, 2.0] and row["accepted_past_end"] == 0
    assert {name: row["prompts"] for name, row in result.json["measurements"][0]["categories"].items()} == {
        "a": 2, "b": 2, "c": 2,
    }  # fmt: skip


def test_as_many_requests_as_asked_for_are_under_way(run):
    """--concurrency 3: three at a time and never more."""
    counted = Counted()
    counted.server.delay = 0.05
    assert run(counted, None, "--concurrency", 3).code == 0
    assert counted.server.most_at_a_time == 3


@pytest.mark.parametrize(
    ("drafted", "plain", "said"),
    [
        (Counted(drafted=False), None, "--base-url .* it serves 'm' without a draft"),
        (Counted(running=3), None, "--base-url .*: 3 requests are under way: another client is using it"),
        (Counted(), Counted(), "--plain-url .*: it drafts 2 tokens; expected the target alone"),
        (Counted(model="a/kimi"), Counted(drafted=False, model="b/llama"), "serves 'a/kimi', --plain-url serves"),
    ],
)
def test_a_server_that_cannot_be_measured_is_refused_by_name(run, drafted, plain, said):
    """Exit code 2 before any prompt is sent."""
    result = run(drafted, plain)
    assert result.code == 2 and result.json is None and not drafted.server.requests
    assert re.search(said, result.log.splitlines()[-1])


def test_a_server_without_metrics_is_refused(run):
    """Not vLLM, or its metrics are switched off."""
    counted = Counted()
    counted.server = ChatServer(counted.reply)
    result = run(counted)
    assert result.code == 2 and "no metrics at" in result.log


def test_names_of_one_target_may_have_different_paths(run):
    """/models/kimi and kimi are one name; a prompt's tokens are compared besides."""
    assert run(Counted(model="/models/kimi"), Counted(drafted=False, model="kimi")).code == 0


def test_tokens_of_another_client_end_the_run(run):
    """Its counters have two tokens more an answer than ours: acceptance would be of prompts that nobody asked about."""
    result = run(Counted(foreign=2))
    assert result.code == 1
    assert "it counts 54 generated tokens, our answers have 42: another client is using it" in result.log


def test_counters_of_a_part_of_the_answers_end_the_run(run, monkeypatch):
    """A load balancer asks one server for /metrics and others for answers."""
    monkeypatch.setattr(served, "SETTLE_S", 0.1)
    result = run(Counted(foreign=-1))
    assert result.code == 1 and "is it one server of several behind one address?" in result.log


def test_servers_that_render_a_prompt_differently_are_told_apart(run):
    """Another chat template on one side: answers and speeds would be of other prompts."""
    result = run(Counted(), Counted(drafted=False, prompt_ids=(1, 2, 3)))
    assert result.code == 1 and "not the 3 that the other server makes" in result.log


@torch.inference_mode()
def most_said(target: Path) -> int:
    """The token that a target says most often in its greedy answers to QUESTIONS, by Transformers."""
    model, talk = load_target(target), chat.load(Target.open(target))
    prompts = [torch.tensor([talk.prompt_ids([{"role": "user", "content": text}])]) for text in QUESTIONS]
    answers = [model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)[0, ids.shape[1] :] for ids in prompts]
    return int(torch.cat(answers).bincount().argmax())


@pytest.fixture(scope="module")
def draft(tiny_llama, tmp_path_factory):
    """A draft of the tiny Llama that can say one token only, the one that its target says most often here.

    So it needs no training to have some accepted, and others not.
    """
    torch.manual_seed(0)
    target, vocab = Target.open(tiny_llama), DraftVocab(512, np.array([most_said(tiny_llama)]))
    made = Draft.create(
        DraftConfig.for_target(target, vocab), embedding(target), Teacher.for_target(target, vocab).head
    )
    folder = tmp_path_factory.mktemp("served") / "draft"
    export(folder, made, target, vocab, [1, 2, 4, 5], 2)
    return folder


@pytest.mark.slow
def test_real_servers_and_engines_measure_the_same(tiny_llama, draft, tmp_path):
    """Two vLLM servers and two engines of ours: the same answers and, pass by pass, the same acceptance."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": text, "prompt": text}) + "\n" for text in QUESTIONS))
    common = ("--prompts", prompts, "--draft", draft, "--max-tokens", MAX_TOKENS, "--concurrency", 1, 4)
    engines, asked = tmp_path / "engines.json", tmp_path / "servers.json"
    stages.succeed("04_evaluate_draft.py", *common, "--output", engines)
    metrics = ("--per-request-spec-decode-metrics", "detailed")
    with (
        open(tmp_path / "plain.log", "w") as plain_log,
        open(tmp_path / "draft.log", "w") as draft_log,
        vllm_serve(tiny_llama, plain_log) as plain,
        vllm_serve(draft, draft_log, *metrics) as drafted,
    ):
        stages.succeed("04_evaluate_draft.py", *common, "--base-url", drafted, "--plain-url", plain, "--output", asked)
        refused = stages.run("04_evaluate_draft.py", "--prompts", prompts, "--base-url", plain)
        assert refused.returncode == 2 and "without a draft" in refused.stdout
    one, other = files.read_json(engines), files.read_json(asked)
    for a, b in zip(one["answers"], other["answers"], strict=True):
        assert [a[k] for k in ("measurement", "id", "tokens", "accepted")] == [
            b[k] for k in ("measurement", "id", "tokens", "accepted")
        ]
    for a, b in zip(one["measurements"], other["measurements"], strict=True):
        assert a["passes"]["prompts"]["counters"] == b["passes"]["prompts"]["counters"]
    row = other["benchmarks"]["all"]
    assert row["identical"] == len(QUESTIONS) and row["acceptance_length"] > 1 and row["ms_per_token_draft"] > 0
    assert other["finished"]
