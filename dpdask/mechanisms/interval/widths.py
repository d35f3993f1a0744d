"""How wide ranges will be, before any row is read: by the anchors and what is declared, which are public."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dpdask.codec import Codec
from dpdask.mechanisms.card import microseconds_of, tell_numbers
from dpdask.mechanisms.interval.coverage import PublicReference, coverage, quasi_run
from dpdask.mechanisms.interval.design import Design, IntervalDifferential, ScipyDistribution, find_reference
from dpdask.mechanisms.interval.ranges import RangeRandomiser
from dpdask.mechanisms.interval.release import find_ends, is_lattice, tabulate
from dpdask.privacy.rounding import write_digits

_LITTLE = 0.01  # of the values, that a range rules out on average
_SHOWN = 5  # columns
_DAY = 86_400_000_000  # microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """How wide a column's ranges are on average.

    Attributes
    ----------
    held
        The share of the values that a range holds, if they are distributed as the design's reference says; None without one.
    of_bounds
        The width of the ranges of values that are spread evenly over the declared domain, as a share of it; None without a domain.
    span
        This width, in words; None without a domain.
    """

    held: float | None
    of_bounds: float | None
    span: str | None


def expect_held(name: str, design: Design, codec: Codec) -> float | None:
    """Return the share of the values that a range holds on average, if they are distributed as the design's reference says; None without one.

    Parameters
    ----------
    name
        The column.
    design
        As the user wrote it.
    codec
        Its codec.
    """
    reference = find_reference(design)
    return None if reference is None else coverage(_tabulate(name, design, codec), reference)


def expect_width(name: str, design: Design, codec: Codec) -> Width:
    """Return how wide the ranges of a column will be on average; of a perturbed one, those of the perturbed values.

    Parameters
    ----------
    name, design, codec
        As for `expect_held`.
    """
    held, ends = expect_held(name, design, codec), find_ends(codec)
    if ends is None or not ends[0] < ends[1]:
        return Width(held=held, of_bounds=None, span=None)
    (low, high), where = ends, f"column {name!r}"
    uniform = ScipyDistribution(name="uniform", loc=low, scale=high - low).freeze(where)
    even = PublicReference(distribution=uniform, lattice=is_lattice(codec), where=where)
    lower, upper, _ = quasi_run(_tabulate(name, design, codec).step, even)
    widths = np.clip(upper, low, high) - np.clip(lower, low, high) + np.where(lower > upper, high - low, 0.0)
    width = float(widths.mean())
    return Width(held=held, of_bounds=width / (high - low), span=_describe_span(width, tell_numbers(codec).get("numbers")))


def _tabulate(name: str, design: Design, codec: Codec) -> RangeRandomiser:
    """Return what makes a column's ranges, without what perturbs its values."""
    cut: Design = design
    if isinstance(design, IntervalDifferential):
        cut = design.of.model_copy(update={"reference": design.of.reference or design.reference})
    return tabulate(name, cut, lattice=is_lattice(codec))


def describe_widths(designs: Mapping[str, Design], codecs: Mapping[str, Codec]) -> tuple[str, ...]:
    """Return how wide the ranges will be, a sentence for each of the first columns, and one about those without a reference.

    Parameters
    ----------
    designs, codecs
        By column.
    """
    sentences, unknown = [], []
    for name, width in _list_widths(designs, codecs):
        parts = (
            [] if width.held is None else [f"holds {_percent(width.held)} of the values on average, if they are distributed as the reference says"]
        )
        if width.of_bounds is not None:
            parts.append(f"is {width.span} wide on average, {_percent(width.of_bounds)} of the domain, if values are spread evenly over the domain")
        if parts:
            sentences.append(f"{name}: a range {'; it '.join(parts)}")
        if width.held is None:
            unknown.append(name)
    if unknown:
        told = f"{', '.join(unknown)}: without a `reference` nothing says how much of the values a range holds"
        sentences.append(f"{told}; if most of them lie much closer together than ranges are wide, it holds nearly all, and the release tells little")
    return (*sentences, *([f"{len(designs) - _SHOWN:,} more columns of ranges"] if len(designs) > _SHOWN else []))


def warn_of_wide_ranges(designs: Mapping[str, Design], codecs: Mapping[str, Codec]) -> tuple[str, ...]:
    """Return a warning of columns whose ranges tell next to nothing under their reference.

    Parameters
    ----------
    designs, codecs
        By column.
    """
    wide = [name for name in designs if (held := expect_held(name, designs[name], codecs[name])) is not None and 1.0 - held < _LITTLE]
    if not wide:
        return ()
    told = (
        f"{', '.join(wide)}: a range rules out less than {_percent(_LITTLE)} of the values on average, if they are distributed as the reference says"
    )
    return (f"{told}, so the release tells next to nothing; use anchors where the values are",)


def _list_widths(designs: Mapping[str, Design], codecs: Mapping[str, Codec]) -> Iterator[tuple[str, Width]]:
    for name in list(designs)[:_SHOWN]:
        yield name, expect_width(name, designs[name], codecs[name])


def _describe_span(width: float, numbers: str | None) -> str:
    micro = microseconds_of(numbers)
    return write_digits(width) if micro is None else f"{write_digits(width * micro / _DAY)} days"


def _percent(share: float) -> str:
    """Return a share in per cent, with two digits of what it lacks of all."""
    digits = 0 if share < 0.99 else 1 - math.floor(math.log10(max(100.0 * (1.0 - share), 1e-4)))
    return f"{100.0 * share:.{digits}f} %"
