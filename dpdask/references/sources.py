"""Sources of a reference distribution that cost no ε; the job must name one, because it decides who is protected."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BeforeValidator, ConfigDict, Field

from dpdask.codec import Codec, LevelCodec, ValueCodec
from dpdask.documents import Document, suggest
from dpdask.errors import SpecError
from dpdask.privacy import UnitColumn
from dpdask.references.distribution import Distribution, check_levels, make_continuous
from dpdask.references.reference import FIT, ReferenceBase, TableReference
from dpdask.schema import Schema

_PARAMETERS, _DATES = (
    "the parameters of a distribution are finite numbers",
    "for dates write days since 1970-01-01, for times the column's unit since then",
)
PARAMETERS = f"{_PARAMETERS}; {_DATES}"
_GRID = 2**15
_SLACK = 1e-6  # probabilities that people write need not sum to 1 more closely than this
_TAIL = 2.0 ** -np.arange(40, 16, -1)


class Holdout(ReferenceBase):
    """The empirical distribution of a random part of the rows (Bi & Shen, Algorithm 1).

    Attributes
    ----------
    fraction
        The probability, in (0, 1), with which each row is held out.

    Privacy
    -------
    Protects the released rows only. The held-out rows are not released, shape the output, and have no ε.

    Examples
    --------
    >>> import dpdask
    >>> dpdask.Holdout(fraction=0.25).protected
    'the values of the released rows'
    """

    kind: Literal["holdout"] = "holdout"
    fraction: float = Field(gt=0, lt=1)

    protected: ClassVar[str] = "the values of the released rows"
    not_local: ClassVar[str | None] = "the file would publish the hold-out's distribution, and no ε covers the held-out rows"

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

    def stages(self, columns: str, *, uncounted: bool) -> tuple[str, ...]:
        """Return the steps of a run before it writes, in words; see `ReferenceBase.stages`."""
        del uncounted
        return (f"survey: read {columns}; choose the hold-out; its distribution, merged in a tree", FIT)


class Public(TableReference):
    """The empirical distribution of another, public table of the same population.

    Attributes
    ----------
    path, format, version
        Where the table is, and in which format, in a job; in Python, hand the table to `fit`.

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
    unprotected: ClassVar[str] = "the rows of the public reference table, which is taken to be public already"
    not_local: ClassVar[str | None] = None
    rows: ClassVar[Literal["public"]] = "public"

    def stages(self, columns: str, *, uncounted: bool) -> tuple[str, ...]:
        """Return the steps of a run before it writes, in words.

        Parameters
        ----------
        columns
            The privatised columns.
        uncounted
            Whether the private table's footers do not tell how many rows it has.
        """
        counted = (f"survey: read {columns}; count the rows",) if uncounted else ()
        return (*counted, f"reference: read {columns} of the public table; its distribution, merged in a tree", FIT)


class KnownColumn(Document):
    """A declared distribution of one column.

    Attributes
    ----------
    probabilities
        One per level of a level column (null first, when null is a level), or one per atom of a mixed one.
    name
        A distribution of scipy.stats; its parameters stand beside it, for instance `loc: 0, scale: 2.5`.
    null
        The probability of null, for a continuous or mixed column.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    probabilities: Annotated[tuple[float, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)] | None = None
    name: str | None = None
    null: float = Field(default=0.0, ge=0, lt=1)

    def freeze(self, column: str) -> Any:
        """Return the scipy distribution with its parameters; see `freeze`."""
        return freeze(self.name or "", self.model_extra or {}, f"reference of column {column!r}", discrete=True)


def freeze(name: str, parameters: Mapping[str, Any], where: str, *, discrete: bool) -> Any:
    """Return a distribution of scipy.stats with its parameters.

    Parameters
    ----------
    name, parameters
        Its name in scipy.stats, and its parameters by name.
    where
        What the distribution describes, for the message.
    discrete
        Whether a discrete distribution will do too.

    Raises
    ------
    SpecError
        If scipy has no such distribution, it is discrete where it must not be, or the parameters do not fit it.
    """
    from scipy import stats  # slow to import, and only a distribution named in a job needs it

    if any(isinstance(value, dt.date) for value in parameters.values()):
        raise SpecError(_PARAMETERS, where, _DATES)
    family = getattr(stats, name, None)
    what = f"scipy.stats has no {'' if discrete else 'continuous '}distribution {name!r} with these parameters"
    wrong = SpecError(what, where, "see scipy.stats")
    if not isinstance(family, stats.rv_continuous | stats.rv_discrete if discrete else stats.rv_continuous):
        raise wrong
    try:
        frozen = family(**parameters)
        usable = bool(np.isfinite(frozen.ppf(0.5)))
    except (TypeError, ValueError):
        raise wrong from None
    if not usable:
        raise wrong
    return frozen


class Known(ReferenceBase):
    """A distribution that is known beforehand, declared for every privatised column.

    Attributes
    ----------
    columns
        For each privatised column its distribution.

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

    protected: ClassVar[str] = "the values of all rows"
    unprotected: ClassVar[str] = "none; the reference is declared, not taken from the data"
    not_local: ClassVar[str | None] = None
    rows: ClassVar[Literal["none"]] = "none"

    def check(self, schema: Schema, unit: UnitColumn | None) -> None:
        """Check that exactly the privatised columns have a declared distribution.

        Parameters
        ----------
        schema
            The declared columns.
        unit
            The privacy unit; it does not matter here.

        Raises
        ------
        SpecError
            If one has none, or another column has one.
        """
        del unit
        for name in schema.privatised:
            if name not in self.columns:
                raise SpecError("has no declared distribution", f"column {name!r}", "add it to `reference.columns`")
        for name in self.columns:
            if name not in schema.privatised:
                raise SpecError("is not a privatised column", f"`reference.columns.{name}`", suggest(name, schema.privatised, "remove it"))

    def stages(self, columns: str, *, uncounted: bool) -> tuple[str, ...]:
        """Return the steps of a run before it writes, in words; see `ReferenceBase.stages`."""
        counted = (f"survey: read {columns}; count the rows",) if uncounted else ()
        return (*counted, FIT.replace("the reference", "the declared reference"))

    def check_codecs(self, codecs: Mapping[str, Codec]) -> None:
        """Check that each declared distribution fits its column; see `ReferenceBase.check_codecs`."""
        self.distributions(None, codecs)

    def distributions(self, counts: Any, codecs: Mapping[str, Codec]) -> Mapping[str, Distribution]:
        """Return the declared distribution of each column; nothing is counted.

        For the parameters see `ReferenceBase.distributions`.
        """
        del counts
        return {name: self.distribution(codec) for name, codec in codecs.items()}

    def distribution(self, codec: Codec) -> Distribution:
        """Return the declared distribution of a column.

        Raises
        ------
        SpecError
            If there is none, or it does not fit the column.
        """
        known = self.columns.get(codec.name)
        if known is None:
            raise SpecError("has no declared distribution", f"column {codec.name!r}", "add it to `reference.columns`")
        return _of_levels(codec, known) if isinstance(codec, LevelCodec) else _of_values(codec, known)


def _of_levels(codec: LevelCodec, known: KnownColumn) -> Distribution:
    if known.probabilities is not None:
        return check_levels(codec, np.array(known.probabilities, dtype=np.float64))
    distribution = known.freeze(codec.name)
    numbers = pa.types.is_integer(codec.levels.type) or pa.types.is_floating(codec.levels.type)
    if not hasattr(distribution, "pmf") or codec.levels.null_count or not (codec.ordered and numbers):
        raise SpecError(
            "needs `probabilities`, or a discrete distribution on numbers", f"reference of column {codec.name!r}", "one probability per level"
        )
    return check_levels(codec, np.asarray(distribution.pmf(codec.levels.to_numpy(zero_copy_only=False)), dtype=np.float64))


def _of_values(codec: ValueCodec, known: KnownColumn) -> Distribution:
    where = f"reference of column {codec.name!r}"
    atoms = np.array(known.probabilities or (), dtype=np.float64)
    rest = 1.0 - known.null - atoms.sum()
    fits = len(atoms) == len(codec.atoms) and (atoms >= 0).all() and rest >= -_SLACK and (codec.nulls or known.null == 0)
    if not fits:
        raise SpecError("needs one probability per atom, and a null probability only where null is a level", where)
    values, masses = _sample_points(known.freeze(codec.name), codec.lattice)
    if codec.bounds is not None:
        inside = (values >= codec.bounds[0]) & (values <= codec.bounds[1])
        if masses[~inside].sum() > _SLACK:
            raise SpecError("has probability outside the column's bounds", where, "correct one of the two")
        values, masses = values[inside], masses[inside]
    low, high = _limits(codec.type)
    if len(values) and (values[0] < low or values[-1] > high):
        raise SpecError(f"has values that the column's type {codec.type} cannot hold", where, "give the column bounds, or another type")
    apart = ~np.isin(values, codec.atoms)
    values, masses = values[apart], masses[apart]
    if rest > _SLACK and len(values) == 0:
        raise SpecError("has no probability apart from the atoms, but the atoms' probabilities leave some", where, "make them sum to 1")
    scale = max(rest, 0.0) / masses.sum() if len(values) else 0.0
    return make_continuous(codec, values, masses * scale, atoms, known.null, 1.0 / _GRID)


def _limits(type_: pa.DataType) -> tuple[float, float]:
    """Return the range of a column's type, in the codec's numbers."""
    if pa.types.is_integer(type_):
        limits = np.iinfo(type_.to_pandas_dtype())
        return max(float(limits.min), -(2.0**53)), min(float(limits.max), 2.0**53)
    if pa.types.is_floating(type_):
        most = float(np.finfo(type_.to_pandas_dtype()).max)
        return -most, most
    return (-(2.0**31), 2.0**31 - 1) if pa.types.is_date(type_) else (-(2.0**53), 2.0**53)


def _sample_points(distribution: Any, lattice: bool) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return points and masses whose continualised cdf agrees with `distribution` at every point."""
    grid = np.unique(np.concatenate([_TAIL, np.arange(1, _GRID) / _GRID, 1.0 - _TAIL]))
    points = np.asarray(distribution.ppf(grid), dtype=np.float64)
    points = np.unique(np.round(points) if lattice else points)
    if lattice and points[-1] - points[0] < 2 * _GRID:  # then every whole number has room, and the distribution is met exactly
        points = np.arange(points[0], points[-1] + 1)
    masses = np.diff(np.asarray(distribution.cdf(points), dtype=np.float64), prepend=0.0)
    return points[masses > 0], masses[masses > 0]
