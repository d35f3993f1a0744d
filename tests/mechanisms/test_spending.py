"""How ε is spent: never more than promised, exactly; and what is accounted is what is drawn."""

import math
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from e2e.helpers import categorical, continuous, discrete, schema_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpdask.codec import codec_for
from dpdask.documents import validate
from dpdask.mechanisms.dip.columns import fit_dip
from dpdask.mechanisms.dip.spec import DipSpec
from dpdask.mechanisms.mechanism import Columns
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget, UnitColumn, noise
from dpdask.privacy import events as accountant
from dpdask.privacy.events import DiscreteLaplace, LocalRelease
from dpdask.references import Histogram, Holdout, Known
from dpdask.schema import Schema
from dpdask.streams import RunKey, Streams

COLUMNS = ("a", "b", "c")
USER = {"user": {"role": "drop"}}
LEVELS = schema_of({name: discrete([1, 2, 3]) for name in COLUMNS} | USER)
positive = st.floats(1e-3, 1e3)
budgets = st.builds(
    lambda epsilon, rows: Budget(
        epsilon=epsilon, unit="row" if rows is None else UnitColumn(column="user", max_rows=rows)
    ),
    st.floats(1e-3, 100.0),
    st.none() | st.integers(1, 10_000),
)
weights = st.none() | st.fixed_dictionaries(dict.fromkeys(COLUMNS, positive))
references = st.just(Holdout(fraction=0.25)) | st.builds(Histogram, share=st.floats(1e-3, 0.999))


def spend(budget, reference, shares=None, schema=LEVELS, channel="laplace"):
    """Return the mechanism that spends a budget."""
    given = {"reference": reference, "weights": shares, "channel": channel}
    return bind(validate(DipSpec, given, "job"), schema, budget)


def total(found):
    return sum(map(Fraction, found.reference.values()), Fraction(0)) + found.rows_per_unit * sum(
        map(Fraction, found.row.values()), Fraction(0)
    )


@given(budgets, references, weights)
def test_no_more_is_spent_than_is_promised(budget, reference, shares):
    found = spend(budget, reference, shares).spending
    assert total(found) <= Fraction(budget.epsilon)
    assert math.isclose(total(found), budget.epsilon, rel_tol=1e-12)  # and no less
    assert found.rows_per_unit == (budget.unit_column.max_rows if budget.unit_column else 1)
    assert set(found.row) == set(COLUMNS)
    assert set(found.reference) == (set(COLUMNS) if isinstance(reference, Histogram) else set())
    if isinstance(reference, Histogram):
        assert math.isclose(
            math.fsum(found.reference.values()), reference.share * budget.epsilon, rel_tol=1e-12
        )
    if shares is not None:
        assert math.isclose(
            found.row["a"] / found.row["b"], shares["a"] / shares["b"], rel_tol=1e-12
        )


@given(budgets, references, weights)
def test_the_events_cost_what_is_promised(budget, reference, shares):
    mechanism = spend(budget, reference, shares)
    found, event = mechanism.spending, mechanism.event
    *histograms, rows = event.events
    cost = accountant.epsilon(event, 0.0)
    assert cost <= budget.epsilon  # so that a budget of ε has room for a job of ε
    assert cost >= total(found) * (1 - Fraction(1, 10**12))
    assert isinstance(rows, LocalRelease)
    assert rows.n == found.rows_per_unit
    assert Fraction(rows.epsilon) >= sum(map(Fraction, found.row.values()))
    assert rows.epsilon == mechanism.row_total
    assert rows.unit == ("row" if budget.unit_column is None else "column user")
    assert len(histograms) == len(found.reference)
    for part, epsilon in zip(histograms, found.reference.values(), strict=True):
        assert isinstance(part, DiscreteLaplace)
        assert part.adjacency == budget.adjacency
        assert part.sensitivity == 2 * found.rows_per_unit
        assert Fraction(part.count * part.sensitivity) / Fraction(part.scale) <= Fraction(epsilon)


# ---- what is accounted is what is drawn

SCHEMA = schema_of(
    {
        "a": discrete([1, 2, 3]),
        "b": categorical(["x", "y"], nulls="level"),
        "c": continuous([0.0, 1.0]),
        **USER,
    }
)
TYPES = {"a": pa.int64(), "b": pa.string(), "c": pa.float64()}
CODECS = {name: codec_for(name, SCHEMA.columns[name], type_) for name, type_ in TYPES.items()}
ARRAYS = {
    "a": pa.array([1, 2, 3, 1] * 10),
    "b": pa.array(["x", None, "y", "x"] * 10),
    "c": pa.array(np.arange(40) / 40),
}
TABLE = Columns(types=pa.schema(TYPES), codecs=CODECS)


def drawn_scales(mechanism):
    """Return the scale of the noise that the sampler itself is asked for, histogram by histogram."""
    scales = []
    sample = noise.discrete_laplace

    def spy(counts, scale, **rest):
        scales.append(scale)
        return sample(counts, scale, **rest)

    statistic = mechanism.statistic(TABLE)
    counter = statistic.counter()
    counter.add(pa.RecordBatch.from_pydict(ARRAYS), None, Streams(lambda: RunKey.insecure(1), "f"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "discrete_laplace", spy)
        mechanism.draw(counter.result(), TABLE, lambda _: None)
    return scales


def accounted_is_drawn(budget):
    """Return whether the scales accounted, and the sensitivity that they are for, are those drawn and those that the unit needs, and no more."""
    mechanism = spend(budget, Histogram(share=0.25), {"a": 1.0, "b": 2.0, "c": 3.0}, SCHEMA)
    found = mechanism.spending
    accounted = [
        event.scale for event in mechanism.event.events if isinstance(event, DiscreteLaplace)
    ]
    vectors = {
        "a": 1,
        "b": 1,
        "c": 3,
    }  # the three levels of a hierarchy share the part of a continuous column
    needed = [
        Fraction(2 * found.rows_per_unit * vectors[name]) / Fraction(epsilon)
        for name, epsilon in found.reference.items()
    ]
    drawn = drawn_scales(mechanism)
    fits = [
        least <= Fraction(scale) <= least * (1 + Fraction(1, 10**9))
        for scale, least in zip(drawn, needed, strict=True)
    ]
    return drawn == accounted and all(fits)


BUDGETS = [Budget(epsilon=1.0), Budget(epsilon=0.3, unit=UnitColumn(column="user", max_rows=20))]


@pytest.mark.parametrize("budget", BUDGETS, ids=["row", "user"])
def test_the_accounted_scale_is_the_drawn_one(budget):
    assert accounted_is_drawn(budget)


@settings(max_examples=40)
@given(budgets, st.sampled_from(["laplace", "laplace-calibrated", "optimal"]))
def test_a_row_pays_no_more_than_its_event_says(budget, channel):
    assume(budget.epsilon / (budget.unit_column.max_rows if budget.unit_column else 1) > 1e-4)
    known = Known.model_validate(
        {
            "kind": "known",
            "columns": {
                "a": {"probabilities": [0.2, 0.3, 0.5]},
                "b": {"probabilities": [0.1, 0.4, 0.5]},
            },
        }
    )
    schema = Schema(
        columns={name: column for name, column in SCHEMA.columns.items() if name != "c"}
    )
    mechanism = spend(budget, known, schema=schema, channel=channel)
    parts = mechanism.spending.row
    fitted = fit_dip(
        {name: known.distribution(CODECS[name]) for name in ("a", "b")}, CODECS, parts, channel
    )
    exact = sum((Fraction(column.epsilon) for column in fitted.columns.values()), Fraction(0))
    assert exact <= Fraction(mechanism.row_total)
    assert all(fitted.columns[name].epsilon <= parts[name] for name in ("a", "b"))
