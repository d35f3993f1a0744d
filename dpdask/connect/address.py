"""A scheduler that is named by its address: who else can reach it, whether a job may run there, and the client for it."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import logging
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import dask

from dpdask.connect.spec import Address, Cluster, Gateway, Tls
from dpdask.errors import DpdaskError, SpecError, TemporaryError

if TYPE_CHECKING:
    from distributed.security import Security

# Dask's TLS asks both sides for a certificate, a gateway asks for a password or a token, and
# inproc:// leaves no process
_SAFE = {"tls", "wss", "https", "inproc"}
_GATEWAY = "gateway"  # a gateway's proxy of a scheduler: TLS with certificates of that cluster
_SECONDS = 15.0
_LOGGERS = ("distributed", "distributed.client", "tornado", "tornado.application")


def replace_scheduler(cluster: Cluster, scheduler: str | None) -> Cluster:
    """Return a `cluster:` block with the command line's address for its scheduler, if any."""
    if scheduler is None:
        return cluster
    if isinstance(cluster, Address):
        return cluster.model_copy(update={"address": scheduler})
    return Address(address=scheduler)


def check_address(cluster: Cluster) -> tuple[str, ...]:
    """Return a warning for the steward about a scheduler without certificates, or a gateway without https."""
    if not isinstance(cluster, Address | Gateway):
        return ()
    if not cluster.address:
        hint = "give the scheduler's address, such as tls://host:8786"
        raise SpecError("the key 'cluster.address' is missing", "cluster", hint)
    scheme, place = _split(cluster.address)
    if scheme in _SAFE:
        return ()
    local, where = is_loopback(place), hide_user(cluster.address)
    if isinstance(cluster, Gateway):
        safe = "https://"
        risk = "without https, anyone on the network path can read the password or token for this gateway"
        warning = "" if local else f"{where}: {risk}"
    else:
        safe = "tls:// with certificates"
        risk = "without TLS, anyone who can reach this scheduler can run code on its workers and read what they read"
        who = "every user of this machine" if local else "anyone who can reach it over the network"
        warning = f"the scheduler at {where} asks for no certificate: {who} can run code on its workers and read what they read"
        if not local:
            warning += ", and anyone on the network path can read what is sent: exact counts, and the key of a run whose output is in a store"
    if not local and not cluster.insecure:
        hint = f"use {safe}, or a cluster of kind {cluster.kind} with insecure: true"
        raise SpecError(risk, where, hint)
    return (f"{warning}; use {safe}",) if warning else ()


def is_exposed(address: str) -> bool:
    """Return whether anyone on the network path can read what is sent to a scheduler or a worker."""
    scheme, place = _split(address)
    return scheme not in {*_SAFE, _GATEWAY} and not is_loopback(place)


def _split(address: str) -> tuple[str, str]:
    """Return an address's scheme, or Dask's default one, and its `host:port`."""
    scheme, _, place = address.rpartition("://")
    default: str = dask.config.get("distributed.comm.default-scheme", "tcp")
    return scheme.lower() or default, place.partition("/")[0]


def is_loopback(place: str) -> bool:
    """Return whether only this machine can reach `host:port`; names but `localhost` are not looked up."""
    host = place.rpartition(":")[0] or place
    if place.startswith("["):
        host = place[1:].partition("]")[0]
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hide_user(address: str) -> str:
    """Return an address without the user and the password that it may hold."""
    return re.sub(r"//.*@", "//***@", address)


@contextmanager
def open_address(cluster: Address) -> Iterator[str]:
    """Run the block on the scheduler at an address; yield a description of it."""
    assert cluster.address is not None
    with open_client(cluster.address, make_security(cluster.tls)):
        yield f"the scheduler at {hide_user(cluster.address)}"


def make_security(tls: Tls | None) -> Security:
    """Return the certificates of a block, or those of Dask's own configuration."""
    from distributed.security import Security

    files = (
        {"tls_ca_file": tls.ca, "tls_client_cert": tls.cert, "tls_client_key": tls.key}
        if tls
        else {}
    )
    try:
        security = Security(require_encryption=True, **files) if tls else Security()
        security.get_connection_args("client")
    except OSError:  # also ssl.SSLError
        hint = "give a readable authority, and a certificate with its key, as PEM files"
        raise SpecError("the certificate's files cannot be used", "cluster.tls", hint) from None
    return security


@contextmanager
def open_client(address: str, security: Security) -> Iterator[None]:
    """Run the block on a scheduler."""
    from distributed import Client
    from distributed.versions import VersionMismatchWarning

    with silence_dask():
        # a Client that cannot connect lingers for a minute, and prints a traceback when it is
        # collected: connect without one first
        with ThreadPoolExecutor(1) as thread:  # the caller may have an event loop of its own
            thread.submit(lambda: asyncio.run(_reach(address, security))).result()
        try:
            with warnings.catch_warnings():
                # `check_workers` tells of it
                warnings.simplefilter("ignore", VersionMismatchWarning)
                # not the default client of this process: one that was lost would stay it
                options = {"timeout": _timeout(), "security": security, "set_as_default": False}
                client = Client(address, **options)
        except OSError:
            raise _unreachable(address) from None
        with client, dask.config.set(scheduler=client):
            yield


@contextmanager
def silence_dask() -> Iterator[None]:
    """Keep the logs of Dask and what is below it from standard error: a lost connection is told in one line."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


async def _reach(address: str, security: Security) -> None:
    from distributed.comm import CommClosedError, connect
    from distributed.comm.core import FatalCommClosedError

    where = hide_user(address)
    what = "scheduler and client do not accept each other's certificates"
    refused = SpecError(what, where, "let one authority sign both")
    options = security.get_connection_args("client")
    try:
        reached = connect(address, timeout=_timeout(), **options)
        comm = await asyncio.wait_for(reached, _timeout() + 1)
        await comm.close()
    except TypeError:  # of distributed, for a tls:// address without certificates
        hint = "give cluster.tls: {ca, cert, key}"
        raise SpecError("a tls:// address needs certificates", where, hint) from None
    except FatalCommClosedError:
        raise refused from None
    except CommClosedError:
        # TLS 1.3 tells a client last that its certificate was refused
        if address.lower().startswith("tls"):
            raise refused from None
        hint = "it may ask for a certificate: use its tls:// address"
        raise TemporaryError("the scheduler closed the connection", where, hint) from None
    except RuntimeError:  # of distributed, for another address where encryption is asked for
        what = "certificates need a tls:// address, and this is not one"
        raise SpecError(what, where, "write tls://") from None
    except (OSError, ValueError, OverflowError):
        raise _unreachable(address) from None


def _timeout() -> float:
    configured = dask.config.get("distributed.comm.timeouts.connect")
    return min(float(dask.utils.parse_timedelta(configured)), _SECONDS)


def _unreachable(address: str) -> DpdaskError:
    hint = "check the address, and that it runs"
    return TemporaryError("the scheduler cannot be reached", hide_user(address), hint)


def import_extra(module: str, kind: str) -> Any:
    """Return a module that is installed only for one kind of cluster."""
    try:
        return importlib.import_module(module)
    except ImportError:
        what = f"the package {module.partition('.')[0]} is not installed"
        raise SpecError(what, f"cluster.kind {kind}", f"install dpdask[{kind}]") from None
