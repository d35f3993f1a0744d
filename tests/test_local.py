"""Local use: the export of a release, and the example that applies it, against the library."""

import json
import math
import os
import random
import re
import runpy
import subprocess
import sys
from fractions import Fraction
from itertools import accumulate, count
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from e2e.helpers import categorical, continuous, discrete, mixed
from scipy import stats

import dpdask
from dpdask import local
from dpdask.engine.work import load
from dpdask.errors import InputError, OutputError, SpecError
from dpdask.kernels import rank
from dpdask.mechanisms.dip.columns import RankMechanism
from dpdask.privacy.audit import channel_epsilon, rank_epsilon
from pipelines.local import apply

FOLDER = Path(__file__).parents[1] / "pipelines" / "local"
ALPHA = 1e-9
CHANNELS = ("laplace", "laplace-calibrated", "optimal")
LEVEL_COLUMNS = ("stars", "colour", "agrees", "day", "dose")
VALUE_COLUMNS = ("price", "count", "income", "load")
SCHEMA = {
    "stars": discrete([1, 2, 3, 4, 5]),
    "colour": categorical(["red", "green", "3"], nulls="level"),
    "agrees": categorical([True, False]),
    "day": categorical(["mon", "tue"]),
    "dose": discrete([0.1, 0.2, 0.7]),
    "price": continuous(),
    "count": continuous([0, 200]),
    "income": mixed(atoms=[0.0, 0.1], bounds=[0.0, 1e4], nulls="level"),
    "load": mixed(atoms=[-3, 5], nulls="level"),
    "user": {"role": "keep"},
}
EPSILON = 18.0


def public_table(n=30_000):
    rng = np.random.default_rng(3)
    income = np.where(
        rng.random(n) < 0.3, rng.choice([0.0, 0.1], n), np.round(rng.lognormal(1, 1, n), 2) + 0.5
    )
    load = np.where(rng.random(n) < 0.4, rng.choice([-3, 5], n), rng.poisson(40, n) - 20)
    return pd.DataFrame(
        {
            "stars": rng.choice([1, 2, 3, 5], n, p=[0.1, 0.2, 0.3, 0.4]).astype(np.int16),
            "colour": rng.choice(["red", "green", "3", None], n),
            "agrees": rng.random(n) < 0.7,
            "day": rng.choice(["mon", "tue"], n),
            "dose": rng.choice([0.1, 0.2, 0.7], n).astype(np.float32),
            "price": rng.lognormal(1, 1, n),
            "count": rng.poisson(20, n).astype(np.int32),
            "income": pd.array(np.where(rng.random(n) < 0.1, np.nan, income).astype(np.float32)),
            "load": pd.array(load, dtype="Int64"),
            "user": np.arange(n),
        }
    ).assign(load=lambda table: table["load"].mask(table.index % 7 == 0))


def fitted(channel):
    schema = dpdask.Schema.from_dict({"columns": SCHEMA})
    return dpdask.DIP(schema, epsilon=EPSILON, reference=dpdask.Public(), channel=channel).fit(
        public_table()
    )


@pytest.fixture(scope="module")
def releases():
    return {channel: fitted(channel) for channel in CHANNELS}


@pytest.fixture(scope="module")
def texts(releases):
    return {channel: local.export(release) for channel, release in releases.items()}


def mechanism_of(release, name):
    return release.rows.load(release.sha256).columns[name]


def scripted(monkeypatch, numbers):
    """Let the example draw these (bound, number), in this order and with these bounds alone."""
    left = iter(numbers)

    def below(bound):
        expected, number = next(left)
        assert bound == expected
        return number

    monkeypatch.setattr(apply, "randbelow", below)


def seeded(monkeypatch, seed):
    monkeypatch.setattr(apply, "randbelow", random.Random(seed).randrange)


def assert_draws_exactly(monkeypatch, weights, outcomes, draw):
    """Check the outcome of the first and the last number of every outcome: as it never falls with the number, its law is the weights'."""
    assert sum(weights) == 2**63
    for weight, last, outcome in zip(weights, accumulate(weights), outcomes, strict=True):
        for number in (last - weight, last - 1) if weight else ():
            scripted(monkeypatch, [(2**63, number)])
            assert draw() == outcome


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("name", LEVEL_COLUMNS)
def test_a_level_is_released_by_exactly_the_library_s_channel(
    releases, texts, channel, name, monkeypatch
):
    mechanism, column = mechanism_of(releases[channel], name), apply.read(texts[channel], name)
    assert column["levels"] == ([None] if name == "colour" else []) + SCHEMA[name]["levels"]
    for level, row in zip(column["levels"], mechanism.channel.weights.tolist(), strict=True):
        assert_draws_exactly(
            monkeypatch, row, column["levels"], lambda level=level: apply.randomise(level, column)
        )


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("name", VALUE_COLUMNS)
def test_noise_on_ranks_is_drawn_by_exactly_the_library_s_tables(
    releases, texts, channel, name, monkeypatch
):
    mechanism, rows = (
        mechanism_of(releases[channel], name),
        apply.read(texts[channel], name)["weights"],
    )
    if isinstance(mechanism, RankMechanism):
        expected = [
            [mechanism.noise.sign, 2**63 - mechanism.noise.sign],
            *mechanism.noise.weights.tolist(),
        ]
    else:
        expected = mechanism.channel.weights.tolist()
    assert rows == expected
    for row in rows[:4] + rows[-1:]:
        assert_draws_exactly(
            monkeypatch, row, list(range(len(row))), lambda row=row: apply.draw(row)
        )


def knots(column):
    return np.array(column["x"], dtype=np.float64), np.array(column["c"])


def test_the_lowest_rank_of_whole_numbers_is_the_lowest_number_and_not_the_origin(monkeypatch):
    column = {
        "weights": [[0, 2**63]] * 2,
        "x": [0, 10],
        "c": [0.5, 1.0],
        "edges": [0.0, 0.5, 1.0],
        "lattice": True,
        "bounds": [1, 10],
        "nulls": True,
    }
    for place, expected in ((0, 1), (2**53 - 1, 10)):
        scripted(monkeypatch, [(2**53, 0), (2**63, 5), (2**53, place)])
        assert apply.randomise(None, column) == expected


@pytest.mark.parametrize("channel", CHANNELS)
def test_the_claimed_epsilon_is_that_of_the_tables(texts, channel):
    document = json.loads(texts[channel])
    for name, column in document["columns"].items():
        weights = apply.read(texts[channel], name)["weights"]
        if "ranks" in column:
            noise = rank.RankNoise(
                n_cells=column["ranks"],
                rate=column["rate"],
                margin=column["margin"],
                sign=weights[0][0],
                weights=np.array(weights[1:], dtype=np.uint64),
                epsilon=float("inf"),
            )
            assert rank_epsilon(noise) <= column["epsilon"]
        else:
            assert channel_epsilon(np.array(weights, dtype=np.uint64)) <= column["epsilon"]
        assert 0 < column["epsilon"] <= EPSILON / 9
    total = sum(Fraction(column["epsilon"]) for column in document["columns"].values())
    assert total <= Fraction(document["epsilon"]) <= EPSILON


BATCHES = count()


def library_answers(release, name, value, n):
    table = public_table().iloc[:1].loc[[0] * n].reset_index(drop=True)
    table["user"] = np.arange(n)
    table[name] = pd.array([value] * n, dtype=table[name].dtype)
    return (
        release.transform(table, batch=f"{next(BATCHES)}")[name]
        .astype("Float64")
        .to_numpy(dtype=np.float64, na_value=-1e6)
    )


@pytest.mark.parametrize("channel", ["laplace", "optimal"])
@pytest.mark.parametrize(
    ("name", "value"), [("price", 14.0), ("count", 29), ("income", None), ("load", 5)]
)
def test_answers_follow_the_library_s(releases, texts, channel, name, value, monkeypatch):
    column = apply.read(texts[channel], name)
    seeded(monkeypatch, 11)
    released = [apply.randomise(value, column) for _ in range(3000)]
    kind = (
        np.float32 if column["type"] == "float" else np.float64
    )  # as whoever stores the answers would
    answers = (
        np.array([-1e6 if answer is None else answer for answer in released])
        .astype(kind)
        .astype(np.float64)
    )
    theirs = library_answers(releases[channel], name, value, 30_000)
    assert stats.ks_2samp(answers, theirs).pvalue > ALPHA
    other = library_answers(releases[channel], name, column["x"][len(column["x"]) // 4], 30_000)
    assert stats.ks_2samp(answers, other).pvalue < ALPHA


@pytest.mark.parametrize("name", VALUE_COLUMNS)
def test_knots_are_few_and_their_error_is_the_stated_one(releases, texts, name):
    column, mechanism = (
        json.loads(texts["laplace"])["columns"][name],
        mechanism_of(releases["laplace"], name),
    )
    x, c = mechanism.distribution.x, mechanism.distribution.c
    told = column["knots"]
    assert (
        len(column["x"])
        == len(column["c"])
        == told["kept"]
        <= local.MAX_KNOTS + 3 * len(column["atoms"])
    )
    assert told["fitted"] == len(x)
    grid = np.unique(np.concatenate([x, (x[1:] + x[:-1]) / 2]))
    change = np.abs(
        np.interp(grid, *right_continuous(*knots(column)))
        - np.interp(grid, *right_continuous(x, c))
    )
    assert (
        change.max() <= told["rank_error"] - mechanism.distribution.rank_error + 1e-6
    )  # a float32 is written in fewer digits
    assert told["rank_error"] < 1.1 * 2 / local.MAX_KNOTS
    assert (told["kept"] < told["fitted"]) == (name in ("price", "income"))


def right_continuous(x, c):
    """Return the knots with a jump as a rise just before it, for np.interp."""
    jumps = np.append(np.diff(x) == 0, False)
    return np.where(jumps, np.nextafter(x, -np.inf), x), c


def test_an_export_is_the_same_text_again_and_holds_no_secret(releases, texts):
    release = releases["laplace"]
    assert local.export(release) == texts["laplace"]
    key = release.rows.work.key().reveal()
    assert key.hex() not in texts["laplace"]
    assert str(release.rows.work.secrets) not in texts["laplace"]
    document = json.loads(texts["laplace"])
    assert set(document["columns"]) == {*LEVEL_COLUMNS, *VALUE_COLUMNS}
    assert (document["format"], document["reference"], document["channel"]) == (
        1,
        "public",
        "laplace",
    )
    assert "costs ε again" in document["guarantee"]
    assert len(texts["laplace"]) < 300_000


def test_a_known_reference_is_exported_whole():
    declared = {
        "x": continuous(),
        "level": discrete([1.0, 2.0]),
    }
    known = {
        "x": {"name": "norm", "loc": 3.0, "scale": 2.0},
        "level": {"probabilities": [0.5, 0.5]},
    }
    reference = dpdask.Known.model_validate({"columns": known})
    frame = pd.DataFrame({"x": [0.0], "level": [1]})
    text = local.export(
        dpdask.DIP(
            dpdask.Schema.from_dict({"columns": declared}), epsilon=2.0, reference=reference
        ).fit(frame)
    )
    column = apply.read(text, "x")
    assert np.interp([1.0, 3.0, 5.0], column["x"], column["c"]) == pytest.approx(
        stats.norm(3, 2).cdf([1.0, 3.0, 5.0]), abs=0.002
    )
    assert json.dumps(apply.read(text, "level")["levels"]) == "[1, 2]"


def small(reference, **options):
    schema = dpdask.Schema.from_dict(
        {"columns": {"stars": SCHEMA["stars"], "user": {"role": "keep"}}}
    )
    return dpdask.DIP(schema, epsilon=1.0, reference=reference, **options).fit(
        public_table(300)[["stars", "user"]]
    )


KNOWN = dpdask.Known.model_validate({"columns": {"stars": {"probabilities": [0.2] * 5}}})


@pytest.mark.parametrize(
    ("reference", "options", "what"),
    [
        (dpdask.Holdout(fraction=0.3), {}, "publish the hold-out's distribution"),
        (dpdask.Histogram(), {}, "raw rows were counted"),
        (KNOWN, {"unit": dpdask.UnitColumn(column="user", max_rows=3)}, "sees its own answer"),
    ],
)
def test_what_is_not_local_is_refused(reference, options, what, tmp_path):
    with pytest.raises(SpecError, match=what) as caught:
        local.save(small(reference, **options), tmp_path / "channels.json")
    assert str(caught.value).startswith("local.export: ")
    assert "; fit with" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    schema = dpdask.Schema.from_dict({"columns": {"code": discrete(list(range(513)))}})
    release = dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Public()).fit(
        pd.DataFrame({"code": np.arange(513)})
    )
    with pytest.raises(
        SpecError, match=r"column 'code': its channel has more than 262,144 weights"
    ):
        local.export(release)


def test_a_file_is_written_once(tmp_path):
    release = small(KNOWN)
    path = tmp_path / "channels.json"
    local.save(release, path)
    assert path.read_text(encoding="utf-8") == local.export(release)
    with pytest.raises(OutputError, match="there already"):
        local.save(release, path)
    with pytest.raises(OutputError, match="cannot be written"):
        local.save(release, tmp_path / "nowhere" / "channels.json")
    release.close()
    load.cache_clear()
    with pytest.raises(InputError):
        local.export(release)


def run_alone(*arguments):
    """Run the example by itself: no environment, no user's and no site's packages."""
    command = [sys.executable, "-I", "-S", str(FOLDER / "apply.py"), *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONIOENCODING": "utf-8", "PATH": os.defpath},
    )


@pytest.fixture(scope="module")
def file(texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("local") / "channels.json"
    path.write_text(texts["optimal"], encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "value", "pattern"),
    [
        ("colour", '"3"', r'"(red|green|3)"|null'),
        ("count", "17", r"\d+"),
        ("income", "null", r"\d+\.\d+(e-\d+)?|null"),
    ],
)
def test_the_example_runs_without_any_package(file, name, value, pattern):
    done = run_alone(file, name, value)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"({pattern})\n", done.stdout)


def run_inside(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["apply.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(FOLDER / "apply.py"), run_name="__main__")
    problem = caught.value.code
    assert isinstance(problem, str)  # Python prints it and exits with 1
    assert "\n" not in problem
    return problem


def test_a_refusal_is_one_line_and_exit_code_1(file):
    done = run_alone(file, "count", "7654")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == f"column 'count': the value is outside the domain; {file} shows its levels, or its bounds and whether it may be null\n"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("stars", value) for value in ("6", "null", '"red"', "NaN", "red", "[4]")),
        *(
            ("colour", "3"),
            ("load", str(2**53 + 1)),
            ("income", "-0.01"),
            ("income", "[" * 100_000),
        ),
        *(("price", value) for value in ("null", "1e308", "NaN", "-Infinity", '"7"')),
        *(("count", value) for value in ("17.5", "-1", "201")),
    ],
)
def test_a_value_outside_the_domain_is_refused_unseen(file, name, value, monkeypatch):
    problem = run_inside(monkeypatch, file, name, value)
    assert (
        problem
        == f"column {name!r}: the value is outside the domain; {file} shows its levels, or its bounds and whether it may be null"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(format=2),
        lambda document: document["columns"].pop("stars"),
        lambda document: document["columns"]["stars"].pop("weights"),
        lambda document: document["columns"]["stars"].update(weights=[["1", "2"]]),
        lambda document: document["columns"]["stars"]["weights"][4].pop(),
        lambda document: document["columns"]["stars"]["weights"].append([str(2**63 + 1), "-1"]),
        lambda document: document["columns"]["stars"].update(weights=7),
    ],
)
def test_a_damaged_file_is_refused(texts, change, tmp_path, monkeypatch):
    path = tmp_path / "channels.json"
    document = json.loads(texts["optimal"])
    change(document)
    expected = f"{path}: cannot be read, or is no whole export of format 1 with a column 'stars'; export the release again"
    for content in (json.dumps(document).encode(), b"", b"null", b"\xff\xfe\x00", b"[" * 100_000):
        path.write_bytes(content)
        assert run_inside(monkeypatch, str(path), "stars", "4") == expected


@pytest.mark.parametrize(
    "arguments", [(), ("channels.json", "stars"), ("channels.json", "stars", "4", "5")]
)
def test_a_wrong_call_is_answered_with_the_usage(arguments, monkeypatch):
    assert run_inside(monkeypatch, *arguments).startswith("usage: apply.py")


def test_the_readme_runs(tmp_path, monkeypatch):
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    fit, estimate, check = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    people = rng.choice([1, 2, 3, 4, 5], 20_000, p=[0.2, 0.2, 0.2, 0.2, 0.2])
    names = {"schema_frame": pd.DataFrame({"stars": [1]})}
    exec(fit, names)
    seeded(monkeypatch, 17)
    column = apply.read(Path("channels.json").read_text(encoding="utf-8"), "stars")
    names["answers"] = pd.DataFrame(
        {"stars": [apply.randomise(value, column) for value in people.tolist()]}
    )
    exec(estimate, names)
    fives = names["fives"]
    assert abs(fives.value - 0.2) < 6.5 * fives.standard_error < 0.1
    assert abs((names["answers"]["stars"] == 5).mean() - 0.2) > 0.02
    exec(check, names)
    assert names["epsilon"] == pytest.approx(2.0, abs=1e-9)


def test_the_readme_checks_a_level_without_probability(tmp_path, monkeypatch):
    check = re.findall(
        r"```python\n(.*?)```", (FOLDER / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )[-1]
    monkeypatch.chdir(tmp_path)
    reference = dpdask.Known.model_validate(
        {"columns": {"stars": {"probabilities": [0.0, 0.5, 0.5, 0.0, 0.0]}}}
    )
    local.save(small(reference, channel="optimal"), "channels.json")
    names = {}
    exec(check, names)
    assert 0.2 < names["epsilon"] <= 1.0 + 1e-9
    content = json.loads(Path("channels.json").read_text(encoding="utf-8"))
    content["columns"]["stars"]["weights"][1][0] = "1"  # an answer that one level alone may give
    Path("channels.json").write_text(json.dumps(content), encoding="utf-8")
    exec(check, names)
    assert names["epsilon"] == math.inf
