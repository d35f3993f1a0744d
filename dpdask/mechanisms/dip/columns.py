"""Distribution-invariant privatisation, column by column: each value is randomised, and its distribution is preserved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dpdask.archive import Archive, Archived, Contents
from dpdask.channels import (
    LevelChannel,
    calibrate,
    check_values,
    costs,
    laplace,
    measure_attenuation,
    optimal,
    optimal_unbiased,
)
from dpdask.codec import Codec, LevelCodec, ValueCodec
from dpdask.errors import SpecError, list_names
from dpdask.kernels import cdf as bins_kernel
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import rank as rank_kernel
from dpdask.mechanisms.dip.spec import (
    N_BINS,
    ChannelKind,
    Cost,
    DipDescription,
    DipMechanism,
    check_costs,
)
from dpdask.mechanisms.expectations import correlate_ranks, warn_of_spread
from dpdask.mechanisms.mechanism import Columns, RandomisedRows
from dpdask.references import Distribution, LevelDistribution, RankDistribution
from dpdask.references.histogram import NoisyHistograms
from dpdask.references.reference import ColumnCounts
from dpdask.schema import Column
from dpdask.stats.levels import encode
from dpdask.streams import Noise, Rng, RunKey, words

_N_KNOTS = 2**10
_AT_BOUND, _MANY_AT_BOUND = (
    0.01,
    0.25,
)  # what is next to a bound, as a part of the range, and which share of the values there is doubtful
_MANY_IN_CELL = 0.4
_LOST = 1e-9  # shares are solved for, so that of a level without a row is 0 up to rounding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LevelMechanism:
    """A level column's channel with the exact tables that it is drawn from."""

    channel: LevelChannel
    thresholds: NDArray[np.uint64]
    aliases: NDArray[np.uint16]

    @property
    def epsilon(self) -> float:
        """ε*, exact."""
        return self.channel.epsilon

    def randomise(self, codec: LevelCodec, array: pa.Array, rng: Rng) -> pa.Array:
        """Return a released value for each value of `array`; consumes one word a row."""
        codes = encode(codec, array)
        return codec.decode(
            channel_kernel.sample(codes, words(rng, len(codes)), self.thresholds, self.aliases)
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMechanism:
    """A continuous or mixed column's rank noise and reference cdf."""

    noise: rank_kernel.RankNoise
    distribution: RankDistribution
    thresholds: NDArray[np.uint64]
    aliases: NDArray[np.uint16]

    @property
    def epsilon(self) -> float:
        """An upper bound on ε*."""
        return self.noise.epsilon

    def randomise(self, codec: ValueCodec, array: pa.Array, rng: Rng) -> pa.Array:
        """Return a released value for each value of `array`; consumes a fixed number of words a row. See `LevelMechanism.randomise`."""
        values, is_null = codec.encode(array)
        noise, reference = self.noise, self.distribution
        drawn = words(rng, len(values), rank_kernel.words_per_row(noise))
        tables = self.thresholds, self.aliases
        released = rank_kernel.privatise(
            values, is_null, drawn, reference.x, reference.c, noise, tables, lattice=codec.lattice
        )
        return codec.decode(*released)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BinMechanism:
    """A continuous or mixed column's channel on bins of ranks; inside its bin a released value follows the reference."""

    # The channel between bins: null, each atom, and even slices of the ranks in between.
    channel: LevelChannel
    edges: NDArray[np.float64]  # float64 array, the bins' edges in ranks
    distribution: RankDistribution
    thresholds: NDArray[np.uint64]
    aliases: NDArray[np.uint16]

    @property
    def epsilon(self) -> float:
        """ε*, exact: what follows the channel does not look at the value any more."""
        return self.channel.epsilon

    def randomise(self, codec: ValueCodec, array: pa.Array, rng: Rng) -> pa.Array:
        """Return a released value for each value of `array`; consumes three words a row. See `LevelMechanism.randomise`."""
        values, is_null = codec.encode(array)
        drawn = words(rng, len(values), 3)
        x, c = self.distribution.x, self.distribution.c
        cells = bins_kernel.cells_of(
            values,
            is_null,
            np.ascontiguousarray(drawn[:, 0]),
            x,
            c,
            self.edges,
            lattice=codec.lattice,
        )
        released = channel_kernel.sample(
            cells, np.ascontiguousarray(drawn[:, 1]), self.thresholds, self.aliases
        )
        return codec.decode(
            *bins_kernel.draw_values(released, drawn[:, 2], x, c, self.edges, lattice=codec.lattice)
        )


ColumnMechanism = LevelMechanism | RankMechanism | BinMechanism


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
        self, batch: pa.RecordBatch, codecs: Mapping[str, Codec], rngs: Mapping[str, Rng]
    ) -> pa.RecordBatch:
        """Return the batch with every privatised column randomised and the others untouched; see `RowRelease.randomise`."""
        arrays = list(batch.columns)
        for name, mechanism in self.columns.items():
            position = batch.schema.get_field_index(name)
            codec, array = codecs[name], batch.column(position)
            if isinstance(mechanism, LevelMechanism):
                assert isinstance(codec, LevelCodec)
                arrays[position] = mechanism.randomise(codec, array, rngs[name])
            else:
                assert isinstance(codec, ValueCodec)
                arrays[position] = mechanism.randomise(codec, array, rngs[name])
        return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)

    def _contents(self) -> Contents:
        """Return what the bytes hold.

        Privacy
        -------
        Holds the reference (for a hold-out: hold-out values). It is kept beside the run key, never
        published.
        """
        columns: list[dict[str, Any]] = []
        arrays: dict[str, Any] = {}
        for index, (name, mechanism) in enumerate(self.columns.items()):
            described, parts = _to_parts(mechanism)
            columns.append({"name": name, **described})
            arrays |= {f"{index}_{part}": array for part, array in parts.items()}
        return {"columns": columns}, arrays

    @classmethod
    def _of_contents(cls, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        return cls(
            columns={
                column["name"]: _from_parts(column, arrays, index)
                for index, column in enumerate(header["columns"])
            }
        )


def _to_parts(mechanism: ColumnMechanism) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a column's part of the header and its arrays."""
    if isinstance(mechanism, LevelMechanism):
        return {"kind": "levels", "epsilon": mechanism.epsilon}, {
            "weights": mechanism.channel.weights
        }
    reference = mechanism.distribution
    described, arrays = (
        {"rank_error": reference.rank_error, "kept": dict(reference.kept)},
        {"x": reference.x, "c": reference.c},
    )
    if isinstance(mechanism, BinMechanism):
        return described | {"kind": "bins", "epsilon": mechanism.epsilon}, arrays | {
            "weights": mechanism.channel.weights,
            "edges": mechanism.edges,
        }
    return described | {"kind": "ranks", "noise": mechanism.noise.scalars}, arrays | {
        "weights": mechanism.noise.weights
    }


def _from_parts(
    column: Mapping[str, Any], arrays: Mapping[str, Any], index: int
) -> ColumnMechanism:
    weights = arrays[f"{index}_weights"]
    thresholds, aliases = channel_kernel.alias_tables(weights)
    if column["kind"] == "levels":
        return LevelMechanism(
            channel=LevelChannel(weights=weights, epsilon=column["epsilon"]),
            thresholds=thresholds,
            aliases=aliases,
        )
    distribution = RankDistribution(
        arrays[f"{index}_x"], arrays[f"{index}_c"], column["rank_error"], column["kept"]
    )
    if column["kind"] == "bins":
        channel = LevelChannel(weights=weights, epsilon=column["epsilon"])
        edges = arrays[f"{index}_edges"]
        return BinMechanism(
            channel=channel,
            edges=edges,
            distribution=distribution,
            thresholds=thresholds,
            aliases=aliases,
        )
    noise = rank_kernel.RankNoise(weights=weights, **column["noise"])
    return RankMechanism(
        noise=noise, distribution=distribution, thresholds=thresholds, aliases=aliases
    )


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
                    raise SpecError(
                        what,
                        f"column {name!r}",
                        "take a larger ε, fewer or nearer levels, or the channel optimal",
                    )

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
        return fit_dip(
            self.reference.distributions(counts, columns.codecs),
            columns.codecs,
            self.spending.row,
            self.spec.channel,
            self.spec.cost,
        )

    def audit(self, columns: Columns, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        """Return what is claimed and found: of the released channels, the declared distribution, or a uniform one; see `Mechanism.audit`."""
        found = self.audit_card(card)
        if found:
            return found
        if self.reference.rows == "none":
            references, source = (
                self.reference.distributions(None, columns.codecs),
                "the declared distribution",
            )
        else:
            references, source = (
                {name: _uniform(codec) for name, codec in columns.codecs.items()},
                "a uniform stand-in",
            )
        return self.audit_columns(
            fit_dip(
                references, columns.codecs, self.spending.row, self.spec.channel, self.spec.cost
            ).columns,
            source,
        )

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
        kept = [
            f"{name} {_measure_kept(each, self.mechanism.schema.columns[name])}"
            for name, each in release.columns.items()
        ]
        if (
            self.mechanism.reference.rows == "none" or self.mechanism.reference.uncovered
        ):  # nothing was counted, or nothing protects the rows that were
            return "; ".join(kept)
        return "; ".join(
            [
                *kept,
                *(
                    f"{name} {said}"
                    for name, each in release.columns.items()
                    for said in _doubt_bounds(each)
                ),
            ]
        )

    def warnings(self, release: DipRelease, columns: Columns) -> tuple[str, ...]:
        """Return a warning for each column whose rows share values that are released spread; see `Mechanism.warnings`."""
        found: list[str] = []
        for name, mechanism in release.columns.items() if self.mechanism.spreads else ():
            codec = columns.codecs[name]
            if not isinstance(mechanism, LevelMechanism) and isinstance(codec, ValueCodec):
                x, c = mechanism.distribution.x, mechanism.distribution.c
                found += warn_of_spread(name, x[1:], x[:-1], np.diff(c), lattice=codec.lattice)
        return tuple(found)

    def describe_joint(self, release: DipRelease) -> dict[str, Any]:
        """Return what the card says about the columns' joint distribution."""
        del release
        return {"columns": "independent", "joint": self.mechanism.reference.joint}

    def describe_columns(self, release: DipRelease, columns: Columns) -> dict[str, dict[str, Any]]:
        """Return what the card says about each fitted column; see `DipMechanism.describe_columns`.

        With the channel optimal-unbiased, `attenuation` gives c, m and the bound on the bias
        (`channels.Attenuation`): all three are functions of the channel and the public levels,
        which stand beside them. It is absent where the reference leaves nothing of the mean, as
        with a single level.
        """
        found = {
            name: {"epsilon_exact": mechanism.epsilon, **_describe(mechanism)}
            for name, mechanism in release.columns.items()
        }
        if self.mechanism.spec.channel == "optimal-unbiased":
            for name, mechanism in release.columns.items():
                assert isinstance(mechanism, LevelMechanism)
                line = measure_attenuation(
                    mechanism.channel.weights, costs.level_values(columns.codecs[name])
                )
                found[name] |= {} if line is None else {"attenuation": asdict(line)}
        return found


def _measure_kept(mechanism: ColumnMechanism, column: Column) -> str:
    """Return how much of a value a channel keeps: of levels how many stay, of numbers the correlation of ranks."""
    if isinstance(mechanism, RankMechanism):
        return f"keeps a correlation of ranks of {correlate_ranks(mechanism.epsilon):.2f}"
    matrix = mechanism.channel.matrix
    shares = np.linalg.lstsq(
        np.vstack([matrix.T - np.eye(len(matrix)), np.ones(len(matrix))]),
        np.append(np.zeros(len(matrix)), 1.0),
        rcond=None,
    )[0]
    if isinstance(mechanism, LevelMechanism):
        kept, chance = (
            f"{100 * float(part):.3g} %" for part in (shares @ np.diag(matrix), shares @ shares)
        )
        levels = [str(level) for level in column.levels or ()]
        levels = ["null"] * (len(shares) - len(levels)) + levels
        lost = [level for level, share in zip(levels, shares, strict=True) if share < _LOST]
        if not lost:
            return f"is unchanged in {kept} of the rows ({chance} by chance)"
        # the table may have many rows there, and the shares do not tell
        few = f"no row is released as {list_names(lost, 5)}, which the reference lacks"
        return f"is unchanged in at most {kept} of the rows ({chance} by chance): {few}"
    place = np.cumsum(shares) - shares / 2.0 - 0.5
    return f"keeps a correlation of ranks of {float((shares * place) @ matrix @ place / max(float((shares * place) @ place), 1e-300)):.2f}"


def _doubt_bounds(mechanism: ColumnMechanism) -> list[str]:
    """Return what the released distribution has that wrong bounds would explain."""
    if isinstance(mechanism, LevelMechanism):
        return []
    x, c = mechanism.distribution.x, mechanism.distribution.c
    values = max(1.0 - c[0], 1e-300)
    at_end = (1.0 - float(np.interp(x[-1] - _AT_BOUND * (x[-1] - x[0]), x, c))) / values
    wide = (
        mechanism.distribution.rank_error if mechanism.distribution.kept else 1.0
    )  # a cell of whole numbers may hold one of them, such as 0
    widest = min(wide, float(np.diff(c)[np.diff(x) > 0.0].max(initial=0.0))) / values
    if at_end >= _MANY_AT_BOUND:
        return [
            f"has {100 * at_end:.0f} % of its values at its upper bound or next to it: check that it is not too low"
        ]
    if widest >= _MANY_IN_CELL:
        where = "in one cell of the reference, over which they are spread evenly"
        return [
            f"has {100 * widest:.0f} % of its values {where}: check that its bounds are not too wide"
        ]
    return []


def _describe(mechanism: ColumnMechanism) -> dict[str, Any]:
    if isinstance(mechanism, LevelMechanism):
        return {"channel": mechanism.channel.matrix.tolist()}
    reference = mechanism.distribution
    shown = {
        "reference": {
            "knots_at_most": 2**16,
            "rank_error_at_most": max(2.0**-15, reference.rank_error),
            **reference.kept,
        }
    }
    if isinstance(mechanism, RankMechanism):
        return shown | {"ranks": mechanism.noise.n_cells, "alpha_log": -mechanism.noise.rate}
    return shown | {
        "rank_edges": mechanism.edges.tolist(),
        "channel": mechanism.channel.matrix.tolist(),
    }


def _uniform(codec: Codec) -> Distribution:
    if isinstance(codec, LevelCodec):
        return LevelDistribution(np.full(codec.n_levels, 1.0 / codec.n_levels))
    low, high = codec.bounds or (0.0, float(_N_KNOTS))
    return RankDistribution(
        np.linspace(low, high, _N_KNOTS + 1), np.linspace(0.0, 1.0, _N_KNOTS + 1), 0.0
    )


def fit_dip(
    distributions: Mapping[str, Distribution],
    codecs: Mapping[str, Codec],
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
            name: _fit(codecs[name], distributions[name], epsilon, channel, wanted.get(name))
            for name, epsilon in epsilons.items()
        }
    )


def _fit(
    codec: Codec,
    distribution: Distribution,
    epsilon: float,
    channel: ChannelKind,
    cost: Cost | None,
) -> ColumnMechanism:
    if isinstance(distribution, LevelDistribution):
        assert isinstance(codec, LevelCodec)
        found = _level_channel(codec, distribution.probabilities, epsilon, channel, cost)
        thresholds, aliases = channel_kernel.alias_tables(found.weights)
        return LevelMechanism(channel=found, thresholds=thresholds, aliases=aliases)
    if channel == "optimal-unbiased":
        costs.level_values(codec)  # refuses
    if channel == "optimal":
        return _bin(codec, distribution, epsilon, cost)
    try:
        noise = rank_kernel.rank_noise(epsilon)
    except ValueError as error:
        raise SpecError(
            str(error), f"column {codec.name!r}", "lower `epsilon`, or share it among more columns"
        ) from None
    thresholds, aliases = rank_kernel.digit_tables(noise)
    return RankMechanism(
        noise=noise, distribution=distribution, thresholds=thresholds, aliases=aliases
    )


def _level_channel(
    codec: LevelCodec,
    probabilities: NDArray[np.float64],
    epsilon: float,
    channel: ChannelKind,
    cost: Cost | None,
) -> LevelChannel:
    if channel == "laplace":
        return laplace(probabilities, epsilon, ordered=codec.ordered)
    if channel == "laplace-calibrated":
        return calibrate(probabilities, epsilon, ordered=codec.ordered)
    try:
        if channel == "optimal-unbiased":
            return optimal_unbiased(probabilities, epsilon, costs.level_values(codec))
        matrix = costs.level_cost(
            codec, probabilities, cost or ("value" if codec.ordered else "zero-one")
        )
        return optimal(probabilities, epsilon, matrix, ordered=codec.ordered)
    except SpecError as error:
        raise error.at(f"column {codec.name!r}") from None


def _bin(
    codec: Codec, distribution: RankDistribution, epsilon: float, cost: Cost | None
) -> BinMechanism:
    costs.check_cost(codec, cost or "rank")
    edges = bins_kernel.bin_edges(distribution.x, distribution.c, N_BINS)
    masses = np.diff(edges)
    try:
        channel = optimal(masses, epsilon, costs.compute_rank(masses))
    except SpecError as error:
        raise error.at(f"column {codec.name!r}") from None
    thresholds, aliases = channel_kernel.alias_tables(channel.weights)
    return BinMechanism(
        channel=channel,
        edges=edges,
        distribution=distribution,
        thresholds=thresholds,
        aliases=aliases,
    )
