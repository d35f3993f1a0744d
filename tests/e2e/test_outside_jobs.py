"""Values outside their columns' domains, through whole jobs: what is released lies inside, and no exit code tells where they were."""

import datetime as dt
import json
import math
import re
from dataclasses import replace

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import yaml
from e2e.bad_input import command
from e2e.helpers import categorical, continuous, discrete, mixed

import dpdask
from dpdask.codec import codec_for
from dpdask.engine.account import open_ledger
from dpdask.engine.fit import fit
from dpdask.io.storage import Folder
from dpdask.jobs.spec import load_job, open_table
from dpdask.jobs.state import RunState
from dpdask.privacy.ledger import Charge
from dpdask.schema import Column

COLUMNS = {
    "who": {"role": "drop"},
    "level": discrete([1, 2, 3], other=3),
    "word": categorical(["a", "b"], nulls="level", outside="null"),
    "number": continuous([5.0, 10.0]),
    "whole": continuous([-10, 10]),
    "often": mixed(atoms=[0.0], bounds=[0.0, 1.0], nulls="level"),
    "rare": continuous([5, 10], nulls="level", outside="null"),
}
CHANGED = {"level": 3, "word": 2, "number": 4, "whole": 3, "often": 2, "rare": 2}
N_ROWS = 300
PUBLIC = {"kind": "public", "path": "public.parquet"}
KNOWN = {
    "kind": "known",
    "columns": {
        "level": {"probabilities": [0.2, 0.3, 0.5]},
        "word": {"probabilities": [0.2, 0.3, 0.5]},
        "number": {"name": "uniform", "loc": 5, "scale": 5},
        "whole": {"name": "randint", "low": -10, "high": 11},
        "often": {"name": "uniform", "probabilities": [0.5], "null": 0.1},
        "rare": {"name": "randint", "low": 5, "high": 11, "null": 0.1},
    },
}
MECHANISMS = {
    **{
        f"dip, {reference['kind']}, {channel}": {
            "kind": "dip",
            "reference": reference,
            "channel": channel,
        }
        for reference in (
            {"kind": "holdout", "fraction": 0.3},
            {"kind": "histogram"},
            PUBLIC,
            KNOWN,
        )
        for channel in ("laplace", "optimal")
    },
    "chain": {"kind": "dip", "reference": {"kind": "chain", "fraction": 0.3}},
    "tree": {"kind": "dip", "reference": {"kind": "tree"}},
    "copula": {"kind": "copula", "bins": 4},
    "histogram": {"kind": "histogram", "bins": 3, "output": "rows"},
}


pytestmark = pytest.mark.usefixtures("here")


def table(*, outside=True):
    rng = np.random.default_rng(5)
    columns = {
        "who": list(range(N_ROWS)),
        "level": rng.integers(1, 4, N_ROWS).tolist(),
        "word": rng.choice(["a", "b"], N_ROWS).tolist(),
        "number": rng.uniform(5, 10, N_ROWS).tolist(),
        "whole": rng.integers(-10, 11, N_ROWS).tolist(),
        "often": (rng.uniform(0, 1, N_ROWS) * rng.integers(0, 2, N_ROWS)).tolist(),
        "rare": rng.integers(5, 11, N_ROWS).tolist(),
    }
    if outside:
        planted = {
            "level": [0, 4, 2**40],
            "word": ["Zebulon", ""],
            "number": [0.0, math.inf, -math.inf, 2.0**1023],
            "whole": [2**63 - 1, -(2**63), 11],
            "often": [math.nan, 1.5],
            "rare": [4, 2**60],
        }
        for name, values in planted.items():
            for place, value in enumerate(values):
                columns[name][37 * (place + 1)] = value
    return pa.table(columns)


def write(folder, mechanism, **changed):
    (folder / "in").mkdir(parents=True)
    pq.write_table(table().slice(0, 120), folder / "in" / "a.parquet", row_group_size=50)
    pq.write_table(table().slice(120), folder / "in" / "b.parquet", row_group_size=50)
    pq.write_table(table(), folder / "public.parquet")
    (folder / "schema.yaml").write_text(yaml.safe_dump({"columns": COLUMNS}))
    job = {
        "name": "outside",
        "input": {"path": "in"},
        "output": {"path": "out"},
        "schema": "schema.yaml",
        "privacy": {"epsilon": 6.0},
        "mechanism": mechanism,
        "cluster": {"kind": "synchronous"},
    } | changed
    (folder / "job.yaml").write_text(
        yaml.safe_dump({key: value for key, value in job.items() if value is not None})
    )
    return folder / "job.yaml"


def check_inside(frame):
    assert set(frame["level"]) <= {1, 2, 3}
    assert set(frame["word"].dropna()) <= {"a", "b"}
    assert frame["number"].between(5, 10).all()
    assert frame["whole"].between(-10, 10).all()
    assert frame["often"].dropna().between(0, 1).all()
    assert frame["rare"].dropna().between(5, 10).all()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MECHANISMS)
def test_what_is_released_lies_in_the_domain(name, tmp_path):
    path = write(tmp_path, MECHANISMS[name])
    planned = command("plan", str(path))
    for column, treatment in (("level", "other: 3"), ("word", "null"), ("number", "clip")):
        assert re.search(rf"outside   (.*, )?{column}(, .*)?: {treatment}\n", planned.out)
    ended = command("run", str(path))
    assert (ended.code, ended.lines) == (0, []), ended.err
    released = pads.dataset(tmp_path / "out", exclude_invalid_files=False).to_table().to_pandas()
    assert len(released) > 100
    check_inside(released)
    card = json.loads((tmp_path / "out" / "_dpdask" / "release.json").read_text())
    words = {
        "level": "other: 3",
        "word": "null",
        "number": "clip",
        "whole": "clip",
        "often": "clip",
        "rare": "null",
    }
    assert {column: card["columns"][column]["outside"] for column in words} == words


def test_the_passes_of_central_mechanisms_count_what_they_change(tmp_path):
    for name, unit in (("copula", {"column": "who", "max_rows": 1}), ("tree", "row")):
        folder = tmp_path / f"{name}-{unit == 'row'}"
        job = load_job(write(folder, MECHANISMS[name], privacy={"epsilon": 6.0, "unit": unit}))
        state = RunState(Folder(job.output_url))
        with state.records.lock():
            reached = state.open(job.digest, lambda _: "name", "input", 7)
            opened = open_table(job, state.folder)
            fitted, _ = fit(
                opened.mechanism, opened.source, opened.work, lambda: None, insecure=True
            )
            assert fitted.changed == (
                {} if name == "tree" else CHANGED
            )  # along a tree the rows are read again, and counted then
            assert "changed" not in repr(fitted)
            state.write(replace(reached, stage="fitted", fitted=fitted))
            assert not [
                path
                for path in (folder / ".out.dpdask").rglob("*")
                if path.is_file() and b"changed" in path.read_bytes()
            ]
            kept = state.read()
            assert kept is not None
            assert kept.fitted.changed == {}
            state.remove()


def test_bounds_ask_nothing_of_a_dataset_whose_budget_is_spent(tmp_path):
    """Twenty runs with other bounds were twenty exact answers about the largest value."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    ledger = open_ledger(url)
    ledger.init("people", 1.0)
    ledger.intend("people", "spent", Charge(epsilon=1.0))
    ledger.commit("people", "spent")
    (tmp_path / "in").mkdir()
    for seed in range(4):
        income = np.random.default_rng(seed).integers(0, 1000, 500)
        income[77] = 300_000 if seed == 2 else income[77]
        pq.write_table(pa.table({"income": income}), tmp_path / "in" / f"clinic{seed}.parquet")
    seen = set()
    for bound in (1000, 299_999, 300_001):
        column = continuous([0, bound])
        (tmp_path / "schema.yaml").write_text(yaml.safe_dump({"columns": {"income": column}}))
        job = {
            "name": "j",
            "input": {"path": "in"},
            "output": {"path": "out"},
            "schema": "schema.yaml",
            "privacy": {"epsilon": 8.0},
            "mechanism": {"kind": "dip", "reference": {"kind": "histogram"}},
            "ledger": {"url": url, "dataset": "people"},
            "cluster": {"kind": "synchronous"},
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        ended = command("run", str(tmp_path / "job.yaml"))
        seen.add((ended.code, *ended.lines))
    [(code, _)] = seen
    assert code == 77


def test_frames_are_clipped_too(tmp_path):
    schema = dpdask.Schema.from_dict({"columns": COLUMNS | {"who": {"role": "keep"}}})
    frame = table().to_pandas().astype({"rare": "Int64"})
    for given in (frame, dd.from_pandas(frame, npartitions=3)):
        release = dpdask.DIP(
            schema, epsilon=6.0, reference=dpdask.Histogram(), insecure_seed=3
        ).fit(given)
        released = release.transform(given)
        released = released if isinstance(released, pd.DataFrame) else released.compute()
        assert len(released) == N_ROWS
        check_inside(released)


# ---- the ends of each type


FIRST, LAST = dt.date(1, 1, 1), dt.date(9999, 12, 31)
ENDS = {  # the type, and the least and the greatest value that bounds may have
    **{
        str(type_): (type_, ends)
        for type_, ends in (
            (pa.int8(), [-128, 127]),
            (pa.uint64(), [0, 2**53]),
            (pa.int64(), [-(2**53), 2**53]),
        )
    },
    **{
        str(type_): (type_, [FIRST, LAST])
        for type_ in (pa.date32(), pa.date64(), pa.timestamp("s"), pa.timestamp("ms", "UTC"))
    },
    **{
        str(type_): (type_, [dt.date(1684, 7, 29), dt.date(2255, 6, 4)])
        for type_ in (pa.timestamp("us"), pa.timestamp("us", "UTC"))
    },
    "double": (pa.float64(), [-(2.0**1021), 2.0**1021]),
}
HOLDOUT = {"kind": "dip", "reference": {"kind": "holdout", "fraction": 0.3}, "channel": "optimal"}
COUNTS = {"kind": "dip", "reference": {"kind": "histogram"}, "channel": "laplace"}
SURE = {"epsilon": 15.0}
SURE_COPULA = {"epsilon": 40.0, "delta": 1e-9}


def write_ends(folder, values, declared, mechanism, privacy):
    path = write(folder, mechanism, privacy=privacy)
    for old in (folder / "in").iterdir():
        old.unlink()
    pq.write_table(pa.table({"x": values}), folder / "in" / "a.parquet")
    (folder / "schema.yaml").write_text(
        yaml.safe_dump({"columns": {"x": {"role": "privatise", **declared}}})
    )
    return path


def check_told(path):
    """Run a job, and return what `dpdask.open` gives; its page has statistics, and a report can be made."""
    ended = command("run", str(path))
    assert ended.code == 0, ended.err
    assert "WARNING" not in ended.err
    assert command("report", "--job", str(path), "--to", str(path.with_suffix(".html"))).code == 0
    opened = dpdask.open(str(path.parent / "out"))
    assert len(opened.to_pandas())
    return opened


@pytest.mark.few(6)
@pytest.mark.parametrize("mechanism", [HOLDOUT, {"kind": "copula"}], ids=["dip", "copula"])
@pytest.mark.parametrize("name", ENDS)
def test_the_ends_of_each_type_come_out_as_they_are(name, mechanism, tmp_path):
    type_, ends = ENDS[name]
    values = pa.array([ends[number % 3 == 0] for number in range(900)]).cast(type_)
    kinds = {"kind": "mixed", "bounds": ends, "atoms": ends}
    path = write_ends(
        tmp_path, values, kinds, mechanism, SURE if mechanism["kind"] == "dip" else SURE_COPULA
    )
    opened = check_told(path)
    assert not pd.isna(opened.quantile("x", 0.5).estimate)
    released = pads.dataset(tmp_path / "out", exclude_invalid_files=False).to_table()["x"]
    for end, share in zip(ends, (2 / 3, 1 / 3), strict=True):
        assert abs(pc.mean(pc.equal(released, pa.scalar(end).cast(type_))).as_py() - share) < 0.1


@pytest.mark.few
@pytest.mark.parametrize("mechanism", [COUNTS, {"kind": "copula"}], ids=["dip", "copula"])
@pytest.mark.parametrize(
    ("type_", "levels"),
    [
        (pa.uint64(), [2**64 - 3, 2**64 - 2, 2**64 - 1]),
        (pa.uint64(), [0, 2**63, 2**64 - 1]),
        (pa.int64(), [-(2**63), 2**53 + 1, 2**63 - 1]),
        (pa.date32(), [FIRST, dt.date(2020, 1, 1), LAST]),
        (pa.timestamp("us"), [FIRST, dt.date(2020, 1, 1), LAST]),
    ],
    ids=str,
)
def test_levels_reach_to_the_ends_of_their_type(type_, levels, mechanism, tmp_path):
    codec = codec_for("x", Column(role="privatise", kind="discrete", levels=levels), type_)
    check_told(
        write_ends(
            tmp_path,
            codec.decode(np.arange(900) % 3),
            {"kind": "discrete", "levels": levels},
            mechanism,
            SURE if mechanism is COUNTS else SURE_COPULA,
        )
    )
    released = pads.dataset(tmp_path / "out", exclude_invalid_files=False).to_table()["x"]
    counts = {each["values"]: each["counts"] for each in pc.value_counts(released).to_pylist()}
    assert set(counts) == set(codec.levels.to_pylist())
    assert min(counts.values()) > 250


@pytest.mark.few
@pytest.mark.parametrize("mechanism", [COUNTS, {"kind": "copula"}], ids=["dip", "copula"])
@pytest.mark.parametrize(
    "type_", [pa.float64(), pa.date32(), pa.timestamp("us"), pa.string()], ids=str
)
def test_a_column_of_nulls_alone_is_released(type_, mechanism, tmp_path):
    domain = (
        {"levels": ["a", "b"]}
        if pa.types.is_string(type_)
        else {
            "bounds": [0, 1]
            if pa.types.is_floating(type_)
            else [FIRST.replace(2000), LAST.replace(2200)]
        }
    )
    declared = {
        "kind": "categorical" if "levels" in domain else "continuous",
        "nulls": "level",
        **domain,
    }
    check_told(
        write_ends(
            tmp_path,
            pa.nulls(500, type_),
            declared,
            mechanism,
            SURE if mechanism["kind"] == "dip" else SURE_COPULA,
        )
    )
    assert (
        pads.dataset(tmp_path / "out", exclude_invalid_files=False).to_table()["x"].null_count > 400
    )


BEYOND = [
    (
        pa.timestamp("us"),
        [dt.date(2020, 1, 1), LAST],
        "1684-07-29 to 2255-06-04, the whole days that timestamp[us] counts exactly; narrow",
    ),
    (pa.timestamp("ns"), [dt.date(1678, 1, 1), dt.date(2020, 1, 1)], "`unit: ms`"),
    (pa.int64(), [0, 2 * 10**18], "`unit: 1000`"),
    (pa.int64(), [16 * 10**17, 17 * 10**17], "`unit: 1000`"),
    (pa.uint64(), [0, 2**63], "`unit: 10000`"),
    (pa.float64(), [0, 1.5e308], "larger unit"),
    (pa.date32(), [-(2**31), 2**31], "the file's type"),
]
RANGES = {
    "kind": "interval",
    "columns": {"x": {"design": "case2", "anchors": {"name": "uniform", "loc": 0, "scale": 1e15}}},
}


@pytest.mark.parametrize(
    ("type_", "bounds", "unit", "mechanism"),
    [
        *((*each, COUNTS) for each in BEYOND),
        *((*BEYOND[0], each) for each in (HOLDOUT, {"kind": "copula"}, RANGES)),
    ],
    ids=str,
)
def test_bounds_beyond_what_is_exact_are_refused_before_a_row_is_read(
    type_, bounds, unit, mechanism, tmp_path
):
    """By `validate` if the schema says the type, else as soon as the table's types are known."""
    declared = {"kind": "continuous", "bounds": bounds}
    for typed in (True, False):
        given = declared | ({"type": str(type_).removesuffix("[day]")} if typed else {})
        more = {"outside": "refuse"} if mechanism is RANGES else {}
        privacy = (
            None if mechanism is RANGES else SURE_COPULA if mechanism["kind"] == "copula" else SURE
        )
        path = write_ends(
            tmp_path / str(typed), pa.nulls(50, type_), given | more, mechanism, privacy
        )
        if not typed:
            assert command("validate", str(path)).code == 0
        for verb in ("validate", "plan", "run") if typed else ("plan", "run"):
            ended = command(verb, str(path))
            assert (ended.code, len(ended.lines)) == (64 if typed else 65, 1), ended.err
            assert "column 'x': its bounds reach beyond" in ended.lines[0]
            assert unit in ended.lines[0]
        assert {each.name for each in path.parent.iterdir()} == {
            "in",
            "job.yaml",
            "schema.yaml",
            "public.parquet",
        }
    made = dpdask.DIP(
        dpdask.Schema.from_dict({"columns": {"x": {"role": "privatise", **declared}}}),
        epsilon=1.0,
        reference=dpdask.Histogram(),
    )
    with pytest.raises(dpdask.DataError, match="its bounds reach beyond"):
        made.fit(pa.table({"x": pa.nulls(50, type_)}).to_pandas(types_mapper=pd.ArrowDtype))
