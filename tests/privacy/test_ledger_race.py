"""Six processes charge one budget at once, some of them killed: never overspent, none lost, the chain whole."""

import signal
from collections import Counter

import pytest
from privacy.ledger_worker import CHARGE, run_phases

from dpdask.errors import BudgetError
from dpdask.privacy.ledger import Charge, Ledger

N_WORKERS = 6
SIZES = [
    (24, 14),
    pytest.param((200, 120), marks=pytest.mark.slow),
]  # how many runs there are, and how many fit


def runs_of(n_jobs):
    """Return the runs of each worker."""
    return [
        [f"run-{number}" for number in range(worker, n_jobs, N_WORKERS)]
        for worker in range(N_WORKERS)
    ]


def answers(folder):
    """What the callers were told, by run; a run that was told twice was told the same, unless it was refused before."""
    told = [
        line.split() for log in sorted(folder.iterdir()) for line in log.read_text().splitlines()
    ]
    return {run_id: answer for answer, run_id in told}


def check_chain(ledger, accepted):
    shown = ledger.show("ratings")
    kinds = Counter((entry.run_id, entry.kind) for entry in shown.entries)
    assert set(kinds) == {(run_id, kind) for run_id in accepted for kind in ("intend", "commit")}
    assert set(kinds.values()) == {1}
    assert ledger.verify("ratings") == 2 * len(accepted)
    return shown


@pytest.mark.few(1)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_racing_runs_fill_the_budget_and_never_overspend_it(size, url, tmp_path):
    (n_jobs, n_fit), limit = size, size[1] * CHARGE.epsilon
    ledger = Ledger(url)
    ledger.init("ratings", limit, 2.0**-10)
    logs = tmp_path / "logs"
    logs.mkdir()
    [race] = run_phases(url, "ratings", logs, [[{"runs": runs} for runs in runs_of(n_jobs)]])
    told = answers(logs)
    accepted = {run_id for run_id, answer in told.items() if answer == "accepted"}
    assert race["statuses"] == [0] * N_WORKERS
    assert len(told) == n_jobs
    assert len(accepted) == n_fit
    shown = check_chain(ledger, accepted)
    assert (shown.balance.epsilon_spent, shown.balance.epsilon_left, shown.balance.n_runs) == (
        limit,
        0.0,
        n_fit,
    )
    with pytest.raises(BudgetError):
        ledger.intend("ratings", "one more", Charge(epsilon=5e-324))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_race_in_which_workers_are_killed_charges_every_run_once(size, url, tmp_path):
    """Four workers die of themselves in every moment, two by another hand at any time; then all runs are run again."""
    (n_jobs, n_fit), limit, queues = size, size[1] * CHARGE.epsilon, runs_of(size[0])
    ledger = Ledger(url)
    ledger.init("ratings", limit, 2.0**-10)
    logs = tmp_path / "logs"
    logs.mkdir()
    workers = [{"runs": runs} for runs in queues]
    for number, moment in enumerate(("composing", "committing", "intended", "intended")):
        workers[number]["kill"] = {queues[number][1]: moment}
    workers[4]["kill_after"], workers[5]["kill_after"] = 1, 3
    mixed, again = run_phases(url, "ratings", logs, [workers, [{"runs": runs} for runs in queues]])
    for number, status in enumerate(
        mixed["statuses"][:4]
    ):  # a worker that others kept out until the budget was full has no charge to die of
        assert (
            status == -signal.SIGKILL
            or f"refused {queues[number][1]}\n" in (logs / f"0-{number}").read_text()
        )
    assert set(mixed["statuses"][4:6]) <= {-signal.SIGKILL, 0}  # the other hand may come too late
    assert again["statuses"] == [0] * N_WORKERS
    assert mixed["n_runs"] <= n_fit
    told = answers(logs)
    accepted = {run_id for run_id, answer in told.items() if answer == "accepted"}
    assert len(told) == n_jobs
    assert len(accepted) == n_fit
    first = {
        line.split()[1]
        for log in logs.glob("0-*")
        for line in log.read_text().splitlines()
        if line.startswith("accepted")
    }
    assert first <= accepted
    shown = check_chain(ledger, accepted)
    assert (shown.balance.epsilon_spent, shown.balance.n_runs) == (limit, n_fit)


@pytest.mark.few(1)
def test_racing_inits_make_one_ledger(url, tmp_path):
    workers = [{"runs": [], "init": 1.0 + number % 2} for number in range(N_WORKERS)]
    [race] = run_phases(url, "ratings", tmp_path, [workers])
    limit = Ledger(url).read_balance("ratings").epsilon_limit
    assert limit in (1.0, 2.0)
    assert [status == 0 for status in race["statuses"]] == [
        worker["init"] == limit for worker in workers
    ]
