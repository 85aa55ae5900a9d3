"""Turn conversations into token ids and a loss mask, by the target's own tokenizer and chat template.

    python 01_prepare_data.py --model-path MODEL --input chats.jsonl --output-dir data/prepared

Writes tokenized_data.jsonl, draft_vocab.json, token_counts.json, report.html and, last, metadata.json. The same command
again does nothing; other settings in the same folder are refused unless --overwrite is given.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3 import cli

if TYPE_CHECKING:
    from eagle3.prepare import Plan


def parser() -> cli.Parser:
    p = cli.Parser("prepare", __doc__)
    cli.add_model(p, chat=True)
    add_data(p.add_argument_group("conversations and samples"))
    add = p.add_argument_group("running").add_argument
    add("--show", type=cli.natural, default=0, metavar="N", help="print the first N samples, supervised text marked")
    add("--workers", type=cli.positive_int, metavar="N", help="processes (default: as many as cores, fewer if little)")
    return p


def add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--input", nargs="+", required=True, metavar="FILE",
        help="JSON lines, JSON array or Parquet (.gz and .zst too), globs, or a dataset folder",
    )  # fmt: skip
    add("--output-dir", type=Path, required=True, metavar="DIR", help="where the prepared data goes")
    add("--max-seq-len", type=cli.positive_int, default=2048, metavar="TOKENS", help="longest sample; more is cut off")
    add(
        "--draft-vocab-size", type=cli.positive_int, default=32000, metavar="TOKENS",
        help="tokens that the draft can propose; the target's size or more: all",
    )  # fmt: skip
    add("--turns", choices=("each", "last"), default="each", help="answers to train on")
    formats = ("auto", "messages", "sharegpt", "alpaca", "prompt", "tokenized")
    add("--format", choices=formats, default="auto", help="how rows are written; auto: found out for each row")
    add(
        "--role", type=role_alias, nargs="+", default=[], metavar="NAME=ROLE",
        help="read the unknown role NAME as system, user, assistant or tool (default: drop such rows)",
    )  # fmt: skip
    add("--min-kept", type=cli.percent, default=0.0, metavar="PERCENT", help="fail if less of the rows can be used")
    add("--overwrite", action="store_true", help="replace what the output folder holds")


def role_alias(text: str) -> tuple[str, str]:
    name, _, role = text.partition("=")
    if not name or role not in ("system", "user", "assistant", "tool"):
        raise argparse.ArgumentTypeError(f"expected NAME=system, user, assistant or tool, found {text!r}")
    return name, role


def check(args: argparse.Namespace) -> "Plan":
    """Everything that can be refused before the rows are read."""
    from eagle3 import chat, prepare, sources
    from eagle3.target import Target

    target = Target.open(args.model_path)
    inputs = sources.expand(args.input)
    if empty := [p for p in inputs if p.is_file() and p.stat().st_size == 0]:
        raise ValueError(f"--input {empty[0]}: the file is empty")
    settings = prepare.Settings(
        max_seq_len=args.max_seq_len,
        draft_vocab_size=args.draft_vocab_size,
        turns=args.turns,
        format=args.format,
        roles=dict(args.role),
        chat_template_kwargs=args.chat_template_kwargs,
    )
    loaded = chat.load(target, args.trust_remote_code, args.chat_template_kwargs)
    plan = prepare.Plan(
        target=target,
        chat=loaded,
        inputs=inputs,
        output=args.output_dir,
        settings=settings,
        trust_remote_code=args.trust_remote_code,
        workers=args.workers or prepare.default_workers(inputs),
        min_kept=args.min_kept,
        show=args.show,
        overwrite=args.overwrite,
    )
    prepare.check(plan)
    print(*prepare.describe(plan), sep="\n", flush=True)
    return plan


def work(plan: "Plan") -> None:
    from eagle3 import prepare

    if prepare.check(plan):
        print(f"{plan.output} already holds this data: nothing to do (--overwrite makes it again)")
    else:
        print(*prepare.run(plan), sep="\n")
        print(f"written to {plan.output}")
    print(*prepare.show(plan), sep="\n\n")


if __name__ == "__main__":
    cli.run(parser(), check, work)
