"""Whether 95 % intervals of opened releases hold the truth in 95 % of the runs, and are no wider than they need to be: the contract of estimates.

    python -m pipelines.benchmarks.coverage --runs 200 --csv tests/analysis/coverage.csv --page docs/reference/cost.md
    python -m pipelines.benchmarks.coverage --runs 20 --releases "dip holdout" copula --tables plain

A file that `--csv` names is continued: releases of tables that it has with as many runs are left out, so that all of it can run in parts. `--page` alone,
with `--runs 0`, writes its table.

A population is fixed. In each run rows are drawn from it anew, a job releases them with a seed of its own, the output is opened, and all questions
are asked. A cell is a release (mechanism, reference, channel), a table and a question. It ends as a refusal with its reason, or with

- *coverage*: the share of intervals that hold the population's value; of a Series or a frame the least one of its numbers, but the average over
  its numbers where `limits` say that the intervals hold on average;
- *width*: the half-width of the interval over the 95 % point of the absolute error;
- *error*: the root mean square of the standard error over the standard deviation of the estimate; both are medians over the numbers of an answer.

`judge` says what a cell must have. Where `limits` say that the rows of each unit were bounded, the truth is that of the bounded rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import multiprocessing
import os
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import yaml
from scipy import stats

import dpdask
from dpdask.inference import WeightedSample, huber, least_squares, logistic, quantile_regression
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job

N_POPULATION = 40_000
N_ROWS = 6_000
FEW_ROWS = 2_000  # of releases whose answers take long: ranges, and weighted cells
MAX_ROWS = 5

LEAST, WIDEST, ERRORS = 0.93, 2.0, (0.8, 1.25)
ALPHA = 1e-4  # of a wrong verdict on a cell that just holds
BOUNDED = "bounded rows"  # what `limits` say of units
ON_AVERAGE = (
    "hold on average"  # and where intervals hold the truth on average over the numbers of an answer
)

TOWNS, KINDS = ["A", "B", "C"], ["flat", "house", "other"]
_LEVELS = {"town": TOWNS, "kind": KINDS, "years": [1, 2, 3, 4], "rating": [1.0, 2.0, 3.0, 4.0, 5.0]}


# ---- populations


@dataclass(frozen=True)
class Table:
    """A population, its domains, and what is asked of its number."""

    name: str
    rows: pd.DataFrame  # user, town, years, rating, kind, x, y, or some of them
    levels: Mapping[str, list[Any]]
    bounds: Mapping[str, list[float]]
    edges: list[float]
    probabilities: list[float]
    within: tuple[float, float]
    unit: bool = False
    epsilon: float = 4.0
    whole: bool = False  # whether every run releases the population itself

    def draw(self, rng: np.random.Generator, n: int = N_ROWS) -> pd.DataFrame:
        """Return rows of the population; of one with units, all rows of units, about as many."""
        if self.whole:
            return self.rows
        if not self.unit:
            return self.rows.iloc[rng.integers(0, len(self.rows), n)].reset_index(drop=True)
        places = self._places
        chosen = rng.integers(0, len(places), round(n * len(places) / len(self.rows)))
        found = np.concatenate([places[unit] for unit in chosen])
        user = np.repeat(np.arange(len(chosen)), [len(places[unit]) for unit in chosen])
        order = rng.permutation(len(found))
        return self.rows.iloc[found[order]].assign(user=user[order]).reset_index(drop=True)

    @cached_property
    def _places(self) -> list[np.ndarray]:
        return [part.index.to_numpy() for _, part in self.rows.groupby("user")]

    @cached_property
    def weights(self) -> np.ndarray:
        """How often a row is among the bounded ones of its unit, which are the first of a table that is released whole."""
        if self.whole:
            return (self.rows.groupby("user").cumcount() < MAX_ROWS).to_numpy(float)
        sizes = self.rows.groupby("user")["user"].transform("size").to_numpy()
        return np.minimum(1.0, MAX_ROWS / sizes)


@cache
def table(name: str) -> Table:
    """Return one of the five tables: what differs is the column x, and the levels of `rating`."""
    n, rng = N_POPULATION, np.random.default_rng(zlib.crc32(name.encode()))
    if name == "units":
        sizes = np.minimum(300, np.floor(rng.pareto(1.1, n) + 1)).astype(int)
        sizes = sizes[np.cumsum(sizes) <= n]
        user = np.repeat(np.arange(len(sizes)), sizes)
    else:
        user = np.arange(n)
    n = len(user)
    busy = np.log(np.bincount(user)[user]) if name == "units" else np.zeros(n)
    years, town = rng.integers(1, 5, n), rng.choice(TOWNS, n, p=[0.5, 0.3, 0.2])
    shift = np.select([town == "A", town == "B"], [0.7, -0.5], 0.0)
    score = 0.6 * (years - 2.5) + shift + rng.normal(size=n) - 0.3 * busy
    rating = 1.0 + np.digitize(score, [-1.2, -0.4, 0.4, 1.2])
    mixed = np.where(rng.random(n) < 0.6, (rating > 3).astype(int), rng.integers(0, 3, n))
    x = 60.0 + 12.0 * (years - 2.5) + 5.0 * shift + 18.0 * rng.normal(size=n) - 6.0 * busy
    x = np.clip(x, 0.0, 200.0)
    found = {"user": user, "town": town, "years": years, "rating": rating}
    found |= {"kind": np.array(KINDS)[mixed], "x": x}
    bounds, edges, shares, within = (
        [0.0, 200.0],
        [0.0, 40.0, 60.0, 80.0, 200.0],
        [0.5, 0.9],
        (20.0, 100.0),
    )
    if name == "zeros":
        tail = np.minimum(np.exp(4.5 + 0.3 * score + 1.2 * rng.normal(size=n)), 5000.0)
        found["x"] = np.where(rng.random(n) < 0.96, 0.0, tail)
        found["rating"] = np.where(rng.random(n) < 0.9, 1.0, rating)
        bounds, edges, shares, within = (
            [0.0, 5000.0],
            [0.0, 1.0, 100.0, 400.0, 5000.0],
            [0.98],
            (0.0, 500.0),
        )
    if name == "sparse":
        edges = [0.0, 45.0, 65.0, 85.0, 200.0]  # inside cells of equal width
        missing = rng.random(n) > 0.1 * (1.0 + 0.5 * (town == "A"))
        found["x"] = np.where(missing, np.nan, x)
        found["rating"] = np.where(rng.random(n) < 0.9, np.nan, rating)
    if name == "pair":
        found["y"] = np.clip(x + 8.0 * rng.normal(size=n), 0.0, 200.0)
    every = {"x": bounds, **({"y": [0.0, 200.0]} if name == "pair" else {})}
    return Table(
        name=name,
        rows=pd.DataFrame(found),
        levels=_LEVELS,
        bounds=every,
        edges=edges,
        probabilities=shares,
        within=within,
        unit=name == "units",
        epsilon=16.0 if name == "units" else 4.0,
    )


TABLES = ("plain", "zeros", "sparse", "units", "pair")


# ---- releases


@dataclass(frozen=True)
class Kind:
    """A release that a job can say: its mechanism, and what its schema makes of the columns."""

    mechanism: Mapping[str, Any]
    weighted: bool = False  # whether the number of rows of each unit is published
    kept: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ("user",)
    privacy: Mapping[str, Any] | None = field(
        default_factory=lambda: {"epsilon": 4.0, "delta": 0, "adjacency": "replace-one"}
    )


_KEPT = ("user", "town", "years")
_GAUSSIAN = {"epsilon": 4.0, "delta": 1e-6, "adjacency": "replace-one"}


def _list_kinds() -> dict[str, Kind]:
    found: dict[str, Kind] = {}
    references: dict[str, dict[str, Any]] = {
        "holdout": {"fraction": 0.25},
        "histogram": {},
        "public": {"path": "public"},
        "known": {},
        "chain": {"fraction": 0.25},
        "tree": {},
    }
    for reference, more in references.items():
        for channel in ("laplace", "laplace-calibrated", "optimal", "optimal-unbiased"):
            if reference in ("chain", "tree") and channel == "optimal-unbiased":
                continue  # which randomises each column on its own
            mechanism = {"kind": "dip", "reference": {"kind": reference, **more}}
            only_levels = channel == "optimal-unbiased"
            found[f"dip {reference} {channel}"] = Kind(
                mechanism={**mechanism, "channel": channel},
                kept=(*_KEPT, *(["kind"] if only_levels else [])),
                dropped=("x", "y") if only_levels else (),
                **({"privacy": _GAUSSIAN} if reference == "tree" else {}),
            )
    for channel in ("laplace-calibrated", "optimal-unbiased"):
        own = found[f"dip histogram {channel}"]
        found[f"dip histogram {channel}, weighted"] = replace(own, weighted=True)
    for records in ("raked", "copula"):
        found[f"copula {records}"] = Kind({"kind": "copula", "records": records}, privacy=_GAUSSIAN)
    found["copula raked, no delta"] = Kind({"kind": "copula"})
    for bins in ("adaptive", 20):
        found[f"marginals {bins}"] = Kind(
            {"kind": "marginals", "bins": bins}, dropped=("user",), privacy=_GAUSSIAN
        )
        found[f"histogram cells {bins}"] = Kind(
            {"kind": "histogram", "bins": bins}, dropped=("user", "kind")
        )
    found["marginals no delta"] = Kind({"kind": "marginals"})
    found["histogram rows"] = Kind(
        {"kind": "histogram", "output": "rows"}, dropped=("user", "kind")
    )
    designs: dict[str, dict[str, Any]] = {
        "case1": {},
        "case2": {},
        "ring": {},
        "canonical": {"n_anchors": 3},
    }
    for design, more in designs.items():
        found[f"interval {design}"] = Kind(
            {"kind": "interval", "columns": {"design": design, **more}},
            kept=(*_KEPT, "rating", "kind", "y"),
            dropped=(),
            privacy=None,
        )
    return found


KINDS_OF_RELEASE = _list_kinds()


def is_possible(kind: str, source: Table) -> bool:
    """Return whether a job can say it, and the table differs from others there."""
    release = KINDS_OF_RELEASE[kind]
    if kind.startswith("interval") and "x" not in source.rows:
        return False
    if release.weighted and not source.unit:
        return False
    if source.unit:  # ranges have no unit, a public table none to bound
        return release.privacy is not None and "chain" not in kind and "public" not in kind
    if "optimal-unbiased" in kind:
        return "y" not in source.rows and not source.rows["rating"].isna().any()
    return True


def _columns(kind: str, source: Table) -> dict[str, Any]:
    release, found = KINDS_OF_RELEASE[kind], dict[str, Any]()
    for column in source.rows.columns:
        nulls = {"nulls": "level"} if source.rows[column].isna().any() else {}
        # a joint histogram has few columns
        too_many = column == "rating" and kind.startswith("histogram") and "y" in source.rows
        if column in release.kept:
            found[column] = {"role": "keep"}
        elif column in release.dropped or too_many:
            found[column] = {"role": "drop"}
        elif column in source.levels:
            levels = source.levels[column]
            sort = "categorical" if isinstance(levels[0], str) else "discrete"
            found[column] = {"role": "privatise", "kind": sort, "levels": levels, **nulls}
        else:
            found[column] = {
                "role": "privatise",
                "kind": "continuous",
                "bounds": source.bounds[column],
                **({"outside": "refuse"} if kind.startswith("interval") else {}),
                **nulls,
            }
    return found


def _mechanism(
    kind: str, source: Table, columns: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    mechanism = json.loads(json.dumps(KINDS_OF_RELEASE[kind].mechanism))
    private = [column for column in columns if columns[column]["role"] == "privatise"]
    if mechanism["kind"] == "interval":
        low, high = source.bounds["x"]
        anchors = {"name": "uniform", "loc": low, "scale": high - low}
        nulls = {"nulls": "public"} if source.rows["x"].isna().any() else {}
        mechanism["columns"] = {"x": {**mechanism["columns"], "anchors": anchors, **nulls}}
    if mechanism["kind"] == "marginals":
        tables = [["town", "rating"], ["kind", "rating"], ["years", "rating"]]
        tables += [["town", "x"], ["years", "x"], ["x", "y"]]
        tables += [[column] for column in private if not any(column in each for each in tables)]
        mechanism["cliques"] = [each for each in tables if set(each) <= set(private)]
    reference = mechanism.get("reference", {})
    if reference.get("kind") == "public":
        reference["path"] = str(folder / "public.parquet")
    if reference.get("kind") == "known":
        reference["columns"] = {
            column: _declare(source, column, columns[column]) for column in private
        }
    return mechanism


def _declare(source: Table, column: str, declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return a declared distribution that is near that of a column."""
    values = source.rows[column]
    null = {"null": float(values.isna().mean())} if values.isna().any() else {}
    if "levels" in declared:
        levels = [*([None] if declared.get("nulls") == "level" else []), *declared["levels"]]
        shares = [(values.isna() if level is None else values == level).mean() for level in levels]
        shares = 0.8 * np.array(shares) + 0.2 / len(levels)
        return {"probabilities": (shares / shares.sum()).tolist()}
    low, high = source.bounds[column]
    return {"name": "uniform", "loc": low, "scale": high - low, **null}


def count_rows(kind: str) -> int:
    """Return how many rows are drawn for a release."""
    return FEW_ROWS if kind.startswith(("interval", "histogram cells")) else N_ROWS


def run(kind: str, source: Table, seed: int, folder: Path, *, n_rows: int) -> Any:
    """Draw rows, release them, and return the opened release."""
    rng = np.random.default_rng([zlib.crc32(f"{kind}, {source.name}".encode()), seed])
    release, columns = KINDS_OF_RELEASE[kind], _columns(kind, source)
    source.draw(rng, n_rows).to_parquet(folder / "in.parquet", index=False)
    if not (folder / "public.parquet").exists():
        source.draw(np.random.default_rng(9), n_rows).to_parquet(
            folder / "public.parquet", index=False
        )
    job: dict[str, Any] = {
        "name": "coverage",
        "input": {"path": str(folder / "in.parquet")},
        "output": {"path": str(folder / f"out{seed}")},
        "schema": "schema.yaml",
        "mechanism": _mechanism(kind, source, columns, folder),
        "insecure_seed": seed,
    }
    if release.privacy is not None:
        job["privacy"] = {**release.privacy, "epsilon": source.epsilon}
        if source.unit:
            unit = {"column": "user", "max_rows": MAX_ROWS}
            job["privacy"]["unit"] = {**unit, "publish_counts": True} if release.weighted else unit
    (folder / "schema.yaml").write_text(yaml.safe_dump({"columns": columns}))
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("ignore")
        run_job(load_job(folder / "job.yaml"))
        return dpdask.open(str(folder / f"out{seed}"))


# ---- questions


Weights = np.ndarray
Truth = Callable[[pd.DataFrame, Weights, Any], Any]


@dataclass(frozen=True)
class Question:
    """What is asked of an opened release, and the same of the population, whose rows have weights."""

    columns: tuple[str, ...]
    ask: Callable[[Any], Any]
    truth: Truth  # of the rows, their weights and the answer
    counts: bool = False  # in rows
    truths: dict[Any, np.ndarray] = field(default_factory=dict)  # that were computed

    def find_truth(self, source: Table, found: Any, *, is_bounded: bool) -> np.ndarray:
        """Return what is true of the population, or of its bounded rows."""
        labels = [getattr(found.estimate, name, ()) for name in ("index", "columns")]
        key = is_bounded, str([list(each) for each in labels])
        if key not in self.truths:
            weights = source.weights if is_bounded else np.ones(len(source.rows))
            truth = self.truth(source.rows, weights, found)
            self.truths[key] = np.asarray(truth, dtype=float).ravel()
        return self.truths[key]


def _mean(column: str, by: str | None = None, within: tuple[float, float] | None = None) -> Truth:
    def truth(rows: pd.DataFrame, weights: Weights, _: Any) -> Any:
        x = rows[column] if within is None else rows[column].clip(*within)
        here = x.notna().to_numpy()
        x, w = x[here], weights[here]
        if by is None:
            return np.average(x, weights=w)
        group = rows[by][here]
        return [
            np.average(x[group == each], weights=w[group == each])
            if (group == each).any()
            else math.nan  # only nulls
            for each in sorted(rows[by].unique())
        ]

    return truth


def _share(column: str) -> Truth:
    def truth(rows: pd.DataFrame, weights: Weights, found: Any) -> Any:
        levels = found.estimate.index
        return [weights[_is(rows[column], each)].sum() / weights.sum() for each in levels]

    return truth


def _is(values: pd.Series, level: Any) -> np.ndarray:
    return (values.isna() if pd.isna(level) else values == level).to_numpy()


def _counts(column: str) -> Truth:
    def truth(rows: pd.DataFrame, weights: Weights, found: Any) -> Any:
        x, index = rows[column].to_numpy(), found.estimate.index
        parts = []
        for each in index:
            inside = (x > each.left) & (x < each.right)
            inside |= (x == each.left) & (index.closed == "left" or each.left == index[0].left)
            inside |= (x == each.right) & (index.closed == "right" or each.right == index[-1].right)
            parts.append(weights[inside].sum() / weights.sum())
        return parts

    return truth


def _quantile(column: str, q: Sequence[float]) -> Truth:
    def truth(rows: pd.DataFrame, weights: Weights, _: Any) -> Any:
        x = rows[column].to_numpy()
        order = np.argsort(x, kind="stable")
        order = order[~np.isnan(x[order])]
        ranks = np.cumsum(weights[order]) / weights[order].sum()
        return [x[order][np.searchsorted(ranks, each)] for each in q]

    return truth


def _crosstab(first: str, second: str) -> Truth:
    def truth(rows: pd.DataFrame, weights: Weights, found: Any) -> Any:
        return [
            [
                weights[_is(rows[first], one) & _is(rows[second], two)].sum() / weights.sum()
                for two in found.estimate.columns
            ]
            for one in found.estimate.index
        ]

    return truth


def _fit(
    estimator: Callable[[WeightedSample], Any], response: str, feature: str, *, slope: bool = False
) -> Truth:
    def truth(rows: pd.DataFrame, weights: Weights, _: Any) -> Any:
        here = rows[[response, feature]].notna().all(axis=1).to_numpy()
        sample = WeightedSample(
            features=rows[[feature]].to_numpy(float)[here],
            response=rows[response].to_numpy(float)[here],
            weights=weights[here],
        )
        return np.asarray(estimator(sample))[1 if slope else 0 :]

    return truth


def _is_over_2(sample: WeightedSample) -> Any:
    """Return a logistic regression of having more than 2 years."""
    over = (sample.response > 2).astype(float)
    return logistic(
        type(sample)(
            features=sample.features, response=over, weights=sample.weights, names=sample.names
        )
    )


def questions(source: Table) -> dict[str, Question]:
    """Return all questions of a table, by their names."""
    edges, shares, within = source.edges, source.probabilities, source.within

    def asks(question: str, *words: Any, **more: Any) -> Callable[[Any], Any]:
        return lambda opened: getattr(opened, question)(*words, **more)

    found = {
        "share of levels": Question(("rating",), asks("share", "rating"), _share("rating")),
        "share of texts": Question(("kind",), asks("share", "kind"), _share("kind")),
        "mean of levels": Question(("rating",), asks("mean", "rating"), _mean("rating")),
        "mean of levels by town": Question(
            ("rating", "town"), asks("mean", "rating", by="town"), _mean("rating", "town")
        ),
        "crosstab with town": Question(
            ("town", "rating"),
            asks("crosstab", "town", "rating"),
            _crosstab("town", "rating"),
            True,
        ),
        "crosstab of two": Question(
            ("kind", "rating"),
            asks("crosstab", "kind", "rating"),
            _crosstab("kind", "rating"),
            True,
        ),
        "slope of levels": Question(
            ("rating", "years"),
            asks("slope", "rating", "years"),
            _fit(least_squares, "rating", "years", slope=True),
        ),
        "mean of numbers": Question(("x",), asks("mean", "x"), _mean("x")),
        "mean of numbers by town": Question(
            ("x", "town"), asks("mean", "x", by="town"), _mean("x", "town")
        ),
        "mean within": Question(("x",), asks("mean", "x", within=within), _mean("x", None, within)),
        "counts of ranges": Question(("x",), asks("histogram", "x", edges), _counts("x"), True),
        "quantiles": Question(("x",), asks("quantile", "x", shares), _quantile("x", shares)),
        "slope of numbers": Question(
            ("x", "years"),
            asks("slope", "x", "years"),
            _fit(least_squares, "x", "years", slope=True),
        ),
        "slope on numbers": Question(
            ("years", "x"),
            asks("slope", "years", "x"),
            _fit(least_squares, "years", "x", slope=True),
        ),
    }
    if "y" in source.rows:
        found["slope of two numbers"] = Question(
            ("x", "y"), asks("slope", "x", "y"), _fit(least_squares, "x", "y", slope=True)
        )
    for label, estimator, response, feature in (
        ("least squares", least_squares, "x", "years"),
        ("Huber", huber, "x", "years"),
        ("median", quantile_regression, "x", "years"),
        ("logistic", _is_over_2, "years", "x"),
    ):
        found[f"fit, {label}"] = Question(
            (response, feature),
            asks("fit", estimator, response, feature),
            _fit(estimator, response, feature),
        )
    return found


def asked(kind: str, source: Table) -> dict[str, Question]:
    """Return the questions that a release has the columns for; `fit` is of weighted cells alone."""
    columns = _columns(kind, source)
    there = {column for column in columns if columns[column]["role"] != "drop"}
    return {
        label: question
        for label, question in questions(source).items()
        if set(question.columns) <= there
        and (not label.startswith("fit") or kind.startswith("histogram cells"))
    }


# ---- answers


@dataclass(frozen=True)
class Answer:
    """One answer in one run: what is said of each number, and the truth."""

    truth: np.ndarray
    estimate: np.ndarray
    error: np.ndarray  # NaN where no standard error is known
    low: np.ndarray
    high: np.ndarray
    on_average: bool = False  # whether it says that its intervals hold on average over the numbers


Asked = Answer | str  # a refusal says why


def answer(
    question: Question,
    opened: Any,
    source: Table,
    n_rows: int,
    plant: Callable[[Any], Any] | None = None,
) -> Asked:
    """Ask, and return the answer, or the reason why there is none; an error may be planted in what was found."""
    try:
        found = question.ask(opened)
        found = found if plant is None else plant(found)
        low, high = found.interval()
    except TypeError as missing:
        if "unexpected keyword" not in str(missing):
            raise
        return "is no question yet"
    except dpdask.SpecError as refusal:
        return refusal.what
    bounded = source.unit and any(BOUNDED in limit for limit in found.limits)
    truth = question.find_truth(source, found, is_bounded=bounded)
    parts = [np.asarray(part, dtype=float).ravel() for part in (found.estimate, low, high)]
    error = found.standard_error
    errors = np.full(parts[0].shape, np.nan) if error is None else np.asarray(error, dtype=float)
    scale = n_rows if question.counts else 1.0
    if question.counts and found.of_table:
        scale = float(opened.to_pandas(["user_weight"])["user_weight"].sum())
    on_average = any(ON_AVERAGE in limit for limit in found.limits)
    parts = [part / scale for part in (parts[0], errors.ravel(), parts[1], parts[2])]
    return Answer(truth, *parts, on_average=on_average)


def count_rows_of(opened: Any) -> int:
    """Return how many rows counts are of: the released ones, or those of the table."""
    told = opened.content.get("n_rows") or {}
    return int(told.get("value") or opened.n_rows)


@dataclass(frozen=True)
class Cell:
    """What all runs of a question say: a refusal, or three figures."""

    release: str
    table: str
    question: str
    runs: int
    refusal: str = ""
    coverage: float = math.nan  # of the number that is covered least
    average: float = math.nan  # over the numbers
    width: float = math.nan
    error: float = math.nan
    answered: float = 0.0  # the share of the runs, and of the numbers
    asked: int = 0  # how many runs there were, with those that had no answer
    on_average: int = 0  # whether most answers promise the average, and not each number


def measure(answers: Sequence[Asked], **names: Any) -> Cell:
    """Return the cell of all answers."""
    told = [each for each in answers if isinstance(each, Answer)]
    refused = [each for each in answers if isinstance(each, str)]
    runs = len(answers)
    if len(told) < runs / 2.0:
        return Cell(**names, runs=runs, asked=runs, refusal=max(set(refused), key=refused.count))
    parts = {
        name: np.array([getattr(each, name) for each in told])
        for name in ("truth", "estimate", "error", "low", "high")
    }
    known = np.isfinite([parts[name] for name in ("truth", "low", "high")]).all(axis=0)
    kept = known.mean(axis=0) >= 0.5
    if not kept.any():
        return Cell(**names, runs=runs, asked=runs, refusal="no interval for most of its numbers")
    off = np.abs(parts["estimate"] - parts["truth"])
    least = 1e-9 * np.abs(parts["truth"])
    inside = (parts["low"] - least <= parts["truth"]) & (parts["truth"] <= parts["high"] + least)
    columns = []
    for place in np.flatnonzero(kept):
        here = known[:, place]
        half = ((parts["high"] - parts["low"])[here, place] / 2.0).mean()
        own = float(np.quantile(off[here, place], 0.95))
        spread = float(np.std(parts["estimate"][here, place] - parts["truth"][here, place]))
        errors = parts["error"][here, place]
        errors = errors[np.isfinite(errors)]
        size = math.sqrt(float((errors**2).mean())) if len(errors) else math.nan
        columns.append(
            (
                inside[here, place].mean(),
                half / own if own else (1.0 if half == 0.0 else math.inf),
                size / spread if spread else math.nan,
            )
        )
    coverage, widths, errors = np.array(columns).T
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Cell(
            **names,
            runs=len(told),
            coverage=float(coverage.min()),
            average=float(coverage.mean()),
            width=float(np.median(widths)),
            error=float(np.nanmedian(errors)),
            answered=float(known.mean()) * len(told) / runs,
            asked=runs,
            on_average=int(np.mean([each.on_average for each in told]) > 0.5),
        )


def judge(cell: Cell) -> str:
    """Return what is wrong with a cell: nothing, if it is a refusal or keeps the contract within the chance of its runs."""
    if cell.refusal:
        return ""
    least = stats.binom.ppf(ALPHA, cell.runs, LEAST) / cell.runs
    # a standard deviation of n normal numbers has a relative error of 1 / sqrt(2 n)
    doubt = math.exp(-stats.norm.ppf(ALPHA) / math.sqrt(2.0 * cell.runs))
    wrong = []
    covered = cell.average if cell.on_average else cell.coverage
    if covered < least:
        wrong.append(f"covers {covered:.2f}")
    if cell.width > WIDEST * doubt:
        wrong.append(f"{cell.width:.1f} times as wide as its error")
    if not math.isnan(cell.error) and not ERRORS[0] / doubt <= cell.error <= ERRORS[1] * doubt:
        wrong.append(f"standard error {cell.error:.2f} of the spread")
    return "; ".join(wrong)


# ---- all of it


def releases(
    kind: str, source: Table, runs: int, folder: Path, *, n_rows: int = 0
) -> Iterator[Any]:
    """Yield the opened releases of all runs; each is gone when the next one is asked for."""
    for seed in range(1, runs + 1):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            yield run(kind, source, seed, Path(place), n_rows=n_rows or count_rows(kind))


def simulate(
    kind: str,
    source: Table,
    opened: Iterable[Any],
    *,
    only: Sequence[str] | None = None,
    plant: Callable[[Any], Any] | None = None,
) -> list[Cell]:
    """Return the cells of one release of one table, of its opened runs."""
    chosen = {k: v for k, v in asked(kind, source).items() if only is None or k in only}
    answers: dict[str, list[Asked]] = {label: [] for label in chosen}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in opened:
            n_rows = count_rows_of(each)
            for label, question in chosen.items():
                answers[label].append(answer(question, each, source, n_rows, plant))
    return [
        measure(found, release=kind, table=source.name, question=label)
        for label, found in answers.items()
    ]


def _simulate(work: tuple[str, str, int]) -> list[Cell]:
    kind, name, runs = work
    memory = Path("/dev/shm")  # noqa: S108 - many small files, for a moment
    place = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return simulate(kind, table(name), releases(kind, table(name), runs, place))


def simulate_all(work: Sequence[tuple[str, str, int]], processes: int) -> Iterator[list[Cell]]:
    """Yield the cells of each release of each table, with its number of runs, as they are done."""
    if processes == 1:
        yield from map(_simulate, work)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(_simulate, work)


def list_work(
    kinds: Sequence[str], tables: Sequence[str], runs: int, cells: Sequence[Cell]
) -> list[tuple[str, str, int]]:
    """Return the releases of tables of which not every question was asked in so many runs."""
    done = {(c.release, c.table, c.question) for c in cells if c.asked >= runs}
    return [
        (kind, name, runs)
        for kind in (kinds if runs else ())
        for name in tables
        if is_possible(kind, table(name))
        and any((kind, name, each) not in done for each in asked(kind, table(name)))
    ]


BEGIN, END = "<!-- begin: coverage -->", "<!-- end: coverage -->"
_GROUPS = {  # of questions, as the page has them
    "shares": ("share of levels", "share of texts"),
    "means of levels": ("mean of levels", "mean of levels by town"),
    "crosstabs": ("crosstab with town", "crosstab of two"),
    "means of numbers": ("mean of numbers", "mean of numbers by town"),
    "means within": ("mean within",),
    "counts of ranges": ("counts of ranges",),
    "quantiles": ("quantiles",),
    "slopes": ("slope",),
    "fits": ("fit",),
}


def write_table(cells: Sequence[Cell]) -> str:
    """Return what all cells say, and a line for each release: for each kind of question the least and the mean coverage, the median width, and the refusals."""
    if not cells:
        return "No whole run is recorded."
    told, runs = (
        [cell for cell in cells if not cell.refusal],
        {cell.asked or cell.runs for cell in cells},
    )
    broken = sum(bool(judge(cell)) for cell in told)
    head = (
        f"{len(cells):,} cells of {min(runs):,} runs"
        + (f" and more, up to {max(runs):,}" if len(runs) > 1 else "")
        + f": {len(cells) - len(told):,} are refusals, and {broken:,} of the others are outside of the contract (bold)."
    )
    lines = [f"| release | {' | '.join(_GROUPS)} |", "|---" * (1 + len(_GROUPS)) + "|"]
    for release in dict.fromkeys(cell.release for cell in cells):
        own = [cell for cell in cells if cell.release == release]
        shown = [
            _tell_cells([cell for cell in own if cell.question.startswith(labels)])
            for labels in _GROUPS.values()
        ]
        lines.append(f"| {release} | {' | '.join(shown)} |")
    return "\n".join([head, "", *lines])


def _tell_cells(cells: Sequence[Cell]) -> str:
    """Return the least and the mean coverage, the median width, and how many of some cells are refused."""
    told = [cell for cell in cells if not cell.refusal]
    parts = []
    if told:
        mean, width = (
            float(function([getattr(cell, name) for cell in told]))
            for name, function in (("average", np.mean), ("width", np.median))
        )
        text = f"{min(cell.coverage for cell in told):.2f}, {mean:.2f}, {width:.1f}"
        parts.append(f"**{text}**" if any(map(judge, told)) else text)
    if len(told) < len(cells):
        parts.append(f"{len(cells) - len(told)} of {len(cells)} refused")
    return "; ".join(parts) or "–"


def write_page(path: Path, text: str) -> None:
    """Put the table between its marks in a document."""
    page = path.read_text(encoding="utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--releases", nargs="*", default=[""], help="parts of their names")
    parser.add_argument("--tables", nargs="*", default=list(TABLES))
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--csv", type=Path, help="where the cells go; it is continued, if it is there"
    )
    parser.add_argument("--page", type=Path, help="a document whose table is replaced")
    chosen = parser.parse_args(arguments)
    kinds = [k for k in KINDS_OF_RELEASE if any(part in k for part in chosen.releases)]
    cells = read_cells(chosen.csv) if chosen.csv and chosen.csv.exists() else []
    work = list_work(kinds, chosen.tables, chosen.runs, cells)
    for found in simulate_all(work, chosen.processes):
        new = {(cell.release, cell.table) for cell in found}
        cells = [cell for cell in cells if (cell.release, cell.table) not in new] + found
        for cell in found:
            print(
                f"{cell.release:28} {cell.table:7} {cell.question:24} {cell.coverage:.2f} {cell.average:.2f} "
                f"{cell.width:5.2f} {cell.error:5.2f} {judge(cell) or cell.refusal[:70]}",
                flush=True,
            )
        order = {each: place for place, each in enumerate(KINDS_OF_RELEASE)}
        cells.sort(key=lambda cell: (order[cell.release], TABLES.index(cell.table)))
        if chosen.csv:
            write_cells(chosen.csv, cells)
    if chosen.page:
        write_page(chosen.page, write_table(cells))


def read_cells(path: Path) -> list[Cell]:
    """Return the cells of a file; those of an older one may lack how many runs were asked."""
    types = {
        each.name: {"str": str, "int": int, "float": float}[str(each.type)] for each in fields(Cell)
    }
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [Cell(**{name: types[name](value) for name, value in row.items()}) for row in rows]


def write_cells(path: Path, cells: Sequence[Cell]) -> None:
    """Write cells to a file, their figures in three digits; an interrupted one leaves the file as it was."""
    whole = path.with_name(f"{path.name}.new")
    with whole.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([each.name for each in fields(Cell)])
        for cell in cells:
            values = asdict(cell).values()
            writer.writerow([f"{v:.3g}" if isinstance(v, float) else v for v in values])
    whole.replace(path)


if __name__ == "__main__":
    main()
