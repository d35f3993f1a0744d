"""What a release card says about a tree."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from dpdask.codec import LevelCodec
from dpdask.mechanisms.card import make_card
from dpdask.mechanisms.dip.spec import DipSpec
from dpdask.mechanisms.dip.tree import TreeRelease
from dpdask.mechanisms.mechanism import Columns
from dpdask.mechanisms.registry import bind
from dpdask.privacy import Budget
from dpdask.privacy.accountant import epsilon
from dpdask.privacy.events import from_dict
from dpdask.references.histogram import Tree
from dpdask.schema import Schema
from dpdask.stats import Domain, MarginalCounts
from dpdask.streams import RunKey, stream


def test_a_card_says_the_edges_the_parts_and_what_everything_cost() -> None:
    first = np.random.default_rng(1).integers(0, 4, size=5_000)
    counts = MarginalCounts.of_codes(
        Domain(names=("a", "b"), sizes=(4, 2)), np.stack([first, first // 2]).astype(np.uint8)
    )
    sizes = {"a": 4, "b": 2}
    schema = Schema.from_dict(
        {
            "columns": {
                name: {"role": "privatise", "kind": "discrete", "levels": list(range(size))}
                for name, size in sizes.items()
            }
        }
    )
    codecs = {
        name: LevelCodec(name=name, levels=pa.array(range(size)), ordered=True)
        for name, size in sizes.items()
    }
    types = pa.schema(dict.fromkeys(sizes, pa.int64()))
    table = Columns(types=types, codecs=codecs)
    bound = bind(DipSpec(reference=Tree(share=0.25)), schema, Budget(epsilon=2.0, delta=1e-7))
    release = bound.fit(
        bound.draw(counts, table, lambda name: stream(RunKey.insecure(1), name, "")),
        table,
        RunKey.insecure(1),
    )
    assert isinstance(release, TreeRelease)
    card = make_card(
        bound.section(release, table, n_rows=5_000, n_released=None, order="keep"),
        name="test",
        insecure=True,
    ).to_dict()
    mechanism, columns, spent = (card[part] for part in ("mechanism", "columns", "accounting"))
    assert mechanism["columns"] == "tree"
    assert mechanism["joint"].startswith("pairs on the tree, and only these")
    assert mechanism["edges"] == [["a", "b"]]
    assert columns["b"]["parent"] == "a"
    assert [columns[name]["cells"] for name in "ab"] == [4, 2]
    assert np.shape(columns["b"]["channels"]) == (4, 2, 2)
    np.testing.assert_allclose(np.sum(columns["b"]["channels"], axis=2), 1.0, rtol=1e-12)
    np.testing.assert_array_equal(
        np.array(columns["a"]["channels"]), release.columns["a"].weights * 2.0**-63
    )
    assert "cell_edges" not in columns["a"]
    assert all(0 < each["epsilon_exact"] <= each["epsilon"] <= 0.75 for each in columns.values())
    assert 0 < spent["epsilon_row_exact"] <= 1.5
    assert spent["epsilon_exact"] <= epsilon(from_dict(spent["events"]), 1e-7) <= 2.0
