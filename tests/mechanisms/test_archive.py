"""Whatever is kept as bytes comes back from them, as the same bytes again; anything else is refused in one line."""

from __future__ import annotations

import datetime as dt
import gc
import io
import json
import subprocess
import sys
import tracemalloc
import uuid
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from stats.counting import records_of_rows

from dpdask.archive import Archive
from dpdask.cells import cells
from dpdask.codec import Codec, LevelCodec, ValueCodec, codec_for
from dpdask.documents import validate
from dpdask.engine.work import RELEASE_NAME, keep, load
from dpdask.errors import InputError
from dpdask.io.storage import Folder
from dpdask.mechanisms.copula.fit import FitReport, fit_copula
from dpdask.mechanisms.copula.model import CopulaModel, Node
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.mechanisms.dip.chain import ChainRelease, fit_chain, group_hashes
from dpdask.mechanisms.dip.columns import DipRelease, fit_dip
from dpdask.mechanisms.dip.spec import DipSpec
from dpdask.mechanisms.dip.tree import TreeRelease, fit_tree, measure_tree
from dpdask.mechanisms.histogram.noise import NoisyHistogram, draw, plan
from dpdask.mechanisms.histogram.release import FittedHistogram
from dpdask.mechanisms.interval.release import IntervalRelease
from dpdask.mechanisms.interval.spec import IntervalSpec
from dpdask.mechanisms.marginals.noise import MarginalNoise, NoisyMarginals, measure, plan_noise
from dpdask.mechanisms.marginals.release import MarginalTables
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget
from dpdask.privacy.events import DiscreteGaussian, DiscreteLaplace, to_dict
from dpdask.references import Chain, Histogram, LevelDistribution, RankDistribution, Reference, Tree
from dpdask.references.histogram import NoisyHistograms
from dpdask.schema import Schema
from dpdask.stats import Domain, MarginalCounts
from dpdask.stats.bounding import UnitBounds, UnitRows
from dpdask.stats.marginals import JointCounts
from dpdask.stats.records import numbers
from dpdask.streams import RunKey, stream

DAYS = [dt.date(2026, 1, 1), dt.date(2026, 1, 2), dt.date(2026, 1, 3)]
SCHEMA = Schema.from_dict(
    {
        "columns": {
            "a": {"role": "privatise", "kind": "discrete", "levels": DAYS, "nulls": "level"},
            "b": {"role": "privatise", "kind": "continuous", "bounds": [0, 10]},
            "c": {"role": "privatise", "kind": "mixed", "bounds": [0, 100], "atoms": [0]},
            "secret": {"role": "drop"},
        }
    }
)
TYPES = pa.schema({"a": pa.date32(), "b": pa.float64(), "c": pa.int32()})
BINS: dict[str, Any] = {"b": 5, "c": [1, 30, 70]}
DOMAIN = Domain(names=("a", "b", "c"), sizes=(4, 5, 4))
CODECS: dict[str, Codec] = {
    "a": LevelCodec(name="a", levels=pa.array([0, 1, 2, 3]), ordered=True),
    "b": ValueCodec(name="b", type=pa.float64(), bounds=None, atoms=(), nulls=False),
}
LINE = RankDistribution(np.array([0.0, 0.5, 2.0]), np.array([0.0, 0.5, 1.0]), 0.25)


def keyed(name: str) -> Any:
    return stream(RunKey.insecure(3), "archive", name)


def counts(cliques: Any = ()) -> MarginalCounts:
    rng = np.random.default_rng(1)
    codes = [rng.integers(0, size, 500) for size in DOMAIN.sizes]
    return MarginalCounts.of_codes(DOMAIN, np.stack(codes).astype(DOMAIN.code_dtype), cliques)


def dip(channel: Any) -> DipRelease:
    return fit_dip(
        {"a": LevelDistribution(np.full(4, 0.25)), "b": LINE}, CODECS, {"a": 1.0, "b": 2.0}, channel
    )


def chain(channel: Any, by: str | None = None) -> ChainRelease:
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


def tree() -> TreeRelease:
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


def codecs() -> dict[str, Codec]:
    return {
        name: codec_for(name, SCHEMA.columns[name], TYPES.field(name).type) for name in TYPES.names
    }


def noisy(delta: float = 0.0) -> NoisyMarginals:
    cliques = {("c", "a"): 1.0, ("a", "b", "c"): 2.0}
    planned = plan_noise(
        Budget(epsilon=1.0, delta=delta, adjacency="add-remove"), 3, cliques=cliques
    )
    return measure(counts(list(cliques)), planned, n_rows_public=False, rng=keyed("noisy"))


def copula() -> FittedCopula:
    tables = noisy()
    model, report = fit_copula(tables, keyed("copula"))
    return FittedCopula(
        schema=SCHEMA, types=TYPES, bins=BINS, noisy=tables, model=model, report=report
    )


def noisy_histogram(**given: Any) -> NoisyHistogram:
    joint = JointCounts(
        DOMAIN, np.array([0, 7, 30], dtype=np.int64), np.array([90, 50, 40], dtype=np.int64)
    )
    return draw(joint, plan(Budget(epsilon=1.0, delta=0.0, **given)), rng=keyed("histogram"))


def histogram(output: Any = "cells", points: Any = "centre", **given: Any) -> FittedHistogram:
    return FittedHistogram(
        schema=SCHEMA,
        columns=TYPES,
        bins=BINS,
        histogram=noisy_histogram(**given),
        output=output,
        points=points,
    )


def tables() -> MarginalTables:
    return MarginalTables(schema=SCHEMA, columns=TYPES, bins=BINS, noisy=noisy())


def interval() -> IntervalRelease:
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
    plain = ValueCodec(name="plain", type=pa.int32(), bounds=None, atoms=(), nulls=False)
    bounded = ValueCodec(name="b", type=pa.float64(), bounds=(0.0, 10.0), atoms=(), nulls=False)
    return IntervalRelease.of(designs, {**CODECS, "b": bounded, "plain": plain}, coverage=True)


def histograms() -> NoisyHistograms:
    events = {
        name: DiscreteLaplace(scale=scale, sensitivity=2, adjacency="replace-one")
        for name, scale in (("rating", 2.0), ("age", 3.5))
    }
    return NoisyHistograms(
        counts={"rating": np.array([3, -1, 7]), "age": np.array([2**40, 0])},
        events=events,
        n_rows=9,
    )


def bounds() -> UnitBounds:
    units = np.array([5, 5, 5, 9], dtype=np.uint64)
    return UnitRows.of_batch(
        1, units, np.arange(4, dtype=np.uint64), np.arange(4, dtype=np.uint64)
    ).bounds()


MADE: dict[str, Callable[[], Any]] = {
    "dip": lambda: dip("laplace"),
    "dip in bins": lambda: dip("optimal"),
    "dip of nothing": lambda: DipRelease(columns={}),
    "chain": lambda: chain("laplace"),
    "chain in bins, with groups": lambda: chain("optimal", "by"),
    "tree": tree,
    "noisy tables": noisy,
    "noisy tables, gaussian": lambda: noisy(1e-6),
    "copula": copula,
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
def made(name: str) -> Any:
    return MADE[name]()


every = pytest.mark.parametrize("name", MADE)


def changed(data: bytes, header: dict[str, Any] | bytes | None = None, **arrays: Any) -> bytes:
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


def new_folder() -> Folder:
    return Folder(f"memory://archive/{uuid.uuid4().hex}")


def refused(name: str, data: bytes) -> None:
    """It is refused by its class, and where a task reads the release of a run, with one line that names the file."""
    cls = type(made(name))
    expected = rf"^here\.npz: this is not a {cls.archive.noun} of format {cls.archive.format}, which dpdask .* reads; read it with the version .*$"
    with pytest.raises(InputError, match=expected):
        cls.from_bytes(data, "here.npz")
    if cls in (DipRelease, ChainRelease, TreeRelease):
        folder = new_folder()
        with pytest.raises(InputError, match=r"^release\.npz: this is not a fitted"):
            load(folder, keep(folder, RELEASE_NAME, data), cls)


@pytest.mark.few(5)
@every
def test_it_comes_back_and_the_same_content_has_the_same_bytes(name: str) -> None:
    whole = made(name)
    data = whole.to_bytes()
    again = type(whole).from_bytes(data, "here.npz")
    assert type(again) is type(whole)
    assert again.to_bytes() == whole.to_bytes() == MADE[name]().to_bytes() == data
    with np.load(io.BytesIO(data), allow_pickle=False) as members:
        assert json.loads(members["header"].tobytes())["kind"] == whole.archive.kind
    assert type(whole).from_bytes(changed(data), "here.npz").to_bytes() == data


@every
def test_another_format_is_refused(name: str) -> None:
    data, own = made(name).to_bytes(), made(name).archive.format
    for format_ in (999, *range(own), None, str(own), [own], float(own), True):
        refused(name, changed(data, {"format": format_}))


@every
def test_every_other_kind_is_refused(name: str) -> None:
    kind = made(name).archive.kind
    for other in MADE:
        if made(other).archive.kind != kind:
            data = made(other).to_bytes()
            with pytest.raises(InputError, match="this is no"):
                type(made(name)).from_bytes(data, "here.npz")
    for wrong in ("unknown", None, [kind], {}):
        refused(name, changed(made(name).to_bytes(), {"kind": wrong}))


@every
def test_half_of_a_file_is_refused_wherever_it_ends(name: str) -> None:
    data = made(name).to_bytes()
    for place in {0, 1, 3, 22, len(data) // 3, len(data) // 2, len(data) - 30, len(data) - 1}:
        refused(name, data[:place])


@every
def test_a_file_that_lacks_any_part_is_refused(name: str) -> None:
    data = made(name).to_bytes()
    header = json.loads(np.load(io.BytesIO(data), allow_pickle=False)["header"].tobytes())
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
    with np.load(io.BytesIO(data), allow_pickle=False) as members:
        arrays = [
            each for each in members.files if each != "header" and not each.endswith("_levels")
        ]
    for array in arrays:
        refused(name, changed(data, **{array: None}))


@every
def test_a_file_of_something_else_is_refused(name: str) -> None:
    data = made(name).to_bytes()
    array, zipped, pickled = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(array, np.arange(3))
    with zipfile.ZipFile(zipped, "w") as members:
        members.writestr("readme.txt", "no archive")
    np.savez(pickled, header=np.array([{"kind": made(name).archive.kind}], dtype=object))
    headers = [b"", b"{}", b"[1]", b"5", b"\xff\xfe", b"[" * 100_000]
    for wrong in (
        b"",
        b"PK",
        b"garbage" * 50,
        array.getvalue(),
        zipped.getvalue(),
        pickled.getvalue(),
        *(changed(data, each) for each in headers),
    ):
        refused(name, wrong)


def test_no_flipped_byte_goes_unseen_or_ends_in_another_error() -> None:
    data = made("histogram").to_bytes()
    for place in range(len(data)):
        flipped = data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
        try:
            assert FittedHistogram.from_bytes(flipped, "here.npz").to_bytes() == data
        except InputError:
            continue


@pytest.mark.parametrize(
    "changes",
    [
        {"header": {"report": {"n_latents": 3}}},
        {"header": {"schema": {"columns": 5}}},
        {"header": {"types": "AAAA"}},
        {"header": {"types": "no base 64"}},
        {"noisy": np.arange(40, dtype=np.uint8)},
        {"offsets": np.zeros(1, dtype=np.float32)},
        {"factor": np.zeros(2, dtype=np.float32)},
    ],
    ids=str,
)
def test_a_copula_of_wrong_parts_is_refused(changes: dict[str, Any]) -> None:
    refused("copula", changed(made("copula").to_bytes(), **changes))


def part(name: str, array: str) -> Any:
    """One array of a made archive, of the archive inside it if the name says so."""
    with np.load(io.BytesIO(made(name).to_bytes()), allow_pickle=False) as members:
        return members[array]


def edited(name: str, array: str, place: Any, value: Any) -> dict[str, Any]:
    """A change of one entry of an array."""
    found = part(name, array).copy()
    found[place] = value
    return {array: found}


def header_part(name: str, key: str, **changes: Any) -> dict[str, Any]:
    """A change of one mapping in the header."""
    return {"header": {key: json.loads(part(name, "header").tobytes())[key] | changes}}


ATTRIBUTE, PARENT, FIRST, N_GROUPS, N_LEVELS = range(5)  # the columns of a copula's nodes
BOUNDED = {"role": "privatise", "kind": "continuous", "bounds": [0, 10]}

WRONG_COPULAS: dict[str, Callable[[], dict[str, Any]]] = {
    "an attribute twice": lambda: edited(
        "copula", "nodes", (0, ATTRIBUTE), part("copula", "nodes")[1, ATTRIBUTE]
    ),
    "no such attribute": lambda: edited("copula", "nodes", (0, ATTRIBUTE), 3),
    "a parent that comes later": lambda: edited("copula", "nodes", (1, PARENT), 2),
    "its own parent": lambda: edited("copula", "nodes", (1, PARENT), 1),
    "no such parent": lambda: edited("copula", "nodes", (1, PARENT), -2),
    "groups without a parent": lambda: edited("copula", "nodes", (1, PARENT), -1),
    "a root with groups": lambda: edited("copula", "nodes", (0, N_GROUPS), 2),
    "fewer groups than the parent has levels": lambda: edited("copula", "nodes", (1, N_GROUPS), 1),
    "no level": lambda: edited("copula", "nodes", (2, N_LEVELS), 0),
    "negative levels": lambda: edited("copula", "nodes", (2, slice(N_GROUPS, N_LEVELS + 1)), -4),
    "very many levels": lambda: edited("copula", "nodes", (2, N_LEVELS), 2**62),
    "a latent variable outside the factor": lambda: edited("copula", "nodes", (2, FIRST), 2**40),
    "a negative latent variable": lambda: edited("copula", "nodes", (0, FIRST), -1),
    "a node too few": lambda: {"nodes": part("copula", "nodes")[:-1]},
    "nodes of real numbers": lambda: {"nodes": part("copula", "nodes").astype(np.float64)},
    "a level outside the domain": lambda: edited("copula", "levels", -1, 200),
    "a level twice": lambda: edited("copula", "levels", 1, part("copula", "levels")[0]),
    "a level too many": lambda: {"levels": np.append(part("copula", "levels"), np.uint16(0))},
    "levels of another type": lambda: {"levels": part("copula", "levels").astype(np.int64)},
    "a probability too many": lambda: {
        "probabilities": np.append(part("copula", "probabilities"), 0.0)
    },
    "a negative probability": lambda: edited("copula", "probabilities", 0, -1.0),
    "a probability of 1e300": lambda: edited("copula", "probabilities", 0, 1e300),
    "a probability that is no number": lambda: edited("copula", "probabilities", 0, np.nan),
    "an infinite offset": lambda: edited("copula", "offsets", 0, np.inf),
    "a factor with no number": lambda: edited("copula", "factor", 0, np.nan),
    "a factor of large numbers": lambda: edited("copula", "factor", 0, 1e38),
    "a factor too small": lambda: {"factor": part("copula", "factor")[:-1]},
    "a factor of one number": lambda: {"factor": part("copula", "factor")[:1]},
    "a pair of attributes that are not there": lambda: edited(
        "copula", "raked_tables", (0, 1), 2**40
    ),
    "a pair with a negative attribute": lambda: edited("copula", "raked_tables", (0, 0), -1),
    "a pair of one attribute": lambda: edited(
        "copula", "raked_tables", (0, 1), part("copula", "raked_tables")[0, 0]
    ),
    "a pair in the wrong order": lambda: {
        "raked_tables": part("copula", "raked_tables")[:, [1, 0, 2]]
    },
    "a pair twice": lambda: {
        name: np.concatenate([part("copula", name)] * 2)
        for name in ("raked_tables", "raked_counts", "raked_strengths")
    },
    "tables of four": lambda: {"raked_tables": np.zeros((1, 4), dtype=np.int64)},
    "pairs of real numbers": lambda: {
        "raked_tables": part("copula", "raked_tables").astype(np.float64)
    },
    "no pair": lambda: {
        name: part("copula", name)[:0]
        for name in ("raked_tables", "raked_counts", "raked_strengths")
    },
    "a raked cell too few": lambda: {"raked_counts": part("copula", "raked_counts")[:-1]},
    "raked tables of another type": lambda: {
        "raked_counts": part("copula", "raked_counts").astype(np.float32)
    },
    "a raked count that is no number": lambda: edited("copula", "raked_counts", 0, np.nan),
    "a raked count of 1e300": lambda: edited("copula", "raked_counts", 0, 1e300),
    "a negative raked count": lambda: edited("copula", "raked_counts", 0, -1.0),
    "a third attribute before the second": lambda: edited("copula", "raked_tables", (0, 2), 0),
    "a third attribute that is not there": lambda: edited("copula", "raked_tables", (0, 2), 99),
    "no third attribute, but -2": lambda: edited("copula", "raked_tables", (0, 2), -2),
    **{
        f"a strength of {value!r}": lambda value=value: edited(
            "copula", "raked_strengths", 0, value
        )
        for value in (0.0, -1.0, np.nan, 1e300)
    },  # type: ignore[misc]
    "a strength too few": lambda: {"raked_strengths": part("copula", "raked_strengths")[:-1]},
    "strengths of another type": lambda: {
        "raked_strengths": part("copula", "raked_strengths").astype(np.float32)
    },
    "a report with no number": lambda: header_part("copula", "report", residual=float("nan")),
    "a report of texts": lambda: header_part("copula", "report", moved="x"),
}

WRONG_COLUMNS: dict[str, Callable[[], dict[str, Any]]] = {
    "very many bins": lambda: header_part("copula", "bins", b=10**18),
    "bins below 1": lambda: header_part("copula", "bins", b=0),
    "bins that are true": lambda: header_part("copula", "bins", b=True),
    "other bins": lambda: header_part("copula", "bins", b=6),
    "bins of no column": lambda: header_part("copula", "bins", other=3),
    "bins that are no mapping": lambda: {"header": {"bins": 5}},
    "a column more": lambda: {
        "header": {
            "schema": {
                "columns": header_part("copula", "schema")["header"]["schema"]["columns"]
                | {"d": BOUNDED}
            }
        }
    },
    "other bounds": lambda: {
        "header": {"schema": {"columns": {"a": BOUNDED, "b": BOUNDED, "c": BOUNDED}}}
    },
}

WRONG_TABLES: dict[str, Callable[[], dict[str, Any]]] = {
    "another shape": lambda: {"one_way": part("noisy tables", "one_way")[:-1]},
    "another type": lambda: {"pairs": part("noisy tables", "pairs").astype(np.float64)},
    "a pair less": lambda: {"pairs": part("noisy tables", "pairs")[:-1]},
    "a clique of another shape": lambda: {"clique_0": part("noisy tables", "clique_0")[:-1]},
    "a flat clique": lambda: {"clique_1": part("noisy tables", "clique_1").ravel()},
    "another domain": lambda: {"header": {"sizes": [4, 5, 5]}},
    "sizes that are no whole numbers": lambda: {"header": {"sizes": [4.0, 5.0, 4.0]}},
    "other names": lambda: {"header": {"names": ["a", "b", "d"]}},
    **{
        f"{n!r} rows": lambda n=n: {"header": {"n_rows": n}}
        for n in (1e18, float("nan"), float("inf"), -1e18, "9", None, True)
    },  # type: ignore[misc]
}

WRONG_HISTOGRAMS: dict[str, Callable[[], dict[str, Any]]] = {
    "a cell outside the domain": lambda: edited(
        "noisy histogram", "keys", -1, DOMAIN.size_of(DOMAIN.names)
    ),
    "a negative cell": lambda: edited("noisy histogram", "keys", 0, -3),
    "a cell twice": lambda: edited(
        "noisy histogram", "keys", 0, part("noisy histogram", "keys")[1]
    ),
    "cells not in order": lambda: {"keys": part("noisy histogram", "keys")[::-1]},
    "cells of another type": lambda: {"keys": part("noisy histogram", "keys").astype(np.float64)},
    "cells of another shape": lambda: {
        name: part("noisy histogram", name).reshape(1, -1) for name in ("keys", "weights")
    },
    "a weight too few": lambda: {"weights": part("noisy histogram", "weights")[:-1]},
    "weights of another type": lambda: {
        "weights": part("noisy histogram", "weights").astype(np.uint8)
    },
    "weights below the threshold": lambda: {"weights": -part("noisy histogram", "weights")},
    "a weight of 0": lambda: edited("noisy histogram", "weights", 0, 0),
    "weights that overflow": lambda: {
        "weights": np.full_like(part("noisy histogram", "weights"), 2**62)
    },
    "a domain of too many cells": lambda: {
        "header": {"names": ["a", "b", "c", "d"], "sizes": [65536] * 4}
    },
    "another domain": lambda: {"header": {"sizes": [4, 5, 5]}},
    "no cut for a threshold": lambda: {"header": {"cut": None}},
    "a cut of 0": lambda: {"header": {"cut": 0}},
    "Gaussian noise of fine counts": lambda: {
        "header": {
            "fine": to_dict(DiscreteGaussian(sigma=2.0, sensitivity=1.5, adjacency="replace-one"))
        }
    },
    "an unknown threshold": lambda: header_part("noisy histogram", "plan", threshold="high"),
    "a factor that is no number": lambda: header_part(
        "noisy histogram", "plan", factor=float("nan")
    ),
    "a negative ε": lambda: header_part("noisy histogram", "plan", epsilon=-1.0),
    "no rows of a unit": lambda: header_part("noisy histogram", "plan", rows=0),
    **{
        f"{n!r} rows": lambda n=n: {"header": {"n_rows": n}}
        for n in (1e18, float("nan"), "9", True)
    },  # type: ignore[misc]
}


def inside(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The change of an archive that holds another, made so that the inner one is changed."""
    return {"noisy": np.frombuffer(changed(made(name).to_bytes(), **changes), dtype=np.uint8)}


@pytest.mark.parametrize("wrong", WRONG_COPULAS)
def test_a_copula_of_wrong_numbers_is_refused(wrong: str) -> None:
    refused("copula", changed(made("copula").to_bytes(), **WRONG_COPULAS[wrong]()))


@pytest.mark.parametrize("wrong", WRONG_COLUMNS)
def test_columns_that_are_not_those_of_the_counts_are_refused(wrong: str) -> None:
    for name in ("copula", "tables", "histogram"):
        refused(name, changed(made(name).to_bytes(), **WRONG_COLUMNS[wrong]()))


@pytest.mark.parametrize("wrong", WRONG_TABLES)
def test_tables_of_wrong_numbers_are_refused(wrong: str) -> None:
    changes = WRONG_TABLES[wrong]()
    for name in ("copula", "tables"):
        refused(name, changed(made(name).to_bytes(), **inside("noisy tables", changes)))
    if wrong != "other names":  # tables without columns may have any; these have other cliques
        refused("noisy tables", changed(made("noisy tables").to_bytes(), **changes))


@pytest.mark.parametrize("wrong", WRONG_HISTOGRAMS)
def test_a_histogram_of_wrong_numbers_is_refused(wrong: str) -> None:
    changes = WRONG_HISTOGRAMS[wrong]()
    refused(
        "histogram", changed(made("histogram").to_bytes(), **inside("noisy histogram", changes))
    )
    if wrong != "another domain":
        refused("noisy histogram", changed(made("noisy histogram").to_bytes(), **changes))


READ_AND_SAMPLE = """
import sys
from dpdask.errors import InputError
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.streams import RunKey
try:
    for path in sys.argv[1:]:
        read = FittedCopula.from_bytes(open(path, "rb").read(), "copula.npz")
        print(sum(batch.num_rows for batch in read.batches(0, 20_000, 20_000, RunKey.insecure(1), "0")))
except InputError as error:
    sys.exit(error.exit_code)
"""


def wide_copula() -> dict[str, Any]:
    """A copula of 2000 and 2 levels, independent: its bytes, with what makes its second node's groups too few."""
    wide, n = Domain(names=("x", "y"), sizes=(2000, 2)), 2000
    none = MarginalCounts.of_codes(wide, np.zeros((2, 1), dtype=wide.code_dtype), ())
    tables = measure(
        none, plan_noise(Budget(epsilon=1.0), 2), n_rows_public=True, rng=keyed("wide")
    )
    columns = {
        name: {"role": "privatise", "kind": "discrete", "levels": list(range(size))}
        for name, size in zip("xy", wide.sizes, strict=True)
    }
    root = {
        "levels": np.arange(n, dtype=np.uint16),
        "probabilities": np.full((1, n), 1 / n),
        "offsets": np.zeros((1, n), dtype=np.float32),
    }
    child = {
        "levels": np.arange(2, dtype=np.uint16),
        "probabilities": np.full((n, 2), 0.5),
        "offsets": np.zeros((n, 2), dtype=np.float32),
    }
    nodes = (
        Node(attribute=0, parent=-1, first=0, **root),
        Node(attribute=1, parent=0, first=n, **child),
    )
    fitted = FittedCopula(
        schema=Schema.from_dict({"columns": columns}),
        types=pa.schema({"x": pa.int64(), "y": pa.int64()}),
        bins={},
        noisy=tables,
        model=CopulaModel(
            domain=wide, n_rows=1.0, nodes=nodes, factor=np.eye(n + 1, dtype=np.float32)
        ),
        report=FitReport(n_latents=n + 1, kept_share=0.0, moved=0.0, n_iterations=0, residual=0.0),
    )
    few = replace(
        nodes[1], probabilities=np.full((1, 2), 0.5), offsets=np.zeros((1, 2), dtype=np.float32)
    )
    return {
        "right": fitted.to_bytes(),
        "few groups": replace(
            fitted, model=replace(fitted.model, nodes=(nodes[0], few))
        ).to_bytes(),
    }


def test_a_copula_that_would_write_outside_its_arrays_is_refused_and_not_sampled(
    tmp_path: Path,
) -> None:
    paths = []
    for name, data in wide_copula().items():  # the right one first: it is sampled
        paths.append(tmp_path / f"{name}.npz")
        paths[-1].write_bytes(data)
    found = subprocess.run(
        [sys.executable, "-c", READ_AND_SAMPLE, *map(str, paths)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout.strip()) == (InputError.exit_code, "20000"), found.stderr


def test_tables_of_another_format_or_with_other_noise_make_the_copula_another() -> None:
    data = made("copula").to_bytes()
    tables = made("copula").noisy.to_bytes()
    unknown = {"one_way": None, "pairs": {"format": 1, "kind": "unknown"}, "cliques": []}
    local = {
        "one_way": {"format": 1, "kind": "local-release", "epsilon": 1.0, "n": 1, "unit": "row"},
        "pairs": None,
        "cliques": [],
    }
    for header in ({"format": 999}, {"noise": unknown}, {"noise": local}):
        refused("noisy tables", changed(tables, header))
        refused(
            "copula", changed(data, noisy=np.frombuffer(changed(tables, header), dtype=np.uint8))
        )


def test_a_saved_file_tells_the_released_columns_alone() -> None:
    for name in ("copula", "histogram", "tables"):
        again = type(made(name)).from_bytes(made(name).to_bytes(), "here.npz")
        assert again.schema.columns == {
            column: SCHEMA.columns[column] for column in SCHEMA.privatised
        }
        assert (again.types if name == "copula" else again.columns, again.bins) == (TYPES, BINS)


def test_the_layout_of_an_array_in_memory_does_not_matter_and_objects_are_not_written() -> None:
    archive = Archive(kind="x", format=1, noun="x")
    table = np.arange(6).reshape(2, 3)
    assert archive.pack({}, {"table": np.asfortranarray(table)}) == archive.pack(
        {}, {"table": table}
    )
    with pytest.raises(ValueError, match="allow_pickle"):
        archive.pack({}, {"objects": np.array([{}], dtype=object)})
    with pytest.raises(TypeError):
        archive.pack({"x": object()}, {})


@pytest.mark.parametrize(
    ("name", "reference"), [("dip", Histogram()), ("chain", Chain(fraction=0.5)), ("tree", Tree())]
)
def test_the_mechanism_names_the_class_of_its_release(name: str, reference: Reference) -> None:
    cls = bind(DipSpec(reference=reference), SCHEMA, Budget(epsilon=1.0)).release_type
    assert cls is type(made(name))
    folder = new_folder()
    assert type(load(folder, keep(folder, RELEASE_NAME, made(name).to_bytes()), cls)) is cls
    for other in {"dip", "chain", "tree", "noisy tables"} - {name}:
        with pytest.raises(InputError, match=rf"^release\.npz: this is not a {cls.archive.noun}"):
            load(folder := new_folder(), keep(folder, RELEASE_NAME, made(other).to_bytes()), cls)


def test_a_machine_without_memory_is_not_taken_for_another_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who was told to abort and begin again would pay twice."""
    data = made("dip").to_bytes()
    for error in (MemoryError, pa.ArrowMemoryError):

        def fail(*_: object, raised: type[Exception] = error) -> None:
            raise raised

        monkeypatch.setattr(DipRelease, "_of_contents", fail)
        with pytest.raises(MemoryError):
            DipRelease.from_bytes(data, "here.npz")


def test_what_was_kept_first_stays() -> None:
    """A driver that lost its run and wakes up late replaces nothing."""
    folder = new_folder()
    first, other = made("dip").to_bytes(), made("chain").to_bytes()
    assert keep(folder, RELEASE_NAME, first) == keep(folder, RELEASE_NAME, other)
    assert folder.read(RELEASE_NAME) == first


def test_a_size_that_no_member_has_is_refused_before_memory_is_asked_for() -> None:
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


def test_a_member_that_nobody_asks_for_is_not_inflated() -> None:
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
def threads_that_alternate() -> Iterator[None]:
    """Let threads take turns all the time, also while the garbage collector runs: Python code runs then, as that of finalizers does."""

    def pause(*_: Any) -> None:
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
def test_threads_read_at_once() -> None:
    archive = Archive(kind="toy", format=1, noun="toy")
    data = archive.pack({}, {f"a{number}": np.arange(3) for number in range(20)})

    def read(_: int) -> int:
        return archive.unpack(
            data,
            "here",
            lambda _, arrays: int(sum(arrays[f"a{number}"].sum() for number in range(20))),
        )

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(100))) == [60] * 100
