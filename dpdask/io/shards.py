"""Writing shards: released rows with a fixed schema and fixed row groups, and nothing else in the file."""

from __future__ import annotations

import hashlib
import io
import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from hashlib import sha256
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from dpdask.arrays import freeze_class
from dpdask.errors import InputError, MissingError, OutputError
from dpdask.io.filesystems import mask
from dpdask.io.folders import list_files
from dpdask.io.storage import Folder

Mode = Literal["error", "append", "overwrite"]
Format = Literal["parquet", "delta", "iceberg"]  # of an output


def count_committed(is_there: Callable[[int], bool]) -> int:
    """Return how many of the releases that are numbered from 0 are committed; there is no gap between them."""
    end = 1
    while is_there(end - 1):
        end *= 2
    return bisect_left(range(end), True, key=lambda number: not is_there(number))


CARD = "card.json"
PAGE = "release.html"
_DIGEST = "sha256"


def save_release(
    place: Folder, name: str, data: bytes, card: Mapping[str, Any], page: bytes
) -> None:
    """Write a release and its page, then its card, which marks the release as complete; nothing is overwritten."""
    place.create()
    for file in (name, PAGE, CARD):
        if place.exists(file):
            raise OutputError(
                f"a file {file!r} is there already",
                place.url,
                "remove it, or choose another folder",
            )
    place.write(name, data)
    place.write(PAGE, page)
    place.write(
        CARD,
        json.dumps(
            {**card, _DIGEST: {name: sha256(data).hexdigest()}}, indent=1, ensure_ascii=False
        ).encode(),
    )


def load_release(place: Folder, name: str) -> tuple[bytes, dict[str, Any]]:
    """Return a release and its card, as `save_release` wrote them."""
    data = place.read(name, replaced=True)
    try:
        card = json.loads(place.read(CARD, replaced=True))
        digest = card.pop(_DIGEST)[name]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f"this is not a card of {name!r}", CARD, "save the release again"
        ) from None
    if digest != sha256(data).hexdigest():
        raise InputError(
            f"this card belongs to another release than {name!r}",
            CARD,
            "restore both from one release, or save it again",
        )
    return data, card


ROW_GROUP_ROWS = 2**17
ROW_GROUP_BYTES = 2**26
_BUFFER_BYTES = 2**20


@freeze_class
class Shard:
    """A shard as it was written."""

    name: str
    n_rows: int
    n_bytes: int
    sha256: str
    # In an output with partition columns, the value that all rows of the shard have in each.
    partition: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def number_key(shard: str) -> tuple[int, str]:
    """Return the sort key of a shard's name, whatever its folder: `part-99999` comes before `part-100000`."""
    name = shard.rpartition("/")[2]
    return len(name), name


class _HashingSink:
    """A file that hashes its content while it is written."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.n_bytes = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.n_bytes += len(data)
        return self._file.write(data)

    def let_go(self) -> None:
        """Ignore all further writes."""
        self._file = io.BytesIO()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Leave the file open; its opener closes it."""


def choose_encoding(schema: pa.Schema, few_valued: Collection[str]) -> dict[str, Any]:
    """Return the options with which a shard is written."""
    whole, dictionary = {}, []
    for column in schema:
        type_, is_few = column.type, column.name in few_valued
        is_whole = pa.types.is_integer(type_) or pa.types.is_temporal(type_)
        if is_whole and not pa.types.is_duration(type_) and not is_few:
            whole[column.name] = "DELTA_BINARY_PACKED"
        elif is_few or not pa.types.is_floating(type_):
            dictionary.append(column.name)
    return {
        "compression": "snappy",
        "version": "2.6",
        "use_dictionary": dictionary,
        "column_encoding": whole,
    }


class ShardWriter:
    """Writes one shard; it appears under its name, whole, when it is closed.

    Parameters
    ----------
    schema
        The released columns and types. The footer holds them (also as an Arrow schema without
        metadata, so that every type comes back), the row groups and the statistics of released
        values; no pandas metadata, no index, no dictionary but of values that are in the shard.
    few_valued
        The columns with few distinct values, which a dictionary makes smaller; elsewhere it would
        cost half the time of writing and be given up.
    new
        Whether the shard is written once, where it will stay: if a file of another content is there
        already, closing fails.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        schema: pa.Schema,
        few_valued: Collection[str] = (),
        *,
        new: bool = False,
    ) -> None:
        self._name, self._schema = name, schema
        self._pending: list[pa.RecordBatch] = []
        self._n_pending = self._n_rows = 0
        self._stack = ExitStack()
        what = (
            "this shard was written before, from other rows: the input changed since the run began"
        )
        other = InputError(
            what, mask(name), "restore the input and run again, or `dpdask abort` the run"
        )
        self._sink = _HashingSink(
            self._stack.enter_context(
                folder.open_new(name, other) if new else folder.open_replacement(name)
            )
        )
        # Parquet writes page by page; a buffer spares as many calls back into Python
        self._file = pa.BufferedOutputStream(pa.PythonFile(self._sink, mode="w"), _BUFFER_BYTES)
        self._writer = pq.ParquetWriter(
            self._file,
            schema,
            **choose_encoding(schema, few_valued),
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows; a row group is written as soon as it has 2**17 rows, or 64 MiB in memory."""
        self._pending.append(batch)
        self._n_pending += batch.num_rows
        self._n_rows += batch.num_rows
        if self._n_pending >= ROW_GROUP_ROWS:
            self._flush(self._n_pending // ROW_GROUP_ROWS * ROW_GROUP_ROWS)
        if sum(each.nbytes for each in self._pending) >= ROW_GROUP_BYTES:
            self._flush(self._n_pending)

    def _flush(self, n_rows: int) -> None:
        table = pa.Table.from_batches(self._pending, self._schema)
        self._writer.write_table(table.slice(0, n_rows), row_group_size=ROW_GROUP_ROWS)
        self._pending = table.slice(n_rows).to_batches()
        self._n_pending -= n_rows

    @property
    def n_bytes_held(self) -> int:
        """About how many bytes of it are in memory."""
        return self._sink.n_bytes + sum(int(each.nbytes) for each in self._pending)

    def close(self, partition: Mapping[str, Any] | None = None) -> Shard:
        """Write the remaining rows and make the shard appear."""
        if self._n_pending:
            self._flush(self._n_pending)
        self._writer.close()
        self._file.close()
        self._stack.close()
        return Shard(
            name=self._name,
            n_rows=self._n_rows,
            n_bytes=self._sink.n_bytes,
            sha256=self._sink.digest.hexdigest(),
            partition=partition,
        )

    def discard(self, error: BaseException) -> None:
        """Remove the unfinished shard."""
        self._sink.let_go()
        # else it writes its footer when it is collected
        with suppress(pa.ArrowException, OSError, ValueError):
            self._writer.close()
        self._stack.__exit__(type(error), error, error.__traceback__)


MANIFEST_FORMAT = 1
META = "_dpdask"
MANIFEST_NAME = f"{META}/manifest.json"
CARD_NAME = f"{META}/release.json"
PAGE_NAME = f"{META}/release.html"  # the card, for people
CROISSANT_NAME = f"{META}/croissant.json"  # the card, for catalogues of data sets
MEASURED = "measured.arrow"  # the noisy counts that were drawn, where they are published
MEASURED_NAME = f"{META}/{MEASURED}"
MODEL = "model.npz"  # what records were drawn from, where it is published
MODEL_NAME = f"{META}/{MODEL}"
# beside the shards, in the order in which they are written
DOCUMENTS = (
    PAGE_NAME,
    CROISSANT_NAME,
    MEASURED_NAME,
    MODEL_NAME,
    CARD_NAME,
)
SUCCESS_NAME = "_SUCCESS"
TABLE_FOLDER = "table"  # in the names of folders, `table=NAME`, where a release has several tables


@freeze_class
class Manifest:
    """The list of a release's files; safe to publish."""

    job: str  # A digest of the job, by which a finished run knows its own output
    shards: tuple[Shard, ...]
    card_sha256: str
    model_sha256: str | None = None  # of the model, if it is published

    @property
    def n_rows(self) -> int:
        """The released rows; not the persons, where there is a table of them."""
        tables = [*self.tables.values()]
        return sum(shard.n_rows for shard in (tables[-1] if tables else self).shards)

    @property
    def n_persons(self) -> int | None:
        """The released persons, where there is a table of them."""
        persons = next(iter(self.tables.values()), None)
        return None if persons is None else sum(shard.n_rows for shard in persons.shards)

    @property
    def tables(self) -> dict[str, Manifest]:
        """The part of each table, by name, where a release has several: that of the persons, then that of their rows."""
        found: dict[str, list[Shard]] = {}
        for shard in self.shards:
            folder = shard.name.partition("/")[0]
            if folder.startswith(f"{TABLE_FOLDER}=") and shard.partition is None:
                found.setdefault(folder.partition("=")[2], []).append(shard)
        return {name: replace(self, shards=tuple(each)) for name, each in found.items()}

    def to_bytes(self) -> bytes:
        """Return the manifest as canonical JSON; the same release gives the same bytes."""
        shards = [shard.to_dict() for shard in self.shards]
        content: dict[str, Any] = {"format": MANIFEST_FORMAT, "rows": self.n_rows, **asdict(self)}
        content["shards"] = shards
        if self.model_sha256 is None:
            del content["model_sha256"]
        return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def read(cls, folder: Folder, name: str = MANIFEST_NAME) -> Manifest | None:
        """Return the manifest of an output folder, or None if there is none."""
        try:  # to ask first whether it exists would take three requests of a store in place of one
            # that of a folder is created once
            data = folder.read(name, replaced=name != MANIFEST_NAME)
        except MissingError:
            return None
        try:
            content = json.loads(data)
            if content["format"] != MANIFEST_FORMAT:
                raise KeyError
            shards = tuple(Shard(**shard) for shard in content["shards"])
            if not all(_is_inside(shard.name) for shard in shards):
                raise ValueError
            return cls(
                job=content["job"],
                shards=shards,
                card_sha256=content["card_sha256"],
                model_sha256=content.get("model_sha256"),
            )
        except (ValueError, KeyError, TypeError):
            raise OutputError(
                "the manifest cannot be read", name, "choose another output, or remove this one"
            ) from None


def _is_inside(name: object) -> bool:
    """Return whether a name leads to no other folder than one named `key=value`, where an output has those."""
    *folders, last = name.split("/") if isinstance(name, str) else [""]
    return (
        last not in ("", ".", "..")
        and "\\" not in str(name)
        and all("=" in each for each in folders)
    )


def list_manifests(folder: Folder, but: str = "") -> list[Manifest]:
    """Return the manifests of all releases in an output folder."""
    names = (f"{META}/{name}" for name in folder.child(META).names() if name.startswith("manifest"))
    return [
        found
        for found in (Manifest.read(folder, name) for name in names if name != but)
        if found is not None
    ]


def count_missing(folder: Folder, manifests: Sequence[Manifest]) -> int:
    """Return how many shards of manifests an output folder lacks; those that a listing lacks are looked for, since it may be an earlier one."""
    names = set(list_files(folder))
    return sum(
        shard.name not in names and not folder.exists(shard.name)
        for manifest in manifests
        for shard in manifest.shards
    )
