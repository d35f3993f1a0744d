"""The budget that a steward declares, its division among columns, and what it means in plain words."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Iterator, Mapping
from decimal import ROUND_UP, Context, Decimal
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    PlainSerializer,
)

from dpdask.documents import Document, GrownDocument
from dpdask.errors import SpecError, quote_names
from dpdask.privacy.events import Adjacency, RowOrder, round_down

MAX_EPSILON = 100.0

# where everything released is computed from noisy statistics of all rows
COVERED = "every row of the table"
UNCOVERED = "none; everything that is released comes from noisy counts of all rows"


_KEPT = (
    "rows keep the order of the input, which is published: if the input is sorted by a private column, the position of a row reveals "
    "roughly what its value was, whatever the noise, and no ε covers that"
)
_SHUFFLED = (
    "rows are shuffled: the rows of one shard come from neighbouring fragments of the input (files or row groups), in random order "
    "(in parts of 128 MiB, if they are larger), and the shards are numbered at random; a shard's size can reveal that it holds the end of "
    "the input, and the release reveals which rows were in the same part of the input: if the input is sorted by a private column, such "
    "rows had similar values, their released values together reveal roughly which, whatever the noise of each, and no ε covers that"
)


def order_text(order: RowOrder) -> str:
    """Return what a release card says about the order of its rows."""
    return _KEPT if order == "keep" else _SHUFFLED


def describe_published(order: RowOrder) -> str:
    """Return what is published besides the private columns, as a sentence without its full stop."""
    if order == "keep":
        return "The kept columns, the number and the order of the rows, and the presence of each row are published as they are"
    shuffled = "rows are shuffled, but the rows of one shard were close together in the input"
    return f"The kept columns, the number of rows and the presence of each row are published as they are; {shuffled}"


class UnitColumn(GrownDocument):
    """The privacy unit: all rows that share a column's value.

    Examples
    --------
    >>> import dpdask
    >>> dpdask.UnitColumn(column="user", max_rows=3).max_rows
    3
    """

    column: str = Field(min_length=1)
    """The column that names the unit, as a user's id does."""
    max_rows: int = Field(ge=1)
    """The largest number of rows of one unit that are released."""
    name: str | None = Field(
        default=None, min_length=1, max_length=40, pattern=r"^[^\W\d_][\w -]*$"
    )
    """What people call one unit, such as `patient`: promise, page and card say it in place of the
    column's name.
    """
    publish_counts: bool = False
    """Whether the exact number of rows of each released unit is published, as a weight of each
    released row: estimates can then be those of the table, not of the bounded rows.
    """

    later: ClassVar[frozenset[str]] = frozenset(("publish_counts", "name"))

    @property
    def label(self) -> str:
        """One unit in words: its name, or else its column."""
        return self.name or self.column

    @property
    def explained(self) -> str:
        """One unit in words, with its column if it has a name of its own."""
        return f"{self.name} (one value of {self.column})" if self.name else self.column

    @property
    def weight(self) -> str | None:
        """The column that holds how many rows of the table a released row stands for; None if these numbers are not published."""
        return f"{self.column}_weight" if self.publish_counts else None


def _or_target(schema: dict[str, Any]) -> None:
    """Let the JSON Schema take an error in place of an ε, as the file of a job may have it."""
    keys = ("type", "exclusiveMinimum", "maximum")
    found: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0}
    for name in ("count_margin", "target"):
        only = {"required": [name], "additionalProperties": False}
        found = {"type": "object", "properties": {name: found}, **only}
    schema["anyOf"] = [{key: schema.pop(key) for key in keys if key in schema}, found]


class Budget(Document):
    """The privacy budget that a job declares."""

    epsilon: float = Field(gt=0, le=MAX_EPSILON, allow_inf_nan=False, json_schema_extra=_or_target)
    """ε, in (0, 100]. In the file of a job that publishes noisy counts also `{target: {count_margin:
    20}}`: the least ε, up to 2 %, at which the noise of a count exceeds so many rows with a
    probability of at most 5 %.
    """
    delta: Annotated[
        float,
        Field(ge=0, lt=1, allow_inf_nan=False),
        # not 0.0: a card and a job's digest are bytes, and say `0`
        AfterValidator(lambda delta: delta or 0),
        PlainSerializer(lambda delta: delta),
    ] = 0
    """δ, in [0, 1). Mechanisms that release rows one by one need none, and take none."""
    adjacency: Adjacency = "replace-one"
    """`replace-one`: tables are neighbours when one row has other private values. The number of
    rows and every kept column are public. `add-remove`: when one of them lacks a row of the
    other; the number of rows is private. A row's values are then protected by 2·epsilon.
    """
    unit: Literal["row"] | UnitColumn = "row"
    """`row`: the thing protected is one row. A person with k rows is protected by k·ε only.
    `{column, max_rows}`: all rows that share the column's value, a person for instance; at most
    `max_rows` of them are released.
    """

    @property
    def unit_name(self) -> str:
        """The unit as the events of the ledger name it: `row`, or `column` and its name."""
        return "row" if self.unit_column is None else f"column {self.unit_column.column}"

    @property
    def unit_column(self) -> UnitColumn | None:
        """The unit's column and bound, or None when the unit is the row."""
        return self.unit if isinstance(self.unit, UnitColumn) else None

    @property
    def rows_per_unit(self) -> int:
        """How many rows of a unit are used or released at most."""
        return self.unit.max_rows if isinstance(self.unit, UnitColumn) else 1


def split_epsilon(
    epsilon: float, columns: tuple[str, ...], weights: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return each column's part of ε, rounded down so that the parts never sum to more than ε."""
    weights = weights if weights is not None else dict.fromkeys(columns, 1.0)
    lacking, unknown = (
        [name for name in columns if name not in weights],
        [str(name) for name in weights if name not in columns],
    )
    if lacking or unknown:
        told = "; ".join(
            f"{what}: {quote_names(names)}"
            for what, names in (("without a weight", lacking), ("not privatised", unknown))
            if names
        )
        raise SpecError(
            f"weights must name exactly the privatised columns ({told})",
            "`weights`",
            "give each of them one weight",
        )
    if not all(math.isfinite(weight) and weight > 0 for weight in weights.values()):
        raise SpecError(
            "weights must be positive and finite",
            "`weights`",
            "drop a column rather than give it none of the budget",
        )
    parts = _split(epsilon, tuple(weights[name] for name in columns))
    if not all(parts):
        raise SpecError(
            "a weight is too small: its column's part of ε is 0",
            "`weights`",
            "bring the weights closer together",
        )
    return dict(zip(columns, parts, strict=True))


@functools.lru_cache(maxsize=1024)
def _split(epsilon: float, weights: tuple[float, ...]) -> tuple[float, ...]:
    """Return each weight's part of ε, rounded down; a run asks ten times for the same parts."""
    total = sum(map(Fraction, weights), Fraction(0))
    return tuple(round_down(Fraction(epsilon) * Fraction(weight) / total) for weight in weights)


Part = Literal["promise", "protected", "not protected", "published", "attacker"]
HEADS = {"protected": "Protected: ", "not protected": "Not protected: "}
_WIDTH = 100  # of a line of a plan


class Promise(str):
    """A promise in words that knows its parts: what is promised, who is protected, who is not, what is published as it is, and what an attacker gains."""

    parts: tuple[tuple[Part, str], ...] = ()

    @classmethod
    def of(cls, *parts: tuple[Part, str]) -> Promise:
        """Return the promise that has these parts, each of whole sentences."""
        made = cls(" ".join(map(say_part, parts)))
        made.parts = parts
        return made

    def list_parts(self, before: str = "") -> list[dict[str, str]]:
        """Return the parts as plain values, the first with a text before it."""
        (first, text), *rest = self.parts
        return [{"part": part, "text": each} for part, each in ((first, before + text), *rest)]


def say_part(part: tuple[Part, str]) -> str:
    """Return a part of a promise as it stands in its text."""
    return HEADS.get(part[0], "") + part[1]


def wrap_promise(promise: str) -> Iterator[str]:
    """Yield the lines of a promise under its label, wrapped; each part begins a line."""
    parts = promise.parts if isinstance(promise, Promise) and promise.parts else ()
    texts = [say_part(part) for part in parts] or [str(promise)]
    start = "  promise   "
    for text in texts:
        yield from textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
            break_on_hyphens=False,
        )
        start = " " * len(start)


def guarantee_text(
    budget: Budget,
    protected: str,
    unprotected: str,
    order: RowOrder = "keep",
    *,
    everyone: bool = True,
) -> Promise:
    """Return the promise, in words, of a release row by row, including who is not covered.

    Parameters
    ----------
    order
        Whether the rows are shuffled or keep the order of the input.
    everyone
        Whether every row of the table is covered; if not, the text says that the bound on an
        attacker holds only for covered rows.

    Notes
    -----
    The attacker's power is `attacker_power`, which is at most the bound γ·exp(ε) of Lemma 1 of Bi &
    Shen (after Wasserman & Zhou 2010) for testing "this row had value a, not b" at level γ on one
    ε-private release. Rows are released under replace-one alone.
    """
    unit = budget.unit_column
    whose, what, tested = "Each released row's private values", "one row", "a released row"
    if unit is not None:
        whose = f"All private values of all released rows that share a {unit.column}"
        what = f"the rows of one {unit.explained}, of which at most {unit.max_rows} are released"
        tested = f"the released rows of a {unit.label}"
    counts = "" if unit is None or not unit.publish_counts else f"; {describe_counts(unit)}"
    if counts and unprotected.startswith("none"):
        unprotected = f"of the values {unprotected}"
    attacker = _attacker_text(budget, f"{tested} had one value rather than another")
    if not everyone:
        attacker += " No such bound holds for the rows that are not protected."
    return Promise.of(
        ("promise", f"{whose} are {_parameters_text(budget, '', what)}."),
        ("protected", f"{protected}; {_several_text(budget, 'released rows')}."),
        ("not protected", f"{unprotected}{counts}."),
        ("published", f"{describe_published(order)}."),
        ("attacker", attacker),
    )


def describe_counts(unit: UnitColumn) -> str:
    """Return who is not protected where the numbers of rows are published."""
    return f"how many rows of the table each released {unit.label} has, which is published exactly"


def noisy_counts_text(budget: Budget, *, persons: bool = False) -> Promise:
    """Return the promise, in words, of a release that is computed from noisy counts of all rows alone: their number is exact under replace-one.

    Parameters
    ----------
    persons
        Whether each unit is counted as one person, whatever its number of rows: then that number is
        private, and that of persons is exact under replace-one.

    Notes
    -----
    Testing "the table was A, not its neighbour B" at level γ on one (ε, δ)-private release has
    power at most γ·exp(ε) + δ (Wasserman and Zhou 2010, Theorem 2.4; Kairouz, Oh and Viswanath
    2015, Theorem 2.1). A group of k units is covered by (k·ε, k·exp((k-1)·ε)·δ) (Dwork and Roth
    2014, after Theorem 2.2). Under add-remove, a test of one value against another is bounded by
    `bound_values`.
    """
    unit = budget.unit_column
    one, who, tested, it, are = "one row", "one row", "a row", "it", "is"
    if unit is not None:
        one = f"the rows of one {unit.explained}, of which at most {unit.max_rows} are used"
        who, tested, it, are = f"one {unit.label}", f"a {unit.label}'s rows", "they", "are"
        if persons:  # whoever keeps a row in the table of persons, but loses all others, moves more
            one = f"one {unit.explained}, of whose rows at most {unit.max_rows} are used"
            tested, it, are = f"a {unit.label}", "it", "is"
    other = "had one value rather than another"
    counted = "persons" if persons else "rows"
    if budget.adjacency == "replace-one":
        neighbours, count = f"{who}'s values change", "is published as it is"
        if persons:
            neighbours, count = (
                f"{who} is replaced, with all rows",
                f"{count}, and that of their rows is private",
            )
        attacker = _attacker_text(budget, f"{tested} {other}")
    else:
        neighbours, count = f"{who} is present or absent", "is private"
        attacker = _attacker_text(budget, f"{tested} {are} there", f"{it} {other}")
    covered = "every person, with all rows" if persons else COVERED
    promised = _parameters_text(budget, f": {neighbours}", one)
    computed = "Everything that is released is computed from noisy statistics, which are"
    return Promise.of(
        ("promise", f"{computed} {promised}."),
        ("protected", f"{covered}; {_several_text(budget, 'rows')}."),
        ("not protected", f"{UNCOVERED}."),
        ("published", f"The number of {counted} {count}."),
        ("attacker", attacker),
    )


def _parameters_text(budget: Budget, neighbours: str, unit: str) -> str:
    return (
        f"ε = {_epsilon_text(budget.epsilon)} differentially private "
        f"(δ = {write_above(budget.delta, 3)}, {budget.adjacency}{neighbours}, unit: {unit})"
    )


def _several_text(budget: Budget, rows: str) -> str:
    """Return how a person with several rows, or several values of the unit's column, is protected."""
    if budget.unit_column is None:
        beside = " and k·exp((k-1)·ε)·δ" if budget.delta else ""
        return f"a person with k {rows} is protected by k·ε{beside}"
    beside, column = " and δ" if budget.delta else "", budget.unit_column.column
    return f"a person with several {column} values is protected by ε{beside} for each"


def _epsilon_text(epsilon: float) -> str:
    # every digit: a rounded ε could be less than what is spent
    return repr(epsilon).removesuffix(".0")


def bound_values(epsilon: float, delta: float, adjacency: Adjacency | None) -> tuple[float, float]:
    """Return ε and δ of a change of a unit's values: twice those of its presence under add-remove, as promised under replace-one.

    Notes
    -----
    Other values are two steps under add-remove, one to the table without the unit and one back:
    p(x) ≤ e^ε·p(without) + δ ≤ e^2ε·p(y) + (1 + e^ε)·δ.

    References
    ----------
    Dwork and Roth 2014, after Theorem 2.2.
    """
    if adjacency != "add-remove":
        return epsilon, delta
    return 2.0 * epsilon, min(1.0, (1.0 + math.exp(min(epsilon, 100.0))) * delta)


def _attacker_text(budget: Budget, what: str, values: str = "") -> str:
    """Return the most that a test can detect; under add-remove also that of `values`, where `what` is presence."""
    text = f"An attacker who tests whether {what}, at a false-alarm rate of 5 %, detects it with probability at most "
    text += percent_above(attacker_power(budget.epsilon, budget.delta))
    epsilon, delta = bound_values(budget.epsilon, budget.delta, budget.adjacency)
    if values:
        text += f", and one who tests whether {values} (counted twice: 2ε) with probability at most {percent_above(attacker_power(epsilon, delta))}"
    return f"{text}; blind guessing detects 5 %." + (
        " This is hardly any protection." if epsilon >= 3 else ""
    )


def attacker_power(epsilon: float, delta: float, level: float = 0.05) -> float:
    """Return an upper bound on the power of any test, at a level, of one table against its neighbour on an (ε, δ)-private release.

    Notes
    -----
    Under replace-one, neighbours differ in the values of a unit; under add-remove, in its presence,
    and values need `bound_values`. The smaller of level·exp(ε) + δ and 1 - (1 - level - δ)·exp(-ε).
    For δ = 0, the second is smaller if exp(ε) > (1 - level)/level.

    References
    ----------
    Wasserman and Zhou 2010, Theorem 2.4; Kairouz, Oh and Viswanath 2015, Theorem 2.1, both
    inequalities.
    """
    growing = level * math.exp(min(epsilon, 100.0)) + delta
    saturating = 1.0 - max(0.0, 1.0 - level - delta) * math.exp(-epsilon)
    return min(1.0, growing, saturating)


def percent_above(share: float) -> str:
    """Return a share as a percentage with one decimal, rounded up because it is a bound."""
    return f"{min(100.0, math.ceil(1000 * share) / 10):.1f} %"


def write_above(number: float, digits: int = 6) -> str:
    """Return a number in a few digits, rounded up because it is a bound."""
    shown = Context(prec=digits, rounding=ROUND_UP).plus(Decimal(repr(number))).normalize()
    return f"{shown:e}" if 0 < shown < Decimal("0.001") else f"{shown:f}"


def bound_belief(prior: float, epsilon: float) -> str:
    """Return, as a percentage rounded up, the most that a belief can become after an ε-private release: its odds grow by exp(ε) at most."""
    return percent_above(prior / (prior + (1.0 - prior) * math.exp(-epsilon)))


def list_cautions(budget: Budget, n_rows: float | None) -> list[str]:
    """Return warnings for the readers of a card, if its promise protects little."""
    found = []
    if bound_values(budget.epsilon, budget.delta, budget.adjacency)[0] >= 3:
        twice = (
            " and counts twice for values under add-remove"
            if budget.adjacency == "add-remove"
            else ""
        )
        unit = "row" if budget.unit_column is None else budget.unit_column.label
        found.append(
            f"ε = {_epsilon_text(budget.epsilon)} is large{twice}: an attacker may tell two values of one {unit} apart almost every time"
        )
    large = delta_caution(budget.delta, n_rows)
    return found if large is None else [*found, large]


def delta_caution(delta: float, n_rows: float | None) -> str | None:
    """Return a warning if δ is so large that it would allow publishing a row verbatim, else None.

    Parameters
    ----------
    n_rows
        The number of rows, exact or noisy; None if it is not known or may not be told.
    """
    if n_rows is None or delta * n_rows < 1:
        return None
    what = f"δ = {write_above(delta, 3)} is not below 1 / the number of rows"
    return f"{what}: publishing one random row verbatim would satisfy the same guarantee"


def delta_warnings(budget: Budget, n_rows: int | None) -> tuple[str, ...]:
    """Return the warning of `delta_caution` for a steward, with a hint; empty if there is none.

    Parameters
    ----------
    n_rows
        The number of rows if it is known and public, else None.
    """
    caution = delta_caution(budget.delta, n_rows)
    return () if caution is None else (f"{caution}; lower `delta`",)
