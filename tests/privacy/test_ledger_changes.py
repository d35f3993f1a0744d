"""What a steward does to a ledger: other limits, lost releases, copies; on SQLite and on PostgreSQL."""

import multiprocessing
from dataclasses import replace

import pytest
import sqlalchemy as sa

from dpdask.errors import BudgetError, DataError, SpecError
from dpdask.privacy.events import Composed, DiscreteLaplace, LocalRelease, Series, compose, to_dict
from dpdask.privacy.ledger import ENTRIES, Charge, KeyTable, Ledger, LedgerStore
from dpdask.privacy.ledger_changes import Claim, change_limit, copy_ledger, import_claim
from dpdask.privacy.ledger_entries import Entry, count_series


def rows(epsilon, unit="row", series=None):
    event = LocalRelease(epsilon=epsilon, unit=unit)
    return Charge(
        epsilon=epsilon,
        event=to_dict(Composed(events=(event,), unit=unit, uncovered=(), series=series)),
    )


ONE = rows(1.0)
CLAIM = Claim(dataset="ratings", run_id="lost", entry="ab" * 32, charge=ONE)


@pytest.fixture
def ledger(url):
    made = Ledger(url, compose=compose)
    assert made.init("ratings", 2.0)
    return made


def kinds(ledger):
    return [entry.kind for entry in ledger.show("ratings").entries]


def spent(ledger):
    return ledger.read_balance("ratings").epsilon_spent


# ---- limits


def test_a_limit_goes_up_and_down_and_the_chain_says_why(ledger):
    ledger.intend("ratings", "one", rows(2.0))
    with pytest.raises(BudgetError):
        ledger.intend("ratings", "two", ONE)
    before = ledger.show("ratings").find_position("one")
    assert change_limit(ledger, "ratings", 3.5, None, "the board agreed on 3 May")
    assert not change_limit(ledger, "ratings", 3.5, 0.0, "again")
    ledger.intend("ratings", "two", ONE)
    entry = ledger.show("ratings").entries[1]
    assert (entry.kind, entry.charge.epsilon) == ("limit", 3.5)
    assert entry.charge.event == {"reason": "the board agreed on 3 May"}
    assert ledger.read_balance("ratings").epsilon_left == 0.5
    # what a card says of its own time does not change
    assert ledger.show("ratings").find_position("one") == before
    position = ledger.show("ratings").find_position("two")
    assert (before.epsilon_limit, position.epsilon_limit) == (2.0, 3.5)
    # below what is spent: nothing more fits, and nothing is given back
    assert change_limit(ledger, "ratings", 1.0, None, "no longer")
    balance = ledger.read_balance("ratings")
    assert (balance.epsilon_spent, balance.epsilon_left) == (3.0, 0.0)
    with pytest.raises(BudgetError):
        ledger.intend("ratings", "three", rows(0.001))
    assert change_limit(ledger, "ratings", 2.0, 1e-6, "a δ, too")
    assert ledger.read_balance("ratings").delta_limit == 1e-6
    assert ledger.verify("ratings") == 5
    # scripts that make the ledger at each start go on
    assert not ledger.init("ratings", 2.0)
    assert not ledger.init("ratings", 2.0, 1e-6)
    with pytest.raises(SpecError, match=r"has a limit already: ε 2\.0 and δ 1e-06"):
        ledger.init("ratings", 3.5)


@pytest.mark.parametrize("reason", ["", "  ", "two\nlines", "x" * 501])
def test_a_limit_needs_a_reason(reason, ledger):
    with pytest.raises(SpecError, match="a limit is changed for a reason"):
        change_limit(ledger, "ratings", 3.0, None, reason)
    assert kinds(ledger) == []


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.0, None), (-1.0, None), (float("inf"), None), (1.0, 1.0)]
)
def test_a_limit_is_a_number(epsilon, delta, ledger):
    with pytest.raises(SpecError):
        change_limit(ledger, "ratings", epsilon, delta, "why not")
    assert kinds(ledger) == []


def test_a_changed_limit_cannot_be_forged(ledger):
    change_limit(ledger, "ratings", 3.0, None, "more")
    with ledger._store._writer.begin() as connection:
        connection.execute(sa.update(ENTRIES).values(epsilon=30.0))
    with pytest.raises(DataError, match="the entry 1 was changed"):
        ledger.intend("ratings", "one", ONE)


def test_a_strict_run_that_was_charged_goes_on_under_another_limit(ledger):
    """A refusal costs a hundredth of the limit, and so does a run whose rows are read after the charge."""
    ledger.init("ratings", 2.0, strict=True)
    small = rows(0.001)
    paid = ledger.intend("ratings", "one", small, unread=True)
    assert paid.charge.epsilon == 0.02
    change_limit(ledger, "ratings", 4.0, None, "more")
    assert ledger.intend("ratings", "one", small, unread=True) == paid
    with pytest.raises(SpecError, match="was intended with another charge"):
        ledger.intend("ratings", "one", rows(0.002), unread=True)
    assert ledger.intend("ratings", "two", small, unread=True).charge.epsilon == 0.04


# ---- lost releases


def test_an_import_is_recorded_once_and_only_adds(ledger):
    ledger.intend("ratings", "kept", ONE)
    assert import_claim(ledger, CLAIM)
    assert not import_claim(ledger, CLAIM)
    assert (kinds(ledger), spent(ledger)) == (["intend", "import"], 2.0)
    # another claim of that name, which costs more or less, is one more charge
    for epsilon, total in ((0.25, 2.25), (3.0, 5.25)):
        other = replace(CLAIM, charge=rows(epsilon))
        assert import_claim(ledger, other)
        assert not import_claim(ledger, other)
        assert spent(ledger) == total
    assert not import_claim(ledger, CLAIM)
    # also beside a run that the ledger charged itself
    own = ledger.show("ratings").entries[0]
    assert not import_claim(ledger, replace(CLAIM, run_id="kept", entry=own.digest))
    assert import_claim(ledger, replace(CLAIM, run_id="kept"))
    # the digest of another run's entry proves nothing
    assert import_claim(ledger, replace(CLAIM, run_id="foreign", entry=own.digest))
    assert spent(ledger) == 7.25
    assert ledger.read_balance("ratings").epsilon_left == 0.0


def test_a_run_that_was_given_back_and_turns_up_is_charged(ledger):
    entry = ledger.intend("ratings", "lost", ONE)
    ledger.void("ratings", "lost")
    assert spent(ledger) == 0.0
    assert import_claim(ledger, replace(CLAIM, entry=entry.digest))
    assert spent(ledger) == 1.0


def test_an_imported_run_cannot_be_drawn_or_given_back(ledger):
    import_claim(ledger, CLAIM)
    with pytest.raises(SpecError, match="'lost' is imported"):
        ledger.intend("ratings", "lost", ONE)
    with pytest.raises(SpecError, match="'lost' drew other noise before"):
        ledger.draw("ratings", "lost", "cd" * 32)
    with pytest.raises(SpecError, match="'lost' is imported"):
        ledger.void("ratings", "lost")
    # its driver may end it: what it would record is recorded
    assert ledger.commit("ratings", "lost", "cd" * 32).kind == "import"
    assert ledger.refuse("ratings", "lost", ONE).kind == "import"
    assert kinds(ledger) == ["import"]


@pytest.mark.parametrize(
    "charge",
    [
        rows(1.0, unit="column user"),
        Charge(
            epsilon=1.0,
            event=to_dict(DiscreteLaplace(scale=1.0, sensitivity=1, adjacency="add-remove")),
        ),
    ],
    ids=["unit", "adjacency"],
)
def test_a_claim_that_cannot_be_added_up_is_refused(charge, ledger):
    """Else one forged card would end the dataset: nothing could be composed any more."""
    ledger.intend("ratings", "one", ONE)
    with pytest.raises(SpecError, match="cannot be added up"):
        import_claim(ledger, replace(CLAIM, charge=charge))
    assert (kinds(ledger), spent(ledger)) == (["intend"], 1.0)


def test_a_later_card_counts_an_imported_release(ledger):
    import_claim(ledger, CLAIM)
    ledger.intend("ratings", "next", ONE)
    position = ledger.show("ratings").find_position("next")
    assert (position.epsilon, [entry.run_id for entry in position.earlier]) == (2.0, ["lost"])


def _import(url, numbers, gate):
    gate.wait()
    ledger = Ledger(url, compose=compose)
    for number in numbers:
        import_claim(
            ledger, replace(CLAIM, run_id=f"lost-{number % 4}", charge=rows(1 + number // 4))
        )


@pytest.mark.matrix("racing imports", "{url}")
def test_racing_imports_record_once(ledger, url):
    """Eight processes, each with all the claims in another order: four runs, with two charges each."""
    fork = multiprocessing.get_context("fork")
    gate = fork.Barrier(8)
    orders = [[*range(start, 8), *range(start)] for start in range(8)]
    processes = [fork.Process(target=_import, args=(url, order, gate)) for order in orders]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 8
    assert kinds(ledger) == ["import"] * 8
    assert spent(ledger) == 12.0
    assert ledger.verify("ratings") == 8


# ---- series


def series(previous="", head="", release=""):
    return Series(id="s", previous=previous, head=head, release=release)


def entry(charge, kind="commit", release=""):
    rest = dict.fromkeys(("run_id", "recorded", "previous", "digest"), "")
    return Entry(sequence=1, kind=kind, charge=charge, release=release, **rest)


def count(*entries):
    listed = [(each.charge, each.fitted) for each in entries]
    return sum(charge.epsilon for charge in count_series(listed))


def test_imported_releases_stand_in_their_series():
    first = rows(1.0, series=series(head="a"))
    second = rows(1.0, series=series("a", "b", "fitted"))
    imported = rows(1.0, series=series("a", "b"))
    third = rows(1.0, series=series("b", "c", "fitted"))
    # all of them, the last ones, the one in the middle
    assert count(entry(first, release="fitted"), entry(second), entry(third)) == 1.0
    assert count(entry(first, "import"), entry(imported, "import"), entry(third)) == 1.0
    assert count(entry(first, release="fitted"), entry(imported, "import"), entry(third)) == 1.0
    # what the ledger knew of the fitted release is not forgotten over an import
    other = rows(1.0, series=series("b", "c", "other"))
    assert count(entry(first, release="fitted"), entry(imported, "import"), entry(other)) == 2.0
    # a gap, a branch, and a card that claims more than the series paid for
    assert count(entry(first, "import"), entry(third)) == 2.0
    assert count(entry(first, "import"), entry(imported, "import"), entry(second)) == 2.0
    dear = rows(1.5, series=series("a", "b"))
    assert count(entry(first, release="fitted"), entry(dear, "import"), entry(third)) == 3.5


# ---- copies


@pytest.fixture
def target(tmp_path):
    return f"sqlite:///{tmp_path / 'copy.db'}"


def fill(ledger):
    ledger.init("census", 1.0, 1e-6, strict=True)
    ledger.intend("ratings", "one", ONE)
    ledger.draw("ratings", "one", "cd" * 32)
    ledger.holdout_key("ratings")
    change_limit(ledger, "ratings", 3.0, None, "more")
    import_claim(ledger, CLAIM)


def test_a_copy_goes_on_as_the_ledger_would(ledger, url, target):
    fill(ledger)
    keys = KeyTable(url)
    ledger.intend("ratings", "ab" * 16, rows(0.1, series=series("", "h")))
    # an imported card that calls a run's name a series does not bring its key into the copy
    named = Series(id="ab" * 16, head="h")
    import_claim(ledger, replace(CLAIM, run_id="planted", charge=rows(0.1, series=named)))
    lasting = ("names-" + "cd" * 16, "s")
    for name in ("ab" * 16, *lasting):
        keys.write(name, name.encode().ljust(40))
    table = keys.place
    assert copy_ledger(url, target) == {"census": 1, "ratings": 7}
    copied = Ledger(target, compose=compose)
    for dataset in ("ratings", "census"):
        assert copied.show(dataset) == ledger.show(dataset)
    assert copied.holdout_key("ratings", draw=False) == ledger.holdout_key("ratings")
    assert KeyTable(target).read("ab" * 16) is None  # a copy undoes no noise
    assert [KeyTable(target).read(name) for name in lasting] == [
        keys.read(name) for name in lasting
    ]
    assert KeyTable(target).place == table
    copied.commit("ratings", "one", "cd" * 32)
    with pytest.raises(BudgetError):
        copied.intend("ratings", "two", rows(1.5))
    with pytest.raises(SpecError, match="there is a ledger here already"):
        copy_ledger(url, target)
    assert copied.verify("ratings") == 8


def test_a_copy_comes_back(ledger, url, target):
    """From SQLite to SQLite, and to PostgreSQL."""
    fill(ledger)
    before = ledger.show("ratings")
    copy_ledger(url, target)
    with ledger._store._writer.begin() as connection:
        for table in ("dpdask_holdouts", "dpdask_entries", "dpdask_datasets"):
            connection.exec_driver_sql(f"DROP TABLE {table}")
    assert copy_ledger(target, url) == {"census": 1, "ratings": 5}
    assert ledger.show("ratings") == before
    ledger.commit("ratings", "one", "cd" * 32)


def test_a_broken_chain_is_not_copied(ledger, url, target):
    fill(ledger)
    with ledger._store._writer.begin() as connection:
        connection.execute(sa.delete(ENTRIES).where(ENTRIES.c.sequence == 2))
    with pytest.raises(DataError, match="dataset 'ratings': the chain is broken"):
        copy_ledger(url, target)
    with pytest.raises(SpecError, match="there is no ledger here"):
        Ledger(target).show("ratings")


def test_another_version_is_not_copied(ledger, url, target):
    with ledger._store._writer.begin() as connection:
        connection.exec_driver_sql("UPDATE dpdask_datasets SET format = 99")
    with pytest.raises(SpecError, match="'ratings' is of another version of the ledger"):
        copy_ledger(url, target)


def test_a_copy_that_fails_half_way_leaves_nothing(url, tmp_path):
    """The target refuses the last rows, or gives back other ones than were written."""
    source = f"sqlite:///{tmp_path / 'source.db'}"
    ledger = Ledger(source, compose=compose)
    ledger.init("ratings", 2.0)
    fill(ledger)
    LedgerStore(url).create(lambda _: None)
    engine = sa.create_engine(LedgerStore(url)._writer.url, poolclass=sa.NullPool)
    changed = (
        "CREATE TRIGGER changed AFTER INSERT ON dpdask_datasets BEGIN "
        "UPDATE dpdask_datasets SET created = 'now'; END"
    )
    if engine.dialect.name == "postgresql":
        changed = "ALTER TABLE dpdask_entries ALTER COLUMN epsilon TYPE integer"
    with engine.begin() as connection:
        connection.exec_driver_sql(changed)
    change_limit(ledger, "ratings", 3.1, None, "no whole number")
    with pytest.raises(SpecError, match="this database gives back other values"):
        copy_ledger(source, url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM dpdask_entries").scalar() == 0
        assert connection.exec_driver_sql("SELECT count(*) FROM dpdask_datasets").scalar() == 0
