"""Jobs on a real Dask Gateway server: the same bytes as on threads; what it refuses is one line."""

import pytest
from connect.processes import python_path
from e2e.helpers import digests, error_line, lake, run_cli, run_here, write_job
from services import gateway


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    if gateway.why_not():
        pytest.skip(gateway.why_not())
    with gateway.running(tmp_path_factory.mktemp("gateway"), python_path()) as found:
        yield found


@pytest.mark.slow
def test_the_same_bytes(url, tmp_path):
    block = {"kind": "gateway", "address": url, "workers": 2}
    job = write_job(
        tmp_path / "job", lake(tmp_path / "in", [400] * 4), tmp_path / "out", cluster=block
    )
    ended = run_cli("run", job)
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stderr.splitlines() if not line.startswith("{")] == []
    run_here(job, output__path=tmp_path / "quiet", cluster="{kind: synchronous}")
    assert digests(tmp_path / "out") == digests(tmp_path / "quiet")


@pytest.mark.more
def test_what_the_gateway_refuses_is_one_line(url, tmp_path):
    source = lake(tmp_path / "in", [40])
    for change, code, says in (
        (
            {"options": {"no_such_option": 1}},
            64,
            "the gateway refuses the cluster; check cluster.options",
        ),
        ({"address": "http://127.0.0.1:1"}, 75, "http://127.0.0.1:1: the gateway does not answer"),
    ):
        block = {"kind": "gateway", "address": url, "workers": 1, **change}
        ended = run_cli("run", write_job(tmp_path / "job", source, tmp_path / "out", cluster=block))
        assert (ended.returncode, says in error_line(ended)) == (code, True), ended.stderr
