"""Distribution-invariant privatisation of Dask and pandas frames: `fit` is the barrier, `transform` is lazy."""

from __future__ import annotations

import atexit
import json
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from hashlib import blake2b
from typing import Any, Literal, TypeAlias

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
from dask import delayed
from dask.base import tokenize

from dpdask.codec import LevelCodec, codec_for
from dpdask.documents import validate
from dpdask.engine.compute import guarded, run_tasks, task_prefix
from dpdask.engine.reduce import tree_reduce
from dpdask.engine.release import distributions, load_release, write_release
from dpdask.engine.survey import Survey, merge_surveys, survey_batches
from dpdask.engine.work import KEY_NAME, TableWork
from dpdask.errors import DataError, SpecError
from dpdask.io.storage import Folder, absolute_url
from dpdask.mechanisms import fit_dip
from dpdask.privacy import Budget, split_epsilon
from dpdask.references import Holdout, Known, Public, Reference
from dpdask.reports.card import release_card
from dpdask.schema import Schema
from dpdask.stats import holdout_mask
from dpdask.stats.holdout import HOLDOUT_ID
from dpdask.streams import RunKey, stream

Frame: TypeAlias = Any  # a pandas.DataFrame or a dask.dataframe.DataFrame; neither ships types that agree


@dataclass(frozen=True, slots=True)
class DIP:
    """Distribution-invariant privatisation: each row's private values are randomised, their distribution stays.

    Parameters
    ----------
    schema
        The declared columns.
    epsilon
        ε of a row, in (0, 100]; shared among its private columns.
    reference
        `Holdout(fraction=…)`, `Public()` or `Known(columns=…)`: where the reference distribution comes from, and
        therefore who is protected. There is no default.
    channel
        `laplace`, as published.
    weights
        How ε is shared among the private columns; equally if not given.
    insecure_seed
        For tests: noise from a seed, which protects nobody.

    Raises
    ------
    SpecError
        If a parameter is invalid.

    Privacy
    -------
    Unit: a row. Adjacency: replace-one. Protected: the values of the released rows. Not protected: held-out rows (they
    shape the output and are not released), kept columns, the number of rows. Central noise: none. Row noise is a
    function of the run key, the column and the partition, so recomputing a lazy frame repeats the same noise. ε is spent
    again by every new `fit` on the same rows.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, Algorithm 1, each column by its own margin.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}}})
    >>> table = pd.DataFrame({"x": [0, 1] * 50})
    >>> release = dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Holdout(fraction=0.5)).fit(table)
    >>> set(release.transform(table)["x"]) <= {0, 1}
    True
    """

    schema: Schema
    _: KW_ONLY
    epsilon: float
    reference: Reference
    channel: Literal["laplace"] = "laplace"
    weights: Mapping[str, float] | None = None
    insecure_seed: int | None = None

    def __post_init__(self) -> None:
        validate(Budget, {"epsilon": self.epsilon}, "DIP")
        if not isinstance(self.reference, Holdout | Public | Known):
            raise SpecError("a reference must be named: it decides who is protected", "DIP", "give Holdout(...), Public() or Known(...)")
        if self.channel != "laplace":
            raise SpecError("there is no such channel", "DIP", "use 'laplace'")
        if not self.schema.privatised:
            raise SpecError("the schema privatises no column", "DIP", "give at least one column the role privatise")
        split_epsilon(self.epsilon, self.schema.privatised, self.weights)

    def fit(self, frame: Frame, *, secrets: str | None = None) -> Release:
        """Compute the reference and return the fitted release: the one barrier.

        Parameters
        ----------
        frame
            A Dask or pandas frame. With `Holdout`, the table to release; with `Public`, the public table; with `Known`,
            any frame of the table's columns (nothing of it is computed).
        secrets
            A private folder, as a path or URL, that every worker can read; by default a new temporary one of this
            machine (mode 0700), removed when Python ends.

        Raises
        ------
        DataError
            If the frame violates the schema, or the reference has fewer than 2 rows.
        """
        folder = _secret_folder(secrets)
        key = RunKey.fresh() if self.insecure_seed is None else RunKey.insecure(self.insecure_seed)
        folder.write(KEY_NAME, key.reveal(), private=True)
        work = _frame_work(frame, self.schema, self.reference, folder)
        statistics: Mapping[str, Any] = {}
        if not isinstance(self.reference, Known):
            prefix, call = task_prefix("survey"), delayed(_survey_part, pure=False)
            leaves = [call(part, fragment_id, work, dask_key_name=f"{prefix}-{number}") for number, (fragment_id, part) in enumerate(_parts(frame))]
            [found] = run_tasks("survey", [tree_reduce(leaves, merge_surveys, f"{prefix}-merge")])
            statistics = found.statistics
        epsilons = split_epsilon(self.epsilon, self.schema.privatised, self.weights)
        fitted = fit_dip(distributions(self.reference, work, statistics), work.codecs, epsilons)
        return Release(
            dip=self,
            work=work,
            sha256=write_release(fitted, folder),
            fitted_on=_identity(frame) if isinstance(self.reference, Holdout) else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Release:
    """A fitted release; made by `DIP.fit`.

    Attributes
    ----------
    dip
        What was asked for.
    work
        The columns' types and codecs, and the place of the run key.
    sha256
        Of the fitted release.
    fitted_on
        The identity of the frame whose hold-out it is, or None without a hold-out.
    """

    dip: DIP
    work: TableWork
    sha256: str
    fitted_on: str | None

    def transform(self, frame: Frame) -> Frame:
        """Return the released rows of a frame: lazily for Dask, at once for pandas.

        Rows keep their order and index; held-out rows and dropped columns are gone; kept columns are untouched.

        Parameters
        ----------
        frame
            With a hold-out, the frame that the release was fitted on; otherwise any frame of the same columns.

        Raises
        ------
        SpecError
            If the hold-out belongs to another frame, whose held-out rows would be released.
        DataError
            If the columns are not those of the schema, or (when computed) a value violates it.

        Privacy
        -------
        Transforming the same frame again repeats the same noise and costs nothing more. The same rows in a frame built
        otherwise are another release, and cost ε again.
        """
        if self.fitted_on is not None and _identity(frame) != self.fitted_on:
            raise SpecError("a hold-out release covers only the frame it was fitted on", "transform", "transform that very frame, or fit anew")
        found = _frame_work(frame, self.dip.schema, self.dip.reference, self.work.secrets)
        if not found.released.equals(self.work.released):
            raise DataError("the columns or their types differ from those of the fitted frame", "transform", "give both frames the same types")
        meta = _released_meta(frame.head(0) if isinstance(frame, pd.DataFrame) else frame._meta, self.work)
        parts = _parts(frame)
        if isinstance(frame, pd.DataFrame):
            [(fragment_id, part)] = parts
            released: pd.DataFrame = _randomise_part(part, fragment_id, self.work, self.sha256, meta)
            return released
        prefix, call = task_prefix("transform"), delayed(_randomise_part, pure=False)
        calls = [call(part, fragment_id, self.work, self.sha256, meta, dask_key_name=f"{prefix}-{number}") for number, (fragment_id, part) in enumerate(parts)]
        divisions = frame.divisions if frame.known_divisions else None
        return dd.from_delayed(calls, meta=meta, divisions=divisions, prefix=prefix, verify_meta=True)

    @property
    def card(self) -> dict[str, Any]:
        """The release card: what was promised, to whom, and how; safe to publish."""
        dip, release = self.dip, load_release(self.work.secrets, self.sha256)
        card: dict[str, Any] = json.loads(
            release_card(
                name="frame",
                budget=validate(Budget, {"epsilon": dip.epsilon}, "DIP"),
                reference=dip.reference,
                schema=dip.schema,
                codecs=self.work.codecs,
                epsilons=split_epsilon(dip.epsilon, dip.schema.privatised, dip.weights),
                release=release,
                insecure=dip.insecure_seed is not None,
            )
        )
        return card

    def close(self) -> None:
        """Destroy the run key: frames that are not yet computed can no longer be."""
        self.work.secrets.remove(KEY_NAME)


def _secret_folder(secrets: str | None) -> Folder:
    if secrets is None:
        folder = Folder(absolute_url(tempfile.mkdtemp(prefix="dpdask-")))
    else:
        folder = Folder(absolute_url(secrets)).child(f"release-{uuid.uuid4().hex[:12]}")
        folder.create(private=True)
    atexit.register(folder.remove)
    return folder


def _identity(frame: Frame) -> str:
    """Return what names a frame: its content for pandas, its expression for Dask."""
    return str(tokenize(frame)) if isinstance(frame, pd.DataFrame) else str(frame._name)


def _parts(frame: Frame) -> list[tuple[str, Any]]:
    """Return each partition with its fragment id, fixed now: a partition's number may change when Dask optimises."""
    parts = [frame] if isinstance(frame, pd.DataFrame) else frame.to_delayed(optimize_graph=False)
    identity = _identity(frame)
    return [(blake2b(f"{identity}:{number}".encode(), digest_size=16).hexdigest(), part) for number, part in enumerate(parts)]


def _frame_work(frame: Frame, schema: Schema, reference: Reference, folder: Folder) -> TableWork:
    """Return the work on a frame whose columns were checked against the schema; nothing is computed."""
    meta = frame.head(0) if isinstance(frame, pd.DataFrame) else frame._meta
    schema.check_names(list(meta.columns))
    fields = [pa.field(name, pa.string() if meta[name].dtype == object else pa.Schema.from_pandas(meta[[name]], preserve_index=False).field(0).type) for name in meta]
    types = pa.schema(fields)
    released = schema.released(types)
    codecs = {name: codec_for(name, schema.columns[name], released.field(name).type) for name in schema.privatised}
    fraction = reference.fraction if isinstance(reference, Holdout) else None
    return TableWork(types=types, released=released, codecs=codecs, fraction=fraction, secrets=folder)


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
    released: pd.DataFrame = part[list(meta.columns)].copy()
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
    return released
