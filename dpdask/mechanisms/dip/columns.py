"""Distribution-invariant privatisation, column by column: each value is randomised, and its distribution is preserved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Archived, Contents, Json
from dpdask.channels import (
    check_values,
    costs,
    measure_attenuation,
)
from dpdask.codec import Codec, Codecs
from dpdask.errors import SpecError
from dpdask.mechanisms.dip.randomisers import (
    ColumnMechanism,
    LevelMechanism,
    doubt_bounds,
    fit_column,
    read_randomisers,
    write_randomisers,
)
from dpdask.mechanisms.dip.spec import ChannelKind, Cost, DipDescription, DipMechanism, check_costs
from dpdask.mechanisms.expectations import warn_of_spread
from dpdask.mechanisms.mechanism import Columns, RandomisedRows
from dpdask.references import Distribution, LevelDistribution, RankDistribution
from dpdask.references.histogram import NoisyHistograms
from dpdask.references.reference import ColumnCounts
from dpdask.streams import Noise, Rng, RunKey

_N_KNOTS = 2**10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DipRelease(RandomisedRows):
    """A fitted release: for each privatised column its mechanism.

    Privacy
    -------
    Unit: a row. Adjacency: replace-one. Protected: the values of the rows that are randomised,
    given a reference that does not depend on them. Row-level noise, so there is no sensitivity: ε
    of a row is the sum of its columns' ε*, each computed from the tables that are drawn from.
    Event: one local release of every row. For several continuous columns the reference's knots are
    values of hold-out rows; a released value lies between two of them.

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, Algorithm 1, each column by its own
    marginal distribution.
    """

    archive: ClassVar[Archive] = Archive(kind="dip-columns", format=2, noun="fitted DIP release")
    mechanism_id: ClassVar[str] = "dip"

    columns: Mapping[str, ColumnMechanism]

    def randomise(
        self, batch: pa.RecordBatch, codecs: Codecs, rngs: Mapping[str, Rng]
    ) -> pa.RecordBatch:
        """Return the batch with every privatised column randomised and the others untouched; see `RowRelease.randomise`."""
        arrays = list(batch.columns)
        for name, mechanism in self.columns.items():
            position = batch.schema.get_field_index(name)
            arrays[position] = mechanism.randomise(codecs[name], arrays[position], rngs[name])
        return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)

    def _contents(self) -> Contents:
        """Return what the bytes hold.

        Privacy
        -------
        Holds the reference (for a hold-out: hold-out values). It is kept beside the run key, never
        published.
        """
        columns, arrays = write_randomisers(self.columns)
        return {"columns": columns}, arrays

    @classmethod
    def _of_contents(cls, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        return cls(columns=read_randomisers(header["columns"], arrays))


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnsMechanism(DipMechanism):
    """Distribution-invariant privatisation with a reference for each column."""

    release_type: ClassVar[type[DipRelease]] = DipRelease

    def check(self, columns: Columns) -> None:
        """Check the declared distributions, the bins and the costs against the columns; see `Mechanism.check`."""
        self.reference.cells(columns.codecs)
        self.reference.check_codecs(columns.codecs)
        if self.spec.channel == "optimal-unbiased":
            self._check_means(columns)
        for name, cost in (self.spec.cost or {}).items():
            costs.check_cost(columns.codecs[name], cost)

    def _check_means(self, columns: Columns) -> None:
        """Check what decides about means and is public: the levels, and a declared distribution."""
        for name, codec in columns.codecs.items():
            try:
                check_values(costs.level_values(codec))
            except SpecError as error:
                raise error.at(f"column {name!r}") from None
        if self.reference.rows == "none":
            fitted = self.fit(None, columns, RunKey.insecure(0))
            for name, described in self.description.describe_columns(fitted, columns).items():
                if "attenuation" not in described:
                    what = "an unbiased channel keeps nothing of its values, or the declared distribution has one level only"
                    mend = "take a larger ε, fewer or nearer levels, or the channel optimal"
                    raise SpecError(what, f"column {name!r}", mend)

    def check_counts(self, counts: ColumnCounts, columns: Columns) -> None:
        """Check that the reference rows make a distribution of each column; see `Mechanism.check_counts`."""
        del columns
        self.reference.check_counts(counts)

    def draw(self, counts: ColumnCounts, columns: Columns, noise: Noise) -> Archived | None:
        """Draw the noise of the histograms, if the reference is one; see `Mechanism.draw`."""
        return self.reference.draw(counts, columns.codecs, self.measurements, noise)

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyHistograms:
        """Return the noisy histograms that an earlier driver kept; see `Mechanism.read_drawn`."""
        found = NoisyHistograms.from_bytes(data, "the run's noisy histograms")
        found.check(self.measurements, self.reference.sizes(columns.codecs))
        return found

    def fit(self, counts: Any, columns: Columns, key: RunKey) -> DipRelease:
        """Return the fitted release; see `Mechanism.fit`."""
        del key
        return self._fit(self.reference.distributions(counts, columns.codecs), columns.codecs)

    def _fit(self, references: Mapping[str, Distribution], codecs: Codecs) -> DipRelease:
        spec = self.spec
        return fit_dip(references, codecs, self.spending.row, spec.channel, spec.cost)

    def audit(self, columns: Columns, card: Mapping[str, Any] | None) -> dict[str, Json]:
        """Return what is claimed and found: of the released channels, the declared distribution, or a uniform one; see `Mechanism.audit`."""
        found = self.audit_card(card)
        if found:
            return found
        codecs = columns.codecs
        if self.reference.rows == "none":
            references = self.reference.distributions(None, codecs)
            source = "the declared distribution"
        else:
            references = {name: _uniform(codec) for name, codec in codecs.items()}
            source = "a uniform stand-in"
        return self.audit_columns(self._fit(references, codecs).columns, source)

    @property
    def description(self) -> ColumnsDescription:
        """What is said of it."""
        return ColumnsDescription(self)


@dataclass(frozen=True, slots=True)
class ColumnsDescription(DipDescription):
    """What is said of rows whose columns are randomised each on its own."""

    mechanism: ColumnsMechanism

    def quality(self, release: DipRelease) -> str:
        """Return how much a row keeps of each column; see `Mechanism.quality`."""
        columns, reference = self.mechanism.schema.columns, self.mechanism.reference
        said = [
            f"{name} {each.describe_kept(columns[name])}" for name, each in release.columns.items()
        ]
        if reference.rows != "none" and not reference.uncovered:
            # rows were counted, and something protects them
            for name, each in release.columns.items():
                said += [f"{name} {doubt}" for doubt in doubt_bounds(each.distribution)]
        return "; ".join(said)

    def warnings(self, release: DipRelease, columns: Columns) -> tuple[str, ...]:
        """Return a warning for each column whose rows share values that are released spread; see `Mechanism.warnings`."""
        found: list[str] = []
        for name, mechanism in release.columns.items() if self.mechanism.spreads else ():
            codec = columns.codecs[name]
            if mechanism.distribution is not None and not codec.has_levels:
                x, c = mechanism.distribution.x, mechanism.distribution.c
                found += warn_of_spread(name, x[1:], x[:-1], np.diff(c), lattice=codec.lattice)
        return tuple(found)

    def describe_joint(self, release: DipRelease) -> Json:
        """Return what the card says about the columns' joint distribution."""
        del release
        return {"columns": "independent", "joint": self.mechanism.reference.joint}

    def describe_columns(self, release: DipRelease, columns: Columns) -> dict[str, Json]:
        """Return what the card says about each fitted column; see `DipMechanism.describe_columns`.

        With the channel optimal-unbiased, `attenuation` gives c, m and the bound on the bias
        (`channels.Attenuation`): all three are functions of the channel and the public levels,
        which stand beside them. It is absent where the reference leaves nothing of the mean, as
        with a single level.
        """
        found = DipDescription.describe_columns(self, release, columns)
        if self.mechanism.spec.channel == "optimal-unbiased":
            for name, mechanism in release.columns.items():
                assert isinstance(mechanism, LevelMechanism)
                line = measure_attenuation(
                    mechanism.channel.weights, costs.level_values(columns.codecs[name])
                )
                found[name] |= {} if line is None else {"attenuation": asdict(line)}
        return found


def _uniform(codec: Codec) -> Distribution:
    if codec.has_levels:
        return LevelDistribution(np.full(codec.n_levels, 1.0 / codec.n_levels))
    low, high = codec.bounds or (0.0, float(_N_KNOTS))
    return RankDistribution(
        np.linspace(low, high, _N_KNOTS + 1), np.linspace(0.0, 1.0, _N_KNOTS + 1), 0.0
    )


def fit_dip(
    distributions: Mapping[str, Distribution],
    codecs: Codecs,
    epsilons: Mapping[str, float],
    channel: ChannelKind = "laplace",
    given_costs: Mapping[str, Cost] | None = None,
) -> DipRelease:
    """Return the release that spends each column's ε by a kind of channel.

    Parameters
    ----------
    channel
        `laplace`: as published. `laplace-calibrated`: the same noise, as small as ε allows.
        `optimal`: the invariant ε-private channel of least expected cost. `optimal-unbiased`: the
        best of those that allow means without bias.
    given_costs
        What the optimal channel minimises, by column: `value` (squared differences; the default of
        discrete levels), `rank` (squared differences of ranks; that of continuous and mixed
        columns), `zero-one` (that of categories), or a matrix over the levels.
    """
    wanted = given_costs or {}
    check_costs(wanted, epsilons, channel)
    return DipRelease(
        columns={
            name: fit_column(codecs[name], distributions[name], epsilon, channel, wanted.get(name))
            for name, epsilon in epsilons.items()
        }
    )
