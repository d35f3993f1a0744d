"""OpenLineage events of a run, for catalogues of data: what it reads, what it writes, and its release card.

Each attempt to run a job is one OpenLineage run, which starts once and then completes, fails or is
aborted. Where events go is said by OpenLineage's own configuration (`OPENLINEAGE_URL`,
`OPENLINEAGE__TRANSPORT__TYPE`, `openlineage.yml`).
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
from typing import TYPE_CHECKING, Any, Literal, ParamSpec
from urllib.parse import urlsplit

from dpdask.errors import DpdaskError, InternalError, SpecError
from dpdask.jobs.run import Outcome
from dpdask.jobs.spec import Job
from dpdask.version import __version__

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import RunEvent

PATIENCE = 5.0  # seconds that the end of a run waits for its events
_INTERRUPTED = 130
_PRODUCER = f"pkg:pypi/dpdask@{__version__}"
_AZURE = ("abfs", "abfss")  # their container stands where other URLs have a user
_CONFIG = {
    "facets": {"source_code_location": {"disabled": True}}
}  # the URL of a repository may hold a token

Args = ParamSpec("Args")
State = Literal["START", "COMPLETE", "FAIL", "ABORT"]


@contextmanager
def report_lineage(job: Job, warn: Callable[[str], None]) -> Iterator[Callable[[Outcome], Outcome]]:
    """Send the events of a run, if its job asks for them: its start now, its end when the block ends.

    Privacy
    -------
    An event holds the name of the job, the URLs of its input and output without users, passwords
    and queries, what is published of the release, or the exit code. The exit code may depend on
    private rows, so readers of these events are stewards.
    """
    if job.file.lineage is None:
        yield lambda outcome: outcome
        return
    sender = _Sender()
    events = _Events(job, job.file.lineage.namespace)
    sender.send(events.make, "START", _now())
    ended = False

    def complete(outcome: Outcome) -> Outcome:
        nonlocal ended
        ended = True
        sender.send(events.make_complete, outcome, _now())
        return outcome

    try:
        yield complete
    except BaseException as error:
        if not ended:
            sender.send(events.make_failure, *_name_failure(error), _now())
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

    def make(self, state: State, at: str, **facets: Any) -> RunEvent:
        """Return an event, with facets of the run."""
        from openlineage.client import event_v2 as ol
        from openlineage.client.facet_v2 import job_type_job, processing_engine_run

        engine = processing_engine_run.ProcessingEngineRunFacet(version=__version__, name="dpdask")
        kind = job_type_job.JobTypeJobFacet(
            processingType="BATCH", integration="DPDASK", jobType="JOB"
        )
        return ol.RunEvent(
            eventType=ol.RunState[state],
            eventTime=at,
            run=ol.Run(runId=self._id, facets={"processing_engine": engine, **facets}),
            job=ol.Job(
                namespace=self._namespace, name=self._job.file.name, facets={"jobType": kind}
            ),
            inputs=[ol.InputDataset(*name_dataset(self._job.input_url))],
            outputs=[ol.OutputDataset(*name_dataset(self._job.output_url))],
            producer=_PRODUCER,
        )

    def make_complete(self, outcome: Outcome, at: str) -> RunEvent:
        """Return the event of a run that released, or found its release: the card, and the size of what is published."""
        from openlineage.client.facet_v2 import (
            dataset_version_dataset,
            output_statistics_output_dataset,
        )

        shards = outcome.manifest.shards
        size = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
            rowCount=outcome.manifest.n_rows,
            size=sum(shard.n_bytes for shard in shards),
            fileCount=len(shards),
        )
        event = self.make(
            "COMPLETE",
            at,
            dpdask_outcome=_facet("Outcome", status=outcome.status, run=outcome.run_id),
        )
        assert event.inputs
        assert event.outputs
        source, output = event.inputs[0], event.outputs[0]
        if self._job.file.growing and not outcome.release:
            return event  # nothing was new
        output.outputFacets = {"outputStatistics": size}
        with suppress(DpdaskError):  # a card that cannot be read just now
            card = json.loads(self._job.open_output().read_card(outcome.release))
            output.facets = {"dpdask_releaseCard": _facet("ReleaseCard", card=card)}
            if "input" in card:
                source.facets = {
                    "version": dataset_version_dataset.DatasetVersionDatasetFacet(
                        str(card["input"]["version"])
                    )
                }
        return event

    def make_failure(self, name: str, code: int, at: str) -> RunEvent:
        """Return the event of a run that failed, with the exit code and the class of the error."""
        from openlineage.client.facet_v2 import error_message_run

        message = error_message_run.ErrorMessageRunFacet(
            message=f"{name}, exit code {code}", programmingLanguage="PYTHON"
        )
        outcome = _facet("Outcome", status="failed", error=name, exitCode=code)
        return self.make(
            "ABORT" if code == _INTERRUPTED else "FAIL",
            at,
            errorMessage=message,
            dpdask_outcome=outcome,
        )


class _Sender:
    """Makes and sends events one after the other, in the background: whatever goes wrong with them, no run fails or waits for long."""

    def __init__(self) -> None:
        try:
            from openlineage.client import OpenLineageClient
        except ImportError:
            raise SpecError(
                "OpenLineage's client is not installed",
                "lineage",
                "install dpdask[openlineage], or remove the key",
            ) from None
        logging.getLogger("openlineage").addHandler(
            logging.NullHandler()
        )  # its messages quote URLs
        self._events: SimpleQueue[Callable[[], RunEvent] | None] = SimpleQueue()
        self._fault = ""
        self._open = partial(OpenLineageClient, config=_CONFIG)
        self._thread = Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def send(self, make: Callable[Args, RunEvent], *args: Args.args, **given: Args.kwargs) -> None:
        """Make an event and send it, after those before it."""
        self._events.put(partial(make, *args, **given))

    def close(self) -> str:
        """Wait a few seconds for the events, and return what went wrong with the last that failed; empty if all were sent."""
        self._events.put(None)
        self._thread.join(PATIENCE)
        return self._fault or ("no answer" if self._thread.is_alive() else "")

    def _send_all(self) -> None:
        try:
            client = self._open()
            for make in iter(self._events.get, None):
                self._send(client, make)
            client.close(PATIENCE)
        except Exception as error:
            self._fault = type(error).__name__

    def _send(self, client: OpenLineageClient, make: Callable[[], RunEvent]) -> None:
        from openlineage.client.serde import Serde

        try:
            event = make()
            if (
                client.transport.kind == "console"
            ):  # it writes to a logger, which shows nothing in a command
                sys.stderr.write(f"{Serde.to_json(event)}\n")
            else:
                client.emit(event)
        except Exception as error:
            self._fault = type(error).__name__


def _name_failure(error: BaseException) -> tuple[str, int]:
    """Return the class of an error of this package, and its exit code; a library's class says nothing more than a defect does."""
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted", _INTERRUPTED
    kind = type(error) if isinstance(error, DpdaskError) else InternalError
    return kind.__name__, kind.exit_code


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _facet(name: str, **content: Any) -> Any:
    """Return a facet of this package's own, as plain values."""
    return {"_producer": _PRODUCER, "_schemaURL": f"{_PRODUCER}#{name}", **content}


def name_dataset(url: str) -> tuple[str, str]:
    """Return the namespace and the name under which OpenLineage knows a URL, without user, password and query.

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
    if not parts.scheme:
        return "catalog", url  # a table that a catalog knows by its name
    return f"{parts.scheme}://{place}", parts.path.strip("/") or "/"
