"""Which share of a dataset's rows has no ε in some release, from the events that a ledger holds."""

import pytest

from dpdask.errors import SpecError
from dpdask.privacy.events import (
    Composed,
    DiscreteLaplace,
    LocalRelease,
    Uncovered,
    from_dict,
    to_dict,
)
from dpdask.privacy.ledger_entries import Coverage, coverage_of

ROWS = LocalRelease(epsilon=1.0)
COUNTS = DiscreteLaplace(scale=2.0, sensitivity=2, adjacency="replace-one")


def released(*uncovered):
    samples = tuple(
        Uncovered(fraction=fraction, fate=fate, sample=sample)
        for fraction, fate, sample in uncovered
    )  # type: ignore[arg-type]
    return to_dict(Composed(events=(ROWS,), unit="row", uncovered=samples))


def test_samples_of_one_name_are_nested_and_others_add_up():
    assert coverage_of([]) == coverage_of([released(), released()]) == Coverage()
    once = released((0.25, "held out", "a"))
    assert coverage_of([once, once, released((0.1, "held out", "a"))]).uncovered == 0.25
    assert coverage_of([once, released((0.5, "held out", "b"))]).uncovered == 0.75
    assert coverage_of([once, released((0.9, "held out", "b"))]).uncovered == 1.0
    assert (
        coverage_of([released((0.1, "held out", ""))] * 2).uncovered == 0.2
    )  # without a name, nothing says that they are one


def test_a_republished_sample_is_uncovered_too():
    for told in ((), (Uncovered(fraction=0.25, fate="held out", sample="a"),)):
        event = Composed(events=(ROWS,), unit="row", uncovered=told)
        assert from_dict(to_dict(event)) == event
    assert "uncovered" not in to_dict(Composed(events=(ROWS,)))
    found = coverage_of([released((0.25, "held out", "a")), released((0.1, "republished", "a"))])
    assert found == Coverage(uncovered=0.25, republished=0.1)
    assert (
        found.text
        == "up to about 25 % of the rows had no ε in some run (hold-outs), and the records of up to about 10 % were republished"
    )


def test_only_a_release_of_rows_can_leave_rows_out():
    told = to_dict(Composed(events=(COUNTS,), unit="row"))
    untold = to_dict(Composed(events=(COUNTS, Composed(events=(ROWS,))), unit="row"))
    assert coverage_of([told, {}]) == Coverage()
    assert coverage_of([untold, to_dict(ROWS)]) == Coverage(n_unknown=2)
    assert coverage_of([untold]).text == "1 run does not record which rows it leaves out"


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan"), "0.5", True, None])
def test_a_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(SpecError):
        Uncovered(fraction=fraction, fate="held out")


@pytest.mark.parametrize(
    "listed",
    [
        "all",
        [0.25],
        [{"fraction": 0.25}],
        [{"fraction": 0.25, "fate": "lost", "sample": ""}],
        {"fraction": 0.25},
        3,
    ],
)
def test_what_is_not_understood_is_refused(listed):
    with pytest.raises(SpecError):
        from_dict({**to_dict(Composed(events=(ROWS,), unit="row")), "uncovered": listed})
    with pytest.raises(SpecError):
        Composed(events=(ROWS,), uncovered=(listed,))
