"""The targets and Transformers' states, shared by the tests that run in .venv-legacy."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import targets


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    targets.build_targets(root)
    return root


@pytest.fixture(scope="session")
def reference(models) -> Callable[[str], targets.Reference]:
    """reference(target): Transformers' states, the model loaded once; kimi has the weights of deepseek."""
    load = functools.cache(lambda name: targets.Reference(models, name))
    return lambda name: load("deepseek" if name == "kimi" else name)
