"""Interval privacy on Dask and pandas frames: nothing is computed beforehand, and a lazy frame stays lazy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from dpdask.estimators.estimator import Estimator, validate_spec
from dpdask.estimators.release import Release
from dpdask.mechanisms.interval.design import Design
from dpdask.mechanisms.interval.spec import IntervalSpec
from dpdask.privacy import Budget


@dataclass(frozen=True, slots=True)
class IntervalMechanism(Estimator[Release]):
    """Random ranges instead of values: each private value is released as a range that contains it, or contains its perturbed value.

    Parameters
    ----------
    schema
        The declared columns.
    columns
        The design of each private column, as a job writes it: `{"price": {"design": "case2", "anchors": {…}}}`, or a
        design of `dpdask.mechanisms.interval.design`.
    coverage
        Whether `<column>_coverage` is released beside the ends: the range's probability under the design's public reference.
    insecure_seed
        For tests: anchors from a seed.

    Raises
    ------
    SpecError
        If a parameter is invalid, or the designs do not fit the columns.

    Privacy
    -------
    Unit: a value. There is no ε. Protected: where a value lies inside its released range. Not protected: that it lies in
    the range, and what else the design reveals (the card lists it). A column whose design is `interval-differential` is perturbed
    first: its values have the ε of its `perturb` under replace-one, and one row's ε is the sum over these columns
    (event: one local release of every row). A range's coverage is a function
    of the range and of what is public. Anchors and perturbations are a function of the mechanism, the batch, the column
    and the partition, never of a frame's content. A release takes one frame, the same Python object however often it is
    transformed or computed; further frames are named batches, each with its own ranges. If a row is in several batches, or
    in several releases, its ranges narrow each other, and k batches spend the ε of perturbed columns k times.
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
    >>> table = pd.DataFrame({"price": [10.0, 60.0]})
    >>> mechanism = dpdask.IntervalMechanism(schema, columns={"price": {"design": "case2", "anchors": anchors}})
    >>> list(mechanism.fit(table).transform(table).columns)
    ['price_lower', 'price_upper']
    """

    _: KW_ONLY
    columns: Mapping[str, Design | Mapping[str, Any]]
    coverage: bool = False

    def _spec(self) -> tuple[type[IntervalSpec], dict[str, Any]]:
        return IntervalSpec, {"columns": dict(self.columns), "coverage": self.coverage}

    def _budget(self) -> Budget | None:
        budget: Budget | None = validate_spec(self._spec()).least_budget
        return budget
