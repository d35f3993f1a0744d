"""Options and arguments that verbs of the command line share."""

from __future__ import annotations

import click


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
