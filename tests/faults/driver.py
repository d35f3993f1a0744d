"""A driver that strikes itself: the command line with one function patched to kill, interrupt, pause or disconnect at a chosen point.

`python -m faults.driver`, in the folder `tests`, reads requests from stdin, one JSON object a line, forks for each (to import and
to load compiled kernels is most of a small run), and answers with the exit code. No production code knows of it.
"""

import gc
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import adlfs  # noqa: F401  # with the next: importing them is most of what a driver does whose output is in a store
import s3fs  # noqa: F401
from e2e.helpers import MIXED_SCHEMA, lake, run_here, spare_the_disk, write_job
from pyiceberg.catalog.sql import SqlCatalog

from dpdask import cli
from dpdask.engine import fit, scan, write
from dpdask.engine.account import Account
from dpdask.io import shards, storage, table_logs
from dpdask.io.encrypted import EncryptedFile
from dpdask.io.storage import RELEASE_NAME, Folder
from dpdask.jobs import records, run, run_keys, spec
from dpdask.jobs.records import LockedRecord, NumberedRecords
from dpdask.jobs.series import KeptFolder
from dpdask.jobs.state import RunState
from dpdask.mechanisms.copula.people import PersonsMechanism
from dpdask.mechanisms.copula.spec import CopulaMechanism
from dpdask.mechanisms.dip.chain import RecordsMechanism
from dpdask.mechanisms.dip.columns import ColumnsMechanism
from dpdask.mechanisms.dip.tree import TreeMechanism
from dpdask.mechanisms.histogram.spec import HistogramMechanism
from dpdask.mechanisms.interval.spec import RandomRangesMechanism
from dpdask.mechanisms.marginals.spec import MarginalsMechanism
from dpdask.privacy import ledger, ledger_changes

Strike = Callable[[], None]
MECHANISMS = (
    *(ColumnsMechanism, RecordsMechanism, TreeMechanism, CopulaMechanism),
    *(MarginalsMechanism, HistogramMechanism, RandomRangesMechanism, PersonsMechanism),
)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def terminate_again_and_again():
    """As a supervisor that is in a hurry does: SIGTERM now, and every few milliseconds while the driver cleans up."""
    pid = os.getpid()

    def hurry():
        for _ in range(1000):
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.002)

    threading.Thread(target=hurry, daemon=True).start()
    time.sleep(1)


def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


def disconnect():
    raise ConnectionResetError


def pause():
    (Path(os.environ["DRIVER_SIGN"])).touch()
    time.sleep(120)


STRIKES = {
    "kill": kill,
    "interrupt": interrupt,
    "terminate": terminate,
    "terminate again and again": terminate_again_and_again,
    "pause": pause,
    "freeze": freeze,
    "disconnect": disconnect,
}


def at(owner, name, strike, *, after=True, nth=1, when=lambda *_: True):
    """Strike before or after the n-th call of a function whose arguments fit."""
    function, calls = getattr(owner, name), [0]

    def patched(*args, **kwargs):
        calls[0] += bool(when(*args))
        due = calls[0] == nth and when(*args)
        if due and not after:
            strike()
        result = function(*args, **kwargs)
        if due and after:
            strike()
        return result

    setattr(owner, name, patched)


def in_mechanisms(name, strike, *, after=True):
    """Strike before or after a method of the mechanism that runs."""
    for owner in MECHANISMS:
        at(owner, name, strike, after=after)


def named(suffix):
    return lambda _folder, name="", *_: str(name).endswith(suffix)


def published(what):
    return lambda _folder, name="", *_: (
        re.fullmatch(rf"_dpdask/{what}(-\w+)?\.json", str(name)) is not None
    )


def in_log(folder, *_):
    return folder.url.endswith("/_delta_log")


def reached(stage):
    return lambda _state, progressed, *_: progressed.stage == stage


def keep_counts_soon(strike):
    """Strike when the counts of a pass are kept, which short passes do not wait for."""
    scan.KEEP_SECONDS = 0.0
    at(EncryptedFile, "write", strike)


def later_manifest(_folder, name="", *_):
    return "manifest-" in str(name)


POINTS = {
    "locked": lambda s: at(RunState, "open", s, after=False),
    "key-written": lambda s: at(run_keys.FolderKeys, "write", s),
    "opened": lambda s: at(RunState, "open", s),
    "surveying": lambda s: at(scan, "scan_parts", s, nth=2),
    "intended": lambda s: at(Account, "intend", s),
    "drawn": lambda s: in_mechanisms("draw", s),  # and kept nowhere yet
    "surveyed": lambda s: in_mechanisms("fit", s, after=False),
    "release-fitted": lambda s: in_mechanisms("fit", s),
    "release-written": lambda s: at(fit, "keep", s, when=named(RELEASE_NAME)),
    "fitted": lambda s: at(RunState, "write", s, when=reached("fitted")),
    "first-shard-begun": lambda s: at(shards.ShardWriter, "write", s, nth=1),
    "shard-half-written": lambda s: at(shards.ShardWriter, "_flush", s, nth=3),
    "shard-unrecorded": lambda s: at(write.ShardWriter, "close", s, nth=3),
    "some-shards": lambda s: at(write, "write_shards", s, nth=3),
    "all-shards": lambda s: at(run, "write_all", s),
    "card-written": lambda s: at(Folder, "write", s, when=published("release")),
    "manifest-staged": lambda s: at(Folder, "write", s, when=published("manifest")),
    "success-staged": lambda s: at(Folder, "write", s, when=named("_SUCCESS")),
    "staged": lambda s: at(RunState, "write", s, when=reached("staged")),
    "before-move": lambda s: at(Folder, "move_to", s, after=False),
    "after-move": lambda s: at(Folder, "move_to", s),
    "uncommitted": lambda s: at(Account, "commit", s, after=False),
    "committed": lambda s: at(Account, "commit", s),
    "key-removed": lambda s: at(Folder, "remove", s, when=named("run.key")),
    "half-removed": lambda s: at(
        LockedRecord, "clear", lambda: at(Folder, "remove", s, nth=2), after=False
    ),
    "removed": lambda s: at(RunState, "remove", s),
    "acquired": lambda s: at(NumberedRecords, "_acquire", s),  # of jobs whose output is in a store
    "card-created": lambda s: at(Folder, "put_new", s, when=published("release")),
    "key-kept": lambda s: at(run_keys.HostKeys, "write", s),
    "recorded": lambda s: at(NumberedRecords, "write", s, nth=2),
    "manifest-created": lambda s: at(Folder, "put_new", s, when=named("manifest.json")),
    "entry-unwritten": lambda s: at(
        Folder, "put_new", s, when=in_log, after=False
    ),  # of jobs whose output is a Delta table
    "entry-written": lambda s: at(Folder, "put_new", s, when=in_log),
    "catalog-unasked": lambda s: at(
        SqlCatalog, "commit_table", s, after=False
    ),  # of jobs whose output is an Iceberg table
    "catalog-asked": lambda s: at(SqlCatalog, "commit_table", s),
    "one-table-staged": lambda s: at(write.ShardWriter, "close", s),  # of jobs of persons
    "first-unwritten": lambda s: at(table_logs.TableLog, "commit", s, after=False),
    "first-committed": lambda s: at(table_logs.TableLog, "commit", s),
    "second-unwritten": lambda s: at(table_logs.TableLog, "commit", s, nth=2, after=False),
    "second-committed": lambda s: at(table_logs.TableLog, "commit", s, nth=2),
    "run-cleared": lambda s: at(NumberedRecords, "_remove_all_but_chain", s, nth=2),
    "later-kept": lambda s: at(KeptFolder, "write", s),  # of growing tables
    "later-half-moved": lambda s: at(Path, "replace", s, nth=2),
    "later-carded": lambda s: at(Folder, "put_new", s, after=False, when=later_manifest),
    "later-manifest": lambda s: at(Folder, "put_new", s, when=later_manifest),
    "rebasing": lambda s: at(KeptFolder, "write", s, after=False),  # of `rebase`
    "rebased": lambda s: at(KeptFolder, "write", s),
    "rebase-ended": lambda s: at(RunState, "remove_rest", s),
    "move-noted": lambda s: at(RunState, "write_move", s),  # of `move`
    "half-copied": lambda s: at(Folder, "write", s, nth=2, when=named(".parquet")),
    "moved": lambda s: at(RunState, "write_move", s, nth=2),
    "importing": lambda s: at(ledger_changes, "import_claim", s, nth=2, after=False),  # of `import`
    "import-unwritten": lambda s: at(ledger, "_append", s, nth=2),
    "imported": lambda s: at(ledger_changes, "import_claim", s, nth=2),
    "counts-kept": keep_counts_soon,
    "counted": lambda s: at(fit, "scan", s),
    "noise-kept": lambda s: at(fit, "_keep_drawn", s),  # of jobs that draw central noise
    "bounded": lambda s: at(fit, "bound_units", s),  # of jobs whose unit is a column
    "task-staged": lambda s: at(write, "stage", s),  # of jobs that have one shard
}


def obey(request):
    """Run the command line, struck as requested, or a program, in this process."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(
        {name: value for name, value in request["environment"].items() if value is not None}
    )
    for name in (name for name, value in request["environment"].items() if value is None):
        os.environ.pop(name, None)
    os.chdir(request["cwd"])
    sys.argv = ["dpdask", *request["arguments"]]
    if request["program"]:
        exec(compile(request["program"], "<string>", "exec"), {"__name__": "__main__"})
        return
    spec.check_seed = lambda _: None  # as the fixture `seeded_ledgers` does it here
    if request["point"]:
        os.environ["DRIVER_SIGN"] = request["sign"]
        POINTS[request["point"]](STRIKES[request["strike"]])
    cli.main()


def answer(content):
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def warm_up():
    """Run a job of rows and one of records, so that no fork has to import, and to load compiled kernels, for itself."""
    schema = {**MIXED_SCHEMA, "userId": {"role": "drop", "type": "int64"}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_here(write_job(folder / "rows", lake(folder / "in", [40, 40]), folder / "out"))
        copula = {"kind": "copula", "bins": 5, "n_rows": 20}
        run_here(
            write_job(
                folder / "records",
                lake(folder / "mixed", [40], schema=schema),
                folder / "records-out",
                schema=schema,
                mechanism=copula,
            )
        )
    gc.collect()
    gc.freeze()  # or every fork copies all pages when it collects


def serve():
    """Fork for each request, as often as it says, or wait for what was forked; a process with one thread may."""
    for line in sys.stdin:
        assert threading.active_count() == 1
        request = json.loads(line)
        if "wait" in request:
            answer(
                {
                    "codes": [
                        os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                        for child in request["wait"]
                    ]
                }
            )
        else:
            answer({"children": [fork(request) for _ in range(request["times"])]})


def fork(request):
    """Obey a request in a child of this process, and return its number."""
    child = os.fork()
    if child:
        return child
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 70
    try:
        obey(request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    spare_the_disk(setattr)
    storage._FIRST_WAIT_SECONDS, records.BEAT_SECONDS = 0.05, 0.2  # tests wait for both
    warm_up()
    answer({"warm": True})
    serve()
