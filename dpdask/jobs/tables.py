"""A job's input table with the mechanism that runs on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Concatenate, ParamSpec, TypeVar

from dpdask.engine.account import Hide
from dpdask.engine.cluster import share_options
from dpdask.engine.fit import Fitted, PublicTable
from dpdask.engine.source import FileSource
from dpdask.engine.work import TableWork, make_public_work, make_table_work
from dpdask.errors import DataError, SpecError
from dpdask.io.delta import Delta
from dpdask.io.files import Files
from dpdask.io.fragment import Fragment
from dpdask.io.fragments import InputTable, check_copies, discover, find_copies, takes_in
from dpdask.io.storage import Folder
from dpdask.jobs.output import Publication
from dpdask.jobs.run_keys import hide_name
from dpdask.jobs.spec import Job
from dpdask.mechanisms.card import Card, InputVersion
from dpdask.mechanisms.mechanism import Mechanism
from dpdask.references.reference import TableReference
from dpdask.schema import Schema
from dpdask.steps import step

Args = ParamSpec("Args")
Result = TypeVar("Result")


def opens_stores(
    function: Callable[Concatenate[Job, Args], Result],
) -> Callable[Concatenate[Job, Args], Result]:
    """Return a function of a job that opens the job's stores with its options, here and on the workers."""

    @functools.wraps(function)
    def opening(job: Job, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with share_options(job.stores):
            return function(job, *args, **kwargs)

    return opening  # type: ignore[return-value]  # `wraps` takes the first argument for a named one


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTable:
    """A job's input, as its file names and footers tell it, checked against the mechanism."""

    table: InputTable
    mechanism: Mechanism  # the job's, with its parameters that depend on the number of rows fixed
    work: TableWork
    source: FileSource  # the input as the engine reads it

    @property
    def public_rows(self) -> int | None:
        """The number of rows if it is public and known."""
        return None if self.mechanism.n_rows_private else self.table.n_rows

    @property
    def sample_place(self) -> str:
        """What the choice of held-out rows depends on beside its key: the unit and its type, or the positions of the rows."""
        return self.work.unit_place or "\n".join(fragment.id for fragment in self.table.fragments)

    @property
    def hide_sample(self) -> Hide | None:
        """A function that hides a hold-out's name where files' digests choose its rows; None for units, whose names depend on the schema alone."""
        return hide_name if self.work.unit is None else None

    def public_table(self) -> PublicTable | None:
        """Return the public table whose rows are counted, if there is one."""
        public = self.mechanism.public_table
        if public is None:
            return None
        path = str(public.path)
        found = discover_public(public, self.mechanism.schema)
        check_apart(found, {each.version for each in self.table.fragments})
        check_copies(found.fragments, apart=found.schema.names)
        private = {fragment.url for fragment in self.table.fragments}
        if any(
            other.url in private
            for _, other in find_copies(
                _strip(found.fragments), _strip(self.table.fragments), apart=()
            )
        ):
            raise _refuse_shared()
        return PublicTable(
            source=FileSource(found.fragments, path), work=make_public_work(self.work, found.schema)
        )

    def tell_version(self, card: Card) -> Card:
        """Return the card with the input's version, if the input is a Delta or Iceberg table."""
        table = self.table
        if table.version is None:
            return card
        return card.model_copy(
            update={
                "input": InputVersion.model_validate(
                    {"format": table.format, "version": table.version}
                )
            }
        )

    def check_copies(self) -> None:
        """Check that no file is a copy of another one; values of folders that nothing is made of tell no files apart."""
        check_copies(
            self.table.fragments,
            self.table.released,
            apart={*self.work.released.names, *self.work.unit_columns},
        )

    def check(self, job: Job, publication: Publication) -> None:
        """Check that there is something to release, and that the output can hold it."""
        if self.public_rows == 0:
            raise DataError(
                "the table has no rows", job.file.input.path, "check the job's input.path"
            )
        publication.check(self.mechanism.find_written(self.work.released))

    def with_bounds(self, fitted: Fitted) -> TableWork:
        """Return the work with the units' bounds that the barrier left."""
        unit = self.work.unit
        return (
            self.work
            if unit is None
            else replace(self.work, unit=replace(unit, bounds_sha256=fitted.bounds_sha256))
        )


def discover_public(public: TableReference, schema: Schema) -> InputTable:
    """Return a public table, from its file names, footers and metadata alone."""
    return discover(
        str(public.path),
        schema,
        Delta(public.version) if public.format == "delta" else Files(public.format),
    )


def check_apart(public: InputTable, versions: Set[str]) -> None:
    """Check that a public table shares no file with the private one; no row is read."""
    if {each.version for each in public.fragments} & versions:
        raise _refuse_shared()


def _refuse_shared() -> SpecError:
    what = "the public table shares a file with the private one, so protected rows would be their own reference"
    return SpecError(what, "`reference.path`", "name another table")


def _strip(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Return fragments without the values of partition columns."""
    return [replace(fragment, constants=()) for fragment in fragments]


@step("looking at the input")
def open_table(
    job: Job, secrets: Folder, choose: Callable[[InputTable], InputTable] | None = None
) -> JobTable:
    """Return a job's input with its mechanism; no row is read.

    Parameters
    ----------
    choose
        Returns the part of the table that is released; all of it if None.
    """
    table = discover(
        job.input_url, job.schema, job.file.input.table_format, growing=job.file.growing
    )
    if takes_in(
        table.location, job.output_url
    ):  # only its catalog knows where an Iceberg table lies
        raise SpecError("the output lies inside the input", "output.path", "choose another folder")
    if choose is not None:
        table = choose(table)
    mechanism = job.mechanism.with_rows(
        lambda: None if job.mechanism.n_rows_private else table.n_rows
    )
    work = make_table_work(mechanism, table.schema, secrets)
    return JobTable(
        table=table,
        mechanism=mechanism,
        work=work,
        source=FileSource(table.fragments, job.file.input.path),
    )
