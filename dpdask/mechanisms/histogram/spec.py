"""The perturbed histogram as a mechanism: what a user may ask for, and its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from dpdask.cells import DEFAULT_BINS, Cells, cut_columns
from dpdask.errors import SpecError
from dpdask.mechanisms.card import Section
from dpdask.mechanisms.columns import bins_by_column
from dpdask.mechanisms.histogram import noise as histogram
from dpdask.mechanisms.histogram.card import histogram_section
from dpdask.mechanisms.histogram.cells import WELL_ABOVE, affordable_bins, bins_by_rule, largest_noise
from dpdask.mechanisms.histogram.noise import MAX_SPARSE, HistogramPlan, NoisyHistogram, Threshold, least_threshold
from dpdask.mechanisms.histogram.points import Points, points_per_cell
from dpdask.mechanisms.histogram.release import WEIGHT, FittedHistogram, Output
from dpdask.mechanisms.histogram.sparse import compute_excess_mean, compute_tail
from dpdask.mechanisms.mechanism import Columns, Spec
from dpdask.mechanisms.noisy_counts import NoisyCounts, RecordsWanted
from dpdask.privacy.events import CentralEvent, Composed, DiscreteLaplace
from dpdask.privacy.order import RowOrder
from dpdask.references.bins import as_fixed_bins, warn_of_far_cells
from dpdask.stats import Domain
from dpdask.stats.joint import JointCounts, n_cells
from dpdask.stats.tables import JointStatistic, domain_of
from dpdask.streams import Noise, RunKey

_SPURIOUS = 0.05
_MANY_ROWS = 1e18  # if the number of rows is unknown or private: gives the highest enhanced threshold, so nothing feasible is refused


def _as_bins(value: object) -> object:
    return value if value == "rule" else as_fixed_bins(value)


class HistogramSpec(Spec):
    """One noisy joint histogram of all privatised columns.

    Attributes
    ----------
    bins
        How continuous and mixed columns are cut: a number of cells of one width, or for each column such a number or the
        first value of each cell; or `rule`, the paper's rate, which needs a public number of rows.
    threshold
        Which cells are kept: `none` (all, with negative weights), `positive`, or `enhanced`.
    factor
        A of the enhanced threshold A·log n/ε.
    output
        `cells`: points and weights; `rows`: synthetic rows drawn from the positive weights.
    points
        What stands for each cell if the output is `cells`: its `centre`, or points `spread` in it that keep the moments of a smooth density,
        two for each column that is cut, multiplied; see `mechanisms.histogram.points.spread`.
    n_rows
        How many rows: a number, or `input` for as many as the table has. Under add-remove, `input` gives the noisy number of
        rows, or 0 if no cell has a positive weight.
    """

    kind: Literal["histogram"] = "histogram"
    bins: Annotated[Literal["rule"] | int | dict[str, int | tuple[float, ...]], BeforeValidator(_as_bins)] = DEFAULT_BINS
    threshold: Threshold = "enhanced"
    factor: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    output: Output = "cells"
    points: Points = "centre"
    n_rows: RecordsWanted = "input"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramMechanism(NoisyCounts):
    """The perturbed histogram of a schema under a budget.

    Privacy
    -------
    Unit, sensitivity and events: `HistogramPlan`. Protected: every row counted. Everything after the noise is post-processing.
    """

    spec: HistogramSpec

    nobody: ClassVar[str] = "the cells of a histogram"

    def check_spec(self) -> None:
        """Check the histogram's own parameters.

        Raises
        ------
        SpecError
            If a column is called `weight`; if the bins' rule is asked for where the number of rows is
            private; if a number of rows is given for cells, or points for rows.
        """
        spec = self.spec
        if spec.output == "cells":
            if WEIGHT in self.schema.privatised:
                raise SpecError("this name is reserved for a column of the released cells", f"column {WEIGHT!r}", "rename it, or drop it")
            if spec.n_rows != "input":
                raise SpecError(
                    "the number of records can be chosen for synthetic rows only, but `output` is cells",
                    "`n_rows`",
                    "remove it, or set `output` to rows",
                )
        elif spec.points != "centre":
            what = "synthetic rows lie anywhere in their cells, so `points` does not apply"
            raise SpecError(what, "`points`", "remove it, or set `output` to cells")
        if spec.bins == "rule" and self.n_rows_private:
            what = "the rule needs the number of rows, which add-remove hides"
            raise SpecError(what, "`bins`", "give numbers of cells, or set `adjacency` to replace-one")

    @property
    def noise(self) -> HistogramPlan:
        """The noise of every cell, and the threshold; it depends on no data."""
        return histogram.plan(self.budget, threshold=self.spec.threshold, factor=self.spec.factor)

    @property
    def event(self) -> Composed:
        """One noisy histogram, and the number of rows where a threshold needs it and it is not public."""
        return self.noise.event

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        what = "weighted cells" if self.spec.output == "cells" else "synthetic rows"
        return f"{what} of a noisy histogram of {len(self.schema.privatised)} columns"

    def with_rows(self, count: Callable[[], int | None]) -> Self:
        """Return the mechanism with the number of bins that the rule gives.

        Parameters
        ----------
        count
            Returns the number of rows if it is known; it may take a pass over the table.

        Raises
        ------
        SpecError
            If the rule is asked for, and the number is not known.
        """
        if self.spec.bins != "rule":
            return self
        bins, cut = DEFAULT_BINS, self._n_cut
        if cut:
            n_rows = count()
            if n_rows is None:
                what = "the rule needs the number of rows, which these files do not tell before they are read"
                raise SpecError(what, "`bins`", "give numbers of cells, or convert the input to Parquet")
            bins = bins_by_rule(max(2, n_rows), cut, thresholded=self.spec.threshold != "none")
        return replace(self, spec=self.spec.model_copy(update={"bins": bins}))

    @property
    def _n_cut(self) -> int:
        """How many columns are cut into bins."""
        return sum(not self.schema.columns[name].has_levels for name in self.schema.privatised)

    @property
    def _awaits_rows(self) -> bool:
        """Whether bins are still to be computed from the number of rows; only a plan is made without them."""
        return self.spec.bins == "rule" and self._n_cut > 0

    def _bins(self) -> int | Mapping[str, int | Sequence[float]]:
        assert not self._awaits_rows, "with_rows comes first"
        return DEFAULT_BINS if self.spec.bins == "rule" else self.spec.bins

    def _cells(self, columns: Columns) -> dict[str, Cells]:
        return cut_columns(columns.codecs, self._bins())

    def check(self, columns: Columns) -> None:
        """Check the bins, the points and, as far as it needs no number of rows, the size.

        Raises
        ------
        SpecError
            If they do not fit.
        """
        cells = cut_columns(columns.codecs, 1 if self.spec.bins == "rule" else self.spec.bins)
        points_per_cell(cells, self.spec.points)
        histogram.check_size(domain_of(cells), self.noise, _MANY_ROWS)

    def statistic(self, columns: Columns) -> JointStatistic:
        """Return what is counted: the joint histogram of all columns."""
        return JointStatistic(cells=self._cells(columns))

    def check_counts(self, counts: JointCounts) -> None:
        """Check that the histogram can be drawn for so many rows, if their number is public.

        Raises
        ------
        SpecError
            If it is too large.
        """
        if not self.n_rows_private:
            histogram.check_size(counts.domain, self.noise, counts.n_rows)

    def draw(self, counts: JointCounts, columns: Columns, noise: Noise) -> NoisyHistogram:
        """Draw the noise of every cell and return the noisy histogram; see `Mechanism.draw`."""
        del columns
        return histogram.draw(counts, self.noise, rng=noise("histogram/noise"))

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyHistogram:
        """Return the noisy histogram that an earlier driver kept; see `Mechanism.read_drawn`."""
        found = NoisyHistogram.from_bytes(data, "the run's noisy histogram")
        found.check(domain_of(self._cells(columns)), self.noise)
        return found

    def fit(self, counts: NoisyHistogram, columns: Columns, key: RunKey) -> FittedHistogram:
        """Return the noisy histogram with the columns that its cells stand for; see `Mechanism.fit`."""
        del key
        spec, bins = self.spec, bins_by_column(self._bins(), self._cells(columns))
        return FittedHistogram(schema=self.schema, columns=columns.types, bins=bins, histogram=counts, output=spec.output, points=spec.points)

    @property
    def release_type(self) -> type[FittedHistogram]:
        """The class of the fitted release."""
        return FittedHistogram

    def n_records(self, release: FittedHistogram) -> int:
        """Return how many cells or rows a job writes.

        Raises
        ------
        SpecError
            If rows are to be drawn, their number is public, and no weight is positive. The charge stays, because this error
            reveals something about the noisy weights.
        """
        return release.n_drawn(None if self.spec.n_rows == "input" else self.spec.n_rows)

    def stages(self, columns: Columns, *, uncounted: bool) -> tuple[str, ...]:
        """Return what a run does, in words; see `Mechanism.stages`."""
        del uncounted
        size = "" if self._awaits_rows else f" of {n_cells(domain_of(self._cells(columns))):,} cells"
        return (
            f"tabulate: read {len(self.schema.privatised)} columns once; count their joint histogram{size}, merged in a tree",
            f"fit: noise on every cell, threshold {self.spec.threshold}, on the driver, written once",
            "write: draw synthetic rows and stage their shards" if self.spec.output == "rows" else "write: the cells with a weight, one row a point",
        )

    def cautions(self, columns: Columns, n_rows: int | None) -> tuple[str, ...]:
        """Return what a steward should think of before a run: of δ, and of the noise beside the counts.

        Parameters
        ----------
        columns
            The table's columns.
        n_rows
            The number of rows if it is known and public, else None.

        Raises
        ------
        SpecError
            If the histogram is too large for so many rows.
        """
        found = [*NoisyCounts.cautions(self, columns, n_rows), *warn_of_far_cells(columns.codecs, self.spec.bins)]
        if self._awaits_rows:
            return (*found, "The bins that the rule gives, and so the number of cells, are known only when the rows are counted.")
        cells = self._cells(columns)
        domain = domain_of(cells)
        if self.n_rows_private:
            found += list_warnings_without_rows(domain, self.noise)
        if n_rows:  # an empty table is refused
            histogram.check_size(domain, self.noise, n_rows)
            cut = tuple(name for name, column in cells.items() if len(column.edges))
            found += list_warnings(domain, self.noise, n_rows, cut)
        return tuple(found)

    def n_expected(self, n_rows: int | None) -> int | None:
        """Return how many rows a run writes; None for cells, whose number is not known before."""
        if self.spec.output == "cells":
            return None
        return n_rows if self.spec.n_rows == "input" else self.spec.n_rows

    def describe_quality(self, release: FittedHistogram) -> str:
        """Return how many cells were kept, and what their weights sum to; see `Mechanism.describe_quality`."""
        found = release.histogram
        return f"{len(found.keys):,} of {n_cells(found.domain):,} cells have a weight; the weights sum to {int(found.weights.sum()):,}"

    def section(self, release: FittedHistogram, columns: Columns, *, n_rows: int | None, n_released: int | None, order: RowOrder) -> Section:
        """Return the histogram's part of the release card; see `Mechanism.section`."""
        del columns, n_rows, order
        return histogram_section(self.budget, release, n_released)


def list_warnings(domain: Domain, planned: HistogramPlan, n_rows: float, continuous: tuple[str, ...] = ()) -> list[str]:
    """Return what should be said before a budget is spent on this histogram: sentences, none if there is nothing.

    Parameters
    ----------
    domain, planned
        As in `draw`.
    n_rows
        The public number of rows.
    continuous
        The attributes that are cut into bins, for which fewer are proposed.

    References
    ----------
    Lei (2011), section 4.3, on the choice of K.
    """
    n, event = n_cells(domain), planned.cells
    scale = event.scale if isinstance(event, DiscreteLaplace) else None
    largest = _largest(n, event)
    said = []
    if n_rows / n < WELL_ABOVE * largest:
        sentence = (
            f"A cell holds {n_rows / n:,.3g} rows on average, and the largest noise of {n:,} cells is about {largest:,.3g}: few cells stand out"
        )
        if continuous and scale is not None:
            bins = affordable_bins(n_rows, len(continuous), n // math.prod(domain.shape_of(continuous)), scale)
            sentence += f"; {bins} bins for each of {', '.join(continuous)} would do" if bins > 1 else ""
        said.append(sentence + ".")
    cut = planned.cut(n_rows)
    if scale is not None and cut is not None:
        raised = n * compute_tail(scale, cut)
        weight = raised * (cut + compute_excess_mean(scale))
        if weight > _SPURIOUS * n_rows:
            said.append(
                f"Noise alone may raise {raised:,.0f} empty cells to the threshold of {cut:,}, with a weight of {weight:,.0f} beside {n_rows:,.0f} "
                "rows; a larger factor of the threshold, or fewer cells, avoids it."
            )
    return said


def list_warnings_without_rows(domain: Domain, planned: HistogramPlan) -> list[str]:
    """Return warnings as `list_warnings` does, if the number of rows is private: they do not depend on it.

    Parameters
    ----------
    domain, planned
        As in `draw`; `check_size` accepts them for some number of rows.
    """
    floor = least_threshold(domain, planned)
    if floor <= (planned.cut(0.0) or 1):
        return []
    rows = math.exp((floor - 1) * planned.epsilon / (planned.factor * planned.rows))
    sentence = f"With fewer than about {rows:,.0f} rows, the threshold is raised to {floor:,}: otherwise noise alone would lift more empty cells "
    return [
        sentence + f"of {n_cells(domain):,} above it than the limit of {MAX_SPARSE:,}; fewer cells, or a larger factor of the threshold, avoid this."
    ]


def _largest(n: int, event: CentralEvent) -> float:
    return largest_noise(n, event.scale) if isinstance(event, DiscreteLaplace) else event.sigma * math.sqrt(2.0 * math.log(max(2, n)))
