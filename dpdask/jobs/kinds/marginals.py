"""Noisy tables as a job: chosen marginals with their margins of error, one row a cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import BeforeValidator

from dpdask.cells import DEFAULT_BINS, Cells
from dpdask.documents import Document
from dpdask.engine import tabulate
from dpdask.engine.compute import Progress
from dpdask.engine.randomise import Staged, recorded, stage
from dpdask.errors import SpecError
from dpdask.io.fragments import InputTable
from dpdask.io.storage import Folder
from dpdask.jobs.kinds import central
from dpdask.jobs.kinds.kind import Expected, Fitted, Terms
from dpdask.mechanisms.marginals.card import marginals_card
from dpdask.mechanisms.marginals.noise import MarginalNoise, NoisyMarginals, plan_noise
from dpdask.privacy.events import Composed
from dpdask.references.bins import Bins
from dpdask.stats import Clique

_TABLE = "table"
_COUNT = "count"
_MARGIN = "margin_95"


def _as_cliques(value: object) -> object:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(clique, list | tuple) and clique for clique in value):
        raise ValueError("a list of tables is expected, each a list of columns, such as [[age], [age, income]]")
    if any(type(name) is not str for clique in value for name in clique):
        raise ValueError("a table is a list of columns' names")
    return tuple(tuple(clique) for clique in value)


def _as_weights(value: object) -> object:
    if not isinstance(value, list | tuple) or any(type(weight) not in (int, float) or not 0 < weight < float("inf") for weight in value):
        raise ValueError("a list of positive weights is expected, one for each table")
    return tuple(float(weight) for weight in value)


class NoisyTables(Document):
    """Noisy contingency tables.

    Attributes
    ----------
    cliques
        The tables, each a list of columns.
    weights
        Each table's share of the budget, relative to the others; equal if not given.
    bins
        How continuous and mixed columns are cut: a number of cells of one width, or for each column such a number or the
        first value of each cell.
    """

    kind: Literal["marginals"]
    cliques: Annotated[tuple[tuple[str, ...], ...], BeforeValidator(_as_cliques)]
    weights: Annotated[tuple[float, ...], BeforeValidator(_as_weights)] | None = None
    bins: Bins = DEFAULT_BINS


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginalsKind(central.NoisyCounts):
    """A marginals job's `Kind`; made by `of`.

    Attributes
    ----------
    spec
        The mechanism as the job writes it.
    """

    spec: NoisyTables

    @classmethod
    def of(cls, spec: NoisyTables, terms: Terms) -> MarginalsKind:
        """Return the kind of a marginals job.

        Raises
        ------
        SpecError
            If a table names an unknown column, or one twice, or stands twice; if the weights are not one for each; if a
            column is to be kept, or has the name of one of the output's own.
        """
        central.check_schema(terms.schema, "a cell of a table is nobody's")
        seen: set[frozenset[str]] = set()
        for clique in spec.cliques:
            for name in clique:
                if name not in terms.schema.privatised:
                    raise SpecError("is not a privatised column", f"mechanism.cliques, {name!r}", "correct its name, or its role in the schema")
                if name in (_TABLE, _COUNT, _MARGIN):
                    raise SpecError("the released tables have a column of that name themselves", f"column {name!r}", "rename it")
            if len(set(clique)) < len(clique) or frozenset(clique) in seen:
                raise SpecError("a column, or a table, stands twice", f"mechanism.cliques, {' x '.join(clique)}", "remove one of the two")
            seen.add(frozenset(clique))
        if spec.weights is not None and len(spec.weights) != len(spec.cliques):
            raise SpecError("there must be one weight for each table", "mechanism.weights", f"give {len(spec.cliques)}")
        return cls(spec=spec, terms=terms)

    @property
    def noise(self) -> MarginalNoise:
        """The noise of every table; it depends on no data."""
        weights = self.spec.weights or (1.0,) * len(self.spec.cliques)
        chosen = dict(zip(self.spec.cliques, weights, strict=True))
        return plan_noise(self.terms.budget, len(self.terms.schema.privatised), one_way=0.0, pairs=0.0, cliques=chosen)

    @property
    def event(self) -> Composed:
        """One noisy table of each clique."""
        return self.noise.event

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        return f"{len(self.spec.cliques)} tables with noise on every cell"

    @property
    def _tables(self) -> tabulate.Tables:
        return tabulate.Tables(cliques=self.spec.cliques, two_way=False)

    def check(self, types: pa.Schema, secrets: Folder) -> None:
        """Check a table's Arrow types, the bins and the tables' sizes; nothing is read or written.

        Raises
        ------
        DataError, SpecError
            If they do not fit.
        """
        central.check_counts(central.work_on(types, self.terms, self.spec.bins, secrets), self._tables)

    def expect(self, table: InputTable, rows_per_shard: int) -> Expected:
        """Return what a run on a table would do; no row is read."""
        n = len(self.spec.cliques)
        stages = (
            *central.unit_stage(self.terms),
            f"tabulate: read {len(self.terms.schema.privatised)} columns once; count {n} tables, merged in a tree",
            "fit: noise on every cell, on the driver, written once",
            "write: the noisy tables, one row a cell",
        )
        return Expected(stages=stages, n_rows=None, n_shards=None, warnings=central.warnings(self.terms, self.public_rows(table)))

    def fit(self, table: InputTable, secrets: Folder, charge: Callable[[], None], progress: Progress | None, *, insecure: bool) -> Fitted:
        """Count, charge, draw the noise and write it beside the run key.

        Raises
        ------
        DataError
            If a value violates the schema.
        BudgetError
            From `charge`.

        Privacy
        -------
        Exact counts reach the driver and go no further.
        """
        work = central.work_on(table.schema, self.terms, self.spec.bins, secrets)
        found = self.measured(table, work, self._tables, self.noise, secrets, charge, progress, insecure=insecure)
        n_cells = sum(cells.size for cells in found.noisy.cliques.values())
        return Fitted(release_sha256=found.sha256, n_released=(n_cells,), changed=found.changed)

    def write(
        self, table: InputTable, fitted: Fitted, secrets: Folder, publish: Folder, actions: Folder, rows_per_shard: int, progress: Progress | None
    ) -> Staged:
        """Stage the tables as shards; doing it twice changes nothing.

        Raises
        ------
        InputError
            If the noisy tables are not those that were written.
        """
        names = tuple(f"part-{number:05d}.parquet" for number in range(-(-fitted.n_released[0] // rows_per_shard)))
        staged = recorded(names[0], publish, actions)
        if staged is not None:
            return staged
        noisy = central.load_noisy(secrets, fitted.release_sha256)
        cells = central.work_on(table.schema, self.terms, self.spec.bins, secrets).cells
        schema = released_schema(self.spec.cliques)
        batches = (cell_rows(noisy, clique, cells, schema) for clique in noisy.cliques)
        few_valued = [name for name in schema.names if name != _COUNT]
        return stage(batches, schema, few_valued, names, rows_per_shard, publish, actions)

    def card(self, table: InputTable, fitted: Fitted, secrets: Folder, *, insecure: bool) -> bytes:
        """Return the release card: the same release, the same bytes."""
        return marginals_card(
            name=self.terms.name,
            budget=self.terms.budget,
            guarantee=self.guarantee,
            noisy=central.load_noisy(secrets, fitted.release_sha256),
            schema=self.terms.schema,
            cells=central.work_on(table.schema, self.terms, self.spec.bins, secrets).cells,
            insecure=insecure,
        )


def released_schema(cliques: tuple[Clique, ...]) -> pa.Schema:
    """Return the columns of released tables: `table`, one text for each attribute of any table, `count`, `margin_95`."""
    attributes = dict.fromkeys(name for clique in cliques for name in clique)
    fields = [(_TABLE, pa.string()), *((name, pa.string()) for name in attributes), (_COUNT, pa.int64()), (_MARGIN, pa.float64())]
    return pa.schema(fields)


def cell_rows(noisy: NoisyMarginals, clique: Clique, cells: Mapping[str, Cells], schema: pa.Schema) -> pa.RecordBatch:
    """Return one noisy table as rows: for each cell its labels, its count (maybe negative) and its margin of error.

    An attribute that is not of the table is null; the level null is the text `null`.
    """
    table = noisy.cliques[clique]
    places = np.indices(table.shape).reshape(len(clique), -1)
    columns = {_TABLE: pa.array([" x ".join(clique)] * table.size), _COUNT: pa.array(table.ravel())}
    columns[_MARGIN] = pa.array([noisy.margin(clique)] * table.size)
    columns |= {name: pa.array(cells[name].labels()).take(pa.array(places[axis])) for axis, name in enumerate(clique)}
    return pa.RecordBatch.from_arrays([columns.get(name, pa.nulls(table.size, pa.string())) for name in schema.names], schema=schema)
