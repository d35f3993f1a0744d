"""A fitted chain as bytes: whole-number tables and the reference's trie, so that every worker draws from the very same law."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from dpdask.channels import LevelChannel
from dpdask.errors import InputError
from dpdask.kernels import chain as kernel
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import rank as rank_kernel
from dpdask.mechanisms.dip.chain import BinnedRanks, ChainRelease, Groups, LaplaceRanks, RankRandomiser

CHAIN_FORMAT = 1


def chain_to_bytes(release: ChainRelease) -> bytes:
    """Return a release as bytes: the same release, the same bytes.

    Privacy
    -------
    Holds the reference's records (for a hold-out: hold-out rows) and the key of the groups' hashes. It is kept beside the
    run key, never published.
    """
    header: dict[str, Any] = {"format": CHAIN_FORMAT, "least_grade": release.least_grade, "columns": [], "groups": None}
    arrays: dict[str, Any] = dict(release.trie._asdict())
    for index, (name, mechanism) in enumerate(release.columns.items()):
        if isinstance(mechanism, BinnedRanks):
            header["columns"].append({"name": name, "epsilon": mechanism.channel.epsilon})
            arrays[f"{index}_weights"] = mechanism.channel.weights
            continue
        scalars = {key: getattr(mechanism.noise, key) for key in ("n_cells", "rate", "margin", "sign", "epsilon")}
        header["columns"].append({"name": name, "noise": scalars})
        arrays[f"{index}_weights"] = mechanism.noise.weights
    if release.groups is not None:
        header["groups"] = {key: getattr(release.groups, key) for key in ("column", "pooled_groups", "pooled_rows")}
        arrays |= {"group_key": release.groups.key, "group_hashes": release.groups.hashes}
    buffer = io.BytesIO()
    np.savez(buffer, header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **arrays)
    return buffer.getvalue()


def chain_from_bytes(data: bytes) -> ChainRelease:
    """Return the release that `chain_to_bytes` wrote.

    Raises
    ------
    InputError
        If it is of another format.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        header = json.loads(arrays["header"].tobytes())
        if header["format"] != CHAIN_FORMAT:
            raise InputError("the run's fitted release is of another version of dpdask", None, "go on with that one, or `dpdask abort` the run")
        groups = header["groups"]
        return ChainRelease(
            columns={column["name"]: _mechanism(column, arrays[f"{index}_weights"]) for index, column in enumerate(header["columns"])},
            trie=kernel.Trie(**{name: arrays[name] for name in kernel.Trie._fields}),
            groups=None if groups is None else Groups(**groups, key=arrays["group_key"], hashes=arrays["group_hashes"]),
            least_grade=header["least_grade"],
        )


def _mechanism(column: dict[str, Any], weights: Any) -> RankRandomiser:
    thresholds, aliases = channel_kernel.alias_tables(weights)
    if "noise" in column:
        return LaplaceRanks(noise=rank_kernel.RankNoise(weights=weights, **column["noise"]), thresholds=thresholds, aliases=aliases)
    return BinnedRanks(channel=LevelChannel(weights=weights, epsilon=column["epsilon"]), thresholds=thresholds, aliases=aliases)
