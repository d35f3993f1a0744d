"""OpenLineage events of a run, for catalogues of data: what it reads, what it writes, and its release card.

Each attempt to run a job is one OpenLineage run, which starts once and then completes, fails or is aborted. Where events go is said by
OpenLineage's own configuration (`OPENLINEAGE_URL`, `OPENLINEAGE__TRANSPORT__TYPE`, `openlineage.yml`).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from dpdask.errors import DpdaskError, InternalError, SpecError
from dpdask.io.manifest import CARD_NAME
from dpdask.io.storage import Folder
from dpdask.jobs.run import Outcome
from dpdask.jobs.spec import Job
from dpdask.version import __version__

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import RunEvent

PATIENCE = 5.0  # seconds that the end of a run waits for its events
_PRODUCER = f"pkg:pypi/dpdask@{__version__}"
_AZURE = ("abfs", "abfss")  # their container stands where other URLs have a user
_CONFIG = {"facets": {"source_code_location": {"disabled": True}}}  # the URL of a repository may hold a token

State = Literal["START", "COMPLETE", "FAIL", "ABORT"]


@contextmanager
def report_lineage(job: Job, warn: Callable[[str], None]) -> Iterator[Callable[[Outcome], Outcome]]:
    """Send the events of a run, if its job asks for them: its start now, its end when the block ends.

    Parameters
    ----------
    job
        The job.
    warn
        Called with one line if events could not be sent.

    Yields
    ------
    A function that takes what the run ended with, and returns it.

    Raises
    ------
    SpecError
        If OpenLineage's client is not installed.

    Privacy
    -------
    An event holds the name of the job, the URLs of its input and output without users, passwords and queries, what is published
    of the release, or the exit code. The exit code may depend on private rows, so readers of these events are stewards.
    """
    if job.file.lineage is None:
        yield lambda outcome: outcome
        return
    sender = _Sender()
    events = _Events(job, job.file.lineage.namespace)
    sender.send(events.make("START"))
    ended = False

    def complete(outcome: Outcome) -> Outcome:
        nonlocal ended
        ended = True
        sender.send(events.make_complete(outcome))
        return outcome

    try:
        yield complete
    except BaseException as error:
        if not ended:
            sender.send(events.make_failure(error))
        raise
    finally:
        fault = sender.close()
        if fault:
            warn(f"lineage: OpenLineage events could not be sent ({fault})")


class _Events:
    """Makes the events of one attempt to run a job."""

    def __init__(self, job: Job, namespace: str) -> None:
        from openlineage.client.uuid import generate_new_uuid

        self._job, self._namespace = job, namespace
        self._id = str(generate_new_uuid())

    def make(
        self, state: State, run: dict[str, Any] | None = None, output: dict[str, Any] | None = None, written: dict[str, Any] | None = None
    ) -> RunEvent:
        """Return an event, with facets of the run, of the output and of what was written."""
        from openlineage.client import event_v2 as ol
        from openlineage.client.facet_v2 import job_type_job, processing_engine_run

        engine = processing_engine_run.ProcessingEngineRunFacet(version=__version__, name="dpdask")
        kind = job_type_job.JobTypeJobFacet(processingType="BATCH", integration="DPDASK", jobType="JOB")
        return ol.RunEvent(
            eventType=ol.RunState[state],
            eventTime=datetime.now(UTC).isoformat(),
            run=ol.Run(runId=self._id, facets={"processing_engine": engine, **(run or {})}),
            job=ol.Job(namespace=self._namespace, name=self._job.file.name, facets={"jobType": kind}),
            inputs=[ol.InputDataset(*name_dataset(self._job.input_url))],
            outputs=[ol.OutputDataset(*name_dataset(self._job.output_url), facets=output or {}, outputFacets=written or {})],
            producer=_PRODUCER,
        )

    def make_complete(self, outcome: Outcome) -> RunEvent:
        """Return the event of a run that released, or found its release: the card, and the size of what is published."""
        from openlineage.client.facet_v2 import output_statistics_output_dataset

        shards = outcome.manifest.shards
        size = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
            rowCount=outcome.manifest.n_rows, size=sum(shard.n_bytes for shard in shards), fileCount=len(shards)
        )
        card: dict[str, Any] = {}
        with suppress(DpdaskError, ValueError):  # the release stands, whether or not its card can be read just now
            card["dpdask_releaseCard"] = _facet("ReleaseCard", card=json.loads(Folder(outcome.output).read(CARD_NAME)))
        ended = _facet("Outcome", status=outcome.status, run=outcome.run_id)
        return self.make("COMPLETE", {"dpdask_outcome": ended}, card, {"outputStatistics": size})

    def make_failure(self, error: BaseException) -> RunEvent:
        """Return the event of a run that failed, with the exit code and the class of the error."""
        from openlineage.client.facet_v2 import error_message_run

        interrupted = isinstance(error, KeyboardInterrupt)
        kind = type(error) if isinstance(error, DpdaskError) else InternalError
        name, code = ("Interrupted", 130) if interrupted else (kind.__name__, kind.exit_code)
        message = error_message_run.ErrorMessageRunFacet(message=f"{name}, exit code {code}", programmingLanguage="PYTHON")
        facets = {"errorMessage": message, "dpdask_outcome": _facet("Outcome", status="failed", error=name, exitCode=code)}
        return self.make("ABORT" if interrupted else "FAIL", facets)


class _Sender:
    """Sends events one after the other, in the background: a receiver that is slow or gone delays no run."""

    def __init__(self) -> None:
        try:
            from openlineage.client import OpenLineageClient
        except ImportError:
            raise SpecError("OpenLineage's client is not installed", "lineage", "install dpdask[openlineage], or remove the key") from None
        logging.getLogger("openlineage").addHandler(logging.NullHandler())  # its messages quote URLs
        self._events: SimpleQueue[RunEvent | None] = SimpleQueue()
        self._fault = ""
        self._open = partial(OpenLineageClient, config=_CONFIG)
        self._thread = Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def send(self, event: RunEvent) -> None:
        """Send an event after those before it."""
        self._events.put(event)

    def close(self) -> str:
        """Wait a few seconds for the events, and return what went wrong with the last that failed; empty if all were sent."""
        self._events.put(None)
        self._thread.join(PATIENCE)
        return self._fault or ("no answer" if self._thread.is_alive() else "")

    def _send_all(self) -> None:
        try:
            client = self._open()
            for event in iter(self._events.get, None):
                self._send(client, event)
            client.close(PATIENCE)
        except Exception as error:
            self._fault = type(error).__name__

    def _send(self, client: OpenLineageClient, event: RunEvent) -> None:
        from openlineage.client.serde import Serde

        try:
            if client.transport.kind == "console":  # it writes to a logger, which shows nothing in a command
                sys.stderr.write(f"{Serde.to_json(event)}\n")
            else:
                client.emit(event)
        except Exception as error:
            self._fault = type(error).__name__


def _facet(name: str, **content: Any) -> dict[str, Any]:
    """Return a facet of this package's own."""
    return {"_producer": _PRODUCER, "_schemaURL": f"{_PRODUCER}#{name}", **content}


def name_dataset(url: str) -> tuple[str, str]:
    """Return the namespace and the name under which OpenLineage knows a URL, without user, password and query.

    Parameters
    ----------
    url
        An absolute fsspec URL.

    Examples
    --------
    >>> name_dataset("s3://lake/raw/people")
    ('s3://lake', 'raw/people')
    >>> name_dataset("file:///data/people")
    ('file', '/data/people')
    >>> name_dataset("https://me:word@example.org:8443/people.parquet?signature=1")
    ('https://example.org:8443', 'people.parquet')
    """
    url = url.rpartition("::")[2]
    if url.startswith("file://"):
        return "file", url.removeprefix("file://")
    try:
        parts = urlsplit(url)
        place = parts.netloc.rpartition("@")[2]
        if parts.scheme in _AZURE and parts.username:
            place = f"{parts.username}@{place}"
    except ValueError:
        return "unknown", "unknown"
    return f"{parts.scheme}://{place}", parts.path.strip("/") or "/"
