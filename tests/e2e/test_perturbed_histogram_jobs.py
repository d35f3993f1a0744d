"""Histogram jobs: cells near the truth, valid rows, honest cards, one charge, the same bytes everywhere, refusals in words."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster
from e2e.helpers import (
    LEVELS,
    MIXED_SCHEMA,
    charging_entries,
    digests,
    hidden,
    holds_number,
    lake,
    load,
    run_here,
    write_job,
)

from dpdask.codec import codec_for
from dpdask.engine.account import open_ledger
from dpdask.engine.work import NOISY_NAME
from dpdask.errors import BudgetError, InputError, SpecError
from dpdask.inference import WeightedSample, least_squares, make_redraw, noise_error
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.jobs.run import run_job
from dpdask.jobs.state import Progressed
from dpdask.mechanisms.histogram.noise import NoisyHistogram
from dpdask.mechanisms.histogram.release import FittedHistogram
from dpdask.privacy.events import DiscreteLaplace, from_dict, leaves, to_dict
from dpdask.schema import Schema

WIDE: dict[str, Any] = {**MIXED_SCHEMA, "userId": {"role": "drop", "type": "int64"}}
SCHEMA: dict[str, Any] = {**WIDE, "age": {"role": "drop"}, "amount": {"role": "drop"}}
PRIVATISED = ["rating", "genre", "price"]
ROWS = [150, 90, 1700, 40, 300]
N_ROWS = sum(ROWS)
CELLS: dict[str, Any] = {"kind": "histogram", "bins": {"price": 5}, "threshold": "none"}
DRAWN: dict[str, Any] = {"kind": "histogram", "bins": 5, "threshold": "enhanced", "output": "rows"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lake(tmp_path_factory.mktemp("source") / "in", ROWS, schema=WIDE)


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    with dask.config.set(scheduler="synchronous"):
        yield


def job(folder: Path, source: Path, mechanism: dict[str, Any] = CELLS, **changed: Any) -> Path:
    return write_job(
        folder / "job",
        source,
        folder / "out",
        **{"schema": SCHEMA, "mechanism": mechanism, **changed},
    )


def read(folder: Path) -> pa.Table:
    return pads.dataset(folder, exclude_invalid_files=False).to_table()


def run(folder: Path, source: Path, mechanism: dict[str, Any] = CELLS, **changed: Any) -> pa.Table:
    run_here(job(folder, source, mechanism, **changed))
    return read(folder / "out")


def card(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "_dpdask" / "release.json").read_text())
    return found


def exact(source: Path, *, n_users: int = 0) -> pd.Series:
    """Return the exact counts of all cells, with pandas."""
    frame = read(source).to_pandas()
    frame["genre"] = frame["genre"].fillna("null")
    frame["price"] = (np.ceil(frame["price"] * 5).clip(1, 5) - 0.5) / 5
    every = itertools.product(
        LEVELS, ["comedy", "drama", "horror", "null"], (np.arange(5) + 0.5) / 5
    )
    counts = frame.assign(price=frame["price"].round(6)).groupby(PRIVATISED).size()
    return counts.reindex(
        pd.MultiIndex.from_tuples([(r, g, round(p, 6)) for r, g, p in every], names=PRIVATISED),
        fill_value=0,
    )


def weights(cells: pa.Table) -> pd.Series:
    frame = cells.to_pandas()
    frame["genre"] = frame["genre"].fillna("null")
    return frame.assign(price=frame["price"].round(6)).set_index(PRIVATISED)["weight"]


# ---- cells


def test_cells_are_near_the_truth_and_their_noise_has_its_law(source: Path, tmp_path: Path) -> None:
    cells = run(tmp_path, source, privacy__epsilon=1.0)
    assert cells.schema.equals(
        pa.schema(
            [
                ("rating", pa.float64()),
                ("genre", pa.string()),
                ("price", pa.float64()),
                ("weight", pa.float64()),
            ]
        )
    )
    truth = exact(source)
    found = weights(cells)
    assert found.index.is_unique
    off = found.reindex(truth.index, fill_value=0.0) - truth  # a cell of weight 0 is not listed
    assert set(found.index) <= set(truth.index)
    a = math.exp(-1 / 2.0)  # scale 2/ε
    deviation = math.sqrt(2 * a) / (1 - a)
    assert len(off) == card(tmp_path)["mechanism"]["cells"] == 200
    assert (
        0.75 * deviation < off.std() < 1.3 * deviation
    )  # too little noise fails, too much noise fails too
    assert abs(off.mean()) < 5 * deviation / math.sqrt(200)
    assert (found < 0).any()


@pytest.mark.parametrize(("threshold", "least"), [("positive", 1), ("enhanced", 4)])
def test_a_threshold_cuts_the_same_noise(
    threshold: str, least: int, source: Path, tmp_path: Path
) -> None:
    whole = weights(run(tmp_path / "none", source, privacy__epsilon=1.0))
    cut = weights(
        run(tmp_path / "cut", source, {**CELLS, "threshold": threshold}, privacy__epsilon=1.0)
    )
    found = card(tmp_path / "cut")["mechanism"]
    assert (
        found["cut"]
        == least
        == (1 if threshold == "positive" else math.ceil(0.5 * math.log(N_ROWS)))
    )
    assert (found["cells_listed"], found["total_weight"]) == (len(cut), int(cut.sum()))
    pd.testing.assert_series_equal(cut.sort_index(), whole[whole >= least].sort_index())


def test_points_may_be_spread(source: Path, tmp_path: Path) -> None:
    given = {**CELLS, "bins": {"price": 5, "age": 3}}
    schema = {**SCHEMA, "age": WIDE["age"]}
    centres = run(tmp_path / "centres", source, given, schema=schema)
    points = run(tmp_path / "points", source, {**given, "points": "spread"}, schema=schema)
    assert points.schema.equals(centres.schema)
    assert points.num_rows == 4 * centres.num_rows
    assert len(list((tmp_path / "points" / "out").glob("*.parquet"))) == -(
        -points.num_rows // 500
    )  # no multiple of 4 or of 500
    sums = points["weight"].to_numpy().reshape(-1, 4).sum(axis=1)
    assert sums == pytest.approx(centres["weight"].to_numpy())
    assert points["rating"].to_pylist()[::4] == centres["rating"].to_pylist()
    assert points["price"].to_numpy().reshape(-1, 4).mean(axis=1) == pytest.approx(
        centres["price"].to_numpy()
    )
    told = [card(tmp_path / name)["mechanism"] for name in ("centres", "points")]
    assert [each["points"] for each in told] == ["centre", "spread"]
    assert {**told[0], "points": 0} == {**told[1], "points": 0}


def test_nothing_left_is_an_empty_table(source: Path, tmp_path: Path) -> None:
    cells = run(
        tmp_path, source, {**CELLS, "threshold": "enhanced", "factor": 1e4, "points": "spread"}
    )
    assert cells.num_rows == 0
    assert cells.column_names == [*PRIVATISED, "weight"]


def test_every_kind_of_column_gives_cells_and_rows(source: Path, tmp_path: Path) -> None:
    mechanism = {
        "kind": "histogram",
        "bins": {"price": [0.0, 0.25, 0.5], "age": 3, "amount": 2},
        "threshold": "positive",
    }
    cells = run(tmp_path / "cells", source, mechanism, schema=WIDE)
    assert cells.schema.field("age").type == pa.float64()
    assert set(cells["amount"].to_pylist()) == {0.0, 25.0, 50.0, 75.0}
    assert cells.num_rows > 500
    assert len(list((tmp_path / "cells" / "out").glob("*.parquet"))) == -(-cells.num_rows // 500)
    rows = run(tmp_path / "rows", source, {**mechanism, "output": "rows"}, schema=WIDE)
    check_valid(rows, read(source), WIDE)
    assert rows.num_rows == N_ROWS


def every_type(n_rows: int) -> pa.Table:
    rng = np.random.default_rng(4)
    missing = rng.random(n_rows) < 0.2
    return pa.table(
        {
            "day": pa.array(rng.integers(18262, 20001, n_rows), pa.int32(), mask=missing).cast(
                pa.date32()
            ),
            "when": pa.array(rng.integers(16 * 10**14, 17 * 10**14, n_rows)).cast(
                pa.timestamp("us", tz="UTC")
            ),
            "flag": pa.array(rng.random(n_rows) < 0.3, mask=missing),
            "small": pa.array(rng.integers(-100, 101, n_rows), pa.int8(), mask=missing),
            "single": pa.array(
                np.where(rng.random(n_rows) < 0.3, 0.1, rng.uniform(0, 0.7, n_rows)).astype(
                    np.float32
                ),
                mask=missing,
            ),
            "word": pa.array(rng.choice(["a", "b"], n_rows)).dictionary_encode(),
            "code": pa.array(rng.choice([1, 2], n_rows), pa.uint16(), mask=missing),
        }
    )


EVERY_TYPE: dict[str, Any] = {
    "day": {"role": "privatise", "kind": "continuous", "bounds": [18262, 20000], "nulls": "level"},
    "when": {"role": "privatise", "kind": "continuous", "bounds": [1.6e15, 1.7e15]},
    "flag": {"role": "privatise", "kind": "categorical", "levels": [True, False], "nulls": "level"},
    "small": {"role": "privatise", "kind": "continuous", "bounds": [-100, 100], "nulls": "level"},
    "single": {
        "role": "privatise",
        "kind": "mixed",
        "atoms": [0.1],
        "bounds": [0.0, 0.7],
        "nulls": "level",
    },
    "word": {"role": "privatise", "kind": "categorical", "levels": ["a", "b", "never"]},
    "code": {"role": "privatise", "kind": "discrete", "levels": [1, 2], "nulls": "level"},
}


def test_every_type_has_its_centres_and_its_rows(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    given = every_type(3000)
    pq.write_table(given, tmp_path / "in" / "part.parquet")
    mechanism = {"kind": "histogram", "bins": 2, "threshold": "positive"}
    cells = run(tmp_path / "cells", tmp_path / "in", mechanism, schema=EVERY_TYPE)
    numbers = {"small", "single"}
    released = Schema.from_dict({"columns": EVERY_TYPE}).select_released(given.schema)
    for name in EVERY_TYPE:
        assert cells.schema.field(name).type == (
            pa.float64() if name in numbers else released.field(name).type
        ), name
        assert (cells[name].null_count > 0) is (EVERY_TYPE[name].get("nulls") == "level"), name
    assert {float(np.float32(0.1)), None} < set(cells["single"].to_pylist())
    rows = run(
        tmp_path / "rows", tmp_path / "in", {**mechanism, "output": "rows"}, schema=EVERY_TYPE
    )
    check_valid(rows, given, EVERY_TYPE)
    assert rows.num_rows == 3000


def test_ols_on_a_release_is_that_of_the_exact_cells_but_for_the_noise(
    source: Path, tmp_path: Path
) -> None:
    cells = run(tmp_path, source, privacy__epsilon=1.0).to_pandas()

    def sample(frame: pd.DataFrame) -> WeightedSample:
        frame = frame.assign(
            genre=pd.Categorical(
                frame["genre"].fillna("null"), ["null", "comedy", "drama", "horror"]
            )
        )
        return WeightedSample.of_frame(frame, "price", ["rating", "genre"])

    scale = card(tmp_path)["accounting"]["noise"]["cells"]["scale"]
    released = sample(cells)
    truth = least_squares(sample(exact(source).rename("weight").astype(float).reset_index()))
    error = noise_error(
        least_squares, make_redraw(released, scale), repeats=60, rng=np.random.default_rng(0)
    ).standard_error
    off = np.abs(least_squares(released) - truth)
    assert (off < 4 * error).all()
    assert (off > 0).all()


# ---- rows


def check_valid(records: pa.Table, source: pa.Table, columns: dict[str, Any]) -> None:
    schema = Schema.from_dict({"columns": columns})
    expected = schema.select_released(source.schema)
    assert records.schema.equals(expected)
    for name in schema.privatised:
        codec = codec_for(name, schema.columns[name], expected.field(name).type)
        for chunk in records.column(name).chunks:
            codec.encode(chunk)


def test_rows_are_valid_and_follow_the_weights(source: Path, tmp_path: Path) -> None:
    rows = run(tmp_path / "rows", source, {**DRAWN, "n_rows": 6000})
    check_valid(rows, read(source), SCHEMA)
    assert rows.num_rows == card(tmp_path / "rows")["mechanism"]["records"] == 6000
    assert (
        plan_job(load(tmp_path / "rows" / "job" / "job.yaml")).n_shards
        == 12
        == len(list((tmp_path / "rows" / "out").glob("*.parquet")))
    )
    assert len(set(rows["price"].to_pylist())) == 6000  # no shard repeats another
    released = weights(run(tmp_path / "cells", source, {**DRAWN, "output": "cells"}))
    cell = rows.to_pandas()
    cell["genre"] = cell["genre"].fillna("null")
    cell["price"] = ((np.ceil(cell["price"] * 5).clip(1, 5) - 0.5) / 5).round(6)
    drawn = cell.groupby(PRIVATISED).size()
    assert set(drawn.index) <= set(released.index)
    share = released / released.sum()
    chi2 = ((drawn.reindex(share.index, fill_value=0) - 6000 * share) ** 2 / (6000 * share)).sum()
    df = len(share) - 1
    assert abs(chi2 - df) < 5 * math.sqrt(2 * df)


@pytest.mark.parametrize("threshold", ["enhanced", "positive"])
def test_under_add_remove_nothing_tells_the_number_of_rows(
    threshold: str, source: Path, tmp_path: Path
) -> None:
    numbers = set()
    for seed in range(2):
        folder = tmp_path / str(seed)
        rows = run(
            folder,
            source,
            {**DRAWN, "threshold": threshold},
            privacy__adjacency="add-remove",
            insecure_seed=seed,
        )
        found = card(folder)
        assert found["n_rows"]["exact"] is False
        assert (found["n_rows"]["value"] is None) is (threshold == "positive")
        assert "The number of rows is private" in found["guarantee"]["text"]
        numbers.add(rows.num_rows)
        assert not holds_number(json.dumps(found), N_ROWS)
    assert len(numbers - {N_ROWS}) == 2
    assert all(abs(number - N_ROWS) < 0.2 * N_ROWS for number in numbers)


def test_a_unit_scales_the_noise(source: Path, tmp_path: Path) -> None:
    found = weights(run(tmp_path, source, privacy__unit={"column": "userId", "max_rows": 2}))
    [event] = leaves(from_dict(card(tmp_path)["accounting"]["events"]))
    assert isinstance(event, DiscreteLaplace)
    assert (event.sensitivity, event.scale) == (4, pytest.approx(1.0))
    kept = np.minimum(read(source).to_pandas().groupby("userId").size(), 2).sum()
    assert abs(found.sum() - kept) < 6 * 1.5 * math.sqrt(200)
    assert card(tmp_path)["n_rows"]["value"] == kept < N_ROWS


# ---- the card, the plan, the ledger


def test_the_card_and_the_plan(source: Path, tmp_path: Path) -> None:
    run(tmp_path, source)
    found, loaded = card(tmp_path), load(tmp_path / "job" / "job.yaml")
    assert found["guarantee"]["text"].endswith(loaded.mechanism.guarantee("shuffled"))
    assert found["guarantee"]["text"].startswith("INSECURE: ")
    assert found["accounting"]["events"] == to_dict(loaded.mechanism.event)
    assert found["accounting"]["epsilon_exact"] <= 4.0
    assert found["n_rows"] == {"value": N_ROWS, "exact": True}
    assert found["columns"]["price"]["edges"] == [k / 5 for k in range(6)]
    assert json.dumps(found, allow_nan=False)
    planned = plan_job(loaded)
    assert "joint histogram of 200 cells" in planned.stages[0]
    assert planned.warnings == ()
    crowded = plan_job(
        load(job(tmp_path / "crowded", source, {**CELLS, "bins": 500}, privacy__epsilon=0.1))
    )
    assert any("few cells stand out" in warning for warning in crowded.warnings)
    audited = audit_job(loaded, n_runs=1000)
    assert (audited["sound"], len(audited["measurements"])) == (True, 1)


def test_the_rule_gives_bins_where_the_number_of_rows_is_public(
    source: Path, tmp_path: Path
) -> None:
    run(tmp_path, source, {**CELLS, "bins": "rule"})
    expected = round((math.sqrt(math.log(N_ROWS)) / N_ROWS) ** (-2 / 3))
    assert card(tmp_path)["mechanism"]["bins"] == {"price": expected}
    with pytest.raises(
        SpecError, match=r"which add-remove hides; give numbers of cells, or set privacy\.adjacency"
    ) as caught:
        load(
            job(tmp_path / "b", source, {**CELLS, "bins": "rule"}, privacy__adjacency="add-remove")
        )
    assert caught.value.exit_code == 64
    schema = {**SCHEMA, "genre": {"role": "drop"}}
    text = lake(tmp_path / "in", [100], schema=WIDE, csv=True)
    with pytest.raises(SpecError, match="do not tell before they are read"):
        run_here(job(tmp_path / "c", text, {**CELLS, "bins": "rule"}, schema=schema))
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["job"]


def test_the_ledger_is_charged_once_and_then_refuses(source: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    ledger = open_ledger(url)
    ledger.init("people", 5.0, 0.0)
    place = {"url": url, "dataset": "people"}
    made = job(tmp_path / "a", source, ledger=place)
    assert run_here(made).status == "released"
    assert run_here(made).status == "already released"
    assert [entry.kind for entry in charging_entries(url, "people")] == ["intend", "commit"]
    assert ledger.read_balance("people").epsilon_spent == pytest.approx(4.0)
    with pytest.raises(BudgetError):
        run_here(job(tmp_path / "b", source, ledger=place))
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["job"]


def test_rows_of_nothing_are_refused_and_the_charge_stays(source: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    ledger = open_ledger(url)
    ledger.init("people", 5.0, 0.0)
    made = job(tmp_path, source, {**DRAWN, "factor": 1e4}, ledger={"url": url, "dataset": "people"})
    with pytest.raises(
        SpecError, match=r"no cell has a positive weight.*lower mechanism\.bins"
    ) as caught:
        run_here(made)
    assert caught.value.exit_code == 64
    assert not (tmp_path / "out").exists()
    assert [entry.kind for entry in charging_entries(url, "people")] == ["intend", "refuse"]
    with pytest.raises(BudgetError):  # another try would draw anew, and is another charge
        run_here(made)
    assert ledger.read_balance("people").epsilon_spent == pytest.approx(
        4.0
    )  # to be told so is to be told of the noise


REFUSED = [
    ({**CELLS, "bins": 1_000_000}, {}, "a number of cells is a whole number"),
    (
        {**CELLS, "bins": {"price": 30_000, "age": 100}},
        {"age": WIDE["age"]},
        "noise can be drawn for at most 10,000,000 cells",
    ),
    (
        CELLS,
        {"userId": {"role": "keep"}},
        "the cells of a histogram do not correspond to input rows, so no column",
    ),
    ({"kind": "histogram"}, {"price": {"role": "privatise", "kind": "continuous"}}, "bounds"),
    ({**CELLS, "n_rows": 5}, {}, "the number of records can be chosen for synthetic rows only"),
    ({**CELLS, "bins": {"genre": 5}}, {}, "is not a continuous or mixed column"),
    ({**CELLS, "factor": 0}, {}, "factor"),
    ({**CELLS, "points": "mean"}, {}, "points"),
    ({**DRAWN, "points": "spread"}, {}, "synthetic rows lie anywhere in their cells"),
    ({**CELLS, "threshold": "some"}, {}, "threshold"),
]


@pytest.mark.parametrize(
    ("mechanism", "columns", "words"), REFUSED, ids=[words[:20] for _, _, words in REFUSED]
)
def test_refusals(
    mechanism: dict[str, Any], columns: dict[str, Any], words: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        run_here(job(tmp_path, source, mechanism, schema=SCHEMA | columns))
    assert caught.value.exit_code == 64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job"]


def test_a_column_called_weight_is_refused_for_cells(source: Path, tmp_path: Path) -> None:
    made = job(
        tmp_path, source, {**CELLS, "bins": {"weight": 5}}, schema={"weight": SCHEMA["price"]}
    )
    with pytest.raises(SpecError, match="this name is reserved for a column of the released cells"):
        load(made)
    load(job(tmp_path, source, DRAWN, schema={"weight": SCHEMA["price"]}))


# ---- again, elsewhere


@pytest.mark.parametrize("mechanism", [CELLS, DRAWN], ids=["cells", "rows"])
def test_a_driver_that_dies_after_the_draw_is_resumed_to_the_same_bytes(
    mechanism: dict[str, Any], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    def die(*args: Any, **kwargs: Any) -> Any:
        raise Died

    made = job(tmp_path, source, mechanism, insecure_seed=None)
    with monkeypatch.context() as patch:
        patch.setattr(Progressed, "with_fitted", die)  # written, but not recorded
        with pytest.raises(Died):
            run_here(made)
    drawn = (hidden(tmp_path / "out") / "release.npz").read_bytes()
    fitted = FittedHistogram.from_bytes(drawn, "release.npz")
    again = fitted.to_bytes()
    assert (again[:-2], len(drawn) - len(again)) == (
        drawn[: len(again) - 2],
        16,
    )  # and behind it the run's salt
    run_here(made)
    cells = card(tmp_path)["mechanism"]
    assert (cells["cells_listed"], cells["total_weight"]) == (
        len(fitted.histogram.keys),
        fitted.histogram.total,
    )
    if mechanism is CELLS:
        assert read(tmp_path / "out")["weight"].to_pylist() == fitted.histogram.weights.tolist()
    before = digests(tmp_path / "out")
    assert run_here(made).status == "already released"
    assert digests(tmp_path / "out") == before


def test_without_a_seed_runs_differ(source: Path, tmp_path: Path) -> None:
    found = [weights(run(tmp_path / name, source, insecure_seed=None)) for name in ("a", "b")]
    assert not found[0].equals(found[1])
    assert card(tmp_path / "a")["insecure"] is False


def test_the_same_bytes_on_every_scheduler(
    source: Path, two_workers: LocalCluster, tmp_path: Path
) -> None:
    expected = {}
    for name, mechanism in (("cells", CELLS), ("rows", DRAWN)):
        run_here(job(tmp_path / name, source, mechanism))
        expected[name] = digests(tmp_path / name / "out")
    for name, mechanism in (("cells", CELLS), ("rows", DRAWN)):
        with dask.config.set(scheduler="threads", num_workers=4):
            run_job(load(job(tmp_path / "threads" / name, source, mechanism)))
        assert digests(tmp_path / "threads" / name / "out") == expected[name]
    with Client(two_workers):
        for name, mechanism in (("cells", CELLS), ("rows", DRAWN)):
            run_job(load(job(tmp_path / "processes" / name, source, mechanism)))
            assert digests(tmp_path / "processes" / name / "out") == expected[name]


@pytest.mark.parametrize("unit", ["row", {"column": "userId", "max_rows": 2}], ids=["row", "user"])
def test_row_groups_and_files_do_not_matter(unit: Any, source: Path, tmp_path: Path) -> None:
    files = sorted(source.iterdir(), key=lambda path: int(path.name.split(".")[1]))
    table = pa.concat_tables([pq.read_table(file) for file in files])
    found = []
    for name, row_group, cuts in (
        ("as it is", 0, []),
        ("one", 5000, [0, N_ROWS]),
        ("groups", 70, [0, N_ROWS]),
        ("files", 400, [0, 1, 2000, N_ROWS]),
    ):
        folder = tmp_path / name / "in"
        folder.mkdir(parents=True)
        for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
            pq.write_table(
                table.slice(start, stop - start),
                folder / f"part-{number}.parquet",
                row_group_size=row_group,
            )
        cells = run(tmp_path / name, folder if cuts else source, privacy__unit=unit)
        found.append((cells, card(tmp_path / name)))
    assert all(cells.equals(found[0][0]) and told == found[0][1] for cells, told in found)


def test_noise_of_another_version_is_not_taken_up(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(tmp_path, source)
    with monkeypatch.context() as patch:
        patch.setattr(Progressed, "with_fitted", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_here(made)
    path = hidden(tmp_path / "out") / NOISY_NAME
    drawn = NoisyHistogram.from_bytes(path.read_bytes(), path.name)
    path.write_bytes(
        dataclasses.replace(drawn, plan=dataclasses.replace(drawn.plan, factor=3.0)).to_bytes()
    )
    with pytest.raises(InputError, match="another version of dpdask"):
        run_here(made)
