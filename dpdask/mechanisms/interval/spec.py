"""Interval privacy: its specification, and what it promises. Every private value is released as a random range, in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any, ClassVar, Literal

import pyarrow as pa

from dpdask.documents import check_all, suggest
from dpdask.errors import SpecError
from dpdask.kernels.rank import MAX_EPSILON as MAX_RANK_EPSILON
from dpdask.kernels.rank import MIN_EPSILON as MIN_RANK_EPSILON
from dpdask.mechanisms.card import Section
from dpdask.mechanisms.interval.card import (
    describe_all_protected,
    describe_all_unprotected,
    describe_widths,
    interval_guarantee,
    interval_section,
    warn_of_wide_ranges,
)
from dpdask.mechanisms.interval.design import Design, IntervalDifferential, find_perturbed, find_reference, make_local_release
from dpdask.mechanisms.interval.release import IntervalRelease, make_released_schema, name_released, tabulate
from dpdask.mechanisms.mechanism import Columns, Mechanism, Spec, Spending
from dpdask.privacy import Budget, split_epsilon
from dpdask.privacy.budget import MAX_EPSILON
from dpdask.privacy.events import Composed
from dpdask.privacy.order import RowOrder
from dpdask.references.statistics import ColumnStatistic
from dpdask.schema import Column, Schema, arrow_type
from dpdask.streams import RunKey


class IntervalSpec(Spec):
    """Random ranges that contain the values, or the perturbed values.

    Attributes
    ----------
    columns
        The design of each privatised column.
    coverage
        Whether `<column>_coverage` is released beside the ends: the range's probability under the design's public reference.
    """

    kind: Literal["interval"] = "interval"
    columns: Mapping[str, Design]
    coverage: bool = False

    @property
    def spends(self) -> bool:
        """Whether a column is perturbed, so that there is an ε."""
        return bool(find_perturbed(self.columns))

    @property
    def least_budget(self) -> Budget | None:
        """The smallest budget that pays for the perturbed columns; None if there are none.

        Raises
        ------
        SpecError
            If no budget can pay for them.
        """
        if not self.spends:
            return None
        epsilon = make_local_release(self.columns).epsilon
        if epsilon > MAX_EPSILON:
            what = f"the perturbed columns spend {epsilon:g} together, and no budget is larger than {MAX_EPSILON:g}"
            raise SpecError(what, "`columns`", f"lower {_largest_epsilon(self.columns)}")
        return Budget(epsilon=epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRangesMechanism(Mechanism):
    """Interval privacy of every private column, each by its own design; only columns that are perturbed first have an ε."""

    spec: IntervalSpec

    releases_rows: ClassVar[bool] = True
    reference_rows: ClassVar[Literal["none"]] = "none"
    release_type: ClassVar[type[IntervalRelease]] = IntervalRelease

    def check_parameters(self) -> None:
        """Check the designs and the budget.

        Raises
        ------
        SpecError
            If the designs do not fit the columns, one cannot be had, or the columns spend more than is promised.
        """
        check_designs(self.schema, self.spec.columns, coverage=self.spec.coverage)
        check_all(*(partial(_check_outside, name, self.schema.columns[name]) for name in self.designs if name not in find_perturbed(self.designs)))
        _check_budget(self.spec, self.budget)
        for name, design in self.designs.items():
            _check_tables(name, design, self.schema.columns[name])

    @property
    def designs(self) -> dict[str, Design]:
        """The design of each private column, in the schema's order; the ε of perturbed ones sum to no more than the budget's.

        Notes
        -----
        What users write is compared as decimals: 0.1 and 0.2 fit 0.3, although as floats they sum to more. The parts of ε are
        then rounded down.
        """
        designs = {name: self.spec.columns[name] for name in self.schema.privatised}
        parts = {name: perturb.epsilon for name, perturb in find_perturbed(designs).items()}
        if self.budget is None or sum(map(Fraction, parts.values())) <= Fraction(self.budget.epsilon):
            return designs
        parts = split_epsilon(self.budget.epsilon, tuple(parts), parts)
        return {
            name: design.model_copy(update={"perturb": design.perturb.model_copy(update={"epsilon": parts[name]})})
            if isinstance(design, IntervalDifferential)
            else design
            for name, design in designs.items()
        }

    @property
    def event(self) -> Composed:
        """One local release of every row by its perturbed columns, if there are any; the other columns have no ε."""
        designs = self.designs
        pure = tuple(name for name in designs if name not in find_perturbed(designs))
        return Composed(events=() if self.budget is None else (make_local_release(designs),), without_epsilon=pure)

    @property
    def spending(self) -> Spending:
        """What each perturbed column costs; the others have no ε."""
        return Spending(row={name: perturb.epsilon for name, perturb in find_perturbed(self.designs).items()})

    @property
    def protected(self) -> str:
        """What is covered, in words."""
        return describe_all_protected(self.designs)

    @property
    def unprotected(self) -> str:
        """What is not, in words."""
        return describe_all_unprotected(self.designs)

    def guarantee(self, order: RowOrder) -> str:
        """Return the promise in words."""
        return interval_guarantee(self.designs, self.budget, order)

    @property
    def how(self) -> str:
        """What is done, in a few words."""
        designs = self.designs
        perturbed = find_perturbed(designs)
        return f"{', '.join(designs)} released as random ranges" + (f"; {', '.join(perturbed)} perturbed first" if perturbed else "")

    def find_written(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written, given the released columns of the table."""
        return make_released_schema(released, self.schema.privatised, coverage=self.spec.coverage)

    def check(self, columns: Columns) -> None:
        """Check the table's types against the designs: every distribution is tabulated, and every perturbation fitted.

        Raises
        ------
        DataError, SpecError
            If a column's values are no numbers, or its design cannot be had.
        """
        self._fit(columns)

    def statistic(self, columns: Columns) -> ColumnStatistic:
        """Return what checks the rows where they must be counted; nothing is computed from it."""
        return ColumnStatistic(codecs=columns.codecs)

    def fit(self, counts: None, columns: Columns, key: RunKey) -> IntervalRelease:
        """Return the fitted release, a function of the designs and the table's types; see `Mechanism.fit`."""
        del counts, key
        return self._fit(columns)

    def _fit(self, columns: Columns) -> IntervalRelease:
        return IntervalRelease.of(self.designs, columns.codecs, coverage=self.spec.coverage)

    def stages(self, columns: Columns, *, uncounted: bool) -> tuple[str, ...]:
        """Return what a run does before the commit, in words; see `Mechanism.stages`."""
        del columns
        perturbed = ", ".join(find_perturbed(self.designs))
        counted = (f"survey: read {', '.join(self.schema.privatised)}; count the rows",) if uncounted else ()
        return (
            *counted,
            "fit: the tables that anchors and perturbations are drawn from, on the driver; the designs are written once",
            f"write: {f'perturb {perturbed}; ' if perturbed else ''}draw each fragment's anchors, find its values' ranges, and stage its shards",
        )

    def expectations(self, columns: Columns) -> tuple[str, ...]:
        """Return how wide the ranges will be, from the anchors and what is declared; see `Mechanism.expectations`."""
        return describe_widths(self.designs, columns.codecs)

    def cautions(self, columns: Columns, n_rows: int | None) -> tuple[str, ...]:
        """Return what a steward should think of before a run; see `Mechanism.cautions`."""
        del n_rows
        return warn_of_wide_ranges(self.designs, columns.codecs)

    def n_expected(self, n_rows: int | None) -> int | None:
        """Return how many rows a run writes: all of them."""
        return n_rows

    def section(self, release: IntervalRelease, columns: Columns, *, n_rows: int | None, n_released: int | None, order: RowOrder) -> Section:
        """Return the mechanism's part of the release card; see `Mechanism.section`."""
        del n_rows, n_released
        return interval_section(release=release, schema=self.schema, codecs=columns.codecs, budget=self.budget, order=order)

    def audit(self, columns: Columns, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return for each perturbed column its `claimed` ε, its exact ε* and the `reference` it holds for; see `Mechanism.audit`."""
        del card
        claims = self.spending.row
        return {
            name: {"claimed": claims[name], "epsilon_exact": perturbation.exact_epsilon, "reference": "the declared distribution"}
            for name, perturbation in self._fit(columns).perturbations.items()
        }


def check_designs(schema: Schema, designs: Mapping[str, Design], *, coverage: bool = False) -> None:
    """Check that each private column has a design that it can have, and that no two released columns share a name.

    Parameters
    ----------
    schema
        The declared columns.
    designs
        The design of each column.
    coverage
        Whether each range's coverage is released too.

    Raises
    ------
    SpecError
        If they do not fit.
    """
    for name in designs:
        if name not in schema.privatised:
            raise SpecError(
                "is not a privatised column",
                f"`columns.{name}`",
                suggest(name, schema.privatised, "remove it, or give the column the role privatise"),
            )
    for name in schema.privatised:
        place, column = f"column {name!r}", schema.columns[name]
        if column.kind == "categorical":
            raise SpecError("a categorical column has no order, so it cannot have ranges", place, "drop it, or randomise it in a job of the kind dip")
        if name not in designs:
            raise SpecError("has no design", place, "add it to `columns`")
        if coverage and find_reference(designs[name]) is None:
            what = "coverage needs a public reference, and its design names none"
            raise SpecError(what, place, "add `reference: {name: …}`, or remove `coverage`")
        _check_nulls(column, designs[name], place)
        _check_epsilon(name, designs[name], column)
    released = [*schema.kept, *(made for name in schema.privatised for made in name_released(name, coverage=coverage))]
    for name in schema.privatised:
        clash = next((made for made in name_released(name, coverage=coverage) if released.count(made) > 1), None)
        if clash is not None:
            raise SpecError(f"its released column would be {clash!r}, but another column has that name", f"column {name!r}", "rename the other")


def _check_nulls(column: Column, design: Design, place: str) -> None:
    if column.nulls == "level" and design.nulls != "public":
        what = "a null has no range, so the release would show which values are missing"
        raise SpecError(what, place, "declare `nulls: public` in its design if it is public, or `nulls: refuse` in the schema")
    if design.nulls == "public" and column.nulls != "level":
        what = "its design has `nulls: public`, and the schema refuses nulls, so the first null would stop the release"
        raise SpecError(what, place, "declare `nulls: level` in the schema, or leave `nulls` out of the design")
    if column.outside == "null":
        what = "values outside the domain become null, and nulls are published, so the release would reveal which values these were"
        raise SpecError(what, place, "declare `outside: clip` or `outside: refuse` in the schema")


def _check_outside(name: str, column: Column) -> None:
    """Check that no value is replaced before its range is found: the range would not hold the value, and nobody could tell."""
    if column.outside != "refuse":
        what = f"values outside its domain would be replaced (`outside: {column.outside}`), and their ranges need not hold them"
        mend = "declare `outside: refuse`" + (", or leave the bounds out" if column.bounds else "")
        raise SpecError(what, f"column {name!r}", mend)


def _check_epsilon(name: str, design: Design, column: Column) -> None:
    """Check that the rank noise of a perturbed column can have its ε."""
    if not isinstance(design, IntervalDifferential) or column.has_levels or design.perturb.channel == "optimal":
        return
    epsilon = design.perturb.epsilon
    if not MIN_RANK_EPSILON <= epsilon <= MAX_RANK_EPSILON:
        what = f"is {epsilon:g}, but a {column.kind} column takes an ε in [{MIN_RANK_EPSILON:g}, {MAX_RANK_EPSILON:g}]"
        raise SpecError(what, f"`columns.{name}.perturb.epsilon`", "change it")


def _check_budget(spec: IntervalSpec, budget: Budget | None) -> None:
    """Check that a budget is promised if a column is perturbed, and that it pays for all that are."""
    parts = [perturb.epsilon for perturb in find_perturbed(spec.columns).values()]
    total = sum(map(Decimal, map(repr, parts)), Decimal(0))
    spent = f"{total.normalize():f}"
    if budget is None:
        if parts:
            raise SpecError(f"the perturbed columns spend {spent} together, but no ε is promised", "`epsilon`", f"set it to at least {spent}")
        return
    if not parts:
        raise SpecError("no column is perturbed, so there is no ε to promise", "`epsilon`", "remove it")
    if budget.delta:
        raise SpecError(f"is {budget.delta:g}, but interval-differential privacy spends no δ", "`delta`", "set it to 0, or remove it")
    if budget.adjacency != "replace-one":
        what = "ranges are released one row for each row, so they cannot hide that a row is there"
        raise SpecError(what, "`adjacency`", "set it to replace-one")
    if budget.unit_column is not None:
        raise SpecError("ranges are released for every row, however many rows a unit has", "`unit`", "set it to row, or remove it")
    if total > Decimal(repr(budget.epsilon)):
        what = f"is {budget.epsilon!r}, and the perturbed columns spend {spent} together"
        raise SpecError(what, "`epsilon`", f"set it to at least {spent}, or lower {_largest_epsilon(spec.columns)}")


def _largest_epsilon(designs: Mapping[str, Design]) -> str:
    """Return the parameter with the largest ε of a perturbed column."""
    perturbed = find_perturbed(designs)
    return f"`columns.{max(perturbed, key=lambda name: perturbed[name].epsilon)}.perturb.epsilon`"


def _check_tables(name: str, design: Design, column: Column) -> None:
    """Check that a design is possible: its distributions exist and can be tabulated, and its targets can be reached.

    Whether values are whole numbers is known if the schema declares their type; else either will do here, and `check` decides.
    """
    cut: Design = design
    if isinstance(design, IntervalDifferential):
        cut = design.of.model_copy(update={"reference": design.of.reference or design.reference})
        if design.perturb.reference.name is not None:
            design.perturb.reference.freeze(name)
    errors = []
    for lattice in (False, True) if column.type is None else (not pa.types.is_floating(arrow_type(column.type)),):
        try:
            tabulate(name, cut, lattice=lattice)
        except SpecError as error:
            errors.append(error)
        else:
            return
    raise errors[0]
