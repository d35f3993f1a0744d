"""Moving an output to another place, with the hidden folders that its next release needs.

A record in the old place says first where the output goes, and at the end that all of it is there. It
stays, so that neither a move that was cut off nor a job that names the old place releases rows again.
Nothing else knows the place of an output: neither a ledger, nor a job's digest, nor what is encrypted.
"""

from __future__ import annotations

import re

from dpdask.errors import InputError, OutputError, SpecError
from dpdask.io.filesystems import by_root, use_options
from dpdask.io.folders import list_tree
from dpdask.io.fragments import map_files
from dpdask.io.shards import MANIFEST_NAME, SUCCESS_NAME, TABLE_FOLDER, list_manifests
from dpdask.io.storage import SERIES_NAME, Folder
from dpdask.io.table_logs import LOG, METADATA
from dpdask.jobs.records import busy
from dpdask.jobs.spec import Job
from dpdask.jobs.state import Moved, RunState, open_output_run, refuse_moved

# copied last, and in this order, since they make the rest count
_LAST = (MANIFEST_NAME.removesuffix(".json"), f"{LOG}/", SERIES_NAME, SUCCESS_NAME)


def move_job(job: Job, target_url: str) -> bool:
    """Move a job's output with the options of its stores; see `move_output`."""
    with use_options({**job.stores, **by_root(job.file.storage, [target_url])}):
        return move_output(job.output_url, target_url)


def move_output(source_url: str, target_url: str) -> bool:
    """Move an output, or go on with a move that was cut off; return whether anything was left to do.

    On one file system its folders are renamed. In a store, or from one store to another, all files
    are copied before the first is removed.

    Raises
    ------
    SpecError
        If one place is in a store and the other is not, or one lies in the other; if the output is an
        Iceberg table; if it is being moved to a third place.
    InputError
        If there is no release.
    OutputError
        If a release is unfinished, or something is in the new place, or it lies on another file system.
    TemporaryError
        If a driver is at work in one of the places, or a store fails.

    Privacy
    -------
    What was encrypted for a series in a store is copied as it is: its key stays where it was, and its
    place is part of nothing.
    """
    source, target = Folder(source_url), Folder(target_url)
    _check_places(source, target)
    state, there = open_output_run(source), open_output_run(target)
    moved = state.find_move()
    if moved is not None and moved.moved_to != target.url:
        raise refuse_moved(source, moved)
    if moved is None:
        _check_content(state, there)
    elif moved.whole and not _find_parts(source) and there.find_move() is None:
        return False
    with state.records.lock(), there.records.lock():
        if moved != state.find_move():
            raise busy(source)
        if moved is None:
            _check_content(state, there)
            source.check_removable()
            state.write_move(Moved(target.url, whole=False))
        if moved is None or not moved.whole:
            for ending, part in _find_parts(source).items():
                _carry(part, _place_part(target, ending))
            state.write_move(Moved(target.url, whole=True))
        there.records.clear()  # what it says if an output was moved from there
        for part in _find_parts(source).values():
            part.remove()
    return True


def _place_part(output: Folder, ending: str) -> Folder:
    return output.sibling(".", ending) if ending else output


def _find_parts(output: Folder) -> dict[str, Folder]:
    """Return the output and the hidden folders beside it that are there, by the endings of their names."""
    parent, _, name = output.url.rpartition("/")
    pattern = re.compile(rf"\.{re.escape(name)}(\.dpdask-(?:series|names-[0-9a-f]+))")
    hidden = [found[1] for each in Folder(parent).names() if (found := pattern.fullmatch(each))]
    is_there = output.names() or output.is_file()
    return {
        ending: _place_part(output, ending) for ending in [*([""] if is_there else []), *hidden]
    }


def _check_places(source: Folder, target: Folder) -> None:
    one, other = f"{source.url}/", f"{target.url}/"
    if one.startswith(other) or other.startswith(one):
        raise SpecError("an output cannot be moved to where it is, or into itself", target.url)
    if source.is_local != target.is_local:
        what = "what a series keeps is encrypted in a store, and not on a file system, so no output is moved from one to the other"
        raise SpecError(what, target.url, "copy the published folder alone: a series begins anew")
    target.check_creatable()
    if source.is_local and source.local_path.exists():
        near = next(each for each in target.local_path.parents if each.exists())
        places = (source.local_path, source.local_path.parent, near)
        if len({place.stat().st_dev for place in places}) > 1:
            what, hint = "this is on another file system", "choose a place on the same one"
            raise OutputError(what, target.url, hint)


def _check_content(state: RunState, there: RunState) -> None:
    """Check that all of an output is released, and nothing is in the new place."""
    source, target = state.output, there.output
    try:
        left = state.read_unfinished()
    except SpecError:  # another driver has just begun to move it
        raise busy(source) from None
    if not list_manifests(source):
        raise InputError("there is no release here", source.url, "check the path")
    if left is not None:
        hint = "run its job again, or `dpdask abort` it, and move then"
        raise OutputError("a release is unfinished here", source.url, hint)
    tables = [name for name in source.names() if name.startswith(f"{TABLE_FOLDER}=")]
    is_iceberg = any(METADATA in source.child(name).names() for name in tables)
    if is_iceberg or (not source.exists(MANIFEST_NAME) and LOG not in source.names()):
        what = (
            "the metadata of an Iceberg table name the place of every file, so it cannot be moved"
        )
        raise SpecError(what, source.url, "leave it there, or release into another table")
    if _find_parts(target) or (there.find_move() is None and there.read_unfinished() is not None):
        what = "something is there already"
        raise OutputError(what, target.url, "name a place where nothing is")


def _carry(part: Folder, there: Folder) -> None:
    """Make a folder, or what a move that was cut off has left of it, appear in another place."""
    if part.is_local:
        Folder(part.url).move_to(there)
        return

    def copy(name: str) -> None:
        there.write(name, part.read(name, replaced=True))

    known = set(list_tree(there))
    names = sorted((_rank(name), name) for name in list_tree(part) if name not in known)
    map_files(copy, [name for rank, name in names if rank < 0])
    for name in (name for rank, name in names if rank >= 0):
        copy(name)


def _rank(name: str) -> int:
    if f"/{LOG}/" in name:  # of one of several tables, whose manifest makes them count
        return 0
    return next((rank for rank, start in enumerate(_LAST, 1) if name.startswith(start)), -1)
