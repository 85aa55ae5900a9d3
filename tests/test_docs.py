"""The documents hold: their commands run as they stand, their flags exist, their figures follow from the code."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from eagle3 import cli, shards, status
from tests import stages
from tests.test_pipeline import write_prompts

ROOT = stages.ROOT
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_BOOK, ARCHITECTURE = ROOT / "docs/kimi-k25.md", ROOT / "docs/architecture.md"
KIMI = {"layers": 4, "hidden": 7168}
SERVE = "vllm serve"  # the one thing that is replaced in the run-book's commands, see tests/vllm_serve.py
WAIT_S = 180


@dataclass(frozen=True)
class Block:
    """A fenced block: `kind` and `word` are what stands after the three backticks."""

    kind: str
    word: str
    text: str


def blocks(path: Path) -> list[Block]:
    found = re.findall(r"^```(\w+) ?(\w*)\n(.*?)^```$", path.read_text(), re.M | re.S)
    return [Block(*parts) for parts in found]


def commands(path: Path) -> Iterator[list[str]]:
    """The words of every command line in a document's code, comments and redirections included."""
    text = path.read_text()
    code = "".join(b.text for b in blocks(path)) + "\n".join(re.findall(r"^    .*$", text, re.M))
    inline = re.findall(r"`((?:python|torchrun) [^`]*)`", text)
    for line in (*code.replace("\\\n", " ").splitlines(), *inline):
        with suppress(ValueError):  # an apostrophe in a comment or a log
            yield shlex.split(line, comments=True)


def program(words: list[str]) -> str | None:
    """The script or module of ours that a command runs."""
    scripts = [w for w in words if re.fullmatch(r"0\d_\w+\.py|fix_custom_worker\.py", w)]
    modules = [b for a, b in zip(words, words[1:], strict=False) if a == "-m" and re.fullmatch(r"eagle3\.\w+", b)]
    return next(iter(scripts + modules), None)


def help_of(name: str) -> str:
    command = ["-m", name] if name.startswith("eagle3.") else [name]
    return subprocess.check_output([sys.executable, *command, "--help"], cwd=ROOT, text=True)


def test_every_flag_in_the_documents_is_one_of_the_script():
    """A flag that was renamed would cost the reader an error, at best: each one is in the --help of its script."""
    used: dict[str, set[str]] = {}
    for path in DOCS:
        for words in commands(path):
            if name := program(words):
                after = words[words.index(name) + 1 :]
                end = next(
                    (i for i, w in enumerate(after) if w in ("|", "||", "&&", ";", "&") or w.startswith(">")), None
                )
                used.setdefault(name, set()).update(w.partition("=")[0] for w in after[:end] if w.startswith("--"))
    assert len(used) >= 8 and sum(map(len, used.values())) > 35
    for name, flags in used.items():
        known = set(re.findall(r"--[\w-]+", help_of(name)))
        assert flags <= known, f"{name}: {flags - known}"


def test_every_file_that_the_documents_name_is_there():
    """Paths of this repository in the documents, tests by name included, lead somewhere."""
    for path in DOCS:
        text = path.read_text()
        named = re.findall(r"(?<![\w/.-])((?:docs|data|configs|tests|bench|eagle3)/[\w/]+\.(?:md|py|yaml|txt))", text)
        for name in named:
            assert (ROOT / name).is_file(), f"{path.name} names {name}"
        for name in re.findall(r"(?<![\w/.-])([\w.-]+\.md)", text):
            assert any((folder / name).is_file() for folder in (ROOT, ROOT / "docs", ROOT / "data")), (path.name, name)


def test_the_architecture_names_every_module_and_no_other():
    """Each module of eagle3/ has its place on the page, and every module there exists."""
    text = ARCHITECTURE.read_text()
    table = {name for row in re.findall(r"^\| (?!---)(.*?) \|", text, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert table == {p.stem for p in (ROOT / "eagle3").glob("*.py")} - {"__init__"}
    for name in re.findall(r"`eagle3/(\w+)\.py`", text):
        assert (ROOT / f"eagle3/{name}.py").is_file(), name


def test_what_the_architecture_says_to_change_is_there():
    """Every name in code marks under "Where to change what" is defined in eagle3/, or is a flag or a file."""
    section = ARCHITECTURE.read_text().partition("## Where to change what")[2]
    source = "\n".join(p.read_text() for p in (ROOT / "eagle3").glob("*.py"))
    names = re.findall(r"`([A-Za-z_.]+)`", section)
    assert len(names) > 8
    for name in names:
        *_, last = name.removesuffix(".py").split(".")
        defined = re.search(rf"^ *(?:def |class |){last}(?:\(| =|:|\b.* = )", source, re.M)
        assert defined or (ROOT / name).is_file(), name


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_bytes_a_token_are_those_of_the_writer():
    """Kimi's 4 x 7168: 57,349 bytes in bf16 and 28,693 in fp8, in the run-book as in shards.bytes_per_token."""
    text = RUN_BOOK.read_text()
    for dtype, name in ((torch.bfloat16, "states, bf16"), (torch.float8_e4m3fn, "states, `--storage-dtype fp8`")):
        row = re.search(rf"^\| {re.escape(name)} \| N x L x ([\d,]+) \|", text, re.M)
        assert number(row[1]) == shards.bytes_per_token(KIMI["layers"], KIMI["hidden"], dtype)
    assert f"takes {shards.bytes_per_token(4, 7168, torch.bfloat16):,} bytes" in (ROOT / "README.md").read_text()


def test_the_worked_table_follows_from_its_formulas():
    """Every cell of the run-book's table of disk and time, from the lengths and rates that stand above it."""
    text = RUN_BOOK.read_text()
    rates = {name: number(value) for name, value in re.findall(r"\| ([GPT]) = ([\d,]+)", text)}
    lengths, answer, epochs = map(number, re.search(r"L = ([\d,]+), A = ([\d,]+), E = (\d+)", text).groups())
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d,]+) million \| (.*) TB \| (.*) TB \| (.*) h \| (.*) h \| (.*) h \|$", text, re.M
    )
    assert len(rows) == 3 and len(rates) == 3
    for row in rows:
        samples, millions, bf16, fp8, *hours = map(number, row)
        tokens = samples * lengths
        each = [shards.bytes_per_token(4, 7168, dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)]
        seconds = [samples * answer / rates["G"], tokens / rates["P"], epochs * tokens / rates["T"]]
        assert millions == tokens / 1e6
        assert [bf16, fp8] == [round(tokens * size / 1e12, 1) for size in each]
        assert hours == [round(s / 3600, 1) for s in seconds]


@dataclass
class Walk:
    """What somebody has done and seen who followed the run-book: the output of each block, in order."""

    run: Path
    model: Path
    values: dict[str, str]
    said: list[tuple[Block, str]] = field(default_factory=list)

    def shell(self, text: str) -> str:
        """Run a block in a shell of its own that has read run.env, as somebody who logs in again would."""
        script = f"{self.environment}\n{text.replace(SERVE, 'python -m tests.vllm_serve')}"
        variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "VLLM_LOGGING_LEVEL": "WARNING"}
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, env=os.environ | variables, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600,
        )  # fmt: skip
        assert result.returncode == 0, (
            f"{text}\nended with {result.returncode}:\n{result.stdout[-3000:]}\n{self.tails()}"
        )
        return result.stdout

    @property
    def environment(self) -> str:
        """run.env as the run-book has it, with other values for its variables."""
        first = blocks(RUN_BOOK)[0].text
        names = re.findall(r"^export (\w+)=", first, re.M)
        assert set(names) == set(self.values)
        for name in names:
            first = re.sub(rf"^export {name}=.*$", f"export {name}={shlex.quote(self.values[name])}", first, flags=re.M)
        return first

    def log(self, name: str) -> str:
        return (self.run / f"logs/{name}.log").read_text()

    def tails(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted(self.run.glob("logs/*.log")))

    def wait_for(self, name: str, text: str) -> None:
        end = time.monotonic() + WAIT_S
        while text not in self.log(name):
            assert time.monotonic() < end, f"{name}.log never said {text!r}:\n{self.tails()}"
            time.sleep(0.1)

    def all(self) -> None:
        """Every bash block in order; one marked stop is met while its stage works, and the stage is started again."""
        before = ""
        for block in blocks(RUN_BOOK)[1:]:
            if block.kind != "bash":
                continue
            if block.word == "stop":
                self.wait_for("03", "step ")
            self.said.append((block, self.shell(block.text)))
            if block.word == "stop":
                self.said.append((block, self.shell(before)))
            before = block.text

    def kill(self) -> None:
        for path in self.run.glob("logs/*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), signal.SIGKILL)

    def seen(self) -> str:
        """All that was on a screen or in a log."""
        return "\n".join([said for _, said in self.said] + [p.read_text() for p in self.run.glob("logs/*.log")])


@pytest.fixture(scope="module")
def walk(tiny_kimi, tmp_path_factory) -> Iterator[Walk]:
    folder = tmp_path_factory.mktemp("run-book")
    questions = folder / "questions.jsonl"
    write_prompts(questions)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    walked = Walk(
        folder / "kimi",
        tiny_kimi,
        {
            "MODEL": str(tiny_kimi),
            "RUN": str(folder / "kimi"),
            "PROMPTS": str(questions),
            "BENCHMARKS": str(questions),
            "CONFIG": "configs/tiny_kimi.yaml",
            "TP": "1",
            "GPUS": "2",
            "PORT": str(port),
        },
    )
    try:
        walked.all()
        yield walked
    finally:
        walked.kill()


@pytest.mark.slow
def test_somebody_who_follows_the_run_book_gets_a_draft_and_a_page_about_it(walk):
    """Every command of the run-book, as it stands there, on the tiny Kimi: all five stages are done, the export is
    there, and so is the report."""
    assert {row.stage: row.state for row in status.rows(walk.run)} == dict.fromkeys(cli.STAGES, "done")
    assert (walk.run / "draft/model.safetensors").is_file()
    assert (walk.run / "report.html").stat().st_size > 10_000
    assert json.loads((walk.run / "evaluation.json").read_text())["finished"]


@pytest.mark.slow
def test_the_stop_of_the_run_book_saves_a_checkpoint_and_its_start_goes_on_there(walk):
    """`stop 03` while torchrun's ranks train: they say after which step; the same command resumes there."""
    log = walk.log("03")
    step = re.search(r"^stopped after step (\d+) of \d+: the same command goes on", log, re.M)[1]
    assert f"resumed: {walk.run}/checkpoints/step-{int(step):06}" in log[log.index("stopped after") :]
    assert log.splitlines()[-1].startswith("done: ")


@pytest.mark.slow
def test_the_server_of_the_run_book_answers_with_drafted_tokens(walk):
    """One completion through `vllm serve DRAFT` with Kimi's parsers, some of whose tokens the draft had proposed."""
    (said,) = [said for block, said in walk.said if "chat/completions" in block.text]
    answer, counter = [line for line in said.splitlines() if line][-2:]
    assert json.loads(answer)["usage"]["completion_tokens"] == 16
    assert float(counter.split()[-1]) > 0


def shape(text: str) -> set[str]:
    """Lines without their numbers and the width of their spaces."""
    lines = (re.sub(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", "#", line) for line in text.splitlines())
    return {" ".join(line.split()) for line in lines}


@pytest.mark.slow
def test_the_log_lines_of_the_run_book_are_real(walk):
    """Each line of its `text` blocks, numbers aside, is one that the programs wrote in this very run."""
    seen = walk.seen().replace(str(walk.run), "out/kimi").replace(str(walk.model), "/models/kimi-k2.5-int4")
    shown = "\n".join(block.text for block in blocks(RUN_BOOK) if block.kind == "text")
    assert len(shape(shown)) > 25
    assert shape(shown) - shape(seen) == set()
