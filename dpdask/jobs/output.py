"""Where a release goes, and how it appears there: by a rename, a manifest, or an entry of a log.

An output (`LocalFolder`, `StoreFolder` or `PublishedTable`) says where a run stages, and has the one act that
makes a release appear. What a run stages has names of its own: a task of an aborted run that is still
at work somewhere can never write into the next run's release. `series` is the digest of a job whose
table grows: its releases are numbered.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import pyarrow as pa
from pydantic import Field, model_validator

from dpdask.documents import Document, GrownDocument
from dpdask.engine.write import Staging, add_run
from dpdask.errors import SPENT_AGAIN, DataError, OutputError
from dpdask.io.folders import check_partition_types, list_files, remove_file
from dpdask.io.parquet import read_schema
from dpdask.io.shards import (
    CARD_NAME,
    DOCUMENTS,
    MANIFEST_NAME,
    META,
    SUCCESS_NAME,
    TABLE_FOLDER,
    Format,
    Manifest,
    Mode,
    count_missing,
)
from dpdask.io.storage import Folder, name_when_whole
from dpdask.io.table_logs import Commit, DeltaLog, IcebergLog
from dpdask.jobs.records import busy
from dpdask.privacy.events import RowOrder


class Catalog(Document):
    """The catalog that knows an Iceberg table, as pyiceberg opens it.

    A job holds no credentials: pyiceberg reads them, and whatever else is missing here, from the
    environment, for instance `PYICEBERG_CATALOG__LAKE__TOKEN` for the catalog `lake`.
    """

    name: str = Field(min_length=1)
    """Its name, which the variables of the environment hold: pyiceberg reads credentials, and what is
    missing here, from variables such as `PYICEBERG_CATALOG__LAKE__TOKEN` for the catalog `lake`.
    """
    type: str | None = None
    """Its kind, such as `rest`, `sql`, `hive` or `glue`."""
    uri: str | None = None
    """Its address."""
    warehouse: str | None = None
    """Where it keeps tables."""

    @model_validator(mode="after")
    def _without_password(self) -> Self:
        if re.search(r"//[^/@]*:[^/@]*@", self.uri or ""):
            raise ValueError(
                f"a job holds no password; give this `uri` as PYICEBERG_CATALOG__{self.name.upper()}__URI in the environment"
            )
        return self


NAME_DIGITS = 12  # of a run's name, in the names of its files


class _Folder:
    """A folder that the releases of one job have for themselves, each with its own manifest."""

    is_shared = False  # whether the output may hold releases of other jobs

    def __init__(
        self, output: Folder, series: str | None = None, partition_by: tuple[str, ...] = ()
    ) -> None:
        self.output, self.series, self._by = output, series, partition_by

    def count(self) -> int:
        if self.series is None:
            return 0
        names = (f"{META}/{name}" for name in self.output.child(META).names())
        number = sum(
            re.fullmatch(rf"{META}/manifest(-\d{{5,}})?\.json", name) is not None for name in names
        )
        # the listing was an earlier one
        while self._read_manifest(number) is not None:
            number += 1
        return number

    def check(self, types: pa.Schema) -> None:
        check_partition_types(self._by, types)
        number = self.count()
        newest = self._read_manifest(number - 1) if number else None
        if newest is None or not newest.shards or not self.output.exists(newest.shards[0].name):
            return
        there = read_schema(self.output, newest.shards[0].name)
        for column in types:
            if column.name not in there.names or there.field(column.name).type != column.type:
                what = "this column has another type than in the rows that were released"
                hint = "write the new rows with that type, or start a new output"
                raise DataError(what, f"column {column.name!r}", hint)

    def find(self, release: str) -> Manifest | None:
        manifest = self._read_manifest(read_number(release))
        if self.series is None and manifest is not None and manifest.job != release:
            raise OutputError(
                "this output holds another job's release", self.output.url, SPENT_AGAIN
            )
        return manifest

    def read_card(self, release: str) -> bytes:
        return self.output.read(number_name(CARD_NAME, read_number(release)), replaced=True)

    def list_cards(self) -> Iterator[tuple[str, str]]:
        """Yield the names of the cards of committed releases, the newest first; of no run in particular."""
        is_there = self.series is None and self.output.exists(MANIFEST_NAME)
        for number in reversed(range(1 if is_there else self.count())):
            yield number_name(CARD_NAME, number), ""

    def mark(self, release: str) -> None:
        del release

    def _read_manifest(self, number: int) -> Manifest | None:
        return Manifest.read(self.output, number_name(MANIFEST_NAME, number))

    def _create_manifest(self, number: int, manifest: Manifest) -> None:
        """Commit by the creation of a manifest."""
        name = number_name(MANIFEST_NAME, number)
        if not self.output.put_new(name, manifest.to_bytes()):
            raise self._other_release(number)
        if count_missing(self.output, [manifest]):  # aborted while this driver slept
            self.output.remove(name)
            raise busy(self.output)

    def _other_release(self, number: int) -> OutputError:
        if number:
            what, hint = "another run has released these rows into this output", "run the job again"
        else:
            what, hint = "another run has released into this output", "choose another output.path"
        return OutputError(what, self.output.url, hint)

    def _remove_documents(self, number: int) -> None:
        for name in DOCUMENTS:
            self.output.remove(number_name(name, number))


class LocalFolder(_Folder):
    """A folder on a file system: a hidden one is filled, and a rename makes it the output.

    The files of later releases of a series are renamed one by one, and their manifest commits them.
    """

    def make_staging(self, run_id: str, hidden: Folder, actions: Folder) -> Staging:
        """Return where a run stages what it will publish, and where its tasks record that."""
        number = self.count()  # the shards of the first release end in plain numbers
        run = f"r{number:05d}" if number else ""
        return Staging(
            shards=hidden.child(f"publish-{run_id}"),
            actions=actions,
            run=run,
            partition_by=self._by,
            in_folders=True,
        )

    def is_free(self, run_id: str | None) -> bool:
        """Return whether a release fits beside what is here and what an unfinished run has written."""
        del run_id
        return bool(self.count()) or (not self.output.is_file() and not self.output.names())

    def stage(self, staging: Staging, manifest: Manifest, documents: Mapping[str, bytes]) -> None:
        """Write documents and manifest; nobody sees them yet."""
        number = self.count()
        files = {number_name(name, number): data for name, data in documents.items()}
        if not number:
            files |= {MANIFEST_NAME: manifest.to_bytes(), SUCCESS_NAME: b""}
        for name, data in files.items():
            staging.shards.write(name, data)

    def commit(self, release: str, staging: Staging, manifest: Manifest) -> None:
        """Make a staged release appear by one atomic act, unless it has appeared already."""
        number, hidden = read_number(release), staging.shards
        shards = [shard.name for shard in manifest.shards]
        if number:
            hidden.level_times()
            documents = [number_name(name, number) for name in DOCUMENTS]
            for name in (*shards, *filter(hidden.exists, documents)):
                hidden.move_to(self.output, name)
            self._create_manifest(number, manifest)
            return
        # a worker or a driver that was killed may have left files half written
        for name in set(list_files(hidden)) - {*shards, META, SUCCESS_NAME}:
            remove_file(hidden, name)
        for name in hidden.child(META).names():
            if f"{META}/{name}" not in (*DOCUMENTS, MANIFEST_NAME):
                hidden.child(META).remove(name)
        hidden.level_times()
        hidden.move_to(self.output)

    def finish(self) -> None:
        """Write what an interrupted driver left out after the commit."""
        if self.series is not None:
            self.output.write(SUCCESS_NAME, b"")

    def undo(self, release: str, run_id: str) -> None:
        """Remove what a run has written into the output, unless its release is committed."""
        del run_id
        number = read_number(release)
        if not number or self._read_manifest(number) is not None:
            return  # of a first release, all is in the hidden folder
        for name in list_files(self.output):
            if name.endswith(f"-r{number:05d}.parquet"):
                remove_file(self.output, name)
        self._remove_documents(number)


class StoreFolder(_Folder):
    """A folder in a store: shards are written where they stay, and a manifest, created once, commits."""

    def make_staging(self, run_id: str, hidden: Folder, actions: Folder) -> Staging:
        """Return where a run stages what it will publish, and where its tasks record that."""
        del hidden
        run, by = run_id[:NAME_DIGITS], self._by
        return Staging(
            shards=self.output, actions=actions, run=run, partition_by=by, in_folders=True
        )

    def is_free(self, run_id: str | None) -> bool:
        """Return whether a release fits beside what is here and what an unfinished run has written."""
        names = list_files(self.output)
        known = all(name == META or _is_shard_of(run_id, name) for name in names)
        return bool(self.count()) or (not self.output.is_file() and known)

    def stage(self, staging: Staging, manifest: Manifest, documents: Mapping[str, bytes]) -> None:
        """Write documents and manifest; nobody sees them yet."""
        del manifest
        number = self.count()
        for name, data in documents.items():
            if number == 0 and staging.shards.put_new(name, data):
                continue
            if number == 0 and self._read_manifest(0) is not None:
                raise self._other_release(0)
            # also in place of one that a run left which was aborted
            staging.shards.write(number_name(name, number), data)

    def commit(self, release: str, staging: Staging, manifest: Manifest) -> None:
        """Make a staged release appear by one atomic act, unless it has appeared already."""
        del staging
        self._create_manifest(read_number(release), manifest)

    def mark(self, release: str) -> None:
        """Say after a commit that the output is whole; no reader that knows manifests needs it."""
        if read_number(release) == 0:
            self.output.write(SUCCESS_NAME, b"")

    def finish(self) -> None:
        """Write what an interrupted driver left out after the commit."""
        if self.series is not None or not self.output.exists(SUCCESS_NAME):
            self.output.write(SUCCESS_NAME, b"")

    def undo(self, release: str, run_id: str) -> None:
        """Remove what a run has written into the output, unless its release is committed."""
        if self._read_manifest(number := read_number(release)) is None:
            _remove_shards(self.output, list_files(self.output), run_id)
            self._remove_documents(number)


class PublishedTable:
    """A table that has a log: files are written where they stay, and one entry makes them visible."""

    is_shared = True

    def __init__(
        self, output: Folder, log: DeltaLog | IcebergLog, mode: Mode, series: str | None = None
    ) -> None:
        self.output, self.series = output, series
        self._log, self._mode = log, mode

    def count(self) -> int:
        """Return how many releases the series has, which is the number of the next one; else 0."""
        series = self.series
        return 0 if series is None else self._log.count(lambda number: name_release(series, number))

    def make_staging(self, run_id: str, hidden: Folder, actions: Folder) -> Staging:
        """Return where a run stages what it will publish, and where its tasks record that."""
        del hidden
        by = self._log.partition_by
        run = run_id[:NAME_DIGITS]
        return Staging(shards=self.output, actions=actions, run=run, partition_by=by)

    def check(self, types: pa.Schema) -> None:
        """Check that the output can hold these columns; nothing is charged yet."""
        self._log.check(types, self._mode)

    def find(self, release: str) -> Manifest | None:
        """Return the manifest of a release that is committed in this output, or None."""
        run = self._log.find(release)
        if run is None:
            return None
        name = _name_file(MANIFEST_NAME, run)
        manifest = Manifest.read(self.output, name)
        if manifest is None:
            what = "this table holds the release, but its manifest is gone"
            raise OutputError(what, f"{self.output.url}/{name}", "restore it")
        return manifest

    def read_card(self, release: str) -> bytes:
        """Return the card of a committed release."""
        run = self._log.find(release) or 0
        return self.output.read(_name_file(CARD_NAME, run), replaced=True)

    def list_cards(self) -> Iterator[tuple[str, str]]:
        """Yield the names of all cards, each with the first digits of its run's name."""
        for name in self.output.child(META).names():
            found = re.fullmatch(rf"release-([0-9a-f]{{{NAME_DIGITS}}})\.json", name)
            if found is not None:
                yield f"{META}/{name}", found[1]

    def is_free(self, run_id: str | None) -> bool:
        """Return whether a release fits beside what is here and what an unfinished run has written."""
        if self._log.exists():
            return self._mode != "error"
        known, names = {META, self._log.folder_name}, self.output.names()
        return not self.output.is_file() and all(
            name in known or _is_shard_of(run_id, name) for name in names
        )

    def stage(self, staging: Staging, manifest: Manifest, documents: Mapping[str, bytes]) -> None:
        """Write documents and manifest; nobody sees them yet."""
        if self.output.is_local:  # what a worker or a driver that was killed left half written
            written = {shard.name for shard in manifest.shards}
            _remove_shards(self.output, {*self.output.names()} - written, staging.run)
        for name, data in (*documents.items(), (MANIFEST_NAME, manifest.to_bytes())):
            staging.shards.write(staging.place(name), data)

    def commit(self, release: str, staging: Staging, manifest: Manifest) -> None:
        """Make a staged release appear by one atomic act, unless it has appeared already."""
        first = manifest.shards[0]
        types = read_schema(self.output, first.name, first.n_bytes).remove_metadata()
        self.output.level_times(staging.place(".parquet"))
        card, run = staging.place(CARD_NAME), int(staging.run, 16)
        about = {"dpdask.card": card, "dpdask.card_sha256": manifest.card_sha256}
        self._log.commit(Commit(release, run, manifest.shards, types, about, self._mode))
        if self.series is not None and self._log.find(release) != run:
            what = "another run has released these rows into this table"
            raise OutputError(what, self.output.url, "run the job again")

    def mark(self, release: str) -> None:
        """Do nothing: the entry was the last act."""
        del release

    def finish(self) -> None:
        """Do nothing: the entry was the last act."""

    def undo(self, release: str, run_id: str) -> None:
        """Remove what a run has written into the output, unless its release is committed."""
        run = int(run_id[:NAME_DIGITS], 16)
        if self._log.find(release) != run:
            _remove_shards(self.output, self.output.names(), run_id)
            for name in (*DOCUMENTS, MANIFEST_NAME):
                self.output.remove(_name_file(name, run))


class LinkedTables(StoreFolder):
    """Tables that have a log each and are one release: each gets its entry, and then a manifest, created once, commits.

    A log is no part of another one, so whoever reads the tables by their logs may see the first entry before
    the second: whole tables of what is being released, in an output that nobody has used before. The table of
    persons comes last. By the name of the output, nothing is there before the manifest.
    """

    def __init__(self, output: Folder, logs: Mapping[str, DeltaLog | IcebergLog]) -> None:
        super().__init__(output)
        self._logs = logs  # by table

    def check(self, types: pa.Schema) -> None:
        """Check that each table can hold these columns; nothing is charged yet."""
        for log in self._logs.values():
            if not log.exists():  # else it is the run's own: see `is_free`
                log.check(types, "error")

    def is_free(self, run_id: str | None) -> bool:
        """Return whether a release fits beside what an unfinished run has written."""
        if run_id is None and any(log.exists() for log in self._logs.values()):
            return False
        # a folder in which nothing is left, and what a log has written for the run
        known = {META, *map(_name_folder, self._logs)}
        own = {f"{_name_folder(table)}/{log.folder_name}" for table, log in self._logs.items()}
        return not self.output.is_file() and all(
            name in known
            or _is_shard_of(run_id, name)
            or (run_id is not None and not own.isdisjoint((name, name.rpartition("/")[0])))
            for name in list_files(self.output)
        )

    def stage(self, staging: Staging, manifest: Manifest, documents: Mapping[str, bytes]) -> None:
        """Write documents; what commits is written last."""
        if self.output.is_local:  # what a worker or a driver that was killed left half written
            written = {shard.name for shard in manifest.shards}
            _remove_shards(self.output, {*list_files(self.output)} - written, staging.run)
        super().stage(staging, manifest, documents)

    def commit(self, release: str, staging: Staging, manifest: Manifest) -> None:
        """Make the tables appear one after the other, and the release by one atomic act, unless they have appeared already."""
        self.output.level_times(staging.place(".parquet"))
        about = {"dpdask.card": f"../{CARD_NAME}", "dpdask.card_sha256": manifest.card_sha256}
        run = int(staging.run, 16)
        for table, part in reversed(manifest.tables.items()):
            first, log = part.shards[0], self._logs[table]
            types = read_schema(self.output, first.name, first.n_bytes).remove_metadata()
            shards = [replace(each, name=each.name.partition("/")[2]) for each in part.shards]
            log.commit(Commit(release, run, shards, types, about, "error"))
            if log.find(release) != run:
                raise self._other_release(0)
        super().commit(release, staging, manifest)

    def undo(self, release: str, run_id: str) -> None:
        """Remove what a run has written into the output, unless its release is committed; a table that others have changed stays."""
        if self._read_manifest(0) is not None:
            return
        run = int(run_id[:NAME_DIGITS], 16)
        kept = [table for table, log in self._logs.items() if not log.undo(release, run)]
        for name in list_files(self.output):
            is_left = name.partition("/")[0] in map(_name_folder, kept)
            if _is_shard_of(run_id, name) and not is_left:
                remove_file(self.output, name)
        self._remove_documents(0)


def _name_folder(table: str) -> str:
    return f"{TABLE_FOLDER}={table}"


Publication = LocalFolder | StoreFolder | PublishedTable


def _name_file(name: str, run: int) -> str:
    """Return the name of a run's file, given the number by which the log knows the run."""
    return add_run(name, f"{run:0{NAME_DIGITS}x}")


def _is_shard_of(run_id: str | None, name: str) -> bool:
    """Return whether a file is a shard that a run has written, or half written, where it will stay."""
    whole = name_when_whole(name)
    return run_id is not None and whole.endswith(f"-{run_id[:NAME_DIGITS]}.parquet")


def _remove_shards(output: Folder, names: Iterable[str], run_id: str) -> None:
    for name in names:
        if _is_shard_of(run_id, name):
            output.remove(name)


def name_release(series: str, number: int) -> str:
    """Return the name of a release of a growing table."""
    return f"{series} {number}"


def read_number(release: str) -> int:
    """Return the number in the name of a release; 0 if its table does not grow."""
    return int(release.partition(" ")[2] or 0)


def number_name(name: str, number: int) -> str:
    """Return the name of a numbered release's file; the first release has the names of any other."""
    return name if number == 0 else add_run(name, f"{number:05d}")


class Target(GrownDocument):
    """How a release is published."""

    later = frozenset(("format", "mode", "table", "catalog", "partition_by", "model"))
    format: Format = "parquet"
    """`parquet` (a folder of files), `delta` (a Delta table) or `iceberg` (an Iceberg table)."""
    mode: Mode = "error"
    """`error`: the output must not exist. `append`: the release is added to what a table holds.
    `overwrite`: it replaces what a table holds.
    """
    table: str | None = Field(default=None, pattern=r"^[^.]+(\.[^.]+)+$")
    """The name of an Iceberg table, with its namespace."""
    catalog: Catalog | None = None
    """The catalog that knows the Iceberg table."""
    partition_by: list[str] | None = Field(default=None, min_length=1)
    """The partition columns: kept columns. Each file holds one combination of their values. The log
    of a table has them; with `parquet` they stand in the names of folders (`day=2026-01-31`), and in
    no file.
    """
    model: bool = False
    """Whether the fitted model is published beside the release, so that more records can be drawn
    from it (`dpdask sample`); of the mechanism `copula`. It costs no ε.
    """

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.format == "parquet" and self.mode != "error":
            raise ValueError(
                f"`mode: {self.mode}` belongs to tables; set `format: delta` or `format: iceberg`"
            )
        if len(set(self.partition_by or ())) < len(self.partition_by or ()):
            raise ValueError("`partition_by` names a column twice")
        if (self.format == "iceberg") != (self.table is not None) or (self.format == "iceberg") != (
            self.catalog is not None
        ):
            raise ValueError(
                "`table` (with its namespace, such as `lake.ratings`) and `catalog` belong to `format: iceberg`, which needs both"
            )
        return self

    def open(self, output: Folder, series: str | None = None) -> Publication:
        """Return what publishes into a folder; `series` is the digest of a job whose table grows."""
        by = tuple(self.partition_by or ())
        if self.format == "parquet":
            kind = LocalFolder if output.is_local else StoreFolder
            return kind(output, series, by)
        log = self._open_log(output)
        return PublishedTable(output, log, "append" if series else self.mode, series)

    def _open_log(self, folder: Folder, ending: str = "") -> DeltaLog | IcebergLog:
        """Return the log of the table in a folder; `ending` is added to its name in a catalog."""
        by = tuple(self.partition_by or ())
        if self.table is None or self.catalog is None:
            return DeltaLog(folder, by)
        place = self.catalog.model_dump(exclude_none=True)
        return IcebergLog(folder, f"{self.table}{ending}", place, by)


class LinkedTarget(Target):
    """How several tables are published as one release, where each has a log."""

    tables: list[str]
    """The tables, in the order of the manifest."""

    def open(self, output: Folder, series: str | None = None) -> Publication:
        """Return what publishes into a folder; see `Target.open`."""
        del series
        logs = {
            table: self._open_log(output.child(_name_folder(table)), f"_{table}")
            for table in self.tables
        }
        return LinkedTables(output, logs)


def read_target(content: Mapping[str, Any]) -> Target:
    """Return how a release is published, as the record of its run has it."""
    return (LinkedTarget if "tables" in content else Target).model_validate(content)


class Output(Target):
    """Where the release goes, and how its rows are laid out."""

    path: str = Field(min_length=1)
    """A new folder or table, as a path or any fsspec URL."""
    rows_per_shard: int = Field(default=1_000_000, ge=1)
    """The most rows of a shard."""
    order: RowOrder = "shuffled"
    """`shuffled`, or `keep`: rows that are released one by one stand in the order of the input,
    which may reveal their values.
    """

    @property
    def target(self) -> Target:
        """How the release is published."""
        return Target(**{key: getattr(self, key) for key in Target.model_fields})
