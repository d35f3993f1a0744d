"""Rules between columns on the cells that are counted: which cells cannot stand in one record."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dpdask.arrays import Flags, Ints
from dpdask.cells import Cells, CutColumns
from dpdask.cells import cells as make_cells
from dpdask.codec import codec_for, convert_bounds, is_bytes
from dpdask.conditions import Rule
from dpdask.documents import suggest
from dpdask.errors import DataError, SpecError
from dpdask.scales import is_dated
from dpdask.schema import Schema

if TYPE_CHECKING:
    import pandas as pd

MOST_MET = 2**14  # records on a condition that are drawn together
Codes = NDArray[Any]
_HINT = "correct the rule, or the column's levels"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CellRules:
    """Rules as tables of possible pairs of cells, and as conditions on more columns.

    Attributes
    ----------
    pairs
        By two attributes, rising: bool array of shape (m, n), whether cells may meet.
    larger
        Conditions on three and more attributes that never hold together: of each, which cells meet
        it.
    """

    pairs: dict[tuple[int, int], Flags]
    larger: tuple[tuple[tuple[int, Flags], ...], ...]

    @classmethod
    def of(cls, rules: Sequence[Rule], cells: CutColumns, unknown: Collection[str] = ()) -> Self:
        """Return rules on cells.

        Parameters
        ----------
        unknown
            The columns whose cells are found: no range of a rule can be made of them.

        Raises
        ------
        SpecError
            If a condition names no level, or cuts a cell; if a value could stand beside no other.
        """
        places = {name: place for place, name in enumerate(cells)}
        pairs: dict[tuple[int, int], Flags] = {}
        larger = []

        def forbid(one: str, other: str, table: Flags) -> None:
            if places[one] > places[other]:
                one, other, table = other, one, table.T
            pair = places[one], places[other]
            pairs[pair] = pairs.get(pair, np.True_) & ~table

        for number, rule in enumerate(rules, 1):
            _check_known(rule, unknown)
            where = f"rule {number}"
            if rule.allow is not None and rule.columns is not None:
                forbid(*rule.columns, ~_list_allowed(rule.columns, rule.allow, cells, where))
            for one, other in rule.steps:
                forbid(one, other, _list_fallen(cells[one], cells[other]))
            for never in _forbid(rule, cells, where):
                if len(never) == 2:
                    (one, met), (other, met_too) = never.items()
                    forbid(one, other, met[:, None] & met_too)
                else:
                    larger.append(tuple((places[name], met) for name, met in never.items()))
        found = cls(pairs=pairs, larger=tuple(larger))
        found._check_possible(cells)
        return found

    def __bool__(self) -> bool:
        return bool(self.pairs or self.larger)

    def keep(self, codes: Codes) -> Flags:
        """Return which records break no rule.

        Parameters
        ----------
        codes
            The cell of each attribute, shape (n_attributes, n).
        """
        kept = np.ones(codes.shape[1], dtype=np.bool_)
        for (first, second), table in self.pairs.items():
            kept &= table[codes[first], codes[second]]
        for never in self.larger:
            kept &= ~reduce(and_, (met[codes[place]] for place, met in never))
        return kept

    def limit(self, n_attributes: int) -> CellRules:
        """Return the rules that name none but the first attributes."""
        pairs = {pair: table for pair, table in self.pairs.items() if max(pair) < n_attributes}
        larger = (each for each in self.larger if max(place for place, _ in each) < n_attributes)
        return CellRules(pairs=pairs, larger=tuple(larger))

    @property
    def attributes(self) -> set[int]:
        """The attributes that rules name."""
        found = {place for pair in self.pairs for place in pair}
        return found | {place for each in self.larger for place, _ in each}

    def stack(self, first: Ints, second: Ints, shape: Any) -> Flags:
        """Return for each of several pairs of attributes which of its cells are possible, of shape (pairs, m, n)."""
        found = np.ones(shape, dtype=np.bool_)
        for place, pair in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
            if pair in self.pairs:
                found[place] = self.pairs[pair]
        return found

    def _check_possible(self, cells: CutColumns) -> None:
        names = list(cells)
        for (first, second), table in self.pairs.items():
            for name, other, meets in (
                (names[first], names[second], table.any(axis=1)),
                (names[second], names[first], table.any(axis=0)),
            ):
                if not meets.all():
                    label = cells[name].labels()[int(np.argmin(meets))]
                    what = f"the rules let {label} of {name!r} stand beside no value of {other!r}"
                    raise SpecError(what, "schema, rules", f"{_HINT}, if no record can have it")


def check_levels(schema: Schema) -> None:
    """Check the rules between columns of levels, which need no table."""
    levels = {}
    for name in dict.fromkeys(name for rule in schema.rules for name in rule.names):
        column = schema.columns[name]
        if column.listed:
            is_large = any(type(level) is int and level >= 2**63 for level in column.listed)
            type_ = pa.uint64() if is_large else pa.array(list(column.listed)).type
            type_ = type_ if column.encoding is None else pa.binary()
            levels[name] = make_cells(codec_for(name, column, type_), 1)
    CellRules.of([rule for rule in schema.rules if set(rule.names) <= set(levels)], levels)


def describe_rules(schema: Schema) -> dict[str, Any]:
    """Return what a card says of the rules, as they were written; nothing without any."""
    written = [
        rule.model_dump(mode="json", by_alias=True, exclude_none=True) for rule in schema.rules
    ]
    return {"rules": written} if written else {}


def _check_known(rule: Rule, unknown: Collection[str]) -> None:
    for conditions in (rule.if_, rule.then, rule.forbid):
        for name, values in (conditions or {}).items():
            if name in unknown and set(values) != {None}:
                what = "its cells are found from the table, and a rule's range may cut one"
                hint = "declare `bins` of this column, whose cells begin where the range does"
                raise SpecError(what, f"schema, rules, column {name!r}", hint)


def _forbid(rule: Rule, cells: CutColumns, where: str) -> Iterator[dict[str, Flags]]:
    """Yield the conditions of a rule that never hold together, as flags on the cells of each column."""
    conditions = rule.forbid or rule.if_ or {}
    met = {name: _meet(cells[name], values, where) for name, values in conditions.items()}
    if rule.forbid is not None:
        yield met
    for name, values in (rule.then or {}).items():
        yield {**met, name: ~_meet(cells[name], values, where)}


def _list_fallen(one: Cells, other: Cells) -> Flags:
    """Return which pairs of levels fall: the first one is above the second one."""
    codecs: tuple[Any, Any] = one.codec, other.codec
    first, second = (codec.levels.to_pylist() for codec in codecs)
    return np.array([[None not in (a, b) and a > b for b in second] for a in first], dtype=np.bool_)


def _list_allowed(
    names: tuple[str, str], pairs: Iterable[tuple[Any, Any]], cells: CutColumns, where: str
) -> Flags:
    """Return which pairs of levels a rule allows."""
    levels = []
    for name in names:
        codec = cells[name].codec
        if not codec.has_levels:
            what = "`allow` lists pairs of levels"
            raise SpecError(what, f"schema, {where}, column {name!r}", "use `forbid`, or `if`")
        levels.append({level: place for place, level in enumerate(codec.levels.to_pylist())})
    allowed = np.zeros(tuple(map(len, levels)), dtype=np.bool_)
    for pair in pairs:
        for name, value, known in zip(names, pair, levels, strict=True):
            if value not in known:
                what = "a value of the rule is none of its levels"
                raise SpecError(what, f"schema, {where}, column {name!r}", _HINT)
        allowed[levels[0][pair[0]], levels[1][pair[1]]] = True
    return allowed


def _meet(column: Cells, values: tuple[Any, ...], where: str) -> Flags:
    """Return which of a column's cells meet a condition."""
    codec, name = column.codec, column.codec.name
    where = f"schema, {where}, column {name!r}"
    met = np.zeros(column.size, dtype=np.bool_)
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        if not codec.nulls:
            raise SpecError("null is none of its levels", where, "declare `nulls: level`")
        met[0] = True
    if codec.has_levels:
        levels = codec.levels.to_pylist()
        for value in known:
            if value not in levels:
                raise SpecError("a value of the rule is none of its levels", where, _HINT)
            met[levels.index(value)] = True
        return met
    if not known:
        return met
    if len(known) != 2:
        what = "a condition on numbers has the lowest and the highest one"
        raise SpecError(what, where, "write [lowest, highest]")
    low, high = convert_bounds(name, (known[0], known[1]), codec.type, codec.unit)
    firsts, lasts = column.firsts, column.edges[1:]
    inside = (firsts >= low) & (lasts <= high)
    # of numbers with a fraction, the end is not in the range, unless it is the upper bound
    following = high + 1.0 if codec.lattice else high
    cut = ~inside & (lasts >= low) & (firsts < following)
    if low <= high and cut.any():
        what = "a rule's range of numbers must be made of whole cells"
        raise SpecError(what, where, f"begin cells in `bins` at {low:g} and {following:g}")
    atoms = np.array(codec.atoms)
    single = np.concatenate(
        [np.zeros(int(codec.nulls), dtype=np.bool_), (atoms >= low) & (atoms <= high)]
    )
    found: Flags = np.concatenate([single, inside])[column.possible]
    if not found.any():
        what = f"no value of the column lies between {low:g} and {high:g}"
        raise SpecError(what, where, "write the lowest number first, within the column's bounds")
    return met | found


# ---- conditions on the records that are drawn

_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"]|"")*"|'(?:[^']|'')*'|`[^`]+`)
    |(?P<date>\d{4}-\d\d-\d\d(?:T[\d:.]+(?:Z|[-+]\d\d:\d\d)?)?|\d\d(?::\d\d){1,2}(?:\.\d+)?)(?![\w.:-])
    |(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.-]))
    |(?P<sign><=|>=|!=|<>|==|[=<>(),])
    |(?P<word>[^\W\d][\w.-]*))""",
    re.VERBOSE,
)
_SIGNS: dict[str, Callable[[Any, Any], pa.Array]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_SAME = {"==": "=", "<>": "!="}
_WRITE = """write it as in 'sex = "F" and age >= 65', with and, or, in (…), is null"""
_WRITE_DATE = "write it as 2026-01-31 or, of times, 2026-01-31T12:00; a time that the clocks of the zone skip or repeat needs an offset, as 02:30-05:00"
Token = tuple[str, str]  # its kind and its text


@dataclass(frozen=True, slots=True, eq=False)
class TypedColumn:
    """What a condition must know of a column: its type, and its levels if it has some."""

    type: pa.DataType
    levels: pa.Array | None = None

    @property
    def codec(self) -> Self:
        """As cells have it."""
        return self

    @property
    def has_levels(self) -> bool:
        """Whether there are levels."""
        return self.levels is not None


def read_condition(
    text: str, columns: Mapping[str, TypedColumn]
) -> tuple[tuple[ColumnTest, ...], ...]:
    """Return the alternatives that a text says, of each the comparisons that hold together."""
    return _Reader(text, columns, ()).read()


@dataclass(frozen=True, slots=True, eq=False)
class ColumnTest:
    """A column compared with values; null meets nothing but `is null` and `is in null`."""

    column: str
    sign: str  # of `_SIGNS`, or `is null`
    values: tuple[pa.Scalar, ...]  # one of them must be met
    is_not: bool = False  # whether none of them may be

    def meet(self, array: pa.Array) -> Flags:
        """Return which values meet it."""
        found = self._meet(array, array)
        if self.is_not:
            found = ~found if self.sign == "is null" else ~found & ~_flags(pc.is_null(array))
        return found

    def may_meet(self, first: pa.Array, last: pa.Array) -> Flags:
        """Return whether some value between the ends of each cell may meet it."""
        is_single = _flags(pc.equal(first, last)) | _flags(pc.is_null(first))
        every = self.is_not or self.sign == "!="
        found = np.ones(len(first), dtype=np.bool_) if every else self._meet(first, last)
        found[is_single] = self.meet(first)[is_single]
        return found

    def _meet(self, first: pa.Array, last: pa.Array) -> Flags:
        if self.sign == "is null":
            return _flags(pc.is_null(first))
        if self.sign == "=":
            each = [
                _flags(pc.less_equal(first, value)) & _flags(pc.greater_equal(last, value))
                for value in self.values
            ]
            return reduce(or_, each)
        return _flags(_SIGNS[self.sign](first if "<" in self.sign else last, self.values[0]))


def _flags(array: pa.Array) -> Flags:
    found: Flags = pc.fill_null(array, False).to_numpy(zero_copy_only=False)
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Condition:
    """Which records are wanted: comparisons that hold together, and alternatives of them.

    Attributes
    ----------
    alternatives
        Of each, the comparisons.
    on_cells
        The same as conditions on the cells that are counted, which more records may meet.
    """

    alternatives: tuple[tuple[ColumnTest, ...], ...]
    on_cells: CellRules

    @classmethod
    def parse(cls, text: str, cells: CutColumns, computed: Collection[str] = ()) -> Self:
        """Return the condition that a text says; `and` binds before `or`, and there are no other brackets than those of `in`.

        Parameters
        ----------
        computed
            The columns that are computed from others, of which no condition is taken.

        Raises
        ------
        SpecError
            If it cannot be read, names no column or no level, or no record can meet it.
        """
        reader = _Reader(text, cells, computed)
        alternatives, spans = reader.read(), {name: cells[name].spans for name in reader.named}
        places = {name: place for place, name in enumerate(cells)}
        on_cells = []
        for together in alternatives:
            met: dict[str, Flags] = {}
            for each in together:
                flags = each.may_meet(*spans[each.column])
                met[each.column] = met.get(each.column, np.True_) & flags
            if all(flags.any() for flags in met.values()):
                on_cells.append(tuple((places[name], flags) for name, flags in met.items()))
        if not on_cells:
            raise SpecError("no record can meet it", "`where`", "see the columns' domains")
        return cls(alternatives=alternatives, on_cells=CellRules(pairs={}, larger=tuple(on_cells)))

    def may_meet(self, codes: Codes) -> Flags:
        """Return which records may meet it, by their cells."""
        return ~self.on_cells.keep(codes)

    def meet(self, rows: pa.RecordBatch) -> Flags:
        """Return which records meet it."""
        found = (
            reduce(and_, (each.meet(rows.column(each.column)) for each in together))
            for together in self.alternatives
        )
        return reduce(or_, found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """The values that records have in some columns: those of one row of a public frame each.

    Attributes
    ----------
    rows
        The values, in the types of the release.
    places, codes
        The attributes, and the cell of each row, of shape (n_columns, n).
    first
        The number of the first of these rows in the frame.
    """

    rows: pa.RecordBatch
    places: tuple[int, ...]
    codes: Codes
    first: int = 0

    @classmethod
    def read(cls, frame: pd.DataFrame, cells: CutColumns, computed: Collection[str] = ()) -> Self:
        """Return the values of a frame; for the parameters and errors see `Condition.parse`."""
        where, names = "`like`", list(cells)
        if hasattr(frame, "_meta") or not frame.size:
            what = "a frame in memory with some of the columns and at least one row is expected"
            raise SpecError(what, where, "compute a lazy frame first")
        arrays, codes = {}, []
        for name in frame.columns:
            _check_name(name, cells, computed, where)
            codec = cells[name].codec
            try:
                array = pa.chunked_array(pa.array(frame[name], from_pandas=True))
                arrays[name] = array.cast(codec.type).combine_chunks()
                if codec.n_outside(arrays[name]):
                    raise ValueError
                codes.append(cells[name].codes(arrays[name]))
            except (pa.ArrowException, TypeError, ValueError, DataError):
                what = f"a value is outside its domain, or has another type than {codec.type}"
                raise SpecError(what, f"{where}, column {name!r}", "correct the frame") from None
        rows = pa.RecordBatch.from_pydict(arrays)
        return cls(rows=rows, places=tuple(map(names.index, arrays)), codes=np.stack(codes))

    @property
    def n_rows(self) -> int:
        """How many rows there are."""
        return int(self.rows.num_rows)

    def part(self, start: int, stop: int) -> Given:
        """Return the rows of the blocks of these rows of the frame, as copies."""
        first, last = start // MOST_MET * MOST_MET, -(-stop // MOST_MET) * MOST_MET
        part = np.arange(self.codes.shape[1])[max(first - self.first, 0) : last - self.first]
        rows = self.rows.take(pa.array(part))
        return replace(self, rows=rows, codes=self.codes[:, part], first=first)

    def number(self, sizes: Sequence[int]) -> tuple[Ints, Callable[[Codes], Ints]]:
        """Return which of the different rows each row is, and a function that returns the same of records: -1 of those that are like none."""
        steps, found = list[Ints](), np.zeros(self.codes.shape[1], dtype=np.int64)
        for place, own in zip(self.places, self.codes, strict=True):
            known, found = np.unique(found * sizes[place] + own, return_inverse=True)
            steps.append(known)

        def find(codes: Codes) -> Ints:
            found = np.zeros(codes.shape[1], dtype=np.int64)
            for place, known in zip(self.places, steps, strict=True):
                keys = np.where(found < 0, -1, found * sizes[place] + codes[place])
                found = np.minimum(np.searchsorted(known, keys), len(known) - 1)
                found[known[found] != keys] = -1
            return found

        return found, find


def _check_name(name: str, cells: CutColumns, computed: Collection[str], where: str) -> None:
    if name in computed:
        what = f"{name!r} is computed from other columns, so no condition can name it"
        raise SpecError(what, where, "name the columns that it is computed from")
    if name not in cells:
        what = f"the release has no column {name!r}"
        raise SpecError(what, where, suggest(str(name), cells, "see the columns of the release"))


class _Reader:
    """Reads a condition token by token; no text is evaluated."""

    def __init__(self, text: str, cells: Mapping[str, Any], computed: Collection[str]) -> None:
        self._cells, self._tokens, self.named = cells, list(_split(text)), set[str]()
        self._computed = computed

    def read(self) -> tuple[tuple[ColumnTest, ...], ...]:
        alternatives = [[self._compare()]]
        while self._tokens:
            if self._take_word("and"):
                alternatives[-1].append(self._compare())
            elif self._take_word("or"):
                alternatives.append([self._compare()])
            else:
                raise _refuse(f"near {self._tokens[0][1]!r}")
        return tuple(map(tuple, alternatives))

    def _compare(self) -> ColumnTest:
        name = self._take("text", "word")[1]
        _check_name(name, self._cells, self._computed, "`where`")
        self.named.add(name)
        if self._take_word("is"):
            is_not = self._take_word("not")
            if not self._take_word("null"):
                raise _refuse("after `is`")
            return ColumnTest(name, "is null", (), is_not)
        is_not = self._take_word("not")
        if self._take_word("in"):
            return ColumnTest(name, "=", self._list(name), is_not)
        sign = self._take("sign")[1]
        sign = _SAME.get(sign, sign)
        if is_not or sign not in _SIGNS:
            raise _refuse(f"after {name!r}")
        return ColumnTest(name, sign, (self._value(name, sign),))

    def _list(self, name: str) -> tuple[pa.Scalar, ...]:
        before, values = self._take("sign")[1], [self._value(name, "=")]
        while (sign := self._take("sign")[1]) == ",":
            values.append(self._value(name, "="))
        if (before, sign) != ("(", ")"):
            raise _refuse("after `in`")
        return tuple(values)

    def _value(self, name: str, sign: str) -> pa.Scalar:
        """Return a value as the column's type compares it."""
        kind, text = self._take("text", "number", "word")
        codec = self._cells[name].codec
        is_coded = codec.has_levels and is_bytes(codec.type)
        is_text = pa.types.is_string(codec.type) or pa.types.is_large_string(codec.type) or is_coded
        known = kind == "word" and text.lower() in ("true", "false")
        fits = kind == "text" if is_text else known == pa.types.is_boolean(codec.type)
        is_time = is_dated(codec.type) or pa.types.is_time(codec.type)
        fits = fits and (is_text or is_time == (kind == "text"))
        try:
            if not fits or (kind == "word" and not known):
                raise ValueError
            if is_coded:
                found = pa.scalar(text.encode(codec.encoding), pa.large_binary())
            elif kind != "number":
                found = (
                    _read_time(text, codec.type) if is_time else pa.scalar(text).cast(codec.type)
                )
            else:
                found = pa.scalar(
                    int(text) if re.fullmatch(r"[-+]?\d{1,18}", text) else float(text)
                )
                if pa.types.is_duration(codec.type):
                    found = found.cast(pa.int64()).cast(codec.type)
        except (ValueError, pa.ArrowException):
            wanted = "a text in quotes" if is_text else f"a value of the type {codec.type}"
            how = _WRITE
            if is_time:
                is_clock = pa.types.is_time(codec.type)
                how = "write it as 06:00" if is_clock else _WRITE_DATE
            raise SpecError(f"{wanted} is expected", f"`where`, column {name!r}", how) from None
        if codec.has_levels and sign == "=":
            own = codec.own if is_coded else codec.levels
            if not _flags(pc.equal(own, found)).any():
                where = f"`where`, column {name!r}"
                raise SpecError("a value is none of its levels", where, "give some of its levels")
        return found

    def _take(self, *kinds: str) -> Token:
        if not self._tokens or self._tokens[0][0] not in kinds:
            raise _refuse(f"near {self._tokens[0][1]!r}" if self._tokens else "at its end")
        return self._tokens.pop(0)

    def _take_word(self, word: str) -> bool:
        if self._tokens and self._tokens[0][0] == "word" and self._tokens[0][1].lower() == word:
            self._tokens.pop(0)
            return True
        return False


def _read_time(text: str, type_: pa.DataType) -> pa.Scalar:
    """Return a date, or a time, which without a zone is one of the column's."""
    if pa.types.is_time(type_):  # of which Arrow reads no texts
        return pa.scalar(dt.time.fromisoformat(text), type_)
    if pa.types.is_timestamp(type_) and type_.tz is not None:
        with suppress(pa.ArrowInvalid):
            local = pa.scalar(text).cast(pa.timestamp(type_.unit))
            return pc.assume_timezone(local, type_.tz)
    return pa.scalar(text).cast(type_)


def _split(text: object) -> Iterator[Token]:
    """Yield the tokens of a condition."""
    if not isinstance(text, str):
        raise SpecError("a text is expected", "`where`", _WRITE)
    place, text = 0, text.rstrip()
    while place < len(text):
        found = _TOKEN.match(text, place)
        if found is None:
            raise _refuse(f"at character {place + 1}")
        kind = str(found.lastgroup)
        written = found[kind]
        if kind == "text":
            written = written[1:-1].replace(2 * written[0], written[0])
        yield "text" if kind == "date" else kind, written
        place = found.end()


def _refuse(where: str) -> SpecError:
    return SpecError(f"the condition cannot be read {where}", "`where`", _WRITE)
