#!/usr/bin/env python
"""Hidden states -> a draft that vLLM serves.

    python 03_train_draft.py --model-path models/smollm2 --hidden-states data/hidden_states --output-dir out
    torchrun --nproc-per-node 8 03_train_draft.py --config configs/kimi_k25.yaml

OUTPUT/draft is the draft (`vllm serve OUTPUT/draft`), always the best so far on the held-out split. The same command
again goes on from the last checkpoint, on any number of GPUs. SIGTERM or Ctrl-C saves one first.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3 import cli

if TYPE_CHECKING:
    from eagle3.train import Run


def parser() -> cli.Parser:
    p = cli.Parser("train", __doc__)
    cli.add_model(p)
    add = p.add_argument_group("states and draft").add_argument
    add(
        "--hidden-states", type=Path, nargs="+", required=True, metavar="DIR",
        help="what 02 wrote; of one extracted with --part, all parts, or one after another by this same command",
    )  # fmt: skip
    add("--output-dir", type=Path, required=True, metavar="DIR", help="checkpoints, metrics and the draft")
    add_learning(p.add_argument_group("learning (a run goes on only with the same values)"))
    add_running(p.add_argument_group("running"))
    return p


def add_learning(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--ttt-steps", type=cli.positive_int, default=7, metavar="N", help="steps of the training-time test")
    add("--epochs", type=cli.positive_int, default=10, metavar="N", help="passes over the samples")
    add("--max-steps", type=cli.positive_int, metavar="N", help="end after N optimizer steps (default: all epochs)")
    add("--lr", type=cli.positive, default=1e-4, metavar="X", help="peak learning rate")
    add("--warmup-fraction", type=cli.share, default=0.05, metavar="SHARE", help="of the steps, while the rate rises")
    add(
        "--batch-tokens",
        type=cli.positive_int,
        default=8192,
        metavar="TOKENS",
        help="of a pack: what a GPU computes at once",
    )
    add("--grad-accumulation", type=cli.positive_int, default=1, metavar="N", help="packs a GPU and step")
    add("--max-grad-norm", type=cli.positive, default=1.0, metavar="X", help="gradients are clipped to this norm")
    add("--weight-decay", type=cli.not_negative, default=0.0, metavar="X", help="of the matrices")
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="muon: for the matrices, AdamW for the rest")
    add("--loss", choices=("kl", "ce", "lk"), default="kl", help="against the target's distribution")
    add("--seed", type=cli.natural, default=0, metavar="N", help="of the first weights and the samples' order")
    add(
        "--eval-fraction",
        type=cli.share,
        default=0.05,
        metavar="SHARE",
        help="of the samples, held out; 0 for none",
    )
    for flag, default, text in (
        ("--norm-before-residual", True, "the residual stream starts as the normed hidden state"),
        ("--norm-before-fc", False, "the three states are normed together before they are fused"),
        ("--fc-norm", True, "each of the three states is normed before they are fused"),
        ("--norm-output", False, "the next step reads the draft's output normed"),
    ):
        add(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
    add("--train-head", action="store_true", help="train the draft's head as well (default: the target's, frozen)")
    add("--deterministic", action="store_true", help="bitwise the same on a GPU each time; slower")
    add("--init-from", metavar="DIR", help="start from a draft trained on the same layers (default: anew)")


def add_running(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--num-speculative-tokens", type=cli.positive_int, default=3, metavar="N", help="drafts when served")
    add("--log-interval", type=cli.positive_int, default=10, metavar="N", help="steps between two lines")
    add(
        "--checkpoint-interval",
        type=cli.positive_int,
        metavar="N",
        help="steps between two of them (default: an epoch)",
    )
    add("--keep", type=cli.positive_int, default=2, metavar="N", help="last checkpoints kept, beside the best")
    trackers = ("tensorboard", "wandb", "mlflow")
    add("--track", nargs="*", choices=trackers, default=["tensorboard"], help="where metrics go, beside metrics.jsonl")


def check(args: argparse.Namespace) -> "Run":
    from eagle3.ranks import Ranks
    from eagle3.train import plan_run

    with Ranks.join().refusing_together():
        return plan_run(args)


def work(run: "Run") -> None:
    from eagle3.train import run_training

    if not run_training(run):
        sys.exit(cli.INTERRUPTED)


if __name__ == "__main__":
    cli.run(parser(), check, work)
