"""The public classes on tiny neighbouring frames: values, index, types, card, batches and refusals tell no more than the claim."""

import warnings
from collections.abc import Callable

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from privacy.neighbour_cases import KEPT, KNOWN, X, Y, table
from privacy.outsider import (
    Effort,
    View,
    distribution_p_value,
    document_view,
    frame_view,
    laplace_distribution,
    released,
    rows_of,
    tell_apart,
)

import dpdask
from dpdask.errors import DpdaskError
from dpdask.mechanisms import mechanism as releases
from dpdask.streams import stream

EPSILON = 0.2
Y_TEXT = {
    name: value for name, value in Y.items() if name != "type"
}  # pandas has several types of text
SCHEMA = {"id": KEPT, "who": KEPT, "x": X, "y": Y_TEXT}
WHO = dpdask.UnitColumn(column="who", max_rows=2)
REFERENCES = {
    "known": dpdask.Known(columns=KNOWN),
    "public": dpdask.Public(),
    "histogram": dpdask.Histogram(),
    "holdout": dpdask.Holdout(fraction=0.5),
    "chain-fraction": dpdask.Chain(fraction=0.5),
    "chain-public": dpdask.Chain(),
    "tree": dpdask.Tree(),
}
HELD = ("holdout", "chain-fraction")
OF_PUBLIC = ("public", "chain-public")

View_ = Callable[[pd.DataFrame, int], View]  # what is seen of one run on a frame with a seed


def schema_of(columns):
    return dpdask.Schema.from_dict({"columns": columns})


def frame(n_rows, changed=()):
    return table(n_rows, list(changed)).select(list(SCHEMA)).to_pandas()


def seen(act):
    """Return a view, or how it was refused; warnings are the steward's."""
    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("ignore")
        try:
            return act()
        except DpdaskError as error:
            return {"ends": f"{error.exit_code}: {error}"}


def drawn(view, rows):
    return lambda seeds: [view(rows, seed) for seed in seeds]


def dip_view(name, unit, *, lazy=False):
    """Return how a fitted release of a frame looks: its rows, index and types, and its card."""

    def view(rows, seed):
        def act():
            given = dd.from_pandas(rows, npartitions=2) if lazy else rows
            fitted_on = frame(8, range(3)) if name in OF_PUBLIC else given
            mechanism = dpdask.DIP(
                schema_of(SCHEMA),
                epsilon=EPSILON,
                reference=REFERENCES[name],
                unit=unit,
                insecure_seed=seed,
            )
            release = mechanism.fit(fitted_on)
            out = release.transform(given)
            found = frame_view(out.compute() if lazy else out) | document_view("card", release.card)
            release.close()
            return found

        return seen(act)

    return view


CASES = [(name, "row", lazy) for name in REFERENCES for lazy in (False, True)] + [
    (name, WHO, False) for name in REFERENCES if name not in OF_PUBLIC
]


def is_like_others(name, unit, lazy):
    """Return whether another reference is tried with the same unit and frame, and this reference with another one."""
    return (unit != "row" or lazy) and name in (
        "holdout",
        "public",
        "chain-fraction",
        "chain-public",
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("name", "unit", "lazy"),
    [
        pytest.param(*case, marks=pytest.mark.slow if is_like_others(*case) else ())
        for case in CASES
    ],
)
def test_neighbouring_frames_look_alike(name, unit, lazy):
    n_rows = 12 if name in HELD else 6
    changed = range(n_rows - (1 if unit == "row" else 3), n_rows)
    view = dip_view(name, unit, lazy=lazy)

    def draw(rows):
        if name not in HELD:
            return drawn(view, rows)
        return lambda seeds: released(
            [view(rows, seed) for seed in range(2 * seeds.start, 2 * seeds.stop)], changed
        )

    found = tell_apart(draw(frame(n_rows)), draw(frame(n_rows, changed)))
    assert found.epsilon <= EPSILON, found.event
    assert found.n_released > Effort().looked / 2


# ---- several frames of one release


BITS = {"role": "privatise", "kind": "discrete", "levels": [0, 1], "type": "int64"}
HALF = {"kind": "known", "probabilities": [0.5, 0.5]}
PERTURB = {
    "design": "interval-differential",
    "perturb": {"epsilon": 1.0, "reference": HALF, "channel": "optimal"},
}
RANGES = {
    "x": {
        **PERTURB,
        "of": {"design": "case1", "anchors": {"name": "uniform", "loc": -1.0, "scale": 3.0}},
    }
}


def in_batches(act, values):
    """Return what records that come one by one are released as, each in a batch of its own where a release has batches."""
    return [
        rows_of(act, pd.DataFrame({"x": [value]}), f"batch {number}")
        for number, value in enumerate(values)
    ]


def known_release(seed, epsilon=1.0):
    reference = dpdask.Known(columns={"x": {"probabilities": [0.5, 0.5]}})
    fit = dpdask.DIP(
        schema_of({"x": BITS}),
        epsilon=epsilon,
        reference=reference,
        channel="laplace-calibrated",
        insecure_seed=seed,
    ).fit
    return fit(pd.DataFrame({"x": [0, 1]}))


def same_outputs(values):
    """Return how two records that come one by one look: whether their released values are the same."""

    def views(seeds):
        found = []
        for seed in seeds:
            release = known_release(seed)
            one, other = (int(out["x"].iloc[0]) for out in in_batches(release.transform, values))
            release.close()
            found.append({"the same": one == other})
        return found

    return views


PAIRS = Effort(looked=40, gap=0.35, again=60, judged=300)
FEW_PAIRS = (Effort(looked=20, gap=0.35, again=30, judged=110), 1e-3)


def two_records_tell(effort=PAIRS, alpha=1e-9):
    """Return what two records of one release prove about the second one's value, up to an error of alpha."""
    return tell_apart(same_outputs([0, 0]), same_outputs([0, 1]), effort, alpha=alpha).epsilon


def equal_records(act, column, n=60):
    """Return how many of many equal records were released as the first one was, and how many there are."""
    out = [released_.iloc[0][column] for released_ in in_batches(act, [0] * n)]
    return sum(value == out[0] for value in out), n


def test_records_that_come_one_by_one_get_noise_of_their_own():
    same, n = equal_records(known_release(3).transform, "x")
    assert (
        n * 0.25 < same < n * 0.95
    )  # 27 % or 73 % are expected: as often as the first one's value
    mechanism = dpdask.IntervalMechanism(schema_of({"x": BITS}), columns=RANGES, insecure_seed=3)
    same, n = equal_records(mechanism.fit(pd.DataFrame({"x": [0, 1]})).transform, "x_lower")
    assert same < n * 0.95
    assert two_records_tell(*FEW_PAIRS) <= 1.0


def test_equal_partitions_get_noise_of_their_own():
    one = pd.DataFrame({"x": [0]})
    rows = dd.from_map(lambda _: one, range(100), meta=one.head(0))
    release = known_release(4)
    with dask.config.set(scheduler="synchronous"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = release.transform(rows).compute()["x"].to_numpy()
    assert 8 < out.sum() < 60  # 27 are expected


@pytest.mark.more
@pytest.mark.parametrize(
    ("effort", "alpha"),
    [FEW_PAIRS, pytest.param(PAIRS, 1e-9, marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_one_fixed_map_for_all_records_is_found(effort, alpha, monkeypatch):
    monkeypatch.setattr(releases, "stream", lambda key, mechanism, _: stream(key, mechanism, ""))
    same, n = equal_records(known_release(3).transform, "x")
    assert same == n
    assert two_records_tell(effort, alpha) > 1.0


def test_noise_from_the_system_has_the_published_distribution():
    """Without a seed: other runs test the reproducible noise."""
    wide = {**X, "levels": list(range(2000))}
    release = dpdask.PerturbedHistogram(
        schema_of({"x": wide}), epsilon=0.5, adjacency="add-remove", threshold="none"
    ).fit(pd.DataFrame({"x": [0] * 5}))
    cells = release.cells
    counts = np.zeros(2000, dtype=np.int64)
    counts[cells["x"].astype(int)] = cells["weight"].astype(int)
    counts[0] -= 5
    assert distribution_p_value(counts, laplace_distribution(2.0)) > 1e-9
