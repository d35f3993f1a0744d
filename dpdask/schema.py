"""The declared columns of a table: their roles, kinds and public domains, and the meaning of nulls."""

from __future__ import annotations

import datetime as dt
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pyarrow as pa
from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from dpdask.conditions import Level, Rule, as_tuple
from dpdask.documents import (
    Document,
    Text,
    find_near,
    join_errors,
    parse_yaml,
    read_text,
    validate,
)
from dpdask.domains import (
    BOUNDS,
    DISCOVER,
    MAX_IN_TAXONOMY,
    MAX_LEVELS,
    MAX_LISTED,
    N_LEVELS,
    Ancestors,
    Bound,
    Bounds,
    Levels,
    LevelsOrDiscover,
    Nulls,
    OneLevel,
    Taxonomy,
    check_encoding,
    read_taxonomy,
    with_other,
)
from dpdask.errors import DataError, SpecError, quote_names
from dpdask.html import make_html_table
from dpdask.scales import Unit

Role = Literal["keep", "privatise", "drop"]
Kind = Literal["discrete", "categorical", "continuous", "mixed"]
Outside = Literal["clip", "null", "other", "refuse"]

_LONGEST_SHOWN = 60  # characters of a level that a message names
_OF_PRIVATE = (
    *("kind", "levels", "found", "bounds", "unit", "atoms", "outside", "other"),
    *("encoding", "taxonomy", "most"),
)
ABOVE = "the level above it"  # in place of a value of a taxonomy
_MOST_WITH_TAXONOMY = 64  # levels that are found: others are told by their parents
_SHOWN = 6  # levels that are shown; of more, the first and the last


class _Plain(str):
    """A text that is its own representation."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Provenance(Document):
    """How the levels of a column were found: what that cost, and when."""

    epsilon: float = Field(gt=0)
    """The ε of the run that found them, which no later job pays again."""
    delta: float = Field(gt=0, lt=1)
    """Its δ."""
    date: str | None = Field(default=None, pattern=r"\d{4}-\d\d-\d\d$")
    """The day on which the run began, in UTC, as a text."""
    release: str | None = None
    """The name of the run, which the ledger and the card of the found levels have too."""
    entry: str | None = None
    """The digest of the entry that charged it to a ledger."""
    insecure: bool = False
    """Whether the noise came from a seed, so that the levels protect nobody."""


class Column(Document):
    """One column of the table.

    Examples
    --------
    >>> import dpdask
    >>> dpdask.Column(role="privatise", kind="continuous", bounds=(0, 100)).outside
    'clip'
    """

    role: Role
    """`keep`: public, passed through as it is. `privatise`: randomised. `drop`: never read, never
    released.
    """
    kind: Kind | None = None
    """The kind of a privatised column: `discrete` (ordered numbers or dates), `categorical`
    (unordered), `continuous` (numbers, whole or not, or times), or `mixed` (declared atoms, and
    continuous between them).
    """
    levels: LevelsOrDiscover | None = None
    """The public domain of a discrete column (strictly increasing) or a categorical one (distinct):
    a list, whole numbers such as `1..14`, or the name of a public list, such as `us_states`. At most
    2,048, or 32,768 of a categorical column, which not all mechanisms take.
    `discover`, of a categorical column with an `other`: `dpdask discover` finds those that enough
    units have, under privacy, and writes them here; jobs with the mechanism `marginals` or `copula`
    can find them themselves.
    """
    found: Provenance | None = None
    """How the levels were found, where `dpdask discover` wrote them."""
    bounds: Bounds | None = None
    """The public closed range of a continuous or mixed column, or the name of one, such as
    `latitudes`; none means the whole line. For dates and times: two dates or times, such as
    2020-01-01 (as the upper bound of times, a date means its last moment; without a time zone, UTC
    is meant), or days or the column's own unit since 1970 (microseconds if that is finer).
    """
    unit: Unit | None = None
    """The unit to which values of a continuous or mixed column are rounded down, because they are not exact in its own: of
    whole numbers a whole number, such as 1000; of decimals a power of ten, such as 0.01; of times and
    durations `s`, `ms` or `us`. Bounds and atoms are multiples of it; numbers that bound times count in it.
    """
    atoms: Levels | None = None
    """The values of a mixed column that carry probability of their own, strictly increasing."""
    nulls: Nulls = "refuse"
    """`refuse`: a null violates the schema. `level`: null is one more level, as private as the
    others.
    """
    outside: Outside | None = None
    """How a value outside the domain of a privatised column is treated, so that a refusal does not
    reveal which values occur. `clip`: replace it by the nearest bound (NaN becomes null, and is
    refused if null is not a level). `null`: replace it by null, which must be a level. `other`:
    replace it by the level `other`. `refuse`: it violates the schema, and nothing is released.
    The default is `clip` if there are bounds, `other` if that level is declared, and `refuse`
    otherwise.
    """
    other: OneLevel = None
    """The level that replaces every value outside the levels."""
    type: str | None = None
    """The Arrow type, by its name in pyarrow (`int32`, `float64`, `string`, `date32`,
    `timestamp[us]`…). Needed only for CSV, and for columns in the names of folders
    (`key=value`).
    """
    taxonomy: Taxonomy | None = None
    """Public pairs of a value and its parent, which may have a parent too, or the name of a CSV file of
    such pairs in the schema's folder. A value of the categorical column that is no level becomes the
    nearest level above it; the topmost values are levels, beside those that are found.
    """
    most: int | None = Field(default=None, ge=1)
    """How many levels that are found are kept at most, the commonest ones. The default is as many as a
    column may have, but 64 with a taxonomy.
    """
    encoding: str | None = None
    """The encoding, such as `utf-8`, of a categorical column whose type is bytes (`binary` and the like)
    and whose values are texts. Levels are texts; what is released are bytes again.
    """
    constant: bool = False
    """Whether all rows of a person agree in the column, so that it belongs to the person: of a table
    of persons' rows (`persons` of the mechanisms `copula` and `marginals`).
    """

    @model_validator(mode="before")
    @classmethod
    def _with_outside(cls, data: Any) -> Any:
        """Fill in the default of `outside`; `outside: null` in YAML is None here."""
        if not isinstance(data, Mapping) or data.get("role") != "privatise":
            return data
        given = data.get("outside", _usual(data))
        return {**with_other(data), "outside": "null" if given is None else given}

    @model_serializer(mode="wrap")
    def _without_usual(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out default values, so that the digests of jobs and surveys that do not mention values outside do not change."""
        written: dict[str, Any] = plain(self)
        usual = {
            "outside": None if self.role != "privatise" else _usual(written),
            **dict.fromkeys(("other", "found", "encoding", "taxonomy", "most", "unit")),
            "constant": False,
        }
        if self.discovers:
            written["levels"] = DISCOVER
        return {
            key: value for key, value in written.items() if key not in usual or value != usual[key]
        }

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.role != "privatise":
            given = [key for key in _OF_PRIVATE if getattr(self, key) is not None]
            given += ["constant"] if self.constant else []
            if given:
                raise ValueError(
                    f"{given[0]} belongs to a privatised column, and this one's role is {self.role}"
                )
        elif self.kind is None:
            raise ValueError(
                "a privatised column needs a kind: discrete, categorical, continuous or mixed"
            )
        else:
            self._check_domain()
        if self.type is not None:
            arrow_type(self.type)
        return self

    def _check_domain(self) -> None:
        takes = {
            "discrete": {"levels"},
            "categorical": {"levels"},
            "continuous": {"bounds", "unit"},
            "mixed": {"atoms", "bounds", "unit"},
        }[str(self.kind)]
        for key in ("levels", "bounds", "unit", "atoms"):
            given = getattr(self, key) is not None
            if given and key not in takes:
                raise ValueError(f"a {self.kind} column takes no {key}")
            if not given and key in takes and key not in ("bounds", "unit"):
                raise ValueError(f"a {self.kind} column needs {key}")
        if self.discovers:
            if self.kind != "categorical":
                raise ValueError(
                    f"the levels of a {self.kind} column cannot be found; list them, or declare it categorical, or continuous with bounds"
                )
            if self.other is None or self.found is not None:
                raise ValueError(
                    "`levels: discover` needs the level that replaces values that are not found: declare `other: <level>`"
                    if self.other is None
                    else "`found` belongs to levels that were found; remove it, or list the levels"
                )
        elif self.kind == "categorical":
            _check_distinct(self.levels or (), MAX_LISTED)
            if self.most is not None and self.found is None:
                raise ValueError("`most` belongs to `levels: discover`; remove it")
        elif self.kind == "discrete":
            _check_increasing("levels", self.levels or ())
        elif self.kind == "mixed":
            _check_increasing("atoms", self.atoms or ())
        if self.taxonomy is not None:
            self._check_taxonomy()
        if self.encoding is not None:
            check_encoding(self.encoding, (*self.listed, *self.ancestors.parents) or (None,))
        if self.bounds is not None:
            self._check_bounds(*map(_position, self.bounds))
        self._check_outside()

    def _check_taxonomy(self) -> None:
        above, levels = self.ancestors, {*self.listed}
        if self.kind != "categorical":
            raise ValueError("a taxonomy is for a categorical column")
        above.check(self.taxonomy or ())
        _check_distinct(tuple({*levels, *above.parents, *above.roots}), MAX_IN_TAXONOMY)
        if self.discovers:
            _check_distinct(tuple({*above.roots, *levels}))
        elif not levels & {*above.parents.values()}:
            raise ValueError(
                "no level is the parent of a value in the taxonomy; add the topmost ones"
            )
        elif self.outside == "refuse" and not {*above.roots} <= levels:
            raise ValueError("not all topmost values of the taxonomy are levels; add them")

    def _check_bounds(self, low: float, high: float) -> None:
        finite = math.isfinite(low) and math.isfinite(high)
        if finite and low > high:
            shown = [str(bound).removesuffix(".0") for bound in self.bounds or ()]
            raise ValueError(
                f"the lower bound {shown[0]} is above the upper bound {shown[1]}; swap them"
            )
        if not (finite and low < high):
            raise ValueError(BOUNDS)
        if high - low < sys.float_info.min:
            raise ValueError(
                f"the bounds are closer than {sys.float_info.min}, where numbers lose digits; widen them, or store a smaller unit"
            )
        if any(
            isinstance(atom, dt.date) == self.is_dated and not low <= _position(atom) <= high
            for atom in self.atoms or ()
            if not isinstance(atom, str)
        ):
            raise ValueError("atoms must lie within the bounds")

    def _check_outside(self) -> None:
        outside, other = self.outside, self.other
        mend = "declare `other: <level>`" if self.has_levels else "declare bounds"
        is_level = any(
            other == level and isinstance(other, bool) == isinstance(level, bool)  # 1 == True
            for level in self.listed
        )
        wrong = {
            f"`outside: clip` needs bounds to clip to; {mend}": (
                outside == "clip" and self.bounds is None
            ),
            "`outside: null` needs `nulls: level`: otherwise the nulls would be refused": (
                outside == "null" and self.nulls != "level"
            ),
            "`outside: other` needs the level that replaces other values: declare `other: <level>`": (
                outside == "other" and other is None
            ),
            f"`other` belongs to `outside: other`, and this column has `outside: {outside}`": (
                other is not None and outside != "other"
            ),
            f"a {self.kind} column takes no other level; clip its values to bounds": (
                other is not None and self.levels is None
            ),
            "`other` must be one of the levels: add it to them": other is not None and not is_level,
        }
        for what, holds in wrong.items():
            if holds:
                raise ValueError(what)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield what differs from the defaults, and of many levels the first and the last."""
        for name, value in super().__repr_args__():
            if name is not None and value != (type(self).model_fields[name].default):
                yield (
                    name,
                    _Plain(_shorten(value))
                    if isinstance(value, tuple) and len(value) > _SHOWN
                    else value,
                )

    @property
    def domain_in_words(self) -> str:
        """The public domain: the levels, or the bounds and the atoms; empty if none is declared."""
        if self.discovers:
            return "levels that are yet to be found"
        if self.levels is not None:
            return f"{len(self.levels)} levels: {_shorten(self.levels)}"
        bounds = "" if self.bounds is None else f"{self.bounds[0]} to {self.bounds[1]}"
        bounds += "" if self.unit is None else f", in units of {self.unit}"
        return (
            bounds
            if self.atoms is None
            else f"{bounds}, atoms {_shorten(self.atoms)}".removeprefix(", ")
        )

    @property
    def discovers(self) -> bool:
        """Whether its levels are yet to be found."""
        return self.levels == ()

    @property
    def listed(self) -> tuple[Level, ...]:
        """The levels that are known: before others are found, only that which replaces them; empty without levels."""
        return (self.other,) if self.discovers and self.other is not None else self.levels or ()

    @cached_property
    def ancestors(self) -> Ancestors:
        """What stands above values that are no levels."""
        return Ancestors(dict(self.taxonomy or ()))

    def count_levels(self, most: int) -> int:
        """Return how many levels it may have once some are found, if a column may have `most`."""
        n_own = len({*self.ancestors.roots, self.other})
        usual = most if self.taxonomy is None else _MOST_WITH_TAXONOMY
        return max(n_own, min(n_own + (self.most or usual), most))

    def list_found(self, found: Iterable[Level], most: int = MAX_LEVELS) -> tuple[Level, ...]:
        """Return the levels of a column of which some were found.

        Parameters
        ----------
        found
            The values that were found, the commonest first.
        most
            How many levels a column may have.

        Returns
        -------
        levels
            Those that were found, as many as there may be, with the topmost values of the taxonomy,
            each beside its neighbours in it; and last, the level that replaces all others.
        """
        assert self.other is not None
        own = {*self.ancestors.roots, self.other}
        room = self.count_levels(most) - len(own)
        kept = islice((level for level in found if level not in own), room)
        # neighbours in the taxonomy are neighbours in the list
        return (*sorted([*kept, *own - {self.other}], key=self.ancestors.climb), self.other)

    @property
    def n_found(self) -> int:
        """How many of its levels were found."""
        return len({*self.listed} - {*self.ancestors.roots, self.other})

    @property
    def ends(self) -> tuple[float, float] | None:
        """The bounds as numbers that compare with those of its kind: of dates, in seconds since 1970."""
        return (
            None if self.bounds is None else (_position(self.bounds[0]), _position(self.bounds[1]))
        )

    @property
    def is_dated(self) -> bool:
        """Whether the bounds are dates or times."""
        return self.bounds is not None and isinstance(self.bounds[0], dt.date)

    @property
    def has_levels(self) -> bool:
        """Whether the column's values are a finite list of levels."""
        return self.kind in ("discrete", "categorical")

    @property
    def may_be_times(self) -> bool:
        """Whether it has no levels and is declared by dates, which hold for a column of dates and for one of times."""
        declared = (*(self.bounds or ()), *(self.atoms or ()))
        return any(isinstance(value, dt.date) for value in declared) and not any(
            isinstance(value, dt.datetime) for value in declared
        )

    @property
    def outside_in_words(self) -> str:
        """How values outside the domain are treated, as cards and plans write it: `clip`, `null`, `other: <level>` or `refuse`; with a taxonomy, what comes before that."""
        told = f"other: {self.other}" if self.outside == "other" else str(self.outside)
        return told if self.taxonomy is None else f"{ABOVE}; {told}"


def _shorten(values: tuple[Any, ...]) -> str:
    """Return values in brackets; of many the first ones and the last."""
    shown = [str(value) if isinstance(value, dt.date) else repr(value) for value in values]
    return (
        f"({', '.join(shown if len(shown) <= _SHOWN else [*shown[: _SHOWN - 2], '…', shown[-1]])})"
    )


def _usual(column: Mapping[str, Any]) -> Outside:
    """Return the default treatment of values outside a privatised column's domain."""
    return (
        "other"
        if column.get("other") is not None
        else "clip"
        if column.get("bounds") is not None
        else "refuse"
    )


def _position(value: Bound) -> float:
    """Return where a number or a date lies among others of its kind; a time without a zone is taken as UTC."""
    if not isinstance(value, dt.date):
        return value
    moment = value if isinstance(value, dt.datetime) else dt.datetime.combine(value, dt.time())
    return (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).timestamp()


def _say_level(level: Level) -> str:
    """Return how a message names a level, which is public: by its value, unless that is long."""
    shown = (
        str(level)
        if isinstance(level, dt.date)
        else str(level).lower()
        if isinstance(level, bool)
        else repr(level)
    )
    return f"the level {shown}" if len(shown) <= _LONGEST_SHOWN else "a level"


def _check_distinct(levels: tuple[Level, ...], most: int = MAX_LEVELS) -> None:
    if not 1 <= len(levels) <= most:
        raise ValueError(N_LEVELS.format(most))
    if (
        len({type(level) for level in levels} - {int, float})
        + any(type(level) in (int, float) for level in levels)
        > 1
    ):
        raise ValueError(
            "levels must be of one type: all numbers, all texts, all dates, or true and false"
        )
    if any(isinstance(level, float) and not math.isfinite(level) for level in levels):
        raise ValueError("levels must be finite")
    if len(set(levels)) < len(levels):
        raise ValueError(
            f"{_say_level(next(level for place, level in enumerate(levels) if level in levels[:place]))} is repeated; give it once"
        )


def _check_increasing(name: str, levels: tuple[Level, ...]) -> None:
    _check_distinct(levels)
    if isinstance(levels[0], str | bool):
        raise ValueError(f"{name} must be numbers or dates; a column of texts is categorical")  # noqa: TRY004 - pydantic collects ValueErrors
    if any(low >= high for low, high in pairwise(levels)):  # type: ignore[operator]  # one type, checked above
        raise ValueError(f"{name} must be strictly increasing")


class Schema(Document):
    """The declared columns of a table; a column that is not declared stops the job, or is dropped.

    Examples
    --------
    >>> import dpdask
    >>> schema = dpdask.Schema.from_dict({"columns": {
    ...     "userId": {"role": "keep"},
    ...     "rating": {"role": "privatise", "kind": "discrete", "levels": [1, 2, 3, 4, 5]}}})
    >>> schema.privatised
    ('rating',)
    """

    columns: dict[str, Column] = Field(min_length=1)
    """Each column of the table, by its name."""
    undeclared: Literal["refuse", "drop"] = "refuse"
    """What becomes of a column that is not declared: the job ends, or the column is not read."""
    rules: Annotated[tuple[Rule, ...], BeforeValidator(as_tuple)] = ()
    """What holds in every record, as everybody knows: what is released keeps these rules."""

    @model_serializer(mode="wrap")
    def _without_usual(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out default values, so that the digests of jobs stay as they are."""
        written: dict[str, Any] = plain(self)
        return {key: value for key, value in written.items() if value and value != "refuse"}

    @model_validator(mode="after")
    def _rules_fit(self) -> Self:
        for rule in self.rules:
            for name in rule.names:
                if name not in self.privatised:
                    raise ValueError(
                        f"a rule names {name!r}, which is no privatised column; correct one of the two"
                    )
        return self

    @classmethod
    def from_yaml(cls, path: str | Path) -> Schema:
        """Read a schema from a YAML file.

        Raises
        ------
        SpecError
            If the file is missing or invalid.
        """
        return cls.from_text(
            read_text(path, "the schema cannot be read", "check the path in the job's `schema`")
        )

    @classmethod
    def from_text(cls, text: Text) -> Schema:
        """Return the schema that a YAML text declares.

        Raises
        ------
        SpecError
            If the text is invalid, or holds a TODO; with a line for each.
        """
        data = parse_yaml(text.content, text.name)
        todos = text.list_todos()
        if todos:
            raise join_errors(todos)
        columns = data.get("columns")
        for column in columns.values() if isinstance(columns, dict) else ():
            if isinstance(column, dict) and isinstance(named := column.get("taxonomy"), str):
                column["taxonomy"] = read_taxonomy(Path(text.folder, named), column)
        if "columns" not in data and all(
            isinstance(value, dict) and "role" in value for value in data.values()
        ):
            raise SpecError(
                "the key 'columns' is missing above the columns",
                text.name,
                "begin with the line `columns:`, and indent the rest",
            )
        return validate(cls, data, text)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "schema") -> Schema:
        """Return the schema that a mapping of plain values declares.

        Parameters
        ----------
        data
            The schema's values, as YAML gives them.
        where
            The document's name, for messages.

        Raises
        ------
        SpecError
            If it declares something that cannot be.
        """
        return validate(cls, data, where)

    def __repr__(self) -> str:
        return f"Schema({', '.join(f'{name}: {column.kind or column.role}' for name, column in self.columns.items())})"

    def _repr_html_(self) -> str:
        rows = (
            (
                name,
                column.role,
                column.kind,
                column.domain_in_words,
                column.nulls if column.role == "privatise" else None,
                column.outside,
            )
            for name, column in self.columns.items()
        )
        return make_html_table(
            f"Schema of {len(self.columns)} columns",
            ("column", "role", "kind", "domain", "nulls", "outside"),
            rows,
        )

    @property
    def privatised(self) -> tuple[str, ...]:
        """The names of the privatised columns, in the schema's order."""
        return tuple(name for name, column in self.columns.items() if column.role == "privatise")

    @property
    def discovered(self) -> tuple[str, ...]:
        """The names of the columns whose levels are yet to be found, in the schema's order."""
        return tuple(name for name, column in self.columns.items() if column.discovers)

    def take_levels(self, found: Schema) -> Schema:
        """Return the schema with the levels that another one lists in place of those that are yet to be found."""
        given = {name: found.columns[name] for name in self.discovered}
        return self.model_copy(update={"columns": {**self.columns, **given}})

    def check_found(self, *, insecure: bool) -> None:
        """Refuse levels that were found with a seed, and so protect nobody, unless all noise is `insecure`."""
        for name, column in self.columns.items():
            if not insecure and column.found is not None and column.found.insecure:
                what = "its levels were found with a seed, so they protect nobody"
                hint = "write `levels: discover` in place of them, without `found`, and search without a seed"
                raise SpecError(what, f"column {name!r}", hint)

    def check_privatised(self, where: str) -> None:
        """Check that a column is privatised.

        Raises
        ------
        SpecError
            If none is; it names `where`, the schema's file.
        """
        if not self.privatised:
            raise SpecError(
                "the schema privatises no column",
                where,
                "give at least one column the role privatise",
            )

    def check_dates(self) -> None:
        """Check that a file without types, as CSV is, can be read: dates may bound dates and times alike, so such columns need a `type`.

        Raises
        ------
        SpecError
            With a line for each column that has none.
        """
        what, hint = (
            "are dates, and a CSV file does not tell whether it holds dates or times",
            "add `type: date32` or `type: timestamp[us]`",
        )
        untyped = {
            name: column
            for name, column in self.columns.items()
            if column.type is None and column.may_be_times
        }
        errors = [
            SpecError(
                f"its {'bounds' if column.bounds else 'atoms'} {what}", f"column {name!r}", hint
            )
            for name, column in untyped.items()
        ]
        if errors:
            raise join_errors(errors)

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the columns passed through, in the schema's order."""
        return tuple(name for name, column in self.columns.items() if column.role == "keep")

    def select_released(self, table: pa.Schema) -> pa.Schema:
        """Return the Arrow schema of the released columns of `table`: its order, its types, no metadata.

        Parameters
        ----------
        table
            The Arrow schema of the input.

        Raises
        ------
        DataError
            If `table` has a column that is not declared, twice the same name, lacks one, or has one
            of another type.
        """
        self.check_names(table.names)
        fields = []
        for field in table:
            if self.is_dropped(field.name):
                continue
            column = self.columns[field.name]
            plain = _plain(field.type)
            if column.type is not None and arrow_type(column.type) != plain:
                what = f"declared as {column.type}, but its type is {plain}"
                raise DataError(
                    what, f"column {field.name!r}", "correct the schema's `type`, or leave it out"
                )
            fields.append(pa.field(field.name, plain))
        return pa.schema(fields)

    def is_dropped(self, name: str) -> bool:
        """Return whether a column of the table is not released; its type does not matter then."""
        if name in self.columns:
            return self.columns[name].role == "drop"
        return self.undeclared == "drop"

    def check_names(self, names: list[str]) -> None:
        """Check that a table's columns are exactly the declared ones, and those that are not read.

        Raises
        ------
        DataError
            If one is undeclared, missing, or appears twice.
        """
        lacking = [name for name in self.columns if name not in names]  # perhaps misspelt
        for name, count in Counter(names).items():
            if name not in self.columns and self.undeclared == "refuse":
                near = find_near(name, lacking)
                other = "" if near is None else f", or correct the name {near!r} there"
                also = (
                    f", and of those that are declared the table lacks {quote_names(lacking)}"
                    if lacking and near is None
                    else ""
                )
                what = f"this column is not declared in the schema{also}"
                raise DataError(
                    what, f"column {name!r}", f"declare it: role keep, privatise or drop{other}"
                )
            if count > 1:
                raise DataError(
                    "this column appears twice in the table",
                    f"column {name!r}",
                    "rename one of the two",
                )
        for name in self.columns:
            if name not in names:
                raise DataError(
                    "this declared column is not in the table",
                    f"column {name!r}",
                    "correct the schema, or the input",
                )

    def check_header(self, names: list[str], file: str) -> None:
        """Check that the fields of a CSV file's first line are declared; one that is not is not shown, because without a header it is a value.

        Parameters
        ----------
        names, file
            The fields, and the file's name.

        Raises
        ------
        DataError
            If one is undeclared.
        """
        place = next(
            (place for place, name in enumerate(names, 1) if name not in self.columns), None
        )
        if place is not None and self.undeclared == "refuse":
            near = find_near(names[place - 1], [name for name in self.columns if name not in names])
            other = "" if near is None else f", or correct the name {near!r} there"
            what = f"field {place} of its first line is no column that the schema declares, and is not shown, because it may be a value"
            raise DataError(
                what,
                file,
                f"begin the file with the names of its columns, and declare each: role keep, privatise or drop{other}",
            )


def _plain(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def arrow_type(name: str) -> pa.DataType:
    """Return the Arrow type of a name such as `int32` or `string`.

    Raises
    ------
    ValueError
        If there is no such type.
    """
    try:
        if found := re.fullmatch(r"decimal(?:128)?\((\d+), ?(\d+)\)", name):
            return pa.decimal128(*map(int, found.groups()))
        if found := re.fullmatch(r"timestamp\[(s|ms|us|ns), ?tz=(.+)\]", name):
            return pa.timestamp(*found.groups())
        return pa.type_for_alias(name)
    except ValueError:
        raise ValueError(
            f"{name!r} is not an Arrow type; use int32, int64, float64, decimal128(10, 2), string, bool, date32, timestamp[us], timestamp[us, tz=UTC], time32[s] or the like"
        ) from None
