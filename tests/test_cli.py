"""Flags that no run could mean are refused before anything is read, whether they come by flag or by YAML."""

from pathlib import Path

import pytest

from eagle3 import extract, files
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
    ("generate", "--seed", ["-1"]),
    ("prepare", "--min-kept", ["-5", "200", "nan"]),
    ("prepare", "--show", ["-3"]),
    ("train", "--lr", ["-1", "0", "nan", "inf"]),
    ("train", "--warmup-fraction", ["-1", "5", "nan"]),
    ("train", "--max-grad-norm", ["0", "-1", "nan"]),
    ("train", "--weight-decay", ["-1", "nan"]),
    ("train", "--seed", ["-1"]),
    ("train", "--eval-fraction", ["-1", "2", "nan"]),
    ("evaluate", "--min-acceptance", ["-1", "nan"]),
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
