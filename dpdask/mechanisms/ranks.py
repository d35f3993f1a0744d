"""How a chain randomises the ranks of its columns: uniform ranks stay uniform."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dpdask.channels import LevelChannel, costs, optimal
from dpdask.errors import SpecError
from dpdask.kernels import chain as kernel
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import rank as rank_kernel
from dpdask.mechanisms.dip.spec import N_BINS, ChannelKind

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaplaceRanks:
    """Discrete Laplace noise on ranks; uniform ranks stay uniform.

    Attributes
    ----------
    noise
        The noise and its distribution.
    thresholds, aliases
        The tables that are drawn from.
    """

    noise: rank_kernel.RankNoise
    thresholds: Words
    aliases: NDArray[np.uint16]

    @property
    def epsilon(self) -> float:
        """An upper bound on ε*."""
        return self.noise.epsilon

    @property
    def n_words(self) -> int:
        """How many words a row consumes; the first one places it among its ties."""
        return rank_kernel.words_per_row(self.noise)

    def release(self, values: Floats, own: Ints, released: Ints, drawn: Words, trie: kernel.Trie, slots: kernel.Slots, *, lattice: bool) -> None:
        """Replace values by released ones; see `kernels.chain.release_rows`.

        Parameters
        ----------
        values, own, released, trie, slots, lattice
            As there.
        drawn
            Random words, uint64 of shape (n, n_words).
        """
        draws = rank_kernel.make_draws(self.noise, (self.thresholds, self.aliases))
        kernel.release_rows(values, own, released, drawn, draws, trie, slots, lattice)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BinnedRanks:
    """A channel on even bins of ranks; inside its bin a released rank is uniform.

    Attributes
    ----------
    channel
        The channel between bins.
    thresholds, aliases
        The tables that are drawn from.
    """

    channel: LevelChannel
    thresholds: Words
    aliases: NDArray[np.uint16]

    n_words: ClassVar[int] = 3  # the first one places a row among its ties

    @property
    def epsilon(self) -> float:
        """ε*, exact."""
        return self.channel.epsilon

    def disturb(self, ranks: Floats, drawn: Words) -> Floats:
        """Return ranks in (0, 1) for ranks in [0, 1].

        Parameters
        ----------
        ranks, drawn
            The ranks, float64 of shape (n,), and random words, uint64 of shape (n, n_words).
        """
        n_bins = len(self.channel.weights)
        bins = np.minimum((ranks * n_bins).astype(np.int32), n_bins - 1)
        released = channel_kernel.sample(bins, np.ascontiguousarray(drawn[:, 1]), self.thresholds, self.aliases)
        place = ((drawn[:, 2] >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        result: Floats = (released + place) / n_bins
        return result

    def release(self, values: Floats, own: Ints, released: Ints, drawn: Words, trie: kernel.Trie, slots: kernel.Slots, *, lattice: bool) -> None:
        """Replace values by released ones; see `LaplaceRanks.release`."""
        ranks, own[:] = kernel.ranks_of(values, own, drawn[:, 0], trie)
        values[:], released[:] = kernel.values_at(self.disturb(ranks, drawn), released, trie, slots, lattice)


RankRandomiser = LaplaceRanks | BinnedRanks


def rank_mechanisms(epsilons: Mapping[str, float], channel: ChannelKind) -> dict[str, RankRandomiser]:
    """Return how the ranks of each column are randomised; it does not depend on any reference.

    Parameters
    ----------
    epsilons, channel
        As for `fit_chain`.

    Raises
    ------
    SpecError
        If ε is above what the tables can resolve.
    """
    found: dict[float, RankRandomiser] = {}
    for name, epsilon in epsilons.items():
        if epsilon not in found:  # the tables depend on ε alone
            found[epsilon] = _rank_mechanism(name, epsilon, channel)
    return {name: found[epsilon] for name, epsilon in epsilons.items()}


def _rank_mechanism(name: str, epsilon: float, channel: ChannelKind) -> RankRandomiser:
    if channel == "optimal":
        return _bin_ranks(epsilon)
    try:
        noise = rank_kernel.rank_noise(epsilon)
    except ValueError as error:
        raise SpecError(str(error), f"column {name!r}", "change `epsilon`, or its division by `weights`") from None
    thresholds, aliases = rank_kernel.digit_tables(noise)
    return LaplaceRanks(noise=noise, thresholds=thresholds, aliases=aliases)


@lru_cache(maxsize=64)  # it follows from ε alone, and is kept when a run ends and forgets what follows from rows
def _bin_ranks(epsilon: float) -> BinnedRanks:
    masses = np.full(N_BINS, 1.0 / N_BINS)
    found = optimal(masses, epsilon, costs.compute_rank(masses))
    thresholds, aliases = channel_kernel.alias_tables(found.weights)
    return BinnedRanks(channel=found, thresholds=thresholds, aliases=aliases)


def read_randomiser(column: Mapping[str, Any], weights: Words) -> RankRandomiser:
    """Return how the ranks of a column are randomised, from what is kept of it.

    Parameters
    ----------
    column
        Its ε, or its noise.
    weights
        The weights of its channel, or of the noise's digits.
    """
    thresholds, aliases = channel_kernel.alias_tables(weights)
    if "noise" in column:
        return LaplaceRanks(noise=rank_kernel.RankNoise(weights=weights, **column["noise"]), thresholds=thresholds, aliases=aliases)
    return BinnedRanks(channel=LevelChannel(weights=weights, epsilon=column["epsilon"]), thresholds=thresholds, aliases=aliases)
