"""What the scripts of this folder share: cells with standard errors, tables that are printed and kept, streams of replicates.

`paper.json` has the paper's numbers: by table, setting and method, for each ε, a mean and the number in parentheses behind it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

Array = Any
EPSILONS = (1.0, 2.0, 3.0, 4.0)
FRACTIONS = (0.15, 0.25, 0.35)
NAMES = {fraction: f"DIP, {round(100 * fraction)} % held out" for fraction in FRACTIONS}
ALL_PRIVATE = "DIP, none held out"
PAPER_REPLICATES = 1000
PAPER = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
LIMIT, NEAR = 3.0, 0.1  # of combined standard errors; of the paper's number


@dataclass(frozen=True, slots=True)
class Cell:
    """A mean over replicates: its standard deviation over them, how many there were (one has no spread), and to what it was rounded."""

    mean: float
    spread: float
    replicates: int
    rounded_to: float = 0.0

    @classmethod
    def of(cls, samples: Iterable[float]) -> Cell:
        found = np.asarray(list(samples), dtype=float)
        return cls(
            float(found.mean()),
            float(found.std(ddof=1)) if len(found) > 1 else math.nan,
            len(found),
        )

    @property
    def error(self) -> float:
        """The standard error of the mean, with what rounding adds."""
        return math.hypot(self.spread / math.sqrt(self.replicates), self.rounded_to / math.sqrt(12))

    def times(self, factor: float) -> Cell:
        return Cell(
            self.mean * factor, self.spread * factor, self.replicates, self.rounded_to * factor
        )

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return "∞" if self.mean > 0 else "–"
        if not math.isfinite(self.error):
            return f"{self.mean:.4g}"
        digits = 2 if self.error == 0 else min(6, max(0, 1 - math.floor(math.log10(self.error))))
        return f"{self.mean:.{digits}f} ± {self.error:.{digits}f}"


def published(mean: float, spread: float, replicates: int = PAPER_REPLICATES) -> Cell:
    """Return a cell of the paper.

    Its parentheses are called standard errors but are standard deviations over the replicates: for the non-private mean
    of Table 4, whose exact law is known, they are 0.75 of the mean, as for the absolute value of a Gaussian (0.755);
    standard errors of 1000 replicates would be 0.024 of it.
    """
    return Cell(mean, spread, replicates, rounded_to=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line: a setting, a method and an ε, what the paper has and what we have."""

    setting: str
    method: str
    epsilon: float | None
    paper: Cell | None = None
    ours: Cell | None = None
    optimal: Cell | None = None
    private: Cell | None = None

    @property
    def of_paper(self) -> str | None:
        """Whose cell of the paper a line of NP or DIP stands beside: its method, without what a variant adds to the name."""
        found = re.match(r"NP|DIP, \d+ % held out|DIP$", self.method)
        return found.group() if found else None

    @property
    def is_near(self) -> bool:
        """Whether ours is within 3 combined standard errors or 10 % of the paper's."""
        return self.apart is not None and (
            abs(self.apart) <= LIMIT or abs(self.ours.mean / self.paper.mean - 1) <= NEAR
        )

    @property
    def apart(self) -> float | None:
        """By how many combined standard errors ours and the paper's differ."""
        if self.paper is None or self.ours is None:
            return None
        combined = math.hypot(self.paper.error, self.ours.error)
        return (
            (self.ours.mean - self.paper.mean) / combined
            if combined > 0 and math.isfinite(combined)
            else None
        )


def cells_of(replicates: Sequence[Mapping[str, float]]) -> dict[str, Cell]:
    """Return by name the cell of the replicates that have such a number; the first has all names."""
    return {name: Cell.of(one[name] for one in replicates if name in one) for name in replicates[0]}


def lines(
    table: str,
    setting: str,
    epsilon: float | None,
    methods: Sequence[str],
    cells: Mapping[str, Cell],
    replicates: int = PAPER_REPLICATES,
) -> list[Row]:
    """Return a line for each method that has a cell; the paper has numbers for this setting of its table, or for all.

    The cells of a line's last columns are named "optimal" and "private" and then the method. A variant, whose name goes
    on after the method's, stands beside the same numbers of the paper; so does resampling beside the paper's EXM.
    """
    paper, rows = PAPER[table].get(setting) or PAPER[table].get("all", {}), []
    for method in methods:
        columns = {"ours": method, "optimal": f"optimal {method}", "private": f"private {method}"}
        found = {column: cells[name] for column, name in columns.items() if name in cells}
        if not found:
            continue
        name = "EXM" if method == "resampling" else method
        quoted = next((paper[of] for of in paper if name.startswith(of)), None)
        if quoted is not None:
            found["paper"] = published(*quoted[int(epsilon) - 1], replicates)
        rows.append(Row(setting=setting, method=method, epsilon=epsilon, **found))
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of the paper beside ours."""

    name: str
    title: str
    unit: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def markdown(self) -> str:
        lines = [f"### {self.name}: {self.title}", "", self.unit, ""]
        lines += [
            "| setting | method | ε | paper | ours | ours, optimal channel | ours, end to end private | apart |",
            "|---|---|--:|--:|--:|--:|--:|--:|",
        ]
        for row in self.rows:
            apart = "" if row.apart is None else f"{row.apart:+.1f}"
            cells = [
                str(cell) if cell is not None else ""
                for cell in (row.paper, row.ours, row.optimal, row.private)
            ]
            epsilon = "" if row.epsilon is None else f"{row.epsilon:g}"
            lines.append(
                f"| {row.setting} | {row.method} | {epsilon} | {' | '.join(cells)} | {apart} |"
            )
        notes = [f"- {note}" for note in self.notes] + (
            [f"- {self.seconds:.0f} s."] if self.seconds else []
        )
        return "\n".join([*lines, "", *notes, ""])

    def judged(self) -> list[Row]:
        """Return the lines of NP and DIP, without variants, that have a number of the paper beside them."""
        return [row for row in self.rows if row.of_paper == row.method and row.apart is not None]

    def variants(self, row: Row) -> list[Row]:
        """Return the lines that read the paper's experiment in another way than a judged line does."""
        same = [
            other
            for other in self.rows
            if (other.setting, other.epsilon, other.of_paper)
            == (row.setting, row.epsilon, row.method)
        ]
        return [other for other in same if other.method != row.method]

    def counts(self) -> tuple[int, int, int, int]:
        """Return how many cells are judged, are within 3 standard errors, so or within 10 %, and so by a variant."""
        rows = self.judged()
        return (
            len(rows),
            sum(abs(row.apart) <= LIMIT for row in rows),
            sum(row.is_near for row in rows),
            sum(any(other.is_near for other in [row, *self.variants(row)]) for row in rows),
        )

    def verdict(self) -> str:
        """Return how many judged cells agree with the paper's."""
        n, within, near, read = self.counts()
        return f"{n} cells of NP and DIP: {within} within 3 combined standard errors, {near} so or within 10 %, {read} with the variants"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Table:
        found = json.loads(text)
        rows = [
            Row(
                **{
                    key: Cell(**value) if isinstance(value, dict) else value
                    for key, value in row.items()
                }
            )
            for row in found.pop("rows")
        ]
        return cls(rows=rows, **found)


def replicate_rng(seed: int, *place: int) -> np.random.Generator:
    """Return the generator of one place of an experiment: data and baselines, not releases, which have keyed streams."""
    return np.random.default_rng([seed, *place])


def parser(description: str, replicates: int, data: str | None = None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "--replicates",
        type=int,
        default=replicates,
        help=f"default {replicates}; the paper has {PAPER_REPLICATES}",
    )
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--json", type=Path, help="also write the table to this file")
    if data is not None:
        found.add_argument("--data", type=Path, required=True, help=data)
    return found


def choose(found: argparse.ArgumentParser, name: str, values: Sequence[float]) -> None:
    """Add an option of which any of some numbers are chosen, by default all."""
    found.add_argument(name, type=type(values[0]), nargs="+", default=list(values), choices=values)


def report(options: argparse.Namespace, make: Callable[[], Table]) -> Table:
    """Make, print and keep a table."""
    if options.replicates < 1:
        raise SystemExit("--replicates must be at least 1")
    begun = time.perf_counter()
    table = make()
    table = replace(table, seconds=time.perf_counter() - begun)
    print(table.markdown())
    print(table.verdict())
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(table.to_json(), encoding="utf-8")
    return table
