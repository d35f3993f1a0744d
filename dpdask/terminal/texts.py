"""What the command line prints of a run, an audit and a ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpdask.errors import say_count
from dpdask.privacy import attacker_power, bound_values, percent_above
from dpdask.privacy.budget import wrap_promise
from dpdask.privacy.events import from_dict, hides_presence, shorten
from dpdask.privacy.ledger_entries import Balance, Book, Kind, say_further


def describe_outcome(name: str, result: Mapping[str, Any], told: Mapping[str, str]) -> str:
    """Return what a run ended with; `told` is what was done, and the promise."""
    warnings = [f"  WARNING   {warning}" for warning in result["warnings"]]
    if result["status"] == "nothing new":
        return "\n".join([f"{name}: nothing new", f"  where     {result['output']}", *warnings])
    persons = f"{say_count(result['persons'], 'person')} with " if "persons" in result else ""
    lines = [
        _begin(name, result),
        *warnings,
        f"  where     {result['output']}",
        f"  what      {persons}{say_count(result['rows'], 'row')} in {say_count(result['shards'], 'shard')}, {result['bytes'] / 1e6:,.1f} MB",
        f"  how       {told['how']}",
        *wrap_promise(told["promise"]),
        *([f"  quality   {result['quality']}"] if result["quality"] else []),
    ]
    return "\n".join(lines)


def _begin(name: str, result: Mapping[str, Any]) -> str:
    insecure = " (INSECURE: seeded, protects nobody)" if result["insecure"] else ""
    return f"{name}: {result['status']}{insecure}"


def describe_levels(result: Mapping[str, Any]) -> str:
    """Return which levels were found, and where they are written."""
    lines = [_begin(result["name"], result)]
    lines += [f"  where     {result['output']}"] if "output" in result else []
    for column, told in result["levels"].items():
        most = "" if told["found"] == told["written"] else f", the {told['written']:,} commonest"
        found = say_count(told["found"], "level")
        lines.append(f"  {column}: {found} found{most} written into {result['schema']}")
    if "epsilon" in result:
        cost = f"ε = {result['epsilon']:g}, δ = {result['delta']:g}"
        lines.append(f"  spent     {cost}, once; what later jobs spend is added to it")
    warnings = [f"  WARNING   {warning}" for warning in result["warnings"]]
    return "\n".join([*lines, *warnings])


def describe_status(place: str, found: Mapping[str, Any]) -> str:
    """Return the state of an output in a line."""
    text = f"{place}: {found['stage']}"
    if found["n_shards"]:
        text += f", {say_count(found['n_shards'], 'shard')}"
    if found["n_releases"] > 1:
        text += f", {say_count(found['n_releases'], 'release')}"
    if found["n_missing"]:
        text += f"; missing shards: {found['n_missing']}; restore them from a copy"
    if found["n_hidden"]:
        text += f"; files of an ended run in the hidden folder: {found['n_hidden']}; the next run removes them"
    return text


def describe_import(
    recorded: Sequence[tuple[str, str, float]], n_known: int, balances: Mapping[str, Balance]
) -> str:
    """Return which releases a restored ledger has recorded: the dataset, the name and the ε of each; and what is spent now."""
    lines = [f"{dataset}: recorded {run}, ε {epsilon!r}" for dataset, run, epsilon in recorded]
    told = f"{say_count(len(recorded), 'release')} recorded, {n_known} known already"
    for dataset, balance in balances.items():
        spent, limit = shorten(balance.epsilon_spent, up=True), balance.epsilon_limit
        lines.append(f"{dataset}: {told}; ε {spent} of {limit!r} spent")
    return "\n".join(lines)


def describe_audit(found: Mapping[str, Any]) -> str:
    """Return what an audit found, a line for each column and each measurement."""
    sound = "sound" if found["sound"] else "NOT SOUND: an ε is above its claim"
    if not (found["columns"] or found["measurements"]):
        sound = "nothing to audit: it has no ε"
    rows = {} if found["row"] is None else {"a whole row": found["row"]}
    lines = [f"{found['name']}: {sound}"]
    for name, column in {**found["columns"], **rows}.items():
        claimed = f"of {column['claimed']!r} claimed, for {column['reference']}"
        lines.append(f"  {name}: ε* = {column['epsilon_exact']!r} {claimed}")
    for one in found["measurements"]:
        size = f"scale {one['scale']:.6g}" if "scale" in one else f"σ {one['sigma']:.6g}"
        bound = f"at least ε = {one['lower_bound']:.4g} (99.9999 % confidence)"
        lines.append(f"  histogram noise of {size}: {bound} of {one['claimed']!r} claimed")
    return "\n".join(lines)


def make_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows that have the same keys as lines of text with aligned columns; a key without values is left out."""
    shown = [key for key in (rows[0] if rows else ()) if any(row[key] is not None for row in rows)]
    cells = [
        [key.removeprefix("n_") for key in shown],
        *(["" if row[key] is None else str(row[key]) for key in shown] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)
    return "\n".join(lines) if rows else "there are no runs"


def describe_budget(book: Book, *, made: bool) -> str:
    """Return the budget of a dataset, and whether it was given now."""
    rule = ", strict: refusals that read rows are charged" if book.strict else ""
    what = "a budget of" if made else "has this budget already:"
    return f"{book.dataset}: {what} ε {book.epsilon!r}, δ {book.delta!r}{rule}"


_STATES: dict[Kind, str] = {
    "intend": "unfinished",
    "draw": "unfinished, drawn",
    "commit": "released",
    "void": "taken back",
    "refuse": "refused",
    "import": "imported",
}


def describe_ledger(summary: Book, *, entries: bool = False) -> str:
    """Return what a dataset's releases spent, what is left, and a line for each release; with `entries`, one for each link of the chain."""
    balance = summary.balance
    used, left = shorten(balance.epsilon_spent, up=True), shorten(balance.epsilon_left, up=False)
    runs = say_count(balance.n_runs, "run")
    spent = f"ε {used} of {balance.epsilon_limit!r} spent by {runs}, {left} left"
    delta = f"δ {shorten(balance.delta_spent, up=True)} of {balance.delta_limit!r}"
    # a dataset has one adjacency, that of its charges that count
    events = [each.charge.event for each in summary.standing.values() if each.charge.event]
    add_remove = any(hides_presence(from_dict(event)) for event in events)
    lines = [f"{summary.dataset}: {spent}; {delta}"]
    if summary.further is not None:
        lines.append(f"  room for {say_further(summary.further)} more like the last release")
    lines += _attacker_lines(balance, add_remove=add_remove)
    if balance.n_refused:
        refused = say_count(balance.n_refused, "run")
        exact = "a refusal reveals an exact answer, and no bound on an attacker covers it"
        charged = f"{balance.n_refusals_charged} charged; {exact}"
        lines.append(f"  {refused} read rows and refused them; {charged}")
    lines += _entry_lines(summary) if entries else _release_lines(summary)
    return "\n".join(lines)


def _release_lines(summary: Book) -> Iterator[str]:
    """Yield a table with a line for each run, and what changed the dataset's rules."""
    counted = summary.count()
    rows, free = list[dict[str, Any]](), 0
    for run_id, entry in summary.latest.items():
        cost = shorten(entry.charge.epsilon if entry.counts else 0.0, up=True)
        named = (each.charge.names for each in summary.entries if each.run_id == run_id)
        names = next((each for each in named if each), {})
        if entry.counts and not any(entry.charge is each for each in counted):
            cost, free = f"({cost})", free + 1
        rows.append(
            {
                "date": _say_time(entry.recorded),
                "job": names.get("job") or None,
                "mechanism": names.get("mechanism"),
                "ε": cost,
                "output": names.get("output") or None,
                "state": _STATES[entry.kind],
            }
        )
    if rows:
        yield from (f"  {line}" for line in make_table(rows).splitlines())
    if free:
        yield "  An ε in brackets is of rows that are new in their series: it adds nothing to the total."
    for entry in summary.entries:
        if entry.kind in ("limit", "strict"):
            told = (
                f"limit ε {entry.charge.epsilon!r}, δ {entry.charge.delta!r}: {entry.charge.event['reason']}"
                if entry.kind == "limit"
                else "strict from now on"
            )
            yield f"  {_say_time(entry.recorded)}  {told}"


def _say_time(recorded: str) -> str:
    """Return when an entry was recorded, in UTC, to the minute."""
    return recorded[:16].replace("T", " ")


def _entry_lines(summary: Book) -> Iterator[str]:
    for entry in summary.entries:
        cost = f"ε {shorten(entry.charge.epsilon, up=True)} δ {entry.charge.delta!r}"
        event = entry.charge.event
        series = f", series {event['series']['id']}" if "series" in event else ""
        series += f": {event['reason']}" if entry.kind == "limit" else ""
        start = f"  {entry.sequence:>4} {entry.recorded} {entry.kind:<6}"
        yield f"{start} {cost} {entry.run_id}{series}"
    yield f"  head {summary.head}"


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
