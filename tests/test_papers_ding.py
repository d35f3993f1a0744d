"""The reproductions of Ding and Ding: their functions at small sizes, beside the paper's numbers where these are sharp."""

from __future__ import annotations

import re
import sys
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from scipy import stats

pytest.importorskip("sklearn", reason="the regressions need the extra dpdask[inference]")

from pipelines.papers import ding_figures, ding_life_expectancy, ding_moments, ding_regression

pytestmark = pytest.mark.more

CELLS = 12  # of each method of Table II
FAR = 4.5  # standard errors; with 60 cells, one in 2,500 runs would be beyond


@pytest.fixture(scope="module")
def moments() -> dict[str, list[ding_moments.Cell]]:
    cells = list(ding_moments.table(1, 40))
    return {
        method: [cell for cell in cells if cell.method == method] for method in ding_moments.METHODS
    }


@pytest.mark.parametrize("method", ["Example 2", "NPMLE, ends guessed", "mean", "median"])
def test_table_2_is_met(moments, method) -> None:
    assert len(moments[method]) == CELLS
    assert all(abs(cell.off) < FAR for cell in moments[method])


def test_table_2_is_not_met_with_public_bounds_and_is_bettered(moments) -> None:
    second = [cell for cell in moments["NPMLE"] if cell.moment == 2]
    assert len(second) == CELLS / 2
    assert all(cell.off < -FAR and cell.ours < cell.paper for cell in second)


def test_another_row_s_numbers_would_not_be_met(moments) -> None:
    """The standard errors are small enough to tell the methods apart, at 40 replications."""
    errors = {
        method: {(c.moment, c.n_rows, c.share): (c.ours, c.standard_error) for c in cells}
        for method, cells in moments.items()
    }
    for one, other in (("Example 2", "mean"), ("Example 2", "median"), ("mean", "median")):
        apart = [
            abs(errors[one][key][0] - errors[other][key][0])
            / np.hypot(errors[one][key][1], errors[other][key][1])
            for key in errors[one]
        ]
        assert sum(z > FAR for z in apart) >= CELLS / 2


def test_outliers_and_ends() -> None:
    rng = np.random.default_rng(1)
    assert (ding_moments.sample(rng, 2, 100, 0.05) == 999).sum() == 5
    assert ding_moments.support(1, 1000) == pytest.approx((-20, 20))
    bounds = ding_moments.support(2, 100)
    u = np.linspace(0.5, bounds[1], 100)
    low = ding_moments.estimates(np.zeros(100), u, bounds)  # all mass in (-inf, u_1]
    high = ding_moments.estimates(np.full(100, 999.0), u, bounds)
    assert (low[1], low[2]) == (0.5, -100.0)
    assert (high[1], high[2]) == (pytest.approx(bounds[1]), 150.0)


def test_moments_are_printed(capsys) -> None:
    ding_moments.main(["--replications", "2"])
    printed = capsys.readouterr().out
    assert len(re.findall(r"E\(Y²?\) ", printed)) == CELLS * len(ding_moments.METHODS)
    with pytest.raises(SystemExit):
        ding_moments.main(["--replications", "1"])


def test_ranges_contain_their_values_and_coverage_is_known() -> None:
    rng = np.random.default_rng(2)
    y, anchors = rng.uniform(size=500), np.sort(rng.uniform(size=(500, 2)), axis=1)
    seen = ding_regression.ranges(y, anchors)
    assert ((seen[:, 0] < y) & (y <= seen[:, 1])).all()
    assert ((anchors <= seen[:, :1]) | (anchors >= seen[:, 1:])).all()
    covered = ding_regression.coverage(
        rng.uniform(size=100_000), rng.uniform(size=(100_000, 2)).cumsum(axis=1) / 2
    )
    assert 1 / 3 < covered < 1
    assert ding_regression.coverage(np.linspace(0, 1, 1001), np.full((1, 1), 0.5)) == pytest.approx(
        0.5, abs=1e-3
    )
    assert ding_figures.uniform_coverage(0) == pytest.approx(1 / 3 + 1 / 3)  # E[U² + (1 - U)²]
    drawn = rng.uniform(-2, 3, (200_000, 1))
    assert ding_figures.uniform_coverage(2) == pytest.approx(
        ding_regression.coverage(np.linspace(0, 1, 10_001), drawn), abs=2e-3
    )


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_algorithm_1_falls(capsys) -> None:
    losses = ding_regression.figure_10(1, 4)
    assert all(before.mean() > after.mean() for before, after in pairwise(losses.values()))
    assert losses[1].mean() > 0.7
    assert losses[20].mean() < 0.2
    covered = float(re.findall(r"coverage +(\S+)", capsys.readouterr().out)[0])
    assert covered == pytest.approx(0.92, abs=0.01)  # the paper: around 0.9


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_tradeoff_and_wrong_noise(capsys, monkeypatch) -> None:
    monkeypatch.setattr(ding_regression, "SCALES", (1, 30))
    monkeypatch.setattr(ding_regression, "DEGREES", (1000, 1))
    near, wide = ding_figures.figure_12(1, 8)
    assert near[1] < 0.75 < 0.97 < wide[1]
    assert near[2].mean() < 0.1 < wide[2].mean()
    normal, cauchy = ding_figures.figure_13(1, 8)
    assert normal[1].mean() < cauchy[1].mean()
    assert capsys.readouterr().out.count("Figure 1") == 4


def test_example_2_errs_as_laplace_noise_of_twice_the_scale() -> None:
    rng = np.random.default_rng(3)
    for b, alpha in ding_figures.PAIRS:
        one = ding_figures.pair(rng, b, alpha, 400)
        assert one.interval.mean() == pytest.approx(one.twice.mean(), rel=0.25)
        assert one.interval.mean() > 1.4 * one.laplace.mean()


def test_figures_are_drawn(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra dpdask[papers]")
    monkeypatch.setattr(ding_regression, "SCALES", (0.1, 0.3))
    monkeypatch.setattr(ding_regression, "DEGREES", (1000, 100))
    ding_figures.main(["--folder", str(tmp_path), "--replications", "2", "2", "20"])
    for number in (12, 13, 14):
        assert (tmp_path / f"figure-{number}.svg").read_text(encoding="utf-8").count("<path") > 10


def test_figures_say_what_they_need(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="papers"):
        ding_figures.pyplot()


def countries(path, n: int = 400) -> None:
    """Write a small table with the columns of the life expectancy data, odd spaces included, and a linear truth."""
    rng = np.random.default_rng(4)
    factors = rng.normal(size=(n, 19))
    table = pd.DataFrame(factors, columns=[f" factor {k} " for k in range(19)])
    table["Status"] = np.where(factors[:, 0] > 0, "Developed", "Developing")
    table["Country"] = "somewhere"
    table["Life expectancy "] = 70 + 5 * factors[:, 1] + 4 * factors[:, 2] + rng.normal(size=n)
    table.loc[:9, "Life expectancy "] = np.nan
    table.loc[20:29, " factor 3 "] = np.nan
    table.to_parquet(path)


def test_life_expectancy_on_a_small_table(tmp_path, capsys) -> None:
    path = tmp_path / "table.parquet"
    countries(path)
    assert ding_life_expectancy.load(path)[0].shape == (390, 20)
    assert ding_life_expectancy.load(path, "drop")[0].shape == (380, 20)
    ding_life_expectancy.main(
        ["--input", str(path), "--learners", "LR", "--draws", "2", "--iterations", "20"]
    )
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line[:11].split()[1] for line in lines] == ["oracle", "M1", "M1", "M2", "M3"]
    r2 = [float(line.split("|")[1].split()[0]) for line in lines]
    assert r2[0] > 0.95
    assert all(r2[0] + 1e-3 >= found > 0.5 for found in r2)
    assert r2[4] == min(r2)


def test_mechanisms_have_the_paper_s_coverages_on_a_standard_table() -> None:
    rng = np.random.default_rng(5)
    y = rng.normal(size=5000)
    y = (y - y.mean()) / y.std()
    seen = ding_life_expectancy.mechanisms(y, rng)
    for name, ends in seen.items():
        low, high = ends.T
        exact = low == high
        assert ((exact & (low == y)) | ((low < y) & (y <= high))).all(), name
        assert exact.any() == (name not in ("M2", "M3")), name
    covered = ding_life_expectancy.coverages(y, rng)
    assert covered["M1 ±½"] == pytest.approx(0.57, abs=0.02)
    assert covered["M1 ±1"] < 0.45
    assert (covered["M2"], covered["M3"]) == (
        pytest.approx(0.76, abs=0.02),
        pytest.approx(0.94, abs=0.02),
    )


def test_the_mean_of_uniform_anchors_is_unbiased_with_its_standard_error():
    deviations = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        y, u = 2 + 3 * stats.beta(2, 3).rvs(400, random_state=rng), rng.uniform(2, 5, 400)
        found = ding_moments.mean_case_one(u, y <= u, 2, 5)
        deviations.append((found.value - (2 + 3 * 0.4)) / found.standard_error)
    assert abs(np.mean(deviations)) < 4 / np.sqrt(200)
    assert 0.8 < np.std(deviations) < 1.2
    low, high = found.interval()
    assert low < found.value < high


ROWS = np.array([0.5, 0.5])


@pytest.mark.parametrize(
    ("u", "delta", "a", "b", "words"),
    [
        (ROWS, [True, False], 1, 0, "bounds"),
        (ROWS, [True, False], 0, np.inf, "bounds"),
        (ROWS, [True], 0, 1, "2 rows"),
        (ROWS[:1], [True], 0, 1, "2 rows"),
        (ROWS, [2, 0], 0, 1, "answer"),
        (ROWS, [1, 0], 0.6, 1, "outside"),
        (np.array([np.nan, 0.5]), [1, 0], 0, 1, "outside"),
    ],
)
def test_what_is_no_case_one_answer_is_refused(u, delta, a, b, words):
    with pytest.raises(ValueError, match=words):
        ding_moments.mean_case_one(u, np.array(delta), a, b)
