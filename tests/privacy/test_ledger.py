"""The ledger, on SQLite and on PostgreSQL: what it charges, what it refuses, what it finds when another hand was in it."""

import math
import re
import signal
import sys
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest
import sqlalchemy as sa
from e2e.helpers import waits_for_the_disk
from hypothesis import given
from hypothesis import strategies as st
from privacy.ledger_worker import run_phases

from dpdask.errors import BudgetError, DataError, SpecError, TemporaryError
from dpdask.privacy import ledger as ledger_tables
from dpdask.privacy.events import (
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    LocalRelease,
    compose,
    to_dict,
)
from dpdask.privacy.ledger import DATASETS, ENTRIES, Charge, Ledger, digest_of, sum_charges
from dpdask.privacy.ledger_entries import FREE

HALF = Charge(
    epsilon=0.5,
    delta=2.0**-30,
    event={"version": 1, "mechanism": "laplace", "columns": ["rating"], "scale": 2.0},
)


@pytest.fixture
def ledger(url):
    """A ledger with the dataset `ratings`: ε 2, δ 2⁻²⁰."""
    made = Ledger(url)
    assert made.init("ratings", 2.0, 2.0**-20)
    return made


def fill(ledger, n_runs=4):
    for number in range(n_runs):
        ledger.intend("ratings", f"run-{number}", HALF)
    ledger.commit("ratings", "run-0")
    ledger.void("ratings", "run-1")


def kinds(ledger):
    return [(entry.kind, entry.run_id) for entry in ledger.show("ratings").entries]


@contextmanager
def another_hand(ledger):
    with ledger._store._writer.begin() as connection:
        yield connection


# charging


def test_an_intention_is_spent_and_recorded(ledger):
    entry = ledger.intend("ratings", "run-1", HALF)
    assert (entry.sequence, entry.kind, entry.run_id, entry.charge) == (1, "intend", "run-1", HALF)
    assert abs(datetime.fromisoformat(entry.recorded) - datetime.now(UTC)) < timedelta(minutes=1)
    shown, balance = ledger.show("ratings"), ledger.read_balance("ratings")
    assert (shown.entries, shown.dataset, shown.head, shown.balance) == (
        (entry,),
        "ratings",
        entry.digest,
        balance,
    )
    assert (balance.epsilon_limit, balance.epsilon_spent, balance.epsilon_left, balance.n_runs) == (
        2.0,
        0.5,
        1.5,
        1,
    )
    assert (balance.delta_limit, balance.delta_spent, balance.delta_left) == (
        2.0**-20,
        2.0**-30,
        2.0**-20 - 2.0**-30,
    )
    assert ledger.read_balance("ratings", plus=HALF).epsilon_left == 1.0
    assert (
        ledger.read_balance("ratings", plus=Charge(epsilon=0.1, delta=0.5)).epsilon_spent
        == math.inf
    )
    ledger.init("census", 0.5)  # a budget and a chain of its own
    ledger.intend("census", "run-1", Charge(epsilon=0.5))
    assert (ledger.verify("ratings"), ledger.verify("census")) == (1, 1)
    assert ledger.read_balance("ratings") == balance


def test_a_run_is_charged_once(ledger):
    first = ledger.intend("ratings", "run-1", HALF)
    assert ledger.intend("ratings", "run-1", HALF) == first
    committed = ledger.commit("ratings", "run-1")
    assert ledger.commit("ratings", "run-1") == committed
    assert ledger.intend("ratings", "run-1", HALF) == committed
    assert ledger.read_balance("ratings").epsilon_spent == 0.5
    assert kinds(ledger) == [("intend", "run-1"), ("commit", "run-1")]


def test_a_void_gives_back_and_a_voided_run_is_charged_anew(ledger):
    ledger.intend("ratings", "run-1", HALF)
    voided = ledger.void("ratings", "run-1")
    assert ledger.void("ratings", "run-1") == voided
    assert (
        ledger.read_balance("ratings").epsilon_spent,
        ledger.read_balance("ratings").n_runs,
    ) == (0.0, 0)
    other = Charge(epsilon=2.0)
    assert ledger.intend("ratings", "run-1", other).charge == other
    assert ledger.read_balance("ratings").epsilon_left == 0.0
    assert kinds(ledger) == [("intend", "run-1"), ("void", "run-1"), ("intend", "run-1")]
    with pytest.raises(BudgetError):
        ledger.intend("ratings", "run-2", HALF)


def test_a_refusal_writes_nothing_and_says_what_is_left(ledger):
    first = Charge(epsilon=1.0000001)
    ledger.intend("ratings", "run-1", first)
    before = ledger.show("ratings")
    for call in (
        ledger.intend,
        lambda dataset, run, charge: ledger.check_room(dataset, charge, run),
    ):
        with pytest.raises(BudgetError) as refused:
            call("ratings", "run-2", Charge(epsilon=1.0))
        assert refused.value.exit_code == 77
        assert (
            "asks for ε 1.0 and δ 0.0; ε 0.999999 and δ 9.53674E-7 are left of ε 2.0 and δ 9.5367431640625e-07"
            in str(refused.value)
        )
        assert "\n" not in str(refused.value)
    with pytest.raises(BudgetError):
        ledger.intend(
            "ratings", "run-2", Charge(epsilon=0.1, delta=math.nextafter(2.0**-20, 1))
        )  # δ is a budget too
    ledger.check_room("ratings", first, "run-1")  # it is charged already
    assert ledger.show("ratings") == before


def test_a_refusal_of_rows_is_recorded_once_for_nothing_or_for_its_charge(ledger):
    free = ledger.refuse("ratings", "run-1", FREE)
    assert ledger.refuse("ratings", "run-1", FREE) == free
    ledger.intend("ratings", "run-2", HALF)
    ledger.refuse("ratings", "run-2", FREE)
    ledger.refuse("ratings", "run-3", HALF)
    balance = ledger.read_balance("ratings")
    assert (balance.epsilon_spent, balance.n_runs, balance.n_refused) == (0.5, 1, 3)
    assert kinds(ledger) == [
        ("refuse", "run-1"),
        ("intend", "run-2"),
        ("refuse", "run-2"),
        ("refuse", "run-3"),
    ]
    ledger.intend("ratings", "run-2", HALF)  # refused for nothing: charged anew
    with pytest.raises(SpecError, match="is refused: its charge stays"):
        ledger.intend("ratings", "run-3", HALF)
    with pytest.raises(BudgetError):
        ledger.refuse("ratings", "run-4", Charge(epsilon=2.0))
    ledger.commit("ratings", "run-2")
    assert (
        ledger.refuse("ratings", "run-2", FREE).kind == "commit"
    )  # what was released was not refused


def test_a_strict_dataset_is_made_once_and_stays(ledger):
    assert not ledger.is_strict("ratings")
    for _ in range(2):
        assert not ledger.init("ratings", 2.0, 2.0**-20, strict=True)
    assert not ledger.init("ratings", 2.0, 2.0**-20)
    assert ledger.is_strict("ratings")
    assert kinds(ledger) == [("strict", "strict")]
    ledger.intend("ratings", "strict", HALF)  # a run may have that name
    assert ledger.read_balance("ratings").n_runs == 1


def test_a_hold_outs_key_is_drawn_once_for_each_dataset(ledger):
    assert ledger.holdout_key("ratings", draw=False) is None
    key = ledger.holdout_key("ratings")
    assert key is not None
    assert len(key) == 32
    assert ledger.holdout_key("ratings", draw=False) == ledger.holdout_key("ratings") == key
    ledger.init("other", 1.0)
    assert ledger.holdout_key("other") != key
    with pytest.raises(SpecError, match="does not know the dataset"):
        ledger.holdout_key("nobody")
    assert key.hex() not in repr(ledger.show("ratings"))


def test_a_hold_outs_key_that_was_exchanged_or_lost_is_noticed(ledger):
    ledger.holdout_key("ratings")
    assert kinds(ledger) == [("hold-out", "hold-out")]
    with another_hand(ledger) as connection:
        connection.exec_driver_sql(f"UPDATE dpdask_holdouts SET key = '{'0' * 64}'")
    for draw in (False, True):
        with pytest.raises(DataError, match="the key of the hold-out was changed"):
            ledger.holdout_key("ratings", draw=draw)
    with another_hand(ledger) as connection:
        connection.exec_driver_sql("DELETE FROM dpdask_holdouts")
    with pytest.raises(DataError, match="the key of the hold-out was changed"):
        ledger.holdout_key("ratings")


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_a_small_refusal_costs_a_hundredth_under_either_adjacency(adjacency, url):
    ledger = Ledger(url)
    ledger.init("strict", 10.0, strict=True)
    small = Charge(
        epsilon=0.001,
        event=to_dict(
            Composed(events=(DiscreteLaplace(scale=1000.0, sensitivity=1, adjacency=adjacency),))
        ),
    )
    ledger.refuse("strict", "small", small)
    assert 0.1 <= ledger.read_balance("strict").epsilon_spent < 0.1001


def test_a_strict_dataset_keeps_room_for_the_refusals_of_unfinished_runs(url):
    ledger, small = Ledger(url), Charge(epsilon=1e-4)
    ledger.init("strict", 4.0, strict=True)
    for run in ("one", "two"):
        ledger.intend("strict", run, small)
    with pytest.raises(
        BudgetError,
        match="refusals of this run and of 2 unfinished ones would cost more than is left",
    ):
        ledger.intend("strict", "large", Charge(epsilon=3.95))
    with pytest.raises(BudgetError, match="of 2 unfinished ones"):
        ledger.check_room("strict", Charge(epsilon=3.95))
    ledger.intend("strict", "large", Charge(epsilon=3.9))
    ledger.commit("strict", "large")
    with pytest.raises(BudgetError, match="of 2 unfinished ones"):
        ledger.intend("strict", "three", small)
    assert [ledger.refuse("strict", run, small).charge.epsilon for run in ("one", "two")] == [
        0.04,
        0.04,
    ]
    with pytest.raises(BudgetError, match="of 0 unfinished ones"):
        ledger.intend("strict", "three", small)
    ledger.init("lax", 4.0)
    ledger.intend("lax", "one", small)
    ledger.intend("lax", "large", Charge(epsilon=3.9999))


_NOISE = DiscreteGaussian(sigma=20.0, sensitivity=1.0, adjacency="replace-one", count=2)


@pytest.mark.parametrize(
    ("like", "strict", "least", "most"),
    [
        (Charge(epsilon=0.3), False, 11, 11),
        (Charge(epsilon=0.7), False, 5, 5),
        (Charge(epsilon=5.0), False, 0, 0),
        (Charge(epsilon=1e-4), False, 100, 100),
        (Charge(epsilon=1.2), True, 2, 2),
        (Charge(epsilon=0.035), True, 99, 99),  # the last one leaves room for a refusal of 0.04
        # more than division says: the noise of several releases is composed
        (Charge(epsilon=0.45, delta=1e-9, event=to_dict(Composed(events=(_NOISE,)))), False, 9, 99),
    ],
)
def test_what_there_is_room_for_is_what_the_ledger_takes(like, strict, least, most, url):
    ledger = Ledger(url, compose=compose)
    ledger.init("room", 4.0, 1e-6 if like.delta else 0.0, strict=strict)
    ledger.intend("room", "first", Charge(epsilon=0.5))
    told, taken = ledger.show("room").count_further(like), 0
    assert least <= told <= most
    while taken < 100:
        try:
            ledger.intend("room", str(taken), like)
        except BudgetError:
            break
        ledger.commit("room", str(taken))
        taken += 1
    assert told == taken
    if 0 < taken < 100:
        assert ledger.show("room").further == 0


def test_a_draw_is_recorded_once(ledger):
    ledger.intend("ratings", "run-1", HALF)
    drawn = ledger.draw("ratings", "run-1", "abc")
    assert (drawn.kind, drawn.release, drawn.charge) == ("draw", "abc", HALF)
    assert (
        ledger.draw("ratings", "run-1", "abc") == ledger.intend("ratings", "run-1", HALF) == drawn
    )
    assert ledger.refuse("ratings", "run-1", FREE).charge == HALF  # whatever the caller says
    assert ledger.read_balance("ratings").epsilon_spent == 0.5
    ledger.intend("ratings", "run-2", HALF)
    ledger.draw("ratings", "run-2", "abc")
    committed = ledger.commit("ratings", "run-2", "abc")
    assert (committed.release, committed.charge) == ("abc", HALF)
    assert ledger.commit("ratings", "run-2", "other") == committed  # once


def test_sums_are_exact_and_rounded_against_the_releaser(url):
    ledger = Ledger(url)
    ledger.init("tenths", 1.0)
    for number in range(9):
        ledger.intend("tenths", f"run-{number}", Charge(epsilon=0.1))
    with pytest.raises(
        BudgetError, match=r"ε 0\.0999999 and δ 0 are left"
    ):  # ten floats 0.1 are 1 + 5.6e-16
        ledger.intend("tenths", "run-9", Charge(epsilon=0.1))
    assert ledger.read_balance("tenths").epsilon_spent == math.nextafter(0.9, 1)


def test_the_ledger_outlives_its_object(url, ledger):
    charge = Charge(
        epsilon=0.1 + 0.2,
        delta=math.nextafter(1e-9, 1),
        event={"text": "ε\x00\ud800 'quoted'", "deep": [[1, None, True, 1e-300]]},
    )
    entry = ledger.intend("ratings", "run ε '\"%s", charge)
    again = Ledger(url)
    assert again.show("ratings").entries == (entry,)
    assert again.intend("ratings", "run ε '\"%s", charge) == entry


def test_a_refusal_says_that_charges_with_and_without_delta_add_up_badly(url):
    ledger = Ledger(url, compose=compose)
    ledger.init("people", 8.0, 1e-6)
    for name, epsilon in (("one", 0.5), ("two", 2.0)):
        ledger.intend(
            "people", name, Charge(epsilon=epsilon, event=to_dict(LocalRelease(epsilon=epsilon)))
        )
    noise = DiscreteGaussian(sigma=100.0, sensitivity=1.0, adjacency="replace-one")
    with pytest.raises(BudgetError) as refused:
        ledger.intend("people", "three", Charge(epsilon=1.0, delta=6e-7, event=to_dict(noise)))
    assert "asks for ε 1.0 and δ 6e-07; ε 5.5 and δ 9.99999E-7 are left" in str(refused.value)
    since = "since plain sums hold for at most half of the dataset's δ, and charges with and without δ add up badly"
    [total] = re.findall(rf"but the total would be ε ([\d.]+), {since}", str(refused.value))
    assert float(total) > 8.0
    assert refused.value.hint == "use `delta: 0`, or a dataset of its own"
    ledger.intend("people", "four", Charge(epsilon=1.0, event=to_dict(LocalRelease(epsilon=1.0))))
    ledger.intend("people", "five", Charge(epsilon=1.0, delta=4e-7, event=to_dict(noise)))
    assert ledger.read_balance("people").epsilon_spent == 4.5


def test_a_composer_that_knows_no_number_charges_nothing(url):
    ledger = Ledger(url, compose=lambda charges, delta: math.nan)
    ledger.init("ratings", 1.0)
    with pytest.raises(BudgetError):
        ledger.intend("ratings", "run-1", HALF)
    assert ledger.read_balance("ratings", plus=HALF).epsilon_spent == math.inf
    assert ledger.verify("ratings") == 0


# numbers


@given(
    st.lists(st.tuples(st.floats(0, 1e300), st.floats(0, 1, exclude_max=True)), max_size=20),
    st.floats(0, 1, exclude_max=True),
)
def test_the_sum_is_the_least_float_that_is_not_too_small(pairs, limit):
    total = sum_charges([Charge(epsilon=epsilon, delta=delta) for epsilon, delta in pairs], limit)
    if sum(Fraction(delta) for _, delta in pairs) > Fraction(limit):
        assert total == math.inf
    else:
        exact = sum(Fraction(epsilon) for epsilon, _ in pairs)
        assert Fraction(total) >= exact
        assert total == 0 or Fraction(math.nextafter(total, 0)) < exact


def test_a_charge_keeps_its_own_copy_of_the_event():
    event = {"columns": ("a", "b")}
    charge = Charge(epsilon=1, delta=-0.0, event=event)
    event["columns"] = ()
    assert charge == Charge(epsilon=1.0, event={"columns": ["a", "b"]})
    assert math.copysign(1, charge.delta) == 1


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("epsilon", bad) for bad in (-1, math.nan, math.inf, True, "1", None, -5e-324, 10**400)),
        *(("delta", bad) for bad in (-1, math.nan, 1.0, False, "1", None)),
    ],
    ids=lambda bad: str(bad)[:9],
)
def test_a_number_out_of_range_is_refused(name, bad, tmp_path):
    ledger, given = Ledger(f"sqlite:///{tmp_path / 'l.db'}"), {"epsilon": 1.0, name: bad}
    for call in (lambda: Charge(**given), lambda: ledger.init("ratings", **given)):
        with pytest.raises(SpecError, match=name):
            call()
    with pytest.raises(SpecError, match="allows no release"):
        ledger.init("ratings", 0.0)


LOOP = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    "bad",
    [{"a": math.nan}, {"a": {1}}, {"a": LOOP}, {1: 1, "1": 2}, 5, ["a"], None],
    ids=lambda bad: type(bad).__name__,
)
def test_an_event_that_is_not_json_is_refused(bad):
    with pytest.raises(SpecError, match="event"):
        Charge(epsilon=1.0, event=bad)


@pytest.mark.parametrize(
    "call",
    [
        lambda ledger, name: ledger.init(name, 1.0),
        lambda ledger, name: ledger.intend(name, "run", HALF),
        lambda ledger, name: ledger.intend("ratings", name, HALF),
        lambda ledger, name: ledger.commit("ratings", name),
        lambda ledger, name: ledger.void("ratings", name),
        lambda ledger, name: ledger.show(name),
    ],
)
def test_a_name_that_is_not_one_is_refused(call, tmp_path):
    ledger = Ledger(f"sqlite:///{tmp_path / 'l.db'}")
    ledger.init("ratings", 1.0)
    for bad in ("", "a ", "a\nb", "\ud800", "x" * 201, 5, None):
        with pytest.raises(SpecError, match="a name is"):
            call(ledger, bad)


# the order of things


def test_another_limit_is_refused(ledger):
    for limit in ((3.0, 2.0**-20), (2.0, 0.0)):
        with pytest.raises(
            SpecError, match=r"has a limit already: ε 2\.0 and δ 9\.5367431640625e-07"
        ):
            ledger.init("ratings", *limit)
    assert ledger.read_balance("ratings").epsilon_limit == 2.0


STEPS = {
    "intend": lambda ledger: ledger.intend("ratings", "run", HALF),
    "intend for less": lambda ledger: ledger.intend(
        "ratings", "run", Charge(epsilon=0.25, delta=HALF.delta, event=HALF.event)
    ),
    "intend another event": lambda ledger: ledger.intend(
        "ratings", "run", Charge(epsilon=0.5, delta=HALF.delta)
    ),
    "draw": lambda ledger: ledger.draw("ratings", "run", "abc"),
    "draw other noise": lambda ledger: ledger.draw("ratings", "run", "other"),
    "commit": lambda ledger: ledger.commit("ratings", "run", "abc"),
    "commit other noise": lambda ledger: ledger.commit("ratings", "run", "other"),
    "void": lambda ledger: ledger.void("ratings", "run"),
}
OUT_OF_ORDER = [
    ("", "draw", "is not intended"),
    ("", "commit", "is not intended"),
    ("", "void", "is not intended"),
    ("intend", "intend for less", "another charge"),
    ("intend", "intend another event", "another charge"),
    ("intend, commit", "intend for less", "another charge"),
    ("intend, void", "commit", "is voided"),
    ("intend, commit", "void", "is committed"),
    ("intend, draw", "void", "its noise may have been seen, so it stays charged"),
    ("intend, draw", "draw other noise", "drew other noise before"),
    ("intend, draw", "commit other noise", "drew other noise before"),
]


@pytest.mark.parametrize(("before", "step", "words"), OUT_OF_ORDER)
def test_a_step_out_of_order_is_refused(before, step, words, tmp_path):
    ledger = Ledger(f"sqlite:///{tmp_path / 'l.db'}")
    ledger.init("ratings", 2.0, 2.0**-20)
    for each in filter(None, before.split(", ")):
        STEPS[each](ledger)
    shown = ledger.show("ratings")
    with pytest.raises(SpecError, match=words):
        STEPS[step](ledger)
    assert ledger.show("ratings") == shown


CALLS = [
    lambda ledger: ledger.intend("unknown", "run", HALF),
    lambda ledger: ledger.commit("unknown", "run"),
    lambda ledger: ledger.void("unknown", "run"),
    lambda ledger: ledger.read_balance("unknown"),
    lambda ledger: ledger.show("unknown"),
    lambda ledger: ledger.verify("unknown"),
]


def test_a_dataset_or_a_ledger_that_is_not_there_is_named_and_not_made(url, tmp_path):
    for call in CALLS:
        with pytest.raises(SpecError, match=r"no ledger here.*dpdask ledger init"):
            call(Ledger(url))
    assert list(tmp_path.iterdir()) == []
    Ledger(url).init("ratings", 1.0)
    for call in CALLS:
        with pytest.raises(SpecError, match=r"'unknown'.*dpdask ledger init --dataset unknown"):
            call(Ledger(url))


def test_a_ledger_of_another_version_is_refused(ledger):
    with another_hand(ledger) as connection:
        connection.execute(sa.update(DATASETS), {"format": 3})
    with pytest.raises(SpecError, match="another version"):
        ledger.verify("ratings")


# another hand


def set_entry(sequence, /, **values):
    return lambda connection: connection.execute(
        sa.update(ENTRIES).where(ENTRIES.c.sequence == sequence), values
    )


def delete(*sequences):
    return lambda connection: connection.execute(
        sa.delete(ENTRIES).where(ENTRIES.c.sequence.in_(sequences))
    )


def set_dataset(**values):
    return lambda connection: connection.execute(sa.update(DATASETS), values)


def close_gap(connection):
    delete(2)(connection)
    for sequence in range(3, 7):
        set_entry(sequence, sequence=sequence - 1)(connection)
    connection.execute(sa.update(DATASETS), {"n_entries": 5})


def exchange(connection):
    for old, new in ((3, 0), (4, 3), (0, 4)):
        set_entry(old, sequence=new)(connection)


def rewrite(sequence, /, **values):
    """Change an entry and make its own digest right again."""

    def change(connection):
        row = (
            dict(
                connection.execute(sa.select(ENTRIES).where(ENTRIES.c.sequence == sequence))
                .mappings()
                .one()
            )
            | values
        )
        row["digest"] = digest_of({key: value for key, value in row.items() if key != "digest"})
        set_entry(sequence, **row)(connection)

    return change


def add(connection):
    last = dict(
        connection.execute(sa.select(ENTRIES).where(ENTRIES.c.sequence == 6)).mappings().one()
    )
    row = last | {"sequence": 7, "kind": "void", "run_id": "run-2", "previous": last["digest"]}
    row["digest"] = digest_of({key: value for key, value in row.items() if key != "digest"})
    connection.execute(sa.insert(ENTRIES), row)


def cut_and_forget(connection):
    delete(6)(connection)
    connection.execute(sa.update(DATASETS), {"n_entries": 5})


TAMPERED = {
    "epsilon": (set_entry(2, epsilon=0.25), "entry 2 was changed"),
    "kind": (set_entry(1, kind="void"), "entry 1 was changed"),
    "event": (set_entry(4, event="{}"), "entry 4 was changed"),
    "previous": (set_entry(5, previous="0" * 64), "entry 5 was changed"),
    "digest": (set_entry(6, digest="0" * 64), "entry 6 was changed"),
    "rewritten": (rewrite(2, epsilon=0.0), "entry 2 was replaced"),
    "rewritten last": (rewrite(6, kind="commit"), "entry 6 was replaced"),
    "deleted": (delete(4), "entry 4 is missing"),
    "deleted, gap closed": (close_gap, "entry 2 was changed"),
    "cut": (delete(6), "entry 6 is missing, the chain was cut"),
    "cut, count mended": (cut_and_forget, "entry 5 was replaced"),
    "exchanged": (exchange, "entry 3 was changed"),
    "added": (add, "entry 7 was not added by dpdask"),
    "limit": (set_dataset(epsilon=20.0), "the limit of the dataset was changed"),
    "head": (set_dataset(head="0" * 64), "entry 6 was replaced"),
}


@pytest.mark.few(12)
@pytest.mark.parametrize("case", TAMPERED)
def test_tampering_is_found_and_named(ledger, case):
    tamper, named = TAMPERED[case]
    fill(ledger)
    assert ledger.verify("ratings") == 6
    with another_hand(ledger) as connection:
        tamper(connection)
    for call in (
        ledger.verify,
        ledger.show,
        ledger.read_balance,
        lambda dataset: ledger.intend(dataset, "run-9", Charge(epsilon=0.0)),
    ):
        with pytest.raises(DataError, match=f"dataset 'ratings': the chain is broken: .*{named}"):
            call("ratings")


def test_an_entry_that_stands_twice_is_found():
    rows = [{"sequence": 1, "previous": "p"}, {"sequence": 1, "previous": "p"}]
    record = dict.fromkeys(("format", "name", "created", "epsilon", "delta"), 1) | {
        "n_entries": 2,
        "head": "",
    }
    for row in rows:
        row["previous"] = digest_of(
            {key: record[key] for key in ("format", "name", "created", "epsilon", "delta")}
        )
        row["digest"] = digest_of(dict(row))
    with pytest.raises(DataError, match="entry 1 appears twice"):
        ledger_tables.check_chain(record, rows)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kind": "gift"}, "is of no known kind"),
        ({"epsilon": -1.0}, "holds no charge"),
        ({"event": "{"}, "holds no charge"),
    ],
)
def test_an_entry_that_is_chained_and_still_none_is_refused(ledger, values, named):
    ledger.intend("ratings", "run-1", HALF)
    with another_hand(ledger) as connection:
        rewrite(1, **values)(connection)
        digest = connection.execute(sa.select(ENTRIES.c.digest)).scalar_one()
        set_dataset(head=digest)(connection)
    with pytest.raises(DataError, match=f"entry 1 {named}"):
        ledger.verify("ratings")


# the database


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "ledger.db",
        "postgresql//user:s3cret@host/db",
        "mysql://user:s3cret@host/db",
        "postgresql+asyncpg://user:s3cret@host/db",
        "postgresql://user:s3cret@host:port/db",
        "postgresql://user:s3c@ret@host:s3cret/db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:s3cret?mode=memory&uri=true",
        "sqlite://s3cret/ledger.db",
        "sqlite:///ledger.db?timeout=s3cret",
        None,
        5,
    ],
)
def test_a_bad_url_is_refused_without_showing_it(bad):
    with pytest.raises(SpecError, match=r"ledger\.url") as refused:
        Ledger(bad)
    assert "s3c" not in str(refused.value)
    assert "ret" not in str(refused.value).replace("interpreted", "")


def test_a_missing_driver_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SpecError, match=r"pip install 'dpdask\[postgresql\]'"):
        Ledger("postgresql://host/db")


def test_a_server_that_is_away_is_a_temporary_failure_and_keeps_the_password():
    ledger = Ledger(
        "postgresql://user:s3cret@127.0.0.1:1/db?password=0ther&sslpassword=th1rd&connect_timeout=5"
    )
    with pytest.raises(
        TemporaryError,
        match=r"postgresql://user:\*\*\*@127\.0\.0\.1:1/db: the ledger cannot be reached",
    ) as failed:
        ledger.verify("ratings")
    assert failed.value.exit_code == 75
    assert failed.value.__cause__ is None
    for text in (str(failed.value), repr(failed.value), repr(ledger)):
        assert not any(secret in text for secret in ("s3cret", "0ther", "th1rd"))


def test_an_option_that_the_server_does_not_know_is_a_bad_spec():
    with pytest.raises(SpecError, match="the database refused") as refused:
        Ledger("postgresql://user:s3cret@127.0.0.1:1/db?s3cret=1").verify("ratings")
    assert "s3cret" not in str(refused.value)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(
        SpecError, match=r"absent/ledger\.db: the folder of the ledger does not exist"
    ):
        Ledger(f"sqlite:///{tmp_path / 'absent' / 'ledger.db'}").init("ratings", 1.0)


def test_a_relative_url_names_the_ledger_of_the_folder_in_which_it_is_opened(tmp_path, monkeypatch):
    opened = []
    for epsilon, name in ((1.0, "first"), (2.0, "second")):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        opened.append(Ledger("sqlite:///ledger.db"))
        opened[-1].init("ratings", epsilon)
    assert [ledger.show("ratings").balance.epsilon_limit for ledger in opened] == [
        1.0,
        2.0,
    ]  # and they stay there


def test_a_url_through_a_link_names_one_file_for_this_user_alone(tmp_path):
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "link").symlink_to(tmp_path / "real" / "inner")
    Ledger(f"sqlite:///{tmp_path}/links/link/../ledger.db").init("ratings", 1.0)
    assert not (tmp_path / "links" / "ledger.db").exists()
    assert (tmp_path / "real" / "ledger.db").stat().st_mode & 0o777 == 0o600
    assert Ledger(f"sqlite:///{tmp_path}/real/ledger.db").verify("ratings") == 0


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "ledger.db").write_bytes(b"rows of somebody\n" * 100)
    for call in (
        lambda ledger: ledger.init("ratings", 1.0),
        lambda ledger: ledger.verify("ratings"),
    ):
        with pytest.raises(SpecError, match="SQLITE_NOTADB"):
            call(Ledger(f"sqlite:///{tmp_path / 'ledger.db'}"))


def test_a_ledger_that_stays_busy_is_a_temporary_failure_that_charges_nothing(
    url, ledger, monkeypatch
):
    monkeypatch.setattr(ledger_tables, "_PATIENCE", 0.2)
    monkeypatch.setitem(ledger_tables._CONNECT, "sqlite", {"timeout": 0.1})
    ledger_tables._engine.cache_clear()
    monkeypatch.setattr(
        ledger_tables, "_POSTGRES_WRITE", ledger_tables._POSTGRES_WRITE.replace("'60s'", "'200ms'")
    )
    with another_hand(ledger) as connection:
        connection.execute(sa.select(DATASETS).with_for_update())
        with pytest.raises(TemporaryError, match=r"is busy \((SQLITE_BUSY|55P03)\)"):
            Ledger(url).intend("ratings", "run-1", HALF)
        assert Ledger(url).verify("ratings") == 0  # readers do not wait
    assert ledger.intend("ratings", "run-1", HALF).sequence == 1


def test_an_answered_charge_is_on_the_disk(url, ledger, monkeypatch):
    monkeypatch.setattr(ledger_tables, "_on_connect", waits_for_the_disk)
    ledger_tables._engine.cache_clear()
    sqlite = url.startswith("sqlite")
    careless = url if sqlite else f"{url}%20-csynchronous_commit%3Doff"
    setting = "PRAGMA synchronous" if sqlite else "SHOW synchronous_commit"
    found = Ledger(careless)._store.write(
        lambda connection: connection.exec_driver_sql(setting).scalar_one()
    )
    assert found == (3 if sqlite else "on")


@pytest.mark.parametrize(
    "url", ["postgresql"], indirect=True
)  # SQLite lets no writer end while one reads
def test_a_reader_sees_one_state_while_another_driver_writes(url, ledger):
    ledger.intend("ratings", "run-1", HALF)
    reader = Ledger(url)
    statements = []

    def write_between(*arguments):
        statements.append(arguments[2])
        if "FROM dpdask_datasets" in arguments[2]:
            ledger.intend("ratings", f"run-{len(statements)}", HALF)

    sa.event.listen(reader._store._reader, "after_cursor_execute", write_between)
    assert reader.verify("ratings") == 1
    assert ledger.verify("ratings") == 2


# kill -9


@pytest.mark.few(1)
def test_a_killed_run_is_charged_once_when_it_is_run_again(url, ledger, tmp_path):
    moments = {
        "composing": 0,
        "committing": 0,
        "intended": 1,
    }  # and how many charges stand after it
    phases = [
        [{"runs": [moment], "kill": {moment: killed}}]
        for moment in moments
        for killed in (moment, moment, None)
    ]
    done = run_phases(url, "ratings", tmp_path, phases)
    for before, (charged, phase) in enumerate(zip(moments.values(), range(0, 9, 3), strict=True)):
        killed, again, whole = done[phase : phase + 3]
        assert [each["statuses"] for each in (killed, again, whole)] == [
            [-signal.SIGKILL],
            [-signal.SIGKILL],
            [0],
        ]
        assert [each["n_runs"] for each in (killed, again, whole)] == [
            before + charged,
            before + charged,
            before + 1,
        ]
    assert kinds(ledger) == [(kind, moment) for moment in moments for kind in ("intend", "commit")]
    assert ledger.read_balance("ratings").epsilon_spent == 0.75
