"""Everything a user can get wrong, each through the command line: `python -m tests.e2e.bad_input` prints the table.

A case builds its files in an empty folder and returns the words of the command. The data of every case hold `SECRETS`,
which no line may show.
"""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from e2e.helpers import call_cli, refusing

from dpdask.engine.account import open_ledger
from dpdask.engine.scan import holdout_mask
from dpdask.errors import TemporaryError
from dpdask.io.fragments import discover
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job
from dpdask.schema import Schema
from dpdask.streams import RunKey, stream

TEXT, NUMBER = "Zebulon-Quux", 1815.1875
SECRETS = (TEXT, str(NUMBER))
N_ROWS = 200
COLUMNS: dict[str, Any] = {
    "userId": {"role": "keep", "type": "int64"},
    "rating": {"role": "privatise", "kind": "discrete", "levels": [1.0, 2.0, 3.0]},
    "price": {"role": "privatise", "kind": "continuous", "bounds": [0.0, 100.0]},
    "note": {"role": "drop"},
}
JOB: dict[str, Any] = {
    "name": "bad-input",
    "input": {"path": "data"},
    "output": {"path": "out"},
    "schema": "schema.yaml",
    "privacy": {"epsilon": 1.0},
    "mechanism": {"kind": "dip", "reference": {"kind": "holdout", "fraction": 0.25}},
    "cluster": {"kind": "synchronous"},
}
KNOWN: dict[str, Any] = {
    "kind": "known",
    "columns": {
        "rating": {"probabilities": [0.2, 0.3, 0.5]},
        "price": {"name": "uniform", "loc": 0, "scale": 100},
    },
}
Words = list[str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that can be wrong (or must not be).

    Attributes
    ----------
    name
        As it stands in the table.
    code
        The exit code.
    says
        A regular expression that the line matches; of a case that works, nothing.
    prepare
        Builds the files of the case and returns the command's words.
    kept
        Whether the unfinished run stays, so that a re-run can go on.
    config, env
        Dask configuration and environment around the command.
    """

    name: str
    code: int
    says: str
    prepare: Callable[[Path], Words]
    kept: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """What stands on stderr beside the JSON lines of progress and warnings."""
        return [line for line in self.err.splitlines() if not _is_json(line)]


def _is_json(line: str) -> bool:
    try:
        return bool(set(json.loads(line)) & {"stage", "step", "warning"})
    except (ValueError, TypeError):
        return False


def command(*words: str) -> Ended:
    """Run the command line in this process."""
    ended = call_cli(*words)
    return Ended(code=ended.returncode, out=ended.stdout, err=ended.stderr)


def files(folder: Path) -> dict[str, str]:
    """Return the digest of every file below a folder, hidden ones too; of a folder its name alone."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else ""
        for path in sorted(folder.rglob("*"))
    }


def execute(case: Case, folder: Path) -> tuple[Ended, dict[str, str], dict[str, str]]:
    """Return how a case ended, and the files before and after."""
    with (
        mock.patch.dict(
            os.environ, {key: value.format(folder=folder) for key, value in case.env.items()}
        ),
        dask.config.set(dict(case.config)),
    ):
        words = case.prepare(folder)
        before = files(folder)
        return command(*words), before, files(folder)


# ---- files


def table(n_rows: int = N_ROWS, seed: int = 1, **changed: Any) -> pa.Table:
    """Return rows as the schema declares them, with columns changed, added, or (None) left out."""
    rng = np.random.default_rng(seed)
    columns: dict[str, Any] = {
        "userId": pa.array(rng.integers(0, 50, n_rows)),
        "rating": pa.array(rng.choice([1.0, 2.0, 3.0], n_rows)),
        "price": pa.array(rng.uniform(0.0, 100.0, n_rows)),
        "note": pa.array([TEXT] * n_rows),
    } | changed
    return pa.table({name: values for name, values in columns.items() if values is not None})


def with_value(name: str, value: Any) -> pa.Table:
    """Return a good table in which one value is wrong."""
    good = table()
    values = good.column(name).to_pylist()
    values[N_ROWS // 2] = value
    return table(**{name: pa.array(values)})


def job(
    folder: Path,
    parts: Mapping[str, pa.Table] | None = None,
    *words: str,
    columns: Any = COLUMNS,
    verb: str = "run",
    **changed: Any,
) -> Words:
    """Write a job, its schema and its table, and return the words that run it. `a__b=c` changes the job's key a.b."""
    for name, part in (
        parts if parts is not None else {"part-0.parquet": table(), "part-1.parquet": table(seed=2)}
    ).items():
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(part, path, row_group_size=100)
    written = copy.deepcopy(JOB)
    for key, value in changed.items():
        *parents, last = key.split("__")
        inner = written
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    (folder / "schema.yaml").write_text(
        columns
        if isinstance(columns, str)
        else yaml.safe_dump({"columns": columns}, sort_keys=False),
        encoding="utf-8",
    )
    (folder / "job.yaml").write_text(
        yaml.safe_dump(written, sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
    return [verb, str(folder / "job.yaml"), *words]


def _csv(folder: Path, *texts: str | bytes, **changed: Any) -> Words:
    (folder / "data").mkdir()
    for index, text in enumerate(texts):
        (folder / "data" / f"part-{index}.csv").write_bytes(
            text if isinstance(text, bytes) else text.encode()
        )
    return job(folder, {}, **changed)


_HEADER = "userId,rating,price,note\n"
_LINES = "".join(f"{row},{row % 3 + 1},{row % 100}.5,{TEXT}\n" for row in range(400))


def _edited(folder: Path, edit: Callable[[bytes], bytes], **written: Any) -> Words:
    """Return the words of a job whose second file was damaged after it was written."""
    words = job(folder)
    path = folder / "data" / "part-1.parquet"
    pq.write_table(table(seed=2), path, row_group_size=100, **written)
    path.write_bytes(edit(path.read_bytes()))
    return words


def _cut_inside(data: bytes) -> bytes:
    return data[:500] + data[900:]


def _page_overwritten(data: bytes) -> bytes:
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(1).column(2)
    start = column.dictionary_page_offset or column.data_page_offset
    return data[:start] + b"\xff" * 64 + data[start + 64 :]


def bit_flipped(data: bytes) -> bytes:
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(1).column(0)
    place = column.data_page_offset + column.total_compressed_size - 20
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def crashed(folder: Path) -> Words:
    """Return the words of a job whose first run stopped after it was fitted."""
    words = job(folder)
    with (
        mock.patch("dpdask.jobs.run.write_all", side_effect=TemporaryError("crash")),
        contextlib.suppress(TemporaryError),
    ):
        run_job(load_job(words[1]))
    assert (folder / ".out.dpdask" / "release.npz").exists()
    return words


def _input_changed(folder: Path) -> Words:
    words = crashed(folder)
    pq.write_table(table(seed=3), folder / "data" / "part-1.parquet")
    return words


def _input_lost(folder: Path) -> Words:
    words = crashed(folder)
    (folder / "data" / "part-1.parquet").unlink()
    return words


def _another_job_staged(folder: Path) -> Words:
    return [*crashed(folder), "--set", "privacy.epsilon=2"]


def _another_job_released(folder: Path) -> Words:
    words = job(folder)
    assert command(*words).code == 0
    return [*words, "--set", "privacy.epsilon=2"]


def _released(folder: Path) -> Words:
    words = job(folder)
    assert command(*words).code == 0
    return words


def _one_held_out(folder: Path) -> Words:
    words = job(folder, {"part-0.parquet": table(2)}, mechanism__reference__fraction=0.5)
    [fragment] = discover(f"file://{folder}/data", Schema.from_dict({"columns": COLUMNS})).fragments
    seed = next(
        seed
        for seed in range(100)
        if holdout_mask(stream(RunKey.insecure(seed), "holdout", fragment.id), 2, 0.5).sum() == 1
    )
    return [*words, "--set", f"insecure_seed={seed}"]


def _output(folder: Path, make: Callable[[Path], object]) -> Words:
    make(folder / "out")
    return job(folder)


def _filled(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text("mine")


def _broken_manifest(path: Path) -> None:
    (path / "_dpdask").mkdir(parents=True)
    (path / "_dpdask" / "manifest.json").write_text("{")


def _header_alone(folder: Path, **changed: Any) -> Words:
    return _csv(folder, _HEADER, **changed)


def _empty_groups(folder: Path, **changed: Any) -> Words:
    words = job(folder, {}, **changed)
    (folder / "data").mkdir()
    pq.ParquetWriter(folder / "data" / "a.parquet", table().schema).close()
    return words


def _empty_file_among_good(folder: Path) -> Words:
    words = job(folder, {"b.parquet": table(), "d.parquet": table(0), "e.parquet": table(seed=2)})
    pq.ParquetWriter(folder / "data" / "c.parquet", table().schema).close()
    return words


def _duplicated_in_file(folder: Path) -> Words:
    good = table()
    twice = pa.Table.from_arrays(
        [*good.columns, good.column("rating")], names=[*good.column_names, "rating"]
    )
    return job(folder, {"part-0.parquet": twice})


def _without(name: str) -> Callable[[Path], Words]:
    return lambda folder: (job(folder), (folder / name).unlink())[0]


def _mixed_kinds(folder: Path) -> Words:
    words = _csv(folder, _HEADER + _LINES)
    pq.write_table(table(), folder / "data" / "part-1.parquet")
    return words


def _truncated_gzip(folder: Path) -> Words:
    words = job(folder, {})
    (folder / "data").mkdir()
    data = gzip.compress(
        (
            _HEADER
            + "".join(
                f"{row},{row % 3 + 1},{row * 0.001:.3f},{row * 7919 % 104729}\n"
                for row in range(50_000)
            )
        ).encode()
    )
    (folder / "data" / "part.csv.gz").write_bytes(data[: len(data) // 2])
    return words


def _charged(folder: Path, epsilon: float, dataset: str = "ratings", verb: str = "run") -> Words:
    """Return the words of a job that is charged to a dataset with a budget, on a ledger that knows `ratings`."""
    open_ledger(f"sqlite:///{folder}/ledger.db").init("ratings", epsilon)
    return job(folder, verb=verb, ledger={"url": "sqlite:///ledger.db", "dataset": dataset})


def _columns(**changed: Any) -> dict[str, Any]:
    return {name: column for name, column in (COLUMNS | changed).items() if column is not None}


_TWICE = "columns:\n  userId: {role: keep}\n  rating: {role: drop}\n  rating: {role: keep}\n"
_BAD = {"part-0.parquet": table(seed=2)}


def _case(
    name: str,
    code: int,
    says: str,
    *words: str,
    parts: Mapping[str, pa.Table] | None = None,
    columns: Any = COLUMNS,
    **changed: Any,
) -> Case:
    return Case(
        name=name,
        code=code,
        says=says,
        prepare=lambda folder: job(folder, parts, *words, columns=columns, **changed),
    )


def _bad_value(name: str, column: str, value: Any, says: str) -> Case:
    """Return a case of one value that the schema refuses: the line names its column, and neither file nor row group."""
    return _case(
        name,
        65,
        rf"^dpdask: column '{column}': {says}",
        parts={**_BAD, "part-1.parquet": with_value(column, value)},
        columns=_REFUSING,
    )


def _outside(make: Callable[..., Case], **columns: Any) -> tuple[Case, ...]:
    """Return the cases of one kind of job whose values outside their domain are declared to become something else."""
    without = {name: column for name, column in columns.items() if column["role"] == "drop"}
    clipped = _PRICE | {"outside": "clip"}
    nulls = {
        "price": _PRICE | {"nulls": "level", "outside": "null"},
        "rating": _RATING | {"nulls": "level", "outside": "null"},
    }
    return (
        *(
            make(
                f"{what}, clipped",
                0,
                "",
                parts={**_BAD, "a.parquet": with_value("price", value)},
                columns=COLUMNS | {"price": clipped} | without,
            )
            for what, value in (
                ("a value outside its bounds", NUMBER),
                ("an infinity", float("inf")),
                ("a number beyond 2**1021", -1e308),
            )
        ),
        make(
            "a clip that is not declared",
            0,
            "",
            parts={**_BAD, "a.parquet": with_value("price", NUMBER)},
            columns=COLUMNS | without,
        ),
        make(
            "NaN where null is no level",
            65,
            r"^dpdask: column 'price': holds NaN; declare `nulls: level`",
            parts={**_BAD, "a.parquet": with_value("price", float("nan"))},
            columns=COLUMNS | without,
        ),
        make(
            "another level",
            0,
            "",
            parts={**_BAD, "a.parquet": with_value("rating", NUMBER)},
            columns=COLUMNS | {"rating": _RATING | {"other": 3.0}} | without,
        ),
        *(
            make(
                f"a {name} of {value} that becomes null",
                0,
                "",
                parts={**_BAD, "a.parquet": with_value(name, value)},
                columns=COLUMNS | nulls | without,
            )
            for name, value in (("price", NUMBER), ("price", float("nan")), ("rating", NUMBER))
        ),
    )


_RATING = COLUMNS["rating"]
_PRICE = COLUMNS["price"]
_REFUSING = COLUMNS | {"price": _PRICE | {"outside": "refuse"}}
_NOBODYS = COLUMNS | {"userId": {"role": "drop"}}
_NOBODYS_REFUSING = _REFUSING | {"userId": {"role": "drop"}}
_WIDE = {f"p{place}": _PRICE for place in range(5)} | {name: {"role": "drop"} for name in COLUMNS}
_NULLS = pa.nulls(N_ROWS, pa.float64())


def _copula(
    name: str,
    code: int,
    says: str,
    *words: str,
    parts: Mapping[str, pa.Table] | None = None,
    columns: Any = None,
    **changed: Any,
) -> Case:
    """Return a case of a copula job: its mechanism's keys begin with `mechanism__`, the other changes are as in `job`."""
    given = {"mechanism": {"kind": "copula", "bins": 6}, **changed}
    return _case(
        f"copula: {name}", code, says, *words, parts=parts, columns=columns or _NOBODYS, **given
    )


def _marginals(
    name: str,
    code: int,
    says: str,
    *words: str,
    columns: Any = None,
    parts: Mapping[str, pa.Table] | None = None,
    **mechanism: Any,
) -> Case:
    """Return a case of a marginals job."""
    given = {"kind": "marginals", "cliques": [["rating"], ["rating", "price"]], **mechanism}
    return _case(
        f"marginals: {name}",
        code,
        says,
        *words,
        parts=parts,
        columns=columns or _NOBODYS,
        mechanism=given,
    )


def _wide() -> dict[str, pa.Table]:
    prices = pa.array(np.linspace(0.0, 100.0, N_ROWS))
    return {"part-0.parquet": table(**dict.fromkeys(_WIDE.keys() - COLUMNS.keys(), prices))}


NOISY_TABLES: tuple[Case, ...] = (
    _copula(
        "a column to be kept",
        64,
        r"column 'userId': synthetic records do not correspond to input rows, so no column can have the role keep; give it",
        columns=COLUMNS,
    ),
    *(
        _copula(
            f"n_rows {text}",
            64,
            rf"job\.yaml, .*mechanism\.n_rows: a whole number of at least 1, or `input`, is expected, not '?{text}'?$",
            "--set",
            f"mechanism.n_rows={text}",
        )
        for text in ("0", "-1", "1.5", "all")
    ),
    _copula(
        "δ = 1",
        64,
        r"job\.yaml, .*privacy\.delta: a number below 1 is expected",
        "--set",
        "privacy.delta=1",
    ),
    _copula("a δ of 1 / rows and more", 0, "", "--set", "privacy.delta=0.01"),
    _copula("add-remove", 0, "", "--set", "privacy.adjacency=add-remove"),
    _copula("ε = 1e-6", 0, "", "--set", "privacy.epsilon=1e-6"),
    _copula(
        "ε = 1e-6 and a δ", 0, "", "--set", "privacy.epsilon=1e-6", "--set", "privacy.delta=1e-9"
    ),
    _copula("ε = 100", 0, "", "--set", "privacy.epsilon=100"),
    _copula(
        "one level",
        0,
        "",
        columns=_NOBODYS | {"rating": _RATING | {"levels": [1.0]}},
        parts={"a.parquet": table(rating=pa.array([1.0] * N_ROWS))},
    ),
    _copula(
        "one column of one level",
        0,
        "",
        columns=_NOBODYS | {"rating": _RATING | {"levels": [1.0]}, "price": {"role": "drop"}},
        parts={"a.parquet": table(rating=pa.array([1.0] * N_ROWS))},
    ),
    _copula("one row", 0, "", parts={"a.parquet": table(1)}),
    _copula("no numeric columns", 0, "", columns=_NOBODYS | {"price": {"role": "drop"}}),
    _copula("no columns of levels", 0, "", columns=_NOBODYS | {"rating": {"role": "drop"}}),
    _copula(
        "a column of nulls, a level",
        0,
        "",
        columns=_NOBODYS
        | {"rating": _RATING | {"nulls": "level"}, "price": _PRICE | {"nulls": "level"}},
        parts={"a.parquet": table(rating=_NULLS, price=_NULLS)},
    ),
    _copula(
        "a column of nulls, refused",
        65,
        r"^dpdask: column 'rating': holds a null",
        parts={"a.parquet": table(rating=_NULLS)},
    ),
    *_outside(_copula, userId={"role": "drop"}),
    _copula(
        "a value outside its levels",
        65,
        r"^dpdask: column 'rating': holds a value outside its levels",
        parts={**_BAD, "part-1.parquet": with_value("rating", NUMBER)},
    ),
    _copula(
        "a value outside its bounds",
        65,
        r"^dpdask: column 'price': holds a value outside its bounds",
        parts={**_BAD, "part-1.parquet": with_value("price", NUMBER)},
        columns=_NOBODYS_REFUSING,
    ),
    *(
        make(
            f"a table of 0 rows, under add-remove{what}",
            0,
            "",
            parts={"a.parquet": table(0)},
            **changed,
        )
        for make, what, changed in (
            (_copula, "", {"privacy": {"epsilon": 1.0, "adjacency": "add-remove"}}),
            (
                _copula,
                " with a δ",
                {"privacy": {"epsilon": 1.0, "delta": 1e-6, "adjacency": "add-remove"}},
            ),
        )
    ),
    Case(
        name="copula: a table of 0 row groups, under add-remove",
        code=0,
        says="",
        prepare=lambda folder: _empty_groups(
            folder, columns=_NOBODYS, mechanism={"kind": "copula"}, privacy__adjacency="add-remove"
        ),
    ),
    Case(
        name="copula: a CSV file of a header alone, under add-remove",
        code=0,
        says="",
        prepare=lambda folder: _csv(
            folder,
            _HEADER,
            columns=_NOBODYS,
            mechanism={"kind": "copula"},
            privacy__adjacency="add-remove",
        ),
    ),
    _copula("a table of 0 rows", 65, r"data: the table has no rows", parts={"a.parquet": table(0)}),
    Case(
        name="copula: a CSV file of a header alone",
        code=65,
        says=r"data: the table has no rows",
        prepare=lambda folder: _csv(
            folder, _HEADER, columns=_NOBODYS, mechanism={"kind": "copula"}
        ),
    ),
    _copula(
        "ten thousand levels",
        64,
        r"schema\.yaml, .*columns\.rating: a column may have between 1 and 2,048 levels; declare a column with more values continuous, or bin it",
        columns="columns: {userId: {role: drop}, note: {role: drop}, price: {role: drop}, rating: {role: privatise, kind: discrete, levels: "
        f"{list(range(10_000))}}}}}",
    ),
    _copula(
        "a table too large to hold",
        64,
        r"the table 'p4' x 'p3': it has 1,073,741,824 cells, and the limit is 16,777,216; lower mechanism\.bins for its columns",
        columns=_WIDE,
        parts=_wide(),
        mechanism__bins=32_768,
    ),
    _copula(
        "tables too large to hold, found by the plan",
        64,
        r"the table 'p4' x 'p3' and the others: all tables together have 167,772,160 cells; the limit is 134,217,728; lower mechanism\.bins",
        columns=_WIDE,
        parts=_wide(),
        mechanism__bins=4096,
        verb="plan",
    ),
    _copula(
        "more cells than codes",
        64,
        r"column 'price': has 70,001 cells, and the limit is 65,536; declare fewer bins for it",
        "--set",
        f"mechanism.bins={{price: {[place / 1000 + 0.001 for place in range(70_000)]}}}",
    ),
    _copula(
        "a column without bounds",
        64,
        r"column 'price': a column without bounds has no public cells to count in; give it bounds in the schema, or drop it",
        columns=_NOBODYS | {"price": {"role": "privatise", "kind": "continuous"}},
    ),
    _copula(
        "bins of a column that has levels",
        64,
        r"mechanism\.bins\.rating: is not a continuous or mixed column",
        mechanism__bins={"rating": 3},
    ),
    _copula(
        "bins of an unknown column",
        64,
        r"mechanism\.bins\.nobody: is not a continuous or mixed column",
        mechanism__bins={"nobody": 3},
    ),
    *(
        _copula(
            f"bins {text}",
            64,
            r"job\.yaml, .*mechanism\.bins: .*from 1 to 32,768",
            "--set",
            f"mechanism.bins={text}",
        )
        for text in ("0", "-3", "2.5", "true", "40000")
    ),
    _copula(
        "bins 0 of one column",
        64,
        r"job\.yaml, .*mechanism\.bins\S*: column 'price': a number of cells",
        mechanism__bins={"price": 0},
    ),
    _copula(
        "bins that are a list of texts",
        64,
        r"mechanism\.bins\S*: column 'price': .*a list of the first",
        mechanism__bins={"price": ["a"]},
    ),
    *(
        _copula(
            f"bins {text}",
            64,
            r"mechanism\.bins: column 'price': the first values of the cells must increase",
            mechanism__bins={"price": bins},
        )
        for text, bins in (("that do not increase", [0, 50, 20]), ("of NaN", [0.0, float("nan")]))
    ),
    *(
        _copula(
            f"bins {text}",
            64,
            r"bins of 'price': the first values of the cells must increase within the column's bounds",
            mechanism__bins=bins,
        )
        for text, bins in (
            ("outside the bounds", {"price": [0, 101]}),
            ("below the bounds", {"price": [-1, 20]}),
        )
    ),
    _copula(
        "an unknown key of the weights",
        64,
        r"unknown key 'mechanism\.weights\.oneway'; did you mean 'one_way'\?",
        mechanism__weights={"oneway": 1},
    ),
    _copula(
        "pairs that weigh nothing",
        64,
        r"mechanism\.weights\.two_way: a number above 0 is expected",
        mechanism__weights={"two_way": 0},
    ),
    _copula(
        "a negative weight",
        64,
        r"mechanism\.weights\.one_way: .* expected",
        mechanism__weights={"one_way": -1},
    ),
    _copula(
        "a reference",
        64,
        r"unknown key 'mechanism\.reference'",
        mechanism__reference={"kind": "histogram"},
    ),
    _marginals("tables", 0, ""),
    _marginals(
        "a column to be kept",
        64,
        r"column 'userId': the cells of a table do not correspond to input rows, so no column can have the role keep",
        columns=COLUMNS,
    ),
    _marginals(
        "no tables",
        64,
        r"job\.yaml, .*mechanism\.cliques: a list of tables is expected, each a list of columns",
        cliques=[],
    ),
    _marginals(
        "a table of no columns",
        64,
        r"job\.yaml, .*mechanism\.cliques: a list of tables is expected",
        cliques=[["rating"], []],
    ),
    _marginals(
        "columns instead of tables",
        64,
        r"job\.yaml, .*mechanism\.cliques: a list of tables is expected",
        cliques=["rating"],
    ),
    _case(
        "marginals: no cliques",
        64,
        r"the key 'mechanism\.cliques' is missing; add it",
        columns=_NOBODYS,
        mechanism={"kind": "marginals"},
    ),
    _marginals(
        "an unknown column",
        64,
        r"mechanism\.cliques, 'rate': is not a privatised column; correct its name",
        cliques=[["rate"]],
    ),
    _marginals(
        "a dropped column",
        64,
        r"mechanism\.cliques, 'userId': is not a privatised column",
        cliques=[["userId"]],
    ),
    _marginals(
        "a column twice",
        64,
        r"mechanism\.cliques, rating x rating: a column or a table is repeated",
        cliques=[["rating", "rating"]],
    ),
    _marginals(
        "a table twice",
        64,
        r"mechanism\.cliques, price x rating: .* is repeated",
        cliques=[["rating", "price"], ["price", "rating"]],
    ),
    _marginals(
        "too few weights",
        64,
        r"mechanism\.weights: there must be one weight for each table, not 1 for 2; give 2$",
        weights=[1],
    ),
    _marginals(
        "a weight of 0",
        64,
        r"mechanism\.weights: a weight is a positive number, not 0$",
        weights=[1, 0],
    ),
    _marginals(
        "a column called count",
        64,
        r"column 'count': this name is reserved for a column of the released tables; rename it",
        columns=_NOBODYS | {"count": _PRICE},
        parts={"a.parquet": table(count=pa.array(np.linspace(0.0, 100.0, N_ROWS)))},
        cliques=[["count"]],
    ),
    _marginals(
        "a column called count in no table",
        0,
        "",
        columns=_NOBODYS | {"count": _PRICE},
        parts={"a.parquet": table(count=pa.array(np.linspace(0.0, 100.0, N_ROWS)))},
    ),
    _marginals(
        "a table too large to hold",
        64,
        r"the table 'p0' x 'p1' x 'p2': it has 27,000,000 cells",
        columns=_WIDE,
        parts=_wide(),
        bins=300,
        cliques=[["p0", "p1", "p2"]],
    ),
    _marginals(
        "a table of 0 rows", 65, r"data: the table has no rows", parts={"a.parquet": table(0)}
    ),
)

_CUT: dict[str, Any] = {"name": "uniform", "loc": 0, "scale": 100}
_NORM = {"name": "norm", "loc": 50, "scale": 20}
_DESIGNS: dict[str, Any] = {
    "rating": {"design": "case2", "anchors": {"name": "uniform", "loc": 0.5, "scale": 3}},
    "price": {"design": "case1", "anchors": _CUT},
}
_PERTURBED: dict[str, Any] = {
    "design": "interval-differential",
    "perturb": {"epsilon": 1.0, "reference": {"kind": "known", **_CUT}},
    "of": {"design": "case2", "anchors": _CUT},
}


def _interval(
    name: str,
    code: int,
    says: str,
    *words: str,
    price: Any = None,
    designs: Mapping[str, Any] | None = None,
    coverage: bool = False,
    **changed: Any,
) -> Case:
    """Return a case of an interval job, with another design of `price`, or other designs."""
    columns = (
        dict(designs)
        if designs is not None
        else _DESIGNS | ({} if price is None else {"price": price})
    )
    given = {
        "mechanism": {"kind": "interval", "columns": columns, "coverage": coverage},
        "privacy": None,
        "columns": refusing(COLUMNS),
        **changed,
    }
    return _case(f"interval: {name}", code, says, *words, **given)


def _perturb(**changed: Any) -> dict[str, Any]:
    return {**_PERTURBED, "perturb": {**_PERTURBED["perturb"], **changed}}


RANGES: tuple[Case, ...] = (
    _interval("ranges", 0, ""),
    _interval(
        "a column without bounds",
        0,
        "",
        columns=COLUMNS | {"price": {"role": "privatise", "kind": "continuous"}},
    ),
    _interval(
        "ranges and coverage",
        0,
        "",
        coverage=True,
        designs={name: {**design, "reference": _CUT} for name, design in _DESIGNS.items()},
    ),
    _interval("a perturbed column", 0, "", price=_PERTURBED, privacy={"epsilon": 1.0}),
    _interval(
        "an ε but no perturbed column",
        64,
        r"job\.yaml, .*privacy: .* has no ε.*; remove the key 'privacy'",
        privacy={"epsilon": 1.0},
    ),
    _interval(
        "a ledger but no perturbed column",
        64,
        r"job\.yaml, .*ledger: .* has no ε.*; remove the key 'ledger'",
        ledger={"url": "sqlite:///ledger.db", "dataset": "ratings"},
    ),
    _interval(
        "a perturbed column but no ε",
        64,
        r"job\.yaml.*: the key 'privacy' is missing; add it",
        price=_PERTURBED,
    ),
    _interval(
        "an ε smaller than the perturbed column's",
        64,
        r"privacy\.epsilon: is 0\.5, .* spend 1 together; set it to at least 1, or lower mechanism\.columns\.price\.perturb\.epsilon$",
        price=_PERTURBED,
        privacy={"epsilon": 0.5},
    ),
    _interval(
        "a perturbation by a hold-out",
        64,
        r"the perturbation needs a declared distribution",
        price=_perturb(reference={"kind": "holdout", "fraction": 0.2}),
        privacy={"epsilon": 1.0},
    ),
    _interval(
        "a perturbation and a δ",
        64,
        r"privacy\.delta: .* spends no δ",
        price=_PERTURBED,
        privacy={"epsilon": 1.0, "delta": 1e-9},
    ),
    _interval(
        "a perturbation to values out of bounds",
        64,
        r"reference of column 'price': has probability outside the column's bounds",
        price=_perturb(reference={"kind": "known", **_NORM}),
        privacy={"epsilon": 1.0},
    ),
    _interval(
        "no design of a column",
        64,
        r"column 'price': has no design; add it to mechanism\.columns",
        designs={"rating": _DESIGNS["rating"]},
    ),
    _interval(
        "no designs",
        64,
        r"column 'rating': has no design; add it to mechanism\.columns$",
        designs={},
    ),
    _interval(
        "a design of an unknown column",
        64,
        r"mechanism\.columns\.pric: is not a privatised column; did you mean 'price'\?",
        designs=_DESIGNS | {"pric": _DESIGNS["price"]},
    ),
    _interval(
        "a design of a kept column",
        64,
        r"mechanism\.columns\.userId: is not a privatised",
        designs=_DESIGNS | {"userId": _DESIGNS["price"]},
    ),
    _interval(
        "an unknown key of a design",
        64,
        r"unknown key 'mechanism\.columns\.price\.anchor'; did you mean 'anchors'\?",
        price={"design": "case1", "anchor": _CUT},
    ),
    _interval(
        "an unknown design",
        64,
        r"mechanism\.columns\.price\.design: .*'case9'",
        price={"design": "case9", "anchors": _CUT},
    ),
    _interval(
        "a design without a name",
        64,
        r"the key 'mechanism\.columns\.price\.design' is missing; add it",
        price={"anchors": _CUT},
    ),
    _interval(
        "neither anchors nor a least coverage",
        64,
        r"mechanism\.columns\.price: give either `anchors` or `at_least`",
        price={"design": "case1"},
    ),
    *(
        _interval(f"{what} of anchors", 64, says, price={"design": "case1", "anchors": anchors})
        for what, anchors, says in (
            (
                "an unknown distribution",
                {"name": "unifrom"},
                r"anchors of column 'price': scipy\.stats has no continuous distribution 'unifrom'",
            ),
            (
                "a discrete distribution",
                {"name": "poisson", "mu": 3},
                r"no continuous distribution 'poisson'",
            ),
            (
                "an unknown parameter",
                {"name": "norm", "scal": 3},
                r"no continuous distribution 'norm' with these parameters; see scipy\.stats",
            ),
            (
                "a date as a parameter",
                {"name": "uniform", "loc": dt.date(1900, 1, 1)},
                r"price\.anchors: the parameters of a distribution are finite numbers; for dates write days since 1970-01-01, for times",
            ),
            (
                "an infinite parameter",
                {"name": "norm", "scale": float("inf")},
                r"the parameters of a distribution are finite numbers",
            ),
            (
                "too wide a distribution",
                {"name": "pareto", "b": 0.01},
                r"the distribution's tails are too wide to be tabulated; choose another distribution",
            ),
            (
                "an unknown purpose",
                {"optimal_for": "median", "reference": _NORM},
                r"anchors\.optimal_for: .*'mean'",
            ),
            (
                "no reference",
                {"optimal_for": "mean"},
                r"column 'price': this design needs a public reference; add `reference",
            ),
        )
    ),
    *(
        _interval(
            f"a coverage of {target:g} that {design} cannot have",
            64,
            rf"column 'price': anchors of this design reach coverages between {least} and 1, not {target:g}; choose a coverage in between",
            price={
                "design": design,
                "anchors": {"coverage": target, "family": {"name": "norm"}},
                "reference": _NORM,
            },
        )
        for design, target, least in (
            ("case1", 0.5, 0.5),
            ("case2", 0.3, 0.3333),
            ("ring", 0.45, 0.5),
        )
    ),
    *(
        _interval(
            f"a least coverage of {least:g} of {design}",
            64,
            rf"{n_ranges} ranges cannot all have a coverage of {least:g}; at_least may be up to 1/{n_ranges}",
            price={"design": design, "at_least": least, "reference": _NORM},
        )
        for design, least, n_ranges in (("case1", 0.51, 2), ("case2", 0.4, 3))
    ),
    *(
        _interval(
            f"anchors {where}",
            64,
            r"column 'price': no anchor falls between its least and greatest value \(0 and 100\), so its ranges would carry no information; choose",
            price={
                "design": design,
                "anchors": {"name": "uniform", "loc": loc, "scale": 50},
                **more,
            },
        )
        for where, design, loc, more in (
            ("above all values", "case1", 101, {}),
            ("below all values", "case2", -60, {}),
            ("of rounds that end at once", "progressive", 101, {"tau": 0.2, "reference": _CUT}),
        )
    ),
    _interval(
        "anchors of a perturbed column, above all values",
        64,
        r"column 'price': no anchor falls between its least and greatest value",
        price={**_PERTURBED, "of": {"design": "case1", "anchors": {"name": "uniform", "loc": 101}}},
        privacy={"epsilon": 1.0},
    ),
    _interval(
        "anchors above all levels",
        64,
        r"column 'rating': no anchor falls between its least and greatest value \(1 and 3\)",
        designs=_DESIGNS
        | {"rating": {"design": "case1", "anchors": {"name": "uniform", "loc": 3}}},
    ),
    _interval(
        "acceptable intervals that overlap",
        64,
        r"each acceptable interval needs a lower end below its upper end; list them in increasing order, without overlaps",
        price={
            "design": "canonical",
            "n_anchors": 2,
            "anchors": _CUT,
            "acceptable": [[0, 20], [10, 30]],
        },
    ),
    _interval(
        "an exact range that is not there",
        64,
        r"exact_ranges are distinct numbers from 1 to 3",
        price={"design": "canonical", "n_anchors": 2, "anchors": _CUT, "exact_ranges": [4]},
    ),
    _interval(
        "a selection that cannot be ignored",
        64,
        r"column 'price': rho 0\.9 is not ignorable.*; choose at most 0\.\d+, the probability of a coverage of 0\.9",
        price={
            "design": "selective",
            "of": _DESIGNS["price"],
            "tau": 0.9,
            "rho": 0.9,
            "reference": _CUT,
        },
    ),
    _interval(
        "a selection of nothing",
        64,
        r"column 'price': no range of this design has a coverage of 0\.9; choose a lower tau",
        price={
            "design": "selective",
            "of": {"design": "case2", "at_least": 0.3},
            "tau": 0.9,
            "reference": _NORM,
        },
    ),
    _interval(
        "rounds for a coverage",
        64,
        r"a coverage cannot be designed for by rounds",
        price={"design": "progressive", "anchors": {"coverage": 0.8, "family": _NORM}, "tau": 0.2},
    ),
    _interval(
        "coverage without a reference",
        64,
        r"column 'rating': coverage needs a public reference, and its design names none",
        coverage=True,
    ),
    _interval(
        "a kept column that is called like a range",
        64,
        r"column 'price': its released column would be 'price_upper', but another column has that name; rename the other",
        columns=COLUMNS | {"price_upper": {"role": "keep"}},
        parts={"a.parquet": table(price_upper=pa.array([1] * N_ROWS))},
    ),
    _interval(
        "a categorical column",
        64,
        r"column 'note': a categorical column has no order, so it cannot have ranges; drop it",
        columns=COLUMNS
        | {"note": {"role": "privatise", "kind": "categorical", "levels": [TEXT[:3]]}},
    ),
    _interval(
        "nulls that nobody called public",
        64,
        r"column 'price': a null has no range",
        columns=COLUMNS | {"price": _PRICE | {"nulls": "level"}},
    ),
    _interval(
        "values outside that would be seen by their nulls",
        64,
        r"column 'price': values outside the domain become null, and nulls are published, so .*; declare `outside: clip`",
        price={**_DESIGNS["price"], "nulls": "public"},
        columns=COLUMNS | {"price": _PRICE | {"nulls": "level", "outside": "null"}},
    ),
    *(
        _interval(
            f"{value} between bounds",
            65,
            r"^dpdask: column 'price': holds NaN or an infinity; store a missing value as null",
            parts={**_BAD, "a.parquet": with_value("price", float(value))},
        )
        for value in ("inf", "nan")
    ),
    _interval(
        "a value that no float holds exactly, in a column without bounds",
        65,
        r"^dpdask: column 'price': holds a value beyond",
        parts={"a.parquet": table(price=pa.array([2**53 + 1] * N_ROWS))},
        columns=COLUMNS | {"price": {"role": "privatise", "kind": "continuous"}},
    ),
    _interval(
        "nulls that are public",
        0,
        "",
        price={**_DESIGNS["price"], "nulls": "public"},
        columns=COLUMNS | {"price": _PRICE | {"nulls": "level", "outside": "refuse"}},
        parts={"a.parquet": table(price=_NULLS)},
    ),
    *(
        _interval(
            f"a value that is {what}",
            65,
            rf"^dpdask: column '{name}': holds {says}",
            parts={**_BAD, "part-1.parquet": with_value(name, value)},
            columns=_REFUSING,
        )
        for what, name, value, says in (
            ("null", "price", None, "a null"),
            ("NaN", "price", float("nan"), "NaN or an infinity"),
            ("infinite", "price", float("inf"), "NaN or an infinity"),
            ("outside its bounds", "price", NUMBER, "a value outside its bounds"),
            ("none of the levels", "rating", NUMBER, "a value outside its levels"),
        )
    ),
    _interval(
        "a table of 0 rows", 65, r"data: the table has no rows", parts={"a.parquet": table(0)}
    ),
    Case(
        name="interval: a CSV file of a header alone",
        code=65,
        says=r"data: the table has no rows",
        prepare=lambda folder: _csv(
            folder,
            _HEADER,
            privacy=None,
            mechanism={"kind": "interval", "columns": _DESIGNS},
            columns=COLUMNS | {"price": _PRICE | {"type": "float64", "outside": "refuse"}},
        ),
    ),
)


def _histogram(
    name: str,
    code: int,
    says: str,
    *words: str,
    columns: Any = None,
    parts: Mapping[str, pa.Table] | None = None,
    privacy: Any = None,
    **mechanism: Any,
) -> Case:
    """Return a case of a histogram job: its mechanism's keys, and its privacy's."""
    given = {"kind": "histogram", "bins": 4, **mechanism}
    terms = {"epsilon": 1.0, **(privacy or {})}
    return _case(
        f"histogram: {name}",
        code,
        says,
        *words,
        parts=parts,
        columns=columns or _NOBODYS,
        mechanism=given,
        privacy=terms,
    )


_ROWS = {"output": "rows", "n_rows": 50}
_PRESENCE = {"adjacency": "add-remove"}
HISTOGRAMS: tuple[Case, ...] = (
    _histogram("cells", 0, ""),
    _histogram("cells without a threshold", 0, "", threshold="none"),
    _histogram("rows", 0, "", **_ROWS),
    _histogram("add-remove and a δ", 0, "", privacy={"adjacency": "add-remove", "delta": 1e-9}),
    _histogram("a threshold that no cell reaches", 0, "", factor=1e6),
    _histogram(
        "rows of a threshold that no cell reaches",
        64,
        r"no cell has a positive weight: noise and threshold left nothing to sample; lower mechanism\.bins, raise privacy\.epsilon, or take",
        factor=1e6,
        **_ROWS,
    ),
    _histogram(
        "a column to be kept",
        64,
        r"column 'userId': the cells of a histogram do not correspond to input rows, so no column can have the role keep; give it",
        columns=COLUMNS,
    ),
    _case(
        "histogram: no ε",
        64,
        r"job\.yaml.*: the key 'privacy' is missing; add it",
        columns=_NOBODYS,
        mechanism={"kind": "histogram"},
        privacy=None,
    ),
    _histogram(
        "an unknown key",
        64,
        r"unknown key 'mechanism\.treshold'; did you mean 'threshold'\?",
        treshold="positive",
    ),
    _histogram(
        "an unknown threshold",
        64,
        r"job\.yaml, .*mechanism\.threshold: .*'none', 'positive' or 'enhanced'",
        threshold="some",
    ),
    *(
        _histogram(
            f"factor {text}",
            64,
            r"mechanism\.factor: .* expected",
            "--set",
            f"mechanism.factor={text}",
        )
        for text in ("0", "-1", ".inf", ".nan")
    ),
    *(
        _histogram(
            f"n_rows {text}",
            64,
            rf"mechanism\.n_rows: a whole number of at least 1, or `input`, is expected, not '?{text}'?$",
            "--set",
            f"mechanism.n_rows={text}",
            output="rows",
        )
        for text in ("0", "-1", "1.5", "all")
    ),
    _histogram(
        "a number of cells to release",
        64,
        r"mechanism\.n_rows: the number of records can be chosen for synthetic rows only, but mechanism\.output is cells; remove it",
        n_rows=5,
    ),
    _histogram(
        "points of rows",
        64,
        r"mechanism\.points: synthetic rows lie anywhere in their cells",
        points="spread",
        **_ROWS,
    ),
    _histogram("unknown points", 64, r"mechanism\.points: .*'centre' or 'spread'", points="mean"),
    _histogram(
        "bins of an unknown column",
        64,
        r"mechanism\.bins\.pric: is not a continuous or mixed column that is privatised",
        bins={"pric": 3},
    ),
    _histogram(
        "bins of a column that has levels",
        64,
        r"mechanism\.bins\.rating: is not a continuous or mixed column",
        bins={"rating": 3},
    ),
    *(
        _histogram(
            f"bins {text}", 64, r"job\.yaml, .*mechanism\.bins", "--set", f"mechanism.bins={text}"
        )
        for text in ("0", "-3", "2.5", "many", "40000")
    ),
    _histogram(
        "bins that do not increase",
        64,
        r"mechanism\.bins: column 'price': the first values of the cells must increase",
        bins={"price": [0, 50, 20]},
    ),
    _histogram(
        "bins by a rule that add-remove hides",
        64,
        r"mechanism\.bins: `rule` needs the number of rows",
        bins="rule",
        privacy={"adjacency": "add-remove"},
    ),
    _histogram(
        "a column without bounds",
        64,
        r"column 'price': a column without bounds has no public cells to count in; give it bounds in the schema",
        columns=_NOBODYS | {"price": {"role": "privatise", "kind": "continuous"}},
    ),
    _histogram(
        "more cells than noise can be drawn for",
        64,
        r"has 1,073,741,824 cells; noise can be drawn for at most 10,000,000 cells",
        columns=_WIDE | {name: {"role": "drop"} for name in ("p2", "p3", "p4")},
        parts=_wide(),
        bins=32_768,
        threshold="none",
    ),
    _histogram(
        "a column called weight",
        64,
        r"column 'weight': this name is reserved for a column of the released cells; rename it, or drop it",
        columns=_NOBODYS | {"weight": _PRICE},
        parts={"a.parquet": table(weight=pa.array(np.linspace(0.0, 100.0, N_ROWS)))},
    ),
    *_outside(_histogram, userId={"role": "drop"}),
    _histogram(
        "a value outside its bounds",
        65,
        r"^dpdask: column 'price': holds a value outside its bounds",
        parts={**_BAD, "part-1.parquet": with_value("price", NUMBER)},
        columns=_NOBODYS_REFUSING,
    ),
    _histogram(
        "a value outside its levels",
        65,
        r"^dpdask: column 'rating': holds a value outside its levels",
        parts={**_BAD, "part-1.parquet": with_value("rating", NUMBER)},
    ),
    _histogram(
        "a null",
        65,
        r"^dpdask: column 'price': holds a null",
        parts={**_BAD, "part-1.parquet": with_value("price", None)},
    ),
    *(
        _histogram(
            f"{output} of a table of 0 rows, under add-remove",
            0,
            "",
            parts={"a.parquet": table(0)},
            output=output,
            privacy=_PRESENCE,
        )
        for output in ("cells", "rows")
    ),
    _histogram(
        "rows of a threshold that no cell reaches, under add-remove",
        0,
        "",
        factor=1e6,
        privacy=_PRESENCE,
        **_ROWS,
    ),
    *(
        Case(
            name=f"histogram: {what}, under add-remove",
            code=0,
            says="",
            prepare=lambda folder, make=make: make(
                folder,
                columns=_NOBODYS,
                mechanism={"kind": "histogram"},
                privacy={"epsilon": 1.0, **_PRESENCE},
            ),
        )
        for what, make in (
            ("a table of 0 row groups", _empty_groups),
            ("a CSV file of a header alone", _header_alone),
        )
    ),
    _histogram(
        "a table of 0 rows", 65, r"data: the table has no rows", parts={"a.parquet": table(0)}
    ),
)

CASES: tuple[Case, ...] = (
    # ---- the job
    _case(
        "an unknown key in the job",
        64,
        r"unknown key 'mechanism\.chanel'; did you mean 'channel'\?",
        mechanism__chanel="laplace",
    ),
    _case(
        "an unknown key at the top",
        64,
        r"unknown key 'privcy'; did you mean 'privacy'\?",
        privcy={"epsilon": 1.0},
    ),
    _case(
        "an unknown key in the schema",
        64,
        r"unknown key 'columns\.rating\.level'; did you mean 'levels'\?",
        columns=_columns(rating=_RATING | {"level": [1]}),
    ),
    *(
        _case(
            f"ε = {text}",
            64,
            r"job\.yaml, .*privacy\.epsilon: ",
            "--set",
            f"privacy.epsilon={text}",
        )
        for text in ("0", "-1", ".nan", ".inf", "much", "101")
    ),
    _case("no ε", 64, r"the key 'privacy\.epsilon' is missing; add it", privacy={}),
    *(
        _case(
            f"a hold-out fraction of {text}",
            64,
            r"job\.yaml, .*mechanism\.reference\.fraction: ",
            "--set",
            f"mechanism.reference.fraction={text}",
        )
        for text in ("0", "1", "1.5", "-0.1", ".nan")
    ),
    _case(
        "δ > 0",
        64,
        r"privacy\.delta: .* spends no δ with this reference, but δ is 1e-06; set it to 0, or take the reference tree$",
        "--set",
        "privacy.delta=1e-6",
    ),
    _case(
        "δ > 0 that no validation lets pass",
        64,
        r"privacy\.delta: .* spends no δ",
        "--set",
        "privacy.delta=1e-6",
        verb="validate",
    ),
    *(
        _case(
            f"δ = {text}",
            64,
            r"job\.yaml, .*privacy\.delta: .* expected",
            "--set",
            f"privacy.delta={text}",
        )
        for text in ("1", "-1e-9", ".nan", ".inf", "tiny", "true", "null")
    ),
    _case(
        "adjacency add-remove",
        64,
        r"privacy\.adjacency: .*cannot hide that a row is there; set it to replace-one$",
        "--set",
        "privacy.adjacency=add-remove",
    ),
    _case(
        "an unknown adjacency",
        64,
        r"job\.yaml, .*privacy\.adjacency: .*'replace-one' or 'add-remove' is expected, not 'row'$",
        "--set",
        "privacy.adjacency=row",
    ),
    _case(
        "an unknown mechanism",
        64,
        r"job\.yaml, line \d+, mechanism\.kind: there is no kind 'guess' here; take one of dip, ",
        mechanism={"kind": "guess"},
    ),
    _case(
        "no kind of mechanism",
        64,
        r"the key 'mechanism\.kind' is missing; add it",
        mechanism={"reference": {"kind": "histogram"}},
    ),
    _case(
        "a mechanism that is no mapping",
        64,
        r"job\.yaml, .*mechanism: .* expected",
        mechanism="dip",
    ),
    _case(
        "a wrong value in the mechanism",
        64,
        r"job\.yaml, .*mechanism\.channel: .* expected",
        mechanism__channel="best",
    ),
    _case(
        "a wrong value deep in the mechanism",
        64,
        r"job\.yaml, .*mechanism\.weights\.rating: .* expected",
        mechanism__weights={"rating": "all"},
    ),
    _case("a unit that is no unit", 64, r"privacy\.unit", "--set", "privacy.unit=person"),
    _case(
        "a unit of no rows", 64, r"max_rows", "--set", "privacy.unit={column: userId, max_rows: 0}"
    ),
    _case(
        "a unit's column that is not declared",
        64,
        r"privacy\.unit\.column",
        "--set",
        "privacy.unit={column: nobody, max_rows: 20}",
    ),
    _case(
        "a unit's column that is private",
        64,
        r"privacy\.unit\.column",
        "--set",
        "privacy.unit={column: rating, max_rows: 20}",
    ),
    _case(
        "a row without its unit",
        65,
        r"^dpdask: column 'userId': holds a null, and the unit of every row must be known",
        parts={**_BAD, "part-1.parquet": with_value("userId", None)},
        privacy__unit={"column": "userId", "max_rows": 5},
    ),
    _case("a unit", 0, "", privacy__unit={"column": "userId", "max_rows": 5}),
    _case("a noisy histogram", 0, "", mechanism__reference={"kind": "histogram"}),
    _case(
        "a noisy histogram of a column without bounds",
        64,
        r"column 'price': a column without bounds has no public cells to count in; give it bounds",
        columns=COLUMNS | {"price": {"role": "privatise", "kind": "continuous"}},
        mechanism__reference={"kind": "histogram"},
    ),
    *(
        _case(
            f"a histogram's share of {text}",
            64,
            r"job\.yaml, .*mechanism\.reference\S*\.share: ",
            mechanism__reference={"kind": "histogram", "share": share},
        )
        for text, share in (("0", 0), ("1", 1), ("NaN", float("nan")))
    ),
    _case(
        "a cost of another channel",
        64,
        r"mechanism\.cost\.rating: a cost belongs to the channel optimal, not to laplace; set mechanism\.channel to optimal",
        mechanism__cost={"rating": "rank"},
    ),
    _case(
        "a cost that no validation lets pass",
        64,
        r"mechanism\.cost\.rating: a cost belongs to the channel optimal, not to laplace",
        verb="validate",
        mechanism__cost={"rating": "rank"},
    ),
    _case(
        "a cost that categories do not have",
        64,
        r"mechanism\.cost\.rating: categories have no value",
        columns=COLUMNS
        | {"rating": {"role": "privatise", "kind": "categorical", "levels": [1.0, 2.0, 3.0]}},
        mechanism__channel="optimal",
        mechanism__cost={"rating": "value"},
    ),
    _case(
        "an unbiased channel of a line",
        64,
        r"column 'price': the channel optimal-unbiased needs levels that are numbers or dates, .*set mechanism\.channel to optimal",
        mechanism__channel="optimal-unbiased",
    ),
    _case(
        "an unbiased channel of nulls",
        64,
        r"column 'rating': null is a level without a value",
        columns={
            **COLUMNS,
            "price": {"role": "drop"},
            "rating": {**COLUMNS["rating"], "nulls": "level"},
        },
        mechanism__channel="optimal-unbiased",
    ),
    _case(
        "an unbiased channel along a tree",
        64,
        r"mechanism\.channel: optimal-unbiased randomises each column on its own, but the reference tree releases columns jointly",
        mechanism__channel="optimal-unbiased",
        mechanism__reference={"kind": "tree"},
    ),
    _case(
        "an unbiased channel",
        0,
        "",
        columns={**COLUMNS, "price": {"role": "drop"}},
        mechanism__channel="optimal-unbiased",
        mechanism__reference={"kind": "histogram"},
    ),
    _case(
        "a cost of a column that is not private",
        64,
        r"is not a privatised column",
        mechanism__channel="optimal",
        mechanism__cost={"note": "rank"},
    ),
    # ---- the ledger
    Case(
        name="a budget that is large enough",
        code=0,
        says="",
        prepare=lambda folder: _charged(folder, 1.0),
    ),
    Case(
        name="a budget that is too small",
        code=77,
        says=r"ledger\.db: the budget of the dataset 'ratings' is too small",
        prepare=lambda folder: _charged(folder, 0.5),
    ),
    Case(
        name="a dataset that the ledger does not know",
        code=64,
        says=r"does not know the dataset 'other'",
        prepare=lambda folder: _charged(folder, 9.0, "other"),
    ),
    Case(
        name="a plan for a dataset that the ledger does not know",
        code=64,
        says=r"does not know the dataset",
        prepare=lambda folder: _charged(folder, 9.0, "other", "plan"),
    ),
    _case(
        "a ledger that is not there",
        64,
        r"ledger\.db: there is no ledger here",
        ledger={"url": "sqlite:///ledger.db", "dataset": "ratings"},
    ),
    _case(
        "a ledger of another kind",
        64,
        r"ledger\.url: an SQLite or a PostgreSQL URL is expected",
        ledger={"url": "mysql://x/y", "dataset": "ratings"},
    ),
    _case(
        "a ledger without a dataset",
        64,
        r"the key 'ledger\.dataset' is missing; add it",
        ledger={"url": "sqlite:///ledger.db"},
    ),
    _case(
        "a PostgreSQL that cannot be reached",
        75,
        r"postgresql://nobody:\*\*\*@127\.0\.0\.1:1/none: the ledger cannot be reached or is busy",
        ledger={"url": f"postgresql://nobody:{TEXT}@127.0.0.1:1/none", "dataset": "ratings"},
    ),
    _case(
        "no reference",
        64,
        r"the key 'mechanism\.reference' is missing; add it",
        mechanism={"kind": "dip"},
    ),
    _case(
        "an unknown kind of reference",
        64,
        r"mechanism\.reference\.kind: ",
        mechanism__reference={"kind": "guess"},
    ),
    _case(
        "weights of wrong columns",
        64,
        r"mechanism\.weights: weights must name exactly the privatised columns \(without a weight: 'price'; not privatised: 'userId'\)",
        mechanism__weights={"rating": 1.0, "userId": 1.0},
    ),
    _case(
        "a weight of 0",
        64,
        r"mechanism\.weights: weights must be positive",
        mechanism__weights={"rating": 0.0, "price": 1.0},
    ),
    _case(
        "a continuous column's ε above the limit",
        64,
        r"column 'price': .*\[1e-06, 16\]; change privacy\.epsilon",
        "--set",
        "privacy.epsilon=40",
    ),
    _case(
        "a known reference without a column",
        64,
        r"column 'price': has no declared distribution; add it",
        mechanism__reference={**KNOWN, "columns": {"rating": KNOWN["columns"]["rating"]}},
    ),
    _case(
        "a known reference of a kept column",
        64,
        r"columns\.userId: is not a privatised column; remove it",
        mechanism__reference={**KNOWN, "columns": KNOWN["columns"] | {"userId": {"name": "norm"}}},
    ),
    _case(
        "a known reference with too few probabilities",
        64,
        r"column 'rating': there must be one probability per level",
        mechanism__reference={
            **KNOWN,
            "columns": KNOWN["columns"] | {"rating": {"probabilities": [0.5, 0.5]}},
        },
    ),
    _case(
        "probabilities that do not sum to 1",
        64,
        r"column 'rating': .*sum to 1",
        mechanism__reference={
            **KNOWN,
            "columns": KNOWN["columns"] | {"rating": {"probabilities": [0.5, 0.5, 0.5]}},
        },
    ),
    _case(
        "a distribution that scipy does not have",
        64,
        r"column 'price': scipy\.stats has no distribution 'unifrom'",
        mechanism__reference={
            **KNOWN,
            "columns": KNOWN["columns"] | {"price": {"name": "unifrom"}},
        },
    ),
    _case(
        "a public reference without a path",
        64,
        r"mechanism\.reference\.path: the reference rows come from a public table, and no path is given; add it$",
        mechanism__reference={"kind": "public"},
    ),
    _case(
        "a public reference that is not there",
        66,
        r"elsewhere: there is no Parquet or CSV file here",
        mechanism__reference={"kind": "public", "path": "elsewhere"},
    ),
    Case(
        name="a public reference without a column",
        code=65,
        says=r"column 'price': .*",
        prepare=lambda folder: (
            job(folder, mechanism__reference={"kind": "public", "path": "public.parquet"}),
            pq.write_table(table(price=None), folder / "public.parquet"),
        )[0],
    ),
    Case(
        name="the job's file is missing",
        code=64,
        says=r"nowhere\.yaml: the job cannot be read; check its path",
        prepare=lambda folder: ["run", str(folder / "nowhere.yaml")],
    ),
    Case(
        name="a table in the place of the job",
        code=64,
        says=r"part-0\.parquet: the job cannot be read, since it is not a YAML text in UTF-8; check its path$",
        prepare=lambda folder: (job(folder), ["validate", str(folder / "data" / "part-0.parquet")])[
            1
        ],
    ),
    Case(
        name="the schema's file is missing",
        code=64,
        says=r"schema\.yaml.*: the schema cannot be read; check the path",
        prepare=_without("schema.yaml"),
    ),
    Case(
        name="a YAML syntax error in the job",
        code=64,
        says=r"job\.yaml, lines? 1 to 2: this is not valid YAML",
        prepare=lambda folder: (
            job(folder),
            (folder / "job.yaml").write_text("name: [a\ninput: }"),
        )[0],
    ),
    _case(
        "a YAML syntax error in the schema",
        64,
        r"schema\.yaml, line 2: this is not valid YAML",
        columns="columns: {a: [\nb: }",
    ),
    _case("an empty schema", 64, r"schema\.yaml", columns=""),
    _case("--set without a value", 2, r"write key=value", "--set", "nonsense"),
    _case(
        "--set of an unknown key",
        64,
        r"unknown key 'privacy\.epsilom'; did you mean 'epsilon'\?",
        "--set",
        "privacy.epsilom=1",
    ),
    _case(
        "--set inside a plain value",
        64,
        r"--set name\.x: 'name' holds a plain value",
        "--set",
        "name.x=1",
    ),
    _case(
        "a date in the schema that does not exist",
        64,
        r"schema\.yaml, line 5, columns\.born\.bounds\.1: a value cannot be read; correct a date that does not exist",
        columns="columns:\n  born:\n    role: privatise\n    kind: continuous\n    bounds: [2000-01-01, 2000-13-01]\n",
    ),
    *(
        _case(
            f"{text} in the schema, which YAML reads as {read}",
            64,
            rf"schema\.yaml, line 5: YAML reads {text} as {read}; put it in quotes, or write {read}",
            columns=f"columns:\n  price:\n    role: privatise\n    kind: categorical\n    levels: [x, {text}]\n",
        )
        for text, read in (("0100", "64"), ("no", "false"), ("1:30", "90"))
    ),
    _case(
        "--set to what YAML reads otherwise",
        64,
        r"--set name, line 1: YAML reads 0100 as 64; put it in quotes",
        "--set",
        "name=0100",
    ),
    _case(
        "--set to a date that does not exist",
        64,
        r"--set name: a value cannot be read",
        "--set",
        "name=2020-02-30",
    ),
    _case(
        "--set to no YAML",
        64,
        r"--set name, lines? 1 to 2: this is not valid YAML",
        "--set",
        "name=[a",
    ),
    Case(name="an unknown verb", code=2, says=r"No such command 'rnu'", prepare=lambda _: ["rnu"]),
    _case("an unknown option", 2, r"No such option '?--fast'?", "--fast"),
    Case(
        name="an unknown option before the verb",
        code=2,
        says=r"No such option '?--fast'?",
        prepare=lambda _: ["--fast", "run"],
    ),
    Case(name="no job named", code=2, says=r"Missing argument 'JOB'", prepare=lambda _: ["run"]),
    _case(
        "lineage without a namespace",
        64,
        r"job\.yaml, line \d+, lineage\.namespace: .*",
        lineage={"namespace": ""},
    ),
    _case(
        "a misspelt key of lineage",
        64,
        r"unknown key 'lineage\.name_space'; did you mean 'namespace'\?",
        lineage={"name_space": "lake"},
    ),
    _case(
        "an address that is not given",
        64,
        r"the key 'cluster\.address' is missing",
        cluster={"kind": "address"},
    ),
    _case(
        "a scheduler without TLS, open to the network",
        64,
        r"tcp://192\.0\.2\.1:8786: without TLS, anyone who can reach this scheduler can run code .*; use tls:// .*, or a .* with insecure: true",
        cluster={"kind": "address", "address": "tcp://192.0.2.1:8786"},
    ),
    _case(
        "a scheduler without a scheme, from the command line",
        64,
        r"192\.0\.2\.1:8786: without TLS, anyone",
        "--scheduler",
        "192.0.2.1:8786",
    ),
    Case(
        name="a scheduler that cannot be reached",
        code=75,
        says=r"tcp://127\.0\.0\.1:1: the scheduler cannot be reached; check the address",
        prepare=lambda folder: job(folder, None, "--scheduler", "tcp://127.0.0.1:1"),
        config={"distributed.comm.timeouts.connect": "500ms"},
    ),
    # ---- the schema
    _case(
        "duplicate levels",
        64,
        r"columns\.rating: the level 2\.0 is repeated; give it once",
        columns=_columns(rating=_RATING | {"levels": [1.0, 2.0, 2.0]}),
    ),
    _case(
        "levels out of order",
        64,
        r"columns\.rating: levels must be strictly increasing",
        columns=_columns(rating=_RATING | {"levels": [2.0, 1.0, 3.0]}),
    ),
    _case(
        "a column twice in the schema",
        64,
        r"the key 'rating' is repeated; remove one of the two",
        columns=_TWICE,
    ),
    _case(
        "a schema that privatises nothing",
        64,
        r"^dpdask: schema\.yaml.*: the schema privatises no column; give at least one column the role",
        columns=_columns(rating={"role": "keep"}, price={"role": "drop"}),
    ),
    _case(
        "a column not declared",
        65,
        r"column 'price': this column is not declared in the schema; declare it",
        columns=_columns(price=None),
    ),
    _case(
        "a declared column not in the table",
        65,
        r"column 'genre': this declared column is not in the table",
        columns=_columns(genre={"role": "keep"}),
    ),
    _case(
        "a text where a number is declared",
        65,
        r"column 'rating': .* do not fit its type string",
        parts={"a.parquet": table(rating=pa.array([TEXT] * N_ROWS))},
    ),
    _case(
        "a continuous column of texts",
        65,
        r"column 'price': .*this one is string",
        parts={"a.parquet": table(price=pa.array([TEXT] * N_ROWS))},
    ),
    # ---- values
    _bad_value(
        "a value outside its levels",
        "rating",
        NUMBER,
        "holds a value outside its levels; add the level to the schema",
    ),
    _bad_value(
        "a value outside its bounds",
        "price",
        NUMBER,
        "holds a value outside its bounds; widen the schema's bounds",
    ),
    _bad_value(
        "NaN in a continuous column",
        "price",
        float("nan"),
        "holds NaN or an infinity; store a missing value as null",
    ),
    _bad_value(
        "an infinity in a continuous column", "price", float("inf"), "holds NaN or an infinity"
    ),
    *_outside(_case),
    *_outside(
        lambda name, *given, **more: _case(
            f"a noisy histogram, {name}", *given, **more, mechanism__reference={"kind": "histogram"}
        )
    ),
    _bad_value(
        "a null that is not declared",
        "rating",
        None,
        "holds a null; declare `nulls: level`, or fill it",
    ),
    Case(
        name="a bad value, a known reference (found while writing)",
        code=65,
        says=r"^dpdask: column 'rating': holds a value outside its levels",
        prepare=lambda folder: job(
            folder,
            {**_BAD, "part-1.parquet": with_value("rating", NUMBER)},
            mechanism__reference=KNOWN,
        ),
    ),
    # ---- the table
    _case(
        "a table of 0 rows",
        65,
        r"data: the table has no rows; check the job's input\.path$",
        parts={"a.parquet": table(0)},
    ),
    Case(
        name="a table of 0 row groups",
        code=65,
        says=r"data: the table has no rows",
        prepare=_empty_groups,
    ),
    Case(
        name="an empty folder",
        code=66,
        says=r"data: there is no Parquet or CSV file here; check this path",
        prepare=lambda folder: ((folder / "data").mkdir(), job(folder, {}))[1],
    ),
    Case(name="empty files among good ones", code=0, says="", prepare=_empty_file_among_good),
    _case(
        "a hold-out of 0 rows",
        65,
        r"column 'rating': the reference has fewer than 2 rows; enlarge",
        parts={"a.parquet": table(3)},
        mechanism__reference__fraction=1e-9,
    ),
    Case(
        name="a hold-out of 1 row",
        code=65,
        says=r"column 'rating': the reference has fewer than 2 rows",
        prepare=_one_held_out,
    ),
    _case(
        "a hold-out of all rows",
        65,
        r"no row would be released; lower mechanism\.reference\.fraction",
        parts={"a.parquet": table(3)},
        mechanism__reference__fraction=1 - 1e-9,
    ),
    _case(
        "a missing input",
        66,
        r"nowhere: there is no Parquet or CSV file here; check this path",
        input__path="nowhere",
    ),
    Case(
        name="a Parquet file cut in its footer",
        code=66,
        says=r"part-1\.parquet: this is not a complete Parquet file",
        prepare=lambda folder: _edited(folder, lambda data: data[:-20]),
    ),
    Case(
        name="a Parquet file of 3 bytes",
        code=66,
        says=r"part-1\.parquet: this is not a complete Parquet file",
        prepare=lambda folder: _edited(folder, lambda data: data[:3]),
    ),
    Case(
        name="a corrupt footer",
        code=66,
        says=r"part-1\.parquet: its Parquet footer cannot be read",
        prepare=lambda folder: _edited(
            folder, lambda data: data[:-300] + b"\xff" * 200 + data[-100:]
        ),
    ),
    Case(
        name="a Parquet file cut inside a page",
        code=66,
        says=r"part-1\.parquet: its Parquet footer cannot be read: it is corrupt",
        prepare=lambda folder: _edited(folder, _cut_inside),
    ),
    Case(
        name="a page overwritten",
        code=66,
        says=r"part-1\.parquet, row group 1: this row group cannot be read",
        prepare=lambda folder: _edited(folder, _page_overwritten),
    ),
    Case(
        name="one bit of a page flipped, with checksums",
        code=66,
        says=r"part-1\.parquet, row group 1: this row group cannot be read",
        prepare=lambda folder: _edited(
            folder, bit_flipped, compression="none", use_dictionary=False, write_page_checksum=True
        ),
        kept=True,
    ),
    Case(
        name="a column twice in the Parquet file",
        code=65,
        says=r"column 'rating': this column appears twice in the table",
        prepare=_duplicated_in_file,
    ),
    _case(
        "Parquet files of different types",
        65,
        r"part-1\.parquet, column 'rating': its type is int64 in this file, and double in part-0\.parquet",
        parts={**_BAD, "part-1.parquet": table(rating=pa.array([1] * N_ROWS))},
    ),
    _case(
        "a Parquet file that lacks a column",
        65,
        r"part-1\.parquet, column 'note': the first file has this column",
        parts={**_BAD, "part-1.parquet": table(note=None)},
    ),
    _case(
        "a Parquet file with one column more",
        65,
        r"part-1\.parquet, column 'more': this file has this column and the first one does not",
        parts={**_BAD, "part-1.parquet": table(more=pa.array([1] * N_ROWS))},
    ),
    _case(
        "a folder with another value than its file",
        65,
        r"note=…/a\.parquet, column 'note': both the file and its folder's name hold this column, and they could disagree",
        parts={f"note={TEXT}/a.parquet": table(note=pa.array(["n"] * N_ROWS))},
    ),
    _case(
        "a folder with a column that is not declared",
        65,
        r"column 'more': this column is not declared",
        parts={f"more={TEXT}/a.parquet": table()},
    ),
    _case(
        "a folder that is no number",
        65,
        r"column 'userId': the name of a folder cannot be read as this column's declared type",
        parts={f"userId={TEXT}/a.parquet": table(userId=None)},
        columns=_columns(userId={"role": "keep", "type": "int64"}),
    ),
    _case(
        "a Delta table as plain files",
        64,
        r"this is a Delta table.*`format: delta` beside `path`",
        parts={"_delta_log/0.json": table(), **_BAD},
    ),
    _case(
        "a folder that is no Delta table",
        66,
        r"data: there is no Delta table here",
        input__format="delta",
    ),
    _case(
        "a version of plain files",
        64,
        r"input: 'version' belongs to `format: delta`, and this is `format: files`",
        input__version=3,
    ),
    _case(
        "a format that is not known",
        64,
        r"input\.format: 'files', 'parquet', 'csv', 'delta' or 'iceberg' is expected, not 'hudi'",
        input__format="hudi",
    ),
    _case(
        "an Iceberg table without a metadata file",
        64,
        r"this is not a metadata file of an Iceberg table",
        input__format="iceberg",
    ),
    _case(
        "a password in a catalog's URI",
        64,
        r"input\.catalog: a job holds no password; give this `uri` as PYICEBERG_CATALOG__LAKE__URI",
        input={
            "path": "db.t",
            "format": "iceberg",
            "catalog": {"name": "lake", "uri": f"postgresql://me:{TEXT}@host/db"},
        },
    ),
    Case(
        name="Parquet and CSV in one folder",
        code=66,
        says=r"holds both Parquet and CSV files",
        prepare=_mixed_kinds,
    ),
    # ---- CSV
    Case(
        name="a CSV file with a bad value",
        code=65,
        says=r"^dpdask: column 'price': a value cannot be read",
        prepare=lambda folder: _csv(folder, _HEADER + _LINES, f"{_HEADER}1,2,{TEXT},x\n"),
    ),
    Case(
        name="a CSV file with a ragged line",
        code=65,
        says=r"^dpdask: a CSV file: line \d+ has 1 fields, separated by commas, and the header has 4",
        prepare=lambda folder: _csv(folder, _HEADER + _LINES, f"{_HEADER}{_LINES}{TEXT}\n"),
    ),
    Case(
        name="a CSV file without a header",
        code=65,
        says=r"part-0\.csv: its first line names no declared column",
        prepare=lambda folder: _csv(folder, f"{TEXT},1,{NUMBER},x\n{_LINES}"),
    ),
    Case(
        name="a later CSV file without a header",
        code=65,
        says=r"part-1\.csv: its first line names no declared column",
        prepare=lambda folder: _csv(folder, _HEADER + _LINES, f"{TEXT},1,{NUMBER},x\n{_LINES}"),
    ),
    *(
        Case(
            name=f"a {which} CSV file without a header, whose first row holds a column's name",
            code=65,
            says=rf"part-{number}\.csv: field 1 of its first line is no column that the schema declares, and is not shown",
            prepare=lambda folder, number=number: _csv(
                folder, *[_HEADER + _LINES] * number, f"{TEXT},rating,{NUMBER},x\n{_LINES}"
            ),  # type: ignore[misc]
        )
        for number, which in enumerate(("first", "later"))
    ),
    Case(
        name="a CSV header that is not UTF-8",
        code=66,
        says=r"part-0\.csv: this CSV file has no readable header line",
        prepare=lambda folder: _csv(
            folder, "userId,rating,price,nöte\n".encode("latin-1") + _LINES.encode()
        ),
    ),
    Case(
        name="a CSV value that is not UTF-8",
        code=65,
        says=r"^dpdask: column 'note': a text in line \d+ is not in UTF-8",
        prepare=lambda folder: _csv(
            folder,
            (_HEADER + _LINES + "1,2,3,nö\n").encode("latin-1"),
            columns=_columns(note={"role": "keep"}),
        ),
    ),
    Case(
        name="an empty CSV file",
        code=66,
        says=r"part-0\.csv: this CSV file has no readable header line",
        prepare=lambda folder: _csv(folder, ""),
    ),
    Case(
        name="a CSV file of a header alone",
        code=65,
        says=r"no row would be released",
        prepare=lambda folder: _csv(folder, _HEADER),
    ),
    Case(
        name="a CSV header alone among good files",
        code=0,
        says="",
        prepare=lambda folder: _csv(folder, _HEADER, _HEADER + _LINES),
    ),
    Case(
        name="a column twice in the CSV header",
        code=65,
        says=r"column 'rating': this column appears twice in the table",
        prepare=lambda folder: _csv(folder, "userId,rating,price,note,rating\n1,2,3,x,1\n"),
    ),
    Case(
        name="a truncated gzip file",
        code=66,
        says=r"part\.csv\.gz: this file cannot be decompressed",
        prepare=_truncated_gzip,
    ),
    # ---- between two runs
    Case(
        name="the input changed between crash and resume",
        code=66,
        says=r"data: the input changed since the run began; restore it",
        prepare=_input_changed,
        kept=True,
    ),
    Case(
        name="the input lost a file between crash and resume",
        code=66,
        says=r"data: the input changed since the run began",
        prepare=_input_lost,
        kept=True,
    ),
    Case(name="a resume", code=0, says="", prepare=crashed),
    Case(
        name="another job's unfinished run",
        code=73,
        says=r"a run of another job is staged for this output; `dpdask abort` it",
        prepare=_another_job_staged,
        kept=True,
    ),
    Case(
        name="another job's release",
        code=73,
        says=r"out: this output holds another job's release",
        prepare=_another_job_released,
    ),
    Case(name="the same job again", code=0, says="", prepare=_released),
    # ---- the output
    Case(
        name="an output that is a file",
        code=73,
        says=r"out: this output already exists and was not written by this run",
        prepare=lambda folder: _output(folder, lambda path: path.write_text("mine")),
    ),
    Case(
        name="an output folder that holds something",
        code=73,
        says=r"out: this output already exists and was not written by this run; choose another output\.path",
        prepare=lambda folder: _output(folder, _filled),
    ),
    Case(
        name="an output with a broken manifest",
        code=73,
        says=r"_dpdask/manifest\.json: the manifest cannot be read",
        prepare=lambda folder: _output(folder, _broken_manifest),
    ),
    Case(
        name="an empty output folder",
        code=0,
        says="",
        prepare=lambda folder: _output(folder, lambda path: path.mkdir()),
    ),
    _case(
        "an output below a file",
        73,
        r"no folder can be made here; check output\.path",
        output__path="schema.yaml/out",
    ),
    _case(
        "an output where no folder can be made",
        73,
        r"/proc/nowhere/\S+: no folder can be made here",
        output__path="/proc/nowhere/out",
    ),
    _case(
        "an output protocol that is not there",
        64,
        r"nosuch://: no file system is installed for this URL",
        output__path="nosuch://x/out",
    ),
    _case(
        "a secret in the job",
        64,
        r"storage\.s3\.secret: a secret must not appear in a job; write \{env: NAME\}",
        storage={"s3": {"secret": "x"}},
    ),
    _case(
        "an input protocol that is not there",
        64,
        r"nosuch://: no file system is installed for this URL; install",
        input__path="nosuch://x",
    ),
    _case(
        "an output equal to the input",
        64,
        r"output\.path: the output lies inside the input",
        output__path="data/",
    ),
    _case(
        "an output inside the input",
        64,
        r"output\.path: the output lies inside the input, .*; choose another folder",
        output__path="data/deep/out",
    ),
    _case(
        "an output that the input's glob takes in",
        64,
        r"output\.path: the output lies inside the input",
        input__path="**/*.parquet",
    ),
    _case(
        "an output beside the input's glob",
        0,
        "",
        input__path="data/part-*.parquet",
        output__path="data/out",
    ),
    _case("an output with a slash at its end", 0, "", output__path="out/"),
    _case("spaces and letters of all the world", 0, "", output__path="öut put/100 %/ 出力"),
    *NOISY_TABLES,
    *RANGES,
    *HISTOGRAMS,
    Case(
        name="a home folder",
        code=0,
        says="",
        prepare=lambda folder: job(folder, output__path="~/out"),
        env={"HOME": "{folder}/home"},
    ),
)


def rows() -> Iterator[tuple[Case, Ended]]:
    """Yield every case with how it ended, each in its own folder."""
    for case in CASES:
        folder = Path(tempfile.mkdtemp(prefix="dpdask-bad-"))
        try:
            ended, _, _ = execute(case, folder)
            lines = [line.replace(str(folder), "…") for line in ended.lines]
            yield case, Ended(code=ended.code, out=ended.out, err="\n".join(lines))
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.stdout.write("| case | exit code | line printed |\n|---|---|---|\n")
    for case_, ended_ in rows():
        line_ = " ⏎ ".join(ended_.lines).replace("|", "\\|") or "—"
        sys.stdout.write(
            f"| {case_.name} | {ended_.code}{'' if ended_.code == case_.code else f' (not {case_.code})'} | {line_} |\n"
        )
