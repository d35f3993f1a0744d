"""Noisy tables of small domains, with noise from a seed."""

import itertools

import numpy as np

from dpdask.mechanisms.marginals.noise import MarginalNoise, measure
from dpdask.privacy.events import DiscreteGaussian
from dpdask.stats import Domain, MarginalCounts
from dpdask.streams import RunKey, stream

KEY = RunKey.insecure(21)


def keyed(name):
    """Return a stream of the tests' key."""
    return stream(KEY, "test", name)


def named(*sizes):
    """Return a domain with the attributes c0, c1, …"""
    return Domain(names=tuple(f"c{place}" for place in range(len(sizes))), sizes=sizes)


def lettered(*sizes):
    """Return a domain with the attributes a, b, …"""
    return Domain(names=tuple("abcdefgh"[: len(sizes)]), sizes=sizes)


def gaussian(sigma, count=1, sensitivity=1.0):
    """Return noise under add-remove."""
    return DiscreteGaussian(
        sigma=sigma, sensitivity=sensitivity, adjacency="add-remove", count=count
    )


def counts_of(domain, codes, **options):
    """Return the exact tables of codes of any integer type."""
    return MarginalCounts.of_codes(
        domain, np.ascontiguousarray(codes.astype(domain.code_dtype)), **options
    )


def noisy_of(domain, codes, sigma, *, name="noise", public=True, one_way=True, pairs=True, **more):
    """Return tables with Gaussian noise of one σ."""
    n = domain.n_attributes
    planned = MarginalNoise(
        one_way=gaussian(sigma, n) if one_way else None,
        pairs=gaussian(sigma, n * (n - 1) // 2) if pairs and n > 1 else None,
        **more,
    )
    return measure(counts_of(domain, codes), planned, n_rows_public=public, rng=keyed(name))


def variation(left, right):
    """Return the total variation between two tables of any totals."""
    return float(np.abs(left / left.sum() - right / right.sum()).sum() / 2)


def variations(of, other):
    """Return the total variation of each pair's tables."""
    pairs = itertools.combinations(of.domain.names, 2)
    return [variation(of.table(pair), other.table(pair)) for pair in pairs]
