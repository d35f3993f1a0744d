"""A table of a census's shape: many attributes of few levels, some strongly and some weakly dependent, with impossible pairs.

Rows are drawn in blocks of a fixed length, each from its own stream, a pure function of (seed, block number): memory does
not grow with the number of rows, and the split into files changes no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import numba
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray

from dpdask.errors import OutputError
from dpdask.simulate.output import SEEDS, check_local, check_ranges, claim, stage

CENSUS_ROWS: Final = 5_240_260
CENSUS_ATTRIBUTES: Final = 27
CENSUS_LEVELS: Final = 674

_BLOCK_ROWS: Final = 131_072  # a row group at most; part of what a seed means
_MAX_ATTRIBUTES = 10_000
_MAX_MEAN_LEVELS = 64  # the largest attribute then has some 350: int16 holds it, and the schema allows 2,048
_MAX_ROWS_PER_FILE = 1 << 26
_FEW_LEVELS = 12  # attributes with more levels are ages, years, counts: their order has a meaning
_SKEW = (0.3, 2.5)  # exponents of Zipf's law, from nearly even to nearly constant
_ONE = 1 << 32


class _Relation(Enum):
    """How an attribute depends on its parent: the range of the weight of dependence, and whether some pairs cannot occur."""

    INDEPENDENT = (0.0, 0.0, False)
    WEAK = (0.03, 0.1, False)
    STRONG = (0.5, 0.9, False)
    EXCLUSIVE = (0.2, 0.4, True)


# The relation of attribute i to its parent is number i mod 6; attribute 0 has no parent.
_RELATIONS = (_Relation.EXCLUSIVE, _Relation.STRONG, _Relation.WEAK, _Relation.EXCLUSIVE, _Relation.STRONG, _Relation.INDEPENDENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attribute:
    """One column: its parent, and its distribution given the parent's level.

    Attributes
    ----------
    parent
        The number of an earlier attribute; of attribute 0, itself.
    relation
        How it depends on the parent.
    edges
        uint64 array of shape (parent's levels, levels - 1): level k is drawn where edges[k - 1] <= u < edges[k] for u uniform on the
        whole numbers below 2**32. A level between equal edges cannot occur.
    """

    parent: int
    relation: _Relation
    edges: NDArray[np.uint64]


def _sizes(n_attributes: int, n_levels: int) -> list[int]:
    """Levels of each attribute: a geometric progression from 2, `n_levels` in sum, in an order that the arguments fix."""
    place = np.linspace(1, 0, n_attributes)
    low, high = 2.0, float(n_levels)
    sizes = np.full(n_attributes, 2)
    for _ in range(60):  # the largest size, by bisection
        middle = (low + high) / 2
        tried = np.floor(2 * (middle / 2) ** place).astype(np.int64)
        low, high, sizes = (middle, high, tried) if tried.sum() <= n_levels else (low, middle, sizes)
    sizes[: n_levels - int(sizes.sum())] += 1
    return [int(size) for size in Generator(PCG64(SeedSequence([n_attributes, n_levels]))).permutation(sizes)]


def _table(relation: _Relation, n_parent: int, base: NDArray[np.float64], rng: Generator) -> NDArray[np.float64]:
    """Probability of each level given each level of the parent: a distribution without the parent, mixed with a peak that moves with it."""
    least, most, exclusive = relation.value
    n = len(base)
    weight = rng.uniform(least, most)
    centre = (np.arange(n_parent) + 0.5) / n_parent * n
    peak = np.exp(-np.abs(np.arange(n) + 0.5 - centre[:, None]) / max(0.5, n / 20))
    table: NDArray[np.float64] = (1 - weight) * base + weight * peak / peak.sum(axis=1, keepdims=True)
    if exclusive:  # impossible pairs, as children are not married: the parent's first third of levels occurs with the first third only
        table[: -(-n_parent // 3), -(-n // 3) :] = 0
    table /= table.sum(axis=1, keepdims=True)
    return table


def _model(sizes: list[int], seed: int) -> list[_Attribute]:
    """The distribution of the table: a tree in which attribute i is a child of attribute (i - 1) // 2, whatever the number of rows."""
    attributes = []
    for number, (size, child) in enumerate(zip(sizes, SeedSequence(seed).spawn(len(sizes)), strict=True)):
        rng = Generator(PCG64(child))
        zipf = np.arange(1, size + 1) ** -rng.uniform(*_SKEW)
        base = rng.permutation(zipf / zipf.sum())
        parent = max(0, (number - 1) // 2)
        relation = _RELATIONS[number % len(_RELATIONS)] if number else _Relation.INDEPENDENT
        table = _table(relation, sizes[parent] if number else 1, base, rng)
        edges = np.rint(table.cumsum(axis=1)[:, :-1] * _ONE).astype(np.uint64)
        attributes.append(_Attribute(parent=parent, relation=relation, edges=edges))
    return attributes


def _draw_levels(uniform: NDArray[np.uint32], given: NDArray[np.integer], edges: NDArray[np.uint64], out: NDArray[np.integer]) -> None:
    for row in range(len(uniform)):
        u, line = uniform[row], given[row]
        low, n_left = 0, edges.shape[1]
        while n_left > 0:  # a search without a branch on u, which no processor could foresee
            half = (n_left + 1) // 2
            low += half * (edges[line, low + half - 1] <= u)
            n_left -= half
        out[row] = low


_draw: Callable[..., None] = numba.njit(nogil=True)(_draw_levels)


def _codes(model: list[_Attribute], n_rows: int, rng: Generator, type_: type[np.signedinteger]) -> NDArray[np.signedinteger]:
    """Levels of `n_rows` rows, of shape (attributes, rows)."""
    codes = np.zeros((len(model), n_rows), type_)
    for out, attribute in zip(codes, model, strict=True):
        uniform = rng.integers(0, _ONE - 1, n_rows, dtype=np.uint32, endpoint=True)
        _draw(uniform, codes[attribute.parent], attribute.edges, out)  # attribute 0 is its own parent, still all zeros
    return codes


def _blocks(model: list[_Attribute], schema: pa.Schema, n_rows: int, seed: int) -> Iterator[pa.Table]:
    """The rows, one block at a time."""
    for number, first in enumerate(range(0, n_rows, _BLOCK_ROWS)):
        rng = Generator(PCG64(SeedSequence([seed, number])))
        codes = _codes(model, min(_BLOCK_ROWS, n_rows - first), rng, schema.types[0].to_pandas_dtype())
        yield pa.table(list(codes), schema=schema)


def _schema_text(names: list[str], sizes: list[int]) -> str:
    """The schema of a job on the table, as YAML."""
    kinds = ("discrete" if size > _FEW_LEVELS else "categorical" for size in sizes)
    lines = (
        f"  {name}: {{role: privatise, kind: {kind}, levels: [{', '.join(map(str, range(size)))}]}}"
        for name, kind, size in zip(names, kinds, sizes, strict=True)
    )
    head = "# A simulated census: every attribute's levels are the whole numbers from 0."
    return "\n".join([head, "columns:", *lines, ""])


def _schema_place(out: str) -> Path:
    """Beside the folder, which a job reads whole: `<out>-schema.yaml`."""
    folder = Path(out).resolve()
    place = folder.with_name(f"{folder.name}-schema.yaml")
    if place.exists():
        raise OutputError("exists", str(place), "choose another folder, or delete it")
    return place


def simulate_census(
    out: str,
    *,
    n_rows: int,
    n_attributes: int = CENSUS_ATTRIBUTES,
    n_levels: int | None = None,
    seed: int = 0,
    rows_per_file: int = 8 * _BLOCK_ROWS,
    on_file: Callable[[int, int], None] | None = None,
) -> dict[str, int | str]:
    """Write a table of a census's shape, of any length, as a folder of Parquet files, and its schema beside the folder.

    Parameters
    ----------
    out
        Local folder, made with its parents; it must be missing or empty. Receives `people-00000.parquet`, ...: row groups of at
        most 131,072 rows, dictionary-encoded, not compressed, columns `a00`, `a01`, ... int8 (all int16 if one has more than
        128 levels), each 0..levels - 1. `<out>-schema.yaml` declares every one of them privatised; it must not exist.
    n_rows
        People, at least 1.
    n_attributes
        Columns, 1..10,000.
    n_levels
        Levels of all attributes together, 2 to 64 per attribute. By default in proportion to 674 for 27; 2 * n_attributes makes every
        attribute binary.
    seed
        0..2**64 - 1. It fixes the distribution of the table, and the rows. Equal arguments, equal rows, under one version of numpy;
        `rows_per_file` changes none.
    rows_per_file
        Rows of each file but the last, 1..2**26.
    on_file
        Called after each file with the number of files written and the number of files in total.

    Returns
    -------
    dict
        `rows`, `attributes`, `levels`, `files`, `bytes` (without the schema's), `schema` (its path).

    Raises
    ------
    UsageError
        A number is out of its range, or `out` is a URL.
    OutputError
        `out` is not empty, the schema's file exists, or one cannot be written; files already complete stay there.

    Privacy
    -------
    The table is drawn from an invented distribution, so it describes no person.

    Notes
    -----
    The numbers of levels are a geometric progression from 2 in shuffled order, fixed by n_attributes and n_levels: 2 to 97 for 27 and
    674. Attribute i > 0 is drawn given its parent, attribute (i - 1) // 2, by P(k | j) = (1 - w) base(k) + w peak(k, j): base is Zipf's
    distribution with an exponent of 0.3 to 2.5, its levels shuffled; peak falls on both sides of the level k that stands where j does. By i mod 6,
    w is 0.5 to 0.9 (1 and 4: strong), 0.03 to 0.1 (2: weak), 0 (5: independent), or 0.2 to 0.4 (0 and 3) with pairs that never
    occur: the first third of the parent's levels (rounded up) meets only the first third of the attribute's. A block of 131,072 rows
    takes 4 bytes of randomness per value, and its own bytes twice over in memory.

    References
    ----------
    H. J. Asghar, M. Ding, T. Rakotoarivelo, S. Mrabet, M. A. Kaafar (2020), Differentially Private Release of Datasets using Gaussian Copula,
    Journal of Privacy and Confidentiality 10(2): the size of its largest table, 5,240,260 rows of 27 attributes with 674 levels.
    """
    if n_levels is None:
        n_levels = max(2, n_attributes * CENSUS_LEVELS // CENSUS_ATTRIBUTES)
    check_ranges(
        {
            "n_rows": (n_rows, 1, 1 << 53),
            "n_attributes": (n_attributes, 1, _MAX_ATTRIBUTES),
            "n_levels": (n_levels, 2 * n_attributes, _MAX_MEAN_LEVELS * n_attributes),
            "seed": (seed, *SEEDS),
            "rows_per_file": (rows_per_file, 1, _MAX_ROWS_PER_FILE),
        }
    )
    check_local(out)
    place = _schema_place(out)
    folder = claim(out)
    sizes = _sizes(n_attributes, n_levels)
    digits = max(2, len(str(n_attributes - 1)))
    names = [f"a{number:0{digits}}" for number in range(n_attributes)]
    schema = pa.schema([(name, pa.int8() if max(sizes) <= 128 else pa.int16()) for name in names])
    n_files = -(-n_rows // rows_per_file)
    blocks = _blocks(_model(sizes, seed), schema, n_rows, seed)
    rest = next(blocks)
    bytes_ = 0
    for number in range(n_files):
        n_left = min(rows_per_file, n_rows - number * rows_per_file)
        path = folder / f"people-{number:05d}.parquet"
        # the dictionary packs a value into as many bits as its levels need: nothing is left to compress, and no file is read faster
        with stage(path) as temporary, pq.ParquetWriter(temporary, schema, compression="none", store_schema=False) as writer:
            while n_left:
                piece = rest[:n_left]
                writer.write_table(piece)
                n_left -= len(piece)
                rest = rest[len(piece) :] if len(piece) < len(rest) else next(blocks, rest)
        bytes_ += path.stat().st_size
        if on_file is not None:
            on_file(number + 1, n_files)
    with stage(place) as temporary:
        temporary.write_text(_schema_text(names, sizes), encoding="utf-8")
    return {"rows": n_rows, "attributes": n_attributes, "levels": n_levels, "files": n_files, "bytes": bytes_, "schema": str(place)}
