"""Distribution-invariant privatisation as a job: every released row is randomised on its own, after one barrier for the reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from dpdask.codec import LevelCodec
from dpdask.documents import Document
from dpdask.engine import randomise, release
from dpdask.engine.compute import Progress
from dpdask.engine.randomise import Staged
from dpdask.engine.shuffle import lay_out_rows, shard_rows
from dpdask.engine.work import TableWork, table_work
from dpdask.errors import DataError, SpecError
from dpdask.io.fragments import InputTable, takes_in
from dpdask.io.storage import Folder, absolute_url
from dpdask.jobs.kinds.kind import Expected, Fitted, Terms
from dpdask.kernels.rank import MAX_EPSILON, MIN_EPSILON
from dpdask.mechanisms.dip.card import release_card
from dpdask.mechanisms.dip.chain import LaplaceRanks, RankRandomiser
from dpdask.mechanisms.dip.chain_fit import check_rank_costs, rank_mechanisms
from dpdask.mechanisms.dip.fit import ChannelKind, Cost, fit_dip
from dpdask.mechanisms.dip.fitted import FittedRelease
from dpdask.mechanisms.dip.release import ColumnMechanism, RankMechanism
from dpdask.mechanisms.dip.tree_spending import TreeSpending
from dpdask.mechanisms.spending import Spending, spend
from dpdask.privacy import Budget, guarantee_text
from dpdask.privacy.audit import channel_epsilon, rank_epsilon, shown_weights, within_digits
from dpdask.privacy.coverage import Uncovered
from dpdask.privacy.events import Composed
from dpdask.privacy.order import RowOrder
from dpdask.references import (
    Chain,
    Distribution,
    Histogram,
    Holdout,
    Known,
    LevelDistribution,
    Public,
    RankDistribution,
    Reference,
    Tree,
    held_out,
    uncovered_by,
)

N_KNOTS = 2**10
WRITE = ("write: randomise each fragment and stage its shards",)


class Dip(Document):
    """Distribution-invariant privatisation.

    Attributes
    ----------
    reference
        `holdout`, `histogram`, `public` or `known`, each column by its own margin; `chain`, all columns jointly; or `tree`,
        the pairs of columns that depend most on each other. There is no default, because it decides who is protected.
    channel
        `laplace`: as published. `laplace-calibrated`: the same noise, as small as ε allows. `optimal`: the invariant
        ε-private channel of least expected cost.
    cost
        What the optimal channel minimises, by column: `value`, `rank`, `zero-one`, or a matrix over the levels.
    weights
        How ε is shared among the privatised columns; equally if not given.
    """

    kind: Literal["dip"]
    reference: Annotated[Holdout | Public | Known | Histogram | Chain | Tree, Field(discriminator="kind")]
    channel: ChannelKind = "laplace"
    cost: dict[str, Cost] | None = None
    weights: dict[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DipKind:
    """A DIP job's `Kind`; made by `of`.

    Attributes
    ----------
    spec
        The mechanism as the job writes it.
    terms
        What the job says beside it.
    reference
        The spec's, its path made absolute.
    spending
        How ε is spent on the reference and on each column of a row.
    """

    spec: Dip
    terms: Terms
    reference: Reference
    spending: Spending | TreeSpending

    @classmethod
    def of(cls, spec: Dip, terms: Terms) -> DipKind:
        """Return the kind of a DIP job.

        Raises
        ------
        SpecError
            If the mechanism fits neither the budget, nor the schema, nor the output.
        """
        check_budget(terms.budget)
        reference = _placed(spec.reference, terms)
        kind = cls(spec=spec, terms=terms, reference=reference, spending=spend(terms.budget, reference, terms.schema.privatised, spec.weights))
        check_channel(spec)
        kind._check_epsilons()
        kind._check_reference()
        return kind

    def _check_epsilons(self) -> None:
        if self.spec.channel == "optimal":
            return  # on bins: no rank noise
        columns = self.terms.schema.columns
        for name, epsilon in self.spending.row.items():
            by_rank = isinstance(self.reference, Chain) or not columns[name].has_levels
            if by_rank and not MIN_EPSILON <= epsilon <= MAX_EPSILON:
                kind = "chain's" if isinstance(self.reference, Chain) else columns[name].kind
                what = f"a {kind} column takes an ε in [{MIN_EPSILON:g}, {MAX_EPSILON:g}]"
                raise SpecError(what, f"column {name!r}", "change privacy.epsilon, or its division by mechanism.weights")

    def _check_reference(self) -> None:
        if isinstance(self.reference, Chain):
            self.reference.check(self.terms.schema, self.terms.budget.unit_column)
            check_rank_costs(self.spec.cost or {}, self.terms.schema.privatised, self.spec.channel)
        if isinstance(self.reference, Known):
            privatised = self.terms.schema.privatised
            for name in privatised:
                if name not in self.reference.columns:
                    raise SpecError("has no declared distribution", f"column {name!r}", "add it to mechanism.reference.columns")
            for name in self.reference.columns:
                if name not in privatised:
                    raise SpecError("is not a privatised column", f"mechanism.reference.columns.{name}", "remove it")

    @property
    def event(self) -> Composed:
        """A noisy histogram of each column, if there is one, and the rows' own releases."""
        return self.spending.events(self.terms.budget)

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """The hold-out, if there is one."""
        return uncovered_by(self.reference)

    @property
    def order(self) -> RowOrder:
        """The order of the released rows."""
        return self.terms.order

    @property
    def protected(self) -> str:
        """Who is covered, in words: the reference decides."""
        return self.reference.protected

    @property
    def unprotected(self) -> str:
        """Who is not, in words."""
        return self.reference.unprotected

    @property
    def guarantee(self) -> str:
        """The promise in words."""
        return guarantee_text(self.terms.budget, self.protected, self.unprotected, self.order, everyone=not self.uncovered)

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        return f"{', '.join(self.terms.schema.privatised)} randomised by the {self.spec.channel} channel"

    @property
    def fraction(self) -> float | None:
        """The hold-out's fraction, or None without a hold-out."""
        return held_out(self.reference)

    @property
    def n_rows_private(self) -> bool:
        """False: rows are released one by one, so everybody can count them."""
        return False

    def check(self, types: pa.Schema, secrets: Folder) -> None:
        """Check a table's Arrow types against the declared domains; nothing is read or written.

        Raises
        ------
        DataError, SpecError
            If they do not fit.
        """
        self._work(types, secrets)

    def _work(self, types: pa.Schema, secrets: Folder, fitted: Fitted | None = None) -> TableWork:
        work = table_work(types, self.terms.schema, self.reference, secrets, self.terms.budget.unit_column)
        if fitted is None or work.unit is None:
            return work
        return dataclasses.replace(work, unit=dataclasses.replace(work.unit, bounds_sha256=fitted.bounds_sha256))

    def expect(self, table: InputTable, rows_per_shard: int) -> Expected:
        """Return what a run on a table would do; no row is read."""
        stages = self._stages(table.n_rows is None)
        warnings = self._warnings(table.n_rows)
        if table.n_rows is None:
            return Expected(stages=stages, n_rows=None, n_shards=None, warnings=warnings)
        per_shard = shard_rows(self.terms.schema.released(table.schema), rows_per_shard, self.order)
        bounded = self.terms.budget.unit_column is not None  # then how many rows the units have decides, and no footer tells
        return Expected(
            stages=stages,
            n_rows=None if bounded else round(table.n_rows * (1 - (self.fraction or 0.0))),
            n_shards=most_shards(table.n_rows, None if bounded else self.fraction, len(table.fragments), per_shard),
            warnings=warnings,
        )

    def _warnings(self, n_rows: int | None) -> tuple[str, ...]:
        return self.reference.warnings() if isinstance(self.reference, Chain) else ()

    def _stages(self, uncounted: bool) -> tuple[str, ...]:
        columns = ", ".join(self.terms.schema.privatised)
        if isinstance(self.reference, Chain):
            return (*self._unit_stages(), *self.reference.stages(columns, uncounted=uncounted), *WRITE)
        stages = self._unit_stages()
        if isinstance(self.reference, Holdout):
            stages.append(f"survey: read {columns}; choose the hold-out; its distribution, merged in a tree")
        elif isinstance(self.reference, Histogram):
            stages.append(f"survey: read {columns}; count all rows in public cells")
        elif uncounted:
            stages.append(f"survey: read {columns}; count the rows")
        if isinstance(self.reference, Public):
            stages.append(f"reference: read {columns} of the public table; its distribution, merged in a tree")
        source = "the declared reference" if isinstance(self.reference, Known) else "the reference"
        stages.append(f"fit: {source} and each column's channel, on the driver, written once")
        return (*stages, *WRITE)

    def _unit_stages(self) -> list[str]:
        unit = self.terms.budget.unit_column
        if unit is None:
            return []
        return [f"units: read {unit.column} and the kept columns; choose at most {unit.max_rows} rows of each {unit.column}, by a keyed hash"]

    def fit(self, table: InputTable, secrets: Folder, charge: Callable[[], None], progress: Progress | None, *, insecure: bool) -> Fitted:
        """Compute the reference and fit the release: the barrier before any row is randomised.

        Raises
        ------
        DataError, SpecError
            If a value violates the schema, no row would be released, or the reference does not fit.
        BudgetError
            From `charge`.

        Privacy
        -------
        Exact statistics of the hold-out, or of all rows, are on the driver before `charge`; noise is drawn after it.
        """
        work = release.bound_units(table, self._work(table.schema, secrets), progress)
        found = release.survey_input(table, work, progress)
        if sum(found.n_released) == 0:
            raise DataError("no row would be released", self.terms.input_path, "lower mechanism.reference.fraction, or check the input")
        public = self.reference.path if isinstance(self.reference, Public | Chain) else None
        source = found if public is None else release.survey_public(public, self.terms.schema, work, progress)
        charge()
        assert isinstance(self.spending, Spending)
        fitted = release.fit_release(
            self.reference,
            work,
            source.statistics,
            self.spending,
            self.terms.budget.adjacency,
            self.spec.channel,
            self.spec.cost,
            insecure=insecure,
        )
        return written(fitted, work, found.n_released)

    def write(
        self, table: InputTable, fitted: Fitted, secrets: Folder, publish: Folder, actions: Folder, rows_per_shard: int, progress: Progress | None
    ) -> Staged:
        """Stage every shard and return them by name; doing it twice changes nothing.

        Raises
        ------
        DataError, InputError, TemporaryError
            The first failure; what is staged stays.
        """
        work = self._work(table.schema, secrets, fitted)
        tasks = lay_out_rows(table.fragments, fitted.n_released, rows_per_shard, work.released, self.order, work.key())
        return randomise.write_all(tasks, work, fitted.release_sha256, publish, actions, progress)

    def card(self, table: InputTable, fitted: Fitted, secrets: Folder, *, insecure: bool) -> bytes:
        """Return the release card: the same release, the same bytes."""
        return release_card(
            name=self.terms.name,
            budget=self.terms.budget,
            reference=self.reference,
            channel=self.spec.channel,
            schema=self.terms.schema,
            codecs=self._work(table.schema, secrets).codecs,
            spending=self.spending,
            release=release.load_release(secrets, fitted.release_sha256),
            insecure=insecure,
            released_share=sum(fitted.n_released) / table.n_rows if table.n_rows else None,
            n_rows=table.n_rows,
            order=self.order,
        )

    def audit(self, types: pa.Schema, secrets: Folder, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return for each privatised column its `claimed` part of ε, its exact ε* and the `reference` that this holds for.

        That is the released channel where the job is released, the declared distribution, or a uniform one.
        """
        work = self._work(types, secrets)
        return self._released(card) or self._fitted(work)

    def _released(self, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return the audit of a finished job's own channels, from its card; empty if it is not released, or has others."""
        if card is None or "columns" not in card:
            return {}
        columns, found = card["columns"], {}
        for name, claimed in self.spending.row.items():
            drawn = columns[name].get("channel") or columns[name].get("rank_channel")
            if drawn is None:
                return {}
            epsilon = within_digits(channel_epsilon(shown_weights(drawn)), claimed)
            found[name] = {"claimed": claimed, "epsilon_exact": epsilon, "reference": "the released channel"}
        return found

    def _fitted(self, work: TableWork) -> dict[str, dict[str, Any]]:
        if isinstance(self.reference, Chain):
            return self._ranks()
        source = "the declared distribution" if isinstance(self.reference, Known) else "a uniform stand-in"
        references = {name: self._stand_in(work, name) for name in work.codecs}
        claims = self.spending.row
        fitted = fit_dip(references, work.codecs, claims, self.spec.channel, self.spec.cost)
        return {name: {"claimed": claims[name], "epsilon_exact": _exact(found), "reference": source} for name, found in fitted.columns.items()}

    def _ranks(self) -> dict[str, dict[str, Any]]:
        claims, source = self.spending.row, "ranks, which are randomised alike for every reference"
        found = rank_mechanisms(claims, self.spec.channel)
        return {name: {"claimed": claims[name], "epsilon_exact": _exact(each), "reference": source} for name, each in found.items()}

    def _stand_in(self, work: TableWork, name: str) -> Distribution:
        codec = work.codecs[name]
        if isinstance(self.reference, Known):
            return self.reference.distribution(codec)
        if isinstance(codec, LevelCodec):
            return LevelDistribution(np.full(codec.n_levels, 1.0 / codec.n_levels))
        low, high = codec.bounds or (0.0, float(N_KNOTS))
        return RankDistribution(np.linspace(low, high, N_KNOTS + 1), np.linspace(0.0, 1.0, N_KNOTS + 1), 0.0)


def check_budget(budget: Budget, *, spends_delta: bool = False) -> None:
    """Check that a release row by row can keep what is promised.

    Raises
    ------
    SpecError
        If a δ is promised that the reference does not spend, or that nobody learns whether a row is there.
    """
    if budget.delta and not spends_delta:
        raise SpecError("distribution-invariant privatisation is pure ε and spends no δ", "privacy.delta", "set it to 0, or take the reference tree")
    if budget.adjacency != "replace-one":
        raise SpecError(
            "distribution-invariant privatisation releases one row for each row, so it cannot hide that a row is there",
            "privacy.adjacency",
            "set it to replace-one",
        )


def check_channel(spec: Dip) -> None:
    """Check that a cost has a channel that minimises it.

    Raises
    ------
    SpecError
        If it has none.
    """
    if spec.cost and spec.channel != "optimal":
        raise SpecError("a cost belongs to the optimal channel", "mechanism.cost", "set mechanism.channel: optimal, or remove it")


def written(fitted: FittedRelease, work: TableWork, n_released: tuple[int, ...]) -> Fitted:
    """Write a fitted release beside the run key and return what the barrier leaves."""
    bounds_sha256 = work.unit.bounds_sha256 if work.unit is not None else ""
    return Fitted(release_sha256=release.write_release(fitted, work.secrets), bounds_sha256=bounds_sha256, n_released=n_released)


def _placed(reference: Reference, terms: Terms) -> Reference:
    """Return the reference with its path made absolute; a public table is an input too, so the output may not lie in it."""
    if not isinstance(reference, Public | Chain) or held_out(reference) is not None:
        return reference
    if reference.path is None and isinstance(reference, Chain):
        raise SpecError("a chain takes its records from a hold-out or from a public table", "mechanism.reference", "give fraction, or path")
    if reference.path is None:
        raise SpecError("the key 'mechanism.reference.path' is missing", terms.name, "add it")
    url = absolute_url(reference.path, terms.base)
    if takes_in(url, terms.output_url):
        raise SpecError("the output lies inside the input, where the next run would read it", "output.path", "choose another folder")
    private = absolute_url(terms.input_path, terms.base)
    if takes_in(url, private) or takes_in(private, url):
        what = "the public table and the private one are in each other, so rows that are to be protected would be their own reference"
        raise SpecError(what, "mechanism.reference.path", "name another table")
    return reference.model_copy(update={"path": url})


def most_shards(n_rows: int, fraction: float | None, n_fragments: int, per_shard: int) -> int:
    """Return how many shards `lay_out` makes at most; with a hold-out, but for a chance of exp(-40) (Hoeffding).

    Two neighbouring tasks hold more than a shard together, or read more than four shards' rows, so there are fewer than
    twice as many tasks as that fills; cutting the large ones adds at most one shard for each full one.
    """
    most = n_rows if fraction is None else min(n_rows, math.ceil(n_rows * (1 - fraction) + math.sqrt(20 * n_rows)))
    return min(n_fragments, 2 * -(-most // per_shard) + 2 * -(-n_rows // (4 * per_shard))) + most // per_shard


def _exact(mechanism: ColumnMechanism | RankRandomiser) -> float:
    return rank_epsilon(mechanism.noise) if isinstance(mechanism, RankMechanism | LaplaceRanks) else channel_epsilon(mechanism.channel.weights)
