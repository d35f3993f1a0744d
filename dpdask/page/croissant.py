"""Croissant metadata of a release: JSON-LD that catalogues of data sets and machine learning tools read.

References
----------
MLCommons, Croissant Format Specification 1.0; its key words are those of schema.org.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from dpdask.html import read_file
from dpdask.io.parquet import read_schema
from dpdask.io.shards import Manifest
from dpdask.io.storage import Folder
from dpdask.mechanisms.card import About, Card
from dpdask.version import __version__

CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
MAX_FILES = 500
_PARQUET = "application/x-parquet"
_EVERY_SHARD = {
    "@type": "cr:FileSet",
    "@id": "shards",
    "name": "shards",
    "encodingFormat": _PARQUET,
    "includes": "../*.parquet",
}


def make_croissant(card: Card, manifest: Manifest, shards: Folder) -> tuple[bytes, tuple[str, ...]]:
    """Return the metadata as JSON-LD, and warnings about what they lack: the same release, the same bytes."""
    try:
        return _describe(card, manifest, read_schema(shards, manifest.shards[0].name)), ()
    except Exception as error:
        fault = (
            f"the metadata of the release were written without its columns ({type(error).__name__})"
        )
    return _describe(card, manifest, None), (fault,)


def _describe(card: Card, manifest: Manifest, types: pa.Schema | None) -> bytes:
    identifier = manifest.card_sha256[:32] if card.release is None else card.release.id
    about = card.about or About()
    content: dict[str, Any] = {
        "@context": json.loads(read_file(__package__, "croissant-context.json")),
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": card.name,
        "description": card.guarantee.text,
        "version": f"1.{(card.series or {}).get('release', 0)}.0",
        "identifier": identifier,
        "sdVersion": __version__,
        "isLiveDataset": False,
    }
    if about.licence:
        content["license"] = about.licence
    if about.issuer:
        content["creator"] = {"@type": "sc:Organization", "name": about.issuer}
    if about.purpose:
        content["rai:dataUseCases"] = about.purpose
    if card.release is not None:
        content["datePublished"] = card.release.time
    if about.issuer:
        content["citeAs"] = f"{about.issuer}: {card.name}, release {identifier}"
    content["rai:personalSensitiveInformation"] = card.guarantee.text
    files = [
        {
            "@type": "cr:FileObject",
            "@id": shard.name,
            "name": shard.name,
            "contentUrl": f"../{shard.name}",
            "contentSize": f"{shard.n_bytes} B",
            "encodingFormat": _PARQUET,
            "sha256": shard.sha256,
        }
        for shard in manifest.shards[:MAX_FILES]
    ]
    one = len(files) == 1
    content["distribution"] = files if one else [*files, _EVERY_SHARD]
    if types is not None:
        kind, place = ("fileObject", files[0]) if one else ("fileSet", _EVERY_SHARD)
        source = {kind: {"@id": place["@id"]}}
        fields = [_describe_field(card, field, source) for field in types]
        rows = {"@type": "cr:RecordSet", "@id": "rows", "name": "rows", "field": fields}
        content["recordSet"] = [rows]
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _describe_field(card: Card, field: pa.Field, source: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "@type": "cr:Field",
        "@id": f"rows/{field.name}",
        "name": field.name,
    }
    part = card.columns.get(field.name)
    if part is not None:
        found["description"] = ", ".join(filter(None, (part.role, part.kind)))
    known = {
        "sc:Boolean": pa.types.is_boolean,
        "sc:Integer": pa.types.is_integer,
        "sc:Float": pa.types.is_floating,
        "sc:Date": pa.types.is_date,
        "sc:DateTime": pa.types.is_timestamp,
    }
    found["dataType"] = next((name for name, is_ in known.items() if is_(field.type)), "sc:Text")
    return found | {"source": {**source, "extract": {"column": field.name}}}
