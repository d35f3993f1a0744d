"""The JSON Schemas in the package: made from the models, described, and true of every pipeline of the repository."""

import json
from pathlib import Path

import jsonschema
import pandas as pd
import pytest
import yaml
from e2e.helpers import call_cli, discrete

import dpdask
from dpdask.schemas import NAMES, find_file
from dpdask.schemas.__main__ import make_json_schema

ROOT = Path(__file__).parents[1]
FILES = sorted(
    file for file in (ROOT / "pipelines").rglob("*.yaml") if file.name.startswith(("job", "schema"))
)


def read(name):
    return dict(json.loads(find_file(name).read_text(encoding="utf-8")))


def as_json(value):
    """Return what YAML gave as JSON has it: dates as texts."""
    return json.loads(json.dumps(value, default=str))


@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_made_from_the_models(name):
    assert find_file(name).read_text(encoding="utf-8") == make_json_schema(name), (
        "write them again: python -m dpdask.schemas"
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_prints_them(name):
    ended = call_cli("schema", name)
    assert json.loads(ended.stdout) == read(name)
    jsonschema.Draft202012Validator.check_schema(read(name))


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_described(name):
    whole = read(name)
    for part, definition in [(name, whole), *whole["$defs"].items()]:
        bare = [
            key for key, value in definition["properties"].items() if not value.get("description")
        ]
        assert not bare, part
        assert definition["description"], part
        assert "----" not in json.dumps(definition)  # no heading of a docstring is left


@pytest.mark.parametrize(
    "file", FILES, ids=lambda file: "-".join(file.relative_to(ROOT / "pipelines").parts)
)
def test_each_pipeline_names_its_json_schema_and_follows_it(file):
    text = file.read_text(encoding="utf-8")
    first, sign, place = text.split("\n", 1)[0].partition("# yaml-language-server: $schema=")
    name = "job" if file.name.startswith("job") else "schema"
    assert (first, bool(sign)) == ("", True)
    assert (file.parent / place).resolve() == find_file(name)
    jsonschema.validate(as_json(yaml.safe_load(text)), read(name))


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("schema", {"columns": {"a": {"role": "keeep"}}}),
        ("schema", {"columns": {"a": {"role": "keep", "levles": []}}}),
        ("job", {"name": "j"}),
        (
            "job",
            {
                "name": "j",
                "input": {"path": "x"},
                "output": {"path": "y"},
                "schema": "s",
                "mechanism": {"kind": "copola"},
            },
        ),
    ],
)
def test_what_is_wrong_is_found_by_an_editor_too(name, document):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, read(name))


def test_a_card_follows_its_json_schema(tmp_path):
    schema = dpdask.Schema.from_dict({"columns": {"a": discrete([1, 2, 3])}})
    release = dpdask.DIP(
        schema,
        epsilon=1.0,
        reference=dpdask.Known(columns={"a": {"probabilities": [0.2, 0.3, 0.5]}}),
    )
    card = release.fit(pd.DataFrame({"a": [1, 2, 3] * 50})).card
    jsonschema.validate(card, read("card"))
