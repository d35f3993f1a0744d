"""The release card of a perturbed histogram; safe to publish."""

from __future__ import annotations

from typing import Any

from dpdask.mechanisms.columns import plain_bins
from dpdask.mechanisms.histogram.noise import spent
from dpdask.mechanisms.histogram.release import FittedHistogram
from dpdask.mechanisms.marginals.card import central_card
from dpdask.mechanisms.marginals.noise import deviation, margin_95
from dpdask.privacy import Budget
from dpdask.privacy.events import CentralEvent, DiscreteLaplace, to_dict
from dpdask.stats.joint import n_cells


def histogram_card(
    *, name: str, budget: Budget, guarantee: str, fitted: FittedHistogram, output: str | None, n_records: int | None, insecure: bool
) -> bytes:
    """Return the card of a perturbed histogram as canonical JSON: the same release, the same bytes.

    Parameters
    ----------
    name
        The job's name.
    budget, guarantee
        What was promised, in numbers and in words.
    fitted
        The histogram.
    output
        What was released: `cells`, `rows`, or None before either is.
    n_records
        How many synthetic rows were released, or None.
    insecure
        Whether the noise came from a seed.

    Privacy
    -------
    Holds parameters, the public domain, and sums of released weights. The number of rows is exact under replace-one; under
    add-remove it is the noisy one, or null where none was measured.
    """
    histogram = fitted.histogram
    planned = histogram.plan
    mechanism = {
        "kind": "histogram",
        "output": output,
        "records": n_records,
        "points": None if output == "rows" else fitted.points,
        "bins": plain_bins(fitted.bins),
        "threshold": planned.threshold,
        "factor": planned.factor if planned.threshold == "enhanced" else None,
        "cut": histogram.cut,
        "cells": n_cells(histogram.domain),
        "cells_listed": len(histogram.keys),
        "total_weight": histogram.total,
    }
    noises = {"cells": planned.cells, "n_rows": planned.total}
    accounting = {
        "composition": "the least of a sum, a concentrated bound and a privacy loss distribution, over all counts",
        "epsilon_exact": spent(planned, budget),
        "noise": {key: _noise(event) for key, event in noises.items() if event is not None},
        "events": to_dict(planned.event),
    }
    n_rows = {"value": histogram.n_rows, "exact": budget.adjacency == "replace-one"}
    return central_card(name, budget, guarantee, mechanism, fitted.schema, fitted.cells(), accounting, n_rows, insecure=insecure)


def _noise(event: CentralEvent) -> dict[str, Any]:
    law = (
        {"law": "discrete Laplace", "scale": event.scale}
        if isinstance(event, DiscreteLaplace)
        else {"law": "discrete Gaussian", "sigma": event.sigma}
    )
    return {**law, "standard_deviation": deviation(event), "margin_95": margin_95(event)}
