"""Jobs whose reference is a noisy histogram: every row released and covered, the noise drawn once and as large as accounted."""

from __future__ import annotations

import hashlib
import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster
from e2e.helpers import LEVELS, RATINGS_SCHEMA, digests, hidden, lake, load, run_here, write_job
from faults.drivers import Drivers
from strategies import zeros_and_a_tail

from dpdask.engine.work import make_table_work
from dpdask.io.storage import Folder
from dpdask.jobs.run import run_job
from dpdask.mechanisms.dip.columns import DipRelease
from dpdask.mechanisms.dip.spec import DipSpec
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget, UnitColumn
from dpdask.privacy.events import DiscreteLaplace, from_dict, leaves
from dpdask.references import Histogram, histogram
from dpdask.references.reference import ColumnCounts
from dpdask.schema import Schema
from dpdask.stats.levels import CellCounts
from dpdask.streams import RunKey, stream

HISTOGRAM: dict[str, Any] = {"kind": "histogram", "share": 0.25, "bins": 64}
SIZES = [150, 90, 1200, 300]


def job(folder: Path, source: Path, **changed: Any) -> Path:
    return write_job(
        folder / "job", source, folder / "out", **{"mechanism__reference": HISTOGRAM, **changed}
    )


def card(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "_dpdask" / "release.json").read_text())
    return found


def read(folder: Path) -> pa.Table:
    return pads.dataset(folder, exclude_invalid_files=False, ignore_prefixes=["_", "."]).to_table()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lake(tmp_path_factory.mktemp("source") / "in", SIZES)


@pytest.fixture(scope="module")
def quiet(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("quiet")
    run_here(job(base, source))
    return base


def test_every_row_is_released_and_every_row_is_covered(source: Path, quiet: Path) -> None:
    assert sorted(read(quiet / "out")["userId"].to_pylist()) == sorted(
        read(source)["userId"].to_pylist()
    )
    found = card(quiet)["guarantee"]
    assert found["protected"] == {"who": "the values of all rows", "fraction": 1.0, "of": "rows"}
    assert found["unprotected"]["fraction"] == 0.0
    assert found["unprotected"]["who"].startswith("none; ")
    accounting = card(quiet)["accounting"]
    assert math.isclose(math.fsum(accounting["epsilon_reference"].values()), 1.0)
    assert accounting["epsilon_exact"] <= 4.0
    assert (
        len(list(leaves(from_dict(accounting["events"])))) == 6
    )  # five columns' histograms, and the rows


@pytest.mark.parametrize("channel", ["laplace", "laplace-calibrated", "optimal"])
def test_the_noise_drawn_is_the_noise_in_the_card(
    channel: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[Any, int]] = []
    perturb = histogram.perturb

    def spy(counts: np.ndarray, event: Any, **rest: Any) -> np.ndarray:
        drawn.append((event, int(counts.sum())))
        return perturb(counts, event, **rest)

    monkeypatch.setattr(histogram, "perturb", spy)
    run_here(
        job(
            tmp_path,
            source,
            mechanism__channel=channel,
            privacy__unit={"column": "userId", "max_rows": 3},
        )
    )
    *histograms, rows = leaves(from_dict(card(tmp_path)["accounting"]["events"]))
    assert [event for event, _ in drawn] == histograms
    assert {event.sensitivity for event in histograms if isinstance(event, DiscreteLaplace)} == {6}
    assert {total for _, total in drawn} == {
        read(tmp_path / "out").num_rows
    }  # the rows in the bound, and no others
    assert getattr(rows, "n", None) == 3


def test_the_same_bytes_on_every_scheduler(
    source: Path, quiet: Path, two_workers: LocalCluster, tmp_path: Path
) -> None:
    made = load(job(tmp_path, source))
    with dask.config.set(scheduler="threads", num_workers=3):
        run_job(made)
    assert digests(tmp_path / "out") == digests(quiet / "out")
    with Client(two_workers):
        run_job(load(job(tmp_path, source), output__path=tmp_path / "processes"))
    assert digests(tmp_path / "processes") == digests(quiet / "out")


@pytest.mark.parametrize("point", ["intended", "drawn", "surveyed", "fitted"])
def test_a_seeded_run_killed_around_its_noise_ends_in_the_same_bytes(
    point: str, source: Path, quiet: Path, drivers: Drivers, tmp_path: Path
) -> None:
    made = job(tmp_path, source)
    assert drivers.run("run", made, point=point)[0] == -signal.SIGKILL
    assert (hidden(tmp_path / "out") / "release.npz").exists() == (point == "fitted")
    run_here(made)
    assert digests(tmp_path / "out") == digests(quiet / "out")


def test_secure_noise_is_drawn_once(source: Path, drivers: Drivers, tmp_path: Path) -> None:
    made = job(tmp_path, source, insecure_seed=None)
    state = hidden(tmp_path / "out")
    assert drivers.run("run", made, point="fitted")[0] == -signal.SIGKILL
    fitted = (state / "release.npz").read_bytes()
    assert (
        json.loads((state / "run.json").read_text())["release_sha256"]
        == hashlib.sha256(fitted).hexdigest()
    )
    for point in ("some-shards", "staged"):
        assert drivers.run("run", made, point=point)[0] == -signal.SIGKILL
        assert (state / "release.npz").read_bytes() == fitted
    run_here(made)
    matrix = DipRelease.from_bytes(fitted, "release.npz").columns["rating"].channel.matrix  # type: ignore[union-attr]  # levels have one
    assert card(tmp_path)["columns"]["rating"]["channel"] == matrix.tolist()
    assert card(tmp_path)["insecure"] is False


def test_secure_noise_differs_from_run_to_run(source: Path, tmp_path: Path) -> None:
    matrices = []
    for name in ("a", "b"):
        run_here(job(tmp_path / name, source, insecure_seed=None))
        matrices.append(card(tmp_path / name)["columns"]["rating"]["channel"])
    assert matrices[0] != matrices[1]


@pytest.mark.parametrize("channel", ["laplace", "optimal"])
def test_the_released_distribution_is_that_of_the_original(channel: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    n_rows = 40_000
    table = pa.table(
        {
            "rating": rng.choice(LEVELS, n_rows, p=np.arange(1, 11) / 55),
            "price": rng.beta(2, 5, n_rows),
        }
    )
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in" / "part.parquet")
    schema = {
        "rating": RATINGS_SCHEMA["rating"],
        "price": {"role": "privatise", "kind": "continuous", "bounds": [0.0, 1.0]},
    }
    run_here(
        job(
            tmp_path,
            tmp_path / "in",
            schema=schema,
            mechanism__channel=channel,
            privacy__epsilon=1.0,
        )
    )
    found = read(tmp_path / "out")
    for name, edges in (("rating", np.arange(0.25, 5.5, 0.5)), ("price", np.linspace(0, 1, 11))):
        before, after = (
            np.histogram(part[name].to_numpy(), edges)[0] / n_rows for part in (table, found)
        )
        assert (
            np.abs(before - after).sum() / 2 < 0.03
        )  # sampling alone gives about 0.01, noise of scale 16 less than 0.002
    assert (found["rating"].to_numpy() == table["rating"].to_numpy()).mean() < 0.6


# ---- as much noise as accounted, no less and no more


def noises(unit: Any, n_keys: int, folder: Path) -> tuple[np.ndarray, DiscreteLaplace]:
    """Return the noise that the driver draws for one column under many run keys, and the event that is accounted for it."""
    schema = Schema.from_dict(
        {
            "columns": {
                "user": {"role": "keep"},
                "x": {"role": "privatise", "kind": "discrete", "levels": LEVELS},
            }
        }
    )
    types = pa.schema([("user", pa.int64()), ("x", pa.float64())])
    mechanism = bind(
        DipSpec(reference=Histogram(share=0.5)), schema, Budget(epsilon=1.0, unit=unit)
    )
    columns = make_table_work(mechanism, types, Folder(folder.as_uri())).columns
    counts = ColumnCounts({"x": CellCounts(np.full(10, 1000, dtype=np.int64))})
    found: list[np.ndarray] = []
    perturb = histogram.perturb
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            histogram,
            "perturb",
            lambda counts, event, **rest: (
                found.append(perturb(counts, event, **rest) - counts) or counts + found[-1]
            ),
        )
        for seed in range(n_keys):
            key = RunKey.insecure(seed)
            mechanism.draw(counts, columns, lambda name, key=key: stream(key, name, ""))
    [event] = [event for event in mechanism.event.events if isinstance(event, DiscreteLaplace)]
    return np.concatenate(found), event


def as_accounted(found: np.ndarray, scale: float) -> bool:
    """Return whether noise has the variance of discrete Laplace noise of a scale, within 5.2 standard errors (alpha 2e-7)."""
    q = math.exp(-1.0 / scale)
    variance = 2 * q / (1 - q) ** 2
    error = math.sqrt(
        5.5 / len(found)
    )  # (kurtosis - 1) / n: 5 for Laplace noise, a little more on the whole numbers
    return abs(float(np.mean(found.astype(float) ** 2)) / variance - 1) < 5.2 * error and abs(
        float(found.mean())
    ) < 5.2 * math.sqrt(variance / len(found))


@pytest.mark.parametrize(
    "unit", ["row", UnitColumn(column="user", max_rows=20)], ids=["row", "user"]
)
def test_noise_half_or_twice_as_large_is_noticed(unit: Any, tmp_path: Path) -> None:
    found, event = noises(unit, 300, tmp_path)
    assert len(found) == 3000
    assert event.scale == (4.0 if unit == "row" else 80.0)
    assert as_accounted(found, event.scale)
    for factor in (0.5, 2.0):
        assert not as_accounted(found, event.scale * factor)
        assert not as_accounted(np.round(found * factor), event.scale)


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ([0.0, 1e6], ""),
        (
            [0.0, 1.0],
            r"; cost has 100 % of its values at its upper bound or next to it: check that it is not too low",
        ),
        (
            [0.0, 1e12],
            r"; cost has \d\d % of its values in one cell of the reference, over which they are spread evenly: check that its bounds .*",
        ),
    ],
    ids=["right", "too low", "too wide"],
)
def test_bounds_that_cannot_be_right_are_named(
    bounds: list[float], says: str, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    costs = np.random.default_rng(5).lognormal(math.log(2000.0), 1.2, 20_000)
    pq.write_table(pa.table({"cost": costs}), tmp_path / "in" / "a.parquet")
    schema = {"cost": {"role": "privatise", "kind": "continuous", "bounds": bounds}}
    found = run_here(
        job(
            tmp_path,
            tmp_path / "in",
            schema=schema,
            mechanism__reference={"kind": "histogram"},
            privacy__epsilon=2.0,
        )
    ).quality
    assert re.fullmatch(rf"cost keeps a correlation of ranks of 0\.\d\d{says}", found)
    released = read(tmp_path / "out")["cost"].to_numpy()
    _, counts = np.unique(released, return_counts=True)
    assert counts.max() < 0.1 * len(released) or bounds[1] == 1.0  # no number that was made up


def test_a_whole_number_that_most_rows_share_is_no_wide_cell(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    gains = zeros_and_a_tail(5, 20_000, share=0.9).astype(np.int64)
    pq.write_table(pa.table({"gain": gains}), tmp_path / "in" / "a.parquet")
    schema = {"gain": {"role": "privatise", "kind": "continuous", "bounds": [0, 100_000]}}
    found = run_here(
        job(
            tmp_path,
            tmp_path / "in",
            schema=schema,
            mechanism__reference={"kind": "histogram"},
            privacy__epsilon=2.0,
        )
    ).quality
    assert re.fullmatch(r"gain keeps a correlation of ranks of 0\.\d\d", found)


def test_nothing_is_said_of_the_bounds_of_rows_that_nothing_protects(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(
        pa.table({"cost": np.random.default_rng(5).lognormal(8.0, 1.0, 2000)}),
        tmp_path / "in" / "a.parquet",
    )
    schema = {
        "cost": {"role": "privatise", "kind": "continuous", "bounds": [0.0, 1.0], "outside": "clip"}
    }
    held_out = job(
        tmp_path,
        tmp_path / "in",
        schema=schema,
        mechanism__reference={"kind": "holdout", "fraction": 0.25},
    )
    assert re.fullmatch(r"cost keeps a correlation of ranks of 0\.\d\d", run_here(held_out).quality)
