"""Interval privacy as a job: every private value becomes a random range, in one pass; only values perturbed first have an ε."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import Field

from dpdask.documents import Document
from dpdask.engine import randomise, release
from dpdask.engine.compute import Progress
from dpdask.engine.randomise import Staged
from dpdask.engine.rows import COVERED_ROWS, RANGE_ROWS, load_designs, write_designs
from dpdask.engine.shuffle import lay_out_rows, shard_rows
from dpdask.engine.work import TableWork, table_work
from dpdask.errors import DataError
from dpdask.io.fragments import InputTable
from dpdask.io.storage import Folder
from dpdask.jobs.kinds.dip import most_shards
from dpdask.jobs.kinds.kind import Expected, Fitted, Setting, Terms
from dpdask.mechanisms.interval.card import interval_card, interval_guarantee, protected_text, unprotected_text
from dpdask.mechanisms.interval.design import Design
from dpdask.mechanisms.interval.differential import perturbed_columns, spending_of, within
from dpdask.mechanisms.interval.release import IntervalRelease, check_designs, released_schema
from dpdask.mechanisms.spending import Spending
from dpdask.privacy import Budget
from dpdask.privacy.coverage import Uncovered
from dpdask.privacy.events import Composed
from dpdask.privacy.order import RowOrder


class Intervals(Document):
    """Random ranges that contain the values, or what a perturbation made of them.

    Attributes
    ----------
    columns
        The design of each privatised column.
    coverage
        Whether `<column>_coverage` is released beside the ends: the range's probability under the design's public reference.
    """

    kind: Literal["interval"]
    columns: Annotated[Mapping[str, Design], Field(min_length=1)]
    coverage: bool = False

    @property
    def spends(self) -> bool:
        """Whether a column is perturbed, so that the job has an ε."""
        return bool(perturbed_columns(self.columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalKind:
    """An interval job's `Kind`; made by `of`.

    Attributes
    ----------
    spec
        The mechanism as the job writes it.
    terms
        What the job says beside it; `Terms`, with a budget, where a column is perturbed.
    designs
        The design of each private column, in the schema's order; the ε of perturbed ones sum to no more than the budget's.
    """

    spec: Intervals
    terms: Setting
    designs: Mapping[str, Design]

    @classmethod
    def of(cls, spec: Intervals, terms: Setting) -> IntervalKind:
        """Return the kind of an interval job.

        Raises
        ------
        SpecError
            If the designs do not fit the columns, or the budget.
        """
        check_designs(terms.schema, spec.columns, "mechanism.columns", coverage=spec.coverage)
        designs = {name: spec.columns[name] for name in terms.schema.privatised}
        return cls(spec=spec, terms=terms, designs=within(designs, terms.budget) if isinstance(terms, Terms) else designs)

    @property
    def budget(self) -> Budget | None:
        """What is promised of the perturbed columns; None if there are none."""
        return self.terms.budget if isinstance(self.terms, Terms) else None

    @property
    def event(self) -> Composed:
        """One local release of every row by its perturbed columns; nothing without them."""
        if self.budget is None:
            return Composed(events=())
        pure = tuple(name for name in self.designs if name not in perturbed_columns(self.designs))
        return replace(self.spending.events(self.budget), without_epsilon=pure)

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """None: the values of every row are perturbed in the same way."""
        return ()

    @property
    def spending(self) -> Spending:
        """What each perturbed column costs; the others have no ε."""
        return spending_of(self.designs)

    @property
    def order(self) -> RowOrder:
        """The order of the released rows."""
        return self.terms.order

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
        return interval_guarantee(self.designs, self.budget, self.order)

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        perturbed = perturbed_columns(self.designs)
        return f"{', '.join(self.designs)} released as random ranges" + (f"; {', '.join(perturbed)} perturbed first" if perturbed else "")

    @property
    def n_rows_private(self) -> bool:
        """False: rows are released one by one, so everybody can count them."""
        return False

    def check(self, types: pa.Schema, secrets: Folder) -> None:
        """Check a table's Arrow types against the declared domains, and tabulate every law; nothing is read or written.

        Raises
        ------
        DataError, SpecError
            If they do not fit, or a design cannot be had.
        """
        self._release(self._work(types, secrets))

    def _work(self, types: pa.Schema, secrets: Folder) -> TableWork:
        return table_work(types, self.terms.schema, None, secrets)

    def _release(self, work: TableWork) -> IntervalRelease:
        return IntervalRelease.of(self.designs, work.codecs, coverage=self.spec.coverage)

    def _released(self, types: pa.Schema) -> pa.Schema:
        return released_schema(self.terms.schema.released(types), list(self.designs), coverage=self.spec.coverage)

    def expect(self, table: InputTable, rows_per_shard: int) -> Expected:
        """Return what a run on a table would do; no row is read."""
        columns = ", ".join(self.designs)
        count = () if table.n_rows is not None else (f"survey: read {columns}; count the rows",)
        stages = (
            *count,
            "fit: the tables that anchors and perturbations are drawn from, on the driver; the designs are written once",
            f"write: {self._perturbing}draw each fragment's anchors, find its values' ranges, and stage its shards",
        )
        per_shard = shard_rows(self._released(table.schema), rows_per_shard, self.order)
        n_shards = None if table.n_rows is None else most_shards(table.n_rows, None, len(table.fragments), per_shard)
        return Expected(stages=stages, n_rows=table.n_rows, n_shards=n_shards)

    @property
    def _perturbing(self) -> str:
        perturbed = perturbed_columns(self.designs)
        return f"perturb {', '.join(perturbed)}; " if perturbed else ""

    def fit(self, table: InputTable, secrets: Folder, charge: Callable[[], None], progress: Progress | None, *, insecure: bool) -> Fitted:
        """Write the designs beside the run key; rows are read only where no footer counts them.

        Raises
        ------
        DataError, SpecError
            If there is no row, or a design cannot be had.
        BudgetError
            From `charge`.
        """
        work = self._work(table.schema, secrets)
        found = release.survey_input(table, work, progress)
        if sum(found.n_released) == 0:
            raise DataError("the table has no rows", self.terms.input_path, "check the job's input.path")
        charge()
        sha256 = write_designs(self._release(work), secrets)
        return Fitted(release_sha256=sha256, n_released=found.n_released)

    def write(
        self, table: InputTable, fitted: Fitted, secrets: Folder, publish: Folder, actions: Folder, rows_per_shard: int, progress: Progress | None
    ) -> Staged:
        """Stage every shard and return them by name; doing it twice changes nothing.

        Raises
        ------
        DataError, InputError, TemporaryError
            The first failure; what is staged stays.
        """
        work, rows = self._work(table.schema, secrets), COVERED_ROWS if self.spec.coverage else RANGE_ROWS
        tasks = lay_out_rows(table.fragments, fitted.n_released, rows_per_shard, self._released(table.schema), self.order, work.key())
        return randomise.write_all(tasks, work, fitted.release_sha256, publish, actions, progress, rows)

    def card(self, table: InputTable, fitted: Fitted, secrets: Folder, *, insecure: bool) -> bytes:
        """Return the release card: the same release, the same bytes."""
        return interval_card(
            name=self.terms.name,
            release=load_designs(secrets, fitted.release_sha256),
            schema=self.terms.schema,
            codecs=self._work(table.schema, secrets).codecs,
            insecure=insecure,
            budget=self.budget,
            order=self.order,
        )

    def audit(self, types: pa.Schema, secrets: Folder, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return for each perturbed column its `claimed` ε, its exact ε*, and the `reference` that this holds for: what is declared."""
        claims = self.spending.row
        return {
            name: {"claimed": claims[name], "epsilon_exact": perturbation.exact_epsilon, "reference": "the declared distribution"}
            for name, perturbation in self._release(self._work(types, secrets)).perturbations.items()
        }
