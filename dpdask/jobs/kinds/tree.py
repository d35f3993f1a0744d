"""Distribution-invariant privatisation along a tree as a job: noisy tables of all rows are the barrier, then every row is randomised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dpdask.engine import release, tabulate
from dpdask.engine.compute import Progress
from dpdask.engine.work import KEY_NAME, NOISY_NAME, TableWork, keep
from dpdask.errors import DataError
from dpdask.io.fragments import InputTable
from dpdask.io.storage import Folder
from dpdask.jobs.kinds import central
from dpdask.jobs.kinds.dip import WRITE, Dip, DipKind, check_budget, check_channel, written
from dpdask.jobs.kinds.kind import WHOLE_ROW, Fitted, Terms
from dpdask.mechanisms.dip.tree import worst_row
from dpdask.mechanisms.dip.tree_fit import check_tree, fit_tree
from dpdask.mechanisms.dip.tree_spending import TreeSpending, spend_tree
from dpdask.mechanisms.dip.tree_tables import measure_tree
from dpdask.mechanisms.marginals.archive import noisy_to_bytes
from dpdask.mechanisms.marginals.noise import NoisyMarginals
from dpdask.privacy.audit import channel_epsilon, shown_weights, within_digits
from dpdask.references import Tree
from dpdask.stats import Domain, Marginals
from dpdask.streams import RunKey, stream

_STAND_IN_ROWS = 2**14

Channels = Mapping[str, tuple[str | None, np.ndarray]]


def dip_kind(spec: Dip, terms: Terms) -> DipKind:
    """Return the kind of a DIP job.

    Raises
    ------
    SpecError
        If the mechanism fits neither the budget, nor the schema, nor the output.
    """
    return TreeKind.of(spec, terms) if isinstance(spec.reference, Tree) else DipKind.of(spec, terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeKind(DipKind):
    """The `Kind` of a DIP job whose reference is a tree; made by `of`."""

    reference: Tree
    spending: TreeSpending

    @classmethod
    def of(cls, spec: Dip, terms: Terms) -> TreeKind:
        """Return the kind of a DIP job along a tree.

        Raises
        ------
        SpecError
            If the mechanism does not fit the budget.
        """
        assert isinstance(spec.reference, Tree)
        check_budget(terms.budget, spends_delta=True)
        check_channel(spec)
        spending = spend_tree(terms.budget, spec.reference, terms.schema.privatised, spec.weights)
        return cls(spec=spec, terms=terms, reference=spec.reference, spending=spending)

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        return f"{', '.join(self.terms.schema.privatised)} randomised by the {self.spec.channel} channel along a tree of noisy tables"

    def check(self, types: pa.Schema, secrets: Folder) -> None:
        """Check a table's Arrow types, the bins, and the sizes of tables and channels; nothing is read or written.

        Raises
        ------
        DataError, SpecError
            If they do not fit.
        """
        cells = self._work(types, secrets).cells
        check_tree(cells, self.spec.channel, self.spec.cost)
        tabulate.check_size(tabulate.domain_of(cells), tabulate.ALL_PAIRS, "mechanism.reference.bins")

    def _warnings(self, n_rows: int | None) -> tuple[str, ...]:
        return central.warnings(self.terms, n_rows)

    def _stages(self, uncounted: bool) -> tuple[str, ...]:
        names, spending = self.terms.schema.privatised, self.spending
        n = len(names)
        tables = f"count {n} one-way and {n * (n - 1) // 2} two-way tables of all rows"
        noise = f"noise on the tables (ε = {spending.tables:.6g}" + (", and all of δ)" if self.terms.budget.delta else ")")
        looks = "; a first look at all pairs chooses the tree, a second one measures its pairs" if n > 2 else ""
        rows = "a row" if spending.rows_per_unit == 1 else f"each of {spending.rows_per_unit} rows"
        channels = f"the channels of each column, given its parent on the tree ({rows}: ε = {spending.row_total:.6g})"
        tabulated = f"tabulate: read {', '.join(names)} once; {tables}, merged in a tree"
        return (*self._unit_stages(), tabulated, f"fit: {noise}{looks}; {channels}; on the driver, written once", *WRITE)

    def fit(self, table: InputTable, secrets: Folder, charge: Callable[[], None], progress: Progress | None, *, insecure: bool) -> Fitted:
        """Count, charge, draw the tables' noise and keep it, fit the channels to the noisy tables, and write them.

        Raises
        ------
        DataError, SpecError
            If a value violates the schema, or there is no row.
        BudgetError
            From `charge`.
        InputError
            If the noise that was kept is of other tables.

        Privacy
        -------
        Exact counts reach the driver and go no further. Noise that a driver kept before it died is never drawn again.
        """
        work = release.bound_units(table, self._work(table.schema, secrets), progress)
        n_released = counted_rows(table, work)
        drawn = central.drawn_before(secrets, NOISY_NAME)
        if drawn is not None and n_released is not None:
            charge()
            noisy = self._drawn(work, drawn)
            return self._channels(noisy, work, n_released)
        found = tabulate.tabulate(table.fragments, work, tabulate.ALL_PAIRS, progress, released=True)
        if found.counts.n_rows == 0:
            raise DataError("no row would be released", self.terms.input_path, "check the input")
        charge()
        noisy = self._measured(found.counts, secrets, insecure=insecure) if drawn is None else self._drawn(work, drawn)
        return self._channels(noisy, work, found.n_released)

    def _measured(self, counts: Marginals, secrets: Folder, *, insecure: bool) -> NoisyMarginals:
        rng = stream(RunKey(secrets.read(KEY_NAME)), "marginals/noise", "") if insecure else None
        noisy = measure_tree(counts, self.spending.noise, rng=rng)
        keep(secrets, NOISY_NAME, noisy_to_bytes(noisy))
        return noisy

    def _drawn(self, work: TableWork, digest: str) -> NoisyMarginals:
        return central.load_drawn(work.secrets, digest, work, lambda found: self.spending.noise.on(tuple(found.cliques)))

    def _channels(self, noisy: NoisyMarginals, work: TableWork, n_released: tuple[int, ...]) -> Fitted:
        return written(fit_tree(noisy, work.cells, self.spending.row, self.spec.channel, self.spec.cost), work, n_released)

    def audit(self, types: pa.Schema, secrets: Folder, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return for each privatised column, and for a whole row, its `claimed` part of ε, its exact ε*, and what this holds for.

        That is the released channels where the job is released and its card shows them, or those of a simulated table.
        """
        shown = _shown(card)
        if shown:
            return self._audited(shown, "the released channels")
        cells = self._work(types, secrets).cells
        noisy = measure_tree(_simulated(tabulate.domain_of(cells)), self.spending.noise, rng=stream(RunKey.insecure(0), "audit/noise", ""))
        fitted = fit_tree(noisy, cells, self.spending.row, self.spec.channel, self.spec.cost)
        return self._audited({name: (column.parent, column.weights) for name, column in fitted.columns.items()}, "a simulated table")

    def _audited(self, channels: Channels, reference: str) -> dict[str, dict[str, Any]]:
        exact = {name: max(map(channel_epsilon, weights)) for name, (_, weights) in channels.items()} | {WHOLE_ROW: worst_row(channels)}
        claims = {**self.spending.row, WHOLE_ROW: self.spending.row_total}
        return {
            name: {"claimed": claim, "epsilon_exact": within_digits(exact[name], claim), "reference": reference} for name, claim in claims.items()
        }


def counted_rows(table: InputTable, work: TableWork) -> tuple[int, ...] | None:
    """Return the released rows of each fragment as the footers tell them; None where there is none, or units are bounded."""
    rows = [fragment.n_rows for fragment in table.fragments]
    return None if work.unit is not None or None in rows else tuple(n for n in rows if n is not None)


def _shown(card: Mapping[str, Any] | None) -> Channels:
    """Return the channels that a finished job's card shows; empty if it is not released, or they are too many to be shown."""
    columns = {} if card is None else {name: column for name, column in card.get("columns", {}).items() if column["role"] == "privatised"}
    if not all("channels" in column for column in columns.values()):
        return {}
    return {name: (column["parent"], shown_weights(column["channels"])) for name, column in columns.items()}


def _simulated(domain: Domain) -> Marginals:
    """Return the tables of rows whose columns depend on one another: each is by halves a trait of the row, or even."""
    rng = stream(RunKey.insecure(0), "audit/rows", "")
    trait = rng.random(_STAND_IN_ROWS)
    codes = np.empty((domain.n_attributes, _STAND_IN_ROWS), dtype=domain.code_dtype)
    for own, size in zip(codes, domain.sizes, strict=True):
        own[:] = size * np.where(rng.random(_STAND_IN_ROWS) < 0.5, trait, rng.random(_STAND_IN_ROWS))
    return Marginals.of_codes(domain, codes)
