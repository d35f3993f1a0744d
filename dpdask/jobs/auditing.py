"""The audit of a job: ε* of every channel, exactly, and what the central noise shows, beside what is claimed; no row is read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from dpdask.codec import LevelCodec
from dpdask.engine.work import TableWork, table_work
from dpdask.errors import InputError
from dpdask.io.fragments import discover
from dpdask.io.manifest import CARD_NAME, Manifest
from dpdask.io.storage import Folder
from dpdask.jobs.spec import Job
from dpdask.kernels.channel import TOTAL_BITS
from dpdask.mechanisms import RankMechanism, fit_dip
from dpdask.mechanisms.dip import ColumnMechanism
from dpdask.privacy.audit import audit_event, channel_epsilon, rank_epsilon
from dpdask.privacy.events import DiscreteLaplace
from dpdask.references import Distribution, Known, LevelDistribution, RankDistribution

N_KNOTS = 2**10
CONFIDENCE = 1 - 1e-6  # a false alarm in a million audits


def audit_job(job: Job, *, n_runs: int = 20_000) -> dict[str, Any]:
    """Return, for each column and each central measurement of a job, what is claimed and what is found.

    Parameters
    ----------
    job
        The job; its input's footers give the columns' types.
    n_runs
        Of each central measurement, on each of two neighbouring inputs.

    Returns
    -------
    `columns`: for each, `claimed` (its part of ε), `epsilon_exact` (ε* of the tables that are drawn from) and `reference`,
    which is the released channel where the job is released, the declared distribution, or a uniform one: ε* of a run is
    computed again, for its own reference, before anything is drawn. `measurements`: for each noisy histogram `claimed`
    and `lower_bound` (99.9999 % confidence). `sound`: whether nothing found is above its claim.

    Raises
    ------
    InputError, DataError
        If the input cannot be found, or does not fit the schema.
    """
    work = table_work(discover(job.input_url, job.schema).schema, job.schema, job.reference, Folder(job.output_url), job.file.privacy.unit_column)
    columns = _released(job) or _fitted(job, work)
    measurements = []
    for event in job.spending.events(job.file.privacy).events:
        if isinstance(event, DiscreteLaplace):
            found = audit_event(event, n_runs=n_runs, confidence=CONFIDENCE)
            measurements.append({"scale": event.scale, "sensitivity": event.sensitivity, "claimed": found.claimed, "lower_bound": found.lower_bound})
    sound = all(column["epsilon_exact"] <= column["claimed"] for column in columns.values())
    sound = sound and all(measurement["lower_bound"] <= measurement["claimed"] for measurement in measurements)
    return {"name": job.file.name, "columns": columns, "measurements": measurements, "sound": sound}


def _released(job: Job) -> dict[str, dict[str, Any]]:
    """Return the audit of a finished job's own channels, from its card; empty if it is not released, or has others."""
    output = Folder(job.output_url)
    manifest = Manifest.read(output)
    if manifest is None or manifest.job != job.digest:
        return {}
    try:
        card = json.loads(output.read(CARD_NAME))["columns"]
    except (ValueError, KeyError, InputError):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for name, claimed in job.spending.row.items():
        if "channel" not in card[name]:
            return {}
        weights = (np.array(card[name]["channel"]) * 2.0**TOTAL_BITS).astype(np.uint64)
        # the card's numbers have 53 bits: its ε* can differ from the drawn one's in the last places
        epsilon = min(channel_epsilon(weights), claimed) if channel_epsilon(weights) <= claimed * (1 + 1e-9) else channel_epsilon(weights)
        found[name] = {"claimed": claimed, "epsilon_exact": epsilon, "reference": "the released channel"}
    return found


def _fitted(job: Job, work: TableWork) -> dict[str, dict[str, Any]]:
    source = "the declared distribution" if isinstance(job.reference, Known) else "a uniform stand-in"
    references = {name: _stand_in(job, work, name) for name in work.codecs}
    fitted = fit_dip(references, work.codecs, job.spending.row, job.file.mechanism.channel, job.file.mechanism.cost)
    claims = job.spending.row
    return {name: {"claimed": claims[name], "epsilon_exact": _exact(found), "reference": source} for name, found in fitted.columns.items()}


def _exact(mechanism: ColumnMechanism) -> float:
    return rank_epsilon(mechanism.noise) if isinstance(mechanism, RankMechanism) else channel_epsilon(mechanism.channel.weights)


def _stand_in(job: Job, work: TableWork, name: str) -> Distribution:
    codec = work.codecs[name]
    if isinstance(job.reference, Known):
        return job.reference.distribution(codec)
    if isinstance(codec, LevelCodec):
        return LevelDistribution(np.full(codec.n_levels, 1.0 / codec.n_levels))
    low, high = codec.bounds or (0.0, float(N_KNOTS))
    return RankDistribution(np.linspace(low, high, N_KNOTS + 1), np.linspace(0.0, 1.0, N_KNOTS + 1), 0.0)
