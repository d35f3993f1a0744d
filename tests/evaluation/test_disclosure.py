"""Attacks of `dpdask report` find copies, find nothing in a fresh sample, and stay within what ε allows; channels are used as they are known."""

import numpy as np
import pytest
from numpy.random import default_rng
from scipy import stats

from dpdask.evaluation.disclosure import find_power, measure_disclosure
from dpdask.evaluation.samples import Side
from dpdask.mechanisms.card import Card, ColumnPart, CoveredRows, Guarantee
from dpdask.privacy import attacker_power

N = 3_000
LEVELS = {"a": (*range(6), "(outside)"), "b": (*range(4), "(outside)")}


def make_card(epsilon=1.0, *, adjacency="replace-one", kept=(), channels=None, uncovered=0.0):
    """A card as far as attacks read it."""
    columns = {
        name: ColumnPart.model_validate(
            {"role": "kept" if name in kept else "privatised", **(channels or {}).get(name, {})}
        )
        for name in ("a", "b", "x", "id")
    }
    covered = CoveredRows(who="some", fraction=uncovered, of="rows")
    guarantee = Guarantee.model_construct(
        epsilon=epsilon, delta=0, adjacency=adjacency, unprotected=covered
    )
    return Card.model_construct(columns=columns, guarantee=guarantee)


def people(rng, n=N, first=0, names=("a", "b", "x")):
    a = rng.choice(6, n, p=[0.3, 0.25, 0.2, 0.15, 0.06, 0.04])
    columns = {
        "a": a,
        "b": np.where(rng.random(n) < 0.6, a % 4, rng.integers(0, 4, n)),
        "x": np.where(rng.random(n) < 0.05, np.nan, a + rng.normal(size=n)),
        "id": np.arange(first, first + n, dtype=float),
    }
    return Side(columns={name: columns[name] for name in names}, levels=LEVELS)


def test_a_release_that_copies_is_found_out():
    rng = default_rng(1)
    table, outside = people(rng), people(rng)
    found = measure_disclosure(table, table.take(rng.permutation(N)), outside, make_card(), rng)
    assert found.membership.name == "presence of a record"
    assert found.membership.members.value > 0.9  # numbers tell records apart
    assert found.membership.without.value < 0.12
    assert found.membership.allowed == attacker_power(1.0, 0.0)  # which no private release exceeds
    for attack in found.attributes:  # records are found by the other columns, and the rest is read
        slack = 4 * (attack.members.standard_error + attack.outsiders.standard_error)
        assert attack.members.value > attack.outsiders.value + slack or attack.name == "x"
        assert attack.allowed == attacker_power(1.0, 0.0, attack.outsiders.value)


def test_a_fresh_sample_discloses_nobody():
    rng = default_rng(2)
    powers = []
    for _ in range(8):
        found = measure_disclosure(people(rng), people(rng), people(rng), make_card(), rng)
        powers += [found.membership.members, found.membership.without]
        for attack in found.attributes:
            error = np.hypot(attack.members.standard_error, attack.outsiders.standard_error)
            assert abs(attack.members.value - attack.outsiders.value) < 5 * error
            assert attack.members.value <= attack.allowed + 5 * error
    off = [(each.value - 0.05) / each.standard_error for each in powers]
    assert abs(np.mean(off)) < 4 / np.sqrt(len(off))
    assert np.std(off) < 1.8  # the standard errors are not too small
    dependent = {each.name: each for each in found.attributes}
    assert dependent["b"].members.value > dependent["b"].guess + 0.1  # which is no disclosure
    assert dependent["b"].outsiders.value > dependent["b"].guess + 0.1


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_values_of_rows_are_tested_by_the_channel_to_what_epsilon_allows(epsilon):
    """Randomised response with a known identity: the likelihood ratio is the best test."""
    rng = default_rng(3)
    n = 4_000
    keep = np.exp(epsilon) / (np.exp(epsilon) + 5)
    channel = np.full((6, 6), (1 - keep) / 5) + np.eye(6) * (keep - (1 - keep) / 5)
    table = people(rng, n, names=("a", "id"))
    moved = (table.columns["a"] + rng.integers(1, 6, n)) % 6
    drawn = np.where(rng.random(n) < keep, table.columns["a"], moved)
    released = Side(columns={**table.columns, "a": drawn}, levels=LEVELS).take(rng.permutation(n))
    card = make_card(epsilon, kept=("id",), channels={"a": {"channel": channel.tolist()}})
    powers = []
    for seed in range(10):
        again = default_rng(seed)
        outside = people(rng, names=("a", "id"))
        found = measure_disclosure(table, released, outside, card, again)
        assert found.by_channel
        assert found.membership.name == "values of a row"
        assert found.membership.without.value < 0.15
        [attack] = found.attributes
        assert attack.members.value == pytest.approx(keep, abs=5 * attack.members.standard_error)
        assert attack.members.value <= attack.allowed + 5 * attack.members.standard_error
        powers.append(found.membership.members)
    mean, error = (
        np.mean([each.value for each in powers]),
        np.mean([each.standard_error for each in powers]) / np.sqrt(len(powers)),
    )
    assert mean > 0.05 + 3 * error
    assert mean <= attacker_power(epsilon, 0.0) + 5 * error
    # without the channel, the same attack by distance finds less
    blind = measure_disclosure(table, released, outside, make_card(epsilon, kept=("id",)), rng)
    assert not blind.by_channel


def test_numbers_that_were_moved_by_their_ranks_are_weighed_too():
    rng = default_rng(4)
    table = people(rng, names=("x", "id"))
    ranks = np.argsort(np.argsort(table.columns["x"])) / N
    near = np.clip(ranks + rng.laplace(size=N) / 30.0, 0.0, 1.0 - 1e-9)
    known = np.sort(table.columns["x"][~np.isnan(table.columns["x"])])
    released = Side(
        columns={**table.columns, "x": known[(near * len(known)).astype(int)]}, levels=LEVELS
    )
    channels = {"x": {"alpha_log": -30.0 / 65_536, "ranks": 65_536}}
    card = make_card(30.0, kept=("id",), channels=channels)
    found = measure_disclosure(table, released, people(rng, names=("x", "id")), card, rng)
    assert found.by_channel
    assert found.membership.members.value > 0.25
    card = make_card(30.0, kept=("id",), channels={"x": {**channels["x"], "alpha_log": 0.0}})
    blind = measure_disclosure(table, released, people(rng, names=("x", "id")), card, rng)
    assert blind.membership.members.value < 0.12  # a channel that tells nothing


def test_power_is_that_of_the_best_threshold():
    rng = default_rng(5)
    found = [
        find_power([rng.normal(2.0, 1.0, 400), rng.normal(size=400)], rng).value for _ in range(200)
    ]
    assert np.mean(found) == pytest.approx(stats.norm.sf(stats.norm.isf(0.05) - 2.0), abs=0.01)
    ties = [find_power([np.zeros(400), np.zeros(400)], rng).value for _ in range(200)]
    assert np.mean(ties) == pytest.approx(0.05, abs=0.005)


def test_rows_that_no_epsilon_covers_may_be_found_out():
    rng = default_rng(6)
    card = make_card(0.1, uncovered=0.25, adjacency="add-remove")
    found = measure_disclosure(people(rng), people(rng), people(rng), card, rng)
    assert found.uncovered == 0.25
    assert found.membership.allowed == 0.75 * attacker_power(0.1, 0.0) + 0.25
    for attack in found.attributes:  # values count twice
        control = attack.outsiders.value
        assert attack.allowed == 0.75 * attacker_power(0.2, 0.0, control) + 0.25
    alone = measure_disclosure(people(rng), people(rng), None, card, rng)
    assert alone.membership is None
    assert all(each.outsiders is each.allowed is None for each in alone.attributes)
