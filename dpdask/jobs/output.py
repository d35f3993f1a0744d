"""Where a release goes, as a job says it: plain files, a Delta table or an Iceberg table."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol, Self

import pyarrow as pa
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from dpdask.documents import Document
from dpdask.engine.write import Staging, add_run
from dpdask.errors import SPENT_AGAIN, OutputError
from dpdask.io.delta_log import DeltaLog
from dpdask.io.iceberg_log import IcebergLog
from dpdask.io.parquet import read_schema
from dpdask.io.shards import (
    CARD_NAME,
    DOCUMENTS,
    MANIFEST_NAME,
    META,
    SUCCESS_NAME,
    Manifest,
    Mode,
    Shard,
    Transaction,
    count_missing,
)
from dpdask.io.storage import Folder, name_when_whole
from dpdask.jobs.records import busy
from dpdask.privacy.rounding import RowOrder


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


NAME_DIGITS = 12


class Publication(Protocol):
    """What differs between outputs: where shards are staged, and the one act that commits a release."""

    output: Folder
    is_shared: bool  # whether the output can hold releases of several jobs

    def make_staging(self, run_id: str, folder: Folder, actions: Folder) -> Staging:
        """Return where a run stages what it will publish, and where it records what is staged.

        Names or folders are the run's own: a task of an aborted run that is still at work somewhere
        can never write into another run's release.
        """

    def check(self, types: pa.Schema) -> None:
        """Check that the output can hold these columns; nothing is charged yet."""

    def find(self, release: str) -> Manifest | None:
        """Return the manifest of a release that is committed in this output, or None."""

    def read_card(self, release: str) -> bytes:
        """Return the card of a committed release."""

    def is_free(self, run_id: str | None) -> bool:
        """Return whether a release can be committed here, beside what an unfinished run has written; no release of the job is here."""

    def stage(self, staging: Staging, manifest: Manifest, documents: Mapping[str, bytes]) -> None:
        """Write documents and manifest beside the staged shards; nobody sees them yet.

        Parameters
        ----------
        documents
            By name, in the order of `DOCUMENTS`: the release card, and what is made from it.
        """

    def commit(self, release: str, staging: Staging, manifest: Manifest) -> None:
        """Make a staged release appear, by one atomic act; nothing happens if it has appeared already."""

    def finish(self) -> None:
        """Write what an interrupted driver left out after the commit."""

    def undo(self, release: str, run_id: str) -> None:
        """Remove what a run has written into the output, unless it is committed."""


class _OwnFolder:
    """A folder that one job's release has for itself."""

    is_shared = False

    def __init__(self, output: Folder) -> None:
        self.output = output

    def check(self, types: pa.Schema) -> None:
        """Accept all types; see `Publication.check`."""

    def find(self, release: str) -> Manifest | None:
        """Return the manifest of the folder; see `Publication.find`."""
        return find_in_folder(self.output, release)

    def read_card(self, release: str) -> bytes:
        """Return the card; see `Publication.read_card`."""
        del release
        return self.output.read(CARD_NAME, replaced=True)


class RenamedFolder(_OwnFolder):
    """A folder on a file system: a hidden one is filled, and a rename makes it the output."""

    def make_staging(self, run_id: str, folder: Folder, actions: Folder) -> Staging:
        """Return a hidden folder of the run; see `Publication.make_staging`."""
        return Staging(shards=folder.child(f"publish-{run_id}"), actions=actions)

    def is_free(self, run_id: str | None) -> bool:
        """Return whether there is nothing; see `Publication.is_free`."""
        del run_id
        return not self.output.is_file() and not self.output.names()

    def stage(self, staging: Staging, manifest: Manifest, documents: Mapping[str, bytes]) -> None:
        """Write all files of the output; see `Publication.stage`."""
        for name, data in (
            *documents.items(),
            (MANIFEST_NAME, manifest.to_bytes()),
            (SUCCESS_NAME, b""),
        ):
            staging.shards.write(name, data)

    def commit(self, release: str, staging: Staging, manifest: Manifest) -> None:
        """Rename the hidden folder; see `Publication.commit`."""
        del release
        _sweep(staging.shards, manifest)
        staging.shards.level_times()
        staging.shards.move_to(self.output)

    def finish(self) -> None:
        """Do nothing: the rename was the last act."""

    def undo(self, release: str, run_id: str) -> None:
        """Do nothing: an unfinished run writes into its hidden folder alone; see `Publication.undo`."""


class ManifestFolder(_OwnFolder):
    """A folder in a store: shards are written once, where they will stay, and the manifest, which is created once, commits them."""

    def make_staging(self, run_id: str, folder: Folder, actions: Folder) -> Staging:
        """Return the output with names of the run's own; see `Publication.make_staging`."""
        del folder
        return stage_in_place(self.output, actions, run_id)

    def is_free(self, run_id: str | None) -> bool:
        """Return whether there is nothing but the run's shards and documents; see `Publication.is_free`."""
        return not self.output.is_file() and all(
            name == META or is_shard_of(run_id, name) for name in self.output.names()
        )

    def stage(self, staging: Staging, manifest: Manifest, documents: Mapping[str, bytes]) -> None:
        """Write the documents, unless a release is here; see `Publication.stage`."""
        del manifest
        for name, data in documents.items():
            if staging.shards.put_new(name, data):
                continue
            if Manifest.read(self.output) is not None:
                raise _other_release(self.output)
            staging.shards.write(name, data)  # in place of one that a run left which was aborted

    def commit(self, release: str, staging: Staging, manifest: Manifest) -> None:
        """Create the manifest; see `Publication.commit`."""
        del release, staging
        if not self.output.put_new(MANIFEST_NAME, manifest.to_bytes()):
            raise _other_release(self.output)
        if count_missing(self.output, [manifest]):  # aborted while this driver slept
            self.output.remove(MANIFEST_NAME)
            raise busy(self.output)
        self.output.write(SUCCESS_NAME, b"")

    def finish(self) -> None:
        """Write the file that comes after the manifest."""
        if not self.output.exists(SUCCESS_NAME):
            self.output.write(SUCCESS_NAME, b"")

    def undo(self, release: str, run_id: str) -> None:
        """Remove the run's shards and its documents; see `Publication.undo`."""
        del release
        if Manifest.read(self.output) is None:
            remove_shards(self.output, run_id)
            for name in DOCUMENTS:
                self.output.remove(name)


def _other_release(output: Folder) -> OutputError:
    return OutputError(
        "another run has released into this output", output.url, "choose another output.path"
    )


def stage_in_place(output: Folder, actions: Folder, run_id: str) -> Staging:
    """Return a staging in the output itself, whose names are the run's own."""
    return Staging(shards=output, actions=actions, run=run_id[:NAME_DIGITS])


def find_in_folder(output: Folder, release: str) -> Manifest | None:
    """Return the manifest of a release that has a folder for itself, or None."""
    manifest = Manifest.read(output)
    if manifest is not None and manifest.job != release:
        raise OutputError("this output holds another job's release", output.url, SPENT_AGAIN)
    return manifest


def is_shard_of(run_id: str | None, name: str) -> bool:
    """Return whether a file is a shard that a run has written, or half written, where it will stay.

    Parameters
    ----------
    run_id
        The name of the run; None if there is no run.
    """
    return run_id is not None and name_when_whole(name).endswith(f"-{run_id[:NAME_DIGITS]}.parquet")


def remove_shards(output: Folder, run_id: str, but: Collection[str] = ()) -> None:
    """Remove the shards that a run has written, or half written, where they were to stay."""
    for name in output.names():
        if is_shard_of(run_id, name) and name not in but:
            output.remove(name)


def _sweep(publish: Folder, manifest: Manifest) -> None:
    """Remove what a worker or a driver that was killed left half written, so that only the release is published."""
    whole = {shard.name for shard in manifest.shards} | {META, SUCCESS_NAME}
    for name in publish.names():
        if name not in whole:
            publish.remove(name)
    for name in publish.child(META).names():
        if f"{META}/{name}" not in (*DOCUMENTS, MANIFEST_NAME):
            publish.child(META).remove(name)


class TableLog(Protocol):
    """The log of a table, in a format that many engines read."""

    folder_name: str  # where the format keeps its own files in the table's folder

    def exists(self) -> bool:
        """Return whether there is a table."""

    def find(self, release: str) -> int | None:
        """Return the number of the run that has committed a release, or None."""

    def count(self, name: Callable[[int], str]) -> int:
        """Return how many releases of a series are committed."""

    def check(self, types: pa.Schema, mode: Mode) -> None:
        """Check that these columns can be committed."""

    def commit(
        self,
        transaction: Transaction,
        shards: Sequence[Shard],
        types: pa.Schema,
        about: Mapping[str, str],
        mode: Mode,
    ) -> None:
        """Make shards visible by one entry; nothing happens if the release is there."""


class PublishedTable:
    """A table that releases are committed to.

    Parameters
    ----------
    mode
        Whether the table must not exist, its content stays, or is replaced.
    """

    is_shared = True

    def __init__(self, output: Folder, log: TableLog, mode: Mode) -> None:
        self.output, self._log, self._mode = output, log, mode

    def make_staging(self, run_id: str, folder: Folder, actions: Folder) -> Staging:
        """Return the table's folder with names of the run's own; see `Publication.make_staging`."""
        del folder
        return stage_in_place(self.output, actions, run_id)

    def check(self, types: pa.Schema) -> None:
        """Check the columns against the format and the table; see `Publication.check`."""
        self._log.check(types, self._mode)

    def find(self, release: str) -> Manifest | None:
        """Return the manifest that the log's entry names; see `Publication.find`."""
        run = self._log.find(release)
        if run is None:
            return None
        name = _name(MANIFEST_NAME, run)
        manifest = Manifest.read(self.output, name)
        if manifest is None:
            raise OutputError(
                "this table holds the release, but its manifest is gone",
                f"{self.output.url}/{name}",
                "restore it",
            )
        return manifest

    def read_card(self, release: str) -> bytes:
        """Return the card; see `Publication.read_card`."""
        run = self._log.find(release)
        return self.output.read(_name(CARD_NAME, run or 0), replaced=True)

    def is_free(self, run_id: str | None) -> bool:
        """Return whether there is no table, or one that may be changed; see `Publication.is_free`."""
        if self._log.exists():
            return self._mode != "error"
        known = {META, self._log.folder_name}
        return not self.output.is_file() and all(
            name in known or is_shard_of(run_id, name) for name in self.output.names()
        )

    def stage(self, staging: Staging, manifest: Manifest, documents: Mapping[str, bytes]) -> None:
        """Write documents and manifest under names of the run's own; see `Publication.stage`."""
        if self.output.is_local:  # what a worker or a driver that was killed left half written
            remove_shards(self.output, staging.run, {shard.name for shard in manifest.shards})
        for name, data in documents.items():
            staging.shards.write(staging.place(name), data)
        staging.shards.write(staging.place(MANIFEST_NAME), manifest.to_bytes())

    def commit(self, release: str, staging: Staging, manifest: Manifest) -> None:
        """Write the entry of the log; see `Publication.commit`."""
        types = read_schema(self.output, manifest.shards[0].name).remove_metadata()
        self.output.level_times(staging.place(".parquet"))
        about = {
            "dpdask.card": staging.place(CARD_NAME),
            "dpdask.card_sha256": manifest.card_sha256,
        }
        self._log.commit(
            Transaction(release, int(staging.run, 16)), manifest.shards, types, about, self._mode
        )

    def finish(self) -> None:
        """Do nothing: the entry was the last act."""

    def undo(self, release: str, run_id: str) -> None:
        """Remove the run's shards, documents and manifest; see `Publication.undo`."""
        run = int(run_id[:NAME_DIGITS], 16)
        if self._log.find(release) == run:
            return
        remove_shards(self.output, run_id)
        for name in (*DOCUMENTS, MANIFEST_NAME):
            self.output.remove(_name(name, run))


def _name(name: str, run: int) -> str:
    """Return the name of a run's file, given the number by which the log knows the run."""
    return add_run(name, f"{run:0{NAME_DIGITS}x}")


class Target(Document):
    """How a release is published."""

    format: Literal["parquet", "delta", "iceberg"] = "parquet"
    """`parquet` (a folder of files), `delta` (a Delta table) or `iceberg` (an Iceberg table)."""
    mode: Mode = "error"
    """`error`: the output must not exist. `append`: the release is added to what a table holds.
    `overwrite`: it replaces what a table holds.
    """
    table: str | None = Field(default=None, pattern=r"^[^.]+(\.[^.]+)+$")
    """The name of an Iceberg table, with its namespace, and the catalog that knows it."""
    catalog: Catalog | None = None
    """The name of an Iceberg table, with its namespace, and the catalog that knows it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.format == "parquet" and self.mode != "error":
            raise ValueError(
                f"`mode: {self.mode}` belongs to tables; set `format: delta` or `format: iceberg`"
            )
        if (self.format == "iceberg") != (self.table is not None) or (self.format == "iceberg") != (
            self.catalog is not None
        ):
            raise ValueError(
                "`table` (with its namespace, such as `lake.ratings`) and `catalog` belong to `format: iceberg`, which needs both"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_usual(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out default values of these keys, so that the digests of jobs that write plain files stay as they are."""
        written: dict[str, Any] = plain(self)
        usual = Target.model_fields
        return {
            key: value
            for key, value in written.items()
            if key not in usual or value != usual[key].default
        }

    def open(self, output: Folder) -> Publication:
        """Return what publishes into a folder in this way."""
        log = self.open_log(output)
        if log is not None:
            return PublishedTable(output, log, self.mode)
        return RenamedFolder(output) if output.is_local else ManifestFolder(output)

    def open_log(self, output: Folder) -> TableLog | None:
        """Return the log of the table in a folder; None if plain files are written there."""
        if self.format == "delta":
            return DeltaLog(output)
        if self.table is not None and self.catalog is not None:
            return IcebergLog(output, self.table, self.catalog.model_dump(exclude_none=True))
        return None


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
