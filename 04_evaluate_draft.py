"""Stage 4: measure drafts in vLLM: acceptance length, speed with and without them, identical outputs.

    python 04_evaluate_draft.py --draft out/draft --prompts mt_bench gsm8k chats.jsonl --trust-remote-code \\
        --num-speculative-tokens 3 5 7 --concurrency 1 8 --output out/evaluation.json
    python 04_evaluate_draft.py --base-url http://HOST:8000/v1 --plain-url http://HOST:8001/v1 --prompts mt_bench

Acceptance length = accepted draft tokens + 1 (the target's own) a pass of the target. Several drafts of one target are
compared on the same prompts. The same command again measures only what --output does not have yet.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3 import cli

if TYPE_CHECKING:
    from eagle3.evaluate import Evaluation


def parser() -> cli.Parser:
    p = cli.Parser("evaluate", __doc__)
    cli.add_model(p, required=False, chat=True)
    add = p.add_argument_group("drafts and figures").add_argument
    add("--draft", type=Path, nargs="+", default=[], metavar="DIR", help="the draft folders of stage 3")
    add("--output", type=Path, metavar="FILE.json", help="where the figures go as JSON (default: the table only)")
    add(
        "--min-acceptance",
        type=cli.positive,
        metavar="X",
        help="exit code 1 if the best accepts less (default: any)",
    )
    add = p.add_argument_group("what is measured").add_argument
    add(
        "--prompts", type=Path, nargs="+", required=True, metavar="NAME|FILE",
        help="mt_bench, humaneval, gsm8k, or files",
    )  # fmt: skip
    add("--limit", type=cli.positive_int, metavar="N", help="only the first N prompts of each file (default: all)")
    add("--max-tokens", type=cli.positive_int, default=256, metavar="TOKENS", help="longest answer")
    add(
        "--num-speculative-tokens", type=cli.positive_int, nargs="+", default=[], metavar="N",
        help="drafted tokens, each measured in an engine of its own (default: the draft's own, 3)",
    )  # fmt: skip
    add("--concurrency", type=cli.positive_int, nargs="+", default=[1], metavar="N", help="answers at a time, each")
    add = cli.add_engine(p).add_argument
    add("--base-url", metavar="URL", help="a running server with a draft, http://HOST:8000/v1 (default: an engine)")
    add("--plain-url", metavar="URL", help="the same target without a draft, for the speed-up (default: none)")
    return p


def check(args: argparse.Namespace) -> "Evaluation":
    from eagle3.evaluate import Options, plan_evaluation

    flags: dict[str, Any] = {k: v for k, v in vars(args).items() if k in Options.__dataclass_fields__}
    return plan_evaluation(Options(**flags))


def work(plan: "Evaluation") -> None:
    from eagle3 import card, evaluate, tables

    result = evaluate.evaluate(plan)
    print("\n".join(tables.table(result)))
    if plan.options.output:
        print(*card.write_measured(result), sep="\n")
    evaluate.check_acceptance(result, plan.options.min_acceptance)


if __name__ == "__main__":
    cli.run(parser(), check, work)
