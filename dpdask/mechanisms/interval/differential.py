"""Interval-differential privacy: distribution-invariant privatisation of one column, in the column's numbers, before a range is reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from dpdask.codec import Codec, LevelCodec
from dpdask.errors import SpecError
from dpdask.kernels import bins as bins_kernel
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import rank as rank_kernel
from dpdask.mechanisms.dip.fit import fit_dip
from dpdask.mechanisms.dip.release import BinMechanism, ColumnMechanism, LevelMechanism, RankMechanism
from dpdask.mechanisms.interval.design import Design, IntervalDifferential, Perturb
from dpdask.mechanisms.spending import Spending
from dpdask.privacy import Budget, split_epsilon
from dpdask.privacy.audit import channel_epsilon, rank_epsilon
from dpdask.references import Known
from dpdask.schema import Schema

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LevelPerturbation:
    """A level column's channel as a `Perturbation`.

    Attributes
    ----------
    mechanism
        The fitted channel.
    levels
        float64 array of shape (n_levels,), strictly increasing: the levels as numbers.

    Privacy
    -------
    Unit: a value, a level. Adjacency: replace-one. ε* is exact: the numbers are the levels, one by one, so the law of the
    perturbed number is the channel's row. Event: one local release.
    """

    mechanism: LevelMechanism
    levels: Floats

    @property
    def words_per_row(self) -> int:
        """One word."""
        return 1

    @property
    def epsilon(self) -> float:
        """ε*, exact."""
        return self.mechanism.epsilon

    @property
    def exact_epsilon(self) -> float:
        """ε*, computed again from the tables."""
        return channel_epsilon(self.mechanism.channel.weights)

    def perturb(self, values: Floats, words: Words) -> Floats:
        """Return a level for each level (float64, shape (n,)), and some level for any other number; words are uint64 of shape (n, 1)."""
        codes = np.searchsorted(self.levels, values).astype(np.int32)
        # a null comes as 0, which may lie above every level: its row is drawn like any other, and blanked by the caller
        codes = np.minimum(codes, np.int32(len(self.levels) - 1))
        perturbed: Floats = self.levels[channel_kernel.sample(codes, words[:, 0], self.mechanism.thresholds, self.mechanism.aliases)]
        return perturbed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValuePerturbation:
    """A continuous or mixed column's mechanism as a `Perturbation`.

    Attributes
    ----------
    mechanism
        Fitted to a reference without nulls.
    lattice
        Whether values are whole numbers.

    Privacy
    -------
    Unit: a value. Adjacency: replace-one. ε*, or a bound on it, is the mechanism's. Event: one local release.
    """

    mechanism: RankMechanism | BinMechanism
    lattice: bool

    @property
    def words_per_row(self) -> int:
        """As many as the mechanism takes."""
        return rank_kernel.words_per_row(self.mechanism.noise) if isinstance(self.mechanism, RankMechanism) else 3

    @property
    def epsilon(self) -> float:
        """An upper bound on ε*; exact for bins."""
        return self.mechanism.epsilon

    @property
    def exact_epsilon(self) -> float:
        """ε*, computed again from the tables."""
        if isinstance(self.mechanism, RankMechanism):
            return rank_epsilon(self.mechanism.noise)
        return channel_epsilon(self.mechanism.channel.weights)

    def perturb(self, values: Floats, words: Words) -> Floats:
        """Return a value for each value (float64, shape (n,)); words are uint64 of shape (n, words_per_row)."""
        x, c = self.mechanism.distribution.x, self.mechanism.distribution.c
        known = np.zeros(len(values), dtype=np.bool_)
        tables = self.mechanism.thresholds, self.mechanism.aliases
        if isinstance(self.mechanism, RankMechanism):
            perturbed, _ = rank_kernel.privatise(values, known, words, x, c, self.mechanism.noise, tables, lattice=self.lattice)
            return perturbed
        drawn, edges = np.ascontiguousarray(words.T), self.mechanism.edges
        cells = bins_kernel.cells_of(values, known, drawn[0], x, c, edges, lattice=self.lattice)
        perturbed, _ = bins_kernel.draw_values(channel_kernel.sample(cells, drawn[1], *tables), drawn[2], x, c, edges, lattice=self.lattice)
        return perturbed


DipPerturbation = LevelPerturbation | ValuePerturbation


def adapted(mechanism: ColumnMechanism, *, levels: Floats, lattice: bool) -> DipPerturbation:
    """Return a column's fitted mechanism as a perturbation in the column's numbers.

    Parameters
    ----------
    mechanism
        The mechanism.
    levels
        The numbers of a level column's levels; of no other column.
    lattice
        Whether the column's values are whole numbers.
    """
    if isinstance(mechanism, LevelMechanism):
        return LevelPerturbation(mechanism=mechanism, levels=levels)
    return ValuePerturbation(mechanism=mechanism, lattice=lattice)


def fit_perturbation(perturb: Perturb, codec: Codec) -> ColumnMechanism:
    """Return the mechanism that perturbs a column: fitted to its declared distribution, null apart.

    Parameters
    ----------
    perturb
        As the user wrote it.
    codec
        The column's. Which values are missing is public where nulls are allowed at all, so the domain is what is not null.

    Raises
    ------
    SpecError
        If the distribution does not fit the column, or ε cannot be had.
    """
    # only for the fit, which encodes nothing
    present = (
        replace(codec, levels=codec.levels.drop_null(), instead=None)
        if isinstance(codec, LevelCodec)
        else replace(codec, nulls=False, outside="refuse")
    )
    distribution = Known(kind="known", columns={codec.name: perturb.reference}).distribution(present)
    return fit_dip({codec.name: distribution}, {codec.name: present}, {codec.name: perturb.epsilon}, perturb.channel).columns[codec.name]


def perturbed_columns(designs: Mapping[str, Design]) -> dict[str, Perturb]:
    """Return the perturbation of each column that has one."""
    return {name: design.perturb for name, design in designs.items() if isinstance(design, IntervalDifferential)}


def spending_of(designs: Mapping[str, Design]) -> Spending:
    """Return what one row's release may cost: the ε of each perturbed column; the others have none."""
    return Spending(reference={}, row={name: perturb.epsilon for name, perturb in perturbed_columns(designs).items()}, rows_per_unit=1)


def within(designs: Mapping[str, Design], budget: Budget) -> dict[str, Design]:
    """Return designs whose ε sum to no more than a budget's, after checking that they were written so.

    Parameters
    ----------
    designs
        By column; at least one is perturbed.
    budget
        What is promised.

    Raises
    ------
    SpecError
        If the columns spend more than is promised, or the budget has a δ, another adjacency or another unit.

    Notes
    -----
    What is written is compared as decimals: 0.1 and 0.2 fit 0.3, although as floats they sum to more. The parts of ε are
    then rounded down.
    """
    _check_budget(budget)
    parts = spending_of(designs).row
    total = sum(map(Decimal, map(repr, parts.values())), Decimal(0))
    if total > Decimal(repr(budget.epsilon)):
        spent = f"{total.normalize():f}"
        raise SpecError(f"the perturbed columns spend {spent} together", "privacy.epsilon", f"set it to at least {spent}, or lower a perturb.epsilon")
    if sum(map(Fraction, parts.values())) > Fraction(budget.epsilon):
        parts = split_epsilon(budget.epsilon, tuple(parts), parts)
    return {
        name: design.model_copy(update={"perturb": design.perturb.model_copy(update={"epsilon": parts[name]})})
        if isinstance(design, IntervalDifferential)
        else design
        for name, design in designs.items()
    }


def _check_budget(budget: Budget) -> None:
    if budget.delta:
        raise SpecError("interval-differential privacy is pure ε and spends no δ", "privacy.delta", "set it to 0, or remove it")
    if budget.adjacency != "replace-one":
        what = "ranges are released one row for each row, so they cannot hide that a row is there"
        raise SpecError(what, "privacy.adjacency", "set it to replace-one")
    if budget.unit_column is not None:
        raise SpecError("ranges are released for every row, however many rows a unit has", "privacy.unit", "set it to row, or remove it")


def check_perturbations(schema: Schema, designs: Mapping[str, Design]) -> None:
    """Check that each perturbed column's ε can be had.

    Raises
    ------
    SpecError
        If it cannot.
    """
    low, high = rank_kernel.MIN_EPSILON, rank_kernel.MAX_EPSILON
    for name, perturb in perturbed_columns(designs).items():
        column = schema.columns[name]
        if not column.has_levels and perturb.channel != "optimal" and not low <= perturb.epsilon <= high:
            raise SpecError(f"a {column.kind} column takes an ε in [{low:g}, {high:g}]", f"column {name!r}", "change its perturb.epsilon")
