"""The quickened sandbox refuses, and gives, exactly what the sandbox of Transformers does."""

import pytest
from jinja2 import Environment, Undefined
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

from eagle3 import sandbox

TEMPLATE = "{# quickened #}{{ messages }}"
EMPTY = iter(())
OWNERS = (
    {}, {"get": 1, "role": "user", "x y": 2}, [], set(), "x", 1, dict, len, TEMPLATE.join, (x for x in ()), object(),
    nothing := lambda: None, nothing.__code__,
)  # fmt: skip
NAMES = sorted({"mro", "_x", "role", "x y", "format", *(name for owner in OWNERS for name in dir(owner))})
TEXTS = {
    "a method": ("{{ m.get('a') }}{{ m.items() | list }}{{ 'a b'.split() }}", {"m": {"a": 1}}),
    "a key that is called like a method": ("{{ m.get }}{{ m['get'] }}{{ m.role }}", {"m": {"get": 1, "role": "r"}}),
    "what is not there": ("{{ m.a is defined }}{{ m.a }}{{ m['a'] }}{{ 'x'.a }}", {"m": {}}),
    "a macro in a loop": (
        "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ kwargs }}{{ varargs }}{% endmacro %}"
        "{% for x in xs %}{{ f(x, 5, 6, c=7) }}{{ f(x) }}{{ loop.index0 }}{{ x.upper() }}{% endfor %}",
        {"xs": ["p", "q"]},
    ),
    "a macro with a caller": (
        "{% macro f(context, function) %}{{ context }}{{ function }}{{ caller() }}{% endmacro %}"
        "{% call f(context=1, function='x') %}said{% endcall %}",
        {},
    ),
    "a macro where text is escaped": (
        "{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f('<') }}"
        "{% autoescape true %}{{ f('<') }}{{ '<' }}{% endautoescape %}{{ f('<') }}",
        {},
    ),
    "a function of Python": ("{{ f(1) }}{{ range(3) | list }}{{ namespace(a=1).a }}{{ dict(a=1) }}", {"f": str}),
    "formatting": ("{{ '{0[a]}{b}'.format(m, b=1) }}{{ '%s' | format(2) }}", {"m": {"a": 1}}),
    "functions that stop an iteration": (
        "{{ f() }}{{ g([]) }}|",
        {"f": iter(()).__next__, "g": lambda x: next(iter(x))},
    ),
    "one of C": ("{{ f(xs) }}|{{ len(xs) }}", {"f": next, "xs": EMPTY, "len": str}),
}
ATTACKS = (
    "m.update({})", "m.__class__.__mro__", "m.pop('a')", "'{0.__class__.__mro__}'.format(m)", "xs.append(1)",
    "f.__globals__.a", "range(100000000)", "g()",
)  # fmt: skip


@pytest.fixture(scope="module")
def environments() -> tuple[Environment, Environment]:
    """The sandbox of Transformers as it is, and one that is quickened."""
    plain = _compile_jinja_template.__wrapped__(TEMPLATE).environment
    sandbox.quicken(TEMPLATE)
    quick = _compile_jinja_template(TEMPLATE).environment
    assert plain is not quick and "getattr" in vars(quick) and "getattr" not in vars(plain)
    return plain, quick


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: type(owner).__name__)
def test_every_attribute_is_given_or_refused_as_before(environments, owner):
    """Of any object a template reads exactly what it read, at the first time and later."""
    for name in NAMES:
        before, first, later = (e.getattr(owner, name) for e in (environments[0], *[environments[1]] * 2))
        assert type(before) is type(first) is type(later), name
        if isinstance(before, Undefined):
            assert before._undefined_exception is later._undefined_exception, name
        elif name not in ("format", "format_map") and not callable(before):
            assert before == first == later, name


@pytest.mark.parametrize("text", TEXTS)
def test_templates_say_the_same(environments, text):
    """Methods, macros, functions and what is undefined come out as they did."""
    source, given = TEXTS[text]
    before, after = (e.from_string(source).render(**given) for e in environments)
    assert before == after


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_stay_refused(environments, attack):
    """What jinja's sandbox refuses to call or to read is refused with the same words."""

    def unsafe() -> None: ...

    unsafe.unsafe_callable = True
    refusals = []
    for environment in environments:
        with pytest.raises((TemplateError, OverflowError)) as error:
            environment.from_string(f"{{{{ {attack} }}}}").render(m={"a": 1}, xs=[], f=unsafe, g=unsafe)
        refusals.append((error.type, str(error.value)))
    assert refusals[0] == refusals[1]
