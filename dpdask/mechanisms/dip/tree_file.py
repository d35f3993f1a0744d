"""A fitted release along a tree as bytes: whole-number channels, so that every worker draws from the very same law."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from dpdask.errors import InputError
from dpdask.kernels import channel as channel_kernel
from dpdask.mechanisms.dip.tree import TreeColumn, TreeRelease
from dpdask.mechanisms.marginals.archive import UNREADABLE

TREE_FORMAT = 1
KIND = "tree"


def tree_to_bytes(release: TreeRelease) -> bytes:
    """Return a release as bytes: the same release, the same bytes.

    Privacy
    -------
    A function of noisy tables, which paid for themselves: safe to publish, unlike the run key beside it.
    """
    header: dict[str, Any] = {"format": TREE_FORMAT, "kind": KIND, "columns": []}
    arrays: dict[str, Any] = {}
    for index, (name, column) in enumerate(release.columns.items()):
        header["columns"].append({"name": name, "parent": column.parent, "epsilon": column.epsilon, "solved": column.solved})
        arrays |= {f"{index}_{part}": getattr(column, part) for part in ("weights", "edges", "possible")}
    buffer = io.BytesIO()
    np.savez(buffer, header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **arrays)
    return buffer.getvalue()


def tree_from_bytes(data: bytes, where: str | None = None) -> TreeRelease:
    """Return the release that `tree_to_bytes` wrote.

    Raises
    ------
    InputError
        If the bytes are something else, or of another format.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            if (header["format"], header["kind"]) != (TREE_FORMAT, KIND):
                raise ValueError("another format")
            columns = {column["name"]: _column(column, arrays, index) for index, column in enumerate(header["columns"])}
    except UNREADABLE:
        raise InputError("this is no release along a tree of this version", where, "abort the run and begin again") from None
    return TreeRelease(columns=columns)


def _column(column: dict[str, Any], arrays: Any, index: int) -> TreeColumn:
    weights = arrays[f"{index}_weights"]
    thresholds, aliases = channel_kernel.alias_tables(weights.reshape(-1, weights.shape[2]))
    return TreeColumn(
        parent=column["parent"],
        weights=weights,
        thresholds=thresholds,
        aliases=aliases,
        edges=arrays[f"{index}_edges"],
        possible=arrays[f"{index}_possible"],
        epsilon=column["epsilon"],
        solved=column["solved"],
    )
