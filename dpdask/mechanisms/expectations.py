"""What a steward may expect of a release before its budget is spent: how much of a row's values is kept, and how noisy its reference is."""

from __future__ import annotations

import datetime as dt
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from dpdask.archive import Json, Named
from dpdask.arrays import Floats, freeze_class
from dpdask.cells import DEFAULT_BINS, CutColumns, cells
from dpdask.channels import (
    calibrate,
    compute_squared,
    compute_zero_one,
    has_window,
    laplace,
    optimal,
)
from dpdask.codec import Codec, Codecs
from dpdask.errors import DpdaskError, SpecError, list_names, say_count
from dpdask.kernels import rank as rank_kernel
from dpdask.kernels.channel import alias_tables
from dpdask.kernels.window import find_design, keep_at_most
from dpdask.mechanisms.card import say_date, tell_numbers
from dpdask.mechanisms.mechanism import Columns, Mechanism, Sentences
from dpdask.privacy.budget import MAX_EPSILON, UnitColumn, wrap_promise, write_above
from dpdask.privacy.events import (
    FINE,
    CentralEvent,
    DiscreteGaussian,
    DiscreteLaplace,
    Event,
    noises,
    shorten,
    write_digits,
)
from dpdask.privacy.ledger_entries import say_further
from dpdask.privacy.noise import deviation, excess_95, margin_95, perturb
from dpdask.references.counts import label_table
from dpdask.references.hierarchy import Hierarchy, find_bins, make_grid
from dpdask.references.histogram import Bins, Found, NoisyHistograms
from dpdask.references.reference import ColumnCounts, ColumnStatistic
from dpdask.scales import is_span
from dpdask.schema import Schema
from dpdask.stats.statistic import CellCounts
from dpdask.streams import Noise, RunKey, stream, words

LITTLE = 0.1
TAILS = "quantiles can be estimated; under wide bounds, the mean of a heavy tail cannot"

_WIDE = 0.06  # of the bounds
# of the rows: at one value that may be shared, or must be, and at all such values together
_SHARED, _CERTAIN, _MANY_SHARED = (
    0.005,
    0.05,
    0.05,
)
_FAR = 0.01  # of the range of nine tenths of the rows: a gap that matters
_MUCH_NOISE = 0.02  # of the rows: then a count of a twentieth of them is off by two fifths

_N_RANKS = 48  # as the optimal channel cuts ranks
_MOST_LEVELS = 48  # beyond, the program takes longer than a plan should
_RARE = (0.05, 0.01, 0.001)  # shares of rows: of the frequency of very many levels nothing is known
_N_DRAWN = 2**13


def estimate_kept(codec: Codec, epsilon: float, channel: str) -> float | None:
    """Return how much of a column's values a released row keeps, in [0, 1], if all levels or ranks are equally frequent."""
    try:
        if codec.has_levels:
            return (
                1.0
                if codec.n_levels < 2
                else _of_levels(codec.n_levels, epsilon, channel, codec.ordered)
            )
        return (
            _of_levels(_N_RANKS, epsilon, channel, True)
            if channel.startswith("optimal")
            else correlate_ranks(epsilon)
        )
    except (SpecError, ValueError):
        return None


@functools.lru_cache(maxsize=256)
def _of_levels(n_levels: int, epsilon: float, channel: str, ordered: bool) -> float:
    even = np.full(n_levels, 1.0 / n_levels)
    if _may_be_window(n_levels, channel, ordered):
        kept = find_design(even, epsilon).kept
        return (kept - 1.0 / n_levels) / (1.0 - 1.0 / n_levels)
    if channel.startswith("optimal") and n_levels <= _MOST_LEVELS:
        cost = (
            compute_squared(np.arange(n_levels, dtype=np.float64))
            if ordered
            else compute_zero_one(n_levels)
        )
        matrix = optimal(even, epsilon, cost, ordered=ordered).matrix
    else:
        matrix = (laplace if channel == "laplace" else calibrate)(
            even, epsilon, ordered=ordered
        ).matrix
    if not ordered:
        return float((np.trace(matrix) / n_levels - 1.0 / n_levels) / (1.0 - 1.0 / n_levels))
    place = np.arange(n_levels) - (n_levels - 1) / 2.0
    return float(place @ matrix @ place / (place @ place))


def _may_be_window(n_levels: int, channel: str, ordered: bool) -> bool:
    """Return whether a column has the channel of very many levels, as far as the schema tells."""
    cost = "value" if ordered else "zero-one"
    return channel == "optimal" and has_window(n_levels, n_levels, cost)


@functools.lru_cache(maxsize=256)
def correlate_ranks(epsilon: float) -> float:
    """Return the correlation of even ranks with noisy ones, by 8,192 draws from a fixed stream."""
    noise = rank_kernel.rank_noise(epsilon)
    drawn = words(
        stream(RunKey.insecure(0), "expectations/ranks", ""),
        _N_DRAWN,
        rank_kernel.words_per_row(noise),
    )
    ranks = (np.arange(_N_DRAWN) + 0.5) / _N_DRAWN
    draws = rank_kernel.make_draws(noise, alias_tables(noise.weights))
    released = rank_kernel.disturb_rows(ranks, drawn, draws)
    return float(np.corrcoef(ranks, released)[0, 1])


def describe_kept(codecs: Codecs, epsilons: Mapping[str, float], channel: str) -> Sentences:
    """Return, for each column, a sentence on how much of it a released row keeps."""
    found = []
    for name, epsilon in epsilons.items():
        codec = codecs[name]
        if codec.has_levels and _may_be_window(codec.n_levels, channel, codec.ordered):
            most = keep_at_most(np.array(_RARE), epsilon)
            stay = (f"{100 * each:.3g} %" for each in most)
            rare = ", ".join(f"{100 * each:g} %" for each in _RARE)
            found.append(
                f"{name}: of {codec.n_levels:,} levels, one with {rare} of the rows stays in at most {', '.join(stay)} of these rows"
            )
            continue
        kept = estimate_kept(codecs[name], epsilon, channel)
        if kept is not None:
            category = not codecs[name].ordered
            what = (
                "share of a row's values kept beyond chance"
                if category
                else "rank correlation of a released value with its original"
            )
            found.append(f"{name}: {what} about {kept:.2f}")
    return tuple(found)


def warn_of_little(codecs: Codecs, epsilons: Mapping[str, float], channel: str) -> Sentences:
    """Return a warning that names the columns of which a released row keeps almost nothing; none if there are none."""
    little = [
        name
        for name, epsilon in epsilons.items()
        if (kept := estimate_kept(codecs[name], epsilon, channel)) is not None and kept < LITTLE
    ]
    if not little:
        return ()
    what = f"A released row keeps almost nothing of {list_names(little, 5)} (less than {LITTLE:g} on a scale from 0 to 1)"
    return (f"{what}. Privatise fewer columns, spend more ε, or release synthetic records.",)


def warn_of_noisy_references(
    measurements: Mapping[str, DiscreteLaplace], n_rows: int | None
) -> Sentences:
    """Return a warning that names the columns whose distribution is mostly noise; none if there are none, or the rows are not counted."""
    shares = (
        {name: math.sqrt(2.0) * event.scale / n_rows for name, event in measurements.items()}
        if n_rows
        else {}
    )
    noisy = {name: share for name, share in shares.items() if share > _MUCH_NOISE}
    if not noisy:
        return ()
    share = write_digits(100 * max(noisy.values()))
    what = f"The noise of a count is at least {share} % of the rows that are counted for the reference of {list_names(list(noisy), 5)}"
    return (
        f"{what}: the distribution will not be kept. Privatise fewer columns, spend more ε, or raise `reference.share`.",
    )


def describe_needed_rows(
    measurements: Mapping[str, DiscreteLaplace], unit: UnitColumn
) -> Sentences:
    """Return how many rows of a table with a unit must be counted for `warn_of_noisy_references` to be silent.

    How many rows the bound on a unit's rows leaves is not known before they are counted.
    """
    if not measurements:
        return ()
    noise = max(math.sqrt(2.0) * event.scale for event in measurements.values())
    n_rows = write_digits(noise / _MUCH_NOISE)
    left = f"at most {unit.max_rows:,} rows of each {unit.column!r} are counted"
    return (f"{left}; with fewer than about {n_rows} of them, the distribution will not be kept",)


def describe_wide_cells(columns: CutColumns, bins: Bins) -> Sentences:
    """Return a sentence that names the columns with few cells of equal width; none if there are none."""
    wide = {}
    for name, column in columns.items():
        declared = bins.get(name) if isinstance(bins, Mapping) else bins
        if isinstance(declared, int) and not column.codec.has_levels:
            width, single = float(np.diff(column.edges).max()), float(column.codec.lattice)
            share = width / float(np.ptp(column.edges))
            if width > single and share > _WIDE:
                wide[name] = share
    if not wide:
        return ()
    what = (
        f"{list_names(list(wide), 5)}: cells are up to {write_digits(100 * max(wide.values()))} % of the bounds wide, "
        "and values inside a cell are not told apart"
    )
    return (f"{what}; `bins: adaptive` finds cells where the rows are",)


def describe_spread(codecs: Codecs) -> Sentences:
    """Return what becomes of rows that share a number, where the reference is made of rows; nothing if no column holds numbers without levels."""
    names = [name for name, codec in codecs.items() if not codec.has_levels]
    return (
        (
            f"{list_names(names, 5)}: rows that share a value are released over the gap below it, unless it is one of the `atoms`",
        )
        if names
        else ()
    )


def warn_of_spread(
    name: str, keys: Floats, lows: Floats, weights: Floats, *, lattice: bool
) -> Sentences:
    """Return a warning if many rows of the reference share a few values far from the next smaller one: such values come out spread over that gap.

    Parameters
    ----------
    keys, lows
        float64 arrays of one length, keys increasing: rows at a key come out in (low, key], or at
        the key where both are equal. -inf is null.
    weights
        float64 array: how many rows of the reference lie at each key.
    """
    here = np.isfinite(keys) & (weights > 0.0)
    keys, lows, weights = keys[here], lows[here], weights[here]
    if not len(keys):
        return ()
    shares = weights / weights.sum()
    ends = keys[np.minimum(np.searchsorted(np.cumsum(shares), [0.05, 0.95]), len(keys) - 1)]
    gaps = keys - lows
    # of few rows, each has a large share
    shared = (shares >= _CERTAIN) | (shares >= max(_SHARED, 10.0 * shares.min()))
    wide = shared & (gaps > max(_FAR * (ends[1] - ends[0]), 1.0 if lattice else 0.0))
    if shares[wide].sum() < _MANY_SHARED:
        return ()
    what = "many rows of the reference share values, which are released spread over the gaps below them"
    return (
        f"column {name!r}: {what}: means, quantiles and counts are off; name such values as `atoms` of a `mixed` column, or declare levels",
    )


@freeze_class
class CellSearch:
    """Fine counts of the columns whose cells are found, and what they decide.

    Privacy
    -------
    Unit, adjacency and sensitivity: those of the event. A row is in one count of each level of each
    column. Protected: every row counted. The cells are post-processing of the noisy counts.
    """

    names: tuple[str, ...]
    event: CentralEvent  # the noise: one vector for each level of each column
    n_rows_public: bool  # whether neighbours have the same number of rows
    # Into how many cells of equal counts each column is cut; a fine cell with many rows is a cell
    # of its own.
    n_bins: int = DEFAULT_BINS
    # Whether so many rows allow these cells: then the most are taken that they allow, up to
    # `n_bins`, and at least one. None: they allow any.
    affords: Callable[[Columns, Found, float], bool] | None = None

    @property
    def stage(self) -> str:
        """What the first round does, in words."""
        names = list_names(self.names, 8)
        cut = f"cut each into about {self.n_bins} cells of equal counts" + (
            "" if self.affords is None else ", or fewer if the rows are too few"
        )
        return f"search: read all privatised columns once; count {names} in fine cells, add noise, {cut}"

    @property
    def expectations(self) -> Sentences:
        """What the noise of the fine counts allows, in sentences."""
        return (f"{list_names(self.names, 8)}: {TAILS}",)

    def statistic(self, columns: Columns) -> ColumnStatistic:
        """Return what is counted: every column, since all rows are checked before the first noise."""
        cut = {name: codec for name, codec in columns.codecs.items() if not codec.has_levels}
        return ColumnStatistic(
            codecs=columns.codecs,
            cells={
                name: make_grid(codec) if name in self.names else cells(codec, 1)
                for name, codec in cut.items()
            },
        )

    def draw(self, counts: ColumnCounts, columns: Columns, noise: Noise) -> NoisyHistograms:
        """Draw the noise of the fine counts."""
        drawn, n_rows = {}, 0
        for name in self.names:
            counted = counts.columns[name]
            assert isinstance(counted, CellCounts)
            n_rows, exact = (
                counted.n_rows,
                Hierarchy(make_grid(columns.codecs[name])).count(counted),
            )
            drawn[name] = perturb(exact, self.event, rng=noise(f"cells/{name}"))
        return NoisyHistograms(
            counts=drawn,
            events=dict.fromkeys(self.names, self.event),
            n_rows=n_rows if self.n_rows_public else None,
        )

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyHistograms:
        """Return the noisy fine counts that an earlier driver kept."""
        found = NoisyHistograms.from_bytes(data, "the run's fine counts")
        found.check(
            dict.fromkeys(self.names, self.event),
            {name: Hierarchy(make_grid(columns.codecs[name])).size for name in self.names},
        )
        return found

    def list_counts(self, drawn: NoisyHistograms, columns: Columns) -> Iterable[pa.Table]:
        """Return the noisy fine counts as they are published."""
        return [
            Hierarchy(make_grid(columns.codecs[name])).list_counts(
                label_table(name), counts, self.event
            )
            for name, counts in drawn.counts.items()
        ]

    def find(self, drawn: NoisyHistograms, columns: Columns) -> Found:
        """Return the cells of each column."""
        grids = {name: make_grid(columns.codecs[name]) for name in self.names}
        counts = {
            name: Hierarchy(grid).estimate(drawn.counts[name], self.event, drawn.n_rows)
            for name, grid in grids.items()
        }

        noise, tails = deviation(self.event), self.affords is not None

        def cut(n_bins: int) -> Found:
            return {
                name: find_bins(grid, counts[name], n_bins, noise, tails=tails)
                for name, grid in grids.items()
            }

        if self.affords is None:
            return cut(self.n_bins)
        n_rows = sum(float(each.sum()) for each in counts.values()) / len(counts)
        low, high = 1, self.n_bins + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self.affords(columns, cut(middle), n_rows) else (low, middle)
            )
        return cut(low)


@freeze_class
class Planned:
    """What the plans of a job and of a fit have in common."""

    guarantee: str  # who is protected by what, and who is not
    stages: Sentences  # in order, in words
    # What each privatised column of one released row may cost; empty if no row is released.
    epsilons: Mapping[str, float]
    reference_epsilons: Mapping[str, float]  # what each noisy histogram costs, if there are any
    warnings: Sentences  # what to consider before the run
    expectations: Sentences  # how much a released row keeps, or how large noise is
    # The dataset's ε spent before and after the run, its limit, whether the run fits, and the share
    # of the rows that have no ε in some run, before and after this one; None without a ledger.
    ledger: Named | None
    # The central noise: `on` how many vectors of counts, its `sigma` and `margin_95` (what it exceeds
    # with a probability of at most 5 %) in counts, and its `kind`.
    noise: tuple[Named, ...]
    # About how long each stage takes, from bytes and usual rates; empty if that is not known.
    seconds: tuple[float, ...] = ()
    # The error that it would end with, as far as no row and no worker tells it; None if it would
    # go on. As JSON, its exit code and why.
    refusal: DpdaskError | None = None


def describe_steps(planned: Planned) -> list[str]:
    """Return lines on what is done, about how long it takes, and what it costs."""
    names, _, texts = zip(*(stage.partition(": ") for stage in planned.stages), strict=True)
    times = [describe_seconds(each) for each in planned.seconds] or [""] * len(names)
    head = ("stage", "about" if planned.seconds else "", "what is done")
    of_rows, of_counts = planned.epsilons, planned.reference_epsilons
    costs = [
        (name, *(f"{of[name]:.6g}" if name in of else "" for of in (of_rows, of_counts)))
        for name in dict.fromkeys((*of_rows, *of_counts))
    ]
    noise = [(each["on"], f"{each['sigma']:.3g}", each["kind"]) for each in planned.noise]
    return [
        *_tabulate([head, *zip(names, times, texts, strict=True)]),
        *_tabulate([("column", "ε of a row", "ε of its counts"), *costs] if costs else []),
        *_tabulate([("noise on", "σ", "drawn as"), *noise] if noise else []),
        *(describe_ledger(planned.ledger) if costs or noise else []),
    ]


_LEAST_EPSILON, _PRECISE = 1e-4, 1.01  # how near the least ε is searched for
_AIM, _MOST_AIMED = 0.003, 8  # beyond, the bracket is halved
# standard deviations that normal and Laplace noise exceed with a probability of 5 %
_NORMAL_95, _LAPLACE_95 = 1.959963984540054, math.log(20.0) / math.sqrt(2.0)
Exceed = Callable[[Mechanism], float]


def find_least_epsilon(mechanism: Mechanism, exceed: Exceed, where: str) -> float:
    """Return the least ε, up to 1 %, at which a mechanism's noise is as narrow as is asked for.

    Parameters
    ----------
    exceed
        Returns how many times as wide as it may be the noise of the mechanism at some ε is, or how
        many times as much of a value as is kept is asked for.
    where
        What asks for it, for messages.

    Notes
    -----
    The noise is planned anew for each ε that is tried, and falls as ε rises.
    """
    budget = mechanism.budget
    assert budget is not None
    low, high, epsilon = _LEAST_EPSILON, math.inf, budget.epsilon
    slope, tried = -1.0, list[tuple[float, float]]()  # noise falls about as 1 / ε
    while high > _PRECISE * low:
        excess = exceed(replace(mechanism, budget=budget.model_copy(update={"epsilon": epsilon})))
        if excess > 1.0 and epsilon >= MAX_EPSILON:
            what = f"even ε = {MAX_EPSILON:g} does not meet it"
            raise SpecError(what, where, "count fewer tables, or ask for less")
        low, high = (low, min(high, epsilon)) if excess <= 1.0 else (max(low, epsilon), high)
        place, value = math.log(epsilon), math.log(excess)
        if tried:
            slope = min(-0.1, (value - tried[-1][1]) / (place - tried[-1][0]))
        tried.append((place, value))
        # aim a little above the least ε, then a little below it
        aim = -_AIM if excess > 1.0 else _AIM
        epsilon = min(math.exp(min(place + (aim - value) / slope, 99.0)), MAX_EPSILON)
        if not low < epsilon < high or len(tried) > _MOST_AIMED:
            epsilon = math.sqrt(low * high) if high < math.inf else MAX_EPSILON
    return min(float(write_above(high, 4)), MAX_EPSILON)


def check_counted(mechanism: Mechanism, where: str) -> None:
    """Refuse a mechanism that publishes no counts."""
    if not mechanism.counted:
        what = "it publishes no counts whose error is that of their noise alone"
        hint = "take the mechanism copula, marginals, or a histogram without a threshold"
        raise SpecError(what, where, hint)


def exceed_kept(mechanism: Mechanism, column: str, codec: Codec, kept: float) -> float:
    """Return how many times as much of a column's values is asked for as a released row keeps, if all levels or ranks are equally frequent; at most 10⁶."""
    found = estimate_kept(codec, mechanism.spending.row[column], mechanism.spec.channel)
    assert found is not None
    return min(kept / max(found, 1e-9), 1e6)


def exceed_counts(mechanism: Mechanism, most: float) -> float:
    """Return how many times as wide the widest noise of a published count is as noise that exceeds so many rows with a probability of 5 %."""
    return max(excess_95(event, math.floor(most * n)) for event, n in mechanism.counted)


def exceed_mean(
    mechanism: Mechanism,
    column: str,
    columns: Columns,
    *,
    numbers: Floats,
    n_rows: int,
    margin: float,
) -> float:
    """Return how many times a margin what noise adds to the mean of a column with levels is, except with a probability of at most 5 %.

    Parameters
    ----------
    numbers
        float64 array: the levels.

    Notes
    -----
    Noise of the variance s² adds √(Σ (v - c)²) s / n to the mean of the levels v. If the counts are
    made to sum to the public number of rows n, c is the mean of the levels; else it is the mean
    itself, and at worst the level that is farthest from the others. The noise is normal, but a sum
    of few Laplace terms has up to 8 % longer tails at 5 %. Half a count is for whole numbers.
    """
    counted = mechanism.find_counted(column, columns)
    assert counted is not None
    event, n_summed = counted
    centres = [numbers.mean()] if mechanism.fits_rows else [numbers.min(), numbers.max()]
    beyond = _NORMAL_95 if isinstance(event, DiscreteGaussian) else _LAPLACE_95
    wide = beyond * deviation(event) * math.sqrt(n_summed)
    found = max(
        wide * float(np.linalg.norm(numbers - centre)) + float(np.abs(numbers - centre).max()) / 2
        for centre in centres
    )
    return found / (n_rows * margin)


def list_noise(event: Event) -> tuple[Json, ...]:
    """Return the central noise of an event: on how many vectors of counts it is added, its σ and what it exceeds with 5 % probability, in counts, and its kind."""
    found: Counter[tuple[float, float, str]] = Counter()
    for each in noises(event):
        kind = "discrete Gaussian" if isinstance(each, DiscreteGaussian) else "discrete Laplace"
        whole = each.sensitivity if each.sensitivity >= FINE else 1.0
        kind += f", in parts of 1/{whole:,.0f}" if whole > 1.0 else ""
        found[deviation(each) / whole, margin_95(each) / whole, kind] += each.count
    return tuple(
        {
            "on": f"{n:,} vector{'' if n == 1 else 's'} of counts",
            "sigma": sigma,
            "margin_95": margin,
            "kind": kind,
        }
        for (sigma, margin, kind), n in found.items()
    )


def tell_date_bounds(codecs: Codecs) -> dict[str, tuple[str, str]]:
    """Return the bounds of each column of dates, times or durations, as such."""
    found = {}
    for name, codec in codecs.items():
        numbers = tell_numbers(codec).get("numbers")
        if numbers is not None and not codec.has_levels and codec.bounds is not None:
            low, high = (say_date(bound, numbers) or f"{bound:g}" for bound in codec.bounds)
            if is_span(codec.type):
                none = np.zeros(2, dtype=np.bool_)
                low, high = map(str, codec.decode(np.array(codec.bounds), none).to_pylist())
            found[name] = (low, high)
    return found


def warn_of_number_bounds(schema: Schema, codecs: Codecs) -> Sentences:
    """Return a warning for each column of dates, times or durations whose bounds are declared by numbers: it says which they are."""
    warnings = []
    for name, (low, high) in tell_date_bounds(codecs).items():
        declared = schema.columns[name].bounds
        if declared is not None and not isinstance(declared[0], dt.date):
            counts = tell_numbers(codecs[name])["numbers"]
            what = f"its bounds {declared[0]:.17g} and {declared[1]:.17g} count {counts}, so they are {low} and {high}"
            hint = "write dates, such as 2000-01-31, if others are meant"
            if is_span(codecs[name].type):
                hint = "change them if others are meant"
            warnings.append(f"column {name!r}: {what}; {hint}")
    return tuple(warnings)


def describe_seconds(seconds: float) -> str:
    """Return a rough duration in words: `3 s`, `5 min` or `2 h`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{round(seconds / 3600)} h"


def _tabulate(rows: list[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with columns of equal width; the first is as wide as the labels of other lines."""
    widths = [max([9 * (place == 0), *(len(row[place]) for row in rows)]) for place in range(2)]
    return [
        "  "
        + "  ".join(
            filter(None, (row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2]))
        ).rstrip()
        for row in rows
    ]


def describe_ledger(ledger: Named | None) -> list[str]:
    """Return lines on what a ledger counts before and after the run."""
    if ledger is None:
        return [
            "  ledger    none, so nothing keeps count of what this release and others of the table cost together"
        ]
    before, after = (
        shorten(ledger[key], up=True) if ledger[key] < math.inf else "no ε is enough for its δ"
        for key in ("before", "after")
    )
    spent = f"  ledger    ε {before} of {ledger['limit']!r} spent by {say_count(ledger['runs'], 'run')}; {after} after this run"
    if ledger["further"] is not None and ledger["fits"]:
        spent += f", and then room for {say_further(ledger['further'])} more like it"
    return [
        spent,
        *([f"  coverage  after this run, {ledger['coverage']}"] if ledger["coverage"] else []),
    ]


def describe_warnings(planned: Planned) -> list[str]:
    """Return lines on what to consider."""
    return [f"  WARNING   {warning}" for warning in planned.warnings]


def describe_promise(planned: Planned) -> list[str]:
    """Return lines on what is promised, what to expect, and why it will be refused."""
    return [
        *wrap_promise(planned.guarantee),
        *(f"  expect    {sentence}" for sentence in planned.expectations),
        *([f"  REFUSED   {planned.refusal.what}"] if planned.refusal else []),
    ]
