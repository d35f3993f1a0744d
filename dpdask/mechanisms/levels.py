"""Levels that nobody can list, found under privacy: the values that enough units have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Archived, Contents, Named, check_array
from dpdask.arrays import Ints, freeze_class
from dpdask.codec import LevelCodec, is_bytes, is_text
from dpdask.conditions import Level
from dpdask.domains import MAX_LEVELS
from dpdask.errors import InputError, SpecError, list_names
from dpdask.mechanisms.card import Section
from dpdask.mechanisms.mechanism import Columns
from dpdask.privacy import Budget
from dpdask.privacy.events import (
    CentralEvent,
    DiscreteGaussian,
    DiscreteLaplace,
    KeySelection,
    from_dict,
    round_down,
    scale_events,
    to_dict,
)
from dpdask.privacy.noise import find_threshold, margin_95, select_keys, weigh_keys
from dpdask.schema import Provenance, Schema
from dpdask.stats.keys import ColumnKeys, KeyStatistic
from dpdask.streams import Noise, RunKey

COLUMN, LEVEL = "column", "level"
_NAMES = [(COLUMN, pa.string()), (LEVEL, pa.string())]
_WEIGHT = 2**10
_MOST_LAPLACE = 32  # values of a unit: of more, Gaussian noise has the least threshold


def find_types(selection: KeySelection | None) -> pa.Schema:
    """Return the columns of a list: the column, its level, and the noisy number of units, or what they weigh relative to one with as many values as are allowed."""
    if selection is None or selection.weight is None:
        return pa.schema([*_NAMES, ("units", pa.int64())])
    return pa.schema([*_NAMES, ("weight", pa.float64())])


@freeze_class(eq=False)
class FoundLevels(Archived):
    """The levels that were found, the commonest first, with the noisy number of units that have each, or what these weigh."""

    archive: ClassVar = Archive(kind="discover", format=2, noun="list of levels")

    schema: Schema
    events: Mapping[str, KeySelection]
    levels: Mapping[str, list[Level]]
    units: Mapping[str, Ints]  # as they were drawn
    insecure: bool = False  # whether the noise came from a seed

    few_valued: ClassVar = [COLUMN]

    @property
    def types(self) -> pa.Schema:
        """The columns of the list."""
        return find_types(next(iter(self.events.values()), None))

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
        listed = [(name, str(level)) for name, found in self.levels.items() for level in found]
        arrays = [pa.array(each, pa.string()) for each in zip(*listed, strict=True)]
        if listed:
            units = np.concatenate(list(self.units.values()))
            weight = next(iter(self.events.values())).weight
            arrays.append(pa.array(units if weight is None else units / weight))
            yield pa.RecordBatch.from_arrays(arrays, schema=self.types).slice(start, n_rows)

    def _contents(self) -> Contents:
        header = {
            "schema": self.schema.model_dump(exclude_none=True),
            "events": {name: to_dict(event) for name, event in self.events.items()},
            "levels": dict(self.levels),
            "insecure": self.insecure,
        }
        return header, dict(self.units)

    @classmethod
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        levels, events = header["levels"], header["events"]
        units = {name: np.asarray(arrays[name]) for name in levels}
        for name, each in units.items():
            check_array(each, np.int64, (len(levels[name]),), -np.inf, np.inf)
        return cls(
            schema=Schema.from_dict(header["schema"]),
            events={name: read_selection(events[name]) for name in levels},
            levels=levels,
            units=units,
            insecure=header["insecure"],
        )


def read_selection(data: Named) -> KeySelection:
    """Return the selection that a mapping from `to_dict` holds; ValueError if it holds another event."""
    event = from_dict(data)
    if not isinstance(event, KeySelection):
        raise ValueError("the event is no selection of keys")  # noqa: TRY004 - what an archive expects
    return event


def check_delta(budget: Budget) -> None:
    """Check that there is a δ: no key can be listed without."""
    if not budget.delta:
        what = "a level that is found may be that of one unit alone, with a probability of δ"
        raise SpecError(what, "`delta`", "set it above 0, to 1e-6 for instance")


def split_delta(budget: Budget, share: float, n_columns: int) -> tuple[float, float]:
    """Return δ₀ of each of some columns, which together take a share of δ, and what is left for the noise; both rounded down."""
    lost = round_down(Fraction(budget.delta) * Fraction(share) / n_columns)
    return lost, round_down(Fraction(budget.delta) - n_columns * Fraction(lost))


def find_weight(budget: Budget) -> int | None:
    """Return what a unit weighs in each of its values if it has as many as are allowed: all weights are nearly fractions of it; None if one is allowed."""
    return None if budget.rows_per_unit == 1 else _WEIGHT


def draft_numbers(budget: Budget) -> DiscreteGaussian:
    """Return Gaussian noise, with a σ of 1, of the weights of one column's values, each unit with at most as many values as rows."""
    keys, replaced = budget.rows_per_unit, budget.adjacency == "replace-one"
    squared = (2 * keys if replaced else keys) * (find_weight(budget) or 1) ** 2
    moved = math.sqrt(squared)
    if Fraction(moved) ** 2 < squared:
        moved = math.nextafter(moved, math.inf)
    return DiscreteGaussian(sigma=1.0, sensitivity=moved, adjacency=budget.adjacency)


@lru_cache(maxsize=16)
def plan_selection(budget: Budget, n_columns: int) -> KeySelection:
    """Return the selection of each of some columns that together spend a budget, with the least threshold.

    Notes
    -----
    Laplace noise of a pure ε leaves all of δ for keys of one unit, which is best for one column of
    rows. Otherwise half of δ goes to the composition; Gaussian noise is best where a unit has many
    keys.
    """
    adjacency, keys, weight = budget.adjacency, budget.rows_per_unit, find_weight(budget)
    # the keys that a unit loses and those that it gains are two vectors, each with noise of its own
    count = 2 if adjacency == "replace-one" else 1
    moved = keys * (weight or 1)
    laplace = DiscreteLaplace(scale=1.0, sensitivity=moved, adjacency=adjacency, count=count)
    drafts: list[tuple[CentralEvent, float]] = []
    if n_columns > 1 or keys > 1:
        drafts.append((draft_numbers(budget), 0.5))
    if keys <= _MOST_LAPLACE:
        drafts += [(laplace, 1.0)] + [(laplace, 0.5)] * len(drafts)
    found = []
    for draft, share in drafts:
        lost, left = split_delta(budget, share, n_columns)
        together = replace(draft, count=draft.count * n_columns)
        [scaled] = scale_events([together], budget.epsilon, left if share < 1 else 0.0)
        noise = replace(scaled, count=draft.count)
        found.append(KeySelection(noise=noise, keys=keys, delta=lost, weight=weight))
    return min(found, key=find_threshold)


def tell_threshold(selection: KeySelection) -> float:
    """Return the threshold in numbers of units, of which each has as many values as are allowed; an int where every unit weighs 1."""
    least = find_threshold(selection)
    return least if selection.weight is None else least / selection.weight


def tell_selections(section: Section, events: Mapping[str, KeySelection]) -> Section:
    """Return the section of a card with what its columns' levels were found by."""
    columns = dict(section.columns)
    for name, event in events.items():
        found = {"threshold": tell_threshold(event), "delta": event.delta}
        columns[name] = {**columns[name], **found}
    return replace(section, columns=columns)


@freeze_class
class LevelSearch:
    """How many units have each value of the columns whose levels are found, or what these weigh, and which values are listed.

    Privacy
    -------
    Unit, adjacency and sensitivity: those of the events. A unit is in the numbers of at most `keys`
    values of each column. Protected: every row counted. Which values become levels is
    post-processing of the list.
    """

    schema: Schema
    budget: Budget
    events: Mapping[str, KeySelection]  # of each column
    # Returns how many levels each column may have, that which replaces the others included.
    count_most: Callable[[Columns], int] = lambda _: MAX_LEVELS

    @property
    def unit(self) -> str | None:
        """The column that names the unit; None: it is the row."""
        return None if self.budget.unit_column is None else self.budget.unit_column.column

    @property
    def stage(self) -> str:
        """What the round does, in words."""
        names, unit = list_names(tuple(self.events), 5), self.budget.unit_column
        whose = "rows" if unit is None else f"{unit.label}s"
        bound = "" if unit is None else f", at most {unit.max_rows} values of each {unit.label},"
        return f"levels: read all privatised columns once; count the {whose} of each value of {names}{bound or ','} add noise, and list the values whose noisy number reaches a threshold"

    @property
    def expectations(self) -> tuple[str, ...]:
        """How many units a level needs, in sentences."""
        selection = next(iter(self.events.values()))
        off = margin_95(selection.noise) / (selection.weight or 1)
        least = math.ceil(tell_threshold(selection) + off)
        unit = self.budget.unit_column
        who = "rows" if unit is None else f"values of {unit.column}"
        number, fewer = f"number of {'rows' if unit is None else 'units'}", ""
        if unit is not None and selection.weight is not None:
            number = "noisy number"
            fewer = f"; for a level of {unit.column}s with fewer than {unit.max_rows} values each, fewer are enough, since each counts more"
        return (
            f"a level that {least:,} {who} or more have is found with probability 0.95{fewer}; one that a single one has, with at most {selection.delta:.3g}",
            f"in the search for levels a {number} is off by at most {off:,.3g} with probability 0.95; those of levels that were only just found are too high",
        )

    def check(self, columns: Columns) -> None:
        """Check that the columns hold texts, whole numbers or dates."""
        for name in self.events:
            type_ = columns.codecs[name].type
            if not (
                is_text(type_)
                or is_bytes(type_)
                or pa.types.is_integer(type_)
                or pa.types.is_date(type_)
            ):
                what = f"levels of the type {type_} cannot be found"
                raise SpecError(what, f"column {name!r}", "list them, or declare bounds")

    def statistic(self, columns: Columns) -> KeyStatistic:
        """Return what is counted; the values of all other columns are checked."""
        codecs = dict(columns.codecs)
        keys = {name: codecs.pop(name) for name in self.events}
        return KeyStatistic(
            codecs={name: codec for name, codec in keys.items() if isinstance(codec, LevelCodec)},
            checked=codecs,
            unit=self.unit,
            most=self.budget.rows_per_unit,
        )

    def draw(self, counts: ColumnKeys, columns: Columns, noise: Noise) -> FoundLevels:
        """Draw the noise of every value that occurs, and return those that are listed; see `Mechanism.draw`."""
        levels, units = {}, {}
        for name, event in self.events.items():
            tally = counts.columns[name].tally(partial(weigh_keys, event))
            places, noisy = select_keys(tally.counts, event, rng=noise(f"discover/{name}"))
            order = np.argsort(-noisy, kind="stable")
            listed = tally.keys.take(pa.array(places[order])).to_pylist()
            # which replaces the others whether it is found or not
            kept = np.array([level != self.schema.columns[name].other for level in listed], bool)
            levels[name] = [level for level, is_kept in zip(listed, kept, strict=True) if is_kept]
            units[name] = noisy[order][kept]
        return FoundLevels(
            schema=self.schema,
            events=self.events,
            levels=levels,
            units=units,
            insecure=noise("discover") is not None,
        )

    def read_drawn(self, data: bytes, columns: Columns) -> FoundLevels:
        """Return the levels that an earlier driver kept; see `Mechanism.read_drawn`."""
        found = FoundLevels.from_bytes(data, "the run's list of levels")
        if dict(found.events) != dict(self.events):
            raise InputError("this is the list of another run", "levels", "`dpdask abort` the run")
        return found

    def list_counts(self, drawn: FoundLevels, columns: Columns) -> Iterable[pa.Table]:
        """Return none: a number of units is no number of rows."""
        return ()

    def find(self, drawn: FoundLevels, columns: Columns) -> Schema:
        """Return the schema with the commonest levels that were found, in their order, and that which replaces the others."""
        most = self.count_most(columns)
        cost = {"epsilon": self.budget.epsilon, "delta": self.budget.delta}
        source, given = Provenance(**cost, insecure=drawn.insecure), {}
        for name, found in drawn.levels.items():
            column = self.schema.columns[name]
            levels = column.list_found(found, most)
            given[name] = column.model_copy(update={"levels": levels, "found": source})
        return self.schema.model_copy(update={"columns": {**self.schema.columns, **given}})
