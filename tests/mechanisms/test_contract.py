"""Every mechanism keeps the contract: each case is a mechanism with one reference, output or design."""

from __future__ import annotations

from typing import Any, ClassVar

from mechanisms.contract import PRIVACY, MechanismContract

import dpdask
from dpdask.estimators.estimator import Estimator
from dpdask.schema import Schema


class _Dip(MechanismContract):
    reference: ClassVar[Any]
    weights: ClassVar[dict[str, float] | None] = None

    def estimator(self, schema: Schema, **changes: Any) -> Estimator:
        promised = self.privacy or {}
        given = {"epsilon": promised["epsilon"], "delta": promised["delta"], "reference": self.reference, **changes}
        return dpdask.DIP(schema, channel=self.mechanism.get("channel", "laplace"), **given)


KNOWN = {"level": {"probabilities": [0.25] * 4}, "line": {"name": "uniform", "loc": 0.0, "scale": 10.0}}


class TestKnown(_Dip):
    draws_nothing = True
    mechanism: ClassVar[dict[str, Any]] = {"kind": "dip", "reference": {"kind": "known", "columns": KNOWN}}
    reference = dpdask.Known(columns=KNOWN)


class TestHoldout(_Dip):
    draws_nothing = True
    mechanism: ClassVar[dict[str, Any]] = {"kind": "dip", "reference": {"kind": "holdout", "fraction": 0.5}}
    reference = dpdask.Holdout(fraction=0.5)


class TestNoisyHistogramReference(_Dip):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "dip", "reference": {"kind": "histogram", "bins": 16}, "channel": "optimal"}
    reference = dpdask.Histogram(bins=16)


class TestPublic(_Dip):
    draws_nothing = True
    mechanism: ClassVar[dict[str, Any]] = {"kind": "dip", "reference": {"kind": "public"}, "channel": "laplace-calibrated"}
    reference = dpdask.Public()
    public = True


class TestChain(_Dip):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "dip", "reference": {"kind": "chain", "fraction": 0.5}}
    reference = dpdask.Chain(fraction=0.5)


class TestTree(_Dip):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "dip", "reference": {"kind": "tree", "bins": 4}}
    reference = dpdask.Tree(bins=4)
    privacy: ClassVar[dict[str, Any]] = {**PRIVACY, "delta": 1e-6}


class TestCopula(MechanismContract):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "copula", "bins": 4, "n_rows": 150}
    privacy: ClassVar[dict[str, Any]] = {**PRIVACY, "delta": 1e-6}
    releases_rows = False

    def estimator(self, schema: Schema, **changes: Any) -> Estimator:
        return dpdask.GaussianCopula(schema, epsilon=4.0, delta=1e-6, bins=4, **changes)


class TestMarginals(MechanismContract):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "marginals", "bins": 4, "cliques": [["level"], ["level", "line"]]}
    releases_rows = False
    n_sampled = None  # tables are no sample

    def estimator(self, schema: Schema, **changes: Any) -> Estimator:
        return dpdask.Marginals(schema, epsilon=4.0, bins=4, cliques=[["level"], ["level", "line"]], **changes)


class TestHistogramCells(MechanismContract):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "histogram", "bins": 4, "threshold": "none"}
    releases_rows = False

    def estimator(self, schema: Schema, **changes: Any) -> Estimator:
        return dpdask.PerturbedHistogram(schema, epsilon=4.0, bins=4, threshold="none", **changes)


class TestHistogramRows(TestHistogramCells):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "histogram", "bins": 4, "output": "rows", "n_rows": 150}


RANGES = {
    "level": {"design": "case2", "anchors": {"name": "uniform", "loc": 0.0, "scale": 5.0}},
    "line": {"design": "case1", "anchors": {"name": "uniform", "loc": 0.0, "scale": 10.0}},
}


class TestRanges(MechanismContract):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "interval", "columns": RANGES}
    privacy: ClassVar[dict[str, Any] | None] = None

    def estimator(self, schema: Schema, **changes: Any) -> Estimator:
        return dpdask.IntervalMechanism(schema, columns=self.mechanism["columns"], **changes)


class TestPerturbedRanges(TestRanges):
    mechanism: ClassVar[dict[str, Any]] = {
        "kind": "interval",
        "columns": {
            **RANGES,
            "line": {
                "design": "interval-differential",
                "perturb": {"epsilon": 4.0, "reference": {"kind": "known", "name": "uniform", "loc": 0.0, "scale": 10.0}},
                "of": {"design": "case1", "anchors": {"name": "uniform", "loc": 0.0, "scale": 10.0}},
            },
        },
    }
    privacy: ClassVar[dict[str, Any]] = PRIVACY
