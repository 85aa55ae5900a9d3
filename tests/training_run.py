"""Small trainings by the real script: its flags, its checks, its work."""

import importlib.util
from pathlib import Path

import numpy as np
from states_folder import model_samples, write_hidden_states

from eagle3.target import Target
from eagle3.train import Run, plan_run
from eagle3.vocab import DraftVocab

SCRIPT = Path(__file__).resolve().parents[1] / "03_train_draft.py"
LAYER_IDS = [1, 2, 4, 5]
FLAGS = {
    "ttt-steps": 3, "epochs": 2, "lr": 3e-3, "batch-tokens": 128, "eval-fraction": 0.2, "log-interval": 2,
    "checkpoint-interval": 3, "keep": 9,
}  # fmt: skip

_spec = importlib.util.spec_from_file_location("train_draft", SCRIPT)
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)


def draft_vocab() -> DraftVocab:
    """400 of the tiny Llama's 512 tokens."""
    return DraftVocab(512, np.sort(np.random.default_rng(0).permutation(512)[:400]))


def write_states(folder: Path, model_path: Path, **changes) -> Path:
    """States of the tiny Llama on 20 answers of its own."""
    samples = model_samples(model_path, LAYER_IDS, count=20)
    return write_hidden_states(folder, Target.open(model_path), samples, LAYER_IDS, draft_vocab(), **changes)


def arguments(model_path: Path, states: Path | list[Path], output: Path, *extra: str, **flags) -> list[str]:
    """The command line; flags with underscores replace FLAGS."""
    values = FLAGS | {name.replace("_", "-"): value for name, value in flags.items()}
    folders = states if isinstance(states, list) else [states]
    paths = ["--model-path", str(model_path), "--output-dir", str(output), "--hidden-states", *map(str, folders)]
    return [*paths, *(f"--{name}={value}" for name, value in values.items()), *extra, "--track"]


def planned(*args, **flags) -> Run:
    """The plan that the script makes of its command line. Raises what it refuses."""
    return plan_run(script.parser().parse(arguments(*args, **flags)))
