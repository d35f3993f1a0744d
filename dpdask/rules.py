"""Rules between columns on the cells that are counted: which cells cannot stand in one record."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.arrays import Flags, Ints
from dpdask.cells import Cells, CutColumns
from dpdask.cells import cells as make_cells
from dpdask.codec import codec_for, convert_bounds
from dpdask.errors import SpecError
from dpdask.schema import Rule, Schema

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
            levels[name] = make_cells(codec_for(name, column, type_), 1)
    CellRules.of([rule for rule in schema.rules if set(rule.names) <= set(levels)], levels)


def describe_rule(rule: Rule) -> dict[str, Any]:
    """Return a rule as it was written."""
    return rule.model_dump(mode="json", by_alias=True, exclude_none=True)


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
    low, high = convert_bounds(name, (known[0], known[1]), codec.type)
    firsts, lasts = column.firsts, column.edges[1:]
    inside = (firsts >= low) & (lasts <= high)
    # of numbers with a fraction, the end is not in the range, unless it is the upper bound
    following = high + 1.0 if codec.lattice else high
    cut = ~inside & (lasts >= low) & (firsts < following)
    if cut.any():
        what = "a rule's range of numbers must be made of whole cells"
        raise SpecError(what, where, f"begin cells in `bins` at {low:g} and {following:g}")
    atoms = np.array(codec.atoms)
    single = np.concatenate(
        [np.zeros(int(codec.nulls), dtype=np.bool_), (atoms >= low) & (atoms <= high)]
    )
    found: Flags = met | np.concatenate([single, inside])[column.possible]
    return found
