"""The perturbed histogram: noise in every cell of a joint histogram, cut at a threshold; a weighted sample for any estimator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.cells import Cells
from dpdask.errors import SpecError
from dpdask.kernels.marginals import Codes
from dpdask.mechanisms.histogram.cells import WELL_ABOVE, WholeLine, affordable_bins, centres, largest_noise
from dpdask.mechanisms.histogram.sparse import excess_mean, kept, least_cut, tail, uniform_below
from dpdask.privacy import Budget, noise
from dpdask.privacy.accountant import epsilon, scaled
from dpdask.privacy.events import CentralEvent, Composed, DiscreteGaussian, DiscreteLaplace
from dpdask.stats.joint import JointCounts, codes_of, n_cells
from dpdask.stats.marginals import Domain

Counts = NDArray[np.int64]
Threshold = Literal["none", "positive", "enhanced"]
Path = Literal["auto", "dense", "sparse"]

MAX_DENSE_CELLS = 10_000_000
DENSE_CELLS = 2**20  # up to so many, every cell is drawn; decided by the public number alone
MAX_SPARSE = 50_000_000  # empty cells expected above the threshold
TOTAL_SHARE = 0.01  # log n moves by scale/n: a hundredth of ε is plenty
_SPURIOUS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramPlan:
    """The noise and the threshold, decided before anything is drawn.

    Attributes
    ----------
    cells
        The noise of every cell.
    total
        The noise of the number of rows, which the enhanced threshold needs; None where that number is public or not needed.
    threshold
        `none`: n̂ as it is, negative too (Algorithm 1). `positive`: max(n̂, 0) (Algorithm 1'). `enhanced`:
        n̂·1{n̂ >= A·log n/ε} (section 4.2). If n is private, the `enhanced` threshold is raised where needed, so that noise
        alone lifts only as many empty cells above it as can be held: see `draw`.
    factor
        A; the paper takes 1/2.
    epsilon, rows
        ε of the threshold's formula, and how many rows of one unit are counted, by which it is multiplied as the noise is.

    Privacy
    -------
    Unit and adjacency: the budget's. L1 sensitivity of the histogram: 2 under replace-one (a row leaves one cell for
    another), 1 under add-remove, times `rows`; of the number of rows: 0 and `rows`. Protected: every row counted.
    Thresholds are post-processing.
    """

    cells: CentralEvent
    total: CentralEvent | None
    threshold: Threshold
    factor: float
    epsilon: float
    rows: int

    @property
    def event(self) -> Composed:
        """What will happen."""
        return Composed(events=tuple(event for event in (self.cells, self.total) if event is not None))

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
        return max(1, math.ceil(self.factor * self.rows * math.log(max(2.0, n_rows)) / self.epsilon))


def plan(budget: Budget, *, threshold: Threshold = "enhanced", factor: float = 0.5, law: Literal["laplace", "gaussian"] = "laplace") -> HistogramPlan:
    """Return the noise that spends a budget on one joint histogram.

    Parameters
    ----------
    budget
        ε, δ, adjacency and unit.
    threshold, factor
        As in `HistogramPlan`.
    law
        `gaussian` needs δ > 0. One histogram is better served by `laplace`, which a δ makes no larger.

    Raises
    ------
    SpecError
        If the factor is not positive and finite, or there is no δ for Gaussian noise.
    """
    if not 0 < factor < math.inf:
        raise SpecError("the threshold's factor must be positive and finite", "mechanism.factor", "the paper's is 0.5")
    rows = budget.unit_column.max_rows if budget.unit_column is not None else 1
    replaced = budget.adjacency == "replace-one"
    counted = threshold == "enhanced" and not replaced
    drafts: list[CentralEvent] = []
    if law == "gaussian":
        sensitivity = rows * (math.nextafter(math.sqrt(2.0), 2.0) if replaced else 1.0)
        sigmas = [1.0, 1.0 / math.sqrt(TOTAL_SHARE)][: 1 + counted]
        drafts += [DiscreteGaussian(sigma=sigma, sensitivity=sensitivity, adjacency=budget.adjacency) for sigma in sigmas]
    else:
        # under replace-one, what cells lose and what others gain are two vectors, each with noise of its own: see DiscreteLaplace
        apart = replaced and budget.delta > 0
        sensitivity_, count = (rows, 2) if apart else (rows * (2 if replaced else 1), 1)
        scales = [1.0, 1.0 / TOTAL_SHARE][: 1 + counted]
        drafts += [DiscreteLaplace(scale=scale, sensitivity=sensitivity_, adjacency=budget.adjacency, count=count) for scale in scales]
    found = scaled(drafts, budget.epsilon, budget.delta)
    total = found[1] if counted else None
    return HistogramPlan(cells=found[0], total=total, threshold=threshold, factor=factor, epsilon=budget.epsilon, rows=rows)


def spent(planned: HistogramPlan, budget: Budget) -> float:
    """Return the ε, at the budget's δ, of what is drawn: never above the budget's."""
    return epsilon(planned.event, budget.delta)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PerturbedHistogram:
    """A noisy joint histogram as a weighted sample of its cells; safe to publish.

    Attributes
    ----------
    domain
        The attributes and their numbers of levels.
    plan
        What was drawn.
    n_rows
        The number of rows: exact where it is public (replace-one), the noisy one if it was measured, otherwise None.
    cut
        The least count that was kept; None if all were.
    keys
        int64 array, increasing: the cells whose weight is not 0, as `stats.joint.keys_of` numbers them. All others have
        weight 0.
    weights
        int64 array of that shape: n̂ after the threshold.
    """

    domain: Domain
    plan: HistogramPlan
    n_rows: float | None
    cut: int | None
    keys: Counts
    weights: Counts

    @property
    def total(self) -> int:
        """The sum of the weights."""
        return int(self.weights.sum())

    def codes(self) -> Codes:
        """Return the codes of the cells listed, of shape (n_attributes, n_listed), in the domain's code dtype."""
        return self.codes_at(0, len(self.keys))

    def codes_at(self, start: int, stop: int) -> Codes:
        """Return the codes of some of the cells listed, as `codes` does of all."""
        return codes_of(self.domain, self.keys[start:stop])

    def to_table(self, cells: Mapping[str, Cells], lines: Mapping[str, WholeLine] | None = None) -> pa.Table:
        """Return the cells listed: a column of centres for each attribute, and the int64 column `weight`.

        Parameters
        ----------
        cells
            The cells of each attribute.
        lines
            What made the cells of columns without bounds; see `centres`.

        Raises
        ------
        SpecError
            If an attribute is called `weight`.
        """
        if "weight" in self.domain.names:
            raise SpecError("the name is taken by the cells' weights", "column 'weight'", "rename it, or drop it")
        codes = self.codes()
        values = {name: centres(cells[name], (lines or {}).get(name)) for name in self.domain.names}
        return pa.table({**{name: values[name].take(pa.array(code)) for name, code in zip(values, codes, strict=True)}, "weight": self.weights})

    def sample_codes(self, n: int, *, rng: Generator) -> Codes:
        """Return synthetic rows, independent, each cell with probability proportional to its weight if that is positive.

        Parameters
        ----------
        n
            How many.
        rng
            Any stream: this is post-processing, and needs no secret.

        Returns
        -------
        Codes of shape (n_attributes, n), in the domain's code dtype.

        Raises
        ------
        SpecError
            If no weight is positive.
        """
        self.check_positive()
        cumulative = np.cumsum(np.maximum(self.weights, 0))
        drawn = uniform_below(rng, n, int(cumulative[-1]))
        return codes_of(self.domain, self.keys[np.searchsorted(cumulative, drawn, side="right")])

    @property
    def is_positive(self) -> bool:
        """Whether any weight is positive, so that there is something to sample."""
        return bool((self.weights > 0).any())

    def check_positive(self) -> None:
        """Check that there is something to sample.

        Raises
        ------
        SpecError
            If no weight is positive.
        """
        if not self.is_positive:
            mend = "declare fewer bins, raise epsilon, or take another threshold"
            raise SpecError("no cell has a positive weight: noise and threshold left nothing to sample", "the perturbed histogram", mend)

    def redraw(self, rng: Generator) -> PerturbedHistogram:
        """Return this histogram with the same noise once more, cut at the same threshold: for a parametric bootstrap, free.

        Parameters
        ----------
        rng
            Any stream: this is post-processing, and needs no secret.
        """
        return _perturbed(JointCounts(self.domain, self.keys, self.weights), self.plan, self.n_rows, self.cut, "auto", rng)


def draw(counts: JointCounts, planned: HistogramPlan, *, rng: Generator | None = None, path: Path = "auto") -> PerturbedHistogram:
    """Return the histogram with its noise: on the driver, once, after the ledger was charged.

    Parameters
    ----------
    counts
        Exact.
    planned
        The noise and the threshold.
    rng
        None: secure noise. A stream: INSECURE, for runs marked so; see `privacy.noise`.
    path
        `dense` draws every cell's noise. `sparse` draws the occupied cells' and, of the empty ones, only those that reach
        the threshold: the same law. `auto` takes the first up to 2**20 cells or where there is no threshold.

    Raises
    ------
    SpecError
        As `check_size`, which needs no data: call it first. If the number of rows is private, nothing is refused that
        `check_size` accepts for some number of rows.

    Notes
    -----
    If the number of rows is private, a refusal must not depend on it, and a refusal that depends on the noisy number would
    spend the budget for nothing. So the enhanced threshold is then at least the one that 5·10⁷ empty cells are expected to
    reach: a function of public numbers only, 1 for up to 10⁸ cells.

    Privacy
    -------
    Unit, sensitivity, event: `HistogramPlan`. Protected: every row counted. Neither the path nor anything else in the
    result, its order included, depends on which cells are occupied but through their noisy counts.

    References
    ----------
    Lei, Differentially private M-estimators (2011), Algorithms 1 and 1' and section 4.2; discrete noise in place of
    continuous (MATH section 1).
    """
    n_rows: float | None = None
    if planned.cells.adjacency == "replace-one":
        n_rows = float(counts.n_rows)
    elif planned.total is not None:
        n_rows = float(noise.perturb(np.array([counts.n_rows], dtype=np.int64), planned.total, rng=rng)[0])
    cut = planned.cut(0.0 if n_rows is None else n_rows)
    if cut is not None:
        cut = max(cut, _floor(counts.domain, planned))
    return _perturbed(counts, planned, n_rows, cut, path, rng)


def _floor(domain: Domain, planned: HistogramPlan) -> int:
    """Return the least threshold if the number of rows is private and the threshold depends on it; else 1."""
    if planned.total is None or not isinstance(planned.cells, DiscreteLaplace):
        return 1
    return least_cut(n_cells(domain), planned.cells.scale, MAX_SPARSE)


def check_size(domain: Domain, planned: HistogramPlan, n_rows: float, *, path: Path = "auto") -> None:
    """Check, before any row is read, that the histogram can be drawn.

    Parameters
    ----------
    domain, planned, path
        As in `draw`.
    n_rows
        The number of rows if it is public, for the enhanced threshold; else the largest possible number.

    Raises
    ------
    SpecError
        If every cell must be drawn and there are more than 10⁷; if more than 5·10⁷ empty cells are expected to reach the
        threshold; or if the sparse path is asked for without a threshold or with Gaussian noise.
    """
    _is_sparse(n_cells(domain), planned, planned.cut(n_rows), path)


def _is_sparse(n: int, planned: HistogramPlan, cut: int | None, path: Path) -> bool:
    """Return whether the sparse path is taken, from public numbers alone."""
    where, event = "the joint histogram", planned.cells
    possible = cut is not None and isinstance(event, DiscreteLaplace)
    if path == "sparse" and not possible:
        raise SpecError("only discrete Laplace noise with a threshold has a sparse form", where, "take the threshold enhanced or positive")
    if path == "dense" or not possible or (path == "auto" and n <= DENSE_CELLS):
        if n > MAX_DENSE_CELLS:
            mend = "declare fewer bins, or take Laplace noise with the threshold enhanced, which draws no noise for most empty cells"
            raise SpecError(f"has {n:,} cells, and noise can be drawn for each of {MAX_DENSE_CELLS:,}", where, mend)
        return False
    assert isinstance(event, DiscreteLaplace)
    assert cut is not None
    expected = n * tail(event.scale, cut)
    if expected > MAX_SPARSE:
        what = f"has {n:,} cells, of which noise alone would raise {expected:,.0f} to the threshold; {MAX_SPARSE:,} can be held"
        raise SpecError(what, where, "declare fewer bins, raise the threshold's factor, or raise epsilon")
    return True


def _perturbed(
    counts: JointCounts, planned: HistogramPlan, n_rows: float | None, cut: int | None, path: Path, rng: Generator | None
) -> PerturbedHistogram:
    n = n_cells(counts.domain)
    if _is_sparse(n, planned, cut, path):
        assert isinstance(planned.cells, DiscreteLaplace)
        assert cut is not None
        keys, weights = kept(counts.keys, counts.counts, n, planned.cells.scale, cut, rng=rng)
    else:
        table = np.zeros(n, dtype=np.int64)
        table[counts.keys] = counts.counts
        table = noise.perturb(table, planned.cells, rng=rng)
        keys = np.flatnonzero(table if cut is None else table >= cut).astype(np.int64)
        weights = table[keys]
    return PerturbedHistogram(domain=counts.domain, plan=planned, n_rows=n_rows, cut=cut, keys=keys, weights=weights)


def cautions(domain: Domain, planned: HistogramPlan, n_rows: float, continuous: tuple[str, ...] = ()) -> list[str]:
    """Return what should be said before a budget is spent on this histogram: sentences, none if there is nothing.

    Parameters
    ----------
    domain, planned
        As in `draw`.
    n_rows
        The public number of rows.
    continuous
        The attributes that are cut into bins, for which fewer are proposed.

    References
    ----------
    Lei (2011), section 4.3, on the choice of K.
    """
    n, event = n_cells(domain), planned.cells
    scale = event.scale if isinstance(event, DiscreteLaplace) else None
    largest = _largest(n, event)
    said = []
    if n_rows / n < WELL_ABOVE * largest:
        sentence = (
            f"A cell holds {n_rows / n:,.3g} rows on average, and the largest noise of {n:,} cells is about {largest:,.3g}: few cells stand out"
        )
        if continuous and scale is not None:
            bins = affordable_bins(n_rows, len(continuous), n // math.prod(domain.shape_of(continuous)), scale)
            sentence += f"; {bins} bins for each of {', '.join(continuous)} would do" if bins > 1 else ""
        said.append(sentence + ".")
    cut = planned.cut(n_rows)
    if scale is not None and cut is not None:
        raised = n * tail(scale, cut)
        weight = raised * (cut + excess_mean(scale))
        if weight > _SPURIOUS * n_rows:
            said.append(
                f"Noise alone may raise {raised:,.0f} empty cells to the threshold of {cut:,}, with a weight of {weight:,.0f} beside {n_rows:,.0f} "
                "rows; a larger factor of the threshold, or fewer cells, avoids it."
            )
    return said


def cautions_without_rows(domain: Domain, planned: HistogramPlan) -> list[str]:
    """Return warnings as `cautions` does, if the number of rows is private: they do not depend on it.

    Parameters
    ----------
    domain, planned
        As in `draw`; `check_size` accepts them for some number of rows.
    """
    floor = _floor(domain, planned)
    if floor <= (planned.cut(0.0) or 1):
        return []
    rows = math.exp((floor - 1) * planned.epsilon / (planned.factor * planned.rows))
    sentence = f"With fewer than about {rows:,.0f} rows, the threshold is raised to {floor:,}: otherwise noise alone would lift more empty cells "
    return [
        sentence + f"of {n_cells(domain):,} above it than the limit of {MAX_SPARSE:,}; fewer cells, or a larger factor of the threshold, avoid this."
    ]


def _largest(n: int, event: CentralEvent) -> float:
    return largest_noise(n, event.scale) if isinstance(event, DiscreteLaplace) else event.sigma * math.sqrt(2.0 * math.log(max(2, n)))
