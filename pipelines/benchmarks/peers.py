"""Compare the copula with other private syntheses of the same coded table: for the data's steward only, because it reads private rows.

    python -m pipelines.benchmarks.peers --job pipelines/bank/job.yaml --input bank.parquet --target y=yes --work /path/to/bank \
        --private-pgm /path/to/private-pgm --private-pgm-python /path/to/python --json peers.json

Methods: this project's copula with its defaults (`dpdask`); MST and AIM of private-pgm; AIM, MST and SWIFT of Google's dpsynth; MargNet, and
PrivSyn and GEM of its repository; each column drawn on its own from its noisy one-way table (`independent`); and a resample of the table itself,
which is not private (`floor`). Options name copies of the peers' repositories, and interpreters that can run them. A method without a copy is
listed as not run. private-pgm runs with jax 0.7.0 and pandas below 3; dpsynth with Python 3.12 and with mbi and dp_accounting from their own
repositories, not from the package index; MargNet with torch and tqdm, on the processor; PrivSyn and GEM with all that its evaluators import.
Records of private-pgm are sampled; the others are as by default.

Every method gets the same table of whole numbers, cut as the job says, with the same public levels, and promises the same ε and δ under
add-remove. Each method converts ε and δ in its own way. Runs follow one another, each in its own process. Seconds and memory are those of
the whole process, with imports and compilation; CPU seconds are those of all its threads. If the machine does other work, compare CPU
seconds. Tables, synthetic records and costs stay in the work folder, and a second call reuses them. It also reports the methods that
`--methods` leaves out from there.

Quality, as a median of the runs: the mean total variation of all one-way tables, of all two-way tables and of 100 random three-way tables
(the same for all methods), and that of the worst pair; the share of records with a pair of levels that does not occur in the table; and,
with `--target`, the area under the ROC curve (AUC) of gradient boosting (scikit-learn's, extra `inference`) that is fitted to the synthetic
records and predicts the target's level against all others. The AUC is measured on a fifth of the rows, drawn once, which no method sees. A
target that the job drops is added to the table as one more column, with the levels that occur there. Noise is secure, and that of the
peers is seeded by the operating system, unless a seed is given.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score
from threadpoolctl import threadpool_limits

from dpdask.arrays import Codes
from dpdask.stats import Domain
from pipelines.adult.compare import read_case
from pipelines.benchmarks.common import add_seeds, keep, parser
from pipelines.benchmarks.records import Truth
from pipelines.papers.asghar_utility import one_way_total_variation

HELD_OUT = 0.2
SPLIT_SEED = 1
RUNNER = Path(__file__).with_name("peer_runner.py")
ROOT = Path(__file__).parents[2]
SOURCES = {"private-pgm": ("src", "mechanisms"), "dpsynth": (".",), "margnet": (".",)}
METHODS = {
    "dpdask": None,
    "aim": "private-pgm",
    "mst": "private-pgm",
    "dpsynth-aim": "dpsynth",
    "dpsynth-mst": "dpsynth",
    "dpsynth-swift": "dpsynth",
    "margnet": "margnet",
    "privsyn": "margnet",
    "gem": "margnet",
    "independent": None,
    "floor": None,
}
MEASURES = ("one_way", "two_way", "worst_pair", "three_way", "impossible", "auc")
COSTS = ("cpu_seconds", "wall_seconds", "peak_bytes")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A level of a column, to be predicted from the other columns."""

    column: int
    levels: tuple[int, ...]

    def of(self, codes: Codes) -> tuple[np.ndarray, np.ndarray]:
        """Return the other columns, with a row for each record, and whether each record has the level."""
        return np.delete(codes, self.column, axis=0).T, np.isin(codes[self.column], self.levels)


@dataclass(frozen=True, kw_only=True)
class Table:
    """The table that every method sees, and the rows that no method sees."""

    name: str
    domain: Domain
    codes: Codes
    delta: float
    held_out: Codes
    target: Target | None


def read_table(job: Path, path: str, target: str | None) -> Table:
    """Return the job's table in codes; with a target, without the rows held out."""
    case = read_case(job, path, 1)
    table = Table(
        name=case.name,
        domain=case.domain,
        codes=case.codes,
        delta=case.budget.delta,
        held_out=case.codes[:, :0],
        target=None,
    )
    if target is None:
        return table
    column, _, level = target.partition("=")
    names, sizes, codes = list(case.domain.names), list(case.domain.sizes), case.codes
    values = pq.read_table(path, columns=[column])[column].to_pandas().astype(str).to_numpy()
    if column not in names:
        levels, added = np.unique(values, return_inverse=True)
        names, sizes = [*names, column], [*sizes, len(levels)]
        codes = np.vstack([codes, added.astype(codes.dtype)])
    place = names.index(column)
    wanted = tuple(np.unique(codes[place, values == level]).tolist())
    if not wanted:
        raise SystemExit(
            f"no row of column {column!r} has the level {level!r}; write --target COLUMN=LEVEL"
        )
    held = np.random.default_rng(SPLIT_SEED).random(codes.shape[1]) < HELD_OUT
    return replace(
        table,
        domain=Domain(names=tuple(names), sizes=tuple(sizes)),
        codes=np.ascontiguousarray(codes[:, ~held]),
        held_out=np.ascontiguousarray(codes[:, held]),
        target=Target(column=place, levels=wanted),
    )


class Judge:
    """Quality of synthetic records, against the table that the methods saw and the rows that they did not see."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.truth = Truth(table.domain, table.codes)

    def of(self, codes: Codes) -> dict[str, float]:
        """Return every measure of records."""
        one_way = one_way_total_variation(self.table.codes, codes, self.table.domain.sizes)
        return {
            "one_way": float(one_way.mean()),
            **self.truth.of_records(codes),
            "impossible": self.impossible(codes),
            **self.predicts(codes),
        }

    def impossible(self, codes: Codes) -> float:
        """Return the share of records with a pair of levels that does not occur in the table."""
        wrong = np.zeros(codes.shape[1], dtype=bool)
        pairs = [(a, b) for a in range(len(codes)) for b in range(a + 1, len(codes))]
        for (a, b), start in zip(pairs, self.truth.starts, strict=True):
            cells = start + codes[a].astype(np.intp) * self.truth.sizes[b] + codes[b]
            wrong |= self.truth.pairs[cells] == 0
        return float(wrong.mean())

    def predicts(self, codes: Codes) -> dict[str, float]:
        """Return the AUC, on the rows held out, of a model that is fitted to the records."""
        if self.table.target is None:
            return {}
        features, own = self.table.target.of(codes)
        others, true = self.table.target.of(self.table.held_out)
        if own.all() or not own.any():
            return {"auc": 0.5}
        with threadpool_limits(1):  # threads that wait for each other are dear on a busy machine
            model = HistGradientBoostingClassifier(random_state=0).fit(features, own)
        return {"auc": float(roc_auc_score(true, model.predict_proba(others)[:, 1]))}


Trial = tuple[str, float, int]
"""A method, its ε and the number of the run."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The folder of the coded table and the synthetic records, and how methods are started."""

    folder: Path
    copies: Mapping[str, Path]
    pythons: Mapping[str, str]
    limit: float
    seed: int | None

    def write(self, table: Table) -> None:
        """Write the files that the methods read; a folder holds one table."""
        self.folder.mkdir(parents=True, exist_ok=True)
        coded, domain = self.folder / "coded.parquet", self.folder / "domain.json"
        names = table.domain.names
        frame = pd.DataFrame(dict(zip(names, table.codes.astype(np.int32), strict=True)))
        sizes = dict(zip(names, table.domain.sizes, strict=True))
        said = keep({"sizes": sizes, "delta": table.delta}, None)
        if not coded.exists():
            domain.write_text(said, encoding="utf-8")
            frame.to_parquet(coded)
        elif domain.read_text(encoding="utf-8") != said or not pd.read_parquet(coded).equals(frame):
            raise SystemExit(f"{self.folder} holds another table; name a new folder")

    def place(self, trial: Trial, suffix: str) -> Path:
        method, epsilon, number = trial
        return self.folder / f"{method}-{epsilon:g}-{number}{suffix}"

    def missing(self, method: str) -> bool:
        """Whether the method's copy was not given."""
        return METHODS[method] is not None and METHODS[method] not in self.copies

    def run(self, trial: Trial) -> None:
        """Run a method once, unless this was done; repeat a run that failed or had a lower limit. Costs are written beside the records."""
        said = self.found(trial)
        if said is not None and (
            said["status"] == "finished"
            or (said["status"].startswith("did not") and said["limit"] >= self.limit)
        ):
            return
        method, epsilon, number = trial
        source = METHODS[method]
        copy = ROOT if source is None else self.copies[source]
        python = sys.executable if source is None else self.pythons[source]
        files = [self.folder / "coded.parquet", self.folder / "domain.json"]
        files = [str(file) for file in (*files, self.place(trial, ".parquet"))]
        seed = [] if self.seed is None else [f"--seed={self.seed + number}"]
        command = [python, str(RUNNER), method, *files, f"--epsilon={epsilon!r}", *seed]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(copy / part) for part in SOURCES.get(source, (".",))),
            "PYTHONSAFEPATH": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONUNBUFFERED": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        log = self.place(trial, ".log")
        with log.open("w", encoding="utf-8") as file:
            streams = {"stdout": file, "stderr": subprocess.STDOUT}
            costs = timed(command, self.limit, cwd=copy, env=environment, **streams)
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
        if costs["status"] == "finished":
            costs |= json.loads(lines[-1])
        elif costs["status"] == "failed":
            costs["status"] = f"failed: {lines[-1]}"
        self.place(trial, ".json").write_text(json.dumps(costs), encoding="utf-8")

    def found(self, trial: Trial) -> dict[str, Any] | None:
        """Return the costs of a run, or None if there was none."""
        path = self.place(trial, ".json")
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def records(self, trial: Trial, domain: Domain) -> Codes:
        """Return the synthetic records in codes."""
        frame = pd.read_parquet(self.place(trial, ".parquet"))[list(domain.names)]
        return np.ascontiguousarray(frame.to_numpy().T.astype(domain.code_dtype))


def timed(command: list[str], limit: float, **options: Any) -> dict[str, Any]:
    """Run a command in a process group of its own, to its end or to the limit, and return how it ended and what it cost."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with subprocess.Popen(command, start_new_session=True, **options) as process:  # noqa: S603 - the interpreters that the caller named
        try:
            status = "finished" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = f"did not finish in {limit:g} s"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "status": status,
        "limit": limit,
        "wall_seconds": time.perf_counter() - begin,
        "cpu_seconds": cpu,
    }


def judged(work: Work, judge: Judge, method: str, epsilon: float, n_runs: int) -> dict[str, Any]:
    """Return the figures of a method's runs, and their medians."""
    trials = [(method, epsilon, number) for number in range(n_runs)]
    found = [(trial, costs) for trial in trials if (costs := work.found(trial)) is not None]
    finished = [(trial, costs) for trial, costs in found if costs["status"] == "finished"]
    if not finished:
        costs = found[0][1] if found else {"status": "not run"}
        return {"status": costs["status"], "costs": costs, "medians": {}, "runs": []}
    domain = judge.table.domain
    runs = [
        judge.of(work.records(trial, domain)) | {cost: costs[cost] for cost in COSTS}
        for trial, costs in finished
    ]
    medians = {measure: float(np.median([run[measure] for run in runs])) for measure in runs[0]}
    return {"status": "finished", "medians": medians, "runs": runs}


def line(method: str, said: Mapping[str, Any]) -> str:
    """Return a row of the printed table."""
    medians = said["medians"]
    if not medians:
        return f"| {method} | {said['status']} |" + " – |" * (len(MEASURES) + len(COSTS))
    shown = [f"{medians[measure]:.4f}" if measure in medians else "–" for measure in MEASURES]
    costs = [
        f"{medians['cpu_seconds']:.0f}",
        f"{medians['wall_seconds']:.0f}",
        f"{medians['peak_bytes'] / 2**20:.0f}",
    ]
    return f"| {method} | {len(said['runs'])} | {' | '.join(shown + costs)} |"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    options = parser(__doc__)
    add_seeds(options)
    options.add_argument("--job", type=Path, default=Path("pipelines/adult/job.yaml"))
    options.add_argument("--input", required=True, help="the table, one Parquet file")
    options.add_argument("--target", help="COLUMN=LEVEL, to be predicted from the other columns")
    options.add_argument(
        "--work",
        type=Path,
        required=True,
        help="a folder for the coded table, the synthetic records and the costs",
    )
    options.add_argument(
        "--methods",
        nargs="*",
        choices=METHODS,
        default=list(METHODS),
        help="which methods to run now; all are reported",
    )
    options.add_argument("--epsilon", type=float, nargs="+", default=[1.0])
    options.add_argument(
        "--limit",
        type=float,
        default=3600,
        help="seconds, by the clock, after which a run is stopped",
    )
    for peer in SOURCES:
        options.add_argument(f"--{peer}", type=Path, help="a copy of its repository")
        options.add_argument(
            f"--{peer}-python",
            default=sys.executable,
            help="an interpreter with the packages that it needs",
        )
    return options.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    given = parsed(arguments)
    options = {peer: vars(given)[peer.replace("-", "_")] for peer in SOURCES}
    copies = {peer: path.resolve() for peer, path in options.items() if path is not None}
    pythons = {peer: vars(given)[f"{peer.replace('-', '_')}_python"] for peer in SOURCES}
    work = Work(
        folder=given.work.resolve(),
        copies=copies,
        pythons=pythons,
        limit=given.limit,
        seed=given.seed,
    )
    table = read_table(given.job, given.input, given.target)
    work.write(table)
    judge = Judge(table)
    head = {
        "job": table.name,
        "n_rows": table.codes.shape[1],
        "n_held_out": table.held_out.shape[1],
        "target": given.target,
    }
    said: list[dict[str, Any]] = []
    for epsilon in given.epsilon:
        for method in given.methods:
            for number in range(0 if work.missing(method) else given.runs):
                work.run((method, epsilon, number))
        rows = {method: judged(work, judge, method, epsilon, given.runs) for method in METHODS}
        said.append({"epsilon": epsilon, "methods": rows})
        shape = f"{table.codes.shape[1]:,} rows, {table.domain.n_attributes} columns, {sum(table.domain.sizes)} levels"
        print(f"{table.name}: {shape}, ε = {epsilon:g}, δ = {table.delta:.3g}, add-remove")
        print(
            "| | runs | one-way | two-way | worst pair | three-way | impossible | AUC | CPU s | wall s | peak MiB |"
        )
        print("|" + "---|" * (2 + len(MEASURES) + len(COSTS)))
        print("\n".join(line(method, row) for method, row in rows.items()), flush=True)
    head |= {
        "n_levels": sum(table.domain.sizes),
        "delta": table.delta,
        "insecure_seed": given.seed,
        "triples": judge.truth.triples,
    }
    keep({**head, "rows": said}, given.json, ensure_ascii=False)


if __name__ == "__main__":
    main()
