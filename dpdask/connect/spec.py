"""The `cluster:` block of a job: where it runs. Each kind has its own fields, and no others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, field_validator, model_validator

from dpdask.documents import Document

Option: TypeAlias = str | int | float | bool


class Tls(Document):
    """The files of a client's certificate, as PEM; relative paths are relative to the job's folder."""

    ca: str = Field(min_length=1)
    """The certificate of the authority that signed the scheduler's and the workers'."""
    cert: str = Field(min_length=1)
    """The client's own."""
    key: str = Field(min_length=1)
    """The client's own."""

    def resolve(self, base: Path) -> Self:
        """Return the same files with absolute paths."""
        return self.model_copy(
            update={name: str(base / Path(path).expanduser()) for name, path in self}
        )


class Adaptive(Document):
    """How many workers there are at least and at most; the scheduler asks for as many as its tasks can use."""

    minimum: int = Field(default=0, ge=0)
    """The fewest workers."""
    maximum: int = Field(ge=1)
    """The most workers."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.minimum > self.maximum:
            raise ValueError("minimum is above maximum")
        return self


class Threads(Document):
    """Threads of this process."""

    kind: Literal["threads"] = "threads"
    workers: int | None = Field(default=None, ge=1)
    """How many; as many as there are cores if it is not given."""


class Synchronous(Document):
    """No worker but this process, for finding faults."""

    kind: Literal["synchronous"] = "synchronous"


class Local(Document):
    """Processes of this machine, for this user alone."""

    kind: Literal["local"] = "local"
    workers: int | None = Field(default=None, ge=1)
    """How many; as many as there are cores if it is not given."""
    threads_per_worker: int = Field(default=1, ge=1)
    """The threads of each."""


class Address(Document):
    """A scheduler that is already running."""

    kind: Literal["address"] = "address"
    address: str | None = None
    """Its address; `--scheduler` on the command line replaces it."""
    tls: Tls | None = None
    """This client's certificate; if not given, Dask's own configuration names one."""
    insecure: bool = False
    """Whether a scheduler on another machine may be used that asks for no certificate (`tcp://`)."""


class _Started(Document):
    """Workers that are started for the job, and end with it."""

    workers: int | None = Field(default=None, ge=1)
    """How many workers; either this or `adaptive`."""
    adaptive: Adaptive | None = None
    """The least and the most workers, if the scheduler decides."""
    patience_minutes: float = Field(default=10.0, gt=0)
    """How long to wait for the first worker."""

    @model_validator(mode="after")
    def _one_number(self) -> Self:
        if (self.workers is None) == (self.adaptive is None):
            raise ValueError("give either workers, a fixed number, or adaptive: {minimum, maximum}")
        return self


class Slurm(_Started):
    """Workers as SLURM jobs; what a site needs beside stands in Dask's configuration, below `jobqueue.slurm`."""

    kind: Literal["slurm"] = "slurm"
    threads_per_worker: int = Field(default=1, ge=1)
    """The threads of each worker, and the processors that it asks SLURM for."""
    memory: str
    """What each asks SLURM for, such as `4GB`."""
    walltime: str = "01:00:00"
    """How long SLURM lets one run, `HH:MM:SS` or `D-HH:MM:SS`. A worker hands its work over before
    that, and is replaced.
    """
    partition: str | None = Field(default=None, pattern=r"^[\w.,-]+$")
    """Passed to `sbatch`, if given."""
    account: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """Passed to `sbatch`, if given."""
    shared_folder: str = "."
    """A folder that the workers' machines see under the same path, for the run's certificates;
    relative to the job's folder.
    """

    @property
    def walltime_seconds(self) -> int:
        """The walltime in seconds."""
        days, _, clock = self.walltime.rpartition("-")
        hours, minutes, seconds = map(int, clock.split(":"))
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

    @field_validator("memory")
    @classmethod
    def _check_memory(cls, memory: str) -> str:
        if not re.fullmatch(r"\d+(\.\d+)? ?[KMGT]i?B", memory):
            raise ValueError("a size such as 4GB is expected")
        return memory

    @field_validator("walltime", mode="before")
    @classmethod
    def _check_walltime(cls, walltime: Any) -> Any:
        if isinstance(walltime, int):  # YAML reads 12:00:00 as a number of seconds
            walltime = f"{walltime // 3600:02}:{walltime // 60 % 60:02}:{walltime % 60:02}"
        if not isinstance(walltime, str) or not re.fullmatch(
            r"(\d+-)?\d{1,2}:\d{2}:\d{2}", walltime
        ):
            raise ValueError("a time such as 01:00:00 or 1-00:00:00 is expected")
        return walltime

    @model_validator(mode="after")
    def _long_enough(self) -> Self:
        if self.walltime_seconds < 120:
            raise ValueError("walltime is below two minutes: no worker would do anything")
        return self


class Kubernetes(Document):
    """Workers as pods: a DaskCluster resource, which the operator of dask-kubernetes acts on, is created for the job."""

    kind: Literal["kubernetes"] = "kubernetes"
    manifest: str = Field(min_length=1)
    """The DaskCluster as a YAML file; relative to the job's folder."""
    namespace: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")
    """Where it is created."""
    workers: int = Field(ge=1)
    """How many; replaces what the manifest says."""
    patience_minutes: float = Field(default=10.0, gt=0)
    """How long to wait for the scheduler, and for the first worker."""
    tls: Tls
    """This client's certificate, as files of a mounted secret."""


class Gateway(_Started):
    """A cluster of a Dask Gateway server; how to authenticate stands in Dask's configuration, below `gateway.auth`."""

    kind: Literal["gateway"] = "gateway"
    address: str = Field(pattern=r"^https?://")
    """The server's URL."""
    proxy_address: str | None = None
    """The address of its scheduler proxy, if that is another."""
    options: Mapping[str, Option] = Field(default_factory=dict)
    """Options that the server offers, such as an image or the memory of workers."""
    insecure: bool = False
    """Whether a server on another machine may be used without `https`."""


def _default_kind(block: Any) -> Any:
    return {"kind": "threads", **block} if isinstance(block, Mapping) else block


Cluster: TypeAlias = Threads | Synchronous | Local | Address | Slurm | Kubernetes | Gateway
ClusterBlock: TypeAlias = Annotated[
    Cluster, Field(discriminator="kind"), BeforeValidator(_default_kind)
]
"""What stands under `cluster:` in a job; without a kind it is `threads`."""


def place_files(cluster: Cluster, base: Path) -> Cluster:
    """Return a `cluster:` block with its paths made absolute."""
    placed: dict[str, Any] = {
        name: str(base / Path(getattr(cluster, name)).expanduser())
        for name in ("shared_folder", "manifest")
        if hasattr(cluster, name)
    }
    tls: Tls | None = getattr(cluster, "tls", None)
    return cluster.model_copy(update={**placed, **({"tls": tls.resolve(base)} if tls else {})})
