"""The release cards of mechanisms that release noisy statistics, or what is computed from them; safe to publish."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from dpdask.cells import Cells
from dpdask.codec import LevelCodec
from dpdask.mechanisms.columns import plain_bins
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.mechanisms.marginals.noise import NoisyMarginals, deviation, margin_95, spent
from dpdask.privacy import Budget, cautions
from dpdask.privacy.events import CentralEvent, to_dict
from dpdask.schema import Schema
from dpdask.streams import STREAM_FORMAT
from dpdask.version import __version__

CARD_FORMAT = 1
_LIBRARIES = ("numpy", "opendp", "pyarrow", "randomgen", "scipy")


def copula_card(*, name: str, budget: Budget, guarantee: str, fitted: FittedCopula, n_records: int | None, insecure: bool) -> bytes:
    """Return the card of synthetic records as canonical JSON: the same release, the same bytes.

    Parameters
    ----------
    name
        The job's name.
    budget, guarantee
        What was promised, in numbers and in words.
    fitted
        The copula.
    n_records
        How many records were released, or None before any are.
    insecure
        Whether the noise came from a seed.

    Privacy
    -------
    Holds parameters, the public domain, and what the fit met on noisy tables. Nothing exact; under add-remove the number of
    rows is the noisy tables' own estimate.
    """
    report = fitted.report
    mechanism = {
        "kind": "copula",
        "records": n_records,
        "bins": plain_bins(fitted.bins),
        "tree": _tree(fitted),
        "latent_variables": report.n_latents,
        "significant_share": report.kept_share,
        "nearest_correlation": {"rms_distance": report.moved, "iterations": report.n_iterations, "residual": report.residual},
    }
    return _card(name, budget, guarantee, mechanism, fitted.schema, fitted.cells(), fitted.noisy, insecure=insecure)


def marginals_card(
    *, name: str, budget: Budget, guarantee: str, noisy: NoisyMarginals, schema: Schema, cells: Mapping[str, Cells], insecure: bool
) -> bytes:
    """Return the card of noisy tables; parameters as for `copula_card`."""
    mechanism = {"kind": "marginals", "cliques": [list(clique) for clique in noisy.cliques]}
    return _card(name, budget, guarantee, mechanism, schema, cells, noisy, insecure=insecure)


def _card(
    name: str,
    budget: Budget,
    guarantee: str,
    mechanism: Mapping[str, Any],
    schema: Schema,
    cells: Mapping[str, Cells],
    noisy: NoisyMarginals,
    *,
    insecure: bool,
) -> bytes:
    accounting = {
        "composition": "the least of a sum, a concentrated bound and a privacy loss distribution, over all tables",
        "epsilon_exact": spent(noisy.noise, budget),
        "noise": _noise(noisy),
        "events": to_dict(noisy.noise.event),
    }
    n_rows = {"value": noisy.n_rows, "exact": budget.adjacency == "replace-one"}
    return central_card(name, budget, guarantee, mechanism, schema, cells, accounting, n_rows, insecure=insecure)


def central_card(
    name: str,
    budget: Budget,
    guarantee: str,
    mechanism: Mapping[str, Any],
    schema: Schema,
    cells: Mapping[str, Cells],
    accounting: Mapping[str, Any],
    n_rows: Mapping[str, Any],
    *,
    insecure: bool,
) -> bytes:
    """Return the card of any release that comes from noisy counts of all rows, as canonical JSON.

    Parameters
    ----------
    name, budget, guarantee, insecure
        As for `copula_card`.
    mechanism, accounting, n_rows
        These parts of the card.
    schema, cells
        The declared columns, and the public cells of those that are counted.
    """
    warning = "INSECURE: the noise is reproducible from a seed, so this release protects nobody. " if insecure else ""
    card: dict[str, Any] = {
        "format": CARD_FORMAT,
        "name": name,
        "guarantee": {
            "text": warning + guarantee,
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "adjacency": budget.adjacency,
            "unit": budget.model_dump(mode="json")["unit"],
            "protected": {"who": "every row of the table", "fraction": 1.0, "of": "rows"},
            "unprotected": {"who": "nobody", "fraction": 0.0, "of": "rows"},
            "cautions": list(cautions(budget, n_rows["value"] if n_rows["exact"] else None)),
        },
        "mechanism": mechanism,
        "columns": {column: _column(schema, found) for column, found in cells.items()},
        "accounting": accounting,
        "n_rows": n_rows,
        "order": "what is released has no order of the input's",
        "insecure": insecure,
        "versions": {"dpdask": __version__, "streams": STREAM_FORMAT, **{library: version(library) for library in _LIBRARIES}},
    }
    return (json.dumps(card, indent=1, ensure_ascii=False) + "\n").encode()


def _tree(fitted: FittedCopula) -> list[list[str | None]]:
    """Return [attribute, parent] for each attribute, in the order of decoding."""
    names, nodes = fitted.model.domain.names, fitted.model.nodes
    return [[names[node.attribute], names[nodes[node.parent].attribute] if node.parent >= 0 else None] for node in nodes]


def _noise(noisy: NoisyMarginals) -> dict[str, Any]:
    noise = noisy.noise
    named: dict[str, CentralEvent | None] = {"one_way": noise.one_way, "two_way": noise.pairs}
    named |= {" x ".join(clique): event for clique, event in noise.cliques.items()}
    return {key: {"standard_deviation": deviation(event), "margin_95": margin_95(event)} for key, event in named.items() if event is not None}


def _column(schema: Schema, column: Cells) -> dict[str, Any]:
    declared = schema.columns[column.codec.name]
    common: dict[str, Any] = {"role": "privatised", "kind": declared.kind, "cells": column.size, "nulls": declared.nulls}
    common["outside"] = declared.outside_in_words
    if isinstance(column.codec, LevelCodec):
        return common | {"levels": [_plain(level) for level in column.codec.levels.to_pylist()]}
    return common | {"bounds": declared.bounds, "atoms": [_plain(atom) for atom in declared.atoms or ()], "edges": column.edges.tolist()}


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
