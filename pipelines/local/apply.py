"""Randomise one value on the device that holds it, by channels that `dpdask.local` exported: apply.py channels.json column value."""

import json
import math
import sys
from bisect import bisect_left, bisect_right
from itertools import accumulate
from pathlib import Path
from secrets import randbelow


def draw(weights):  # a place, each with probability weight / 2**63 exactly
    return bisect_right(list(accumulate(weights)), randbelow(2**63))


def read(text, name):  # one column of an export; fails if its tables are not whole
    column = (document := json.loads(text))["columns"][name]
    column["weights"] = [[int(weight) for weight in row] for row in column["weights"]]
    if document["format"] != 1 or any(
        sum(row) != 2**63 or min(row) < 0 for row in column["weights"]
    ):
        raise ValueError
    return column


def randomise(
    value, column
):  # the released value; fails if the value is outside the column's domain
    if "levels" in column:
        return column["levels"][draw(column["weights"][column["levels"].index(value)])]
    rows, x, c, lattice, (least, most) = (
        column[key] for key in ("weights", "x", "c", "lattice", "bounds")
    )
    low, high = (
        0.0,
        c[0],
    )  # the ranks of null; of a number below: a whole number's, an atom's or a knot's interval, or one rank
    if value is not None or not column["nulls"]:
        if not least <= value <= most or (lattice and value % 1):
            raise ValueError
        k = min(max(bisect_left(x, value), bisect_right(x, value) - 1, 1), len(x) - 1)
        ends = (
            (-math.inf, math.inf)
            if value == x[k] and not (lattice and x[k] > x[k - 1])
            else (value - lattice, value)
        )
        low, high = (
            c[k - 1]
            + (c[k] - c[k - 1]) * min(max((end - x[k - 1]) / (x[k] - x[k - 1] or 1e-300), 0), 1)
            for end in ends
        )
    rank = low + (high - low) * randbelow(2**53) / 2**53
    if "edges" in column:
        cell = draw(rows[min(bisect_right(column["edges"], rank), len(rows)) - 1])
        low, high = column["edges"][cell : cell + 2]
    else:  # discrete Laplace noise, a sign and base-256 digits, on whole ranks; what it gives, w, is as likely as the ranks low..high
        n, rate, margin = column["ranks"], column["rate"], column["margin"]
        size = sum(256**place * draw(row) for place, row in enumerate(rows[1:]))
        w = min(
            max(min(int(n * rank), n - 1) + (-1 - size if draw(rows[0]) else size), -margin),
            n - 1 + margin,
        )
        ends = (w if w > -margin else -math.inf, w + 1 if w < n - 1 + margin else math.inf)
        low, high = (
            (
                min(max(end, 0), n)
                + (math.exp(-rate * abs(end)) - math.exp(-rate * abs(n - end)))
                / 2
                / math.sinh(rate)
            )
            / n
            for end in ends
        )
    rank = low + (high - low) * (randbelow(2**53) + 0.5) / 2**53
    k = min(max(bisect_right(c, rank), 1), len(c) - 1)
    step = (x[k] - x[k - 1]) * ((rank - c[k - 1]) / (c[k] - c[k - 1] or 1))
    return (
        None
        if rank < c[0]
        else min(x[k - 1] + (max(math.ceil(step), 1) if lattice else step), x[k])
    )


if __name__ == "__main__":
    problem = "usage: apply.py channels.json column value (the value in JSON)"
    try:
        path, name, value = sys.argv[1:]
        problem = f"{path}: cannot be read, or is no whole export of format 1 with a column {name!r}; export the release again"
        column = read(Path(path).read_bytes(), name)
        problem = f"column {name!r}: the value is outside the domain; {path} shows its levels, or its bounds and whether it may be null"
        print(json.dumps(randomise(json.loads(value), column)))
    except Exception:  # whatever it was, one line is told of it, and never the value
        sys.exit(problem)
