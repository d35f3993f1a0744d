"""What kinds that release nothing but noisy statistics share: how columns are cut, the pass over the table, the warning of δ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pyarrow as pa

from dpdask.engine import release, tabulate
from dpdask.engine.compute import Progress
from dpdask.engine.work import KEY_NAME, NOISY_NAME, TableWork, keep, kept, tabulated_work
from dpdask.errors import DataError, InputError, SpecError
from dpdask.io.fragments import InputTable
from dpdask.io.storage import Folder
from dpdask.jobs.kinds.kind import Terms
from dpdask.mechanisms.marginals.archive import noisy_from_bytes, noisy_to_bytes
from dpdask.mechanisms.marginals.noise import MarginalNoise, NoisyMarginals, measure
from dpdask.privacy import COVERED, UNCOVERED, noisy_counts_text
from dpdask.privacy.coverage import Uncovered
from dpdask.schema import Schema
from dpdask.streams import RunKey, stream


@dataclass(frozen=True, slots=True)
class NoParts:
    """The parts of an ε that is shared by no name: noise is the same on all tables."""

    row: Mapping[str, float] = field(default_factory=dict)
    reference: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Measured:
    """Noisy tables, and how many values the counting pass changed.

    Attributes
    ----------
    noisy
        The tables, kept beside the run key.
    sha256
        The digest of their file.
    changed
        As in `Fitted`.
    """

    noisy: NoisyMarginals
    sha256: str
    changed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyCounts:
    """What the kinds that are computed from noisy counts of all rows promise alike.

    Attributes
    ----------
    terms
        What the job says beside its mechanism.
    """

    terms: Terms

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """None: all rows are counted."""
        return ()

    @property
    def spending(self) -> NoParts:
        """Nothing by name: all counts share one budget."""
        return NoParts()

    @property
    def order(self) -> None:
        """None, because no row of the input is released."""

    @property
    def protected(self) -> str:
        """Who is covered, in words."""
        return COVERED

    @property
    def unprotected(self) -> str:
        """Who is not, in words."""
        return UNCOVERED

    @property
    def guarantee(self) -> str:
        """The promise in words."""
        return noisy_counts_text(self.terms.budget)

    @property
    def n_rows_private(self) -> bool:
        """Whether neighbouring tables differ by the presence of a row."""
        return self.terms.budget.adjacency == "add-remove"

    def check_rows(self, n_rows: int) -> None:
        """Check, before anything is charged, that the table has rows, if their number is public.

        Raises
        ------
        DataError
            If it has none.
        """
        if n_rows == 0 and not self.n_rows_private:
            raise DataError("the table has no rows", self.terms.input_path, "check the job's input.path")

    def public_rows(self, table: InputTable) -> int | None:
        """Return the number of rows from the footers if it is public, else None."""
        return None if self.n_rows_private else table.n_rows

    def measured(
        self,
        table: InputTable,
        work: TableWork,
        tables: tabulate.Tables,
        planned: MarginalNoise,
        secrets: Folder,
        charge: Callable[[], None],
        progress: Progress | None,
        *,
        insecure: bool,
    ) -> Measured:
        """Return the noisy tables of all rows (with units: of those within their bounds), drawn once and kept.

        The exact counts reach the driver, which charges the ledger, adds the noise and discards them. If an earlier driver died
        after it saved the noisy tables, they are loaded: noise drawn again on the same counts would be a second release.

        Raises
        ------
        DataError
            If a value violates the schema; if the number of rows is public and the table has none (for CSV files this is known
            only when they are read).
        BudgetError
            From `charge`.
        InputError
            If the saved tables are different ones, or have different noise.
        """
        drawn = drawn_before(secrets, NOISY_NAME)
        if drawn is not None:
            charge()
            return Measured(noisy=load_drawn(secrets, drawn, work, lambda _: planned), sha256=drawn)
        found = tabulate.tabulate(table.fragments, release.bound_units(table, work, progress), tables, progress)
        self.check_rows(found.counts.n_rows)
        charge()
        rng = stream(RunKey(secrets.read(KEY_NAME)), "marginals/noise", "") if insecure else None
        noisy = measure(found.counts, planned, n_rows_public=not self.n_rows_private, rng=rng)
        return Measured(noisy=noisy, sha256=keep(secrets, NOISY_NAME, noisy_to_bytes(noisy)), changed=found.changed)

    def audit(self, types: pa.Schema, secrets: Folder, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return nothing: no row is released, and the noise of the counts is audited as the events that it is."""
        return {}


def check_schema(schema: Schema, what: str) -> None:
    """Check that no column is to be passed through.

    Raises
    ------
    SpecError
        If one is: what is released has no row that it could stand in.
    """
    if schema.kept:
        raise SpecError(f"{what}, so no column can be kept", f"column {schema.kept[0]!r}", "give it the role privatise, or drop")


def work_on(types: pa.Schema, terms: Terms, bins: Any, secrets: Folder) -> TableWork:
    """Return the work on a table of some Arrow types, checked against the schema and the bins.

    Raises
    ------
    DataError, SpecError
        If they do not fit.
    """
    return tabulated_work(types, terms.schema, bins, secrets, terms.budget.unit_column)


def load_noisy(secrets: Folder, digest: str) -> NoisyMarginals:
    """Return the noisy tables beside the run key, compared with their digest.

    Raises
    ------
    InputError
        If there are none, or others.
    """
    return noisy_from_bytes(kept(secrets, NOISY_NAME, digest, "the run's noisy tables are not those that were written"), NOISY_NAME)


def load_drawn(secrets: Folder, digest: str, work: TableWork, planned: Callable[[NoisyMarginals], MarginalNoise]) -> NoisyMarginals:
    """Return the noisy tables that a driver drew and kept before it died.

    Parameters
    ----------
    secrets, digest
        As for `load_noisy`.
    work
        The work on the table, with its cells.
    planned
        Returns the noise that such tables should have.

    Raises
    ------
    InputError
        If they are of other columns, or have another noise.
    """
    found = load_noisy(secrets, digest)
    if found.domain != tabulate.domain_of(work.cells) or found.noise != planned(found):
        raise InputError("the run's noisy tables are of another version of dpdask", NOISY_NAME, "go on with that one, or `dpdask abort` the run")
    return found


def drawn_before(secrets: Folder, name: str) -> str | None:
    """Return the sha256 of what a driver drew and kept under a name, or None: noise that is kept is never drawn again."""
    return sha256(secrets.read(name)).hexdigest() if secrets.exists(name) else None


def warnings(terms: Terms, n_rows: int | None) -> tuple[str, ...]:
    """Return warnings for the steward before a run: about a δ so large that it would allow publishing a row verbatim.

    Parameters
    ----------
    terms
        The job's.
    n_rows
        The number of rows if it is known and public, else None.
    """
    delta = terms.budget.delta
    if n_rows is None or delta * n_rows < 1:
        return ()
    what = f"δ = {delta:g} is not below 1 / the number of rows: publishing one random row verbatim would satisfy the same guarantee"
    return (f"{what}; lower privacy.delta",)


def unit_stage(terms: Terms) -> tuple[str, ...]:
    """Return the stage that bounds the units, in words; none when the unit is the row."""
    unit = terms.budget.unit_column
    return () if unit is None else (f"units: read {unit.column}; choose at most {unit.max_rows} rows of each {unit.column}",)


def check_counts(work: TableWork, tables: tabulate.Tables) -> None:
    """Check that the tables can be held.

    Raises
    ------
    SpecError
        If they cannot.
    """
    tabulate.check_size(tabulate.domain_of(work.cells), tables)
