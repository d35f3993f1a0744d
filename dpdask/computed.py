"""Columns that follow from others: a table is counted without them, and they are computed in what is released.

A mechanism sees another table than the schema declares. A sum is left out. Of columns in an order `start <= end`, it sees
`start` and the difference `end - start`. Of a mechanism that releases rows, two columns whose pairs are listed are one column of pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpdask.archive import Json, Named
from dpdask.arrays import Flags, Floats, Ints
from dpdask.codec import Codecs, ValueCodec, codec_for
from dpdask.conditions import Level, Terms
from dpdask.domains import MAX_LEVELS
from dpdask.errors import DataError, SpecError, quote_names
from dpdask.scales import count_type, find_limits, name_unit
from dpdask.schema import Column, Schema

Pair = tuple[Level | None, Level | None]
_WHERE = "schema, rules"
_EXACT = 2.0**53
_MOST_DIGITS = 16  # after the point, beside which a decimal of 37 digits holds every whole number


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """Which columns of a schema follow from others, as its rules say.

    Attributes
    ----------
    sums
        Of each sum, its terms.
    gaps
        Of each column that is at least another one, that one; in an order in which it is known.
    pairs
        By two columns of levels, the pairs that exist; only for mechanisms that release rows.
    """

    sums: Mapping[str, Terms]
    gaps: Mapping[str, str]
    pairs: Mapping[tuple[str, str], tuple[Pair, ...]]

    @classmethod
    def of(cls, schema: Schema, *, joins: bool) -> Self:
        """Return what the rules of a schema compute.

        Parameters
        ----------
        joins
            Whether columns whose pairs are listed become one column.

        Raises
        ------
        SpecError
            If the rules contradict each other or the domains, whatever the table is.
        """
        gaps: dict[str, str] = {}
        for start, end in (step for rule in schema.rules for step in rule.steps):
            one, other = schema.columns[start], schema.columns[end]
            if {one.kind, other.kind} != {"discrete"}:
                _check_gap(start, end, one, other)
                if end in gaps:
                    what = f"{end!r} is at least {gaps[end]!r}, and at least {start!r}: of both it cannot be the sum"
                    raise SpecError(what, _WHERE, "write one chain, such as a <= b <= c")
                gaps[end] = start
        sums = {name: terms for rule in schema.rules for name, terms in rule.sums.items()}
        pairs = {
            rule.columns: rule.allow
            for rule in schema.rules
            if joins and rule.columns is not None and rule.allow is not None
        }
        found = cls(sums=sums, gaps=_sort(gaps), pairs=pairs)
        found._check(schema)
        return found

    def __bool__(self) -> bool:
        return bool(self.sums or self.gaps or self.pairs)

    @property
    def origins(self) -> dict[str, tuple[str, ...]]:
        """The columns of the table that each computed one is made of."""
        found = {name: tuple(term for _, term in terms) for name, terms in self.sums.items()}
        found |= {end: (start, end) for end, start in self.gaps.items()}
        return found | {name: names for names in self.pairs for name in names}

    @property
    def told(self) -> dict[str, str]:
        """How each column is computed, in words."""
        found = {
            name: "".join(
                f" {'+' if sign > 0 else '-'} {term}" for sign, term in terms
            ).removeprefix(" + ")
            for name, terms in self.sums.items()
        }
        found |= {end: f"{start} + ({name_gap(end, start)})" for end, start in self.gaps.items()}
        for names in self.pairs:
            found |= dict.fromkeys(names, f"part of {name_pair(names)}")
        return found

    def model(self, schema: Schema) -> Schema:
        """Return the schema as a mechanism sees it."""
        if not self:
            return schema
        columns: dict[str, Column] = {}
        joined = {name: names for names in self.pairs for name in names}
        for name, column in schema.columns.items():
            if name in self.gaps:
                bounds = _measure_gap(schema.columns[self.gaps[name]], column)
                change = {"bounds": bounds, "type": None}
                columns[name_gap(name, self.gaps[name])] = column.model_copy(update=change)
            elif name in joined:
                names = joined[name]
                columns.setdefault(name_pair(names), _join(schema, names, self.pairs[names]))
            elif name not in self.sums:
                columns[name] = column
        rules = tuple(rule for rule in schema.rules if not self._replaces(rule.kind, rule.names))
        return schema.model_copy(update={"columns": columns, "rules": rules})

    def _replaces(self, kind: str, names: tuple[str, ...]) -> bool:
        if kind == "ordered":
            return any(name in self.gaps for name in names)
        return kind == "derived" or (kind == "allow" and names in self.pairs)

    def _check(self, schema: Schema) -> None:
        """Check that each column is computed once, is in no other rule, and has the domain that follows."""
        of_sums = [rule for rule in schema.rules if rule.kind == "derived"]
        counted = [name for rule in of_sums for name in rule.sums]
        counted += [*self.gaps, *(name for names in self.pairs for name in names)]
        for name in counted:
            if counted.count(name) > 1:
                what = f"two rules say what {name!r} follows from"
                raise SpecError(what, _WHERE, "remove one of the two")
        new = [*map(name_pair, self.pairs), *(name_gap(*gap) for gap in self.gaps.items())]
        for name in new:
            if name in schema.columns:
                what = f"a rule makes a column {name!r}, and the table has one"
                raise SpecError(what, _WHERE, "rename it in the table")
        parts = {term for terms in self.sums.values() for _, term in terms}
        for rule in schema.rules:
            if self._replaces(rule.kind, rule.names) and rule.kind != "ordered":
                continue
            for name in rule.names:
                if name in self.sums or (name in self.gaps and rule.kind != "ordered"):
                    what = f"{name!r} is computed from other columns, and another rule names it"
                    raise SpecError(what, _WHERE, "name the columns that it is computed from")
        for name, terms in self.sums.items():
            if name in parts:
                what = f"{name!r} is derived, and is a part of another column that is"
                raise SpecError(what, _WHERE, "write its own parts in place of it")
            _check_sum(name, terms, schema)


def name_gap(end: str, start: str) -> str:
    """Return the name of a difference."""
    return f"{end} - {start}"


def name_pair(names: tuple[str, str]) -> str:
    """Return the name of a column of pairs."""
    return " x ".join(names)


def _check_gap(start: str, end: str, one: Column, other: Column) -> None:
    where = f"{_WHERE}, {start} <= {end}"
    if one.has_levels or other.kind != "continuous":
        what = "columns in an order are all discrete, or all continuous"
        raise SpecError(what, where, f"declare {start!r} and {end!r} alike")
    if one.ends is None or other.ends is None:
        what = f"{start if one.ends is None else end!r} has no bounds, so their difference has none"
        raise SpecError(what, where, "declare its bounds")
    if one.is_dated != other.is_dated:
        raise SpecError("one of them holds dates and one numbers", where, "correct their bounds")
    if one.unit != other.unit:
        raise SpecError("they are counted in different units", where, "declare one `unit`")
    if one.ends[1] > other.ends[1]:
        what = f"contradicts the bounds: some values of {start!r} are above all of {end!r}"
        hint = (
            f"let both end at the same bound, and `outside: clip` mend the rows of {start!r} beyond"
        )
        raise SpecError(what, where, hint)


def _sort(gaps: Mapping[str, str]) -> dict[str, str]:
    """Return differences in an order in which each begins at a column that is known."""
    found: dict[str, str] = {}
    while len(found) < len(gaps):
        ready = {end: start for end, start in gaps.items() if end not in found}
        ready = {end: start for end, start in ready.items() if start in found or start not in gaps}
        if not ready:
            what = f"the rules put {quote_names([end for end in gaps if end not in found])} in a circle"
            raise SpecError(what, _WHERE, "remove one of them")
        found |= ready
    return found


def _measure_gap(one: Column, other: Column) -> tuple[float, float] | None:
    """Return the bounds of a difference of numbers; None of dates, whose unit is that of the table."""
    if one.ends is None or other.ends is None or one.is_dated:
        return None
    return 0.0, other.ends[1] - one.ends[0]


def _check_sum(name: str, terms: Terms, schema: Schema) -> None:
    column, where = schema.columns[name], f"{_WHERE}, {name}"
    if column.kind != "continuous":
        raise SpecError("a sum is continuous", where, f"declare {name!r} continuous")
    if any(schema.columns[each].unit is not None for each in (name, *(term for _, term in terms))):
        raise SpecError("sums and their parts have no `unit`", where, "leave it out, or the rule")
    for _, term in terms:
        part = schema.columns[term]
        values = (*part.listed, *(part.bounds or ()), *(part.atoms or ()))
        if any(not isinstance(value, int | float) or isinstance(value, bool) for value in values):
            raise SpecError(f"{term!r} holds no numbers", where, "name columns of numbers")
        if part.nulls == "level" and column.nulls != "level":
            what = f"{term!r} may be null, and then so is the sum"
            raise SpecError(what, where, f"declare `nulls: level` of {name!r}")
    if column.bounds is not None and column.ends is not None:
        low, high = find_range(terms, {term: _find_ends(schema.columns[term]) for _, term in terms})
        if low < column.ends[0] or column.ends[1] < high:
            what = f"the sum reaches from {low:g} to {high:g}, beyond the bounds of {name!r}"
            raise SpecError(what, where, "widen the bounds, or leave them out")


def _find_ends(column: Column) -> tuple[float, float] | None:
    """Return the least and the greatest number that a column may hold, as it is declared."""
    levels: Any = column.levels
    return (float(min(levels)), float(max(levels))) if levels else column.ends


def find_range(terms: Terms, ends: Mapping[str, tuple[float, float] | None]) -> tuple[float, float]:
    """Return the least and the greatest value of a sum."""
    low = high = 0.0
    for sign, term in terms:
        least, most = ends[term] or (-np.inf, np.inf)
        low, high = low + min(sign * least, sign * most), high + max(sign * least, sign * most)
    return low, high


def _join(schema: Schema, names: tuple[str, str], pairs: tuple[Pair, ...]) -> Column:
    """Return the column of the pairs of two columns that exist."""
    where, one, other = f"{_WHERE}, {name_pair(names)}", *(schema.columns[each] for each in names)
    levels = list_pairs(pairs)
    for side, column in enumerate((one, other)):
        known = {*column.listed, *([None] if column.nulls == "level" else [])}
        if not column.has_levels or not known >= {pair[side] for pair in pairs}:
            what = (
                f"`allow` lists pairs of levels, and not all of them are levels of {names[side]!r}"
            )
            raise SpecError(what, where, "correct the rule, or the column's levels")
        missing = sorted(map(str, known - {pair[side] for pair in pairs}))
        if missing:
            what = f"the rules let {missing[0]} of {names[side]!r} stand beside no value of the other column"
            raise SpecError(what, where, "correct the rule, or the column's levels")
    if not 1 <= len(levels) <= MAX_LEVELS or len(set(levels)) < len(levels):
        what = f"between 1 and {MAX_LEVELS:,} different pairs are expected"
        raise SpecError(what, where, "list fewer, each once")
    instead = tuple(None if column.outside == "null" else column.other for column in (one, other))
    other_level = None
    if "refuse" not in (one.outside, other.outside) and instead in pairs:
        other_level = levels[pairs.index(instead)]
    return Column(role="privatise", kind="categorical", levels=tuple(levels), other=other_level)


def list_pairs(pairs: Iterable[Pair]) -> list[str]:
    """Return pairs in words, such as `8001 | ZH`."""
    return [" | ".join("null" if level is None else str(level) for level in pair) for pair in pairs]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """A table as a mechanism sees it.

    Attributes
    ----------
    schema, types
        The columns as they are declared, and the types of those that are released.
    own
        The codec of each private column that is read.
    codecs
        The codec of each private column that the mechanism sees.
    """

    schema: Schema
    types: pa.Schema
    computed: Computed
    own: Mapping[str, Any]
    codecs: Mapping[str, Any]

    @classmethod
    def of(cls, schema: Schema, types: pa.Schema, *, joins: bool = False) -> Self:
        """Return the view of a table.

        Raises
        ------
        DataError
            If a declared domain does not fit a column's type; if a column cannot be computed exactly
            in its type.
        """
        computed = Computed.of(schema, joins=joins)
        own = {
            name: codec_for(name, schema.columns[name], types.field(name).type)
            for name in schema.privatised
            if name not in computed.sums
        }
        codecs, modelled = dict[str, Any](), computed.model(schema)
        gaps = {name_gap(end, start): (end, start) for end, start in computed.gaps.items()}
        for name in modelled.privatised:
            column = modelled.columns[name]
            if name in gaps:
                codecs[name] = _make_gap_codec(name, *(own[each] for each in gaps[name]))
            else:
                codecs[name] = own.get(name) or codec_for(name, column, pa.string())
        for name, terms in computed.sums.items():
            _check_sum_type(name, types.field(name).type, terms, own)
        return cls(schema=schema, types=types, computed=computed, own=own, codecs=codecs)

    @property
    def modelled(self) -> pa.Schema:
        """The types of the columns that a mechanism sees: first those of the table, in its order."""
        names = dict.fromkeys([*self.types.names, *self.codecs])
        return pa.schema([(name, self.codecs[name].type) for name in names if name in self.codecs])

    @property
    def told(self) -> dict[str, str]:
        """How columns are computed, in words, with the unit of differences of dates and times."""
        found = self.computed.told
        for end in self.computed.gaps:
            if pa.types.is_temporal(self.own[end].type):
                counted = count_type(self.own[end].type, self.own[end].unit)
                found[end] += f", counted in {name_unit(counted)}"
        return found

    def describe(self, parts: Mapping[str, Named]) -> dict[str, Json]:
        """Return what a card says of the columns: of those that the mechanism saw, and of those that are computed."""
        found = {name: dict(part) for name, part in parts.items()}
        counted = {name_gap(end, start): [end] for end, start in self.computed.gaps.items()}
        counted |= {name_pair(names): [*names] for names in self.computed.pairs}
        for name, computes in counted.items():
            found[name]["computes"] = computes  # it is not released itself
        for name, told in self.told.items():
            kind = self.schema.columns[name].kind
            found[name] = {"role": "computed", "kind": kind, "from": told}
        return found

    @property
    def expectations(self) -> tuple[str, ...]:
        """What a plan says of columns that are computed: a sentence, or none."""
        told = "; ".join(f"{name} = {how}" for name, how in self.told.items())
        what = "not measured, without a part of ε, but computed in what is released"
        return (f"{what}: {told}",) if told else ()

    def read(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows of the table as a mechanism sees them."""
        if not self.computed:
            return batch
        arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
        numbers: dict[str, tuple[Floats, Flags]] = {}
        for end, start in self.computed.gaps.items():
            codec = self.codecs[name_gap(end, start)]
            known = numbers[start] if start in numbers else self.own[start].encode(arrays[start])
            values, is_null = self.own[end].encode(arrays[end])
            begin = self._begin(start, *known)
            # a row that breaks the rule has a difference below 0, which lies outside its bounds
            dtype = codec.type.to_pandas_dtype()
            arrays[codec.name] = pa.array((values - begin).astype(dtype), mask=is_null)
            numbers[end] = np.maximum(values, begin), is_null
        for names, pairs in self.computed.pairs.items():
            codes = self._number(names, pairs)[
                tuple(self.own[name].encode(arrays[name]) for name in names)
            ]
            levels = pa.array([*list_pairs(pairs), ""])  # the last one is no level
            arrays[name_pair(names)] = levels.take(pa.array(codes % len(levels)))
        for name in self.computed.told:
            arrays.pop(name, None)
        return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))

    def write(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return released rows with the columns of the table, in its order, and any others after them."""
        if not self.computed:
            return batch
        arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
        for names, pairs in self.computed.pairs.items():
            codes = self.codecs[name_pair(names)].encode(arrays.pop(name_pair(names)))
            for side, name in enumerate(names):
                arrays[name] = self.own[name].decode(self._codes(name, pairs, side)[codes])
        for end, start in self.computed.gaps.items():
            codec = self.own[end]
            begin = self._begin(start, *self.own[start].encode(arrays[start]))
            gap, is_null = self.codecs[name_gap(end, start)].encode(
                arrays.pop(name_gap(end, start))
            )
            arrays[end] = codec.decode(np.clip(begin + gap, *codec.bounds), is_null)
        for name, terms in self.computed.sums.items():
            arrays[name] = _add(arrays, terms, self.types.field(name).type)
        order = dict.fromkeys(name for name in (*self.types.names, *arrays) if name in arrays)
        return pa.RecordBatch.from_arrays([arrays[name] for name in order], names=list(order))

    def _begin(self, start: str, values: Floats, is_null: Flags) -> Floats:
        """Return where differences begin: at the least value where the column is null."""
        bounds = self.own[start].bounds
        assert bounds is not None
        return np.where(is_null, bounds[0], values)

    def _codes(self, name: str, pairs: tuple[Pair, ...], side: int) -> Ints:
        """Return the code of a column in each pair."""
        levels = self.own[name].levels.to_pylist()
        return np.array([levels.index(pair[side]) for pair in pairs])

    def _number(self, names: tuple[str, str], pairs: tuple[Pair, ...]) -> Ints:
        """Return the number of each pair of codes; -1 where there is no such pair."""
        first, second = (self._codes(name, pairs, side) for side, name in enumerate(names))
        table = np.full([self.own[name].n_levels for name in names], -1)
        table[first, second] = np.arange(len(pairs))
        return table


def _make_gap_codec(name: str, end: Any, start: Any) -> ValueCodec:
    """Return the codec of a difference, which counts in the numbers of both columns."""
    whole = pa.types.is_integer(end.type) and pa.types.is_integer(start.type)
    if end.type != start.type and not whole:
        what = f"{start.name!r} is of the type {start.type}, and {end.name!r} of {end.type}"
        hint = "store both as the same type, or remove the rule"
        raise DataError(what, f"{_WHERE}, {start.name} <= {end.name}", hint)
    most = end.bounds[1] - start.bounds[0]
    if end.lattice and most > _EXACT:
        what = "their difference reaches beyond ±2**53, where whole numbers are no longer exact"
        raise DataError(what, f"{_WHERE}, {start.name} <= {end.name}", "narrow the bounds")
    return ValueCodec(
        name=name,
        type=pa.int64() if end.lattice else pa.float64(),
        bounds=(0.0, most),
        atoms=(),
        nulls=end.nulls,
        outside=end.outside,
    )


def _check_sum_type(name: str, type_: pa.DataType, terms: Terms, own: Codecs) -> None:
    """Check that a sum is exact in its type, and fits it."""
    where = f"{_WHERE}, {name}"
    for _, term in terms:
        if not _holds(type_, own[term].type):
            what = f"{name!r} is of the type {type_}, which does not hold all values of {term!r}, {own[term].type}"
            raise DataError(what, where, "store the sum in a wider type")
    low, high = find_range(terms, {term: _span(own[term]) for _, term in terms})
    least, most = find_limits(type_)
    if not pa.types.is_floating(type_) and not least <= low <= high <= most:
        what = f"its type {type_} does not hold the sum, which reaches from {low:g} to {high:g}"
        raise DataError(what, where, "store it in a wider type, or narrow the bounds of its parts")


def _span(codec: Any) -> tuple[float, float]:
    """Return the least and the greatest value of a column of numbers."""
    if codec.has_levels:
        levels = [float(level) for level in codec.levels.drop_null().to_pylist()]
        return min(levels), max(levels)
    return codec.bounds or (codec.least, codec.greatest)


def _holds(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Return whether a type of numbers holds each value of another one exactly."""
    if pa.types.is_integer(wide):
        return bool(pa.types.is_integer(narrow))
    if pa.types.is_decimal(wide):
        return bool(
            (pa.types.is_integer(narrow) and wide.scale <= _MOST_DIGITS)
            or (pa.types.is_decimal(narrow) and narrow.scale <= wide.scale)
        )
    if not pa.types.is_floating(wide):
        return False
    if pa.types.is_integer(narrow):
        return bool(wide.bit_width == 64 or narrow.bit_width <= 16)
    return bool(pa.types.is_floating(narrow) and narrow.bit_width <= wide.bit_width)


def _add(arrays: Mapping[str, pa.Array], terms: Terms, type_: pa.DataType) -> pa.Array:
    """Return a sum in its type, from left to right."""
    wide = type_  # parts may lie beyond the type of the sum
    if pa.types.is_integer(type_):
        wide = pa.int64()
    elif pa.types.is_decimal(type_):
        wide = pa.decimal128(37, type_.scale)  # Arrow adds a digit
    (_, first), *others = terms
    found = arrays[first].cast(wide)
    for sign, term in others:
        add = pc.add_checked if sign > 0 else pc.subtract_checked
        found = add(found, arrays[term].cast(wide)).cast(wide)
    return found.cast(type_)
