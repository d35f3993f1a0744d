"""Table 6 of Bi and Shen, Distribution-invariant differential privacy: the precision matrix of a Gaussian network, low dimension.

    python -m pipelines.papers.dip.table6 [--replicates 1000] [--columns 5 15] [--epsilons 1 2 3 4]

2000 rows of p Gaussian columns. The paper estimates the precision matrix from the released rows by R's graphical lasso with
5-fold cross-validation. Its non-private losses, 0.01 and 0.06, are those of the inverse covariance matrix, p(p + 1) / 2N =
0.0075 and 0.06: the penalties it chose were as good as none. So the lines compare with the inverse covariance matrix; those
that end in "cross-validated" are scikit-learn's graphical lasso, which does choose a penalty, and does better.

DIP by the chain of a hold-out. End to end private: all rows by the tree of noisy tables of 10 public cells a column, at
δ = 2⁻³⁰. NLRM, NOPM: column by column with ε / p, as the appendix says. Needs the `inference` extra.
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
    Row,
    Table,
    cells_of,
    choose,
    lines,
    parser,
    replicate_rng,
    report,
)
from pipelines.papers.dip.networks import NETWORKS, covariance, entropy_loss, precision
from pipelines.papers.dip.releases import line

Array = Any
SIZE = 2000
BOUND = 5.0  # public; values beyond, 1 in 10⁶, become the bound
CUTS = tuple(np.linspace(-2.5, 2.5, 9).tolist())
CROSS_VALIDATED = ", cross-validated"
METHODS = (
    *(name + variant for name in ("NP", *NAMES.values()) for variant in ("", CROSS_VALIDATED)),
    ALL_PRIVATE,
    "NLRM",
    "NOPM",
)


def one_replicate(
    network: str, p: int, epsilon: float, seed: int, k: int, *, cross_validate: bool
) -> dict[str, float]:
    """Return the entropy losses of all methods on one simulated table; cross-validation is most of the work."""
    rng = replicate_rng(seed, 6, NETWORKS.index(network), p, int(epsilon), k)
    sigma = covariance(network, p, rng)
    rows, place = rng.multivariate_normal(np.zeros(p), sigma, SIZE), f"{network}/{p}/{epsilon}/{k}"
    largest = np.abs(rows).max(axis=0)
    released = {
        "NP": rows,
        "NLRM": baselines.nlrm(rows, 2 * largest, epsilon, rng=rng),
        "NOPM": baselines.nopm(rows, np.sqrt(SIZE) * largest, epsilon, rng=rng),
    }
    codecs = [line(name=f"x{column}") for column in range(p)]
    for fraction, name in NAMES.items():
        held = joint.hold_out(rows, codecs, fraction, epsilon, rng, seed, f"{place}/{fraction}")
        released |= {name: held.laplace, f"optimal {name}": held.optimal}
    bounded = [line((-BOUND, BOUND), codec.name) for codec in codecs]
    bins = {codec.name: CUTS for codec in bounded}
    released[f"private {ALL_PRIVATE}"] = joint.tree(
        rows.clip(-BOUND, BOUND), bounded, bins, epsilon, rng, seed, f"tree/{place}"
    )
    losses = {
        name: entropy_loss(sigma, np.linalg.inv(np.cov(found.T)))
        for name, found in released.items()
    }
    if cross_validate:
        for name in ("NP", *NAMES.values()):
            losses[name + CROSS_VALIDATED] = entropy_loss(sigma, precision(released[name]))
    return losses


def rows_of(
    network: str, p: int, epsilon: float, replicates: int, cross_validated: int, seed: int
) -> list[Row]:
    """Return the lines of one setting at one ε."""
    cells = cells_of(
        [
            one_replicate(network, p, epsilon, seed, k, cross_validate=k < cross_validated)
            for k in range(replicates)
        ]
    )
    setting = f"{network}, p = {p}"
    return lines("Table 6", setting, epsilon, METHODS, cells)


def table(options: argparse.Namespace) -> Table:
    settings = [(network, p) for network in NETWORKS for p in options.columns]
    return Table(
        name="Table 6",
        title="the precision matrix of a Gaussian network, law unknown",
        unit=(
            f"Mean entropy loss ± its standard error; {SIZE} rows, {options.replicates} replicates ({options.cross_validated} "
            "cross-validated; paper: 1000)."
        ),
        rows=[
            row
            for network, p in settings
            for epsilon in options.epsilons
            for row in rows_of(
                network, p, epsilon, options.replicates, options.cross_validated, options.seed
            )
        ],
        notes=[
            "DIP's loss is that of the hold-out: with m records about p(p + 1) / 2m on top of the released rows' own p(p + 1) / 2n, whatever ε.",
            (
                "The paper's penalties were as good as none: its non-private loss is p(p + 1) / 2N, that of the inverse covariance "
                "matrix. Cross-validated lines choose one and are better."
            ),
            "The paper gives two decimals; their rounding is part of its standard error here.",
            "End to end private: a tree of noisy two-way tables keeps p - 1 of the pairs; at ε = 1 its noise is large for 2000 rows.",
        ],
    )


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, 20)
    options.add_argument(
        "--cross-validated",
        type=int,
        default=2,
        help="of the replicates, how many are cross-validated too; default 2",
    )
    choose(options, "--columns", (5, 15))
    choose(options, "--epsilons", EPSILONS)
    chosen = options.parse_args(arguments)
    report(chosen, lambda: table(chosen))


if __name__ == "__main__":
    main()
