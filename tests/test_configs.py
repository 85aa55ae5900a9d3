"""Every file in configs/ is accepted by every script that has a section in it."""

import importlib.util
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"generate": "00_*", "prepare": "01_*", "extract": "02_*", "train": "03_*", "evaluate": "04_*"}
SECTIONS = [
    (path.name, stage)
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    for stage in SCRIPTS
    if stage in yaml.safe_load(path.read_text())
]


def parser_of(stage):
    (path,) = ROOT.glob(SCRIPTS[stage] + ".py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.parser()


@pytest.mark.parametrize(("name", "stage"), SECTIONS)
def test_a_config_is_accepted_and_its_values_arrive(name, stage):
    """A renamed flag, a misspelt key or a value of the wrong type would stop a run that somebody prepared for."""
    path = ROOT / "configs" / name
    section = yaml.safe_load(path.read_text())[stage]
    parser = parser_of(stage)
    needed = [action.option_strings[0] for action in parser._actions if action.required]
    left_out = [f"{flag}=given" for flag in needed if flag.removeprefix("--") not in section]
    values = vars(parser.parse(["--config", str(path), *left_out]))
    for key, value in section.items():
        found = values[key.replace("-", "_")]
        assert plain(found) in (value, [value]), key


def plain(value):
    """A flag's value as YAML has it."""
    if isinstance(value, list):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def test_the_kimi_config_has_room_for_thinking_answers_in_every_stage():
    """8,192 tokens of prompt and answer pass from 00 to 03: what one stage lets through the next one takes whole."""
    config = yaml.safe_load((ROOT / "configs" / "kimi_k25.yaml").read_text())
    made = config["generate"]["max-model-len"]
    assert made >= config["generate"]["max-tokens"] >= 8192
    assert made <= config["prepare"]["max-seq-len"] <= config["extract"]["max-seq-len"]
    assert config["prepare"]["max-seq-len"] <= config["train"]["batch-tokens"]
    paths = {stage: values["model-path"] for stage, values in config.items() if "model-path" in values}
    assert len(set(paths.values())) == 1 and len(paths) == 4
    assert config["prepare"]["input"] == [config["generate"]["output"]]
    assert config["extract"]["prepared-data"] == config["prepare"]["output-dir"] + "/tokenized_data.jsonl"
    assert config["train"]["hidden-states"] == config["extract"]["output-dir"]
    assert config["evaluate"]["draft"] == config["train"]["output-dir"] + "/draft"
