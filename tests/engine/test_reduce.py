"""The tree of a reduction: its order, its shape, and that nothing but the number of leaves decides it."""

from __future__ import annotations

import dask
import pytest
from dask import delayed

from dpdask.engine.compute import tree_reduce
from dpdask.stats.statistic import FAN_IN


def nest(nodes: list[object]) -> tuple[object, ...]:
    return tuple(nodes)


def leaves_of(node: object) -> list[int]:
    return [node] if isinstance(node, int) else [leaf for part in node for leaf in leaves_of(part)]  # type: ignore[union-attr]


def depth(node: object) -> int:
    return 0 if isinstance(node, int) else 1 + max(map(depth, node))  # type: ignore[call-overload]


def tree(n_leaves: int) -> object:
    leaves = [delayed(index, name=f"leaf-{index}") for index in range(n_leaves)]
    return tree_reduce(leaves, nest, "tree").compute(scheduler="synchronous", optimize_graph=False)


@pytest.mark.parametrize("n_leaves", [1, 2, 7, 8, 9, 64, 65, 513])
def test_order_and_shape(n_leaves: int) -> None:
    found = tree(n_leaves)
    assert leaves_of(found) == list(range(n_leaves))
    expected, width = 1, -(-n_leaves // FAN_IN)
    while width > 1:
        expected, width = expected + 1, -(-width // FAN_IN)
    assert depth(found) == expected


def test_a_node_has_at_most_eight_parts() -> None:
    nodes = [tree(513)]
    while nodes:
        node = nodes.pop()
        if not isinstance(node, int):
            assert 1 <= len(node) <= FAN_IN  # type: ignore[arg-type]
            nodes.extend(node)  # type: ignore[arg-type]


def test_a_merge_that_rounds_gives_the_same_bytes_everywhere() -> None:
    def total(values: list[float]) -> float:
        return sum(values[1:], values[0])

    leaves = [delayed(0.1 * index, name=f"value-{index}") for index in range(1000)]
    whole = tree_reduce(leaves, total, "sum")
    found = {dask.compute(whole, scheduler=scheduler, optimize_graph=False)[0] for scheduler in ("synchronous", "threads", "threads")}
    assert len(found) == 1


def test_no_leaves_is_a_mistake() -> None:
    with pytest.raises(IndexError):
        tree_reduce([], nest, "empty")
