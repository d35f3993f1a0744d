"""YAML documents that users write: read strictly, validated by pydantic, refused in one line."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from dpdask.errors import SpecError

Model = TypeVar("Model", bound=BaseModel)


class Document(BaseModel):
    """The base of what users write: immutable, and no key that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=False)


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice (YAML would keep the last one in silence) and reads `1e-5` as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]  # untyped in the stubs
            if not isinstance(key, Hashable):
                raise SpecError("a key is not a plain name", f"line {key_node.start_mark.line + 1}")
            if key in seen:
                raise SpecError(f"the key {key!r} stands twice", f"line {key_node.start_mark.line + 1}", "remove one of the two")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Return the mapping that a YAML text holds.

    Raises
    ------
    SpecError
        If the text is not YAML, is not a mapping, or gives a key twice.
    """
    try:
        data = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise SpecError("this is not valid YAML", f"{where}{line}", "correct its indentation or quoting") from None
    except SpecError as error:
        raise error.at(where) from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise SpecError("a mapping of names to values is expected", where, "begin with `key: value` lines")
    return data


def validate(model: type[Model], data: Mapping[str, Any], where: str) -> Model:
    """Return `data` as a `model`.

    Raises
    ------
    SpecError
        With one line for the first thing that is wrong; an unknown key is answered with the nearest known one.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _one_line(error, model, where) from None


def _one_line(error: ValidationError, model: type[BaseModel], where: str) -> SpecError:
    issues = error.errors(include_url=False, include_input=False)
    first = next((issue for issue in issues if issue["type"] == "extra_forbidden"), issues[0])
    keys = [str(part) for part in first["loc"] if not str(part).startswith("function-")]
    path = ".".join(keys)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(keys[-1], _known_keys(model), n=1, cutoff=0.0)
        return SpecError(f"unknown key {path!r}", where, f"did you mean {near[0]!r}?" if near else None)
    if first["type"] == "missing":
        return SpecError(f"the key {path!r} is missing", where, "add it")
    message = first["msg"].removeprefix("Value error, ")
    return SpecError(f"{path}: {message}" if path else message, where)


def _known_keys(model: type[BaseModel]) -> list[str]:
    """Return every key of a model and of the models inside it."""
    known: list[str] = []
    for name, field in model.model_fields.items():
        known.append(name)
        for inner in _models_in(field.annotation):
            known.extend(_known_keys(inner))
    return known


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]
