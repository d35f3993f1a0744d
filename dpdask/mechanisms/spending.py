"""How a job's ε is spent: on the reference, on each column of each row, and as the events that a ledger is charged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from dpdask.privacy import Budget, split_epsilon
from dpdask.privacy.events import Composed, DiscreteLaplace, LocalRelease
from dpdask.privacy.rounding import rounded_down, rounded_up_sum
from dpdask.references import Histogram, Reference
from dpdask.references.histogram import histogram_event


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """The parts of ε; all rounded down.

    Attributes
    ----------
    reference
        For each privatised column what its noisy histogram may cost the unit; empty for other references.
    row
        For each privatised column what one row's release may cost.
    rows_per_unit
        How many rows of a unit are released at most: the unit pays each column's row part so many times.
    """

    reference: Mapping[str, float]
    row: Mapping[str, float]
    rows_per_unit: int

    @property
    def row_total(self) -> float:
        """What one row's release may cost over all columns, rounded up."""
        return rounded_up_sum(self.row.values())

    def events(self, budget: Budget) -> Composed:
        """Return what will happen: a noisy histogram of each column, if there is one, and the rows' own releases."""
        unit = "row" if budget.unit_column is None else f"column {budget.unit_column.column}"
        histograms: list[DiscreteLaplace] = [histogram_event(epsilon, budget.adjacency, self.rows_per_unit) for epsilon in self.reference.values()]
        return Composed(events=(*histograms, LocalRelease(epsilon=self.row_total, n=self.rows_per_unit, unit=unit)))


def spend(budget: Budget, reference: Reference, columns: tuple[str, ...], weights: Mapping[str, float] | None = None) -> Spending:
    """Return how a budget is spent.

    Parameters
    ----------
    budget
        What the job promises its unit.
    reference
        A `Histogram` takes its share; other references cost nothing.
    columns
        The privatised columns.
    weights
        How both parts are shared among them; equally if not given.

    Raises
    ------
    SpecError
        If the weights are wrong, or a part rounds to 0.

    Notes
    -----
    ε = Σ ε_reference + max_rows · Σ ε_row: the unit is in every histogram with all its released rows (sensitivity
    2 · max_rows), and each of them is randomised on its own.
    """
    rows = budget.unit_column.max_rows if budget.unit_column is not None else 1
    of_reference, of_rows = reference.split(budget.epsilon) if isinstance(reference, Histogram) else (0.0, budget.epsilon)
    row = rounded_down(Fraction(of_rows) / rows)
    return Spending(
        reference=split_epsilon(of_reference, columns, weights) if isinstance(reference, Histogram) else {},
        row=split_epsilon(row, columns, weights),
        rows_per_unit=rows,
    )
