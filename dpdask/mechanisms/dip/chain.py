"""Distribution-invariant privatisation of several columns at once: each rank is randomised, and the joint distribution is preserved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar, Self, cast

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Contents, Json, Named
from dpdask.arrays import Ints, Words, freeze_class
from dpdask.codec import Codecs
from dpdask.errors import DataError, SpecError
from dpdask.kernels import chain as kernel
from dpdask.mechanisms.dip.columns import (
    RankRandomiser,
    fit_ranks,
    measure_spread,
    read_randomisers,
    write_randomisers,
)
from dpdask.mechanisms.dip.spec import ChannelKind, DipDescription, DipMechanism
from dpdask.mechanisms.expectations import warn_of_spread
from dpdask.mechanisms.mechanism import Columns, RandomisedRows
from dpdask.references import Chain
from dpdask.stats.records import Records, from_numbers, group_hashes, group_key, numbers
from dpdask.streams import Rng, RunKey, words

_TOGETHER = 2**15  # rows whose words are drawn at once: they stay near the processor


# no repr: the key and the trie are secret
@freeze_class(eq=False, repr=False)
class Groups:
    """Which groups have a reference of their own."""

    column: str  # the kept column whose value names a row's group
    key: Words  # uint64 array of shape (2,), of the groups' hashes
    # Uint64 array, increasing: the groups with a reference of their own, in the order of the trie's
    # roots after the first, which is the pooled one.
    hashes: Words
    # Which shares of the groups that the reference saw, and of its rows, have none.
    pooled_groups: float
    pooled_rows: float

    def roots(self, array: pa.Array) -> Ints:
        """Return the root that each row is released by."""
        return kernel.find_roots(group_hashes(self.column, array, self.key), self.hashes)


@freeze_class(eq=False, repr=False)
class ChainRelease(RandomisedRows):
    """A fitted release of several columns by the chain of their conditional distributions.

    Privacy
    -------
    Unit: a row. Adjacency: replace-one. Protected: the values of the rows that are randomised,
    given a reference that does not depend on them. Row-level noise, so there is no sensitivity:
    each column's noisy rank is an ε-private function of the row whatever the rank was computed
    from, and all that follows is post-processing, so ε of a row is the sum of its columns' ε*.
    Event: one local release of every row. Not protected: the reference records. Every released row
    follows one of them: levels and atoms exactly, other values up to the gap to their neighbours.

    Notes
    -----
    Column l's rank is taken given the row's own values of columns 0..l-1, and the noisy rank, which
    is uniform again, is read given the released ones (Rosenblatt's transformation both ways). The
    released row then follows the reference, whatever the order of the columns. To read both given
    the released prefix, as (2) can be taken, would not (docs/explanation/math.md, Chain).

    References
    ----------
    Bi and Shen, Distribution-invariant differential privacy, (2) and (10).
    """

    archive: ClassVar = Archive(kind="dip-chain", format=2, noun="fitted chain")
    mechanism_id: ClassVar = "dip/chain"

    # How the ranks of each column are randomised, in the order of their release.
    columns: Mapping[str, RankRandomiser]
    trie: kernel.Trie
    groups: Groups | None  # which groups have a reference of their own, or None
    least_grade: int  # the reference is a keyed sample of 2**-least_grade of its rows
    # Where a rank is looked for in the trie; follows from it.
    slots: kernel.Slots = field(init=False)

    def __post_init__(self) -> None:
        """Find the slots."""
        object.__setattr__(self, "slots", kernel.find_slots(self.trie))

    def randomise(
        self, batch: pa.RecordBatch, codecs: Codecs, rngs: Mapping[str, Rng]
    ) -> pa.RecordBatch:
        """Return the batch with every privatised column randomised and the others untouched; see `RowRelease.randomise`."""
        groups, n_rows, arrays = self.groups, batch.num_rows, list(batch.columns)
        own = np.zeros(n_rows, dtype=np.int64)
        if groups is not None:
            own = groups.roots(batch.column(groups.column))
        released = own.copy()
        for name, mechanism in self.columns.items():
            position, codec = batch.schema.get_field_index(name), codecs[name]
            values = numbers(codec, arrays[position])
            lattice = codec.lattice
            for start in range(0, n_rows, _TOGETHER):
                rows = slice(start, min(start + _TOGETHER, n_rows))
                drawn = words(rngs[name], rows.stop - start, mechanism.n_words)
                parts = values[rows], own[rows], released[rows], drawn
                mechanism.release(*parts, self.trie, self.slots, lattice=lattice)
            arrays[position] = from_numbers(codec, values)
        return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)

    def _contents(self) -> Contents:
        """Return what the bytes hold.

        Privacy
        -------
        Holds the reference's records (for a hold-out: hold-out rows) and the key of the groups'
        hashes. It is kept beside the run key, never published.
        """
        columns, arrays = write_randomisers(self.columns)
        arrays = self.trie._asdict() | arrays
        groups = None
        if self.groups is not None:
            public = ("column", "pooled_groups", "pooled_rows")
            groups = {key: getattr(self.groups, key) for key in public}
            arrays |= {"group_key": self.groups.key, "group_hashes": self.groups.hashes}
        return {"least_grade": self.least_grade, "columns": columns, "groups": groups}, arrays

    @classmethod
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        groups = header["groups"]
        if groups is not None:
            groups = Groups(**groups, key=arrays["group_key"], hashes=arrays["group_hashes"])
        return cls(
            columns=read_randomisers(header["columns"], arrays),
            trie=kernel.Trie(**{name: arrays[name] for name in kernel.Trie._fields}),
            groups=groups,
            least_grade=header["least_grade"],
        )


def fit_chain(
    records: Records,
    codecs: Codecs,
    epsilons: Mapping[str, float],
    channel: ChannelKind = "laplace",
    *,
    order: tuple[str, ...],
    by: str | None = None,
    group_key: Words | None = None,
    min_rows: int = 2,
) -> ChainRelease:
    """Return the release that spends each column's ε on its rank given the columns before it.

    Parameters
    ----------
    records
        The reference's, at least two; their keys are the groups' hashes, where there are groups,
        and then the columns in the codecs' order (`stats.records.numbers`).
    channel
        `laplace` and `laplace-calibrated`: discrete Laplace noise on ranks, which spends all of ε.
        `optimal`: the invariant ε-private channel of least expected squared change of rank, on even
        bins of ranks.
    by, group_key, min_rows
        The groups' column, the key of their hashes, and how many reference rows a group needs for a
        reference of its own.
    """
    mechanisms = fit_ranks({name: epsilons[name] for name in order}, channel)
    places = {name: place + (by is not None) for place, name in enumerate(codecs)}
    columns, grids = [], []
    for name in order:
        column = np.ascontiguousarray(records.keys[:, places[name]]).view(np.float64)
        columns.append(column)
        codec, grid = codecs[name], None
        if not codec.has_levels:
            low, step = codec.bounds[0] if codec.bounds else None, 1.0 if codec.lattice else None
            grid = kernel.grid(column, np.array(codec.atoms), low, step)
        grids.append(grid)
    groups, own = None, np.zeros(len(records.counts), dtype=np.int64)
    if by is not None:
        assert group_key is not None
        groups, own = _groups(records, by, group_key, min_rows)
    trie = kernel.build(columns, records.counts, own, grids)
    return ChainRelease(columns=mechanisms, trie=trie, groups=groups, least_grade=records.least)


def _groups(records: Records, by: str, key: Words, min_rows: int) -> tuple[Groups, Ints]:
    """Return the groups, and for each record the number of its group, counted from 1, or 0 where it has none."""
    hashed = np.ascontiguousarray(records.keys[:, 0])
    # records of one group often stand together: fewer are sorted
    first = np.flatnonzero(np.diff(hashed, prepend=~hashed[:1]))
    hashes, numbers = np.unique(hashed[first], return_inverse=True)
    sizes = np.bincount(numbers, weights=np.add.reduceat(records.counts, first))
    large = sizes >= min_rows
    roots = np.where(large, np.cumsum(large), 0)
    own = np.repeat(roots[numbers], np.diff(first, append=len(hashed)))
    groups = Groups(
        column=by,
        key=key,
        hashes=hashes[large],
        pooled_groups=float(1.0 - large.mean()),
        pooled_rows=float(sizes[~large].sum() / sizes.sum()),
    )
    return groups, own


@freeze_class
class RecordsMechanism(DipMechanism):
    """Distribution-invariant privatisation with a reference of whole records, each column given those before it."""

    release_type: ClassVar = ChainRelease

    @property
    def reference(self) -> Chain:
        """Where the reference records come from."""
        return cast("Chain", self.spec.reference)

    def check_parameters(self) -> None:
        """Check the budget and the reference, and that costs are those of ranks; see `DipMechanism.check_parameters`."""
        DipMechanism.check_parameters(self)
        for name, cost in (self.spec.cost or {}).items():
            if cost != "rank":
                what = "the cost of a column in a chain is always rank"
                raise SpecError(what, f"`cost.{name}`", "remove it")

    def is_by_rank(self, name: str) -> bool:
        """Return True: levels have ranks, too."""
        return name in self.schema.privatised

    def check(self, columns: Columns) -> None:
        """Check that the groups' column holds plain values; see `Mechanism.check`."""
        for name in self.also_read:
            if pa.types.is_nested(columns.types.field(name).type):
                what = "the groups' column must be a kept column of plain values"
                raise SpecError(what, f"`reference.by` {name!r}", "name another, or remove it")

    def check_counts(self, counts: Records, columns: Columns) -> None:
        """Check that there are at least two reference rows; see `Mechanism.check_counts`."""
        if counts.n_rows < 2:
            mend = "enlarge its fraction, or the table it comes from"
            raise DataError("the reference has fewer than 2 rows", "`reference`", mend)

    def fit(self, counts: Records, columns: Columns, key: RunKey) -> ChainRelease:
        """Return the fitted release; see `Mechanism.fit`."""
        reference = self.reference
        return fit_chain(
            counts,
            columns.codecs,
            self.spending.row,
            self.spec.channel,
            order=reference.order_columns(tuple(columns.codecs), key),
            by=reference.by,
            group_key=group_key(key),
            min_rows=reference.min_rows,
        )

    def audit(self, columns: Columns, card: Named | None) -> dict[str, Json]:
        """Return what is claimed and found for the released channels or the ranks; see `Mechanism.audit`."""
        found = fit_ranks(self.spending.row, self.spec.channel)
        source = "ranks, which are randomised alike for every reference"
        return self.audit_card(card) or self.audit_columns(found, source)

    @property
    def description(self) -> RecordsDescription:
        """What is said of it."""
        return RecordsDescription(self)


@freeze_class(kw_only=False)
class RecordsDescription(DipDescription):
    """What is said of rows that are randomised along a chain."""

    mechanism: RecordsMechanism

    def warnings(self, release: ChainRelease, columns: Columns) -> tuple[str, ...]:
        """Return a warning for each column whose rows share values that are released spread; see `Mechanism.warnings`."""
        found: list[str] = []
        for place, name in enumerate(release.columns):
            codec = columns.codecs[name]
            if not codec.has_levels:
                cells = kernel.find_cells(release.trie, place)
                found += warn_of_spread(name, *cells, lattice=codec.lattice)
        return tuple(found)

    def describe_columns(self, release: ChainRelease, columns: Columns) -> dict[str, Json]:
        """Return what the card says about each fitted column; see `DipDescription.describe_columns`."""
        found = DipDescription.describe_columns(self, release, columns)
        for place, name in enumerate(release.columns):
            codec = columns.codecs[name]
            if not codec.has_levels:
                keys, lows, counts = kernel.find_cells(release.trie, place)
                spread = measure_spread(keys, lows, counts / counts.sum(), codec=codec)
                # ranks are exact but for rounding to one of 2**16
                found[name]["reference"] = {
                    "rank_error_at_most": 2.0**-15,
                    "spread_rank_at_most": spread,
                }
        return found

    def describe_joint(self, release: ChainRelease) -> Json:
        """Return what the card says about the columns' joint distribution."""
        reference, groups = self.mechanism.reference, release.groups
        found: Json = {
            "columns": "chain",
            "joint": reference.joint,
            "order": list(release.columns),
            # of the reference's rows: a keyed sample, if their records were too many
            "reference_share": 2.0**-release.least_grade,
        }
        if groups is not None:
            found["by"] = {
                "column": groups.column,
                "min_rows": reference.min_rows,
                "pooled_percent_of_reference_groups": round(100 * groups.pooled_groups),
                "pooled_percent_of_reference_rows": round(100 * groups.pooled_rows),
            }
        return found | {"warnings": list(reference.warnings())}
