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

from dpdask.io.parquet import read_schema
from dpdask.io.shards import Manifest, Shard
from dpdask.io.storage import Folder
from dpdask.mechanisms.card import Card
from dpdask.version import __version__

CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
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
        fault = type(error).__name__
    return _describe(card, manifest, None), (
        f"the metadata of the release were written without its columns ({fault})",
    )


def _describe(card: Card, manifest: Manifest, types: pa.Schema | None) -> bytes:
    about, identifier = (
        card.about,
        card.release.id if card.release is not None else manifest.card_sha256[:32],
    )
    content: dict[str, Any] = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": card.name,
        "description": card.guarantee.text,
        "version": f"1.{(card.series or {}).get('release', 0)}.0",
        "identifier": identifier,
        "sdVersion": __version__,
        "isLiveDataset": False,
    }
    if about is not None:
        content |= {"license": about.licence} if about.licence else {}
        content |= (
            {"creator": {"@type": "sc:Organization", "name": about.issuer}} if about.issuer else {}
        )
        content |= {"rai:dataUseCases": about.purpose} if about.purpose else {}
    content |= {"datePublished": card.release.time} if card.release is not None else {}
    if about is not None and about.issuer:
        content["citeAs"] = f"{about.issuer}: {card.name}, release {identifier}"
    content["rai:personalSensitiveInformation"] = card.guarantee.text
    files = [_describe_file(shard) for shard in manifest.shards[:MAX_FILES]]
    source = (
        {"fileObject": {"@id": files[0]["@id"]}}
        if len(files) == 1
        else {"fileSet": {"@id": _EVERY_SHARD["@id"]}}
    )
    content["distribution"] = files if len(files) == 1 else [*files, _EVERY_SHARD]
    if types is not None:
        fields = [_describe_field(card, field, source) for field in types]
        content["recordSet"] = [
            {"@type": "cr:RecordSet", "@id": "rows", "name": "rows", "field": fields}
        ]
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _describe_file(shard: Shard) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": shard.name,
        "name": shard.name,
        "contentUrl": f"../{shard.name}",
        "contentSize": f"{shard.n_bytes} B",
        "encodingFormat": _PARQUET,
        "sha256": shard.sha256,
    }


def _describe_field(card: Card, field: pa.Field, source: Mapping[str, Any]) -> dict[str, Any]:
    part = card.columns.get(field.name)
    told = (
        {}
        if part is None
        else {"description": f"{part.role}{'' if part.kind is None else f', {part.kind}'}"}
    )
    source = {**source, "extract": {"column": field.name}}
    return {
        "@type": "cr:Field",
        "@id": f"rows/{field.name}",
        "name": field.name,
        **told,
        "dataType": _name_type(field.type),
        "source": source,
    }


def _name_type(type_: pa.DataType) -> str:
    known = (
        (pa.types.is_boolean, "sc:Boolean"),
        (pa.types.is_integer, "sc:Integer"),
        (pa.types.is_floating, "sc:Float"),
        (pa.types.is_date, "sc:Date"),
        (pa.types.is_timestamp, "sc:DateTime"),
    )
    return next((name for is_one, name in known if is_one(type_)), "sc:Text")
