"""The JSON Schemas of a job, of a schema and of a release card, for editors and for programs that read cards.

They are files of this folder, made from the models. After a change of a model, write them again:
`python -m dpdask.schemas`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Name = Literal["job", "schema", "card"]

NAMES: tuple[Name, ...] = ("job", "schema", "card")


def find_file(name: Name) -> Path:
    """Return the file of a JSON Schema."""
    return Path(__file__).with_name(f"{name}.json")
