"""Speed and memory of 01_prepare_data.py, against a bare loop of the same tokenizer over the same text in the same run.

    python bench/prepare.py --model-path data/targets/smollm2-135m
    python bench/prepare.py --model-path data/targets/tiny_kimi --trust-remote-code --answer-words 2000
    python bench/prepare.py --model-path data/targets/tiny_kimi --trust-remote-code --memory-rows 10000 1000000

Prints tokens per second of CPU time for the whole stage in one process (read, parse, render, tokenise, write) and for
the bare loop, and per second of wall time for the stage with a worker on each core, once they have started. Then the
same for conversations of more and more short turns, and on demand the largest memory of any process over the number of
rows.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from eagle3 import chat, conversations, files, prepare, prepared  # noqa: E402
from eagle3.cli import positive_int  # noqa: E402
from eagle3.sources import Raw  # noqa: E402
from eagle3.target import Target  # noqa: E402
from eagle3.tokenizer import is_tiktoken  # noqa: E402

ROUNDS = 5
STAGE = "01_prepare_data.py, one process"
MAX_SEQ_LEN = 1 << 18  # nothing is cut, so that all loops tokenise the same text
MORE_ROWS = 10  # times as many for the workers
TURNS = (50, 100, 200, 400)


def random_rows(
    number: int, question_words: int, answer_words: int, turns: tuple[int, ...], seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Conversations of words drawn from the tiny corpus, the same on every run."""
    words = (ROOT / "data/tiny_corpus.txt").read_text().split()
    draw = random.Random(seed)
    for _ in range(number):
        yield {
            "messages": [
                {"role": role, "content": " ".join(draw.choices(words, k=draw.randint(max(1, most // 10), most)))}
                for _ in range(draw.choice(turns))
                for role, most in (("user", question_words), ("assistant", answer_words))
            ]
        }


def write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> Path:
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def best_seconds(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The least CPU time of ROUNDS runs of each, in turn: other work on the machine changes it less than wall time."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for name, work in works.items():
            start = time.process_time()
            work()
            best[name] = min(best[name], time.process_time() - start)
    return best


def make_plan(args: argparse.Namespace, model: chat.Chat, path: Path, folder: Path) -> prepare.Plan:
    settings = prepare.Settings(max_seq_len=MAX_SEQ_LEN, draft_vocab_size=model.target.vocab_size)
    return prepare.Plan(
        target=model.target,
        chat=model,
        inputs=[path],
        output=folder / "out",
        settings=settings,
        trust_remote_code=args.trust_remote_code,
        workers=1,
        min_kept=0,
        show=0,
        overwrite=True,
    )


def bare_loops(model: chat.Chat, texts: list[str]) -> dict[str, Callable[[], object]]:
    """Calls that do nothing but tokenise, over the texts.

    A slow tokenizer has up to three: Transformers' encode (what a server calls), the class's own, which Kimi's code
    defines and which takes no more than the text, and the tiktoken under it.
    """
    tokenizer = model.tokenizer
    calls: dict[str, Callable[[str], object]] = {
        "encode(text, add_special_tokens=False)": lambda t: tokenizer.encode(t, add_special_tokens=False)
    }
    if not tokenizer.is_fast:
        calls["the class's own encode(text)"] = tokenizer.encode
    if is_tiktoken(tokenizer):
        calls["its tiktoken alone"] = lambda t: tokenizer.model.encode(t, allowed_special="all")
    return {name: lambda call=call: [call(t) for t in texts] for name, call in calls.items()}


def speed(args: argparse.Namespace, model: chat.Chat, folder: Path) -> None:
    """Tokens/s of the stage and of the bare loops."""
    shape = (100, args.answer_words, (1, 1, 2, 3))
    path = write_rows(folder / "in.jsonl", random_rows(args.rows, *shape))
    more = write_rows(folder / "more.jsonl", random_rows(MORE_ROWS * args.rows, *shape, seed=1))
    plan = make_plan(args, model, path, folder)
    prepare.run(plan)
    rows = list(prepared.read_rows(plan.output / prepared.DATA))
    tokens = sum(len(row.input_ids) for row in rows)
    texts = [model.decode(row.input_ids.tolist()) for row in rows]
    cores = len(os.sched_getaffinity(0))
    all_cores = workers_rate(replace(plan, workers=cores), more)
    seconds = best_seconds({STAGE: lambda: prepare.run(plan)} | bare_loops(model, texts))
    one = tokens / seconds.pop(STAGE)
    size = f"{tokens:,} tokens, {len(rows):,} samples"
    print(f"{STAGE:<45} {one:>12,.0f} tokens/s  ({size})")
    print(f"{f'01_prepare_data.py, {cores} workers':<45} {all_cores:>12,.0f} tokens/s")
    for name, taken in seconds.items():
        bare = tokens / taken
        print(f"{name:<45} {bare:>12,.0f} tokens/s  ratio {one / bare:.2f}, of {cores} workers {all_cores / bare:.2f}")


def workers_rate(plan: prepare.Plan, more: Path) -> float:
    """Tokens/s of wall time of the plan's workers, without their start: what `more` rows take on top."""
    done = []
    for inputs in (plan.inputs, [*plan.inputs, more]):
        start = time.perf_counter()
        prepare.run(replace(plan, inputs=inputs))
        tokens = files.read_json(plan.output / prepared.METADATA)["statistics"]["tokens"]
        done.append((tokens, time.perf_counter() - start))
    (some_tokens, some_seconds), (all_tokens, all_seconds) = done
    return (all_tokens - some_tokens) / (all_seconds - some_seconds)


def long_conversations(model: chat.Chat) -> None:
    """Tokens/s over the number of turns; level when the work is linear."""
    for turns in TURNS:
        (row,) = random_rows(1, 10, 10, (turns // 2,))
        row = conversations.parse(Raw("bench", 1, row))
        tokens = sum(len(s.input_ids) for s in model.samples(row, 1 << 20).samples)
        name = f"one conversation of {turns} short turns"
        seconds = best_seconds({name: lambda row=row: model.samples(row, 1 << 20)})[name]
        print(f"{name} {tokens / seconds:>21,.0f} tokens/s  ({tokens:,} tokens)")


def memory(args: argparse.Namespace, folder: Path) -> None:
    """The largest resident memory of any process of the script, and its rows/s, over the number of rows."""
    for number in args.memory_rows:
        path = write_rows(folder / "many.jsonl", random_rows(number, 12, 12, (1,)))
        command = [sys.executable, ROOT / "01_prepare_data.py", "--model-path", args.model_path, "--input", path]
        command += ["--output-dir", folder / f"out{number}"] + ["--trust-remote-code"] * args.trust_remote_code
        start = time.perf_counter()
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise RuntimeError(f"01_prepare_data.py ended with status {status}")
        rate = number / (time.perf_counter() - start)
        print(f"{number:>9,} rows: largest process {usage.ru_maxrss / 1024:,.0f} MiB, {rate:,.0f} rows/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, required=True, metavar="DIR")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--rows", type=positive_int, default=2000, metavar="N", help="conversations (default: 2000)")
    parser.add_argument("--answer-words", type=positive_int, default=300, metavar="N", help="longest answer (300)")
    parser.add_argument(
        "--memory-rows", type=positive_int, nargs="+", default=[], metavar="N", help="measure memory instead"
    )
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.memory_rows:
            memory(args, folder)
            return
        model = chat.load(Target.open(args.model_path), args.trust_remote_code)
        print(f"{args.model_path}: {type(model.tokenizer).__name__}, answers of up to {args.answer_words} words")
        speed(args, model, folder)
        long_conversations(model)


if __name__ == "__main__":
    main()
