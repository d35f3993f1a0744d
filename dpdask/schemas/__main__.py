"""`python -m dpdask.schemas` writes the JSON Schemas again, after a change of the models."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from dpdask.documents import models_in
from dpdask.jobs.spec import job_file_type
from dpdask.mechanisms.card import Card
from dpdask.schema import Schema
from dpdask.schemas import NAMES, Name, find_file

_TITLES = {
    "job": "A job of dpdask",
    "schema": "The declared columns of a table",
    "card": "The card of a release",
}


class _Untitled(GenerateJsonSchema):
    """Leaves out the titles that repeat the names of keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        del schema
        return False


def make_json_schema(name: Name) -> str:
    """Return the JSON Schema of a document, as its file holds it."""
    models: dict[str, type[BaseModel]] = {"job": job_file_type(), "schema": Schema, "card": Card}
    model = models[name]
    written = model.model_json_schema(by_alias=True, schema_generator=_Untitled)
    found = {each.__name__: each for each in _list_models(model)}
    for part, definition in written.get("$defs", {}).items():
        _describe(definition, found[part])
    _describe(written, model)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": _TITLES[name]}
    return (
        json.dumps(
            head | {key: value for key, value in written.items() if key != "title"},
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
    )


def _list_models(
    model: type[BaseModel], seen: tuple[type[BaseModel], ...] = ()
) -> Iterator[type[BaseModel]]:
    """Yield a model and all that its fields lead to."""
    yield model
    for field in model.model_fields.values():
        for inner in models_in(field.annotation):
            if inner not in (*seen, model):
                yield from _list_models(inner, (*seen, model))


def _describe(definition: dict[str, Any], model: type[BaseModel]) -> None:
    """Put a model's summary, and the description of each field, into its JSON Schema."""
    bases = [base for base in model.__mro__ if issubclass(base, BaseModel) and base.__doc__]
    definition["description"] = " ".join(
        (inspect.getdoc(bases[0]) or "").partition("\n\n")[0].split()
    )
    described: dict[str, str] = {}
    for base in reversed(bases):
        described |= _read_field_docs(base)
    for name, field in model.model_fields.items():
        key = definition["properties"][field.alias or name]
        if "const" in key:
            described.setdefault(name, f"Selects this {name}.")
        if name in described:
            key["description"] = described[name]


def _read_field_docs(model: type[BaseModel]) -> dict[str, str]:
    """Return the text beside each field of a model.

    pydantic would read it at every import (`use_attribute_docstrings`), which costs each command.
    """
    source = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(source, ast.ClassDef)
    return {
        name: " ".join(doc.split())
        for pair in pairwise(source.body)
        for name, doc in _read_pair(*pair)
    }


def _read_pair(field: ast.stmt, text: ast.stmt) -> Iterator[tuple[str, str]]:
    match field, text:
        case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
            yield name, doc


if __name__ == "__main__":
    for each in NAMES:
        find_file(each).write_text(make_json_schema(each), encoding="utf-8")
