"""Tables chosen from noisy ones: pairs that are measured twice, and three-way tables.

What is chosen is decided by noise that is paid for, and improves what pairs do not show.
"""

import datetime as dt
import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from e2e.helpers import (
    MIXED_SCHEMA,
    continuous,
    digests,
    discrete,
    lake,
    run_here,
    schema_of,
    write_job,
)
from mechanisms.contract import killed_at
from mechanisms.noisy import KEY, gaussian, keyed
from numpy.random import default_rng

import dpdask
from dpdask.codec import LevelCodec
from dpdask.engine import fit as fit_module
from dpdask.errors import InputError, InternalError, SpecError
from dpdask.mechanisms import expectations as cell_search
from dpdask.mechanisms.copula import fit as triples_module
from dpdask.mechanisms.copula.fit import (
    MOST_CANDIDATES,
    choose_pairs,
    choose_triples,
    count_candidates,
    list_candidates,
)
from dpdask.mechanisms.copula.model import MOST_CELLS
from dpdask.mechanisms.copula.spec import CopulaSpec, count_measured_again
from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    NoisyMarginals,
    average_pairs,
    denoise,
    measure,
    measure_chosen,
    plan_noise,
)
from dpdask.mechanisms.mechanism import Columns
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget, UnitColumn, noise
from dpdask.privacy.events import DiscreteGaussian, DiscreteLaplace, epsilon
from dpdask.schema import Schema
from dpdask.stats import Domain, MarginalCounts
from dpdask.streams import stream

BUDGET = Budget(epsilon=1.0, delta=2.0**-30)
NO_COLUMNS = Columns(types=None, codecs={})


def even_schema(n, levels=2):
    column = discrete(list(range(levels)))
    return schema_of({f"c{place}": column for place in range(n)})


def mechanism(n=14, budget=BUDGET, **given):
    return bind(CopulaSpec(**given), even_schema(n), budget)


# ---- what is spent


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("adjacency", "step", "rows", "n_found"),
    [("add-remove", 1.0, 1, 2), ("replace-one", 2.0, 1, 0), ("replace-one", 2.0, 7, 2)],
)
def test_each_part_takes_its_share_and_all_together_cost_epsilon(adjacency, step, rows, n_found):
    unit = "row" if rows == 1 else UnitColumn(column="id", max_rows=rows)
    budget = Budget(epsilon=1.0, delta=2.0**-30, adjacency=adjacency, unit=unit)
    counts = {"n_chosen": 27, "n_triples": 14, "n_scores": 78, "n_found": n_found}
    planned = plan_noise(budget, 14, **counts)
    assert 0.999 < epsilon(planned.event, budget.delta) <= 1.0
    parts = ("one_way", "pairs", "chosen", "scores", "triples")
    events = {name: getattr(planned, name) for name in parts}
    assert [event.count for event in events.values()] == [14, 91, 27, 1, 14]
    for name, event in events.items():
        # a row changes one cell of a table, and each of 78 scores by up to 1
        needed = rows * (step * math.sqrt(78) if name == "scores" else math.sqrt(step))
        assert needed <= event.sensitivity == pytest.approx(needed, rel=1e-12)
    cost = {
        name: event.count * (event.sensitivity / event.sigma) ** 2 for name, event in events.items()
    }
    total = sum(
        event.count * (event.sensitivity / event.sigma) ** 2 for event in planned.event.events
    )
    rest = sum(cost.values())
    assert (total - rest) / total == pytest.approx(0.05 if n_found else 0.0, rel=1e-6, abs=1e-9)
    assert cost["scores"] / rest == pytest.approx(0.05, rel=1e-6)
    assert cost["triples"] / rest == pytest.approx(0.15, rel=1e-6)
    two_way = cost["one_way"] + cost["pairs"] + cost["chosen"]
    assert cost["chosen"] / two_way == pytest.approx(0.4, rel=1e-6)


@pytest.mark.parametrize(
    ("adjacency", "total", "n", "n_triples"),
    [
        ("add-remove", 0.3, 12, 12),
        ("replace-one", 1.0, 12, 12),
        ("add-remove", 10.0, 30, 0),
        ("replace-one", 0.3, 50, 50),
        ("add-remove", 1.0, 50, 50),
    ],
)
def test_what_is_charged_is_never_above_the_budget(adjacency, total, n, n_triples):
    """The last digits of a price depend on the order of events: they are planned in that order."""
    budget = Budget(epsilon=total, delta=1e-9, adjacency=adjacency)
    n_scores = min(512, math.comb(n, 3)) if n_triples else 0
    n_chosen = round(0.3 * math.comb(n, 2))
    planned = plan_noise(budget, n, n_chosen=n_chosen, n_triples=n_triples, n_scores=n_scores)
    assert 0.999 * total < epsilon(planned.event, budget.delta) <= total


# ---- pairs that are measured twice

N = 40_000
NAMES = ("a", "b", "c", "d", "e", "f")
SIXES = Domain(names=NAMES, sizes=(6, 5, 4, 6, 5, 4))
PAIRS = list(itertools.combinations(range(6), 2))
STARTS = np.cumsum([0, *(SIXES.sizes[a] * SIXES.sizes[b] for a, b in PAIRS)])


@cache
def counted():
    """Tables of rows in which b follows a, d follows c; e and f follow nothing."""
    rng = default_rng(3)
    found = np.stack([rng.integers(0, size, N) for size in SIXES.sizes])
    found[1] = np.where(rng.random(N) < 0.5, found[0] % 5, found[1])
    found[3] = np.where(rng.random(N) < 0.3, found[2], found[3])
    return MarginalCounts.of_codes(SIXES, found.astype(np.uint8))


def looked(n_chosen=4):
    planned = MarginalNoise(
        one_way=gaussian(40.0, 6), pairs=gaussian(40.0, 15), chosen=gaussian(10.0, n_chosen)
    )
    return measure(counted(), planned, n_rows_public=True, rng=keyed("first"))


@pytest.mark.parametrize(
    ("n", "delta", "wanted"),
    [(14, 1e-9, 27), (3, 1e-9, 1), (2, 1e-9, 0), (1, 1e-9, 0), (14, 0.0, 0), (2000, 1e-9, 1024)],
)
def test_the_number_of_pairs_follows_from_public_numbers(n, delta, wanted):
    assert count_measured_again(n, delta) == wanted


def test_the_number_of_pairs_can_be_given():
    usual = mechanism().noise.chosen
    assert usual.count == 27
    assert mechanism(measured_again=0).noise.chosen is None
    assert mechanism(measured_again=91).n_measured_again == 91
    laplace = mechanism(budget=Budget(epsilon=1.0), measured_again=5).noise.chosen
    assert isinstance(laplace, DiscreteLaplace)
    assert laplace.count == 5
    with pytest.raises(SpecError, match=r"`measured_again`: 92 pairs .* give at most 91"):
        mechanism(measured_again=92)


def test_pairs_are_chosen_by_departure_or_noise_whichever_is_less():
    noisy = looked()
    cleaned, gains = denoise(noisy), {}
    for a, b in PAIRS:
        table = cleaned.table(a, b)
        independent = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
        most = math.sqrt(2 / math.pi) * 40.0 * table.size
        gains[NAMES[a], NAMES[b]] = min(np.abs(table - independent).sum(), most)
    chosen = choose_pairs(noisy, 15)
    found = [gains[pair] for pair in chosen]
    assert found == pytest.approx(sorted(found, reverse=True))
    # far more dependence than noise
    assert gains["a", "b"] == pytest.approx(math.sqrt(2 / math.pi) * 40.0 * 30)
    assert gains["e", "f"] < 0.3 * gains["a", "b"]
    assert set(chosen[:2]) == {("a", "b"), ("c", "d")}
    assert choose_pairs(noisy, 4) == chosen[:4]
    assert len(choose_pairs(noisy, 99)) == len(set(chosen)) == 15


def test_two_measurements_are_averaged_by_their_inverse_variances():
    chosen = [("d", "a"), ("c", "e")]
    noisy = measure_chosen(looked(), counted(), chosen, rng=keyed("second"))
    tables, deviations = average_pairs(noisy)
    first = replace(noisy, cliques={}).table(("a", "d"))
    precision = 1 / 40.0**2 + 1 / 10.0**2
    wanted = (first / 40.0**2 + noisy.cliques["d", "a"].T / 10.0**2) / precision
    start = STARTS[PAIRS.index((0, 3))]
    np.testing.assert_allclose(tables[start : start + 36].reshape(6, 6), wanted)
    spread = dict(zip(PAIRS, deviations, strict=True))
    assert spread[0, 3] == spread[2, 4] == pytest.approx(precision**-0.5, rel=1e-6)
    assert spread[0, 1] == pytest.approx(40.0, rel=1e-6)
    np.testing.assert_array_equal(tables[:start], noisy.pairs[:start])


def test_the_second_look_has_noise_of_its_own():
    rng = default_rng(1)
    domain = Domain(names=tuple(f"c{place}" for place in range(6)), sizes=(2,) * 6)
    counts = MarginalCounts.of_codes(domain, rng.integers(0, 2, (6, 5000)).astype(np.uint8))
    streams = []
    make = lambda name: streams.append(name) or stream(KEY, name, "")  # noqa: E731
    noisy = mechanism(6).draw(counts, NO_COLUMNS, make)
    assert streams == ["marginals/noise", "marginals/noise/again"]
    assert len(noisy.chosen) == count_measured_again(6, 1e-9) == 4
    errors = []
    for pair in noisy.chosen:
        first = replace(noisy, cliques={}).table(pair)
        errors.append([table - counts.table(pair) for table in (first, noisy.cliques[pair])])
    first, second = np.array(errors).swapaxes(0, 1).reshape(2, -1)
    assert (first != 0).any()
    assert (second != 0).any()
    ratios = {round(float(x / y), 3) for x, y in zip(first, second, strict=True) if y}
    assert len(ratios) > 3  # not one draw at two scales
    # nor the beginning of the first draw
    assert (second[:8] != (noisy.one_way[:8] - counts.one_way[:8])).any()


def test_a_second_look_makes_the_worst_tables_better():
    """At the same budget; with power in both directions, since pairs that are not chosen get worse."""
    budget = Budget(epsilon=0.3, delta=2.0**-30, adjacency="add-remove")
    worst, rest = [], []
    for seed in range(5):
        errors = []
        for n_chosen in (0, 4):
            planned = plan_noise(budget, 6, n_chosen=n_chosen)
            noisy = measure(counted(), planned, n_rows_public=True, rng=keyed(f"{seed}"))
            if n_chosen:
                chosen = choose_pairs(noisy, n_chosen)
                noisy = measure_chosen(noisy, counted(), chosen, rng=keyed(f"{seed} again"))
            off = np.abs(average_pairs(noisy)[0] - counted().pairs)
            parts = np.split(off, STARTS[1:-1])
            errors.append({pair: part.mean() for pair, part in zip(PAIRS, parts, strict=True)})
        once, twice = errors
        worst.append(twice[0, 1] / once[0, 1])
        rest.append(twice[4, 5] / once[4, 5])
    assert np.median(worst) < 0.8
    assert np.median(rest) > 1.1


def test_kept_tables_say_what_was_chosen_and_no_more_than_was_paid_for():
    chosen = (("d", "a"), ("c", "e"))
    noisy = measure_chosen(looked(n_chosen=2), counted(), list(chosen), rng=keyed("second"))
    again = NoisyMarginals.from_bytes(noisy.to_bytes(), "tables")
    assert again.chosen == chosen
    np.testing.assert_array_equal(again.table(("a", "d")), noisy.cliques["d", "a"].T)
    assert again.margin(("a", "d")) == noisy.margin(("d", "a")) < again.margin(("a", "b"))
    again.check(SIXES, noisy.noise)
    twice = {**noisy.cliques, ("a", "d"): noisy.cliques["d", "a"].T}
    for n_chosen, cliques in ((1, noisy.cliques), (9, twice)):
        paid = replace(noisy.noise, chosen=gaussian(10.0, n_chosen))
        with pytest.raises(InputError):
            NoisyMarginals.from_bytes(
                replace(noisy, noise=paid, cliques=cliques).to_bytes(), "tables"
            )


# ---- three-way tables

DOMAIN = Domain(names=tuple("abcde"), sizes=(2, 2, 2, 3, 2))
TRIPLES = tuple(itertools.combinations("abcde", 3))


def parity(n=30_000):
    """c is the parity of a and b, but for one row in twenty; no pair of columns shows it."""
    rng = default_rng(5)
    codes = np.stack([rng.integers(0, size, n) for size in DOMAIN.sizes])
    codes[2] = codes[0] ^ codes[1] ^ (rng.random(n) < 0.05)
    return codes.astype(np.uint8)


def searched(codes, sigma=10.0, scores=50.0, n_triples=2):
    planned = MarginalNoise(
        one_way=gaussian(sigma, 5),
        pairs=gaussian(sigma, 10),
        scores=gaussian(scores, sensitivity=math.sqrt(10)),
        triples=gaussian(sigma, n_triples),
    )
    counts = MarginalCounts.of_codes(DOMAIN, codes)
    return measure(counts, planned, n_rows_public=True, rng=keyed("first"))


def triples_of(codes):
    return MarginalCounts.of_codes(DOMAIN, np.ascontiguousarray(codes), TRIPLES, two_way=False)


def test_no_neighbour_changes_the_scores_by_more_than_is_paid_for_and_some_by_as_much(monkeypatch):
    """Rows that are added, removed or replaced: the very scores that are drawn, and their price."""
    codes, seen = parity(40), []
    first = searched(codes)
    spy = lambda exact, event, rng: seen.append(exact) or exact  # noqa: E731
    monkeypatch.setattr(triples_module.noise, "perturb", spy)

    def score(rows):
        choose_triples(first, triples_of(rows), rng=keyed("none"))
        return seen.pop()

    own = score(codes)
    possible = itertools.product(*map(range, DOMAIN.sizes))
    rows = [
        np.array(row, dtype=np.uint8)[:, None] for row in itertools.islice(possible, 0, None, 7)
    ]
    added = [np.abs(score(np.concatenate([codes, row], axis=1)) - own) for row in rows]
    removed = [np.abs(score(np.delete(codes, place, axis=1)) - own) for place in range(5)]
    replaced = [np.abs(score(np.concatenate([codes[:, 1:], row], axis=1)) - own) for row in rows]
    monkeypatch.undo()
    for changes, adjacency, step in (
        (added + removed, "add-remove", 1),
        (replaced, "replace-one", 2),
    ):
        budget = Budget(epsilon=1.0, delta=1e-9, adjacency=adjacency)
        paid = plan_noise(budget, 5, n_triples=2, n_scores=10).scores
        assert isinstance(paid, DiscreteGaussian)
        assert max(change.max() for change in changes) == step
        largest = max(float(np.linalg.norm(change)) for change in changes)
        assert largest <= paid.sensitivity == pytest.approx(step * math.sqrt(10), rel=1e-12)
    # the price is not too high either
    assert max(np.linalg.norm(change) for change in added) == pytest.approx(math.sqrt(10))


def test_candidates_are_small_public_tables_and_no_more_than_are_paid_for():
    names = tuple(f"c{place}" for place in range(20))
    wide = Domain(names=names, sizes=(2,) * 17 + (40, 40, 40))
    found = list_candidates(wide, None)
    assert len(found) == MOST_CANDIDATES == count_candidates(20, None)
    assert max(map(wide.size_of, found)) == 8
    of_target = list_candidates(wide, "c19")
    assert all("c19" in clique for clique in of_target)
    # c17 x c18 x c19 has more than 5,000 cells
    assert (len(of_target), count_candidates(20, "c19")) == (170, 171)
    assert max(map(wide.size_of, of_target)) == 3200 < MOST_CELLS
    assert len(set(map(frozenset, found))) == len(found)
    assert list_candidates(Domain(names=("a", "b", "c"), sizes=(20, 20, 20)), None) == ()


@pytest.mark.parametrize("target", [None, "c7"])
def test_two_thousand_columns_have_candidates_and_not_the_first_columns_alone(target):
    names = tuple(f"c{place}" for place in range(2000))
    found = list_candidates(Domain(names=names, sizes=(2,) * 2000), target)
    assert len(found) == MOST_CANDIDATES
    used = {name for clique in found for name in clique} - {target}
    assert len(used) > 20
    assert max(int(name[1:]) for name in used) > 1000
    # no column is in most of them
    assert max(sum(name in clique for clique in found) for name in used) < len(found) / 4


def test_the_number_of_triples_follows_from_the_target_and_delta():
    assert mechanism(12).n_triples == 0
    assert mechanism(12).search is None
    asked = mechanism(12, target="c3")
    assert (asked.n_triples, asked.n_measured_again) == (12, 20)
    assert mechanism(3, target="c1").n_triples == 1
    assert mechanism(5, target="c3").n_measured_again == 4  # every pair of the target
    without = [{"budget": Budget(epsilon=1.0)}, {"triples": 0}, {"records": "copula"}]
    assert {mechanism(12, target="c3", **given).n_triples for given in without} == {0}
    choose = asked.description.stages(NO_COLUMNS)[1]
    assert choose.startswith("choose: read 12 columns once more; count at most 55 three-way tables")


@pytest.mark.parametrize(
    ("given", "budget", "said"),
    [
        ({"target": "x"}, BUDGET, r"`target` 'x': is not a privatised column; correct its name"),
        ({"triples": 5}, Budget(epsilon=1.0), "which needs a δ; set `delta`, or remove it"),
        ({"triples": 221}, BUDGET, r"221 three-way tables cannot be chosen from 220; give at most"),
        ({"triples": 56, "target": "c0"}, BUDGET, r"56 three-way tables cannot be chosen from 55"),
        ({"triples": 5, "records": "copula"}, BUDGET, "would be measured for nothing; remove it"),
        ({"weights": {"one_way": 1e-30, "two_way": 1e30}}, BUDGET, "scale must be positive and at"),
    ],
)
def test_what_cannot_be_chosen_is_refused_before_any_row_is_read(given, budget, said):
    with pytest.raises(SpecError, match=said):
        mechanism(12, budget, **given)


def test_the_triple_that_no_pair_shows_is_chosen_unless_its_noise_is_larger_than_its_error():
    codes = parity()

    def choose(**changes):
        return choose_triples(searched(codes, **changes), triples_of(codes), rng=keyed("scores"))

    assert choose()[0] == ("a", "b", "c")
    assert choose(sigma=5e3) == ()
    assert choose(scores=5e3, n_triples=9) == (("a", "b", "c"),)  # though nine are paid for


def test_tables_that_nobody_pays_for_are_refused():
    codes = parity(2000)
    first, counts = searched(codes, n_triples=1), triples_of(codes)
    unpaid = replace(first, noise=replace(first.noise, scores=None, triples=None))
    more = "more tables are chosen than are paid for"
    with pytest.raises(InternalError, match="nobody pays for"):
        choose_triples(unpaid, counts, rng=keyed("scores"))
    for noisy, counts_, chosen in (
        (unpaid, counts, [("a", "b", "c")]),
        (first, counts, TRIPLES[:2]),
        (looked(n_chosen=1), counted(), choose_pairs(looked(), 2)),
        (replace(looked(), noise=replace(looked().noise, chosen=None)), counted(), [("a", "b")]),
    ):
        with pytest.raises(InternalError, match=more):
            measure_chosen(noisy, counts_, chosen, keyed("more"))
    # scores of more tables than are paid for
    replaced = DiscreteGaussian(
        sigma=5.0, sensitivity=math.sqrt(2), adjacency="replace-one", count=2
    )
    nine = plan_noise(Budget(epsilon=1.0, delta=1e-9), 5, n_triples=2, n_scores=9).scores
    for scores, triples in (
        (gaussian(50.0, sensitivity=3.0), first.noise.triples),
        (nine, replaced),
    ):
        cheap = replace(first, noise=replace(first.noise, scores=scores, triples=triples))
        with pytest.raises(InternalError, match="more three-way tables have scores than are paid"):
            choose_triples(cheap, counts, rng=keyed("scores"))
    again = measure_chosen(first, counts, [("a", "b", "c")], keyed("triples"))
    with pytest.raises(InternalError, match="paid for"):
        choose_triples(again, counts, rng=keyed("scores"))


def test_only_pairs_and_triples_are_chosen_and_none_that_is_declared():
    codes = parity(2000)
    planned = MarginalNoise(
        one_way=gaussian(5.0, 5),
        pairs=gaussian(5.0, 10),
        cliques={("a", "b"): gaussian(9.0)},
        chosen=gaussian(5.0, 3),
    )
    counts = MarginalCounts.of_codes(DOMAIN, codes, [("a", "b")])
    first = measure(counts, planned, n_rows_public=True, rng=keyed("first"))
    for wrong in (("a",), ("a", "b", "c", "d"), ("a", "b"), ("b", "a")):
        with pytest.raises(InternalError, match="chosen"):
            measure_chosen(
                first, MarginalCounts.of_codes(DOMAIN, codes, [wrong]), [wrong], keyed("more")
            )


def test_records_have_a_parity_only_if_three_way_tables_are_measured():
    frame = pd.DataFrame({f"c{place}": row for place, row in enumerate(parity().astype(np.int64))})
    frame["c3"] %= 2

    def share(**given):
        given = {"epsilon": 1.0, "delta": 2.0**-30, "insecure_seed": 3, **given}
        with dpdask.GaussianCopula(even_schema(5), **given).fit(frame) as release:
            drawn = release.sample(20_000, seed=1).compute()
            found = [sorted(clique) for clique in release.card["mechanism"]["three_way"]]
        wanted = given.get("target") == "c2" or "triples" in given
        assert (["c0", "c1", "c2"] in found) == wanted
        return float(((drawn["c0"] ^ drawn["c1"]) == drawn["c2"]).mean())

    assert abs(share() - 0.5) < 0.03
    assert share(target="c2", adjacency="add-remove") > 0.9
    assert share(triples=3) > 0.9
    assert abs(share(target="c4") - 0.5) < 0.03


@pytest.mark.parametrize("kept", ["noisy.npz", "noisy-1.npz", "noisy-2.npz"])
def test_a_run_that_is_killed_between_its_three_rounds_draws_nothing_again(
    kept, tmp_path, monkeypatch
):
    given = {
        "mechanism": {"kind": "copula", "n_rows": 200, "target": "genre"},
        "privacy__delta": 1e-6,
        "schema": {**MIXED_SCHEMA, "userId": {"role": "drop"}},
    }
    rows = lake(tmp_path / "lake", [150, 90])
    whole, job = (
        write_job(tmp_path / name, rows, tmp_path / f"{name}-out", **given)
        for name in ("whole", "job")
    )
    run_here(whole)
    is_kept = lambda *given: given[-1] == kept  # noqa: E731
    with killed_at(fit_module, "_keep_drawn", after=True, when=is_kept):
        run_here(job)
    if kept != "noisy.npz":
        drawn_again = lambda *_, **__: pytest.fail("noise that was kept is drawn again")  # noqa: E731
        monkeypatch.setattr(cell_search, "perturb", drawn_again)
    drawn = []
    perturb = noise.perturb

    def count(counts, event, *, rng=None):
        drawn.append(len(np.ravel(counts)))
        return perturb(counts, event, rng=rng)

    monkeypatch.setattr(noise, "perturb", count)
    run_here(job)
    assert digests(tmp_path / "job-out") == digests(tmp_path / "whole-out")
    if kept == "noisy-2.npz":
        assert drawn == []
    else:  # after the second round the scores come first, not the one-way tables
        assert (drawn[0] <= math.comb(4, 2)) == (kept == "noisy-1.npz")


# ---- what came out badly once


def test_a_target_that_changes_little_is_said_before_the_budget_is_spent():
    levels = pa.array([0, 1])
    codecs = {
        f"c{place}": LevelCodec(name=f"c{place}", levels=levels, ordered=True)
        for place in range(60)
    }
    columns = Columns(types=pa.schema([]), codecs=codecs)

    def cautions(n=12, budget=BUDGET, **given):
        return " ".join(
            mechanism(n, budget, target="c3", **given).description.cautions(columns, None)
        )

    little = "The target c3 changes little: "
    assert little + "the budget has no δ." in cautions(budget=Budget(epsilon=1.0))
    assert little + "no three-way tables are measured." in cautions(records="copula")
    assert "Only 512 of 1,711 three-way tables" in cautions(60)
    assert "target" not in cautions()
    assert "Only" not in cautions()


def test_large_columns_may_have_no_candidates_which_is_refused_or_said():
    column = discrete(list(range(21)), type="int64")
    schema = schema_of(dict.fromkeys("abc", column))
    frame = pd.DataFrame({name: np.arange(210) % 21 for name in "abc"})
    given = {"epsilon": 10.0, "delta": 1e-9, "target": "a"}
    with pytest.raises(SpecError, match="no three-way table has at most 5,000 cells"):
        dpdask.GaussianCopula(schema, **given).plan(frame)
    column = continuous([0.0, 1.0])
    schema = schema_of(dict.fromkeys("abc", column))
    frame = pd.DataFrame({name: np.linspace(0.0, 1.0, 100_000) for name in "abc"})
    for bins, is_said in (("adaptive", True), ({"a": 10}, False)):
        warnings = dpdask.GaussianCopula(schema, bins=bins, **given).plan(frame).warnings
        assert any("Probably no three-way table" in said for said in warnings) is is_said


@pytest.mark.parametrize("rules", [[], [{"ordered": "came <= left"}]])
def test_dates_without_an_order_are_named(rules):
    day = continuous([dt.date(2020, 1, 1), dt.date(2030, 1, 1)])
    schema = Schema.from_dict({"columns": {"came": day, "left": day}, "rules": rules})
    days = pd.date_range("2024-01-01", periods=400).to_numpy("datetime64[s]")
    frame = pd.DataFrame({"came": days, "left": days})
    warnings = dpdask.GaussianCopula(schema, epsilon=1.0, delta=1e-9).plan(frame).warnings
    assert any("the dates came, left in any order" in said for said in warnings) is (not rules)


def test_triples_are_raked_even_where_no_pair_of_many_is_missed():
    rng = default_rng(7)
    frame = pd.DataFrame({f"c{place}": rng.integers(0, 2, 20_000) for place in range(50)})
    domain = Domain(names=tuple(frame), sizes=(2,) * 50)
    first, second = (name for name in list_candidates(domain, "c2")[0] if name != "c2")
    frame["c2"] = frame[first] ^ frame[second]
    given = {"epsilon": 10.0, "delta": 1e-9, "target": "c2", "insecure_seed": 3}
    with pytest.warns(UserWarning, match="Only 512 of 1,176"):
        release = dpdask.GaussianCopula(even_schema(50), **given).fit(frame)
    with release:
        drawn = release.sample(20_000, seed=1).compute()
        found = release.card["mechanism"]
    three_way = [sorted(clique) for clique in found["three_way"]]
    assert sorted([first, second, "c2"]) in three_way
    assert ((drawn[first] ^ drawn[second]) == drawn["c2"]).mean() > 0.9
    assert found["raked_tables"] >= len(three_way)
