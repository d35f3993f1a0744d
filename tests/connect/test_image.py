"""The image of cluster/kubernetes without a container engine: its files, its two stages as folders, and jobs that are planned with what it installs."""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import fsspec
import pyarrow.parquet as pq
import pytest
import yaml
from connect.processes import ROOT
from deltalake import write_deltalake
from e2e.helpers import lake, write_job

from dpdask.version import __version__

LINES = [
    line.split(maxsplit=1)
    for line in (ROOT / "cluster/kubernetes/Containerfile").read_text().splitlines()
    if line and not line.startswith("#")
]
IGNORED = (ROOT / ".dockerignore").read_text().split()
CONNECTORS = "adlfs gcsfs s3fs deltalake pyiceberg psycopg kr8s dask_kubernetes openlineage"


def stages():
    """Return the instructions of each stage."""
    begins = [number for number, (word, _) in enumerate(LINES) if word == "FROM"]
    ends = [*begins[1:], len(LINES)]
    return [LINES[begin:end] for begin, end in zip(begins, ends, strict=True)]


def copied(stage):
    """Return what a stage takes from the folder of work."""
    words = [text.split() for word, text in stage if word == "COPY"]
    return [name for names in words if not names[0].startswith("--") for name in names[:-1]]


def test_nothing_of_the_folder_of_work_gets_into_the_image_but_what_is_named():
    first, second = stages()
    assert sorted({*copied(first), *copied(second)}) == sorted(
        [line[1:] for line in IGNORED if line.startswith("!")]
    )
    assert "*" in IGNORED  # all else stays outside
    assert copied(second) == ["constraints.txt"]
    assert ("COPY", "--from=build /wheels /wheels") in [tuple(line) for line in second]


def test_no_version_stands_where_it_would_be_forgotten():
    for path in (ROOT / "cluster").rglob("*"):
        if path.is_file() and path.suffix in (".yaml", ".md", "", ".service"):
            text = path.read_text(errors="replace")
            assert not re.search(r"dpdask:\d", text), path
            if path.suffix == ".yaml":
                images = re.findall(r"^\s*image: (.*)$", text, re.MULTILINE)
                assert set(images) <= {"IMAGE"}, path


def build(folder):
    """Run both stages in folders, as far as they can be told from a container's; return the folder of the image's programs."""
    python = shutil.which("python3.11") or sys.executable
    first, second = stages()
    made = {"/src": folder / "src", "/wheels": folder / "wheels"}
    for place in made.values():
        place.mkdir()
    for name in copied(first):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, made["/src"] / name)
    shutil.copy(ROOT / "constraints.txt", made["/wheels"])
    bins = folder / "image" / "bin"
    subprocess.run([python, "-m", "venv", folder / "image"], check=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**clean, "PATH": f"{bins}{os.pathsep}{os.environ['PATH']}"}
    for stage in (first, second):
        for word, text in stage:
            if word != "RUN" or text.startswith("useradd"):
                continue
            command = text
            for place, folder_ in made.items():
                command = command.replace(place, str(folder_))
            done = subprocess.run(
                ["sh", "-ec", command],
                cwd=made["/src"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-2000:]
    return bins, environment


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_jobs_on_s3_and_on_delta_are_planned_in_the_image(open_store, tmp_path):
    bins, environment = build(tmp_path)
    [wheel] = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        tops = {name.partition("/")[0] for name in opened.namelist()}
    assert tops == {"dpdask", f"dpdask-{__version__}.dist-info"}

    def call(*words, **around):
        done = subprocess.run(
            [bins / words[0], *words[1:]],
            cwd=tmp_path,
            env={**environment, **around},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert __version__ in call("dpdask", "--version")
    call("python", "-c", f"import {', '.join(CONNECTORS.split())}")
    source = lake(tmp_path / "in", [40, 40])
    write_deltalake(str(tmp_path / "delta"), pq.read_table(source))
    with open_store("radosgw") as store:
        around = store.server.environment()
        place = store.folder.url.rpartition("/")[0]
        files, _ = fsspec.core.url_to_fs(place)
        for path in source.iterdir():
            files.put(str(path), f"{place}/raw/{path.name}")
        job = write_job(tmp_path / "s3", f"{place}/raw", tmp_path, output__path=store.folder.url)
        assert "80 rows" in call("dpdask", "plan", str(job), **around)
        job = write_job(
            tmp_path / "job",
            tmp_path / "delta",
            tmp_path,
            input__format="delta",
            output__path=store.folder.url,
            output__format="delta",
        )
        assert yaml.safe_load(job.read_text())["input"]["format"] == "delta"
        assert "80 rows" in call("dpdask", "plan", str(job), **around)
