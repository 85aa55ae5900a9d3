"""Stage 0: let the target answer prompts, so that the draft is trained on what the target itself says.

    python 00_generate_responses.py --model-path /models/kimi-k2.5-int4 --trust-remote-code \\
        --input prompts.jsonl --output answers.jsonl --max-tokens 8192 --temperature 1.0 --tp-size 8

Optional, worth about 10% of acceptance length. Conversations are answered turn by turn, each with the target's own
earlier answers. With --base-url a server that runs already answers, and no engine is started. The same command again
goes on where it was stopped, also after kill -9.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3 import cli

if TYPE_CHECKING:
    from eagle3.generate import Generation


def parser() -> cli.Parser:
    p = cli.Parser("generate", __doc__)
    cli.add_model(p, chat=True)
    add = p.add_argument_group("prompts and answers").add_argument
    add("--input", type=Path, nargs="+", required=True, metavar="FILE", help="prompts, as stage 1 reads them")
    add("--output", type=Path, required=True, metavar="FILE.jsonl", help="prompts with answers")
    add("--limit", type=cli.positive_int, metavar="N", help="only the first N usable conversations (default: all)")
    add("--keep-cut", action="store_true", help="keep answers cut by --max-tokens, marked (default: leave them out)")
    add("--overwrite", action="store_true", help="delete an earlier output of this stage first")
    add = p.add_argument_group("how the target answers").add_argument
    add("--max-tokens", type=cli.positive_int, default=2048, metavar="TOKENS", help="longest answer")
    add("--temperature", type=cli.not_negative, default=0.0, metavar="X", help="0 is greedy")
    add("--top-p", type=cli.fraction, default=1.0, metavar="X", help="nucleus sampling; 1 is all tokens")
    add("--seed", type=cli.natural, default=0, metavar="N", help="of the sampling")
    add = cli.add_engine(p).add_argument
    add("--batch-size", type=cli.positive_int, default=64, metavar="N", help="answers at a time")
    add("--max-model-len", type=cli.positive_int, metavar="TOKENS", help="prompt and answer (default: as needed)")
    add("--base-url", metavar="URL", help="ask a running server, http://HOST:8000/v1 (default: an engine of its own)")
    return p


def check(args: argparse.Namespace) -> "Generation":
    from eagle3.generate import Options, plan_generation

    flags: dict[str, Any] = {k: v for k, v in vars(args).items() if k in Options.__dataclass_fields__}
    return plan_generation(Options(**flags), overwrite=args.overwrite)


def work(plan: "Generation") -> None:
    from eagle3.generate import generate

    if plan.finished:
        plan.part.unlink(missing_ok=True)  # of a run that was killed right after its end
        print(f"finished before: {plan.options.output} has these answers")
    else:
        generate(plan)


if __name__ == "__main__":
    cli.run(parser(), check, work)
