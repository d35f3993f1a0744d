"""A first schema of a table, from the names, types and null flags in its metadata, and a job beside it: what only people know is left as TODO."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import pyarrow as pa

from dpdask.codec import codec_for, is_bytes, is_text
from dpdask.conditions import Level
from dpdask.documents import parse_value, parse_yaml, suggest
from dpdask.domains import DISCOVER, MAX_LEVELS
from dpdask.errors import DataError, SpecError
from dpdask.io.files import FoundColumn
from dpdask.io.storage import absolute_url
from dpdask.jobs.inputs import Input
from dpdask.scales import is_dated, is_span
from dpdask.schema import Schema

_HEAD = """\
# A draft by `dpdask init`, from names, types and null flags alone: no value was read. Every column is dropped until you turn it on:
# replace its `{role: drop}` by what its comment proposes, corrected, or by `{role: keep}` if it is public, to copy it as it is.
#   kind    categorical or discrete (with levels), continuous (with bounds), or mixed (with bounds and atoms).
#   levels  all values that are possible: a list, whole numbers such as 1..14, or a public list such as us_states.
#           discover: nobody can list them, and `dpdask discover` will. `other` replaces every other value; without it one stops the job.
#   bounds  the lowest and the highest possible value, such as [0, 120] or [2000-01-01, 2024-12-31]; values outside are clipped.
#   nulls   level: null is one more value; refuse: a null stops the job. The files allow nulls where it stands here.
# What everybody knows of several columns, such as `start <= end` or `total: fare + tip`, can stand below the columns, as `rules`.
# A domain that is proposed is a guess by the name: check it. It must be public knowledge, such as a code list or a legal range; what was
# looked up in the table reveals its values. `dpdask validate` names each TODO that is left.
columns:
"""
_LONGEST_TYPE = 60
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_IDENTIFIER = re.compile(
    r"(^|_)(id|ids|uid|uuid|guid|key|hash|token|email|mail|phone|tel|telephone|mobile|fax|name|surname|lastname|firstname|username|login|ssn"
    r"|iban|address|street|ip|mac|imei|vin|mrn|npi|url|passport|account|acct|licen[cs]e|plate)$|.+_(nbr|no|nr|number)$"
)
_OF_ROWS = re.compile("((row|record|line)_)?(id|ids|uid|uuid|guid|key|hash|nr|no|number)")
_CODE = re.compile(
    r"(^|_)(code|codes|cd|zip|zip_?code|zip_?[45]|postcode|postal|plz|fips|naics|sic|cpt|hcpcs|ndc|icd(_?(9|10))?)$"
)
_TRUTH = re.compile("(is|has)_")
_NUMBERS = "continuous, bounds: "
# what the name of a column of whole numbers, of any numbers or of texts proposes
_WHOLE = {
    r"day_?of_?month|day": "discrete, levels: days_of_month",
    r"(.+_)?(weekday|dow|day_?of_?week)": "discrete, levels: weekdays",
    r"(.+_)?month": "discrete, levels: months",
    r"(.+_)?(hour|hr)(_?of_?day)?": "discrete, levels: hours",
    r"(.+_)?minute": "discrete, levels: minutes",
    r"(.+_)?(quarter|qtr)": "discrete, levels: 1..4",
    r"(.+_)?(year|yr)": f"{_NUMBERS}[1900, 2100]",
    r"(.+_)?(sex|gender)": "categorical, levels: sexes_iso_5218",
    r"(is|has)_.+|(.+_)?flag": "categorical, levels: 0..1",
}
_ANY_NUMBER = {
    r"(.+_)?(age|agep)": f"{_NUMBERS}ages",
    r"(.+_)?(lat|latitude)": f"{_NUMBERS}latitudes",
    r"(.+_)?(lon|lng|long|longitude)": f"{_NUMBERS}longitudes",
    r"(.+_)?(pct|percent|percentage)": f"{_NUMBERS}percentages",
}
_FRACTIONS = {r"(.+_)?(share|fraction|prob|probability)": f"{_NUMBERS}shares"}
_TEXTS = {
    r"(.+_)?(country|nationality)(_code)?": "iso_countries",
    r"(.+_)?state(_code)?": "us_states",
    r"(.+_)?(sex|gender)": "sexes",
    r"(.+_)?month(_name)?": "month_names",
    r"(.+_)?(weekday|dow|day_?of_?week|day)(_name)?": "weekday_names",
    r"(.+_)?naics_sector": "naics_sectors",
    r"(.+_)?icd(_?10)?_chapter": "icd10_chapters",
}
_OR = {
    "iso_countries": "iso_countries_3",
    "us_states": "us_state_names",
    "sexes": "sexes_fm",
    "month_names": "month_names_3",
    "weekday_names": "weekday_names_3",
}
_KEY = re.compile(r"[A-Za-z_][\w-]*")
_WIDTH = 130


def draft_schema(source: Input, levels: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return a schema of a table as YAML.

    Parameters
    ----------
    source
        The table; a relative path is relative to the working folder.
    levels
        Of columns, or of patterns of their names such as `num_*`, what a code list says. A column has those of its name, or of the first pattern.

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
    given = levels or {}
    for pattern in given:
        if pattern not in names and not any(fnmatchcase(name, pattern) for name in names):
            raise SpecError(
                "the table has no such column",
                f"levels of {pattern!r}",
                suggest(pattern, shown, "correct the list of levels"),
            )

    def find(name: str) -> Sequence[str] | None:
        matching = (own for pattern, own in given.items() if fnmatchcase(name, pattern))
        return given.get(name) or next(matching, None)

    return _HEAD + "".join(_draft_column(column, find(column.name)) for column in columns)


def _draft_column(column: FoundColumn, levels: Sequence[str] | None) -> str:
    """Return the line of a column: dropped, with what it could be; or turned on, if a code list names it."""
    told = (
        "in the names of folders"
        if column.in_folders
        else "type unknown"
        if column.type is None
        else " ".join(str(column.type).split())[:_LONGEST_TYPE]
    )
    nulls = ", nulls: level" if column.nullable else ""
    if levels is not None:
        typed = ", type: TODO" if column.in_folders else ""
        drawn = f"{{role: privatise{typed}, kind: {_declare_levels(column, levels)}{nulls}}}"
        return f"  {_quote(column.name)}: {drawn}  # {told}\n"
    proposed = _propose(column)
    could = [f"{{role: privatise, {each}{nulls}}}" for each in proposed]
    could += [f"levels: {_OR[each.split()[-1]]}" for each in proposed if each.split()[-1] in _OR]
    told += f": {' or '.join(could)}" if could else f"; {_say_why_not(column)}"
    return f"  {_quote(column.name)}: {{role: drop}}  # {told}\n"


def _split_name(name: str) -> str:
    """Return the words of a name in lower case, as `user_id` of `userId`."""
    return "_".join(_WORD.findall(name)).lower()


def names_identifier(column: str) -> bool:
    """Return whether a column is an identifier by its name."""
    name = _split_name(column)
    return _IDENTIFIER.search(name) is not None and _TRUTH.match(name) is None


def names_repeated(column: str) -> bool:
    """Return whether a column is by its name an identifier of something else than its row."""
    return names_identifier(column) and not _OF_ROWS.fullmatch(_split_name(column))


def _say_why_not(column: FoundColumn) -> str:
    if column.type is not None and not _can_be_private(column.type):
        return "its type cannot be privatised"
    return "by its name an identifier: leave it, or name it as the `unit` of a job; `levels: discover` finds values that many rows share"


def _propose(column: FoundColumn) -> list[str]:
    """Return what a column could be, by its name and type: a kind with its domain; nothing for an identifier."""
    type_, name = column.type, _split_name(column.name)
    if type_ is not None and pa.types.is_boolean(type_):
        return ["kind: categorical, levels: [false, true]"]
    if type_ is not None and not _can_be_private(type_):
        return []
    if names_identifier(column.name):
        return []
    is_text_ = type_ is not None and (is_text(type_) or is_bytes(type_))
    is_code = bool(_CODE.search(name))
    is_whole = type_ is not None and pa.types.is_integer(type_)
    fixed = type_ is not None and pa.types.is_fixed_size_binary(type_)  # of as many bytes each
    listed = _find_rule(_TEXTS, name) or f"{DISCOVER}, other: {'TODO' if fixed else 'other'}"
    text = f"kind: categorical{_declare_encoding(type_)}, levels: {listed}"
    number = f"kind: {_NUMBERS}TODO"
    if type_ is None or is_whole or pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        rules = _ANY_NUMBER | (_WHOLE if is_whole else _FRACTIONS)
        if type_ is None:
            rules |= _WHOLE
        number = f"kind: {_find_rule(rules, name) or f'{_NUMBERS}TODO'}"
        if is_whole and is_code:
            number = f"kind: categorical, levels: {DISCOVER}, other: -1"
    if column.in_folders:
        return [f"type: string, {text}", f"type: int32, {number}"]
    if type_ is None:
        named = [each for each in (number, text) if "TODO" not in each and DISCOVER not in each]
        return [f"type: string, {text}"] if is_code else named or [number, text]
    return [text if is_text_ else number]


def _find_rule(rules: Mapping[str, str], name: str) -> str | None:
    return next((told for pattern, told in rules.items() if re.fullmatch(pattern, name)), None)


def _can_be_private(type_: pa.DataType) -> bool:
    checks = (
        pa.types.is_boolean,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_decimal,
        is_dated,
        is_span,
    )
    return any(check(type_) for check in checks) or is_text(type_) or is_bytes(type_)


def _declare_encoding(type_: pa.DataType | None) -> str:
    return ", encoding: utf-8" if type_ is not None and is_bytes(type_) else ""


def _declare_levels(column: FoundColumn, texts: Sequence[str]) -> str:
    """Return the kind and the domain of a column that a code list names: numbers and dates in increasing order, or bounds, as `0..120`."""
    where = f"levels of {column.name!r}"
    stored = column.type or pa.string()
    type_, encoding = (pa.string() if is_bytes(stored) else stored), _declare_encoding(stored)
    if len(texts) > MAX_LEVELS or list(texts) == [DISCOVER]:  # the commonest are found
        other = "other" if is_text(type_) else "TODO"
        return f"categorical{encoding}, levels: {DISCOVER}, other: {other}"
    if len(texts) == 1 and ".." in texts[0] and not is_text(type_):
        return _declare_bounds(type_, texts[0], where)
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
                        **({"encoding": "utf-8"} if encoding else {}),
                    }
                }
            }
        )
        codec = codec_for("x", read.columns["x"], stored)
        if not codec.has_levels or codec.levels.to_pylist() != (
            sorted(levels) if ordered else levels
        ):
            raise ValueError("other levels")
    except (SpecError, DataError, ValueError):
        raise SpecError(
            f"as values of the type {stored} they cannot be declared",
            where,
            "declare bounds, or store the column in another type",
        ) from None
    return f"{kind}{encoding}, levels: {shown}"


def _declare_bounds(type_: pa.DataType, text: str, where: str) -> str:
    """Return the kind and the bounds of a column whose code list has one line, such as `0..120`."""
    shown = f"[{', '.join(text.split('..', 1))}]"
    try:
        given = {"role": "privatise", "kind": "continuous", "bounds": parse_value(shown, where)}
        codec_for("x", Schema.from_dict({"columns": {"x": given}}).columns["x"], type_)
    except (SpecError, DataError, ValueError):
        hint = "write the lowest and the highest possible value, such as 0..120"
        raise SpecError(f"they are no bounds of the type {type_}", where, hint) from None
    return f"continuous, bounds: {shown}"


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
    if _KEY.fullmatch(name):
        try:
            if parse_yaml(f"{name}: 1", name) == {name: 1}:
                return name
        except SpecError:  # such as `no`
            pass
    return _write_text(name)


def read_levels(path: str) -> dict[str, list[str]]:
    """Return the levels of columns, or of patterns of names, in a public code list: a CSV file with the header `column,value` and a line for each level."""
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


_ROWS = "{epsilon: 1.0, delta: 0, adjacency: replace-one, unit: row}"
_COUNTS = "{epsilon: 1.0, delta: 1.0e-9, adjacency: add-remove, unit: row}"
# the promise and the mechanism of a first job, by the mechanism's kind
_JOBS = {
    "dip": (_ROWS, "{kind: dip, reference: {kind: histogram}, channel: optimal}"),
    "copula": (_COUNTS, "{kind: copula, n_rows: input}"),
    "marginals": (
        _COUNTS,
        "{kind: marginals, cliques: TODO}  # the tables, such as [[age], [age, sex]]",
    ),
    "histogram": (_ROWS, "{kind: histogram}"),
    "interval": (
        "",
        "{kind: interval, columns: TODO}  # such as {age: {design: case2, anchors: {name: uniform, loc: 0, scale: 120}}}",
    ),
}
JOB_KINDS = tuple(_JOBS)


def draft_job(source: Input, kind: str, schema: str, folder: str) -> str:
    """Return a job as YAML that releases a table with a mechanism.

    Parameters
    ----------
    source
        The table; a relative path is relative to the working folder.
    kind
        One of `JOB_KINDS`.
    schema, folder
        The schema's file beside the job, and the job's folder.
    """
    path = source.path
    if "://" not in path and source.catalog is None:
        path = os.path.relpath(path, folder) if not Path(path).is_absolute() else path
    name = re.sub(r"[^\w-]+", "-", PurePosixPath(path).name.partition(".")[0]).strip("-") or "table"
    read = {"path": path, **source.model_dump(mode="json", exclude_unset=True, exclude={"path"})}
    privacy, mechanism = _JOBS[kind]
    unit = (
        "  # or unit: {column: NAME, max_rows: 20}, which protects all rows with one value of NAME"
    )
    lines = [
        "# A draft by `dpdask init`. Paths are relative to this file.",
        f"name: {_write_text(name)}",
        f"input: {json.dumps(read, ensure_ascii=False)}",
        f"output: {{path: {_write_text(f'{name}-released')}}}",
        f"schema: {_write_text(schema)}",
        *([f"privacy: {privacy}{unit}"] if privacy else []),
        f"mechanism: {mechanism}",
    ]
    if privacy:
        lines.append(
            f'# ledger: {{url: "sqlite:///ledger.db", dataset: {_write_text(name)}}}  # the budget that it is charged to'
        )
    return "\n".join(lines) + "\n"
