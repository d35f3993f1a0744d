"""One piece of the input that is read and randomised as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the columns of a row group lie in its file, so that a reader need not ask first.

    Attributes
    ----------
    n_file_bytes
        The file's length.
    footer_start
        Where its footer begins.
    columns
        Each leaf column's path with its start and end.
    """

    n_file_bytes: int
    footer_start: int
    columns: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """One piece of the input that is read and randomised as a whole.

    Attributes
    ----------
    id
        32 hexadecimal digits.
    url
        The file. Its folders may hold values of a partition column, so it is not shown.
    name
        The file's path inside the table, for messages: without the values of partition columns.
    format
        `parquet` or `csv`.
    row_group
        The number of the row group in a Parquet file; 0 for CSV.
    n_rows
        From the footer, without deleted rows; None for CSV, which has none.
    n_bytes
        What is read, compressed.
    version
        A digest by which a changed file is noticed.
    alike
        A digest that CSV files with the same rows have in common; empty for Parquet, where `version` is that.
    number
        Its place in the table.
    seal
        The digest of its private values when they were counted; empty before. Private.
    n_bytes_decoded
        How many bytes its columns that are not dropped have when they are decompressed; 0 if no footer tells.
    layout
        Where its columns lie; None for CSV.
    constants
        The columns that the file does not hold, each with the value that all its rows have: partition columns, and
        columns that the table got later.
    renamed
        The columns that have another name in the file, each with that name.
    deleted
        The rows that the table no longer has, as `deletions.pack` writes them; empty if there are none.
    """

    id: str
    url: str = field(repr=False)
    name: str
    format: Literal["parquet", "csv"]
    row_group: int
    n_rows: int | None
    n_bytes: int
    version: str
    alike: str = ""
    number: int = 0
    seal: bytes = field(default=b"", repr=False)
    n_bytes_decoded: int = 0
    layout: Layout | None = field(default=None, repr=False)
    constants: tuple[tuple[str, Any], ...] = field(default=(), repr=False)
    renamed: tuple[tuple[str, str], ...] = ()
    deleted: bytes = field(default=b"", repr=False)

    @property
    def where(self) -> str:
        """The fragment's place, for messages."""
        return f"{self.name}, row group {self.row_group}" if self.format == "parquet" else self.name
