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


def levels(values: Any, name: str = NAME, *, ordered: bool = True) -> LevelCodec:
    """Return the codec of a discrete column with these levels."""
    return LevelCodec(name=name, levels=pa.array(values), ordered=ordered)


def line(
    bounds: tuple[float, float] | None = None, name: str = NAME, *, whole: bool = False
) -> ValueCodec:
    """Return the codec of a continuous column, of whole numbers or of real ones."""
    return ValueCodec(
        name=name, type=pa.int64() if whole else pa.float64(), bounds=bounds, atoms=(), nulls=False
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


def by_private_histogram(
    codec: Codec,
    values: Array,
    bins: int | Sequence[float],
    epsilon: float,
    rng: np.random.Generator,
    seed: int,
    *place: object,
    share: float = 0.5,
) -> Array:
    """Return values released by their own noisy histogram, which takes a share of ε; the rest randomises the rows."""
    reference = private(codec, values, bins, share * epsilon, rng)
    fitted = mechanism(codec, reference, (1 - share) * epsilon)
    return release(fitted, codec, values, seed, *place)


def of_law(
    law: Any,
    samples: Array,
    codec: Codec,
    of_histogram: Codec,
    epsilon: float,
    rng: np.random.Generator,
    seed: int,
    *place: object,
) -> dict[str, Array]:
    """Return the samples of a law as DIP releases them: by the law itself, by either channel, and by noisy histograms.

    The law is a table's, with scipy's name and parameters; every sample is released by its own histogram, whose codec
    and first values of cells are public.
    """
    reference = known(codec, law.name, **law.parameters)

    def by_law(channel: ChannelKind) -> Array:
        fitted = mechanism(codec, reference, epsilon, channel)
        return release(fitted, codec, samples, seed, *place, epsilon, channel)

    by_histogram = [
        by_private_histogram(
            of_histogram, sample, law.cuts, epsilon, rng, seed, law.label, epsilon, "private", k
        )
        for k, sample in enumerate(samples)
    ]
    return {
        "DIP": by_law("laplace"),
        "optimal DIP": by_law("optimal"),
        "private DIP": np.array(by_histogram),
    }


def type_of(codec: Codec) -> pa.DataType:
    return codec.levels.type if isinstance(codec, LevelCodec) else codec.type
