"""The reference `chain` end to end: its joint distribution, its groups, kills, what its card and plan say, bad input, and frames."""

import json
import signal

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.bad_input import COLUMNS, Case, table
from e2e.bad_input import job as bad_job
from e2e.helpers import (
    categorical,
    continuous,
    digests,
    discrete,
    hidden,
    lake,
    load,
    read_card,
    read_rows,
    run_here,
    write_job,
)
from e2e.test_bad_input import check_case, ids
from scipy import stats

import dpdask
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.streams import RunKey

ALPHA = 1e-9
CHAIN = {"kind": "chain", "fraction": 0.25}
GROUPED = CHAIN | {"by": "userId", "min_rows": 2, "order": "random", "max_records": 500}
SCHEMA = {
    "user": {"role": "keep"},
    "a": discrete([0, 1, 2]),
    "b": categorical(["x", "y"], nulls="level"),
    "c": continuous(),
}


def people(n_rows=6000, seed=3):
    """Return rows whose columns depend on one another, and on a kept user: even ones have their own habits."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, 20, n_rows)
    a = np.where(
        user % 2 == 0,
        rng.choice(3, n_rows, p=[0.8, 0.1, 0.1]),
        rng.choice(3, n_rows, p=[0.1, 0.1, 0.8]),
    )
    b = np.where(rng.random(n_rows) < 0.85, np.array(["x", "y", None])[a], "y")
    return pd.DataFrame({"user": user, "a": a, "b": b, "c": a + 0.2 * rng.normal(size=n_rows)})


def written(folder, rows, n_files=3):
    folder.mkdir(parents=True)
    for number, part in enumerate(np.array_split(np.arange(len(rows)), n_files)):
        pq.write_table(
            pa.Table.from_pandas(rows.iloc[part], preserve_index=False),
            folder / f"{number}.parquet",
            row_group_size=700,
        )
    return folder


def released(folder, source, **changed):
    run_here(
        write_job(folder, source, folder / "out", schema=SCHEMA, privacy__epsilon=1.5, **changed)
    )
    return read_rows(folder).to_pandas()


def joint(rows, *names):
    rounded = rows.assign(b=rows["b"].fillna("null"), c=np.round(rows["c"]).clip(0, 2).astype(int))
    return rounded.groupby(list(names)).size()


def same_distribution(one, other, *names):
    counted = pd.concat([joint(one, *names), joint(other, *names)], axis=1).fillna(0)
    return float(stats.chi2_contingency(counted.loc[counted.sum(axis=1) > 40].T).pvalue)


def within(rows):
    """How strongly c follows a."""
    return float(np.corrcoef(rows["a"], rows["c"])[0, 1])


def test_the_joint_distribution_survives_where_margins_lose_it(tmp_path):
    source = written(tmp_path / "in", people())
    kept = released(tmp_path / "chain", source, mechanism__reference=CHAIN)
    lost = released(
        tmp_path / "holdout", source, mechanism__reference={"kind": "holdout", "fraction": 0.25}
    )
    given = people()
    assert list(kept.columns) == list(SCHEMA)
    assert same_distribution(given, kept, "a", "b") > 1e-4  # hold-out and rows are both samples
    assert same_distribution(given, lost, "a", "b") < ALPHA
    assert within(given) > 0.95
    assert within(kept) > 0.95
    assert within(lost) < 0.6
    assert (
        same_distribution(given, kept, "user", "a") < ALPHA
    )  # of the kept columns it knows nothing


def test_groups_keep_their_own_distribution(tmp_path):
    source = written(tmp_path / "in", people())
    kept = released(tmp_path / "by", source, mechanism__reference=CHAIN | {"by": "user"})
    even = kept[kept["user"] % 2 == 0]
    assert (even["a"] == 0).mean() > 0.7
    assert (kept[kept["user"] % 2 == 1]["a"] == 2).mean() > 0.7
    pooled = released(
        tmp_path / "none", source, mechanism__reference=CHAIN | {"by": "user", "min_rows": 100_000}
    )
    assert 0.3 < (pooled[pooled["user"] % 2 == 0]["a"] == 0).mean() < 0.68
    assert read_card(tmp_path / "none")["mechanism"]["by"] == {
        "column": "user",
        "min_rows": 100_000,
        "pooled_percent_of_reference_groups": 100,
        "pooled_percent_of_reference_rows": 100,
    }


@pytest.mark.parametrize("of", ["float", "dictionary", "bool"])
def test_groups_of_any_type(of, tmp_path):
    rows = people()
    user = pa.array(rows["user"])
    named = {
        "float": user.cast(pa.float64()),
        "dictionary": pa.array([f"user {number}" for number in rows["user"]]).dictionary_encode(),
        "bool": pa.array(rows["user"] % 2 == 0),
    }[of]
    (tmp_path / "in").mkdir()
    pq.write_table(
        pa.Table.from_pandas(rows, preserve_index=False).set_column(0, "user", named),
        tmp_path / "in" / "a.parquet",
    )
    kept = released(tmp_path / of, tmp_path / "in", mechanism__reference=CHAIN | {"by": "user"})
    even = (
        kept["user"]
        if of == "bool"
        else kept["user"].astype(str).str.extract(r"(\d+)")[0].astype(int) % 2 == 0
    )
    assert (kept[even]["a"] == 0).mean() > 0.7


def test_the_order_of_columns_changes_the_rows_and_not_the_distribution(tmp_path):
    source = written(tmp_path / "in", people())
    one, other = (
        released(tmp_path / name, source, mechanism__reference=CHAIN | {"order": list(name)})
        for name in ("abc", "cba")
    )
    assert read_card(tmp_path / "cba")["mechanism"]["order"] == ["c", "b", "a"]
    assert not one.equals(other)
    assert same_distribution(one, other, "a", "b") > ALPHA
    assert same_distribution(one, other, "b", "c") > ALPHA


def test_a_random_order_is_drawn_from_the_key():
    chain = dpdask.Chain(fraction=0.25, order="random")
    names = tuple("abcdef")
    orders = {chain.order_columns(names, RunKey.insecure(seed)) for seed in range(20)}
    assert len(orders) > 15
    assert chain.order_columns(names, RunKey.insecure(3)) == chain.order_columns(
        names, RunKey.insecure(3)
    )


def test_a_large_hold_out_is_sampled_and_a_unit_is_held_out_whole_and_bounded(tmp_path):
    source = written(tmp_path / "in", people())
    unit = {"column": "user", "max_rows": 9}
    assert (
        within(
            released(tmp_path / "few", source, mechanism__reference=CHAIN | {"max_records": 400})
        )
        > 0.9
    )
    assert (
        read_card(tmp_path / "few")["mechanism"]["reference_share"] == 0.25
    )  # of about 1,500 rows
    kept = released(
        tmp_path / "unit",
        source,
        privacy__unit=unit,
        mechanism__reference=CHAIN,
        mechanism__channel="optimal",
    )
    assert kept.groupby("user").size().max() == 9
    card = read_card(tmp_path / "unit")
    assert card["mechanism"]["reference_share"] == 1.0
    assert card["accounting"]["epsilon_exact"] <= 1.5
    assert card["accounting"]["rows_per_unit"] == 9


@pytest.mark.parametrize("with_unit", [False, True])
def test_a_public_table_protects_every_row(with_unit, tmp_path):
    source, public = (
        written(tmp_path / "in", people()),
        written(tmp_path / "public", people(seed=9), 2),
    )
    changed = {"privacy__unit": {"column": "user", "max_rows": 10_000}} if with_unit else {}
    kept = released(
        tmp_path / "job",
        source,
        mechanism__reference={"kind": "chain", "path": str(public), "by": "user"},
        **changed,
    )
    assert len(kept) == 6000
    assert within(kept) > 0.95
    assert (kept[kept["user"] % 2 == 0]["a"] == 0).mean() > 0.7
    card = read_card(tmp_path / "job")
    assert card["guarantee"]["unprotected"]["fraction"] == 0
    assert str(tmp_path) not in json.dumps(card)


# ---- what is said


def test_the_plan_and_the_card_say_what_is_promised_and_what_is_republished(tmp_path):
    source = lake(tmp_path / "in", [700, 900])
    made = write_job(tmp_path / "job", source, tmp_path / "out", mechanism__reference=GROUPED)
    planned = plan_job(load(made))
    assert planned.warnings[0].startswith("ε = 4 is large")
    assert "about 95 % of the records appear in the release" in planned.warnings[1]
    assert "2 or more reference rows" in planned.warnings[2]
    assert "levels and atoms exactly as they are" in planned.guarantee
    assert [stage.split(":")[0] for stage in planned.stages] == ["survey", "fit", "write", "commit"]
    assert "columns in random order" in planned.stages[1]
    assert planned.released_rows == 1200
    run_here(made)
    card = read_card(tmp_path)
    mechanism = card["mechanism"]
    assert mechanism["columns"] == "chain"
    assert mechanism["joint"].startswith("all of it")
    assert list(planned.warnings)[1:3] == mechanism["warnings"]
    assert "almost nothing of genre" in planned.warnings[3]
    assert "no ε covers them" in card["guarantee"]["unprotected"]["who"]
    assert card["guarantee"]["unprotected"]["fraction"] == 0.25
    assert card["accounting"]["epsilon_exact"] <= 4.0


def test_an_audit_looks_at_the_noise_of_ranks(tmp_path):
    source = lake(tmp_path / "in", [700])
    laplace, best = (
        write_job(
            tmp_path / channel,
            source,
            tmp_path / "out",
            mechanism__reference=CHAIN,
            mechanism__channel=channel,
        )
        for channel in ("laplace", "optimal")
    )
    audited = [audit_job(load(laplace)), audit_job(load(best))]
    run_here(best)
    audited.append(audit_job(load(best)))
    for found in audited:
        assert found["sound"] is True
        assert all(
            0.99 < column["epsilon_exact"] / column["claimed"] <= 1
            for column in found["columns"].values()
        )
    assert [
        found["columns"]["age"]["reference"] == "the released channel" for found in audited
    ] == [False, False, True]


# ---- kills


@pytest.mark.parametrize("point", ["surveyed", "some-shards"])
def test_a_killed_run_goes_on_to_the_same_bytes(point, drivers, tmp_path):
    """With groups, a random order and a sample of the hold-out, which the contract's chain has not."""
    source = lake(tmp_path / "in", [150, 90, 1700, 40])
    quiet, made = (
        write_job(tmp_path / name, source, tmp_path / name / "out", mechanism__reference=GROUPED)
        for name in ("quiet", "killed")
    )
    run_here(quiet)
    assert drivers.run("run", made, point=point)[0] == -signal.SIGKILL
    assert not (tmp_path / "killed" / "out").exists()
    run_here(made)
    assert digests(tmp_path / "killed" / "out") == digests(tmp_path / "quiet" / "out")
    assert not hidden(tmp_path / "killed" / "out").exists()


# ---- bad input

NULLS = table(userId=pa.array([None if row == 77 else row % 50 for row in range(200)], pa.int64()))
LISTS = table(userId=pa.array([[row] for row in range(200)]))
WITHOUT_TYPE = COLUMNS | {"userId": {"role": "keep"}}
BY_USER = {"by": "userId"}

# what the reference has beside CHAIN, what else the job changes, and what is said; found in the job and its schema alone
REFUSED = {
    "groups by a private column": (
        {"by": "rating"},
        {},
        r"mechanism\.reference\.by 'rating': the groups' column must be kept",
    ),
    "groups by a dropped column": (
        {"by": "note"},
        {},
        r"mechanism\.reference\.by 'note': the groups' column must be kept",
    ),
    "groups by no column": (
        {"by": "usr"},
        {},
        r"mechanism\.reference\.by 'usr': the groups' column must be kept",
    ),
    "groups by the unit": (
        BY_USER,
        {"privacy__unit": {"column": "userId", "max_rows": 3}},
        r"reference\.by 'userId': units are held out as a whole",
    ),
    "another column in the order": (
        {"order": ["rating", "note"]},
        {},
        r"mechanism\.reference\.order: must name each privatised column once",
    ),
    "an order that lacks a column": (
        {"order": ["rating"]},
        {},
        r"mechanism\.reference\.order: must name each",
    ),
    "a column twice in the order": (
        {"order": ["rating", "price", "rating"]},
        {},
        r"mechanism\.reference\.order: must name each",
    ),
    "an order that is a word": ({"order": "reverse"}, {}, r"mechanism\.reference\.order"),
    "a hold-out and a path": (
        {"path": "data"},
        {},
        r"from a hold-out \(fraction\) or from a public table \(path\), not from both",
    ),
    "neither a hold-out nor a path": (
        {"fraction": None},
        {},
        r"reference\.path: the reference rows come from a public table, .*or mechanism\.reference\.fr",
    ),
    "groups of a row at least": (
        {"min_rows": 1},
        {},
        r"mechanism\.reference\.min_rows: .*at least 2",
    ),
    "hardly any records": (
        {"max_records": 3},
        {},
        r"mechanism\.reference\.max_records: .*at least 16",
    ),
    "too large an ε": (
        {},
        {"privacy__epsilon": 50.0},
        r"column 'rating': its part of ε is 25, but rank noise needs an ε in .*; change privacy\.epsilon",
    ),
    "a δ": (
        {},
        {"privacy__delta": 1e-9},
        r"privacy\.delta: distribution-invariant privatisation spends no δ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_is_refused_in_one_line(name, tmp_path):
    reference, changed, says = REFUSED[name]
    path = write_job(
        tmp_path,
        tmp_path / "in",
        tmp_path / "out",
        schema=COLUMNS,
        mechanism__reference=CHAIN | reference,
        **changed,
    )
    with pytest.raises(dpdask.SpecError, match=says) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def _case(name, code, says, rows=None, columns=COLUMNS, **reference):
    parts = None if rows is None else {"a.parquet": rows}
    return Case(
        name=name,
        code=code,
        says=says,
        prepare=lambda folder: bad_job(
            folder, parts, columns=columns, mechanism__reference=CHAIN | reference
        ),
    )


def _public(name, code, says, public):
    def prepare(folder):
        words = bad_job(
            folder, mechanism__reference={"kind": "chain", "path": "public.parquet", "by": "userId"}
        )
        pq.write_table(public, folder / "public.parquet")
        return words

    return Case(name=name, code=code, says=says, prepare=prepare)


CASES = (
    _case(
        "nulls in the groups' column",
        65,
        r"^dpdask: column 'userId': holds a null, and the group of every",
        NULLS,
        **BY_USER,
    ),
    _case(
        "groups that are lists",
        64,
        r"reference\.by 'userId': the groups' column must be a kept column of plain",
        LISTS,
        WITHOUT_TYPE,
        **BY_USER,
    ),
    _case(
        "groups that are lists, declared as numbers",
        65,
        r"column 'userId': declared as int64, but",
        LISTS,
        **BY_USER,
    ),
    _case(
        "a hold-out of no row",
        65,
        r"mechanism\.reference: the reference has fewer than 2 rows; enlarge",
        fraction=1e-9,
    ),
    _case("a hold-out of all rows", 65, r"no row would be released", table(3), fraction=1 - 1e-9),
    _case(
        "the private table as the public one",
        64,
        r"reference\.path: the public table contains the private one or lies",
        fraction=None,
        path="data",
    ),
    _public(
        "a public table without the groups' column",
        65,
        r"'userId': the public reference needs this column, once, with",
        table(userId=None),
    ),
    _public(
        "groups of another type",
        65,
        r"column 'userId'",
        table(userId=pa.array([str(row) for row in range(200)])),
    ),
    _case(
        "columns of one value",
        0,
        "",
        table(rating=pa.array([2.0] * 200), price=pa.array([50.0] * 200)),
    ),
    _case("one row per group", 0, "", table(userId=pa.array(np.arange(200))), **BY_USER),
)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_what_is_wrong_is_said_in_one_line_and_what_is_odd_works(case, tmp_path):
    check_case(case, tmp_path)


# ---- frames


def dip(reference, **changed):
    given = {"epsilon": 1.5, "insecure_seed": 7, **changed}
    return dpdask.DIP(dpdask.Schema.from_dict({"columns": SCHEMA}), reference=reference, **given)


WARNED = pytest.mark.filterwarnings("ignore:the chain republishes", "ignore:each value of")


@WARNED
@pytest.mark.parametrize(("by", "channel"), [("user", "laplace"), (None, "optimal")])
def test_frames(by, channel):
    rows = people()
    with dask.config.set(scheduler="synchronous"):
        for frame in (rows, dd.from_pandas(rows, npartitions=4)):
            release = dip(dpdask.Chain(fraction=0.25, by=by), channel=channel).fit(frame)
            lazy = release.transform(frame)
            found = lazy if isinstance(lazy, pd.DataFrame) else lazy.compute()
            again = release.transform(frame)
            pd.testing.assert_frame_equal(
                found, again if isinstance(again, pd.DataFrame) else again.compute()
            )
            assert list(found.columns) == list(SCHEMA)
            assert (found["user"] == rows.loc[found.index, "user"]).all()
            assert found["user"].dtype == rows["user"].dtype
            assert 4200 < len(found) < 4800
            assert within(found) > 0.95
            assert bool((found[found["user"] % 2 == 0]["a"] == 0).mean() > 0.7) is (by is not None)
            assert release.card["mechanism"]["columns"] == "chain"
            release.close()


def test_a_frame_is_warned_of_what_is_republished():
    with (
        dask.config.set(scheduler="synchronous"),
        pytest.warns(UserWarning, match="the chain republishes hold-out records"),
    ):
        dip(dpdask.Chain(fraction=0.25)).fit(people()).close()


@WARNED
def test_a_public_frame():
    with dask.config.set(scheduler="synchronous"):
        release = dip(dpdask.Chain(by="user"), channel="optimal").fit(people(seed=9))
        rows = people()
        found = release.transform(dd.from_pandas(rows, npartitions=3)).compute()
        with pytest.raises(dpdask.SpecError, match="given as the public table"):
            release.transform(people(seed=9))
    assert len(found) == len(rows)
    assert within(found) > 0.95
    assert release.card["guarantee"]["protected"]["who"] == "the values of all rows"


@WARNED
def test_frames_that_cannot_be_are_refused():
    for reference, more, says in (
        (
            dpdask.Chain(fraction=0.25, order=("a", "b")),
            {},
            r"order.*must name each privatised column once",
        ),
        (dpdask.Chain(fraction=0.25, by="a"), {}, "the groups' column must be kept"),
        (dpdask.Chain(path="public.parquet"), {}, "a path is for jobs only"),
        (
            dpdask.Chain(),
            {"unit": dpdask.UnitColumn(column="user", max_rows=2)},
            "no units to bound",
        ),
    ):
        with pytest.raises(dpdask.SpecError, match=says):
            dip(reference, **more)
    with pytest.raises(dpdask.SpecError, match=r"^Chain: .*not from both"):
        dpdask.Chain(fraction=0.25, path="public.parquet")
    with (
        dask.config.set(scheduler="synchronous"),
        pytest.raises(dpdask.DataError, match="group of every row must be known"),
    ):
        dip(dpdask.Chain(fraction=0.25, by="user")).fit(
            people().astype({"user": "Int64"}).mask(people()["a"] == 2)
        )
    release = dip(dpdask.Chain(fraction=0.25)).fit(people())
    with pytest.raises(dpdask.SpecError, match="only the frame it was fitted on"):
        release.transform(people(seed=4))
