"""The confidential report as one HTML file. CONFIDENTIAL: it shows what was computed from private rows, never to be published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpdask.evaluation.comparison import Comparison
from dpdask.evaluation.samples import Floats, Side
from dpdask.html.pages import read_style, render_page
from dpdask.mechanisms.card import say_date
from dpdask.mechanisms.card_parts import Guarantee
from dpdask.version import __version__

_N_ROWS, _N_PICTURES, _N_BARS = 20, 40, 20
_WIDTH, _HEIGHT = 240.0, 100.0


def render_report(card: Mapping[str, Any], original: Side, released: Side, found: Comparison, left_out: Sequence[str]) -> str:
    """Return the page; every value in it is escaped, and it loads nothing; confidential: it shows private rows' statistics.

    Parameters
    ----------
    card
        The release card, as plain values.
    original, released
        The compared rows.
    found
        What was found.
    left_out
        The columns that were not compared.
    """
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
        "pictures": [_draw(each.names[0], original, released) for each in found.columns[:_N_PICTURES]],
        "columns": found.columns,
        "pairs": found.pairs[:_N_ROWS],
        "n_pairs": len(found.pairs),
        "rare": found.rare,
        "impossible": [each for each in found.impossible if each.released or each.independent or each.floor],
        "left_out": left_out,
        "kept": [name for name, column in card["columns"].items() if column["role"] == "kept" and name in original.columns],
    }
    return render_page(__package__, "report.html", {}, values)


def _draw(name: str, original: Side, released: Side) -> dict[str, Any]:
    """Return the bars of a column: pairs of original and release for each level or range."""
    if name in original.levels:
        size = len(original.levels[name])
        shares = [np.bincount(side.columns[name], minlength=size) / side.n_rows for side in (original, released)]
        fits = size - 1 <= _N_BARS  # the last place is of values outside the domain
        order = np.arange(size) if fits else np.argsort(-shares[0], kind="stable")[:_N_BARS]
        shares = [each[order] for each in shares]
        if fits and not (shares[0][-1] or shares[1][-1]):
            shares = [each[:-1] for each in shares]  # nothing lies outside the domain
        caption = f"{size - 1} levels, in order" if fits else f"the {_N_BARS} most frequent of {size - 1} levels"
    else:
        values = [side.columns[name].astype(np.float64) for side in (original, released)]
        known = np.concatenate([each[~np.isnan(each)] for each in values])
        low, high = (float(end) for end in np.quantile(known, [0.005, 0.995]))
        edges = np.linspace(low, high if high > low else low + 1.0, _N_BARS + 1)
        shares = [np.histogram(np.clip(each[~np.isnan(each)], edges[0], edges[-1]), edges)[0] / len(each) for each in values]
        ends = [(say_date(float(end), "days") if name in original.dates else None) or f"{end:.6g}" for end in edges[[0, -1]]]
        caption = f"{ends[0]} to {ends[1]}; values beyond are in the outermost bars"
    return {"name": name, "bars": _place_bars(*shares), "caption": caption}


def _place_bars(original: Floats, released: Floats) -> list[dict[str, Any]]:
    top, width = max(float(original.max()), float(released.max()), 1e-12), _WIDTH / max(len(original), 1)
    bars = []
    for place, pair in enumerate(zip(original, released, strict=True)):
        for side, (share, of) in enumerate(zip(pair, ("original", "release"), strict=True)):
            height = (_HEIGHT - 4.0) * float(share) / top
            x = width * (place + 0.1 + 0.4 * side)
            bars.append({"x": f"{x:.2f}", "y": f"{_HEIGHT - height:.2f}", "width": f"{0.4 * width:.2f}", "height": f"{height:.2f}", "of": of})
    return bars
