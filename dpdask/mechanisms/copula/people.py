"""Persons with their rows as a mechanism: the noise of their tables, and the steps from counts to two linked tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Archived, Contents, Named, check_array, require
from dpdask.arrays import Floats, Ints, freeze_class
from dpdask.cells import DEFAULT_BINS, Cells, CutColumns
from dpdask.errors import SpecError, say_count
from dpdask.mechanisms.card import Section, noisy_counts_section
from dpdask.mechanisms.columns import ReleasedCounts, bins_by_column, describe_bins, draw_records
from dpdask.mechanisms.copula.persons import PersonModel, fit_persons
from dpdask.mechanisms.expectations import CellSearch
from dpdask.mechanisms.marginals.noise import (
    account_for,
    check_n_rows,
    check_version,
    scale_drafts,
)
from dpdask.mechanisms.marginals.people import (
    BEYOND,
    EVERY_PERSON,
    CountsPersons,
    draft_persons,
    estimate_persons,
)
from dpdask.mechanisms.marginals.persons import Key, PersonTables
from dpdask.mechanisms.mechanism import Columns, NoisyCounts, NoisyCountsDescription, Sentences
from dpdask.privacy import Budget, noisy_counts_text
from dpdask.privacy.budget import MAX_EPSILON, delta_warnings, write_above
from dpdask.privacy.events import (
    CentralEvent,
    Composed,
    DiscreteGaussian,
    RowOrder,
    central_from_dict,
    to_dict,
    write_digits,
)
from dpdask.privacy.noise import deviation, perturb
from dpdask.references.counts import (
    AGREEING,
    BY_BAND,
    NUMBERS,
    PAIRS,
    label_table,
    list_table_counts,
)
from dpdask.references.hierarchy import N_LEVELS, make_grid
from dpdask.references.histogram import cut_with_found, list_adaptive
from dpdask.rules import CellRules, check_levels, describe_rules
from dpdask.schema import Schema
from dpdask.stats import Domain
from dpdask.stats.marginals import MAX_CELLS, domain_of
from dpdask.stats.people import (
    GROUPS,
    LATTICE,
    MOST_ROWS,
    MarginStatistic,
    PersonCounts,
    PersonDomain,
    PersonMargins,
    PersonStatistic,
)
from dpdask.streams import Noise, RunKey, Stream, stream

_SHARES = {
    "H": 0.05,
    "F": 0.03,
}  # of the sum of (sensitivity / σ)²; the other groups share the rest
FINE, _FINE_SHARE = "fine_counts", 0.05  # of columns whose cells are found, and its share
_LATTICES = {"CC": LATTICE, "PC": LATTICE, "WW": LATTICE}  # the parts of a person's weight
PARENTS, CHILDREN = "parents", "children"
_ENOUGH = 0.05  # of the persons, moved in a table of average size
_LEFT = (
    0.5 * math.sqrt(2.0 / math.pi) / 2.0
)  # of σ in each cell of a fitted table; see `estimate_errors`
_TRIED = 2**10  # persons, to see whether rules can be kept
_NUMBERS = (1_000, 10_000, 100_000)  # of persons, for which a plan tells the errors
_NAMES = {
    "PP": "two columns of persons",
    "CC": "two columns of rows",
    "PC": "a column of persons and one of rows",
    "WW": "a column of one row and one of another row of the same person",
}
LOST = (
    "the order of a person's rows in time, and sessions or other groups of them",
    "about half of the difference, where a person's rows are less alike than rows drawn at random",
    "rows of a person that are more alike in one group of persons than in another",
    BEYOND,
)
_IGNORED = ("records", "weights", "measured_again", "target", "triples", "options")


def plan_person_noise(
    budget: Budget, domain: PersonDomain, n_found: int = 0
) -> dict[str, DiscreteGaussian]:
    """Return the noise of each group of tables, and of the fine counts of columns whose cells are found.

    Notes
    -----
    A group of T tables, each of L2 sensitivity 1, has B² = T. The least sum of |noise| over all cells
    at a given sum of B²/σ² has σ ∝ (B²/cells)^(1/3). H and F get fixed shares of that sum, since
    the others are worth little without them.

    Privacy
    -------
    Unit, adjacency and sensitivities: those of `draft_persons`.
    """
    n_tables = {group: len(domain.shapes[group]) for group in GROUPS}
    left_out = ("WW", "F") if domain.max_rows < 2 else ()
    shares = {group: share for group, share in _SHARES.items() if group not in left_out}
    if n_found:
        n_tables[FINE], shares[FINE] = n_found * N_LEVELS, _FINE_SHARE
    wanted = {
        group: n * (domain.count_cells(group) / n) ** (2.0 / 3.0)
        for group, n in n_tables.items()
        if group not in (*shares, *left_out)
    }
    rest = (1.0 - sum(shares.values())) / sum(wanted.values())
    shares |= {group: rest * each for group, each in wanted.items()}
    drafts: dict[str, CentralEvent | None] = {}
    for group in (FINE, *GROUPS):
        if group in shares:
            n, whole = n_tables[group], _LATTICES.get(group, 1)
            drafts[group] = draft_persons(budget, n / shares[group], whole, n)
    found: Any = scale_drafts(budget, drafts)
    return dict(found)


@freeze_class(eq=False)
class NoisyPersons(Archived):
    """Noisy tables of persons and their rows; safe to publish."""

    archive: ClassVar = Archive(
        kind="noisy-persons", format=1, noun="file of noisy tables of persons", is_compressed=True
    )

    people: PersonDomain
    n_persons: (
        float  # exact where it is public (replace-one), otherwise estimated from noisy tables
    )
    events: Mapping[str, CentralEvent]
    tables: Mapping[str, Ints]  # of each group with an event, as in `PersonCounts`

    @property
    def domain(self) -> Domain:
        """The columns and how many levels each has."""
        return self.people.domain

    @property
    def event(self) -> Composed:
        """What was drawn."""
        return Composed(events=tuple(self.events.values()))

    def tell(self, scores: tuple[Floats | None, ...], *, alone: bool) -> PersonTables:
        """Return the tables in whole persons; nobody can be in a cell that is 0.

        Parameters
        ----------
        alone
            Whether persons are known by their rows alone, so that each has one.
        """
        people, found = self.people, dict[Key, Floats]()
        band = len(people.parent_sizes) - 1
        few = [place for place, edge in enumerate(people.edges) if edge < 2]
        for group, flat in self.tables.items():
            for key, counts in people.split(group, flat):
                table = counts / float(_LATTICES.get(group, 1))
                if group == "F":
                    table[few] = 0.0
                elif (key[:2] == ("PC", band)) or (alone and group == "H"):
                    table[0] = 0.0
                elif alone and group == "PP" and key[-1] == band:
                    table[..., 0] = 0.0
                found[key] = table
        sigmas = {
            group: deviation(event) / _LATTICES.get(group, 1)
            for group, event in self.events.items()
        }
        return PersonTables(
            parent_sizes=people.parent_sizes,
            child_sizes=people.child_sizes,
            band_edges=people.edges,
            max_rows=people.max_rows,
            n_persons=self.n_persons,
            tables=found,
            sigmas=sigmas,
            child_scores=scores,
        )

    def list_counts(self) -> Iterator[pa.Table]:
        """Return the tables as they are published; the axis of a band is the last."""
        n = self.people.n_parents
        persons, rows = self.domain.names[:n], self.domain.names[n:]
        ends = {"WW": PAIRS, "F": AGREEING, "H": NUMBERS}
        for group, flat in self.tables.items():
            sides = (persons if group in ("PP", "PC") else rows, persons if group == "PP" else rows)
            for key, counts in self.people.split(group, flat):
                pairs = list(zip(sides, map(int, key[1:]), strict=False))
                own = [names[place] for names, place in pairs if place < len(names)]
                by_band = len(own) < len(pairs)
                table = counts.T if by_band and group == "PC" else counts
                label = label_table(*own) + (BY_BAND if by_band else ends.get(group, ""))
                yield list_table_counts(label, table, self.events[group])

    def check(self, people: PersonDomain, events: Mapping[str, CentralEvent]) -> None:
        """Check that these are the tables that a run would draw now, and not those of another version."""
        check_version((self.people, dict(self.events)) == (people, dict(events)), "noisy tables")

    def _contents(self) -> Contents:
        people = self.people
        header = {
            "names": people.domain.names,
            "sizes": people.domain.sizes,
            "n_parents": people.n_parents,
            "max_rows": people.max_rows,
            "n_persons": self.n_persons,
            "events": {group: to_dict(event) for group, event in self.events.items()},
        }
        return header, self.tables

    @classmethod
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        domain, n_parents, max_rows = (
            Domain.from_header(header),
            header["n_parents"],
            header["max_rows"],
        )
        require(n_parents in range(domain.n_attributes), "there is no column of rows")
        require(max_rows in range(1, MOST_ROWS + 1), "no person has this number of rows")
        require(type(n_parents) is type(max_rows) is int, "a number is not whole")
        check_n_rows(header["n_persons"])
        people = PersonDomain(domain=domain, n_parents=n_parents, max_rows=max_rows)
        events = {group: central_from_dict(event) for group, event in header["events"].items()}
        tables = {group: arrays[group] for group in events}
        for group, table in tables.items():
            check_array(table, np.int64, (people.count_cells(group),), -np.inf, np.inf)
        return cls(people=people, n_persons=header["n_persons"], events=events, tables=tables)


@freeze_class(eq=False)
class FittedPersons(ReleasedCounts):
    """The two-level copula of persons and their rows, with the noisy tables that it was fitted to."""

    archive: ClassVar = Archive(
        kind="persons", format=1, noun="fitted copula of persons", is_compressed=True
    )
    counts_type: ClassVar = NoisyPersons

    noisy: NoisyPersons
    model: PersonModel
    key: str  # the column that names a person in both tables

    block: ClassVar[int] = 2**14  # persons that are drawn together

    @property
    def tables(self) -> dict[str, pa.Schema]:
        """The columns that are written, by table."""
        names, n = self.noisy.domain.names, self.noisy.people.n_parents
        found = {}
        for table, own in ((PARENTS, names[:n]), (CHILDREN, names[n:])):
            columns = [field for field in self.columns if field.name in own]
            found[table] = pa.schema([pa.field(self.key, pa.int64()), *columns])
        return found

    @property
    def types(self) -> pa.Schema:
        """The columns of the join."""
        return pa.schema([pa.field(self.key, pa.int64()), *self.columns])

    def n_drawn(self, wanted: int | None) -> int:
        """Return how many persons to draw."""
        return max(1, round(self.noisy.n_persons)) if wanted is None else wanted

    def draw_block(self, block: int, n_total: int, key: RunKey) -> dict[str, pa.RecordBatch]:
        """Return the persons of a block and their rows: a function of the key, the block's number and the number of all persons."""
        first, cells = block * self.block, self.cells()
        n = min(self.block, n_total - first)
        rules = CellRules.of(
            self.schema.rules, {name: cells[name] for name in self.noisy.domain.names}
        )
        rng = stream(key, "copula", f"block {block}/persons")
        parents, children, owners = self.model.draw(rng, n, rules)
        numbers = first + np.arange(n)
        drawn = {PARENTS: (numbers, parents), CHILDREN: (numbers[owners], children)}
        types, found = self.tables, {}
        for table, (keys, codes) in drawn.items():
            own = {name: cells[name] for name in cells if name in types[table].names}

            def open_values(name: str) -> Stream:
                return stream(key, "copula", f"block {block}/values/{name}")

            batch = pa.record_batch({self.key: keys})
            if own:  # persons may have no column of their own
                columns = types[table].remove(0)
                chunk = [np.ascontiguousarray(codes[:, place]) for place in range(len(own))]
                (rows,) = draw_records(columns, own, [chunk], open_values)
                arrays = [batch.column(0), *rows.columns]
                batch = pa.RecordBatch.from_arrays(arrays, schema=types[table])
            found[table] = batch
        return found

    def _contents(self) -> Contents:
        header, arrays = ReleasedCounts._contents(self)
        its_header, its_arrays = self.model.to_archive()
        return (
            {**header, "key": self.key, "model": its_header},
            {**arrays, **{f"model_{name}": each for name, each in its_arrays.items()}},
        )

    @classmethod
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        counts = cls._read_counts(header, arrays)
        own = {
            name.removeprefix("model_"): arrays[name]
            for name in arrays
            if name.startswith("model_")
        }
        require(isinstance(header["key"], str), "the column of persons has no name")
        model = PersonModel.from_archive(header["model"], own)
        return cls(**counts, model=model, key=header["key"])


def _say_share(error: float, n_persons: int) -> str:
    return write_digits(min(error / n_persons, 1.0))


def _estimate_size(schema: Schema, name: str, bins: Any) -> int:
    """Return about how many cells a column has, as far as the schema tells: shares of the budget follow from it, and nothing else."""
    column = schema.columns[name]
    if column.has_levels:
        return len(column.listed) + (column.nulls == "level")
    own = bins.get(name, "adaptive") if isinstance(bins, dict) else bins
    return DEFAULT_BINS if own == "adaptive" else own if isinstance(own, int) else len(own)


@freeze_class
class PersonCellSearch(CellSearch):
    """Fine counts of persons, each with one of its rows, by which columns are cut.

    Privacy
    -------
    Unit, adjacency and sensitivity: those of the event. A person is in one count of each level of
    each column at most, whatever its rows are.
    """

    asked: PersonsMechanism

    def statistic(self, columns: Columns) -> Any:
        """Return what is counted, a `MarginStatistic`; all rows are checked."""
        fine = {name: make_grid(columns.codecs[name]) for name in self.names}
        cells = {**self.asked.cells(columns), **fine}
        return MarginStatistic(cells=cells, **self.asked.counted_by)

    def list_counts(self, drawn: Any, columns: Columns) -> tuple[()]:
        """Return none: no counts of persons are published."""
        return ()


@freeze_class
class PersonsMechanism(CountsPersons):
    """The two-level copula of persons and their rows, under a budget.

    Privacy
    -------
    Unit: a person, that is one value of the unit's column. Sensitivity and events: `plan_person_noise`.
    Protected: every person. Everything after the noise is post-processing.
    """

    spec: Any  # a `CopulaSpec`
    nobody: ClassVar = "synthetic persons"
    links_tables: ClassVar = True
    keeps_rules: ClassVar = frozenset(("if", "forbid", "allow", "derived", "ordered"))
    release_type: ClassVar = FittedPersons

    def check_parameters(self) -> None:
        """Check the unit, the budget and the columns before the noise is planned."""
        self.check_persons()
        ignored = sorted({*self.spec.model_fields_set} & {*_IGNORED})
        if ignored:
            what = "persons with their rows have no such parameter"
            raise SpecError(what, f"`{ignored[0]}`", "remove it, or `persons`")
        if self.unit in self.schema.kept:
            what = "synthetic persons have names of their own"
            raise SpecError(what, f"column {self.unit!r}", "give it the role drop")
        self._check_columns()
        NoisyCounts.check_parameters(self)

    def _check_columns(self) -> None:
        """Check that the cells of all columns are declared."""
        computed = {*self.declared.privatised} ^ {*self.schema.privatised}
        if computed:
            what = f"rules of persons with their rows relate levels only, and {sorted(computed)[0]!r} would be computed"
            raise SpecError(what, "schema, rules", "remove that rule")
        check_levels(self.schema)

    def rules(self, columns: Columns) -> CellRules:
        """Return what each row keeps beside the columns of its person, on the cells that are counted."""
        return CellRules.of(self.schema.rules, self.cells(columns), self.adaptive)

    @property
    def adaptive(self) -> tuple[str, ...]:
        """The columns whose cells are found."""
        return list_adaptive(self.schema, self.spec.bins)

    @property
    def search(self) -> PersonCellSearch | None:
        """What finds the cells of columns in a first round; None if there are none to find, or they are found."""
        if not self.adaptive or self.found is not None:
            return None
        event = self.noise[FINE]
        return PersonCellSearch(names=self.adaptive, event=event, n_rows_public=False, asked=self)

    @cached_property
    def planned(self) -> PersonDomain:
        """The columns with about as many cells as they will have, as far as the schema tells."""
        names = (*self.parents, *self.children)
        sizes = tuple(_estimate_size(self.schema, name, self.spec.bins) for name in names)
        return self._people(Domain(names=names, sizes=sizes))

    @cached_property
    def noise(self) -> dict[str, DiscreteGaussian]:
        """The noise of each group of tables, and of fine counts; it depends on no data."""
        return plan_person_noise(self.budget, self.planned, len(self.adaptive))

    @property
    def of_tables(self) -> dict[str, DiscreteGaussian]:
        """The noise of each group of tables."""
        return {group: event for group, event in self.noise.items() if group != FINE}

    def _people(self, domain: Domain) -> PersonDomain:
        return PersonDomain(
            domain=domain, n_parents=len(self.parents), max_rows=self.budget.rows_per_unit
        )

    def estimate_errors(self, people: PersonDomain) -> dict[str, float]:
        """Return by about how many persons the noise alone moves a table of each group: half the sum of absolute differences.

        Notes
        -----
        √(2/π)/2 · σ for each cell, of which the fit takes out a part: on simulated persons 0.3 to
        0.85 of it was left, so half is told (docs/explanation/math.md, Persons with their rows).
        """
        return {
            group: _LEFT
            * (deviation(event) / _LATTICES.get(group, 1))
            * (people.count_cells(group) / len(people.shapes[group]))
            for group, event in self.noise.items()
            if group in _NAMES
        }

    def find_epsilon(self, people: PersonDomain, n_persons: int) -> str:
        """Return the least ε, to two digits, at which the noise moves no table by more than is little for so many persons."""
        found = self
        for _ in range(2):  # noise falls about as 1 / ε
            errors = found.estimate_errors(people)
            needed = found.budget.epsilon * max(errors.values()) / (_ENOUGH * n_persons)
            epsilon = min(needed, MAX_EPSILON)
            found = replace(self, budget=self.budget.model_copy(update={"epsilon": epsilon}))
        return write_above(epsilon, 2)

    @property
    def expected_errors(self) -> dict[str, Any]:
        """The numbers of a plan: see `Mechanism.expected_errors`."""
        people = self.planned
        tables = [
            {
                "group": group,
                "of": _NAMES[group],
                "sigma": deviation(self.noise[group]) / _LATTICES.get(group, 1),
                "moved": moved,
            }
            for group, moved in self.estimate_errors(people).items()
        ]
        needed = [{"persons": n, "epsilon": float(self.find_epsilon(people, n))} for n in _NUMBERS]
        return {"tables": tables, "enough": _ENOUGH, "needed": needed}

    @property
    def event(self) -> Composed:
        """One group of noisy tables after the other."""
        return Composed(events=tuple(self.noise.values()))

    def cells(self, columns: Columns) -> CutColumns:
        """Return the cells of each column, those of persons first."""
        return self.order(cut_with_found(columns.codecs, self.spec.bins, self.found))

    def check(self, columns: Columns) -> None:
        """Check that the tables can be held."""
        self.rules(columns)
        people = self.statistic(columns).domain
        total = sum(map(people.count_cells, GROUPS))
        if total > MAX_CELLS:
            what = f"all tables together have {total:,} cells; the limit is {MAX_CELLS:,}"
            raise SpecError(what, "`bins`", "declare fewer cells or levels, or drop a column")

    def statistic(self, columns: Columns) -> Any:
        """Return what is counted, a `PersonStatistic`."""
        max_rows = self.budget.rows_per_unit
        return PersonStatistic(cells=self.cells(columns), max_rows=max_rows, **self.counted_by)

    def check_counts(self, counts: PersonCounts | PersonMargins, columns: Columns) -> None:
        """Check the number of persons; see `Mechanism.check_counts`."""
        self.check_number(counts.n_persons)

    def draw(self, counts: PersonCounts, columns: Columns, noise: Noise) -> NoisyPersons:
        """Draw the noise of every table and return the noisy tables; see `Mechanism.draw`."""
        rng = noise("persons/noise")
        tables = {
            group: perturb(counts.tables[group], event, rng=rng)
            for group, event in self.of_tables.items()
        }
        people, n = counts.domain, float(counts.n_persons)
        if not self.knows_persons:
            n = estimate_persons(
                (table, self.noise[group], 1)
                for group in ("PP", "H")  # which have all persons
                for _, table in people.split(group, tables[group])
            )
        return NoisyPersons(people=people, n_persons=n, events=self.of_tables, tables=tables)

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyPersons:
        """Return the noisy tables that an earlier driver kept; see `Mechanism.read_drawn`."""
        found = NoisyPersons.from_bytes(data, "the run's noisy tables")
        found.check(self._people(domain_of(self.cells(columns))), self.of_tables)
        return found

    def list_counts(self, drawn: NoisyPersons, columns: Columns) -> Iterator[pa.Table]:
        """Return the noisy tables as they are published; see `Mechanism.list_counts`."""
        return drawn.list_counts()

    def fit(self, counts: NoisyPersons, columns: Columns, key: RunKey) -> FittedPersons:
        """Return the two-level copula that fits the noisy tables; see `Mechanism.fit`."""
        cells = self.cells(columns)
        scores = tuple(_score(self.schema, cells[name]) for name in self.children)
        model, rules = (
            fit_persons(counts.tell(scores, alone=self.key is None)),
            self.rules(columns),
        )
        if rules:  # they are refused here if nearly nobody keeps them; no secret: nothing of it is released
            model.draw(stream(RunKey.insecure(0), "copula/persons", "rules"), _TRIED, rules)
        return FittedPersons(
            schema=self.declared,
            columns=columns.types,
            bins=bins_by_column(self.spec.bins, cells, self.found),
            noisy=counts,
            model=model,
            key=self.unit,
        )

    def find_written(self, released: pa.Schema) -> pa.Schema:
        """Return the columns of the join: those of both tables, and the key."""
        return pa.schema([pa.field(self.unit, pa.int64()), *released])

    def n_records(self, release: FittedPersons) -> int:
        """Return how many persons a job writes."""
        return release.n_drawn(None if self.spec.n_rows == "input" else self.spec.n_rows)

    @property
    def description(self) -> PersonsDescription:
        """What is said of it."""
        return PersonsDescription(self)


def _score(schema: Schema, cells: Cells) -> Floats | None:
    """Return a number for each cell of a column whose values have an order; nan for null."""
    codec = cells.codec
    if not codec.has_levels:
        single = [*([math.nan] * codec.nulls), *codec.atoms]
        return np.concatenate([single, cells.means])[cells.possible]
    levels = codec.levels.to_pylist()
    numbers = all(level is None or isinstance(level, int | float) for level in levels)
    if schema.columns[codec.name].kind != "discrete" or not numbers:
        return None
    return np.array([math.nan if level is None else float(level) for level in levels])


@freeze_class(kw_only=False)
class PersonsDescription(NoisyCountsDescription):
    """What is said of synthetic persons with their rows."""

    mechanism: PersonsMechanism

    protected: ClassVar = EVERY_PERSON

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        asked = self.mechanism
        n, c = len(asked.parents), len(asked.children)
        return f"synthetic persons of {say_count(n, 'column')}, with rows of {say_count(c, 'column')}, from a two-level Gaussian copula"

    def guarantee(self, order: RowOrder) -> str:
        """Return the promise in words."""
        return noisy_counts_text(self.mechanism.budget, persons=True)

    def stages(self, columns: Columns) -> Sentences:
        """Return what a run does, in words."""
        asked = self.mechanism
        search = () if asked.search is None else (asked.search.stage,)
        return (
            *search,
            asked.counting,
            "fit: add noise to every table; fit the copula of persons and their rows on the driver, and write it once",
            "write: draw synthetic persons with their rows, and stage the shards of both tables",
        )

    def expectations(self, columns: Columns) -> Sentences:
        """Return how far the tables may be off, and which ε makes that little, by the number of persons."""
        asked, errors = self.mechanism, self.mechanism.expected_errors
        found = []
        for each in errors["tables"]:
            moved = f"of {_NUMBERS[1]:,} persons it moves a table by about {_say_share(each['moved'], _NUMBERS[1])}"
            said = f"a count of {each['of']} has noise of σ {write_digits(each['sigma'], 3)}, in persons"
            found.append(f"{said}: {moved} of them")
        n = say_count(len(asked.declared.rules), "rule")
        needed = ", ".join(
            f"{each['epsilon']:g} for {each['persons']:,} persons" for each in errors["needed"]
        )
        return (
            *found,
            f"noise alone moves no table by more than about {_ENOUGH:g} if ε is at least {needed}; fewer columns or cells need less",
            f"of a person's rows beyond {asked.planned.max_rows} nothing is released",
            *([f"every row keeps the {n} of the schema"] if asked.declared.rules else []),
        )

    def cautions(self, columns: Columns, n_rows: int | None) -> Sentences:
        """Return what to think of where the number of persons is public: too large a δ, and too few persons."""
        asked, found = self.mechanism, delta_warnings(self.mechanism.budget, n_rows)
        people = asked.planned
        errors = asked.estimate_errors(people)
        if not n_rows or max(errors.values()) <= _ENOUGH * n_rows:
            return found
        group = max(errors, key=errors.__getitem__)
        told = f"noise alone moves a table of {_NAMES[group]} by about {_say_share(errors[group], n_rows)} of them"
        use = f"use ε ≥ {asked.find_epsilon(people, n_rows)}, or fewer columns or cells"
        return (*found, f"for so few persons, {n_rows:,}, {told}: {use}")

    def n_expected(self, n_rows: int | None) -> None:
        """Return None: nobody knows how many rows persons will have."""

    def quality(self, release: FittedPersons) -> str:
        """Return how much of the persons the noise moves, in the tables of rows."""
        noisy = release.noisy
        moved = self.mechanism.estimate_errors(noisy.people)["CC"] / noisy.n_persons
        return f"the noise moves a table of rows by about {100 * moved:.3g} % of the persons"

    def section(
        self, release: FittedPersons, columns: Columns, *, n_released: int | None, **_: Any
    ) -> Section:
        """Return the persons' part of the release card.

        Privacy
        -------
        Holds parameters and the public domain. The number of persons is exact under replace-one,
        else the noisy tables' own estimate.
        """
        noisy, asked = release.noisy, self.mechanism
        people, budget = noisy.people, asked.budget
        cells = release.cells()
        mechanism = {
            "kind": "copula",
            "records": n_released,
            "bins": describe_bins(release.bins, cells),
            **describe_rules(release.schema),
            "persons": {
                "unit": asked.unit,
                "n_persons": noisy.n_persons,
                "exact": asked.knows_persons,
                "max_rows": people.max_rows,
                "empty": asked.key is not None,  # whether a person may have no rows
                "bands": list(people.edges),
                PARENTS: list(asked.parents),
                CHILDREN: list(asked.children),
                "lost": list(LOST),
            },
        }
        named: dict[str, CentralEvent | None] = dict(asked.noise)
        accounting = account_for(asked.event, named, budget, "tables of persons")
        for group, whole in _LATTICES.items():
            for each in accounting["noise"].get(group, {}):
                accounting["noise"][group][each] /= whole
        section = noisy_counts_section(
            budget=budget,
            mechanism=mechanism,
            schema=asked.schema,
            cells=cells,
            accounting=accounting,
            n_rows=None,
        )
        return asked.tell_persons(section, noisy.n_persons)
