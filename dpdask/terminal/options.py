"""Options and arguments that verbs of the command line share."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from dpdask.errors import UsageError


def read_settings(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Return the pairs of key=value that an option was given."""
    pairs = [value.partition("=") for value in values]
    if any(not sign or not key for key, sign, _ in pairs):
        raise click.BadParameter("write key=value, for instance privacy.epsilon=2")
    return {key: value for key, _, value in pairs}


scheduler = click.option(
    "--scheduler", metavar="ADDR", help="Run on this Dask scheduler instead of the job's cluster."
)
job = click.argument("job", type=click.Path(dir_okay=False))
out = click.argument("out", required=False)
instead = partial(click.option, "--job", metavar="JOB")  # of an output
card = click.option(
    "--card", metavar="NAME", help="The release's card, if OUT holds several releases."
)
set_ = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="A.B=C",
    callback=read_settings,
    help="Change a key of the job.",
)
json = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
log_format = click.option(
    "--log-format",
    type=click.Choice(["auto", "bars", "text", "json"]),
    default="auto",
    show_default=True,
    help="How progress is shown on stderr.",
)
seed = click.option("--seed", type=int, default=0, show_default=True)


def check_one(usage: str, out: str | None, job: str | None) -> None:
    """Refuse a verb that was given neither an output nor a job, or both; or a file for an output."""
    if (out is None) == (job is None):
        both = f"dpdask {usage}, or dpdask {usage.partition(' ')[0]} --job JOB"
        raise UsageError("either an output or a job is needed", "OUT", both)
    if out is not None and Path(out).is_file():
        instead = f"dpdask {usage.partition(' ')[0]} --job {out}"
        raise UsageError("an output is a folder, and this is a file", out, instead)
