"""The log of a Delta table: what it holds, and one more entry, which makes files appear in it all at once.

The package deltalake works on a copy of the log: it reads the newest part, and writes the next
entry there. That entry is then created in the table by one conditional request. So reading and
committing need no other requests, options and credentials than all else in a store, nor a lock
table, and an entry is never put over another one.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dpdask.errors import MissingError, OutputError, SpecError, TemporaryError
from dpdask.io.shards import Mode, Shard, Transaction, count_committed
from dpdask.io.storage import Folder

if TYPE_CHECKING:
    from deltalake import DeltaTable

LOG = "_delta_log"
_CHECKPOINT = re.compile(
    r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10})|\.[0-9a-f-]{36})?\.(?:parquet|json)"
)
_ENTRY = re.compile(r"(\d{20})\.json")
_LAST = "_last_checkpoint"
_SIDECARS = "_sidecars"
_CHECKPOINT_INTERVAL = 100
_TRIES = 20
_REFUSED = set(" ,;{}()\n\t=")
_ELSEWHERE = "choose another output.path"
_RULES = ("delta.invariants", "delta.generationExpression", "delta.identity")
_PLAIN = {
    *(
        pa.bool_(),
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.date32(),
    ),
    *(pa.string(), pa.large_string(), pa.binary(), pa.large_binary()),
}


class DeltaLog:
    """The log of the Delta table in a folder."""

    folder_name = LOG

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._newest: dict[
            str, bytes
        ] = {}  # the files of the log that were read last: they never change

    def exists(self) -> bool:
        """Return whether there is a table."""
        return any(_ENTRY.fullmatch(name) for name in self._list())

    def find(self, release: str) -> int | None:
        """Return the number of the run that has committed a release, or None."""
        with self._copy() as root:
            table = _open(root, self._folder.url)
            return None if table is None else table.transaction_version(release)

    def count(self, name: Callable[[int], str]) -> int:
        """Return how many releases of a series are committed; for what is raised see `find`."""
        with self._copy() as root:
            table = _open(root, self._folder.url)
            return (
                0
                if table is None
                else count_committed(
                    lambda number: table.transaction_version(name(number)) is not None
                )
            )

    def check(self, types: pa.Schema, mode: Mode) -> None:
        """Check that these columns can be committed."""
        _require()
        _check_names(types)
        for column in types:
            if not _is_known(column.type):
                what = f"a Delta table has no type for {column.type}"
                raise SpecError(
                    what,
                    f"column {column.name!r}",
                    "cast it in the input (for instance to int64, float64 or timestamp[us]), or drop it",
                )
        with self._copy() as root:
            table = _open(root, self._folder.url)
            if table is not None:
                self._check_table(table, types, mode)
            _write_entry(
                root, table, Transaction("rehearsal", 0), (), types, {}, mode
            )  # in the copy alone

    def _check_table(self, table: DeltaTable, types: pa.Schema, mode: Mode) -> None:
        metadata, url = table.metadata(), self._folder.url
        if metadata.partition_columns:
            raise OutputError(
                "this table has partition columns, which are not supported", url, _ELSEWHERE
            )
        if metadata.configuration.get("delta.columnMapping.mode", "none") != "none":
            raise OutputError(
                "this table uses column mapping (other column names in its files), which is not supported",
                url,
                _ELSEWHERE,
            )
        fields = table.schema().fields
        ruled = [key for key in metadata.configuration if key.startswith("delta.constraints.")]
        ruled += [key for field in fields for key in field.metadata if key.startswith(_RULES)]
        if ruled:
            raise OutputError(
                f"this table has a rule for its rows ({ruled[0]}), which is not checked here",
                url,
                _ELSEWHERE,
            )
        if mode == "overwrite" and metadata.configuration.get("delta.appendOnly") == "true":
            raise OutputError("this table takes new rows only", url, "use `mode: append`")
        wanted = [(each.name, each.type) for each in _to_delta(types)]
        if [
            (each.name, each.type) for each in pa.schema(table.schema().to_arrow())
        ] != wanted or not all(field.nullable for field in fields):
            what = "this table has other columns than the release: their names, types and order must agree, and nulls be allowed"
            raise OutputError(what, url, _ELSEWHERE)

    def commit(
        self,
        transaction: Transaction,
        shards: Sequence[Shard],
        types: pa.Schema,
        about: Mapping[str, str],
        mode: Mode,
    ) -> None:
        """Write the log entry that makes shards the content of the table, or adds them; nothing happens if the release is there.

        Parameters
        ----------
        transaction
            The release and the run: the entry's application transaction and its version.
        about
            What the entry says of the release, beside what it does.
        mode
            Whether the table must not exist, its content stays, or is replaced.
        """
        for _ in range(_TRIES):
            with self._copy() as root:
                table = _open(root, self._folder.url)
                if table is not None and table.transaction_version(transaction.release) is not None:
                    return
                if table is not None and mode == "error":
                    raise OutputError(
                        "another writer has made this table", self._folder.url, _ELSEWHERE
                    )
                if table is not None:
                    self._check_table(table, types, mode)
                entry = _write_entry(root, table, transaction, shards, types, about, mode)
                if self._put(root, entry):
                    return
        raise TemporaryError(
            "other writers changed this table at the same time",
            self._folder.url,
            "run again to resume",
        )

    def _list(self) -> list[str]:
        """Return the names of the log's files, with entries that are missing in a listing because it is an earlier one."""
        names = self._folder.child(LOG).names()
        numbers = (
            int(name[:20])
            for name in names
            if _ENTRY.fullmatch(name) or _CHECKPOINT.fullmatch(name)
        )
        number = max(numbers, default=-1) + 1
        with suppress(MissingError):
            while True:
                name = f"{number:020}.json"
                self._newest[name] = self._folder.child(LOG).read(name)
                names.append(name)
                number += 1
        return names

    @contextmanager
    def _copy(self) -> Iterator[Path]:
        """Yield a local folder with a copy of the newest part of the log."""
        log = self._folder.child(LOG)
        with tempfile.TemporaryDirectory(prefix="dpdask-") as name:
            copied = Path(name) / LOG
            copied.mkdir()
            for _ in range(_TRIES):
                names = self._list()
                try:
                    self._newest = {
                        file: self._newest.get(file) or log.read(file)
                        for file in _list_newest(names)
                    }
                    for file, content in self._newest.items():
                        (copied / file).write_bytes(content)
                    for file in log.child(_SIDECARS).names() if _SIDECARS in names else ():
                        (copied / _SIDECARS).mkdir(exist_ok=True)
                        (copied / _SIDECARS / file).write_bytes(log.child(_SIDECARS).read(file))
                    break
                except MissingError:
                    continue  # an old file was removed, because there is a newer checkpoint
            else:
                raise TemporaryError(
                    "the log of this Delta table changes too fast to be read",
                    self._folder.url,
                    "run again to resume",
                )
            yield Path(name)

    def _put(self, root: Path, entry: str) -> bool:
        """Create an entry of a copy in the table, and a checkpoint after many; return whether the entry is there now, and not another one."""
        log, copied = self._folder.child(LOG), root / LOG
        line, rest = (copied / entry).read_text().split("\n", 1)
        info = json.loads(line)
        info["commitInfo"]["operationParameters"].pop("location", None)  # that of the copy
        if not log.put_new(entry, f"{json.dumps(info)}\n{rest}".encode()):
            return False
        version = int(entry.partition(".")[0])
        if version and version % _CHECKPOINT_INTERVAL == 0:
            with suppress(Exception):  # it only makes reading faster
                _load(root).create_checkpoint()
                [name] = [
                    path.name
                    for path in copied.iterdir()
                    if path.name.startswith(f"{version:020}.checkpoint")
                ]
                log.put_new(name, (copied / name).read_bytes())
                log.write(_LAST, (copied / _LAST).read_bytes())
        return True


def _write_entry(
    root: Path,
    table: DeltaTable | None,
    transaction: Transaction,
    shards: Sequence[Shard],
    types: pa.Schema,
    about: Mapping[str, str],
    mode: Mode,
) -> str:
    """Write the next entry of a copied log and return its name."""
    import deltalake
    from deltalake.exceptions import DeltaError
    from deltalake.transaction import AddAction, create_table_with_add_actions

    now = int(time.time() * 1000)
    adds = [
        AddAction(
            shard.name, shard.n_bytes, {}, now, True, json.dumps({"numRecords": shard.n_rows})
        )
        for shard in shards
    ]
    schema = deltalake.Schema.from_arrow(_to_delta(types))
    properties: Any = {
        "commit_properties": deltalake.CommitProperties(
            custom_metadata=dict(about),
            max_commit_retries=0,
            app_transactions=[deltalake.Transaction(transaction.release, transaction.run)],
        ),
        "post_commithook_properties": deltalake.PostCommitHookProperties(
            create_checkpoint=False, cleanup_expired_logs=False
        ),
    }
    before = {path.name for path in (root / LOG).iterdir()}
    try:
        if table is None:
            create_table_with_add_actions(
                str(root), schema, adds, mode="error", partition_by=[], **properties
            )
        else:
            table.create_write_transaction([*adds], mode, schema, **properties)
    except DeltaError:
        raise OutputError(
            "this table needs features of a writer that are not supported",
            "output.path",
            _ELSEWHERE,
        ) from None
    [entry] = [
        path.name
        for path in (root / LOG).iterdir()
        if path.name not in before and _ENTRY.fullmatch(path.name)
    ]
    return entry


def _open(root: Path, url: str) -> DeltaTable | None:
    """Open the copy of a table's log; None if it has no entries."""
    _require()
    if not any((root / LOG).iterdir()):
        return None
    from deltalake.exceptions import DeltaError

    try:
        return _load(root)
    except (DeltaError, ValueError, OSError):
        raise OutputError(
            "the log of this Delta table cannot be read",
            url,
            "repair the table, or choose another output.path",
        ) from None


def _load(root: Path) -> DeltaTable:
    from deltalake import DeltaTable

    return DeltaTable(str(root))


def _require() -> None:
    try:
        import deltalake  # noqa: F401 - the functions here need it
    except ImportError:
        raise SpecError(
            "a Delta table is written by the package deltalake, which is not installed",
            "output.format",
            "install dpdask[delta]",
        ) from None


def _list_newest(names: Sequence[str]) -> list[str]:
    """Return the names of the newest whole checkpoint, if there is one, and of the entries from there on."""
    parts: dict[int, list[str]] = {}
    for name in names:
        found = _CHECKPOINT.fullmatch(name)
        if found is not None and (
            found[3] is None
            or sum(other.startswith(f"{found[1]}.checkpoint.") for other in names) >= int(found[3])
        ):
            parts.setdefault(int(found[1]), []).append(name)
    newest = max(parts, default=0)
    entries = [name for name in names if _ENTRY.fullmatch(name) and int(name[:20]) >= newest]
    return [*parts.get(newest, ()), *entries]


def _check_names(fields: Sequence[pa.Field], inside: str = "") -> None:
    """Check the names of columns, and of the fields inside them: letters' case does not distinguish them, and Spark refuses some signs."""
    names: dict[str, str] = {}
    for field in fields:
        where = f"column {inside + field.name!r}"
        other = names.setdefault(field.name.lower(), field.name)
        if other != field.name:
            raise SpecError(
                f"in a Delta table its name is that of {inside + other!r}: upper and lower case count as one",
                where,
                "rename one of them in the input, or drop it",
            )
        if not _REFUSED.isdisjoint(field.name):
            raise SpecError(
                "Spark refuses this name in a Delta table: it has a space, a tab, a line break or one of ,;{}()=",
                where,
                "rename it in the input, or drop it",
            )
        _check_names(
            [field.type.field(place) for place in range(field.type.num_fields)],
            f"{inside}{field.name}.",
        )


def _is_known(type_: pa.DataType) -> bool:
    """Return whether Delta has a type that readers find in a file with this one."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return _is_known(type_.value_type)
    if pa.types.is_struct(type_):
        return all(_is_known(type_.field(place).type) for place in range(type_.num_fields))
    if pa.types.is_map(type_):
        return _is_known(type_.key_type) and _is_known(type_.item_type)
    return (
        type_ in _PLAIN
        or pa.types.is_decimal128(type_)
        or (pa.types.is_timestamp(type_) and type_.unit == "us")
    )


def _to_delta(types: pa.Schema) -> pa.Schema:
    """Return columns as a Delta table has them: texts and lists with short offsets, times with a zone as those of UTC, nulls everywhere."""
    return pa.schema([(column.name, _plain(column.type)) for column in types])


def _plain(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return pa.list_(pa.field("element", _plain(type_.value_type)))
    if pa.types.is_struct(type_):
        return pa.struct([(field.name, _plain(field.type)) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(_plain(type_.key_type), _plain(type_.item_type))
    if pa.types.is_large_string(type_) or pa.types.is_large_binary(type_):
        return pa.string() if pa.types.is_large_string(type_) else pa.binary()
    return (
        pa.timestamp("us", "UTC")
        if pa.types.is_timestamp(type_) and type_.tz is not None
        else type_
    )
