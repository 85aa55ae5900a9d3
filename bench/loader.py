"""Does training wait for its data? 03's own loop over shards of random states, at Kimi-K2.5's width or a tiny one.

    python bench/loader.py kimi --samples 64 --steps 30        # one GPU; 117 MB of states a sample
    python bench/loader.py tiny                                # CPU

Prints one JSON line: bytes of states, tokens/s, the share of the time in which the step waited for a batch, seconds of
a checkpoint and its size, and the peak of memory that the process holds itself (mapped shards are not its own).
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from states_folder import write_hidden_states  # noqa: E402

from eagle3 import files  # noqa: E402
from eagle3.cli import positive_int  # noqa: E402
from eagle3.target import Target  # noqa: E402
from eagle3.train import plan_run, run_training  # noqa: E402
from eagle3.vocab import DraftVocab  # noqa: E402

WIDTHS: dict[str, dict[str, int]] = {
    "kimi": {"hidden": 7168, "ffn": 18432, "heads": 64, "vocab": 163840, "draft_vocab": 32000, "length": 2048},
    "tiny": {"hidden": 64, "ffn": 128, "heads": 4, "vocab": 512, "draft_vocab": 256, "length": 128},
}
LAYER_IDS = [2, 30, 58, 60]
YARN = {
    "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def write_target(folder: Path, width: dict[str, int], device: str) -> Target:
    """A target's config and the three tensors that training reads, random."""
    folder.mkdir()
    config: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 61,
        "hidden_size": width["hidden"],
        "intermediate_size": width["ffn"],
        "num_attention_heads": width["heads"],
        "v_head_dim": width["hidden"] // width["heads"] // 2 * 2,
        "kv_lora_rank": 512,
        "vocab_size": width["vocab"],
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": YARN,
        "torch_dtype": "bfloat16",
    }
    files.write_json(folder / "config.json", config)
    sizes = {
        "model.embed_tokens.weight": (width["vocab"], width["hidden"]),
        "model.norm.weight": (width["hidden"],),
        "lm_head.weight": (width["vocab"], width["hidden"]),
    }
    tensors = {k: (torch.randn(s, device=device) * 0.02).bfloat16().cpu() for k, s in sizes.items()}
    tensors["model.norm.weight"].fill_(1)
    save_file(tensors, folder / "model.safetensors")
    return Target.open(folder)


def write_states(folder: Path, target: Target, width: dict[str, int], count: int, device: str) -> Path:
    """`count` samples of random states, 70% of each supervised."""
    length = width["length"]
    mask = (np.arange(length) >= 0.3 * length).astype(np.uint8)
    states = torch.randn(length, 4, width["hidden"], device=device).bfloat16().cpu()
    rng = np.random.default_rng(0)
    samples = [(rng.integers(width["vocab"], size=length), mask, states) for _ in range(count)]
    vocab = DraftVocab(width["vocab"], np.arange(width["draft_vocab"]))
    return write_hidden_states(folder, target, samples, LAYER_IDS, vocab, dtype=torch.bfloat16)


def train_script() -> Any:
    spec = importlib.util.spec_from_file_location("train_draft", ROOT / "03_train_draft.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("width", choices=WIDTHS)
    parser.add_argument("--samples", type=positive_int, default=40)
    parser.add_argument("--steps", type=positive_int, default=30)
    args = parser.parse_args()
    width, device = WIDTHS[args.width], "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        target = write_target(folder / "target", width, device)
        states = write_states(folder / "states", target, width, args.samples, device)
        flags = {
            "model-path": target.path, "hidden-states": states, "output-dir": folder / "run", "eval-fraction": 0.1,
            "batch-tokens": 4 * width["length"], "epochs": 100, "max-steps": args.steps,
            "log-interval": max(args.steps // 3, 1), "checkpoint-interval": args.steps,
        }  # fmt: skip
        run = plan_run(train_script().parser().parse([f"--{k}={v}" for k, v in flags.items()] + ["--track"]))
        start = time.perf_counter()
        run_training(run)
        report(run.folder, states, time.perf_counter() - start)


def report(run: Path, states: Path, seconds: float) -> None:
    """One JSON line on the last third of the run, when everything is compiled."""
    records = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in records if record["kind"] == "train"][-1]
    checkpoint = sum(path.stat().st_size for path in (run / "checkpoints").rglob("*.safetensors"))
    result = {
        "states_gb": sum(path.stat().st_size for path in states.iterdir()) / 1e9,
        "tokens_per_s": last["tokens_per_s"],
        "step_s": last["step_s"],
        "data_wait_share": last["data_wait_share"],
        "memory_gb": last["memory_gb"],
        "checkpoints_gb": checkpoint / 1e9,
        "draft_gb": (run / "draft" / "model.safetensors").stat().st_size / 1e9,
        "whole_run_s": seconds,
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
