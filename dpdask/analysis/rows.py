"""Opened releases of randomised rows: estimates that the public noise is taken out of, and averages that the noise leaves as they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpdask.analysis.opened import Result, check_no_groups, check_probabilities
from dpdask.analysis.points import (
    WITHOUT_NULLS,
    KeptColumns,
    NoisyCells,
    OpenedPoints,
    Points,
    check_distinct,
    check_features,
    read_as_python,
)
from dpdask.errors import SpecError
from dpdask.inference import Estimate, ReleasedColumn
from dpdask.inference.tallies import Frame, Outcomes, outcome_counts

_IN_MEMORY = 5_000_000  # rows; more are counted by Dask
_MOST_PAIRS = 1_024
_SURE = 2.0  # standard deviations
_CENTRAL = ("discrete-gaussian", "discrete-laplace")  # kinds of events
_KEPT_DISTRIBUTION = "its noise has no channel on its values, so only its own distribution is kept: dependence on other columns is weakened by it"
_REFERENCE = "the released values have the distribution of the reference; its draw from the table is in the standard error"
_SPREAD = (
    "values that many rows share are spread over the gap below them, unless the schema names them as atoms: means and quantiles may be too small by "
    "that gap and counts be wrong, and no error includes it"
)
_RELEASED = "counts are of the released rows, without those that were held out"
_TOLD_REFERENCE = "the released values have the distribution of noisy counts; standard errors hold that noise and the draws of the rows"
_WORST_BIAS = (
    "the bound on the bias is for the worst original values; `dpdask.inference.ReleasedColumn` also gives unbiased estimates, where the channel "
    "determines them"
)
_ABSENT = "levels that the reference holds with probability 0 cannot be released: nothing is known of their share, which the noise may have hidden"
_CELLS = "inside a cell of the reference the columns are independent: slopes and differences of groups are too small, and no error includes it"
_NOISY_RANKS = (
    "the released values have the distribution of noisy counts; standard errors count that noise at its largest, and the bias bound the rows that "
    "may lie beyond the kept range (`reference` of the column in the card); where values lie inside a cell of the reference is not known"
)
_NOISY_REFERENCE = "the reference is noisy counts of the table; what their noise changes is not in the standard error, and is large for few rows"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedRows(KeptColumns):
    """Rows whose private values were randomised by public channels.

    A private column whose reference is made of the table's own rows keeps its distribution, so its
    own shares, means, quantiles and histograms are those of the released values. Its dependence on
    kept columns is corrected for its channel (`dpdask.inference.ReleasedColumn`), and so is
    everything else of a column of levels with another reference.
    """

    refusals: ClassVar[Mapping[str, tuple[str, str]]] = {
        "mean": (
            "both columns have noise of their own",
            "use crosstab(), or group by a column that was kept",
        ),
        "share": ("is a column of numbers", "use histogram() or quantile()"),
        "histogram": ("its noise is a channel on levels", "use share()"),
        "quantile": (
            "its noise is a channel on levels",
            "use share(), whose running sum gives quantiles",
        ),
        "crosstab": (
            _KEPT_DISTRIBUTION,
            "declare levels in the schema, or release with a reference `chain` or the mechanism `copula`",
        ),
        "slope": (
            "a slope takes one private column, which has levels, and otherwise kept columns",
            "use crosstab(), or the mechanism `copula`",
        ),
        "npmle": ("the release holds values, not ranges", "use share() or histogram()"),
        "regress": ("the release holds values, not ranges", "use slope()"),
        "fit": (
            "the release holds rows, not weighted cells",
            "use slope(), or the mechanism `histogram`",
        ),
    }

    def mean(
        self, column: str, *, by: str | None = None, values: Sequence[float] | None = None
    ) -> Result:
        """Return the mean of a column; see `OpenedRelease.mean`."""
        names = [column] if by is None else [column, by]
        check_distinct("mean", names)
        if self._keeps_distribution(column) if by is None else self._is_joint(*names):
            return super(OpenedRows, self).mean(column, by=by, values=values)
        released, numbers = self._channel(column), self._level_values(column, values)
        if numbers is None or (released is None and by is None):
            return (
                super(OpenedRows, self).mean(column, values=values)
                if by is None
                else self._refuse_dependence("mean", *names)
            )
        if released is None:
            self._refuse_dependence("mean", *names)
        if by is not None and not self._is_kept(by):
            self._refuse("mean", *names)
        with read_as_python(*names):
            return self._correct_mean(released, numbers, by)

    def share(self, column: str, *, by: str | None = None) -> Result:
        """Return the share of each level of a column; see `OpenedRelease.share`."""
        check_no_groups("share", column, by)
        if self._levels(column) is None and not self._is_kept(column):
            self._refuse("share", column)
        released = None if self._keeps_distribution(column) else self._channel(column)
        if released is not None:
            return self._result(released.distribution(self._rows(released.outcomes.columns)))
        return super(OpenedRows, self).share(column)

    def histogram(self, column: str, bins: int | Sequence[float] = 20) -> Result:
        """Return how many rows lie in each range of a column of numbers; see `OpenedRelease.histogram`."""
        if self._has_noisy_levels(column):
            self._refuse("histogram", column)
        return self._say_held_out(super(OpenedRows, self).histogram(column, bins))

    def quantile(
        self, column: str, q: float | Sequence[float] = 0.5, *, by: str | None = None
    ) -> Result:
        """Return a quantile of a column of numbers, or several; see `OpenedRelease.quantile`."""
        check_probabilities(q)
        if self._has_noisy_levels(column):
            self._refuse("quantile", column)
        return super(OpenedRows, self).quantile(column, q, by=by)

    def crosstab(self, first: str, second: str) -> Result:
        """Return how many rows have each pair of levels; see `OpenedRelease.crosstab`."""
        check_distinct("crosstab", [first, second])
        with read_as_python(first, second):
            return self._say_held_out(self._cross(first, second))

    def _cross(self, first: str, second: str) -> Result:
        if self._is_joint(first, second):
            return super(OpenedRows, self).crosstab(first, second)
        one, two = self._channel(first), self._channel(second)
        if self._is_kept(first) and two is not None:
            return self._result(two.crosstab(self._rows([first, *two.outcomes.columns]), first))
        if self._is_kept(second) and one is not None:
            found = self._result(one.crosstab(self._rows([second, *one.outcomes.columns]), second))
            parts = (found.estimate, found.standard_error, found.bias_bound)
            estimate, error, bias = (
                part.T if isinstance(part, pd.DataFrame) else part for part in parts
            )
            return replace(found, estimate=estimate, standard_error=error, bias_bound=bias)
        if one is None or two is None or one.parent is not None or two.parent is not None:
            self._refuse_dependence("crosstab", first, second)
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
        if None in released.levels:
            raise SpecError(
                "null is one of its levels, so slopes are not supported",
                f"column {released.name!r}",
                "use mean(), in groups by a kept column",
            )
        covariates = [name for name in features if name not in private]
        rows = self._rows(dict.fromkeys([*released.outcomes.columns, response, *features]))
        found = self._result(
            released.slope(
                rows, covariates=covariates, response=None if response in private else response
            )
        )
        parts = (found.estimate, found.standard_error, found.bias_bound)
        estimate, error, bias = (
            part.loc[list(features)] if isinstance(part, pd.Series) else part for part in parts
        )
        return replace(found, estimate=estimate, standard_error=error, bias_bound=bias)

    def _say_held_out(self, found: Result) -> Result:
        """Return a result of counts, with a limit if rows were held out."""
        reference = self.content["mechanism"]["reference"]
        return (
            replace(found, limits=(*found.limits, _RELEASED))
            if reference.get("fraction")
            else found
        )

    def _answers(self, name: str) -> set[str]:
        if self._is_kept(name):
            found = super(OpenedRows, self)._answers(name)
            others = [
                other
                for other in self._partners(name)
                if self._is_kept(other) or self._has_channel(other)
            ]
            return found if any(self._may_explain(other) for other in others) else found - {"slope"}
        if self._is_chain or self._levels(name) is None:
            if not self._keeps_distribution(name):
                return set()
            offered = OpenedPoints._answers(self, name)
            return (
                offered
                if self._is_chain
                or any(self._is_joint(name, other) for other in self._partners(name))
                else offered - {"slope"}
            )
        partners, has_channel = self._partners(name), self._has_channel(name)
        if not (has_channel or self._keeps_distribution(name)):
            return set()
        kept = [other for other in partners if has_channel and self._is_kept(other)]
        alone = has_channel and self._column(name).get("parent") is None
        crossed = any(
            self._levels(other) is not None
            and (
                self._is_joint(name, other)
                or (alone and self._has_channel(other) and not self._is_tree)
            )
            for other in partners
        )
        found = {"share"} | ({"crosstab"} if kept or crossed else set())
        slope = self._may_explain(name) and any(self._may_explain(other) for other in kept)
        return (
            found
            | ({"mean"} if self._has_numbers(name) else set())
            | ({"slope"} if slope else set())
        )

    def _may_explain(self, name: str) -> bool:
        """Return whether a column has numbers in every row that a slope can be made of."""
        if self._is_kept(name):
            return "slope" in KeptColumns._answers(self, name)
        if self._is_chain or self._levels(name) is None:
            return super(OpenedRows, self)._may_explain(name)
        return (
            self._has_channel(name)
            and self._has_numbers(name)
            and None not in (self._levels(name) or ())
        )

    @property
    def _is_tree(self) -> bool:
        return bool(self.content["mechanism"]["columns"] == "tree")

    @property
    def _is_chain(self) -> bool:
        return bool(self.content["mechanism"]["columns"] == "chain")

    def _keeps_distribution(self, name: str) -> bool:
        """Return whether a column's released values have the distribution of its original ones."""
        return self._is_kept(name) or self._n_reference is not None

    @property
    def _n_reference(self) -> float | None:
        """The number of rows that the reference is made of; None if it is not made of the table's own rows, but of earlier ones or of others."""
        reference = self.content["mechanism"]["reference"]
        if reference["kind"] in ("histogram", "tree"):
            return float(self.n_rows) if self._noise_of_counts else None
        fraction = reference.get("fraction")
        own = fraction is not None and self.content["guarantee"]["unprotected"]["fraction"] > 0.0
        return self.n_rows * fraction / (1.0 - fraction) if own else None

    @property
    def _noise_of_counts(self) -> list[float]:
        """The standard deviations of the noise of the counts that the reference is made of, in the order in which they were counted."""
        events = self.content["accounting"]["events"].get("events", ())
        return [
            event.get("sigma") or math.sqrt(2.0) * event["scale"]
            for event in events
            if event["kind"] in _CENTRAL
        ]

    def _find_noise(self, names: Sequence[str]) -> NoisyCells | None:
        """Return the noisy cells of the table of private columns of levels; None if the card does not tell."""
        deviation = self._find_deviation(names)
        if deviation is None:
            return None
        lines = [self._levels(name) or () for name in names]
        frame = pd.DataFrame(list(itertools.product(*lines)), columns=list(names), dtype=object)
        return NoisyCells(frame=frame, variance=(deviation / self.n_rows) ** 2)

    def _find_rank_noise(self, names: Sequence[str]) -> dict[str, float]:
        """Return what standard deviation noise gives the share of a range at most: its two ends take a count each from every vector of counts."""
        if (
            self.content["mechanism"]["reference"]["kind"] != "histogram"
            or self._levels(names[0]) is not None
        ):
            return {}
        events = [
            event
            for event in self.content["accounting"]["events"].get("events", ())
            if event["kind"] in _CENTRAL
        ]
        most = max(
            math.sqrt(2.0 * event["count"])
            * (event.get("sigma") or math.sqrt(2.0) * event["scale"])
            for event in events
        )
        return {names[0]: most / self.n_rows}

    def _find_deviation(self, names: Sequence[str]) -> float | None:
        """Return the standard deviation of a noisy count in the reference's table of one or two columns."""
        kind, accounting = (
            self.content["mechanism"]["reference"]["kind"],
            self.content["accounting"],
        )
        if kind == "histogram" and len(names) == 1:
            sensitivity = (
                2 if self.content["guarantee"]["adjacency"] == "replace-one" else 1
            ) * int(accounting["rows_per_unit"])
            return math.sqrt(2.0) * sensitivity / float(accounting["epsilon_reference"][names[0]])
        if kind != "tree" or len(names) > 2:
            return None
        n_columns = sum(
            column["role"] == "privatised" for column in self.content["columns"].values()
        )
        drawn = self._noise_of_counts[
            -min(n_columns, 3) :
        ]  # one-way tables, all pairs if more than one, edges
        return (
            drawn[0]
            if len(names) == 1
            else 1.0 / math.hypot(*(1.0 / deviation for deviation in drawn[1:]))
        )

    def _has_noisy_levels(self, name: str) -> bool:
        """Return whether a column's noise is a channel on levels."""
        return not self._is_kept(name) and self._levels(name) is not None and not self._is_chain

    def _channel(self, name: str) -> ReleasedColumn | None:
        """Return a column of levels with its channel; None if the card gives no channel on levels."""
        return ReleasedColumn.from_card(self.content, name) if self._has_channel(name) else None

    def _has_channel(self, name: str) -> bool:
        column = self._column(name)
        parent = column.get("parent")
        return (
            "levels" in column
            and bool({"channel", "channels"} & set(column))
            and (parent is None or self._levels(parent) is not None)
        )

    def _refuse_dependence(self, question: str, *names: str) -> NoReturn:
        """Refuse a question about how columns depend on each other, with the reason of the first that answers none."""
        for name in names:
            parent = self._column(name).get("parent")
            if parent is not None and self._levels(name) is not None:
                what = f"along the tree the noise of {name!r} depends on the released {parent!r}"
                why = (
                    ", which has no levels"
                    if self._levels(parent) is None
                    else ", so only its table with this column is kept"
                )
                use = (
                    f"declare levels of {parent!r}"
                    if self._levels(parent) is None
                    else f"ask for {parent!r} in place of the other column"
                )
                raise SpecError(
                    what + why,
                    f"{question}({', '.join(names)})",
                    f"{use}, or release with the mechanism `copula`",
                )
        raise SpecError(
            _KEPT_DISTRIBUTION, f"{question}({', '.join(names)})", self.refusals["crosstab"][1]
        )

    def _is_joint(self, *names: str) -> bool:
        """Return whether released columns depend on each other as the original ones do: kept ones, and those of one chain or edge."""
        if self._is_kept(*names):
            return True
        private = {name for name in names if not self._is_kept(name)}
        edges = [set(edge) for edge in self.content["mechanism"].get("edges", ())]
        by = self.content["mechanism"]["reference"].get("by")
        if self._is_chain:
            return self._keeps_distribution(names[0]) and set(names) - private <= {by}
        return len(private) == len(set(names)) == 2 and private in edges

    def _points(self, *names: str) -> Points:
        """Return the released values of columns whose own, or joint, distribution is kept."""
        private = [name for name in names if not self._is_kept(name)]
        if not private:
            return super(OpenedRows, self)._points(*names)
        if self._n_reference is None:
            what = "its reference is a declared distribution or another table, which the released values lean to by an unknown amount"
            raise SpecError(
                what,
                ", ".join(private),
                "use columns of levels, or a release whose reference is made of its own rows",
            )
        columns = {name: self._column(name) for name in private}
        noisy = self.content["mechanism"]["reference"]["kind"] in ("histogram", "tree")
        of_levels = len(private) == len(names) <= 2 and all(
            self._levels(name) is not None for name in names
        )
        points = self._count_levels(names) if of_levels else super(OpenedRows, self)._points(*names)
        cells = self._find_noise(names) if of_levels else None
        rank_noise = self._find_rank_noise(names) if noisy and cells is None else {}
        told = (
            _REFERENCE
            if not noisy
            else _TOLD_REFERENCE
            if cells is not None
            else _NOISY_RANKS
            if rank_noise
            else _NOISY_REFERENCE
        )
        has_numbers = any(self._levels(name) is None for name in private)
        spread, in_cells = has_numbers and not noisy, has_numbers and noisy and len(private) > 1
        return replace(
            points,
            levels={name: own for name, own in points.levels.items() if name not in private}
            | dict(self._level_map(private)),
            sampling=1.0 / self.n_rows + 1.0 / self._n_reference,
            rank_errors={
                name: column["reference"]["rank_error_at_most"]
                for name, column in columns.items()
                if "reference" in column
            },
            bounds=self._bounds(names),
            noise=None if cells is None else lambda _: cells,
            rank_noise=rank_noise,
            lost=max(map(self._find_lost, columns.values())),
            biased=noisy
            and cells is None
            and not any("kept" in column.get("reference", ()) for column in columns.values()),
            spread=spread,
            limits=(
                told,
                *([_CELLS] if in_cells else []),
                *([_SPREAD] if spread else []),
                *points.limits,
            ),
        )

    def _find_lost(self, column: Mapping[str, Any]) -> float:
        """Return what share of the rows may lie beyond the blocks that a noisy reference kept."""
        beyond = column.get("reference", {}).get("beyond", {}).values()
        return float(
            sum(max(0.0, side["count"] + _SURE * side["standard_deviation"]) for side in beyond)
            / self.n_rows
        )

    def _count_levels(self, names: Sequence[str]) -> Points:
        """Return a point for each level, or pair of levels, with its number of released rows."""
        levels = {name: self._levels(name) or () for name in names}
        counts = outcome_counts(
            self._rows(names), Outcomes(columns=tuple(names), levels=tuple(levels.values()))
        )
        frame = pd.DataFrame(
            list(itertools.product(*levels.values())), columns=list(names), dtype=object
        )
        return Points(
            frame=frame,
            weights=counts,
            n_rows=float(self.n_rows),
            sampling=1.0 / self.n_rows,
            levels=levels,
            limits=self._limits_of_units(),
        )

    def _rows(self, names: Any) -> Frame:
        chosen = list(dict.fromkeys(names))
        return self.to_pandas(chosen) if self.n_rows <= _IN_MEMORY else self.to_dask()[chosen]

    def _correct_mean(
        self, released: ReleasedColumn, numbers: NDArray[np.float64], by: str | None
    ) -> Result:
        """Return a mean that is corrected for the channel, of the rows with a number."""
        rows = self._rows([*released.outcomes.columns, *([] if by is None else [by])])
        found = self._result(
            released.mean(rows, numbers) if by is None else released.group_means(rows, by, numbers)
        )
        return (
            found
            if np.isfinite(numbers).all()
            else replace(found, limits=(*found.limits, WITHOUT_NULLS))
        )

    def _crosstab_private(self, one: ReleasedColumn, two: ReleasedColumn) -> Result:
        """Return the table of two columns with noise of their own: of the pair, the channel is the Kronecker product of the two."""
        sizes = len(one.levels), len(two.levels)
        if math.prod(sizes) > _MOST_PAIRS:
            what = f"the two columns have {math.prod(sizes):,} pairs of levels, and at most {_MOST_PAIRS:,} are corrected for their noise"
            raise SpecError(
                what, f"crosstab({one.name}, {two.name})", "use a column with fewer levels"
            )
        counts = outcome_counts(
            self._rows([one.name, two.name]),
            Outcomes(columns=(one.name, two.name), levels=(one.levels, two.levels)),
        )
        channel = np.kron(one.matrix, two.matrix).astype(np.float64)
        pair = ReleasedColumn(
            name=f"{one.name} × {two.name}", levels=tuple(range(math.prod(sizes))), matrix=channel
        )
        found = self._result(pair.distribution(counts))
        lost = (
            math.prod(sizes)
            if found.bias_bound is None
            else int((found.bias_bound > found.estimate.abs()).sum())
        )
        if lost > math.prod(sizes) / 2:
            what = f"two columns with noise of their own: the bound on the bias is larger than the estimate in {lost} of {math.prod(sizes)} pairs"
            use = "cross one of them with a kept column, or release with a reference `tree` or `chain`, or the mechanism `copula`"
            raise SpecError(what, f"crosstab({one.name}, {two.name})", use)
        index, columns = (pd.Index(list(column.levels), name=column.name) for column in (one, two))
        parts = (found.estimate, found.standard_error, found.bias_bound)
        estimate, error, bias = (
            pd.DataFrame(self.n_rows * part.to_numpy().reshape(sizes), index, columns)
            if isinstance(part, pd.Series)
            else part
            for part in parts
        )
        return replace(found, estimate=estimate, standard_error=error, bias_bound=bias)

    def _result(self, found: Estimate) -> Result:
        bias = np.asarray(found.worst_bias, dtype=np.float64)
        known = bool(np.isfinite(bias).all())
        limits = [_WORST_BIAS] if known and bias.any() else []
        lost = int((bias > np.abs(np.asarray(found.value, dtype=np.float64))).sum()) if known else 0
        if lost:
            limits.append(
                f"the bound on the bias is larger than the estimate in {lost:,} of {bias.size:,} numbers: the noise leaves little of them"
            )
        absent = (bias == 0.0) & (np.asarray(found.standard_error) == 0.0)
        error = found.standard_error
        if (absent & (np.asarray(found.value) == 0.0)).any():
            limits.append(_ABSENT)
        if absent.any():  # an error of 0 that is not one
            error = error.mask(absent) if isinstance(error, pd.Series | pd.DataFrame) else None
        return Result(
            estimate=found.value,
            standard_error=error,
            bias_bound=found.worst_bias if known else None,
            limits=(*limits, *self._limits_of_units()),
        )
