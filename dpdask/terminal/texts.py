"""What the command line prints of an audit and of a ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpdask.errors import say_count
from dpdask.privacy import attacker_power, bound_values, percent_above
from dpdask.privacy.events import from_dict, hides_presence
from dpdask.privacy.ledger_entries import NO_RUN, Balance, Book
from dpdask.privacy.rounding import shorten


def describe_audit(found: Mapping[str, Any]) -> str:
    """Return what an audit found, a line for each column and each measurement."""
    sound = "sound" if found["sound"] else "NOT SOUND: an ε is above its claim"
    sound = sound if found["columns"] or found["measurements"] else "nothing to audit: it has no ε"
    columns = (
        f"  {name}: ε* = {column['epsilon_exact']!r} of {column['claimed']!r} claimed, for {column['reference']}"
        for name, column in (*found["columns"].items(), *_row(found))
    )
    measurements = (
        f"  histogram noise of {_size_text(one)}: at least ε = {one['lower_bound']:.4g} (99.9999 % confidence) of {one['claimed']!r} claimed"
        for one in found["measurements"]
    )
    return "\n".join([f"{found['name']}: {sound}", *columns, *measurements])


def _row(found: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [] if found["row"] is None else [("a whole row", found["row"])]


def _size_text(measurement: Mapping[str, Any]) -> str:
    return (
        f"scale {measurement['scale']:.6g}"
        if "scale" in measurement
        else f"σ {measurement['sigma']:.6g}"
    )


def describe_ledger(summary: Book) -> str:
    """Return what a dataset's releases spent, what is left, and its entries."""
    balance = summary.balance
    used, left = shorten(balance.epsilon_spent, up=True), shorten(balance.epsilon_left, up=False)
    spent = f"ε {used} of {balance.epsilon_limit!r} spent by {say_count(balance.n_runs, 'run')}, {left} left"
    entries = (
        f"  {entry.sequence:>4} {entry.recorded} {entry.kind:<6} ε {shorten(entry.charge.epsilon, up=True)} δ {entry.charge.delta!r} {entry.run_id}"
        + (
            f", series {entry.charge.event['series']['id']}"
            if "series" in entry.charge.event
            else ""
        )
        for entry in summary.entries
    )
    lines = [
        f"{summary.dataset}: {spent}; δ {shorten(balance.delta_spent, up=True)} of {balance.delta_limit!r}",
        *_attacker_lines(balance, add_remove=_is_add_remove(summary)),
        *_refusal_lines(balance),
        *entries,
        f"  head {summary.head}",
    ]
    return "\n".join(lines)


def _refusal_lines(balance: Balance) -> list[str]:
    if not balance.n_refused:
        return []
    runs = say_count(balance.n_refused, "run")
    exact = "a refusal reveals an exact answer, and no bound on an attacker covers it"
    return [f"  {runs} read rows and refused them; {balance.n_refusals_charged} charged; {exact}"]


def _is_add_remove(summary: Book) -> bool:
    """Return whether a charge that counts is of add-remove; a dataset has one adjacency."""
    newest = {entry.run_id: entry for entry in summary.entries if entry.kind not in NO_RUN}
    return any(
        hides_presence(from_dict(entry.charge.event))
        for entry in newest.values()
        if entry.counts and entry.charge.event
    )


def _attacker_lines(balance: Balance, *, add_remove: bool) -> list[str]:
    """Return a bound on an attacker for the rows that every run covers, and the share of the other rows; nothing if nothing is spent."""
    if not balance.epsilon_spent and not balance.coverage.text:
        return []
    spent = balance.epsilon_spent, balance.delta_limit  # epsilon_spent is the ε at δ = delta_limit
    values = percent_above(
        attacker_power(*bound_values(*spent, "add-remove" if add_remove else "replace-one"))
    )
    detects = f"at a false-alarm rate of 5 %, detects it with probability at most {values}"
    if add_remove:
        detects += f" (values count twice: 2ε), and whether it is there with probability at most {percent_above(attacker_power(*spent))}"
    coverage = balance.coverage
    if not coverage.text:
        return [f"  an attacker who has all these releases and tests what a row was, {detects}"]
    lines = [
        f"  coverage: {coverage.text}; no bound on an attacker holds for rows or columns without ε"
    ]
    if coverage.uncovered < 1 and not coverage.n_unknown:
        what = "what its other columns were" if coverage.columns else "what it was"
        lines.append(
            f"  for a row that every run covers, an attacker who has all these releases and tests {what}, {detects}"
        )
    return lines
