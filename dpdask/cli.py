"""The command line: verbs, documented exit codes (docs/explanation/design.md, Contract), one line for an error.

Each verb imports its modules when it runs, so that help is fast, and so is `dask`, which imports
this module at each call.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dpdask.errors import DpdaskError, InternalError, UsageError, list_names, say_count
from dpdask.startup import Terminated, collect_rarely, end_on_sigterm, keep_folder_out
from dpdask.steps import step
from dpdask.terminal import options
from dpdask.terminal.dossier import dossier
from dpdask.terminal.echo import echo, keep_streams, show, warn
from dpdask.terminal.simulations import simulate, write_demo
from dpdask.version import __version__

if TYPE_CHECKING:
    from dpdask.jobs.run import Outcome
    from dpdask.jobs.spec import Job
    from dpdask.schemas import Name
    from dpdask.terminal.progress import LogFormat, Report

_INTERRUPTED, _TERMINATED, _DEFECT = 130, 143, 70


class _Verbs(click.Group):
    """A group whose verbs fail with one line and a documented exit code, also when `dask dpdask` calls it."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        keep_streams()  # here, because `dask dpdask` does not come by `main`
        return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        keep_folder_out()
        try:
            with end_on_sigterm():
                return super().invoke(ctx)
        except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if ctx.params.get("debug") and isinstance(error, Exception):
                echo(traceback.format_exc(), err=True, nl=False)
            _fail(ctx, *_line_and_code(error))


def _find_interruption(error: BaseException | None) -> BaseException | None:
    """Return the interruption that an error is, or that came before it: a library that is interrupted may fail by another error."""
    while error is not None and not isinstance(error, KeyboardInterrupt | click.Abort):
        error = error.__cause__ or error.__context__
    return error


def _line_and_code(error: BaseException) -> tuple[str, int]:
    interruption = _find_interruption(error)
    if isinstance(interruption, Terminated):
        return "terminated; run again to resume", _TERMINATED
    if interruption is not None:
        return "interrupted; run again to resume", _INTERRUPTED
    if isinstance(error, DpdaskError):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        return (
            f"{' '.join(error.format_message().split()).rstrip('.')}; see `dpdask --help`",
            UsageError.exit_code,
        )
    # the last resort: a library's message may quote data, so only its type is shown
    return (
        f"{type(error).__name__}; this is a defect of dpdask; run `dpdask --debug` with the same arguments to see where",
        _DEFECT,
    )


def _fail(ctx: click.Context, line: str, code: int) -> NoReturn:
    # several things may be wrong with a job
    echo("dpdask: " + line.replace("\n", "\ndpdask: "), err=True)
    ctx.exit(code)


@click.group(name="dpdask", cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(__version__)
def cli(debug: bool) -> None:  # `debug` is read by the group, which catches what its verbs raise
    """Release privacy-protected versions of tables: read Parquet, CSV, Delta or Iceberg; write Parquet, Delta or Iceberg."""


@contextmanager
def show_step(name: str) -> Iterator[None]:
    """Show a step, and the steps inside it, on a terminal until the block ends; in a log nothing.

    Print results after the block: while lines move, what is printed goes to stderr with them.
    """
    # a program without a console has no stderr
    moves = sys.stderr is not None and sys.stderr.isatty()
    if moves:
        from dpdask.terminal.progress import show_progress
    with show_progress("bars") if moves else nullcontext(), step(name, logging.DEBUG):
        yield


@cli.command()
@click.argument("table")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["files", "parquet", "csv", "delta", "iceberg"]),
    default="files",
    show_default=True,
    help="What the table is.",
)
@click.option(
    "--catalog",
    metavar="MAPPING",
    help="The catalog of an Iceberg table, as a job has it: '{name: lake, uri: …}'.",
)
@click.option(
    "--levels-from",
    metavar="FILE",
    help="A public code list: a CSV file with the header column,value and a line for each level.",
)
@click.option(
    "--output", metavar="FILE", help="Write the draft to this new file instead of printing it."
)
@click.option(
    "--job",
    "mechanism",
    type=click.Choice(["dip", "copula", "marginals", "histogram", "interval"]),
    help="Write schema.yaml (or --output), and beside it job.yaml with this mechanism.",
)
def init(
    table: str,
    format_: str,
    catalog: str | None,
    levels_from: str | None,
    output: str | None,
    mechanism: str | None,
) -> None:
    """Draft the schema of a table, and a job; read names, types and null flags, never a value."""
    from dpdask.documents import parse_value, validate, write_new
    from dpdask.jobs.draft import draft_job, draft_schema, read_levels
    from dpdask.jobs.inputs import Input

    given = {"path": table, "format": format_} | (
        {"catalog": parse_value(catalog, "--catalog")} if catalog else {}
    )
    source = validate(Input, given, "init")
    levels = read_levels(levels_from) if levels_from else {}
    draft = draft_schema(source, levels)
    if output is None and mechanism is None:
        echo(draft, nl=False)
        return
    file = Path(output or "schema.yaml")
    drafts, job = {str(file): draft}, str(file.with_name("job.yaml"))
    if mechanism is not None:
        drafts[job] = draft_job(source, mechanism, file.name, str(file.parent))
    write_new(drafts)
    told = f"{draft.count(': {role: drop}  #')} columns are dropped until you turn them on"
    n_on = draft.count(": {role: privatise, kind") + draft.count(": {role: privatise, type")
    echo(f"{file}: {told}" + (f"; {n_on} are on, as the code list says" if levels else ""))
    if mechanism is not None:
        echo(f"{job}: releases them by {mechanism}; edit {file}, then `dpdask plan {job}`")


@cli.command()
@options.job
@options.set_
def validate(job: str, settings: dict[str, str]) -> None:
    """Check a job and its schema, or a schema alone; read no data."""
    with show_step("reading the job"):
        from dpdask.jobs.spec import read_schema

        if not settings and (alone := read_schema(job)) is not None:
            names = list_names(alone.privatised, 8) or "no column yet: turn on what to release"
            echo(f"{job}: a valid schema; privatises {names}")
            return
        from dpdask.connect import check_cluster

        checked = _load(job, settings)
        check_cluster(checked.cluster)
    echo(f"{checked.file.name}: valid; privatises {list_names(checked.schema.privatised, 8)}")


@cli.command()
@options.job
@options.set_
@options.json
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="NAME=NUMBER",
    callback=options.read_settings,
    help="Plan with the least ε for this error: count_margin=ROWS, share=PART, mean.COLUMN=MARGIN, or kept.COLUMN=PART.",
)
@click.option(
    "--page", metavar="FILE", help="Write the plan as a page to this new file, to sign it."
)
def plan(
    job: str,
    settings: dict[str, str],
    as_json: bool,
    targets: dict[str, str],
    page: str | None,
) -> None:
    """Say what a run would do, who is protected and how; read footers only."""
    with show_step("planning"):
        from dpdask.connect import check_cluster
        from dpdask.jobs.plan import find_epsilon, plan_job, warn_of_targets

        loaded = _load(job, settings)
        if targets:
            epsilon = repr(find_epsilon(loaded, targets))
            loaded = _load(job, {**settings, "privacy.epsilon": epsilon})
            targets = {**targets, "epsilon": epsilon}
        warned = (*check_cluster(loaded.cluster), *warn_of_targets(loaded, targets))
        planned = plan_job(loaded)
    target = {name: float(each) for name, each in targets.items()}
    planned = replace(planned, warnings=(*warned, *planned.warnings), target=target)
    if page is not None:
        from dpdask.documents import write_new
        from dpdask.jobs.plan import make_page_of_plan

        write_new({page: make_page_of_plan(loaded, planned)})
    show(as_json, planned.to_dict(), str(planned))
    if planned.refusal is not None:
        raise planned.refusal


@cli.command()
@options.job
@options.set_
@options.json
@options.scheduler
@click.option(
    "--metrics",
    metavar="FILE|[HOST:]PORT",
    help="Keep the state of the run in this file, or at this port of this machine, in Prometheus' text format.",
)
@options.log_format
def run(
    job: str,
    settings: dict[str, str],
    as_json: bool,
    scheduler: str | None,
    metrics: str | None,
    log_format: LogFormat,
) -> None:
    """Run a job, or resume it; a finished job is not changed."""
    from dpdask.terminal.metrics import keep_metrics
    from dpdask.terminal.progress import show_progress
    from dpdask.terminal.texts import describe_outcome

    with (
        keep_metrics(metrics, _find_code, warn) as kept,
        show_progress(log_format, kept) as report,  # before anything that is slow to import
    ):
        loaded, warned, outcome = _run(partial(_load, job, settings), scheduler, report)
        balance = _read_balance(loaded)
        if kept is not None:
            dataset = "" if loaded.ledger is None else loaded.ledger.dataset
            kept.name(loaded.file.name)
            kept.tell(released=outcome.status != "nothing new", balance=balance, dataset=dataset)
    promised, mechanism = loaded.file.privacy, outcome.mechanism or loaded.mechanism
    described = mechanism.description
    result = {
        "status": outcome.status,
        "output": outcome.output,
        "rows": outcome.manifest.n_rows,
        **({} if (n := outcome.manifest.n_persons) is None else {"persons": n}),
        "shards": len(outcome.manifest.shards),
        "bytes": sum(shard.n_bytes for shard in outcome.manifest.shards),
        "epsilon": promised.epsilon if promised is not None else None,
        "delta": promised.delta if promised is not None else None,
        "balance": balance,
        "warnings": [*warned, *outcome.warnings],
        "quality": outcome.quality,
        "protected": described.protected,
        "unprotected": described.unprotected,
        "insecure": loaded.file.insecure_seed is not None,
    }
    told = {"how": described.how, "promise": described.guarantee(loaded.file.output.order)}
    show(as_json, result, describe_outcome(loaded.file.name, result, told))
    if not as_json and sys.stderr.isatty():
        # exact counts of the private table, so that they are not logged or passed on
        changed = "values were outside its domain and were changed as the schema says"
        for name, count in outcome.told.changed.items():
            echo(f"  private   column {name!r}: {count:,} {changed}", err=True)


@cli.command()
@click.argument("folder", default="dpdask-demo")
@options.log_format
@click.pass_context
def demo(ctx: click.Context, folder: str, log_format: LogFormat) -> None:
    """Simulate a table, release all its rows, and estimate from the release: all in FOLDER (./dpdask-demo), with no data of yours."""
    with show_step("simulating 100,000 ratings"):
        job = write_demo(folder)
    echo(f"{job.parent}: a simulated table, ratings; schema.yaml and job.yaml say what is released")
    ctx.invoke(
        run,
        job=str(job),
        settings={},
        as_json=False,
        scheduler=None,
        metrics=None,
        log_format=log_format,
    )
    from dpdask.analysis.opening import open as open_release

    released = job.parent / "released"
    mean = open_release(str(released)).mean("rating")
    low, high = mean.interval()
    echo(
        f"  result    mean rating {mean.estimate:.3f}, 95 % interval {low:.3f} to {high:.3f}, from the release alone"
    )
    echo(
        f"Open {released / '_dpdask' / 'release.html'}: what is promised, and to whom. In Python: dpdask.open({str(released)!r})"
    )


def _find_code(error: BaseException) -> int:
    """Return the exit code with which the process will end."""
    if isinstance(error, Exception | KeyboardInterrupt):
        return _line_and_code(error)[1]
    code = getattr(error, "code", _INTERRUPTED)  # of a SystemExit
    return code if isinstance(code, int) else 1


def _load(job: str, settings: dict[str, str] | None = None) -> Job:
    from dpdask.jobs.spec import load_job

    return load_job(job, settings)


def _find_output(usage: str, out: str | None, job: str | None) -> tuple[str, Job | None]:
    """Return the URL of the output that a verb was given, by itself or by its job, and the job."""
    from dpdask.io.storage import absolute_url

    options.check_one(usage, out, job)
    loaded = None if job is None else _load(job)
    return absolute_url(str(out)) if loaded is None else loaded.output_url, loaded


def _run(
    load: Callable[[], Job], scheduler: str | None, report: Report
) -> tuple[Job, tuple[str, ...], Outcome]:
    with step("reading the job", logging.DEBUG):
        from dpdask.connect import check_cluster
        from dpdask.jobs.lineage import report_lineage
        from dpdask.jobs.run import run_job

        loaded = load()
        warned = check_cluster(loaded.cluster, scheduler)
    for warning in warned:  # before the run: afterwards would be too late
        warn(warning)
    # it tells of a lost cluster's coroutines when the process ends
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    outcome = None
    try:
        with report_lineage(loaded, warn) as complete, _open(loaded, scheduler):
            outcome = complete(run_job(loaded, report, count_rows=report.count_rows))
    except Exception as error:
        if outcome is None:
            raise
        # the release stands, whatever becomes of a cluster that is not needed any more
        warn(f"the run has ended, but its cluster did not close ({type(error).__name__})")
    return loaded, warned, outcome


@contextmanager
def _open(job: Job, scheduler: str | None) -> Iterator[None]:
    """Open the job's cluster, and tell while it starts."""
    from dpdask.connect import open_cluster

    here = scheduler is None and job.cluster.kind in ("threads", "synchronous")
    with ExitStack() as opened:
        with step("starting the workers", logging.DEBUG if here else logging.INFO):
            opened.enter_context(open_cluster(job.cluster, scheduler))
        yield


@cli.command()
@options.job
@options.set_
@click.option("--epsilon", type=float, help="What the search costs.")
@click.option("--delta", type=float, help="Its δ; by default that of the job.")
@options.json
@options.scheduler
@options.log_format
def discover(
    job: str, as_json: bool, scheduler: str | None, log_format: LogFormat, **given: Any
) -> None:
    """Find levels that nobody can list, under privacy, and write them into the job's schema."""
    from dpdask.jobs.discovery import find_written, load_discovery, write_levels
    from dpdask.terminal.progress import show_progress
    from dpdask.terminal.texts import describe_levels

    if (result := find_written(job, given["settings"])) is None:
        with show_progress(log_format) as report:
            load = partial(load_discovery, job, **given)
            loaded, warned, outcome = _run(load, scheduler, report)
            result = write_levels(loaded, job, outcome) | {"balance": _read_balance(loaded)}
        result["warnings"] = [*warned, *outcome.warnings]
    show(as_json, result, describe_levels(result))


@cli.command()
@click.argument("document", type=click.Choice(["job", "schema", "card"]))
def schema(document: Name) -> None:
    """Print the JSON Schema of a job, of a schema or of a release card, for editors and programs."""
    from dpdask.schemas import find_file

    echo(find_file(document).read_text(encoding="utf-8"), nl=False)


@cli.command()
@options.out
@options.instead(help="The job, instead of OUT: for a job with storage options.")
@options.json
def status(out: str | None, job: str | None, as_json: bool) -> None:
    """Show the state of an output: absent, opened, fitted, staged or released."""
    from dpdask.jobs import run as runner
    from dpdask.terminal.texts import describe_status

    found = runner.status(_find_output("status OUT", out, job)[0])
    show(as_json, told := found._asdict(), describe_status(str(out or job), told))


@cli.command()
@options.out
@options.instead(
    help="The job, instead of OUT: for a run whose key is in a ledger, or a job with storage options."
)
@click.option(
    "--force",
    is_flag=True,
    help="Also end a run whose key is lost: its noise is lost, and its charge stays.",
)
def abort(out: str | None, job: str | None, force: bool) -> None:
    """Remove an unfinished run: its key and everything staged."""
    from dpdask.jobs import run as runner

    url, loaded = _find_output("abort OUT", out, job)
    if loaded is None:
        removed = runner.abort(url, force=force)
    else:
        removed = runner.abort_job(loaded, force=force)
    done = {None: "there is no unfinished run", "run": "the unfinished run is removed"}
    done["rest"] = "the release is published and stays; the rest of its run is removed"
    done["note"] = "the note of where the output was moved to is removed"
    if job is None:
        done["rest"] += "; if its job has a ledger, run the job again, so that the ledger is told"
    echo(f"{out or job}: {done[removed]}")


@cli.command()
@options.job
@click.option(
    "--at",
    "version",
    type=click.IntRange(min=0, max=2**63 - 1),
    required=True,
    metavar="VERSION",
    help="A version of the Delta table, or a snapshot of the Iceberg table.",
)
def rebase(job: str, version: int) -> None:
    """Declare that all rows up to a version of a growing table are released; charge nothing."""
    from dpdask.jobs.growing import rebase_job

    loaded = _load(job)
    rebase_job(loaded, version)
    echo(f"{loaded.file.name}: rows up to version {version} count as released; nothing was charged")


@cli.command()
@options.out
@click.option(
    "--to", "target", required=True, metavar="NEW", help="The new place, where nothing is yet."
)
@options.instead(help="The job, instead of OUT: for a job with storage options.")
@options.json
def move(out: str | None, target: str, job: str | None, as_json: bool) -> None:
    """Move a released output with all that its next release needs, or go on with that; charge nothing."""
    from dpdask.io.storage import absolute_url
    from dpdask.jobs import move as mover

    (old, loaded), new = _find_output("move OUT --to NEW", out, job), absolute_url(target)
    moved = mover.move_output(old, new) if loaded is None else mover.move_job(loaded, new)
    status = "moved" if moved else "already moved"
    text = f"{old}: {status} to {new}; set output.path to it; nothing was charged"
    show(as_json, {"status": status, "source": old, "output": new}, text)


@cli.command()
@click.argument("place", metavar="FOLDER|LEDGER")
@options.json
def runs(place: str, as_json: bool) -> None:
    """Show many runs in one table: the outputs in a folder, or all runs that a ledger was charged."""
    from dpdask.jobs.overview import list_outputs, list_runs
    from dpdask.terminal.texts import make_table

    is_ledger = place.startswith(("sqlite:", "sqlite+", "postgresql:", "postgresql+"))
    found = list_runs(place) if is_ledger else list_outputs(place)
    show(as_json, {"runs": found}, make_table(found))


@cli.command()
@click.argument("folder")
@click.option("--remove", is_flag=True, help="Remove it; without this, nothing is changed.")
@options.json
def sweep(folder: str, remove: bool, as_json: bool) -> None:
    """Find what ended runs have left beside and in the outputs of a folder, and remove it with --remove."""
    from dpdask.jobs import overview

    found = [asdict(each) for each in overview.sweep(folder, remove=remove)]
    lines = [f"{each['place']}: {each['outcome']}" for each in found]
    show(as_json, {"left": found}, "\n".join(lines) or f"{folder}: nothing is left")


@cli.command()
@click.argument("out")
@click.option("--rows", "n_rows", type=click.IntRange(min=1), help="How many records.")
@click.option(
    "--where",
    metavar="CONDITION",
    help="Which records, for instance 'sex = \"F\" and age >= 65'; all if not given.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=2**64 - 1),
    help="Decides the records; a fresh one if not given.",
)
@options.card
@click.option("--output", required=True, metavar="FILE", help="A new Parquet file.")
def sample(out: str, card: str | None, output: str, **asked: Any) -> None:
    """Draw further records from the model that a release publishes; no job, no input, no ε."""
    with show_step("drawing records"):
        from dpdask.analysis.opening import open as open_release

        written, share = open_release(out, card=card).write_sample(output, **asked)
    told = f"; {100 * share:.3g} % of the model's records meet the condition"
    echo(f"{output}: {say_count(written, 'record')}{told if asked['where'] else ''}")


@cli.command()
@options.job
@options.set_
@options.json
@click.option(
    "--runs",
    "n_runs",
    type=click.IntRange(min=1000),
    default=20_000,
    show_default=True,
    help="How often each noise is drawn.",
)
def audit(job: str, settings: dict[str, str], as_json: bool, n_runs: int) -> None:
    """Compute the exact ε* of every channel, and a lower bound on the ε of noisy counts; read footers only."""
    with show_step("auditing"):
        from dpdask.jobs.plan import audit_job
        from dpdask.terminal.texts import describe_audit

        found = audit_job(_load(job, settings), n_runs=n_runs)
    show(as_json, found, describe_audit(found))
    if not found["sound"]:
        raise InternalError(
            "the audit found more ε than is claimed",
            found["name"],
            "release nothing with this version, and report it",
        )


@cli.command()
@options.out
@click.option("--original", metavar="PATH", help="The table that was released: Parquet or CSV.")
@options.instead(
    help="The job, instead of OUT and --original; its input may be a Delta or an Iceberg table."
)
@click.option(
    "--to",
    metavar="FILE",
    help="The file to write; by default NAME-confidential.html in the working folder.",
)
@click.option(
    "--target",
    metavar="COLUMN",
    help="Also test models that are trained on the release to predict this column.",
)
@click.option(
    "--holdout",
    metavar="PATH",
    help="Rows of the same population that the job did not read: people whom attacks should not find.",
)
@click.option(
    "--rows",
    "n_rows",
    type=click.IntRange(min=100),
    default=100_000,
    show_default=True,
    help="Rows of each table to compare, at most.",
)
def report(
    out: str | None,
    original: str | None,
    job: str | None,
    to: str | None,
    **asked: Any,
) -> None:
    """Compare a release with its original, and attack it, as a CONFIDENTIAL page; reads private rows."""
    given = out and original if job is None else out or original
    options.check_one("report OUT --original PATH", given and "", job)
    with show_step("comparing with the original"):
        from dpdask.evaluation.report import Original, write_report

        if job is None:
            path = write_report(str(out), str(original), to, **asked)
        else:
            loaded = _load(job)
            path = write_report(loaded.output_url, Original.of_job(loaded), to, **asked)
    echo(f"{path}: CONFIDENTIAL, computed from private rows; do not publish it")


@cli.group()
def ledger() -> None:
    """The budget of a dataset: what its releases have spent, and what is left."""


_url = click.option(
    "--url", required=True, help="The ledger's database: sqlite:///ledger.db, or a PostgreSQL URL."
)
_dataset = click.option("--dataset", required=True, help="The dataset's name.")


@ledger.command("init")
@_url
@_dataset
@click.option(
    "--epsilon", type=float, required=True, help="The largest total ε that all releases may spend."
)
@click.option(
    "--delta",
    type=float,
    required=True,
    help="The largest total δ that all releases may spend; with 0, jobs that have a δ are refused.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Charge runs that read rows and then refuse them; cannot be undone.",
)
def ledger_init(url: str, dataset: str, epsilon: float, delta: float, strict: bool) -> None:
    """Give a dataset its budget."""
    from dpdask.engine.account import open_ledger
    from dpdask.terminal.texts import describe_budget

    opened = open_ledger(url)
    made = opened.init(dataset, epsilon, delta, strict=strict)
    echo(describe_budget(opened.show(dataset), made=made))


@ledger.command("show")
@_url
@_dataset
@click.option("--entries", is_flag=True, help="A line for each entry of the chain, and its head.")
@options.json
def ledger_show(url: str, dataset: str, entries: bool, as_json: bool) -> None:
    """Show what was spent, by which releases, and what is left."""
    from dpdask.engine.account import open_ledger
    from dpdask.terminal.texts import describe_ledger

    book = open_ledger(url).show(dataset)
    show(as_json, book.to_dict(), describe_ledger(book, entries=entries))


@ledger.command("verify")
@_url
@_dataset
def ledger_verify(url: str, dataset: str) -> None:
    """Recompute the chain of entries; name the first that was tampered with."""
    from dpdask.engine.account import open_ledger

    echo(f"{dataset}: {open_ledger(url).verify(dataset)} entries, and the chain is intact")


@ledger.command("limit")
@_url
@_dataset
@click.option("--epsilon", type=float, required=True, help="The new limit of the total ε.")
@click.option("--delta", type=float, help="The new limit of the total δ; by default as it is.")
@click.option("--reason", required=True, help="Why, in one line: it stays in the chain.")
def ledger_limit(url: str, dataset: str, epsilon: float, delta: float | None, reason: str) -> None:
    """Raise or lower a dataset's limit, for a reason that its chain keeps."""
    from dpdask.engine.account import open_ledger
    from dpdask.privacy.ledger_changes import change_limit

    opened = open_ledger(url)
    changed = change_limit(opened, dataset, epsilon, delta, reason)
    book = opened.show(dataset)
    said = "the limit is now" if changed else "this is the limit already:"
    echo(f"{dataset}: {said} ε {book.epsilon!r}, δ {book.delta!r}")


@ledger.command("import")
@click.argument("cards", nargs=-1, metavar="CARD...")
@click.option("--url", help="The ledger's database.")
@options.instead(help="The job, instead of --url and CARD: its output's cards.")
@click.option(
    "--earlier",
    is_flag=True,
    help="Also record the releases that the cards name and whose own cards are not given, by their ε and δ.",
)
def ledger_import(cards: tuple[str, ...], url: str | None, job: str | None, earlier: bool) -> None:
    """Record releases that a restored ledger has lost, from their cards (files, or folders of releases)."""
    from dpdask.jobs.claims import find_cards, import_cards, import_job
    from dpdask.terminal.texts import describe_import

    if (job is None) != bool(cards and url) or (job is not None and (cards or url)):
        usage = "dpdask ledger import --url URL CARD..., or dpdask ledger import --job JOB"
        raise UsageError("either cards and a ledger or a job is needed", "CARD", usage)
    if job is not None:
        found = import_job(_load(job), earlier=earlier)
    else:
        read = [card for path in cards for card in find_cards(path)]
        found = import_cards(str(url), read, earlier=earlier)
    recorded = [(each.dataset, each.run_id, each.charge.epsilon) for each in found.recorded]
    if text := describe_import(recorded, found.n_known, found.balances):
        echo(text)
    if found.n_lacking:
        count = say_count(found.n_lacking, "earlier release")
        warn(
            f"the cards name {count} that the ledger lacks, or holds at a lower ε or δ: import their cards, or add --earlier"
        )


@ledger.command("copy")
@click.argument("source")
@click.argument("target")
def ledger_copy(source: str, target: str) -> None:
    """Copy a ledger's datasets, URL to URL, into a database without one: to back it up, or to move it."""
    from dpdask.privacy.ledger_changes import copy_ledger

    for dataset, n_entries in copy_ledger(source, target).items():
        echo(f"{dataset}: {n_entries} entries copied, and the chain is intact")


def _read_balance(job: Job) -> dict[str, Any] | None:
    """Return the dataset's balance; None without a ledger, or if it cannot be read just now: the release stands."""
    with suppress(DpdaskError):
        return None if (balance := job.account.read_balance()) is None else asdict(balance)
    return None


cli.add_command(dossier)
cli.add_command(simulate)


def main() -> NoReturn:
    """Run the command line and exit with its code."""
    collect_rarely()
    try:
        sys.exit(cli(standalone_mode=False))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(UsageError.exit_code)
    except click.ClickException as error:  # of the group's own options; its verbs' are caught above
        echo(f"dpdask: {_line_and_code(error)[0]}", err=True)
        sys.exit(UsageError.exit_code)
    except (
        click.Abort,
        KeyboardInterrupt,
    ):  # once more, while the line of the first one is printed
        sys.exit(_INTERRUPTED)
