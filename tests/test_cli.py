"""The command line: each verb's words, the shapes of its JSON, its exit codes, and what stands on which stream."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
from click.testing import CliRunner
from e2e.bad_input import Ended, command, job

from dpdask.cli import cli
from dpdask.errors import TemporaryError
from dpdask.version import __version__


def progress(ended: Ended) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ended.err.splitlines()]


def words(folder: Path, verb: str, *more: str) -> list[str]:
    return [*job(folder, verb=verb), *more]


def test_validate_reads_no_data(tmp_path):
    ended = command(*job(tmp_path, {}, verb="validate"))  # there is no table
    assert (ended.code, ended.out, ended.err) == (0, "bad-input: valid; privatises rating, price\n", "")


def test_plan_as_text_names_the_promise_and_the_parts(tmp_path):
    ended = command(*words(tmp_path, "plan"))
    assert ended.code == 0
    assert not ended.err
    for text in (
        "bad-input\n",
        "400 rows",
        "4 fragments",
        "stage 1",
        "ε         rating: 0.5",
        "kept      userId; dropped: note",
        "about 300 rows",
        "Not protected: the held-out rows",
    ):
        assert text in ended.out
    assert "INSECURE" not in ended.out
    assert "INSECURE" in command(*words(tmp_path, "plan", "--set", "insecure_seed=1")).out


def test_plan_as_json(tmp_path):
    found = json.loads(command(*words(tmp_path, "plan", "--json")).out)
    assert {key: type(value) for key, value in found.items()} == {
        "name": str,
        "n_fragments": int,
        "n_rows": int,
        "n_bytes": int,
        "stages": list,
        "epsilons": dict,
        "kept": list,
        "dropped": list,
        "guarantee": str,
        "released_rows": int,
        "n_shards": int,
        "output": str,
        "insecure": bool,
    }
    assert found["output"] == f"file://{tmp_path}/out"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "job.yaml", "schema.yaml"]


def test_run_as_json_and_again(tmp_path):
    given = words(tmp_path, "run", "--json", "--set", "insecure_seed=5")
    first = command(*given)
    found = json.loads(first.out)
    assert {key: type(value) for key, value in found.items()} == {
        "status": str,
        "output": str,
        "rows": int,
        "shards": int,
        "bytes": int,
        "epsilon": float,
        "protected": str,
        "unprotected": str,
        "insecure": bool,
    }
    assert (found["status"], found["insecure"], found["shards"]) == ("released", True, 1)
    assert found["bytes"] == (tmp_path / "out" / "part-00000.parquet").stat().st_size
    assert first.out.count("\n") == 1
    again = command(*given)
    assert json.loads(again.out) == found | {"status": "already released"}
    assert (again.code, again.err) == (0, "")


def test_progress_is_json_lines_on_stderr(tmp_path):
    lines = progress(command(*words(tmp_path, "run")))
    assert {line["stage"] for line in lines} == {"survey", "write"}
    assert all(set(line) == {"stage", "done", "total"} for line in lines)
    for stage in ("survey", "write"):
        found = [(line["done"], line["total"]) for line in lines if line["stage"] == stage]
        assert [done for done, _ in found] == list(range(1, len(found) + 1))
        assert found[-1][0] == found[-1][1]


def test_run_as_text_says_what_is_promised(tmp_path):
    ended = command(*words(tmp_path, "run"))
    assert ended.code == 0
    assert "bad-input: released\n" in ended.out
    assert "Not protected: the held-out rows" in ended.out
    assert "INSECURE" not in ended.out
    assert "bad-input: already released\n" in command(*words(tmp_path, "run")).out
    assert "INSECURE: seeded, protects nobody" in command(*words(tmp_path, "run", "--set", "insecure_seed=1", "--set", "output.path=seeded")).out


@pytest.mark.filterwarnings("ignore:unclosed")
def test_settings_change_what_they_name(tmp_path):
    found = json.loads(
        command(
            *words(
                tmp_path, "run", "--json", "--set", "privacy.epsilon=1e-1", "--set", "output.path=else where/ö", "--set", "output.rows_per_shard=50"
            )
        ).out
    )
    assert found["epsilon"] == 0.1
    assert found["shards"] > 3
    assert (tmp_path / "else where" / "ö" / "_SUCCESS").exists()


def test_status_and_abort(tmp_path):
    given, out = words(tmp_path, "run"), str(tmp_path / "out")

    def state() -> dict[str, Any]:
        return json.loads(command("status", out, "--json").out)

    assert state() == {"stage": "absent", "n_shards": 0}
    assert command("abort", out).out == f"{out}: there is no unfinished run\n"
    with mock.patch("dpdask.jobs.run.release_card", side_effect=TemporaryError("crash", None, "run again to resume")):
        ended = command(*given)
    assert (ended.code, ended.lines) == (75, ["dpdask: crash; run again to resume"])
    assert state() == {"stage": "fitted", "n_shards": 1}
    assert command("status", out).out == f"{out}: fitted, 1 shards\n"
    assert command("abort", out).out == f"{out}: the unfinished run is removed\n"
    assert state() == {"stage": "absent", "n_shards": 0}
    assert command(*given).code == 0
    assert state() == {"stage": "released", "n_shards": 1}
    refused = command("abort", out)
    assert (refused.code, len(refused.lines)) == (73, 1)
    assert "released already" in refused.err


def test_status_takes_a_relative_path_and_one_with_a_slash(tmp_path, monkeypatch):
    assert command(*words(tmp_path, "run")).code == 0
    monkeypatch.chdir(tmp_path)
    assert command("status", "out/").out == "out/: released, 1 shards\n"


def test_simulate(tmp_path):
    out = str(tmp_path / "ratings")
    ended = command("simulate", "movielens", "--rows", "1000", "--users", "20", "--rows-per-file", "400", "--out", out)
    assert ended.code == 0
    assert ended.out == f"{out}: 1,000 simulated ratings of 20 users in 3 files\n"
    assert progress(ended)[-1] == {"stage": "simulate", "done": 3, "total": 3}
    assert command("simulate", "movielens", "--rows", "1000", "--out", out).code == 73
    assert command("simulate", "movielens", "--rows", "-1", "--out", str(tmp_path / "b")).code == 2
    assert command("simulate", "movielens", "--rows", "many", "--out", str(tmp_path / "b")).code == 2


# ---- exit codes


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), click.Abort()])
def test_an_interruption_ends_with_130_and_a_resume_works(raised, tmp_path):
    given = words(tmp_path, "run")
    with mock.patch("dpdask.jobs.run.release_card", side_effect=raised):
        ended = command(*given)
    assert (ended.code, ended.lines) == (130, ["dpdask: interrupted; run again to resume"])
    assert (tmp_path / ".out.dpdask" / "run.key").exists()
    assert command(*given).code == 0


def test_a_defect_shows_its_type_alone(tmp_path):
    with mock.patch("dpdask.jobs.run.release_card", side_effect=RuntimeError("Zebulon-Quux")):
        ended = command(*words(tmp_path, "run"))
    assert ended.code == 70
    [line] = ended.lines
    assert line.startswith("dpdask: RuntimeError; this is a defect of dpdask")
    assert "Zebulon" not in ended.err


def test_debug_shows_where(tmp_path):
    with pytest.raises(TemporaryError), mock.patch("dpdask.jobs.run.release_card", side_effect=TemporaryError("crash")):
        command("--debug", *words(tmp_path, "run"))


def test_no_words_give_the_help_and_2():
    ended = command()
    assert ended.code == 2
    assert "Usage: " in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("given", [["--help"], ["-h"], ["run", "--help"], ["simulate", "-h"]])
def test_help_is_the_result(given):
    ended = command(*given)
    assert ended.code == 0
    assert ended.out.startswith("Usage: ")
    assert not ended.err


def test_version():
    ended = command("--version")
    assert (ended.code, ended.err) == (0, "")
    assert __version__ in ended.out


# ---- as a verb of dask


def test_it_is_a_verb_of_dask_by_its_name():
    from importlib.metadata import entry_points

    [entry] = [entry for entry in entry_points(group="dask_cli") if entry.value.startswith("dpdask.")]
    assert entry.load() is cli
    assert cli.name == "dpdask"  # dask takes the group's own name


@pytest.mark.parametrize(("given", "code"), [(["run", "nowhere.yaml"], 64), (["rnu"], 2), (["status", "nosuch://x"], 73), (["status", "/tmp"], 0)])
def test_dask_dpdask_ends_with_the_same_codes(given, code):
    @click.group()
    def dask_() -> None:
        pass

    dask_.add_command(cli)
    ended = CliRunner().invoke(dask_, ["dpdask", *given])
    assert ended.exit_code == code
    assert "Traceback" not in ended.output
    assert (ended.stderr.count("\n") == 1) == bool(code)


# ---- a process


def test_sigint_in_the_middle_of_a_run(tmp_path):
    """The signal itself, not a mock: the process stops itself when the first progress of the writing stage is reported."""
    given = words(tmp_path, "run")
    program = (
        "import os, signal; from dpdask.cli import main; from dpdask.engine import randomise\n"
        "def interrupted(*a, **k): os.kill(os.getpid(), signal.SIGINT)\n"
        "randomise.write_all = interrupted; main()"
    )
    ended = subprocess.run([sys.executable, "-c", program, *given], capture_output=True, text=True, check=False)
    assert ended.returncode in (130, -signal.SIGINT)
    assert [line for line in ended.stderr.splitlines() if not line.startswith("{")] == ["dpdask: interrupted; run again to resume"]
    assert command(*given).code == 0
