"""Every mechanism keeps the contract: each case is a mechanism with one reference, output or design."""

# ruff: noqa: RUF012 - a case is a class, and nobody changes what it holds

import json

import pandas as pd
import pyarrow as pa
import pytest
from e2e.helpers import categorical, charging_entries, continuous, refusing, run_here
from mechanisms.contract import PRIVACY, SCHEMA, MechanismContract, killed_at, table

import dpdask
from dpdask.engine import fit as fit_module
from dpdask.errors import DataError
from dpdask.mechanisms import expectations as cell_search
from dpdask.mechanisms import levels
from dpdask.privacy import noise

LINE = {"name": "uniform", "loc": 0.0, "scale": 10.0}


class _Dip(MechanismContract):
    kind = "dip"
    python = dpdask.DIP


class TestKnown(_Dip):
    draws_nothing = True
    given = {
        "reference": dpdask.Known(columns={"level": {"probabilities": [0.25] * 4}, "line": LINE})
    }


class TestHoldout(_Dip):
    draws_nothing = True
    given = {"reference": dpdask.Holdout(fraction=0.5)}


class TestNoisyHistogramReference(_Dip):
    given = {"reference": dpdask.Histogram()}


class TestOptimal(_Dip):
    """On levels alone: of a continuous column each run solves a large linear program, as those of test_recorded_releases.py do."""

    given = {"reference": dpdask.Histogram(), "channel": "optimal"}
    schema = {**SCHEMA, "line": {"role": "keep", "type": "float64"}}


class TestPublic(_Dip):
    draws_nothing = True
    given = {"reference": dpdask.Public(), "channel": "laplace-calibrated"}


class TestChain(_Dip):
    given = {"reference": dpdask.Chain(fraction=0.5)}


class _TwoRounds(MechanismContract):
    """Mechanisms that find the cells of `line` in a first round: each round's noise is kept, and drawn once."""

    privacy = {**PRIVACY, "delta": 1e-6}

    @pytest.mark.usefixtures("seeded_ledgers")
    @pytest.mark.parametrize("kept", ["noisy.npz", "noisy-1.npz"])
    def test_a_run_that_is_killed_between_its_rounds_draws_neither_again(
        self, kept, whole, tmp_path, monkeypatch
    ):
        def forbid():
            for module in (cell_search, noise) if kept == "noisy-1.npz" else (cell_search,):
                monkeypatch.setattr(
                    module,
                    "perturb",
                    lambda *_, **__: pytest.fail("noise that was kept is drawn again"),
                )

        self.resume(
            whole,
            tmp_path / "out",
            killed_at(fit_module, "_keep_drawn", after=True, when=lambda *given: given[-1] == kept),
            forbid,
        )

    def test_all_rows_are_checked_before_the_first_noise(self, tmp_path):
        """A wrong value of a column whose cells are not searched is found before anything is charged, not by the second pass."""
        place = self.ledger(tmp_path)
        job = self.write(tmp_path / "job", tmp_path / "out", ledger=place, insecure_seed=None)
        self.spoil(tmp_path)
        with pytest.raises(DataError):
            run_here(job)
        assert [
            entry for entry in charging_entries(place["url"], "people") if entry.kind == "intend"
        ] == []


class TestTree(_TwoRounds, _Dip):
    given = {"reference": dpdask.Tree()}


TEXT = str(pa.Schema.from_pandas(pd.DataFrame({"text": ["a"]})).field("text").type)  # of pandas
OF_RULES = {
    **SCHEMA,
    "above": continuous([0.0, 10.0], type="float64", nulls="level"),
    "twice": continuous([1.0, 14.0], type="float64"),
    "half": categorical(["low", "high"], type=TEXT),
}
ALLOWED = {
    "columns": ["level", "half"],
    "allow": [[1, "low"], [2, "low"], [3, "high"], [4, "high"], [1, "high"], [4, "low"]],
}
DERIVED = {"derived": {"twice": "level + line"}}


class TestRowsWithRules(_Dip):
    given = {"reference": dpdask.Histogram()}
    schema = OF_RULES
    rules = [ALLOWED, DERIVED]


class TestRecordsWithRules(_TwoRounds):
    kind = "copula"
    python = dpdask.GaussianCopula
    schema = OF_RULES
    rules = [ALLOWED, DERIVED, {"ordered": "line <= above"}]
    releases_rows = False
    undetermined = ("level", "line")  # noise hides their variances


class TestMarginals(_TwoRounds):
    kind = "marginals"
    python = dpdask.Marginals
    given = {"cliques": [["level"], ["level", "line"]]}
    releases_rows = False
    n_sampled = None  # tables are no sample


class TestHistogramCells(MechanismContract):
    kind = "histogram"
    python = dpdask.PerturbedHistogram
    given = {"bins": 4, "threshold": "none"}
    releases_rows = False


class TestHistogramRows(TestHistogramCells):
    given = {"bins": 4}
    of_job = {"output": "rows", "n_rows": 150}


class TestRanges(MechanismContract):
    kind = "interval"
    python = dpdask.IntervalMechanism
    columns_ = {
        "level": {"design": "case2", "anchors": {**LINE, "scale": 5.0}},
        "line": {"design": "case1", "anchors": LINE},
    }
    given = {"columns": columns_}
    schema = refusing(SCHEMA)
    privacy = None
    undetermined = ("level",)  # its anchors do not reach its values


class TestPerturbedRanges(TestRanges):
    perturb = {"epsilon": 4.0, "reference": {"kind": "known", **LINE}}
    line = {
        "design": "interval-differential",
        "perturb": perturb,
        "of": {"design": "case1", "anchors": LINE},
    }
    given = {"columns": {**TestRanges.columns_, "line": line}}
    privacy = PRIVACY


# ---- last: kernels that another process compiles in the meantime


class TestCopula(_TwoRounds):
    kind = "copula"
    python = dpdask.GaussianCopula
    of_job = {"n_rows": 150}
    releases_rows = False


class _FindsLevels(MechanismContract):
    """Mechanisms that find the levels of `code` in a round before that for the cells of `line`."""

    privacy = {**PRIVACY, "delta": 1e-4}
    schema = {
        **SCHEMA,
        "code": {
            "role": "privatise",
            "kind": "categorical",
            "type": "string",
            "levels": "discover",
            "other": "rest",
        },
    }

    def frame(self):
        codes = ["a"] * 150 + ["b"] * 70 + [f"rare-{each}" for each in range(20)]
        codes = pd.array(codes[::-1], dtype=pd.ArrowDtype(pa.string()))
        return table().assign(code=codes)[list(self.columns())]

    @pytest.mark.usefixtures("seeded_ledgers")
    @pytest.mark.parametrize("kept", ["noisy.npz", "noisy-1.npz", "noisy-2.npz"])
    def test_a_run_that_is_killed_between_its_rounds_draws_none_again(
        self, kept, whole, tmp_path, monkeypatch
    ):
        def forbid():
            drawn = [(levels, "select_keys"), (cell_search, "perturb"), (noise, "perturb")]
            rounds = ["noisy.npz", "noisy-1.npz", "noisy-2.npz"]
            for module, name in drawn[: rounds.index(kept) + 1]:
                monkeypatch.setattr(
                    module, name, lambda *_, **__: pytest.fail("noise that was kept is drawn again")
                )

        killed = killed_at(fit_module, "_keep_drawn", after=True, when=lambda *g: g[-1] == kept)
        self.resume(whole, tmp_path / "out", killed, forbid)

    test_all_rows_are_checked_before_the_first_noise = (
        _TwoRounds.test_all_rows_are_checked_before_the_first_noise
    )

    def test_only_levels_of_the_list_come_out(self, whole):
        folder, _ = whole
        card = json.loads((folder / "expected/_dpdask/release.json").read_text())
        code = card["columns"]["code"]
        assert code["levels"] == ["a", "b", "rest"]
        assert code["threshold"] > 2
        assert 0 < code["delta"] <= 1e-4 / 4
        assert card["accounting"]["events"]["events"][0]["kind"] == "key-selection"
        assert card["accounting"]["epsilon_exact"] <= 4.0
        text = (folder / "expected").rglob("*")
        assert not any(b"rare-" in each.read_bytes() for each in text if each.is_file())


class TestMarginalsThatFindLevels(_FindsLevels):
    kind = "marginals"
    python = dpdask.Marginals
    given = {"cliques": [["code"], ["code", "line"], ["level"]]}
    releases_rows = False
    n_sampled = None


class TestCopulaThatFindsLevels(_FindsLevels):
    kind = "copula"
    python = dpdask.GaussianCopula
    of_job = {"n_rows": 150}
    releases_rows = False
