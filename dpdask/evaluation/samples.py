"""Rows of the original and of its release, side by side. CONFIDENTIAL: it reads private rows, of which it keeps a sample of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Self, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.analysis.values import DateScale
from dpdask.arrays import Floats, Ints, Words, freeze_class
from dpdask.errors import DataError, InputError, SpecError
from dpdask.inference.tallies import level_key
from dpdask.io import csv, parquet
from dpdask.io.files import LOG_FOLDERS, Files
from dpdask.io.fragments import InputTable, discover, read_batches
from dpdask.io.parquet import read_shard
from dpdask.io.storage import Folder, open_filesystem
from dpdask.kernels.hashing import siphash
from dpdask.mechanisms.card import microseconds_of
from dpdask.scales import coarsen
from dpdask.schema import Schema
from dpdask.stats.statistic import as_words

Codes: TypeAlias = Ints
Draw: TypeAlias = Callable[[pa.RecordBatch], Floats] | None  # a key of each row, in [0, 1)

MOST_LEVELS = 1_000
_DAY = 86_400_000_000  # microseconds


@freeze_class(repr=False)
class Side:
    """Some rows of a table, by column: numbers as float64 with NaN for null, categories as codes; confidential for private rows."""

    columns: Mapping[str, NDArray[Any]]  # by name, the values of the rows: float64 or int64
    # By name, the categories that the codes stand for; a column without them is one of numbers.
    levels: Mapping[str, tuple[object, ...]]
    dates: frozenset[str] = frozenset()  # the columns whose numbers are days since 1970

    @property
    def n_rows(self) -> int:
        """How many rows there are."""
        return len(next(iter(self.columns.values())))

    def take(self, rows: Codes) -> Self:
        """Return some rows."""
        return replace(self, columns={name: values[rows] for name, values in self.columns.items()})

    def permute(self, rng: Generator) -> Self:
        """Return a table whose columns are independent: each is permuted by itself."""
        return replace(
            self, columns={name: rng.permutation(values) for name, values in self.columns.items()}
        )


def read_original(
    url: str, columns: Sequence[str], n_rows: int, rng: Generator, draw: Draw = None
) -> pd.DataFrame:
    """Return a uniform sample of an original table's rows; memory is bounded by the sample and a batch."""
    fs, path = open_filesystem(url)
    if any(fs.exists(f"{path}/{name}") for name in LOG_FOLDERS):
        hint = "name the job that released it: dpdask report --job JOB"
        raise SpecError("the original is a Delta or Iceberg table", "--original", hint)

    def schema_of(names: Iterable[str]) -> Schema:
        roles = {name: {"role": "keep" if name in columns else "drop"} for name in names}
        return Schema.from_dict({"columns": roles})

    files = Files().list_files(url, schema_of(columns)).files
    if files[0].format == "parquet":
        held = [name for name, _, _ in parquet.read_columns(files[0].url, files[0].name)]
        _check_columns(columns, [*held, *files[0].constants])
        return read_input(discover(url, schema_of(held)), columns, n_rows, rng, draw)
    try:
        return sample_rows(_read_texts([file.url for file in files], columns), n_rows, rng, draw)
    except (OSError, pa.ArrowException, *csv.BAD_GZIP):
        hint = "check the path; all files must have the same columns"
        raise InputError("the original cannot be read as CSV", "--original", hint) from None


def _read_texts(urls: Sequence[str], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of CSV files, of the types that the first one seems to have: there is no schema."""
    types: dict[str, pa.DataType] = {}
    options = pa_csv.ReadOptions(use_threads=False)
    for url in urls:
        convert = pa_csv.ConvertOptions(column_types=types)
        with (
            csv.open_url(url) as file,
            pa_csv.open_csv(file, options, convert_options=convert) as reader,
        ):
            _check_columns(columns, reader.schema.names)
            types = types or {field.name: field.type for field in reader.schema}
            yield from (batch.select(list(columns)) for batch in reader)


def _check_columns(columns: Sequence[str], held: Sequence[str]) -> None:
    for name in columns:
        if name not in held:
            what, hint = "the original has no such column", "give the table that the job read"
            raise DataError(what, f"column {name!r}", hint)


def read_input(
    table: InputTable, columns: Sequence[str], n_rows: int, rng: Generator, draw: Draw = None
) -> pd.DataFrame:
    """Return a uniform sample of the rows of a job's input."""
    parts = (read_batches(each, list(columns), table.schema) for each in table.fragments)
    return sample_rows(chain.from_iterable(parts), n_rows, rng, draw)


def read_released(
    folder: Folder,
    shards: Sequence[str],
    columns: Sequence[str],
    n_rows: int,
    rng: Generator,
    draw: Draw = None,
) -> pd.DataFrame:
    """Return a uniform sample of a release's rows."""
    batches = chain.from_iterable(read_shard(folder, name, columns) for name in shards)
    return sample_rows(batches, n_rows, rng, draw)


def sample_rows(
    batches: Iterable[pa.RecordBatch],
    n_rows: int,
    rng: Generator,
    draw: Draw = None,
) -> pd.DataFrame:
    """Return a uniform sample of the rows, in their order: those with the smallest of keys in [0, 1), uniform ones or those that `draw` gives.

    Rows of one key are all in it or none, but at least those of one.
    """
    tables: list[pa.Table] = []
    keys: Any = np.zeros(0)
    limit = 1.0

    def cut() -> None:
        nonlocal tables, keys, limit
        least = np.nextafter(keys.min(), 1.0)  # a person may have more rows than are wanted
        limit = float(max(np.partition(keys, n_rows)[n_rows], least))
        chosen = keys < limit
        tables = [pa.concat_tables(tables).filter(pa.array(chosen)).combine_chunks()]
        keys = keys[chosen]

    for batch in batches:
        drawn = rng.random(batch.num_rows) if draw is None else draw(batch)
        chosen = drawn < limit
        tables.append(pa.Table.from_batches([batch]).filter(pa.array(chosen)))
        keys = np.concatenate([keys, drawn[chosen]])
        if len(keys) > 2 * n_rows:  # as often as memory asks for
            cut()
    if not len(keys):
        raise InputError("the table has no rows", "report", "give a table with rows")
    if len(keys) > n_rows:
        cut()
    rows = pa.concat_tables(tables)
    return pd.DataFrame(dict(zip(rows.column_names, map(_to_pandas, rows.columns), strict=True)))


def draw_by_person(secret: Words, batch: pa.RecordBatch) -> Floats:
    """Return a key of each row in [0, 1), uniform among persons and the same for all rows of one, whom the first column names."""
    texts = batch.column(0).cast(pa.string())
    words = as_words(texts, secret.tobytes())[:, None]
    keys: Floats = (siphash(words, *secret) >> np.uint64(11)).astype(float)
    return keys * 2.0**-53


def _to_pandas(column: pa.ChunkedArray) -> pd.Series:
    """Return a column, also of values that Python cannot hold: as times where it may, else as texts."""
    type_ = column.type
    try:
        plain = column.cast(pa.string()) if type_ == pa.time64("ns") else column
        # a column alone would be of another dtype of texts
        return pa.table({"values": plain}).to_pandas()["values"]
    except (pa.ArrowException, OverflowError, ValueError):
        if pa.types.is_date(type_):
            return column.cast(pa.timestamp("ms")).to_pandas()
        if pa.types.is_timestamp(type_):
            return column.cast(pa.int64()).cast(pa.timestamp(type_.unit)).to_pandas()
        return pd.Series([str(column.slice(row, 1)) for row in range(len(column))])


def code_sides(
    original: pd.DataFrame, released: pd.DataFrame, columns: Mapping[str, Mapping[str, Any]]
) -> tuple[Side, Side, tuple[str, ...]]:
    """Return both tables as codes and numbers, and the columns that are left out since they have too many categories.

    Values of the original outside a column's domain are brought to it as a release does: numbers to
    the nearest bound, others to a category of their own.
    """
    real, given = dict[str, NDArray[Any]](), dict[str, NDArray[Any]]()
    levels = dict[str, tuple[object, ...]]()
    dates, left_out = set(), []
    for name in map(str, original.columns):
        column, pair = columns[name], (original[name], released[name])
        if "unit" in column:
            pair = _count_units(name, pair, column["unit"])
        one, two = (None if "levels" in column else _to_numbers(values) for values in pair)
        if one is not None and two is not None:
            real[name], given[name] = one, two
            if column.get("bounds") is not None:  # in days, if the values are dates
                micro = microseconds_of(column.get("numbers"))
                if micro is None:  # a column of numbers, or a card of a version that did not tell
                    scale = DateScale.of(released[name])
                    micro = _DAY if scale is None else scale.microseconds
                low, high = (float(bound) * (micro / _DAY) for bound in column["bounds"])
                real[name] = np.clip(real[name], low, high)
            if not pd.api.types.is_numeric_dtype(pair[1]):
                dates.add(name)
            continue
        keys = [[level_key(value) for value in values] for values in pair]
        write = partial(_write, encoding=column.get("encoding", ""))
        listed = [*map(write, column.get("levels", ()))]
        known = dict.fromkeys(map(level_key, listed) if listed else keys[0] + keys[1])
        if len(known) > MOST_LEVELS:
            left_out.append(name)
            continue
        places = {key: place for place, key in enumerate(known)}
        for value, level in column.get("taxonomy", ()):
            places[level_key(write(value))] = places[level_key(write(level))]
        levels[name] = (*column.get("levels", known), "(outside its domain)")
        real[name], given[name] = (
            np.array([places.get(key, len(known)) for key in each], dtype=np.int64) for each in keys
        )
    if not real:
        hint = "compare a release with columns of numbers or of at most 1,000 categories"
        raise SpecError("no column can be compared", "report", hint)
    sides = [Side(columns=side, levels=levels, dates=frozenset(dates)) for side in (real, given)]
    return sides[0], sides[1], tuple(left_out)


def _count_units(
    name: str, pair: tuple[pd.Series, pd.Series], unit: Any
) -> tuple[pd.Series, pd.Series]:
    """Return the values of both sides as units, those of the original in the type of the released ones."""
    original, released = (pa.array(each, from_pandas=True) for each in pair)
    is_decimal = pa.types.is_decimal(released.type)  # of as many digits as its values have
    type_ = pa.decimal128(38, max(released.type.scale, 12)) if is_decimal else released.type
    try:
        arrays = [each.cast(type_) for each in (original, released)]
    except pa.ArrowException:
        what = "its values are not of the type of the released ones"
        hint = "give the table in the types of the job, as Parquet; or `--job`"
        raise DataError(what, f"column {name!r} of the original", hint) from None
    one, two = (coarsen(array, unit).to_pandas() for array in arrays)
    return one, two


def _write(level: Any, encoding: str) -> Any:
    """Return a level as the table has it, which may hold its bytes."""
    return level.encode(encoding) if encoding and level is not None else level


def _to_numbers(values: pd.Series) -> Floats | None:
    """Return numbers, or days since 1970, as float64; None of other values."""
    if pd.api.types.is_bool_dtype(values):
        return None
    if pd.api.types.is_numeric_dtype(values):
        numbers: Floats = values.to_numpy(float, na_value=np.nan)
        return numbers
    scale = DateScale.of(values)
    return None if scale is None else scale.to_numbers(values) * (scale.microseconds / _DAY)
