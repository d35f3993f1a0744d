"""The reference `tree`: conditional tables along a tree of columns, fitted to noisy tables of all rows."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import ClassVar, Literal

from pydantic import Field

from dpdask.cells import Cells
from dpdask.codec import Codec
from dpdask.privacy import UnitColumn
from dpdask.privacy.rounding import round_down
from dpdask.references.bins import Bins, Found, check_bins, cut_with_found
from dpdask.references.reference import ReferenceBase, Structure
from dpdask.schema import Schema


class Tree(ReferenceBase):
    """The tree of the strongest pairwise dependence, with the noisy tables of all rows along it.

    Attributes
    ----------
    share
        The share of a unit's ε for the noisy one- and two-way tables, in (0, 1); they take all of δ too. The rest randomises
        the unit's rows. With a larger share, a release follows the tables more closely, and its own rows less.
    bins
        How continuous and mixed columns are cut. `adaptive`: into about 20 cells of equal counts that are found under privacy, in a pass of
        their own; a released number follows the fine counts in its cell. A number: into that many cells of equal width. A mapping: for each
        column one of these, or a list of the first value of each cell. In a declared cell, a released number is drawn uniformly.

    Privacy
    -------
    Protects the values of all rows, and all rows are released: ε = ε_tables + rows · Σ ε_column. Unit: the budget's.
    Adjacency: replace-one. Events: the tables' noise (discrete Gaussian with a δ, discrete Laplace without), and one
    `LocalRelease`.

    Notes
    -----
    Every pair of columns that the tree joins keeps its fitted table. Other pairs keep at most the dependence that follows
    along the tree.

    Examples
    --------
    >>> import dpdask
    >>> dpdask.Tree(share=0.5).split(1.0)  # ε of the tables, and of a row
    (0.5, 0.5)
    """

    kind: Literal["tree"] = "tree"
    share: float = Field(default=0.6, gt=0, lt=1)
    bins: Bins = "adaptive"

    protected: ClassVar[str] = "the values of all rows"
    unprotected: ClassVar[str] = "none; the reference is a tree of noisy tables of all rows, and their ε and δ are part of the total"
    structure: ClassVar[Structure] = "tree"
    joint: ClassVar[str] = (
        "pairs on the tree, and only these: two columns that the tree joins keep their table, up to its noise; other pairs keep what follows "
        "along the tree, and what only three columns together show is not kept"
    )
    spends_delta: ClassVar[bool] = True

    def check(self, schema: Schema, unit: UnitColumn | None) -> None:
        """Check that the bins name only columns that are cut; see `ReferenceBase.check`."""
        del unit
        check_bins(self.bins, schema, "reference.bins")

    def cells(self, codecs: Mapping[str, Codec], found: Found | None = None) -> dict[str, Cells]:
        """Return the public cells in which columns are counted.

        Parameters
        ----------
        codecs
            The codec of each column.
        found
            The cells that were found; None: as many as may be found.

        Raises
        ------
        SpecError
            If bins name a column that is not cut.
        """
        return cut_with_found(codecs, self.bins, found, "reference.bins")

    def split(self, epsilon: float) -> tuple[float, float]:
        """Return the ε of the tables and of the rows; see `ReferenceBase.split`."""
        tables = round_down(Fraction(epsilon) * Fraction(self.share))
        return tables, round_down(Fraction(epsilon) - Fraction(tables))
