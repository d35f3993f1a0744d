"""The copula from noisy tables to records: valid ones, with the margins, the tree's pairs and the other pairs of the tables."""

from __future__ import annotations

import itertools
import pickle
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dpdask.mechanisms.columns import CHUNK_ROWS, bins_by_column
from dpdask.mechanisms.copula import fit as copula_fit
from dpdask.mechanisms.copula.fit import CopulaOptions, FitReport, fit_copula
from dpdask.mechanisms.copula.model import CopulaModel, n_latents_of
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.mechanisms.marginals.denoise import denoise
from dpdask.mechanisms.marginals.noise import MarginalNoise, NoisyMarginals, measure, plan_noise
from dpdask.privacy import Budget
from dpdask.privacy.events import DiscreteGaussian
from dpdask.schema import Schema
from dpdask.stats import Domain, MarginalCounts
from dpdask.streams import RunKey, stream

KEY = RunKey.insecure(21)
N = 60_000
MIXED = (4, 2, 5, 3, 6, 2)


def keyed(name: str) -> Any:
    return stream(KEY, "test", name)


def named(*sizes: int) -> Domain:
    return Domain(names=tuple(f"c{place}" for place in range(len(sizes))), sizes=sizes)


def population(
    sizes: tuple[int, ...], n: int = N, seed: int = 0, common: float = 0.6
) -> np.ndarray:
    """Rows of coarse looks at one hidden number: every pair depends, and no tree explains them all."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=n)
    looks = [np.sqrt(common) * hidden + np.sqrt(1 - common) * rng.normal(size=n) for _ in sizes]
    cuts = [
        np.quantile(look, np.sort(rng.uniform(0.08, 0.92, size - 1)))
        for look, size in zip(looks, sizes, strict=True)
    ]
    return np.stack(
        [np.searchsorted(cut, look) for cut, look in zip(cuts, looks, strict=True)]
    ).astype(np.uint8)


def noisy_of(
    domain: Domain, codes: np.ndarray, sigma: float = 0.3, one_way: bool = True, pairs: bool = True
) -> NoisyMarginals:
    event = DiscreteGaussian(sigma=sigma, sensitivity=1.0, adjacency="add-remove")
    planned = MarginalNoise(
        one_way=event if one_way else None,
        pairs=event if pairs and domain.n_attributes > 1 else None,
        cliques={},
    )
    return measure(
        MarginalCounts.of_codes(domain, codes), planned, n_rows_public=True, rng=keyed("noise")
    )


def fitted_of(noisy: NoisyMarginals, **options: Any) -> tuple[CopulaModel, FitReport]:
    return fit_copula(
        noisy, keyed("fit"), CopulaOptions(**options) if options else None, records="copula"
    )


@lru_cache
def mixed() -> tuple[np.ndarray, NoisyMarginals, CopulaModel, FitReport]:
    codes = population(MIXED)
    noisy = noisy_of(named(*MIXED), codes)
    return codes, noisy, *fitted_of(noisy)


def sampled(model: CopulaModel, n: int, name: str = "part") -> np.ndarray:
    """Records, after a look at whether each is valid."""
    records = model.sample(n, model.stream(KEY, name))
    assert records.dtype == model.domain.code_dtype
    assert records.shape == (model.domain.n_attributes, n)
    assert (records < np.array(model.domain.sizes)[:, None]).all()
    return records


def tables_of(domain: Domain, records: np.ndarray) -> MarginalCounts:
    return MarginalCounts.of_codes(domain, np.ascontiguousarray(records.astype(domain.code_dtype)))


def variation(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.abs(left / left.sum() - right / right.sum()).sum() / 2)


def edges_of(model: CopulaModel) -> set[frozenset[int]]:
    return {
        frozenset((node.attribute, model.nodes[node.parent].attribute))
        for node in model.nodes
        if node.parent >= 0
    }


# Margins and the tree


@pytest.mark.parametrize("n", [1000, CHUNK_ROWS, 100_000])
def test_levels_and_the_trees_pairs_come_as_often_as_the_tables_ask(n):
    """Quotas: every table is met up to one record for each cell, chunk by chunk, where sampling alone would be off by the root."""
    _, noisy, model, _ = mixed()
    cleaned = denoise(noisy)
    found = tables_of(model.domain, sampled(model, n))
    slack = (1 + n // CHUNK_ROWS) * sum(MIXED) + 1e-3 * n / N
    for name, wanted in zip(model.domain.names, cleaned.one_way, strict=True):
        assert np.abs(found.table((name,)) - n * wanted / cleaned.n_rows).max() <= slack
    assert len(edges_of(model)) == len(MIXED) - 1
    for first, second in map(sorted, edges_of(model)):
        wanted = n * cleaned.table(first, second) / cleaned.n_rows
        assert (
            np.abs(
                found.table((model.domain.names[first], model.domain.names[second])) - wanted
            ).max()
            <= slack
        )


def test_pairs_off_the_tree_are_recovered_far_beyond_independence_and_the_tree():
    codes, _, model, _ = mixed()
    domain = model.domain
    truth, found = tables_of(domain, codes), tables_of(domain, sampled(model, 100_000))
    apart: list[tuple[float, float]] = []
    for first, second in itertools.combinations(range(len(MIXED)), 2):
        if frozenset((first, second)) not in edges_of(model):
            pair = domain.names[first], domain.names[second]
            independent = np.outer(truth.table(pair[:1]), truth.table(pair[1:]))
            apart.append(
                (
                    variation(found.table(pair), truth.table(pair)),
                    variation(independent, truth.table(pair)),
                )
            )
    errors, baseline = np.array(apart).T
    assert len(errors) == 10
    assert errors.mean() < 0.12 * baseline.mean()
    assert (errors < 0.3 * baseline).all()


def test_a_pair_off_the_tree_is_nearer_than_the_trees_own_guess():
    sizes = (4, 4, 4)
    domain, codes = named(*sizes), population((4, 4, 4), common=0.5)
    model, _ = fitted_of(noisy_of(domain, codes))
    ((first, second),) = [
        pair
        for pair in itertools.combinations(range(3), 2)
        if frozenset(pair) not in edges_of(model)
    ]
    middle = 3 - first - second
    names, truth = domain.names, tables_of(domain, codes)
    left, right = (
        truth.table((names[middle], names[end])).astype(float) for end in (first, second)
    )
    guess = left.T @ (right / right.sum(axis=1, keepdims=True))
    pair = names[first], names[second]
    found = tables_of(domain, sampled(model, 100_000)).table(pair)
    assert variation(found, truth.table(pair)) < 0.35 * variation(guess, truth.table(pair))


def test_refinements_bring_the_pairs_nearer():
    codes, noisy, model, _ = mixed()
    truth = tables_of(model.domain, codes)

    def error(of: CopulaModel) -> float:
        found = tables_of(model.domain, sampled(of, 100_000))
        return float(
            np.mean(
                [variation(found.table(pair), truth.table(pair)) for pair in model.domain.pairs()]
            )
        )

    assert error(model) < 0.7 * error(fitted_of(noisy, refinements=0)[0])


def test_binary_attributes_meet_every_pair():
    domain, codes = named(*(2,) * 7), population((2,) * 7)
    model, report = fitted_of(noisy_of(domain, codes))
    assert report.n_latents == 7
    truth, found = tables_of(domain, codes), tables_of(domain, sampled(model, 3 * CHUNK_ROWS))
    assert max(variation(found.table(pair), truth.table(pair)) for pair in domain.pairs()) < 0.012


def test_what_never_happens_along_the_tree_hardly_ever_does():
    rng = np.random.default_rng(4)
    first = rng.integers(0, 8, N)
    codes = np.stack([first, first // 2, rng.integers(0, 3, N)]).astype(np.uint8)
    domain = named(8, 4, 3)
    for sigma, most in ((0.05, 1e-4), (30.0, 0.01)):
        model, _ = fitted_of(noisy_of(domain, codes, sigma))
        assert frozenset((0, 1)) in edges_of(model)
        records = sampled(model, 40_000)
        assert (records[0] // 2 != records[1]).mean() <= most


def test_an_empty_level_is_never_drawn_and_has_no_latent_variable():
    codes = population((5, 4))
    codes[0][codes[0] == 2] = 1
    model, report = fitted_of(noisy_of(named(5, 4), codes, 0.05))
    assert report.n_latents == 4 + 4
    assert not (sampled(model, 20_000)[0] == 2).any()


def test_small_partitions_have_the_same_law_as_large_ones():
    _, noisy, model, _ = mixed()
    cleaned, parts, n = denoise(noisy), 500, 9
    records = np.concatenate([sampled(model, n, f"part {part}") for part in range(parts)], axis=1)
    found = tables_of(model.domain, records)
    for name, counts in zip(model.domain.names, cleaned.one_way, strict=True):
        share = counts / cleaned.n_rows
        assert (
            np.abs(found.table((name,)) - parts * n * share)
            < 6.5 * np.sqrt(parts * n * share * (1 - share)) + 1
        ).all()


# Shapes at the ends


@pytest.mark.parametrize("sizes", [(1,), (2,), (5,), (1, 1), (1, 4), (4, 1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("n", [0, 1, 700])
def test_domains_and_partitions_of_any_size(sizes, n):
    domain = named(*sizes)
    codes = np.stack([np.random.default_rng(1).integers(0, size, 2000) for size in sizes]).astype(
        domain.code_dtype
    )
    model, report = fitted_of(noisy_of(domain, codes, 2.0))
    records = sampled(model, n)
    assert report.n_latents == model.n_latents <= sum(map(n_latents_of, sizes))
    assert all((records[place] == 0).all() for place, size in enumerate(sizes) if size == 1)


def test_an_attribute_of_more_levels_than_a_byte_counts():
    domain = named(3, 300)
    codes = np.stack(
        [np.random.default_rng(1).integers(0, size, 9000) for size in domain.sizes]
    ).astype(np.uint16)
    model, _ = fitted_of(noisy_of(domain, codes, 2.0), refinements=0)
    assert len(set(sampled(model, 3000)[1].tolist())) > 290


@pytest.mark.parametrize("options", [{"pairs": False}, {"one_way": False}])
def test_one_kind_of_tables_is_enough(options):
    codes = population((3, 4, 2))
    domain = named(3, 4, 2)
    model, _ = fitted_of(noisy_of(domain, codes, **options))
    truth, found = tables_of(domain, codes), tables_of(domain, sampled(model, 50_000))
    assert (
        max(variation(found.table((name,)), truth.table((name,))) for name in domain.names) < 0.001
    )
    pairs = max(variation(found.table(pair), truth.table(pair)) for pair in domain.pairs())
    assert pairs > 0.1 if "pairs" in options else pairs < 0.02


@pytest.mark.parametrize("n_rows", [0, 3, 5000])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_records_are_valid_where_noise_drowns_everything(n_rows, adjacency):
    domain = named(*MIXED)
    planned = plan_noise(Budget(epsilon=1e-3, adjacency=adjacency), len(MIXED))
    counts = tables_of(domain, population(MIXED, max(n_rows, 1))[:, :n_rows])
    noisy = measure(
        counts,
        planned,
        n_rows_public=adjacency == "replace-one" and n_rows > 0,
        rng=keyed(f"drown {n_rows}"),
    )
    model, report = fitted_of(noisy)
    sampled(model, 3000)
    assert np.isfinite(model.factor).all()
    assert report.kept_share <= 1


# The report and the options


def test_the_report_says_what_was_met():
    _, _, model, report = mixed()
    assert report.n_latents == sum(map(n_latents_of, MIXED)) == model.n_latents
    assert 0.9 < report.kept_share <= 1
    assert 0 <= report.moved < 0.2
    assert 0 <= report.n_iterations < 1000
    assert 0 <= report.residual < 1e-4
    drowned = noisy_of(model.domain, population(MIXED, 2000, common=0.0), 300.0)
    assert fitted_of(drowned)[1].kept_share < 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"consistency": False},
        {"shrinkage": False},
        {"significance": False},
        {"tree": False},
        {"refinements": 0},
        {"shrinkage": False, "tree": False},
    ],
    ids=str,
)
def test_every_step_can_be_left_out(options):
    codes, _, _, _ = mixed()
    domain = named(*MIXED)
    model, report = fitted_of(noisy_of(domain, codes, 30.0), **options)
    truth, found = tables_of(domain, codes), tables_of(domain, sampled(model, 50_000))
    assert (
        max(variation(found.table((name,)), truth.table((name,))) for name in domain.names) < 0.01
    )
    assert (
        np.mean([variation(found.table(pair), truth.table(pair)) for pair in domain.pairs()]) < 0.06
    )
    if options.get("significance") is False:
        assert report.kept_share == 1
    assert len(edges_of(model)) == (0 if options.get("tree") is False else len(MIXED) - 1)


def test_too_many_latent_variables_are_not_refined(monkeypatch):
    _, noisy, _, _ = mixed()
    plain, _ = fitted_of(noisy, refinements=0)
    monkeypatch.setattr(copula_fit, "_MOST_REFINED", 5)
    assert fitted_of(noisy)[0].factor.tobytes() == plain.factor.tobytes()


def test_the_fit_looks_at_nothing_but_the_noisy_tables():
    """The same noisy tables and stream give the same model, whatever the rows were."""
    _, noisy, model, report = mixed()
    again, report_again = fitted_of(pickle.loads(pickle.dumps(noisy)))
    assert report_again == report
    assert again.factor.tobytes() == model.factor.tobytes()
    for left, right in zip(again.nodes, model.nodes, strict=True):
        assert (left.attribute, left.parent, left.first) == (
            right.attribute,
            right.parent,
            right.first,
        )
        assert (left.offsets.tobytes(), left.probabilities.tobytes()) == (
            right.offsets.tobytes(),
            right.probabilities.tobytes(),
        )


# Streams


@pytest.mark.parametrize("n", [1, 1000, CHUNK_ROWS + 1])
def test_the_same_stream_gives_the_same_records_and_another_partition_others(n):
    _, _, model, _ = mixed()
    assert sampled(model, n).tobytes() == sampled(model, n).tobytes()
    others = {sampled(model, n, f"part {part}").tobytes() for part in range(40)}
    assert len(others) == 40 if n > 1 else len(others) > 5
    assert (
        model.sample(n, model.stream(RunKey.insecure(22), "part")).tobytes()
        != sampled(model, n).tobytes()
        or n == 1
    )


def test_chunks_of_one_partition_differ():
    _, _, model, _ = mixed()
    records = sampled(model, 2 * CHUNK_ROWS)
    same = (records[:, :CHUNK_ROWS] == records[:, CHUNK_ROWS:]).all(axis=0).mean()
    assert same < 0.2


# The file

SCHEMA = Schema.from_dict(
    {
        "columns": {
            "c0": {
                "role": "privatise",
                "kind": "categorical",
                "levels": ["a", "b", "c"],
                "nulls": "level",
            },
            "c1": {"role": "privatise", "kind": "continuous", "bounds": [0, 10]},
            "c2": {"role": "privatise", "kind": "mixed", "bounds": [0, 100], "atoms": [0]},
            "kept": {"role": "drop"},
        }
    }
)
TYPES = pa.schema({"c0": pa.string(), "c1": pa.float64(), "c2": pa.int32()})


@lru_cache
def saved() -> FittedCopula:
    sizes = (4, 5, 4)
    noisy = noisy_of(named(*sizes), population(sizes), 10.0)
    model, report = fitted_of(noisy)
    return FittedCopula(
        schema=SCHEMA,
        types=TYPES,
        bins={"c1": 5, "c2": [1, 30, 70]},
        noisy=noisy,
        model=model,
        report=report,
    )


def test_a_fitted_copula_comes_back_from_its_bytes():
    fitted = saved()
    back = FittedCopula.from_bytes(fitted.to_bytes(), "copula.npz")
    assert back.report == fitted.report
    assert (back.model.domain, back.model.n_rows, back.noisy.noise) == (
        fitted.model.domain,
        fitted.model.n_rows,
        fitted.noisy.noise,
    )
    for n in (0, 1, CHUNK_ROWS + 5):
        assert sampled(back.model, n).tobytes() == sampled(fitted.model, n).tobytes()
    assert [column.labels() for column in back.cells().values()] == [
        column.labels() for column in fitted.cells().values()
    ]
    assert [column.size for column in back.cells().values()] == list(back.model.domain.sizes)


@pytest.mark.parametrize("sizes", [(1,), (1, 1), (2,)], ids=str)
def test_a_copula_of_hardly_anything_comes_back_too(sizes):
    noisy = noisy_of(named(*sizes), population(sizes, 100), 1.0)
    model, report = fitted_of(noisy)
    columns = {
        name: {"role": "privatise", "kind": "discrete", "levels": list(range(size))}
        for name, size in zip(noisy.domain.names, sizes, strict=True)
    }
    types = pa.schema([(name, pa.int64()) for name in columns])
    fitted = FittedCopula(
        schema=Schema.from_dict({"columns": columns}),
        types=types,
        bins={},
        noisy=noisy,
        model=model,
        report=report,
    )
    back = FittedCopula.from_bytes(fitted.to_bytes(), "copula.npz")
    assert sampled(back.model, 50).tobytes() == sampled(model, 50).tobytes()


def test_one_number_of_bins_is_for_every_cut_column():
    columns = saved().cells()
    assert bins_by_column(7, columns) == {"c1": 7, "c2": 7}
    assert bins_by_column({"c1": [0, 5]}, columns) == {"c1": [0, 5], "c2": 20}
