"""A fitted copula as bytes, with all that sampling elsewhere needs: no row, no exact count, no key; safe to publish."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dpdask.cells import Cells
from dpdask.errors import InputError
from dpdask.mechanisms.columns import Bins, header_from_arrays, header_to_arrays, released_cells
from dpdask.mechanisms.copula.fit import FitReport
from dpdask.mechanisms.copula.model import CopulaModel, Node
from dpdask.mechanisms.marginals.archive import UNREADABLE, noisy_from_arrays, noisy_to_arrays
from dpdask.mechanisms.marginals.noise import NoisyMarginals
from dpdask.schema import Schema

COPULA_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedCopula:
    """A copula with the noisy tables that it was fitted to, and the columns that its codes stand for.

    Attributes
    ----------
    schema
        The declared columns.
    types
        The Arrow types of the released columns.
    bins
        How each continuous or mixed column is cut.
    noisy
        The noisy tables.
    model
        What is sampled from.
    report
        What the fit met.
    """

    schema: Schema
    types: pa.Schema
    bins: Bins
    noisy: NoisyMarginals
    model: CopulaModel
    report: FitReport

    def cells(self) -> dict[str, Cells]:
        """Return the public cells of each released column, in the order of the domain."""
        return released_cells(self.model.domain.names, self.schema, self.types, self.bins)

    def n_drawn(self, wanted: int | None) -> int:
        """Return how many records to draw: the number asked for, or by default the number from the tables, at least 1."""
        return max(1, round(self.model.n_rows)) if wanted is None else wanted


def copula_to_bytes(fitted: FittedCopula) -> bytes:
    """Return a fitted copula as bytes: the same copula, the same bytes."""
    model = fitted.model
    header = {"format": COPULA_FORMAT, "report": asdict(fitted.report)}
    arrays: dict[str, Any] = {
        **header_to_arrays(header, fitted.schema, fitted.types, fitted.bins),
        **noisy_to_arrays(fitted.noisy),
        "factor": model.factor[np.tril_indices(model.n_latents)],
        "nodes": np.array([[node.attribute, node.parent, node.first, *node.probabilities.shape] for node in model.nodes], dtype=np.int64),
        "levels": _joined([node.levels for node in model.nodes], np.uint16),
        "probabilities": _joined([node.probabilities for node in model.nodes], np.float64),
        "offsets": _joined([node.offsets for node in model.nodes], np.float32),
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def copula_from_bytes(data: bytes, where: str | None = None) -> FittedCopula:
    """Return the fitted copula that bytes hold.

    Parameters
    ----------
    data
        From `copula_to_bytes`.
    where
        Where they come from, for the message.

    Raises
    ------
    InputError
        If they are something else, or of another format.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return _read({name: arrays[name] for name in arrays.files})
    except (*UNREADABLE, pa.ArrowException):
        raise InputError("this is no fitted copula of this version", where, "save it again with `.save`") from None


def _read(arrays: Mapping[str, Any]) -> FittedCopula:
    header, schema, types = header_from_arrays(arrays)
    if header["format"] != COPULA_FORMAT:
        raise ValueError("another format")
    noisy = noisy_from_arrays(arrays)
    n_latents = int(np.sqrt(2 * len(arrays["factor"])))
    factor = np.zeros((n_latents, n_latents), dtype=np.float32)
    factor[np.tril_indices(n_latents)] = arrays["factor"]
    model = CopulaModel(domain=noisy.domain, n_rows=noisy.n_rows, nodes=_nodes(arrays), factor=factor)
    if model.nodes[-1].first + model.nodes[-1].n_latents != n_latents:
        raise ValueError("the factor is of another model")
    return FittedCopula(
        schema=schema,
        types=types,
        bins=header["bins"],
        noisy=noisy,
        model=model,
        report=FitReport(**header["report"]),
    )


def _nodes(arrays: Mapping[str, Any]) -> tuple[Node, ...]:
    nodes = []
    level = cell = 0
    for attribute, parent, first, n_groups, n_levels in arrays["nodes"].tolist():
        end = cell + n_groups * n_levels
        nodes.append(
            Node(
                attribute=attribute,
                parent=parent,
                levels=arrays["levels"][level : level + n_levels],
                first=first,
                probabilities=arrays["probabilities"][cell:end].reshape(n_groups, n_levels),
                offsets=arrays["offsets"][cell:end].reshape(n_groups, n_levels),
            )
        )
        level, cell = level + n_levels, end
    return tuple(nodes)


def _joined(parts: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate([np.empty(0, dtype=dtype), *(part.ravel() for part in parts)])
