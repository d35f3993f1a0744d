"""Noise belongs to (release, batch, partition): one frame to a batch, whatever frames hold and however they are built."""

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
from distributed import Client
from e2e.helpers import discrete
from scipy import stats

import dpdask

LEVELS = [1, 2, 3, 4, 5]
SCHEMA = dpdask.Schema.from_dict(
    {
        "columns": {
            "user": {"role": "keep"},
            "rating": discrete(LEVELS, type="int64"),
        }
    }
)
KNOWN = dpdask.Known(columns={"rating": {"probabilities": [0.2] * 5}})
DESIGN = {"design": "case1", "anchors": {"name": "uniform", "loc": 0, "scale": 6}}
PERTURBED = {
    "design": "interval-differential",
    "perturb": {"epsilon": 0.5, "reference": {"kind": "known", "probabilities": [0.2] * 5}},
    "of": DESIGN,
}
FITTED = [
    dpdask.DIP(SCHEMA, epsilon=1.0, reference=dpdask.Histogram()),
    dpdask.DIP(SCHEMA, epsilon=1.0, reference=dpdask.Holdout(fraction=0.25)),
    dpdask.DIP(
        SCHEMA, epsilon=1.0, reference=KNOWN, unit=dpdask.UnitColumn(column="user", max_rows=2)
    ),
    dpdask.DIP(SCHEMA, epsilon=1.0, reference=dpdask.Chain(fraction=0.25)),
]
IDS = ["histogram", "holdout", "unit", "chain"]


def rows(n=4000, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"user": np.arange(n), "rating": rng.choice(LEVELS, n)})


def public_rows():
    return rows(500, seed=9)


Transform = Callable[..., Any]


def any_frame(kind):
    """A release that any frame may come to, and how frames come to it."""
    if kind in ("known", "chain"):
        release = dpdask.DIP(
            SCHEMA, epsilon=0.5, reference=KNOWN if kind == "known" else dpdask.Chain()
        ).fit(public_rows())
        return release, release.transform
    release = dpdask.IntervalMechanism(
        SCHEMA, columns={"rating": DESIGN if kind == "interval" else PERTURBED}
    ).fit(public_rows())
    return release, release.transform


KINDS = ["known", "chain", "perturbed"]


def values(frame):
    """The released private columns, as rows in order."""
    found = frame.compute(scheduler="synchronous") if isinstance(frame, dd.DataFrame) else frame
    return list(
        found[[name for name in found.columns if name != "user"]].itertuples(index=False, name=None)
    )


def views(frame, table):
    """The same rows, as other frames."""
    return {
        "persist": frame.persist(scheduler="synchronous"),
        "partitions": frame.partitions[0:4],
        "filter": frame[frame["user"] >= 0],
        "copy": frame.copy(),
        "from_pandas": dd.from_pandas(table, npartitions=4),
        "pandas": table,
    }


@pytest.mark.filterwarnings("ignore:the chain republishes")
@pytest.mark.parametrize("dip", FITTED, ids=IDS)
def test_a_fitted_release_covers_one_frame_object(dip):
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
    assert values(dataclasses.replace(release).transform(frame)) == values(lazy)
    for each in (cloudpickle.loads(cloudpickle.dumps(release)), copy.deepcopy(release)):
        with pytest.raises(
            dpdask.SpecError, match="another copy of this release has taken this batch"
        ):
            each.transform(frame)


@pytest.mark.filterwarnings("ignore:the chain republishes")
@pytest.mark.parametrize("dip", FITTED, ids=IDS)
def test_a_fitted_pandas_frame_is_one_object_with_its_rows(dip):
    table = rows()
    release = dip.fit(table)
    pd.testing.assert_frame_equal(release.transform(table), release.transform(table))
    for view in (table.copy(), table[["user", "rating"]], dd.from_pandas(table, npartitions=1)):
        with pytest.raises(dpdask.SpecError, match="covers only the frame it was fitted on"):
            release.transform(view)
    table.loc[0, "rating"] = 6 - table.loc[0, "rating"] if table.loc[0, "rating"] != 3 else 1
    with pytest.raises(dpdask.DataError, match="rows changed since they were first read"):
        release.transform(table)


@pytest.mark.parametrize("kind", KINDS)
def test_frames_without_a_name_are_one_frame(kind):
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
def test_batches_of_equal_rows_have_independent_noise(kind):
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_one_frame_with_its_rows(kind):
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


def test_a_stream_belongs_to_a_column_s_name():
    columns = {name: discrete(LEVELS) for name in ("a", "b")}
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
CONTENTS = {  # of a private column: its domain, its values, and values that differ by little
    "int64[pyarrow]": (
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
    "string": (
        {"kind": "categorical", "levels": ["a", "b", "ab", ""]},
        ["ab", None, ""],
        ["a", None, "b"],
    ),
    "category": ({"kind": "categorical", "levels": ["a", "b"]}, ["a", None, "b"], ["a", None, "a"]),
}


@pytest.mark.parametrize("dtype", CONTENTS)
def test_the_noise_of_a_frame_meets_one_content_in_every_dtype(dtype):
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

    def read(_):
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


@pytest.mark.parametrize(
    "unit", ["row", dpdask.UnitColumn(column="who", max_rows=2)], ids=["row", "person"]
)
def test_a_seal_sees_the_order_of_rows_whose_private_values_are_equal(unit):
    """As of an unstable sort: a row in another place would meet another row's noise, though no private value moved."""
    declared = {
        "rating": SCHEMA.columns["rating"].model_dump(exclude_none=True),
        "user": {"role": "keep"},
        "who": {"role": "keep"},
    }
    dip = dpdask.DIP(
        dpdask.Schema.from_dict({"columns": declared}),
        epsilon=1.0,
        reference=dpdask.Histogram(),
        unit=unit,
    )
    big = pd.Series([BEYOND + 1, BEYOND] * 10, dtype="int64[pyarrow]")
    lists = pd.Series(
        pd.array([[number] for number in range(20)], dtype=pd.ArrowDtype(pa.list_(pa.int64())))
    )
    others = (
        pd.Series([Decimal(1), "text"] * 10, dtype=object),
        big.astype("category"),
        pd.Series(pd.interval_range(0, 20)),
    )
    for users in (
        big,
        lists,
        *(others if unit == "row" else ()),
    ):  # rows of a person are told apart by plain values
        table = pd.DataFrame(
            {"rating": [3] * 20, "user": users, "who": np.repeat(np.arange(10), 2)}
        )
        for frame in (table, *([table.set_index("user")] if users is not lists else [])):
            order = np.arange(20).reshape(10, 2)[:, ::-1].ravel()  # within each person
            with dip.fit(frame) as release:
                pd.testing.assert_frame_equal(release.transform(frame), release.transform(frame))
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


def test_kept_columns_of_lists_and_a_change_of_their_chunks_are_no_change():
    declared = {
        "rating": discrete(LEVELS),
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
def test_the_card_lists_the_batches_and_what_they_cost(kind):
    release, transform = any_frame(kind)
    assert release.card["batches"]["names"] == []
    one = release.card["guarantee"]["text"]
    for batch in ("b", None, "a"):
        transform(rows(20), batch=batch)
    card = release.card
    assert card["batches"]["names"] == ["b", None, "a"]
    told = "narrow each other" if kind == "interval" else "a row in k batches is protected by k·ε"
    assert told in card["batches"]["text"]
    assert card["guarantee"]["text"] == f"{one} {card['batches']['text']}"


def test_a_batch_has_a_name():
    release, transform = any_frame("known")
    for batch in ("", "a ", "a\nb", "x" * 101, 7, "\ud800"):
        with pytest.raises(dpdask.SpecError, match="a text of 1 to 100 printable characters"):
            transform(rows(10), batch=batch)
    assert release.card["batches"]["names"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_meets_another_s_streams(kind):
    release, transform = any_frame(kind)
    table = rows(500)
    names = [None, "frame", "public table", "batch frame", "frame:0", "0"]
    found = [tuple(values(transform(table, batch=name))) for name in names]
    assert len(set(found)) == len(names)
    assert release.card["batches"]["names"] == names


def test_the_public_table_is_never_private_input():
    table = public_rows()
    release = dpdask.DIP(SCHEMA, epsilon=1.0, reference=dpdask.Public()).fit(table)
    for frame in (table, table.copy(), public_rows()):
        with pytest.raises(dpdask.SpecError, match="given as the public table"):
            release.transform(frame, batch="x")
    assert (
        len(release.transform(rows())) == 4000
    )  # of another length under the same partition number: the seals are apart


@pytest.mark.parametrize("kind", KINDS)
def test_copies_cannot_take_a_batch_again(kind):
    """Whatever becomes of the object: a batch stays the frame's that was first given."""
    release, transform = any_frame(kind)
    table, other = rows(200), rows(200, seed=1)
    first = values(transform(table, batch="x"))
    loaded, copied = cloudpickle.loads(cloudpickle.dumps(release)), copy.copy(release)
    for each, told in (
        (loaded, "another copy of this release"),
        (copy.deepcopy(release), "another copy"),
        (copied, "another frame was given before"),
    ):
        with pytest.raises(dpdask.SpecError, match=told):
            each.transform(other, batch="x")
    assert values(copied.transform(table, batch="x")) == first
    elsewhere = values(loaded.transform(other, batch="y"))
    with pytest.raises(dpdask.SpecError, match="another copy of this release has taken this batch"):
        transform(other, batch="y")
    assert values(loaded.transform(other, batch="y")) == elsewhere
    assert release.card["batches"]["names"] == loaded.card["batches"]["names"] == ["x", "y"]


def _in_a_fork(release, frames, answers):
    for frame, batch in zip(frames, ("x", "x", "y"), strict=True):
        try:
            answers.put(values(release.transform(frame, batch=batch)))
        except dpdask.SpecError as error:
            answers.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_is_a_copy():
    release, transform = any_frame("known")
    table, other = rows(50), rows(50, seed=1)
    transform(table, batch="x")
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    child = fork.Process(target=_in_a_fork, args=(release, [table, other, other], answers))
    child.start()
    same, another, fresh = answers.get(), answers.get(), answers.get()
    child.join()
    assert "another copy of this release" in same
    assert "another copy of this release" in another
    assert len(fresh) == 50
    with pytest.raises(dpdask.SpecError, match="another copy of this release"):
        transform(other, batch="y")


def test_of_many_threads_one_frame_comes_first():
    release, transform = any_frame("known")
    together, found = threading.Barrier(8), []

    def try_it(number):
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


@pytest.fixture(scope="module")
def client(two_workers):
    with Client(two_workers) as found:
        yield found


def test_any_scheduler_and_worker_the_same_bytes(client):
    table = rows()
    for dip in FITTED[:3]:
        frame = dd.from_pandas(table, npartitions=5)
        release = dip.fit(frame)
        lazy = release.transform(frame)
        here = lazy.compute(scheduler="synchronous")
        pd.testing.assert_frame_equal(lazy.compute(), here)
        pd.testing.assert_frame_equal(lazy.persist().compute(), here)
        with pytest.raises(dpdask.SpecError, match="covers only the frame"):
            release.transform(frame.persist())


def test_a_release_that_travels_to_workers_covers_one_partition_at_most(client):
    """`map_partitions(release.transform)` would give every partition the streams of the one frame."""
    release = dpdask.DIP(SCHEMA, epsilon=1.0, reference=KNOWN).fit(rows())
    frame = dd.from_pandas(rows(), npartitions=4)
    for scheduler in (client, "threads"):
        with pytest.raises(
            dpdask.SpecError, match=r"another copy of this release|another frame was given"
        ):
            dask.compute(frame.map_partitions(release.transform, meta=rows(1)), scheduler=scheduler)
