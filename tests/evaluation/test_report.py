"""`dpdask report`: scores are SDMetrics', stand between independent columns and a resample, and the page is confidential and harmless."""

import datetime as dt
import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import yaml
from e2e.helpers import (
    call_cli,
    categorical,
    continuous,
    discrete,
    error_line,
    refused,
    run_here,
    write_job,
)
from numpy.random import default_rng
from scipy import stats

from dpdask.codec import ValueCodec, codec_for
from dpdask.evaluation.measures import (
    compare_sides,
    correlation_similarity,
    cut_ranges,
    ks_complement,
    tv_complement,
)
from dpdask.evaluation.samples import Side, code_sides, sample_rows
from dpdask.mechanisms.card import tell_domain, tell_numbers
from dpdask.schema import Schema

EVIL = "<script>alert(1)</script>"
N = 4_000


# ---- scores


def test_scores_are_those_of_their_definitions():
    rng = default_rng(1)
    x, y = rng.normal(size=300), rng.normal(0.4, 1.2, size=500)
    found = ks_complement(np.append(x, np.nan), y)
    assert found is not None
    assert found.value == pytest.approx(1 - stats.ks_2samp(x, y).statistic)
    one, two = rng.integers(0, 4, 300), rng.integers(0, 3, 500)
    shares = [np.bincount(codes, minlength=4) / len(codes) for codes in (one, two)]
    assert tv_complement(one, two, 4).value == pytest.approx(
        1 - np.abs(shares[0] - shares[1]).sum() / 2
    )
    pairs = [(codes, rng.integers(0, 2, len(codes))) for codes in (one, two)]
    tables = [
        pd.crosstab(*pair, normalize=True).reindex(range(4), fill_value=0.0).to_numpy()
        for pair in pairs
    ]
    joint = [2 * first + second for first, second in pairs]
    distance = np.abs(tables[0] - tables[1]).sum() / 2
    assert tv_complement(*joint, 8).value == pytest.approx(1 - distance)
    numbers = (x, 0.5 * x + rng.normal(size=300)), (y, rng.normal(size=500))
    similar = correlation_similarity(*numbers)
    assert similar is not None
    assert similar.value == pytest.approx(
        1 - abs(np.corrcoef(*numbers[0])[0, 1] - np.corrcoef(*numbers[1])[0, 1]) / 2
    )
    assert ks_complement(np.array([np.nan]), y) is None
    assert correlation_similarity((np.zeros(9), x[:9]), numbers[1]) is None
    assert np.array_equal(
        cut_ranges(np.array([0.0, 10.0, np.nan]), np.array([-1.0, 5.5, 12.0]))[1], [0, 6, 11]
    )


@pytest.mark.parametrize("value", [0.0, 19_364.8, 1e300])
def test_a_constant_column_is_cut_into_one_range(value):
    real, other = cut_ranges(
        np.array([value, value, np.nan]),
        np.array([value - abs(value) - 1.0, value, value + abs(value) + 1.0, np.inf, np.nan]),
    )
    assert real.tolist() == [1, 1, 12]
    assert other.tolist() == [0, 1, 2, 2, 12]
    narrow = np.array(
        [value, np.nextafter(value, np.inf)]
    )  # fewer than 10 numbers lie between its ends
    assert np.diff(cut_ranges(narrow, narrow)[1])[0] > 0


def test_standard_errors_are_the_spread_over_tables():
    rng = default_rng(2)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4])
    drawn = [tv_complement(rng.choice(3, 800, p=p), rng.choice(3, 600, p=q), 3) for _ in range(300)]
    assert np.std([each.value for each in drawn]) == pytest.approx(
        np.mean([each.standard_error for each in drawn]), rel=0.2
    )
    moved = [
        ks_complement(rng.normal(size=800), rng.normal(0.5, 1.0, size=600)) for _ in range(300)
    ]
    assert np.std([each.value for each in moved if each]) == pytest.approx(
        np.mean([each.standard_error for each in moved if each]), rel=0.25
    )


# ---- rows


def test_a_sample_is_uniform_bounded_and_the_same_again():
    batches = [
        pa.record_batch({"x": np.arange(start, start + 100)}) for start in range(0, 20_000, 100)
    ]
    found = sample_rows(iter(batches), 500, default_rng(3))["x"].to_numpy()
    assert len(found) == 500
    assert (np.diff(found) > 0).all()
    assert stats.kstest(found / 20_000, "uniform").pvalue > 1e-6
    assert np.array_equal(found, sample_rows(iter(batches), 500, default_rng(3))["x"].to_numpy())
    assert len(sample_rows(batches[:2], 500, default_rng(3))) == 200


@pytest.mark.parametrize("n_rows", [500, 50])
def test_metadata_of_another_program_are_not_read(n_rows):
    table = pa.table({"x": np.arange(100), "y": np.arange(100)})
    own = pa.Table.from_pandas(table.to_pandas().set_index("x"))  # whose index is a column here
    for metadata in (
        {"pandas": "{}"},
        {"pandas": "no JSON"},
        {"pandas": "[1]"},
        own.schema.metadata,
    ):
        found = sample_rows(
            table.replace_schema_metadata(metadata).to_batches(), n_rows, default_rng(3)
        )
        assert list(found.columns) == ["x", "y"]
        assert len(found) == min(n_rows, 100)


def test_columns_are_coded_by_the_card():
    card = {
        "a": {"role": "privatised", "levels": [None, "x", "y"]},
        "n": {"role": "privatised", "bounds": [0.0, 10.0]},
        "day": {"role": "kept"},
        "id": {"role": "kept"},
    }
    days = pd.Series(pd.to_datetime(["2020-01-01", "2020-01-02"])).dt.date
    original = pd.DataFrame({"a": ["x", "z"], "n": [-5, 5], "day": days, "id": ["p", "q"]})
    released = pd.DataFrame({"a": [None, "y"], "n": [1.5, 2.0], "day": days, "id": ["p", "r"]})
    real, given, left_out = code_sides(original, released, card)
    assert real.columns["a"].tolist() == [1, 3]  # z lies outside the domain
    assert given.columns["a"].tolist() == [0, 2]
    assert real.columns["n"].tolist() == [0.0, 5.0]  # brought to the bounds, as a release does
    assert np.diff(real.columns["day"]).tolist() == [1.0]
    assert given.levels["id"][:3] == ("p", "q", "r")
    assert left_out == ()
    many = pd.DataFrame({"id": [f"u{n}" for n in range(2_000)]})
    with refused("no column can be compared"):
        code_sides(many, many, {"id": {"role": "kept"}})


@pytest.mark.parametrize(
    ("type_", "numbers"),
    [
        (pa.date32(), True),
        (pa.timestamp("s"), False),  # cards of older versions do not tell `numbers`
        (pa.timestamp("us", "UTC"), True),
        (pa.timestamp("ns"), False),
    ],
)
def test_dates_and_their_bounds_are_days(type_, numbers):
    bounds = [dt.date(2020, 1, 1), dt.date(2020, 1, 31)]
    column = continuous(bounds)
    declared = Schema.from_dict({"columns": {"when": column}}).columns["when"]
    codec = codec_for("when", declared, type_)
    assert isinstance(codec, ValueCodec)
    card = {"role": "privatised", **tell_domain(declared, codec)}
    sides = []
    for texts in (["2010-01-01", "2020-01-05"], ["2020-01-01", "2020-01-05"]):
        days = pa.array(pd.to_datetime(texts, utc=True)).cast(type_).to_pandas()
        sides.append(pd.DataFrame({"when": days}))
    real, given, _ = code_sides(*sides, {"when": card | (tell_numbers(codec) if numbers else {})})
    # 2010 is brought to the bound
    days = [18262.0, 18266.0]
    assert real.columns["when"].tolist() == given.columns["when"].tolist() == days
    assert real.dates == given.dates == {"when"}


# ---- comparison


def make_side(rng, n):
    a = rng.choice(3, n, p=[0.6, 0.395, 0.005])
    b = np.where(a == 1, 1, rng.integers(0, 3, n))  # a = 1 never meets b = 0 or b = 2
    x = 2.0 * b + rng.normal(size=n)
    levels = {"a": ("k", "l", "rare", "(outside)"), "b": (0, 1, 2, "(outside)")}
    return Side(columns={"a": a, "b": b, "x": x, "y": x + rng.normal(size=n)}, levels=levels)


def test_independent_columns_lie_below_a_fresh_sample():
    rng = default_rng(4)
    original, alike = make_side(rng, N), make_side(rng, N)
    good = compare_sides(original, alike, target="b", rng=rng)
    bad = compare_sides(original, original.permute(rng), target="b", rng=rng)
    for found, which in ((good, "resample"), (bad, "independent")):
        released, near = (found.average("pairs", side) for side in ("released", which))
        slack = 4 * (released.standard_error + near.standard_error)
        assert abs(released.value - near.value) < slack
    assert good.pairs[0].released.value > bad.pairs[0].released.value + 0.1
    metrics = {"ContingencySimilarity", "CorrelationSimilarity"}
    assert {each.metric for each in good.pairs} == metrics
    scores = [each.released.value for each in good.pairs]
    assert scores == sorted(scores)
    assert [(each.name, each.level) for each in good.rare] == [("a", "rare")]
    assert good.impossible_shares[0] < 0.005 < 0.1 < bad.impossible_shares[0]
    assert bad.impossible_shares[2] < 0.005
    assert good.prediction.metric == "accuracy"
    assert good.prediction.released.value > bad.prediction.released.value + 0.1
    off = good.prediction.released.value - good.prediction.original.value
    assert abs(off) < 6 * good.prediction.released.standard_error


def test_numbers_are_predicted_too_and_targets_are_checked(monkeypatch):
    rng = default_rng(5)
    original = make_side(rng, 1_000)
    found = compare_sides(original, make_side(rng, 1_000), target="y", rng=rng).prediction
    assert found is not None
    assert found.metric == "R²"
    assert found.released.value > 0.4 > 0.1 > found.independent.value
    with refused("not among the compared columns"):
        compare_sides(original, original, target="nothing", rng=rng)
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with refused(r"install dpdask\[report\]"):
        compare_sides(original, original, target="b", rng=rng)


# ---- the command


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """A folder with a table as Parquet and as CSV, and its release."""
    folder = tmp_path_factory.mktemp("report")
    rng = default_rng(6)
    kind = rng.choice([EVIL, "b & c", "d"], N, p=[0.5, 0.496, 0.004])
    table = pa.table(
        {"kind": kind, "grade": rng.integers(1, 4, N), "secret": rng.integers(0, 9, N)}
    )
    (folder / "in").mkdir()
    pq.write_table(table, folder / "in" / "a.parquet")
    (folder / "csv").mkdir()
    pa_csv.write_csv(table, folder / "csv" / "a.csv")
    schema = {
        "kind": categorical([EVIL, "b & c", "d"]),
        "grade": discrete([1, 2, 3]),
        "secret": {"role": "drop"},
    }
    run_here(
        write_job(
            folder / "job",
            folder / "in",
            folder / "out",
            schema=schema,
            mechanism__reference={"kind": "histogram"},
            name=f"{EVIL} job",
        )
    )
    return folder


def test_the_page_is_confidential_complete_and_escaped(outputs):
    page = outputs / "page.html"
    done = call_cli(
        "report", outputs / "out", "--original", outputs / "in", "--to", page, "--target", "kind"
    )
    assert done.returncode == 0, done.stderr
    assert "CONFIDENTIAL" in done.stdout
    assert page.stat().st_mode & 0o777 == 0o600
    text = page.read_text(encoding="utf-8")
    assert text.count("CONFIDENTIAL") >= 2
    assert EVIL not in text
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "d</td>" in text  # the rare level
    for words in (
        "TVComplement",
        "resample of the original",
        "Rare groups",
        "Impossible pairs",
        "trained on",
    ):
        assert words in text
    assert "http" not in text.replace("http-equiv", "")  # it loads nothing
    assert (
        "display: table-header-group; position: static" in text
    )  # the mark is printed on every page
    again = outputs / "again.html"
    assert (
        call_cli(
            "report",
            outputs / "out",
            "--original",
            outputs / "csv",
            "--to",
            again,
            "--target",
            "kind",
        ).returncode
        == 0
    )
    assert again.read_text(encoding="utf-8") == text  # the same rows, the same seed


def test_a_release_is_attacked_with_people_who_are_not_in_the_table(outputs, tmp_path):
    table = pq.read_table(outputs / "in/a.parquet")
    pq.write_table(table.slice(1_000, 2_000), tmp_path / "outside.parquet")
    pages = []
    for more in ([], ["--holdout", tmp_path / "outside.parquet"]):
        page = tmp_path / f"page-{len(more)}.html"
        arguments = ["report", outputs / "out", "--original", outputs / "in", "--to", page, *more]
        assert call_cli(*arguments).returncode == 0
        pages.append(page.read_text(encoding="utf-8"))
    for text in pages:
        rows = re.findall(r"<tr><th scope=\"row\">value of ([^<]*)</th>", text)
        assert len(rows) == 2
    assert "Membership was not tested" in pages[0]
    assert "membership: presence of a record" in pages[1]
    assert "likelihood ratio" in pages[1]
    shown = re.search(r"membership: .*?<td>([^<]*)</td></tr>", pages[1])
    assert shown is not None
    assert shown[1] == "98.3 %"  # as on the card, at ε = 4
    assert (
        "98.3 %"
        in json.loads((outputs / "out/_dpdask/release.json").read_bytes())["guarantee"]["text"]
    )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (
            ["out", "--original", "in", "--to", "out/_dpdask/new/report.html"],
            73,
            "may not lie in the folder that is published",
        ),
        (["out", "--original", "in", "--to", "job/job.yaml"], 73, "there already"),
        (["out", "--original", "in", "--to", "nowhere/report.html"], 73, "cannot be written"),
        (["out", "--original", "gone"], 66, "no Parquet or CSV file here"),
        (["out", "--original", "."], 64, "one folder"),
        (["in", "--original", "csv"], 66, "no finished release"),
        (["out", "--original", "in", "--target", "secret"], 64, "not among the compared columns"),
        (["out", "--original", "other"], 65, "column 'grade'"),
        (["out", "--original", "headless.CSV"], 65, "the original has no such column"),
        (["out", "--original", "broken"], 66, "its Parquet footer cannot be read: it is corrupt"),
        (["out", "--original", "in", "--holdout", "in"], 64, "the holdout and the original"),
        (["out", "--original", "in", "--holdout", "out"], 64, "the holdout and the release"),
        (["out", "--original", "in", "--holdout", "few.parquet"], 64, "fewer than 100 rows"),
        (["out", "--original", "in", "--holdout", "other"], 65, "column 'grade'"),
        (["out"], 2, "--original"),
        (["--job", "job/job.yaml", "--original", "in"], 2, "--job"),
    ],
)
def test_what_cannot_be_reported_is_one_line(outputs, monkeypatch, arguments, code, words):
    monkeypatch.chdir(outputs)
    if not Path("few.parquet").exists():
        pq.write_table(pq.read_table("in/a.parquet").slice(0, 99), "few.parquet")
    if not Path("other").exists():
        Path("other").mkdir()
        pq.write_table(pa.table({"kind": ["d"]}), "other/a.parquet")
        Path("headless.CSV").write_text("d,1\n" * 100_000)
        Path("broken").mkdir()
        Path("broken/a.parquet").write_bytes(
            Path("other/a.parquet").read_bytes().replace(b"kind", b"kin\xff")
        )
    done = call_cli("report", *arguments)
    assert done.returncode == code, done.stderr
    assert words in error_line(done)
    assert not Path("out-confidential.html").exists()


def test_times_dates_and_a_constant_column_are_compared(tmp_path):
    rng = default_rng(8)
    when = pd.Timestamp("2023-01-01") + pd.to_timedelta(rng.integers(0, 700 * 86_400, N), unit="s")
    table = pa.table(
        {
            "when": pa.array(when).cast(pa.timestamp("ns")),
            "born": pa.array(when).cast(pa.timestamp("s")).cast(pa.date32(), safe=False),
            "same": np.full(N, 1e15),
            "grade": rng.integers(1, 4, N),
        }
    )
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in" / "a.parquet")
    dates = continuous([dt.date(2000, 1, 1), dt.date(2035, 12, 31)])
    grade = discrete([1, 2, 3])
    schema = {"when": dates, "born": dates, "same": {"role": "keep"}, "grade": grade}
    mechanism = {"mechanism__reference": {"kind": "histogram"}, "privacy__epsilon": 20.0}
    run_here(
        write_job(tmp_path / "job", tmp_path / "in", tmp_path / "out", schema=schema, **mechanism)
    )
    done = call_cli(
        "report", tmp_path / "out", "--original", tmp_path / "in", "--to", tmp_path / "page.html"
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    scores = re.findall(r"(when|born)</th><td class=\"text\">KSComplement</td><td>([0-9.]+)", text)
    assert {name for name, _ in scores} == {"when", "born"}
    assert min(float(score) for _, score in scores) > 0.9
    assert "2023-01-" in text  # the ends of a picture are dates


@pytest.mark.parametrize("whole", [False, True], ids=["fractions", "whole amounts"])
def test_units_of_decimals_are_compared_with_an_original_of_texts(whole, tmp_path):
    """A CSV file has no decimals: its numbers are read in the type of the released ones."""
    amounts = default_rng(8).normal(50.0, 9.0, N).round(0 if whole else 3)
    (tmp_path / "in").mkdir()
    lines = "".join(f"{amount:.3f}\n" if not whole else f"{amount:.0f}\n" for amount in amounts)
    (tmp_path / "in" / "a.csv").write_text(f"amount\n{lines}")
    amount = continuous([0.0, 100.0], unit=0.01, type="decimal128(20, 4)")
    mechanism = {"mechanism__reference": {"kind": "histogram"}, "privacy__epsilon": 15.0}
    job = write_job(
        tmp_path / "job", tmp_path / "in", tmp_path / "out", schema={"amount": amount}, **mechanism
    )
    run_here(job)
    words = ["report", tmp_path / "out", "--original", tmp_path / "in", "--to", tmp_path / "a.html"]
    done = call_cli(*words)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    [score] = re.findall(r"amount</th><td class=\"text\">KSComplement</td><td>([0-9.]+)", text)
    assert float(score) > 0.8
    assert "1970-" not in text
    (tmp_path / "in" / "a.csv").write_text("amount\nlots\nmore\n")
    done = call_cli(*words[:-1], tmp_path / "b.html")
    assert done.returncode == 65
    assert "'amount' of the original: its values are not of the type" in error_line(done)


def test_ranges_are_not_compared(outputs, tmp_path):
    dropped = {"role": "drop"}
    grade = discrete([1, 2, 3])
    schema = {"kind": dropped, "secret": dropped, "grade": grade}
    design = {"design": "case1", "anchors": {"name": "uniform", "loc": 1, "scale": 2}}
    given = {"mechanism": {"kind": "interval", "columns": {"grade": design}}, "privacy": None}
    out = tmp_path / "ranges"
    run_here(write_job(tmp_path / "job", outputs / "in", out, schema=schema, **given))
    done = call_cli("report", out, "--original", outputs / "in", "--to", tmp_path / "page.html")
    assert done.returncode == 64
    assert "use dpdask.open" in error_line(done)


def test_the_job_names_the_original_and_a_lake_its_version(outputs, tmp_path):
    deltalake = pytest.importorskip("deltalake")
    table = pq.read_table(outputs / "in")
    deltalake.write_deltalake(str(tmp_path / "in"), table)
    schema = yaml.safe_load((outputs / "job" / "schema.yaml").read_text())["columns"]
    job = write_job(
        tmp_path / "job",
        tmp_path / "in",
        tmp_path / "out",
        schema=schema,
        input__format="delta",
        mechanism__reference={"kind": "histogram"},
    )
    run_here(job)
    deltalake.write_deltalake(
        str(tmp_path / "in"), table, mode="append"
    )  # a later version, which was not released
    done = call_cli("report", "--job", job, "--to", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert f"{N:,} rows of the original" in (tmp_path / "page.html").read_text(encoding="utf-8")
    done = call_cli(
        "report", tmp_path / "out", "--original", tmp_path / "in", "--to", tmp_path / "other.html"
    )
    assert (done.returncode, "dpdask report --job JOB" in done.stderr) == (64, True)
