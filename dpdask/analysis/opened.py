"""An opened release: its table, its card, and the questions that any release may be asked; each kind of release answers some of them."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import numpy as np
import pandas as pd
import pyarrow as pa

from dpdask.analysis.results import N_BINS, NO_LINE, Query, clip_to, plot_all
from dpdask.analysis.results import Result as Result
from dpdask.analysis.subset import Derived, Subset
from dpdask.analysis.values import DateScale
from dpdask.arrays import Ends, Floats
from dpdask.codec import is_bytes, read_texts
from dpdask.documents import suggest
from dpdask.engine.lazy import read_frame, read_shards, record_frame
from dpdask.engine.source import Frame
from dpdask.errors import InputError, OutputError, SpecError, list_names
from dpdask.html import make_html_table
from dpdask.inference.m_estimators import WeightedSample
from dpdask.io.parquet import read_schema
from dpdask.io.shards import MEASURED, META, MODEL, ShardWriter
from dpdask.io.storage import Folder, absolute_url
from dpdask.mechanisms.card import microseconds_of, say_date
from dpdask.references.counts import read_counts
from dpdask.scales import coarsen, count_spans, is_dated, is_real, is_span

if TYPE_CHECKING:  # it imports kernels, which no release but ranges needs
    from dpdask.inference import NPMLE
    from dpdask.mechanisms.mechanism import RecordRelease

QUESTIONS = (
    "mean",
    "share",
    "histogram",
    "quantile",
    "crosstab",
    "slope",
    "npmle",
    "regress",
    "fit",
)
OF_NUMBERS = ("mean", "histogram", "quantile", "slope", "fit")
OF_SEVERAL = ("crosstab", "slope", "intercept", "r_squared", "regress", "fit")
_POSSIBLE = {"share": (0.0, 1.0), "r_squared": (-1.0, 1.0)}
_POSSIBLE |= dict.fromkeys(("histogram", "crosstab", "count"), (0.0, math.inf))
Refusals: TypeAlias = Mapping[str, tuple[str, str]]  # by question, why not, and what to use
_SHOWN = 12
_HELD_ROWS = 100_000  # a column of which is kept in memory
_BOUNDED = "this is of the bounded rows, at most {max_rows} of each {column!r}: those with more rows count less than in the table"
_ROUNDED = "the numbers of {!r} are {}, rounded down"
_LAST_RANGE = "the last range holds its upper edge, too"
_OF_OTHERS = "a level of {!r} that stands for others has only the rows whose own value is no level: add up its group for the whole"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OpenedRelease:
    """A release as an analyst sees it: its table, its card, and estimates of the original table with their standard errors.

    Everything is computed from the folder alone, and costs no ε. A question that this kind of release does not answer is refused
    with one line that says why, and what to use.
    """

    folder: Folder
    """The output folder."""
    shards: tuple[str, ...]
    """The names of the shards."""
    n_rows: int
    """How many rows the released table has."""
    content: Mapping[str, Any]
    """The card, as plain values."""
    ending: str = ""
    """What the names of the files beside the card end with, where a folder holds several releases."""
    derived: Mapping[str, Derived] = field(default_factory=dict)
    """Columns that are made of released ones, by name: groups of rows."""

    # what plain use of the released rows gets wrong; nothing of others
    plain_use: ClassVar[str] = ""
    joins_private: ClassVar[bool] = True  # whether private columns may decide on groups of rows
    holds_rows: ClassVar[bool] = True  # whether what is released are rows, each as one of the table
    refusals: ClassVar[Refusals] = {}

    @property
    def card(self) -> dict[str, Any]:
        """The release card: what was promised, to whom, and how."""
        return copy.deepcopy(dict(self.content))

    @cached_property
    def _types(self) -> pa.Schema:
        """The released columns, as the first shard has them, and those that are made of them."""
        found = read_schema(self.folder, self.shards[0])
        return pa.schema([*found, *(pa.field(name, pa.string()) for name in self.derived)])

    @cached_property
    def _measured(self) -> Mapping[str, pa.Table]:
        """The noisy counts that were drawn, by column or table; none where the card names none."""
        with self._check_counts():
            data = self._read_beside(MEASURED)
            return {} if data is None else read_counts(data)

    def _place(self, name: str) -> str:
        """Return where a file beside the card lies."""
        stem, _, suffix = name.rpartition(".")
        return f"{META}/{stem}{self.ending}.{suffix}"

    def _read_beside(self, name: str) -> bytes | None:
        """Return a file beside the card, by its digest in the card; None where the card names none."""
        digest = self.content.get("sha256", {}).get(name)
        if digest is None:
            return None
        data = self.folder.read(self._place(name), replaced=True)
        if sha256(data).hexdigest() != digest:
            raise ValueError
        return data

    @contextmanager
    def _check_counts(self, name: str = MEASURED) -> Iterator[None]:
        """Refuse a file of noisy counts, or a model, that does not fit the card."""
        try:
            yield
        except (ValueError, pa.ArrowException):
            noun = (
                "this model is not the one" if name == MODEL else "these noisy counts are not those"
            )
            what, where = f"{noun} that the card names", self._place(name)
            hint = "copy the whole folder again"
            raise InputError(what, f"{self.folder.url}/{where}", hint) from None

    @property
    def columns(self) -> pd.DataFrame:
        """A row for each column of the original table: its role, its kind, its domain, and which questions it answers."""
        return self._describe(self.content["columns"])

    def _describe(self, names: Iterable[str]) -> pd.DataFrame:
        rows = {}
        for name in names:
            column = self.content["columns"][name]
            levels, bounds = column.get("levels"), column.get("bounds")
            ends = " to ".join(
                say_date(bound, column.get("numbers")) or str(bound) for bound in bounds or ()
            )
            domain = ends if levels is None else f"{len(levels)} levels"
            offered = (self._offer(question, name) for question in QUESTIONS)
            answers = ", ".join(filter(None, offered))
            rows[name] = column["role"], column.get("kind") or "", domain, answers
        titles = ["role", "kind", "domain", "answers"]
        return pd.DataFrame.from_dict(rows, orient="index", columns=titles)

    def to_pandas(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Return the released table as a pandas frame, or some of its columns.

        Parameters
        ----------
        columns
            The names of released columns, in the order wanted; all if None.

        Raises
        ------
        SpecError
            If it is not a list of released columns.

        Warns
        -----
        UserWarning
            Once for each place in a program, if plain averages of these rows are biased.
        """
        self._warn_of_plain_use()
        if columns is None:
            return read_shards(self.folder, self.shards, None)
        if isinstance(columns, str) or not isinstance(columns, Iterable):
            raise SpecError(
                "the columns must be a list of names",
                "to_pandas",
                'write it as in to_pandas(["age", "city"])',
            )
        chosen, held = list(columns), read_schema(self.folder, self.shards[0]).names
        missing = next((name for name in chosen if name not in held), None)
        if missing is not None:
            what, some = "no released column has this name", list_names(held, _SHOWN)
            use = suggest(missing, held, f"use some of {some}")
            raise SpecError(what, f"to_pandas, column {missing!r}", use)
        return read_shards(self.folder, self.shards, chosen)

    def _warn_of_plain_use(self) -> None:
        """Say what plain use gets wrong, of rows with noise beside others, where the caller made the frame."""
        roles = [column["role"] for column in self.content["columns"].values()]
        if self.plain_use and "privatised" in roles and len(roles) > 1:
            warnings.warn(self.plain_use, UserWarning, stacklevel=3)

    def _read_rows(self, names: Sequence[str]) -> pd.DataFrame:
        """Return released columns, and those that are made of them."""
        if not self.derived.keys() & set(names):
            return self._load(self.shards, list(names))
        rows = self._load(self.shards, self._sources(names))
        made = {name: self.derived[name].of_rows(rows) for name in names if name in self.derived}
        return rows.assign(**made)[list(names)]

    def _load(self, shards: Sequence[str], names: Sequence[str]) -> pd.DataFrame:
        """Return columns of shards: with texts in place of the bytes that a card says are texts, and numbers in place of times of a day, durations and values with a unit."""
        rows, held = read_shards(self.folder, shards, names), read_schema(self.folder, shards[0])
        for name in names:
            type_, part = held.field(name).type, self.content["columns"].get(name, {})
            encoding, unit = part.get("encoding"), part.get("unit")
            if encoding and is_bytes(type_):  # tables of counts have texts
                rows[name] = read_texts(
                    pa.array(rows[name], pa.large_binary()), encoding
                ).to_pandas()
            elif unit is not None or (is_span(type_) and part.get("role", "kept") != "kept"):
                values = coarsen(pa.array(rows[name], type_, from_pandas=True), unit)
                rows[name] = count_spans(values) if is_span(type_) else values.to_pandas()
        return rows

    def _sources(self, names: Sequence[str]) -> list[str]:
        """Return columns, each that is made of others replaced by these."""
        parts = (self.derived[n].names if n in self.derived else (n,) for n in names)
        return list(dict.fromkeys(each for part in parts for each in part))

    @cached_property
    def _held(self) -> dict[str, pd.Series]:
        """The columns that were read, of a small table."""
        return {}

    def _read(self, names: Sequence[str]) -> pd.DataFrame:
        """Return released columns, which nobody may change; those of a small table are read once."""
        if self.n_rows > _HELD_ROWS:
            return self._read_rows(names)
        missing = [name for name in names if name not in self._held]
        if missing:
            self._held.update(self._read_rows(missing).items())
        return pd.DataFrame({name: self._held[name] for name in names}, copy=False)

    def to_dask(self) -> Frame:
        """Return the released table as a lazy Dask frame, with a partition for each shard; it warns as `to_pandas` does."""
        self._warn_of_plain_use()
        return read_frame(self.folder, self.shards)

    def sample(
        self,
        n_rows: int | None = None,
        *,
        where: str | None = None,
        like: Any = None,
        seed: int | None = None,
    ) -> pd.DataFrame:
        """Return further records of the model that the release publishes, without a job, an input or ε.

        Parameters
        ----------
        n_rows
            How many; by default as many as the table has, as the model says.
        where
            Which records are wanted, for instance `'sex = "F" and age >= 65'`: comparisons with `=`,
            `!=`, `<`, `<=`, `>`, `>=`, `in (…)`, `not in (…)`, `is null` and `is not null`, joined by
            `and` and, more loosely, `or`; a name of several words stands in backticks. All if None.
        like
            A public frame of some of the columns, instead of `n_rows` and `where`: each of its rows
            has a record with its values, in its order.
        seed
            Decides the records, in [0, 2**64); by default a fresh one.

        Returns
        -------
        pandas.DataFrame
            The records; `attrs["acceptance"]` is the part of the model's records that meets `where`,
            or is like some row of the frame.

        Raises
        ------
        SpecError
            If the release publishes no model, a number is out of range, the condition cannot be read
            or met, or the frame has other columns or values than the release.
        """
        model, drawn = self._draw(n_rows, where, seed, like)
        parts, shares = zip(*drawn, strict=True)
        rows = pa.Table.from_batches([each for part in parts for each in part], model.types)
        frame = record_frame(model, rows, 0)
        frame.attrs["acceptance"] = float(np.mean(shares))
        return frame

    def write_sample(
        self,
        path: str,
        n_rows: int | None = None,
        *,
        where: str | None = None,
        seed: int | None = None,
    ) -> tuple[int, float]:
        """Write such records as `sample` returns to a new Parquet file; return how many, and which part of the model's records meets `where`.

        Parameters
        ----------
        path
            The file, as a path or any fsspec URL.
        n_rows, where, seed
            As for `sample`.
        """
        place, _, name = absolute_url(path).rpartition("/")
        folder = Folder(place)
        if folder.exists(name):
            hint = "remove it, or choose another name"
            raise OutputError("the file is there already", path, hint)
        model, drawn = self._draw(n_rows, where, seed)
        shares = list[float]()
        folder.create()
        with ExitStack() as stack:
            writer = ShardWriter(folder, name, model.types, model.few_valued)
            stack.push(lambda _, error, __: None if error is None else writer.discard(error))
            for batches, share in drawn:
                shares.append(share)
                for batch in batches:
                    writer.write(batch)
        return writer.close().n_rows, float(np.mean(shares))

    def _draw(
        self, n_rows: int | None, where: str | None, seed: int | None, like: Any = None
    ) -> tuple[RecordRelease, Iterator[tuple[list[pa.RecordBatch], float]]]:
        """Return the model, and what yields its records block by block, each with its acceptance; refuse what is wrong at once."""
        del n_rows, where, seed, like
        raise self._no_model()

    def _no_model(self) -> SpecError:
        what = "no model is published with this release, from which records could be drawn"
        use = "run a copula's job with `output: {model: true}`, or use its released table"
        return SpecError(what, f"{self.folder.url}", use)

    def mean(
        self,
        column: str,
        *,
        by: str | None = None,
        values: Sequence[float] | None = None,
        within: Sequence[Any] | None = None,
    ) -> Result:
        """Return the mean of a column, or its mean in each group of another column.

        Parameters
        ----------
        column
            A column of numbers.
        by
            A column whose levels make the groups.
        values
            A number for each level, in the card's order, null first, where a column's levels are not numbers; `[0, 0, 1]` gives the share
            of the third. NaN leaves the rows of a level out, as nulls are left out by default.
        within
            Two numbers or dates, `(low, high)`: the mean of values that are clipped to them, so that lower values count as `low` and higher
            ones as `high`. Under bounds that are much too wide the mean itself is not known, but this one is.
        """
        return self._ask(
            "mean", column, *([] if by is None else [by]), values=values, within=within
        )

    def share(self, column: str, *, by: str | None = None) -> Result:
        """Return the share of each level of a column, a Series.

        Parameters
        ----------
        column
            A column of levels.
        by
            Not offered: `crosstab` counts the levels in each group.
        """
        if by is not None:
            raise self._no_groups("share", column, by)
        return self._ask("share", column)

    def histogram(self, column: str, bins: int | Sequence[float] = N_BINS) -> Result:
        """Return how many rows lie in each range of a column of numbers, a Series.

        Parameters
        ----------
        column
            A column of numbers.
        bins
            How many ranges of equal width; or their edges.

        Notes
        -----
        Ranges hold their lower edge, and the last one its upper edge too. Where all edges are ends
        of a release's cells, ranges hold their upper edge, as cells do, and the first one the lower
        bound too; the index of the estimate says which.
        """
        return self._ask("histogram", column, bins=bins)

    def quantile(
        self, column: str, q: float | Sequence[float] = 0.5, *, by: str | None = None
    ) -> Result:
        """Return a quantile of a column of numbers or dates; or several, a Series by probability.

        Parameters
        ----------
        column
            The column.
        q
            Its probability, in (0, 1); or several.
        by
            A kept column whose levels make the groups, for ranges; elsewhere `mean` has groups.
        """
        try:
            found = np.atleast_1d(np.asarray(q, float))
        except (TypeError, ValueError):
            found = np.zeros(0)
        if found.ndim != 1 or not found.size or not ((found > 0) & (found < 1)).all():
            raise SpecError(
                "a quantile's probability lies between 0 and 1",
                "quantile",
                "give a fraction, not a percentage; or a list of fractions",
            )
        return self._ask(
            "quantile",
            column,
            *([] if by is None else [by]),
            q=found.tolist() if np.ndim(q) else float(found[0]),
        )

    def crosstab(self, first: str, second: str) -> Result:
        """Return how many rows have each pair of values, a DataFrame.

        Parameters
        ----------
        first, second
            The columns of its rows and of its columns.
        """
        return self._ask("crosstab", first, second)

    def slope(self, response: str, *features: str) -> Result:
        """Return the slopes of a linear regression, a Series by feature; a constant is always in it.

        Parameters
        ----------
        response
            The column that is explained.
        features
            The columns that explain it.
        """
        return self._ask("slope", response, *features)

    def intercept(self, response: str, *features: str) -> Result:
        """Return the intercept of the linear regression whose slopes `slope` has.

        Parameters
        ----------
        response
            The column that is explained.
        features
            The columns that explain it.
        """
        return self._ask("intercept", response, *features)

    def r_squared(self, response: str, feature: str) -> Result:
        """Return R² of a linear regression on one column: which part of the variance the line explains.

        Parameters
        ----------
        response
            The column that is explained.
        feature
            The column that explains it.

        Notes
        -----
        It is the square of the correlation, and so are the ends of its interval: near 0 the square itself is far from normal. No standard error is given.
        """
        return self._ask("r_squared", response, feature).square()

    def where(self, condition: str) -> Subset:
        """Return the rows that meet a condition, of which `count`, `mean` and `sum` may be asked.

        Parameters
        ----------
        condition
            Such as `'town = "A" and years >= 3'`, as for `sample`.
        """
        return Subset(opened=self, conditions=(condition,))

    def groupby(self, columns: str | Sequence[str]) -> Subset:
        """Return the rows in groups, of which `count`, `mean` and `sum` may be asked.

        Parameters
        ----------
        columns
            The columns whose levels make the groups, together.
        """
        return Subset(opened=self).groupby(columns)

    def plot(self, columns: Sequence[str] | None = None) -> Any:
        """Draw the distribution of each column with its 95 % intervals, and return the axes, a list; it needs matplotlib.

        Parameters
        ----------
        columns
            Their names; the first twelve with noise that can be drawn if None.
        """
        every = self.content["columns"]
        private = self._list_private(every)
        found = dict[str, Result]()
        for name in private if columns is None else columns:
            is_of_levels = self._is_kept(name) or self._levels(name) is not None
            try:
                found[name] = (self.share if is_of_levels else self.histogram)(name)
            except SpecError:
                if columns is not None:
                    raise
        return plot_all(dict(islice(found.items(), _SHOWN)))

    def npmle(
        self,
        column: str,
        *,
        support: Ends | None = None,
        knots: Sequence[float] | None = None,
    ) -> NPMLE:
        """Return the distribution under which a column's released ranges are most likely.

        Parameters
        ----------
        column
            The original column.
        support
            Bounds that no value lies outside of; the declared ones if not given.
        knots
            Where the estimate may tell values apart, such as `numpy.geomspace(100, 1e6, 300)`. By default they are quantiles of the ranges' ends, and
            more ends where the distribution has its mass.
        """
        return cast("NPMLE", self._ask("npmle", column, support=support, knots=knots))

    def regress(self, response: str, *features: str, estimator: Any = None) -> Any:
        """Return a fitted regression of a column that is released as ranges, `inference.IntervalRegressor`.

        Parameters
        ----------
        response
            The column that is explained.
        features
            Columns that were kept.
        estimator
            A scikit-learn regressor; linear regression if not given.
        """
        return self._ask("regress", response, *features, estimator=estimator)

    def fit(
        self, estimator: Callable[[WeightedSample], Floats], response: str, *features: str
    ) -> Result:
        """Return the coefficients of an M-estimator of weighted cells, a Series.

        Parameters
        ----------
        estimator
            One of `dpdask.inference`, such as `logistic`, or any function from a `WeightedSample` to coefficients.
        response
            The column that is explained.
        features
            The columns that explain it.

        Notes
        -----
        The standard errors are those of 50 redraws, the same at every call: of the rows, as Poisson counts, and of the noise and the
        threshold, which the card states. The estimators of `dpdask.inference` move by one step of Newton, others are fitted again. Cells
        with a null in one of the columns are left out. The bound on the bias is of what the redraws move in the mean, and half of what
        dependence inside cells, that of a normal copula, changes.
        """
        return self._ask("fit", response, *features, estimator=estimator)

    # ---- how a question finds its answer

    def _ask(self, question: str, *names: Any, **options: Any) -> Result:
        """Answer a question about columns, or refuse it in one line."""
        for name in names:
            if isinstance(name, Iterable) and not isinstance(name, str):
                # a set has no first one
                listed = name if isinstance(name, list | tuple) else ()
                texts = [each for each in listed if isinstance(each, str)]
                hint = f"give a name such as {texts[0]!r}" if texts else "give its name, a text"
                raise SpecError(
                    "one column is expected", f"{question}, a {type(name).__name__}", hint
                )
        for name in names:
            if self._is_computed(name):
                what = f"is computed ({self._column(name)['from']}), so no error of it is known"
                use = "read it by to_pandas(), or ask about the columns that it is computed from"
                raise SpecError(what, f"column {name!r}", use)
        if len(set(names)) < len(names):
            raise SpecError("a column is named twice", question, "name each column once")
        answer = self._plan(Query(kind=question, names=names, **options))
        if question in OF_SEVERAL and len(names) == 1:
            raise SpecError(
                "a regression needs a column that explains",
                question,
                "name one or more after the response",
            )
        found: Any = answer()
        if not isinstance(found, Result):
            return cast("Result", found)
        possible = found.possible or _POSSIBLE.get(question)
        if possible is not None:  # the ends of intervals are
            found = replace(found, estimate=clip_to(found.estimate, possible), possible=possible)
        unit = self.content["guarantee"]["unit"]
        limits = [_BOUNDED.format(**unit)] if isinstance(unit, dict) and not found.of_table else []
        for name in names:
            column = self._column(name)
            limits += [_ROUNDED.format(name, column["numbers"])] if "unit" in column else []
            limits += [_OF_OTHERS.format(name)] if "taxonomy" in column else []
        if question == "histogram" and not options.get("closed"):
            limits += [_LAST_RANGE] if found.estimate.index.closed == "left" else []
        found = replace(found, limits=(*limits, *found.limits))
        return cast("Result", found)

    def _plan(self, asked: Query) -> Callable[[], Any]:
        """Return what computes an answer; refuse a question that the release does not answer, by its card and types alone."""
        raise NotImplementedError

    def _offer(self, question: str, name: str) -> str:
        """Return how a question that a column answers, alone or with some other column, is asked; an empty text if it answers none."""
        if self._is_computed(name):
            return ""
        asked: list[tuple[str, ...]] = [(name,)]
        if question in OF_SEVERAL:
            asked = [(name, other) for other in self._partners(name)]
        if question == "slope":
            asked += [names[::-1] for names in asked]
        for names in asked:
            if question in OF_NUMBERS and not all(map(self._has_numbers, names)):
                continue
            with suppress(SpecError):
                self._plan(Query(kind=question, names=names))
                return question
        return ""

    def _partners(self, name: str) -> list[str]:
        """Return the columns of the tables that a column is in, and two of each other sort.

        Columns of one sort are answered alike: to ask all pairs of many columns would take long.
        """
        mechanism = self.content["mechanism"]
        tables = [*mechanism.get("edges", ()), *mechanism.get("cliques", ())]
        partners = [other for table in tables if name in table for other in table]
        partners += [mechanism.get("reference", {}).get("by"), *self._sorts]
        known = {each for each in self.content["columns"] if not self._is_computed(each)}
        return [other for other in dict.fromkeys(partners) if other in known - {name}]

    @cached_property
    def _sorts(self) -> list[str]:
        sorts: dict[tuple[Any, ...], list[str]] = {}
        for name, column in self.content["columns"].items():
            sort = (
                *sorted(column),
                column["role"],
                column.get("kind"),
                column.get("parent") is None,
                None in (self._levels(name) or ()),
                self._has_numbers(name),
                self._is_of_dates(name),
            )
            sorts.setdefault(sort, []).append(name)
        return [name for names in sorts.values() for name in names[:2]]

    def _check_released(self, names: Sequence[str]) -> None:
        """Refuse columns of the original table that a mechanism leaves out of the released one."""
        for name in names:
            if name not in self._types.names:
                what = "is not in the released table"
                raise SpecError(what, f"column {name!r}", "ask for one that `.columns` offers")

    def _refusal(self, question: str, *names: str) -> SpecError:
        """Return what says why a question is not answered, and what to use."""
        why, use = self.refusals.get(question, (NO_LINE, "use slope() and mean()"))
        return SpecError(why, f"{question}({', '.join(names)})", use)

    def _no_groups(self, question: str, column: str, by: str) -> SpecError:
        use = (
            f"use crosstab({by!r}, {column!r})"
            if question == "share"
            else "use mean(…, by=…, within=(low, high))"
        )
        return SpecError(
            f"{question}() takes no groups",
            f"{question}({column}, by={by})",
            f"{use} where the release answers it: see `.columns`",
        )

    # ---- what the card says of a column

    def _column(self, name: str) -> Mapping[str, Any]:
        """Return a column's part of the card; refuse a name that is not there."""
        columns: Mapping[str, Mapping[str, Any]] = self.content["columns"]
        if not isinstance(name, str) or name not in columns:
            use = suggest(name, columns, "see `.columns`")
            raise SpecError("the release has no such column", f"column {name!r}", use)
        return columns[name]

    def _is_computed(self, name: str) -> bool:
        return bool(self._column(name)["role"] == "computed")

    @property
    def _is_counted(self) -> bool:
        """Whether the number of rows is public, and has no noise."""
        return bool((self.content.get("n_rows") or {"exact": True})["exact"])

    def _is_kept(self, *names: str) -> bool:
        return all(self._column(name)["role"] == "kept" for name in names)

    def _list_private(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if not self._is_kept(name)]

    def _levels(self, name: str) -> tuple[Any, ...] | None:
        levels = self._column(name).get("levels")
        return None if levels is None else tuple(levels)

    def _has_numbers(self, name: str) -> bool:
        """Return whether a column holds numbers or dates, and no mere codes."""
        levels = self._levels(name)
        if levels is not None:
            return self._column(name).get("kind") != "categorical" and all(
                isinstance(level, int | float | None) for level in levels
            )
        if not self._is_kept(name):
            return True
        type_ = self._types.field(name).type if name in self._types.names else pa.null()
        return pa.types.is_integer(type_) or is_real(type_) or is_dated(type_)

    def _scale(self, name: str) -> DateScale | None:
        """Return how the numbers of a column count dates, in its zone."""
        type_ = self._types.field(name).type if name in self._types.names else None
        return DateScale.of_card(self._column(name), getattr(type_, "tz", None))

    def _is_of_dates(self, name: str) -> bool:
        """Return whether a column without levels holds dates, as the card or the first shard says."""
        if self._levels(name) is not None:
            return False
        released = name in self._types.names and is_dated(self._types.field(name).type)
        return released or microseconds_of(self._column(name).get("numbers")) is not None

    def _repr_html_(self) -> str:
        names = list(self.content["columns"])
        shown = self._describe(names[:_SHOWN])
        more = f" … and {len(names) - _SHOWN:,} more columns" if len(names) > _SHOWN else ""
        rows = ((name, *row) for name, row in zip(shown.index, shown.to_numpy(), strict=True))
        text = f"{self.content['guarantee']['text']}{more}"
        return make_html_table(repr(self), ["column", *shown.columns], rows, text)

    def __repr__(self) -> str:
        kind, promised = self.content["mechanism"]["kind"], self.content["guarantee"]["epsilon"]
        promise = "no epsilon" if promised is None else f"epsilon={promised:g}"
        insecure = ", INSECURE" if self.content["insecure"] else ""
        private = [
            name
            for name, column in self.content["columns"].items()
            if column["role"] == "privatised"
        ]
        return f"{type(self).__name__}({kind}, {self.n_rows:,} rows, {promise}{insecure}, privatised: {', '.join(private)})"
