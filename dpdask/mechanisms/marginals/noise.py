"""Contingency tables of all rows with noise of known size: what the copula is fitted to, and a release of its own."""

from __future__ import annotations

import functools
import math
from collections import Counter
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
# the events of several tables, in the order in which they are charged but for declared tables
_SHARED = ("cells", "one_way", "pairs", "chosen", "scores", "triples")


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

    one_way: CentralEvent | None  # of each attribute's own table
    pairs: CentralEvent | None  # of each two-way table
    cliques: Mapping[Clique, CentralEvent] = field(default_factory=dict)  # of declared tables
    chosen: CentralEvent | None = None  # of the pairs that are measured again, `count` at most
    scores: CentralEvent | None = None  # of the scores by which three-way tables are chosen
    triples: CentralEvent | None = None  # of the three-way tables, `count` at most
    cells: CentralEvent | None = None  # of the fine counts from which cells are found

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

    def of_chosen(self, n_columns: int) -> CentralEvent | None:
        """Return the noise of chosen tables of so many columns; None if none are chosen."""
        return {2: self.chosen, 3: self.triples}.get(n_columns)

    def check_paid(self, chosen: Sequence[Clique]) -> None:
        """Check that chosen tables are distinct and not declared, and not more than are paid for."""
        columns = [frozenset(clique) for clique in (*self.cliques, *chosen)]
        if len(set(columns)) < len(columns):
            raise ValueError("a table is chosen twice")
        for n_columns, n_chosen in Counter(map(len, chosen)).items():
            event = self.of_chosen(n_columns)
            if event is None or n_chosen > event.count:
                raise ValueError("more tables are chosen than are paid for")

    def to_dict(self) -> dict[str, Any]:
        """Return the noise as a mapping that JSON can hold."""
        shared = {name: getattr(self, name) for name in _SHARED}
        written = {name: event and to_dict(event) for name, event in shared.items()}
        cliques = [[list(clique), to_dict(event)] for clique, event in self.cliques.items()]
        return {**written, "cliques": cliques}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the noise that a mapping from `to_dict` holds."""
        shared = {
            name: None if data[name] is None else central_from_dict(data[name]) for name in _SHARED
        }
        cliques = {tuple(clique): central_from_dict(event) for clique, event in data["cliques"]}
        return cls(**shared, cliques=cliques)


def margin_95(event: CentralEvent) -> float:
    """Return m with Pr(|noise| > m) <= 5 %: what a cell's count may be off, in counts."""
    if isinstance(event, DiscreteGaussian):
        return _NORMAL_95 * event.sigma + 1.0
    # Pr(|e| >= j) = 2 α^j / (1 + α), α = exp(-1 / scale)
    alpha = math.exp(-1.0 / event.scale)
    return max(0.0, math.ceil(event.scale * math.log(2.0 / (0.05 * (1.0 + alpha)))) - 1.0)


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
    declared = dict(cliques or {})
    n_pairs = n_attributes * (n_attributes - 1) // 2
    rows = budget.unit_column.max_rows if budget.unit_column is not None else 1
    drafts: dict[str | Clique, CentralEvent] = {}

    def add(table: str | Clique, weight: float, count: int) -> None:
        if weight > 0 and count:
            drafts[table] = draft(budget.delta, budget.adjacency, rows, weight, count)

    add("one_way", one_way, n_attributes)
    add("pairs", pairs, n_pairs)
    for clique, weight in declared.items():
        add(clique, weight, 1)
    if not drafts:
        hint = "give at least one table a weight above 0"
        raise SpecError("there is no table to measure", "`weights`", hint)
    others = sum((one_way * n_attributes, pairs * n_pairs, *declared.values()))
    again = weigh(others, _SHARE_OF_CHOSEN, n_chosen)
    add("chosen", again, n_chosen)
    others += again * n_chosen
    if n_triples:
        others /= 1.0 - (_SHARE_OF_TRIPLES + _SHARE_OF_SCORES)
        weight = others * _SHARE_OF_SCORES
        drafts["scores"] = draft_scores(budget.adjacency, rows, weight, n_scores)
        add("triples", others * _SHARE_OF_TRIPLES / n_triples, n_triples)
    add("cells", *share_of_cells(others, n_found, budget.delta))
    if "cells" in drafts:  # the last digits of a price depend on the order in which it is charged
        drafts = {"cells": drafts.pop("cells"), **drafts}
    scaled = _scale(tuple(drafts.values()), budget.epsilon, budget.delta)
    events = dict(zip(drafts, scaled, strict=True))
    return MarginalNoise(
        **{name: events.get(name) for name in _SHARED},
        cliques={clique: events[clique] for clique in declared if clique in events},
    )


_scale = functools.lru_cache(maxsize=64)(scale_events)


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


def draft(delta: float, adjacency: Adjacency, rows: int, weight: float, count: int) -> CentralEvent:
    """Return the event of some tables of one weight, up to the factor that all noise has in common."""
    n_changed = 2 if adjacency == "replace-one" else 1  # cells of a table that a row changes by 1
    if delta > 0:
        norm = math.nextafter(math.sqrt(2.0), 2.0) if n_changed == 2 else 1.0
        return DiscreteGaussian(
            sigma=1.0 / math.sqrt(weight), sensitivity=rows * norm, adjacency=adjacency, count=count
        )
    return DiscreteLaplace(
        scale=1.0 / weight, sensitivity=rows * n_changed, adjacency=adjacency, count=count
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
    n_changed = 2 if adjacency == "replace-one" else 1
    sensitivity = math.nextafter(math.sqrt(n * (rows * n_changed) ** 2), math.inf)
    unit = rows * math.sqrt(n_changed)  # of one table: a weight costs scores what it costs tables
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

    domain: Domain
    n_rows: float  # exact where it is public (replace-one), otherwise estimated from noisy tables
    noise: MarginalNoise
    # int64: the attributes' tables one after the other, and two-way tables in the domain's order of
    # pairs; empty if they were not measured
    one_way: Counts
    pairs: Counts
    # int64 of their shapes: first the tables of `noise.cliques`, then the chosen ones. A pair among
    # the chosen ones was measured twice.
    cliques: Mapping[Clique, Counts]

    def table(self, clique: Clique) -> Counts:
        """Return the noisy table of one measured clique, an int64 array with an axis for each of its attributes; may be negative.

        The clique's attributes may come in any order; the table's axes come in the same. For a pair
        that was measured twice, the second measurement is returned.
        """
        self._find_noise(clique)
        counts = MarginalCounts(self.domain, 0, self.one_way, self.pairs, self.cliques)
        return counts.table(clique)

    def margin(self, clique: Clique) -> float:
        """Return the half-width, in counts, of a 95 % interval for one cell of a measured table."""
        return margin_95(self._find_noise(clique))

    def _find_noise(self, clique: Clique) -> CentralEvent:
        """Return the noise of a measured table, whose attributes may come in any order."""
        names = set(clique)
        if len(names) == len(clique) and names <= set(self.domain.names):
            for known in self.cliques:
                if set(known) == names:
                    return self.noise_of(known)
            event = {1: self.noise.one_way, 2: self.noise.pairs}.get(len(clique))
            if event is not None:
                return event
        raise KeyError(clique)

    def noise_of(self, clique: Clique) -> CentralEvent:
        """Return the noise of one of `cliques`, a declared or a chosen one."""
        if clique in self.noise.cliques:
            return self.noise.cliques[clique]
        event = self.noise.of_chosen(len(clique))
        assert event is not None, "no such table is chosen"
        return replace(event, count=1)

    @property
    def chosen(self) -> tuple[Clique, ...]:
        """The chosen tables, in the order in which they were chosen."""
        return tuple(clique for clique in self.cliques if clique not in self.noise.cliques)

    def check(self, domain: Domain, noise: MarginalNoise) -> None:
        """Check that these are the tables that a run would draw now, and not those of another version."""
        if self.domain != domain or self.noise != noise:
            what, hint = (
                "these were written by another version of dpdask",
                "resume with that version",
            )
            raise InputError(what, "the run's noisy tables", f"{hint}, or `dpdask abort` the run")

    def _contents(self) -> Contents:
        header = {
            "names": self.domain.names,
            "sizes": self.domain.sizes,
            "n_rows": self.n_rows,
            "noise": self.noise.to_dict(),
            "chosen": self.chosen,
        }
        tables = {f"clique_{place}": table for place, table in enumerate(self.cliques.values())}
        return header, {"one_way": self.one_way, "pairs": self.pairs, **tables}

    @classmethod
    def _of_contents(cls, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        noise, domain = MarginalNoise.from_dict(header["noise"]), Domain.from_header(header)
        chosen = [tuple(clique) for clique in header["chosen"]]
        noise.check_paid(chosen)
        n_pairs = 0 if noise.pairs is None else int(pair_cells(domain).sum())
        shapes: dict[str, tuple[int, ...]] = {
            "one_way": (0 if noise.one_way is None else sum(domain.sizes),),
            "pairs": (n_pairs,),
        }
        cliques = (*noise.cliques, *chosen)
        shapes |= {f"clique_{n}": domain.shape_of(clique) for n, clique in enumerate(cliques)}
        for name, shape in shapes.items():
            if arrays[name].dtype != np.int64 or arrays[name].shape != shape:
                raise ValueError("a table has another shape than the domain gives it")
        check_n_rows(header["n_rows"])
        return cls(
            domain=domain,
            n_rows=header["n_rows"],
            noise=noise,
            one_way=arrays["one_way"],
            pairs=arrays["pairs"],
            cliques={clique: arrays[f"clique_{n}"] for n, clique in enumerate(cliques)},
        )


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

    def perturb(table: Counts, event: CentralEvent | None) -> Counts:
        if event is None:
            return np.zeros(0, dtype=np.int64)
        return noise.perturb(table, event, rng=rng)

    one_way, pairs = (
        perturb(counts.one_way, planned.one_way),
        perturb(counts.pairs, planned.pairs),
    )
    cliques = {
        clique: perturb(counts.table(clique), event) for clique, event in planned.cliques.items()
    }
    return NoisyMarginals(
        domain=counts.domain,
        n_rows=float(counts.n_rows)
        if n_rows_public
        else _total(counts.domain, planned, one_way, pairs, cliques),
        noise=planned,
        one_way=one_way,
        pairs=pairs,
        cliques=cliques,
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
    """Return the number of rows by the tables' sums, weighted by inverse variance; at least 1."""
    tables = [
        (one_way, planned.one_way, np.array(domain.sizes)),
        (pairs, planned.pairs, pair_cells(domain)),
        *(
            (table.ravel(), planned.cliques[clique], np.array([table.size]))
            for clique, table in cliques.items()
        ),
    ]
    sums, weights = [], []
    for flat, event, sizes in tables:
        if event is not None:
            sums.append(np.add.reduceat(flat, np.cumsum(sizes) - sizes))
            weights.append(1.0 / (deviation(event) ** 2 * sizes))
    weight = np.concatenate(weights)
    total = np.dot(weight, np.concatenate(sums).astype(np.float64)) / weight.sum()
    return max(1.0, float(total))


def pair_cells(domain: Domain) -> NDArray[np.int64]:
    """Return the number of cells of each two-way table, in the domain's order: int64 array of shape (n_pairs,)."""
    sizes = np.array(domain.sizes, dtype=np.int64)
    first, second = np.triu_indices(len(sizes), k=1)
    return sizes[first] * sizes[second]
