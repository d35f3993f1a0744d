"""What the documents say is what the program does: examples run, jobs validate, tables agree with the code."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path
from typing import get_args

import click
import pytest
import yaml

import dpdask
from dpdask import cli, errors
from dpdask.jobs.spec import load_job
from dpdask.mechanisms.dip.fit import ChannelKind
from dpdask.references import Reference
from dpdask.schema import Schema
from pipelines.movielens import correlations

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
YAML_FILES = sorted((ROOT / "pipelines").rglob("*.yaml"))
BUILT = {".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__", "dist", "out"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def rows(heading: str) -> list[str]:
    """The first cells of the table whose head begins with `heading`."""
    table = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert table is not None
    return [line.split("|")[1].strip() for line in table[1].splitlines()]


def tracked() -> list[Path]:
    """The repository's files; where there is no git, all but what is built."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"], capture_output=True, check=False
    )
    if listed.returncode == 0 and listed.stdout:
        return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]
    parts = ((path, path.relative_to(ROOT).parts) for path in ROOT.rglob("*") if path.is_file())
    return [
        path for path, names in parts if not BUILT & set(names) and not any(name.startswith(".venv") or name.endswith(".egg-info") for name in names)
    ]


@pytest.mark.parametrize("text", blocks("python"))
def test_python_example_runs(text):
    names: dict[str, object] = {}
    exec(compile(text, "README.md", "exec"), names)
    assert len(names["private"]) == 100_000
    assert names["frequencies"].loc[5] == pytest.approx(0.4, abs=0.03)
    assert names["fives"].value == pytest.approx(0.4, abs=0.04)  # eight standard errors
    assert names["fives"].worst_bias == 0.0
    assert "Not protected: nobody" in names["promise"]


def test_there_is_a_python_example():
    assert len(blocks("python")) == 1


def with_options(text: str) -> str:
    """A job with its commented keys in force."""
    return re.sub(r"^( *)# (\w+: \{)", r"\1\2", text, flags=re.MULTILINE)


@pytest.mark.parametrize("change", [str, with_options], ids=["as it stands", "with its options"])
def test_job_and_schema_examples_validate(change, tmp_path):
    by_name = {text.split(".yaml")[0].removeprefix("# "): text for text in blocks("yaml")}
    (tmp_path / "job.yaml").write_text(change(by_name["job"]), encoding="utf-8")
    (tmp_path / "schema.yaml").write_text(by_name["schema"], encoding="utf-8")
    job = load_job(tmp_path / "job.yaml")
    assert job.schema.privatised == ("rating", "genre", "seconds", "spent")
    assert sum(job.spending.reference.values()) + sum(job.spending.row.values()) <= job.file.privacy.epsilon
    optional = (job.ledger, job.file.mechanism.weights, job.file.mechanism.cost)
    assert all((part is None) == (change is str) for part in optional)


def test_the_commented_ledger_of_the_users_job_is_a_ledger(tmp_path):
    folder = ROOT / "pipelines" / "movielens"
    text = with_options((folder / "job-users.yaml").read_text(encoding="utf-8"))
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "schema.yaml").write_bytes((folder / "schema.yaml").read_bytes())
    job = load_job(tmp_path / "job.yaml")
    assert job.ledger is not None
    assert job.ledger.url == f"sqlite:///{tmp_path / 'ledger.db'}"


def test_listed_references_and_channels_are_those_of_a_job():
    assert {cell.strip("`") for cell in rows("reference")} == {kind.model_fields["kind"].default for kind in get_args(Reference)}
    assert {cell.strip("`") for cell in rows("channel")} == set(get_args(ChannelKind))


def test_listed_correlations_are_computed():
    listed = re.findall(r"^\| `([a-z-]+)` \| (0\.\d+) \| (0\.\d+) \| (0\.\d+) \| (0\.\d+) \|$", README, re.MULTILINE)
    computed = {(row["channel"], row["epsilon"]): row["correlation"] for row in correlations.table()}
    assert {(channel, epsilon): float(cell) for channel, *cells in listed for epsilon, cell in enumerate(cells, start=1)} == {
        key: pytest.approx(value, abs=6e-4) for key, value in computed.items()
    }


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_yaml_of_the_pipelines_is_valid(path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "columns" in content:
        assert Schema.from_yaml(path).privatised
    else:
        assert load_job(path).file.name


def test_pipelines_have_jobs():
    assert any(path.name == "job.yaml" for path in YAML_FILES)


def verbs(group: click.Group) -> set[str]:
    named = dict(group.commands)
    inner = {f"{name} {verb}" for name, command in named.items() if isinstance(command, click.Group) for verb in verbs(command)}
    return inner | {name for name, command in named.items() if not isinstance(command, click.Group)}


def test_listed_verbs_are_the_program_s():
    listed = {re.sub(r"`dpdask ([a-z ]+?)( [A-Z]+)?`", r"\1", cell) for cell in rows("verb")}
    assert listed == verbs(cli.cli)


def test_named_options_exist():
    known = {"--help", "--version"}
    commands: list[click.Command] = [cli.cli]
    while commands:
        command = commands.pop()
        known |= {option for parameter in command.params for option in parameter.opts}
        commands += list(getattr(command, "commands", {}).values())
    prose = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"`[^`]*?(?<!-)(--[a-z][a-z-]+)", prose)) <= known


def test_exit_codes_are_those_of_the_errors():
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.DpdaskError)]
    assert sorted(map(int, rows("exit code"))) == sorted({0, 130} | {kind.exit_code for kind in kinds})


@pytest.mark.parametrize("name", [name for name in dpdask.__all__ if not name.startswith("__")])
def test_public_names_are_documented(name):
    public = getattr(dpdask, name)
    assert (inspect.getdoc(public) or "").strip()
    members = [getattr(public, member) for member in vars(public) if not member.startswith("_")]
    undocumented = [member.__name__ for member in members if (inspect.isfunction(member) or inspect.ismethod(member)) and not inspect.getdoc(member)]
    assert undocumented == []


PIPELINES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "pipelines").glob("**/README.md"))


@pytest.mark.parametrize("document", ["README.md", "CHANGELOG.md", "SECURITY.md", "cluster/README.md", *PIPELINES])
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?://)([^)#]+)\)", text)
    assert [target for target in targets if not ((ROOT / document).parent / target).exists()] == []


def test_commands_are_single_lines():
    commands = [block for block in blocks("bash") if block.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert all(block.count("\n") == 1 and "constraints.txt" in block for block in commands)


def test_patent_sentence_stands_in_readme_and_notice():
    for name in ("README.md", "NOTICE"):
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert "patent 12,248,613 B2 (Regents of the University of Minnesota, granted 2025-03-11): check whether" in text


def test_licence_is_whole():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


# written apart, so that this file may be searched too; a home of `somebody` is an example
PLACES = re.compile(r"(?<![\w.~*$}\])/-])(?:file://)?/(?:" + "work|root|tmp|home|opt|mnt|Users" + r")/(?!somebody\b)[\w.-]+")
HOSTS = re.compile(
    "|".join(
        [r"pypi\.(?:org|python)", r"files\.python" + "hosted", "pypi" + r"\.nvidia", "artifact" + "ory", "index-" + r"url[ =]", r"find-" + r"links"]
    )
)


@pytest.mark.parametrize("pattern", [PLACES, HOSTS], ids=["places", "hosts"])
def test_no_file_names_a_machine(pattern):
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in pattern.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    "text", ["see /wo" + "rk/main/x", '"/tm' + 'p/out"', "path: /ro" + "ot/.cache", "file:///ho" + "me/me/x", "(/op" + "t/venv)"]
)
def test_places_are_recognised(text):
    assert PLACES.search(text)


@pytest.mark.parametrize("text", ["engine/work/x", "https://example.org/work/x", "dask/ho" + "me/x", "{base}/tmp/x"])
def test_other_paths_are_not_places(text):
    assert not PLACES.search(text)


@pytest.mark.parametrize("text", ["https://py" + "pi.org/simple", "--index-" + "url=https://x"])
def test_hosts_are_recognised(text):
    assert HOSTS.search(text)
