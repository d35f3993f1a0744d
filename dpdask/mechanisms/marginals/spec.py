"""Noisy tables as a mechanism: what a user may ask for, and its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pyarrow as pa
from pydantic import BeforeValidator

from dpdask.documents import suggest
from dpdask.errors import SpecError
from dpdask.mechanisms.card import Section
from dpdask.mechanisms.marginals.card import marginals_section
from dpdask.mechanisms.marginals.noise import NoisyMarginals
from dpdask.mechanisms.marginals.plan import MarginalNoise, plan_noise
from dpdask.mechanisms.marginals.release import COUNT, MARGIN, TABLE, MarginalTables, make_types
from dpdask.mechanisms.marginals.tables import NoisyTables
from dpdask.mechanisms.mechanism import Columns, Spec
from dpdask.privacy.order import RowOrder
from dpdask.references.bins import Bins
from dpdask.streams import RunKey


def _as_cliques(value: object) -> object:
    if not isinstance(value, list | tuple) or not value or not all(isinstance(clique, list | tuple) and clique for clique in value):
        raise ValueError("a list of tables is expected, each a list of columns, such as [[age], [age, income]]")
    if any(type(name) is not str for clique in value for name in clique):
        raise ValueError("a table is a list of columns' names")
    return tuple(tuple(clique) for clique in value)


def _as_weights(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise ValueError("a list of positive weights is expected, one for each table")  # noqa: TRY004 - pydantic reports no TypeError
    for weight in value:
        if type(weight) not in (int, float) or not 0 < weight < float("inf"):
            raise ValueError(f"a weight is a positive number, not {weight!r}")
    return tuple(float(weight) for weight in value)


class MarginalsSpec(Spec):
    """Noisy contingency tables.

    Attributes
    ----------
    cliques
        The tables, each a list of columns.
    weights
        Each table's share of the budget, relative to the others; equal if not given.
    bins
        How continuous and mixed columns are cut. `adaptive`: into about 20 cells of equal counts that are found under privacy, in a pass of
        their own. A number: into that many cells of equal width. A mapping: for each column one of these, or a list of the first value of each cell.
    """

    kind: Literal["marginals"] = "marginals"
    cliques: Annotated[tuple[tuple[str, ...], ...], BeforeValidator(_as_cliques)]
    weights: Annotated[tuple[float, ...], BeforeValidator(_as_weights)] | None = None
    bins: Bins = "adaptive"


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginalsMechanism(NoisyTables):
    """The noisy tables of a schema under a budget.

    Privacy
    -------
    Unit, sensitivity and events: `MarginalNoise`. Protected: every row counted. Everything after the noise is post-processing.
    """

    spec: MarginalsSpec

    nobody: ClassVar[str] = "the cells of a table"
    release_type: ClassVar[type[MarginalTables]] = MarginalTables

    def check_spec(self) -> None:
        """Check the parameters of the tables.

        Raises
        ------
        SpecError
            If a table names an unknown column, or one twice, or appears twice; if the weights are not one for each; if a
            column has the name of one of the output's own.
        """
        cliques, weights = self.spec.cliques, self.spec.weights
        seen: set[frozenset[str]] = set()
        for clique in cliques:
            for name in clique:
                if name not in self.schema.privatised:
                    hint = suggest(name, self.schema.privatised, "correct its name, or its role in the schema")
                    raise SpecError("is not a privatised column", f"`cliques`, {name!r}", hint)
                if name in (TABLE, COUNT, MARGIN):
                    raise SpecError("this name is reserved for a column of the released tables", f"column {name!r}", "rename it")
            if len(set(clique)) < len(clique) or frozenset(clique) in seen:
                raise SpecError("a column or a table is repeated", f"`cliques`, {' x '.join(clique)}", "remove one of the two")
            seen.add(frozenset(clique))
        if weights is not None and len(weights) != len(cliques):
            what = f"there must be one weight for each table, not {len(weights)} for {len(cliques)}"
            raise SpecError(what, "`weights`", f"give {len(cliques)}")

    @property
    def noise(self) -> MarginalNoise:
        """The noise of every table; it depends on no data."""
        weights = self.spec.weights or (1.0,) * len(self.spec.cliques)
        chosen = dict(zip(self.spec.cliques, weights, strict=True))
        return plan_noise(self.budget, len(self.schema.privatised), one_way=0.0, pairs=0.0, cliques=chosen, n_found=len(self.adaptive))

    @property
    def bins(self) -> Bins:
        """How continuous and mixed columns are cut."""
        return self.spec.bins

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        return f"{len(self.spec.cliques)} tables with noise on every cell"

    def check(self, columns: Columns) -> None:
        """Check the bins and the tables' sizes.

        Raises
        ------
        SpecError
            If they do not fit.
        """
        self.statistic(columns).check_size()

    @property
    def counted(self) -> dict[str, Any]:
        """The tables."""
        return {"cliques": self.spec.cliques, "two_way": False}

    def find_written(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written: those of the tables, whatever the types of the table's own."""
        del released
        return make_types(self.spec.cliques)

    def fit(self, counts: NoisyMarginals, columns: Columns, key: RunKey) -> MarginalTables:
        """Return the noisy tables with the columns that their cells stand for; see `Mechanism.fit`."""
        del key
        bins = self.bins_of(columns)
        return MarginalTables(schema=self.schema, columns=columns.types, bins=bins, noisy=counts)

    def n_records(self, release: MarginalTables) -> int:
        """Return how many rows a job writes: one for each cell."""
        return release.n_cells

    def stages(self, columns: Columns, *, uncounted: bool) -> tuple[str, ...]:
        """Return what a run does, in words; see `Mechanism.stages`."""
        del columns, uncounted
        return (
            *self.search_stages,
            f"tabulate: read {len(self.schema.privatised)} columns once; count {len(self.spec.cliques)} tables, merged in a tree",
            "fit: add noise to every cell on the driver, and write the tables once",
            "write: the noisy tables, one row a cell",
        )

    def describe_quality(self, release: MarginalTables) -> str:
        """Return which part of the counts exceeds its margin of error; see `Mechanism.describe_quality`."""
        tables = release.noisy.cliques
        above = sum(int((counts > release.noisy.margin(clique)).sum()) for clique, counts in tables.items())
        return f"{above:,} of {release.n_cells:,} counts are larger than what noise alone gives with probability 0.95"

    def section(self, release: MarginalTables, columns: Columns, *, n_rows: int | None, n_released: int | None, order: RowOrder) -> Section:
        """Return the tables' part of the release card; see `Mechanism.section`."""
        del columns, n_rows, n_released, order
        return marginals_section(self.budget, release)
