"""What the benchmarks share: options, seeds, figures that are kept, a cluster, interleaved steps, peak memory."""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from distributed import Client, default_client

from dpdask.connect import open_cluster
from dpdask.connect.spec import Local

WORKERS = 2


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a script's docstring, with an option for a file of figures."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--json", type=Path, help="a file for the figures, and those of each run")
    return found


def add_pairs(found: argparse.ArgumentParser, what: str) -> None:
    """Add the options of a benchmark that times pairs of steps on tables that it writes."""
    found.add_argument("--pairs", type=int, default=3, help=f"Comparisons; 0 for {what} alone.")
    add_folder(found)


def add_folder(found: argparse.ArgumentParser) -> None:
    found.add_argument(
        "--folder", type=Path, help="Where the tables go; a temporary folder by default."
    )


def add_seeds(found: argparse.ArgumentParser, runs: str = "--seeds") -> None:
    """Add the options of a benchmark that repeats its noise: how many runs, and a seed."""
    found.add_argument(runs, dest="runs", type=int, default=5, help="how many runs")
    found.add_argument(
        "--seed", type=int, help="INSECURE: noise from this seed, which protects nobody"
    )


def seeds_of(given: argparse.Namespace) -> list[int | None]:
    """Return the seed of each run; None: secure noise."""
    return [None if given.seed is None else given.seed + run for run in range(given.runs)]


def keep(found: Any, file: Path | None, **options: Any) -> str:
    """Return figures as JSON, and write them to a file if there is one."""
    text = json.dumps(found, indent=1, **options)
    if file is not None:
        file.write_text(text + "\n", encoding="utf-8")
    return text


@contextmanager
def cluster() -> Iterator[Client]:
    """Start the cluster that a job's `cluster: {kind: local, workers: 2}` starts; both sides run on it."""
    with open_cluster(Local(workers=WORKERS)):
        yield default_client()


def processes_of(client: Client) -> list[psutil.Process]:
    """Return the processes of a cluster's workers."""
    return [psutil.Process(pid) for pid in client.run(lambda: __import__("os").getpid()).values()]


def seconds(step: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def interleave(
    turns: int,
    steps: Mapping[str, Callable[[], Any]],
    before: Callable[[], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each step, one after the other in every turn, so that a noisy machine disturbs all alike.

    A first turn is not counted: it compiles the kernels and warms the page cache. `before` runs before each step, uncounted.
    """
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):
        for name, step in steps.items():
            if before is not None:
                before()
            begin = clock()
            step()
            found[name] += [clock() - begin] if turn else []
    return found


def rounded(values: Sequence[float], digits: int = 2) -> list[float]:
    return [round(value, digits) for value in values]


def watch(processes: Sequence[psutil.Process], step: Callable[[], Any]) -> tuple[float, list[int]]:
    """Run a step; return its seconds, and each process's largest resident memory, sampled every 20 ms, in MiB."""
    peaks, done = [process.memory_info().rss for process in processes], threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            for index, process in enumerate(processes):
                peaks[index] = max(peaks[index], process.memory_info().rss)

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        spent = seconds(step)
    finally:
        done.set()
        watcher.join()
    return spent, [round(peak / 2**20) for peak in peaks]
