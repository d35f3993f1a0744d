"""Where a job's rows come from: a table, and where the unit is a person, perhaps the table of the persons."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import pyarrow as pa
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from dpdask.documents import Document
from dpdask.engine.source import FileSource, LinkedSource
from dpdask.errors import DataError, SpecError
from dpdask.io.changes import Lake
from dpdask.io.files import Files, TableFormat
from dpdask.io.fragments import InputTable
from dpdask.io.lakes import Delta, Iceberg
from dpdask.io.storage import absolute_url
from dpdask.jobs.output import Catalog
from dpdask.privacy import Budget
from dpdask.schema import Schema


class Input(Document):
    """Where the table is, and in which format."""

    path: str = Field(min_length=1)
    """Of plain files: a file, a folder or a glob, as a path or any fsspec URL. The folder of a
    Delta table. The name of an Iceberg table in its catalog, or without a catalog the path of
    its metadata file.
    """
    format: Literal["files", "parquet", "csv", "delta", "iceberg"] = "files"
    """`files` (Parquet or CSV, as the files' names tell), `parquet` or `csv` (files of any name),
    `delta` or `iceberg`.
    """
    version: int | None = Field(default=None, ge=0)
    """The version of a Delta table; the latest if it is not given."""
    snapshot: int | None = None
    """The snapshot of an Iceberg table; the current one if it is not given."""
    catalog: Catalog | None = None
    """The catalog of an Iceberg table."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for key, format_ in (("version", "delta"), ("snapshot", "iceberg"), ("catalog", "iceberg")):
            if getattr(self, key) is not None and self.format != format_:
                raise ValueError(
                    f"{key!r} belongs to `format: {format_}`, and this is `format: {self.format}`"
                )
        return self

    @model_serializer(mode="wrap")
    def _without_usual(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out default values, so that the digests of jobs on plain files stay as they are."""
        written: dict[str, Any] = plain(self)
        return {
            key: value
            for key, value in written.items()
            if key == "path" or value not in (None, "files")
        }

    @property
    def table_format(self) -> TableFormat:
        """How the table's files are found."""
        if self.format == "iceberg":
            return Iceberg(
                self.snapshot,
                None if self.catalog is None else self.catalog.model_dump(exclude_none=True),
            )
        return Delta(self.version) if self.format == "delta" else Files(self.format)

    @property
    def lake(self) -> Lake | None:
        """How the files of a table with a log are found; None for plain files."""
        found = self.table_format
        return found if isinstance(found, Delta | Iceberg) else None

    def locate(self, base: Path) -> str:
        """Return the table's URL, or its name if a catalog knows it; a relative path is relative to the folder `base`."""
        return self.path if self.catalog is not None else absolute_url(self.path, base)


class Parents(Document):
    """The table of the persons whose rows the input has."""

    input: Input
    """Where it is: one row a person."""
    schema_path: str = Field(alias="schema", min_length=1)
    """The file that declares its columns; its key is `schema`."""
    key: str | None = None
    """Its column that names the person; that of the unit if it is not given."""
    orphans: Literal["refuse", "drop"] = "refuse"
    """What becomes of rows whose person it lacks: `refuse` ends the run, `drop` leaves them out."""


def join_tables(
    schema: Schema, persons: Schema | None, parents: Parents | None, budget: Budget | None
) -> Schema:
    """Return the columns of both tables, if there is one of persons; its own are constant in the rows of each."""
    if persons is None or parents is None:
        return schema
    unit = None if budget is None else budget.unit_column
    if unit is None:
        what = "a person is named by a column, and the unit is the row"
        raise SpecError(what, "privacy.unit", "set `unit: {column: …, max_rows: …}`")
    if persons.discovered:
        what = "no search finds the levels of a table of persons"
        raise SpecError(what, f"column {persons.discovered[0]!r}", "list its levels")
    key = parents.key or unit.column
    if key not in persons.columns or persons.columns[key].role != "drop":
        what = f"{key!r} names the persons, and must be declared with the role drop"
        raise SpecError(what, "parents.schema", "declare it, or correct `parents.key`")
    added = {
        name: column.model_copy(update={"constant": column.role == "privatise"})
        for name, column in persons.columns.items()
        if column.role != "drop"
    }
    for name in (*added, *(name for name, each in schema.columns.items() if each.constant)):
        if name in schema.columns:
            what = "a column is in both tables, or in the rows and constant"
            raise SpecError(what, f"column {name!r}", "drop it from the rows' schema")
    both = {"columns": {**schema.columns, **added}, "rules": (*schema.rules, *persons.rules)}
    return schema.model_copy(update=both)


def link_tables(
    rows: FileSource, table: InputTable, schemas: tuple[Schema, Schema], parents: Parents, unit: str
) -> LinkedSource:
    """Return a table of rows and one of their persons as the engine reads them; no row is read.

    Parameters
    ----------
    schemas
        The declared columns of the rows and of the persons.
    unit
        The column of the rows that names the person.
    """
    found, key = table.persons, parents.key or unit
    assert found is not None
    side, other = table.schema.field(unit).type, found.schema.field(key).type
    whole = pa.types.is_integer(side) and pa.types.is_integer(other)
    # of which a negative number and a large one have the same bits
    if side != other and (not whole or pa.uint64() in (side, other)):
        what = f"it names persons as {other}, and {unit!r} of the rows does as {side}"
        raise DataError(what, f"column {key!r}", "store both as the same type")
    return LinkedSource(
        rows=rows,
        persons=FileSource(found.fragments, parents.input.path),
        rows_as=(schemas[0], table.schema),
        persons_as=(schemas[1], found.schema),
        key=key,
    )
