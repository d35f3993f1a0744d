"""How ε is spent: never more than promised, exactly; and what is accounted is what is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dpdask.cells import cells
from dpdask.codec import codec_for
from dpdask.errors import SpecError
from dpdask.mechanisms import spending
from dpdask.mechanisms.dip.fit import fit_dip
from dpdask.mechanisms.spending import Spending, spend
from dpdask.privacy import Budget, UnitColumn, accountant, noise
from dpdask.privacy.events import DiscreteLaplace, LocalRelease
from dpdask.references import CellCounts, Histogram, Holdout, Known, Reference, histogram, noisy_distribution
from dpdask.schema import Schema

COLUMNS = ("a", "b", "c")
positive = st.floats(1e-3, 1e3)
budgets = st.builds(
    lambda epsilon, rows: Budget(epsilon=epsilon, unit="row" if rows is None else UnitColumn(column="user", max_rows=rows)),
    st.floats(1e-3, 100.0),
    st.none() | st.integers(1, 10_000),
)
weights = st.none() | st.fixed_dictionaries(dict.fromkeys(COLUMNS, positive))
references = st.just(Holdout(fraction=0.25)) | st.builds(Histogram, share=st.floats(1e-3, 0.999))


def total(found: Spending) -> Fraction:
    return sum(map(Fraction, found.reference.values()), Fraction(0)) + found.rows_per_unit * sum(map(Fraction, found.row.values()), Fraction(0))


@given(budgets, references, weights)
def test_no_more_is_spent_than_is_promised(budget: Budget, reference: Reference, shares: dict[str, float] | None) -> None:
    found = spend(budget, reference, COLUMNS, shares)
    assert total(found) <= Fraction(budget.epsilon)
    assert math.isclose(total(found), budget.epsilon, rel_tol=1e-12)  # and no less
    assert found.rows_per_unit == (budget.unit_column.max_rows if budget.unit_column else 1)
    assert set(found.row) == set(COLUMNS)
    assert set(found.reference) == (set(COLUMNS) if isinstance(reference, Histogram) else set())
    if isinstance(reference, Histogram):
        assert math.isclose(math.fsum(found.reference.values()), reference.share * budget.epsilon, rel_tol=1e-12)
    if shares is not None:
        assert math.isclose(found.row["a"] / found.row["b"], shares["a"] / shares["b"], rel_tol=1e-12)


@given(budgets, references, weights)
def test_the_events_cost_what_is_promised(budget: Budget, reference: Reference, shares: dict[str, float] | None) -> None:
    found = spend(budget, reference, COLUMNS, shares)
    *histograms, rows = found.events(budget).events
    cost = accountant.epsilon(found.events(budget), 0.0)
    assert cost <= budget.epsilon  # so that a budget of ε has room for a job of ε
    assert cost >= total(found) * (1 - Fraction(1, 10**12))
    assert isinstance(rows, LocalRelease)
    assert rows.n == found.rows_per_unit
    assert Fraction(rows.epsilon) >= sum(map(Fraction, found.row.values()))
    assert len(histograms) == len(found.reference)
    for event, epsilon in zip(histograms, found.reference.values(), strict=True):
        assert isinstance(event, DiscreteLaplace)
        assert event.adjacency == budget.adjacency
        assert event.sensitivity == 2 * found.rows_per_unit
        assert Fraction(event.sensitivity) / Fraction(event.scale) <= Fraction(epsilon)


@pytest.mark.parametrize(
    "shares", [{"a": 1.0}, {"a": 1.0, "b": 1.0, "c": 0.0}, {"a": 1.0, "b": 1.0, "c": math.nan}, {**dict.fromkeys(COLUMNS, 1.0), "d": 1.0}]
)
def test_wrong_weights_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(SpecError, match="weights"):
        spend(Budget(epsilon=1.0), Histogram(), COLUMNS, shares)


def test_a_part_that_rounds_to_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match="its column's part of ε is 0"):
        spend(Budget(epsilon=1.0), Holdout(fraction=0.5), COLUMNS, {"a": 1e-308, "b": 1e308, "c": 1e308})


# ---- what is accounted is what is drawn

SCHEMA = Schema.from_dict(
    {
        "columns": {
            "a": {"role": "privatise", "kind": "discrete", "levels": [1, 2, 3]},
            "b": {"role": "privatise", "kind": "categorical", "levels": ["x", "y"], "nulls": "level"},
            "c": {"role": "privatise", "kind": "continuous", "bounds": [0.0, 1.0]},
        }
    }
)
TYPES = {"a": pa.int64(), "b": pa.string(), "c": pa.float64()}
CODECS = {name: codec_for(name, SCHEMA.columns[name], type_) for name, type_ in TYPES.items()}
ARRAYS = {"a": pa.array([1, 2, 3, 1] * 10), "b": pa.array(["x", None, "y", "x"] * 10), "c": pa.array(np.arange(40) / 40)}


def drawn_scales(budget: Budget, found: Spending) -> list[float]:
    """Return the scale of the noise that the sampler itself is asked for, histogram by histogram."""
    scales: list[float] = []
    sample = noise.discrete_laplace

    def spy(counts: Any, scale: float, **rest: Any) -> Any:
        scales.append(scale)
        return sample(counts, scale, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "discrete_laplace", spy)
        for name, epsilon in found.reference.items():
            own = cells(CODECS[name], 16)
            statistic = CellCounts.of_batch(own, ARRAYS[name])
            noisy_distribution(own, statistic, epsilon, budget.adjacency, rows_per_unit=found.rows_per_unit)
    return scales


def accounted_is_drawn(budget: Budget) -> bool:
    """Return whether the scales accounted, and the sensitivity that they are for, are those drawn and those that the unit has."""
    found = spend(budget, Histogram(share=0.25), COLUMNS, {"a": 1.0, "b": 2.0, "c": 3.0})
    events = [event for event in found.events(budget).events if isinstance(event, DiscreteLaplace)]
    needed = [Fraction(2 * found.rows_per_unit) / Fraction(epsilon) for epsilon in found.reference.values()]
    drawn = drawn_scales(budget, found)
    return drawn == [event.scale for event in events] and all(Fraction(scale) >= least for scale, least in zip(drawn, needed, strict=True))


BUDGETS = [Budget(epsilon=1.0), Budget(epsilon=0.3, unit=UnitColumn(column="user", max_rows=20))]


@pytest.mark.parametrize("budget", BUDGETS, ids=["row", "user"])
def test_the_accounted_scale_is_the_drawn_one(budget: Budget) -> None:
    assert accounted_is_drawn(budget)


@pytest.mark.parametrize("budget", BUDGETS, ids=["row", "user"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("owner", [spending, histogram], ids=["accounted", "drawn"])
def test_a_change_of_one_of_the_two_is_noticed(owner: Any, factor: float, budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., DiscreteLaplace] = histogram.histogram_event

    def wrong(*given_: Any, **rest: Any) -> DiscreteLaplace:
        event = right(*given_, **rest)
        return DiscreteLaplace(scale=event.scale * factor, sensitivity=event.sensitivity, adjacency=event.adjacency)

    monkeypatch.setattr(owner, "histogram_event", wrong)
    assert not accounted_is_drawn(budget)


@given(budgets, st.sampled_from(["laplace", "laplace-calibrated", "optimal"]))
def test_a_row_pays_no_more_than_its_event_says(budget: Budget, channel: Any) -> None:
    assume(budget.epsilon / (budget.unit_column.max_rows if budget.unit_column else 1) > 1e-4)
    known = Known.model_validate({"kind": "known", "columns": {"a": {"probabilities": [0.2, 0.3, 0.5]}, "b": {"probabilities": [0.1, 0.4, 0.5]}}})
    found = spend(budget, known, ("a", "b"))
    fitted = fit_dip({name: known.distribution(CODECS[name]) for name in ("a", "b")}, CODECS, found.row, channel)
    exact = sum((Fraction(mechanism.epsilon) for mechanism in fitted.columns.values()), Fraction(0))
    assert exact <= Fraction(found.row_total)
    assert all(fitted.columns[name].epsilon <= found.row[name] for name in ("a", "b"))
