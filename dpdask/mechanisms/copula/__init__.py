"""What synthetic records are good for."""

from __future__ import annotations

from dpdask.archive import Named
from dpdask.mechanisms.card import (
    Card,
    Guidance,
    ask_columns,
    counts_margin,
    describe_smallest,
    name_count,
    warn_of_means,
)

_COUNTS = {
    "PP": "of a cell of two columns of persons",
    "CC": "of a cell of two columns of rows",
    "PC": "of a cell of a column of persons and one of rows",
    "WW": "of a cell of two rows of one person",
    "F": "of persons whose rows all agree in a column",
    "H": "of persons with a number of rows",
}


def _find_persons(card: Card) -> Named | None:
    """Return what the card says of persons, if the records are theirs."""
    return card.mechanism.details.get("persons")


def _use_persons(persons: Named) -> tuple[list[str], list[str]]:
    return [
        "How many rows persons have.",
        "The tables of every two columns, of persons, of rows, or of both.",
        "How alike the rows of one person are, such as the variance between persons.",
    ], [
        "Statements about a single person: no synthetic person is a real one, and keys are new numbers.",
        "Standard errors that treat the persons as observed: they are too small. Those of `dpdask.open` include the noise.",
        *(f"What is lost: {each}." for each in persons.get("lost", ())),
    ]


def _uses(card: Card) -> tuple[list[str], list[str]]:
    persons = _find_persons(card)
    if persons is not None:
        return _use_persons(persons)
    share, three = (
        card.mechanism.details.get("significant_share"),
        card.mechanism.details.get("three_way") or [],
    )
    weak = (
        f"Weak correlations: {100 * (share or 0.0):.3g} % of the fitted correlations between levels of two columns stand out from noise. The others, weak or absent in the table, "
        "were set close to 0."
    )
    more = (
        f"What more than two columns together show, except for {len(three)} measured tables of three columns."
        if three
        else "What more than two columns together show: no table of three columns was measured."
    )
    beside = "model.npz" in (card.sha256 or {})
    further = "More records, also on a condition, at no ε: `release.sample(…)`, or `dpdask sample`."
    return [
        *([further] if beside else []),
        "The distribution of each column.",
        "The tables of every two columns, up to the noise and to what the fit could not tell from noise.",
    ], [
        "Statements about a single person: no record is a person's, and a record that equals one does so by chance.",
        "Standard errors that treat the records as observed: they are too small. Those of `dpdask.open` include the noise.",
        *warn_of_means(card),
        *([] if share is None else [weak]),
        more,
        *describe_smallest(card),
    ]


GUIDANCE = Guidance(
    title="Synthetic records, drawn from a Gaussian copula of noisy counts",
    shape=lambda card: "records" if _find_persons(card) is None else "persons",
    uses=_uses,
    questions=lambda card: (
        ask_columns(card)
        if _find_persons(card) is None
        else ["persons()", "rows()", *ask_columns(card)]
    ),
    margins=lambda card: (
        "Margins hold the noise of the counts and the randomness of drawing records, with probability 95 %; what fitting adds is not in them."
        if _find_persons(card) is None
        else "No margins are known: rows of one person are alike, and what fitting adds has no bound."
    ),
    margin=lambda _column, card, n_read, _n_rows: counts_margin(card, "one_way", n_read),
    attenuates=lambda _: False,
    counts=lambda name: _COUNTS.get(name) or name_count(name),
    glossary={
        "Gaussian copula": "A way to draw records in which each column has a given distribution, and each two columns a given dependence."
    },
)
