"""A fitted DIP release as bytes: whole-number tables and knots, so that every worker draws from the very same law."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from dpdask.channels import LevelChannel
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import rank as rank_kernel
from dpdask.mechanisms.dip.release import BinMechanism, ColumnMechanism, DipRelease, LevelMechanism, RankMechanism
from dpdask.references import RankDistribution

RELEASE_FORMAT = 1


def release_to_bytes(release: DipRelease) -> bytes:
    """Return a release as bytes: the same release, the same bytes.

    Privacy
    -------
    Holds the reference (for a hold-out: hold-out values). It is kept beside the run key, never published.
    """
    header: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for index, (name, mechanism) in enumerate(release.columns.items()):
        if isinstance(mechanism, LevelMechanism):
            header.append({"name": name, "kind": "levels", "epsilon": mechanism.channel.epsilon})
            arrays[f"{index}_weights"] = mechanism.channel.weights
            continue
        reference = mechanism.distribution
        if isinstance(mechanism, BinMechanism):
            header.append({"name": name, "kind": "bins", "rank_error": reference.rank_error, "epsilon": mechanism.channel.epsilon})
            arrays |= {
                f"{index}_weights": mechanism.channel.weights,
                f"{index}_x": reference.x,
                f"{index}_c": reference.c,
                f"{index}_edges": mechanism.edges,
            }
            continue
        noise = mechanism.noise
        scalars = {key: getattr(noise, key) for key in ("n_cells", "rate", "margin", "sign", "epsilon")}
        header.append({"name": name, "kind": "ranks", "rank_error": reference.rank_error, "noise": scalars})
        arrays |= {f"{index}_weights": noise.weights, f"{index}_x": reference.x, f"{index}_c": reference.c}
    text = json.dumps({"format": RELEASE_FORMAT, "columns": header}).encode()
    buffer = io.BytesIO()
    np.savez(buffer, header=np.frombuffer(text, dtype=np.uint8), **arrays)
    return buffer.getvalue()


def release_from_bytes(data: bytes) -> DipRelease:
    """Return the release that `release_to_bytes` wrote."""
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        header = json.loads(arrays["header"].tobytes())
        columns = {column["name"]: _mechanism(column, arrays, index) for index, column in enumerate(header["columns"])}
    return DipRelease(columns=columns)


def _mechanism(column: dict[str, Any], arrays: Any, index: int) -> ColumnMechanism:
    weights = arrays[f"{index}_weights"]
    thresholds, aliases = channel_kernel.alias_tables(weights)
    if column["kind"] == "levels":
        return LevelMechanism(channel=LevelChannel(weights=weights, epsilon=column["epsilon"]), thresholds=thresholds, aliases=aliases)
    distribution = RankDistribution(arrays[f"{index}_x"], arrays[f"{index}_c"], column["rank_error"])
    if column["kind"] == "bins":
        channel = LevelChannel(weights=weights, epsilon=column["epsilon"])
        edges = arrays[f"{index}_edges"]
        return BinMechanism(channel=channel, edges=edges, distribution=distribution, thresholds=thresholds, aliases=aliases)
    noise = rank_kernel.RankNoise(weights=weights, **column["noise"])
    return RankMechanism(noise=noise, distribution=distribution, thresholds=thresholds, aliases=aliases)
