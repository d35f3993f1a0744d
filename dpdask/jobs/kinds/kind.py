"""What a run, a plan, a charge and an audit need to know of a mechanism, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from dpdask.engine.compute import Progress
from dpdask.engine.randomise import Staged
from dpdask.io.fragments import InputTable
from dpdask.io.storage import Folder
from dpdask.privacy import Budget
from dpdask.privacy.coverage import Uncovered
from dpdask.privacy.events import Event
from dpdask.privacy.order import RowOrder
from dpdask.schema import Schema

WHOLE_ROW = "(all columns of a row)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every job says beside its mechanism.

    Attributes
    ----------
    name
        The job's name.
    schema
        The declared columns.
    base
        The folder that relative paths are relative to.
    input_path
        The input's place as the job writes it, for messages.
    output_url
        Where the release goes.
    order
        Whether rows that are released one by one are shuffled or keep the order of the input.
    """

    name: str
    schema: Schema
    base: Path
    input_path: str
    output_url: str
    order: RowOrder = "shuffled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms(Setting):
    """What a job says beside its mechanism, where it spends a budget.

    Attributes
    ----------
    budget
        What is promised.
    """

    budget: Budget


class Parts(Protocol):
    """How ε is shared, as far as it is shared by name; a part that has no ε of its own (Gaussian noise) is in neither.

    `mechanisms.spending.Spending` is one.
    """

    @property
    def row(self) -> Mapping[str, float]:
        """What each column of one released row may cost on its own; empty where no row is released."""

    @property
    def reference(self) -> Mapping[str, float]:
        """What each noisy histogram may cost, by the columns that it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a run would do, as far as footers tell.

    Attributes
    ----------
    stages
        In order, in words; without the commit, which is every run's last.
    n_rows
        About how many rows come out, or None.
    n_shards
        At most how many shards, or None.
    warnings
        What a steward should think of before the run.
    """

    stages: tuple[str, ...]
    n_rows: int | None
    n_shards: int | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What the barrier left beside the run key; the state file keeps it.

    Attributes
    ----------
    release_sha256
        Of the fitted release.
    bounds_sha256
        Of the units' bounds, where the unit is not the row.
    n_released
        The released rows of each fragment, or of each writing task. Private unless the kind says otherwise.
    changed
        For each column, how many values were outside its domain and were changed, if the barrier makes the only pass over the
        rows. Private: only for the steward's terminal, so it is not written to a file, and it is empty if a run is resumed
        from its state.
    """

    release_sha256: str
    bounds_sha256: str = ""
    n_released: tuple[int, ...]
    changed: Mapping[str, int] = field(default_factory=dict, repr=False)


class Kind(Protocol):
    """A mechanism with its terms: what a job charges, promises, computes and writes.

    Notes
    -----
    A run calls `check`, `fit`, `write`, `card` in this order; after a crash it begins again at the first that is not
    recorded, in another process. So each gets all it needs by its arguments, and nothing is kept in the kind.
    """

    @property
    def event(self) -> Event:
        """What will happen: what the ledger is charged and the audit draws."""

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """The samples of rows that no ε covers; their draws are not named yet."""

    @property
    def spending(self) -> Parts:
        """How ε is shared, for the plan and the audit."""

    @property
    def order(self) -> RowOrder | None:
        """The order of the released rows; None if no row of the input is released."""

    @property
    def protected(self) -> str:
        """Who is covered, in words."""

    @property
    def unprotected(self) -> str:
        """Who is not, in words."""

    @property
    def guarantee(self) -> str:
        """The promise in words, as the card gives it."""

    @property
    def how(self) -> str:
        """What was done, in a few words."""

    @property
    def n_rows_private(self) -> bool:
        """Whether the number of rows is private: then nothing before the noise depends on it, and an empty table is released like any other."""

    def check(self, types: pa.Schema, secrets: Folder) -> None:
        """Check a table's Arrow types against the declared domains; nothing is read or written.

        Raises
        ------
        DataError, SpecError
            If they do not fit.
        """

    def expect(self, table: InputTable, rows_per_shard: int) -> Expected:
        """Return what a run on a table would do; no row is read."""

    def fit(self, table: InputTable, secrets: Folder, charge: Callable[[], None], progress: Progress | None, *, insecure: bool) -> Fitted:
        """Compute what is needed of the whole table and write the fitted release beside the run key: the barrier.

        Parameters
        ----------
        table
            The private table.
        secrets
            The folder of the run key.
        charge
            Called once, after the last exact statistic and before the first noise value: from then on the run is charged.
        progress
            Called with (stage, done, total).
        insecure
            Whether noise comes from the run key, which a seed made, instead of the operating system.

        Raises
        ------
        DataError, SpecError
            If the data or the job are wrong: nothing is kept.
        BudgetError
            From `charge`.
        """

    def write(
        self, table: InputTable, fitted: Fitted, secrets: Folder, publish: Folder, actions: Folder, rows_per_shard: int, progress: Progress | None
    ) -> Staged:
        """Stage every shard in `publish`, recorded in `actions`, and return them by name; doing it twice changes nothing."""

    def card(self, table: InputTable, fitted: Fitted, secrets: Folder, *, insecure: bool) -> bytes:
        """Return the release card: the same release, the same bytes."""

    def audit(self, types: pa.Schema, secrets: Folder, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return for each column that is released row by row its `claimed` and its exact ε*, as `epsilon_exact`, and the `reference` it holds for.

        Where the ε* of a whole row is known beside those of its columns, it has an entry of its own, `WHOLE_ROW`.

        Parameters
        ----------
        types
            The table's Arrow types.
        secrets
            A folder; nothing is read from it.
        card
            The job's own card, if it is released.
        """
