"""The interface of references: the rows they are made of, their cost, who is protected, and the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from dpdask.archive import Archived
from dpdask.cells import Cells
from dpdask.codec import Codec
from dpdask.documents import Document
from dpdask.privacy import UnitColumn
from dpdask.privacy.coverage import Uncovered
from dpdask.privacy.events import Adjacency, DiscreteLaplace
from dpdask.references.distribution import MARGINS, Distribution, from_statistic
from dpdask.references.statistics import ColumnCounts, ColumnStatistic
from dpdask.schema import Column, Schema
from dpdask.stats.records import RecordStatistic
from dpdask.stats.tables import TableStatistic
from dpdask.streams import Noise

FIT = "fit: compute the reference and each column's channel on the driver, and write them once"

Structure = Literal["columns", "records", "tree"]


class ReferenceBase(Document):
    """The base of all references: one without a hold-out, at no cost, each column by its own marginal distribution."""

    structure: ClassVar[Structure] = "columns"
    joint: ClassVar[str] = MARGINS
    not_local: ClassVar[str | None] = "its columns are released together, which this format does not hold"
    """Why devices cannot randomise their own values by it; None if they can."""

    path_hint: ClassVar[str] = "add it"
    """What to do if the path of a public table is missing."""

    spends_delta: ClassVar[bool] = False
    """Whether its noise can spend a δ."""

    is_measured_by_column: ClassVar[bool] = False
    """Whether each column has a noisy histogram of its own."""

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
        return () if self.held_out is None else (Uncovered(fraction=self.held_out, fate="held out"),)

    @property
    def also_read(self) -> tuple[str, ...]:
        """The kept columns that it reads."""
        return ()

    def split(self, epsilon: float) -> tuple[float, float]:
        """Return the ε of the reference and the ε of the rows' own releases; both are rounded down, so their sum never passes `epsilon`."""
        return 0.0, epsilon

    def events(self, epsilons: Mapping[str, float], columns: Mapping[str, Column], adjacency: Adjacency, rows: int) -> dict[str, DiscreteLaplace]:
        """Return the noise of each column's counts; none if they have no noise of their own.

        Parameters
        ----------
        epsilons
            What the counts of each column may cost.
        columns
            The declared columns.
        adjacency
            Which tables are neighbours.
        rows
            The largest number of rows of one unit.
        """
        del epsilons, columns, adjacency, rows
        return {}

    def check(self, schema: Schema, unit: UnitColumn | None) -> None:
        """Check the columns that are named here against the schema.

        Parameters
        ----------
        schema
            The declared columns.
        unit
            The privacy unit, if it is not the row.

        Raises
        ------
        SpecError
            If they do not fit.
        """
        del schema, unit

    def cells(self, codecs: Mapping[str, Codec]) -> dict[str, Cells]:
        """Return the public cells in which columns are counted; none if they are not counted in cells."""
        del codecs
        return {}

    def sizes(self, codecs: Mapping[str, Codec]) -> dict[str, int]:
        """Return how many noisy counts each column has; none if they have no noise of their own."""
        del codecs
        return {}

    def check_codecs(self, codecs: Mapping[str, Codec]) -> None:
        """Check the declarations against the columns.

        Raises
        ------
        SpecError
            If it does not fit them.
        """
        del codecs

    def check_counts(self, counts: ColumnCounts) -> None:
        """Check the reference rows, before anything is charged.

        Raises
        ------
        DataError
            If they are too few for a distribution.
        """
        del counts

    def draw(self, counts: ColumnCounts, codecs: Mapping[str, Codec], events: Mapping[str, DiscreteLaplace], noise: Noise) -> Archived | None:
        """Draw the noise of the reference and return the noisy counts; None if it has no noise.

        Parameters
        ----------
        counts
            The exact counts of the reference rows.
        codecs
            The codec of each column.
        events
            The noise of each column's histogram.
        noise
            Returns the random stream of each histogram, by its id; None: noise from the operating system's entropy.
        """
        del counts, codecs, events, noise
        return None

    def distributions(self, counts: Any, codecs: Mapping[str, Codec]) -> Mapping[str, Distribution]:
        """Return the reference distribution of each column.

        Parameters
        ----------
        counts
            What `draw` returned, or the counts of the reference rows if there is no noise; None if none are counted.
        codecs
            The codec of each column.

        Raises
        ------
        SpecError, DataError
            If the counts do not fit the columns, or are of too few rows.
        """
        return {name: from_statistic(codec, counts.columns[name]) for name, codec in codecs.items()}

    def statistic(self, codecs: Mapping[str, Codec]) -> ColumnStatistic | RecordStatistic | TableStatistic:
        """Return the statistic that is counted over the reference rows."""
        return ColumnStatistic(codecs=codecs, cells=self.cells(codecs))

    def stages(self, columns: str, *, uncounted: bool) -> tuple[str, ...]:
        """Return the steps of a run before it writes, in words.

        Parameters
        ----------
        columns
            The privatised columns.
        uncounted
            Whether the private table's footers do not tell how many rows it has.
        """
        del columns, uncounted
        return (FIT,)

    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the steward before a release."""
        return ()


class TableReference(ReferenceBase):
    """The base of references that may count the rows of a public table.

    Attributes
    ----------
    path
        Where the table is, in a job; in Python, hand the table to `fit`.
    format, version
        `files` (Parquet or CSV, as names tell), `parquet`, `csv` or `delta`; the version of a Delta table, the latest if it is not given.
    """

    path: str | None = None
    format: Literal["files", "parquet", "csv", "delta"] = "files"
    version: int | None = Field(default=None, ge=0)

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
        return {key: value for key, value in written.items() if (key, value) not in (("format", "files"), ("version", None))}
