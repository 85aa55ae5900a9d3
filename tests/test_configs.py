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
        assert (str(found) if isinstance(found, Path) else found) == value, key
