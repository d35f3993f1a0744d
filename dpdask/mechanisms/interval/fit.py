"""From an interval design to what is drawn from: the tables of anchors, designed where a target is given, and the perturbation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dpdask.arrays import Floats
from dpdask.codec import Codec
from dpdask.errors import SpecError
from dpdask.kernels.ranges import LEVELS, TABLE_ERROR, Acceptable, Quantiles
from dpdask.mechanisms.dip.columns import ColumnMechanism, fit_column
from dpdask.mechanisms.interval.design import (
    Canonical,
    CoverageAnchors,
    Design,
    Ensemble,
    IntervalDifferential,
    OptimalAnchors,
    Partitioning,
    Perturb,
    Progressive,
    Ring,
    ScipyDistribution,
    Selective,
)
from dpdask.mechanisms.interval.ranges import (
    Narrowing,
    Partition,
    Perturbation,
    Perturbed,
    PublicReference,
    RangeRandomiser,
    Selection,
    Step,
    Union,
    quasi_run,
    step_coverage,
    table,
)
from dpdask.references import Known

_REACHED = 0.005
_SCALES = (1e-4, 1e6)  # of the reference's own spread
_REMAINDER = 0.05
_FINER = (
    8  # pieces of a table's cell: a functional may weigh the tails far more than the reference does
)
_RUN_ERROR = 0.002  # of a probability that a low-discrepancy run measures

_SLOPES: dict[str, Callable[[Floats], Floats]] = {
    "mean": np.ones_like,
    "second_moment": lambda u: 2.0 * np.abs(u),
    "third_moment": lambda u: 3.0 * u**2,
    "fourth_moment": lambda u: 4.0 * np.abs(u) ** 3,
    "log": lambda u: 1.0 / u,
}


def range_randomiser(
    column: str, design: Design, *, lattice: bool = False, perturbation: Perturbation | None = None
) -> RangeRandomiser:
    """Return the mechanism of one column.

    Parameters
    ----------
    lattice
        Whether its values are whole numbers; anchors are then rounded down, so that a range shows
        how few it holds.
    perturbation
        The local randomiser of an interval-differential design, and of no other.
    """
    where = f"column {column!r}"
    if (perturbation is not None) != isinstance(design, IntervalDifferential):
        mend = "fit its `perturb` to the column's codec first, or use another design"
        what = "an interval-differential design, and no other, needs a fitted perturbation"
        raise SpecError(what, where, mend)
    cut = partial(partition, where=where, lattice=lattice, reference=design.reference)
    step: Step
    if isinstance(design, Progressive):
        step = _narrowing(design, where, lattice)
    elif isinstance(design, Selective):
        step = _selection(design, where, lattice)
    elif isinstance(design, Ensemble):
        step = Union(steps=[cut(part) for part in design.of])
    elif isinstance(design, IntervalDifferential):
        assert perturbation is not None
        step = Perturbed(perturbation=perturbation, step=cut(design.of))
    else:
        step = cut(design)
    return RangeRandomiser(column=column, step=step, nulls=design.nulls == "public")


def fit_perturbation(perturb: Perturb, codec: Codec) -> ColumnMechanism:
    """Return the mechanism that perturbs a column: fitted to its declared distribution, null apart.

    Parameters
    ----------
    codec
        The codec of the column. The domain is the values that are not null, because it is public
        which values are null.
    """
    # only for the fit, which encodes nothing
    present: Codec
    if codec.has_levels:
        present = replace(codec, levels=codec.levels.drop_null(), instead=None)
    else:
        present = replace(codec, nulls=False, outside="refuse")
    known = Known(kind="known", columns={codec.name: perturb.reference})
    return fit_column(present, known.distribution(present), perturb.epsilon, perturb.channel)


def can_inform(mechanism: RangeRandomiser, low: float, high: float) -> bool:
    """Return whether a mechanism's ranges can tell two values apart that lie in [low, high]: an anchor may fall between.

    Where none does, all values have the same range, and nothing of their distribution is
    identified.
    """
    reached = (part.reaches(low, high) for part in mechanism.step.parts)
    return low == high or any(reached)


def partition(
    design: Partitioning, *, where: str, lattice: bool, reference: ScipyDistribution | None = None
) -> Partition:
    """Return the partition of a design that cuts the line once.

    Parameters
    ----------
    reference
        What stands in for a reference that the design leaves out.
    """
    reference, anchors = design.reference or reference, design.anchors
    n, ring = design.n_cuts, isinstance(design, Ring)
    intervals: Sequence[tuple[float, float]] = ()
    exact = np.zeros(n + 1, dtype=np.bool_)
    if isinstance(design, Canonical):
        intervals = design.acceptable
        exact[[k - 1 for k in design.exact_ranges]] = True
    low, high = np.array(intervals, dtype=np.float64).reshape(-1, 2).T.copy()
    acceptable = Acceptable(low, high, exact)
    make = partial(Partition, acceptable=acceptable, ring=ring, lattice=lattice)
    if design.at_least is not None:
        public = _public(reference, where, lattice, continuous=True)
        if lattice:
            what = "whole numbers cannot be cut into ranges of a given least coverage"
            raise SpecError(what, where, "give anchors")
        spacing = min(design.at_least + 2.0 * TABLE_ERROR, 1.0 / design.n_ranges)
        distribution = table(public.distribution, public.where)
        return make(distribution=distribution, centres=np.zeros(n), spacing=spacing)
    if not isinstance(anchors, CoverageAnchors):
        assert anchors is not None
        return make(distribution=_cuts(anchors, reference, where), centres=np.zeros(n))
    least = 1.0 / design.n_ranges
    if not (intervals or exact.any() or least < anchors.coverage):
        raise _unattainable(anchors.coverage, least, 1.0, where)
    public = _public(anchors.reference or reference, where, lattice)
    shares = np.array([0.25, 0.75]) if ring else np.arange(1, n + 1) / (n + 1)
    return _of_coverage(anchors, public, shares, make, where)


def _public(
    reference: ScipyDistribution | None, where: str, lattice: bool, *, continuous: bool = False
) -> PublicReference:
    if reference is None:
        raise SpecError("this design needs a public reference", where, "add `reference: {name: …}`")
    place = f"reference of {where}"
    distribution = reference.freeze(place, discrete=not continuous)
    return PublicReference(distribution=distribution, lattice=lattice, where=place)


def _cuts(
    anchors: ScipyDistribution | OptimalAnchors, reference: ScipyDistribution | None, where: str
) -> Quantiles:
    if isinstance(anchors, ScipyDistribution):
        place = f"anchors of {where}"
        return table(anchors.freeze(place), place)
    public = _public(anchors.reference or reference, where, lattice=False, continuous=True)
    return optimal(public.distribution, anchors.optimal_for, public.where)


def optimal(distribution: Any, functional: str, where: str) -> Quantiles:
    """Return the distribution of the anchor from which E φ(Y) is learnt best when Y follows `distribution`.

    Returns
    -------
    Quantiles
        Between the 2**-54 quantiles of `distribution`; by Simpson's rule between its knots.

    Notes
    -----
    The density is proportional to (F(1 - F))^½ |φ'|. It is taken for integrable if the masses of
    the outer octaves of probability fall off so fast that what lies beyond them is below one part
    in twenty.

    References
    ----------
    Ding and Ding, Interval privacy, Theorem 2.
    """
    x = table(distribution, where, short=False).x
    if functional == "log" and not x[0] > 0:
        what = "the logarithm needs a reference on positive numbers"
        raise SpecError(what, where, "choose another functional or reference")

    def density(u: Floats) -> Floats:
        spread: Floats = np.sqrt(np.asarray(distribution.cdf(u)) * np.asarray(distribution.sf(u)))
        return spread * _SLOPES[functional](u)

    fine = np.interp(np.arange((len(x) - 1) * _FINER + 1) / _FINER, np.arange(len(x)), x)
    with np.errstate(over="ignore", invalid="ignore"):
        first, width = fine[:-1], np.diff(fine)
        inside = 4.0 * density(first + width / 2.0)
        masses = width / 6.0 * (density(first) + inside + density(fine[1:]))
        total, cells = float(masses.sum()), masses.reshape(-1, _FINER).sum(axis=1)
    beyond = _remainder(cells[0], cells[1]) + _remainder(cells[-1], cells[-2])
    if not (math.isfinite(total) and total > 0 and beyond <= _REMAINDER * total):
        what = f"the optimal anchors for {functional} have no density: the reference's tails are too wide"
        raise SpecError(what, where, "choose a lighter reference")
    cumulative = np.concatenate([[0.0], np.cumsum(masses)]) / total
    return Quantiles(np.maximum.accumulate(np.interp(LEVELS, cumulative, fine)), LEVELS)


def _remainder(last: float, before: float) -> float:
    """Return the rest of a geometric series from its last two terms."""
    if last == 0.0:
        return 0.0
    ratio = last / before if before > 0 else math.inf
    return last * ratio / (1.0 - ratio) if ratio < 1.0 else math.inf


def _of_coverage(
    anchors: CoverageAnchors,
    public: PublicReference,
    shares: Floats,
    make: Callable[..., Partition],
    where: str,
) -> Partition:
    """Return the partition whose expected coverage is the target: anchors about the reference's quantiles, spread by bisection.

    As the spread goes to 0 the coverage goes to 1 / n_ranges; as it grows, the anchors leave the
    values and it goes to 1. It is continuous in between (for a continuous reference), so every
    target is met: Theorem 1.
    """
    family = table(anchors.family.freeze(f"anchors of {where}"), f"anchors of {where}")
    middle = np.interp(0.5, family.p, family.x)
    quartiles = np.interp([0.25, 0.75], family.p, family.x)
    spread = public.quantile(np.array([0.25, 0.75]))
    unit = (float(spread[1] - spread[0]) or 1.0) / float(quartiles[1] - quartiles[0])
    # between two values, not on one
    centres = public.quantile(shares) + (0.5 if public.is_discrete else 0.0)

    def scaled(logarithm: float) -> Partition:
        distribution = Quantiles((family.x - middle) * (unit * math.exp(logarithm)), family.p)
        return make(distribution=distribution, centres=centres)

    low, high = math.log(_SCALES[0]), math.log(_SCALES[1])
    least, most = step_coverage(scaled(low), public), step_coverage(scaled(high), public)
    if not least - _REACHED <= anchors.coverage <= most + _REACHED:
        raise _unattainable(anchors.coverage, least, most, where)
    found = scaled(low)
    for _ in range(40):
        centre = (low + high) / 2.0
        found = scaled(centre)
        reached = step_coverage(found, public)
        if abs(reached - anchors.coverage) <= _REACHED / 10.0:
            return found
        low, high = (centre, high) if reached < anchors.coverage else (low, centre)
    if abs(reached - anchors.coverage) > _REACHED:
        what = f"a coverage of {anchors.coverage:g} cannot be reached, because the reference has jumps; {reached:.4g} is near"
        raise SpecError(what, where, "choose a coverage that can be reached")
    return found


def _unattainable(target: float, least: float, most: float, where: str) -> SpecError:
    what = (
        f"anchors of this design reach coverages between {least:.4g} and {most:.4g}, not {target:g}"
    )
    return SpecError(what, where, "choose a coverage in between")


def _narrowing(design: Progressive, where: str, lattice: bool) -> Narrowing:
    public = _public(design.reference, where, lattice)
    if isinstance(design.tau, ScipyDistribution):
        distribution = table(design.tau.freeze(f"tau of {where}"), f"tau of {where}", short=False)
        tau = Quantiles(np.clip(distribution.x, 0.0, 1.0), distribution.p)
    else:
        tau = Quantiles(np.full(2, float(design.tau)), np.array([0.0, 1.0]))
    return Narrowing(
        distribution=_cuts(design.anchors, design.reference, where),
        tau=tau,
        cdf=public.steps(),
        rounds=design.rounds,
        either=design.stop == "either",
        lattice=lattice,
    )


def _selection(design: Selective, where: str, lattice: bool) -> Selection:
    public = _public(design.reference or design.of.reference, where, lattice)
    step = partition(design.of, where=where, lattice=lattice, reference=design.reference)
    selection = Selection(step=step, cdf=public.steps(), tau=design.tau, rho=1.0)
    lower, upper = quasi_run(step, public)
    reach = float(selection.is_wide(lower, upper).mean()) - _RUN_ERROR
    if reach <= 0:
        what = f"no range of this design has a coverage of {design.tau:g}"
        raise SpecError(what, where, "choose a lower tau, or wider ranges")
    if design.rho is not None and design.rho > reach:
        what = f"rho {design.rho:g} is not ignorable: a row without a range would show that its range was narrow"
        mend = f"choose at most {math.floor(reach * 1000) / 1000:g}, the probability of a coverage of {design.tau:g}"
        raise SpecError(what, where, mend)
    return replace(selection, rho=reach if design.rho is None else float(design.rho))
