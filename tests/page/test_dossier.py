"""`dpdask dossier`: what it writes fits what is asked, its verifier computes each card's ε to the last digit, and one changed byte is refused."""

import ast
import contextlib
import copy
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import yaml
from e2e.growing import add_day
from e2e.growing import job as growing_job
from e2e.helpers import call_cli, error_line, make_ledger, read_card, run_here, write_job
from e2e.recorded import JOBS, SCHEMA, write_lakes, write_recorded
from e2e.test_person_jobs import PRIVACY
from e2e.test_person_jobs import write as write_persons
from jsonschema import Draft7Validator, FormatChecker
from page.pages import ABOUT, EVIL, release
from test_architecture import PACKAGE

from dpdask import verifier
from dpdask.channels import keep_most
from dpdask.jobs.discovery import load_discovery
from dpdask.jobs.run import run_job
from dpdask.mechanisms.card import Card
from dpdask.mechanisms.dip.columns import WindowMechanism
from dpdask.page import render

# A transcription of what schemas/deployments-schema.yaml of github.com/opendp/deployments-registry-data (MIT licence, commit
# 3e9c812a, 2026-07-15) asks of an entry: each field with its choices, or its form (of JSON Schema) if it is no text. The two
# fields of the form {} may hold anything.
NUMBER, NAMES = {"type": "number"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}
PARAMETERS = {"epsilon": NUMBER, "delta": {"type": ["number", "string"]}, "rho": NUMBER}
ENTRY = {
    "basic": {
        **dict.fromkeys(("name", "intended_use", "data_product_region", "description")),
        "data_curators": NAMES,
        "publication_date": {"type": "string", "format": "date"},
        "data_product_type": "Summary statistics|Machine learning model|Dataset|Synthetic data"
        "|Interactive API|SQL queries",
        "data_product_sector": "Technology|Healthcare|Education|Government|Energy|Finance",
    },
    "dp_variant": {
        "variant_name": "Pure DP|Approximate DP|Zero-concentrated DP|Renyi DP|Custom",
        **dict.fromkeys(("data_domain", "unprotected_quantities")),
    },
    "privacy_loss": {
        **dict.fromkeys(("privacy_unit", "privacy_unit_details")),
        "privacy_parameters": {
            "type": "object",
            "additionalProperties": False,
            "properties": PARAMETERS,
        },
        "privacy_parameters_details": {},
    },
    "deployment_model": {
        "model_name": "Local|Central|Shuffle|Federated|Varies",
        "release_type": "One release|Many releases",
        "data_source_type": "Static|Dynamic",
        "access_type": "Interactive|Non-interactive",
        "data_source_type_details": {},
        **dict.fromkeys(("model_name_details", "actors")),
        **dict.fromkeys(("release_type_details", "access_type_details")),
    },
    "accounting": dict.fromkeys(("post_processing", "composition")),
    "implementation": dict.fromkeys(
        ("preprocessing_and_hyperparameter_tuning", "mechanisms", "justification")
    ),
    "administrative": {**dict.fromkeys(("sources", "notes")), "registry_authors": NAMES},
}
STATES = "Converted|Draft|Pending|Changes Required|Approved|Approved (Update Requested)|Approved (Pending)"
REQUIRED = {
    "basic": [each for each in ENTRY["basic"] if each != "data_product_sector"],
    "administrative": ["registry_authors"],
}


def make_schema(fields, required):
    """The JSON Schema of an object with these fields and no others."""
    text = {"type": "string"}
    forms = {
        name: text | {"enum": form.split("|")} if isinstance(form, str) else form
        for name, form in ((name, text if form is None else form) for name, form in fields.items())
    }
    more = {"required": required} if required else {}
    return {"type": "object", "additionalProperties": False, "properties": forms} | more


def make_entry_schema():
    groups = {name: make_schema(fields, REQUIRED.get(name)) for name, fields in ENTRY.items()}
    outer = {
        "url_slug": None,
        "status": STATES,
        "tier": {"type": "integer", "enum": [1, 2, 3]},
        "deployment": make_schema(groups, ["basic"]),
    }
    return make_schema(outer, list(outer))


FILES = {
    *("README.md", "croissant.json", "iso-iec-27559.md", "nist-sp-800-226.md"),
    *("registry_entry.yaml", "statement.json", "verify.py"),
}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A release with hostile names that is charged to a ledger, and its dossier."""
    folder = tmp_path_factory.mktemp("officer")
    place = make_ledger(folder, "people", 10.0, 0.0)
    out = release(folder, ledger=place)
    found = call_cli("dossier", out, "--to", folder / "dossier")
    assert found.returncode == 0, found.stderr
    assert {path.name for path in (folder / "dossier").iterdir()} == FILES
    return folder


def verify(folder, dossier):
    """Return the exit code of the verifier, and what it says."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = verifier.main([str(folder), str(dossier / "statement.json")])
    return code, said.getvalue()


# ---- what is written


def list_faults(text):
    """What the registry finds wrong with an entry: by its schema, and by its checks of names and of quotes."""
    validator = Draft7Validator(make_entry_schema(), format_checker=FormatChecker(["date"]))
    faults = [each.message for each in validator.iter_errors(yaml.safe_load(text))]
    basic = yaml.safe_load(text)["deployment"]["basic"]
    curators = "-".join(basic.get("data_curators", []))
    parts = basic["name"], curators, basic.get("publication_date", "")[:4]
    slug = "_".join(re.sub(r"\W+", "_", each.lower()) for each in parts if each).replace("_", "-")
    faults += [] if text.startswith(f"url_slug: {slug}\n") else [f"not the name {slug}"]
    styles = {getattr(token, "style", None) for token in yaml.scan(text)}
    return faults + sorted(map(str, styles - {None, "|", '"', "'"}))


def test_the_entry_has_what_the_card_knows_and_lists_the_rest(released):
    text = (released / "dossier/registry_entry.yaml").read_text(encoding="utf-8")
    assert list_faults(text) == [
        f"{name!r} is a required property" for name in ("data_product_region", "registry_authors")
    ]
    entry = yaml.safe_load(text)
    assert (entry["status"], entry["tier"]) == ("Draft", 2)
    card, deployment = read_card(released), entry["deployment"]
    assert deployment["basic"]["data_curators"] == [ABOUT["issuer"]]
    promised = {"epsilon": card["guarantee"]["epsilon"], "delta": card["guarantee"]["delta"]}
    assert deployment["privacy_loss"]["privacy_parameters"] == promised
    assert EVIL in deployment["dp_variant"]["data_domain"]
    assert "copied: group" in deployment["dp_variant"]["unprotected_quantities"]
    assert "0 earlier releases" in deployment["deployment_model"]["release_type_details"]
    left = re.findall(r"^# open: deployment\.(\S+): \S", text, re.MULTILINE)
    held = [f"{group}.{name}" for group, fields in deployment.items() for name in fields]
    assert len(set(left) | set(held)) == len(left) + len(held) == 32  # as many as the registry has
    assert len(held) == 24
    done = text.replace("  basic:\n", "  basic:\n    data_product_region: Nowhere\n", 1)
    done = done.replace("  administrative:\n", "  administrative:\n    registry_authors: [Me]\n", 1)
    assert list_faults(done) == []  # a person answered them


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("status: Draft", "status: Done", "'Done' is not one of"),
        ("  basic:\n", "  basic:\n    colour: red\n", "'colour' was unexpected"),
        ("url_slug: ", "url_slug: x", "not the name"),
        ("publication_date: '", "publication_date: '1", "is not a 'date'"),
        ("  dp_variant:\n", "  dp_variant:\n    variant_name: Pure\n", "'Pure' is not one of"),
    ],
)
def test_a_wrong_entry_is_found(released, before, after, fault):
    text = (released / "dossier/registry_entry.yaml").read_text(encoding="utf-8")
    assert before in text
    text = re.sub(r"^    variant_name: .*\n", "", text, flags=re.MULTILINE)
    assert any(fault in each for each in list_faults(text.replace(before, after, 1)))


@pytest.mark.parametrize("name", ["nist-sp-800-226.md", "iso-iec-27559.md"])
def test_each_point_is_answered_by_the_card_by_a_person_or_is_open(released, name):
    text = (released / "dossier" / name).read_text(encoding="utf-8")
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line[:1] == "|"][2:]
    assert len(rows) > 20
    assert {len(row) for row in rows} == {3}
    assert {row[1].strip() for row in rows} == {"card", "a person", "open"} - (
        {"open"} if name.startswith("nist") else set()
    )
    assert all(row[2].strip() for row in rows)
    assert "<" not in text
    assert "{" not in text.replace("{person", "")
    listed = (released / "dossier/README.md").read_text(encoding="utf-8")
    left = [row for row in rows if row[1].strip() != "card"]
    assert sum(f"`{name}`" in line for line in listed.splitlines() if line[:1] == "-") == len(left)


def test_the_metadata_are_croissant_with_provenance_and_terms(released, tmp_path):
    content = json.loads((released / "dossier/croissant.json").read_bytes())
    assert content["conformsTo"] == "http://mlcommons.org/croissant/1.1"
    assert {"@type", "name", "description", "license", "creator", "datePublished"} <= set(content)
    assert content["@context"]["prov"] == "http://www.w3.org/ns/prov#"
    assert content["prov:wasDerivedFrom"]["prov:label"] == "a private table of the dataset people"
    assert content["prov:wasAttributedTo"]["prov:label"] == ABOUT["issuer"]
    assert content["usageInfo"]["text"].startswith("Licence: CC-BY-4.0 Purpose: Tests.")
    assert "Not good for" in content["usageInfo"]["text"]
    for each in content["distribution"]:
        if "sha256" in each:
            data = (released / "out" / each["contentUrl"]).read_bytes()
            assert each["sha256"] == hashlib.sha256(data).hexdigest()


@pytest.mark.filterwarnings("ignore")  # of a library of its own
def test_the_metadata_are_valid_and_read_the_release(released, tmp_path):
    import mlcroissant  # it warns of itself

    shutil.copytree(released / "out", tmp_path / "out")
    shutil.copy(released / "dossier/croissant.json", tmp_path / "out")
    found = mlcroissant.Dataset(jsonld=tmp_path / "out/croissant.json")
    assert str(found.metadata.ctx.conforms_to.value) == "http://mlcommons.org/croissant/1.1"
    assert not found.metadata.ctx.issues.errors
    assert sum(1 for _ in found.records("rows")) == 600


def test_the_statement_is_in_toto_and_its_subjects_are_the_files_beside_the_shards(released):
    statement = json.loads((released / "dossier/statement.json").read_bytes())
    assert set(statement) == {"_type", "subject", "predicateType", "predicate"}
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert re.match(r"[a-z]+:", statement["predicateType"])
    names = {
        path.relative_to(released / "out").as_posix() for path in (released / "out").rglob("*")
    }
    beside = {name for name in names if "/" in name or name == "_SUCCESS"}
    assert {each["name"] for each in statement["subject"]} == beside
    for each in statement["subject"]:
        data = (released / "out" / each["name"]).read_bytes()
        assert each["digest"] == {"sha256": hashlib.sha256(data).hexdigest()}


KEYS = {
    "ssh-keygen": "ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519"
    " && echo officer@example.org $(cat ~/.ssh/id_ed25519.pub) > signers",
    "minisign": "minisign -GW -p minisign.pub > /dev/null",
}


@pytest.mark.parametrize("program", KEYS)
def test_the_statement_is_signed_and_checked_as_the_page_says(program, released, tmp_path):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not here")
    page = (PACKAGE.parent / "docs/how-to/sign-off.md").read_text(encoding="utf-8")
    sign, check = (
        line for line in page.splitlines() if line.startswith(f"{program} ") and "statement" in line
    )
    statement = tmp_path / "ratings-dossier/statement.json"
    statement.parent.mkdir()
    for folder in (".ssh", ".minisign"):
        (tmp_path / folder).mkdir(mode=0o700)
    shutil.copy(released / "dossier/statement.json", statement)
    here = partial(
        subprocess.run, shell=True, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)}
    )
    for words in (KEYS[program], sign, check):
        assert here(words, capture_output=True, timeout=60).returncode == 0, words
    statement.write_bytes(statement.read_bytes().replace(b'"epsilon": ', b'"epsilon": 0', 1))
    assert here(check, capture_output=True, timeout=60).returncode != 0


def test_two_dossiers_of_one_release_are_alike_and_nothing_is_replaced(released, tmp_path):
    call_cli("dossier", released / "out", "--to", tmp_path / "again")
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (
            released / "dossier" / name
        ).read_bytes()
    again = call_cli("dossier", released / "out", "--to", tmp_path / "again")
    assert (again.returncode, "--to" in error_line(again)) == (73, True)
    inside = call_cli("dossier", released / "out", "--to", released / "out/dossier")
    assert (inside.returncode, "cannot be inside" in error_line(inside)) == (73, True)
    assert not (released / "out/dossier").exists()


def test_what_is_no_release_or_protects_nobody_has_no_dossier(released, tmp_path):
    nothing = call_cli("dossier", tmp_path / "none", "--to", tmp_path / "dossier")
    assert (nothing.returncode, "no finished release" in error_line(nothing)) == (66, True)
    shutil.copytree(released / "out", tmp_path / "out")
    (tmp_path / "out/_dpdask/release.json").write_text("{}")
    changed = call_cli("dossier", tmp_path / "out", "--to", tmp_path / "dossier")
    assert (changed.returncode, "not the card" in error_line(changed)) == (66, True)
    (tmp_path / "out/_dpdask/manifest.json").write_text("[")
    broken = call_cli("dossier", tmp_path / "out", "--to", tmp_path / "dossier")
    assert (broken.returncode, "broken" in error_line(broken)) == (66, True)
    seeded = call_cli("dossier", release(tmp_path / "seeded"), "--to", tmp_path / "dossier")
    assert (seeded.returncode, "protects nobody" in error_line(seeded)) == (64, True)
    assert not (tmp_path / "dossier").exists()


def test_of_several_releases_one_is_named_and_all_are_stated(tmp_path):
    for day in range(2):
        add_day(tmp_path / "in", day)
        run_here(growing_job(tmp_path, tmp_path / "in", insecure_seed=None))
    several = call_cli("dossier", tmp_path / "out", "--to", tmp_path / "dossier")
    assert (several.returncode, "release-00001.json" in error_line(several)) == (64, True)
    made = call_cli(
        *("dossier", tmp_path / "out", "--to", tmp_path / "dossier"),
        *("--card", "release-00001.json"),
    )
    assert made.returncode == 0, made.stderr
    text = (tmp_path / "dossier/registry_entry.yaml").read_text(encoding="utf-8")
    entry = yaml.safe_load(text)
    assert {each.partition(" is ")[2] for each in list_faults(text)} == {"a required property"}
    assert entry["deployment"]["deployment_model"]["release_type"] == "Many releases"
    assert entry["deployment"]["deployment_model"]["data_source_type"] == "Dynamic"
    code, said = verify(tmp_path / "out", tmp_path / "dossier")
    assert code == 0, said
    assert said.count("to the last digit") == 2
    assert "not protected: " in said
    add_day(tmp_path / "in", 2)
    run_here(growing_job(tmp_path, tmp_path / "in", insecure_seed=None))
    assert verify(tmp_path / "out", tmp_path / "dossier")[0] == 1  # the statement is of two days


def test_a_column_whose_name_has_spaces_has_an_identifier(released):
    card = Card.read((released / "out/_dpdask/release.json").read_bytes(), "card")
    found = render._describe_field(card, "rows", pa.field("hours a\tweek", pa.int64()), {}, {})
    assert not re.search(r"\s", found["@id"])
    assert found["source"]["extract"]["column"] == found["name"] == "hours a\tweek"


# ---- the verifier


def test_the_verifier_stands_alone(released):
    source = (PACKAGE / "verifier.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 300
    named = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named.add(node.module.split(".")[0])
    assert named - set(sys.stdlib_module_names) == {"numpy", "dp_accounting"}
    assert (released / "dossier/verify.py").read_text(encoding="utf-8") == source
    ran = subprocess.run(
        [sys.executable, "-I", released / "dossier/verify.py", released / "out"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "VERIFIED"), ran.stdout + ran.stderr
    assert "to the last digit" in ran.stdout
    assert "Not checked" in ran.stdout
    assert verifier.main([]) == 2


def test_every_changed_byte_is_refused(released, tmp_path):
    shutil.copytree(released / "out", tmp_path / "out")
    shutil.copytree(released / "dossier", tmp_path / "dossier")
    assert verify(tmp_path / "out", tmp_path / "dossier")[0] == 0
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) >= 7
    for path in [*files, tmp_path / "dossier/statement.json"]:
        data = path.read_bytes()
        step = max(1, len(data) // (100 if path.suffix == ".json" else 10))
        for place in {*range(0, len(data), step), len(data) - 1} if data else ():
            path.write_bytes(
                data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
            )
            code, said = verify(tmp_path / "out", tmp_path / "dossier")
            assert (code, said[:7]) == (1, "REFUSED"), (path, place)
        for other in (data + b"\0", data[:-1] if data else b"x"):
            path.write_bytes(other)
            assert verify(tmp_path / "out", tmp_path / "dossier")[0] == 1
        path.unlink()
        assert verify(tmp_path / "out", tmp_path / "dossier")[0] == 1
        path.write_bytes(data)
    for name in ("part-00009.parquet", "day=1/part-00000.parquet", "_dpdask/other.json"):
        added = tmp_path / "out" / name
        added.parent.mkdir(exist_ok=True)
        added.write_bytes(b"x")
        assert verify(tmp_path / "out", tmp_path / "dossier")[0] == 1
        added.unlink()
    linked = tmp_path / "out/more\nVERIFIED"  # whoever reads the folder may follow it
    linked.symlink_to(tmp_path / "dossier")
    code, said = verify(tmp_path / "out", tmp_path / "dossier")
    assert (code, said.count("\n")) == (1, 1)
    linked.unlink()
    assert verify(tmp_path / "out", tmp_path / "dossier")[0] == 0


def test_a_card_that_is_changed_with_all_its_digests_is_refused_by_its_epsilon(released, tmp_path):
    out, dossier = tmp_path / "out", tmp_path / "dossier"
    shutil.copytree(released / "out", out)
    shutil.copytree(released / "dossier", dossier)
    for key in ("epsilon", "accounting"):
        card = read_card(released)
        if key == "epsilon":
            card["guarantee"]["epsilon"] = 1.0
        else:
            card["accounting"]["epsilon_exact"] *= 0.99
        data = json.dumps(card).encode()
        (out / "_dpdask/release.json").write_bytes(data)
        manifest = json.loads((released / "out/_dpdask/manifest.json").read_bytes())
        manifest["card_sha256"] = hashlib.sha256(data).hexdigest()
        (out / "_dpdask/manifest.json").write_text(json.dumps(manifest))
        files = {f"_dpdask/{path.name}": path.read_bytes() for path in (out / "_dpdask").iterdir()}
        (dossier / "statement.json").write_bytes(
            verifier.make_statement(files | {"_SUCCESS": (out / "_SUCCESS").read_bytes()})
        )
        code, said = verify(out, dossier)
        assert code == 1
        assert "ε =" in said.splitlines()[-1]


# ---- ε


@pytest.fixture(scope="module")
def lakes(tmp_path_factory):
    return write_lakes(tmp_path_factory.mktemp("lakes"))


def check_epsilon(card):
    """Check that the verifier computes what a card says was spent, and that its events cost no more than is promised."""
    found, said = verifier.compute_spent(card), card["accounting"]["epsilon_exact"]
    if card["guarantee"]["epsilon"] is None:
        assert found is said is None
        return
    cost, spent = found
    assert repr(spent) == repr(said)
    assert max(cost, spent) <= card["guarantee"]["epsilon"]
    assert "to the last digit" in "".join(verifier.check_card({**card, "insecure": False}))


CASES = [
    (name, factor)
    for name, job in JOBS.items()
    for factor in ((1.0, 0.83, 1.37) if job.get("privacy", "") is not None else (1.0,))
    if "perturbed" not in name or factor == 1.0  # its designs have the ε
]


@pytest.mark.few(14)
@pytest.mark.parametrize(("name", "factor"), CASES)
def test_epsilon_is_computed_to_the_last_digit(name, factor, lakes, tmp_path):
    changes = {}
    if factor != 1.0:
        changes["privacy__epsilon"] = factor * JOBS[name].get("privacy__epsilon", 4.0)
    run_here(write_recorded(name, lakes, tmp_path, **changes))
    check_epsilon(read_card(tmp_path))


@pytest.mark.few(2)
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
@pytest.mark.parametrize("delta", [0, 1e-9, 1e-5])
@pytest.mark.parametrize("unit", ["row", {"column": "userId", "max_rows": 3}])
def test_epsilon_of_found_levels_is_computed_to_the_last_digit(
    adjacency, delta, unit, lakes, tmp_path
):
    """Selections of keys, whose δ is taken off that of the noise."""
    code = {"role": "privatise", "kind": "categorical", "levels": "discover", "other": "other"}
    schema = {name: {"role": "drop"} for name in SCHEMA} | {"genre": {**code, "nulls": "level"}}
    privacy = {"epsilon": 2.0, "delta": delta or 1e-12, "adjacency": adjacency, "unit": unit}
    mechanism = {"kind": "histogram", "bins": 4}
    job = write_job(
        *(tmp_path, lakes["parquet"], tmp_path / "out"),
        schema=schema,
        privacy=privacy,
        mechanism=mechanism,
    )
    run_job(load_discovery(job, epsilon=1.3))
    check_epsilon(read_card(tmp_path, "schema.levels"))


@pytest.mark.few(1)
@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
@pytest.mark.parametrize("delta", [1e-9, 1e-5])
def test_epsilon_of_persons_is_computed_to_the_last_digit(adjacency, delta, tmp_path, monkeypatch):
    """Counts of parts of persons, whose sensitivities are large."""
    monkeypatch.chdir(tmp_path)
    privacy = {**PRIVACY, "adjacency": adjacency, "delta": delta}
    run_here(write_persons(tmp_path, privacy=privacy))
    check_epsilon(read_card(tmp_path))
    metadata = json.loads((tmp_path / "out/_dpdask/croissant.json").read_bytes())
    named = {each["@id"] for each in metadata["distribution"]}
    assert not any(" " in name for name in named)  # else they are no IRIs
    for table in metadata["recordSet"]:
        assert {each["source"]["fileSet"]["@id"] for each in table["field"]} <= named


WRONG = {
    "another ε": (("accounting", "epsilon_exact"), 3.99, "was spent"),
    "a smaller promise": (("guarantee", "epsilon"), 3.0, "is promised"),
    "less noise": (("accounting", "events", "events", 0, "scale"), 0.25, "is promised"),
    "no noise": (("accounting", "events", "events", 0, "scale"), 0.0, "no size"),
    "noise less than never": (("accounting", "events", "events", 0, "count"), -9, "no count"),
    "another kind": (("accounting", "events", "events", 0, "kind"), "magic", "cannot price"),
    "another adjacency": (("guarantee", "adjacency"), "add-remove", "adjacency"),
    "two adjacencies": (
        ("accounting", "events", "events", 0, "adjacency"),
        "add-remove",
        "adjacency",
    ),
    "no promise": (("guarantee", "epsilon"), None, "no ε"),
    "a seed": (("insecure",), True, "nobody"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_card_that_is_wrong_is_refused(wrong, lakes, tmp_path_factory):
    where, value, why = WRONG[wrong]
    card = copy.deepcopy(histogram_card(lakes, tmp_path_factory))
    assert verifier.check_card(card)
    *places, last = where
    inner = card
    for place in places:
        inner = inner[place]
    inner[last] = value
    with pytest.raises(verifier.RefusedError, match=why):
        verifier.check_card(card)


_cards: dict[str, dict] = {}


def histogram_card(lakes, factory):
    if not _cards:
        folder = factory.mktemp("card")
        run_here(write_recorded("histogram cells", lakes, folder))
        _cards["card"] = read_card(folder) | {"insecure": False}
    return _cards["card"]


def raise_first(row):
    row[0] = 0.99


def widen(column):
    column["window"]["stays"] = [min(1.0, 50.0 * each) for each in column["window"]["stays"]]


def test_a_row_that_spends_more_than_is_promised_is_refused(lakes, tmp_path):
    run_here(write_recorded("dip known", lakes, tmp_path))
    card = read_card(tmp_path) | {"insecure": False}
    assert verifier.check_card(card)
    [row] = card["accounting"]["events"]["events"]
    row["epsilon"] = card["guarantee"]["epsilon"] = row["epsilon"] / 2
    with pytest.raises(verifier.RefusedError, match="was spent"):
        verifier.check_card(card)


def test_a_window_that_costs_more_than_it_says_is_refused():
    shares = 1.0 / np.arange(1.0, 301.0)
    channel = keep_most(shares / shares.sum(), 4.0)
    shown = WindowMechanism(channel=channel).shown
    column = {"epsilon_exact": channel.epsilon, **shown}
    assert channel.window.stays.any()
    assert verifier._measure_loss(column) == pytest.approx(channel.epsilon, rel=1e-9)
    for change in (widen, lambda column: column["window"].update(chance=1.5)):
        changed = copy.deepcopy(column)
        change(changed)
        assert not verifier._measure_loss(changed) <= channel.epsilon


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dip known", lambda column: raise_first(column["channel"][0])),
        ("dip known", lambda column: column.update(epsilon_exact=0.1)),
        ("dip known", lambda column: column.update(epsilon_exact=None)),
        ("dip tree", lambda column: raise_first(column["channels"][0][0])),
    ],
)
def test_a_channel_that_costs_more_than_it_says_is_refused(name, change, lakes, tmp_path):
    run_here(write_recorded(name, lakes, tmp_path))
    card = read_card(tmp_path)
    verifier.compute_spent(card)
    change(card["columns"]["rating"])
    with pytest.raises(verifier.RefusedError, match="channel costs more"):
        verifier.compute_spent(card)
