"""What an outsider sees of a release, and how well it tells two neighbouring tables apart."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from e2e.helpers import hidden, load, write_job
from scipy import stats

from dpdask.engine.account import open_ledger
from dpdask.errors import DpdaskError
from dpdask.jobs.run import run_job
from dpdask.jobs.spec import Job

View = dict[str, Hashable]  # everything that is seen, leaf by leaf
Event = Callable[[View], bool]
ID = "id"  # the public name of a row, where a schema keeps one

_MISSING = "(absent)"
_CHOSEN = 3  # events that go to the second half of an audit
_MANY = 12  # values of a leaf, from which on only those that come again are events
_HASHES = ("sha256", "card_sha256")  # functions of what is seen anyway


# ---- what is seen


@dataclass(frozen=True, slots=True)
class Bench:
    """A job whose input is exchanged: every run of either neighbour differs in the table and the seed alone.

    Attributes
    ----------
    budget
        Of the ledger that each run finds new; None without a ledger. What stands in it afterwards is seen too.
    strict
        Whether the ledger charges refusals.
    """

    folder: Path
    job: Job
    budget: float | None = None
    strict: bool = False

    @classmethod
    def of(cls, folder, schema, *, budget=None, strict=False, **changes):
        """Return the bench of a job; `changes` are those of `write_job`."""
        if budget is not None:
            changes |= {
                "ledger": {"url": f"sqlite:///{folder / 'ledger.db'}", "dataset": "people"},
                "insecure_seed": None,
            }
        return cls(
            folder,
            load(
                write_job(folder / "job", folder / "in", folder / "out", schema=schema, **changes)
            ),
            budget,
            strict,
        )

    def views(self, parts, seeds):
        """Return what is seen of one run for each seed, on a table in so many files; with a ledger noise comes from the system."""
        source = self.folder / "in"
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir(parents=True)
        for number, part in enumerate(parts):
            pq.write_table(part, source / f"part.{number}.parquet")
        return [self._view(seed) for seed in seeds]

    def _view(self, seed):
        out, ledger = self.folder / "out", self._new_ledger()
        job = Job(
            self.job.file.model_copy(update={"insecure_seed": seed if ledger is None else None}),
            self.job.schema,
            self.folder / "job",
        )
        seen = {}
        with dask.config.set(scheduler="synchronous"):
            try:
                seen["ends"] = run_job(job).status  # its warnings are the steward's
            except DpdaskError as error:
                seen["ends"] = f"{error.exit_code}: {error}"
        if out.exists():
            seen |= folder_view(out)
            shutil.rmtree(out)
        left = hidden(out)
        seen["hidden folder"] = left.exists()
        shutil.rmtree(left, ignore_errors=True)
        if ledger is not None:
            found = ledger.show("people")
            seen["ledger"] = str(
                [(entry.kind, entry.charge.epsilon, entry.charge.delta) for entry in found.entries]
            )
            seen["spent"] = found.balance.epsilon_spent
        return seen

    def _new_ledger(self):
        if self.budget is None:
            return None
        (self.folder / "ledger.db").unlink(missing_ok=True)
        made = open_ledger(f"sqlite:///{self.folder / 'ledger.db'}")
        made.init("people", self.budget, strict=self.strict)
        return made


def folder_view(folder):
    """Return what a lake's reader sees of a released folder."""
    seen = {}
    tables = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                found, table = file.metadata, file.read()
            seen[f"{name} rows"], seen[f"{name} groups"] = found.num_rows, found.num_row_groups
            seen[f"{name} schema"], seen[f"{name} metadata"] = (
                str(table.schema),
                str(found.metadata),
            )
            tables.append(table)
        elif path.suffix == ".arrow":
            counts = pa.ipc.open_file(path).read_all()
            seen |= {f"{name} {key}": value for key, value in rows_view(counts).items()}
        elif path.suffix == ".json":
            seen |= document_view(name, json.loads(path.read_bytes()))
        else:
            seen[f"{name} bytes"] = path.stat().st_size
    return seen | (rows_view(pa.concat_tables(tables)) if tables else {})


def document_view(name, document):
    """Return every leaf of a JSON document; of hashes nothing."""
    if isinstance(document, Mapping):
        parts = [
            document_view(f"{name} {key}", value)
            for key, value in document.items()
            if key not in _HASHES
        ]
    elif isinstance(document, list | tuple):
        parts = [document_view(f"{name} {number}", value) for number, value in enumerate(document)]
    else:
        return {name: document if isinstance(document, Hashable) else str(document)}
    return {key: value for part in parts for key, value in part.items()} | {
        f"{name} size": len(parts)
    }


def rows_view(table):
    """Return released rows, each value by its place and by its row's public name, and all rows at once."""
    seen = {"n rows": table.num_rows, "columns": " ".join(table.column_names)}
    rows = table.to_pylist()
    for place, row in enumerate(rows):
        for name, value in row.items():
            seen[f"row {place} {name}"] = value
            if ID in row:
                seen[f"{ID} {row[ID]} {name}"] = value
    private = [tuple(value for name, value in row.items() if name != ID) for row in rows]
    seen["all rows"], seen["all rows, in any order"] = str(private), str(sorted(map(str, private)))
    for name in table.column_names:
        values = table.column(name).to_pylist()
        seen[f"distinct {name}"] = len(set(values))
    return seen


def frame_view(frame):
    """Return what is seen of a released frame."""
    seen = rows_view(pa.Table.from_pandas(frame, preserve_index=False))
    return seen | {
        "index": str(list(frame.index)),
        "dtypes": str(frame.dtypes.to_dict()),
        "attrs": str(frame.attrs),
    }


def rows_of(act, frame, batch):
    """Return what a release makes of a frame, under a batch's name where it takes one."""
    return act(frame, batch=batch) if "batch" in inspect.signature(act).parameters else act(frame)


# ---- what it tells


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """An event, what the ε of the two distributions is at least, and in how many of the first runs anything was released at all."""

    epsilon: float
    event: str
    n_released: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How many runs of each neighbour look for events, by how much an event's rates must differ to be judged, and by how many fresh runs.

    After the first `again` of the fresh runs, the others are spared unless some event's rates still differ by nearly as much.
    """

    looked: int = 10
    gap: float = 0.7
    again: int = 14
    judged: int = 60


Draw = Callable[[Iterable[int]], list[View]]  # views of runs with these seeds


def tell_apart(left, right, effort=Effort(), *, delta=0.0, alpha=1e-9):
    """Return the lower bound on ε, at δ and up to an error of `alpha`, of the event that tells two distributions of views apart best.

    An event: a leaf has a value, is there at all, or is at most a number. The first runs find events whose rates differ; fresh
    runs judge the best of these, by the bounds of Clopper and Pearson. So chance may cost runs, and never makes a finding. Fresh runs
    that end early find nothing: one time in 200 for an event of rates 0.9 and 0.1.
    """
    first = range(effort.looked)
    one, other = left(first), right(first)
    gaps = [
        (abs(_rate(event, one) - _rate(event, other)), number, event)
        for number, event in enumerate(_events([*one, *other]))
    ]
    chosen = [
        event
        for gap, _, event in sorted(gaps, key=lambda found: (-found[0], found[1]))[:_CHOSEN]
        if gap >= effort.gap
    ]
    n_released = sum("n rows" in view for view in (*one, *other))
    if not chosen:
        return Finding(0.0, f"none of {len(gaps)} events stands out", n_released)
    fresh = range(effort.looked, effort.looked + effort.again)
    one, other = left(fresh), right(fresh)
    if all(abs(_rate(event, one) - _rate(event, other)) < effort.gap - 0.2 for event in chosen):
        return Finding(0.0, "no event stands out again", n_released)
    rest = range(fresh.stop, effort.looked + effort.judged)
    one, other = one + left(rest), other + right(rest)
    return max(
        Finding(_bound(event, one, other, delta, alpha / _CHOSEN), str(event), n_released)
        for event in chosen
    )


def _rate(event, views):
    return sum(map(event, views)) / max(1, len(views))


@dataclass(frozen=True, slots=True)
class _Is:
    leaf: str
    value: Hashable

    def __call__(self, view):
        return view.get(self.leaf, _MISSING) == self.value


@dataclass(frozen=True, slots=True)
class _AtMost:
    leaf: str
    value: float

    def __call__(self, view):
        value = view.get(self.leaf)
        return _is_number(value) and value <= self.value  # type: ignore[operator]  # a number


def _events(views):
    for leaf in dict.fromkeys(key for view in views for key in view):
        values = [view.get(leaf, _MISSING) for view in views]
        numbers = [value for value in values if _is_number(value)]
        every = {value: values.count(value) for value in dict.fromkeys(values)}
        if len(every) > 1:
            yield from (
                _Is(leaf, value)
                for value, count in every.items()
                if len(every) <= _MANY or count > 1
            )
        if len(set(numbers)) > 2:
            yield from (
                _AtMost(leaf, float(value))
                for value in np.unique(
                    np.quantile(numbers, np.linspace(0.1, 0.9, 5), method="lower")
                )
            )


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _bound(event, left, right, delta, alpha):
    """Return the ε that an event, or its complement, proves in either direction."""
    a, b = sum(map(event, left)), sum(map(event, right))
    pairs = (
        ((a, len(left)), (b, len(right))),
        ((len(left) - a, len(left)), (len(right) - b, len(right))),
    )
    return max(
        0.0,
        *(
            epsilon_at_least(*pair, delta=delta, alpha=alpha / 4)
            for one, other in pairs
            for pair in ((one, other), (other, one))
        ),
    )


def epsilon_at_least(hits, misses, *, delta=0.0, alpha):
    """Return log((p - δ) / q) for the lower bound p of `hits` and the upper bound q of `misses`, each (count, runs), up to an error of 2 · alpha."""
    (a, n), (b, m) = hits, misses
    low = float(stats.beta.ppf(alpha, a, n - a + 1)) if a else 0.0
    high = float(stats.beta.ppf(1.0 - alpha, b + 1, m - b)) if b < m else 1.0
    return math.log((low - delta) / high) if low > delta else -math.inf


def released(views, rows):
    """Return the views in which one of some rows was released, so that its unit was not held out: a hold-out's ε covers these."""
    names = [f"{ID} {row} {ID}" for row in rows]
    return [view for view in views if any(name in view for name in names)]


# ---- distributions


def distribution_p_value(draws, probability):
    """Return the p-value of whole-number draws under a distribution: Pearson's test on runs of values that are expected 10 times or more."""
    far = int(np.abs(draws).max()) + 200
    values = np.arange(-far, far + 1)
    expected = len(draws) * probability(values)
    groups = (np.cumsum(expected) // 10).astype(int)
    groups = np.minimum(groups, groups.max() - 1)
    found, wanted = (
        np.bincount(groups, np.bincount(draws + far, minlength=len(values))),
        np.bincount(groups, expected),
    )
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    return float(stats.chi2.sf(((found - wanted) ** 2 / wanted).sum(), len(found) - 1))


def laplace_distribution(scale):
    """Return the probabilities of discrete Laplace noise."""
    return lambda values: math.tanh(0.5 / scale) * np.exp(-np.abs(values) / scale)


def gaussian_distribution(sigma):
    """Return the probabilities of discrete Gaussian noise."""
    far = math.ceil(12 * sigma)
    total = np.exp(-(np.arange(-far, far + 1) ** 2) / (2 * sigma**2)).sum()
    return lambda values: np.exp(-(values.astype(float) ** 2) / (2 * sigma**2)) / total


def channel_p_value(before, after, channel):
    """Return the least p-value over input levels of released levels under a published channel; both are codes."""
    worst = 1.0
    for level, row in enumerate(channel):
        counts = np.bincount(after[before == level], minlength=len(row)).astype(float)
        expected = counts.sum() * row
        if (counts[row == 0] > 0).any():
            return 0.0
        common = expected >= 10
        found, wanted = (
            np.append(counts[common], counts[~common].sum()),
            np.append(expected[common], expected[~common].sum()),
        )
        kept = wanted > 0
        if kept.sum() > 1:
            worst = min(
                worst,
                float(
                    stats.chi2.sf(
                        ((found - wanted)[kept] ** 2 / wanted[kept]).sum(), int(kept.sum()) - 1
                    )
                ),
            )
    return worst
