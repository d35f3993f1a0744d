"""`python -m dpdask.schemas` writes the JSON Schemas again, after a change of the models."""

from dpdask.schemas import NAMES, find_file
from dpdask.schemas.making import make_json_schema

for name in NAMES:
    find_file(name).write_text(make_json_schema(name), encoding="utf-8")
