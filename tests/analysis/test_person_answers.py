"""Estimates from the noisy tables of persons: intervals hold the population's values, and are refused where none are known."""

import shutil
from dataclasses import replace

import dask
import numpy as np
import pandas as pd
import pytest
import yaml
from e2e.helpers import categorical, continuous, discrete, refused, release_of, says
from numpy.random import default_rng

import dpdask
from dpdask.errors import SpecError
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job
from pipelines.benchmarks import coverage

SEXES, GENRES = ["f", "m"], ["a", "b", "c", None]
MOST, N = 6, 1_500
EDGES = [0.0, 20.0, 45.0, 60.0, 100.0]


def _populate(n=20_000, seed=3):
    """Persons and their rows: rows of one person are alike, active persons rate lower, and every tenth person has no rows."""
    rng = default_rng(seed)
    taste = rng.normal(size=n)
    k = np.where(rng.random(n) < 0.1, 0, rng.geometric(np.where(taste > 0, 0.3, 0.15)))
    sex = rng.integers(0, 2, n)
    persons = pd.DataFrame(
        {"sex": np.array(SEXES)[sex], "age": np.clip(rng.poisson(1.5 + sex), 0, 4), "k": k}
    )
    owner = np.repeat(np.arange(n), k)
    size = len(owner)
    score = taste[owner] + 0.4 * sex[owner] + rng.normal(size=size)
    rating = np.clip(np.rint(3 + score), 1, 5)
    rating[rng.random(size) < 0.1] = np.nan
    genre = np.where(rng.random(size) < 0.3, (score > 0.5).astype(int), rng.integers(0, 4, size))
    price = np.clip(40 + 12 * taste[owner] + 15 * rng.normal(size=size), 0, 100)
    rows = pd.DataFrame(
        {"owner": owner, "rating": rating, "genre": np.array(GENRES, object)[genre]}
    )
    return persons, rows.assign(price=price)


PERSONS, ROWS = _populate()
_STARTS = np.concatenate([[0], np.cumsum(PERSONS["k"])])
_WEIGHT = np.minimum(
    1.0, MOST / PERSONS["k"].to_numpy()[ROWS["owner"]]
)  # of being among the bounded rows
_PART = 1.0 / PERSONS["k"].to_numpy()[ROWS["owner"]]
JOINED = ROWS.join(PERSONS, on="owner")


def run(folder, seed, *, n=N, epsilon=4.0, adjacency="add-remove"):
    """Return the opened release of persons who were drawn from the population."""
    rng = default_rng(seed)
    chosen = rng.integers(0, len(PERSONS), n)
    numbers = PERSONS["k"].to_numpy()[chosen]
    starts = np.cumsum(numbers) - numbers
    rows = ROWS.iloc[np.arange(numbers.sum()) + np.repeat(_STARTS[chosen] - starts, numbers)]
    rows = rows.assign(user=np.repeat(np.arange(n), numbers))[["user", "rating", "genre", "price"]]
    folder.mkdir(parents=True)
    rows.to_parquet(folder / "rows.parquet", index=False)
    persons = PERSONS.iloc[chosen].assign(user=np.arange(n))[["user", "sex", "age"]]
    persons.to_parquet(folder / "persons.parquet", index=False)
    schemas = {
        "rows": {
            "user": {"role": "drop"},
            "rating": discrete([1.0, 2.0, 3.0, 4.0, 5.0], nulls="level"),
            "genre": categorical(GENRES[:3], nulls="level"),
            "price": continuous([0.0, 100.0]),
        },
        "persons": {
            "user": {"role": "drop"},
            "sex": categorical(SEXES),
            "age": discrete([0, 1, 2, 3, 4]),
        },
    }
    for name, columns in schemas.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"columns": columns}, sort_keys=False))
    job = {
        "name": "persons",
        "input": {"path": str(folder / "rows.parquet")},
        "schema": "rows.yaml",
        "parents": {"input": {"path": str(folder / "persons.parquet")}, "schema": "persons.yaml"},
        "privacy": {
            "epsilon": epsilon,
            "delta": 1e-9,
            "adjacency": adjacency,
            "unit": {"column": "user", "max_rows": MOST},
        },
        "mechanism": {"kind": "copula", "persons": True, "bins": 20},
        "output": {"path": str(folder / "out")},
        "insecure_seed": seed,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    with dask.config.set(scheduler="synchronous"):
        run_job(load_job(str(folder / "job.yaml")))
    return dpdask.open(str(folder / "out"))


def _average(values, weights, groups=None):
    here = pd.notna(values)
    values, weights = values[here].astype(float), weights[here]
    if groups is None:
        return float(np.average(values, weights=weights))
    groups = groups[here]
    return (values * weights).groupby(groups, dropna=False).sum() / pd.Series(
        weights, values.index
    ).groupby(groups, dropna=False).sum()


def _shares(column, weights):
    keys = column.where(column.notna(), "null")
    found = pd.Series(weights, column.index).groupby(keys).sum() / weights.sum()
    return np.array([found["null" if key is None else key] for key in [None, *GENRES[:3]]])


def _cross(first, second, firsts, seconds, weights):
    codes = [
        pd.Categorical(each.where(each.notna(), "null"), levels)
        for each, levels in ((first, firsts), (second, seconds))
    ]
    table = np.zeros((len(firsts), len(seconds)))
    np.add.at(table, tuple(each.codes for each in codes), weights)
    return table.ravel() / len(PERSONS)


def _between(name):
    values, owner = JOINED[name].to_numpy(float), JOINED["owner"].to_numpy()
    # of the bounded rows of a person, each two are as likely as any other
    here = ~np.isnan(values)
    k = np.bincount(owner[here], minlength=len(PERSONS))
    sums, squares = (
        np.bincount(owner[here], values[here] ** p, minlength=len(PERSONS)) for p in (1, 2)
    )
    every = PERSONS["k"].to_numpy()
    several = every > 1
    pairs = every[several] * (every[several] - 1.0)
    known = k[several] * (k[several] - 1.0) / pairs  # the part of pairs that have both values
    centre = (sums[several] * (k[several] - 1.0) / pairs).sum() / known.sum()
    products = ((sums**2 - squares)[several] / pairs).sum() / known.sum()
    return products - centre**2


_GENRE_KEYS = ["null", *GENRES[:3]]
_RATING_KEYS = ["null", 1.0, 2.0, 3.0, 4.0, 5.0]
_price = JOINED["price"].to_numpy()
QUESTIONS = {
    "share of persons": (
        lambda o: o.share("sex"),
        lambda: PERSONS["sex"].value_counts(normalize=True)[SEXES].to_numpy(),
    ),
    "mean of persons": (lambda o: o.mean("age"), lambda: PERSONS["age"].mean()),
    "mean of persons by group": (
        lambda o: o.mean("age", by="sex"),
        lambda: PERSONS.groupby("sex")["age"].mean().to_numpy(),
    ),
    "crosstab of persons": (
        lambda o: o.crosstab("age", "sex"),
        lambda: _cross(PERSONS["age"], PERSONS["sex"], [0, 1, 2, 3, 4], SEXES, 1.0),
    ),
    "share, persons weigh the same": (
        lambda o: o.share("genre"),
        lambda: _shares(JOINED["genre"], _PART),
    ),
    "share of rows": (
        lambda o: o.share("genre", each="row"),
        lambda: _shares(JOINED["genre"], _WEIGHT),
    ),
    "mean, persons weigh the same": (
        lambda o: o.mean("rating"),
        lambda: _average(JOINED["rating"], _PART),
    ),
    "mean of rows": (
        lambda o: o.mean("rating", each="row"),
        lambda: _average(JOINED["rating"], _WEIGHT),
    ),
    "mean by persons": (
        lambda o: o.mean("rating", by="sex"),
        lambda: _average(JOINED["rating"], _PART, JOINED["sex"])[SEXES].to_numpy(),
    ),
    "mean by rows": (
        lambda o: o.mean("rating", by="genre"),
        lambda: _average(JOINED["rating"], _PART, JOINED["genre"].fillna("null"))[
            _GENRE_KEYS
        ].to_numpy(),
    ),
    "crosstab of rows": (
        lambda o: o.crosstab("genre", "rating"),
        lambda: _cross(
            JOINED["genre"], JOINED["rating"].astype(object), _GENRE_KEYS, _RATING_KEYS, _PART
        ),
    ),
    "crosstab of both": (
        lambda o: o.crosstab("genre", "sex"),
        lambda: _cross(JOINED["genre"], JOINED["sex"], _GENRE_KEYS, SEXES, _PART),
    ),
    "mean of numbers": (lambda o: o.mean("price"), lambda: np.average(_price, weights=_PART)),
    "mean of numbers by persons": (
        lambda o: o.mean("price", by="sex"),
        lambda: _average(JOINED["price"], _PART, JOINED["sex"])[SEXES].to_numpy(),
    ),
    "mean of numbers of rows": (
        lambda o: o.mean("price", each="row"),
        lambda: np.average(_price, weights=_WEIGHT),
    ),
    "mean within": (
        lambda o: o.mean("price", within=(20, 60)),
        lambda: np.average(np.clip(_price, 20, 60), weights=_PART),
    ),
    "counts of ranges": (
        lambda o: o.histogram("price", EDGES),
        lambda: np.histogram(_price, EDGES, weights=_PART)[0] / len(PERSONS),
    ),
    "quantiles": (
        lambda o: o.quantile("price", [0.5, 0.9]),
        lambda: [
            np.interp(q, np.cumsum(_PART[np.argsort(_price)]) / _PART.sum(), np.sort(_price))
            for q in (0.5, 0.9)
        ],
    ),
    "variance between persons": (
        lambda o: o.variance_between("rating"),
        lambda: _between("rating"),
    ),
    "variance of numbers": (lambda o: o.variance_between("price"), lambda: _between("price")),
}
# bounds of what the tables do not tell: of places in cells, and of the number of rows in its band
BOUNDED = {
    "share of rows",
    "mean of rows",
    "mean of numbers",
    "mean of numbers by persons",
    "mean of numbers of rows",
    "mean within",
    "counts of ranges",
    "quantiles",
    "variance of numbers",
}


def cells(opened, only=QUESTIONS, plant=lambda found: found, n=N):
    """What all runs say of each question."""
    answers = {label: [] for label in only}
    for release in opened:
        for label in only:
            ask, true = QUESTIONS[label]
            try:
                found = plant(ask(release))
                low, high = found.interval()
            except SpecError as refused:
                answers[label].append(str(refused))
                continue
            scale = n if label.startswith("c") else 1.0  # a crosstab, or counts
            parts = [scale * np.asarray(true()), found.estimate, found.standard_error, low, high]
            size = np.size(found.estimate)
            flat = [
                np.full(size, np.nan) if each is None else np.ravel(np.asarray(each, float))
                for each in parts
            ]
            answers[label].append(coverage.Answer(*flat))
    names = {"release": "persons", "table": "persons"}
    return {
        label: coverage.measure(found, question=label, **names) for label, found in answers.items()
    }


def judge(cell):
    """What is wrong with a cell; a bound of the bias may be wide."""
    return coverage.judge(replace(cell, width=0.0) if cell.question in BOUNDED else cell)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("persons")
    return [run(folder / str(seed), seed) for seed in range(1, 25)]


PLANTED = {
    "nothing": (lambda found: found, ""),
    "too small": (
        lambda found: replace(found, standard_error=found.standard_error / 4.0),
        "covers",
    ),
    "too large": (
        lambda found: replace(found, standard_error=found.standard_error * 3.0),
        "standard error",
    ),
}


@pytest.mark.more
def test_a_few_runs_keep_the_contract(opened):
    found = {label: judge(cell) or cell.refusal for label, cell in cells(opened).items()}
    assert found == dict.fromkeys(QUESTIONS, "")


@pytest.mark.more
@pytest.mark.parametrize("planted", list(PLANTED))
@pytest.mark.parametrize(
    "question", ["mean by rows", "crosstab of both", "variance between persons"]
)
def test_planted_errors_are_found(opened, planted, question):
    plant, wrong = PLANTED[planted]
    [cell] = cells(opened, [question], plant).values()
    assert bool(judge(cell)) == bool(wrong), cell
    assert wrong in judge(cell)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("runs", "changes"),
    [(200, {}), (60, {"n": 6_000, "adjacency": "replace-one", "epsilon": 8.0})],
)
def test_each_answer_keeps_the_contract(runs, changes, tmp_path):
    def release():
        for seed in range(1, runs + 1):
            yield run(tmp_path / str(seed), seed, **changes)
            shutil.rmtree(tmp_path / str(seed))

    found = {
        label: judge(cell) or cell.refusal
        for label, cell in cells(release(), n=changes.get("n", N)).items()
    }
    assert found == dict.fromkeys(QUESTIONS, "")


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return run(tmp_path_factory.mktemp("person") / "1", 1, n=400, epsilon=8.0)


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda o: o.slope("rating", "age"), "two columns"),
        (lambda o: o.fit(len, "rating", "age"), "two columns"),
        (lambda o: o.npmle("rating"), "not ranges"),
        (lambda o: o.mean("age", each="row"), "no column of rows"),
        (lambda o: o.mean("rating", by="sex", each="row"), "two columns"),
        (lambda o: o.mean("rating", each="user"), "'person' or 'row'"),
        (lambda o: o.share("price", each="row"), "holds numbers"),
        (lambda o: o.share("genre", by="sex"), "no groups"),
        (lambda o: o.mean("rating", by="price"), "holds numbers"),
        (lambda o: o.variance_between("genre"), "does not hold numbers"),
        (lambda o: o.variance_between("age"), "no column of rows"),
        (lambda o: o.variance_between("nothing"), "no such column"),
    ],
)
def test_what_is_not_known_is_refused(release, ask, what):
    with refused(what):
        ask(release)


def test_answers_say_what_they_are_of(release):
    assert not says(release.mean("age"), "bounded rows")
    of_persons, of_rows = (release.mean("rating", each=each) for each in ("person", "row"))
    assert says(of_persons, "at most 6 of each 'user'")
    assert says(of_persons, "each person with rows weighs the same")
    assert says(of_rows, "counted in bands")
    offered = release.columns["answers"]
    assert offered["rating"] == "mean, share, histogram, quantile, crosstab"
    assert offered["price"] == "mean, histogram, quantile"
    assert release.variance_between("genre", values=[np.nan, 0, 0, 1]).standard_error > 0


def test_noisy_tables_are_published_as_they_were_drawn(release):
    """Each group has its tables, with a row for each cell, and noise that is that of the card."""
    noise = release.card["accounting"]["noise"]
    whole = 2**26
    tables = release._measured
    ends = (", by band", ", numbers of rows", ", pairs of rows", ", agreeing")
    for group, label, n_cells, unit in [
        ("PP", '["sex", "age"]', 10, 1),
        ("PP", '["age"], by band', 5 * 5, 1),
        ("CC", '["genre", "price"]', 4 * 20, whole),
        ("PC", '["age", "price"]', 5 * 20, whole),
        ("PC", '["rating"], by band', 6 * 5, whole),
        ("WW", '["genre", "genre"], pairs of rows', 16, whole),
        ("H", "[], numbers of rows", MOST + 1, 1),
        ("F", '["genre"], agreeing', 5, 1),
    ]:
        assert tables[label].num_rows == n_cells
        deviation = tables[label]["standard_deviation"][0].as_py() / unit
        assert deviation == pytest.approx(noise[group]["standard_deviation"])
    # a person is in each table once: sums agree, up to their noise
    total = tables["[], numbers of rows"]["count"].to_numpy().sum()
    assert abs(tables['["sex", "age"]']["count"].to_numpy().sum() - total) < 200
    assert len([label for label in tables if not label.endswith(ends)]) == 1 + 3 + 6


def test_persons_without_rows_or_columns_are_answered(tmp_path):
    """Where persons are known by their rows alone, each has a row, and nothing is divided by the others."""
    ratings = pd.DataFrame(
        {"user": np.repeat(np.arange(300), 3), "rating": np.tile([1, 2, 3], 300)}
    )
    unit = {"column": "user", "max_rows": 3}
    opened = release_of(
        tmp_path,
        ratings,
        schema={"user": {"role": "drop"}, "rating": discrete([1, 2, 3])},
        privacy={"epsilon": 8.0, "delta": 1e-9, "adjacency": "replace-one", "unit": unit},
        mechanism={"kind": "copula", "persons": True},
        insecure_seed=1,
    )
    for found in (opened.mean("rating"), opened.mean("rating", each="row")):
        low, high = found.interval()
        assert low < 2.0 < high
    low, high = opened.variance_between("rating").interval()
    assert low < -1.0 / 3.0 < high  # rows of a person differ
