"""The whole pipeline on the tiny Kimi, from prompts to speculative decoding, through the scripts themselves.

One run of the five stages is shared by all tests here. The evaluation prompts are the training prompts, so the greedy
answers of 00 and of 04 are the same and 02 holds their states: acceptance can be predicted from the shards alone.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from eagle3.shards import ShardSet
from eagle3.vocab import DraftVocab
from tests import hf_states, reference_draft, stages

LAYERS = [2, 30, 58, 60]
NUM_DRAFTS = 3
MAX_TOKENS = 24
QUESTIONS = [
    "Name three rivers.",
    "What is 17 + 25?",
    "Write a short poem about the sea, please, with two verses.",
    "你好，请介绍一下你自己。",
    "Why is the sky blue? Explain it to a child of six in a few simple sentences.",
    "List the planets.",
    "def add(a, b):",
    "Translate 'good morning' into French and German.",
]


@dataclass(frozen=True)
class Pipeline:
    """What the five stages left: folders, logs and the evaluation's JSON."""

    kimi: Path
    folder: Path
    logs: dict[str, str]

    @property
    def states(self) -> Path:
        return self.folder / "hidden_states"

    @property
    def evaluation(self) -> dict:
        return json.loads((self.folder / "evaluation.json").read_text())

    @property
    def answers(self) -> list[dict]:
        """Those of the best measurement, the one with the draft at concurrency 1."""
        return [a for a in self.evaluation["answers"] if a["measurement"] == self.evaluation["best"]]


def write_prompts(path: Path) -> None:
    rows = [{"id": f"q{i}", "messages": [{"role": "user", "content": q}]} for i, q in enumerate(QUESTIONS)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def extract(kimi: Path, folder: Path, states: Path, tp_size: int) -> str:
    """The extraction command as the README gives it."""
    return stages.succeed(
        "02_extract_hidden_states.py", "--model-path", kimi,
        "--prepared-data", folder / "prepared/tokenized_data.jsonl", "--output-dir", states,
        "--batch-size", 4, "--max-seq-len", 2048, "--tp-size", tp_size, "--gpu-memory-utilization", 0.80,
        "--layer-ids", *LAYERS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pipeline(tiny_kimi, tmp_path_factory) -> Pipeline:
    folder = tmp_path_factory.mktemp("pipeline")
    prompts, answers = folder / "prompts.jsonl", folder / "answers.jsonl"
    write_prompts(prompts)
    model = ("--model-path", tiny_kimi)
    trusted = (*model, "--trust-remote-code")
    logs = {
        "00": stages.succeed(
            "00_generate_responses.py", *trusted, "--input", prompts, "--output", answers, "--max-tokens", MAX_TOKENS,
            "--keep-cut",
        ),
        "01": stages.succeed(
            "01_prepare_data.py", *trusted, "--input", answers, "--output-dir", folder / "prepared",
            "--draft-vocab-size", 900,
        ),
        "02": extract(tiny_kimi, folder, folder / "hidden_states", 1),
        "03": stages.succeed(
            "03_train_draft.py", *model, "--hidden-states", folder / "hidden_states", "--output-dir", folder,
            "--ttt-steps", NUM_DRAFTS, "--epochs", 60, "--lr", 3e-3, "--eval-fraction", 0, "--track",
        ),
        "04": stages.succeed(
            "04_evaluate_draft.py", "--trust-remote-code", "--draft", folder / "draft", "--prompts", prompts,
            "--max-tokens", MAX_TOKENS, "--concurrency", 4, 1, "--output", folder / "evaluation.json",
        ),
    }  # fmt: skip
    return Pipeline(tiny_kimi, folder, logs)


def test_every_prompt_becomes_a_sample_with_four_layers(pipeline):
    """Nothing is lost between the stages: 8 prompts, 8 answers, 8 samples, states for each of their tokens."""
    states = ShardSet(pipeline.states)
    assert sorted(states.sample_ids) == [f"q{i}" for i in range(len(QUESTIONS))]
    assert states.shared["layer_ids"] == LAYERS
    for sample in states:
        assert sample.hidden_states.shape == (len(sample.input_ids), 4, 64)
        assert 0 < sample.loss_mask.sum() <= MAX_TOKENS


def test_answers_are_taken_token_for_token(pipeline):
    """What 02 ran over is exactly prompt + generated ids of 00, supervised exactly where the target generated."""
    answers = [json.loads(line) for line in (pipeline.folder / "answers.jsonl").read_text().splitlines()]
    states = {s.id: s for s in ShardSet(pipeline.states)}
    for answer in answers:
        assert states[answer["id"]].input_ids.tolist() == answer["input_ids"]
        assert states[answer["id"]].loss_mask.int().tolist() == answer["loss_mask"]


def test_captured_states_equal_transformers(pipeline):
    """Each captured row of layers 2, 30, 58, 60 is what that decoder layer puts out in Transformers (fp32, < 1e-4)."""
    assert hf_states.worst_error(pipeline.kimi, ShardSet(pipeline.states)) < 1e-4


def test_captured_states_equal_transformers_with_two_ranks(pipeline):
    """The same with --tp-size 2: full rows on rank 0, written once."""
    log = extract(pipeline.kimi, pipeline.folder, pipeline.folder / "hidden_states_tp2", 2)
    states = ShardSet(pipeline.folder / "hidden_states_tp2")
    assert len(states) == len(QUESTIONS)
    assert hf_states.worst_error(pipeline.kimi, states) < 1e-4
    assert self_check(log) == (len(QUESTIONS), len(QUESTIONS))


def self_check(log: str) -> tuple[int, int]:
    """The last self-check line of a log: samples, and samples whose sampled token had the largest logit."""
    line = [x for x in log.splitlines() if x.startswith("self-check:")][-1]
    samples, exact = line.split(" samples, sampled token = largest logit in ")
    return int(samples.removeprefix("self-check: ")), int(exact.split(",")[0])


def test_self_check_covers_every_sample(pipeline):
    """The run itself checked each of the 8 samples against what the target sampled, exactly in float32."""
    assert self_check(pipeline.logs["02"]) == (len(QUESTIONS), len(QUESTIONS))


def test_same_command_again_redoes_nothing(pipeline):
    """A second run of a finished extraction starts no engine and leaves the shards as they are."""
    before = {p: p.stat().st_mtime_ns for p in pipeline.states.glob("shard-*")}
    log = extract(pipeline.kimi, pipeline.folder, pipeline.states, 1)
    assert {p: p.stat().st_mtime_ns for p in pipeline.states.glob("shard-*")} == before
    assert "1 finished before, 0 to do" in log


def test_speculative_decoding_changes_no_token(pipeline):
    """Greedy outputs with the draft are those without it, and the draft learned something to propose."""
    row = pipeline.evaluation["benchmarks"]["prompts"]
    assert row["identical"] == row["prompts"] == len(QUESTIONS)
    assert row["acceptance_length"] > 1.3


def test_acceptance_predicted_from_the_shards_is_what_vllm_counts(pipeline):
    """Walking each greedy answer with the draft (row r, then r + accepted + 1) gives vLLM's own acceptance counts.

    Each pass of the target is compared; the last ones of an answer are left out where a draft would reach past
    its end, since the states there are not known.
    """
    states = {s.id: s for s in ShardSet(pipeline.states)}
    vocab = DraftVocab.load(pipeline.states)
    draft = hf_states.load_draft(pipeline.folder / "draft", pipeline.kimi, vocab, LAYERS)
    predicted, counted = [], []
    for answer in pipeline.answers:
        with torch.no_grad():
            walked = reference_draft.walk(draft, vocab, states[answer["id"]], NUM_DRAFTS)
        predicted += walked
        counted += answer["accepted"][: len(walked)]
    assert len(predicted) > 20
    assert sum(predicted) > 10
    assert sum(predicted) == pytest.approx(sum(counted), rel=0.01)


def test_vllms_counters_are_the_sum_over_its_answers(pipeline):
    """What each pass of each answer accepted adds up to vLLM's counters exactly, in every measurement with the draft:
    intervals and categories rest on the same counts as the acceptance length."""
    evaluation = pipeline.evaluation
    drafted = [n for n, m in enumerate(evaluation["measurements"]) if m["num_speculative_tokens"]]
    assert len(drafted) == 2
    for number in drafted:
        counters = evaluation["measurements"][number]["passes"]["prompts"]["counters"]
        accepted = [n for a in evaluation["answers"] if a["measurement"] == number for n in a["accepted"]]
        by_position = [sum(n > k for n in accepted) for k in range(NUM_DRAFTS)]
        assert (counters["drafts"], counters["accepted_tokens"]) == (len(accepted), sum(accepted))
        assert counters["accepted_tokens_per_pos"] == by_position
        row = evaluation["measurements"][number]["benchmarks"]["all"]
        low, high = row["acceptance_length_interval"]
        assert row["accepted_past_end"] == 0 and low < row["acceptance_length"] < high


def test_each_concurrency_is_measured_with_and_without_the_draft(pipeline):
    """Two engines, two concurrencies each: four measurements of equal tokens. One answer at a time leaves no time
    between one answer's end and the next one's beginning: their times add up to the whole; four at a time overlap."""
    evaluation = pipeline.evaluation
    asked = [(m["num_speculative_tokens"], m["concurrency"]) for m in evaluation["measurements"]]
    assert asked == [(0, 1), (0, 4), (NUM_DRAFTS, 1), (NUM_DRAFTS, 4)] and evaluation["best"] == 2
    for number, measurement in enumerate(evaluation["measurements"]):
        answers = [a for a in evaluation["answers"] if a["measurement"] == number]
        assert all(0 < a["first_token_s"] <= a["last_token_s"] for a in answers)
        overlap = sum(a["last_token_s"] for a in answers) / measurement["passes"]["prompts"]["seconds"]
        assert (0.9 < overlap <= 1) if measurement["concurrency"] == 1 else (1.5 < overlap <= 4)
        row = measurement["benchmarks"]["all"]
        assert row["ms_per_token_plain"] > 0 and row["ms_to_first_token_plain"] > 0


def test_the_same_evaluation_again_starts_no_engine(pipeline):
    """Every figure is in its file already: the table is printed from there."""
    log = stages.succeed(
        "04_evaluate_draft.py", "--trust-remote-code", "--draft", pipeline.folder / "draft",
        "--prompts", pipeline.folder / "prompts.jsonl", "--max-tokens", MAX_TOKENS, "--concurrency", 1, 4,
        "--output", pipeline.folder / "evaluation.json",
    )  # fmt: skip
    assert "4 of 4 measurements are in" in log and "Loading safetensors" not in log
    table = log[log.index("acceptance length = accepted") :]
    assert table in pipeline.logs["04"]
