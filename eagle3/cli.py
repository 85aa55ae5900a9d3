"""What every command shares: flags, the YAML config under them, exit codes, one clear line for an error, colours.

A script is `cli.run(parser, check, work)`: `check(args)` does everything that can be known before the expensive
part and returns a plan, `work(plan)` does the stage. Nothing here imports torch, so `--help` is quick.
"""

import argparse
import json
import math
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

from eagle3 import __version__

STAGES = ("generate", "prepare", "extract", "train", "evaluate")
DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
EXIT_CODES = (
    f"exit codes: {DONE} done, {FAILED} failed while working, {REFUSED} refused before working, "
    f"{INTERRUPTED} interrupted"
)

NUMBERS = re.compile(r"-?[\d.]+([ ,]+-?[\d.]+)+")  # what YAML reads as one string: 2 30 58 60

Plan = TypeVar("Plan")
Number = TypeVar("Number", int, float)


class Help(argparse.RawDescriptionHelpFormatter):
    """Help that says the default of each flag that has one, as wide as the terminal up to 120 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(shutil.get_terminal_size((100, 24)).columns, 120))

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if action.required or default is False or default in (None, argparse.SUPPRESS, [], {}) or "default: " in text:
            return text
        said = " ".join(map(str, default)) if isinstance(default, list) else "yes" if default is True else default
        return f"{text} (default: {said})"


class Tool(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    again = ""  # what somebody who interrupts it should know

    def __init__(self, prog: str | None, doc: str | None) -> None:
        super().__init__(prog, description=doc, epilog=EXIT_CODES, formatter_class=Help, allow_abbrev=False)
        self.add_argument("--version", action="version", version=f"eagle3-train {__version__}")

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse(self, argv: list[str] | None = None) -> argparse.Namespace:
        """The arguments; an empty one is refused: it is an unset variable of a shell, and would mean the folder at hand
        to a flag that takes a path."""
        argv = sys.argv[1:] if argv is None else argv
        flag = self.prog
        for text in argv:
            flag = text.partition("=")[0] if text.startswith("--") else flag
            if text in ("", f"{flag}="):
                self.error(f"{flag}: an empty value was given; is a shell variable unset?")
        return self.parse_args(argv)


class Parser(Tool):
    """The argument parser of one stage, whose flags may stand in a YAML file."""

    again = "; the same command goes on"

    def __init__(self, stage: str, doc: str) -> None:
        super().__init__(None, doc)
        assert stage in STAGES, stage
        self.stage = stage
        self.add_argument(
            "--config", type=Path, metavar="FILE.yaml", help="flags from a YAML file; a flag given here wins"
        )

    def parse(self, argv: list[str] | None = None) -> argparse.Namespace:
        """The arguments of `argv` over those of its `--config` file, checked by the same rules."""
        argv = sys.argv[1:] if argv is None else argv
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        finder.add_argument("--config", type=Path)
        try:
            config = finder.parse_known_args(argv)[0].config
            return super().parse((self._config_arguments(config) if config else []) + argv)
        except (ValueError, OSError) as error:
            self.error(str(error))

    def _config_arguments(self, path: Path) -> list[str]:
        """The YAML file's keys for this stage, as command-line arguments."""
        known = {s[2:]: a for s, a in self._option_string_actions.items() if s.startswith("--")}
        arguments: list[str] = []
        for name, value in config_values(path, self.stage).items():
            if name not in known or name in ("config", "help", "version"):
                raise ValueError(f"{path}: unknown key {name} for {self.prog}: its flags are {', '.join(known)}")
            arguments += _as_arguments(name, value, known[name])
        return arguments


def config_values(path: Path, stage: str) -> dict[str, Any]:
    """A config file's settings for one stage by flag name: its flat keys, over them the section named after the stage.

    A section of another stage is left alone. Raises ValueError for a file that is not a mapping, or says a flag twice.
    """
    import yaml

    if not path.is_file():
        raise ValueError(f"--config {path}: no such file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected `flag: value` lines, found {type(content).__name__}")
    sections = {k: v or {} for k, v in content.items() if k in STAGES}
    if bad := [k for k, v in sections.items() if not isinstance(v, dict)]:
        raise ValueError(f"{path}: section {bad[0]!r} must hold `flag: value` lines")
    flat = {k: v for k, v in content.items() if k not in STAGES}
    return _by_flag(path, flat) | _by_flag(path, sections.get(stage, {}))


def _by_flag(path: Path, mapping: dict[Any, Any]) -> dict[str, Any]:
    """A mapping of a config file under the names of the flags, where `_` is as good as `-`."""
    spelled: dict[str, Any] = {}
    for key in mapping:
        name = str(key).replace("_", "-")
        if name in spelled:
            raise ValueError(f"{path}: {spelled[name]!r} and {key!r} are one flag; keep one of them")
        spelled[name] = key
    return {name: mapping[key] for name, key in spelled.items()}


def _as_arguments(name: str, value: Any, action: argparse.Action) -> list[str]:
    if isinstance(value, bool):
        if isinstance(action, argparse.BooleanOptionalAction):
            return [f"--{name}" if value else f"--no-{name}"]
        if action.nargs != 0:
            raise ValueError(f"config key {name!r} takes a value, not {str(value).lower()}")
        return [f"--{name}"] if value else []
    if value is None or value == "":
        return []
    if action.nargs == 0:
        raise ValueError(f"config key {name!r} takes true or false, not {value!r}")
    if isinstance(value, list):
        if action.nargs is None:
            raise ValueError(f"config key {name!r} takes one value, not a list: {value}")
        return [f"--{name}", *map(str, value)]
    if isinstance(value, dict):
        return [f"--{name}={json.dumps(value)}"]
    if isinstance(value, str) and action.nargs == "+" and NUMBERS.fullmatch(value):
        raise ValueError(f"config key {name!r} takes a list: write [{', '.join(re.findall(r'[^ ,]+', value))}]")
    return [f"--{name}={value}"]


def positive_int(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    return _within(int, text, 1, math.inf, "a whole number of at least 1")


def fraction(text: str) -> float:
    """An argparse type: a number above 0 and at most 1."""
    return _within(float, text, sys.float_info.min, 1, "a number above 0 and at most 1")


def share(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    return _within(float, text, 0, 1, "a number from 0 to 1")


def positive(text: str) -> float:
    """An argparse type: a finite number above 0."""
    return _within(float, text, sys.float_info.min, sys.float_info.max, "a number above 0")


def not_negative(text: str) -> float:
    """An argparse type: a finite number of at least 0."""
    return _within(float, text, 0, sys.float_info.max, "a number of at least 0")


def percent(text: str) -> float:
    """An argparse type: a number from 0 to 100."""
    return _within(float, text, 0, 100, "a number from 0 to 100")


def natural(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    return _within(int, text, 0, math.inf, "a whole number of at least 0")


def _within(kind: Callable[[str], Number], text: str, least: float, most: float, expected: str) -> Number:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:  # NaN is in no range
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text}")
    return value


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}: {text!r}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, found {text!r}")
    return value


def add_model(parser: Tool, *, required: bool = True, chat: bool = False) -> None:
    """The flags that name a target; `chat`: also how its chat template is used."""
    add = parser.add_argument_group("target").add_argument
    add("--model-path", type=Path, required=required, metavar="DIR", help="the target's folder")
    add("--trust-remote-code", action="store_true", help="run the Python code in the target's folder (default: no)")
    if chat:
        add(
            "--chat-template-kwargs", type=json_object, default={}, metavar="JSON",
            help="for the chat template, such as '{\"thinking\": false}'; the same in every stage (default: none)",
        )  # fmt: skip


def add_engine(parser: Tool) -> argparse._ArgumentGroup:
    """How much of the machine an engine takes; the group is for a stage's own flags as well."""
    group = parser.add_argument_group("engine")
    group.add_argument("--tp-size", type=positive_int, default=1, metavar="N", help="GPUs of an engine")
    group.add_argument(
        "--gpu-memory-utilization", type=fraction, default=0.9, metavar="SHARE", help="of each GPU's memory"
    )
    return group


def run(parser: Tool, check: Callable[[argparse.Namespace], Plan], work: Callable[[Plan], None]) -> NoReturn:
    """Parse, check, work; exit with the code that says how far it came.

    InterruptedError is a stop that was asked for, such as by SIGTERM, its text the last line.
    """
    args = parser.parse()
    code = REFUSED
    try:
        plan = check(args)
        code = FAILED
        work(plan)
        code = DONE
    except KeyboardInterrupt:
        _last_line(parser, f"interrupted by Ctrl-C{parser.again}")
        code = INTERRUPTED
    except InterruptedError as stopped:
        _last_line(parser, describe(stopped))
        code = INTERRUPTED
    except (ValueError, OSError) as error:
        _last_line(parser, f"error: {describe(error)}")
    except Exception as error:
        traceback.print_exc()
        _last_line(parser, f"failed: {type(error).__name__}: {describe(error)} (traceback above)")
        code = FAILED
    sys.exit(code)


def describe(error: BaseException) -> str:
    """An error's text; never empty, since an empty one says nothing at 3 a.m."""
    return str(error) or f"{type(error).__name__} without a message"


def colours(stream: TextIO) -> bool:
    """Whether to colour what is written there: a terminal that is not dumb, unless NO_COLOR (no-color.org) is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _last_line(parser: Tool, text: str) -> None:
    if sys.stdout:  # closed by the caller, as in `>&-`
        sys.stdout.flush()
    print(f"{parser.prog}: {text}", file=sys.stderr, flush=True)
