"""A fitted release on record batches: its epsilon, its streams, and what it leaves alone."""

import datetime as dt
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import pyarrow as pa
from strategies import level_codec, value_codec

from dpdask.codec import LevelCodec
from dpdask.kernels.channel import exact_epsilon
from dpdask.mechanisms.dip.columns import fit_dip
from dpdask.references import from_statistic
from dpdask.stats import LevelCounts, RankSummary
from dpdask.streams import RunKey

KEY = RunKey.insecure(7)
N_ROWS = 400


def table():
    rng = np.random.default_rng(1)
    rating = rng.choice([0.5, 1.0, 4.0], p=[0.2, 0.3, 0.5], size=N_ROWS)
    income = np.where(rng.random(N_ROWS) < 0.4, 0.0, np.round(rng.lognormal(size=N_ROWS), 2) + 1)
    return pa.RecordBatch.from_pydict(
        {
            "id": pa.array(np.arange(N_ROWS)),
            "rating": pa.array(rating),
            "twin": pa.array(rating),
            "town": pa.array(rng.choice(["a", "b", "c"], size=N_ROWS)).dictionary_encode(),
            "income": pa.array(income, mask=rng.random(N_ROWS) < 0.1),
            "age": pa.array(rng.integers(18, 90, size=N_ROWS), type=pa.int16()),
            "day": pa.array(
                [
                    dt.date(2020, 1, 1) + dt.timedelta(int(d))
                    for d in rng.integers(0, 300, size=N_ROWS)
                ]
            ),
            "note": pa.array(["x", None] * (N_ROWS // 2)).dictionary_encode(),
        }
    )


CODECS = {
    "rating": level_codec([0.5, 1.0, 2.0, 4.0], "rating"),
    "twin": level_codec([0.5, 1.0, 2.0, 4.0], "twin"),
    "town": level_codec([None, "a", "b", "c"], "town", ordered=False),
    "income": value_codec("income", bounds=(0.0, 1e6), atoms=(0.0,), nulls=True),
    "age": value_codec("age", pa.int16(), bounds=(18.0, 99.0)),
    "day": value_codec("day", pa.date32(), bounds=None),
}
EPSILONS = {"rating": 1.0, "twin": 1.0, "town": 0.7, "income": 2.0, "age": 0.1, "day": 3.0}


def reference(batch, codecs):
    return {
        name: from_statistic(
            codec,
            (LevelCounts if isinstance(codec, LevelCodec) else RankSummary).of_batch(
                codec, batch[name]
            ),
        )  # type: ignore[arg-type]
        for name, codec in codecs.items()
    }


BATCH = table()


@cache
def fitted():
    return fit_dip(reference(BATCH, CODECS), CODECS, EPSILONS)


def randomised(batch, key=KEY, fragment="f", sizes=(), release=None):
    """Return a fragment's release, its rows handed over in chunks of the given sizes and then the rest."""
    release = release or fitted()
    rngs = release.streams(key, fragment)
    cuts = [0, *np.minimum(np.cumsum(sizes, dtype=int), len(batch)).tolist(), len(batch)]
    parts = [
        release.randomise(batch.slice(low, high - low), CODECS, rngs)
        for low, high in pairwise(cuts)
    ]
    return pa.Table.from_batches(parts).combine_chunks()


def test_the_epsilon_of_a_row_is_the_exact_sum_of_its_columns_rounded_up():
    parts = [mechanism.epsilon for mechanism in fitted().columns.values()]
    exact = sum(map(Fraction, parts))
    assert exact <= Fraction(fitted().epsilon) <= exact * (1 + Fraction(1, 2**52))
    assert all(mechanism.epsilon <= EPSILONS[name] for name, mechanism in fitted().columns.items())
    one = reference(BATCH, {"rating": CODECS["rating"]})["rating"]
    names = [f"c{i}" for i in range(10)]
    shared = fit_dip(
        dict.fromkeys(names, one), dict.fromkeys(names, CODECS["rating"]), dict.fromkeys(names, 0.1)
    )
    assert shared.epsilon <= 10 * Fraction(0.1)  # equal parts never sum above it


def test_released_columns_have_the_declared_type_and_domain_and_kept_ones_are_untouched():
    out = randomised(BATCH)
    assert out.column_names == BATCH.schema.names
    for name in ("id", "note"):
        assert out[name].combine_chunks().equals(BATCH[name])
    assert [out[name].type for name in CODECS] == [
        pa.float64(),
        pa.float64(),
        pa.string(),
        pa.float64(),
        pa.int16(),
        pa.date32(),
    ]
    found = {name: set(out[name].to_pylist()) for name in CODECS}
    assert found["rating"] <= {0.5, 1.0, 4.0}
    assert found["town"] == {"a", "b", "c"}
    assert {None, 0.0} <= found["income"]
    for name in ("age", "day"):
        own = BATCH[name].to_pylist()
        assert min(own) <= min(found[name]) <= max(found[name]) <= max(own)


def test_values_that_the_reference_never_saw_are_randomised_like_their_neighbours():
    mechanism = fitted().columns["rating"]
    weights = mechanism.channel.weights  # type: ignore[union-attr]
    assert weights[2].tolist() == weights[1].tolist()
    assert exact_epsilon(weights) <= Decimal(mechanism.epsilon)
    unseen = BATCH.set_column(1, "rating", pa.array(np.full(N_ROWS, 2.0))).set_column(
        3, "town", pa.nulls(N_ROWS, pa.string())
    )
    out = randomised(unseen)
    assert set(out["rating"].to_pylist()) == {0.5, 1.0, 4.0}
    assert set(out["town"].to_pylist()) == {"a", "b", "c"}
