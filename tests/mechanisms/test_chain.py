"""The chain's distribution, exactly and drawn: it follows the reference in any order, loses no more than ε, and follows hold-out records."""

import functools
import itertools
import math

import numpy as np
import pyarrow as pa
import pytest
from numpy.random import default_rng
from scipy import stats
from stats.counting import records_of_rows
from strategies import level_codec, value_codec

from dpdask.kernels import chain as kernel
from dpdask.mechanisms.dip.chain import fit_chain, group_hashes
from dpdask.mechanisms.dip.columns import BinnedRanks
from dpdask.mechanisms.dip.spec import N_BINS
from dpdask.references import Chain
from dpdask.stats.records import Records, numbers
from dpdask.streams import RunKey

ALPHA = 1e-9
KEY = RunKey.insecure(7)
GROUP_KEY = np.array([3, 4], dtype=np.uint64)
MANY = 10**9  # beside so many records one row more changes nothing
LOWEST, HIGHEST = np.uint64(0), np.uint64(2**64 - 1)


def levels(name, n_levels):
    return level_codec(np.arange(n_levels), name)


def line(name):
    return value_codec(name, bounds=None)


def records_of(columns, codecs, counts=None, by=None):
    """The records of some columns, each row `counts` times, all of one grade."""
    keys = [
        numbers(codecs[name], pa.array(column)).view(np.uint64) for name, column in columns.items()
    ]
    keys = [*([group_hashes("by", pa.array(by), GROUP_KEY)] if by is not None else []), *keys]
    n = len(keys[0])
    words_ = np.full(n, HIGHEST)
    found = records_of_rows(keys, words_, 2**26)
    if counts is None:
        return found
    assert len(found.counts) == n
    return Records(
        max_records=2**26, keys=found.keys, grades=found.grades, counts=counts.astype(np.int64)
    )


def fitted(records, codecs, epsilon=1.0, channel="optimal", **options):
    options = {"order": tuple(codecs), **options}
    return fit_chain(records, codecs, dict.fromkeys(codecs, epsilon), channel, **options)


# ---- the exact distribution


def interval(value, node, release):
    nodes, ranks = np.full(2, node), np.empty(2)
    words = np.array([LOWEST, HIGHEST])
    kernel.find_ranks(np.full(2, float(value)), nodes, words, release.trie, ranks)
    return *ranks, nodes[0]


def children(node, release):
    trie = release.trie
    start, end = trie.first[node], trie.first[node + 1]
    edges = np.concatenate([[0], trie.cumulative[start:end]]) / trie.cumulative[end - 1]
    return [(child, edges[child - start], edges[child - start + 1]) for child in range(start, end)]


def overlap(edges, low, high):
    """Which share of (low, high) lies in each bin."""
    return np.diff(np.clip(edges, low, high)) / (high - low)


def exact_distribution(release, row, *, broken=False, root=0):
    """The distribution of the released row of levels; `broken` takes the rank given the released prefix too."""
    edges = np.linspace(0.0, 1.0, N_BINS + 1)
    states = {(): (root, root, 1.0)}
    for value, mechanism in zip(row, release.columns.values(), strict=True):
        assert isinstance(mechanism, BinnedRanks)
        found = {}
        for prefix, (own, released, mass) in states.items():
            low, high, next_own = interval(value, released if broken else own, release)
            bins = overlap(edges, low, high) @ mechanism.channel.matrix
            for child, below, above in children(released, release):
                share = N_BINS * overlap(edges, below, above) * (above - below)
                found[(*prefix, release.trie.keys[child])] = (
                    next_own,
                    child,
                    mass * float(bins @ share),
                )
        states = found
    return {prefix: mass for prefix, (_, _, mass) in states.items()}


def mixture(release, distribution, *, broken=False):
    """The distribution of the released row where rows follow `distribution`."""
    total = dict.fromkeys(distribution, 0.0)
    for row, mass in distribution.items():
        for path, share in exact_distribution(release, row, broken=broken).items():
            total[path] += mass * share
    return total


def three_columns():
    rng = default_rng(4)
    paths = list(itertools.product([0.0, 1.0, 2.0], [0.0, 1.0], [0.0, 1.0, 2.0, 3.0]))
    masses = rng.dirichlet(np.full(len(paths), 0.4))
    return dict(zip(paths, masses, strict=True))


def known(distribution, order, epsilon=1.0):
    """A release whose reference is as good as the distribution itself, its columns in some order."""
    rows = np.array(list(distribution))
    codecs = {
        f"c{place}": levels(f"c{place}", int(rows[:, place].max()) + 1)
        for place in range(rows.shape[1])
    }
    counts = np.maximum(np.round(np.array(list(distribution.values())) * MANY), 1)
    columns = {name: rows[:, place].astype(np.int64) for place, name in enumerate(codecs)}
    return fitted(
        records_of(columns, codecs, counts),
        codecs,
        epsilon,
        order=tuple(f"c{place}" for place in order),
    )


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_released_row_follows_the_reference_exactly_in_any_order(order):
    distribution = three_columns()
    release = known(distribution, order)
    ordered = {tuple(row[place] for place in order): mass for row, mass in distribution.items()}
    found = mixture(release, ordered)
    assert max(abs(found[path] - mass) for path, mass in ordered.items()) < 1e-7
    wrong = mixture(release, ordered, broken=True)
    assert max(abs(wrong[path] - mass) for path, mass in ordered.items()) > 1e-2  # the power of it


SMALL = [
    np.array([[0, 0], [0, 1], [1, 1], [1, 1], [1, 0]]),
    np.array([[0, 0, 0], [0, 0, 1], [1, 0, 1], [2, 1, 1], [2, 1, 0], [2, 1, 0]]),
    np.array([[0, 0], [0, 0], [0, 0]]),
    np.array([[0], [1], [1], [2]]),
]


@pytest.mark.few
@pytest.mark.parametrize("rows", SMALL, ids=lambda rows: "x".join(map(str, rows.shape)))
@pytest.mark.parametrize("epsilon", [0.3, 3.0])
def test_no_released_row_tells_more_of_a_row_than_epsilon(rows, epsilon):
    codecs = {f"c{place}": levels(f"c{place}", 4) for place in range(rows.shape[1])}
    release = fitted(
        records_of({name: rows[:, place] for place, name in enumerate(codecs)}, codecs),
        codecs,
        epsilon,
    )
    all_rows = itertools.product(range(4), repeat=rows.shape[1])  # rows that no record is like, too
    distributions = [exact_distribution(release, row) for row in all_rows]
    assert all(
        sum(distribution.values()) == pytest.approx(1.0, abs=1e-12)
        for distribution in distributions
    )
    table = np.array([list(distribution.values()) for distribution in distributions])
    loss = float(np.log(table.max(axis=0) / table.min(axis=0)).max())
    assert loss <= sum(mechanism.epsilon for mechanism in release.columns.values()) * (1 + 1e-9)
    assert release.epsilon <= len(codecs) * epsilon
    if len(np.unique(rows, axis=0)) > 1:
        assert loss > 0.4 * epsilon


def test_what_is_drawn_is_the_exact_distribution():
    rows = SMALL[1]
    codecs = {f"c{place}": levels(f"c{place}", 4) for place in range(3)}
    release = fitted(
        records_of({name: rows[:, place] for place, name in enumerate(codecs)}, codecs), codecs, 2.0
    )
    n = 60_000
    row = (2, 0, 1)
    batch = pa.RecordBatch.from_pydict(
        {name: pa.array(np.full(n, value)) for name, value in zip(codecs, row, strict=True)}
    )
    out = release.randomise(batch, codecs, release.streams(KEY, "f"))
    drawn = np.stack([out.column(name).to_numpy() for name in codecs], axis=1)
    distribution = {
        path: mass for path, mass in exact_distribution(release, row).items() if mass > 0
    }
    counts = np.array([(drawn == path).all(axis=1).sum() for path in distribution])
    assert counts.sum() == n
    assert stats.chisquare(counts, n * np.array(list(distribution.values()))).pvalue > ALPHA
    other = np.array(list(exact_distribution(release, (0, 0, 0)).values()))
    assert stats.chisquare(counts, n * other).pvalue < ALPHA  # the power of it


# ---- drawn


def mixed(n, seed):
    rng = default_rng(seed)
    x = rng.normal(size=n)
    amount = np.where(rng.random(n) < 0.3, 0.0, np.exp(x + rng.normal(size=n)))
    return pa.RecordBatch.from_pydict(
        {
            "kind": pa.array(
                [
                    None if code == 0 else "abc"[code - 1]
                    for code in np.clip(np.round(x + 1.5), 0, 3).astype(int)
                ]
            ),
            "x": pa.array(x, mask=rng.random(n) < 0.05),
            "amount": pa.array(amount),
            "age": pa.array(np.clip(np.round(40 + 15 * x), 0, 120).astype(np.int16)),
            "id": pa.array(np.arange(n)),
        }
    )


MIXED = {
    "kind": level_codec([None, "a", "b", "c"], "kind", ordered=False),
    "x": value_codec("x", bounds=None, nulls=True),
    "amount": value_codec("amount", bounds=(0.0, 1e6), atoms=(0.0,)),
    "age": value_codec("age", pa.int16(), bounds=(0.0, 120.0)),
}


def mixed_release(channel="laplace", **options):
    reference = mixed(5_000, 11)
    keys = [numbers(codec, reference.column(name)).view(np.uint64) for name, codec in MIXED.items()]
    return fitted(records_of_rows(keys, np.full(5_000, HIGHEST)), MIXED, 1.0, channel, **options)


@functools.cache
def usual_release():
    return mixed_release()


def released(batch, release=None, key=KEY, fragment="f", cuts=()):
    release = release or usual_release()
    rngs = release.streams(key, fragment)
    edges = [0, *cuts, batch.num_rows]
    return pa.Table.from_batches(
        [
            release.randomise(batch.slice(a, b - a), MIXED, rngs)
            for a, b in itertools.pairwise(edges)
        ]
    ).combine_chunks()


@pytest.mark.parametrize(
    ("channel", "order"),
    [("laplace", ("kind", "x", "amount", "age")), ("optimal", ("age", "amount", "x", "kind"))],
)
def test_columns_of_every_kind_keep_their_joint_distribution(channel, order):
    batch = mixed(20_000, 12)
    out = released(batch, mixed_release(channel, order=order))
    assert out.schema == batch.schema
    assert out["id"].combine_chunks().equals(batch.column("id"))
    for name in ("x", "amount", "age"):
        before, after = (table.column(name).drop_null().to_numpy() for table in (batch, out))
        assert stats.ks_2samp(before, after).statistic < 0.04  # what 5,000 reference rows can give
    assert abs(out["x"].null_count / 20_000 - 0.05) < 0.02
    assert abs((out["amount"].to_numpy() == 0).mean() - 0.3) < 0.04
    pairs = [("x", "amount"), ("x", "age"), ("amount", "age")]
    for one, other in pairs:
        before, after = (
            table.to_pandas()[[one, other]].corr(method="spearman").iloc[0, 1]
            for table in (batch, out)
        )
        assert after == pytest.approx(before, abs=0.05)
        assert before > 0.3
    moved = np.corrcoef(batch.column("age").to_numpy(), out["age"].to_numpy())[0, 1]
    assert moved < 0.6  # and the rows are randomised


# ---- groups


def grouped(min_rows=5):
    group = np.repeat(["a", "b", "c"], [50, 5, 4])
    value = np.repeat([0, 1, 2], [50, 5, 4])
    codecs = {"v": levels("v", 3)}
    return fitted(
        records_of({"v": value}, codecs, by=group),
        codecs,
        by="by",
        group_key=GROUP_KEY,
        min_rows=min_rows,
    )


def test_a_group_is_released_by_its_own_reference_and_a_small_or_unknown_one_by_the_pooled():
    release = grouped()
    n = 4000
    group = np.repeat(["a", "b", "c", "never seen"], n)
    batch = pa.RecordBatch.from_pydict(
        {"by": pa.array(group), "v": pa.array(np.tile([0, 1, 2, 0], n))}
    )
    out = release.randomise(batch, {"v": levels("v", 3)}, release.streams(KEY, "f"))
    assert out.column("by").equals(batch.column("by"))
    found = {name: set(out.column("v").to_numpy()[group == name]) for name in set(group)}
    assert found == {"a": {0}, "b": {1}, "c": {0, 1, 2}, "never seen": {0, 1, 2}}
    assert (release.groups.pooled_groups, release.groups.pooled_rows) == (
        pytest.approx(1 / 3),
        pytest.approx(4 / 59),
    )


def test_a_record_that_stands_in_several_entries_is_one():
    """As it may after parts were merged whose entries mostly differ: the fitted release is the same, byte for byte."""
    rng = default_rng(8)
    codecs = {"v": levels("v", 5), "w": line("w")}
    columns = {"v": rng.integers(0, 5, 400), "w": np.round(rng.normal(size=400), 1)}
    once = records_of(columns, codecs, by=rng.integers(0, 40, 400))
    counts = once.counts + 2
    twice = {name: np.concatenate([getattr(once, name)] * 2) for name in ("keys", "grades")}
    parts = [
        Records(max_records=2**26, keys=once.keys, grades=once.grades, counts=counts),
        Records(
            max_records=2**26, **twice, counts=np.concatenate([counts - 1, np.ones_like(counts)])
        ),
    ]
    found = [fitted(part, codecs, by="by", group_key=GROUP_KEY, min_rows=5) for part in parts]
    assert len(found[0].groups.hashes) > 20
    assert found[0].to_bytes() == found[1].to_bytes()


def test_groups_of_one_row_are_all_pooled():
    codecs = {"v": levels("v", 3)}
    value = np.arange(60) % 3
    by = np.arange(60)
    pooled = fitted(
        records_of({"v": value}, codecs, by=by), codecs, by="by", group_key=GROUP_KEY, min_rows=2
    )
    alone = fitted(records_of({"v": value}, codecs), codecs)
    assert (len(pooled.groups.hashes), pooled.groups.pooled_groups) == (0, 1.0)
    batch = pa.RecordBatch.from_pydict({"by": pa.array(by), "v": pa.array(value)})
    assert pooled.randomise(batch, codecs, pooled.streams(KEY, "f")).equals(
        alone.randomise(batch, codecs, alone.streams(KEY, "f"))
    )


# ---- limits


def test_a_column_of_one_value_stays_that_value():
    codecs = {"v": levels("v", 3), "x": line("x")}
    release = fitted(
        records_of({"v": np.ones(50, dtype=np.int64), "x": np.full(50, 2.5)}, codecs), codecs
    )
    batch = pa.RecordBatch.from_pydict({"v": pa.array([0, 1, 2]), "x": pa.array([-9.0, 2.5, 9.0])})
    out = release.randomise(batch, codecs, release.streams(KEY, "f"))
    assert out.column("v").to_pylist() == [1, 1, 1]
    assert all(1.5 <= value <= 2.5 for value in out.column("x").to_pylist())


# ---- the attack that the texts warn of


def same_cell(rows, held_out):
    """Which share of rows lies in the grid cell of a hold-out record in every column at once, and which share of those records they show."""

    def cell(values):
        grid = zip(held_out.T, values.T, strict=True)
        return np.stack([np.searchsorted(np.sort(own), column) for own, column in grid], axis=1)

    known, seen = set(map(tuple, cell(held_out))), list(map(tuple, cell(rows)))
    return float(np.mean([each in known for each in seen])), len(known & set(seen)) / len(held_out)


@pytest.mark.parametrize(("columns", "by_chance"), [(1, 1.0), (2, 1e-3), (3, 1e-6)])
def test_every_released_row_follows_a_hold_out_record(columns, by_chance):
    m = 1000
    rng = default_rng(columns)
    held_out, fresh = rng.normal(size=(m, columns)), rng.normal(size=(3 * m, columns))
    codecs = {f"c{place}": line(f"c{place}") for place in range(columns)}
    release = fitted(
        records_of({name: held_out[:, place] for place, name in enumerate(codecs)}, codecs),
        codecs,
        0.5,
        "laplace",
    )
    batch = pa.RecordBatch.from_pydict(
        {name: pa.array(fresh[:, place]) for place, name in enumerate(codecs)}
    )
    out = release.randomise(batch, codecs, release.streams(KEY, "f"))
    rows = np.stack([out.column(name).to_numpy() for name in codecs], axis=1)
    followed, shown = same_cell(rows, held_out)
    assert followed == 1.0
    share = Chain(fraction=0.25).followed_share
    assert abs(shown - share) < 6 * math.sqrt(share * (1 - share) / m)
    inside = (fresh <= held_out.max(axis=0)).all(axis=1)
    chance, _ = same_cell(fresh[inside], held_out)
    assert chance <= by_chance + 6 * math.sqrt(by_chance * (1 - by_chance) / (3 * m)) + 1e-12
    assert columns > 1 or chance == 1.0
    nearest = np.abs(rows[:, None, :] - held_out[None, :, :]).max(axis=2).min(axis=1)
    assert np.median(nearest) < 0.02  # of a standard deviation, in the worst column
    assert (
        columns == 1
        or np.median(np.abs(fresh[:, None, :] - held_out[None, :, :]).max(axis=2).min(axis=1))
        > 0.01 * columns
    )
