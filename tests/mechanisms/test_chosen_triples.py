"""Three-way tables that are chosen by noisy scores: their sensitivity, their price, and what they find that pairs do not show."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from e2e.helpers import MIXED_SCHEMA, digests, lake, run_here, write_job
from mechanisms.contract import killed_at

import dpdask
from dpdask.codec import LevelCodec
from dpdask.engine import fit as fit_module
from dpdask.errors import InternalError, SpecError
from dpdask.mechanisms import expectations as cell_search
from dpdask.mechanisms.copula import fit as triples_module
from dpdask.mechanisms.copula.fit import (
    MOST_CANDIDATES,
    choose_triples,
    count_candidates,
    list_candidates,
)
from dpdask.mechanisms.copula.model import MOST_CELLS
from dpdask.mechanisms.copula.spec import CopulaMechanism, CopulaSpec
from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    NoisyMarginals,
    draft_scores,
    measure,
    measure_chosen,
    plan_noise,
)
from dpdask.mechanisms.mechanism import Columns
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget, UnitColumn, noise
from dpdask.privacy.accountant import epsilon
from dpdask.privacy.events import DiscreteGaussian
from dpdask.schema import Schema
from dpdask.stats import Domain, MarginalCounts
from dpdask.streams import RunKey, stream

KEY = RunKey.insecure(29)
NAMES = tuple("abcde")
DOMAIN = Domain(names=NAMES, sizes=(2, 2, 2, 3, 2))
TRIPLES = tuple(itertools.combinations(NAMES, 3))


def keyed(name: str) -> Any:
    return stream(KEY, "test", name)


def parity(n: int = 30_000) -> np.ndarray:
    """c is the parity of a and b, but for one row in twenty; no pair of columns shows it."""
    rng = np.random.default_rng(5)
    codes = np.stack([rng.integers(0, size, n) for size in DOMAIN.sizes])
    codes[2] = codes[0] ^ codes[1] ^ (rng.random(n) < 0.05)
    return codes.astype(np.uint8)


def event(sigma: float, count: int = 1, sensitivity: float = 1.0) -> DiscreteGaussian:
    return DiscreteGaussian(
        sigma=sigma, sensitivity=sensitivity, adjacency="add-remove", count=count
    )


def looked(
    codes: np.ndarray, sigma: float = 10.0, scores: float = 50.0, n_triples: int = 2
) -> NoisyMarginals:
    planned = MarginalNoise(
        one_way=event(sigma, 5),
        pairs=event(sigma, 10),
        scores=event(scores, sensitivity=math.sqrt(10)),
        triples=event(sigma, n_triples),
    )
    return measure(
        MarginalCounts.of_codes(DOMAIN, codes), planned, n_rows_public=True, rng=keyed("first")
    )


def counted(codes: np.ndarray) -> MarginalCounts:
    return MarginalCounts.of_codes(DOMAIN, codes, TRIPLES, two_way=False)


def schema_of(n: int) -> Schema:
    return Schema.from_dict(
        {
            "columns": {
                f"c{place}": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}
                for place in range(n)
            }
        }
    )


def mechanism(n: int = 12, budget: Budget | None = None, **given: Any) -> CopulaMechanism:
    found = bind(CopulaSpec(**given), schema_of(n), budget or Budget(epsilon=1.0, delta=2.0**-30))
    assert isinstance(found, CopulaMechanism)
    return found


# ---- sensitivity


def scores_of(codes: np.ndarray, expected: dict[Any, np.ndarray]) -> np.ndarray:
    tables = counted(codes)
    return np.array([np.abs(tables.cliques[clique] - expected[clique]).sum() for clique in TRIPLES])


@pytest.mark.few(1)
@pytest.mark.parametrize("step_of_rows", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_no_neighbour_changes_the_scores_by_more_than_is_paid_for_and_some_by_as_much(
    step_of_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row that may be added, removed or replaced: the very scores that are drawn, against the event that is priced."""
    codes, seen = parity(40), []
    first = looked(codes)
    monkeypatch.setattr(
        triples_module.noise, "perturb", lambda exact, event, rng: seen.append(exact) or exact
    )

    def exact(rows: np.ndarray) -> np.ndarray:
        choose_triples(first, counted(np.ascontiguousarray(rows)), rng=keyed("none"))
        return seen.pop()

    own = exact(codes)
    possible = [
        np.array(row, dtype=np.uint8)[:, None]
        for row in itertools.product(*map(range, DOMAIN.sizes))
    ][::step_of_rows]
    added = [np.abs(exact(np.concatenate([codes, row], axis=1)) - own) for row in possible]
    removed = [np.abs(exact(np.delete(codes, place, axis=1)) - own) for place in range(10)]
    replaced = [
        np.abs(exact(np.concatenate([codes[:, 1:], row], axis=1)) - own) for row in possible
    ]
    monkeypatch.undo()
    for changes, adjacency, step in (
        (added + removed, "add-remove", 1),
        (replaced, "replace-one", 2),
    ):
        budget = Budget(epsilon=1.0, delta=1e-9, adjacency=adjacency)
        paid = plan_noise(budget, 5, n_triples=2, n_scores=10).scores
        assert isinstance(paid, DiscreteGaussian)
        largest = max(float(np.sqrt((change**2).sum())) for change in changes)
        assert max(change.max() for change in changes) == step
        assert largest <= paid.sensitivity == pytest.approx(step * math.sqrt(10), rel=1e-12)
        assert paid.adjacency == adjacency
    assert max(float(np.sqrt((change**2).sum())) for change in added) == pytest.approx(
        math.sqrt(10)
    )  # the price is not too high either


@pytest.mark.parametrize(("adjacency", "step"), [("add-remove", 1), ("replace-one", 2)])
@pytest.mark.parametrize(("rows", "n"), [(1, 364), (7, 78), (3, 512)])
def test_the_scores_price_is_rounded_up(adjacency: Any, step: int, rows: int, n: int) -> None:
    found = draft_scores(adjacency, rows, 1.0, n)
    assert found.sensitivity**2 > n * (rows * step) ** 2
    assert found.sensitivity == pytest.approx(rows * step * math.sqrt(n), rel=1e-14)
    assert found.count == 1


# ---- shares


@pytest.mark.few(2)
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize("rows", [1, 7])
def test_scores_take_a_twentieth_and_triples_three_twentieths_of_what_is_spent(
    adjacency: Any, rows: int
) -> None:
    unit: Any = "row" if rows == 1 else UnitColumn(column="id", max_rows=rows)
    budget = Budget(epsilon=1.0, delta=2.0**-30, adjacency=adjacency, unit=unit)
    planned = plan_noise(budget, 14, n_chosen=27, n_triples=14, n_scores=78)
    spent = {
        name: getattr(planned, name) for name in ("one_way", "pairs", "chosen", "scores", "triples")
    }
    cost = {name: each.count * (each.sensitivity / each.sigma) ** 2 for name, each in spent.items()}
    total = sum(cost.values())
    assert cost["scores"] / total == pytest.approx(0.05, rel=1e-6)
    assert cost["triples"] / total == pytest.approx(0.15, rel=1e-6)
    assert cost["chosen"] / (cost["one_way"] + cost["pairs"] + cost["chosen"]) == pytest.approx(
        0.4, rel=1e-6
    )
    assert 0.999 < epsilon(planned.event, budget.delta) <= 1.0
    assert {each.count for each in planned.event.events} == {14, 91, 27, 1}
    assert len(planned.event.events) == 5


def test_the_fine_counts_keep_their_twentieth() -> None:
    planned = plan_noise(
        Budget(epsilon=1.0, delta=2.0**-30), 14, n_chosen=27, n_triples=14, n_scores=78, n_found=2
    )
    cost = [each.count * (each.sensitivity / each.sigma) ** 2 for each in planned.event.events]
    assert cost[0] / sum(cost) == pytest.approx(0.05, rel=1e-6)


# ---- candidates and defaults


def test_candidates_are_small_public_tables_and_no_more_than_are_paid_for() -> None:
    wide = Domain(names=tuple(f"c{place}" for place in range(20)), sizes=(2,) * 17 + (40, 40, 40))
    found = list_candidates(wide, None)
    assert len(found) == MOST_CANDIDATES == count_candidates(20, None)
    assert max(map(wide.size_of, found)) == 8
    of_target = list_candidates(wide, "c19")
    assert all("c19" in clique for clique in of_target)
    assert (len(of_target), count_candidates(20, "c19")) == (
        170,
        171,
    )  # c17 x c18 x c19 has more than 5,000 cells
    assert max(map(wide.size_of, of_target)) == 3200 < MOST_CELLS
    assert len(set(map(frozenset, found))) == len(found)
    assert list_candidates(wide, None) == found


@pytest.mark.parametrize("target", [None, "c7"])
def test_two_thousand_columns_have_candidates_at_once_and_not_the_first_columns_alone(
    target: str | None,
) -> None:
    wide = Domain(names=tuple(f"c{place}" for place in range(2000)), sizes=(2,) * 2000)
    found = list_candidates(wide, target)
    assert len(found) == MOST_CANDIDATES
    named = {name for clique in found for name in clique} - {target}
    assert len(named) > 20
    assert max(int(name[1:]) for name in named) > 1000
    counts = [sum(name in clique for clique in found) for name in named]
    assert max(counts) < len(found) / 4  # no column is in most of them
    assert list_candidates(Domain(names=("a", "b", "c"), sizes=(20, 20, 20)), None) == ()


def test_the_default_follows_from_the_target_and_delta() -> None:
    assert mechanism().n_triples == 0
    assert mechanism().search is None
    assert mechanism(target="c3").n_triples == 12
    assert mechanism(3, target="c1").n_triples == 1
    assert mechanism(target="c3", budget=Budget(epsilon=1.0)).n_triples == 0
    assert mechanism(target="c3", triples=0).n_triples == 0
    assert mechanism(target="c3").n_measured_again == 20
    assert mechanism(5, target="c3").n_measured_again == 4  # every pair of the target
    columns: Any = None
    assert mechanism(target="c3").stages(columns, uncounted=False)[1] == (
        "choose: read 12 columns once more; count at most 55 three-way tables, score them with noise, measure at most 12 that stand out"
    )
    assert not any(
        stage.startswith("choose") for stage in mechanism().stages(columns, uncounted=False)
    )


@pytest.mark.parametrize(
    ("given", "budget", "said"),
    [
        ({"target": "x"}, None, r"`target` 'x': is not a privatised column; correct its name"),
        ({"triples": 5}, Budget(epsilon=1.0), "which needs a δ; set `delta`, or remove it"),
        (
            {"triples": 221},
            None,
            r"`triples`: 221 three-way tables cannot be chosen from 220; give at most 220",
        ),
        ({"triples": 56, "target": "c0"}, None, r"56 three-way tables cannot be chosen from 55"),
        ({"triples": 5, "records": "copula"}, None, "would be measured for nothing; remove it"),
        (
            {"weights": {"one_way": 1e-30, "two_way": 1e30}},
            None,
            "scale must be positive and at most",
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused_before_any_row_is_read(
    given: dict[str, Any], budget: Budget | None, said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        mechanism(budget=budget, **given)


# ---- what is chosen


def test_the_triple_that_no_pair_shows_is_chosen_first() -> None:
    codes = parity()
    assert choose_triples(looked(codes), counted(codes), rng=keyed("scores"))[0] == ("a", "b", "c")


def test_a_table_whose_own_noise_is_larger_than_its_error_is_not_measured() -> None:
    codes = parity()
    assert choose_triples(looked(codes, sigma=5e3), counted(codes), rng=keyed("scores")) == ()
    assert choose_triples(
        looked(codes, scores=5e3, n_triples=9), counted(codes), rng=keyed("scores")
    ) == (("a", "b", "c"),)  # nine are paid for


def test_triples_that_nobody_pays_for_are_refused() -> None:
    codes = parity(2000)
    planned = MarginalNoise(one_way=event(5.0, 5), pairs=event(5.0, 10))
    first = measure(
        MarginalCounts.of_codes(DOMAIN, codes), planned, n_rows_public=True, rng=keyed("first")
    )
    with pytest.raises(InternalError, match="nobody pays for"):
        choose_triples(first, counted(codes), rng=keyed("scores"))
    with pytest.raises(InternalError, match="more tables are chosen than are paid for"):
        measure_chosen(first, counted(codes), [("a", "b", "c")], keyed("triples"))
    with pytest.raises(InternalError, match="more tables are chosen than are paid for"):
        measure_chosen(looked(codes, n_triples=1), counted(codes), TRIPLES[:2], keyed("triples"))


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_records_have_a_parity_only_if_three_way_tables_are_measured(adjacency: Any) -> None:
    codes = parity()
    frame = pd.DataFrame(dict(zip("abcde", codes.astype(np.int64), strict=True))).rename(
        columns=lambda name: f"c{'abcde'.index(name)}"
    )
    frame["c3"] %= 2

    def share(**given: Any) -> float:
        copula = dpdask.GaussianCopula(
            schema_of(5), epsilon=1.0, delta=2.0**-30, adjacency=adjacency, insecure_seed=3, **given
        )
        with copula.fit(frame) as release:
            drawn = release.sample(20_000, seed=1).compute()
            found = [sorted(clique) for clique in release.card["mechanism"]["three_way"]]
            assert (["c0", "c1", "c2"] in found) == (
                given.get("target") == "c2" or "triples" in given
            )
        return float(((drawn["c0"] ^ drawn["c1"]) == drawn["c2"]).mean())

    assert abs(share() - 0.5) < 0.03
    assert share(target="c2") > 0.9
    assert share(triples=3) > 0.9
    assert abs(share(target="c4") - 0.5) < 0.03


# ---- exactly once


@pytest.mark.parametrize("kept", ["noisy.npz", "noisy-1.npz", "noisy-2.npz"])
def test_a_run_that_is_killed_between_its_three_rounds_draws_nothing_again(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {
        "mechanism": {"kind": "copula", "n_rows": 200, "target": "genre"},
        "privacy__delta": 1e-6,
    }
    schema = {**MIXED_SCHEMA, "userId": {"role": "drop"}}
    rows = lake(tmp_path / "lake", [150, 90])
    whole, job = (
        write_job(tmp_path / name, rows, tmp_path / f"{name}-out", schema=schema, **given)
        for name in ("whole", "job")
    )
    run_here(whole)
    with killed_at(fit_module, "_keep_drawn", after=True, when=lambda *given: given[-1] == kept):
        run_here(job)
    if kept != "noisy.npz":
        monkeypatch.setattr(
            cell_search,
            "perturb",
            lambda *_, **__: pytest.fail("noise that was kept is drawn again"),
        )
    drawn: list[int] = []
    perturb = noise.perturb

    def count(counts: Any, event: Any, *, rng: Any = None) -> Any:
        drawn.append(len(np.ravel(counts)))
        return perturb(counts, event, rng=rng)

    monkeypatch.setattr(noise, "perturb", count)
    run_here(job)
    assert digests(tmp_path / "job-out") == digests(tmp_path / "whole-out")
    if kept == "noisy-2.npz":
        assert drawn == []
    elif kept == "noisy-1.npz":
        assert drawn[0] <= math.comb(4, 2)  # the scores come first, not the one-way tables
    else:
        assert drawn[0] > math.comb(4, 2)


# ---- what came out badly once


@pytest.mark.few(5)
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize("total", [0.3, 1.0, 10.0])
@pytest.mark.parametrize(("n", "n_triples"), [(12, 12), (30, 0), (50, 50)])
def test_what_is_charged_is_never_above_the_budget(
    adjacency: Any, total: float, n: int, n_triples: int
) -> None:
    """The last digits of a price depend on the order of events: they are planned in the order in which they are charged."""
    budget = Budget(epsilon=total, delta=1e-9, adjacency=adjacency)
    planned = plan_noise(
        budget,
        n,
        n_chosen=round(0.3 * math.comb(n, 2)),
        n_triples=n_triples,
        n_scores=min(512, math.comb(n, 3)) if n_triples else 0,
    )
    assert 0.999 * total < epsilon(planned.event, budget.delta) <= total


def test_only_pairs_and_triples_are_chosen_and_none_that_is_declared() -> None:
    codes = parity(2000)
    planned = MarginalNoise(
        one_way=event(5.0, 5),
        pairs=event(5.0, 10),
        cliques={("a", "b"): event(9.0)},
        chosen=event(5.0, 3),
    )
    first = measure(
        MarginalCounts.of_codes(DOMAIN, codes, [("a", "b")]),
        planned,
        n_rows_public=True,
        rng=keyed("first"),
    )
    for wrong in (("a",), ("a", "b", "c", "d"), ("a", "b"), ("b", "a")):
        with pytest.raises(InternalError, match="chosen"):
            measure_chosen(
                first, MarginalCounts.of_codes(DOMAIN, codes, [wrong]), [wrong], keyed("more")
            )


def test_scores_of_more_tables_than_are_paid_for_are_refused() -> None:
    codes = parity(2000)
    first = looked(codes)
    replaced = DiscreteGaussian(
        sigma=5.0, sensitivity=math.sqrt(2), adjacency="replace-one", count=2
    )
    nine = plan_noise(Budget(epsilon=1.0, delta=1e-9), 5, n_triples=2, n_scores=9).scores
    for scores, triples in ((event(50.0, sensitivity=3.0), first.noise.triples), (nine, replaced)):
        cheap = replace(first, noise=replace(first.noise, scores=scores, triples=triples))
        with pytest.raises(
            InternalError, match="more three-way tables have scores than are paid for"
        ):
            choose_triples(cheap, counted(codes), rng=keyed("scores"))
    again = measure_chosen(first, counted(codes), [("a", "b", "c")], keyed("triples"))
    with pytest.raises(InternalError, match="paid for"):
        choose_triples(again, counted(codes), rng=keyed("scores"))


def test_a_target_that_changes_little_is_said_before_the_budget_is_spent() -> None:
    codecs = {
        f"c{place}": LevelCodec(name=f"c{place}", levels=pa.array([0, 1]), ordered=True)
        for place in range(60)
    }
    columns = Columns(types=pa.schema([]), codecs=codecs)
    without = mechanism(target="c3", budget=Budget(epsilon=1.0))
    assert "The target c3 changes little: the budget has no δ." in without.cautions(columns, None)
    own = mechanism(target="c3", records="copula")
    assert own.n_triples == 0
    assert "The target c3 changes little: no three-way tables are measured." in own.cautions(
        columns, None
    )
    many = [
        said
        for said in mechanism(60, target="c3").cautions(columns, None)
        if said.startswith("Only 512 of 1,711 three-way tables")
    ]
    assert len(many) == 1
    assert not any(
        "target" in said or "Only" in said
        for said in mechanism(target="c3").cautions(columns, None)
    )


def test_a_table_of_large_columns_alone_has_no_candidates_and_is_refused() -> None:
    column = {"role": "privatise", "kind": "discrete", "levels": list(range(21)), "type": "int64"}
    schema = Schema.from_dict({"columns": dict.fromkeys("abc", column)})
    frame = pd.DataFrame({name: np.arange(210) % 21 for name in "abc"})
    with pytest.raises(SpecError, match="no three-way table has at most 5,000 cells"):
        dpdask.GaussianCopula(schema, epsilon=1.0, delta=1e-9, target="a").plan(frame)


def test_triples_are_raked_even_where_no_pair_of_many_is_missed() -> None:
    rng = np.random.default_rng(7)
    frame = pd.DataFrame({f"c{place}": rng.integers(0, 2, 20_000) for place in range(50)})
    domain = Domain(names=tuple(frame), sizes=(2,) * 50)
    first, second = (name for name in list_candidates(domain, "c2")[0] if name != "c2")
    frame["c2"] = frame[first] ^ frame[second]
    copula = dpdask.GaussianCopula(
        schema_of(50), epsilon=10.0, delta=1e-9, target="c2", insecure_seed=3
    )
    with pytest.warns(UserWarning, match="Only 512 of 1,176"):
        release = copula.fit(frame)
    with release:
        drawn = release.sample(20_000, seed=1).compute()
        found = release.card["mechanism"]
    assert sorted([first, second, "c2"]) in [sorted(clique) for clique in found["three_way"]]
    assert ((drawn[first] ^ drawn[second]) == drawn["c2"]).mean() > 0.9
    assert found["raked_tables"] >= len(found["three_way"])


def test_adaptive_columns_alone_may_have_no_candidates_and_that_is_said() -> None:
    column = {"role": "privatise", "kind": "continuous", "bounds": [0.0, 1.0]}
    schema = Schema.from_dict({"columns": dict.fromkeys("abc", column)})
    frame = pd.DataFrame({name: np.linspace(0.0, 1.0, 100_000) for name in "abc"})
    copula = dpdask.GaussianCopula(schema, epsilon=10.0, delta=1e-9, target="a")
    assert any("Probably no three-way table" in said for said in copula.plan(frame).warnings)
    fewer = dpdask.GaussianCopula(schema, epsilon=10.0, delta=1e-9, target="a", bins={"a": 10})
    assert not any("three-way" in said for said in fewer.plan(frame).warnings)
