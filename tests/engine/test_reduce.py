"""The tree of a reduction: its order, its shape, and that nothing but the number of leaves decides it."""

from __future__ import annotations

from dataclasses import dataclass

import dask
import pytest
from dask import threaded
from dask._task_spec import DataNode
from distributed import Client

from dpdask.engine import compute
from dpdask.engine import compute as cluster
from dpdask.engine.compute import Window, add_tree, make_stage, run_stage
from dpdask.errors import DataError
from dpdask.stats.statistic import FAN_IN, TreeFold


def nest(nodes):
    return tuple(nodes)


def leaves_of(node):
    return [node] if isinstance(node, int) else [leaf for part in node for leaf in leaves_of(part)]  # type: ignore[union-attr]


def depth(node):
    if isinstance(node, int):
        return 0
    assert 1 <= len(node) <= FAN_IN  # type: ignore[arg-type]
    return 1 + max(map(depth, node))  # type: ignore[call-overload]


def tree(n_leaves):
    nodes = {f"leaf-{index}": DataNode(f"leaf-{index}", index) for index in range(n_leaves)}
    root = add_tree(nodes, list(nodes), nest, "tree")
    return threaded.get(nodes, root)


@pytest.mark.parametrize("n_leaves", [1, 8, 9, 64, 65, 513])
def test_order_and_shape(n_leaves):
    found = tree(n_leaves)
    assert leaves_of(found) == list(range(n_leaves))
    expected, width = 1, -(-n_leaves // FAN_IN)
    while width > 1:
        expected, width = expected + 1, -(-width // FAN_IN)
    assert depth(found) == expected


@dataclass(frozen=True)
class Rounded:
    """A sum that rounds differently in every other order or grouping."""

    total: float

    def merge(self, *others):
        return Rounded(sum((other.total for other in others), self.total))


def leaf(number, scale):
    return Rounded(scale * number)


def merge(parts):
    return parts[0].merge(*parts[1:])


def whole_tree(values):
    while len(values) > 1:
        values = [merge(values[start : start + FAN_IN]) for start in range(0, len(values), FAN_IN)]
    return values[0]


def fold_stage(n_leaves):
    fold = TreeFold[Rounded]()
    for found in run_stage(
        make_stage(
            "test", leaf, [(number,) for number in range(n_leaves)], 0.1, merge, least=FAN_IN
        )
    ):
        for value in found:
            fold.add(value)
    return fold.tree()


@pytest.mark.parametrize("n_leaves", [1, 73, 1000])
def test_batches_are_branches_of_one_tree(n_leaves, monkeypatch):
    monkeypatch.setattr(compute, "_LARGEST_BATCH", 64)
    expected = whole_tree([leaf(number, 0.1) for number in range(n_leaves)])
    for scheduler in ("synchronous", "threads"):
        with dask.config.set(scheduler=scheduler):
            assert fold_stage(n_leaves) == expected


def test_a_cluster_has_a_window_of_tasks_and_the_driver_few_results(monkeypatch):
    monkeypatch.setattr(cluster, "WINDOW", 200)
    monkeypatch.setattr(compute, "_LARGEST_BATCH", FAN_IN**2)
    running = []
    waiting = []
    submit = Window._submit

    def watch(window):
        submit(window)
        running.append(window._n_running)
        waiting.append(len(window._results))

    monkeypatch.setattr(Window, "_submit", watch)
    expected = whole_tree([leaf(number, 0.1) for number in range(700)])
    with Client(processes=False, n_workers=1, threads_per_worker=2, dashboard_address=None):
        assert fold_stage(700) == expected
    assert max(running) < 200 + compute._LARGEST_BATCH
    assert max(waiting) < 8


def refuse(number, shared):
    raise DataError("wrong", f"{number} {shared}", None)


@pytest.mark.more
def test_a_stage_that_fails_leaves_the_client_connected():
    """The scheduler ends the connection of a client that cancels a task on which others depend."""
    with Client(
        processes=False, n_workers=1, threads_per_worker=2, dashboard_address=None
    ) as client:
        for _ in range(20):
            with pytest.raises(DataError, match="wrong"):
                list(
                    run_stage(
                        make_stage(
                            "test",
                            refuse,
                            [(number,) for number in range(20)],
                            0.1,
                            merge,
                            least=FAN_IN,
                        )
                    )
                )
        assert client.submit(sum, [1, 2]).result(timeout=30) == 3
