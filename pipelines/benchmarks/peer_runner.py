"""Run one method of private synthesis on one coded table, in a separate process; `peers.py` starts it.

    PYTHONPATH=/path/to/private-pgm/src:/path/to/private-pgm/mechanisms python peer_runner.py mst coded.parquet domain.json synthetic.parquet

It reads a table of whole numbers, each below its column's number of levels, and writes a table of the same form. Its last line is the peak
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
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("table", type=Path)
    parser.add_argument("domain", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument(
        "--seed", type=int, help="INSECURE: noise from this seed, which protects nobody"
    )
    given = parser.parse_args()
    seed = secrets.randbits(32) if given.seed is None else given.seed
    np.random.seed(seed)  # noqa: NPY002 - the generator that the peers use
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
    print(json.dumps({"peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
