"""Dask and pandas frames as tables: surveyed at once, randomised lazily, each partition under an identity of its own."""

from __future__ import annotations

import atexit
import tempfile
import uuid
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, TypeAlias

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
from dask import delayed
from dask.base import tokenize

from dpdask.codec import LevelCodec, codec_for
from dpdask.engine.compute import guarded, run_tasks, task_prefix
from dpdask.engine.reduce import tree_reduce
from dpdask.engine.release import load_release
from dpdask.engine.survey import Statistic, Survey, merge_surveys, survey_batches
from dpdask.engine.work import TableWork
from dpdask.errors import DataError
from dpdask.io.storage import Folder, absolute_url
from dpdask.schema import Schema
from dpdask.stats import holdout_mask
from dpdask.stats.holdout import HOLDOUT_ID
from dpdask.streams import stream

Frame: TypeAlias = Any  # a pandas.DataFrame or a dask.dataframe.DataFrame; neither ships types that agree


def secret_folder(secrets: str | None) -> Folder:
    """Return a new private folder for a run key, removed when Python ends: inside `secrets`, or temporary."""
    if secrets is None:
        folder = Folder(absolute_url(tempfile.mkdtemp(prefix="dpdask-")))
    else:
        folder = Folder(absolute_url(secrets)).child(f"release-{uuid.uuid4().hex[:12]}")
        folder.create(private=True)
    atexit.register(folder.remove)
    return folder


def identity(frame: Frame) -> str:
    """Return what names a frame: its content for pandas, its expression for Dask."""
    return str(tokenize(frame)) if isinstance(frame, pd.DataFrame) else str(frame._name)


def _parts(frame: Frame) -> list[tuple[str, Any]]:
    """Return each partition with its fragment id, fixed now: a partition's number may change when Dask optimises."""
    parts = [frame] if isinstance(frame, pd.DataFrame) else frame.to_delayed(optimize_graph=False)
    name = identity(frame)
    return [(blake2b(f"{name}:{number}".encode(), digest_size=16).hexdigest(), part) for number, part in enumerate(parts)]


def frame_work(frame: Frame, schema: Schema, fraction: float | None, secrets: Folder) -> TableWork:
    """Return the work on a frame whose columns were checked against the schema; nothing is computed."""
    meta = frame.head(0) if isinstance(frame, pd.DataFrame) else frame._meta
    schema.check_names(list(meta.columns))
    types = pa.schema([pa.field(name, _arrow_type(meta[name])) for name in meta])
    released = schema.released(types)
    codecs = {name: codec_for(name, schema.columns[name], released.field(name).type) for name in schema.privatised}
    return TableWork(types=types, released=released, codecs=codecs, fraction=fraction, secrets=secrets)


def _arrow_type(column: pd.Series) -> pa.DataType:
    """Return the Arrow type of an empty column; one of plain objects is taken for text."""
    return pa.string() if column.dtype == object else pa.Schema.from_pandas(column.to_frame(), preserve_index=False).field(0).type


def survey_frame(frame: Frame, work: TableWork) -> Mapping[str, Statistic]:
    """Compute the statistics of a frame's reference rows: the barrier.

    Raises
    ------
    DataError
        If a value violates the schema.
    """
    prefix, call = task_prefix("survey"), delayed(_survey_part, pure=False)
    leaves = [call(part, fragment_id, work, dask_key_name=f"{prefix}-{number}") for number, (fragment_id, part) in enumerate(_parts(frame))]
    [found] = run_tasks("survey", [tree_reduce(leaves, merge_surveys, f"{prefix}-merge")])
    assert isinstance(found, Survey)
    return found.statistics


def randomise_frame(frame: Frame, work: TableWork, release_sha256: str) -> Frame:
    """Return a frame's released rows: lazily for Dask, at once for pandas; the same frame, the same noise."""
    meta = _released_meta(frame.head(0) if isinstance(frame, pd.DataFrame) else frame._meta, work)
    parts = _parts(frame)
    if isinstance(frame, pd.DataFrame):
        [(fragment_id, part)] = parts
        return _randomise_part(part, fragment_id, work, release_sha256, meta)
    prefix, call = task_prefix("transform"), delayed(_randomise_part, pure=False)
    calls = [
        call(part, fragment_id, work, release_sha256, meta, dask_key_name=f"{prefix}-{number}") for number, (fragment_id, part) in enumerate(parts)
    ]
    divisions = frame.divisions if frame.known_divisions else None
    return dd.from_delayed(calls, meta=meta, divisions=divisions, prefix=prefix, verify_meta=True)


def _batch(part: pd.DataFrame, work: TableWork) -> pa.RecordBatch:
    """Return the private columns of a partition as Arrow."""
    wanted = pa.schema([pa.field(name, work.released.field(name).type) for name in work.codecs])
    try:
        return pa.RecordBatch.from_pandas(part[list(work.codecs)], schema=wanted, preserve_index=False)
    except (pa.ArrowException, KeyError, TypeError, ValueError):  # these quote values
        raise DataError("a partition's values do not fit the frame's dtypes", "frame", "give every partition the dtypes of its meta") from None


@guarded
def _survey_part(part: pd.DataFrame, fragment_id: str, work: TableWork) -> Survey:
    return survey_batches([_batch(part, work)], fragment_id, work)


@guarded
def _randomise_part(part: pd.DataFrame, fragment_id: str, work: TableWork, sha256: str, meta: pd.DataFrame) -> pd.DataFrame:
    release, key = load_release(work.secrets, sha256), work.key()
    if work.fraction is not None:
        part = part[np.logical_not(holdout_mask(stream(key, HOLDOUT_ID, fragment_id), len(part), work.fraction))]
    batch = release.randomise(_batch(part, work), work.codecs, release.streams(key, fragment_id))
    released = part[list(meta.columns)].copy()
    for name in work.codecs:
        released[name] = batch.column(name).to_pandas().set_axis(part.index).astype(meta[name].dtype)
    return released


def _released_meta(meta: pd.DataFrame, work: TableWork) -> pd.DataFrame:
    """Return the empty released frame; a private categorical's categories become its public levels."""
    released = meta[work.released.names].copy()
    for name, codec in work.codecs.items():
        if isinstance(codec, LevelCodec) and isinstance(released[name].dtype, pd.CategoricalDtype):
            levels = codec.levels.drop_null().to_pandas()
            released[name] = released[name].astype(pd.CategoricalDtype(levels, ordered=codec.ordered))
    return released  # type: ignore[no-any-return]  # pandas is untyped here
