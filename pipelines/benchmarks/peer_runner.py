"""Run one method of private synthesis on one coded table, in a separate process; `peers.py` starts it.

    PYTHONPATH=/path/to/private-pgm/src:/path/to/private-pgm/mechanisms python peer_runner.py mst coded.parquet domain.json synthetic.parquet

It reads a table of whole numbers, each below its column's number of levels, and writes a table of the same form; or, with `--keys`, it finds values
of a column, and tells how many and of what share of the rows; or, with `--persons`, it reads a folder that `pipelines/movielens/persons.py`
writes, and adds synthetic persons with their rows. Its last line is the peak
of its memory, in bytes. It imports this project only for this project's own methods; otherwise it needs numpy, pandas, pyarrow and the peer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

AIM_MODEL_MEGABYTES = 80  # AIM's own default, and so is the largest table of its workload
AIM_MAX_CELLS = 10_000


@dataclass(frozen=True)
class Task:
    """The table to synthesise, and the privacy to promise, under add-remove."""

    table: pd.DataFrame
    sizes: Mapping[str, int]
    epsilon: float
    delta: float
    seed: int
    secure: bool


def floor(task: Task) -> pd.DataFrame:
    """A bootstrap of the table itself: not private."""
    rows = np.random.default_rng(task.seed).integers(0, len(task.table), len(task.table))
    return task.table.iloc[rows]


def schema_of(sizes: Mapping[str, int]) -> Any:
    import dpdask

    columns = {
        name: {"role": "privatise", "kind": "categorical", "levels": list(range(size))}
        for name, size in sizes.items()
    }
    return dpdask.Schema.from_dict({"columns": columns})


def promise(task: Task) -> dict[str, Any]:
    seed = {} if task.secure else {"insecure_seed": task.seed}
    return {"epsilon": task.epsilon, "delta": task.delta, "adjacency": "add-remove", **seed}


def dpdask_copula(task: Task) -> pd.DataFrame:
    """The copula of this project with its defaults."""
    import dpdask

    with dpdask.GaussianCopula(schema_of(task.sizes), **promise(task)).fit(task.table) as release:
        return release.sample().compute()


def independent(task: Task) -> pd.DataFrame:
    """Each column drawn on its own, from noisy one-way tables that share the whole budget."""
    import dpdask
    from dpdask.kernels.channel import project

    rng = np.random.default_rng(task.seed)
    own = {
        name: f"column-{place}" for place, name in enumerate(task.sizes)
    }  # released tables have a column `count`, as a table may have
    marginals = dpdask.Marginals(
        schema_of({own[name]: size for name, size in task.sizes.items()}),
        cliques=[[name] for name in own.values()],
        **promise(task),
    )
    with marginals.fit(task.table.rename(columns=own)) as release:
        noisy = {name: release.table([own[name]]).astype(float) for name in task.sizes}
    n = max(1, round(np.mean([table.sum() for table in noisy.values()])))
    shares = {name: project(table, 1.0 * n) / n for name, table in noisy.items()}
    return pd.DataFrame(
        {name: rng.choice(len(share), n, p=share / share.sum()) for name, share in shares.items()}
    )


def pgm_data(task: Task) -> Any:
    """The table in private-pgm's form. Its records are sampled, because its default, rounding, repeats the same records."""
    from mbi import Dataset, Domain
    from mbi.markov_random_field import MarkovRandomField

    of_rows = MarkovRandomField.synthetic_data
    MarkovRandomField.synthetic_data = lambda model, rows=None: of_rows(
        model, rows, method="sample"
    )
    return Dataset(task.table, Domain.fromdict(dict(task.sizes)))


def mst(task: Task) -> pd.DataFrame:
    """MST of private-pgm."""
    data = pgm_data(task)
    from mst import MST

    return MST(data, task.epsilon, task.delta).df


def aim(task: Task) -> pd.DataFrame:
    """AIM of private-pgm on all pairs, with its own defaults."""
    data = pgm_data(task)
    from aim import AIM
    from mbi import junction_tree

    pairs = [
        pair
        for pair in itertools.combinations(task.sizes, 2)
        if task.sizes[pair[0]] * task.sizes[pair[1]] <= AIM_MAX_CELLS
    ]

    class Told(AIM):
        """AIM that says in each round how far it is."""

        used = 0.0
        rounds_done = 0

        def worst_approximated(
            self, candidates: Any, answers: Any, model: Any, eps: float, sigma: float
        ) -> Any:
            self.used = (
                (self.used or len(task.sizes) * 0.5 / sigma**2) + eps**2 / 8 + 0.5 / sigma**2
            )
            megabytes = junction_tree.hypothetical_model_size(model.domain, model.cliques)
            said = {
                "round": self.rounds_done,
                "rounds": 16 * len(task.sizes),
                "sigma": float(sigma),
                "budget_share": float(self.used / self.rho),
            }
            print(
                json.dumps(
                    {**said, "model_megabytes": float(megabytes), "peak_bytes": peak_bytes()}
                ),
                flush=True,
            )
            self.rounds_done += 1
            return super().worst_approximated(candidates, answers, model, eps, sigma)

    mechanism = Told(task.epsilon, task.delta, prng=np.random, max_model_size=AIM_MODEL_MEGABYTES)
    return mechanism.run(data, [(pair, 1.0) for pair in pairs])[1].df


def dpsynth_with(mechanism: str) -> Callable[[Task], pd.DataFrame]:
    """A mechanism of Google's dpsynth in memory, with its own defaults."""

    def run(task: Task) -> pd.DataFrame:
        from dpsynth import discrete_mechanisms
        from dpsynth.data_generation_v3 import TabularConfig
        from dpsynth.domain import CategoricalAttribute

        domains = {
            name: CategoricalAttribute(list(range(size))) for name, size in task.sizes.items()
        }
        config = TabularConfig(
            domains=domains, discrete_mechanism=getattr(discrete_mechanisms, mechanism)()
        )
        calibrated = config.calibrate(epsilon=task.epsilon, delta=task.delta)
        return calibrated(np.random.default_rng(task.seed), task.table).synthetic_data

    return run


def margnet(task: Task) -> pd.DataFrame:
    """MargNet on the processor, with its repository's settings for Adult at the nearest ε; it runs in the folder of its copy."""
    import tomllib

    import torch
    from method.MargDL.main import MargDLGen
    from util.rho_cdp import cdp_rho

    torch.manual_seed(task.seed)
    torch.cuda.reset_peak_memory_stats = torch.cuda.max_memory_allocated = lambda **_: 0
    settings = tomllib.loads(Path("method/MargDL/config/gan/adult.toml").read_text())
    config = settings[min(settings, key=lambda name: abs(float(name) - task.epsilon))]
    options = argparse.Namespace(iter=None, lr=None, batch=None, test=False, resample=False)
    with tempfile.TemporaryDirectory() as folder:
        generator = MargDLGen(options, task.table, dict(task.sizes), "cpu", config, folder, "gan")
        generator.fit_adaptive(cdp_rho(task.epsilon, task.delta))
    n = max(1, round(float(generator.dataset.est_num_records)))
    return pd.DataFrame(generator.model.sample(n), columns=list(task.sizes))


def share_records() -> None:
    """Make the records that PrivSyn improves those that it returns: they are two tables with pandas above 1."""
    from method.privsyn.lib_synthesize.records_update import RecordUpdate

    of_singletons = RecordUpdate.initialize_records

    def initialise(update: Any, *given: Any, **named: Any) -> None:
        of_singletons(update, *given, **named)
        update.records = update.df.to_numpy().copy()
        update.df = pd.DataFrame(update.records, columns=update.df.columns, copy=False)

    RecordUpdate.initialize_records = initialise


class Keeper:
    """Stands where MargNet's repository has its preprocessor, and keeps the records."""

    frame: pd.DataFrame

    def reverse_data(self, frame: pd.DataFrame, folder: str) -> None:
        del folder
        self.frame = frame


def margnet_peer(module: str, entry: str) -> Callable[[Task], pd.DataFrame]:
    """Another method of MargNet's repository, with that repository's settings for Adult, on the processor."""

    def run(task: Task) -> pd.DataFrame:
        import torch
        from util.rho_cdp import cdp_rho

        torch.manual_seed(task.seed)
        vars(np).update(
            infty=np.inf, product=np.prod
        )  # the names that numpy had when these were written
        names = [
            *(f"cat_attr_{place}" for place in range(len(task.sizes) - 1)),
            "y_attr",
        ]  # PrivSyn starts from noise if no column is `y_attr`
        given = argparse.Namespace(
            dataset="adult",
            method=entry,
            device="cpu",
            epsilon=task.epsilon,
            num_preprocess="",
            rare_threshold="",
        )
        given.test = given.resample = False
        keeper = Keeper()
        main = getattr(importlib.import_module(module), entry)
        if entry == "privsyn_main":
            share_records()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            Path(f"exp/adult/{entry}/{task.epsilon}__").mkdir(parents=True)
            table, domain = (
                task.table.set_axis(names, axis=1),
                dict(zip(names, task.sizes.values(), strict=True)),
            )
            made = main(
                given,
                df=table,
                domain=domain,
                rho=cdp_rho(task.epsilon, task.delta),
                parent_dir=folder,
                preprocesser=keeper,
            )
            next(iter(made.values())).syn(len(table), keeper, folder)
        return keeper.frame[names].set_axis(list(task.sizes), axis=1)

    return run


@dataclass(frozen=True)
class Search:
    """A table of units and keys, of which each unit may count for `most`, under add-remove."""

    rows: pd.DataFrame  # unit (if the row is none) and key, as texts
    most: int
    epsilon: float
    delta: float

    @property
    def counts(self) -> pd.Series:
        """How many units have each key, if random keys of a unit are left out beyond `most`."""
        if "unit" not in self.rows:
            return self.rows["key"].value_counts()
        distinct = self.rows.drop_duplicates().sample(frac=1.0)
        return distinct[distinct.groupby("unit").cumcount() < self.most]["key"].value_counts()


def dpdask_keys(search: Search) -> list[str]:
    """The search of this project, as a job."""
    import yaml

    from dpdask.jobs.run import run_job
    from dpdask.jobs.spec import load_job

    column = {"role": "privatise", "kind": "categorical", "levels": "discover", "other": "?"}
    columns = {name: {"role": "drop"} for name in search.rows} | {"key": column}
    unit = {"column": "unit", "max_rows": search.most} if "unit" in search.rows else "row"
    job = {
        "name": "keys",
        "input": {"path": "rows.parquet"},
        "output": {"path": "out"},
        "schema": "schema.yaml",
        "privacy": {"epsilon": search.epsilon, "delta": search.delta, "unit": unit}
        | {"adjacency": "add-remove"},
        "mechanism": {"kind": "discover"},
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        search.rows.to_parquet("rows.parquet", row_group_size=2**18)
        Path("schema.yaml").write_text(yaml.safe_dump({"columns": columns}))
        Path("job.yaml").write_text(yaml.safe_dump(job))
        run_job(load_job("job.yaml"))
        return pd.concat(map(pd.read_parquet, Path("out").glob("part-*.parquet")))["level"].tolist()


def opendp_keys(search: Search) -> list[str]:
    """OpenDP's thresholds for keys that nobody lists: of its Laplace and Gaussian noise that with the lower one."""
    import opendp.prelude as dp

    dp.enable_features("contrib")
    domain = dp.map_domain(dp.atom_domain(T=str), dp.atom_domain(T="i64"))
    most, moved = search.most, dp.absolute_distance(T="i64")

    def least(make: Callable[[int], Any], holds: Callable[[Any], bool]) -> tuple[int, Any]:
        found = next(2**bits for bits in itertools.count(1) if holds(make(2**bits)))
        for step in (2**bits for bits in range(found.bit_length() - 2, -1, -1)):
            found -= step if found > step + 1 and holds(make(found - step)) else 0
        return found, make(found)

    def laplace(threshold: int) -> Any:
        metric, scale = dp.l01inf_distance(moved), most / search.epsilon
        return dp.m.make_laplace_threshold(domain, metric, scale * (1 + 1e-9), threshold)

    def gaussian(sigma: float, threshold: int) -> Any:
        metric = dp.l02inf_distance(dp.absolute_distance(T="f64"))
        made = dp.m.make_gaussian_threshold(domain, metric, sigma, threshold)
        return dp.c.make_zCDP_to_approxDP(made)

    def cost(made: Any) -> float:
        profile, lost = made.map((most, most**0.5, 1.0))
        return profile.epsilon(search.delta / 2) if lost <= search.delta / 2 else float("inf")

    found = [least(laplace, lambda made: made.map((most, most, 1))[1] <= search.delta)]
    low, high = 0.1, 1e3 * most
    while high > 1.001 * low:
        sigma = (low * high) ** 0.5
        is_enough = cost(gaussian(sigma, 2**40)) <= search.epsilon
        low, high = (low, sigma) if is_enough else (sigma, high)
    found.append(least(lambda t: gaussian(high, t), lambda made: cost(made) <= search.epsilon))
    _, chosen = min(found, key=lambda each: each[0])
    return list(chosen({key: int(n) for key, n in search.counts.items()}))


def pipelinedp_keys(strategy: str) -> Callable[[Search], list[str]]:
    def run(search: Search) -> list[str]:
        """A private partition selection of PipelineDP, on numbers of units."""
        import pipeline_dp
        from pipeline_dp.partition_selection import create_partition_selection_strategy

        chosen = pipeline_dp.PartitionSelectionStrategy[strategy]
        selection = create_partition_selection_strategy(
            chosen, search.epsilon, search.delta, search.most
        )
        return [key for key, n in search.counts.items() if selection.should_keep(int(n))]

    return run


KEY_METHODS: dict[str, Callable[[Search], list[str]]] = {
    "dpdask": dpdask_keys,
    "opendp": opendp_keys,
    "pipelinedp-geometric": pipelinedp_keys("TRUNCATED_GEOMETRIC"),
    "pipelinedp-laplace": pipelinedp_keys("LAPLACE_THRESHOLDING"),
    "pipelinedp-gaussian": pipelinedp_keys("GAUSSIAN_THRESHOLDING"),
}


def find_keys(given: argparse.Namespace) -> None:
    """Find keys of a column, and print how many, and what share of the rows has them."""
    names = {given.keys: "key"} | ({given.unit: "unit"} if given.unit else {})
    rows = pd.read_parquet(given.table, columns=list(names)).rename(columns=names)
    rows = rows.dropna().astype(str)
    search = Search(rows, given.most, given.epsilon, given.delta)
    found = KEY_METHODS[given.method](search)
    share = float(rows["key"].isin(found).mean())
    print(json.dumps({"found": len(found), "of": rows["key"].nunique(), "share": share}))


@dataclass(frozen=True)
class Persons:
    """Persons with their rows in two tables, whose first column is the key of a person; at most `most` rows of each, under add-remove."""

    folder: Path  # persons.parquet, rows.parquet, and for this project a job
    tables: Mapping[str, pd.DataFrame]  # persons and rows
    levels: Mapping[str, Mapping[str, list[Any]]]  # by table and column
    key: str
    most: int
    epsilon: float
    delta: float
    seed: int


def dpdask_persons(task: Persons) -> Mapping[str, pd.DataFrame]:
    """The copula of this project, as the job in the folder says."""
    import dask

    import dpdask
    from dpdask.jobs.run import run_job
    from dpdask.jobs.spec import load_job

    marks: dict[str, float] = {}
    with dask.config.set(scheduler="synchronous"):
        job = load_job(str(task.folder / "job.yaml"))
        run_job(job, lambda stage, *_: marks.setdefault(stage, time.process_time()))
    ends = [*list(marks.values())[1:], time.process_time()]
    TOLD.update(zip(marks, np.subtract(ends, list(marks.values())), strict=True))
    TOLD["MiB of the job"] = (peak_bytes() or 0) / 2**20
    opened: Any = dpdask.open(str(task.folder / "out"))
    return {"persons": opened.persons(), "rows": opened.rows()}


def hma(task: Persons) -> Mapping[str, pd.DataFrame]:
    """HMA of SDV, without privacy: columns of persons are categories, and those of rows numbers."""
    from sdv.metadata import Metadata
    from sdv.multi_table import HMASynthesizer

    tables: dict[str, Any] = {}
    for (name, levels), kind in zip(task.levels.items(), ("categorical", "numerical"), strict=True):
        columns = {task.key: {"sdtype": "id"}} | {each: {"sdtype": kind} for each in levels}
        tables[name] = {"columns": columns}
    tables["persons"]["primary_key"] = task.key
    link = {"parent_table_name": "persons", "parent_primary_key": task.key}
    link |= {"child_table_name": "rows", "child_foreign_key": task.key}
    described = {"tables": tables, "relationships": [link], "METADATA_SPEC_VERSION": "V1"}
    synthesizer = HMASynthesizer(Metadata.load_from_dict(described))
    synthesizer.fit(dict(task.tables))
    return synthesizer.sample_scale()


def dpsynth_persons(task: Persons) -> Mapping[str, pd.DataFrame]:
    """The relational mode of Google's dpsynth with MST, and its own defaults otherwise."""
    from dpsynth.discrete_mechanisms import MSTConfig
    from dpsynth.domain import CategoricalAttribute
    from dpsynth.relational import ForeignKeyRelation, MultiTableConfig

    domains = {
        name: {each: CategoricalAttribute(list(values)) for each, values in levels.items()}
        for name, levels in task.levels.items()
    }
    link = ForeignKeyRelation("persons", task.key, "rows", task.key, task.most)
    config = MultiTableConfig(domains, [link], discrete_mechanism=MSTConfig())
    calibrated = config.calibrate(epsilon=task.epsilon, delta=task.delta)
    return calibrated(np.random.default_rng(task.seed), task.tables).synthetic_tables


TOLD: dict[str, float] = {}  # what a method tells of itself
PERSON_METHODS: dict[str, Callable[[Persons], Mapping[str, pd.DataFrame]]] = {
    "dpdask": dpdask_persons,
    "hma": hma,
    "dpsynth-mst": dpsynth_persons,
}


def draw_persons(given: argparse.Namespace, seed: int) -> None:
    """Write synthetic persons and their rows beside the originals."""
    said = json.loads((given.table / "persons.json").read_text())
    tables = {name: pd.read_parquet(given.table / f"{name}.parquet") for name in said["levels"]}
    task = Persons(given.table, tables, epsilon=given.epsilon, seed=seed, **said)
    for name, drawn in PERSON_METHODS[given.method](task).items():
        columns = [task.key, *task.levels[name]]
        drawn[columns].to_parquet(given.table / f"{given.method}-{name}.parquet", index=False)


METHODS: dict[str, Callable[[Task], pd.DataFrame]] = {
    "dpdask": dpdask_copula,
    "mst": mst,
    "aim": aim,
    "dpsynth-mst": dpsynth_with("MSTConfig"),
    "dpsynth-aim": dpsynth_with("AIMConfig"),
    "dpsynth-swift": dpsynth_with("SWIFTConfig"),
    "margnet": margnet,
    "privsyn": margnet_peer("method.privsyn.run_privsyn", "privsyn_main"),
    "gem": margnet_peer("method.GEM.gem", "gem_main"),
    "independent": independent,
    "floor": floor,
}


def peak_bytes() -> int | None:
    """Return the most memory that this process has held, where Linux says so."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", choices=[*METHODS, *KEY_METHODS, *PERSON_METHODS])
    parser.add_argument("table", type=Path)
    parser.add_argument("domain", type=Path, nargs="?")
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument("--keys", help="the column whose values are to be found")
    parser.add_argument("--persons", action="store_true", help="the table is a folder of persons")
    parser.add_argument("--unit", help="the column that names the unit; by default it is the row")
    parser.add_argument("--most", type=int, default=1, help="how many keys of a unit count")
    parser.add_argument("--delta", type=float, default=1e-6, help="of a search for keys")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument(
        "--seed", type=int, help="INSECURE: noise from this seed, which protects nobody"
    )
    given = parser.parse_args()
    if given.keys:
        find_keys(given)
        return
    seed = secrets.randbits(32) if given.seed is None else given.seed
    np.random.seed(seed)  # noqa: NPY002 - the generator that the peers use
    if given.persons:
        draw_persons(given, seed)
        print(json.dumps({"peak_bytes": peak_bytes(), "told": TOLD}))
        return
    domain = json.loads(given.domain.read_text())
    sizes = domain["sizes"]
    task = Task(
        pd.read_parquet(given.table),
        sizes,
        given.epsilon,
        domain["delta"],
        seed,
        given.seed is None,
    )
    made = METHODS[given.method](task)
    made[list(sizes)].reset_index(drop=True).astype(np.int32).to_parquet(given.output)
    print(json.dumps({"peak_bytes": peak_bytes(), "told": TOLD}))


if __name__ == "__main__":
    main()
