"""The Python classes, one for each mechanism: keyword arguments that build a spec, and the methods that only its release has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal, Self, get_args

import pandas as pd
from numpy.random import Generator

from dpdask.archive import Archived
from dpdask.arrays import Ints
from dpdask.errors import SpecError
from dpdask.estimators.estimator import Estimator, NoisyCountsEstimator
from dpdask.estimators.release import Release, Rows
from dpdask.html import make_html_table
from dpdask.mechanisms.copula.fit import CopulaOptions, Records
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.mechanisms.copula.spec import CopulaSpec
from dpdask.mechanisms.dip.spec import ChannelKind, Cost, DipSpec
from dpdask.mechanisms.histogram.noise import HistogramPlan, Threshold
from dpdask.mechanisms.histogram.release import FittedHistogram, Points
from dpdask.mechanisms.histogram.spec import HistogramSpec
from dpdask.mechanisms.interval.design import Design
from dpdask.mechanisms.interval.spec import IntervalSpec
from dpdask.mechanisms.marginals.noise import NoisyMarginals
from dpdask.mechanisms.marginals.release import MarginalTables
from dpdask.mechanisms.marginals.spec import MarginalsSpec
from dpdask.mechanisms.mechanism import Spec
from dpdask.privacy import Budget, UnitColumn
from dpdask.references import Reference
from dpdask.stats import Clique


@dataclass(frozen=True, slots=True)
class DIP(Estimator[Release]):
    """Distribution-invariant privatisation: each row's private values are randomised, and their distribution is preserved.

    Parameters
    ----------
    schema
        The declared columns.
    epsilon
        ε of a row, in (0, 100]; shared among its private columns.
    delta
        δ, in [0, 1): 0 unless the reference is a `Tree`, whose noisy tables spend all of it. Take
        it far below 1 / rows.
    reference
        `Holdout(fraction=…)`, `Histogram()`, `Public()` or `Known(columns=…)`, each column by its
        own marginal distribution, `Chain(fraction=…)`, all columns jointly, or `Tree()`, the pairs
        of columns that depend most on each other: where the reference distribution comes from, and
        therefore who is protected. There is no default.
    channel
        `laplace`: as published. `laplace-calibrated`: the same noise, as small as ε allows.
        `optimal`: the invariant ε-private channel of least expected cost; of more than 100
        categories one that keeps nearly as many values as any. `optimal-unbiased`: the best of those
        whose expected released value is linear in the original value: every mean, group mean and
        slope of numbers or dates can then be estimated without bias.
    cost
        What the optimal channel minimises, by column: `value`, `rank`, `zero-one`, or a matrix over
        the levels.
    weights
        How ε is shared among the private columns; equally if not given.
    unit
        What is protected: `row`, or `UnitColumn(column=…, max_rows=…)`: all rows that share a
        column's value, of which at most `max_rows` are released.
    insecure_seed
        For tests: noise from a seed, which protects nobody.

    Raises
    ------
    SpecError
        If a parameter is invalid.

    Privacy
    -------
    Unit: a row, or with `unit` all rows that share a column's value. Adjacency: replace-one.
    Protected: the values of the released rows. Not protected: held-out rows (they shape the output
    and are not released; a `Chain` republishes them, levels exactly), kept columns, the number and
    the order of rows. Sensitivity: none for the rows, each is randomised on its own; 2 for a
    `Histogram`'s counts (2 · max_rows with a unit), and for each of a `Tree`'s tables. Event: one
    local release of every row, and one discrete Laplace measurement of every private column where
    the reference is a `Histogram`, or a discrete Laplace or Gaussian one of each of a `Tree`'s
    tables; that noise is drawn by `fit`. Row noise is a function of the release, the batch, the
    column and the partition, never of a frame's content, so recomputing a lazy frame repeats the
    same noise. A release covers one frame, which must be the same Python object every time. With
    `Holdout`, `Histogram`, `Tree`, `Chain(fraction=…)` or a unit, it is the frame given to `fit`.
    With `Known` or a public table, it is any frame, and further frames are named batches, each with
    its own noise: a row in k batches is protected by k·ε. Every new `fit` on the same rows spends ε
    again. Rows keep the frame's order: if it is sorted by a private column, the position of a row
    reveals its value, so shuffle it first.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, Algorithm 1, each column by its own
    marginal distribution; (2) and (10) for a `Chain`, (2) for a `Tree`.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}}})
    >>> table = pd.DataFrame({"x": [0, 1] * 50})
    >>> release = dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Holdout(fraction=0.5)).fit(table)
    >>> set(release.transform(table)["x"]) <= {0, 1}
    True
    """

    spec_class: ClassVar[type[Spec]] = DipSpec

    _: KW_ONLY
    epsilon: float
    delta: float = 0.0
    reference: Reference
    channel: ChannelKind = "laplace"
    cost: Mapping[str, Cost] | None = None
    weights: Mapping[str, float] | None = None
    unit: UnitColumn | Literal["row"] = "row"

    def __post_init__(self) -> None:
        if not isinstance(self.reference, get_args(Reference)):
            what = "a reference must be named: it decides who is protected"
            hint = "give Holdout(...), Histogram(), Public(), Known(...), Chain(...) or Tree(...)"
            raise SpecError(what, "`reference`", hint)
        Estimator.__post_init__(self)
        if self.mechanism.public_table is not None:
            hint = "remove it, and hand the public table to fit"
            raise SpecError("a path is for jobs only", "`reference.path`", hint)
        if self.unit != "row" and self.mechanism.reference_rows == "public":
            what = "a public reference is fitted on a table that has no units to bound"
            raise SpecError(what, "`unit`", "run it as a job, or use another reference")


DEFAULT_OPTIONS = CopulaOptions()


class CopulaRelease(Release):
    """A fitted copula; made by `GaussianCopula.fit`, or by `load` elsewhere, without the data.

    Privacy
    -------
    A function of the noisy tables: it may be published, and any number of records drawn from it, at
    no further cost.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> column = {"role": "privatise", "kind": "categorical", "levels": ["a", "b"]}
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": column, "y": column}})
    >>> table = pd.DataFrame({"x": ["a", "b"] * 500, "y": ["a", "b"] * 500})
    >>> release = dpdask.GaussianCopula(schema, epsilon=1.0, delta=1e-9).fit(table)
    >>> release.correlation.shape
    (2, 2)
    """

    fitted: FittedCopula

    file: ClassVar[str] = "copula.npz"
    fitted_type: ClassVar[type[Archived]] = FittedCopula

    @property
    def correlation(self) -> pd.DataFrame:
        """The correlations of the latent variables, float64; each is named (column, level or range)."""
        return self.fitted.correlations()

    @property
    def marginals(self) -> NoisyMarginals:
        """The noisy one- and two-way tables, with their margins of error."""
        return self.fitted.noisy


@dataclass(frozen=True, slots=True)
class GaussianCopula(NoisyCountsEstimator[CopulaRelease]):
    """Differentially private synthetic records with the table's one- and two-way structure.

    Parameters
    ----------
    schema
        The declared columns: each is privatised or dropped.
    epsilon
        ε, in (0, 100].
    delta
        δ, in [0, 1): above 0 the noise is Gaussian, and much smaller; at 0 it is Laplace. Take it
        far below 1 / rows.
    adjacency
        `replace-one`: one row has other values, the number of rows is public. `add-remove`: one row
        is present or absent (its values are then protected by 2·epsilon).
    unit
        What is protected: `row`, or `UnitColumn(column=…, max_rows=…)`.
    bins
        How continuous and mixed columns are cut. `adaptive`: into about 20 cells of equal counts
        that are found under privacy, in a pass of their own. A number: into that many cells of
        equal width. A mapping: for each column one of these, or a list of the first value of each
        cell.
    one_way, two_way
        The share of the budget of each one-way and each two-way table, relative to each other.
    measured_again
        How many pairs are measured a second time, with two fifths of the tables' budget: those with
        the largest expected gain, which is estimated from the first, noisy tables. `auto`: 3 in 10
        of the pairs, 1,024 at most; none with fewer than 3 pairs, or without a δ.
    target
        A column to predict from the others. Its pairs are measured again before all others, and
        every chosen three-way table contains it.
    triples
        The largest number of three-way tables to measure. They are chosen under privacy in a
        separate pass, and get 15 % of the tables' budget; the scores that choose them get 5 %.
        `auto`: with a `target` and a δ as many as there are columns, otherwise none.
    records
        `raked`: records of the copula are weighted so that they match the denoised two-way tables,
        and resampled by these weights. `copula`: records of the copula as they are, the paper's
        model.
    options
        Which steps of the fit to switch off, to measure their effect.
    insecure_seed
        For tests: noise from a seed, which protects nobody.

    Raises
    ------
    SpecError
        If a parameter is invalid.

    Privacy
    -------
    Unit: a row, or all rows that share a column's value. Protected: every row. Sensitivity of each
    table: 1 (add-remove), or L2 √2, L1 2 (replace-one), times max_rows. Events, composed by the
    accountant: one noisy table of each column and of each pair of columns, a second one of some
    pairs, and the scores and noisy tables of triples, if any. Everything after the noise is
    post-processing; any number of records may be drawn. ε is spent again by every new `fit` on the
    same rows.

    References
    ----------
    Asghar, Ding, Rakotoarivelo, Mrabet and Kaafar, Differentially private release of
    high-dimensional datasets using the Gaussian copula.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> column = {"role": "privatise", "kind": "categorical", "levels": ["a", "b"]}
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": column, "y": column}})
    >>> table = pd.DataFrame({"x": ["a", "b"] * 500, "y": ["a", "b"] * 500})
    >>> copula = dpdask.GaussianCopula(schema, epsilon=1.0, delta=1e-9).fit(table)
    >>> len(copula.sample(2000))
    2000
    """

    _: KW_ONLY
    bins: Literal["adaptive"] | int | Mapping[str, Literal["adaptive"] | int | Sequence[float]] = (
        "adaptive"
    )
    one_way: float = 1.0
    two_way: float = 1.0
    measured_again: Literal["auto"] | int = "auto"
    target: str | None = None
    triples: Literal["auto"] | int = "auto"
    records: Records = "raked"
    options: CopulaOptions = DEFAULT_OPTIONS

    spec_class: ClassVar[type[Spec]] = CopulaSpec
    release_class: ClassVar[type[Release]] = CopulaRelease

    def _choose(self, *names: str) -> dict[str, Any]:
        # not `super`, which a class with slots does not find
        given = Estimator._choose(self, *names)
        if "weights" in names:
            given["weights"] = {"one_way": self.one_way, "two_way": self.two_way}
        return given


class HistogramRelease(Release):
    """A noisy histogram; made by `PerturbedHistogram.fit`, or by `load` elsewhere, without the data.

    Privacy
    -------
    A function of the noisy counts: it may be published, and anything computed from it, at no
    further cost.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> x = {"role": "privatise", "kind": "continuous", "bounds": [0.0, 1.0]}
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": x}})
    >>> table = pd.DataFrame({"x": [0.25, 0.75] * 500})
    >>> release = dpdask.PerturbedHistogram(schema, epsilon=1.0, bins=2).fit(table)
    >>> release.cells.columns.tolist(), len(release.sample(100))
    (['x', 'weight'], 100)
    """

    fitted: FittedHistogram

    file: ClassVar[str] = "histogram.npz"
    fitted_type: ClassVar[type[Archived]] = FittedHistogram

    @classmethod
    def from_fit(cls, rows: Rows, fitted: FittedHistogram, sha256: str, **given: Any) -> Self:
        """Return the release that a fit made: `cells` lists its cells, and `sample` draws rows.

        Parameters
        ----------
        rows, fitted, sha256, given
            As for `Release.from_fit`.
        """
        return super().from_fit(rows, replace(fitted, output="rows"), sha256, **given)

    @property
    def noise(self) -> HistogramPlan:
        """The noise that every cell had, and the threshold."""
        return self.fitted.noisy.plan

    @property
    def cells(self) -> pd.DataFrame:
        """The cells with a weight: the centre of each column, and `weight`, float64; levels that are no numbers are categories.

        With the points `spread`, several rows stand for each cell; see `with_points`. A category
        without a listed cell is kept too, so that redrawn cells have the same indicators.
        """
        return self.fitted.to_frame()

    def with_points(self, points: Points) -> Self:
        """Return this release with other points for its cells: `cells` and `redraw` give them, the card names them; free.

        Parameters
        ----------
        points
            `centre`, as at first and in the paper, or `spread`: two points for each column that is
            cut, multiplied, with weights that keep the means, variances and covariances of a smooth
            density, which centres do not; see `mechanisms.histogram.release.spread` for when that is
            of use.

        Raises
        ------
        SpecError
            If the points are neither, or more than 6 columns are cut.
        """
        return self._replace_fitted(self.fitted.with_points(points), {"points": points})

    def redraw(self, rng: Generator) -> pd.DataFrame:
        """Return `cells` with the same noise once more, cut at the same threshold: for `inference.noise_error`, free.

        Parameters
        ----------
        rng
            Any stream: this is post-processing, and needs no secret.
        """
        return self.fitted.redraw(rng).to_frame()


@dataclass(frozen=True, slots=True)
class PerturbedHistogram(NoisyCountsEstimator[HistogramRelease]):
    """The joint histogram of a table's columns with noise in every cell, as a weighted sample for any estimator.

    Parameters
    ----------
    schema
        The declared columns: each is privatised or dropped.
    epsilon
        ε, in (0, 100].
    delta
        δ, in [0, 1): it may be 0; under replace-one a positive one makes the noise a little
        smaller.
    adjacency
        `replace-one`: one row has other values, the number of rows is public. `add-remove`: one row
        is present or absent (its values are then protected by 2·epsilon).
    unit
        What is protected: `row`, or `UnitColumn(column=…, max_rows=…)`.
    bins
        How continuous and mixed columns are cut. `adaptive`: into as many cells of equal counts as
        the rows allow; the cells are found under privacy, in a separate pass. A number: into that
        many cells of equal width. A mapping: for each column one of these, or a list of the first
        value of each cell. `rule`: by the paper's rate, which needs replace-one.
    threshold
        Which cells are kept: `none` (all, with negative weights), `positive`, or `enhanced`: those
        whose noisy count reaches factor·log n/ε.
    factor
        A; the paper takes 1/2.
    insecure_seed
        For tests: noise from a seed, which protects nobody.

    Raises
    ------
    SpecError
        If a parameter is invalid.

    Privacy
    -------
    Unit: a row, or all rows that share a column's value. Protected: every row. L1 sensitivity of
    the histogram: 2 under replace-one, 1 under add-remove, times max_rows. Events: one noisy
    histogram, and under add-remove with the enhanced threshold the noisy number of rows. Everything
    after the noise is post-processing. ε is spent again by every new `fit` on the same rows.

    References
    ----------
    Lei, Differentially private M-estimators (2011), Algorithms 1 and 1' and section 4.2.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> x = {"role": "privatise", "kind": "continuous", "bounds": [0.0, 1.0]}
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": x}})
    >>> table = pd.DataFrame({"x": [0.25, 0.75] * 500})
    >>> release = dpdask.PerturbedHistogram(schema, epsilon=1.0, bins=2).fit(table)
    >>> release.cells["x"].tolist()
    [0.25, 0.75]
    """

    _: KW_ONLY
    bins: (
        Literal["adaptive", "rule"]
        | int
        | Mapping[str, Literal["adaptive"] | int | Sequence[float]]
    ) = "adaptive"
    threshold: Threshold = "enhanced"
    factor: float = 0.5

    spec_class: ClassVar[type[Spec]] = HistogramSpec
    release_class: ClassVar[type[Release]] = HistogramRelease


@dataclass(frozen=True, slots=True)
class IntervalMechanism(Estimator[Release]):
    """Random ranges instead of values: each private value is released as a range that contains it, or contains its perturbed value.

    Parameters
    ----------
    schema
        The declared columns.
    columns
        The design of each private column, as a job writes it: `{"price": {"design": "case2",
        "anchors": {…}}}`, or a design of `dpdask.mechanisms.interval.design`.
    coverage
        Whether `<column>_coverage` is released beside the ends: the range's probability under the
        design's public reference.
    insecure_seed
        For tests: anchors from a seed.

    Raises
    ------
    SpecError
        If a parameter is invalid, or the designs do not fit the columns.

    Privacy
    -------
    Unit: a value. There is no ε. Protected: where a value lies inside its released range. Not
    protected: that it lies in the range, and what else the design reveals (the card lists it). A
    column whose design is `interval-differential` is perturbed first: its values have the ε of its
    `perturb` under replace-one, and one row's ε is the sum over these columns (event: one local
    release of every row). A range's coverage is a function of the range and of what is public.
    Anchors and perturbations are a function of the mechanism, the batch, the column and the
    partition, never of a frame's content. A release takes one frame, the same Python object however
    often it is transformed or computed; further frames are named batches, each with its own ranges.
    If a row is in several batches, or in several releases, its ranges narrow each other, and k
    batches spend the ε of perturbed columns k times. Rows keep the frame's order: if it is sorted
    by a private column, the position of a row reveals its value, so shuffle it first.

    References
    ----------
    Ding and Ding, Interval privacy: a framework for privacy-preserving data collection.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> schema = dpdask.Schema.from_dict({"columns": {"price": {"role": "privatise", "kind": "continuous"}}})
    >>> anchors = {"name": "uniform", "loc": 0, "scale": 100}
    >>> table = pd.DataFrame({"price": [10.0, 60.0]})
    >>> mechanism = dpdask.IntervalMechanism(schema, columns={"price": {"design": "case2", "anchors": anchors}})
    >>> list(mechanism.fit(table).transform(table).columns)
    ['price_lower', 'price_upper']
    """

    _: KW_ONLY
    columns: Mapping[str, Design | Mapping[str, Any]]
    coverage: bool = False

    spec_class: ClassVar[type[Spec]] = IntervalSpec

    def _budget(self, spec: IntervalSpec) -> Budget | None:
        return spec.least_budget


class MarginalsRelease(Release):
    """Noisy tables; made by `Marginals.fit`, or by `load` elsewhere, without the data.

    Privacy
    -------
    Noisy counts: they may be published, and anything computed from them, at no further cost.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> column = {"role": "privatise", "kind": "categorical", "levels": ["a", "b"]}
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": column, "y": column}})
    >>> table = pd.DataFrame({"x": ["a", "b"] * 500, "y": ["a", "b"] * 500})
    >>> release = dpdask.Marginals(schema, epsilon=1.0, cliques=[["x", "y"]]).fit(table)
    >>> release.to_frame(["x", "y"]).shape, release.margin(["x", "y"]) > 0
    ((4, 4), True)
    """

    fitted: MarginalTables

    file: ClassVar[str] = "marginals.npz"
    fitted_type: ClassVar[type[Archived]] = MarginalTables

    def table(self, clique: Sequence[str]) -> Ints:
        """Return one table as an array with an axis for each column: levels in the schema's order, null first; counts may be negative.

        A single name stands for the table of that column.

        Raises
        ------
        SpecError
            If the table was not released.
        """
        return self.fitted.table(_as_clique(clique))

    def margin(self, clique: Sequence[str]) -> float:
        """Return the margin of error of each count of a table: with probability 0.95, the noise changes the count by at most this."""
        return self.fitted.margin(_as_clique(clique))

    def to_frame(self, clique: Sequence[str]) -> pd.DataFrame:
        """Return one table as a frame: a row for each cell, with its levels, its noisy count and its margin of error."""
        return self.fitted.to_frame(_as_clique(clique))

    def _repr_html_(self) -> str:
        counts = self.fitted.noisy.cliques
        rows = (
            (" x ".join(clique), f"{counts[clique].size:,}", f"{self.margin(clique):,.0f}")
            for clique in counts
        )
        tables = make_html_table(
            "Released tables", ("columns", "cells", "margin of a count (95 %)"), rows
        )
        # not `super`, which a class with slots does not find
        return Release._repr_html_(self) + tables


def _as_clique(clique: Sequence[str]) -> Clique:
    return (clique,) if isinstance(clique, str) else tuple(clique)


@dataclass(frozen=True, slots=True)
class Marginals(NoisyCountsEstimator[MarginalsRelease]):
    """Contingency tables with noise in every cell.

    Parameters
    ----------
    schema
        The declared columns: each is privatised or dropped.
    epsilon
        ε, in (0, 100].
    delta
        δ, in [0, 1): above 0 the noise is Gaussian; at 0 it is Laplace. Take it far below 1 / rows.
    adjacency
        `replace-one`: one row has other values, the number of rows is public. `add-remove`: one row
        is present or absent (its values are then protected by 2·epsilon).
    unit
        What is protected: `row`, or `UnitColumn(column=…, max_rows=…)`.
    cliques
        The tables, each a sequence of columns.
    weights
        Each table's share of the budget, relative to the others; equal if not given.
    bins
        How continuous and mixed columns are cut. `adaptive`: into about 20 cells of equal counts
        that are found under privacy, in a pass of their own. A number: into that many cells of
        equal width. A mapping: for each column one of these, or a list of the first value of each
        cell.
    insecure_seed
        For tests: noise from a seed, which protects nobody.

    Raises
    ------
    SpecError
        If a parameter is invalid.

    Privacy
    -------
    Unit: a row, or all rows that share a column's value. Protected: every row. Sensitivity of each
    table: 1 (add-remove), or L2 √2, L1 2 (replace-one), times max_rows. Events: one noisy table for
    each of `cliques`, composed by the accountant. ε is spent again by every new `fit` on the same
    rows.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> column = {"role": "privatise", "kind": "categorical", "levels": ["a", "b"]}
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": column, "y": column}})
    >>> table = pd.DataFrame({"x": ["a", "b"] * 500, "y": ["a", "b"] * 500})
    >>> release = dpdask.Marginals(schema, epsilon=1.0, cliques=[["x"], ["x", "y"]]).fit(table)
    >>> release.table(["x", "y"]).shape
    (2, 2)
    """

    _: KW_ONLY
    cliques: Sequence[Sequence[str]]
    weights: Sequence[float] | None = None
    bins: Literal["adaptive"] | int | Mapping[str, Literal["adaptive"] | int | Sequence[float]] = (
        "adaptive"
    )

    spec_class: ClassVar[type[Spec]] = MarginalsSpec
    release_class: ClassVar[type[Release]] = MarginalsRelease
