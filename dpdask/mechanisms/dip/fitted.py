"""Fitted releases of every kind of reference, and their bytes: a word that names the kind, and what that kind writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dpdask.mechanisms.dip.chain import ChainRelease
from dpdask.mechanisms.dip.chain_file import chain_from_bytes, chain_to_bytes
from dpdask.mechanisms.dip.release import DipRelease
from dpdask.mechanisms.dip.release_file import release_from_bytes, release_to_bytes
from dpdask.mechanisms.dip.tree import TreeRelease
from dpdask.mechanisms.dip.tree_file import tree_from_bytes, tree_to_bytes

FittedRelease = DipRelease | ChainRelease | TreeRelease

_CHAIN, _COLUMNS, _TREE = b"chain\n", b"columns\n", b"tree\n"


def fitted_to_bytes(release: FittedRelease) -> bytes:
    """Return a release as bytes: the same release, the same bytes.

    Privacy
    -------
    Holds the reference. It is kept beside the run key, never published.
    """
    if isinstance(release, ChainRelease):
        return _CHAIN + chain_to_bytes(release)
    return _TREE + tree_to_bytes(release) if isinstance(release, TreeRelease) else _COLUMNS + release_to_bytes(release)


def fitted_from_bytes(data: bytes) -> FittedRelease:
    """Return the release that `fitted_to_bytes` wrote."""
    name, rest = data.split(b"\n", 1)
    readers: Mapping[bytes, Callable[[bytes], FittedRelease]] = {_CHAIN: chain_from_bytes, _TREE: tree_from_bytes, _COLUMNS: release_from_bytes}
    return readers[name + b"\n"](rest)
