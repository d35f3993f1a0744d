"""What a release card says about distribution-invariant privatisation, whatever the structure of its reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpdask.codec import Codec, LevelCodec
from dpdask.mechanisms.card import Section, tell_bounds, tell_numbers
from dpdask.mechanisms.card_parts import CoveredRows
from dpdask.privacy import Budget, guarantee_text
from dpdask.privacy.order import RowOrder, order_text
from dpdask.references import Reference
from dpdask.schema import Schema


def dip_section(
    *,
    budget: Budget,
    reference: Reference,
    covered: tuple[str, str],
    unreleased: float = 0.0,
    channel: str,
    joint: Mapping[str, Any],
    columns: Mapping[str, Mapping[str, Any]],
    accounting: Mapping[str, Any],
    released_share: float | None = None,
    n_rows: int | None = None,
    order: RowOrder = "keep",
) -> Section:
    """Return what the card says about a release row by row.

    Parameters
    ----------
    budget, reference, channel
        What was promised, and how.
    covered
        Who is covered, and who is not, in words.
    unreleased
        Which fraction of the rows, or of the units, is held out.
    joint
        What is promised of the columns' joint distribution.
    columns
        What is said about each column.
    accounting
        What was spent.
    released_share
        Which part of the rows is released, where a unit's bound drops some; given as a whole percentage.
    n_rows
        The number of rows of the table, if it is known; it is public under replace-one.
    order
        Whether the rows are shuffled or keep the order of the input.

    Privacy
    -------
    Holds parameters, the public domain, and each level column's channel. With a hold-out, the channel reveals the
    hold-out's frequencies (P·T = P), and the card says so. Knots of a continuous reference are never in it: with a
    hold-out they are rows' values. Along a tree all channels are functions of noisy tables, which have their own ε.
    """
    of = "rows" if budget.unit_column is None else "units; of each, the rows beyond the bound are not released"
    guarantee = {}
    if budget.unit_column is not None and released_share is not None:
        # public under replace-one, where the number of rows of a unit is; whole percents say no more than is needed
        guarantee["released_percent_of_rows"] = round(100 * released_share)
    shown = reference.model_dump(mode="json", exclude_none=True, exclude={"path"})
    return Section(
        budget=budget,
        text=guarantee_text(budget, *covered, order, everyone=not reference.uncovered),
        protected=CoveredRows(who=covered[0], fraction=1.0 - unreleased, of=of),
        unprotected=CoveredRows(who=covered[1], fraction=unreleased, of=of),
        mechanism={"kind": "dip", "channel": channel, **joint, "reference": shown},
        columns=columns,
        accounting=accounting,
        order=order_text(order),
        public_rows=n_rows,
        guarantee=guarantee,
    )


def describe_domain(schema: Schema, codec: Codec) -> dict[str, Any]:
    """Return what the card says about a column's public domain.

    Parameters
    ----------
    schema
        The declared columns.
    codec
        The column's codec.
    """
    declared = schema.columns[codec.name]
    outside = {"kind": declared.kind, "outside": declared.outside_in_words}
    if isinstance(codec, LevelCodec):
        return {"levels": codec.levels.to_pylist()} | outside
    return {"bounds": tell_bounds(declared, codec), "atoms": declared.atoms or (), "nulls": declared.nulls} | tell_numbers(codec) | outside
