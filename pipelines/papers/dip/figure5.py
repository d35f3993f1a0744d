"""Figure 5 of Bi and Shen, Distribution-invariant differential privacy: the error of a parameter as the sample grows, ε = 1.

    python -m pipelines.papers.dip.figure5 [--replicates 1000] [--picture figure5.svg]

The laws and methods of Table 4 with 100 to 2000 rows. The paper draws the curves and prints no numbers; they are printed here,
and drawn on demand.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipelines.papers.dip.common import Row, Table, parser, report
from pipelines.papers.dip.table4 import LAWS, rows_of

SIZES = (100, 200, 500, 1000, 1500, 2000)
COLOURS = {
    "NP": "#1f6fb4",
    "DIP": "#c8372d",
    "LRM": "#3c8d40",
    "OPM": "#b8860b",
    "resampling": "#7d4bb0",
    "private": "#555",
}
WIDTH, HEIGHT, MARGIN = 300, 200, 55


def table(replicates: int, seed: int = 1) -> Table:
    rows = []
    for law in LAWS:
        for size in SIZES:
            for row in rows_of(law, 1.0, replicates, seed, size):
                kept = {
                    key: getattr(row, key)
                    for key in ("method", "epsilon", "ours", "optimal", "private")
                }
                rows.append(Row(setting=f"{law.label}, n = {size}", **kept))
    return Table(
        name="Figure 5",
        title="the mean of discrete values as the sample grows",
        unit=f"Mean absolute error of a parameter, 10⁻³, ± its standard error; ε = 1, {replicates} replicates (paper: 1000, as curves).",
        rows=rows,
        notes=["The paper's EXM is our resampling; see Table 4."],
    )


def curves(found: Table) -> dict[str, dict[str, list[float]]]:
    """Return by law and method the errors by size; `private` is DIP's last column."""
    curves: dict[str, dict[str, list[float]]] = {law.label: {} for law in LAWS}
    for row in found.rows:
        law = curves[row.setting.rsplit(", n = ")[0]]
        law.setdefault(row.method, []).append(row.ours.mean)
        if row.private is not None:
            law.setdefault("private", []).append(row.private.mean)
    return curves


def picture(found: Table) -> str:
    """Return the curves as an SVG, one panel for each law; both axes logarithmic."""
    parts = []
    for panel, (label, methods) in enumerate(curves(found).items()):
        left, top = MARGIN + (panel % 2) * (WIDTH + MARGIN), 30 + (panel // 2) * (HEIGHT + MARGIN)
        logs = {name: np.log10(errors) for name, errors in methods.items() if name in COLOURS}
        low, high = min(log.min() for log in logs.values()), max(log.max() for log in logs.values())
        xs = left + WIDTH * (np.log(SIZES) - np.log(SIZES[0])) / (
            np.log(SIZES[-1]) - np.log(SIZES[0])
        )
        parts.append(
            f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>'
        )
        parts.append(f'<text x="{left}" y="{top - 6}" font-size="13">{label}</text>')
        for size, x in zip(SIZES, xs, strict=True):
            parts.append(
                f'<text x="{x:.0f}" y="{top + HEIGHT + 15}" font-size="10" text-anchor="middle">{size}</text>'
            )
        for power in range(int(np.ceil(low)), int(np.floor(high)) + 1):
            y = top + HEIGHT * (1 - (power - low) / (high - low))
            parts.append(
                f'<text x="{left - 5}" y="{y + 4:.0f}" font-size="10" text-anchor="end">{10.0**power:g}</text>'
            )
        for name, log in logs.items():
            points = " ".join(
                f"{x:.1f},{y:.1f}"
                for x, y in zip(xs, top + HEIGHT * (1 - (log - low) / (high - low)), strict=True)
            )
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.6"/>'
            )
    bottom = 30 + 2 * (HEIGHT + MARGIN)
    for place, (name, colour) in enumerate(COLOURS.items()):
        label = {"private": "DIP, end to end private", "resampling": "EXM as the paper has it"}.get(
            name, name
        )
        x = MARGIN + (place % 3) * 230
        y = bottom + 18 * (place // 3)
        parts.append(
            f'<rect x="{x}" y="{y - 9}" width="18" height="4" fill="{colour}"/><text x="{x + 24}" y="{y}" font-size="12">{label}</text>'
        )
    size = f'width="{2 * (WIDTH + MARGIN) + 20}" height="{bottom + 40}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" fill="#222">'
    return "\n".join([head, f'<rect {size} fill="white"/>', *parts, "</svg>", ""])


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, 100)
    options.add_argument("--picture", type=Path, help="write the curves to this SVG")
    chosen = options.parse_args(arguments)
    found = report(chosen, lambda: table(chosen.replicates, chosen.seed))
    if chosen.picture is not None:
        chosen.picture.write_text(picture(found), encoding="utf-8")


if __name__ == "__main__":
    main()
