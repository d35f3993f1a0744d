"""The catalog of an Iceberg table, as a job names it."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, model_validator

from dpdask.documents import Document


class Catalog(Document):
    """The catalog that knows an Iceberg table, as pyiceberg opens it.

    A job holds no credentials: pyiceberg reads them, and whatever else is missing here, from the environment, for
    instance `PYICEBERG_CATALOG__LAKE__TOKEN` for the catalog `lake`.

    Attributes
    ----------
    name
        Its name, which the variables of the environment hold.
    type
        Its kind, such as `rest`, `sql`, `hive` or `glue`.
    uri
        Its address.
    warehouse
        Where it keeps tables.
    """

    name: str = Field(min_length=1)
    type: str | None = None
    uri: str | None = None
    warehouse: str | None = None

    @model_validator(mode="after")
    def _without_password(self) -> Self:
        if re.search(r"//[^/@]*:[^/@]*@", self.uri or ""):
            raise ValueError(f"a job holds no password; give this `uri` as PYICEBERG_CATALOG__{self.name.upper()}__URI in the environment")
        return self
