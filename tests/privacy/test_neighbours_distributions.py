"""The noise itself, seen from outside: published channels cost what is claimed, and rows and counts follow the published distributions.

Rows are randomised one by one, so that thousands of equal rows are as many draws; counts are measured cell by cell, so that
hundreds of empty cells are. What one unit moves is seen by runs of both neighbours with one seed, whose noise is the same.
Too much noise fails as too little does.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import read_card, read_rows, run_here, write_job
from privacy.neighbour_cases import DROPPED, KEPT, KNOWN, UNIFORM, P, X, write_public
from privacy.outsider import (
    channel_p_value,
    distribution_p_value,
    epsilon_at_least,
    gaussian_distribution,
    laplace_distribution,
)
from scipy import stats

import dpdask
from dpdask.kernels import channel as channel_kernel
from dpdask.mechanisms import mechanism as releases
from dpdask.mechanisms.dip import columns as dip
from dpdask.privacy import noise
from dpdask.streams import stream

TINY = 1e-9  # of each test of a distribution; there are fewer than a hundred
EPSILON = 1.0
N_ROWS = 3000  # of each level in each of two files
N_LEVELS = 600
WIDE = {**X, "levels": list(range(N_LEVELS))}


def output(folder):
    return read_rows(folder).to_pandas()


def card_of(folder):
    return read_card(folder)


def run(folder, parts, schema, seed=5, **changes):
    """Run a job on a table in so many files, and return what is released."""
    (folder / "in").mkdir(parents=True)
    for number, part in enumerate(parts):
        pq.write_table(part, folder / "in" / f"part.{number}.parquet")
    changes = {"privacy__epsilon": EPSILON, "output__rows_per_shard": 100_000, **changes}
    run_here(
        write_job(
            folder / "job",
            folder / "in",
            folder / "out",
            schema=schema,
            insecure_seed=seed,
            **changes,
        )
    )
    return output(folder)


# ---- rows


REFERENCES = {
    "known": {"kind": "known", "columns": {"x": KNOWN["x"]}},
    "public": {"kind": "public"},
    "holdout": {"kind": "holdout", "fraction": 0.25},
    "histogram": {"kind": "histogram"},
    "tree": {"kind": "tree"},
}
CHANNELS = ["laplace", "laplace-calibrated", "optimal", "optimal-unbiased"]
NO_CHANNEL = [("tree", "optimal-unbiased"), ("chain", "optimal-unbiased")]


def levels(folder, reference, channel, *, files=2):
    """Return rows in files that are alike but for their numbers, with each row's value before, the published channel, and its claim."""
    given = dict(REFERENCES[reference])
    if reference == "public":
        given["path"] = str(write_public(folder / "public"))
    before = np.tile(np.arange(3), N_ROWS)
    n = len(before)
    parts = [
        pa.table({"id": np.arange(n) + n * file, "was": before, "x": before})
        for file in range(files)
    ]
    schema = {"id": KEPT, "was": KEPT, "x": X}
    rows = run(
        folder, parts, schema, mechanism={"kind": "dip", "reference": given, "channel": channel}
    ).sort_values("id")
    column = card_of(folder)["columns"]["x"]
    return (
        rows,
        np.array(column["channel"] if "channel" in column else column["channels"][0]),
        column["epsilon"],
    )


def enumerated(channel):
    """Return ε of a channel, over all inputs and outputs."""
    worst = 0.0
    for one, other in itertools.permutations(channel, 2):
        assert not ((one > 0) & (other == 0)).any()
        worst = max(worst, float(np.log(one[one > 0] / other[one > 0]).max()))
    return worst


def independent(one, other):
    """Return the p-value of two released values being independent."""
    counts = pd.crosstab(one.to_numpy(), other.to_numpy()).to_numpy()
    return float(stats.chi2_contingency(counts).pvalue) if min(counts.shape) > 1 else 1.0


def together(rows):
    """Return the least p-value, over levels, of rows in the same place of two files, and of rows side by side, being independent."""
    n = 3 * N_ROWS
    first, second = (
        rows[rows["id"] < n].set_index("id")["x"],
        rows[rows["id"] >= n].set_index("id")["x"],
    )
    worst = 1.0
    for level in range(3):
        one = first[first.index % 3 == level]
        pairs = (second.rename(index=lambda row: row - n), first.rename(index=lambda row: row - 3))
        for other in pairs:
            both = one.index.intersection(other.index)
            worst = min(worst, independent(one[both], other[both]))
    return worst


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("reference", "channel"),
    [
        (reference, channel)
        for reference in REFERENCES
        for channel in CHANNELS
        if (reference, channel) not in NO_CHANNEL
    ],
)
def test_a_published_channel_costs_its_claim_and_is_what_rows_follow(reference, channel, tmp_path):
    rows, published, claim = levels(tmp_path, reference, channel)
    found = enumerated(published)
    assert found <= claim * (1 + 1e-12) <= EPSILON * (1 + 1e-12)
    if channel != "laplace":
        assert found > 0.98 * claim  # no more noise than was asked for
    assert channel_p_value(rows["was"].to_numpy(), rows["x"].to_numpy(), published) > TINY
    assert together(rows) > TINY


def test_equal_files_of_one_row_get_noise_of_their_own(tmp_path):
    parts = [
        pa.table({"x": [0]}).replace_schema_metadata({"file": str(number)}) for number in range(150)
    ]  # of equal bytes, they would be copies
    rows = run(
        tmp_path,
        parts,
        {"x": X},
        mechanism={"kind": "dip", "reference": REFERENCES["known"], "channel": "optimal"},
    )
    published = np.array(card_of(tmp_path)["columns"]["x"]["channel"])
    assert channel_p_value(np.zeros(len(rows), dtype=int), rows["x"].to_numpy(), published) > TINY


@pytest.mark.parametrize("channel", ["laplace", "optimal"])
def test_continuous_values_tell_no_more_than_the_claim(channel, tmp_path):
    """Events of released values on both sides of every cut, from the two ends of the range: the ranks that differ most."""
    ends = np.repeat([0.001, 0.999], 4 * N_ROWS)
    part = pa.table({"was": ends, "p": ends})
    mechanism = {
        "kind": "dip",
        "reference": {"kind": "known", "columns": {"p": UNIFORM}},
        "channel": channel,
    }
    rows = run(tmp_path, [part], {"was": {**KEPT, "type": "float64"}, "p": P}, mechanism=mechanism)
    low, high = (rows.loc[rows["was"] == end, "p"].to_numpy() for end in (0.001, 0.999))
    found = [
        epsilon_at_least(
            (int((one <= cut).sum()), len(one)), (int((other <= cut).sum()), len(other)), alpha=TINY
        )
        for cut in np.linspace(0.02, 0.98, 25)
        for one, other in ((low, high), (1 - high, 1 - low))
    ]
    assert 0.6 * EPSILON < max(found) <= EPSILON


# ---- counts


MARGINALS = {"kind": "marginals", "cliques": [["x"]]}
CELLS = {"kind": "histogram", "threshold": "none"}
UNIT = {"column": "who", "max_rows": 2}
PROMISES = [
    ("replace-one", "row", 0.0),
    ("add-remove", "row", 0.0),
    ("replace-one", UNIT, 0.0),
    ("add-remove", UNIT, 1e-6),
    ("replace-one", "row", 1e-6),
]


def counted(changed, adjacency, unit):
    """Return rows of a few levels, and of one unit more or with another level where they are changed."""
    size = 1 if unit == "row" else UNIT["max_rows"]
    values = [0] * 9 + [7] * size
    who = list(range(9)) + [9] * size
    if changed and adjacency == "add-remove":
        values, who = values[:9], who[:9]
    elif changed:
        values[9:] = [3] * size
    return pa.table({"who": who, "x": values})


def measured(folder, mechanism, table, seed, **promise):
    """Return all levels' noisy counts less their exact ones, and the event that the card tells of."""
    schema = {"who": DROPPED, "x": WIDE}
    rows = run(
        folder,
        [table],
        schema,
        seed,
        mechanism=mechanism,
        **{f"privacy__{name}": value for name, value in promise.items()},
    )
    [event] = card_of(folder)["accounting"]["events"]["events"]
    counts = np.zeros(N_LEVELS, dtype=np.int64)
    counts[rows["x"].astype(int)] = rows["count" if "count" in rows else "weight"].astype(int)
    return counts, event


def distribution_of(event):
    return (
        laplace_distribution(event["scale"])
        if event["kind"] == "discrete-laplace"
        else gaussian_distribution(event["sigma"])
    )


def claimed(event, moved, delta):
    """Return the ε at δ of the event's noise on what one unit moves: exactly for Laplace, from the distribution itself for Gaussian."""
    if event["kind"] == "discrete-laplace":
        return float(np.abs(moved).sum() / event["scale"])
    sigma, steps = event["sigma"], np.abs(moved[moved != 0])
    far = math.ceil(12 * sigma)
    grid = np.arange(-far, far + 1)
    distribution, losses = np.ones(1), np.zeros(1)
    for step in steps:
        loss = (step * step + 2 * step * grid) / (2 * sigma**2)
        distribution, losses = (
            np.outer(distribution, gaussian_distribution(sigma)(grid)).ravel(),
            np.add.outer(losses, loss).ravel(),
        )
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        tells = float((distribution * np.maximum(0.0, -np.expm1(middle - losses))).sum())
        low, high = (middle, high) if tells > delta else (low, middle)
    return high


COUNTS = [
    (mechanism, *promise)
    for mechanism in (MARGINALS, CELLS)
    for promise in PROMISES
    if mechanism is MARGINALS or promise[2] == 0
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("mechanism", "adjacency", "unit", "delta"), COUNTS)
def test_counts_have_the_published_noise_and_it_covers_what_a_unit_moves(
    mechanism, adjacency, unit, delta, tmp_path
):
    promise = {"adjacency": adjacency, "unit": unit, "delta": delta}
    table = counted(False, adjacency, unit)
    exact = np.bincount(table["x"].to_numpy(), minlength=N_LEVELS)
    runs = [measured(tmp_path / str(seed), mechanism, table, seed, **promise) for seed in range(4)]
    event = runs[0][1]
    draws = np.concatenate([counts - exact for counts, _ in runs])
    assert distribution_p_value(draws, distribution_of(event)) > TINY
    other, _ = measured(tmp_path / "other", mechanism, counted(True, adjacency, unit), 0, **promise)
    moved = other - runs[0][0]
    size = 1 if unit == "row" else UNIT["max_rows"]
    assert np.abs(moved).sum() == size * (1 if adjacency == "add-remove" else 2)
    assert 0.9 * EPSILON < claimed(event, moved, delta) <= EPSILON * (1 + 1e-9)


def test_cells_that_noise_alone_raises_are_as_many_as_the_distribution_says(tmp_path):
    """More than 2**20 cells, so that empty ones are drawn by their number."""
    mechanism = {"kind": "histogram", "threshold": "enhanced", "factor": 2.0, "bins": {"p": 2048}}
    table = pa.table({"p": [0.1] * 200, "x": [0] * 200})
    rows = run(tmp_path, [table], {"p": P, "x": WIDE}, mechanism=mechanism, privacy__epsilon=2.0)
    card = card_of(tmp_path)
    [event], cut, n = (
        card["accounting"]["events"]["events"],
        card["mechanism"]["cut"],
        2048 * N_LEVELS,
    )
    assert card["mechanism"]["cells"] == n > 2**20
    spurious = rows.loc[rows["weight"] < 100, "weight"].to_numpy().astype(int)
    a = math.exp(-1 / event["scale"])
    expected = n * a**cut / (1 + a)
    assert expected > 10
    assert stats.poisson.sf(len(spurious) - 1, expected) > TINY
    assert stats.poisson.cdf(len(spurious), expected) > TINY
    assert (
        distribution_p_value(
            spurious - cut,
            lambda values: np.where(values >= 0, (1 - a) * a ** np.maximum(values, 0), 0.0),
        )
        > TINY
    )


def reference_noise(seeds):
    """Return differences of the noise of a histogram reference's counts, from published channels, and their scale.

    A channel between equal distributions keeps its reference: a left eigenvector, which is the projected noisy counts. Differences of two
    counts outlast the projection.
    """
    names = [f"x{number}" for number in range(10)]
    schema = dpdask.Schema.from_dict({"columns": dict.fromkeys(names, X)})
    table = pd.DataFrame(dict.fromkeys(names, np.arange(3000) % 3))
    differences, scale = [], 0.0
    for seed in seeds:
        release = dpdask.DIP(
            schema,
            epsilon=len(names) * EPSILON,
            reference=dpdask.Histogram(share=0.5),
            insecure_seed=seed,
        ).fit(table)
        card = release.card
        release.close()
        for name in names:
            values, vectors = np.linalg.eig(np.array(card["columns"][name]["channel"]).T)
            distribution = np.real(vectors[:, np.argmax(np.real(values))])
            counts = 3000 * distribution / distribution.sum()
            differences.append(round(float(counts[0] - counts[1])))
        [scale] = {
            event["scale"] for event in card["accounting"]["events"]["events"] if "scale" in event
        }
    return np.array(differences), scale


def two_laplaces(scale):
    """Return the distribution of the difference of two draws of discrete Laplace noise."""
    grid = np.arange(-2000, 2001)
    distribution = np.convolve(
        laplace_distribution(scale)(grid), laplace_distribution(scale)(grid), mode="same"
    )
    return lambda values: distribution[np.asarray(values) + 2000]


def test_a_histogram_reference_has_its_published_noise():
    differences, scale = reference_noise(range(15))
    assert scale == 4.0
    assert distribution_p_value(differences, two_laplaces(scale)) > TINY


# ---- planted breaks


def test_noise_that_is_a_function_of_the_content_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(releases, "stream", lambda key, mechanism, _: stream(key, mechanism, ""))
    rows, published, _ = levels(tmp_path / "long", "known", "optimal")
    assert (
        channel_p_value(rows["was"].to_numpy(), rows["x"].to_numpy(), published) > 1e-20
    )  # each row has the right distribution
    assert together(rows) < TINY
    with pytest.raises(AssertionError):
        test_equal_files_of_one_row_get_noise_of_their_own(tmp_path / "short")


def test_noise_that_is_a_fifth_too_small_is_found(tmp_path, monkeypatch):
    laplace, gaussian = noise.discrete_laplace, noise.discrete_gaussian
    monkeypatch.setattr(
        noise,
        "discrete_laplace",
        lambda counts, scale, **options: laplace(counts, 0.8 * scale, **options),
    )
    monkeypatch.setattr(
        noise,
        "discrete_gaussian",
        lambda counts, sigma, **options: gaussian(counts, 0.8 * sigma, **options),
    )
    for number, (mechanism, promise) in enumerate(
        ((MARGINALS, PROMISES[0]), (CELLS, PROMISES[1]), (MARGINALS, PROMISES[4]))
    ):
        with pytest.raises(AssertionError):
            test_counts_have_the_published_noise_and_it_covers_what_a_unit_moves(
                mechanism, *promise, tmp_path / str(number)
            )


def test_a_channel_with_one_cell_changed_is_found(tmp_path, monkeypatch):
    fit = dip.fit_dip

    def fit_wrong(*arguments, **options):
        release = fit(*arguments, **options)
        column = release.columns["x"]
        weights = column.channel.weights.copy()
        moved = weights[2, 0] // np.uint64(
            5
        )  # a released first level now speaks against the third one
        weights[2, 0] -= moved
        weights[2, 2] += moved
        return replace(
            release,
            columns={"x": replace(column, channel=replace(column.channel, weights=weights))},
        )

    monkeypatch.setattr(dip, "fit_dip", fit_wrong)
    _, published, claim = levels(tmp_path, "known", "optimal")
    assert enumerated(published) > claim * (1 + 1e-6)


def test_rows_that_do_not_follow_the_published_channel_are_found(tmp_path, monkeypatch):
    sample = channel_kernel.sample

    def keep_some(codes, words, *tables):
        drawn = sample(codes, words, *tables)
        return np.where(
            np.arange(len(codes)) % 8 == 0, codes, drawn
        )  # every eighth row is released as it is

    monkeypatch.setattr(channel_kernel, "sample", keep_some)
    rows, published, _ = levels(tmp_path, "known", "optimal")
    assert channel_p_value(rows["was"].to_numpy(), rows["x"].to_numpy(), published) < TINY
