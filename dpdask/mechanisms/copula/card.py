"""What a release card says about synthetic records of a copula."""

from __future__ import annotations

from dpdask.mechanisms.card import Section, noisy_counts_section
from dpdask.mechanisms.columns import describe_bins
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.mechanisms.marginals.card import tables_accounting
from dpdask.privacy import Budget


def copula_section(budget: Budget, fitted: FittedCopula, n_released: int | None) -> Section:
    """Return what the card says about synthetic records.

    Parameters
    ----------
    budget
        What was promised.
    fitted
        The copula.
    n_released
        How many records were released, or None before any are.

    Privacy
    -------
    Holds parameters, the public domain, and measures of the fit to noisy tables. Nothing exact; under add-remove the number of
    rows is the noisy tables' own estimate.
    """
    report, noisy = fitted.report, fitted.noisy
    mechanism = {
        "kind": "copula",
        "records": n_released,
        "bins": describe_bins(fitted.bins, fitted.cells()),
        "tree": _tree(fitted),
        "measured_again": [list(clique) for clique in noisy.chosen if len(clique) == 2],
        "three_way": [list(clique) for clique in noisy.chosen if len(clique) == 3],
        "latent_variables": report.n_latents,
        "raked_tables": 0 if fitted.model.targets is None else len(fitted.model.targets.tables),
        "significant_share": report.kept_share,
        "nearest_correlation": {"rms_distance": report.moved, "iterations": report.n_iterations, "residual": report.residual},
    }
    accounting = tables_accounting(noisy, budget)
    return noisy_counts_section(
        budget=budget, mechanism=mechanism, schema=fitted.schema, cells=fitted.cells(), accounting=accounting, n_rows=noisy.n_rows
    )


def _tree(fitted: FittedCopula) -> list[list[str | None]]:
    """Return [attribute, parent] for each attribute, in the order of decoding."""
    names, nodes = fitted.model.domain.names, fitted.model.nodes
    return [[names[node.attribute], names[nodes[node.parent].attribute] if node.parent >= 0 else None] for node in nodes]
