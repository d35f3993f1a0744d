"""`dpdask discover`: the job that finds the levels of another job's columns, and writes them into its schema."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from dpdask.conditions import Level
from dpdask.documents import Text, parse_yaml, read_text
from dpdask.domains import DISCOVER
from dpdask.errors import InternalError, OutputError, SpecError
from dpdask.io.shards import CARD_NAME
from dpdask.io.storage import Folder
from dpdask.jobs.draft import wrap_levels, write_level
from dpdask.jobs.run import Outcome
from dpdask.jobs.spec import Job, load_job, opens_stores
from dpdask.mechanisms.card import Card
from dpdask.mechanisms.discover import DiscoverMechanism
from dpdask.mechanisms.levels import COLUMN, LEVEL
from dpdask.schema import Schema

KIND = "discover"


def load_discovery(
    path: str | Path,
    settings: Mapping[str, str] | None = None,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
) -> Job:
    """Return the job that finds the levels that another job's schema does not know.

    It reads the same table with the same unit, and is charged to the same ledger. Its output lies
    beside the schema. A job whose mechanism is `discover` is taken as it is.

    Parameters
    ----------
    path, settings
        As for `load_job`; settings are of the job in the file.
    epsilon, delta
        What the search costs; δ by default that of the job.
    """
    given = {"epsilon": epsilon, "delta": delta}
    own = {key: value for key, value in given.items() if value is not None}
    job = load_job(path, settings, partial(_derive, own))
    if isinstance(job.mechanism, DiscoverMechanism):
        # a text that cannot be edited is told before the search is paid
        names = job.mechanism.schema.privatised
        others = {name: job.schema.columns[name].list_found(()) for name in names}
        _edit(_read_schema(job, path)[1], others, '{"epsilon": 1.0, "delta": 0.5}')
    return job


def _derive(own: Mapping[str, float], data: dict[str, Any]) -> None:
    """Make the search of a job as it stands in its file."""
    mechanism, privacy = data.get("mechanism"), data.get("privacy")
    privacy = {**(privacy if isinstance(privacy, Mapping) else {}), **own}
    data["privacy"] = privacy
    if isinstance(mechanism, Mapping) and mechanism.get("kind") == KIND:
        return
    if "epsilon" not in own:
        what = "the ε of the search is not given"
        raise SpecError(what, "--epsilon", "give it: it is spent beside that of the job's release")
    data |= {
        "name": f"{data.get('name', '')}, levels",
        "mechanism": {"kind": KIND},
        "output": {"path": str(Path(str(data.get("schema"))).with_suffix(".levels"))},
    }
    data.pop("growing", None)
    data.pop("parents", None)  # the levels of the rows alone are found
    if isinstance(unit := privacy.get("unit"), Mapping):  # no number of rows is published
        privacy["unit"] = {key: value for key, value in unit.items() if key != "publish_counts"}


def find_written(path: str | Path, settings: Mapping[str, str]) -> dict[str, Any] | None:
    """Return how many levels a job's schema has of columns whose levels were found, if none is yet to be found; else None."""
    hint = "check its path"
    data = parse_yaml(read_text(path, "the job cannot be read", hint).content, Path(path).name)
    with suppress(SpecError, TypeError):  # which the job itself tells
        data["schema"] = settings.get("schema", data.get("schema", ""))
        place = Path(path).parent / data["schema"]
        columns = Schema.from_text(read_text(place, "", "")).columns
        found = {name: each.n_found for name, each in columns.items() if each.found}
        if found and not any(each.discovers for each in columns.values()):
            levels = {name: {"found": n, "written": n} for name, n in found.items()}
            told = {"name": data.get("name"), "status": "found already", "insecure": False}
            return {**told, "schema": data["schema"], "levels": levels, "warnings": []}
    return None


@opens_stores
def write_levels(job: Job, path: str | Path, outcome: Outcome) -> dict[str, Any]:
    """Write the levels that a job has found into its schema, and return what is told of it.

    The commonest are written, as many as a column may have. To do it twice changes nothing: columns
    whose levels are listed by now are left alone.

    Parameters
    ----------
    path
        The file of the job, beside which its schema lies.
    """
    place, text = _read_schema(job, path)
    output = Folder(job.output_url)
    rows = pa.concat_tables(
        pq.read_table(pa.BufferReader(output.read(shard.name))) for shard in outcome.manifest.shards
    )
    card = Card.read(output.read(CARD_NAME), CARD_NAME)
    told, levels = dict[str, dict[str, int]](), dict[str, tuple[Level, ...]]()
    for name in job.mechanism.schema.privatised:
        found = rows.filter(pc.equal(rows[COLUMN], name))[LEVEL].to_pylist()
        column = job.schema.columns[name]
        other = column.other
        read: Callable[[str], Any] = str if isinstance(other, str) else int
        if isinstance(other, dt.date):
            read = dt.date.fromisoformat
        values = [each for each in map(read, found) if each not in column.ancestors.roots]
        levels[name] = column.list_found(values)
        written = column.model_copy(update={"levels": levels[name]})
        told[name] = {"found": len(values), "written": written.n_found}
    # where levels come from, as a flow mapping that YAML and JSON read alike
    source: dict[str, Any] = {
        "epsilon": card.guarantee.epsilon,
        "delta": card.guarantee.delta,
        "insecure": card.insecure or None,
        "date": None if card.release is None else card.release.time[:10],
        "release": None if card.release is None else card.release.id,
        "entry": None if card.ledger is None else card.ledger.entry,
    }
    # YAML takes 1e-06 for a text, and both read 1.0e-06
    texts = {
        key: text.replace("e", ".0e") if re.fullmatch(r"\d+e-\d+", text) else text
        for key, text in ((key, json.dumps(value)) for key, value in source.items())
        if text != "null"
    }
    edited = _edit(
        text, levels, "{" + ", ".join(f'"{key}": {text}' for key, text in texts.items()) + "}"
    )
    if edited != text.content:
        Folder(str(place.parent)).write(place.name, edited.encode())
    return {
        "name": job.file.name,
        "status": outcome.status,
        "output": outcome.output,
        "schema": job.file.schema_path,
        "levels": told,
        "epsilon": card.guarantee.epsilon,
        "delta": card.guarantee.delta,
        "insecure": card.insecure,
    }


def _read_schema(job: Job, path: str | Path) -> tuple[Path, Text]:
    """Return where the schema of a job lies, and its text with the ends of its lines as they are."""
    place = (Path(path).parent / job.file.schema_path).resolve()
    try:
        return place, Text(place.name, place.read_bytes().decode(), folder=str(place.parent))
    except (OSError, UnicodeDecodeError) as error:
        what = f"the schema cannot be read any more ({type(error).__name__})"
        raise OutputError(what, str(place), "restore it, and run again") from None


def _edit(text: Text, levels: Mapping[str, tuple[Level, ...]], provenance: str) -> str:
    """Return the text of a schema with levels and their source in place of the word `discover`; those of columns whose levels are listed by now stay."""
    columns = _find(yaml.compose(text.content, Loader=yaml.SafeLoader), "columns")
    edits, expected = dict[tuple[int, int], str](), dict[str, tuple[Level, ...]]()
    for name, listed in levels.items():
        column = _find(columns, name)
        node = _find(column, "levels")
        place = None if node is None else (node.start_mark.index, node.end_mark.index)
        # a text of several lines ends beyond its value, and of an alias the place is another's
        is_block = isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")
        if not isinstance(column, yaml.MappingNode) or place is None or is_block or place in edits:
            what = "its `levels: discover` does not stand in the schema's text under its name"
            hint = "write the column out in plain lines, without an anchor"
            raise SpecError(what, f"column {name!r}", hint)
        if isinstance(node, yaml.ScalarNode) and node.value == DISCOVER:
            source = f', "found": {provenance}'
            if not column.flow_style:
                source = f"\n{' ' * column.start_mark.column}found: {provenance}"
            edits[place] = wrap_levels(map(write_level, listed)) + source
            expected[name] = listed
    edited = text.content
    for start, end in sorted(edits, reverse=True):
        edited = edited[:start] + edits[start, end] + edited[end:]
    read = Schema.from_text(replace(text, content=edited)).columns
    if any(read[name].levels != listed for name, listed in expected.items()):
        raise InternalError("the levels would be read as others", text.name, "report it")
    return edited


def _find(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """Return the value of a key of a mapping."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for name, value in pairs if name.value == key), None)
