"""Table 2 of Bi and Shen, Distribution-invariant differential privacy: the coefficients of a linear regression.

    python -m pipelines.papers.dip.table2 [--replicates 1000] [--sizes 200 2000] [--columns 6 30]

Y = X β + e, β = 1; a third each of X's columns is N(0, 10²), Poisson(5) and Bernoulli(0.5). Released are all columns and Y,
in a random order, by the chain of a hold-out; the distance is that of the least-squares coefficients with their intercept
(β, 0): without the intercept the non-private numbers would be √(8.4 / 21.4) = 0.63 of the paper's.

The paper makes a discrete value v continuous first, v - U with U uniform on (0, 1), and only then cuts the grid of records:
a released value is then the level above a point of a record's cell, which may be a level higher than its lower neighbour's.
Our chain keeps levels as they are. Both are shown; "continualised" is the paper's, by the same kernel.

End to end private: all rows by the tree of noisy tables, ε and δ = 2⁻³⁰, half of ε for the tables. LRM and OPM take each
column by itself, and then the residuals of Y given the noisy X, as the appendix says.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from pipelines.papers.dip import baselines, joint
from pipelines.papers.dip.common import (
    ALL_PRIVATE,
    EPSILONS,
    NAMES,
    Cell,
    Row,
    Table,
    cells_of,
    choose,
    lines,
    parser,
    replicate_rng,
    report,
)
from pipelines.papers.dip.releases import levels, line

Array = Any
MAX_POISSON = 30  # beyond lie 1e-14
CONTINUALISED = {name: f"{name}, continualised" for name in NAMES.values()}
METHODS = (
    "NP",
    *(method for names in CONTINUALISED.items() for method in names),
    ALL_PRIVATE,
    "LRM",
    "OPM",
)


def data(
    n: int, p: int, rng: np.random.Generator, design: np.random.Generator | None = None
) -> Array:
    """Return the columns of X, drawn by `design` if it is given, and then Y, float64 array of shape (n, p + 1)."""
    third, of_x = p // 3, rng if design is None else design
    x = np.hstack(
        [
            of_x.normal(0, 10, (n, third)),
            np.minimum(of_x.poisson(5, (n, third)), MAX_POISSON),
            of_x.integers(0, 2, (n, third)),
        ]
    )
    return np.column_stack([x, x.sum(axis=1) + rng.normal(size=n)])


def codecs(p: int, *, for_tree: bool = False) -> list[Any]:
    """Return the codecs of X's columns and of Y; the bounds are public, and only the private tree needs them."""
    third = p // 3
    bounds, bounds_of_y = ((-45.0, 45.0), scale(p)) if for_tree else (None, None)
    return [
        *(line(bounds, f"normal{k}") for k in range(third)),
        *(levels(range(MAX_POISSON + 1), f"poisson{k}") for k in range(third)),
        *(levels((0, 1), f"binary{k}") for k in range(third)),
        line(bounds_of_y, "y"),
    ]


def scale(p: int) -> tuple[float, float]:
    """Return public bounds of Y: 4.5 standard deviations on either side of its mean."""
    middle, deviation = (p // 3) * 5.5, float(np.sqrt((p // 3) * (100 + 5 + 0.25) + 1))
    return middle - 4.5 * deviation, middle + 4.5 * deviation


def continualised(
    table: Array,
    out: Array,
    epsilon: float,
    order: Array,
    rng: np.random.Generator,
    seed: int,
    place: str,
) -> Array:
    """Return the rows released as the paper does it: discrete values spread below themselves, and rounded up again."""
    p = table.shape[1] - 1
    third, v = p // 3, table.copy()
    v[:, third:p] -= rng.random((len(table), p - third))
    unlevelled = [line(name=codec.name) for codec in codecs(p)]
    released = joint.chain(v, out, unlevelled, epsilon, "laplace", order, seed, place)
    released[:, third:p] = np.ceil(released[:, third:p])
    highest = np.repeat([MAX_POISSON, 1], third)
    released[:, third:p] = released[:, third:p].clip(0, highest)
    return released


def tree_bins(p: int) -> dict[str, Any]:
    low, high = scale(p)
    steps = np.linspace(-2.4, 2.4, 9)
    normal, y = (
        tuple((10 * steps).tolist()),
        tuple(((low + high) / 2 + (high - low) / 9 * steps).tolist()),
    )
    return {f"normal{k}": normal for k in range(p // 3)} | {"y": y}


def distance(table: Array) -> float:
    """Return how far the least-squares coefficients of a table, with their intercept, are from the true ones."""
    x = np.column_stack([np.ones(len(table)), table[:, :-1]])
    beta = np.linalg.lstsq(x, table[:, -1], rcond=None)[0]
    beta[1:] -= 1
    return float(np.linalg.norm(beta))


def competitor(table: Array, epsilon: float, method: str, rng: np.random.Generator) -> Array:
    """Return X column by column, and Y by its residuals given the noisy X; ε / (p + 1) each."""
    share = epsilon / table.shape[1]

    def one(column: Array, low: float | None) -> Array:
        if method == "OPM":
            return baselines.opm_ball(
                column, np.sqrt(len(column)) * float(np.abs(column).max()), share, rng=rng
            )
        width = float(column.max()) if low == 0.0 else 2 * float(np.abs(column).max())
        return baselines.lrm(column, width, share, rng=rng)

    third = (table.shape[1] - 1) // 3
    x = np.column_stack(
        [one(column, None if k < third else 0.0) for k, column in enumerate(table.T[:-1])]
    )
    design = np.column_stack([np.ones(len(x)), x])
    fitted = design @ np.linalg.lstsq(design, table[:, -1], rcond=None)[0]
    return np.column_stack([x, fitted + one(table[:, -1] - fitted, None)])


def one_replicate(
    n: int, p: int, epsilon: float, seed: int, k: int, design: int | None = None
) -> dict[str, float]:
    """Return the distances of all methods on one simulated table; with a number of a design, all replicates have its X."""
    rng = replicate_rng(seed, 2, n, p, int(epsilon), k)
    table = data(n, p, rng, None if design is None else replicate_rng(design, 2, n, p))
    place = f"{n}/{p}/{epsilon}/{k}"
    found = {
        "NP": distance(table),
        "LRM": distance(competitor(table, epsilon, "LRM", rng)),
        "OPM": distance(competitor(table, epsilon, "OPM", rng)),
    }
    for fraction, name in NAMES.items():
        here = f"{place}/{fraction}"
        held = joint.hold_out(table, codecs(p), fraction, epsilon, rng, seed, here)
        found[name], found[f"optimal {name}"] = distance(held.laplace), distance(held.optimal)
        found[CONTINUALISED[name]] = distance(
            continualised(table, held.out, epsilon, held.order, rng, seed, f"{here}/v")
        )
    return found


def private_replicate(n: int, p: int, epsilon: float, seed: int, k: int) -> float:
    rng = replicate_rng(seed, 2, n, p, int(epsilon), k)
    table = data(n, p, rng)
    public = codecs(p, for_tree=True)
    for column, codec in enumerate(public):
        if codec.name.startswith(("normal", "y")):
            table[:, column] = table[:, column].clip(*codec.bounds)
    return distance(
        joint.tree(table, public, tree_bins(p), epsilon, rng, seed, f"tree/{n}/{p}/{epsilon}/{k}")
    )


def rows_of(n: int, p: int, epsilon: float, private: int, options: argparse.Namespace) -> list[Row]:
    """Return the lines of one setting at one ε."""
    seed, setting = options.seed, f"N = {n}, p = {p}"
    cells = cells_of(
        [one_replicate(n, p, epsilon, seed, k, options.design) for k in range(options.replicates)]
    )
    if private:
        cells[f"private {ALL_PRIVATE}"] = Cell.of(
            private_replicate(n, p, epsilon, seed, k) for k in range(private)
        )
    return lines("Table 2", setting, epsilon, METHODS, cells)


def table(options: argparse.Namespace) -> Table:
    settings = [(n, p) for p in options.columns for n in options.sizes]
    private = min(options.replicates, options.private)
    return Table(
        name="Table 2",
        title="coefficients of a linear regression, law unknown",
        unit=(
            f"Mean Euclidean distance of (intercept, β) from the truth ± its standard error; {options.replicates} replicates "
            f"({private} end to end private; paper: 1000)."
        ),
        rows=[
            row
            for n, p in settings
            for epsilon in options.epsilons
            for row in rows_of(n, p, epsilon, private, options)
        ],
        notes=[
            "The distance includes the intercept: without it the non-private numbers would be 0.63 of the paper's.",
            (
                "A released row of the chain follows one hold-out record up to the gap to its neighbours, so the error is that of "
                "the hold-out's few records and of these gaps: ε hardly matters."
            ),
            (
                "Half of DIP's error is the intercept's bias: inside its cell a released value lies below its record's, by half a gap on average. "
                "What is left of the difference (continualised, up to 13 % in two of the four settings) LRM and OPM have as well, in the same "
                "settings and directions: it is what one X for all replicates of a setting does (--design). Means of ours then differ between "
                "designs by standard deviations of 6 % (DIP) and 12 % (LRM) at N = 200, p = 6, of 12 % (DIP) at N = 2000, p = 30. That the paper "
                "drew X once is likely, then, and not known."
            ),
            (
                "Where 30 records stand for 32 coefficients (N = 200, p = 30, 15 %) only the gaps make a regression possible, and keeping "
                "levels as they are costs: there ours is twice the paper's. Elsewhere it is below it."
            ),
            "End to end private: a tree of noisy two-way tables of all rows, at δ = 2⁻³⁰; continuous columns in 10 public cells.",
        ],
    )


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, 60)
    choose(options, "--sizes", (200, 2000))
    choose(options, "--columns", (6, 30))
    choose(options, "--epsilons", EPSILONS)
    options.add_argument(
        "--design",
        type=int,
        help="a number: X is drawn once for each setting, by it, and not anew for every replicate",
    )
    options.add_argument(
        "--private",
        type=int,
        default=20,
        help="replicates of the tree, which is refitted for each; 0: none",
    )
    chosen = options.parse_args(arguments)
    report(chosen, lambda: table(chosen))


if __name__ == "__main__":
    main()
