"""What random ranges are good for."""

from __future__ import annotations

from dpdask.mechanisms.card import Card, Guidance, ask_columns, name_count, no_margin


def _uses(card: Card) -> tuple[list[str], list[str]]:
    coverages = {name: part.details.get("mean_coverage") for name, part in card.columns.items()}
    return [
        "Distributions and regressions by methods for ranges (interval-censored data), such as dpdask's npmle and interval regression.",
        *(
            f"{name}: a range holds {100 * mean:.0f} % of the values on average, if they are distributed as the public reference says."
            for name, mean in coverages.items()
            if mean is not None
        ),
    ], [
        "The middle of a range in place of the value: means and slopes come out wrong.",
        "Hiding each value: a narrow range almost tells it.",
    ]


GUIDANCE = Guidance(
    title="Every row, each private value as a random range that contains it",
    shape=lambda _: "ranges",
    uses=_uses,
    questions=lambda card: ask_columns(card, means=True, levels=False),
    margins=lambda _: "Margins hold the noise of each count, with probability 95 %.",
    margin=lambda *_: no_margin,
    attenuates=lambda _: False,
    counts=name_count,
    glossary={
        "Reference": "A public guess of the values' distribution. It measures how much a range leaves open, and is not taken from the rows."
    },
)
