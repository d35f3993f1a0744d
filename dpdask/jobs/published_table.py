"""A release as a part of a table that has a log: files are written once, in place, and one entry of the log makes them visible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import pyarrow as pa

from dpdask.engine.write import Staging, add_run
from dpdask.errors import OutputError
from dpdask.io.commits import Mode, Transaction
from dpdask.io.manifest import CARD_NAME, DOCUMENTS, MANIFEST_NAME, META, Manifest
from dpdask.io.parquet import read_schema
from dpdask.io.shards import Shard
from dpdask.io.storage import Folder
from dpdask.jobs.publication import NAME_DIGITS, is_shard_of, remove_shards, stage_in_place


class TableLog(Protocol):
    """The log of a table, in a format that many engines read.

    Attributes
    ----------
    folder_name
        Where the format keeps its own files in the table's folder.
    """

    folder_name: str

    def exists(self) -> bool:
        """Return whether there is a table."""

    def find(self, release: str) -> int | None:
        """Return the number of the run that has committed a release, or None."""

    def count(self, name: Callable[[int], str]) -> int:
        """Return how many releases of a series are committed.

        Parameters
        ----------
        name
            Gives the name of the release with a number.
        """

    def check(self, types: pa.Schema, mode: Mode) -> None:
        """Check that these columns can be committed.

        Parameters
        ----------
        types
            The columns.
        mode
            How the table is changed.
        """

    def commit(self, transaction: Transaction, shards: Sequence[Shard], types: pa.Schema, about: Mapping[str, str], mode: Mode) -> None:
        """Make shards visible by one entry; nothing happens if the release is there.

        Parameters
        ----------
        transaction
            The release and the run.
        shards
            The files, in the table's folder.
        types
            Their columns.
        about
            What the entry says of the release.
        mode
            How the table is changed.
        """


class PublishedTable:
    """A table that releases are committed to.

    Parameters
    ----------
    output
        The table's folder.
    log
        Its log.
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
            raise OutputError("this table holds the release, but its manifest is gone", f"{self.output.url}/{name}", "restore it")
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
        return not self.output.is_file() and all(name in known or is_shard_of(run_id, name) for name in self.output.names())

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
        about = {"dpdask.card": staging.place(CARD_NAME), "dpdask.card_sha256": manifest.card_sha256}
        self._log.commit(Transaction(release, int(staging.run, 16)), manifest.shards, types, about, self._mode)

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
