"""The selection of keys: its threshold against exact sums, and its price against an enumeration of everything that it tells."""

import itertools
import json
import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest

from dpdask.errors import SpecError
from dpdask.mechanisms import levels
from dpdask.mechanisms.marginals.noise import plan_noise
from dpdask.privacy import Budget
from dpdask.privacy.events import (
    Composed,
    DiscreteGaussian,
    DiscreteLaplace,
    KeySelection,
    LocalRelease,
    compose,
    epsilon,
    from_dict,
    to_dict,
)
from dpdask.privacy.ledger import Charge
from dpdask.privacy.noise import bound_tail, find_threshold, select_keys, weigh_keys
from dpdask.streams import RunKey, stream

SCALES = (0.3, 0.7, 1.0, 2.5, 8.0, 40.0)
ADJACENCIES = ("add-remove", "replace-one")


def laplace(scale, keys=1, adjacency="add-remove"):
    """The noise of numbers of units, each of at most so many keys."""
    count = 2 if adjacency == "replace-one" else 1
    return DiscreteLaplace(scale=scale, sensitivity=keys, adjacency=adjacency, count=count)


def gaussian(sigma, keys=1, adjacency="add-remove"):
    moved = 2 * keys if adjacency == "replace-one" else keys
    return DiscreteGaussian(sigma=sigma, sensitivity=math.sqrt(moved), adjacency=adjacency)


def exact_tail(event, least):
    """Pr(e >= least) at 40 digits."""
    with mpmath.workdps(40):
        if isinstance(event, DiscreteLaplace):
            rate = 1 / mpmath.mpf(event.scale)
            return mpmath.exp(-least * rate) / (1 + mpmath.exp(-rate))
        twice = 2 * mpmath.mpf(event.sigma) ** 2
        far = math.ceil(15 * event.sigma) + 20
        mass = {z: mpmath.exp(-mpmath.mpf(z * z) / twice) for z in range(least + far)}
        whole = 2 * mpmath.fsum(mass[z] for z in range(far)) - 1
        return mpmath.fsum(mass[z] for z in range(least, least + far)) / whole


@pytest.mark.parametrize("make", [laplace, gaussian])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(("delta", "keys"), [(1e-6, 1), (1e-9, 2), (1e-6, 10**6), (0.3, 1)])
def test_the_threshold_is_the_least_that_holds(make, scale, delta, keys):
    found = find_threshold(KeySelection(noise=make(scale, keys), keys=keys, delta=delta))
    with mpmath.workdps(40):
        most = -mpmath.expm1(mpmath.log1p(-mpmath.mpf(delta)) / keys)
    assert exact_tail(make(scale), found - 1) <= most
    assert found == 2 or exact_tail(make(scale), found - 2) > most * (1 - 4e-9)


@pytest.mark.parametrize("sigma", [1024.5, 1e5, 1e9])
def test_the_tail_of_a_large_sigma_is_bounded_by_the_continuous_one(sigma):
    for place in (1.5, 3.0, 7.5):
        least = math.ceil(place * sigma)
        exact = mpmath.ncdf(-mpmath.mpf(least) / sigma)  # to 1e-3 of it, since σ is large
        assert exact <= bound_tail(gaussian(sigma), least) <= exact * (1 + 6 * place / sigma)
    assert bound_tail(gaussian(sigma), 1) == 1.0


# ---- the price, by enumeration


def grouped(here, there):
    """Outcomes of two tables, with those of one ratio together: all that any δ depends on."""
    here, there = np.ravel(here), np.ravel(there)
    some = (here > 0) | (there > 0)
    here, there = here[some], there[some]
    with np.errstate(divide="ignore"):
        ratio = np.round(np.log(here) - np.log(there), 9)
    _, place = np.unique(ratio, return_inverse=True)
    return np.bincount(place, weights=here), np.bincount(place, weights=there)


def product(*parts):
    here, there = np.ones(1), np.ones(1)
    for a, b in parts:
        here, there = grouped(np.outer(here, a), np.outer(there, b))
    return here, there


def exact_delta(outcomes, at):
    """δ(ε), the larger of both directions."""
    here, there = outcomes
    return max(
        math.fsum(np.maximum(0.0, a - math.exp(at) * b)) for a, b in ((here, there), (there, here))
    )


def mass(event, far):
    numbers = np.arange(-far, far + 1)
    if isinstance(event, DiscreteLaplace):
        found = math.tanh(0.5 / event.scale) * np.exp(-np.abs(numbers) / event.scale)
    else:
        found = np.exp(-(numbers**2) / (2 * event.sigma**2))
    return found / found.sum()


def key_outcomes(event, threshold, here, there):
    """What is told of one key whose number of units is one in one table, and another in the other: listed or not, with which number."""
    far = math.ceil(30 * getattr(event, "scale", 1) + 14 * getattr(event, "sigma", 0)) + threshold
    shown = np.arange(threshold, threshold + far)
    single = mass(event, 3 * far)
    # a key of no unit is not drawn for
    listed = [single[3 * far + shown - count] * (count > 0) for count in (here, there)]
    not_listed = [
        single[: max(0, 3 * far + threshold - count)].sum() if count else 1.0
        for count in (here, there)
    ]
    return grouped(*listed), grouped(*not_listed)


def release(noise, threshold, other, moves):
    """The outcomes of a listing and of the noisy number of units with a key that is not listed.

    `moves` holds, for each unit that differs, its keys as pairs of numbers in the two tables. A unit that is in one table alone adds one to
    `other` there if any of its keys is not listed.
    """
    everything = []
    pairs = [pair for unit in moves for pair in unit]
    owners = np.array([place for place, unit in enumerate(moves) for _ in unit])
    told = [key_outcomes(noise, threshold, *pair) for pair in pairs]
    far, numbers = 200, np.arange(-200, 201)
    single = mass(other, 2 * far) if other else None
    for pattern in itertools.product((0, 1), repeat=len(pairs)):  # 1: not listed
        joint = product(*(each[which] for each, which in zip(told, pattern, strict=True)))
        if other is not None:
            left_out = [any(np.array(pattern)[owners == place]) for place in range(len(moves))]
            # a unit is where its keys have one more
            is_here = [unit[0][0] > unit[0][1] for unit in moves]
            here = sum(out and at for out, at in zip(left_out, is_here, strict=True))
            there = sum(out and not at for out, at in zip(left_out, is_here, strict=True))
            told_other = [single[2 * far + numbers - moved] for moved in (here, there)]
            joint = product(joint, grouped(*told_other))
        everything.append(joint)
    return grouped(*(np.concatenate(each) for each in zip(*everything, strict=True)))


def neighbours(keys, adjacency, threshold):
    """Which keys differ in neighbouring tables: new ones, old ones, and old ones about the threshold."""
    kinds = ((1, 0), (2, 1), (threshold + 1, threshold))
    for unit in itertools.combinations_with_replacement(kinds, keys):
        if adjacency == "add-remove":
            yield [list(unit)]
            continue
        for others in itertools.combinations_with_replacement(kinds, keys):
            yield [list(unit), [(b, a) for a, b in others]]


CASES = [
    (make, scale, keys, adjacency)
    for make, scale in ((laplace, 1.5), (gaussian, 2.0))
    for keys in (1, 2)
    for adjacency in ADJACENCIES
]


def planned(make, scale, keys, adjacency, delta=0.01):
    """A selection, and the event of the other units' number: of more noise, as one unit moves it by one."""
    other = make(4 * scale, 1, adjacency)
    return KeySelection(noise=make(scale, keys, adjacency), keys=keys, delta=delta), other


@pytest.mark.parametrize(("make", "scale", "keys", "adjacency"), CASES)
@pytest.mark.parametrize("total", [0.015, 0.06])
def test_a_selection_costs_no_more_than_is_accounted(make, scale, keys, adjacency, total):
    selection, other = planned(make, scale, keys, adjacency)
    threshold = find_threshold(selection)
    for events in ((selection,), (selection, other)):
        at = epsilon(Composed(events=events), total)
        assert math.isfinite(at)
        worst = max(
            exact_delta(release(selection.noise, threshold, *events[1:] or [None], moves), at)
            for moves in neighbours(keys, adjacency, threshold)
        )
        assert worst <= total * (1 + 1e-9)


@pytest.mark.parametrize(("make", "scale", "keys", "adjacency"), CASES)
def test_a_threshold_below_it_is_found_out(make, scale, keys, adjacency):
    selection, _ = planned(make, scale, keys, adjacency)
    right = find_threshold(selection)
    # textbook: that of continuous noise
    rate = -math.expm1(math.log1p(-selection.delta) / keys)
    textbook = (
        1 + scale * math.log(1 / (2 * rate))
        if make is laplace
        else 1 + scale * float(mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * rate))
    )
    new = [(1, 0)] * keys
    moves = [new] if adjacency == "add-remove" else [new, [(b, a) for a, b in new]]
    for threshold, holds in ((right, True), (right - 1, False), (math.ceil(textbook), None)):
        # whatever ε, a new key that is listed is found out
        delta = exact_delta(release(selection.noise, threshold, None, moves), 50.0)
        if holds is None:
            assert (delta > selection.delta) == (threshold < right)
        else:
            assert (delta <= selection.delta * (1 + 1e-9)) == holds


@pytest.mark.parametrize("make", [laplace, gaussian])
def test_the_textbook_threshold_lets_new_keys_through_too_often(make):
    too_often = 0
    for scale in np.arange(0.6, 6.0, 0.05):
        noise = make(scale)
        right = find_threshold(KeySelection(noise=noise, keys=1, delta=1e-6))
        textbook = 1 + scale * (math.log(1 / 2e-6) if make is laplace else 4.753424308822899)
        too_often += math.ceil(textbook) < right
        assert right <= math.ceil(textbook) + 1
    assert too_often > 10


# ---- weights: a unit of few keys adds more to each


def weighted(make, scale, keys, adjacency="add-remove", weight=3, delta=0.01):
    """A selection in which a unit with all its keys weighs so much in each."""
    moved = keys if make is laplace else math.sqrt((1 + (adjacency == "replace-one")) * keys)
    noise = replace(make(scale * weight, keys, adjacency), sensitivity=weight * moved)
    return KeySelection(noise=noise, keys=keys, delta=delta, weight=weight)


def weighted_neighbours(selection, weights, threshold):
    """Which keys differ: of a unit with each number of keys, new ones, old ones of little weight, and ones about the threshold."""
    units = []
    for n_keys in range(1, selection.keys + 1):
        own = int(weights[n_keys])
        kinds = [(own + other, other) for other in (0, 1, threshold)]
        units += map(list, itertools.combinations_with_replacement(kinds, n_keys))
    if selection.adjacency == "add-remove":
        return [[unit] for unit in units]
    turned = [[(b, a) for a, b in unit] for unit in units]
    return [[one, other] for one in units for other in turned]


def worst_delta(selection, weights, at):
    threshold = find_threshold(selection)
    return max(
        exact_delta(release(selection.noise, threshold, None, moves), at)
        for moves in weighted_neighbours(selection, weights, threshold)
    )


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize(("make", "scale"), [(laplace, 1.2), (gaussian, 1.5), (gaussian, 0.5)])
def test_weights_cost_no_more_than_is_accounted(make, scale, adjacency):
    """Of small noise, weights are cut so that no unit's own keys are listed too often; with power."""
    selection, total = weighted(make, scale, 2, adjacency), 0.015
    weights, at = weigh_keys(selection, 2), epsilon(selection, total)
    assert math.isfinite(at)
    assert worst_delta(selection, weights, at) <= total * (1 + 1e-9)
    threshold = find_threshold(selection)
    assert worst_delta(selection, weights + threshold // 3, at) > total


@pytest.mark.parametrize("make", [laplace, gaussian])
@pytest.mark.parametrize(("scale", "weight"), [(0.3, 7), (0.7, 8), (2.0, 5), (9.0, 3)])
def test_weights_are_the_largest_that_hold(make, scale, weight):
    """By exact sensitivities and tails; every one more of a weight breaks one of them."""
    keys, delta = 9, 1e-4
    selection = weighted(make, scale, keys, weight=weight, delta=delta)
    weights, threshold = weigh_keys(selection, keys).tolist(), find_threshold(selection)
    assert weights[0] == 0
    assert weights[keys] == weight
    assert sorted(weights[1:], reverse=True) == weights[1:]
    power = 1 if make is laplace else 2
    for n_keys in range(1, keys + 1):
        with mpmath.workdps(40):
            most = -mpmath.expm1(mpmath.log1p(-mpmath.mpf(delta)) / n_keys)

        def holds(own, n_keys=n_keys, most=most):
            moved = n_keys * own**power <= keys * weight**power
            # noise that is symmetric about 0 reaches less than 1 always too often
            return (
                moved and own < threshold and exact_tail(selection.noise, threshold - own) <= most
            )

        assert holds(weights[n_keys])
        assert not holds(weights[n_keys] + 1)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("adjacency", "keys", "cost"),
    [("add-remove", 2, 1.0), ("replace-one", 3, 10.0), ("add-remove", 50, 10.0)],
)
def test_persons_are_never_listed_less_often_than_by_uniform_counts(
    adjacency, keys, cost, monkeypatch
):
    """Every unit weighs at least as much as one with all its keys, and the threshold is no higher than that of whole numbers."""
    unit = {"column": "user", "max_rows": keys}
    budget = Budget(epsilon=cost, delta=1e-6, adjacency=adjacency, unit=unit)
    found = levels.plan_selection(budget, 1)
    weights = weigh_keys(found, keys)[1:] / found.weight
    assert weights.min() == weights[-1] == 1.0
    assert weights[0] > 1.1
    with monkeypatch.context() as patch:
        patch.setattr(levels, "find_weight", lambda _: None)
        uniform = levels.plan_selection.__wrapped__(budget, 1)
    assert find_threshold(found) / found.weight <= find_threshold(uniform)
    assert weigh_keys(uniform, keys).tolist() == [0, *[1] * keys]
    assert epsilon(found, 1e-6) <= cost


@pytest.mark.parametrize("make", [laplace, gaussian])
def test_another_number_that_shares_the_noise_is_found_out(make):
    """The number of units without a listed key, under noise of the same size that nobody accounts for."""
    selection, _ = planned(make, 1.5, 1, "add-remove")
    threshold, total = find_threshold(selection), 0.015
    at = epsilon(selection, total)
    moves = [[(threshold + 1, threshold)]]
    assert exact_delta(release(selection.noise, threshold, None, moves), at) <= total
    # a unit that is left out moves the second number as well
    near = [[(threshold, threshold - 1)]]
    shared = release(selection.noise, threshold, selection.noise, near)
    assert exact_delta(shared, at) > 1.5 * total


# ---- a list, and a table of its levels that the same job counts


def listed_and_counted(selection, table, move):
    """The outcomes of one key: listed or not, with its number, and then a count in a table, its own or that of all others.

    The row that differs moves one of these counts by one.
    """
    told = key_outcomes(selection.noise, find_threshold(selection), *move)
    numbers, single = np.arange(-120, 121), mass(table, 240)
    moved = grouped(single[240 + numbers - 1], single[240 + numbers])
    parts = [product(each, moved) for each in told]
    return grouped(*(np.concatenate(each) for each in zip(*parts, strict=True)))


@pytest.mark.parametrize("total", [0.015, 0.06])
def test_a_list_and_the_tables_of_a_job_cost_what_its_plan_says(total):
    budget = Budget(epsilon=1.0, delta=total, adjacency="add-remove")
    planned = plan_noise(budget, 1, one_way=1.0, pairs=0.0, discovered=("key",))
    selection, table = planned.levels["key"], planned.one_way
    assert planned.event == Composed(events=(selection, table))
    assert epsilon(planned.event, total) <= 1.0
    for kind in ((1, 0), (2, 1)):
        delta = exact_delta(listed_and_counted(selection, table, kind), 1.0)
        assert delta <= total * (1 + 1e-9)
    # with power: half of the table's noise is found out
    less = replace(table, sigma=table.sigma / 2)
    assert exact_delta(listed_and_counted(selection, less, (2, 1)), 1.0) > total


def test_a_fifth_of_the_precision_finds_levels_and_a_quarter_of_delta_pays_for_new_ones():
    for adjacency, rows in itertools.product(ADJACENCIES, (1, 5)):
        unit = "row" if rows == 1 else {"column": "user", "max_rows": rows}
        budget = Budget(epsilon=1.0, delta=1e-6, adjacency=adjacency, unit=unit)
        planned = plan_noise(budget, 4, discovered=("a", "b"))
        [selection] = set(planned.levels.values())
        assert selection.keys == rows
        assert 2 * selection.delta == pytest.approx(0.25e-6)
        listed = 2 * (selection.noise.sensitivity / selection.noise.sigma) ** 2
        tables = [planned.one_way, planned.pairs]
        others = sum(each.count * (each.sensitivity / each.sigma) ** 2 for each in tables)
        assert listed / (listed + others) == pytest.approx(0.2)
        assert epsilon(planned.event, 1e-6) <= 1.0
        assert type(planned).from_dict(json.loads(json.dumps(planned.to_dict()))) == planned
    with pytest.raises(ValueError, match="no selection of keys"):
        type(planned).from_dict({**planned.to_dict(), "levels": {"a": to_dict(planned.one_way)}})


# ---- the event


SELECTION = KeySelection(noise=gaussian(3.0, 4), keys=4, delta=1e-7)


def test_its_json_is_read_back():
    written = to_dict(SELECTION)
    assert written == {
        "format": 1,
        "kind": "key-selection",
        "noise": to_dict(SELECTION.noise),
        "keys": 4,
        "delta": 1e-7,
    }
    assert from_dict(json.loads(json.dumps(written))) == SELECTION
    weighing = replace(SELECTION, weight=1024)
    assert to_dict(weighing) == {**written, "weight": 1024}
    assert from_dict(to_dict(weighing)) == weighing


@pytest.mark.parametrize(
    "change",
    [
        {"noise": None},
        {"noise": to_dict(LocalRelease(epsilon=1.0))},
        {"noise": to_dict(SELECTION)},
        {"keys": 0},
        {"keys": 1.5},
        {"weight": 0},
        {"weight": 1.5},
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta": None},
        {"threshold": 3},
    ],
)
def test_what_is_not_understood_is_refused(change):
    with pytest.raises(SpecError):
        from_dict({**to_dict(SELECTION), **change})


def test_its_delta_is_paid_once_for_each_selection():
    noise = laplace(2.0)
    single = KeySelection(noise=noise, keys=1, delta=1e-6)
    assert epsilon(single, 0.9e-6) == math.inf
    assert epsilon(single, 1e-6) == 0.5
    both = Composed(events=(single, single))
    assert epsilon(both, 1.9e-6) == math.inf
    assert epsilon(both, 2e-6) == 1.0
    assert epsilon(both, 3e-6) == epsilon([noise, noise], 3e-6 - 2e-6) < 1.0


def test_a_ledger_adds_it_up():
    noise = laplace(2.0)
    single = KeySelection(noise=noise, keys=1, delta=1e-6)
    charge = Charge(epsilon=0.5, delta=1e-6, event=to_dict(Composed(events=(single,), unit="row")))
    assert compose([charge], 1e-6) == 0.5
    assert compose([charge], 0.5e-6) == math.inf
    assert compose([charge, charge], 4e-6) == 1.0
    assert compose([charge, charge], 1e-6) == math.inf


def test_only_keys_that_occur_are_drawn_for():
    rng = stream(RunKey.insecure(1), "test", "")
    selection = KeySelection(noise=laplace(2.0), keys=1, delta=1e-6)
    least = find_threshold(selection)
    places, noisy = select_keys(np.array([1, 10_000, 2], dtype=np.int64), selection, rng=rng)
    assert places.tolist() == [1]
    assert noisy[0] >= least
    assert select_keys(np.zeros(0, dtype=np.int64), selection)[0].tolist() == []
    with pytest.raises(SpecError, match="no unit"):
        select_keys(np.array([0], dtype=np.int64), selection)


def test_keys_of_one_unit_are_listed_as_often_as_is_accounted_and_no_less():
    """With power in both directions: within 5 standard deviations of the exact probability."""
    selection = KeySelection(noise=laplace(2.0), keys=1, delta=0.05)
    probability = float(exact_tail(selection.noise, find_threshold(selection) - 1))
    n = 100_000
    places, _ = select_keys(np.ones(n, dtype=np.int64), selection)
    room = 5 * math.sqrt(n * probability * (1 - probability))
    assert abs(len(places) - n * probability) < room
    assert 0.6 * selection.delta < probability <= selection.delta


def test_a_delta_that_no_threshold_reaches_is_refused():
    """Divided by the keys of a unit, it is no number above 0."""
    noise = DiscreteLaplace(scale=1.0, sensitivity=2, adjacency="add-remove")
    with pytest.raises(SpecError, match="too small for a threshold"):
        find_threshold(KeySelection(noise=noise, keys=2, delta=5e-324))
