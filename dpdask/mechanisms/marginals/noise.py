"""Contingency tables of all rows with noise of known size: what the copula is fitted to, and a release of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from dpdask.archive import Archive, Archived, Contents
from dpdask.errors import InputError, InternalError
from dpdask.mechanisms.marginals.plan import MarginalNoise, margin_95
from dpdask.privacy import noise
from dpdask.privacy.events import CentralEvent
from dpdask.privacy.noise import deviation
from dpdask.stats import Clique, Domain, MarginalCounts
from dpdask.streams import Rng

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoisyMarginals(Archived):
    """Noisy tables; safe to publish.

    Attributes
    ----------
    domain
        The attributes and their numbers of levels.
    n_rows
        The number of rows: exact where it is public (replace-one), otherwise estimated from the noisy tables.
    noise
        What was drawn.
    one_way
        int64 array, the attributes' tables one after the other; empty if they were not measured.
    pairs
        int64 array, the two-way tables in the domain's order of pairs; empty if they were not measured.
    cliques
        The further tables, int64 arrays of their shapes: first those of `noise.cliques`, then the chosen ones. A pair among the chosen
        ones was measured twice.
    """

    archive: ClassVar[Archive] = Archive(kind="noisy-tables", format=4, noun="file of noisy tables", is_compressed=True)

    domain: Domain
    n_rows: float
    noise: MarginalNoise
    one_way: Counts
    pairs: Counts
    cliques: Mapping[Clique, Counts]

    def table(self, clique: Clique) -> Counts:
        """Return the noisy table of one measured clique, an int64 array with an axis for each of its attributes; may be negative.

        The clique's attributes may come in any order; the table's axes come in the same. For a pair that was measured twice, the second
        measurement is returned.

        Raises
        ------
        KeyError
            If it was not measured.
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
            start = sum(sizes[a] * sum(sizes[a + 1 :]) for a in range(first)) + sizes[first] * sum(sizes[first + 1 : second])
            return self.pairs[start : start + sizes[first] * sizes[second]].reshape(sizes[first], sizes[second])
        raise KeyError(clique)

    def margin(self, clique: Clique) -> float:
        """Return the half-width, in counts, of a 95 % interval for one cell of a measured table.

        Raises
        ------
        KeyError
            If it was not measured.
        """
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
        """Check that these are the tables that a run would draw now, and not those of another version.

        Parameters
        ----------
        domain
            The run's attributes.
        noise
            The run's noise.

        Raises
        ------
        InputError
            If they are not.
        """
        if self.domain != domain or self.noise != noise:
            raise InputError(
                "these were written by another version of dpdask", "the run's noisy tables", "resume with that version, or `dpdask abort` the run"
            )

    def _contents(self) -> Contents:
        header = {"names": self.domain.names, "sizes": self.domain.sizes, "n_rows": self.n_rows, "noise": self.noise.to_dict(), "chosen": self.chosen}
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
        cliques = {clique: arrays[f"clique_{place}"] for place, clique in enumerate((*noise.cliques, *chosen))}
        for clique, table in cliques.items():
            _check_table(table, domain.shape_of(clique))
        check_n_rows(header["n_rows"])
        return cls(domain=domain, n_rows=header["n_rows"], noise=noise, one_way=one_way, pairs=pairs, cliques=cliques)

    def _check(self, clique: Clique) -> None:
        if len(set(clique)) != len(clique) or not set(clique) <= set(self.domain.names):
            raise KeyError(clique)

    def _find_clique(self, clique: Clique) -> Clique | None:
        """Return the further table of these attributes: in this order, or else in another."""
        return clique if clique in self.cliques else next((chosen for chosen in self.cliques if set(chosen) == set(clique)), None)


def _check_table(table: NDArray[Any], shape: tuple[int, ...]) -> None:
    if table.dtype != np.int64 or table.shape != shape:
        raise ValueError("a table has another shape than the domain gives it")


def check_n_rows(n_rows: object) -> None:
    """Check a number of rows from outside.

    Raises
    ------
    ValueError
        If it is no number, or one that no table has.
    """
    if type(n_rows) not in (int, float) or not abs(n_rows) <= noise.MAX_COUNT:  # type: ignore[arg-type]  # also refuses NaN
        raise ValueError("no table has this number of rows")


def measure(counts: MarginalCounts, planned: MarginalNoise, *, n_rows_public: bool, rng: Rng | None = None) -> NoisyMarginals:
    """Return all noisy tables except the chosen ones: drawn on the driver, once, after the ledger has been charged.

    Parameters
    ----------
    counts
        Exact.
    planned
        The noise; each table of `planned.cliques` must be among the counts' cliques.
    n_rows_public
        Whether neighbours have the same number of rows.
    rng
        None: secure noise. A stream: INSECURE, for runs marked so; see `privacy.noise`.

    Privacy
    -------
    Unit, sensitivity, event: `MarginalNoise`. Protected: every row counted.
    """
    domain = counts.domain
    none = np.zeros(0, dtype=np.int64)
    noisy_one = noise.perturb(counts.one_way, planned.one_way, rng=rng) if planned.one_way is not None else none
    noisy_pairs = noise.perturb(counts.pairs, planned.pairs, rng=rng) if planned.pairs is not None else none
    further = {clique: noise.perturb(counts.table(clique), event, rng=rng) for clique, event in planned.cliques.items()}
    total = float(counts.n_rows) if n_rows_public else _total(domain, planned, noisy_one, noisy_pairs, further)
    return NoisyMarginals(domain=domain, n_rows=total, noise=planned, one_way=noisy_one, pairs=noisy_pairs, cliques=further)


def measure_chosen(noisy: NoisyMarginals, counts: MarginalCounts, chosen: Sequence[Clique], rng: Rng | None = None) -> NoisyMarginals:
    """Return noisy tables extended by the chosen ones: drawn in the same run, on the driver, once.

    Parameters
    ----------
    noisy
        What `measure` returned.
    counts
        The exact counts, which include the chosen tables.
    chosen
        The chosen tables, which may depend only on noisy tables and scores drawn before. At most `chosen.count` have two columns, and at
        most `triples.count` three.
    rng
        As for `measure`.

    Raises
    ------
    InternalError
        If a table is chosen twice, or more tables are chosen than are paid for.

    Privacy
    -------
    Unit, sensitivity, event: `MarginalNoise`. Protected: every row counted.
    """
    try:
        noisy.noise.check_paid((*noisy.chosen, *chosen))
    except ValueError as error:
        raise InternalError(str(error), None, "report it") from None
    measured = {clique: noise.perturb(counts.table(clique), noisy.noise_of(clique), rng=rng) for clique in chosen}
    return replace(noisy, cliques={**noisy.cliques, **measured})


def _total(domain: Domain, planned: MarginalNoise, one_way: Counts, pairs: Counts, cliques: Mapping[Clique, Counts]) -> float:
    """Return the number of rows from the noisy tables alone, each table's sum weighted by its inverse variance; at least 1."""
    sums: list[tuple[float, float]] = []
    if planned.one_way is not None:
        starts = np.concatenate([[0], np.cumsum(domain.sizes)[:-1]])
        sums += zip(np.add.reduceat(one_way, starts), deviation(planned.one_way) ** 2 * np.array(domain.sizes), strict=True)
    if planned.pairs is not None:
        cells = pair_cells(domain)
        sums += zip(np.add.reduceat(pairs, np.concatenate([[0], np.cumsum(cells)[:-1]])), deviation(planned.pairs) ** 2 * cells, strict=True)
    sums += [(float(table.sum()), deviation(planned.cliques[clique]) ** 2 * table.size) for clique, table in cliques.items()]
    weights = np.array([1.0 / variance for _, variance in sums])
    return max(1.0, float(np.dot(weights, np.array([float(value) for value, _ in sums])) / weights.sum()))


def pair_cells(domain: Domain) -> NDArray[np.int64]:
    """Return the number of cells of each two-way table, in the domain's order: int64 array of shape (n_pairs,)."""
    sizes = np.array(domain.sizes, dtype=np.int64)
    first, second = np.triu_indices(len(sizes), k=1)
    return sizes[first] * sizes[second]
