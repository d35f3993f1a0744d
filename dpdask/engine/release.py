"""The driver's barrier: from the reference's statistics to a fitted release, written once and named by its digest."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from dpdask.engine.compute import Progress
from dpdask.engine.survey import RECORDS, Statistic, Survey, group_key, survey, survey_units
from dpdask.engine.work import BOUNDS_NAME, NOISY_NAME, RELEASE_NAME, TableWork, keep, kept
from dpdask.errors import DataError
from dpdask.io.fragments import InputTable, discover
from dpdask.io.storage import Folder
from dpdask.mechanisms.dip.chain import ChainRelease
from dpdask.mechanisms.dip.chain_fit import fit_chain
from dpdask.mechanisms.dip.fit import ChannelKind, Cost, fit_dip
from dpdask.mechanisms.dip.fitted import FittedRelease, fitted_from_bytes, fitted_to_bytes
from dpdask.mechanisms.spending import Spending
from dpdask.privacy.events import Adjacency
from dpdask.references import CellCounts, Chain, Distribution, Histogram, Known, Reference, from_statistic
from dpdask.references.histogram import Counts, check_rows, distribution_of, histogram_event, noisy_counts
from dpdask.references.histogram_file import histograms_from_bytes, histograms_to_bytes
from dpdask.schema import Schema
from dpdask.stats.bounding import UnitBounds
from dpdask.stats.records import Records
from dpdask.streams import stream


def bound_units(table: InputTable, work: TableWork, progress: Progress | None = None) -> TableWork:
    """Return the work with its units' bounds computed and written beside the run key; as it is when the unit is a row."""
    return work if work.unit is None else with_bounds(work, survey_units(table.fragments, work, progress))


def with_bounds(work: TableWork, bounds: UnitBounds) -> TableWork:
    """Write the units' bounds beside the run key and return the work that names them."""
    assert work.unit is not None
    sha256 = keep(work.secrets, BOUNDS_NAME, bounds.to_bytes())
    return dataclasses.replace(work, unit=dataclasses.replace(work.unit, bounds_sha256=sha256))


def survey_input(table: InputTable, work: TableWork, progress: Progress | None = None) -> Survey:
    """Return the survey of the private table; without a hold-out and groups, footers that tell their rows save the pass."""
    rows = [fragment.n_rows for fragment in table.fragments]
    if work.fraction is None and work.unit is None and not work.cells and not work.group_columns and None not in rows:
        return Survey(n_released=tuple(n for n in rows if n is not None), statistics={})
    return survey("survey", table.fragments, work, progress)


def survey_public(path: str, schema: Schema, work: TableWork, progress: Progress | None = None) -> Survey:
    """Return the survey of a job's public table; it needs the privatised columns and the groups', and may have others.

    Raises
    ------
    DataError, InputError
        If the table cannot be read, or lacks a column.
    """
    public = discover(path, schema)
    return survey("reference", public.fragments, _public_work(public, work), progress)


def fit_release(
    reference: Reference,
    work: TableWork,
    statistics: Mapping[str, Statistic],
    spending: Spending,
    adjacency: Adjacency,
    channel: ChannelKind,
    cost: Mapping[str, Cost] | None,
    *,
    insecure: bool,
) -> FittedRelease:
    """Return the release that a reference and its statistics make.

    Parameters
    ----------
    reference, work, statistics, spending, adjacency, insecure
        As for `distributions`.
    channel, cost
        As for `fit_dip`.

    Raises
    ------
    SpecError, DataError
        If they do not fit the columns, or the reference is too small.

    Privacy
    -------
    As for `distributions`.
    """
    if isinstance(reference, Chain):
        return _fit_records(reference, work, statistics, spending, channel)
    references = distributions(reference, work, statistics, spending, adjacency, insecure=insecure)
    return fit_dip(references, work.codecs, spending.row, channel, cost)


def _fit_records(reference: Chain, work: TableWork, statistics: Mapping[str, Statistic], spending: Spending, channel: ChannelKind) -> ChainRelease:
    records, key = statistics[RECORDS], work.key()
    assert isinstance(records, Records)
    return fit_chain(
        records,
        work.codecs,
        spending.row,
        channel,
        order=reference.ordered(tuple(work.codecs), key),
        by=reference.by,
        group_key=group_key(key),
        min_rows=reference.min_rows,
    )


def distributions(
    reference: Reference, work: TableWork, statistics: Mapping[str, Statistic], spending: Spending, adjacency: Adjacency, *, insecure: bool
) -> Mapping[str, Distribution]:
    """Return the reference distribution of every privatised column; a `Histogram` draws its noise here, on the driver.

    Parameters
    ----------
    reference
        Where it comes from.
    work
        The table's columns.
    statistics
        Of the reference rows; not looked at when the distribution is known.
    spending, adjacency
        What a noisy histogram may cost, and who are neighbours.
    insecure
        Whether noise comes from the run key instead of the operating system.

    Raises
    ------
    SpecError, DataError
        If the reference does not fit the columns, or is too small.

    Privacy
    -------
    The noise of a histogram is drawn once, outside any graph, and saved beside the run key immediately: a resumed run loads it
    and does not draw it again. Charge the ledger before this call.
    """
    if isinstance(reference, Known):
        return {name: reference.distribution(codec) for name, codec in work.codecs.items()}
    if not isinstance(reference, Histogram):
        return {name: from_statistic(codec, statistics[name]) for name, codec in work.codecs.items()}  # type: ignore[arg-type]  # no cells, no counts of them
    counts = {name: statistic for name, statistic in statistics.items() if isinstance(statistic, CellCounts)}
    for name, cells in work.cells.items():
        check_rows(cells, counts[name], adjacency)
    noisy = _noisy_histograms(work, counts, spending, adjacency, insecure=insecure)
    public = adjacency == "replace-one"
    return {name: distribution_of(cells, noisy[name], counts[name].n_rows if public else None) for name, cells in work.cells.items()}


def _noisy_histograms(
    work: TableWork, counts: Mapping[str, CellCounts], spending: Spending, adjacency: Adjacency, *, insecure: bool
) -> Mapping[str, Counts]:
    """Return the noisy counts of every column: draw and save them, or load what an earlier driver saved before it died."""
    rows = spending.rows_per_unit
    events = {name: histogram_event(spending.reference[name], adjacency, rows) for name in work.cells}
    if work.secrets.exists(NOISY_NAME):
        sizes = {name: cells.size for name, cells in work.cells.items()}
        return histograms_from_bytes(work.secrets.read(NOISY_NAME), events, sizes, NOISY_NAME)
    noisy = {}
    for name, cells in work.cells.items():
        rng = stream(work.key(), f"reference/{name}", "") if insecure else None
        noisy[name], _ = noisy_counts(cells, counts[name], spending.reference[name], adjacency, rows_per_unit=rows, rng=rng)
    keep(work.secrets, NOISY_NAME, histograms_to_bytes(noisy, events))
    return noisy


def _public_work(public: InputTable, work: TableWork) -> TableWork:
    for name in [*work.codecs, *work.group_columns]:
        if public.schema.names.count(name) != 1 or public.schema.field(name).type != work.released.field(name).type:
            raise DataError(
                "the public reference needs this column, once, with the input's type", f"column {name!r}", "correct mechanism.reference.path"
            )
    return dataclasses.replace(work, types=public.schema, fraction=None, unit=None, cells={})


def write_release(release: FittedRelease, secrets: Folder) -> str:
    """Write a fitted release beside the run key and return its sha256."""
    return keep(secrets, RELEASE_NAME, fitted_to_bytes(release))


@functools.lru_cache(maxsize=4)
def load_release(secrets: Folder, sha256: str) -> FittedRelease:
    """Return a fitted release, read once by each process and checked against its digest.

    Raises
    ------
    InputError
        If the file is missing or another.
    """
    return fitted_from_bytes(kept(secrets, RELEASE_NAME, sha256, "the run's fitted release is not the one that was written"))
