"""The interface of references: the rows they are made of, their cost, who is protected, and the steps of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from dpdask.archive import Archived
from dpdask.arrays import Floats, freeze_class
from dpdask.cells import Cells
from dpdask.codec import Codec, Codecs, LevelCodec, ValueCodec
from dpdask.documents import Document
from dpdask.errors import DataError, SpecError
from dpdask.kernels import rank as ecdf
from dpdask.privacy import UnitColumn
from dpdask.privacy.events import Adjacency, DiscreteLaplace, Fate, Uncovered
from dpdask.schema import Column, Schema
from dpdask.stats.marginals import LARGE_CELLS, LARGE_ROWS, TableStatistic
from dpdask.stats.records import RecordStatistic
from dpdask.stats.statistic import (
    MAX_KNOTS,
    MAX_RANK_ERROR,
    CellCounts,
    Chosen,
    FoldCounter,
    LevelCounts,
    RankSummary,
)
from dpdask.streams import Noise, Streams

Counted = LevelCounts | RankSummary | CellCounts


# no repr: Dask logs the arguments of a task that failed
@freeze_class(kw_only=False, eq=False, repr=False)
class ColumnCounts:
    """The distribution of each column by itself: counts of levels, of public cells, or a summary of ranks; exact and private."""

    columns: Mapping[str, Counted]

    def merge(self, *others: Self) -> Self:
        """Return the counts of all of them."""
        merged = {
            name: counts.merge(*(each.columns[name] for each in others))  # type: ignore[arg-type]  # one type a column
            for name, counts in self.columns.items()
        }
        return type(self)(merged)


@freeze_class
class ColumnStatistic:
    """The distribution of each column by itself."""

    codecs: Codecs
    # The public cells of the columns that are counted in them.
    cells: Mapping[str, Cells] = field(default_factory=dict)

    @property
    def rows_per_task(self) -> int | None:
        """Enough rows for many cells to make merging worthwhile."""
        many = sum(cells.n_cells for cells in self.cells.values()) > LARGE_CELLS
        return LARGE_ROWS if many else None

    def counter(self) -> FoldCounter[ColumnCounts]:
        """Return a counter of no rows."""
        nothing = {}
        for name in self.codecs:
            kind, domain = self._choose(name)
            nothing[name] = kind.identity(domain)
        return FoldCounter(ColumnCounts(nothing), self._count)

    def _choose(self, name: str) -> tuple[Any, Cells | Codec]:
        """Return how a column is counted, and in what."""
        if name in self.cells:
            return CellCounts, self.cells[name]
        codec = self.codecs[name]
        return LevelCounts if codec.has_levels else RankSummary, codec

    def _count(self, batch: pa.RecordBatch, chosen: Chosen | None, _: Streams) -> ColumnCounts:
        counted = {}
        for name in self.codecs:
            kind, domain = self._choose(name)
            counted[name] = kind.of_batch(domain, batch.column(name), chosen)
        return ColumnCounts(counted)


MARGINS = "margins: each column's own distribution, and nothing of how they depend on each other"


@freeze_class(kw_only=False, eq=False, repr=False)
class LevelDistribution:
    """The probability of each level: float64 array of shape (n_levels,), summing to 1, zeros allowed."""

    probabilities: Floats


@freeze_class(kw_only=False, eq=False, repr=False)
class RankDistribution:
    """A continualised cdf."""

    # Float64 arrays of one length, at most 2**16 + 2 * atoms + 1, both non-decreasing: the cdf is
    # linear between the knots and jumps where x repeats. c runs from the probability of null to 1.
    x: Floats
    c: Floats
    rank_error: float  # by how much the cdf may differ from that of the rows it was made of
    # Of noisy counts, where rows may be and how many the counts put beyond, as a card has it:
    # `Hierarchy.describe_support`.
    support: Mapping[str, Any] = field(default_factory=dict)


Distribution = LevelDistribution | RankDistribution


def from_statistic(codec: Codec, statistic: LevelCounts | RankSummary) -> Distribution:
    """Return the empirical distribution of the rows that a statistic was made of (Bi & Shen (3), (7))."""
    where = f"column {codec.name!r}"
    if statistic.n_rows < 2:
        raise DataError(
            "the reference has fewer than 2 rows",
            where,
            "enlarge the hold-out's fraction, or the table it comes from",
        )
    if isinstance(statistic, LevelCounts):
        return LevelDistribution(statistic.counts / statistic.n_rows)
    assert not codec.has_levels
    if statistic.n_nulls == statistic.n_rows:
        raise DataError(
            "every row of the reference is null", where, "give the column the role drop"
        )
    summary = statistic.compress(MAX_KNOTS)
    error = summary.error / summary.n_rows
    if error > MAX_RANK_ERROR:
        raise DataError(
            "the reference's rank error is above 2**-15",
            where,
            "merge the input into fewer, larger fragments",
        )
    weights, atoms = (each.astype(np.float64) for each in (summary.weights, summary.atom_counts))
    return make_continuous(codec, summary.values, weights, atoms, float(summary.n_nulls), error)


def make_continuous(
    codec: ValueCodec,
    values: Floats,
    weights: Floats,
    atom_weights: Floats,
    null_weight: float,
    rank_error: float,
) -> RankDistribution:
    """Return the continualised cdf of a weighted sample, its atoms, and its nulls, in one scale of ranks.

    Parameters
    ----------
    values
        float64 array of shape (n,), increasing: the sample's values that are not atoms.
    """
    total = weights.sum() + atom_weights.sum() + null_weight
    start = codec.bounds[0] if codec.bounds else None
    atoms = np.array(codec.atoms, dtype=np.float64)
    x, c = ecdf.continualise(
        values, weights, atoms, atom_weights, start, 1.0 if codec.lattice else None
    )
    null = null_weight / total
    return RankDistribution(x, np.append(null + (1.0 - null) * c[:-1], 1.0), rank_error)


def check_levels(codec: LevelCodec, probabilities: Floats) -> LevelDistribution:
    """Return declared probabilities as a distribution, rescaled to sum to 1 exactly."""
    where, hint = f"column {codec.name!r}", "correct the job's reference"
    if len(probabilities) != codec.n_levels:
        what = "there must be one probability per level (null first, when null is a level)"
        raise SpecError(what, where, hint)
    total = probabilities.sum()
    if not (
        np.isfinite(probabilities).all() and (probabilities >= 0).all() and abs(total - 1) <= 1e-6
    ):
        raise SpecError("the probabilities must be non-negative and sum to 1", where, hint)
    return LevelDistribution(probabilities / total)


CHECK = "survey: read {columns}; check their values and count the rows"
FIT = "fit: compute the reference and each column's channel on the driver, and write them once"

Structure = Literal["columns", "records", "tree"]


class ReferenceBase(Document):
    """The base of all references: one without a hold-out, at no cost, each column by its own marginal distribution."""

    structure: ClassVar[Structure] = "columns"
    joint: ClassVar[str] = MARGINS
    not_local: ClassVar[str | None] = (
        "its columns are released together, which this format does not hold"
    )
    """Why devices cannot randomise their own values by it; None if they can."""

    path_hint: ClassVar[str] = "add it"
    """What to do if the path of a public table is missing."""

    spends_delta: ClassVar[bool] = False
    """Whether its noise can spend a δ."""

    is_measured_by_column: ClassVar[bool] = False
    """Whether each column has a noisy histogram of its own."""

    fate: ClassVar[Fate] = "held out"
    """What happens to the rows of a hold-out."""

    @property
    def rows(self) -> Literal["own", "public", "none"]:
        """Which rows are counted: the table's own, those of a public table, or none."""
        return "own"

    @property
    def held_out(self) -> float | None:
        """The probability with which a row is held out, or None."""
        return None

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """The samples of a table's rows that have no ε: the hold-out, if there is one."""
        held_out = self.held_out
        return () if held_out is None else (Uncovered(fraction=held_out, fate=self.fate),)

    @property
    def also_read(self) -> tuple[str, ...]:
        """The kept columns that it reads."""
        return ()

    def split(self, epsilon: float) -> tuple[float, float]:
        """Return the ε of the reference and the ε of the rows' own releases; both are rounded down, so their sum never passes `epsilon`."""
        return 0.0, epsilon

    def events(
        self,
        epsilons: Mapping[str, float],
        columns: Mapping[str, Column],
        adjacency: Adjacency,
        rows: int,
    ) -> dict[str, DiscreteLaplace]:
        """Return the noise of each column's counts; none if they have no noise of their own."""
        return {}

    def check(self, schema: Schema, unit: UnitColumn | None) -> None:
        """Check the columns that are named here against the schema."""

    def cells(self, codecs: Codecs) -> dict[str, Cells]:
        """Return the public cells in which columns are counted; none if they are not counted in cells."""
        return {}

    def sizes(self, codecs: Codecs) -> dict[str, int]:
        """Return how many noisy counts each column has; none if they have no noise of their own."""
        return {}

    def check_codecs(self, codecs: Codecs) -> None:
        """Check the declarations against the columns."""

    def check_counts(self, counts: ColumnCounts) -> None:
        """Check the reference rows, before anything is charged."""

    def draw(
        self,
        counts: ColumnCounts,
        codecs: Codecs,
        events: Mapping[str, DiscreteLaplace],
        noise: Noise,
    ) -> Archived | None:
        """Draw the noise of the reference and return the noisy counts; None if it has no noise.

        Parameters
        ----------
        noise
            Returns the random stream of each histogram, by its id; None: noise from the operating
            system's entropy.
        """
        return None

    def list_counts(self, drawn: Any, codecs: Codecs) -> Iterable[pa.Table]:
        """Return noisy counts that are published beside the release; see `Mechanism.list_counts`."""
        return ()

    def distributions(self, counts: Any, codecs: Codecs) -> Mapping[str, Distribution]:
        """Return the reference distribution of each column.

        Parameters
        ----------
        counts
            What `draw` returned, or the counts of the reference rows if there is no noise; None if
            none are counted.
        """
        return {name: from_statistic(codec, counts.columns[name]) for name, codec in codecs.items()}

    def statistic(self, codecs: Codecs) -> ColumnStatistic | RecordStatistic | TableStatistic:
        """Return the statistic that is counted over the reference rows."""
        return ColumnStatistic(codecs=codecs, cells=self.cells(codecs))

    def stages(self, columns: str) -> tuple[str, ...]:
        """Return the steps of a run before it writes, in words."""
        return (FIT,)

    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the steward before a release."""
        return ()


class TableReference(ReferenceBase):
    """The base of references that may count the rows of a public table."""

    path: str | None = None
    """Where the table is, in a job; in Python, hand the table to `fit`."""
    format: Literal["files", "parquet", "csv", "delta"] = "files"
    """`files` (Parquet or CSV, as names tell), `parquet`, `csv` or `delta`."""
    version: int | None = Field(default=None, ge=0)
    """The version of a Delta table; the latest if it is not given."""

    @model_validator(mode="after")
    def _is_table(self) -> Self:
        if self.format != "files" and self.path is None:
            raise ValueError("`format` belongs to a public table: give its `path`")
        if self.version is not None and self.format != "delta":
            raise ValueError("`version` belongs to `format: delta`")
        return self

    @model_serializer(mode="wrap")
    def _without_usual(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the defaults of plain files, so that the digests of jobs stay as they are."""
        written: dict[str, Any] = plain(self)
        usual = {"format": "files", "version": None}
        return {key: value for key, value in written.items() if (key, value) not in usual.items()}
