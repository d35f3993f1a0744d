"""Contingency tables of Dask and pandas frames with noise: `fit` counts and draws; the tables are arrays or frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpdask.archive import Archived
from dpdask.estimators.estimator import NoisyCountsEstimator
from dpdask.estimators.release import Release
from dpdask.html.tables import make_html_table
from dpdask.mechanisms.marginals.release import MarginalTables
from dpdask.mechanisms.marginals.spec import MarginalsSpec
from dpdask.stats import Clique


class MarginalsRelease(Release):
    """Noisy tables; made by `Marginals.fit`, or by `load` elsewhere, without the data.

    Privacy
    -------
    Noisy counts: they may be published, and anything computed from them, at no further cost.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> column = {"role": "privatise", "kind": "categorical", "levels": ["a", "b"]}
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": column, "y": column}})
    >>> table = pd.DataFrame({"x": ["a", "b"] * 500, "y": ["a", "b"] * 500})
    >>> release = dpdask.Marginals(schema, epsilon=1.0, cliques=[["x", "y"]]).fit(table)
    >>> release.to_frame(["x", "y"]).shape, release.margin(["x", "y"]) > 0
    ((4, 4), True)
    """

    fitted: MarginalTables

    file: ClassVar[str] = "marginals.npz"
    fitted_type: ClassVar[type[Archived]] = MarginalTables

    def table(self, clique: Sequence[str]) -> NDArray[np.int64]:
        """Return one table as an array with an axis for each column: levels in the schema's order, null first; counts may be negative.

        A single name stands for the table of that column.

        Raises
        ------
        SpecError
            If the table was not released.
        """
        return self.fitted.table(_as_clique(clique))

    def margin(self, clique: Sequence[str]) -> float:
        """Return the margin of error of each count of a table: with probability 0.95, the noise changes the count by at most this."""
        return self.fitted.margin(_as_clique(clique))

    def to_frame(self, clique: Sequence[str]) -> pd.DataFrame:
        """Return one table as a frame: a row for each cell, with its levels, its noisy count and its margin of error."""
        return self.fitted.to_frame(_as_clique(clique))

    def _repr_html_(self) -> str:
        counts = self.fitted.noisy.cliques
        rows = ((" x ".join(clique), f"{counts[clique].size:,}", f"{self.margin(clique):,.0f}") for clique in counts)
        tables = make_html_table("Released tables", ("columns", "cells", "margin of a count (95 %)"), rows)
        return Release._repr_html_(self) + tables  # not `super`, which a class with slots does not find


def _as_clique(clique: Sequence[str]) -> Clique:
    return (clique,) if isinstance(clique, str) else tuple(clique)


@dataclass(frozen=True, slots=True)
class Marginals(NoisyCountsEstimator[MarginalsRelease]):
    """Contingency tables with noise in every cell.

    Parameters
    ----------
    schema
        The declared columns: each is privatised or dropped.
    epsilon
        ε, in (0, 100].
    delta
        δ, in [0, 1): above 0 the noise is Gaussian; at 0 it is Laplace. Take it far below 1 / rows.
    adjacency
        `replace-one`: one row has other values, the number of rows is public. `add-remove`: one row is present or absent
        (its values are then protected by 2·epsilon).
    unit
        What is protected: `row`, or `UnitColumn(column=…, max_rows=…)`.
    cliques
        The tables, each a sequence of columns.
    weights
        Each table's share of the budget, relative to the others; equal if not given.
    bins
        How continuous and mixed columns are cut. `adaptive`: into about 20 cells of equal counts that are found under privacy, in a pass of
        their own. A number: into that many cells of equal width. A mapping: for each column one of these, or a list of the first value of each cell.
    insecure_seed
        For tests: noise from a seed, which protects nobody.

    Raises
    ------
    SpecError
        If a parameter is invalid.

    Privacy
    -------
    Unit: a row, or all rows that share a column's value. Protected: every row. Sensitivity of each table: 1 (add-remove), or
    L2 √2, L1 2 (replace-one), times max_rows. Events: one noisy table for each of `cliques`, composed by the accountant. ε is
    spent again by every new `fit` on the same rows.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> column = {"role": "privatise", "kind": "categorical", "levels": ["a", "b"]}
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": column, "y": column}})
    >>> table = pd.DataFrame({"x": ["a", "b"] * 500, "y": ["a", "b"] * 500})
    >>> release = dpdask.Marginals(schema, epsilon=1.0, cliques=[["x"], ["x", "y"]]).fit(table)
    >>> release.table(["x", "y"]).shape
    (2, 2)
    """

    _: KW_ONLY
    cliques: Sequence[Sequence[str]]
    weights: Sequence[float] | None = None
    bins: Literal["adaptive"] | int | Mapping[str, Literal["adaptive"] | int | Sequence[float]] = "adaptive"

    release_class: ClassVar[type[Release]] = MarginalsRelease

    def _spec(self) -> tuple[type[MarginalsSpec], dict[str, Any]]:
        return MarginalsSpec, {"cliques": self.cliques, "weights": self.weights, "bins": self.bins}
