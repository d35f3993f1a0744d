"""A mechanism of one file, as a package of others may bring it: the noisy number of rows, released as one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Archived
from dpdask.errors import InputError
from dpdask.estimators.estimator import Estimator
from dpdask.mechanisms import registry
from dpdask.mechanisms.card import Guidance, Section, no_margin, noisy_counts_section
from dpdask.mechanisms.mechanism import NoisyCounts, NoisyCountsDescription, Spec
from dpdask.privacy.events import Composed, DiscreteLaplace, to_dict
from dpdask.privacy.noise import laplace_scale, perturb
from dpdask.references.reference import ColumnStatistic
from dpdask.schema import Schema


class ToySpec(Spec):
    """The noisy number of rows, times a factor."""

    kind: Literal["toy"] = "toy"
    factor: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ToyRelease(Archived):
    """One noisy number."""

    archive: ClassVar[Archive] = Archive(kind="toy", format=1, noun="toy")

    schema: Schema
    n_rows: int

    types: ClassVar[pa.Schema] = pa.schema([("n", pa.int64())])
    few_valued: ClassVar[list[str]] = []

    def n_drawn(self, wanted):
        return 1 if wanted is None else wanted

    def batches(self, start, n_rows, n_total, key, part):
        yield pa.RecordBatch.from_pydict({"n": [self.n_rows] * n_rows}, schema=self.types)

    def _contents(self):
        return {"n_rows": self.n_rows, "schema": self.schema.model_dump(exclude_none=True)}, {}

    @classmethod
    def _of_contents(cls, header, arrays):
        return cls(schema=Schema.from_dict(header["schema"]), n_rows=header["n_rows"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyMechanism(NoisyCounts):
    """The noisy number of rows under add-remove."""

    spec: ToySpec
    nobody: ClassVar[str] = "numbers"

    @property
    def event(self):
        return Composed(
            events=(
                DiscreteLaplace(
                    scale=laplace_scale(1, self.budget.epsilon),
                    sensitivity=1,
                    adjacency="add-remove",
                ),
            )
        )

    def find_written(self, released):
        return ToyRelease.types

    def check(self, columns): ...

    def statistic(self, columns):
        return ColumnStatistic(codecs=columns.codecs)

    def draw(self, counts, columns, noise):
        exact = np.array([counts.columns["level"].n_rows], dtype=np.int64)
        noisy = perturb(exact, self.event.events[0], rng=noise("toy/noise"))
        return ToyRelease(schema=self.schema, n_rows=int(noisy[0]))

    def read_drawn(self, data, columns):
        found = ToyRelease.from_bytes(data, "the run's noisy number")
        if found.schema != self.schema:
            raise InputError("this is another number", "noisy.npz", "`dpdask abort` the run")
        return found

    def fit(self, counts, columns, key):
        return ToyRelease(schema=self.schema, n_rows=counts.n_rows * self.spec.factor)

    @property
    def release_type(self):
        return ToyRelease

    def n_records(self, release):
        return release.n_drawn(None)

    @property
    def description(self):
        return ToyDescription(self)


@dataclass(frozen=True, slots=True)
class ToyDescription(NoisyCountsDescription):
    """What is said of it: each part, since none has a default."""

    mechanism: ToyMechanism

    @property
    def how(self):
        return "the noisy number of rows"

    def stages(self, columns):
        return ("tabulate: count the rows", "fit: noise on their number")

    def expectations(self, columns):
        return ("one number, off by less than 1 or so",)

    def n_expected(self, n_rows):
        return 1

    def quality(self, release):
        return f"about {release.n_rows:,}"

    def section(self, release, columns, **_):
        accounting = {
            "composition": "one event",
            "epsilon_exact": self.mechanism.budget.epsilon,
            "events": to_dict(self.mechanism.event),
        }
        mechanism = {"kind": "toy", "factor": self.mechanism.spec.factor}
        section = noisy_counts_section(
            budget=self.mechanism.budget,
            mechanism=mechanism,
            schema=self.mechanism.schema,
            cells={},
            accounting=accounting,
            n_rows=release.n_rows,
        )
        shown = {
            name: {"role": "privatised", "kind": self.mechanism.schema.columns[name].kind}
            for name in self.mechanism.schema.privatised
        }
        return Section(
            **{
                **{field: getattr(section, field) for field in section.__dataclass_fields__},
                "columns": shown,
            }
        )


GUIDANCE = Guidance(
    title="The noisy number of rows",
    shape=lambda _: "records",
    uses=lambda _: (["Knowing about how many rows there are."], ["Anything else."]),
    questions=lambda _: [],
    margins=lambda _: "",
    margin=lambda *_: no_margin,
    attenuates=lambda _: False,
    counts=lambda name: name,
    glossary={},
)


@dataclass(frozen=True, slots=True)
class Toy(Estimator):
    """The noisy number of rows of a frame."""

    spec_class: ClassVar[type[Spec]] = ToySpec

    factor: int = 1
    epsilon: float = 4.0
    adjacency: str = "add-remove"


def register():
    """Let jobs name it."""
    registry.register(ToySpec, lambda _: ToyMechanism, GUIDANCE)
