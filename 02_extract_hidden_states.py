"""Stage 2: run the target over the prepared data and write its hidden states as shards.

    nohup python 02_extract_hidden_states.py --model-path /models/kimi-k2.5-int4 \\
        --prepared-data data/prepared/tokenized_data.jsonl --output-dir data/hidden_states \\
        --batch-size 4 --max-seq-len 2048 --tp-size 8 --gpu-memory-utilization 0.80 \\
        --layer-ids 2 30 58 60 > extract.log 2>&1 &  echo "PID: $!"

Everything that can be known is checked before the target loads. A run that was stopped goes on where it was when the
same command is given again; `kill PID` (SIGTERM) finishes the shards at hand first.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3 import cli

if TYPE_CHECKING:
    from eagle3.extract import Extraction


def parser() -> cli.Parser:
    p = cli.Parser("extract", __doc__)
    cli.add_model(p)
    add = p.add_argument_group("samples and states").add_argument
    add("--prepared-data", type=Path, required=True, metavar="FILE.jsonl", help="written by stage 1")
    add("--output-dir", type=Path, required=True, metavar="DIR", help="where the shards go")
    add(
        "--layer-ids", type=int, nargs="+", metavar="K",
        help="outputs of these 0-based decoder layers: three for the draft, then the last (default: EAGLE's choice)",
    )  # fmt: skip
    add("--storage-dtype", choices=["auto", "fp8"], default="auto", help="auto: as the engine computes; fp8: half")
    add("--part", type=part, metavar="I/N", help="every N-th sample from the I-th, in DIR/part-I-of-N (default: all)")
    add("--overwrite", action="store_true", help="delete what an earlier run wrote to --output-dir")
    add = cli.add_engine(p).add_argument
    add("--batch-size", type=cli.positive_int, default=4, metavar="N", help="full-length samples a step")
    add("--max-seq-len", type=cli.positive_int, default=2048, metavar="TOKENS", help="longest sample; more is refused")
    add(
        "--ray-address", metavar="ADDRESS",
        help="one engine for every --tp-size GPUs of this Ray cluster (default: one engine here)",
    )  # fmt: skip
    add("--compile", action="store_true", help="compile the target; its first step is checked against eager")
    mode = p.add_argument_group("trying it (one of these)").add_mutually_exclusive_group()
    mode.add_argument("--check-only", action="store_true", help="stop after the checks, before the target loads")
    mode.add_argument(
        "--rehearse", action="store_true", help="two steps with dummy weights, in a folder that is removed; then stop"
    )
    return p


def part(text: str) -> tuple[int, int]:
    """An argparse type: I/N with 1 <= I <= N."""
    from eagle3.shards import parse_part

    try:
        return parse_part(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def check(args: argparse.Namespace) -> "tuple[Extraction, argparse.Namespace]":
    from eagle3.extract import Options
    from eagle3.preflight import require

    names = ("model_path", "prepared_data", "output_dir", "batch_size", "max_seq_len", "tp_size",
             "gpu_memory_utilization", "layer_ids", "storage_dtype", "part", "ray_address", "compile")  # fmt: skip
    options = Options(**{name: getattr(args, name) for name in names})
    return require(options, overwrite=args.overwrite), args


def work(plan: "tuple[Extraction, argparse.Namespace]") -> None:
    from eagle3 import cluster
    from eagle3.extract import extract, one_engine
    from eagle3.files import locked
    from eagle3.rehearse import rehearse

    extraction, args = plan
    if args.check_only:
        return
    with locked(extraction.folder):
        if args.rehearse:
            rehearse(extraction)
        else:
            drive = cluster.many_engines if args.ray_address else one_engine
            extract(extraction, overwrite=args.overwrite, drive=drive)


if __name__ == "__main__":
    cli.run(parser(), check, work)
