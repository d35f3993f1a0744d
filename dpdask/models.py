"""What the pydantic models of documents allow: the keys that may stand at a place, and the models that a type names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel


def list_known_keys(model: type[BaseModel], path: Sequence[str], data: Any) -> list[str]:
    """Return the keys that are known at a path inside a model.

    Parameters
    ----------
    model
        The document's model.
    path
        The keys that lead there; names in a mapping and positions in a list lead no deeper.
    data
        The document's values. Where models of several kinds may stand, the one whose kind they name is meant.
    """
    return [field.alias or name for each in _find_models(model, path, data) for name, field in each.model_fields.items()]


def list_required_keys(model: type[BaseModel], path: Sequence[str], data: Any) -> list[str]:
    """Return the required keys of the mapping that may stand at a path inside a model; none if no mapping may.

    Parameters
    ----------
    model, path, data
        As for `list_known_keys`.
    """
    *parent, last = path or ("",)
    around = _find_models(model, parent, data)
    fields = [each.model_fields[last] for each in around if last in each.model_fields]
    inner = [each for field in fields for each in models_in(field.annotation)] if fields else around  # a name in a mapping
    return [field.alias or name for each in inner[:1] for name, field in each.model_fields.items() if field.is_required() or name == "kind"]


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a field's type names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in models_in(part)]


def _find_models(model: type[BaseModel], path: Sequence[str], data: Any) -> list[type[BaseModel]]:
    """Return the models that may stand at a path inside a model."""
    models = [model]
    for key in path:
        data = data[int(key)] if isinstance(data, list | tuple) else next(value for name, value in data.items() if str(name) == key)
        fields = [each.model_fields[key] for each in models if key in each.model_fields]
        models = [inner for field in fields for inner in models_in(field.annotation)] or models
        models = [each for each in models if _is_named(each, data)] or models
    return models


def _is_named(model: type[BaseModel], data: Any) -> bool:
    tags = ((tag, model.model_fields[tag]) for tag in ("kind", "design") if tag in model.model_fields)
    return isinstance(data, Mapping) and any(data.get(tag) in getattr(field.annotation, "__args__", ()) for tag, field in tags)
