"""Fitting: from each column's reference, ε and kind of channel to the mechanism that is drawn from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BeforeValidator

from dpdask.channels import LevelChannel, calibrated, costs, laplace, optimal
from dpdask.codec import Codec, LevelCodec
from dpdask.errors import SpecError
from dpdask.kernels import bins as bins_kernel
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import rank as rank_kernel
from dpdask.mechanisms.dip.release import BinMechanism, ColumnMechanism, DipRelease, LevelMechanism, RankMechanism
from dpdask.references import Distribution, LevelDistribution, RankDistribution

ChannelKind = Literal["laplace", "laplace-calibrated", "optimal"]
N_BINS = 48


def _as_tuples(value: object) -> object:
    return tuple(tuple(row) if isinstance(row, list) else row for row in value) if isinstance(value, list) else value


Cost = Literal["value", "rank", "zero-one"] | Annotated[tuple[tuple[float, ...], ...], BeforeValidator(_as_tuples)]


def fit_dip(
    distributions: Mapping[str, Distribution],
    codecs: Mapping[str, Codec],
    epsilons: Mapping[str, float],
    channel: ChannelKind = "laplace",
    given_costs: Mapping[str, Cost] | None = None,
) -> DipRelease:
    """Return the release that spends each column's ε by a kind of channel.

    Parameters
    ----------
    distributions
        The reference of each privatised column.
    codecs
        Its codec.
    epsilons
        Its ε.
    channel
        `laplace`: as published. `laplace-calibrated`: the same noise, as small as ε allows. `optimal`: the invariant
        ε-private channel of least expected cost.
    given_costs
        What the optimal channel minimises, by column: `value` (squared differences; the default of discrete levels),
        `rank` (squared differences of ranks; that of continuous and mixed columns), `zero-one` (that of categories), or
        a matrix over the levels.

    Raises
    ------
    SpecError
        If ε is above what a continuous column's tables can resolve, or a cost or a size is not possible.
    """
    wanted = given_costs or {}
    check_costs(wanted, epsilons, channel)
    return DipRelease(
        columns={name: _fit(codecs[name], distributions[name], epsilon, channel, wanted.get(name)) for name, epsilon in epsilons.items()}
    )


def check_costs(given: Mapping[str, Cost], columns: Collection[str], channel: ChannelKind) -> None:
    """Check that costs are of privatised columns, and have a channel that minimises them.

    Raises
    ------
    SpecError
        If one is not, or has none.
    """
    for name in given:
        if name not in columns:
            raise SpecError("is not a privatised column", f"cost of {name!r}", "remove it")
        if channel != "optimal":
            raise SpecError("a cost belongs to the optimal channel", f"column {name!r}", "set mechanism.channel: optimal, or remove it")


def _fit(codec: Codec, distribution: Distribution, epsilon: float, channel: ChannelKind, cost: Cost | None) -> ColumnMechanism:
    if isinstance(distribution, LevelDistribution):
        assert isinstance(codec, LevelCodec)
        found = _level_channel(codec, distribution.probabilities, epsilon, channel, cost)
        thresholds, aliases = channel_kernel.alias_tables(found.weights)
        return LevelMechanism(channel=found, thresholds=thresholds, aliases=aliases)
    if channel == "optimal":
        return _binned(codec, distribution, epsilon, cost)
    try:
        noise = rank_kernel.rank_noise(epsilon)
    except ValueError as error:
        raise SpecError(str(error), f"column {codec.name!r}", "lower privacy.epsilon, or share it among more columns") from None
    thresholds, aliases = rank_kernel.digit_tables(noise)
    return RankMechanism(noise=noise, distribution=distribution, thresholds=thresholds, aliases=aliases)


def _level_channel(codec: LevelCodec, probabilities: NDArray[np.float64], epsilon: float, channel: ChannelKind, cost: Cost | None) -> LevelChannel:
    if channel == "laplace":
        return laplace(probabilities, epsilon, ordered=codec.ordered)
    if channel == "laplace-calibrated":
        return calibrated(probabilities, epsilon, ordered=codec.ordered)
    matrix = level_cost(codec, probabilities, cost or ("value" if codec.ordered else "zero-one"))
    try:
        return optimal(probabilities, epsilon, matrix, ordered=codec.ordered)
    except SpecError as error:
        raise error.at(f"column {codec.name!r}") from None


def level_cost(codec: LevelCodec, probabilities: NDArray[np.float64], cost: Cost) -> NDArray[np.float64]:
    """Return what each change of a level costs, float64 of shape (n_levels, n_levels).

    Raises
    ------
    SpecError
        If the levels have no such cost, or the declared matrix does not fit them.
    """
    if not isinstance(cost, str):
        return costs.declared(cost, codec.n_levels, f"cost of {codec.name!r}")
    if cost == "zero-one":
        return costs.zero_one(codec.n_levels)
    if not codec.ordered:
        raise SpecError(f"categories have no {cost}", f"cost of {codec.name!r}", "take zero-one, or a matrix")
    if cost == "rank":
        return costs.rank(probabilities)
    return _value_cost(codec.levels)


def _value_cost(levels: pa.Array) -> NDArray[np.float64]:
    """Return squared differences of level values; null is as far from every value as the farthest two are."""
    whole = levels.cast(pa.int32() if pa.types.is_date32(levels.type) else pa.int64()) if pa.types.is_temporal(levels.type) else levels
    numbers = pc.cast(whole, pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
    cost = costs.squared(np.asarray(numbers, dtype=np.float64))
    if levels.null_count:
        cost[0, :] = cost[:, 0] = cost[1:, 1:].max() if len(cost) > 2 else 1.0
        cost[0, 0] = 0.0
    return cost


def _binned(codec: Codec, distribution: RankDistribution, epsilon: float, cost: Cost | None) -> BinMechanism:
    if cost not in (None, "rank"):
        raise SpecError("the cost of a continuous or mixed column is that of ranks", f"cost of {codec.name!r}", "remove it")
    edges = bins_kernel.bin_edges(distribution.x, distribution.c, N_BINS)
    masses = np.diff(edges)
    try:
        channel = optimal(masses, epsilon, costs.rank(masses))
    except SpecError as error:
        raise error.at(f"column {codec.name!r}") from None
    thresholds, aliases = channel_kernel.alias_tables(channel.weights)
    return BinMechanism(channel=channel, edges=edges, distribution=distribution, thresholds=thresholds, aliases=aliases)
