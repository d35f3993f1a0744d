"""What a release card says of a release along a tree: its columns, its edges, and what everything cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpdask.kernels.channel import TOTAL_BITS
from dpdask.mechanisms.dip.tree import TreeRelease
from dpdask.mechanisms.dip.tree_spending import TreeSpending
from dpdask.privacy import Budget
from dpdask.privacy.events import to_dict
from dpdask.references.tree import Tree

MAX_SHOWN = 2**17  # probabilities: some megabytes of card


def tree_mechanism(release: TreeRelease) -> dict[str, Any]:
    """Return what the card's `mechanism` says of the joint law: what of it is kept, and the edges (parent, column)."""
    return {"columns": "tree", "joint": Tree.joint, "edges": [list(edge) for edge in release.edges]}


def tree_columns(release: TreeRelease, epsilons: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return for each privatised column its parent, its part of ε, its exact ε*, its cells and its channels.

    Parameters
    ----------
    release
        What was fitted.
    epsilons
        Each column's part of a row's ε.

    Returns
    -------
    `cells` is how many a value may fall in, `cell_edges` where the line is cut (absent for levels). `channel_as_asked` is the
    share of rows whose channel is of the kind asked for; a rare parent's may be calibrated Laplace. `channels[b][k][j]` is
    the probability of output j where the parent was released as b and the own cell is k; absent where all columns'
    together are more than `MAX_SHOWN` numbers.
    """
    shown = sum(column.weights.size for column in release.columns.values()) <= MAX_SHOWN
    found: dict[str, dict[str, Any]] = {}
    for name, column in release.columns.items():
        found[name] = {
            "parent": column.parent,
            "epsilon": epsilons[name],
            "epsilon_exact": column.epsilon,
            "cells": column.n_levels,
            "channel_as_asked": column.solved,
        }
        found[name] |= {"cell_edges": column.edges.tolist()} if column.edges.size else {}
        found[name] |= {"channels": (column.weights * 2.0**-TOTAL_BITS).tolist()} if shown else {}
    return found


def tree_accounting(budget: Budget, spending: TreeSpending, release: TreeRelease) -> dict[str, Any]:
    """Return what was spent: never more than was promised."""
    return {
        "composition": "noisy tables of all rows, and the rows of a unit; a row's ε* is the worst over all released rows",
        "epsilon_exact": spending.exact(budget, release.epsilon),
        "epsilon_tables": spending.tables,
        "epsilon_row_exact": release.epsilon,
        "rows_per_unit": spending.rows_per_unit,
        "events": to_dict(spending.events(budget)),
    }
