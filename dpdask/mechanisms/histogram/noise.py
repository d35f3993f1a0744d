"""The perturbed histogram: noise in every cell of a joint histogram, cut at a threshold; a weighted sample for any estimator."""

from __future__ import annotations

import math
from dataclasses import asdict, field
from decimal import Context, Decimal
from functools import lru_cache
from typing import ClassVar, Literal, Self, get_args

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Archived, Contents, Json, Named, check_array, require
from dpdask.arrays import Codes, Ints, freeze_class
from dpdask.errors import SpecError
from dpdask.mechanisms.marginals.noise import check_n_rows, check_version, share_of_cells
from dpdask.privacy import Budget, noise
from dpdask.privacy.events import (
    Composed,
    DiscreteLaplace,
    central_from_dict,
    scale_events,
    to_dict,
)
from dpdask.references.counts import IN_CELLS, label_table, list_table_counts
from dpdask.stats.marginals import Domain, JointCounts, codes_of, merge_cells, n_cells
from dpdask.streams import Rng, RunKey, stream, words

Counts = Ints

_DIGITS = Context(prec=200)
_FIXED = 384  # bits after the point of the binomial weights, relative to the largest
_FLOOR = 1 << 64  # weights below are left out: at most 2**-300 of them all
_ODDS = 1024
_GROUP = 1000  # cells of one count: fewer are as soon drawn one by one
_MAX_GROUPS = 1000


def compute_tail(scale: float, cut: int) -> float:
    """Return Pr(e >= cut) = α^cut / (1 + α) for discrete Laplace noise, cut at least 1, to double precision."""
    return math.exp(-cut / scale) / (1.0 + math.exp(-1.0 / scale))


def compute_excess_mean(scale: float) -> float:
    """Return E(e - cut | e >= cut) = α / (1 - α), for any cut at least 0."""
    return 1.0 / math.expm1(1.0 / scale)


def draw_kept(
    keys: Counts, counts: Counts, n_cells: int, scale: float, cut: int, *, rng: Rng | None = None
) -> tuple[Counts, Counts]:
    """Return the cells whose noisy count reaches a threshold, and that count.

    Parameters
    ----------
    keys, counts
        int64 arrays of one shape: the occupied cells, increasing, and their counts, at least 1.
    rng
        None: secure noise. A stream: INSECURE, for runs marked so, and to redraw what is already
        released.

    Returns
    -------
    keys, weights
        int64 arrays of one shape; keys increasing, which tells nothing of who was occupied; weights
        at least `cut`.

    Privacy
    -------
    The distribution is that of a histogram with noise in every cell, cut afterwards, so ε is the
    same; unit, adjacency and sensitivity are the caller's event's. The distribution of how many
    cells are raised is held to 2**-256 in total variation, that of which, and of their values,
    exactly, given uniform words. The words are AES-128 in counter mode under a key from the
    operating system, the values OpenDP's. No δ is charged for either, as for none of the package's
    random numbers.

    Notes
    -----
    What holds for empty cells holds for all that have the same count below the threshold, at t less
    that count: they are raised together too, and the time taken is that of what is released. It
    still tells a little of the counts to whoever can watch the run; the noise does not hide that.

    References
    ----------
    Cormode, Procopiuc, Srivastava and Tran, Differentially private summaries for sparse data
    (2012), section 4, with exact draws in place of floating-point ones (Mironov 2012).
    """
    # secure: under a fresh key of the operating system that nobody keeps
    source = stream(RunKey.fresh(), "histogram", "empty cells") if rng is None else rng
    n_empty = n_cells - len(keys)
    ranks = _raise_counts(n_empty, scale, cut, source)
    # the r-th empty cell stands behind all occupied ones that have at most r empty cells before them
    empty = ranks + np.searchsorted(keys - np.arange(len(keys)), ranks, side="right")
    alone = np.ones(len(keys), dtype=np.bool_)
    raised = [np.empty(0, dtype=np.int64)]
    for count in np.flatnonzero(np.bincount(counts[counts < min(cut, _MAX_GROUPS)]) >= _GROUP):
        group = np.flatnonzero(counts == count)
        alone[group] = False
        raised.append(keys[group[_raise_counts(len(group), scale, cut - int(count), source)]])
    noisy = noise.discrete_laplace(counts[alone], scale, rng=rng)
    reach, together = noisy >= cut, np.concatenate(raised)
    place = np.concatenate([together, keys[alone][reach]])
    weight = np.concatenate([cut + _geometric(len(together), scale, rng=rng), noisy[reach]])
    order = np.argsort(place)
    of_empty = cut + _geometric(len(empty), scale, rng=rng)
    return merge_cells(empty, of_empty, place[order], weight[order])


def _raise_counts(n: int, scale: float, least: int, rng: Rng) -> Counts:
    """Return which of n cells have noise of at least `least`, itself at least 1: increasing, int64."""
    return _distinct_below(rng, draw_binomial(n, scale, least, rng=rng), n)


def draw_binomial(n_trials: int, scale: float, cut: int, *, rng: Rng) -> int:
    """Return a draw of Binomial(n_trials, Pr(e >= cut)), by inversion in whole numbers.

    Notes
    -----
    The weights follow from w(k+1) / w(k) = (n-k)/(k+1) · p/(1-p), begun at the mode with 2**384 and
    cut off below 2**64; p/(1-p) = α^t / (1 + α - α^t) is known to 200 digits. Rounding moves each
    weight by less than its distance from the mode, in units of 2**-384 of the largest. About 42
    standard deviations of weights are computed: 0.3 s for a mean of 10⁷.
    """
    odds = _odds(scale, cut)
    if n_trials == 0 or odds < Decimal(2) ** -512:  # then the probability of any is below 2**-449
        return 0
    ratio = int(_DIGITS.multiply(odds, Decimal(1 << _ODDS)))
    mode = (n_trials + 1) * ratio // ((1 << _ODDS) + ratio)
    up: list[int] = [1 << _FIXED]
    down: list[int] = []
    k = mode
    while k < n_trials and up[-1] >= _FLOOR:
        up.append(up[-1] * (n_trials - k) * ratio // ((k + 1) << _ODDS))
        k += 1
    k, weight = mode, up[0]
    while k > 0 and weight >= _FLOOR:
        weight = ((weight * k) << _ODDS) // ((n_trials - k + 1) * ratio)
        down.append(weight)
        k -= 1
    # one of them, with probability proportional to its weight, exactly
    weights = down[::-1] + up
    total = sum(weights)
    n_bits = total.bit_length()
    n_words = n_bits // 64 + 1
    drawn: int = total
    while drawn >= total:
        drawn = int.from_bytes(words(rng, n_words).tobytes(), "little") >> (64 * n_words - n_bits)
    for weight in weights:
        drawn -= weight
        if drawn < 0:
            break
        k += 1
    return k


@lru_cache(maxsize=128)
def _odds(scale: float, cut: int) -> Decimal:
    """Return p / (1 - p) to 200 digits; the float scale is the fraction that it is."""
    exact = Decimal(scale)
    alpha, power = (_DIGITS.exp(_DIGITS.divide(Decimal(-j), exact)) for j in (1, cut))
    return _DIGITS.divide(power, _DIGITS.subtract(_DIGITS.add(Decimal(1), alpha), power))


def draw_uniform_below(rng: Rng, n: int, bound: int) -> Counts:
    """Return n independent whole numbers, exactly uniform on 0..bound-1; bound within 1 to 2**62."""
    shift = np.uint64(64 - max(1, (bound - 1).bit_length()))
    found = np.empty(0, dtype=np.int64)
    while len(found) < n:  # a word is taken with probability above 1/2
        missing = n - len(found)
        drawn = (words(rng, missing + missing // 8 + 16) >> shift).astype(np.int64)
        found = np.concatenate([found, drawn[drawn < bound][:missing]])
    return found


def _distinct_below(rng: Rng, n: int, bound: int) -> Counts:
    """Return n distinct whole numbers below a bound, every set as likely as another: the first n that a uniform sequence shows."""
    found = np.empty(0, dtype=np.int64)
    while len(found) < n:
        found = np.concatenate([found, draw_uniform_below(rng, n - len(found), bound)])
        found.sort(kind="stable")  # quick: all but the end is sorted already
        found = found[np.diff(found, prepend=-1) > 0]
    return found


def _geometric(n: int, scale: float, *, rng: Rng | None) -> Counts:
    """Return n independent numbers k >= 0 with Pr(k) ∝ α^k: discrete Laplace noise folded at -1/2, both halves being geometric."""
    drawn = noise.discrete_laplace(np.zeros(n, dtype=np.int64), scale, rng=rng)
    return drawn ^ (drawn >> 63)


Threshold = Literal["none", "positive", "enhanced"]

MAX_DENSE_CELLS = 10_000_000
DENSE_CELLS = 2**20  # up to so many, every cell is drawn; decided by the public number alone
MAX_SPARSE = 50_000_000  # empty cells expected above the threshold
_EVENTS = ("cells", "fine", "total")
_MAX_TOTAL = 2.0**62  # of the weights: beyond, sums overflow and nothing can be drawn
TOTAL_SHARE = 0.01  # log n moves by scale/n: a hundredth of ε is plenty


@freeze_class
class HistogramPlan:
    """The noise and the threshold, decided before anything is drawn.

    Privacy
    -------
    Unit and adjacency: the budget's. L1 sensitivity of the histogram: 2 under replace-one (a row
    leaves one cell for another), 1 under add-remove, times `rows`; of the number of rows: 0 and
    `rows`. Protected: every row counted. Thresholds are post-processing.
    """

    cells: DiscreteLaplace
    # of the number of rows, which the enhanced threshold needs; None where it is public
    total: DiscreteLaplace | None
    # `none`: n̂ itself, which may be negative (Algorithm 1). `positive`: max(n̂, 0) (Algorithm 1').
    # `enhanced`: n̂·1{n̂ >= A·log n/ε} (section 4.2). If n is private, the `enhanced` threshold is
    # raised where needed, so that noise alone lifts only as many empty cells above it as can be
    # held: see `draw`.
    threshold: Threshold
    factor: float
    epsilon: float  # in the threshold's formula
    rows: int  # of one unit: they multiply the threshold, as they do the noise
    fine: DiscreteLaplace | None = None  # of the fine counts that cells are found from, if they are

    def __post_init__(self) -> None:
        for number in (self.factor, self.epsilon):
            if not isinstance(number, int | float) or not 0 < number < math.inf:
                raise ValueError("the threshold's factor or ε is not positive")
        if self.threshold not in get_args(Threshold) or type(self.rows) is not int or self.rows < 1:
            raise ValueError("no such threshold, or no rows of a unit")

    @property
    def event(self) -> Composed:
        """What will happen."""
        events = (self.fine, self.cells, self.total)
        return Composed(events=tuple(event for event in events if event is not None))

    @property
    def n_rows_private(self) -> bool:
        """Whether neighbouring tables differ by the presence of a row."""
        return self.cells.adjacency == "add-remove"

    def cut(self, n_rows: float) -> int | None:
        """Return the least count that is kept, a whole number at least 1; None if all are.

        Parameters
        ----------
        n_rows
            n of the enhanced threshold: public, or noisy; not looked at for the others.
        """
        if self.threshold == "none":
            return None
        if self.threshold == "positive":
            return 1
        log_n = math.log(max(2.0, n_rows))
        return max(1, math.ceil(self.factor * self.rows * log_n / self.epsilon))


@lru_cache(maxsize=64)
def plan(
    budget: Budget,
    *,
    threshold: Threshold = "enhanced",
    factor: float = 0.5,
    n_found: int = 0,
) -> HistogramPlan:
    """Return the noise that spends a budget on one joint histogram.

    Parameters
    ----------
    n_found
        The number of columns whose cells are found; their fine counts have a tenth of ε.
    """
    rows = budget.rows_per_unit
    replaced = budget.adjacency == "replace-one"
    # if a δ makes it cheaper: what cells lose and what others gain are two vectors, each with noise
    # of its own (see DiscreteLaplace)
    n_vectors, n_changed = (2, 1) if replaced and budget.delta > 0 else (1, 2 if replaced else 1)
    shares = {"cells": (1.0, 1)}
    if threshold == "enhanced" and not replaced:
        shares["total"] = (TOTAL_SHARE, 1)
    if n_found:
        others = sum(share for share, _ in shares.values())
        shares["fine"] = share_of_cells(others, n_found, 0.0)
    drafts = [
        DiscreteLaplace(
            scale=1.0 / share,
            sensitivity=n_changed * rows,
            adjacency=budget.adjacency,
            count=n_vectors * count,
        )
        for share, count in shares.values()
    ]
    scaled = scale_events(drafts, budget.epsilon, budget.delta)
    events: Json = dict(zip(shares, scaled, strict=True))
    return HistogramPlan(
        **{"total": None, **events},
        threshold=threshold,
        factor=factor,
        epsilon=budget.epsilon,
        rows=rows,
    )


@freeze_class(eq=False)
class NoisyHistogram(Archived):
    """A noisy joint histogram as a weighted sample of its cells; safe to publish."""

    archive: ClassVar = Archive(
        kind="noisy-histogram",
        format=4,
        noun="noisy histogram",
        is_compressed=True,
        oldest=3,  # without `every`
    )

    domain: Domain
    plan: HistogramPlan
    n_rows: float | None  # exact where it is public, else as it was measured, if it was
    cut: int | None  # the least count that was kept; None if all were
    keys: Counts  # increasing: the cells whose weight is not 0, as `keys_of` numbers them
    weights: Counts  # of that shape: n̂ after the threshold
    # n̂ of all cells before the threshold, where it was drawn of all and they are few; else empty
    every: Counts = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def event(self) -> Composed:
        """What was drawn."""
        return self.plan.event

    @property
    def total(self) -> int:
        """The sum of the weights."""
        return int(self.weights.sum())

    def list_counts(self) -> tuple[pa.Table, ...]:
        """Return the noisy counts of all cells, those below the threshold too, as `COUNTS` has them; none where not all were drawn.

        Privacy
        -------
        The guarantee is that of noise in every cell; the threshold hides nothing.
        """
        if not len(self.every):
            return ()
        label = label_table(*self.domain.names) + IN_CELLS
        return (list_table_counts(label, self.every, self.plan.cells),)

    def codes_at(self, start: int, stop: int) -> Codes:
        """Return the codes of some of the cells listed, of shape (n_attributes, stop - start), in the domain's code dtype."""
        return codes_of(self.domain, self.keys[start:stop])

    def sample_codes(self, n: int, *, rng: Rng) -> Codes:
        """Return synthetic rows, independent, each cell with probability proportional to its weight if that is positive."""
        self.check_positive()
        cumulative = np.cumsum(np.maximum(self.weights, 0))
        drawn = draw_uniform_below(rng, n, int(cumulative[-1]))
        return codes_of(self.domain, self.keys[np.searchsorted(cumulative, drawn, side="right")])

    @property
    def is_positive(self) -> bool:
        """Whether any weight is positive, so that there is something to sample."""
        return bool((self.weights > 0).any())

    def check_positive(self) -> None:
        """Check that there is something to sample."""
        if not self.is_positive:
            what = "no cell has a positive weight: noise and threshold left nothing to sample"
            hint = "lower `bins`, raise `epsilon`, or take another `threshold`"
            raise SpecError(what, "the perturbed histogram", hint)

    def redraw(self, rng: Rng) -> NoisyHistogram:
        """Return this histogram with the same noise once more, cut at the same threshold: for a parametric bootstrap, free."""
        counts = JointCounts(self.domain, self.keys, self.weights)
        return _perturb(counts, self.plan, self.n_rows, self.cut, rng)

    def check(self, domain: Domain, planned: HistogramPlan) -> None:
        """Check that this is the histogram that a run would draw now, and not one of another version."""
        check_version((self.domain, self.plan) == (domain, planned), "noisy histogram")

    def _contents(self) -> Contents:
        plan_ = asdict(self.plan)
        events = {name: plan_.pop(name) and to_dict(getattr(self.plan, name)) for name in _EVENTS}
        header = {
            "names": self.domain.names,
            "sizes": self.domain.sizes,
            "n_rows": self.n_rows,
            "cut": self.cut,
            "plan": plan_,
            **events,
        }
        return header, {"keys": self.keys, "weights": self.weights, "every": self.every}

    @classmethod
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        events = {
            name: central_from_dict(header[name])
            for name in _EVENTS
            if name == "cells" or header[name] is not None
        }
        laplace = {
            name: event for name, event in events.items() if isinstance(event, DiscreteLaplace)
        }
        require(len(laplace) == len(events), "the noise is not discrete Laplace")
        planned = HistogramPlan(**{"total": None, **laplace, **header["plan"]})
        domain, n_rows, cut = Domain.from_header(header), header["n_rows"], header["cut"]
        keys, weights = arrays["keys"], arrays["weights"]
        if n_rows is not None:
            check_n_rows(n_rows)
        is_least = type(cut) is int and cut >= 1
        is_of_threshold = cut is None if planned.threshold == "none" else is_least
        require(is_of_threshold, "the cut is not the threshold's")
        check_array(keys, np.int64, (len(keys),), 0, n_cells(domain) - 1)
        require((keys[1:] > keys[:-1]).all(), "the cells are not increasing")
        check_array(weights, np.int64, keys.shape, -np.inf if cut is None else cut, np.inf)
        is_held = np.abs(weights.astype(np.float64)).sum() < _MAX_TOTAL
        require(weights.all() and is_held, "weights that are 0, or too large to sample")
        every = arrays["every"] if header["format"] > 3 else np.empty(0, dtype=np.int64)
        size = n_cells(domain) if len(every) else 0
        check_array(every, np.int64, (size,), -np.inf, np.inf)
        is_same = np.array_equal(_keep(every, cut), keys) and np.array_equal(every[keys], weights)
        require(is_same or not size, "the cells are not those whose counts reach the threshold")
        return cls(
            domain=domain,
            plan=planned,
            n_rows=n_rows,
            cut=cut,
            keys=keys,
            weights=weights,
            every=every,
        )


def draw(counts: JointCounts, planned: HistogramPlan, *, rng: Rng | None = None) -> NoisyHistogram:
    """Return the histogram with its noise: on the driver, once, after the ledger has been charged.

    Parameters
    ----------
    rng
        None: secure noise. A stream: INSECURE, for runs marked so; see `privacy.noise`.

    Notes
    -----
    Up to 2**20 cells, or where there is no threshold, every cell's noise is drawn. Otherwise that
    of the occupied cells is drawn and, of the empty ones, only those that reach the threshold: the
    same distribution.

    If the number of rows is private, a refusal must not depend on it, and a refusal that depends on
    the noisy number would spend the budget for nothing. So the enhanced threshold is then at least
    the one that 5·10⁷ empty cells are expected to reach: a function of public numbers only, 1 for
    up to 10⁸ cells.

    Privacy
    -------
    Unit, sensitivity, event: `HistogramPlan`. Protected: every row counted. Neither the path nor
    anything else in the result, its order included, depends on which cells are occupied but through
    their noisy counts.

    References
    ----------
    Lei, Differentially private M-estimators (2011), Algorithms 1 and 1' and section 4.2; discrete
    noise in place of continuous (docs/explanation/math.md, Noise on counts).
    """
    n_rows: float | None = None
    if planned.cells.adjacency == "replace-one":
        n_rows = float(counts.n_rows)
    elif planned.total is not None:
        counted = np.array([counts.n_rows], dtype=np.int64)
        n_rows = float(noise.perturb(counted, planned.total, rng=rng)[0])
    cut = planned.cut(0.0 if n_rows is None else n_rows)
    if cut is not None:
        cut = max(cut, least_threshold(counts.domain, planned))
    return _perturb(counts, planned, n_rows, cut, rng)


def least_threshold(domain: Domain, planned: HistogramPlan) -> int:
    """Return the least threshold if the number of rows is private and the threshold depends on it; else 1."""
    if planned.total is None:
        return 1
    n, scale = n_cells(domain), planned.cells.scale
    cut = math.ceil(scale * (math.log(n / MAX_SPARSE) - math.log1p(math.exp(-1.0 / scale))))
    cut = max(1, cut)
    while n * compute_tail(scale, cut) > MAX_SPARSE:  # correct for rounding
        cut += 1
    return cut


def check_size(domain: Domain, planned: HistogramPlan, n_rows: float) -> None:
    """Check, before any row is read, that the histogram can be drawn.

    Parameters
    ----------
    n_rows
        The number of rows if it is public, for the enhanced threshold; else the largest possible
        number.
    """
    _is_sparse(n_cells(domain), planned, planned.cut(n_rows))


def _is_sparse(n: int, planned: HistogramPlan, cut: int | None) -> bool:
    """Return whether the sparse path is taken, from public numbers alone."""
    where = "the joint histogram"
    if cut is None or n <= DENSE_CELLS:
        if n > MAX_DENSE_CELLS:
            what = f"has {n:,} cells; noise can be drawn for at most {MAX_DENSE_CELLS:,} cells"
            hint = "lower `bins`, or take the `threshold` enhanced, which draws no noise for most"
            raise SpecError(what, where, f"{hint} empty cells")
        return False
    expected = n * compute_tail(planned.cells.scale, cut)
    if expected > MAX_SPARSE:
        what = f"has {n:,} cells, of which noise alone would raise {expected:,.0f} to the threshold; the limit is {MAX_SPARSE:,}"
        raise SpecError(what, where, "lower `bins`, raise `factor`, or raise `epsilon`")
    return True


def _perturb(
    counts: JointCounts,
    planned: HistogramPlan,
    n_rows: float | None,
    cut: int | None,
    rng: Rng | None,
) -> NoisyHistogram:
    n, every = n_cells(counts.domain), np.empty(0, dtype=np.int64)
    if _is_sparse(n, planned, cut):
        assert cut is not None
        keys, weights = draw_kept(counts.keys, counts.counts, n, planned.cells.scale, cut, rng=rng)
    else:
        table = np.zeros(n, dtype=np.int64)
        table[counts.keys] = counts.counts
        table = noise.perturb(table, planned.cells, rng=rng)
        keys = _keep(table, cut)
        weights = table[keys]
        every = table if n <= DENSE_CELLS else every
    return NoisyHistogram(
        domain=counts.domain,
        plan=planned,
        n_rows=n_rows,
        cut=cut,
        keys=keys,
        weights=weights,
        every=every,
    )


def _keep(table: Counts, cut: int | None) -> Counts:
    """Return the cells whose noisy count reaches a threshold, or is not 0 where there is none."""
    return np.flatnonzero(table if cut is None else table >= cut).astype(np.int64)
