"""OpenLineage events of a run, for catalogues of data: what it reads, what it writes, and its release card.

Each attempt to run a job is one OpenLineage run, which starts once and then completes, fails or is
aborted. Where events go is said by OpenLineage's own configuration (`OPENLINEAGE_URL`,
`OPENLINEAGE__TRANSPORT__TYPE`, `openlineage.yml`).
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dpdask.computed import Computed
from dpdask.errors import DpdaskError, InternalError, SpecError
from dpdask.io.parquet import read_schema
from dpdask.jobs.run import Outcome
from dpdask.jobs.spec import Job
from dpdask.schema import Schema
from dpdask.startup import Terminated
from dpdask.version import __version__

if TYPE_CHECKING:
    from openlineage.client.event_v2 import RunEvent

PATIENCE = 5.0  # seconds that the end of a run waits for its events
_INTERRUPTED, _TERMINATED = 130, 143
_PRODUCER = f"pkg:pypi/dpdask@{__version__}"
_AZURE = ("abfs", "abfss")  # their container stands where other URLs have a user
# the URL of a repository may hold a token
_CONFIG = {"facets": {"source_code_location": {"disabled": True}}}

Ended = Outcome | BaseException | None  # of a run that only starts


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
    sender = _Sender(job, job.file.lineage.namespace)
    sender.send(None)
    completed = False

    def complete(outcome: Outcome) -> Outcome:
        nonlocal completed
        completed = True
        sender.send(outcome)
        return outcome

    try:
        yield complete
    except BaseException as error:
        if not completed:
            sender.send(error)
        raise
    finally:
        fault = sender.close()
        if fault:
            warn(f"lineage: OpenLineage events could not be sent ({fault})")


class _Sender:
    """Makes and sends events in the background: whatever goes wrong with them, no run fails or waits."""

    def __init__(self, job: Job, namespace: str) -> None:
        try:
            from openlineage.client import OpenLineageClient
            from openlineage.client.uuid import generate_new_uuid
        except ImportError:
            hint = "install dpdask[openlineage], or remove the key"
            raise SpecError("OpenLineage's client is not installed", "lineage", hint) from None
        # its messages quote URLs
        logging.getLogger("openlineage").addHandler(logging.NullHandler())
        self._job, self._namespace, self._id = job, namespace, str(generate_new_uuid())
        self._ends: SimpleQueue[tuple[Ended, str] | None] = SimpleQueue()
        self._fault, self._open = "", partial(OpenLineageClient, config=_CONFIG)
        self._thread = Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def send(self, ended: Ended) -> None:
        """Make an event of now and send it, after those before it."""
        self._ends.put((ended, datetime.now(UTC).isoformat()))

    def close(self) -> str:
        """Wait a few seconds for the events; return what went wrong with the last that failed."""
        self._ends.put(None)
        self._thread.join(PATIENCE)
        return self._fault or ("no answer" if self._thread.is_alive() else "")

    def _send_all(self) -> None:
        from openlineage.client.serde import Serde

        try:
            client = self._open()
            while (each := self._ends.get()) is not None:
                try:
                    event = self._make_event(*each)
                    # it writes to a logger, which shows nothing in a command
                    if client.transport.kind == "console":
                        sys.stderr.write(f"{Serde.to_json(event)}\n")
                    else:
                        client.emit(event)
                except Exception as error:
                    self._fault = type(error).__name__
            client.close(PATIENCE)
        except Exception as error:
            self._fault = type(error).__name__

    def _make_event(self, ended: Ended, at: str) -> RunEvent:
        from openlineage.client import event_v2 as ol
        from openlineage.client.facet_v2 import error_message_run, job_type_job
        from openlineage.client.facet_v2 import processing_engine_run as engine

        job, state = self._job, "START"
        source = ol.InputDataset(*name_dataset(job.input_url))
        output = ol.OutputDataset(*name_dataset(job.output_url))
        version = engine.ProcessingEngineRunFacet(version=__version__, name="dpdask")
        facets: dict[str, Any] = {"processing_engine": version}
        if isinstance(ended, Outcome):
            state = "COMPLETE"
            about = {"status": ended.status, "run": ended.run_id}
            facets["dpdask_outcome"] = _facet("Outcome", **about)
            if ended.release:  # else nothing was new in a growing table
                self._describe_release(ended, source, output)
        elif ended is not None:
            # a library's class says nothing more than a defect does
            kind = type(ended) if isinstance(ended, DpdaskError) else InternalError
            state, name, code = "FAIL", kind.__name__, kind.exit_code
            if isinstance(ended, KeyboardInterrupt):
                state, name, code = "ABORT", "Interrupted", _INTERRUPTED
                if isinstance(ended, Terminated):
                    name, code = "Terminated", _TERMINATED
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
                message=f"{name}, exit code {code}", programmingLanguage="PYTHON"
            )
            failed = {"status": "failed", "error": name, "exitCode": code}
            facets["dpdask_outcome"] = _facet("Outcome", **failed)
        about_job = job_type_job.JobTypeJobFacet(
            processingType="BATCH", integration="DPDASK", jobType="JOB"
        )
        return ol.RunEvent(
            eventType=ol.RunState[state],
            eventTime=at,
            run=ol.Run(runId=self._id, facets=facets),
            job=ol.Job(
                namespace=self._namespace, name=job.file.name, facets={"jobType": about_job}
            ),
            inputs=[source],
            outputs=[output],
            producer=_PRODUCER,
        )

    def _describe_release(self, outcome: Outcome, source: Any, output: Any) -> None:
        """Put the card of a release, and the size of what is published, into an event."""
        from openlineage.client.facet_v2 import dataset_version_dataset as versions
        from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

        shards = outcome.manifest.shards
        size = statistics.OutputStatisticsOutputDatasetFacet(
            rowCount=outcome.manifest.n_rows,
            size=sum(shard.n_bytes for shard in shards),
            fileCount=len(shards),
        )
        output.outputFacets = {"outputStatistics": size}
        with suppress(DpdaskError):  # a card that cannot be read just now
            place = self._job.open_output()
            card = json.loads(place.read_card(outcome.release))
            output.facets = {"dpdask_releaseCard": _facet("ReleaseCard", card=card)}
            written = read_schema(place.output, shards[0].name).names if shards else []
            output.facets["columnLineage"] = self._trace_columns(written, source)
            if "input" in card:
                version = versions.DatasetVersionDatasetFacet(str(card["input"]["version"]))
                source.facets = {"version": version}

    def _trace_columns(self, written: Sequence[str], source: Any) -> Any:
        """Return from which columns of the input each released column was computed, and whether its values are masked."""
        from openlineage.client.facet_v2 import column_lineage_dataset as columns

        schema, budget = self._job.schema, self._job.file.privacy
        how = "TRANSFORMATION" if self._job.mechanism.releases_rows else "AGGREGATION"

        def take(name: str, kind: str, subtype: str, *, masking: bool = True) -> Any:
            step = columns.Transformation(type=kind, subtype=subtype, masking=masking)
            return columns.InputField(source.namespace, source.name, name, [step])

        unit = None if budget is None else budget.unit_column
        fields = {}
        for name in written:
            joins = self._job.mechanism.releases_rows
            origins = find_origins(name, schema, joins=joins)
            taken = [take(origin, "DIRECT", how) for origin in origins]
            if origins == [name] and name in schema.kept:
                taken = [take(name, "DIRECT", "IDENTITY", masking=False)]
            if unit is not None and name == unit.weight:  # the exact numbers of rows
                taken = [take(unit.column, "DIRECT", "AGGREGATION", masking=False)]
            fields[name] = columns.Fields(inputFields=taken)
        # a reference or a table of several columns may join them
        joined = [take(name, "INDIRECT", "CONDITIONAL") for name in schema.privatised]
        bounds = [take(unit.column, "INDIRECT", "FILTER")] if unit is not None else []
        return columns.ColumnLineageDatasetFacet(fields=fields, dataset=[*joined, *bounds])


def find_origins(written: str, schema: Schema, *, joins: bool = False) -> list[str]:
    """Return the columns of the input that a released column is made of, by its name; all private ones if the name tells none.

    A range of a column has the column's name with an ending.
    """
    computed = Computed.of(schema, joins=joins).origins.get(written)
    if computed is not None:
        return [*computed]
    if written in schema.kept or written in schema.privatised:
        return [written]
    named = [name for name in schema.privatised if written.startswith(f"{name}_")]
    return [max(named, key=len)] if named else [*schema.privatised]


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
