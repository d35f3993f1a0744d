"""Opened releases of randomised rows: estimates that the public noise is taken out of, and averages that the noise leaves as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from dpdask.analysis.kept import KeptColumns
from dpdask.analysis.opened import check_probability
from dpdask.analysis.points import Points
from dpdask.analysis.result import Result
from dpdask.analysis.weighted import OpenedPoints, check_features
from dpdask.errors import SpecError
from dpdask.inference import Estimate, ReleasedColumn
from dpdask.inference.tallies import Frame, Outcomes, outcome_counts

_IN_MEMORY = 5_000_000  # rows; more are counted by Dask
_MOST_PAIRS = 1_024
_KEPT_DISTRIBUTION = "its noise has no channel on its values, so only its own distribution is kept: dependence on other columns is weakened by it"
_REFERENCE = "the released values have the distribution of the reference; its draw from the table is in the standard error"
_NOISY_REFERENCE = "the reference is noisy counts of the table; what their noise changes is not in the standard error, and is large for few rows"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedRows(KeptColumns):
    """Rows whose private values were randomised by public channels.

    Estimates of a column of levels are corrected for its channel (`dpdask.inference.ReleasedColumn`). Other private columns keep their
    distribution, so their own means, quantiles and histograms are those of the released values.
    """

    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {
        "mean": ("both columns have noise of their own", "use crosstab(), or group by a column that was kept"),
        "share": ("is a column of numbers", "use histogram() or quantile()"),
        "histogram": ("its noise is a channel on levels", "use share()"),
        "quantile": ("its noise is a channel on levels", "use share(), whose running sum gives quantiles"),
        "crosstab": (_KEPT_DISTRIBUTION, "declare levels in the schema, or release with a reference `chain` or the mechanism `copula`"),
        "slope": ("a slope takes one private column, which has levels, and otherwise kept columns", "use crosstab(), or the mechanism `copula`"),
        "npmle": ("the release holds values, not ranges", "use share() or histogram()"),
        "regress": ("the release holds values, not ranges", "use slope()"),
        "fit": ("the release holds rows, not weighted cells", "use slope(), or the mechanism `histogram`"),
    }

    def mean(self, column: str, *, by: str | None = None, values: Sequence[float] | None = None) -> Result:
        """Return the mean of a column; see `OpenedRelease.mean`."""
        names = [column] if by is None else [column, by]
        released = self._channel(column)
        if released is None and (by is None or self._is_joint(*names)):
            return super(OpenedRows, self).mean(column, by=by, values=values)
        if released is None:
            raise SpecError(_KEPT_DISTRIBUTION, f"mean({column}, by={by})", self.refusals["crosstab"][1])
        if by is None:
            return self._result(released.mean(self._rows(released.outcomes.columns), values))
        if not self._is_kept(by):
            self._refuse("mean", *names)
        return self._result(released.group_means(self._rows([*released.outcomes.columns, by]), by, values))

    def share(self, column: str) -> Result:
        """Return the share of each level of a column, a Series."""
        released = self._channel(column)
        if released is not None:
            return self._result(released.distribution(self._rows(released.outcomes.columns)))
        if self._levels(column) is None and not self._is_kept(column):
            self._refuse("share", column)
        return super(OpenedRows, self).share(column)

    def histogram(self, column: str, bins: int | Sequence[float] = 20) -> Result:
        """Return how many rows lie in each range of a column of numbers; see `OpenedRelease.histogram`."""
        if self._channel(column) is not None:
            self._refuse("histogram", column)
        return super(OpenedRows, self).histogram(column, bins)

    def quantile(self, column: str, q: float = 0.5) -> Result:
        """Return a quantile of a column of numbers; see `OpenedRelease.quantile`."""
        check_probability(q)
        if self._channel(column) is not None:
            self._refuse("quantile", column)
        return super(OpenedRows, self).quantile(column, q)

    def crosstab(self, first: str, second: str) -> Result:
        """Return how many rows have each pair of levels; see `OpenedRelease.crosstab`."""
        if self._is_joint(first, second):
            return super(OpenedRows, self).crosstab(first, second)
        one, two = self._channel(first), self._channel(second)
        if self._is_kept(first) and two is not None:
            return self._result(two.crosstab(self._rows([first, *two.outcomes.columns]), first))
        if self._is_kept(second) and one is not None:
            found = self._result(one.crosstab(self._rows([second, *one.outcomes.columns]), second))
            parts = (found.estimate, found.standard_error, found.bias_bound)
            estimate, error, bias = (part.T if isinstance(part, pd.DataFrame) else part for part in parts)
            return replace(found, estimate=estimate, standard_error=error, bias_bound=bias)
        if one is None or two is None or one.parent is not None or two.parent is not None:
            self._refuse("crosstab", first, second)
        return self._crosstab_private(one, two)

    def slope(self, response: str, *features: str) -> Result:
        """Return the slopes of a linear regression; see `OpenedRelease.slope`."""
        check_features("slope", response, features)
        if self._is_joint(response, *features):
            return super(OpenedRows, self).slope(response, *features)
        private = [name for name in (response, *features) if not self._is_kept(name)]
        released = self._channel(private[0]) if len(private) == 1 else None
        if released is None:
            self._refuse("slope", response, *features)
        covariates = [name for name in features if name not in private]
        rows = self._rows(dict.fromkeys([*released.outcomes.columns, response, *features]))
        found = self._result(released.slope(rows, covariates=covariates, response=None if response in private else response))
        parts = (found.estimate, found.standard_error, found.bias_bound)
        estimate, error, bias = (part.loc[list(features)] if isinstance(part, pd.Series) else part for part in parts)
        return replace(found, estimate=estimate, standard_error=error, bias_bound=bias)

    def _answers(self, name: str) -> set[str]:
        if self._is_kept(name):
            return super(OpenedRows, self)._answers(name)
        if self._channel(name) is not None:
            numbers = all(isinstance(level, int | float) for level in self._levels(name) or ())
            return {"share", "crosstab", "mean"} | ({"slope"} if numbers else set())
        if not self._has_own_distribution:
            return set()
        return OpenedPoints._answers(self, name) if self._is_chain else {"mean", "histogram", "quantile"}

    @property
    def _is_chain(self) -> bool:
        return bool(self.content["mechanism"]["columns"] == "chain")

    @property
    def _has_own_distribution(self) -> bool:
        """Whether the reference is made of the table's own rows, so that released values have the distribution of original ones."""
        return self._n_reference is not None

    @property
    def _n_reference(self) -> float | None:
        """The number of rows that the reference is made of; None if it is not made of the table's own rows."""
        reference = self.content["mechanism"]["reference"]
        if reference["kind"] in ("histogram", "tree"):
            return float(self.n_rows)
        fraction = reference.get("fraction")
        return None if fraction is None else self.n_rows * fraction / (1.0 - fraction)

    def _channel(self, name: str) -> ReleasedColumn | None:
        """Return a column of levels with its channel; None if the card gives no channel on levels."""
        column = self._column(name)
        parent = column.get("parent")
        if "levels" not in column or not {"channel", "channels"} & set(column) or (parent is not None and self._levels(parent) is None):
            return None
        return ReleasedColumn.from_card(self.content, name)

    def _is_joint(self, *names: str) -> bool:
        """Return whether released columns depend on each other as the original ones do: kept ones, and those of one chain or edge."""
        if self._is_kept(*names):
            return True
        private = {name for name in names if not self._is_kept(name)}
        edges = [set(edge) for edge in self.content["mechanism"].get("edges", ())]
        by = self.content["mechanism"]["reference"].get("by")
        if self._is_chain:
            return self._has_own_distribution and set(names) - private <= {by}
        return len(private) == len(set(names)) == 2 and private in edges

    def _points(self, *names: str) -> Points:
        """Return the released values of columns whose own, or joint, distribution is kept."""
        points = super(OpenedRows, self)._points(*names)
        private = [name for name in names if not self._is_kept(name)]
        if not private:
            return points
        if self._n_reference is None:
            what = "its reference is a declared distribution or another table, which the released values lean to by an unknown amount"
            raise SpecError(what, ", ".join(private), "use columns of levels, or a release whose reference is made of its own rows")
        columns = {name: self._column(name) for name in private}
        noisy = self.content["mechanism"]["reference"]["kind"] in ("histogram", "tree")
        return replace(
            points,
            levels={name: own for name, own in points.levels.items() if name not in private} | dict(self._level_map(private)),
            sampling=1.0 / self.n_rows + 1.0 / self._n_reference,
            rank_errors={name: column["reference"]["rank_error_at_most"] for name, column in columns.items() if "reference" in column},
            bounds=self._bounds(names),
            biased=noisy,
            limits=(_NOISY_REFERENCE if noisy else _REFERENCE, *points.limits),
        )

    def _rows(self, names: Any) -> Frame:
        chosen = list(dict.fromkeys(names))
        return self.to_pandas(chosen) if self.n_rows <= _IN_MEMORY else self.to_dask()[chosen]

    def _crosstab_private(self, one: ReleasedColumn, two: ReleasedColumn) -> Result:
        """Return the table of two columns with noise of their own: of the pair, the channel is the Kronecker product of the two."""
        sizes = len(one.levels), len(two.levels)
        if math.prod(sizes) > _MOST_PAIRS:
            what = f"the two columns have {math.prod(sizes):,} pairs of levels, and at most {_MOST_PAIRS:,} are corrected for their noise"
            raise SpecError(what, f"crosstab({one.name}, {two.name})", "use a column with fewer levels")
        counts = outcome_counts(self._rows([one.name, two.name]), Outcomes(columns=(one.name, two.name), levels=(one.levels, two.levels)))
        channel = np.kron(one.matrix, two.matrix).astype(np.float64)
        pair = ReleasedColumn(name=f"{one.name} × {two.name}", levels=tuple(range(math.prod(sizes))), matrix=channel)
        found = self._result(pair.distribution(counts))
        index, columns = (pd.Index(list(column.levels), name=column.name) for column in (one, two))
        parts = (found.estimate, found.standard_error, found.bias_bound)
        estimate, error, bias = (
            pd.DataFrame(self.n_rows * part.to_numpy().reshape(sizes), index, columns) if isinstance(part, pd.Series) else part for part in parts
        )
        return replace(found, estimate=estimate, standard_error=error, bias_bound=bias)

    def _result(self, found: Estimate) -> Result:
        known = bool(np.isfinite(np.asarray(found.worst_bias, dtype=np.float64)).all())
        limits = ("the bound on the bias is for the worst original values; `dpdask.inference.ReleasedColumn` also gives unbiased estimates",)
        return Result(
            estimate=found.value,
            standard_error=found.standard_error,
            bias_bound=found.worst_bias if known else None,
            limits=((*limits,) if known and np.any(np.asarray(found.worst_bias)) else ()) + self._limits_of_units(),
        )
