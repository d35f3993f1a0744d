"""What is said before a budget is spent: how much a row keeps, how large noise is, and what will drown."""

import math
import re

import numpy as np
import pandas as pd
import pytest
from e2e.helpers import categorical, continuous, discrete, run_here, schema_of, write_job
from mechanisms.fitting import fit_frame
from numpy.random import default_rng
from strategies import level_codec, value_codec

import dpdask
from dpdask.jobs.plan import plan_job
from dpdask.jobs.spec import load_job
from dpdask.mechanisms.expectations import LITTLE, estimate_kept, warn_of_spread

N_ROWS = 40_000


def levels(n, *, ordered=True):
    return level_codec(range(n), "x", ordered=ordered)


def job_of(frame, folder, **given):
    (folder / "in").mkdir()
    frame.to_parquet(folder / "in" / "rows.parquet", index=False)
    return write_job(folder / "job", folder / "in", folder / "out", **given)


LINE = value_codec("x", bounds=(0.0, 1.0))


@pytest.mark.few(5)
@pytest.mark.parametrize("channel", ["laplace", "laplace-calibrated", "optimal"])
@pytest.mark.parametrize("kind", ["levels", "categories", "line"])
@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_what_is_expected_is_what_a_release_keeps(channel, kind, epsilon):
    """Of even levels or ranks, by the released rows themselves; power both ways, since another ε is farther off."""
    n = 6 if kind != "line" else N_ROWS
    values = np.arange(N_ROWS) * 7919 % n
    column = discrete(list(range(n))) if kind == "levels" else {}
    codec = levels(n)
    if kind == "categories":
        column, codec = (
            categorical(list(range(n))),
            levels(n, ordered=False),
        )
    if kind == "line":
        column, codec = continuous([0.0, 1.0]), LINE
    frame = pd.DataFrame({"x": values / N_ROWS if kind == "line" else values})
    schema = schema_of({"x": column})
    reference = (
        {"probabilities": [1.0 / n] * n}
        if kind != "line"
        else {"name": "uniform", "loc": 0.0, "scale": 1.0}
    )
    with dpdask.DIP(
        schema,
        epsilon=epsilon,
        reference=dpdask.Known(columns={"x": reference}),
        channel=channel,
        insecure_seed=3,
    ).fit(frame) as release:
        found = release.transform(frame)["x"].to_numpy()
    kept = (
        np.corrcoef(frame["x"], found)[0, 1]
        if kind != "categories"
        else ((found == values).mean() - 1 / n) / (1 - 1 / n)
    )
    assert estimate_kept(codec, epsilon, channel) == pytest.approx(kept, abs=0.02)
    assert estimate_kept(codec, 2.0 * epsilon, channel) != pytest.approx(kept, abs=0.02)


def wide(n_columns):
    column = discrete(list(range(8)))
    names = [f"c{place}" for place in range(n_columns)]
    frame = pd.DataFrame(
        {name: (np.arange(1000) * (place + 1)) % 8 for place, name in enumerate(names)}
    )
    return schema_of(dict.fromkeys(names, column)), frame


@pytest.mark.parametrize(
    "reference",
    [dpdask.Histogram(), dpdask.Tree(), dpdask.Holdout(fraction=0.25)],
    ids=lambda each: each.kind,
)
def test_rows_of_many_columns_are_warned_of_and_those_of_one_are_not(reference):
    schema, frame = wide(14)
    with pytest.warns(UserWarning, match=r"almost nothing of c0, c1, c2, c3, c4 and 9 more"):
        dpdask.DIP(schema, epsilon=4.0, reference=reference).fit(frame)
    schema, frame = wide(1)
    planned = dpdask.DIP(schema, epsilon=4.0, reference=reference).plan(frame)
    assert not any("almost nothing" in warning for warning in planned.warnings)
    [sentence] = planned.expectations
    assert float(sentence.rpartition(" ")[2]) > LITTLE


def test_tables_that_drown_are_warned_of_and_others_are_not():
    schema, frame = wide(14)
    with pytest.warns(
        UserWarning,
        match=r"The cells of 91 of 105 tables are too fine, with fewer rows on average than the noise of a count: c0 x c1, ",
    ):
        dpdask.GaussianCopula(schema, epsilon=1.0, delta=1e-9).fit(frame)
    planned = dpdask.GaussianCopula(schema, epsilon=100.0, delta=1e-9).plan(frame)
    [large] = planned.warnings
    assert large.startswith("ε = 100 is large")
    named = ["a one-way table", "a two-way table", "the second measurement of a two-way table"]
    assert [sentence.partition(" is off")[0] for sentence in planned.expectations] == [
        f"a count of {table}" for table in named
    ]


MONEY = continuous([0.0, 2_000_000.0], type="float64")


@pytest.mark.parametrize(
    ("bins", "said"),
    [
        ([0.0, 1000.0, 10_000.0], "The last declared cell of x is more than 10 times as wide"),
        (
            [0.0, 1_990_000.0, 1_995_000.0],
            "The first declared cell of x is more than 10 times as wide",
        ),
        ([0.0, 100_000.0, 181_000.0], "The last declared cell of x"),
        ([0.0, 100_000.0, 182_000.0], ""),
        ([0.0], ""),
        (20, ""),
    ],
)
def test_declared_cells_that_run_to_a_far_bound_are_warned_of(bins, said):
    frame = pd.DataFrame({"x": np.linspace(0.0, 9000.0, 100)})
    schema = schema_of({"x": MONEY})
    given = {"epsilon": 50.0, "bins": {"x": bins}}
    estimators = [
        dpdask.Marginals(schema, cliques=[["x"]], **given),
        dpdask.PerturbedHistogram(schema, **given),
    ]
    estimators.append(dpdask.DIP(schema, epsilon=50.0, reference=dpdask.Tree(bins={"x": bins})))
    for estimator in estimators:
        far = [each for each in estimator.plan(frame).warnings if "declared cell" in each]
        assert [each.startswith(said) for each in far] == [True] * bool(said)


# ---- what is said at the end, from the release alone


def test_the_quality_of_tables_records_and_cells_is_what_stood_out(tmp_path):
    schema, frame = wide(3)

    def quality_of(estimator, name):
        return str(
            estimator.mechanism.description.quality(
                fit_frame(estimator.mechanism, frame, tmp_path / name)[1]
            )
        )

    tables = dpdask.Marginals(schema, epsilon=1.0, delta=1e-9, cliques=[["c0"], ["c1", "c2"]])
    assert re.fullmatch(
        r"\d+ of 72 counts are larger than what noise alone gives with probability 0.95",
        quality_of(tables, "tables"),
    )
    for epsilon, independent in ((0.01, True), (50.0, False)):
        said = quality_of(
            dpdask.GaussianCopula(schema, epsilon=epsilon, delta=1e-9), f"copula {epsilon}"
        )
        assert said.endswith("come out nearly independent") == independent
    twin = {"role": "privatise", "kind": "discrete", "levels": [0, 1]}
    code = {"role": "privatise", "kind": "categorical", "levels": list(range(40))}
    rows = np.arange(4_000)
    twins = pd.DataFrame({"a": rows % 2, "b": rows % 2, "code": rows // 2 % 40})
    columns = {"a": twin, "b": twin, "code": code}
    told = dpdask.GaussianCopula(schema_of(columns), epsilon=5.0, delta=1e-9)
    fitted = fit_frame(told.mechanism, twins, tmp_path / "twins")[1]
    assert 0 < fitted.report.kept_share < 0.1
    assert "nearly independent" not in str(told.mechanism.description.quality(fitted))
    cells = quality_of(dpdask.PerturbedHistogram(schema, epsilon=8.0), "cells")
    assert re.fullmatch(
        r"[\d,]+ of 512 cells have a weight; the weights sum to [\d,]+ beside 1,000 rows", cells
    )
    private = quality_of(
        dpdask.PerturbedHistogram(schema, epsilon=8.0, adjacency="add-remove"), "private cells"
    )
    assert (
        900 < int(private.rpartition(" beside ")[2].removesuffix(" rows").replace(",", "")) < 1100
    )  # measured with a hundredth of ε


def test_a_reference_that_is_mostly_noise_is_warned_of_and_one_that_is_not_is_not():
    columns = {name: continuous([0.0, 1e6]) for name in "abcdef"}
    frame = pd.DataFrame(
        dict.fromkeys("abcdef", np.linspace(0.0, 50.0, 2000)[default_rng(1).permutation(2000)])
    )
    schema = schema_of(columns)
    noisy = r"The noise of a count is at least \d+ % of the rows that are counted for the reference of a, b, c, d, e and 1 more: the"
    with pytest.warns(UserWarning, match=noisy):
        dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Histogram()).fit(frame)
    planned = dpdask.DIP(schema, epsilon=100.0, reference=dpdask.Histogram()).plan(frame)
    [large] = planned.warnings
    assert large.startswith("ε = 100 is large")
    assert "heavy tail" in planned.expectations[-1]
    assert (
        "heavy tail"
        in dpdask.DIP(schema, epsilon=100.0, reference=dpdask.Tree()).plan(frame).expectations[-1]
    )


def test_with_a_private_number_of_rows_the_plan_says_how_many_a_histogram_needs():
    schema, frame = wide(3)
    for epsilon in (1.0, 100.0):
        given = {"epsilon": epsilon, "threshold": "positive"}
        private, public = (
            dpdask.PerturbedHistogram(schema, adjacency=each, **given).plan(frame)
            for each in ("add-remove", "replace-one")
        )
        [said] = [each for each in private.expectations if "few cells stand out" in each]
        assert not any("few cells stand out" in each for each in public.expectations)
        needed = float(
            said.removeprefix("with fewer than about ").partition(" ")[0].replace(",", "")
        )
        assert needed == pytest.approx(
            3 * 512 * math.log(512) / epsilon, rel=0.06
        )  # 8 x 8 x 8 cells, three times the largest noise
    line = schema_of({"x": continuous([0.0, 1e9])})
    found = dpdask.PerturbedHistogram(
        line, epsilon=1.0, adjacency="add-remove", threshold="positive"
    ).plan(pd.DataFrame({"x": [1.0, 2.0]}))
    assert (
        "with fewer than about 420 rows, few cells" in found.expectations[1]
    )  # two cells of five deviations of a fine count each: 10·√2·30


# ---- what is said of values that many rows share


def spread(values, *, lattice=False):
    keys, counts = np.unique(values, return_counts=True)
    lows = np.append(keys[0] - 1.0, keys[:-1])
    return bool(warn_of_spread("x", keys, lows, counts.astype(float), lattice=lattice))


def test_shared_values_are_warned_of_if_gaps_are_wide():
    rng = default_rng(1)
    line = rng.normal(0.0, 1000.0, 20_000)
    assert not spread(line)
    assert not spread(line[:50])
    assert spread(
        np.where(rng.random(20_000) < 0.1, 5_000.0, line)
    )  # in the tail, where gaps are wide
    assert spread(rng.choice([73.0, 2731.2, 9755.5], 20_000))
    assert not spread(
        rng.integers(0, 100, 20_000).astype(float), lattice=True
    )  # nothing lies between whole numbers
    assert spread(10.0 * rng.integers(0, 10, 20_000), lattice=True)
    assert not spread(np.where(rng.random(20_000) < 0.01, 5_000.0, line))  # few rows
    keys = np.array([-np.inf, 1.0])  # null, and an atom
    assert not warn_of_spread("x", keys, keys, np.array([5.0, 5.0]), lattice=False)


@pytest.mark.parametrize(
    ("reference", "atoms"),
    [
        ({"kind": "holdout", "fraction": 0.5}, False),
        ({"kind": "holdout", "fraction": 0.5}, True),
        ({"kind": "chain", "fraction": 0.5}, False),
        ({"kind": "histogram"}, False),
    ],
)
def test_a_run_warns_of_values_that_come_out_spread(tmp_path, reference, atoms):
    rng = default_rng(2)
    income = np.where(rng.random(4_000) < 0.2, 0.0, rng.normal(30_000.0, 5_000.0, 4_000))
    column = {
        "role": "privatise",
        "kind": "mixed" if atoms else "continuous",
        "bounds": [-1e5, 1e6],
        **({"atoms": [0]} if atoms else {}),
    }
    outcome = run_here(
        job_of(
            pd.DataFrame({"income": income}),
            tmp_path,
            schema={"income": column},
            mechanism={"kind": "dip", "reference": reference},
        )
    )
    said = [each for each in outcome.warnings if "released spread over the gaps below them" in each]
    assert bool(said) == (not atoms and reference["kind"] != "histogram")
    assert all("column 'income'" in each for each in said)
    released = pd.read_parquet(tmp_path / "out")["income"]
    if reference["kind"] != "histogram":
        assert ((released == 0.0).mean() > 0.1) == atoms


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        (dpdask.Holdout(fraction=0.5), True),
        (dpdask.Chain(fraction=0.5), True),
        (dpdask.Histogram(), False),
        (dpdask.Tree(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_plan_says_what_becomes_of_shared_values(reference, said):
    line = continuous([0.0, 9.0])
    level = discrete([0, 1])
    schema = schema_of({"x": line, "n": level})
    frame = pd.DataFrame({"x": np.linspace(0.0, 9.0, 100), "n": np.arange(100) % 2})
    planned = dpdask.DIP(schema, epsilon=4.0, reference=reference).plan(frame)
    found = [
        each
        for each in planned.expectations
        if each.endswith("over the gap below it, unless it is one of the `atoms`")
    ]
    assert found == (
        [
            "x: rows that share a value are released over the gap below it, unless it is one of the `atoms`"
        ]
        if said
        else []
    )


@pytest.mark.parametrize(("epsilon", "nulls"), [(0.03, "refuse"), (20.0, "level")])
def test_the_quality_line_is_compared_with_chance_and_names_the_lost_levels(
    epsilon, nulls, tmp_path
):
    levels = list("abcdefgh")
    frame = pd.DataFrame({"row": range(3000), "g": default_rng(1).choice(levels, 3000)})
    (tmp_path / "in").mkdir()
    frame.to_parquet(tmp_path / "in" / "rows.parquet")
    column = categorical(levels, nulls=nulls)
    job = write_job(
        tmp_path / "job",
        tmp_path / "in",
        tmp_path / "out",
        schema={"row": {"role": "keep"}, "g": column},
        mechanism={"kind": "dip", "reference": {"kind": "histogram"}, "channel": "optimal"},
        privacy={"epsilon": epsilon},
    )
    quality = run_here(job).quality
    released = pd.read_parquet(tmp_path / "out")["g"]
    pattern = r"g is unchanged in (at most )?(\S+) % of the rows \((\S+) % by chance\)(?:: no row is released as (.*), which .*)?"
    found = re.fullmatch(pattern, quality)
    possible = [*(["null"] if nulls == "level" else []), *levels]
    lost = [level for level in possible if level not in set(released.fillna("null"))]
    assert (epsilon == 20.0) == (lost == []) or nulls == "level"  # of a null that no row has
    assert bool(found[1]) == bool(lost)
    assert (found[4] or "") == ", ".join(lost[:5]) + (
        f" and {len(lost) - 5} more" if len(lost) > 5 else ""
    )
    assert float(found[3]) == pytest.approx(
        100 * (released.fillna("null").value_counts(normalize=True) ** 2).sum(), abs=5.0
    )
    assert float(found[2]) - float(found[3]) < 5.0 or epsilon == 20.0


def test_the_noise_is_compared_with_the_rows_that_a_unit_leaves(tmp_path):
    """A plan cannot know how many these are, and says how many it takes; a run counts them, and says what they suffer."""
    frame = pd.DataFrame(
        {"user": np.repeat(np.arange(500), 60), "x": np.tile(np.arange(60) % 4, 500)}
    )
    job = job_of(
        frame,
        tmp_path,
        schema={
            "user": {"role": "drop"},
            "x": discrete([0, 1, 2, 3]),
        },
        mechanism={"kind": "dip", "reference": {"kind": "histogram"}, "channel": "optimal"},
        privacy={"epsilon": 1.0, "unit": {"column": "user", "max_rows": 4}},
    )
    planned = plan_job(load_job(job))
    assert not [
        warning for warning in planned.warnings if "noise of a count" in warning
    ]  # of the 30,000 rows it is little
    [said] = [each for each in planned.expectations if "rows of each 'user' are counted" in each]
    needed = float(
        said.removeprefix("at most 4 rows of each 'user' are counted; with fewer than about ")
        .partition(" ")[0]
        .replace(",", "")
    )
    assert 2_000 < needed < 30_000
    [warned] = [warning for warning in run_here(job).warnings if "noise of a count" in warning]
    share = float(warned.removeprefix("The noise of a count is at least ").partition(" %")[0])
    assert share == pytest.approx(2.0 * needed / 2_000, rel=0.1)


def test_the_quality_of_rows_is_what_they_kept(tmp_path):
    level = default_rng(1).choice(4, N_ROWS, p=[0.1, 0.2, 0.3, 0.4])
    frame = pd.DataFrame({"level": level, "line": default_rng(2).exponential(1.0, N_ROWS)})
    columns = {
        "level": discrete([0, 1, 2, 3], type="int64"),
        "line": continuous([0.0, 100.0], type="float64"),
    }
    job = job_of(
        frame,
        tmp_path,
        schema=columns,
        mechanism={"kind": "dip", "reference": {"kind": "histogram"}},
        privacy={"epsilon": 6.0},
        output__order="keep",
    )
    outcome = run_here(job)
    released = pd.read_parquet(tmp_path / "out").reset_index(drop=True)
    pattern = r"level is unchanged in (\S+) % of the rows \((\S+) % by chance\); line keeps a correlation of ranks of (\S+)"
    found = re.fullmatch(pattern, outcome.quality)
    assert float(found[1]) == pytest.approx(
        100 * (released["level"] == frame["level"]).mean(), abs=1.0
    )
    assert float(found[2]) == pytest.approx(
        100 * ((frame["level"].value_counts() / len(frame)) ** 2).sum(), abs=1.0
    )
    assert float(found[3]) == pytest.approx(
        released["line"].corr(frame["line"], method="spearman"), abs=0.02
    )
    assert run_here(job).quality == ""
