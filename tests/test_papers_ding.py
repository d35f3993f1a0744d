"""The reproductions of Ding and Ding: their functions at small sizes, beside the paper's numbers where these are sharp."""

import re
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
def moments():
    cells = list(ding_moments.table(1, 40))
    return {
        method: [cell for cell in cells if cell.method == method] for method in ding_moments.METHODS
    }


@pytest.mark.parametrize("method", ["Example 2", "NPMLE, ends guessed", "mean", "median"])
def test_table_2_is_met(moments, method):
    assert len(moments[method]) == CELLS
    assert all(abs(cell.off) < FAR for cell in moments[method])


def test_table_2_is_not_met_with_public_bounds_and_is_bettered(moments):
    second = [cell for cell in moments["NPMLE"] if cell.moment == 2]
    assert len(second) == CELLS / 2
    assert all(cell.off < -FAR and cell.ours < cell.paper for cell in second)


def test_moments_are_printed(capsys):
    ding_moments.main(["--replications", "2"])
    printed = capsys.readouterr().out
    assert len(re.findall(r"E\(Y²?\) ", printed)) == CELLS * len(ding_moments.METHODS)
    with pytest.raises(SystemExit):
        ding_moments.main(["--replications", "1"])


def test_ranges_contain_their_values_and_coverage_is_known():
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
def test_algorithm_1_falls(capsys):
    losses = ding_regression.figure_10(1, 4)
    assert all(before.mean() > after.mean() for before, after in pairwise(losses.values()))
    assert losses[1].mean() > 0.7
    assert losses[20].mean() < 0.2
    covered = float(re.findall(r"coverage +(\S+)", capsys.readouterr().out)[0])
    assert covered == pytest.approx(0.92, abs=0.01)  # the paper: around 0.9


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_tradeoff_and_wrong_noise(capsys, monkeypatch):
    monkeypatch.setattr(ding_regression, "SCALES", (1, 30))
    monkeypatch.setattr(ding_regression, "DEGREES", (1000, 1))
    near, wide = ding_figures.figure_12(1, 8)
    assert near[1] < 0.75 < 0.97 < wide[1]
    assert near[2].mean() < 0.1 < wide[2].mean()
    normal, cauchy = ding_figures.figure_13(1, 8)
    assert normal[1].mean() < cauchy[1].mean()
    assert capsys.readouterr().out.count("Figure 1") == 4


def test_figures_are_drawn(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="figures need the extra dpdask[papers]")
    monkeypatch.setattr(ding_regression, "SCALES", (0.1, 0.3))
    monkeypatch.setattr(ding_regression, "DEGREES", (1000, 100))
    ding_figures.main(["--folder", str(tmp_path), "--replications", "2", "2", "20"])
    for number in (12, 13, 14):
        assert (tmp_path / f"figure-{number}.svg").read_text(encoding="utf-8").count("<path") > 10


def countries(path, n=400):
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


def test_life_expectancy_on_a_small_table(tmp_path, capsys):
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
