"""The budget that a steward declares, its division among columns, and what it means in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

from pydantic import Field

from dpdask.documents import Document
from dpdask.errors import SpecError

MAX_EPSILON = 100.0


class UnitColumn(Document):
    """All rows that share a column's value, of which at most `max_rows` are released."""

    column: str = Field(min_length=1)
    max_rows: int = Field(ge=1)


class Budget(Document):
    """What a job promises.

    Attributes
    ----------
    epsilon
        ε, in (0, 100].
    delta
        δ; the row mechanisms need none, so it must be 0.
    adjacency
        `replace-one`: tables are neighbours when one row has other private values. The number of rows and every kept
        column are public.
    unit
        `row`: the thing protected is one row. A person with k rows is protected by k·ε only. `{column, max_rows}`: all
        rows that share the column's value, a person for instance; at most `max_rows` of them are released.
    """

    epsilon: float = Field(gt=0, le=MAX_EPSILON, allow_inf_nan=False)
    delta: Literal[0] = 0
    adjacency: Literal["replace-one"] = "replace-one"
    unit: Literal["row"] | UnitColumn = "row"

    @property
    def unit_column(self) -> UnitColumn | None:
        """The unit's column and bound, or None when the unit is the row."""
        return self.unit if isinstance(self.unit, UnitColumn) else None


def split_epsilon(epsilon: float, columns: tuple[str, ...], weights: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return each column's part of ε, rounded down so that the parts never sum to more than ε.

    Parameters
    ----------
    epsilon
        The row's whole ε.
    columns
        The privatised columns.
    weights
        Positive weights, one per column; equal if not given.

    Raises
    ------
    SpecError
        If the weights do not name exactly the columns, one is not positive and finite, or a column's part rounds to 0.
    """
    weights = weights if weights is not None else dict.fromkeys(columns, 1.0)
    if set(weights) != set(columns):
        raise SpecError("weights must name exactly the privatised columns", "mechanism.weights", "give each of them one weight")
    if not all(math.isfinite(weight) and weight > 0 for weight in weights.values()):
        raise SpecError("weights must be positive and finite", "mechanism.weights", "drop a column rather than give it none of the budget")
    total = sum(Fraction(weight) for weight in weights.values())
    parts = {name: _floor(Fraction(epsilon) * Fraction(weights[name]) / total) for name in columns}
    if not all(parts.values()):
        raise SpecError("a weight is too small: its column's part of ε is 0", "mechanism.weights", "bring the weights closer together")
    return parts


def _floor(exact: Fraction) -> float:
    rounded = float(exact)
    return math.nextafter(rounded, 0.0) if Fraction(rounded) > exact else rounded


def guarantee_text(budget: Budget, protected: str, unprotected: str) -> str:
    """Return the promise in words, with who is not covered in the same breath.

    Notes
    -----
    The attacker's power is Lemma 1 of Bi & Shen (after Wasserman & Zhou 2010): testing "this row had value a, not b" at
    level γ on one ε-private release has power at most γ·exp(ε).
    """
    epsilon = repr(budget.epsilon).removesuffix(".0")  # every digit: a rounded ε could be less than what is paid
    power = min(100.0, math.ceil(50 * math.exp(budget.epsilon)) / 10)  # rounded up, it is a bound
    unit = budget.unit_column
    whose, what, many, tested = "Each released row's private values", "one row", "a person with k released rows is protected by k·ε", "a row"
    if unit is not None:
        whose = f"All private values of all released rows that share a {unit.column}"
        what = f"the rows of one {unit.column}, of which at most {unit.max_rows} are released"
        many = f"a person with several {unit.column} values is protected by ε for each"
        tested = f"a {unit.column}'s rows"
    return (
        f"{whose} are ε = {epsilon} differentially private (δ = 0, {budget.adjacency}, unit: {what}). "
        f"Protected: {protected}. Not protected: {unprotected}. "
        f"Kept columns, the number of rows, their order and which rows are there are published as they are; {many}. "
        f"An attacker who tests at the 5 % level whether {tested} had one value rather than another is right with probability at most {power:.1f} %"
        + (", which is no protection worth the name." if budget.epsilon >= 3 else ".")
    )
