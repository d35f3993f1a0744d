"""Interval privacy: its specification, and what it promises. Every private value is released as a random range, in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from dpdask.codec import Codec
from dpdask.documents import check_all, suggest
from dpdask.errors import SpecError
from dpdask.kernels.rank import MAX_EPSILON as MAX_RANK_EPSILON
from dpdask.kernels.rank import MIN_EPSILON as MIN_RANK_EPSILON
from dpdask.mechanisms.card import (
    OWN_NUMBERS,
    CoveredContent,
    Section,
    microseconds_of,
    tell_numbers,
)
from dpdask.mechanisms.interval.design import (
    Canonical,
    CoverageAnchors,
    Design,
    Ensemble,
    IntervalDifferential,
    Progressive,
    ScipyDistribution,
    Selective,
    find_perturbed,
    find_reference,
    make_local_release,
)
from dpdask.mechanisms.interval.ranges import PublicReference, RangeRandomiser, coverage, quasi_run
from dpdask.mechanisms.interval.release import (
    IntervalRelease,
    find_ends,
    is_lattice,
    make_released_schema,
    name_released,
    tabulate,
    write_design,
)
from dpdask.mechanisms.mechanism import Columns, Description, Mechanism, Spec, Spending
from dpdask.privacy import Budget, guarantee_text, split_epsilon
from dpdask.privacy.budget import MAX_EPSILON
from dpdask.privacy.events import Composed, to_dict
from dpdask.privacy.rounding import RowOrder, describe_published, order_text, write_digits
from dpdask.references.reference import ColumnStatistic
from dpdask.schema import Column, Schema, arrow_type
from dpdask.streams import RunKey

_LITTLE = 0.01  # of the values, that a range rules out on average
_SHOWN = 5  # columns whose width is said
_DAY = 86_400_000_000  # microseconds
CONVENTION = (
    "lower < upper: the value, or the perturbed value where the column is perturbed, lies in (lower, upper], open-ended at -inf and inf; "
    "lower = upper: it is exactly that; lower > upper: a ring's outer range, it is at most upper or above lower; null: missing"
)
COVERAGE = "; coverage: the probability of the range under its design's public reference, 0 of an exact value: a function of the range and of what is public"
TRUE = "What is released is true of every row. "


def describe_protected(design: Design) -> str:
    """Return what a design protects, in words."""
    if isinstance(design, IntervalDifferential):
        return "the value, by the ε of its perturbation"
    return "where inside its released range a value lies; the cuts between ranges were drawn at random, without looking at the value"


def describe_unprotected(design: Design) -> str:
    """Return what a design does not protect, in words."""
    always = "that the value lies in its released range"
    if isinstance(design, IntervalDifferential):
        always = (
            "what the range says of the perturbed value; its ε bounds what that says of the value"
        )
    nulls = ["which values are missing"] if design.nulls == "public" else []
    return "; ".join([always, *list_revealed(design), *nulls])


def list_revealed(design: Design) -> tuple[str, ...]:
    """Return what a design reveals apart from the released range, each thing once."""
    if isinstance(design, Canonical) and (design.acceptable or design.exact_ranges):
        return (
            "the exact values inside the acceptable set, and of all others that they are not in it",
        )
    if isinstance(design, Progressive) and design.stop == "own":
        tells = "by stopping where its own next range would be too narrow, that a value is likelier near an end of its range"
        return (f"{tells} (interval privacy does not hold)",)
    if isinstance(design, Selective):
        narrow = "of a row released as the whole line, that its range was too narrow"
        return (
            *list_revealed(design.of),
            f"{narrow}, with a probability of at most one half (under the public reference)",
        )
    if isinstance(design, Ensemble):
        return tuple(dict.fromkeys(text for part in design.of for text in list_revealed(part)))
    if isinstance(design, IntervalDifferential):
        return tuple(f"of perturbed values, {text}" for text in list_revealed(design.of))
    return ()


def describe_all_protected(designs: Mapping[str, Design]) -> str:
    """Return what is protected, in words; of each column, where columns differ."""
    by_text: dict[str, list[str]] = {}
    for name, design in designs.items():
        by_text.setdefault(describe_protected(design), []).append(name)
    return (
        next(iter(by_text))
        if len(by_text) == 1
        else "; ".join(f"of {', '.join(names)}: {text}" for text, names in by_text.items())
    )


def describe_all_unprotected(designs: Mapping[str, Design]) -> str:
    """Return what is not protected of each column, in words."""
    by_text: dict[str, list[str]] = {}
    for name, design in designs.items():
        by_text.setdefault(describe_unprotected(design), []).append(name)
    return "; ".join(f"of {', '.join(names)}: {text}" for text, names in by_text.items())


def interval_guarantee(
    designs: Mapping[str, Design], budget: Budget | None = None, order: RowOrder = "keep"
) -> str:
    """Return the promise in words, including what is not covered.

    Parameters
    ----------
    budget
        What is promised of the perturbed columns; None if there are none.
    order
        Whether the rows are shuffled or keep the order of the input.
    """
    perturbed = {
        name: design for name, design in designs.items() if name in find_perturbed(designs)
    }
    pure = {name: design for name, design in designs.items() if name not in perturbed}
    if budget is None:
        return _pure_guarantee(pure, order)
    columns = ", ".join(perturbed)
    epsilon = guarantee_text(
        budget, f"the values of {columns} in all rows", describe_all_unprotected(perturbed), order
    )
    told = f"For each value of {columns} a random range is released that contains what a perturbation made of it, and need not contain the value. "
    return f"{told}For {columns}: {epsilon}" + (
        f" For {', '.join(pure)} that ε says nothing. {_pure_guarantee(pure, order)}"
        if pure
        else ""
    )


def _pure_guarantee(designs: Mapping[str, Design], order: RowOrder) -> str:
    return (
        f"For each private value ({', '.join(designs)}) a random range is released that contains it. There is no ε: interval privacy bounds "
        "what is told, not how much likelier an output gets. Beyond what is listed as not protected, the ranges tell nothing. "
        f"Protected: {describe_all_protected(designs)}. Not protected: {describe_all_unprotected(designs)}. "
        f"{TRUE}Releasing the same rows again tells more: the ranges intersect, their leakages add up, and "
        f"no ledger counts them. {describe_published(order)}."
    )


def interval_section(
    *,
    release: IntervalRelease,
    schema: Schema,
    codecs: Mapping[str, Codec],
    budget: Budget | None = None,
    order: RowOrder = "keep",
) -> Section:
    """Return what the card says about ranges.

    Parameters
    ----------
    schema, codecs
        The declared columns, and the codec of each private one as far as its type is known.
    budget
        What is promised of the perturbed columns; None if there are none.
    order
        Whether the rows are shuffled or keep the order of the input.

    Privacy
    -------
    Holds designs and what follows from them under their own public references; nothing of any row.
    """
    designs, perturbed = release.designs, list(release.perturbations)
    pure = [name for name in designs if name not in release.perturbations]
    noise = "the anchors are" if budget is None else "anchors and perturbations are"
    return Section(
        budget=budget,
        text=interval_guarantee(designs, budget, order),
        protected=CoveredContent(what=describe_all_protected(designs)),
        unprotected=CoveredContent(what=describe_all_unprotected(designs)),
        mechanism={
            "kind": "interval",
            "columns": "independent",
            "convention": CONVENTION + (COVERAGE if release.coverage else ""),
            "true_of_every_row": not release.perturbations,
        },
        columns={column: _column(column, release, schema, codecs.get(column)) for column in designs}
        | {column: {"role": "kept"} for column in schema.kept},
        accounting=_accounting(release, budget),
        order=order_text(order),
        guarantee={}
        if budget is None
        else {"epsilon_private": perturbed, "interval_private_only": pure},
        seeded=f"INSECURE: {noise} reproducible from a seed, so whoever knows it may rule out more than a range says. ",
    )


def _accounting(release: IntervalRelease, budget: Budget | None) -> dict[str, Any]:
    if budget is None:
        return {
            "epsilon_exact": None,
            "composition": "there is no ε; what several releases of the same rows tell adds up at most",
        }
    return {
        "composition": "ε is a sum over the perturbed columns; what several releases tell of the others adds up at most",
        "epsilon_exact": release.epsilon,
        "events": to_dict(Composed(events=(make_local_release(release.designs),))),
    }


def _column(
    name: str, release: IntervalRelease, schema: Schema, codec: Codec | None
) -> dict[str, Any]:
    design, mechanism = release.designs[name], release.columns[name]
    found: dict[str, Any] = {
        "role": "privatised",
        "kind": schema.columns[name].kind,
        "released_as": list(name_released(name, coverage=release.coverage)),
        "design": design.model_dump(mode="python", exclude_none=True),
        "protected": describe_protected(design),
        "unprotected": describe_unprotected(design),
        "nulls": design.nulls,
        "outside": schema.columns[name].outside_in_words,
    }
    if schema.columns[name].bounds is not None:
        found["bounds"] = schema.columns[name].bounds
    if codec is not None:
        found |= {"numbers": OWN_NUMBERS} | tell_numbers(codec)
    perturbation = release.perturbations.get(name)
    if perturbation is not None:
        found |= {
            "epsilon": find_perturbed(release.designs)[name].epsilon,
            "epsilon_exact": perturbation.epsilon,
            "ranges_of": "perturbed values",
        }
    reference = find_reference(design)
    if reference is not None:
        asked = _Asked(write_design(design), release.lattice[name], name, design, reference)
        mean = round(_hold(asked) if perturbation is None else coverage(mechanism, reference), 4)
        found |= {"reference": reference.model_dump(mode="python"), "mean_coverage": mean}
        found |= {"leakage": round(1.0 - mean, 4)} if perturbation is None else {}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Width:
    """How wide a column's ranges are on average."""

    # The share of the values that a range holds, if they are distributed as the design's reference
    # says; None without one.
    held: float | None
    # The width of the ranges of values that are spread evenly over the declared domain, as a share
    # of it; None without a domain.
    of_bounds: float | None
    span: str | None  # this width, in words; None without a domain


def expect_held(name: str, design: Design, codec: Codec) -> float | None:
    """Return the share of the values that a range holds on average, if they are distributed as the design's reference says; None without one."""
    reference = find_reference(design)
    return (
        None
        if reference is None
        else _hold(_Asked(write_design(design), is_lattice(codec), name, design, reference))
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the mean coverage of a column is a function of, and beside it what is not compared."""

    key: str
    lattice: bool
    name: str = field(compare=False)
    design: Design = field(compare=False)
    reference: ScipyDistribution = field(compare=False)


@lru_cache(maxsize=2048)  # of many columns with few designs, and of a plan and its run
def _hold(asked: _Asked) -> float:
    return coverage(_tabulate(asked.name, asked.design, asked.lattice), asked.reference)


def expect_width(name: str, design: Design, codec: Codec) -> Width:
    """Return how wide the ranges of a column will be on average; of a perturbed one, those of the perturbed values."""
    held, ends = expect_held(name, design, codec), find_ends(codec)
    if ends is None or not ends[0] < ends[1]:
        return Width(held=held, of_bounds=None, span=None)
    (low, high), where = ends, f"column {name!r}"
    uniform = ScipyDistribution(name="uniform", loc=low, scale=high - low).freeze(where)
    even = PublicReference(distribution=uniform, lattice=is_lattice(codec), where=where)
    lower, upper = quasi_run(_tabulate(name, design, is_lattice(codec)).step, even)
    widths = (
        np.clip(upper, low, high)
        - np.clip(lower, low, high)
        + np.where(lower > upper, high - low, 0.0)
    )
    width = float(widths.mean())
    return Width(
        held=held,
        of_bounds=width / (high - low),
        span=_describe_span(width, tell_numbers(codec).get("numbers")),
    )


def _tabulate(name: str, design: Design, lattice: bool) -> RangeRandomiser:
    """Return what makes a column's ranges, without what perturbs its values."""
    cut: Design = design
    if isinstance(design, IntervalDifferential):
        cut = design.of.model_copy(update={"reference": design.of.reference or design.reference})
    return tabulate(name, cut, lattice)


def describe_widths(designs: Mapping[str, Design], codecs: Mapping[str, Codec]) -> tuple[str, ...]:
    """Return how wide the ranges will be, a sentence for each of the first columns, and one about those without a reference."""
    sentences, unknown = [], []
    for name, width in _list_widths(designs, codecs):
        parts = (
            []
            if width.held is None
            else [
                f"holds {_percent(width.held)} of the values on average, if they are distributed as the reference says"
            ]
        )
        if width.of_bounds is not None:
            parts.append(
                f"is {width.span} wide on average, {_percent(width.of_bounds)} of the domain, if values are spread evenly over the domain"
            )
        if parts:
            sentences.append(f"{name}: a range {'; it '.join(parts)}")
        if width.held is None:
            unknown.append(name)
    if unknown:
        told = f"{', '.join(unknown)}: without a `reference` nothing says how much of the values a range holds"
        sentences.append(
            f"{told}; if most of them lie much closer together than ranges are wide, it holds nearly all, and the release tells little"
        )
    return (
        *sentences,
        *([f"{len(designs) - _SHOWN:,} more columns of ranges"] if len(designs) > _SHOWN else []),
    )


def warn_of_wide_ranges(
    designs: Mapping[str, Design], codecs: Mapping[str, Codec]
) -> tuple[str, ...]:
    """Return a warning of columns whose ranges tell next to nothing under their reference, unless the user chose how much they hold."""
    open_ = [
        name
        for name, design in designs.items()
        if not isinstance(getattr(design, "anchors", None), CoverageAnchors)
    ]
    wide = [
        name
        for name in open_
        if (held := expect_held(name, designs[name], codecs[name])) is not None
        and 1.0 - held < _LITTLE
    ]
    if not wide:
        return ()
    told = f"{', '.join(wide)}: a range rules out less than {_percent(_LITTLE)} of the values on average, if they are distributed as the reference says"
    return (f"{told}, so the release tells next to nothing; use anchors where the values are",)


def _list_widths(
    designs: Mapping[str, Design], codecs: Mapping[str, Codec]
) -> Iterator[tuple[str, Width]]:
    for name in list(designs)[:_SHOWN]:
        yield name, expect_width(name, designs[name], codecs[name])


def _describe_span(width: float, numbers: str | None) -> str:
    micro = microseconds_of(numbers)
    return write_digits(width) if micro is None else f"{write_digits(width * micro / _DAY)} days"


def _percent(share: float) -> str:
    """Return a share in per cent, with two digits of what it lacks of all."""
    digits = 0 if share < 0.99 else 1 - math.floor(math.log10(max(100.0 * (1.0 - share), 1e-4)))
    return f"{100.0 * share:.{digits}f} %"


class IntervalSpec(Spec):
    """Random ranges that contain the values, or the perturbed values."""

    kind: Literal["interval"] = "interval"
    columns: Mapping[str, Design]
    """The design of each privatised column."""
    coverage: bool = False
    """Whether `<column>_coverage` is released beside the ends: the range's probability under the
    design's public reference.
    """

    @property
    def spends(self) -> bool:
        """Whether a column is perturbed, so that there is an ε."""
        return bool(find_perturbed(self.columns))

    @property
    def least_budget(self) -> Budget | None:
        """The smallest budget that pays for the perturbed columns; None if there are none."""
        if not self.spends:
            return None
        epsilon = make_local_release(self.columns).epsilon
        if epsilon > MAX_EPSILON:
            what = f"the perturbed columns spend {epsilon:g} together, and no budget is larger than {MAX_EPSILON:g}"
            raise SpecError(what, "`columns`", f"lower {_largest_epsilon(self.columns)}")
        return Budget(epsilon=epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRangesMechanism(Mechanism):
    """Interval privacy of every private column, each by its own design; only columns that are perturbed first have an ε."""

    spec: IntervalSpec

    releases_rows: ClassVar[bool] = True
    reference_rows: ClassVar[Literal["none"]] = "none"
    release_type: ClassVar[type[IntervalRelease]] = IntervalRelease

    def check_parameters(self) -> None:
        """Check the designs and the budget."""
        check_designs(self.schema, self.spec.columns, coverage=self.spec.coverage)
        check_all(
            *(
                partial(_check_outside, name, self.schema.columns[name])
                for name in self.designs
                if name not in find_perturbed(self.designs)
            )
        )
        _check_budget(self.spec, self.budget)
        for name, design in self.designs.items():
            _check_tables(name, design, self.schema.columns[name])

    @property
    def designs(self) -> dict[str, Design]:
        """The design of each private column, in the schema's order; the ε of perturbed ones sum to no more than the budget's.

        Notes
        -----
        What users write is compared as decimals: 0.1 and 0.2 fit 0.3, although as floats they sum
        to more. The parts of ε are then rounded down.
        """
        designs = {name: self.spec.columns[name] for name in self.schema.privatised}
        parts = {name: perturb.epsilon for name, perturb in find_perturbed(designs).items()}
        if self.budget is None or sum(map(Fraction, parts.values())) <= Fraction(
            self.budget.epsilon
        ):
            return designs
        parts = split_epsilon(self.budget.epsilon, tuple(parts), parts)
        return {
            name: design.model_copy(
                update={"perturb": design.perturb.model_copy(update={"epsilon": parts[name]})}
            )
            if isinstance(design, IntervalDifferential)
            else design
            for name, design in designs.items()
        }

    @property
    def event(self) -> Composed:
        """One local release of every row by its perturbed columns, if there are any; the other columns have no ε."""
        designs = self.designs
        pure = tuple(name for name in designs if name not in find_perturbed(designs))
        return Composed(
            events=() if self.budget is None else (make_local_release(designs),),
            without_epsilon=pure,
        )

    @property
    def spending(self) -> Spending:
        """What each perturbed column costs; the others have no ε."""
        return Spending(
            row={name: perturb.epsilon for name, perturb in find_perturbed(self.designs).items()}
        )

    def find_written(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written, given the released columns of the table."""
        return make_released_schema(released, self.schema.privatised, coverage=self.spec.coverage)

    def check(self, columns: Columns) -> None:
        """Check the table's types against the designs: every distribution is tabulated, and every perturbation fitted."""
        self._fit(columns)

    def statistic(self, columns: Columns) -> ColumnStatistic:
        """Return what checks the rows where they must be counted; nothing is computed from it."""
        return ColumnStatistic(codecs=columns.codecs)

    def fit(self, counts: None, columns: Columns, key: RunKey) -> IntervalRelease:
        """Return the fitted release, a function of the designs and the table's types; see `Mechanism.fit`."""
        del counts, key
        return self._fit(columns)

    def _fit(self, columns: Columns) -> IntervalRelease:
        return IntervalRelease.of(self.designs, columns.codecs, coverage=self.spec.coverage)

    def audit(self, columns: Columns, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return for each perturbed column its `claimed` ε, its exact ε* and the `reference` it holds for; see `Mechanism.audit`."""
        del card
        claims = self.spending.row
        return {
            name: {
                "claimed": claims[name],
                "epsilon_exact": perturbation.mechanism.exact_epsilon,
                "reference": "the declared distribution",
            }
            for name, perturbation in self._fit(columns).perturbations.items()
        }

    @property
    def description(self) -> RangesDescription:
        """What is said of it."""
        return RangesDescription(self)


@dataclass(frozen=True, slots=True)
class RangesDescription(Description):
    """What is said of random ranges."""

    mechanism: RandomRangesMechanism

    @property
    def protected(self) -> str:
        """What is covered, in words."""
        return describe_all_protected(self.mechanism.designs)

    @property
    def unprotected(self) -> str:
        """What is not, in words."""
        return describe_all_unprotected(self.mechanism.designs)

    def guarantee(self, order: RowOrder) -> str:
        """Return the promise in words."""
        return interval_guarantee(self.mechanism.designs, self.mechanism.budget, order)

    @property
    def how(self) -> str:
        """What is done, in a few words."""
        designs = self.mechanism.designs
        perturbed = find_perturbed(designs)
        return f"{', '.join(designs)} released as random ranges" + (
            f"; {', '.join(perturbed)} perturbed first" if perturbed else ""
        )

    def stages(self, columns: Columns, *, uncounted: bool) -> tuple[str, ...]:
        """Return what a run does before the commit, in words."""
        del columns
        perturbed = ", ".join(find_perturbed(self.mechanism.designs))
        counted = (
            (f"survey: read {', '.join(self.mechanism.schema.privatised)}; count the rows",)
            if uncounted
            else ()
        )
        return (
            *counted,
            "fit: the tables that anchors and perturbations are drawn from, on the driver; the designs are written once",
            f"write: {f'perturb {perturbed}; ' if perturbed else ''}draw each fragment's anchors, find its values' ranges, and stage its shards",
        )

    def expectations(self, columns: Columns) -> tuple[str, ...]:
        """Return how wide the ranges will be, from the anchors and what is declared."""
        return describe_widths(self.mechanism.designs, columns.codecs)

    def cautions(self, columns: Columns, n_rows: int | None) -> tuple[str, ...]:
        """Return what a steward should think of before a run."""
        del n_rows
        return warn_of_wide_ranges(self.mechanism.designs, columns.codecs)

    def n_expected(self, n_rows: int | None) -> int | None:
        """Return how many rows a run writes: all of them."""
        return n_rows

    def section(
        self,
        release: IntervalRelease,
        columns: Columns,
        *,
        n_rows: int | None,
        n_released: int | None,
        order: RowOrder,
    ) -> Section:
        """Return the mechanism's part of the release card."""
        del n_rows, n_released
        return interval_section(
            release=release,
            schema=self.mechanism.schema,
            codecs=columns.codecs,
            budget=self.mechanism.budget,
            order=order,
        )

    def quality(self, release: IntervalRelease) -> str:
        """Return nothing: the ranges are as wide as the plan expects."""
        del release
        return ""

    def warnings(self, release: IntervalRelease, columns: Columns) -> tuple[str, ...]:
        """Return none: nothing of the release comes from rows."""
        del release, columns
        return ()


def check_designs(schema: Schema, designs: Mapping[str, Design], *, coverage: bool = False) -> None:
    """Check that each private column has a design that it can have, and that no two released columns share a name."""
    for name in designs:
        if name not in schema.privatised:
            raise SpecError(
                "is not a privatised column",
                f"`columns.{name}`",
                suggest(
                    name, schema.privatised, "remove it, or give the column the role privatise"
                ),
            )
    for name in schema.privatised:
        place, column = f"column {name!r}", schema.columns[name]
        if column.kind == "categorical":
            raise SpecError(
                "a categorical column has no order, so it cannot have ranges",
                place,
                "drop it, or randomise it in a job of the kind dip",
            )
        if name not in designs:
            raise SpecError("has no design", place, "add it to `columns`")
        if coverage and find_reference(designs[name]) is None:
            what = "coverage needs a public reference, and its design names none"
            raise SpecError(what, place, "add `reference: {name: …}`, or remove `coverage`")
        _check_nulls(column, designs[name], place)
        _check_epsilon(name, designs[name], column)
    released = [
        *schema.kept,
        *(made for name in schema.privatised for made in name_released(name, coverage=coverage)),
    ]
    for name in schema.privatised:
        clash = next(
            (made for made in name_released(name, coverage=coverage) if released.count(made) > 1),
            None,
        )
        if clash is not None:
            raise SpecError(
                f"its released column would be {clash!r}, but another column has that name",
                f"column {name!r}",
                "rename the other",
            )


def _check_nulls(column: Column, design: Design, place: str) -> None:
    if column.nulls == "level" and design.nulls != "public":
        what = "a null has no range, so the release would show which values are missing"
        raise SpecError(
            what,
            place,
            "declare `nulls: public` in its design if it is public, or `nulls: refuse` in the schema",
        )
    if design.nulls == "public" and column.nulls != "level":
        what = "its design has `nulls: public`, and the schema refuses nulls, so the first null would stop the release"
        raise SpecError(
            what, place, "declare `nulls: level` in the schema, or leave `nulls` out of the design"
        )
    if column.outside == "null":
        what = "values outside the domain become null, and nulls are published, so the release would reveal which values these were"
        raise SpecError(what, place, "declare `outside: clip` or `outside: refuse` in the schema")


def _check_outside(name: str, column: Column) -> None:
    """Check that no value is replaced before its range is found: the range would not hold the value, and nobody could tell."""
    if column.outside != "refuse":
        what = f"values outside its domain would be replaced (`outside: {column.outside}`), and their ranges need not hold them"
        mend = "declare `outside: refuse`" + (", or leave the bounds out" if column.bounds else "")
        raise SpecError(what, f"column {name!r}", mend)


def _check_epsilon(name: str, design: Design, column: Column) -> None:
    """Check that the rank noise of a perturbed column can have its ε."""
    if (
        not isinstance(design, IntervalDifferential)
        or column.has_levels
        or design.perturb.channel == "optimal"
    ):
        return
    epsilon = design.perturb.epsilon
    if not MIN_RANK_EPSILON <= epsilon <= MAX_RANK_EPSILON:
        what = f"is {epsilon:g}, but a {column.kind} column takes an ε in [{MIN_RANK_EPSILON:g}, {MAX_RANK_EPSILON:g}]"
        raise SpecError(what, f"`columns.{name}.perturb.epsilon`", "change it")


def _check_budget(spec: IntervalSpec, budget: Budget | None) -> None:
    """Check that a budget is promised if a column is perturbed, and that it pays for all that are."""
    parts = [perturb.epsilon for perturb in find_perturbed(spec.columns).values()]
    total = sum(map(Decimal, map(repr, parts)), Decimal(0))
    spent = f"{total.normalize():f}"
    if budget is None:
        if parts:
            raise SpecError(
                f"the perturbed columns spend {spent} together, but no ε is promised",
                "`epsilon`",
                f"set it to at least {spent}",
            )
        return
    if not parts:
        raise SpecError(
            "no column is perturbed, so there is no ε to promise", "`epsilon`", "remove it"
        )
    if budget.delta:
        raise SpecError(
            f"is {budget.delta:g}, but interval-differential privacy spends no δ",
            "`delta`",
            "set it to 0, or remove it",
        )
    if budget.adjacency != "replace-one":
        what = "ranges are released one row for each row, so they cannot hide that a row is there"
        raise SpecError(what, "`adjacency`", "set it to replace-one")
    if budget.unit_column is not None:
        raise SpecError(
            "ranges are released for every row, however many rows a unit has",
            "`unit`",
            "set it to row, or remove it",
        )
    if total > Decimal(repr(budget.epsilon)):
        what = f"is {budget.epsilon!r}, and the perturbed columns spend {spent} together"
        raise SpecError(
            what,
            "`epsilon`",
            f"set it to at least {spent}, or lower {_largest_epsilon(spec.columns)}",
        )


def _largest_epsilon(designs: Mapping[str, Design]) -> str:
    """Return the parameter with the largest ε of a perturbed column."""
    perturbed = find_perturbed(designs)
    return f"`columns.{max(perturbed, key=lambda name: perturbed[name].epsilon)}.perturb.epsilon`"


def _check_tables(name: str, design: Design, column: Column) -> None:
    """Check that a design is possible: its distributions exist and can be tabulated, and its targets can be reached.

    Whether values are whole numbers is known if the schema declares their type; else either will do
    here, and `check` decides.
    """
    cut: Design = design
    if isinstance(design, IntervalDifferential):
        cut = design.of.model_copy(update={"reference": design.of.reference or design.reference})
        if design.perturb.reference.name is not None:
            design.perturb.reference.freeze(name)
    errors = []
    for lattice in (
        (False, True)
        if column.type is None
        else (not pa.types.is_floating(arrow_type(column.type)),)
    ):
        try:
            tabulate(name, cut, lattice)
        except SpecError as error:
            errors.append(error)
        else:
            return
    raise errors[0]
