"""What a mechanism is: a specification with the schema and the budget that it runs under, and what it fits.

A mechanism only describes: what it promises, what is counted, how noise is drawn from the counts,
and what is fitted to the result. `engine.fit` decides the order of these steps, so that no
mechanism can draw noise before it is charged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

import pyarrow as pa
from pydantic import BeforeValidator

from dpdask.archive import Archived, Json, Named
from dpdask.arrays import freeze_class
from dpdask.codec import Codecs, codec_for
from dpdask.computed import Computed
from dpdask.conditions import RuleKind
from dpdask.documents import Document, check_all, suggest
from dpdask.domains import MAX_LEVELS
from dpdask.errors import DataError, SpecError
from dpdask.mechanisms.card import Section
from dpdask.privacy import (
    COVERED,
    UNCOVERED,
    Budget,
    UnitColumn,
    delta_warnings,
    noisy_counts_text,
)
from dpdask.privacy.audit import audit_event
from dpdask.privacy.events import (
    CentralEvent,
    Composed,
    DiscreteLaplace,
    RowOrder,
    Uncovered,
    noises,
    round_up_sum,
)
from dpdask.privacy.noise import check_scale
from dpdask.references.histogram import check_bins
from dpdask.references.reference import TableReference
from dpdask.schema import Column, Schema, arrow_type
from dpdask.stats.statistic import Statistic
from dpdask.streams import Noise, Rng, RunKey, Stream, stream


class RowRelease(Protocol):
    """A fitted release that randomises every row on its own."""

    def to_bytes(self) -> bytes:
        """Return the release as bytes: the same release, the same bytes."""

    def types(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written, given the released columns of the table."""

    def few_valued(self, codecs: Codecs) -> list[str]:
        """Return which of the written columns have few distinct values."""

    def streams(self, key: RunKey, fragment_id: str) -> dict[str, Stream]:
        """Return the random stream of each private column on one part of the table, at its start."""

    def randomise(
        self, batch: pa.RecordBatch, codecs: Codecs, rngs: Mapping[str, Rng]
    ) -> pa.RecordBatch:
        """Return the released rows of a batch, in its order.

        Parameters
        ----------
        batch
            The private columns of some rows, and the columns that are also read.
        rngs
            What `streams` returned; each stream is advanced by the rows of the batch.
        """


class RecordRelease(Protocol):
    """A fitted release from which records are drawn; a function of noisy counts alone, so it may be published."""

    def to_bytes(self) -> bytes:
        """Return the release as bytes: the same release, the same bytes."""

    @property
    def schema(self) -> Schema:
        """The declared columns."""

    @property
    def types(self) -> pa.Schema:
        """The columns that are written."""

    @property
    def few_valued(self) -> list[str]:
        """Which of them have few distinct values."""

    def n_drawn(self, wanted: int | None) -> int:
        """Return how many records to draw: as many as wanted, or as many as the release says."""

    def condition(self, asked: Any) -> Any:
        """Return which records a text or a frame asks for, as `batches` takes it after the others."""

    def batches(
        self, start: int, n_rows: int, n_total: int, key: RunKey, part: str, *where: Any
    ) -> Iterator[pa.RecordBatch]:
        """Yield records: a function of the arguments.

        Parameters
        ----------
        start, n_rows, n_total
            The number of the first record, how many records, and how many all parts have together.
        """


class LinkedRelease(Protocol):
    """A fitted release from which persons and their rows are drawn, as tables that a key joins; it may be published."""

    block: ClassVar[int]  # how many persons are drawn together

    def to_bytes(self) -> bytes:
        """Return the release as bytes: the same release, the same bytes."""

    @property
    def tables(self) -> Mapping[str, pa.Schema]:
        """The columns that are written, by table."""

    @property
    def few_valued(self) -> list[str]:
        """Which of them have few distinct values."""

    def draw_block(self, block: int, n_total: int, key: RunKey) -> Mapping[str, pa.RecordBatch]:
        """Return the persons of a block and their rows: a function of the arguments."""


FittedRelease = RowRelease | RecordRelease | LinkedRelease


class RandomisedRows(Archived):
    """The base of DIP's fitted releases: which columns are written, and what each one's randomness comes from."""

    __slots__ = ()
    mechanism_id: ClassVar[str]
    columns: Named

    @property
    def epsilon(self) -> float:
        """An upper bound on the ε that a released row has cost."""
        return round_up_sum(mechanism.epsilon for mechanism in self.columns.values())

    def types(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written: the released columns of the table."""
        return released

    def few_valued(self, codecs: Codecs) -> list[str]:
        """Return which of them have few distinct values."""
        return [name for name, codec in codecs.items() if codec.has_levels]

    def streams(self, key: RunKey, fragment_id: str) -> dict[str, Stream]:
        """Return the random stream of each column on one fragment, at its start; see `RowRelease.streams`."""
        return {
            name: stream(key, f"{self.mechanism_id}/{name}", fragment_id) for name in self.columns
        }


Sentences = tuple[str, ...]  # for people

WHOLE_ROW = "(all columns of a row)"


class Spec(Document):
    """What users write of a mechanism, in a job or as arguments of the Python class; every mechanism has one, with its own `kind`."""

    @property
    def spends(self) -> bool:
        """Whether it spends a budget."""
        return True

    def narrow(self, schema: Schema) -> Schema:
        """Return the schema as the mechanism sees it."""
        return schema


@freeze_class
class Columns:
    """The columns of a table as a mechanism sees them."""

    types: pa.Schema  # the released columns and their plain Arrow types
    codecs: Codecs


@freeze_class
class Spending:
    """How a budget is divided: ε per released column and per noisy histogram.

    Gaussian measurements, and tables that share one budget, have no ε of their own and are not
    listed.
    """

    # For each privatised column, what its noisy histogram may cost the unit; empty if there are
    # none.
    reference: Mapping[str, float] = field(default_factory=dict)
    # For each privatised column, what one row's release may cost; empty if no row is released. All
    # are rounded down.
    row: Mapping[str, float] = field(default_factory=dict)
    # How many rows of a unit are released at most: the unit pays each column's row part so many
    # times.
    rows_per_unit: int = 1


class Search(Protocol):
    """A round of counts and noise that decides what the next one counts."""

    def statistic(self, columns: Columns) -> Statistic[Any]:
        """Return what is counted; all rows are checked."""

    def draw(self, counts: Any, columns: Columns, noise: Noise) -> Archived:
        """Draw the noise on the driver; see `Mechanism.draw`."""

    def read_drawn(self, data: bytes, columns: Columns) -> Archived:
        """Return noisy counts that an earlier driver kept; see `Mechanism.read_drawn`."""

    def list_counts(self, drawn: Any, columns: Columns) -> Iterable[pa.Table]:
        """Return the noisy counts as they are published; see `Mechanism.list_counts`."""

    def find(self, drawn: Any, columns: Columns) -> Any:
        """Return what `Mechanism.with_found` takes: post-processing of the noisy counts."""


@freeze_class(kw_only=False)
class Description(ABC):
    """What is said of a mechanism. Nothing has a default, so that none of it is left out in silence."""

    mechanism: Any

    # before a run, from the specification alone

    @property
    @abstractmethod
    def how(self) -> str:
        """What is done, in a few words."""

    @property
    @abstractmethod
    def protected(self) -> str:
        """Who is covered."""

    @property
    @abstractmethod
    def unprotected(self) -> str:
        """Who is not."""

    @abstractmethod
    def guarantee(self, order: RowOrder) -> str:
        """Return the promise, as the card gives it: a `Promise`, which is shown in parts, or a plain text."""

    # before a run, from the table's types

    @abstractmethod
    def stages(self, columns: Columns) -> Sentences:
        """Return what a run does between the units' bounds and the commit."""

    @abstractmethod
    def expectations(self, columns: Columns) -> Sentences:
        """Return what is to be expected of the release, in sentences: how much a row keeps, how large noise is."""

    @abstractmethod
    def cautions(self, columns: Columns, n_rows: int | None) -> Sentences:
        """Return what a steward should think of before a run; `n_rows` is None if it is not known or private."""

    @abstractmethod
    def n_expected(self, n_rows: int | None) -> int | None:
        """Return how many records a run writes, given the public number of rows; None if it is not known before."""

    # after the fit

    @abstractmethod
    def quality(self, release: Any) -> str:
        """Return one line on how good a release is, from the release alone; empty if it says nothing about that."""

    @abstractmethod
    def warnings(self, release: Any, columns: Columns) -> Sentences:
        """Return warnings about a fitted release for the steward alone: they may depend on rows without ε."""

    @abstractmethod
    def section(
        self,
        release: Any,
        columns: Columns,
        *,
        n_rows: int | None,
        n_released: int | None,
        order: RowOrder,
    ) -> Section:
        """Return the mechanism's part of the card, given the public number of rows and that of released rows, where they are known."""


@dataclass(frozen=True, kw_only=True)  # no slots: cached properties need a `__dict__`
class Mechanism(ABC):
    """A specification with the schema and the budget that it runs under."""

    spec: Any  # what the user wrote: in a job, or as arguments of the Python class
    schema: Schema  # the columns that it sees: without those that rules compute from others
    budget: Budget | None  # what is promised; None if the mechanism spends none
    # Whether a release that was fitted before is given further rows, all of them; only of
    # mechanisms that release rows.
    continued: bool = False
    # What the rounds before this one found, such as the cells of columns; None before, or if there
    # is nothing to find.
    found: Any = None
    # The columns as they are declared; given by `replace` alone.
    declared: Any = None

    releases_rows: ClassVar[bool]
    keeps_rules: ClassVar[frozenset[RuleKind]] = frozenset()
    counts_persons: ClassVar[bool] = False  # so that columns may belong to persons
    # whether a table of persons and one of their rows are released
    links_tables: ClassVar[bool] = False
    finds_levels: ClassVar[bool] = False  # whether it searches for levels that are not listed
    most_levels: ClassVar[int] = MAX_LEVELS  # of a column
    # whether the rows of a unit are chosen in a pass before the count; else the count bounds them
    bounds_rows: ClassVar[bool] = True
    has_model: ClassVar[bool] = False  # whether records can be drawn from what it fits
    # Whether that table's counts are made to sum to the number of rows, where it is public.
    fits_rows: ClassVar[bool] = False

    @property
    def expected_errors(self) -> dict[str, Any]:
        """What a plan tells of errors as numbers; nothing if it is told in sentences alone.

        `tables`, by `group`: which tables these are (`of`), the `sigma` of a count, and about how many
        persons noise alone has in wrong cells (`moved`), both in persons; `needed`: the least
        `epsilon` at which that is no more than the share `enough` of so many `persons`.
        """
        return {}

    def __post_init__(self) -> None:
        if not isinstance(self.schema, Schema):
            raise SpecError(
                "a Schema is expected",
                "`schema`",
                "give Schema.from_yaml(path) or Schema.from_dict(mapping)",
            )
        if self.declared is None:
            self._check_rules()
            computed = Computed.of(self.schema, joins=self.releases_rows)
            object.__setattr__(self, "declared", self.schema)
            object.__setattr__(self, "schema", computed.model(self.schema))
        self.schema.check_privatised("schema")
        if self.schema.discovered and not self.finds_levels:
            what = "its levels are not found yet"
            hint = "find them with `dpdask discover JOB --epsilon E`, or list them"
            raise SpecError(what, f"column {self.schema.discovered[0]!r}", hint)
        for name in self.schema.privatised:
            if self.schema.columns[name].constant and not self.counts_persons:
                what = "only persons with their rows have constant columns"
                hint = (
                    "remove `constant`, or set `persons: true` of the mechanism copula or marginals"
                )
                raise SpecError(what, f"column {name!r}", hint)
            if len(self.schema.columns[name].listed) > self.most_levels:
                what = f"this mechanism takes at most {self.most_levels:,} levels of a column"
                raise SpecError(
                    what,
                    f"column {name!r}",
                    "list the commonest, and let `other` stand for the rest",
                )
        unit = None if self.budget is None else self.budget.unit_column
        if unit is not None and (
            unit.column not in self.schema.columns
            or self.schema.columns[unit.column].role == "privatise"
        ):
            others = [
                name for name, column in self.schema.columns.items() if column.role != "privatise"
            ]
            hint = suggest(unit.column, others, "correct one of the two")
            raise SpecError(
                "the unit's column must be declared, and kept or dropped",
                f"`unit.column` {unit.column!r}",
                hint,
            )
        if unit is not None and unit.publish_counts:
            self._check_counts_published(unit)
        columns = self.declared.columns
        names = self.declared.privatised
        check_all(*(partial(_check_type, each, columns[each]) for each in names))
        self.check_parameters()

    def _check_rules(self) -> None:
        """Check that what is released can keep the rules between columns."""
        for number, rule in enumerate(self.schema.rules, 1):
            if not self.keeps_rules:
                what = "this mechanism keeps no rules between columns"
                raise SpecError(what, "schema, rules", "use the mechanism `copula`, or remove them")
            if rule.kind not in self.keeps_rules:
                what = "rows keep no such rule: each column is randomised on its own"
                hint = "list the pairs of levels that exist under `allow`, or use the mechanism `copula`"
                raise SpecError(what, f"schema, rule {number}", hint)

    def _check_counts_published(self, unit: UnitColumn) -> None:
        """Check that rows stand beside the published numbers, and that these tell no more than they say."""
        where = "`unit.publish_counts`"
        if not self.releases_rows:
            what = "no row is released that a number of rows could stand beside"
            raise SpecError(what, where, "leave it out, or take the mechanism dip")
        if unit.column not in self.schema.kept:
            what = f"without {unit.column!r} in the release, the number beside each row would tell which rows belong together"
            raise SpecError(what, where, f"keep {unit.column!r}, or leave it out")
        if unit.weight in self.schema.columns:
            what = f"the weights are released as {unit.weight!r}, and the table has such a column"
            raise SpecError(what, where, "rename the table's column, or leave it out")

    @property
    @abstractmethod
    def description(self) -> Description:
        """What is said of it."""

    @abstractmethod
    def check_parameters(self) -> None:
        """Check everything that needs no table."""

    # what it promises

    @property
    @abstractmethod
    def event(self) -> Composed:
        """What will happen: what the ledger is charged and the audit draws."""

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """The samples of rows that no ε covers; their draws are not named yet."""
        return ()

    @property
    def counted(self) -> tuple[tuple[CentralEvent, int], ...]:
        """The noise of the counts that a release publishes as its result, and of how many parts a count of 1 is; none if there are none."""
        return ()

    def find_counted(self, column: str, columns: Columns) -> tuple[CentralEvent, int] | None:
        """Return the noise of the table that tells the mean of a column with levels, and how many of its counts make the one of a level; None without such a table."""
        return None

    @property
    def spending(self) -> Spending:
        """The ε of each released column and of each noisy histogram."""
        return Spending()

    @property
    def n_rows_private(self) -> bool:
        """Whether the number of rows is private: then nothing before the noise depends on it, and an empty table is released like any other."""
        return False

    # what it reads

    @property
    def fraction(self) -> float | None:
        """The probability with which a row is held out, or None."""
        return None

    @property
    def also_read(self) -> tuple[str, ...]:
        """The kept columns that it reads beside the private ones."""
        return ()

    @property
    def reference_rows(self) -> Literal["own", "public", "none"]:
        """Which rows are counted: the table's own, those of a public table, or none."""
        return "own"

    @property
    def covers_any_frame(self) -> bool:
        """Whether a release can be given any frames, one batch each: nothing of it comes from their rows."""
        bounded = self.budget is not None and self.budget.unit_column is not None
        return self.releases_rows and (
            self.reference_rows == "public" or (self.reference_rows == "none" and not bounded)
        )

    def place_paths(self, place: Callable[[str, str], str]) -> Self:
        """Return the mechanism with the paths that it names made absolute.

        Parameters
        ----------
        place
            Returns the URL of a path, given the parameter that names it.
        """
        return self

    @property
    def public_table(self) -> TableReference | None:
        """The public table that a job names, if its rows are counted; None if it is given otherwise."""
        return None

    def with_rows(self, count: Callable[[], int | None]) -> Self:
        """Return the mechanism with its parameters that depend on a public number of rows fixed.

        Parameters
        ----------
        count
            Returns the number of rows if it is known; it may take a pass over the table.
        """
        return self

    # what it computes, in the order of `engine.fit`

    @abstractmethod
    def check(self, columns: Columns) -> None:
        """Check everything that needs the table's types, but no row."""

    @property
    def search(self) -> Search | None:
        """What is counted and drawn in a round before the last, such as to find the cells of columns; None in the last round.

        Privacy
        -------
        The noise of all rounds is fixed before the first one, and `event` lists it.
        """
        return None

    def with_found(self, found: Any) -> Self:
        """Return the mechanism of the next round, with what `search` found."""
        return replace(self, found=found)

    @abstractmethod
    def statistic(self, columns: Columns) -> Statistic[Any]:
        """Return what is counted; if `reference_rows` is not `own`, what checks the rows where they must be counted."""

    def check_counts(self, counts: Any, columns: Columns) -> None:  # noqa: B027 - most check nothing
        """Check the exact counts of the first round before anything is charged."""

    def draw(self, counts: Any, columns: Columns, noise: Noise) -> Archived | None:
        """Draw the noise on the driver and return the noisy counts, or None if the mechanism adds no central noise.

        Privacy
        -------
        `engine.fit` charges the ledger before, and keeps the result at once: it is never drawn
        twice.
        """
        return None

    def read_drawn(self, data: bytes, columns: Columns) -> Archived:
        """Return noisy counts that an earlier driver kept before it died."""
        raise NotImplementedError

    def list_counts(self, drawn: Any, columns: Columns) -> Iterable[pa.Table]:
        """Return noisy counts that are published beside the release, as `references.counts.COUNTS` has them; none where the release itself is all of them."""
        return ()

    @abstractmethod
    def fit(self, counts: Any, columns: Columns, key: RunKey) -> FittedRelease:
        """Return the fitted release.

        Parameters
        ----------
        counts
            What `draw` returned, or the exact counts if it draws nothing; None if nothing is
            counted.
        key
            The run's key, for what is drawn but is no noise.
        """

    @property
    @abstractmethod
    def release_type(self) -> type[Archived]:
        """The class of the fitted release."""

    def n_records(self, release: Any) -> int:
        """Return how many records a job writes; only of releases that are no rows."""
        raise NotImplementedError

    def find_written(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written, given the released columns of the table; they are those of the fitted release."""
        return released

    def audit(self, columns: Columns, card: Named | None) -> dict[str, Json]:
        """Return for each column that is released row by row its `claimed` and its exact ε*, as `epsilon_exact`, and the `reference` it holds for.

        If the ε* of a whole row is known beside those of its columns, it has an entry of its own,
        `WHOLE_ROW`.
        """
        return {}


def _check_type(name: str, column: Column) -> None:
    """Check that a column's domain fits its type, where the schema declares one; else the table's types are waited for."""
    if column.type is not None:
        try:
            codec_for(name, column, arrow_type(column.type))
        except DataError as error:
            raise SpecError(error.what, error.where, error.hint) from None


CONFIDENCE = 1 - 1e-6  # a false alarm in a million audits


def audit_mechanism(
    mechanism: Mechanism, columns: Columns, card: Named | None, *, n_runs: int = 20_000
) -> Json:
    """Return, for each column and each central measurement, what is claimed and what is found.

    Parameters
    ----------
    n_runs
        How often each central measurement is drawn, on each of two neighbouring inputs.
    """
    found = mechanism.audit(columns, card)
    delta = 0.0 if mechanism.budget is None else mechanism.budget.delta
    measurements: list[Json] = []
    for event in noises(mechanism.event):
        audited = audit_event(event, delta=delta, n_runs=n_runs, confidence=CONFIDENCE)
        name = "scale" if isinstance(event, DiscreteLaplace) else "sigma"
        noise = {name: getattr(event, name)}
        bounds = {"claimed": audited.claimed, "lower_bound": audited.lower_bound}
        measurements.append({**noise, "sensitivity": event.sensitivity, **bounds})
    sound = all(part["epsilon_exact"] <= part["claimed"] for part in found.values())
    sound = sound and all(each["lower_bound"] <= each["claimed"] for each in measurements)
    row = found.pop(WHOLE_ROW, None)
    return {"columns": found, "row": row, "measurements": measurements, "sound": sound}


def _as_records_wanted(value: object) -> object:
    if value != "input" and (type(value) is not int or value < 1):
        raise ValueError(f"a whole number of at least 1, or `input`, is expected, not {value!r}")
    return value


RecordsWanted = Annotated[Literal["input"] | int, BeforeValidator(_as_records_wanted)]
"""How many records are drawn: a number, or `input`: as many as the table has."""


def no_rows(where: str) -> DataError:
    """Return the error of a table that had rows before, or must have some."""
    return DataError(
        "the table has no rows",
        where,
        "leave its files alone until the run ends; persist a Dask frame before its first use",
    )


@freeze_class
class NoisyCounts(Mechanism):
    """What mechanisms that release nothing but noisy counts of all rows have in common."""

    budget: Budget

    releases_rows: ClassVar = False
    nobody: ClassVar[str]

    def check_parameters(self) -> None:
        """Check that no column has the role keep, since no input row is released, and check the specification."""
        if self.schema.kept:
            what = f"{self.nobody} do not correspond to input rows, so no column can have the role keep"
            raise SpecError(
                what, f"column {self.schema.kept[0]!r}", "give it the role privatise, or drop"
            )
        check_bins(getattr(self.spec, "bins", None), self.schema)
        self.check_spec()
        for event in noises(self.event):  # it cannot be planned for every budget
            check_scale(event.scale if isinstance(event, DiscreteLaplace) else event.sigma)

    def check_spec(self) -> None:
        """Check the mechanism's own parameters, which need no table."""

    @property
    def n_rows_private(self) -> bool:
        """Whether neighbouring tables differ by the presence of a row."""
        return self.budget.adjacency == "add-remove"


@freeze_class(kw_only=False)
class NoisyCountsDescription(Description):
    """What is said of every release of noisy counts."""

    mechanism: NoisyCounts

    protected: ClassVar = COVERED

    unprotected: ClassVar = UNCOVERED

    def cautions(self, columns: Columns, n_rows: int | None) -> Sentences:
        """Return a warning if δ is so large that it would allow publishing a row."""
        return delta_warnings(self.mechanism.budget, n_rows)

    def guarantee(self, order: RowOrder) -> str:
        """Return the promise in words; no row of the input is released, so no order matters."""
        return noisy_counts_text(self.mechanism.budget)

    def warnings(self, release: Any, columns: Columns) -> Sentences:
        """Return none: the release is a function of noisy counts."""
        return ()
