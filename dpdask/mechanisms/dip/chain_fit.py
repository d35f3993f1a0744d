"""Fitting a chain: from the reference's records, ε and kind of channel to the release that is drawn from."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from dpdask.channels import costs, optimal
from dpdask.codec import Codec, LevelCodec
from dpdask.errors import DataError, SpecError
from dpdask.kernels import chain as kernel
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import rank as rank_kernel
from dpdask.mechanisms.dip.chain import BinnedRanks, ChainRelease, Groups, LaplaceRanks, RankRandomiser
from dpdask.mechanisms.dip.fit import N_BINS, ChannelKind, Cost, check_costs
from dpdask.stats.records import Records

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]


def fit_chain(
    records: Records,
    codecs: Mapping[str, Codec],
    epsilons: Mapping[str, float],
    channel: ChannelKind = "laplace",
    *,
    order: tuple[str, ...],
    by: str | None = None,
    group_key: Words | None = None,
    min_rows: int = 2,
) -> ChainRelease:
    """Return the release that spends each column's ε on its rank given the columns before it.

    Parameters
    ----------
    records
        The reference's; their keys are the groups' hashes, where there are groups, and then the columns in the codecs'
        order (`stats.records.numbers`).
    codecs
        The codec of each privatised column.
    epsilons
        Its ε.
    channel
        `laplace` and `laplace-calibrated`: discrete Laplace noise on ranks, which spends all of ε. `optimal`: the
        invariant ε-private channel of least expected squared change of rank, on even bins of ranks.
    order
        The columns in the order of their release.
    by, group_key, min_rows
        The groups' column, the key of their hashes, and how many reference rows a group needs for a reference of its own.

    Raises
    ------
    SpecError
        If ε is above what the tables can resolve.
    DataError
        If the reference has fewer than 2 rows.
    """
    if records.n_rows < 2:
        raise DataError("the reference has fewer than 2 rows", "mechanism.reference", "enlarge its fraction, or the table it comes from")
    mechanisms = rank_mechanisms({name: epsilons[name] for name in order}, channel)
    places = {name: place + (by is not None) for place, name in enumerate(codecs)}
    columns = [np.ascontiguousarray(records.keys[:, places[name]]).view(np.float64) for name in order]
    grids = [_grid(codecs[name], column) for name, column in zip(order, columns, strict=True)]
    counts, roots, n_roots, groups = records.counts, np.zeros(len(records.counts), dtype=np.int64), 1, None
    if by is not None:
        assert group_key is not None
        groups, own = _groups(records, by, group_key, min_rows)
        chosen = np.concatenate([np.arange(len(roots)), np.flatnonzero(own)])
        columns, counts = [column[chosen] for column in columns], counts[chosen]
        roots, n_roots = np.concatenate([roots, own[own > 0]]), len(groups.hashes) + 1
    trie = kernel.build(columns, counts, roots, n_roots, grids)
    return ChainRelease(columns=mechanisms, trie=trie, groups=groups, least_grade=records.least)


def rank_mechanisms(epsilons: Mapping[str, float], channel: ChannelKind) -> dict[str, RankRandomiser]:
    """Return how the ranks of each column are randomised; it does not depend on any reference.

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
        masses = np.full(N_BINS, 1.0 / N_BINS)
        found = optimal(masses, epsilon, costs.rank(masses))
        thresholds, aliases = channel_kernel.alias_tables(found.weights)
        return BinnedRanks(channel=found, thresholds=thresholds, aliases=aliases)
    try:
        noise = rank_kernel.rank_noise(epsilon)
    except ValueError as error:
        raise SpecError(str(error), f"column {name!r}", "change privacy.epsilon, or its division by mechanism.weights") from None
    thresholds, aliases = rank_kernel.digit_tables(noise)
    return LaplaceRanks(noise=noise, thresholds=thresholds, aliases=aliases)


def check_rank_costs(given: Mapping[str, Cost], columns: Collection[str], channel: ChannelKind) -> None:
    """Check what the optimal channel is asked to minimise.

    Raises
    ------
    SpecError
        As `check_costs`; also if it is not the change of rank.
    """
    check_costs(given, columns, channel)
    for name, cost in given.items():
        if cost != "rank":
            raise SpecError("the cost of a chain's column is that of ranks", f"cost of {name!r}", "remove it")


def _grid(codec: Codec, column: Floats) -> tuple[Floats, Floats] | None:
    if isinstance(codec, LevelCodec):
        return None
    return kernel.grid(column, np.array(codec.atoms), codec.bounds[0] if codec.bounds else None, 1.0 if codec.lattice else None)


def _groups(records: Records, by: str, key: Words, min_rows: int) -> tuple[Groups, NDArray[np.int64]]:
    """Return the groups, and for each record the root of its group, 0 where it has none."""
    hashes, numbers = np.unique(records.keys[:, 0], return_inverse=True)
    sizes = np.bincount(numbers, weights=records.counts)
    large = sizes >= min_rows
    own = np.where(large, np.cumsum(large), 0)[numbers]
    groups = Groups(
        column=by,
        key=key,
        hashes=hashes[large],
        pooled_groups=float(1.0 - large.mean()),
        pooled_rows=float(sizes[~large].sum() / sizes.sum()),
    )
    return groups, own
