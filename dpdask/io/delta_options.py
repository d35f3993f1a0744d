"""The options by which deltalake opens a store: those by which fsspec opens it, in deltalake's words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dpdask.io.options import KINDS, resolve_options

_S3 = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "aws_endpoint_url",
    "region_name": "aws_region",
}
_AZURE = {
    "account_name": "azure_storage_account_name",
    "account_key": "azure_storage_account_key",
    "sas_token": "azure_storage_sas_token",
    "tenant_id": "azure_storage_tenant_id",
    "client_id": "azure_storage_client_id",
    "client_secret": "azure_storage_client_secret",
    "AccountName": "azure_storage_account_name",
    "AccountKey": "azure_storage_account_key",
    "BlobEndpoint": "azure_storage_endpoint",
}


def find_options(url: str) -> dict[str, str]:
    """Return deltalake's options for a URL; what is not there, deltalake takes from the environment.

    Raises
    ------
    SpecError
        If a variable of the environment that a job's `storage` names is not set.

    Privacy
    -------
    The result holds secrets: never put it in a message, log, file or graph.
    """
    kind = KINDS.get(url.partition("://")[0])
    given = resolve_options(url)
    if kind == "s3":
        found = _rename({**given, **given.get("client_kwargs", {})}, _S3)
        endpoint = found.get("aws_endpoint_url", os.environ.get("AWS_ENDPOINT_URL", ""))
    elif kind == "azure":
        text = given.get("connection_string", os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
        found = _rename({**dict(part.split("=", 1) for part in text.split(";") if "=" in part), **given}, _AZURE)
        endpoint = found.get("azure_storage_endpoint", "")
    else:
        return {}
    return found | {"allow_http": "true"} if endpoint.startswith("http://") else found


def _rename(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    return {names[name]: str(value) for name, value in given.items() if name in names and value is not None}
