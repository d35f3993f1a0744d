"""The sections of a release card that speak of a tree."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa

from dpdask.cells import cells
from dpdask.codec import LevelCodec
from dpdask.mechanisms.dip.tree_card import tree_accounting, tree_columns, tree_mechanism
from dpdask.mechanisms.dip.tree_fit import fit_tree
from dpdask.mechanisms.dip.tree_spending import spend_tree
from dpdask.mechanisms.dip.tree_tables import measure_tree
from dpdask.privacy import Budget
from dpdask.privacy.accountant import epsilon
from dpdask.privacy.events import from_dict
from dpdask.references.tree import Tree
from dpdask.stats import Domain, Marginals
from dpdask.streams import RunKey, stream


def test_a_card_says_the_edges_the_parts_and_what_everything_cost() -> None:
    first = np.random.default_rng(1).integers(0, 4, size=5_000)
    counts = Marginals.of_codes(Domain(names=("a", "b"), sizes=(4, 2)), np.stack([first, first // 2]).astype(np.uint8))
    budget, tree = Budget(epsilon=2.0, delta=1e-7), Tree(share=0.25)
    spending = spend_tree(budget, tree, ("a", "b"))
    cut = {name: cells(LevelCodec(name=name, levels=pa.array(range(size)), ordered=True), 1) for name, size in (("a", 4), ("b", 2))}
    release = fit_tree(measure_tree(counts, spending.noise, rng=stream(RunKey.insecure(1), "test", "")), cut, spending.row)
    mechanism, columns, spent = (
        json.loads(json.dumps(part))
        for part in (tree_mechanism(release), tree_columns(release, spending.row), tree_accounting(budget, spending, release))
    )
    assert mechanism["columns"] == "tree"
    assert mechanism["joint"].startswith("pairs on the tree, and only these")
    assert mechanism["edges"] == [["a", "b"]]
    assert columns["b"]["parent"] == "a"
    assert [columns[name]["cells"] for name in "ab"] == [4, 2]
    assert np.shape(columns["b"]["channels"]) == (4, 2, 2)
    np.testing.assert_allclose(np.sum(columns["b"]["channels"], axis=2), 1.0, rtol=1e-12)
    np.testing.assert_array_equal(np.array(columns["a"]["channels"]), release.columns["a"].weights * 2.0**-63)
    assert "cell_edges" not in columns["a"]
    assert all(0 < each["epsilon_exact"] <= each["epsilon"] <= 0.75 for each in columns.values())
    assert 0 < spent["epsilon_row_exact"] <= 1.5
    assert spent["epsilon_exact"] <= epsilon(from_dict(spent["events"]), 1e-7) <= 2.0
