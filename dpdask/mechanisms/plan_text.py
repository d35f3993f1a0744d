"""A plan in words, a line for each of its parts: what Python and the command line print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Planned(Protocol):
    """What the plans of a job and of a fit have in common; see `jobs.plan.Plan`."""

    @property
    def stages(self) -> tuple[str, ...]:
        """In order, in words."""

    @property
    def epsilons(self) -> Mapping[str, float]:
        """What each column of a released row may cost."""

    @property
    def reference_epsilons(self) -> Mapping[str, float]:
        """What each noisy histogram costs."""

    @property
    def ledger(self) -> Mapping[str, Any] | None:
        """The dataset's ε before and after, and its limit."""

    @property
    def guarantee(self) -> str:
        """Who is protected by what, and who is not."""

    @property
    def expectations(self) -> tuple[str, ...]:
        """How much a released row keeps, or how large noise is."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to consider before the run."""


def describe_steps(planned: Planned) -> list[str]:
    """Return lines on what is done, and what it costs."""
    return [
        *(f"  stage {number}   {stage}" for number, stage in enumerate(planned.stages, start=1)),
        *(f"  ε         {name}: {epsilon:.6g}" for name, epsilon in planned.epsilons.items()),
        *(f"  ε         {name}, noisy histogram: {epsilon:.6g}" for name, epsilon in planned.reference_epsilons.items()),
        *_describe_ledger(planned.ledger),
    ]


def _describe_ledger(ledger: Mapping[str, Any] | None) -> list[str]:
    if ledger is None:
        return []
    verdict = "" if ledger["fits"] else ": THE RUN WILL BE REFUSED"
    spent = f"  ledger    ε {ledger['before']!r} spent by {ledger['runs']} runs, {ledger['after']!r} after this one, of {ledger['limit']!r}{verdict}"
    return [spent, *([f"  coverage  after this run, {ledger['coverage']}"] if ledger["coverage"] else [])]


def describe_promise(planned: Planned) -> list[str]:
    """Return lines on what is promised, what to expect, and what to consider."""
    return [
        f"  promise   {planned.guarantee}",
        *(f"  expect    {sentence}" for sentence in planned.expectations),
        *(f"  WARNING   {warning}" for warning in planned.warnings),
    ]
