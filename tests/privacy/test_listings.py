"""What a store lists while a run is at work, names and sizes, is the same for neighbouring tables; names of random parts apart."""

import re
import uuid
from itertools import product
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e.helpers import HOLDOUT, run_here, write_job
from privacy.neighbour_cases import CENTRAL_SCHEMA, DIP_SCHEMA, WHO, P
from privacy.test_neighbours import CASES, SOLVED, placed
from services.stores import forget_file_systems

from dpdask.engine import compute, scan
from dpdask.engine.fit import Fitted
from dpdask.engine.write import Staging, Told, stage
from dpdask.io.encrypted import EncryptedFolder, drop_key, hold_key
from dpdask.io.fragments import discover
from dpdask.io.storage import Folder
from dpdask.jobs.run_keys import HostKeys
from dpdask.jobs.series import Kept, KeptFile
from dpdask.jobs.state import RunRecord, RunState
from dpdask.schema import Schema
from dpdask.stats.statistic import ColumnOrder

KEY = b"k" * 32
Listing = set[tuple[str, int]]


@pytest.fixture(autouse=True)
def _often(monkeypatch, tmp_path):
    """Keep the counts of each pass, as of a long one."""
    monkeypatch.setattr(scan, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(scan, "_KEEP_SHARE", 1e9)
    monkeypatch.setattr(compute, "_LARGEST_BATCH", 8)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield
    forget_file_systems()


def list_run(folder, parts, **changes):
    """Return names, without their random parts, and sizes of all that a store lists during a run; and the names as they are."""
    source = folder / uuid.uuid4().hex
    source.mkdir(parents=True)
    for number, part in enumerate(parts):
        pq.write_table(
            part.replace_schema_metadata({"part": str(number)}), source / f"{number}.parquet"
        )
    output, found, names = f"memory://{source.name}/out", set(), set()

    def look(*_):
        listed = fsspec.filesystem("memory").find(f"/{source.name}/.out.dpdask", detail=True)
        names.update(listed)
        found.update(
            (
                re.sub("[0-9a-f]{32}|(?<=part-)[0-9]{5}", "#", path.partition(".out.dpdask")[2]),
                info["size"],
            )
            for path, info in listed.items()
            if "beat" not in path
        )

    run_here(
        write_job(
            source / "job",
            source,
            Path("out"),
            output__path=output,
            output__rows_per_shard=10_000,
            **changes,
        ),
        look,
        insecure_seed=3,
    )
    return found, names


def fragment_ids(folder, parts, schema):
    folder.mkdir()
    for number, part in enumerate(parts):
        pq.write_table(
            part.replace_schema_metadata({"part": str(number)}), folder / f"{number}.parquet"
        )
    return [
        fragment.id
        for fragment in discover(str(folder), Schema.from_dict({"columns": schema})).fragments
    ]


@pytest.mark.few(10)
@pytest.mark.parametrize("name", [name for name in CASES if name != SOLVED])
def test_neighbours_are_listed_alike(name, tmp_path):
    case = CASES[name]
    changes = placed(case, tmp_path)
    (left, names), (right, others) = (
        list_run(tmp_path, parts, schema=case.schema, **changes) for parts in case.tables()
    )
    assert not left ^ right
    assert any("release.npz" in name for name, _ in left)
    ids = fragment_ids(tmp_path / "ids", case.tables()[0], case.schema)
    assert not any(each in name for each in ids for name in names | others)


def people(n_over, n=400):
    """A table in which some people have more rows than may be released."""
    who = np.sort(np.concatenate([np.repeat(np.arange(n_over), 3), np.arange(n_over, n)]))
    rows = len(who)
    columns = {
        "id": np.arange(rows),
        "who": who,
        "x": np.arange(rows) % 3,
        "y": np.array(["a", "b"])[np.arange(rows) % 2],
    }
    table = pa.table(columns | {"p": np.full(rows, 0.5), "q": np.full(rows, 0.5)})
    return [table.slice(0, 200), table.slice(200)]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "adjacency"),
    [
        ("dip", "replace-one"),
        *product(["marginals", "copula", "histogram"], ["replace-one", "add-remove"]),
    ],
)
def test_how_many_people_have_too_many_rows_is_not_listed(kind, adjacency, tmp_path):
    more = {"dip": {"reference": {"kind": "histogram"}}, "marginals": {"cliques": [["x"]]}}
    mechanism = {"kind": kind, **more.get(kind, {})}
    promise = {
        "privacy__unit": WHO,
        "privacy__adjacency": adjacency,
        "schema": DIP_SCHEMA if kind == "dip" else CENTRAL_SCHEMA,
    }
    listed = [
        list_run(tmp_path, people(n_over), mechanism=mechanism, **promise)[0]
        for n_over in (0, 127, 129)
    ]
    assert not [each ^ listed[0] for each in listed if each != listed[0]]


def scattered(n_cells, n=3000):
    """A table whose rows lie in so many cells."""
    cells = np.arange(n) % n_cells
    return [
        pa.table({"p": (cells % 60 + 0.5)[part::24] / 60, "q": (cells // 60 + 0.5)[part::24] / 60})
        for part in range(24)
    ]


@pytest.mark.parametrize(
    ("mechanism", "adjacency"),
    [
        *product([{"kind": "histogram", "bins": 60}], ["replace-one", "add-remove"]),
        ({"kind": "dip", "reference": HOLDOUT}, "replace-one"),
    ],
)
def test_how_many_cells_or_values_occur_is_not_listed(mechanism, adjacency, tmp_path):
    kept = []
    for n_cells in (1, 252, 253, 255, 256, 512, 2000):
        listed, _ = list_run(
            tmp_path,
            scattered(n_cells),
            mechanism=mechanism,
            schema={"p": P, "q": P},
            privacy__adjacency=adjacency,
        )
        kept.append(
            {(name, size) for name, size in listed if "noisy" not in name and "release" not in name}
        )  # these tell what the noise protects
    assert not [each ^ kept[0] for each in kept if each != kept[0]]
    assert any("counts-0" in name for name, _ in kept[0]) == (adjacency == "replace-one")


def test_the_records_of_a_run_are_of_one_length_whatever_they_count():
    """Where the content is about as long as a power of two, one digit more would tell that a count is larger."""
    folder, run_id = Folder("memory://records/out"), uuid.uuid4().hex
    state = RunState(folder)
    HostKeys().write(run_id, KEY)
    hold_key(run_id, KEY)

    def size_of_record(counts):
        with state.records.lock():
            state.write(
                RunRecord(
                    run_id=run_id,
                    job="j",
                    release="r",
                    input="i",
                    stage="fitted",
                    fitted=Fitted(release_sha256="", n_released=counts),
                )
            )
            names = [name for name in state.folder.names() if name.startswith("run-")]
            return len(state.folder.read(sorted(names)[-1]))

    def size_of_series(n_bytes, n_files):
        file = KeptFile(number=0, name="f", url="u", n_bytes=n_bytes, version="v", fragments=("a",))
        return len(
            Kept(id="i", salt="s", release="r", files=(file,) * n_files, sizes=()).to_bytes()
        )

    def size_told(told, n_columns):
        secrets = EncryptedFolder("memory://records/actions", run_id)
        names = [f"c{number}" for number in range(n_columns)]
        told = Told(
            changed=dict.fromkeys(names if told.changed else [], 10**15),
            order=dict.fromkeys(names, told.order["x"]),
        )
        stage(
            [],
            pa.schema([("x", pa.int64())]),
            (),
            ("part-0.parquet",),
            1,
            Staging(shards=folder, actions=secrets),
            lambda: told,
        )
        return len(Folder.read(secrets, "part-0.parquet.json"))

    far = ColumnOrder(
        first=(-1.2345678901234567e-300, -1.2345678901234567e-300),
        last=(-1.2345678901234567e-300, 2**63),
        rises=True,
    )
    little, much = Told(order={"x": ColumnOrder()}), Told(changed={"x": 1}, order={"x": far})
    try:
        for n in range(1, 400, 7):
            assert size_of_record((0,) * n) == size_of_record((10**18,) * n)
            assert size_of_series(1, n) == size_of_series(10**18, n)
        assert all(size_told(little, n) == size_told(much, n) for n in range(1, 100))
    finally:
        drop_key(run_id)
