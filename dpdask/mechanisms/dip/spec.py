"""Distribution-invariant privatisation: its specification, and what it promises whatever its reference is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from dpdask.archive import Json, Named
from dpdask.arrays import freeze_class
from dpdask.channels import window_epsilon
from dpdask.codec import Codec
from dpdask.computed import View
from dpdask.documents import suggest
from dpdask.domains import MAX_LEVELS
from dpdask.errors import SpecError
from dpdask.kernels.rank import MAX_EPSILON, MIN_EPSILON
from dpdask.kernels.window import read_window
from dpdask.mechanisms.card import CoveredRows, Section, tell_domain, tell_numbers
from dpdask.mechanisms.expectations import (
    TAILS,
    CellSearch,
    describe_kept,
    describe_needed_rows,
    describe_spread,
    warn_of_little,
    warn_of_noisy_references,
)
from dpdask.mechanisms.mechanism import Columns, Description, Mechanism, Sentences, Spec, Spending
from dpdask.privacy import Budget, guarantee_text, split_epsilon
from dpdask.privacy.audit import channel_epsilon, read_weights, within_digits
from dpdask.privacy.budget import order_text
from dpdask.privacy.events import (
    Composed,
    DiscreteLaplace,
    LocalRelease,
    RowOrder,
    Uncovered,
    round_down,
    round_up,
    round_up_sum,
    to_dict,
)
from dpdask.references import Chain, Histogram, Holdout, Known, Public, Tree
from dpdask.references.reference import TableReference
from dpdask.rules import describe_rules
from dpdask.schema import Schema
from dpdask.stats.statistic import Statistic

N_BINS = 48  # of ranks, for the optimal channel

_CONTINUED = "none of the rows of this release; the rows of earlier releases, to which the reference was fitted, are protected as their own cards say"
_FOLLOWED = (
    "the rows that release 0 held out: no ε covers them, this release follows them too, and what it reveals of them adds to what other releases "
    "reveal; no row of this release was held out"
)

ChannelKind = Literal["laplace", "laplace-calibrated", "optimal", "optimal-unbiased"]


def _as_tuples(value: object) -> object:
    return (
        tuple(tuple(row) if isinstance(row, list) else row for row in value)
        if isinstance(value, list)
        else value
    )


Cost = (
    Literal["value", "rank", "zero-one"]
    | Annotated[tuple[tuple[float, ...], ...], BeforeValidator(_as_tuples)]
)


class DipSpec(Spec):
    """Distribution-invariant privatisation."""

    kind: Literal["dip"] = "dip"
    reference: Annotated[
        Holdout | Public | Known | Histogram | Chain | Tree, Field(discriminator="kind")
    ]
    """`holdout`, `histogram`, `public` or `known`, each column by its own marginal distribution;
    `chain`, all columns jointly; or `tree`, the pairs of columns that depend most on each other.
    There is no default, because it decides who is protected.
    """
    channel: ChannelKind = "laplace"
    """`laplace`: as published. `laplace-calibrated`: the same noise, as small as ε allows.
    `optimal`: the invariant ε-private channel of least expected cost; of more than 100 categories
    one that keeps nearly as many values as any. `optimal-unbiased`: the best of those whose
    expected released value is linear in the original value; for levels that are numbers or dates,
    each column by its own marginal distribution.
    """
    cost: dict[str, Cost] | None = None
    """What the optimal channel minimises, by column: `value`, `rank`, `zero-one`, or a matrix over
    the levels.
    """
    weights: dict[str, float] | None = None
    """How ε is shared among the privatised columns; equally if not given."""


def check_costs(given: Mapping[str, Cost], columns: Collection[str], channel: ChannelKind) -> None:
    """Check that costs are of privatised columns, and have a channel that minimises them."""
    for name in given:
        where = f"`cost.{name}`"
        if name not in columns:
            raise SpecError(
                "is not a privatised column", where, suggest(name, columns, "remove it")
            )
        if channel != "optimal":
            what = f"a cost belongs to the channel optimal, not to {channel}"
            raise SpecError(what, where, "set `channel` to optimal, or remove it")


@freeze_class
class DipMechanism(Mechanism):
    """What releases row by row have in common, whatever the structure of their reference."""

    spec: DipSpec
    budget: Budget

    releases_rows: ClassVar = True
    keeps_rules: ClassVar = frozenset(("allow", "derived"))

    def check_parameters(self) -> None:
        """Check the budget, the costs and the reference."""
        if self.budget.delta and not self.reference.spends_delta:
            what = f"distribution-invariant privatisation spends no δ with this reference, but δ is {self.budget.delta:g}"
            raise SpecError(what, "`delta`", "set it to 0, or take the reference tree")
        if self.budget.adjacency != "replace-one":
            what = "distribution-invariant privatisation releases one row for each row, so it cannot hide that a row is there"
            raise SpecError(what, "`adjacency`", "set it to replace-one")
        self.reference.check(self.schema, self.budget.unit_column)
        check_costs(self.spec.cost or {}, self.schema.privatised, self.spec.channel)
        if self.spec.channel == "optimal-unbiased":
            self._check_unbiased()
        if self.spec.channel != "optimal":
            self._check_numbers()
        self.check_epsilons()

    def _check_unbiased(self) -> None:
        """Check that every privatised column has a mean that its channel can keep."""
        if self.reference.structure != "columns":
            what = f"optimal-unbiased randomises each column on its own, but the reference {self.reference.kind} releases columns jointly"
            raise SpecError(what, "`channel`", "set it to optimal, or take another reference")
        for name in self.schema.privatised:
            column, where = self.schema.columns[name], f"column {name!r}"
            if column.kind != "discrete":
                what = "the channel optimal-unbiased needs levels that are numbers or dates, because it preserves their mean"
                mend = "declare it discrete with such levels, or set `channel` to optimal"
                raise SpecError(what, where, mend)
            if column.nulls == "level":
                what = "null is a level without a value, so the channel optimal-unbiased cannot preserve the mean"
                mend = "declare `nulls: refuse`, or set `channel` to optimal"
                raise SpecError(what, where, mend)

    def _check_numbers(self) -> None:
        """Check that no column has so many levels that a matrix of them cannot be held."""
        for name in self.schema.privatised:
            if len(self.schema.columns[name].listed) > MAX_LEVELS:
                what = f"the channel {self.spec.channel} takes at most {MAX_LEVELS:,} levels of a column"
                mend = "set `channel` to optimal, or list the commonest, and let `other` stand for the rest"
                raise SpecError(what, f"column {name!r}", mend)

    def check_epsilons(self) -> None:
        """Check that the ε of each column can be spent."""
        if self.spec.channel == "optimal":
            return  # on bins: no rank noise
        for name, epsilon in self.spending.row.items():
            if self.is_by_rank(name) and not MIN_EPSILON <= epsilon <= MAX_EPSILON:
                what = f"its part of ε is {epsilon:g}, but rank noise needs an ε in [{MIN_EPSILON:g}, {MAX_EPSILON:g}]"
                mend = "change `epsilon`, or its division by `weights`"
                raise SpecError(what, f"column {name!r}", mend)

    def is_by_rank(self, name: str) -> bool:
        """Return whether the ranks of a column are randomised, not its levels."""
        return not self.schema.columns[name].has_levels

    @property
    def reference(self) -> Holdout | Public | Known | Histogram | Chain | Tree:
        """Where the reference distribution comes from."""
        return self.spec.reference

    @cached_property
    def spending(self) -> Spending:
        """How ε is divided between the reference and the columns of a row.

        Notes
        -----
        ε = Σ ε_reference + max_rows · Σ ε_row: the unit is in every histogram with all its released
        rows (sensitivity 2 · max_rows), and each of them is randomised on its own.
        """
        columns, weights, n = self.schema.privatised, self.spec.weights, self.budget.rows_per_unit
        of_reference, of_rows = self.reference.split(self.budget.epsilon)
        row = split_epsilon(round_down(Fraction(of_rows) / n), columns, weights)
        measured = {}
        if self.reference.is_measured_by_column and not self.continued:
            measured = split_epsilon(of_reference, columns, weights)
        return Spending(reference=measured, row=row, rows_per_unit=n)

    @property
    def row_total(self) -> float:
        """What one row's release may cost over all columns, rounded up."""
        return round_up_sum(self.spending.row.values())

    @cached_property
    def measurements(self) -> dict[str, DiscreteLaplace]:
        """The noisy histogram of each column, if there are any."""
        return self.reference.events(
            self.spending.reference,
            self.schema.columns,
            self.budget.adjacency,
            self.budget.rows_per_unit,
        )

    @property
    def spreads(self) -> bool:
        """Whether rows that share a number are released over the gap below it: where the reference is made of rows and not of noisy counts."""
        return self.reference.kind in ("holdout", "public", "chain")

    @cached_property
    def event(self) -> Composed:
        """A noisy histogram of each column, if there is one, and the rows' own releases."""
        return Composed(events=(*self.measurements.values(), self.row_event(self.row_total)))

    def row_event(self, epsilon: float) -> LocalRelease:
        """Return the release of a unit's rows, of which each costs ε."""
        return LocalRelease(
            epsilon=epsilon, n=self.budget.rows_per_unit, unit=self.budget.unit_name
        )

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """The hold-out, if there is one."""
        return () if self.continued else self.reference.uncovered

    @property
    def fraction(self) -> float | None:
        """The probability with which a row is held out, or None."""
        return None if self.continued else self.reference.held_out

    @property
    def also_read(self) -> tuple[str, ...]:
        """The column of the groups, if there is one."""
        return self.reference.also_read

    @property
    def reference_rows(self) -> Literal["own", "public", "none"]:
        """Which rows are counted for the reference."""
        return "none" if self.continued else self.reference.rows

    @property
    def public_table(self) -> TableReference | None:
        """The public table, if a job names one."""
        reference = self.reference
        return (
            reference
            if isinstance(reference, TableReference)
            and reference.rows == "public"
            and reference.path is not None
            else None
        )

    def place_paths(self, place: Callable[[str, str], str]) -> Self:
        """Return the mechanism with the path of its public table made absolute; see `Mechanism.place_paths`."""
        if self.reference_rows != "public":
            return self
        if self.public_table is None:
            what = "the reference rows come from a public table, and no path is given"
            raise SpecError(what, "`reference.path`", self.reference.path_hint)
        path = place("reference.path", str(self.public_table.path))
        reference = self.public_table.model_copy(update={"path": path})
        return replace(self, spec=self.spec.model_copy(update={"reference": reference}))

    def statistic(self, columns: Columns) -> Statistic[Any]:
        """Return what is counted over the reference rows."""
        return self.reference.statistic(columns.codecs)

    def accounting(self, release: Any) -> Json:
        """Return what was spent, for the card: never more than was promised, because every part was rounded down."""
        spending = self.spending
        exact = sum(map(Fraction, spending.reference.values()), Fraction(0))
        exact += spending.rows_per_unit * Fraction(release.epsilon)
        return {
            "composition": "sum over columns, and over the rows of a unit",
            "epsilon_exact": round_up(exact),
            "epsilon_reference": dict(spending.reference),
            "rows_per_unit": spending.rows_per_unit,
            "events": to_dict(self.event),
        }

    def audit_card(self, card: Named | None) -> dict[str, Json]:
        """Return the audit of a finished job's own channels, from its card; empty if there is none, or it shows no channels."""
        if card is None or "columns" not in card:
            return {}
        exact, claims = {}, self.spending.row
        for name, claimed in claims.items():
            column = card["columns"][name]
            drawn = column.get("channel") or column.get("rank_channel")
            if drawn is None and "window" not in column:
                return {}
            found = (
                channel_epsilon(read_weights(drawn))
                if drawn is not None
                else window_epsilon(read_window(column["window"]))
            )
            exact[name] = within_digits(found, claimed)
        return list_audit(claims, exact, "the released channel")

    def audit_columns(self, mechanisms: Named, reference: str) -> dict[str, Json]:
        """Return the audit of fitted columns: of the noise on their ranks, or of their channels."""
        exact = {name: each.exact_epsilon for name, each in mechanisms.items()}
        return list_audit(self.spending.row, exact, reference)

    @property
    @abstractmethod
    def description(self) -> DipDescription:
        """What is said of it."""


def list_audit(
    claims: Mapping[str, float], exact: Mapping[str, float], reference: str
) -> dict[str, Json]:
    """Return what is claimed of each column and what holds, for the reference that is named."""
    return {
        name: {"claimed": claim, "epsilon_exact": exact[name], "reference": reference}
        for name, claim in claims.items()
    }


@freeze_class(kw_only=False)
class DipDescription(Description):
    """What is said of every release row by row."""

    mechanism: DipMechanism

    @property
    def protected(self) -> str:
        """Who is covered, in words: the reference decides."""
        if self.mechanism.continued:
            return "the values of all rows of this release"
        return self.mechanism.reference.protected

    @property
    def unprotected(self) -> str:
        """Who is not, in words."""
        reference = self.mechanism.reference
        if not self.mechanism.continued:
            return reference.unprotected
        return _FOLLOWED if reference.uncovered else _CONTINUED

    def guarantee(self, order: RowOrder) -> str:
        """Return the promise in words."""
        everyone, budget = not self.mechanism.reference.uncovered, self.mechanism.budget
        return guarantee_text(budget, self.protected, self.unprotected, order, everyone=everyone)

    @property
    def how(self) -> str:
        """What is done, in a few words."""
        return f"{', '.join(self.mechanism.schema.privatised)} randomised by the {self.mechanism.spec.channel} channel"

    def stages(self, columns: Columns) -> Sentences:
        """Return what a run does between the units' bounds and the commit, in words."""
        names = ", ".join(self.mechanism.schema.privatised)
        return (
            *self.mechanism.reference.stages(names),
            "write: randomise each fragment and stage its shards",
        )

    def cautions(self, columns: Columns, n_rows: int | None) -> Sentences:
        """Return what a steward should think of before a run."""
        bound = self.mechanism
        return (
            *bound.reference.warnings(),
            *warn_of_little(columns.codecs, bound.spending.row, bound.spec.channel),
            *warn_of_noisy_references(bound.measurements, n_rows),
        )

    def expectations(self, columns: Columns) -> Sentences:
        """Return how much a released row keeps of each column, and what wide bounds cost."""
        bound, codecs = self.mechanism, columns.codecs
        measured, unit, search = bound.measurements, bound.budget.unit_column, bound.search
        adaptive = [name for name, event in measured.items() if event.count > 1]
        return (
            *describe_kept(codecs, bound.spending.row, bound.spec.channel),
            *(describe_needed_rows(measured, unit) if unit is not None else ()),
            *(describe_spread(codecs) if bound.spreads else ()),
            *([f"{', '.join(adaptive)}: {TAILS}"] if adaptive else []),
            *(search.expectations if isinstance(search, CellSearch) else ()),
            *self._see(columns).expectations,
        )

    def _see(self, columns: Columns) -> View:
        """Return the columns as they were declared, and as the mechanism sees them."""
        return View.of(self.mechanism.declared, columns.types, joins=True)

    def section(
        self,
        release: Any,
        columns: Columns,
        *,
        n_rows: int | None,
        n_released: int | None,
        order: RowOrder,
    ) -> Section:
        """Return the mechanism's part of the release card.

        Privacy
        -------
        Holds parameters, the public domain, and each level column's channel. With a hold-out, the
        channel reveals the hold-out's frequencies (P·T = P), and the card says so. Knots of a
        continuous reference are never in it: with a hold-out they are rows' values. Along a tree
        all channels are functions of noisy tables, which have their own ε.
        """
        budget, unreleased = self.mechanism.budget, self.mechanism.fraction or 0.0
        of, guarantee = "rows", {}
        if budget.unit_column is not None:
            of = "units; for each, the rows beyond the bound are not released"
            if n_released is not None and n_rows:
                # public under replace-one, where the number of rows of a unit is; whole percents say no more than is needed
                guarantee["released_percent_of_rows"] = round(100 * (n_released / n_rows))
        reference = self.mechanism.reference
        shown = reference.model_dump(mode="json", exclude_none=True, exclude={"path"})
        return Section(
            budget=budget,
            text=self.guarantee(order),
            protected=CoveredRows(who=self.protected, fraction=1.0 - unreleased, of=of),
            unprotected=CoveredRows(who=self.unprotected, fraction=unreleased, of=of),
            mechanism={
                "kind": "dip",
                "channel": self.mechanism.spec.channel,
                **self.describe_joint(release),
                "reference": shown,
                **describe_rules(self.mechanism.declared),
            },
            columns=self._describe_all(release, columns),
            accounting=self.mechanism.accounting(release),
            order=order_text(order),
            public_rows=n_rows,
            guarantee=guarantee,
        )

    def _describe_all(self, release: Any, columns: Columns) -> dict[str, Json]:
        own, parts = self.describe_columns(release, columns), self.mechanism.spending.row
        shown = {
            name: {
                "role": "privatised",
                "epsilon": parts[name],
                **_describe_domain(self.mechanism.schema, columns.codecs[name]),
                **described,
            }
            for name, described in own.items()
        }
        unit, kept = self.mechanism.budget.unit_column, self.mechanism.schema.kept
        weights = () if unit is None or unit.weight is None else (unit.weight,)
        kept_parts = {name: {"role": "kept"} for name in (*kept, *weights)}
        return self._see(columns).describe(shown) | kept_parts

    @abstractmethod
    def describe_joint(self, release: Any) -> Json:
        """Return what the card says about the columns' joint distribution."""

    def describe_columns(self, release: Any, columns: Columns) -> dict[str, Json]:
        """Return what the card says about each fitted column, beside its domain and its part of ε."""
        return {
            name: {"epsilon_exact": each.epsilon, **each.shown}
            for name, each in release.columns.items()
        }

    def quality(self, release: Any) -> str:
        """Return nothing: ranks among rows alike, or given a parent, do not say how much of a value is kept."""
        return ""

    def warnings(self, release: Any, columns: Columns) -> Sentences:
        """Return none: the channels are functions of noisy tables."""
        return ()

    def n_expected(self, n_rows: int | None) -> int | None:
        """Return that it is not known before; see `Description.n_expected`."""
        return None


def _describe_domain(schema: Schema, codec: Codec) -> Json:
    """Return what the card says about a column's public domain."""
    declared = schema.columns[codec.name]
    outside = {"kind": declared.kind, "outside": declared.outside_in_words}
    if codec.has_levels:
        return codec.told | outside
    return tell_domain(declared, codec) | {"nulls": declared.nulls} | tell_numbers(codec) | outside
