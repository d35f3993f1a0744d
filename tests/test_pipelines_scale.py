"""The script that measures many fragments: its exponent, its simulation, and on demand a small run."""

import json

import pytest

from pipelines.benchmarks import scale

pytestmark = pytest.mark.more


def run_of(n, driver, scheduler):
    return {
        "fragments": n,
        "driver_ms_each": driver,
        "scheduler_ms_each": scheduler,
        "milliseconds_each": driver + scheduler,
        "driver_mib": 300.0,
        "driver_kib_each": 2.0,
        "scheduler_mib": 200.0,
        "scheduler_kib_each": 0.0,
    }


def test_the_exponent_is_the_growth_of_the_costs():
    assert scale.find_exponent([run_of(1050, 1.0, 1.0), run_of(100_050, 1.0, 1.0)]) == 1.0
    assert scale.find_exponent([run_of(1050, 0.1, 0.1), run_of(100_050, 10.0, 10.0)]) == 2.0
    assert scale.find_exponent([run_of(1050, 1.0, 1.0)]) is None
    assert scale.find_exponent([run_of(80, 0.1, 0.0), run_of(120, 0.0, 0.0)]) is None


def test_the_simulation_waits_for_the_slowest():
    slow = scale.simulate(
        run_of(1000, 0.1, 2.0), n_fragments=20_000, n_workers=100, seconds_each=0.01
    )
    assert slow["others_wait_for"] == "scheduler"
    assert slow["hours"] == pytest.approx(slow["scheduler_hours"], rel=0.05)
    long = scale.simulate(
        run_of(1000, 0.1, 0.2), n_fragments=20_000, n_workers=100, seconds_each=1.0
    )
    assert long["others_wait_for"] == "workers"
    assert long["hours"] == pytest.approx(scale.PASSES * 20_000 / 100 / 3600, rel=0.05)
    assert long["share_of_time_that_workers_work"] > 0.95
    found = scale.extrapolate(run_of(1000, 1.0, 0.5))
    assert found is not None
    assert found["breaks_at_fragments"]["driver: more than an hour of CPU"] == 3_600_000
    assert scale.extrapolate(run_of(80, 0.1, 0.0)) is None


@pytest.mark.slow
def test_the_script_measures_a_small_table(tmp_path):
    files = f"--folder {tmp_path} --json {tmp_path}/out.json"
    scale.main(f"{files} --fragments 80 120 --workers 1".split())
    found = json.loads((tmp_path / "out.json").read_text())
    assert [run["fragments"] for run in found["runs"]] == [80, 120]
    assert all(run["shards"] >= run["fragments"] - 10 for run in found["runs"])
    assert set(found["met"]) == set(scale.BARS)
