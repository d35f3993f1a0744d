"""The mechanisms that a job can name, each behind one protocol; a new one is one line in each of the two lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import Field

from dpdask.documents import Document
from dpdask.jobs.kinds.copula import Copula, CopulaKind
from dpdask.jobs.kinds.dip import Dip, DipKind
from dpdask.jobs.kinds.kind import Expected, Fitted, Kind, Parts, Terms
from dpdask.jobs.kinds.marginals import MarginalsKind, NoisyTables

Mechanism = Annotated[
    Dip | Copula | NoisyTables,
    Field(discriminator="kind"),
]

_KINDS: Mapping[type[Document], Callable[[Any, Terms], Kind]] = {
    Dip: DipKind.of,
    Copula: CopulaKind.of,
    NoisyTables: MarginalsKind.of,
}


def kind_of(mechanism: Document, terms: Terms) -> Kind:
    """Return the kind of a job.

    Raises
    ------
    SpecError
        If the mechanism does not fit the terms.
    """
    return _KINDS[type(mechanism)](mechanism, terms)


__all__ = ["Expected", "Fitted", "Kind", "Mechanism", "Parts", "Terms", "kind_of"]
