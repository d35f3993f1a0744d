"""What the commits of a Delta or Iceberg table did to its rows, and which files hold rows that are new since one of them.

The log decides, not the files: compaction writes rows into other files, and none of them is new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace
from typing import Literal, NamedTuple, Protocol

from dpdask.arrays import freeze_class
from dpdask.errors import InputError
from dpdask.io.files import DataFile, Listing, TableFormat, natural
from dpdask.io.fragments import InputTable, describe_files
from dpdask.io.storage import open_filesystem, storage_faults
from dpdask.schema import Schema

# `refuse`: the run ends. `ignore`: what was released stays, and the rows as they were changed are
# not released. `release`: they are released again, for ε again.
Changed = Literal["refuse", "ignore", "release"]
# `append`: rows were added, and none removed. `rewrite`: the same rows lie in other files. `delete`:
# rows were removed; files that it adds hold rows that were there. `change`: files that it adds may
# hold rows that were there, as they were or with other values.
Kind = Literal["append", "rewrite", "delete", "change"]


MOST_ALIKE = 32  # files are usually delivered again soon


@freeze_class
class TableCommit:
    """One commit of a table, with the names of files in the table."""

    version: int  # the Delta version or the Iceberg snapshot that it made
    before: int | None  # the one before it
    kind: Kind
    added: frozenset[str] = field(default=frozenset(), repr=False)
    removed: frozenset[str] = field(default=frozenset(), repr=False)
    # Files that it left in the table with fewer rows, as far as the log names them.
    masked: frozenset[str] = field(default=frozenset(), repr=False)
    # Whether the files that it adds hold nothing but rows of those that it removes, and rows that
    # were never in the table.
    is_closed: bool = False


class ReleasedFile(NamedTuple):
    """A file that was released."""

    version: str  # the digest of its footer
    n_rows: int  # 0 if it is not known


class Place(NamedTuple):
    """Up to where a table was released."""

    table: str  # the id that the table's metadata give it; empty if it is not known
    version: int | None  # None of an Iceberg table without a snapshot


@freeze_class
class Followed:
    """What the commits since a place have left to release, and what they did to released rows."""

    # The last commit that was followed: the release ends here.
    until: int | None
    # The files with rows to release, each with the version to read it at; None for that of `until`.
    files: dict[str, int | None] = field(repr=False)
    # Whether some of these rows were released before: a unit pays for them again.
    again: bool = False
    # Whether a commit that changes rows is next, whose release is one of its own.
    more: bool = False
    # How many commits deleted rows that were released, and how many changed rows and are ignored.
    n_deleting: int = 0
    n_ignored: int = 0
    # Up to which version the owner has declared all rows released, if that was done.
    declared: int | None = None


def follow(
    commits: Iterable[TableCommit],
    since: int | None,
    policy: Changed,
    released: Collection[str],
    where: str,
) -> Followed:
    """Return what commits have left to release.

    A row is in the result once. So with the policy `release` it ends before a commit that changes
    rows, unless there is nothing to release yet: then the result is that commit's rows, and what was
    added after it.

    Parameters
    ----------
    commits
        In their order.
    since
        The version up to which the table was released.
    released
        The names of released files: a commit that adds one brings released rows back.
    """
    live: dict[str, None] = {}  # files with rows to release that the table has
    frozen: dict[str, int | None] = {}  # those that it has no more, with the last version that had
    until, again, more, n_deleting, n_ignored = since, False, False, 0, 0
    for commit in commits:
        kind, gone = commit.kind, live.keys() & commit.removed
        if kind == "append" and not commit.added.isdisjoint(released):
            kind = "change"
        # it concerns no row that was released: what it leaves of new rows is new
        closed = commit.is_closed and commit.removed | commit.masked <= live.keys()
        closed = closed and commit.added.isdisjoint(released)
        stays = kind == "delete" and bool(commit.added) and not closed
        if kind == "change" and not closed:
            if policy == "refuse":
                raise _refuse(commit.version, where)
            if policy == "release" and (live or frozen):
                more = True
                break
            # without a file of its own, as when it undoes deletions, nothing is released again
            again = again or (policy == "release" and bool(commit.added))
            n_ignored += policy == "ignore"
            stays = policy == "ignore"
            gone = gone | (live.keys() & commit.masked) if stays else gone
        n_deleting += kind == "delete" and not closed
        for name in gone:
            del live[name]
        if kind == "rewrite" or stays:
            # whose rows are now in files with other rows
            frozen |= dict.fromkeys(gone, commit.before)
        else:
            live |= dict.fromkeys(commit.added)
        until = commit.version
    return Followed(
        until=until,
        files=dict.fromkeys(live) | frozen,
        again=again,
        more=more,
        n_deleting=n_deleting,
        n_ignored=n_ignored,
    )


def _refuse(version: int, where: str) -> InputError:
    what = f"version {version} of the table changed rows that were released (an update, a merge, an overwrite or a restore), or its log does not tell"
    hint = "set `growing: {changed: ignore}` to leave them as they were released, or `changed: release` to release the changed files again, for ε again"
    return InputError(what, where, hint)


def tell_gap(first: object, last: object, newest: object, where: str) -> InputError:
    """Return the error of rows that were added and cannot be read any more."""
    what = f"what was added to the table from version {first} to {last} cannot be read any more: its log was cleaned or rolled back, or files were vacuumed"
    hint = f"restore it, or declare all rows that are there as released, for no charge: `dpdask rebase JOB --at {newest}`"
    return InputError(what, where, hint)


class Lake(TableFormat, Protocol):
    """A format with a log: Delta or Iceberg."""

    def at(self, version: int | None) -> Lake:
        """Return the format of another version."""

    def read_commits(self, url: str, since: int | None, until: int | None) -> list[TableCommit]:
        """Return what each commit after one version did to the rows, up to another version."""

    def precedes(self, url: str, one: int | None, other: int | None) -> bool:
        """Return whether one version came before another one."""


def discover_added(
    url: str,
    schema: Schema,
    lake: Lake,
    since: Place,
    policy: Changed,
    released: Mapping[str, ReleasedFile],
    until: int | None = None,
) -> tuple[InputTable, Followed]:
    """Return the part of a Delta or Iceberg table that its log has added since a place, and what else the log did.

    A file is read at the last version that has it with the rows to release, whatever became of it
    later: a compaction may have removed it from the table.

    Parameters
    ----------
    released
        The released files by their URLs. Those that may have a copy among the added files, or hold the
        same rows as one of these, come with the result.
    until
        The version to end at; the newest if None.
    """
    newest = lake.at(until).list_files(url, schema)
    if since.table not in ("", newest.table):
        what = "this is another table than the one that was released: it has another id"
        hint = f"restore it; start a new output; or declare all rows that are there as released, for no charge: `dpdask rebase JOB --at {newest.version}`"
        raise InputError(what, url, hint)
    commits = lake.read_commits(url, since.version, newest.version)
    folder = f"{newest.location.rstrip('/')}/"
    names = {each.removeprefix(folder) for each in released}
    followed = follow(commits, since.version, policy, names, url)
    ended = newest
    if followed.until != newest.version:
        ended = lake.at(followed.until).list_files(url, schema)
    listings = {ended.version: _index(ended)}
    wanted: list[DataFile] = []
    for name, at in followed.files.items():
        place = followed.until if at is None else at
        try:
            if place not in listings:
                listings[place] = _index(lake.at(place).list_files(url, schema))
            file = listings[place][name]
        except (InputError, KeyError):
            raise tell_gap(since.version, place, newest.version, url) from None
        fs, path = open_filesystem(file.url)
        with storage_faults(url):
            if place != ended.version and not fs.exists(path):
                raise tell_gap(since.version, place, newest.version, url)
        wanted.append(file)
    files = tuple(sorted(wanted, key=lambda file: natural(file.name)))
    table = describe_files(url, replace(ended, files=files), schema, growing=True)
    held = [fragment for fragment in table.fragments if fragment.n_rows != 0]
    numbered = (replace(fragment, number=number) for number, fragment in enumerate(held))
    table = replace(table, fragments=tuple(numbered))
    versions = {fragment.version for fragment in table.fragments}
    like = {each for each, file in released.items() if file.version in versions}
    copied = tuple(file for file in newest.files if file.url in like)
    if copied:
        found = describe_files(url, replace(newest, files=copied), schema, growing=True).fragments
        table = replace(table, released=found)
    alike = _find_alike(table, wanted, released)
    if alike:
        found = describe_files(url, replace(ended, files=alike), schema, growing=True).fragments
        table = replace(table, alike=found)
    return table, followed


def _find_alike(
    table: InputTable, wanted: Collection[DataFile], released: Mapping[str, ReleasedFile]
) -> tuple[DataFile, ...]:
    """Return the newest released files that have as many rows as an added one, in the same folder, and are still there."""
    sizes = Counter[str]()
    for fragment in table.fragments:
        sizes[fragment.url] += fragment.n_rows or 0
    # by the folder, since that has the values of partition columns
    like = {(_split(file.url)[0], sizes[file.url]): file for file in wanted if not file.deleted}
    alike: list[DataFile] = []
    for url, file in reversed(list(released.items())):
        folder, name = _split(url)
        other = like.get((folder, file.n_rows))
        if other is None or len(alike) == MOST_ALIKE:
            continue
        fs, path = open_filesystem(url)
        with storage_faults(folder):
            if fs.exists(path):
                place = f"{_split(other.name)[0]}/{name}".lstrip("/")
                alike.append(replace(other, url=url, name=place, n_bytes=None))
    return tuple(alike)


def _split(url: str) -> tuple[str, str]:
    folder, _, name = url.rpartition("/")
    return folder, name


def _index(listing: Listing) -> dict[str, DataFile]:
    return {file.name: file for file in listing.files}
