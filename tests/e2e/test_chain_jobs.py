"""The reference `chain` end to end: its joint distribution, its groups, kills, what its card and plan say, bad input, and frames."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from e2e.bad_input import COLUMNS, Case, command, table
from e2e.bad_input import job as bad_job
from e2e.helpers import digests, hidden, lake, load, run_here, write_job
from e2e.test_bad_input import check_case, ids
from faults.drivers import Drivers
from scipy import stats

import dpdask
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.streams import RunKey

ALPHA = 1e-9
CHAIN: dict[str, Any] = {"kind": "chain", "fraction": 0.25}
GROUPED: dict[str, Any] = CHAIN | {
    "by": "userId",
    "min_rows": 2,
    "order": "random",
    "max_records": 500,
}
SCHEMA: dict[str, Any] = {
    "user": {"role": "keep"},
    "a": {"role": "privatise", "kind": "discrete", "levels": [0, 1, 2]},
    "b": {"role": "privatise", "kind": "categorical", "levels": ["x", "y"], "nulls": "level"},
    "c": {"role": "privatise", "kind": "continuous"},
}


def people(n_rows: int = 6000, seed: int = 3) -> pd.DataFrame:
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


def written(folder: Path, rows: pd.DataFrame, n_files: int = 3) -> Path:
    folder.mkdir(parents=True)
    for number, part in enumerate(np.array_split(np.arange(len(rows)), n_files)):
        pq.write_table(
            pa.Table.from_pandas(rows.iloc[part], preserve_index=False),
            folder / f"{number}.parquet",
            row_group_size=700,
        )
    return folder


def released(folder: Path, source: Path, **changed: Any) -> pd.DataFrame:
    run_here(
        write_job(folder, source, folder / "out", schema=SCHEMA, privacy__epsilon=1.5, **changed)
    )
    return pads.dataset(folder / "out", exclude_invalid_files=False).to_table().to_pandas()


def joint(rows: pd.DataFrame, *names: str) -> pd.Series:
    rounded = rows.assign(b=rows["b"].fillna("null"), c=np.round(rows["c"]).clip(0, 2).astype(int))
    return rounded.groupby(list(names)).size()


def same_distribution(one: pd.DataFrame, other: pd.DataFrame, *names: str) -> float:
    counted = pd.concat([joint(one, *names), joint(other, *names)], axis=1).fillna(0)
    return float(stats.chi2_contingency(counted.loc[counted.sum(axis=1) > 40].T).pvalue)


def within(rows: pd.DataFrame) -> float:
    """How strongly c follows a."""
    return float(np.corrcoef(rows["a"], rows["c"])[0, 1])


@pytest.mark.parametrize("channel", ["laplace", "optimal"])
def test_the_joint_distribution_survives_where_margins_lose_it(
    channel: str, tmp_path: Path
) -> None:
    source = written(tmp_path / "in", people())
    kept = released(
        tmp_path / "chain", source, mechanism__reference=CHAIN, mechanism__channel=channel
    )
    lost = released(
        tmp_path / "holdout",
        source,
        mechanism__reference={"kind": "holdout", "fraction": 0.25},
        mechanism__channel=channel,
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


def test_groups_keep_their_own_distribution(tmp_path: Path) -> None:
    source = written(tmp_path / "in", people())
    kept = released(tmp_path / "by", source, mechanism__reference=CHAIN | {"by": "user"})
    even = kept[kept["user"] % 2 == 0]
    assert (even["a"] == 0).mean() > 0.7
    assert (kept[kept["user"] % 2 == 1]["a"] == 2).mean() > 0.7
    pooled = released(
        tmp_path / "none", source, mechanism__reference=CHAIN | {"by": "user", "min_rows": 100_000}
    )
    assert 0.3 < (pooled[pooled["user"] % 2 == 0]["a"] == 0).mean() < 0.68
    card = json.loads((tmp_path / "none" / "out" / "_dpdask" / "release.json").read_text())
    assert card["mechanism"]["by"] == {
        "column": "user",
        "min_rows": 100_000,
        "pooled_percent_of_reference_groups": 100,
        "pooled_percent_of_reference_rows": 100,
    }


@pytest.mark.parametrize("of", ["text", "float", "dictionary", "bool"])
def test_groups_of_any_type(of: str, tmp_path: Path) -> None:
    rows = people()
    user = pa.array(rows["user"])
    named = {
        "text": pa.array([f"user {number}" for number in rows["user"]]),
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


def test_the_order_of_columns_changes_the_rows_and_not_the_distribution(tmp_path: Path) -> None:
    source = written(tmp_path / "in", people())
    found = {}
    for name, order in {"none": None, "other": ["c", "b", "a"], "random": "random"}.items():
        reference = CHAIN | ({"order": order} if order else {})
        found[name] = released(tmp_path / name, source, mechanism__reference=reference)
        card = json.loads((tmp_path / name / "out" / "_dpdask" / "release.json").read_text())
        assert sorted(card["mechanism"]["order"]) == ["a", "b", "c"]
        if name != "random":
            assert card["mechanism"]["order"] == (order or ["a", "b", "c"])
    assert not found["none"].equals(found["other"])
    for one, other in (("none", "other"), ("none", "random")):
        assert same_distribution(found[one], found[other], "a", "b") > ALPHA
        assert same_distribution(found[one], found[other], "b", "c") > ALPHA


def test_a_random_order_is_drawn_from_the_key() -> None:
    chain = dpdask.Chain(fraction=0.25, order="random")
    names = tuple("abcdef")
    orders = {chain.order_columns(names, RunKey.insecure(seed)) for seed in range(20)}
    assert len(orders) > 15
    assert chain.order_columns(names, RunKey.insecure(3)) == chain.order_columns(
        names, RunKey.insecure(3)
    )


def test_a_large_hold_out_is_sampled_and_the_card_says_so(tmp_path: Path) -> None:
    source = written(tmp_path / "in", people())
    kept = released(tmp_path / "few", source, mechanism__reference=CHAIN | {"max_records": 400})
    card = json.loads((tmp_path / "few" / "out" / "_dpdask" / "release.json").read_text())
    assert card["mechanism"]["reference_share"] == 0.25  # of about 1,500 rows
    assert within(kept) > 0.9
    released(tmp_path / "all", source, mechanism__reference=CHAIN)
    card = json.loads((tmp_path / "all" / "out" / "_dpdask" / "release.json").read_text())
    assert card["mechanism"]["reference_share"] == 1.0


def test_a_unit_is_held_out_whole_and_bounded(tmp_path: Path) -> None:
    source = written(tmp_path / "in", people())
    unit = {"column": "user", "max_rows": 9}
    kept = released(
        tmp_path / "unit",
        source,
        privacy__unit=unit,
        mechanism__reference=CHAIN,
        mechanism__channel="optimal",
    )
    assert kept.groupby("user").size().max() == 9
    card = json.loads((tmp_path / "unit" / "out" / "_dpdask" / "release.json").read_text())
    assert card["accounting"]["epsilon_exact"] <= 1.5
    assert card["accounting"]["rows_per_unit"] == 9


@pytest.mark.parametrize("with_unit", [False, True])
def test_a_public_table_protects_every_row(with_unit: bool, tmp_path: Path) -> None:
    source, public = (
        written(tmp_path / "in", people()),
        written(tmp_path / "public", people(seed=9), 2),
    )
    changed = {"privacy__unit": {"column": "user", "max_rows": 10_000}} if with_unit else {}
    reference = {"kind": "chain", "path": str(public), "by": "user"}
    kept = released(
        tmp_path / "job",
        source,
        mechanism__reference=reference,
        mechanism__channel="optimal",
        **changed,
    )
    assert len(kept) == 6000
    assert within(kept) > 0.95
    assert (kept[kept["user"] % 2 == 0]["a"] == 0).mean() > 0.7
    card = json.loads((tmp_path / "job" / "out" / "_dpdask" / "release.json").read_text())
    assert card["guarantee"]["unprotected"]["fraction"] == 0
    assert str(tmp_path) not in json.dumps(card)


# ---- what is said


def test_the_plan_and_the_card_say_what_is_promised_and_what_is_republished(tmp_path: Path) -> None:
    source = lake(tmp_path / "in", [700, 900])
    made = write_job(tmp_path / "job", source, tmp_path / "out", mechanism__reference=GROUPED)
    planned = plan_job(load(made))
    assert "about 95 % of the records appear in the release" in planned.warnings[0]
    assert "2 or more reference rows" in planned.warnings[1]
    assert "levels and atoms exactly as they are" in planned.guarantee
    assert [stage.split(":")[0] for stage in planned.stages] == ["survey", "fit", "write", "commit"]
    assert "columns in random order" in planned.stages[1]
    assert planned.released_rows == 1200
    run_here(made)
    card = json.loads((tmp_path / "out" / "_dpdask" / "release.json").read_text())
    mechanism = card["mechanism"]
    assert mechanism["columns"] == "chain"
    assert mechanism["joint"].startswith("all of it")
    assert list(planned.warnings)[:2] == mechanism["warnings"]
    assert "almost nothing of genre" in planned.warnings[2]
    assert "no ε covers them" in card["guarantee"]["unprotected"]["who"]
    assert card["guarantee"]["unprotected"]["fraction"] == 0.25
    assert card["accounting"]["epsilon_exact"] <= 4.0
    run_here(write_job(tmp_path / "other", source, tmp_path / "margins"))
    other = json.loads((tmp_path / "margins" / "_dpdask" / "release.json").read_text())["mechanism"]
    assert (other["columns"], other["joint"][:7]) == ("independent", "margins")


@pytest.mark.parametrize("channel", ["laplace", "optimal"])
def test_an_audit_looks_at_the_noise_of_ranks(channel: str, tmp_path: Path) -> None:
    made = load(
        write_job(
            tmp_path / "job",
            lake(tmp_path / "in", [700]),
            tmp_path / "out",
            mechanism__reference=CHAIN,
            mechanism__channel=channel,
        )
    )
    for _ in range(2):
        found = audit_job(made)
        assert found["sound"] is True
        assert all(
            0.99 < column["epsilon_exact"] / column["claimed"] <= 1
            for column in found["columns"].values()
        )
        run_here(tmp_path / "job" / "job.yaml")
    assert (found["columns"]["age"]["reference"] == "the released channel") is (
        channel == "optimal"
    )


# ---- kills


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lake(tmp_path_factory.mktemp("chain") / "in", [150, 90, 1700, 40, 300, 700])


@pytest.fixture(scope="module")
def quiet(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("quiet")
    run_here(write_job(base, source, base / "out", mechanism__reference=GROUPED))
    return digests(base / "out")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "point",
    [
        "surveying",
        "surveyed",
        "release-written",
        "fitted",
        "shard-half-written",
        "some-shards",
        "staged",
    ],
)
def test_a_killed_run_goes_on_to_the_same_bytes(
    point: str, source: Path, quiet: dict[str, str], drivers: Drivers, tmp_path: Path
) -> None:
    made = write_job(tmp_path / "job", source, tmp_path / "out", mechanism__reference=GROUPED)
    assert drivers.run("run", made, point=point)[0] == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    run_here(made)
    assert digests(tmp_path / "out") == quiet
    assert not hidden(tmp_path / "out").exists()


# ---- bad input


def _case(
    name: str, code: int, says: str, parts: Any = None, columns: Any = COLUMNS, **changed: Any
) -> Case:
    reference = {"mechanism__reference": CHAIN | changed.pop("chain", {}), **changed}
    return Case(
        name=name,
        code=code,
        says=says,
        prepare=lambda folder: bad_job(folder, parts, columns=columns, **reference),
    )


def _public(folder: Path, public: pa.Table) -> list[str]:
    words = bad_job(
        folder, mechanism__reference={"kind": "chain", "path": "public.parquet", "by": "userId"}
    )
    pq.write_table(public, folder / "public.parquet")
    return words


_NULLS = {
    "a.parquet": table(
        userId=pa.array([None if row == 77 else row % 50 for row in range(200)], pa.int64())
    )
}
_LISTS = {"a.parquet": table(userId=pa.array([[row] for row in range(200)]))}
_USERS = {"a.parquet": table(userId=pa.array(np.arange(200)))}
_ONE_VALUE = {"a.parquet": table(rating=pa.array([2.0] * 200), price=pa.array([50.0] * 200))}

CASES = (
    _case(
        "chain: weights that name another column",
        64,
        r"weights must name exactly",
        mechanism__weights={"rating": 1.0, "note": 1.0},
    ),
    _case(
        "chain: a weight of 0",
        64,
        r"weights must be positive",
        mechanism__weights={"rating": 1.0, "price": 0.0},
    ),
    _case(
        "chain: nulls in the groups' column",
        65,
        r"^dpdask: column 'userId': holds a null, and the group of every",
        _NULLS,
        chain={"by": "userId"},
    ),
    _case(
        "chain: groups that are lists",
        64,
        r"mechanism\.reference\.by 'userId': the groups' column must be a kept column of plain",
        _LISTS,
        COLUMNS | {"userId": {"role": "keep"}},
        chain={"by": "userId"},
    ),
    _case(
        "chain: groups that are lists, declared as numbers",
        65,
        r"column 'userId': declared as int64, but",
        _LISTS,
        chain={"by": "userId"},
    ),
    _case(
        "chain: groups by a private column",
        64,
        r"mechanism\.reference\.by 'rating': the groups' column must be kept",
        chain={"by": "rating"},
    ),
    _case(
        "chain: groups by a dropped column",
        64,
        r"mechanism\.reference\.by 'note': the groups' column must be kept",
        chain={"by": "note"},
    ),
    _case(
        "chain: groups by no column",
        64,
        r"mechanism\.reference\.by 'usr': the groups' column must be kept",
        chain={"by": "usr"},
    ),
    _case(
        "chain: groups by the unit",
        64,
        r"mechanism\.reference\.by 'userId': units are held out as a whole",
        chain={"by": "userId"},
        privacy__unit={"column": "userId", "max_rows": 3},
    ),
    _case(
        "chain: an order with an unknown column",
        64,
        r"mechanism\.reference\.order: must name each privatised column once",
        chain={"order": ["rating", "note"]},
    ),
    _case(
        "chain: an order that lacks a column",
        64,
        r"mechanism\.reference\.order: must name each",
        chain={"order": ["rating"]},
    ),
    _case(
        "chain: a column twice in the order",
        64,
        r"mechanism\.reference\.order: must name each",
        chain={"order": ["rating", "price", "rating"]},
    ),
    _case(
        "chain: an order that is a word",
        64,
        r"mechanism\.reference\.order",
        chain={"order": "reverse"},
    ),
    _case(
        "chain: a hold-out and a path",
        64,
        r"from a hold-out \(fraction\) or from a public table \(path\), not from both",
        chain={"path": "data"},
    ),
    _case(
        "chain: neither a hold-out nor a path",
        64,
        r"mechanism\.reference\.path: the reference rows come from a public table, .*; add it, or mechanism\.reference\.fraction",
        chain={"fraction": None},
    ),
    _case(
        "chain: groups of a row at least",
        64,
        r"mechanism\.reference\.min_rows: .*at least 2",
        chain={"min_rows": 1},
    ),
    _case(
        "chain: hardly any records",
        64,
        r"mechanism\.reference\.max_records: .*at least 16",
        chain={"max_records": 3},
    ),
    _case(
        "chain: a cost of values",
        64,
        r"mechanism\.cost\.rating: the cost of a column in a chain is always rank",
        mechanism__channel="optimal",
        mechanism__cost={"rating": "value"},
    ),
    _case(
        "chain: too large an ε",
        64,
        r"column 'rating': its part of ε is 25, but rank noise needs an ε in .*; change privacy\.epsilon",
        privacy__epsilon=50.0,
    ),
    _case(
        "chain: a hold-out of no row",
        65,
        r"mechanism\.reference: the reference has fewer than 2 rows; enlarge",
        chain={"fraction": 1e-9},
    ),
    _case(
        "chain: a hold-out of all rows",
        65,
        r"no row would be released",
        {"a.parquet": table(3)},
        chain={"fraction": 1 - 1e-9},
    ),
    _case(
        "chain: a δ",
        64,
        r"privacy\.delta: distribution-invariant privatisation spends no δ",
        privacy__delta=1e-9,
    ),
    Case(
        name="chain: a public table without the groups' column",
        code=65,
        says=r"column 'userId': the public reference needs this column, once, with the input's type",
        prepare=lambda folder: _public(folder, table(userId=None)),
    ),
    Case(
        name="chain: a public table whose groups are of another type",
        code=65,
        says=r"column 'userId': .*with the input's type|column 'userId'",
        prepare=lambda folder: _public(
            folder, table(userId=pa.array([str(row) for row in range(200)]))
        ),
    ),
    _case(
        "chain: the private table as the public one",
        64,
        r"mechanism\.reference\.path: the public table contains the private one or lies inside it",
        chain={"fraction": None, "path": "data"},
    ),
    Case(
        name="chain: a public table",
        code=0,
        says="",
        prepare=lambda folder: _public(folder, table(seed=5)),
    ),
    _case("chain: columns of one value", 0, "", _ONE_VALUE),
    _case("chain: one row per group", 0, "", _USERS, chain={"by": "userId"}),
    _case("chain: a weight each", 0, "", mechanism__weights={"rating": 1.0, "price": 3.0}),
    _case(
        "chain: a cost of ranks",
        0,
        "",
        mechanism__channel="optimal",
        mechanism__cost={"rating": "rank"},
    ),
)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_what_is_wrong_is_said_in_one_line_and_what_is_odd_works(
    case: Case, tmp_path: Path
) -> None:
    check_case(case, tmp_path)


def test_one_row_per_group_is_released_by_the_pooled_reference(tmp_path: Path) -> None:
    words = next(case for case in CASES if "one row per group" in case.name).prepare(tmp_path)
    ended = command(*words)
    assert ended.code == 0
    card = json.loads((tmp_path / "out" / "_dpdask" / "release.json").read_text())
    assert card["mechanism"]["by"]["pooled_percent_of_reference_groups"] == 100


def test_columns_of_one_value_stay_as_they_are(tmp_path: Path) -> None:
    words = next(case for case in CASES if "columns of one value" in case.name).prepare(tmp_path)
    assert command(*words).code == 0
    out = pads.dataset(tmp_path / "out", exclude_invalid_files=False).to_table().to_pandas()
    assert set(out["rating"]) == {2.0}
    assert (
        out["price"].between(49.0, 50.0).all()
    )  # a record stands for the gap below it: the next to nothing here, 1


# ---- frames


def dip(reference: Any, **changed: Any) -> dpdask.DIP:
    given = {"epsilon": 1.5, "insecure_seed": 7, **changed}
    return dpdask.DIP(dpdask.Schema.from_dict({"columns": SCHEMA}), reference=reference, **given)


WARNED = pytest.mark.filterwarnings("ignore:the chain republishes", "ignore:each value of")


@WARNED
@pytest.mark.parametrize("channel", ["laplace", "optimal"])
@pytest.mark.parametrize("by", [None, "user"])
def test_frames(by: str | None, channel: Any) -> None:
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


def test_a_frame_is_warned_of_what_is_republished() -> None:
    with (
        dask.config.set(scheduler="synchronous"),
        pytest.warns(UserWarning, match="the chain republishes hold-out records"),
    ):
        dip(dpdask.Chain(fraction=0.25)).fit(people()).close()


@WARNED
def test_a_public_frame() -> None:
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
def test_frames_that_cannot_be_are_refused() -> None:
    with pytest.raises(dpdask.SpecError, match=r"order.*must name each privatised column once"):
        dip(dpdask.Chain(fraction=0.25, order=("a", "b")))
    with pytest.raises(dpdask.SpecError, match="the groups' column must be kept"):
        dip(dpdask.Chain(fraction=0.25, by="a"))
    with pytest.raises(dpdask.SpecError, match="a path is for jobs only"):
        dip(dpdask.Chain(path="public.parquet"))
    with pytest.raises(dpdask.SpecError, match="always rank"):
        dip(dpdask.Chain(fraction=0.25), channel="optimal", cost={"a": "value"})
    with pytest.raises(dpdask.SpecError, match=r"`cost\.nope`: is not a privatised column"):
        dip(dpdask.Chain(fraction=0.25), channel="optimal", cost={"nope": "rank"})
    with pytest.raises(dpdask.SpecError, match=r"`cost\.a`: a cost belongs to the channel optimal"):
        dip(dpdask.Chain(fraction=0.25), cost={"a": "rank"})
    with pytest.raises(dpdask.SpecError, match=r"^Chain: .*not from both"):
        dpdask.Chain(fraction=0.25, path="public.parquet")
    with pytest.raises(dpdask.SpecError, match="no units to bound"):
        dip(dpdask.Chain(), unit=dpdask.UnitColumn(column="user", max_rows=2))
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
