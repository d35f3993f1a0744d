"""The plan of a job: what a run would do and promise, from file names and footers alone."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, field, replace
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dpdask.arrays import Floats, freeze_class
from dpdask.codec import Codec, LevelCodec
from dpdask.connect.spec import Local, Synchronous, Threads
from dpdask.documents import suggest
from dpdask.engine.write import Told, limit_shard_rows
from dpdask.errors import (
    BudgetError,
    DpdaskError,
    InputError,
    OutputError,
    SpecError,
    list_names,
    say_count,
)
from dpdask.io.files import TABLES, Files
from dpdask.io.footer import Ranges
from dpdask.io.fragments import InputTable, row_group_ranges
from dpdask.io.storage import Folder
from dpdask.jobs.claims import check_known
from dpdask.jobs.draft import names_repeated
from dpdask.jobs.growing import Growth, find_series
from dpdask.jobs.output import name_release
from dpdask.jobs.spec import Job, JobTable, open_table, opens_stores, raises_in_keys
from dpdask.jobs.state import RunState, name_run, open_job_run
from dpdask.mechanisms.card import (
    Card,
    CoveredContent,
    CoveredRows,
    Section,
    find_guidance,
    make_card,
)
from dpdask.mechanisms.expectations import (
    Exceed,
    Planned,
    check_counted,
    describe_promise,
    describe_seconds,
    describe_steps,
    describe_warnings,
    estimate_kept,
    exceed_counts,
    exceed_kept,
    exceed_mean,
    find_least_epsilon,
    list_noise,
    tell_date_bounds,
    warn_of_number_bounds,
)
from dpdask.mechanisms.mechanism import Mechanism, audit_mechanism
from dpdask.page import make_plan_page
from dpdask.privacy import list_cautions
from dpdask.privacy.budget import order_text
from dpdask.privacy.events import to_dict
from dpdask.stats.statistic import ColumnOrder


def list_sorted_warnings(job: Job, told: Told, n_shards: int) -> tuple[str, ...]:
    """Return the warnings after a run: about private columns that were sorted in the input, as the rows showed.

    Parameters
    ----------
    n_shards
        How many shards were released; if there is only one, all rows are shuffled together.
    """
    found = [name for name, order in told.order.items() if order.is_sorted]
    private = [name for name in found if name in job.schema.privatised]
    places = [
        f"column {name!r} is sorted in the input: {_place(job)}"
        for name in private
        if job.order == "keep" or n_shards > 1
    ]
    numbers = [
        f"the kept column {kept!r} is sorted in the input, and so is {name!r}: {kept!r} reveals the position of each row, and so roughly its "
        f"{name!r}, in whatever order rows are released; drop the column, or shuffle the table and renumber its rows"
        for name in private
        for kept in found
        if kept in job.schema.kept
    ]
    return (*places, *numbers)


def list_footer_warnings(job: Job, table: InputTable) -> tuple[str, ...]:
    """Return the warnings before a run: about private columns by which the row groups of the input are sorted.

    Only footers are read. If a footer has no statistics for a column, there is no warning about it.
    """
    if job.order is None or len(table.fragments) < 2:
        return ()
    found = row_group_ranges(
        table, job.schema.privatised, lambda ranges: not _order(ranges).is_mixed
    )
    sorted_ = "the row groups of the input are sorted by column"
    return tuple(
        f"{sorted_} {name!r}: {_place(job)}"
        for name, ranges in found.items()
        if _order(ranges).is_sorted
    )


def _order(ranges: Ranges) -> ColumnOrder:
    return ColumnOrder.identity().merge(*(ColumnOrder.of_range(low, high) for low, high in ranges))


def list_partition_warnings(job: Job, table: InputTable) -> tuple[str, ...]:
    """Return the warnings about private columns by which the input is partitioned: all rows of a file have the same value."""
    if job.order is None or len(table.fragments) < 2:
        return ()
    constant = {name for fragment in table.fragments for name, _ in fragment.constants}
    return tuple(
        f"the files of the input hold one value of column {name!r} each: {_place(job)}"
        for name in job.schema.privatised
        if name in constant
    )


def list_unit_warnings(job: Job, table: InputTable) -> tuple[str, ...]:
    """Return the warning about columns that seem to name persons, where the unit is the row."""
    if job.file.privacy is None or job.file.privacy.unit_column is not None:
        return ()
    private = job.schema.privatised
    named = [name for name in table.schema.names if name not in private and names_repeated(name)]
    if not named:
        return ()
    told = "the unit is the row: several rows of one person, or of another unit, are protected one by one"
    names = f"if a column names units with several rows ({list_names(named, 8)} may, by the name)"
    return (f"{told}; {names}, set `privacy.unit: {{column: …, max_rows: …}}`",)


def _place(job: Job) -> str:
    """Return what the order of the rows reveals about a sorted column, and the hint."""
    if job.order == "keep":
        return "a row's position reveals roughly what its value was, whatever the noise; set output.order: shuffled, or shuffle the table first"
    return "the rows of one shard had similar values, and their released values together reveal roughly which; shuffle the table before the run"


# of one core of 2.5 GHz; docs/reference/cost.md has the runs that they were taken from
_READ_BYTES = 5e8  # decoded Parquet bytes that are read and counted in a second
_READ_TEXT = 1e8  # bytes of CSV
_WRITE_BYTES = 1.5e8  # decoded bytes that are randomised, shuffled and written in a second
_RECORD_LEVELS = 3e7  # records times levels of all columns that are drawn in a second
_FIT_SECONDS = 2.0
_CHANNEL_SECONDS = 0.7  # of a fit, for each column of a released row
_FIT_LEVELS = (
    2e-5  # seconds, times the square of the number of levels, of a fit to pairs of columns
)
_STAGED_SECONDS = 0.02  # of the driver, for each task
_PAGE_SECONDS = 3.0  # of the commit
COMPILING_SECONDS = 20  # the first time on a machine, beside all that
_TARGETS = "give count_margin, share, mean.COLUMN, relative.COLUMN or kept.COLUMN"
_ADAPTIVE_LEVELS = 20
_FOUND_LEVELS = 500  # that a search finds: few columns have as many as they may


def expect_duration(
    job: Job, opened: JobTable, stages: tuple[str, ...], n_records: int | None
) -> tuple[tuple[float, ...], int | None]:
    """Return about how many seconds each stage takes, at least 1, and on how many workers.

    What is shown adds up. Nothing is known if the number of workers is not. Of columns whose levels
    are found, `_FOUND_LEVELS` are taken.

    Parameters
    ----------
    n_records
        How many records are written, if no row is and that is known.
    """
    n_workers: int | None = getattr(job.cluster, "workers", None)
    if isinstance(job.cluster, Synchronous):
        n_workers = 1
    elif isinstance(job.cluster, Threads | Local):
        n_threads = job.cluster.threads_per_worker if isinstance(job.cluster, Local) else 1
        n_workers = (n_workers or os.cpu_count() or 1) * n_threads
    if n_workers is None:
        return (), None
    table, work = opened.table, opened.work
    n_fragments = max(1, len(table.fragments))
    at_once = min(n_workers, n_fragments)
    n_bytes = sum(fragment.n_bytes_decoded or fragment.n_bytes for fragment in table.fragments)
    to_find = opened.mechanism.schema.discovered
    n_levels = sum(
        _FOUND_LEVELS
        if name in to_find
        else codec.n_levels
        if codec.has_levels
        else _ADAPTIVE_LEVELS
        for name, codec in work.columns.codecs.items()
    )
    read = (
        n_bytes / (_READ_TEXT if table.format == "csv" else _READ_BYTES) / at_once
        + _STAGED_SECONDS * n_fragments
    )
    if opened.mechanism.releases_rows:
        fit = _FIT_SECONDS + _CHANNEL_SECONDS * len(opened.mechanism.spending.row)
        write = n_bytes / _WRITE_BYTES / at_once + _STAGED_SECONDS * n_fragments
    else:
        fit = _FIT_SECONDS + _FIT_LEVELS * n_levels**2
        n_written = n_records or table.n_rows or 0
        n_shards = max(1, -(-n_written // job.file.output.rows_per_shard))
        write = n_written * n_levels / _RECORD_LEVELS / min(n_workers, n_shards)
    named = {"fit": fit, "write": write, "commit": _PAGE_SECONDS + _STAGED_SECONDS * n_fragments}
    seconds = (named.get(stage.partition(":")[0], read) for stage in stages)
    return tuple(float(max(1, round(each))) for each in seconds), n_workers


_CONTINUED = (
    "survey: read the new rows; check and count them",
    "write: randomise each new fragment by the fitted release that the series keeps, and stage its shards",
)
_FORMATS = {
    "parquet": "Parquet",
    "csv": "CSV",
    "delta": "Delta version",
    "iceberg": "Iceberg snapshot",
}
_MODES = {
    "error": "as {table}",
    "append": "appended to {table}",
    "overwrite": "in place of what {table} holds",
}


@freeze_class
class Plan(Planned):
    """What a run would do."""

    name: str
    n_fragments: int  # the size of the input; the rows are None for files without footers (CSV)
    n_files: int
    n_rows: int | None
    n_bytes: int
    # `parquet`, `csv`, `delta` or `iceberg`; the Delta version or the Iceberg snapshot, or None.
    input_format: str
    input_version: int | None
    n_workers: int | None  # how many threads of workers there are; None if that is not known
    # For each privatised column, how values outside its domain are treated, unless they are
    # refused.
    outside: dict[str, str]
    refusing: tuple[str, ...]  # the privatised columns in which such a value is refused
    # The bounds of each privatised column of dates or times, as dates.
    date_bounds: dict[str, tuple[str, str]]
    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    # About how many rows are released; None if no footer tells, or if units are bounded.
    released_rows: int | None
    n_shards: int | None  # at most how many shards, or None
    output: str  # where, as what, and what becomes of what a table holds
    output_format: str
    output_mode: str
    is_finished: bool  # whether there is nothing to do: the job is released, or no rows are new
    insecure: bool  # whether the noise comes from a seed
    is_linked: bool = False  # whether the release is a table of persons and one of their rows
    # Of a growing table: its `releases`, `released_rows` and `released_files`, the `new_files` and
    # `new_rows` (None if no footer tells), the `epsilon` of this release for one unit and of the
    # whole `series_epsilon` after it. Else None.
    series: dict[str, Any] | None = None
    # Of persons with their rows, how far noise moves their tables; see `Mechanism.expected_errors`.
    expected_errors: dict[str, Any] = field(default_factory=dict)
    # The errors that were asked for, and the least `epsilon` that meets them; empty if none were.
    target: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        refusal = (
            None
            if self.refusal is None
            else {"exit_code": self.refusal.exit_code, "why": str(self.refusal)}
        )
        return asdict(replace(self, refusal=None)) | {"refusal": refusal}

    def __repr__(self) -> str:
        rows = "an unknown number of rows" if self.n_rows is None else say_count(self.n_rows, "row")
        size = f"{self.n_bytes / 1e6:,.1f} MB, {say_count(self.n_fragments, 'fragment')}"
        files = f"{say_count(self.n_files, 'file')} of {_FORMATS[self.input_format]}"
        version = "" if self.input_version is None else f" {self.input_version}"
        takes, released = [], ""
        if self.n_workers:
            seconds, workers = sum(self.seconds), say_count(self.n_workers, "worker")
            took = f"roughly {describe_seconds(seconds)} on {workers}, once they have started"
            compiles = f"compiles for about {COMPILING_SECONDS} s more"
            takes = [f"  takes     {took}; the first run on a machine {compiles}"]
        treated: dict[str, list[str]] = {}
        for name, treatment in self.outside.items():
            clipped = treatment == "clip" and name in self.date_bounds
            span = f" to {'..'.join(self.date_bounds[name])}" if clipped else ""
            treated.setdefault(treatment + span, []).append(name)
        if self.refusing:
            treated["refuse (one such value stops the run)"] = list(self.refusing)
        outside = [f"  outside   {list_names(names, 8)}: {told}" for told, names in treated.items()]
        if self.released_rows is not None and self.n_shards is not None:
            shards = say_count(self.n_shards, "shard")
            released = f"about {say_count(self.released_rows, 'row')} in at most {shards}, "
        table = TABLES.get(self.output_format)
        place = "" if table is None else f", {_MODES[self.output_mode].format(table=table)}"
        place += " each for persons and their rows" if place and self.is_linked else ""
        done = "; it is finished: a run changes nothing" if self.is_finished else ""
        kept, dropped = (", ".join(each) or "nothing" for each in (self.kept, self.dropped))
        lines = [
            self.name + (" (INSECURE: seeded)" if self.insecure else ""),
            *describe_warnings(self),
            f"  input     {rows}, {size}, {files}{version}",
            *_describe_series(self.series),
            *_describe_target(self.target),
            *takes,
            *describe_steps(self),
            *outside,
            f"  kept      {kept}; dropped: {dropped}",
            f"  output    {released}{self.output}{place}{done}",
            *describe_promise(self),
        ]
        return "\n".join(lines)


def _describe_series(series: dict[str, Any] | None) -> list[str]:
    if series is None:
        return []
    releases = say_count(series["releases"], "release")
    rows, files = (say_count(series[f"released_{each}s"], each) for each in ("row", "file"))
    new, cost = "nothing new: a run changes nothing", ""
    if series["new_files"]:
        new = say_count(series["new_files"], "new file")
    if series["epsilon"] is not None:
        together = f"all together {series['series_epsilon']:.6g}"
        cost = f"; this one costs a unit ε {series['epsilon']:.6g}, {together}"
    return [f"  series    {releases} with {rows} of {files}; {new}{cost}"]


def _describe_target(target: dict[str, float]) -> list[str]:
    asked = ", ".join(f"{name} {each:g}" for name, each in target.items() if name != "epsilon")
    return (
        [f"  target    {asked}: met from privacy.epsilon {target['epsilon']!r}"] if target else []
    )


@raises_in_keys
@opens_stores
def plan_job(job: Job) -> Plan:
    """Return the plan of a job; it reads footers, never rows.

    Any error that a run would end with, other than these, is in `Plan.refusal`.
    """
    job, state, opened, series = _open(job)
    is_finished, refusal = _foresee(job, state, opened)
    table, mechanism = opened.table, opened.mechanism
    private = {name: job.schema.columns[name] for name in job.schema.privatised}
    expected = expect(job, opened)
    stages = (*expected.stages, _describe_commit(job, mechanism))
    seconds, n_workers = expect_duration(job, opened, stages, expected.n_rows)
    spends = not is_finished and not _is_charged(job, state)
    fits = not spends or not isinstance(refusal, BudgetError)
    where = opened.sample_place, opened.hide_sample
    ledger = job.account.describe_balances(*where, spends=spends, fits=fits)
    warnings = _list_warnings(job, opened, expected)
    row = mechanism.budget is not None and mechanism.budget.unit == "row"
    if mechanism.continued and row and ledger is not None and ledger["after"] > ledger["before"]:
        why = "a release was aborted after its noise was drawn, the series was continued from a copy, or the ledger does not know the series"
        if series is not None and series.get("again"):
            why = "it may hold rows that were released before"
        warnings.insert(0, f"this release is charged in full: {why}")
    return Plan(
        name=job.file.name,
        n_fragments=len(table.fragments),
        n_files=table.n_files,
        n_rows=table.n_rows,
        n_bytes=table.n_bytes,
        input_format=table.format,
        input_version=table.version,
        stages=stages,
        seconds=seconds,
        n_workers=n_workers,
        noise=list_noise(mechanism.event),
        epsilons=dict(mechanism.spending.row),
        reference_epsilons=dict(mechanism.spending.reference),
        ledger=ledger,
        outside={
            name: column.outside_in_words
            for name, column in private.items()
            if column.outside_in_words != "refuse"
        },
        refusing=tuple(name for name, column in private.items() if column.outside == "refuse"),
        date_bounds=tell_date_bounds(opened.work.view.own),
        kept=job.schema.kept,
        dropped=tuple(
            filter(job.schema.is_dropped, dict.fromkeys([*job.schema.columns, *table.schema.names]))
        ),
        guarantee=mechanism.description.guarantee(job.file.output.order),
        released_rows=expected.n_rows,
        n_shards=expected.n_shards,
        output=job.output_url,
        output_format=job.file.output.format,
        output_mode=job.file.output.mode,
        refusal=refusal,
        is_finished=is_finished,
        insecure=job.file.insecure_seed is not None,
        is_linked=mechanism.links_tables,
        warnings=tuple(warnings),
        expectations=mechanism.description.expectations(opened.work.columns),
        expected_errors=mechanism.expected_errors,
        series=series,
    )


def _describe_commit(job: Job, mechanism: Mechanism) -> str:
    """Return the last stage of a run, in words."""
    written = TABLES.get(job.file.output.format)
    appear = "all shards appear at once" + (f" in one version of {written}" if written else "")
    if written and mechanism.links_tables:
        appear = f"the rows, and then the persons, appear as {written} each, and then both as one release"
    return f"commit: {appear}, with manifest and release card; the run key is destroyed"


def make_page_of_plan(job: Job, planned: Plan) -> str:
    """Return the page that people sign before a run: what would be promised, and what to expect. No row is read for it, but its warnings may tell what footers say of private columns."""
    mechanism, columns = job.mechanism, job.mechanism.declared.columns
    described, left_out = mechanism.description, mechanism.fraction or 0.0
    kept, by_row = {"role": "kept"}, mechanism.spending.row
    stated = {
        name: {
            "role": "privatised",
            "epsilon": by_row.get(name),
            "outside": column.outside_in_words,
        }
        | column.model_dump(include={"kind", "nulls", "levels", "bounds"}, exclude_none=True)
        | ({"levels": None, "from": "found in the run"} if column.levels == "discover" else {})
        for name, column in columns.items()
        if column.role == "privatise"
    }
    exact, of = not mechanism.n_rows_private, "rows"
    if mechanism.budget is not None and mechanism.budget.unit_column is not None:
        of = "units"
    section = Section(
        budget=mechanism.budget,
        text=planned.guarantee,
        protected=CoveredRows(who=described.protected, fraction=1.0 - left_out, of=of),
        unprotected=CoveredRows(who=described.unprotected, fraction=left_out, of=of),
        mechanism=job.file.mechanism.model_dump(mode="json"),
        columns=stated | dict.fromkeys(planned.kept if mechanism.releases_rows else (), kept),
        accounting={"composition": "", "epsilon_exact": None, "events": to_dict(mechanism.event)},
        order="" if job.order is None else order_text(job.order),
        public_rows=planned.n_rows if exact else None,
    )
    card = make_card(section, name=planned.name, insecure=planned.insecure)
    changes: dict[str, Any] = {"dropped": list(planned.dropped), "about": job.file.about}
    if find_guidance(card).shape(card) == "ranges":  # then the words are about values, not rows
        covered, uncovered = (
            CoveredContent(what=words) for words in (described.protected, described.unprotected)
        )
        whole = {"epsilon_private": list(by_row)} if by_row else {}
        changes["guarantee"] = card.guarantee.model_copy(
            update={"protected": covered, "unprotected": uncovered, **whole}
        )
    return make_plan_page(card.model_copy(update=changes), planned).decode()


def _list_warnings(job: Job, opened: JobTable, expected: Expected) -> list[str]:
    """Return what to consider before a run."""
    budget = opened.mechanism.budget
    found = [
        *([] if budget is None else list_cautions(budget, None)),
        *warn_of_number_bounds(job.schema, opened.work.view.own),
        *expected.warnings,
        *list_unit_warnings(job, opened.table),
    ]
    return found if job.account.is_strict else [*found, *list_footer_warnings(job, opened.table)]


@raises_in_keys
@opens_stores
def find_epsilon(job: Job, targets: Mapping[str, str]) -> float:
    """Return the least ε of a job, up to 1 %, at which its noise meets targets; from public facts alone.

    Parameters
    ----------
    targets
        `count_margin`: what the noise of each published count exceeds with a probability of at most
        5 %, in rows. `share`: the same as a share of the rows, whose number must be public.
        `mean.COLUMN`: the same of the mean of a column whose levels are numbers, in its unit, and
        `relative.COLUMN`: as a part of that mean, where all levels have one sign. `kept.COLUMN`: how
        much of a value a released row keeps, in (0, 1), as a plan estimates it.
    """
    asked = [_read_target(job, name, text) for name, text in targets.items()]
    return find_least_epsilon(
        job.mechanism, lambda mechanism: max(each(mechanism) for each in asked), "--target"
    )


def warn_of_targets(job: Job, targets: Iterable[str]) -> list[str]:
    """Return a warning for each target that depends on the rows, too."""
    columns = (name.partition("kept.")[2] for name in targets)
    what = "is met if all levels are equally frequent; of a column in which most rows share a level, a released row keeps less"
    return [
        f"the target kept.{column} {what}"
        for column in columns
        if column and job.schema.columns[column].has_levels
    ]


def _read_target(job: Job, name: str, text: str) -> Exceed:
    """Return what a target allows of the noise."""
    where, value, (kind, _, column) = f"--target {name}", 0.0, name.partition(".")
    of_column = kind in ("mean", "relative", "kept")
    if of_column and column not in job.schema.privatised:
        hint = suggest(column, job.schema.privatised, f"write {kind}.COLUMN=NUMBER")
        raise SpecError("it names no privatised column", where, hint)
    if not of_column and name not in ("count_margin", "share"):
        hint = suggest(name, ["count_margin", "share", "mean", "kept"], _TARGETS)
        raise SpecError("is not a target", where, hint)
    with suppress(ValueError):
        value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise SpecError("a number above 0 is expected", where, f"as in {name}=0.5")
    if kind == "kept":
        return _read_kept(job, column, value, where)
    check_counted(job.mechanism, where)
    if name == "count_margin":
        return partial(exceed_counts, most=value)
    opened = open_table(job, Folder(job.output_url))
    if not (n_rows := opened.public_rows):
        what = "the number of rows is private, or not known before they are read"
        raise SpecError(what, where, "give count_margin")
    if name == "share":
        return partial(exceed_counts, most=value * n_rows)
    columns = opened.work.columns
    if column not in columns.codecs or job.mechanism.find_counted(column, columns) is None:
        what = "no table that is released has the column in whole rows"
        raise SpecError(what, where, "count one, or give count_margin")
    if job.schema.columns[column].discovers:
        what = "its levels are found in the run, so the error of their mean is not known before"
        raise SpecError(what, where, "give count_margin or share, or list its levels")
    numbers = _list_numbers(columns.codecs[column], where)
    least = max(numbers.min(), -numbers.max(), 0.0)  # of the absolute values of means
    if kind == "relative" and not least:
        what = "a level is 0, or levels have both signs, so the mean may be 0"
        raise SpecError(what, where, f"give mean.{column} in its unit")
    margin = value * least if kind == "relative" else value
    return partial(
        exceed_mean,
        column=column,
        columns=columns,
        numbers=numbers,
        n_rows=n_rows,
        margin=margin,
    )


def _read_kept(job: Job, column: str, kept: float, where: str) -> Exceed:
    """Return how much of a column's values a released row is asked to keep."""
    if job.mechanism.budget is None or not job.mechanism.spending.row:
        what = "no row is released with noise of its own"
        raise SpecError(what, where, "give count_margin, or take the mechanism dip")
    codecs = open_table(job, Folder(job.output_url)).work.columns.codecs
    epsilon, channel = job.mechanism.spending.row.get(column), job.mechanism.spec.channel
    if epsilon is None or estimate_kept(codecs[column], epsilon, channel) is None:
        what = "how much of it a row keeps is not known before the run"
        raise SpecError(what, where, "ask about another column")
    if kept >= 1.0:
        raise SpecError("a number below 1 is expected", where, f"as in kept.{column}=0.5")
    return partial(exceed_kept, column=column, codec=codecs[column], kept=kept)


def _list_numbers(codec: Codec, where: str) -> Floats:
    """Return the levels of a column as numbers; refuse a column whose mean depends on more than their counts."""
    hint = "give count_margin or share"
    if not isinstance(codec, LevelCodec) or codec.nulls:
        what = (
            "the error of a mean depends on where the rows lie, except that of levels without nulls"
        )
        raise SpecError(what, where, hint)
    levels = codec.levels.to_pylist()
    if not all(isinstance(each, int | float | Decimal) for each in levels):
        raise SpecError("its levels are no numbers", where, hint)
    return np.array(levels, dtype=np.float64)


def _open(job: Job) -> tuple[Job, RunState, JobTable, dict[str, Any] | None]:
    """Return the job of the next release, its state, what it holds, and what is told of a series."""
    if not job.file.growing:
        state = open_job_run(job)
        return job, state, open_table(job, state.folder), None
    growth = Growth(job)
    job, state = growth.job, growth.state
    opened = growth.open_next(None if state.is_committed() else state.find_unfinished(job.digest))
    return growth.extend(opened.table), state, opened, growth.describe_plan(opened)


def _is_charged(job: Job, state: RunState) -> bool:
    """Return whether the run that would go on is charged already."""
    with suppress(DpdaskError):
        unfinished = state.find_unfinished(job.digest)
        charged = ("intend", "draw", "commit")
        return unfinished is not None and job.account.read().find_kind(unfinished.run_id) in charged
    return False


def _foresee(job: Job, state: RunState, opened: JobTable) -> tuple[bool, DpdaskError | None]:
    """Return whether a run would find nothing to do, and the error that it would end with, if any."""
    try:
        return raises_in_keys(_check_run)(job, state, opened), None
    except SpecError:
        raise  # a job that is wrong has no plan
    except DpdaskError as error:
        return False, error


def _check_run(job: Job, state: RunState, opened: JobTable) -> bool:
    """Check what a run would check before it reads a row, in the same order, and change nothing; return whether it is finished."""
    if job.file.growing or job.may_repeat:
        check_known(job, state)
    if job.file.growing:
        finished = state.publication.count() > 0 and not opened.table.fragments
    else:
        names = job.name_releases(opened.table.fingerprint if job.may_repeat else "")
        finished = state.find_release(names.find(state.publication)) is not None
        if finished:
            check_known(job, state)
    if not finished:
        unfinished = state.find_unfinished(job.digest)
        job.account.check_room(name_run(unfinished))
        opened.check(job, state.publication)
        state.records.check()
        if unfinished is None:
            state.keys.check()
        state.find_resumed(job, opened.table)
        if not job.account.is_strict:  # else the refusal is counted, so it is the run's
            opened.check_copies()
    return finished


class Expected(NamedTuple):
    """What a run would do, as far as footers tell."""

    stages: tuple[str, ...]  # in order, in words; without the commit, which is every run's last
    n_rows: int | None  # about how many rows come out, or None
    n_shards: int | None  # at most how many shards, or None
    warnings: tuple[str, ...]  # what a steward should consider before the run


def expect(job: Job, opened: JobTable) -> Expected:
    """Return what a run on a table would do; no row is read."""
    mechanism, table, work = opened.mechanism, opened.table, opened.work
    described, columns, n_rows = mechanism.description, work.columns, table.n_rows
    own = _CONTINUED if mechanism.continued else described.stages(columns)
    stages = (*work.unit_stages, *own)
    n_shards, output = None, job.file.output
    if not mechanism.releases_rows:
        n_rows = described.n_expected(opened.public_rows)
        n_shards = None if n_rows is None else -(-n_rows // output.rows_per_shard)
    elif n_rows is not None:
        written = work.add_weight(mechanism.find_written(work.released))
        most = limit_shard_rows(written, output.rows_per_shard, output.order)
        # how many rows the units have decides, and no footer tells
        fraction = None if work.unit is not None else work.fraction
        n_shards = most_shards(n_rows, fraction, len(table.fragments), most)
        n_rows = None if work.unit is not None else round(n_rows * (1 - (fraction or 0.0)))
        if output.partition_by is not None:  # as many as its values, and no footer tells
            n_shards = None
    cautions = described.cautions(columns, opened.public_rows)
    warnings = [*table.left_out]
    public = mechanism.public_table
    if public is not None and not mechanism.continued and public.format != "delta":
        # it is told when the table is read; a run that was fitted needs it no more
        with suppress(DpdaskError):
            left_out = Files(public.format).list_files(str(public.path), job.schema).left_out
            warnings += [f"public table: {each}" for each in left_out]
    warnings += [*cautions, *list_partition_warnings(job, table)]
    if job.may_repeat and job.ledger is None and job.epsilon is not None:
        again = f"each run on another version of the input releases all its rows once more, for ε = {job.epsilon!r} again"
        repeats = f"{again}; without a ledger nothing adds it up"
        warnings.append(f"output.mode {output.mode}: {repeats}")
    return Expected(stages=stages, n_rows=n_rows, n_shards=n_shards, warnings=tuple(warnings))


def most_shards(n_rows: int, fraction: float | None, n_fragments: int, per_shard: int) -> int:
    """Return how many shards `lay_out` makes at most; with a hold-out, but for a chance of exp(-40) (Hoeffding).

    Two neighbouring tasks hold more than a shard together, or read more than four shards' rows, so
    there are fewer than twice as many tasks as that fills; cutting the large ones adds at most one
    shard for each full one.
    """
    most = (
        n_rows
        if fraction is None
        else min(n_rows, math.ceil(n_rows * (1 - fraction) + math.sqrt(20 * n_rows)))
    )
    return (
        min(n_fragments, 2 * -(-most // per_shard) + 2 * -(-n_rows // (4 * per_shard)))
        + most // per_shard
    )


@raises_in_keys
@opens_stores
def audit_job(job: Job, *, n_runs: int = 20_000) -> dict[str, Any]:
    """Return, for each column and each central measurement of a job, what is claimed and what is found.

    Parameters
    ----------
    n_runs
        How often each central measurement is drawn, on each of two neighbouring inputs.
    """
    opened = open_table(job, Folder(job.output_url))
    card = _card(job, opened.table.fingerprint)
    return {
        "name": job.file.name,
        **audit_mechanism(opened.mechanism, opened.work.columns, card, n_runs=n_runs),
    }


def _card(job: Job, fingerprint: str) -> dict[str, Any] | None:
    """Return the card of a finished job's own release of the input, or None if there is none or it was changed."""
    job = find_series(job) if job.file.growing else job
    publication = job.open_output()
    try:
        if job.file.growing:
            release = name_release(job.digest, 0)
        else:
            release = job.name_releases(fingerprint).find(publication)
        manifest = publication.find(release)
        data = b"" if manifest is None else publication.read_card(release)
        return (
            Card.read(data, "the card").to_dict()
            if manifest is not None and hashlib.sha256(data).hexdigest() == manifest.card_sha256
            else None
        )
    except (InputError, OutputError):
        return None
