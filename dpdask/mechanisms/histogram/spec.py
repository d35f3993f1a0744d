"""The perturbed histogram as a mechanism: what a user may ask for, and its steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import pyarrow as pa
from pydantic import BeforeValidator, Field

from dpdask.arrays import freeze_class
from dpdask.cells import DEFAULT_BINS, FEW_ROWS, CutColumns, FoundBins
from dpdask.errors import SpecError
from dpdask.mechanisms.card import Section, noisy_counts_section
from dpdask.mechanisms.columns import bins_by_column, describe_bins
from dpdask.mechanisms.expectations import CellSearch, describe_wide_cells
from dpdask.mechanisms.histogram import noise as histogram
from dpdask.mechanisms.histogram.noise import (
    HistogramPlan,
    NoisyHistogram,
    Threshold,
    compute_excess_mean,
    compute_tail,
    least_threshold,
)
from dpdask.mechanisms.histogram.release import (
    MAX_CUT,
    MOST_FOUND,
    RARE,
    WEIGHT,
    WELL_ABOVE,
    FittedHistogram,
    Output,
    Points,
    affordable_bins,
    bins_by_rule,
    count_rest,
    largest_noise,
    points_per_cell,
    type_points,
)
from dpdask.mechanisms.marginals.noise import account_for
from dpdask.mechanisms.mechanism import (
    Columns,
    NoisyCounts,
    NoisyCountsDescription,
    RecordsWanted,
    Sentences,
    Spec,
    no_rows,
)
from dpdask.privacy.events import (
    CentralEvent,
    Composed,
    DiscreteLaplace,
    write_digits,
)
from dpdask.privacy.noise import deviation, margin_95
from dpdask.references.hierarchy import MANY
from dpdask.references.histogram import (
    Bins,
    Found,
    as_bins,
    cut_with_found,
    list_adaptive,
    warn_of_far_cells,
)
from dpdask.references.reference import ColumnCounts
from dpdask.stats import Domain
from dpdask.stats.marginals import JointCounts, JointStatistic, domain_of, n_cells
from dpdask.streams import Noise, RunKey

_SPURIOUS = 0.05
# if the number of rows is unknown or private: the highest threshold, so nothing feasible is refused
_MANY_ROWS = 1e18


def _as_bins(value: object) -> object:
    return value if value == "rule" else as_bins(value)


class HistogramSpec(Spec):
    """One noisy joint histogram of all privatised columns."""

    kind: Literal["histogram"] = "histogram"
    bins: Annotated[Literal["rule"] | Bins, BeforeValidator(_as_bins)] = "adaptive"
    """How continuous and mixed columns are cut. `adaptive`: into as many cells of equal counts as
    the rows allow; the cells are found under privacy, in a separate pass. A number: into that
    many cells of equal width. A mapping: for each column one of these, or a list of the first
    value of each cell. `rule`: by the paper's rate, which needs a public number of rows.
    """
    threshold: Threshold = "enhanced"
    """Which cells are kept: `none` (all, with negative weights), `positive`, or `enhanced`."""
    factor: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    """A of the enhanced threshold A·log n/ε."""
    output: Output = "cells"
    """`cells`: points and weights; `rows`: synthetic rows drawn from the positive weights."""
    points: Points | None = None
    """What stands for each cell if the output is `cells`: its `centre`, or points `spread` in it
    that keep the moments of a smooth density, two for each column that is cut, multiplied; see
    `mechanisms.histogram.release.spread`. The default is `spread` if cells are found and at most
    6 columns are cut, and `centre` otherwise.
    """
    n_rows: RecordsWanted = "input"
    """How many rows: a number, or `input` for as many as the table has. Under add-remove, `input`
    gives the noisy number of rows, or 0 if no cell has a positive weight.
    """


@freeze_class
class HistogramMechanism(NoisyCounts):
    """The perturbed histogram of a schema under a budget.

    Privacy
    -------
    Unit, sensitivity and events: `HistogramPlan`. Protected: every row counted. Everything after
    the noise is post-processing.
    """

    spec: HistogramSpec
    nobody: ClassVar = "the cells of a histogram"
    release_type: ClassVar = FittedHistogram

    def check_spec(self) -> None:
        """Check the histogram's own parameters."""
        spec = self.spec
        if spec.output == "cells":
            if WEIGHT in self.schema.privatised:
                what = "this name is reserved for a column of the released cells"
                raise SpecError(what, f"column {WEIGHT!r}", "rename it, or drop it")
            if spec.n_rows != "input":
                what = "the number of records can be chosen for synthetic rows only"
                hint = "remove it, or set `output` to rows"
                raise SpecError(f"{what}, but `output` is cells", "`n_rows`", hint)
        elif spec.points == "spread":
            what = "synthetic rows lie anywhere in their cells, so `points` does not apply"
            raise SpecError(what, "`points`", "remove it, or set `output` to cells")
        if spec.bins == "rule" and self.n_rows_private:
            what = "`rule` needs the number of rows, which add-remove hides"
            raise SpecError(
                what, "`bins`", "give numbers of cells, or set `adjacency` to replace-one"
            )

    @cached_property
    def noise(self) -> HistogramPlan:
        """The noise of every cell, and the threshold; it depends on no data."""
        return histogram.plan(
            self.budget,
            threshold=self.spec.threshold,
            factor=self.spec.factor,
            n_found=len(self.adaptive),
        )

    @property
    def event(self) -> Composed:
        """One noisy histogram, the fine counts of columns whose cells are found, and the number of rows if a threshold needs it."""
        return self.noise.event

    @property
    def counted(self) -> tuple[tuple[CentralEvent, int], ...]:
        """The noise of the cells; none with a threshold, which changes counts by more than that."""
        return ((self.noise.cells, 1),) if self.spec.threshold == "none" else ()

    def find_counted(self, column: str, columns: Columns) -> tuple[CentralEvent, int] | None:
        """Return the noise of the cells; see `Mechanism.find_counted`."""
        sizes = [each.size for name, each in self.cells(columns).items() if name != column]
        return (self.noise.cells, math.prod(sizes)) if self.counted else None

    def with_rows(self, count: Callable[[], int | None]) -> Self:
        """Return the mechanism with the number of bins that the rule gives.

        Parameters
        ----------
        count
            Returns the number of rows if it is known; it may take a pass over the table.
        """
        if self.spec.bins != "rule":
            return self
        bins, cut = DEFAULT_BINS, self._n_cut
        if cut:
            n_rows = count()
            if n_rows is None:
                what = "`rule` needs the number of rows, which these files do not tell before they are read"
                raise SpecError(
                    what, "`bins`", "give numbers of cells, or convert the input to Parquet"
                )
            bins = bins_by_rule(max(2, n_rows), cut, thresholded=self.spec.threshold != "none")
        return replace(self, spec=self.spec.model_copy(update={"bins": bins}))

    @property
    def _n_cut(self) -> int:
        """How many columns are cut into bins."""
        return sum(not self.schema.columns[name].has_levels for name in self.schema.privatised)

    @property
    def awaits_rows(self) -> bool:
        """Whether bins are still to be computed from the number of rows; only a plan is made without them."""
        return self.spec.bins == "rule" and self._n_cut > 0

    @property
    def adaptive(self) -> tuple[str, ...]:
        """The columns whose cells are found."""
        return () if self.spec.bins == "rule" else list_adaptive(self.schema, self.spec.bins)

    @property
    def points(self) -> Points:
        """What stands for each cell if the output is `cells`."""
        return self.spec.points or (
            "spread" if self.adaptive and self._n_cut <= MAX_CUT else "centre"
        )

    def _bins(self) -> Bins:
        assert not self.awaits_rows, "with_rows comes first"
        return DEFAULT_BINS if self.spec.bins == "rule" else self.spec.bins

    def cells(self, columns: Columns) -> CutColumns:
        """Return the cells of each column; one cell stands for those that are not yet found."""
        return cut_with_found(columns.codecs, self._bins(), self.found, n_bins=1)

    @property
    def search(self) -> CellSearch | None:
        """What finds the cells of columns in a first round; see `Mechanism.search`."""
        event = None if self.found is not None else self.noise.fine
        if event is None:
            return None
        most = MOST_FOUND if self._n_cut == 1 else DEFAULT_BINS
        return CellSearch(
            names=self.adaptive,
            event=event,
            n_rows_public=not self.n_rows_private,
            n_bins=most,
            affords=self._affords,
        )

    def _affords(self, columns: Columns, found: Found, n_rows: float) -> bool:
        """Return whether the histogram of these cells can be drawn, and its average count is well above the largest noise.

        The same must hold for the cells outside the largest cell of each column, unless few rows
        lie outside it.
        """
        domain, noise = domain_of(cut_with_found(columns.codecs, self._bins(), found)), self.noise
        try:
            histogram.check_size(domain, noise, _MANY_ROWS if self.n_rows_private else n_rows)
        except SpecError:
            return False
        n, groups = n_cells(domain), [(n_rows, 1.0)]
        for name, bins in found.items():
            rest = count_rest(bins, n_rows)
            groups += (
                [(rest, 1.0 - 1.0 / domain.shape_of((name,))[0])] if rest > RARE * n_rows else []
            )
        return all(is_enough(rows, n * share, noise.cells) for rows, share in groups)

    def check(self, columns: Columns) -> None:
        """Check the bins, the points and, as far as it needs no number of rows, the size."""
        cells = cut_with_found(
            columns.codecs, 1 if self.spec.bins == "rule" else self.spec.bins, None, n_bins=1
        )
        points_per_cell(cells, self.points)
        histogram.check_size(domain_of(cells), self.noise, _MANY_ROWS)

    def statistic(self, columns: Columns) -> JointStatistic:
        """Return what is counted: the joint histogram of all columns."""
        return JointStatistic(cells=self.cells(columns))

    def check_counts(self, counts: JointCounts | ColumnCounts, columns: Columns) -> None:
        """Check that the histogram can be drawn for so many rows, if their number is public; see `Mechanism.check_counts`."""
        if not self.n_rows_private:
            n_rows = (
                counts.n_rows
                if isinstance(counts, JointCounts)
                else next(iter(counts.columns.values())).n_rows
            )
            if n_rows == 0 and self.found is not None:
                raise no_rows("second pass")
            histogram.check_size(domain_of(self.cells(columns)), self.noise, n_rows)

    def draw(self, counts: JointCounts, columns: Columns, noise: Noise) -> NoisyHistogram:
        """Draw the noise of every cell and return the noisy histogram; see `Mechanism.draw`."""
        return histogram.draw(counts, self.noise, rng=noise("histogram/noise"))

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyHistogram:
        """Return the noisy histogram that an earlier driver kept; see `Mechanism.read_drawn`."""
        found = NoisyHistogram.from_bytes(data, "the run's noisy histogram")
        found.check(domain_of(self.cells(columns)), self.noise)
        return found

    def list_counts(self, drawn: NoisyHistogram, columns: Columns) -> tuple[pa.Table, ...]:
        """Return the noisy counts of all cells; see `Mechanism.list_counts`."""
        return drawn.list_counts()

    def find_written(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written: rows as they were declared, or points with their weights."""
        return released if self.spec.output == "rows" else type_points(released, self.schema)

    def fit(self, counts: NoisyHistogram, columns: Columns, key: RunKey) -> FittedHistogram:
        """Return the noisy histogram with the columns that its cells stand for; see `Mechanism.fit`."""
        spec, bins = self.spec, bins_by_column(self._bins(), self.cells(columns), self.found)
        return FittedHistogram(
            schema=self.schema,
            columns=columns.types,
            bins=bins,
            noisy=counts,
            output=spec.output,
            points=self.points,
        )

    def n_records(self, release: FittedHistogram) -> int:
        """Return how many cells or rows a job writes."""
        return release.n_drawn(None if self.spec.n_rows == "input" else self.spec.n_rows)

    @property
    def description(self) -> HistogramDescription:
        """What is said of it."""
        return HistogramDescription(self)


@freeze_class(kw_only=False)
class HistogramDescription(NoisyCountsDescription):
    """What is said of a perturbed histogram."""

    mechanism: HistogramMechanism

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        what = "weighted cells" if self.mechanism.spec.output == "cells" else "synthetic rows"
        return f"{what} of a noisy histogram of {len(self.mechanism.schema.privatised)} columns"

    def stages(self, columns: Columns) -> Sentences:
        """Return what a run does, in words."""
        asked, search, size = self.mechanism, self.mechanism.search, ""
        if not (asked.awaits_rows or search):
            size = f" of {n_cells(domain_of(asked.cells(columns))):,} cells"
        n, spec = len(asked.schema.privatised), asked.spec
        return (
            *(() if search is None else (search.stage,)),
            f"tabulate: read {n} columns once; count their joint histogram{size}, merged in a tree",
            (
                f"fit: add noise to every cell, with the threshold {spec.threshold}, on the driver, and"
                " write the cells once"
            ),
            "write: draw synthetic rows and stage their shards"
            if spec.output == "rows"
            else "write: the cells with a weight, one row a point",
        )

    def cautions(self, columns: Columns, n_rows: int | None) -> Sentences:
        """Return what a steward should think of before a run: of δ, and of the noise beside the counts.

        Parameters
        ----------
        n_rows
            The number of rows if it is known and public, else None.
        """
        asked = self.mechanism
        found = [
            *NoisyCountsDescription.cautions(self, columns, n_rows),
            *warn_of_far_cells(columns.codecs, asked.spec.bins),
        ]
        if asked.awaits_rows:
            return (
                *found,
                "The bins that the rule gives, and so the number of cells, are known only when the rows are counted.",
            )
        cells = asked.cells(columns)
        domain = domain_of(cells)
        if asked.n_rows_private:
            found += list_warnings_without_rows(domain, asked.noise)
        if n_rows:  # an empty table is refused
            histogram.check_size(domain, asked.noise, n_rows)
            wide = (name for name, column in cells.items() if len(column.edges))
            cut = tuple(name for name in wide if name not in asked.adaptive)
            found += list_warnings(domain, asked.noise, n_rows, cut)
        return tuple(found)

    def expectations(self, columns: Columns) -> Sentences:
        """Return how far the count of a cell may be off."""
        asked = self.mechanism
        bins, search = asked.spec.bins, asked.search
        cells = {} if asked.awaits_rows else asked.cells(columns)
        found = [
            f"a count of a cell is off by at most {margin_95(asked.noise.cells):,.3g} with probability 0.95"
        ]
        if asked.n_rows_private:  # then nothing can warn of too few
            n_rows = write_digits(count_needed_rows(domain_of(cells), asked.noise))
            found.append(f"with fewer than about {n_rows} rows, few cells stand out from noise")
        found += () if bins == "rule" else describe_wide_cells(cells, bins)
        return (*found, *(() if search is None else search.expectations))

    def n_expected(self, n_rows: int | None) -> int | None:
        """Return how many rows a run writes; None for cells, whose number is not known before."""
        if self.mechanism.spec.output == "cells":
            return None
        return n_rows if self.mechanism.spec.n_rows == "input" else self.mechanism.spec.n_rows

    def quality(self, release: FittedHistogram) -> str:
        """Return how many cells were kept, and what their weights sum to; see `Mechanism.quality`."""
        found = release.noisy
        beside = "" if found.n_rows is None else f" beside {max(0.0, found.n_rows):,.0f} rows"
        return f"{len(found.keys):,} of {n_cells(found.domain):,} cells have a weight; the weights sum to {int(found.weights.sum()):,}{beside}"

    def section(
        self,
        release: FittedHistogram,
        columns: Columns,
        *,
        n_released: int | None,
        **_: Any,
    ) -> Section:
        """Return the histogram's part of the release card.

        Privacy
        -------
        Holds parameters, the public domain, and sums of released weights. The number of rows is
        exact under replace-one; under add-remove it is the noisy one, or null where none was
        measured.
        """
        noisy, cells, output = release.noisy, release.cells(), release.output
        planned, is_rows = noisy.plan, n_released is not None and output == "rows"
        mechanism = {
            "kind": "histogram",
            "output": None if n_released is None else output,
            "records": n_released if is_rows else None,
            "points": None if is_rows else release.points,
            "bins": describe_bins(release.bins, cells),
            "found": [name for name, bins in release.bins.items() if isinstance(bins, FoundBins)],
            "threshold": planned.threshold,
            "factor": planned.factor if planned.threshold == "enhanced" else None,
            "cut": noisy.cut,
            "cells": n_cells(noisy.domain),
            "cells_listed": len(noisy.keys),
            "total_weight": noisy.total,
        }
        noises: dict[str, Any] = {
            "cells": planned.cells,
            "n_rows": planned.total,
            "fine_counts": planned.fine,
        }
        accounting = account_for(planned.event, noises, self.mechanism.budget, "counts")
        for name, off in accounting["noise"].items():
            law = {"law": "discrete Laplace", "scale": noises[name].scale}
            accounting["noise"][name] = law | off
        return noisy_counts_section(
            budget=self.mechanism.budget,
            mechanism=mechanism,
            schema=release.schema,
            cells=cells,
            accounting=accounting,
            n_rows=noisy.n_rows,
        )


def list_warnings(
    domain: Domain, planned: HistogramPlan, n_rows: float, continuous: tuple[str, ...] = ()
) -> list[str]:
    """Return what should be said before a budget is spent on this histogram: sentences, none if there is nothing.

    Parameters
    ----------
    continuous
        The attributes that are cut into bins, for which fewer are proposed.

    References
    ----------
    Lei (2011), section 4.3, on the choice of K.
    """
    n, scale = n_cells(domain), planned.cells.scale
    largest = largest_noise(n, scale)
    said = []
    if not is_enough(n_rows, n, planned.cells):
        sentence = f"A cell holds {n_rows / n:,.3g} rows on average, and the largest noise of {n:,} cells is about {largest:,.3g}: few cells stand out"
        if continuous:
            bins = affordable_bins(
                n_rows, len(continuous), n // math.prod(domain.shape_of(continuous)), scale
            )
            sentence += (
                f"; {bins} bins for each of {', '.join(continuous)} would do" if bins > 1 else ""
            )
        if continuous and n_rows < FEW_ROWS * n and n > histogram.DENSE_CELLS:
            sentence += (
                "; `dpdask.open` will tell no interval of means, shares, counts and quantiles"
            )
        said.append(sentence + ".")
    cut = planned.cut(n_rows)
    if cut is not None:
        raised = n * compute_tail(scale, cut)
        weight = raised * (cut + compute_excess_mean(scale))
        if weight > _SPURIOUS * n_rows:
            said.append(
                f"Noise alone may raise {raised:,.0f} empty cells to the threshold of {cut:,}, with a weight of {weight:,.0f} beside {n_rows:,.0f} "
                "rows; a larger factor of the threshold, or fewer cells, avoids it."
            )
    return said


def list_warnings_without_rows(domain: Domain, planned: HistogramPlan) -> list[str]:
    """Return warnings as `list_warnings` does, if the number of rows is private: they do not depend on it."""
    floor = least_threshold(domain, planned)
    if floor <= (planned.cut(0.0) or 1):
        return []
    rows = math.exp((floor - 1) * planned.epsilon / (planned.factor * planned.rows))
    sentence = f"With {n_cells(domain):,} cells and fewer than about {write_digits(rows)} rows, the threshold is raised to {floor:,}, "
    sentence += "and most of the released weight may be noise."
    return [f"{sentence} Take fewer cells or columns, or a larger factor of the threshold."]


def count_needed_rows(domain: Domain, planned: HistogramPlan) -> float:
    """Return at how many rows the average count of a cell is well above the largest noise, and a column that is searched has two cells."""
    n = n_cells(domain)
    fine = 0.0 if planned.fine is None else 2.0 * MANY * deviation(planned.fine)
    return max(WELL_ABOVE * n * largest_noise(n, planned.cells.scale), fine)


def is_enough(n_rows: float, n: float, event: DiscreteLaplace) -> bool:
    """Return whether the average count of n cells is well above the largest noise."""
    return n_rows / n >= WELL_ABOVE * largest_noise(n, event.scale)
