"""The metrics of a run, as Prometheus' own parser reads them."""

import errno
import json
import os
import socket
import subprocess
import threading
import time
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest
from e2e.helpers import RATINGS_SCHEMA, call_cli, command, lake, make_ledger, write_job
from prometheus_client.parser import text_string_to_metric_families

from dpdask.terminal import metrics
from dpdask.terminal.metrics import Metrics
from dpdask.terminal.progress import StageShown

ROWS = [331, 406]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def listeners(port):
    """Return the addresses at which somebody listens to a port."""
    return [
        each.laddr.ip
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    ]


def read(path):
    """Return the value of each metric, by its name and labels."""
    return parse(path.read_text(encoding="utf-8"))


def parse(text):
    families = [*text_string_to_metric_families(text)]
    assert all(family.documentation and family.type == "gauge" for family in families)
    return {
        (sample.name.removeprefix("dpdask_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def source(tmp_path):
    return lake(tmp_path / "in", ROWS, schema=RATINGS_SCHEMA)


def test_a_run_leaves_its_state(tmp_path, source):
    place = make_ledger(tmp_path, "people", 8.0)
    job = write_job(
        tmp_path, source, tmp_path / "out", schema=RATINGS_SCHEMA, ledger=place, name='a "b"\\n'
    )
    file = tmp_path / "run.prom"
    began = time.time()
    done = call_cli("run", job, "--json", "--metrics", file)
    assert done.returncode == 0
    found = read(file)
    assert found["run_exit_code",] == found["run_running",] == 0
    assert found["run_released",] == 1
    assert began - 1 < found["run_started_timestamp_seconds",] <= time.time()
    assert found["run_seconds",] > 0
    assert found["dataset_epsilon_spent", "people"] == 4.0
    assert found["dataset_epsilon_limit", "people"] == 8.0
    stages = {key[1] for key in found if key[0] == "run_stage_done_ratio"}
    assert "write" in stages
    assert all(found["run_stage_done_ratio", stage] == 1 for stage in stages)
    [info] = [key for key in found if key[0] == "run_info"]
    assert 'a "b"\\n' in info
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
    assert json.loads(done.stdout)["balance"]["epsilon_spent"] == 4.0
    # a second run replaces it
    assert call_cli("run", job, "--metrics", file).returncode == 0
    assert read(file)["run_released",] == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [("privacy.epsilon=-1", 64), ("input.path=nowhere", 66), ("schema=none.yaml", 64)],
)
def test_a_run_that_fails_leaves_its_exit_code(change, code, tmp_path, source):
    job = write_job(tmp_path, source, tmp_path / "out", schema=RATINGS_SCHEMA)
    done = call_cli("run", job, "--set", change, "--metrics", tmp_path / "run.prom")
    assert done.returncode == code
    found = read(tmp_path / "run.prom")
    assert (found["run_exit_code",], found["run_running",]) == (code, 0)
    assert ("run_released",) not in found


def test_private_numbers_of_rows_are_in_no_metric(tmp_path, source):
    schema = {
        name: {**column, "role": "drop" if name == "userId" else column["role"]}
        for name, column in RATINGS_SCHEMA.items()
    }
    given = {"schema": schema, "mechanism": {"kind": "histogram"}}
    for adjacency, is_public in (("replace-one", True), ("add-remove", False)):
        folder = tmp_path / adjacency
        job = write_job(folder, source, folder / "out", privacy__adjacency=adjacency, **given)
        assert call_cli("run", job, "--metrics", folder / "run.prom").returncode == 0
        found = read(folder / "run.prom")
        rows = {value for key, value in found.items() if key[0] == "run_stage_rows"}
        assert (sum(ROWS) in rows) == is_public
        assert is_public or not {*ROWS, sum(ROWS)} & {*found.values()}


def test_the_file_is_whole_whenever_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "_PAUSE_SECONDS", 0.001)
    file, ended = tmp_path / "run.prom", threading.Event()
    written = Metrics(str(file))
    stages = [StageShown(f"stage {number}", total=4, done=3, rows=1000) for number in range(200)]
    seen = 0

    def end_all():
        for stage in stages:
            written.show(stage)
            written.end(stage)
        ended.set()

    thread = threading.Thread(target=end_all)
    thread.start()
    while not ended.is_set():
        found = read(file)
        count = sum(key[0] == "run_stage_done_ratio" for key in found)
        assert count >= seen
        seen = count
    thread.join()
    written.close(75)
    found = read(file)
    assert found["run_stage_rows", "stage 7"] == 750
    assert found["run_stage_done_ratio", "stage 7"] == 0.75
    assert found["run_exit_code",] == 75


def test_metrics_in_a_place_that_is_no_folder_are_a_fault_and_no_error(tmp_path):
    (tmp_path / "file").touch()
    written = Metrics(str(tmp_path / "file" / "run.prom"))
    written.close(0)
    assert written.fault == os.strerror(errno.ENOTDIR)


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path, source):
    job = write_job(tmp_path, source, tmp_path / "out", schema=RATINGS_SCHEMA)
    done = call_cli("run", job, "--metrics", tmp_path / "nowhere" / "run.prom")
    assert done.returncode == 0
    warned = [json.loads(line) for line in done.stderr.splitlines() if '"warning"' in line]
    assert [each["warning"] for each in warned] == [
        f"the metrics could not be kept ({os.strerror(2)})"
    ]
    # neither hides what a run fails with
    for place in (tmp_path, ""):
        done = call_cli("run", tmp_path / "none.yaml", "--metrics", place)
        assert done.returncode == 64
        assert sum("none.yaml" in line for line in done.stderr.splitlines()) == 1


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_that_another_user_has_put_there_is_opened(kind, tmp_path):
    target, place = tmp_path / "precious", tmp_path / f".run.prom.{os.getpid()}.tmp"
    target.write_text("kept")
    place.symlink_to(target) if kind == "link" else os.mkfifo(place)
    metrics = Metrics(str(tmp_path / "run.prom"))
    metrics.close(0)
    assert target.read_text() == "kept"
    assert "dpdask_run_exit_code 0.0" in (tmp_path / "run.prom").read_text()


def test_a_file_in_the_way_that_cannot_be_removed_is_a_warning(tmp_path):
    """As that of another user in a folder of all users, which root could remove: so a folder."""
    (tmp_path / "run.prom").mkdir()
    metrics = Metrics(str(tmp_path / "run.prom"))
    metrics.close(0)
    assert metrics.fault == "Is a directory"


def test_a_port_of_this_machine_tells_the_state_until_the_run_ends(tmp_path, source):
    port = free_port()
    job = write_job(tmp_path, source, tmp_path / "out", schema=RATINGS_SCHEMA)
    seen = []
    with subprocess.Popen(
        command("run", job, "--metrics", port),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        for _ in driver.stderr:
            if driver.poll() is None and not seen:
                assert listeners(port) == ["127.0.0.1"]
                with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                    assert page.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                    seen.append(parse(page.read().decode()))
        assert driver.wait(100) == 0
    [found] = seen
    assert found["run_running",] == 1
    assert ("run_exit_code",) not in found
    assert found["run_updated_timestamp_seconds",] <= time.time()
    assert listeners(port) == []
    assert not (tmp_path / str(port)).exists()


def test_a_page_has_the_newest_numbers_and_there_is_no_other_one():
    port = free_port()
    served = Metrics(f"localhost:{port}")
    try:
        served.show(StageShown("count", total=4, done=1, rows=1000))
        for done in (1, 3):
            served.show(StageShown("count", total=4, done=done, rows=1000))
            with urlopen(f"http://127.0.0.1:{port}/metrics?x=1") as page:
                assert parse(page.read().decode())["run_stage_rows", "count"] == 250 * done
        for path in ("", "/", "/metrics/", "/etc/passwd", "/../metrics"):
            with pytest.raises(HTTPError, match="404"):
                urlopen(f"http://127.0.0.1:{port}{path}")
        # a reader that goes away, and one that says nothing, disturb nobody
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(b"GET /metrics HTTP/1.0\r\n")
        with (
            socket.create_connection(("127.0.0.1", port)),
            urlopen(f"http://127.0.0.1:{port}/metrics") as page,
        ):
            assert page.status == 200
    finally:
        served.close(0)
    assert listeners(port) == []


@pytest.mark.parametrize(
    ("place", "listens"),
    [("{}", "127.0.0.1"), ("0.0.0.0:{}", "0.0.0.0"), ("[::1]:{}", "::1")],
)
def test_who_wants_another_address_names_it(place, listens):
    port = free_port()
    served = Metrics(place.format(port))
    assert listeners(port) == [listens]
    served.close(0)
    assert (listeners(port), served.fault) == ([], "")


def test_a_port_that_cannot_be_had_is_a_warning(tmp_path, source):
    job = write_job(tmp_path, source, tmp_path / "out", schema=RATINGS_SCHEMA)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = call_cli("run", job, "--metrics", port)
    assert done.returncode == 0
    assert f"the metrics could not be kept ({os.strerror(errno.EADDRINUSE)})" in done.stderr
    for place in ("99999", "no.such.host.invalid:9100"):
        served = Metrics(place)
        served.close(0)
        assert served.fault


def test_private_numbers_of_rows_are_at_no_port():
    """What the page tells is what the file tells: one function makes both."""
    port = free_port()
    served = Metrics(str(port))
    served.show(StageShown("count", total=4, done=1, rows=None))
    with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        found = parse(page.read().decode())
    served.close(0)
    assert found["run_stage_done_ratio", "count"] == 0.25
    assert not [key for key in found if key[0] == "run_stage_rows"]
