"""What is written for the eye: HTML pages and Markdown, from the templates beside this module."""

from pathlib import Path
from typing import Any

from eagle3 import files

TEMPLATES = Path(__file__).with_name("templates")


def render(template: str, **values: Any) -> str:
    """A template with these values; whatever it is given is escaped, but in Markdown."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=lambda name: name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def write(path: Path, text: str) -> None:
    """Write a page, whole or not at all."""
    with files.atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
