"""The numbered scripts, run as a user runs them."""

import importlib
import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from eagle3 import cli

ROOT = Path(__file__).resolve().parent.parent


def run(script: str, *flags: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script from the repository's root; stdout and stderr are captured as one log would hold them."""
    command = [sys.executable, script, *map(str, flags)]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"} | (env or {})
    return subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600
    )


def succeed(script: str, *flags: object) -> str:
    """The log of a run that must end with exit code 0."""
    result = run(script, *flags)
    assert result.returncode == 0, result.stdout[-6000:]
    return result.stdout


def run_here(script: str, *flags: object) -> tuple[int, str]:
    """Exit code and log of a script run inside this process, which has imported torch and vLLM once."""
    module, log = importlib.import_module(script.removesuffix(".py")), io.StringIO()
    argv = [script, *map(str, flags)]
    with mock.patch.object(sys, "argv", argv), redirect_stdout(log), redirect_stderr(log):
        try:
            cli.run(module.parser(), module.check, module.work)
        except SystemExit as end:
            return int(end.code), log.getvalue()
