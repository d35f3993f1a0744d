"""The audit of a mechanism: the exact ε* of every channel and what the noise on counts shows, beside what is claimed; no row is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpdask.mechanisms.mechanism import WHOLE_ROW, Columns, Mechanism
from dpdask.privacy.audit import audit_event
from dpdask.privacy.events import CentralEvent, DiscreteLaplace, LocalRelease, leaves

CONFIDENCE = 1 - 1e-6  # a false alarm in a million audits


def audit_mechanism(mechanism: Mechanism, columns: Columns, card: Mapping[str, Any] | None, *, n_runs: int = 20_000) -> dict[str, Any]:
    """Return, for each column and each central measurement, what is claimed and what is found.

    Parameters
    ----------
    mechanism
        What is audited.
    columns
        The table's columns.
    card
        The release card, if there is one.
    n_runs
        How often each central measurement is drawn, on each of two neighbouring inputs.

    Returns
    -------
    `columns`: for each that is released row by row, `claimed` (its part of ε), `epsilon_exact` (ε* of the tables that are
    drawn from) and `reference`, which is the released channel where the release is finished, the declared distribution, or a
    stand-in: ε* of a run is computed again, for its own reference, before anything is drawn. `row`: the same of a whole
    row, where that is less than the sum of its columns', or None. `measurements`: for each noisy histogram its `scale` or
    `sigma`, `sensitivity`, `claimed` and `lower_bound` (99.9999 % confidence). `sound`: whether nothing found is above its
    claim.
    """
    found = mechanism.audit(columns, card)
    delta = 0.0 if mechanism.budget is None else mechanism.budget.delta
    measurements = [_audit(event, delta, n_runs) for event in leaves(mechanism.event) if not isinstance(event, LocalRelease)]
    sound = all(part["epsilon_exact"] <= part["claimed"] for part in found.values())
    row = found.pop(WHOLE_ROW, None)
    sound = sound and all(measurement["lower_bound"] <= measurement["claimed"] for measurement in measurements)
    return {"columns": found, "row": row, "measurements": measurements, "sound": sound}


def _audit(event: CentralEvent, delta: float, n_runs: int) -> dict[str, Any]:
    found = audit_event(event, delta=delta, n_runs=n_runs, confidence=CONFIDENCE)
    noise = {"scale": event.scale} if isinstance(event, DiscreteLaplace) else {"sigma": event.sigma}
    return {**noise, "sensitivity": event.sensitivity, "claimed": found.claimed, "lower_bound": found.lower_bound}
