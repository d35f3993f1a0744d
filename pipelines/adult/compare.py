"""A copula job beside its paper's recipe, and beside itself without each improvement: for the data's steward only, because it reads private rows.

    python -m pipelines.adult.compare --input /path/to/adult.parquet
    python -m pipelines.adult.compare --job pipelines/acs/job.yaml --input /path/to/national2019.parquet

Prints a Markdown table, and writes JSON on demand: errors of all one-way and two-way counts and of some three-way ones, in rows, as
average/maximum over the best 95 · 99 · 100 % of the queries; the mean total variation of the two-way tables; the share of
released rows that are records; seconds to count, draw, fit and sample. Medians of several runs, the same queries for all.
Columns, cells, ε, δ and weights are the job's. Noise is secure unless a seed is given.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from dpdask.arrays import Codes
from dpdask.cells import DEFAULT_BINS, cells
from dpdask.codec import codec_for
from dpdask.jobs.spec import load_job
from dpdask.kernels.channel import project
from dpdask.mechanisms.copula.fit import (
    CopulaOptions,
    Records,
    fit_copula,
    measure_pairs_again,
)
from dpdask.mechanisms.copula.model import CopulaModel
from dpdask.mechanisms.copula.spec import CopulaSpec, count_measured_again
from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    NoisyMarginals,
    denoise,
    measure,
    pair_cells,
    plan_noise,
)
from dpdask.privacy import Budget
from dpdask.privacy.events import Adjacency, DiscreteLaplace, scale_events
from dpdask.references.histogram import list_adaptive
from dpdask.stats import Domain, MarginalCounts
from dpdask.stats.marginals import domain_of, encode
from dpdask.streams import RunKey, Stream, stream
from pipelines.benchmarks.common import add_seeds, keep, parser, seeds_of
from pipelines.papers import asghar_copula
from pipelines.papers.asghar_utility import (
    N_QUERIES,
    Answers,
    ErrorProfile,
    UtilityReport,
    compare_answers,
    three_way_queries,
)

QUERIES_SEED = 1
WITHOUT = {
    "consistency": CopulaOptions(consistency=False),
    "shrinkage": CopulaOptions(shrinkage=False),
    "significance": CopulaOptions(significance=False),
    "the tree": CopulaOptions(tree=False),
    "any of these": CopulaOptions(
        consistency=False, shrinkage=False, significance=False, tree=False, refinements=0
    ),
}
# The paper's table 2; the others from measurements of the same errors at ε = 1, δ = 1e-9, add-remove, on cells like these.
QUOTED = {
    "adult-copula": """
| *quoted:* the paper, its own cells and machine | 92/389 · 107/482 · 106/773 | 18/184 · 29/504 · 38/4788 | 12/120 · 20/408 · 28/6148 | – | – | 407 |
| *quoted:* private-pgm MST | 24/65 · 26/98 · 27/113 | 8.2/62 · 11.7/177 · 14.6/808 | 0.72/10 · 1.5/45 · 2.5/660 | 0.0416 | 100 % | 63 |
| *quoted:* private-pgm AIM | 35/121 · 43/231 · 45/321 | 8.4/60 · 11.4/128 · 13.2/710 | 0.70/9 · 1.4/39 · 2.1/426 | 0.0378 | 100 % | 429 |
""".strip()
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job's table in codes, its budget, and the true answers."""

    name: str
    domain: Domain
    codes: Codes
    budget: Budget
    weights: tuple[float, float]
    queries: np.ndarray
    true: Answers

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.domain.sizes


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run of one row answers; no share where there are no rows, no seconds where nothing is released."""

    answers: Answers
    valid: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The randomness of one run."""

    key: RunKey
    secure: bool

    @classmethod
    def of(cls, seed: int | None) -> Draws:
        """Return secure draws; with a seed, insecure ones."""
        key = RunKey.fresh() if seed is None else RunKey.insecure(seed)
        return cls(key=key, secure=seed is None)

    def noise(self, part: str = "") -> Stream | None:
        return None if self.secure else stream(self.key, "marginals/noise", part)

    def other(self, name: str = "") -> np.random.Generator:
        return stream(self.key, "compare", name).seed_generator()


Maker = Callable[[Case, Draws], Run]


def read_case(job: Path, path: str | None, n_queries: int) -> Case:
    """Return the job's table, coded as the job would; every value is checked against the schema."""
    settings = {} if path is None else {"input.path": json.dumps(str(Path(path).resolve()))}
    loaded = load_job(job, settings)
    mechanism = loaded.file.mechanism
    if not isinstance(mechanism, CopulaSpec):
        raise SystemExit(f"{job} is no copula job")
    columns, bins = loaded.schema.privatised, mechanism.bins
    file = loaded.input_url.removeprefix("file://")
    table = pq.read_table(file, columns=list(columns)).combine_chunks()
    if adaptive := list_adaptive(loaded.schema, bins):
        raise SystemExit(
            f"{job} finds the cells of {', '.join(adaptive)} under privacy; name their cells in bins, so that they are public"
        )
    bins = bins if isinstance(bins, dict) else dict.fromkeys(columns, bins)
    cut = {
        name: cells(
            codec_for(name, loaded.schema.columns[name], table.schema.field(name).type),
            bins.get(name, DEFAULT_BINS),
        )
        for name in columns
    }
    domain = domain_of(cut)
    codes = np.concatenate(
        [encode(batch, cut, domain, None) for batch in table.to_batches()], axis=1
    )
    queries = three_way_queries(
        domain.sizes, n_queries=n_queries, rng=np.random.default_rng(QUERIES_SEED)
    )
    return Case(
        name=loaded.file.name,
        domain=domain,
        codes=codes,
        budget=loaded.file.privacy,
        weights=(mechanism.weights.one_way, mechanism.weights.two_way),
        queries=queries,
        true=Answers.of_codes(codes, domain.sizes, queries),
    )


def gaussian(case: Case, adjacency: Adjacency) -> MarginalNoise:
    """Return the noise of the job."""
    budget = case.budget.model_copy(update={"adjacency": adjacency})
    n_chosen = count_measured_again(case.domain.n_attributes, budget.delta)
    return plan_noise(
        budget,
        case.domain.n_attributes,
        one_way=case.weights[0],
        pairs=case.weights[1],
        n_chosen=n_chosen,
    )


def laplace(case: Case, adjacency: Adjacency) -> MarginalNoise:
    """Return Laplace noise in its place, priced by the same accountant at the same ε and δ."""
    m, sensitivity = case.domain.n_attributes, 2 if adjacency == "replace-one" else 1
    counts = (m, m * (m - 1) // 2)
    drafts = [
        DiscreteLaplace(scale=1 / weight, sensitivity=sensitivity, adjacency=adjacency, count=n)
        for weight, n in zip(case.weights, counts, strict=True)
    ]
    one_way, pairs = scale_events(drafts, case.budget.epsilon, case.budget.delta)
    return MarginalNoise(one_way=one_way, pairs=pairs, cliques={})


def drawn(case: Case, planned: MarginalNoise, adjacency: Adjacency, draws: Draws) -> NoisyMarginals:
    counts = MarginalCounts.of_codes(case.domain, case.codes)
    noisy = measure(counts, planned, n_rows_public=adjacency == "replace-one", rng=draws.noise())
    return measure_pairs_again(noisy, counts, rng=draws.noise("again"))


def ours(
    case: Case,
    draws: Draws,
    adjacency: Adjacency,
    options: CopulaOptions | None = None,
    plan: Callable[[Case, Adjacency], MarginalNoise] = gaussian,
    records: Records = "raked",
) -> Run:
    planned = plan(case, adjacency)  # depends on no data
    start = time.perf_counter()
    noisy = drawn(case, planned, adjacency, draws)
    model, _ = fit_copula(noisy, draws.other("fit"), options, records=records)
    codes = draw_all(model, max(1, round(model.n_rows)), draws.other("sample"))
    seconds = time.perf_counter() - start
    answers = Answers.of_codes(codes, case.sizes, case.queries)
    return Run(answers=answers, valid=1.0, seconds=seconds)


def draw_all(model: CopulaModel, n: int, rng: np.random.Generator) -> Codes:
    """Return n records of a copula, drawn block by block as in a job."""
    parts = [
        model.draw(min(model.block_rows, n - first), rng) for first in range(0, n, model.block_rows)
    ]
    return np.concatenate(parts, axis=1)


def dummies(case: Case, draws: Draws, make: Callable[[Case, Draws], asghar_copula.Dummies]) -> Run:
    start = time.perf_counter()
    made = make(case, draws)
    seconds = time.perf_counter() - start
    answers = asghar_copula.dummy_answers(made, case.sizes, case.queries)
    valid = asghar_copula.valid_share(made, case.sizes)
    return Run(answers=answers, valid=valid, seconds=seconds)


def dpc(case: Case, draws: Draws, adjacency: Adjacency) -> asghar_copula.Dummies:
    budget = case.budget
    planned = asghar_copula.paper_noise(
        case.domain.n_attributes, epsilon=budget.epsilon, delta=budget.delta, adjacency=adjacency
    )
    return asghar_copula.dpc(drawn(case, planned, adjacency, draws), rng=draws.other())


def tables(case: Case, draws: Draws, adjacency: Adjacency, *, denoised: bool) -> Run:
    """The tables themselves, each on its own the nearest that has no negative count and sums to the number of rows; or as the fit believes them."""
    noisy = drawn(case, gaussian(case, adjacency), adjacency, draws)
    one_way = projected(noisy.one_way, case.sizes, noisy.n_rows)
    pairs = projected(noisy.pairs, pair_cells(case.domain), noisy.n_rows)
    if denoised:
        cleaned = denoise(noisy)
        one_way = np.concatenate(cleaned.one_way)
        for group in cleaned.groups:
            flat = group.tables.reshape(len(group.starts), -1)
            pairs[group.starts[:, None] + np.arange(flat.shape[1])] = flat
    return Run(answers=Answers(n_rows=noisy.n_rows, one_way=one_way, two_way=pairs, three_way=None))


def projected(counts: np.ndarray, n_cells: Sequence[int], n_rows: float) -> np.ndarray:
    parts = np.split(counts.astype(np.float64), np.cumsum(n_cells)[:-1])
    return np.concatenate([project(part, n_rows) for part in parts])


def lap(case: Case, draws: Draws, adjacency: Adjacency) -> Run:
    """Laplace noise by the paper's theorem: on all one- and two-way counts, and as if nothing else were asked on all three-way ones."""
    m, sensitivity = case.domain.n_attributes, 2 if adjacency == "replace-one" else 1

    def answers(counts: np.ndarray, n_tables: int) -> np.ndarray:
        share = asghar_copula.table_epsilon(
            n_tables, epsilon=case.budget.epsilon, delta=case.budget.delta
        )
        rng = draws.other(str(n_tables))
        return asghar_copula.laplace_answers(counts, scale=sensitivity / share, rng=rng)

    both = answers(np.concatenate([case.true.one_way, case.true.two_way]), m + math.comb(m, 2))
    one_way, two_way = np.split(both, [sum(case.sizes)])
    three_way = answers(case.true.three_way, math.comb(m, 3))
    return Run(answers=replace(case.true, one_way=one_way, two_way=two_way, three_way=three_way))


def no_cor(case: Case, _: Draws) -> Run:
    two_way = asghar_copula.independent_two_way(case.codes, case.sizes)
    three_way = asghar_copula.independent_three_way(case.codes, case.sizes, case.queries)
    return Run(answers=replace(case.true, two_way=two_way, three_way=three_way))


def bootstrap(case: Case, draws: Draws) -> Run:
    n = case.codes.shape[1]
    again = case.codes[:, draws.other().integers(0, n, n)]
    return Run(answers=Answers.of_codes(again, case.sizes, case.queries), valid=1.0)


def rows_of(case: Case) -> dict[str, Maker]:
    """Return the table's rows: what was promised by ours stands first, then the paper's, then what is not private."""
    usual = case.budget.adjacency
    other: Adjacency = "replace-one" if usual == "add-remove" else "add-remove"
    by_adjacency: dict[str, Callable[..., Run]] = {
        "the paper's recipe (dpc)": lambda case, draws, adjacency: dummies(
            case, draws, partial(dpc, adjacency=adjacency)
        ),
        "the paper's Laplace answers (Lap)": lap,
        "our noisy tables alone": partial(tables, denoised=False),
        "our tables without their noise, as the fit believes them": partial(tables, denoised=True),
    }
    unraked = partial(ours, adjacency=usual, records="copula")
    of_paper = {
        "the paper's copula (cop)": asghar_copula.cop,
        "no correlations (cop-ID)": asghar_copula.cop_id,
        "all correlations 1 (cop-1)": asghar_copula.cop_one,
    }
    return {
        **{f"**ours**, {each}": partial(ours, adjacency=each) for each in (usual, other)},
        f"ours without raking, {usual}": unraked,
        f"ours without raking and refinements, {usual}": partial(
            unraked, options=CopulaOptions(refinements=0)
        ),
        **{
            f"ours without {what}, {usual}": partial(ours, adjacency=usual, options=options)
            for what, options in WITHOUT.items()
        },
        f"ours with Laplace noise, {usual}": partial(ours, adjacency=usual, plan=laplace),
        **{
            f"{name}, {each}": partial(make, adjacency=each)
            for name, make in by_adjacency.items()
            for each in (usual, other)
        },
        **{
            f"*not private:* {name}": partial(
                dummies,
                make=lambda case, draws, made=made: made(case.codes, case.sizes, rng=draws.other()),
            )
            for name, made in of_paper.items()
        },
        "*not private:* independent columns (no-cor)": no_cor,
        "*not private:* bootstrap resample, the floor": bootstrap,
    }


def median_profile(profiles: Sequence[ErrorProfile | None]) -> ErrorProfile | None:
    found = [profile for profile in profiles if profile is not None]
    if not found:
        return None
    average, maximum = (
        np.median([getattr(profile, part) for profile in found], axis=0)
        for part in ("average", "maximum")
    )
    return ErrorProfile(average=tuple(average.tolist()), maximum=tuple(maximum.tolist()))


def median(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return float(np.median(found)) if found else None


def summary(runs: Sequence[Run], case: Case) -> tuple[UtilityReport, dict[str, Any]]:
    """Return the median report, and all that JSON says of a row."""
    reports = [compare_answers(case.true, run.answers, case.sizes) for run in runs]
    profiles = {
        name: median_profile([getattr(each, name) for each in reports])
        for name in ("one_way", "two_way", "three_way")
    }
    variations = [each.mean_total_variation for each in reports]
    report = UtilityReport(**profiles, mean_total_variation=median(variations))
    said: dict[str, Any] = {
        name: profile and {"average": profile.average, "maximum": profile.maximum}
        for name, profile in profiles.items()
    }
    said |= {
        "mean_total_variation": report.mean_total_variation,
        "mean_total_variation_of_runs": variations,
        "valid_share": median([run.valid for run in runs]),
        "seconds": median([run.seconds for run in runs]),
    }
    return report, said


def line(name: str, report: UtilityReport, valid: float | None, seconds: float | None) -> str:
    share = "–" if valid is None else "100 %" if valid == 1 else f"{100 * valid:.2g} %"
    return (
        f"{report.to_markdown_row(name)} {share} | {'–' if seconds is None else f'{seconds:.1f}'} |"
    )


def heading(case: Case, *, insecure: bool) -> str:
    budget = case.budget
    promised = f"{case.codes.shape[1]:,} rows, {sum(case.sizes)} levels, ε = {budget.epsilon:g}, δ = {budget.delta:.3g}"
    warning = " INSECURE: the noise comes from a seed." if insecure else ""
    columns = "| | one-way | two-way | three-way | mean two-way TV | valid rows | seconds |"
    return f"{case.name}: {promised}.{warning}\n\n{columns}\n|---|---|---|---|---|---|---|"


def head(case: Case, n_runs: int, seed: int | None) -> dict[str, Any]:
    """Return what JSON says of all rows."""
    return {
        "job": case.name,
        "n_rows": case.codes.shape[1],
        "n_levels": sum(case.sizes),
        "epsilon": case.budget.epsilon,
        "delta": case.budget.delta,
        "n_runs": n_runs,
        "insecure_seed": seed,
        "n_queries": [len(case.true.one_way), len(case.true.two_way), len(case.queries)],
    }


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__)
    add_seeds(options)
    options.add_argument("--job", type=Path, default=Path(__file__).with_name("job.yaml"))
    options.add_argument("--input", help="the table, one Parquet file; by default the job's")
    options.add_argument(
        "--queries", type=int, default=N_QUERIES, help="how many three-way conjunctions"
    )
    options.add_argument("--rows", nargs="+", help="only rows whose name holds one of these texts")
    given = options.parse_args(arguments)
    case = read_case(given.job, given.input, given.queries)
    chosen = {
        name: make
        for name, make in rows_of(case).items()
        if given.rows is None or any(text in name for text in given.rows)
    }
    few = replace(case, codes=np.ascontiguousarray(case.codes[:, :256]))
    for make in chosen.values():
        make(few, Draws.of(None))  # compiled before any second is counted
    print(heading(case, insecure=given.seed is not None))
    said = []
    for name, make in chosen.items():
        report, values = summary([make(case, Draws.of(seed)) for seed in seeds_of(given)], case)
        said.append({"name": name, **values})
        print(line(name, report, values["valid_share"], values["seconds"]), flush=True)
    quoted = QUOTED.get(case.name, "")
    print(quoted)
    found = {**head(case, given.runs, given.seed), "rows": said, "quoted": quoted.splitlines()}
    keep(found, given.json, ensure_ascii=False)


if __name__ == "__main__":
    main()
