"""A job's `storage:` block: options by protocol and bucket, with secrets named by environment variables and never written."""

import pytest

from dpdask.errors import SpecError
from dpdask.io import filesystems as options
from dpdask.io.filesystems import by_root, check_options, resolve_options, use_options

SECRET = "Zebulon-93af"


@pytest.mark.parametrize(
    ("storage", "says"),
    [
        (SECRET, "storage: a mapping of protocols to options is expected"),
        ({"s3": SECRET}, r"storage\.s3: a mapping of options is expected"),
        ({"s4": {}}, r"storage\.s4: no file system has this protocol; name one such as s3"),
        (
            {"s3": {"secret": SECRET}},
            r"storage\.s3\.secret: a secret must not appear in a job; write \{env: NAME\}",
        ),
        (
            {"s3": {"client_kwargs": {"aws_secret_access_key": SECRET}}},
            r"storage\.s3\.client_kwargs\.aws_secret_access_key: a secret must not",
        ),
        (
            {"s3": {"s3_additional_kwargs": {"SSECustomerKey": SECRET}}},
            "SSECustomerKey: a secret must not",
        ),
        ({"az": {"connection_string": SECRET}}, "connection_string: a secret must not"),
        ({"az": {"account_key": SECRET}}, "account_key: a secret must not"),
        ({"gs": {"token": {"private": SECRET}}}, r"token\.private: a secret must not"),
        ({"s3": {"key": [SECRET]}}, "key: a secret must not"),
        ({"s3": {"secret": {"env": "A", "default": SECRET}}}, "secret: a reference has one key"),
        ({"s3": {"secret": {"env": ""}}}, "secret: a reference has one key"),
        (
            {"s3": {"endpoint_url": f"https://me:{SECRET}@lake"}},
            "endpoint_url: a URL with a user or password",
        ),
        (
            {"s3": {"config_kwargs": {"proxies": {"http": f"me:{SECRET}/@proxy:80"}}}},
            r"proxies\.http: a URL with a user or password",
        ),
        (
            {"s3": {"endpoint_url": f"https://[{SECRET}@lake"}},
            "endpoint_url: a URL with a user or password",
        ),
        (
            {"https": {"client_kwargs": {"headers": {"Authorization": f"Bearer {SECRET}"}}}},
            r"headers\.Authorization: a secret must not",
        ),
        ({"https": {"headers": {"X-Api-Key": SECRET}}}, "X-Api-Key: a secret must not"),
        ({"https": {"headers": [f"Authorization: {SECRET}"]}}, "headers: a secret must not"),
        ({"https": {"headers": {"Cookie": SECRET}}}, "Cookie: a secret must not"),
        (
            {"https": {"client_kwargs": {"cookies": {"session": SECRET}}}},
            r"cookies\.session: a secret must not",
        ),
        ({"sftp": {"passphrase": SECRET}}, "passphrase: a secret must not"),
        ({"sftp": {"pwd": SECRET}}, "pwd: a secret must not"),
        ({"s3": {"apikey": SECRET}}, "apikey: a secret must not"),
        ({"s3": {"client_kwargs": {"auth": ["me", SECRET]}}}, "auth: a secret must not"),
        ({"s3": {"client_kwargs": {"auth": ("me", SECRET)}}}, "auth: a secret must not"),
        ({"az": {"account_host": f"x/?sv=1&sig={SECRET}"}}, "account_host: a URL with a query"),
        ({"az": {"account_host": f"sv=1&sig={SECRET}"}}, "account_host: a secret must not"),
        (
            {"az": {"account_host": f"AccountName=a;AccountKey={SECRET}"}},
            "account_host: a secret must not",
        ),
        ({"s3": {1: {"secretKey": SECRET}}}, "secretKey: a secret must not"),
    ],
)
def test_what_is_wrong_is_refused_without_its_value(storage, says):
    with pytest.raises(SpecError, match=says) as caught:
        check_options(storage)
    assert SECRET not in str(caught.value)


def test_what_is_no_secret_is_accepted():
    client = {"region_name": "eu-1", "verify": "/etc/ssl/lake.pem"}
    config = {
        "signature_version": "s3v4",
        "proxies": {"https": "http://proxy:3128"},
        "s3": {"addressing_style": "path"},
    }
    s3 = {
        "endpoint_url": "https://lake.example.org:9000",
        "anon": False,
        "profile": "me@lake",
        "client_kwargs": client,
        "config_kwargs": config,
    }
    storage = {
        "s3": s3,
        "az": {"account_name": "lake", "account_host": "127.0.0.1:10000"},
        "gs": {"project": "p", "requester_pays": True},
    }
    assert check_options(storage) is storage


LAKE = {
    "endpoint_url": "http://lake",
    "key": {"env": "LAKE_KEY"},
    "config_kwargs": {"proxies": [{"env": "LAKE_PROXY"}]},
}
STORAGE = {"s3": LAKE, "az": {"anon": True}}


def test_options_belong_to_the_buckets_of_a_job():
    assert check_options(STORAGE) is STORAGE
    found = by_root(
        STORAGE,
        ["s3://in/a", "s3a://out/b/c", "abfs://box/x", "gs://free/y", "file:///z", "memory://m"],
    )
    assert found == {
        "s3://in": STORAGE["s3"],
        "s3://out": STORAGE["s3"],
        "azure://box": STORAGE["az"],
        "gcs://free": {},
    }


def test_each_process_looks_its_variables_up(monkeypatch):
    monkeypatch.setenv("LAKE_KEY", SECRET)
    with use_options(by_root(STORAGE, ["s3://in/a"])):
        with pytest.raises(
            SpecError,
            match=r"storage, config_kwargs\.proxies: the environment variable LAKE_PROXY is not set in this process",
        ):
            resolve_options("s3://in/a/b")
        monkeypatch.setenv("LAKE_PROXY", "p")
        assert resolve_options("s3://in/a/b") == {
            "endpoint_url": "http://lake",
            "key": SECRET,
            "config_kwargs": {"proxies": ["p"]},
        }
        assert resolve_options("s3://other/a/b") == {}
        assert resolve_options("file:///in") == {}
        assert SECRET not in repr(options._ACTIVE)
    assert resolve_options("s3://in/a/b") == {}
