"""Public domains by name, such as `us_states`, and ranges of whole numbers, such as `1..14`, as a schema may write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dpdask.conditions import Level
from dpdask.documents import suggest

MAX_LEVELS = 2**11  # of a column, but for mechanisms that take more
MAX_LISTED = 2**15  # of a categorical column in a schema
DISCOVER = "discover"  # in place of levels: they are yet to be found
N_LEVELS = "a column may have between 1 and {:,} levels; declare a column with more values continuous, or bin it, or find the commonest by `levels: discover`"
RANGE = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})")
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
        text = None if data is None else data.decode(encoding)
    except UnicodeError:
        return None
    return text if text is None or write_text(text, encoding) == data else None


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
