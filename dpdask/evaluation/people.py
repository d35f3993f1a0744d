"""How close synthetic persons with their rows are to the original's. CONFIDENTIAL: it reads private rows without noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.random import Generator

from dpdask.arrays import Floats, Ints, freeze_class
from dpdask.evaluation.measures import N_CODES, cut_ranges, ks_complement
from dpdask.evaluation.samples import Codes, Side, code_sides
from dpdask.stats import Domain
from dpdask.stats.people import PersonCounts, PersonDomain

_GROUPS = {
    "PP": "two columns of persons, the number of rows among them",
    "CC": "two columns of a row",
    "PC": "a column of persons and one of their rows",
    "WW": "a column of one row and one of another row of the same person",
    "H": "the number of rows of a person",
}
_N_RESAMPLES = 5


@freeze_class(repr=False)
class People:
    """Some persons with their rows, as codes; confidential for private rows."""

    domain: PersonDomain
    parents: Any  # uint16 of shape (n_parents, n_persons)
    rows: Any  # uint16 of shape (n_columns, n_rows), person after person
    starts: Ints  # int64 of shape (n_persons + 1,): where the rows of each person begin
    numbers: Mapping[str, Floats]  # by column of rows that holds numbers: those of the rows

    @property
    def n_persons(self) -> int:
        """How many persons there are."""
        return len(self.starts) - 1

    @property
    def owners(self) -> Ints:
        """The person of each row."""
        return np.repeat(np.arange(self.n_persons), np.diff(self.starts))

    def count(self) -> PersonCounts:
        """Return the tables in which each person weighs 1."""
        return PersonCounts.of_persons(self.domain, self.parents, self.rows, self.starts)

    def resample(self, rng: Generator) -> Self:
        """Return as many persons, drawn again with all their rows."""
        chosen = rng.integers(0, self.n_persons, self.n_persons)
        numbers = np.diff(self.starts)[chosen]
        starts = np.concatenate([[0], np.cumsum(numbers)])
        rows = np.arange(starts[-1]) + np.repeat(self.starts[chosen] - starts[:-1], numbers)
        return replace(
            self,
            parents=np.ascontiguousarray(self.parents[:, chosen]),
            rows=np.ascontiguousarray(self.rows[:, rows]),
            starts=starts,
            numbers={name: values[rows] for name, values in self.numbers.items()},
        )

    def permute(self, rng: Generator) -> Self:
        """Return persons whose columns are independent: each is permuted among all persons, or all rows."""
        names = self.domain.domain.names[self.domain.n_parents :]
        orders = [rng.permutation(self.rows.shape[1]) for _ in names]
        rows = [column[order] for column, order in zip(self.rows, orders, strict=True)]
        return replace(
            self,
            parents=rng.permuted(self.parents, axis=1),
            rows=np.stack(rows),
            numbers={name: own[orders[names.index(name)]] for name, own in self.numbers.items()},
        )

    def average(self, name: str) -> tuple[Floats, float]:
        """Return the mean of a column's numbers over the rows of each person who has any, and their variance between persons.

        That is the covariance of two different rows of a person, where each person with two numbers or more weighs 1.
        """
        values = self.numbers[name]
        here = ~np.isnan(values)
        owners, values = self.owners[here], values[here]
        k = np.bincount(owners, minlength=self.n_persons)
        sums, squares = (
            np.bincount(owners, weights=each, minlength=self.n_persons)
            for each in (values, values**2)
        )
        two = k > 1
        if not two.any():
            return sums[k > 0] / k[k > 0], 0.0
        products = (sums[two] ** 2 - squares[two]) / (k[two] * (k[two] - 1))
        return sums[k > 0] / k[k > 0], float(products.mean() - (sums[two] / k[two]).mean() ** 2)

    def count_distinct(self, column: int) -> Ints:
        """Return how many persons have each number of different levels in a column of rows."""
        pairs = np.unique(self.owners * 2**16 + self.rows[column])
        found = np.bincount(pairs >> 16, minlength=self.n_persons)
        return np.bincount(found, minlength=self.domain.max_rows + 1)


@freeze_class
class Measured:
    """One measure: of the release, of independent columns and of a resample of persons; the first is the original's where they are no distances."""

    label: str
    original: float | None
    released: float
    independent: float
    resample: float


def bound_rows(rows: pd.DataFrame, most: int, rng: Generator) -> pd.DataFrame:
    """Return at most so many rows of each person, chosen at random."""
    mixed = rows.iloc[rng.permutation(len(rows))]
    return mixed[mixed.groupby(mixed.columns[0]).cumcount() < most].sort_index()


Frames = tuple[pd.DataFrame, pd.DataFrame]  # persons and their rows; the first column is the key


def pair_people(
    original: Frames,
    released: Frames,
    columns: Mapping[str, Mapping[str, Any]],
    max_rows: int,
) -> tuple[People, People]:
    """Return original and released persons of one domain.

    Parameters
    ----------
    original, released
        A frame of persons and one of their rows: the key, and then the columns. Rows of other persons
        are left out; no person has more than `max_rows`.
    columns
        What the card says of each column.
    """
    sizes = dict[str, int]()
    codes, numbers = [], []
    for first, second in zip(original, released, strict=True):
        names = list(first.columns[1:])
        pair: tuple[Side, ...] = ()
        if names:
            pair = code_sides(first[names], second[names], columns)[:2]
        coded = dict[str, tuple[Codes, Codes]]()
        for name in pair[0].columns if pair else ():
            own = pair[0].columns[name], pair[1].columns[name]
            is_number = name not in pair[0].levels
            coded[name] = cut_ranges(*own) if is_number else own
            sizes[name] = N_CODES if is_number else len(pair[0].levels[name])
        codes.append(coded)
        numbers.append([_list_numbers(side) for side in pair])
    domain = PersonDomain(
        domain=Domain(names=tuple(sizes), sizes=tuple(sizes.values())),
        n_parents=len(codes[0]),
        max_rows=max_rows,
    )
    found = []
    for which, (persons, rows) in enumerate((original, released)):
        n = len(persons)
        place = pd.Index(persons.iloc[:, 0]).get_indexer(pd.Index(rows.iloc[:, 0]))
        order = np.argsort(place, kind="stable")
        order = order[place[order] >= 0]
        parents, drawn = (
            np.array([each[which] for each in coded.values()], dtype=np.uint16).reshape(-1, size)
            for coded, size in zip(codes, (n, len(place)), strict=True)
        )
        people = People(
            domain=domain,
            parents=parents,
            rows=np.ascontiguousarray(drawn[:, order]),
            starts=np.searchsorted(place[order], np.arange(n + 1)).astype(np.int64),
            numbers={name: values[order] for name, values in numbers[1][which].items()},
        )
        found.append(people)
    return found[0], found[1]


def _list_numbers(side: Side) -> dict[str, Floats]:
    """Return the numbers of columns that hold some, those of levels too; NaN of null and of what is outside the domain."""
    found = dict[str, Floats]()
    for name, values in side.columns.items():
        levels = side.levels.get(name, ())[:-1]
        if name not in side.levels:
            found[name] = values
        elif all(isinstance(level, int | float | None) and level is not True for level in levels):
            known: Any = [*levels, None]
            found[name] = np.array(known, float)[values]
    return found


def compare_people(original: People, released: People, rng: Generator) -> dict[str, list[Measured]]:
    """Return distances of tables, variances between persons, distances of persons' means, and of their numbers of levels.

    Distances of tables are total variation distances, the means over all tables of a group; each
    person weighs 1 in a table. Those of persons' means are Kolmogorov-Smirnov distances.
    """
    sides = [released, original.permute(rng)]
    sides += [original.resample(rng) for _ in range(_N_RESAMPLES)]
    counted, counts = original.count(), [side.count() for side in sides]

    def measure(label: str, values: Sequence[float], of_original: float | None = None) -> Measured:
        found, alone, *resampled = values
        return Measured(
            label=label,
            original=of_original,
            released=found,
            independent=alone,
            resample=float(np.mean(resampled)),
        )

    found: dict[str, list[Measured]] = {"tables": [], "variances": [], "means": [], "levels": []}
    for group, said in _GROUPS.items():
        apart = [_average_distance(counted, each, group) for each in counts]
        if not math.isnan(apart[0]):
            found["tables"].append(measure(said, apart))
    for name in original.numbers:
        (means, variance), *others = (side.average(name) for side in (original, *sides))
        found["variances"].append(measure(name, [each[1] for each in others], variance))
        near = [ks_complement(means, each[0]) for each in others]
        found["means"].append(
            measure(name, [1.0 if each is None else 1.0 - each.value for each in near])
        )
    for column, name in enumerate(original.domain.domain.names[original.domain.n_parents :]):
        first, *distinct = (side.count_distinct(column) for side in (original, *sides))
        found["levels"].append(measure(name, [_find_distance(first, each) for each in distinct]))
    return found


def _average_distance(one: PersonCounts, two: PersonCounts, group: str) -> float:
    """Return the mean distance of the tables of a group; NaN if there are none of two columns."""
    both = (counts.domain.split(group, counts.tables[group]) for counts in (one, two))
    apart = [
        _find_distance(a, b)
        for (key, a), (_, b) in zip(*both, strict=True)
        if len(key) > 2 or group == "H"
    ]
    return float(np.mean(apart)) if apart else math.nan


def _find_distance(one: Ints, two: Ints) -> float:
    """Return the total variation distance of the shares in two tables."""
    p, q = (each / max(float(each.sum()), 1.0) for each in (one, two))
    return float(np.abs(p - q).sum()) / 2.0
