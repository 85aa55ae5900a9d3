"""Stage 0: let the target answer prompts, so that the draft is trained on what the target itself says.

    python 00_generate_responses.py --model-path /models/kimi-k2.5-int4 --trust-remote-code \\
        --input prompts.jsonl --output answers.jsonl --max-tokens 8192 --temperature 1.0 --tp-size 8

Optional, worth about 10% of acceptance length. Conversations are answered turn by turn, each with the target's own
earlier answers. With --base-url a server that runs already answers, and no engine is started. The same command again
goes on where it was stopped, also after kill -9.
Exit codes: 0 done, 1 failed while working, 2 refused before working.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3 import cli

if TYPE_CHECKING:
    from eagle3.generate import Generation


def parser() -> cli.Parser:
    p = cli.Parser("generate", __doc__)
    cli.add_model(p)
    p.add_argument(
        "--input", type=Path, nargs="+", required=True, metavar="FILE", help="prompts, as stage 1 reads them"
    )
    p.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="prompts with answers")
    p.add_argument("--base-url", metavar="URL", help="ask a running OpenAI-compatible server, http://HOST:8000/v1")
    p.add_argument("--max-tokens", type=cli.positive_int, default=2048, metavar="N", help="longest answer (2048)")
    p.add_argument("--temperature", type=cli.not_negative, default=0.0, metavar="X", help="0 is greedy (default)")
    p.add_argument("--top-p", type=cli.fraction, default=1.0, metavar="X", help="nucleus sampling (1.0: all)")
    p.add_argument("--seed", type=cli.natural, default=0, metavar="N", help="of the sampling (0)")
    p.add_argument("--batch-size", type=cli.positive_int, default=64, metavar="N", help="answers at a time (64)")
    p.add_argument("--tp-size", type=cli.positive_int, default=1, metavar="N", help="GPUs of the engine (1)")
    p.add_argument("--gpu-memory-utilization", type=cli.fraction, default=0.9, metavar="SHARE", help="of each GPU")
    p.add_argument("--max-model-len", type=cli.positive_int, metavar="TOKENS", help="prompt and answer (as needed)")
    p.add_argument("--limit", type=cli.positive_int, metavar="N", help="only the first N usable conversations")
    p.add_argument(
        "--chat-template-kwargs", type=cli.json_object, default={}, metavar="JSON", help="for the chat template"
    )
    p.add_argument("--keep-cut", action="store_true", help="keep answers cut by --max-tokens, marked (left out)")
    p.add_argument("--overwrite", action="store_true", help="delete an earlier output of this stage first")
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
