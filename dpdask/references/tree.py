"""The reference `tree`: conditional tables along a tree of columns, fitted to noisy tables of all rows."""

from __future__ import annotations

from fractions import Fraction
from typing import ClassVar, Literal

from pydantic import Field

from dpdask.cells import DEFAULT_BINS
from dpdask.documents import Document
from dpdask.privacy.rounding import rounded_down
from dpdask.references.bins import Bins


class Tree(Document):
    """The tree of the strongest pairwise dependence, with the noisy tables of all rows along it.

    Attributes
    ----------
    share
        Of a unit's ε, what the noisy one- and two-way tables take, with all of δ; the rest randomises its rows. In (0, 1).
        A release follows the tables more closely the larger it is, and its own rows less.
    bins
        How continuous and mixed columns are cut: a number of cells of one width, or for each column such a number or the
        first value of each cell. A released number is drawn uniformly in its cell.

    Privacy
    -------
    Protects the values of all rows, and all rows are released: ε = ε_tables + rows · Σ ε_column. Unit: the budget's.
    Adjacency: replace-one. Events: the tables' noise (discrete Gaussian with a δ, discrete Laplace without), and one
    `LocalRelease`.

    Notes
    -----
    What is promised of the joint law: every pair of columns that the tree joins has its fitted table; of other pairs,
    what follows along the tree at most.
    """

    kind: Literal["tree"] = "tree"
    share: float = Field(default=0.6, gt=0, lt=1)
    bins: Bins = DEFAULT_BINS

    protected: ClassVar[str] = "the values of all rows"
    unprotected: ClassVar[str] = "nobody: the reference is a tree of noisy tables of all rows, and their ε and δ are part of the total"
    joint: ClassVar[str] = (
        "pairs on the tree, and only these: two columns that the tree joins keep their table, up to its noise; other pairs keep what follows "
        "along the tree, and what only three columns together show is not kept"
    )

    def split(self, epsilon: float) -> tuple[float, float]:
        """Return what the tables and what the rows may cost; both rounded down, so their sum never passes `epsilon`."""
        tables = rounded_down(Fraction(epsilon) * Fraction(self.share))
        return tables, rounded_down(Fraction(epsilon) - Fraction(tables))
