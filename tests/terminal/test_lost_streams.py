"""A command does its work, and ends as the work does, whatever becomes of the streams that it prints to: real processes."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from e2e.bad_input import COLUMNS, command, job

from dpdask.engine.account import open_ledger
from dpdask.schemas import find_file

NAME = "Zoë ε 😀"  # of whose letters ISO 8859-1 has some, and ASCII none
LEDGER = ["--url", "sqlite:///ledger.db", "--dataset", "d"]
DPDASK, DASK = ([sys.executable, "-m", *words] for words in (["dpdask"], ["dask", "dpdask"]))
VERBS = {
    "run": (["run", "job.yaml"], 0),
    "run on workers": (["run", "job.yaml", "--set", "cluster={kind: local, workers: 1}"], 0),
    "run a wrong job": (["--debug", "run", "job.yaml", "--set", "privacy.epsilon=-1"], 64),
    "run without room": (["run", "job.yaml", "--set", "privacy.epsilon=5"], 77),
    "plan as JSON": (["plan", "job.yaml", "--json"], 0),
    "status": (["status", "released"], 0),
    "help": (["--help"], 0),
    "an unknown verb": (["rnu"], 2),
}
WAYS = ["closed", "full", "unread", "ascii"]
STREAMS = {"stdout": [1], "stderr": [2], "all": [0, 1, 2]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a table, its job, a release of it, and a ledger with room for another one."""
    folder = tmp_path_factory.mktemp("made")
    open_ledger(f"sqlite:///{folder / 'ledger.db'}").init("d", 4.0)
    words = job(folder, name=NAME, ledger={"url": "sqlite:///ledger.db", "dataset": "d"})
    narrow = COLUMNS | {"rating": COLUMNS["rating"] | {"levels": [1.0, 2.0]}}
    (folder / "narrow.yaml").write_text(json.dumps({"columns": narrow}))
    assert command(*words, "--set", "output.path=released").code == 0
    return folder


@pytest.fixture
def place(made, tmp_path):
    """A copy of it."""
    return shutil.copytree(made, tmp_path / "copy")


def close(numbers):
    return lambda: [os.close(number) for number in numbers] and None


def execute(words, folder, streams, way):
    """Return how a command ends some of whose streams are in a bad way."""
    with ExitStack() as opened:
        if way == "full":
            bad = opened.enter_context(Path("/dev/full").open("w")).fileno()
        elif way == "unread":
            read, bad = os.pipe()
            os.close(read)
            opened.callback(os.close, bad)
        else:
            bad = subprocess.DEVNULL
        out, err = (bad if number in STREAMS[streams] else subprocess.DEVNULL for number in (1, 2))
        environment = os.environ | (
            {} if way in ("full", "unread", "closed") else {"PYTHONIOENCODING": way}
        )
        first = close(STREAMS[streams]) if way == "closed" else None
        return subprocess.run(
            words,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            preexec_fn=first,
            check=False,
        ).returncode


@pytest.mark.few(rest="slow")
@pytest.mark.parametrize(
    ("streams", "way"),
    [(streams, way) for streams in ("stdout", "stderr") for way in WAYS]
    + [("all", "closed"), ("all", "unread")],
)
@pytest.mark.parametrize("verb", VERBS)
def test_the_exit_code_comes_from_the_work_alone(verb, streams, way, place):
    words, code = VERBS[verb]
    assert execute([*DPDASK, *words], place, streams, way) == code
    assert (place / "out" / "_SUCCESS").exists() == (verb in ("run", "run on workers"))


@pytest.mark.few(2, rest="slow")
@pytest.mark.parametrize("verb", ["run", "run without room", "an unknown verb"])
@pytest.mark.parametrize("way", WAYS)
def test_so_does_that_of_a_verb_of_dask(verb, way, place):
    words, code = VERBS[verb]
    assert execute([*DASK, *words], place, "all", way) == code


def test_what_an_encoding_does_not_have_is_escaped_as_in_json(place):
    def said(encoding, *words):
        return subprocess.check_output(
            [*DPDASK, *words], cwd=place, env=os.environ | {"PYTHONIOENCODING": encoding}
        ).decode(encoding)

    assert json.loads(said("ascii", "plan", "job.yaml", "--json"))["name"] == NAME
    assert said("iso-8859-1", "validate", "job.yaml").startswith(
        f"Zoë {json.dumps(NAME[4:])[1:-1]}: valid"
    )


def test_a_result_that_cannot_be_written_is_told():
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [*DPDASK, "schema", "job"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    [line] = ended.stderr.splitlines()
    assert (ended.returncode, line) == (
        0,
        "dpdask: WARNING standard output cannot be written (No space left on device), so the result is lost",
    )


def test_a_slow_reader_of_a_stream_that_does_not_block_gets_all():
    read, write = os.pipe()
    os.set_blocking(write, False)
    assert fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096) == 4096  # a tenth of what is printed
    with (
        subprocess.Popen([*DPDASK, "schema", "job"], stdout=write) as process,
        os.fdopen(read, "rb") as reader,
    ):
        os.close(write)
        assert reader.read() == find_file("job").read_bytes()
    assert process.returncode == 0


def test_no_file_of_a_run_takes_the_number_of_a_closed_stream(tmp_path):
    """Or whatever prints, such as a library in C, would write into it."""
    tell = (
        "import os; from dpdask.cli import cli; cli.make_context('dpdask', ['schema', 'job']); "
        "open('told', 'w').write(str(os.open('told', os.O_RDONLY)))"
    )
    subprocess.run(
        [sys.executable, "-c", tell], cwd=tmp_path, preexec_fn=close([0, 1, 2]), check=True
    )
    assert int((tmp_path / "told").read_text()) > 2
