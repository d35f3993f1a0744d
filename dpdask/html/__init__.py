"""HTML for people: tables that notebooks show of objects, and pages made from templates; every text in them is escaped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template


def make_html_table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[object]], text: str = ""
) -> str:
    """Return a table as HTML."""
    body = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in rows)
    paragraph = f"<p style='max-width: 50em'>{escape(text)}</p>" if text else ""
    table = f"<table><thead><tr>{_cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><p><strong>{escape(title)}</strong></p>{paragraph}{table}</div>"


def _cells(row: Sequence[object], tag: str) -> str:
    return "".join(
        f"<{tag} style='text-align: left'>{'' if cell is None else escape(str(cell))}</{tag}>"
        for cell in row
    )


@functools.cache
def read_file(package: str, name: str) -> str:
    """Return a file in the folder `files` of a package."""
    return files(package).joinpath("files", name).read_text(encoding="utf-8")


def read_style(package: str, name: str) -> str:
    """Return the style that pages share, and then a page's own."""
    return read_file("dpdask.html", "shared.css") + read_file(package, name)


def render_page(
    package: str, name: str, filters: Mapping[str, Callable[..., object]], values: Mapping[str, Any]
) -> str:
    """Return a page; every value in it is escaped, unless the template says that it is safe.

    Parameters
    ----------
    values
        What it shows, by name; one that is missing is an error.
    """
    return _compile(package, name, tuple(filters.items())).render(values)


@functools.lru_cache(maxsize=8)
def _compile(
    package: str, name: str, filters: tuple[tuple[str, Callable[..., object]], ...]
) -> Template:
    from jinja2 import Environment, StrictUndefined  # schemas show tables, and need no templates

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= dict(filters)
    return environment.from_string(read_file(package, name))
