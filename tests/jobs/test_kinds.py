"""What a run, a plan, a charge and an audit know of a mechanism: a kind that is nothing like DIP goes through all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import dask
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import HOLDOUT, RATINGS_SCHEMA, charging_entries, lake, load, write_job

from dpdask.cli import _audit_text, _outcome_text, _plan_text
from dpdask.engine.compute import Progress
from dpdask.engine.randomise import Staged
from dpdask.errors import BudgetError, DataError, InternalError, SpecError, TemporaryError
from dpdask.io.fragments import InputTable
from dpdask.io.shards import ShardWriter
from dpdask.io.storage import Folder
from dpdask.jobs import charging
from dpdask.jobs.auditing import audit_job
from dpdask.jobs.kinds import Expected, Fitted, Kind, Terms, kind_of
from dpdask.jobs.kinds.dip import Dip, DipKind
from dpdask.jobs.plan import plan_job
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import Job, load_job
from dpdask.jobs.state import RunState
from dpdask.mechanisms.spending import Spending
from dpdask.privacy import Budget, central_guarantee_text
from dpdask.privacy.accountant import epsilon
from dpdask.privacy.coverage import Uncovered
from dpdask.privacy.events import Composed, DiscreteGaussian, DiscreteLaplace, Event, to_dict
from dpdask.schema import Schema

DELTA = 1e-6
TYPES = pa.schema([("rating", pa.float64())])


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    with dask.config.set(scheduler="synchronous"):
        yield


@dataclass
class Constant:
    """Releases `n_rows` rows of its own choice in one shard; what its statistic cost is Gaussian noise's, so δ > 0."""

    n_rows: int = 5
    charges: bool = True
    failing: Exception | None = None
    calls: list[str] = field(default_factory=list)

    event: Event = field(
        default_factory=lambda: Composed(
            events=(
                DiscreteGaussian(sigma=8.0, sensitivity=2**0.5, adjacency="replace-one"),
                DiscreteLaplace(scale=20.0, sensitivity=2, adjacency="replace-one"),
            )
        )
    )
    spending: Spending = field(default_factory=lambda: Spending(reference={"rating, genre": 0.1}, row={}, rows_per_unit=1))
    uncovered: tuple[Uncovered, ...] = ()
    order: None = None
    protected: str = "all rows"
    unprotected: str = "nobody"
    guarantee: str = "a constant promise"
    how: str = "5 rows of a constant"
    n_rows_private: bool = False

    def check(self, types: pa.Schema, secrets: Folder) -> None:
        self.calls.append("check")

    def expect(self, table: InputTable, rows_per_shard: int) -> Expected:
        return Expected(stages=("nothing: nothing is read",), n_rows=self.n_rows, n_shards=1)

    def fit(self, table: InputTable, secrets: Folder, charge: Callable[[], None], progress: Progress | None, *, insecure: bool) -> Fitted:
        if self.charges:
            charge()
        self.calls.append("fit")
        return Fitted(release_sha256="constant", n_released=(self.n_rows,))

    def write(
        self, table: InputTable, fitted: Fitted, secrets: Folder, publish: Folder, actions: Folder, rows_per_shard: int, progress: Progress | None
    ) -> Staged:
        self.calls.append("write")
        if self.failing is not None:
            raise self.failing
        assert fitted == Fitted(release_sha256="constant", n_released=(self.n_rows,))
        writer = ShardWriter(publish, "part-00000.parquet", TYPES, [])
        writer.write(pa.record_batch({"rating": [1.0] * self.n_rows}, TYPES))
        return Staged(shards=(writer.close(),))

    def card(self, table: InputTable, fitted: Fitted, secrets: Folder, *, insecure: bool) -> bytes:
        return b'{"constant": true}\n'

    def audit(self, types: pa.Schema, secrets: Folder, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        self.calls.append("released" if card is not None else "not released")
        return {}


def constant_job(folder: Path, kind: Kind, **changed: Any) -> Job:
    """A job of a kind that no spec names yet: read as DIP's, which takes no δ, so the budget is changed with the kind."""
    source = folder / "in"
    if not source.exists():
        lake(source, [60, 40])
    job = load(write_job(folder, source, folder / "out", **changed))
    job.kind = kind
    job.file = job.file.model_copy(update={"privacy": Budget(epsilon=4.0, delta=DELTA)})
    return job


def test_a_kind_chooses_its_rows_and_its_shards(tmp_path: Path) -> None:
    kind = Constant()
    job = constant_job(tmp_path, kind)
    outcome = run_job(job)
    assert pq.read_table(tmp_path / "out" / "part-00000.parquet").to_pydict() == {"rating": [1.0] * 5}
    assert (outcome.manifest.n_rows, len(outcome.manifest.shards)) == (5, 1)
    assert json.loads((tmp_path / "out" / "_dpdask" / "release.json").read_text()) == {"constant": True}
    assert kind.calls == ["check", "fit", "write"]
    assert run_job(job).status == "already released"
    assert not RunState(Folder(job.output_url)).folder.exists()


def test_a_kind_that_was_fitted_is_not_fitted_again(tmp_path: Path) -> None:
    kind = Constant(failing=TemporaryError("crash"))
    job = constant_job(tmp_path, kind)
    with pytest.raises(TemporaryError):
        run_job(job)
    reached = RunState(Folder(job.output_url)).read()
    assert reached is not None
    assert (reached.stage, reached.fitted) == ("fitted", Fitted(release_sha256="constant", n_released=(5,)))
    kind.failing = None
    run_job(job)
    assert kind.calls == ["check", "fit", "write", "check", "write"]


def test_a_kind_that_fails_on_the_data_leaves_nothing(tmp_path: Path) -> None:
    job = constant_job(tmp_path, Constant(failing=DataError("wrong")))
    with pytest.raises(DataError):
        run_job(job)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "job.yaml", "schema.yaml"]


def test_a_kind_that_does_not_charge_is_a_defect_and_nothing_is_kept(tmp_path: Path) -> None:
    job = constant_job(tmp_path, Constant(charges=False))
    with pytest.raises(InternalError, match="without a charge") as caught:
        run_job(job)
    assert caught.value.exit_code == 70
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "job.yaml", "schema.yaml"]


def ledger(folder: Path, limit: float) -> dict[str, Any]:
    url = f"sqlite:///{folder / 'ledger.db'}"
    charging.open_ledger(url).init("ratings", limit, DELTA)
    return {"url": url, "dataset": "ratings"}


def test_a_kinds_event_and_the_budgets_delta_are_charged(tmp_path: Path) -> None:
    place = ledger(tmp_path, 4.0)
    kind = Constant()
    job = constant_job(tmp_path, kind, ledger=place)
    planned = plan_job(job).ledger
    assert planned is not None
    assert (planned["before"], planned["fits"]) == (0.0, True)
    assert epsilon(kind.event, DELTA) <= planned["after"] <= 2.0  # not the 4 asked for: the events are priced
    run_job(job)
    [intended, _] = charging_entries(place["url"], "ratings")
    assert (intended.charge.epsilon, intended.charge.delta) == (4.0, DELTA)
    assert intended.charge.event == {**to_dict(kind.event), "unit": "row", "uncovered": []}
    again = constant_job(tmp_path, Constant(), ledger=place, output__path=str(tmp_path / "two"))
    second = plan_job(again).ledger
    assert second is not None
    assert second["fits"]  # composed at the limit's δ, the two fit, although their own δ sum to more than the limit
    assert planned["after"] < second["after"] <= 4.0
    assert run_job(again).status == "released"


def test_what_does_not_fit_is_refused_in_the_plan_and_the_run(tmp_path: Path) -> None:
    kind = Constant()
    job = constant_job(tmp_path, kind, ledger=ledger(tmp_path, 0.5))
    planned = plan_job(job).ledger
    assert planned is not None
    assert not planned["fits"]
    with pytest.raises(BudgetError):
        run_job(job)
    assert "fit" not in kind.calls
    assert not (tmp_path / "out").exists()


def test_the_texts_are_the_kinds(tmp_path: Path) -> None:
    job = constant_job(tmp_path, Constant())
    planned = plan_job(job)
    assert planned.stages[0] == "nothing: nothing is read"
    assert planned.stages[1].startswith("commit: ")
    assert (planned.released_rows, planned.n_shards, planned.epsilons) == (5, 1, {})
    text = _plan_text(planned)
    assert "rating, genre, noisy histogram: 0.1" in text
    assert "about 5 rows in at most 1 shards" in text
    assert "promise   a constant promise" in text
    result = {"status": "released", "insecure": False, "output": "out", "rows": 5, "shards": 1, "bytes": 1, "warnings": ()}
    assert "how       5 rows of a constant\n  promise   a constant promise" in _outcome_text(job, result)


def test_all_of_a_kinds_noise_is_audited_at_the_budgets_delta(tmp_path: Path) -> None:
    kind = Constant()
    job = constant_job(tmp_path, kind)
    found = audit_job(job, n_runs=1000)
    gaussian, laplace = found["measurements"]
    assert (gaussian["sigma"], gaussian["sensitivity"], laplace["scale"]) == (8.0, 2**0.5, 20.0)
    assert gaussian["claimed"] == epsilon(kind.event.events[0], DELTA)  # type: ignore[union-attr]  # it is composed
    assert found["sound"]
    assert found["columns"] == {}
    text = _audit_text(found)
    assert "histogram noise of σ 8: at least ε = " in text
    assert "histogram noise of scale 20: at least ε = " in text
    run_job(job)
    audit_job(job, n_runs=1000)
    assert [call for call in kind.calls if "released" in call] == ["not released", "released"]


# ---- DIP as a kind


def terms(**budget: Any) -> Terms:
    schema = Schema.from_dict({"columns": {"x": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}}})
    made = Budget(**{"epsilon": 1.0, **budget})
    return Terms(name="t", budget=made, schema=schema, base=Path("/base"), input_path="in", output_url="file:///base/out")


def dip(**changed: Any) -> Dip:
    return Dip(**{"kind": "dip", "reference": HOLDOUT, **changed})


@pytest.mark.parametrize(("budget", "where"), [({"delta": 1e-9}, "privacy.delta"), ({"adjacency": "add-remove"}, "privacy.adjacency")])
def test_dip_takes_no_delta_and_hides_no_presence(budget: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        kind_of(dip(), terms(**budget))
    assert (caught.value.exit_code, caught.value.where) == (64, where)
    assert (caught.value.mend or "").startswith("set it to ")


def test_dips_parts() -> None:
    kind = kind_of(dip(reference={"kind": "histogram"}, channel="optimal"), terms())
    assert isinstance(kind, DipKind)
    assert kind.how == "x randomised by the optimal channel"
    assert set(kind.spending.row) == set(kind.spending.reference) == {"x"}
    assert len(kind.event.events) == 2
    assert kind.protected in kind.guarantee
    assert kind.unprotected in kind.guarantee
    assert kind.guarantee != central_guarantee_text(kind.terms.budget, kind.protected, kind.unprotected, n_rows_public=True)
    assert kind_of(dip(), terms()).spending.reference == {}


def test_the_table_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"userId": [1, 2], "rating": ["a", "b"], "timestamp": [1, 2]}), tmp_path / "in" / "part.parquet")
    columns = {name: {key: value for key, value in RATINGS_SCHEMA[name].items() if key != "type"} for name in RATINGS_SCHEMA}
    job = load(write_job(tmp_path, tmp_path / "in", tmp_path / "out", schema=columns))
    with mock.patch("dpdask.jobs.state.RunState.lock", side_effect=AssertionError("a folder was made")), pytest.raises(DataError, match="'rating'"):
        run_job(job)
    with pytest.raises(DataError, match="'rating'"):
        plan_job(job)


DIGESTS = [
    ("{kind: dip, reference: {kind: holdout, fraction: 0.25}}", "{epsilon: 1.0}", "1bfe1a534723bc8025a0d8fc7faa005f"),
    (
        "{kind: dip, reference: {kind: holdout, fraction: 0.25}}",
        "{epsilon: 1.0, delta: 0, adjacency: replace-one, unit: row}",
        "1bfe1a534723bc8025a0d8fc7faa005f",
    ),
    (
        "{kind: dip, reference: {kind: histogram}, channel: optimal, cost: {x: rank}, weights: {x: 1.0, y: 3.0}}",
        "{epsilon: 1.0, delta: 0.0, unit: {column: id, max_rows: 3}}",
        "ecb9f1132c438b421943ef4c2a32d3e8",
    ),
]


@pytest.mark.parametrize(("mechanism", "privacy", "digest"), DIGESTS, ids=["short", "spelt-out", "all-keys"])
def test_the_digest_of_a_job_stays(mechanism: str, privacy: str, digest: str, tmp_path: Path) -> None:
    """Another digest would make a finished job another job, and its release a stranger's."""
    (tmp_path / "schema.yaml").write_text(
        "columns:\n  id: {role: keep}\n  x: {role: privatise, kind: discrete, levels: [1, 2, 3]}\n"
        "  y: {role: privatise, kind: continuous, bounds: [0.0, 1.0]}\n"
    )
    (tmp_path / "job.yaml").write_text(
        "name: pinned\ninput: {path: 'memory://lake/data'}\noutput: {path: out}\nschema: schema.yaml\n"
        f"privacy: {privacy}\nmechanism: {mechanism}\n"
    )
    assert load_job(tmp_path / "job.yaml", {"output.order": "keep"}).digest == digest
    assert load_job(tmp_path / "job.yaml").digest == load_job(tmp_path / "job.yaml", {"output.order": "shuffled"}).digest != digest


@pytest.mark.parametrize("mechanism", ["{kind: copula}", "{kind: marginals, cliques: [[x]]}", "{kind: histogram, bins: {y: 4}, output: rows}"])
def test_the_order_is_no_part_of_a_job_whose_rows_have_none(mechanism: str, tmp_path: Path) -> None:
    (tmp_path / "schema.yaml").write_text(
        "columns:\n  x: {role: privatise, kind: discrete, levels: [1, 2, 3]}\n  y: {role: privatise, kind: continuous, bounds: [0.0, 1.0]}\n"
    )
    (tmp_path / "job.yaml").write_text(
        f"name: pinned\ninput: {{path: in}}\noutput: {{path: out}}\nschema: schema.yaml\nprivacy: {{epsilon: 1.0}}\nmechanism: {mechanism}\n"
    )
    assert load_job(tmp_path / "job.yaml", {"output.order": "keep"}).digest == load_job(tmp_path / "job.yaml").digest
