"""Many runs at once: the state of the outputs in a folder, the runs in a ledger, and what ended runs have left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from dpdask.arrays import freeze_class
from dpdask.engine.account import open_ledger
from dpdask.errors import DpdaskError, InputError, OutputError, SpecError, TemporaryError
from dpdask.io.folders import list_files, remove_file
from dpdask.io.shards import META, list_manifests
from dpdask.io.storage import Folder, absolute_url
from dpdask.jobs.output import NAME_DIGITS
from dpdask.jobs.run import status
from dpdask.jobs.state import RunState, open_output_run
from dpdask.privacy.ledger_changes import list_datasets
from dpdask.privacy.ledger_entries import NO_RUN

_HIDDEN = re.compile(r"\.(.+)\.dpdask")
# a shard that names its run, as in outputs of many releases
_SHARD = re.compile(rf"part-\d{{5,}}(-p\d{{5,}})?-[0-9a-f]{{{NAME_DIGITS}}}\.parquet")


def find_outputs(folder: Folder) -> list[Folder]:
    """Return the outputs in a folder, or the folder itself if it is one: those with a release, or with a hidden folder beside them."""
    names = folder.names()
    if META in names:
        return [folder]
    if not names and (folder.is_file() or not folder.exists()):
        raise InputError("there is no such folder", folder.url, "check the path")
    hidden = {found[1] for name in names if (found := _HIDDEN.fullmatch(name))}
    shown = (name for name in names if not name.startswith(".") and name not in hidden)
    released = {name for name in shown if folder.child(name).child(META).names()}
    return [folder.child(name) for name in sorted(hidden | released)]


def list_outputs(path: str) -> list[dict[str, Any]]:
    """Return the state of each output in a folder; of one whose state cannot be read, why."""
    folder, found = Folder(absolute_url(path)), list[dict[str, Any]]()
    for output in find_outputs(folder):
        name = output.url.rpartition("/")[2]
        try:
            found.append({"output": name, **status(output.url)._asdict(), "fault": None})
        except DpdaskError as error:
            empty = {"stage": "unknown", "n_shards": 0, "n_releases": 0, "n_missing": 0}
            found.append({"output": name, **empty, "fault": error.what})
    return found


def list_runs(url: str) -> list[dict[str, Any]]:
    """Return the runs in a ledger, by dataset and in the order in which they were charged."""
    ledger, found = open_ledger(url), dict[tuple[str, str], dict[str, Any]]()
    for dataset in list_datasets(url):
        for entry in ledger.show(dataset).entries:
            if entry.kind in NO_RUN:
                continue
            first = found.get((dataset, entry.run_id), {"began": entry.recorded})
            found[dataset, entry.run_id] = {
                "dataset": dataset,
                "run": entry.run_id,
                "state": entry.kind,
                "epsilon": entry.charge.epsilon if entry.counts else 0.0,
                "delta": entry.charge.delta if entry.counts else 0.0,
                "began": first["began"],
                "last": entry.recorded,
            }
    return [*found.values()]


@freeze_class
class Leftover:
    """A file or a hidden folder that an ended run has left."""

    place: str
    # What becomes of it: `removed`, `would be removed`, or why it stays.
    outcome: str


def sweep(path: str, *, remove: bool) -> list[Leftover]:
    """Find what ended runs have left of the outputs in a folder, and remove it if that is wanted.

    These are hidden folders without a run, and shards in a published output that no manifest names, as a
    worker writes them that was cut off when its run was aborted. What belongs to an unfinished run
    stays, and so does the record of a run whose release is published: its ledger must be told.
    """
    found: list[Leftover] = []
    for output in find_outputs(Folder(absolute_url(path))):
        state = open_output_run(output)
        try:
            found += _sweep_output(state, remove=remove)
        except (InputError, OutputError, SpecError, TemporaryError) as error:
            found.append(Leftover(place=state.folder.url, outcome=f"stays: {error.what}"))
    return found


def _sweep_output(state: RunState, *, remove: bool) -> list[Leftover]:
    left = state.read_unfinished()
    if left is not None:
        advice = "an unfinished run; run its job again, or `dpdask abort` it"
        if state.is_committed():
            advice = "its release is published; run its job again, so that the ledger is told"
        return [Leftover(place=state.folder.url, outcome=f"stays: {advice}")]
    is_there = state.folder.exists()
    places = [*([state.folder.url] if is_there else []), *_list_unnamed(state.output)]
    if remove and places:
        with state.records.lock():
            if state.read_unfinished() is not None:
                raise TemporaryError("a run has begun", state.output.url, "sweep again later")
            for place in _list_unnamed(state.output):
                remove_file(state.output, place.removeprefix(f"{state.output.url}/"))
            state.remove_rest()
    outcome = "removed" if remove else "would be removed"
    return [Leftover(place=place, outcome=outcome) for place in places]


def _list_unnamed(output: Folder) -> Iterator[str]:
    """Yield the shards of runs in a published output that no manifest names."""
    names = [name for name in list_files(output) if _SHARD.fullmatch(name.rpartition("/")[2])]
    with suppress(OutputError):  # a manifest that cannot be read may name them
        manifests = list_manifests(output) if names else []
        named = {shard.name for manifest in manifests for shard in manifest.shards}
        if manifests:
            yield from (f"{output.url}/{name}" for name in names if name not in named)
