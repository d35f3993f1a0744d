"""How near a copula job's records come to its table: for the data's steward only, because it reads private rows.

    python -m pipelines.benchmarks.records --input /path/to/adult.parquet --epsilon 0.3 1 3 --json records.json
    python -m pipelines.benchmarks.records --job pipelines/acs/job.yaml --input /path/to/national2019.parquet
    python -m pipelines.benchmarks.records --input /path/to/adult.parquet --rules pipelines/adult/rules.yaml --seeds 3

For each ε: mean total variation of all two-way tables, of the worst pair, and of 100 random three-way tables (half the sum of the
differences), and CPU seconds of the fit and of drawing as many records as the table has. Four rows: raked records, the copula's
own, the denoised tables that records are raked to (which are no records), and a resample of the table itself, the floor.
Medians of several runs, the same triples for all. Noise is secure unless a seed is given.

`--rules` compares a million records under each set of rules of a file with those of the same job without rules: how many break a rule, by
their released values alone, and the mean total variation of the pairs that have a rule, and of the others.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import and_, or_
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import dpdask
from dpdask.arrays import Codes, Flags
from dpdask.conditions import Conditions, Rule
from dpdask.documents import parse_yaml
from dpdask.jobs.spec import Job, load_job
from dpdask.kernels.marginals import count_clique, count_pairs
from dpdask.mechanisms.copula.fit import Records, fit_copula
from dpdask.mechanisms.marginals.noise import NoisyMarginals, denoise, pair_cells
from dpdask.schema import Schema
from dpdask.stats import Domain
from dpdask.stats.marginals import domain_of, encode
from dpdask.streams import RunKey
from pipelines.adult.compare import Case, Draws, draw_all, drawn, gaussian, read_case
from pipelines.benchmarks.common import add_seeds, keep, parser, seeds_of

N_RULED, MOST_ROWS = 10**6, 100_000  # records under rules; of larger tables every k-th row is taken
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

    def vary(self, pairs: np.ndarray) -> np.ndarray:
        """Return the total variation of each two-way table."""
        found: np.ndarray = np.add.reduceat(np.abs(pairs - self.pairs), self.starts) / 2
        return found

    def of_pairs(self, pairs: np.ndarray) -> dict[str, float]:
        """Return the errors of two-way tables, as shares."""
        variation = self.vary(pairs)
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


def meet(table: pa.Table, conditions: Conditions, schema: Schema) -> Flags:
    """Return which records meet conditions, by their values."""
    found = []
    for name, values in conditions.items():
        column, declared = table[name], schema.columns[name]
        if declared.has_levels:
            flags = pc.is_in(column, pa.array(list(values), column.type))
        else:
            last = values[1] in (*(declared.atoms or ()), declared.bounds[1])
            is_last = last or pa.types.is_integer(column.type)
            low, high = (pa.scalar(value, column.type) for value in values)
            below = (pc.less_equal if is_last else pc.less)(column, high)
            flags = pc.fill_null(pc.and_(pc.greater_equal(column, low), below), fill_value=False)
        found.append(flags.to_numpy())
    return reduce(and_, found)


def break_rule(table: pa.Table, rule: Rule, schema: Schema) -> Flags:
    """Return which records break a rule, by their values."""
    if rule.columns is not None:
        allowed = set(rule.allow or ())
        pairs = zip(*(table[name].to_pylist() for name in rule.columns), strict=True)
        return np.array([pair not in allowed for pair in pairs])
    if rule.forbid is not None:
        return meet(table, rule.forbid, schema)
    return meet(table, rule.if_ or {}, schema) & ~meet(table, rule.then or {}, schema)


def draw_under(
    job: Job, bins: dict[str, Any], rules: tuple[Rule, ...], frame: pa.Table, seed: int | None
) -> tuple[pa.Table, np.ndarray]:
    """Return a million records of a copula under rules, and the total variation of each of their pairs."""
    asked, budget = job.file.mechanism, job.file.privacy
    copula = dpdask.GaussianCopula(
        job.schema.model_copy(update={"rules": rules}),
        epsilon=budget.epsilon,
        delta=budget.delta,
        adjacency=budget.adjacency,
        bins={**asked.bins, **bins},
        insecure_seed=seed,
    )
    with copula.fit(frame) as release:
        fitted, cells = release.fitted, release.fitted.cells()
    domain = domain_of(cells)
    table = pa.Table.from_batches(fitted.batches(0, N_RULED, N_RULED, RunKey.insecure(0), ""))
    true, found = (
        np.concatenate([encode(batch, cells, domain, None) for batch in each.to_batches()], axis=1)
        for each in (frame, table)
    )
    truth = Truth(domain, true)
    return table, truth.vary(count_pairs(found, truth.sizes) / N_RULED)


def compare_rules(job: Job, sets: dict[str, Any], seeds: Sequence[int | None]) -> None:
    """Print for each set of rules how many records break one, and the errors of ruled and other pairs, each beside those without rules."""
    names, bins = job.schema.privatised, sets.get("bins", {})
    frame = pq.read_table(job.input_url.removeprefix("file://"))
    frame = frame.take(np.arange(0, frame.num_rows, max(1, frame.num_rows // MOST_ROWS)))
    pairs = list(itertools.combinations(names, 2))
    without = [draw_under(job, bins, (), frame, seed) for seed in seeds]
    for name in [name for name in sets if name != "bins"]:
        rules = tuple(map(Rule.model_validate, sets[name]))
        under = [draw_under(job, bins, rules, frame, seed) for seed in seeds]
        ruled = {frozenset(rule.names) for rule in rules}
        is_ruled = np.array([frozenset(pair) in ruled for pair in pairs])
        said = [f"{job.file.privacy.epsilon:g}", f"{name}: {len(rules)}"]
        for runs in (under, without):
            broken = [
                reduce(or_, (break_rule(table, rule, job.schema) for rule in rules)).mean()
                for table, _ in runs
            ]
            said.append(f"{100 * np.mean(broken):.3g} %")
        for flags in (is_ruled, ~is_ruled):
            off = [np.mean([every[flags] for _, every in runs]) for runs in (under, without)]
            said.append(f"{off[0]:.4f}, {off[1]:.4f}: {off[0] / off[1]:.2f}")
        print(f"| {' | '.join(said)} |", flush=True)


def line(name: str, found: dict[str, float]) -> str:
    """Return a row of the printed table."""
    shown = [
        f"{found[measure]:.{4 if measure in MEASURES[:3] else 1}f}" if measure in found else "–"
        for measure in MEASURES
    ]
    return f"| {NAMES[name]} | {' | '.join(shown)} |"


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    add_seeds(options)
    options.add_argument("--job", type=Path, default=Path("pipelines/adult/job.yaml"))
    options.add_argument("--input", help="the table, one Parquet file; by default the job's")
    options.add_argument("--epsilon", type=float, nargs="+", default=[1.0])
    options.add_argument("--rules", type=Path, help="sets of rules, each a list in this YAML file")
    given = options.parse_args(arguments)
    if given.rules is not None:
        path = {"input.path": json.dumps(str(Path(given.input).resolve()))} if given.input else {}
        sets = parse_yaml(given.rules.read_text("utf-8"), str(given.rules))
        print(
            "| ε | rules | break one | without | ruled pairs | other pairs |\n" + "|---" * 6 + "|"
        )
        for epsilon in given.epsilon:
            job = load_job(given.job, {**path, "privacy.epsilon": str(epsilon)})
            compare_rules(job, sets, seeds_of(given))
        return
    case = read_case(given.job, given.input, 1)
    truth = Truth(case.domain, case.codes)
    said: list[dict[str, Any]] = []
    for epsilon in given.epsilon:
        asked = replace(case, budget=case.budget.model_copy(update={"epsilon": epsilon}))
        runs = [run(asked, truth, Draws.of(seed)) for seed in seeds_of(given)]
        rows = {
            name: {
                measure: float(np.median([each[name][measure] for each in runs]))
                for measure in runs[0][name]
            }
            for name in NAMES
        }
        said.append({"epsilon": epsilon, "medians": rows, "runs": runs})
        print(
            f"{case.name}: {case.codes.shape[1]:,} rows, ε = {epsilon:g}, add-remove, medians of {given.runs}",
            flush=True,
        )
        print(
            "| | two-way | worst pair | three-way | fit, CPU s | draw, CPU s |\n|---|---|---|---|---|---|"
        )
        print("\n".join(line(name, rows[name]) for name in NAMES), flush=True)
    head = {
        "job": case.name,
        "n_rows": case.codes.shape[1],
        "n_levels": sum(case.sizes),
        "delta": case.budget.delta,
        "insecure_seed": given.seed,
    }
    keep({**head, "triples": truth.triples, "rows": said}, given.json)


if __name__ == "__main__":
    main()
