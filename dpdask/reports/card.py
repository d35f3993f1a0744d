"""The release card: what was promised and how it was done, as versioned JSON that is safe to publish."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from importlib.metadata import version
from typing import Any

from dpdask.codec import Codec, LevelCodec
from dpdask.mechanisms import ChannelKind, DipRelease, LevelMechanism, RankMechanism
from dpdask.mechanisms.dip import ColumnMechanism
from dpdask.mechanisms.spending import Spending
from dpdask.privacy import Budget, guarantee_text
from dpdask.privacy.events import to_dict
from dpdask.references import Holdout, Reference
from dpdask.schema import Schema
from dpdask.streams import STREAM_FORMAT
from dpdask.version import __version__

CARD_FORMAT = 1
_LIBRARIES = ("numpy", "pyarrow", "randomgen")


def release_card(
    *,
    name: str,
    budget: Budget,
    reference: Reference,
    channel: ChannelKind,
    schema: Schema,
    codecs: Mapping[str, Codec],
    spending: Spending,
    release: DipRelease,
    insecure: bool,
    released_share: float | None = None,
) -> bytes:
    """Return the card as canonical JSON: the same release, the same bytes.

    Parameters
    ----------
    name
        The job's name.
    budget, reference, channel, schema, codecs, spending, release
        What was promised and fitted.
    insecure
        Whether the noise came from a seed.
    released_share
        Which part of the rows is released, where a unit's bound drops some; given as a whole percentage.

    Privacy
    -------
    Holds parameters, the public domain, and each level column's channel. With a hold-out, the channel reveals the
    hold-out's frequencies (P·T = P), and the card says so. Knots of a continuous reference are never in it: with a
    hold-out they are rows' values.
    """
    held_out = reference.fraction if isinstance(reference, Holdout) else 0.0
    of = "rows" if budget.unit_column is None else "units; of each, the rows beyond the bound are not released"
    guarantee = {
        "text": ("INSECURE: the noise is reproducible from a seed, so this release protects nobody. " if insecure else "")
        + guarantee_text(budget, reference.protected, reference.unprotected),
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "adjacency": budget.adjacency,
        "unit": budget.model_dump(mode="json")["unit"],
        "protected": {"who": reference.protected, "fraction": 1.0 - held_out, "of": of},
        "unprotected": {"who": reference.unprotected, "fraction": held_out, "of": of},
    }
    if budget.unit_column is not None and released_share is not None:
        # public under replace-one, where the number of rows of a unit is; whole percents say no more than is needed
        guarantee["released_percent_of_rows"] = round(100 * released_share)
    card: dict[str, Any] = {
        "format": CARD_FORMAT,
        "name": name,
        "guarantee": guarantee,
        "mechanism": {"kind": "dip", "channel": channel, "columns": "independent", "reference": _reference(reference)},
        "columns": {
            column: {"role": "privatised", "epsilon": spending.row[column], **_column(schema, codecs[column], mechanism)}
            for column, mechanism in release.columns.items()
        }
        | {column: {"role": "kept"} for column in schema.kept},
        "accounting": _accounting(budget, spending, release),
        "order": "rows keep the order of the input, which is public",
        "insecure": insecure,
        "versions": {"dpdask": __version__, "streams": STREAM_FORMAT, **{library: version(library) for library in _LIBRARIES}},
    }
    return (json.dumps(card, indent=1, ensure_ascii=False) + "\n").encode()


def _accounting(budget: Budget, spending: Spending, release: DipRelease) -> dict[str, Any]:
    """Return what was spent: never more than was promised, because every part was rounded down."""
    exact = sum((Fraction(part) for part in spending.reference.values()), Fraction(0)) + spending.rows_per_unit * Fraction(release.epsilon)
    total = float(exact)
    return {
        "composition": "sum over columns, and over the rows of a unit",
        "epsilon_exact": total if Fraction(total) >= exact else math.nextafter(total, math.inf),
        "epsilon_reference": dict(spending.reference),
        "rows_per_unit": spending.rows_per_unit,
        "events": to_dict(spending.events(budget)),
    }


def _reference(reference: Reference) -> dict[str, Any]:
    return {"kind": "public"} if reference.kind == "public" else reference.model_dump(mode="json", exclude_none=True)


def _column(schema: Schema, codec: Codec, mechanism: ColumnMechanism) -> dict[str, Any]:
    declared = schema.columns[codec.name]
    common: dict[str, Any] = {"kind": declared.kind, "epsilon_exact": mechanism.epsilon}
    if isinstance(mechanism, LevelMechanism):
        assert isinstance(codec, LevelCodec)
        return common | {"levels": [_plain(level) for level in codec.levels.to_pylist()], "channel": mechanism.channel.matrix.tolist()}
    common |= {"bounds": declared.bounds, "atoms": [_plain(atom) for atom in declared.atoms or ()], "nulls": declared.nulls}
    common |= {"reference": {"knots_at_most": 2**16, "rank_error_at_most": max(2.0**-15, mechanism.distribution.rank_error)}}
    if isinstance(mechanism, RankMechanism):
        return common | {"ranks": mechanism.noise.n_cells, "alpha_log": -mechanism.noise.rate}
    return common | {"rank_edges": mechanism.edges.tolist(), "channel": mechanism.channel.matrix.tolist()}


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
