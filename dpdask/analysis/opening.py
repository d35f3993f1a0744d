"""`dpdask.open`: the card decides which kind of release it is."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from dpdask.analysis.opened import OpenedRelease
from dpdask.errors import InputError, SpecError, list_names
from dpdask.io.filesystems import by_root, check_options, set_options
from dpdask.io.shards import CARD_NAME, MANIFEST_NAME, META, Manifest
from dpdask.io.storage import Folder, absolute_url
from dpdask.mechanisms.card import Card, find_guidance

# by the shape of a release, its class, whose module is imported when it is asked for
_KINDS = {
    "rows": ("rows", "OpenedRows"),
    "records": ("records", "OpenedRecords"),
    "persons": ("people", "OpenedPersons"),
    "records of cells": ("cells", "OpenedRecordsOfCells"),
    "cells": ("cells", "OpenedCells"),
    "tables": ("cells", "OpenedTables"),
    "tables of persons": ("cells", "OpenedPersonTables"),
    "ranges": ("ranges", "OpenedRanges"),
}


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
    manifest, read, ending = _read(folder, str(path), card)
    shape: str = find_guidance(read).shape(read)
    if shape not in _KINDS:
        what = f"releases of the mechanism {read.mechanism.kind!r} cannot be opened"
        raise SpecError(what, str(path), "read the Parquet files")
    if shape == "records" and "cells_listed" in read.mechanism.details:
        shape = "records of cells"
    if shape == "tables" and "persons" in read.mechanism.details:
        shape = "tables of persons"
    module, name = _KINDS[shape]
    kind: type[OpenedRelease] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    *others, last = manifest.tables.values() or (manifest,)  # of two tables, that of the rows
    beside: dict[str, Any] = (
        {"person_shards": tuple(shard.name for shard in others[0].shards)} if others else {}
    )
    return kind(
        **beside,
        folder=folder,
        shards=tuple(shard.name for shard in last.shards),
        n_rows=manifest.n_rows,
        content=read.to_dict(),
        ending=ending,
    )


def _read(folder: Folder, path: str, card: str | None) -> tuple[Manifest, Card, str]:
    """Return the manifest and the card of a release in a folder, and what its files' names end with: of the only one, or of that whose card has this name."""
    prefix, _, suffix = MANIFEST_NAME.removeprefix(f"{META}/").partition(".")
    names = [
        name
        for name in folder.child(META).names()
        if name.startswith(prefix) and name.endswith(f".{suffix}")
    ]
    if not names:
        use = "give the output folder of a job; `dpdask status` shows its state"
        raise InputError("there is no finished release here", path, use)
    start = CARD_NAME.removesuffix(".json").removeprefix(f"{META}/")
    cards = {start + name.removeprefix(prefix): name for name in names}
    listed = f"its cards are {list_names(sorted(cards), 3)}"
    if card is not None and card not in cards:
        raise InputError(f"there is no release with the card {card!r} here", path, listed)
    if card is None and len(names) > 1:
        raise SpecError(
            f"this folder holds {len(names):,} releases, each with its own card and its own noise",
            path,
            f"open one after the other, `dpdask.open(…, card=…)`, and combine estimates by release; {listed}",
        )
    chosen = card or next(iter(cards))
    manifest, where = Manifest.read(folder, f"{META}/{cards[chosen]}"), f"{META}/{chosen}"
    data = folder.read(where, replaced=True)
    if manifest is None or sha256(data).hexdigest() != manifest.card_sha256:
        what = "this card is not the one that the manifest names"
        raise InputError(what, f"{path}/{where}", "copy the whole folder again")
    ending = chosen.removeprefix(start).removesuffix(".json")
    return manifest, Card.read(data, f"{path}/{where}"), ending
