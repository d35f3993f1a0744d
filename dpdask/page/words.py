"""What a release is good for and what it is not good for, what an attacker gains, and how to begin an analysis: in words, from the card."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_DOWN, ROUND_UP, Context, Decimal
from typing import Any

from dpdask.errors import list_names
from dpdask.mechanisms.card import Card
from dpdask.privacy.budget import attacker_power, bound_values, percent_above
from dpdask.privacy.rounding import order_text, write_digits

PRIORS = (0.01, 0.1, 0.5, 0.9)
ALARMS = (0.01, 0.05, 0.1)
N_ROWS_OF_A_PERSON = 5
_NOISY = ("histogram", "tree")  # references that are noisy counts
_MOST_KEPT = 20
_COUNTS = {
    "cells": "of a cell of the histogram",
    "n_rows": "of all rows",
    "fine_counts": "of a narrow cell, counted first to choose the cells of a column",
    "one_way": "of a cell of one column",
    "two_way": "of a cell of two columns",
    "measured_again": "of a cell of two columns that were counted a second time",
    "three_way": "of a cell of three columns",
}

KINDS = {
    "dip": "Rows with randomised private values (distribution-invariant privatisation)",
    "copula": "Synthetic records, drawn from a Gaussian copula of noisy counts",
    "marginals": "Tables of counts with noise",
    "histogram": "A joint histogram with noisy weights",
    "interval": "Every row, each private value as a random range that contains it",
}


def bound_belief(prior: float, epsilon: float) -> str:
    """Return, as a percentage rounded up, the most that a belief can become after an ε-private release.

    Notes
    -----
    The odds are multiplied by at most exp(ε).
    """
    return percent_above(prior / (prior + (1.0 - prior) * math.exp(-epsilon)))


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


def round_up(number: float, digits: int = 6) -> str:
    """Return a number in a few digits, rounded up because it is a bound."""
    shown = Context(prec=digits, rounding=ROUND_UP).plus(Decimal(repr(number))).normalize()
    return f"{shown:e}" if 0 < shown < Decimal("0.001") else f"{shown:f}"


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
    rows = key if card.mechanism.kind in ("dip", "interval") else ""
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


def name_counts(card: Card) -> list[tuple[str, Any]]:
    """Return names of counts that readers understand, each with what the card says of its noise."""
    noise = (card.accounting.model_extra or {}).get("noise", {})
    own = (
        {} if card.mechanism.kind == "marginals" else _COUNTS
    )  # the tables of a marginals job have the names of its columns
    return [(own.get(name, f"of the table {name}"), each) for name, each in noise.items()]


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
    if card.mechanism.kind in ("dip", "interval"):
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


def list_uses(card: Card) -> tuple[list[str], list[str]]:
    """Return what the release is good for, and what it is not good for, by its mechanism and the quality that its card measures."""
    told = card.mechanism.model_extra or {}
    good, bad = {
        "dip": _use_rows,
        "copula": _use_copula,
        "marginals": _use_tables,
        "histogram": _use_cells,
        "interval": _use_ranges,
    }.get(card.mechanism.kind, _use_unknown)(card, told)
    if card.insecure:
        bad.insert(0, "Anything but tests: its noise comes from a seed, so it protects nobody.")
    return good, bad


def _use_unknown(card: Card, told: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    del card, told
    return [], ["This page has no advice for this mechanism; read its card."]


def _use_rows(card: Card, told: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    epsilons = {name: part.epsilon for name, part in card.columns.items() if part.epsilon}
    kind = told.get("reference", {}).get("kind")
    what = (
        "shares, means and quantiles"
        if keeps_means(card) or not list_numeric(card)
        else "shares and quantiles"
    )
    good = [f"The distribution of each private column: {what} can be read off the released rows."]
    bad = [
        "Statements about a single row or person: its values are random.",
        *(() if keeps_means(card) else _warn_of_means(card)),
    ]
    structure = told.get("columns")
    if structure == "tree":
        pairs = told.get("edges", [])
        good.append(
            f"The tables of the {len(pairs)} pairs of columns along the tree: {_list_pairs(pairs)}."
        )
        bad.append(
            "Pairs of columns that the tree does not join, and what only three columns together show: they keep what follows along the tree."
        )
    elif kind == "chain":
        good.append(
            "The private columns together: their joint distribution is that of the reference."
        )
        bad.append(
            "Hiding the reference: if it is a part of the table, its records are republished without any ε."
        )
    elif _is_randomised_apart(card):
        bad.append(
            "How the private columns depend on each other: the noise of each row weakens it. Correlations of released columns are too small."
        )
    kept = [name for name, part in card.columns.items() if part.role == "kept"]
    if kept:
        good.append(
            f"Joins and groups by the kept columns ({list_names(kept, 8)}), which are unchanged."
        )
        bad.append(
            "Differences between groups, read off the rows as they are: the noise of each row shrinks them. "
            "dpdask's estimators correct this for columns of levels."
        )
    if epsilons:
        epsilon = min(epsilons.values())
        name = min(epsilons, key=lambda each: epsilons[each] or 0.0)
        bad.append(
            f"Small groups: with ε = {round_up(epsilon, 3)} for {name}, one released value tells which of two values it was in at most "
            f"{bound_belief(0.5, epsilon)} of the cases, and guessing in 50 %. Estimates for groups need many rows."
        )
    return good, bad


def _use_copula(card: Card, told: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    good = [
        "The distribution of each column.",
        "The tables of every two columns, up to the noise and to what the fit could not tell from noise.",
    ]
    bad = [
        "Statements about a single person: no record is a person's, and a record that equals one does so by chance.",
        "Standard errors as if the records had been observed: they are too small. Those of `dpdask.open` hold the noise.",
        *_warn_of_means(card),
    ]
    share = told.get("significant_share")
    if share is not None:
        bad.append(
            f"Weak correlations: {100 * share:.3g} % of the fitted correlations stand out from noise. The others, weak or absent in the table, were "
            "set close to 0."
        )
    three = told.get("three_way") or []
    bad.append(
        f"What more than two columns together show, except for {len(three)} measured tables of three columns."
        if three
        else "What more than two columns together show: no table of three columns was measured."
    )
    return good, [*bad, *_describe_smallest(card)]


def _use_tables(card: Card, told: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    cliques = told.get("cliques", [])
    return (
        [f"The counts of these tables, each with its margin of error: {_list_pairs(cliques)}."],
        ["Any other table or statistic: nothing else is released.", *_describe_smallest(card)],
    )


def _use_cells(card: Card, told: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    good = [
        "Statistics that take weights (tables, quantiles, regressions), up to the width of the cells."
    ]
    cut = told.get("cut")
    rare = (
        "hold mostly noise"
        if cut is None
        else f"hold mostly noise, and weights up to {cut:,} were set to 0"
    )
    listed = (
        f" {told['cells_listed']:,} of {told['cells']:,} cells have a weight."
        if "cells_listed" in told
        else ""
    )
    bad = [
        "Values inside a cell, which are not told apart.",
        f"Rare combinations: cells with few rows {rare}.{listed}",
    ]
    return good, [*bad, *_warn_of_means(card), *_describe_smallest(card)]


def _use_ranges(card: Card, told: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    del told
    good = [
        "Distributions and regressions by methods for ranges (interval-censored data), such as dpdask's npmle and interval regression."
    ]
    for name, part in card.columns.items():
        mean = (part.model_extra or {}).get("mean_coverage")
        if mean is not None:
            good.append(
                f"{name}: a range holds {100 * mean:.0f} % of the values on average, if they are distributed as the public reference says."
            )
    return good, [
        "The middle of a range in place of the value: means and slopes come out wrong.",
        "Hiding each value: a narrow range almost tells it.",
    ]


def warn_of_associations(card: Card) -> str:
    """Return a warning if the rows' noise weakens what released columns show of each other, else an empty text."""
    if not _is_randomised_apart(card):
        return ""
    return "The noise of each row weakens these numbers: columns that depend on each other in the table may show 0.00 here."


def _is_randomised_apart(card: Card) -> bool:
    """Return whether several columns were randomised, each on its own."""
    told = card.mechanism.model_extra or {}
    apart = (
        card.mechanism.kind == "dip"
        and told.get("columns") != "tree"
        and told.get("reference", {}).get("kind") != "chain"
    )
    return apart and sum(bool(part.epsilon) for part in card.columns.values()) > 1


def list_numeric(card: Card) -> list[str]:
    """Return the private columns with bounds: their values are numbers, dates or times."""
    return [
        name
        for name, part in card.columns.items()
        if part.role == "privatised" and "levels" not in (part.model_extra or {})
    ]


def keeps_means(card: Card) -> bool:
    """Return whether the mean of a column with bounds can be read off: no noise was added to the counts of its values."""
    kind = (card.mechanism.model_extra or {}).get("reference", {}).get("kind")
    return kind not in _NOISY if card.mechanism.kind == "dip" else card.mechanism.kind == "interval"


def _warn_of_means(card: Card) -> list[str]:
    """Return a sentence on means of columns whose counts had noise; none if no column has bounds."""
    names = list_numeric(card)
    why = "the noise of the counts hides the few rows of a tail, so the mean of a heavy tail cannot be estimated"
    if not names:
        return []
    return [
        f"Means, if bounds are far beyond most values ({list_names(names, 8)}): {why}. Use quantiles, or means of clipped values."
    ]


def _describe_smallest(card: Card) -> list[str]:
    """Return a sentence on the smallest count that can be distinguished from noise."""
    noise = (card.accounting.model_extra or {}).get("noise", {})
    margins = [each["margin_95"] for name, each in noise.items() if name != "fine_counts"]
    if not margins:
        return []
    n_rows = None if card.n_rows is None else card.n_rows.value
    share = f" ({write_digits(100 * max(margins) / n_rows, 1)} % of the rows)" if n_rows else ""
    groups = f"Groups of fewer than about {math.ceil(max(margins)):,} rows{share}"
    if card.mechanism.kind == "histogram":
        return [
            f"{groups}, even in a single cell: the noise of its count is as large. In a group of m cells the noise is about √m times that."
        ]
    return [f"{groups}: the noise of a count is as large."]


def _list_pairs(cliques: list[list[str]]) -> str:
    texts = [" × ".join(map(str, clique)) for clique in cliques[:20]]
    return "; ".join(texts) + (f"; and {len(cliques) - 20} more" if len(cliques) > 20 else "")
