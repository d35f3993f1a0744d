"""`dpdask report`: a release beside its original, for the steward. CONFIDENTIAL: it reads private rows; the file is never to be published."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from dpdask.analysis.opened import open as open_release
from dpdask.errors import OutputError, SpecError
from dpdask.evaluation.measures import Comparison, compare_sides
from dpdask.evaluation.samples import (
    Side,
    code_sides,
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
from dpdask.schema import Schema
from dpdask.steps import step
from dpdask.streams import RunKey, stream
from dpdask.version import __version__

N_ROWS = 100_000
_SEED = 0
_N_PAIRS, _N_PICTURES, _N_BARS = 20, 40, 20


def render_report(
    card: Mapping[str, Any],
    original: Side,
    released: Side,
    found: Comparison,
    left_out: Sequence[str],
) -> str:
    """Return the page; every value in it is escaped, and it loads nothing."""
    averages = {"column shapes": "columns", "pair trends": "pairs"}
    sides = ("released", "independent", "resample")
    pictures = [each.names[0] for each in found.columns[:_N_PICTURES]]
    columns = card["columns"].items()
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
        "pictures": [_draw(name, original, released) for name in pictures],
        "pairs": found.pairs[:_N_PAIRS],
        "impossible": [
            each for each in found.impossible if each.released or each.independent or each.floor
        ],
        "left_out": left_out,
        "kept": [
            name
            for name, column in columns
            if column["role"] == "kept" and name in original.columns
        ],
    }
    return render_page(__package__, "report.html", {}, values)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """The input of a job."""

    url: str
    schema: Schema
    table_format: TableFormat

    def find_table(self, version: int | None) -> InputTable:
        """Return the table at the version that was released, if the card names one."""
        found = self.table_format
        if version is not None and isinstance(found, Delta):
            found = replace(found, version=version)
        if version is not None and isinstance(found, Iceberg):
            found = replace(found, snapshot=version)
        return discover(self.url, self.schema, found)


def write_report(
    out: str,
    original: str | Original,
    to: str | None = None,
    *,
    target: str | None = None,
    n_rows: int = N_ROWS,
) -> Path:
    """Write the comparison of a release with its original as one HTML file, and return its path.

    The original is a file or a folder of Parquet or CSV, or a job's input.
    """
    url = absolute_url(out)
    path = Path(to) if to is not None else Path(f"{url.rpartition('/')[2]}-confidential.html")
    # before any private row is read
    if path.exists() or path.is_symlink():
        hint = "remove it, or name another with --to"
        raise OutputError("the file is there already", str(path), hint)
    if f"{absolute_url(str(path.parent))}/".startswith(f"{url}/"):
        what = "a confidential report may not lie in the folder that is published"
        raise OutputError(what, str(path), "name a file elsewhere with --to")
    if isinstance(original, str):
        original = absolute_url(original)
        if original == url or takes_in(original, url) or takes_in(url, original):
            what = "the original and the release are one folder, or one holds the other"
            raise SpecError(what, "--original", "give the table that the job read")
    release = open_release(out)
    card, mechanism = release.card, release.card["mechanism"]
    read = Card.read(card, out)
    if find_guidance(read).shape(read) not in ("rows", "records"):
        kind = mechanism["kind"]
        what = f"a release of the mechanism {kind!r} holds no rows with values of the original's columns"
        hint = "use dpdask.open to analyse it, and compare its estimates with the original"
        raise SpecError(what, out, hint)
    columns = list(card["columns"])

    def rng(name: str) -> Generator:
        return stream(RunKey.insecure(_SEED), name, "").seed_generator()

    with step("reading the original", logging.DEBUG):
        if isinstance(original, str):
            private = read_original(original, columns, n_rows, rng("report/original"))
        else:
            table = original.find_table(card.get("input", {}).get("version"))
            private = read_input(table, columns, n_rows, rng("report/original"))
    with step("reading the release", logging.DEBUG):
        folder, shards = release.folder, release.shards
        public = read_released(folder, shards, columns, n_rows, rng("report/release"))
    comparing = "comparing, and predicting the target" if target else "comparing columns and pairs"
    with step(comparing, logging.DEBUG):
        real, given, left_out = code_sides(private, public, card["columns"])
        found = compare_sides(real, given, target=target, rng=rng("report/compare"))
    page = render_report(card, real, given, found, left_out)
    try:  # a new file that only this user may read
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError:
        hint = "name a file in a folder that you may write to with --to"
        raise OutputError("cannot be written", str(path), hint) from None
    return path
