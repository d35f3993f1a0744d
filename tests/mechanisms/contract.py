"""What every mechanism promises, whatever it releases: a test class gives its case and inherits the tests."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from functools import partial
from html import escape, unescape
from typing import Any, ClassVar

import dask
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client
from e2e.helpers import (
    charging_entries,
    continuous,
    digests,
    discrete,
    hidden,
    load,
    run_here,
    write_job,
)

import dpdask
from dpdask.analysis.opened import QUESTIONS
from dpdask.engine import fit as fit_module
from dpdask.engine.account import Account, LedgerPlace, open_ledger
from dpdask.errors import BudgetError, DataError, SpecError
from dpdask.estimators.estimator import Estimator
from dpdask.inference import least_squares
from dpdask.io.shards import PAGE_NAME
from dpdask.io.storage import Folder
from dpdask.jobs import run as run_module
from dpdask.jobs import spec
from dpdask.jobs.plan import audit_job, make_page_of_plan, plan_job
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import open_table
from dpdask.jobs.state import RunState
from dpdask.mechanisms.card import Card, find_guidance
from dpdask.mechanisms.mechanism import Mechanism
from dpdask.privacy.events import LocalRelease, leaves
from dpdask.schema import Schema

N_ROWS = 240
LEVELS = [1, 2, 3, 4]
SCHEMA = {
    "level": discrete(LEVELS, type="int64"),
    "line": continuous([0.0, 10.0], type="float64"),
}
KEPT = {"who": {"role": "keep", "type": "int64"}}
PRIVACY = {"epsilon": 4.0, "delta": 0, "adjacency": "replace-one", "unit": "row"}


def list_odd_numbers(output, page):
    """Return the numbers with seven digits after the point or exponents of floats' limits in what people read: a page, and the texts of a card and a release."""

    def list_texts(value):
        if isinstance(value, dict | list):
            values = value.values() if isinstance(value, dict) else value
            return [text for inner in values for text in list_texts(inner)]
        return [value] if isinstance(value, str) else []

    card = json.loads((output / "_dpdask" / "release.json").read_bytes())
    columns = [column for path in output.glob("*.parquet") for column in pq.read_table(path)]
    released = [column.to_pylist() for column in columns if pa.types.is_string(column.type)]
    texts = [page, *list_texts(card), *list_texts(released)]
    return [each for text in texts for each in re.findall(r"\d\.\d{7,}|e-3\d\d|e\+3\d\d", text)]


class Killed(BaseException):
    """Ends a run where no handler of the project catches it, as a killed process does."""


def table():
    """Return the same rows every time."""
    numbers = range(N_ROWS)
    return pd.DataFrame(
        {
            "level": [LEVELS[(7 * n) % 4] for n in numbers],
            "line": [(n * 37 % 101) / 10.1 for n in numbers],
            "who": [n * 11 % 53 for n in numbers],
            "above": [(n * 37 % 101 + n % 5) / 10.1 for n in numbers],
            "twice": [LEVELS[(7 * n) % 4] + (n * 37 % 101) / 10.1 for n in numbers],
            "half": ["low" if (7 * n) % 4 < 2 else "high" for n in numbers],
        }
    )


@contextmanager
def killed_at(owner, name, *, after, when):
    """Kill what runs inside when a function is called, before or after its work."""
    original = getattr(owner, name)

    def struck(*args, **kwargs):
        if not when(*args, **kwargs):
            return original(*args, **kwargs)
        if after:
            original(*args, **kwargs)
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, struck)
        with pytest.raises(Killed):
            yield


def watch(patch, owner, name, steps):
    """Note each call of a function, in order."""
    original = getattr(owner, name)

    def noting(*args, **kwargs):
        steps.append(name)
        return original(*args, **kwargs)

    patch.setattr(owner, name, noting)


def _always(*_, **__):
    return True


KILLS = {
    "charged": lambda: killed_at(Account, "intend", after=True, when=_always),
    "noise or release kept": lambda: killed_at(fit_module, "keep", after=True, when=_always),
    "release kept": lambda: killed_at(
        fit_module, "keep", after=True, when=lambda _folder, name, _data: name == "release.npz"
    ),
    "barrier recorded": lambda: killed_at(
        RunState, "write", after=True, when=lambda _state, reached: reached.stage == "fitted"
    ),
    "shards staged": lambda: killed_at(run_module, "write_all", after=True, when=_always),
    "published": lambda: killed_at(Account, "commit", after=False, when=_always),
}
_TURNS = itertools.count()


GROUPED, OF_ONE = ("mean", "share", "quantile"), ("histogram", "npmle")


def ask_everything(release, undetermined):
    """Ask a release all questions about one and two columns: it answers or refuses each, and answers those that it offers.

    The rows of `undetermined` columns do not determine their distribution, so offers may be refused.
    """
    offered = {name: row.split(", ") for name, row in release.columns["answers"].items()}
    pairs = [] if len(offered) < 2 else list(itertools.permutations(offered, 2))
    answered = set()
    added = {"fit": ((least_squares,), {}), "histogram": ((), {"bins": [0, 1]})}
    for question in QUESTIONS:
        first, options = added.get(question, ((), {}))
        ask = partial(getattr(release, question), *first, **options)
        alone = [] if question == "crosstab" else [(name,) for name in offered]
        for names in [*alone, *([] if question in OF_ONE else pairs)]:
            with suppress(SpecError):
                if question in GROUPED and len(names) == 2:
                    ask(names[0], by=names[1])
                else:
                    ask(*names)
                answered |= {(question, name) for name in names}
    for name in offered:
        with suppress(SpecError):
            release.mean(name, within=(0, 1))
            answered.add(("mean(within=)", name))
    sure = {name: row for name, row in offered.items() if name not in undetermined}
    promised = {(question, name) for name, row in sure.items() for question in row if question}
    assert promised <= answered, promised - answered


class MechanismContract:
    """The tests that every mechanism inherits.

    Attributes
    ----------
    kind, python
        The mechanism, and its Python class.
    given
        Its parameters, in a job and in Python; `of_job` are those of a job alone.
    privacy
        The `privacy` block, or None.
    schema
        The columns; `who` is added with the role keep where rows are released.
    rules
        The rules between them.
    kills
        The two points at which a run of this case is killed; cases take turns.
    """

    kind: ClassVar[str]
    python: ClassVar[type[Estimator]]
    given: ClassVar[dict[str, Any]] = {}
    of_job: ClassVar[dict[str, Any]] = {}
    privacy: ClassVar[dict[str, Any] | None] = PRIVACY
    schema: ClassVar[dict[str, Any]] = SCHEMA
    rules: ClassVar[list[dict[str, Any]]] = []
    releases_rows: ClassVar[bool] = True
    draws_nothing: ClassVar[bool] = False
    n_sampled: ClassVar[int | None] = 50
    kills: ClassVar[Sequence[str]] = ()
    undetermined: ClassVar[Sequence[str]] = ()

    def __init_subclass__(cls):
        turn = next(_TURNS)
        cls.kills = [list(KILLS)[(turn + step) % len(KILLS)] for step in (0, len(KILLS) // 2)]

    def estimator(self, **changes):
        """Return the Python class with the case's parameters."""
        budget = (
            {}
            if self.privacy is None
            else {key: self.privacy[key] for key in ("epsilon", "delta") if self.kind != "interval"}
        )
        own = {"columns": self.columns(), "rules": self.rules}
        schema = Schema.from_dict(
            {"columns": changes.pop("columns")} if "columns" in changes else own
        )
        return self.python(schema, **{**budget, **self.given, **changes})

    def columns(self):
        """Return the schema of the case."""
        return (
            {**self.schema, **KEPT}
            if self.releases_rows
            else {**self.schema, "who": {"role": "drop", "type": "int64"}}
        )

    def frame(self):
        """Return the table of the case."""
        return table()[list(self.columns())]

    @property
    def is_public(self):
        return getattr(self.given.get("reference"), "kind", "") == "public"

    def write(self, folder, output, **changes):
        """Write the case's job with changes, and its small lake."""
        lake = folder.parent / "lake"
        if not lake.exists():
            lake.mkdir(parents=True)
            rows = pa.Table.from_pandas(self.frame(), preserve_index=False)
            pq.write_table(rows.slice(0, 160), lake / "a.parquet", row_group_size=60)
            pq.write_table(rows.slice(160), lake / "b.parquet")
        parameters = {
            name: value.model_dump(mode="json", exclude_none=True) if name == "reference" else value
            for name, value in self.given.items()
        }
        if self.is_public:
            other = folder.parent / "public"
            other.mkdir(exist_ok=True)
            pq.write_table(
                pa.Table.from_pandas(self.frame().iloc[::2], preserve_index=False),
                other / "p.parquet",
            )
            parameters["reference"]["path"] = str(other)
        mechanism = {"kind": self.kind, **parameters, **self.of_job}
        job = {
            "mechanism": mechanism,
            "privacy": self.privacy,
            "output__rows_per_shard": 100,
            **changes,
        }
        return write_job(
            folder,
            lake,
            output,
            **({} if "schema" in job else {"schema": self.columns(), "rules": self.rules}),
            **job,
        )

    def ledger(self, tmp_path, epsilon=30.0):
        """Return a ledger with a budget for the case."""
        if self.privacy is None:
            pytest.skip("this mechanism spends no budget")
        url = f"sqlite:///{tmp_path / 'ledger.db'}"
        open_ledger(url).init("people", epsilon, 1e-3)
        return {"url": url, "dataset": "people"}

    # a job

    def test_a_job_is_the_same_on_every_scheduler_and_its_card_says_what_was_promised(
        self, two_workers, tmp_path
    ):
        loaded = load(self.write(tmp_path / "job", tmp_path / "out"))
        opened = open_table(loaded, Folder(loaded.output_url))
        expected = opened.mechanism.find_written(opened.work.released)
        outcome = run_here(tmp_path / "job" / "job.yaml")
        assert pq.read_schema(tmp_path / "out" / outcome.manifest.shards[0].name).equals(expected)
        data = (tmp_path / "out" / "_dpdask" / "release.json").read_bytes()
        card = Card.read(data, "release.json")
        assert card.to_bytes() == data
        assert card.insecure
        assert card.guarantee.text.startswith("INSECURE: ")
        assert card.mechanism.kind == self.kind
        assert card.guarantee.epsilon == (None if self.privacy is None else self.privacy["epsilon"])
        assert set(card.columns) >= set(self.schema)
        page = (tmp_path / "out" / PAGE_NAME).read_text(encoding="utf-8")
        assert escape(find_guidance(card).title) in page
        assert all(use in unescape(page) for uses in find_guidance(card).uses(card) for use in uses)
        assert list_odd_numbers(tmp_path / "out", page) == []
        planned = make_page_of_plan(loaded, plan_job(loaded))
        assert list_odd_numbers(tmp_path / "out", planned) == []
        assert "<strong>Nothing was released.</strong>" in planned
        parts = [part for part in card.guarantee.parts or () if part.part != "promise"]
        assert [part for part in parts if part.text not in unescape(planned)] == []
        release = dpdask.open(tmp_path / "out")
        assert release.card == card.to_dict()
        ask_everything(release, self.undetermined)
        # test_same_bytes.py has the references of DIP on two processes
        with dask.config.set(scheduler="threads") if self.kind == "dip" else Client(two_workers):
            run_job(load(tmp_path / "job" / "job.yaml", output__path=tmp_path / "again"))
        assert digests(tmp_path / "again") == digests(tmp_path / "out")

    def test_nothing_is_drawn_before_it_is_charged(self, tmp_path, monkeypatch):
        place = self.ledger(tmp_path)
        job, steps = (
            self.write(tmp_path / "job", tmp_path / "out", ledger=place, insecure_seed=None),
            [],
        )
        mechanism = type(load(job).mechanism)
        draw = mechanism.draw

        def draw_securely(own, counts, columns, noise):
            assert noise("any name") is None  # a key that leaks would tell central noise
            return draw(own, counts, columns, noise)

        monkeypatch.setattr(mechanism, "draw", draw_securely)
        watch(monkeypatch, Account, "intend", steps)
        watch(monkeypatch, fit_module, "keep", steps)
        for name in ("draw", "fit"):
            watch(monkeypatch, mechanism, name, steps)
        run_here(job)
        order = [name for name in ("intend", "draw", "fit") if name in steps]
        assert [steps.index(name) for name in order] == sorted(steps.index(name) for name in order)
        assert order[0] == "intend"
        assert "fit" in order

    def test_a_charge_that_is_refused_at_the_barrier_draws_nothing(self, tmp_path, monkeypatch):
        place = self.ledger(tmp_path, epsilon=PRIVACY["epsilon"] / 2)
        job = self.write(tmp_path / "job", tmp_path / "out", ledger=place, insecure_seed=None)
        monkeypatch.setattr(
            Account, "check_room", lambda *_: None
        )  # as if another run had taken the room since
        monkeypatch.setattr(
            type(load(job).mechanism), "draw", lambda *_, **__: pytest.fail("noise was drawn")
        )
        with pytest.raises(BudgetError):
            run_here(job)
        assert not (tmp_path / "out").exists()
        assert not hidden(tmp_path / "out").exists()
        assert charging_entries(place["url"], "people") == []

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, tmp_path_factory):
        """A folder with what the case's job publishes if nothing kills it, and the ledger that it charged."""
        folder = tmp_path_factory.mktemp("whole")
        place = cls().ledger(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spec, "check_seed", lambda _: None)  # as `seeded_ledgers`
            run_here(
                cls().write(folder / "job", folder / "expected", ledger=place, insecure_seed=7)
            )
        return folder, place

    def resume(self, whole, out, killed, between=lambda: None):
        """Kill a run, go on, and expect the bytes of the whole run at one charge."""
        folder, place = whole
        job, before = (
            self.write(folder / out.parent.name, out, ledger=place, insecure_seed=7),
            charging_entries(place["url"], "people"),
        )
        with killed:
            run_here(job)
        between()
        run_here(job)
        assert digests(out) == digests(folder / "expected")
        assert not hidden(out).exists()
        assert [
            entry.kind for entry in charging_entries(place["url"], "people")[len(before) :]
        ] == ["intend", "commit"]

    @pytest.mark.usefixtures("seeded_ledgers")
    @pytest.mark.parametrize("turn", [0, 1])
    def test_a_killed_run_goes_on_to_the_same_bytes_at_one_charge(self, turn, whole, tmp_path):
        self.resume(whole, tmp_path / "out", KILLS[self.kills[turn]]())

    def test_a_plan_and_an_audit_read_no_rows(self, tmp_path, monkeypatch):
        job = load(self.write(tmp_path / "job", tmp_path / "out"))
        for module in ("dpdask.io.fragments", "dpdask.engine.source"):
            monkeypatch.setattr(f"{module}.read_batches", lambda *_: pytest.fail("rows were read"))
        planned, of_frame = plan_job(job), self.estimator().plan(self.frame())
        assert len(planned.stages) >= 3
        assert planned.guarantee
        assert of_frame.guarantee
        assert of_frame.stages
        assert audit_job(job, n_runs=500)["sound"]
        central = [
            event for event in leaves(job.mechanism.event) if not isinstance(event, LocalRelease)
        ]
        assert bool(central) == (
            type(job.mechanism).draw is not Mechanism.draw and not self.draws_nothing
        )
        assert central or self.releases_rows

    def test_a_value_outside_the_domain_is_one_line_and_leaves_nothing(self, tmp_path):
        job = self.write(tmp_path / "job", tmp_path / "out")
        self.spoil(tmp_path)
        with pytest.raises(DataError) as refused:
            run_here(job)
        assert "99" not in str(refused.value)
        assert "\n" not in str(refused.value)
        assert not (tmp_path / "out").exists()

    def spoil(self, folder):
        """Put a value into the second file that is no level."""
        broken = self.frame()
        broken.loc[200, "level"] = 99
        pq.write_table(
            pa.Table.from_pandas(broken.iloc[160:], preserve_index=False),
            folder / "lake" / "b.parquet",
        )

    # Python

    def draw(self, release):
        """Return the released rows, or some records."""
        if self.releases_rows:
            return release.transform(self.frame_given)
        return release.sample(self.n_sampled, seed=1).compute(scheduler="synchronous")

    def release(self, **given):
        """Fit the case's Python class to the case's table."""
        self.frame_given = self.frame()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what a chain republishes
            return self.estimator().fit(
                self.frame().iloc[::2].reset_index(drop=True)
                if self.is_public
                else self.frame_given,
                **given,
            )

    def test_python_charges_until_the_budget_ends_and_releases_what_it_promises(self, tmp_path):
        ledger = (
            {}
            if self.privacy is None
            else {"ledger": LedgerPlace(**self.ledger(tmp_path, epsilon=PRIVACY["epsilon"]))}
        )
        with self.release(**ledger) as release:
            assert len(self.draw(release))
            assert Card.read(release.card, "card").mechanism.kind == self.kind
            assert json.dumps(release.card)
            assert "/" not in repr(release)
        with pytest.raises(Exception, match=r"closed|missing|key"):
            self.draw(release)
        if self.privacy is not None:
            entries = charging_entries(ledger["ledger"].url, "people")
            assert [entry.kind for entry in entries] == ["intend", "commit"]
            with pytest.raises(BudgetError), self.release(**ledger) as release:
                self.draw(release)
            assert charging_entries(ledger["ledger"].url, "people") == entries

    def test_python_and_job_refuse_a_schema_without_private_columns(self, tmp_path):
        columns = {
            name: {"role": "drop", "type": column["type"]}
            for name, column in self.columns().items()
        }
        with pytest.raises(SpecError, match="privatises no column") as python:
            self.estimator(columns=columns)
        with pytest.raises(SpecError, match="privatises no column") as job:
            load(self.write(tmp_path / "job", tmp_path / "out", schema=columns))
        assert job.value.what == python.value.what
