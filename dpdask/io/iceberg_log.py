"""An Iceberg table in its catalog: what it holds, and one more commit, which makes files appear in it all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from dpdask.errors import DpdaskError, OutputError, SpecError, TemporaryError
from dpdask.io.faults import storage_faults
from dpdask.io.fragment import UTC
from dpdask.io.shards import Mode, Shard, Transaction, count_committed
from dpdask.io.storage import Folder, absolute_url

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table
    from pyiceberg.table import Transaction as TableTransaction

_ACCESS = {"py-io-impl": "dpdask.io.iceberg_files.StoreFiles"}
_RETRIES = "commit.retry.num-retries"
_RELEASE = "dpdask.release."
_NEWEST_FORMAT = 2
_TRIES = 20
_ELSEWHERE = "choose another output.table"
_PLAIN = {
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32()), pa.int32()),
    **dict.fromkeys((pa.string(), pa.large_string()), pa.string()),
    **dict.fromkeys((pa.binary(), pa.large_binary()), pa.binary()),
    **{
        type_: type_
        for type_ in (
            pa.bool_(),
            pa.int64(),
            pa.float32(),
            pa.float64(),
            pa.date32(),
            pa.time64("us"),
            pa.timestamp("us"),
        )
    },
}


class IcebergLog:
    """The snapshots of an Iceberg table.

    Parameters
    ----------
    catalog
        The name of the catalog and its properties; pyiceberg takes from the environment what is not
        given here.
    """

    folder_name = "metadata"

    def __init__(self, folder: Folder, name: str, catalog: Mapping[str, str]) -> None:
        self._folder, self._name, self._properties = folder, name, catalog

    def exists(self) -> bool:
        """Return whether there is a table."""
        return self._load() is not None

    def find(self, release: str) -> int | None:
        """Return the number of the run that has committed a release, or None: the table's properties name all that were."""
        table = self._load()
        return None if table is None else _find_run(table, release)

    def count(self, name: Callable[[int], str]) -> int:
        """Return how many releases of a series are committed; for what is raised see `find`."""
        table = self._load()
        return (
            0
            if table is None
            else count_committed(lambda number: _find_run(table, name(number)) is not None)
        )

    def check(self, types: pa.Schema, mode: Mode) -> None:
        """Check that these columns can be committed."""
        for column in types:
            if _to_iceberg(column.type) is None:
                what = f"an Iceberg table has no type for {column.type}"
                raise SpecError(
                    what,
                    f"column {column.name!r}",
                    "cast it in the input (for instance to int64, float64 or timestamp[us]), or drop it",
                )
        table = self._load()
        if table is not None:
            self._check_table(table, types, mode)
            return
        with self._faults():
            if not self._open().namespace_exists(self._name.rpartition(".")[0]):
                raise OutputError(
                    "the catalog has no such namespace",
                    f"output.table {self._name!r}",
                    "create it, or correct output.table",
                )

    def _check_table(self, table: Table, types: pa.Schema, mode: Mode) -> None:
        if absolute_url(table.location()) != self._folder.url:
            raise OutputError(
                "the table lies in another folder",
                f"output.table {self._name!r}",
                f"set output.path to {table.location()}",
            )
        if mode == "error":
            return
        if not table.spec().is_unpartitioned():
            raise OutputError(
                "this table has partition columns, which are not supported", self._name, _ELSEWHERE
            )
        if table.metadata.format_version > _NEWEST_FORMAT:
            raise OutputError(
                f"this table has format version {table.metadata.format_version}, which dpdask cannot write",
                self._name,
                _ELSEWHERE,
            )
        there = table.schema()
        found = [(field.name, _to_iceberg(field.type)) for field in there.as_arrow()]
        if found != [(field.name, _to_iceberg(field.type)) for field in types] or any(
            field.required for field in there.fields
        ):
            what = "this table has other columns than the release: their names, types and order must agree, and nulls be allowed"
            raise OutputError(what, self._name, _ELSEWHERE)

    def commit(
        self,
        transaction: Transaction,
        shards: Sequence[Shard],
        types: pa.Schema,
        about: Mapping[str, str],
        mode: Mode,
    ) -> None:
        """Make shards the content of the table, or add them, by one commit; nothing happens if the release is there.

        Parameters
        ----------
        mode
            Whether the table must not exist, its content stays, or is replaced.
        """
        from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError

        files = [f"{self._folder.url}/{shard.name}" for shard in shards]
        for _ in range(_TRIES):
            table = self._load()
            if table is not None and _find_run(table, transaction.release) is not None:
                return
            if table is not None and mode == "error":
                raise OutputError("another writer has made this table", self._name, _ELSEWHERE)
            if table is not None:
                self._check_table(table, types, mode)
            try:
                with self._faults():
                    self._commit_once(
                        table, transaction, files, types, about, replace=mode == "overwrite"
                    )
            except TemporaryError:
                if self.find(transaction.release) is None:  # else the catalog's answer was lost
                    raise
            except (CommitFailedException, TableAlreadyExistsError):
                continue
            return
        raise TemporaryError(
            "other writers changed this table at the same time", self._name, "run again to resume"
        )

    def _commit_once(
        self,
        table: Table | None,
        transaction: Transaction,
        files: list[str],
        types: pa.Schema,
        about: Mapping[str, str],
        *,
        replace: bool,
    ) -> None:
        """Commit once: when pyiceberg tries again, it does not look whether the first attempt was made."""
        from pyiceberg.expressions import AlwaysTrue

        once = {_RETRIES: "0"}
        work: TableTransaction
        if table is None:
            columns = pa.schema([(field.name, _to_iceberg(field.type)) for field in types])
            work = self._open().create_table_transaction(
                self._name, columns, location=self._folder.url, properties=once
            )
            work.remove_properties(_RETRIES)
        else:
            table.metadata = table.metadata.model_copy(
                update={"properties": {**table.properties, **once}}
            )  # of this copy alone
            work = table.transaction()
        says = {"dpdask.release": transaction.release, **about}
        work.set_properties({f"{_RELEASE}{transaction.release}": f"{transaction.run:x}"})
        if replace and table is not None and table.current_snapshot() is not None:
            work.delete(AlwaysTrue(), snapshot_properties=says)
        work.add_files(files, snapshot_properties=says)
        work.commit_transaction()

    def _load(self) -> Table | None:
        """Return the table, or None."""
        catalog = self._open()
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        with self._faults():
            try:
                return catalog.load_table(self._name)
            except (NoSuchTableError, NoSuchNamespaceError):
                return None

    def _open(self) -> Catalog:
        try:
            from pyiceberg.catalog import load_catalog
            from pyiceberg.exceptions import NotInstalledError
        except ImportError:
            raise SpecError(
                "an Iceberg table needs the package pyiceberg, which is not installed",
                "output.format",
                "install dpdask[iceberg]",
            ) from None
        with self._faults():
            try:
                return load_catalog(**{**_ACCESS, **self._properties})
            except (ValueError, NotInstalledError):
                what, hint = (
                    "the catalog cannot be opened as it is given",
                    "check it, and the variables PYICEBERG_CATALOG__… of the environment",
                )
                raise SpecError(what, "output.catalog", hint) from None

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn what a catalog raises into one line; a refused commit is passed on."""
        from pyiceberg.exceptions import (
            CommitFailedException,
            ForbiddenError,
            OAuthError,
            TableAlreadyExistsError,
            UnauthorizedError,
        )

        try:
            with storage_faults(self._folder.url, writing=True):
                yield
        except (DpdaskError, CommitFailedException, TableAlreadyExistsError):
            raise
        except (UnauthorizedError, ForbiddenError, OAuthError):
            raise OutputError(
                "the catalog denies access",
                self._name,
                "give its credentials as variables of the environment",
            ) from None
        except Exception as error:  # each kind of catalog has its own
            raise TemporaryError(
                f"the catalog failed ({type(error).__name__})",
                self._name,
                "check its address, and run again to resume",
            ) from None


def _find_run(table: Table, release: str) -> int | None:
    run = table.properties.get(f"{_RELEASE}{release}")
    return None if run is None else int(run, 16)


def _to_iceberg(type_: pa.DataType) -> pa.DataType | None:
    """Return the Arrow type of an Iceberg column whose readers read a file with this type, or None."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = _to_iceberg(type_.value_type)
        return None if inner is None else pa.list_(pa.field("element", inner))
    if pa.types.is_struct(type_):
        fields = [(field.name, _to_iceberg(field.type)) for field in type_]
        return None if any(inner is None for _, inner in fields) else pa.struct(fields)
    if pa.types.is_map(type_):
        key, item = _to_iceberg(type_.key_type), _to_iceberg(type_.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if pa.types.is_timestamp(type_) and type_.unit == "us" and type_.tz in UTC:
        return pa.timestamp("us", "UTC")
    return type_ if pa.types.is_decimal128(type_) else _PLAIN.get(type_)
