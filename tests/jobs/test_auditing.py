"""The audit of a job: every channel is sound, and one that is too weak is said to be."""

import functools
import hashlib
import json
import math

import numpy as np
import pytest
from e2e.helpers import HOLDOUT, KNOWN, MIXED_SCHEMA, lake, load, read_card, run_here, write_job

from dpdask.channels import laplace
from dpdask.jobs.plan import audit_job
from dpdask.kernels.channel import exact_epsilon
from dpdask.mechanisms import mechanism as auditing
from dpdask.mechanisms.dip import columns
from dpdask.mechanisms.dip.columns import fit_dip
from dpdask.privacy import audit, noise
from dpdask.streams import RunKey, stream

CHANNELS = ["laplace", "laplace-calibrated", "optimal"]
HISTOGRAM = {"kind": "histogram", "bins": 32}
SCHEMA = {name: MIXED_SCHEMA[name] for name in ("userId", "rating", "genre", "price", "amount")}
KNOWN_HERE = {
    "kind": "known",
    "columns": {name: KNOWN["columns"][name] for name in ("rating", "genre", "price", "amount")},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("source") / "in", [400, 300], schema=SCHEMA)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    """A bound at 99.9 % is wrong once in a thousand audits: not in these."""
    rng = stream(RunKey.insecure(5), "audit", "")
    monkeypatch.setattr(auditing, "audit_event", functools.partial(audit.audit_event, rng=rng))


def job(folder, source, **changed):
    return write_job(folder / "job", source, folder / "out", **{"schema": SCHEMA, **changed})


@pytest.mark.few
@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize(
    "reference", [HOLDOUT, KNOWN_HERE, HISTOGRAM], ids=lambda reference: reference["kind"]
)
def test_every_channel_is_sound_before_a_run(channel, reference, source, tmp_path):
    loaded = load(job(tmp_path, source, mechanism__channel=channel, mechanism__reference=reference))
    found = audit_job(loaded, n_runs=4000)
    assert found["sound"] is True
    assert {
        name: column["claimed"] for name, column in found["columns"].items()
    } == loaded.mechanism.spending.row
    for column in found["columns"].values():
        assert 0 < column["epsilon_exact"] <= column["claimed"]
        assert column["reference"] == (
            "the declared distribution" if reference is KNOWN_HERE else "a uniform stand-in"
        )
    if channel != "laplace":
        assert all(
            column["epsilon_exact"] > 0.9 * column["claimed"]
            for name, column in found["columns"].items()
            if name in ("rating", "genre")
        )
    assert len(found["measurements"]) == (4 if reference is HISTOGRAM else 0)
    for one in found["measurements"]:
        assert (
            0 <= one["lower_bound"] <= one["claimed"] <= 0.1
        )  # so small an ε shows little in so few runs
        assert one["sensitivity"] == 2
    json.dumps(found)


@pytest.mark.few(1)
@pytest.mark.parametrize("channel", CHANNELS)
def test_a_released_jobs_own_channels_are_audited(channel, source, tmp_path):
    schema = {name: SCHEMA[name] for name in ("userId", "rating", "genre")} | {
        name: {"role": "drop"} for name in ("price", "amount")
    }
    made = job(tmp_path, source, mechanism__channel=channel, schema=schema)
    assert {column["reference"] for column in audit_job(load(made))["columns"].values()} == {
        "a uniform stand-in"
    }
    run_here(made)
    card = read_card(tmp_path)
    found = audit_job(load(made))
    assert found["sound"] is True
    for name, column in found["columns"].items():
        assert column["reference"] == "the released channel"
        assert math.isclose(
            column["epsilon_exact"], card["columns"][name]["epsilon_exact"], rel_tol=1e-6
        )
    other = audit_job(load(made, privacy__epsilon=2))  # another job: its channels are not these
    assert {column["reference"] for column in other["columns"].values()} == {"a uniform stand-in"}


def test_a_released_channel_that_is_too_weak_is_not_sound(source, tmp_path):
    schema = {name: SCHEMA[name] for name in ("userId", "rating", "genre")} | {
        name: {"role": "drop"} for name in ("price", "amount")
    }
    made = job(tmp_path, source, mechanism__channel="optimal", schema=schema)
    run_here(made)
    path = tmp_path / "out" / "_dpdask" / "release.json"
    card = json.loads(path.read_text())
    T = np.array(card["columns"]["rating"]["channel"])
    card["columns"]["rating"]["channel"] = (0.999 * T + 0.001 * np.eye(len(T))).tolist()
    path.write_text(json.dumps(card))
    absent = audit_job(
        load(made)
    )  # the manifest lists another card, so this one is not the release's
    assert {column["reference"] for column in absent["columns"].values()} == {"a uniform stand-in"}
    manifest = path.parent / "manifest.json"
    manifest.write_text(
        json.dumps(
            {
                **json.loads(manifest.read_text()),
                "card_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
        )
    )
    found = audit_job(load(made))
    assert found["sound"] is False
    assert found["columns"]["rating"]["epsilon_exact"] > found["columns"]["rating"]["claimed"]
    assert found["columns"]["genre"]["epsilon_exact"] <= found["columns"]["genre"]["claimed"]


@pytest.mark.few(1)
@pytest.mark.parametrize("channel", CHANNELS)
def test_a_fit_that_spends_more_than_its_part_is_not_sound(channel, source, tmp_path, monkeypatch):
    def generous(references, codecs, epsilons, *rest):
        return fit_dip(
            references, codecs, {name: 3 * epsilon for name, epsilon in epsilons.items()}, *rest
        )

    monkeypatch.setattr(columns, "fit_dip", generous)
    found = audit_job(load(job(tmp_path, source, mechanism__channel=channel)))
    assert found["sound"] is False
    assert all(column["epsilon_exact"] > column["claimed"] for column in found["columns"].values())


def test_a_fit_that_only_says_less_than_it_spends_is_not_sound(source, tmp_path, monkeypatch):
    """What a channel says of itself is not asked: ε* comes from the weights that are drawn from."""

    def lying(references, codecs, epsilons, *rest):
        fitted = fit_dip(
            references, codecs, {name: 3 * epsilon for name, epsilon in epsilons.items()}, *rest
        )
        for name in ("rating", "genre"):
            object.__setattr__(fitted.columns[name].channel, "epsilon", 0.01)  # type: ignore[union-attr]  # levels have one
        return fitted

    monkeypatch.setattr(columns, "fit_dip", lying)
    found = audit_job(load(job(tmp_path, source)))
    assert found["sound"] is False
    weights = laplace(
        np.full(10, 0.1), 3 * found["columns"]["rating"]["claimed"], ordered=True
    ).weights
    assert math.isclose(
        found["columns"]["rating"]["epsilon_exact"], float(exact_epsilon(weights)), rel_tol=1e-12
    )


@pytest.mark.parametrize(("factor", "sound"), [(1.0, True), (0.25, False)])
def test_noise_that_is_too_small_is_not_sound(factor, sound, source, tmp_path, monkeypatch):
    def small(counts, event, **rest):
        return noise.discrete_laplace(counts, event.scale * factor, **rest)

    monkeypatch.setattr(audit, "perturb", small)
    made = job(
        tmp_path,
        source,
        mechanism__reference=HISTOGRAM,
        privacy__epsilon=40.0,
        mechanism__channel="optimal",
    )
    found = audit_job(load(made))
    assert found["sound"] is sound
    assert any(one["lower_bound"] > one["claimed"] for one in found["measurements"]) is not sound
    assert all(one["lower_bound"] > 0.5 * one["claimed"] for one in found["measurements"])


def test_an_audit_reads_no_row(source, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "dpdask.io.fragments.read_batches", lambda *_: pytest.fail("rows were read")
    )
    monkeypatch.setattr(
        "dpdask.engine.source.read_batches", lambda *_: pytest.fail("rows were read")
    )
    audit_job(load(job(tmp_path, source)))
    assert not (tmp_path / "out").exists()
