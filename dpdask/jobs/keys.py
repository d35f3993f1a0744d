"""Errors of mechanisms in the words of a job: parameters in backquotes become the keys under which a job has them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from dpdask.errors import DpdaskError
from dpdask.mechanisms.registry import parameters

Args = ParamSpec("Args")
Result = TypeVar("Result")

_PRIVACY = {"epsilon", "delta", "adjacency", "unit"}
_PARAMETER = re.compile(r"`(?P<root>[a-z_]+)(?P<rest>(?:\.[^`]*)?)`")


def name_keys(text: str | None) -> str | None:
    """Return a text with its parameters as keys of a job: `epsilon` becomes privacy.epsilon, `bins` mechanism.bins."""
    return None if text is None else _PARAMETER.sub(_key, text)


def _key(found: re.Match[str]) -> str:
    root, rest = found["root"], found["rest"]
    if root in _PRIVACY:
        return f"privacy.{root}{rest}"
    return f"mechanism.{root}{rest}" if root in parameters() else found[0]


def raises_in_keys(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return a function whose errors name the keys of a job."""

    @wraps(function)
    def speaking(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except DpdaskError as error:
            error.what, error.where, error.hint = name_keys(error.what) or "", name_keys(error.where), name_keys(error.hint)
            raise

    return speaking
