"""A driver that strikes itself: the command line with one function patched to kill, interrupt or pause at a chosen point.

`python driver.py` reads requests from stdin, one JSON object a line, forks for each (importing once is most of a small
run), and answers with the exit code. No production code knows of it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpdask import cli
from dpdask.engine import randomise, release, survey, synthesise, tabulate
from dpdask.io import shards
from dpdask.io.storage import Folder
from dpdask.jobs import charging
from dpdask.jobs.kinds import central, copula, marginals, tree
from dpdask.jobs.state import RunState

Strike = Callable[[], None]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def pause() -> None:
    (Path(os.environ["DRIVER_SIGN"])).touch()
    time.sleep(120)


STRIKES: dict[str, Strike] = {"kill": kill, "interrupt": interrupt, "pause": pause}


def at(owner: Any, name: str, strike: Strike, *, after: bool = True, nth: int = 1, when: Callable[..., bool] = lambda *_: True) -> None:
    """Strike before or after the n-th call of a function whose arguments fit."""
    function, calls = getattr(owner, name), [0]

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls[0] += bool(when(*args))
        due = calls[0] == nth and when(*args)
        if due and not after:
            strike()
        result = function(*args, **kwargs)
        if due and after:
            strike()
        return result

    setattr(owner, name, patched)


def named(suffix: str) -> Callable[..., bool]:
    return lambda _folder, name="", *_: str(name).endswith(suffix)


def reached(stage: str) -> Callable[..., bool]:
    return lambda _state, progressed, *_: progressed.stage == stage


POINTS: dict[str, Callable[[Strike], None]] = {
    "locked": lambda s: at(RunState, "open", s, after=False),
    "key-written": lambda s: at(Folder, "write", s, when=named("run.key")),
    "opened": lambda s: at(RunState, "open", s),
    "surveying": lambda s: at(survey, "survey_fragment", s, nth=2),
    "intended": lambda s: at(charging, "intend", s),
    "drawn": lambda s: at(release, "distributions", s),
    "surveyed": lambda s: at(release, "fit_release", s, after=False),
    "release-written": lambda s: at(release, "write_release", s),
    "fitted": lambda s: at(RunState, "write", s, when=reached("fitted")),
    "first-shard-begun": lambda s: at(shards.ShardWriter, "write", s, nth=1),
    "shard-half-written": lambda s: at(shards.ShardWriter, "_flush", s, nth=4),
    "shard-unrecorded": lambda s: at(randomise.ShardWriter, "close", s, nth=3),
    "some-shards": lambda s: at(randomise, "write_shards", s, nth=3),
    "all-shards": lambda s: at(randomise, "write_all", s),
    "card-written": lambda s: at(Folder, "write", s, when=named("release.json")),
    "manifest-staged": lambda s: at(Folder, "write", s, when=named("manifest.json")),
    "success-staged": lambda s: at(Folder, "write", s, when=named("_SUCCESS")),
    "staged": lambda s: at(RunState, "write", s, when=reached("staged")),
    "before-move": lambda s: at(Folder, "move_to", s, after=False),
    "after-move": lambda s: at(Folder, "move_to", s),
    "uncommitted": lambda s: at(charging, "commit", s, after=False),
    "committed": lambda s: at(charging, "commit", s),
    "key-removed": lambda s: at(Folder, "remove", s, when=named("run.key")),
    "half-removed": lambda s: at(shutil, "rmtree", lambda: at(os, "unlink", s, nth=2), after=False),
    "removed": lambda s: at(RunState, "remove", s),
}
BEFORE_COMMIT = list(POINTS)[: list(POINTS).index("after-move")]
AFTER_COMMIT = list(POINTS)[list(POINTS).index("after-move") :]
POINTS["bounded"] = lambda s: at(release, "with_bounds", s)  # of jobs whose unit is a column
POINTS |= {  # of jobs that release nothing but noisy statistics, or what is made of them
    "tabulating": lambda s: at(tabulate, "tabulate_fragments", s, nth=2),
    "counted": lambda s: at(tabulate, "tabulate", s),
    "measured": lambda s: at(central, "measure", s),
    "copula-fitted": lambda s: at(copula, "fit_copula", s),
    "copula-written": lambda s: at(synthesise, "write_copula", s),
    "tables-written": lambda s: at(central.NoisyCounts, "measured", s),
    "some-records": lambda s: at(synthesise, "write_records", s, nth=3),
    "all-records": lambda s: at(synthesise, "write_all_records", s),
    "tables-staged": lambda s: at(marginals, "stage", s),
}
POINTS |= {  # of a release along a tree
    "tree-measured": lambda s: at(tree, "measure_tree", s),
    "noise-kept": lambda s: at(tree, "keep", s),
    "tree-fitted": lambda s: at(tree, "fit_tree", s),
}


def obey(request: dict[str, Any]) -> None:
    """Run the command line in this process, struck as requested."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["DRIVER_SIGN"] = request.get("sign", "")
    if request.get("point"):
        POINTS[request["point"]](STRIKES[request["strike"]])
    sys.argv = ["dpdask", *request["arguments"]]
    cli.main()


def answer(content: dict[str, int]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def serve() -> None:
    """Fork for each request; a process with one thread may."""
    for line in sys.stdin:
        assert threading.active_count() == 1
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = 70
            try:
                obey(json.loads(line))
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 70 * (end.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        answer({"pid": child})
        answer({"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})


if __name__ == "__main__":
    serve()
