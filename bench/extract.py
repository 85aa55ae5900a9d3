"""Extraction against plain prefill on the same prompts, in one run: tokens/s and the share of plain prefill.

    python bench/extract.py --model-path data/targets/smollm2-135m --samples 64 --tokens 256          # CPU
    python bench/extract.py --kimi-width --samples 256 --tokens 2048 --output /dev/shm/states         # one H200

plain: vLLM's own worker, the same engine arguments. ours: states captured, checked, and whole shards written and
flushed under --output (the time ends when the last one has its name). fp8: ours with --storage-dtype fp8. connector:
vLLM's own `extract_hidden_states` (GPU only). Each is a process with an engine of its own; once all are up and warm,
they go over all samples in turn, one at a time, once uncounted (a RAM disk's memory is slow when it is first touched)
and then `--passes` times. The table has medians, and the shares are those of each pass in plain's of the same round.
--compile: all with the target compiled.

Where --output is on a disk that is slower than prefill, ours can be no faster than the disk: its rate is measured
before and after each round, with files as large as a shard, and `of the lower` is the share of what prefill and that
disk would allow. --kimi-width: random weights of a DeepseekV3 of Kimi's width (7168, 6 layers, 32 experts).
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from eagle3 import engine, extract, prepared, shards
from eagle3.cli import positive_int
from eagle3.target import Target
from eagle3.watch import Watch

KIMI_WIDTH = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "hidden_size": 7168, "num_hidden_layers": 6, "num_attention_heads": 64, "num_key_value_heads": 64,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 32, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.827, "vocab_size": 163840,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_theta": 50000.0, "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
WARM_UP = 8  # samples
KV_CACHE_BYTES = 2 << 30  # of each engine: they stand side by side on one device
DISK_FILES = 3


def main() -> None:
    args = parse()
    if args.mode:
        work(args)
        return
    model = args.model_path or kimi_width()
    workers = {mode: start_worker(mode, model) for mode in args.modes}
    up = [mode for mode, worker in workers.items() if answer(worker)]
    rounds, disk = [], []
    for _ in range(1 + args.passes):
        rounds.append({mode: one_pass(workers[mode]) for mode in up})
        disk.append(write_rate(args.output))
    passes = {mode: [found[mode] for found in rounds[1:]] for mode in up}
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    report(args, passes, disk)


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = p.add_mutually_exclusive_group(required=True)
    model.add_argument("--model-path", type=Path)
    model.add_argument("--kimi-width", action="store_true", help="a random DeepseekV3 of Kimi's width")
    p.add_argument("--samples", type=positive_int, default=64)
    p.add_argument("--tokens", type=positive_int, default=256, help="a sample")
    p.add_argument("--batch-size", type=positive_int, default=4)
    p.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "bench-extract")
    p.add_argument("--modes", nargs="+", default=["plain", "ours"], choices=["plain", "ours", "fp8", "connector"])
    p.add_argument("--passes", type=positive_int, default=3, help="of each mode over all samples, counted")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--mode", help=argparse.SUPPRESS)
    return p.parse_args()


def kimi_width() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="kimi-width-"))
    (folder / "config.json").write_text(json.dumps(KIMI_WIDTH))
    return folder


def start_worker(mode: str, model: Path) -> subprocess.Popen:
    """This script once more, for one mode; its log goes to stderr."""
    given = [a for a in sys.argv[1:] if a != "--kimi-width"]
    command = [sys.executable, __file__, *given, "--mode", mode]
    if "--model-path" not in given:
        command += ["--model-path", str(model)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(worker: subprocess.Popen) -> dict | None:
    """The next thing that a worker has to say; None if it has ended."""
    lines = (line for line in worker.stdout if line.startswith("RESULT "))
    return next((json.loads(line.removeprefix("RESULT ")) for line in lines), None)


def one_pass(worker: subprocess.Popen) -> dict:
    print("go", file=worker.stdin, flush=True)
    if (found := answer(worker)) is None:
        raise RuntimeError("an engine failed, see the log above")
    return found


def write_rate(folder: Path) -> float:
    """Bytes/s at which DISK_FILES files of a shard's size get into `folder` and onto its disk, one thread each.

    Written as shards are: each block is handed to the disk at once, and the file flushed at its end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(1 << 24)

    def write(index: int) -> None:
        with open(folder / f"rate-{index}", "wb") as file:
            for position in range(0, extract.SHARD_BYTES, len(block)):
                file.write(block)
                file.flush()
                os.posix_fadvise(file.fileno(), position, len(block), os.POSIX_FADV_DONTNEED)  # as ShardWriter does
            os.fsync(file.fileno())

    start = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(DISK_FILES)))
    seconds = time.perf_counter() - start
    for index in range(DISK_FILES):
        (folder / f"rate-{index}").unlink()
    return DISK_FILES * extract.SHARD_BYTES / seconds


def planned(args: argparse.Namespace) -> extract.Extraction:
    """Random samples as an extraction, without files."""
    target = Target.open(args.model_path)
    num_layers, rng = target.num_layers, np.random.default_rng(0)
    layer_ids = [num_layers // 4, num_layers // 2, num_layers - 2, num_layers - 1]
    tokens = rng.integers(0, target.vocab_size, (args.samples, args.tokens)).astype(np.int32)
    rows = [prepared.Row(f"s{i}", ids, np.ones(args.tokens, np.uint8)) for i, ids in enumerate(tokens)]
    options = extract.Options(
        model_path=args.model_path, prepared_data=Path("none"), output_dir=args.output, batch_size=args.batch_size,
        max_seq_len=args.tokens, layer_ids=layer_ids, gpu_memory_utilization=0.9 / len(args.modes),
        storage_dtype="fp8" if args.mode == "fp8" else "auto",
        compile=args.compile, load_format="auto" if list(args.model_path.glob("*.safetensors")) else "dummy",
    )  # fmt: skip
    return extract.plan(options, target, rows, {"data_sha256": "random"})


def work(args: argparse.Namespace) -> None:
    """One mode: start its engine, then a pass over all samples for each line of stdin."""
    extraction = planned(args)
    clear(args.output)
    llm = START[args.mode](extraction)
    try:
        warm_up(llm, extraction)
        say({"ready": args.mode})
        for _ in sys.stdin:
            start = time.perf_counter()
            RUN[args.mode](llm, extraction)
            seconds = time.perf_counter() - start
            written = sum(p.stat().st_size for p in args.output.rglob("*") if p.is_file())
            clear(args.output)
            say({"seconds": seconds, "bytes": written})
    finally:
        engine.stop(llm)


def say(found: dict) -> None:
    print("RESULT " + json.dumps(found), flush=True)


def clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # the connector may still write there
    folder.mkdir(parents=True, exist_ok=True)


def requests(extraction: extract.Extraction, count: int | None = None) -> Iterator[engine.Request]:
    from vllm import SamplingParams

    for row in extraction.rows[:count]:
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        yield engine.Request(row.id, row.input_ids.tolist(), params)


def prefill(llm: object, extraction: extract.Extraction) -> None:
    """Every sample through the engine, queued as extraction queues them."""
    for _ in engine.stream(llm, requests(extraction), extraction.options.queued_tokens):
        pass


def warm_up(llm: object, extraction: extract.Extraction) -> None:
    """A few prompts that belong to no sample: the capturing worker lets them pass."""
    for request in engine.stream(llm, requests(extraction, WARM_UP), extraction.options.queued_tokens):
        assert request.finished


def start_engine(extraction: extract.Extraction, **changes: Any) -> object:
    return extract.start_engine(extraction, kv_cache_memory_bytes=KV_CACHE_BYTES, **changes)


def start_plain(extraction: extract.Extraction, **changes: Any) -> object:
    return start_engine(extraction, worker_cls="auto", additional_config={}, **changes)


def start_connector(extraction: extract.Extraction) -> object:
    """vLLM's own hidden-state connector over the same layers."""
    ids = [i + 1 for i in extraction.layer_ids]
    return start_plain(
        extraction,
        speculative_config={
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
        },
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(extraction.folder)},
        },
    )  # fmt: skip


def run_ours(llm: object, extraction: extract.Extraction) -> None:
    everything = list(range(len(extraction.plan)))
    extract.Run(extraction, llm, Watch(extraction, everything)).over(everything)
    assert len(shards.shard_paths(extraction.folder)) == len(extraction.plan)


START = {"plain": start_plain, "ours": start_engine, "fp8": start_engine, "connector": start_connector}
RUN = {"plain": prefill, "ours": run_ours, "fp8": run_ours, "connector": prefill}


def report(args: argparse.Namespace, passes: dict[str, list[dict]], disk: list[float]) -> None:
    """`disk`: its bytes/s before the first counted round and after each."""
    tokens = args.samples * args.tokens
    print(f"{args.samples} samples x {args.tokens} tokens, {args.batch_size} a step, {engine.versions()}")
    print(f"{'':<10} {'tokens/s':>10}  {'lowest':>10}  {'highest':>10}  {'of plain':>8}  {'of the lower':>12}  "
          f"{'written GB':>10}  {'GB/s':>6}  each pass of plain")  # fmt: skip
    for mode in args.modes:
        if mode not in passes:
            print(f"{mode:<10} its engine failed, see the log above")
            continue
        seconds = [p["seconds"] for p in passes[mode]]
        plain = [p["seconds"] for p in passes.get("plain", [])] or [float("nan")] * len(seconds)
        shares = [a / b for a, b in zip(plain, seconds, strict=True)]
        lower = statistics.median(of_the_lower(passes[mode], plain, disk))
        slow, middle, fast = (f(seconds) for f in (max, statistics.median, min))
        gb = passes[mode][-1]["bytes"] / 1e9
        print(f"{mode:<10} {tokens / middle:>10,.0f}  {tokens / slow:>10,.0f}  {tokens / fast:>10,.0f}  "
              f"{statistics.median(shares):>8.1%}  {lower:>12.1%}  {gb:>10.2f}  {gb / middle:>6.2f}  "
              f"{' '.join(f'{share:.1%}' for share in shares)}")  # fmt: skip
    print(f"disk: {' '.join(f'{rate / 1e9:.2f}' for rate in disk)} GB/s into {args.output}, between the rounds")


def of_the_lower(passes: list[dict], plain: list[float], disk: list[float]) -> list[float]:
    """Each pass's share of the lower of plain prefill's rate and the disk's, the mean of before and after its round."""
    rates = [(before + after) / 2 for before, after in pairwise(disk)]
    limits = [max(p["bytes"] / rate, prefill) for p, rate, prefill in zip(passes, rates, plain, strict=True)]
    return [limit / p["seconds"] for p, limit in zip(passes, limits, strict=True)]


if __name__ == "__main__":
    main()
