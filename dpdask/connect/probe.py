"""What each worker is asked before a run reads a row or is charged: its versions, its memory, and what it can read and write."""

from __future__ import annotations

import asyncio
import builtins
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any

import dask

from dpdask.connect.spec import hide_user, is_exposed
from dpdask.engine.compute import INSECURE_KEY, LONELY_SECONDS, PATIENCE_KEY, find_client
from dpdask.errors import DpdaskError, InputError, OutputError, SpecError, TemporaryError
from dpdask.io.fragment import Fragment
from dpdask.io.storage import Folder
from dpdask.startup import LIBRARIES, compare_versions, find_versions, own_versions

if TYPE_CHECKING:
    from distributed import Client

MEMORY_FACTOR = 2
_BASE_BYTES = 400 * 2**20  # a worker's Python and its libraries
_SECONDS = 60.0  # a worker imports the package first, perhaps from a shared file system, or on a busy machine
_INSTALL = "install the same versions on every worker, and run again"


def check_workers(
    fragments: Sequence[Fragment], *, output: Folder, secrets: Folder | None = None
) -> None:
    """Check that each worker of the active cluster can do a run's work; threads and this process need no check.

    Parameters
    ----------
    fragments
        The input. The first file is opened; the largest row group must fit into a worker's memory.
    output
        A folder into which workers write; it exists. A file `_dpdask-probe-…` is written and
        removed.
    secrets
        The folder of the run's secrets, if workers read one; it exists. The driver writes such a
        file, and each worker reads it. If it is None, the run's key is sent to them.
    """
    client = find_client()
    if client is None or client.asynchronous:
        return
    with _first_worker(client), _held(client):
        if secrets is None:
            _check_encryption(client)
        _check_versions(client)
        _check_memory(client, max((fragment.n_bytes_decoded for fragment in fragments), default=0))
        _check_places(client, fragments, output, secrets)


@contextmanager
def _held(client: Client) -> Iterator[None]:
    """Give a worker a task that lasts while workers are asked: to ask is no task, and an adaptive cluster retires workers that have none."""
    from distributed import Event

    name = f"dpdask-probe-{uuid.uuid4().hex[:12]}"
    asked = Event(name, client=client)
    task = client.submit(asked.wait, 3 * _SECONDS, key=name, pure=False)
    try:
        yield
    finally:
        # a scheduler that is lost forgets both, and the answers stand
        with suppress(Exception):
            asked.set()
            task.result(timeout=_SECONDS)
            asked.clear()  # or the scheduler would keep it for good
        task.release()


@contextmanager
def _first_worker(client: Client) -> Iterator[None]:
    """Wait until there is a worker; an adaptive cluster starts one for a task, and retires none that holds the only copy of a result."""
    from distributed import CancelledError

    if client.scheduler_info(n_workers=1)["workers"]:
        yield
        return
    seconds = dask.config.get(PATIENCE_KEY, LONELY_SECONDS)
    task = client.submit(abs, -1, key=f"dpdask-probe-{uuid.uuid4().hex[:12]}", pure=False)
    try:
        try:
            task.result(timeout=seconds)
        except (TimeoutError, CancelledError, OSError):
            what = f"no worker connected within {seconds:.0f} seconds"
            hint = "check that workers start, and run again"
            raise TemporaryError(what, "cluster", hint) from None
        yield
    finally:
        task.release()


def _check_encryption(client: Client) -> None:
    """Check that nobody on the network path can read a key that is sent to the workers, unless the steward allows it."""
    addresses = [client.scheduler.address, *client.scheduler_info(n_workers=-1)["workers"]]
    exposed = next(filter(is_exposed, addresses), None)
    if exposed is not None and not dask.config.get(INSECURE_KEY, False):
        what = "the output is in a store, so workers need the run's key, and without TLS anyone on the network path can read it"
        hint = "use tls:// with certificates, or a cluster of kind address with insecure: true"
        raise SpecError(what, hide_user(exposed), hint)


def _check_versions(client: Client) -> None:
    """Check the versions of the workers, and of the scheduler: it unpickles each task, and pickles it again for its worker."""
    wanted = own_versions()
    try:
        # asked without sending code: Python cannot run that of another version
        asked = client.get_versions()
        pythons = {address: _find_python(found) for address, found in asked["workers"].items()}
        scheduler = {**wanted, "Python": _find_python(asked["scheduler"])}
        if scheduler == wanted:
            scheduler = client.run_on_scheduler(_by_value(find_versions), LIBRARIES)
    except OSError:
        raise _no_answer() from None
    if differs := compare_versions(scheduler, wanted):
        hint = "install the same versions there as here, and run again"
        raise SpecError(f"the scheduler: {differs}", "cluster", hint)
    found = {address: {**wanted, "Python": python} for address, python in pythons.items()}
    if all(python == wanted["Python"] for python in pythons.values()):
        found = _ask(client, _by_value(find_versions), LIBRARIES)
    _refuse(
        [compare_versions(versions, wanted) for versions in found.values()], SpecError, _INSTALL
    )


def _find_python(found: Mapping[str, Any]) -> str:
    return ".".join(found["packages"]["python"].split(".")[:2])


def _by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is pickled with its code: one of an installed module is pickled as its name, and imported where it arrives."""
    assert isinstance(function, FunctionType)
    names = {"__builtins__": builtins}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__module__ = "__main__"
    return copy


def _check_memory(client: Client, largest: int) -> None:
    """Check that a worker can hold as many of the largest row group as it has threads."""
    short = []
    for worker in client.scheduler_info(n_workers=-1)["workers"].values():
        n_threads, limit = worker["nthreads"], worker["memory_limit"]
        needed = _BASE_BYTES + MEMORY_FACTOR * largest * n_threads
        has, about = map(dask.utils.format_bytes, (limit, needed))
        what = f"a memory limit of {has}, and the largest row group in {n_threads} threads needs about {about}"
        short.append(what if limit and limit < needed else "")
    hint = "give workers more memory or fewer threads, or write smaller row groups"
    _refuse(short, SpecError, hint)


def _check_places(
    client: Client, fragments: Sequence[Fragment], output: Folder, secrets: Folder | None
) -> None:
    name = f"_dpdask-probe-{uuid.uuid4().hex}"
    try:
        if secrets is not None:
            secrets.write(name, b"", private=True)
        first = fragments[0] if fragments else None
        answers = _ask(client, try_places, first, output, secrets, name)
    finally:
        if secrets is not None:
            secrets.remove(name)
    hint = "give workers the same paths or URLs, and the rights of the user who runs this"
    for error in (InputError, OutputError, TemporaryError):
        wrong = [what if code == error.exit_code else "" for code, what in answers.values()]
        _refuse(wrong, error, hint)


async def try_places(*places: Any) -> tuple[int, str]:
    """Return the exit code and the words of what this worker cannot do; 0 if it can do all."""
    # not in the event loop: a storage may hang
    return await asyncio.to_thread(_try_places, *places)


def _try_places(
    first: Fragment | None, output: Folder, secrets: Folder | None, name: str
) -> tuple[int, str]:
    step, code = "cannot read the first file of the input", InputError.exit_code
    try:
        if first is not None:
            folder, _, file = first.url.rpartition("/")
            with Folder(folder).open(file) as opened:
                opened.read(4)
        step, code = "cannot write into the output's folder", OutputError.exit_code
        mine = f"{name}-{uuid.uuid4().hex}"
        output.write(mine, b"", private=True)
        output.remove(mine)
        step = "cannot read the folder of the run's secrets"
        if secrets is not None:
            secrets.read(name)
    except TemporaryError as error:
        return error.exit_code, f"{step}: {error.what}"
    except Exception:  # a library's message may hold a credential
        return code, step
    return 0, ""


def _ask(client: Client, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return what each worker answers; those that go away meanwhile are left out."""
    try:
        answers = client.run(function, *arguments, on_error="return", callback_timeout=_SECONDS)
    except OSError:  # also TimeoutError
        raise _no_answer() from None
    there = {name: answer for name, answer in answers.items() if not isinstance(answer, OSError)}
    failed = [
        f"a failure when asked ({type(answer).__name__})" if isinstance(answer, Exception) else ""
        for answer in there.values()
    ]
    _refuse(failed, SpecError, _INSTALL)
    if not there:
        raise _no_answer()
    return there


def _no_answer() -> TemporaryError:
    hint = "check that workers and scheduler run, and run again"
    return TemporaryError("no worker answers", "cluster", hint)


def _refuse(wrong: Sequence[str | None], error: type[DpdaskError], hint: str) -> None:
    """Raise what is wrong with most of the workers: one entry for each, empty if nothing is."""
    counts = Counter(filter(None, wrong)).most_common(1)
    for what, number in counts:
        raise error(f"{number} of {len(wrong)} workers: {what}", "cluster", hint)
