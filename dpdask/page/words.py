"""What a release is good for and what it is not good for, what an attacker gains, and how to begin an analysis: in words, from the card."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_DOWN, ROUND_UP, Context, Decimal
from typing import Any

from dpdask.mechanisms.card import Card
from dpdask.mechanisms.guidance import bound_belief, find_guidance, round_up
from dpdask.privacy.budget import attacker_power, bound_values, percent_above
from dpdask.privacy.rounding import order_text

PRIORS = (0.01, 0.1, 0.5, 0.9)
ALARMS = (0.01, 0.05, 0.1)
N_ROWS_OF_A_PERSON = 5
_MOST_KEPT = 20


def list_losses(
    epsilon: float, delta: float, adjacency: str | None
) -> dict[str, tuple[float, float]]:
    """Return ε and δ of each statement about a unit: under add-remove its presence has the promised ones, and its values have twice them."""
    if adjacency != "add-remove":
        return {"one value rather than another": (epsilon, delta)}
    return {
        "it is there": (epsilon, delta),
        "one value rather than another": bound_values(epsilon, delta, "add-remove"),
    }


def describe_beliefs(
    losses: Mapping[str, tuple[float, float]], *, persons: bool
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return heads and rows of a table: a belief before the release, and the most that it can become.

    Parameters
    ----------
    persons
        Whether a person may have several rows, each of which has these losses.
    """
    listed = [(what, n) for n in ((1, N_ROWS_OF_A_PERSON) if persons else (1,)) for what in losses]
    heads = [what if n == 1 else f"{what}, for a person with {n} rows" for what, n in listed]
    return heads, [
        (f"{100 * prior:g} %", *(bound_belief(prior, n * losses[what][0]) for what, n in listed))
        for prior in PRIORS
    ]


def describe_tests(losses: Mapping[str, tuple[float, float]]) -> list[tuple[str, ...]]:
    """Return rows of a share of false alarms and the most that each test with it can find."""
    return [
        (
            f"{100 * level:g} %",
            *(percent_above(attacker_power(*loss, level)) for loss in losses.values()),
        )
        for level in ALARMS
    ]


def describe_odds(epsilon: float) -> str:
    """Return the factor exp(ε), rounded up."""
    factor = math.exp(min(epsilon, 100.0))
    if factor < 1000:
        return f"{math.ceil(1000 * factor) / 1000:g}"
    return f"{Context(prec=3, rounding=ROUND_UP).plus(Decimal(factor)):.3g}"


def describe_neighbours(adjacency: str | None) -> str:
    """Return what ε compares, in words."""
    if adjacency == "add-remove":
        hidden = "so the release also hides whether it is there; other values count twice (2ε)"
        return (
            f"add-remove: a table is compared with the one in which the unit is missing, {hidden}"
        )
    if adjacency == "replace-one":
        return "replace-one: a table is compared with one in which the unit has other values; that the unit is in the table is not hidden"
    return "none: no ε is promised"


def describe_gain(card: Card) -> str:
    """Return what a release may change in a belief, in words that can be repeated; empty if no ε is promised, or it protects nobody."""
    epsilon, unit = card.guarantee.epsilon, card.guarantee.unit
    if epsilon is None or card.insecure:
        return ""
    losses = list_losses(epsilon, card.guarantee.delta or 0.0, card.guarantee.adjacency)
    covered = "protected " if card.has_holdout else ""
    whose = f"a {covered}row" if isinstance(unit, str) else f"a {covered}{unit.column}"
    whole = (
        f" (its {', '.join(card.guarantee.epsilon_private)})"
        if card.guarantee.epsilon_private
        else ""
    )
    statements = {
        "it is there": "is in the table",
        "one value rather than another": f"has one value rather than another{whole}",
    }
    told = [
        f"that {whose} {statements[what]} becomes one of at most {bound_belief(0.5, loss)}"
        for what, (loss, _) in losses.items()
    ]
    apart = ", apart from δ" if card.guarantee.delta else ""
    return f"To someone who knows everything else, a belief of 50 % {', and one of 50 % '.join(told)}{apart}."


def describe_again(card: Card) -> str:
    """Return what this release and a second one like it would cost, in words.

    Empty if no ε is promised, or it protects nobody; also with a hold-out and no ledger, where the
    second release holds out other rows: no ε bounds what it tells about rows that this one
    protects.
    """
    epsilon, delta = card.guarantee.epsilon, card.guarantee.delta or 0.0
    if epsilon is None or card.insecure or (card.has_holdout and card.ledger is None):
        return ""
    name, loss = list(list_losses(2.0 * epsilon, 2.0 * delta, card.guarantee.adjacency).items())[-1]
    at = f" and δ = {round_up(2.0 * delta, 3)}" if delta else ""
    found = f"a test of {name}, at a false-alarm rate of 5 %, would detect it with probability at most {percent_above(attacker_power(*loss))}"
    whose = "a row that both protect" if card.has_holdout else "the same rows"
    return f"This release and a second one like it, of {whose}, would spend at most ε = {round_up(2.0 * epsilon)}{at} together: {found}."


def describe_left(card: Card) -> str:
    """Return the ε that a ledger leaves at most, rounded down; empty where it is no difference, as with δ."""
    ledger = card.ledger
    if ledger is None or ledger.epsilon is None or ledger.delta_limit:
        return ""
    left = Context(prec=6, rounding=ROUND_DOWN).plus(
        max(Decimal(0), Decimal(repr(ledger.epsilon_limit)) - Decimal(round_up(ledger.epsilon)))
    )
    return f"ε = {left.normalize():f}"


def describe_trust(card: Card) -> str:
    """Return who saw the table; empty if the card does not say."""
    if card.terms is None:
        return ""
    if card.terms.trust_model == "local":
        return "Nobody: each value was randomised where it was asked (local model)."
    what = (
        "of the random cuts"
        if card.guarantee.epsilon is None
        else "that undoes the noise of the rows"
    )
    key = f" They also had the key {what}. dpdask removes it at the end; backups of that time may hold it."
    rows = key if _releases_rows(card) else ""
    return f"Whoever computed the release, or ran the machines for it, saw the table.{rows} Readers of the release are not trusted (central model)."


def describe_unit(card: Card) -> str:
    """Return the unit of privacy, in words."""
    unit = card.guarantee.unit
    if unit == "row":
        values = (
            ", and by 2k·ε for other values" if card.guarantee.adjacency == "add-remove" else ""
        )
        covered = "protected rows" if card.has_holdout else "rows"
        return f"one row; a person with k {covered} is protected by k·ε only{values}"
    if unit == "value":
        return "one value; nothing bounds what all values of a row, or all rows of a person, tell together"
    return f"all rows that share a value of {unit.column}; at most {unit.max_rows} of them are used"


def describe_promise(card: Card) -> str:
    """Return the kind of the promise, in words."""
    if card.guarantee.epsilon is None:
        return "interval privacy; this is not differential privacy"
    kind = (
        "differential privacy, approximate (δ above 0)"
        if card.guarantee.delta
        else "differential privacy, pure (δ = 0)"
    )
    return (
        f"{kind}; other private columns have interval privacy only"
        if card.guarantee.interval_private_only
        else kind
    )


def describe_order(card: Card, n_shards: int) -> str:
    """Return what the order of the rows reveals; shorter for shuffled rows in one file."""
    if n_shards == 1 and card.order == order_text("shuffled"):
        parts = "Only an input above 128 MiB is shuffled in parts: rows of one part were close together in the input"
        return f"the rows of the one file are in random order. {parts}, of similar values if it was sorted by a private column. No ε covers that"
    return card.order


def describe_published(card: Card) -> str:
    """Return what is published as it is: the kept columns, and the number of rows where it is exact."""
    kept = [name for name, part in card.columns.items() if part.role == "kept"]
    told = (
        [
            ", ".join(kept[:_MOST_KEPT])
            + (f" and {len(kept) - _MOST_KEPT} more columns" if len(kept) > _MOST_KEPT else "")
        ]
        if kept
        else []
    )
    if _releases_rows(card):
        told.append("the number of rows, and the presence of each row")
    elif card.n_rows is not None and card.n_rows.exact and card.n_rows.value is not None:
        told.append("the number of rows")
    return "; ".join(told) or "nothing"


def describe_together(card: Card) -> str:
    """Return the ε of this release and the earlier ones of its ledger; empty without a ledger."""
    ledger = card.ledger
    if ledger is None:
        return ""
    if ledger.epsilon is None:
        return "an ε that is not known"
    at = f" at the ledger's δ = {round_up(ledger.delta_limit, 3)}" if ledger.delta_limit else ""
    return f"ε = {round_up(ledger.epsilon)}{at}"


def name_counts(card: Card) -> list[tuple[str, Any]]:
    """Return names of counts that readers understand, each with what the card says of its noise."""
    noise = (card.accounting.model_extra or {}).get("noise", {})
    return [(find_guidance(card).counts(name), each) for name, each in noise.items()]


def list_uses(card: Card) -> tuple[list[str], list[str]]:
    """Return what the release is good for, and what it is not good for, by its mechanism and the quality that its card measures."""
    good, bad = find_guidance(card).uses(card)
    return good, [
        *(
            ["Anything but tests: its noise comes from a seed, so it protects nobody."]
            if card.insecure
            else []
        ),
        *bad,
    ]


def warn_of_associations(card: Card) -> str:
    """Return a warning if the rows' noise weakens what released columns show of each other, else an empty text."""
    if not find_guidance(card).attenuates(card):
        return ""
    return "The noise of each row weakens these numbers: columns that depend on each other in the table may show 0.00 here."


def _releases_rows(card: Card) -> bool:
    return find_guidance(card).shape(card) in ("rows", "ranges")
