"""Joint releases of a matrix of numbers at the level of mechanisms: by the chain of a hold-out, and by a private tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from dpdask.cells import Cells, cells
from dpdask.codec import Codec, LevelCodec
from dpdask.kernels import chain as kernel
from dpdask.mechanisms.dip.chain import ChainRelease
from dpdask.mechanisms.dip.columns import fit_ranks
from dpdask.mechanisms.dip.spec import ChannelKind, DipSpec
from dpdask.mechanisms.dip.tree import TreeMechanism, fit_tree, measure_tree
from dpdask.privacy import Budget
from dpdask.references.histogram import Tree
from dpdask.schema import Column, Schema
from dpdask.stats import MarginalCounts
from dpdask.stats.marginals import domain_of, encode
from dpdask.stats.records import numbers
from dpdask.streams import RunKey
from pipelines.papers.dip.releases import type_of

Array = Any
CHANNELS: tuple[ChannelKind, ...] = ("laplace", "optimal")
DELTA = 2.0**-30  # of the tree's tables; its rows need none


def as_batch(table: Array, codecs: Sequence[Codec]) -> pa.RecordBatch:
    arrays = [
        pa.array(column, type=pa.float64()).cast(type_of(codec))
        for column, codec in zip(table.T, codecs, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=[codec.name for codec in codecs])


def as_matrix(batch: pa.RecordBatch) -> Array:
    return np.column_stack(
        [column.to_numpy(zero_copy_only=False).astype(float) for column in batch.columns]
    )


def chain(
    table: Array,
    out: Array,
    codecs: Sequence[Codec],
    epsilon: float,
    channel: ChannelKind,
    order: Array,
    seed: int,
    place: str,
) -> Array:
    """Return rows released by the chain of the held-out ones, float64 array of shape (n, p).

    Parameters
    ----------
    table, out
        float64 array of shape (m + n, p), and which of its rows are held out.
    codecs
        One per column.
    epsilon
        Of a row; each column gets ε / p.
    channel
        `laplace` or `optimal`.
    order
        int array of shape (p,): which column is released first, and so on.
    seed, place
        Of the streams.
    """
    batch = as_batch(table[out], codecs)
    ordered = [codecs[column] for column in order]
    columns = [numbers(codec, batch.column(codec.name)) for codec in ordered]
    grids = [_grid(codec, column) for codec, column in zip(ordered, columns, strict=True)]
    one, no_group = np.ones(len(batch), dtype=np.int64), np.zeros(len(batch), dtype=np.int64)
    trie = kernel.build(columns, one, no_group, grids)
    mechanisms = dict.fromkeys(
        (codec.name for codec in ordered), _rank_mechanism(epsilon / len(codecs), channel)
    )
    release = ChainRelease(columns=mechanisms, trie=trie, groups=None, least_grade=0)
    by_name = {codec.name: codec for codec in codecs}
    return as_matrix(
        release.randomise(
            as_batch(table[~out], codecs), by_name, release.streams(RunKey.insecure(seed), place)
        )
    )


def _grid(codec: Codec, column: Array) -> tuple[Array, Array] | None:
    if isinstance(codec, LevelCodec):
        return None
    return kernel.grid(
        column,
        np.array(codec.atoms),
        codec.bounds[0] if codec.bounds else None,
        1.0 if codec.lattice else None,
    )


@lru_cache
def _rank_mechanism(epsilon: float, channel: ChannelKind) -> Any:
    """Return what randomises a column's rank: ε alone gives it, so that replicates need not make it again."""
    return fit_ranks({"x": epsilon}, channel)["x"]


def tree(
    rows: Array,
    codecs: Sequence[Codec],
    bins: Mapping[str, Any],
    epsilon: float,
    rng: np.random.Generator,
    seed: int,
    place: str,
) -> Array:
    """Return all rows released along the private tree of noisy tables of all of them, float64 array of shape (n, p).

    Parameters
    ----------
    rows
        float64 array of shape (n, p).
    codecs
        One per column; a line has bounds.
    bins
        For each line how it is cut.
    epsilon
        Of a row, tables and all; with δ = 2**-30 for the tables.
    rng
        For the tables' noise, so that experiments repeat.
    seed, place
        Of the streams.
    """
    batch, by_name = as_batch(rows, codecs), {codec.name: codec for codec in codecs}
    public: dict[str, Cells] = {
        codec.name: cells(codec, bins.get(codec.name, 2)) for codec in codecs
    }
    domain = domain_of(public)
    schema = Schema(
        columns=dict.fromkeys(domain.names, Column(role="privatise", kind="continuous"))
    )  # the budget is divided by names alone
    mechanism = TreeMechanism(
        spec=DipSpec(reference=Tree(share=0.5)),
        schema=schema,
        budget=Budget(epsilon=epsilon, delta=DELTA),
    )
    noisy = measure_tree(
        MarginalCounts.of_codes(domain, encode(batch, public, domain, None)),
        mechanism.noise,
        rng=rng,
    )
    release = fit_tree(noisy, public, mechanism.spending.row)
    released = release.randomise(batch, by_name, release.streams(RunKey.insecure(seed), place))
    return as_matrix(released.select([codec.name for codec in codecs]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdout:
    """Which rows are held out, in which order columns are released, and the rows released by each channel."""

    out: Array
    order: Array
    laplace: Array
    optimal: Array


def hold_out(
    table: Array,
    codecs: Sequence[Codec],
    fraction: float,
    epsilon: float,
    rng: np.random.Generator,
    seed: int,
    place: str,
) -> Holdout:
    """Hold out exactly a fraction of the rows, as in the paper, and release the others, their columns in a random order."""
    out = np.zeros(len(table), dtype=bool)
    out[rng.permutation(len(table))[: round(fraction * len(table))]] = True
    order = rng.permutation(len(codecs))
    laplace, optimal = (
        chain(table, out, codecs, epsilon, channel, order, seed, f"{place}/{channel}")
        for channel in CHANNELS
    )
    return Holdout(out=out, order=order, laplace=laplace, optimal=optimal)
