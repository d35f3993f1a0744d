"""Series in the ledger: what goes on with one costs nothing for a row; whatever else comes is charged in full."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.engine.account import open_ledger
from dpdask.errors import BudgetError, SpecError
from dpdask.privacy.events import (
    Composed,
    DiscreteLaplace,
    LocalRelease,
    Series,
    from_dict,
    to_dict,
)
from dpdask.privacy.ledger_entries import (
    FREE,
    Charge,
    count_series,
    event_text,
    extend_head,
    name_series,
)
from dpdask.terminal.texts import describe_ledger

RELEASE = "f" * 64
NOISE = DiscreteLaplace(scale=8.0, sensitivity=2, adjacency="replace-one")


def charge(head, previous="", *, epsilon=1.0, unit="row", release=RELEASE, id_="s"):
    """Return the charge of one release: the first one also counts with noise, at a quarter of ε."""
    series = Series(id=id_, release=release if previous else "", previous=previous, head=head)
    rows = LocalRelease(epsilon=0.75 * epsilon, unit=unit)
    events = (rows,) if previous else (NOISE, rows)
    return Charge(
        epsilon=0.75 * epsilon if previous else epsilon,
        event=to_dict(Composed(events=events, unit=unit, series=series)),
    )


def count(*charges):
    """Return the numbers of the charges that count; each run recorded the same fitted release."""
    return [charges.index(each) for each in count_series([(each, RELEASE) for each in charges])]


@pytest.fixture
def ledger(tmp_path):
    made = open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    made.init("people", 2.0)
    return made


def spend(ledger, run, cost, release=RELEASE):
    ledger.intend("people", run, cost)
    ledger.draw("people", run, release)
    ledger.commit("people", run, release)


def spent(ledger):
    return ledger.read_balance("people").epsilon_spent


CHANGES = {
    "an old release": {"previous": "h0"},
    "an unknown release": {"previous": "x"},
    "another fitted release": {"release": "e" * 64},
    "a larger ε": {"epsilon": 1.1},
    "another series": {"id_": "t"},
    "a smaller ε, which is another event": {"epsilon": 0.9},
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_does_not_go_on_with_the_series_counts_in_full(change):
    start = (charge("h0"), charge("h1", "h0"))
    assert count(*start, charge("h2", "h1")) == [0]
    assert count(*start, charge("h2", **{"previous": "h1", **CHANGES[change]})) == [0, 2]


def test_events_of_its_own_and_numbers_of_its_own_count_in_full():
    first, second = charge("h0"), charge("h1", "h0")
    counting = {
        **second.event,
        "events": [
            *second.event["events"],
            to_dict(DiscreteLaplace(scale=1.0, sensitivity=2, adjacency="replace-one")),
        ],
    }
    twice = {**second.event, "events": second.event["events"] * 2}
    for changed in (
        replace(second, event=counting),
        replace(second, event=twice),
        replace(second, epsilon=1.5),
        replace(second, delta=0.1),
        replace(second, event={**second.event, "events": []}),
        replace(second, event={**second.event, "unit": "column user"}),
        replace(
            second, event={name: value for name, value in second.event.items() if name != "unit"}
        ),
    ):
        assert count(first, changed) == [0, 1]


def test_a_series_whose_first_run_drew_another_release_is_not_gone_on_with():
    assert len(count_series([(charge("h0"), "e" * 64), (charge("h1", "h0"), RELEASE)])) == 2
    assert len(count_series([(charge("h0"), ""), (charge("h1", "h0"), RELEASE)])) == 2


def test_a_repeated_release_and_what_follows_it():
    """A release is aborted and repeated: the second attempt counts, and carries what follows."""
    first, aborted, again, after = (
        charge("h0"),
        charge("h1", "h0"),
        charge("h1'", "h0"),
        charge("h2", "h1'"),
    )
    assert count(first, aborted, again, after) == [0, 2]
    assert count(first, aborted, again, after, charge("h2'", "h1")) == [0, 2, 4]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=9))
def test_what_counts_covers_every_row_whatever_copies_release(steps):
    """Copies of a series' folder go on in any order: no fragment is released more often than charges count."""
    folders = [("h", frozenset([0]))]
    charges, times = [charge("h")], dict.fromkeys(range(12), 0) | {0: 1}
    for number, step in enumerate(steps, start=1):
        head, known = folders[step % len(folders)]
        fragment = min(set(times) - known)
        new = extend_head(b"salt", head, [str(fragment)])
        charges.append(charge(new, head))
        times[fragment] += 1
        folders[step % len(folders)] = (new, known | {fragment})
        if step % 2:
            folders.append((head, known))  # a copy of the folder from before
        assert len(count_series([(each, RELEASE) for each in charges])) >= max(times.values()), (
            number
        )


def test_a_voided_release_is_as_if_it_had_not_been(ledger):
    spend(ledger, "day 0", charge("h0"))
    ledger.intend("people", "day 1", charge("h1", "h0"))
    ledger.void("people", "day 1")
    spend(ledger, "day 1 again", charge("h1", "h0"))
    assert spent(ledger) == 1.0


def test_a_drawn_release_that_is_refused_keeps_its_place(ledger):
    spend(ledger, "day 0", charge("h0"))
    ledger.intend("people", "day 1", charge("h1", "h0"))
    ledger.draw("people", "day 1", RELEASE)
    ledger.refuse("people", "day 1", FREE)
    assert spent(ledger) == 1.0
    ledger.intend("people", "day 1 again", charge("h1", "h0"))
    assert spent(ledger) == 1.75


def test_the_two_attempts_fit_before_noise_is_drawn(ledger):
    spend(ledger, "other", Charge(epsilon=1.0))
    spend(ledger, "day 0", charge("h0"))
    spend(ledger, "day 1", charge("h1", "h0"))
    with pytest.raises(BudgetError):
        ledger.check_room("people", charge("h1", "h0"))
    with pytest.raises(BudgetError):
        ledger.intend("people", "day 1 again", charge("h1", "h0"))
    spend(ledger, "day 2", charge("h2", "h1"))
    assert spent(ledger) == 2.0


def test_an_event_without_a_series_is_written_as_before():
    plain = Composed(events=(LocalRelease(epsilon=1.0),), unit="row", uncovered=())
    text = '{"events":[{"epsilon":1.0,"format":1,"kind":"local-release","n":1,"unit":"row"}],"format":1,"kind":"composed","uncovered":[],"unit":"row"}'
    assert event_text(to_dict(plain)) == text
    placed = replace(plain, series=Series(id="s", head="h"))
    assert from_dict(to_dict(placed)) == placed


@pytest.mark.parametrize(
    "wrong", ["s", {"id": "s"}, {"id": "s", "release": "", "previous": "", "head": 1}, {}], ids=repr
)
def test_a_series_that_cannot_be_read_is_refused(wrong):
    event = to_dict(Composed(events=(LocalRelease(epsilon=1.0),), unit="row")) | {"series": wrong}
    with pytest.raises(SpecError, match="series"):
        from_dict(event)


def test_digests_bind_the_job_the_run_and_the_fragments():
    assert (
        len({name_series(job, run) for job, run in itertools.product(("a", "b"), ("c", "d"))}) == 4
    )
    assert extend_head(b"salt", "", ["a", "b"]) == extend_head(b"salt", "", ["b", "a"])
    heads = [
        extend_head(b"salt", "", ["a"]),
        extend_head(b"salt", "", ["a", "b"]),
        extend_head(b"other", "", ["a"]),
        extend_head(b"salt", "h", ["a"]),
    ]
    assert len(set(heads)) == 4


def test_a_ledger_shows_a_line_for_each_release_and_its_state(ledger):
    first, later = charge("1"), charge("2", "1")
    named = replace(first, names={"job": "daily", "mechanism": "dip", "output": "/out"})
    assert named == first  # names cost nothing
    spend(ledger, "day 1", named)
    spent = ledger.read_balance("people").epsilon_spent
    spend(ledger, "day 2", later)
    assert ledger.read_balance("people").epsilon_spent == spent
    ledger.intend("people", "lost", charge("1", id_="t", epsilon=0.25))
    ledger.intend("people", "gone", charge("1", id_="u", epsilon=0.25))
    ledger.void("people", "gone")
    ledger.refuse("people", "bad", replace(FREE, names={"mechanism": "copula"}))
    _, _, refusals, head, *rows, told = describe_ledger(ledger.show("people")).splitlines()
    assert head.split() == ["date", "job", "mechanism", "ε", "output", "state"]
    assert "1 run read rows and refused them" in refusals
    assert [row.split()[2:] for row in rows] == [
        ["daily", "dip", "1.0", "/out", "released"],
        ["(0.75)", "released"],
        ["0.25", "unfinished"],
        ["0.0", "taken", "back"],
        ["copula", "0.0", "refused"],
    ]
    assert "adds nothing to the total" in told
    assert ledger.intend("people", "day 1", first).kind == "commit"  # by whatever name
