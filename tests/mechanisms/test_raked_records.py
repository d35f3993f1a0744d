"""Records that are raked to the denoised tables: nearer to them than the copula's, a function of tables and stream, and bounded in work."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from dpdask.mechanisms.columns import CHUNK_ROWS
from dpdask.mechanisms.copula import model as raking
from dpdask.mechanisms.copula.fit import fit_copula
from dpdask.mechanisms.copula.model import BLOCK_ROWS, CopulaModel
from dpdask.mechanisms.marginals.denoise import denoise
from dpdask.mechanisms.marginals.noise import MarginalNoise, NoisyMarginals, measure
from dpdask.privacy.events import DiscreteGaussian
from dpdask.stats import Domain, MarginalCounts
from dpdask.streams import RunKey, stream

KEY = RunKey.insecure(5)
N = 60_000


def keyed(name: str) -> Any:
    return stream(KEY, "test", name)


def domain_of(*sizes: int) -> Domain:
    return Domain(names=tuple(f"c{place}" for place in range(len(sizes))), sizes=sizes)


def loops(n: int = N) -> np.ndarray:
    """Rows of six attributes in near-deterministic loops, which neither a tree nor a latent correlation matrix can hold."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 5, n), rng.integers(0, 5, n)
    c, d = (a + b) % 5, (a + 2 * b) % 5
    e, f = np.where(a == 0, b, 4 - c), (c * d) % 5
    codes = np.stack([a, b, c, d, e, f])
    return np.where(rng.random(codes.shape) < 0.1, rng.integers(0, 5, codes.shape), codes).astype(
        np.uint8
    )


def noisy_of(domain: Domain, codes: np.ndarray, sigma: float, pairs: bool = True) -> NoisyMarginals:
    event = DiscreteGaussian(sigma=sigma, sensitivity=1.0, adjacency="add-remove")
    planned = MarginalNoise(one_way=event, pairs=event if pairs else None, cliques={})
    return measure(
        MarginalCounts.of_codes(domain, codes), planned, n_rows_public=True, rng=keyed("noise")
    )


def distances(domain: Domain, noisy: NoisyMarginals, records: np.ndarray) -> np.ndarray:
    """The total variation between each pair's denoised table and the records'."""
    cleaned = denoise(noisy)
    found = MarginalCounts.of_codes(domain, np.ascontiguousarray(records.astype(domain.code_dtype)))
    pairs = itertools.combinations(range(domain.n_attributes), 2)
    n = records.shape[1]
    wanted = {pair: cleaned.table(*pair) / cleaned.n_rows for pair in pairs}
    return np.array(
        [
            np.abs(found.table((domain.names[a], domain.names[b])) / n - table).sum() / 2
            for (a, b), table in wanted.items()
        ]
    )


@pytest.fixture(scope="module")
def fitted() -> tuple[Domain, NoisyMarginals, CopulaModel]:
    domain = domain_of(5, 5, 5, 5, 5, 5)
    noisy = noisy_of(domain, loops(), 20.0)
    return domain, noisy, fit_copula(noisy, keyed("fit"))[0]


@pytest.mark.parametrize("n", [20_000, BLOCK_ROWS])
def test_raked_records_are_as_near_to_the_tables_as_a_resample_and_the_copulas_are_not(fitted, n):
    domain, noisy, model = fitted
    raked = distances(domain, noisy, model.draw(n, keyed("draw")))
    own = distances(domain, noisy, model.sample(n, keyed("draw")))
    rows = loops()
    floor = distances(
        domain, noisy_of(domain, rows, 0.3), rows[:, np.random.default_rng(2).integers(0, N, n)]
    )
    assert raked.mean() < 1.2 * floor.mean()
    assert raked.max() < 2.0 * floor.max()
    assert own.mean() > 3.0 * raked.mean()


def test_records_are_valid_and_a_function_of_the_stream(fitted):
    domain, _, model = fitted
    for n in (1, 7, 1000):
        records = model.draw(n, keyed("draw"))
        assert records.shape == (domain.n_attributes, n)
        assert records.dtype == np.uint8
        assert (records < 5).all()
        assert (records == model.draw(n, keyed("draw"))).all()
        assert n == 1 or (records != model.draw(n, keyed("another"))).any()


def test_the_order_of_records_says_nothing(fitted):
    """No run of equal neighbours beyond chance: systematic samples are sorted before they are shuffled."""
    records = fitted[2].draw(20_000, keyed("draw"))
    for row in records:
        shares = np.bincount(row) / len(row)
        assert (row[1:] == row[:-1]).mean() == pytest.approx((shares**2).sum(), abs=0.015)


def test_the_copulas_own_records_are_there_by_name(fitted):
    _, noisy, _ = fitted
    own = fit_copula(noisy, keyed("fit"), records="copula")[0]
    assert own.targets is None
    assert (own.draw(500, keyed("draw")) == own.sample(500, keyed("draw"))).all()


def test_without_two_way_tables_there_is_nothing_to_rake_to():
    domain = domain_of(5, 5, 5, 5, 5, 5)
    assert (
        fit_copula(noisy_of(domain, loops(2000), 3.0, pairs=False), keyed("fit"))[0].targets is None
    )
    alone = domain_of(5)
    assert fit_copula(noisy_of(alone, loops(2000)[:1], 3.0, pairs=False), keyed("fit"))[0].draw(
        10, keyed("draw")
    ).shape == (1, 10)


def test_less_noise_is_believed_more(fitted):
    domain, _, model = fitted
    noisier = fit_copula(noisy_of(domain, loops(), 200.0), keyed("fit"))[0]
    assert model.targets is not None
    assert noisier.targets is not None
    assert model.targets.strengths == pytest.approx(100 * noisier.targets.strengths)


def test_many_tables_are_raked_where_the_copula_misses_most(monkeypatch, fitted):
    _, noisy, model = fitted
    assert model.targets is not None
    assert len(model.targets.tables) == 15
    own = fit_copula(noisy, keyed("fit"), records="copula")[0]
    monkeypatch.setattr(raking, "MOST_TABLES", 4)
    few = fit_copula(noisy, keyed("fit"))[0].targets
    assert few is not None
    assert len(few.tables) == 4
    assert len(few.counts) == 4 * 25
    missed = distances(domain_of(5, 5, 5, 5, 5, 5), noisy, own.sample(CHUNK_ROWS, keyed("draw")))
    worst = sorted(
        np.array(list(itertools.combinations(range(6), 2)))[np.argsort(-missed)[:4]].tolist()
    )
    assert few.tables[:, :2].tolist() == worst
    cleaned = denoise(noisy)
    for place, (a, b) in enumerate(few.tables[:, :2]):
        np.testing.assert_array_equal(
            few.counts[25 * place : 25 * place + 25], cleaned.table(int(a), int(b)).ravel()
        )


def test_the_pool_and_the_block_are_bounded(fitted):
    """However many columns there are, a record costs at most so many visits of tables, and a block so much memory."""
    model = fitted[2]
    targets = model.targets
    assert targets is not None
    for n_latents, n_tables in ((30, 15), (600, 15), (30, 1024)):
        many = raking.Targets(
            total=1.0,
            tables=np.zeros((n_tables, 3), dtype=np.int64),
            counts=targets.counts,
            strengths=np.ones(n_tables),
        )
        assert many.n_pool(BLOCK_ROWS, n_latents) * n_tables * many.n_sweeps <= 2**13 * BLOCK_ROWS
        assert many.n_pool(BLOCK_ROWS, n_latents) == (
            2 * BLOCK_ROWS if (n_latents, n_tables) == (30, 15) else BLOCK_ROWS
        )
    assert targets.n_pool(10, 30) == raking.MIN_POOL
    wide = CopulaModel(domain=domain_of(*(2,) * 300), n_rows=1.0, nodes=(), factor=model.factor)
    assert (model.block_rows, wide.block_rows) == (BLOCK_ROWS, CHUNK_ROWS)


def test_of_many_tables_none_is_raked_that_noise_alone_explains(monkeypatch):
    """The most missed of many tables are otherwise those with the most noise."""
    monkeypatch.setattr(raking, "MOST_TABLES", 4)
    domain = domain_of(*(3,) * 8)
    rows = np.random.default_rng(4).integers(0, 3, (8, 20_000)).astype(np.uint8)
    assert fit_copula(noisy_of(domain, rows, 50.0), keyed("fit"))[0].targets is None
