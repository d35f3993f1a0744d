"""Events as JSON: what is written is read back, and what is not understood is refused."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpdask.errors import SpecError
from dpdask.privacy.events import (
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    LocalRelease,
    from_dict,
    to_dict,
)

POSITIVE = st.floats(1e-300, 1e300)
ADJACENCIES = st.sampled_from(["replace-one", "add-remove"])
WHOLE = st.integers(1, 10**12)
LEAVES = st.one_of(
    st.builds(LocalRelease, epsilon=POSITIVE, n=WHOLE),
    st.builds(
        DiscreteLaplace, scale=POSITIVE, sensitivity=WHOLE, adjacency=ADJACENCIES, count=WHOLE
    ),
    st.builds(
        DiscreteGaussian,
        sigma=POSITIVE,
        sensitivity=st.floats(1, 1e300),
        adjacency=ADJACENCIES,
        count=WHOLE,
    ),
)
EVENTS = st.recursive(
    LEAVES,
    lambda inner: st.builds(Composed, events=st.lists(inner, max_size=4).map(tuple)),
    max_leaves=8,
)

LAPLACE = DiscreteLaplace(scale=2.0, sensitivity=2, adjacency="replace-one", count=3)
WRITTEN = {
    "format": 1,
    "kind": "discrete-laplace",
    "scale": 2.0,
    "sensitivity": 2,
    "adjacency": "replace-one",
    "count": 3,
}


@given(EVENTS)
def test_an_event_survives_json(event):
    assert from_dict(json.loads(json.dumps(to_dict(event)))) == event


def test_the_format_does_not_change_unnoticed():
    assert to_dict(LAPLACE) == WRITTEN
    assert to_dict(Composed(events=(LocalRelease(epsilon=1.0),))) == {
        "format": 1,
        "kind": "composed",
        "events": [{"format": 1, "kind": "local-release", "epsilon": 1.0, "n": 1, "unit": "row"}],
    }
    sigma = {"sigma": 3.0, "sensitivity": math.sqrt(2), "adjacency": "add-remove", "count": 1}
    assert to_dict(
        DiscreteGaussian(sigma=3.0, sensitivity=math.sqrt(2), adjacency="add-remove")
    ) == {"format": 1, "kind": "discrete-gaussian", **sigma}


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        *({**WRITTEN, "format": version} for version in (0, 2, "1", None, True, 1.0)),
        *(
            {**WRITTEN, "kind": kind}
            for kind in ("laplace", None, ["composed"], "composed", "local-release")
        ),
        {**WRITTEN, "extra": 1},
        {key: value for key, value in WRITTEN.items() if key != "count"},
        *({**WRITTEN, "scale": scale} for scale in (0, -1.0, math.inf, math.nan, "2", True, None)),
        *({**WRITTEN, "sensitivity": sensitivity} for sensitivity in (0, 1.5, 2.0, "2", True)),
        *({**WRITTEN, "adjacency": adjacency} for adjacency in ("replace", None, [])),
        *({**WRITTEN, "count": count} for count in (0, -1, 1.5, None)),
        {
            "format": 1,
            "kind": "discrete-gaussian",
            "sigma": 1.0,
            "sensitivity": 0.5,
            "adjacency": "add-remove",
            "count": 1,
        },
        {"format": 1, "kind": "local-release", "epsilon": 0.0, "n": 1},
        {"format": 1, "kind": "composed", "events": {}},
        {"format": 1, "kind": "composed", "events": [WRITTEN, {**WRITTEN, "format": 2}]},
    ],
)
def test_what_is_not_understood_is_refused(data):
    with pytest.raises(SpecError) as caught:
        from_dict(data)
    assert caught.value.exit_code == 64


def test_a_composition_holds_events_only():
    with pytest.raises(SpecError):
        Composed(events=(1,))  # type: ignore[arg-type]  # what is tested
    with pytest.raises(SpecError):
        Composed(events=[LAPLACE])  # type: ignore[arg-type]  # what is tested
