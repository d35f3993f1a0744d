"""The search for levels as a mechanism of its own, whose release is the list."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, Literal

import pyarrow as pa

from dpdask.arrays import freeze_class
from dpdask.domains import MAX_LEVELS
from dpdask.errors import SpecError, list_names, say_count
from dpdask.mechanisms.card import Card, Guidance, Section, no_margin, noisy_counts_section
from dpdask.mechanisms.levels import (
    FoundLevels,
    LevelSearch,
    check_delta,
    find_types,
    plan_selection,
    tell_threshold,
)
from dpdask.mechanisms.marginals.noise import account_for
from dpdask.mechanisms.mechanism import (
    Columns,
    NoisyCounts,
    NoisyCountsDescription,
    Sentences,
    Spec,
)
from dpdask.privacy.events import Composed, KeySelection
from dpdask.privacy.noise import weigh_keys
from dpdask.schema import Column, Schema
from dpdask.stats.keys import ColumnKeys, KeyStatistic
from dpdask.streams import Noise, RunKey

_FEW_LEVELS = 20  # that there can be: fewer are worth a warning


class DiscoverSpec(Spec):
    """The values of the columns with `levels: discover` that enough units have, and the noisy number of these units, or what they weigh."""

    kind: Literal["discover"] = "discover"

    def narrow(self, schema: Schema) -> Schema:
        """Return the schema without the other columns, of which nothing is read."""
        if not schema.discovered:
            what = "no column of the schema has levels that are yet to be found"
            raise SpecError(what, "schema", "declare `levels: discover` where they are unknown")
        columns = {
            name: column if column.discovers else Column(role="drop", type=column.type)
            for name, column in schema.columns.items()
        }
        return schema.model_copy(update={"columns": columns, "rules": ()})


@freeze_class
class DiscoverMechanism(NoisyCounts):
    """The search for levels of a schema under a budget.

    Privacy
    -------
    Unit: a row, or all rows that share a column's value, of which at most `max_rows` values are
    counted in each column. Events: a `KeySelection` of each column. Protected: every row counted.
    """

    spec: DiscoverSpec
    nobody: ClassVar = "levels"
    finds_levels: ClassVar = True
    bounds_rows: ClassVar = False
    release_type: ClassVar = FoundLevels

    def check_spec(self) -> None:
        """Check that there is a δ: no key can be listed without."""
        check_delta(self.budget)

    @property
    def selection(self) -> KeySelection:
        """The selection of each column."""
        return plan_selection(self.budget, len(self.schema.privatised))

    @property
    def event(self) -> Composed:
        """A selection of keys for each column."""
        return Composed(events=(self.selection,) * len(self.schema.privatised))

    @property
    def also_read(self) -> tuple[str, ...]:
        """The unit's column."""
        unit = self.budget.unit_column
        return () if unit is None else (unit.column,)

    @property
    def levels(self) -> LevelSearch:
        """What is counted and drawn."""
        events = dict.fromkeys(self.schema.privatised, self.selection)
        return LevelSearch(schema=self.schema, budget=self.budget, events=events)

    def check(self, columns: Columns) -> None:
        """Check that the columns hold texts, whole numbers or dates."""
        self.levels.check(columns)

    def statistic(self, columns: Columns) -> KeyStatistic:
        """Return what is counted: the units of each value."""
        return self.levels.statistic(columns)

    def draw(self, counts: ColumnKeys, columns: Columns, noise: Noise) -> FoundLevels:
        """Draw the noise of every value that occurs, and return those that are listed; see `Mechanism.draw`."""
        return self.levels.draw(counts, columns, noise)

    def read_drawn(self, data: bytes, columns: Columns) -> FoundLevels:
        """Return the levels that an earlier driver kept; see `Mechanism.read_drawn`."""
        return self.levels.read_drawn(data, columns)

    def find_written(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written."""
        return find_types(self.selection)

    def fit(self, counts: FoundLevels, columns: Columns, key: RunKey) -> FoundLevels:
        """Return the levels as they were drawn."""
        return counts

    def n_records(self, release: FoundLevels) -> int:
        """Return how many levels were found."""
        return release.n_drawn(None)

    @property
    def description(self) -> DiscoverDescription:
        """What is said of it."""
        return DiscoverDescription(self)


@freeze_class(kw_only=False)
class DiscoverDescription(NoisyCountsDescription):
    """What is said of levels that were found."""

    mechanism: DiscoverMechanism

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        return f"levels of {list_names(self.mechanism.schema.privatised, 5)} that enough units have"

    def stages(self, columns: Columns) -> Sentences:
        """Return what a run does, in words."""
        unit = self.mechanism.budget.unit_column
        whose = "the rows of" if unit is None else f"each {unit.label} of"
        bound = "" if unit is None else f", at most {unit.max_rows} values of each {unit.label}"
        return (
            f"tabulate: read {say_count(len(columns.codecs), 'column')} once; count {whose} each value{bound}, merged in a tree",
            "fit: add noise to each number on the driver, and list the values whose noisy number reaches the threshold",
            "write: the list of levels",
        )

    def expectations(self, columns: Columns) -> Sentences:
        """Return how many units a level needs."""
        return self.mechanism.levels.expectations

    def cautions(self, columns: Columns, n_rows: int | None) -> Sentences:
        """Return what a steward should think of before a search: δ, and levels that need a large part of the rows."""
        found = NoisyCountsDescription.cautions(self, columns, n_rows)
        least = math.ceil(tell_threshold(self.mechanism.selection))
        if not n_rows or n_rows >= _FEW_LEVELS * least:
            return found
        few = f"A level needs about {least:,} of the {n_rows:,} rows, so hardly more than {n_rows // least} levels of a column can be found: use a larger ε or δ, or add-remove."
        return (*found, few)

    def n_expected(self, n_rows: int | None) -> int | None:
        """Return that it is not known before; see `Description.n_expected`."""
        return None

    def quality(self, release: FoundLevels) -> str:
        """Return how many levels were found."""
        parts = (
            f"{say_count(len(found), 'level')} of {name}" for name, found in release.levels.items()
        )
        return f"found: {', '.join(parts)}"

    def section(
        self, release: FoundLevels, columns: Columns, *, n_rows: int | None, **_: Any
    ) -> Section:
        """Return the list's part of the release card.

        Privacy
        -------
        Holds parameters, and the levels and numbers that were drawn. The number of rows is exact
        under replace-one; under add-remove it is not told.
        """
        budget, events = self.mechanism.budget, release.events
        named = {name: event.noise for name, event in events.items()}
        accounting = account_for(self.mechanism.event, named, budget, "lists of levels")
        numbers, unit, selection = "of rows", budget.unit_column, self.mechanism.selection
        if unit is not None:
            numbers = f"of {unit.column}s"
        if unit is not None and selection.weight is not None:
            largest = weigh_keys(selection, 1)[1] / selection.weight
            numbers += f", where one with {unit.max_rows} values counts 1 for each, and one with fewer values counts more, up to {largest:.4g} for a single value"
            for name, each in accounting["noise"].items():
                accounting["noise"][name] = {k: v / selection.weight for k, v in each.items()}
        section = noisy_counts_section(
            budget=budget,
            mechanism={
                "kind": "discover",
                "levels": {name: len(found) for name, found in release.levels.items()},
                "numbers": numbers,
            },
            schema=release.schema,
            cells={},
            accounting=accounting,
            n_rows=None if self.mechanism.n_rows_private else n_rows,
        )
        parts = {
            name: {
                "role": "privatised",
                "kind": release.schema.columns[name].kind,
                "outside": release.schema.columns[name].outside_in_words,
                "nulls": release.schema.columns[name].nulls,
                "found": release.levels[name][:MAX_LEVELS],
                "threshold": tell_threshold(event),
                "delta": event.delta,
            }
            for name, event in events.items()
        }
        return replace(section, columns=parts)


def _uses(card: Card) -> tuple[list[str], list[str]]:
    del card
    return [
        "The domain of a column in the schema of later jobs, which pay nothing for it.",
        "The noisy numbers, each with its margin of error: the card's `mechanism.numbers` says of what.",
    ], [
        "Values that few units have, which are not in the list; that a value is missing does not tell that nobody has it.",
        "Numbers just above the threshold, which are too high on average: a level is listed because its noise was high.",
    ]


GUIDANCE = Guidance(
    title="Levels that were found, with noisy numbers",
    shape=lambda _: "other",
    uses=_uses,
    questions=lambda _: [],
    margins=lambda _: "Margins hold the noise of each number, with probability 95 %.",
    margin=lambda *_: no_margin,
    attenuates=lambda _: False,
    counts=lambda name: f"of the units that have a level of {name}",
    glossary={},
)
