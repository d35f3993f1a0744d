"""What every Python class of a mechanism does: fit a frame, say beforehand what that would do, and audit the noise."""

from __future__ import annotations

import uuid
import warnings
from abc import ABC
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

import pandas as pd

from dpdask.documents import validate
from dpdask.engine.account import Account, LedgerPlace, check_can_charge, settle
from dpdask.engine.fit import Fitted, PublicTable, fit
from dpdask.engine.source import Frame, FrameSource, as_frame, identify
from dpdask.engine.work import TableWork, load
from dpdask.errors import BudgetError, DataError, DpdaskError, SpecError
from dpdask.estimators.frames import (
    check_secrets,
    close_secrets,
    find_order_warnings,
    make_frame_work,
    open_secrets,
)
from dpdask.estimators.release import FITTED, PUBLIC, Batches, Release, Rows
from dpdask.io.storage import HOLDOUT_NAME, NOISY_NAME, RELEASE_NAME, Folder
from dpdask.mechanisms.expectations import (
    Planned,
    describe_promise,
    describe_steps,
    describe_warnings,
    list_noise,
    warn_of_number_bounds,
)
from dpdask.mechanisms.mechanism import Mechanism, Spec, audit_mechanism
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget, UnitColumn, delta_warnings, list_cautions
from dpdask.privacy.events import Adjacency
from dpdask.schema import Schema
from dpdask.streams import RunKey
from dpdask.terminal.progress import Report, show_fit

Made = TypeVar("Made", bound=Release)


@dataclass(frozen=True, slots=True, kw_only=True)
class FramePlan(Planned):
    """What a fit would do; nothing is computed for it.

    Attributes
    ----------
    guarantee
        Who is protected by what, and who is not.
    stages
        In order, in words.
    epsilons
        What each privatised column of one released row may cost; empty if no row is released.
    reference_epsilons
        What each noisy histogram costs, if there are any.
    warnings
        What to consider before the fit.
    expectations
        How much a released row keeps, or how large noise is.
    ledger
        The dataset's ε spent before and after, its limit, and whether the fit is allowed; None
        without a ledger.
    noise
        The central noise: `on` how many vectors of counts, its `sigma` in counts, and its `kind`.
    seconds
        Empty: how long a fit takes is not known.
    refusal
        The error that a fit would raise since the dataset's budget is too small; None if it is
        large enough.
    """

    def __repr__(self) -> str:
        lines = (describe_warnings(self), describe_steps(self), describe_promise(self))
        return "\n".join(["plan", *(line for part in lines for line in part)])


@dataclass(frozen=True, slots=True)
class Estimator(ABC, Generic[Made]):
    """The base of the Python classes: everything but their parameters.

    Attributes
    ----------
    schema
        The declared columns.
    mechanism
        The specification on the schema, under the budget.
    """

    schema: Schema
    _: KW_ONLY
    insecure_seed: int | None = None
    mechanism: Mechanism = field(init=False, repr=False, compare=False)

    spec_class: ClassVar[type[Spec]]
    release_class: ClassVar[type[Release]] = Release

    def __post_init__(self) -> None:
        spec = validate(self.spec_class, self._choose(*self.spec_class.model_fields), "")
        object.__setattr__(self, "mechanism", bind(spec, self.schema, self._budget(spec)))
        self.mechanism.schema.check_found(insecure=self.insecure_seed is not None)

    def _choose(self, *names: str) -> dict[str, Any]:
        """Return the parameters of these names that are set: those of the specification, or of the budget."""
        found = {name: getattr(self, name, None) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def _budget(self, spec: Any) -> Budget | None:
        """Return the budget, or None if the specification promises none."""
        del spec
        found = validate(Budget, self._choose("epsilon", "delta", "adjacency", "unit"), "")
        if found.unit_column is not None and found.unit_column.publish_counts:
            what = "the numbers of rows are published by jobs only"
            raise SpecError(what, "`unit.publish_counts`", "leave it out, or run a job")
        return found

    def fit(
        self,
        frame: Frame,
        *,
        ledger: LedgerPlace | None = None,
        secrets: str | None = None,
        progress: bool | None = None,
    ) -> Made:
        """Count, charge, draw the noise and fit: the one barrier.

        Parameters
        ----------
        frame
            A Dask or pandas frame; or any table that gives itself as an Arrow stream, such as one of
            Arrow, polars or DuckDB. With a public reference: the public table. With a declared one,
            and for ranges: any frame with the table's columns. Otherwise: the table to release;
            only this same Python object can be transformed, so persist, filter or sort it before.
        ledger
            The dataset to charge, and the ledger that holds its budget; the charge is made before
            any noise is drawn. Releases of several frames are charged once for each batch, when it
            is transformed for the first time.
        secrets
            A private folder of a file system that every worker can read; by default a new temporary
            one of this machine (mode 0700). What is made there is removed when Python ends
            normally. If the process is killed, also by SIGTERM, the key stays: this user's next
            `fit` on this machine removes it from the temporary folder, but nothing removes it from
            one of yours.
        progress
            Whether the stages of the fit are shown while it works; by default they are on a
            terminal and in a notebook.

        Raises
        ------
        DataError
            If the frame violates the schema, or has too few rows.
        SpecError
            If `frame` is no frame, or `ledger` no `LedgerPlace`; if the parameters do not fit the
            frame, the ledger has no such dataset, or `secrets` is in an object store.
        BudgetError
            If the dataset's budget does not allow it; nothing is drawn.

        Warns
        -----
        UserWarning
            What `plan` would have warned of; if a pandas frame that is to be released is sorted by
            a private column.
        """
        table = as_frame(frame)  # before anything is done with it
        check_can_charge(self.mechanism, ledger, insecure=self.insecure_seed is not None)
        check_secrets(secrets)
        account = _open_account(self.mechanism, ledger)  # batches are charged later
        account.check_room(None)
        key = RunKey.fresh() if self.insecure_seed is None else RunKey.insecure(self.insecure_seed)
        fitting = _Fitting(self, account, frame, table, open_secrets(secrets, key.reveal()))
        try:
            with show_fit(progress) as report:
                return cast("Made", fitting.release(report))
        except BaseException as error:
            fitting.fail(error)
            raise

    def plan(self, frame: Frame, *, ledger: LedgerPlace | None = None) -> FramePlan:
        """Return what `fit` would do; nothing is computed.

        Parameters
        ----------
        frame
            As for `fit`.
        ledger
            As for `fit`.

        Raises
        ------
        DataError, SpecError
            As `fit`, as far as they need no rows.
        """
        frame = as_frame(frame)  # before anything is done with it
        check_can_charge(self.mechanism, ledger, insecure=self.insecure_seed is not None)
        mechanism, work = self._open_uncounted(frame)
        spending, account = mechanism.spending, _open_account(mechanism, ledger)
        refusal: BudgetError | None = None
        try:
            account.check_room(None)
        except BudgetError as error:
            refusal = error
        return FramePlan(
            guarantee=mechanism.description.guarantee("keep"),
            stages=(
                *work.unit_stages,
                *mechanism.description.stages(work.columns),
            ),
            epsilons=dict(spending.row),
            reference_epsilons=dict(spending.reference),
            warnings=(
                *([] if mechanism.budget is None else list_cautions(mechanism.budget, None)),
                *warn_of_number_bounds(self.schema, work.view.own),
                *mechanism.description.cautions(work.columns, _n_rows(frame, mechanism)),
            ),
            expectations=mechanism.description.expectations(work.columns),
            ledger=account.describe_balances(work.unit_place or "", fits=refusal is None),
            noise=list_noise(mechanism.event),
            refusal=refusal,
        )

    def audit(self, frame: Frame, *, n_runs: int = 20_000) -> dict[str, Any]:
        """Return, for each column and each central measurement, what is claimed and what is found; no row is read.

        Parameters
        ----------
        frame
            As for `fit`; its columns' types are looked at.
        n_runs
            How often each central measurement is drawn, on each of two neighbouring inputs.

        Returns
        -------
        As `mechanisms.mechanism.audit_mechanism`.
        """
        frame = as_frame(frame)  # before anything is done with it
        mechanism, work = self._open_uncounted(frame)
        return audit_mechanism(mechanism, work.columns, None, n_runs=n_runs)

    def _open_uncounted(self, frame: Frame) -> tuple[Mechanism, TableWork]:
        """Return the mechanism and the work on the frame; nothing is computed, so the rows of a Dask frame are not counted."""
        return self._open(
            frame, Folder("memory://dpdask-plan"), count=isinstance(frame, pd.DataFrame)
        )

    def _open(
        self, frame: Frame, folder: Folder, *, count: bool = True
    ) -> tuple[Mechanism, TableWork]:
        """Return the mechanism, with what it takes from the number of rows if they may be counted, and the work on the frame."""
        mechanism = (
            self.mechanism.with_rows(lambda: None if self.mechanism.n_rows_private else len(frame))
            if count
            else self.mechanism
        )
        return mechanism, make_frame_work(frame, mechanism, folder)


class _Fitting:
    """One call of `fit`: the steps that a frame needs before and after `engine.fit`."""

    def __init__(
        self,
        estimator: Estimator[Any],
        account: Account,
        given: Any,
        frame: Frame,
        folder: Folder,
    ) -> None:
        self.estimator, self.account, self.folder = estimator, account, folder
        self.given, self.frame = given, frame  # the table of the caller, and its columns
        self.run_id = uuid.uuid4().hex
        self.sample = f"run {self.run_id}"
        self.is_strict = account.is_strict
        self.began = False  # until then, no row is read

    def release(self, report: Report | None) -> Release:
        mechanism, work = self.estimator._open(self.frame, self.folder)
        several = mechanism.covers_any_frame
        n_rows = _n_rows(self.frame, mechanism)
        if report is not None:
            report.count_rows(n_rows, None)
        if n_rows == 0 and mechanism.reference_rows == "own":
            raise DataError("the table has no rows", "frame", "give it some rows")
        said = mechanism.description.cautions(work.columns, n_rows)
        # with a strict ledger, nobody is told of exact rows
        tells = mechanism.releases_rows and not several and not self.is_strict
        sorted_by = find_order_warnings(self.frame, work) if tells else ()
        for warning in (*said, *sorted_by):  # before a charge: a warning may be made an error
            warnings.warn(warning, stacklevel=3)
        batches = Batches(self.folder, several=several)
        if mechanism.releases_rows and not several:
            batches.take(self.given)
        # rows of a frame have no place in the dataset, units have
        place = work.unit_place
        holdout = None if place is None else self.account.find_holdout(place)
        if holdout is not None:
            key, self.sample = holdout
            self.folder.write(HOLDOUT_NAME, key, private=True)
            work = work.with_keys()
        fitted, work = self._fit(mechanism, work, several, report)
        release = load(self.folder, fitted.release_sha256, mechanism.release_type)
        rows = Rows(
            mechanism=mechanism,
            account=self.account,
            run_id=self.run_id,
            work=work,
            batches=batches,
            public=identify(self.frame) if mechanism.reference_rows == "public" else None,
        )
        made = self.estimator.release_class.from_fit(
            *(rows, release, fitted.release_sha256),
            n_released=sum(fitted.n_released) if fitted.n_released else None,
            insecure=self.estimator.insecure_seed is not None,
        )
        late: tuple[str, ...] = ()
        if n_rows is None or work.unit is not None:
            late = _late_cautions(mechanism, work, fitted, made)
        if not self.is_strict:
            late += mechanism.description.warnings(release, work.columns)
        for warning in late:
            if warning not in said:
                warnings.warn(warning, stacklevel=3)
        return made

    def _fit(
        self, mechanism: Mechanism, work: TableWork, several: bool, report: Report | None
    ) -> tuple[Fitted, TableWork]:
        unread = mechanism.releases_rows and mechanism.reference_rows != "own"

        def charge() -> None:
            if not several:  # else each batch is charged
                self.account.intend(self.run_id, self.sample, unread=unread)

        self.began = True
        if self.is_strict:
            charge()
        public = None
        if mechanism.reference_rows == "public":  # the class refuses units, and no row is held out
            public = PublicTable(source=FrameSource(self.frame, PUBLIC), work=work)
        fitted, work = fit(
            *(mechanism, FrameSource(self.frame, FITTED), work, charge),
            public=public,
            insecure=self.estimator.insecure_seed is not None,
            progress=report,
        )
        for name in self.folder.names():
            if name.startswith("noisy"):
                self.folder.remove(name)  # a frame's fit is not resumed, so nothing reads it
        if not several:
            self.account.record_draw(self.run_id, fitted.release_sha256)
            self.account.commit(self.run_id, fitted.release_sha256)
        return fitted, work

    def fail(self, error: BaseException) -> None:
        """Update the ledger after a failure, and remove what is left."""
        drawn = True
        with suppress(DpdaskError):  # another user has exchanged it
            drawn = any(self.folder.exists(name) for name in (NOISY_NAME, RELEASE_NAME))
            close_secrets(self.folder)  # first, in case the ledger cannot be reached
        settlement = settle(error, drawn=drawn, strict=self.began and self.is_strict)
        if settlement == "refuse" and self.began:
            self.account.refuse(self.run_id, self.sample, drawn=drawn)
        elif settlement == "void":
            self.account.void(self.run_id)


@dataclass(frozen=True, slots=True)
class NoisyCountsEstimator(Estimator[Made]):
    """The base of the Python classes whose whole budget pays for noisy counts of all rows.

    Attributes
    ----------
    epsilon, delta, adjacency, unit
        What is promised; see `privacy.Budget`.
    """

    _: KW_ONLY
    epsilon: float
    delta: float = 0.0
    adjacency: Adjacency = "replace-one"
    unit: UnitColumn | Literal["row"] = "row"


def _n_rows(frame: Frame, mechanism: Mechanism) -> int | None:
    """Return the number of rows if it is public and costs nothing to know."""
    return len(frame) if isinstance(frame, pd.DataFrame) and not mechanism.n_rows_private else None


def _late_cautions(
    mechanism: Mechanism, work: TableWork, fitted: Fitted, release: Release
) -> tuple[str, ...]:
    """Return what there is to think of once the rows are counted; if their number is private, once it is known with noise."""
    if mechanism.releases_rows:
        return (
            mechanism.description.cautions(work.columns, sum(fitted.n_released))
            if fitted.n_released
            else ()
        )
    counted = release.n_rows
    if counted is None or counted.value is None:
        return ()
    if not counted.exact:
        budget = mechanism.budget
        return () if budget is None else delta_warnings(budget, round(counted.value))
    return mechanism.description.cautions(work.columns, round(counted.value))


def _open_account(mechanism: Mechanism, ledger: LedgerPlace | None) -> Account:
    return Account(mechanism=mechanism, place=ledger and ledger.resolve(Path.cwd()))
