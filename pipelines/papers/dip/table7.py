"""Table 7 of Bi and Shen, Distribution-invariant differential privacy: the mean salary of a large, skewed population.

    python -m pipelines.papers.dip.table7 [--replicates 1000]

The University of California's salaries of 2010 are not used: the population is SIMULATED. It is the 252,540 quantiles of the
Burr XII law whose mean, standard deviation and 90 % quantile are the published ones ($39,531.49, $53,253.93, $95,968.12);
its largest value is 1.75 million, where the paper's "exceeds two million". What depends on more than these three
numbers, such as the width of LRM's noise, can therefore differ.

Errors are |released mean / true mean - 1| in per cent. DIP holds out 15, 25 or 35 % of the rows, and the rest is released. End
to end private: all rows are released, by a noisy histogram of all rows that takes half of ε. LRM adds Laplace noise
of the largest value over ε. OPM (Duchi, Jordan and Wainwright, section 3.2.1) cuts salaries at T = r (n ε²)^(1/6), with r the
third moment's root, and adds noise of scale T / ε: the only reading of "the moment closest to 3" under which the paper's
OPM falls with ε as it does (ε^(-2/3)).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import optimize, stats

from pipelines.papers.dip import baselines, releases
from pipelines.papers.dip.common import (
    ALL_PRIVATE,
    EPSILONS,
    FRACTIONS,
    NAMES,
    Row,
    Table,
    cells_of,
    lines,
    parser,
    replicate_rng,
    report,
)

Array = Any
MEAN, DEVIATION, NINTH_DECILE, SIZE = 39_531.49, 53_253.93, 95_968.12, 252_540
BOUNDS = (0.0, 3_000_000.0)  # public: what a salary may be
CUTS = tuple(np.geomspace(500.0, 2_000_000.0, 120).tolist())
METHODS = (*NAMES.values(), ALL_PRIVATE, "LRM", "OPM")


def law() -> Any:
    """Return the Burr XII law with the three published numbers.

    Raises
    ------
    RuntimeError
        If it does not meet them within 1e-9.
    """

    def misses(logs: Array) -> list[float]:
        c, d, scale = np.exp(logs)
        found = stats.burr12(c, d, scale=scale)
        return [
            found.mean() / MEAN - 1,
            found.std() / DEVIATION - 1,
            found.ppf(0.9) / NINTH_DECILE - 1,
        ]

    fit = optimize.least_squares(
        misses, np.log([0.9, 8.0, 3e5]), xtol=1e-15, ftol=1e-15, gtol=1e-15
    )
    if np.abs(fit.fun).max() > 1e-9:
        raise RuntimeError("no Burr XII law has these three numbers")
    c, d, scale = np.exp(fit.x)
    return stats.burr12(c, d, scale=scale)


def population(size: int = SIZE) -> Array:
    """Return the law's quantiles at (i - 1/2) / size, in dollars."""
    return law().ppf((np.arange(size) + 0.5) / size)


def error(released: Array, truth: float) -> float:
    return 100 * abs(float(released.mean()) / truth - 1)


def by_holdout(
    salaries: Array, fraction: float, epsilon: float, channel: str, seed: int, k: int
) -> Array:
    """Return the released salaries of one replicate; the rows held out depend on the replicate and fraction alone."""
    out = replicate_rng(seed, 7, k, round(100 * fraction)).random(len(salaries)) < fraction
    codec = releases.line(BOUNDS)
    fitted = releases.mechanism(codec, releases.holdout(codec, salaries[out]), epsilon, channel)
    return releases.release(
        fitted, codec, salaries[~out], seed, "salary", fraction, epsilon, channel, k
    )


def by_private_histogram(salaries: Array, epsilon: float, seed: int, k: int) -> Array:
    rng, place = replicate_rng(seed, 7, k, int(epsilon), 99), ("salary", "private", epsilon, k)
    codec = releases.line(BOUNDS)
    return releases.by_private_histogram(codec, salaries, CUTS, epsilon, rng, seed, *place)


def competitors(salaries: Array, epsilon: float, rng: np.random.Generator) -> dict[str, Array]:
    third = float(np.mean(salaries**3) ** (1 / 3))
    return {
        "LRM": baselines.lrm(salaries, float(salaries.max()), epsilon, rng=rng),
        "OPM": baselines.opm_moment(salaries, third, 3, epsilon, non_negative=True, rng=rng),
    }


def rows_of(
    salaries: Array,
    epsilon: float,
    replicates: int,
    seed: int,
    fractions: tuple[float, ...] = FRACTIONS,
) -> list[Row]:
    """Return the lines of one ε."""
    truth, found = float(salaries.mean()), []
    for k in range(replicates):
        released = competitors(salaries, epsilon, replicate_rng(seed, 7, k, int(epsilon)))
        released[f"private {ALL_PRIVATE}"] = by_private_histogram(salaries, epsilon, seed, k)
        for fraction in fractions:
            name, given = NAMES[fraction], (salaries, fraction, epsilon)
            released[name] = by_holdout(*given, "laplace", seed, k)
            released[f"optimal {name}"] = by_holdout(*given, "optimal", seed, k)
        found.append({name: error(values, truth) for name, values in released.items()})
    return lines("Table 7", "salaries", epsilon, METHODS, cells_of(found))


def table(replicates: int, seed: int = 1, epsilons: tuple[float, ...] = EPSILONS) -> Table:
    salaries = population()
    return Table(
        name="Table 7",
        title="the mean of a skewed population (simulated)",
        unit=f"Mean of |released mean / true mean - 1|, %, ± its standard error; {SIZE:,} rows, {replicates} replicates (paper: 1000).",
        rows=[row for epsilon in epsilons for row in rows_of(salaries, epsilon, replicates, seed)],
        notes=[
            (
                "The population is simulated: a Burr XII law with the published mean, standard deviation and 90 % quantile; its "
                f"largest value is {salaries.max():,.0f}."
            ),
            (
                "LRM's noise is as wide as the largest value: 2.3 million would give the paper's numbers, so ours are "
                f"{salaries.max() / 2.3e6:.2f} of them by the population alone."
            ),
            "DIP's error is that of the hold-out's mean: it falls with its size, and with ε, as a released row keeps more of its own value.",
        ],
    )


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, 25).parse_args(arguments)
    report(options, lambda: table(options.replicates, options.seed))


if __name__ == "__main__":
    main()
