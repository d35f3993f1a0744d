"""The audit of a job: ε* of every channel, exactly, and what the central noise shows, beside what is claimed; no row is read."""

from __future__ import annotations

import json
from typing import Any

from dpdask.errors import InputError
from dpdask.io.fragments import discover
from dpdask.io.manifest import CARD_NAME, Manifest
from dpdask.io.storage import Folder
from dpdask.jobs.kinds.kind import WHOLE_ROW
from dpdask.jobs.spec import Job
from dpdask.privacy.audit import audit_event
from dpdask.privacy.events import CentralEvent, DiscreteLaplace, LocalRelease, leaves

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
    `columns`: for each that is released row by row, `claimed` (its part of ε), `epsilon_exact` (ε* of the tables that are
    drawn from) and `reference`, which is the released channel where the job is released, the declared distribution, or a
    stand-in: ε* of a run is computed again, for its own reference, before anything is drawn. `row`: the same of a whole
    row, where that is less than the sum of its columns', or None. `measurements`: for each noisy histogram its `scale` or
    `sigma`, `sensitivity`, `claimed` and `lower_bound` (99.9999 % confidence). `sound`: whether nothing found is above its
    claim.

    Raises
    ------
    InputError, DataError
        If the input cannot be found, or does not fit the schema.
    """
    columns = job.kind.audit(discover(job.input_url, job.schema).schema, Folder(job.output_url), _card(job))
    measurements = [_measured(event, job, n_runs) for event in leaves(job.kind.event) if not isinstance(event, LocalRelease)]
    sound = all(part["epsilon_exact"] <= part["claimed"] for part in columns.values())
    row = columns.pop(WHOLE_ROW, None)
    sound = sound and all(measurement["lower_bound"] <= measurement["claimed"] for measurement in measurements)
    return {"name": job.file.name, "columns": columns, "row": row, "measurements": measurements, "sound": sound}


def _measured(event: CentralEvent, job: Job, n_runs: int) -> dict[str, Any]:
    delta = job.file.privacy.delta if job.file.privacy is not None else 0.0
    found = audit_event(event, delta=delta, n_runs=n_runs, confidence=CONFIDENCE)
    noise = {"scale": event.scale} if isinstance(event, DiscreteLaplace) else {"sigma": event.sigma}
    return {**noise, "sensitivity": event.sensitivity, "claimed": found.claimed, "lower_bound": found.lower_bound}


def _card(job: Job) -> dict[str, Any] | None:
    """Return the card of a finished job's own release, or None."""
    output = Folder(job.output_url)
    manifest = Manifest.read(output)
    if manifest is None or manifest.job != job.digest:
        return None
    try:
        card = json.loads(output.read(CARD_NAME))
    except (ValueError, InputError):
        return None
    return card if isinstance(card, dict) else None
