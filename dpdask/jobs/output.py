"""Where a release goes, as a job says it: plain files, a Delta table or an Iceberg table."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from dpdask.documents import Document
from dpdask.io.delta_log import DeltaLog, Mode
from dpdask.io.storage import Folder
from dpdask.jobs.publication import ManifestFolder, Publication, RenamedFolder
from dpdask.jobs.published_table import PublishedTable
from dpdask.privacy.order import RowOrder


class Target(Document):
    """How a release is published.

    Attributes
    ----------
    format
        `parquet` (a folder of files) or `delta` (a Delta table).
    mode
        `error`: the output must not exist. `append`: the release is added to what a table holds. `overwrite`: it replaces what
        a table holds.
    """

    format: Literal["parquet", "delta"] = "parquet"
    mode: Mode = "error"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.format == "parquet" and self.mode != "error":
            raise ValueError(f"`mode: {self.mode}` belongs to tables; set `format: delta`")
        return self

    @model_serializer(mode="wrap")
    def _without_usual(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out default values of these keys, so that the digests of jobs that write plain files stay as they are."""
        written: dict[str, Any] = plain(self)
        usual = Target.model_fields
        return {key: value for key, value in written.items() if key not in usual or value != usual[key].default}

    def open(self, output: Folder) -> Publication:
        """Return what publishes into a folder in this way."""
        if self.format == "delta":
            return PublishedTable(output, DeltaLog(output), self.mode)
        return RenamedFolder(output) if output.is_local else ManifestFolder(output)


class Output(Target):
    """Where the release goes, the most rows of a shard, and whether rows that are released one by one are shuffled."""

    path: str = Field(min_length=1)
    rows_per_shard: int = Field(default=1_000_000, ge=1)
    order: RowOrder = "shuffled"

    @property
    def target(self) -> Target:
        """How the release is published."""
        return Target(**{key: getattr(self, key) for key in Target.model_fields})
