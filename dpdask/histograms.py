"""Perturbed histograms of Dask and pandas frames: `fit` is the barrier, cells are a weighted sample, `sample` is lazy."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, Self

import pandas as pd
from numpy.random import Generator

from dpdask.cells import DEFAULT_BINS
from dpdask.codec import LevelCodec
from dpdask.documents import validate
from dpdask.engine.frames import Frame, bound_frame, forget_secrets, secret_folder
from dpdask.engine.joint import joint_counts_of_frame
from dpdask.engine.synthesise import write_histogram
from dpdask.engine.synthetic_frames import frame_tables_work, sample_frame
from dpdask.engine.tabulate import domain_of
from dpdask.engine.work import KEY_NAME
from dpdask.errors import DataError, SpecError
from dpdask.io.saved import load_release, save_release
from dpdask.io.storage import Folder, absolute_url
from dpdask.mechanisms.columns import bins_by_column
from dpdask.mechanisms.histogram import noise as histogram
from dpdask.mechanisms.histogram.card import histogram_card
from dpdask.mechanisms.histogram.cells import bins_by_rule
from dpdask.mechanisms.histogram.noise import HistogramPlan, Threshold
from dpdask.mechanisms.histogram.points import Points, points_per_cell
from dpdask.mechanisms.histogram.release import WEIGHT, FittedHistogram, histogram_from_bytes, histogram_to_bytes
from dpdask.privacy import Budget, UnitColumn, noisy_counts_text
from dpdask.privacy.events import Adjacency
from dpdask.schema import Schema
from dpdask.streams import RunKey, stream

_PARTITION_ROWS = 2**17
_MANY_ROWS = 1e18
_HISTOGRAM = "histogram.npz"


@dataclass(frozen=True, slots=True)
class PerturbedHistogram:
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
        `replace-one`: one row has other values, the number of rows is public. `add-remove`: one row is there or not.
    unit
        What is protected: `row`, or `UnitColumn(column=…, max_rows=…)`.
    bins
        How continuous and mixed columns are cut: a number of cells of one width, or for each column such a number or the
        first value of each cell; or `rule`, the paper's rate, which needs replace-one.
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

    schema: Schema
    _: KW_ONLY
    epsilon: float
    delta: float = 0.0
    adjacency: Adjacency = "replace-one"
    unit: UnitColumn | Literal["row"] = "row"
    bins: int | Mapping[str, int | Sequence[float]] | Literal["rule"] = DEFAULT_BINS
    threshold: Threshold = "enhanced"
    factor: float = 0.5
    insecure_seed: int | None = None

    def __post_init__(self) -> None:
        if not self.schema.privatised:
            raise SpecError("the schema privatises no column", "PerturbedHistogram", "give at least one column the role privatise")
        if self.schema.kept:
            what = "a cell of a histogram is nobody's, so no column can be kept"
            raise SpecError(what, f"column {self.schema.kept[0]!r}", "give it the role privatise, or drop")
        if WEIGHT in self.schema.privatised:
            raise SpecError("the cells have a column of that name themselves", f"column {WEIGHT!r}", "rename it, or drop it")
        if self.threshold not in ("none", "positive", "enhanced"):
            raise SpecError("must be none, positive or enhanced", "PerturbedHistogram, threshold")
        if self.bins == "rule" and self.adjacency == "add-remove":
            what = "the rule needs the number of rows, which add-remove hides"
            raise SpecError(what, "PerturbedHistogram, bins", "give numbers of cells, or take replace-one")
        self._check_noise()

    def _check_noise(self) -> None:
        """Raise a SpecError if the parameters are none that noise can be planned by."""
        _ = self.noise

    @property
    def budget(self) -> Budget:
        """What is promised."""
        given = {"epsilon": self.epsilon, "delta": self.delta, "adjacency": self.adjacency, "unit": self.unit}
        return validate(Budget, given, "PerturbedHistogram")

    @property
    def noise(self) -> HistogramPlan:
        """The noise of every cell, and the threshold; it depends on no data."""
        return histogram.plan(self.budget, threshold=self.threshold, factor=self.factor)

    def fit(self, frame: Frame, *, folder: str | None = None) -> HistogramRelease:
        """Count and draw the noise: the one barrier. Only the noisy histogram goes on from here.

        Parameters
        ----------
        frame
            A Dask or pandas frame.
        folder
            A folder, as a path or URL, that every worker can read, for the noisy histogram; by default a new temporary one
            of this machine, removed when Python ends.

        Raises
        ------
        DataError
            If the frame violates the schema; under replace-one, if it has no rows.
        SpecError
            If the bins are none, or the histogram is too large.

        Warns
        -----
        UserWarning
            If δ is not below 1 / the number of rows; under replace-one also if the noise will be large beside the counts.
        """
        place = secret_folder(folder)
        key = RunKey.fresh() if self.insecure_seed is None else RunKey.insecure(self.insecure_seed)
        place.write(KEY_NAME, key.reveal(), private=True)
        bins = self._bins(frame)
        work = frame_tables_work(frame, self.schema, bins, place, self.budget.unit_column)
        domain, planned = domain_of(work.cells), self.noise
        histogram.check_size(domain, planned, _MANY_ROWS)  # what needs no number of rows is refused before any is read
        counts = joint_counts_of_frame(frame, bound_frame(frame, work)).counts
        if self.adjacency == "replace-one":
            if counts.n_rows == 0:
                raise DataError("the frame has no rows", "PerturbedHistogram", "give it some")
            cut = tuple(name for name, column in work.cells.items() if len(column.edges))
            for caution in histogram.cautions(domain, planned, counts.n_rows, cut):
                warnings.warn(caution, stacklevel=2)
        rng = stream(key, "histogram/noise", "") if self.insecure_seed is not None else None
        noisy = histogram.draw(counts, planned, rng=rng)
        fitted = FittedHistogram(schema=self.schema, types=work.released, bins=bins_by_column(bins, work.cells), histogram=noisy)
        if self.delta * fitted.n_records >= 1:
            warnings.warn("δ is not below 1 / the number of rows: publishing one random row verbatim would satisfy the same guarantee", stacklevel=2)
        forget_secrets(place)
        return HistogramRelease._of(fitted, self.budget, place, insecure=self.insecure_seed is not None)

    def _bins(self, frame: Frame) -> int | Mapping[str, int | Sequence[float]]:
        if self.bins != "rule":
            return self.bins
        cut = sum(not self.schema.columns[name].has_levels for name in self.schema.privatised)
        return bins_by_rule(max(2, len(frame)), cut, thresholded=self.threshold != "none") if cut else DEFAULT_BINS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HistogramRelease:
    """A noisy histogram; made by `PerturbedHistogram.fit`, or by `load` elsewhere, without the data.

    Attributes
    ----------
    fitted
        The noisy counts, the columns that their cells stand for, and by which points.
    card
        The release card: what was promised, to whom, and how; safe to publish.
    folder
        Where workers read the histogram.
    sha256
        Of it.

    Privacy
    -------
    A function of the noisy counts: it may be published, and anything computed from it, at no further cost.
    """

    fitted: FittedHistogram
    card: Mapping[str, Any]
    folder: Folder
    sha256: str

    @classmethod
    def _of(cls, fitted: FittedHistogram, budget: Budget, folder: Folder, *, insecure: bool) -> Self:
        guarantee = noisy_counts_text(budget)
        card = histogram_card(name="frame", budget=budget, guarantee=guarantee, fitted=fitted, output=None, n_records=None, insecure=insecure)
        return cls(fitted=fitted, card=json.loads(card), folder=folder, sha256=write_histogram(fitted, folder))

    @property
    def noise(self) -> HistogramPlan:
        """The noise that every cell had, and the threshold."""
        return self.fitted.histogram.plan

    @property
    def cells(self) -> pd.DataFrame:
        """The cells with a weight: the centre of each column, and `weight`, float64; levels that are no numbers are categories.

        With the points `spread`, several rows stand for each cell; see `with_points`. A category is kept where none of its
        cells is, so that indicators of redrawn cells are those of the cells.
        """
        return _cells_frame(self.fitted)

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
        if points not in ("centre", "spread"):
            raise SpecError("must be centre or spread", "HistogramRelease, points")
        fitted = replace(self.fitted, points=points)
        points_per_cell(fitted.cells(), points)
        return replace(self, fitted=fitted, card={**self.card, "mechanism": {**self.card["mechanism"], "points": points}})

    def redraw(self, rng: Generator) -> pd.DataFrame:
        """Return `cells` with the same noise once more, cut at the same threshold: for `inference.noise_error`, free.

        Parameters
        ----------
        rng
            Any stream: this is post-processing, and needs no secret.
        """
        return _cells_frame(replace(self.fitted, histogram=self.fitted.histogram.redraw(rng)))

    def sample(self, n_rows: int | None = None, *, rows_per_partition: int = _PARTITION_ROWS, seed: int | None = None) -> Frame:
        """Return synthetic rows as a lazy Dask frame: each cell with probability proportional to its positive weight.

        Parameters
        ----------
        n_rows
            How many; by default as many as the table has. Under add-remove, the default is the noisy number of rows, or 0 if
            no weight is positive.
        rows_per_partition
            How many in a partition.
        seed
            Decides the rows, in [0, 2**64); by default a fresh one. The same frame computed twice is the same rows.

        Raises
        ------
        SpecError
            If a number is out of range; under replace-one, if no weight is positive.
        """
        if self.fitted.n_drawn(None):
            self.fitted.histogram.check_positive()
        return sample_frame(self.fitted, self.folder, self.sha256, n_rows, rows_per_partition, seed)

    def save(self, path: str) -> None:
        """Write the noisy histogram to a folder, as a path or any fsspec URL: safe to publish, and enough for `load`.

        The card is written last, with the other file's digest.

        Raises
        ------
        OutputError
            If a release is there already, or it cannot be written.
        """
        save_release(Folder(absolute_url(path)), _HISTOGRAM, histogram_to_bytes(self.fitted), self.card)

    @classmethod
    def load(cls, path: str, *, folder: str | None = None) -> Self:
        """Return a saved histogram.

        Parameters
        ----------
        path
            Where it was saved.
        folder
            As for `PerturbedHistogram.fit`.

        Raises
        ------
        InputError
            If there is none, or of another version, or its card is another release's.
        """
        data, card = load_release(Folder(absolute_url(path)), _HISTOGRAM)
        fitted = histogram_from_bytes(data, _HISTOGRAM)
        working = secret_folder(folder)
        return cls(fitted=fitted, card=card, folder=working, sha256=write_histogram(fitted, working))


def _cells_frame(fitted: FittedHistogram) -> pd.DataFrame:
    frame: pd.DataFrame = fitted.cell_rows(0, fitted.n_points).to_pandas()
    for name, column in fitted.cells().items():
        if isinstance(column.codec, LevelCodec):
            levels = column.codec.levels.drop_null().to_pandas()
            if not pd.api.types.is_numeric_dtype(levels.dtype) or pd.api.types.is_bool_dtype(levels.dtype):
                frame[name] = pd.Categorical(frame[name], levels, ordered=column.codec.ordered)
    return frame
