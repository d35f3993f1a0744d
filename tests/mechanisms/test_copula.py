"""The copula from noisy tables to records: its margins, its tree, the other pairs, and raking."""

import itertools
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pytest
from e2e.helpers import schema_of
from mechanisms.noisy import KEY, counts_of, keyed, named, noisy_of, variation, variations
from numpy.random import default_rng

from dpdask.mechanisms.columns import CHUNK_ROWS
from dpdask.mechanisms.copula import fit as copula_fit
from dpdask.mechanisms.copula import model as raking
from dpdask.mechanisms.copula.fit import CopulaOptions, fit_copula
from dpdask.mechanisms.copula.model import BLOCK_ROWS, CopulaModel, n_latents_of
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.mechanisms.marginals.noise import denoise, measure, plan_noise
from dpdask.privacy import Budget

N = 60_000
MIXED = (4, 2, 5, 3, 6, 2)


def population(sizes, n=N, common=0.6):
    """Rows of coarse looks at one hidden number: every pair depends, and no tree explains them all."""
    rng = default_rng(0)
    hidden = rng.normal(size=n)
    looks = [np.sqrt(common) * hidden + np.sqrt(1 - common) * rng.normal(size=n) for _ in sizes]
    shares = [np.sort(rng.uniform(0.08, 0.92, size - 1)) for size in sizes]
    cuts = [np.quantile(look, share) for look, share in zip(looks, shares, strict=True)]
    codes = [np.searchsorted(cut, look) for cut, look in zip(cuts, looks, strict=True)]
    return np.stack(codes).astype(np.uint8)


def fitted_of(noisy, **options):
    given = CopulaOptions(**options) if options else None
    return fit_copula(noisy, keyed("fit"), given, records="copula")


@lru_cache
def mixed():
    codes = population(MIXED)
    noisy = noisy_of(named(*MIXED), codes, 0.3)
    return codes, noisy, *fitted_of(noisy)


def sampled(model, n, name="part"):
    """Records, after a look at whether each is valid."""
    records = model.sample(n, model.stream(KEY, name))
    assert records.dtype == model.domain.code_dtype
    assert records.shape == (model.domain.n_attributes, n)
    assert (records < np.array(model.domain.sizes)[:, None]).all()
    return records


def edges_of(model):
    parents = [node for node in model.nodes if node.parent >= 0]
    return {frozenset((node.attribute, model.nodes[node.parent].attribute)) for node in parents}


# ---- margins and the tree


@pytest.mark.parametrize("n", [1000, 100_000])
def test_levels_and_the_trees_pairs_come_as_often_as_the_tables_ask(n):
    """Quotas: each table is met up to one record for each cell and chunk; sampling is off by the root."""
    _, noisy, model, _ = mixed()
    cleaned = denoise(noisy)
    found, names = counts_of(model.domain, sampled(model, n)), model.domain.names
    slack = (1 + n // CHUNK_ROWS) * sum(MIXED) + 1e-3 * n / N
    for name, wanted in zip(names, cleaned.one_way, strict=True):
        assert np.abs(found.table((name,)) - n * wanted / cleaned.n_rows).max() <= slack
    assert len(edges_of(model)) == len(MIXED) - 1
    for first, second in map(sorted, edges_of(model)):
        wanted = n * cleaned.table(first, second) / cleaned.n_rows
        assert np.abs(found.table((names[first], names[second])) - wanted).max() <= slack


def test_pairs_off_the_tree_are_recovered_far_beyond_independence():
    codes, noisy, model, _ = mixed()
    domain = model.domain
    truth, found = counts_of(domain, codes), counts_of(domain, sampled(model, 100_000))
    pairs = list(itertools.combinations(range(len(MIXED)), 2))
    off_tree = np.array([frozenset(pair) not in edges_of(model) for pair in pairs])
    levels = [truth.table((name,)) for name in domain.names]
    independent = [
        variation(np.outer(levels[a], levels[b]), truth.table((domain.names[a], domain.names[b])))
        for a, b in pairs
    ]
    errors, baseline = np.array(variations(found, truth)), np.array(independent)
    assert off_tree.sum() == 10
    assert errors[off_tree].mean() < 0.12 * baseline[off_tree].mean()
    assert (errors[off_tree] < 0.3 * baseline[off_tree]).all()
    unrefined = counts_of(domain, sampled(fitted_of(noisy, refinements=0)[0], 100_000))
    assert errors.mean() < 0.7 * np.mean(variations(unrefined, truth))


def test_binary_attributes_meet_every_pair():
    domain, codes = named(*(2,) * 7), population((2,) * 7)
    model, report = fitted_of(noisy_of(domain, codes, 0.3))
    assert report.n_latents == 7
    found = counts_of(domain, sampled(model, 3 * CHUNK_ROWS))
    assert max(variations(found, counts_of(domain, codes))) < 0.012


def test_what_never_happens_along_the_tree_hardly_ever_does():
    rng = default_rng(4)
    first = rng.integers(0, 8, N)
    codes = np.stack([first, first // 2, rng.integers(0, 3, N)])
    for sigma, most in ((0.05, 1e-4), (30.0, 0.01)):
        model, _ = fitted_of(noisy_of(named(8, 4, 3), codes, sigma))
        assert frozenset((0, 1)) in edges_of(model)
        records = sampled(model, 40_000)
        assert (records[0] // 2 != records[1]).mean() <= most


def test_an_empty_level_is_never_drawn_and_has_no_latent_variable():
    codes = population((5, 4))
    codes[0][codes[0] == 2] = 1
    model, report = fitted_of(noisy_of(named(5, 4), codes, 0.05))
    assert report.n_latents == 4 + 4
    assert not (sampled(model, 20_000)[0] == 2).any()


# ---- shapes at the ends


@pytest.mark.parametrize("sizes", [(1,), (5,), (1, 1), (4, 1, 2), (3, 300)], ids=str)
def test_domains_and_partitions_of_any_size(sizes):
    domain, rng = named(*sizes), default_rng(1)
    codes = np.stack([rng.integers(0, size, 9000) for size in sizes])
    noisy = noisy_of(domain, codes, 2.0)
    model, report = fitted_of(noisy, refinements=3 if max(sizes) < 10 else 0)
    assert report.n_latents == model.n_latents <= sum(map(n_latents_of, sizes))
    for n in (0, 1, 3000):
        records = sampled(model, n)
    assert all((records[place] == 0).all() for place, size in enumerate(sizes) if size == 1)
    assert len(set(records[-1].tolist())) > 0.97 * sizes[-1]
    columns = {
        name: {"role": "privatise", "kind": "discrete", "levels": list(range(size))}
        for name, size in zip(domain.names, sizes, strict=True)
    }
    fitted = FittedCopula(
        schema=schema_of(columns),
        columns=pa.schema([(name, pa.int64()) for name in columns]),
        bins={},
        noisy=noisy,
        model=model,
        report=report,
    )
    back = FittedCopula.from_bytes(fitted.to_bytes(), "copula.npz")
    assert sampled(back.model, 50).tobytes() == sampled(model, 50).tobytes()


@pytest.mark.parametrize("options", [{"pairs": False}, {"one_way": False}], ids=str)
def test_one_kind_of_tables_is_enough(options):
    codes, domain = population((3, 4, 2)), named(3, 4, 2)
    model, _ = fitted_of(noisy_of(domain, codes, 0.3, **options))
    truth, found = counts_of(domain, codes), counts_of(domain, sampled(model, 50_000))
    levels = [variation(found.table((name,)), truth.table((name,))) for name in domain.names]
    assert max(levels) < 0.001
    pairs = max(variations(found, truth))
    assert pairs > 0.1 if "pairs" in options else pairs < 0.02


@pytest.mark.parametrize("n_rows", [0, 5000])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_records_are_valid_where_noise_drowns_everything(n_rows, adjacency):
    planned = plan_noise(Budget(epsilon=1e-3, adjacency=adjacency), len(MIXED))
    counts = counts_of(named(*MIXED), population(MIXED, max(n_rows, 1))[:, :n_rows])
    public = adjacency == "replace-one" and n_rows > 0
    noisy = measure(counts, planned, n_rows_public=public, rng=keyed(f"drown {n_rows}"))
    model, report = fitted_of(noisy)
    sampled(model, 3000)
    assert np.isfinite(model.factor).all()
    assert report.kept_share <= 1


# ---- the report and the options


def test_the_report_says_what_was_met():
    _, _, model, report = mixed()
    assert report.n_latents == sum(map(n_latents_of, MIXED)) == model.n_latents
    assert 0.9 < report.kept_share <= 1
    assert 0 <= report.moved < 0.2
    assert 0 <= report.n_iterations < 1000
    assert 0 <= report.residual < 1e-4
    drowned = noisy_of(model.domain, population(MIXED, 2000, common=0.0), 300.0)
    assert fitted_of(drowned)[1].kept_share < 0.1


STEPS = ["consistency", "shrinkage", "significance", "tree", "refinements"]


@pytest.mark.parametrize("left_out", STEPS)
def test_every_step_can_be_left_out(left_out):
    codes, domain = mixed()[0], named(*MIXED)
    options = {left_out: 0 if left_out == "refinements" else False}
    model, report = fitted_of(noisy_of(domain, codes, 30.0), **options)
    truth, found = counts_of(domain, codes), counts_of(domain, sampled(model, 50_000))
    levels = [variation(found.table((name,)), truth.table((name,))) for name in domain.names]
    assert max(levels) < 0.01
    assert np.mean(variations(found, truth)) < 0.06
    assert (report.kept_share == 1) == (left_out == "significance")
    assert len(edges_of(model)) == (0 if left_out == "tree" else len(MIXED) - 1)


def test_too_many_latent_variables_are_not_refined(monkeypatch):
    _, noisy, _, _ = mixed()
    plain, _ = fitted_of(noisy, refinements=0)
    monkeypatch.setattr(copula_fit, "_MOST_REFINED", 5)
    assert fitted_of(noisy)[0].factor.tobytes() == plain.factor.tobytes()


# ---- raking

FIVES = (5,) * 6


def loops():
    """Rows in near-deterministic loops, which neither a tree nor a correlation matrix can hold."""
    rng = default_rng(1)
    a, b = rng.integers(0, 5, N), rng.integers(0, 5, N)
    c, d = (a + b) % 5, (a + 2 * b) % 5
    codes = np.stack([a, b, c, d, np.where(a == 0, b, 4 - c), (c * d) % 5])
    return np.where(rng.random(codes.shape) < 0.1, rng.integers(0, 5, codes.shape), codes)


def distances(noisy, records):
    """The total variation between each pair's denoised table and the records'."""
    cleaned, found, names = denoise(noisy), counts_of(noisy.domain, records), noisy.domain.names
    pairs = itertools.combinations(range(len(names)), 2)
    return np.array(
        [variation(found.table((names[a], names[b])), cleaned.table(a, b)) for a, b in pairs]
    )


@lru_cache
def looped():
    noisy = noisy_of(named(*FIVES), loops(), 20.0)
    return noisy, fit_copula(noisy, keyed("fit"))[0]


def test_raked_records_are_as_near_to_the_tables_as_a_resample_and_the_copulas_are_not():
    (noisy, model), n, rows = looped(), 20_000, loops()
    raked = distances(noisy, model.draw(n, keyed("draw")))
    own = distances(noisy, model.sample(n, keyed("draw")))
    resample = rows[:, default_rng(2).integers(0, N, n)]
    floor = distances(noisy_of(named(*FIVES), rows, 0.3), resample)
    assert raked.mean() < 1.2 * floor.mean()
    assert raked.max() < 2.0 * floor.max()
    assert own.mean() > 3.0 * raked.mean()


def test_raked_records_are_valid_shuffled_and_a_function_of_the_stream():
    _, model = looped()
    for n in (1, 20_000):
        records = model.draw(n, keyed("draw"))
        assert records.shape == (6, n)
        assert records.dtype == np.uint8
        assert (records < 5).all()
        assert (records == model.draw(n, keyed("draw"))).all()
    assert (records != model.draw(n, keyed("another"))).any()
    for row in records:  # systematic samples are sorted before they are shuffled
        shares = np.bincount(row) / len(row)
        assert (row[1:] == row[:-1]).mean() == pytest.approx((shares**2).sum(), abs=0.015)


def test_the_copulas_own_records_are_there_by_name_and_without_two_way_tables():
    noisy, _ = looped()
    own = fit_copula(noisy, keyed("fit"), records="copula")[0]
    assert own.targets is None
    assert (own.draw(500, keyed("draw")) == own.sample(500, keyed("draw"))).all()
    for codes in (loops()[:, :2000], loops()[:1, :2000]):
        one_way = noisy_of(named(*FIVES[: len(codes)]), codes, 3.0, pairs=False)
        model = fit_copula(one_way, keyed("fit"))[0]
        assert model.targets is None
        assert model.draw(10, keyed("draw")).shape == (len(codes), 10)


def test_many_tables_are_raked_where_the_copula_misses_most(monkeypatch):
    noisy, model = looped()
    assert len(model.targets.tables) == 15
    own = fit_copula(noisy, keyed("fit"), records="copula")[0]
    monkeypatch.setattr(raking, "MOST_TABLES", 4)
    few = fit_copula(noisy, keyed("fit"))[0].targets
    assert len(few.counts) == 4 * 25
    missed = distances(noisy, own.sample(CHUNK_ROWS, keyed("draw")))
    pairs = list(itertools.combinations(range(6), 2))
    chosen = [pairs.index((a, b)) for a, b in few.tables[:, :2].tolist()]
    # the samples of the fit and of this test differ by chance
    assert missed[chosen].sum() > 0.9 * np.sort(missed)[-4:].sum() > 1.5 * 4 * missed.mean()
    cleaned = denoise(noisy)
    wanted = [cleaned.table(int(a), int(b)).ravel() for a, b in few.tables[:, :2]]
    np.testing.assert_array_equal(few.counts, np.concatenate(wanted))
    # of independent columns none is raked: the most missed tables are those with the most noise
    rows = default_rng(4).integers(0, 3, (8, 20_000))
    flat = noisy_of(named(*(3,) * 8), rows, 50.0)
    assert fit_copula(flat, keyed("fit"))[0].targets is None


def test_a_rare_level_keeps_its_rows_where_the_pool_lacks_its_cells(monkeypatch):
    rng, shares = default_rng(5), 1.0 / np.arange(1.0, 201.0)
    shares /= shares.sum()
    targets = raking.Targets(
        total=1e6,
        tables=np.array([[0, 1, -1]]),
        counts=1e6 * np.repeat(shares / 300.0, 300),
        strengths=np.array([0.5]),
    )
    pool = np.stack(
        [rng.choice(200, raking.MIN_POOL, p=shares), rng.integers(0, 300, raking.MIN_POOL)]
    )
    pool = pool.astype(np.uint16)

    def miss():
        weights = targets.weigh(pool, named(200, 300), keyed("draw"))
        return variation(shares, np.bincount(pool[0], weights=weights, minlength=200))

    met = miss()
    monkeypatch.setattr(raking, "_DENSE", 0)
    assert met < 0.01 < 0.2 < miss()


def test_the_pool_and_the_block_are_bounded():
    """A record costs at most so many visits of tables, and a block so much memory."""
    _, model = looped()
    targets = model.targets
    for n_latents, n_tables in ((30, 15), (600, 15), (30, 1024)):
        many = raking.Targets(
            total=1.0,
            tables=np.zeros((n_tables, 3), dtype=np.int64),
            counts=targets.counts,
            strengths=np.ones(n_tables),
        )
        n_pool = many.n_pool(BLOCK_ROWS, n_latents)
        assert n_pool * n_tables * many.n_sweeps <= 2**13 * BLOCK_ROWS
        assert n_pool == BLOCK_ROWS * (2 if (n_latents, n_tables) == (30, 15) else 1)
    assert targets.n_pool(10, 30) == raking.MIN_POOL
    wide = CopulaModel(domain=named(*(2,) * 300), n_rows=1.0, nodes=(), factor=model.factor)
    assert (model.block_rows, wide.block_rows) == (BLOCK_ROWS, CHUNK_ROWS)
