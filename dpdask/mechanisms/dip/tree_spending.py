"""How the ε and δ of a release along a tree are spent: on the noisy tables, and on each column of each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from dpdask.errors import SpecError
from dpdask.mechanisms.dip.tree_tables import TreeNoise, plan_tree_noise
from dpdask.privacy import Budget, split_epsilon
from dpdask.privacy.accountant import epsilon as least_epsilon
from dpdask.privacy.events import Composed, LocalRelease
from dpdask.privacy.rounding import rounded_down, rounded_up_sum
from dpdask.references.tree import Tree

_FIRST_STEP = 1e-9  # relative: by how much noise grows until the accountant agrees that everything fits


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSpending:
    """The parts of a budget; all rounded down.

    Attributes
    ----------
    noise
        Of the one- and two-way tables.
    tables
        What these may cost, with all of δ.
    row
        For each privatised column what one row's release may cost.
    rows_per_unit
        How many rows of a unit are released at most: the unit pays each column's row part so many times.
    """

    noise: TreeNoise
    tables: float
    row: Mapping[str, float]
    rows_per_unit: int

    @property
    def reference(self) -> Mapping[str, float]:
        """Nothing by column: the tables are of all columns together."""
        return {}

    @property
    def row_total(self) -> float:
        """What one row's release may cost over all columns, rounded up."""
        return rounded_up_sum(self.row.values())

    def events(self, budget: Budget) -> Composed:
        """Return what will happen: noise on every table, and the rows' own releases."""
        return _composed(self.noise, self.row_total, self.rows_per_unit, budget)

    def exact(self, budget: Budget, row_epsilon: float) -> float:
        """Return the ε, at the budget's δ, of a fitted release whose whole row costs `row_epsilon`: never above the budget's."""
        return least_epsilon(_composed(self.noise, row_epsilon, self.rows_per_unit, budget), budget.delta)


def spend_tree(budget: Budget, tree: Tree, columns: tuple[str, ...], weights: Mapping[str, float] | None = None) -> TreeSpending:
    """Return how a budget is spent on a tree of columns.

    Parameters
    ----------
    budget
        What the job promises its unit; with a δ the tables' noise is Gaussian, without it is Laplace.
    tree
        Which share the tables take.
    columns
        The privatised columns.
    weights
        How the rows' part is shared among them; equally if not given.

    Raises
    ------
    SpecError
        If the weights are wrong, a part rounds to 0, or a row's part is so large that the accountant proves nothing beside δ.

    Notes
    -----
    ε = ε_tables + max_rows · Σ ε_row, a sum that holds at any δ. The accountant composes the very events, and could round
    them to more than the sum: then the tables get as much more noise as it takes.
    """
    rows = budget.unit_column.max_rows if budget.unit_column is not None else 1
    of_tables, of_rows = tree.split(budget.epsilon)
    parts = split_epsilon(rounded_down(Fraction(of_rows) / rows), columns, weights)
    noise = plan_tree_noise(budget.model_copy(update={"epsilon": of_tables}), len(columns))
    step = _FIRST_STEP
    while step < 1.0:
        spending = TreeSpending(noise=noise, tables=of_tables, row=parts, rows_per_unit=rows)
        if least_epsilon(spending.events(budget), budget.delta) <= budget.epsilon:
            return spending
        noise, step = noise.times(1.0 + step), 2.0 * step
    raise SpecError("so large an ε of rows cannot be composed with a δ", "privacy.epsilon", "lower it, or set privacy.delta to 0")


def _composed(noise: TreeNoise, row_epsilon: float, rows: int, budget: Budget) -> Composed:
    unit = "row" if budget.unit_column is None else f"column {budget.unit_column.column}"
    released = (LocalRelease(epsilon=row_epsilon, n=rows, unit=unit),) if row_epsilon else ()
    return Composed(events=(*noise.event.events, *released), unit=unit)
