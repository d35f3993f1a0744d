"""The fitted release of ranges: each private column becomes two, the ends of its values' ranges, and a third if coverage is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from dpdask.archive import Archive, Contents, Named
from dpdask.arrays import Flags, Floats, Words, freeze_class
from dpdask.codec import Codec, Codecs, codec_for
from dpdask.errors import SpecError
from dpdask.mechanisms.dip.columns import (
    BinMechanism,
    ColumnMechanism,
    DipRelease,
    LevelMechanism,
    RankMechanism,
)
from dpdask.mechanisms.interval.design import Design, IntervalDifferential
from dpdask.mechanisms.interval.fit import can_inform, fit_perturbation, range_randomiser
from dpdask.mechanisms.interval.ranges import RangeRandomiser, compute_released_coverages
from dpdask.mechanisms.mechanism import RandomisedRows
from dpdask.privacy.events import round_up_sum
from dpdask.scales import is_real
from dpdask.schema import Column
from dpdask.stats.statistic import encode
from dpdask.streams import Rng

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
    """Return whether a column's values are whole numbers: integers, dates, times, units."""
    return codec.lattice or not is_real(codec.type)


def to_numbers(codec: Codec, array: pa.Array) -> tuple[Floats, Flags]:
    """Return a column's values as numbers (0 where null), each exactly, and where they are null.

    Raises
    ------
    DataError
        If a value violates the schema, or is no number that float64 holds.
    """
    if not codec.has_levels:
        return codec.encode(array)
    column = Column(role="privatise", kind="continuous", nulls="level")
    line = codec_for(codec.name, column, codec.levels.type)
    assert not line.has_levels
    levels, is_null = line.encode(codec.levels)
    codes = encode(codec, array)
    return levels[codes], is_null[codes]


@freeze_class(eq=False)
class DipPerturbation:
    """A column's fitted mechanism as a `Perturbation`, in the column's numbers.

    Privacy
    -------
    Unit: a value. Adjacency: replace-one. ε*, or a bound on it, is the mechanism's; of levels it is
    exact, since the numbers are the levels, one by one, and the distribution of the perturbed number
    is the channel's row. Event: one local release.
    """

    mechanism: ColumnMechanism
    """Fitted to a reference without nulls."""
    levels: Floats
    """The levels as numbers, increasing; empty for a column of numbers."""
    lattice: bool

    @property
    def words_per_row(self) -> int:
        """As many as the mechanism takes."""
        return self.mechanism.n_words

    @property
    def epsilon(self) -> float:
        """An upper bound on ε*."""
        return self.mechanism.epsilon

    def perturb(self, values: Floats, words: Words) -> Floats:
        """Return a value for each value; of levels, some level for any other number."""
        if isinstance(self.mechanism, RankMechanism | BinMechanism):
            known = np.zeros(len(values), dtype=np.bool_)
            return self.mechanism.draw(values, known, words, lattice=self.lattice)[0]
        assert isinstance(self.mechanism, LevelMechanism)  # its levels have an order
        codes = np.searchsorted(self.levels, values).astype(np.int32)
        # a null comes as 0, which may lie above every level: its row is drawn like any other, and
        # blanked by the caller
        codes = np.minimum(codes, np.int32(len(self.levels) - 1))
        return self.levels[self.mechanism.sample(codes, words[:, 0])]


@freeze_class(eq=False)
class IntervalRelease(RandomisedRows):
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

    archive: ClassVar = Archive(kind="interval", format=3, noun="file of designs")
    mechanism_id: ClassVar = "interval"

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
            name: tabulate(name, design, self.lattice[name], self.perturbations.get(name))
            for name, design in self.designs.items()
        }
        object.__setattr__(self, "columns", made)

    @classmethod
    def of(
        cls, designs: Mapping[str, Design], codecs: Codecs, *, coverage: bool = False
    ) -> IntervalRelease:
        """Return the release of some columns; every distribution is tabulated and every perturbation fitted, so that whatever is wrong shows."""
        lattice = {name: is_lattice(codec) for name, codec in codecs.items()}
        perturbations = {}
        for name, codec in codecs.items():
            levels, design = _level_numbers(codec), designs[name]
            if isinstance(design, IntervalDifferential):
                mechanism = fit_perturbation(design.perturb, codec)
                perturbations[name] = DipPerturbation(
                    mechanism=mechanism, levels=levels, lattice=lattice[name]
                )
        designs = {name: designs[name] for name in codecs}
        made = cls(designs=designs, lattice=lattice, perturbations=perturbations, coverage=coverage)
        for name, column in made.columns.items():
            ends = find_ends(codecs[name])
            if ends is not None and not can_inform(column, *ends):
                between = f"between its least and greatest value ({ends[0]:g} and {ends[1]:g})"
                what = f"no anchor falls {between}, so its ranges would carry no information"
                mend = "choose anchors that reach where values are"
                raise SpecError(what, f"column {name!r}", mend)
        return made

    @property
    def epsilon(self) -> float:
        """An upper bound on the ε that a released row has cost by its perturbed columns; 0 without them."""
        return round_up_sum(each.epsilon for each in self.perturbations.values())

    def types(self, released: pa.Schema) -> pa.Schema:
        """Return the columns that are written, given the released columns of the table."""
        return make_released_schema(released, list(self.designs), coverage=self.coverage)

    def few_valued(self, codecs: Codecs) -> list[str]:
        """Return the ends of columns with few whole values: anchors are whole there too."""
        return [
            end
            for name, codec in codecs.items()
            if codec.has_levels and is_lattice(codec)
            for end in ends_of(name)
        ]

    def randomise(
        self, batch: pa.RecordBatch, codecs: Codecs, rngs: Mapping[str, Rng]
    ) -> pa.RecordBatch:
        """Return the batch with two columns of ends for each private one, and of coverage if it is released; the others untouched.

        Parameters
        ----------
        rngs
            From `streams`, one per private column; advanced by the rows of the batch.
        """
        arrays: list[pa.Array] = []
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            if name not in self.columns:
                arrays.append(array)
                continue
            mechanism = self.columns[name]
            ranges = mechanism.randomise(*to_numbers(codecs[name], array), rngs[name])
            mask = ranges.is_null if ranges.is_null.any() else None
            released = [ranges.lower, ranges.upper]
            reference = self.designs[name].public_reference if self.coverage else None
            if reference is not None:
                released.append(compute_released_coverages(mechanism, ranges, reference))
            arrays += [pa.array(made, mask=mask) for made in released]
        return pa.RecordBatch.from_arrays(arrays, names=self.types(batch.schema).names)

    def _contents(self) -> Contents:
        """Return what the bytes hold: designs and what is fitted to what they declare, so public."""
        columns, levels = [], {}
        for index, (name, design) in enumerate(self.designs.items()):
            plain = design.model_dump(mode="python", exclude_none=True)
            columns.append({"name": name, "design": plain, "lattice": self.lattice[name]})
            perturbation = self.perturbations.get(name)
            if perturbation is not None and len(perturbation.levels):
                levels[f"{index}_levels"] = perturbation.levels
        mechanisms = {name: each.mechanism for name, each in self.perturbations.items()}
        fitted = np.frombuffer(DipRelease(columns=mechanisms).to_bytes(), dtype=np.uint8)
        return {"columns": columns, "coverage": self.coverage}, {"perturbations": fitted, **levels}

    @classmethod
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        data = arrays["perturbations"].tobytes()
        fitted = DipRelease.from_bytes(data, "the perturbations").columns
        designs, lattice, perturbations = {}, {}, {}
        for index, column in enumerate(header["columns"]):
            name = column["name"]
            designs[name] = _DESIGN.validate_python(column["design"])
            lattice[name] = column["lattice"]
            if name in fitted:
                levels = arrays.get(f"{index}_levels", np.zeros(0))
                perturbations[name] = DipPerturbation(
                    mechanism=fitted[name], levels=levels, lattice=lattice[name]
                )
        return cls(
            designs=designs,
            lattice=lattice,
            perturbations=perturbations,
            coverage=header["coverage"],
        )


def write_design(design: Design) -> str:
    """Return a design as JSON: the same text for equal designs."""
    return json.dumps(design.model_dump(mode="python", exclude_none=True))


def _level_numbers(codec: Codec) -> Floats:
    """Return the levels of a column as numbers, without null; of other columns none."""
    if not codec.has_levels:
        return np.zeros(0)
    return to_numbers(codec, codec.levels.drop_null())[0]


def find_ends(codec: Codec) -> tuple[float, float] | None:
    """Return the least and the greatest value of a column's domain, as numbers; None if it has no bounds."""
    if not codec.has_levels:
        return codec.bounds
    levels = _level_numbers(codec)
    return float(levels.min()), float(levels.max())


def tabulate(
    column: str, design: Design, lattice: bool, perturbation: DipPerturbation | None = None
) -> RangeRandomiser:
    """Return a column's mechanism; a check of the design and the release share its tables."""
    return _tabulate(column, write_design(design), lattice, perturbation)


@lru_cache(maxsize=128)
def _tabulate(
    column: str, design: str, lattice: bool, perturbation: DipPerturbation | None
) -> RangeRandomiser:
    made = _DESIGN.validate_python(json.loads(design))
    return range_randomiser(column, made, lattice=lattice, perturbation=perturbation)
