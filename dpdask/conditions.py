"""Rules between columns, as a schema declares them."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from dpdask.documents import Document

Level = bool | int | float | str | dt.date
RuleKind = Literal["if", "forbid", "allow", "derived", "ordered"]
Terms = tuple[tuple[int, str], ...]  # of a sum: the sign of each column, 1 or -1

_SIGNS = {"+": 1, "-": -1}
_SUM = "sums and differences of columns are expected, such as {total: fare + tip}"
_ORDER = "two or more columns are expected, each at most the next one, such as start <= end"


def as_tuple(value: object) -> object:
    """Return a list of a document as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def _as_condition(value: object) -> object:
    values = value if isinstance(value, list | tuple) else [value]
    if not values or any(
        type(each) not in (bool, int, float, str, dt.date, dt.datetime, type(None))
        for each in values
    ):
        raise ValueError("a level, null, a list of levels, or for numbers [lowest, highest]")
    return tuple(values)


def read_sum(text: str) -> Terms:
    """Return the columns of a sum with their signs; a sign has a space before and behind it."""
    first, *others = re.split(r"\s([+-])\s", text)
    signs = (_SIGNS[sign] for sign in others[::2])
    return (
        (1, first.strip()),
        *zip(signs, (name.strip() for name in others[1::2]), strict=True),
    )


def read_order(text: str) -> tuple[str, ...]:
    """Return the columns of an order, the least one first."""
    return tuple(name.strip() for name in re.split(r"\s<=\s", text))


def _as_sums(value: object) -> object:
    if not isinstance(value, Mapping) or not all(
        isinstance(each, str) and all(name for _, name in read_sum(each)) for each in value.values()
    ):
        raise ValueError(_SUM)
    return value


def _as_order(value: object) -> object:
    if not isinstance(value, str) or not 2 <= len(read_order(value)) == len(set(read_order(value))):
        raise ValueError(_ORDER)
    return value


Condition = Annotated[tuple[Level | None, ...], BeforeValidator(_as_condition)]
Conditions = Annotated[dict[str, Condition], Field(min_length=1)]
Pairs = Annotated[
    tuple[Annotated[tuple[Level | None, Level | None], BeforeValidator(as_tuple)], ...],
    BeforeValidator(as_tuple),
]


class Rule(Document):
    """What holds in every record: `if` and `then`, or `forbid`, or the `columns` and the pairs to `allow`, or sums that are `derived`, or what is `ordered`.

    A condition names a column, and gives a level, null, a list of levels, or of a column of numbers the lowest and the highest one.

    Examples
    --------
    >>> from dpdask.schema import Rule
    >>> Rule.model_validate({"if": {"age": [0, 14]}, "then": {"income": None}}).names
    ('age', 'income')
    >>> Rule(derived={"total": "fare + tip"}).sums
    {'total': ((1, 'fare'), (1, 'tip'))}
    """

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    if_: Conditions | None = Field(default=None, alias="if")
    """Conditions; where all hold, those of `then` hold too."""
    then: Conditions | None = None
    """What follows."""
    forbid: Conditions | None = None
    """Conditions that never hold together."""
    columns: Annotated[tuple[str, str], BeforeValidator(as_tuple)] | None = None
    """Two columns of levels."""
    allow: Pairs | None = None
    """Their pairs of levels that exist; all others never do."""
    derived: Annotated[dict[str, str], Field(min_length=1), BeforeValidator(_as_sums)] | None = None
    """Columns that are not measured but computed: of each, the sum or difference of others, such as
    `fare + tip - discount`, with spaces around the signs.
    """
    ordered: Annotated[str, BeforeValidator(_as_order)] | None = None
    """Columns of which each is at most the next one, such as `start <= end`."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = {name for name in type(self).model_fields if getattr(self, name) is not None}
        known: tuple[set[str], ...] = ({"if_", "then"}, {"forbid"}, {"columns", "allow"})
        if given not in (*known, {"derived"}, {"ordered"}):
            raise ValueError(
                "a rule has `if` and `then`, or `forbid`, or `columns` and `allow`, or `derived`, or `ordered`"
            )
        each_once = self.derived is not None or len(set(self.names)) == len(self.names)
        if not each_once or len(self.names) < 2:
            raise ValueError("a rule is between columns: name at least two, each once")
        for name, terms in self.sums.items():
            used = [term for _, term in terms]
            if len(set(used)) < len(used) or set(used) & self.sums.keys():
                raise ValueError(
                    f"{name} is the sum of columns that are measured: name each once, and none that is derived"
                )
        return self

    @property
    def kind(self) -> RuleKind:
        """Which of the five kinds it is."""
        kinds: tuple[RuleKind, ...] = ("forbid", "allow", "derived", "ordered")
        return next((kind for kind in kinds if getattr(self, kind) is not None), "if")

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that it names."""
        of_sums = [
            name
            for total, terms in self.sums.items()
            for name in (total, *(each for _, each in terms))
        ]
        order = () if self.ordered is None else read_order(self.ordered)
        conditions = (*(self.if_ or {}), *(self.then or {}), *(self.forbid or {}))
        return (*(self.columns or ()), *conditions, *of_sums, *order)

    @property
    def sums(self) -> dict[str, Terms]:
        """The columns that are derived, with what each is the sum of."""
        return {name: read_sum(text) for name, text in (self.derived or {}).items()}

    @property
    def steps(self) -> tuple[tuple[str, str], ...]:
        """The neighbours of an order: the first column is at most the second one."""
        return () if self.ordered is None else tuple(pairwise(read_order(self.ordered)))
