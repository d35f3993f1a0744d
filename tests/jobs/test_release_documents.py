"""What a job publishes beside its shards: the card's name, issuer and place in the ledger; a page and metadata for each release."""

import json
from unittest import mock

import pytest
from e2e.growing import add_day
from e2e.growing import job as growing_job
from e2e.helpers import RATINGS_SCHEMA, charging_entries, lake, load, run_here, write_job

from dpdask.engine.account import open_ledger
from dpdask.errors import SpecError, TemporaryError
from dpdask.io.shards import CARD_NAME, DOCUMENTS, MODEL_NAME
from dpdask.mechanisms.card import Card
from dpdask.privacy.ledger_entries import Charge, sum_charges

ABOUT = {"issuer": "The office", "purpose": "Tests."}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return lake(tmp_path_factory.mktemp("source") / "in", [150, 90], schema=RATINGS_SCHEMA)


@pytest.fixture
def url(tmp_path):
    made = f"sqlite:///{tmp_path / 'ledger.db'}"
    open_ledger(made).init("ratings", 10.0)
    return made


def write(folder, source, **changed):
    given = {
        "schema": RATINGS_SCHEMA,
        "mechanism__reference": {"kind": "histogram"},
        "privacy__epsilon": 1.0,
        **changed,
    }
    return write_job(folder, source, folder / "out", **given)


def charged(folder, source, url, **changed):
    return write(folder, source, ledger={"url": url, "dataset": "ratings"}, **changed)


def read_card(folder):
    return Card.read((folder / "out" / CARD_NAME).read_bytes(), CARD_NAME)


def test_a_card_names_its_release_and_those_before_it(tmp_path, source, url):
    cards = []
    for name in ("first", "second"):
        run_here(charged(tmp_path / name, source, url, about=ABOUT))
        cards.append(read_card(tmp_path / name))
    first, second = cards
    entries = [entry for entry in charging_entries(url, "ratings") if entry.kind == "intend"]
    for card, entry in zip(cards, entries, strict=True):
        assert card.release is not None
        assert card.ledger is not None
        assert (card.release.id, card.ledger.entry) == (entry.run_id, entry.digest)
        assert card.release.time <= entry.recorded
        assert card.about is not None
        assert card.about.model_dump(exclude_none=True) == ABOUT
        assert card.dropped == ["timestamp"]
        assert card.terms is not None
        assert card.terms.model_dump() == {
            "trust_model": "central",
            "definition": "pure",
            "neighbours": "bounded",
            "privacy_unit": "event-level",
        }
    assert first.ledger is not None
    assert second.ledger is not None
    assert first.release is not None
    assert (first.ledger.n_earlier, first.ledger.epsilon, first.ledger.epsilon_limit) == (
        0,
        1.0,
        10.0,
    )
    assert (second.ledger.n_earlier, second.ledger.epsilon) == (1, 2.0)
    assert [each.model_dump() for each in second.ledger.earlier] == [
        {"id": first.release.id, "epsilon": 1.0, "delta": 0.0}
    ]
    page = (tmp_path / "second" / "out" / "_dpdask" / "release.html").read_text()
    assert "Issued by The office" in page
    assert "this one and 1 earlier" in page


def test_a_card_from_a_seed_has_no_name(tmp_path, source):
    run_here(write(tmp_path, source))
    assert {"release", "ledger", "about"} & set(read_card(tmp_path).to_dict()) == set()


def test_a_run_that_goes_on_publishes_what_it_would_have(tmp_path, source, url):
    """The time is that of the run's beginning, and the ledger counts as it was then."""
    job = charged(tmp_path / "one", source, url)
    with (
        mock.patch(
            "dpdask.jobs.state.RunState.publish", side_effect=TemporaryError("gone")
        ) as publish,
        pytest.raises(TemporaryError),
    ):
        run_here(job)
    staged = publish.call_args.args[3]
    run_here(charged(tmp_path / "another", source, url))
    run_here(job)
    assert list(staged) == [name for name in DOCUMENTS if name != MODEL_NAME]
    assert {name: (tmp_path / "one" / "out" / name).read_bytes() for name in staged} == staged


def test_a_position_leaves_out_refusals_and_what_came_later(tmp_path):
    """A refusal depends on the rows, so no number of a card may depend on it."""
    ledger = open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.init("d", 10.0, strict=True)
    ledger.intend("d", "a", Charge(epsilon=1.0))
    ledger.commit("d", "a")
    ledger.intend("d", "at work", Charge(epsilon=1.0))  # it may be refused yet
    ledger.refuse("d", "refused", Charge(epsilon=0.5))
    ledger.intend("d", "void", Charge(epsilon=2.0))
    ledger.void("d", "void")
    own = ledger.intend("d", "b", Charge(epsilon=0.25))
    before = ledger.show("d").find_position("b")
    assert before is not None
    assert before.entry == own
    assert [entry.run_id for entry in before.earlier] == ["a"]
    assert before.epsilon == sum_charges([Charge(epsilon=1.25)], 0.0)
    ledger.commit("d", "at work")
    ledger.commit("d", "b")
    ledger.intend("d", "later", Charge(epsilon=1.0))
    after = ledger.show("d").find_position("b")
    assert after is not None
    assert (after.epsilon, [entry.run_id for entry in after.earlier]) == (before.epsilon, ["a"])
    assert ledger.show("d").find_position("nobody") is None


def test_about_decides_neither_the_rows_nor_the_jobs_name(tmp_path, source):
    plain, told = (
        load(write(tmp_path / "a", source)),
        load(write(tmp_path / "b", source, about=ABOUT)),
    )
    assert plain.digest == told.digest
    with pytest.raises(SpecError, match="issuer"):
        load(write(tmp_path / "c", source, about={"issure": "x"}))


def test_every_release_of_a_growing_table_has_its_documents(tmp_path):
    source = tmp_path / "in"
    for day in range(3):
        add_day(source, day)
        run_here(growing_job(tmp_path, source))
    names = {path.name for path in (tmp_path / "out" / "_dpdask").iterdir()}
    for number in ("", "-00001", "-00002"):
        assert {
            f"release{number}.html",
            f"croissant{number}.json",
            f"release{number}.json",
            f"manifest{number}.json",
        } <= names
    assert (
        "Release 2 of a growing table"
        in (tmp_path / "out" / "_dpdask" / "release-00002.html").read_text()
    )
    assert (
        json.loads((tmp_path / "out" / "_dpdask" / "croissant-00002.json").read_bytes())["version"]
        == "1.2.0"
    )


def test_a_delta_table_keeps_the_documents_of_each_release(tmp_path, source):
    pytest.importorskip("deltalake", reason="no deltalake: install the extra dpdask[delta]")
    run_here(write(tmp_path, source, output__format="delta"))
    names = sorted(path.name.partition("-")[0] for path in (tmp_path / "out" / "_dpdask").iterdir())
    assert names == ["croissant", "manifest", "measured", "release", "release"]
