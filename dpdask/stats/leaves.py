"""The arrays and numbers of a statistic's value, and the value again from them: a template, the value of no rows, tells what it is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def list_leaves(value: Any, template: Any) -> Iterator[NDArray[Any]]:
    """Yield the arrays and numbers of a value, in a fixed order.

    Parameters
    ----------
    value
        Frozen dataclasses, mappings and sequences of arrays and numbers. All else is what the template has there.
    template
        A value of the same statistic.

    Raises
    ------
    TypeError
        If the value is not made as the template is.
    """
    if type(value) is not type(template):
        raise TypeError(type(value).__name__)
    if isinstance(value, np.ndarray | np.generic | int | float):
        yield np.asarray(value)
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from list_leaves(getattr(value, each.name), getattr(template, each.name))
    elif isinstance(value, Mapping) and list(value) == list(template):
        for key in value:
            yield from list_leaves(value[key], template[key])
    elif isinstance(value, tuple | list) and len(value) == len(template):
        for one, other in zip(value, template, strict=True):
            yield from list_leaves(one, other)
    elif value != template:
        raise TypeError(type(value).__name__)


def replace_leaves(template: Any, leaves: Iterator[NDArray[Any]]) -> Any:
    """Return the value whose arrays and numbers `list_leaves` yielded.

    Parameters
    ----------
    template
        As for `list_leaves`.
    leaves
        The arrays and numbers.
    """
    if isinstance(template, np.ndarray):
        return next(leaves)
    if isinstance(template, np.generic | int | float):
        return type(template)(next(leaves)[()])
    if dataclasses.is_dataclass(template) and not isinstance(template, type):
        return dataclasses.replace(
            template, **{each.name: replace_leaves(getattr(template, each.name), leaves) for each in dataclasses.fields(template)}
        )
    if isinstance(template, Mapping):
        return {key: replace_leaves(each, leaves) for key, each in template.items()}
    if isinstance(template, tuple | list):
        return type(template)(replace_leaves(each, leaves) for each in template)
    return template
