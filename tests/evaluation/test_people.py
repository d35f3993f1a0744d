"""`dpdask report` of persons: measures are those of their definitions, and stand between independent columns and a resample."""

import re
from itertools import combinations

import dask
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from e2e.helpers import call_cli, error_line, run_here
from e2e.test_person_jobs import make_tables, write
from numpy.random import default_rng

from dpdask.evaluation.people import bound_rows, compare_people, pair_people
from dpdask.evaluation.samples import draw_by_person, sample_rows

MOST = 4
CARD = {
    "sex": {"levels": ["f", "m"]},
    "stars": {"levels": [None, 1, 2, 3]},
    "place": {"levels": ["a", "b"]},
    "price": {"bounds": [0.0, 1.0]},
}


def simulate(seed, n=1_500):
    rng = default_rng(seed)
    taste, k = rng.normal(size=n), rng.integers(0, MOST + 1, n)
    owner = np.repeat(np.arange(n), k)
    stars = np.clip(np.rint(2 + taste[owner] + rng.normal(size=len(owner))), 1, 3)
    stars[rng.random(len(owner)) < 0.1] = np.nan
    rows = pd.DataFrame(
        {
            "user": owner,
            "stars": stars,
            "place": np.where(stars + rng.normal(size=len(owner)) > 2, "a", "b"),
            "price": 1.0 / (1.0 + np.exp(-taste[owner] - rng.normal(size=len(owner)))),
        }
    )
    persons = pd.DataFrame({"user": np.arange(n), "sex": np.where(taste > 0.3, "f", "m")})
    return persons, rows.sample(frac=1.0, random_state=seed)


@pytest.fixture(scope="module")
def pair():
    return pair_people(simulate(1), simulate(2), CARD, MOST)


def test_measures_are_those_of_their_definitions(pair):
    persons, rows = simulate(1)
    known = rows.dropna(subset=["stars"])
    means, variance = pair[0].average("stars")
    assert np.sort(means) == pytest.approx(np.sort(known.groupby("user")["stars"].mean()))
    products, centres = [], []
    for _, own in known.groupby("user")["stars"]:
        if len(own) > 1:
            products.append(np.mean([a * b for a, b in combinations(own, 2)]))
            centres.append(own.mean())
    assert variance == pytest.approx(np.mean(products) - np.mean(centres) ** 2)
    distinct = rows.groupby("user")["stars"].nunique(dropna=False)
    expected = np.bincount(distinct, minlength=MOST + 1)
    expected[0] = len(persons) - len(distinct)
    assert pair[0].count_distinct(0).tolist() == expected.tolist()
    counts = pair[0].count()
    assert counts.n_persons == len(persons)
    assert counts.n_rows == len(rows)


def test_persons_lie_between_independent_columns_and_a_resample(pair):
    rng = default_rng(3)
    alike = compare_people(*pair, rng)
    apart = compare_people(pair[0], pair[0].permute(rng), rng)
    assert [len(alike[key]) for key in ("tables", "variances", "means", "levels")] == [5, 2, 2, 3]
    for fresh, mixed in zip(alike["tables"][1:4], apart["tables"][1:4], strict=True):
        assert fresh.released < 3 * fresh.resample < mixed.released
        assert mixed.released == pytest.approx(mixed.independent, rel=0.3)
    for fresh, mixed in zip(alike["variances"], apart["variances"], strict=True):
        assert fresh.released == pytest.approx(fresh.original, rel=0.25)
        assert abs(mixed.released) < 0.1 * mixed.original
    for key in ("means", "levels"):
        for fresh, mixed in zip(alike[key][:2], apart[key][:2], strict=True):
            assert fresh.released < mixed.released


def test_a_resample_has_whole_persons(pair):
    again = pair[0].resample(default_rng(4))
    assert again.n_persons == pair[0].n_persons
    held = {
        tuple(np.sort(pair[0].rows[0, a:b]))
        for a, b in zip(pair[0].starts, pair[0].starts[1:], strict=False)
    }
    assert all(
        tuple(np.sort(again.rows[0, a:b])) in held
        for a, b in zip(again.starts, again.starts[1:], strict=False)
    )


def test_persons_are_sampled_whole_and_bounded():
    _, rows = simulate(1)
    table = pa.Table.from_pandas(rows, preserve_index=False)
    secret = np.array([1, 2], dtype=np.uint64)

    def draw(batch):
        return draw_by_person(secret, batch)

    found = sample_rows(table.to_batches(50), 400, default_rng(0), draw)
    assert 380 < len(found) <= 400
    whole = rows.groupby("user").size()
    assert (found.groupby("user").size() == whole[np.unique(found["user"])]).all()
    users = found["user"].unique()
    assert 0.4 < np.median(users) / 1_500 < 0.6
    hot = pa.table({"user": np.zeros(1_000, dtype=np.int64)})
    assert len(sample_rows(hot.to_batches(50), 100, default_rng(0), draw)) == 1_000
    bounded = bound_rows(rows, 2, default_rng(0)).groupby("user").size()
    assert (bounded == np.minimum(whole, 2)).all()


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    folder = tmp_path_factory.mktemp("people")
    return folder, run_and_keep(folder)


def run_and_keep(folder):
    with dask.config.set(scheduler="synchronous"):
        job = write(folder)
        run_here(job)
    return job


def test_the_page_has_persons_and_is_confidential(released, tmp_path):
    folder, job = released
    page = tmp_path / "page.html"
    done = call_cli("report", "--job", job, "--to", page)
    assert done.returncode == 0, done.stderr
    text = page.read_text(encoding="utf-8")
    assert text.count("CONFIDENTIAL") >= 2
    assert page.stat().st_mode & 0o777 == 0o600
    assert "440 persons of the original" in text
    assert "two columns of persons, the number of rows among them" in text
    shown = re.search(r"Variance between persons.*?rating</th>((<td>[-0-9.e]+</td>)+)", text, re.S)
    original, found, independent, resample = map(float, re.findall(r"[-0-9.e]+(?=</td>)", shown[1]))
    assert abs(found / original - 1) < 0.5
    assert abs(resample / original - 1) < 0.3
    assert abs(independent) < 0.2 * original
    done = call_cli("report", folder / "out", "--original", folder / "ratings")
    assert done.returncode == 64
    assert "name the job" in error_line(done)


def test_persons_who_are_known_by_their_rows_need_no_job(tmp_path):
    ratings, people = make_tables()
    sexes = dict(zip(people["id"], people["sex"], strict=True))
    lifted = ratings.assign(sex=ratings["user"].map(sexes))
    column = {"role": "privatise", "kind": "categorical", "levels": ["f", "m"], "constant": True}
    run_here(write(tmp_path, (lifted, people), linked=False, schema={"sex": column}))
    page = tmp_path / "page.html"
    done = call_cli("report", tmp_path / "out", "--original", tmp_path / "ratings", "--to", page)
    assert done.returncode == 0, done.stderr
    assert "400 persons of the original" in page.read_text(encoding="utf-8")
