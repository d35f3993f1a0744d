"""DIP along a tree on the survey's 14 columns, every person released and covered: for the data's steward only, because it reads private rows.

    python pipelines/adult/tree.py --input /path/to/adult.parquet

Prints a Markdown table, a line for each channel, δ and share of ε that the noisy tables take: the mean total variation between
the two-way tables of the released and of the original rows, on the tree's pairs and on all pairs; how much more often a
released value is its own row's than another row's (mean over columns; 0: chance); how much more often a whole released row is
its own row's in half of the columns or more; ε* of a row; what everything costs together; seconds to fit. Means of several
runs. Cells are the copula job's. Noise is secure unless a seed is given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpdask.arrays import Codes
from dpdask.cells import DEFAULT_BINS, Cells, cells
from dpdask.codec import codec_for
from dpdask.jobs.spec import load_job
from dpdask.mechanisms.copula.spec import CopulaSpec
from dpdask.mechanisms.dip.spec import ChannelKind, DipSpec
from dpdask.mechanisms.dip.tree import TreeMechanism, fit_tree, measure_tree
from dpdask.privacy import Budget
from dpdask.references.histogram import Tree
from dpdask.schema import Schema
from dpdask.stats import Domain, MarginalCounts
from dpdask.stats.marginals import domain_of, encode
from dpdask.streams import RunKey, stream

DELTAS = (0.0, 2.0**-30)
SHARES = (0.3, 0.5, 0.7, 0.9)
SHOWN = {
    "TV, tree": ".4f",
    "TV, all pairs": ".4f",
    "own value kept": ".4f",
    "own row recognised": ".2f",
    "ε* of a row": ".3f",
    "ε in all": ".4f",
    "seconds": ".1f",
}
CHANNELS: tuple[ChannelKind, ...] = ("laplace", "optimal")


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The table, as values and as codes of its cells."""

    schema: Schema
    batch: pa.RecordBatch
    cells: dict[str, Cells]
    domain: Domain
    codes: Codes

    def coded(self, batch: pa.RecordBatch) -> Codes:
        return encode(batch, self.cells, self.domain, None)


def read_survey(path: str) -> Survey:
    """Return the table, its numbers cut as the copula job cuts them."""
    loaded = load_job(
        Path(__file__).with_name("job.yaml"), {"input.path": json.dumps(str(Path(path).resolve()))}
    )
    assert isinstance(loaded.file.mechanism, CopulaSpec)
    bins, names = loaded.file.mechanism.bins, loaded.schema.privatised
    assert not isinstance(bins, int)
    [batch] = pq.read_table(path, columns=list(names)).combine_chunks().to_batches()
    cut = {
        name: cells(
            codec_for(name, loaded.schema.columns[name], batch.schema.field(name).type),
            bins.get(name, DEFAULT_BINS),
        )
        for name in names
    }
    domain = domain_of(cut)
    return Survey(
        schema=loaded.schema,
        batch=batch,
        cells=cut,
        domain=domain,
        codes=encode(batch, cut, domain, None),
    )


def outcome(
    survey: Survey, budget: Budget, share: float, channel: ChannelKind, seed: int | None
) -> dict[str, float]:
    """Return what one run shows, by column of the printed table."""
    key = RunKey.fresh() if seed is None else RunKey.insecure(seed)
    mechanism = TreeMechanism(
        spec=DipSpec(reference=Tree(share=share), channel=channel),
        schema=survey.schema,
        budget=budget,
    )
    start = time.perf_counter()
    rng = None if seed is None else stream(key, "marginals/noise", "")
    noisy = measure_tree(
        MarginalCounts.of_codes(survey.domain, survey.codes), mechanism.noise, rng=rng
    )
    release = fit_tree(noisy, survey.cells, mechanism.spending.row, channel)
    seconds = time.perf_counter() - start
    codecs = {name: column.codec for name, column in survey.cells.items()}
    codes = survey.coded(release.randomise(survey.batch, codecs, release.streams(key, "")))
    apart = variations(survey.domain, survey.codes, codes)
    joined = {frozenset(edge) for edge in release.edges}
    own, other = codes == survey.codes, np.roll(codes, 1, axis=1) == survey.codes
    half = len(codes) // 2
    on_tree = [value for pair, value in apart.items() if frozenset(pair) in joined]
    return {
        "TV, tree": float(np.mean(on_tree)),
        "TV, all pairs": float(np.mean(list(apart.values()))),
        "own value kept": float(own.mean() - other.mean()),
        "own row recognised": float(
            (own.sum(axis=0) >= half).mean() / (other.sum(axis=0) >= half).mean()
        ),
        "ε* of a row": release.epsilon,
        "ε in all": mechanism.accounting(release)["epsilon_exact"],
        "seconds": seconds,
    }


def variations(domain: Domain, codes: Codes, others: Codes) -> dict[tuple[str, ...], float]:
    """Return the total variation between the two-way tables of each pair of columns."""
    first, second = (MarginalCounts.of_codes(domain, each) for each in (codes, others))
    return {
        pair: float(
            np.abs(first.table(pair) / first.n_rows - second.table(pair) / second.n_rows).sum() / 2
        )
        for pair in domain.pairs()
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", required=True, help="the table, one Parquet file")
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--deltas", type=float, nargs="+", default=DELTAS)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument(
        "--channels",
        nargs="+",
        choices=("laplace", "laplace-calibrated", "optimal"),
        default=CHANNELS,
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--seed", type=int, help="INSECURE: noise from this seed, which protects nobody"
    )
    given = parser.parse_args(arguments)
    survey = read_survey(given.input)
    if given.seed is not None:
        print("INSECURE: the noise comes from a seed.\n")
    print(
        f"{survey.codes.shape[1]:,} rows, {survey.domain.n_attributes} columns, ε = {given.epsilon:g}\n"
    )
    print("| " + " | ".join(["channel", "δ", "share", *SHOWN]) + " |")
    print("|---" * (3 + len(SHOWN)) + "|")
    seeds = [None if given.seed is None else given.seed + run for run in range(given.runs)]
    for channel, delta, share in itertools.product(given.channels, given.deltas, given.shares):
        budget = Budget(epsilon=given.epsilon, delta=delta)
        runs = [outcome(survey, budget, share, channel, seed) for seed in seeds]
        shown = [f"{np.mean([run[name] for run in runs]):{form}}" for name, form in SHOWN.items()]
        print(f"| {channel} | {delta:.2g} | {share:g} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
