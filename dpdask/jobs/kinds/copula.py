"""The Gaussian copula as a job: noisy one- and two-way tables, one fit on the driver, synthetic records partition by partition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import pyarrow as pa
from pydantic import BeforeValidator, Field

from dpdask.cells import DEFAULT_BINS
from dpdask.documents import Document
from dpdask.engine import synthesise, tabulate
from dpdask.engine.compute import Progress
from dpdask.engine.randomise import Staged
from dpdask.engine.work import KEY_NAME
from dpdask.io.fragments import InputTable
from dpdask.io.storage import Folder
from dpdask.jobs.kinds import central
from dpdask.jobs.kinds.kind import Expected, Fitted, Terms
from dpdask.mechanisms.columns import bins_by_column
from dpdask.mechanisms.copula.fit import fit_copula
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.mechanisms.marginals.card import copula_card
from dpdask.mechanisms.marginals.noise import MarginalNoise, plan_noise
from dpdask.privacy.events import Composed
from dpdask.references.bins import Bins
from dpdask.streams import RunKey, stream


def _as_n_rows(value: object) -> object:
    if value != "input" and (type(value) is not int or value < 1):
        raise ValueError("a whole number, at least 1, is expected, or `input`")
    return value


class Weights(Document):
    """The share of the budget of each one-way and each two-way table, relative to each other."""

    one_way: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    two_way: float = Field(default=1.0, gt=0, allow_inf_nan=False)


class Copula(Document):
    """Synthetic records of a Gaussian copula.

    Attributes
    ----------
    n_rows
        How many records: a number, or `input`: as many as the table has (under add-remove, as the noisy tables say).
    bins
        How continuous and mixed columns are cut: a number of cells of one width, or for each column such a number or the
        first value of each cell.
    weights
        How the budget is shared among the tables.
    """

    kind: Literal["copula"]
    n_rows: Annotated[Literal["input"] | int, BeforeValidator(_as_n_rows)] = "input"
    bins: Bins = DEFAULT_BINS
    weights: Weights = Weights()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopulaKind(central.NoisyCounts):
    """A copula job's `Kind`; made by `of`.

    Attributes
    ----------
    spec
        The mechanism as the job writes it.
    """

    spec: Copula

    @classmethod
    def of(cls, spec: Copula, terms: Terms) -> CopulaKind:
        """Return the kind of a copula job.

        Raises
        ------
        SpecError
            If a column is to be kept.
        """
        central.check_schema(terms.schema, "a synthetic record is nobody's")
        return cls(spec=spec, terms=terms)

    @property
    def noise(self) -> MarginalNoise:
        """The noise of every table; it depends on no data."""
        weights = self.spec.weights
        return plan_noise(self.terms.budget, len(self.terms.schema.privatised), one_way=weights.one_way, pairs=weights.two_way)

    @property
    def event(self) -> Composed:
        """One noisy table of each column and of each pair of columns."""
        return self.noise.event

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        return f"synthetic records of {len(self.terms.schema.privatised)} columns, from a Gaussian copula"

    def check(self, types: pa.Schema, secrets: Folder) -> None:
        """Check a table's Arrow types, the bins and the tables' sizes; nothing is read or written.

        Raises
        ------
        DataError, SpecError
            If they do not fit.
        """
        work = central.work_on(types, self.terms, self.spec.bins, secrets)
        central.check_counts(work, tabulate.ALL_PAIRS)
        tabulate.check_latents(tabulate.domain_of(work.cells))

    def expect(self, table: InputTable, rows_per_shard: int) -> Expected:
        """Return what a run on a table would do; no row is read."""
        n = len(self.terms.schema.privatised)
        stages = (
            *central.unit_stage(self.terms),
            f"tabulate: read {n} columns once; count {n} one-way and {n * (n - 1) // 2} two-way tables, merged in a tree",
            "fit: noise on every table, and the copula of the noisy tables, on the driver, written once",
            "write: sample synthetic records and stage their shards",
        )
        n_rows = self.public_rows(table) if self.spec.n_rows == "input" else self.spec.n_rows
        n_shards = None if n_rows is None else -(-n_rows // rows_per_shard)
        return Expected(stages=stages, n_rows=n_rows, n_shards=n_shards, warnings=central.warnings(self.terms, self.public_rows(table)))

    def fit(self, table: InputTable, secrets: Folder, charge: Callable[[], None], progress: Progress | None, *, insecure: bool) -> Fitted:
        """Count, charge, draw the noise, fit the copula to the noisy tables, and write it.

        Raises
        ------
        DataError
            If a value violates the schema.
        BudgetError
            From `charge`.

        Privacy
        -------
        Exact counts reach the driver and go no further; what is written is a function of the noisy tables.
        """
        work = central.work_on(table.schema, self.terms, self.spec.bins, secrets)
        found = self.measured(table, work, tabulate.ALL_PAIRS, self.noise, secrets, charge, progress, insecure=insecure)
        model, report = fit_copula(found.noisy, stream(RunKey(secrets.read(KEY_NAME)), "copula/calibration", ""))
        bins = bins_by_column(self.spec.bins, work.cells)
        fitted = FittedCopula(schema=self.terms.schema, types=work.released, bins=bins, noisy=found.noisy, model=model, report=report)
        n_rows = fitted.n_drawn(None if self.spec.n_rows == "input" else self.spec.n_rows)
        return Fitted(release_sha256=synthesise.write_copula(fitted, secrets), n_released=(n_rows,), changed=found.changed)

    def write(
        self, table: InputTable, fitted: Fitted, secrets: Folder, publish: Folder, actions: Folder, rows_per_shard: int, progress: Progress | None
    ) -> Staged:
        """Stage every shard of synthetic records; doing it twice changes nothing. The table is not read again.

        Raises
        ------
        InputError, TemporaryError
            The first failure; what is staged stays.
        """
        tasks = synthesise.lay_out_records(fitted.n_released[0], rows_per_shard)
        return Staged(shards=tuple(synthesise.write_all_records(tasks, fitted.release_sha256, secrets, publish, actions, progress)))

    def card(self, table: InputTable, fitted: Fitted, secrets: Folder, *, insecure: bool) -> bytes:
        """Return the release card: the same release, the same bytes."""
        copula = synthesise.load_copula(secrets, fitted.release_sha256)
        return copula_card(
            name=self.terms.name, budget=self.terms.budget, guarantee=self.guarantee, fitted=copula, n_records=fitted.n_released[0], insecure=insecure
        )
