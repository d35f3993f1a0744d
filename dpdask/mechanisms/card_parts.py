"""The parts of a release card: who is covered, what was promised and spent, and who issued it under which name."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dpdask.documents import Document
from dpdask.privacy import Budget, UnitColumn
from dpdask.privacy.events import Adjacency


class CardPart(BaseModel):
    """A part of the card with these keys and no other; a key that is not set is not written."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class OpenCardPart(BaseModel):
    """A part of the card with these keys, and others that the mechanism gives."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)


class CoveredRows(CardPart):
    """Which rows the promise covers, or does not cover: in words, and as a fraction of the rows or of the units.

    Attributes
    ----------
    who
        Which rows, in words.
    fraction
        Their share, in [0, 1].
    of
        What the share is a share of: rows, or units such as people.
    """

    who: str
    fraction: float
    of: str


class CoveredContent(CardPart):
    """What the promise covers, or does not cover, of each value: for releases of ranges.

    Attributes
    ----------
    what
        What is covered or not, in words.
    """

    what: str


Covered = CoveredRows | CoveredContent


class Guarantee(CardPart):
    """The promise.

    Attributes
    ----------
    text
        The promise in words, including who is not covered.
    epsilon
        The promised ε; null where no ε is promised.
    delta
        The promised δ; null where no ε is promised.
    adjacency
        How two tables differ that the promise compares: in the values of one unit, or by one unit; null where no ε is promised.
    unit
        What is protected: a row, all rows that share a column's value, or a value where no ε is promised.
    protected
        Who or what is covered.
    unprotected
        Who or what is not covered.
    cautions
        Warnings for readers, if the promise protects little.
    released_percent_of_rows
        Which part of the rows is released, where a unit's bound drops some.
    epsilon_private
        For a release of ranges: the columns that ε covers.
    interval_private_only
        For a release of ranges: the columns that ε does not cover.
    """

    text: str
    epsilon: float | None
    delta: int | float | None
    adjacency: Adjacency | None
    unit: Literal["row", "value"] | UnitColumn
    protected: Covered
    unprotected: Covered
    cautions: list[str]
    released_percent_of_rows: int | None = None
    epsilon_private: list[str] | None = None
    interval_private_only: list[str] | None = None

    @property
    def in_short(self) -> str:
        """ε and δ in a few signs."""
        return "no ε" if self.epsilon is None else f"ε = {self.epsilon:g}, δ = {self.delta or 0:g}"


class MechanismPart(OpenCardPart):
    """The mechanism's kind, and each of its parameters.

    Attributes
    ----------
    kind
        The mechanism: `dip`, `copula`, `marginals`, `histogram`, `interval` or that of an extension.
    """

    kind: str


class ColumnPart(OpenCardPart):
    """A released column: its role, its declared domain, and what it cost.

    Attributes
    ----------
    role
        Whether its values are privatised or kept as they are.
    kind
        The kind that the schema declares.
    outside
        How values outside the domain are treated.
    epsilon
        The column's part of ε, where it has a part of its own.
    epsilon_exact
        The exact ε* of the column's part: never more than `epsilon`.
    """

    role: Literal["privatised", "kept"]
    kind: str | None = None
    outside: str | None = None
    epsilon: float | None = None
    epsilon_exact: float | None = None


class Accounting(OpenCardPart):
    """What was spent.

    Attributes
    ----------
    composition
        How the parts of ε add up, in words.
    epsilon_exact
        What was spent of ε: never more than was promised. Null where no ε is promised.
    events
        What happened, as `privacy.events.from_dict` reads it.
    """

    composition: str
    epsilon_exact: float | None
    events: dict[str, Any] | None = None


class RowCount(CardPart):
    """The table's number of rows: exact where it is public, else an estimate from noise, or null without one.

    Attributes
    ----------
    value
        The number of rows, or its estimate.
    exact
        Whether it is exact.
    """

    value: float | None
    exact: bool


class BatchNames(CardPart):
    """The frames that a release covers, in the order in which they were taken; null is the frame without a name.

    Attributes
    ----------
    names
        The names of the frames.
    text
        What it costs a row to be in several frames, in words.
    """

    names: list[str | None]
    text: str


class DatasetCoverage(CardPart):
    """The rows and columns of the dataset that had no ε in this run or an earlier one, from its ledger.

    Attributes
    ----------
    text
        All of this in words.
    uncovered_fraction
        The share of the dataset's rows that had no ε in some run; a bound on it, if samples of rows were drawn apart.
    republished_fraction
        The share of the rows whose records some run republished without ε, in the same sense.
    runs_unknown
        How many runs do not tell whom they covered.
    columns_without_epsilon
        The columns that some run released without an ε.
    """

    text: str
    uncovered_fraction: float
    republished_fraction: float
    runs_unknown: int
    columns_without_epsilon: list[str]


class InputVersion(CardPart):
    """Which version of a Delta table, or which snapshot of an Iceberg table, was released.

    Attributes
    ----------
    format
        The format of the table.
    version
        The number of the version, or of the snapshot.
    """

    format: Literal["delta", "iceberg"]
    version: int


class About(Document):
    """Who issues a release, for what, and on which terms: texts for its readers, as a job gives them.

    Attributes
    ----------
    issuer
        The person or the organisation that is responsible for the release.
    contact
        Where readers can ask.
    licence
        The licence of the released table: an SPDX name, a URL or a sentence.
    purpose
        What the release is for.
    domains
        How the levels and bounds of the columns were chosen: they are published, so they must not come from the private rows.
    """

    issuer: str | None = Field(default=None, min_length=1, max_length=200)
    contact: str | None = Field(default=None, min_length=1, max_length=200)
    licence: str | None = Field(default=None, min_length=1, max_length=500)
    purpose: str | None = Field(default=None, min_length=1, max_length=2000)
    domains: str | None = Field(default=None, min_length=1, max_length=2000)


class ReleaseName(CardPart):
    """The name of a release, which is that of its run in the ledger, and when the run began, in UTC (ISO 8601).

    Attributes
    ----------
    id
        The name of the run.
    time
        When the run began.
    """

    id: str
    time: str


class EarlierRelease(CardPart):
    """A release of the same dataset that was charged earlier.

    Attributes
    ----------
    id
        Its name.
    epsilon
        The ε that it was charged.
    delta
        The δ that it was charged.
    """

    id: str
    epsilon: float
    delta: int | float


class LedgerPosition(CardPart):
    """Where a release stands in the ledger of its dataset, as the ledger was when the release was charged.

    Attributes
    ----------
    dataset
        The name of the dataset.
    entry
        The digest of the entry that charges the release.
    epsilon
        The ε of this release and the earlier ones together, at the dataset's limit of δ; null if no number is known. Refused runs are
        left out: a refusal depends on the rows.
    delta
        The sum of the δ of this release and the earlier ones, without refused runs.
    epsilon_limit
        The ε that the dataset may spend in all.
    delta_limit
        The δ that the dataset may spend in all.
    n_earlier
        How many releases came before.
    earlier
        The newest of the releases that came before.
    """

    dataset: str
    entry: str
    epsilon: float | None
    delta: float
    epsilon_limit: float
    delta_limit: float
    n_earlier: int
    earlier: list[EarlierRelease]


class Terms(CardPart):
    """The promise in the terms of NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees.

    Attributes
    ----------
    trust_model
        `central`: whoever computed the release saw the table. `local`: each value was randomised where it was asked.
    definition
        `pure`: δ = 0. `approximate`: δ above 0. Null where no ε is promised.
    neighbours
        `bounded`: tables differ in the values of one unit. `unbounded`: one table lacks the unit. Null where no ε is promised.
    privacy_unit
        `event-level`: a row. `user-level`: all rows of a person, or of another unit. Null where no ε is promised.
    """

    trust_model: Literal["central", "local"]
    definition: Literal["pure", "approximate"] | None = None
    neighbours: Literal["bounded", "unbounded"] | None = None
    privacy_unit: Literal["event-level", "user-level"] | None = None

    @classmethod
    def of(cls, budget: Budget | None) -> Terms:
        """Return the terms of a release that somebody computed who saw the table."""
        if budget is None:
            return cls(trust_model="central")
        return cls(
            trust_model="central",
            definition="approximate" if budget.delta else "pure",
            neighbours="bounded" if budget.adjacency == "replace-one" else "unbounded",
            privacy_unit="event-level" if budget.unit == "row" else "user-level",
        )
