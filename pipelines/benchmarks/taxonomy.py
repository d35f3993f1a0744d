"""Two columns of many codes with a public taxonomy: how far pairs of codes and pairs of their parents are off in records.

    python -m pipelines.benchmarks.taxonomy --rows 1000000 --epsilon 1 --json taxonomy.json

Simulated: 700 codes of 20 parents, as frequent as words. In two rows of five the second code has the parent of the first one, in one of ten it is the
same. The levels are found in the job. The figures are total variation distances: of the pairs of the 60 commonest codes, and of the parents; and, beside
them, those of a sample with replacement of as many rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from dpdask import GaussianCopula, Schema
from pipelines.benchmarks.common import add_seeds, keep, parser, seeds_of

N_CODES, N_PARENTS, COMMONEST = 700, 20, 60
PARENT = np.random.default_rng(7).integers(0, N_PARENTS, N_CODES)
CODES = [f"d{code:03d}" for code in range(N_CODES)]
NAMES = np.array([*CODES, *(f"parent {place:02d}" for place in range(N_PARENTS)), "other"])
ABOVE = np.array([*PARENT, *range(N_PARENTS + 1)])  # of each name


def simulate(n_rows: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return the codes of both columns, shape (2, n_rows)."""
    shares = 1.0 / (np.arange(N_CODES) + 5.0) ** 1.1
    shares /= shares.sum()
    first, second = (rng.choice(N_CODES, n_rows, p=shares) for _ in range(2))
    is_near = rng.random(n_rows) < 0.4
    for parent in range(N_PARENTS):
        own = np.flatnonzero(parent == PARENT)
        rows = np.flatnonzero(is_near & (PARENT[first] == parent))
        second[rows] = rng.choice(own, len(rows), p=shares[own] / shares[own].sum())
    return np.stack([first, np.where(rng.random(n_rows) < 0.1, first, second)])


def shares_of(codes: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return the shares of the pairs of the commonest codes, and of the parents."""
    found = []
    for places, size in ((codes, len(NAMES)), (ABOVE[codes], N_PARENTS + 1)):
        counts = np.bincount(places[0] * size + places[1], minlength=size**2)
        found.append(counts.reshape(size, size) / codes.shape[1])
    return [found[0][:COMMONEST, :COMMONEST], found[1]]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--epsilon", type=float, default=1.0)
    options.add_argument("--most", type=int, help="levels that are found at most; 64 by default")
    options.add_argument("--one-way", type=float, default=1.0, help="weight of a one-way table")
    add_seeds(options)
    given = options.parse_args()
    rng = np.random.default_rng(1)
    codes = simulate(given.rows, rng)
    exact = shares_of(codes)

    def compare(drawn: np.ndarray[Any, Any]) -> dict[str, float]:
        off = (
            0.5 * np.abs(one - two).sum() for one, two in zip(shares_of(drawn), exact, strict=True)
        )
        return dict(zip(("pairs", "parents"), (round(float(each), 5) for each in off), strict=True))

    column = {"role": "privatise", "kind": "categorical", "levels": "discover", "other": "other"}
    column["taxonomy"] = [[code, NAMES[N_CODES + PARENT[n]]] for n, code in enumerate(CODES)]
    column |= {} if given.most is None else {"most": given.most}
    schema = Schema.from_dict({"columns": {"first": column, "second": column}})
    frame = pd.DataFrame(
        {
            name: pd.array(NAMES[each], "string")
            for name, each in zip(schema.columns, codes, strict=True)
        }
    )
    resampled = codes[:, rng.integers(0, given.rows, given.rows)]
    found: dict[str, Any] = {"resample": compare(resampled), "runs": []}
    place = {name: n for n, name in enumerate(NAMES)}
    for seed in seeds_of(given):
        asked = GaussianCopula(
            schema,
            epsilon=given.epsilon,
            delta=min(1e-6, 0.1 / given.rows),
            adjacency="add-remove",
            one_way=given.one_way,
            insecure_seed=seed,
        )
        records = asked.fit(frame).sample(seed=seed).compute()
        drawn = np.stack([records[name].map(place).to_numpy(np.int64) for name in records])
        found["runs"].append(compare(drawn))
        print(found["runs"][-1], flush=True)
    median = pd.DataFrame(found["runs"]).median()
    found["ratios"] = {
        name: round(median[name] / found["resample"][name], 3) for name in median.index
    }
    print(keep(found, given.json))


if __name__ == "__main__":
    main()
