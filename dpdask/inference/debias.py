"""Unbiased estimates from a released level column: its noise is a public channel, so estimates can correct for it.

Everything here needs the release and its card alone. It is post-processing: it costs no ε.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize, special

from dpdask.errors import SpecError
from dpdask.inference.tallies import Floats, Frame, Moments, group_counts, level_counts, moments
from dpdask.mechanisms.card import Card

MAX_CONDITION = 1e6
"""Above this ratio of singular values a channel's direction is taken as lost."""

_EXACT = 1e-6  # of the range of f: what T g may differ from f by and still count as equal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimate:
    """An estimate of a quantity of the original column.

    Attributes
    ----------
    value
        A number, a Series (by level, group or covariate) or a DataFrame (groups × levels).
    standard_error
        The spread of `value` over drawing rows from a population and releasing them, of the same shape. For the released
        table itself it is an upper bound on average, since the rows are then fixed.
    condition_number
        The ratio of the largest to the smallest singular value that was inverted: the
        largest factor by which noise in the released column is amplified.
    worst_bias
        Zero where the channel determines the value. Otherwise (`approximate`) the largest possible bias, for any original
        values; infinite where no bound is known.
    """

    value: Any
    standard_error: Any
    condition_number: float
    worst_bias: Any = 0.0

    def interval(self, confidence: float = 0.95) -> tuple[Any, Any]:
        """Return the normal confidence interval, widened by the worst bias."""
        half = float(special.ndtri(0.5 + confidence / 2)) * self.standard_error + self.worst_bias
        return self.value - half, self.value + half


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReleasedColumn:
    """A released level column, with its part of the card.

    Attributes
    ----------
    name
        The column's name in the released frame.
    levels
        The public levels, in the card's order; None is a null that is a level.
    matrix
        The channel, float64 array of shape (s, s): T[k, j] = Pr(released level j | original level k).
    approximate
        False: an estimate that the channel does not determine is refused. True: it is replaced by the nearest one that
        the channel does determine, and its worst bias is reported.
    max_condition
        Directions whose singular value lies below 1/max_condition are not inverted.

    Notes
    -----
    For any function f of the levels and g with T g = f, E[g(Z̃) | x] = E[f(Z) | x] for every x that the noise does not
    depend on: kept columns, and other columns' values. Means, group means, cross-tabulations and slopes of f(Z) are
    therefore those of g(Z̃). g is the least-squares solution of least norm, both weighted by the channel's invariant
    distribution P (P·T = P, the reference). In these weights the singular values are the canonical correlations of
    original and released value; the largest is 1.

    A channel may merge levels: two of its rows are equal, or nearly so. Then T g = f has no solution for some f, and no
    analysis, however large the table, can tell. Channels of least squared cost do so at small ε. With `approximate`, g
    is still unbiased for every group whose distribution is P times a combination of the channel's columns (for one, if
    merged levels occur in the proportions of the reference).

    Levels that the reference never saw are taken not to occur.

    Examples
    --------
    Of 1,000 people asked, 400 are released as "yes" by a channel that keeps an answer with probability 3/4:

    >>> import numpy as np
    >>> answer = ReleasedColumn(name="answer", levels=("no", "yes"), matrix=np.array([[0.75, 0.25], [0.25, 0.75]]))
    >>> share = answer.distribution({"no": 600, "yes": 400})
    >>> share.value.round(3).to_dict()
    {'no': 0.7, 'yes': 0.3}
    >>> share.standard_error.round(3).to_dict()
    {'no': 0.031, 'yes': 0.031}
    >>> round(share.condition_number, 3)
    2.0

    The share of "yes" by a kept column; the pseudo-values behind it, whose average is unbiased; and the slope of "yes"
    on years:

    >>> import pandas as pd
    >>> released = pd.DataFrame({"town": ["A"] * 500 + ["B"] * 500, "years": [1, 2, 3, 4] * 250, "answer": ["no"] * 600 + ["yes"] * 400})
    >>> answer.group_means(released, "town", values=[0, 1]).value.round(3).to_dict()
    {'A': -0.5, 'B': 1.1}
    >>> answer.transform_for([0, 1]).round(3).tolist()
    [-0.5, 1.5]
    >>> slope = answer.slope(released, covariates=["years"], values=[0, 1])
    >>> [round(float(end["years"]), 3) for end in slope.interval()]
    [-0.054, 0.054]

    References
    ----------
    Warner 1965; van den Hout and van der Heijden, Randomized response, statistical disclosure control and
    misclassification, 2002; Carroll, Ruppert, Stefanski and Crainiceanu, Measurement error in nonlinear models, 2006,
    chapter 7 (corrected scores).
    """

    name: str
    levels: tuple[object, ...]
    matrix: Floats
    approximate: bool = False
    max_condition: float = MAX_CONDITION

    def __post_init__(self) -> None:
        matrix, where = self.matrix, f"column {self.name!r}"
        if matrix.shape != (len(self.levels), len(self.levels)) or not len(self.levels):
            raise SpecError("its channel is not square, one row and one column per level", where, "use the card as it was written")
        if not np.isfinite(matrix).all() or (matrix < 0).any() or np.abs(matrix.sum(axis=1) - 1).max() > 1e-9:
            raise SpecError("its channel's rows are not probabilities", where, "use the card as it was written")
        if not 1 <= self.max_condition <= MAX_CONDITION:
            raise SpecError(f"max_condition must lie in [1, {MAX_CONDITION:.0e}]", where, "leave it out")

    @classmethod
    def from_card(cls, card: Mapping[str, Any], name: str, *, approximate: bool = False, max_condition: float = MAX_CONDITION) -> ReleasedColumn:
        """Return a column of a release card.

        Parameters
        ----------
        card
            `release.card`, or `_dpdask/release.json` parsed.
        name
            The column.
        approximate, max_condition
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
        column = columns[name]
        if "channel" not in column or "levels" not in column:
            raise SpecError("the card gives no channel on levels", f"column {name!r}", "only privatised discrete and categorical columns have one")
        try:
            matrix = np.array(column["channel"], dtype=np.float64)
        except (TypeError, ValueError):
            raise SpecError("its channel is no matrix of numbers", f"column {name!r}", "use the card as it was written") from None
        return cls(name=name, levels=tuple(column["levels"]), matrix=matrix, approximate=approximate, max_condition=max_condition)

    @property
    def reference(self) -> Floats:
        """The distribution P that the channel leaves unchanged, float64 array of shape (s,), zero where a level is never released."""
        seen = self.matrix.max(axis=0) > 0
        inner = self.matrix[np.ix_(seen, seen)]
        equations = np.vstack([inner.T - np.eye(len(inner)), np.ones(len(inner))])
        solution = np.linalg.lstsq(equations, np.append(np.zeros(len(inner)), 1.0), rcond=None)[0]
        reference = np.zeros(len(seen))
        reference[seen] = np.maximum(solution, 1e-12)
        return reference / float(reference.sum())

    @property
    def correlations(self) -> Floats:
        """The canonical correlations of original and released value under the reference, 1 first; those near 0 are lost."""
        return self._decompose()[1]

    @property
    def condition_number(self) -> float:
        """The channel's condition number under the reference; infinite if it merges levels."""
        smallest = float(self.correlations[-1])
        return 1.0 / smallest if smallest > 1e-15 else math.inf

    def transform_for(self, values: Sequence[float] | Floats | None = None) -> Floats:
        """Return g with T g = f: averages of g over released levels estimate averages of f(Z).

        Parameters
        ----------
        values
            f at each level, in the card's order; by default the levels themselves, which must then be numbers.

        Returns
        -------
        float64 array of shape (s,).

        Raises
        ------
        SpecError
            If no g gives f (to 1e-6 of its range) without inverting a singular value below 1/max_condition, and
            `approximate` is False.
        """
        return self._transform(self._values(values)[:, None])[0][:, 0]

    def distribution(self, counts: Any, *, simplex: bool = False) -> Estimate:
        """Return the distribution of the original column, a Series by level.

        Parameters
        ----------
        counts
            The released frame; or its counts by level (Series, mapping); or counts in the card's order.
        simplex
            False: the unbiased estimate, whose entries sum to 1 but may be negative. True: weighted least squares over
            the probabilities, biased near the border; its standard errors are the unbiased one's, which are larger.

        Raises
        ------
        SpecError, DataError
            If the channel does not tell the levels apart; if the counts are not those of the levels.
        """
        table = level_counts(counts, self.levels, self.name)[None, :]
        value, error, worst = self._shares(table, simplex=simplex)
        index = pd.Index(list(self.levels), name=self.name)
        return self._estimate(pd.Series(value[0], index), pd.Series(error[0], index), pd.Series(worst, index))

    def mean(self, counts: Any, values: Sequence[float] | Floats | None = None) -> Estimate:
        """Return the mean of f(Z); parameters as for `distribution` and `transform_for`."""
        table = level_counts(counts, self.levels, self.name)[None, :]
        value, error, worst = self._means(table, self._values(values)[:, None])
        return self._estimate(float(value[0, 0]), float(error[0, 0]), float(worst[0]))

    def group_means(self, frame: Frame, by: str | Sequence[str], values: Sequence[float] | Floats | None = None) -> Estimate:
        """Return the mean of f(Z) in each group of kept columns, a Series by group.

        Parameters
        ----------
        frame
            The released pandas or Dask frame; of a Dask frame, counts by group and level are computed, once.
        by
            Kept columns.
        values
            f at each level, as for `transform_for`.

        Notes
        -----
        Standard errors come from each group's own spread, conditional on its size; a group of one row has none (NaN).
        """
        groups, table = group_counts(frame, [by] if isinstance(by, str) else list(by), self.levels, self.name)
        value, error, worst = self._means(table, self._values(values)[:, None])
        return self._estimate(pd.Series(value[:, 0], groups), pd.Series(error[:, 0], groups), float(worst[0]))

    def crosstab(self, frame: Frame, by: str | Sequence[str], *, simplex: bool = False, normalise: bool = False) -> Estimate:
        """Return how many rows of each group had each original level, a DataFrame (groups × levels).

        Parameters
        ----------
        frame, by
            As for `group_means`.
        simplex
            As for `distribution`, in each group.
        normalise
            Whether to give shares of the group instead of counts.
        """
        groups, table = group_counts(frame, [by] if isinstance(by, str) else list(by), self.levels, self.name)
        value, error, worst = self._shares(table, simplex=simplex)
        sizes = np.ones((len(table), 1)) if normalise else table.sum(axis=1, keepdims=True)
        columns = pd.Index(list(self.levels), name=self.name)
        return self._estimate(*(pd.DataFrame(sizes * part, groups, columns) for part in (value, error, np.broadcast_to(worst, value.shape))))

    def slope(
        self,
        frame: Frame,
        *,
        covariates: Sequence[str] = (),
        response: str | None = None,
        values: Sequence[float] | Floats | None = None,
    ) -> Estimate:
        """Return the least-squares slopes of a linear regression with this column in it, a Series by covariate.

        Parameters
        ----------
        frame
            The released pandas or Dask frame; of a Dask frame, three small tables of sums are computed.
        covariates
            Kept numeric columns. A constant is always added.
        response
            None: f(Z) is regressed on the covariates. A kept numeric column: it is regressed on f(Z) and the covariates.
        values
            f at each level, as for `transform_for`.

        Raises
        ------
        SpecError
            As for `transform_for`; if a kept column is not numeric or does not vary; or if the variance of f(Z) cannot
            be told from zero, so that its slope is not determined.

        Notes
        -----
        As a response f(Z) is replaced by g(Z̃). As a covariate its cross-products with other columns are those of g(Z̃),
        and its square is h(Z̃) with T h = f²: this undoes the attenuation. Standard errors are sandwich ones
        (heteroscedasticity-consistent) of the corrected scores.
        """
        f = self._values(values)
        f = f - self.reference @ f
        if response is None:
            if not covariates:
                raise SpecError("a slope needs a kept column", "slope", "name a response, or covariates")
            return self._slopes_as_response(moments(frame, covariates, self.levels, self.name), f, covariates)
        return self._slopes_as_covariate(moments(frame, [*covariates, response], self.levels, self.name), f, covariates)

    def _slopes_as_response(self, found: Moments, f: Floats, covariates: Sequence[str]) -> Estimate:
        transform, worst = self._transform(f[:, None])
        g = transform[:, 0]
        gram = found.products.sum(axis=2)
        _refuse_collinear(gram)
        inverse = np.linalg.inv(gram)
        beta = inverse @ (found.products[:, 0] @ g)
        s0, s1, s2 = found.weigh(-beta, found.n_columns, self.levels, self.name)
        meat = s2.sum(axis=2) + 2 * s1 @ g + s0 @ g**2
        covariance = inverse @ meat @ inverse * found.n_rows / (found.n_rows - found.n_columns)
        bias = worst[0] * np.sqrt(found.n_rows * np.diag(inverse))  # Cauchy-Schwarz over the rows
        index = pd.Index(covariates)
        return self._estimate(*(pd.Series(part[1:] / found.scale, index) for part in (beta, np.sqrt(np.diag(covariance)), bias)))

    def _slopes_as_covariate(self, found: Moments, f: Floats, covariates: Sequence[str]) -> Estimate:
        transforms, worst = self._transform(np.column_stack([f, f**2]))
        g, h = transforms.T
        q, y = found.n_columns - 1, found.n_columns - 1  # the constant and the covariates; the response stands last
        by_level, n_levels = found.products, found.products[0, 0]
        gram = by_level[:q, :q].sum(axis=2)
        _refuse_collinear(gram)
        cross = by_level[0, :q] @ g
        bread = np.block([[np.array([[n_levels @ h]]), cross[None, :]], [cross[:, None], gram]])
        spread = bread[0, 0] - cross @ np.linalg.solve(gram, cross)
        if spread <= 3 * math.sqrt(n_levels @ (h - n_levels @ h / n_levels.sum()) ** 2):
            raise SpecError("the variance of its original values cannot be told from zero", f"column {self.name!r}", "use more rows or a larger ε")
        inverse = np.linalg.inv(bread)
        beta = inverse @ np.append(by_level[0, y] @ g, by_level[:q, y].sum(axis=1))
        slope, rest = beta[0], beta[1:]
        s0, s1, s2 = found.weigh(np.append(-rest, 1.0), q, self.levels, self.name)  # e = y - its kept part
        meat = np.empty_like(bread)  # of the scores (g e - h slope, w (e - g slope))
        meat[0, 0] = s2[0, 0] @ g**2 - 2 * slope * s1[0, 0] @ (g * h) + slope**2 * s0[0, 0] @ h**2
        meat[0, 1:] = meat[1:, 0] = s2[0] @ g - slope * s1[0] @ (g**2 + h) + slope**2 * s0[0] @ (g * h)
        meat[1:, 1:] = s2.sum(axis=2) - 2 * slope * s1 @ g + slope**2 * s0 @ g**2
        error = np.sqrt(np.diag(inverse @ meat @ inverse) * found.n_rows / (found.n_rows - q - 1))
        scale = found.scale[-1] / np.append(1.0, found.scale[:-1])
        index, keep = pd.Index([self.name, *covariates]), np.r_[0, 2 : q + 1]
        bias = np.full(q, math.inf if worst.any() else 0.0)
        return self._estimate(pd.Series(beta[keep] * scale, index), pd.Series(error[keep] * scale, index), pd.Series(bias, index))

    def _values(self, values: Sequence[float] | Floats | None) -> Floats:
        if values is None:
            if not all(isinstance(level, int | float) for level in self.levels):
                raise SpecError("its levels are not all numbers", f"column {self.name!r}", "give `values`, one number per level (null included)")
            values = [float(level) for level in self.levels if isinstance(level, int | float)]
        f = np.asarray(values, dtype=np.float64)
        if f.shape != (len(self.levels),) or not np.isfinite(f).all():
            raise SpecError("values must be finite numbers, one per level", f"column {self.name!r}", f"give {len(self.levels)} of them")
        return f

    def _decompose(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return U, σ, Vᵀ of D^½ T D^-½ on the levels that the reference saw, and D^½ there."""
        reference = self.reference
        seen = reference > 0
        root = np.sqrt(reference[seen])
        left, singular, right = np.linalg.svd(root[:, None] * self.matrix[np.ix_(seen, seen)] / root[None, :])
        return left, singular, right, root

    def _transform(self, f: Floats) -> tuple[Floats, Floats]:
        """Return G with T G = f, column by column, and each column's worst bias, exactly 0 where it is solved."""
        left, singular, right, root = self._decompose()
        seen = self.reference > 0
        used = singular >= singular[0] / self.max_condition
        inner = right[used].T @ ((left[:, used].T @ (root[:, None] * f[seen])) / singular[used, None]) / root[:, None]
        residual = np.abs(self.matrix[np.ix_(seen, seen)] @ inner - f[seen]).max(axis=0)
        solved = residual <= _EXACT * np.ptp(f[seen], axis=0) + 1e-12 * np.abs(f[seen]).max(axis=0)
        if not self.approximate and not solved.all():
            raise SpecError(
                f"its channel determines only {int(used.sum())} of {int(seen.sum())} directions (condition number above {self.max_condition:.0e}), "
                "and this estimate needs the others",
                f"column {self.name!r}",
                "ask for coarser values, pass approximate=True and read the worst bias, or release with another channel or a larger ε",
            )
        transform = np.zeros(f.shape)
        transform[seen] = inner
        return transform, np.where(solved, 0.0, residual)

    def _means(self, table: Floats, f: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the means (groups × functions), their standard errors and each function's worst bias."""
        transform, worst = self._transform(f)
        sizes = table.sum(axis=1, keepdims=True)
        value = table @ transform / sizes
        spread = np.array([counts @ (transform - centre) ** 2 for counts, centre in zip(table, value, strict=True)])
        with np.errstate(invalid="ignore", divide="ignore"):
            error = np.sqrt(spread / (sizes * np.where(sizes > 1, sizes - 1, np.nan)))
        return value, error, worst

    def _shares(self, table: Floats, *, simplex: bool) -> tuple[Floats, Floats, Floats]:
        seen = self.reference > 0
        value, error, worst = self._means(table, np.diag(seen.astype(np.float64)))
        if simplex:
            value = np.array([self._nearest_probabilities(counts) for counts in table])
        return value, error, worst

    def _nearest_probabilities(self, counts: Floats) -> Floats:
        """Return the p ≥ 0 of sum 1 with least Σ_j (q_j - (p T)_j)² / q_j, nearest the reference where several are."""
        reference = self.reference
        seen = reference > 0
        shares = counts[seen] / counts.sum()
        weight = 1 / np.sqrt(np.maximum(shares, 1 / counts.sum()))
        tie = 1e-6 / np.sqrt(reference[seen])
        rows = np.vstack([weight[:, None] * self.matrix[np.ix_(seen, seen)].T, np.diag(tie), np.full((1, int(seen.sum())), 1e4)])
        solution, _ = optimize.nnls(rows, np.concatenate([weight * shares, tie * reference[seen], [1e4]]))
        result = np.zeros(len(seen))
        result[seen] = solution / solution.sum()
        return result

    def _estimate(self, value: Any, error: Any, worst: Any) -> Estimate:
        singular = self.correlations
        used = singular[singular >= singular[0] / self.max_condition]
        return Estimate(value=value, standard_error=error, condition_number=float(used[0] / used[-1]), worst_bias=worst)


def _refuse_collinear(gram: Floats) -> None:
    """Refuse kept covariates (standardised) if one is a linear combination of the others."""
    if np.linalg.cond(gram) > 1e10:
        raise SpecError("the covariates are collinear", "slope", "leave out one that the others determine")
