"""How a release appears in an output: by one rename, by a manifest that is created once, or by one version of a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import pyarrow as pa

from dpdask.engine.write import Staging
from dpdask.errors import SPENT_AGAIN, OutputError
from dpdask.io.manifest import CARD_NAME, DOCUMENTS, MANIFEST_NAME, META, SUCCESS_NAME, Manifest, count_missing
from dpdask.io.storage import Folder, name_when_whole
from dpdask.jobs.records import busy

NAME_DIGITS = 12


class Publication(Protocol):
    """What differs between outputs: where shards are staged, and the one act that commits a release.

    Attributes
    ----------
    output
        The output folder.
    is_shared
        Whether the output can hold releases of several jobs.
    """

    output: Folder
    is_shared: bool

    def make_staging(self, run_id: str, folder: Folder, actions: Folder) -> Staging:
        """Return where a run stages what it will publish, and where it records what is staged.

        Names or folders are the run's own: a task of an aborted run that is still at work somewhere can never write into another
        run's release.

        Parameters
        ----------
        run_id
            The name of the run.
        folder
            The hidden folder beside the output.
        actions
            The folder for the tasks' records.
        """

    def check(self, types: pa.Schema) -> None:
        """Check that the output can hold these columns; nothing is charged yet.

        Raises
        ------
        SpecError
            If the format does not know a column's type, or a package is missing.
        OutputError
            If there is a table with other columns, or one that cannot be written.
        """

    def find(self, release: str) -> Manifest | None:
        """Return the manifest of a release that is committed in this output, or None."""

    def read_card(self, release: str) -> bytes:
        """Return the card of a committed release.

        Raises
        ------
        InputError
            If it is gone.
        """

    def is_free(self, run_id: str | None) -> bool:
        """Return whether a release can be committed here, beside what an unfinished run has written; no release of the job is here."""

    def stage(self, staging: Staging, manifest: Manifest, documents: Mapping[str, bytes]) -> None:
        """Write documents and manifest beside the staged shards; nobody sees them yet.

        Parameters
        ----------
        staging
            Where the run stages.
        manifest
            The list of its shards.
        documents
            By name, in the order of `DOCUMENTS`: the release card, and what is made from it.
        """

    def commit(self, release: str, staging: Staging, manifest: Manifest) -> None:
        """Make a staged release appear, by one atomic act; nothing happens if it has appeared already.

        Parameters
        ----------
        release
            The name of the release.
        staging
            Where the run has staged it.
        manifest
            The list of its shards.

        Raises
        ------
        OutputError
            If another run has released here.
        """

    def finish(self) -> None:
        """Write what an interrupted driver left out after the commit."""

    def undo(self, release: str, run_id: str) -> None:
        """Remove what a run has written into the output, unless it is committed.

        Parameters
        ----------
        release
            The name of the release.
        run_id
            The name of the run.
        """


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
    """A folder on a file system: a hidden one is filled, and a rename makes it the output.

    Parameters
    ----------
    output
        The output folder.
    """

    def make_staging(self, run_id: str, folder: Folder, actions: Folder) -> Staging:
        """Return a hidden folder of the run; see `Publication.make_staging`."""
        return Staging(shards=folder.child(f"publish-{run_id}"), actions=actions)

    def is_free(self, run_id: str | None) -> bool:
        """Return whether there is nothing; see `Publication.is_free`."""
        del run_id
        return not self.output.is_file() and not self.output.names()

    def stage(self, staging: Staging, manifest: Manifest, documents: Mapping[str, bytes]) -> None:
        """Write all files of the output; see `Publication.stage`."""
        for name, data in (*documents.items(), (MANIFEST_NAME, manifest.to_bytes()), (SUCCESS_NAME, b"")):
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
    """A folder in a store: shards are written once, where they will stay, and the manifest, which is created once, commits them.

    Parameters
    ----------
    output
        The output folder.
    """

    def make_staging(self, run_id: str, folder: Folder, actions: Folder) -> Staging:
        """Return the output with names of the run's own; see `Publication.make_staging`."""
        del folder
        return stage_in_place(self.output, actions, run_id)

    def is_free(self, run_id: str | None) -> bool:
        """Return whether there is nothing but the run's shards and documents; see `Publication.is_free`."""
        return not self.output.is_file() and all(name == META or is_shard_of(run_id, name) for name in self.output.names())

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
    return OutputError("another run has released into this output", output.url, "choose another output.path")


def stage_in_place(output: Folder, actions: Folder, run_id: str) -> Staging:
    """Return a staging in the output itself, whose names are the run's own.

    Parameters
    ----------
    output, actions, run_id
        As for `Publication.make_staging`.
    """
    return Staging(shards=output, actions=actions, run=run_id[:NAME_DIGITS])


def find_in_folder(output: Folder, release: str) -> Manifest | None:
    """Return the manifest of a release that has a folder for itself, or None.

    Parameters
    ----------
    output
        The folder.
    release
        The name of the release: the job's digest.

    Raises
    ------
    OutputError
        If the folder holds another job's release.
    """
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
    name
        The name of the file.
    """
    return run_id is not None and name_when_whole(name).endswith(f"-{run_id[:NAME_DIGITS]}.parquet")


def remove_shards(output: Folder, run_id: str, but: Collection[str] = ()) -> None:
    """Remove the shards that a run has written, or half written, where they were to stay.

    Parameters
    ----------
    output
        The output folder.
    run_id
        The name of the run.
    but
        The names of shards that stay.
    """
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
