"""What a steward may expect of a release before its budget is spent: how much of a row's values is kept."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dpdask.channels import calibrate, costs, laplace, optimal
from dpdask.codec import Codec, LevelCodec
from dpdask.errors import SpecError
from dpdask.kernels import rank as rank_kernel
from dpdask.streams import RunKey, stream, words

LITTLE = 0.1

_N_RANKS = 48  # as the optimal channel cuts ranks
_MOST_LEVELS = 48  # beyond, the program takes longer than a plan should
_N_DRAWN = 2**13

Floats = NDArray[np.float64]


def estimate_kept(codec: Codec, epsilon: float, channel: str) -> float | None:
    """Return how much of a column's values a released row keeps, in [0, 1], if all levels or ranks are equally frequent.

    Parameters
    ----------
    codec
        The column's codec.
    epsilon
        What the column of a row may cost.
    channel
        The kind of the channel.

    Returns
    -------
    The correlation of the original and the released level or rank; of categories, the probability that a value is kept, beyond that
    of a guess. None if ε is out of the channel's range.
    """
    try:
        if isinstance(codec, LevelCodec):
            return 1.0 if codec.n_levels < 2 else _of_levels(codec.n_levels, epsilon, channel, codec.ordered)
        return _of_levels(_N_RANKS, epsilon, channel, True) if channel.startswith("optimal") else correlate_ranks(epsilon)
    except (SpecError, ValueError):
        return None


@functools.lru_cache(maxsize=256)
def _of_levels(n_levels: int, epsilon: float, channel: str, ordered: bool) -> float:
    even = np.full(n_levels, 1.0 / n_levels)
    if channel.startswith("optimal") and n_levels <= _MOST_LEVELS:
        cost = costs.compute_squared(np.arange(n_levels, dtype=np.float64)) if ordered else costs.compute_zero_one(n_levels)
        matrix = optimal(even, epsilon, cost, ordered=ordered).matrix
    else:
        matrix = (laplace if channel == "laplace" else calibrate)(even, epsilon, ordered=ordered).matrix
    if not ordered:
        return float((np.trace(matrix) / n_levels - 1.0 / n_levels) / (1.0 - 1.0 / n_levels))
    place = np.arange(n_levels) - (n_levels - 1) / 2.0
    return float(place @ matrix @ place / (place @ place))


@functools.lru_cache(maxsize=256)
def correlate_ranks(epsilon: float) -> float:
    """Return the correlation of even ranks with noisy ones, by 8,192 draws from a fixed stream.

    Raises
    ------
    ValueError
        If ε is out of the noise's range.
    """
    noise = rank_kernel.rank_noise(epsilon)
    drawn = words(stream(RunKey.insecure(0), "expectations/ranks", ""), _N_DRAWN, rank_kernel.words_per_row(noise))
    ranks = (np.arange(_N_DRAWN) + 0.5) / _N_DRAWN
    released = rank_kernel.disturb(ranks, drawn, noise, rank_kernel.digit_tables(noise))
    return float(np.corrcoef(ranks, released)[0, 1])


def describe_kept(codecs: Mapping[str, Codec], epsilons: Mapping[str, float], channel: str) -> tuple[str, ...]:
    """Return, for each column, a sentence on how much of it a released row keeps.

    Parameters
    ----------
    codecs
        The codec of each privatised column.
    epsilons
        What each column of a row may cost.
    channel
        The kind of the channels.
    """
    found = []
    for name, epsilon in epsilons.items():
        kept = estimate_kept(codecs[name], epsilon, channel)
        if kept is not None:
            category = isinstance(codecs[name], LevelCodec) and not codecs[name].ordered  # type: ignore[union-attr]  # a level codec
            what = "share of a row's values kept beyond chance" if category else "correlation of a row's value with its original"
            found.append(f"{name}: {what} about {kept:.2f}")
    return tuple(found)


def warn_of_little(codecs: Mapping[str, Codec], epsilons: Mapping[str, float], channel: str) -> tuple[str, ...]:
    """Return a warning that names the columns of which a released row keeps almost nothing; none if there are none.

    Parameters
    ----------
    codecs, epsilons, channel
        As for `describe_kept`.
    """
    little = [name for name, epsilon in epsilons.items() if (kept := estimate_kept(codecs[name], epsilon, channel)) is not None and kept < LITTLE]
    if not little:
        return ()
    named = ", ".join(little[:5]) + (f" and {len(little) - 5} more" if len(little) > 5 else "")
    what = f"A released row keeps almost nothing of {named} (less than {LITTLE:g} on a scale from 0 to 1): only the distribution is preserved"
    return (f"{what}. Privatise fewer columns, spend more ε, or release synthetic records.",)
