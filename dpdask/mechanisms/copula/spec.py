"""The Gaussian copula as a mechanism: what a user may ask for, and its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

import pyarrow as pa
from pydantic import BeforeValidator, Field

from dpdask.arrays import freeze_class
from dpdask.computed import View
from dpdask.documents import Document, GrownDocument, suggest
from dpdask.errors import SpecError, list_names
from dpdask.mechanisms.card import Section, noisy_counts_section
from dpdask.mechanisms.columns import describe_bins
from dpdask.mechanisms.copula.fit import (
    MOST_CANDIDATES,
    CopulaOptions,
    Records,
    choose_triples,
    count_candidates,
    fit_copula,
    list_candidates,
    measure_pairs_again,
)
from dpdask.mechanisms.copula.model import MOST_CELLS, check_latents
from dpdask.mechanisms.copula.release import FittedCopula
from dpdask.mechanisms.levels import tell_selections
from dpdask.mechanisms.marginals.noise import (
    MarginalNoise,
    NoisyMarginals,
    measure_chosen,
    plan_noise,
)
from dpdask.mechanisms.marginals.spec import NoisyTables, NoisyTablesDescription, tables_accounting
from dpdask.mechanisms.mechanism import Columns, RecordsWanted, Search, Sentences, Spec
from dpdask.references.histogram import Bins, Found
from dpdask.rules import CellRules, check_levels, describe_rules
from dpdask.scales import is_dated
from dpdask.schema import Schema
from dpdask.stats import Domain, MarginalCounts
from dpdask.stats.marginals import TableStatistic
from dpdask.streams import Noise, RunKey, stream


def _as_how_many(value: object) -> object:
    if value != "auto" and (type(value) is not int or value < 0):
        raise ValueError(f"a whole number of at least 0, or `auto`, is expected, not {value!r}")
    return value


HowMany = Annotated[Literal["auto"] | int, BeforeValidator(_as_how_many)]
"""How many tables are chosen: a number, or `auto`: as many as the rule says."""

_MEASURED_AGAIN = 0.3  # of all pairs
_MOST_MEASURED_AGAIN = 1024


def count_measured_again(n_columns: int, delta: float, target: str | None = None) -> int:
    """Return how many pairs are measured a second time by default.

    Parameters
    ----------
    delta
        The budget's δ. Without one, noise is Laplace, and two measurements cost too much: inverse
        variance grows with the square of ε.
    """
    n_pairs = math.comb(n_columns, 2)
    wanted = max(round(_MEASURED_AGAIN * n_pairs), 0 if target is None else n_columns - 1)
    return min(wanted, _MOST_MEASURED_AGAIN) if n_pairs > 2 and delta > 0 else 0


class TableWeights(Document):
    """The share of the budget of the tables, relative to each other."""

    one_way: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """That of each one-way table; 0 to leave them out."""
    two_way: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """That of each two-way table."""


class CopulaSpec(GrownDocument, Spec):
    """Synthetic records of a Gaussian copula."""

    kind: Literal["copula"] = "copula"
    n_rows: RecordsWanted = "input"
    """How many records: a number, or `input`: as many as the table has (under add-remove, as the
    noisy tables say).
    """
    records: Records = "raked"
    """`raked`: records of the copula are weighted so that they match the denoised two-way tables,
    and resampled by these weights. `copula`: records of the copula as they are, the paper's
    model.
    """
    bins: Bins = "adaptive"
    """How continuous and mixed columns are cut. `adaptive`: into about 20 cells of equal counts
    that are found under privacy, in a pass of their own. A number: into that many cells of equal
    width. A mapping: for each column one of these, or a list of the first value of each cell.
    """
    weights: TableWeights = TableWeights()
    """How the budget is shared among the tables."""
    measured_again: HowMany = "auto"
    """How many pairs are measured a second time, with two fifths of the tables' budget: those with
    the largest expected gain, which is estimated from the first, noisy tables. `auto`: 3 in 10
    of the pairs, 1,024 at most; none with fewer than 3 pairs, or without a δ.
    """
    target: str | None = None
    """A column to predict from the others. Its pairs are measured again before all others, and
    every chosen three-way table contains it.
    """
    triples: HowMany = "auto"
    """The largest number of three-way tables to measure. They are chosen under privacy in a
    separate pass, and get 15 % of the tables' budget; the scores that choose them get 5 %.
    `auto`: with a `target` and a δ as many as there are columns, otherwise none.
    """
    options: CopulaOptions = CopulaOptions()
    """Which steps of the fit to switch off, to measure their effect."""
    persons: bool = False
    """Whether all rows of a value of the unit's column are one person: persons are drawn, each with its
    rows, as two tables that a key joins. Of the other parameters only `n_rows` (of persons) and `bins`
    go with it.
    """

    later: ClassVar[frozenset[str]] = frozenset(("persons",))


@freeze_class
class CopulaMechanism(NoisyTables):
    """The Gaussian copula of a schema under a budget.

    Privacy
    -------
    Unit, sensitivity and events: `MarginalNoise`. Protected: every row counted. Everything after
    the noise is post-processing; any number of records may be drawn.
    """

    spec: CopulaSpec
    # The noisy one- and two-way tables, in the round that chooses three-way tables; otherwise None.
    first: NoisyMarginals | None = None

    nobody: ClassVar = "synthetic records"
    keeps_rules: ClassVar = frozenset(("if", "forbid", "allow", "derived", "ordered"))
    has_model: ClassVar = True
    fits_rows: ClassVar = True
    release_type: ClassVar = FittedCopula

    @cached_property
    def noise(self) -> MarginalNoise:
        """The noise of every table; it depends on no data."""
        weights, n = self.spec.weights, len(self.schema.privatised)
        return plan_noise(
            self.budget,
            n,
            one_way=weights.one_way,
            pairs=weights.two_way,
            n_chosen=self.n_measured_again,
            n_triples=self.n_triples,
            n_scores=count_candidates(n, self.spec.target) if self.n_triples else 0,
            n_found=len(self.adaptive),
            discovered=self.discovered,
        )

    @property
    def n_measured_again(self) -> int:
        """How many pairs are measured a second time."""
        n = self.spec.measured_again
        return (
            count_measured_again(len(self.schema.privatised), self.budget.delta, self.spec.target)
            if n == "auto"
            else n
        )

    @property
    def n_triples(self) -> int:
        """How many three-way tables are measured at most."""
        n, n_columns = self.spec.triples, len(self.schema.privatised)
        if n != "auto":
            return n
        wanted = (
            self.spec.target is not None and self.budget.delta > 0 and self.spec.records == "raked"
        )
        return min(n_columns, count_candidates(n_columns, self.spec.target)) if wanted else 0

    def check_spec(self) -> None:
        """Check the target, the rules between levels, and that there are enough pairs and triples to choose from."""
        ruled = {name for rule in self.declared.rules for name in rule.names}
        for name in self.schema.discovered:
            if name in ruled:
                what = "its levels are found in the run, so no rule can name them"
                hint = "find them first with `dpdask discover JOB --epsilon E`, or list them"
                raise SpecError(what, f"schema, rules, column {name!r}", hint)
        check_levels(self.schema)
        columns, target, triples = self.schema.privatised, self.spec.target, self.n_triples
        if target is not None and target not in columns:
            raise SpecError(
                "is not a privatised column",
                f"`target` {target!r}",
                suggest(target, columns, "correct its name, or its role in the schema"),
            )
        if triples and self.budget.delta == 0:
            raise SpecError(
                "three-way tables are chosen by scores with Gaussian noise, which needs a δ",
                "`triples`",
                "set `delta`, or remove it",
            )
        if triples and self.spec.records == "copula":
            what = "the copula's own records are not raked, so three-way tables would be measured for nothing"
            raise SpecError(what, "`triples`", "remove it, or set `records` to raked")
        n_candidates = count_candidates(len(columns), target)
        if triples > n_candidates:
            what = f"{triples:,} three-way tables cannot be chosen from {n_candidates:,}"
            raise SpecError(what, "`triples`", f"give at most {n_candidates:,}, or `auto`")
        n_pairs = math.comb(len(self.schema.privatised), 2)
        if self.n_measured_again > n_pairs:
            what = f"{self.spec.measured_again:,} pairs cannot be chosen, because the columns have {n_pairs:,}"
            raise SpecError(what, "`measured_again`", f"give at most {n_pairs:,}, or `auto`")

    @property
    def search(self) -> Search | None:
        """The rounds before the last: the cells, and if triples are chosen, the one- and two-way tables."""
        chooses = self.n_triples and self.first is None
        return self.level_search or self.cell_search or (self if chooses else None)

    def find(self, drawn: NoisyMarginals, columns: Columns) -> NoisyMarginals:
        """Return the noisy one- and two-way tables, by which triples are chosen."""
        return drawn

    def with_found(self, found: Schema | Found | NoisyMarginals) -> Self:
        """Return the mechanism with the levels, the cells, or the noisy tables of the round before the last."""
        return (
            replace(self, first=found)
            if isinstance(found, NoisyMarginals)
            else NoisyTables.with_found(self, found)
        )

    def draw(self, counts: MarginalCounts, columns: Columns, noise: Noise) -> NoisyMarginals:
        """Draw the noise of every table and of pairs measured again, or in a last round, that of chosen triples; see `Mechanism.draw`."""
        if self.first is not None:
            triples = choose_triples(
                self.first, counts, self.spec.options, rng=noise("marginals/noise/scores")
            )
            return measure_chosen(self.first, counts, triples, rng=noise("marginals/noise/triples"))
        noisy = NoisyTables.draw(self, counts, columns, noise)
        return measure_pairs_again(
            noisy, counts, self.spec.target, rng=noise("marginals/noise/again")
        )

    @property
    def bins(self) -> Bins:
        """How continuous and mixed columns are cut."""
        return self.spec.bins

    def check_tables(self, columns: Columns) -> None:
        """Check the bins, the tables' sizes, and that the copula can be fitted."""
        statistic = self.statistic(columns)
        statistic.check_size()
        check_latents(statistic.domain)
        self.rules(columns)
        if (
            self.n_triples
            and not self.cell_search
            and not list_candidates(statistic.domain, self.spec.target)
        ):
            what = f"no three-way table has at most {MOST_CELLS:,} cells"
            raise SpecError(what, "`triples`", "set it to 0, or declare fewer levels or `bins`")

    def rules(self, columns: Columns) -> CellRules:
        """Return what all records keep, on the cells that are counted."""
        return CellRules.of(self.schema.rules, self.cells(columns), self.adaptive)

    def statistic(self, columns: Columns) -> TableStatistic:
        """Return what is counted: the table of each column and of each pair, or in the round that chooses triples, all candidates."""
        statistic = TableStatistic(cells=self.cells(columns), two_way=True)
        if self.first is None:
            return statistic
        candidates = list_candidates(statistic.domain, self.spec.target)
        return replace(statistic, cliques=candidates, two_way=False)

    def fit(self, counts: NoisyMarginals, columns: Columns, key: RunKey) -> FittedCopula:
        """Return the copula that fits the noisy tables; see `Mechanism.fit`."""
        rng, spec = stream(key, "copula/calibration", ""), self.spec
        cells = self.cells(columns)
        model, report = fit_copula(
            *(counts, rng, spec.options),
            records=spec.records,
            cells=cells,
            rules=self.rules(columns),
        )
        return FittedCopula(
            schema=self.declared,
            columns=columns.types,
            bins=self.bins_of(columns),
            noisy=counts,
            model=model,
            report=report,
        )

    def list_counts(self, drawn: NoisyMarginals, columns: Columns) -> Iterable[pa.Table]:
        """Return the noisy tables as they are published; see `Mechanism.list_counts`."""
        return drawn.list_counts(self.cells(columns))

    def n_records(self, release: FittedCopula) -> int:
        """Return how many records a job writes."""
        return release.n_drawn(None if self.spec.n_rows == "input" else self.spec.n_rows)

    @property
    def description(self) -> CopulaDescription:
        """What is said of it."""
        return CopulaDescription(self)


@freeze_class(kw_only=False)
class CopulaDescription(NoisyTablesDescription):
    """What is said of synthetic records."""

    mechanism: CopulaMechanism

    @property
    def how(self) -> str:
        """What was done, in a few words."""
        return f"synthetic records of {len(self.mechanism.schema.privatised)} columns, from a Gaussian copula"

    def cautions(self, columns: Columns, n_rows: int | None) -> Sentences:
        """Return what a steward should consider before a run."""
        asked, said = self.mechanism, NoisyTablesDescription.cautions(self, columns, n_rows)
        target, n, sizes = asked.spec.target, len(asked.schema.privatised), asked.sizes(columns)
        domain = Domain(names=tuple(sizes), sizes=tuple(sizes.values()))
        if asked.n_triples and not list_candidates(domain, target):
            said += (
                (
                    f"Probably no three-way table will have at most {MOST_CELLS:,} cells, so the share"
                    " of `triples` is spent for nothing. Set `triples` to 0, or declare fewer `bins`."
                ),
            )
        if target is not None and not asked.n_triples:
            without_delta = asked.budget.delta == 0
            why = "the budget has no δ" if without_delta else "no three-way tables are measured"
            said += (f"The target {target} changes little: {why}.",)
        ruled = {name for rule in asked.declared.rules for name in rule.names}
        dates = [name for name, codec in columns.codecs.items() if is_dated(codec.type)]
        if len(dates) > 1 and not ruled.issuperset(dates):
            said += (
                (
                    f"Records have the dates {list_names(dates, 8)} in any order. If one is never after"
                    " another, declare the rule `ordered`, as in `start <= end`."
                ),
            )
        left_out = math.comb(n - 1, 2) if target is not None else math.comb(n, 3)
        if asked.n_triples and left_out > MOST_CANDIDATES:
            said += (
                (
                    f"Only {MOST_CANDIDATES} of {left_out:,} three-way tables can be chosen, those of"
                    " the columns with the fewest cells. Drop columns, or name a `target`."
                ),
            )
        return said

    def expectations(self, columns: Columns) -> Sentences:
        """Return how far the counts of the tables may be off, and that records keep rules."""
        found, n = (
            NoisyTablesDescription.expectations(self, columns),
            len(self.mechanism.declared.rules),
        )
        kept = f"every record keeps the {n} {'rule' if n == 1 else 'rules'} of the schema"
        view = View.of(self.mechanism.declared, columns.types)
        return (*found, kept, *view.expectations) if n else found

    def stages(self, columns: Columns) -> Sentences:
        """Return what a run does, in words."""
        asked = self.mechanism
        n, again, n_triples = len(asked.schema.privatised), asked.n_measured_again, asked.n_triples
        twice = f", and a second time to those of {again:,} chosen pairs" if again else ""
        choose = (
            f"choose: read {n} columns once more; count at most"
            f" {count_candidates(n, asked.spec.target):,} three-way tables, score them with noise,"
            f" measure at most {n_triples:,} that stand out"
        )
        return (
            *asked.search_stages,
            (
                f"tabulate: read {n} columns once; count {n} one-way and {n * (n - 1) // 2} two-way"
                " tables, merged in a tree"
            ),
            *([choose] if n_triples else []),
            (
                f"fit: add noise to every table{twice}; fit the copula to the noisy tables on the"
                " driver, and write it once"
            ),
            "write: sample synthetic records and stage their shards",
        )

    def n_expected(self, n_rows: int | None) -> int | None:
        """Return how many records a run writes, given the public number of rows; None if it is not known before."""
        return n_rows if self.mechanism.spec.n_rows == "input" else self.mechanism.spec.n_rows

    def quality(self, release: FittedCopula) -> str:
        """Return how much dependence could be distinguished from noise; see `Mechanism.quality`."""
        share = release.report.kept_share
        told = f"{100 * share:.3g} % of the correlations between levels of two columns stand out from noise; the others, weak or absent in the table, are close to 0"
        if self.mechanism.n_triples:
            chosen = sum(len(clique) == 3 for clique in release.noisy.chosen)
            told = f"{chosen:,} of at most {self.mechanism.n_triples:,} three-way tables stood out from noise; {told}"
        # a column of many levels has many correlations: a small share may hold all strong ones
        return f"{told}; the columns come out nearly independent" if not share else told

    def section(
        self,
        release: FittedCopula,
        columns: Columns,
        *,
        n_released: int | None,
        **_: Any,
    ) -> Section:
        """Return the copula's part of the release card.

        Privacy
        -------
        Holds parameters, the public domain, and measures of the fit to noisy tables. Nothing exact;
        under add-remove the number of rows is the noisy tables' own estimate.
        """
        report, noisy, cells = release.report, release.noisy, release.cells()
        model, names = release.model, release.model.domain.names
        attributes = [names[node.attribute] for node in model.nodes]
        mechanism = {
            "kind": "copula",
            "records": n_released,
            "bins": describe_bins(release.bins, cells),
            "tree": [  # of each attribute its parent, in the order of decoding
                [name, attributes[node.parent] if node.parent >= 0 else None]
                for name, node in zip(attributes, model.nodes, strict=True)
            ],
            "measured_again": [list(clique) for clique in noisy.chosen if len(clique) == 2],
            "three_way": [list(clique) for clique in noisy.chosen if len(clique) == 3],
            "latent_variables": report.n_latents,
            **describe_rules(release.schema),
            "raked_tables": 0 if model.targets is None else len(model.targets.tables),
            "significant_share": report.kept_share,
            "nearest_correlation": {
                "rms_distance": report.moved,
                "iterations": report.n_iterations,
                "residual": report.residual,
            },
        }
        accounting = tables_accounting(noisy, self.mechanism.budget)
        section = noisy_counts_section(
            budget=self.mechanism.budget,
            mechanism=mechanism,
            schema=self.mechanism.schema,
            cells=cells,
            accounting=accounting,
            n_rows=noisy.n_rows,
            view=release.view,
        )
        return tell_selections(section, noisy.noise.levels)
