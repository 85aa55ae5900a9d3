"""What --storage-dtype fp8 costs a draft: one set of states, stored as bfloat16 and as fp8, trained on alike.

    python bench/storage.py --hidden-states out/demo/hidden_states --model-path data/targets/smollm2-135m \\
        --config configs/smollm2.yaml --epochs 2

Rewrites the set (float32 on CPU) through the shard writer in both dtypes, runs 03_train_draft.py on each with the same
flags and seed, and prints the held-out loss and the estimated acceptance length of the last evaluation. Flags that
this script does not know go to 03.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from eagle3 import files, vocab
from eagle3.shards import (
    METADATA,
    Shard,
    ShardContent,
    ShardFormat,
    ShardSet,
    ShardWriter,
    dtype_name,
    quantise_fp8,
)

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def main() -> None:
    args, flags = parse()
    with tempfile.TemporaryDirectory(dir=args.hidden_states.parent) as folder:
        rows = {name: trained(args, flags, Path(folder) / name, dtype) for name, dtype in DTYPES.items()}
    print(f"{'':<5} {'GB':>8}  {'held-out loss':>13}  {'acceptance length':>17}")
    for name, (size, held_out) in rows.items():
        print(f"{name:<5} {size / 1e9:>8.3f}  {held_out['loss']:>13.4f}  {held_out['acceptance_length']:>17.4f}")


def parse() -> tuple[argparse.Namespace, list[str]]:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--hidden-states", type=Path, required=True)
    p.add_argument("--model-path", type=Path, required=True)
    return p.parse_known_args()


def trained(args: argparse.Namespace, flags: list[str], folder: Path, dtype: torch.dtype) -> tuple[int, dict]:
    """Bytes of the rewritten set, and the last evaluation of a draft trained on it."""
    states, out = folder / "hidden_states", folder / "out"
    states.mkdir(parents=True)
    rewrite(args.hidden_states, states, dtype)
    command = ["03_train_draft.py", "--model-path", args.model_path, "--hidden-states", states, "--output-dir", out]
    subprocess.run([sys.executable, *map(str, command), *flags], cwd=ROOT, check=True)
    metrics = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    held_out = [m for m in metrics if m["kind"] == "eval"][-1]
    return sum(p.stat().st_size for p in states.iterdir()), held_out


def rewrite(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """The same set with its states stored as `dtype`."""
    metadata = files.read_json(source / METADATA)
    metadata["shared"]["storage_dtype"] = dtype_name(dtype)
    for index, shard in enumerate(ShardSet(source).shards):
        write_shard(folder, index, shard, dtype, metadata["shared"])
    files.write_json(folder / METADATA, metadata)
    (folder / vocab.FILE).write_bytes((source / vocab.FILE).read_bytes())


def write_shard(folder: Path, index: int, shard: Shard, dtype: torch.dtype, shared: dict) -> None:
    content = ShardContent(index, shard.sample_ids, shard.offsets, shard.input_ids, shard.loss_mask)
    _, layers, hidden = shard.stored(0)[0].shape
    writer = ShardWriter(folder, content, ShardFormat(layers, hidden, dtype, shared))
    for sample in range(len(shard)):
        writer.write(sample, 0, *stored(shard.sample(sample).hidden_states, dtype))
    writer.finish()


def stored(states: torch.Tensor, dtype: torch.dtype) -> Iterable[torch.Tensor]:
    return quantise_fp8(states.to(torch.bfloat16)) if dtype == torch.float8_e4m3fn else (states.to(dtype),)


if __name__ == "__main__":
    main()
