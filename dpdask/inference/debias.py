"""Unbiased estimates from a released level column: its noise is a public channel, so estimates can correct for it.

Everything here needs the release and its card alone. It is post-processing: it costs no ε.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from dpdask.arrays import Floats, Pair, Triple, freeze_class
from dpdask.errors import SpecError
from dpdask.inference.measured import FEW_ROWS, NORMAL_95
from dpdask.inference.pseudo_values import (
    MAX_CONDITION,
    Directions,
    PseudoValues,
    Spread,
    balance,
    balance_groups,
    estimate_prior,
    find_half_width,
    fit_slopes,
    fit_spread,
    invert,
    nearest_probabilities,
)
from dpdask.inference.slopes import refuse_collinear, regress_kept_on, regress_on_kept
from dpdask.inference.tallies import (
    Estimate,
    Frame,
    Moments,
    Outcomes,
    group_counts,
    moments,
    outcome_counts,
)
from dpdask.mechanisms.card import Card

Spreads: TypeAlias = tuple[list[Directions], Spread, Spread | None]
_SURELY = 3.0  # standard errors
_AS_WRITTEN = "use the card as it was written"


@freeze_class(eq=False)
class ReleasedColumn:
    """A released level column, with its part of the card.

    Attributes
    ----------
    name
        The column's name in the released frame.
    levels
        The public levels, in the card's order; None is a null that is a level.
    matrix
        The channel, float64 array of shape (s, s): T[k, j] = Pr(released level j | original level
        k). Along a tree one for each released level of the parent, of shape (parent levels, s, s).
    parent
        The column whose released level chose the channel, and its levels; None but along a tree.
    max_condition
        Directions whose singular value lies below 1/max_condition are not inverted, and the others
        are, whatever their variance. None: estimates choose.
    at_most
        The largest share that each original level may have among all rows, float64 array of shape
        (s,), where the released rows follow the distribution of the original ones; None otherwise.
        Bounds on biases are then smaller, and those of groups and slopes hold on average: if what
        the noise hides varies by as much as what it shows, and numbers first of all in their mean.
    follows
        Whether all released rows together follow the distribution of the original ones. Where they
        do not, because the reference was declared or is another table, and `at_most` is given,
        bounds hold on average, too: if the original distribution differs from the reference in what
        the noise hides by as much as in what it shows.

    Notes
    -----
    For any function f of the levels and g with T g = f, E[g(Z̃) | x] = E[f(Z) | x] for every x that
    the noise does not depend on: kept columns, and other columns' values. Means, group means,
    cross-tabulations and slopes of f(Z) are therefore those of g(Z̃). Along a tree, there is a g
    for each released level of the parent.

    T is decomposed into its canonical directions under the channel's invariant distribution P (P·T
    = P, the reference). The singular values are the canonical correlations of original and released
    value; the largest is 1. Inverting a small one multiplies noise. By default each estimate
    inverts a direction as far as the sum of squared bias and variance is least
    (`pseudo_values.balance`, `balance_groups`), so groups with few rows lean to the average of all
    rows. With `approximate=False` all directions that f needs are inverted, and the estimate is
    unbiased, or refused: a channel may merge levels, and then no analysis, however large the table,
    can tell them apart. With a `max_condition` g is the least-squares solution of least norm.

    Levels that the reference never saw are taken not to occur.

    Examples
    --------
    Of 1,000 people asked, 400 are released as "yes" by a channel that keeps an answer with
    probability 3/4:

    >>> import numpy as np
    >>> answer = ReleasedColumn(name="answer", levels=("no", "yes"), matrix=np.array([[0.75, 0.25], [0.25, 0.75]]))
    >>> share = answer.distribution({"no": 600, "yes": 400}, approximate=False)
    >>> share.value.round(3).to_dict()
    {'no': 0.7, 'yes': 0.3}
    >>> share.standard_error.round(3).to_dict()
    {'no': 0.031, 'yes': 0.031}
    >>> round(share.condition_number, 3)
    2.0

    The share of "yes" by a kept column; the pseudo-values behind it, whose average is unbiased; and
    the slope of "yes" on years:

    >>> import pandas as pd
    >>> released = pd.DataFrame({"town": ["A"] * 500 + ["B"] * 500, "years": [1, 2, 3, 4] * 250, "answer": ["no"] * 600 + ["yes"] * 400})
    >>> answer.group_means(released, "town", values=[0, 1], approximate=False).value.round(3).to_dict()
    {'A': -0.5, 'B': 1.1}
    >>> answer.transform_for([0, 1]).round(3).tolist()
    [-0.5, 1.5]
    >>> slope = answer.slope(released, covariates=["years"], values=[0, 1], approximate=False)
    >>> [round(float(end["years"]), 3) for end in slope.interval()]
    [-0.054, 0.054]

    References
    ----------
    Warner 1965; van den Hout and van der Heijden, Randomized response, statistical disclosure
    control and misclassification, 2002; Carroll, Ruppert, Stefanski and Crainiceanu, Measurement
    error in nonlinear models, 2006, chapter 7 (corrected scores); Efron and Morris, Stein's
    estimation rule and its competitors, 1973 (groups that lean to their average).
    """

    name: str
    levels: tuple[object, ...]
    matrix: Floats
    parent: tuple[str, tuple[object, ...]] | None = None
    max_condition: float | None = None
    at_most: Floats | None = None
    follows: bool = True

    def __post_init__(self) -> None:
        matrix, n, where, hint = self.matrix, len(self.levels), f"column {self.name!r}", _AS_WRITTEN
        shape = (n, n) if self.parent is None else (len(self.parent[1]), n, n)
        if matrix.shape != shape or not matrix.size:
            what = "its channel is not square, one row and one column per level"
            raise SpecError(what, where, hint)
        if (
            not np.isfinite(matrix).all()
            or (matrix < 0).any()
            or np.abs(matrix.sum(axis=-1) - 1).max() > 1e-9
        ):
            raise SpecError("its channel's rows are not probabilities", where, hint)
        if self.max_condition is not None and not 1 <= self.max_condition <= MAX_CONDITION:
            raise SpecError(
                f"max_condition must lie in [1, {MAX_CONDITION:.0e}]", where, "leave it out"
            )

    @classmethod
    def from_card(
        cls, card: Mapping[str, Any], name: str, *, max_condition: float | None = None
    ) -> ReleasedColumn:
        """Return a column of a release card.

        Parameters
        ----------
        card
            `release.card`, or `_dpdask/release.json` parsed.
        name
            The column.
        max_condition
            As in `ReleasedColumn`.

        Raises
        ------
        InputError
            If this is no release card, or one of another format.
        SpecError
            If the card has no such column, or the column has no channel on levels.
        """
        columns = Card.read(card, "card").to_dict()["columns"]
        if name not in columns:
            raise SpecError("the card has no such column", f"column {name!r}", "check its name")
        column, where = columns[name], f"column {name!r}"
        parent = column.get("parent")
        if "levels" not in column or not {"channel", "channels"} & set(column):
            hint = "only privatised discrete and categorical columns have one; with a tree or a chain, only if the card is small"
            raise SpecError("the card gives no channel on levels", where, hint)
        if parent is not None and "levels" not in columns[parent]:
            what = f"its channel depends on the released cell of {parent!r}, which is not a level"
            raise SpecError(
                what,
                where,
                f"declare {parent!r} by levels, or release this column by another reference",
            )
        try:
            matrix = np.array(column.get("channel", column.get("channels")), float)
        except (TypeError, ValueError):
            what = "its channel is not a matrix of numbers"
            raise SpecError(what, where, _AS_WRITTEN) from None
        if "channels" in column and parent is None:
            matrix = matrix[0]
        given = None if parent is None else (parent, tuple(columns[parent]["levels"]))
        return cls(
            name=name,
            levels=tuple(column["levels"]),
            matrix=matrix,
            parent=given,
            max_condition=max_condition,
        )

    @property
    def outcomes(self) -> Outcomes:
        """What a row can be released as."""
        if self.parent is None:
            return Outcomes(columns=(self.name,), levels=(self.levels,))
        return Outcomes(columns=(self.parent[0], self.name), levels=(self.parent[1], self.levels))

    @property
    def channels(self) -> Floats:
        """The channel of each released level of the parent, of shape (strata, s, s); one without a parent."""
        return self.matrix.reshape(-1, len(self.levels), len(self.levels))

    @property
    def reference(self) -> Floats:
        """The distribution P that the channel leaves unchanged, float64 array of shape (s,), zero where a level is never released.

        Along a tree it is that of the average channel, which estimates use as weights alone.
        """
        average = self.channels.mean(axis=0)
        seen = average.max(axis=0) > 0
        inner = average[np.ix_(seen, seen)]
        equations = np.vstack([inner.T - np.eye(len(inner)), np.ones(len(inner))])
        solution = np.linalg.lstsq(equations, np.append(np.zeros(len(inner)), 1.0), rcond=None)[0]
        reference = np.zeros(len(seen))
        reference[seen] = np.maximum(solution, 1e-12)
        return reference / float(reference.sum())

    @property
    def correlations(self) -> Floats:
        """The canonical correlations of original and released value under the reference, falling; those near 0 are lost."""
        return np.sort(np.concatenate([each.singular for each in self._strata()]))[::-1]

    @property
    def condition_number(self) -> float:
        """The channel's condition number under the reference; infinite if it merges levels."""
        smallest = float(self.correlations[-1])
        return 1.0 / smallest if smallest > 1e-15 else math.inf

    def transform_for(
        self, values: Sequence[float] | Floats | None = None, *, approximate: bool = False
    ) -> Floats:
        """Return g with T g = f: averages of g over released levels estimate averages of f(Z).

        Parameters
        ----------
        values
            f at each level, in the card's order; by default the levels themselves, which must then
            be numbers.
        approximate
            Whether g may be the nearest one that the channel determines; there is no number of rows
            here to weigh its variance by.

        Returns
        -------
        float64 array of shape (s,); along a tree (parent levels, s).

        Raises
        ------
        SpecError
            If no g gives f (to 1e-6 of its range) without inverting a singular value below
            1/max_condition (10⁶ if it is None), and `approximate` is False.
        """
        found: Floats = self._invert(self._values(values), approximate=approximate).g[0]
        return found[0] if self.parent is None else found

    def find_nearest(self, values: Sequence[float] | Floats) -> tuple[Floats, float]:
        """Return the g whose averages are nearest to those of f(Z) within `max_condition`, and their largest bias.

        Of shape (strata, s), one stratum but along a tree; the bound is 0 if T g = f.
        """
        found = self._invert(self._values(values), approximate=True)
        return found.g[0], float(found.bias[0])

    def distribution(
        self, counts: Any, *, simplex: bool = False, approximate: bool = True
    ) -> Estimate:
        """Return the distribution of the original column, a Series by level.

        Parameters
        ----------
        counts
            The released frame; or its counts by level (Series, mapping); or counts in the card's
            order. Along a tree the frame, or counts by the parent's level and the own one.
        simplex
            False: entries sum to 1 but may be negative. True: weighted least squares over the
            probabilities, biased near the border; its standard errors are the other's, which are
            larger.
        approximate
            True: the estimate of least squared bias and variance together, with its worst bias;
            with a `max_condition`, the nearest that the directions within it determine. False: the
            unbiased estimate, or a refusal.

        Raises
        ------
        SpecError, DataError
            If the channel does not tell the levels apart and `approximate` is False; if the counts
            are not those of the levels.
        """
        table = self._table(outcome_counts(counts, self.outcomes))
        parts = self._shares(table, simplex=simplex, approximate=approximate)
        index = pd.Index(self.levels, name=self.name)
        return self._estimate(*(pd.Series(part[0], index) for part in parts), table=table)

    def mean(
        self,
        counts: Any,
        values: Sequence[float] | Floats | None = None,
        *,
        approximate: bool = True,
    ) -> Estimate:
        """Return the mean of f(Z), as a rule over the rows that are not null.

        Parameters
        ----------
        counts, approximate
            As for `distribution`.
        values
            f at each level, in the card's order; by default the levels themselves, which must then
            be numbers. NaN leaves the rows of a level out, as nulls are left out by default.
        """
        table = self._table(outcome_counts(counts, self.outcomes))
        parts = self._means(table, self._values(values, partly=True), approximate=approximate)
        return self._estimate(*(float(part[0]) for part in parts), table=table)

    def group_means(
        self,
        frame: Frame,
        by: str | Sequence[str],
        values: Sequence[float] | Floats | None = None,
        *,
        approximate: bool = True,
    ) -> Estimate:
        """Return the mean of f(Z) in each group of kept columns, a Series by group.

        Parameters
        ----------
        frame
            The released pandas or Dask frame; of a Dask frame, counts by group and level are
            computed, once.
        by
            Kept columns.
        values
            f at each level, as for `mean`.
        approximate
            As for `distribution`. True: groups lean to the average of all rows, the more the fewer
            rows they have and the less groups seem to differ.

        Notes
        -----
        Standard errors come from each group's own spread, conditional on its size, and of fewer
        than 20 rows from the spread of all rows; a group of one row has none (NaN).
        """
        groups, table = self._group(frame, by)
        parts = self._means(table, self._values(values, partly=True), approximate=approximate)
        return self._estimate(*(pd.Series(part, groups) for part in parts), table=table)

    def crosstab(
        self,
        frame: Frame,
        by: str | Sequence[str],
        *,
        simplex: bool = False,
        normalise: bool = False,
        approximate: bool = True,
    ) -> Estimate:
        """Return how many rows of each group had each original level, a DataFrame (groups × levels).

        Parameters
        ----------
        frame, by
            As for `group_means`.
        simplex
            As for `distribution`, in each group.
        normalise
            Whether to give shares of the group instead of counts.
        approximate
            As for `group_means`.
        """
        groups, table = self._group(frame, by)
        value, error, worst = self._shares(table, simplex=simplex, approximate=approximate)
        sizes = table.sum(axis=(1, 2))[:, None]
        if normalise:
            sizes = np.ones((len(table), 1))
        else:  # how many rows a group has is drawn from the population, too
            error = np.sqrt(error**2 + value**2 * (1.0 / sizes - 1.0 / sizes.sum()))
        columns = pd.Index(self.levels, name=self.name)
        return self._estimate(
            *(pd.DataFrame(sizes * part, groups, columns) for part in (value, error, worst)),
            table=table,
        )

    def slope(
        self,
        frame: Frame,
        *,
        covariates: Sequence[str] = (),
        response: str | None = None,
        values: Sequence[float] | Floats | None = None,
        approximate: bool = True,
    ) -> Estimate:
        """Return the least-squares slopes of a linear regression with this column in it, a Series by covariate.

        Parameters
        ----------
        frame
            The released pandas or Dask frame; of a Dask frame, three small tables of sums are
            computed.
        covariates
            Kept numeric columns. A constant is always added.
        response
            None: f(Z) is regressed on the covariates. A kept numeric column: it is regressed on
            f(Z) and the covariates.
        values
            f at each level, as for `mean`: rows of levels without a number are left out.
        approximate
            As for `distribution`.

        Raises
        ------
        SpecError
            As for `transform_for`; if a kept column is not numeric or does not vary; or if the
            variance of f(Z) cannot be distinguished from zero, so that its slope is not determined.

        Notes
        -----
        As a response f(Z) is replaced by g(Z̃). As a covariate its cross-products with other
        columns are those of g(Z̃), and its square is h(Z̃) with T h = f²: this undoes the
        attenuation. Where rows are left out, each row counts as k(Z̃), T k being 1 of the others.
        Standard errors are sandwich ones (heteroscedasticity-consistent) of the
        corrected scores. As a covariate no bound on an approximation's bias is known, so one that
        the channel determines is inverted exactly.
        """
        f = self._values(values, partly=True)
        here = np.isfinite(f)
        if not here.any():
            raise SpecError("no level has a number", f"column {self.name!r}", "give `values`")
        f = np.where(here, f - np.average(f[here], weights=self.reference[here] + 1e-12), 0.0)
        if response is None and not covariates:
            raise SpecError(
                "a slope needs a kept column", "slope", "name a response, or covariates"
            )
        found = moments(
            frame, covariates if response is None else [*covariates, response], self.outcomes
        )
        table = self._table(found.products[0, 0])
        inside = [] if here.all() else [here.astype(float)]
        if response is None:
            names: list[str] = list(covariates)
            is_likely = approximate and self.max_condition is None and self.at_most is not None
            pseudo, *known = (
                self._balance_slopes(each, table, found)
                if is_likely and not inside
                else self._pseudo_values(each, table, approximate=approximate)
                for each in (f, *inside)
            )
            parts = regress_on_kept(found, *map(self._narrow, (pseudo, *known)))
        else:
            names = [self.name, *covariates]
            wanted = (f, f**2, *inside)
            every = [self._invert(each, approximate=approximate) for each in wanted]
            if self.max_condition is None and any(part.bias[0] for part in every):
                every = [self._pseudo_values(each, table, approximate=True) for each in wanted]
            parts = regress_kept_on(found, *every)
        return self._estimate(*(pd.Series(part, pd.Index(names)) for part in parts), table=table)

    def _values(self, values: Sequence[float] | Floats | None, *, partly: bool = False) -> Floats:
        """Return f at each level; only with `partly` may some have none, NaN."""
        if values is None:
            allowed: Any = int | float | None if partly else int | float
            if not all(isinstance(level, allowed) for level in self.levels):
                raise SpecError(
                    "its levels are not all numbers",
                    f"column {self.name!r}",
                    "give `values`, one number per level (null included)",
                )
            values = np.array(self.levels, float)  # None is NaN
        f = np.asarray(values, float)
        if (
            f.shape != (len(self.levels),)
            or np.isinf(f).any()
            or not (partly or np.isfinite(f).all())
        ):
            raise SpecError(
                "values must be finite numbers, one per level",
                f"column {self.name!r}",
                f"give {len(self.levels)} of them",
            )
        return f

    @property
    def is_about_reference(self) -> bool:
        """Whether original levels are taken to differ from the reference as what is seen of them does."""
        return self.at_most is not None and not self.follows

    @property
    def axis(self) -> Floats | None:
        """The levels, if they are numbers, null as their mean: groups differ first of all in it."""
        if not all(isinstance(each, int | float | None) for each in self.levels):
            return None
        numbers = np.array(self.levels, float)  # None is NaN
        known = ~np.isnan(numbers)
        weights = np.where(known, self.reference + 1e-12, 0.0)
        mean = float(weights @ np.nan_to_num(numbers) / weights.sum()) if known.any() else 0.0
        return np.where(known, numbers, mean)

    def _strata(self, table: Floats | None = None) -> list[Directions]:
        """Return the directions of each channel, under the reference; or under what a table says of the original distribution."""
        prior = self.reference
        if table is None:
            return [Directions.of(matrix, prior) for matrix in self.channels]
        return [
            Directions.of(matrix, estimate_prior(matrix, prior, own))
            for matrix, own in zip(self.channels, table.sum(axis=0), strict=True)
        ]

    def _table(self, counts: Floats) -> Floats:
        """Return counts by outcome as an array of shape (groups, strata, s)."""
        return counts.reshape(-1, len(self.channels), len(self.levels))

    def _group(self, frame: Frame, by: str | Sequence[str]) -> tuple[pd.Index, Floats]:
        names = [by] if isinstance(by, str) else list(by)
        groups, counts = group_counts(frame, names, self.outcomes)
        return groups, self._table(counts)

    def _invert(self, f: Floats, *, approximate: bool) -> PseudoValues:
        """Return g with T g = f, up to the cut-off; refuse one that is not exact unless it may be approximate."""
        limit, strata = self.max_condition or MAX_CONDITION, self._strata()
        found = invert(strata, f, limit)
        if found.bias[0] and not approximate:
            # of the stratum that tells least
            used, of = min(
                (int((each.singular >= 1 / limit).sum()), len(each.singular)) for each in strata
            )
            raise SpecError(
                f"its channel determines only {used} of {of} directions (condition number above {limit:.0e}), and this estimate needs the others",
                f"column {self.name!r}",
                "ask for coarser values, pass approximate=True and read the worst bias, or release with another channel or a larger ε",
            )
        return found

    def _pseudo_values(
        self, f: Floats, table: Floats, *, approximate: bool, spreads: Spreads | None = None
    ) -> PseudoValues:
        """Return g for the averages of each group of a table, as it was asked for."""
        if not approximate or self.max_condition is not None:
            return self._invert(f, approximate=approximate)
        if len(table) == 1 and not self.is_about_reference:
            return balance(self._strata(table), f, table[0])
        strata, spread, of_all = spreads or self._fit_spreads(table, f)
        return balance_groups(strata, f, spread, of_all)

    def _fit_spreads(self, table: Floats, axis: Floats | None) -> Spreads:
        """Return the directions, how groups differ along them, and how all rows differ from the reference; None if they follow it."""
        if not self.is_about_reference:
            strata = self._strata(table)
            return strata, fit_spread(strata, table, axis), None
        strata = self._strata()
        of_all = fit_spread(strata, table.sum(axis=0, keepdims=True), axis, of_all=True)
        return strata, of_all if len(table) == 1 else fit_spread(strata, table, axis), of_all

    def _means(
        self, table: Floats, f: Floats, *, approximate: bool, spreads: Spreads | None = None
    ) -> Triple:
        """Return the mean of each group over the rows whose level has a number, its standard error and its worst bias."""
        here, sizes = np.isfinite(f), table.sum(axis=(1, 2))
        centre = 0.0 if here.all() or not here.any() else float(f[here].mean())

        def find(values: Floats) -> PseudoValues:
            return self._pseudo_values(values, table, approximate=approximate, spreads=spreads)

        def average(pseudo: PseudoValues) -> Pair:
            mean = (table * pseudo.g).sum(axis=(1, 2)) / sizes
            spread = (table * (pseudo.g - mean[:, None, None]) ** 2).sum(axis=(1, 2))
            spread = spread / np.where(sizes > 1, sizes - 1, np.nan)
            few = (sizes > 1) & (sizes < FEW_ROWS)
            if few.any():  # which can be alike by chance: they vary as all rows do
                every = table.sum(axis=0) / table.sum()
                g = np.broadcast_to(pseudo.g, table.shape)[few]
                about = (every * g).sum(axis=(1, 2))
                spread[few] = (every * (g - about[:, None, None]) ** 2).sum(axis=(1, 2))
            return mean, np.sqrt(np.maximum(spread / sizes + pseudo.shared, 0.0))

        pseudo, known = find(np.where(here, f - centre, 0.0)), np.ones(len(table))
        with np.errstate(invalid="ignore", divide="ignore"):
            value, error = average(pseudo)
            if not here.all():
                # a ratio A / B moves as (A - value B) / B does, if B is surely above 0
                inside = find(here.astype(float))
                known, doubt = average(inside)
                known = np.where(known > _SURELY * doubt, known, np.nan)
                value = value / known
                pseudo = pseudo.minus(value, inside)
                error = average(pseudo)[1] / known
            worst = self._worst_biases(pseudo, table) / known
            if self.at_most is not None and pseudo.likely is not None:
                assert pseudo.probability is not None
                half = find_half_width(error, pseudo.likely / known, pseudo.probability)
                worst = np.where(worst > 0.0, np.fmin(worst, half - NORMAL_95 * error), 0.0)
        return centre + value, error, np.broadcast_to(worst, sizes.shape)

    def _narrow(self, pseudo: PseudoValues) -> PseudoValues:
        """Return pseudo-values whose bias is the largest root mean square over the rows; none of their levels is more frequent than it may be."""
        if self.at_most is None or not pseudo.bias.any():
            return pseudo
        squares = [
            each.square_bias(pseudo.g[0, place], pseudo.f[0], self.at_most)
            for place, each in enumerate(self._strata())
        ]
        return replace(pseudo, bias=np.minimum(pseudo.bias, np.sqrt(max(squares))))

    def _balance_slopes(self, f: Floats, table: Floats, found: Moments) -> PseudoValues:
        """Return g for the slopes of f(Z) on kept columns; along a tree, for averages over all rows."""
        if self.parent is not None:
            return self._pseudo_values(f, table, approximate=True)
        gram = found.products.sum(axis=2)
        refuse_collinear(gram)
        inverse = np.linalg.inv(gram)
        # the part of each covariate that the others do not explain, as a standardised one
        own = inverse[1:] * np.sqrt(found.n_rows / np.diag(inverse)[1:, None])
        strata = self._strata(table)
        spread = fit_slopes(strata[0], own @ found.products[0], found.n_rows, f)
        return balance_groups(strata, f, spread, spread)

    def _worst_biases(self, pseudo: PseudoValues, table: Floats) -> Floats:
        """Return the worst bias of each group; none of its levels is more frequent than among all rows."""
        if self.at_most is None or not pseudo.bias.any():
            return pseudo.bias
        sizes, total = table.sum(axis=2), table.sum()
        bias = np.zeros(len(table))
        for place, each in enumerate(self._strata()):
            n = sizes[:, place]
            caps = self.at_most * (total / np.maximum(n, 1.0))[:, None]
            most = np.minimum(caps, 1.0)
            g = np.broadcast_to(pseudo.g[:, place], (len(table), table.shape[2]))
            own = each.bias(g, np.broadcast_to(pseudo.f, g.shape), most)
            bias += n / np.maximum(sizes.sum(axis=1), 1.0) * own
        return np.minimum(bias, pseudo.bias)

    def _shares(self, table: Floats, *, simplex: bool, approximate: bool) -> Triple:
        functions = np.diag((self.reference > 0).astype(float))
        spreads = None
        if approximate and self.max_condition is None and (len(table) > 1 or not self.follows):
            spreads = self._fit_spreads(table, self.axis)
        parts = [self._means(table, f, approximate=approximate, spreads=spreads) for f in functions]
        value, error, worst = (np.column_stack(part) for part in zip(*parts, strict=True))
        if simplex:
            value = np.array(
                [nearest_probabilities(self.channels, self.reference, counts) for counts in table]
            )
        return value, error, worst

    def _estimate(self, value: Any, error: Any, worst: Any, *, table: Floats) -> Estimate:
        rows = table.sum(axis=(0, 2))
        limits = np.sqrt(rows)
        if self.max_condition or not np.any(worst):
            limits = np.full(len(rows), self.max_condition or MAX_CONDITION)
        used = [
            each.singular[each.singular >= 1 / limit][-1]
            for each, limit in zip(self._strata(), limits, strict=True)
            if limit >= 1
        ]
        return Estimate(
            value=value,
            standard_error=error,
            condition_number=float(1 / min(used)),
            worst_bias=worst,
        )
