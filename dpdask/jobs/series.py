"""What a growing table keeps between its releases, and which rows are new (docs/explanation/design.md, Growing tables)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpdask.arrays import freeze_class
from dpdask.engine.digests import DIGEST
from dpdask.errors import InputError, OutputError, list_names, say_count
from dpdask.io.changes import MOST_ALIKE, Followed, Place
from dpdask.io.encrypted import count_missing_digits, decrypt, encrypt
from dpdask.io.fragment import Fragment
from dpdask.io.fragments import InputTable
from dpdask.io.storage import RELEASE_NAME, SERIES_NAME, Folder, hide
from dpdask.jobs.output import Target
from dpdask.jobs.run_keys import check_run_id, find_remote_keys, say_place
from dpdask.jobs.spec import Growing, Job
from dpdask.mechanisms.card import Card
from dpdask.privacy import Budget, UnitColumn
from dpdask.privacy.events import round_up_sum
from dpdask.privacy.ledger_entries import extend_head

_FORMAT = 1
_RECORD_FORMAT = 2
_PERSON = b"dpdask kept"
_HINT = "restore it from a backup, or start a new output, which is charged anew"


@freeze_class
class KeptFile:
    """A released file."""

    number: int
    name: str
    url: str
    n_bytes: int
    version: str  # of a Parquet file, the digest of its footer; else empty
    fragments: tuple[str, ...]
    n_rows: int = 0  # as the footer tells; 0 if it does not


@freeze_class
class Size:
    """What one release published: its rows and shards, and the ε of one unit; None if it has no ε."""

    n_rows: int
    n_shards: int
    epsilon: float | None
    again: bool = False  # whether it may hold rows that were released before
    # The names of its files of keys begin so, and how many there are; none without a key.
    keys: str = ""
    n_key_files: int = 0


@freeze_class(repr=False)
class Kept:
    """The record of a series after one of its releases."""

    id: str
    salt: str  # the key of the series' digests, in hexadecimal digits
    release: str
    files: tuple[KeptFile, ...]
    sizes: tuple[Size, ...]
    # Up to where a Delta or Iceberg table was released; None of plain files, and in a record of
    # format 1.
    place: Place | None = None
    # Up to which version the owner has declared all rows released, since the release.
    declared: int | None = None
    # How many commits between the release and the place deleted rows, and how many were ignored.
    n_deleting: int = 0
    n_ignored: int = 0
    # Up to where tables were released that `rebase` has left for others.
    left: tuple[Place, ...] = ()

    @property
    def head(self) -> str:
        """The digest of all released fragments, release by release: who changes the list of files leaves the series of the ledger."""
        head = ""
        for number in sorted({file.number for file in self.files}):
            released = [
                fragment
                for file in self.files
                if file.number == number
                for fragment in file.fragments
            ]
            head = extend_head(bytes.fromhex(self.salt), head, released)
        return head

    def add(self, table: InputTable) -> Kept:
        """Return the record with the files of the next release; its size and its fitted release are not known yet."""
        files = (*self.files, *list_files(table.fragments, len(self.sizes)))
        place = Place(table.table, table.version) if table.table else None
        return dataclasses.replace(
            self, files=files, place=place, declared=None, n_deleting=0, n_ignored=0
        )

    def advance(self, table: InputTable, followed: Followed) -> Kept:
        """Return the record after a table's log was followed further, and nothing was new."""
        return dataclasses.replace(
            self,
            place=Place(table.table, followed.until),
            n_deleting=followed.n_deleting,
            n_ignored=followed.n_ignored,
        )

    def declare(self, place: Place, before: Place) -> Kept:
        """Return the record after all rows up to a place were declared as released; `before` is where the series was."""
        left = tuple(each for each in self.left if each.table not in (place.table, before.table))
        left += (before,) if before.table not in ("", place.table) else ()
        return dataclasses.replace(self, place=place, declared=place.version, left=left)

    def to_bytes(self) -> bytes:
        """Return the record as JSON, whose length does not depend on how large the files are: that tells of their rows."""
        data = json.dumps({"format": _RECORD_FORMAT, **asdict(self)}).encode()
        missing = count_missing_digits(
            number for file in self.files for number in (file.n_bytes, file.n_rows)
        )
        return data.ljust(len(data) + missing)

    @classmethod
    def from_bytes(cls, data: bytes) -> Kept:
        """Return the record that `to_bytes` gave."""
        content = json.loads(data)
        if content.pop("format") not in (1, _RECORD_FORMAT):
            raise ValueError
        place = content.pop("place", None)
        files = tuple(
            KeptFile(**{**file, "fragments": tuple(file["fragments"])}) for file in content["files"]
        )
        sizes = tuple(Size(**size) for size in content["sizes"])
        place = None if place is None else Place(*place)
        if content.pop("is_declared", False) and place is not None:  # as earlier versions wrote it
            content["declared"] = place.version
        left = tuple(Place(*each) for each in content.pop("left", ()))
        return cls(**{**content, "files": files, "sizes": sizes, "place": place, "left": left})


class KeptFolder:
    """The hidden folder beside a growing output that holds its fitted release and its newest record.

    Parameters
    ----------
    ledger_url
        The ledger that the job is charged to, if any: it keeps the key of what lies in a store.

    Privacy
    -------
    The fitted release may hold values of held-out rows. On a file system the folder is for this
    user alone. In a store its files are encrypted with a key that is derived from the first run's
    key and is not in the store.
    """

    def __init__(self, output: Folder, ledger_url: str | None) -> None:
        self.folder = hide(output, ".dpdask-series")
        self._output, self._ledger_url = output, ledger_url

    def read_job(self) -> tuple[str, Target] | None:
        """Return the digest of the job that began the series, and how it publishes; None if no series was begun here."""
        if not self.folder.exists(SERIES_NAME):
            return None
        about = self._read_about()
        return about["job"], Target.model_validate(about["target"])

    def find_name(self, job: Job) -> str | None:
        """Return the name of the series if a job goes on with it, else the job's own; None if no series was begun here."""
        if not self.folder.exists(SERIES_NAME):
            return None
        about = self._read_about()
        name, promise = str(about["job"]), about.get("promise")
        is_same = promise == job.promise or name in (job.promise, job.text_digest)
        return name if is_same else job.promise

    def tell_promise(self, promise: str) -> None:
        """Record what a series promises that an earlier version began."""
        about = self._read_about()
        if about.get("promise") != promise:
            data = json.dumps(about | {"promise": promise}).encode()
            self.folder.write(SERIES_NAME, data, private=True)

    def begin(self, run_key: bytes, series_id: str, release: bytes, job: Job) -> None:
        """Keep the fitted release of the first run. Doing it twice writes the same bytes."""
        place = ""
        if not self._output.is_local:
            keys = find_remote_keys(self._ledger_url)
            place = keys.place
            keys.write(series_id, blake2b(run_key, digest_size=32, person=_PERSON).digest())
        self.folder.create()
        about = {
            "format": _FORMAT,
            "id": series_id,
            "key": place,
            "job": job.digest,
            "promise": job.promise,
            "target": job.file.output.target.model_dump(mode="json"),
        }
        self.folder.write(SERIES_NAME, json.dumps(about).encode(), private=True)
        self._write(RELEASE_NAME, release)

    def write(self, kept: Kept, manifest: bytes) -> None:
        """Keep the record that is valid as soon as its manifest is there."""
        self._write(_record_name(len(kept.sizes) - 1, manifest), kept.to_bytes())

    def write_keys(self, size: Size, number: int, keys: NDArray[np.bytes_], n_bytes: int) -> None:
        """Keep some keys of the rows of a release, in a file of at least so many bytes in a store; they count as soon as its record does."""
        self._write(_key_name(size, number), np.sort(keys).tobytes(), n_bytes)

    def read_keys(self, kept: Kept) -> Iterator[NDArray[np.bytes_]]:
        """Yield the keys of all released rows, a file at a time."""
        for size in kept.sizes:
            for number in range(size.n_key_files):
                yield np.frombuffer(self._read(_key_name(size, number)), dtype=DIGEST)

    def read(self, manifest: bytes, number: int) -> Kept:
        """Return the record of the newest release."""
        try:
            return Kept.from_bytes(self._read(_record_name(number, manifest)))
        except (ValueError, KeyError, TypeError):
            raise self._lost() from None

    def load_release(self, kept: Kept) -> bytes:
        """Return the fitted release."""
        data = self._read(RELEASE_NAME)
        if hashlib.sha256(data).hexdigest() != kept.release:
            raise self._lost()
        return data

    def sweep(self, manifest: bytes, number: int) -> None:
        """Remove the records of releases before this one, and of attempts at it that were given up; for the parameters see `read`."""
        newest, kept = _record_name(number, manifest), self.read(manifest, number)
        keys = {_key_name(size, at) for size in kept.sizes for at in range(size.n_key_files)}
        for name in self.folder.names():
            if name.startswith("keys-") and int(name[5:10]) <= number and name not in keys:
                self.folder.remove(name)
            found = re.fullmatch(r"released-(\d{5,})-.*", name)
            if found is not None and int(found[1]) <= number and name != newest:
                self.folder.remove(name)

    def remove(self) -> None:
        """Remove the folder, and the key of what lies in a store."""
        if not self._output.is_local:
            with suppress(InputError):
                find_remote_keys(self._ledger_url).remove(self._key_name())
        self.folder.remove()

    def _read_about(self) -> dict[str, Any]:
        try:
            about: dict[str, Any] = json.loads(self.folder.read(SERIES_NAME, replaced=True))
            if about["format"] != _FORMAT or not {"id", "key", "job", "target"} <= set(about):
                raise ValueError
        except InputError:
            raise self._lost() from None
        except (ValueError, KeyError, TypeError):
            raise OutputError(
                "this series was saved by another version of dpdask",
                self.folder.url,
                "use the dpdask that wrote it",
            ) from None
        return about

    def _key_name(self) -> str:
        about = self._read_about()
        if about["key"] != find_remote_keys(self._ledger_url).place:
            where = say_place(str(about["key"]))
            raise InputError(
                f"the key of this series is {where}, so it cannot go on here",
                self._output.url,
                "run the job there; if that place is lost, start a new output, which is charged anew",
            )
        return check_run_id(str(about["id"]))

    def _write(self, name: str, data: bytes, n_bytes: int = 0) -> None:
        key = self._read_key()
        sealed = data if key is None else encrypt(key, name, data, n_bytes)
        self.folder.write(name, sealed, private=True)

    def _read(self, name: str) -> bytes:
        key = self._read_key()
        try:
            data = self.folder.read(name, replaced=True)
            return data if key is None else decrypt(key, name, data)
        except InputError:
            raise self._lost() from None

    def _read_key(self) -> bytes | None:
        """Return the key of what lies in a store; None on a file system."""
        if self._output.is_local:
            return None
        key = find_remote_keys(self._ledger_url).read(self._key_name())
        if key is None:
            raise self._lost()
        return key

    def _lost(self) -> InputError:
        return InputError(
            "the saved state of this series is missing or was changed, so the series cannot go on",
            self.folder.url,
            _HINT,
        )


def _record_name(number: int, manifest: bytes) -> str:
    return f"released-{name_with(number, manifest)}.json"


def name_with(number: int, manifest: bytes) -> str:
    """Return the part of a name by which a file counts if and only if a manifest is there."""
    return f"{number:05d}-{hashlib.sha256(manifest).hexdigest()[:16]}"


def _key_name(size: Size, number: int) -> str:
    return f"keys-{size.keys}-{number:06d}.bin"


def list_files(fragments: Iterable[Fragment], number: int) -> tuple[KeptFile, ...]:
    """Return the files of some fragments as a record keeps them, without fragments that have no rows."""
    files: dict[str, list[Fragment]] = {}
    for fragment in fragments:
        if fragment.n_rows != 0:
            files.setdefault(fragment.url, []).append(fragment)
    return tuple(
        KeptFile(
            number=number,
            name=parts[0].name,
            url=url,
            n_bytes=sum(part.n_bytes for part in parts),
            version=parts[0].version if parts[0].format == "parquet" else "",
            fragments=tuple(part.id for part in parts),
            n_rows=sum(part.n_rows or 0 for part in parts),
        )
        for url, parts in files.items()
    )


def choose_new(table: InputTable, kept: Kept) -> InputTable:
    """Return the part of a table that is in no release yet."""
    present = {file.url: file for file in list_files(table.fragments, len(kept.sizes))}
    ids = {fragment.id for fragment in table.fragments}
    for file in kept.files:
        if ids.issuperset(file.fragments):
            continue  # as it was released, although the whole table may have moved
        now = present.get(file.url)
        if now is None:
            what = "this file was released and is gone; if its rows are in another file now, they would be released twice"
            raise InputError(what, file.name, "restore it, or start a new output")
        what = "rows seen again: this file was released and has been rewritten since, so its rows would be released twice"
        hint = "restore it, and put new rows into new files; or start a new output"
        raise InputError(what, file.name, hint)
    seen = {fragment for file in kept.files for fragment in file.fragments}
    new = [each.id for each in table.fragments if each.id not in seen and each.n_rows != 0]
    return select(mark_released(table, kept), new, table.version)


def mark_released(table: InputTable, kept: Kept) -> InputTable:
    """Return a table that knows which of its fragments were released, and which of those may hold the rows of new ones."""
    seen = {fragment for file in kept.files for fragment in file.fragments}
    found = tuple(fragment for fragment in table.fragments if fragment.id in seen)
    new = (fragment for fragment in table.fragments if fragment.id not in seen)
    sizes = {file.n_rows for file in list_files(new, 0)} - {0}
    newest = [file.url for file in reversed(list_files(found, 0)) if file.n_rows in sizes]
    alike = tuple(fragment for fragment in found if fragment.url in newest[:MOST_ALIKE])
    return dataclasses.replace(table, released=found, alike=alike)


def select(table: InputTable, ids: Sequence[str], version: int | None) -> InputTable:
    """Return the fragments with some ids as a table of their own.

    Parameters
    ----------
    version
        The version of a Delta or Iceberg table in which they were found.
    """
    wanted = set(ids)
    chosen = [fragment for fragment in table.fragments if fragment.id in wanted]
    if len(chosen) != len(wanted):
        raise InputError(
            "the input changed since the run began",
            None,
            "restore it and run again, or `dpdask abort` the run",
        )
    numbered = tuple(
        dataclasses.replace(fragment, number=number) for number, fragment in enumerate(chosen)
    )
    return dataclasses.replace(
        table,
        fragments=numbered,
        version=version,
        n_files=len({fragment.url for fragment in chosen}),
    )


_PUBLIC = "Which release a row is in is public; if it depends on private values, no ε covers that."


def sum_series(sizes: Sequence[Size], unit: object) -> float | None:
    """Return what the releases of a series cost a unit together; None if they have no ε.

    A row is in one release, and once more in each that may hold released rows.

    Parameters
    ----------
    unit
        The privacy unit, as a budget or a card has it.
    """
    paid = [size for number, size in enumerate(sizes) if unit != "row" or size.again or not number]
    known = [size.epsilon for size in paid if size.epsilon is not None]
    return round_up_sum(known) if known else None


def describe_release(
    sizes: Sequence[Size],
    budget: Budget | None,
    followed: Followed | None,
    rules: Growing,
    *,
    has_holdout: bool,
) -> dict[str, Any]:
    """Return what the card of the newest release says about its series.

    Parameters
    ----------
    sizes
        Those of all releases; of the newest one, ε counts alone.
    followed
        What the log of a Delta or Iceberg table did since the release before.
    rules
        What becomes of rows that come again.
    """
    number, unit = len(sizes) - 1, "row" if budget is None else budget.unit
    if number == 0:
        rows = "the rows that the table had then"
    elif followed is None:
        rows = "the rows of the files that were added after the release before"
    elif followed.again:
        rows = "the files that a commit of the table changed after their release, with all their rows, and the rows that were added after it"
    else:
        rows = "the rows that the table's log has added after the release before"
    reference = (
        ""
        if number == 0
        else " The reference and the channels are those of release 0; no row of this release was held out."
    )
    total, log = sum_series(sizes, unit), _describe_log(followed)
    if rules.repeated == "skip" and rules.row_key is not None:
        names = list_names(rules.row_key, 8)
        log += f"A row is left out if one with the same {names} was released before. "
    cost = _describe_total(sizes, unit, has_holdout=has_holdout)
    text = f"Release {number} of a growing table: {rows}.{reference} {log}{cost}{_PUBLIC}"
    about: dict[str, Any] = {
        "release": number,
        "epsilon": total,
        "text": text,
        "again": sizes[-1].again,
    }
    about |= {} if rules.row_key is None else {"row_key": rules.row_key, "repeated": rules.repeated}
    return about if followed is None else about | tell_log(followed)


def tell_log(followed: Followed) -> dict[str, Any]:
    """Return what a table's log did since the release before, beside adding rows."""
    return {
        "deleting_commits": followed.n_deleting,
        "ignored_commits": followed.n_ignored,
        "declared_version": followed.declared,
    }


def _describe_log(followed: Followed | None) -> str:
    if followed is None:
        return ""
    text = ""
    if followed.n_deleting:
        commits = say_count(followed.n_deleting, "commit")
        text += f"Since the release before, {commits} of the table deleted rows; what was released of them stays. "
    if followed.n_ignored:
        commits = say_count(followed.n_ignored, "commit")
        text += f"Rows of {commits} that changed rows are not released: what was released before stays as it was. "
    if followed.declared is not None:
        text += f"The owner of the table has declared its rows up to version {followed.declared} as released; those among them that were not stay unreleased. "
    return text


def describe_series(sizes: Sequence[Size], first: Card) -> dict[str, Any]:
    """Return what the card that sums up a series says about it."""
    unit = first.guarantee.unit
    total = sum_series(sizes, unit)
    n_rows, n_shards = sum(size.n_rows for size in sizes), sum(size.n_shards for size in sizes)
    cost = _describe_total(sizes, unit, has_holdout=first.has_holdout)
    text = f"This growing table has {say_count(len(sizes), 'release')}. All else in this card is that of release 0. {cost}{_PUBLIC}"
    return {
        "releases": len(sizes),
        "rows": n_rows,
        "shards": n_shards,
        "epsilon": total,
        "text": text,
    }


def _describe_total(sizes: Sequence[Size], unit: object, *, has_holdout: bool) -> str:
    total, n_again = sum_series(sizes, unit), sum(size.again for size in sizes)
    if total is None:
        return ""
    held_out = (
        "No ε covers the rows that release 0 held out: all releases follow them. "
        if has_holdout
        else ""
    )
    if isinstance(unit, UnitColumn):
        return f"A {unit.label} may have rows in every release, so the releases add up: ε = {total!r} for all of them together. {held_out}"
    if n_again:
        releases = say_count(n_again, "release")
        return f"A row is in one release, and may be once more in each of {releases} that may hold released rows again: ε = {total!r} for all of them together. {held_out}"
    whose, cost = ("released row", "it") if has_holdout else ("row", "a row")
    return f"Each {whose} is in one release, so all releases together cost {cost} no more than release 0: ε = {total!r}. {held_out}"
