"""Small releases with hostile names, and what their pages hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from e2e.helpers import categorical, continuous, load, run_here, write_job

from dpdask.io.shards import CARD_NAME, Manifest
from dpdask.io.storage import Folder
from dpdask.jobs.plan import make_page_of_plan, plan_job
from dpdask.mechanisms.card import Card

EVIL = "<script>document.title='run'</script>"
LEVEL = '"><img src=x onerror="document.title=1">'
ABOUT = {
    "issuer": "</style><script>alert(1)</script>",
    "contact": "privacy@example.org",
    "licence": "CC-BY-4.0",
    "purpose": "Tests.",
    "domains": "By us.",
}
SCHEMA = {
    EVIL: categorical(["$a$", LEVEL, "ü"], type="string"),
    "income": continuous([0.0, 1000.0], nulls="level", type="float64"),
    "day": continuous([18262, 19000], type="date32"),
    "group": {"role": "keep", "type": "string"},
    "name": {"role": "drop", "type": "string"},
}
SEVEN = {
    **{f"{name} {copy}": SCHEMA[name] for copy in (1, 2) for name in (EVIL, "income", "day")},
    "income 3": SCHEMA["income"],
}
VOID = {"meta", "img", "br", "input"}


def write_table(folder, columns=(), n_rows=600):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    income = np.where(rng.random(n_rows) < 0.1, None, rng.gamma(2.0, 100.0, n_rows).clip(0, 1000))  # type: ignore[call-overload]  # of objects
    table = pa.table(
        {
            EVIL: pa.array(np.array(["$a$", LEVEL, "ü"])[rng.choice(3, n_rows, p=[0.6, 0.3, 0.1])]),
            "income": pa.array(income, pa.float64(), from_pandas=True),
            "day": pa.array(rng.integers(18300, 18900, n_rows).astype("int32"), pa.int32()).cast(
                pa.date32()
            ),
            "group": pa.array(np.array(["x", "y"])[rng.integers(0, 2, n_rows)]),
            "name": pa.array(["n"] * n_rows),
        }
    )
    for name in columns:
        if name in SEVEN:
            table = table.append_column(name, table[name[:-2]])
    pq.write_table(table, folder / "part.0.parquet")
    return folder


def write(folder, **changed):
    """Write the table and a job that releases it, and return the job."""
    given = {
        "schema": SCHEMA,
        "about": ABOUT,
        "mechanism__reference": {"kind": "histogram"},
        "mechanism__channel": "optimal",
        **changed,
    }
    table = write_table(folder / "in", given["schema"])
    return write_job(folder, table, folder / "out", **given)


def release(folder, **changed):
    """Release the table and return the output."""
    run_here(write(folder, **changed))
    return folder / "out"


def plan_page(folder, **changed):
    """Return the page of the plan of a release."""
    job = load(write(folder, **changed))
    return make_page_of_plan(job, plan_job(job))


def synthetic(folder, **changed):
    """Release synthetic records."""
    columns = {
        name: {"role": "drop"} if name == "group" else column for name, column in SCHEMA.items()
    }
    return release(
        folder,
        **{
            "schema": columns,
            "mechanism": {"kind": "copula", "n_rows": "input"},
            "privacy__delta": 1e-6,
            **changed,
        },
    )


def parts(output):
    """Return what a page is made from."""
    folder = Folder(f"file://{output}")
    manifest = Manifest.read(folder)
    assert manifest is not None
    return Card.read(folder.read(CARD_NAME), CARD_NAME), manifest, folder


@dataclass
class Page(HTMLParser):
    """What a page holds, as a parser of HTML sees it."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    open_: list[str] = field(default_factory=list)
    headings: list[int] = field(default_factory=list)

    def __post_init__(self):
        super().__init__()

    @classmethod
    def read(cls, data):
        page = cls()
        page.feed(data.decode())
        page.close()
        assert page.open_ == []
        return page

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open_.append(tag)
        if tag in ("h1", "h2", "h3"):
            self.headings.append(int(tag[1]))

    def handle_endtag(self, tag):
        assert self.open_.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]
