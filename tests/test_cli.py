"""The manners of the command lines: quick help, named groups, one clear last line, exit codes, colours; and flags that
no run could mean are refused before anything is read, whether they come by flag or by YAML."""

import argparse
import importlib
import io
import json
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle3 import __version__, cli, extract, files, prepared, runs, shards
from tests import stages
from tests.test_configs import parser_of

NEEDED = {
    "generate": ["--model-path=m", "--input=i", "--output=o"],
    "prepare": ["--model-path=m", "--input=i", "--output-dir=o"],
    "train": ["--model-path=m", "--hidden-states=h", "--output-dir=o"],
    "evaluate": ["--prompts=p"],
}
NONSENSE = [
    ("generate", "--temperature", ["-1", "nan", "inf"]),
    ("generate", "--seed", ["-1", "x", "1.5"]),
    ("generate", "--top-p", ["0", "1.1", "nan", "x"]),
    ("prepare", "--min-kept", ["-5", "200", "nan"]),
    ("prepare", "--show", ["-3"]),
    ("train", "--lr", ["-1", "0", "nan", "inf", "1e-4x"]),
    ("train", "--warmup-fraction", ["-1", "5", "nan"]),
    ("train", "--max-grad-norm", ["0", "-1", "nan"]),
    ("train", "--weight-decay", ["-1", "nan"]),
    ("train", "--seed", ["-1"]),
    ("train", "--eval-fraction", ["-1", "2", "nan"]),
    ("evaluate", "--min-acceptance", ["-1", "nan"]),
    ("evaluate", "--concurrency", ["0", "-1", "x", "2.0"]),
]


@pytest.mark.parametrize(("stage", "flag", "value"), [(s, f, v) for s, f, values in NONSENSE for v in values])
def test_a_number_outside_its_range_is_refused_by_name(stage, flag, value, capsys):
    """A learning rate of NaN would train to its end and export NaN: exit code 2 and a line with flag and value."""
    with pytest.raises(SystemExit) as refused:
        parser_of(stage).parse([*NEEDED[stage], f"{flag}={value}"])
    assert refused.value.code == 2
    line = capsys.readouterr().err
    assert flag in line and f"found {value}" in line and line.count("\n") == 1


@pytest.mark.parametrize(
    ("stage", "flag", "value"),
    [
        ("generate", "--temperature", 0.0),
        ("prepare", "--min-kept", 100.0),
        ("prepare", "--show", 0),
        ("train", "--warmup-fraction", 1.0),
        ("train", "--weight-decay", 0.0),
        ("train", "--eval-fraction", 0.0),
    ],
)
def test_the_ends_of_a_range_are_taken(stage, flag, value):
    """The ranges are closed where their ends mean something: greedy, every row, no decay, nothing held out."""
    found = vars(parser_of(stage).parse([*NEEDED[stage], f"{flag}={value}"]))
    assert found[flag.removeprefix("--").replace("-", "_")] == value


@pytest.mark.parametrize(
    ("content", "said"), [(b"1: 2\n", "unknown key 1"), (b"\xff\xfe\x00", "not YAML"), (b"- a\n", "found list")]
)
def test_a_config_that_is_none_is_refused_naming_the_file(content, said, tmp_path, capsys):
    """Whatever stands in the file, the answer is one line with its name and exit code 2, no traceback."""
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as refused:
        parser_of("train").parse([*NEEDED["train"], "--config", str(path)])
    line = capsys.readouterr().err
    assert refused.value.code == 2 and str(path) in line and said in line


def test_an_output_that_cannot_be_written_is_refused_first(tmp_path):
    """A folder under a file cannot be made; a folder is no file: known before hours of work, not after them."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="--output-dir .*file/deep: .*file is not a folder"):
        files.check_folder("--output-dir", tmp_path / "file" / "deep")
    with pytest.raises(ValueError, match="--output .*: is a folder; name a file"):
        files.check_file("--output", tmp_path)
    files.check_folder("--output-dir", tmp_path / "new" / "deep")
    files.check_file("--output", tmp_path / "new" / "result.json")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("00_generate_responses.py", ["--model-path=none", "--input={file}", "--output={file}", "--overwrite"]),
        ("00_generate_responses.py", ["--model-path=none", "--input={file}", "--output={folder}"]),
        ("03_train_draft.py", ["--model-path=none", "--hidden-states=none", "--output-dir={file}"]),
        ("04_evaluate_draft.py", ["--draft=none", "--prompts={file}", "--output={folder}"]),
    ],
)
def test_every_stage_looks_at_its_output_before_its_work(script, flags, tmp_path):
    """Also with --overwrite, which would delete the input when both are one file."""
    file = tmp_path / "chats.jsonl"
    file.write_text("kept")
    result = stages.run(script, *(flag.format(file=file, folder=tmp_path) for flag in flags))
    assert result.returncode == 2
    assert "--output" in result.stdout.splitlines()[-1]
    assert file.read_text() == "kept"


def test_states_do_not_go_where_the_prepared_data_is(tiny_llama: Path, tmp_path):
    """Both have a metadata.json: --overwrite there would delete that of the data."""
    options = extract.Options(
        model_path=tiny_llama,
        prepared_data=tmp_path / "tokenized_data.jsonl",
        output_dir=tmp_path,
        batch_size=1,
        max_seq_len=8,
    )
    with pytest.raises(ValueError, match="--output-dir .*: holds the prepared data itself"):
        extract.open_target(options)


@pytest.mark.parametrize(
    ("stage", "other"),
    [
        ("prepare", "extract"), ("prepare", "train"), ("extract", "prepare"), ("extract", "train"),
        ("train", "prepare"), ("train", "extract"),
    ],
)  # fmt: skip
def test_no_stage_writes_over_another_or_into_a_model(stage, other, tmp_path):
    """They have files of the same names, a status.json at least; --overwrite is for the stage's own."""
    described = {
        "prepare": ("metadata.json", {"format": prepared.FORMAT}),
        "extract": ("metadata.json", {"format": shards.FORMAT}),
        "train": ("settings.json", {"command": "03_train_draft.py"}),
    }
    name, content = described[other]
    files.write_json(tmp_path / name, content)
    with pytest.raises(ValueError, match=rf"--output-dir .*: holds the output of another stage \({other}\)"):
        runs.check_output_folder(tmp_path, stage)
    (tmp_path / name).unlink()
    name, content = described[stage]
    files.write_json(tmp_path / name, content)
    runs.check_output_folder(tmp_path, stage)
    files.write_json(tmp_path / "config.json", {})
    with pytest.raises(ValueError, match="has a config.json, so it is a model's folder"):
        runs.check_output_folder(tmp_path, stage)


@pytest.mark.parametrize("given", [["--output-dir", ""], ["--output-dir="], ["--output-dir", "x", ""]])
def test_an_unset_variable_is_no_folder(given, capsys):
    """`--output-dir "$OUT"` without OUT would be the folder at hand."""
    with pytest.raises(SystemExit) as end:
        parser_of("extract").parse(["--model-path", "m", "--prepared-data", "p", *given])
    assert end.value.code == cli.REFUSED
    assert "--output-dir: an empty value was given; is a shell variable unset?" in capsys.readouterr().err
    assert parser_of("generate").parse([*NEEDED["generate"], "--base-url=http://x/v1?key=YWI="]).base_url.endswith("=")


def test_a_refusal_reaches_stderr_when_stdout_is_closed():
    """`>&-`, as some schedulers start their jobs."""
    command = f"{sys.executable} 02_extract_hidden_states.py --model-path /none --prepared-data x --output-dir y >&-"
    result = subprocess.run(command, shell=True, cwd=ROOT, text=True, stderr=subprocess.PIPE)
    assert result.returncode == cli.REFUSED
    assert "Traceback" not in result.stderr
    assert "--model-path /none: no such folder" in result.stderr.splitlines()[-1]


ROOT = stages.ROOT
SCRIPTS = sorted(path.name for path in ROOT.glob("[0-9]*.py"))
MODULES = sorted(p.stem for p in (ROOT / "eagle3").glob("*.py") if '__name__ == "__main__"' in p.read_text())
COMMANDS = [*SCRIPTS, *(f"eagle3.{name}" for name in MODULES), "fix_custom_worker.py"]
HEAVY = ("torch", "vllm", "transformers", "datasets", "pandas", "pyarrow", "ray", "jinja2")
ASK = """
import runpy, sys
name, sys.argv = sys.argv[1], sys.argv[1:]
try:
    (runpy.run_path if name.endswith(".py") else runpy.run_module)(name, run_name="__main__")
finally:
    print("imported:", *sorted(set(sys.modules) & set(HEAVY)))
"""


def asked(command: str, flag: str) -> str:
    """What a command says to a flag that ends it, and which of HEAVY it imported for that."""
    program = f"HEAVY = {HEAVY}\n{ASK}"
    result = subprocess.run([sys.executable, "-c", program, command, flag], cwd=ROOT, text=True, capture_output=True)
    assert result.returncode == cli.DONE, result.stderr
    return result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_quick_and_says_the_exit_codes(command):
    """Every command's --help comes without importing torch or any other large package, and documents its exit codes."""
    said = asked(command, "--help")
    assert said.splitlines()[-1] == "imported:"
    assert "xit codes: 0 " in said and (command == "fix_custom_worker.py" or cli.EXIT_CODES in said)
    assert "--version" in said


def test_versions_have_one_owner():
    """The version is eagle3.__version__ for every command; fix_custom_worker.py, which is copied alone, has its own."""
    said = {command: asked(command, "--version").splitlines()[0] for command in (COMMANDS[0], *COMMANDS[-2:])}
    *ours, own = said.values()
    assert set(ours) == {f"eagle3-train {__version__}"}
    assert own.startswith("fix_custom_worker.py revision ")


def test_ctrl_c_leaves_a_clear_last_line(tiny_llama, tmp_path):
    """SIGINT while rows are read: the last line says what happened and what to do, no traceback, exit code 130."""
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Good day. " * 40}]
    chats.write_text((json.dumps({"messages": turns}) + "\n") * 8000)
    flags = ["--model-path", tiny_llama, "--input", chats, "--output-dir", tmp_path / "data", "--workers", "1"]
    # a shell's background job ignores SIGINT, and so would the child of a test that runs in one
    run = subprocess.Popen(
        [sys.executable, "01_prepare_data.py", *map(str, flags)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert any(line.startswith("workers ") for line in run.stdout)
    time.sleep(0.2)  # into the rows
    run.send_signal(signal.SIGINT)
    rest, _ = run.communicate(timeout=60)
    assert run.returncode == cli.INTERRUPTED, rest
    assert rest.splitlines()[-1] == "01_prepare_data.py: interrupted by Ctrl-C; the same command goes on"
    assert "Traceback" not in rest
    assert not (tmp_path / "data/metadata.json").exists()


def ended(capsys, error=None) -> tuple[int, str]:
    """Exit code and last line of a command whose work ends in this error."""

    def work(_):
        if error is not None:
            raise error

    tool = cli.Tool("python -m eagle3.tool", "A tool.")
    tool.parse = lambda: None  # no flags
    with pytest.raises(SystemExit) as end:
        cli.run(tool, lambda _: None, work)
    return end.value.code, "".join(capsys.readouterr().err.splitlines()[-1:])


def test_each_way_to_end_has_its_code_and_line(capsys):
    """A stop that was asked for is 130 as Ctrl-C is, an error while working 1; one without text names its class."""
    assert ended(capsys) == (0, "")
    assert ended(capsys, KeyboardInterrupt()) == (130, "python -m eagle3.tool: interrupted by Ctrl-C")
    stop = InterruptedError("stopped on request: 3 shards to do")
    assert ended(capsys, stop) == (130, "python -m eagle3.tool: stopped on request: 3 shards to do")
    assert ended(capsys, ValueError("no")) == (1, "python -m eagle3.tool: error: no")
    bare = "python -m eagle3.tool: failed: AssertionError: AssertionError without a message (traceback above)"
    assert ended(capsys, AssertionError()) == (1, bare)


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    """A file or a pipe gets none, a terminal does, unless NO_COLOR is set or it is a dumb one."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with open(ours, "rb"), open(theirs, "w") as terminal:
        assert cli.colours(terminal)
        assert not cli.colours(io.StringIO())
        monkeypatch.setenv("NO_COLOR", "1")
        assert not cli.colours(terminal)
        monkeypatch.delenv("NO_COLOR")
        monkeypatch.setenv("TERM", "dumb")
        assert not cli.colours(terminal)


def test_one_place_decides_on_colours():
    """Nobody else asks whether a stream is a terminal, but the progress bar, which is no colour."""
    asks = {p.name for p in [*ROOT.glob("*.py"), *(ROOT / "eagle3").glob("*.py")] if "isatty" in p.read_text()}
    assert asks == {"cli.py", "progress.py"}


@pytest.mark.parametrize(
    ("stage", "text", "said"),
    [
        ("extract", "layer-ids: 2 30 58 60", "'layer-ids' takes a list: write [2, 30, 58, 60]"),
        ("extract", "layer_ids: 2, 30,58 60", "'layer-ids' takes a list: write [2, 30, 58, 60]"),
        ("train", "deterministic: 'yes'", "'deterministic' takes true or false, not 'yes'"),
        ("train", "norm-before-residual: 1", "'norm-before-residual' takes true or false, not 1"),
        ("train", "lr: [1, 2]", "'lr' takes one value, not a list: [1, 2]"),
        ("prepare", "max-seq-len: 1\nmax_seq_len: 2", "'max-seq-len' and 'max_seq_len' are one flag"),
        ("prepare", "prepare:\n  max_seq_len: 1\n  max-seq-len: 2", "'max_seq_len' and 'max-seq-len' are one flag"),
    ],
)
def test_a_config_that_could_mean_two_things_is_refused(stage, text, said, tmp_path, capsys):
    """A list written as a command line has it, and one flag in two spellings: refused, saying what to write."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as refused:
        parser_of(stage).parse(["--config", str(path)])
    line = capsys.readouterr().err
    assert refused.value.code == 2 and said in line and line.count("\n") == 1


def test_a_config_that_is_not_there_is_refused_by_its_flag(tmp_path, capsys):
    """A path that leads nowhere, or to a folder."""
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(SystemExit) as refused:
            parser_of("train").parse(["--config", str(path)])
        assert refused.value.code == 2
        assert f"--config {path}: no such file" in capsys.readouterr().err


def test_a_section_wins_over_a_flat_key_in_either_spelling(tmp_path):
    """A section is for its stage alone, so what it says holds, however the flag is spelled in either place."""
    path = tmp_path / "config.yaml"
    path.write_text("max-seq-len: 1\nprepare:\n  max_seq_len: 2\n")
    assert parser_of("prepare").parse([*NEEDED["prepare"], "--config", str(path)]).max_seq_len == 2


PARSERS = {name: importlib.import_module(name.removesuffix(".py")).parser() for name in COMMANDS[:-1]}
GENERAL = {"-h", "--version", "--config"}


def flags_of(parser) -> dict[str, argparse.Action]:
    return {action.option_strings[0]: action for action in parser._actions if action.option_strings}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_flags_of_a_stage_are_in_named_groups(script):
    """Under argparse's own "options" there is nothing but help, version and config."""
    groups = {group.title: group._group_actions for group in PARSERS[script]._action_groups}
    assert {action.option_strings[0] for action in groups.pop("options")} == GENERAL
    assert groups.pop("positional arguments") == []
    assert sum(map(len, groups.values())) == len(flags_of(PARSERS[script])) - len(GENERAL)


@pytest.mark.parametrize("command", PARSERS)
def test_help_says_what_a_flag_takes_and_its_default(command):
    """A flag with a value names what that is, tokens as TOKENS, and what happens without it, unless it is needed."""
    for name, action in flags_of(PARSERS[command]).items():
        if name in GENERAL or action.nargs == 0:
            continue
        assert action.choices or action.metavar or action.nargs == 0, name
        shown = cli.Help("x")._get_help_string(action)
        assert action.required or "(default: " in shown or name in NEEDED_TOGETHER, (name, shown)
        if "tokens" in shown.split() and name.endswith(("tokens", "len", "size")) and "speculative" not in name:
            assert action.metavar == "TOKENS", name


NEEDED_TOGETHER = {"--draft", "--model-path"}  # of 04: --draft or --base-url; the target that the draft names


def test_a_flag_is_the_same_in_every_script_that_has_it():
    """One name, one kind of value: --tp-size, --max-tokens, --base-url and the others that several scripts share."""
    shared: dict[str, list[tuple[str, argparse.Action]]] = {}
    for command in SCRIPTS:
        for name, action in flags_of(PARSERS[command]).items():
            shared.setdefault(name, []).append((command, action))
    several = {name: found for name, found in shared.items() if len(found) > 1}
    assert {"--tp-size", "--max-tokens", "--max-seq-len", "--limit", "--base-url"} <= several.keys()
    for name, found in several.items():
        kinds = {(a.type, a.metavar if name != "--output" else "") for _, a in found}
        if name not in DIFFERENT:
            assert len(kinds) == 1, (name, kinds)


DIFFERENT = {"--input"}  # 01 also takes globs, which are not paths yet
