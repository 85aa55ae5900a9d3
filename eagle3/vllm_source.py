"""Which capture route the installed vLLM gives a target, read from its source: no model code is imported."""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from eagle3.patched_forward import FORWARD, LAYER_CALL

INTERFACE, METHOD = "SupportsEagle3", "set_aux_hidden_state_layers"
MODELS = "model_executor/models"


def installed() -> Path:
    """The folder of the vllm package, found without importing it. ValueError if there is none."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ValueError("vllm is not installed in this Python (pip install -r requirements.txt)")
    return Path(spec.origin).parent


def capture_route(architecture: str, has_scoring_func: bool, vllm: Path) -> str:
    """The route for a model class and why. `vllm`: the package's folder.

    `has_scoring_func`: whether the target's config has that key, by which the DeepseekV2 family is known. ValueError
    if there is no route, LookupError if vLLM itself does not name the class (a plugin may).
    """
    models = vllm / MODELS
    place = _registered(models / "registry.py", architecture)
    if place is None:
        raise LookupError(f"vllm/{MODELS}/registry.py does not name {architecture}: known once it is loaded")
    for found in _ancestry(models, *place):
        if found.name == INTERFACE or METHOD in _methods(found):
            return f"{METHOD}: {architecture} in {place[0]}.py has it through {found.name}"
    if not has_scoring_func:
        raise ValueError(
            f"{architecture} in this vLLM has no {METHOD}, and is not of the DeepseekV2 family: newer vLLM"
        )
    if misfits := _misfits(models):
        raise ValueError(f"{architecture} in this vLLM has no {METHOD}, and {'; '.join(misfits)}: use a newer vLLM")
    return f"patched DeepseekV2Model.forward: {architecture} in {place[0]}.py has no {METHOD}"


def _misfits(models: Path) -> list[str]:
    """The checks of patched_forward.misfits, on the source."""
    classes = {c.name: c for c in ast.walk(_parsed(models / "deepseek_v2.py")) if isinstance(c, ast.ClassDef)}
    expected = {"DeepseekV2Model": ["self", *FORWARD], "DeepseekV2DecoderLayer": ["self", *LAYER_CALL]}
    found = []
    for name, parameters in expected.items():
        forward = _methods(classes[name]).get("forward") if name in classes else None
        given = [a.arg for a in forward.args.args] if forward else None
        if given != parameters:
            found.append(f"{name}.forward takes {given}, expected {parameters}")
    if "embed_input_ids" not in _methods(classes.get("DeepseekV2Model")):
        found.append("DeepseekV2Model has no embed_input_ids")
    return found


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _registered(registry: Path, architecture: str) -> tuple[str, str] | None:
    """(module, class) of an architecture, from the registry's tables."""
    for node in ast.walk(_parsed(registry)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == architecture and isinstance(value, ast.Tuple):
                    return tuple(ast.literal_eval(value))
    return None


def _ancestry(models: Path, module: str, name: str) -> Iterator[ast.ClassDef]:
    """A model class and the classes it inherits from, as far as they are defined among vLLM's models."""
    path = models / f"{module}.py"
    if not path.is_file():
        return
    tree = _parsed(path)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield node
            for base in node.bases:
                base = base.value if isinstance(base, ast.Subscript) else base
                if isinstance(base, ast.Name):
                    yield from _ancestry(models, module, base.id)
            return
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            yield from _ancestry(models, (node.module or "").rpartition(".")[2], name)


def _methods(node: ast.ClassDef | None) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)} if node else {}
