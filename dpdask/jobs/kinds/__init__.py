"""The mechanisms that a job can name, each behind one protocol; a new one is one line in each of the two lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from dpdask.documents import Document
from dpdask.jobs.kinds.copula import Copula, CopulaKind
from dpdask.jobs.kinds.dip import Dip
from dpdask.jobs.kinds.histogram import HistogramKind, NoisyHistogram
from dpdask.jobs.kinds.interval import IntervalKind, Intervals
from dpdask.jobs.kinds.kind import Expected, Fitted, Kind, Parts, Setting, Terms
from dpdask.jobs.kinds.marginals import MarginalsKind, NoisyTables
from dpdask.jobs.kinds.tree import dip_kind

Mechanism = Annotated[
    Dip | Copula | Intervals | NoisyTables | NoisyHistogram,
    Field(discriminator="kind"),
]

_KINDS: Mapping[type[Document], Callable[[Any, Any], Kind]] = {
    Dip: dip_kind,
    Copula: CopulaKind.of,
    Intervals: IntervalKind.of,
    NoisyTables: MarginalsKind.of,
    NoisyHistogram: HistogramKind.of,
}


def spends(mechanism: Document) -> bool:
    """Return whether a mechanism spends a budget, so that its job must promise one."""
    return not isinstance(mechanism, Intervals) or mechanism.spends


def kind_of(mechanism: Document, terms: Setting) -> Kind:
    """Return the kind of a job; `terms` are `Terms` where it spends a budget.

    Raises
    ------
    SpecError
        If the mechanism does not fit the terms.
    """
    return _KINDS[type(mechanism)](mechanism, terms)


__all__ = ["Expected", "Fitted", "Kind", "Mechanism", "Parts", "Setting", "Terms", "kind_of", "spends"]
