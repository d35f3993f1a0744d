"""Counts rows of words into records."""

from __future__ import annotations

from dpdask.stats.records import MAX_RECORDS, Records, _Table


def records_of_rows(columns, own, max_records=MAX_RECORDS):
    """The statistic of rows: the words of each column, and each row's own keyed word."""
    table = _Table(len(columns), max_records)
    table.add_rows(columns, own)
    return Records(**table.parts())
