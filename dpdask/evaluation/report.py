"""`dpdask report`: a release beside its original, for the steward. CONFIDENTIAL: it reads private rows; the file is never to be published."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.random import Generator

from dpdask.analysis.opening import open as open_release
from dpdask.analysis.people import OpenedPersons
from dpdask.arrays import freeze_class
from dpdask.errors import OutputError, SpecError
from dpdask.evaluation.disclosure import Disclosure, measure_disclosure
from dpdask.evaluation.measures import Comparison, compare_sides
from dpdask.evaluation.people import (
    Frames,
    Measured,
    People,
    bound_rows,
    compare_people,
    pair_people,
)
from dpdask.evaluation.samples import (
    Draw,
    Side,
    code_sides,
    draw_by_person,
    read_input,
    read_original,
    read_released,
)
from dpdask.html import read_style, render_page
from dpdask.io.files import TableFormat
from dpdask.io.fragments import InputTable, discover, takes_in
from dpdask.io.lakes import Delta, Iceberg
from dpdask.io.storage import absolute_url
from dpdask.mechanisms.card import DAYS, Card, Guarantee, find_guidance, say_date
from dpdask.privacy import percent_above
from dpdask.schema import Schema
from dpdask.steps import step
from dpdask.streams import RunKey, stream
from dpdask.version import __version__

N_ROWS = 100_000
N_OUTSIDE = 100  # rows of a hold-out, at least: 5 % of half of them is a row or two
_SEED = 0
_N_PAIRS, _N_PICTURES, _N_BARS = 20, 40, 20


def render_report(
    card: Mapping[str, Any],
    original: Side,
    released: Side,
    found: Comparison,
    disclosed: Disclosure | None,
    left_out: Sequence[str],
    people: tuple[tuple[People, People], Mapping[str, Sequence[Measured]]] | None = None,
) -> str:
    """Return the page; every value in it is escaped, and it loads nothing."""
    averages = {"column shapes": "columns", "pair trends": "pairs"}
    sides = ("released", "independent", "resample")
    pictures = [each.names[0] for each in found.columns[:_N_PICTURES]]
    values = {
        "name": card["name"],
        "mechanism": card["mechanism"]["kind"],
        "promise": Guarantee.model_validate(card["guarantee"]).in_short,
        "n_original": original.n_rows,
        "n_released": released.n_rows,
        "version": __version__,
        "style": read_style(__package__, "report.css"),
        "summary": [
            (label, [found.average(of, side) for side in sides]) for label, of in averages.items()
        ],
        "found": found,
        "disclosed": disclosed,
        "pictures": [_draw(name, original, released) for name in pictures],
        "pairs": found.pairs[:_N_PAIRS],
        "impossible": [
            each for each in found.impossible if each.released or each.independent or each.floor
        ],
        "left_out": left_out,
        "people": people,
        "kept": [name for name in original.columns if card["columns"][name]["role"] == "kept"],
    }
    return render_page(__package__, "report.html", {"above": percent_above}, values)


def _draw(name: str, original: Side, released: Side) -> dict[str, Any]:
    """Return the bars of a column: pairs of original and release for each level or range."""
    values = [side.columns[name] for side in (original, released)]
    if name in original.levels:
        size = len(original.levels[name])
        counts = [np.bincount(codes, minlength=size) for codes in values]
        if size - 1 > _N_BARS:
            order = np.argsort(-counts[0], kind="stable")[:_N_BARS]
            caption = f"the {_N_BARS} most frequent of {size - 1} levels"
        else:  # the last place is of values outside the domain, if there are any
            order = np.arange(size if counts[0][-1] or counts[1][-1] else size - 1)
            caption = f"{size - 1} levels, in order"
        shares = [each[order] / max(each.sum(), 1) for each in counts]
    else:
        known = [each[~np.isnan(each)] for each in values]
        low, high = np.quantile(np.concatenate(known), [0.005, 0.995]).tolist()
        edges = np.linspace(low, high if high > low else low + 1.0, _N_BARS + 1)
        shares = [
            np.histogram(np.clip(a, low, edges[-1]), edges)[0] / len(b)
            for a, b in zip(known, values, strict=True)
        ]
        is_date = name in original.dates
        first, last = (
            (say_date(end, DAYS) if is_date else None) or f"{end:.6g}"
            for end in edges[[0, -1]].tolist()
        )
        caption = f"{first} to {last}; values beyond are in the outermost bars"
    top = max(shares[0].max(), shares[1].max(), 1e-12)
    bars = [[each / top for each in pair] for pair in zip(*shares, strict=True)]
    return {"name": name, "bars": bars, "caption": caption}


@freeze_class
class Original:
    """The input of a job."""

    url: str
    schema: Schema
    table_format: TableFormat
    persons: Original | None = None  # the table of persons, if there is one
    key: str = ""  # the column that names the person there

    @classmethod
    def of_job(cls, job: Any) -> Original:
        """Return the input of a `Job`, with its table of persons."""
        (rows, schema), parents = job.tables, job.file.parents
        persons = None
        if parents is not None:
            format_ = parents.input.table_format
            persons = cls(url=job.persons_url, schema=schema, table_format=format_)
        return cls(
            url=job.input_url,
            schema=rows,
            table_format=job.file.input.table_format,
            persons=persons,
            key="" if parents is None else parents.key or job.mechanism.unit,
        )

    def find_table(self, version: int | None) -> InputTable:
        """Return the table at the version that was released, if the card names one."""
        found = self.table_format
        if version is not None and isinstance(found, Delta):
            found = replace(found, version=version)
        if version is not None and isinstance(found, Iceberg):
            found = replace(found, snapshot=version)
        return discover(self.url, self.schema, found)


def _read_private(
    card: Mapping[str, Any],
    original: str | Original,
    columns: Sequence[str],
    n_rows: int,
    rng: Generator,
    draw: Draw = None,
) -> pd.DataFrame:
    """Return a sample of the original's rows."""
    if isinstance(original, str):
        return read_original(original, columns, n_rows, rng, draw)
    table = original.find_table(card.get("input", {}).get("version"))
    return read_input(table, columns, n_rows, rng, draw)


def _read_people(
    release: OpenedPersons, original: str | Original, n_rows: int, rng: Generator
) -> tuple[Frames, Frames]:
    """Return persons with their rows, of the original and of the release: as many persons as have so many rows, by a keyed hash of their names."""
    told, secret = release.card["mechanism"]["persons"], rng.integers(0, 2**64, 2, dtype=np.uint64)
    unit, parents, children = told["unit"], told["parents"], told["children"]
    linked = original.persons if isinstance(original, Original) else None
    if told["empty"] and linked is None:
        what = "the persons are in a table of their own"
        raise SpecError(what, "--original", "name the job: dpdask report --job JOB")
    draw = partial(draw_by_person, secret)

    def match(persons: pd.DataFrame, rows: pd.DataFrame) -> Frames:
        """Return the persons whose keys are not beyond those of the sampled rows, and their rows."""
        named = (pa.array(each.iloc[:, 0].to_numpy(dtype=object)) for each in (persons, rows))
        keys, known = (draw(pa.record_batch([each], names=[unit])) for each in named)
        kept = persons[keys <= known.max()]
        return kept, rows[rows.iloc[:, 0].isin(kept.iloc[:, 0])]

    with step("reading the original", logging.DEBUG):
        beside = [] if linked is not None else parents
        rows = _read_private(release.card, original, [unit, *children, *beside], n_rows, rng, draw)
        if linked is not None and isinstance(original, Original):
            asked = [original.key, *parents]
            persons = read_input(linked.find_table(None), asked, n_rows, rng, draw)
            persons = persons.rename(columns={original.key: unit})
        else:
            persons = rows.drop_duplicates(unit)[[unit, *parents]]
        private = match(persons, bound_rows(rows[[unit, *children]], told["max_rows"], rng))
    with step("reading the release", logging.DEBUG):
        sides = (release.person_shards, parents), (release.shards, children)
        public = match(
            *(
                read_released(release.folder, shards, [unit, *names], n_rows, rng, draw)
                for shards, names in sides
            )
        )
    return private, public


def write_report(
    out: str,
    original: str | Original,
    to: str | None = None,
    *,
    holdout: str | None = None,
    target: str | None = None,
    n_rows: int = N_ROWS,
) -> Path:
    """Write the comparison of a release with its original as one HTML file, and return its path.

    The original is a file or a folder of Parquet or CSV, or a job's input. The hold-out is a file
    or a folder of rows like the original's that the job did not read.
    """
    path = _find_place(absolute_url(out), to)  # before any private row is read
    original, holdout = _check_tables(absolute_url(out), original, holdout)
    release = open_release(out)
    card, mechanism = release.card, release.card["mechanism"]
    read = Card.read(card, out)
    if find_guidance(read).shape(read) not in ("rows", "records", "persons"):
        what = f"a release of the mechanism {mechanism['kind']!r} holds no single table of rows with values of the original's columns"
        hint = "use dpdask.open to analyse it, and compare its estimates with the original"
        raise SpecError(what, out, hint)
    columns = list(card["columns"])

    def rng(name: str) -> Generator:
        return stream(RunKey.insecure(_SEED), name, "").seed_generator()

    people = disclosed = compared = None
    if isinstance(release, OpenedPersons):
        if holdout is not None:
            what = "attacks are tried on rows, and these are persons with their rows"
            raise SpecError(what, "--holdout", "leave it out")
        people = _read_people(release, original, n_rows, rng("report/people"))
        joined = [rows.merge(each, on=str(rows.columns[0])).iloc[:, 1:] for each, rows in people]
        tables, public = [joined[0][list(joined[1].columns)]], joined[1]
    else:
        with step("reading the original", logging.DEBUG):
            tables = [_read_private(card, original, columns, n_rows, rng("report/original"))]
            if holdout is not None:
                tables.append(read_original(holdout, columns, n_rows, rng("report/holdout")))
                if len(tables[1]) < N_OUTSIDE:
                    what = f"the hold-out has fewer than {N_OUTSIDE} rows"
                    raise SpecError(what, "--holdout", "give more rows that the job did not read")
        with step("reading the release", logging.DEBUG):
            folder, shards = release.folder, release.shards
            public = read_released(folder, shards, columns, n_rows, rng("report/release"))
    comparing = "comparing, and predicting the target" if target else "comparing columns and pairs"
    with step(comparing, logging.DEBUG):
        every = pd.concat(tables, ignore_index=True)
        both, given, left_out = code_sides(every, public, card["columns"])
        rows = np.split(np.arange(len(every)), [len(tables[0])])
        real, others = both.take(rows[0]), both.take(rows[1]) if len(tables) > 1 else None
        found = compare_sides(real, given, target=target, rng=rng("report/compare"))
        if people is not None:
            pair = pair_people(*people, card["columns"], mechanism["persons"]["max_rows"])
            compared = pair, compare_people(*pair, rng("report/persons"))
    if people is None:
        with step("attacking the release", logging.DEBUG):
            disclosed = measure_disclosure(real, given, others, read, rng("report/attack"))
    page = render_report(card, real, given, found, disclosed, left_out, compared)
    _write_private(path, page)
    return path


def _find_place(url: str, to: str | None) -> Path:
    """Return the file to write: a new one, outside of what is published."""
    path = Path(to) if to is not None else Path(f"{url.rpartition('/')[2]}-confidential.html")
    if path.exists() or path.is_symlink():
        hint = "remove it, or name another with --to"
        raise OutputError("the file is there already", str(path), hint)
    if f"{absolute_url(str(path.parent))}/".startswith(f"{url}/"):
        what = "a confidential report may not lie in the folder that is published"
        raise OutputError(what, str(path), "name a file elsewhere with --to")
    return path


def _check_tables(
    url: str, original: str | Original, holdout: str | None
) -> tuple[str | Original, str | None]:
    """Return the places of the original and of the hold-out, apart from each other and from the release."""
    if isinstance(original, str):
        original = absolute_url(original)
        _check_apart("original", original, "release", url, "give the table that the job read")
    if holdout is not None:
        holdout, hint = absolute_url(holdout), "give rows that the job did not read"
        input_ = original if isinstance(original, str) else original.url
        _check_apart("holdout", holdout, "original", input_, hint)
        _check_apart("holdout", holdout, "release", url, hint)
    return original, holdout


def _check_apart(name: str, url: str, other: str, other_url: str, hint: str) -> None:
    """Refuse a table that is another one, or lies in it or around it."""
    if url == other_url or takes_in(url, other_url) or takes_in(other_url, url):
        what = f"the {name} and the {other} are one folder, or one holds the other"
        raise SpecError(what, f"--{name}", hint)


def _write_private(path: Path, page: str) -> None:
    try:  # a new file that only this user may read
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError:
        hint = "name a file in a folder that you may write to with --to"
        raise OutputError("cannot be written", str(path), hint) from None
