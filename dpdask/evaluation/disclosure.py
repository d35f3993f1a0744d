"""What a release discloses of people in its table: membership and attribute inference, beside their baselines and what ε allows. CONFIDENTIAL.

An attack that fails proves nothing: another may do better. What ε allows holds for every attack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.random import Generator

from dpdask.arrays import Floats, Ints, freeze_class
from dpdask.evaluation.measures import Score, cut_ranges
from dpdask.evaluation.samples import Side
from dpdask.mechanisms.card import Card, CoveredRows
from dpdask.privacy import attacker_power
from dpdask.privacy.budget import bound_values

ALARMS = 0.05  # the rate of false alarms at which membership is tested, as on the card
_N_TARGETS, _N_ATTRIBUTES, _N_STEPS = 500, 20, 64
_AT_ONCE = 10_000_000  # distances in memory
_NEAR, _NIL = 1e-6, 1e-12


@freeze_class
class Attack:
    """How often an attack is right, and what stands beside it."""

    name: str
    guess: float  # by blind guessing
    members: Score  # with the release, of people of the table
    without: Score | None = None  # with records of other people in place of the release
    outsiders: Score | None = None  # with the release, of people who are not in the table
    allowed: float | None = None  # the most that any attack may reach, where it is known


@freeze_class
class Disclosure:
    """The attacks on a release."""

    membership: Attack | None  # None without people who are not in the table
    by_channel: bool  # whether it weighs released rows by the channels on the card
    attributes: tuple[Attack, ...]  # those that gain most come first
    uncovered: float  # the share of the rows that no ε covers


@freeze_class
class _Found:
    """What an attacker finds in some records, for each target."""

    distance: Floats  # to the nearest record: of kept columns, and then of others
    likelihood: Floats  # log of the mean likelihood ratio of the records that may be the target's
    guesses: Mapping[str, Ints]  # by column, what most of the records say that are nearest else


def measure_disclosure(
    original: Side, released: Side, outside: Side | None, card: Card, rng: Generator
) -> Disclosure:
    """Return how well attacks do that know the release, and all of their targets but what they ask.

    Parameters
    ----------
    outside
        Rows of the same population that are not in the table. Half of them are the control group;
        the others are what an attacker without the release has in its place.

    References
    ----------
    Giomi et al., A unified framework for quantifying privacy risk in synthetic data (2023); Watson
    et al., On the importance of difficulty calibration in membership inference attacks (2022).
    """
    attacker = _Attacker(original, released, card)
    members = original.take(rng.permutation(original.n_rows)[:_N_TARGETS])
    found = attacker.look(members, released)
    kept = len(attacker.private) < len(original.columns)
    attributes, membership = attacker.list_attributes([(members, found)]), None
    if outside is not None:
        order = rng.permutation(outside.n_rows)
        n_control = min(_N_TARGETS, outside.n_rows // 2)
        control, known = outside.take(order[:n_control]), outside.take(order[n_control:])
        if kept:  # presence is published: in a row that is there stand the values of another
            rows = members.take(rng.integers(0, members.n_rows, n_control))
            own = {name: control.columns[name] for name in attacker.private}
            control = replace(rows, columns={**rows.columns, **own})
        of_control = attacker.look(control, released)
        without = [attacker.look(each, known) for each in (members, control)]
        if attacker.channels:
            scores = [found.likelihood, of_control.likelihood]
        else:  # nearer to the release than to other people, by ratio: a copy lies at 0
            sides = zip(without, (found, of_control), strict=True)
            scores = [(one.distance + _NIL) / (two.distance + _NIL) for one, two in sides]
        membership = Attack(
            name="values of a row" if kept else "presence of a record",
            guess=ALARMS,
            without=find_power([-each.distance for each in without], rng),
            members=find_power(scores, rng),
            allowed=attacker.allow(ALARMS, values=kept),
        )
        sides_of = [(members, found), (members, without[0]), (control, of_control)]
        attributes = attacker.list_attributes(sides_of)
    return Disclosure(
        membership=membership,
        by_channel=bool(attacker.channels),
        attributes=attributes,
        uncovered=attacker.uncovered,
    )


def find_power(scores: Sequence[Floats], rng: Generator) -> Score:
    """Return which part of the members scores higher than all outsiders but 5 %; ties are broken by chance."""
    n_members, n_outsiders = map(len, scores)
    both = np.concatenate(scores)
    ranks = np.argsort(np.lexsort((rng.random(len(both)), both)))
    limit = np.sort(ranks[n_members:])[n_outsiders - 1 - math.floor(ALARMS * n_outsiders)]
    power = float((ranks[:n_members] > limit).mean())
    # of the members, and of the outsiders who set the limit
    error = power * (1.0 - power) / n_members + ALARMS * (1.0 - ALARMS) / n_outsiders
    return Score(value=power, standard_error=math.sqrt(error))


class _Attacker:
    """Who knows the release, its card, and all of a target but what is asked."""

    def __init__(self, original: Side, released: Side, card: Card) -> None:
        self.levels = original.levels
        self.promise = card.guarantee
        self.private = [name for name in original.columns if card.columns[name].role != "kept"]
        self.released = released
        read = {name: self._read_channel(name, card.columns[name].details) for name in self.private}
        self.channels = {name: channel for name, channel in read.items() if channel is not None}
        protected = card.guarantee.unprotected
        self.uncovered = protected.fraction if isinstance(protected, CoveredRows) else 0.0
        self.scales = {
            name: float(np.nanmax(values) - np.nanmin(values)) or 1.0
            for name, values in original.columns.items()
            if name not in original.levels and np.isfinite(values).any()
        }

    def allow(self, level: float, *, values: bool) -> float | None:
        """Return the most that any attack can reach that is right about outsiders at a level; of rows that ε does not cover, all."""
        promise = self.promise
        if promise.epsilon is None or promise.delta is None:
            return None
        spent = promise.epsilon, float(promise.delta)
        epsilon, delta = bound_values(*spent, promise.adjacency) if values else spent
        covered = 1.0 - self.uncovered
        return covered * attacker_power(epsilon, delta, level) + self.uncovered

    def _read_channel(
        self, name: str, column: Mapping[str, Any]
    ) -> tuple[Floats | None, Floats] | None:
        """Return the edges of a number's ranks, if it is one, and log T(x → y) / Q(y) of its cells; None where the card has no channel."""
        edges = None
        if "alpha_log" in column:
            edges = np.linspace(0.0, 1.0, _N_STEPS + 1)
            steps = np.abs(np.subtract.outer(np.arange(_N_STEPS), np.arange(_N_STEPS)))
            weights = np.exp(column["alpha_log"] * column["ranks"] / _N_STEPS * steps)
        elif column.get("channel"):
            weights = np.array(column["channel"], float)
            edges = np.array(column["rank_edges"]) if "rank_edges" in column else None
        else:
            return None
        codes = self._code(name, edges, self.released)
        counts = np.bincount(codes, minlength=len(weights) + 1)[: len(weights)]
        shares = counts / max(len(codes), 1)  # a column may hold nulls alone
        if "alpha_log" in column:
            ratios = weights / np.maximum(weights @ shares, 1e-300)[:, None]
        else:
            ratios = weights / np.maximum(shares, 1e-12)
        table = np.zeros((len(weights) + 1, len(weights) + 1))  # the last is of other values
        table[:-1, :-1] = np.log(np.maximum(ratios, 1e-300))
        return edges, table

    def _code(self, name: str, edges: Floats | None, side: Side) -> Ints:
        """Return the cells of a column's values: its levels, or the ranges of its ranks in the release."""
        values = side.columns[name]
        if edges is None:
            return values
        known = np.sort(self.released.columns[name][~np.isnan(self.released.columns[name])])
        places = (np.searchsorted(known, values) + np.searchsorted(known, values, "right")) / 2
        cells = np.digitize(places / max(len(known), 1), edges[1:-1])
        return np.where(np.isnan(values), len(edges) - 1, cells)

    def look(self, targets: Side, table: Side) -> _Found:
        """Return what the records of a table tell of targets."""
        coded = {name: self._cut(name, table) for name in self.private[:_N_ATTRIBUTES]}
        cells = {
            name: [self._code(name, edges, side) for side in (targets, table)]
            for name, (edges, _) in self.channels.items()
        }
        distance, likelihood = np.zeros(targets.n_rows), np.zeros(targets.n_rows)
        guesses = {name: np.zeros(targets.n_rows, dtype=np.int64) for name in coded}
        n = max(1, _AT_ONCE // (table.n_rows * len(targets.columns)))
        for start in range(0, targets.n_rows, n):
            rows = slice(start, start + n)
            apart = {name: self._compare(name, targets, table, rows) for name in targets.columns}
            total = np.sum(list(apart.values()), axis=0)
            distance[rows] = total.min(axis=1)
            for name, codes in coded.items():
                rest = total - apart[name]
                near = rest <= rest.min(axis=1, keepdims=True) + _NEAR
                for place, chosen in enumerate(near):
                    guesses[name][start + place] = np.bincount(codes[chosen]).argmax()
            ratio = np.zeros_like(total)
            for name, (own, others) in cells.items():
                ratio += self.channels[name][1][own[rows]][:, others]
            kept = [apart[name] for name in targets.columns if name not in self.private]
            possible = np.sum(kept, axis=0) <= _NEAR if kept else np.ones_like(total, dtype=bool)
            weights = np.where(possible, np.exp(np.minimum(ratio, 500.0)), 0.0)
            mean = weights.sum(axis=1) / np.maximum(possible.sum(axis=1), 1)
            likelihood[rows] = np.log(np.where(possible.any(axis=1), np.maximum(mean, 1e-300), 1.0))
        return _Found(distance=distance, likelihood=likelihood, guesses=guesses)

    def _compare(self, name: str, targets: Side, table: Side, rows: slice) -> Floats:
        """Return how far apart values are: 0 or 1, numbers by their part of the range; a kept column outweighs all others, since rows keep it."""
        one, other = targets.columns[name][rows, None], table.columns[name][None, :]
        alike: Any = (one == other) | ((one != one) & (other != other))  # null is like null
        if name in self.levels or name not in self.private:
            return np.where(alike, 0.0, 1.0 if name in self.private else len(targets.columns))
        apart = np.minimum(np.abs(one - other) / self.scales.get(name, 1.0), 1.0)
        return np.where(alike, 0.0, np.nan_to_num(apart, nan=1.0))

    def _cut(self, name: str, side: Side) -> Ints:
        values = side.columns[name]
        return values if name in self.levels else cut_ranges(self.released.columns[name], values)[1]

    def list_attributes(self, sides: Sequence[tuple[Side, _Found]]) -> tuple[Attack, ...]:
        """Return how often a value is guessed from the others: of members; then without the release, and of outsiders."""
        attacks = []
        for name in sides[0][1].guesses:
            frequent = np.bincount(self._cut(name, self.released)).argmax()
            guess = self._rate(name, sides[0][0], frequent).value
            found = [self._rate(name, side, each.guesses[name]) for side, each in sides]
            most = self.allow(found[2].value, values=True) if len(found) > 2 else None
            told = dict(zip(("members", "without", "outsiders"), found, strict=False))
            attacks.append(Attack(name=name, guess=guess, allowed=most, **told))
        return tuple(sorted(attacks, key=lambda each: each.guess - each.members.value))

    def _rate(self, name: str, targets: Side, guesses: Any) -> Score:
        right = float((self._cut(name, targets) == guesses).mean())
        error = math.sqrt(right * (1.0 - right) / targets.n_rows)
        return Score(value=right, standard_error=error)
