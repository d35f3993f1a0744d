"""Interval privacy: its specification, and what it promises. Every private value is released as a random range, in one pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa

from dpdask.archive import Json
from dpdask.arrays import freeze_class
from dpdask.codec import Codec, Codecs
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
    CoverageAnchors,
    Design,
    IntervalDifferential,
    ScipyDistribution,
    find_perturbed,
    make_local_release,
)
from dpdask.mechanisms.interval.ranges import PublicReference, coverage, quasi_run
from dpdask.mechanisms.interval.release import (
    IntervalRelease,
    find_ends,
    is_lattice,
    make_released_schema,
    name_released,
    tabulate,
    write_design,
)
from dpdask.mechanisms.mechanism import Columns, Description, Mechanism, Sentences, Spec, Spending
from dpdask.privacy import Budget, guarantee_text, split_epsilon
from dpdask.privacy.budget import MAX_EPSILON, Part, Promise, describe_published, order_text
from dpdask.privacy.events import (
    Composed,
    RowOrder,
    to_dict,
    write_digits,
)
from dpdask.references.reference import CHECK, ColumnStatistic
from dpdask.scales import count_type, is_real
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
    def total(self) -> Decimal:
        """What the perturbed columns spend together, as it is written: 0.1 and 0.2 are 0.3."""
        written = (repr(perturb.epsilon) for perturb in find_perturbed(self.columns).values())
        return sum(map(Decimal, written), Decimal(0))

    @property
    def least_budget(self) -> Budget | None:
        """The smallest budget that pays for the perturbed columns; None if there are none."""
        if not self.spends:
            return None
        # of floats, the sum may round below what is written
        epsilon = max(make_local_release(self.columns).epsilon, float(self.total))
        if epsilon > MAX_EPSILON:
            most = f"no budget is larger than {MAX_EPSILON:g}"
            what = f"the perturbed columns spend {epsilon:g} together, and {most}"
            raise SpecError(what, "`columns`", f"lower {self.largest}")
        return Budget(epsilon=epsilon)

    @property
    def largest(self) -> str:
        """The parameter with the largest ε of a perturbed column."""
        perturbed = find_perturbed(self.columns)
        name = max(perturbed, key=lambda name: perturbed[name].epsilon)
        return f"`columns.{name}.perturb.epsilon`"


@freeze_class
class RandomRangesMechanism(Mechanism):
    """Interval privacy of every private column by its own design; only columns that are perturbed have an ε."""

    spec: IntervalSpec

    releases_rows: ClassVar = True
    reference_rows: ClassVar[Literal["none"]] = "none"
    release_type: ClassVar = IntervalRelease

    def check_parameters(self) -> None:
        """Check the designs and the budget."""
        check_designs(self.schema, self.spec.columns, coverage=self.spec.coverage)
        designs = self.designs
        columns = {name: self.schema.columns[name] for name in designs}
        pure = [name for name in designs if name not in find_perturbed(designs)]
        check_all(*(partial(_check_outside, name, columns[name]) for name in pure))
        _check_budget(self.spec, self.budget)
        for name, design in designs.items():
            _check_tables(name, design, columns[name])

    @cached_property
    def designs(self) -> dict[str, Design]:
        """The design of each private column, in the schema's order; their ε sum to the budget's at most.

        Notes
        -----
        What users write is compared as decimals: 0.1 and 0.2 fit 0.3, although as floats they sum
        to more. The parts of ε are then rounded down.
        """
        designs = {name: self.spec.columns[name] for name in self.schema.privatised}
        parts = {name: perturb.epsilon for name, perturb in find_perturbed(designs).items()}
        budget = self.budget
        if budget is None or sum(map(Fraction, parts.values())) <= Fraction(budget.epsilon):
            return designs
        parts = split_epsilon(budget.epsilon, tuple(parts), parts)
        for name, design in designs.items():
            if isinstance(design, IntervalDifferential):
                perturb = design.perturb.model_copy(update={"epsilon": parts[name]})
                designs[name] = design.model_copy(update={"perturb": perturb})
        return designs

    @property
    def event(self) -> Composed:
        """One local release of every row by its perturbed columns; the other columns have no ε."""
        designs = self.designs
        pure = tuple(name for name in designs if name not in find_perturbed(designs))
        events = () if self.budget is None else (make_local_release(designs),)
        return Composed(events=events, without_epsilon=pure)

    @property
    def spending(self) -> Spending:
        """What each perturbed column costs; the others have no ε."""
        perturbed = find_perturbed(self.designs)
        return Spending(row={name: perturb.epsilon for name, perturb in perturbed.items()})

    def find_written(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written, given the released columns of the table."""
        return make_released_schema(released, self.schema.privatised, coverage=self.spec.coverage)

    def check(self, columns: Columns) -> None:
        """Check the types against the designs: all distributions are tabulated, all perturbations fitted."""
        self._fit(columns)

    def statistic(self, columns: Columns) -> ColumnStatistic:
        """Return what checks the rows where they must be counted; nothing is computed from it."""
        return ColumnStatistic(codecs=columns.codecs)

    def fit(self, counts: None, columns: Columns, key: RunKey) -> IntervalRelease:
        """Return the fitted release, a function of the designs and the table's types."""
        return self._fit(columns)

    def _fit(self, columns: Columns) -> IntervalRelease:
        return IntervalRelease.of(self.designs, columns.codecs, coverage=self.spec.coverage)

    def audit(self, columns: Columns, card: Mapping[str, Any] | None) -> dict[str, Json]:
        """Return for each perturbed column its `claimed` ε, its exact ε* and its `reference`."""
        claims = self.spending.row
        return {
            name: {
                "claimed": claims[name],
                "epsilon_exact": each.mechanism.exact_epsilon,
                "reference": "the declared distribution",
            }
            for name, each in self._fit(columns).perturbations.items()
        }

    @property
    def description(self) -> RangesDescription:
        """What is said of it."""
        return RangesDescription(self)


# ---- what is refused


def check_designs(schema: Schema, designs: Mapping[str, Design], *, coverage: bool = False) -> None:
    """Check that each private column has a design that it can have, and a name for what it releases."""
    for name in designs:
        if name not in schema.privatised:
            mend = "remove it, or give the column the role privatise"
            mend = suggest(name, schema.privatised, mend)
            raise SpecError("is not a privatised column", f"`columns.{name}`", mend)
    for name in schema.privatised:
        place, column = f"column {name!r}", schema.columns[name]
        if column.kind == "categorical":
            what = "a categorical column has no order, so it cannot have ranges"
            raise SpecError(what, place, "drop it, or randomise it in a job of the kind dip")
        if name not in designs:
            raise SpecError("has no design", place, "add it to `columns`")
        if coverage and designs[name].public_reference is None:
            what = "coverage needs a public reference, and its design names none"
            raise SpecError(what, place, "add `reference: {name: …}`, or remove `coverage`")
        _check_column(name, column, designs[name])
    made = {name: name_released(name, coverage=coverage) for name in schema.privatised}
    released = [*schema.kept, *(each for names in made.values() for each in names)]
    for name, names in made.items():
        for each in names:
            if released.count(each) > 1:
                what = f"its released column would be {each!r}, but another column has that name"
                raise SpecError(what, f"column {name!r}", "rename the other")


def _check_column(name: str, column: Column, design: Design) -> None:
    """Check that a column's nulls are those of its design, and that its rank noise can have its ε."""
    place = f"column {name!r}"
    if column.nulls == "level" and design.nulls != "public":
        what = "a null has no range, so the release would show which values are missing"
        mend = "declare `nulls: public` in its design if it is public, or `nulls: refuse`"
        raise SpecError(what, place, f"{mend} in the schema")
    if design.nulls == "public" and column.nulls != "level":
        refuses = "its design has `nulls: public`, and the schema refuses nulls"
        mend = "declare `nulls: level` in the schema, or leave `nulls` out of the design"
        raise SpecError(f"{refuses}, so the first null would stop the release", place, mend)
    if column.outside == "null":
        what = "values outside the domain become null, and nulls are published"
        mend = "declare `outside: clip` or `outside: refuse` in the schema"
        raise SpecError(f"{what}, so the release would reveal which values these were", place, mend)
    if isinstance(design, IntervalDifferential) and not column.has_levels:
        epsilon, channel = design.perturb.epsilon, design.perturb.channel
        if channel != "optimal" and not MIN_RANK_EPSILON <= epsilon <= MAX_RANK_EPSILON:
            takes = f"takes an ε in [{MIN_RANK_EPSILON:g}, {MAX_RANK_EPSILON:g}]"
            what = f"is {epsilon:g}, but a {column.kind} column {takes}"
            raise SpecError(what, f"`columns.{name}.perturb.epsilon`", "change it")


def _check_outside(name: str, column: Column) -> None:
    """Check that no value is replaced before its range is found.

    The range would not hold the value, and nobody could tell.
    """
    if column.outside != "refuse":
        replaced = f"values outside its domain would be replaced (`outside: {column.outside}`)"
        mend = "declare `outside: refuse`" + (", or leave the bounds out" if column.bounds else "")
        what = f"{replaced}, and their ranges need not hold them"
        raise SpecError(what, f"column {name!r}", mend)


def _check_budget(spec: IntervalSpec, budget: Budget | None) -> None:
    """Check that a budget is promised if a column is perturbed, and that it pays for all that are."""
    spent = f"{spec.total.normalize():f}"
    if budget is None:
        if spec.spends:
            what = f"the perturbed columns spend {spent} together, but no ε is promised"
            raise SpecError(what, "`epsilon`", f"set it to at least {spent}")
        return
    if not spec.spends:
        what = "no column is perturbed, so there is no ε to promise"
        raise SpecError(what, "`epsilon`", "remove it")
    if budget.delta:
        what = f"is {budget.delta:g}, but interval-differential privacy spends no δ"
        raise SpecError(what, "`delta`", "set it to 0, or remove it")
    if budget.adjacency != "replace-one":
        what = "ranges are released one row for each row, so they cannot hide that a row is there"
        raise SpecError(what, "`adjacency`", "set it to replace-one")
    if budget.unit_column is not None:
        what = "ranges are released for every row, however many rows a unit has"
        raise SpecError(what, "`unit`", "set it to row, or remove it")
    if spec.total > Decimal(repr(budget.epsilon)):
        what = f"is {budget.epsilon!r}, and the perturbed columns spend {spent} together"
        raise SpecError(what, "`epsilon`", f"set it to at least {spent}, or lower {spec.largest}")


def _check_tables(name: str, design: Design, column: Column) -> None:
    """Check that a design's distributions can be tabulated, and its targets be reached.

    Whether values are whole numbers is known if the schema declares their type; else either will do
    here, and `check` decides.
    """
    if isinstance(design, IntervalDifferential) and design.perturb.reference.name is not None:
        design.perturb.reference.freeze(name)
    either = [False, True]
    if column.type is not None:
        either = [not is_real(count_type(arrow_type(column.type), column.unit))]
    errors = []
    for lattice in either:
        try:
            tabulate(name, _get_cut(design), lattice)
        except SpecError as error:
            errors.append(error)
    if len(errors) == len(either):
        raise errors[0]


def _get_cut(design: Design) -> Design:
    """Return what makes a column's ranges, without what perturbs its values."""
    return design.cut if isinstance(design, IntervalDifferential) else design


# ---- what is said


@freeze_class(kw_only=False)
class RangesDescription(Description):
    """What is said of random ranges."""

    mechanism: RandomRangesMechanism

    @property
    def protected(self) -> str:
        """What is covered, in words."""
        return describe_protected(self.mechanism.designs)

    @property
    def unprotected(self) -> str:
        """What is not, in words."""
        return describe_unprotected(self.mechanism.designs)

    def guarantee(self, order: RowOrder) -> str:
        """Return the promise in words."""
        return describe_guarantee(self.mechanism.designs, self.mechanism.budget, order)

    @property
    def how(self) -> str:
        """What is done, in a few words."""
        perturbed = ", ".join(find_perturbed(self.mechanism.designs))
        how = f"{', '.join(self.mechanism.designs)} released as random ranges"
        return f"{how}; {perturbed} perturbed first" if perturbed else how

    def stages(self, columns: Columns) -> Sentences:
        """Return what a run does before the commit, in words."""
        perturbed = ", ".join(find_perturbed(self.mechanism.designs))
        read = ", ".join(self.mechanism.schema.privatised)
        tables = "the tables that anchors and perturbations are drawn from"
        draw = f"perturb {perturbed}; draw" if perturbed else "draw"
        return (
            CHECK.format(columns=read),
            f"fit: {tables}, on the driver; the designs are written once",
            f"write: {draw} each fragment's anchors, find its values' ranges, and stage its shards",
        )

    def expectations(self, columns: Columns) -> Sentences:
        """Return how wide the first columns' ranges will be, from the anchors and what is declared."""
        designs = self.mechanism.designs
        sentences, unknown = [], []
        for name in list(designs)[:_SHOWN]:
            design, codec = designs[name], columns.codecs[name]
            held, width = expect_held(name, design, codec), _expect_width(name, design, codec)
            if held is None:
                unknown.append(name)
                parts = []
            else:
                as_said = "if they are distributed as the reference says"
                parts = [f"holds {_percent(held)} of the values on average, {as_said}"]
            if width is not None:
                parts.append(width)
            if parts:
                sentences.append(f"{name}: a range {'; it '.join(parts)}")
        if unknown:
            sentences.append(
                f"{', '.join(unknown)}: without a `reference` nothing says how much of the values a range holds; "
                "if most of them lie much closer together than ranges are wide, it holds nearly all, and the release tells little"
            )
        if len(designs) > _SHOWN:
            sentences.append(f"{len(designs) - _SHOWN:,} more columns of ranges")
        return tuple(sentences)

    def cautions(self, columns: Columns, n_rows: int | None) -> Sentences:
        """Return a warning of columns whose ranges tell next to nothing under their reference.

        Not of those whose user chose how much they hold.
        """
        wide = []
        for name, design in self.mechanism.designs.items():
            if not isinstance(getattr(design, "anchors", None), CoverageAnchors):
                held = expect_held(name, design, columns.codecs[name])
                wide += [name] if held is not None and 1.0 - held < _LITTLE else []
        if not wide:
            return ()
        little = f"rules out less than {_percent(_LITTLE)} of the values on average"
        as_said = "if they are distributed as the reference says"
        tells = "so the release tells next to nothing; use anchors where the values are"
        return (f"{', '.join(wide)}: a range {little}, {as_said}, {tells}",)

    def n_expected(self, n_rows: int | None) -> int | None:
        """Return how many rows a run writes: all of them."""
        return n_rows

    def section(
        self,
        release: IntervalRelease,
        columns: Columns,
        *,
        order: RowOrder,
        **_: Any,
    ) -> Section:
        """Return the mechanism's part of the release card."""
        return interval_section(
            release=release,
            schema=self.mechanism.schema,
            codecs=columns.codecs,
            budget=self.mechanism.budget,
            order=order,
        )

    def quality(self, release: IntervalRelease) -> str:
        """Return nothing: the ranges are as wide as the plan expects."""
        return ""

    def warnings(self, release: IntervalRelease, columns: Columns) -> Sentences:
        """Return none: nothing of the release comes from rows."""
        return ()


def describe_protected(designs: Mapping[str, Design]) -> str:
    """Return what is protected, in words; of each column, where columns differ."""
    texts = {name: design.protected for name, design in designs.items()}
    first = next(iter(texts.values()), "")
    return first if set(texts.values()) == {first} else _join(texts)


def describe_unprotected(designs: Mapping[str, Design]) -> str:
    """Return what is not protected of each column, in words."""
    return _join({name: design.unprotected for name, design in designs.items()})


def _join(texts: Mapping[str, str]) -> str:
    by_text: dict[str, list[str]] = {}
    for name, text in texts.items():
        by_text.setdefault(text, []).append(name)
    return "; ".join(f"of {', '.join(names)}: {text}" for text, names in by_text.items())


def describe_guarantee(
    designs: Mapping[str, Design], budget: Budget | None, order: RowOrder, true: str = TRUE
) -> Promise:
    """Return the promise in words, including what is not covered, and `true`: whether ranges hold their values."""
    perturbed = {name: designs[name] for name in find_perturbed(designs)}
    pure = {name: design for name, design in designs.items() if name not in perturbed}
    told = (
        f"For each private value ({', '.join(pure)}) a random range is released that contains it. There is no ε: interval privacy bounds "
        "what is told, not how much likelier an output gets. Beyond what is listed as not protected, the ranges tell nothing."
    )
    again = (
        f"{true}Releasing the same rows again tells more: the ranges intersect, their leakages add up, and "
        "no ledger counts them."
    )
    ranges: list[tuple[Part, str]] = [
        ("protected", f"{describe_protected(pure)}."),
        ("not protected", f"{describe_unprotected(pure)}. {again}"),
        ("published", f"{describe_published(order)}."),
    ]
    if budget is None:
        return Promise.of(("promise", told), *ranges)
    columns = ", ".join(perturbed)
    covered, uncovered = f"the values of {columns} in all rows", describe_unprotected(perturbed)
    (_, promised), *rest = guarantee_text(budget, covered, uncovered, order).parts
    perturbing = f"For each value of {columns} a random range is released that contains what a perturbation made of it, and need not contain the value."
    head: tuple[Part, str] = ("promise", f"{perturbing} For {columns}: {promised}")
    if not pure:
        return Promise.of(head, *rest)
    beside: tuple[Part, str] = ("promise", f"For {', '.join(pure)} that ε says nothing. {told}")
    return Promise.of(head, *rest, beside, *ranges)


def interval_section(
    *,
    release: IntervalRelease,
    schema: Schema,
    codecs: Codecs,
    budget: Budget | None = None,
    order: RowOrder = "keep",
    true: str = TRUE,
) -> Section:
    """Return what the card says about ranges, with the codecs of those columns whose type is known.

    Privacy
    -------
    Holds designs and what follows from them under their own public references; nothing of any row.
    """
    designs, perturbed = release.designs, list(release.perturbations)
    drawn, guarantee = "the anchors are", {}
    accounting: Json = {
        "epsilon_exact": None,
        "composition": "there is no ε; what several releases of the same rows tell adds up at most",
    }
    if budget is not None:
        drawn = "anchors and perturbations are"
        pure = [name for name in designs if name not in perturbed]
        guarantee = {"epsilon_private": perturbed, "interval_private_only": pure}
        sums = "ε is a sum over the perturbed columns"
        accounting = {
            "composition": f"{sums}; what several releases tell of the others adds up at most",
            "epsilon_exact": release.epsilon,
            "events": to_dict(Composed(events=(make_local_release(designs),))),
        }
    columns = {name: _describe(name, release, schema, codecs.get(name)) for name in designs}
    rules_out = "so whoever knows it may rule out more than a range says"
    return Section(
        budget=budget,
        text=describe_guarantee(designs, budget, order, true),
        protected=CoveredContent(what=describe_protected(designs)),
        unprotected=CoveredContent(what=describe_unprotected(designs)),
        mechanism={
            "kind": "interval",
            "columns": "independent",
            "convention": CONVENTION + (COVERAGE if release.coverage else ""),
            "true_of_every_row": not perturbed,
        },
        columns=columns | {name: {"role": "kept"} for name in schema.kept},
        accounting=accounting,
        order=order_text(order),
        guarantee=guarantee,
        seeded=f"INSECURE: {drawn} reproducible from a seed, {rules_out}. ",
    )


def _describe(name: str, release: IntervalRelease, schema: Schema, codec: Codec | None) -> Json:
    """Return what the card says about a column."""
    design, declared = release.designs[name], schema.columns[name]
    found: Json = {
        "role": "privatised",
        "kind": declared.kind,
        "released_as": list(name_released(name, coverage=release.coverage)),
        "design": design.model_dump(mode="python", exclude_none=True),
        "protected": design.protected,
        "unprotected": design.unprotected,
        "nulls": design.nulls,
        "outside": declared.outside_in_words,
    }
    if declared.bounds is not None:
        found["bounds"] = declared.bounds
    if codec is not None:
        found |= {"numbers": OWN_NUMBERS} | tell_numbers(codec)
        if declared.unit is not None:
            found["bounds"] = codec.bounds
    perturbation, reference = release.perturbations.get(name), design.public_reference
    if isinstance(design, IntervalDifferential) and perturbation is not None:
        found["epsilon"] = design.perturb.epsilon
        found |= {"epsilon_exact": perturbation.epsilon, "ranges_of": "perturbed values"}
    if reference is not None:
        mean = round(_measure(_Measured.of(name, design, release.lattice[name])), 4)
        found |= {"reference": reference.model_dump(mode="python"), "mean_coverage": mean}
        found |= {"leakage": round(1.0 - mean, 4)} if perturbation is None else {}
    return found


def expect_held(name: str, design: Design, codec: Codec) -> float | None:
    """Return the share of the values that a range holds on average; None without a reference."""
    if design.public_reference is None:
        return None
    return _measure(_Measured.of(name, design, is_lattice(codec)))


@freeze_class(kw_only=False)
class _Measured:
    """What the mean coverage of a column is a function of, and the name for its errors."""

    key: str
    lattice: bool
    name: str = field(compare=False)
    design: Design = field(compare=False)

    @classmethod
    def of(cls, name: str, design: Design, lattice: bool) -> _Measured:
        return cls(write_design(design), lattice, name, design)


@lru_cache(maxsize=2048)  # of many columns with few designs, and of a plan and its run
def _measure(asked: _Measured) -> float:
    reference = asked.design.public_reference
    assert reference is not None
    return coverage(tabulate(asked.name, _get_cut(asked.design), asked.lattice), reference)


def _expect_width(name: str, design: Design, codec: Codec) -> str | None:
    """Return how wide a column's ranges will be, in words; None if it has no domain.

    Of a perturbed column, those of the perturbed values.
    """
    ends = find_ends(codec)
    if ends is None or not ends[0] < ends[1]:
        return None
    low, high = ends
    uniform = ScipyDistribution(name="uniform", loc=low, scale=high - low)
    where, lattice = f"column {name!r}", is_lattice(codec)
    even = PublicReference(distribution=uniform.freeze(where), lattice=lattice, where=where)
    lower, upper = quasi_run(tabulate(name, _get_cut(design), lattice).step, even)
    widths = np.clip(upper, low, high) - np.clip(lower, low, high)
    width = float((widths + np.where(lower > upper, high - low, 0.0)).mean())
    micro = microseconds_of(tell_numbers(codec).get("numbers"))
    span = write_digits(width) if micro is None else f"{write_digits(width * micro / _DAY)} days"
    share = _percent(width / (high - low))
    spread = "if values are spread evenly over the domain"
    return f"is {span} wide on average, {share} of the domain, {spread}"


def _percent(share: float) -> str:
    """Return a share in per cent, with two digits of what it lacks of all."""
    digits = 0 if share < 0.99 else 1 - math.floor(math.log10(max(100.0 * (1.0 - share), 1e-4)))
    return f"{100.0 * share:.{digits}f} %"
