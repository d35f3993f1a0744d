"""Cells of tables that are found under privacy: what is paid for them, what they are worth, and what a saved file of them may hold."""

import base64
import copy
import math
import zlib

import dask
import dask.dataframe as dd
import numpy as np
import pytest
from e2e.helpers import schema_of
from mechanisms.fitting import SKEWED, fit_frame, records_of
from mechanisms.fitting import skewed_table as table

import dpdask
from dpdask.errors import DataError, DpdaskError, InputError
from dpdask.mechanisms.columns import columns_from_header, columns_to_header
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.privacy import UnitColumn, noise
from dpdask.privacy.events import DiscreteGaussian, leaves
from dpdask.privacy.events import epsilon as paid

SCHEMA, KEPT = (
    schema_of({**SKEWED, "who": {"role": role, "type": "int64"}}) for role in ("drop", "keep")
)


def estimator_of(kind, **given):
    given = {"epsilon": 1.0, "delta": 1e-9, **given}
    if kind == "copula":
        return dpdask.GaussianCopula(SCHEMA, **given)
    if kind == "marginals":
        return dpdask.Marginals(
            SCHEMA, cliques=[["amount"], ["amount", "group"], ["visits"]], **given
        )
    if kind == "histogram":
        return dpdask.PerturbedHistogram(SCHEMA, **given)
    return dpdask.DIP(KEPT, reference=dpdask.Tree(), **given)


def mechanism_of(kind, **given):
    return estimator_of(kind, **given).mechanism


GAUSSIAN = {}
LAPLACE = {"delta": 0.0}
USER = {"unit": UnitColumn(column="who", max_rows=3)}


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("copula", GAUSSIAN),
        ("marginals", USER),
        ("tree", LAPLACE),
        ("histogram", LAPLACE),
        ("histogram", USER),
    ],
)
def test_the_fine_counts_are_in_the_sum_and_their_noise_is_the_drawn_one(kind, given, monkeypatch):
    estimator = estimator_of(kind, **given)
    mechanism = estimator.mechanism
    assert paid(mechanism.event, mechanism.budget.delta) <= 1.0
    first = next(iter(leaves(mechanism.event)))
    rows = given["unit"].max_rows if "unit" in given else 1
    least = rows * (math.sqrt(2.0) if isinstance(first, DiscreteGaussian) else 2)
    apart = (
        kind == "histogram" and given.get("delta") != 0.0
    )  # what cells lose and what others gain are vectors of their own
    assert first.count == (12 if apart else 6)  # three levels of two columns
    assert least <= first.sensitivity * (2 if apart else 1) <= least * (1 + 1e-12)
    drawn = []
    for name in ("discrete_gaussian", "discrete_laplace"):
        right = getattr(noise, name)

        def spy(counts, scale, *, right=right, **rest):
            drawn.append(scale)
            return right(counts, scale, **rest)

        monkeypatch.setattr(noise, name, spy)
    with estimator.fit(table(4000)):
        pass
    assert drawn[:2] == [first.sigma if isinstance(first, DiscreteGaussian) else first.scale] * 2


def test_records_keep_skewed_numbers_under_bounds_that_are_far_too_wide(tmp_path):
    """Twenty cells of one width know nothing of these numbers, so the test would see them."""
    own = table()
    errors = {}
    for bins in ("adaptive", 20):
        mechanism = mechanism_of("copula", adjacency="add-remove", bins=bins)
        _, release = fit_frame(mechanism, own, tmp_path / str(bins))
        found = records_of(release, len(own)).to_pandas()
        scale = np.diff(own["amount"].quantile([0.01, 0.99]).to_numpy())[0]
        errors[bins] = max(
            abs(found["amount"].quantile(share) - own["amount"].quantile(share)) / scale
            for share in (0.5, 0.75, 0.95)
        )
        if bins == "adaptive":
            assert abs((found["amount"] == 0.0).mean() - (own["amount"] == 0.0).mean()) < 0.01
            assert abs(found["visits"].clip(upper=15).mean() - own["visits"].mean()) < 0.1
            means = [
                frame[frame["amount"] > 0].groupby("group")["amount"].median()
                for frame in (found, own)
            ]
            assert (np.abs(means[0] / means[1] - 1) < 0.2).all()  # the dependence on the group
    assert errors["adaptive"] < 0.05
    assert errors[20] > 0.5


def test_a_tree_releases_skewed_numbers_inside_their_fine_cells(tmp_path):
    own = table()
    release = dpdask.DIP(
        KEPT, epsilon=8.0, delta=1e-9, reference=dpdask.Tree(), insecure_seed=5
    ).fit(own)
    with release:
        found = release.transform(own)
    scale = np.diff(own["amount"].quantile([0.01, 0.99]).to_numpy())[0]
    for share in (0.5, 0.75, 0.95):
        assert abs(found["amount"].quantile(share) - own["amount"].quantile(share)) < 0.05 * scale
    assert abs((found["amount"] == 0.0).mean() - (own["amount"] == 0.0).mean()) < 0.02


def test_a_frame_that_is_empty_in_the_second_pass_is_refused_in_one_line():
    reads = []

    def part(_):
        reads.append(1)
        return table(600) if len(reads) == 1 else table(600).head(0)

    frame = dd.from_map(part, ["part"], meta=table(1).head(0))
    with (
        dask.config.set(scheduler="synchronous"),
        pytest.raises(DataError, match="second pass: the table has no rows; ") as refused,
    ):
        estimator_of("marginals", delta=0.0).fit(frame)
    assert len(reads) == 2
    assert "\n" not in str(refused.value)


# ---- a saved file


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    _, release = fit_frame(mechanism_of("copula"), table(2000), tmp_path_factory.mktemp("saved"))
    return release


def _masses(values):
    return base64.b64encode(zlib.compress(values.astype("<f4").tobytes())).decode()


WRONG = {
    "cuts that do not increase": lambda bins: bins["cuts"].insert(1, bins["cuts"][1]),
    "a cut beyond the grid": lambda bins: bins["cuts"].append(10**9),
    "a first cut inside": lambda bins: bins["cuts"].__setitem__(0, 1),
    "cuts that are no whole numbers": lambda bins: bins["cuts"].__setitem__(1, 1.5),
    "no cuts": lambda bins: bins.update(cuts=[]),
    "counts below 0": lambda bins: bins.update(masses=_masses(np.full(4000, -1.0))),
    "other many counts": lambda bins: bins.update(masses=_masses(np.ones(7))),
    "counts that are no numbers": lambda bins: bins.update(masses="AAAA"),
    "far too many counts": lambda bins: bins.update(masses=_masses(np.ones(10**6))),
    "a number beyond the grid": lambda bins: bins.update(numbers=[1e300]),
    "a number that is none": lambda bins: bins.update(numbers=[float("nan")]),
    "numbers that do not increase": lambda bins: bins.update(numbers=[1e3, 1.0]),
    "two numbers in a fine cell": lambda bins: bins.update(numbers=[500.0, 500.0]),
    "numbers of numbers": lambda bins: bins.update(numbers=[[1.0], [2.0]]),
    "no numbers": lambda bins: bins.update(numbers="1"),
    "something else": lambda bins: bins.clear(),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_crafted_header_is_refused(wrong, saved):
    header = columns_to_header(saved.schema, saved.types, saved.bins)
    columns_from_header(copy.deepcopy(header), saved.model.domain)
    crafted = copy.deepcopy(header)
    WRONG[wrong](crafted["bins"]["amount"])
    with pytest.raises((ValueError, KeyError, TypeError, DpdaskError, zlib.error)):
        columns_from_header(crafted, saved.model.domain)


def test_a_crafted_file_is_one_line(saved, monkeypatch):
    monkeypatch.setattr("dpdask.mechanisms.columns.zlib.compress", lambda _: b"no compressed bytes")
    with pytest.raises(InputError, match="this is not a fitted copula"):
        FittedCopula.from_bytes(saved.to_bytes(), "here")


# ---- what may not be asked for


def test_exact_tables_have_no_adaptive_cells():
    with pytest.raises(dpdask.errors.SpecError, match="adaptive cells are for tables"):
        dpdask.exact_marginals(table(100), SCHEMA, bins="adaptive")
