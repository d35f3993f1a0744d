"""Which rows of the next release of a series were released before, as their keys tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from dpdask.arrays import Flags, Words, freeze_class
from dpdask.engine.compute import Progress
from dpdask.engine.digests import DIGEST, add_key, hash_rows, sum_rows
from dpdask.errors import InputError, RepeatedError, list_names
from dpdask.io.fragment import Fragment, count_deleted, pack, unpack
from dpdask.io.fragments import InputTable
from dpdask.jobs.spec import Growing

KEYS_PER_FILE = 2**20

Keys = NDArray[np.bytes_]


@freeze_class(kw_only=False)
class Remaining:
    """The next release, after its rows were compared with those that were released."""

    table: InputTable
    keys: Keys  # of its rows
    again: bool  # whether some were released before, and are released again


def compare_keys(
    table: InputTable,
    rules: Growing,
    salt: bytes,
    released: Iterable[Keys],
    *,
    is_changed: bool,
    progress: Progress | None = None,
) -> Remaining:
    """Return what is left of a table by the rules for rows that come again; only the columns of the key are read.

    Parameters
    ----------
    salt
        The key of the series' digests.
    released
        The keys of released rows, file by file.
    is_changed
        Whether the table holds rows again that a commit changed: these pay for themselves.

    Privacy
    -------
    The columns of the key are released as they are, so nothing private decides how this ends.
    """
    columns = tuple(rules.row_key or ())
    parts = _digest(table.fragments, columns, salt, table, progress)
    keys = np.concatenate([np.zeros(0, dtype=DIGEST), *parts])
    again = np.zeros(len(keys), dtype=np.bool_)
    twice = np.ones(len(keys), dtype=np.bool_)
    twice[np.unique(keys, return_index=True)[1]] = False
    for each in () if is_changed else released:
        again |= np.isin(keys, each)
    named = f"rows have the same {list_names(columns, 8)}"
    hint = "deliver each row once; or set `growing.repeated` to skip or charge; or correct `growing.row_key`"
    if rules.repeated == "refuse" and again.any():
        raise InputError(f"rows seen again: {named} as released ones", None, hint)
    if rules.repeated != "skip":
        if twice.any():  # one release would hold a row twice, and be charged once
            raise InputError(f"two new {named}", None, hint)
        return Remaining(table, keys, bool(again.any()))
    left = _leave_out(table, [len(part) for part in parts], again | twice)
    return Remaining(left, keys[~(again | twice)], again=False)


def list_keys(table: InputTable, rules: Growing, salt: bytes) -> Iterator[Keys]:
    """Yield the keys of a table's rows, about as many at a time as a file takes."""
    group, n_rows = list[Fragment](), 0
    for fragment in table.fragments:
        group, n_rows = [*group, fragment], n_rows + (fragment.n_rows or KEYS_PER_FILE)
        if n_rows >= KEYS_PER_FILE or fragment is table.fragments[-1]:
            yield np.concatenate(_digest(group, rules.row_key or (), salt, table, None))
            group, n_rows = [], 0


def check_alike(table: InputTable, columns: Sequence[str], progress: Progress | None) -> None:
    """Check that no new file holds the rows of a released one, in whatever order and codec.

    Only files with as many rows as a new one are read, the newest ones.
    """
    if not table.alike:
        return
    sizes = Counter[str]()
    for each in (*table.alike, *table.fragments):
        sizes[each.url] += each.n_rows or 0
    known = {sizes[each.url] for each in table.alike}
    new = [each for each in table.fragments if sizes[each.url] in known and not each.deleted]
    released = _sum_files(table.alike, columns, table, progress)
    for url, total in _sum_files(new, columns, table, progress).items():
        other = next((each for each, found in released.items() if found == total), None)
        if other is not None:
            names = {each.url: each.name for each in (*table.alike, *new)}
            what = f"rows seen again: this file holds the rows of {names[other]}, which was released, in another order or codec"
            hint = "remove its rows from the table; name a `growing.row_key`; or pay for them by `growing: {charge_repeats: true}`"
            raise RepeatedError(what, names[url], hint)


def _sum_files(
    fragments: Sequence[Fragment],
    columns: Sequence[str],
    table: InputTable,
    progress: Progress | None,
) -> dict[str, tuple[int, int]]:
    sums = sum_rows(fragments, columns, table.schema, progress)
    files: dict[str, Words] = {}
    for each in fragments:
        files[each.url] = files.get(each.url, np.zeros(2, dtype=np.uint64)) + sums[each.number]
    return {url: (int(total[0]), int(total[1])) for url, total in files.items()}


def _digest(
    fragments: Sequence[Fragment],
    columns: Sequence[str],
    salt: bytes,
    table: InputTable,
    progress: Progress | None,
) -> list[Keys]:
    """Return the keys of each fragment's rows."""
    # other columns make other keys, in whatever order the job names them
    columns = sorted(columns)
    names = "\n".join(columns).encode()
    hashed = hash_rows(fragments, columns, table.schema, names, progress)
    return [add_key(hashed[each.number], salt) for each in fragments]


def _leave_out(table: InputTable, sizes: Sequence[int], gone: Flags) -> InputTable:
    """Return a table without some rows, and without fragments that have no other."""
    # of fragments that stay: a run that goes on has no others
    left, masks, start = list[Fragment](), list[NDArray[np.bool_]](), 0
    for fragment, size in zip(table.fragments, sizes, strict=True):
        own, start = gone[start : start + size], start + size
        if own.all():
            continue
        masks.append(own)
        if own.any():
            deleted = unpack(fragment.deleted, 0, size + count_deleted(fragment.deleted))
            deleted[np.flatnonzero(~deleted)[own]] = True
            n_rows = None if fragment.n_rows is None else fragment.n_rows - int(own.sum())
            fragment = replace(fragment, deleted=pack(deleted), n_rows=n_rows)
        left.append(replace(fragment, number=len(left)))
    n_files = len({fragment.url for fragment in left})
    mask = np.concatenate([np.zeros(0, dtype=np.bool_), *masks])
    skipped = blake2b(np.packbits(mask).tobytes(), digest_size=16).hexdigest() if mask.any() else ""
    return replace(table, fragments=tuple(left), n_files=n_files, skipped=skipped)
