"""Interval mechanisms on Arrow batches: each private column becomes two, the ends of its values' ranges, and a third if coverage is asked for."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import TypeAdapter

from dpdask.codec import Codec, LevelCodec, ValueCodec, codec_for
from dpdask.errors import InputError, SpecError
from dpdask.mechanisms.dip.release import DipRelease
from dpdask.mechanisms.dip.release_file import release_from_bytes, release_to_bytes
from dpdask.mechanisms.interval.coverage import released_coverages
from dpdask.mechanisms.interval.design import Design, IntervalDifferential, reference_of
from dpdask.mechanisms.interval.differential import DipPerturbation, LevelPerturbation, adapted, check_perturbations, fit_perturbation
from dpdask.mechanisms.interval.fit import interval_mechanism, says_anything
from dpdask.mechanisms.interval.ranges import MECHANISM_ID, IntervalMechanism
from dpdask.schema import Column, Schema
from dpdask.streams import RunKey, stream

DESIGNS_FORMAT = 2
_DESIGN: TypeAdapter[Design] = TypeAdapter(Design)


def ends_of(name: str) -> tuple[str, str]:
    """Return the names of the two released columns of a private one."""
    return f"{name}_lower", f"{name}_upper"


def released_as(name: str, *, coverage: bool = False) -> tuple[str, ...]:
    """Return the names of all released columns of a private one."""
    return (*ends_of(name), f"{name}_coverage") if coverage else ends_of(name)


def check_designs(schema: Schema, designs: Mapping[str, Design], where: str, *, coverage: bool = False) -> None:
    """Check that each private column has a design that it can have, and that no two released columns share a name.

    Parameters
    ----------
    schema
        The declared columns.
    designs
        By column.
    where
        The key that holds them, for messages.
    coverage
        Whether each range's coverage is released too.

    Raises
    ------
    SpecError
        If they do not fit.
    """
    for name in designs:
        if name not in schema.privatised:
            raise SpecError("is not a privatised column", f"{where}.{name}", "remove it, or give the column the role privatise")
    for name in schema.privatised:
        place, column = f"column {name!r}", schema.columns[name]
        if column.kind == "categorical":
            raise SpecError("a categorical column has no order, so no range", place, "drop it, or randomise it in a job of the kind dip")
        if name not in designs:
            raise SpecError("has no design", place, f"add it to {where}")
        if coverage and reference_of(designs[name]) is None:
            raise SpecError(
                "its design names no public reference to measure coverage by", place, "add `reference: {name: …}`, or ask for no coverage"
            )
        if column.nulls == "level" and designs[name].nulls != "public":
            what = "a null has no range to hide in, so which values are missing would be published"
            raise SpecError(what, place, "declare `nulls: public` in its design if it is public, or `nulls: refuse` in the schema")
        if column.outside == "null":
            what = "values outside the domain become null, and nulls are published, so the release would reveal which values these were"
            raise SpecError(what, place, "declare `outside: clip` or `outside: refuse` in the schema")
    check_perturbations(schema, designs)
    released = [*schema.kept, *(made for name in schema.privatised for made in released_as(name, coverage=coverage))]
    for name in schema.privatised:
        clash = next((made for made in released_as(name, coverage=coverage) if released.count(made) > 1), None)
        if clash is not None:
            raise SpecError(f"its released column would be {clash!r}, and another one has that name", f"column {name!r}", "rename the other")


def released_schema(rows: pa.Schema, private: Sequence[str], *, coverage: bool = False) -> pa.Schema:
    """Return the released columns: two or three of float64 in the place of each private one, the others as they are."""
    fields: list[pa.Field] = []
    for row in rows:
        fields += [pa.field(made, pa.float64()) for made in released_as(row.name, coverage=coverage)] if row.name in private else [row]
    return pa.schema(fields)


def is_lattice(codec: Codec) -> bool:
    """Return whether a column's values are whole numbers: integers, dates, times."""
    return not pa.types.is_floating(codec.type if isinstance(codec, ValueCodec) else codec.levels.type)


def unit_of(codec: Codec) -> str:
    """Return which numbers the ends of a column's ranges are."""
    type_ = codec.type if isinstance(codec, ValueCodec) else codec.levels.type
    if pa.types.is_date(type_):
        return "days since 1970-01-01"
    if pa.types.is_timestamp(type_):
        units = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "microseconds, nanoseconds cut off,"}
        return f"{units[type_.unit]} since 1970-01-01" + (" UTC" if type_.tz else "")
    return "the column's own"


def numbers(codec: Codec, array: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return a column's values as numbers (0 where null), each exactly, and where they are null.

    Raises
    ------
    DataError
        If a value violates the schema, or is no number that float64 holds.
    """
    if isinstance(codec, ValueCodec):
        return codec.encode(array)
    levels, is_null = _line(codec).encode(codec.levels)
    codes = codec.encode(array)
    return levels[codes], is_null[codes]


def _line(codec: LevelCodec) -> ValueCodec:
    """Return the codec of a discrete column's levels as numbers."""
    made = codec_for(codec.name, Column(role="privatise", kind="continuous", nulls="level"), codec.levels.type)
    assert isinstance(made, ValueCodec)
    return made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntervalRelease:
    """The interval mechanism of each private column.

    Attributes
    ----------
    designs
        By column, as the user wrote them: public.
    lattice
        Whether a column's values are whole numbers.
    perturbations
        What perturbs the values of the columns whose design is interval-differential: fitted to what is declared, so public.
    coverage
        Whether each range's coverage under its design's public reference is released beside it.

    Privacy
    -------
    As `IntervalMechanism`, each column by its own anchors: given all ranges of a row, its private values are distributed as
    before, restricted to their ranges, since no anchor looks at any value. There is no ε, but for perturbed columns: a row's
    ε is the sum of theirs, under replace-one, and its event one local release. Anchors and perturbations are a function of
    the run key, the column and the fragment, so a retry repeats them and narrows nothing. A coverage is a function of its
    range and of the design, which is public: it tells nothing that the range does not.
    """

    designs: Mapping[str, Design]
    lattice: Mapping[str, bool]
    perturbations: Mapping[str, DipPerturbation] = field(default_factory=dict)
    coverage: bool = False

    @classmethod
    def of(cls, designs: Mapping[str, Design], codecs: Mapping[str, Codec], *, coverage: bool = False) -> IntervalRelease:
        """Return the release of some columns; every law is tabulated and every perturbation fitted, so that whatever is wrong shows.

        Raises
        ------
        SpecError
            If a law is unknown, a reference is missing, a target cannot be reached, or no anchor reaches a column's values.
        DataError
            If a column's values are no numbers.
        """
        levels = {name: _level_numbers(codec) for name, codec in codecs.items()}
        lattice = {name: is_lattice(codec) for name, codec in codecs.items()}
        perturbations = {
            name: adapted(fit_perturbation(design.perturb, codecs[name]), levels=levels[name], lattice=lattice[name])
            for name, design in designs.items()
            if isinstance(design, IntervalDifferential)
        }
        made = cls(designs={name: designs[name] for name in codecs}, lattice=lattice, perturbations=perturbations, coverage=coverage)
        for name, mechanism in made.columns.items():
            codec = codecs[name]
            ends = codec.bounds if isinstance(codec, ValueCodec) else (levels[name].min(), levels[name].max())
            if ends is not None and not says_anything(mechanism, *ends):
                what = f"no anchor falls between its least and greatest value ({ends[0]:g} and {ends[1]:g}), so its ranges would say nothing of it"
                raise SpecError(what, f"column {name!r}", "choose anchors that reach where values are")
        return made

    @property
    def epsilon(self) -> float:
        """An upper bound on the ε that a released row has cost by its perturbed columns; 0 without them."""
        return self._fitted.epsilon

    @property
    def _fitted(self) -> DipRelease:
        return DipRelease(columns={name: perturbation.mechanism for name, perturbation in self.perturbations.items()})

    @property
    def columns(self) -> dict[str, IntervalMechanism]:
        """The mechanism of each column."""
        return {name: _mechanism(name, _as_json(design), self.lattice[name], self.perturbations.get(name)) for name, design in self.designs.items()}

    def randomise(self, batch: pa.RecordBatch, codecs: Mapping[str, Codec], rngs: Mapping[str, Generator]) -> pa.RecordBatch:
        """Return the batch with two columns of ends for each private one, and of coverage if it is released; the others untouched.

        Parameters
        ----------
        batch
            The rows to release.
        codecs
            The codec of each private column.
        rngs
            From `streams`, one per private column; advanced by the rows of the batch.

        Raises
        ------
        DataError
            If a value violates the schema.
        """
        mechanisms = self.columns
        arrays: list[pa.Array] = []
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            if name not in mechanisms:
                arrays.append(array)
                continue
            ranges = mechanisms[name].randomise(*numbers(codecs[name], array), rngs[name])
            mask = ranges.is_null if ranges.is_null.any() else None
            reference = reference_of(self.designs[name]) if self.coverage else None
            covered = [] if reference is None else [released_coverages(mechanisms[name], ranges, reference)]
            arrays += [pa.array(made, mask=mask) for made in (ranges.lower, ranges.upper, *covered)]
        return pa.RecordBatch.from_arrays(arrays, names=released_schema(batch.schema, list(mechanisms), coverage=self.coverage).names)

    def streams(self, key: RunKey, fragment_id: str) -> dict[str, Generator]:
        """Return the random stream of each column on one fragment, at its start."""
        return {name: stream(key, f"{MECHANISM_ID}/{name}", fragment_id) for name in self.designs}

    def to_bytes(self) -> bytes:
        """Return the release as JSON: the same release, the same bytes. Public: designs alone, and what is fitted to what they declare."""
        columns = {name: {"design": json.loads(_as_json(design)), "lattice": self.lattice[name]} for name, design in self.designs.items()}
        for name, perturbation in self.perturbations.items():
            columns[name]["levels"] = perturbation.levels.tolist() if isinstance(perturbation, LevelPerturbation) else []
        fitted = base64.b64encode(release_to_bytes(self._fitted)).decode()
        content = {"format": DESIGNS_FORMAT, "columns": columns, "coverage": self.coverage, "perturbations": fitted}
        return json.dumps(content).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> IntervalRelease:
        """Return the release that `to_bytes` wrote.

        Raises
        ------
        InputError
            If it is of another format.
        """
        content: dict[str, Any] = json.loads(data)
        if content.get("format") != DESIGNS_FORMAT:
            raise InputError("these designs were written by another version", where, "abort the run and begin again")
        columns = content["columns"]
        fitted = release_from_bytes(base64.b64decode(content["perturbations"])).columns
        return cls(
            designs={name: _DESIGN.validate_python(column["design"]) for name, column in columns.items()},
            lattice={name: column["lattice"] for name, column in columns.items()},
            perturbations={
                name: adapted(mechanism, levels=np.array(columns[name]["levels"], dtype=np.float64), lattice=columns[name]["lattice"])
                for name, mechanism in fitted.items()
            },
            coverage=content["coverage"],
        )


def _as_json(design: Design) -> str:
    return json.dumps(design.model_dump(mode="python", exclude_none=True))


def _level_numbers(codec: Codec) -> NDArray[np.float64]:
    """Return the levels of a column as numbers, without null; nothing of a column without levels.

    Raises
    ------
    DataError
        If they are no numbers.
    """
    return numbers(codec, codec.levels.drop_null())[0] if isinstance(codec, LevelCodec) else np.zeros(0)


@lru_cache(maxsize=128)
def _mechanism(column: str, design: str, lattice: bool, perturbation: DipPerturbation | None) -> IntervalMechanism:
    """Return a column's mechanism; its tables are computed once by each process."""
    return interval_mechanism(column, _DESIGN.validate_python(json.loads(design)), lattice=lattice, perturbation=perturbation)
