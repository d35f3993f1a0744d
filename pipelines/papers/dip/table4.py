"""Table 4 of Bi and Shen, Distribution-invariant differential privacy: a parameter from 1000 discrete values of a known law.

    python -m pipelines.papers.dip.table4 [--replicates 1000]

NP, DIP: 1000 values, and their release by the known law. End to end private: the law is not known, the reference is a noisy
histogram of all rows that takes half of ε. The other methods, as far as the paper tells of them: LRM and OPM add Laplace
noise of scale Δ / ε; Δ is the largest value of the sample where the law is unbounded.

EXM is told of as an exponential mechanism whose score is a value's frequency and whose sensitivity is the largest value of
the sample. Taken by its word ("EXM") it draws almost evenly from the values that occur. The paper's EXM numbers are those of
drawing the released values from the sample again, with replacement ("resampling"), which is not private at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.papers.dip import baselines, releases
from pipelines.papers.dip.common import (
    EPSILONS,
    Cell,
    Row,
    Table,
    lines,
    parser,
    replicate_rng,
    report,
)

Array = Any
SIZE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A law of the table: scipy's name and parameters, the parameter that is estimated, and public domains."""

    label: str
    name: str
    parameters: dict[str, float]
    estimate: Callable[[Array], Array]
    truth: float
    levels: range
    width: float | None  # None: the sample's largest value
    cuts: (
        tuple[int, ...] | int
    )  # first values of the private histogram's cells; 2: every level a cell


def mean(values: Array) -> Array:
    return values.mean(axis=-1)


LAWS = (
    Law(
        label="Ber(0.1)",
        name="bernoulli",
        parameters={"p": 0.1},
        estimate=mean,
        truth=0.1,
        levels=range(2),
        width=1,
        cuts=2,
    ),
    Law(
        label="Bin(5, 0.5)",
        name="binom",
        parameters={"n": 5, "p": 0.5},
        estimate=lambda values: mean(values) / 5,
        truth=0.5,
        levels=range(6),
        width=5,
        cuts=2,
    ),
    Law(
        label="Pois(3)",
        name="poisson",
        parameters={"mu": 3.0},
        estimate=mean,
        truth=3.0,
        levels=range(26),  # beyond lie 1e-16
        width=None,
        cuts=(1, 2, 3, 4, 5, 6, 7, 9, 12),
    ),
    Law(
        label="Geom(0.2)",
        name="geom",
        parameters={"p": 0.2},
        estimate=lambda values: 1 / mean(values),
        truth=0.2,
        levels=range(1, 71),  # beyond lie 2e-7
        width=None,
        cuts=(2, 3, 4, 5, 6, 7, 9, 12, 16, 22, 30),
    ),
)

METHODS = ("NP", "DIP", "LRM", "OPM", "EXM", "resampling")


def draw(law: Law, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return values of a law; those beyond its levels become the last one."""
    p = law.parameters
    drawn = {
        "bernoulli": lambda: rng.binomial(1, p["p"], shape),
        "binom": lambda: rng.binomial(p["n"], p["p"], shape),
        "poisson": lambda: rng.poisson(p["mu"], shape),
        "geom": lambda: rng.geometric(p["p"], shape),
    }[law.name]()
    return np.minimum(drawn, law.levels[-1]).astype(np.int64)


def competitors(
    law: Law, samples: Array, epsilon: float, rng: np.random.Generator
) -> dict[str, Array]:
    """Return every sample as LRM, OPM and EXM would have it, and drawn again from itself."""
    found: dict[str, list[Array]] = {name: [] for name in METHODS[2:]}
    for sample in samples:
        width = float(law.width or sample.max())
        numbers = sample.astype(float)
        found["LRM"].append(baselines.lrm(numbers, width, epsilon, rng=rng))
        found["OPM"].append(
            baselines.opm_moment(numbers, width, np.inf, epsilon, non_negative=True, rng=rng)
        )
        values, counts = np.unique(sample, return_counts=True)
        law_of_exm = baselines.exm(counts / len(sample), width, epsilon)
        found["EXM"].append(rng.choice(values, len(sample), p=law_of_exm))
        found["resampling"].append(rng.choice(sample, len(sample)))
    return {name: np.array(rows) for name, rows in found.items()}


def rows_of(
    law: Law,
    epsilon: float,
    replicates: int,
    seed: int,
    size: int = SIZE,
    setting: str | None = None,
) -> list[Row]:
    """Return one law's lines at one ε."""
    rng = replicate_rng(seed, LAWS.index(law), int(epsilon), size)
    samples = draw(law, (replicates, size), rng)
    bounds = float(law.levels[0]), float(law.levels[-1])
    codec = releases.levels(list(law.levels))
    of_histogram = codec if law.cuts == 2 else releases.line(bounds, whole=True)
    place = replicate_rng(seed, 4, int(epsilon)), seed, law.label, samples.shape
    found = {
        "NP": samples,
        **competitors(law, samples, epsilon, rng),
        **releases.of_law(law, samples, codec, of_histogram, epsilon, *place),
    }
    cells = {
        name: Cell.of(1000 * np.abs(law.estimate(released) - law.truth))
        for name, released in found.items()
    }
    setting = setting or law.label
    return lines("Table 4", setting, epsilon, METHODS, cells)


def table(replicates: int, seed: int = 1, epsilons: tuple[float, ...] = EPSILONS) -> Table:
    return Table(
        name="Table 4",
        title="the mean of discrete values, law known",
        unit=f"Mean absolute error of a parameter, 10⁻³, ± its standard error; {SIZE} rows, {replicates} replicates (paper: 1000).",
        rows=[
            row
            for law in LAWS
            for epsilon in epsilons
            for row in rows_of(law, epsilon, replicates, seed)
        ],
        notes=[
            (
                "The paper's parentheses are standard deviations over replicates (0.75 of the mean, as the absolute value of a "
                "Gaussian has it), and its standard errors are these over √1000."
            ),
            (
                "DIP by a known law leaves the law as it is whatever ε and channel: what differs is how much of the row is left in "
                "its value, which this table does not measure."
            ),
            "End to end private: nothing is known of the law but its public range; half of ε buys a noisy histogram of all 1000 rows.",
            (
                "EXM by its word (score: frequency; sensitivity: the largest value) is nearly even on the values; the paper's "
                "numbers are those of resampling the sample, which protects nobody."
            ),
        ],
    )


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, 300).parse_args(arguments)
    report(options, lambda: table(options.replicates, options.seed))


if __name__ == "__main__":
    main()
