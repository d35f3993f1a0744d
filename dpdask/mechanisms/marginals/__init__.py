"""What noisy tables are good for."""

from __future__ import annotations

import json

from dpdask.mechanisms.card import Card, Guidance, describe_smallest, list_cliques, no_margin


def _ask(card: Card) -> list[str]:
    return [
        f"{'crosstab' if len(clique) > 1 else 'share'}({', '.join(json.dumps(name, ensure_ascii=False) for name in clique[:2])})"
        for clique in card.mechanism.details.get("cliques", [])[:1]
    ]


def _of_persons(card: Card) -> bool:
    return "persons" in card.mechanism.details


def _say_smallest(card: Card) -> list[str]:
    found = describe_smallest(card)
    return [each.replace(" rows:", " persons:") for each in found] if _of_persons(card) else found


GUIDANCE = Guidance(
    title="Tables of counts with noise",
    shape=lambda _: "tables",
    uses=lambda card: (
        [
            f"The counts of these tables, each with its margin of error: {list_cliques(card.mechanism.details.get('cliques', []))}.",
            *(["Each person weighs 1, and its rows weigh the same."] if _of_persons(card) else []),
        ],
        ["Any other table or statistic: nothing else is released.", *_say_smallest(card)],
    ),
    questions=_ask,
    margins=lambda _: "Margins hold the noise of each count, with probability 95 %.",
    margin=lambda *_: no_margin,  # each count is released with its own
    attenuates=lambda _: False,
    counts=lambda name: f"of the table {name}",  # which has the names of its columns
    glossary={},
)
