"""Local use: the export of a release, and the example that applies it, law for law against the library."""

from __future__ import annotations

import ast
import json
import math
import os
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from kernels.rank_cells import cell_interval
from scipy import stats

import dpdask
from dpdask import local
from dpdask.engine.work import load
from dpdask.errors import InputError, OutputError, SpecError
from dpdask.kernels import cdf as bins
from dpdask.kernels import rank
from dpdask.kernels.cdf import guide as guide_of
from dpdask.mechanisms.dip.columns import RankMechanism
from dpdask.privacy.audit import channel_epsilon, rank_epsilon
from pipelines.local import apply

FOLDER = Path(__file__).parents[1] / "pipelines" / "local"
ALPHA = 1e-9
CHANNELS = ("laplace", "laplace-calibrated", "optimal")
LEVEL_COLUMNS = ("stars", "colour", "agrees", "day", "dose")
VALUE_COLUMNS = ("price", "count", "income", "load")
SCHEMA = {
    "stars": {"role": "privatise", "kind": "discrete", "levels": [1, 2, 3, 4, 5]},
    "colour": {
        "role": "privatise",
        "kind": "categorical",
        "levels": ["red", "green", "3"],
        "nulls": "level",
    },
    "agrees": {"role": "privatise", "kind": "categorical", "levels": [True, False]},
    "day": {"role": "privatise", "kind": "categorical", "levels": ["mon", "tue"]},
    "dose": {"role": "privatise", "kind": "discrete", "levels": [0.1, 0.2, 0.7]},
    "price": {"role": "privatise", "kind": "continuous"},
    "count": {"role": "privatise", "kind": "continuous", "bounds": [0, 200]},
    "income": {
        "role": "privatise",
        "kind": "mixed",
        "atoms": [0.0, 0.1],
        "bounds": [0.0, 1e4],
        "nulls": "level",
    },
    "load": {"role": "privatise", "kind": "mixed", "atoms": [-3, 5], "nulls": "level"},
    "user": {"role": "keep"},
}
EPSILON = 18.0
IN_DOMAIN: dict[str, list[Any]] = {
    "price": [-1e300, 0, 0.5, 3.25, 20.0, 1e9],
    "count": [0, 3, 17, 18.0, 60, 200],
    "income": [None, 0, 0.0, 0.05, 0.1, 3.75, 800.0, 1e4],
    "load": [None, -(2**53), -3, -2, 0, 5, 6, 1000],
}


def public_table(n: int = 30_000) -> pd.DataFrame:
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


def fitted(channel: str) -> dpdask.Release:
    schema = dpdask.Schema.from_dict({"columns": SCHEMA})
    return dpdask.DIP(schema, epsilon=EPSILON, reference=dpdask.Public(), channel=channel).fit(
        public_table()
    )


@pytest.fixture(scope="module")
def releases() -> dict[str, dpdask.Release]:
    return {channel: fitted(channel) for channel in CHANNELS}


@pytest.fixture(scope="module")
def texts(releases: dict[str, dpdask.Release]) -> dict[str, str]:
    return {channel: local.export(release) for channel, release in releases.items()}


def mechanism_of(release: dpdask.Release, name: str) -> Any:
    return release.rows.load(release.sha256).columns[name]


def scripted(monkeypatch: pytest.MonkeyPatch, numbers: list[tuple[int, int]]) -> None:
    """Let the example draw these (bound, number), in this order and with these bounds alone."""
    left = iter(numbers)

    def below(bound: int) -> int:
        expected, number = next(left)
        assert bound == expected
        return number

    monkeypatch.setattr(apply, "randbelow", below)


def seeded(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(apply, "randbelow", random.Random(seed).randrange)


def assert_draws_exactly(
    monkeypatch: pytest.MonkeyPatch,
    weights: list[int],
    outcomes: list[Any],
    draw: Callable[[], Any],
) -> None:
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


def knots(column: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(column["x"], dtype=np.float64), np.array(column["c"])


def library_rank(value: float | None, column: dict[str, Any], uniform: float) -> float:
    x, c = knots(column)
    low, high = (
        (0.0, c[0])
        if value is None
        else rank.rank_interval(float(value), x, c, guide_of(x), column["lattice"])
    )
    return float(low + (high - low) * uniform)


def library_value(value_rank: float, column: dict[str, Any]) -> float | None:
    x, c = knots(column)
    [value], [is_null] = rank.values_at(
        np.array([value_rank]), x, c, guide_of(c), column["lattice"]
    )
    return None if is_null else value


@pytest.mark.parametrize("name", VALUE_COLUMNS)
def test_the_example_reads_and_writes_ranks_as_the_library_does(texts, name, monkeypatch):
    column = apply.read(texts["laplace"], name)
    n, rate, margin, rng = column["ranks"], column["rate"], column["margin"], random.Random(1)
    assert (n, len(column["weights"])) == (rank.N_CELLS, 4)
    inside = column["x"][:: max(1, len(column["x"]) // 40)]
    for value in [
        *IN_DOMAIN[name],
        *(v for v in inside if column["bounds"][0] <= v <= column["bounds"][1]),
    ]:
        for _ in range(25):
            uniform, place, digits, is_minus = (
                rng.random(),
                rng.getrandbits(53),
                [rng.randrange(256), rng.randrange(256), rng.choice([0, 0, 9, 250])],
                rng.random() < 0.5,
            )
            numbers = [
                sum(row[:digit]) for row, digit in zip(column["weights"][1:], digits, strict=True)
            ]
            sign = column["weights"][0][0] if is_minus else 0
            words = [
                (2**53, int(uniform * 2**53)),
                *((2**63, number) for number in numbers),
                (2**63, sign),
                (2**53, place),
            ]
            scripted(monkeypatch, words)
            size = digits[0] + 256 * digits[1] + 256**2 * digits[2]
            start = min(int(n * library_rank(value, column, int(uniform * 2**53) / 2**53)), n - 1)
            w = min(max(start + (-1 - size if is_minus else size), -margin), n - 1 + margin)
            low, high = cell_interval(w, rate, n)
            low, high = 0.0 if w == -margin else low, 1.0 if w == n - 1 + margin else high
            expected = library_value(low + (high - low) * (place + 0.5) / 2**53, column)
            released = apply.randomise(value, column)
            assert released == (
                pytest.approx(expected, rel=1e-9, abs=1e-9) if expected is not None else None
            )
            assert not column["lattice"] or released is None or isinstance(released, int)


@pytest.mark.parametrize("name", VALUE_COLUMNS)
def test_the_example_reads_and_writes_bins_as_the_library_does(texts, name, monkeypatch):
    column, rng = apply.read(texts["optimal"], name), random.Random(2)
    x, c = knots(column)
    edges = np.array(column["edges"])
    for value in IN_DOMAIN[name]:
        for _ in range(25):
            uniform, place = rng.getrandbits(53), rng.getrandbits(53)
            words = np.array([uniform << 11], dtype=np.uint64)
            number, is_null = np.array([0.0 if value is None else value]), np.array([value is None])
            [cell] = bins.cells_of(number, is_null, words, x, c, edges, lattice=column["lattice"])
            released_cell = rng.choice(
                [j for j, weight in enumerate(column["weights"][cell]) if weight]
            )
            draws = [
                (2**53, uniform),
                (2**63, sum(column["weights"][cell][:released_cell])),
                (2**53, place),
            ]
            scripted(monkeypatch, draws)
            cells, words = (
                np.array([released_cell], dtype=np.int32),
                np.array([place << 11], dtype=np.uint64),
            )
            [expected], [null] = bins.draw_values(
                cells, words, x, c, edges, lattice=column["lattice"]
            )
            assert apply.randomise(value, column) == (
                None if null else pytest.approx(expected, rel=1e-9, abs=1e-9)
            )


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


@pytest.mark.parametrize("channel", CHANNELS)
def test_an_answer_is_drawn_with_the_law_of_its_own_row(texts, channel, monkeypatch):
    column = apply.read(texts[channel], "stars")
    seeded(monkeypatch, 7)
    answers = [apply.randomise(2, column) for _ in range(20_000)]
    seen = [j for j, weight in enumerate(column["weights"][1]) if weight]
    counts = np.array([answers.count(column["levels"][j]) for j in seen])
    assert counts.sum() == len(answers)

    def p_value(level: int) -> float:
        law = np.array([column["weights"][level][j] for j in seen], dtype=np.float64)
        return float(stats.chisquare(counts, law / law.sum() * len(answers)).pvalue)

    assert p_value(1) > ALPHA
    assert p_value(2) < ALPHA
    assert p_value(4) < ALPHA


BATCHES = count()


def library_answers(release: dpdask.Release, name: str, value: float | None, n: int) -> np.ndarray:
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
    ("name", "value"),
    [("price", 14.0), ("count", 29), ("income", 0.1), ("income", None), ("load", 5)],
)
def test_answers_follow_the_library_s(releases, texts, channel, name, value, monkeypatch):
    column = apply.read(texts[channel], name)
    seeded(monkeypatch, 11)
    released = [apply.randomise(value, column) for _ in range(6000)]
    kind = (
        np.float32 if column["type"] == "float" else np.float64
    )  # as whoever stores the answers would
    answers = (
        np.array([-1e6 if answer is None else answer for answer in released])
        .astype(kind)
        .astype(np.float64)
    )
    theirs = library_answers(releases[channel], name, value, 60_000)
    assert stats.ks_2samp(answers, theirs).pvalue > ALPHA
    other = library_answers(releases[channel], name, column["x"][len(column["x"]) // 4], 60_000)
    assert stats.ks_2samp(answers, other).pvalue < ALPHA


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_too_much_and_too_little_noise_are_found(releases, factor, monkeypatch):
    schema = dpdask.Schema.from_dict({"columns": SCHEMA})
    other = dpdask.DIP(schema, epsilon=EPSILON * factor, reference=dpdask.Public()).fit(
        public_table()
    )
    column = apply.read(local.export(other), "price")
    seeded(monkeypatch, 11)
    answers = [apply.randomise(14.0, column) for _ in range(6000)]
    assert (
        stats.ks_2samp(answers, library_answers(releases["laplace"], "price", 14.0, 60_000)).pvalue
        < ALPHA
    )


def test_answers_of_the_public_people_follow_their_distribution(texts, monkeypatch):
    seeded(monkeypatch, 13)
    for name in ("price", "count"):
        column, table = apply.read(texts["laplace"], name), public_table()
        answers = [
            apply.randomise(value, column)
            for value in table[name].sample(8000, random_state=1).tolist()
        ]
        assert stats.ks_2samp(answers, table[name]).pvalue > ALPHA
        assert stats.ks_2samp(answers, table[name] * 1.2).pvalue < ALPHA


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


def right_continuous(x: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the knots with a jump as a rise just before it, for np.interp."""
    jumps = np.append(np.diff(x) == 0, False)
    return np.where(jumps, np.nextafter(x, -np.inf), x), c


@pytest.mark.parametrize("heavy", [0.0, 0.4])
def test_thinning_keeps_ends_and_jumps_and_says_what_it_changes(heavy):
    rng = np.random.default_rng(5)
    x = np.sort(rng.normal(size=5000))
    x[[2000, 3000, 4999]] = x[[1999, 2999, 4998]]
    masses = rng.random(4999) / 4999
    masses[[1999, 2500]] += heavy
    c = np.append(0.0, np.cumsum(masses) / masses.sum())
    kept, error = local.thin_knots(x, c, 100)
    assert 40 < len(kept) <= 100 + 9
    assert {0, 1999, 2000, 2999, 3000, 4998, 4999} <= set(kept.tolist())
    between = np.concatenate(
        [np.interp(x[a + 1 : b], x[[a, b]], c[[a, b]]) - c[a + 1 : b] for a, b in pairwise(kept)]
    )
    assert error == pytest.approx(np.abs(between).max())
    assert 0 < error < 0.025
    everything, none = local.thin_knots(x, c, 5000)
    assert (len(everything), none) == (5000, 0.0)


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
        "x": {"role": "privatise", "kind": "continuous"},
        "level": {"role": "privatise", "kind": "discrete", "levels": [1.0, 2.0]},
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


def small(reference: Any, **options: Any) -> dpdask.Release:
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


def test_too_many_levels_are_refused():
    schema = dpdask.Schema.from_dict(
        {"columns": {"code": {"role": "privatise", "kind": "discrete", "levels": list(range(513))}}}
    )
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


def run_alone(*arguments: str) -> subprocess.CompletedProcess[str]:
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
def file(texts: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("local") / "channels.json"
    path.write_text(texts["optimal"], encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("name", "value", "pattern"),
    [
        ("stars", "4", r"[1235]"),
        ("colour", '"3"', r'"(red|green|3)"|null'),
        ("colour", "null", r'"(red|green|3)"|null'),
        ("agrees", "true", r"true|false"),
        ("dose", "0.1", r"0\.[127]"),
        ("price", "3", r"\d+\.\d+(e-\d+)?"),
        ("count", "17", r"\d+"),
        ("income", "null", r"\d+\.\d+(e-\d+)?|null"),
    ],
)
def test_the_example_runs_without_any_package(file, name, value, pattern):
    done = run_alone(file, name, value)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"({pattern})\n", done.stdout)


def run_inside(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
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
        ("stars", "6"),
        ("stars", "null"),
        ("stars", '"red"'),
        ("stars", "NaN"),
        ("stars", "red"),
        ("stars", "[4]"),
        ("colour", "red"),
        ("colour", "3"),
        ("price", "null"),
        ("price", "1e308"),
        ("price", "NaN"),
        ("price", "-Infinity"),
        ("price", '"7"'),
        ("price", "[7]"),
        ("count", "17.5"),
        ("count", "-1"),
        ("count", "201"),
        ("load", str(2**53 + 1)),
        ("load", "Infinity"),
        ("income", "-0.01"),
        ("income", "{}"),
        ("income", "[" * 100_000),
    ],
)
def test_a_value_outside_the_domain_is_refused_unseen(file, name, value, monkeypatch):
    problem = run_inside(monkeypatch, file, name, value)
    assert (
        problem
        == f"column {name!r}: the value is outside the domain; {file} shows its levels, or its bounds and whether it may be null"
    )


def damaged(text: str, change: Callable[[Any], Any]) -> str:
    document = json.loads(text)
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(format=2),
        lambda document: document.pop("format"),
        lambda document: document.pop("columns"),
        lambda document: document["columns"].pop("stars"),
        lambda document: document["columns"]["stars"].pop("weights"),
        lambda document: document["columns"]["stars"].update(weights=[["1", "2"]]),
        lambda document: document["columns"]["stars"]["weights"][4].pop(),
        lambda document: document["columns"]["stars"]["weights"][2].append("1"),
        lambda document: document["columns"]["stars"]["weights"].append([str(2**63 + 1), "-1"]),
        lambda document: document["columns"]["stars"]["weights"].append(["a"]),
        lambda document: document["columns"]["stars"].update(weights=7),
        lambda document: document.update(columns=[]),
    ],
)
def test_a_damaged_file_is_refused(texts, change, tmp_path, monkeypatch):
    path = tmp_path / "channels.json"
    path.write_text(damaged(texts["optimal"], change))
    expected = f"{path}: cannot be read, or is no whole export of format 1 with a column 'stars'; export the release again"
    assert run_inside(monkeypatch, str(path), "stars", "4") == expected


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff\xfe\x00", b'{"format": 1}', b"null", b"[" * 100_000]
)
def test_what_is_no_export_is_refused(content, tmp_path, monkeypatch):
    path = tmp_path / "channels.json"
    path.write_bytes(content)
    assert "no whole export" in run_inside(monkeypatch, str(path), "stars", "4")
    assert "cannot be read" in run_inside(monkeypatch, str(tmp_path), "stars", "4")


@pytest.mark.parametrize(
    "arguments",
    [(), ("channels.json",), ("channels.json", "stars"), ("channels.json", "stars", "4", "5")],
)
def test_a_wrong_call_is_answered_with_the_usage(arguments, monkeypatch):
    assert run_inside(monkeypatch, *arguments).startswith("usage: apply.py")


def test_the_example_is_short_and_depends_on_nothing():
    text = (FOLDER / "apply.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    imported = {
        alias.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {
        str(node.module) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)
    }
    assert imported <= sys.stdlib_module_names
    assert apply.randbelow.__module__ == "secrets"


def test_the_readme_runs(tmp_path, monkeypatch):
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    fit, estimate, check = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    people = rng.choice([1, 2, 3, 4, 5], 20_000, p=[0.2, 0.2, 0.2, 0.2, 0.2])
    names: dict[str, Any] = {"schema_frame": pd.DataFrame({"stars": [1]})}
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


@pytest.mark.parametrize("channel", CHANNELS)
def test_the_readme_checks_a_level_without_probability(channel, tmp_path, monkeypatch):
    check = re.findall(
        r"```python\n(.*?)```", (FOLDER / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )[-1]
    monkeypatch.chdir(tmp_path)
    reference = dpdask.Known.model_validate(
        {"columns": {"stars": {"probabilities": [0.0, 0.5, 0.5, 0.0, 0.0]}}}
    )
    release = small(reference, channel=channel)
    local.save(release, "channels.json")
    names: dict[str, Any] = {}
    exec(check, names)
    assert 0.2 < names["epsilon"] <= 1.0 + 1e-9
    content = json.loads(Path("channels.json").read_text(encoding="utf-8"))
    content["columns"]["stars"]["weights"][1][0] = "1"  # an answer that one level alone may give
    Path("channels.json").write_text(json.dumps(content), encoding="utf-8")
    exec(check, names)
    assert names["epsilon"] == math.inf
