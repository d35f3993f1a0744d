"""Releases of one column at the level of mechanisms: the same code that jobs run, without a table of files around it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from dpdask.cells import cells
from dpdask.codec import Codec, LevelCodec, ValueCodec
from dpdask.kernels import rank
from dpdask.mechanisms.dip.columns import ColumnMechanism, RankMechanism, fit_dip
from dpdask.mechanisms.dip.spec import ChannelKind
from dpdask.privacy.noise import perturb
from dpdask.references import Distribution, Known, RankDistribution, from_statistic
from dpdask.references.histogram import distribution_of, histogram_event
from dpdask.references.sources import KnownColumn
from dpdask.stats.statistic import CellCounts, LevelCounts, RankSummary
from dpdask.streams import RunKey, stream

Array = Any
NAME = "x"


def levels(values: Array) -> LevelCodec:
    """Return the codec of an ordered discrete column with these levels."""
    return LevelCodec(name=NAME, levels=pa.array(values), ordered=True)


def line(bounds: tuple[float, float] | None = None, *, whole: bool = False) -> ValueCodec:
    """Return the codec of a continuous column, of whole numbers or of real ones."""
    return ValueCodec(
        name=NAME, type=pa.int64() if whole else pa.float64(), bounds=bounds, atoms=(), nulls=False
    )


def known(codec: Codec, name: str, **parameters: float) -> Distribution:
    """Return a declared law of scipy.stats as a reference."""
    return Known(columns={NAME: KnownColumn(name=name, **parameters)}).distribution(codec)


def holdout(codec: Codec, values: Array) -> Distribution:
    """Return the distribution of held-out values as a reference."""
    kind = LevelCounts if isinstance(codec, LevelCodec) else RankSummary
    return from_statistic(codec, kind.of_batch(codec, pa.array(values, type=type_of(codec))))


def private(
    codec: Codec,
    values: Array,
    bins: int | Sequence[float],
    epsilon: float,
    rng: np.random.Generator,
) -> Distribution:
    """Return the noisy histogram of all values as a reference that costs `epsilon`; keyed noise, so that experiments repeat."""
    public = cells(codec, bins)
    counts = CellCounts.of_batch(public, pa.array(values, type=type_of(codec)))
    noisy = perturb(
        counts.counts[public.possible], histogram_event(epsilon, "replace-one"), rng=rng
    )
    return distribution_of(public, noisy, counts.n_rows)


def mechanism(
    codec: Codec, reference: Distribution, epsilon: float, channel: ChannelKind = "laplace"
) -> ColumnMechanism:
    """Return the fitted mechanism of one column; the tables of the rank noise, which ε alone gives, are made once."""
    if isinstance(reference, RankDistribution) and channel == "laplace":
        return RankMechanism(noise=_rank_noise(epsilon), distribution=reference)
    return fit_dip({NAME: reference}, {NAME: codec}, {NAME: epsilon}, channel).columns[NAME]


_rank_noise = lru_cache(rank.rank_noise)


def release(
    fitted: ColumnMechanism, codec: Codec, values: Array, seed: int, *place: object
) -> Array:
    """Return the released values of an array of any shape; the place names the stream."""
    rng = stream(RunKey.insecure(seed), f"dip/{NAME}", "/".join(map(str, place)))
    array = pa.array(np.ascontiguousarray(values).ravel(), type=type_of(codec))
    return (
        fitted.randomise(codec, array, rng).to_numpy(zero_copy_only=False).reshape(np.shape(values))
    )


def type_of(codec: Codec) -> pa.DataType:
    return codec.levels.type if isinstance(codec, LevelCodec) else codec.type
