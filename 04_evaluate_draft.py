"""Stage 4: measure the draft in vLLM: acceptance length, speed with and without it, identical outputs.

    python 04_evaluate_draft.py --draft out/draft --prompts mt_bench.jsonl gsm8k.jsonl --trust-remote-code

Exit codes: 0 done, 1 failed while working or below --min-acceptance, 2 refused before working.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3 import cli

if TYPE_CHECKING:
    from eagle3.evaluate import Evaluation


def parser() -> cli.Parser:
    p = cli.Parser("evaluate", __doc__)
    cli.add_model(p, required=False)
    p.add_argument("--draft", type=Path, required=True, metavar="DIR", help="the draft folder that stage 3 wrote")
    p.add_argument("--prompts", type=Path, nargs="+", required=True, metavar="FILE", help="one file a benchmark")
    p.add_argument("--num-speculative-tokens", type=cli.positive_int, metavar="N", help="drafts (the draft's own: 3)")
    p.add_argument("--max-tokens", type=cli.positive_int, default=256, metavar="N", help="longest answer (256)")
    p.add_argument("--concurrency", type=cli.positive_int, default=1, metavar="N", help="answers at a time (1)")
    p.add_argument("--limit", type=cli.positive_int, metavar="N", help="only the first N prompts of each file")
    p.add_argument("--output", type=Path, metavar="FILE.json", help="where the figures go as JSON")
    p.add_argument("--min-acceptance", type=cli.positive, metavar="X", help="fail below this acceptance length")
    p.add_argument("--tp-size", type=cli.positive_int, default=1, metavar="N", help="GPUs of the engine (1)")
    p.add_argument("--gpu-memory-utilization", type=cli.fraction, default=0.9, metavar="SHARE", help="of each GPU")
    p.add_argument(
        "--chat-template-kwargs", type=cli.json_object, default={}, metavar="JSON", help="for the chat template"
    )
    return p


def check(args: argparse.Namespace) -> "tuple[Evaluation, Path | None]":
    from eagle3 import files
    from eagle3.evaluate import Options, plan_evaluation

    if args.output:
        files.check_file("--output", args.output, args.prompts)
    flags: dict[str, Any] = {k: v for k, v in vars(args).items() if k in Options.__dataclass_fields__}
    return plan_evaluation(Options(**flags)), args.output


def work(plan: "tuple[Evaluation, Path | None]") -> None:
    from eagle3 import evaluate, files

    evaluation, output = plan
    result = evaluate.measured_before(evaluation, output)
    if result is None:
        result = evaluate.measure(evaluation)
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
            files.write_json(output, result)
    print("\n".join(evaluate.table(result)))
    reached, wanted = result["benchmarks"]["all"]["acceptance_length"], evaluation.options.min_acceptance
    if wanted is not None and reached < wanted:
        raise ValueError(f"acceptance length {reached:.3f} is below --min-acceptance {wanted}")


if __name__ == "__main__":
    cli.run(parser(), check, work)
