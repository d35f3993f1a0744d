"""Check a release without dpdask: the digests of its files, and ε from the events on its cards.

    python verify.py FOLDER [STATEMENT]

FOLDER is a released folder, STATEMENT that of its dossier (statement.json beside this file, if not given). The exit
code is 0 if all is as stated, 1 if something is refused, 2 if the command line cannot be understood. It needs Python
3.11, numpy and dp-accounting, and reads nothing but these files. This file is a part of dpdask (Apache-2.0).
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

META, MARK = "_dpdask/", "_SUCCESS"
_OTHER = "its bytes differ from those in the statement"
NOT_CHECKED = """Not checked: whether the noise was drawn as the events say, what other releases of the dataset cost, what
the log of a Delta or Iceberg table adds, and who signed the statement: check its signature."""
_SIZES = {"local-release": "epsilon", "discrete-laplace": "scale", "discrete-gaussian": "sigma"}
_BROKEN = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
_DIGITS = 1e-9  # relative: what another processor or version of a library may round otherwise
# as in dpdask/privacy/events.py, where the reasons stand
_GRID, _MIN_STEP, _TAIL, _DOUBLE_ERROR, _SAFETY = 1e-4, 1e-7, 1e-7, 1e-15, 1e-9
_SMOOTHING, _FINE_SMOOTHING, _FINE, _EXACT_SIGMA = (2.0, 1e-16), (8.0, 1e-60), 2.0**10, 64.0


class RefusedError(Exception):
    """Something is not as it is stated; the message is one line."""


class Atom(NamedTuple):
    """One event of noise, or one release of a row: its kind, its scale or ε, and for which change."""

    kind: str
    size: float
    sensitivity: float
    adjacency: str

    @property
    def rate(self) -> Fraction:
        """Its pure ε; of Gaussian noise its sensitivity over its σ."""
        if self.kind == "local-release":
            return Fraction(self.size)
        return Fraction(self.sensitivity) / Fraction(self.size)

    @property
    def unit_shifts(self) -> int:
        """How many counts it lets move by one, if it is Gaussian."""
        gaussian = self.kind == "discrete-gaussian"
        return math.floor(self.sensitivity**2 * (1.0 + 1e-9)) if gaussian else 1

    @property
    def is_smoothed(self) -> bool:
        """Whether a continuous Gaussian stands for it."""
        large = self.unit_shifts >= 4 or self.size > _EXACT_SIGMA
        return self.kind == "discrete-gaussian" and large


def _check(holds: bool, refusal: str) -> None:
    if not holds:
        raise RefusedError("".join(c if c.isprintable() else "?" for c in refusal))  # of names


def _round(exact: Fraction, towards: float = math.inf) -> float:
    rounded = float(exact)
    beyond = Fraction(rounded) < exact if towards > 0 else Fraction(rounded) > exact
    return math.nextafter(rounded, towards) if beyond else rounded


def list_atoms(event: Any) -> Iterator[tuple[Atom, int, float]]:
    """Yield the noise of an event, how often it was drawn, and the δ of a selection of keys."""
    if (kind := str(event["kind"])) == "composed":
        for inner in event["events"]:
            yield from list_atoms(inner)
    elif kind == "key-selection":
        [(atom, n, _)] = list_atoms(event["noise"])
        _check(0 < event["delta"] < 1, "the δ of a selection of keys is not within 0 and 1")
        yield atom, n, event["delta"]
    else:
        _check(kind in _SIZES, "an event is of a kind that this version cannot price")
        local = kind == "local-release"
        n, moved = (event["n"], 1) if local else (event["count"], event["sensitivity"])
        atom = Atom(kind, event[_SIZES[kind]], moved, event.get("adjacency", "replace-one"))
        _check(0 < atom.size < math.inf and 1 <= moved < math.inf, "an event has no size")
        _check(type(n) is int and n >= 1, "an event has no count")
        yield atom, n, 0.0


def compute_epsilon(event: Any, delta: float, row: float | None = None) -> float:
    """Return the least of a sum, a concentrated bound and a composed distribution; `row` is a row's ε*, if not as claimed."""
    counted, left = Counter[Atom](), Fraction(delta)
    for atom, n, selected in list_atoms(event):
        left -= Fraction(selected)
        if row is not None and atom.kind == "local-release":
            atom = atom._replace(size=row)
        if atom.size:
            counted[atom] += n
    _check(
        len({each.adjacency for each in counted}) <= 1, "events of two adjacencies do not add up"
    )
    delta = _round(left, -math.inf)
    gaussian = any(each.kind == "discrete-gaussian" for each in counted)
    pure = sum((n * each.rate for each, n in counted.items()), Fraction(0))
    total = math.inf if gaussian or delta < 0 else _round(pure)
    if delta <= 0 or total == 0:
        return total
    rho = sum(n * min(float(each.rate), 1e150) ** 2 / 2.0 for each, n in counted.items())
    closed = min(total, (rho + 2.0 * math.sqrt(rho * -math.log(delta))) * (1.0 + _SAFETY))
    return min(closed, _by_distribution(counted, delta, closed))


def _by_distribution(counted: Mapping[Atom, int], delta: float, rough: float) -> float:
    """Return ε at δ by composed privacy loss distributions; infinity where doubles cannot tell."""
    from dp_accounting.pld import privacy_loss_distribution as pld  # type: ignore[import-untyped]  # no types

    convolved = {a: 1 if a.is_smoothed else n * a.unit_shifts for a, n in counted.items()}
    fine = {a: _FINE_SMOOTHING if a.sensitivity >= _FINE else _SMOOTHING for a in counted}
    resolved = delta - _DOUBLE_ERROR * (len(counted) + sum(convolved.values()))
    too_little = any(a.is_smoothed and a.size**2 <= fine[a][0] for a in counted)
    if resolved <= 0 or not rough < 1e3 or too_little:
        return math.inf
    step = max(_MIN_STEP, _GRID * rough)
    how: dict[str, Any] = {"value_discretization_interval": step, "use_connect_dots": True}
    tail = _TAIL * delta / (2 * len(counted))
    total, slack = pld.identity(value_discretization_interval=step), 0.0
    for atom, n in counted.items():
        if atom.is_smoothed:
            smoothing, error = fine[atom]
            deviation = math.sqrt(atom.size**2 - smoothing) / (atom.sensitivity * math.sqrt(n))
            part = pld.from_gaussian_mechanism(deviation * (1.0 - _SAFETY), **how)
            slack += error * atom.unit_shifts * n
        elif atom.kind == "discrete-gaussian":
            part = pld.from_discrete_gaussian_mechanism(atom.size, 1, **how)
        elif atom.kind == "local-release":
            part = pld.from_discrete_laplace_mechanism(atom.size, 1, **how)
        else:
            rate = math.nextafter(1.0 / atom.size, math.inf)
            part = pld.from_discrete_laplace_mechanism(rate, atom.sensitivity, **how)
        if convolved[atom] > 1:
            part = part.self_compose(convolved[atom], tail_mass_truncation=tail)
        total = total.compose(part, tail_mass_truncation=tail)
    return float(total.get_epsilon_for_delta(resolved * (1.0 - slack))) * (1.0 + _SAFETY) + slack


def compute_spent(card: Any) -> tuple[float, float] | None:
    """Return what a card's events cost, and what was spent of it by the ε* of its channels; None where no ε is promised."""
    promise, accounting = card["guarantee"], card["accounting"]
    if promise["epsilon"] is None:
        _check(accounting["epsilon_exact"] is None, "no ε is promised, and one is spent")
        return None
    event, delta = accounting["events"], promise["delta"]
    adjacencies = {atom.adjacency for atom, _, _ in list_atoms(event)}
    _check(adjacencies <= {promise["adjacency"]}, "the events have another adjacency")
    cost = compute_epsilon(event, delta)
    for column in card["columns"].values():
        within = _measure_loss(column) <= (column.get("epsilon_exact") or 0.0) * (1 + _DIGITS)
        _check(within, "a channel costs more than its ε")
    columns = [each for each in card["columns"].values() if each.get("epsilon_exact") is not None]
    row = _round(sum((Fraction(each["epsilon_exact"]) for each in columns), Fraction(0)))
    if "epsilon_row_exact" in accounting:  # along a tree, a row costs at most the sum
        _check(accounting["epsilon_row_exact"] <= row, "a row spends more than its columns")
        row = accounting["epsilon_row_exact"]
    elif "epsilon_reference" in accounting:
        counts = sum(map(Fraction, accounting["epsilon_reference"].values()), Fraction(0))
        noise = compute_epsilon(event, 0.0, 0.0)
        _check(noise <= float(counts) * (1 + _DIGITS), "the counts cost more than their part")
        n_rows = sum(n for atom, n, _ in list_atoms(event) if atom.kind == "local-release")
        return cost, _round(counts + n_rows * Fraction(row))
    return cost, compute_epsilon(event, delta, row if columns else None)


def _measure_loss(column: Any) -> float:
    """Return what a column's channel costs, as it is printed; 0 where none is."""
    if "window" in column:
        window = {name: np.array(each) for name, each in column["window"].items()}
        added = np.maximum(window["stays"], np.minimum(window["circle"] / window["width"], 1.0))
        lows = window["chance"] * window["apart"]
        highs = lows + (1.0 - window["chance"]) * added
    else:
        printed = column.get("channel") or column.get("rank_channel") or column.get("channels")
        weights = np.array(printed or [[]], dtype=np.float64)
        lows, highs = weights.min(axis=-2), weights.max(axis=-2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.abs(np.log(highs[highs != 0] / lows[highs != 0])).max(initial=0.0))


def check_card(card: Any) -> list[str]:
    """Return what was found about the ε of a card, in lines; refuse one that says another ε."""
    promise, said = card["guarantee"], card["accounting"]["epsilon_exact"]
    _check(not card["insecure"], "the noise is from a seed: this release protects nobody")
    if (found := compute_spent(card)) is None:
        return ["no ε is promised, so there is none to compute"]
    (cost, spent), most = found, promise["epsilon"]
    _check(cost <= most * (1 + _DIGITS), f"ε = {most!r} is promised, and its events cost {cost!r}")
    _check(spent <= most * (1 + _DIGITS), f"ε = {most!r} is promised, and {spent!r} was spent")
    _check(abs(said - spent) <= _DIGITS * spent, f"ε = {spent!r} was spent, and it says {said!r}")
    told = "to the last digit" if said == spent else f"{said!r}, rounded otherwise"
    return [
        f"promised ε = {most!r}, δ = {promise['delta']!r}, {promise['adjacency']}, unit {promise['unit']!r}; protected: {promise['protected']!r}; not protected: {promise['unprotected']!r}",
        f"the events cost ε = {cost!r}; spent ε = {spent!r}, as the card says: {told}",
    ]


def find_releases(files: Mapping[str, bytes]) -> dict[str, tuple[Any, Any]]:
    """Return the manifest and the card of each release, by the card's name."""
    found = {}
    for name in sorted(files):
        if name.startswith(start := f"{META}manifest"):
            place = f"{META}release{name.removeprefix(start)}"
            _check(place in files, f"{place}: the file is missing")
            manifest = json.loads(files[name])
            same = _digest(files[place]) == manifest["card_sha256"]
            _check(same, f"{place}: not the card that {name} names")
            found[place] = manifest, json.loads(files[place])
    _check(bool(found), f"{META}manifest.json: there is no finished release here")
    return found


def make_statement(files: Mapping[str, bytes]) -> bytes:
    """Return the in-toto Statement on the files beside a release's shards, which are in a manifest."""
    releases, own = [], ("epsilon", "delta", "adjacency", "unit", "text")
    for place, (_, card) in find_releases(files).items():
        spent = {"card": place, "epsilon_exact": card["accounting"]["epsilon_exact"]}
        releases.append(spent | {key: card["guarantee"][key] for key in own})
    subjects = [
        {"name": name, "digest": {"sha256": _digest(files[name])}} for name in sorted(files)
    ]
    content = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "urn:dpdask:release:v1",
        "predicate": {"releases": releases},
    }
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def check_folder(folder: Path, stated: bytes) -> list[str]:
    """Return what was found, in lines; refuse a folder that is not as stated."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    files = {name: folder.joinpath(name).read_bytes() for name in names if is_beside(name)}
    for subject in json.loads(stated)["subject"]:
        _check((name := subject["name"]) in files, f"{name}: the file is missing")
        _check(_digest(files[name]) == subject["digest"]["sha256"], f"{name}: {_OTHER}")
    _check(make_statement(files) == stated, "the statement was changed, or a file was added")
    releases = find_releases(files)
    manifests = [manifest for manifest, _ in releases.values()]
    shards = {each["name"]: each for manifest in manifests for each in manifest["shards"]}
    for name, shard in shards.items():
        _check(name in names, f"{name}: the file is missing")
        with folder.joinpath(name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        _check(digest == shard["sha256"], f"{name}: {_OTHER}")
    # what is read of a plain folder is all that is there, behind links to folders too; a Delta or Iceberg table has a log
    others = [name for name in names if name not in shards and name not in files]
    _check(MARK not in files or not others, f"{''.join(others[:1])}: not in the statement")
    lines = [f"the bytes are as stated, of shards ({len(shards)}) and other files ({len(files)})"]
    for place, (_, card) in releases.items():
        lines += [f"{place}: {line}" for line in check_card(card)]
    return lines


def is_beside(name: str) -> bool:
    """Return whether a file of a released folder is a subject of its statement, and no shard."""
    return name == MARK or name.startswith(META)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main(arguments: list[str]) -> int:
    """Check a folder against its statement, say what was found, and return the exit code."""
    if len(arguments) not in (1, 2):
        sys.stderr.write("python verify.py FOLDER [STATEMENT]\n")
        return 2
    stated = Path(*arguments[1:]) if arguments[1:] else Path(__file__).with_name("statement.json")
    try:
        lines = check_folder(Path(arguments[0]), stated.read_bytes())
    except (RefusedError, OSError) as error:
        lines = [f"REFUSED: {error}"]
    except _BROKEN as error:
        lines = [f"REFUSED: a file is not what it should be ({type(error).__name__})"]
    else:
        lines += [NOT_CHECKED, "VERIFIED"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if lines[-1] == "VERIFIED" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
