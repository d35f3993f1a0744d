"""Everything a user can get wrong, each through the command line: the cases of `bad_input.yaml`.

The data of every case hold `SECRETS`, which no line may show.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from e2e.helpers import call_cli, continuous, digests, discrete

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
COLUMNS = {
    "userId": {"role": "keep", "type": "int64"},
    "rating": discrete([1.0, 2.0, 3.0]),
    "price": continuous([0.0, 100.0]),
    "note": {"role": "drop"},
}
WIDE = {f"p{place}": COLUMNS["price"] for place in range(5)}
WIDE |= {name: {"role": "drop"} for name in COLUMNS}
JOB = {
    "name": "bad-input",
    "input": {"path": "data"},
    "output": {"path": "out"},
    "schema": "schema.yaml",
    "privacy": {"epsilon": 1.0},
    "mechanism": {"kind": "dip", "reference": {"kind": "holdout", "fraction": 0.25}},
    "cluster": {"kind": "synchronous"},
}
KNOWN = {
    "kind": "known",
    "columns": {
        "rating": {"probabilities": [0.2, 0.3, 0.5]},
        "price": {"name": "uniform", "loc": 0, "scale": 100},
    },
}
HEADER = "userId,rating,price,note\n"
LINES = "".join(f"{row},{row % 3 + 1},{row % 100}.5,{TEXT}\n" for row in range(400))
Words = list[str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that can be wrong (or must not be)."""

    name: str
    code: int
    says: str
    """A regular expression that the line matches; of a case that works, nothing."""
    prepare: Callable[[Path], Words]
    """Builds the files of the case in an empty folder and returns the command's words."""
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
    def lines(self):
        """The lines of stderr without the JSON lines of progress and warnings."""
        return [line for line in self.err.splitlines() if not _is_json(line)]


def _is_json(line):
    try:
        return bool(set(json.loads(line)) & {"stage", "step", "warning"})
    except (ValueError, TypeError):
        return False


def command(*words):
    """Run the command line in this process."""
    ended = call_cli(*words)
    return Ended(code=ended.returncode, out=ended.stdout, err=ended.stderr)


def files(folder):
    """Return the digest of every file below a folder, hidden ones too; of a folder its name alone."""
    return {str(path.relative_to(folder)): "" for path in folder.rglob("*")} | digests(folder)


def execute(case, folder):
    """Return how a case ended, and the files before and after."""
    env = {key: value.format(folder=folder) for key, value in case.env.items()}
    with mock.patch.dict(os.environ, env), dask.config.set(dict(case.config)):
        words = case.prepare(folder)
        before = files(folder)
        return command(*words), before, files(folder)


def table(n_rows=N_ROWS, seed=1, **changed):
    """Return rows as the schema declares them, with columns changed, added, or (None) left out."""
    rng = np.random.default_rng(seed)
    columns = {
        "userId": pa.array(rng.integers(0, 50, n_rows)),
        "rating": pa.array(rng.choice([1.0, 2.0, 3.0], n_rows)),
        "price": pa.array(rng.uniform(0.0, 100.0, n_rows)),
        "note": pa.array([TEXT] * n_rows),
    } | changed
    return pa.table({name: values for name, values in columns.items() if values is not None})


def job(folder, parts=None, *words, columns=COLUMNS, verb="run", **changed):
    """Write a job, its schema and its table, and return the words that run it. `a__b=c` changes the job's key a.b."""
    if parts is None:
        parts = {"part-0.parquet": table(), "part-1.parquet": table(seed=2)}
    for name, part in parts.items():
        path = folder / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(part, path, row_group_size=100)
    written = change(JOB, {key.replace("__", "."): value for key, value in changed.items()})
    if not isinstance(columns, str):
        columns = yaml.safe_dump({"columns": columns}, sort_keys=False)
    (folder / "schema.yaml").write_text(columns, encoding="utf-8")
    text = yaml.safe_dump(written, sort_keys=False, allow_unicode=True)
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    return [verb, str(folder / "job.yaml"), *words]


def change(base, changes):
    """Return a mapping with keys changed, which have dots between levels; None removes a key."""
    changed = copy.deepcopy(dict(base))
    for key, value in changes.items():
        *parents, last = key.split(".")
        inner = changed
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = copy.deepcopy(value)
        if value is None:
            del inner[last]
    return changed


def make_table(entry):
    """Return a case's table.

    It has `rows` rows; `every` names columns of one value, `line` columns of numbers between bounds,
    `without` columns that are left out, and `value` one that is wrong in one row.
    """
    n_rows = entry.get("rows", N_ROWS)
    columns = {
        name: pa.nulls(n_rows, pa.float64()) if value is None else pa.array([value] * n_rows)
        for name, value in entry.get("every", {}).items()
    }
    columns |= {name: pa.array(np.linspace(0.0, 100.0, n_rows)) for name in entry.get("line", ())}
    columns |= dict.fromkeys(entry.get("without", ()))
    for name, value in entry.get("value", {}).items():
        values = table().column(name).to_pylist()
        values[N_ROWS // 2] = value
        columns[name] = pa.array(values)
    return table(n_rows, **columns)


def prepare(entry, folder):
    """Write a case's files and return the command's words."""
    parts = {"part-0.parquet": table(seed=2)}
    if "value" in entry or entry.get("file") == "part-1.parquet":  # beside good rows
        parts[entry.get("file", "part-1.parquet")] = make_table(entry)
    elif "wide" in entry:
        parts = {"part-0.parquet": make_table({"line": WIDE.keys() - COLUMNS.keys()})}
    elif entry.keys() & {"rows", "every", "line", "without", "file"}:
        parts = {entry.get("file", "a.parquet"): make_table(entry)}
    else:
        parts = {"part-0.parquet": table(), "part-1.parquet": table(seed=2)}
    columns = WIDE if entry.get("wide") else COLUMNS
    schema = entry.get("schema", change(columns, entry["columns"]))
    words = job(folder, parts, columns=schema, verb=entry.get("verb", "run"))
    (folder / "job.yaml").write_text(
        yaml.safe_dump(change(JOB, entry["job"]), sort_keys=False, allow_unicode=True),
        encoding="utf-8",
    )
    if "csv" in entry:
        _only_csv(folder, *entry["csv"])
    if "budget" in entry:
        open_ledger(f"sqlite:///{folder}/ledger.db").init("ratings", entry["budget"])
    words += MAKERS[entry["make"]](folder) or () if "make" in entry else ()
    words += [word for key in entry.get("set", ()) for word in ("--set", key)] + entry.get(
        "words", []
    )
    return (
        [word.format(folder=folder) for word in entry["command"]] if "command" in entry else words
    )


def _only_csv(folder, *texts):
    _no_files(folder)
    for index, text in enumerate(texts):
        data = text.replace("{header}", HEADER).replace("{lines}", LINES).encode("latin-1")
        (folder / "data" / f"part-{index}.csv").write_bytes(data)


def _no_files(folder):
    for path in (folder / "data").iterdir():
        path.unlink()


def _no_row_groups(folder, name="a.parquet"):
    _no_files(folder)
    pq.ParquetWriter(folder / "data" / name, table().schema).close()


def _empty_files(folder):
    _no_row_groups(folder, "c.parquet")
    for name, part in (("b", table()), ("d", table(0)), ("e", table(seed=2))):
        pq.write_table(part, folder / "data" / f"{name}.parquet")


def _twice(folder):
    good = table()
    names = [*good.column_names, "rating"]
    twice = pa.Table.from_arrays([*good.columns, good["rating"]], names=names)
    pq.write_table(twice, folder / "data" / "part-0.parquet")


def _truncated_gzip(folder):
    _no_files(folder)
    lines = (
        f"{row},{row % 3 + 1},{row * 0.001:.3f},{row * 7919 % 104729}\n" for row in range(50_000)
    )
    data = gzip.compress((HEADER + "".join(lines)).encode())
    (folder / "data" / "part.csv.gz").write_bytes(data[: len(data) // 2])


def _edited(edit, **written):
    """Return a maker that damages the second file after it was written."""

    def make(folder):
        path = folder / "data" / "part-1.parquet"
        pq.write_table(table(seed=2), path, row_group_size=100, **written)
        path.write_bytes(edit(path.read_bytes()))

    return make


def _page_overwritten(data):
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(1).column(2)
    start = column.dictionary_page_offset or column.data_page_offset
    return data[:start] + b"\xff" * 64 + data[start + 64 :]


def bit_flipped(data):
    column = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(1).column(0)
    place = column.data_page_offset + column.total_compressed_size - 20
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def _crash(folder):
    failing = mock.patch("dpdask.jobs.run.write_all", side_effect=TemporaryError("crash"))
    with failing, contextlib.suppress(TemporaryError):
        run_job(load_job(folder / "job.yaml"))
    assert (folder / ".out.dpdask" / "release.npz").exists()


def crashed(folder):
    """Return the words of a job whose first run stopped after it was fitted."""
    words = job(folder)
    _crash(folder)
    return words


def _changed(folder):
    _crash(folder)
    pq.write_table(table(seed=3), folder / "data" / "part-1.parquet")


def _lost(folder):
    _crash(folder)
    (folder / "data" / "part-1.parquet").unlink()


def _released(folder):
    assert command("run", str(folder / "job.yaml")).code == 0


def _one_held_out(folder):
    _no_files(folder)
    pq.write_table(table(2), folder / "data" / "part-0.parquet")
    found = discover(f"file://{folder}/data", Schema.from_dict({"columns": COLUMNS}))
    [fragment] = found.fragments

    def holds_one(seed):
        held = holdout_mask(stream(RunKey.insecure(seed), "holdout", fragment.id), 2, 0.5)
        return bool(held.sum() == 1)

    seed = next(seed for seed in range(100) if holds_one(seed))
    return ["--set", f"insecure_seed={seed}"]


def _levels(folder):
    levels = discrete(list(range(10_000)))
    columns = change(COLUMNS, {"rating": levels, "userId.role": "drop", "price": {"role": "drop"}})
    (folder / "schema.yaml").write_text(yaml.safe_dump({"columns": columns}))


def _written(name, text):
    def make(folder):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)

    return make


MAKERS = {
    "no schema": lambda folder: (folder / "schema.yaml").unlink(),
    "a broken job": _written("job.yaml", "name: [a\ninput: }"),
    "ten thousand levels": _levels,
    "70,000 cells": lambda _: [
        *("--set", f"mechanism.bins={{price: {[place / 1000 + 0.001 for place in range(70_000)]}}}")
    ],
    "a public table without prices": lambda folder: pq.write_table(
        table(price=None), folder / "public.parquet"
    ),
    "an empty folder": _no_files,
    "no row groups": _no_row_groups,
    "empty files": _empty_files,
    "a seed that holds one of two rows out": _one_held_out,
    "a column twice": _twice,
    "a CSV file": _written("data/part-1.csv", HEADER + LINES),
    "a Delta log": _written("data/_delta_log/0.json", ""),
    "a truncated gzip file": _truncated_gzip,
    "cut in its footer": _edited(lambda data: data[:-20]),
    "three bytes": _edited(lambda data: data[:3]),
    "corrupt footer": _edited(lambda data: data[:-300] + b"\xff" * 200 + data[-100:]),
    "cut inside a page": _edited(lambda data: data[:500] + data[900:]),
    "page overwritten": _edited(_page_overwritten),
    "one bit flipped": _edited(
        bit_flipped, compression="none", use_dictionary=False, write_page_checksum=True
    ),
    "crashed": _crash,
    "crashed, then changed": _changed,
    "crashed, then lost": _lost,
    "released": _released,
    "an output that is a file": _written("out", "mine"),
    "an output that holds something": _written("out/mine.txt", "mine"),
    "a broken manifest": _written("out/_dpdask/manifest.json", "{"),
    "an empty output": lambda folder: (folder / "out").mkdir(),
}


def _read_cases():
    groups = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for group, cases in groups.items():
        base = cases.pop("base", {})
        kind = group.partition(",")[0]
        for name, case in cases.items():
            for value in case.get("each", [""]):
                text = yaml.safe_dump(case, allow_unicode=True)
                entry = yaml.safe_load(text.replace("…", value) if value else text)
                keys = {key: base.get(key, {}) | entry.get(key, {}) for key in ("job", "columns")}
                code = next((key for key in entry if isinstance(key, int)), 0)
                yield Case(
                    name=("" if kind == "dip" else f"{kind}: ") + name.replace("…", value),
                    code=code,
                    says=entry.get(code, ""),
                    prepare=lambda folder, entry=base | entry | keys: prepare(entry, folder),  # type: ignore[misc]
                    **{key: entry[key] for key in ("kept", "config", "env") if key in entry},
                )


CASES = tuple(_read_cases())
