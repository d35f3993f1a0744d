"""Every mechanism keeps the contract: each case is a mechanism with one reference, output or design."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import charging_entries, digests, refusing, run_here
from mechanisms.contract import PRIVACY, SCHEMA, MechanismContract, killed_at

import dpdask
from dpdask.engine import fit as fit_module
from dpdask.errors import DataError
from dpdask.estimators.estimator import Estimator
from dpdask.mechanisms import expectations as cell_search
from dpdask.privacy import noise
from dpdask.schema import Schema


class _Dip(MechanismContract):
    reference: ClassVar[Any]
    weights: ClassVar[dict[str, float] | None] = None

    def estimator(self, schema: Schema, **changes: Any) -> Estimator:
        promised = self.privacy or {}
        given = {
            "epsilon": promised["epsilon"],
            "delta": promised["delta"],
            "reference": self.reference,
            **changes,
        }
        return dpdask.DIP(schema, channel=self.mechanism.get("channel", "laplace"), **given)


KNOWN = {
    "level": {"probabilities": [0.25] * 4},
    "line": {"name": "uniform", "loc": 0.0, "scale": 10.0},
}


class TestKnown(_Dip):
    draws_nothing = True
    mechanism: ClassVar[dict[str, Any]] = {
        "kind": "dip",
        "reference": {"kind": "known", "columns": KNOWN},
    }
    reference = dpdask.Known(columns=KNOWN)


class TestHoldout(_Dip):
    draws_nothing = True
    mechanism: ClassVar[dict[str, Any]] = {
        "kind": "dip",
        "reference": {"kind": "holdout", "fraction": 0.5},
    }
    reference = dpdask.Holdout(fraction=0.5)


class TestNoisyHistogramReference(_Dip):
    mechanism: ClassVar[dict[str, Any]] = {
        "kind": "dip",
        "reference": {"kind": "histogram", "bins": 16},
    }
    reference = dpdask.Histogram(bins=16)


class TestOptimal(_Dip):
    """On levels alone: of a continuous column each run solves a large linear program, as those of test_recorded_releases.py do."""

    mechanism: ClassVar[dict[str, Any]] = {
        "kind": "dip",
        "reference": {"kind": "histogram"},
        "channel": "optimal",
    }
    reference = dpdask.Histogram()
    schema: ClassVar[dict[str, Any]] = {**SCHEMA, "line": {"role": "keep", "type": "float64"}}


class TestPublic(_Dip):
    draws_nothing = True
    mechanism: ClassVar[dict[str, Any]] = {
        "kind": "dip",
        "reference": {"kind": "public"},
        "channel": "laplace-calibrated",
    }
    reference = dpdask.Public()
    public = True


class TestChain(_Dip):
    mechanism: ClassVar[dict[str, Any]] = {
        "kind": "dip",
        "reference": {"kind": "chain", "fraction": 0.5},
    }
    reference = dpdask.Chain(fraction=0.5)


class TestTree(_Dip):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "dip", "reference": {"kind": "tree", "bins": 4}}
    reference = dpdask.Tree(bins=4)
    privacy: ClassVar[dict[str, Any]] = {**PRIVACY, "delta": 1e-6}


class TestMarginals(MechanismContract):
    mechanism: ClassVar[dict[str, Any]] = {
        "kind": "marginals",
        "bins": 4,
        "cliques": [["level"], ["level", "line"]],
    }
    releases_rows = False
    n_sampled = None  # tables are no sample

    def estimator(self, schema: Schema, **changes: Any) -> Estimator:
        return dpdask.Marginals(
            schema, epsilon=4.0, bins=4, cliques=[["level"], ["level", "line"]], **changes
        )


class _TwoRounds(MechanismContract):
    """Mechanisms that find the cells of `line` in a first round: each round's noise is kept, and drawn once."""

    @pytest.mark.usefixtures("seeded_ledgers")
    @pytest.mark.parametrize("kept", ["noisy.npz", "noisy-1.npz"])
    def test_a_run_that_is_killed_between_its_rounds_draws_neither_again(
        self, kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place = self.ledger(tmp_path)
        run_here(
            self.write(tmp_path / "whole", tmp_path / "expected", ledger=place, insecure_seed=7)
        )
        job = self.write(tmp_path / "job", tmp_path / "out", ledger=place, insecure_seed=7)
        with killed_at(
            fit_module, "_keep_drawn", after=True, when=lambda *given: given[-1] == kept
        ):
            run_here(job)
        drawn = [
            perturbed
            for perturbed in (cell_search, noise)
            if perturbed is cell_search or kept == "noisy-1.npz"
        ]
        for module in drawn:
            monkeypatch.setattr(
                module,
                "perturb",
                lambda *_, **__: pytest.fail("noise that was kept is drawn again"),
            )
        run_here(job)
        assert digests(tmp_path / "out") == digests(tmp_path / "expected")
        assert [entry.kind for entry in charging_entries(place["url"], "people")] == [
            "intend",
            "commit",
        ] * 2

    def test_all_rows_are_checked_before_the_first_noise(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A wrong value of a column whose cells are not searched is found before anything is charged, not by the second pass."""
        place = self.ledger(tmp_path)
        job = self.write(tmp_path / "job", tmp_path / "out", ledger=place, insecure_seed=None)
        broken = self.frame()
        broken.loc[200, "level"] = 99
        pq.write_table(
            pa.Table.from_pandas(broken.iloc[160:], preserve_index=False),
            tmp_path / "lake" / "b.parquet",
        )
        monkeypatch.setattr(cell_search, "perturb", lambda *_, **__: pytest.fail("noise was drawn"))
        with pytest.raises(DataError):
            run_here(job)
        assert [
            entry for entry in charging_entries(place["url"], "people") if entry.kind == "intend"
        ] == []


class TestMarginalsWithFoundCells(_TwoRounds, TestMarginals):
    mechanism: ClassVar[dict[str, Any]] = {
        "kind": "marginals",
        "cliques": [["level"], ["level", "line"]],
    }

    def estimator(self, schema: Schema, **changes: Any) -> Estimator:
        return dpdask.Marginals(
            schema, epsilon=4.0, cliques=[["level"], ["level", "line"]], **changes
        )


class TestTreeWithFoundCells(_TwoRounds, TestTree):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "dip", "reference": {"kind": "tree"}}
    reference = dpdask.Tree()


class TestAdaptiveHistogramReference(TestNoisyHistogramReference):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "dip", "reference": {"kind": "histogram"}}
    reference = dpdask.Histogram()


class TestHistogramCells(MechanismContract):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "histogram", "bins": 4, "threshold": "none"}
    releases_rows = False

    def estimator(self, schema: Schema, **changes: Any) -> Estimator:
        return dpdask.PerturbedHistogram(schema, epsilon=4.0, bins=4, threshold="none", **changes)


class TestHistogramRows(TestHistogramCells):
    mechanism: ClassVar[dict[str, Any]] = {
        "kind": "histogram",
        "bins": 4,
        "output": "rows",
        "n_rows": 150,
    }


RANGES = {
    "level": {"design": "case2", "anchors": {"name": "uniform", "loc": 0.0, "scale": 5.0}},
    "line": {"design": "case1", "anchors": {"name": "uniform", "loc": 0.0, "scale": 10.0}},
}


class TestRanges(MechanismContract):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "interval", "columns": RANGES}
    schema: ClassVar[dict[str, Any]] = refusing(SCHEMA)
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
                "perturb": {
                    "epsilon": 4.0,
                    "reference": {"kind": "known", "name": "uniform", "loc": 0.0, "scale": 10.0},
                },
                "of": {
                    "design": "case1",
                    "anchors": {"name": "uniform", "loc": 0.0, "scale": 10.0},
                },
            },
        },
    }
    privacy: ClassVar[dict[str, Any]] = PRIVACY


# ---- last: kernels that another process compiles in the meantime


class TestCopula(MechanismContract):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "copula", "bins": 4, "n_rows": 150}
    privacy: ClassVar[dict[str, Any]] = {**PRIVACY, "delta": 1e-6}
    releases_rows = False

    def estimator(self, schema: Schema, **changes: Any) -> Estimator:
        return dpdask.GaussianCopula(schema, epsilon=4.0, delta=1e-6, bins=4, **changes)


class TestCopulaWithFoundCells(_TwoRounds, TestCopula):
    mechanism: ClassVar[dict[str, Any]] = {"kind": "copula", "n_rows": 150}
    on_cluster = True

    def estimator(self, schema: Schema, **changes: Any) -> Estimator:
        return dpdask.GaussianCopula(schema, epsilon=4.0, delta=1e-6, **changes)
