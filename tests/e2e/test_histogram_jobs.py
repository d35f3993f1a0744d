"""Jobs whose reference is a noisy histogram: every row is released and covered, with noise drawn once."""

import math
import re

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from e2e.helpers import LEVELS, RATINGS_SCHEMA, continuous, lake, read_card, run_here, write_job
from strategies import zeros_and_a_tail

from dpdask.privacy.events import from_dict, leaves

HISTOGRAM = {"kind": "histogram", "share": 0.25, "bins": 64}


def job(folder, source, **changed):
    return write_job(
        folder / "job", source, folder / "out", **{"mechanism__reference": HISTOGRAM, **changed}
    )


def read(folder):
    return pads.dataset(folder, exclude_invalid_files=False, ignore_prefixes=["_", "."]).to_table()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("source") / "in", [150, 90, 1200, 300])


def write_table(folder, **columns):
    (folder / "in").mkdir()
    pq.write_table(pa.table(columns), folder / "in" / "a.parquet")
    return folder / "in"


def test_every_row_is_released_and_every_row_is_covered(source, tmp_path):
    run_here(job(tmp_path, source))
    ids = [sorted(read(folder)["userId"].to_pylist()) for folder in (tmp_path / "out", source)]
    assert ids[0] == ids[1]
    found = read_card(tmp_path)["guarantee"]
    assert found["protected"] == {"who": "the values of all rows", "fraction": 1.0, "of": "rows"}
    assert found["unprotected"]["fraction"] == 0.0
    accounting = read_card(tmp_path)["accounting"]
    assert math.isclose(math.fsum(accounting["epsilon_reference"].values()), 1.0)
    assert accounting["epsilon_exact"] <= 4.0
    # five columns' histograms, and the rows
    assert len(list(leaves(from_dict(accounting["events"])))) == 6


def test_the_released_distribution_is_that_of_the_original(tmp_path):
    rng, n_rows = np.random.default_rng(2), 40_000
    table = {
        "rating": rng.choice(LEVELS, n_rows, p=np.arange(1, 11) / 55),
        "price": rng.beta(2, 5, n_rows),
    }
    schema = {
        "rating": RATINGS_SCHEMA["rating"],
        "price": continuous([0.0, 1.0]),
    }
    run_here(job(tmp_path, write_table(tmp_path, **table), schema=schema, privacy__epsilon=1.0))
    found = read(tmp_path / "out")
    for name, edges in (("rating", np.arange(0.25, 5.5, 0.5)), ("price", np.linspace(0, 1, 11))):
        before, after = (
            np.histogram(values, edges)[0] / n_rows
            for values in (table[name], found[name].to_numpy())
        )
        # sampling alone gives about 0.01, noise of scale 16 less than 0.002
        assert np.abs(before - after).sum() / 2 < 0.03
    assert (found["rating"].to_numpy() == table["rating"]).mean() < 0.6


COSTS = np.random.default_rng(5).lognormal(math.log(2000.0), 1.2, 20_000)
GAINS = zeros_and_a_tail(5, 20_000, share=0.9).astype(np.int64)
ADAPTIVE = {"kind": "histogram"}
TOO_LOW = (
    "; x has 100 % of its values at its upper bound or next to it: check that it is not too low"
)
TOO_WIDE = (
    r"; x has \d\d % of its values in one cell of the reference, over which they are spread evenly:"
    r" check that its bounds .*"
)


@pytest.mark.parametrize(
    ("values", "column", "reference", "says"),
    [
        (COSTS, {"bounds": [0.0, 1e6]}, ADAPTIVE, ""),
        (COSTS, {"bounds": [0.0, 1.0]}, ADAPTIVE, TOO_LOW),
        (COSTS, {"bounds": [0.0, 1e12]}, ADAPTIVE, TOO_WIDE),
        (GAINS, {"bounds": [0, 100_000]}, ADAPTIVE, ""),
        # of rows that nothing protects, nothing is said
        (
            COSTS[:2000],
            {"bounds": [0.0, 1.0], "outside": "clip"},
            {"kind": "holdout", "fraction": 0.25},
            "",
        ),
    ],
    ids=["right", "too low", "too wide", "a shared whole number", "a hold-out"],
)
def test_bounds_that_cannot_be_right_are_named(values, column, reference, says, tmp_path):
    schema = {"x": continuous(**column)}
    given = {"mechanism__reference": reference, "privacy__epsilon": 2.0}
    made = job(tmp_path, write_table(tmp_path, x=values), schema=schema, **given)
    assert re.fullmatch(rf"x keeps a correlation of ranks of 0\.\d\d{says}", run_here(made).quality)
    if column["bounds"][1] in (1e6, 1e12):  # no number that was made up
        _, counts = np.unique(read(tmp_path / "out")["x"].to_numpy(), return_counts=True)
        assert counts.max() < 0.1 * counts.sum()
