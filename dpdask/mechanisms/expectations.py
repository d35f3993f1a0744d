"""What a steward may expect of a release before its budget is spent: how much of a row's values is kept, and how noisy its reference is."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dpdask.cells import Cells
from dpdask.channels import calibrate, costs, laplace, optimal
from dpdask.codec import Codec, LevelCodec
from dpdask.errors import SpecError, list_names
from dpdask.kernels import rank as rank_kernel
from dpdask.privacy.budget import UnitColumn
from dpdask.privacy.events import DiscreteLaplace
from dpdask.privacy.rounding import write_digits
from dpdask.references.bins import Bins
from dpdask.streams import RunKey, stream, words

LITTLE = 0.1
TAILS = "quantiles can be estimated; under wide bounds, the mean of a heavy tail cannot"

_WIDE = 0.06  # of the bounds
_SHARED, _CERTAIN, _MANY_SHARED = 0.005, 0.05, 0.05  # of the rows: at one value that may be shared, or must be, and at all such values together
_FAR = 0.01  # of the range of nine tenths of the rows: a gap that matters
_MUCH_NOISE = 0.02  # of the rows: then a count of a twentieth of them is off by two fifths

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
            what = "share of a row's values kept beyond chance" if category else "rank correlation of a released value with its original"
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
    what = f"A released row keeps almost nothing of {list_names(little, 5)} (less than {LITTLE:g} on a scale from 0 to 1)"
    return (f"{what}. Privatise fewer columns, spend more ε, or release synthetic records.",)


def warn_of_noisy_references(measurements: Mapping[str, DiscreteLaplace], n_rows: int | None) -> tuple[str, ...]:
    """Return a warning that names the columns whose distribution is mostly noise; none if there are none, or the rows are not counted."""
    shares = {name: math.sqrt(2.0) * event.scale / n_rows for name, event in measurements.items()} if n_rows else {}
    noisy = {name: share for name, share in shares.items() if share > _MUCH_NOISE}
    if not noisy:
        return ()
    share = write_digits(100 * max(noisy.values()))
    what = f"The noise of a count is at least {share} % of the rows that are counted for the reference of {list_names(list(noisy), 5)}"
    return (f"{what}: the distribution will not be kept. Privatise fewer columns, spend more ε, or raise `reference.share`.",)


def describe_needed_rows(measurements: Mapping[str, DiscreteLaplace], unit: UnitColumn) -> tuple[str, ...]:
    """Return how many rows of a table with a unit must be counted for `warn_of_noisy_references` to be silent.

    How many rows the bound on a unit's rows leaves is not known before they are counted.
    """
    if not measurements:
        return ()
    noise = max(math.sqrt(2.0) * event.scale for event in measurements.values())
    n_rows = write_digits(noise / _MUCH_NOISE)
    left = f"at most {unit.max_rows:,} rows of each {unit.column!r} are counted"
    return (f"{left}; with fewer than about {n_rows} of them, the distribution will not be kept",)


def describe_wide_cells(columns: Mapping[str, Cells], bins: Bins) -> tuple[str, ...]:
    """Return a sentence that names the columns with few cells of equal width; none if there are none.

    Parameters
    ----------
    columns
        The cells of each column.
    bins
        How continuous and mixed columns are cut.
    """
    wide = {}
    for name, column in columns.items():
        declared = bins.get(name) if isinstance(bins, Mapping) else bins
        if isinstance(declared, int) and not isinstance(column.codec, LevelCodec):
            width, single = float(np.diff(column.edges).max()), float(column.codec.lattice)
            share = width / float(np.ptp(column.edges))
            if width > single and share > _WIDE:
                wide[name] = share
    if not wide:
        return ()
    what = (
        f"{list_names(list(wide), 5)}: cells are up to {write_digits(100 * max(wide.values()))} % of the bounds wide, "
        "and values inside a cell are not told apart"
    )
    return (f"{what}; `bins: adaptive` finds cells where the rows are",)


def describe_spread(codecs: Mapping[str, Codec]) -> tuple[str, ...]:
    """Return what becomes of rows that share a number, where the reference is made of rows; nothing if no column holds numbers without levels."""
    names = [name for name, codec in codecs.items() if not isinstance(codec, LevelCodec)]
    return (f"{list_names(names, 5)}: rows that share a value are released over the gap below it, unless it is one of the `atoms`",) if names else ()


def warn_of_spread(name: str, keys: Floats, lows: Floats, weights: Floats, *, lattice: bool) -> tuple[str, ...]:
    """Return a warning if many rows of the reference share a few values far from the next smaller one: such values come out spread over that gap.

    Parameters
    ----------
    name
        The column's name.
    keys, lows
        float64 arrays of one length, keys increasing: rows at a key come out in (low, key], or at the key where both are equal. -inf is null.
    weights
        float64 array: how many rows of the reference lie at each key.
    lattice
        Whether the column holds whole numbers.
    """
    here = np.isfinite(keys) & (weights > 0.0)
    keys, lows, weights = keys[here], lows[here], weights[here]
    if not len(keys):
        return ()
    shares = weights / weights.sum()
    ends = keys[np.minimum(np.searchsorted(np.cumsum(shares), [0.05, 0.95]), len(keys) - 1)]
    gaps = keys - lows
    shared = (shares >= _CERTAIN) | (shares >= max(_SHARED, 10.0 * shares.min()))  # of few rows, each has a large share
    wide = shared & (gaps > max(_FAR * (ends[1] - ends[0]), 1.0 if lattice else 0.0))
    if shares[wide].sum() < _MANY_SHARED:
        return ()
    what = "many rows of the reference share values, which are released spread over the gaps below them"
    return (f"column {name!r}: {what}: means, quantiles and counts are off; name such values as `atoms` of a `mixed` column, or declare levels",)
