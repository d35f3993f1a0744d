"""The barrier of a release, for files and frames alike: bound units, scan, charge, draw noise, keep it, fit.

The order is fixed here, so no mechanism can draw noise before it is charged, or draw it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any, NamedTuple, Self

import pyarrow as pa

from dpdask.archive import Archived, salt
from dpdask.arrays import freeze_class
from dpdask.engine.compute import Progress
from dpdask.engine.scan import Scanned, bound_units, scan
from dpdask.engine.source import Source
from dpdask.engine.work import TableWork, keep
from dpdask.errors import DataError, InternalError, MissingError
from dpdask.io.storage import NOISY_NAME, RELEASE_NAME
from dpdask.kernels import one_thread
from dpdask.mechanisms.mechanism import Mechanism, Search
from dpdask.privacy.events import noises
from dpdask.references.counts import write_counts
from dpdask.references.reference import ColumnStatistic
from dpdask.stats.statistic import Check
from dpdask.steps import step
from dpdask.streams import stream, words


@freeze_class
class Fitted:
    """What the barrier left beside the run key; the state file keeps it."""

    release_sha256: str
    bounds_sha256: str = ""  # SHA-256 of the units' bounds, if the unit is not the row
    # The released rows of each part of the table, or how many records are written. Private unless
    # the mechanism says otherwise.
    n_released: tuple[int, ...] = field(repr=False)
    # The seal of each part, as in `Scanned`. Private.
    seals: tuple[bytes, ...] = field(default=(), repr=False)
    # For each column, how many values were outside its domain and were changed, if the barrier
    # makes the only pass over the rows. Private: only for the steward's terminal, so it is not
    # written to a file, and it is empty if a run is resumed from its state.
    changed: Mapping[str, int] = field(default_factory=dict, repr=False)

    @classmethod
    def of_pass(cls, counted: Scanned[Any], release_sha256: str, bounds_sha256: str) -> Self:
        """Return the result of a barrier whose pass over the rows counted them."""
        found = {name: getattr(counted, name) for name in ("n_released", "seals", "changed")}
        return cls(release_sha256=release_sha256, bounds_sha256=bounds_sha256, **found)


class PublicTable(NamedTuple):
    """A public table whose rows are counted in place of the table's own."""

    source: Source
    work: TableWork


@one_thread()
def fit(
    mechanism: Mechanism,
    source: Source,
    work: TableWork,
    charge: Callable[[], None],
    *,
    public: PublicTable | None = None,
    insecure: bool = False,
    progress: Progress | None = None,
) -> tuple[Fitted, TableWork]:
    """Fit a release and write it beside the run key.

    Parameters
    ----------
    mechanism
        What is released. Its parameters that depend on the number of rows are fixed already:
        `Mechanism.with_rows`.
    charge
        Called once, after the exact statistic of the first round and before the first noise value:
        from then on the run is charged.
    insecure
        Whether noise comes from the run key, which a seed made, instead of the operating system.

    Privacy
    -------
    Exact counts reach the driver and go no further: what it keeps of a long pass is encrypted with
    the run key. Central noise is drawn here, outside any graph, and is kept at once: a resumed run
    loads it.
    """
    if (public is None) == (mechanism.reference_rows == "public"):
        what = "a public table and a mechanism that counts its rows go together"
        raise InternalError(what, None, "report it")
    planned = mechanism
    *earlier, (mechanism, work, drawn) = _read_rounds(mechanism, work)
    number = len(earlier)
    if drawn is None or mechanism.releases_rows:
        work = bound_units(source, work, progress)
    counted = _count(
        *(mechanism, source, work, progress, _name_pass(planned, work, 0), number),
        drawn_before=number > 0 or drawn is not None,
    )
    counts, columns = counted.value, work.columns
    if public is not None:
        columns = public.work.columns
        asked = mechanism.statistic(columns), "reference", progress
        counts = scan(public.source, public.work, *asked, released=True).value
    if number == 0 and drawn is None and counts is not None:
        mechanism.check_counts(counts, columns)
    charge()
    read_key = work.key
    while drawn is None:
        search = mechanism.search
        measured, columns = search or mechanism, work.columns
        if counts is None and mechanism.reference_rows == "own":  # a later round
            asked = measured.statistic(columns), _name_pass(planned, work, number), progress
            released = mechanism.releases_rows
            counts = scan(source, work, *asked, released=released, number=number).value
            mechanism.check_counts(counts, columns)
        with step("drawing noise"):
            drawn = measured.draw(
                counts, columns, lambda name: stream(read_key(), name, "") if insecure else None
            )
        _check_drawn(mechanism, drawn)
        if drawn is None:
            break
        drawn = _keep_drawn(measured, drawn, work, _name_noise(number))
        if search is not None:
            mechanism, work = _take_found(mechanism, work, drawn)
            drawn, counts, number = None, None, number + 1
    with step("fitting"):
        release = mechanism.fit(counts if drawn is None else drawn, work.columns, read_key())
    # the ledger records the digest, and a reference of held-out rows holds their values
    secret = words(stream(read_key(), "fit/salt", ""), 2).tobytes()
    sha256 = keep(work.secrets, RELEASE_NAME, salt(release.to_bytes(), secret))
    work.remove_counts(number)
    if not mechanism.releases_rows:
        counted = replace(counted, n_released=(mechanism.n_records(release),))
    bounds = work.bounds_sha256 if mechanism.releases_rows else ""
    return Fitted.of_pass(counted, sha256, bounds), work


def read_measured(mechanism: Mechanism, work: TableWork) -> bytes:
    """Return the file of the noisy counts of all rounds that are published beside a release; empty where none were drawn.

    Privacy
    -------
    They were drawn with noise and charged before; `references.counts` says what a row tells.
    """

    def list_tables() -> Iterator[pa.Table]:
        seen = set()
        # a later round may have drawn more of the same tables
        for each, its_work, drawn in reversed(_read_rounds(mechanism, work)):
            if drawn is None:
                continue
            own = set()
            for table in (each.search or each).list_counts(drawn, its_work.columns):
                label = table["table"][0].as_py()
                own.add(label)
                if label not in seen:
                    yield table
            seen |= own

    return write_counts(list_tables())


def carry_on(
    source: Source,
    work: TableWork,
    release: bytes,
    charge: Callable[[], None],
    progress: Progress | None = None,
) -> Fitted:
    """Write a release that was fitted before beside the run key, to release further rows with it.

    Parameters
    ----------
    source, work
        The further rows, and the work on them, of a mechanism that is `continued`: no row is held
        out.
    charge
        Called after the rows were checked: from then on the run is charged.
    """
    work = bound_units(source, work, progress)
    statistic = Check(ColumnStatistic(codecs=work.codecs))
    counted = scan(source, work, statistic, "survey", progress, released=True, number=0)
    if sum(counted.n_released) == 0:
        raise DataError("the new files have no rows", source.where, source.hint)
    charge()
    sha256 = keep(work.secrets, RELEASE_NAME, release)
    work.remove_counts(0)
    return Fitted.of_pass(counted, sha256, work.bounds_sha256)


def _take_found(
    mechanism: Mechanism, work: TableWork, drawn: Archived
) -> tuple[Mechanism, TableWork]:
    """Return the mechanism and the work of the next round, with what this one found."""
    assert mechanism.search is not None
    following = mechanism.with_found(mechanism.search.find(drawn, work.columns))
    found = following.schema is not mechanism.schema
    return following, work.with_levels(following.schema) if found else work


def _read_rounds(
    mechanism: Mechanism, work: TableWork
) -> list[tuple[Mechanism, TableWork, Archived | None]]:
    """Return the mechanism, the work and the noise of each round up to the one that is reached, whose noise may not be drawn yet.

    An earlier driver drew and kept the noise before it died.

    Privacy
    -------
    No digest ties these files to the run, unlike the fitted release, which the state file names:
    they lie beside the run key in a folder of mode 0700, and whoever can write there can read the
    key. `read_drawn` checks that their columns and their noise are the mechanism's.
    """
    rounds: list[tuple[Mechanism, TableWork, Archived | None]] = []
    while True:
        search = mechanism.search
        try:  # to ask first whether it exists would take two more requests of a store
            kept = work.secrets.read(_name_noise(len(rounds)))
        except MissingError:
            return [*rounds, (mechanism, work, None)]
        drawn = (search or mechanism).read_drawn(kept, work.columns)
        rounds.append((mechanism, work, drawn))
        if search is None:
            return rounds
        mechanism, work = _take_found(mechanism, work, drawn)


def _name_noise(number: int) -> str:
    """Return the name of the file that keeps the noise of a round; the first is round 0."""
    return f"noisy-{number}.npz" if number else NOISY_NAME


def _keep_drawn(
    mechanism: Search | Mechanism, drawn: Archived, work: TableWork, name: str
) -> Archived:
    """Keep the noise of a round and return it, or the noise that another driver of this run kept: the first one decides."""
    data = drawn.to_bytes()
    kept = work.secrets.claim(name, data)
    return drawn if kept == data else mechanism.read_drawn(kept, work.columns)


def _check_drawn(mechanism: Mechanism, drawn: Archived | None) -> None:
    """Check that a mechanism drew central noise if it accounts for some, or releases records, and only then."""
    accounted = any(True for _ in noises(mechanism.event))
    if (drawn is not None) != (accounted or not mechanism.releases_rows):
        what = "the noise that was drawn is not the noise that is accounted for"
        raise InternalError(what, type(mechanism).__name__, "report it")


def _name_pass(planned: Mechanism, work: TableWork, number: int) -> str:
    """Return the name of a pass over the rows before the fit, as the plan has it."""
    names = [stage.partition(":")[0] for stage in planned.description.stages(work.columns)]
    return next(iter(names[number:]), "survey")


def _count(
    mechanism: Mechanism,
    source: Source,
    work: TableWork,
    progress: Progress | None,
    stage: str,
    number: int,
    *,
    drawn_before: bool,
) -> Scanned[Any]:
    """Return the exact counts and how many rows of each part are released; without a pass if neither is needed.

    Files are read although footers tell their rows: a value that the schema refuses ends the run
    before it is charged. A frame that is not computed yet is read once, when it is released.
    """
    own, rows = mechanism.reference_rows == "own", mechanism.releases_rows
    if (rows and source.is_lasting) or (own and not drawn_before):
        statistic: Any = (mechanism.search or mechanism).statistic(work.columns)
        statistic = statistic if own else Check(statistic)
        found = scan(source, work, statistic, stage, progress, released=rows, number=number)
    else:
        found = Scanned(value=None, n_released=())
    if not mechanism.n_rows_private and found.n_released and sum(found.n_released) == 0:
        if mechanism.fraction is None:
            raise DataError("the table has no rows", source.where, source.hint)
        hint = f"lower `reference.fraction`, or {source.hint}"
        raise DataError("no row would be released", source.where, hint)
    return found if own else Scanned(value=None, n_released=found.n_released, seals=found.seals)
