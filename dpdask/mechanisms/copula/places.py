"""Where inside their cells the numbers of a record lie: the normal scores of the columns, correlated as the denoised tables say."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import scipy  # its modules are imported when they are first used

from dpdask.archive import check_array, require
from dpdask.arrays import Codes, Flags, Floats, Ints, Uint32s, freeze_class
from dpdask.cells import Cells
from dpdask.kernels import correlation as latent
from dpdask.kernels import normal
from dpdask.kernels import places as kernel
from dpdask.mechanisms.marginals.noise import Denoised, PairGroup
from dpdask.stats import Domain
from dpdask.steps import step
from dpdask.streams import Rng, words

_MOST_PARTNERS = (
    8  # columns that a column's score depends on: those with the strongest correlations
)
_LEAST = 0.05  # a correlation: weaker ones do not matter inside a cell
_MOST = 0.995
_FLOOR = 5e-3  # of the correlations' eigenvalues
_CUTS = 9  # of each column, between which its correlations are found
_RARE = 0.01  # a share that tells too little of a correlation
_TOGETHER = 2**12  # records
_MOST_WEIGHT = 1e3  # of a regression: with eigenvalues above the floor, weights are smaller


@freeze_class(eq=False)
class Places:
    """How the places of a record's numbers in their cells depend on each other.

    Privacy
    -------
    A function of the denoised tables.
    """

    columns: Ints  # the attributes whose values have an order, and that depend on each other
    # Float64 array of shape (2, n_cells): the ends of each cell's normal score, column after column.
    ranges: Floats
    partners: Ints  # of shape (n_columns, n_partners): places in `columns`
    weights: Floats  # of the same shape: the regression of a score on its partners' scores
    deviations: Floats  # of shape (n_columns,): what the regression leaves over

    def check(self, domain: Domain) -> None:
        """Check places from outside: the kernel indexes by their numbers without a check."""
        columns, partners, n = self.columns, self.partners, len(self.columns)
        check_array(columns, np.int64, (n,), 0, domain.n_attributes - 1)
        require(n > 1 and (np.diff(columns) > 0).all(), "ordered columns that do not rise")
        check_array(partners, np.int64, (n, partners.shape[-1]), 0, n - 1)
        n_cells = int(np.array(domain.sizes)[columns].sum())
        check_array(self.ranges, np.float64, (2, n_cells), -kernel.REACH, kernel.REACH)
        require((self.ranges[0] <= self.ranges[1]).all(), "the range of a score is none")
        check_array(self.weights, np.float64, partners.shape, -_MOST_WEIGHT, _MOST_WEIGHT)
        check_array(self.deviations, np.float64, (n,), 1e-3, 1.0)

    def draw(
        self, codes: Codes, domain: Domain, rng: Rng, n_counted: int | None = None
    ) -> dict[str, Uint32s]:
        """Return where in their cells the values of some records lie: of each column, shares of 2**32.

        Parameters
        ----------
        codes
            uint8 or uint16 array of shape (n_attributes, n): a block, because in each cell places
            are spread evenly over it.
        rng
            A stream; the places are a function of it and of the codes.
        n_counted
            How many of the records are spread evenly; the places of further ones are stretched as
            theirs are. All if None.
        """
        own, (lows, highs) = np.take(codes, self.columns, axis=0), self.ranges
        sizes = np.array(domain.sizes, dtype=np.int64)[self.columns]
        found = np.empty(own.shape, dtype=np.uint32)
        for first in range(0, own.shape[1], _TOGETHER):
            part = slice(first, first + _TOGETHER)
            kernel.draw_places(
                np.ascontiguousarray(own[:, part]),
                np.cumsum(sizes) - sizes,
                lows,
                highs,
                self.partners,
                self.weights,
                self.deviations,
                words(rng, own[:, part].shape[1], len(own)),
                found[:, part],
            )
        n_spread = own.shape[1] if n_counted is None else n_counted
        for place, size in enumerate(sizes.tolist()):
            kernel.spread_evenly(own[place], size, found[place], n_spread)
        names = (domain.names[column] for column in self.columns)
        return dict(zip(names, found, strict=True))


@freeze_class(kw_only=False, eq=False)
class _Ordered:
    """A column whose values have an order."""

    order: Ints  # its cells as their values rise; null and atoms are left out
    ranges: Floats  # of shape (2, n_cells): the probabilities between which each cell lies
    has_places: bool  # whether a cell has more than one value

    @property
    def cuts(self) -> Ints:
        """The places in the order behind which the column is cut in two, to find its correlations."""
        shares = self.ranges[1, self.order[:-1]]
        wanted = np.arange(1, _CUTS + 1) / (_CUTS + 1)
        near = np.abs(shares[:, None] - wanted).argmin(axis=0) if len(shares) else []
        cuts = np.unique(np.array(near, dtype=np.int64))
        return cuts[(shares[cuts] > _RARE) & (shares[cuts] < 1.0 - _RARE)]


@step("fitting: places inside cells")
def fit_places(cleaned: Denoised, cells: Mapping[str, Cells]) -> Places | None:
    """Return how places inside cells depend on each other; None if no two numbers do.

    Notes
    -----
    A column's normal score is Φ⁻¹ of its own distribution, so a cell is a range of scores; null and
    atoms are left out, and leave the score open. The
    correlation of two scores is a mean of the tetrachoric correlations at up to 9 x 9 cuts,
    weighted by the squared density there (least squares of the cumulated table, one step). Of
    these, the nearest correlation matrix is taken, and each score is regressed on the at most 8
    with the strongest correlations.

    References
    ----------
    Olsson, Maximum likelihood estimation of the polychoric correlation coefficient (1979), for
    correlations of what lies behind ordered cells; Geweke, Efficient simulation from the
    multivariate normal and Student-t distributions subject to linear constraints (1991), for the
    sweep.
    """
    ordered = {}
    for attribute, (name, counts) in enumerate(
        zip(cleaned.domain.names, cleaned.one_way, strict=True)
    ):
        if not cells[name].codec.has_levels or cells[name].codec.ordered:
            ordered[attribute] = _order(cells[name], counts)
    lines = [attribute for attribute, column in ordered.items() if column.has_places]
    if not lines or len(ordered) < 2:
        return None
    found = _correlate(cleaned, ordered)
    strong = np.abs(found) >= _LEAST
    np.fill_diagonal(strong, False)
    columns = np.array(list(ordered), dtype=np.int64)
    is_line = np.isin(columns, lines)
    kept = np.flatnonzero(strong[:, is_line].any(axis=1))
    if len(kept) < 2:
        return None
    matrix = latent.nearest_correlation(found[np.ix_(kept, kept)], floor=_FLOOR, tolerance=1e-6)
    partners, weights, deviations = _regress(matrix.matrix, strong[np.ix_(kept, kept)])
    shares = np.concatenate([ordered[column].ranges for column in columns[kept]], axis=1)
    scores = scipy.special.ndtri(shares)
    return Places(
        columns=columns[kept],
        ranges=np.clip(scores, -kernel.REACH, kernel.REACH),
        partners=partners,
        weights=weights,
        deviations=deviations,
    )


def _order(column: Cells, counts: Floats) -> _Ordered:
    """Return the cells of a column as their values rise, and their probabilities."""
    codec = column.codec
    n_singles = int(codec.nulls) + len(codec.atoms)  # which need not follow the order of the others
    order = np.arange(n_singles, len(counts))
    masses = counts[order]
    rises = np.cumsum(masses) / max(float(masses.sum()), 1e-300)
    ranges = np.stack([np.zeros(len(counts)), np.ones(len(counts))])  # of null, anywhere
    ranges[1, order] = np.minimum(rises, 1.0)
    ranges[0, order] = np.concatenate([[0.0], ranges[1, order[:-1]]])
    return _Ordered(order, ranges, not codec.has_levels)


def _correlate(cleaned: Denoised, ordered: Mapping[int, _Ordered]) -> Floats:
    """Return the correlations of the columns' normal scores."""
    places = {attribute: place for place, attribute in enumerate(ordered)}
    found = np.eye(len(places))
    for group in cleaned.groups:
        for number in np.flatnonzero(group.dependent).tolist():
            pair = int(group.first[number]), int(group.second[number])
            if pair[0] in places and pair[1] in places:
                if not (ordered[pair[0]].has_places or ordered[pair[1]].has_places):
                    continue
                one, two = (places[attribute] for attribute in pair)
                r = _correlation(group, number, ordered[pair[0]], ordered[pair[1]])
                found[one, two] = found[two, one] = r
    return found


def _correlation(group: PairGroup, number: int, first: _Ordered, second: _Ordered) -> float:
    """Return the correlation of two columns' scores, from their table."""
    table = group.tables[number][np.ix_(first.order, second.order)]
    total, rows, columns = float(table.sum()), first.cuts, second.cuts
    if not (total > 0.0 and len(rows) and len(columns)):
        return 0.0
    below = table.cumsum(axis=0).cumsum(axis=1) / total
    h, k = (
        scipy.special.ndtri(np.clip(side, _RARE / 2, 1.0 - _RARE / 2))
        for side in (below[rows, -1], below[-1, columns])
    )
    # both below their cuts is both above, of the scores with the other sign
    p = below[np.ix_(rows, columns)].ravel()
    x, y = (-side.ravel() for side in np.meshgrid(h, k, indexing="ij"))
    r = np.clip(normal.tetrachoric(x, y, p), -_MOST, _MOST)
    rest = 1.0 - r * r
    density = np.exp(-(x * x + y * y - 2.0 * r * x * y) / (2.0 * rest)) / np.sqrt(rest)
    squares = density * density
    return float((squares * r).sum() / max(float(squares.sum()), 1e-300))


def _regress(matrix: Floats, strong: Flags) -> tuple[Ints, Floats, Floats]:
    """Return the regression of each score on those with the strongest correlations."""
    n, most = len(matrix), min(_MOST_PARTNERS, int(strong.sum(axis=1).max()))
    partners, weights = np.zeros((n, most), dtype=np.int64), np.zeros((n, most))
    deviations = np.ones(n)
    for place in range(n):
        strengths = np.where(strong[place], np.abs(matrix[place]), -1.0)
        own = np.argsort(-strengths, kind="stable")[:most]
        own = own[strengths[own] >= 0.0]
        wanted = matrix[own, place]
        solved = np.linalg.solve(matrix[np.ix_(own, own)], wanted)
        partners[place, : len(own)], weights[place, : len(own)] = own, solved
        deviations[place] = math.sqrt(min(max(1.0 - float(solved @ wanted), 1e-4), 1.0))
    return partners, weights, deviations
