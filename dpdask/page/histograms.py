"""Histograms of released columns, with the margins that their noise leaves."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.io.parquet import open_parquet
from dpdask.io.shards import ROW_GROUP_ROWS, Manifest
from dpdask.io.storage import Folder
from dpdask.mechanisms.card import Card
from dpdask.mechanisms.guidance import find_guidance

MAX_ROWS = 2**17
MAX_PARTS = 32
_BATCH_ROWS = 2**14


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Released rows."""

    rows: pa.Table
    n_rows: int


def read_sample(shards: Folder, manifest: Manifest, columns: Sequence[str]) -> Sample:
    """Return at most `MAX_ROWS` released rows, from at most `MAX_PARTS` row groups: the same release, the same rows.

    Parameters
    ----------
    columns
        The columns to read; those that are not released are left out.
    """
    groups = [
        (shard.name, group)
        for shard in manifest.shards
        for group in range(-(-shard.n_rows // ROW_GROUP_ROWS))
    ]
    n_parts = min(len(groups), MAX_PARTS)
    chosen = [groups[part * len(groups) // n_parts] for part in range(n_parts)]
    batches = [
        batch
        for name, of_shard in groupby(chosen, itemgetter(0))
        for batch in _read_groups(
            shards, name, [group for _, group in of_shard], columns, MAX_ROWS // n_parts
        )
    ]
    return Sample(
        rows=pa.Table.from_batches(batches) if batches else pa.table({}), n_rows=manifest.n_rows
    )


def _read_groups(
    shards: Folder, name: str, groups: Sequence[int], columns: Sequence[str], most: int
) -> Iterator[pa.RecordBatch]:
    """Yield the first rows of some row groups of a shard."""
    with open_parquet(shards, name) as parquet:
        known = [column for column in parquet.schema_arrow.names if column in columns]
        for group in groups:
            left = most
            for batch in parquet.iter_batches(
                batch_size=min(most, _BATCH_ROWS), row_groups=[group], columns=known
            ):
                batch.validate(full=True)
                yield batch.slice(0, left)
                left -= batch.num_rows
                if left <= 0:
                    break


MAX_BARS = 24
MISSING = "missing"
_TAIL = 0.005

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A level or a cell: its share of the released rows, and how far its share in the table may be from that, with probability 95 %."""

    label: str
    share: float
    margin: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedHistogram:
    """The shares of a released column's levels or cells."""

    column: str
    bars: tuple[Bar, ...]  # in the order of the levels or cells

    @property
    def summary(self) -> str:
        """The histogram in a sentence, for readers who cannot see it."""
        largest = max(self.bars, key=lambda bar: bar.share)
        return f"{self.column}: {len(self.bars)} bars; the largest is {largest.label} with a share of {100 * largest.share:.1f} %."


def count_histogram(column: str, sample: Sample, card: Card) -> ReleasedHistogram | None:
    """Return the histogram of a released column; None if it has no rows."""
    values = sample.rows[column].combine_chunks()
    weights = find_weights(card, sample)
    total = float(weights.sum())
    if total <= 0.0:
        return None
    stated = card.columns[column].details
    counted = (
        _count_levels(values, stated["levels"], weights)
        if "levels" in stated
        else _count_cells(values, stated, weights)
    )
    kept = _join_rare(counted) if "levels" in stated else counted
    margin = find_guidance(card).margin(column, card, sample.rows.num_rows, sample.n_rows)
    bars = tuple(
        Bar(label=label, share=count / total, margin=margin(count / total)) for label, count in kept
    )
    return ReleasedHistogram(column=column, bars=bars)


def find_weights(card: Card, sample: Sample) -> Floats:
    """Return the weight of each released row: that of its cell, or 1."""
    if find_guidance(card).shape(card) == "cells" and "weight" in sample.rows.column_names:
        found: Floats = np.maximum(sample.rows["weight"].to_numpy().astype(np.float64), 0.0)
        return found
    return np.ones(sample.rows.num_rows)


def read_tables(card: Card, sample: Sample) -> list[ReleasedHistogram]:
    """Return the histograms among released tables of counts: those of a single column."""
    names = [name for name in card.columns if name in sample.rows.column_names]
    found: dict[str, list[tuple[str, float, float]]] = {}
    for row in sample.rows.to_pylist():
        if row["table"] in names:
            found.setdefault(row["table"], []).append(
                (label_level(row[row["table"]]), max(0.0, row["count"]), row["margin_95"])
            )
    histograms = []
    for name, rows in found.items():
        total = sum(count for _, count, _ in rows)
        if total > 0 and len(rows) <= MAX_BARS:
            bars = tuple(
                Bar(label=label, share=count / total, margin=margin / total)
                for label, count, margin in rows
            )
            histograms.append(ReleasedHistogram(column=name, bars=bars))
    return histograms


def label_level(value: Any) -> str:
    """Return a level as a short text."""
    return MISSING if value is None else str(value)


def _key(value: Any) -> Any:
    """Return a level so that what JSON holds and what a column holds are equal."""
    if value is None or isinstance(value, bool | str):
        return value
    return float(value) if isinstance(value, int | float) else str(value)


def _count_levels(
    values: pa.Array, levels: Sequence[Any], weights: Floats
) -> list[tuple[str, float]]:
    encoded = values.dictionary_encode(null_encoding="encode")
    counts = np.bincount(
        encoded.indices.to_numpy(zero_copy_only=False), weights, minlength=len(encoded.dictionary)
    )
    found = {
        _key(value): (label_level(value), float(count))
        for value, count in zip(encoded.dictionary.to_pylist(), counts, strict=True)
    }
    declared = [found.pop(_key(level), (label_level(level), 0.0)) for level in levels]
    return [*declared, *found.values()]


def _join_rare(counted: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return the most frequent levels in their order, and the rest as one bar, which says how many they are."""
    if len(counted) <= MAX_BARS:
        return counted
    ranked = sorted(range(len(counted)), key=lambda place: (-counted[place][1], place))
    shown = set(ranked[: MAX_BARS - 1])
    rest = [count for place, (_, count) in enumerate(counted) if place not in shown]
    return [*(counted[place] for place in sorted(shown)), (f"{len(rest)} other levels", sum(rest))]


def read_numbers(values: pa.Array) -> Floats:
    """Return a column's values as numbers; dates and times in their own unit, missing values as NaN."""
    type_ = values.type
    if pa.types.is_temporal(type_):
        values = values.cast(pa.int32() if type_.bit_width == 32 else pa.int64())
    found: Floats = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return found


def _count_cells(
    values: pa.Array, stated: dict[str, Any], weights: Floats
) -> list[tuple[str, float]]:
    numbers = read_numbers(values)
    missing = np.isnan(numbers)
    atoms = [float(atom) for atom in stated.get("atoms", ())][: MAX_BARS // 2]
    found = [
        (say_number(atom, values.type), float(weights[numbers == atom].sum())) for atom in atoms
    ]
    rest = ~missing & ~np.isin(numbers, atoms)
    declared, bounds = stated.get("edges", stated.get("cell_edges")), stated.get("bounds")
    whole = pa.types.is_integer(values.type) or pa.types.is_temporal(values.type)
    whole = whole or bool(
        declared and bounds and float(declared[0]) == float(bounds[0]) - 1.0
    )  # the points of cells of whole numbers
    if rest.any():
        edges, is_clipped = _find_edges(numbers[rest], declared, whole=whole)
        place = np.clip(np.searchsorted(edges, numbers[rest], side="left") - 1, 0, len(edges) - 2)
        counts = np.bincount(place, weights[rest], minlength=len(edges) - 1)
        labels = _label_cells(edges, values.type, whole=whole, is_clipped=is_clipped)
        found += list(zip(labels, map(float, counts), strict=True))
    return [*found, (MISSING, float(weights[missing].sum()))] if missing.any() else found


def _find_edges(
    numbers: Floats, declared: Sequence[Any] | None, *, whole: bool
) -> tuple[Floats, bool]:
    """Return the edges of cells, which contain their upper edge, and whether the outer cells hold what lies beyond them."""
    if declared is not None and 2 <= len(declared) <= MAX_BARS + 1:
        return np.array([float(edge) for edge in declared]), False
    low, high = np.quantile(numbers, [_TAIL, 1.0 - _TAIL], method="nearest")
    is_clipped = bool(numbers.min() < low or numbers.max() > high)
    if whole:
        width = max(1, math.ceil((high - low + 1) / 20))
        return np.arange(low - 1, high + width, width), is_clipped
    return np.linspace(np.nextafter(low, -np.inf), high, 21) if high > low else np.array(
        [low - 0.5, high + 0.5]
    ), is_clipped


def _label_cells(edges: Floats, type_: pa.DataType, *, whole: bool, is_clipped: bool) -> list[str]:
    labels = []
    for low, high in pairwise(edges):
        first = low + 1 if whole else low
        over = "" if whole else "over "
        last = say_number(high, type_)
        end = (
            last.removesuffix(" 23:59:59") if " " not in say_number(first, type_) else last
        )  # whole days
        labels.append(
            last if whole and first == high else f"{over}{say_number(first, type_)} to {end}"
        )
    if is_clipped and len(labels) > 1:
        labels[0] = f"up to {say_number(edges[1], type_)}"
        labels[-1] = f"above {say_number(edges[-2], type_)}"
    return labels


def say_number(number: float, type_: pa.DataType) -> str:
    """Return a number of a column as a short text; a time in whole seconds.

    Parameters
    ----------
    number
        The number; of dates and times, in the column's own unit.
    """
    if pa.types.is_temporal(type_):
        try:
            time = (
                pa.scalar(int(number), pa.int32() if type_.bit_width == 32 else pa.int64())
                .cast(type_)
                .as_py()
            )
        except (OverflowError, ValueError):  # the edge of a bar, in a year that no calendar has
            time = dt.date.max if number > 0 else dt.date.min
        return str(time)[:19].removesuffix(" 00:00:00")
    digits = f"{number:,.4g}"
    return (
        f"{number:,.0f}"
        if abs(number) < 1e15 and (number == int(number) or "e+" in digits)
        else digits
    )
