"""Tree reduction of delayed statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dask import delayed

FAN_IN = 8


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
