"""The reference `chain`: the joint distribution of several columns, each given the columns before it, from whole reference records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from dpdask.codec import Codec
from dpdask.documents import suggest
from dpdask.errors import SpecError
from dpdask.privacy import UnitColumn
from dpdask.privacy.coverage import Uncovered
from dpdask.references.reference import Structure, TableReference
from dpdask.schema import Schema
from dpdask.stats.records import MAX_RECORDS, RecordStatistic
from dpdask.streams import RunKey, stream, words

ORDER_ID = "chain/order"

Order = tuple[str, ...] | Literal["random"]


class Chain(TableReference):
    """The joint empirical distribution of a random part of the rows, or of a public table (Bi & Shen, (2) and (7)-(10)).

    Attributes
    ----------
    fraction
        The probability, in (0, 1), with which each row is held out.
    path, format, version
        The place of a public table that replaces the hold-out. Exactly one of `fraction` and `path` is given; in Python,
        neither means that the public table is handed to `fit`.
    order
        The privatised columns in the order in which they are released; the schema's order if not given; `random`: drawn
        from the run key. It does not change the distribution of the release.
    by
        A kept column: each of its values has a reference of its own.
    min_rows
        Groups with fewer reference rows are released by the pooled reference of all groups.
    max_records
        How many distinct records are held at most (each counted once for every keyed grade among its rows); beyond it the
        reference is an exact keyed subsample.

    Privacy
    -------
    With `fraction`, protects the released rows only. The held-out rows are not released and have no ε. With several columns
    they are republished: levels and atoms exactly, other values almost. Every released row lies in the grid cell of a hold-out
    record in all columns at once. Measured with 1,000 hold-out rows of independent continuous columns, this holds for 100 % of
    the released rows in any number of columns. For fresh rows of the same distribution it holds by chance: for 100 % with one
    column, 0.1 % with two and none with three. With a quarter held out, the released rows show about 95 % of the hold-out
    records, and nearly all records that repeat (few levels). With `path`, protects all rows, provided that the public table
    holds none of them.

    Notes
    -----
    Memory of each process that writes: at most 36 bytes · nodes of the records' trie, which has no more than records ·
    columns of them (twice with `by`); while records are merged, `stats.records.Records`. With a sample of 2**-k of the rows,
    `min_rows` counts rows of the sample.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, (2), (7)-(10), appendix S4 for `by`. As in the text around (2), and
    in (10), each column's rank is taken given the original prefix and read given the released one.

    Examples
    --------
    >>> import dpdask
    >>> dpdask.Chain(fraction=0.25, order=("age", "income")).held_out
    0.25
    """

    kind: Literal["chain"] = "chain"
    fraction: float | None = Field(default=None, gt=0, lt=1)
    order: Annotated[Order | None, BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)] = None
    by: str | None = None
    min_rows: int = Field(default=10, ge=2)
    max_records: int = Field(default=MAX_RECORDS, ge=16, le=2**26)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.fraction is not None and self.path is not None:
            raise ValueError("a chain takes its records from a hold-out (fraction) or from a public table (path), not from both")
        return self

    structure: ClassVar[Structure] = "records"
    path_hint: ClassVar[str] = "add it, or `reference.fraction`"
    joint: ClassVar[str] = "all of it: rows follow the joint distribution of the reference's records, whatever the order of the columns"

    @property
    def protected(self) -> str:
        """Who has ε, in words."""
        return "the values of all rows" if self.fraction is None else "the values of the released rows"

    @property
    def unprotected(self) -> str:
        """Who has no ε, in words."""
        if self.fraction is None:
            return "the rows of the public reference table, which is taken to be public already and is republished record by record"
        return (
            f"the held-out rows, {self.fraction:g} of the table (whole units, where the unit is more than a row): they are not released and no ε "
            "covers them, but every released row follows one of them in all private columns at once, so that hold-out records are republished: "
            "levels and atoms exactly as they are, other values up to the gap to their neighbours"
        )

    @property
    def rows(self) -> Literal["own", "public"]:
        """The table's own with a hold-out, else those of the public table."""
        return "public" if self.fraction is None else "own"

    @property
    def held_out(self) -> float | None:
        """The probability with which a row is held out, or None."""
        return self.fraction

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """The hold-out, if there is one: its records are republished."""
        return () if self.fraction is None else (Uncovered(fraction=self.fraction, fate="republished"),)

    @property
    def also_read(self) -> tuple[str, ...]:
        """The column of the groups, if there is one."""
        return () if self.by is None else (self.by,)

    def statistic(self, codecs: Mapping[str, Codec]) -> RecordStatistic:
        """Return the distinct records of the reference rows."""
        return RecordStatistic(codecs=codecs, by=self.by, max_records=self.max_records)

    @property
    def followed_share(self) -> float | None:
        """Which part of the hold-out records that are unlike all others is followed by a released row, as expected: 1 - exp(-(1-f)/f).

        None without a hold-out.
        """
        return None if self.fraction is None else -math.expm1(-(1 - self.fraction) / self.fraction)

    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the steward before a release."""
        found = []
        if self.followed_share is not None:
            found.append(
                "the chain republishes hold-out records: every released row repeats one of them, levels and atoms exactly and other values up "
                f"to the gap to their neighbours; about {100 * self.followed_share:.0f} % of the records appear in the release "
                "(of those that occur often, nearly all); use it only if the people in the hold-out have agreed, or use a public table"
            )
        if self.by is not None:
            found.append(
                f"each value of {self.by} has a reference of its own if it has {self.min_rows} or more reference rows; small groups are "
                f"reproduced coarsely, and those with fewer rows take the pooled reference, which does not keep their own distribution"
            )
        return tuple(found)

    def stages(self, columns: str, *, uncounted: bool) -> tuple[str, ...]:
        """Return the steps of a run before it writes, in words.

        Parameters
        ----------
        columns
            The privatised columns.
        uncounted
            Whether the private table's footers do not tell how many rows it has.
        """
        read = columns if self.by is None else f"{columns}, {self.by}"
        records = f"their distinct records, merged in a tree; above {self.max_records:,}, a keyed sample of 2**-k of the rows, and the card says k"
        found = [f"survey: read {read}; choose the hold-out; {records}"] if self.fraction is not None else []
        if self.fraction is None:
            found += [f"survey: read {read}; count the rows"] if uncounted else []
            found.append(f"reference: read {read} of the public table; {records}")
        order = self.order if isinstance(self.order, str) else "given" if self.order else "the schema's"
        own = "" if self.by is None else f"; a reference for each {self.by} with {self.min_rows} or more reference rows, the pooled one for the rest"
        fit = f"fit: the records as a trie of at most 36 bytes for each record and column, columns in {order} order{own}"
        return (*found, f"{fit}; the noise of each column's ranks; on the driver, written once")

    def check(self, schema: Schema, unit: UnitColumn | None) -> None:
        """Check the columns that are named here against the schema.

        For the parameters see `TableReference.check`.

        Raises
        ------
        SpecError
            If `order` does not name exactly the privatised columns, `by` is not kept, or no released unit could have a
            reference of its own.
        """
        if isinstance(self.order, tuple) and sorted(self.order) != sorted(schema.privatised):
            raise SpecError("must name each privatised column once", "`reference.order`", "correct it, or remove it")
        if self.by is None:
            return
        if self.by not in schema.kept:
            kept = ", ".join(schema.kept) or "none"
            raise SpecError(
                "the groups' column must be kept",
                f"`reference.by` {self.by!r}",
                suggest(self.by, schema.kept, f"name a column of the role keep ({kept})"),
            )
        if unit is not None and self.fraction is not None and unit.column == self.by:
            what = "units are held out as a whole, so no released unit would have its own reference"
            raise SpecError(what, f"`reference.by` {self.by!r}", "remove it, or take a public table")

    def order_columns(self, columns: tuple[str, ...], key: RunKey) -> tuple[str, ...]:
        """Return the privatised columns in the order of their release.

        Parameters
        ----------
        columns
            The privatised columns, in the schema's order.
        key
            The run key, which draws a random order.
        """
        if isinstance(self.order, tuple):
            return self.order
        if self.order is None:
            return columns
        drawn = words(stream(key, ORDER_ID, ""), len(columns))
        return tuple(columns[place] for place in np.argsort(drawn, kind="stable"))
