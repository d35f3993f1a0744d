"""A fitted release in Python: rows of a frame randomised one by one, or records drawn from noisy counts."""

from __future__ import annotations

import math
import os
import uuid
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import pandas as pd
import pyarrow as pa

from dpdask.archive import Archived
from dpdask.engine.account import Account
from dpdask.engine.compute import forget_everywhere
from dpdask.engine.lazy import sample_frame, transform_frame
from dpdask.engine.source import Frame, FrameSource, as_frame, identify
from dpdask.engine.work import TableWork, keep, load
from dpdask.errors import DataError, InputError, InternalError, SpecError
from dpdask.estimators.frames import (
    close_secrets,
    find_order_warnings,
    forget_secrets,
    make_frame_work,
    open_secrets,
)
from dpdask.html import make_html_table
from dpdask.io.shards import CARD, load_release, save_release
from dpdask.io.storage import KEY_NAME, RELEASE_NAME, Folder, absolute_url
from dpdask.mechanisms.card import Card, RowCount, make_card
from dpdask.mechanisms.mechanism import Mechanism
from dpdask.privacy.events import epsilon, to_dict

FITTED = "frame"  # the frame that a release was fitted on, or the one without a name
PUBLIC = "public table"
_NAMED = "batch "
_LOG = "batches"
_LONGEST = 100


def _name_expression(frame: Any) -> str:
    """Return the expression and the number of partitions of a Dask frame, which can be changed in place."""
    return f"{frame._name} {frame.npartitions}" if hasattr(frame, "_meta") else ""


class Batches:
    """The batches of one release, in the order in which they were taken.

    Parameters
    ----------
    folder
        The release's private folder. It records which copy of the release took which batch, so that
        copies in this process and in others agree.
    several
        Whether any frames can be released: one without a name, and further ones as named batches.
        Otherwise there is one batch: the frame that the release is fitted on.

    Privacy
    -------
    A batch is taken by a random token that stays in memory. A copy of the release (unpickled,
    deep-copied, or in a forked process) has another token, so it can take free batches, but not
    batches that were taken. On an object store, two processes that take the same batch at the same
    moment may both succeed, and seals are not reliable there either: transform in one process.
    """

    def __init__(self, folder: Folder, several: bool) -> None:
        self.several = several
        self._folder, self._token = folder, uuid.uuid4().hex
        self._frames: dict[str, tuple[weakref.ref[Any], str]] = {}  # with their expressions
        self._owners: dict[str, str] = {}
        self._log: dict[int, str] = {}

    def __reduce__(self) -> tuple[type[Batches], tuple[Folder, bool]]:
        return Batches, (self._folder, self.several)

    def check(self, frame: Any, batch: str | None = None) -> str:
        """Return the name of a frame's streams and seals, if the frame can take the batch.

        Parameters
        ----------
        frame
            A Dask or pandas frame.
        batch
            The batch's name; None for the frame without one.

        Raises
        ------
        SpecError
            If the batch is not a valid name, is not possible, or belongs to another frame.
        InputError
            If the release was closed.
        """
        if batch is not None and not self.several:
            what = "this release covers only the frame it was fitted on, and has no batches"
            raise SpecError(what, f"batch {batch!r}", "leave `batch` out, or fit again")
        if batch is not None:
            plain = isinstance(batch, str) and batch.isprintable() and batch == batch.strip()
            if not plain or not 0 < len(batch) <= _LONGEST:
                what = f"a batch's name must be a text of 1 to {_LONGEST} printable characters, without spaces around them"
                raise SpecError(what, "batch", "correct it")
        if not self._folder.exists(KEY_NAME):
            what = "this release was closed, so its key no longer exists"
            raise InputError(what, None, "fit again")
        self._read_log()
        name = FITTED if batch is None else f"{_NAMED}{batch}"
        self._compare(name, frame)
        return name

    def take(self, frame: Any, batch: str | None = None) -> str:
        """Take a batch for a frame, and return the name of its streams and seals; see `check`."""
        name = self.check(frame, batch)
        while name not in self._owners:  # the first entry in the folder's log decides
            number, entry = len(self._log), f"{self._own_token}\n{name}".encode()
            self._note(number, self._folder.claim(f"{_LOG}/{number}", entry))
        self._compare(name, frame)
        # atomic: of two threads, one is first
        self._frames.setdefault(name, (weakref.ref(frame), _name_expression(frame)))
        self._compare(name, frame)
        return name

    @property
    def names(self) -> list[str | None]:
        """The batches taken by all copies of the release, in order; None is the one without a name."""
        self._read_log()
        names = [name for _, name in sorted(self._log.items())]
        return [None if name == FITTED else name.removeprefix(_NAMED) for name in names]

    @property
    def _own_token(self) -> str:
        return f"{self._token}-{os.getpid()}"  # a forked process shares the token in memory

    def _compare(self, name: str, frame: Any) -> None:
        """Check that a batch is of this copy of the release, and of this frame."""
        where = f"batch {name.removeprefix(_NAMED)!r}"
        if name == FITTED:
            where = "the frame without a name" if self.several else "frame"
        if self._owners.get(name, self._own_token) != self._own_token:
            what = (
                "another copy of this release has taken this batch, and a batch belongs to one copy"
            )
            raise SpecError(what, where, "transform there, or fit again")
        if name not in self._frames:
            return
        first, expression = self._frames[name]
        if first() is not frame:
            what = "this release covers only the frame it was fitted on, the same Python object"
            hint = "persist, filter or sort before `fit` and keep that frame in a variable, or fit again"
            if self.several:
                what = "another frame was given before, and a batch is one frame, the same Python object every time"
                hint = 'give that frame, or name another batch for this one, for instance batch="2026-11"'
            raise SpecError(what, where, hint)
        if expression != _name_expression(frame):
            what = "this frame was changed in place since its first use"
            raise SpecError(what, where, "finish it before its first use, or fit again")

    def _read_log(self) -> None:
        number = len(self._log)  # once: other threads make the log longer meanwhile
        while self._folder.exists(f"{_LOG}/{number}"):
            self._note(number, self._folder.read(f"{_LOG}/{number}"))
            number += 1

    def _note(self, number: int, entry: bytes) -> None:
        owner, _, name = entry.decode().partition("\n")
        # before the log, because another thread continues from the end of the log
        self._owners.setdefault(name, owner)
        self._log[number] = name


PARTITION_ROWS = 2**17
_ROUNDING = 1.001  # another version's accountant may find a slightly larger ε


def _sample(run_id: str) -> str:
    """Return the name of the hold-out of a run that holds out no unit."""
    return f"run {run_id}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rows:
    """What a release needs to randomise the rows of further frames.

    Attributes
    ----------
    mechanism
        What was fitted.
    account
        The ledger that batches are charged to.
    run_id
        The name of the release in the ledger.
    work
        The columns' types and codecs, and the place of the run key.
    batches
        Which frames the release covers.
    public
        What identifies the public frame, or None without one.
    """

    mechanism: Mechanism
    account: Account
    run_id: str
    work: TableWork
    batches: Batches
    public: str | None

    def load(self, sha256: str) -> Any:
        """Return the fitted release from its folder: it may hold private rows, so no copy of the `Release` carries it."""
        return load(self.work.secrets, sha256, self.mechanism.release_type)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Release:
    """A fitted release; made by `fit`, or by `load` elsewhere, without the data.

    A release of rows has `transform`, a release of records has `sample`, `save` and `load`. It is a
    context manager: at the end it is closed.

    Attributes
    ----------
    fitted
        What was fitted, if it is a release of records; that of rows may be private, and stays in
        its folder.
    folder
        The private folder where workers read it.
    sha256
        SHA-256 of it as bytes.
    rows
        What transforms rows; None for a release of records.

    Privacy
    -------
    A release of records is a function of noisy counts: it may be published, and any number of
    records drawn from it, at no further cost. A release of rows holds the key of its noise, in its
    folder.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}}})
    >>> table = pd.DataFrame({"x": [0, 1] * 50})
    >>> with dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Histogram()).fit(table) as release:
    ...     len(release.transform(table)), release.card["guarantee"]["epsilon"]
    (100, 1.0)
    """

    fitted: Any
    folder: Folder
    sha256: str
    rows: Rows | None
    _card: Card

    file: ClassVar[str] = "release.npz"
    fitted_type: ClassVar[type[Archived] | None] = None

    @classmethod
    def from_fit(
        cls, rows: Rows, fitted: Any, sha256: str, *, n_released: int | None, insecure: bool
    ) -> Self:
        """Return the release that a fit made.

        Parameters
        ----------
        fitted, sha256
            What was fitted, and SHA-256 of it as bytes.
        n_released
            How many rows are released, if they were counted.
        """
        mechanism, work = rows.mechanism, rows.work
        all_released = work.unit is None and mechanism.fraction is None
        n_rows = n_released if mechanism.releases_rows and all_released else None
        section = mechanism.description.section(
            fitted, work.columns, n_rows=n_rows, n_released=None, order="keep"
        )
        card = make_card(section, name="frame", insecure=insecure)
        card = rows.account.tell_coverage(card, rows.run_id)
        if mechanism.releases_rows:
            return cls(fitted=None, folder=work.secrets, sha256=sha256, rows=rows, _card=card)
        forget_secrets(work.secrets)  # nothing that follows needs a secret
        sha256 = keep(work.secrets, RELEASE_NAME, fitted.to_bytes())
        return cls(fitted=fitted, folder=work.secrets, sha256=sha256, rows=None, _card=card)

    @property
    def card(self) -> dict[str, Any]:
        """The release card: what was promised, to whom, and how, and the batches so far; it may be published."""
        if self.rows is None or not self.rows.batches.several:
            return self._card.to_dict()
        mechanism, names = self.rows.mechanism, self.rows.batches.names
        without = mechanism.event.without_epsilon
        card = self._card.with_batches(
            names, epsilon=mechanism.budget is not None, ranges=bool(without)
        )
        if names:
            card = self.rows.account.tell_coverage(card, self._run_id(names[-1]))
        return card.to_dict()

    def _run_id(self, batch: str | None, attempt: int = 1) -> str:
        """Return the name of a batch's charge in the ledger; no two batches share one, whatever they are called."""
        assert self.rows is not None
        run_id = self.rows.run_id if attempt == 1 else f"{self.rows.run_id}.{attempt}"
        return run_id if batch is None else f"{run_id} batch {batch}"

    @property
    def n_rows(self) -> RowCount | None:
        """The number of rows of the fitted table, as the card tells it."""
        return self._card.n_rows

    def transform(self, frame: Frame, batch: str | None = None) -> Frame:
        """Return the released rows of a frame: lazily for Dask, at once for pandas; as an Arrow table for one of Arrow, polars or DuckDB.

        Rows keep their order and index; held-out rows and dropped columns are gone; kept columns
        are untouched.

        Parameters
        ----------
        frame
            With a declared or a public reference, and for ranges, any frame with the same columns;
            otherwise the frame that the release was fitted to, the same Python object.
        batch
            If any frame can be given, a name for this one. The first frame needs none; each further
            frame needs its own name, for instance `2026-11`. The card lists it.

        Raises
        ------
        SpecError
            If `frame` is no frame; if the release is one of records; if the release, or the batch,
            covers another frame; if the batch is not a valid name; if the frame is the public one,
            because its rows would be their own reference.
        DataError
            If the columns are not those of the schema, or (when computed) a value violates it, or
            the index is neither row numbers (a `RangeIndex`) nor a column that the schema keeps.
        BudgetError
            If the batch is charged to a ledger whose budget does not allow it.

        Warns
        -----
        UserWarning
            If a pandas frame other than the fitted one is sorted by a private column.

        Privacy
        -------
        Transforming a batch's frame again repeats the same noise and costs nothing more. If the
        rows of a pandas frame are refused, the ledger records it, and the next attempt is charged
        anew. The rows of a Dask frame are read later, when no refusal is recorded, so with a strict
        dataset each such batch costs at least what a refusal costs. A partition whose rows changed
        since they were first read is refused, so that the same noise is never applied to two
        values. Each batch has its own noise, whatever its rows: a row in k batches is protected by
        k·ε.
        """
        rows = self.rows
        if rows is None:
            raise SpecError(
                "this release has no rows to transform",
                "transform",
                "draw records from it: sample()",
            )
        given, frame = frame, as_frame(frame)
        if rows.public is not None and identify(frame) == rows.public:
            raise SpecError(
                "this frame was given as the public table, so its rows would be their own reference",
                "transform",
                "fit on another table",
            )
        found = make_frame_work(frame, rows.mechanism, self.folder)
        if not found.released.equals(rows.work.released):
            raise DataError(
                "the columns or their types differ from those of the fitted frame",
                "transform",
                "give both frames the same types",
            )
        name = rows.batches.check(given, batch)
        lazy = not isinstance(frame, pd.DataFrame)
        # a batch that the budget refuses is not taken
        run_id = self._charge(rows, batch, unread=lazy) if rows.batches.several else None
        rows.batches.take(given, batch)
        try:
            released = transform_frame(
                FrameSource(frame, name), rows.load(self.sha256), self.sha256, rows.work
            )
        except (DataError, SpecError, InternalError):
            if run_id is not None:
                rows.account.refuse(run_id, _sample(run_id), drawn=False)
            raise
        if run_id is not None:
            rows.account.record_draw(run_id, self.sha256)
            rows.account.commit(run_id, self.sha256)
        if rows.batches.several and not rows.account.is_strict:
            for warning in find_order_warnings(frame, rows.work):
                warnings.warn(warning, stacklevel=2)
        return released if frame is given else pa.Table.from_pandas(released, preserve_index=False)

    def _charge(self, rows: Rows, batch: str | None, *, unread: bool) -> str:
        """Charge a batch, once however often it is released, and return its name in the ledger: a refused one is charged anew."""
        attempt = 1
        book = rows.account.read()
        while book.find_kind(run_id := self._run_id(batch, attempt)) == "refuse":
            attempt += 1
        rows.account.check_room(run_id)
        rows.account.intend(run_id, _sample(run_id), unread=unread)
        return run_id

    def sample(
        self,
        n_rows: int | None = None,
        *,
        where: str | None = None,
        like: Any = None,
        rows_per_partition: int = PARTITION_ROWS,
        seed: int | None = None,
    ) -> Frame:
        """Return records as a lazy Dask frame.

        Parameters
        ----------
        n_rows
            How many; by default as many as the table has, or if their number is private as the
            noisy counts say.
        where
            Which records are wanted, for instance `'sex = "F" and age >= 65'`; of a copula alone.
            Comparisons with `=`, `!=`, `<`, `<=`, `>`, `>=`, `in (…)`, `not in (…)`, `is null` and
            `is not null`, joined by `and` and, more loosely, `or`. All records if None.
        like
            A public frame of some of the columns, in memory, instead of `n_rows` and `where`; of a
            copula alone. Each of its rows has a record with its values, in its order.
        rows_per_partition
            How many in a partition.
        seed
            Decides the records, in [0, 2**64); by default a fresh one. The same frame computed
            twice is the same records.

        Raises
        ------
        SpecError
            If the release is one of rows; if a number is out of range; if no record can be drawn;
            if the condition cannot be read, or no record can meet it; if the frame has other columns
            or values than the release.
        """
        if self.rows is not None:
            raise SpecError(
                "this release randomises rows and has no records to draw",
                "sample",
                "give it a frame: transform(frame)",
            )
        shared = self.fitted, self.folder, self.sha256
        return sample_frame(*shared, n_rows, rows_per_partition, seed, where, like)

    def save(self, path: str) -> None:
        """Write a release of records to a folder, as a path or any fsspec URL: safe to publish, and enough for `load`.

        `release.html` is the card for people. The card is written last, with the release's digest.

        Raises
        ------
        SpecError
            If the release is one of rows: it holds the key of its noise, and covers frames of this
            process.
        OutputError
            If a release is there already, or it cannot be written.
        """
        if self.rows is not None:
            what = "this release holds the key of its noise and covers frames of this process, so a copy of it could release rows twice"
            raise SpecError(what, "save", "write the transformed rows, or run a job")
        from dpdask.page import make_page  # no other method needs its libraries

        page, faults = make_page(self._card)
        for fault in faults:
            warnings.warn(fault, stacklevel=2)
        save_release(
            Folder(absolute_url(path)),
            self.file,
            self.fitted.to_bytes(),
            self._card.to_dict(),
            page,
        )

    @classmethod
    def load(cls, path: str, *, secrets: str | None = None) -> Self:
        """Return a saved release of records, which may come from others: its contents are checked before anything is computed from them.

        The card is compared with the release: the mechanism, the noise and the ε. It is not
        authenticated. Who can write the folder can replace the release and its card together, and
        nothing shows whether the noise that a release states was drawn.

        Parameters
        ----------
        path
            Where it was saved.
        secrets
            A folder that every worker can read, as for `fit`.

        Raises
        ------
        InputError
            If there is none, or of another version, or its contents are invalid, or its card is
            another release's.
        SpecError
            If this class is not that of a release of records.
        """
        if cls.fitted_type is None:
            raise SpecError(
                "the base class cannot load a release",
                "load",
                "take CopulaRelease, MarginalsRelease or HistogramRelease",
            )
        data, card = load_release(Folder(absolute_url(path)), cls.file)
        fitted, found = cls.fitted_type.from_bytes(data, cls.file), Card.read(card, CARD)
        _check_card(found, fitted)
        folder = open_secrets(secrets)
        return cls(
            fitted=fitted,
            folder=folder,
            sha256=keep(folder, RELEASE_NAME, data),
            rows=None,
            _card=found,
        )

    def close(self) -> None:
        """Remove the key, the fitted release and the units' bounds, also from workers' memory; frames not yet computed are lost."""
        close_secrets(self.folder)
        forget_everywhere()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = "rows" if self.rows is not None else "records"
        promised = self._card.guarantee.epsilon
        return f"{type(self).__name__}({what}, mechanism={self._card.mechanism.kind!r}, epsilon={promised})"

    def _repr_html_(self) -> str:
        guarantee = self._card.guarantee
        rows = (
            (name, column["role"], column.get("kind"), column.get("epsilon"))
            for name, column in self.card["columns"].items()
        )
        title = f"{type(self).__name__}: {self._card.mechanism.kind}, {guarantee.in_short}"
        return make_html_table(title, ("column", "role", "kind", "ε"), rows, guarantee.text)

    def _replace_fitted(self, fitted: Any, mechanism_part: Mapping[str, Any]) -> Self:
        """Return the release with a fitted part and a card that differ by post-processing."""
        card = self._card.model_copy(
            update={"mechanism": self._card.mechanism.model_copy(update=dict(mechanism_part))}
        )
        return replace(self, fitted=fitted, _card=card)


def _check_card(card: Card, fitted: Any) -> None:
    """Raise InputError if a card names another mechanism or other noise than its release, or less ε than the noise costs."""
    hint = "restore both from one release, or save it again"
    if card.mechanism.kind != fitted.archive.kind:
        raise InputError("the card belongs to another mechanism than the release", CARD, hint)
    if card.accounting.events != to_dict(fitted.event):
        raise InputError("the card states different noise from that of the release", CARD, hint)
    promised, spent, delta = (
        card.guarantee.epsilon,
        card.accounting.epsilon_exact,
        card.guarantee.delta,
    )
    if promised is None or spent is None or delta is None or not 0 <= delta < 1:
        raise InputError("the card states no ε", CARD, hint)
    try:
        costs = epsilon(fitted.event, delta)
    except ArithmeticError:  # numbers that no plan has
        costs = math.inf
    if costs > min(promised, spent) * _ROUNDING:
        raise InputError("the card states less ε than the release's noise costs", CARD, hint)
