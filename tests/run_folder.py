"""A run's folder as the stages leave it, small and quick: prepared by 01, trained by 03 on the tiny Llama's own states,
its evaluation made by 04's arithmetic from answers that are given here."""

import json
import shutil
from pathlib import Path

from eagle3 import figures, files, runs, vocab
from eagle3.passes import Answer, Measurement, Pass, Setup
from eagle3.status import Counted, Status
from eagle3.target import Target
from eagle3.train import run_training
from tests import stages
from tests.training_run import planned, write_states

HOSTILE = '<script>alert("1")</script> & <b>'


def row(name: str, asked: str, *said: str) -> dict:
    answers = [{"role": "assistant", "content": text} for text in said]
    return {"id": name, "messages": [{"role": "user", "content": asked}, *answers]}


ROWS = [
    row("hostile", HOSTILE, f"No: {HOSTILE}"),
    row("emoji", "Hi 🤷🏽", "你好 👋\nBye."),
    row("emoji again", "Hi 🤷🏽", "你好 👋\nBye."),
    row("silent", "Say nothing."),
]
SHARES = (3, 0, 1)  # accepted in the passes of the first answer, of 3 drafted tokens


def write_run(folder: Path, model: Path) -> Path:
    """All stages but the first, and the status files that they keep."""
    rows = folder / "chats.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    rows.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS) + "{broken\n")
    code, log = stages.run_here(
        "01_prepare_data.py", "--model-path", model, "--input", rows, "--output-dir", folder / "prepared",
        "--draft-vocab-size", 400, "--workers", 1,
    )  # fmt: skip
    assert code == 0, log
    write_extraction(folder, model)
    assert run_training(planned(model, folder / "hidden_states", folder))
    files.write_json(folder / "evaluation.json", evaluation(folder, model))
    return folder


def write_extraction(folder: Path, model: Path) -> None:
    states = write_states(folder / "hidden_states", model)
    shutil.copyfile(folder / "prepared" / vocab.FILE, states / vocab.FILE)
    metadata = files.read_json(states / "metadata.json")
    metadata["prepared"] = files.read_json(folder / "prepared" / "metadata.json")
    files.write_json(states / "metadata.json", metadata)
    own = {"gb_written": 0.5, "gb_per_s": 0.25, "self_check": "self-check: 20 samples"}
    with Status(states / runs.STATUS, "extract", "loading", lambda: own) as status:
        status.work = Counted("extract", "tokens", 500, 500, 250.0, 0.0)


def evaluation(folder: Path, model: Path, *more: Measurement) -> dict:
    """Two benchmarks of two prompts each, greedy; the second answer of the first benchmark differs."""
    ids = [40 + k for k in range(1 + sum(SHARES) + len(SHARES))]
    drafted = {
        "mt_bench": drafted_pass([("m0", "writing", ids, list(SHARES)), ("m1", "math", [50, 51, 52], [1])]),
        "house": drafted_pass([("h0", None, [60, 61], [0]), ("h1", None, [62, 63, 64], [0, 0])]),
    }
    plain = {name: Pass([Answer(a.id, a.category, a.ids) for a in p.answers], 4.0, {}) for name, p in drafted.items()}
    plain["mt_bench"].answers[1].ids = [50, 51, 99]
    draft = folder / "draft"
    sums = {name: files.sha256_file(draft / name) for name in ("config.json", "model.safetensors")}
    measurements = [Measurement(Setup(0, 4), plain), Measurement(Setup(3, 4, str(draft), sums), drafted), *more]
    settings = {
        "max_tokens": 64,
        "target": Target.open(model).fingerprint,
        "device": "a CPU",
        "versions": {"vllm": "1"},
    }
    return figures.result(measurements, settings, str(model), None, finished=True)


def drafted_pass(answers: list[tuple], num_drafts: int = 3, seconds: float = 2.0) -> Pass:
    """Answers given as (id, category, tokens, accepted), and vLLM's counters of them."""
    made = [Answer(*answer, first_token_s=0.5, last_token_s=1.5) for answer in answers]
    return Pass(made, seconds, figures.counted(made, num_drafts))
