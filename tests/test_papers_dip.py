"""The scripts of pipelines/papers/dip: small versions of tables 4, 5 and 7 against the paper, and what the others are made of."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

from pipelines.movielens.recommender import Table as Ratings
from pipelines.papers.dip import summary, table2, table4, table5, table6, table7, table8, table9
from pipelines.papers.dip.common import ALL_PRIVATE, NAMES, Cell, Row, Table, lines, published

pytestmark = pytest.mark.more

DATA = Path(os.environ.get("DPDASK_DATA", Path(table8.__file__).parents[3] / "data"))
FAR = 4.5  # combined standard errors; some 60 comparisons, seeds fixed


def of(rows, *methods):
    return [row for row in rows if row.method in methods]


def test_small_table_4_agrees_with_the_paper_and_its_exm_is_resampling():
    rows = table4.table(100, epsilons=(2.0,)).rows
    assert all(
        abs(row.apart) < FAR
        for row in of(rows, "NP", "DIP", "OPM", "resampling")
        if row.setting != "Geom(0.2)" or row.method != "OPM"
    )
    assert all(abs(row.apart) < FAR for row in of(rows, "LRM") if row.setting != "Geom(0.2)")
    assert max(abs(row.apart) for row in of(rows, "EXM")) > 50
    dip, lrm = (of(rows, method) for method in ("DIP", "LRM"))
    assert all(noisy.ours.mean > 1.4 * row.ours.mean for row, noisy in zip(dip, lrm, strict=True))
    assert all(abs(row.optimal.mean / row.ours.mean - 1) < 0.35 for row in dip)
    assert all(
        row.ours.mean * 0.7 < row.private.mean < noisy.ours.mean
        for row, noisy in zip(dip, lrm, strict=True)
    )


def test_small_table_5_agrees_with_the_paper():
    rows = table5.table(60, epsilons=(2.0,)).rows
    assert len(rows) == 16
    assert all(abs(row.apart) < FAR for row in rows)
    assert all(
        abs(row.optimal.mean - row.paper.mean) < 6 * row.optimal.error for row in of(rows, "DIP")
    )
    assert all(25 < row.private.mean < 60 for row in of(rows, "DIP"))


def test_the_simulated_salaries_have_the_published_numbers():
    law, salaries = table7.law(), table7.population()
    assert (law.mean(), law.std(), law.ppf(0.9)) == pytest.approx(
        (table7.MEAN, table7.DEVIATION, table7.NINTH_DECILE), rel=1e-8
    )
    assert len(salaries) == table7.SIZE
    assert salaries.mean() == pytest.approx(table7.MEAN, rel=1e-3)
    assert salaries.std() == pytest.approx(table7.DEVIATION, rel=5e-3)
    assert np.quantile(salaries, 0.9) == pytest.approx(table7.NINTH_DECILE, rel=1e-4)


def test_small_table_7_has_the_paper_s_order_and_dip_the_hold_out_s_error():
    salaries, replicates = table7.population(20_000), 20
    rows = {
        row.method: row
        for row in table7.rows_of(salaries, 1.0, replicates, seed=2, fractions=(0.25,))
    }
    dip = rows["DIP, 25 % held out"]
    variation = float(salaries.std() / salaries.mean())
    independent = (
        100 * math.sqrt(2 / math.pi) * variation * math.sqrt(0.75 / 5_000 + 1 / 15_000)
    )  # if nothing of a row were left
    assert 0.5 * independent < dip.ours.mean < 1.3 * independent
    assert 0.5 * independent < dip.optimal.mean < 1.3 * independent
    assert dip.ours.mean < rows["OPM"].ours.mean < rows["LRM"].ours.mean
    assert rows["DIP, none held out"].private.mean < rows["LRM"].ours.mean


def test_one_replicate_of_tables_2_and_6_keeps_the_order_of_methods():
    found = table2.one_replicate(200, 6, 1.0, 1, 0)
    assert found["NP"] < found[NAMES[0.25]] < found["LRM"] < found["OPM"]
    found = table6.one_replicate("Chain", 5, 1.0, 1, 0, cross_validate=False)
    assert found["NP"] < found[NAMES[0.35]] < found["NLRM"] < found["NOPM"]


def test_table_8_on_the_bank_s_rows():
    file = DATA / "bank_additional_full.parquet"
    if not file.exists():
        pytest.skip(f"{file} is not there: fetch it, or name its folder in DPDASK_DATA")
    table = table8.read(file)
    assert table.shape == (30_488, 10)
    assert table[:, -1].mean() == pytest.approx(0.1266, abs=1e-3)
    truth = table8.probabilities(table, table8.regressed(table))
    found = table8.one_replicate(table, truth, 1.0, 1, 0)
    # the paper's, and the bound, is ten times that
    assert max(found[name] for name in NAMES.values()) < 0.6
    assert 3 < found[table8.UNMATCHED[NAMES[0.25]]] < 7
    assert found[NAMES[0.25]] < found[f"private {ALL_PRIVATE}"] < found["NLRM"]


def test_the_factors_of_table_9_find_a_product():
    rng = np.random.default_rng(8)
    users, movies = (
        part.ravel() for part in np.meshgrid(np.arange(60), np.arange(40), indexing="ij")
    )
    truth = (2 + rng.random(60)[users]) * (1 + 0.5 * rng.random(40)[movies])
    seen = Ratings(users=users, movies=movies, ratings=truth, shape=(60, 40))
    assert table9.libmf_rmse(seen, seen, 1) < 0.5 * truth.std()
    noise = seen.rated(rng.permutation(truth))
    assert table9.libmf_rmse(noise, seen, 1) > 0.9 * truth.std()


def test_cells_have_standard_errors_and_infinite_means_are_said():
    cell = Cell.of([1.0, 2.0, 3.0, 4.0])
    assert (cell.mean, cell.error) == (2.5, pytest.approx(np.std([1, 2, 3, 4], ddof=1) / 2))
    assert str(cell) == "2.50 ± 0.65"
    assert str(Cell.of([2.0])) == "2"
    assert str(Cell(math.inf, math.nan, 3)) == "∞"
    assert published(1.0, 0.0).error == pytest.approx(0.01 / math.sqrt(12))
    row = Row(
        setting="s", method="DIP", epsilon=1.0, paper=Cell(1.0, 1.0, 100), ours=Cell(1.5, 1.0, 100)
    )
    assert row.apart == pytest.approx(0.5 / math.hypot(0.1, 0.1))
    assert Row(setting="s", method="DIP", epsilon=1.0, ours=cell).apart is None


def test_a_line_has_a_method_s_cells_and_the_paper_s_of_the_method_it_varies():
    cell = Cell(1.5, 1.0, 4)
    cells = dict.fromkeys(("NP", "NP, again", "optimal DIP", "private DIP", "resampling"), cell)
    methods = ("NP", "NP, again", "LRM", "DIP", "resampling")
    plain, again, dip, resampling = lines("Table 4", "Ber(0.1)", 2.0, methods, cells, 50)
    assert plain.paper == again.paper == published(7.47, 5.76, 50)
    assert (dip.ours, dip.optimal, dip.private, dip.paper.mean) == (None, cell, cell, 7.99)
    assert resampling.paper.mean == 10.43  # of the paper's EXM
    assert [row.paper for row in lines("Table 4", "another", None, methods, cells)] == [None] * 4


def small():
    rows = [
        Row(setting="s", method="NP", epsilon=None, ours=Cell(1.0, 0.1, 4)),
        Row(
            setting="s",
            method="DIP",
            epsilon=1.0,
            paper=Cell(1.0, 0.1, 100),
            ours=Cell(1.2, 0.1, 100),
            private=Cell(2.0, 1.0, 4),
        ),
    ]
    return Table(name="Table 0", title="a trial", unit="nothing", rows=rows, notes=["a note"])


def test_tables_survive_json_and_name_far_cells():
    table = small()
    assert Table.from_json(table.to_json()) == table
    assert [row.method for row in table.judged()] == ["DIP"]
    assert not table.judged()[0].is_near
    assert table.verdict().startswith(
        "1 cells of NP and DIP: 0 within 3 combined standard errors, 0 so or within 10 %, 0"
    )
    printed = table.markdown()
    assert "| s | DIP | 1 | 1.000 ± 0.010 | 1.200 ± 0.010 |  | 2.00 ± 0.50 | +14.1 |" in printed


def test_the_summary_is_made_of_kept_tables(tmp_path):
    (tmp_path / "table4.json").write_text(small().to_json(), encoding="utf-8")
    page = tmp_path / "page.md"
    summary.main(["--results", str(tmp_path), "--only", "table4", "table8", "--page", str(page)])
    text = page.read_text(encoding="utf-8")
    assert "### Table 0: a trial" in text
    assert "| [Table 0](#table-0-a-trial) | a trial | 1 | 0 | 0 | 0 |" in text
    assert "Left out, for want of its data: table8." in text
