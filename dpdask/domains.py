"""Public domains by name, such as `us_states`, and ranges of whole numbers, such as `1..14`, as a schema may write them."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

from dpdask.conditions import Level, as_tuple
from dpdask.documents import suggest
from dpdask.errors import SpecError

MAX_LEVELS = 2**11  # of a column, but for mechanisms that take more
MAX_LISTED = 2**15  # of a categorical column in a schema
MAX_IN_TAXONOMY = 2**20  # values of a taxonomy
DISCOVER = "discover"  # in place of levels: they are yet to be found
N_LEVELS = "a column may have between 1 and {:,} levels; declare a column with more values continuous, or bin it, or find the commonest by `levels: discover`"
RANGE = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})")
BOUNDS = "bounds need two finite numbers or two dates, the lower one first; leave `bounds` out if every number is possible"
_QUOTED = "bounds are texts, and two numbers or two dates are expected; write dates such as 2000-01-31, all without quotes"
_EXPECTED = {
    "levels": "a list of levels, a range of whole numbers such as 1..14, or a name is expected",
    "bounds": "bounds need two finite numbers, two dates, or a name",
}


@cache
def list_domains() -> dict[str, dict[str, Any]]:
    """Return the public domains that have names: for each its `source`, and its `levels` or `bounds`."""
    text = Path(__file__).with_name("domains.json").read_text(encoding="utf-8")
    named: dict[str, dict[str, Any]] = json.loads(text)
    return named


def find_named(name: str, key: Literal["levels", "bounds"]) -> Any:
    """Return the levels or the bounds that a name stands for; a ValueError if it stands for none."""
    named, other = list_domains(), "bounds" if key == "levels" else "levels"
    if other in named.get(name, ()):
        raise ValueError(f"{name!r} names public {other}; write `{other}: {name}`")
    if name not in named:
        known = [each for each, domain in named.items() if key in domain]
        hint = suggest(name, known, f"the names are {', '.join(known)}")
        raise ValueError(f"{_EXPECTED[key]}; {hint}")
    return named[name][key]


def list_levels(text: str) -> list[Level]:
    """Return the levels that a text stands for: a range of whole numbers, or the name of a public list."""
    found = RANGE.fullmatch(text)
    if found is None:
        named = find_named(text, "levels")
        return list_levels(named) if isinstance(named, str) else list(named)
    low, high = map(int, found.groups())
    if low > high:
        raise ValueError(f"{low} is above {high}; swap them")
    if high - low >= MAX_LISTED:
        raise ValueError(N_LEVELS.format(MAX_LISTED))
    return [*range(low, high + 1)]


@dataclass(frozen=True, slots=True, eq=False)
class Ancestors:
    """What stands above each value of a taxonomy."""

    parents: Mapping[Level, Level]

    def climb(self, value: Level) -> list[Any]:
        """Return a value below all of its ancestors, the topmost one first."""
        path = {value: None}
        while (value := self.parents.get(value, value)) not in path:
            path[value] = None
        return [*path][::-1]

    @property
    def roots(self) -> tuple[Level, ...]:
        """The topmost values."""
        return tuple({each: None for each in self.parents.values() if each not in self.parents})

    def check(self, pairs: Collection[tuple[Level, Level]]) -> None:
        """Check that pairs give a parent to each value, and that none is its own ancestor: then all are below a topmost one."""
        if not pairs:
            raise ValueError("the taxonomy is empty")
        if len(self.parents) < len(pairs):
            [(value, _)] = Counter(value for value, _ in pairs).most_common(1)
            raise ValueError(f"{value!r} has two parents in the taxonomy; give it one")
        for value in self.parents:
            if self.climb(value)[0] in self.parents:
                raise ValueError(f"the taxonomy goes in a circle above {value!r}")

    def find_levels(self, levels: Collection[Level]) -> dict[Level, Level]:
        """Return the level that stands for each value that is none: the nearest of its ancestors."""
        known, found = set(levels), {}
        for value in (each for each in self.parents if each not in known):
            above = self.climb(value)[-2::-1]
            if nearest := [each for each in above if each in known][:1]:
                [found[value]] = nearest
        return found


def read_taxonomy(path: Path, column: Mapping[str, Any]) -> list[list[Any]]:
    """Return the pairs of a CSV file, in the type of a column's levels."""
    listed = column.get("levels")
    with suppress(ValueError):
        listed = list_levels(listed) if isinstance(listed, str) else listed
    given = [column.get("other"), *(listed if isinstance(listed, list) else ())]
    kinds = {type(level) for level in given if level is not None} or {str}
    kind: Any = float if float in kinds else kinds.pop()
    named = {date: date.fromisoformat, bool: {"true": True, "false": False}.__getitem__}
    read = named.get(kind, kind)
    hint = "begin with a line of two names, and write a line for each value: it, and its parent"
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head, *rows = filter(None, csv.reader(file, strict=True))
        pairs = [(value, parent) for value, parent in rows]
    except (ValueError, csv.Error):
        raise SpecError("this is no CSV file of two columns in UTF-8", path.name, hint) from None
    except OSError:
        raise SpecError("the taxonomy cannot be read", str(path), "correct its path") from None
    # else the first pair would be lost in silence
    if len(head) != 2 or {*head} & {each for pair in pairs for each in pair}:
        raise SpecError("its first line holds values, and no names of columns", path.name, hint)
    try:
        return [[read(value), read(parent)] for value, parent in pairs]
    except (KeyError, ValueError):
        what = "its values are not of the kind of the column's levels"
        raise SpecError(what, path.name, "correct them, or the levels and `other`") from None


def check_encoding(encoding: str, levels: Iterable[object]) -> None:
    """Check that the levels are texts that an encoding has; a ValueError if not."""
    try:
        "".encode(encoding)
    except (LookupError, ValueError):
        what = f"the encoding {encoding!r} is not known; write utf-8, latin-1 or another name of Python's"
        raise ValueError(what) from None
    for level in levels:
        if not isinstance(level, str):
            raise ValueError("`encoding` belongs to a categorical column whose levels are texts")  # noqa: TRY004 - pydantic collects ValueErrors
        if read_text(write_text(level, encoding) or b"", encoding) != level:
            raise ValueError(f"not all levels can be written in {encoding}; correct one of the two")


def write_text(text: str, encoding: str) -> bytes | None:
    """Return the bytes of a text; None if the encoding does not have it."""
    try:
        return text.encode(encoding)
    except UnicodeError:
        return None


def read_text(data: bytes | None, encoding: str) -> str | None:
    """Return the text that is written by just these bytes; None if there is none."""
    try:
        text = "" if data is None else data.decode(encoding)
        text.encode()  # Arrow holds no part of a pair of surrogates
    except UnicodeError:
        return None
    return text if data is not None and write_text(text, encoding) == data else None


def with_other(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the level `other` to levels that are given by a text, which cannot hold it."""
    text, other = data.get("levels"), data.get("other")
    if not isinstance(text, str) or text == DISCOVER or other is None:
        return data
    try:
        levels = list_levels(text)
    except ValueError:  # told when the levels are read
        return data
    if other not in levels:
        levels = [*levels, other]
        if {type(level) for level in levels} <= {int, float}:
            levels.sort()
    return {**data, "levels": levels}


# ---- how documents write domains


def _as_levels(value: object) -> object:
    value = list_levels(value) if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or any(
        type(level) not in (bool, int, float, str, date) for level in value
    ):
        raise ValueError(
            "a list of numbers, texts, dates or true and false is expected; a missing value is declared by `nulls: level`"
        )
    return tuple(value)


def _as_levels_or_discover(value: object) -> object:
    if value in ([], ()):
        raise ValueError(N_LEVELS.format(MAX_LISTED))
    return () if value == DISCOVER else _as_levels(value)


def _as_level(value: object) -> object:
    if type(value) not in (bool, int, float, str, date, type(None)):
        raise ValueError("a number, a text, a date, true or false is expected: one of the levels")
    return value


def _as_nulls(value: object) -> object:
    if isinstance(value, bool):
        text = "`level` (null is one more value) or `refuse` (a null stops the job) is expected"
        raise ValueError(text)  # noqa: TRY004 - pydantic collects ValueErrors
    return value


def _as_bounds(value: object) -> object:
    value = find_named(value, "bounds") if isinstance(value, str) else value
    if isinstance(value, list | tuple) and any(isinstance(bound, str) for bound in value):
        raise ValueError(_QUOTED)
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or isinstance(value[0], date) != isinstance(value[1], date)
    ):
        raise ValueError(BOUNDS)
    if any(
        type(bound) is int and abs(bound) < 2**1023 and int(float(bound)) != bound
        for bound in value
    ):
        raise ValueError(
            "whole bounds beyond ±2**53 are not exact; round them outward, as in 10000000000000000, and declare a `unit`; or list the column's values as levels; or, if it holds floats, write the bound as in 1.0e+16"
        )
    return tuple(value)


def _as_taxonomy(value: object) -> object:
    if isinstance(value, str):
        raise ValueError("a file of pairs is read with a schema that is a file itself; list them")  # noqa: TRY004 - pydantic collects ValueErrors
    return as_tuple(value)


Levels = Annotated[tuple[Level, ...], BeforeValidator(_as_levels)]
Taxonomy = Annotated[
    tuple[Annotated[tuple[Level, Level], BeforeValidator(as_tuple)], ...],
    BeforeValidator(_as_taxonomy),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "array"}}]}),
]
_ONE_LEVEL = [{"type": each} for each in ("boolean", "integer", "number", "string")]
_NAME = {"type": "string", "pattern": "^[a-z][a-z0-9_]*$"}
# an empty tuple stands for levels that are yet to be found
LevelsOrDiscover = Annotated[
    tuple[Level, ...],
    BeforeValidator(_as_levels_or_discover),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": DISCOVER},
                {"type": "string", "pattern": f"^{RANGE.pattern}$"},
                _NAME,
                {"type": "array", "items": {"anyOf": _ONE_LEVEL}},
            ]
        }
    ),
]
OneLevel = Annotated[Level | None, BeforeValidator(_as_level)]
Nulls = Annotated[Literal["refuse", "level"], BeforeValidator(_as_nulls)]
Bound = float | datetime | date
_ONE_BOUND = {
    "anyOf": [
        {"type": "number"},
        *({"format": each, "type": "string"} for each in ("date-time", "date")),
    ]
}
_TWO_BOUNDS = {"type": "array", "prefixItems": [_ONE_BOUND] * 2, "minItems": 2, "maxItems": 2}
Bounds = Annotated[
    tuple[Bound, Bound],
    BeforeValidator(_as_bounds),
    WithJsonSchema({"anyOf": [_NAME, _TWO_BOUNDS]}),
]
