"""The fitted release of ranges: each private column becomes two, the ends of its values' ranges, and a third if coverage is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import TypeAdapter

from dpdask.archive import Archive, Archived, Contents
from dpdask.codec import Codec, LevelCodec, ValueCodec, codec_for
from dpdask.errors import SpecError
from dpdask.kernels import cdf as bins_kernel
from dpdask.kernels import channel as channel_kernel
from dpdask.kernels import rank as rank_kernel
from dpdask.mechanisms.dip.columns import (
    BinMechanism,
    ColumnMechanism,
    DipRelease,
    LevelMechanism,
    RankMechanism,
)
from dpdask.mechanisms.interval.design import Design, IntervalDifferential, find_reference
from dpdask.mechanisms.interval.fit import can_inform, fit_perturbation, range_randomiser
from dpdask.mechanisms.interval.ranges import (
    MECHANISM_ID,
    RangeRandomiser,
    compute_released_coverages,
)
from dpdask.privacy.audit import channel_epsilon, rank_epsilon
from dpdask.schema import Column
from dpdask.stats.levels import encode
from dpdask.streams import Rng, RunKey, Stream, stream

Floats = NDArray[np.float64]
Words = NDArray[np.uint64]

_DESIGN: TypeAdapter[Design] = TypeAdapter(Design)


def ends_of(name: str) -> tuple[str, str]:
    """Return the names of the two released columns of a private one."""
    return f"{name}_lower", f"{name}_upper"


def name_released(name: str, *, coverage: bool = False) -> tuple[str, ...]:
    """Return the names of all released columns of a private one."""
    return (*ends_of(name), f"{name}_coverage") if coverage else ends_of(name)


def make_released_schema(
    rows: pa.Schema, private: Sequence[str], *, coverage: bool = False
) -> pa.Schema:
    """Return the released columns: two or three of float64 in the place of each private one, the others as they are."""
    fields: list[pa.Field] = []
    for row in rows:
        fields += (
            [pa.field(made, pa.float64()) for made in name_released(row.name, coverage=coverage)]
            if row.name in private
            else [row]
        )
    return pa.schema(fields)


def is_lattice(codec: Codec) -> bool:
    """Return whether a column's values are whole numbers: integers, dates, times."""
    return not pa.types.is_floating(
        codec.type if isinstance(codec, ValueCodec) else codec.levels.type
    )


def to_numbers(codec: Codec, array: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return a column's values as numbers (0 where null), each exactly, and where they are null."""
    if isinstance(codec, ValueCodec):
        return codec.encode(array)
    levels, is_null = _line(codec).encode(codec.levels)
    codes = encode(codec, array)
    return levels[codes], is_null[codes] if codec.levels.null_count else np.zeros(
        len(codes), dtype=np.bool_
    )


def _line(codec: LevelCodec) -> ValueCodec:
    """Return the codec of a discrete column's levels as numbers."""
    made = codec_for(
        codec.name, Column(role="privatise", kind="continuous", nulls="level"), codec.levels.type
    )
    assert isinstance(made, ValueCodec)
    return made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LevelPerturbation:
    """A level column's channel as a `Perturbation`.

    Privacy
    -------
    Unit: a value, a level. Adjacency: replace-one. ε* is exact: the numbers are the levels, one by
    one, so the distribution of the perturbed number is the channel's row. Event: one local release.
    """

    mechanism: LevelMechanism
    levels: Floats  # float64 array of shape (n_levels,), strictly increasing: the levels as numbers

    words_per_row: ClassVar[int] = 1

    @property
    def epsilon(self) -> float:
        """ε*, exact."""
        return self.mechanism.epsilon

    @property
    def exact_epsilon(self) -> float:
        """ε*, computed again from the tables."""
        return channel_epsilon(self.mechanism.channel.weights)

    def perturb(self, values: Floats, words: Words) -> Floats:
        """Return a level for each level, and some level for any other number; see `Perturbation.perturb`."""
        codes = np.searchsorted(self.levels, values).astype(np.int32)
        # a null comes as 0, which may lie above every level: its row is drawn like any other, and blanked by the caller
        codes = np.minimum(codes, np.int32(len(self.levels) - 1))
        perturbed: Floats = self.levels[
            channel_kernel.sample(
                codes, words[:, 0], self.mechanism.thresholds, self.mechanism.aliases
            )
        ]
        return perturbed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValuePerturbation:
    """A continuous or mixed column's mechanism as a `Perturbation`.

    Privacy
    -------
    Unit: a value. Adjacency: replace-one. ε*, or a bound on it, is the mechanism's. Event: one
    local release.
    """

    mechanism: RankMechanism | BinMechanism
    lattice: bool

    @property
    def words_per_row(self) -> int:
        """As many as the mechanism takes."""
        return (
            rank_kernel.words_per_row(self.mechanism.noise)
            if isinstance(self.mechanism, RankMechanism)
            else 3
        )

    @property
    def epsilon(self) -> float:
        """An upper bound on ε*; exact for bins."""
        return self.mechanism.epsilon

    @property
    def exact_epsilon(self) -> float:
        """ε*, computed again from the tables."""
        if isinstance(self.mechanism, RankMechanism):
            return rank_epsilon(self.mechanism.noise)
        return channel_epsilon(self.mechanism.channel.weights)

    def perturb(self, values: Floats, words: Words) -> Floats:
        """Return a value for each value (float64, shape (n,)); words are uint64 of shape (n, words_per_row). See `Perturbation.perturb`."""
        x, c = self.mechanism.distribution.x, self.mechanism.distribution.c
        known = np.zeros(len(values), dtype=np.bool_)
        tables = self.mechanism.thresholds, self.mechanism.aliases
        if isinstance(self.mechanism, RankMechanism):
            perturbed, _ = rank_kernel.privatise(
                values, known, words, x, c, self.mechanism.noise, tables, lattice=self.lattice
            )
            return perturbed
        drawn, edges = np.ascontiguousarray(words.T), self.mechanism.edges
        cells = bins_kernel.cells_of(values, known, drawn[0], x, c, edges, lattice=self.lattice)
        perturbed, _ = bins_kernel.draw_values(
            channel_kernel.sample(cells, drawn[1], *tables),
            drawn[2],
            x,
            c,
            edges,
            lattice=self.lattice,
        )
        return perturbed


DipPerturbation = LevelPerturbation | ValuePerturbation


def adapt(mechanism: ColumnMechanism, *, levels: Floats, lattice: bool) -> DipPerturbation:
    """Return a column's fitted mechanism as a perturbation in the column's numbers.

    Parameters
    ----------
    levels
        The numbers of a level column's levels; of no other column.
    """
    if isinstance(mechanism, LevelMechanism):
        return LevelPerturbation(mechanism=mechanism, levels=levels)
    return ValuePerturbation(mechanism=mechanism, lattice=lattice)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntervalRelease(Archived):
    """The interval mechanism of each private column.

    Privacy
    -------
    As `RangeRandomiser`, each column by its own anchors: given all ranges of a row, its private
    values are distributed as before, restricted to their ranges, since no anchor looks at any
    value. There is no ε, but for perturbed columns: a row's ε is the sum of theirs, under
    replace-one, and its event one local release. Anchors and perturbations are a function of the
    run key, the column and the fragment, so a retry repeats them and narrows nothing. A coverage is
    a function of its range and of the design, which is public: it tells nothing that the range does
    not.
    """

    archive: ClassVar[Archive] = Archive(kind="interval", format=3, noun="file of designs")

    designs: Mapping[str, Design]  # by column, as the user wrote them: public
    lattice: Mapping[str, bool]  # whether a column's values are whole numbers
    # What perturbs the values of the columns whose design is interval-differential: fitted to what
    # is declared, so public.
    perturbations: Mapping[str, DipPerturbation] = field(default_factory=dict)
    # Whether each range's coverage under its design's public reference is released beside it.
    coverage: bool = False
    columns: Mapping[str, RangeRandomiser] = field(init=False)

    def __post_init__(self) -> None:
        """Tabulate the distributions once for all batches."""
        made = {
            name: tabulate(
                name, design, lattice=self.lattice[name], perturbation=self.perturbations.get(name)
            )
            for name, design in self.designs.items()
        }
        object.__setattr__(self, "columns", made)

    @classmethod
    def of(
        cls, designs: Mapping[str, Design], codecs: Mapping[str, Codec], *, coverage: bool = False
    ) -> IntervalRelease:
        """Return the release of some columns; every distribution is tabulated and every perturbation fitted, so that whatever is wrong shows."""
        levels = {name: _level_numbers(codec) for name, codec in codecs.items()}
        lattice = {name: is_lattice(codec) for name, codec in codecs.items()}
        perturbations = {
            name: adapt(
                fit_perturbation(design.perturb, codecs[name]),
                levels=levels[name],
                lattice=lattice[name],
            )
            for name, design in designs.items()
            if isinstance(design, IntervalDifferential)
        }
        made = cls(
            designs={name: designs[name] for name in codecs},
            lattice=lattice,
            perturbations=perturbations,
            coverage=coverage,
        )
        for name, mechanism in made.columns.items():
            ends = find_ends(codecs[name])
            if ends is not None and not can_inform(mechanism, *ends):
                what = f"no anchor falls between its least and greatest value ({ends[0]:g} and {ends[1]:g}), so its ranges would carry no information"
                raise SpecError(
                    what, f"column {name!r}", "choose anchors that reach where values are"
                )
        return made

    @property
    def epsilon(self) -> float:
        """An upper bound on the ε that a released row has cost by its perturbed columns; 0 without them."""
        return self._fitted.epsilon

    @property
    def _fitted(self) -> DipRelease:
        return DipRelease(
            columns={
                name: perturbation.mechanism for name, perturbation in self.perturbations.items()
            }
        )

    def types(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written, given the released columns of the table."""
        return make_released_schema(released, list(self.designs), coverage=self.coverage)

    def few_valued(self, codecs: Mapping[str, Codec]) -> list[str]:
        """Return the ends of columns with few whole values: anchors are whole there too."""
        return [
            end
            for name, codec in codecs.items()
            if isinstance(codec, LevelCodec) and is_lattice(codec)
            for end in ends_of(name)
        ]

    def randomise(
        self, batch: pa.RecordBatch, codecs: Mapping[str, Codec], rngs: Mapping[str, Rng]
    ) -> pa.RecordBatch:
        """Return the batch with two columns of ends for each private one, and of coverage if it is released; the others untouched.

        Parameters
        ----------
        rngs
            From `streams`, one per private column; advanced by the rows of the batch.
        """
        mechanisms = self.columns
        arrays: list[pa.Array] = []
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            if name not in mechanisms:
                arrays.append(array)
                continue
            ranges = mechanisms[name].randomise(*to_numbers(codecs[name], array), rngs[name])
            mask = ranges.is_null if ranges.is_null.any() else None
            reference = find_reference(self.designs[name]) if self.coverage else None
            covered = (
                []
                if reference is None
                else [compute_released_coverages(mechanisms[name], ranges, reference)]
            )
            arrays += [pa.array(made, mask=mask) for made in (ranges.lower, ranges.upper, *covered)]
        return pa.RecordBatch.from_arrays(arrays, names=self.types(batch.schema).names)

    def streams(self, key: RunKey, fragment_id: str) -> dict[str, Stream]:
        """Return the random stream of each column on one fragment, at its start."""
        return {name: stream(key, f"{MECHANISM_ID}/{name}", fragment_id) for name in self.designs}

    def _contents(self) -> Contents:
        """Return what the bytes hold: designs and what is fitted to what they declare, so public."""
        columns = [
            {"name": name, "design": _plain(design), "lattice": self.lattice[name]}
            for name, design in self.designs.items()
        ]
        found = {index: self.perturbations.get(name) for index, name in enumerate(self.designs)}
        levels = {
            f"{index}_levels": each.levels
            for index, each in found.items()
            if isinstance(each, LevelPerturbation)
        }
        fitted = np.frombuffer(self._fitted.to_bytes(), dtype=np.uint8)
        return {"columns": columns, "coverage": self.coverage}, {"perturbations": fitted, **levels}

    @classmethod
    def _of_contents(cls, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        lattice = {column["name"]: column["lattice"] for column in header["columns"]}
        levels = {
            column["name"]: arrays.get(f"{index}_levels", np.zeros(0))
            for index, column in enumerate(header["columns"])
        }
        fitted = DipRelease.from_bytes(
            arrays["perturbations"].tobytes(), "the perturbations"
        ).columns
        return cls(
            designs={
                column["name"]: _DESIGN.validate_python(column["design"])
                for column in header["columns"]
            },
            lattice=lattice,
            perturbations={
                name: adapt(mechanism, levels=levels[name], lattice=lattice[name])
                for name, mechanism in fitted.items()
            },
            coverage=header["coverage"],
        )


def _plain(design: Design) -> dict[str, Any]:
    return design.model_dump(mode="python", exclude_none=True)


def write_design(design: Design) -> str:
    """Return a design as JSON: the same text for equal designs."""
    return json.dumps(_plain(design))


def _level_numbers(codec: Codec) -> NDArray[np.float64]:
    """Return the levels of a column as numbers, without null; nothing of a column without levels."""
    return (
        to_numbers(codec, codec.levels.drop_null())[0]
        if isinstance(codec, LevelCodec)
        else np.zeros(0)
    )


def find_ends(codec: Codec) -> tuple[float, float] | None:
    """Return the least and the greatest value of a column's domain, as numbers; None if it has no bounds."""
    if isinstance(codec, ValueCodec):
        return codec.bounds
    levels = _level_numbers(codec)
    return float(levels.min()), float(levels.max())


def tabulate(
    column: str, design: Design, *, lattice: bool, perturbation: DipPerturbation | None = None
) -> RangeRandomiser:
    """Return a column's mechanism; a process that checks a design does not compute its tables again for the release."""
    return _tabulate(column, write_design(design), lattice, perturbation)


@lru_cache(maxsize=128)
def _tabulate(
    column: str, design: str, lattice: bool, perturbation: DipPerturbation | None
) -> RangeRandomiser:
    return range_randomiser(
        column,
        _DESIGN.validate_python(json.loads(design)),
        lattice=lattice,
        perturbation=perturbation,
    )
