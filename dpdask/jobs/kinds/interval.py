"""Interval privacy as a job: every private value becomes a random range that contains it, in one pass and without any ε."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import Field

from dpdask.documents import Document
from dpdask.engine import randomise, release
from dpdask.engine.compute import Progress
from dpdask.engine.rows import RANGE_ROWS, load_designs, write_designs
from dpdask.engine.work import TableWork, lay_out, table_work
from dpdask.errors import DataError
from dpdask.io.fragments import InputTable
from dpdask.io.shards import Shard
from dpdask.io.storage import Folder
from dpdask.jobs.kinds.central import NoParts
from dpdask.jobs.kinds.dip import most_shards
from dpdask.jobs.kinds.kind import Expected, Fitted, Setting
from dpdask.mechanisms.interval_design import Design
from dpdask.mechanisms.interval_release import IntervalRelease, check_designs
from dpdask.privacy.events import Composed
from dpdask.reports.interval_card import interval_card, interval_guarantee, protected_text, unprotected_text


class Intervals(Document):
    """Random ranges that contain the values.

    Attributes
    ----------
    columns
        The design of each privatised column.
    """

    kind: Literal["interval"]
    columns: Annotated[Mapping[str, Design], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalKind:
    """An interval job's `Kind`; made by `of`.

    Attributes
    ----------
    spec
        The mechanism as the job writes it.
    terms
        What the job says beside it: no budget, because there is no ε.
    """

    spec: Intervals
    terms: Setting

    @classmethod
    def of(cls, spec: Intervals, terms: Setting) -> IntervalKind:
        """Return the kind of an interval job.

        Raises
        ------
        SpecError
            If the designs do not fit the columns.
        """
        check_designs(terms.schema, spec.columns, "mechanism.columns")
        return cls(spec=spec, terms=terms)

    @property
    def designs(self) -> dict[str, Design]:
        """The design of each private column, in the schema's order."""
        return {name: self.spec.columns[name] for name in self.terms.schema.privatised}

    @property
    def event(self) -> Composed:
        """Nothing that has an ε."""
        return Composed(events=())

    @property
    def spending(self) -> NoParts:
        """Nothing: there is no ε."""
        return NoParts()

    @property
    def protected(self) -> str:
        """What is covered, in words."""
        return protected_text(self.designs)

    @property
    def unprotected(self) -> str:
        """What is not, in words."""
        return unprotected_text(self.designs)

    @property
    def guarantee(self) -> str:
        """The promise in words."""
        return interval_guarantee(self.designs)

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        return f"{', '.join(self.designs)} released as random ranges"

    def check(self, types: pa.Schema, secrets: Folder) -> None:
        """Check a table's Arrow types against the declared domains, and tabulate every law; nothing is read or written.

        Raises
        ------
        DataError, SpecError
            If they do not fit, or a design cannot be had.
        """
        IntervalRelease.of(self.designs, self._work(types, secrets).codecs)

    def _work(self, types: pa.Schema, secrets: Folder) -> TableWork:
        return table_work(types, self.terms.schema, None, secrets)

    def expect(self, table: InputTable, rows_per_shard: int) -> Expected:
        """Return what a run on a table would do; no row is read."""
        columns = ", ".join(self.designs)
        count = () if table.n_rows is not None else (f"survey: read {columns}; count the rows",)
        stages = (
            *count,
            "fit: the tables that anchors are drawn from, on the driver; the designs are written once",
            "write: draw each fragment's anchors, find its values' ranges, and stage its shards",
        )
        n_shards = None if table.n_rows is None else most_shards(table.n_rows, None, len(table.fragments), rows_per_shard)
        return Expected(stages=stages, n_rows=table.n_rows, n_shards=n_shards)

    def fit(self, table: InputTable, secrets: Folder, charge: Callable[[], None], progress: Progress | None, *, insecure: bool) -> Fitted:
        """Write the designs beside the run key; rows are read only where no footer counts them.

        Raises
        ------
        DataError, SpecError
            If there is no row, or a design cannot be had.
        """
        work = self._work(table.schema, secrets)
        found = release.survey_input(table, work, progress)
        if sum(found.n_released) == 0:
            raise DataError("the table has no rows", self.terms.input_path, "check the job's input.path")
        charge()
        sha256 = write_designs(IntervalRelease.of(self.designs, work.codecs), secrets)
        return Fitted(release_sha256=sha256, n_released=found.n_released)

    def write(
        self, table: InputTable, fitted: Fitted, secrets: Folder, publish: Folder, actions: Folder, rows_per_shard: int, progress: Progress | None
    ) -> list[Shard]:
        """Stage every shard and return them in the order of the rows; doing it twice changes nothing.

        Raises
        ------
        DataError, InputError, TemporaryError
            The first failure; what is staged stays.
        """
        tasks = lay_out(table.fragments, fitted.n_released, rows_per_shard)
        return randomise.write_all(tasks, self._work(table.schema, secrets), fitted.release_sha256, publish, actions, progress, RANGE_ROWS)

    def card(self, table: InputTable, fitted: Fitted, secrets: Folder, *, insecure: bool) -> bytes:
        """Return the release card: the same release, the same bytes."""
        return interval_card(
            name=self.terms.name,
            release=load_designs(secrets, fitted.release_sha256),
            schema=self.terms.schema,
            codecs=self._work(table.schema, secrets).codecs,
            insecure=insecure,
        )

    def audit(self, types: pa.Schema, secrets: Folder, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return nothing: there is no ε to measure."""
        return {}
