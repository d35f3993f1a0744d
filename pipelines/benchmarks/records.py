"""How near a copula job's records come to its table: for the data's steward only, because it reads private rows.

    python -m pipelines.benchmarks.records --input /path/to/adult.parquet --epsilon 0.3 1 3 --json records.json
    python -m pipelines.benchmarks.records --job pipelines/acs/job.yaml --input /path/to/national2019.parquet

For each ε: mean total variation of all two-way tables, of the worst pair, and of 100 random three-way tables (half the sum of the
differences), and CPU seconds of the fit and of drawing as many records as the table has. Four rows: raked records, the copula's
own, the denoised tables that records are raked to (which are no records), and a resample of the table itself, the floor.
Medians of several runs, the same triples for all. Noise is secure unless a seed is given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dpdask.arrays import Codes
from dpdask.kernels.marginals import count_clique, count_pairs
from dpdask.mechanisms.copula.fit import Records, fit_copula
from dpdask.mechanisms.marginals.noise import NoisyMarginals, denoise, pair_cells
from dpdask.stats import Domain
from dpdask.streams import RunKey
from pipelines.adult.compare import Case, Draws, draw_all, drawn, gaussian, read_case

N_TRIPLES = 100
TRIPLES_SEED = 1
MEASURES = ("two_way", "worst_pair", "three_way", "fit_seconds", "draw_seconds")
NAMES = {
    "raked": "raked records",
    "copula": "the copula's own records",
    "tables": "the denoised tables",
    "floor": "a resample of the table",
}


class Truth:
    """The table's own two-way tables, and some three-way ones, as shares."""

    def __init__(self, domain: Domain, codes: Codes) -> None:
        self.sizes = np.array(domain.sizes, dtype=np.int64)
        self.cells = pair_cells(domain)
        self.starts = np.concatenate([[0], np.cumsum(self.cells)[:-1]])
        triples = list(itertools.combinations(range(domain.n_attributes), 3))
        chosen = np.random.default_rng(TRIPLES_SEED).choice(
            len(triples), min(N_TRIPLES, len(triples)), replace=False
        )
        self.triples = [triples[place] for place in sorted(chosen)]
        self.pairs = count_pairs(codes, self.sizes) / codes.shape[1]
        self.threes = [self._three(codes, triple) for triple in self.triples]

    def _three(self, codes: Codes, triple: Sequence[int]) -> np.ndarray:
        return count_clique(codes, self.sizes, triple) / codes.shape[1]

    def of_pairs(self, pairs: np.ndarray) -> dict[str, float]:
        """Return the errors of two-way tables, as shares."""
        variation = np.add.reduceat(np.abs(pairs - self.pairs), self.starts) / 2
        return {"two_way": float(variation.mean()), "worst_pair": float(variation.max())}

    def of_records(self, codes: Codes) -> dict[str, float]:
        """Return the errors of records."""
        threes = [
            np.abs(self._three(codes, triple) - true).sum() / 2
            for triple, true in zip(self.triples, self.threes, strict=True)
        ]
        return {
            **self.of_pairs(count_pairs(codes, self.sizes) / codes.shape[1]),
            "three_way": float(np.mean(threes)) if threes else float("nan"),
        }


def flat_tables(noisy: NoisyMarginals) -> np.ndarray:
    """Return the denoised two-way tables, as shares, in the domain's order."""
    cleaned = denoise(noisy)
    pairs = np.zeros(len(noisy.pairs))
    for group in cleaned.groups:
        flat = group.tables.reshape(len(group.starts), -1)
        pairs[group.starts[:, None] + np.arange(flat.shape[1])] = flat / cleaned.n_rows
    return pairs


def run(case: Case, truth: Truth, draws: Draws) -> dict[str, dict[str, float]]:
    """Return the errors of each row, of one draw of the noise."""
    noisy = drawn(case, gaussian(case, "add-remove"), "add-remove", draws)
    n = max(1, round(noisy.n_rows))
    found = {"tables": truth.of_pairs(flat_tables(noisy))}
    kinds: tuple[Records, ...] = ("raked", "copula")
    for name in kinds:
        begin = time.process_time()
        model, _ = fit_copula(noisy, draws.other("fit"), records=name)
        fitted = time.process_time()
        codes = draw_all(model, n, draws.other(name)).astype(case.codes.dtype)
        seconds = {"fit_seconds": fitted - begin, "draw_seconds": time.process_time() - fitted}
        found[name] = truth.of_records(np.ascontiguousarray(codes)) | seconds
    again = draws.other("floor").integers(0, case.codes.shape[1], n)
    found["floor"] = truth.of_records(np.ascontiguousarray(case.codes[:, again]))
    return {name: found[name] for name in NAMES}


def line(name: str, found: dict[str, float]) -> str:
    """Return a row of the printed table."""
    shown = [
        f"{found[measure]:.{4 if measure in MEASURES[:3] else 1}f}" if measure in found else "–"
        for measure in MEASURES
    ]
    return f"| {NAMES[name]} | {' | '.join(shown)} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", type=Path, default=Path("pipelines/adult/job.yaml"))
    parser.add_argument("--input", help="the table, one Parquet file; by default the job's")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0])
    parser.add_argument("--seeds", type=int, default=5, help="how many runs")
    parser.add_argument(
        "--seed", type=int, help="INSECURE: noise from this seed, which protects nobody"
    )
    parser.add_argument(
        "--json", type=Path, help="a file for the same figures, and those of each run"
    )
    given = parser.parse_args(arguments)
    case = read_case(given.job, given.input, 1)
    truth = Truth(case.domain, case.codes)
    said: list[dict[str, Any]] = []
    for epsilon in given.epsilon:
        asked = replace(case, budget=case.budget.model_copy(update={"epsilon": epsilon}))
        keys = [
            RunKey.fresh() if given.seed is None else RunKey.insecure(given.seed + number)
            for number in range(given.seeds)
        ]
        runs = [run(asked, truth, Draws(key=key, secure=given.seed is None)) for key in keys]
        rows = {
            name: {
                measure: float(np.median([each[name][measure] for each in runs]))
                for measure in runs[0][name]
            }
            for name in NAMES
        }
        said.append({"epsilon": epsilon, "medians": rows, "runs": runs})
        print(
            f"{case.name}: {case.codes.shape[1]:,} rows, ε = {epsilon:g}, add-remove, medians of {given.seeds}",
            flush=True,
        )
        print(
            "| | two-way | worst pair | three-way | fit, CPU s | draw, CPU s |\n|---|---|---|---|---|---|"
        )
        print("\n".join(line(name, rows[name]) for name in NAMES), flush=True)
    if given.json is not None:
        head = {
            "job": case.name,
            "n_rows": case.codes.shape[1],
            "n_levels": sum(case.sizes),
            "delta": case.budget.delta,
            "insecure_seed": given.seed,
        }
        given.json.write_text(
            json.dumps({**head, "triples": truth.triples, "rows": said}, indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
