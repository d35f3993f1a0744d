"""Distribution-invariant privatisation of Dask and pandas frames: `fit` is the barrier, `transform` is lazy."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

from dpdask.documents import validate
from dpdask.engine.batches import FITTED, PUBLIC, Batches
from dpdask.engine.forget import forget_everywhere
from dpdask.engine.frame_order import order_warning
from dpdask.engine.frames import Frame, bound_frame, frame_work, identity, randomise_frame, secret_folder, survey_frame
from dpdask.engine.release import fit_release, load_release, write_release
from dpdask.engine.synthetic_frames import tabulate_frame
from dpdask.engine.tabulate import ALL_PAIRS, check_size, domain_of
from dpdask.engine.work import KEY_NAME, TableWork
from dpdask.errors import DataError, SpecError
from dpdask.mechanisms.dip.card import release_card
from dpdask.mechanisms.dip.chain_fit import check_rank_costs
from dpdask.mechanisms.dip.fit import ChannelKind, Cost
from dpdask.mechanisms.dip.fitted import FittedRelease
from dpdask.mechanisms.dip.tree_fit import check_tree, fit_tree
from dpdask.mechanisms.dip.tree_spending import TreeSpending, spend_tree
from dpdask.mechanisms.dip.tree_tables import measure_tree
from dpdask.mechanisms.spending import Spending, spend
from dpdask.privacy import Budget, UnitColumn
from dpdask.references import Chain, Known, Reference, Tree, held_out, is_public_table
from dpdask.reports.batches import with_batches
from dpdask.schema import Schema
from dpdask.streams import RunKey, stream


@dataclass(frozen=True, slots=True)
class DIP:
    """Distribution-invariant privatisation: each row's private values are randomised, their distribution stays.

    Parameters
    ----------
    schema
        The declared columns.
    epsilon
        ε of a row, in (0, 100]; shared among its private columns.
    delta
        δ, in [0, 1): 0 unless the reference is a `Tree`, whose noisy tables spend all of it. Take it far below 1 / rows.
    reference
        `Holdout(fraction=…)`, `Histogram()`, `Public()` or `Known(columns=…)`, each column by its own margin,
        `Chain(fraction=…)`, all columns jointly, or `Tree()`, the pairs of columns that depend most on each other: where
        the reference distribution comes from, and therefore who is protected. There is no default.
    channel
        `laplace`: as published. `laplace-calibrated`: the same noise, as small as ε allows. `optimal`: the invariant
        ε-private channel of least expected cost.
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
    Bi and Shen, Distribution-invariant differential privacy, Algorithm 1, each column by its own margin; (2) and (10) for a
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

    schema: Schema
    _: KW_ONLY
    epsilon: float
    delta: float = 0.0
    reference: Reference
    channel: ChannelKind = "laplace"
    cost: Mapping[str, Cost] | None = None
    weights: Mapping[str, float] | None = None
    unit: UnitColumn | Literal["row"] = "row"
    insecure_seed: int | None = None

    def __post_init__(self) -> None:
        _ = self.budget
        if not isinstance(self.reference, get_args(Reference)):
            what = "a reference must be named: it decides who is protected"
            raise SpecError(what, "DIP", "give Holdout(...), Histogram(), Public(), Known(...), Chain(...) or Tree(...)")
        if self.delta and not isinstance(self.reference, Tree):
            raise SpecError("distribution-invariant privatisation is pure ε and spends no δ", "DIP, delta", "set it to 0, or take Tree(...)")
        if self.channel not in get_args(ChannelKind):
            raise SpecError("there is no such channel", "DIP", f"use one of {', '.join(get_args(ChannelKind))}")
        if not self.schema.privatised:
            raise SpecError("the schema privatises no column", "DIP", "give at least one column the role privatise")
        _ = self.spending
        if isinstance(self.reference, Chain):
            self.reference.check(self.schema, self.budget.unit_column)
            check_rank_costs(self.cost or {}, self.schema.privatised, self.channel)
            if self.reference.path is not None:
                raise SpecError("a path belongs to a job", "Chain", "remove it, and hand the public table to fit")
        if self.unit != "row" and is_public_table(self.reference):
            raise SpecError("a public reference is fitted on a table that has no units to bound", "DIP", "run it as a job, or use another reference")

    def fit(self, frame: Frame, *, secrets: str | None = None) -> Release:
        """Compute the reference and return the fitted release: the one barrier.

        Parameters
        ----------
        frame
            A Dask or pandas frame. With `Public`, or a `Chain` without a fraction: the public table. With `Known`: any frame
            with the table's columns (it is not computed; with a unit, give the table itself). Otherwise: the table to
            release, and only this same Python object can be transformed, so persist, filter or sort it before.
        secrets
            A private folder, as a path or URL, that every worker can read; by default a new temporary one of this
            machine (mode 0700), removed when Python ends.

        Raises
        ------
        DataError
            If the frame violates the schema, or the reference has fewer than 2 rows.
        SpecError
            If the columns have too many cells for the tables or channels of a `Tree`.

        Warns
        -----
        UserWarning
            If δ is not below 1 / the number of rows; about what a `Chain` republishes; if a pandas frame that is to be
            released is sorted by a private column.
        """
        for warning in self.reference.warnings() if isinstance(self.reference, Chain) else ():
            warnings.warn(warning, stacklevel=2)
        folder = secret_folder(secrets)
        key = RunKey.fresh() if self.insecure_seed is None else RunKey.insecure(self.insecure_seed)
        folder.write(KEY_NAME, key.reveal(), private=True)
        work = frame_work(frame, self.schema, self.reference, folder, self.budget.unit_column)
        if isinstance(self.reference, Tree):
            check_tree(work.cells, self.channel, self.cost)
            check_size(domain_of(work.cells), ALL_PAIRS, "bins")
        batches = Batches(folder, several=(isinstance(self.reference, Known) and work.unit is None) or is_public_table(self.reference))
        if not batches.several:
            batches.take(frame)
        work = bound_frame(frame, work)
        n_rows: int | None = None
        if isinstance(self.reference, Tree):
            fitted, n_rows = self._fit_tree(frame, work)
        else:
            fitted = self._fit_statistics(frame, work)
        sorted_by = None if batches.several else order_warning(frame, work)
        if sorted_by is not None:
            warnings.warn(sorted_by, stacklevel=2)
        public = identity(frame) if is_public_table(self.reference) else None
        return Release(dip=self, work=work, sha256=write_release(fitted, folder), batches=batches, public=public, n_rows=n_rows)

    def _fit_statistics(self, frame: Frame, work: TableWork) -> FittedRelease:
        batch = PUBLIC if is_public_table(self.reference) else FITTED
        statistics = {} if isinstance(self.reference, Known) else survey_frame(frame, work, batch)
        spending, insecure = self.spending, self.insecure_seed is not None
        assert isinstance(spending, Spending)
        return fit_release(self.reference, work, statistics, spending, self.budget.adjacency, self.channel, self.cost, insecure=insecure)

    def _fit_tree(self, frame: Frame, work: TableWork) -> tuple[FittedRelease, int]:
        spending = self.spending
        assert isinstance(spending, TreeSpending)
        counts = tabulate_frame(frame, work, ALL_PAIRS, released=True)
        if counts.n_rows == 0:
            raise DataError("the frame has no rows", "DIP", "give it some")
        if self.delta * counts.n_rows >= 1:
            warnings.warn("δ is not below 1 / the number of rows: publishing one random row verbatim would satisfy the same guarantee", stacklevel=3)
        noisy = measure_tree(counts, spending.noise, rng=None if self.insecure_seed is None else stream(work.key(), "marginals/noise", ""))
        return fit_tree(noisy, work.cells, spending.row, self.channel, self.cost), counts.n_rows

    @property
    def fraction(self) -> float | None:
        """The hold-out's fraction, or None without a hold-out."""
        return held_out(self.reference)

    @property
    def spending(self) -> Spending | TreeSpending:
        """How ε is spent on the reference and on each column of a row."""
        if isinstance(self.reference, Tree):
            return spend_tree(self.budget, self.reference, self.schema.privatised, self.weights)
        return spend(self.budget, self.reference, self.schema.privatised, self.weights)

    @property
    def budget(self) -> Budget:
        """What is promised."""
        return validate(Budget, {"epsilon": self.epsilon, "delta": self.delta, "unit": self.unit}, "DIP")


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
    batches
        Which frames it covers.
    public
        The identity of the public frame, or None without one.
    n_rows
        How many rows the fitted frame has, where `fit` counted them.
    """

    dip: DIP
    work: TableWork
    sha256: str
    batches: Batches
    public: str | None
    n_rows: int | None = None

    def transform(self, frame: Frame, batch: str | None = None) -> Frame:
        """Return the released rows of a frame: lazily for Dask, at once for pandas.

        Rows keep their order and index; held-out rows and dropped columns are gone; kept columns are untouched.

        Parameters
        ----------
        frame
            With `Known` or a public table, any frame with the same columns; otherwise the frame that the release was fitted
            on, the same Python object.
        batch
            With `Known` or a public table, a name for this frame. The first frame needs none; each further frame needs its
            own name, for instance `2026-11`. The card lists it.

        Raises
        ------
        SpecError
            If the release, or the batch, covers another frame; if the batch is not a valid name; if the frame is the public
            one, because its rows would be their own reference.
        DataError
            If the columns are not those of the schema, or (when computed) a value violates it, or the index is neither row
            numbers (a `RangeIndex`) nor a column that the schema keeps.

        Warns
        -----
        UserWarning
            If a pandas frame other than the fitted one is sorted by a private column.

        Privacy
        -------
        Transforming a batch's frame again repeats the same noise and costs nothing more. A partition whose rows changed since
        they were first read is refused, so that the same noise is never applied to two values. Each batch has its own noise,
        whatever its rows: a row in k batches is protected by k·ε.
        """
        if self.public is not None and identity(frame) == self.public:
            raise SpecError("this frame was given as the public table, so its rows would be their own reference", "transform", "fit on another table")
        found = frame_work(frame, self.dip.schema, self.dip.reference, self.work.secrets)
        if not found.released.equals(self.work.released):
            raise DataError("the columns or their types differ from those of the fitted frame", "transform", "give both frames the same types")
        released = randomise_frame(frame, self.work, self.sha256, self.batches.take(frame, batch))
        warning = order_warning(frame, self.work) if self.batches.several else None
        if warning is not None:
            warnings.warn(warning, stacklevel=2)
        return released

    @property
    def card(self) -> dict[str, Any]:
        """The release card: what was promised, to whom, and how, and the batches so far; it may be published."""
        dip, release = self.dip, load_release(self.work.secrets, self.sha256)
        card: dict[str, Any] = json.loads(
            release_card(
                name="frame",
                budget=dip.budget,
                reference=dip.reference,
                channel=dip.channel,
                schema=dip.schema,
                codecs=self.work.codecs,
                spending=dip.spending,
                release=release,
                insecure=dip.insecure_seed is not None,
                n_rows=self.n_rows,
            )
        )
        return with_batches(card, self.batches.names, epsilon=True) if self.batches.several else card

    def close(self) -> None:
        """Destroy the run key, the reference and the units' bounds, also in workers' memory; frames not yet computed are lost."""
        self.work.secrets.remove(KEY_NAME)
        self.work.secrets.remove()
        forget_everywhere()
