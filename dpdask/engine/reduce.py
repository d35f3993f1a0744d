"""Merging in a tree with fan-in 8: delayed values across tasks, plain ones within a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from dask import delayed

FAN_IN = 8

Value = TypeVar("Value")


def tree_reduce(leaves: Sequence[Any], merge: Callable[[list[Any]], Any], name: str) -> Any:
    """Return one delayed value: the leaves merged in a tree with fan-in 8, in their order.

    Parameters
    ----------
    leaves
        Delayed values, at least one.
    merge
        Merges a list of neighbours.
    name
        Prefix of the task names.

    Notes
    -----
    The tree's shape depends on the number of leaves alone, so a merge that rounds gives the same bytes everywhere.
    """
    level = 0
    nodes = list(leaves)
    while len(nodes) > 1 or level == 0:
        level += 1
        groups = [nodes[start : start + FAN_IN] for start in range(0, len(nodes), FAN_IN)]
        nodes = [delayed(merge, pure=False)(group, dask_key_name=f"{name}-{level}-{index}") for index, group in enumerate(groups)]
    return nodes[0]


class TreeFold(Generic[Value]):
    """Merges a stream of values as a tree with fan-in 8 would, holding few of them at a time.

    Parameters
    ----------
    merge
        Merges a list of neighbours.
    """

    def __init__(self, merge: Callable[[list[Value]], Value]) -> None:
        self._merge = merge
        self._levels: list[list[Value]] = [[]]

    def add(self, value: Value) -> None:
        """Take the next value."""
        level = 0
        self._levels[0].append(value)
        while len(self._levels[level]) == FAN_IN:
            merged = self._merge(self._levels[level])
            self._levels[level] = []
            level += 1
            if level == len(self._levels):
                self._levels.append([])
            self._levels[level].append(merged)

    def result(self) -> Value:
        """Return all values merged, in their order; there must be at least one."""
        return self._merge([value for level in reversed(self._levels) for value in level])
