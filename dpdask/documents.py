"""YAML documents that users write: read strictly, validated by pydantic, refused in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from dpdask.errors import SpecError

Model = TypeVar("Model", bound=BaseModel)

_LONGEST_SHOWN = 60


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # it has no public name


class _OneLine(ModelMetaclass):
    """Raises one line for wrong arguments of a class, as for a wrong file, in place of pydantic's own errors."""

    def __call__(self, *args: Any, **given: Any) -> Any:
        try:
            return super().__call__(*args, **given)
        except ValidationError as error:
            raise _one_line(error, cast("type[BaseModel]", self), given, self.__name__) from None


class Document(BaseModel, metaclass=_OneLine):
    """The base of documents that users write: immutable, and without unknown keys.

    Raises
    ------
    SpecError
        If a value is missing, unknown or wrong: one line that shows it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=False)


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice (YAML would keep the last one in silence) and reads `1e-5` as a number."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:  # before merge keys are expanded: merged keys may be overridden
            line = f"line {key.start_mark.line + 1}"
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):  # 1, no, 2020-01-01 and [a] are no names
                raise SpecError("a key is not a text", line, "put it in quotes")
            if key.value in seen:
                raise SpecError(f"the key {key.value!r} is repeated", line, "remove one of the two")
            seen.add(key.value)
        return node


_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"), list("-+.0123456789"))


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Return the mapping that a YAML text holds.

    Parameters
    ----------
    text
        The YAML text.
    where
        The document's name, for messages.

    Raises
    ------
    SpecError
        If the text is not YAML, is not a mapping, gives a key twice, or has a key that is not a text.
    """
    data = parse_value(text, where)
    if not isinstance(data, dict):
        raise SpecError("a mapping of names to values is expected", where, "begin with `key: value` lines")
    return data


def parse_value(text: str, where: str) -> Any:
    """Return the value that a YAML text holds.

    For the parameters see `parse_yaml`.

    Raises
    ------
    SpecError
        If the text is not YAML, gives a key twice, or has a key that is not a text.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise SpecError("this is not valid YAML", f"{where}{line}", "correct its indentation or quoting") from None
    except (ValueError, RecursionError):  # raised for 2020-02-30, or for a thousand brackets
        raise SpecError("a value cannot be read", where, "correct a date that does not exist, or a number that is too long") from None
    except SpecError as error:
        raise error.at(where) from None


def validate(model: type[Model], data: Mapping[str, Any], where: str) -> Model:
    """Return `data` as a `model`.

    Parameters
    ----------
    model
        The class to build.
    data
        The values to build it from.
    where
        The document's name, for messages.

    Raises
    ------
    SpecError
        With one line for the first thing that is wrong; an unknown key is answered with the nearest known one.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _one_line(error, model, data, where) from None


def _one_line(error: ValidationError, model: type[BaseModel], data: Mapping[str, Any], where: str) -> SpecError:
    issues = error.errors(include_url=False)
    # where a key may have several types, the issue deepest inside the document is about the intended one
    deepest = max(issues, key=lambda issue: len(_place(issue["loc"], data)))
    first = next((issue for issue in issues if issue["type"] == "extra_forbidden"), deepest)
    keys = _place(first["loc"], data)
    if first["type"] in ("missing", "union_tag_not_found"):
        missing = str(first["loc"][-1]) if first["type"] == "missing" else first["ctx"]["discriminator"].strip("'")
        return SpecError(f"the key {'.'.join([*keys, missing])!r} is missing", where, "add it")
    path = ".".join(keys)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(keys[-1], _known_keys(model, keys[:-1], data), n=1, cutoff=0.0)
        return SpecError(f"unknown key {path!r}", where, f"did you mean {near[0]!r}?" if near else None)
    message = first["msg"].removeprefix("Value error, ")
    shown = repr(first["input"])
    if isinstance(first["input"], bool | int | float | str) and len(shown) <= _LONGEST_SHOWN and shown not in message:
        message = f"{message}, not {shown}"
    return SpecError(message, ", ".join(filter(None, (where, path))))


def _place(location: Sequence[str | int], data: Any) -> list[str]:
    """Return the keys and positions that lead to an issue, without the names of validators and union members that pydantic puts between."""
    keys: list[str] = []
    tagged = False
    for part in location:
        if not tagged and _is_tag(part, data):  # `address` may be the kind of a cluster and one of its keys: the kind comes first
            tagged = True
            continue
        inside = part in data if isinstance(data, Mapping) else isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
        if inside:
            keys.append(str(part))
            data, tagged = data[part], False
    return keys


def _is_tag(part: str | int, data: Any) -> bool:
    return isinstance(data, Mapping) and part in (data.get("kind"), data.get("design"))


def _known_keys(model: type[BaseModel], path: Sequence[str], data: Any) -> list[str]:
    """Return the keys that are known at a path inside a model; names in a mapping and positions in a list lead no deeper.

    Where models of several kinds may stand, the one whose kind the data names is meant.
    """
    models = [model]
    for key in path:
        data = data[int(key)] if isinstance(data, list | tuple) else data[key]
        fields = [each.model_fields[key] for each in models if key in each.model_fields]
        models = [inner for field in fields for inner in _models_in(field.annotation)] or models
        models = [each for each in models if _is_named(each, data)] or models
    return [name for each in models for name in each.model_fields]


def _is_named(model: type[BaseModel], data: Any) -> bool:
    tags = ((tag, model.model_fields[tag]) for tag in ("kind", "design") if tag in model.model_fields)
    return isinstance(data, Mapping) and any(data.get(tag) in getattr(field.annotation, "__args__", ()) for tag, field in tags)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]
