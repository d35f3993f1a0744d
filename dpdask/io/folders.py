"""Folders named `key=value`, as Hive, Spark and Dask write them: they hold the values of columns that the files in them do not."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from dpdask.errors import DataError, InputError, SpecError
from dpdask.io.filesystems import keeps_versions, mask
from dpdask.io.storage import Folder, call_storage
from dpdask.io.storage import remove_file as remove_from

NULL = "__HIVE_DEFAULT_PARTITION__"
# as Hive and Spark do; and a dot at the end, which a store of Azure does not take
_ESCAPED = re.compile(r"[\x00-\x1f\x7f\"#%'*/:=?\\{\[\]^]|\.$")
_MOST_BYTES = 255  # of a folder's name, on file systems
_MOST_PATH_BYTES = 600  # of all of them; S3 takes 1,024 for the whole path
# in the metadata of a shard: the types of the columns that its folders hold
_TYPES = b"dpdask.folders"


def split_folders(name: str) -> dict[str, str | None]:
    """Return the columns in a file's folders, each with its value as text; None is null."""
    found: dict[str, str | None] = {}
    for folder in name.split("/")[:-1]:
        key, sign, value = folder.partition("=")
        column = unquote(key)
        if column in found and sign:
            what = "two folders of one path hold this column"
            raise DataError(what, f"column {column!r}", "rename one of the two")
        if sign:
            found[column] = None if value == NULL else unquote(value)
    return found


def read_value(text: str | None, column: str, type_: pa.DataType) -> Any:
    """Return the value of a column that a folder's name holds."""
    try:
        return pa.array([text], pa.string()).cast(type_)[0].as_py()
    except (pa.ArrowException, ValueError, OverflowError):
        what = "the name of a folder cannot be read as this column's declared type"
        hint = "correct the schema's `type` or levels, or rename the folder"
        raise DataError(what, f"column {column!r}", hint) from None


def name_folders(values: Mapping[str, Any]) -> str:
    """Return the folders of files whose rows have these values."""
    return "/".join(f"{_escape(column)}={_write(value)}" for column, value in values.items())


def _write(value: Any) -> str:
    if value is None:
        return NULL
    return _escape(str(value).lower() if isinstance(value, bool) else str(value))


def _escape(text: str) -> str:
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", text)


def check_values(columns: Sequence[str], found: Collection[tuple[Any, ...]]) -> None:
    """Check that folders can be named by these combinations of values, and that readers can tell them apart."""
    named = [name_folders(dict(zip(columns, values, strict=True))) for values in found]
    longest = max((len(part.encode()) for name in named for part in name.split("/")), default=0)
    what = ""
    if any(value in ("", NULL) for values in found for value in values):
        what = "an empty text, or one that stands for null in the names of folders, is read back as null"
    elif longest > _MOST_BYTES or any(len(name.encode()) > _MOST_PATH_BYTES for name in named):
        what = "a text is too long for the name of a folder"
    elif len({unicodedata.normalize("NFC", name).casefold() for name in named}) < len(named):
        what = "two texts differ in upper and lower case alone, and not every file system tells such folders apart"
    if what:
        where = f"column {columns[0]!r}" if len(columns) == 1 else f"columns {', '.join(columns)}"
        hint = "write other texts in the input, or partition by another column"
        raise DataError(what, where, hint)


def check_partition_types(columns: Sequence[str], types: pa.Schema) -> None:
    """Check that columns have types of which a partition can be named."""
    for name in columns:
        type_ = _find_type(types, name)
        texts = pa.types.is_string(type_) or pa.types.is_large_string(type_)
        whole = pa.types.is_signed_integer(type_) or pa.types.is_boolean(type_)
        if not (texts or whole or pa.types.is_date32(type_)):
            what = f"a column of {type_} cannot be a partition column"
            hint = "take one of texts, whole numbers, dates or booleans"
            raise SpecError(what, f"output.partition_by {name!r}", hint)


def _find_type(types: pa.Schema, name: str) -> pa.DataType:
    type_ = types.field(name).type
    return type_.value_type if pa.types.is_dictionary(type_) else type_


def leave_to_folders(types: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """Return what a shard holds whose folders hold some columns: the others, and in its metadata the types of these."""
    held = {name: str(_find_type(types, name)) for name in columns}
    kept = [column for column in types if column.name not in held]
    return pa.schema(kept, {_TYPES: json.dumps(held).encode()})


def find_constants(types: pa.Schema, name: str) -> dict[str, pa.Scalar]:
    """Return the columns that a released shard leaves to its folders, each with the value of all its rows."""
    told = json.loads((types.metadata or {}).get(_TYPES, b"{}"))
    texts = split_folders(name) if told else {}
    kinds = {column: pa.type_for_alias(alias) for column, alias in told.items()}
    lost = next((column for column in kinds if column not in texts), None)
    if lost is not None:
        what = "this file lacks its folder, whose name holds a column"
        raise InputError(what, f"{mask(name)}, column {lost!r}", "restore the release")
    return {
        column: pa.scalar(read_value(texts[column], column, type_), type_)
        for column, type_ in kinds.items()
    }


def list_files(folder: Folder) -> list[str]:
    """Return the names of what is in a folder; in place of folders named `key=value`, those of what is in them."""
    names = folder.names()
    if not any("=" in name for name in names):
        return names
    if folder.is_local:
        return [*_list_local(folder, names)]

    inside = (name for name in list_tree(folder) if "=" in name.partition("/")[0])
    return sorted({*(name for name in names if "=" not in name), *inside})


def list_tree(folder: Folder) -> list[str]:
    """Return the names of all files in a folder of a store, and in the folders in it."""

    def look(fs: Any, path: str) -> list[str]:
        fs.invalidate_cache()
        return [str(found)[len(path.rstrip("/")) + 1 :] for found in fs.find(path)]

    return call_storage(folder.url, look)


def _list_local(folder: Folder, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        child = folder.child(name)
        # the files behind a link are not this folder's
        is_folder = "=" in name and not child.local_path.is_symlink()
        inside = child.names() if is_folder else []
        yield from (f"{name}/{each}" for each in _list_local(child, inside))
        if not inside:
            yield name


def remove_files(folder: Folder, names: Sequence[str]) -> None:
    """Remove files of a store that are there, by as few requests as it allows; another driver may remove them, too."""

    def remove(fs: Any, path: str) -> None:
        paths = [f"{path}/{name}" for name in names]
        if paths and not keeps_versions(fs, path):
            with suppress(FileNotFoundError):
                fs.rm(paths)
                return
        for each in paths:
            with suppress(FileNotFoundError):
                remove_from(fs, each, recursive=False)

    call_storage(folder.url, remove, writing=True)


def remove_file(folder: Folder, name: str) -> None:
    """Remove a file, and the folders named `key=value` in which nothing is left."""
    folder.remove(name)
    if folder.is_local:
        with suppress(OSError):  # it is not empty
            for parent in [*PurePosixPath(name).parents][:-1]:
                (folder.local_path / parent).rmdir()
