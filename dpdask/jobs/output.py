"""Where a release goes, as a job says it: plain files, a Delta table or an Iceberg table."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from dpdask.documents import Document
from dpdask.io.commits import Mode
from dpdask.io.delta_log import DeltaLog
from dpdask.io.iceberg_log import IcebergLog
from dpdask.io.storage import Folder
from dpdask.jobs.catalog import Catalog
from dpdask.jobs.publication import ManifestFolder, Publication, RenamedFolder
from dpdask.jobs.published_table import PublishedTable, TableLog
from dpdask.privacy.order import RowOrder


class Target(Document):
    """How a release is published.

    Attributes
    ----------
    format
        `parquet` (a folder of files), `delta` (a Delta table) or `iceberg` (an Iceberg table).
    mode
        `error`: the output must not exist. `append`: the release is added to what a table holds. `overwrite`: it replaces what
        a table holds.
    table, catalog
        The name of an Iceberg table, with its namespace, and the catalog that knows it.
    """

    format: Literal["parquet", "delta", "iceberg"] = "parquet"
    mode: Mode = "error"
    table: str | None = Field(default=None, pattern=r"^[^.]+(\.[^.]+)+$")
    catalog: Catalog | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.format == "parquet" and self.mode != "error":
            raise ValueError(f"`mode: {self.mode}` belongs to tables; set `format: delta` or `format: iceberg`")
        if (self.format == "iceberg") != (self.table is not None) or (self.format == "iceberg") != (self.catalog is not None):
            raise ValueError("`table` (with its namespace, such as `lake.ratings`) and `catalog` belong to `format: iceberg`, which needs both")
        return self

    @model_serializer(mode="wrap")
    def _without_usual(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out default values of these keys, so that the digests of jobs that write plain files stay as they are."""
        written: dict[str, Any] = plain(self)
        usual = Target.model_fields
        return {key: value for key, value in written.items() if key not in usual or value != usual[key].default}

    def open(self, output: Folder) -> Publication:
        """Return what publishes into a folder in this way."""
        log = self.open_log(output)
        if log is not None:
            return PublishedTable(output, log, self.mode)
        return RenamedFolder(output) if output.is_local else ManifestFolder(output)

    def open_log(self, output: Folder) -> TableLog | None:
        """Return the log of the table in a folder; None if plain files are written there."""
        if self.format == "delta":
            return DeltaLog(output)
        if self.table is not None and self.catalog is not None:
            return IcebergLog(output, self.table, self.catalog.model_dump(exclude_none=True))
        return None


class Output(Target):
    """Where the release goes, and how its rows are laid out.

    Attributes
    ----------
    path
        A new folder or table, as a path or any fsspec URL.
    rows_per_shard
        The most rows of a shard.
    order
        `shuffled`, or `keep`: rows that are released one by one stand in the order of the input, which may reveal their values.
    """

    path: str = Field(min_length=1)
    rows_per_shard: int = Field(default=1_000_000, ge=1)
    order: RowOrder = "shuffled"

    @property
    def target(self) -> Target:
        """How the release is published."""
        return Target(**{key: getattr(self, key) for key in Target.model_fields})
