"""The mechanisms that a job or a Python class can name: the only list of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from operator import or_
from types import MappingProxyType
from typing import Annotated, Any, get_args

from pydantic import Field

from dpdask.errors import SpecError
from dpdask.mechanisms import copula, dip, discover, histogram, interval, marginals
from dpdask.mechanisms.card import Guidance, register_guidance
from dpdask.mechanisms.copula.people import PersonsMechanism
from dpdask.mechanisms.copula.spec import CopulaMechanism, CopulaSpec
from dpdask.mechanisms.dip.chain import RecordsMechanism
from dpdask.mechanisms.dip.columns import ColumnsMechanism
from dpdask.mechanisms.dip.spec import DipMechanism, DipSpec
from dpdask.mechanisms.dip.tree import TreeMechanism
from dpdask.mechanisms.discover import DiscoverMechanism, DiscoverSpec
from dpdask.mechanisms.histogram.spec import HistogramMechanism, HistogramSpec
from dpdask.mechanisms.interval.spec import IntervalSpec, RandomRangesMechanism
from dpdask.mechanisms.marginals.people import PersonTablesMechanism
from dpdask.mechanisms.marginals.spec import MarginalsMechanism, MarginalsSpec
from dpdask.mechanisms.mechanism import Mechanism, Spec
from dpdask.privacy import Budget
from dpdask.schema import Schema

Choose = Callable[[Any], type[Mechanism]]

_REFERENCES: Mapping[str, type[DipMechanism]] = MappingProxyType(
    {"columns": ColumnsMechanism, "records": RecordsMechanism, "tree": TreeMechanism}
)
_REGISTERED: dict[type[Spec], Choose] = {}


def register(spec_type: type[Spec], choose: Choose, guidance: Guidance) -> None:
    """Add a mechanism, so that jobs can name its kind."""
    kind = _kind(spec_type)
    if any(_kind(other) == kind for other in _REGISTERED):
        raise SpecError(
            f"a mechanism of the kind {kind!r} exists already",
            spec_type.__name__,
            "choose another kind",
        )
    _REGISTERED[spec_type] = choose
    register_guidance(kind, guidance)


def spec_union() -> Any:
    """Return the type of all specifications, told apart by `kind`; the same object until another one is registered."""
    return _join(tuple(_REGISTERED))


@lru_cache(maxsize=1)
def _join(spec_types: tuple[type[Spec], ...]) -> Any:
    return Annotated[reduce(or_, spec_types), Field(discriminator="kind")]


def parameters() -> set[str]:
    """Return the names of the parameters of all mechanisms."""
    return {name for spec_type in _REGISTERED for name in spec_type.model_fields}


def bind(spec: Spec, schema: Schema, budget: Budget | None) -> Mechanism:
    """Return a mechanism: its specification on a schema, under a budget."""
    if spec.spends and budget is None:
        raise SpecError("this mechanism spends a budget, but none is given", "`epsilon`", "give it")
    return _REGISTERED[type(spec)](spec)(spec=spec, schema=spec.narrow(schema), budget=budget)


def _kind(spec_type: type[Spec]) -> str:
    return str(get_args(spec_type.model_fields["kind"].annotation)[0])


register(DipSpec, lambda spec: _REFERENCES[spec.reference.structure], dip.GUIDANCE)
register(
    CopulaSpec,
    lambda spec: PersonsMechanism if spec.persons else CopulaMechanism,
    copula.GUIDANCE,
)
register(IntervalSpec, lambda _: RandomRangesMechanism, interval.GUIDANCE)
register(
    MarginalsSpec,
    lambda spec: PersonTablesMechanism if spec.persons else MarginalsMechanism,
    marginals.GUIDANCE,
)
register(HistogramSpec, lambda _: HistogramMechanism, histogram.GUIDANCE)
register(DiscoverSpec, lambda _: DiscoverMechanism, discover.GUIDANCE)
