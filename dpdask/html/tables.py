"""Small tables, by which notebooks show objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def make_html_table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]], text: str = "") -> str:
    """Return a table as HTML.

    Parameters
    ----------
    title
        What stands above it.
    head
        The names of the columns.
    rows
        The cells of each row; None is left empty.
    text
        A paragraph between the title and the table.
    """
    body = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in rows)
    paragraph = f"<p style='max-width: 50em'>{escape(text)}</p>" if text else ""
    table = f"<table><thead><tr>{_cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><p><strong>{escape(title)}</strong></p>{paragraph}{table}</div>"


def _cells(row: Sequence[object], tag: str) -> str:
    return "".join(f"<{tag} style='text-align: left'>{'' if cell is None else escape(str(cell))}</{tag}>" for cell in row)
