"""OpenLineage events of runs, as its own client sends them: to a file, to a receiver on HTTP, to one that is gone."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from e2e.helpers import (
    RATINGS_SCHEMA,
    call_cli,
    digests,
    error_line,
    lake,
    load,
    read_card,
    write_job,
)
from openlineage.client.facet_v2 import column_lineage_dataset as columns

from dpdask.jobs import lineage
from dpdask.jobs.lineage import find_origins, name_dataset
from dpdask.privacy.ledger import Ledger
from dpdask.schema import Schema
from dpdask.startup import Terminated

ROWS = [331, 406]  # the input's numbers of rows, which no event may hold
SECRETS = re.compile(rf"hunter2|\b({ROWS[0]}|{ROWS[1]}|{sum(ROWS)})\b")


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch, tmp_path):
    """Keep the environment of whoever runs the tests out of them; the client itself adds to it."""
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    for name in [name for name in os.environ if name.startswith("OPENLINEAGE")]:
        del os.environ[name]


@pytest.fixture
def job(tmp_path):
    return write_job(
        tmp_path, lake(tmp_path / "in", ROWS), tmp_path / "out", lineage={"namespace": "lake"}
    )


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The file to which events go."""
    to = {"TYPE": "file", "LOG_FILE_PATH": str(tmp_path / "events.jsonl"), "APPEND": "true"}
    for key, value in to.items():
        monkeypatch.setenv(f"OPENLINEAGE__TRANSPORT__{key}", value)
    return tmp_path / "events.jsonl"


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_release_starts_and_completes_with_its_card(job, file, tmp_path):
    ended = call_cli("run", job, "--json")
    assert (ended.returncode, json.loads(ended.stdout)["status"]) == (0, "released")
    start, complete = read(file)
    assert (start["eventType"], complete["eventType"]) == ("START", "COMPLETE")
    assert start["run"]["runId"] == complete["run"]["runId"]
    assert uuid.UUID(start["run"]["runId"])
    for event in (start, complete):
        assert (event["job"]["namespace"], event["job"]["name"]) == ("lake", "test")
        assert [(each["namespace"], each["name"]) for each in event["inputs"]] == [
            ("file", str(tmp_path / "in"))
        ]
        assert [(each["namespace"], each["name"]) for each in event["outputs"]] == [
            ("file", str(tmp_path / "out"))
        ]
    [output] = complete["outputs"]
    card = read_card(tmp_path)
    assert output["facets"]["dpdask_releaseCard"]["card"]["guarantee"] == {
        k: v for k, v in card["guarantee"].items() if v is not None
    }
    written = output["outputFacets"]["outputStatistics"]
    assert written["rowCount"] == json.loads(ended.stdout)["rows"]
    assert written["fileCount"] == json.loads(ended.stdout)["shards"]
    assert not SECRETS.search(file.read_text())

    card["input"] = {"format": "delta", "version": 12}
    (tmp_path / "out" / "_dpdask" / "release.json").write_text(json.dumps(card))
    assert call_cli("run", job).returncode == 0
    again = read(file)[2:]
    assert again[1]["inputs"][0]["facets"]["version"]["datasetVersion"] == "12"
    assert [event["eventType"] for event in again] == ["START", "COMPLETE"]
    assert again[1]["run"]["facets"]["dpdask_outcome"]["status"] == "already released"
    assert again[0]["run"]["runId"] != start["run"]["runId"]


def trace(event):
    """Return for each released column whence it comes, and the columns that affect all; checked against the classes that are generated from the official schema."""
    [facet] = [each["facets"]["columnLineage"] for each in event["outputs"]]
    known = dict(facet)
    url = known.pop("_schemaURL")
    assert known.pop("_producer")
    assert url == columns.ColumnLineageDatasetFacet._get_schema()

    def build(field):
        steps = [columns.Transformation(**each) for each in field["transformations"]]
        assert {step.type for step in steps} <= {"DIRECT", "INDIRECT"}
        return columns.InputField(**{**field, "transformations": steps})

    def tell(fields):
        built = [build(field) for field in fields]
        names = {(each["namespace"], each["name"]) for each in event["inputs"]}
        assert {(each.namespace, each.name) for each in built} <= names
        return [(each.field, *step_of(each)) for each in built]

    def step_of(field):
        [step] = field.transformations
        return step.type, step.subtype, step.masking

    assert set(known) == {"fields", "dataset"}
    found = {
        name: tell(columns.Fields(**each).inputFields) for name, each in known["fields"].items()
    }
    return found, tell(known["dataset"])


def masked(name, subtype="TRANSFORMATION"):
    return (name, "DIRECT", subtype, True)


def test_columns_are_traced_to_their_origins(tmp_path, file):
    source = lake(tmp_path / "in", [200], schema=RATINGS_SCHEMA)
    given = {"schema": RATINGS_SCHEMA, "lineage": {"namespace": "lake"}}
    unit = {"column": "userId", "max_rows": 2}
    kept = [("userId", "DIRECT", "IDENTITY", False)]
    joined = ("rating", "INDIRECT", "CONDITIONAL", True)
    counted = {
        name: {**column, "role": "drop" if name == "userId" else column["role"]}
        for name, column in RATINGS_SCHEMA.items()
    }
    for number, (changes, fields, whole) in enumerate(
        [
            ({}, {"userId": kept, "rating": [masked("rating")]}, [joined]),
            (
                {"privacy__unit": unit},
                {"userId": kept, "rating": [masked("rating")]},
                [joined, ("userId", "INDIRECT", "FILTER", True)],
            ),
            (
                {"privacy__unit": {**unit, "publish_counts": True}},
                {
                    "userId": kept,
                    "rating": [masked("rating")],
                    "userId_weight": [("userId", "DIRECT", "AGGREGATION", False)],
                },
                [joined, ("userId", "INDIRECT", "FILTER", True)],
            ),
            ({"mechanism": {"kind": "histogram"}, "schema": counted}, None, [joined]),
        ]
    ):
        job = write_job(
            tmp_path / str(number), source, tmp_path / f"out{number}", **{**given, **changes}
        )
        assert call_cli("run", job).returncode == 0
        found, dataset = trace(read(file)[-1])
        assert dataset == whole
        if fields is not None:
            assert found == fields
        else:
            assert found["rating"] == [masked("rating", "AGGREGATION")]


def test_the_origin_of_a_column_is_found_by_its_name():
    roles = {"a": "privatise", "a_b": "privatise", "a_lower": "keep", "c": "drop"}
    schema = Schema.model_validate(
        {
            "columns": {
                name: {"role": role}
                | ({"kind": "continuous", "bounds": [0.0, 1.0]} if role == "privatise" else {})
                for name, role in roles.items()
            }
        }
    )
    origins = {
        "a": ["a"],
        "a_lower": ["a_lower"],
        "a_upper": ["a"],
        "a_b_upper": ["a_b"],
        "cell": ["a", "a_b"],
    }
    assert {name: find_origins(name, schema) for name in origins} == origins


def test_lineage_changes_no_byte_of_a_release(job, file, tmp_path):
    assert (
        load(job).digest
        == load(job, lineage="null").digest
        == load(job, lineage__namespace="other").digest
    )
    assert call_cli("run", job).returncode == 0
    assert (
        call_cli(
            "run", job, "--set", "lineage=null", "--set", f"output.path={tmp_path / 'without'}"
        ).returncode
        == 0
    )
    assert digests(tmp_path / "out") == digests(tmp_path / "without")
    assert len(read(file)) == 2


def test_a_refused_run_fails_with_its_exit_code_alone(job, file, tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    Ledger(url).init("people", 1.0)
    charged = ["--set", f"ledger={{url: '{url}', dataset: people}}", "--set", "insecure_seed=null"]
    missing = ["--set", f"input.path={tmp_path / 'hunter2-none'}"]
    for more, code, name in ((charged, 77, "BudgetError"), (missing, 66, "MissingError")):
        ended = call_cli("run", job, *more)
        assert ended.returncode == code
        assert error_line(ended)
        start, fail = read(file)[-2:]
        assert (start["eventType"], fail["eventType"]) == ("START", "FAIL")
        assert fail["run"]["facets"]["errorMessage"]["message"] == f"{name}, exit code {code}"
        assert fail["run"]["facets"]["dpdask_outcome"] | {"_producer": "", "_schemaURL": ""} == {
            "_producer": "",
            "_schemaURL": "",
            "status": "failed",
            "error": name,
            "exitCode": code,
        }
        assert fail["outputs"][0]["facets"] == {}


def test_failures_of_others_are_internal_and_interrupts_are_aborts(job, file):
    for error, state, message in (
        (ValueError("hunter2"), "FAIL", "InternalError, exit code 70"),
        (KeyboardInterrupt(), "ABORT", "Interrupted, exit code 130"),
        (Terminated(), "ABORT", "Terminated, exit code 143"),
    ):
        with pytest.raises(type(error)), lineage.report_lineage(load(job), print):
            raise error
        last = read(file)[-1]
        assert (last["eventType"], last["run"]["facets"]["errorMessage"]["message"]) == (
            state,
            message,
        )
    assert not SECRETS.search(file.read_text())


class Receiver(HTTPServer):
    """Receives events on the loopback, and answers with one status."""

    def __init__(self, status=200):
        self.status, self.bodies, self.keys = status, list[dict[str, Any]](), list[str | None]()
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self):
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.keys.append(self.headers["Authorization"])
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_):
        """Be silent."""


@pytest.fixture
def receiver(request, monkeypatch):
    with Receiver(getattr(request, "param", 200)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OPENLINEAGE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OPENLINEAGE_API_KEY", "hunter2")
        yield server
        server.shutdown()
        thread.join()


def test_a_receiver_gets_the_events_and_its_key(job, receiver):
    ended = call_cli("run", job)
    assert ended.returncode == 0
    assert [body["eventType"] for body in receiver.bodies] == ["START", "COMPLETE"]
    assert receiver.keys == ["Bearer hunter2"] * 2
    told = re.sub(
        r'"(rows_per_second|seconds_left)": [\d.]+', "", ended.stderr
    )  # a rate may be any number
    assert not SECRETS.search(json.dumps(receiver.bodies) + told)


def warned(stderr):
    return [
        found["warning"] for line in stderr.splitlines() if "warning" in (found := json.loads(line))
    ]


@pytest.mark.parametrize("receiver", [403], indirect=True)
def test_a_receiver_that_refuses_is_one_warning(job, receiver):
    ended = call_cli("run", job, "--json")
    assert (ended.returncode, json.loads(ended.stdout)["status"]) == (0, "released")
    assert len(receiver.bodies) == 2
    assert warned(ended.stderr) == ["lineage: OpenLineage events could not be sent (HTTPError)"]


def test_a_receiver_that_is_gone_costs_a_short_wait_and_one_warning(job, monkeypatch):
    monkeypatch.setattr(lineage, "PATIENCE", 0.5)
    monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:9")
    began = time.monotonic()
    with lineage.report_lineage(load(job), (told := list[str]()).append):
        pass
    assert time.monotonic() - began < 30
    assert told == ["lineage: OpenLineage events could not be sent (no answer)"]
    monkeypatch.setenv(
        "OPENLINEAGE__TRANSPORT__TRANSPORTS__DEFAULT_HTTP__URL",
        "http://me:hunter2@127.0.0.1:9/?token=hunter2",
    )
    ended = call_cli("run", job)
    assert (ended.returncode, len(warned(ended.stderr))) == (0, 1)
    assert "hunter2" not in ended.stderr
    assert (
        len(
            error_line(
                call_cli(
                    "run", job, "--set", "input.path=nowhere", "--set", "output.path=nowhere else"
                )
            ).splitlines()
        )
        == 1
    )


def test_an_event_that_cannot_be_made_is_one_warning(job, file, tmp_path):
    assert call_cli("run", job).returncode == 0
    (tmp_path / "out" / "_dpdask" / "release.json").write_text("no card")
    ended = call_cli("run", job)
    assert (ended.returncode, warned(ended.stderr)) == (
        0,
        ["lineage: OpenLineage events could not be sent (JSONDecodeError)"],
    )
    assert [event["eventType"] for event in read(file)] == ["START", "COMPLETE", "START"]


def test_the_console_is_stderr(job, monkeypatch):
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "console")
    ended = call_cli("run", job, "--json")
    assert json.loads(ended.stdout)["status"] == "released"
    events = [
        found for line in ended.stderr.splitlines() if "eventType" in (found := json.loads(line))
    ]
    assert [event["eventType"] for event in events] == ["START", "COMPLETE"]


def test_without_the_client_nothing_runs(job, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openlineage.client", None)
    ended = call_cli("run", job)
    assert ended.returncode == 64
    assert "install dpdask[openlineage]" in error_line(ended)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("file:///data/in?.parquet", ("file", "/data/in?.parquet")),
        ("s3://key:hunter2@lake/raw/people/", ("s3://lake", "raw/people")),
        ("s3://lake", ("s3://lake", "/")),
        (
            "abfss://raw@account.dfs.core.windows.net/people",
            ("abfss://raw@account.dfs.core.windows.net", "people"),
        ),
        (
            "abfss://raw:hunter2@account.dfs.core.windows.net/people?sig=hunter2",
            ("abfss://raw@account.dfs.core.windows.net", "people"),
        ),
        (
            "https://me:hunter2@example.org/people.csv?sig=hunter2#hunter2",
            ("https://example.org", "people.csv"),
        ),
        ("simplecache::s3://key:hunter2@lake/people", ("s3://lake", "people")),
        ("https://[hunter2/people", ("unknown", "unknown")),
        ("raw.people", ("catalog", "raw.people")),
    ],
)
def test_the_name_of_a_dataset_holds_no_secret(url, named):
    assert name_dataset(url) == named
