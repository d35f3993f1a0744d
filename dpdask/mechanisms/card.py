"""The release card: what was promised, to whom and how, as versioned JSON that is safe to publish.

`Card` is the envelope that all mechanisms share. A mechanism gives a `Section`, and `make_card` puts it into the envelope. The
JSON Schema of the envelope is in `dpdask.schemas`.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal, Self

import pyarrow as pa
from pydantic import ValidationError

from dpdask.cells import Cells
from dpdask.codec import Codec, LevelCodec, ValueCodec
from dpdask.errors import InputError
from dpdask.mechanisms.card_parts import (
    About,
    Accounting,
    BatchNames,
    CardPart,
    ColumnPart,
    Covered,
    CoveredRows,
    DatasetCoverage,
    Guarantee,
    InputVersion,
    LedgerPosition,
    MechanismPart,
    ReleaseName,
    RowCount,
    Terms,
)
from dpdask.privacy import COVERED, Budget, list_cautions, noisy_counts_text
from dpdask.privacy.coverage import Coverage
from dpdask.schema import Column, Schema
from dpdask.streams import STREAM_FORMAT
from dpdask.version import __version__

CARD_FORMAT: Literal[2] = 2
SEEDED = "INSECURE: the noise is reproducible from a seed, so this release protects nobody. "
OWN_NUMBERS = "the column's own"
_MICROSECONDS = {"days": 86_400_000_000, "seconds": 1_000_000, "milliseconds": 1_000, "microseconds": 1}
_LIBRARIES = ("cryptography", "numpy", "opendp", "pyarrow", "scipy")
_EPSILON_BATCHES = "a row in k batches is protected by k·ε, not by ε"
_RANGE_BATCHES = "if a row is in several batches, its ranges narrow each other"


class Card(CardPart):
    """The release card.

    Attributes
    ----------
    format
        The version of this format.
    name
        The job's name; `frame` or `survey` for other releases.
    guarantee
        What was promised.
    mechanism
        What was done, with every parameter.
    columns
        What is released, by column.
    accounting
        What was spent.
    n_rows
        The table's number of rows, where everything that is released comes from noisy counts.
    order
        What the order of the released rows reveals, in words.
    insecure
        Whether the noise came from a seed.
    versions
        The versions of dpdask, of the random streams and of the libraries that computed the release.
    terms
        The promise in the terms of NIST SP 800-226.
    release
        For jobs: the release's name and time, unless its noise came from a seed.
    about
        For jobs: who issues the release, for what and on which terms.
    ledger
        For jobs with a ledger: the release's place in it.
    dropped
        For jobs: the declared columns that are not released.
    batches
        For releases of several frames: their names.
    dataset
        For datasets with rows or columns that had no ε: which share of them.
    survey
        For surveys: what identifies the survey, and how its questions were worded.
    input
        For Delta and Iceberg tables: which version was released.
    series
        For growing tables: which release of the table this is, and what the releases cost a row together.
    sha256
        By file, the digest of what was saved beside the card; present in the folder of a saved release.
    """

    format: Literal[2]
    name: str
    guarantee: Guarantee
    mechanism: MechanismPart
    columns: dict[str, ColumnPart]
    accounting: Accounting
    n_rows: RowCount | None = None
    order: str
    insecure: bool
    versions: dict[str, str | int]
    terms: Terms | None = None
    release: ReleaseName | None = None
    about: About | None = None
    ledger: LedgerPosition | None = None
    dropped: list[str] | None = None
    batches: BatchNames | None = None
    dataset: DatasetCoverage | None = None
    survey: dict[str, Any] | None = None
    input: InputVersion | None = None
    series: dict[str, Any] | None = None
    sha256: dict[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the card as plain values; parts that are absent have no key."""
        return self.model_dump(exclude_unset=True)

    def to_bytes(self) -> bytes:
        """Return the card as canonical JSON: the same release, the same bytes."""
        return (_write_json(self.to_dict(), "\n") + "\n").encode()

    @property
    def has_holdout(self) -> bool:
        """Whether the reference was made of rows that no ε covers: of this table, or of the first release of a growing one."""
        reference = (self.mechanism.model_extra or {}).get("reference")
        return bool(isinstance(reference, Mapping) and reference.get("fraction"))

    @classmethod
    def read(cls, data: bytes | Mapping[str, Any], where: str) -> Self:
        """Return a card from outside.

        Parameters
        ----------
        data
            A file's content, or plain values.
        where
            The file or the argument, for messages.

        Raises
        ------
        InputError
            If it is no release card, or one of another format.
        """
        try:
            content = json.loads(data) if isinstance(data, bytes) else data
        except (ValueError, RecursionError):
            raise InputError("this is not JSON", where, "give a release card as it was written") from None
        if not isinstance(content, Mapping) or "format" not in content:
            raise InputError("this is not a release card", where, "give a release card as it was written")
        found = content["format"]
        if type(found) is not int or found != CARD_FORMAT:
            which = f"format {found}" if type(found) is int and abs(found) < 10**6 else "an unknown format"
            raise InputError(f"this card has {which}, not {CARD_FORMAT}", where, "read it with the version of dpdask that wrote it")
        try:
            return cls.model_validate(dict(content))
        except ValidationError as error:
            place = ".".join(str(key) for key in error.errors(include_url=False, include_input=False)[0]["loc"])
            raise InputError(
                f"this is not a release card: {place!r} is missing, unknown or wrong", where, "give the card as it was written"
            ) from None

    def with_batches(self, names: Sequence[str | None], *, epsilon: bool, ranges: bool = False) -> Self:
        """Return the card of one batch as the card of several frames; each has its own noise, so a row in several spends ε in each.

        Parameters
        ----------
        names
            The batches in the order in which they were taken; None is the frame without a name.
        epsilon, ranges
            Whether a batch releases values that have an ε, and ranges that have none.
        """
        told = "; ".join(text for text, holds in ((_EPSILON_BATCHES, epsilon), (_RANGE_BATCHES, ranges)) if holds)
        text = f"Each batch is a separate release with its own noise: {told}."
        changes: dict[str, Any] = {"batches": BatchNames(names=list(names), text=text)}
        if len(names) > 1:
            changes["guarantee"] = self.guarantee.model_copy(update={"text": f"{self.guarantee.text} {text}"})
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What a mechanism says about one release: the contents of the card that are its own.

    Attributes
    ----------
    budget
        What is promised; None where no ε is.
    text
        The promise in words.
    protected, unprotected
        Who or what is covered, and who or what is not.
    mechanism, columns, accounting
        These parts of the card, with values that `plain` takes.
    order
        What the order of the released rows reveals, in words.
    n_rows
        The number of rows as the card tells it, or None if it does not.
    public_rows
        The number of rows if it is known and public; the caution about δ depends on it.
    guarantee
        Further entries of the card's guarantee.
    seeded
        What stands before the promise if the noise came from a seed.
    """

    budget: Budget | None
    text: str
    protected: Covered
    unprotected: Covered
    mechanism: Mapping[str, Any]
    columns: Mapping[str, Mapping[str, Any]]
    accounting: Mapping[str, Any]
    order: str
    n_rows: RowCount | None = None
    public_rows: float | None = None
    guarantee: Mapping[str, Any] = field(default_factory=dict)
    seeded: str = SEEDED


def make_card(section: Section, *, name: str, insecure: bool) -> Card:
    """Return the card of a release: the same release, the same card.

    Parameters
    ----------
    section
        What its mechanism says about it.
    name
        The job's name.
    insecure
        Whether the noise came from a seed.
    """
    budget = section.budget
    promise = {} if budget is None else budget.model_dump(mode="json")
    guarantee = {
        "text": (section.seeded if insecure else "") + section.text,
        "epsilon": promise.get("epsilon"),
        "delta": promise.get("delta"),
        "adjacency": promise.get("adjacency"),
        "unit": promise.get("unit", "value"),
        "protected": section.protected.model_dump(),
        "unprotected": section.unprotected.model_dump(),
        "cautions": [] if budget is None else list_cautions(budget, section.public_rows),
        **section.guarantee,
    }
    content: dict[str, Any] = {
        "format": CARD_FORMAT,
        "name": name,
        "guarantee": guarantee,
        "mechanism": section.mechanism,
        "columns": section.columns,
        "accounting": section.accounting,
        "order": section.order,
        "insecure": insecure,
        "versions": versions(),
        "terms": Terms.of(budget).model_dump(exclude_unset=True),
    }
    if section.n_rows is not None:
        content["n_rows"] = section.n_rows.model_dump()
    return Card.model_validate(plain(content))


def noisy_counts_section(
    *,
    budget: Budget,
    mechanism: Mapping[str, Any],
    schema: Schema,
    cells: Mapping[str, Cells],
    accounting: Mapping[str, Any],
    n_rows: float | None,
) -> Section:
    """Return the section of a release that is computed from noisy counts of all rows.

    Parameters
    ----------
    budget, mechanism, accounting
        As in `Section`.
    schema, cells
        The declared columns, and the public cells of those that are counted.
    n_rows
        The number of rows that the release tells, exact under replace-one.
    """
    exact = budget.adjacency == "replace-one"
    return Section(
        budget=budget,
        text=noisy_counts_text(budget),
        protected=CoveredRows(who=COVERED, fraction=1.0, of="rows"),
        unprotected=CoveredRows(who="nobody", fraction=0.0, of="rows"),
        mechanism=mechanism,
        columns={name: _describe_column(schema, column) for name, column in cells.items()},
        accounting=accounting,
        order="what is released has no order of the input's",
        n_rows=RowCount(value=n_rows, exact=exact),
        public_rows=n_rows if exact else None,
    )


def _describe_column(schema: Schema, column: Cells) -> dict[str, Any]:
    declared = schema.columns[column.codec.name]
    common = {"role": "privatised", "kind": declared.kind, "outside": declared.outside_in_words, "cells": column.size, "nulls": declared.nulls}
    if isinstance(column.codec, LevelCodec):
        return common | {"levels": column.codec.levels.to_pylist()}
    return common | tell_domain(declared, column.codec) | {"edges": column.edges.tolist()} | tell_numbers(column.codec)


def tell_domain(column: Column, codec: ValueCodec) -> dict[str, Any]:
    """Return a column's `bounds` and `atoms` as cards give them: in the numbers of its codec, but those of floats as they were declared.

    Parameters
    ----------
    column
        What the schema declares.
    codec
        The column's codec.
    """
    if codec.lattice:
        atoms = codec.atoms if pa.types.is_temporal(codec.type) else column.atoms
        return {"bounds": codec.bounds, "atoms": atoms or ()}
    return {"bounds": column.bounds, "atoms": column.atoms or ()}


def tell_numbers(codec: Codec) -> dict[str, str]:
    """Return which numbers a card has in place of a column's dates or times, as `numbers`; nothing for a column of numbers."""
    type_ = codec.type if isinstance(codec, ValueCodec) else codec.levels.type
    if pa.types.is_date(type_):
        return {"numbers": "days since 1970-01-01"}
    if pa.types.is_timestamp(type_):
        units = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "microseconds, nanoseconds cut off,"}
        return {"numbers": f"{units[type_.unit]} since 1970-01-01" + (" UTC" if type_.tz else "")}
    return {}


def microseconds_of(numbers: str | None) -> int | None:
    """Return how long one of a card's numbers for dates is; None if a column's numbers are not those of dates.

    Parameters
    ----------
    numbers
        Which numbers stand for the column's dates, as `tell_numbers` writes it.
    """
    return _MICROSECONDS.get(str(numbers).partition(" ")[0].rstrip(","))


def say_date(number: object, numbers: str | None) -> str | None:
    """Return a number of a card as a date, or as a time in whole seconds; None if the column's numbers are not those of dates.

    Parameters
    ----------
    number
        A bound.
    numbers
        Which numbers stand for the column's dates, as `tell_numbers` writes it.
    """
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
        are_finite = {float}.issuperset(map(type, value)) and all(map(math.isfinite, value))  # channels are most of a card
        return list(value) if are_finite else [plain(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, bool | int | str | None) else str(value)


def _write_json(value: object, line: str) -> str:
    """Return what `json.dumps` writes with an indent of 1, in two thirds of its time: a list of plain values is written at once.

    Parameters
    ----------
    value
        Plain values; the keys are texts or integers.
    line
        The end of a line and the indent of this value.
    """
    inner = line + " "
    if isinstance(value, dict) and value:
        return "{" + inner + ("," + inner).join(f"{_encoder('')(str(key))}: {_write_json(item, inner)}" for key, item in value.items()) + line + "}"
    if isinstance(value, list | tuple) and value:
        if not {dict, list, tuple}.isdisjoint(map(type, value)):
            return "[" + inner + ("," + inner).join(_write_json(item, inner) for item in value) + line + "]"
        return "[" + inner + _encoder("," + inner)(value)[1:-1] + line + "]"
    return _encoder("")(value)


@functools.cache
def _encoder(separator: str) -> Callable[[object], str]:
    return json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(separator, ": ")).encode


@functools.cache
def _library_versions() -> dict[str, str]:
    return {library: metadata.version(library) for library in _LIBRARIES}


def versions() -> dict[str, str | int]:
    """Return the versions of dpdask, of the random streams and of the libraries that compute releases."""
    return {"dpdask": __version__, "streams": STREAM_FORMAT, **_library_versions()}
