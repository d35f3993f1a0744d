"""What a run, a plan, a charge and an audit know of a mechanism: one that is nothing like DIP goes through all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from unittest import mock

import dask
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import HOLDOUT, RATINGS_SCHEMA, charging_entries, hidden, lake, load, write_job

from dpdask.archive import Archive, Archived, Contents
from dpdask.cli import _outcome_text
from dpdask.engine import fit as engine_fit
from dpdask.engine.account import Account, open_ledger
from dpdask.engine.fit import Fitted
from dpdask.errors import BudgetError, DataError, SpecError, TemporaryError
from dpdask.io.storage import Folder
from dpdask.jobs.plan import audit_job, plan_job
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import Job, load_job
from dpdask.jobs.state import RunState
from dpdask.mechanisms.card import CoveredRows, Section
from dpdask.mechanisms.dip.columns import ColumnsMechanism
from dpdask.mechanisms.dip.spec import DipSpec
from dpdask.mechanisms.mechanism import Columns, Mechanism, Spec, Spending
from dpdask.mechanisms.registry import _REGISTERED, bind, register
from dpdask.privacy import Budget, central_guarantee_text
from dpdask.privacy.accountant import epsilon
from dpdask.privacy.events import Composed, DiscreteGaussian, DiscreteLaplace, to_dict
from dpdask.privacy.rounding import RowOrder
from dpdask.schema import Schema
from dpdask.streams import Noise, RunKey
from dpdask.terminal.texts import describe_audit

DELTA = 1e-6
TYPES = pa.schema([("rating", pa.float64())])


@dataclass
class Seen:
    """What was called, and what fails."""

    calls: list[str] = field(default_factory=list)
    failing: BaseException | None = None
    failing_at: str = ""

    def __call__(self, name: str) -> None:
        self.calls.append(name)
        if name == self.failing_at and self.failing is not None:
            raise self.failing

    @property
    def steps(self) -> list[str]:
        """Everything but the checks, which cost nothing and may be repeated."""
        return [call for call in self.calls if call != "check"]


SEEN = Seen()


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    SEEN.__init__()  # type: ignore[misc]  # as new
    register(ConstantSpec, lambda _: ConstantMechanism)
    with dask.config.set(scheduler="synchronous"):
        yield
    del _REGISTERED[ConstantSpec]


@dataclass(frozen=True)
class Constants(Archived):
    """`n_rows` rows of one value."""

    archive: ClassVar[Archive] = Archive(kind="constant", format=1, noun="constant")
    n_rows: int
    schema: Schema | None = None
    types: ClassVar[pa.Schema] = TYPES
    few_valued: ClassVar[list[str]] = []

    def _contents(self) -> Contents:
        return {"n_rows": self.n_rows}, {}

    @classmethod
    def _of_contents(cls, header: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        return cls(n_rows=header["n_rows"])

    def n_drawn(self, wanted: int | None) -> int:
        return wanted or self.n_rows

    def batches(
        self, start: int, n_rows: int, n_total: int, key: RunKey, part: str
    ) -> Iterator[pa.RecordBatch]:
        SEEN("write")
        yield pa.record_batch({"rating": [1.0] * n_rows}, TYPES)


class ConstantSpec(Spec):
    """A constant."""

    kind: Literal["constant"] = "constant"
    n_rows: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantMechanism(Mechanism):
    """Releases `n_rows` rows of its own choice in one shard; what its statistic cost is Gaussian noise's, so δ > 0."""

    releases_rows: ClassVar[bool] = False
    reference_rows: ClassVar[Literal["none"]] = "none"  # type: ignore[assignment]  # a property, or an attribute
    spending: ClassVar[Spending] = Spending(
        reference={"rating, genre": 0.1}, row={}, rows_per_unit=1
    )  # type: ignore[assignment]
    event: ClassVar[Composed] = Composed(  # type: ignore[assignment]
        events=(
            DiscreteGaussian(sigma=8.0, sensitivity=2**0.5, adjacency="replace-one"),
            DiscreteLaplace(scale=20.0, sensitivity=2, adjacency="replace-one"),
        )
    )
    protected: ClassVar[str] = "all rows"  # type: ignore[assignment]
    unprotected: ClassVar[str] = "nobody"  # type: ignore[assignment]
    how: ClassVar[str] = "5 rows of a constant"  # type: ignore[assignment]
    release_type: ClassVar[type[Archived]] = Constants  # type: ignore[assignment]

    def guarantee(self, order: RowOrder) -> str:
        return "a constant promise"

    def check_parameters(self) -> None:
        pass

    def check(self, columns: Columns) -> None:
        SEEN("check")

    def statistic(self, columns: Columns) -> Any:
        raise AssertionError("nothing is counted")

    def draw(self, counts: Any, columns: Columns, noise: Noise) -> Archived:
        SEEN("draw")
        return Constants(n_rows=self.spec.n_rows)

    def read_drawn(self, data: bytes, columns: Columns) -> Archived:
        return Constants.from_bytes(data, "constant")

    def fit(self, counts: Any, columns: Columns, key: RunKey) -> Any:
        SEEN("fit")
        assert counts == Constants(n_rows=self.spec.n_rows)
        return counts

    def n_records(self, release: Constants) -> int:
        return release.n_rows

    def n_expected(self, n_rows: int | None) -> int:
        return int(self.spec.n_rows)

    def stages(self, columns: Columns, *, uncounted: bool) -> tuple[str, ...]:
        return ("nothing: nothing is read",)

    def section(
        self,
        release: Any,
        columns: Columns,
        *,
        n_rows: int | None,
        n_released: int | None,
        order: RowOrder,
    ) -> Section:
        rows = CoveredRows(who="every row", fraction=1.0, of="rows")
        return Section(
            budget=self.budget,
            text="constant",
            protected=rows,
            unprotected=rows,
            mechanism={"kind": "constant"},
            columns={"rating": {"role": "privatised"}},
            accounting={"composition": "none", "epsilon_exact": 0.0},
            order="none",
        )

    def audit(self, columns: Columns, card: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
        SEEN("released" if card is not None else "not released")
        return {}


def constant_job(folder: Path, **changed: Any) -> Job:
    source = folder / "in"
    if not source.exists():
        lake(source, [60, 40])
    given = {"mechanism": {"kind": "constant"}, "privacy__delta": DELTA, **changed}
    return load(write_job(folder, source, folder / "out", **given))


def test_a_mechanism_chooses_its_rows_and_its_shards(tmp_path: Path) -> None:
    job = constant_job(tmp_path)
    outcome = run_job(job)
    assert pq.read_table(tmp_path / "out" / "part-00000.parquet").to_pydict() == {
        "rating": [1.0] * 5
    }
    assert (outcome.manifest.n_rows, len(outcome.manifest.shards)) == (5, 1)
    assert json.loads((tmp_path / "out" / "_dpdask" / "release.json").read_text())["mechanism"] == {
        "kind": "constant"
    }
    assert SEEN.calls[0] == "check"
    assert SEEN.steps == ["draw", "fit", "write"]
    assert run_job(job).status == "already released"
    assert not RunState(Folder(job.output_url)).folder.exists()


def test_a_mechanism_that_was_fitted_is_not_fitted_again(tmp_path: Path) -> None:
    SEEN.failing, SEEN.failing_at = TemporaryError("crash"), "write"
    job = constant_job(tmp_path)
    with pytest.raises(TemporaryError):
        run_job(job)
    reached = RunState(Folder(job.output_url)).read()
    assert reached is not None
    release = sha256((hidden(tmp_path / "out") / "release.npz").read_bytes()).hexdigest()
    assert (reached.stage, reached.fitted) == (
        "fitted",
        Fitted(release_sha256=release, n_released=(5,)),
    )
    SEEN.failing = None
    run_job(job)
    assert SEEN.steps == ["draw", "fit", "write", "write"]


def test_noise_that_was_drawn_is_not_drawn_again(tmp_path: Path) -> None:
    place = ledger(tmp_path, 4.0)
    SEEN.failing, SEEN.failing_at = KeyboardInterrupt(), "fit"
    job = constant_job(tmp_path, ledger=place)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run_job(job)
    SEEN.failing = None
    run_job(job)
    assert SEEN.steps == ["draw", "fit", "fit", "fit", "write"]
    assert [entry.kind for entry in charging_entries(place["url"], "ratings")] == [
        "intend",
        "commit",
    ]


def test_a_mechanism_that_fails_on_the_data_leaves_nothing(tmp_path: Path) -> None:
    SEEN.failing, SEEN.failing_at = DataError("wrong"), "write"
    with pytest.raises(DataError):
        run_job(constant_job(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "job.yaml", "schema.yaml"]


def test_no_mechanism_draws_without_a_charge_and_noise_is_kept_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order is the engine's: a mechanism has no part in it, so it cannot forget its charge."""
    intend, keep, keep_drawn = Account.intend, engine_fit.keep, engine_fit._keep_drawn

    def charging(*given: Any) -> Any:
        SEEN("charge")
        return intend(*given)

    def keeping(folder: Folder, name: str, data: bytes) -> str:
        SEEN(f"keep {name}")
        return keep(folder, name, data)

    monkeypatch.setattr(Account, "intend", charging)

    def keeping_noise(*given: Any) -> Any:
        SEEN(f"keep {given[-1]}")
        return keep_drawn(*given)

    monkeypatch.setattr(engine_fit, "keep", keeping)
    monkeypatch.setattr(engine_fit, "_keep_drawn", keeping_noise)
    SEEN.failing, SEEN.failing_at = BudgetError("too small"), "charge"
    job = constant_job(tmp_path, ledger=ledger(tmp_path, 4.0))
    with pytest.raises(BudgetError):
        run_job(job)
    assert SEEN.steps == ["charge"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in",
        "job.yaml",
        "ledger.db",
        "schema.yaml",
    ]
    SEEN.__init__()  # type: ignore[misc]  # as new
    run_job(job)
    assert SEEN.steps == ["charge", "draw", "keep noisy.npz", "fit", "keep release.npz", "write"]


def ledger(folder: Path, limit: float) -> dict[str, Any]:
    url = f"sqlite:///{folder / 'ledger.db'}"
    open_ledger(url).init("ratings", limit, DELTA)
    return {"url": url, "dataset": "ratings"}


def test_a_mechanisms_event_and_the_budgets_delta_are_charged(tmp_path: Path) -> None:
    place = ledger(tmp_path, 4.0)
    event = ConstantMechanism.event
    job = constant_job(tmp_path, ledger=place)
    planned = plan_job(job).ledger
    assert planned is not None
    assert (planned["before"], planned["fits"]) == (0.0, True)
    assert (
        epsilon(event, DELTA) <= planned["after"] <= 2.0
    )  # not the 4 asked for: the events are priced
    run_job(job)
    [intended, _] = charging_entries(place["url"], "ratings")
    assert (intended.charge.epsilon, intended.charge.delta) == (4.0, DELTA)
    assert intended.charge.event == {**to_dict(event), "unit": "row", "uncovered": []}
    again = constant_job(tmp_path, ledger=place, output__path=str(tmp_path / "two"))
    second = plan_job(again).ledger
    assert second is not None
    assert second[
        "fits"
    ]  # composed at the limit's δ, the two fit, although their own δ sum to more than the limit
    assert planned["after"] < second["after"] <= 4.0
    assert run_job(again).status == "released"


def test_what_does_not_fit_is_refused_in_the_plan_and_the_run(tmp_path: Path) -> None:
    job = constant_job(tmp_path, ledger=ledger(tmp_path, 0.5))
    planned = plan_job(job).ledger
    assert planned is not None
    assert not planned["fits"]
    with pytest.raises(BudgetError):
        run_job(job)
    assert SEEN.steps == []
    assert not (tmp_path / "out").exists()


def test_the_texts_are_the_mechanisms(tmp_path: Path) -> None:
    job = constant_job(tmp_path)
    planned = plan_job(job)
    assert planned.stages[0] == "nothing: nothing is read"
    assert planned.stages[1].startswith("commit: ")
    assert (planned.released_rows, planned.n_shards, planned.epsilons) == (5, 1, {})
    text = str(planned)
    assert re.search(r"column +ε of a row +ε of its counts\n +rating, genre +0\.1\n", text)
    assert "about 5 rows in at most 1 shard" in text
    assert "promise   a constant promise" in text
    result = {
        "status": "released",
        "insecure": False,
        "output": "out",
        "rows": 5,
        "shards": 1,
        "bytes": 1,
        "warnings": (),
        "quality": "",
    }
    assert "how       5 rows of a constant\n  promise   a constant promise" in _outcome_text(
        job, job.mechanism, result
    )


def test_all_of_a_mechanisms_noise_is_audited_at_the_budgets_delta(tmp_path: Path) -> None:
    job = constant_job(tmp_path)
    found = audit_job(job, n_runs=1000)
    gaussian, laplace = found["measurements"]
    assert (gaussian["sigma"], gaussian["sensitivity"], laplace["scale"]) == (8.0, 2**0.5, 20.0)
    assert gaussian["claimed"] == epsilon(ConstantMechanism.event.events[0], DELTA)
    assert found["sound"]
    assert found["columns"] == {}
    text = describe_audit(found)
    assert "histogram noise of σ 8: at least ε = " in text
    assert "histogram noise of scale 20: at least ε = " in text
    run_job(job)
    audit_job(job, n_runs=1000)
    assert [call for call in SEEN.calls if "released" in call] == ["not released", "released"]


def test_a_kind_has_one_mechanism() -> None:
    with pytest.raises(SpecError, match="a mechanism of the kind 'constant' exists already"):
        register(ConstantSpec, lambda _: ConstantMechanism)


# ---- DIP as a mechanism

SCHEMA = Schema.from_dict(
    {"columns": {"x": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}}}
)


def bound(budget: Mapping[str, Any] | None = None, **changed: Any) -> Mechanism:
    spec = DipSpec(**{"kind": "dip", "reference": HOLDOUT, **changed})
    return bind(spec, SCHEMA, Budget(**{"epsilon": 1.0, **(budget or {})}))


@pytest.mark.parametrize(
    ("budget", "where"), [({"delta": 1e-9}, "delta"), ({"adjacency": "add-remove"}, "adjacency")]
)
def test_dip_takes_no_delta_and_hides_no_presence(
    budget: dict[str, Any], where: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as caught:
        bound(budget)
    assert (caught.value.exit_code, caught.value.where) == (64, f"`{where}`")
    assert (caught.value.hint or "").startswith("set it to ")
    with pytest.raises(SpecError) as caught:
        load(
            write_job(
                tmp_path,
                tmp_path / "in",
                tmp_path / "out",
                **{f"privacy__{key}": value for key, value in budget.items()},
            )
        )
    assert caught.value.exit_code == 64
    assert re.fullmatch(rf"job\.yaml, line \d+, privacy\.{where}", caught.value.where or "")
    assert (caught.value.hint or "").startswith("set it to ")


@pytest.mark.parametrize("order", ["keep", "shuffled"])
def test_dips_parts(order: RowOrder) -> None:
    mechanism = bound(reference={"kind": "histogram"}, channel="optimal")
    assert isinstance(mechanism, ColumnsMechanism)
    assert mechanism.how == "x randomised by the optimal channel"
    assert set(mechanism.spending.row) == set(mechanism.spending.reference) == {"x"}
    assert len(mechanism.event.events) == 2
    promise = mechanism.guarantee(order)
    assert mechanism.protected in promise
    assert mechanism.unprotected in promise
    assert promise != central_guarantee_text(
        mechanism.budget, mechanism.protected, mechanism.unprotected, n_rows_public=True
    )
    assert bound().spending.reference == {}


def test_the_table_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(
        pa.table({"userId": [1, 2], "rating": ["a", "b"], "timestamp": [1, 2]}),
        tmp_path / "in" / "part.parquet",
    )
    columns = {
        name: {key: value for key, value in RATINGS_SCHEMA[name].items() if key != "type"}
        for name in RATINGS_SCHEMA
    }
    job = load(write_job(tmp_path, tmp_path / "in", tmp_path / "out", schema=columns))
    with (
        mock.patch(
            "dpdask.jobs.state.RunState.lock", side_effect=AssertionError("a folder was made")
        ),
        pytest.raises(DataError, match="'rating'"),
    ):
        run_job(job)
    with pytest.raises(DataError, match="'rating'"):
        plan_job(job)


DIGESTS = [
    (
        "{kind: dip, reference: {kind: holdout, fraction: 0.25}}",
        "{epsilon: 1.0}",
        "1bfe1a534723bc8025a0d8fc7faa005f",
    ),
    (
        "{kind: dip, reference: {kind: holdout, fraction: 0.25}}",
        "{epsilon: 1.0, delta: 0, adjacency: replace-one, unit: row}",
        "1bfe1a534723bc8025a0d8fc7faa005f",
    ),
    (
        "{kind: dip, reference: {kind: histogram, bins: 1024}, channel: optimal, cost: {x: rank}, weights: {x: 1.0, y: 3.0}}",
        "{epsilon: 1.0, delta: 0.0, unit: {column: id, max_rows: 3}}",
        "ecb9f1132c438b421943ef4c2a32d3e8",
    ),
]


@pytest.mark.parametrize(
    ("mechanism", "privacy", "digest"), DIGESTS, ids=["short", "spelt-out", "all-keys"]
)
def test_the_digest_of_a_job_stays(
    mechanism: str, privacy: str, digest: str, tmp_path: Path
) -> None:
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
    assert (
        load_job(tmp_path / "job.yaml").digest
        == load_job(tmp_path / "job.yaml", {"output.order": "shuffled"}).digest
        != digest
    )


@pytest.mark.parametrize(
    "mechanism",
    [
        "{kind: copula}",
        "{kind: marginals, cliques: [[x]]}",
        "{kind: histogram, bins: {y: 4}, output: rows}",
    ],
)
def test_the_order_is_no_part_of_a_job_whose_rows_have_none(mechanism: str, tmp_path: Path) -> None:
    (tmp_path / "schema.yaml").write_text(
        "columns:\n  x: {role: privatise, kind: discrete, levels: [1, 2, 3]}\n  y: {role: privatise, kind: continuous, bounds: [0.0, 1.0]}\n"
    )
    (tmp_path / "job.yaml").write_text(
        f"name: pinned\ninput: {{path: in}}\noutput: {{path: out}}\nschema: schema.yaml\nprivacy: {{epsilon: 1.0}}\nmechanism: {mechanism}\n"
    )
    assert (
        load_job(tmp_path / "job.yaml", {"output.order": "keep"}).digest
        == load_job(tmp_path / "job.yaml").digest
    )
