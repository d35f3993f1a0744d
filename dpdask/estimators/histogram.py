"""Perturbed histograms of Dask and pandas frames: `fit` is the barrier, cells are a weighted sample, `sample` is lazy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal, Self

import pandas as pd
from numpy.random import Generator

from dpdask.archive import Archived
from dpdask.estimators.estimator import NoisyCountsEstimator
from dpdask.estimators.release import Release
from dpdask.mechanisms.histogram.noise import HistogramPlan, Threshold
from dpdask.mechanisms.histogram.points import Points
from dpdask.mechanisms.histogram.release import FittedHistogram
from dpdask.mechanisms.histogram.spec import HistogramSpec


class HistogramRelease(Release):
    """A noisy histogram; made by `PerturbedHistogram.fit`, or by `load` elsewhere, without the data.

    Privacy
    -------
    A function of the noisy counts: it may be published, and anything computed from it, at no further cost.

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
    def from_fit(cls, *, fitted: FittedHistogram, **given: Any) -> Self:
        """Return the release that a fit made: `cells` lists its cells, and `sample` draws rows; see `Release.from_fit`.

        Parameters
        ----------
        fitted
            What was fitted.
        given
            As for `Release.from_fit`.
        """
        return super().from_fit(fitted=replace(fitted, output="rows"), **given)

    @property
    def noise(self) -> HistogramPlan:
        """The noise that every cell had, and the threshold."""
        return self.fitted.histogram.plan

    @property
    def cells(self) -> pd.DataFrame:
        """The cells with a weight: the centre of each column, and `weight`, float64; levels that are no numbers are categories.

        With the points `spread`, several rows stand for each cell; see `with_points`. A category without a listed
        cell is kept too, so that redrawn cells have the same indicators.
        """
        return self.fitted.to_frame()

    def with_points(self, points: Points) -> Self:
        """Return this release with other points for its cells: `cells` and `redraw` give them, the card names them; free.

        Parameters
        ----------
        points
            `centre`, as at first and in the paper, or `spread`: two points for each column that is cut, multiplied, with
            weights that keep the means, variances and covariances of a smooth density, which centres do not; see
            `mechanisms.histogram.points.spread` for when that is of use.

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
        δ, in [0, 1): it may be 0; under replace-one a positive one makes the noise a little smaller.
    adjacency
        `replace-one`: one row has other values, the number of rows is public. `add-remove`: one row is present or absent
        (its values are then protected by 2·epsilon).
    unit
        What is protected: `row`, or `UnitColumn(column=…, max_rows=…)`.
    bins
        How continuous and mixed columns are cut. `adaptive`: into as many cells of equal counts as the rows allow; the cells are found
        under privacy, in a separate pass. A number: into that many cells of equal width. A mapping: for each column one of these, or a
        list of the first value of each cell. `rule`: by the paper's rate, which needs replace-one.
    threshold
        Which cells are kept: `none` (all, with negative weights), `positive`, or `enhanced`: those whose noisy count reaches
        factor·log n/ε.
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
    Unit: a row, or all rows that share a column's value. Protected: every row. L1 sensitivity of the histogram: 2 under
    replace-one, 1 under add-remove, times max_rows. Events: one noisy histogram, and under add-remove with the enhanced
    threshold the noisy number of rows. Everything after the noise is post-processing. ε is spent again by every new `fit`
    on the same rows.

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
    bins: Literal["adaptive", "rule"] | int | Mapping[str, Literal["adaptive"] | int | Sequence[float]] = "adaptive"
    threshold: Threshold = "enhanced"
    factor: float = 0.5

    release_class: ClassVar[type[Release]] = HistogramRelease

    def _spec(self) -> tuple[type[HistogramSpec], dict[str, Any]]:
        return HistogramSpec, {"bins": self.bins, "threshold": self.threshold, "factor": self.factor}
