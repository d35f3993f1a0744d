"""Check a scheduler's address: who else can reach it, and whether a job may run there."""

from __future__ import annotations

import ipaddress

import dask

from dpdask.errors import SpecError
from dpdask.jobs.spec import Cluster

_AUTHENTICATED = {"tls", "wss"}  # Dask's TLS asks both sides for a certificate
_IN_PROCESS = "inproc"


def replace_scheduler(cluster: Cluster, scheduler: str | None) -> Cluster:
    """Return a `cluster:` block with its scheduler replaced by an address from the command line, if there is one.

    Parameters
    ----------
    cluster
        The block of a job.
    scheduler
        The address from the command line, or None.
    """
    return cluster if scheduler is None else cluster.model_copy(update={"kind": "address", "address": scheduler})


def check_address(cluster: Cluster) -> tuple[str, ...]:
    """Return a warning for the steward if a scheduler does not ask for certificates.

    Raises
    ------
    SpecError
        If an address is needed but not given; or if it is open to the network and the block does not say `insecure: true`.
    """
    if cluster.kind != "address":
        return ()
    if not cluster.address:
        raise SpecError("the key 'cluster.address' is missing", "cluster", "give the scheduler's address, such as tls://host:8786")
    scheme, mark, place = cluster.address.rpartition("://")
    scheme = scheme.lower() if mark else dask.config.get("distributed.comm.default-scheme")
    if scheme in _AUTHENTICATED or scheme == _IN_PROCESS:
        return ()
    local = is_loopback(place)
    if not local and not cluster.insecure:
        what = "without TLS, anyone who can reach this scheduler can run code on its workers and read what they read"
        raise SpecError(what, cluster.address, "use tls:// with certificates, or set cluster.insecure: true")
    who = "every user of this machine" if local else "anyone who can reach it over the network"
    what = f"the scheduler at {cluster.address} asks for no certificate: {who} can run code on its workers and read what they read"
    return (f"{what}; use tls:// with certificates",)


def is_loopback(place: str) -> bool:
    """Return whether `host:port` is an address that only this machine can reach; names other than `localhost` are not looked up."""
    host = place[1:].partition("]")[0] if place.startswith("[") else place.rpartition(":")[0] or place
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
