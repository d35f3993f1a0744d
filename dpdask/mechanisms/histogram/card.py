"""What a release card says about a perturbed histogram."""

from __future__ import annotations

from typing import Any

from dpdask.cells import FoundBins
from dpdask.mechanisms.card import Section, noisy_counts_section
from dpdask.mechanisms.columns import describe_bins
from dpdask.mechanisms.histogram.noise import compute_spent
from dpdask.mechanisms.histogram.release import FittedHistogram
from dpdask.mechanisms.marginals.plan import margin_95
from dpdask.privacy import Budget
from dpdask.privacy.events import DiscreteLaplace, to_dict
from dpdask.privacy.noise import deviation
from dpdask.stats.joint import n_cells


def histogram_section(budget: Budget, fitted: FittedHistogram, n_released: int | None) -> Section:
    """Return what the card says about a perturbed histogram.

    Parameters
    ----------
    budget
        What was promised.
    fitted
        The histogram.
    n_released
        How many cells or synthetic rows were released, or None before any are.

    Privacy
    -------
    Holds parameters, the public domain, and sums of released weights. The number of rows is exact under replace-one; under
    add-remove it is the noisy one, or null where none was measured.
    """
    histogram = fitted.histogram
    planned = histogram.plan
    output = None if n_released is None else fitted.output
    mechanism = {
        "kind": "histogram",
        "output": output,
        "records": n_released if output == "rows" else None,
        "points": None if output == "rows" else fitted.points,
        "bins": describe_bins(fitted.bins, fitted.cells()),
        "found": [name for name, bins in fitted.bins.items() if isinstance(bins, FoundBins)],
        "threshold": planned.threshold,
        "factor": planned.factor if planned.threshold == "enhanced" else None,
        "cut": histogram.cut,
        "cells": n_cells(histogram.domain),
        "cells_listed": len(histogram.keys),
        "total_weight": histogram.total,
    }
    noises = {"cells": planned.cells, "n_rows": planned.total, "fine_counts": planned.fine}
    accounting = {
        "composition": "the smallest of three upper bounds (a sum, concentrated privacy, a privacy loss distribution), over all counts",
        "epsilon_exact": compute_spent(planned, budget),
        "noise": {key: _noise(event) for key, event in noises.items() if event is not None},
        "events": to_dict(planned.event),
    }
    return noisy_counts_section(
        budget=budget, mechanism=mechanism, schema=fitted.schema, cells=fitted.cells(), accounting=accounting, n_rows=histogram.n_rows
    )


def _noise(event: DiscreteLaplace) -> dict[str, Any]:
    return {"law": "discrete Laplace", "scale": event.scale, "standard_deviation": deviation(event), "margin_95": margin_95(event)}
