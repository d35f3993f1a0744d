"""Noise belongs to (release, batch, partition): one frame to a batch, whatever frames hold and however they are built."""

from __future__ import annotations

import copy
import dataclasses
import multiprocessing
import threading
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import cloudpickle
import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from distributed import Client, LocalCluster
from scipy import stats

import dpdask

LEVELS = [1, 2, 3, 4, 5]
SCHEMA = dpdask.Schema.from_dict(
    {
        "columns": {
            "user": {"role": "keep"},
            "rating": {"role": "privatise", "kind": "discrete", "levels": LEVELS, "type": "int64"},
        }
    }
)
KNOWN = dpdask.Known(columns={"rating": {"probabilities": [0.2] * 5}})
DESIGN: dict[str, Any] = {"design": "case1", "anchors": {"name": "uniform", "loc": 0, "scale": 6}}
PERTURBED: dict[str, Any] = {
    "design": "interval-differential",
    "perturb": {"epsilon": 0.5, "reference": {"kind": "known", "probabilities": [0.2] * 5}},
    "of": DESIGN,
}
FITTED: list[dpdask.DIP] = [
    dpdask.DIP(SCHEMA, epsilon=1.0, reference=dpdask.Histogram()),
    dpdask.DIP(SCHEMA, epsilon=1.0, reference=dpdask.Tree()),
    dpdask.DIP(SCHEMA, epsilon=1.0, reference=dpdask.Holdout(fraction=0.25)),
    dpdask.DIP(
        SCHEMA, epsilon=1.0, reference=KNOWN, unit=dpdask.UnitColumn(column="user", max_rows=2)
    ),
    dpdask.DIP(SCHEMA, epsilon=1.0, reference=dpdask.Chain(fraction=0.25)),
]
IDS = ["histogram", "tree", "holdout", "unit", "chain"]


def rows(n: int = 4000, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"user": np.arange(n), "rating": rng.choice(LEVELS, n)})


def public_rows() -> pd.DataFrame:
    return rows(500, seed=9)


Transform = Callable[..., Any]


def any_frame(kind: str) -> tuple[Any, Transform]:
    """A release that any frame may come to, and how frames come to it."""
    if kind in ("known", "public", "chain"):
        reference: Any = {"known": KNOWN, "public": dpdask.Public(), "chain": dpdask.Chain()}[kind]
        release = dpdask.DIP(SCHEMA, epsilon=0.5, reference=reference).fit(public_rows())
        return release, release.transform
    release = dpdask.IntervalMechanism(
        SCHEMA, columns={"rating": DESIGN if kind == "interval" else PERTURBED}
    ).fit(public_rows())
    return release, release.transform


KINDS = ["known", "public", "chain", "interval", "perturbed"]


def values(frame: Any) -> list[tuple[Any, ...]]:
    """The released private columns, as rows in order."""
    found = frame.compute(scheduler="synchronous") if isinstance(frame, dd.DataFrame) else frame
    return list(
        found[[name for name in found.columns if name != "user"]].itertuples(index=False, name=None)
    )


def views(frame: dd.DataFrame, table: pd.DataFrame) -> dict[str, Any]:
    """The same rows, as other frames."""
    return {
        "persist": frame.persist(scheduler="synchronous"),
        "repartition": frame.repartition(npartitions=2),
        "partitions": frame.partitions[0:4],
        "filter": frame[frame["user"] >= 0],
        "assign": frame.assign(rating=frame["rating"]),
        "columns": frame[["user", "rating"]],
        "copy": frame.copy(),
        "from_pandas": dd.from_pandas(table, npartitions=4),
        "pandas": table,
        "pandas copy": table.copy(),
        "pandas sorted": table.sort_values("user", ascending=False, ignore_index=True),
    }


@pytest.mark.filterwarnings("ignore:the chain republishes")
@pytest.mark.parametrize("dip", FITTED, ids=IDS)
def test_a_fitted_release_covers_one_frame_object(dip: dpdask.DIP) -> None:
    table = rows()
    frame = dd.from_pandas(table, npartitions=4)
    release = dip.fit(frame)
    lazy = release.transform(frame)
    first = lazy.compute(scheduler="synchronous")
    pd.testing.assert_frame_equal(release.transform(frame).compute(scheduler="threads"), first)
    for name, view in views(frame, table).items():
        with pytest.raises(
            dpdask.SpecError,
            match="covers only the frame it was fitted on, the same Python object; persist, filter or sort before",
        ):
            pytest.fail(f"{name}: {release.transform(view)}")
    for each in (frame, table):
        with pytest.raises(
            dpdask.SpecError,
            match="covers only the frame it was fitted on, and has no batches; leave `batch` out",
        ):
            release.transform(each, batch="2026-11")
    assert "batches" not in release.card


@pytest.mark.filterwarnings("ignore:the chain republishes")
@pytest.mark.parametrize("dip", FITTED, ids=IDS)
def test_a_fitted_pandas_frame_is_one_object_with_its_rows(dip: dpdask.DIP) -> None:
    table = rows()
    release = dip.fit(table)
    pd.testing.assert_frame_equal(release.transform(table), release.transform(table))
    for view in (
        table.copy(),
        table.head(100),
        table[["user", "rating"]],
        dd.from_pandas(table, npartitions=1),
    ):
        with pytest.raises(dpdask.SpecError, match="covers only the frame it was fitted on"):
            release.transform(view)
    table.loc[0, "rating"] = 6 - table.loc[0, "rating"] if table.loc[0, "rating"] != 3 else 1
    with pytest.raises(dpdask.DataError, match="rows changed since they were first read"):
        release.transform(table)


@pytest.mark.parametrize("kind", KINDS)
def test_frames_without_a_name_are_one_frame(kind: str) -> None:
    _, transform = any_frame(kind)
    table = rows()
    frame = dd.from_pandas(table, npartitions=4)
    first = values(transform(frame))
    assert values(transform(frame)) == first
    for name, view in views(frame, table).items():
        with pytest.raises(
            dpdask.SpecError,
            match=r"another frame was given before, .* name another batch for this one",
        ):
            pytest.fail(f"{name}: {transform(view)}")


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_equal_rows_have_independent_noise(kind: str) -> None:
    """A frame of one value alone: what is released is noise, which must neither repeat nor follow from another batch's."""
    _, transform = any_frame(kind)
    one = [
        values(transform(pd.DataFrame({"user": 0, "rating": [5] * 2000}), batch=f"{number}"))
        for number in range(2)
    ]
    codes = [pd.factorize(pd.Series(found))[0] for found in one]
    table = np.asarray(pd.crosstab(codes[0] % 7, codes[1] % 7))
    assert one[0] != one[1]
    assert stats.chi2_contingency(table).pvalue > 1e-9
    same = np.asarray(pd.crosstab(codes[0] % 7, codes[0] % 7))
    assert stats.chi2_contingency(same).pvalue < 1e-9  # the test would see noise that repeats


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_records_one_by_one_are_not_a_map_from_values_to_values(kind: str) -> None:
    _, transform = any_frame(kind)
    found = [
        values(transform(pd.DataFrame({"user": [0], "rating": [5]}), batch=f"{number}"))[0]
        for number in range(31)
    ]
    assert len(set(found)) > 1  # by chance alike: below 0.5 ** 30, a billionth
    lazy = [
        dd.from_pandas(pd.DataFrame({"user": [0], "rating": [5]}), npartitions=1) for _ in range(31)
    ]
    found = [
        values(transform(frame, batch=f"lazy {number}"))[0] for number, frame in enumerate(lazy)
    ]
    assert len(set(found)) > 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_one_frame_with_its_rows(kind: str) -> None:
    _, transform = any_frame(kind)
    table = rows(300)
    first = values(transform(table, batch="2026-11"))
    assert values(transform(table, batch="2026-11")) == first
    other = dd.from_pandas(table, npartitions=2)
    for view in (table.copy(), other):
        with pytest.raises(
            dpdask.SpecError, match=r"^batch '2026-11': another frame was given before"
        ):
            transform(view, batch="2026-11")
    assert values(transform(table, batch="2026-12")) != first
    table["rating"] = 6 - table["rating"]
    with pytest.raises(dpdask.DataError, match="rows changed since they were first read"):
        transform(table, batch="2026-11")
    lazy = transform(other, batch="lazy")
    before = values(lazy)
    other["rating"] = 6 - other["rating"]
    with pytest.raises(dpdask.SpecError, match="changed in place"):
        transform(other, batch="lazy")
    assert values(lazy) == before


def test_a_stream_belongs_to_a_column_s_name() -> None:
    columns = {
        name: {"role": "privatise", "kind": "discrete", "levels": LEVELS} for name in ("a", "b")
    }
    made = dpdask.IntervalMechanism(
        dpdask.Schema.from_dict({"columns": columns}), columns=dict.fromkeys(columns, DESIGN)
    )
    table = pd.DataFrame({"a": rows(100)["rating"], "b": rows(100, seed=1)["rating"]})
    release = made.fit(table)
    release.transform(table)
    table.columns = ["b", "a"]
    with pytest.raises(
        dpdask.DataError, match="the columns or their types differ from those of the fitted frame"
    ):
        release.transform(table)
    table.insert(
        0, "a", table.pop("a")
    )  # the order of the fitted frame, and each column's values under the other's name
    with pytest.raises(dpdask.DataError, match="rows changed since they were first read"):
        release.transform(table)


BEYOND = 2**53  # from here on, a float holds every other whole number
CONTENTS: dict[
    str, tuple[dict[str, Any], Any, Any]
] = {  # of a private column: its domain, its values, and values that differ by little
    "int64[pyarrow]": (
        {"kind": "categorical", "levels": [BEYOND, BEYOND + 1]},
        [BEYOND, None, BEYOND],
        [BEYOND + 1, None, BEYOND],
    ),
    "uint64[pyarrow]": (
        {"kind": "categorical", "levels": [BEYOND, BEYOND + 1]},
        [BEYOND, None, BEYOND],
        [BEYOND + 1, None, BEYOND],
    ),
    "Int64": (
        {"kind": "categorical", "levels": [BEYOND, BEYOND + 1]},
        [BEYOND, None, BEYOND],
        [BEYOND + 1, None, BEYOND],
    ),
    "double[pyarrow]": (
        {"kind": "continuous", "bounds": [0, 1]},
        [0.5, None, 0.0],
        [0.5, 0.0, None],
    ),
    "object": ({"kind": "categorical", "levels": ["a", "b"]}, ["a", None, "b"], ["a", "b", None]),
    "string": (
        {"kind": "categorical", "levels": ["a", "b", "ab", ""]},
        ["ab", None, ""],
        ["a", None, "b"],
    ),
    "category": ({"kind": "categorical", "levels": ["a", "b"]}, ["a", None, "b"], ["a", None, "a"]),
}


@pytest.mark.parametrize("dtype", CONTENTS)
def test_the_noise_of_a_frame_meets_one_content_in_every_dtype(dtype: str) -> None:
    domain, values, others = CONTENTS[dtype]
    declared = dpdask.Schema.from_dict(
        {"columns": {"x": {"role": "privatise", "nulls": "level", **domain}}}
    )
    levels = len(domain.get("levels", []))
    known = (
        {"probabilities": [1 / (levels + 1)] * (levels + 1)}
        if levels
        else {"name": "uniform", "loc": 0, "scale": 1, "null": 0.2}
    )
    dip = dpdask.DIP(declared, epsilon=1.0, reference=dpdask.Known(columns={"x": known}))
    table = pd.DataFrame({"x": pd.Series(values * 20, dtype=dtype)})
    content = {"x": table["x"]}

    def read(_: int) -> pd.DataFrame:
        return pd.DataFrame(content)

    with dask.config.set({"dataframe.convert-string": False}):  # objects stay objects
        lazy = dd.from_map(read, [0], meta=table.head(0))
    with dask.config.set(scheduler="synchronous"), dip.fit(table) as release:
        for frame in (table, lazy):
            pd.testing.assert_frame_equal(
                *(
                    dask.compute(release.transform(frame, batch=str(type(frame))))[0]
                    for _ in range(2)
                )
            )
        table["x"] = content["x"] = pd.Series(others * 20, dtype=dtype)
        for frame in (table, lazy):
            with pytest.raises(dpdask.DataError, match="rows changed since they were first read"):
                dask.compute(release.transform(frame, batch=str(type(frame))))


def test_a_seal_sees_the_order_of_rows_whose_private_values_are_equal() -> None:
    """As of an unstable sort: a row in another place would meet another row's noise, though no private value moved."""
    declared = {
        "rating": {"role": "privatise", "kind": "discrete", "levels": LEVELS},
        "user": {"role": "keep"},
    }
    dip = dpdask.DIP(dpdask.Schema.from_dict({"columns": declared}), epsilon=1.0, reference=KNOWN)
    big = pd.Series([BEYOND + 1, BEYOND, None] * 10, dtype="int64[pyarrow]")
    objects = pd.Series([Decimal(1), "text", None] * 10, dtype=object)
    for users in (
        big,
        objects,
        big.astype("category"),
        pd.Series(pd.interval_range(0, 30)),
        pd.Series(range(30)),
    ):
        table = pd.DataFrame({"rating": [3] * 30, "user": users})
        for frame in (table, table.dropna(subset="user").set_index("user")):
            with dip.fit(frame) as release:
                release.transform(frame)
                order = [1, 0, *range(2, len(frame))]
                if frame is table:
                    frame["user"] = (
                        users.iloc[order].to_numpy()
                        if users.dtype == object
                        else users.iloc[order].array
                    )
                else:
                    frame.index = frame.index[order]
                with pytest.raises(
                    dpdask.DataError, match="rows changed since they were first read"
                ):
                    release.transform(frame)


@pytest.mark.parametrize(
    "unit", ["row", dpdask.UnitColumn(column="user", max_rows=2)], ids=["row", "person"]
)
@pytest.mark.parametrize("moved", ["index", "lists"])
def test_a_seal_sees_the_index_and_lists_whatever_the_unit_is(unit: Any, moved: str) -> None:
    """If two rows of one person swap them, both releases together would tell whether the private values are equal."""
    keep = {name: {"role": "keep"} for name in ("user", "id", "lists")}
    declared = {"rating": {"role": "privatise", "kind": "discrete", "levels": LEVELS}, **keep}
    table = pd.DataFrame(
        {"user": np.repeat(np.arange(20), 2), "rating": [3] * 40, "id": range(40)}
    ).set_index("id")
    lists = pd.array([[number] for number in range(40)], dtype=pd.ArrowDtype(pa.list_(pa.int64())))
    table["lists"] = lists
    order = np.arange(40).reshape(20, 2)[:, ::-1].ravel()  # within each person
    dip = dpdask.DIP(
        dpdask.Schema.from_dict({"columns": declared}),
        epsilon=1.0,
        reference=dpdask.Histogram(),
        unit=unit,
    )
    with dip.fit(table) as release:
        pd.testing.assert_frame_equal(release.transform(table), release.transform(table))
        if moved == "index":
            table.index = table.index[order]
        else:
            table["lists"] = lists.take(order)
        with pytest.raises(dpdask.DataError, match="rows changed since they were first read"):
            release.transform(table)


def test_kept_columns_of_lists_and_a_change_of_their_chunks_are_no_change() -> None:
    declared = {
        "rating": {"role": "privatise", "kind": "discrete", "levels": LEVELS},
        "lists": {"role": "keep"},
        "text": {"role": "keep"},
    }
    dip = dpdask.DIP(dpdask.Schema.from_dict({"columns": declared}), epsilon=1.0, reference=KNOWN)
    table = pd.DataFrame(
        {
            "rating": [1, 2] * 10,
            "lists": [["a"], None] * 10,
            "text": pd.Series(["a", None] * 10, dtype="string[pyarrow]"),
        }
    )
    with dip.fit(table) as release:
        first = release.transform(table)
        for name in ("rating", "text"):
            table[name] = pd.concat([table[name].iloc[:7], table[name].iloc[7:]])
        pd.testing.assert_frame_equal(release.transform(table), first)


@pytest.mark.parametrize("kind", KINDS)
def test_the_card_lists_the_batches_and_what_they_cost(kind: str) -> None:
    release, transform = any_frame(kind)
    assert release.card["batches"]["names"] == []
    one = release.card["guarantee"]["text"]
    tables = [rows(20, seed=seed) for seed in range(3)]
    for table, batch in zip(tables, ("b", None, "a"), strict=True):
        transform(table, batch=batch)
    transform(tables[0], batch="b")
    card = release.card
    assert card["batches"]["names"] == ["b", None, "a"]
    told = "narrow each other" if kind == "interval" else "a row in k batches is protected by k·ε"
    assert told in card["batches"]["text"]
    assert card["guarantee"]["text"] == f"{one} {card['batches']['text']}"


@pytest.mark.parametrize(
    "batch", ["", "  ", "a ", " a", "a\nb", "x" * 101, 7, b"bytes", "\ud800"], ids=repr
)
@pytest.mark.parametrize("kind", ["known", "interval"])
def test_a_batch_has_a_name(kind: str, batch: Any) -> None:
    release, transform = any_frame(kind)
    with pytest.raises(dpdask.SpecError, match="a text of 1 to 100 printable characters"):
        transform(rows(10), batch=batch)
    assert release.card["batches"]["names"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_meets_another_s_streams(kind: str) -> None:
    release, transform = any_frame(kind)
    table = rows(500)
    names = [None, "frame", "public table", "batch frame", "frame:0", "0"]
    found = [tuple(values(transform(table, batch=name))) for name in names]
    assert len(set(found)) == len(names)
    assert release.card["batches"]["names"] == names


@pytest.mark.parametrize("reference", [dpdask.Public(), dpdask.Chain()], ids=["public", "chain"])
def test_the_public_table_is_never_private_input(reference: Any) -> None:
    table = public_rows()
    release = dpdask.DIP(SCHEMA, epsilon=1.0, reference=reference).fit(table)
    for frame in (table, table.copy(), public_rows()):
        with pytest.raises(dpdask.SpecError, match="given as the public table"):
            release.transform(frame, batch="x")
    assert (
        len(release.transform(rows())) == 4000
    )  # of another length under the same partition number: the seals are apart


@pytest.mark.parametrize("kind", KINDS)
def test_copies_cannot_take_a_batch_again(kind: str) -> None:
    """Whatever becomes of the object: a batch stays the frame's that was first given."""
    release, transform = any_frame(kind)
    verb = transform.__name__
    table, other = rows(200), rows(200, seed=1)
    first = values(transform(table, batch="x"))
    copies = [cloudpickle.loads(cloudpickle.dumps(release)), copy.deepcopy(release)]
    for each, told in (
        *((each, "another copy of this release") for each in copies),
        (copy.copy(release), "another frame was given before"),
    ):
        with pytest.raises(dpdask.SpecError, match=told):
            getattr(each, verb)(other, batch="x")
    with pytest.raises(dpdask.SpecError, match="another copy of this release"):
        getattr(copies[0], verb)(table, batch="x")
    assert values(getattr(copy.copy(release), verb)(table, batch="x")) == first
    loaded = copies[0]
    elsewhere = values(getattr(loaded, verb)(other, batch="y"))
    with pytest.raises(dpdask.SpecError, match="another copy of this release has taken this batch"):
        transform(other, batch="y")
    assert values(getattr(loaded, verb)(other, batch="y")) == elsewhere
    assert release.card["batches"]["names"] == loaded.card["batches"]["names"] == ["x", "y"]


def test_a_copy_of_a_fitted_release_covers_nothing() -> None:
    frame = dd.from_pandas(rows(), npartitions=3)
    release = FITTED[0].fit(frame)
    replaced = dataclasses.replace(release)
    assert values(replaced.transform(frame)) == values(release.transform(frame))
    with pytest.raises(dpdask.SpecError, match="covers only the frame"):
        replaced.transform(frame.persist(scheduler="synchronous"))
    for each in (cloudpickle.loads(cloudpickle.dumps(release)), copy.deepcopy(release)):
        for view in (frame, rows()):
            with pytest.raises(
                dpdask.SpecError, match="another copy of this release has taken this batch"
            ):
                each.transform(view)


@pytest.mark.parametrize("kind", ["known", "interval"])
def test_a_second_fit_is_another_release(kind: str) -> None:
    made: Any = dpdask.DIP(SCHEMA, epsilon=0.5, reference=KNOWN)
    if kind == "interval":
        made = dpdask.IntervalMechanism(SCHEMA, columns={"rating": DESIGN})
    table = rows(500)
    first = made.fit(table)
    found = values(first.transform(table))
    other = dataclasses.replace(made).fit(table)
    assert values(other.transform(table)) != found
    assert values(made.fit(table).transform(table)) != found
    assert values(first.transform(table)) == found
    assert first.card["batches"]["names"] == other.card["batches"]["names"] == [None]


def _in_a_fork(release: Any, verb: str, frames: list[pd.DataFrame], answers: Any) -> None:
    for frame, batch in zip(frames, ("x", "x", "y"), strict=True):
        try:
            answers.put(values(getattr(release, verb)(frame, batch=batch)))
        except dpdask.SpecError as error:
            answers.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["known", "interval"])
def test_a_forked_process_is_a_copy(kind: str) -> None:
    release, transform = any_frame(kind)
    table, other = rows(50), rows(50, seed=1)
    transform(table, batch="x")
    fork = multiprocessing.get_context("fork")
    answers: Any = fork.SimpleQueue()
    child = fork.Process(
        target=_in_a_fork, args=(release, transform.__name__, [table, other, other], answers)
    )
    child.start()
    same, another, fresh = answers.get(), answers.get(), answers.get()
    child.join()
    assert "another copy of this release" in same
    assert "another copy of this release" in another
    assert len(fresh) == 50
    with pytest.raises(dpdask.SpecError, match="another copy of this release"):
        transform(other, batch="y")


@pytest.mark.parametrize("kind", ["known", "interval"])
def test_of_many_threads_one_frame_comes_first(kind: str) -> None:
    release, transform = any_frame(kind)
    together, found = threading.Barrier(8), []

    def try_it(number: int) -> None:
        table = rows(20, seed=number)
        together.wait()
        for batch in ("x", f"own {number}"):
            try:
                found.append((batch, values(transform(table, batch=batch))))
            except dpdask.SpecError:
                found.append((batch, []))

    threads = [threading.Thread(target=try_it, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(bool(released) for batch, released in found if batch == "x") == 1
    assert all(released for batch, released in found if batch != "x")
    assert sorted(release.card["batches"]["names"]) == sorted(
        ["x", *(f"own {number}" for number in range(8))]
    )


def test_a_closed_release_takes_nothing(tmp_path: Any) -> None:
    release = dpdask.DIP(SCHEMA, epsilon=1.0, reference=KNOWN).fit(rows(), secrets=str(tmp_path))
    lazy = release.transform(dd.from_pandas(rows(), npartitions=2))
    release.close()
    with pytest.raises(dpdask.InputError, match="closed"):
        release.transform(rows(), batch="x")
    with pytest.raises(dpdask.InputError, match="missing"):
        lazy.compute(scheduler="synchronous")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def client(two_workers: LocalCluster) -> Any:
    with Client(two_workers) as found:
        yield found


def test_any_scheduler_and_worker_the_same_bytes(client: Client) -> None:
    table = rows()
    for dip in (FITTED[0], FITTED[2], FITTED[3]):
        frame = dd.from_pandas(table, npartitions=5)
        release = dip.fit(frame)
        lazy = release.transform(frame)
        here = lazy.compute(scheduler="synchronous")
        pd.testing.assert_frame_equal(lazy.compute(), here)
        pd.testing.assert_frame_equal(lazy.persist().compute(), here)
        with pytest.raises(dpdask.SpecError, match="covers only the frame"):
            release.transform(frame.persist())
    release, _ = any_frame("interval")
    lazy = release.transform(frame)
    pd.testing.assert_frame_equal(lazy.compute(), lazy.compute(scheduler="threads"))


def test_a_release_that_travels_to_workers_covers_one_partition_at_most(client: Client) -> None:
    """`map_partitions(release.transform)` would give every partition the streams of the one frame."""
    release = dpdask.DIP(SCHEMA, epsilon=1.0, reference=KNOWN).fit(rows())
    frame = dd.from_pandas(rows(), npartitions=4)
    for scheduler in (client, "threads"):
        with pytest.raises(
            dpdask.SpecError, match=r"another copy of this release|another frame was given"
        ):
            dask.compute(frame.map_partitions(release.transform, meta=rows(1)), scheduler=scheduler)
