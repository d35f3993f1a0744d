"""The histogram reference: public cells, exact counts, brute-forced sensitivity, noise as accounted, and a distribution at the end."""

import itertools
import math
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from e2e.helpers import schema_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from strategies import level_codec, value_codec

import dpdask
from dpdask.cells import cells
from dpdask.codec import LevelCodec
from dpdask.documents import validate
from dpdask.errors import DataError, SpecError
from dpdask.kernels import rank as cdf_kernel
from dpdask.kernels.rank import guide as guide_of
from dpdask.privacy import noise
from dpdask.privacy.events import epsilon as paid
from dpdask.references import LevelDistribution
from dpdask.references.hierarchy import find_simplest
from dpdask.references.histogram import (
    CellCounts,
    Histogram,
    _mark_frequent,
    distribution_of,
    histogram_event,
)
from dpdask.references.reference import ColumnCounts
from dpdask.streams import RunKey, stream

ALPHA = 1e-10


def keyed(name):
    return stream(RunKey.insecure(5), "histogram", name)


# The spec


def test_a_spec_has_defaults_and_splits_epsilon_without_overspending():
    spec = validate(Histogram, {"kind": "histogram"}, "job")
    assert (spec.share, spec.bins) == (0.1, "adaptive")
    for epsilon in (1.0, 0.1, 1e-9, 100.0, math.pi):
        reference, row = spec.split(epsilon)
        assert reference == pytest.approx(0.1 * epsilon)
        assert paid([histogram_event(reference, "replace-one")], 0) <= reference
        assert 0 <= epsilon - (reference + row) <= 1e-15 * epsilon


@pytest.mark.parametrize(
    "data",
    [
        {"share": 0},
        {"share": 1.0},
        {"share": -0.1},
        {"share": math.nan},
        {"bins": 1},
        {"bins": 2**15 + 1},
        {"bin": 4},
        {"kind": "tree"},
    ],
)
def test_a_spec_that_cannot_be_is_refused(data):
    with pytest.raises(SpecError):
        validate(Histogram, data, "job")


# The cells


def test_a_value_outside_the_domain_is_refused_even_where_it_is_not_chosen():
    grid = cells(value_codec(), 4)
    with pytest.raises(DataError):
        CellCounts.of_batch(grid, pa.array([11.0, 1.0]), np.array([False, True]))


# The counts

ROWS = st.lists(
    st.one_of(st.none(), st.floats(0, 10), st.sampled_from([0.0, 2.5, 6.0, 10.0])), max_size=60
)


@settings(max_examples=100)
@given(ROWS, st.integers(0, 60), st.integers(2, 40))
def test_counts_are_exact_and_merge_like_sets_of_rows(rows, cut, bins):
    grid = cells(value_codec(atoms=(0.0, 6.0), nulls=True), bins)
    array = pa.array(rows, type=pa.float64())
    whole = CellCounts.of_batch(grid, array)
    line = [row for row in rows if row not in (None, 0.0, 6.0)]
    oracle = [
        sum(low < row <= high or (k == 0 and row == low) for row in line)
        for k, (low, high) in enumerate(itertools.pairwise(grid.edges))
    ]
    assert whole.counts.tolist() == [rows.count(None), rows.count(0.0), rows.count(6.0), *oracle]
    first, second = CellCounts.of_batch(grid, array[:cut]), CellCounts.of_batch(grid, array[cut:])
    empty = CellCounts.identity(grid)
    for merged in (
        first.merge(second),
        second.merge(first),
        empty.merge(first, second),
        whole.merge(empty),
    ):
        assert merged.counts.dtype == np.int64
        assert merged.counts.tolist() == whole.counts.tolist()
    assert whole.n_rows == len(rows)
    chosen = np.arange(len(rows)) < cut
    assert CellCounts.of_batch(grid, array, chosen).counts.tolist() == first.counts.tolist()


# The sensitivity, by brute force

GRIDS = [
    (cells(level_codec([None, 1, 2]), 2), [None, 1, 2]),
    (cells(value_codec(atoms=(5.0,), nulls=True), 2), [None, 5.0, 1.0, 2.0, 8.0]),
    (cells(value_codec(type_=pa.int32(), bounds=(0.0, 2.0), atoms=(1.0,)), 2), [0, 1, 2]),
]
LATTICE = value_codec(type_=pa.int32(), bounds=(0.0, 9.0), atoms=(0.0, 5.0))


def neighbours(table, domain, adjacency):
    for position in range(len(table)):
        rest = table[:position] + table[position + 1 :]
        yield from [rest] if adjacency == "add-remove" else [(*rest, value) for value in domain]


@pytest.mark.parametrize(("grid", "domain"), GRIDS, ids=["levels", "mixed", "lattice"])
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_the_sensitivity_of_the_event_is_the_largest_change_of_the_counts(grid, domain, adjacency):
    type_ = grid.codec.levels.type if isinstance(grid.codec, LevelCodec) else grid.codec.type

    def counted(table):
        return CellCounts.of_batch(grid, pa.array(table, type=type_)).counts[grid.possible]

    worst = 0
    for table in itertools.chain.from_iterable(
        itertools.product(domain, repeat=n) for n in (1, 2, 3)
    ):
        worst = max(
            worst,
            *(
                int(np.abs(counted(table) - counted(other)).sum())
                for other in neighbours(table, domain, adjacency)
            ),
        )
    assert (
        worst
        == histogram_event(1.0, adjacency).sensitivity
        == {"replace-one": 2, "add-remove": 1}[adjacency]
    )
    assert histogram_event(1.0, adjacency, rows_per_unit=20).sensitivity == 20 * worst


# The noise that is drawn, and what is accounted

WIDE = cells(value_codec(), 20_000)


def drawn_fits(scale_of_distribution, adjacency, secure):
    statistic = CellCounts(np.full(WIDE.n_cells, 100))
    noisy = noise.perturb(
        statistic.counts[WIDE.possible],
        histogram_event(0.5, adjacency),
        rng=None if secure else keyed("draw"),
    )
    e = np.abs(noisy - 100)
    ratio = math.exp(-1 / scale_of_distribution)
    top = round(3 * scale_of_distribution)
    expected = np.array(
        [
            math.tanh(1 / (2 * scale_of_distribution)) * ratio**k * (2 if k else 1)
            for k in range(top)
        ]
    )
    expected = np.append(expected, 1 - expected.sum()) * len(e)
    observed = np.bincount(np.minimum(e, top), minlength=top + 1)
    return bool(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), top) > ALPHA)


@pytest.mark.parametrize(
    ("adjacency", "sensitivity", "secure"),
    [("replace-one", 2, True), ("add-remove", 1, False)],
    ids=["secure", "keyed"],
)
def test_the_noise_drawn_costs_the_epsilon_accounted_and_neither_changes_alone(
    adjacency, sensitivity, secure, monkeypatch
):
    """The distribution is derived from the accountant's price of the event and the brute-forced sensitivity, never from the scale."""
    event = histogram_event(0.5, adjacency)
    assert paid(event, 0) == 0.5
    assert drawn_fits(sensitivity / paid(event, 0), adjacency, secure)
    for changed in (
        replace(event, scale=2 * event.scale),
        replace(event, scale=event.scale / 2),
        replace(event, sensitivity=3 - event.sensitivity),
    ):
        assert not drawn_fits(sensitivity / paid(changed, 0), adjacency, secure)
    honest = noise.discrete_laplace
    for factor in (0.5, 2.0):
        with monkeypatch.context() as patch:
            patch.setattr(
                noise,
                "discrete_laplace",
                lambda counts, scale, rng=None, factor=factor: honest(
                    counts, scale * factor, rng=rng
                ),
            )
            assert not drawn_fits(sensitivity / paid(event, 0), adjacency, secure)


# The distribution


def noisy_distribution(grid, counted, epsilon, adjacency, rng=None):
    """The number of rows is public under replace-one, and private under add-remove."""
    noisy = noise.perturb(
        counted.counts[grid.possible], histogram_event(epsilon, adjacency), rng=rng
    )
    return distribution_of(grid, noisy, counted.n_rows if adjacency == "replace-one" else None)


@pytest.mark.parametrize(
    ("codec", "bins", "counts", "x", "c"),
    [
        (
            value_codec(atoms=(0.0, 6.0), nulls=True),
            2,
            [10, 20, 0, 40, 10, 20],
            [0, 0, 5, 6, 6, 10],
            [0.1, 0.3, 0.7, 0.8, 0.8, 1.0],
        ),
        (LATTICE, 2, [10, 30, 20, 40], [-1, 0, 0, 4, 5, 5, 9], [0, 0, 0.1, 0.3, 0.3, 0.6, 1]),
        (value_codec(), 4, [0, 50, 0, 50], [0, 2.5, 5, 7.5, 10], [0, 0, 0.5, 0.5, 1]),
    ],
    ids=["mixed", "whole", "an empty cell"],
)
def test_without_noise_the_cdf_is_the_histogram(codec, bins, counts, x, c):
    found = distribution_of(cells(codec, bins), np.array(counts), 100)
    assert found.x.tolist() == x
    assert found.c == pytest.approx(c)
    assert found.rank_error == pytest.approx(np.diff(c, prepend=0).max())


DATES = value_codec(type_=pa.date32(), bounds=(0.0, 400.0), atoms=(100.0,), nulls=True)
MIXED = value_codec(bounds=(-3.0, 7.0), atoms=(-3.0, 0.0, 7.0), nulls=True)


@pytest.mark.parametrize(
    "codec",
    [value_codec(), MIXED, value_codec(type_=pa.int64(), bounds=(-5.0, 90.0)), DATES],
    ids=["real", "mixed", "whole", "dates"],
)
@pytest.mark.parametrize("seed", [0])
def test_rows_released_through_the_noisy_cdf_have_its_distribution(codec, seed):
    """Ranks drawn uniformly and read through the cdf fall in each cell with its probability, in the domain, and on the lattice."""
    rng = np.random.default_rng(seed)
    grid = cells(codec, 16)
    counts = CellCounts((rng.poisson(40, size=grid.n_cells) * grid.possible).astype(np.int64))
    distribution = noisy_distribution(grid, counts, 0.4, "replace-one", rng=keyed(f"law {seed}"))
    x, c = distribution.x, distribution.c
    assert (np.diff(x) >= 0).all()
    assert (np.diff(c) >= 0).all()
    assert c[-1] == 1.0
    values, is_null = cdf_kernel.values_at(rng.random(20_000), x, c, guide_of(c), codec.lattice)
    found = grid.index(codec.decode(values, is_null))
    jumps = np.diff(c, prepend=0.0)
    probabilities = np.zeros(grid.n_cells)
    offset = int(codec.nulls)
    probabilities[0] += c[0]
    for k in range(1, len(x)):
        at_atom = x[k] == x[k - 1]
        cell = (
            offset + codec.atoms.index(x[k])
            if at_atom
            else offset + len(codec.atoms) + int(np.searchsorted(grid.edges, x[k])) - 1
        )
        probabilities[cell] += jumps[k]
    observed = np.bincount(found, minlength=grid.n_cells)
    assert (observed[probabilities <= 1e-15] <= 1).all()
    kept = probabilities > 1e-15
    expected = probabilities[kept] * 20_000
    assert (
        stats.chi2.sf(((observed[kept] - expected) ** 2 / expected).sum(), kept.sum() - 1) > ALPHA
    )


def test_noise_that_drowns_everything_still_gives_a_distribution():
    for codec in (level_codec([None, 1, 2]), MIXED, value_codec()):
        grid = cells(codec, 8)
        for trial in range(5):
            for adjacency in ("replace-one", "add-remove"):
                statistic = CellCounts(np.eye(grid.n_cells, dtype=np.int64)[0] * 2)
                distribution = noisy_distribution(
                    grid, statistic, 1e-6, adjacency, rng=keyed(f"drown {trial}")
                )
                if isinstance(distribution, LevelDistribution):
                    assert distribution.probabilities.sum() == pytest.approx(1)
                else:
                    assert (distribution.c[-1], bool((np.diff(distribution.c) >= 0).all())) == (
                        1.0,
                        True,
                    )


def test_under_add_remove_the_number_of_rows_is_that_of_the_noisy_counts():
    distribution = distribution_of(cells(level_codec([1, 2]), 2), np.array([30, 10]), None)
    assert distribution.probabilities.tolist() == [0.75, 0.25]


@pytest.mark.parametrize("counts", [[0, 0], [1, 0]])
def test_a_public_number_of_fewer_than_two_rows_is_refused(counts):
    with pytest.raises(DataError, match="fewer than 2"):
        Histogram(bins=2).check_counts(ColumnCounts({"v": CellCounts(np.array(counts))}))


# ---- a frequent number inside a fine cell


@pytest.mark.parametrize(
    ("low", "high", "number"),
    [
        (2.743, 2.757, 2.75),
        (9950.0, 10_049.0, 10_000.0),
        (-0.31, -0.299, -0.3),
        (0.99, 1.0, 1.0),
        (-2.5, 3.0, 0.0),
    ],
)
def test_the_simplest_number_has_the_fewest_decimals(low, high, number):
    assert find_simplest(low, high) == number


def test_a_price_that_many_rows_have_is_an_atom(monkeypatch):
    """Its rows stand for all the ranks of a jump; at one rank, they would change the shares of other values."""
    rng = np.random.default_rng(4)
    own = pd.DataFrame(
        {
            "tip": np.where(
                rng.random(60_000) < 0.4,
                0.0,
                np.where(rng.random(60_000) < 0.5, 2.75, rng.lognormal(1.0, 0.6, 60_000)),
            )
        }
    )
    schema = schema_of(
        {"tip": {"role": "privatise", "kind": "continuous", "bounds": [0.0, 1000.0]}}
    )
    errors = []
    for mark in (_mark_frequent, lambda cells, probabilities, found: found):
        monkeypatch.setattr("dpdask.references.histogram._mark_frequent", mark)
        with dpdask.DIP(schema, epsilon=1.0, reference=Histogram(), insecure_seed=2).fit(
            own
        ) as release:
            found = release.transform(own)["tip"]
        errors.append(abs(found.quantile(0.5) - own["tip"].quantile(0.5)))
        if mark is _mark_frequent:
            assert abs((found == 2.75).mean() - (own["tip"] == 2.75).mean()) < 0.01
    assert errors[0] < 0.1
    assert errors[1] > 0.15


STEP = math.nextafter(1.0, 2.0)


@pytest.mark.parametrize("bins", ["adaptive", 4])
@pytest.mark.parametrize(
    ("numbers", "declared"),
    [
        ([1.0, STEP], {"kind": "continuous"}),
        (
            [-5.0, math.nextafter(-5.0, 0.0), math.nextafter(math.nextafter(-5.0, 0.0), 0.0)],
            {"kind": "continuous"},
        ),
        ([1.0, STEP], {"kind": "mixed", "atoms": [1.0, STEP]}),
        ([0, 1], {"kind": "mixed", "atoms": [0, 1]}),
    ],
    ids=["a step apart", "two steps apart", "atoms", "whole atoms"],
)
def test_bounds_with_next_to_nothing_between_them_are_fitted_and_released(numbers, declared, bins):
    own = pd.DataFrame({"x": np.resize(numbers, 600)})
    schema = schema_of(
        {"x": {"role": "privatise", "bounds": [numbers[0], numbers[-1]], **declared}}
    )
    given = {"epsilon": 8.0, "reference": Histogram(bins=bins), "insecure_seed": 2}
    with warnings.catch_warnings(action="error"), dpdask.DIP(schema, **given).fit(own) as release:
        assert release.transform(own)["x"].isin(numbers).all()
