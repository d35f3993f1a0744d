"""Pages from templates: HTML files in the folder `files` of a part of the package, and the style that pages share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template


@functools.cache
def read_file(package: str, name: str) -> str:
    """Return a file in the folder `files` of a package.

    Parameters
    ----------
    package
        The package's name.
    name
        The file's name.
    """
    return files(package).joinpath("files", name).read_text(encoding="utf-8")


def read_style(package: str, name: str) -> str:
    """Return the style that pages share, and then a page's own.

    Parameters
    ----------
    package, name
        As for `read_file`.
    """
    return read_file("dpdask.html", "shared.css") + read_file(package, name)


def render_page(package: str, name: str, filters: Mapping[str, Callable[..., object]], values: Mapping[str, Any]) -> str:
    """Return a page; every value in it is escaped, unless the template says that it is safe.

    Parameters
    ----------
    package, name
        The template, as for `read_file`.
    filters
        How the template shows values, by name.
    values
        What it shows, by name; one that is missing is an error.
    """
    return _compile(package, name, tuple(filters.items())).render(values)


@functools.lru_cache(maxsize=8)
def _compile(package: str, name: str, filters: tuple[tuple[str, Callable[..., object]], ...]) -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= dict(filters)
    return environment.from_string(read_file(package, name))
