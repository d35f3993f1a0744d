"""What a release's files hold beside the released rows: nothing. Footers and documents against allow-lists, and planted secrets searched for."""

import base64
import json
import math
import re
import subprocess
import sys
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml
from e2e.bad_input import command
from e2e.helpers import categorical, continuous, discrete, read_card, spy_on_stages

from dpdask.io import shards as shards_module
from dpdask.jobs.spec import load_job

DROPPED = "Zebulon-Quux-dropped"
UNUSED = "Zebulon-Quux-unused"
METADATA = "Zebulon-Quux-metadata"
OUTSIDE = "Zebulon-Quux-outside"
HELD_OUT = "Zebulon-Quux-row-{}"
FOLDER = "Zebulon-Quux-folder"
SECRETS = (DROPPED, UNUSED, METADATA, OUTSIDE, FOLDER)

N_ROWS = 600
GENRES = ["comedy", "drama", "horror"]
SCHEMA = {
    "id": {"role": "keep"},
    "place": {"role": "keep"},
    "genre": categorical(GENRES),
    "rating": discrete([1.0, 2.0, 3.0, 4.0, 5.0]),
    "price": continuous([0.0, 100.0]),
    "note": {"role": "drop"},
}


def dictionary(values, unused):
    """Return values as a dictionary in which one more category stands and is never used."""
    categories = [unused, *sorted(set(values))]
    return pa.DictionaryArray.from_arrays(
        pa.array([categories.index(value) for value in values], pa.int32()), pa.array(categories)
    )


def lake(folder, outside=False):
    """Write files full of secrets: categories, metadata of three kinds, a pandas index, a dropped column, one row each in `id`."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(5)
    for part in range(2):
        genre = [*rng.choice(GENRES, N_ROWS)]
        if outside and part == 1:
            genre[-1] = OUTSIDE
        table = pa.table(
            {
                "id": pa.array([HELD_OUT.format(f"{part}-{row:04}") for row in range(N_ROWS)]),
                "place": dictionary([*rng.choice(["north", "south"], N_ROWS)], UNUSED),
                "genre": dictionary(genre, UNUSED),
                "rating": pa.array(rng.choice([1.0, 2.0, 3.0, 4.0, 5.0], N_ROWS)),
                "price": pa.array(rng.uniform(0, 100, N_ROWS)),
                "note": pa.array([DROPPED] * N_ROWS),
            }
        )
        described = pa.schema(
            [field.with_metadata({"field": METADATA}) for field in table.schema],
            metadata={"file": METADATA, "pandas": json.dumps({"index": METADATA})},
        )
        with pq.ParquetWriter(
            folder / f"part-{part}.parquet", described, store_schema=True, write_page_index=True
        ) as writer:
            writer.write_table(table.cast(described), row_group_size=N_ROWS)
            writer.add_key_value_metadata({"late": METADATA})
    return folder


def write_job(folder, source, **cluster):
    (folder / "schema.yaml").write_text(yaml.safe_dump({"columns": SCHEMA}, sort_keys=False))
    job = {
        "name": "clean",
        "input": {"path": source},
        "output": {"path": "out", "rows_per_shard": 500},
        "schema": "schema.yaml",
        "privacy": {"epsilon": 1.0},
        "mechanism": {"kind": "dip", "reference": {"kind": "holdout", "fraction": 0.25}},
        "cluster": cluster or {"kind": "synchronous"},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    return ["run", str(folder / "job.yaml")]


def everything(path):
    """Return a file's bytes, and, of a Parquet file, its footer and every page decompressed, dictionaries apart."""
    data = path.read_bytes()
    if path.suffix != ".parquet":
        return data
    file = pq.ParquetFile(path)
    texts = [
        str(file.metadata),
        str(file.schema),
        str(file.metadata.metadata),
        str(file.schema_arrow.metadata),
    ]
    names = file.schema_arrow.names
    for group in range(file.metadata.num_row_groups):
        for number in range(len(names)):
            chunk = file.metadata.row_group(group).column(number)
            texts.append(str(chunk.to_dict()))
            texts.append(str(chunk.statistics and (chunk.statistics.min, chunk.statistics.max)))
        strings = [name for name in names if pa.types.is_string(file.schema_arrow.field(name).type)]
        encoded = pq.ParquetFile(path, read_dictionary=strings).read_row_group(group)
        texts += [
            str(chunk.dictionary.to_pylist())
            for name in strings
            for chunk in encoded.column(name).chunks
        ]
        texts += [str(file.read_row_group(group, columns=[name]).to_pydict()) for name in names]
    return data + "\n".join(texts).encode()


def forms(secret):
    """Return a secret as it might be written: plain, wide, in hexadecimal, in Base64."""
    plain = secret.encode()
    return [
        plain,
        secret.encode("utf-16-le"),
        plain.hex().encode(),
        *(base64.b64encode(b"x" * shift + plain)[4:-4] for shift in range(3)),
    ]


def holds(data, *secrets):
    return [secret for secret in secrets if any(form in data for form in forms(secret))]


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    lake(folder / FOLDER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "ROW_GROUP_ROWS", 200)
        ended = command(*write_job(folder, FOLDER))
    assert ended.code == 0, ended.err
    return folder, ended


def shards(folder):
    return sorted(folder.glob("part-*.parquet"))


# ---- footers


def assert_plain(schema):
    assert schema.metadata is None
    assert all(set(field.metadata or {}) <= {b"PARQUET:field_id"} for field in schema)
    assert not any(pa.types.is_dictionary(field.type) for field in schema)


def test_a_footer_holds_the_fixed_schema_and_nothing_of_its_source(released):
    paths = shards(released[0] / "out")
    assert len(paths) > 1
    for path in paths:
        metadata = pq.read_metadata(path)
        assert set(metadata.metadata or {}) <= {
            b"ARROW:schema"
        }  # types alone, so that each comes back as it was
        assert_plain(
            pa.ipc.read_schema(
                pa.py_buffer(base64.b64decode((metadata.metadata or {})[b"ARROW:schema"]))
            )
        )
        assert re.fullmatch(r"parquet-cpp-arrow version [\d.]+", metadata.created_by)
        arrow = metadata.schema.to_arrow_schema()
        assert_plain(arrow)
        expected = [
            ("id", pa.string()),
            ("place", pa.string()),
            ("genre", pa.string()),
            ("rating", pa.float64()),
            ("price", pa.float64()),
        ]
        assert [(field.name, field.type) for field in arrow] == expected
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(number)
                assert not chunk.file_path
                assert chunk.compression == "SNAPPY"
                assert (
                    chunk.has_column_index,
                    chunk.has_offset_index,
                    chunk.bloom_filter_offset,
                ) == (False, False, None)


def test_statistics_and_dictionaries_are_those_of_the_released_rows(released):
    for path in shards(released[0] / "out"):
        file = pq.ParquetFile(path)
        sizes = [
            file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)
        ]
        assert sizes[:-1] == [200] * (len(sizes) - 1)
        assert 0 < sizes[-1] <= 200
        for group in range(file.metadata.num_row_groups):
            rows = file.read_row_group(group)
            strings = [
                name
                for name in rows.column_names
                if pa.types.is_string(rows.schema.field(name).type)
            ]
            encoded = pq.ParquetFile(path, read_dictionary=strings).read_row_group(group)
            for number, name in enumerate(rows.column_names):
                statistics = file.metadata.row_group(group).column(number).statistics
                extremes = pc.min_max(rows.column(name)).as_py()
                assert (statistics.min, statistics.max, statistics.null_count) == (
                    extremes["min"],
                    extremes["max"],
                    rows.column(name).null_count,
                )
                assert statistics.distinct_count in (
                    None,
                    pc.count_distinct(rows.column(name)).as_py(),
                )
                if name in strings:
                    assert {
                        entry
                        for chunk in encoded.column(name).chunks
                        for entry in chunk.dictionary.to_pylist()
                    } == set(rows.column(name).to_pylist())


# ---- documents

MANIFEST_KEYS = {"format", "job", "rows", "card_sha256", "shards"}
SHARD_KEYS = {"name", "n_rows", "n_bytes", "sha256"}
META_FILES = ("manifest.json", "release.json", "release.html", "croissant.json")
CARD_KEYS = {
    "": {
        "format",
        "name",
        "release",
        "terms",
        "guarantee",
        "mechanism",
        "columns",
        "dropped",
        "accounting",
        "order",
        "insecure",
        "versions",
    },
    "guarantee": {
        "text",
        "parts",
        "epsilon",
        "delta",
        "adjacency",
        "unit",
        "protected",
        "unprotected",
        "cautions",
    },
    "mechanism": {"kind", "channel", "columns", "joint", "reference"},
    "accounting": {"composition", "epsilon_exact", "epsilon_reference", "rows_per_unit", "events"},
    "versions": {"dpdask", "streams", "cryptography", "numpy", "opendp", "pyarrow", "scipy"},
}
LEVEL_KEYS = {"role", "kind", "outside", "epsilon", "epsilon_exact", "levels", "channel"}
RANK_KEYS = {
    "role",
    "kind",
    "outside",
    "epsilon",
    "epsilon_exact",
    "bounds",
    "atoms",
    "nulls",
    "ranks",
    "alpha_log",
    "reference",
}


def test_the_output_folder_holds_these_files_and_no_other(released):
    folder = released[0]
    names = {
        str(path.relative_to(folder / "out"))
        for path in (folder / "out").rglob("*")
        if path.is_file()
    }
    assert names == {
        *(path.name for path in shards(folder / "out")),
        "_SUCCESS",
        *(f"_dpdask/{name}" for name in META_FILES),
    }
    assert sorted(path.name for path in folder.iterdir()) == [
        FOLDER,
        "job.yaml",
        "out",
        "schema.yaml",
    ]
    assert not (folder / "out" / "_SUCCESS").read_bytes()


def test_manifest_and_card_hold_the_allowed_keys_alone(released):
    meta = released[0] / "out" / "_dpdask"
    manifest, card = (
        json.loads((meta / name).read_text()) for name in ("manifest.json", "release.json")
    )
    assert set(manifest) == MANIFEST_KEYS
    assert all(set(shard) == SHARD_KEYS for shard in manifest["shards"])
    for place, keys in CARD_KEYS.items():
        assert set(card[place] if place else card) == keys, place
    assert {name: set(column) for name, column in card["columns"].items()} == {
        "genre": LEVEL_KEYS,
        "rating": LEVEL_KEYS,
        "price": RANK_KEYS,
        "id": {"role"},
        "place": {"role"},
    }
    assert card["mechanism"]["reference"] == {"kind": "holdout", "fraction": 0.25}
    told = card["columns"]["price"]["reference"]
    # of the held-out rows, which nothing protects: a share in two digits
    spread = told.pop("spread_rank_at_most")
    assert spread == float(f"{spread:.2g}")
    assert told == {"knots_at_most": 2**16, "rank_error_at_most": 2.0**-15}


def test_a_card_names_no_path_and_tells_nothing_of_a_dropped_column_but_its_name(released):
    for path in (released[0] / "out" / "_dpdask").iterdir():
        assert str(released[0]) not in path.read_text()
    card = read_card(released[0])
    assert "note" not in card["columns"]
    assert "note" in card["dropped"]


# ---- planted secrets


def test_no_secret_is_in_any_file_or_on_any_stream(released):
    folder, ended = released
    assert holds(everything(folder / FOLDER / "part-0.parquet"), DROPPED, UNUSED, METADATA) == [
        DROPPED,
        UNUSED,
        METADATA,
    ]  # the search finds
    for path in (folder / "out").rglob("*"):
        if path.is_file():
            assert not holds(everything(path), *SECRETS), path
    assert not holds((ended.out + ended.err).encode(), *SECRETS, HELD_OUT[:-2])


def test_the_kept_values_of_held_out_rows_are_nowhere_in_the_output(released):
    folder = released[0]
    kept = set(pq.read_table(folder / "out").column("id").to_pylist())
    held_out = set(pq.read_table(folder / FOLDER, columns=["id"]).column("id").to_pylist()) - kept
    n_rows = 2 * N_ROWS
    assert abs(len(held_out) - n_rows / 4) < 6 * math.sqrt(n_rows * 3 / 16)
    for path in (folder / "out").rglob("*"):
        if path.is_file():
            data = everything(path)
            assert not [value for value in held_out if value.encode() in data], path


def test_a_privatised_columns_original_doubles_are_not_in_the_output(released):
    """A continuous value is drawn anew between two hold-out values: no released row keeps all digits of its own."""
    folder = released[0]
    original = (
        pq.read_table(folder / FOLDER).to_pandas(ignore_metadata=True).set_index("id")["price"]
    )
    output = pq.read_table(folder / "out").to_pandas(ignore_metadata=True).set_index("id")["price"]
    assert (original.loc[output.index] == output).sum() == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("outside", [False, True], ids=["released", "failing"])
def test_local_workers_say_nothing_of_the_data(outside, tmp_path):
    lake(tmp_path / "lake", outside=outside)
    words = write_job(tmp_path, "lake", kind="local", workers=1)
    ended = subprocess.run(
        [sys.executable, "-c", "from dpdask.cli import main; main()", *words],
        capture_output=True,
        cwd=tmp_path,
        check=False,
    )
    assert ended.returncode == (65 if outside else 0), ended.stderr
    assert not holds(ended.stdout + ended.stderr, *SECRETS, HELD_OUT[:-2])
    lines = [line for line in ended.stderr.decode().splitlines() if not line.startswith('{"time"')]
    assert len(lines) == outside, lines
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "job.yaml",
        "lake",
        *(["out"] if not outside else []),
        "schema.yaml",
    ]


def test_task_names_progress_and_graphs_hold_no_value_and_no_key(tmp_path, monkeypatch):
    lake(tmp_path / "lake")
    words = write_job(tmp_path, "lake")
    job = load_job(words[1])
    seen = []

    def see(stage, nodes):
        import pickle

        import cloudpickle

        key = (tmp_path / ".out.dpdask" / "run.key").read_bytes()
        seen.append(" ".join(map(str, nodes)).encode())
        whole = cloudpickle.dumps(nodes)
        assert key not in whole
        assert key.hex().encode() not in whole
        seen.append(whole)
        assert pickle.loads(whole)
        seen.append(stage.encode())

    from dpdask.jobs.run import run_job

    spy_on_stages(see, monkeypatch)
    run_job(job, lambda *event: seen.append(str(event).encode()))
    assert len(seen) > 4
    names = b" ".join(seen)
    assert not holds(names, *SECRETS, HELD_OUT[:-2])


def test_an_unfinished_run_keeps_no_secret_but_the_reference(tmp_path):
    """What stays after a crash is private, and mode 0700; still no dropped column, metadata or held-out id is in it."""
    from dpdask.errors import TemporaryError

    lake(tmp_path / "lake")
    words = write_job(tmp_path, "lake")
    with mock.patch(
        "dpdask.jobs.run.make_job_card", side_effect=TemporaryError("crash")
    ):  # after all shards are staged
        assert command(*words).code == 75
    state = tmp_path / ".out.dpdask"
    assert not (tmp_path / "out").exists()
    assert state.stat().st_mode & 0o777 == 0o700
    for name in ("run.key", "run.json", "release.npz"):
        assert (state / name).stat().st_mode & 0o077 == 0, name
    staged = {
        value
        for path in next(state.glob("publish-*")).glob("*.parquet")
        for value in pq.read_table(path).column("id").to_pylist()
    }
    held_out = {
        HELD_OUT.format(f"{part}-{row:04}") for part in range(2) for row in range(N_ROWS)
    } - staged
    assert held_out
    for path in state.rglob("*"):
        if path.is_file():
            data = everything(path)
            assert not holds(data, *SECRETS[:4]), path
            assert not [value for value in held_out if value.encode() in data], path
