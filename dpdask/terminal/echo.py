"""Printing on a terminal, which would obey the control characters of a name or a path; imported with the command line, so nothing slow is here."""

from __future__ import annotations

import click

# all of Unicode's category Cc but the newline, escaped as in JSON, so that what is JSON stays the same
_ESCAPED = {code: f"\\u{code:04x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code != ord("\n")}


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    r"""Print a text, its control characters but newlines escaped, such as \u001b.

    Parameters
    ----------
    text
        The text.
    err
        Whether it goes to stderr.
    nl
        Whether a newline follows.
    """
    click.echo(text.translate(_ESCAPED), err=err, nl=nl)
