"""How stores are opened: options by bucket, in which secrets are named by environment variables and looked up by the process that needs them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fsspec

from dpdask.errors import SpecError

Options = Mapping[str, Any]

KINDS = {"s3": "s3", "s3a": "s3", "az": "azure", "abfs": "azure", "abfss": "azure", "gs": "gcs", "gcs": "gcs"}  # also the names of extras
_SECRET = re.compile(
    r"(^|_)([a-z]*(key|secret|token|credential|cookie|pwd|pass(wd|word|phrase|code))s?|pass|pw|[a-z]*sas|sig|jwt|bearer|[a-z]*authorization"
    r"|connection_string)($|_)|(^|_)([a-z]*auth|signature)$"
)
_NAMED = re.compile(r"([\w.-]+)\s*[=:]")  # in a value: of a connection string, a header's line
_USER, _QUERY = re.compile(r"(:|//).*@", re.DOTALL), re.compile(r"\?.")
_BY_NAME = "write {env: NAME} with the name of an environment variable that holds it"
_ACTIVE: dict[str, Options] = {}  # by root, in this process; secrets stand in it by the names of variables alone


def check_options(storage: object) -> dict[str, dict[str, Any]]:
    """Return a job's `storage:` block, by protocol, after checking that no secret stands in it; values are never shown.

    Raises
    ------
    SpecError
        If it is no mapping of protocols to options, or a secret is not given by reference to an environment variable.
    """
    if not isinstance(storage, dict):
        raise SpecError("a mapping of protocols to options is expected", "storage", "write storage: {s3: {endpoint_url: …}}")
    for protocol, options in storage.items():
        if protocol not in fsspec.available_protocols():
            raise SpecError("no file system has this protocol", f"storage.{protocol}", "name one such as s3, az or gs")
        if not isinstance(options, dict):
            raise SpecError("a mapping of options is expected", f"storage.{protocol}", "write endpoint_url: … or the like below it")
        for name, value in options.items():
            _check_value(value, f"storage.{protocol}.{name}", secret=_is_secret(str(name)))
    return storage


def _is_secret(name: str) -> bool:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+", "_", name)
    return _SECRET.search(snake.lower()) is not None


def _check_value(value: object, place: str, *, secret: bool) -> None:
    if isinstance(value, dict):
        if "env" in value:
            if len(value) > 1 or not isinstance(value["env"], str) or not value["env"]:
                raise SpecError("a reference has one key, the name of an environment variable", place, "write {env: NAME}")
            return
        for name, inner in value.items():
            _check_value(inner, f"{place}.{name}", secret=secret or _is_secret(str(name)))
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_value(inner, place, secret=secret)
    elif secret and value is not None:
        raise SpecError("a secret must not appear in a job", place, _BY_NAME)
    elif isinstance(value, str) and _USER.search(value):
        raise SpecError("a URL with a user or password must not appear in a job", place, _BY_NAME)
    elif isinstance(value, str) and _QUERY.search(value):
        raise SpecError("a URL with a query must not appear in a job", place, _BY_NAME)
    elif isinstance(value, str) and any(map(_is_secret, _NAMED.findall(value))):
        raise SpecError("a secret must not appear in a job", place, _BY_NAME)


def root(url: str) -> str | None:
    """Return the bucket or container of a URL, with a name of its kind of store; None for local paths."""
    protocol, separator, rest = url.rpartition("::")[2].partition("://")
    if not separator or protocol in ("file", "local", "memory"):
        return None
    return f"{KINDS.get(protocol, protocol)}://{rest.partition('/')[0]}"


def by_root(storage: Mapping[str, Options], urls: Iterable[str]) -> dict[str, Options]:
    """Return the options of the buckets that some URLs lie in; empty ones where the environment decides.

    Parameters
    ----------
    storage
        A job's `storage:` block.
    urls
        What the job reads and writes.
    """
    kinds = {KINDS.get(protocol, protocol): options for protocol, options in storage.items()}
    return {place: kinds.get(place.partition("://")[0], {}) for place in map(root, urls) if place is not None}


@contextmanager
def use_options(options: Mapping[str, Options]) -> Iterator[None]:
    """Open these buckets with these options, in this process, until the block ends."""
    before = dict(_ACTIVE)
    set_options(options)
    try:
        yield
    finally:
        _ACTIVE.clear()
        _ACTIVE.update(before)


def set_options(options: Mapping[str, Options]) -> None:
    """Open these buckets with these options from now on, in this process."""
    _ACTIVE.update(options)


def resolve_options(url: str) -> dict[str, Any]:
    """Return the options of a URL's bucket, with the values of the environment variables that they name.

    Raises
    ------
    SpecError
        If a variable is not set in this process.

    Privacy
    -------
    The result holds secrets: never put it in a message, log, file or graph.
    """
    found = _ACTIVE.get(root(url) or "", {})
    return {name: _resolve(value, name) for name, value in found.items()}


def _resolve(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_resolve(inner, name) for inner in value]
    if not isinstance(value, Mapping):
        return value
    if "env" not in value:
        return {key: _resolve(inner, f"{name}.{key}") for key, inner in value.items()}
    found = os.environ.get(value["env"])
    if found is None:
        what = f"the environment variable {value['env']} is not set in this process"
        raise SpecError(what, f"storage, {name}", "set it for the driver and for every worker")
    return found
