"""The verb `dpdask dossier`."""

from __future__ import annotations

import click

from dpdask.errors import say_count
from dpdask.terminal import options
from dpdask.terminal.echo import echo


@click.command()
@click.argument("out")
@click.option(
    "--to", metavar="FOLDER", help="The new folder; by default NAME-dossier in the working folder."
)
@options.card
def dossier(out: str, to: str | None, card: str | None) -> None:
    """Write what a registry, auditors and catalogues ask of a release, and a statement to sign; reads the release alone."""
    from dpdask.page.dossier import write_dossier

    path, n_open = write_dossier(out, to, card)
    listed = (
        f"{path / 'README.md'} lists {say_count(n_open, 'point')} that are open or need a person"
    )
    check = f"python {path / 'verify.py'} {out}"
    echo(f"{path}: {listed}; `{check}` checks the release; then sign statement.json")
