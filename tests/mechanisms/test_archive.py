"""Whatever is kept as bytes comes back from them, as the same bytes again; anything else is refused in one line."""

import datetime as dt
import gc
import io
import json
import sys
import tracemalloc
import uuid
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pytest
from e2e.helpers import continuous, discrete, mixed, schema_of
from stats.counting import records_of_rows
from strategies import level_codec, value_codec

from dpdask.archive import Archive
from dpdask.cells import cells
from dpdask.codec import codec_for
from dpdask.documents import validate
from dpdask.engine.work import keep, load
from dpdask.errors import InputError
from dpdask.io.storage import RELEASE_NAME, Folder
from dpdask.mechanisms.copula.fit import fit_copula
from dpdask.mechanisms.copula.places import Places
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.mechanisms.dip.chain import fit_chain, group_hashes
from dpdask.mechanisms.dip.columns import DipRelease, fit_dip
from dpdask.mechanisms.dip.spec import DipSpec
from dpdask.mechanisms.dip.tree import fit_tree, measure_tree
from dpdask.mechanisms.histogram.noise import draw, plan
from dpdask.mechanisms.histogram.release import FittedHistogram
from dpdask.mechanisms.interval.release import IntervalRelease
from dpdask.mechanisms.interval.spec import IntervalSpec
from dpdask.mechanisms.marginals.noise import MarginalNoise, measure, plan_noise
from dpdask.mechanisms.marginals.release import MarginalTables
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget
from dpdask.privacy.events import DiscreteGaussian, DiscreteLaplace, to_dict
from dpdask.references import Chain, Histogram, LevelDistribution, RankDistribution, Tree
from dpdask.references.histogram import NoisyHistograms
from dpdask.stats import Domain, MarginalCounts
from dpdask.stats.marginals import JointCounts
from dpdask.stats.records import UnitRows, numbers
from dpdask.streams import RunKey, stream

DAYS = [dt.date(2026, 1, 1), dt.date(2026, 1, 2), dt.date(2026, 1, 3)]
SCHEMA = schema_of(
    {
        "a": discrete(DAYS, nulls="level"),
        "b": continuous([0, 10]),
        "c": mixed(bounds=[0, 100], atoms=[0]),
        "secret": {"role": "drop"},
    }
)
TYPES = pa.schema({"a": pa.date32(), "b": pa.float64(), "c": pa.int32()})
BINS = {"b": 5, "c": [1, 30, 70]}
DOMAIN = Domain(names=("a", "b", "c"), sizes=(4, 5, 4))
CODECS = {
    "a": level_codec([0, 1, 2, 3], "a"),
    "b": value_codec("b", bounds=None),
}
LINE = RankDistribution(np.array([0.0, 0.5, 2.0]), np.array([0.0, 0.5, 1.0]), 0.25)


def keyed(name):
    return stream(RunKey.insecure(3), "archive", name)


def counts(cliques=()):
    rng = np.random.default_rng(1)
    codes = [rng.integers(0, size, 500) for size in DOMAIN.sizes]
    return MarginalCounts.of_codes(DOMAIN, np.stack(codes).astype(DOMAIN.code_dtype), cliques)


def dip(channel):
    return fit_dip(
        {"a": LevelDistribution(np.full(4, 0.25)), "b": LINE}, CODECS, {"a": 1.0, "b": 2.0}, channel
    )


def chain(channel, by=None):
    columns = {"a": pa.array([0, 1, 2, 1, 0, 3]), "b": pa.array([0.5, 0.5, 1.5, 2.5, 3.5, 4.5])}
    key = np.array([3, 4], dtype=np.uint64)
    groups = [group_hashes("by", pa.array(["x", "x", "x", "y", "y", "z"]), key)] if by else []
    words = [
        *groups,
        *(numbers(CODECS[name], column).view(np.uint64) for name, column in columns.items()),
    ]
    records = records_of_rows(words, np.full(6, 2**64 - 1, dtype=np.uint64), 2**20)
    return fit_chain(
        records, CODECS, {"a": 1.0, "b": 2.0}, channel, order=("b", "a"), by=by, group_key=key
    )


def tree():
    one, pairs = (
        DiscreteLaplace(scale=0.5, sensitivity=2, adjacency="replace-one", count=count)
        for count in (3, 3)
    )
    edges = DiscreteLaplace(scale=0.5, sensitivity=2, adjacency="replace-one", count=2)
    noisy = measure_tree(
        counts(), MarginalNoise(one_way=one, pairs=pairs, chosen=edges), rng=keyed("tree")
    )
    return fit_tree(
        noisy,
        {name: cells(codec, BINS.get(name, 1)) for name, codec in codecs().items()},
        dict.fromkeys("abc", 1.0),
        "optimal",
    )


def codecs():
    return {
        name: codec_for(name, SCHEMA.columns[name], TYPES.field(name).type) for name in TYPES.names
    }


def noisy(delta=0.0):
    cliques = {("c", "a"): 1.0, ("a", "b", "c"): 2.0}
    planned = plan_noise(
        Budget(epsilon=1.0, delta=delta, adjacency="add-remove"), 3, cliques=cliques
    )
    return measure(counts(list(cliques)), planned, n_rows_public=False, rng=keyed("noisy"))


def copula():
    tables = noisy()
    model, report = fit_copula(tables, keyed("copula"))
    return FittedCopula(
        schema=SCHEMA, columns=TYPES, bins=BINS, noisy=tables, model=model, report=report
    )


def copula_with_places():
    """A copula whose two numbers depend on each other."""
    whole = copula()
    places = Places(
        columns=np.array([1, 2]),
        ranges=np.stack([np.linspace(-8.0, 0.0, 9), np.linspace(0.0, 8.0, 9)]),
        partners=np.array([[1], [0]]),
        weights=np.array([[0.5], [0.5]]),
        deviations=np.array([0.8, 0.8]),
    )
    return replace(whole, model=replace(whole.model, places=places))


def noisy_histogram(**given):
    joint = JointCounts(
        DOMAIN, np.array([0, 7, 30], dtype=np.int64), np.array([90, 50, 40], dtype=np.int64)
    )
    return draw(joint, plan(Budget(epsilon=1.0, delta=0.0, **given)), rng=keyed("histogram"))


def histogram(output="cells", points="centre", **given):
    return FittedHistogram(
        schema=SCHEMA,
        columns=TYPES,
        bins=BINS,
        noisy=noisy_histogram(**given),
        output=output,
        points=points,
    )


def tables():
    return MarginalTables(schema=SCHEMA, columns=TYPES, bins=BINS, noisy=noisy())


def interval():
    anchors = {"name": "uniform", "loc": 0, "scale": 10}
    levels = {"kind": "known", "probabilities": [0.1, 0.2, 0.3, 0.4]}
    line = {"kind": "known", "name": "uniform", "loc": 0, "scale": 10}
    of = {"design": "case2", "anchors": anchors, "reference": anchors}
    written = {
        "a": {
            "design": "interval-differential",
            "perturb": {"epsilon": 1.0, "reference": levels},
            "of": of,
        },
        "b": {
            "design": "interval-differential",
            "perturb": {"epsilon": 1.0, "reference": line, "channel": "optimal"},
            "of": of,
        },
        "plain": of,
    }
    designs = dict(validate(IntervalSpec, {"columns": written}, "job").columns)
    plain = value_codec("plain", pa.int32(), bounds=None)
    bounded = value_codec("b")
    return IntervalRelease.of(designs, {**CODECS, "b": bounded, "plain": plain}, coverage=True)


def histograms():
    events = {
        name: DiscreteLaplace(scale=scale, sensitivity=2, adjacency="replace-one")
        for name, scale in (("rating", 2.0), ("age", 3.5))
    }
    return NoisyHistograms(
        counts={"rating": np.array([3, -1, 7]), "age": np.array([2**40, 0])},
        events=events,
        n_rows=9,
    )


def bounds():
    units = np.array([5, 5, 5, 9], dtype=np.uint64)
    return UnitRows.of_batch(
        1, units, np.arange(4, dtype=np.uint64), np.arange(4, dtype=np.uint64)
    ).bounds()


MADE = {
    "dip": lambda: dip("laplace"),
    "dip in bins": lambda: dip("optimal"),
    "chain": lambda: chain("laplace"),
    "chain in bins, with groups": lambda: chain("optimal", "by"),
    "tree": tree,
    "noisy tables": noisy,
    "noisy tables, gaussian": lambda: noisy(1e-6),
    "copula": copula,
    "copula with places": copula_with_places,
    "noisy histogram": noisy_histogram,
    "histogram": histogram,
    "histogram, rows": lambda: histogram("rows"),
    "histogram, spread": lambda: histogram(points="spread", adjacency="add-remove"),
    "tables": tables,
    "interval": interval,
    "noisy histograms": histograms,
    "unit bounds": bounds,
}


@lru_cache
def made(name):
    return MADE[name]()


every = pytest.mark.parametrize("name", MADE)


def changed(data, header=None, **arrays):
    """The same file with another header, or with some of its keys changed, and with other arrays; None leaves one out."""
    with np.load(io.BytesIO(data), allow_pickle=False) as members:
        found = {name: members[name] for name in members.files} | arrays
    text = (
        header
        if isinstance(header, bytes)
        else json.dumps(json.loads(found["header"].tobytes()) | (header or {})).encode()
    )
    found["header"] = np.frombuffer(text, dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **{name: array for name, array in found.items() if array is not None})
    return buffer.getvalue()


def new_folder():
    return Folder(f"memory://archive/{uuid.uuid4().hex}")


def refused(name, data):
    """It is refused by its class, with one line that names the file."""
    cls = type(made(name))
    expected = rf"^here\.npz: this is not a {cls.archive.noun} of format {cls.archive.format}, which dpdask .* reads; read it with the version .*$"
    with pytest.raises(InputError, match=expected):
        cls.from_bytes(data, "here.npz")


def members(data):
    """The header of an archive, and its arrays."""
    with np.load(io.BytesIO(data), allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    return json.loads(arrays.pop("header").tobytes()), arrays


@pytest.mark.few(5)
@every
def test_it_comes_back_and_the_same_content_has_the_same_bytes(name):
    whole = made(name)
    data = whole.to_bytes()
    assert type(whole).from_bytes(data, "here.npz").to_bytes() == MADE[name]().to_bytes() == data
    assert members(data)[0]["kind"] == whole.archive.kind
    assert type(whole).from_bytes(changed(data), "here.npz").to_bytes() == data


@every
def test_an_archive_of_another_kind_or_format_or_without_a_part_is_refused(name):
    data, archive = made(name).to_bytes(), made(name).archive
    kind, own, oldest = archive.kind, archive.format, archive.oldest or archive.format
    for format_ in (999, oldest - 1, None, str(own), float(own), True):
        refused(name, changed(data, {"format": format_}))
    for wrong in ("unknown", None, [kind]):
        refused(name, changed(data, {"kind": wrong}))
    for place in (0, 22, len(data) // 2, len(data) - 1):
        refused(name, data[:place])
    header, arrays = members(data)
    for key in header:
        refused(
            name,
            changed(
                data,
                json.dumps(
                    {other: value for other, value in header.items() if other != key}
                ).encode(),
            ),
        )
    for array in arrays:
        if not array.endswith("_levels"):
            refused(name, changed(data, **{array: None}))


@pytest.mark.parametrize(("name", "lacks"), [("copula", "places"), ("histogram", None)])
def test_files_of_older_formats_are_read(name, lacks):
    data, oldest = made(name).to_bytes(), made(name).archive.oldest
    header = members(data)[0] | {"format": oldest}
    header.pop(lacks, None)
    older = changed(data, json.dumps(header).encode())
    assert type(made(name)).from_bytes(older, "here.npz").to_bytes() == data


def test_a_file_of_something_else_is_refused():
    data = made("tables").to_bytes()
    array, zipped, pickled = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(array, np.arange(3))
    with zipfile.ZipFile(zipped, "w") as files:
        files.writestr("readme.txt", "no archive")
    np.savez(pickled, header=np.array([{"kind": made("tables").archive.kind}], dtype=object))
    headers = [b"", b"{}", b"[1]", b"5", b"\xff\xfe", b"[" * 100_000]
    for wrong in (
        b"PK",
        b"garbage" * 50,
        array.getvalue(),
        zipped.getvalue(),
        pickled.getvalue(),
        *(changed(data, each) for each in headers),
    ):
        refused("tables", wrong)


def test_no_flipped_byte_goes_unseen_or_ends_in_another_error():
    data = made("histogram").to_bytes()
    for place in range(0, len(data), 3):
        flipped = data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
        try:
            assert FittedHistogram.from_bytes(flipped, "here.npz").to_bytes() == data
        except InputError:
            continue


# ---- wrong numbers: changes of an array, or of a mapping of the header

ATTRIBUTE, PARENT, FIRST, N_GROUPS, N_LEVELS = range(5)  # the columns of a copula's nodes


def at(place, value):
    def change(array):
        array = array.copy()
        array[place] = array[value] if isinstance(value, tuple) else value
        return array

    return change


def cut(array):
    return array[:-1]


def as_(type_):
    return lambda array: array.astype(type_)


RAKED = ("raked_tables", "raked_counts", "raked_strengths")
WRONG_COPULAS = {
    "nodes": [
        *(at((0, ATTRIBUTE), value) for value in (3, (1, ATTRIBUTE))),  # not there; twice
        *(
            at((1, PARENT), value) for value in (2, 1, -2, -1)
        ),  # later; itself; not there; none, yet with groups
        at((0, N_GROUPS), 2),
        at((1, N_GROUPS), 1),
        at((2, slice(N_GROUPS, N_LEVELS + 1)), -4),
        *(at((2, N_LEVELS), value) for value in (0, 2**62)),
        at((2, FIRST), 2**40),
        at((0, FIRST), -1),
        cut,
        as_(np.float64),
    ],
    "levels": [
        at(-1, 200),
        at(1, (0,)),
        lambda array: np.append(array, np.uint16(0)),
        as_(np.int64),
    ],
    "probabilities": [
        lambda array: np.append(array, 0.0),
        *(at(0, value) for value in (-1.0, 1e300, np.nan)),
    ],
    "offsets": [at(0, np.inf), lambda _: np.zeros(1, dtype=np.float32)],
    "factor": [at(0, np.nan), at(0, 1e38), cut, lambda array: array[:1]],
    "raked_tables": [
        *(at((0, 1), value) for value in (2**40, (0, 0))),
        at((0, 0), -1),
        *(at((0, 2), value) for value in (0, 99, -2)),  # before the second; not there; none has -1
        lambda array: array[:, [1, 0, 2]],
        lambda _: np.zeros((1, 4), dtype=np.int64),
        as_(np.float64),
    ],
    RAKED: [lambda array: np.concatenate([array] * 2), lambda array: array[:0]],
    "raked_counts": [cut, as_(np.float32), *(at(0, value) for value in (np.nan, 1e300, -1.0))],
    "raked_strengths": [
        cut,
        as_(np.float32),
        *(at(0, value) for value in (0.0, -1.0, np.nan, 1e300)),
    ],
    "noisy": [lambda _: np.arange(40, dtype=np.uint8)],
}
WRONG_TABLES = {
    "one_way": [cut],
    "pairs": [cut, as_(np.float64)],
    "clique_0": [cut],
    "clique_1": [np.ravel],
}
WRONG_HISTOGRAMS = {
    "keys": [
        at(-1, DOMAIN.size_of(DOMAIN.names)),
        at(0, -3),
        at(0, (1,)),
        lambda array: array[::-1],
        as_(np.float64),
    ],
    ("keys", "weights"): [lambda array: array.reshape(1, -1)],
    "weights": [
        cut,
        as_(np.uint8),
        np.negative,
        at(0, 0),
        lambda array: np.full_like(array, 2**62),
    ],
}
HOLDERS = {
    "noisy tables": ("copula", "tables"),
    "noisy histogram": ("histogram",),
}  # archives in archives


def flat(name, wrong):
    for arrays, changes in wrong.items():
        for number, change in enumerate(changes):
            yield pytest.param(
                name,
                (arrays,) if isinstance(arrays, str) else arrays,
                change,
                id=f"{name}-{arrays}-{number}",
            )


@pytest.mark.parametrize(
    ("name", "arrays", "change"),
    [
        *flat("copula", WRONG_COPULAS),
        *flat("noisy tables", WRONG_TABLES),
        *flat("noisy histogram", WRONG_HISTOGRAMS),
    ],
)
def test_wrong_numbers_are_refused(name, arrays, change):
    data = made(name).to_bytes()
    wrong = changed(data, **{array: change(members(data)[1][array]) for array in arrays})
    refused(name, wrong)
    for holder in HOLDERS.get(name, ()):
        refused(
            holder, changed(made(holder).to_bytes(), noisy=np.frombuffer(wrong, dtype=np.uint8))
        )


BOUNDED = continuous([0, 10])
FINE = to_dict(DiscreteGaussian(sigma=2.0, sensitivity=1.5, adjacency="replace-one"))
WRONG_NOISE = [
    {"one_way": None, "pairs": {"format": 1, "kind": "unknown"}, "cliques": []},
    {
        "one_way": {"format": 1, "kind": "local-release", "epsilon": 1.0, "n": 1, "unit": "row"},
        "pairs": None,
        "cliques": [],
    },
]
WRONG_HEADERS = {
    "copula": {
        "report": [{"n_latents": 3}, {"+": {"residual": float("nan")}}, {"+": {"moved": "x"}}],
        "schema": [
            {"columns": 5},
            {"columns": dict.fromkeys("abc", BOUNDED)},
            {"columns": dict.fromkeys("abcd", BOUNDED)},
        ],
        "types": ["AAAA", "no base 64"],
        "bins": [
            5,
            *(
                {"+": each}
                for each in ({"b": 10**18}, {"b": 0}, {"b": True}, {"b": 6}, {"other": 3})
            ),
        ],
    },
    "noisy tables": {
        "sizes": [[4, 5, 5], [4.0, 5.0, 4.0]],
        "n_rows": [1e18, float("nan"), -1e18, "9", None, True],
        "noise": WRONG_NOISE,
        "format": [999],
    },
    "noisy histogram": {
        "sizes": [[4, 5, 6]],
        "cut": [None, 0],
        "fine": [FINE],
        "plan": [
            {"+": each}
            for each in (
                {"threshold": "high"},
                {"factor": float("nan")},
                {"epsilon": -1.0},
                {"rows": 0},
            )
        ],
        "n_rows": [1e18, float("nan"), "9", True],
    },
}
WRONG_HEADERS |= {
    name: {key: WRONG_HEADERS["copula"][key] for key in ("schema", "bins")}
    for name in ("tables", "histogram")
}


@pytest.mark.parametrize("name", WRONG_HEADERS)
def test_wrong_headers_are_refused(name):
    data = made(name).to_bytes()
    header = members(data)[0]
    for key, values in WRONG_HEADERS[name].items():
        for value in values:
            new = header[key] | value["+"] if isinstance(value, dict) and "+" in value else value
            wrong = changed(data, {key: new})
            if key != "sizes":  # of counts alone, these may be the sizes of other columns
                refused(name, wrong)
            for holder in HOLDERS.get(name, ()):
                refused(
                    holder,
                    changed(made(holder).to_bytes(), noisy=np.frombuffer(wrong, dtype=np.uint8)),
                )


def test_a_saved_file_tells_the_released_columns_alone():
    for name in ("copula", "histogram", "tables"):
        again = type(made(name)).from_bytes(made(name).to_bytes(), "here.npz")
        assert again.schema.columns == {
            column: SCHEMA.columns[column] for column in SCHEMA.privatised
        }
        assert (again.columns, again.bins) == (TYPES, BINS)


@pytest.mark.parametrize(
    ("name", "reference"), [("dip", Histogram()), ("chain", Chain(fraction=0.5)), ("tree", Tree())]
)
def test_the_mechanism_names_the_class_of_its_release(name, reference):
    cls = bind(DipSpec(reference=reference), SCHEMA, Budget(epsilon=1.0)).release_type
    assert cls is type(made(name))
    folder = new_folder()
    assert type(load(folder, keep(folder, RELEASE_NAME, made(name).to_bytes()), cls)) is cls
    for other in {"dip", "chain", "tree", "noisy tables"} - {name}:
        with pytest.raises(InputError, match=rf"^release\.npz: this is not a {cls.archive.noun}"):
            load(folder := new_folder(), keep(folder, RELEASE_NAME, made(other).to_bytes()), cls)


def test_a_machine_without_memory_is_not_taken_for_another_file(monkeypatch):
    """Who was told to abort and begin again would pay twice."""
    data = made("dip").to_bytes()
    for error in (MemoryError, pa.ArrowMemoryError):

        def fail(*_, raised=error):
            raise raised

        monkeypatch.setattr(DipRelease, "_of_contents", fail)
        with pytest.raises(MemoryError):
            DipRelease.from_bytes(data, "here.npz")


def test_what_was_kept_first_stays():
    """A driver that lost its run and wakes up late replaces nothing."""
    folder = new_folder()
    first, other = made("dip").to_bytes(), made("chain").to_bytes()
    assert keep(folder, RELEASE_NAME, first) == keep(folder, RELEASE_NAME, other)
    assert folder.read(RELEASE_NAME) == first


def test_a_size_that_no_member_has_is_refused_before_memory_is_asked_for():
    own = dip("optimal").to_bytes()
    with np.load(io.BytesIO(own), allow_pickle=False) as members:
        found = {name: members[name] for name in members.files}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as members:
        for name, array in found.items():
            with members.open(f"{name}.npy", "w") as member:
                if name == "header":
                    np.lib.format.write_array(member, array)
                else:
                    np.lib.format.write_array_header_1_0(
                        member, {"descr": "<f8", "fortran_order": False, "shape": (2**45,)}
                    )
    with pytest.raises(InputError, match=r"^here\.npz: this is not a "):
        DipRelease.from_bytes(buffer.getvalue(), "here.npz")


def test_a_member_that_nobody_asks_for_is_not_inflated():
    """A small file with a huge member of an unknown name would fill the memory of who loads it."""
    own = dip("optimal")
    buffer = io.BytesIO(own.to_bytes())
    with (
        zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as members,
        members.open("surplus.npy", "w", force_zip64=True) as member,
    ):
        np.lib.format.write_array(member, np.zeros(2**24, dtype=np.uint8), allow_pickle=False)
    tracemalloc.start()
    DipRelease.from_bytes(buffer.getvalue(), "here")
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


@pytest.fixture
def threads_that_alternate():
    """Let threads take turns all the time, also while the garbage collector runs: Python code runs then, as that of finalizers does."""

    def pause(*_):
        for _ in range(200):
            pass

    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.callbacks.append(pause)
    gc.set_threshold(20)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)
    gc.callbacks.remove(pause)


@pytest.mark.usefixtures("threads_that_alternate")
def test_threads_read_at_once():
    archive = Archive(kind="toy", format=1, noun="toy")
    data = archive.pack({}, {f"a{number}": np.arange(3) for number in range(20)})

    def read(_):
        return archive.unpack(
            data,
            "here",
            lambda _, arrays: int(sum(arrays[f"a{number}"].sum() for number in range(20))),
        )

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(100))) == [60] * 100


@pytest.mark.parametrize("member", ["header", "noisy", "factor"])
def test_a_file_that_unpacks_to_far_more_than_it_holds_is_refused_before_it_is_unpacked(member):
    data, size = made("copula").to_bytes(), 2**29
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as members:
        for name, array in np.load(io.BytesIO(data)).items():
            with members.open(f"{name}.npy", "w", force_zip64=True) as file:
                if name != member:
                    np.lib.format.write_array(file, array)
                    continue
                shape = {"descr": "|u1", "fortran_order": False, "shape": (size,)}
                np.lib.format.write_array_header_1_0(file, shape)
                for _ in range(size >> 20):
                    file.write(bytes(2**20))
    bomb = buffer.getvalue()
    tracemalloc.start()
    refused("copula", bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(bomb) < 2**21
    assert peak < 2**24
