"""The release card: what was promised and how it was done, as versioned JSON that is safe to publish."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from importlib.metadata import version
from typing import Any

from dpdask.codec import Codec, LevelCodec
from dpdask.mechanisms.dip.chain import BinnedRanks, ChainRelease, LaplaceRanks
from dpdask.mechanisms.dip.fit import ChannelKind
from dpdask.mechanisms.dip.fitted import FittedRelease
from dpdask.mechanisms.dip.release import ColumnMechanism, LevelMechanism, RankMechanism
from dpdask.mechanisms.dip.tree import TreeRelease
from dpdask.mechanisms.dip.tree_card import tree_accounting, tree_columns, tree_mechanism
from dpdask.mechanisms.dip.tree_spending import TreeSpending
from dpdask.mechanisms.spending import Spending
from dpdask.privacy import Budget, cautions, guarantee_text
from dpdask.privacy.coverage import Coverage
from dpdask.privacy.events import to_dict
from dpdask.privacy.order import RowOrder, order_text
from dpdask.privacy.rounding import rounded_up
from dpdask.references import Chain, Public, Reference, held_out
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
    spending: Spending | TreeSpending,
    release: FittedRelease,
    insecure: bool,
    released_share: float | None = None,
    n_rows: int | None = None,
    order: RowOrder = "keep",
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
    n_rows
        The number of rows of the table, if it is known; it is public under replace-one.
    order
        Whether the rows are shuffled or keep the order of the input.

    Privacy
    -------
    Holds parameters, the public domain, and each level column's channel. With a hold-out, the channel reveals the
    hold-out's frequencies (P·T = P), and the card says so. Knots of a continuous reference are never in it: with a
    hold-out they are rows' values. Along a tree all channels are functions of noisy tables, which paid for themselves.
    """
    unreleased = held_out(reference) or 0.0
    of = "rows" if budget.unit_column is None else "units; of each, the rows beyond the bound are not released"
    guarantee = {
        "text": ("INSECURE: the noise is reproducible from a seed, so this release protects nobody. " if insecure else "")
        + guarantee_text(budget, reference.protected, reference.unprotected, order, everyone=not unreleased),
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "adjacency": budget.adjacency,
        "unit": budget.model_dump(mode="json")["unit"],
        "protected": {"who": reference.protected, "fraction": 1.0 - unreleased, "of": of},
        "unprotected": {"who": reference.unprotected, "fraction": unreleased, "of": of},
        "cautions": list(cautions(budget, n_rows)),
    }
    if budget.unit_column is not None and released_share is not None:
        # public under replace-one, where the number of rows of a unit is; whole percents say no more than is needed
        guarantee["released_percent_of_rows"] = round(100 * released_share)
    card: dict[str, Any] = {
        "format": CARD_FORMAT,
        "name": name,
        "guarantee": guarantee,
        "mechanism": {"kind": "dip", "channel": channel, **_joint(reference, release), "reference": _reference(reference)},
        "columns": _columns(schema, codecs, spending, release) | {column: {"role": "kept"} for column in schema.kept},
        "accounting": _accounting(budget, spending, release),
        "order": order_text(order),
        "insecure": insecure,
        "versions": {"dpdask": __version__, "streams": STREAM_FORMAT, **{library: version(library) for library in _LIBRARIES}},
    }
    return (json.dumps(card, indent=1, ensure_ascii=False) + "\n").encode()


def with_dataset(card: bytes, coverage: Coverage) -> bytes:
    """Return a card with the share of its dataset's rows that had no ε in this run or an earlier one; unchanged if every row had one.

    Parameters
    ----------
    card
        As `release_card` or another kind's function returns it.
    coverage
        The coverage of the dataset's runs, including this one, from its ledger.
    """
    if not coverage.text:
        return card
    found = json.loads(card)
    found["dataset"] = {
        "text": f"In this dataset, {coverage.text}. No bound on what an attacker learns holds for rows or columns without ε.",
        "uncovered_fraction": coverage.uncovered,
        "republished_fraction": coverage.republished,
        "runs_unknown": coverage.n_unknown,
        "columns_without_epsilon": list(coverage.columns),
    }
    return (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode()


def _accounting(budget: Budget, spending: Spending | TreeSpending, release: FittedRelease) -> dict[str, Any]:
    """Return what was spent: never more than was promised, because every part was rounded down."""
    if isinstance(release, TreeRelease):
        assert isinstance(spending, TreeSpending)
        return tree_accounting(budget, spending, release)
    exact = sum((Fraction(part) for part in spending.reference.values()), Fraction(0)) + spending.rows_per_unit * Fraction(release.epsilon)
    return {
        "composition": "sum over columns, and over the rows of a unit",
        "epsilon_exact": rounded_up(exact),
        "epsilon_reference": dict(spending.reference),
        "rows_per_unit": spending.rows_per_unit,
        "events": to_dict(spending.events(budget)),
    }


def _reference(reference: Reference) -> dict[str, Any]:
    return reference.model_dump(mode="json", exclude_none=True, exclude={"path"} if isinstance(reference, Chain | Public) else None)


def _joint(reference: Reference, release: FittedRelease) -> dict[str, Any]:
    """Return what is promised of the columns' joint distribution, and how it was come by."""
    if isinstance(release, TreeRelease):
        return tree_mechanism(release)
    if not isinstance(release, ChainRelease):
        return {"columns": "independent", "joint": reference.joint}
    assert isinstance(reference, Chain)
    found: dict[str, Any] = {"columns": "chain", "joint": reference.joint, "order": list(release.columns)}
    found["reference_share"] = 2.0**-release.least_grade  # of the reference's rows: a keyed sample, where their records were too many
    if release.groups is not None:
        pooled = {"groups": release.groups.pooled_groups, "rows": release.groups.pooled_rows}
        found["by"] = {"column": release.groups.column, "min_rows": reference.min_rows}
        found["by"] |= {f"pooled_percent_of_reference_{what}": round(100 * share) for what, share in pooled.items()}
    return found | {"warnings": list(reference.warnings())}


def _columns(schema: Schema, codecs: Mapping[str, Codec], spending: Spending | TreeSpending, release: FittedRelease) -> dict[str, dict[str, Any]]:
    if isinstance(release, TreeRelease):
        domains = {name: {"kind": schema.columns[name].kind, **_domain(schema, codecs[name])} for name in release.columns}
        return {name: {"role": "privatised", **domains[name], **column} for name, column in tree_columns(release, spending.row).items()}
    return {
        name: {"role": "privatised", "epsilon": spending.row[name], **_column(schema, codecs[name], mechanism)}
        for name, mechanism in release.columns.items()
    }


def _column(schema: Schema, codec: Codec, mechanism: ColumnMechanism | LaplaceRanks | BinnedRanks) -> dict[str, Any]:
    declared = schema.columns[codec.name]
    common: dict[str, Any] = {"kind": declared.kind, "epsilon_exact": mechanism.epsilon}
    if isinstance(mechanism, LaplaceRanks | BinnedRanks):
        return common | _domain(schema, codec) | _ranks(mechanism)
    if isinstance(mechanism, LevelMechanism):
        assert isinstance(codec, LevelCodec)
        return common | _domain(schema, codec) | {"channel": mechanism.channel.matrix.tolist()}
    common |= _domain(schema, codec)
    common |= {"reference": {"knots_at_most": 2**16, "rank_error_at_most": max(2.0**-15, mechanism.distribution.rank_error)}}
    if isinstance(mechanism, RankMechanism):
        return common | {"ranks": mechanism.noise.n_cells, "alpha_log": -mechanism.noise.rate}
    return common | {"rank_edges": mechanism.edges.tolist(), "channel": mechanism.channel.matrix.tolist()}


def _domain(schema: Schema, codec: Codec) -> dict[str, Any]:
    declared = schema.columns[codec.name]
    outside = {"outside": declared.outside_in_words}
    if isinstance(codec, LevelCodec):
        return {"levels": [_plain(level) for level in codec.levels.to_pylist()]} | outside
    return {"bounds": declared.bounds, "atoms": [_plain(atom) for atom in declared.atoms or ()], "nulls": declared.nulls} | outside


def _ranks(mechanism: LaplaceRanks | BinnedRanks) -> dict[str, Any]:
    """Return how ranks given the columns before are randomised."""
    if isinstance(mechanism, LaplaceRanks):
        return {"ranks": mechanism.noise.n_cells, "alpha_log": -mechanism.noise.rate}
    return {"rank_bins": len(mechanism.channel.weights), "rank_channel": mechanism.channel.matrix.tolist()}


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str | None) else str(value)
