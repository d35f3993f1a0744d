"""Sources of a reference distribution that cost no ε; the job must name one, because it decides who is protected."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from dpdask.arrays import Floats
from dpdask.codec import Codec, Codecs, LevelCodec, ValueCodec
from dpdask.documents import Document, suggest
from dpdask.errors import SpecError
from dpdask.privacy import UnitColumn
from dpdask.privacy.events import Fate
from dpdask.references.reference import (
    CHECK,
    FIT,
    Distribution,
    ReferenceBase,
    Structure,
    TableReference,
    check_levels,
    make_continuous,
)
from dpdask.scales import float_type
from dpdask.schema import Schema
from dpdask.stats.records import MAX_RECORDS, RecordStatistic
from dpdask.streams import RunKey, stream, words

_PARAMETERS = "the parameters of a distribution are finite numbers"
_DATES = "for dates write days since 1970-01-01, for times the column's unit since then"
PARAMETERS = f"{_PARAMETERS}; {_DATES}"
_GRID = 2**15
_SLACK = 1e-6  # probabilities that people write need not sum to 1 more closely than this
_TAIL = 2.0 ** -np.arange(40, 16, -1)


class Holdout(ReferenceBase):
    """The empirical distribution of a random part of the rows (Bi & Shen, Algorithm 1).

    Privacy
    -------
    Protects the released rows only. The held-out rows are not released, shape the output, and have
    no ε.

    Examples
    --------
    >>> import dpdask
    >>> dpdask.Holdout(fraction=0.25).protected
    'the values of the released rows'
    """

    kind: Literal["holdout"] = "holdout"
    fraction: float = Field(gt=0, lt=1)
    """The probability, in (0, 1), with which each row is held out."""

    protected: ClassVar[str] = "the values of the released rows"
    not_local: ClassVar[str | None] = (
        "the file would publish the hold-out's distribution, and no ε covers the held-out rows"
    )

    @property
    def unprotected(self) -> str:
        """Who has no ε, in words."""
        return (
            f"the held-out rows, {self.fraction:g} of the table (whole units, where the unit is more than a row): they are not released, but "
            "they shape the output and no ε covers them; a level column's published channel reveals exactly how many of them have each level, "
            "and released values of a continuous or mixed column are interpolated between values of theirs, which can be read off nearly verbatim"
        )

    @property
    def held_out(self) -> float:
        """The probability with which a row is held out."""
        return self.fraction

    def stages(self, columns: str) -> tuple[str, ...]:
        """Return the steps of a run before it writes, in words; see `ReferenceBase.stages`."""
        return (
            f"survey: read {columns}; choose the hold-out; its distribution, merged in a tree",
            FIT,
        )


class Public(TableReference):
    """The empirical distribution of another, public table of the same population.

    Privacy
    -------
    Protects all rows of the private table, provided that the public one holds none of them.

    Examples
    --------
    >>> import dpdask
    >>> dpdask.Public().protected
    'the values of all rows'
    """

    kind: Literal["public"] = "public"

    protected: ClassVar[str] = "the values of all rows"
    unprotected: ClassVar[str] = (
        "the rows of the public reference table, which is taken to be public already"
    )
    not_local: ClassVar[str | None] = None
    rows: ClassVar[Literal["public"]] = "public"

    def stages(self, columns: str) -> tuple[str, ...]:
        """Return the steps of a run before it writes, in words; see `ReferenceBase.stages`."""
        return (
            CHECK.format(columns=columns),
            f"reference: read {columns} of the public table; its distribution, merged in a tree",
            FIT,
        )


class KnownColumn(Document):
    """A declared distribution of one column."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    probabilities: (
        Annotated[
            tuple[float, ...],
            BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
        ]
        | None
    ) = None
    """One per level of a level column (null first, when null is a level), or one per atom of a
    mixed one.
    """
    name: str | None = None
    """A distribution of scipy.stats; its parameters stand beside it, for instance `loc: 0, scale:
    2.5`.
    """
    null: float = Field(default=0.0, ge=0, lt=1)
    """The probability of null, for a continuous or mixed column."""

    def freeze(self, column: str) -> Any:
        """Return the scipy distribution with its parameters; see `freeze`."""
        where = f"reference of column {column!r}"
        return freeze(self.name or "", self.model_extra or {}, where, discrete=True)


def freeze(name: str, parameters: Mapping[str, Any], where: str, *, discrete: bool) -> Any:
    """Return a distribution of scipy.stats with its parameters."""
    from scipy import stats  # slow to import, and only a distribution named in a job needs it

    if any(isinstance(value, dt.date) for value in parameters.values()):
        raise SpecError(_PARAMETERS, where, _DATES)
    family = getattr(stats, name, None)
    kinds = (stats.rv_continuous, stats.rv_discrete) if discrete else (stats.rv_continuous,)
    if isinstance(family, kinds):
        with suppress(TypeError, ValueError):
            frozen = family(**parameters)
            if np.isfinite(frozen.ppf(0.5)):
                return frozen
    what = f"scipy.stats has no {'' if discrete else 'continuous '}distribution {name!r} with these parameters"
    raise SpecError(what, where, "see scipy.stats")


class Known(ReferenceBase):
    """A distribution that is known beforehand, declared for every privatised column.

    Privacy
    -------
    Protects all rows: the reference does not come from the data.

    Examples
    --------
    >>> import dpdask
    >>> known = dpdask.Known(columns={"coin": {"probabilities": [0.5, 0.5]}, "price": {"name": "lognorm", "s": 0.6}})
    >>> known.columns["coin"].probabilities
    (0.5, 0.5)
    """

    kind: Literal["known"] = "known"
    columns: Mapping[str, KnownColumn]
    """For each privatised column its distribution."""

    protected: ClassVar[str] = "the values of all rows"
    unprotected: ClassVar[str] = "none; the reference is declared, not taken from the data"
    not_local: ClassVar[str | None] = None
    rows: ClassVar[Literal["none"]] = "none"

    def check(self, schema: Schema, unit: UnitColumn | None) -> None:
        """Check that exactly the privatised columns have a declared distribution."""
        for name in schema.privatised:
            self._get(name)
        for name in self.columns:
            if name not in schema.privatised:
                mend = suggest(name, schema.privatised, "remove it")
                raise SpecError("is not a privatised column", f"`reference.columns.{name}`", mend)

    def _get(self, name: str) -> KnownColumn:
        if name not in self.columns:
            mend = "add it to `reference.columns`"
            raise SpecError("has no declared distribution", f"column {name!r}", mend)
        return self.columns[name]

    def stages(self, columns: str) -> tuple[str, ...]:
        """Return the steps of a run before it writes, in words; see `ReferenceBase.stages`."""
        return (
            CHECK.format(columns=columns),
            FIT.replace("the reference", "the declared reference"),
        )

    def check_codecs(self, codecs: Codecs) -> None:
        """Check that each declared distribution fits its column; see `ReferenceBase.check_codecs`."""
        self.distributions(None, codecs)

    def distributions(self, counts: Any, codecs: Codecs) -> Mapping[str, Distribution]:
        """Return the declared distribution of each column; nothing is counted.

        For the parameters see `ReferenceBase.distributions`.
        """
        return {name: self.distribution(codec) for name, codec in codecs.items()}

    def distribution(self, codec: Codec) -> Distribution:
        """Return the declared distribution of a column."""
        known = self._get(codec.name)
        if codec.has_levels:
            return _of_levels(codec, known)
        return _of_values(codec, known)


def _of_levels(codec: LevelCodec, known: KnownColumn) -> Distribution:
    if known.probabilities is not None:
        return check_levels(codec, np.array(known.probabilities, dtype=np.float64))
    distribution = known.freeze(codec.name)
    numbers = pa.types.is_integer(codec.levels.type) or pa.types.is_floating(codec.levels.type)
    fits = hasattr(distribution, "pmf") and codec.ordered and numbers
    if not fits or codec.levels.null_count:
        what = "needs `probabilities`, or a discrete distribution on numbers"
        where = f"reference of column {codec.name!r}"
        raise SpecError(what, where, "one probability per level")
    levels = codec.levels.to_numpy(zero_copy_only=False)
    return check_levels(codec, np.asarray(distribution.pmf(levels), dtype=np.float64))


def _of_values(codec: ValueCodec, known: KnownColumn) -> Distribution:
    where = f"reference of column {codec.name!r}"
    atoms = np.array(known.probabilities or (), dtype=np.float64)
    rest = 1.0 - known.null - atoms.sum()
    fits = len(atoms) == len(codec.atoms) and (atoms >= 0).all() and rest >= -_SLACK
    if not fits or (known.null and not codec.nulls):
        what = "needs one probability per atom, and a null probability only where null is a level"
        raise SpecError(what, where)
    values, masses = _sample_points(known.freeze(codec.name), codec.lattice)
    if codec.bounds is not None:
        inside = (values >= codec.bounds[0]) & (values <= codec.bounds[1])
        if masses[~inside].sum() > _SLACK:
            what = "has probability outside the column's bounds"
            raise SpecError(what, where, "correct one of the two")
        values, masses = values[inside], masses[inside]
    low, high = codec.least, codec.greatest
    if not codec.lattice:
        high = min(high, float(np.finfo(float_type(codec.type)).max))
        low = -high
    if len(values) and (values[0] < low or values[-1] > high):
        what = f"has values that the column's type {codec.type} cannot hold"
        raise SpecError(what, where, "give the column bounds, or another type")
    apart = ~np.isin(values, codec.atoms)
    values, masses = values[apart], masses[apart]
    if rest > _SLACK and len(values) == 0:
        what = "has no probability apart from the atoms, but the atoms' probabilities leave some"
        raise SpecError(what, where, "make them sum to 1")
    scale = max(rest, 0.0) / masses.sum() if len(values) else 0.0
    return make_continuous(codec, values, masses * scale, atoms, known.null, 1.0 / _GRID)


def _sample_points(distribution: Any, lattice: bool) -> tuple[Floats, Floats]:
    """Return points and masses whose continualised cdf agrees with `distribution` at every point."""
    grid = np.unique(np.concatenate([_TAIL, np.arange(1, _GRID) / _GRID, 1.0 - _TAIL]))
    points = np.asarray(distribution.ppf(grid), dtype=np.float64)
    points = np.unique(np.round(points) if lattice else points)
    if lattice and points[-1] - points[0] < 2 * _GRID:
        # every whole number has room, so the distribution is met exactly
        points = np.arange(points[0], points[-1] + 1)
    masses = np.diff(np.asarray(distribution.cdf(points), dtype=np.float64), prepend=0.0)
    return points[masses > 0], masses[masses > 0]


ORDER_ID = "chain/order"

Order = tuple[str, ...] | Literal["random"]


class Chain(TableReference):
    """The joint empirical distribution of a random part of the rows, or of a public table (Bi & Shen, (2) and (7)-(10)).

    Attributes
    ----------
    path
        The place of a public table that replaces the hold-out. Exactly one of `fraction` and `path`
        is given; in Python, neither means that the public table is handed to `fit`.
    format
        The place of a public table that replaces the hold-out. Exactly one of `fraction` and `path`
        is given; in Python, neither means that the public table is handed to `fit`.
    version
        The place of a public table that replaces the hold-out. Exactly one of `fraction` and `path`
        is given; in Python, neither means that the public table is handed to `fit`.

    Privacy
    -------
    With `fraction`, protects the released rows only. The held-out rows are not released and have no
    ε. With several columns they are republished: levels and atoms exactly, other values almost.
    Every released row lies in the grid cell of a hold-out record in all columns at once. Measured
    with 1,000 hold-out rows of independent continuous columns, this holds for 100 % of the released
    rows in any number of columns. For fresh rows of the same distribution it holds by chance: for
    100 % with one column, 0.1 % with two and none with three. With a quarter held out, the released
    rows show about 95 % of the hold-out records, and nearly all records that repeat (few levels).
    With `path`, protects all rows, provided that the public table holds none of them.

    Notes
    -----
    Memory of each process that writes: at most 36 bytes · nodes of the records' trie, which has no
    more than records · columns of them (twice with `by`); while records are merged,
    `stats.records.Records`. With a sample of 2**-k of the rows, `min_rows` counts rows of the
    sample.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, (2), (7)-(10), appendix S4 for `by`.
    As in the text around (2), and in (10), each column's rank is taken given the original prefix
    and read given the released one.

    Examples
    --------
    >>> import dpdask
    >>> dpdask.Chain(fraction=0.25, order=("age", "income")).held_out
    0.25
    """

    kind: Literal["chain"] = "chain"
    fraction: float | None = Field(default=None, gt=0, lt=1)
    """The probability, in (0, 1), with which each row is held out."""
    order: Annotated[
        Order | None,
        BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    ] = None
    """The privatised columns in the order in which they are released; the schema's order if not
    given; `random`: drawn from the run key. It does not change the distribution of the release.
    """
    by: str | None = None
    """A kept column: each of its values has a reference of its own."""
    min_rows: int = Field(default=10, ge=2)
    """Groups with fewer reference rows are released by the pooled reference of all groups."""
    max_records: int = Field(default=MAX_RECORDS, ge=16, le=2**26)
    """How many distinct records are held at most (each counted once for every keyed grade among its
    rows); beyond it the reference is an exact keyed subsample.
    """

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.fraction is not None and self.path is not None:
            raise ValueError(
                "a chain takes its records from a hold-out (fraction) or from a public table (path), not from both"
            )
        return self

    structure: ClassVar[Structure] = "records"
    fate: ClassVar[Fate] = "republished"
    path_hint: ClassVar[str] = "add it, or `reference.fraction`"
    joint: ClassVar[str] = (
        "all of it: rows follow the joint distribution of the reference's records, whatever the order of the columns"
    )

    @property
    def protected(self) -> str:
        """Who has ε, in words."""
        return f"the values of {'all' if self.fraction is None else 'the released'} rows"

    @property
    def unprotected(self) -> str:
        """Who has no ε, in words."""
        if self.fraction is None:
            return "the rows of the public reference table, which is taken to be public already and is republished record by record"
        return (
            f"the held-out rows, {self.fraction:g} of the table (whole units, where the unit is more than a row): they are not released and no ε "
            "covers them, but every released row follows one of them in all private columns at once, so that hold-out records are republished: "
            "levels and atoms exactly as they are, other values up to the gap to their neighbours"
        )

    @property
    def rows(self) -> Literal["own", "public"]:
        """The table's own with a hold-out, else those of the public table."""
        return "public" if self.fraction is None else "own"

    @property
    def held_out(self) -> float | None:
        """The probability with which a row is held out, or None."""
        return self.fraction

    @property
    def also_read(self) -> tuple[str, ...]:
        """The column of the groups, if there is one."""
        return () if self.by is None else (self.by,)

    def statistic(self, codecs: Codecs) -> RecordStatistic:
        """Return the distinct records of the reference rows."""
        return RecordStatistic(codecs=codecs, by=self.by, max_records=self.max_records)

    @property
    def followed_share(self) -> float | None:
        """Which part of the hold-out records that are unlike all others is followed by a released row, as expected: 1 - exp(-(1-f)/f).

        None without a hold-out.
        """
        return None if self.fraction is None else -math.expm1(-(1 - self.fraction) / self.fraction)

    def warnings(self) -> tuple[str, ...]:
        """Return warnings for the steward before a release."""
        found = []
        if self.followed_share is not None:
            found.append(
                "the chain republishes hold-out records: every released row repeats one of them, levels and atoms exactly and other values up "
                f"to the gap to their neighbours; about {100 * self.followed_share:.0f} % of the records appear in the release "
                "(of those that occur often, nearly all); use it only if the people in the hold-out have agreed, or use a public table"
            )
        if self.by is not None:
            found.append(
                f"each value of {self.by} has a reference of its own if it has {self.min_rows} or more reference rows; small groups are "
                f"reproduced coarsely, and those with fewer rows take the pooled reference, which does not keep their own distribution"
            )
        return tuple(found)

    def stages(self, columns: str) -> tuple[str, ...]:
        """Return the steps of a run before it writes, in words; see `ReferenceBase.stages`."""
        read = columns if self.by is None else f"{columns}, {self.by}"
        records = f"their distinct records, merged in a tree; above {self.max_records:,}, a keyed sample of 2**-k of the rows, and the card says k"
        if self.fraction is not None:
            found = [f"survey: read {read}; choose the hold-out; {records}"]
        else:
            found = [
                CHECK.format(columns=read),
                f"reference: read {read} of the public table; {records}",
            ]
        order = "given" if isinstance(self.order, tuple) else self.order or "the schema's"
        own = ""
        if self.by is not None:
            own = f"; a reference for each {self.by} with {self.min_rows} or more reference rows, the pooled one for the rest"
        fit = f"fit: the records as a trie of at most 36 bytes for each record and column, columns in {order} order{own}"
        return (*found, f"{fit}; the noise of each column's ranks; on the driver, written once")

    def check(self, schema: Schema, unit: UnitColumn | None) -> None:
        """Check the columns that are named here against the schema.

        For the parameters see `TableReference.check`.
        """
        if isinstance(self.order, tuple) and sorted(self.order) != sorted(schema.privatised):
            what = "must name each privatised column once"
            raise SpecError(what, "`reference.order`", "correct it, or remove it")
        if self.by is None:
            return
        if self.by not in schema.kept:
            mend = f"name a column of the role keep ({', '.join(schema.kept) or 'none'})"
            mend = suggest(self.by, schema.kept, mend)
            raise SpecError("the groups' column must be kept", f"`reference.by` {self.by!r}", mend)
        if unit is not None and self.fraction is not None and unit.column == self.by:
            what = "units are held out as a whole, so no released unit would have its own reference"
            raise SpecError(
                what, f"`reference.by` {self.by!r}", "remove it, or take a public table"
            )

    def order_columns(self, columns: tuple[str, ...], key: RunKey) -> tuple[str, ...]:
        """Return the privatised columns in the order of their release."""
        if isinstance(self.order, tuple):
            return self.order
        if self.order is None:
            return columns
        drawn = words(stream(key, ORDER_ID, ""), len(columns))
        return tuple(columns[place] for place in np.argsort(drawn, kind="stable"))
