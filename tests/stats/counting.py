"""Counts rows of words into records."""

import numpy as np

from dpdask.kernels.hashing import leading_zeros
from dpdask.stats.records import MAX_RECORDS, Records, _Table


def records_of_rows(columns, own, max_records=MAX_RECORDS):
    """The statistic of rows: the words of each column, and each row's own keyed word."""
    table = _Table(len(columns), max_records)
    table.add(np.stack(columns, axis=1), leading_zeros(own), np.zeros(0, dtype=np.int64), 0)
    return Records(**table.parts())
