"""The levels of columns that nobody can list, found under privacy: the values that enough units have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Archived, Contents, Named
from dpdask.arrays import Ints
from dpdask.codec import LevelCodec, is_text
from dpdask.conditions import Level
from dpdask.errors import InputError, SpecError, list_names, say_count
from dpdask.mechanisms.card import Card, Guidance, Section, no_margin, noisy_counts_section
from dpdask.mechanisms.marginals.noise import account_for
from dpdask.mechanisms.mechanism import (
    Columns,
    NoisyCounts,
    NoisyCountsDescription,
    Sentences,
    Spec,
)
from dpdask.privacy import Budget
from dpdask.privacy.events import (
    CentralEvent,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    KeySelection,
    from_dict,
    round_down,
    scale_events,
    to_dict,
)
from dpdask.privacy.noise import find_threshold, margin_95, select_keys
from dpdask.schema import MAX_LEVELS, Column, Schema
from dpdask.stats.keys import ColumnKeys, KeyStatistic
from dpdask.streams import Noise, RunKey

COLUMN, LEVEL, UNITS = "column", "level", "units"
_FEW_LEVELS = 20  # that there can be: fewer are worth a warning
TYPES = pa.schema([(COLUMN, pa.string()), (LEVEL, pa.string()), (UNITS, pa.int64())])


class DiscoverSpec(Spec):
    """The values of the columns with `levels: discover` that enough units have, and the noisy number of these units."""

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundLevels(Archived):
    """The levels that were found, the commonest first, with the noisy number of units that have each."""

    archive: ClassVar = Archive(kind="discover", format=1, noun="list of levels")

    schema: Schema
    events: Mapping[str, KeySelection]
    levels: Mapping[str, list[Level]]
    units: Mapping[str, Ints]

    types: ClassVar = TYPES
    few_valued: ClassVar = [COLUMN]

    def n_drawn(self, wanted: int | None) -> int:
        """Return how many levels were found; see `RecordRelease.n_drawn`."""
        if wanted is not None:
            hint = "leave it out to get every level"
            raise SpecError("a list of levels is no sample", "n_rows", hint)
        return sum(map(len, self.levels.values()))

    def condition(self, where: str) -> Any:
        """Refuse: no records are drawn."""
        raise SpecError("a list of levels is no sample", "where", "leave it out")

    def batches(
        self, start: int, n_rows: int, n_total: int, key: RunKey, part: str, *where: Any
    ) -> Iterator[pa.RecordBatch]:
        """Yield the levels as rows; see `RecordRelease.batches`."""
        del n_total, key, part, where
        listed = [(name, str(level)) for name, found in self.levels.items() for level in found]
        arrays = [pa.array(each, pa.string()) for each in zip(*listed, strict=True)]
        units = np.concatenate([*self.units.values(), np.zeros(0, dtype=np.int64)])
        if listed:
            batch = pa.RecordBatch.from_arrays([*arrays, pa.array(units)], schema=TYPES)
            yield batch.slice(start, n_rows)

    def _contents(self) -> Contents:
        header = {
            "schema": self.schema.model_dump(exclude_none=True),
            "events": {name: to_dict(event) for name, event in self.events.items()},
            "levels": dict(self.levels),
        }
        return header, dict(self.units)

    @classmethod
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        levels, events = header["levels"], header["events"]
        units = {name: np.asarray(arrays[name]) for name in levels}
        if any(
            each.dtype != np.int64 or each.shape != (len(levels[name]),)
            for name, each in units.items()
        ):
            raise ValueError("the numbers of units are not those of the levels")
        return cls(
            schema=Schema.from_dict(header["schema"]),
            events={name: _read_event(events[name]) for name in levels},
            levels=levels,
            units=units,
        )


def _read_event(data: Named) -> KeySelection:
    event = from_dict(data)
    if not isinstance(event, KeySelection):
        raise ValueError("the event is no selection of keys")  # noqa: TRY004 - what an archive expects
    return event


@lru_cache(maxsize=16)
def plan_selection(budget: Budget, n_columns: int) -> KeySelection:
    """Return the selection of each of some columns that together spend a budget, with the least threshold.

    Notes
    -----
    Laplace noise of a pure ε leaves all of δ for keys of one unit, which is best for one column of
    rows. Otherwise half of δ goes to the composition; Gaussian noise is best where a unit has many
    keys.
    """
    adjacency, keys = budget.adjacency, budget.rows_per_unit
    replaced = adjacency == "replace-one"
    # the keys that a unit loses and those that it gains are two vectors, each with noise of its own
    laplace = DiscreteLaplace(
        scale=1.0, sensitivity=keys, adjacency=adjacency, count=2 if replaced else 1
    )
    drafts: list[tuple[CentralEvent, float]] = [(laplace, 1.0)]
    if n_columns > 1 or keys > 1:
        moved = math.sqrt(2 * keys if replaced else keys)
        gaussian = DiscreteGaussian(sigma=1.0, sensitivity=moved, adjacency=adjacency)
        drafts += [(laplace, 0.5), (gaussian, 0.5)]
    found = []
    for draft, share in drafts:
        lost = round_down(Fraction(budget.delta) * Fraction(share) / n_columns)
        left = round_down(Fraction(budget.delta) - n_columns * Fraction(lost))
        together = replace(draft, count=draft.count * n_columns)
        [scaled] = scale_events([together], budget.epsilon, left if share < 1 else 0.0)
        noise = replace(scaled, count=draft.count)
        found.append(KeySelection(noise=noise, keys=keys, delta=lost))
    return min(found, key=find_threshold)


@dataclass(frozen=True, slots=True, kw_only=True)
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
        if not self.budget.delta:
            what = "a level that is found may be that of one unit alone, with a probability of δ"
            raise SpecError(what, "`delta`", "set it above 0, to 1e-6 for instance")

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

    def check(self, columns: Columns) -> None:
        """Check that the columns hold texts, whole numbers or dates."""
        for name, codec in columns.codecs.items():
            type_ = codec.type
            if not (is_text(type_) or pa.types.is_integer(type_) or pa.types.is_date(type_)):
                what = f"levels of the type {type_} cannot be found"
                raise SpecError(what, f"column {name!r}", "list them, or declare bounds")

    def statistic(self, columns: Columns) -> KeyStatistic:
        """Return what is counted: the units of each value."""
        codecs = {
            name: codec for name, codec in columns.codecs.items() if isinstance(codec, LevelCodec)
        }
        unit = self.budget.unit_column
        return KeyStatistic(
            codecs=codecs,
            unit=None if unit is None else unit.column,
            most=self.budget.rows_per_unit,
        )

    def draw(self, counts: ColumnKeys, columns: Columns, noise: Noise) -> FoundLevels:
        """Draw the noise of every value that occurs, and return those that are listed; see `Mechanism.draw`."""
        del columns
        levels, units = {}, {}
        for name, keys in counts.columns.items():
            tally = keys.tally()
            rng = noise(f"discover/{name}")
            places, noisy = select_keys(tally.counts, self.selection, rng=rng)
            order = np.argsort(-noisy, kind="stable")
            listed = tally.keys.take(pa.array(places[order])).to_pylist()
            # which replaces the others whether it is found or not
            kept = np.array([level != self.schema.columns[name].other for level in listed], bool)
            levels[name] = [level for level, is_kept in zip(listed, kept, strict=True) if is_kept]
            units[name] = noisy[order][kept]
        events = dict.fromkeys(levels, self.selection)
        return FoundLevels(schema=self.schema, events=events, levels=levels, units=units)

    def read_drawn(self, data: bytes, columns: Columns) -> FoundLevels:
        """Return the levels that an earlier driver kept; see `Mechanism.read_drawn`."""
        found = FoundLevels.from_bytes(data, "the run's list of levels")
        if dict(found.events) != dict.fromkeys(columns.codecs, self.selection):
            raise InputError("this is the list of another run", "levels", "`dpdask abort` the run")
        return found

    def find_written(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written: the column, its level, and the noisy number of units."""
        del released
        return TYPES

    def fit(self, counts: FoundLevels, columns: Columns, key: RunKey) -> FoundLevels:
        """Return the levels as they were drawn."""
        del columns, key
        return counts

    def n_records(self, release: FoundLevels) -> int:
        """Return how many levels were found."""
        return release.n_drawn(None)

    @property
    def description(self) -> DiscoverDescription:
        """What is said of it."""
        return DiscoverDescription(self)


@dataclass(frozen=True, slots=True)
class DiscoverDescription(NoisyCountsDescription):
    """What is said of levels that were found."""

    mechanism: DiscoverMechanism

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        return f"levels of {list_names(self.mechanism.schema.privatised, 5)} that enough units have"

    def stages(self, columns: Columns, *, uncounted: bool) -> Sentences:
        """Return what a run does, in words."""
        del uncounted
        unit = self.mechanism.budget.unit_column
        whose = "the rows of" if unit is None else f"each {unit.column} of"
        bound = "" if unit is None else f", at most {unit.max_rows} values of each {unit.column}"
        return (
            f"tabulate: read {say_count(len(columns.codecs), 'column')} once; count {whose} each value{bound}, merged in a tree",
            "fit: add noise to each number on the driver, and list the values whose noisy number reaches the threshold",
            "write: the list of levels",
        )

    def expectations(self, columns: Columns) -> Sentences:
        """Return how many units a level needs."""
        del columns
        selection, unit = self.mechanism.selection, self.mechanism.budget.unit_column
        least, off = find_threshold(selection), margin_95(selection.noise)
        who = "rows" if unit is None else f"values of {unit.column}"
        return (
            f"a level that {least + math.ceil(off):,} {who} or more have is found with probability 0.95; one that a single one has, with at most {selection.delta:.3g}",
            f"a number of units is off by at most {off:,.3g} with probability 0.95; those of levels that were only just found are too high",
        )

    def cautions(self, columns: Columns, n_rows: int | None) -> Sentences:
        """Return what a steward should think of before a search: δ, and levels that need a large part of the rows."""
        found = NoisyCountsDescription.cautions(self, columns, n_rows)
        least = find_threshold(self.mechanism.selection)
        if not n_rows or n_rows >= _FEW_LEVELS * least:
            return found
        few = f"A level needs about {least:,} of the {n_rows:,} rows, so hardly more than {n_rows // least} levels of a column can be found: use a larger ε or δ, or add-remove."
        return (*found, few)

    def n_expected(self, n_rows: int | None) -> int | None:
        """Return that it is not known before; see `Description.n_expected`."""
        del n_rows
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
        section = noisy_counts_section(
            budget=budget,
            mechanism={
                "kind": "discover",
                "levels": {name: len(found) for name, found in release.levels.items()},
            },
            schema=release.schema,
            cells={},
            accounting=account_for(self.mechanism.event, named, budget, "lists of levels"),
            n_rows=None if self.mechanism.n_rows_private else n_rows,
        )
        parts = {
            name: {
                "role": "privatised",
                "kind": release.schema.columns[name].kind,
                "outside": release.schema.columns[name].outside_in_words,
                "nulls": release.schema.columns[name].nulls,
                "found": release.levels[name][:MAX_LEVELS],
                "threshold": find_threshold(event),
                "delta": event.delta,
            }
            for name, event in events.items()
        }
        return replace(section, columns=parts)


def _uses(card: Card) -> tuple[list[str], list[str]]:
    del card
    return [
        "The domain of a column in the schema of later jobs, which pay nothing for it.",
        "The numbers of units, each with its margin of error.",
    ], [
        "Values that few units have, which are not in the list; that a value is missing does not tell that nobody has it.",
        "Numbers just above the threshold, which are too high on average: a level is listed because its noise was high.",
    ]


GUIDANCE = Guidance(
    title="Levels that were found, with noisy numbers of units",
    shape=lambda _: "other",
    uses=_uses,
    questions=lambda _: [],
    margins=lambda _: "Margins hold the noise of each number, with probability 95 %.",
    margin=lambda *_: no_margin,
    attenuates=lambda _: False,
    counts=lambda name: f"of the units that have a level of {name}",
    glossary={},
)
