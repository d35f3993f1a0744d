"""How the releases of a growing table appear in a Delta or Iceberg table: each as one version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

import pyarrow as pa

from dpdask.engine.write import Staging, add_run
from dpdask.errors import DataError, OutputError
from dpdask.io.parquet import read_schema
from dpdask.io.shards import (
    CARD_NAME,
    DOCUMENTS,
    MANIFEST_NAME,
    META,
    SUCCESS_NAME,
    Manifest,
    count_missing,
)
from dpdask.io.storage import Folder
from dpdask.jobs.output import (
    ManifestFolder,
    Publication,
    PublishedTable,
    RenamedFolder,
    TableLog,
    Target,
    remove_shards,
)
from dpdask.jobs.records import busy


class GrowingFolder:
    """A folder that several releases fill, each committed by the creation of its own manifest; see `Publication`.

    The name of a release is the job's digest and the release's number.
    """

    is_shared = False

    def __init__(self, output: Folder) -> None:
        self.output = output
        self._first: Publication = (
            RenamedFolder(output) if output.is_local else ManifestFolder(output)
        )

    def count(self) -> int:
        """Return how many releases there are, which is the number of the next one."""
        names = self.output.child(META).names()
        number = sum(
            f"{META}/{name}" == MANIFEST_NAME
            or re.fullmatch(r"manifest-\d{5,}\.json", name) is not None
            for name in names
        )
        while self.output.exists(name_manifest(number)):  # the listing was an earlier one
            number += 1
        return number

    def make_staging(self, run_id: str, folder: Folder, actions: Folder) -> Staging:
        """Return where a run stages; see `Publication.make_staging`. Later shards on a file system have the release's number in their names."""
        staging = self._first.make_staging(run_id, folder, actions)
        number = self.count()
        if not number or not self.output.is_local:
            return staging
        return Staging(shards=staging.shards, actions=actions, run=_name_shards(number))

    def check(self, types: pa.Schema) -> None:
        """Check that the columns are those of the newest release; see `Publication.check`."""
        number = self.count()
        newest = Manifest.read(self.output, name_manifest(number - 1)) if number else None
        if newest is None or not newest.shards or not self.output.exists(newest.shards[0].name):
            return
        there = read_schema(self.output, newest.shards[0].name)
        for column in types:
            if column.name not in there.names or there.field(column.name).type != column.type:
                what = "this column has another type than in the rows that were released"
                raise DataError(
                    what,
                    f"column {column.name!r}",
                    "write the new rows with that type, or start a new output",
                )

    def find(self, release: str) -> Manifest | None:
        """Return the manifest of a release; see `Publication.find`."""
        return Manifest.read(self.output, name_manifest(read_number(release)))

    def read_card(self, release: str) -> bytes:
        """Return the card of a release; see `Publication.read_card`."""
        return self.output.read(name_document(CARD_NAME, read_number(release)), replaced=True)

    def is_free(self, run_id: str | None) -> bool:
        """Return whether there is a release already, or nothing else; see `Publication.is_free`."""
        return bool(self.count()) or self._first.is_free(run_id)

    def stage(self, staging: Staging, manifest: Manifest, documents: Mapping[str, bytes]) -> None:
        """Write the documents, where nobody sees them or takes them for a release; see `Publication.stage`."""
        number = self.count()
        if not number:
            self._first.stage(staging, manifest, documents)
            return
        for name, data in documents.items():
            staging.shards.write(name_document(name, number), data)

    def commit(self, release: str, staging: Staging, manifest: Manifest) -> None:
        """Rename the shards into place, if they are hidden, and create the manifest; see `Publication.commit`."""
        number = read_number(release)
        if number == 0:
            self._first.commit(release, staging, manifest)
            return
        if self.output.is_local:
            staging.shards.level_times()
            for name in (
                *(shard.name for shard in manifest.shards),
                *(name_document(name, number) for name in DOCUMENTS),
            ):
                staging.shards.move_to(self.output, name)
        if not self.output.put_new(name_manifest(number), manifest.to_bytes()):
            raise OutputError(
                "another run has released these rows into this output",
                self.output.url,
                "run the job again",
            )
        if count_missing(self.output, [manifest]):  # aborted while this driver slept
            self.output.remove(name_manifest(number))
            raise busy(self.output)

    def finish(self) -> None:
        """Write the file that comes after the manifest of each release."""
        self.output.write(SUCCESS_NAME, b"")

    def undo(self, release: str, run_id: str) -> None:
        """Remove the run's shards and its documents, unless its manifest is there; see `Publication.undo`."""
        number = read_number(release)
        if number == 0:
            self._first.undo(release, run_id)
        elif self.find(release) is None:
            if self.output.is_local:
                for name in self.output.names():
                    if name.endswith(f"-{_name_shards(number)}.parquet"):
                        self.output.remove(name)
            else:
                remove_shards(self.output, run_id)
            for name in DOCUMENTS:
                self.output.remove(name_document(name, number))


def name_release(job: str, number: int) -> str:
    """Return the name of a release of a growing table."""
    return f"{job} {number}"


def read_number(release: str) -> int:
    """Return the number in the name of a release; 0 if it is not of a growing table."""
    return int(release.partition(" ")[2] or 0)


def name_manifest(number: int) -> str:
    """Return the name of a release's manifest in the output."""
    return MANIFEST_NAME if number == 0 else f"{META}/manifest-{number:05d}.json"


def _name_shards(number: int) -> str:
    return f"r{number:05d}"  # the first release's shards end in plain numbers


def name_document(name: str, number: int) -> str:
    """Return the name of a release's document in the output."""
    return name if number == 0 else add_run(name, f"{number:05d}")


class GrowingPublication(Publication, Protocol):
    """An output that the releases of one series fill."""

    def count(self) -> int:
        """Return how many releases there are, which is the number of the next one."""


class GrowingTable(PublishedTable):
    """A table that the releases of a series are appended to, beside what else it holds."""

    def __init__(self, output: Folder, log: TableLog, job: str) -> None:
        super().__init__(output, log, "append")
        self._job = job

    def count(self) -> int:
        """Return how many releases the log knows."""
        return self._log.count(lambda number: name_release(self._job, number))

    def commit(self, release: str, staging: Staging, manifest: Manifest) -> None:
        """Write the entry of the log, if no other run has; see `Publication.commit`."""
        super().commit(release, staging, manifest)
        if self._log.find(release) != int(staging.run, 16):
            raise OutputError(
                "another run has released these rows into this table",
                self.output.url,
                "run the job again",
            )


def open_growing(target: Target, output: Folder, job: str) -> GrowingPublication:
    """Return what publishes the releases of a series."""
    log = target.open_log(output)
    return GrowingFolder(output) if log is None else GrowingTable(output, log, job)
