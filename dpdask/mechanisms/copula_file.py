"""A fitted copula as bytes, with all that sampling elsewhere needs: no row, no exact count, no key; safe to publish."""

from __future__ import annotations

import datetime as dt
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dpdask.cells import DEFAULT_BINS, Cells, cells
from dpdask.codec import codec_for
from dpdask.errors import InputError
from dpdask.mechanisms.copula import CopulaModel, Node
from dpdask.mechanisms.copula_fit import FitReport
from dpdask.mechanisms.marginals import NoisyMarginals
from dpdask.mechanisms.marginals_file import UNREADABLE, noisy_from_arrays, noisy_to_arrays
from dpdask.schema import Schema

COPULA_FORMAT = 1
_DATE = "date of a level"

Bins = Mapping[str, int | Sequence[float]]


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
        found = {}
        for name in self.model.domain.names:
            codec = codec_for(name, self.schema.columns[name], self.types.field(name).type)
            found[name] = cells(codec, self.bins.get(name, 1))
        return found


def bins_by_column(bins: int | Bins, cells: Mapping[str, Cells]) -> dict[str, int | Sequence[float]]:
    """Return how each continuous or mixed column is cut, where `bins` may be one number for all."""
    usual = bins if isinstance(bins, int) else DEFAULT_BINS
    given = {} if isinstance(bins, int) else bins
    return {name: given.get(name, usual) for name, column in cells.items() if len(column.edges)}


def copula_to_bytes(fitted: FittedCopula) -> bytes:
    """Return a fitted copula as bytes: the same copula, the same bytes."""
    model = fitted.model
    header = {
        "format": COPULA_FORMAT,
        "bins": {name: bins if isinstance(bins, int) else list(bins) for name, bins in fitted.bins.items()},
        "schema": fitted.schema.model_dump(exclude_none=True),
        "report": asdict(fitted.report),
    }
    arrays: dict[str, Any] = {
        "header": np.frombuffer(json.dumps(header, default=_tagged).encode(), dtype=np.uint8),
        "types": np.frombuffer(fitted.types.serialize().to_pybytes(), dtype=np.uint8),
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
    header = json.loads(arrays["header"].tobytes(), object_hook=_untagged)
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
        schema=Schema.from_dict(header["schema"]),
        types=pa.ipc.read_schema(pa.py_buffer(arrays["types"].tobytes())),
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


def _tagged(value: object) -> dict[str, str]:
    """Return a date, which JSON does not have, as a mapping that `_untagged` knows."""
    if not isinstance(value, dt.date):
        raise TypeError(type(value).__name__)
    return {_DATE: value.isoformat()}


def _untagged(value: dict[str, Any]) -> object:
    return dt.date.fromisoformat(value[_DATE]) if set(value) == {_DATE} else value


def _joined(parts: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate([np.empty(0, dtype=dtype), *(part.ravel() for part in parts)])
