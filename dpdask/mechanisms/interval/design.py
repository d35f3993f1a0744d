"""Interval designs as users write them: how each private value becomes a random range that contains it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    WrapSerializer,
    field_validator,
    model_validator,
)

from dpdask.documents import Document
from dpdask.mechanisms.dip.spec import ChannelKind
from dpdask.privacy.budget import MAX_EPSILON
from dpdask.privacy.events import LocalRelease, round_up_sum
from dpdask.references.sources import PARAMETERS, KnownColumn, freeze


def _as_tuple(value: object) -> object:
    return tuple(_as_tuple(each) for each in value) if isinstance(value, list | tuple) else value


class ScipyDistribution(Document):
    """A distribution of scipy.stats; its parameters stand beside its name: `{name: norm, loc: 0, scale: 2.5}`."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    name: str
    """The name in scipy.stats."""

    @model_validator(mode="after")
    def _numbers(self) -> Self:
        for value in self.parameters.values():
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
            ):
                raise ValueError(PARAMETERS)
        return self

    @property
    def parameters(self) -> dict[str, float]:
        """The parameters by name."""
        return dict(self.model_extra or {})

    def freeze(self, where: str, *, discrete: bool = False) -> Any:
        """Return the scipy distribution with its parameters; see `references.sources.freeze`."""
        return freeze(self.name, self.parameters, where, discrete=discrete)


class OptimalAnchors(Document):
    """Anchors that are best for estimating one linear functional of the values' distribution.

    References
    ----------
    Ding and Ding, Interval privacy, Theorem 2: optimal for one anchor a row.
    """

    optimal_for: Literal["mean", "second_moment", "third_moment", "fourth_moment", "log"]
    """The functional E φ(Y): the mean, a moment about 0, or the mean logarithm of positive values."""
    reference: ScipyDistribution | None = None
    """A public guess at the values' distribution; the design's own if it is left out."""


class CoverageAnchors(Document):
    """Anchors of a family, spread until the expected coverage is the one asked for.

    References
    ----------
    Ding and Ding, Interval privacy, Theorem 1.
    """

    coverage: float = Field(gt=0, lt=1)
    """The target: above 1 / n_ranges (1/2 on a ring) and below 1."""
    family: ScipyDistribution
    """The distribution of each anchor about its centre, up to its scale."""
    reference: ScipyDistribution | None = None
    """A public guess at the values' distribution; the design's own if it is left out."""


def _which(value: Any) -> str:
    """Return which anchors are meant; no tag is a key that may stand in the document, or messages would name it as one."""
    keys = (
        value
        if isinstance(value, Mapping)
        else type(value).model_fields
        if isinstance(value, Document)
        else ()
    )
    return (
        "anchors of a coverage"
        if "coverage" in keys
        else "optimal anchors"
        if "optimal_for" in keys
        else "a distribution"
    )


_ADistribution = Annotated[ScipyDistribution, Tag("a distribution")]
_Optimal = Annotated[OptimalAnchors, Tag("optimal anchors")]
_Covering = Annotated[CoverageAnchors, Tag("anchors of a coverage")]
_ONE_ROUND = "the anchors of a progressive design are a distribution, or `optimal_for` a functional: a coverage cannot be designed for by rounds"
Anchors = Annotated[_ADistribution | _Optimal | _Covering, Discriminator(_which)]
Cuts = Annotated[
    _ADistribution | _Optimal,
    Discriminator(_which, custom_error_type="cuts", custom_error_message=_ONE_ROUND),
]
Interval = tuple[float, float]


class _Column(Document):
    """What every design may say of its column."""

    reference: ScipyDistribution | None = None
    """A public guess at the values' distribution. It never decides whether a range is true, only
    how wide ranges are.
    """
    nulls: Literal["refuse", "public"] = "refuse"
    """`refuse`: a null is an error. `public`: which values are missing is public, and a null is
    released as a null.
    """

    @property
    def public_reference(self) -> ScipyDistribution | None:
        """Its own reference, or that of the design or of the anchors inside; None without one."""
        inside = getattr(self, "of", getattr(self, "anchors", None))
        if isinstance(inside, _Column):
            return self.reference or inside.public_reference
        if isinstance(inside, OptimalAnchors | CoverageAnchors):
            return self.reference or inside.reference
        return self.reference

    @property
    def protected(self) -> str:
        """What it protects, in words."""
        drawn = "the cuts between ranges were drawn at random, without looking at the value"
        return f"where inside its released range a value lies; {drawn}"

    @property
    def unprotected(self) -> str:
        """What it does not protect, in words."""
        nulls = ["which values are missing"] if self.nulls == "public" else []
        return "; ".join([self.always_revealed, *self.revealed, *nulls])

    always_revealed: ClassVar = "that the value lies in its released range"

    @property
    def revealed(self) -> tuple[str, ...]:
        """What it reveals apart from the released range, each thing once."""
        return ()


class _Anchored(_Column):
    """What the designs share that cut the line once."""

    anchors: Anchors | None = None
    """The distribution of the anchors, independent of all values."""
    at_least: float | None = Field(default=None, gt=0, lt=1)
    """Instead of `anchors`: the least coverage of every range, at most 1 / n_ranges; anchors are
    spread evenly over what this leaves of the reference. Beyond the reference's quantiles
    `at_least` and 1 - `at_least` such ranges (but for a ring's) say nothing about the
    distribution: see (6) in the paper.
    """

    @property
    def n_cuts(self) -> int:
        """How many anchors a row has."""
        raise NotImplementedError

    @property
    def n_ranges(self) -> int:
        """Into how many ranges the anchors cut the line."""
        return self.n_cuts + 1

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.anchors is None) == (self.at_least is None):
            raise ValueError("give either `anchors` or `at_least`")
        if self.at_least is not None and self.at_least * self.n_ranges > 1:
            raise ValueError(
                f"{self.n_ranges} ranges cannot all have a coverage of {self.at_least:g}; at_least may be up to 1/{self.n_ranges}"
            )
        return self


class Case1(_Anchored):
    """One anchor U: (-inf, U] or (U, inf)."""

    design: Literal["case1"]

    n_cuts: ClassVar = 1


class Case2(_Anchored):
    """Two anchors U <= V: (-inf, U], (U, V] or (V, inf)."""

    design: Literal["case2"]

    n_cuts: ClassVar = 2


class Ring(_Anchored):
    """Two anchors U <= V whose outer ranges are one: (U, V], or (-inf, U] and (V, inf) together (Example 3)."""

    design: Literal["ring"]

    n_cuts: ClassVar = 2
    n_ranges: ClassVar = 2


class Canonical(_Anchored):
    """Any number of anchors, and an acceptable set inside which the exact value is released (Definition 2)."""

    design: Literal["canonical"]
    n_anchors: int = Field(ge=1, le=16)
    """How many anchors a row has: 1 to 16."""
    acceptable: Annotated[tuple[Interval, ...], BeforeValidator(_as_tuple)] = ()
    """Intervals (low, high], increasing and apart, whose values are released as they are."""
    exact_ranges: Annotated[tuple[int, ...], BeforeValidator(_as_tuple)] = ()
    """Ranges between the anchors, counted from 1 on the left, whose values are released as they
    are.
    """

    @property
    def n_cuts(self) -> int:
        """As declared."""
        return self.n_anchors

    @property
    def revealed(self) -> tuple[str, ...]:
        """The acceptable set's values."""
        exact = (
            "the exact values inside the acceptable set, and of all others that they are not in it"
        )
        return (exact,) if self.acceptable or self.exact_ranges else ()

    @model_validator(mode="after")
    def _a_set(self) -> Self:
        ends = [end for interval in self.acceptable for end in interval]
        if (
            any(math.isnan(end) for end in ends)
            or any(not a < b for a, b in self.acceptable)
            or any(a > b for a, b in pairwise(ends))
        ):
            raise ValueError(
                "each acceptable interval needs a lower end below its upper end; list them in increasing order, without overlaps"
            )
        if len(set(self.exact_ranges)) < len(self.exact_ranges) or any(
            not 1 <= k <= self.n_ranges for k in self.exact_ranges
        ):
            raise ValueError(f"exact_ranges are distinct numbers from 1 to {self.n_ranges}")
        return self


Partitioning = Case1 | Case2 | Canonical | Ring


def check_no_nulls(part: Partitioning) -> Partitioning:
    """Refuse `nulls` in a design inside another one, which alone decides."""
    if "nulls" in part.model_fields_set:
        raise ValueError(
            "a design inside another cannot set `nulls`: move `nulls` to the outer design"
        )
    return part


def _without_nulls(part: Partitioning, plain: SerializerFunctionWrapHandler) -> Any:
    return {key: value for key, value in plain(part).items() if key != "nulls"}


_Inside = AfterValidator(check_no_nulls), WrapSerializer(_without_nulls)


class Progressive(_Column):
    """Rounds of halving by random anchors, until the next range would have a coverage below the row's tau (Example 4)."""

    design: Literal["progressive"]
    anchors: Cuts
    """Their distribution; in each round, restricted to the range so far."""
    rounds: int = Field(default=3, ge=1, le=64)
    """At most how many."""
    tau: Annotated[float, Field(ge=0, le=1)] | ScipyDistribution
    """A number, or the distribution of a person's own tau, clipped to [0, 1]."""
    stop: Literal["either", "own"] = "either"
    """`either`: as soon as either of the two next ranges is too narrow; what is released depends on
    the value through its range alone. `own`: only if the value's own next range is too narrow,
    as published; where a row stops then reveals that its value is more likely near an end of its
    range (Definition 1 does not hold).
    """

    @property
    def revealed(self) -> tuple[str, ...]:
        """What stopping as published tells."""
        stops = "by stopping where its own next range would be too narrow"
        tells = f"{stops}, that a value is likelier near an end of its range"
        return (f"{tells} (interval privacy does not hold)",) if self.stop == "own" else ()


class Selective(_Column):
    """Another design's range, released only if its coverage is at least tau and a coin says so (Definition 5)."""

    design: Literal["selective"]
    of: Annotated[Partitioning, Field(discriminator="design"), *_Inside]
    """The design."""
    tau: float = Field(gt=0, le=1)
    """The least coverage of a released range; other rows have (-inf, inf)."""
    rho: float | None = Field(default=None, gt=0, le=1)
    """The coin's probability: at most Pr(coverage >= tau), so that a row without a range more
    likely than not lost the coin (Proposition 2). Left out: that probability.
    """

    @property
    def revealed(self) -> tuple[str, ...]:
        """What the design reveals, and that a range was not shown."""
        narrow = "of a row released as the whole line, that its range was too narrow"
        chance = "with a probability of at most one half (under the public reference)"
        return (*self.of.revealed, f"{narrow}, {chance}")


class Ensemble(_Column):
    """Several independent designs of one column, released together: their ranges' intersection (Definition 3)."""

    design: Literal["ensemble"]
    of: Annotated[
        tuple[Annotated[Case1 | Case2 | Canonical, Field(discriminator="design"), *_Inside], ...],
        BeforeValidator(_as_tuple),
        Field(min_length=2, max_length=16),
    ]
    """The designs, at least two. Their leakages add at most (Theorem 4)."""

    @property
    def revealed(self) -> tuple[str, ...]:
        """What any of the designs reveals."""
        return tuple(dict.fromkeys(text for part in self.of for text in part.revealed))


class DeclaredReference(KnownColumn):
    """The declared distribution of a column, as the reference `known` takes it: it costs no ε and leaves no row unprotected."""

    kind: Literal["known"]

    @field_validator("kind", mode="before")
    @classmethod
    def _check_declared(cls, kind: object) -> object:
        if kind != "known":
            raise ValueError(
                "the perturbation needs a declared distribution, `known`: other references are computed from rows"
            )
        return kind


class Perturb(Document):
    """Distribution-invariant privatisation of one column."""

    epsilon: float = Field(gt=0, le=MAX_EPSILON, allow_inf_nan=False)
    """Its ε, in (0, 100]; for a continuous or mixed column and a Laplace channel, in [1e-6, 16]."""
    channel: ChannelKind = "laplace"
    """`laplace`: as published. `laplace-calibrated`: the same noise, as small as ε allows.
    `optimal`: the invariant ε-private channel of least expected cost; `optimal-unbiased`, for
    levels: the best of those that allow means without bias.
    """
    reference: DeclaredReference
    """The distribution that is kept: perturbed values follow it where the private ones do."""


class IntervalDifferential(_Column):
    """A perturbation, then the range of its result: true of the perturbed value only (Definition 7)."""

    design: Literal["interval-differential"]
    perturb: Perturb
    """The perturbation, and its ε."""
    of: Annotated[Partitioning, Field(discriminator="design"), *_Inside]
    """The design of the range."""

    @property
    def cut(self) -> Partitioning:
        """The design of the range, with the reference that stands in for its own."""
        reference = self.of.reference or self.reference
        return self.of.model_copy(update={"reference": reference})

    @property
    def protected(self) -> str:
        """What it protects, in words."""
        return "the value, by the ε of its perturbation"

    always_revealed: ClassVar = (
        "what the range says of the perturbed value; its ε bounds what that says of the value"
    )

    @property
    def revealed(self) -> tuple[str, ...]:
        """What the design of the range reveals of perturbed values."""
        return tuple(f"of perturbed values, {text}" for text in self.of.revealed)


Design = Annotated[
    Case1 | Case2 | Canonical | Ring | Progressive | Selective | Ensemble | IntervalDifferential,
    Field(discriminator="design"),
]


def find_perturbed(designs: Mapping[str, Design]) -> dict[str, Perturb]:
    """Return the perturbation of each column that has one."""
    return {
        name: design.perturb
        for name, design in designs.items()
        if isinstance(design, IntervalDifferential)
    }


def make_local_release(designs: Mapping[str, Design]) -> LocalRelease:
    """Return the event of the perturbed columns, at least one: a row's ε is the sum of the columns' ε, rounded up."""
    return LocalRelease(
        epsilon=round_up_sum(perturb.epsilon for perturb in find_perturbed(designs).values())
    )
