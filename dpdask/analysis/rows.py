"""Opened releases of randomised rows: estimates that the public noise is taken out of, and averages that the noise leaves as they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.analysis.measured import WITHOUT_NULLS
from dpdask.analysis.opened import Refusals
from dpdask.analysis.opened_points import AVERAGES, KeptColumns, read_as_python
from dpdask.analysis.points import Points
from dpdask.analysis.ranks import RankAnswers, to_floats
from dpdask.analysis.results import TABLES, Query, Result, clip_to, find_half
from dpdask.analysis.subset import intercept_by_means
from dpdask.analysis.values import DateScale, HeldOut, NoisyCells
from dpdask.arrays import Floats
from dpdask.engine.lazy import read_frame
from dpdask.errors import SpecError
from dpdask.inference.noisy_ranks import NoisyRanks
from dpdask.inference.tallies import Estimate, Frame, Outcomes, group_counts, outcome_counts
from dpdask.privacy import UnitColumn

if TYPE_CHECKING:
    from dpdask.inference.debias import ReleasedColumn
    from dpdask.inference.pairs import Margin

# of a column's released rows, whether the nearest estimate will do
Estimator: TypeAlias = Callable[["ReleasedColumn", Frame, bool], Estimate]
_IN_MEMORY = 5_000_000  # rows; more are counted by Dask
_MOST_PAIRS = 1_024
_MOST_SPREAD = 0.05  # of the rows at one value whose ranks are spread
_SURE = 2.0  # standard deviations
_FEW_HELD = 5.0  # held-out rows with a level: of fewer, it may be that there are none
_SURELY = 2.75  # standard deviations that a level is at most more frequent than it is estimated
_CENTRAL = ("discrete-gaussian", "discrete-laplace")  # kinds of events
_COUNTED = ("histogram", "tree")  # kinds of references
_KEPT_DISTRIBUTION = "its noise has no channel on its values, so only its own distribution is kept: dependence on other columns is weakened by it"
_REFERENCE = "the released values have the distribution of the reference; its draw from the table is in the standard error"
_SPREAD = (
    "values that many rows share are spread over the gap below them, unless the schema names them as atoms: means and quantiles may be too small by "
    "that gap and counts be wrong, and no error includes it"
)
_TOLD_SPREAD = (
    "values that many rows share are spread over the gap below them, unless the schema names them as atoms: the bound on the bias holds this "
    "(`spread_rank_at_most` of the column in the card)"
)
_RELEASED = "counts are of the released rows, without those that were held out"
_TOLD_REFERENCE = "the released values have the distribution of noisy counts; standard errors hold that noise and the draws of the rows"
_LIKELY_BIAS = (
    "the noise hides a part of the answer: the bound on the bias is for the worst original values; or, if smaller, one with which intervals of 95 % hold "
    "on average, if groups, pairs of levels, or all rows and a reference of other rows, differ in what the noise hides by as much as in what it shows, and "
    "numbers first of all in their mean"
)
_FRECHET = (
    "its noise has no channel on its levels alone, so nothing is known of how it depends on the other column: the estimate is the released table, in which "
    "the dependence is weakened, and the interval is all that the two columns' own distributions allow"
)
_SURELY_HELD = 0.99  # the confidence that a level's own share lies within its interval
_FEW_KNOWN = "groups of which it is not sure that any row has a value have no estimate"
_ABSENT = "levels that the reference holds with probability 0 cannot be released: nothing is known of their share, which the noise may have hidden"
_CELLS = "inside a cell of the reference the columns are independent: slopes and differences of groups are too small, and no error includes it"
_NOISY_RANKS = (
    "the released values have the distribution of noisy counts; standard errors count that noise at its largest, and the bias bound the rows that "
    "may lie beyond the kept range (`reference` of the column in the card); where values lie inside a cell of the reference is not known"
)
_NOISY_REFERENCE = "the reference is noisy counts of the table; what their noise changes is not in the standard error, and is large for few rows"


class OpenedRows(KeptColumns):
    """Rows whose private values were randomised by public channels.

    A private column whose reference is made of the table's own rows keeps its distribution, so its own shares, means, quantiles and
    histograms are those of the released values. Its dependence on kept columns is corrected for its channel
    (`dpdask.inference.ReleasedColumn`), and so is everything of a column of levels with another reference. Numbers are corrected by the
    channel of their ranks (`inference.noisy_ranks`): in groups, as a response, and with another reference.
    """

    measures_levels: ClassVar[bool] = True
    plain_use: ClassVar[str] = (
        "plain group means and slopes of these rows are biased, since their noise weakens how columns depend on each other; "
        "ask the opened release, as in release.groupby(…).mean(…)"
    )
    refusals: ClassVar[Refusals] = {
        "mean": (
            "both columns have noise of their own",
            "use crosstab(), or group by a column that was kept",
        ),
        "share": ("it is a column of numbers", "use histogram() or quantile()"),
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
            "a slope takes one private column, as the response if it has no levels, and otherwise kept columns",
            "use crosstab(), or the mechanism `copula`",
        ),
        "npmle": ("the release holds values, not ranges", "use share() or histogram()"),
        "regress": ("the release holds values, not ranges", "use slope()"),
        "fit": (
            "the release holds rows, not weighted cells",
            "use slope(), or the mechanism `histogram`",
        ),
    }

    def _plan(self, asked: Query) -> Callable[[], Any]:
        self._check_released(asked.names)
        answer = self._plan_rows(asked)
        if self._is_weighed(asked):
            return partial(self._answer_of_table, asked)
        if asked.kind not in ("histogram", "crosstab", "count") or not self._reference.get(
            "fraction"
        ):
            return answer

        def answer_of_released() -> Result:
            with read_as_python(*asked.names):
                found: Result = answer()
            return replace(found, limits=(*found.limits, _RELEASED))

        return answer_of_released

    def _plan_rows(self, asked: Query) -> Callable[[], Any]:
        question, names = asked.kind, asked.names
        first, *others = names
        private = self._list_private(names)
        joint = self._is_joint(*names) if others else self._keeps_distribution(first)
        if (ranks := self._plan_ranks(asked)) is not None:
            return ranks
        match question:
            case "mean" if not joint:
                numbers = self._level_values(first, asked.values, asked.within)
                if numbers is not None and self._has_channel(first):
                    if not self._is_kept(*others):
                        raise self._refusal(question, *names)
                    return lambda: self._correct_mean(first, numbers, *others)
                if others:
                    if self._is_kept(first) and self._has_channel(others[0]):
                        what = "the groups are of a column with noise of its own"
                        use = f"use crosstab({first!r}, {others[0]!r}), or slope()"
                        raise SpecError(what, f"{question}({first}, by={others[0]})", use)
                    raise self._no_dependence(question, *names)
            case "share" if private:
                if self._levels(first) is None:
                    raise self._refusal(question, first)
                if not joint and self._has_channel(first):
                    return lambda: self._correct_share(first)
            case "histogram" | "quantile" if (
                first in private and self._levels(first) is not None and not self._is_chain
            ):
                raise self._refusal(question, first)
            case "crosstab" if not joint:
                if len(private) == 1 and self._has_channel(private[0]):
                    [kept] = set(names) - set(private)
                    return lambda: self._correct_crosstab(private[0], kept, kept == first)
                if len(private) == 1 and self._levels(private[0]) and self._n_reference:
                    [kept] = set(names) - set(private)
                    return lambda: self._bound_crosstab(private[0], kept, kept == first)
                if len(private) == 1 or not all(
                    self._has_channel(name) and self._column(name).get("parent") is None
                    for name in names
                ):
                    raise self._no_dependence(question, *names)
                return lambda: self._crosstab_private(first, *others)
            case "slope" | "intercept" | "r_squared" if not joint:
                is_told = len(private) == 1 and self._has_channel(private[0])
                if question == "r_squared" or not is_told:
                    raise self._refusal(question, *names)
                self._check_no_dates(names)
                self._check_no_texts(private)
                if question == "intercept":
                    return lambda: intercept_by_means(self, first, others)
                return lambda: self._correct_slope(private[0], first, others)
        if private and self._n_reference is None and question in AVERAGES:
            what = "its reference is a declared distribution or another table, which the released values lean to by an unknown amount"
            raise SpecError(
                what,
                ", ".join(private),
                "use columns of levels, or a release whose reference is made of its own rows",
            )
        return super()._plan(asked)

    def _is_weighed(self, asked: Query) -> bool:
        """Return whether the whole table is estimated: numbers of rows are published, and the noise of each private column is a known channel."""
        names = asked.names
        unit = self.content["guarantee"]["unit"]
        if not (isinstance(unit, dict) and unit.get("publish_counts")):
            return False
        private = self._list_private(names)
        if any(map(self._is_of_dates, names)) or not all(map(self._has_channel, private)):
            return False
        match asked.kind:
            case "mean":
                return not set(names[1:]) & set(private)
            case "histogram" | "quantile" | "count":
                return not private
            case "slope":
                return len(private) < 2 and not any(
                    None in (self._levels(n) or ()) for n in private
                )
        along = any(self._column(name).get("parent") is not None for name in private)
        return asked.kind in ("share", "crosstab") and (len(private) < 2 or not along)

    def _answer_of_table(self, asked: Query) -> Result:
        from dpdask.analysis.weighted import WeightedAnswers  # many releases have no weights
        from dpdask.inference.debias import ReleasedColumn

        names, first = asked.names, asked.names[0]
        unit = UnitColumn.model_validate(self.content["guarantee"]["unit"])
        weight = str(unit.weight)
        private = self._list_private(names)
        columns = {name: ReleasedColumn.from_card(self.content, name) for name in private}
        read = itertools.chain(*(column.outcomes.columns for column in columns.values()))
        frame = self._read(list(dict.fromkeys([*names, *read, unit.column, weight])))
        of = WeightedAnswers(frame=frame, unit=unit.column, weight=weight, released=columns)
        is_mean, is_histogram = asked.kind == "mean", asked.kind == "histogram"
        with read_as_python(*names):
            values = self._level_values(first, asked.values, asked.within) if is_mean else None
            edges = self._edges(first, asked.bins) if is_histogram else None
            ends = self._check_within(first, asked.within)
            return asked.put(of, values=values, ends=ends, edges=edges)

    # ---- numbers whose noise is a channel on ranks

    def _plan_ranks(self, asked: Query) -> Callable[[], Any] | None:
        """Return what answers a question about a column of numbers by the channel of its ranks; None if that is not known or not needed."""
        question, names = asked.kind, asked.names
        name, *others = names
        kinds: tuple[str, ...] = ("mean", "slope", "intercept")
        if not others:  # of all rows, the released values tell what the reference keeps
            kinds = ("mean", "histogram", "quantile") if self._n_reference is None else ()
        if self._is_kept(name) or not self._is_kept(*others) or question not in kinds:
            return None
        told = NoisyRanks.from_card(self._column(name))
        if told is None and not self._tells_reference(name):
            return None
        scale = self._scale(name)
        ends = self._check_within(name, asked.within, scale) or self._bounds_of(name)
        if question in ("slope", "intercept"):
            self._check_no_dates(names)
            self._check_no_texts(others)
        if question != "quantile" and question != "histogram":
            self._level_values(name, asked.values)  # which it has none of
            if ends is None:
                what = "values beyond the reference may be anything, since no bounds were declared"
                use = f"use mean({name!r}, …, within=(low, high))"
                raise SpecError(what, f"column {name!r}", use)

            measured = self._find_measured(name)
            if asked.within is None and measured is not None:
                measured.check_mean(name)
        if question == "intercept":
            return lambda: intercept_by_means(self, name, others)

        def find() -> Result:
            frame = self._read_rows(names)
            zone = self._zoned(frame[name], scale)
            channel = told or self._read_ranks(name, frame[name], zone)
            answers = RankAnswers(
                frame=frame,
                column=channel,
                scale=zone,
                within=ends,
                limits=self._limits_of_units(),
            )
            edges = self._edges(name, asked.bins, scale) if question == "histogram" else None
            with read_as_python(*(others or names)):
                return asked.put(answers, edges=edges)

        return find

    def _tells_reference(self, name: str) -> bool:
        """Return whether released numbers tell the reference, which is held-out rows."""
        spread = self._column(name).get("reference", {}).get("spread_rank_at_most", math.inf)
        return not self._is_chain and self._n_reference is not None and spread <= _MOST_SPREAD

    def _zoned(self, released: pd.Series, scale: DateScale | None) -> DateScale | None:
        """Return the scale of released dates with their zone; None of other numbers."""
        return None if scale is None else DateScale.of(released) or scale

    def _find_held_out(self, name: str, points: Points) -> HeldOut | None:
        """Return how held-out rows move averages of a column; None if there are none, or its channel is not known.

        Where a level has no held-out row, its rows are all released as other levels, and nothing
        tells how many they are. Then, and where a level may have few of them, the whole draw counts.
        """
        from dpdask.inference.debias import ReleasedColumn

        if self._is_chain or not self._reference.get("fraction") or self._n_reference is None:
            return None
        if self._levels(name) is None:
            if not self._tells_reference(name):
                return None
            released = points.frame[name]
            zone = self._zoned(released, self._scale(name))
            ranks = self._read_ranks(name, released, zone)
            code, channel = ranks.code(to_floats(released, zone)), ranks.of_outcomes
        elif (
            not self._has_channel(name)
            or "parent" in self._column(name)
            or (points.weights * self._n_reference < _FEW_HELD * points.n_rows).any()
        ):
            return None
        else:
            channel = ReleasedColumn.from_card(self.content, name).matrix
            code = np.arange(len(channel))
        return HeldOut(n_rows=self._n_reference, code=code, channel=channel)

    def _read_ranks(self, name: str, released: pd.Series, scale: DateScale | None) -> NoisyRanks:
        type_ = self._types.field(name).type
        assert self._n_reference is not None
        return NoisyRanks.from_released(
            self._column(name),
            to_floats(released, scale),
            self._n_reference,
            is_whole="unit" in self._column(name)
            or pa.types.is_integer(type_)
            or pa.types.is_temporal(type_),
        )

    # ---- estimates that the channel is taken out of

    def _correct(self, name: str, estimate: Estimator, *kept: str) -> Result:
        released = self._read_channel(name)
        rows = self._rows([*released.outcomes.columns, *kept])
        with read_as_python(name, *kept):
            return self._result(_choose(partial(estimate, released, rows)))

    @cached_property
    def _channels(self) -> dict[str, ReleasedColumn]:
        """The columns whose channels were read."""
        return {}

    def _read_channel(self, name: str) -> ReleasedColumn:
        """Return a column with its channel, and with what its own shares say of all rows; these are found once."""
        from dpdask.inference.debias import ReleasedColumn  # many questions need no channel

        if name not in self._channels:
            found = ReleasedColumn.from_card(self.content, name)
            if self._keeps_distribution(name):
                found = replace(found, at_most=self._read_margin(found)[1])
            else:
                found = replace(found, at_most=np.ones(len(found.levels)), follows=False)
            self._channels[name] = found
        return self._channels[name]

    def _correct_mean(self, name: str, numbers: Floats, by: str | None = None) -> Result:
        def estimate(column: ReleasedColumn, rows: Frame, near: bool) -> Estimate:
            if by is None:
                return column.mean(rows, numbers, approximate=near)
            return column.group_means(rows, by, numbers, approximate=near)

        found = self._correct(name, estimate, *([] if by is None else [by]))
        known = np.isfinite(numbers)
        limits = found.limits if known.all() else (*found.limits, WITHOUT_NULLS)
        if not known.any():
            return replace(found, limits=limits)
        possible = float(numbers[known].min()), float(numbers[known].max())
        return replace(
            found,
            estimate=clip_to(found.estimate, possible),
            limits=limits,
            possible=possible,
        )

    def _correct_share(self, name: str) -> Result:
        found = self._correct(
            name, lambda column, rows, near: column.distribution(rows, approximate=near)
        )
        return replace(found, drawn=(float(self.n_rows), 1.0))

    def _correct_crosstab(self, name: str, kept: str, first: bool) -> Result:
        found = self._correct(
            name, lambda column, rows, near: column.crosstab(rows, kept, approximate=near), kept
        )
        # no group has more rows of a level than there are, or than it has rows
        rows_of_level = self.n_rows * self._read_margin(self._read_channel(name))[1]
        frame, sizes = found.estimate, found.estimate.sum(axis=1).to_numpy()
        most = pd.DataFrame(np.minimum.outer(sizes, rows_of_level), frame.index, frame.columns)
        found = replace(found, possible=(0.0, most), drawn=(float(self.n_rows),) * 2)
        return found if first else found.change(lambda part: part.T)

    def _correct_slope(self, name: str, response: str, features: Sequence[str]) -> Result:
        covariates = [feature for feature in features if feature != name]
        explained = None if response == name else response
        found = self._correct(
            name,
            lambda column, rows, near: column.slope(
                rows, covariates=covariates, response=explained, approximate=near
            ),
            response,
            *features,
        )
        return found.change(lambda part: part.loc[list(features)])

    def _bound_crosstab(self, name: str, kept: str, first: bool) -> Result:
        """Return the released table of a column that has no channel on its own levels; its intervals are what the two distributions allow (Fréchet's bounds)."""
        levels, shares = self._levels(name) or (), self.share(name)
        with read_as_python(kept):
            groups, counts = group_counts(
                self._rows([name, kept]), [kept], Outcomes(columns=(name,), levels=(levels,))
            )
        ends = shares.interval(_SURELY_HELD)
        low, high = (
            self.n_rows * np.where(np.isnan(end), side, np.clip(end.to_numpy(float), 0.0, 1.0))
            for side, end in enumerate(ends)
        )
        sizes = counts.sum(axis=1)
        least = np.maximum(0.0, np.add.outer(sizes, low) - self.n_rows)
        most = np.minimum.outer(sizes, high)
        part = np.maximum(counts, 1.0) / self.n_rows
        own = part.sum(axis=0)
        # the rows are drawn, and the reference, whose draw moves the levels in all groups alike
        drawn = part * (1.0 - part) / self.n_rows
        of_reference = (part / own) ** 2 * own * (1.0 - own) / (self._n_reference or math.inf)
        error = self.n_rows * np.sqrt(drawn + np.maximum(of_reference, 0.0))
        estimate = np.clip(counts, least, most)
        bias = np.maximum(estimate - least, most - estimate)
        columns = pd.Index(levels, name=name)
        parts = [
            pd.DataFrame(table, groups, columns) for table in (estimate, error, bias, least, most)
        ]
        found = Result(
            estimate=parts[0],
            standard_error=parts[1],
            bias_bound=parts[2],
            limits=(_FRECHET, *self._limits_of_units()),
            possible=(parts[3], parts[4]),
            drawn=(float(self.n_rows),) * 2,
        )
        return found if first else found.change(lambda part: part.T)

    def _crosstab_private(self, first: str, second: str) -> Result:
        """Return the table of two columns with noise of their own: of the pair, the channel is the Kronecker product of the two."""
        from dpdask.inference.pairs import estimate_pairs

        one, two = map(self._read_channel, (first, second))
        sizes, where = (len(one.levels), len(two.levels)), f"crosstab({first}, {second})"
        n_pairs = math.prod(sizes)
        if n_pairs > _MOST_PAIRS:
            what = f"the two columns have {n_pairs:,} pairs of levels, and at most {_MOST_PAIRS:,} are corrected for their noise"
            raise SpecError(what, where, "use a column with fewer levels")
        counts = outcome_counts(
            self._rows([first, second]),
            Outcomes(columns=(first, second), levels=(one.levels, two.levels)),
        )
        margins, ends = zip(*map(self._read_margin, (one, two)), strict=True)
        parts = estimate_pairs(margins[0], margins[1], counts.reshape(sizes))
        value, error, bias = (pd.Series(part.ravel()) for part in parts)
        pair = replace(
            one,
            name=f"{first} × {second}",
            levels=tuple(range(n_pairs)),
            matrix=np.kron(one.matrix, two.matrix).astype(float),
            at_most=None,
        )
        near = Estimate(
            value=value,
            standard_error=error,
            worst_bias=bias,
            condition_number=pair.condition_number,
        )
        found = self._result(
            _choose(
                lambda is_near: near if is_near else pair.distribution(counts, approximate=False)
            )
        )
        index, columns = (pd.Index(column.levels, name=column.name) for column in (one, two))

        def shape(part: Any) -> pd.DataFrame:
            table = self.n_rows * np.asarray(part).reshape(sizes)
            return pd.DataFrame(table, index, columns)

        # no pair is more frequent than one of its levels
        possible = 0.0, shape(np.minimum.outer(*ends))
        found = found.change(shape)
        return replace(found, possible=possible, drawn=(float(self.n_rows),) * 2)

    def _read_margin(self, column: ReleasedColumn) -> tuple[Margin, Floats]:
        """Return what is known of a column in a table of pairs, and the largest share that each level may have."""
        from dpdask.inference.pairs import Margin

        found = self.share(column.name)
        value = np.asarray(found.estimate, float)
        error, bias = (
            np.zeros(len(value)) + np.asarray(0.0 if part is None else part, float)
            for part in (found.standard_error, found.bias_bound)
        )
        most = value + _SURELY * error + bias
        most = np.where(np.isnan(most), 1.0, np.clip(most, 0.0, 1.0))
        margin = Margin(
            matrix=column.matrix, share=value, error=error, bias=bias, numbers=column.axis
        )
        return margin, most

    def _result(self, found: Estimate) -> Result:
        bias = np.asarray(found.worst_bias, float)
        value = np.asarray(found.value, float)
        known = bool((np.isfinite(bias) | np.isnan(value)).all())
        limits = [_LIKELY_BIAS] if known and bias.any() else []
        if known and (lost := int((bias > np.abs(value)).sum())):
            limits.append(
                f"the bound on the bias is larger than the estimate in {lost:,} of {bias.size:,} numbers: the noise leaves little of them"
            )
        if np.isnan(value).any():
            limits.append(_FEW_KNOWN)
        absent = (bias == 0.0) & (np.asarray(found.standard_error) == 0.0)
        error = found.standard_error
        if (absent & (value == 0.0)).any():
            limits.append(_ABSENT)
        if absent.any():  # an error of 0 that is not one
            error = error.mask(absent) if isinstance(error, TABLES) else None
        return Result(
            estimate=found.value,
            standard_error=error,
            bias_bound=found.worst_bias if known else None,
            limits=(*limits, *self._limits_of_units()),
        )

    def _rows(self, names: Sequence[str]) -> Frame:
        chosen = list(dict.fromkeys(names))
        if self.n_rows <= _IN_MEMORY or self.derived.keys() & set(chosen):
            return self._read(chosen)
        return read_frame(self.folder, self.shards)[chosen]

    # ---- what the card says of the noise

    @property
    def _is_chain(self) -> bool:
        return bool(self.content["mechanism"].get("columns") == "chain")

    @property
    def _reference(self) -> Mapping[str, Any]:
        """The reference of the noise; a mechanism with channels of its own may have none."""
        return self.content["mechanism"].get("reference", {"kind": "none"})

    def _has_channel(self, name: str) -> bool:
        """Return whether the card gives a column's channel on levels, which may be chosen by the level of another column."""
        column = self._column(name)
        parent = column.get("parent")
        return (
            "levels" in column
            and bool({"channel", "channels"} & set(column))
            and (parent is None or self._levels(parent) is not None)
        )

    def _keeps_distribution(self, name: str) -> bool:
        """Return whether a column's released values have the distribution of its original ones."""
        return self._is_kept(name) or self._n_reference is not None

    def _is_joint(self, *names: str) -> bool:
        """Return whether released columns depend on each other as the original ones do: kept ones, and those of one chain or edge."""
        private = {name for name in names if not self._is_kept(name)}
        if not private:
            return True
        mechanism = self.content["mechanism"]
        if self._is_chain:
            return self._keeps_distribution(names[0]) and set(names) - private <= {
                self._reference.get("by")
            }
        return len(private) == len(set(names)) == 2 and private in [
            set(edge) for edge in mechanism.get("edges", ())
        ]

    def _no_dependence(self, question: str, *names: str) -> SpecError:
        """Return the refusal of a question about how columns depend on each other, with the reason of the first that answers none."""
        where = f"{question}({', '.join(names)})"
        for name in names:
            parent = self._column(name).get("parent")
            if parent is None or self._levels(name) is None:
                continue
            what = f"along the tree the noise of {name!r} depends on the released {parent!r}"
            if self._levels(parent) is None:
                why, use = "which has no levels", f"declare levels of {parent!r}"
            else:
                why = "so only its table with this column is kept"
                use = f"ask for {parent!r} in place of the other column"
            use = f"{use}, or release with the mechanism `copula`"
            return SpecError(f"{what}, {why}", where, use)
        return SpecError(_KEPT_DISTRIBUTION, where, self.refusals["crosstab"][1])

    @property
    def _n_reference(self) -> float | None:
        """The number of rows that the reference is made of; None if it is not made of the table's own rows, but of earlier ones or of others."""
        reference = self._reference
        if reference["kind"] in _COUNTED:
            return float(self.n_rows) if self._counts else None
        fraction = reference.get("fraction")
        if fraction is None or not self.content["guarantee"]["unprotected"]["fraction"] > 0.0:
            return None
        kept = self.content["mechanism"].get(
            "reference_share", 1.0
        )  # a sample of a chain's records
        return float(self.n_rows * kept * fraction / (1.0 - fraction))

    @property
    def _n_counted(self) -> float | None:
        return float(self.n_rows)  # of a reference that is noisy counts

    @property
    def _counts(self) -> list[tuple[int, float]]:
        """How many vectors were counted at a time for the reference, and the standard deviation of their noise, in their order."""
        events = self.content["accounting"]["events"].get("events", ())
        return [
            (event["count"], event.get("sigma") or math.sqrt(2.0) * event["scale"])
            for event in events
            if event["kind"] in _CENTRAL
        ]

    def _find_deviation(self, names: Sequence[str]) -> float | None:
        """Return the standard deviation of a noisy count in the reference's table of one or two columns of levels; None if the card does not tell."""
        kind, accounting = self._reference["kind"], self.content["accounting"]
        if kind == "histogram" and len(names) == 1:
            changes = 2 if self.content["guarantee"]["adjacency"] == "replace-one" else 1
            sensitivity = math.sqrt(2.0) * changes * int(accounting["rows_per_unit"])
            return sensitivity / float(accounting["epsilon_reference"][names[0]])
        if kind != "tree" or len(names) > 2:
            return None
        n_columns = sum(
            column["role"] == "privatised" for column in self.content["columns"].values()
        )
        # one-way tables, all pairs if more than one, edges
        first, *pairs = (deviation for _, deviation in self._counts[-min(n_columns, 3) :])
        return first if len(names) == 1 else 1.0 / math.hypot(*(1.0 / each for each in pairs))

    def _points(self, *names: str) -> Points:
        """Return the released values of columns whose own, or joint, distribution is kept."""
        private = self._list_private(names)
        if not private:
            return super()._points(*names)
        levels, cells, rank_noise = self._level_map(private), None, {}
        if len(levels) == len(names) <= 2:
            # a point for each level, or pair of levels, with its number of released rows
            outcomes = Outcomes(columns=tuple(names), levels=tuple(levels.values()))
            points = Points(
                frame=self._list_cells(names).astype(object),
                weights=outcome_counts(self._rows(names), outcomes),
                n_rows=float(self.n_rows),
                sampling=1.0,
                levels=levels,
                limits=self._limits_of_units(),
            )
            if (deviation := self._find_deviation(names)) is not None:
                cells = NoisyCells(frame=points.frame, variance=(deviation / self.n_rows) ** 2)
        else:
            points = super()._points(*names)
        reference = self._reference["kind"]
        counted, has_numbers = reference in _COUNTED, len(levels) < len(private)
        references = {name: self._column(name).get("reference", {}) for name in private}
        spreads = has_numbers and not counted
        of_numbers = [references[name] for name in private if name not in levels]
        is_told = all("spread_rank_at_most" in each for each in of_numbers)
        if not counted:
            limits = [_REFERENCE, *([_TOLD_SPREAD if is_told else _SPREAD] if spreads else [])]
        elif cells is not None:
            limits = [_TOLD_REFERENCE]
        elif reference == "histogram" and names[0] not in levels:
            limits = [_NOISY_RANKS]
            # the share of a range: its two ends take a count each from every vector of counts
            most = max(math.sqrt(2.0 * count) * deviation for count, deviation in self._counts)
            rank_noise = {names[0]: most / self.n_rows}
        else:
            limits = [_NOISY_REFERENCE]
        if has_numbers and counted and len(private) > 1:
            limits.append(_CELLS)
        lost = max(_count_beyond(each) for each in references.values())
        kept = any("kept" in each for each in references.values())
        return replace(
            points,
            levels={name: points.levels[name] for name in points.levels if name not in private}
            | dict(levels),
            sampling=1.0 / self.n_rows + 1.0 / (self._n_reference or math.inf),
            rank_errors={
                name: each["rank_error_at_most"] + each.get("spread_rank_at_most", 0.0)
                for name, each in references.items()
                if each
            },
            bounds=self._bounds(names),
            noise=None if cells is None else lambda _: cells,
            rank_noise=rank_noise,
            held_out=self._find_held_out(names[0], points) if len(names) == 1 else None,
            lost=lost / self.n_rows,
            biased=counted and cells is None and not kept,
            spread=spreads and not is_told,
            limits=(*limits, *points.limits),
        )


def _choose(estimate: Callable[[bool], Estimate]) -> Estimate:
    """Return the unbiased estimate, if the channel determines it; but the nearest one where its intervals are less than half as wide."""
    near = estimate(True)
    try:
        exact = estimate(False)
    except SpecError:
        return near
    of_exact, of_near = (
        find_half(found.standard_error, found.worst_bias) for found in (exact, near)
    )
    return near if 2.0 * of_near < of_exact else exact


def _count_beyond(reference: Mapping[str, Any]) -> float:
    """Return how many rows may lie beyond the blocks that a noisy reference kept."""
    sides = reference.get("beyond", {}).values()
    most = (float(side["count"] + _SURE * side["standard_deviation"]) for side in sides)
    return sum(max(0.0, each) for each in most)
