"""The page of a release: what it says, that nothing in it runs or loads, and that it never fails a release."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from html import unescape
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from page.pages import EVIL, LEVEL, SCHEMA, Page, parts, release, synthetic

from dpdask.html import read_style
from dpdask.io.shards import CROISSANT_NAME, PAGE_NAME, ROW_GROUP_ROWS, Shard
from dpdask.mechanisms.card import Card, ColumnPart, LedgerPosition
from dpdask.page import make_croissant, make_page, render
from dpdask.page import pictures as sample
from dpdask.page.pictures import ChannelView, Sample, associate, count_histogram, describe_kept
from dpdask.privacy.budget import bound_belief, write_above


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return release(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return synthetic(tmp_path_factory.mktemp("records"))


def read_page(output):
    return Page.read((output / PAGE_NAME).read_bytes())


# ---- what it says


def test_a_page_of_rows_says_what_was_promised(rows):
    text = read_page(rows).text
    card, manifest, _ = parts(rows)
    assert card.guarantee.text in text
    for told in (
        "ε = 4",
        "replace-one",
        "the values of all rows",
        "CC-BY-4.0",
        "privacy@example.org",
        "By us.",
        "Insecure.",
    ):
        assert told in text
    assert "Published unchanged: group; the number of rows, and the presence of each row" in text
    assert "Releases of these data that a ledger counts: unknown, the card names none" in text
    assert "Differential privacy, pure (δ = 0)" in text
    assert "Contact: privacy@example.org" in text
    assert "Dropped, so no value of them is released: name." in text
    assert "kept as it is: not protected" in text
    assert manifest.card_sha256 in text
    assert all(shard.sha256 in text for shard in manifest.shards)
    assert "From all 600 released rows" in text
    assert "2020-01-01 to 2022-01-08" in text  # bounds of dates
    assert "shares and quantiles can be read off" in text
    assert "Means and outer quantiles, if bounds are far beyond most values (income, day)" in text
    assert "Noisy counts of income, for the reference ε =" in text
    assert (
        "What one released value says about its original, beside what the noisy counts of all rows say."
        in text
    )
    assert "Kept columns are copied, row by row." in text
    assert "columns that depend on each other in the table may show 0.00 here" in text
    assert "Shares of what is released; their margins are not known." in text
    assert "Page and card may be published" in text
    assert "0 to 1,000, or missing moved to the nearest bound" in text
    assert "vectors of counts" in text


def test_a_page_of_records_says_what_they_are_not_good_for(records):
    text = read_page(records).text
    assert "no record is a person's" in text
    assert "no table of three columns was measured" in text
    assert "With δ above 0" in text
    assert "Published unchanged: the number of rows." in text
    assert "Differential privacy, approximate: δ = 1e-6, about 1 in 1,000,000" in text
    assert "Noise of a count, of a cell of two columns standard deviation" in text
    assert "Weak correlations: " in text.partition("Not good for")[2]


def test_a_page_of_ranges_has_no_epsilon_and_counts_narrow_ranges(tmp_path):
    even = {"name": "uniform", "loc": 0, "scale": 1000}
    design = {"design": "case1", "anchors": even, "reference": even, "nulls": "public"}
    columns = {name: {"role": "drop"} for name in (EVIL, "day", "group", "name")}
    columns["income"] = {**SCHEMA["income"], "outside": "refuse"}
    ranges = {"kind": "interval", "coverage": True, "columns": {"income": design}}
    output = release(tmp_path, schema=columns, privacy=None, mechanism=ranges)
    text = read_page(output).text
    assert "There is no ε, so there is no bound" in text
    assert "No histogram is shown" in text
    share = (pd.read_parquet(output)["income_coverage"].dropna() < 0.1).mean()
    assert f"income: {100 * share:.1f} % of the released ranges hold less than a tenth" in text


def test_a_page_of_tables_shows_their_counts(tmp_path):
    columns = {
        name: {"role": "drop"} if name in ("group", "day", "income") else column
        for name, column in SCHEMA.items()
    }
    text = read_page(
        release(tmp_path, schema=columns, mechanism={"kind": "marginals", "cliques": [[EVIL]]})
    ).text
    assert "The counts of these tables" in text
    assert "Margins hold the noise of each count" in text


def attack(epsilon, level):
    """Return the power of the best test of a row's value on counts with Laplace noise, of two cells, and the most that the odds grow: exact."""
    noise = np.exp(-epsilon * np.abs(np.arange(-60, 61)))
    noise /= noise.sum()
    there, moved = (
        np.pad(noise, (0, 1)),
        np.pad(noise, (1, 0)),
    )  # a cell without the row, and with it
    one, other = np.outer(moved, there).ravel(), np.outer(there, moved).ravel()
    inside = (one > 0) & (other > 0)
    order = np.argsort(-other / np.where(one > 0, one, 1.0))
    alarms, found = np.cumsum(one[order]), np.cumsum(other[order])
    return float(np.interp(level, alarms, found)), float((other[inside] / one[inside]).max())


def test_no_attack_on_tables_is_better_than_their_page_says(tmp_path):
    """Under add-remove other values are two steps: ε alone would be less than the best attack reaches."""
    others = {name: {"role": "drop"} for name in ("income", "day", "group", "name")}
    asked = {
        "mechanism": {"kind": "marginals", "cliques": [[EVIL]]},
        "privacy": {"epsilon": 1.0, "delta": 0, "adjacency": "add-remove"},
    }
    output = release(tmp_path, schema={EVIL: SCHEMA[EVIL]} | others, **asked)
    card, text = parts(output)[0], read_page(output).text
    [event] = (card.accounting.events or {})["events"]
    assert (event["kind"], event["scale"], event["count"]) == ("discrete-laplace", 1.0, 1)
    told = re.search(
        r"Detected: it is there Detected: one value rather than another 1 % \S+ % \S+ % 5 % (\S+) % (\S+) %",
        text,
    )
    odds = re.search(
        r"unit is there by at most e ε = ([\d.]+)\. .* values by at most e 2ε = ([\d.]+):", text
    )
    assert told is not None
    assert odds is not None
    power, factor = attack(1.0, 0.05)
    assert float(told[1]) < 100 * power <= float(told[2]) <= 100 * power + 0.1
    assert "Published unchanged: nothing." in text
    assert "a person with k rows is protected by k·ε only, and its values by 2k·ε" in text
    assert float(odds[1]) < factor <= float(odds[2])
    assert (
        f"one who tests whether it had one value rather than another (counted twice: 2ε) with probability at most {told[2]} %;"
        in card.guarantee.text
    )


@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_values_under_add_remove_are_told_at_twice_the_loss(delta):
    losses = render.list_losses(1.0, delta, "add-remove")
    assert losses == {
        "it is there": (1.0, delta),
        "one value rather than another": (2.0, (1.0 + math.e) * delta),
    }
    assert render.list_losses(1.0, delta, "replace-one") == {
        "one value rather than another": (1.0, delta)
    }
    heads, beliefs = render.describe_beliefs(losses, persons=True)
    assert heads[2:] == [
        "it is there, for a person with 5 protected rows",
        "one value rather than another, for a person with 5 protected rows",
    ]
    assert beliefs[2] == ("50 %", "73.2 %", "88.1 %", "99.4 %", "100.0 %")
    assert render.describe_tests(losses)[1] == (
        ("5 %", "13.6 %", "37.0 %") if delta == 0 else ("5 %", "13.7 %", "37.4 %")
    )


@pytest.mark.parametrize("kind", ["rows", "records"])
def test_its_python_runs(kind, request):
    output = request.getfixturevalue(kind)
    snippet = render.write_snippet(parts(output)[0]).replace(
        "path/or/url/of/the/folder", str(output)
    )
    assert snippet.count("release.") == 4
    assert "mean(" not in snippet  # under noisy counts
    exec(snippet, {})


def test_means_are_recommended_only_without_noise_in_counts(rows):
    card = parts(rows)[0]
    held_out = card.model_copy(
        update={
            "mechanism": card.mechanism.model_copy(
                update={"reference": {"kind": "holdout", "fraction": 0.1}}
            )
        }
    )
    assert "shares, means and quantiles" in render.list_uses(held_out)[0][0]
    assert 'release.mean("income")' in render.write_snippet(held_out)


# ---- nothing runs, nothing is loaded


@pytest.mark.parametrize("kind", ["rows", "records"])
def test_nothing_in_a_page_runs_or_loads(kind, request):
    data, faults = make_page(*parts(request.getfixturevalue(kind)))
    assert faults == ()
    page = Page.read(data)
    assert {tag for tag, _ in page.tags} & {
        "script",
        "iframe",
        "object",
        "link",
        "base",
        "form",
        "svg",
    } == set()
    assert [key for _, attributes in page.tags for key in attributes if key.startswith("on")] == []
    addresses = [
        value or ""
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("src", "href")
    ]
    assert all(address.startswith(("#", "data:image/svg+xml;base64,")) for address in addresses)
    assert all(image["alt"] for image in page.all("img"))
    assert "url(" not in page.text
    assert EVIL in page.text
    assert LEVEL in page.text
    assert make_page(*parts(request.getfixturevalue(kind)))[0] == data


def test_a_page_is_read_by_those_who_listen(rows):
    page = read_page(rows)
    assert page.all("html")[0]["lang"] == "en"
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(
        after <= before + 1 for before, after in zip(page.headings, page.headings[1:], strict=False)
    )
    named = [table for table in page.all("table") if table.get("aria-label")]
    assert len(page.all("caption")) + len(named) == len(page.all("table")) > 3
    assert all(each["aria-label"] for _, each in page.tags if each.get("role") == "img")
    assert all(cell.get("scope") for cell in page.all("th"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def luminance(colour):
    parts_ = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts_
    ]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_colours_can_be_told_apart():
    """Contrast as WCAG 2 defines it, at least 4.5 for texts, in light, in dark and on paper."""
    style = read_style("dpdask.page", "release.css")
    themes = [
        dict(re.findall(r"--([\w-]+): (#\w{6})", found))
        for found in re.findall(r":root \{(.*?)\}", style)
    ]
    assert len(themes) == 3
    pairs = [
        *((ink, paper) for ink in ("ink", "quiet", "accent") for paper in ("paper", "tint")),
        ("warn", "on-warn"),
    ]
    for theme in themes:
        for ink, paper in pairs:
            high, low = sorted((luminance(theme[ink]), luminance(theme[paper])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, paper, theme)


# ---- it stays small, and never fails a release


def test_a_page_shows_the_first_columns_and_shards(rows):
    card, manifest, folder = parts(rows)
    many = {f"c{number}": ColumnPart(role="privatised", kind="discrete") for number in range(70)}
    shards = tuple(
        Shard(name=f"part-{number:05d}.parquet", n_rows=1, n_bytes=1, sha256="0" * 64)
        for number in range(700)
    )
    data, _ = make_page(
        card.model_copy(update={"columns": many}),
        type(manifest)(job="", shards=shards, card_sha256=""),
        folder,
    )
    text = Page.read(data).text
    assert "20 more are on the card" in text
    assert "650 more shards are in the manifest" in text
    assert len(data) < 100_000


def test_a_bounded_part_of_the_rows_is_read(rows, monkeypatch):
    card, manifest, folder = parts(rows)
    monkeypatch.setattr(sample, "MAX_ROWS", 40)
    found = sample.read_sample(folder, manifest, ["income", "nowhere"], card)
    assert (found.rows.column_names, found.rows.num_rows, found.n_rows) == (["income"], 40, 600)
    asked = []
    monkeypatch.setattr(
        sample,
        "_read_groups",
        lambda _f, shard, groups, _c, most: asked.append((shard.name, groups)) or iter(()),
    )
    shards = tuple(
        Shard(name=f"{number}", n_rows=3 * ROW_GROUP_ROWS, n_bytes=1, sha256="")
        for number in range(100)
    )
    made = type(manifest)(job="", shards=shards, card_sha256="")
    sample.read_sample(folder, made, ["income"], card)
    assert sum(len(groups) for _, groups in asked) == sample.MAX_PARTS
    assert (asked[0], asked[-1][0]) == (("0", [0]), "96")
    del card


def test_a_page_that_cannot_be_drawn_does_not_fail_its_release(tmp_path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("a value of the table")

    monkeypatch.setattr(render, "read_sample", fail)
    text = read_page(release(tmp_path)).text
    assert "No statistics could be made" in text
    data, faults = make_page(*parts(tmp_path / "out"))
    assert faults == ("the page of the release was written without statistics (ZeroDivisionError)",)
    assert b"a value of the table" not in data
    monkeypatch.setattr(render, "list_uses", fail)
    bare, faults = make_page(*parts(tmp_path / "out"))
    assert faults == ("the page of the release holds its promise alone (ZeroDivisionError)",)
    assert parts(tmp_path / "out")[0].guarantee.text in Page.read(bare).text


# ---- its numbers


def any_card(**extra):
    part = {"who": "x", "fraction": 1.0, "of": "rows"}
    guarantee = {
        "text": "",
        "epsilon": 1.0,
        "delta": 0,
        "adjacency": "replace-one",
        "unit": "row",
        "protected": part,
        "unprotected": part,
    }
    content = {
        "format": 2,
        "name": "x",
        "guarantee": {**guarantee, "cautions": []},
        "mechanism": {"kind": "dip"},
        "columns": {},
        "accounting": {"composition": "", "epsilon_exact": 1.0},
        "order": "",
        "insecure": False,
        "versions": {"dpdask": "0"},
    }
    return Card.model_validate(content | extra)


def count(part, rows, card):
    return count_histogram("x", rows, card.model_copy(update={"columns": {"x": part}}))


def taken(**columns):
    rows = pa.table(columns)
    return Sample(rows=rows, n_rows=rows.num_rows)


@pytest.mark.parametrize(
    ("values", "part", "expected"),
    [
        (
            [1, 2, 2, None],
            {"levels": [1, 2, 3]},
            [("1", 0.25), ("2", 0.5), ("3", 0.0), ("missing", 0.25)],
        ),
        ([1.0, 2.0, 2.0, 2.0], {"levels": [1, 2]}, [("1.0", 0.25), ("2.0", 0.75)]),
        ([True, False, True, True], {"levels": [False, True]}, [("False", 0.25), ("True", 0.75)]),
    ],
)
def test_shares_are_those_of_the_rows(values, part, expected):
    found = count(ColumnPart(role="privatised", **part), taken(x=values), any_card())
    assert found is not None
    assert [(bar.label, bar.share) for bar in found.bars] == expected
    assert found.cells == ()


DATES = pa.array([18262, 18300, 18300, 18350], pa.int32()).cast(pa.date32())


@pytest.mark.parametrize(
    ("values", "part", "cells", "bars"),
    [
        ([7, 7, 7, 8], {"bounds": [0, 100]}, {"7": 0.75, "8": 0.25}, {}),
        ([0.5, 0.5], {"bounds": [0, 1]}, {"0.5": 1.0}, {}),
        (
            pa.array([-(2**55), 0]).cast(pa.timestamp("us")),
            {},
            {"0800 to 0849": 0.5, "1950 to 1999": 0.5},
            {},
        ),
        ([0, 5, 99], {}, {"0 to 4": 1 / 3, "5 to 9": 1 / 3, "95 to 99": 1 / 3}, {}),
        (
            [0.0, 0.0, 0.3, None],
            {"atoms": [0.0]},
            {"0.3": 0.25},
            {"0": 0.5, "missing": 0.25},
        ),
        (
            [0.0, 0.4, 99999.99999999999],
            {"edges": [-5e-324, 1e5]},
            {"0 to 5,000": 2 / 3, "95,000 to 100,000": 1 / 3},
            {},
        ),
        (
            [*[0.05] * 500, *[1.0] * 500, 1e9],
            {},
            {"0.05 to 0.1": 500 / 1001, "0.95 to 1": 500 / 1001},
            {"outside 0.05 to 1": 1 / 1001},
        ),
        (DATES, {}, {"2019-12-30 to 2020-01-05": 0.25, "2020-02-03 to 2020-02-09": 0.5}, {}),
        (
            DATES.cast(pa.timestamp("us")),
            {},
            {"2019-12-30 to 2020-01-05": 0.25, "2020-03-23 to 2020-03-29": 0.25},
            {},
        ),
        (
            pa.array([0, 3600, 86399], pa.int32()).cast(pa.time32("s")),
            {},
            {"00:00:00 to 01:00:00": 1 / 3, "01:00:00 to 02:00:00": 1 / 3},
            {},
        ),
    ],
)
def test_densities_have_round_edges(values, part, cells, bars):
    found = count(ColumnPart(role="privatised", **part), taken(x=values), any_card())
    assert found is not None
    drawn = {cell.label: cell.share for cell in found.cells if cell.share}
    assert {label: drawn.get(label) for label in cells} == pytest.approx(cells)
    assert {bar.label: bar.share for bar in found.bars} == pytest.approx(bars)
    assert sum(drawn.values()) + sum(bars.values()) == pytest.approx(1.0)
    assert sum(cell.width for cell in found.cells) == pytest.approx(1.0)
    assert max(cell.height for cell in found.cells) == 1.0
    assert len(found.cells) <= sample.MAX_BARS
    assert len(found.ticks) <= 6
    assert all(0.0 <= place <= 1.0 for place, _ in found.ticks)


def test_cells_with_weights_are_drawn_as_declared():
    """Their points stand for cells, which contain their upper edge; a wide cell is lower than its share."""
    card = any_card(mechanism={"kind": "histogram", "output": "cells", "cells": 3})
    part = ColumnPart(role="privatised", edges=[-5e-324, 1.0, 3.0], bounds=[0, 3])
    found = count(part, taken(x=[0.5, 2.0], weight=[1.0, 1.0]), card)
    assert found is not None
    assert [cell.label for cell in found.cells] == ["0 to 1", "1 to 3"]
    assert [cell.height for cell in found.cells] == pytest.approx([1.0, 0.5])
    assert found.numbers == [("0 to 1", "50.00 %"), ("1 to 3", "50.00 %")]
    known = replace(found, cells=tuple(replace(cell, margin=0.1) for cell in found.cells))
    assert known.numbers[0] == ("0 to 1", "50.00 %", "± 10.00 %")
    whole = ColumnPart(role="privatised", edges=[-1, 1, 3])
    found = count(whole, taken(x=[0, 1, 3], weight=[1.0, 1.0, 2.0]), card)
    assert found is not None
    assert [(cell.label, cell.share) for cell in found.cells] == [("0 to 1", 0.5), ("2 to 3", 0.5)]


def test_rare_levels_are_joined():
    values = [f"l{number:02d}" for number in range(40) for _ in range(number)]
    part = ColumnPart(role="privatised", levels=sorted(set(values) | {"l00"}))
    found = count(part, taken(x=values), any_card())
    assert found is not None
    assert (len(found.bars), found.bars[0].label, found.bars[-1].label) == (
        24,
        "l17",
        "17 other levels",
    )
    assert sum(bar.share for bar in found.bars) == pytest.approx(1.0)


def test_margins_hold_the_noise_of_rows_and_counts():
    accounting = {
        "composition": "",
        "epsilon_exact": 1.0,
        "epsilon_reference": {"x": 0.1},
        "rows_per_unit": 1,
    }
    part = ColumnPart(role="privatised", epsilon=0.9, levels=[0, 1])
    card = any_card(
        accounting=accounting,
        columns={"x": part.model_dump(exclude_unset=True)},
        mechanism={"kind": "dip", "reference": {"kind": "histogram"}},
    )
    found = count(part, taken(x=[0, 1] * 5000), card)
    assert found is not None
    noise = np.sqrt(2.0) * 2.0 / 0.1 / 10_000
    assert found.bars[0].margin == pytest.approx(1.96 * np.sqrt(0.25 / 10_000 + noise**2))


def test_margins_hold_how_far_shared_values_are_spread():
    """As where a quarter of the rows lie at one value of a hold-out."""
    reference = {"spread_rank_at_most": 0.25}
    part = ColumnPart(role="privatised", epsilon=1.0, bounds=[0, 40], reference=reference)
    card = any_card(
        columns={"x": part.model_dump(exclude_unset=True)},
        mechanism={"kind": "dip", "reference": {"kind": "holdout", "fraction": 0.5}},
    )
    found = count(part, taken(x=np.linspace(0.5, 39.5, 10_000)), card)
    assert found is not None
    assert all(0.25 < cell.margin < 0.27 for cell in found.cells)
    guidance = render.find_guidance(card)
    assert "how far values that many rows share are spread" in guidance.margins(card)
    assert any("up to 25 % of the rows" in use for use in guidance.uses(card)[1])


def test_cells_count_by_their_weights():
    card = any_card(
        mechanism={"kind": "histogram", "output": "cells", "cells": 2},
        n_rows={"value": 4.0, "exact": True},
    )
    found = count(
        ColumnPart(role="privatised", levels=[0, 1]), taken(x=[0, 1], weight=[3.0, 1.0]), card
    )
    assert found is not None
    assert [bar.share for bar in found.bars] == [0.75, 0.25]


def test_associations_are_those_of_a_textbook():
    rng = np.random.default_rng(3)
    one, noise = rng.integers(0, 3, 4000), rng.integers(0, 3, 4000)
    other = np.where(rng.random(4000) < 0.5, one, noise)
    found = associate(
        ["a", "b", "c", "d"], taken(a=one, b=other, c=noise.astype(str), d=one * 2.5), any_card()
    )
    assert found is not None
    assert found.table[0, 1] == pytest.approx(0.5, abs=0.03)
    assert found.table[0, 2] < 0.05
    assert found.table[0, 3] == pytest.approx(1.0)
    assert found.list_strongest(1)[0][:2] == ("a", "d")
    assert associate(["a"], taken(a=one), any_card()) is None


def test_a_channel_tells_how_much_it_keeps():
    shares = np.array([0.2, 0.8])
    matrix = 0.5 * np.eye(2) + 0.5 * shares
    view = ChannelView(
        column="x",
        labels=("a", "b"),
        matrix=matrix,
        of_ranks=False,
        is_ordered=False,
        keeps_shares=True,
    )
    assert (
        view.quality
        == "x: a row keeps its value in 84.0 % of the cases; values drawn apart from it would agree in 68.0 %."
    )
    ranks = ChannelView(
        column="x",
        labels=("a", "b", "c"),
        matrix=0.25 * np.eye(3) + 0.75 / 3,
        of_ranks=True,
        is_ordered=True,
        keeps_shares=True,
    )
    assert ranks.quality.endswith("have a correlation of 0.25.")
    assert (view.kept, ranks.kept) == (pytest.approx(0.5), pytest.approx(0.25))
    # a channel that keeps no distribution tells nothing of how frequent the levels are
    even = replace(view, keeps_shares=False, matrix=np.array([[0.9, 0.1], [0.4, 0.6]]))
    assert even.quality == "x: a row keeps its value in at least 60.0 % of the cases."
    assert even.kept == pytest.approx(0.5)


def test_a_page_says_how_little_a_row_keeps(tmp_path):
    output = release(tmp_path, mechanism__channel="laplace", privacy__epsilon=0.5)
    text = read_page(output).text
    for name in ("income", "day"):
        assert re.search(
            rf"{name}: a row's released and original ranks have a correlation of 0.0\d\.", text
        )
    assert "A released row keeps almost nothing of" in text
    assert "income, day (less than 0.1 on a scale from 0 to 1)" in text
    card = parts(output)[0]
    sentences, little = describe_kept(card)
    assert len(sentences) == 3
    chained = card.model_copy(
        update={"mechanism": card.mechanism.model_copy(update={"reference": {"kind": "chain"}})}
    )
    assert len(describe_kept(chained)[0]) == 1
    assert {"income", "day"} <= set(little)


@pytest.mark.parametrize("n_earlier", [0, 1])
def test_a_page_tells_what_all_releases_give_away_together(rows, n_earlier):
    card, manifest, folder = parts(rows)
    limits = {"epsilon_limit": 8.0, "delta_limit": 1e-6, "delta": 0.0}
    ledger = LedgerPosition(
        dataset="people",
        entry="ab",
        epsilon=2.4999999999999996,
        n_earlier=n_earlier,
        earlier=[],
        **limits,
    )
    text = Page.read(
        make_page(card.model_copy(update={"ledger": ledger}), manifest, folder)[0]
    ).text
    assert (
        f"{'Together they are charged with' if n_earlier else 'This one is charged with'} ε = 2.5 at the ledger's δ = 1e-6; ε may be at most 8."
        in text
    )
    if n_earlier:
        assert (
            "Releases of these data that a ledger counts: this one and 1 earlier; together ε = 2.5 at the ledger's δ = 1e-6"
            in text
        )
        assert (
            "so a test of one value against another, at a false-alarm rate of 5 %, detects it with probability at most 61.0 %"
            in text
        )
    else:
        assert (
            "Releases of these data that a ledger counts: this one; its ledger counts none before it"
            in text
        )
        assert "These tables are for this release alone" not in text


def test_the_files_are_checked_by_the_commands_of_the_page(rows, tmp_path):
    page = (rows / PAGE_NAME).read_text(encoding="utf-8")
    [block] = re.findall(r"<code>(sha256sum .*?)</code>", page, re.DOTALL)
    copy = Path(shutil.copytree(rows, tmp_path / "copy"))
    check = partial(
        subprocess.run,
        ["/bin/sh", "-c", unescape(block)],
        cwd=copy,
        capture_output=True,
        check=False,
    )
    assert check().returncode == 0
    assert b"_dpdask/release.json: OK" in check().stdout
    next(copy.glob("part-*")).write_bytes(b"other")
    assert check().returncode == 1


# ---- metadata for catalogues


def test_croissant_metadata_have_what_the_format_asks(rows):
    content = json.loads((rows / CROISSANT_NAME).read_bytes())
    assert {
        "@context",
        "@type",
        "name",
        "description",
        "conformsTo",
        "license",
        "creator",
        "citeAs",
        "distribution",
        "recordSet",
    } <= set(content)
    assert content["conformsTo"] == "http://mlcommons.org/croissant/1.0"
    _, manifest, _ = parts(rows)
    shards = [each for each in content["distribution"] if each["@type"] == "cr:FileObject"]
    assert [each["sha256"] for each in shards] == [shard.sha256 for shard in manifest.shards]
    assert all((rows / "_dpdask" / each["contentUrl"]).is_file() for each in shards)
    fields = content["recordSet"][0]["field"]
    assert [(each["name"], each["dataType"]) for each in fields] == [
        (EVIL, "sc:Text"),
        ("income", "sc:Float"),
        ("day", "sc:Date"),
        ("group", "sc:Text"),
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a library of its own
def test_croissant_metadata_are_valid(rows):
    import mlcroissant  # it warns of itself

    assert not mlcroissant.Dataset(jsonld=rows / CROISSANT_NAME).metadata.ctx.issues.errors


def test_metadata_without_readable_shards_have_no_columns(rows, tmp_path):
    card, manifest, folder = parts(rows)
    data, faults = make_croissant(card, manifest, type(folder)(f"file://{tmp_path}"))
    assert "recordSet" not in json.loads(data)
    assert len(faults) == 1


def test_beliefs_are_bounded_and_rounded_up():
    assert bound_belief(0.5, float(np.log(3.0))) == "75.0 %"
    assert bound_belief(0.01, 0.0) == "1.0 %"
    assert bound_belief(0.9, 100.0) == "100.0 %"
    assert [render.describe_odds(epsilon) for epsilon in (1.0, 2.0, 8.0)] == [
        "2.719",
        "7.39",
        "2.99e+3",
    ]
    assert write_above(0.44999999999999996) == "0.45"
    assert write_above(1 / 3) == "0.333334"
    assert write_above(2.0) == "2"
    assert write_above(9.313225746154785e-10, 3) == "9.32e-10"
