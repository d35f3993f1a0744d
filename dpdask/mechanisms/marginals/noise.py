"""Contingency tables of all rows with noise of known size: what the copula is fitted to, and a release of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from dpdask.archive import Archive, Archived, Contents
from dpdask.errors import InputError, InternalError, SpecError
from dpdask.privacy import Budget, noise
from dpdask.privacy.accountant import epsilon, scale_events
from dpdask.privacy.events import (
    Adjacency,
    CentralEvent,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    central_from_dict,
    to_dict,
)
from dpdask.privacy.noise import deviation
from dpdask.references.hierarchy import N_LEVELS
from dpdask.stats import Clique, Domain, MarginalCounts
from dpdask.streams import Rng

_NORMAL_95 = 1.959963984540054
_SHARE_OF_CHOSEN, _SHARE_OF_TRIPLES, _SHARE_OF_SCORES = 0.4, 0.15, 0.05
_SHARED = (
    "one_way",
    "pairs",
    "chosen",
    "scores",
    "triples",
    "cells",
)  # the events of several tables


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginalNoise:
    """The noise of every table, decided before any is drawn.

    Privacy
    -------
    Unit and adjacency: the budget's. Sensitivity of one table: a row replaced takes 1 from a cell
    and adds 1 to another (L1 2, L2 √2), a row added or removed changes one by 1; a unit of k rows
    does so k times, and all may fall on the same cells. Which tables are chosen depends on noisy
    tables, but their number and noise do not, so the events compose as if the tables had been fixed
    beforehand. Composition over all tables: by `accountant`.
    """

    # The noise of each attribute's own table, and of each two-way table; None if these are not
    # measured.
    one_way: CentralEvent | None
    pairs: CentralEvent | None
    cliques: Mapping[Clique, CentralEvent] = field(default_factory=dict)
    # The noise of the tables that are chosen after the others were drawn, at most `chosen.count`;
    # None if none are chosen.
    chosen: CentralEvent | None = None
    # The noise of the scores by which three-way tables are chosen; None if none are chosen.
    scores: CentralEvent | None = None
    # The noise of the three-way tables that are chosen by their scores, at most `triples.count`;
    # None if none are chosen.
    triples: CentralEvent | None = None
    # The noise of the fine counts from which cells are found; None if no cells are found.
    cells: CentralEvent | None = None

    @property
    def event(self) -> Composed:
        """All events of the run, composed."""
        events = (
            self.cells,
            self.one_way,
            self.pairs,
            *self.cliques.values(),
            self.chosen,
            self.scores,
            self.triples,
        )
        return Composed(events=tuple(event for event in events if event is not None))

    def of_chosen(self, clique: Clique) -> CentralEvent | None:
        """Return the noise of all chosen tables with the clique's number of columns; None if no such tables are chosen."""
        return {2: self.chosen, 3: self.triples}.get(len(clique))

    def check_paid(self, chosen: Sequence[Clique]) -> None:
        """Check that chosen tables are distinct, are not declared ones, and are not more than the events pay for."""
        columns = {frozenset(clique) for clique in chosen}
        if len(columns) < len(chosen) or columns & {frozenset(clique) for clique in self.cliques}:
            raise ValueError("a table is chosen twice")
        for n_columns in {len(clique) for clique in chosen}:
            own = [clique for clique in chosen if len(clique) == n_columns]
            event = self.of_chosen(own[0])
            if len(own) > (0 if event is None else event.count):
                raise ValueError("more tables are chosen than are paid for")

    def to_dict(self) -> dict[str, Any]:
        """Return the noise as a mapping that JSON can hold."""
        own = {
            name: None if getattr(self, name) is None else to_dict(getattr(self, name))
            for name in _SHARED
        }
        return {
            **own,
            "cliques": [[list(clique), to_dict(event)] for clique, event in self.cliques.items()],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the noise that a mapping from `to_dict` holds."""
        own = {
            name: None if data[name] is None else central_from_dict(data[name]) for name in _SHARED
        }
        return cls(
            **own,
            cliques={tuple(clique): central_from_dict(event) for clique, event in data["cliques"]},
        )


def margin_95(event: CentralEvent) -> float:
    """Return m with Pr(|noise| > m) <= 5 %: what a cell's count may be off, in counts."""
    if isinstance(event, DiscreteGaussian):
        return _NORMAL_95 * event.sigma + 1.0
    # Pr(|e| >= j) = 2 α^j / (1 + α), α = exp(-1 / scale)
    return max(
        0.0,
        math.ceil(event.scale * math.log(2.0 / (0.05 * (1.0 + math.exp(-1.0 / event.scale)))))
        - 1.0,
    )


def plan_noise(
    budget: Budget,
    n_attributes: int,
    *,
    one_way: float = 1.0,
    pairs: float = 1.0,
    cliques: Mapping[Clique, float] | None = None,
    n_chosen: int = 0,
    n_triples: int = 0,
    n_scores: int = 0,
    n_found: int = 0,
) -> MarginalNoise:
    """Return the noise that spends a budget on tables: Gaussian if there is a δ, otherwise Laplace.

    Parameters
    ----------
    n_attributes
        How many attributes there are. How many levels they have changes no price.
    one_way, pairs
        The weight of each one-way and of each two-way table: its share of the budget, relative to
        the other tables; 0 to leave them out.
    n_chosen
        The number of tables that are chosen after the tables above were drawn. They get two fifths
        of the weight of both together.
    n_triples, n_scores
        The number of three-way tables that are chosen last, and of the candidates with a score. The
        chosen tables get 15 % of the weight of all tables, and the scores 5 %. Only with a δ.
    n_found
        The number of columns whose cells are found. Their fine counts get a twentieth of all
        weight, or a tenth for Laplace noise.
    """
    chosen = dict(cliques or {})
    rows = budget.unit_column.max_rows if budget.unit_column is not None else 1
    counted = (
        (one_way, n_attributes),
        (pairs, n_attributes * (n_attributes - 1) // 2),
        *((weight, 1) for weight in chosen.values()),
    )
    if not any(weight > 0 and count for weight, count in counted):
        raise SpecError(
            "there is no table to measure", "`weights`", "give at least one table a weight above 0"
        )
    others = sum(weight * count for weight, count in counted)
    further = (weigh(others, _SHARE_OF_CHOSEN, n_chosen), n_chosen)
    others = (others + further[0] * n_chosen) / (
        1.0 - (_SHARE_OF_TRIPLES + _SHARE_OF_SCORES if n_triples else 0.0)
    )
    triples = (others * _SHARE_OF_TRIPLES / n_triples if n_triples else 0.0, n_triples)
    scores = (others * _SHARE_OF_SCORES if n_triples else 0.0, n_scores)
    cells = share_of_cells(others, n_found, budget.delta)
    tables = tuple((weight, count, 0) for weight, count in (cells, *counted, further))
    wanted = (*tables, (scores[0], 1, scores[1]), (*triples, 0))
    fine, own, two, *named, again, scored, of_three = _plan(
        budget.epsilon, budget.delta, budget.adjacency, rows, wanted
    )
    declared = {
        clique: event for clique, event in zip(chosen, named, strict=True) if event is not None
    }
    return MarginalNoise(
        cells=fine,
        one_way=own,
        pairs=two,
        cliques=declared,
        chosen=again,
        scores=scored,
        triples=of_three,
    )


def weigh(others: float, share: float, count: int) -> float:
    """Return the weight of each of several equal tables, so that together they have a given share of the total weight.

    Parameters
    ----------
    count
        The number of tables; if it is 0, the weight is 0.
    """
    return others * share / (1.0 - share) / count if count else 0.0


def share_of_cells(others: float, n_found: int, delta: float) -> tuple[float, int]:
    """Return the weight of each vector of fine counts, and how many vectors there are.

    Parameters
    ----------
    delta
        Above 0, noise is Gaussian, and a weight is a share of the inverse variance; at 0, a weight
        is a share of ε.
    """
    n_vectors = n_found * N_LEVELS
    return weigh(others, 0.05 if delta > 0 else 0.1, n_vectors), n_vectors


@functools.lru_cache(maxsize=64)
def _plan(
    epsilon: float,
    delta: float,
    adjacency: Adjacency,
    rows: int,
    wanted: tuple[tuple[float, int, int], ...],
) -> tuple[CentralEvent | None, ...]:
    """Return the events of (weight, count, number of scores), or None for those that are left out.

    `wanted` has the order of `MarginalNoise.event`, because the last digits of a price depend on
    the order.
    """
    drafts = [
        None
        if not (weight > 0 and count)
        else draft_scores(adjacency, rows, weight, n)
        if n
        else draft(delta, adjacency, rows, weight, count)
        for weight, count, n in wanted
    ]
    found = iter(scale_events([each for each in drafts if each is not None], epsilon, delta))
    return tuple(next(found) if each is not None else None for each in drafts)


def draft(delta: float, adjacency: Adjacency, rows: int, weight: float, count: int) -> CentralEvent:
    """Return the event of some tables of one weight, up to the factor that all noise has in common."""
    replaced = adjacency == "replace-one"
    if delta > 0:
        sensitivity = rows * (math.nextafter(math.sqrt(2.0), 2.0) if replaced else 1.0)
        return DiscreteGaussian(
            sigma=1.0 / math.sqrt(weight), sensitivity=sensitivity, adjacency=adjacency, count=count
        )
    return DiscreteLaplace(
        scale=1.0 / weight,
        sensitivity=rows * (2 if replaced else 1),
        adjacency=adjacency,
        count=count,
    )


def draft_scores(adjacency: Adjacency, rows: int, weight: float, n: int) -> DiscreteGaussian:
    """Return the event of the scores of three-way tables, up to the factor that all noise has in common.

    Parameters
    ----------
    n
        The number of scores. A score is the sum over a table's cells of |count - expected|, whole
        numbers. A row that is added or removed changes one cell of each table, and so each score,
        by at most 1; one that is replaced by at most 2.

    References
    ----------
    McKenna, Mullins, Sheldon and Miklau, AIM: an adaptive and iterative mechanism for
    differentially private synthetic data (2022), for scores of this kind.
    """
    replaced = adjacency == "replace-one"
    sensitivity = math.nextafter(math.sqrt(n * (rows * (2 if replaced else 1)) ** 2), math.inf)
    unit = rows * (
        math.sqrt(2.0) if replaced else 1.0
    )  # of one table: a weight costs scores what it costs tables
    return DiscreteGaussian(
        sigma=sensitivity / unit / math.sqrt(weight), sensitivity=sensitivity, adjacency=adjacency
    )


def compute_spent(noise_: MarginalNoise, budget: Budget) -> float:
    """Return the ε, at the budget's δ, of what is drawn: never above the budget's."""
    return epsilon(noise_.event, budget.delta)


Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoisyMarginals(Archived):
    """Noisy tables; safe to publish."""

    archive: ClassVar[Archive] = Archive(
        kind="noisy-tables", format=4, noun="file of noisy tables", is_compressed=True
    )

    domain: Domain  # the attributes and their numbers of levels
    # The number of rows: exact where it is public (replace-one), otherwise estimated from the noisy
    # tables.
    n_rows: float
    noise: MarginalNoise
    # Int64 array, the attributes' tables one after the other; empty if they were not measured.
    one_way: Counts
    # Int64 array, the two-way tables in the domain's order of pairs; empty if they were not
    # measured.
    pairs: Counts
    # The further tables, int64 arrays of their shapes: first those of `noise.cliques`, then the
    # chosen ones. A pair among the chosen ones was measured twice.
    cliques: Mapping[Clique, Counts]

    def table(self, clique: Clique) -> Counts:
        """Return the noisy table of one measured clique, an int64 array with an axis for each of its attributes; may be negative.

        The clique's attributes may come in any order; the table's axes come in the same. For a pair
        that was measured twice, the second measurement is returned.
        """
        self._check(clique)
        chosen = self._find_clique(clique)
        if chosen is not None:
            return self.cliques[chosen].transpose([chosen.index(name) for name in clique])
        if len(clique) == 1 and self.one_way.size:
            place = self.domain.position(clique[0])
            start = sum(self.domain.sizes[:place])
            return self.one_way[start : start + self.domain.sizes[place]]
        if len(clique) == 2 and self.pairs.size:
            first, second = (self.domain.position(name) for name in clique)
            if first > second:
                return self.table(clique[::-1]).T
            sizes = self.domain.sizes
            start = sum(sizes[a] * sum(sizes[a + 1 :]) for a in range(first)) + sizes[first] * sum(
                sizes[first + 1 : second]
            )
            return self.pairs[start : start + sizes[first] * sizes[second]].reshape(
                sizes[first], sizes[second]
            )
        raise KeyError(clique)

    def margin(self, clique: Clique) -> float:
        """Return the half-width, in counts, of a 95 % interval for one cell of a measured table."""
        self._check(clique)
        chosen = self._find_clique(clique)
        if chosen is not None:
            return margin_95(self.noise_of(chosen))
        event = {1: self.noise.one_way, 2: self.noise.pairs}.get(len(clique))
        if event is None:
            raise KeyError(clique)
        return margin_95(event)

    def noise_of(self, clique: Clique) -> CentralEvent:
        """Return the noise of one of `cliques`, a declared or a chosen one."""
        declared = self.noise.cliques.get(clique)
        if declared is not None:
            return declared
        event = self.noise.of_chosen(clique)
        assert event is not None, "no such table is chosen"
        return replace(event, count=1)

    @property
    def chosen(self) -> tuple[Clique, ...]:
        """The chosen tables, in the order in which they were chosen."""
        return tuple(clique for clique in self.cliques if clique not in self.noise.cliques)

    def check(self, domain: Domain, noise: MarginalNoise) -> None:
        """Check that these are the tables that a run would draw now, and not those of another version."""
        if self.domain != domain or self.noise != noise:
            raise InputError(
                "these were written by another version of dpdask",
                "the run's noisy tables",
                "resume with that version, or `dpdask abort` the run",
            )

    def _contents(self) -> Contents:
        header = {
            "names": self.domain.names,
            "sizes": self.domain.sizes,
            "n_rows": self.n_rows,
            "noise": self.noise.to_dict(),
            "chosen": self.chosen,
        }
        cliques = (*self.noise.cliques, *self.chosen)
        tables = {f"clique_{place}": self.cliques[clique] for place, clique in enumerate(cliques)}
        return header, {"one_way": self.one_way, "pairs": self.pairs, **tables}

    @classmethod
    def _of_contents(cls, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        noise, domain = MarginalNoise.from_dict(header["noise"]), Domain.from_header(header)
        one_way, pairs = arrays["one_way"], arrays["pairs"]
        _check_table(one_way, (0 if noise.one_way is None else sum(domain.sizes),))
        _check_table(pairs, (0 if noise.pairs is None else int(pair_cells(domain).sum()),))
        chosen = [tuple(clique) for clique in header["chosen"]]
        noise.check_paid(chosen)
        cliques = {
            clique: arrays[f"clique_{place}"]
            for place, clique in enumerate((*noise.cliques, *chosen))
        }
        for clique, table in cliques.items():
            _check_table(table, domain.shape_of(clique))
        check_n_rows(header["n_rows"])
        return cls(
            domain=domain,
            n_rows=header["n_rows"],
            noise=noise,
            one_way=one_way,
            pairs=pairs,
            cliques=cliques,
        )

    def _check(self, clique: Clique) -> None:
        if len(set(clique)) != len(clique) or not set(clique) <= set(self.domain.names):
            raise KeyError(clique)

    def _find_clique(self, clique: Clique) -> Clique | None:
        """Return the further table of these attributes: in this order, or else in another."""
        return (
            clique
            if clique in self.cliques
            else next((chosen for chosen in self.cliques if set(chosen) == set(clique)), None)
        )


def _check_table(table: NDArray[Any], shape: tuple[int, ...]) -> None:
    if table.dtype != np.int64 or table.shape != shape:
        raise ValueError("a table has another shape than the domain gives it")


def check_n_rows(n_rows: object) -> None:
    """Check a number of rows from outside."""
    if type(n_rows) not in (int, float) or not abs(n_rows) <= noise.MAX_COUNT:  # type: ignore[arg-type]  # also refuses NaN
        raise ValueError("no table has this number of rows")


def measure(
    counts: MarginalCounts, planned: MarginalNoise, *, n_rows_public: bool, rng: Rng | None = None
) -> NoisyMarginals:
    """Return all noisy tables except the chosen ones: drawn on the driver, once, after the ledger has been charged.

    Parameters
    ----------
    planned
        The noise; each table of `planned.cliques` must be among the counts' cliques.
    rng
        None: secure noise. A stream: INSECURE, for runs marked so; see `privacy.noise`.

    Privacy
    -------
    Unit, sensitivity, event: `MarginalNoise`. Protected: every row counted.
    """
    domain = counts.domain
    none = np.zeros(0, dtype=np.int64)
    noisy_one = (
        noise.perturb(counts.one_way, planned.one_way, rng=rng)
        if planned.one_way is not None
        else none
    )
    noisy_pairs = (
        noise.perturb(counts.pairs, planned.pairs, rng=rng) if planned.pairs is not None else none
    )
    further = {
        clique: noise.perturb(counts.table(clique), event, rng=rng)
        for clique, event in planned.cliques.items()
    }
    total = (
        float(counts.n_rows)
        if n_rows_public
        else _total(domain, planned, noisy_one, noisy_pairs, further)
    )
    return NoisyMarginals(
        domain=domain,
        n_rows=total,
        noise=planned,
        one_way=noisy_one,
        pairs=noisy_pairs,
        cliques=further,
    )


def measure_chosen(
    noisy: NoisyMarginals, counts: MarginalCounts, chosen: Sequence[Clique], rng: Rng | None = None
) -> NoisyMarginals:
    """Return noisy tables extended by the chosen ones: drawn in the same run, on the driver, once.

    Parameters
    ----------
    chosen
        The chosen tables, which may depend only on noisy tables and scores drawn before. At most
        `chosen.count` have two columns, and at most `triples.count` three.

    Privacy
    -------
    Unit, sensitivity, event: `MarginalNoise`. Protected: every row counted.
    """
    try:
        noisy.noise.check_paid((*noisy.chosen, *chosen))
    except ValueError as error:
        raise InternalError(str(error), None, "report it") from None
    measured = {
        clique: noise.perturb(counts.table(clique), noisy.noise_of(clique), rng=rng)
        for clique in chosen
    }
    return replace(noisy, cliques={**noisy.cliques, **measured})


def _total(
    domain: Domain,
    planned: MarginalNoise,
    one_way: Counts,
    pairs: Counts,
    cliques: Mapping[Clique, Counts],
) -> float:
    """Return the number of rows from the noisy tables alone, each table's sum weighted by its inverse variance; at least 1."""
    sums: list[tuple[float, float]] = []
    if planned.one_way is not None:
        starts = np.concatenate([[0], np.cumsum(domain.sizes)[:-1]])
        sums += zip(
            np.add.reduceat(one_way, starts),
            deviation(planned.one_way) ** 2 * np.array(domain.sizes),
            strict=True,
        )
    if planned.pairs is not None:
        cells = pair_cells(domain)
        sums += zip(
            np.add.reduceat(pairs, np.concatenate([[0], np.cumsum(cells)[:-1]])),
            deviation(planned.pairs) ** 2 * cells,
            strict=True,
        )
    sums += [
        (float(table.sum()), deviation(planned.cliques[clique]) ** 2 * table.size)
        for clique, table in cliques.items()
    ]
    weights = np.array([1.0 / variance for _, variance in sums])
    return max(
        1.0, float(np.dot(weights, np.array([float(value) for value, _ in sums])) / weights.sum())
    )


def pair_cells(domain: Domain) -> NDArray[np.int64]:
    """Return the number of cells of each two-way table, in the domain's order: int64 array of shape (n_pairs,)."""
    sizes = np.array(domain.sizes, dtype=np.int64)
    first, second = np.triu_indices(len(sizes), k=1)
    return sizes[first] * sizes[second]
