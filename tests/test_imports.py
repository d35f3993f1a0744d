"""What importing costs: nothing for the package, a verb's own modules for the command line, the engine alone for a worker."""

import ast
import os
import pickle
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import cloudpickle
import pandas as pd
import pytest
import yaml
from e2e.helpers import HOLDOUT, MIXED_SCHEMA, discrete, lake, load, spy_on_stages, write_job

import dpdask
from dpdask.jobs.run import run_job
from dpdask.simulate import CENSUS_ATTRIBUTES
from dpdask.terminal import simulations

ROOT = Path(__file__).parents[1]
ROW = {"x": discrete([0, 1])}

# what the driver draws, prices, solves and keeps books with
DRIVERS = {"dp_accounting", "opendp", "scipy.optimize", "scipy.stats", "sklearn", "sqlalchemy"}
HEAVY = DRIVERS | {
    "dask",
    "distributed",
    "jinja2",
    "numba",
    "numpy",
    "pandas",
    "pyarrow",
    "pydantic",
    "rich",
    "scipy",
    "yaml",
}
COMMAND_LINE = {
    "dpdask",
    "dpdask.cli",
    "dpdask.errors",
    "dpdask.startup",
    "dpdask.steps",
    "dpdask.terminal",
    "dpdask.terminal.dossier",
    "dpdask.terminal.echo",
    "dpdask.terminal.options",
    "dpdask.terminal.simulations",
    "dpdask.version",
}


def loaded(code, *arguments):
    """The modules of a fresh Python that has run some code."""
    report = "\nprint('\\nmodules', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}{report}", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def of(modules, package):
    return {name for name in modules if name == package or name.startswith(f"{package}.")}


def verb(*words):
    """The modules that the command line has loaded when a verb ends well; several verbs are told apart by a `;`."""
    one_after_the_other = "for words in ' '.join(sys.argv[1:]).split(' ; '):\n    assert not cli(words.split(), standalone_mode=False)"
    return loaded(f"from dpdask.cli import cli\n{one_after_the_other}", *words)


def test_the_package_does_no_work():
    modules = loaded("import dpdask")
    assert of(modules, "dpdask") == {"dpdask", "dpdask.version"}
    assert not HEAVY & modules


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"]])
def test_help_loads_the_command_line_alone(words):
    modules = verb(*words)
    assert of(modules, "dpdask") == COMMAND_LINE
    assert not HEAVY & modules


def test_dask_loads_the_command_line_alone():
    [(name, value)] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]["dask_cli"].items()
    assert isinstance(EntryPoint(name, value, "dask_cli").load(), click.Group)
    load_it = f"from importlib.metadata import EntryPoint\nEntryPoint({name!r}, {value!r}, 'dask_cli').load()"
    more = loaded(f"import dask.cli\n{load_it}") - loaded("import dask.cli")
    assert of(more, "dpdask") == COMMAND_LINE
    assert not HEAVY & more


def test_a_ledger_takes_no_mechanism(tmp_path):
    where = ["--url", f"sqlite:///{tmp_path}/ledger.db", "--dataset", "people"]
    init, show, verify = (["ledger", word, *where] for word in ("init", "show", "verify"))
    modules = verb(*init, "--epsilon", 1, "--delta", 0, ";", *show, ";", *verify)
    assert "sqlalchemy" in modules
    heavy = {"dask", "distributed", "dp_accounting", "numba", "opendp", "pandas", "pyarrow", "rich"}
    assert not modules & {*heavy, "scipy", "sklearn"}


@pytest.mark.more
def test_a_verb_loads_what_it_runs(tmp_path):
    job = write_job(tmp_path, lake(tmp_path / "in", [40]), tmp_path / "out")
    assert not verb("validate", job, ";", "plan", job, ";", "status", tmp_path / "out") & (
        DRIVERS | {"dask.dataframe", "distributed", "rich"}
    )
    assert not verb("run", job) & (
        DRIVERS | {"dask.dataframe", "rich"}
    )  # a hold-out draws no central noise
    elsewhere = write_job(
        tmp_path,
        tmp_path / "in",
        tmp_path / "out",
        cluster={"kind": "address", "address": "127.0.0.1:1"},
    )
    assert "distributed" not in verb(
        "validate", elsewhere
    )  # also where the address leaves its scheme to Dask


class _StopError(Exception):
    """The first tasks are made."""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mechanism", "delta"),
    [
        ({"kind": "dip", "reference": HOLDOUT}, 0),
        ({"kind": "dip", "reference": {"kind": "tree"}}, 1e-6),
        ({"kind": "copula", "bins": 4}, 1e-6),
    ],
    ids=["dip", "tree", "copula"],
)
def test_a_worker_loads_no_library_of_the_driver(mechanism, delta, tmp_path, monkeypatch):
    schema = {"rating": MIXED_SCHEMA["rating"], "genre": MIXED_SCHEMA["genre"]}
    source = lake(tmp_path / "in", [40], schema=schema)
    job = load(
        write_job(
            tmp_path,
            source,
            tmp_path / "out",
            schema=schema,
            mechanism=mechanism,
            privacy__delta=delta,
        )
    )
    check_worker(lambda: run_job(job), tmp_path, monkeypatch)


def test_a_worker_of_a_frame_loads_no_library_of_the_driver(tmp_path, monkeypatch):
    dip = dpdask.DIP(
        dpdask.Schema.from_dict({"columns": ROW}),
        epsilon=1.0,
        reference=dpdask.Holdout(fraction=0.5),
    )
    check_worker(lambda: dip.fit(pd.DataFrame({"x": [0, 1] * 50})), tmp_path, monkeypatch)


def check_worker(fit, tmp_path, monkeypatch):
    """Check what a fresh Python loads to unpickle the first tasks."""

    def see(_, nodes):
        (tmp_path / "tasks").write_bytes(cloudpickle.dumps(nodes))
        raise _StopError

    spy_on_stages(see, monkeypatch)
    with pytest.raises(_StopError):
        fit()
    modules = loaded("import pickle\npickle.load(open(sys.argv[1], 'rb'))", tmp_path / "tasks")
    assert "dpdask.engine.work" in modules
    assert not modules & (DRIVERS | {"dask.dataframe", "distributed", "rich"})
    assert not of(modules, "dpdask.jobs") | of(modules, "dpdask.cli")


def test_every_public_name_has_the_module_that_a_checker_sees():
    statements = ast.parse((ROOT / "dpdask" / "__init__.py").read_text()).body
    block = next(each for each in statements if isinstance(each, ast.If))
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {"__version__", *seen} == set(dpdask.__all__)
    for name, module in seen.items():
        found = getattr(dpdask, name)
        assert found is (
            sys.modules[f"dpdask.{name}"]
            if module == "dpdask"
            else getattr(sys.modules[str(module)], name)
        )


def test_public_names_in_a_fresh_python():
    loaded(
        "import dpdask\nassert set(dpdask.__all__) <= set(dir(dpdask))\nassert dpdask.errors.SpecError is dpdask.SpecError"
    )
    loaded(
        "from dpdask import *\nassert DIP.__module__ == 'dpdask.estimators.families' and local.export and __version__"
    )
    loaded(
        "import dpdask.survey\nassert dpdask.survey.Survey is dpdask.Survey and dpdask.inference.ReleasedColumn"
    )


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'dpdask' has no attribute 'DPI'"):
        _ = dpdask.DPI
    with pytest.raises(ImportError, match="DPI"):
        exec("from dpdask import DPI")


def test_a_submodule_that_cannot_be_imported_says_why():
    loaded("""
import dpdask
sys.modules["pyarrow"] = None  # as if it were not installed
try:
    dpdask.schema
except ModuleNotFoundError as error:
    assert error.name == "pyarrow"
else:
    raise AssertionError
""")


def test_public_objects_are_pickled():
    schema = dpdask.Schema.from_dict(yaml.safe_load(yaml.safe_dump({"columns": ROW})))
    objects = [
        schema,
        schema.columns["x"],
        dpdask.Holdout(fraction=0.5),
        dpdask.UnitColumn(column="user", max_rows=2),
    ]
    assert pickle.loads(pickle.dumps(objects)) == objects
    classes = [value for name in dpdask.__all__ if isinstance(value := getattr(dpdask, name), type)]
    assert pickle.loads(pickle.dumps(classes)) == classes


def test_the_command_line_knows_the_census():
    [option] = [each for each in simulations.census.params if each.name == "n_attributes"]
    assert option.default == CENSUS_ATTRIBUTES
