"""The perturbed histogram as a job: one noisy joint histogram, released as weighted cells or as synthetic rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import pyarrow as pa
from pydantic import BeforeValidator, Field

from dpdask.cells import DEFAULT_BINS
from dpdask.documents import Document
from dpdask.engine import joint, release, synthesise
from dpdask.engine.compute import Progress
from dpdask.engine.randomise import Staged
from dpdask.engine.tabulate import domain_of
from dpdask.engine.work import KEY_NAME, RELEASE_NAME
from dpdask.errors import InputError, SpecError
from dpdask.io.fragments import InputTable
from dpdask.io.storage import Folder
from dpdask.jobs.kinds import central
from dpdask.jobs.kinds.kind import Expected, Fitted, Terms
from dpdask.mechanisms.columns import bins_by_column
from dpdask.mechanisms.histogram import noise as histogram
from dpdask.mechanisms.histogram.card import histogram_card
from dpdask.mechanisms.histogram.cells import bins_by_rule
from dpdask.mechanisms.histogram.noise import HistogramPlan, Threshold
from dpdask.mechanisms.histogram.points import Points, points_per_cell
from dpdask.mechanisms.histogram.release import WEIGHT, FittedHistogram
from dpdask.privacy.events import Composed
from dpdask.references.bins import as_bins
from dpdask.schema import Schema
from dpdask.stats.joint import n_cells
from dpdask.streams import RunKey, stream

_MANY_ROWS = 1e18  # if the number of rows is unknown or private: gives the highest enhanced threshold, so nothing feasible is refused


def _as_bins(value: object) -> object:
    return value if value == "rule" else as_bins(value)


def _as_n_rows(value: object) -> object:
    if value != "input" and (type(value) is not int or value < 1):
        raise ValueError("a whole number, at least 1, is expected, or `input`")
    return value


class NoisyHistogram(Document):
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
        Of `cells`, what stands for each: its `centre`, or points `spread` in it that keep the moments of a smooth density,
        two for each column that is cut, multiplied; see `mechanisms.histogram.points.spread`.
    n_rows
        How many rows: a number, or `input` for as many as the table has. Under add-remove, `input` gives the noisy number of
        rows, or 0 if no cell has a positive weight.
    """

    kind: Literal["histogram"]
    bins: Annotated[Literal["rule"] | int | dict[str, int | tuple[float, ...]], BeforeValidator(_as_bins)] = DEFAULT_BINS
    threshold: Threshold = "enhanced"
    factor: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    output: Literal["cells", "rows"] = "cells"
    points: Points = "centre"
    n_rows: Annotated[Literal["input"] | int, BeforeValidator(_as_n_rows)] = "input"


def check_columns(schema: Schema) -> None:
    """Check that no column has the name of the cells' weights.

    Raises
    ------
    SpecError
        If one has.
    """
    if WEIGHT in schema.privatised:
        raise SpecError("the released cells have a column of that name themselves", f"column {WEIGHT!r}", "rename it, or drop it")


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramKind(central.NoisyCounts):
    """A histogram job's `Kind`; made by `of`.

    Attributes
    ----------
    spec
        The mechanism as the job writes it.
    """

    spec: NoisyHistogram

    @classmethod
    def of(cls, spec: NoisyHistogram, terms: Terms) -> HistogramKind:
        """Return the kind of a histogram job.

        Raises
        ------
        SpecError
            If a column is to be kept, or is called `weight`; if the bins' rule is asked for where the number of rows is
            private; if a number of rows is given for cells.
        """
        central.check_schema(terms.schema, "a cell of a histogram is nobody's")
        if spec.output == "cells":
            check_columns(terms.schema)
            if spec.n_rows != "input":
                raise SpecError("the cells are as many as there are", "mechanism.n_rows", "remove it, or set mechanism.output to rows")
        elif spec.points != "centre":
            what = "synthetic rows lie anywhere in their cells, so no points stand for these"
            raise SpecError(what, "mechanism.points", "remove it, or set mechanism.output to cells")
        if spec.bins == "rule" and terms.budget.adjacency == "add-remove":
            what = "the rule needs the number of rows, which add-remove hides"
            raise SpecError(what, "mechanism.bins", "give numbers of cells, or set privacy.adjacency to replace-one")
        return cls(spec=spec, terms=terms)

    @property
    def noise(self) -> HistogramPlan:
        """The noise of every cell, and the threshold; it depends on no data."""
        return histogram.plan(self.terms.budget, threshold=self.spec.threshold, factor=self.spec.factor)

    @property
    def event(self) -> Composed:
        """One noisy histogram, and the number of rows where a threshold needs it and it is not public."""
        return self.noise.event

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        what = "weighted cells" if self.spec.output == "cells" else "synthetic rows"
        return f"{what} of a noisy histogram of {len(self.terms.schema.privatised)} columns"

    def check(self, types: pa.Schema, secrets: Folder) -> None:
        """Check a table's Arrow types, the bins and, as far as it needs no number of rows, the size; nothing is read or written.

        Raises
        ------
        DataError, SpecError
            If they do not fit.
        """
        work = central.work_on(types, self.terms, 1 if self.spec.bins == "rule" else self.spec.bins, secrets)
        points_per_cell(work.cells, self.spec.points)
        histogram.check_size(domain_of(work.cells), self.noise, _MANY_ROWS)

    def _bins(self, table: InputTable) -> int | dict[str, int | tuple[float, ...]]:
        bins = self.spec.bins
        if bins != "rule":
            return bins
        if table.n_rows is None:
            what = "the rule needs the number of rows, which these files do not tell before they are read"
            raise SpecError(what, "mechanism.bins", "give numbers of cells, or convert the input to Parquet")
        cut = sum(not self.terms.schema.columns[name].has_levels for name in self.terms.schema.privatised)
        return bins_by_rule(max(2, table.n_rows), cut, thresholded=self.spec.threshold != "none") if cut else DEFAULT_BINS

    def expect(self, table: InputTable, rows_per_shard: int) -> Expected:
        """Return what a run on a table would do; no row is read.

        Raises
        ------
        SpecError
            If the histogram is too large, or the bins' rule lacks its number of rows.
        """
        work = central.work_on(table.schema, self.terms, self._bins(table), Folder(self.terms.output_url))
        domain, rows = domain_of(work.cells), self.spec.output == "rows"
        n = len(self.terms.schema.privatised)
        stages = (
            *central.unit_stage(self.terms),
            f"tabulate: read {n} columns once; count their joint histogram of {n_cells(domain):,} cells, merged in a tree",
            f"fit: noise on every cell, threshold {self.spec.threshold}, on the driver, written once",
            "write: draw synthetic rows and stage their shards" if rows else "write: the cells with a weight, one row a point",
        )
        public = self.public_rows(table)
        warnings = list(central.warnings(self.terms, public))
        if self.n_rows_private:
            warnings += histogram.cautions_without_rows(domain, self.noise)
        if public is not None:
            histogram.check_size(domain, self.noise, public)
            cut = tuple(name for name, column in work.cells.items() if len(column.edges))
            warnings += histogram.cautions(domain, self.noise, public, cut)
        n_rows = None if not rows else public if self.spec.n_rows == "input" else self.spec.n_rows
        n_shards = None if n_rows is None else -(-n_rows // rows_per_shard)
        return Expected(stages=stages, n_rows=n_rows, n_shards=n_shards, warnings=tuple(warnings))

    def fit(self, table: InputTable, secrets: Folder, charge: Callable[[], None], progress: Progress | None, *, insecure: bool) -> Fitted:
        """Count, charge, draw the noise and write it beside the run key.

        Raises
        ------
        DataError
            If a value violates the schema; if the number of rows is public and the table has none.
        InputError
            If what a driver that died has kept is of another noise.
        SpecError
            If the number of rows is public and the histogram is too large for it.
        BudgetError
            From `charge`.

        Privacy
        -------
        Exact counts, and which cells are occupied, reach the driver and go no further.
        """
        drawn = central.drawn_before(secrets, RELEASE_NAME)
        if drawn is not None:
            charge()
            kept = synthesise.load_histogram(secrets, drawn)
            if kept.histogram.plan != self.noise:
                what = "the run's perturbed histogram is of another version of dpdask"
                raise InputError(what, self.terms.output_url, "go on with that one, or `dpdask abort` the run")
            return self._fitted(kept, drawn, {})
        bins = self._bins(table)
        work = central.work_on(table.schema, self.terms, bins, secrets)
        domain, planned = domain_of(work.cells), self.noise
        found = joint.joint_counts(table.fragments, release.bound_units(table, work, progress), progress)
        self.check_rows(found.counts.n_rows)
        if not self.n_rows_private:
            histogram.check_size(domain, planned, found.counts.n_rows)
        charge()
        rng = stream(RunKey(secrets.read(KEY_NAME)), "histogram/noise", "") if insecure else None
        noisy = histogram.draw(found.counts, planned, rng=rng)
        fitted = FittedHistogram(schema=self.terms.schema, types=work.released, bins=bins_by_column(bins, work.cells), histogram=noisy)
        fitted = replace(fitted, points=self.spec.points)
        return self._fitted(fitted, synthesise.write_histogram(fitted, secrets), found.changed)

    def _fitted(self, fitted: FittedHistogram, digest: str, changed: Mapping[str, int]) -> Fitted:
        n_rows = fitted.n_drawn(None if self.spec.n_rows == "input" else self.spec.n_rows)
        return Fitted(release_sha256=digest, n_released=(fitted.n_points if self.spec.output == "cells" else n_rows,), changed=changed)

    def write(
        self, table: InputTable, fitted: Fitted, secrets: Folder, publish: Folder, actions: Folder, rows_per_shard: int, progress: Progress | None
    ) -> Staged:
        """Stage every shard; doing it twice changes nothing. The table is not read again.

        Raises
        ------
        SpecError
            If rows are to be drawn, their number is public, and no weight is positive. The charge stays, because this error
            reveals something about the noisy weights. If their number is private, no rows are drawn and there is no error.
        InputError, TemporaryError
            The first failure; what is staged stays.
        """
        output = self.spec.output
        if output == "rows" and fitted.n_released[0]:
            synthesise.load_histogram(secrets, fitted.release_sha256).histogram.check_positive()
        n_rows, sha256 = fitted.n_released[0], fitted.release_sha256
        return Staged(shards=tuple(synthesise.write_all_drawn(n_rows, rows_per_shard, output, sha256, secrets, publish, actions, progress)))

    def card(self, table: InputTable, fitted: Fitted, secrets: Folder, *, insecure: bool) -> bytes:
        """Return the release card: the same release, the same bytes."""
        return histogram_card(
            name=self.terms.name,
            budget=self.terms.budget,
            guarantee=self.guarantee,
            fitted=synthesise.load_histogram(secrets, fitted.release_sha256),
            output=self.spec.output,
            n_records=fitted.n_released[0] if self.spec.output == "rows" else None,
            insecure=insecure,
        )
