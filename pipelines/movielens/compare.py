"""A released rating column beside the original: for the data's steward only, because it reads private values.

    python pipelines/movielens/compare.py ORIGINAL RELEASED --column rating --keys userId movieId

Prints the total variation between the two marginals with the bound that sampling alone explains, the correlation of
released with original ratings, and whether the kept columns are untouched. Needs the `test` extra (DuckDB).
"""

from __future__ import annotations

import argparse
import json
import math

import duckdb
import numpy as np

ALPHA = 1e-6


def deviation(probabilities: np.ndarray, n: int) -> float:
    """Return b with Pr(TV(empirical of n draws, law) > b) <= ALPHA: the mean's bound plus McDiarmid's."""
    return float(
        0.5 * np.sqrt(probabilities * (1 - probabilities) / n).sum()
        + math.sqrt(math.log(1 / ALPHA) / (2 * n))
    )


def compare(original: str, released: str, column: str, keys: list[str]) -> dict[str, object]:
    connection = duckdb.connect()
    for name, path in (("original", original), ("released", released)):
        pattern = path if path.endswith(".parquet") else f"{path.rstrip('/')}/*.parquet"
        connection.execute(
            f'create table {name} as select {", ".join(keys)}, "{column}" as value from read_parquet(?)',
            [pattern],
        )
    counts = connection.execute(
        "select coalesce(o.n, 0), coalesce(r.n, 0) from (select value, count(*) n from original group by 1) o "
        "full join (select value, count(*) n from released group by 1) r using (value) order by value"
    ).fetchnumpy()
    of_original, of_released = (np.asarray(values, dtype=np.float64) for values in counts.values())
    rows, n = int(of_original.sum()), int(of_released.sum())
    m = rows - n
    law = of_original / rows
    b_n, b_m = deviation(law, n), deviation(law, m) if m else 0.0
    pairs = f"select o.value a, r.value b from original o join released r on {' and '.join(f'o.{key} = r.{key}' for key in keys)}"
    unique = connection.execute(
        f"select count(*) = count(distinct ({', '.join(keys)})) from original"
    ).fetchone()
    [(matched, correlation, kept)] = connection.execute(
        f"select count(*), corr(a, b), avg((a = b)::int) from ({pairs})"
    ).fetchall()
    return {
        "rows": rows,
        "released_rows": n,
        "held_out_rows": m,
        "total_variation": float(np.abs(law - of_released / n).sum() / 2),
        "bound": b_n + (2 + m / n) * b_m,
        "bound_holds_with_probability": 1 - 2 * ALPHA,
        "keys_are_unique": bool(unique and unique[0]),
        "released_rows_matched_by_key": matched,
        "correlation": correlation,
        "share_of_ratings_unchanged": kept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("original")
    parser.add_argument("released")
    parser.add_argument("--column", default="rating")
    parser.add_argument("--keys", nargs="+", default=["userId", "movieId"])
    arguments = parser.parse_args()
    print(
        json.dumps(
            compare(arguments.original, arguments.released, arguments.column, arguments.keys),
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
