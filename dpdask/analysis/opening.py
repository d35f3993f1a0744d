"""`dpdask.open`: from a folder to the class that answers an analyst's questions."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from dpdask.analysis.cells import OpenedCells, OpenedTables
from dpdask.analysis.opened import OpenedRelease
from dpdask.analysis.points import OpenedRecords
from dpdask.analysis.ranges import OpenedRanges
from dpdask.analysis.rows import OpenedRows
from dpdask.errors import InputError, SpecError
from dpdask.io.filesystems import by_root, check_options, set_options
from dpdask.io.shards import CARD_NAME, MANIFEST_NAME, META, Manifest
from dpdask.io.storage import Folder, absolute_url
from dpdask.mechanisms.card import Card
from dpdask.mechanisms.guidance import find_guidance


def open(  # noqa: A001 - `dpdask.open`, as `Image.open`
    path: str, *, card: str | None = None, storage: Mapping[str, Mapping[str, Any]] | None = None
) -> OpenedRelease:
    """Return a release from its output folder, ready for analysis; it reads the card and the manifest, and no row.

    Parameters
    ----------
    path
        The output folder of a job, a path or any fsspec URL.
    card
        The name of the release's card in the folder `_dpdask`, such as `release-00001.json`, if
        there are several releases.
    storage
        How its store is opened, as the `storage` of a job; the environment decides if not given.
        The options hold for all later calls in this process that use the same bucket.

    Raises
    ------
    InputError
        If there is no release, or no such card, or the card is another's.
    SpecError
        If the folder holds several releases, each with its own card, and none is named.

    Examples
    --------
    >>> import dpdask
    >>> try:
    ...     dpdask.open("out/nothing-here")
    ... except dpdask.InputError as error:
    ...     print(error.what)
    there is no finished release here
    """
    url = absolute_url(str(path))
    if storage is not None:
        set_options(by_root(check_options(dict(storage)), [url]))
    folder = Folder(url)
    manifest, read = _read(folder, str(path), card)
    content, shards = read.to_dict(), tuple(shard.name for shard in manifest.shards)
    return _choose(read, str(path))(
        folder=folder, shards=shards, n_rows=manifest.n_rows, content=content
    )


def _read(folder: Folder, path: str, card: str | None) -> tuple[Manifest, Card]:
    """Return the manifest and the card of a release in a folder: of the only one, or of that whose card has this name."""
    prefix, _, suffix = MANIFEST_NAME.removeprefix(f"{META}/").partition(".")
    names = [
        name
        for name in folder.child(META).names()
        if name.startswith(prefix) and name.endswith(f".{suffix}")
    ]
    if not names:
        raise InputError(
            "there is no finished release here",
            path,
            "give the output folder of a job; `dpdask status` shows its state",
        )
    start = CARD_NAME.removesuffix(".json").removeprefix(f"{META}/")
    cards = {start + name.removeprefix(prefix): name for name in names}
    some = f"{', '.join(sorted(cards)[:3])}{', …' if len(cards) > 3 else ''}"
    if card is not None and card not in cards:
        raise InputError(
            f"there is no release with the card {card!r} here", path, f"its cards are {some}"
        )
    if card is None and len(names) > 1:
        what = (
            f"this folder holds {len(names):,} releases, each with its own card and its own noise"
        )
        raise SpecError(
            what,
            path,
            f"open one after the other, `dpdask.open(…, card=…)`, and combine estimates by release; its cards are {some}",
        )
    chosen = card or next(iter(cards))
    manifest, where = Manifest.read(folder, f"{META}/{cards[chosen]}"), f"{META}/{chosen}"
    data = folder.read(where, replaced=True)
    if manifest is None or sha256(data).hexdigest() != manifest.card_sha256:
        raise InputError(
            "this card is not the one that the manifest names",
            f"{path}/{where}",
            "copy the whole folder again",
        )
    return manifest, Card.read(data, f"{path}/{where}")


def _choose(card: Card, path: str) -> type[OpenedRelease]:
    shapes: dict[str, type[OpenedRelease]] = {
        "rows": OpenedRows,
        "records": OpenedRecords,
        "cells": OpenedCells,
        "tables": OpenedTables,
        "ranges": OpenedRanges,
    }
    shape = find_guidance(card).shape(card)
    if shape not in shapes:
        raise SpecError(
            f"releases of the mechanism {card.mechanism.kind!r} cannot be opened",
            path,
            "read the Parquet files",
        )
    return shapes[shape]
