"""Pictures of a page: shares and densities of columns; channels and associations as SVG."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any
from unicodedata import east_asian_width

import numpy as np
import pyarrow as pa

from dpdask.arrays import Floats, Ints, freeze_class
from dpdask.codec import is_bytes, read_texts
from dpdask.html import render_page
from dpdask.io.parquet import open_parquet
from dpdask.io.shards import ROW_GROUP_ROWS, Manifest, Shard
from dpdask.io.storage import Folder
from dpdask.mechanisms.card import Card, ColumnPart, find_guidance, no_margin
from dpdask.mechanisms.expectations import LITTLE, correlate_ranks
from dpdask.scales import coarsen, is_span, say_number

MAX_ROWS = 2**17
MAX_PARTS = 32
_BATCH_ROWS = 2**14


@freeze_class
class Sample:
    """Released rows."""

    rows: pa.Table
    n_rows: int


def read_sample(shards: Folder, manifest: Manifest, columns: Sequence[str], card: Card) -> Sample:
    """Return at most `MAX_ROWS` released rows, from at most `MAX_PARTS` row groups: the same release, the same rows.

    Parameters
    ----------
    columns
        The columns to read; those that are not released are left out. Bytes that are texts by the
        card become texts.
    """
    groups = [
        (shard, group)
        for shard in manifest.shards
        for group in range(-(-shard.n_rows // ROW_GROUP_ROWS))
    ]
    n_parts = min(len(groups), MAX_PARTS)
    chosen = [groups[part * len(groups) // n_parts] for part in range(n_parts)]
    batches = [
        batch
        for shard, of_shard in groupby(chosen, itemgetter(0))
        for batch in _read_groups(
            shards, shard, [group for _, group in of_shard], columns, MAX_ROWS // n_parts
        )
    ]
    rows = pa.Table.from_batches(batches) if batches else pa.table({})
    for place, name in enumerate(rows.column_names):
        stated = card.columns[name].details if name in card.columns else {}
        encoding, unit = stated.get("encoding"), stated.get("unit")
        if encoding and is_bytes(rows[name].type):  # tables of counts have texts
            texts = [read_texts(chunk, encoding) for chunk in rows[name].chunks]
            rows = rows.set_column(place, name, pa.chunked_array(texts))
        elif unit is not None:
            counted = [coarsen(chunk, unit) for chunk in rows[name].chunks]
            rows = rows.set_column(place, name, pa.chunked_array(counted))
    return Sample(rows=rows, n_rows=manifest.n_rows)


def _read_groups(
    shards: Folder, shard: Shard, groups: Sequence[int], columns: Sequence[str], most: int
) -> Iterator[pa.RecordBatch]:
    """Yield the first rows of some row groups of a shard."""
    with open_parquet(shards, shard.name, n_bytes=shard.n_bytes) as parquet:
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
_ORIGINS = {"D": 4, "Y": -1970}  # weeks begin on Mondays, and decades with the year 0
MISSING = "missing"
_TAIL, _MOST_TICKS = 0.005, 5
# how long cells of dates and times are, by the unit in which they are whole
_CALENDAR = {
    **dict.fromkeys("sm", (1, 2, 5, 10, 15, 30)),
    "h": (1, 2, 3, 6, 12),
    "D": (1, 7),
    "M": (1, 2, 3, 6),
    "Y": tuple(times * 10**power for power in range(7) for times in (1, 2, 5)),
}


@freeze_class
class Bar:
    """A level or a cell: its share of the released rows, and how far its share in the table may be from that, with probability 95 %."""

    label: str
    share: float
    margin: float | None
    width: float = 1.0  # of a cell, as a part of the axis
    height: float = 0.0  # of a cell: its density, as a part of the highest


@freeze_class
class ReleasedHistogram:
    """The shares of a released column: of its levels or single values, and its density over cells with round edges."""

    column: str
    bars: tuple[Bar, ...]  # in the order of the levels
    cells: tuple[Bar, ...] = ()
    ticks: tuple[tuple[float, str], ...] = ()  # places on the axis, in [0, 1], and what they say

    @property
    def summary(self) -> str:
        """The density in a sentence, for readers who cannot see it."""
        highest = max(self.cells, key=lambda cell: cell.height)
        return f"{self.column}: {len(self.cells)} cells; the density is highest at {highest.label}, with a share of {100 * highest.share:.1f} %."

    @property
    def numbers(self) -> list[tuple[str, ...]]:
        """The cells, their shares and their margins, in words; without margins, if none is known."""
        return [
            (
                cell.label,
                f"{100 * cell.share:.2f} %",
                *([] if cell.margin is None else [f"± {100 * cell.margin:.2f} %"]),
            )
            for cell in self.cells
        ]


def count_histogram(column: str, sample: Sample, card: Card) -> ReleasedHistogram | None:
    """Return the histogram of a released column; None if it has no rows."""
    values = sample.rows[column].combine_chunks()
    weights = find_weights(card, sample)
    total = float(weights.sum())
    if total <= 0.0:
        return None
    stated = card.columns[column].details
    guidance = find_guidance(card)
    margin = of_cells = guidance.margin(column, card, sample.rows.num_rows, sample.n_rows)
    cells: list[Bar] = []
    if "levels" in stated:
        counted, axis = _join_rare(_count_levels(values, stated["levels"], weights)), None
    else:
        # the weights of single values and of missing ones, and which rows have others
        numbers = read_numbers(values)
        atoms = [float(atom) for atom in stated.get("atoms", ())][: MAX_BARS // 2]
        found = [
            (say_number(atom, values.type), float(weights[numbers == atom].sum())) for atom in atoms
        ]
        missing = np.isnan(numbers)
        found += [(MISSING, float(weights[missing].sum()))] if missing.any() else []
        counted, rest = found, ~missing & ~np.isin(numbers, atoms)
        is_weighted = guidance.shape(card) == "cells"
        declared = stated.get("edges") if is_weighted else None
        axis = _find_axis(read_numbers(values)[rest], declared, values.type) if rest.any() else None
    if axis is not None:
        counts = axis.count(read_numbers(values)[rest], weights[rest])
        beyond = float(weights[rest].sum() - counts.sum())
        if guidance.shape(card) != "rows" and not axis.is_declared:
            of_cells = no_margin  # what was counted are other cells
        counted += [(f"outside {axis.starts[0]} to {axis.ends[-1]}", beyond)] if beyond else []
        widths = np.diff(axis.edges) / np.ptp(axis.edges)
        heights = counts / widths / (float((counts / widths).max()) or 1.0)
        drawn = zip(axis.labels, counts / total, widths.tolist(), heights.tolist(), strict=True)
        cells = [
            Bar(label=label, share=float(share), margin=of_cells(share), width=width, height=height)
            for label, share, width, height in drawn
        ]
    bars = (
        Bar(label=label, share=count / total, margin=margin(count / total))
        for label, count in counted
    )
    ticks = () if axis is None else axis.ticks
    return ReleasedHistogram(column=column, bars=tuple(bars), cells=tuple(cells), ticks=ticks)


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
    is_real = isinstance(value, float) and not value.is_integer()
    return MISSING if value is None else say_number(value) if is_real else str(value)


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


@freeze_class
class _Axis:
    """The cells of a density: each begins at an edge, and ends before the next one."""

    edges: Floats
    starts: list[str]  # the edges in words
    ends: list[str]  # the last value of each cell in words
    is_whole: bool  # whether values are whole numbers
    is_declared: bool = False  # whether they are the cells that were counted
    ticks: tuple[tuple[float, str], ...] = ()

    @property
    def labels(self) -> list[str]:
        """The cells in words."""
        pairs = zip(self.starts, self.ends, strict=False)
        return [start if start == end else f"{start} to {end}" for start, end in pairs]

    def count(self, numbers: Floats, weights: Floats) -> Floats:
        """Return the weight in each cell; the last one has its end, unless numbers are whole."""
        end = self.edges[-1]
        inside = (numbers >= self.edges[0]) & (numbers < end if self.is_whole else numbers <= end)
        found: Floats = np.histogram(numbers[inside], self.edges, weights=weights[inside])[0]
        return found


def _find_axis(numbers: Floats, declared: Sequence[Any] | None, type_: pa.DataType) -> _Axis:
    """Return declared cells, if they are few, or round ones for all but the outer numbers; and at most five round ticks."""
    whole = bool((numbers == np.floor(numbers)).all())
    if declared is not None and 2 <= len(declared) <= MAX_BARS + 1:
        # declared cells have their upper edge
        edges = np.array(declared, dtype=np.float64)
        edges = edges + 1.0 if whole else np.nextafter(edges, np.inf)
        starts = [say_number(edge, type_) for edge in edges]
        ends = [say_number(edge - whole, type_) for edge in edges[1:]]
        axis = _Axis(edges=edges, starts=starts, ends=ends, is_whole=whole, is_declared=True)
    else:
        low, high = np.quantile(numbers, [_TAIL, 1.0 - _TAIL], method="nearest")
        axis = _make_axis(float(low), float(high), MAX_BARS, type_, whole=whole)
    first, last = float(axis.edges[0]), float(axis.edges[-1])
    shift = 0.5 if whole and not pa.types.is_temporal(type_) else 0.0  # the middle of a number
    ticks = _make_axis(first, last, _MOST_TICKS, type_, whole=whole)
    places = ((ticks.edges + shift - first) / (last - first)).tolist()
    pairs_ = zip(places, ticks.starts, strict=True)
    return replace(axis, ticks=tuple((place, text) for place, text in pairs_ if 0 <= place <= 1))


def _make_axis(low: float, high: float, most: int, type_: pa.DataType, *, whole: bool) -> _Axis:
    """Return at most so many cells with round edges."""
    if pa.types.is_temporal(type_):
        return _make_calendar(low, high, most, type_)
    power = math.floor(math.log10(max(high - low, abs(high) * 1e-4, 1e-300))) - 2
    power = max(power, 0) if whole else power
    steps = (times * 10.0**more for more in range(power, power + 5) for times in (1, 2, 5))
    for step in steps:
        first = math.floor(low / step)
        last = math.floor(high / step) + 1 if whole else max(math.ceil(high / step), first + 1)
        if last - first <= most:
            break
    edges = np.array([float(f"{place * step:.12g}") for place in range(first, last + 1)])
    starts = [say_number(edge) for edge in edges]
    ends = [say_number(edge - whole) for edge in edges[1:]]
    return _Axis(edges=edges, starts=starts, ends=ends, is_whole=whole)


def _make_calendar(low: float, high: float, most: int, type_: pa.DataType) -> _Axis:
    """Return at most so many cells of whole seconds, minutes, hours, days, months or years."""
    is_day = pa.types.is_date(type_)
    base = ("D" if type_.bit_width == 32 else "ms") if is_day else type_.unit
    ends = np.array([low, high]).astype(np.int64).astype(f"M8[{base}]")
    lengths = ((unit, each) for unit in "smhDMY" for each in _CALENDAR[unit])
    for unit, length in lengths:
        origin = _ORIGINS.get(unit, 0)
        first, last = (ends.astype(f"M8[{unit}]").astype(np.int64) - origin) // length
        if last - first < most and not (is_day and unit in "smh"):
            break
    whole = np.arange(first, last + 2) * length + origin
    dates = whole.astype(f"M8[{unit}]").astype(f"M8[{base}]")
    edges = dates.astype(np.int64).astype(np.float64)
    if is_span(type_):
        starts = [say_number(edge, type_) for edge in edges]
        return _Axis(edges=edges, starts=starts, ends=starts[1:], is_whole=True)
    starts, lasts = (
        [text.replace("T", " ") for text in each.astype(f"M8[{unit}]").astype(str)]
        for each in (whole, whole[1:] - 1)
    )
    return _Axis(edges=edges, starts=starts, ends=lasts, is_whole=True)


_WIDTH, _EDGE = 440, 8  # CSS pixels: pictures stay readable on a telephone
_LINE, _LETTER = 18, 7.5  # the height of a line, and the width of most letters
_TICK = 4
_LONGEST = 28
_MOST_NUMBERS, _MOST_LABELS, _MOST_COLOURS = 7, 16, 6
_LEGEND = 64  # the width of the legend of colours
_BLUES = np.array([[247, 251, 255], [198, 219, 239], [107, 174, 214], [33, 113, 181], [8, 48, 107]])

Numbers = Floats


def draw_table(
    table: Numbers, labels: Sequence[str], *, across: str, down: str, most: float
) -> str:
    """Return the address of an image of a table of numbers, as colours."""
    texts = {
        place: shorten(labels[place])
        for place in range(0, len(labels), -(-len(labels) // _MOST_LABELS))
    }
    # the width of the longest text, more or less: the reader's browser chooses the letters
    margin = (
        _EDGE
        + (_LETTER * max((sum(map(_measure, text)) for text in texts.values()), default=0))
        + 2 * _TICK
    )
    left = margin + (_LINE if down else 0)
    size = _WIDTH - left - _LEGEND
    values = {
        "width": _WIDTH,
        "height": _EDGE + size + margin + (_LINE if across else 0),
        "edge": _EDGE,
        "line": _LINE,
        "tick": _TICK,
        "left": left,
        "size": size,
        "cell": size / len(labels),
        "margin": margin,
        "across": across,
        "down": down,
        "numbers": table.tolist() if len(labels) <= _MOST_NUMBERS else [],
        "most": most,
        "texts": texts,
        "picture": _paint(table / (most or 1.0)),
        "legend": _paint(np.linspace(1.0, 0.0, 64)[:, None]),
        "ticks": [(size * tick / (most or 1.0), f"{tick:g}") for tick in _list_ticks(most)],
    }
    return _address("image/svg+xml", render_page(__package__, "table.svg", {}, values).encode())


def shorten(text: str) -> str:
    """Return a text that fits beside a picture."""
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    fits = sum(width <= _LONGEST for width in accumulate(map(_measure, shown)))
    return shown if fits == len(shown) else f"{shown[: fits - 1]}…"


def _measure(letter: str) -> int:
    """Return how many usual letters a letter is as wide as."""
    return 2 if east_asian_width(letter) in "FW" else 1


def _list_ticks(most: float) -> list[float]:
    """Return round numbers from 0 to at most `most`."""
    step = 10.0 ** math.floor(math.log10(most)) / 10.0 if most > 0.0 else 1.0
    step = next(
        step * times for times in (1, 2, 5, 10, 20, 50) if most / (step * times) < _MOST_COLOURS
    )
    return [step * place for place in range(math.floor(most / step * (1.0 + 1e-9)) + 1)]


def _paint(shares: Numbers) -> str:
    """Return the address of an image with a pixel for each number in [0, 1]."""
    anchors = np.linspace(0.0, 1.0, len(_BLUES))
    pixels = (
        np.stack([np.interp(shares, anchors, channel) for channel in _BLUES.T], axis=-1)
        .round()
        .astype(np.uint8)
    )
    # each begins with its filter: none
    lines = np.insert(pixels.reshape(len(pixels), -1), 0, 0, axis=1)
    header = struct.pack(">IIBBBBB", shares.shape[1], shares.shape[0], 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return _address("image/png", png)


def _address(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


MAX_ASSOCIATED = 16
_MAX_CODES = 10

Codes = Ints


@freeze_class
class Associations:
    """Cramér's V of every two columns."""

    columns: tuple[str, ...]
    table: Floats  # A symmetric matrix in [0, 1], with 1 on its diagonal

    def list_strongest(self, n_pairs: int) -> list[tuple[str, str, float]]:
        """Return the pairs that depend most on each other, the strongest first."""
        first, second = np.triu_indices(len(self.columns), 1)
        order = np.argsort(-self.table[first, second], kind="stable")[:n_pairs]
        return [
            (
                self.columns[first[pair]],
                self.columns[second[pair]],
                float(self.table[first[pair], second[pair]]),
            )
            for pair in order
        ]


def associate(columns: Sequence[str], sample: Sample, card: Card) -> Associations | None:
    """Return the associations of released columns; None for fewer than two.

    Notes
    -----
    Numbers are cut into at most 10 cells with equal counts; of levels, the 9 most frequent are kept
    and the others joined. The estimate is corrected for its bias, so that independent columns have
    0 on average.

    References
    ----------
    Bergsma 2013, A bias-correction for Cramér's V and Tschuprow's T.
    """
    chosen = tuple(columns[:MAX_ASSOCIATED])
    if len(chosen) < 2:
        return None
    weights = find_weights(card, sample)
    coded = [_encode(sample.rows[name].combine_chunks(), weights) for name in chosen]
    table = np.eye(len(chosen))
    for i in range(len(chosen)):
        for j in range(i):
            table[i, j] = table[j, i] = _correlate(coded[i], coded[j], weights)
    return Associations(columns=chosen, table=table)


def _encode(values: pa.Array, weights: Floats) -> Codes:
    """Return a small number for each row: a cell's or a level's."""
    encoded = values.dictionary_encode(null_encoding="encode")
    indices: Codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    n_values = len(encoded.dictionary)
    if n_values <= _MAX_CODES:
        return indices
    if (
        pa.types.is_string(values.type)
        or pa.types.is_large_string(values.type)
        or pa.types.is_boolean(values.type)
    ):
        counts = np.bincount(indices, weights, minlength=n_values)
        codes = np.full(n_values, _MAX_CODES - 1)
        codes[np.argsort(-counts, kind="stable")[: _MAX_CODES - 1]] = np.arange(_MAX_CODES - 1)
        return codes[indices]
    numbers = read_numbers(values)
    edges = np.unique(np.nanquantile(numbers, np.arange(1, _MAX_CODES) / _MAX_CODES))
    return np.where(np.isnan(numbers), len(edges) + 1, np.searchsorted(edges, numbers, side="left"))


def _correlate(one: Codes, other: Codes, weights: Floats) -> float:
    """Return Cramér's V with its bias corrected."""
    n_columns = int(other.max()) + 1
    counts = np.bincount(
        one * n_columns + other, weights, minlength=(int(one.max()) + 1) * n_columns
    ).reshape(-1, n_columns)
    counts = counts[counts.sum(axis=1) > 0][:, counts.sum(axis=0) > 0]
    n_rows, (rows, columns) = counts.sum(), counts.shape
    if min(rows, columns) < 2 or n_rows <= 1:
        return 0.0
    expected = np.outer(counts.sum(axis=1), counts.sum(axis=0)) / n_rows
    phi = float(((counts - expected) ** 2 / expected).sum()) / n_rows
    corrected = max(0.0, phi - (rows - 1) * (columns - 1) / (n_rows - 1))
    least = (
        min(rows - (rows - 1) ** 2 / (n_rows - 1), columns - (columns - 1) ** 2 / (n_rows - 1)) - 1
    )
    return min(1.0, math.sqrt(corrected / least)) if least > 0 else 0.0


MAX_CHANNELS = 6
_MOST_KEPT = 50  # columns
_MANY = 2**20  # steps, after which a channel has forgotten where it began


@freeze_class
class ChannelView:
    """A channel of a column."""

    column: str
    labels: tuple[str, ...]  # the levels, or the cells of ranks
    matrix: Floats  # row-stochastic: a row for each original value
    of_ranks: bool  # whether it is about ranks, not levels
    is_ordered: bool
    keeps_shares: bool  # whether the channel was made to keep a reference distribution

    @property
    def numbers(self) -> list[list[str]]:
        """A row for each original value: its label, and the probabilities of released ones."""
        rows = zip(self.labels, self.matrix.tolist(), strict=True)
        return [[label, *(f"{share:.3f}" for share in row)] for label, row in rows]

    @property
    def summary(self) -> str:
        """The channel in a sentence."""
        what = "rank cell" if self.of_ranks else "level"
        least, most = (f"{100 * each(np.diag(self.matrix)):.1f} %" for each in (np.min, np.max))
        probability = f"of {least}" if least == most else f"between {least} and {most}"
        return (
            f"{self.column}: {len(self.labels)} {what}s. A {what} stays as it is with a probability {probability}; the largest entry of the table is "
            f"{self.matrix.max():.2f}."
        )

    @property
    def quality(self) -> str:
        """How much of a value a released row keeps, in a sentence."""
        if self.of_ranks:
            return _say_correlation(self.column, self.kept)
        kept, chance = (
            float(self._shares @ np.diag(self.matrix)),
            float(self._shares @ self._shares),
        )
        if not self.keeps_shares:  # then nothing public tells how frequent the levels are
            least = float(np.diag(self.matrix).min())
            return f"{self.column}: a row keeps its value in at least {100 * least:.1f} % of the cases."
        stated = f"{self.column}: a row keeps its value in {100 * kept:.1f} % of the cases"
        return f"{stated}; values drawn apart from it would agree in {100 * chance:.1f} %."

    @property
    def kept(self) -> float:
        """How much of a value a released row keeps: of ordered values the correlation, else the share of values kept beyond chance."""
        shares = self._shares
        if not self.is_ordered:
            chance = float(shares @ shares)
            return (
                (float(shares @ np.diag(self.matrix)) - chance) / (1.0 - chance)
                if chance < 1.0
                else 1.0
            )
        places = np.arange(len(shares)) - float(shares @ np.arange(len(shares)))
        spread = float(shares @ places**2)
        return float(shares * places @ self.matrix @ places / spread) if spread > 0.0 else 1.0

    @property
    def _shares(self) -> Floats:
        """The frequencies that the channel itself keeps; even ones where it was made for none."""
        if not self.keeps_shares:
            return np.full(len(self.matrix), 1.0 / len(self.matrix))
        return np.linalg.matrix_power(self.matrix, _MANY).mean(axis=0)  # type: ignore[no-any-return]  # numpy's stub


def list_channels(card: Card, limit: int = MAX_CHANNELS) -> list[ChannelView]:
    """Return the channels that a card holds."""
    reference = card.mechanism.details.get("reference", {}).get("kind", "none")
    found = (_read(name, part, reference != "none") for name, part in card.columns.items())
    return [view for view in found if view is not None][:limit]


def describe_kept(card: Card) -> tuple[list[str], list[str]]:
    """Return how much of a value a released row keeps, a sentence for each column, and the columns of which it keeps almost nothing."""
    sentences, little = [], []
    views = {view.column: view for view in list_channels(card, _MOST_KEPT)}
    for name, part in list(card.columns.items())[:_MOST_KEPT]:
        if "window" in part.details:  # very many levels
            sentence, kept = _say_kept(name, part.details["window"])
            sentences.append(sentence)
        elif name in views:
            sentences.append(views[name].quality)
            kept = views[name].kept
        elif _has_rank_noise(card, part):
            kept = correlate_ranks(part.epsilon or 0.0)
            sentences.append(_say_correlation(name, kept))
        else:
            continue
        little += [name] if kept < LITTLE else []
    return sentences, little


def _has_rank_noise(card: Card, part: ColumnPart) -> bool:
    """Return whether noise was added to a column's ranks in the whole table; those of a chain are ranks among rows alike."""
    chained = card.mechanism.details.get("reference", {}).get("kind") == "chain"
    return "ranks" in part.details and part.epsilon is not None and not chained


def _say_kept(column: str, window: Mapping[str, Any]) -> tuple[str, float]:
    """Return what a column of very many levels keeps, in a sentence, and as a share."""
    kept, most = (float(window[name]) for name in ("kept", "kept_at_most"))
    stated = f"{column}: a row keeps its value in {100 * kept:.3g} % of the cases"
    return f"{stated}; no channel of this ε keeps more than {100 * most:.3g} %.", kept


def _say_correlation(column: str, correlation: float) -> str:
    return f"{column}: a row's released and original ranks have a correlation of {correlation:.2f}."


def _read(column: str, part: ColumnPart, keeps_shares: bool) -> ChannelView | None:
    stated = part.details
    several = stated.get("channels", ())
    # several: one for each level of another column
    entries = stated.get("channel", several[0] if len(several) == 1 else None)
    if not isinstance(entries, list) or ("parent" in stated and stated["parent"] is not None):
        return None
    matrix = np.array(entries, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        return None
    levels = [label_level(level) for level in stated.get("levels", ())]
    of_ranks = "rank_edges" in stated
    if of_ranks:
        levels = [f"{100 * rank:.0f} %" for rank in stated["rank_edges"][1:]]
    if len(levels) != len(matrix):
        levels = [str(place + 1) for place in range(len(matrix))]
    # null has no place among numbers
    has_order = part.kind == "discrete" and None not in stated.get("levels", ())
    is_ordered = of_ranks or has_order
    return ChannelView(
        column=column,
        labels=tuple(levels),
        matrix=matrix,
        of_ranks=of_ranks,
        is_ordered=is_ordered,
        keeps_shares=keeps_shares,
    )
