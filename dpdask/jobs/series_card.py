"""What the cards of a growing table say about its series."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpdask.jobs.series import Size
from dpdask.mechanisms.card import Card
from dpdask.plurals import say_count
from dpdask.privacy import Budget, UnitColumn
from dpdask.privacy.rounding import round_up_sum

_PUBLIC = "Which release a row is in is public; if it depends on private values, no ε covers that."


def sum_series(epsilons: Sequence[float | None], unit: object) -> float | None:
    """Return what the releases of a series cost a unit together; None if they have no ε.

    Parameters
    ----------
    epsilons
        What each release costs.
    unit
        The privacy unit, as a budget or a card has it.
    """
    known = [epsilon for epsilon in epsilons if epsilon is not None]
    if not known:
        return None
    return known[0] if unit == "row" else round_up_sum(known)


def describe_release(number: int, epsilons: Sequence[float | None], budget: Budget | None, *, has_holdout: bool) -> dict[str, Any]:
    """Return what the card of one release says about its series.

    Parameters
    ----------
    number
        The release's number.
    epsilons
        What each release costs, up to this one.
    budget
        What is promised; None if no ε is.
    has_holdout
        Whether release 0 held rows out.
    """
    rows = "the rows that the table had then" if number == 0 else "the rows of the files that were added after the release before"
    reference = "" if number == 0 else " The reference and the channels are those of release 0; no row of this release was held out."
    unit = "row" if budget is None else budget.unit
    total = sum_series(epsilons, unit)
    text = f"Release {number} of a growing table: {rows}.{reference} {_describe_total(total, unit, has_holdout=has_holdout)}{_PUBLIC}"
    return {"release": number, "epsilon": total, "text": text}


def describe_series(sizes: Sequence[Size], first: Card) -> dict[str, Any]:
    """Return what the card that sums up a series says about it.

    Parameters
    ----------
    sizes
        What each release published.
    first
        The card of the first release.
    """
    unit = first.guarantee.unit
    total = sum_series([size.epsilon for size in sizes], unit)
    n_rows, n_shards = sum(size.n_rows for size in sizes), sum(size.n_shards for size in sizes)
    cost = _describe_total(total, unit, has_holdout=first.has_holdout)
    text = f"This growing table has {say_count(len(sizes), 'release')}. All else in this card is that of release 0. {cost}{_PUBLIC}"
    return {"releases": len(sizes), "rows": n_rows, "shards": n_shards, "epsilon": total, "text": text}


def _describe_total(total: float | None, unit: object, *, has_holdout: bool) -> str:
    if total is None:
        return ""
    held_out = "No ε covers the rows that release 0 held out: all releases follow them. " if has_holdout else ""
    if isinstance(unit, UnitColumn):
        return f"A {unit.column} may have rows in every release, so the releases add up: ε = {total!r} for all of them together. {held_out}"
    whose, cost = ("released row", "it") if has_holdout else ("row", "a row")
    return f"Each {whose} is in one release, so all releases together cost {cost} no more than release 0: ε = {total!r}. {held_out}"
