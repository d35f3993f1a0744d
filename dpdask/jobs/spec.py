"""The job file: what to release, from where, to where, with what promise; and the table it names."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from functools import partial, wraps
from hashlib import blake2b
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import pyarrow as pa
from pydantic import (
    Field,
    ValidationInfo,
    create_model,
    field_validator,
)

from dpdask.arrays import freeze_class
from dpdask.connect.spec import ClusterBlock, Threads, place_files
from dpdask.documents import (
    Document,
    Text,
    check_all,
    join_errors,
    parse_value,
    parse_yaml,
    read_text,
    validate,
)
from dpdask.engine.account import Account, Hide, LedgerPlace
from dpdask.engine.fit import PublicTable
from dpdask.engine.partitions import check_partitions
from dpdask.engine.source import FileSource, LinkedSource
from dpdask.engine.work import TableWork, make_public_work, make_table_work
from dpdask.errors import CombinedSpecError, DataError, DpdaskError, SpecError
from dpdask.io.changes import Changed
from dpdask.io.files import Files, TableFormat, name_format
from dpdask.io.filesystems import Options, by_root, check_options, use_options
from dpdask.io.fragment import Fragment
from dpdask.io.fragments import InputTable, check_copies, discover, find_copies, takes_in
from dpdask.io.lakes import Delta
from dpdask.io.storage import Folder, absolute_url
from dpdask.jobs.inputs import Input, Parents, join_tables, link_tables
from dpdask.jobs.output import LinkedTarget, Output, Publication, Target
from dpdask.jobs.run_keys import ReleaseNames, hide_name
from dpdask.mechanisms.card import About, load_installed
from dpdask.mechanisms.copula.people import CHILDREN, PARENTS
from dpdask.mechanisms.expectations import check_counted, exceed_counts, find_least_epsilon
from dpdask.mechanisms.marginals.people import CountsPersons
from dpdask.mechanisms.mechanism import Mechanism, Spec
from dpdask.mechanisms.registry import bind, parameters, spec_union
from dpdask.privacy import Budget
from dpdask.privacy.events import RowOrder, Series
from dpdask.references.reference import TableReference
from dpdask.schema import Schema
from dpdask.steps import step

Args = ParamSpec("Args")
Result = TypeVar("Result")

_PRIVACY = {"epsilon", "delta", "adjacency", "unit"}
_PARAMETER = re.compile(r"`(?P<root>[a-z_]+)(?P<rest>(?:\.[^`]*)?)`")


def name_keys(text: str | None) -> str | None:
    """Return a text with its parameters as keys of a job: `epsilon` becomes privacy.epsilon, `bins` mechanism.bins."""
    return None if text is None else _PARAMETER.sub(_key, text)


def _key(found: re.Match[str]) -> str:
    root, rest = found["root"], found["rest"]
    if root in _PRIVACY:
        return f"privacy.{root}{rest}"
    return f"mechanism.{root}{rest}" if root in parameters() else found[0]


def raises_in_keys(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Return a function whose errors name the keys of a job."""

    @wraps(function)
    def speaking(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except DpdaskError as error:
            error.what, error.where, error.hint = (
                name_keys(error.what) or "",
                name_keys(error.where),
                name_keys(error.hint),
            )
            raise

    return speaking


_BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss"}


class Lineage(Document):
    """Events of each run for OpenLineage; where they go, OpenLineage's own configuration says."""

    namespace: str = Field(default="dpdask", min_length=1)
    """The name of the group of jobs."""


Repeated = Literal["refuse", "skip", "charge"]


class Growing(Document):
    """How a growing table grows."""

    changed: Changed = "refuse"
    """Of a Delta or Iceberg table: what becomes of rows that a commit changes after their release.
    `refuse` ends the run, `ignore` leaves them as they were released, `release` releases the changed
    files again, and charges for them again.
    """
    row_key: list[str] | None = Field(default=None, min_length=1)
    """Kept columns that together tell one row from all others: a row that is delivered again is found by
    them.
    """
    repeated: Repeated = "refuse"
    """What becomes of rows whose key was released: `refuse` ends the run, `skip` leaves them out,
    `charge` releases them again, and charges the release in full.
    """
    charge_repeats: bool = False
    """Whether each release is charged in full, as if all its rows had been released before."""

    @field_validator("repeated")
    @classmethod
    def _needs_key(cls, repeated: Repeated, info: ValidationInfo) -> Repeated:
        if repeated != "refuse" and not info.data.get("row_key"):
            raise ValueError("it needs a `row_key`, by which rows are known again")
        return repeated


class JobFile(Document):
    """A job as it stands in its file; paths are relative to the file's folder."""

    name: str = Field(min_length=1, max_length=200)
    """The job's name, which the release card gives."""
    input: Input
    """The table that is released."""
    output: Output
    """Where the release goes."""
    schema_path: str = Field(alias="schema", min_length=1)
    """The file that declares the columns; its key is `schema`."""
    privacy: Budget | None = None
    """What is promised; of mechanisms that spend a budget."""
    mechanism: Spec
    """What is released, and how."""
    parents: Parents | None = None
    """The table of persons, of the mechanisms `copula` and `marginals` with `persons: true`."""
    ledger: LedgerPlace | None = None
    """The dataset whose budget is charged; of mechanisms that spend one."""
    growing: bool | Growing = False
    """Whether each further run releases the rows that were added since; or how."""
    cluster: ClusterBlock = Threads()
    """Where the job runs."""
    lineage: Lineage | None = None
    """Whether events of each run are sent to OpenLineage."""
    about: About | None = None
    """What the card and the page say of the issuer, the licence and the purpose."""
    storage: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of file systems by protocol; secrets in it are references such as `{env:
    LAKE_SECRET}`.
    """
    insecure_seed: int | None = None
    """Makes the noise reproducible, for tests: such a release protects nobody, and says so."""

    _check_storage = field_validator("storage", mode="before")(check_options)


def job_file_type() -> type[JobFile]:
    """Return the model of a job file that can name every registered mechanism."""
    return _make_job_file_type(spec_union())


@functools.lru_cache(maxsize=1)
def _make_job_file_type(specs: Any) -> type[JobFile]:
    return create_model("JobFile", __base__=JobFile, mechanism=(specs, ...))


_ELSEWHERE = (
    *("cluster", "storage", "ledger", "lineage", "about", "schema_path", "growing"),
    "parents",
)


class Job:
    """A job with its schema and its mechanism, its paths made absolute.

    Attributes
    ----------
    mechanism
        The mechanism on the schema, under the budget.
    account
        The mechanism with the dataset that it is charged to.
    """

    @raises_in_keys
    def __init__(
        self, file: JobFile, schema: Schema, base: Path, persons: Schema | None = None
    ) -> None:
        self.file, self.tables = file, (schema, persons)
        schema = self.schema = join_tables(schema, persons, file.parents, file.privacy)
        self.input_url = file.input.locate(base)
        self.output_url = absolute_url(file.output.path, base)
        self.persons_url = "" if file.parents is None else file.parents.input.locate(base)
        for url in filter(None, (self.input_url, self.persons_url)):
            self.check_outside(url)
        place, _, rest = self.output_url.partition("://")
        if place in _BUCKETS and "/" not in rest:
            what = "a bucket itself cannot be the output: the run's state lies beside it"
            raise SpecError(what, "output.path", "name a folder in it")
        check_seed(file)
        schema.check_found(insecure=file.insecure_seed is not None)
        schema.check_privatised(file.schema_path)
        format_ = file.input.format
        if format_ == "csv" or (format_ == "files" and name_format(file.input.path) == "csv"):
            schema.check_dates()
        self.ledger = file.ledger and file.ledger.resolve(base)
        self.cluster = place_files(file.cluster, base)
        self._public_urls: dict[str, str] = {}
        self.mechanism = bind(file.mechanism, schema, file.privacy).place_paths(
            lambda parameter, path: self._place(parameter, path, base)
        )
        if file.parents is not None:
            self._link(file.parents)
        self.account = Account(
            mechanism=self.mechanism, place=self.ledger, job=file.name, output=self.output_url
        )
        self._check_partitions()
        if self.mechanism.links_tables and file.output.mode != "error":
            what = "each release names its persons 0, 1 and so on, so rows of one would join with persons of another"
            raise SpecError(
                what, "output.mode", "remove the key, and give each release its own output"
            )
        if file.output.model and not self.mechanism.has_model:
            what = "this mechanism fits no model that records could be drawn from"
            raise SpecError(what, "output.model", "remove the key, or take the mechanism copula")
        if file.growing:
            self._check_growing()
            if file.output.format != "parquet":
                self.file = file.model_copy(
                    update={"output": file.output.model_copy(update={"mode": "append"})}
                )

    def check_outside(self, url: str) -> None:
        """Check that a table that is read does not include what is written."""
        output = self.file.output
        n_folders = len(output.partition_by or ()) if output.format == "parquet" else 0
        if takes_in(url, self.output_url, n_folders):
            what = "the output lies inside the input, where the next run would read it"
            raise SpecError(what, "output.path", "choose another folder")

    def _link(self, parents: Parents) -> None:
        """Tell the mechanism of the table of persons."""
        if not isinstance(self.mechanism, CountsPersons):
            what = "only persons with their rows have a table of persons"
            raise SpecError(what, "parents", "remove it, or set `mechanism.persons: true`")
        key = parents.key or self.mechanism.unit
        drops = parents.orphans == "drop"
        self.mechanism = replace(self.mechanism, key=key, drops_orphans=drops)

    def _check_partitions(self) -> None:
        for name in self.file.output.partition_by or ():
            if not self.mechanism.releases_rows or name not in self.schema.kept:
                what = (
                    f"{name!r} is not a kept column, and a partition's value is published as it is"
                )
                hint = "name columns whose role is keep"
                raise SpecError(what, "output.partition_by", hint)
            if self.file.output.format == "parquet" and name.startswith(("_", ".")):
                what = f"readers pass over folders whose names begin as {name!r} does"
                hint = "partition by another column, or write a Delta or an Iceberg table"
                raise SpecError(what, "output.partition_by", hint)

    def _check_growing(self) -> None:
        if not self.mechanism.releases_rows:
            what = "this mechanism releases a table as a whole, so its release cannot grow"
            raise SpecError(
                what, "growing", "remove the key, or take the mechanism dip or interval"
            )
        budget = self.mechanism.budget
        unit = None if budget is None else budget.unit_column
        if unit is not None and unit.publish_counts:
            what = "a unit may have rows in every release of a growing table, and no release tells how many in all"
            raise SpecError(what, "privacy.unit.publish_counts", "remove it, or `growing`")
        for column in self.growing.row_key or ():
            if column not in self.schema.kept:
                what = f"{column!r} is no column that is kept, and a key is looked at before anything is charged"
                raise SpecError(what, "growing.row_key", "name columns with the role keep")
        for key in ("version", "snapshot"):
            if getattr(self.file.input, key) is not None:
                raise SpecError(
                    f"a growing table is always read in its newest version, so `{key}` cannot be set",
                    f"input.{key}",
                    "remove the key",
                )
        if self.file.input.format == "iceberg" and self.file.input.catalog is None:
            raise SpecError(
                "a metadata file describes one snapshot, so it never has new rows",
                "input.path",
                "set `input.catalog`",
            )
        if self.file.output.mode == "overwrite":
            raise SpecError(
                "a growing table adds to what was released and does not replace it",
                "output.mode",
                "remove the key",
            )

    def extend(self, series: Series | None, *, continued: bool = True) -> Job:
        """Return the job of one release of a growing table.

        Parameters
        ----------
        series
            Where the release stands in its series, if that is known.
        continued
            Whether its mechanism goes on with what the first release fitted.
        """
        job = copy(self)
        job.mechanism = replace(self.mechanism, continued=continued)
        job.account = replace(self.account, mechanism=job.mechanism, series=series)
        return job

    def _place(self, parameter: str, path: str, base: Path) -> str:
        """Return the URL of a public table; it is an input too, so the output may not lie in it."""
        url = absolute_url(path, base)
        self.check_outside(url)
        if takes_in(url, self.input_url) or takes_in(self.input_url, url):
            what = "the public table contains the private one or lies inside it, so protected rows would be their own reference"
            raise SpecError(what, f"`{parameter}`", "name another table")
        self._public_urls[parameter] = url
        return url

    @property
    def epsilon(self) -> float | None:
        """What the release costs a unit; None if no ε is promised."""
        return None if self.mechanism.budget is None else self.account.cost().epsilon

    @property
    def order(self) -> RowOrder | None:
        """The order of the released rows; None if no row of the input is released."""
        return self.file.output.order if self.mechanism.releases_rows else None

    @property
    def stores(self) -> dict[str, Options]:
        """The options of the buckets that the job reads and writes; secrets in them are references."""
        warehouse = self.file.input.catalog and self.file.input.catalog.warehouse
        return by_root(
            self.file.storage,
            [
                *(self.input_url, self.output_url, self.persons_url),
                *(*self._public_urls.values(), warehouse or ""),
            ],
        )

    @functools.cached_property
    def digest(self) -> str:
        """The name of the job in its output: a digest of what decides the output's bytes except the input's content.

        Of a growing table, it is the name that its series has, which is that of the job that began it.
        """
        return self.promise if self.file.growing else self.text_digest

    @functools.cached_property
    def promise(self) -> str:
        """A digest of what the releases of a series have in common: released columns, channels, privacy, and how rows are laid out.

        The job's name, its input and the columns that are not released are left out.
        """
        mine = {"name", "input", *_ELSEWHERE}
        content = self.file.model_dump(
            mode="json",
            by_alias=True,
            exclude={"output": {"path", "catalog"}, **dict.fromkeys(mine, True)},
        )
        unit = self.file.privacy and self.file.privacy.unit
        columns = {
            name: column.model_dump(mode="json")
            for name, column in self.schema.columns.items()
            if column.role != "drop" or name == getattr(unit, "column", None)
        }
        return _digest({"series": content, "columns": columns})

    def name_series(self, digest: str) -> Job:
        """Return the job with the name that its series has."""
        job = copy(self)
        job.__dict__["digest"] = digest
        return job

    @functools.cached_property
    def text_digest(self) -> str:
        """A digest of the job that names its output, unless its table grows; series that an earlier version began are named by it, too.

        The cluster and the storage's options are left out, because the same job on another
        scheduler is the same job. Also left out are the ledger, the lineage, `about`, the output's
        path and catalog, and `order` if it is not `shuffled`.
        """
        place = {"path", "catalog"} if self.order == "shuffled" else {"path", "catalog", "order"}
        content = self.file.model_dump(
            mode="json", by_alias=True, exclude={"output": place, **dict.fromkeys(_ELSEWHERE, True)}
        )
        if self.file.growing:
            content["growing"] = True
        whole = {
            "job": content,
            "schema": self.schema.model_dump(mode="json"),
            "input": self.input_url,
        }
        if self._public_urls:
            whole["public"] = self._public_urls
        if self.file.parents is not None:
            parents = self.file.parents.model_dump(mode="json", exclude={"schema_path"})
            whole["parents"] = {**parents, "url": self.persons_url}
        return _digest(whole)

    @property
    def may_repeat(self) -> bool:
        """Whether the job, run again on another input, makes another release in the same output."""
        return self.file.output.mode != "error" and not self.file.growing

    @property
    def growing(self) -> Growing:
        """How the job's table grows, if it does."""
        return self.file.growing if isinstance(self.file.growing, Growing) else Growing()

    @property
    def ledger_url(self) -> str | None:
        """The URL of the ledger that the job is charged to, if any."""
        return None if self.ledger is None else self.ledger.url

    def discover(self, table_format: TableFormat | None = None) -> InputTable:
        """Return the job's input, by default as it is now, from its file names and metadata alone."""
        found, (rows, persons) = table_format or self.file.input.table_format, self.tables
        table = discover(self.input_url, rows, found, growing=bool(self.file.growing))
        if persons is None or self.file.parents is None:
            return table
        format_ = self.file.parents.input.table_format
        return replace(table, persons=discover(self.persons_url, persons, format_))

    def open_output(self) -> Publication:
        """Return what publishes the job's releases."""
        series = self.digest if self.file.growing else None
        return self.target.open(Folder(self.output_url), series)

    @property
    def target(self) -> Target:
        """How the job's releases are published."""
        target = self.file.output.target
        if not self.mechanism.links_tables or target.format == "parquet":
            return target
        return LinkedTarget(**dict(target), tables=[PARENTS, CHILDREN])

    def name_releases(self, fingerprint: str) -> ReleaseNames:
        """Return the names by which the output knows the job's releases."""
        return ReleaseNames(
            self.digest,
            fingerprint if self.may_repeat else None,
            Folder(self.output_url),
            self.ledger_url,
        )


def _digest(content: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def check_promise(file: JobFile, where: str) -> None:
    """Check that a job promises an ε where its mechanism spends one, and nowhere else."""
    if file.mechanism.spends:
        if file.privacy is None:
            raise SpecError("the key 'privacy' is missing", where, "add it")
        return
    for key in ("privacy", "ledger"):
        if getattr(file, key) is not None:
            what = f"this mechanism, of the kind {getattr(file.mechanism, 'kind', '')}, has no ε that could be promised or charged"
            raise SpecError(what, f"{where}, {key}", f"remove the key {key!r}")


def check_seed(file: JobFile) -> None:
    """Check that no ledger is charged for noise from a seed, which anybody can draw again."""
    if file.ledger is not None and file.insecure_seed is not None:
        what = (
            "noise from a seed protects nobody, so a job with a seed cannot be charged to a ledger"
        )
        raise SpecError(what, "insecure_seed", "remove the seed, or the key 'ledger'")


def read_schema(path: str | Path) -> Schema | None:
    """Return the schema in a file; None if the file holds no `columns`, as a job does not."""
    text = read_text(path, "the job cannot be read", "check its path")
    if "columns" not in parse_yaml(text.content, text.name):
        return None
    return Schema.from_text(text)


def load_job(
    path: str | Path,
    settings: Mapping[str, str] | None = None,
    derive: Callable[[dict[str, Any]], None] | None = None,
) -> Job:
    """Return the job in a file, with `--set` settings applied.

    Parameters
    ----------
    path
        The job's YAML file; relative paths in it are relative to its folder.
    settings
        Dotted keys and their values as YAML, for instance `{"privacy.epsilon": "2"}`.
    derive
        Makes another job of the contents of the file and the settings.
    """
    path = Path(path)
    text = replace(
        read_text(path, "the job cannot be read", "check its path"), settings=tuple(settings or ())
    )
    data = parse_yaml(text.content, text.name)
    for key, value in (settings or {}).items():
        _set(data, key, value)
    if derive is not None:
        derive(data)
    schema_text, target = _name_schema(data, path.parent), _take_target(data, text)
    linked = data.get("parents")
    persons_text = _name_schema(linked if isinstance(linked, dict) else {}, path.parent)

    def check_file() -> JobFile:
        if todos := text.list_todos():
            raise join_errors(todos)
        if isinstance(named := data.get("mechanism"), Mapping) and isinstance(
            named.get("kind"), str
        ):
            load_installed(named["kind"])
        file = validate(job_file_type(), data, text)
        check_promise(file, text.name)
        return file

    file, schema, persons = check_all(
        *(check_file, lambda: Schema.from_text(schema_text())),
        lambda: Schema.from_text(persons_text()) if linked else None,
    )
    base = path.parent.resolve()
    try:
        return _meet_target(Job(file, schema, base, persons), target, base)
    except SpecError as error:
        texts = dict.fromkeys(persons.columns if persons else (), persons_text)
        texts |= dict.fromkeys(schema.columns, schema_text)
        raise _find_line(error, text, schema_text(), texts) from None


def _meet_target(job: Job, target: float | None, base: Path) -> Job:
    """Return a job with the least ε that meets the error that it asks for, if it does."""
    if target is None or job.file.privacy is None:
        return job
    exceed, where = partial(exceed_counts, most=target), "privacy.epsilon.target"
    check_counted(job.mechanism, where)
    epsilon = find_least_epsilon(job.mechanism, exceed, where)
    privacy = job.file.privacy.model_copy(update={"epsilon": epsilon})
    schema, persons = job.tables
    return Job(job.file.model_copy(update={"privacy": privacy}), schema, base, persons)


def _take_target(data: dict[str, Any], text: Text) -> float | None:
    """Return the margin of counts that a job asks for in place of an ε, and put any ε there until it is found."""
    privacy = data.get("privacy")
    if not isinstance(privacy, dict) or not isinstance(asked := privacy.get("epsilon"), dict):
        return None
    target = asked.get("target")
    wanted: Any = target.get("count_margin") if isinstance(target, dict) else None
    known = type(wanted) in (int, float) and 0 < wanted < math.inf
    if not known or asked != {"target": {"count_margin": wanted}}:
        what = "a number above 0 is expected, or `{target: {count_margin: ROWS}}`"
        error = SpecError(what, f"{text.name}, privacy.epsilon", "as in `count_margin: 20`")
        raise error.at(text.find_line(("privacy", "epsilon")))
    privacy["epsilon"] = 1.0
    return float(wanted)


def _name_schema(data: Mapping[str, Any], base: Path) -> Callable[[], Text]:
    """Return what reads the schema that a job names, whatever else is wrong with the job."""
    named = data.get("schema")
    if not isinstance(named, str) or not named:
        # the job's own error tells that none is named
        return lambda: Text("schema", "columns: {unknown: {role: keep}}")
    return functools.cache(
        lambda: read_text(
            base / named, "the schema cannot be read", "check the path in the job's `schema`"
        )
    )


def _find_line(
    error: SpecError, job: Text, schema: Text, texts: Mapping[str, Callable[[], Text]]
) -> SpecError:
    """Return an error about a key of the job, or about a column of one of its schemas, with its line; so for each of several."""
    if isinstance(error, CombinedSpecError):
        return join_errors([_find_line(each, job, schema, texts) for each in error.problems])
    where = error.where or ""
    if found := re.match(r"column '([^']+)'", where):
        text = texts.get(found[1], lambda: schema)()
        return error.at(text.find_line(("columns", found[1])))
    found = re.match(r"[a-z_]+(\.\w+)*", where)
    return (
        error.at(job.find_line(found[0].split(".")))
        if found and schema.name not in where
        else error
    )


def _set(data: dict[str, Any], key: str, value: str) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        inner = data.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise SpecError(
                f"{parent!r} holds a plain value, so nothing can be set inside it", f"--set {key}"
            )
        data = inner
    data[last] = parse_value(value, f"--set {key}")


def opens_stores(
    function: Callable[Concatenate[Job, Args], Result],
) -> Callable[Concatenate[Job, Args], Result]:
    """Return a function of a job that opens the job's stores with its options; workers are told of them by each task's work.

    Two jobs that use one bucket on one cluster at the same time must give it the same options.
    """

    @functools.wraps(function)
    def opening(job: Job, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with use_options(job.stores):
            return function(job, *args, **kwargs)

    return opening  # type: ignore[return-value]  # `wraps` takes the first argument for a named one


@freeze_class
class JobTable:
    """A job's input, as its file names and footers tell it, checked against the mechanism."""

    table: InputTable
    mechanism: Mechanism  # the job's, with its parameters that depend on the number of rows fixed
    work: TableWork
    source: FileSource | LinkedSource  # the input as the engine reads it
    public_rows: (
        int | None
    )  # the number of rows if it is public and known; of persons, if they have a table

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
        found = discover_public(public, self.mechanism.declared)
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

    def check_copies(self) -> None:
        """Check that no file is a copy of another one; values of folders that nothing is made of tell no files apart."""
        apart = {*self.work.released.names, *self.work.unit_columns}
        check_copies(self.table.fragments, self.table.released, apart=apart)
        if self.table.persons is not None:
            check_copies(self.table.persons.fragments, apart=apart)

    def check_partitions(self, job: Job) -> None:
        """Check the values of the output's partition columns, if it has some; these columns are read."""
        output = job.file.output
        if output.partition_by is not None:
            by = output.partition_by
            check_partitions(self.table.fragments, self.work, by, output.format)

    def check(self, job: Job, publication: Publication) -> None:
        """Check that there is something to release, and that the output can hold it."""
        if self.public_rows == 0:
            raise DataError(
                "the table has no rows", job.file.input.path, "check the job's input.path"
            )
        publication.check(self.work.add_weight(self.mechanism.find_written(self.work.released)))


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
def open_table(job: Job, secrets: Folder, find: Callable[[], InputTable] | None = None) -> JobTable:
    """Return a job's input with its mechanism; no row is read.

    Parameters
    ----------
    find
        Returns the part of the table that is released; None for all of it.
    """
    table = job.discover() if find is None else find()
    # only its catalog knows where an Iceberg table lies
    job.check_outside(table.location)
    public_rows = None if job.mechanism.n_rows_private else table.n_rows
    if job.mechanism.budget is not None and job.mechanism.budget.adjacency == "replace-one":
        public_rows = public_rows if table.persons is None else table.persons.n_rows
    mechanism = job.mechanism.with_rows(lambda: public_rows)
    types, source = table.schema, FileSource(table.fragments, job.file.input.path)
    linked, (rows, persons) = None, job.tables
    if table.persons is not None and persons is not None and job.file.parents is not None:
        job.check_outside(table.persons.location)
        unit = None if job.file.privacy is None else job.file.privacy.unit_column
        assert unit is not None
        linked = link_tables(source, table, (rows, persons), job.file.parents, unit.column)
        added = persons.select_released(table.persons.schema)
        types = pa.schema([*types, *added])
    return JobTable(
        table=table,
        mechanism=mechanism,
        work=make_table_work(mechanism, types, secrets),
        source=linked or source,
        public_rows=public_rows,
    )
