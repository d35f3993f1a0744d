"""How the releases of a growing table appear in a Delta or Iceberg table: each as one version."""

from __future__ import annotations

from typing import Protocol

from dpdask.engine.write import Staging
from dpdask.errors import OutputError
from dpdask.io.manifest import Manifest
from dpdask.io.storage import Folder
from dpdask.jobs.growing_folder import GrowingFolder, name_release
from dpdask.jobs.output import Target
from dpdask.jobs.publication import Publication
from dpdask.jobs.published_table import PublishedTable, TableLog


class GrowingPublication(Publication, Protocol):
    """An output that the releases of one series fill."""

    def count(self) -> int:
        """Return how many releases there are, which is the number of the next one."""


class GrowingTable(PublishedTable):
    """A table that the releases of a series are appended to, beside what else it holds.

    Parameters
    ----------
    output, log
        As for `PublishedTable`.
    job
        The job's digest.
    """

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
            raise OutputError("another run has released these rows into this table", self.output.url, "run the job again")


def open_growing(target: Target, output: Folder, job: str) -> GrowingPublication:
    """Return what publishes the releases of a series.

    Parameters
    ----------
    target
        How they are published.
    output
        The output folder.
    job
        The job's digest.
    """
    log = target.open_log(output)
    return GrowingFolder(output) if log is None else GrowingTable(output, log, job)
