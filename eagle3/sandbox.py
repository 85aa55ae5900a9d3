"""The sandbox in which Transformers renders a chat template, without the questions that it asks again and again."""

from typing import Any

Method = type("".strip)  # one that is written in C; functions like `len` are of this type, too


def quicken(template: str) -> None:
    """Have the sandbox of `template` judge once what follows from an object's type and an attribute's name, and call
    what it would call in any case without a detour: macros, and methods of dict and str.

    What a template may read and call stays exactly as it was. Those questions took a third of a rendering.
    """
    from jinja2.runtime import Macro
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(template).environment
    judge, known = type(environment), {}
    methods = {kind: _methods(environment, kind()) for kind in (dict, str)}

    def is_safe_attribute(owner: Any, name: str, value: Any) -> bool:
        key = (type(owner), name)
        if key not in known:
            known[key] = judge.is_safe_attribute(environment, owner, name, value)
        return known[key]

    def look_up(owner: Any, name: str) -> Any:
        if name in methods.get(type(owner), ()):
            return getattr(owner, name)
        return judge.getattr(environment, owner, name)

    def call(context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        is_macro = type(function) is Macro
        if not is_macro and not (type(function) is Method and type(function.__self__) in methods):
            return judge.call(environment, context, function, *args, **kwargs)
        kwargs.pop("_loop_vars", None)  # of the compiled template, for functions that ask for its context
        kwargs.pop("_block_vars", None)
        return function(context.eval_ctx, *args, **kwargs) if is_macro else function(*args, **kwargs)

    environment.is_safe_attribute, environment.getattr, environment.call = is_safe_attribute, look_up, call


def _methods(environment: Any, owner: Any) -> frozenset[str]:
    """The names that the sandbox lets a template read of `owner`, and gives as they are (not so str.format)."""
    found = {name: getattr(owner, name) for name in dir(owner)}
    return frozenset(
        name
        for name, value in found.items()
        if environment.is_safe_attribute(owner, name, value) and environment.wrap_str_format(value) is None
    )
