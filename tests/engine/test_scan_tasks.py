"""Which parts of a table one task counts: neighbours with enough rows together, whoever computes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dpdask.engine.scan import _groups


@dataclass(frozen=True)
class Part:
    """A part of a table."""

    number: int
    n_rows: int | None


@pytest.mark.parametrize(
    ("sizes", "rows_per_task", "expected"),
    [
        ([1000] * 100, None, [3] * 33 + [1]),  # a 32nd of the table
        ([2**17] * 1000, None, [8] * 125),  # but no more than 2**20 rows
        ([2**21, 10, 10], None, [1, 2]),
        ([5], None, [1]),
        ([0, 0, 0], None, [3]),
        ([None] * 3, None, [1, 1, 1]),
        ([100] * 10, 250, [2] * 5),
        ([], None, []),
    ],
)
def test_a_task_counts_enough_rows(sizes, rows_per_task, expected):
    parts = [(Part(number, size), None) for number, size in enumerate(sizes)]
    groups = _groups(parts, rows_per_task)  # type: ignore[arg-type]  # of a part only the rows count
    assert [len(group) for group in groups] == expected
    assert [part.number for group in groups for part, _ in group] == list(range(len(sizes)))
