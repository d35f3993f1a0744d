"""The rating histogram before and after a job, beside the job's channel, as an SVG.

python pipelines/movielens/picture.py out/ratings out/ratings-private pipelines/movielens/picture.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.dataset as ds

TOP, HEIGHT, STEP = 40, 200, 32
BEFORE, AFTER = "#7a8694", "#1f6fb4"


def shares(folder: str, levels: list[float]) -> list[float]:
    ratings = ds.dataset(folder, format="parquet").to_table(["rating"])["rating"]
    counts = [pc.sum(pc.equal(ratings, level)).as_py() for level in levels]
    return [count / len(ratings) for count in counts]


def text(x: float, y: float, words: str, size: int = 11, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def histogram(
    left: float, levels: list[float], before: list[float], after: list[float]
) -> Iterator[str]:
    scale = HEIGHT / max(*before, *after)
    yield text(left, 22, "share of each rating", 13, "start")
    for x, words, colour in ((left + 160, "original", BEFORE), (left + 240, "released", AFTER)):
        yield f'<rect x="{x}" y="13" width="10" height="10" fill="{colour}"/>' + text(
            x + 15, 22, words, 11, "start"
        )
    for place, level in enumerate(levels):
        for shift, share, colour in ((3, before[place], BEFORE), (16, after[place], AFTER)):
            height = share * scale
            x, y = left + place * STEP + shift, TOP + HEIGHT - height
            yield f'<rect x="{x:g}" y="{y:.1f}" width="12" height="{height:.1f}" fill="{colour}"/>'
        yield text(left + place * STEP + STEP / 2, TOP + HEIGHT + 15, f"{level:g}")


def heatmap(left: float, levels: list[float], channel: np.ndarray) -> Iterator[str]:
    side = HEIGHT / len(levels)
    yield text(left, 22, "Pr(released | original)", 13, "start")
    for row, level in enumerate(levels):
        yield text(left - 5, TOP + row * side + side * 0.7, f"{level:g}", 11, "end")
        yield text(left + row * side + side / 2, TOP + HEIGHT + 15, f"{level:g}")
        for column, probability in enumerate(channel[row]):
            x, y, shade = left + column * side, TOP + row * side, probability / channel.max()
            yield f'<rect x="{x:g}" y="{y:g}" width="{side:g}" height="{side:g}" fill="{AFTER}" fill-opacity="{shade:.2f}"/>'
    x, y = left - 32, TOP + HEIGHT / 2
    yield f'<g transform="rotate(-90 {x} {y})">{text(x, y, "original")}</g>' + text(
        left + HEIGHT / 2, TOP + HEIGHT + 32, "released"
    )


def main(original: str, released: str, target: str) -> None:
    card = json.loads((Path(released) / "_dpdask" / "release.json").read_text(encoding="utf-8"))
    column = card["columns"]["rating"]
    levels = column["levels"]
    parts = [
        *histogram(10, levels, shares(original, levels), shares(released, levels)),
        *heatmap(430, levels, np.array(column["channel"])),
    ]
    frame = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 285" width="640" height="285" font-family="sans-serif" fill="#222">'
    Path(target).write_text(
        "\n".join([frame, '<rect width="640" height="285" fill="white"/>', *parts, "</svg>", ""]),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
