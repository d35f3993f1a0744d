"""Correlation of released with original rating, exactly from the channel, for MovieLens-25M's frequencies.

    python pipelines/movielens/correlations.py [--json]

No data are read and nothing is drawn: with P the frequencies (the released column has them too) and T the channel, the
covariance of Z and Z̃ is Σ P_k T[k, j] (v_k - m)(v_j - m). ε* is what the channel really spends of ε.
"""

from __future__ import annotations

import argparse
import itertools
import json

import numpy as np

from dpdask import channels
from dpdask.simulate import ML25M_RATING_COUNTS

LEVELS = np.arange(1, 11) / 2
COUNTS = np.array(ML25M_RATING_COUNTS)
EPSILONS = (1.0, 2.0, 3.0, 4.0)
CHANNELS = ("laplace", "laplace-calibrated", "optimal", "optimal-unbiased")


def channel(
    kind: str, probabilities: np.ndarray, levels: np.ndarray, epsilon: float
) -> channels.LevelChannel:
    """Return one of the job file's channels on ordered levels; `optimal` at the cost of a squared difference."""
    if kind == "optimal":
        return channels.optimal(probabilities, epsilon, channels.compute_squared(levels))
    if kind == "optimal-unbiased":
        return channels.optimal_unbiased(probabilities, epsilon, levels)
    return {"laplace": channels.laplace, "laplace-calibrated": channels.calibrate}[kind](
        probabilities, epsilon, ordered=True
    )


def correlation(probabilities: np.ndarray, matrix: np.ndarray, levels: np.ndarray) -> float:
    """Return the correlation of Z and Z̃ when Z has these probabilities, whatever the channel does to them."""
    released = probabilities @ matrix
    before, after = levels - probabilities @ levels, levels - released @ levels
    return float(
        (probabilities * before)
        @ matrix
        @ after
        / np.sqrt(probabilities @ before**2 * (released @ after**2))
    )


def table(epsilons: tuple[float, ...] = EPSILONS) -> list[dict[str, float | str]]:
    probabilities = COUNTS / COUNTS.sum()
    rows = []
    for kind, epsilon in itertools.product(CHANNELS, epsilons):
        made = channel(kind, probabilities, LEVELS, epsilon)
        kept = correlation(probabilities, made.matrix, LEVELS)
        row = {"channel": kind, "epsilon": epsilon, "epsilon_exact": made.epsilon}
        rows.append(row | {"correlation": kept})
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    as_json = parser.parse_args(arguments).json
    rows = table()
    if as_json:
        head = {"frequencies": COUNTS.tolist(), "levels": LEVELS.tolist()}
        print(json.dumps({**head, "rows": rows}, indent=1))
        return
    print("correlation of released with original rating (ε* in brackets)")
    print(f"{'channel':20}" + "".join(f"{f'ε = {epsilon:g}':>18}" for epsilon in EPSILONS))
    for kind in CHANNELS:
        cells = [
            f"{row['correlation']:.4f} ({row['epsilon_exact']:.3f})"
            for row in rows
            if row["channel"] == kind
        ]
        print(f"{kind:20}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
