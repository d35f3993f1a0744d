"""Releases that a ledger should know: what their cards claim, and which of them a restored ledger has lost.

A card names the entry that charged its release. That entry was the head of the ledger's chain then,
so a chain that holds it holds all entries before it. A ledger that lacks it was restored from an
older copy, or is another one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from dpdask.engine.account import open_ledger
from dpdask.errors import InputError, OutputError, SpecError, say_count
from dpdask.io.shards import CARD_NAME, META
from dpdask.io.storage import Folder, absolute_url
from dpdask.jobs.output import Publication
from dpdask.jobs.spec import Job, opens_stores
from dpdask.jobs.state import RunState
from dpdask.mechanisms.card import Card, CoveredRows
from dpdask.privacy import UnitColumn
from dpdask.privacy.events import (
    Composed,
    DiscreteLaplace,
    Event,
    LocalRelease,
    Series,
    Uncovered,
    add_cost,
    epsilon,
    from_dict,
    round_down,
    to_dict,
)
from dpdask.privacy.ledger_entries import Balance, Book, Charge, Claim

_CARD = re.compile(r"release(-[0-9a-f]+)?\.json")
_ROUNDED = 0.01  # by how much of ε the events of a release cost less than it promises, at most
_NO_CLAIM = "no job with a ledger has written this card, so it names no entry"


def check_known(job: Job, state: RunState) -> None:
    """Check that the job's ledger knows the releases that its output holds; an `InputError` if it lacks one.

    Without a ledger, nothing is checked. Cards that cannot be read, and those of other datasets,
    prove nothing.
    """
    if job.ledger is None:
        return
    left = state.peek()
    unfinished = "" if left is None or state.is_committed() else left.run_id
    book = job.account.read()
    lacking = _find_lacking(book, state.publication, unfinished)
    if lacking:
        # another driver may have been charged, and have staged its card, since the ledger was read
        book = job.account.read()
        lacking = [claim for claim in lacking if claim.find(book) is None]
    if not lacking:
        return
    count = say_count(len(lacking), "release")
    what = f"this ledger lacks {count} that the cards of the output name: it was restored from an older copy, or it is another one"
    hint = "`dpdask ledger import --job JOB` records them"
    if any(not claim.entry for claim in lacking):
        hint += "; other outputs' releases need their cards, or `--earlier`"
    raise InputError(what, f"dataset {book.dataset!r}", hint)


def _find_lacking(book: Book, publication: Publication, unfinished: str) -> list[Claim]:
    """Return what the cards of an output claim and a ledger lacks."""
    lacking: dict[str, Claim] = {}
    for name, run in publication.list_cards():
        if run and (
            unfinished.startswith(run) or any(each.startswith(run) for each in book.standing)
        ):
            continue
        with suppress(InputError, SpecError):
            claims = list_claims(read_card(publication.output, name))
            if claims.own.dataset != book.dataset:
                continue
            if book.holds(claims.own.run_id, claims.own.entry) and not run:
                break  # its entry seals those of the releases before it
            for claim in (claims.own, *claims.earlier):
                if claim.find(book) is None:
                    lacking.setdefault(claim.run_id, claim)
    return [*lacking.values()]


def tell_released(job: Job, state: RunState, release: str) -> None:
    """Tell the job's ledger of a committed release that it holds as charged alone.

    Who ended the rest of its run by force may have had no ledger. Later cards count only releases
    that the ledger knows as such.
    """
    if job.ledger is None or state.peek() is not None:
        return
    book = job.account.read()
    if not any(entry.kind in ("intend", "draw") for entry in book.standing.values()):
        return
    with suppress(InputError, OutputError):
        card = Card.read(state.publication.read_card(release), CARD_NAME)
        place, name = card.ledger, card.release
        if place is None or name is None or place.dataset != book.dataset:
            return
        if book.find_kind(name.id) in ("intend", "draw"):
            job.account.commit(name.id)


class Claims(NamedTuple):
    """What one card claims."""

    own: Claim
    # The releases before it, by their ε and δ alone.
    earlier: tuple[Claim, ...]
    # By which releases are ordered: when the run began, and its number in a series.
    place: tuple[str, int]


def read_card(folder: Folder, name: str) -> Card:
    """Return a card of an output."""
    return Card.read(folder.read(name, replaced=True), f"{folder.url}/{name}")


def list_claims(card: Card) -> Claims:
    """Return what a card claims; a `SpecError` if no job with a ledger wrote it.

    Privacy
    -------
    The card's events are charged for its unit, at its promised ε and δ. The rows that it leaves
    without ε count as other rows than those of all other runs, since no card names its hold-out.
    """
    place, release, promised = card.ledger, card.release, card.guarantee
    if place is None or release is None or promised.epsilon is None:
        raise SpecError(_NO_CLAIM, card.name, "give the card of a job with a ledger")
    unit = promised.unit
    unit_name = f"column {unit.column}" if isinstance(unit, UnitColumn) else "row"
    event = from_dict(card.accounting.events or {})
    events = event.events if isinstance(event, Composed) else (event,)
    composed = Composed(
        events=events,
        unit=unit_name,
        uncovered=tuple(_list_uncovered(card, release.id)),
        without_epsilon=tuple(promised.interval_private_only or ()),
        series=None if place.series is None else Series.from_dict({**place.series, "release": ""}),
    )
    priced = _price(promised.epsilon, promised.delta or 0.0, to_dict(composed))
    charge = replace(priced, names={"job": card.name, "mechanism": card.mechanism.kind})
    own = Claim(dataset=place.dataset, run_id=release.id, entry=place.entry, charge=charge)
    earlier = (
        replace(
            own,
            run_id=each.id,
            entry="",
            charge=_price_unseen(each.epsilon, each.delta, unit_name, promised.adjacency),
        )
        for each in place.earlier
    )
    number = 0 if card.series is None else int(card.series.get("release", 0))
    return Claims(own, tuple(earlier), (release.time, number))


def _price(promised: float, delta: float, event: dict[str, Any]) -> Charge:
    """Return a charge that costs what its card promises, also if the events of the card cost less."""
    cost = epsilon(from_dict(event), delta)
    if cost < promised * (1 - _ROUNDED):
        event = add_cost(event, round_down(Fraction(promised) - Fraction(cost)))
    return Charge(epsilon=promised, delta=delta, event=event)


def _list_uncovered(card: Card, name: str) -> Iterator[Uncovered]:
    """Yield the rows that a card says have no ε in its release."""
    unprotected = card.guarantee.unprotected
    if not isinstance(unprotected, CoveredRows) or not unprotected.fraction:
        return
    again = card.dataset is not None and card.dataset.republished_fraction > 0
    fraction = min(unprotected.fraction, math.nextafter(1.0, 0.0))
    yield Uncovered(
        fraction=fraction, fate="republished" if again else "held out", sample=f"card {name}"
    )


def _price_unseen(epsilon: float, delta: float, unit: str, adjacency: str | None) -> Charge:
    """Return the charge of a release of which only ε and δ are known."""
    event: Event = LocalRelease(epsilon=epsilon, unit=unit)
    if delta:  # no event of one ε costs both
        return Charge(epsilon=epsilon, delta=delta)
    if adjacency == "add-remove":
        scale = math.nextafter(1.0 / epsilon, 0.0)
        event = DiscreteLaplace(scale=scale, sensitivity=1, adjacency="add-remove")
    return Charge(epsilon=epsilon, event=to_dict(Composed(events=(event,), unit=unit)))


class Imported(NamedTuple):
    """What an import has recorded."""

    recorded: tuple[Claim, ...]
    # How many releases the ledger held already.
    n_known: int
    # How many releases the cards name that the ledger still lacks.
    n_lacking: int
    balances: dict[str, Balance]


def import_cards(url: str, cards: Iterable[Card], *, earlier: bool = False) -> Imported:
    """Record, in the order of the releases, those that a ledger lacks; with `earlier`, also those that the cards name alone."""
    listed = sorted(map(list_claims, cards), key=lambda claims: claims.place)
    named: dict[str, Claim] = {}
    for claims in listed:
        for claim in claims.earlier:
            if claim.costs_more(named.get(claim.run_id)):
                named[claim.run_id] = claim
    for claims in listed:  # a card that tells of less than another one is no proof of it
        if not named.get(claims.own.run_id, claims.own).costs_more(claims.own):
            named.pop(claims.own.run_id, None)
    wanted = [*(named.values() if earlier else ()), *(claims.own for claims in listed)]
    ledger = open_ledger(url)
    from dpdask.privacy.ledger_changes import import_claim  # it imports SQLAlchemy

    recorded = tuple([claim for claim in wanted if import_claim(ledger, claim)])
    datasets = dict.fromkeys(claims.own.dataset for claims in listed)
    books = {dataset: ledger.show(dataset) for dataset in datasets}
    lacking = [claim for claim in named.values() if claim.find(books[claim.dataset]) is None]
    return Imported(
        recorded=recorded,
        n_known=len(wanted) - len(recorded),
        n_lacking=len(lacking),
        balances={dataset: book.balance for dataset, book in books.items()},
    )


def find_cards(path: str) -> list[Card]:
    """Return the card in a file, or the cards of a release in a folder."""
    place = Folder(absolute_url(path))
    if place.is_file():
        parent, _, name = place.url.rpartition("/")
        return [read_card(Folder(parent), name)]
    names = (f"{META}/{name}" for name in place.child(META).names() if _CARD.fullmatch(name))
    cards = [read_card(place, name) for name in names]
    if not cards:
        hint = f"give a card, or the folder of a release, which has {CARD_NAME}"
        raise InputError("there is no release card here", place.url, hint)
    return cards


@opens_stores
def import_job(job: Job, *, earlier: bool = False) -> Imported:
    """Record the releases in a job's output that its ledger lacks."""
    if job.ledger is None:
        raise SpecError("this job has no ledger", job.file.name, "give the key, or use --url")
    publication = job.open_output()
    cards = [read_card(publication.output, name) for name, _ in publication.list_cards()]
    charged = [card for card in cards if card.ledger and card.ledger.dataset == job.ledger.dataset]
    if not charged:
        what = f"this output holds no release of the dataset {job.ledger.dataset!r}"
        raise InputError(what, job.output_url, "nothing is to be imported")
    return import_cards(job.ledger.url, charged, earlier=earlier)
