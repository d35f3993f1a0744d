"""`dpdask report`: a release beside its original, for the steward. CONFIDENTIAL: it reads private rows; the file is never to be published."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpdask.analysis.opening import open as open_release
from dpdask.errors import OutputError, SpecError
from dpdask.evaluation.measures import Comparison, compare_sides
from dpdask.evaluation.samples import (
    Floats,
    Side,
    code_sides,
    read_input,
    read_original,
    read_released,
)
from dpdask.html import read_style, render_page
from dpdask.io.delta import Delta
from dpdask.io.files import TableFormat
from dpdask.io.fragments import InputTable, discover, takes_in
from dpdask.io.iceberg import Iceberg
from dpdask.io.storage import absolute_url
from dpdask.mechanisms.card import Card, Guarantee, say_date
from dpdask.mechanisms.guidance import find_guidance
from dpdask.schema import Schema
from dpdask.steps import step
from dpdask.streams import RunKey, stream
from dpdask.version import __version__

_N_ROWS, _N_PICTURES, _N_BARS = 20, 40, 20
_WIDTH, _HEIGHT = 240.0, 100.0


def render_report(
    card: Mapping[str, Any],
    original: Side,
    released: Side,
    found: Comparison,
    left_out: Sequence[str],
) -> str:
    """Return the page; every value in it is escaped, and it loads nothing; confidential: it shows private rows' statistics."""
    summary = [
        (label, [found.average(of, which) for which in ("released", "independent", "resample")])
        for label, of in (("column shapes", "columns"), ("pair trends", "pairs"))
    ]
    values = {
        "name": card["name"],
        "mechanism": card["mechanism"]["kind"],
        "promise": Guarantee.model_validate(card["guarantee"]).in_short,
        "n_original": original.n_rows,
        "n_released": released.n_rows,
        "version": __version__,
        "style": read_style(__package__, "report.css"),
        "summary": summary,
        "impossible_shares": found.impossible_shares,
        "prediction": found.prediction,
        "pictures": [
            _draw(each.names[0], original, released) for each in found.columns[:_N_PICTURES]
        ],
        "columns": found.columns,
        "pairs": found.pairs[:_N_ROWS],
        "n_pairs": len(found.pairs),
        "rare": found.rare,
        "impossible": [
            each for each in found.impossible if each.released or each.independent or each.floor
        ],
        "left_out": left_out,
        "kept": [
            name
            for name, column in card["columns"].items()
            if column["role"] == "kept" and name in original.columns
        ],
    }
    return render_page(__package__, "report.html", {}, values)


def _draw(name: str, original: Side, released: Side) -> dict[str, Any]:
    """Return the bars of a column: pairs of original and release for each level or range."""
    if name in original.levels:
        size = len(original.levels[name])
        shares = [
            np.bincount(side.columns[name], minlength=size) / side.n_rows
            for side in (original, released)
        ]
        fits = size - 1 <= _N_BARS  # the last place is of values outside the domain
        order = np.arange(size) if fits else np.argsort(-shares[0], kind="stable")[:_N_BARS]
        shares = [each[order] for each in shares]
        if fits and not (shares[0][-1] or shares[1][-1]):
            shares = [each[:-1] for each in shares]  # nothing lies outside the domain
        caption = (
            f"{size - 1} levels, in order"
            if fits
            else f"the {_N_BARS} most frequent of {size - 1} levels"
        )
    else:
        values = [side.columns[name].astype(np.float64) for side in (original, released)]
        known = np.concatenate([each[~np.isnan(each)] for each in values])
        low, high = (float(end) for end in np.quantile(known, [0.005, 0.995]))
        edges = np.linspace(low, high if high > low else low + 1.0, _N_BARS + 1)
        shares = [
            np.histogram(np.clip(each[~np.isnan(each)], edges[0], edges[-1]), edges)[0] / len(each)
            for each in values
        ]
        ends = [
            (say_date(float(end), "days") if name in original.dates else None) or f"{end:.6g}"
            for end in edges[[0, -1]]
        ]
        caption = f"{ends[0]} to {ends[1]}; values beyond are in the outermost bars"
    return {"name": name, "bars": _place_bars(*shares), "caption": caption}


def _place_bars(original: Floats, released: Floats) -> list[dict[str, Any]]:
    top, width = (
        max(float(original.max()), float(released.max()), 1e-12),
        _WIDTH / max(len(original), 1),
    )
    bars = []
    for place, pair in enumerate(zip(original, released, strict=True)):
        for side, (share, of) in enumerate(zip(pair, ("original", "release"), strict=True)):
            height = (_HEIGHT - 4.0) * float(share) / top
            x = width * (place + 0.1 + 0.4 * side)
            bars.append(
                {
                    "x": f"{x:.2f}",
                    "y": f"{_HEIGHT - height:.2f}",
                    "width": f"{0.4 * width:.2f}",
                    "height": f"{height:.2f}",
                    "of": of,
                }
            )
    return bars


N_ROWS = 100_000
_SEED = 0


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
    """Write the comparison of a release with its original as one HTML file, and return its path; confidential: it reads private rows.

    Parameters
    ----------
    original
        The table that was released: a file or a folder of Parquet or CSV, or a job's input.
    to
        The file; by default `<name of the output>-confidential.html` in the working folder.
    """
    url = absolute_url(out)
    path = Path(to) if to is not None else Path(f"{url.rpartition('/')[2]}-confidential.html")
    _check_place(path, url)
    if isinstance(original, str):
        original = absolute_url(original)
        if original == url or takes_in(original, url) or takes_in(url, original):
            raise SpecError(
                "the original and the release are one folder, or one holds the other",
                "--original",
                "give the table that the job read",
            )
    release = open_release(out)
    card = release.card
    mechanism = card["mechanism"]
    read = Card.read(card, out)
    if find_guidance(read).shape(read) not in ("rows", "records"):
        what = f"a release of the mechanism {mechanism['kind']!r} holds no rows with values of the original's columns"
        raise SpecError(
            what, out, "use dpdask.open to analyse it, and compare its estimates with the original"
        )
    key, columns = RunKey.insecure(_SEED), list(card["columns"])
    rng = stream(key, "report/original", "").seed_generator()
    with step("reading the original", logging.DEBUG):
        if isinstance(original, str):
            private = read_original(original, columns, n_rows, rng)
        else:
            private = read_input(
                original.find_table(card.get("input", {}).get("version")), columns, n_rows, rng
            )
    with step("reading the release", logging.DEBUG):
        public = read_released(
            release.folder,
            release.shards,
            columns,
            n_rows,
            stream(key, "report/release", "").seed_generator(),
        )
    with step(
        "comparing columns and pairs" if target is None else "comparing, and predicting the target",
        logging.DEBUG,
    ):
        real, given, left_out = code_sides(private, public, card["columns"])
        found = compare_sides(
            real, given, target=target, rng=stream(key, "report/compare", "").seed_generator()
        )
    _write(path, render_report(card, real, given, found, left_out))
    return path


def _check_place(path: Path, url: str) -> None:
    """Refuse a file that is there already, or in the folder that is published; before any private row is read."""
    if path.exists() or path.is_symlink():
        raise OutputError(
            "the file is there already", str(path), "remove it, or name another with --to"
        )
    if f"{absolute_url(str(path.parent))}/".startswith(f"{url}/"):
        raise OutputError(
            "a confidential report may not lie in the folder that is published",
            str(path),
            "name a file elsewhere with --to",
        )


def _write(path: Path, page: str) -> None:
    """Write a new file that only this user may read."""
    try:
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(page)
    except OSError:
        raise OutputError(
            "cannot be written",
            str(path),
            "name a file in a folder that you may write to with --to",
        ) from None
