"""What a run tells the steward's terminal alone: there it stands, and nowhere else."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from e2e.helpers import call_cli, categorical, continuous, hidden, holds_number, run_here, write_job

from dpdask.engine.account import open_ledger
from dpdask.engine.write import Told
from dpdask.errors import TemporaryError
from dpdask.io.storage import Folder
from dpdask.stats.statistic import ColumnOrder

SCHEMA = {
    "who": {"role": "keep", "type": "int64"},
    "income": continuous([0, 1000], type="float64"),
    "kind": categorical(["a", "b", "rest"], other="rest", type="string"),
    "day": continuous([0, 400], type="int32"),
}
TOO_RICH, STRANGE = 4711, 1237  # numbers that stand nowhere by chance
N_ROWS = 10_000
TOLD = {"income": "4,711 values were outside", "kind": "1,237 values were outside"}


@pytest.fixture
def job(tmp_path):
    rng = np.random.default_rng(5)
    income = rng.uniform(1, 999, N_ROWS)
    income[:TOO_RICH] = 5e6
    kind = np.where(np.arange(N_ROWS) < STRANGE, "z", "a")
    table = pa.table(
        {"who": np.arange(N_ROWS), "income": rng.permutation(income), "kind": rng.permutation(kind)}
    )
    table = table.append_column("day", pa.array(rng.integers(0, 366, N_ROWS), pa.int32()))
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in" / "part.parquet", row_group_size=1500)
    mechanism = {"kind": "dip", "reference": {"kind": "histogram"}}
    return write_job(
        tmp_path,
        tmp_path / "in",
        tmp_path / "out",
        schema=SCHEMA,
        mechanism=mechanism,
        output__rows_per_shard=2000,
    )


def nowhere(text):
    return not any(holds_number(text, number) for number in (TOO_RICH, STRANGE))


def test_counts_stand_on_the_terminal_and_in_no_file(job, tmp_path):
    ended = call_cli("run", job, terminal=True)
    out, shown = ended.stdout, ended.stderr
    for name, text in TOLD.items():
        assert f"column '{name}': {text}" in shown
    assert "'day'" not in shown
    assert nowhere(out)
    for path in (
        path
        for path in tmp_path.joinpath("out").rglob("*")
        if path.suffix not in (".parquet", ".arrow") and path.is_file()  # rows, and noisy counts
    ):
        if path.suffix == ".html":
            assert nowhere(re.sub(r"[0-9a-f]{64}", "", path.read_text())), path
            continue
        content = json.loads(path.read_text() or "{}")
        for shard in content.get("shards", []):
            del shard["sha256"], shard["n_bytes"]
        content.pop("card_sha256", None)
        assert nowhere(
            json.dumps(
                {
                    key: value
                    for key, value in content.items()
                    if key not in ("columns", "accounting")
                }
            )
        ), path
    assert not hidden(tmp_path / "out").exists()


def test_without_a_terminal_nobody_is_told(job):
    found = call_cli("run", job)
    assert found.returncode == 0
    assert nowhere(found.stdout)
    assert "outside" not in found.stderr


def test_json_tells_nobody_even_on_a_terminal(job):
    found = call_cli("run", job, "--json", terminal=True)
    assert json.loads(found.stdout)["status"] == "released"
    assert nowhere(
        str({key: value for key, value in json.loads(found.stdout).items() if key != "bytes"})
    )
    assert "outside" not in found.stderr


def test_a_resumed_run_tells_what_the_first_one_counted(job, tmp_path, monkeypatch):
    def crash(*_):
        raise TemporaryError("crash")

    with monkeypatch.context() as struck:
        struck.setattr(Folder, "move_to", crash)
        with pytest.raises(TemporaryError):
            run_here(job)
    outcome = run_here(job)
    assert outcome.told.changed == {"income": TOO_RICH, "kind": STRANGE}
    assert nowhere(repr(outcome))
    assert run_here(job).told == Told()


def test_only_released_rows_are_counted(job, tmp_path):
    outcome = run_here(job, mechanism__reference="{kind: holdout, fraction: 0.5}")
    share = outcome.told.changed["income"] / TOO_RICH
    assert 0.4 < share < 0.6
    clean = run_here(job, output__path=tmp_path / "clean", input__path=clean_copy(tmp_path))
    assert clean.told.changed == {}


def clean_copy(folder):
    table = pq.read_table(folder / "in")
    inside = np.minimum(table["income"].to_numpy(), 1000.0)
    kind = [kind if kind == "a" else "b" for kind in table["kind"].to_pylist()]
    (folder / "inside").mkdir()
    columns = {"who": table["who"], "income": inside, "kind": kind, "day": table["day"]}
    pq.write_table(pa.table(columns), folder / "inside" / "part.parquet")
    return folder / "inside"


@pytest.mark.parametrize(
    "mechanism", ["{kind: marginals, cliques: [[income], [kind]]}", "{kind: copula}"]
)
def test_what_is_counted_at_the_barrier_is_told_too(mechanism, job, tmp_path):
    job.with_name("schema.yaml").write_text(
        yaml.safe_dump({"columns": {**SCHEMA, "who": {"role": "drop"}}})
    )
    outcome = run_here(job, mechanism=mechanism)
    assert outcome.told.changed == {"income": TOO_RICH, "kind": STRANGE}
    assert not hidden(tmp_path / "out").exists()


@pytest.mark.parametrize("strict", [False, True])
def test_a_strict_ledger_tells_nobody(strict, job, tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(url).init("people", 100.0, strict=strict)
    ledger = f"ledger={{url: '{url}', dataset: people}}"
    found = call_cli("run", job, "--set", ledger, "--set", "insecure_seed=null", terminal=True)
    assert found.returncode == 0
    assert ("4,711 values were outside" in found.stderr) is not strict
    assert ("outside" in found.stderr) is not strict


def test_what_is_told_merges_in_order_and_comes_back_from_a_record():
    parts = [
        Told(
            changed={"a": 2},
            order={
                "a": ColumnOrder.of_batch(np.array([1, 2])),
                "b": ColumnOrder.of_batch(np.array([1.5])),
            },
        ),
        Told(
            changed={"a": 1, "b": 1},
            order={
                "a": ColumnOrder.of_batch(np.array([2, 5])),
                "b": ColumnOrder.of_batch(np.array([0.5])),
            },
        ),
        Told(),
        Told(order={"a": ColumnOrder.of_batch(np.array([4]))}),
    ]
    one, two, three, four = parts
    merged = one.merge(two, three, four)
    assert merged == one.merge(two).merge(three.merge(four)) == Told().merge(*parts)
    assert merged.changed == {"a": 3, "b": 1}
    assert (merged.order["a"].is_sorted, merged.order["b"].is_sorted) == (False, True)
    for told in (*parts, merged):
        assert Told.from_dict(json.loads(json.dumps(told.to_dict()))) == told
