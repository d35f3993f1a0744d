"""What synthetic records are good for."""

from __future__ import annotations

from dpdask.mechanisms.card import (
    Card,
    Guidance,
    ask_columns,
    counts_margin,
    describe_smallest,
    name_count,
    warn_of_means,
)


def _uses(card: Card) -> tuple[list[str], list[str]]:
    share, three = (
        card.mechanism.details.get("significant_share"),
        card.mechanism.details.get("three_way") or [],
    )
    weak = (
        f"Weak correlations: {100 * (share or 0.0):.3g} % of the fitted correlations stand out from noise. The others, weak or absent in the table, "
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
        "Standard errors as if the records had been observed: they are too small. Those of `dpdask.open` hold the noise.",
        *warn_of_means(card),
        *([] if share is None else [weak]),
        more,
        *describe_smallest(card),
    ]


GUIDANCE = Guidance(
    title="Synthetic records, drawn from a Gaussian copula of noisy counts",
    shape=lambda _: "records",
    uses=_uses,
    questions=ask_columns,
    margins=lambda _: (
        "Margins hold the noise of the counts and the randomness of drawing records, with probability 95 %; what fitting adds is not in them."
    ),
    margin=lambda _column, card, n_read, _n_rows: counts_margin(card, "one_way", n_read),
    attenuates=lambda _: False,
    counts=name_count,
    glossary={
        "Gaussian copula": "A way to draw records in which each column has a given distribution, and each two columns a given dependence."
    },
)
