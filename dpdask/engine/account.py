"""Charge a release to its dataset's ledger: check the budget before a row is read, and charge before any noise is drawn."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from dpdask.arrays import freeze_class
from dpdask.documents import Document
from dpdask.errors import (
    BudgetError,
    DataError,
    DpdaskError,
    InternalError,
    RepeatedError,
    SpecError,
)
from dpdask.privacy.events import Series, compose, epsilon, to_dict
from dpdask.privacy.ledger_entries import FREE, Balance, Book, Charge, Entry

# SQLAlchemy is for those who have a ledger; a ledger is shown without any mechanism
if TYPE_CHECKING:
    from dpdask.mechanisms.card import Card
    from dpdask.mechanisms.mechanism import Mechanism
    from dpdask.privacy.ledger import Ledger

_PERSON = b"dpdask hold-out"
Hide = Callable[[str], str]


class LedgerPlace(Document):
    """The dataset that a release is charged to, and the database that holds its budget: SQLite or PostgreSQL.

    Examples
    --------
    >>> import dpdask
    >>> dpdask.LedgerPlace(url="sqlite:///ledger.db", dataset="ratings").dataset
    'ratings'
    """

    url: str = Field(min_length=1)
    """The database's URL, as SQLAlchemy writes it: `sqlite:///ledger.db`."""
    dataset: str = Field(min_length=1)
    """The name of the dataset."""

    def resolve(self, base: Path) -> LedgerPlace:
        """Return the place with a relative SQLite file in the folder `base`."""
        scheme, separator, file = self.url.partition(":///")
        if not scheme.startswith("sqlite") or not file or file.startswith("/"):
            return self
        return self.model_copy(update={"url": f"{scheme}{separator}{base.absolute() / file}"})

    def __repr_args__(self) -> Iterator[tuple[str, str]]:
        """Give the fields without a user, a password and options of the URL."""
        yield "url", hide_login(self.url)
        yield "dataset", self.dataset


def hide_login(url: str) -> str:
    """Return a URL without its user, its password and its options."""
    return re.sub(r"(?s)//.*@", "//***@", url).partition("?")[0]


def open_ledger(url: str) -> Ledger:
    """Return a ledger whose charges are composed by the accountant.

    Raises
    ------
    SpecError
        If the URL is no database's.
    """
    from dpdask.privacy.ledger import Ledger

    return Ledger(url, compose=compose)


_NOTHING = Book(
    dataset="", created="", epsilon=0.0, delta=0.0, entries=(), head="", compose=compose
)


@freeze_class
class Account:
    """A mechanism and the dataset that it is charged to; without a ledger, nothing is charged."""

    mechanism: Mechanism
    place: LedgerPlace | None
    series: Series | None = None  # where the release stands in a series, if it is in one
    job: str = ""  # its name, and the URL of its output: for those who read the ledger
    output: str = ""

    @property
    def names(self) -> dict[str, str]:
        """How the run is called in the ledger."""
        is_local = self.output.startswith("file://")
        output = self.output.removeprefix("file://") if is_local else hide_login(self.output)
        return {"job": self.job, "mechanism": self.mechanism.spec.kind, "output": output}

    def cost(self, sample: str = "") -> Charge:
        """Return the price of the release: its ε and δ, the events that the accountant composes, and the rows that they do not cover.

        Parameters
        ----------
        sample
            The name of the draw of its hold-out.
        """
        budget = self.mechanism.budget
        assert budget is not None
        uncovered = tuple(replace(each, sample=sample) for each in self.mechanism.uncovered)
        event = replace(
            self.mechanism.event, unit=budget.unit_name, uncovered=uncovered, series=self.series
        )
        # its rows alone: the reference was paid for by the first release
        if self.mechanism.continued:
            return Charge(epsilon=epsilon(event, 0.0), event=to_dict(event), names=self.names)
        price = budget.epsilon, budget.delta
        return Charge(epsilon=price[0], delta=price[1], event=to_dict(event), names=self.names)

    def read(self) -> Book:
        """Return the dataset's ledger, whose chain is checked now; an empty one without a ledger."""
        if self.place is None:
            return _NOTHING
        return open_ledger(self.place.url).show(self.place.dataset)

    def tell_coverage(self, card: Card, run_id: str) -> Card:
        """Return a card with the share of the dataset's rows that had no ε until a run; unchanged without a ledger."""
        return card if self.place is None else card.with_dataset(self.read().coverage_until(run_id))

    def read_balance(self) -> Balance | None:
        """Return the spent and the remaining budget of the dataset, or None without a ledger."""
        return None if self.place is None else self.read().balance

    @property
    def is_strict(self) -> bool:
        """Whether the dataset charges refusals that read rows."""
        return self.place is not None and self.read().strict

    def check_room(self, run_id: str | None) -> None:
        """Check, before a row is read, that the budget allows the release, or that its unfinished run is already charged."""
        if self.place is not None:
            open_ledger(self.place.url).check_room(self.place.dataset, self.cost(), run_id)

    def find_holdout(self, rows: str, hide: Hide | None = None) -> tuple[bytes, str] | None:
        """Return the key and the name of the dataset's hold-out, if there is a ledger and rows are held out.

        Parameters
        ----------
        rows
            The places of the rows, on which the choice depends beside the key.
        hide
            Replaces a name that depends on private rows before it is written to the ledger.
        """
        if self.place is None or not self.mechanism.uncovered:
            return None
        key = open_ledger(self.place.url).holdout_key(self.place.dataset)
        assert key is not None
        return key, self._name_sample(key, rows, hide)

    def _name_sample(self, key: bytes, rows: str, hide: Hide | None) -> str:
        """Return the name of the hold-out that a key chooses. Runs that hold out the same rows, or nested subsets, get the same name.

        Privacy
        -------
        Who reads the ledger has the key. Where the rows' places are named by digests of the files,
        such a reader could test guesses of a private value by the name, so `hide` replaces it; but
        not one that the ledger holds already, as versions before 1.0.0 wrote it.
        """
        assert self.place is not None
        name = blake2b(rows.encode(), key=key, person=_PERSON, digest_size=16).hexdigest()
        known = hide is None or open_ledger(self.place.url).holds_sample(self.place.dataset, name)
        return name if hide is None or known else hide(name)

    def intend(self, run_id: str, sample: str, *, unread: bool = False) -> Entry | None:
        """Charge a run, if there is a ledger, and return its entry; a run that is already charged is not charged again."""
        if self.place is None:
            return None
        ledger, cost = open_ledger(self.place.url), self.cost(sample)
        return ledger.intend(self.place.dataset, run_id, cost, unread=unread)

    def record_draw(self, run_id: str, release_sha256: str) -> None:
        """Record that a charged run drew its noise, with the digest of its fitted release, before anything of it is released."""
        if self.place is not None:
            open_ledger(self.place.url).draw(self.place.dataset, run_id, release_sha256)

    def commit(self, run_id: str, release_sha256: str = "") -> None:
        """Record that a charged run was released, by default with the digest that it drew. It is idempotent."""
        if self.place is not None:
            open_ledger(self.place.url).commit(self.place.dataset, run_id, release_sha256)

    def void(self, run_id: str) -> None:
        """Take back the charge of a run, if there is one; only for a run whose noise cannot have been seen."""
        if self.place is not None and self.read().find_kind(run_id) == "intend":
            open_ledger(self.place.url).void(self.place.dataset, run_id)

    def refuse(self, run_id: str, sample: str, *, drawn: bool) -> None:
        """Record that a run read rows and refused them; it is charged if noise was `drawn` or if the dataset is strict."""
        if self.place is not None:
            charged = drawn or self.is_strict
            cost = self.cost(sample) if charged else replace(FREE, names=self.names)
            open_ledger(self.place.url).refuse(self.place.dataset, run_id, cost)

    def refuse_unopened(self, rows: str, hide: Hide | None) -> None:
        """Record that a run read rows and refused them before it was opened; see `refuse` and `find_holdout`."""
        if self.place is not None:
            run_id, holdout = uuid.uuid4().hex, self.find_holdout(rows, hide)
            sample = f"run {run_id}" if holdout is None else holdout[1]
            self.refuse(run_id, sample, drawn=False)

    def describe_balances(
        self, rows: str, hide: Hide | None = None, *, spends: bool = True, fits: bool
    ) -> dict[str, Any] | None:
        """Return the part of a plan on the dataset: its ε spent before and after the release, its limit, and how many `further` releases like it fit then; None without a ledger.

        Parameters
        ----------
        rows, hide
            As for `find_holdout`.
        spends
            Whether the release is still to be charged.
        fits
            Whether the budget allows it: at the limit's δ, as the ledger judges, since the runs'
            own δ do not add up where events compose.
        """
        if self.place is None:
            return None
        key, ledger = None, open_ledger(self.place.url)
        if self.mechanism.uncovered:
            key = ledger.holdout_key(self.place.dataset, draw=False)
        sample = "to be drawn" if key is None else self._name_sample(key, rows, hide)
        book = self.read()
        before = book.balance
        cost = self.cost(sample)
        plus = [cost] if spends else []
        after = book.compute_balance(plus)
        return {
            "limit": before.epsilon_limit,
            "before": before.epsilon_spent,
            "after": after.epsilon_spent,
            "runs": before.n_runs,
            "fits": fits,
            # of a series nothing is told: its new rows may cost nothing more
            "further": None if self.series else book.count_further(cost, plus),
            "uncovered_before": before.coverage.uncovered,
            "uncovered_after": after.coverage.uncovered,
            "coverage": after.coverage.text,
        }


Settlement = Literal["refuse", "void", "keep"]


def settle(error: BaseException, *, drawn: bool, strict: bool) -> Settlement:
    """Return what becomes of a run that failed after it was opened: a function of the facts alone.

    An error that is not this package's, such as an interrupt, may come between the draw and its
    file: then the run stays charged.

    Parameters
    ----------
    error
        Why it failed.
    drawn
        Whether noise was kept, so that somebody may have seen it.
    strict
        Whether the dataset charges refusals.

    Returns
    -------
    `refuse`: its rows were refused, which is recorded, and charged if noise was drawn or the
    dataset is strict. `void`: its charge is taken back, if there is one. `keep`: it stays charged,
    and can go on.
    """
    if not isinstance(error, DpdaskError):
        return "keep"
    refuses = isinstance(error, SpecError | DataError | RepeatedError)
    if refuses or (isinstance(error, InternalError) and not drawn):
        return "refuse"
    if isinstance(error, BudgetError):
        return "keep" if drawn else "void"
    return "keep" if drawn or strict else "void"


def check_can_charge(mechanism: Mechanism, place: object, *, insecure: bool) -> None:
    """Check that a release can be charged to a ledger, if there is one.

    Parameters
    ----------
    mechanism
        What is released.
    place
        The ledger and the dataset, or None.
    insecure
        Whether the noise comes from a seed.

    Raises
    ------
    SpecError
        If it is no such place; if the mechanism has no ε, or the noise comes from a seed, which
        anybody can draw again.
    """
    if place is None:
        return
    if not isinstance(place, LedgerPlace):
        what = f"a LedgerPlace is expected, not a {type(place).__name__}"
        raise SpecError(
            what, "`ledger`", 'give dpdask.LedgerPlace(url="sqlite:///ledger.db", dataset="…")'
        )
    if mechanism.budget is None:
        raise SpecError(
            "this mechanism has no ε, so there is none to charge", "`ledger`", "remove it"
        )
    if insecure:
        what = "noise from a seed protects nobody, so a release with a seed cannot be charged to a ledger"
        raise SpecError(what, "insecure_seed", "remove the seed, or the ledger")
