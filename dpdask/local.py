"""Local use: the channels of a fitted release as JSON, by which each device randomises its own value before it leaves."""

from __future__ import annotations

import datetime as dt
import json
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dpdask.arrays import Floats, Indices
from dpdask.codec import Codec, ValueCodec
from dpdask.conditions import Level
from dpdask.documents import write_new
from dpdask.errors import SpecError
from dpdask.estimators.release import Release
from dpdask.kernels.channel import TOTAL_BITS
from dpdask.mechanisms.dip.columns import (
    BinMechanism,
    ColumnMechanism,
    LevelMechanism,
    RankMechanism,
    WindowMechanism,
)
from dpdask.mechanisms.dip.spec import DipMechanism
from dpdask.references import RankDistribution
from dpdask.scales import float_type
from dpdask.schema import Column
from dpdask.version import __version__

FORMAT = 1
MAX_KNOTS = 2**10
MAX_WEIGHTS = 2**18
_LARGEST = 2.0**1021, 2**53  # of real and of whole numbers, as the codec takes them
_WIDER = 1.05


def export(release: Release) -> str:
    """Return the channels of a release as JSON: the same release, the same text.

    Parameters
    ----------
    release
        From `DIP.fit`, with a `Known` or `Public` reference and the unit `row`.

    Returns
    -------
    str
        `format`, `guarantee`, `epsilon` (one answer to all columns, rounded up), and for each
        privatised column its `kind`, its exact `epsilon`, its domain, and `weights`: rows of whole
        numbers that sum to 2**63, as texts, since many readers of JSON round beyond 2**53.
        `levels`: one row per level. `edges`: one row per bin of ranks. `ranks`: noise on so many
        whole ranks, its sign's row (not below 0, below 0) and one row for each base-256 digit,
        least significant first. `x` and `c` are the knots of the continualised reference cdf, of
        which null has the part below c[0].

    Raises
    ------
    SpecError
        If the reference is another one, the unit is not the row, or a level column has more than
        2**18 weights.
    InputError
        If the fitted release is gone: it was closed.

    Privacy
    -------
    Unit: one answer of one person. Adjacency: replace-one. A device that draws from these tables
    with its own entropy is ε-locally private, whoever reads the answer. The file holds no key, and
    nothing of a private row: a `Known` reference is declared, a `Public` table public. A `Holdout`
    is refused, because its channels publish the hold-out's distribution, which no ε covers; a
    `Histogram`, because raw rows were counted for it, so that somebody holds them and has spent
    part of their ε: nothing is local then. (What is already released may be the `Public` table.)

    Notes
    -----
    The reference of a continuous or mixed column keeps at most 1,024 knots, and three more for each
    atom: pieces of the cdf are joined where they hold little probability. Released values follow
    the thinned cdf, which is in the file and so exactly known; `rank_error` bounds its distance
    from the distribution that the reference was made of. ε does not change: it is the noise's, and
    the cdf is read before it (as a function of the value) and after it.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, appendix S3, Definition S1.
    """
    _check(release)
    rows = release.rows
    assert rows is not None
    rows.work.key()  # the release is not closed
    fitted = rows.load(release.sha256)
    columns = {
        name: _column(rows.mechanism.schema.columns[name], rows.work.codecs[name], mechanism)
        | {"weights": _weights(name, mechanism)}
        for name, mechanism in fitted.columns.items()
    }
    document = {
        "format": FORMAT,
        "made_by": f"dpdask {__version__}",
        "guarantee": (
            f"Whatever a person's values are, no answer to all columns is more than e^{fitted.epsilon:.6g} times as likely as under other values, whoever "
            "reads it (local differential privacy, δ = 0). Fresh noise on a value that was already answered costs ε again: keep the answer and repeat it."
        ),
        "epsilon": fitted.epsilon,
        "adjacency": "replace-one",
        "unit": "one answer of one person, to all columns",
        "reference": rows.mechanism.spec.reference.kind,
        "channel": rows.mechanism.spec.channel,
        "columns": columns,
    }
    return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"


def save(release: Release, path: str | Path) -> None:
    """Write `export(release)` to a new file.

    Parameters
    ----------
    release
        As for `export`.
    path
        The file.

    Raises
    ------
    OutputError
        If the file is there already, or cannot be written.
    SpecError, InputError
        As for `export`.
    """
    write_new({str(path): export(release)})


def _check(release: Release) -> None:
    """Check that devices can randomise their own values by a release."""
    where, rows = "local.export", release.rows
    if rows is None or not isinstance(rows.mechanism, DipMechanism):
        raise SpecError(
            "only distribution-invariant releases have channels that a device can use",
            where,
            "fit dpdask.DIP",
        )
    why_not = rows.mechanism.spec.reference.not_local
    if why_not is not None:
        raise SpecError(
            why_not,
            where,
            "fit with Known(...), or with Public() on a table that is already public",
        )
    if rows.mechanism.declared.rules:
        what = "a device randomises each column by itself, and keeps no rules between columns"
        raise SpecError(what, where, "fit with a schema without `rules`")
    if rows.work.unit is not None:
        what = "a device sees its own answer, and cannot bound how many others its unit gives"
        raise SpecError(what, where, "fit with unit='row' and ε divided by the number of answers")


def _column(declared: Column, codec: Codec, mechanism: ColumnMechanism) -> dict[str, Any]:
    if isinstance(mechanism, WindowMechanism):
        what = "it has too many levels for a file that a device reads"
        hint = "list the commonest, and let `other` stand for the rest"
        raise SpecError(what, f"column {codec.name!r}", hint)
    if declared.unit is not None:
        what, hint = "a device does not round values to a `unit`", "leave it out"
        raise SpecError(what, f"column {codec.name!r}", hint)
    common = {"kind": declared.kind, "epsilon": mechanism.epsilon}
    if isinstance(mechanism, LevelMechanism):
        assert codec.has_levels
        nulls = [None] if codec.levels.null_count else []
        whole = pa.types.is_integer(codec.levels.type)
        return common | {
            "levels": nulls + [_plain(level, whole=whole) for level in declared.listed]
        }
    assert not codec.has_levels
    common |= _reference(codec, mechanism.distribution)
    if isinstance(mechanism, BinMechanism):
        return common | {"edges": mechanism.edges.tolist()}
    return common | {
        "ranks": mechanism.noise.n_cells,
        "rate": mechanism.noise.rate,
        "margin": mechanism.noise.margin,
    }


def _reference(codec: ValueCodec, distribution: RankDistribution) -> dict[str, Any]:
    kept, error = thin_knots(distribution.x, distribution.c, MAX_KNOTS)
    most = _LARGEST[codec.lattice]
    return {
        "type": str(codec.type),
        "nulls": codec.nulls,
        "lattice": codec.lattice,
        "bounds": _numbers(codec, np.array(codec.bounds)) if codec.bounds else [-most, most],
        "atoms": _numbers(codec, np.array(codec.atoms, dtype=np.float64)),
        "knots": {
            "kept": len(kept),
            "fitted": len(distribution.x),
            "rank_error": distribution.rank_error + error,
        },
        "x": _numbers(codec, distribution.x[kept]),
        "c": distribution.c[kept].tolist(),
    }


def _weights(name: str, mechanism: ColumnMechanism) -> list[list[str]]:
    if isinstance(mechanism, RankMechanism):
        noise = mechanism.noise
        sign = [noise.sign, 2**TOTAL_BITS - noise.sign]
        return [[str(weight) for weight in row] for row in [sign, *noise.weights.tolist()]]
    assert not isinstance(mechanism, WindowMechanism)  # refused
    weights = mechanism.channel.weights
    if weights.size > MAX_WEIGHTS:
        raise SpecError(
            f"its channel has more than {MAX_WEIGHTS:,} weights, too many for a small file",
            f"column {name!r}",
            "merge some levels",
        )
    return [[str(weight) for weight in row] for row in weights.tolist()]


def _plain(level: Level, *, whole: bool) -> bool | int | float | str:
    """Return a declared level as JSON holds it: dates and times as ISO 8601 texts."""
    if isinstance(level, dt.date):
        return level.isoformat()
    return int(level) if whole else level


def _numbers(codec: ValueCodec, values: Floats) -> list[float]:
    """Return increasing numbers as people write them: whole if they must be, and 0.1 for the float32 nearest to it.

    A device holds 0.1, which no float32 equals, and a value must equal its atom exactly.
    """
    if codec.lattice:
        whole: list[float] = values.astype(np.int64).tolist()
        return whole
    with np.errstate(over="ignore"):
        narrow = values.astype(float_type(codec.type))
    shortest = [
        float(str(short)) if short == value else value
        for short, value in zip(narrow, values.tolist(), strict=True)
    ]
    # a number between two float32 may now lie beside the wrong one
    increasing: list[float] = np.maximum.accumulate(shortest).tolist()
    return increasing


def thin_knots(x: Floats, c: Floats, n_knots: int) -> tuple[Indices, float]:
    """Return which knots of a continualised cdf to keep, and by how much the cdf changes.

    Parameters
    ----------
    x, c
        The knots, float64 arrays of one length; the cdf jumps where x repeats.
    n_knots
        How many to keep at most, besides three for each jump; all, if there are no more.

    Returns
    -------
    kept
        Increasing positions: the ends, both sides of every jump, and between them as evenly in
        probability as there are knots.
    error
        The largest change of a rank.
    """
    if len(x) <= n_knots:
        return np.arange(len(x)), 0.0
    jumps = np.flatnonzero(np.diff(x) == 0)
    fixed = np.unique(np.concatenate([[0, len(x) - 1], jumps, jumps + 1]))
    width = 1.0 / n_knots
    while len(kept := _evenly(c, fixed, width)) > n_knots + 3 * len(jumps):
        width *= _WIDER
    place = np.maximum(np.searchsorted(kept, np.arange(len(x))), 1)
    left, right = kept[place - 1], kept[place]
    gap = np.where(x[right] > x[left], x[right] - x[left], 1.0)
    line = np.where(x[right] > x[left], c[left] + (c[right] - c[left]) * ((x - x[left]) / gap), c)
    return kept, float(np.abs(line - c).max())


def _evenly(c: Floats, fixed: Indices, width: float) -> Indices:
    """Return the fixed positions, and between them the fewest whose steps of c are no wider than `width`, or are single steps."""
    steps, stops, kept = c.tolist(), fixed.tolist(), [0]
    for stop in stops[1:]:
        while kept[-1] < stop:
            kept.append(
                min(stop, max(kept[-1] + 1, bisect_right(steps, steps[kept[-1]] + width) - 1))
            )
    return np.array(kept)
