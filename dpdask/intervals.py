"""Interval privacy on Dask and pandas frames: nothing is computed beforehand, and a lazy frame stays lazy."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from dpdask.codec import codec_for
from dpdask.documents import validate
from dpdask.engine.batches import Batches
from dpdask.engine.forget import forget_everywhere
from dpdask.engine.frame_order import order_warning
from dpdask.engine.frames import Frame, frame_work, randomise_frame, secret_folder
from dpdask.engine.rows import COVERED_ROWS, RANGE_ROWS, write_designs
from dpdask.engine.work import KEY_NAME
from dpdask.errors import SpecError
from dpdask.io.storage import Folder
from dpdask.mechanisms.interval.card import interval_card
from dpdask.mechanisms.interval.design import Design, IntervalColumns
from dpdask.mechanisms.interval.differential import perturbed_columns, spending_of
from dpdask.mechanisms.interval.release import IntervalRelease, check_designs
from dpdask.privacy import Budget
from dpdask.reports.batches import with_batches
from dpdask.schema import Schema, arrow_type
from dpdask.streams import RunKey


@dataclass(frozen=True, slots=True)
class IntervalMechanism:
    """Random ranges instead of values: each private value is released as a range that contains it, or what a perturbation made of it.

    Parameters
    ----------
    schema
        The declared columns.
    columns
        The design of each private column, as a job writes it: `{"price": {"design": "case2", "anchors": {…}}}`, or a
        design of `dpdask.mechanisms.interval.design`.
    coverage
        Whether `<column>_coverage` is released beside the ends: the range's probability under the design's public reference.
    secrets
        A private folder, as a path or URL, that every worker can read; by default a new temporary one of this machine
        (mode 0700), removed when Python ends.
    insecure_seed
        For tests: anchors from a seed.

    Raises
    ------
    SpecError
        If a parameter is invalid, or the designs do not fit the columns.

    Privacy
    -------
    Unit: a value. There is no ε. Protected: where inside its released range a value lies. Not protected: that it lies in
    it, and what the design says besides (the card lists it). A column whose design is `interval-differential` is perturbed
    first: its values have the ε of its `perturb` under replace-one, and one row's ε is the sum over these columns
    (event: one local release of every row). A range's coverage is a function
    of the range and of what is public. Anchors and perturbations are a function of the mechanism, the batch, the column
    and the partition, never of a frame's content. A mechanism takes one frame, the same Python object however often it is
    privatised or computed; further frames are named batches, each with its own ranges. If a row is in several batches, or
    several mechanisms privatise it, its ranges narrow each other, and k batches spend the ε of perturbed columns k times.
    Rows keep the frame's order: if it is sorted by a private column, the position of a row reveals its value, so shuffle it
    first.

    References
    ----------
    Ding and Ding, Interval privacy: a framework for privacy-preserving data collection.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> schema = dpdask.Schema.from_dict({"columns": {"price": {"role": "privatise", "kind": "continuous"}}})
    >>> anchors = {"name": "uniform", "loc": 0, "scale": 100}
    >>> mechanism = dpdask.IntervalMechanism(schema, columns={"price": {"design": "case2", "anchors": anchors}})
    >>> list(mechanism.privatise(pd.DataFrame({"price": [10.0, 60.0]})).columns)
    ['price_lower', 'price_upper']
    """

    schema: Schema
    _: KW_ONLY
    columns: Mapping[str, Design | Mapping[str, Any]]
    coverage: bool = False
    secrets: str | None = None
    insecure_seed: int | None = None
    _designs: dict[str, Design] = field(init=False, repr=False)
    _folder: Folder = field(init=False, repr=False)
    _batches: Batches = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.schema.privatised:
            raise SpecError("the schema privatises no column", "IntervalMechanism", "give at least one column the role privatise")
        given = validate(IntervalColumns, {"columns": dict(self.columns)}, "IntervalMechanism").columns
        check_designs(self.schema, given, "columns", coverage=self.coverage)
        object.__setattr__(self, "_designs", {name: given[name] for name in self.schema.privatised})
        self._check_budget()
        object.__setattr__(self, "_folder", secret_folder(self.secrets))
        key = RunKey.fresh() if self.insecure_seed is None else RunKey.insecure(self.insecure_seed)
        self._folder.write(KEY_NAME, key.reveal(), private=True)
        object.__setattr__(self, "_batches", Batches(self._folder, several=True))

    def _check_budget(self) -> None:
        """Raise a SpecError if the perturbed columns spend more together than a budget can promise."""
        _ = self.budget

    @property
    def budget(self) -> Budget | None:
        """What one release of a row costs by its perturbed columns; None if there are none."""
        if not perturbed_columns(self._designs):
            return None
        return validate(Budget, {"epsilon": spending_of(self._designs).row_total}, "IntervalMechanism")

    def privatise(self, frame: Frame, batch: str | None = None) -> Frame:
        """Return a frame's rows with two columns of ends for each private one: lazily for Dask, at once for pandas.

        Rows keep their order and index; dropped columns are gone; kept columns are untouched. The ends are float64; of dates
        and times they count days, or the column's own unit (microseconds if that is finer), since 1970.

        Parameters
        ----------
        frame
            A Dask or pandas frame.
        batch
            A name for the frame. The first frame needs none; each further frame needs its own name, for instance `2026-11`.
            The card lists it.

        Raises
        ------
        SpecError
            If a design is not possible; if the batch is not a valid name, or belongs to another frame.
        DataError
            If the columns are not those of the schema, or (when computed) a value violates it, or the index is neither row
            numbers (a `RangeIndex`) nor a column that the schema keeps.

        Warns
        -----
        UserWarning
            If a pandas frame is sorted by a private column.
        """
        work = frame_work(frame, self.schema, None, self._folder)
        release = IntervalRelease.of(self._designs, work.codecs, coverage=self.coverage)
        name, kind = self._batches.take(frame, batch), COVERED_ROWS if self.coverage else RANGE_ROWS
        released = randomise_frame(frame, work, write_designs(release, self._folder), name, kind)
        warning = order_warning(frame, work)
        if warning is not None:
            warnings.warn(warning, stacklevel=2)
        return released

    @property
    def card(self) -> dict[str, Any]:
        """The release card: what ranges reveal, and the batches so far.

        A column whose type the schema does not declare is treated as floats, and the card gives no mean coverage for it: whole
        numbers are cut at whole anchors, so their ranges may leave less open.
        """
        types = {name: self.schema.columns[name].type for name in self._designs}
        declared = {name: codec_for(name, self.schema.columns[name], arrow_type(type_)) for name, type_ in types.items() if type_ is not None}
        codecs = {name: declared.get(name) or codec_for(name, self.schema.columns[name], arrow_type("float64")) for name in types}
        release = IntervalRelease.of(self._designs, codecs, coverage=self.coverage)
        card: dict[str, Any] = json.loads(
            interval_card(
                name="frame", release=release, schema=self.schema, codecs=declared, insecure=self.insecure_seed is not None, budget=self.budget
            )
        )
        for name in types.keys() - declared.keys():
            _without_mean(card["columns"][name])
        perturbed = perturbed_columns(self._designs)
        return with_batches(card, self._batches.names, epsilon=bool(perturbed), ranges=len(perturbed) < len(self._designs))

    def close(self) -> None:
        """Destroy the key, and clear what was made with it from workers' memory; frames not yet computed are lost."""
        self._folder.remove(KEY_NAME)
        self._folder.remove()
        forget_everywhere()


def _without_mean(column: dict[str, Any]) -> None:
    """Replace a column's coverage, which is known of floats alone, by the reason why there is none."""
    if column.pop("mean_coverage", None) is not None:
        column.pop("leakage", None)
        column["mean_coverage_unknown"] = "the schema declares no type: of whole numbers ranges may leave less open"
