"""What the documents say is what the program does: examples run, jobs validate, tables agree with the code."""

import ast
import doctest
import importlib
import inspect
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import click
import pytest
import yaml

import dpdask
from dpdask import cli, errors
from dpdask.conditions import Rule
from dpdask.jobs.spec import load_job
from dpdask.mechanisms.dip.spec import ChannelKind
from dpdask.references import Reference
from dpdask.rules import check_levels
from dpdask.schema import Schema
from pipelines.movielens import correlations

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
YAML_FILES = sorted((ROOT / "pipelines").rglob("*.yaml"))
BUILT = {
    ".git",
    ".hypothesis",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "__pycache__",
    "dist",
    "out",
}


def page(name):
    """The text of a page of docs/."""
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


DESIGN, JOB = page("explanation/design"), page("reference/job")
STABLE = page("reference/stability")


def blocks(language, text):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def rows(heading, text):
    """The first cells of the table whose head begins with `heading`."""
    table = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None
    return [line.split("|")[1].strip() for line in table[1].splitlines()]


def tracked():
    """The repository's files; where there is no git, all but what is built."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        return [
            path
            for name in listed.stdout.decode().split("\0")
            if name and (path := ROOT / name).is_file()
        ]
    parts = ((path, path.relative_to(ROOT).parts) for path in ROOT.rglob("*") if path.is_file())
    return [
        path
        for path, names in parts
        if not BUILT & set(names)
        and not any(name.startswith(".venv") or name.endswith(".egg-info") for name in names)
    ]


def texts():
    """The repository's files that are text, by their paths."""
    found = {}
    for path in tracked():
        try:
            found[path] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return found


def test_the_python_example_keeps_its_promises():
    [text] = blocks("python", page("how-to/use-python"))
    names = {}
    exec(compile(text, "use-python.md", "exec"), names)
    assert len(names["private"]) == 100_000
    assert names["frequencies"].loc[5] == pytest.approx(0.4, abs=0.03)
    assert names["fives"].value == pytest.approx(0.4, abs=0.04)  # eight standard errors
    assert names["fives"].worst_bias == 0.0
    assert "Not protected: none; " in names["promise"]


WITH_EXAMPLES = sorted(
    path for path in (ROOT / "dpdask").rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_of_docstrings_run(path):
    found = doctest.testmod(
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    )
    assert found.attempted
    assert not found.failed


def with_options(text):
    """A job with its commented keys in force."""
    return re.sub(r"^( *)# (\w+: \{)", r"\1\2", text, flags=re.MULTILINE)


@pytest.mark.parametrize("change", [str, with_options], ids=["as it stands", "with its options"])
def test_job_and_schema_examples_validate(change, tmp_path):
    by_name = {
        text.split(".yaml")[0].removeprefix("# "): text
        for text in blocks("yaml", JOB) + blocks("yaml", page("reference/schema"))
    }
    (tmp_path / "job.yaml").write_text(change(by_name["job"]), encoding="utf-8")
    (tmp_path / "schema.yaml").write_text(by_name["schema"], encoding="utf-8")
    job = load_job(tmp_path / "job.yaml")
    assert job.schema.privatised == ("rating", "genre", "seconds", "spent")
    spending = job.mechanism.spending
    assert sum(spending.reference.values()) + sum(spending.row.values()) <= job.file.privacy.epsilon
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
    assert {cell.strip("`") for cell in rows("reference", page("explanation/references"))} == {
        kind.model_fields["kind"].default for kind in get_args(Reference)
    }
    assert {cell.strip("`") for cell in rows("kind", page("explanation/channels"))} == set(
        get_args(ChannelKind)
    )


def test_listed_correlations_are_computed():
    listed = re.findall(
        r"^\| `([a-z-]+)` \| (0\.\d+) \| (0\.\d+) \| (0\.\d+) \| (0\.\d+) \|$",
        page("explanation/channels"),
        re.MULTILINE,
    )
    computed = {
        (row["channel"], row["epsilon"]): row["correlation"] for row in correlations.table()
    }
    assert {
        (channel, epsilon): float(cell)
        for channel, *cells in listed
        for epsilon, cell in enumerate(cells, start=1)
    } == {key: pytest.approx(value, abs=6e-4) for key, value in computed.items()}


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_yaml_of_the_pipelines_is_valid(path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "columns" in content:
        assert Schema.from_yaml(path).privatised
    elif path.name == "rules.yaml":
        schema = Schema.from_yaml(path.with_name("schema.yaml"))
        for name in content.keys() - {"bins"}:
            rules = tuple(map(Rule.model_validate, content[name]))
            assert len(rules) == 10
            check_levels(schema.model_copy(update={"rules": rules}))
    else:
        assert load_job(path).file.name


def test_pipelines_have_jobs():
    assert any(path.name == "job.yaml" for path in YAML_FILES)


def verbs(group):
    named = dict(group.commands)
    inner = {
        f"{name} {verb}"
        for name, command in named.items()
        if isinstance(command, click.Group)
        for verb in verbs(command)
    }
    return inner | {name for name, command in named.items() if not isinstance(command, click.Group)}


def test_listed_verbs_are_the_program_s():
    listed = {
        re.sub(r"`dpdask ([a-z ]+?)( [A-Z]+)?`", r"\1", cell)
        for cell in rows("verb", page("reference/command-line"))
    }
    assert listed == verbs(cli.cli)


@pytest.mark.parametrize(
    "text", [README, page("reference/command-line"), JOB], ids=["README", "command line", "job"]
)
def test_named_options_exist(text):
    known = {"--help", "--version"}
    commands = [cli.cli]
    while commands:
        command = commands.pop()
        known |= {option for parameter in command.params for option in parameter.opts}
        commands += list(getattr(command, "commands", {}).values())
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"`[^`]*?(?<!-)(--[a-z][a-z-]+)", prose)) <= known


def test_listed_streams_are_drawn_from():
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "dpdask").rglob("*.py"))
    listed = [
        name for cell in rows("mechanism id", DESIGN) for name in re.findall(r"`([^`]+)`", cell)
    ]
    assert len(listed) > 10
    assert [
        name
        for name in listed
        if not re.search(f'"{re.sub("/?(COLUMN|ID).*", "", name)}["/]', source)
    ] == []


def test_exit_codes_are_those_of_the_errors_and_are_stable():
    kinds = [
        kind
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.DpdaskError)
    ]
    found = sorted({0, 130, 143} | {kind.exit_code for kind in kinds})
    assert sorted(map(int, rows("exit code", page("reference/exit-codes")))) == found
    [stable] = re.findall(r"^\| \[exit codes\].*: ([\d, ]+) \|$", STABLE, re.MULTILINE)
    assert stable == ", ".join(map(str, found))


def test_the_newest_version_is_named_everywhere():
    version = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    supported = rows("version", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert re.findall(r"^## \[(\d\S*)\]", changes, re.MULTILINE)[0] == supported[0] == version
    assert page(f"releases/{version}").startswith(f"# dpdask {version}\n")
    assert dpdask.__version__ == version or ".dev" in dpdask.__version__  # of what comes next


def test_stable_names_are_the_public_ones():
    [section] = re.findall(r"^## Python names\n(.*?)^## ", STABLE, re.DOTALL | re.MULTILINE)
    assert re.findall(r"`(\w+)`", section) == dpdask.__all__


@pytest.mark.parametrize("name", [name for name in dpdask.__all__ if not name.startswith("__")])
def test_public_names_are_documented(name):
    public = getattr(dpdask, name)
    assert (inspect.getdoc(public) or "").strip()
    members = [getattr(public, member) for member in vars(public) if not member.startswith("_")]
    undocumented = [
        member.__name__
        for member in members
        if (inspect.isfunction(member) or inspect.ismethod(member)) and not inspect.getdoc(member)
    ]
    assert undocumented == []


@pytest.mark.parametrize(
    "name", [name for name in dpdask.__all__ if callable(getattr(dpdask, name))]
)
def test_public_classes_and_functions_have_examples(name):
    public = getattr(dpdask, name)
    public = (
        errors.DpdaskError
        if inspect.isclass(public) and issubclass(public, errors.DpdaskError)
        else public
    )  # its example shows all errors
    assert "Examples\n--------\n>>> " in inspect.cleandoc(public.__doc__ or "")


DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in tracked() if path.suffix == ".md")
EXPLANATIONS = [name for name in DOCUMENTS if name.startswith("docs/")]


def headings(text):
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^#+ (.+?) *$", prose, re.MULTILINE)


def anchor(heading):
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(text, folder):
    found = []
    for target, part in re.findall(r"\]\((?!\w+://)([^)#\s]*)(?:#([^)\s]*))?\)", text):
        path = folder / target if target else None
        if path is not None and not path.exists():
            found.append(target)
        elif part and part not in map(
            anchor, headings(text if path is None else path.read_text(encoding="utf-8"))
        ):
            found.append(f"{target}#{part}")
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    path = ROOT / document
    assert broken_links(path.read_text(encoding="utf-8"), path.parent) == []


def test_broken_links_are_found():
    text = "# Here\n[a](#here) [b](docs/reference/limits.md#sizes) [c](gone.md) [d](#there) [e](README.md#nowhere)\n```\n# there\n```"
    assert broken_links(text, ROOT) == ["gone.md", "#there", "README.md#nowhere"]


def test_scripts_import_what_is_there():
    """Modules move, and most scripts are not run by the tests."""
    for folder in ("pipelines", "docs", "cluster"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                named = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                if named == "dpdask" or named.startswith("dpdask."):
                    module = importlib.import_module(named)
                    for alias in node.names:
                        found = hasattr(module, alias.name)
                        assert found or find_spec(f"{named}.{alias.name}"), (
                            path,
                            named,
                            alias.name,
                        )


def test_the_index_lists_every_page_once():
    listed = re.findall(
        r"^- \[[^]]+\]\(((?:tutorials|how-to|reference|explanation|releases)/[^)#]+|gallery\.md|roadmap\.md)\)",
        page("README"),
        re.MULTILINE,
    )
    there = [name.removeprefix("docs/") for name in EXPLANATIONS if name != "docs/README.md"]
    assert sorted(listed) == sorted(
        set(there) - {"index.md", "explanation/design.md", "explanation/math.md"}
    )  # of the maintainers, on a line of their own
    assert "(explanation/design.md)" in page("README")
    assert "(explanation/math.md)" in page("README")
    assert "(docs/README.md)" in README


def test_titles_are_unique():
    titles = [
        headings((ROOT / document).read_text(encoding="utf-8"))[0] for document in EXPLANATIONS
    ]
    assert sorted(titles) == sorted(set(titles))


# blocks that run one after the other: in tests/analysis/test_open.py, tests/e2e/test_person_jobs.py and test_site.py, and those of tutorials in test_examples.py
RUN_TOGETHER = {"docs/how-to/analyse-a-release.md", "docs/how-to/release-persons.md"}
RUN_TOGETHER |= {"docs/index.md", "docs/reference/cheat-sheet.md"}
RUN_ALONE = [
    name
    for name in EXPLANATIONS
    if not name.startswith("docs/tutorials/") and name not in RUN_TOGETHER
]
EXAMPLES = [
    (document, text)
    for document in RUN_ALONE
    for text in blocks("python", (ROOT / document).read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(
    ("document", "text"),
    EXAMPLES,
    ids=[f"{document} {number}" for number, (document, _) in enumerate(EXAMPLES)],
)
def test_examples_of_the_explanations_run(document, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(text, document, "exec"), {"__name__": "example"})


def wrong_references(text):
    """The documents, and the headings after a comma (`docs/explanation/math.md, Channels`), that a text names and that do not exist."""
    found = []
    for name, rest in re.findall(r"\b(docs/[\w/.-]*\w)([^\n]*(?:\n[^\n]*)?)", text):
        heading = (
            re.sub(r"\s*\n[\s#]*", " ", rest).removeprefix(", ")
            if re.match(r",\s+(?:#\s+)?[A-Z]", rest)
            else None
        )
        if not (ROOT / name).exists():
            found.append(name)
        elif heading is not None and not any(
            re.match(rf"{re.escape(known)}(?!\w)", heading)
            for known in headings((ROOT / name).read_text("utf-8"))
        ):
            found.append(f"{name}, {heading}")
    return found


def test_named_documents_and_headings_exist():
    this = Path(__file__)
    assert {
        path: found
        for path, text in texts().items()
        if path != this and (found := wrong_references(text))
    } == {}


@pytest.mark.parametrize(
    "text",
    [
        "see docs/gone.md",
        "docs/explanation/math.md, Nowhere",
        "docs/explanation/math.md, Chains",
        "# docs/explanation/math.md,\n# Nowhere",
    ],
)
def test_wrong_references_are_found(text):
    assert wrong_references(text)


# a note that is not in the repository: a name in capitals as a Markdown file, or as a word with a place in it
NOTE = re.compile(
    r"\b(?:([A-Z]{3,}\.md)|(?:MATH|DESIGN|LAKE|STYLE|REDESIGN)(?:'s |,? section |,? §| \d))"
)


def test_no_file_names_a_note_that_is_not_here():
    names, this = {path.name for path in tracked()}, Path(__file__)
    found = [
        (path, match[0])
        for path, text in texts().items()
        if path != this
        for match in NOTE.finditer(text)
        if match[1] not in names
    ]
    assert found == []


@pytest.mark.parametrize(
    "text", ["see MATH section 3", "of DESIGN's table", "LAKE.md", "(MATH, §2)", "STYLE 2"]
)
def test_notes_are_recognised(text):
    assert NOTE.search(text)


def test_commands_are_single_lines():
    commands = [block for block in blocks("bash", README) if block.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert all(block.count("\n") == 1 and "constraints.txt" in block for block in commands)


def test_patent_sentence_stands_in_readme_and_notice():
    for name in ("README.md", "NOTICE"):
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert (
            "patent 12,248,613 B2 (Regents of the University of Minnesota, granted 2025-03-11): check whether"
            in text
        )


def test_licence_is_whole():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


# written apart, so that this file may be searched too; a home of `somebody` is an example
PLACES = re.compile(
    r"(?<![\w.~*$}\])/-])(?:file://)?/(?:"
    "work|root|tmp|home|opt|mnt|Users"
    r")/(?!somebody\b)[\w.-]+"
)
HOSTS = re.compile(
    "|".join(
        [
            r"pypi\.(?:org|python)",
            r"files\.python" + "hosted",
            "pypi" + r"\.nvidia",
            "artifact" + "ory",
            "index-" + r"url[ =]",
            r"find-" + r"links",
        ]
    )
)


@pytest.mark.parametrize("pattern", [PLACES, HOSTS], ids=["places", "hosts"])
def test_no_file_names_a_machine(pattern):
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path, text in texts().items()
        for match in pattern.finditer(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "see /wo" + "rk/main/x",
        '"/tm' + 'p/out"',
        "path: /ro" + "ot/.cache",
        "file:///ho" + "me/me/x",
        "(/op" + "t/venv)",
    ],
)
def test_places_are_recognised(text):
    assert PLACES.search(text)


@pytest.mark.parametrize(
    "text", ["engine/work/x", "https://example.org/work/x", "dask/ho" + "me/x", "{base}/tmp/x"]
)
def test_other_paths_are_not_places(text):
    assert not PLACES.search(text)


@pytest.mark.parametrize("text", ["https://py" + "pi.org/simple", "--index-" + "url=https://x"])
def test_hosts_are_recognised(text):
    assert HOSTS.search(text)
