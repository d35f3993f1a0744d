"""Distribution-invariant privatisation of columns of very many levels: releases, cards, plans, audits, and what is refused."""

import functools
import hashlib
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import load, read_card, run_here, schema_of, write_job
from numpy.random import default_rng
from scipy import stats

import dpdask
from dpdask import local
from dpdask.codec import LevelCodec
from dpdask.errors import SpecError
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.mechanisms.card import Card
from dpdask.mechanisms.dip.columns import DipRelease, LevelMechanism, WindowMechanism, fit_dip
from dpdask.page.pictures import describe_kept
from dpdask.references import LevelDistribution

N = 3_000
CODES = [f"c{place:04d}" for place in range(N)]
CODE = {"role": "privatise", "kind": "categorical", "levels": [*CODES, "other"], "other": "other"}


@functools.cache
def frame():
    shares = 1.0 / np.arange(1, N + 1) ** 0.9
    drawn = default_rng(1).choice(N, 40_000, p=shares / shares.sum())
    return pd.DataFrame({"code": pd.array(CODES, dtype="string").take(drawn)})


def dip(column=CODE, **given):
    parameters = {"epsilon": 3.0, "reference": dpdask.Public(), "channel": "optimal"}
    schema = schema_of({"code": {**CODE, **column}})
    return dpdask.DIP(schema, **{**parameters, "insecure_seed": 3, **given})


def test_a_release_keeps_the_distribution_and_as_many_rows_as_it_says():
    release = dip().fit(frame().iloc[::-1].reset_index(drop=True))
    shown = release.card["columns"]["code"]["window"]
    released = release.transform(frame())
    kept = int((released["code"] == frame()["code"]).sum())
    low, high = stats.binom.interval(1 - 1e-6, len(released), shown["kept"])
    assert low <= kept <= high
    assert 0.9 * shown["kept_at_most"] < shown["kept"] < shown["kept_at_most"]
    counts, others = (
        pd.Series(each["code"].to_numpy()).value_counts().reindex(CODES[:300], fill_value=0)
        for each in (frame(), released)
    )
    assert stats.chisquare(others, counts * others.sum() / counts.sum()).pvalue > 1e-6
    assert "channel" not in release.card["columns"]["code"]
    assert len(json.dumps(release.card)) < 400_000
    # values outside are the level `other`, which the reference lacks
    foreign = pd.DataFrame({"code": pd.array(["?"] * len(frame()), dtype="string")})
    drawn = release.transform(foreign, batch="foreign")["code"]
    assert "other" not in set(drawn)
    assert drawn.nunique() > 1_000


def _fit(shares, epsilon=1.0):
    levels = pa.array(range(len(shares)))
    codecs = {"code": LevelCodec(name="code", levels=levels, ordered=False)}
    return fit_dip({"code": LevelDistribution(shares)}, codecs, {"code": epsilon}, "optimal")


@pytest.mark.parametrize("n_seen", [1, 2, 90, 101, 2_500])
def test_any_reference_has_a_channel_of_its_epsilon(n_seen):
    shares = np.zeros(N)
    shares[default_rng(n_seen).permutation(N)[:n_seen]] = 1.0 / n_seen
    release = _fit(shares)
    assert isinstance(release.columns["code"], WindowMechanism)
    assert release.columns["code"].exact_epsilon <= 1.0
    again = DipRelease.from_bytes(release.to_bytes(), "release")
    assert again.to_bytes() == release.to_bytes()
    own, read = (each.columns["code"].channel.window for each in (release, again))
    assert all(np.array_equal(*pair) for pair in zip(own, read, strict=True))


@pytest.mark.parametrize(("n_seen", "kind"), [(100, LevelMechanism), (101, WindowMechanism)])
def test_the_program_is_solved_where_it_can_be(n_seen, kind):
    shares = np.zeros(200)
    shares[:n_seen] = 1.0 / n_seen
    assert isinstance(_fit(shares).columns["code"], kind)


def _job(folder, **changed):
    (folder / "in").mkdir()
    pq.write_table(pa.table({"code": frame()["code"].to_numpy()[:8_000]}), folder / "in/a.parquet")
    mechanism = {"kind": "dip", "reference": {"kind": "histogram"}, "channel": "optimal"}
    given = {"schema": {"code": CODE}, "mechanism": mechanism, **changed}
    return write_job(folder / "job", folder / "in", folder / "out", **given)


def test_a_job_says_what_stays_and_its_audit_reads_the_card(tmp_path):
    job = _job(tmp_path)
    said = " ".join(plan_job(load(job)).expectations)
    # of a level of 1 %: 0.01 / (0.01 + 0.99 exp(-3.6))
    assert "code: of 3,001 levels, one with 5 %, 1 %, 0.1 % of the rows stays in at most" in said
    assert "27 %" in said
    before = audit_job(load(job), n_runs=200)
    assert before["columns"]["code"]["reference"] == "a uniform stand-in"
    run_here(job)
    found = audit_job(load(job), n_runs=200)
    column = found["columns"]["code"]
    assert column["reference"] == "the released channel"
    assert found["sound"]
    assert 0.999 * column["claimed"] < column["epsilon_exact"] <= column["claimed"]
    card = read_card(tmp_path)
    [sentence], _ = describe_kept(Card.read(card, "card"))
    kept = card["columns"]["code"]["window"]["kept"]
    assert f"keeps its value in {100 * kept:.3g} % of the cases; no channel of this ε" in sentence
    # fewer draws apart from the value are told, and not sound
    card["columns"]["code"]["window"]["chance"] *= 0.99
    place, data = tmp_path / "out/_dpdask", json.dumps(card).encode()
    (place / "release.json").write_bytes(data)
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["card_sha256"] = hashlib.sha256(data).hexdigest()
    (place / "manifest.json").write_text(json.dumps(manifest))
    assert not audit_job(load(job), n_runs=200)["sound"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"channel": "laplace"}, "the channel laplace takes at most 2,048 levels"),
        ({"channel": "laplace-calibrated"}, "set `channel` to optimal"),
        ({"reference": dpdask.Chain(fraction=0.1)}, "takes at most 2,048 levels"),
        ({"reference": dpdask.Tree(), "delta": 1e-6}, "takes at most 2,048 levels"),
    ],
)
def test_what_needs_a_matrix_takes_fewer_levels(given, said):
    with pytest.raises(SpecError, match=said):
        dip(**given)


def test_a_schema_lists_at_most_so_many_levels():
    most = {"role": "privatise", "kind": "categorical", "levels": "1..32768"}
    assert len(schema_of({"x": most}).columns["x"].listed) == 32_768
    for changed, n in ({"levels": "1..32769"}, "32,768"), ({"kind": "discrete"}, "2,048"):
        with pytest.raises(SpecError, match=f"between 1 and {n} levels"):
            schema_of({"x": {**most, **changed}})


def test_devices_do_not_take_it():
    with pytest.raises(SpecError, match="too many levels for a file that a device reads"):
        local.export(dip().fit(frame()))


def test_two_columns_whose_pairs_are_listed_are_one_of_many_levels():
    pairs = [[place, place // 20] for place in range(400)]
    level = {"role": "privatise", "kind": "categorical"}
    declared = {
        "columns": {"code": {**level, "levels": "0..399"}, "group": {**level, "levels": "0..19"}},
        "rules": [{"columns": ["code", "group"], "allow": pairs}],
    }
    code = default_rng(2).integers(0, 20, (20_000, 2)).prod(axis=1)
    table = pd.DataFrame({"code": code, "group": code // 20})
    given = {"epsilon": 3.0, "reference": dpdask.Histogram(), "insecure_seed": 1}
    release = dpdask.DIP(dpdask.Schema.from_dict(declared), channel="optimal", **given).fit(table)
    released = release.transform(table)
    assert (released["group"] == released["code"] // 20).all()
    shown = release.card["columns"]["code x group"]["window"]
    kept = int((released["code"] == code).sum())
    low, high = stats.binom.interval(1 - 1e-6, len(code), shown["kept"])
    assert 0.97 * low < kept < 1.03 * high  # the reference is noisy
    assert 0.75 * shown["kept_at_most"] < shown["kept"]
