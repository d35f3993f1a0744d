"""What a release card says about noisy tables."""

from __future__ import annotations

from typing import Any

from dpdask.mechanisms.card import Section, noisy_counts_section
from dpdask.mechanisms.marginals.noise import NoisyMarginals
from dpdask.mechanisms.marginals.plan import compute_spent, margin_95
from dpdask.mechanisms.marginals.release import MarginalTables
from dpdask.privacy import Budget
from dpdask.privacy.events import CentralEvent, to_dict
from dpdask.privacy.noise import deviation


def marginals_section(budget: Budget, tables: MarginalTables) -> Section:
    """Return what the card says about noisy tables.

    Parameters
    ----------
    budget
        What was promised.
    tables
        The tables with their columns.

    Privacy
    -------
    Holds parameters and the public domain. Nothing exact; under add-remove the number of rows is the noisy tables' own
    estimate.
    """
    noisy = tables.noisy
    mechanism = {"kind": "marginals", "cliques": list(noisy.cliques)}
    accounting = tables_accounting(noisy, budget)
    return noisy_counts_section(
        budget=budget, mechanism=mechanism, schema=tables.schema, cells=tables.cells(), accounting=accounting, n_rows=noisy.n_rows
    )


def tables_accounting(noisy: NoisyMarginals, budget: Budget) -> dict[str, Any]:
    """Return what noisy tables cost, and how far their counts may be off.

    Parameters
    ----------
    noisy
        The tables.
    budget
        What was promised.
    """
    noise = noisy.noise
    named: dict[str, CentralEvent | None] = {"fine_counts": noise.cells, "one_way": noise.one_way, "two_way": noise.pairs}
    named |= {"measured_again": noise.chosen, "three_way": noise.triples}
    named |= {" x ".join(clique): event for clique, event in noise.cliques.items()}
    return {
        "composition": "the smallest of three upper bounds (a sum, concentrated privacy, a privacy loss distribution), over all tables",
        "epsilon_exact": compute_spent(noise, budget),
        "noise": {key: {"standard_deviation": deviation(event), "margin_95": margin_95(event)} for key, event in named.items() if event is not None},
        "events": to_dict(noise.event),
    }
