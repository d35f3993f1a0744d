"""Distribution-invariant privatisation of Dask and pandas frames: `fit` is the barrier, `transform` is lazy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

from dpdask.errors import SpecError
from dpdask.estimators.estimator import Estimator, make_budget
from dpdask.estimators.release import Release
from dpdask.mechanisms.dip.spec import ChannelKind, Cost, DipSpec
from dpdask.privacy import Budget, UnitColumn
from dpdask.references import Reference


@dataclass(frozen=True, slots=True)
class DIP(Estimator[Release]):
    """Distribution-invariant privatisation: each row's private values are randomised, and their distribution is preserved.

    Parameters
    ----------
    schema
        The declared columns.
    epsilon
        ε of a row, in (0, 100]; shared among its private columns.
    delta
        δ, in [0, 1): 0 unless the reference is a `Tree`, whose noisy tables spend all of it. Take it far below 1 / rows.
    reference
        `Holdout(fraction=…)`, `Histogram()`, `Public()` or `Known(columns=…)`, each column by its own marginal distribution,
        `Chain(fraction=…)`, all columns jointly, or `Tree()`, the pairs of columns that depend most on each other: where
        the reference distribution comes from, and therefore who is protected. There is no default.
    channel
        `laplace`: as published. `laplace-calibrated`: the same noise, as small as ε allows. `optimal`: the invariant
        ε-private channel of least expected cost. `optimal-unbiased`: the best of those whose expected released value is
        linear in the original value: every mean, group mean and slope of numbers or dates can then be estimated without bias.
    cost
        What the optimal channel minimises, by column: `value`, `rank`, `zero-one`, or a matrix over the levels.
    weights
        How ε is shared among the private columns; equally if not given.
    unit
        What is protected: `row`, or `UnitColumn(column=…, max_rows=…)`: all rows that share a column's value, of which at
        most `max_rows` are released.
    insecure_seed
        For tests: noise from a seed, which protects nobody.

    Raises
    ------
    SpecError
        If a parameter is invalid.

    Privacy
    -------
    Unit: a row, or with `unit` all rows that share a column's value. Adjacency: replace-one. Protected: the values of the
    released rows. Not protected: held-out rows (they shape the output and are not released; a `Chain`
    republishes them, levels exactly), kept columns, the number and
    the order of rows. Sensitivity: none for the rows, each is randomised on its own; 2 for a `Histogram`'s counts (2 ·
    max_rows with a unit), and for each of a `Tree`'s tables. Event: one local release of every row, and one discrete Laplace
    measurement of every private column where the reference is a `Histogram`, or a discrete Laplace or Gaussian one of each
    of a `Tree`'s tables; that noise is drawn by `fit`. Row noise is a function of the release, the batch, the column and
    the partition, never of a frame's content, so recomputing a lazy frame repeats the same noise. A release covers one
    frame, which must be the same Python object every time. With `Holdout`, `Histogram`, `Tree`, `Chain(fraction=…)` or a
    unit, it is the frame given to `fit`. With `Known` or a public table, it is any frame, and further frames are named
    batches, each with its own noise: a row in k batches is protected by k·ε. Every new `fit` on the same rows spends ε
    again. Rows keep the frame's order: if it is sorted by a private column, the position of a row reveals its value, so
    shuffle it first.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, Algorithm 1, each column by its own marginal distribution; (2) and (10) for a
    `Chain`, (2) for a `Tree`.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}}})
    >>> table = pd.DataFrame({"x": [0, 1] * 50})
    >>> release = dpdask.DIP(schema, epsilon=1.0, reference=dpdask.Holdout(fraction=0.5)).fit(table)
    >>> set(release.transform(table)["x"]) <= {0, 1}
    True
    """

    _: KW_ONLY
    epsilon: float
    delta: float = 0.0
    reference: Reference
    channel: ChannelKind = "laplace"
    cost: Mapping[str, Cost] | None = None
    weights: Mapping[str, float] | None = None
    unit: UnitColumn | Literal["row"] = "row"

    def __post_init__(self) -> None:
        Estimator.__post_init__(self)
        if self.mechanism.public_table is not None:
            raise SpecError("a path is for jobs only", "`reference.path`", "remove it, and hand the public table to fit")
        if self.unit != "row" and self.mechanism.reference_rows == "public":
            what = "a public reference is fitted on a table that has no units to bound"
            raise SpecError(what, "`unit`", "run it as a job, or use another reference")

    def _spec(self) -> tuple[type[DipSpec], dict[str, Any]]:
        if not isinstance(self.reference, get_args(Reference)):
            what = "a reference must be named: it decides who is protected"
            raise SpecError(what, "`reference`", "give Holdout(...), Histogram(), Public(), Known(...), Chain(...) or Tree(...)")
        given = {"reference": self.reference, "channel": self.channel, "cost": self.cost, "weights": self.weights}
        return DipSpec, given

    def _budget(self) -> Budget:
        return make_budget(self.epsilon, self.delta, unit=self.unit)
