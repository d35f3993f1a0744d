"""Every mechanism x reference x unit x adjacency that a job can name, with the smallest neighbouring tables that go through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from e2e.helpers import categorical, continuous, discrete

EPSILON = 0.2  # small, so that the noise covers all, and what it does not cover shows in few runs
WHO = {"column": "who", "max_rows": 2}
X = discrete([0, 1, 2], type="int64")
Y = categorical(["a", "b"], type="string")
P = continuous([0.0, 1.0], type="float64")
KEPT, DROPPED = {"role": "keep", "type": "int64"}, {"role": "drop"}
DIP_SCHEMA = {"id": KEPT, "who": DROPPED, "x": X, "y": Y, "p": DROPPED, "q": DROPPED}
CENTRAL_SCHEMA = {**DIP_SCHEMA, "id": DROPPED}
CONTINUOUS = {**DIP_SCHEMA, "x": DROPPED, "y": DROPPED, "p": P}
KNOWN = {"x": {"probabilities": [0.5, 0.25, 0.25]}, "y": {"probabilities": [0.5, 0.5]}}
UNIFORM = {"name": "uniform", "loc": 0.0, "scale": 1.0}

Parts = Sequence[pa.Table]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job's mechanism, schema and promise, and what its two tables differ in.

    Attributes
    ----------
    n_rows
        Of the longer table; a hold-out needs some.
    held
        Whether its promise is for released rows alone.
    """

    name: str
    mechanism: Mapping[str, Any]
    schema: Mapping[str, Any]
    unit: Any = "row"
    adjacency: str = "replace-one"
    delta: float = 0.0
    n_rows: int = 6
    held: bool = False

    @property
    def changes(self):
        """The changes of a job that `write_job` takes."""
        promise = {
            "privacy__unit": self.unit,
            "privacy__adjacency": self.adjacency,
            "privacy__delta": self.delta,
            "privacy__epsilon": EPSILON,
        }
        return {"mechanism": dict(self.mechanism), **promise}

    @property
    def changed(self):
        """The rows of the unit in which the neighbours differ: the last one."""
        return list(range(self.n_rows - (1 if self.unit == "row" else 3), self.n_rows))

    def tables(self):
        """Return two neighbours, in two files each: all rows alike, and the last unit with other values, or gone."""
        left = table(self.n_rows)
        right = (
            left.slice(0, self.changed[0])
            if self.adjacency == "add-remove"
            else table(self.n_rows, self.changed)
        )
        return files(left), files(right)


def table(n_rows, changed=()):
    """Return rows that are all alike but for those that are changed; three rows make a unit."""
    rows = range(n_rows)
    columns = {
        "id": pa.array(rows, pa.int64()),
        "who": pa.array([row // 3 for row in rows], pa.int64()),
        "x": pa.array([2 if row in changed else 0 for row in rows], pa.int64()),
        "y": pa.array(["b" if row in changed else "a" for row in rows], pa.string()),
        "p": pa.array([0.9 if row in changed else 0.1 for row in rows], pa.float64()),
        "q": pa.array([0.5 for _ in rows], pa.float64()),
    }
    return pa.table(columns)


def files(rows):
    """Return rows in two files, the first of three rows at most."""
    return (rows.slice(0, 3), rows.slice(3))


def write_public(folder):
    """Write the public table of a reference, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table(8, range(3)), folder / "public.parquet")
    return folder / "public.parquet"


def dip_cases(public):
    """Yield the cases of `dip`, for both units."""
    references = [
        ("histogram", {"kind": "histogram"}, {}),
        ("holdout", {"kind": "holdout", "fraction": 0.5}, {"n_rows": 12, "held": True}),
        ("public", {"kind": "public", "path": public}, {}),
        ("chain-fraction", {"kind": "chain", "fraction": 0.5}, {"n_rows": 12, "held": True}),
        ("chain-path", {"kind": "chain", "path": public}, {}),
        ("tree", {"kind": "tree"}, {}),
    ]
    yield Case(name="tree-delta", mechanism=_dip({"kind": "tree"}), schema=DIP_SCHEMA, delta=1e-3)
    yield Case(
        name="tree-found",
        mechanism=_dip({"kind": "tree"}),
        schema={**DIP_SCHEMA, "y": DROPPED, "p": P},
    )
    for unit in ("row", WHO):
        of = "row" if unit == "row" else "unit"
        for name, reference, more in references:
            yield Case(
                name=f"{name}-{of}", mechanism=_dip(reference), schema=DIP_SCHEMA, unit=unit, **more
            )
        for channel in ("laplace", "laplace-calibrated", "optimal"):
            yield Case(
                name=f"known-{channel}-{of}",
                mechanism=_dip({"kind": "known", "columns": KNOWN}, channel),
                schema=DIP_SCHEMA,
                unit=unit,
            )
    only_x = _dip({"kind": "known", "columns": {"x": KNOWN["x"]}}, "optimal-unbiased")
    yield Case(name="known-optimal-unbiased", mechanism=only_x, schema={**DIP_SCHEMA, "y": DROPPED})
    yield Case(
        name="known-continuous",
        mechanism=_dip({"kind": "known", "columns": {"p": UNIFORM}}),
        schema=CONTINUOUS,
    )
    for channel in ("laplace", "optimal"):
        yield Case(
            name=f"histogram-continuous-{channel}",
            mechanism=_dip({"kind": "histogram", "bins": 4}, channel),
            schema=CONTINUOUS,
        )


def _dip(reference, channel="laplace"):
    return {"kind": "dip", "reference": reference, "channel": channel}


def central_cases():
    """Yield the cases of the mechanisms that release noisy counts, for both units and adjacencies."""
    mechanisms = [
        ("marginals", {"kind": "marginals", "cliques": [["x"], ["x", "y"]]}, {}),
        ("copula", {"kind": "copula", "n_rows": "input"}, {}),
        ("cells", {"kind": "histogram", "threshold": "none"}, {}),
        ("cells-enhanced", {"kind": "histogram", "threshold": "enhanced"}, {}),
        ("rows", {"kind": "histogram", "threshold": "positive", "output": "rows"}, {}),
        (
            "cells-sparse",
            {
                "kind": "histogram",
                "threshold": "enhanced",
                "factor": 14.0,
                "bins": {"p": 1024, "q": 256},
            },
            {"p": P, "q": P},
        ),
    ]
    for adjacency in ("replace-one", "add-remove"):
        for unit in ("row", WHO):
            for name, mechanism, more in mechanisms:
                schema = {**CENTRAL_SCHEMA, **more}
                name_ = f"{name}-{adjacency}-{'row' if unit == 'row' else 'unit'}"
                yield Case(
                    name=name_, mechanism=mechanism, schema=schema, unit=unit, adjacency=adjacency
                )
    found = [  # the cells of p
        ("marginals", {"kind": "marginals", "cliques": [["p"], ["p", "x"]]}),
        ("copula", {"kind": "copula"}),
        ("cells", {"kind": "histogram", "threshold": "none"}),
        ("rows", {"kind": "histogram", "output": "rows"}),
    ]
    for name, mechanism in found:
        schema = {**CENTRAL_SCHEMA, "y": DROPPED, "p": P}
        yield Case(name=f"{name}-found-row", mechanism=mechanism, schema=schema)
        yield Case(
            name=f"{name}-found-unit",
            mechanism=mechanism,
            schema=schema,
            adjacency="add-remove",
            unit=WHO,
        )
    yield Case(
        name="cells-found-add-remove-row",
        mechanism=found[2][1],
        schema={**CENTRAL_SCHEMA, "p": P},
        adjacency="add-remove",
    )
    for adjacency, unit in (
        ("replace-one", "row"),
        ("add-remove", "row"),
        ("add-remove", WHO),
    ):  # pairs that are measured twice, and a triple
        name = f"copula-target-{adjacency}-{'row' if unit == 'row' else 'unit'}"
        mechanism = {"kind": "copula", "n_rows": 5, "bins": {"p": 2}, "target": "y"}
        yield Case(
            name=name,
            mechanism=mechanism,
            schema={**CENTRAL_SCHEMA, "p": P},
            adjacency=adjacency,
            unit=unit,
            delta=1e-3,
        )
    for name, mechanism in (
        ("marginals-delta", mechanisms[0][1]),
        ("copula-delta", {"kind": "copula", "n_rows": 5}),
    ):
        yield Case(name=f"{name}-row", mechanism=mechanism, schema=CENTRAL_SCHEMA, delta=1e-3)
        yield Case(
            name=f"{name}-unit",
            mechanism=mechanism,
            schema=CENTRAL_SCHEMA,
            delta=1e-3,
            adjacency="add-remove",
            unit=WHO,
        )


def person_cases():
    """Yield the cases of tables in which each person weighs 1."""
    schema = {**CENTRAL_SCHEMA, "y": {**Y, "constant": True}}
    for adjacency in ("replace-one", "add-remove"):
        yield Case(
            name=f"marginals-persons-{adjacency}",
            mechanism={
                "kind": "marginals",
                "persons": True,
                "cliques": [["y"], ["x"], ["x", "y"]],
            },
            schema=schema,
            delta=1e-3,
            adjacency=adjacency,
            unit=WHO,
        )


def interval_cases():
    """Yield the cases of interval-differential columns, the only ranges that have an ε."""
    perturb = {"epsilon": EPSILON, "reference": {"kind": "known", **KNOWN["x"]}}
    design = {"design": "case2", "anchors": {"name": "uniform", "loc": -0.5, "scale": 3.0}}
    columns = {"x": {"design": "interval-differential", "perturb": perturb, "of": design}}
    schema = {**DIP_SCHEMA, "y": DROPPED}
    yield Case(
        name="interval-differential",
        mechanism={"kind": "interval", "columns": columns},
        schema=schema,
    )
