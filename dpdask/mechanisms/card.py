"""The release card: what was promised, to whom and how, as versioned JSON that is safe to publish.

`Card` is the envelope that all mechanisms share. A mechanism gives a `Section`, and `make_card`
puts it into the envelope. The JSON Schema of the envelope is in `dpdask.schemas`.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from importlib import import_module, metadata
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpdask.archive import Json, Named
from dpdask.arrays import freeze_class
from dpdask.cells import Cells, CutColumns
from dpdask.codec import Codec, ValueCodec
from dpdask.computed import View
from dpdask.documents import Document
from dpdask.errors import InputError, SpecError, list_names
from dpdask.privacy import COVERED, Budget, UnitColumn, list_cautions, noisy_counts_text
from dpdask.privacy.budget import Part, Promise
from dpdask.privacy.events import Adjacency, write_digits
from dpdask.privacy.ledger_entries import Coverage
from dpdask.scales import UNITS, count_type, is_span, tell_unit
from dpdask.schema import Column, Schema
from dpdask.streams import STREAM_FORMAT
from dpdask.version import __version__


class CardPart(BaseModel):
    """A part of the card with these keys and no other; a key that is not set is not written."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class OpenCardPart(BaseModel):
    """A part of the card with these keys, and others that the mechanism gives."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    details: ClassVar[Any] = property(attrgetter("model_extra"))
    """What the mechanism gives, as a mapping."""


class CoveredRows(CardPart):
    """Which rows the promise covers, or does not cover: in words, and as a fraction of the rows or of the units."""

    who: str
    """Which rows, in words."""
    fraction: float
    """Their share, in [0, 1]."""
    of: str
    """What the share is a share of: rows, or units such as people."""


class CoveredContent(CardPart):
    """What the promise covers, or does not cover, of each value: for releases of ranges."""

    what: str
    """What is covered or not, in words."""


Covered = CoveredRows | CoveredContent


class PromisePart(CardPart):
    """A part of the promise in whole sentences."""

    part: Part
    """Whom or what it is about."""
    text: str
    """Its sentences."""


class Guarantee(CardPart):
    """The promise."""

    text: str
    """The promise in words, including who is not covered."""
    parts: list[PromisePart] | None = None
    """The same words in parts; null on cards of earlier versions."""
    epsilon: float | None
    """The promised ε; null where no ε is promised."""
    delta: int | float | None
    """The promised δ; null where no ε is promised."""
    adjacency: Adjacency | None
    """How two tables differ that the promise compares: in the values of one unit, or by one unit;
    null where no ε is promised.
    """
    unit: Literal["row", "value"] | UnitColumn
    """What is protected: a row, all rows that share a column's value, or, without an ε, a value."""
    protected: Covered
    """Who or what is covered."""
    unprotected: Covered
    """Who or what is not covered."""
    cautions: list[str]
    """Warnings for readers, if the promise protects little."""
    released_percent_of_rows: int | None = None
    """Which part of the rows is released, where a unit's bound drops some."""
    epsilon_private: list[str] | None = None
    """For a release of ranges: the columns that ε covers."""
    interval_private_only: list[str] | None = None
    """For a release of ranges: the columns that ε does not cover."""

    @property
    def in_short(self) -> str:
        """ε and δ in a few signs."""
        return "no ε" if self.epsilon is None else f"ε = {self.epsilon:g}, δ = {self.delta or 0:g}"


class MechanismPart(OpenCardPart):
    """The mechanism's kind, and each of its parameters."""

    kind: str
    """The mechanism: `dip`, `copula`, `marginals`, `histogram`, `interval`, `discover` or that of an extension."""


class ColumnPart(OpenCardPart):
    """A released column: its role, its declared domain, and what it cost."""

    role: Literal["privatised", "kept", "computed"]
    """Whether its values are privatised, kept as they are, or computed from released ones."""
    kind: str | None = None
    """The kind that the schema declares."""
    outside: str | None = None
    """How values outside the domain are treated."""
    epsilon: float | None = None
    """The column's part of ε, where it has a part of its own."""
    epsilon_exact: float | None = None
    """The exact ε* of the column's part: never more than `epsilon`."""


class Accounting(OpenCardPart):
    """What was spent."""

    composition: str
    """How the parts of ε add up, in words."""
    epsilon_exact: float | None
    """What was spent of ε: never more than was promised. Null where no ε is promised."""
    events: Json | None = None
    """What happened, as `privacy.events.from_dict` reads it."""


class RowCount(CardPart):
    """The table's number of rows: exact where it is public, else an estimate from noise, or null without one."""

    value: float | None
    """The number of rows, or its estimate."""
    exact: bool
    """Whether it is exact."""


class BatchNames(CardPart):
    """The frames that a release covers, in the order in which they were taken; null is the frame without a name."""

    names: list[str | None]
    """The names of the frames."""
    text: str
    """What it costs a row to be in several frames, in words."""


class DatasetCoverage(CardPart):
    """The rows and columns of the dataset that had no ε in this run or an earlier one, from its ledger."""

    text: str
    """All of this in words."""
    uncovered_fraction: float
    """The share of the dataset's rows that had no ε in some run; a bound on it, if samples of rows
    were drawn apart.
    """
    republished_fraction: float
    """The share of the rows whose records some run republished without ε, in the same sense."""
    runs_unknown: int
    """How many runs do not tell whom they covered."""
    columns_without_epsilon: list[str]
    """The columns that some run released without an ε."""


class InputVersion(CardPart):
    """Which version of a Delta table, or which snapshot of an Iceberg table, was released."""

    format: Literal["delta", "iceberg"]
    """The format of the table."""
    version: int
    """The number of the version, or of the snapshot."""


class About(Document):
    """Who issues a release, for what, and on which terms: texts for its readers, as a job gives them."""

    issuer: str | None = Field(default=None, min_length=1, max_length=200)
    """The person or the organisation that is responsible for the release."""
    contact: str | None = Field(default=None, min_length=1, max_length=200)
    """Where readers can ask."""
    licence: str | None = Field(default=None, min_length=1, max_length=500)
    """The licence of the released table: an SPDX name, a URL or a sentence."""
    purpose: str | None = Field(default=None, min_length=1, max_length=2000)
    """What the release is for."""
    domains: str | None = Field(default=None, min_length=1, max_length=2000)
    """How the levels and bounds of the columns were chosen: they are published, so they must not
    come from the private rows.
    """


class ReleaseName(CardPart):
    """The name of a release, which is that of its run in the ledger, and when the run began, in UTC (ISO 8601)."""

    id: str
    """The name of the run."""
    time: str
    """When the run began."""


class EarlierRelease(CardPart):
    """A release of the same dataset that was charged earlier."""

    id: str
    """Its name."""
    epsilon: float
    """The ε that it was charged."""
    delta: int | float
    """The δ that it was charged."""


class LedgerPosition(CardPart):
    """Where a release stands in the ledger of its dataset, as the ledger was when the release was charged."""

    dataset: str
    """The name of the dataset."""
    entry: str
    """The digest of the entry that charges the release. It was the head of the chain then, so it
    seals all entries before it: a ledger that lacks it was restored from an older copy.
    """
    epsilon: float | None
    """The ε of this release and the earlier ones together, at the dataset's limit of δ; null if no
    number is known. Refused runs are left out: a refusal depends on the rows.
    """
    delta: float
    """The sum of the δ of this release and the earlier ones, without refused runs."""
    epsilon_limit: float
    """The ε that the dataset may spend in all."""
    delta_limit: float
    """The δ that the dataset may spend in all."""
    n_earlier: int
    """How many releases came before."""
    earlier: list[EarlierRelease]
    """The newest of the releases that came before."""
    series: dict[str, str] | None = None
    """For growing tables: the series, with keyed digests of the files that were released before,
    and with this release.
    """


class Terms(CardPart):
    """The promise in the terms of NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees."""

    trust_model: Literal["central", "local"]
    """`central`: whoever computed the release saw the table. `local`: each value was randomised
    where it was asked.
    """
    definition: Literal["pure", "approximate"] | None = None
    """`pure`: δ = 0. `approximate`: δ above 0. Null where no ε is promised."""
    neighbours: Literal["bounded", "unbounded"] | None = None
    """`bounded`: tables differ in the values of one unit. `unbounded`: one table lacks the unit.
    Null where no ε is promised.
    """
    privacy_unit: Literal["event-level", "user-level"] | None = None
    """`event-level`: a row. `user-level`: all rows of a person, or of another unit. Null where no ε
    is promised.
    """

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


CARD_FORMAT: Literal[2] = 2
SEEDED = "INSECURE: the noise is reproducible from a seed, so this release protects nobody. "
OWN_NUMBERS = "the column's own"
_UNITS = UNITS | {"ns": "microseconds, nanoseconds cut off,"}
DAYS = "days since 1970-01-01"
_MICROSECONDS = {DAYS: 86_400_000_000} | {
    f"{unit} since 1970-01-01{zone}": steps
    for unit, steps in zip(_UNITS.values(), (1_000_000, 1_000, 1, 1), strict=True)
    for zone in ("", " UTC")
}
_LIBRARIES = ("cryptography", "numpy", "opendp", "pyarrow", "scipy")
_EPSILON_BATCHES = "a row in k batches is protected by k·ε, not by ε"
_RANGE_BATCHES = "if a row is in several batches, its ranges narrow each other"


class Card(CardPart):
    """The release card."""

    format: Literal[2]
    """The version of this format."""
    name: str
    """The job's name; `frame` or `survey` for other releases."""
    guarantee: Guarantee
    """What was promised."""
    mechanism: MechanismPart
    """What was done, with every parameter."""
    columns: dict[str, ColumnPart]
    """What is released, by column."""
    accounting: Accounting
    """What was spent."""
    n_rows: RowCount | None = None
    """The table's number of rows, where everything that is released comes from noisy counts."""
    order: str
    """What the order of the released rows reveals, in words."""
    insecure: bool
    """Whether the noise came from a seed."""
    versions: dict[str, str | int]
    """The versions of dpdask, of the random streams and of the libraries that computed the release."""
    terms: Terms | None = None
    """The promise in the terms of NIST SP 800-226."""
    release: ReleaseName | None = None
    """For jobs: the release's name and time, unless its noise came from a seed."""
    about: About | None = None
    """For jobs: who issues the release, for what and on which terms."""
    ledger: LedgerPosition | None = None
    """For jobs with a ledger: the release's place in it."""
    dropped: list[str] | None = None
    """For jobs: the declared columns that are not released."""
    batches: BatchNames | None = None
    """For releases of several frames: their names."""
    dataset: DatasetCoverage | None = None
    """For datasets with rows or columns that had no ε: which share of them."""
    survey: Json | None = None
    """For surveys: what identifies the survey, and how its questions were worded."""
    input: InputVersion | None = None
    """For Delta and Iceberg tables: which version was released."""
    series: Json | None = None
    """For growing tables: which release of the table this is, and what the releases cost a row
    together.
    """
    sha256: dict[str, str] | None = None
    """By file, the digest of what lies beside the card: the noisy counts and the model of a job, or
    a saved release.
    """

    def to_dict(self) -> Json:
        """Return the card as plain values; parts that are absent have no key."""
        return self.model_dump(exclude_unset=True)

    def to_bytes(self) -> bytes:
        """Return the card as canonical JSON: the same release, the same bytes."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        return f"{text}\n".encode()

    @property
    def has_holdout(self) -> bool:
        """Whether the reference was made of rows that no ε covers: of this table, or of the first release of a growing one."""
        reference = self.mechanism.details.get("reference")
        return bool(isinstance(reference, Mapping) and reference.get("fraction"))

    @classmethod
    def read(cls, data: bytes | Named, where: str) -> Self:
        """Return a card from outside."""
        what, hint = "this is not a release card", "give a release card as it was written"
        try:
            content = json.loads(data) if isinstance(data, bytes) else data
        except (ValueError, RecursionError):
            raise InputError("this is not JSON", where, hint) from None
        if not isinstance(content, Mapping) or "format" not in content:
            raise InputError(what, where, hint)
        number = content["format"]
        if type(number) is not int or number != CARD_FORMAT:
            is_number = type(number) is int and abs(number) < 10**6
            other = f"format {number}" if is_number else "an unknown format"
            hint = "read it with the version of dpdask that wrote it"
            raise InputError(f"this card has {other}, not {CARD_FORMAT}", where, hint)
        try:
            return cls.model_validate(dict(content))
        except ValidationError as error:
            loc = error.errors(include_url=False, include_input=False)[0]["loc"]
            what = f"{what}: {'.'.join(map(str, loc))!r} is missing, unknown or wrong"
            raise InputError(what, where, "give the card as it was written") from None

    def with_batches(
        self, names: Sequence[str | None], *, epsilon: bool, ranges: bool = False
    ) -> Self:
        """Return the card of one batch as the card of several frames; each has its own noise, so a row in several spends ε in each.

        Parameters
        ----------
        names
            The batches in the order in which they were taken; None is the frame without a name.
        epsilon, ranges
            Whether a batch releases values that have an ε, and ranges that have none.
        """
        costs = [*([_EPSILON_BATCHES] if epsilon else []), *([_RANGE_BATCHES] if ranges else [])]
        text = f"Each batch is a separate release with its own noise: {'; '.join(costs)}."
        changes: Json = {"batches": BatchNames(names=list(names), text=text)}
        if len(names) > 1:
            parts, more = self.guarantee.parts, PromisePart(part="promise", text=text)
            told = {"text": f"{self.guarantee.text} {text}", "parts": parts and [*parts, more]}
            changes["guarantee"] = self.guarantee.model_copy(update=told)
        return self.model_copy(update=changes)

    def with_dataset(self, coverage: Coverage) -> Self:
        """Return the card with the share of its dataset's rows that had no ε in this run or an earlier one; unchanged if every row had one.

        Parameters
        ----------
        coverage
            The coverage of the dataset's runs, including this one, from its ledger.
        """
        if not coverage.text:
            return self
        dataset = DatasetCoverage(
            text=f"In this dataset, {coverage.text}. No bound on what an attacker learns holds for rows or columns without ε.",
            uncovered_fraction=coverage.uncovered,
            republished_fraction=coverage.republished,
            runs_unknown=coverage.n_unknown,
            columns_without_epsilon=list(coverage.columns),
        )
        return self.model_copy(update={"dataset": dataset})


@freeze_class
class Section:
    """What a mechanism says about one release: the contents of the card that are its own."""

    budget: Budget | None  # what is promised; None where no ε is
    text: str
    protected: Covered  # who or what is covered, and who or what is not
    unprotected: Covered
    mechanism: Named  # these parts of the card, with values that `plain` takes
    columns: Mapping[str, Named]
    accounting: Named
    order: str  # what the order of the released rows reveals, in words
    # The number of rows as the card tells it, or None if it does not.
    n_rows: RowCount | None = None
    # The number of rows if it is known and public; the caution about δ depends on it.
    public_rows: float | None = None
    guarantee: Named = field(default_factory=dict)
    seeded: str = SEEDED  # what stands before the promise if the noise came from a seed


def make_card(section: Section, *, name: str, insecure: bool) -> Card:
    """Return the card of a release: the same release, the same card."""
    budget = section.budget
    promise = {} if budget is None else budget.model_dump(mode="json")
    guarantee = {
        "text": (section.seeded if insecure else "") + str(section.text),
        "epsilon": promise.get("epsilon"),
        "delta": promise.get("delta"),
        "adjacency": promise.get("adjacency"),
        "unit": promise.get("unit", "value"),
        "protected": section.protected.model_dump(),
        "unprotected": section.unprotected.model_dump(),
        "cautions": [] if budget is None else list_cautions(budget, section.public_rows),
        **section.guarantee,
    }
    if isinstance(section.text, Promise):
        guarantee["parts"] = section.text.list_parts(section.seeded if insecure else "")
    content: Json = {
        "format": CARD_FORMAT,
        "name": name,
        "guarantee": guarantee,
        "mechanism": section.mechanism,
        "columns": section.columns,
        "accounting": section.accounting,
        "order": section.order,
        "insecure": insecure,
        "versions": versions(str(section.mechanism["kind"])),
        "terms": Terms.of(budget).model_dump(exclude_unset=True),
    }
    if section.n_rows is not None:
        content["n_rows"] = section.n_rows.model_dump()
    return Card.model_validate(plain(content))


def noisy_counts_section(
    *,
    budget: Budget,
    mechanism: Named,
    schema: Schema,
    cells: CutColumns,
    accounting: Named,
    n_rows: float | None,
    view: View | None = None,
) -> Section:
    """Return the section of a release that is computed from noisy counts of all rows.

    Parameters
    ----------
    schema, cells
        The declared columns, and the public cells of those that are counted.
    n_rows
        The number of rows that the release tells, exact under replace-one.
    view
        What rules compute from the columns that are counted, if there are rules.
    """
    exact = budget.adjacency == "replace-one"
    columns = {name: _describe_column(schema, column) for name, column in cells.items()}
    return Section(
        budget=budget,
        text=noisy_counts_text(budget),
        protected=CoveredRows(who=COVERED, fraction=1.0, of="rows"),
        unprotected=CoveredRows(who="nobody", fraction=0.0, of="rows"),
        mechanism=mechanism,
        columns=columns if view is None else view.describe(columns),
        accounting=accounting,
        order="what is released has no order of the input's",
        n_rows=RowCount(value=n_rows, exact=exact),
        public_rows=n_rows if exact else None,
    )


def _describe_column(schema: Schema, column: Cells) -> Json:
    declared = schema.columns[column.codec.name]
    common = {
        "role": "privatised",
        "kind": declared.kind,
        "outside": declared.outside_in_words,
        "cells": column.size,
        "nulls": declared.nulls,
    }
    if column.codec.has_levels:
        return common | column.codec.told
    return (
        common
        | tell_domain(declared, column.codec)
        | {"edges": column.edges.tolist()}
        | ({} if column.found is None else {"means": column.means.tolist()})
        | tell_numbers(column.codec)
    )


def tell_domain(column: Column, codec: ValueCodec) -> Json:
    """Return a column's `bounds` and `atoms` as cards give them: in the numbers of its codec, but those of floats as they were declared."""
    if codec.lattice:
        is_own = codec.unit is None and not pa.types.is_temporal(codec.type)
        return {"bounds": codec.bounds, "atoms": (column.atoms if is_own else codec.atoms) or ()}
    return {"bounds": column.bounds, "atoms": column.atoms or ()}


def tell_numbers(codec: Codec) -> Json:
    """Return which numbers a card has in place of a column's dates, times or durations, or of values that are counted in a declared `unit`; nothing for other columns."""
    type_ = count_type(codec.type, codec.unit)
    unit = {} if codec.unit is None else {"unit": codec.unit}
    if is_span(type_):
        return unit | {"numbers": tell_unit(type_)}
    if pa.types.is_date(type_):
        return {"numbers": DAYS}
    if pa.types.is_timestamp(type_):
        zone = " UTC" if type_.tz else ""
        return unit | {"numbers": f"{_UNITS[type_.unit]} since 1970-01-01{zone}"}
    return unit and unit | {"numbers": f"units of {codec.unit}"}


def microseconds_of(numbers: str | None) -> int | None:
    """Return how long one of a card's numbers for dates is, named as by `tell_numbers`; None if they are not those of dates."""
    return _MICROSECONDS.get(numbers or "")


def say_date(number: object, numbers: str | None) -> str | None:
    """Return a number of a card as a date, or as a time in whole seconds; None if the column's numbers are not those of dates."""
    microseconds = microseconds_of(numbers)
    if microseconds is None or not isinstance(number, int | float):
        return None
    try:
        time = dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=number * microseconds)  # noqa: DTZ001 - the zone is in `numbers`
    except OverflowError:  # a year that no calendar has
        return None
    return time.isoformat(" ", "seconds").removesuffix(" 00:00:00")


def plain(value: object) -> object:
    """Return a value as JSON has it: tuples become lists; infinite ends, dates and the like become texts."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        # channels are most of a card: lists of finite numbers are taken as they are
        numbers = {float}.issuperset(map(type, value)) and all(map(math.isfinite, value))
        return list(value) if numbers else [plain(inner) for inner in value]
    is_plain = math.isfinite(value) if isinstance(value, float) else isinstance(value, int | None)
    return value if is_plain else str(value)


@functools.cache
def _library_versions() -> dict[str, str]:
    return {library: metadata.version(library) for library in _LIBRARIES}


def versions(kind: str) -> dict[str, str | int]:
    """Return the versions of dpdask, of the random streams, of the libraries that compute releases, and of the package that a mechanism is from."""
    found = {each.dist.name: each.dist.version for each in _find_installed(kind) if each.dist}
    return {"dpdask": __version__, "streams": STREAM_FORMAT, **_library_versions(), **found}


Shape = Literal["rows", "records", "persons", "cells", "tables", "ranges", "other"]
Margin = Callable[[float], float | None]

MARGIN_95 = 1.96  # standard deviations
_BUILT_IN = ("copula", "dip", "discover", "histogram", "interval", "marginals")
_GROUP = "dpdask.mechanisms"  # of entry points: functions that register a mechanism
_COUNTS = {
    "cells": "of a cell of the histogram",
    "n_rows": "of all rows",
    "fine_counts": "of a narrow cell, counted first to choose the cells of a column",
    "one_way": "of a cell of one column",
    "two_way": "of a cell of two columns",
    "measured_again": "of a cell of two columns that were counted a second time",
    "three_way": "of a cell of three columns",
}


@freeze_class
class Guidance:
    """What readers of a mechanism's releases are told. No field has a default, so that none is left out in silence."""

    title: str
    """What is released, in one line."""
    shape: Callable[[Card], Shape]
    """The table's rows randomised, synthetic records, weighted points of cells, tables of counts, ranges in place of values, or none of these."""
    uses: Callable[[Card], tuple[list[str], list[str]]]
    """What the release is good for, and what it is not good for, in sentences."""
    questions: Callable[[Card], list[str]]
    """What to ask an opened release first: calls of its methods, as Python."""
    margins: Callable[[Card], str]
    """What the margins of shares hold and what they do not, in words."""
    margin: Callable[[str, Card, int, int], Margin]
    """The 95 % margin of a share of a column's values, given the column, how many released rows were read and how many there are."""
    attenuates: Callable[[Card], bool]
    """Whether the noise of each row weakens what released columns show of each other."""
    counts: Callable[[str], str]
    """Which noisy counts a name in the card's accounting stands for."""
    glossary: Mapping[str, str]
    """Terms that only this mechanism uses, and what they mean."""


_registered: dict[str, Guidance] = {}


def register_guidance(kind: str, guidance: Guidance) -> None:
    """Add the guidance of a mechanism of this kind."""
    _registered[kind] = guidance


@functools.cache
def _find_installed(kind: str) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points of installed packages that offer a mechanism of this kind."""
    if kind in _BUILT_IN:  # which nobody replaces
        return ()
    return tuple(metadata.entry_points(group=_GROUP, name=kind))


def load_installed(kind: str) -> None:
    """Let an installed package register its mechanism of this kind; without one nothing happens.

    Raises
    ------
    SpecError
        If two packages offer it, or the package cannot be used or registers no such mechanism.
    """
    found = _find_installed(kind)
    if kind in _registered or not found:
        return
    where, names = f"mechanism {kind!r}", sorted(each.value for each in found)
    if len(found) > 1:
        what = f"several packages offer it: {list_names(names, 3)}"
        raise SpecError(what, where, "uninstall all but one")
    try:
        found[0].load()()
    except Exception as error:
        what = f"the package that offers it cannot be used: {type(error).__name__}"
        raise SpecError(what, where, f"import {found[0].module} in Python to see why") from error
    if kind not in _registered:
        raise SpecError(f"{names[0]} registers no mechanism of this kind", where, "correct it")


def find_guidance(card: Card) -> Guidance:
    """Return the guidance of the card's mechanism; of one that nobody registered, one that says so."""
    kind = card.mechanism.kind
    load_installed(kind)
    if kind not in _registered:
        if kind not in _BUILT_IN:
            return Guidance(
                title=kind,
                shape=lambda _: "other",
                uses=lambda _: ([], ["This page has no advice for this mechanism; read its card."]),
                questions=lambda _: [],
                margins=lambda _: "Margins hold the noise of each count, with probability 95 %.",
                margin=lambda *_: no_margin,
                attenuates=lambda _: False,
                counts=name_count,
                glossary={},
            )
        # the mechanism itself is not imported: reading a card needs none of its code
        _registered[kind] = import_module(f"dpdask.mechanisms.{kind}").GUIDANCE
    return _registered[kind]


# what several mechanisms say


def no_margin(_: float) -> None:
    """Return that a share's margin is not known."""


def name_count(name: str) -> str:
    """Return which noisy counts a name stands for."""
    return _COUNTS.get(name, f"of the table {name}")


def list_numeric(card: Card) -> list[str]:
    """Return the private columns with bounds that are released: their values are numbers, dates or times."""
    return [name for name, part in _list_released(card) if "levels" not in part.details]


def _list_released(card: Card) -> list[tuple[str, ColumnPart]]:
    """Return the private columns that are released, and not only others that are computed from them."""
    return [
        (name, part)
        for name, part in card.columns.items()
        if part.role == "privatised" and "computes" not in part.details
    ]


def ask_columns(
    card: Card,
    *,
    numbers: bool = True,
    means: bool = False,
    levels: bool = True,
) -> list[str]:
    """Return a question about a column of numbers, rather than of dates, and one about a column of levels."""
    units = {name: part.details.get("numbers") for name, part in card.columns.items()}
    numeric = sorted(list_numeric(card), key=lambda name: units[name] not in (None, OWN_NUMBERS))
    asked = [json.dumps(name, ensure_ascii=False) for name in numeric[:1]]
    of_levels = [name for name, part in _list_released(card) if "levels" in part.details][:1]
    return [
        *(f"quantile({name}, 0.5)" for name in asked if numbers),
        *(f"mean({name})" for name in asked if numbers and means),
        *(f"share({json.dumps(name, ensure_ascii=False)})" for name in of_levels if levels),
    ]


def vary(share: float, n_rows: float | None) -> float:
    """Return the variance of a share in a sample of rows; 0 without one."""
    return share * (1.0 - share) / n_rows if n_rows else 0.0


def counts_margin(card: Card, name: str, n_read: int | None, n_cells: float = 1.0) -> Margin:
    """Return the margin of a share that is a sum of noisy counts, and of records drawn from them."""
    noise = card.accounting.details.get("noise", {})
    n_rows = None if card.n_rows is None else card.n_rows.value
    if not n_rows or n_rows <= 0 or name not in noise:
        return no_margin
    of_counts = noise[name]["standard_deviation"] ** 2 * n_cells / n_rows**2
    return lambda share: MARGIN_95 * math.sqrt(of_counts + vary(share, n_read))


def list_cliques(cliques: list[list[str]]) -> str:
    """Return tables by their columns."""
    texts = [" × ".join(map(str, clique)) for clique in cliques[:20]]
    return "; ".join(texts) + (f"; and {len(cliques) - 20} more" if len(cliques) > 20 else "")


def warn_of_means(card: Card) -> list[str]:
    """Return a sentence on means of columns whose counts had noise; none if no column has bounds."""
    names = list_numeric(card)
    why = "the noise of the counts hides the few rows of a tail"
    if not names:
        return []
    return [
        f"Means and outer quantiles, if bounds are far beyond most values ({list_names(names, 8)}): {why}. Take means of clipped values, and quantiles of dpdask.open, with their intervals."
    ]


def describe_smallest(card: Card, reason: str = ": the noise of a count is as large.") -> list[str]:
    """Return a sentence on the smallest count that can be distinguished from noise."""
    noise = card.accounting.details.get("noise", {})
    margins = [each["margin_95"] for name, each in noise.items() if name != "fine_counts"]
    if not margins:
        return []
    n_rows = None if card.n_rows is None else card.n_rows.value
    share = f" ({write_digits(100 * max(margins) / n_rows, 1)} % of the rows)" if n_rows else ""
    return [f"Groups of fewer than about {math.ceil(max(margins)):,} rows{share}{reason}"]
