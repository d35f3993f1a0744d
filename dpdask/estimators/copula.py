"""The Gaussian copula of Dask and pandas frames: `fit` is the barrier, `sample` is lazy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import pandas as pd

from dpdask.archive import Archived
from dpdask.estimators.estimator import NoisyCountsEstimator
from dpdask.estimators.release import Release
from dpdask.mechanisms.copula.fit import CopulaOptions, Records
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.mechanisms.copula.spec import CopulaSpec
from dpdask.mechanisms.marginals.noise import NoisyMarginals

DEFAULT_OPTIONS = CopulaOptions()


class CopulaRelease(Release):
    """A fitted copula; made by `GaussianCopula.fit`, or by `load` elsewhere, without the data.

    Privacy
    -------
    A function of the noisy tables: it may be published, and any number of records drawn from it, at no further cost.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> column = {"role": "privatise", "kind": "categorical", "levels": ["a", "b"]}
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": column, "y": column}})
    >>> table = pd.DataFrame({"x": ["a", "b"] * 500, "y": ["a", "b"] * 500})
    >>> release = dpdask.GaussianCopula(schema, epsilon=1.0, delta=1e-9).fit(table)
    >>> release.correlation.shape
    (2, 2)
    """

    fitted: FittedCopula

    file: ClassVar[str] = "copula.npz"
    fitted_type: ClassVar[type[Archived]] = FittedCopula

    @property
    def correlation(self) -> pd.DataFrame:
        """The correlations of the latent variables, float64; each is named (column, level or range)."""
        return self.fitted.correlations()

    @property
    def marginals(self) -> NoisyMarginals:
        """The noisy one- and two-way tables, with their margins of error."""
        return self.fitted.noisy


@dataclass(frozen=True, slots=True)
class GaussianCopula(NoisyCountsEstimator[CopulaRelease]):
    """Differentially private synthetic records with the table's one- and two-way structure.

    Parameters
    ----------
    schema
        The declared columns: each is privatised or dropped.
    epsilon
        ε, in (0, 100].
    delta
        δ, in [0, 1): above 0 the noise is Gaussian, and much smaller; at 0 it is Laplace. Take it far below 1 / rows.
    adjacency
        `replace-one`: one row has other values, the number of rows is public. `add-remove`: one row is present or absent
        (its values are then protected by 2·epsilon).
    unit
        What is protected: `row`, or `UnitColumn(column=…, max_rows=…)`.
    bins
        How continuous and mixed columns are cut. `adaptive`: into about 20 cells of equal counts that are found under privacy, in a pass of
        their own. A number: into that many cells of equal width. A mapping: for each column one of these, or a list of the first value of each cell.
    one_way, two_way
        The share of the budget of each one-way and each two-way table, relative to each other.
    measured_again
        How many pairs are measured a second time, with two fifths of the tables' budget: those with the largest expected gain, which is
        estimated from the first, noisy tables. `auto`: 3 in 10 of the pairs, 1,024 at most; none with fewer than 3 pairs, or without a δ.
    target
        A column to predict from the others. Its pairs are measured again before all others, and every chosen three-way table contains it.
    triples
        The largest number of three-way tables to measure. They are chosen under privacy in a separate pass, and get 15 % of the tables'
        budget; the scores that choose them get 5 %. `auto`: with a `target` and a δ as many as there are columns, otherwise none.
    records
        `raked`: records of the copula are weighted so that they match the denoised two-way tables, and resampled by these
        weights. `copula`: records of the copula as they are, the paper's model.
    options
        Which steps of the fit to switch off, to measure their effect.
    insecure_seed
        For tests: noise from a seed, which protects nobody.

    Raises
    ------
    SpecError
        If a parameter is invalid.

    Privacy
    -------
    Unit: a row, or all rows that share a column's value. Protected: every row. Sensitivity of each table: 1 (add-remove), or
    L2 √2, L1 2 (replace-one), times max_rows. Events, composed by the accountant: one noisy table of each column and of each pair
    of columns, a second one of some pairs, and the scores and noisy tables of triples, if any. Everything after the noise is
    post-processing; any number of records may be drawn. ε is spent again by every new `fit` on the same rows.

    References
    ----------
    Asghar, Ding, Rakotoarivelo, Mrabet and Kaafar, Differentially private release of high-dimensional datasets using the
    Gaussian copula.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> column = {"role": "privatise", "kind": "categorical", "levels": ["a", "b"]}
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": column, "y": column}})
    >>> table = pd.DataFrame({"x": ["a", "b"] * 500, "y": ["a", "b"] * 500})
    >>> copula = dpdask.GaussianCopula(schema, epsilon=1.0, delta=1e-9).fit(table)
    >>> len(copula.sample(2000))
    2000
    """

    _: KW_ONLY
    bins: Literal["adaptive"] | int | Mapping[str, Literal["adaptive"] | int | Sequence[float]] = "adaptive"
    one_way: float = 1.0
    two_way: float = 1.0
    measured_again: Literal["auto"] | int = "auto"
    target: str | None = None
    triples: Literal["auto"] | int = "auto"
    records: Records = "raked"
    options: CopulaOptions = DEFAULT_OPTIONS

    release_class: ClassVar[type[Release]] = CopulaRelease

    def _spec(self) -> tuple[type[CopulaSpec], dict[str, Any]]:
        weights = {"one_way": self.one_way, "two_way": self.two_way}
        return CopulaSpec, {
            "bins": self.bins,
            "weights": weights,
            "measured_again": self.measured_again,
            "target": self.target,
            "triples": self.triples,
            "records": self.records,
            "options": self.options,
        }
