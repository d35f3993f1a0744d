"""Distribution-invariant privatisation, column by column: how each column is randomised, and the release of them all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, field
from functools import lru_cache
from typing import Any, ClassVar, Self, get_args

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Archived, Contents, Json, Named
from dpdask.arrays import Flags, Floats, Int32s, Ints, Shorts, Words, freeze_class
from dpdask.channels import (
    LevelChannel,
    WindowChannel,
    calibrate,
    check_cost,
    check_values,
    compute_rank,
    has_window,
    keep_most,
    laplace,
    level_cost,
    level_values,
    measure_attenuation,
    optimal,
    optimal_unbiased,
    window_epsilon,
)
from dpdask.codec import Codec, Codecs
from dpdask.domains import MAX_LISTED
from dpdask.errors import SpecError, list_names
from dpdask.kernels import chain as chain_kernel
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import rank as bins_kernel
from dpdask.kernels import rank as rank_kernel
from dpdask.kernels import window as window_kernel
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
from dpdask.privacy.audit import channel_epsilon, rank_epsilon
from dpdask.references import Distribution, LevelDistribution, RankDistribution
from dpdask.references.histogram import NoisyHistograms
from dpdask.references.reference import ColumnCounts
from dpdask.schema import Column
from dpdask.stats.statistic import encode
from dpdask.streams import Noise, Rng, RunKey, words

_AT_BOUND = 0.01  # of the range: what is next to a bound
_MANY_AT_BOUND = 0.25  # of the values: more of them there are doubtful
_MANY_IN_CELL = 0.4
_SHARES, _OF_LEVELS = ("epsilon", "kept", "kept_at_most"), ("apart", "stays", "masses")
_LOST = 1e-9  # shares are solved for, so that of a level without a row is 0 up to rounding


@freeze_class(eq=False)
class _ByChannel:
    """A channel and the exact tables that it is drawn from."""

    channel: LevelChannel
    tables: channel_kernel.Tables = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", channel_kernel.make_tables(self.channel.weights))

    @property
    def epsilon(self) -> float:
        """ε*, exact: what follows the channel does not look at the value any more."""
        return self.channel.epsilon

    @property
    def exact_epsilon(self) -> float:
        """ε*, computed again from the tables."""
        return channel_epsilon(self.channel.weights)

    def sample(self, codes: Int32s, drawn: Words) -> Shorts:
        """Return a released code for each code."""
        root = np.zeros(len(codes), dtype=np.uint16)
        return channel_kernel.sample(root, codes, np.ascontiguousarray(drawn), 0, self.tables)


@freeze_class(eq=False)
class _ByNoise:
    """Discrete Laplace noise on ranks, and the exact tables of its digits."""

    noise: rank_kernel.RankNoise
    tables: rank_kernel.Tables = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", channel_kernel.alias_tables(self.noise.weights))

    @property
    def epsilon(self) -> float:
        """An upper bound on ε*."""
        return self.noise.epsilon

    @property
    def exact_epsilon(self) -> float:
        """ε*, computed again from the tables."""
        return rank_epsilon(self.noise)

    @property
    def n_words(self) -> int:
        """How many words a row consumes; in a chain the first one places it among its ties."""
        return rank_kernel.words_per_row(self.noise)

    @property
    def shown_noise(self) -> Json:
        """What a card shows of the noise."""
        return {"ranks": self.noise.n_cells, "alpha_log": -self.noise.rate}


@freeze_class(eq=False)
class LevelMechanism(_ByChannel):
    """A level column's channel."""

    kind: ClassVar = "levels"
    n_words: ClassVar = 1
    distribution: ClassVar = None

    def randomise(self, codec: Any, array: pa.Array, rng: Rng) -> pa.Array:
        """Return a released value for each value of `array`; consumes `n_words` words a row."""
        codes = encode(codec, array)
        return codec.decode(self.sample(codes, words(rng, len(codes))))

    @property
    def shown(self) -> Json:
        """What a card shows of it."""
        return {"channel": self.channel.matrix.tolist()}

    def describe_kept(self, column: Column) -> str:
        """Return how many levels stay as they are."""
        shares = _solve_shares(self.channel)
        matrix = self.channel.matrix
        kept, chance = (
            f"{100 * float(part):.3g} %" for part in (shares @ np.diag(matrix), shares @ shares)
        )
        levels = [str(level) for level in column.listed]
        levels = ["null"] * (len(shares) - len(levels)) + levels
        lost = [level for level, share in zip(levels, shares, strict=True) if share < _LOST]
        if not lost:
            return f"is unchanged in {kept} of the rows ({chance} by chance)"
        # the table may have many rows there, and the shares do not tell
        few = f"no row is released as {list_names(lost, 5)}, which the reference lacks"
        return f"is unchanged in at most {kept} of the rows ({chance} by chance): {few}"


@freeze_class(eq=False)
class WindowMechanism:
    """The channel of a column of very many levels, and the tables that it is drawn from."""

    channel: WindowChannel
    tables: rank_kernel.Tables = field(init=False)

    kind: ClassVar = "window"
    n_words: ClassVar = 3
    distribution: ClassVar = None

    def __post_init__(self) -> None:
        apart = self.channel.window.apart[None, :]
        object.__setattr__(self, "tables", channel_kernel.alias_tables(apart))

    @property
    def epsilon(self) -> float:
        """An upper bound on ε*."""
        return self.channel.epsilon

    @property
    def exact_epsilon(self) -> float:
        """The bound, computed again from the whole numbers."""
        return window_epsilon(self.channel.window)

    def randomise(self, codec: Any, array: pa.Array, rng: Rng) -> pa.Array:
        """Return a released value for each value of `array`; consumes `n_words` words a row."""
        codes, window = encode(codec, array), self.channel.window
        drawn = words(rng, len(codes), self.n_words)
        released = window_kernel.sample(
            codes,
            drawn,
            np.uint64(window.chance),
            *self.tables,
            window.stays,
            window.masses,
            window.bits,
        )
        return codec.decode(released)

    @property
    def shown(self) -> Json:
        """What a card shows of it: its numbers, from which every probability follows."""
        window, total = self.channel.window, float(window_kernel.TOTAL)
        circle = int(window.masses.sum())
        return {
            "window": {
                "kept": self.channel.kept,
                "kept_at_most": self.channel.kept_at_most,
                "chance": window.chance / window_kernel.TOTAL,
                "apart": (window.apart / total).tolist(),
                "stays": (window.stays / total).tolist(),
                "circle": (window.masses / circle).tolist(),
                "width": (1 << window.bits) / circle,
            }
        }

    def describe_kept(self, column: Column) -> str:
        """Return how many levels stay as they are."""
        kept, most = (
            f"{100 * part:.3g} %" for part in (self.channel.kept, self.channel.kept_at_most)
        )
        n_lost = int((self.channel.window.apart == 0).sum())
        lost = f"; {n_lost:,} of its levels are never released, which the reference lacks"
        return (
            f"is unchanged in {kept} of the rows (no channel of this ε keeps more than {most})"
            + (lost if n_lost else "")
        )


class _OfNumbers:
    """What randomises a continuous or mixed column: its numbers, and where they are null."""

    __slots__ = ()

    def randomise(self: Any, codec: Any, array: pa.Array, rng: Rng) -> pa.Array:
        """Return a released value for each value of `array`; consumes `n_words` words a row."""
        values, is_null = codec.encode(array)
        drawn = words(rng, len(values), self.n_words)
        return codec.decode(*self.draw(values, is_null, drawn, lattice=codec.lattice))


@freeze_class(eq=False)
class RankMechanism(_ByNoise, _OfNumbers):
    """Noise on the ranks of a continuous or mixed column, which are read in its reference's cdf."""

    distribution: RankDistribution

    kind: ClassVar = "ranks"

    def draw(
        self, values: Floats, is_null: Flags, drawn: Words, *, lattice: bool
    ) -> tuple[Floats, Flags]:
        """Return released numbers, and where they are null."""
        x, c = self.distribution.x, self.distribution.c
        return rank_kernel.privatise(
            values, is_null, drawn, x, c, self.noise, self.tables, lattice=lattice
        )

    @property
    def shown(self) -> Json:
        """What a card shows of it."""
        return _show(self.distribution) | self.shown_noise

    def describe_kept(self, column: Column) -> str:
        """Return the correlation of the ranks before and after."""
        return f"keeps a correlation of ranks of {correlate_ranks(self.epsilon):.2f}"


@freeze_class(eq=False)
class BinMechanism(_ByChannel, _OfNumbers):
    """A channel on bins of a column's ranks: null, each atom, and even slices of the ranks between.

    Inside its bin a released value follows the reference.
    """

    edges: Floats  # in ranks
    distribution: RankDistribution

    kind: ClassVar = "bins"
    n_words: ClassVar = 3

    def draw(
        self, values: Floats, is_null: Flags, drawn: Words, *, lattice: bool
    ) -> tuple[Floats, Flags]:
        """Return released numbers, and where they are null."""
        x, c, edges = self.distribution.x, self.distribution.c, self.edges
        ties = np.ascontiguousarray(drawn[:, 0])
        cells = bins_kernel.cells_of(values, is_null, ties, x, c, edges, lattice=lattice)
        released = self.sample(cells, drawn[:, 1])
        return bins_kernel.draw_values(released, drawn[:, 2], x, c, edges, lattice=lattice)

    @property
    def shown(self) -> Json:
        """What a card shows of it."""
        matrix = self.channel.matrix.tolist()
        return _show(self.distribution) | {"rank_edges": self.edges.tolist(), "channel": matrix}

    def describe_kept(self, column: Column) -> str:
        """Return the correlation of the bins' ranks before and after."""
        shares = _solve_shares(self.channel)
        place = np.cumsum(shares) - shares / 2.0 - 0.5
        spread = max(float((shares * place) @ place), 1e-300)
        kept = float((shares * place) @ self.channel.matrix @ place / spread)
        return f"keeps a correlation of ranks of {kept:.2f}"


ColumnMechanism = LevelMechanism | WindowMechanism | RankMechanism | BinMechanism


def _show(reference: RankDistribution) -> Json:
    error = max(2.0**-15, reference.rank_error)
    return {"reference": {"knots_at_most": 2**16, "rank_error_at_most": error, **reference.support}}


def _solve_shares(channel: LevelChannel) -> Floats:
    """Return the distribution that the channel keeps."""
    matrix = channel.matrix
    n = len(matrix)
    equations = np.vstack([matrix.T - np.eye(n), np.ones(n)])
    return np.linalg.lstsq(equations, np.append(np.zeros(n), 1.0), rcond=None)[0]


def doubt_bounds(reference: RankDistribution | None) -> list[str]:
    """Return what a released distribution of numbers has that wrong bounds would explain."""
    if reference is None:
        return []
    x, c = reference.x, reference.c
    values = max(1.0 - c[0], 1e-300)
    at_end = (1.0 - float(np.interp(x[-1] - _AT_BOUND * (x[-1] - x[0]), x, c))) / values
    if at_end >= _MANY_AT_BOUND:
        where = "at its upper bound or next to it: check that it is not too low"
        return [f"has {100 * at_end:.0f} % of its values {where}"]
    # a cell of whole numbers may hold one of them, such as 0
    wide = reference.rank_error if reference.support else 1.0
    widest = min(wide, float(np.diff(c)[np.diff(x) > 0.0].max(initial=0.0))) / values
    if widest >= _MANY_IN_CELL:
        where = "in one cell of the reference, over which they are spread evenly"
        check = "check that its bounds are not too wide"
        return [f"has {100 * widest:.0f} % of its values {where}: {check}"]
    return []


def fit_column(
    codec: Codec,
    distribution: Distribution,
    epsilon: float,
    channel: ChannelKind,
    cost: Cost | None = None,
) -> ColumnMechanism:
    """Return the randomiser that spends a column's ε; see `fit_dip`."""
    where = f"column {codec.name!r}"
    if isinstance(distribution, LevelDistribution):
        assert codec.has_levels
        shares, ordered = distribution.probabilities, codec.ordered
        if channel in ("laplace", "laplace-calibrated"):
            make = laplace if channel == "laplace" else calibrate
            return LevelMechanism(channel=make(shares, epsilon, ordered=ordered))
        try:
            if channel == "optimal-unbiased":
                found = optimal_unbiased(shares, epsilon, level_values(codec))
            else:
                cost = cost or ("value" if ordered else "zero-one")
                if has_window(codec.n_levels, int((shares > channel_kernel.UNSEEN).sum()), cost):
                    return WindowMechanism(channel=keep_most(shares, epsilon))
                wanted = level_cost(codec, shares, cost)
                found = optimal(shares, epsilon, wanted, ordered=ordered)
        except SpecError as error:
            raise error.at(where) from None
        return LevelMechanism(channel=found)
    if channel == "optimal-unbiased":
        level_values(codec)  # refuses
    if channel != "optimal":
        try:
            noise = rank_kernel.rank_noise(epsilon)
        except ValueError as error:
            mend = "lower `epsilon`, or share it among more columns"
            raise SpecError(str(error), where, mend) from None
        return RankMechanism(noise=noise, distribution=distribution)
    check_cost(codec, cost or "rank")
    edges = bins_kernel.bin_edges(distribution.x, distribution.c, N_BINS)
    masses = np.diff(edges)
    try:
        found = optimal(masses, epsilon, compute_rank(masses))
    except SpecError as error:
        raise error.at(where) from None
    return BinMechanism(channel=found, edges=edges, distribution=distribution)


# ---- in a chain: uniform ranks stay uniform


@freeze_class(eq=False)
class LaplaceRanks(_ByNoise):
    """Noise on the ranks of a column given the columns before it."""

    @property
    def shown(self) -> Json:
        """What a card shows of it."""
        return self.shown_noise

    def release(
        self,
        values: Floats,
        own: Ints,
        released: Ints,
        drawn: Words,
        trie: chain_kernel.Trie,
        slots: chain_kernel.Slots,
        *,
        lattice: bool,
    ) -> None:
        """Replace values by released ones; see `kernels.chain.release_rows`."""
        draws = rank_kernel.make_draws(self.noise, self.tables)
        chain_kernel.release_rows(values, own, released, drawn, draws, trie, slots, lattice)


@freeze_class(eq=False)
class BinnedRanks(_ByChannel):
    """A channel on even bins of ranks; inside its bin a released rank is uniform."""

    n_words: ClassVar = 3  # the first one places a row among its ties

    @property
    def shown(self) -> Json:
        """What a card shows of it."""
        matrix = self.channel.matrix.tolist()
        return {"rank_bins": len(matrix), "rank_channel": matrix}

    def release(
        self,
        values: Floats,
        own: Ints,
        released: Ints,
        drawn: Words,
        trie: chain_kernel.Trie,
        slots: chain_kernel.Slots,
        *,
        lattice: bool,
    ) -> None:
        """Replace values by released ones; see `LaplaceRanks.release`."""
        ranks = np.empty(len(values))
        chain_kernel.find_ranks(values, own, drawn[:, 0], trie, ranks)
        n_bins = len(self.channel.weights)
        bins = self.sample(np.minimum((ranks * n_bins).astype(np.int32), n_bins - 1), drawn[:, 1])
        place = ((drawn[:, 2] >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        ranks = (bins + place) / n_bins
        chain_kernel.find_values(ranks, released, trie, slots, lattice, values)


RankRandomiser = LaplaceRanks | BinnedRanks


def fit_ranks(epsilons: Mapping[str, float], channel: ChannelKind) -> dict[str, RankRandomiser]:
    """Return how the ranks of each column are randomised, whatever the reference is.

    Raises
    ------
    SpecError
        If ε is above what the tables can resolve.
    """
    found = {}
    for name, epsilon in epsilons.items():
        try:
            found[name] = _randomise_ranks(epsilon, optimally=channel == "optimal")
        except ValueError as error:
            mend = "change `epsilon`, or its division by `weights`"
            raise SpecError(str(error), f"column {name!r}", mend) from None
    return found


@lru_cache(maxsize=64)  # follows from ε alone, so it may stay when a run forgets its rows
def _randomise_ranks(epsilon: float, *, optimally: bool) -> RankRandomiser:
    if not optimally:
        return LaplaceRanks(noise=rank_kernel.rank_noise(epsilon))
    masses = np.full(N_BINS, 1.0 / N_BINS)
    return BinnedRanks(channel=optimal(masses, epsilon, compute_rank(masses)))


# ---- in an archive


def write_randomisers(
    columns: Mapping[str, ColumnMechanism | RankRandomiser],
) -> tuple[list[Json], Json]:
    """Return the columns' parts of an archive's header, and its arrays; in a chain they have no kind."""
    header: list[Json] = []
    arrays: Json = {}
    for index, (name, each) in enumerate(columns.items()):
        column: Json = {"name": name}
        if isinstance(each, RankMechanism | BinMechanism):
            reference = each.distribution
            column |= {"rank_error": reference.rank_error, "kept": dict(reference.support)}
            arrays |= {f"{index}_x": reference.x, f"{index}_c": reference.c}
        if isinstance(each, ColumnMechanism):
            column["kind"] = each.kind
        if isinstance(each, WindowMechanism):
            channel, window = each.channel, each.channel.window
            column |= {name: getattr(channel, name) for name in _SHARES}
            column |= {"chance": window.chance, "bits": window.bits}
            arrays |= {f"{index}_{name}": getattr(window, name) for name in _OF_LEVELS}
        elif isinstance(each, _ByNoise):
            column["noise"] = each.noise.scalars
            arrays[f"{index}_weights"] = each.noise.weights
        else:
            column["epsilon"] = each.epsilon
            arrays[f"{index}_weights"] = each.channel.weights
        if isinstance(each, BinMechanism):
            arrays[f"{index}_edges"] = each.edges
        header.append(column)
    return header, arrays


def read_randomisers(columns: Sequence[Named], arrays: Named) -> Json:
    """Return the randomiser of each column from what `write_randomisers` returned."""
    found: Json = {}
    for index, column in enumerate(columns):
        kind, weights = column.get("kind"), f"{index}_weights"
        parts: Json = {}
        if kind == "window":
            own = {name: arrays[f"{index}_{name}"] for name in _OF_LEVELS}
            window = window_kernel.RankWindow(chance=column["chance"], bits=column["bits"], **own)
            shares = {name: column[name] for name in _SHARES}
            parts["channel"] = WindowChannel(window=window, **shares)
        elif "noise" in column:
            parts["noise"] = rank_kernel.RankNoise(weights=arrays[weights], **column["noise"])
        else:
            parts["channel"] = LevelChannel(weights=arrays[weights], epsilon=column["epsilon"])
        if kind in ("ranks", "bins"):
            knots = arrays[f"{index}_x"], arrays[f"{index}_c"]
            parts["distribution"] = RankDistribution(*knots, column["rank_error"], column["kept"])
        if kind == "bins":
            parts["edges"] = arrays[f"{index}_edges"]
        kinds: dict[Any, Any] = {
            None: LaplaceRanks if "noise" in column else BinnedRanks,
            **{each.kind: each for each in get_args(ColumnMechanism)},
        }
        found[column["name"]] = kinds[kind](**parts)
    return found


_N_KNOTS = 2**10
_N_TOLD = 256  # even ranks at which a card tells a reference


@freeze_class(eq=False)
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

    archive: ClassVar = Archive(kind="dip-columns", format=2, noun="fitted DIP release")
    mechanism_id: ClassVar = "dip"

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
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        return cls(columns=read_randomisers(header["columns"], arrays))


@freeze_class
class ColumnsMechanism(DipMechanism):
    """Distribution-invariant privatisation with a reference for each column."""

    release_type: ClassVar = DipRelease
    most_levels: ClassVar = MAX_LISTED

    def check(self, columns: Columns) -> None:
        """Check the declared distributions, the bins and the costs against the columns; see `Mechanism.check`."""
        self.reference.cells(columns.codecs)
        self.reference.check_codecs(columns.codecs)
        if self.spec.channel == "optimal-unbiased":
            self._check_means(columns)
        for name, cost in (self.spec.cost or {}).items():
            check_cost(columns.codecs[name], cost)

    def _check_means(self, columns: Columns) -> None:
        """Check what decides about means and is public: the levels, and a declared distribution."""
        for name, codec in columns.codecs.items():
            try:
                check_values(level_values(codec))
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
        self.reference.check_counts(counts)

    def draw(self, counts: ColumnCounts, columns: Columns, noise: Noise) -> Archived | None:
        """Draw the noise of the histograms, if the reference is one; see `Mechanism.draw`."""
        return self.reference.draw(counts, columns.codecs, self.measurements, noise)

    def read_drawn(self, data: bytes, columns: Columns) -> NoisyHistograms:
        """Return the noisy histograms that an earlier driver kept; see `Mechanism.read_drawn`."""
        found = NoisyHistograms.from_bytes(data, "the run's noisy histograms")
        found.check(self.measurements, self.reference.sizes(columns.codecs))
        return found

    def list_counts(self, drawn: NoisyHistograms, columns: Columns) -> Iterable[pa.Table]:
        """Return the noisy histograms as they are published; see `Mechanism.list_counts`."""
        return self.reference.list_counts(drawn, columns.codecs)

    def fit(self, counts: Any, columns: Columns, key: RunKey) -> DipRelease:
        """Return the fitted release; see `Mechanism.fit`."""
        return self._fit(self.reference.distributions(counts, columns.codecs), columns.codecs)

    def _fit(self, references: Mapping[str, Distribution], codecs: Codecs) -> DipRelease:
        spec = self.spec
        return fit_dip(references, codecs, self.spending.row, spec.channel, spec.cost)

    def audit(self, columns: Columns, card: Named | None) -> dict[str, Json]:
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


@freeze_class(kw_only=False)
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
        return {"columns": "independent", "joint": self.mechanism.reference.joint}

    def describe_columns(self, release: DipRelease, columns: Columns) -> dict[str, Json]:
        """Return what the card says about each fitted column; see `DipMechanism.describe_columns`.

        With the channel optimal-unbiased, `attenuation` gives c, m and the bound on the bias
        (`channels.Attenuation`): all three are functions of the channel and the public levels,
        which stand beside them. It is absent where the reference leaves nothing of the mean, as
        with a single level.

        Privacy
        -------
        Points of a reference of numbers are told unless it is a hold-out, of which they are rows'
        values: they are declared, those of a public table, or functions of counts that were paid.
        """
        found = DipDescription.describe_columns(self, release, columns)
        for name, mechanism in release.columns.items():
            if mechanism.distribution is None:
                continue
            if self.mechanism.spreads:
                x, c = mechanism.distribution.x, mechanism.distribution.c
                spread = measure_spread(x[1:], x[:-1], np.diff(c), codec=columns.codecs[name])
                found[name]["reference"] |= {"spread_rank_at_most": spread}
            if not self.mechanism.reference.uncovered:
                lattice = columns.codecs[name].lattice
                found[name]["reference"] |= _list_points(mechanism.distribution, lattice)
        if self.mechanism.spec.channel == "optimal-unbiased":
            for name, mechanism in release.columns.items():
                assert isinstance(mechanism, LevelMechanism)
                line = measure_attenuation(
                    mechanism.channel.weights, level_values(columns.codecs[name])
                )
                found[name] |= {} if line is None else {"attenuation": asdict(line)}
        return found


def measure_spread(keys: Floats, lows: Floats, shares: Floats, *, codec: Codec) -> float:
    """Return the largest share of the reference's rows at one value that is released spread over the gap (low, key] below it, rounded up."""
    with np.errstate(invalid="ignore"):
        wide = keys - lows > (1.0 if codec.lattice else 0.0)  # a null has no gap
    largest = float(shares[wide].max(initial=0.0))
    return float(f"{largest * 1.01:.2g}") if largest else 0.0


def _list_points(distribution: RankDistribution, lattice: bool) -> Json:
    """Return knots of a reference's distribution function, from which its noise is a known channel: about evenly, and the ends of wide pieces."""
    x, c = distribution.x, distribution.c
    chosen = np.minimum(np.searchsorted(c, np.arange(_N_TOLD + 1) / _N_TOLD), len(c) - 1)
    wide = np.flatnonzero(np.diff(c) > 1.0 / _N_TOLD)
    chosen = np.unique(np.concatenate([[0, len(c) - 1], chosen, wide, wide + 1]))
    return {"values": x[chosen].tolist(), "ranks": c[chosen].tolist(), "whole": lattice}


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
