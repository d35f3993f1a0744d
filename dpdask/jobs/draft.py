"""A first schema of a table, from the names, types and null flags in its metadata: what only people know is left as TODO."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path

import pyarrow as pa

from dpdask.codec import codec_for, is_dated, is_real, is_span, is_text, tell_unit
from dpdask.conditions import Level
from dpdask.documents import parse_value, parse_yaml, suggest
from dpdask.errors import DataError, OutputError, SpecError
from dpdask.io.files import FoundColumn
from dpdask.io.storage import absolute_url
from dpdask.jobs.spec import Input
from dpdask.schema import DISCOVER, MAX_LEVELS, Schema

Line = tuple[str, str, str]  # key, value, comment

_HEAD = """\
# A draft by `dpdask init`, from names, types and null flags alone: no value was read.
# Replace each TODO, or remove its line; `dpdask validate JOB` names those that are left.
#   role    privatise, keep (public: copied as it is) or drop. A column that is kept or dropped has a role alone.
#   kind    categorical or discrete (with levels), continuous (with bounds), or mixed (with bounds and atoms).
#   levels  all values that are possible; `other: <level>` replaces every other value. discover: nobody can list them, and `dpdask discover` will.
#   bounds  the lowest and the highest possible value, such as [0, 120] or [2000-01-01, 2024-12-31]; values outside are clipped.
#   nulls   level (null is one more value) or refuse (a null stops the job); the files allow nulls in the columns that have this key here.
# What everybody knows of several columns, such as `start <= end` or `total: fare + tip`, can stand below the columns, as `rules`.
# Levels and bounds must be public knowledge, such as a code list or a legal range: what was looked up in the table reveals its values.
columns:
"""
_ROLE: Line = ("role", "TODO", "")
_LEVELS: Line = ("levels", "TODO", "")
_NULLS: Line = ("nulls", "TODO", "")
_LONGEST_TYPE = 60
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_IDENTIFIER = re.compile(
    r"(^|_)(id|uuid|key|email|mail|phone|name|ssn|iban|address|ip)$|Id$|ID$", re.IGNORECASE
)
_TEXTS = re.compile(r"[A-Za-z_][\w-]*")
_WIDTH = 130


def draft_schema(source: Input, levels: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return a schema of a table as YAML.

    Parameters
    ----------
    source
        The table; a relative path is relative to the working folder.

    Privacy
    -------
    Nothing but names, types and null flags is looked at, so two tables that have these in common
    have the same draft.
    """
    columns = source.table_format.read_columns(
        source.path if source.catalog is not None else absolute_url(source.path)
    )
    names = [column.name for column in columns]
    # the first line of a CSV file may be a row
    shown = [column.name for column in columns if column.type is not None]
    for name in levels or {}:
        if name not in names:
            raise SpecError(
                "the table has no such column",
                f"levels of {name!r}",
                suggest(name, shown, "correct the list of levels"),
            )
    return _HEAD + "".join(
        _draft_column(column, (levels or {}).get(column.name)) for column in columns
    )


def _draft_column(column: FoundColumn, levels: Sequence[str] | None) -> str:
    told = (
        "in the names of folders"
        if column.in_folders
        else "type unknown"
        if column.type is None
        else " ".join(str(column.type).split())
    )
    hint = (
        "; by its name an identifier (drop it, unless it is public, or the unit of the job) or a code (give it levels)"
        if _IDENTIFIER.search(column.name)
        else ""
    )
    lines = [
        _ROLE
        if column.type is None or _can_be_private(column.type)
        else ("role", "TODO", "keep or drop: its type cannot be privatised")
    ]
    if column.in_folders:
        lines.append(("type", "TODO", "an Arrow type, such as int32 or string"))
    if levels is not None:
        lines += _declare_levels(column, levels)
    elif column.type is None or _can_be_private(column.type):
        lines += _leave_domain(column.type)
    if column.nullable and len(lines) > 1:
        lines.append(_NULLS)
    rest = "".join(
        f"    {key}: {value}{f'  # {comment}' if comment else ''}\n"
        for key, value, comment in lines
    )
    return f"  {_quote(column.name)}:  # {told[:_LONGEST_TYPE]}{hint}\n{rest}"


def _can_be_private(type_: pa.DataType) -> bool:
    checks = (
        pa.types.is_boolean,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_decimal,
        is_dated,
        is_span,
    )
    return any(check(type_) for check in checks) or is_text(type_)


def _leave_domain(type_: pa.DataType | None) -> list[Line]:
    """Return the kind that a type implies, and the domain that it leaves open."""
    if type_ is None:
        return [("kind", "TODO", ""), ("levels", "TODO", "or bounds")]
    if pa.types.is_boolean(type_):
        return [("kind", "categorical", ""), ("levels", "[false, true]", "")]
    if is_text(type_):
        return [("kind", "categorical", ""), _LEVELS]
    if pa.types.is_integer(type_):
        return [("kind", "TODO", ""), ("bounds", "TODO", "or levels, if it is discrete")]
    return [
        ("kind", "continuous", ""),
        (
            "bounds",
            "TODO",
            "" if is_real(type_) else tell_unit(type_) if is_span(type_) else "two dates",
        ),
    ]


def _declare_levels(column: FoundColumn, texts: Sequence[str]) -> list[Line]:
    """Return the kind and the levels of a column that a code list names: numbers and dates in increasing order."""
    where = f"levels of {column.name!r}"
    if len(texts) > MAX_LEVELS:
        why = f"of {len(texts):,} levels `dpdask discover` finds the commonest, {MAX_LEVELS:,} at most"
        rest = ("other", "TODO", "the level that replaces all others")
        return [("kind", "categorical", ""), ("levels", DISCOVER, why), rest]
    type_ = column.type or pa.string()
    try:
        levels: list[Level] = (
            list(texts) if is_text(type_) else pa.array(texts).cast(type_).to_pylist()
        )
    except pa.ArrowException:
        raise SpecError(
            f"not all are of the column's type {type_}", where, "correct the list of levels"
        ) from None
    if len(set(levels)) < len(levels):
        raise SpecError("a level is repeated", where, "correct the list of levels")
    ordered = not isinstance(levels[0], str | bool)
    shown = wrap_levels(map(write_level, sorted(levels) if ordered else levels))
    kind = "discrete" if ordered else "categorical"
    try:
        read = Schema.from_dict(
            {
                "columns": {
                    "x": {
                        "role": "privatise",
                        "kind": kind,
                        "levels": parse_value(shown, where),
                    }
                }
            }
        )
        codec = codec_for("x", read.columns["x"], type_)
        if not codec.has_levels or codec.levels.to_pylist() != (
            sorted(levels) if ordered else levels
        ):
            raise ValueError("other levels")
    except (SpecError, DataError, ValueError):
        raise SpecError(
            f"as values of the type {type_} they cannot be declared",
            where,
            "declare bounds, or store the column in another type",
        ) from None
    return [("kind", kind, ""), ("levels", shown, "")]


def wrap_levels(texts: Iterable[str]) -> str:
    """Return levels as a list in YAML, of lines that are not too long."""
    lines, row = list[str](), ""
    for text in texts:
        if row and len(row) + len(text) > _WIDTH:
            lines.append(row.rstrip())
            row = ""
        row += f"{text}, "
    return "[" + "\n      ".join([*lines, row.removesuffix(", ")]) + "]"


def write_level(level: Level) -> str:
    """Return a level as YAML and JSON read it."""
    if isinstance(level, datetime) and level == datetime.combine(level.date(), time()):
        level = level.date()  # levels are dates
    if isinstance(level, date):
        return level.isoformat()
    if isinstance(level, bool):
        return json.dumps(level)
    return _write_text(level) if isinstance(level, str) else str(level)


def _write_text(text: str) -> str:
    """Return a text in quotes; YAML refuses some characters as they are, and reads others as an end of line."""
    quoted = json.dumps(text, ensure_ascii=False)
    return _ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], quoted)


def _quote(name: str) -> str:
    """Return a column's name as a YAML key: in quotes, unless YAML reads it as it is."""
    if _TEXTS.fullmatch(name):
        try:
            if parse_yaml(f"{name}: 1", name) == {name: 1}:
                return name
        except SpecError:  # such as `no`
            pass
    return _write_text(name)


def read_levels(path: str) -> dict[str, list[str]]:
    """Return the levels of columns in a public code list: a CSV file with the header `column,value` and a line for each level."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        rows = list(csv.reader(io.StringIO(text), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error):
        raise SpecError(
            "the list of levels cannot be read",
            path,
            "write a CSV file in UTF-8, with the header `column,value`",
        ) from None
    if not rows or rows[0] != ["column", "value"]:
        raise SpecError(
            "the list of levels has the wrong header", path, "begin it with the line `column,value`"
        )
    levels: dict[str, list[str]] = {}
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != 2:
            raise SpecError(
                f"line {number} has {len(row)} fields, not 2",
                path,
                "write a column and one of its values, separated by a comma",
            )
        levels.setdefault(row[0], []).append(row[1])
    return levels


def write_draft(draft: str, output: str) -> None:
    """Write a draft to a new file."""
    try:
        with Path(output).open("x", encoding="utf-8") as file:
            file.write(draft)
    except FileExistsError:
        raise OutputError(
            "this file is there already",
            output,
            "choose another name: an existing file is never overwritten",
        ) from None
    except OSError as error:
        raise OutputError(
            f"the file cannot be written ({type(error).__name__})", output, "choose another place"
        ) from None
