"""Pictures of histograms and tables, drawn by matplotlib if it is installed: SVG images inside the page, with the same bytes each time."""

from __future__ import annotations

import base64
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpdask.page.histograms import ReleasedHistogram

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 4.6  # inches, of 96 CSS pixels: pictures stay readable on a telephone
_LONGEST = 28
_MOST_NUMBERS = 7
_INK, _BAR, _RULE = "#1b1f24", "#4a7ab5", "#8a3b12"
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dpdask",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.parse_math": False,
    "text.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def is_installed() -> bool:
    """Return whether pictures can be drawn."""
    return find_spec("matplotlib") is not None


@contextmanager
def _open_axes(height: float) -> Iterator[tuple[Axes, list[str]]]:
    """Give axes to draw on, with matplotlib's own style whatever the user's is; the image's address is in the list at the end."""
    found: list[str] = []
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of fonts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of signs that its fonts lack: the reader's browser draws the texts
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(_STYLE)
            figure = Figure(figsize=(_WIDTH, height), layout="constrained")
            FigureCanvasSVG(figure)
            yield figure.add_subplot(), found
            file = io.BytesIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    found.append(f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}")


def draw_histogram(histogram: ReleasedHistogram) -> str:
    """Return the address of an image of a histogram: a bar for each level or cell, with its margin."""
    bars = histogram.bars[::-1]
    with _open_axes(0.7 + 0.19 * len(bars)) as (axes, found):
        places = np.arange(len(bars))
        axes.barh(places, [100 * bar.share for bar in bars], height=0.8, color=_BAR)
        told = [(place, bar) for place, bar in zip(places, bars, strict=True) if bar.margin is not None]
        for place, bar in told:
            low, high = 100 * max(0.0, bar.share - (bar.margin or 0.0)), 100 * (bar.share + (bar.margin or 0.0))
            axes.plot([low, high], [place, place], color=_RULE, linewidth=1.2, marker="|", markersize=5)
        axes.set_yticks(places, [shorten(bar.label) for bar in bars])
        axes.set_ylim(-0.7, len(bars) - 0.3)
        axes.set_xlim(left=0.0)
        axes.set_xlabel("share in %")
    return found[0]


def draw_table(table: NDArray[np.float64], labels: Sequence[str], *, across: str, down: str, most: float) -> str:
    """Return the address of an image of a table of numbers, as colours.

    Parameters
    ----------
    table
        A square table of numbers in [0, `most`].
    labels
        The names of its rows and columns.
    across, down
        What the columns and the rows are.
    most
        The number with the darkest colour.
    """
    with _open_axes(4.4) as (axes, found):
        image = axes.imshow(table, cmap="Blues", vmin=0.0, vmax=most, interpolation="none")
        if len(labels) <= _MOST_NUMBERS:
            for (row, column), value in np.ndenumerate(table):
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.55 * most else _INK)
        step = -(-len(labels) // 16)
        shown = range(0, len(labels), step)
        texts: list[Any] = [shorten(labels[place]) for place in shown]
        axes.set_xticks(list(shown), texts, rotation=90)
        axes.set_yticks(list(shown), texts)
        axes.set_xlabel(across)
        axes.set_ylabel(down)
        axes.figure.colorbar(image, ax=axes, shrink=0.8)
    return found[0]


def shorten(text: str) -> str:
    """Return a text that fits beside a picture."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
