"""Pairs that are measured twice: chosen from noisy tables alone, paid for in full, averaged by their noise, and worth it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from dpdask.errors import InputError, InternalError, SpecError
from dpdask.mechanisms.copula.spec import CopulaMechanism, CopulaSpec, count_measured_again
from dpdask.mechanisms.marginals.denoise import average_pairs, choose_pairs, denoise
from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    NoisyMarginals,
    measure,
    measure_chosen,
    plan_noise,
)
from dpdask.mechanisms.mechanism import Columns
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget, UnitColumn
from dpdask.privacy.accountant import epsilon
from dpdask.privacy.events import Adjacency, DiscreteGaussian, DiscreteLaplace
from dpdask.schema import Schema
from dpdask.stats import Domain, MarginalCounts
from dpdask.streams import RunKey, stream

KEY = RunKey.insecure(23)
N = 40_000
NAMES = ("a", "b", "c", "d", "e", "f")
DOMAIN = Domain(names=NAMES, sizes=(6, 5, 4, 6, 5, 4))


def keyed(name: str) -> Any:
    return stream(KEY, "test", name)


def codes() -> np.ndarray:
    """b follows a, d follows c; e and f follow nothing."""
    rng = np.random.default_rng(3)
    found = np.stack([rng.integers(0, size, N) for size in DOMAIN.sizes])
    found[1] = np.where(rng.random(N) < 0.5, found[0] % 5, found[1])
    found[3] = np.where(rng.random(N) < 0.3, found[2], found[3])
    return found.astype(np.uint8)


@cache
def counted() -> MarginalCounts:
    return MarginalCounts.of_codes(DOMAIN, codes())


def gaussian(sigma: float, count: int = 1, adjacency: Adjacency = "add-remove") -> DiscreteGaussian:
    return DiscreteGaussian(
        sigma=sigma,
        sensitivity=1.0 if adjacency == "add-remove" else math.sqrt(2),
        adjacency=adjacency,
        count=count,
    )


def looked(sigma: float = 40.0, n_chosen: int = 4, again: float = 10.0) -> NoisyMarginals:
    planned = MarginalNoise(
        one_way=gaussian(sigma, 6), pairs=gaussian(sigma, 15), chosen=gaussian(again, n_chosen)
    )
    return measure(counted(), planned, n_rows_public=True, rng=keyed("first"))


def mechanism(n: int = 14, budget: Budget | None = None, **given: Any) -> CopulaMechanism:
    columns: dict[str, object] = {
        f"c{place}": {"role": "privatise", "kind": "discrete", "levels": [0, 1, 2]}
        for place in range(n)
    }
    found = bind(
        CopulaSpec(**given),
        Schema.from_dict({"columns": columns}),
        budget or Budget(epsilon=1.0, delta=2.0**-30),
    )
    assert isinstance(found, CopulaMechanism)
    return found


# ---- what is spent


@pytest.mark.few
@pytest.mark.parametrize(
    ("adjacency", "sensitivity"), [("add-remove", 1.0), ("replace-one", math.sqrt(2))]
)
@pytest.mark.parametrize("rows", [1, 7])
def test_the_second_look_is_an_event_of_its_own_and_everything_together_costs_epsilon(
    adjacency: Any, sensitivity: float, rows: int
) -> None:
    unit: Any = "row" if rows == 1 else UnitColumn(column="id", max_rows=rows)
    budget = Budget(epsilon=1.0, delta=2.0**-30, adjacency=adjacency, unit=unit)
    noise = plan_noise(budget, 14, n_chosen=27)
    assert noise.chosen is not None
    assert noise.pairs is not None
    assert [event.count for event in noise.event.events] == [14, 91, 27]
    assert all(
        event.sensitivity == pytest.approx(rows * sensitivity, rel=1e-12)
        for event in noise.event.events
    )
    assert all(event.sensitivity >= rows * sensitivity for event in noise.event.events)
    assert 0.999 < epsilon(noise.event, budget.delta) <= 1.0
    weights = np.array([event.count / event.sigma**2 for event in noise.event.events])
    assert weights[2] / weights.sum() == pytest.approx(0.4, rel=1e-6)  # of the inverse variance


def test_the_second_look_leaves_the_fine_counts_their_twentieth() -> None:
    noise = plan_noise(Budget(epsilon=1.0, delta=2.0**-30), 14, n_chosen=27, n_found=3)
    cells, one_way, pairs, chosen = (event.count / event.sigma**2 for event in noise.event.events)
    assert cells / (cells + one_way + pairs + chosen) == pytest.approx(0.05, rel=1e-6)
    assert chosen / (one_way + pairs + chosen) == pytest.approx(0.4, rel=1e-6)


@pytest.mark.parametrize(
    ("n", "delta", "wanted"),
    [(14, 1e-9, 27), (3, 1e-9, 1), (2, 1e-9, 0), (1, 1e-9, 0), (14, 0.0, 0), (2000, 1e-9, 1024)],
)
def test_the_number_follows_from_public_numbers(n: int, delta: float, wanted: int) -> None:
    assert count_measured_again(n, delta) == wanted


def test_the_number_can_be_given_and_is_said_in_the_plan() -> None:
    usual = mechanism().noise.chosen
    assert usual is not None
    assert usual.count == 27
    assert mechanism(measured_again=0).noise.chosen is None
    assert mechanism(measured_again=91).n_measured_again == 91
    laplace = mechanism(budget=Budget(epsilon=1.0), measured_again=5).noise.chosen
    assert isinstance(laplace, DiscreteLaplace)
    assert laplace.count == 5
    with pytest.raises(
        SpecError,
        match=r"`measured_again`: 92 pairs cannot be chosen, because the columns have 91; give at most 91",
    ):
        mechanism(measured_again=92)
    columns: Any = None
    assert (
        "add noise to every table, and a second time to those of 27 chosen pairs; fit"
        in mechanism().stages(columns, uncounted=False)[1]
    )
    assert "twice" not in mechanism(measured_again=0).stages(columns, uncounted=False)[1]


# ---- which pairs


def test_dependent_pairs_are_chosen_first() -> None:
    noisy = looked()
    chosen = choose_pairs(noisy, 4)
    assert set(chosen[:2]) == {("a", "b"), ("c", "d")}
    assert len(set(chosen)) == 4
    assert choose_pairs(noisy, 15)[:4] == chosen
    assert len(choose_pairs(noisy, 99)) == 15


def test_the_gain_is_the_departure_or_the_noise_whichever_is_less() -> None:
    noisy = looked()
    cleaned, gains = denoise(noisy), {}
    for a, b in itertools.combinations(range(6), 2):
        table = cleaned.table(a, b)
        departure = np.abs(
            table - np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
        ).sum()
        gains[NAMES[a], NAMES[b]] = min(departure, math.sqrt(2 / math.pi) * 40.0 * table.size)
    chosen = choose_pairs(noisy, 15)
    found = [gains[pair] for pair in chosen]
    assert found == pytest.approx(sorted(found, reverse=True))
    assert gains["a", "b"] == pytest.approx(
        math.sqrt(2 / math.pi) * 40.0 * 30
    )  # far more dependence than noise
    assert gains["e", "f"] < 0.3 * gains["a", "b"]


def test_more_tables_than_are_paid_for_are_refused() -> None:
    noisy = looked(n_chosen=1)
    with pytest.raises(InternalError, match="more tables are chosen than are paid for"):
        measure_chosen(noisy, counted(), choose_pairs(noisy, 2), rng=keyed("second"))
    none = replace(noisy, noise=replace(noisy.noise, chosen=None))
    with pytest.raises(InternalError, match="paid for"):
        measure_chosen(none, counted(), [("a", "b")], rng=keyed("second"))


# ---- what is made of it


def test_two_measurements_are_averaged_by_their_inverse_variances() -> None:
    noisy = measure_chosen(looked(), counted(), [("d", "a"), ("c", "e")], rng=keyed("second"))
    tables, deviations = average_pairs(noisy)
    starts = dict(
        zip(
            itertools.combinations(range(6), 2),
            np.cumsum([0, *(DOMAIN.sizes[a] * DOMAIN.sizes[b] for a, b in _pairs())]),
            strict=False,
        )
    )
    first = replace(noisy, cliques={}).table(("a", "d"))
    wanted = (first / 40.0**2 + noisy.cliques["d", "a"].T / 10.0**2) / (1 / 40.0**2 + 1 / 10.0**2)
    place = starts[0, 3]
    np.testing.assert_allclose(tables[place : place + 36].reshape(6, 6), wanted)
    spread = dict(zip(_pairs(), deviations, strict=True))
    assert (
        spread[0, 3] == spread[2, 4] == pytest.approx((1 / 40.0**2 + 1 / 10.0**2) ** -0.5, rel=1e-6)
    )
    assert spread[0, 1] == pytest.approx(40.0, rel=1e-6)
    np.testing.assert_array_equal(tables[: starts[0, 3]], noisy.pairs[: starts[0, 3]])


def _pairs() -> list[tuple[int, int]]:
    return list(itertools.combinations(range(6), 2))


def test_pairs_that_were_only_chosen_are_denoised_too() -> None:
    planned = MarginalNoise(one_way=gaussian(5.0, 6), pairs=None, chosen=gaussian(5.0, 1))
    noisy = measure_chosen(
        measure(counted(), planned, n_rows_public=True, rng=keyed("first")),
        counted(),
        [("a", "b")],
        rng=keyed("second"),
    )
    cleaned = denoise(noisy)
    assert [len(group.first) for group in cleaned.groups] == [1]
    assert np.abs(cleaned.table(0, 1) - counted().table(("a", "b"))).sum() < 300


def test_the_second_look_has_noise_of_its_own() -> None:
    spec = mechanism(6)
    rng = np.random.default_rng(1)
    domain = Domain(names=tuple(f"c{place}" for place in range(6)), sizes=(3,) * 6)
    counts = MarginalCounts.of_codes(domain, rng.integers(0, 3, (6, 5000)).astype(np.uint8))
    columns: Any = Columns(types=None, codecs={})  # type: ignore[arg-type]
    streams: list[str] = []
    noisy = spec.draw(counts, columns, lambda name: streams.append(name) or stream(KEY, name, ""))
    assert streams == ["marginals/noise", "marginals/noise/again"]
    assert len(noisy.chosen) == count_measured_again(6, 1e-9) == 4
    pair = noisy.chosen[0]
    first = replace(noisy, cliques={}).table(pair) - counts.table(pair)
    second = noisy.cliques[pair] - counts.table(pair)
    assert (first != 0).any()
    assert (second != 0).any()
    ratios = {
        round(float(x / y), 3) for x, y in zip(first.ravel(), second.ravel(), strict=True) if y
    }
    assert len(ratios) > 3  # not one draw at two scales
    assert (
        second.ravel() != (noisy.one_way[:9] - counts.one_way[:9])
    ).any()  # nor the beginning of the first draw


def test_a_second_look_makes_the_worst_tables_better() -> None:
    """Both spend the same budget; with power in both directions, since the pairs that are not chosen get worse."""
    budget, worst, rest = Budget(epsilon=0.3, delta=2.0**-30, adjacency="add-remove"), [], []
    for seed in range(5):
        errors = []
        for n_chosen in (0, 4):
            noisy = measure(
                counted(),
                plan_noise(budget, 6, n_chosen=n_chosen),
                n_rows_public=True,
                rng=keyed(f"{seed}"),
            )
            if n_chosen:
                noisy = measure_chosen(
                    noisy, counted(), choose_pairs(noisy, n_chosen), rng=keyed(f"{seed} again")
                )
            tables, _ = average_pairs(noisy)
            parts = np.split(
                np.abs(tables - counted().pairs),
                np.cumsum([DOMAIN.sizes[a] * DOMAIN.sizes[b] for a, b in _pairs()])[:-1],
            )
            errors.append(
                {pair: float(part.mean()) for pair, part in zip(_pairs(), parts, strict=True)}
            )
        once, twice = errors
        worst.append(twice[0, 1] / once[0, 1])
        rest.append(twice[4, 5] / once[4, 5])
    assert np.median(worst) < 0.8
    assert np.median(rest) > 1.1


# ---- what is kept


def test_kept_tables_say_what_was_chosen_and_no_more_than_was_paid_for() -> None:
    noisy = measure_chosen(
        looked(n_chosen=2), counted(), [("d", "a"), ("c", "e")], rng=keyed("second")
    )
    again = NoisyMarginals.from_bytes(noisy.to_bytes(), "tables")
    assert again.chosen == (("d", "a"), ("c", "e"))
    np.testing.assert_array_equal(again.table(("a", "d")), noisy.cliques["d", "a"].T)
    assert again.margin(("a", "d")) == noisy.margin(("d", "a")) < again.margin(("a", "b"))
    again.check(DOMAIN, noisy.noise)
    cheaper = replace(noisy, noise=replace(noisy.noise, chosen=gaussian(10.0, 1)))
    with pytest.raises(InputError):
        NoisyMarginals.from_bytes(cheaper.to_bytes(), "tables")
    with pytest.raises(InputError):
        NoisyMarginals.from_bytes(
            replace(
                noisy, noise=replace(noisy.noise, chosen=gaussian(10.0, 9)), cliques=_twice(noisy)
            ).to_bytes(),
            "tables",
        )


def _twice(noisy: NoisyMarginals) -> dict[tuple[str, ...], Any]:
    return {**noisy.cliques, ("a", "d"): noisy.cliques["d", "a"].T}
