"""Contingency tables of all rows with noise of known size, and what can be believed of them; denoising is post-processing."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import combinations
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.archive import Archive, Archived, Contents, Json, Named, check_array, require
from dpdask.arrays import Flags, Floats, Ints, freeze_class
from dpdask.cells import Cells
from dpdask.errors import InputError, InternalError, SpecError
from dpdask.kernels import marginals as kernel
from dpdask.kernels.channel import project
from dpdask.mechanisms.levels import draft_numbers, find_weight, read_selection, split_delta
from dpdask.privacy import Budget, noise
from dpdask.privacy.events import (
    CentralEvent,
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    KeySelection,
    central_from_dict,
    epsilon,
    scale_events,
    to_dict,
)
from dpdask.privacy.noise import deviation, margin_95
from dpdask.references.counts import (
    AGAIN,
    IN_CELLS,
    label_table,
    list_cell_counts,
    list_table_counts,
)
from dpdask.references.hierarchy import N_LEVELS
from dpdask.rules import CellRules
from dpdask.stats import Clique, Domain, MarginalCounts
from dpdask.steps import step
from dpdask.streams import Rng

_LEAST_OF_FINE, _MOST_OF_FINE = 0.2, 0.25
_SHARE_OF_LEVELS, _DELTA_OF_LEVELS = 0.2, 0.25
_SHARE_OF_CHOSEN, _SHARE_OF_TRIPLES, _SHARE_OF_SCORES = 0.4, 0.15, 0.05
# the events of several tables, in the order in which they are charged but for declared tables
_SHARED = ("cells", "one_way", "pairs", "chosen", "scores", "triples")


@freeze_class
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
    levels: Mapping[str, KeySelection] = field(default_factory=dict)  # of each column with such
    # of each declared table, of how many parts a person's weight is; empty where rows are counted
    parts: Mapping[Clique, int] = field(default_factory=dict)

    @property
    def event(self) -> Composed:
        """All events of the run, composed."""
        events = (
            *self.levels.values(),
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

    def to_dict(self) -> Json:
        """Return the noise as a mapping that JSON can hold."""
        shared = {name: getattr(self, name) for name in _SHARED}
        written = {name: event and to_dict(event) for name, event in shared.items()}
        cliques = [[list(clique), to_dict(event)] for clique, event in self.cliques.items()]
        levels = {name: to_dict(event) for name, event in self.levels.items()}
        more = {
            "levels": levels,
            "parts": [self.parts[each] for each in self.cliques if self.parts],
        }
        return {**written, "cliques": cliques, **{key: each for key, each in more.items() if each}}

    @classmethod
    def from_dict(cls, data: Named) -> Self:
        """Return the noise that a mapping from `to_dict` holds."""
        shared: dict[str, Any] = {
            name: None if data[name] is None else central_from_dict(data[name]) for name in _SHARED
        }
        cliques = {tuple(clique): central_from_dict(event) for clique, event in data["cliques"]}
        levels = {name: read_selection(event) for name, event in data.get("levels", {}).items()}
        parts = dict(zip(cliques, data["parts"], strict=True)) if "parts" in data else {}
        is_whole = all(type(each) is int and each > 0 for each in parts.values())
        require(is_whole, "a person's weight is of no such number of parts")
        return cls(**shared, cliques=cliques, levels=levels, parts=parts)


def account_for(
    event: Composed, named: Mapping[str, CentralEvent | None], budget: Budget, counted: str
) -> Json:
    """Return what noisy counts cost, and how far they may be off, by the names of what was counted."""
    return {
        "composition": f"the smallest of three upper bounds (a sum, concentrated privacy, a privacy loss distribution), over all {counted}",
        "epsilon_exact": epsilon(event, budget.delta),
        "noise": {
            name: {"standard_deviation": deviation(each), "margin_95": margin_95(each)}
            for name, each in named.items()
            if each is not None
        },
        "events": to_dict(event),
    }


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
    discovered: Sequence[str] = (),
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
        weight, or a tenth for Laplace noise. Gaussian noise of records, whose tails are no better:
        at least a fifth of a table's weight for each vector, and at most a quarter for all.
    discovered
        The columns whose levels are found. Their numbers of units get a fifth of all weight, and a
        quarter of δ is for levels of one unit. Only with a δ.
    """
    declared = dict(cliques or {})
    n_pairs = n_attributes * (n_attributes - 1) // 2
    tables: dict[Any, tuple[float, int]] = {
        "one_way": (one_way, n_attributes),
        "pairs": (pairs, n_pairs),
        **{clique: (weight, 1) for clique, weight in declared.items()},
    }
    others = sum(weight * count for weight, count in tables.values())
    if others <= 0:
        hint = "give at least one table a weight above 0"
        raise SpecError("there is no table to measure", "`weights`", hint)
    again = weigh(others, _SHARE_OF_CHOSEN, n_chosen)
    tables["chosen"] = again, n_chosen
    others += again * n_chosen
    drafts = {table: draft(budget, *each) for table, each in tables.items()}
    if n_triples:
        others /= 1.0 - (_SHARE_OF_TRIPLES + _SHARE_OF_SCORES)
        drafts["scores"] = draft_scores(budget, others * _SHARE_OF_SCORES, n_scores)
        drafts["triples"] = draft(budget, others * _SHARE_OF_TRIPLES / n_triples, n_triples)
    weight, n_fine = share_of_cells(others, n_found, budget.delta)
    if n_fine and pairs and budget.delta > 0:
        usual = others / sum(count for weight, count in tables.values() if weight)
        weight = max(weight, min(usual * _LEAST_OF_FINE, weigh(others, _MOST_OF_FINE, n_fine)))
    # the last digits of a price depend on the order in which it is charged
    drafts = {"cells": draft(budget, weight, n_fine), **drafts}
    lost, left = 0.0, budget.delta
    if discovered:
        lost, left = split_delta(budget, _DELTA_OF_LEVELS, len(discovered))
        weight = weigh(others + weight * n_fine, _SHARE_OF_LEVELS, len(discovered))
        drafts["levels"] = draft_keys(budget, weight, len(discovered))
    events = scale_drafts(budget.model_copy(update={"delta": left}), drafts)
    listed = {}
    if discovered:
        one, keys = replace(events["levels"], count=1), budget.rows_per_unit
        selection = KeySelection(noise=one, keys=keys, delta=lost, weight=find_weight(budget))
        listed = dict.fromkeys(discovered, selection)
    shared: dict[str, Any] = {name: events.get(name) for name in _SHARED}
    return MarginalNoise(
        **shared,
        cliques={clique: events[clique] for clique in declared if clique in events},
        levels=listed,
    )


def scale_drafts(
    budget: Budget, drafts: Mapping[Any, CentralEvent | None]
) -> dict[Any, CentralEvent]:
    """Return the drafts that are there, with the noise at which they spend the budget together."""
    listed = {table: event for table, event in drafts.items() if event is not None}
    scaled = _scale(tuple(listed.values()), budget.epsilon, budget.delta)
    return dict(zip(listed, scaled, strict=True))


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


def draft(budget: Budget, weight: float, count: int) -> CentralEvent | None:
    """Return the event of some tables of one weight, up to the factor that all noise has in common; None without a weight or a table."""
    if weight <= 0 or not count:
        return None
    replaced, rows = budget.adjacency == "replace-one", budget.rows_per_unit
    alike: Any = {"adjacency": budget.adjacency, "count": count}
    if budget.delta > 0:
        norm = math.nextafter(math.sqrt(2.0), 2.0) if replaced else 1.0
        return DiscreteGaussian(sigma=1.0 / math.sqrt(weight), sensitivity=rows * norm, **alike)
    # a row that is replaced changes two cells by 1
    return DiscreteLaplace(scale=1.0 / weight, sensitivity=rows * (2 if replaced else 1), **alike)


def draft_keys(budget: Budget, weight: float, count: int) -> DiscreteGaussian:
    """Return the event of the weights of some columns' levels, up to the factor that all noise has in common."""
    unit = draft_numbers(budget)
    table = budget.rows_per_unit * math.sqrt(1 + (budget.adjacency == "replace-one"))
    # a weight costs numbers of units what it costs tables
    sigma = unit.sensitivity / table / math.sqrt(weight)
    return replace(unit, sigma=sigma, count=count)


def draft_scores(budget: Budget, weight: float, n: int) -> DiscreteGaussian:
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
    adjacency, rows = budget.adjacency, budget.rows_per_unit
    n_changed = 2 if adjacency == "replace-one" else 1
    sensitivity = math.nextafter(math.sqrt(n * (rows * n_changed) ** 2), math.inf)
    unit = rows * math.sqrt(n_changed)  # of one table: a weight costs scores what it costs tables
    return DiscreteGaussian(
        sigma=sensitivity / unit / math.sqrt(weight), sensitivity=sensitivity, adjacency=adjacency
    )


Counts = Ints


@freeze_class(eq=False)
class NoisyMarginals(Archived):
    """Noisy tables; safe to publish."""

    archive: ClassVar = Archive(
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

    @property
    def event(self) -> Composed:
        """What was drawn."""
        return self.noise.event

    def table(self, clique: Clique) -> Counts:
        """Return the noisy table of one measured clique, an int64 array with an axis for each of its attributes; may be negative.

        The clique's attributes may come in any order; the table's axes come in the same. For a pair
        that was measured twice, the second measurement is returned.
        """
        self._find_noise(clique)
        counts = MarginalCounts(self.domain, 0, self.one_way, self.pairs, self.cliques)
        return counts.table(clique)

    def list_counts(self, cells: Mapping[str, Cells]) -> Iterator[pa.Table]:
        """Return the tables as they are published; a column that has fine counts too, and a pair that was measured twice, have two tables."""
        names, noise = self.domain.names, self.noise
        if noise.one_way is not None:
            parts = np.split(self.one_way, np.cumsum(self.domain.sizes)[:-1])
            for name, counts in zip(names, parts, strict=True):
                label = label_table(name) + ("" if cells[name].found is None else IN_CELLS)
                yield list_cell_counts(cells[name], label, counts, noise.one_way)
        if noise.pairs is not None:
            parts = np.split(self.pairs, np.cumsum(pair_cells(self.domain))[:-1])
            for pair, counts in zip(combinations(names, 2), parts, strict=True):
                yield list_table_counts(label_table(*pair), counts, noise.pairs)
        for clique, table in self.cliques.items():
            twice = len(clique) == 2 and noise.pairs is not None
            label = f"{label_table(*clique)}{AGAIN if twice else ''}"
            yield list_table_counts(label, table, self.noise_of(clique))

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
        check_version((self.domain, self.noise) == (domain, noise), "noisy tables")

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
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
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
            check_array(arrays[name], np.int64, shape, -np.inf, np.inf)
        check_n_rows(header["n_rows"])
        return cls(
            domain=domain,
            n_rows=header["n_rows"],
            noise=noise,
            one_way=arrays["one_way"],
            pairs=arrays["pairs"],
            cliques={clique: arrays[f"clique_{n}"] for n, clique in enumerate(cliques)},
        )


def check_version(is_own: bool, kept: str) -> None:
    """Check that a run would draw what is kept for it."""
    if not is_own:
        what, hint = "written by another version of dpdask", "resume with that version"
        raise InputError(what, f"the run's {kept}", f"{hint}, or `dpdask abort` the run")


def check_n_rows(n_rows: object) -> None:
    """Check a number of rows from outside."""
    is_known = type(n_rows) in (int, float) and abs(n_rows) <= noise.MAX_COUNT  # type: ignore[arg-type]  # also refuses NaN
    require(is_known, "no table has this number of rows")


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


def pair_cells(domain: Domain) -> Ints:
    """Return the number of cells of each two-way table, in the domain's order: int64 array of shape (n_pairs,)."""
    sizes = np.array(domain.sizes, dtype=np.int64)
    first, second = np.triu_indices(len(sizes), k=1)
    return sizes[first] * sizes[second]


_CHANCE = 2.0  # standard deviations, the usual 95 %
MEAN_OF_NOISE = math.sqrt(2.0 / math.pi)  # of the absolute value, in standard deviations
_DOUBT = 0.5  # standard deviations of a cell's noise: three cells in five are farther off


@freeze_class(eq=False)
class PairGroup:
    """All pairs of attributes with tables of one shape (m, n) and one size of noise."""

    first: Ints  # of shape (k,): the attributes of each pair
    second: Ints
    starts: Ints  # of shape (k,): where each table begins among all two-way tables
    tables: Floats  # of shape (k, m, n): the denoised counts
    # of that shape: where the departure from independence is more than noise
    significant: Flags
    # of shape (k,): which tables depart from independence by more than noise does
    dependent: Flags
    sigma: float  # the standard deviation of the noise in a cell of the noisy tables
    possible: Flags | None = None  # of that shape: which cells rules leave; all if None

    def empty(self, rules: CellRules) -> PairGroup:
        """Return the group with the cells emptied that rules leave no record for."""
        possible = rules.stack(self.first, self.second, self.tables.shape)
        return replace(self, tables=self.tables * possible, possible=possible)

    def stack(self, flat: NDArray[Any]) -> Floats:
        """Return the group's tables from all two-way tables, one after another."""
        cells = np.arange(math.prod(self.tables.shape[1:]))
        stacked: Floats = flat[self.starts[:, None] + cells].reshape(self.tables.shape)
        return stacked.astype(np.float64)

    def shrink_towards_independence(self, wanted: Floats) -> Floats:
        """Return wanted counts moved towards independence by half of sigma, and not beyond: float64 of shape (k, m, n).

        The noisy tables do not contradict counts moved by so little. Next to a Fréchet bound a
        fraction of a count can move a correlation to ±1, and many such correlations are
        inconsistent with each other.
        """
        rows, columns = self.tables.sum(axis=2), self.tables.sum(axis=1)
        independent = rows[:, :, None] * columns[:, None, :] / rows.sum(axis=1)[:, None, None]
        departure = wanted - independent
        return independent + np.sign(departure) * np.maximum(
            np.abs(departure) - _DOUBT * self.sigma, 0.0
        )

    def correct(self, wanted: Floats, found: Ints, n_sampled: int, gain: float) -> Floats:
        """Return wanted counts moved against what a sample shows too much or too little of, within their Fréchet bounds.

        A difference that the sample's own chance explains (two standard deviations of a count) is
        left alone.
        """
        rows, columns, total = (
            self.tables.sum(axis=axis, keepdims=True) for axis in (2, 1, (1, 2))
        )
        shown, scale = self.stack(found), total / n_sampled
        missing = self.tables - shown * scale
        missing[np.abs(missing) <= _CHANCE * np.sqrt(np.maximum(shown, 1.0)) * scale] = 0.0
        lower, upper = np.maximum(rows + columns - total, 0.0), np.minimum(rows, columns)
        return np.minimum(np.maximum(wanted + gain * missing, lower), upper)


@freeze_class(eq=False)
class Denoised:
    """Consistent one-way counts and two-way tables."""

    domain: Domain
    n_rows: float
    # For each attribute, float64 array of its levels' counts, non-negative.
    one_way: tuple[Floats, ...]
    groups: tuple[PairGroup, ...]

    def table(self, first: int, second: int) -> Floats:
        """Return the table of two attributes, float64 with an axis for each."""
        low, high = min(first, second), max(first, second)
        for group in self.groups:
            place = np.flatnonzero((group.first == low) & (group.second == high))
            if len(place):
                table: Floats = group.tables[place[0]]
                return table if first < second else table.T
        raise KeyError((first, second))


@step("fitting: the noisy tables")
def denoise(
    noisy: NoisyMarginals,
    *,
    consistency: bool = True,
    shrinkage: bool = True,
    significance: bool = True,
    rules: CellRules | None = None,
) -> Denoised:
    """Return the tables that noisy ones make believable.

    Parameters
    ----------
    consistency, shrinkage, significance
        Whether to do each step; all are free of privacy cost.
    rules
        Which cells are known to be empty; they stay so.

    Notes
    -----
    The two tables of a pair that was measured twice are averaged, weighted by inverse variance.
    *Consistency*: an attribute's counts are the mean, weighted in the same way, of its own table
    and of the sums of its two-way tables, projected to non-negative ones that sum to the number of
    rows. *Shrinkage*: `kernels.marginals.estimate` with the known noise: in each table, the mixture of
    two estimates with the least estimated risk. *Raking* to those margins bounds every cell as
    Fréchet does. *Significance*: a cell's departure from independence is kept where it exceeds the
    standard deviation of a cell's noise: the rule that loses least among those that keep or kill
    one coefficient at a time (the departure squared against the noise's variance).

    References
    ----------
    Donoho and Johnstone, Ideal spatial adaptation by wavelet shrinkage (1994), section 2.1, for the
    rule.
    """
    observed = _group_pairs(noisy)
    if rules:
        observed = [group.empty(rules) for group in observed]
    with_pairs = consistency or noisy.noise.one_way is None
    one_way = _average_margins(noisy, observed if with_pairs else [])
    groups = []
    for group in observed:
        rows, columns = (
            np.stack([one_way[a] for a in side]) for side in (group.first, group.second)
        )
        known = rows, columns, noisy.n_rows
        believed, dependent, significant = group.tables, group.dependent, group.significant
        if shrinkage:
            believed = kernel.estimate(group.tables, *known, group.sigma)
            dependent = kernel.tell_dependence(group.tables, *known, group.sigma)
        believed = kernel.rake(believed, rows, columns, group.possible)
        if significance:
            significant = np.abs(believed - kernel.independence(*known)) > group.sigma
        groups.append(replace(group, tables=believed, dependent=dependent, significant=significant))
    return Denoised(domain=noisy.domain, n_rows=noisy.n_rows, one_way=one_way, groups=tuple(groups))


def average_pairs(noisy: NoisyMarginals) -> tuple[Floats, Floats]:
    """Return all two-way tables and their noise; the two tables of a pair that was measured twice are averaged.

    Returns
    -------
    tables
        float64 array: the tables in the domain's order of pairs, one after another; zeros where a
        pair was not measured.
    deviations
        float64 array of shape (n_pairs,): the standard deviation of the noise in a cell; infinite
        where a pair was not measured.
    """
    domain, cells, event = noisy.domain, pair_cells(noisy.domain), noisy.noise.pairs
    starts, n = np.concatenate([[0], np.cumsum(cells)]), domain.n_attributes
    tables = np.zeros(starts[-1]) if event is None else noisy.pairs.astype(np.float64)
    precisions = np.full(len(cells), 0.0 if event is None else deviation(event) ** -2.0)
    for clique, table in noisy.cliques.items():
        if len(clique) == 2:
            a, b = sorted(domain.positions(clique))
            place = a * n - a * (a + 1) // 2 + b - a - 1
            again = table if domain.position(clique[0]) == a else table.T
            part, one = slice(starts[place], starts[place + 1]), precisions[place]
            precision = deviation(noisy.noise_of(clique)) ** -2.0
            tables[part] = (one * tables[part] + precision * again.ravel()) / (one + precision)
            precisions[place] += precision
    with np.errstate(divide="ignore"):
        deviations: Floats = precisions**-0.5
    return tables, deviations


def _group_pairs(noisy: NoisyMarginals) -> list[PairGroup]:
    """Return the measured pairs as they are, by shape and noise."""
    pairs, deviations = average_pairs(noisy)
    places = np.flatnonzero(np.isfinite(deviations))
    if not len(places):
        return []
    sizes, cells = np.array(noisy.domain.sizes, dtype=np.int64), pair_cells(noisy.domain)
    first, second = (side.astype(np.int64)[places] for side in np.triu_indices(len(sizes), k=1))
    starts = (np.cumsum(cells) - cells)[places]
    sigmas, of = np.unique(deviations[places], return_inverse=True)
    kinds, members = np.unique(
        np.stack([sizes[first], sizes[second], of], axis=1), axis=0, return_inverse=True
    )
    order = np.argsort(members, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(members[order])) + 1)
    groups = []
    for (m, n, sigma), part in zip(kinds, parts, strict=True):
        shape = (len(part), int(m), int(n))
        group = PairGroup(
            first=first[part],
            second=second[part],
            starts=starts[part],
            tables=np.empty(shape),
            significant=np.ones(shape, dtype=bool),
            dependent=np.ones(len(part), dtype=bool),
            sigma=float(sigmas[sigma]),
        )
        groups.append(replace(group, tables=group.stack(pairs)))
    return groups


def _average_margins(noisy: NoisyMarginals, groups: Sequence[PairGroup]) -> tuple[Floats, ...]:
    """Return each attribute's counts: its own table and the sums of these, by inverse variance."""
    sizes = np.array(noisy.domain.sizes, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    total, weight = np.zeros(sizes.sum()), np.zeros(sizes.sum())
    if noisy.noise.one_way is not None:
        weight += deviation(noisy.noise.one_way) ** -2.0
        total += weight * noisy.one_way
    for group in groups:
        _, m, n = group.tables.shape
        for side, axis, length, other in ((group.first, 2, m, n), (group.second, 1, n, m)):
            cells, precision = starts[side][:, None] + np.arange(length), group.sigma**-2.0 / other
            if group.possible is not None:  # the others hold no noise
                precision = group.sigma**-2.0 / group.possible.sum(axis=axis)
            np.add.at(total, cells, group.tables.sum(axis=axis) * precision)
            np.add.at(weight, cells, precision)
    means = np.split(total / weight, starts[1:])
    return tuple(project(mean, noisy.n_rows) for mean in means)


def dependence_tree(cleaned: Denoised) -> list[tuple[int, int]]:
    """Return the attributes, each after its parent, along the maximum spanning forest of their mutual information.

    Notes
    -----
    Prim's algorithm, from the attribute with the most mutual information in all. Chow and Liu
    (1968): of all trees, this one's distribution is nearest to the tables'.
    """
    n = cleaned.domain.n_attributes
    shared = np.zeros((n, n))
    for group in cleaned.groups:
        # the rest may be noise
        mutual = np.where(group.dependent, kernel.mutual_information(group.tables), 0.0)
        shared[group.first, group.second] = shared[group.second, group.first] = mutual
    shared[shared < 1e-12] = 0.0  # independence, up to rounding
    best, parent, outside = shared.sum(axis=1), np.full(n, -1), np.ones(n, dtype=bool)
    tree: list[tuple[int, int]] = []
    near = np.zeros(n)
    while outside.any():
        scores = np.where(outside, near, -1.0)
        if scores.max() <= 0.0:  # what is left depends on nothing before
            scores = np.where(outside, best, -1.0)
        attribute = int(np.argmax(scores))
        tree.append((attribute, int(parent[attribute])))
        outside[attribute] = False
        closer = outside & (shared[attribute] > near)
        near[closer], parent[closer] = shared[attribute][closer], attribute
    return tree
