"""Times of a day, durations and times with a zone: from files, frames and texts, in each mechanism, its plan and its opened release."""

import datetime as dt

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from e2e.helpers import call_cli, categorical, continuous, run_here, write_job

import dpdask
from dpdask.errors import SpecError
from dpdask.schema import Schema

DAY = dt.date(2020, 1, 1)
SECONDS = 86_400
NOON = pa.scalar(dt.datetime(2020, 1, 16, 12, tzinfo=dt.UTC))
COLUMNS = {
    "clock": continuous([0, SECONDS * 1000 - 1], type="time32[ms]"),
    "span": continuous([0, 10_000_000], type="duration[ms]", nulls="level"),
    "when": continuous([DAY, dt.date(2020, 1, 31)], type="timestamp[ms, tz=UTC]"),
    "kind": categorical(["a", "b"]),
}


def rides(n=6_000, seed=1):
    rng = np.random.default_rng(seed)
    clock = (rng.normal(12, 2, n) % 24 * 3_600_000).astype(np.int32)
    span = rng.gamma(2.0, 500_000, n).astype(np.int64)
    when = 1_577_836_800_000 + rng.integers(0, 31 * SECONDS * 1000, n)
    return pa.table(
        {
            "clock": pa.array(clock).cast(pa.time32("ms")),
            "span": pa.array(span, mask=rng.random(n) < 0.1).cast(pa.duration("ms")),
            "when": pa.array(when).cast(pa.timestamp("ms", "UTC")),
            "kind": rng.choice(["a", "b"], n).tolist(),
        }
    )


COPULA = {"kind": "copula"}
DIP = {"kind": "dip", "reference": {"kind": "histogram"}}


@pytest.mark.parametrize("mechanism", [COPULA, DIP], ids=lambda each: each["kind"])
def test_a_job_releases_them_and_its_release_answers_in_their_unit(mechanism, tmp_path):
    table = rides()
    pq.write_table(table, tmp_path / "in.parquet")
    asked = {"mechanism": mechanism, "privacy__delta": 1e-6 if mechanism is COPULA else 0}
    job = write_job(tmp_path, tmp_path / "in.parquet", tmp_path / "out", schema=COLUMNS, **asked)
    planned = call_cli("plan", job)
    assert planned.returncode == 0, planned.stderr
    said = " ".join((planned.stdout + planned.stderr).split())
    assert "count milliseconds since midnight, so they are 00:00:00 and 23:59:59.999000" in said
    assert "count milliseconds, so they are 0:00:00 and 2:46:40" in said
    run_here(job)
    release = dpdask.open(str(tmp_path / "out"))
    rows = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    assert rows.schema.types == table.schema.types
    assert release.card["columns"]["clock"]["numbers"] == "milliseconds since midnight"
    for name, type_ in (("clock", pa.int32()), ("span", pa.int64())):
        exact = np.nanmedian(table[name].cast(type_).cast(pa.int64()).to_pandas())
        found = release.quantile(name, 0.5)
        low, high = found.interval(0.999999, approximate=True)
        assert low <= exact <= high
        assert float(found.estimate) == pytest.approx(exact, rel=0.2)
        release.histogram(name, bins=4)
    for condition, exact in (
        ("clock >= '13:00:00'", pc.greater_equal(table["clock"], pa.scalar(dt.time(13)))),
        ("when < 2020-01-16T12:00", pc.less(table["when"], NOON)),
        ("when < '2020-01-16T13:00+01:00'", pc.less(table["when"], NOON)),
    ):
        low, high = release.where(condition).count().interval(0.999999)
        assert low <= pc.sum(exact).as_py() <= high
        assert high - low < 0.6 * len(table)
    page = (tmp_path / "out" / "_dpdask" / "release.html").read_text()
    assert "clock" in page


@pytest.mark.parametrize("unit", [None, "s"])
@pytest.mark.parametrize(
    "mechanism",
    [COPULA, DIP, {"kind": "marginals", "cliques": [["clock"]]}],
    ids=lambda each: each["kind"],
)
def test_times_of_a_day_are_compared_in_the_unit_of_the_card(mechanism, unit, tmp_path):
    table = rides().select(["clock"]).cast(pa.schema([("clock", pa.time64("us"))]))
    pq.write_table(table, tmp_path / "in.parquet")
    n = SECONDS if unit else SECONDS * 10**6
    schema = {
        "clock": continuous([0, n - 1], type="time64[us]", **({"unit": unit} if unit else {}))
    }
    privacy = {"privacy__epsilon": 8.0, "privacy__delta": 0.0 if mechanism is DIP else 1e-6}
    job = write_job(
        tmp_path,
        tmp_path / "in.parquet",
        tmp_path / "out",
        schema=schema,
        mechanism=mechanism,
        **privacy,
    )
    run_here(job)
    release = dpdask.open(str(tmp_path / "out"))
    hours = table["clock"].cast(pa.int64()).to_numpy() / 3.6e9
    for condition, exact in (
        ("clock < 12:00", (hours < 12).sum()),
        ("clock > '10:30' and clock <= 13:30:00", ((hours > 10.5) & (hours <= 13.5)).sum()),
    ):
        low, high = release.where(condition).count().interval(0.999999)
        assert low <= exact <= high
        assert high - low < 0.3 * len(table)
    with pytest.raises(SpecError, match="write it as 06:00"):
        release.where("clock > 9").count()


def test_models_are_asked_for_times_of_a_day_and_durations():
    schema = Schema.from_dict({"columns": COLUMNS})
    with dpdask.GaussianCopula(schema, epsilon=1.0, delta=1e-6, insecure_seed=1).fit(
        rides()
    ) as release:
        drawn = release.sample(
            2_000, seed=1, where="clock >= '12:00:00' and span < 600000"
        ).compute()
        assert min(drawn["clock"]) >= dt.time(12)
        assert drawn["span"].max() < pd.Timedelta(minutes=10)
        for text in ("2020-01-16T12:00", "'2020-01-16T12:00Z'"):
            drawn = release.sample(500, seed=1, where=f"when >= {text}").compute()
            assert drawn["when"].min() >= NOON.as_py()
        with pytest.raises(SpecError, match=r"a value of the type time32\[ms\] is expected"):
            release.sample(10, where="clock >= 12")


@pytest.mark.parametrize("of_arrow", [False, True])
def test_frames_of_python_times_are_released_as_such(of_arrow):
    table = rides(400).to_pandas()
    assert table["clock"].dtype == object
    columns = {name: {**each, "type": None} for name, each in COLUMNS.items()}
    columns["clock"]["bounds"] = [0, SECONDS * 10**6 - 1]
    columns = {
        name: {key: value for key, value in each.items() if value is not None}
        for name, each in columns.items()
    }
    schema = Schema.from_dict({"columns": columns})
    if of_arrow:
        table["clock"] = table["clock"].astype(pd.ArrowDtype(pa.time64("us")))
    asked = dpdask.DIP(schema, epsilon=20.0, reference=dpdask.Histogram(), insecure_seed=1)
    with asked.fit(table) as release:
        drawn = release.transform(table)
    assert drawn.dtypes.tolist() == table.dtypes.tolist()
    assert all(isinstance(each, dt.time) for each in drawn["clock"])


def test_texts_with_a_zone_are_read_from_csv(tmp_path):
    zones = ["2020-01-05T12:00:00Z", "2020-01-05T12:00:00+02:00", "2020-01-05 12:00:00-0130"]
    lines = (f"{zones[n % 3]},{n % 24:02}:30:00,{n}\n" for n in range(600))
    text = "when,clock,span\n" + "".join(lines)
    (tmp_path / "in.csv").write_text(text)
    columns = {
        "when": {"role": "keep", "type": "timestamp[us, tz=UTC]"},
        "clock": continuous([0, SECONDS - 1], type="time32[s]"),
        "span": continuous([0, 600], type="duration[s]"),
    }
    job = write_job(tmp_path, tmp_path / "in.csv", tmp_path / "out", schema=columns, mechanism=DIP)
    run_here(job)
    rows = pq.read_table(tmp_path / "out")
    found = {each.astimezone(dt.UTC) for each in set(rows["when"].to_pylist())}
    hours = {each.strftime("%d %H:%M") for each in found}
    assert hours == {"05 12:00", "05 10:00", "05 13:30"}
    assert rows["span"].type == pa.duration("s")


@pytest.mark.parametrize(
    ("type_", "text", "says"),
    [
        (
            "timestamp[us]",
            "2020-01-05T12:00:00Z",
            r"end with Z or an offset are of the type timestamp\[us, tz=UTC\]",
        ),
        (
            "timestamp[ms, tz=UTC]",
            "2020-01-05T12:00:00",
            r"have no offset are of the type timestamp\[ms\]",
        ),
        ("timestamp[us, tz=Mars/Olympus]", "2020-01-05T12:00:00Z", "its time zone is not known"),
    ],
)
def test_texts_of_another_type_are_refused_with_the_type_to_use(type_, text, says, tmp_path):
    (tmp_path / "in.csv").write_text(f"when\n{text}\n{text}\n")
    columns = {"when": continuous([DAY, dt.date(2020, 1, 31)], type=type_)}
    job = write_job(tmp_path, tmp_path / "in.csv", tmp_path / "out", schema=columns, mechanism=DIP)
    with pytest.raises(dpdask.DpdaskError, match=says):
        run_here(job)
