"""`dpdask.Survey`: questions drawn before any value, answers checked, ranges that are the mechanism's own."""

from __future__ import annotations

import base64
import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mechanisms.containing import held_by
from scipy import stats

import dpdask
from dpdask.inference import IntervalRegressor
from dpdask.inference.range_estimates import npmle
from dpdask.kernels import ranges as kernel
from dpdask.kernels.ranges import LEVELS
from dpdask.mechanisms.interval.fit import range_randomiser
from dpdask.mechanisms.interval.ranges import Partition, Ranges
from dpdask.stats.ranges import RangeCounts, grid_of_ranges
from dpdask.streams import RunKey, stream, words
from dpdask.survey import Survey, Wording
from pipelines.survey import make_form

INCOME = {"name": "lognorm", "s": 0.6, "scale": 40_000}
UNIFORM = {"name": "uniform", "loc": 0, "scale": 150_000}
WORDING = {"income": {"of": "your yearly income before tax", "unit": "euro"}}
BEFOREHAND: dict[str, dict[str, Any]] = {
    "case1": {"design": "case1", "anchors": UNIFORM},
    "case2": {"design": "case2", "anchors": INCOME},
    "ring": {"design": "ring", "anchors": UNIFORM},
    "canonical": {"design": "canonical", "n_anchors": 4, "anchors": UNIFORM},
    "exact ranges": {
        "design": "canonical",
        "n_anchors": 2,
        "anchors": UNIFORM,
        "exact_ranges": [1],
    },
    "acceptable": {
        "design": "canonical",
        "n_anchors": 2,
        "anchors": UNIFORM,
        "acceptable": [[10_000, 20_000], [50_000, 60_000]],
    },
    "coarse": {
        "design": "canonical",
        "n_anchors": 5,
        "anchors": {"name": "uniform", "loc": 0, "scale": 4},
        "exact_ranges": [2, 5],
    },
    "covering": {
        "design": "case2",
        "anchors": {"coverage": 0.5, "family": {"name": "logistic"}},
        "reference": INCOME,
    },
}
PROGRESSIVE = {
    "design": "progressive",
    "anchors": UNIFORM,
    "tau": 0.1,
    "reference": INCOME,
    "rounds": 3,
}


def schema(type_: str | None = "int64", **more: Any) -> dpdask.Schema:
    column = {
        "role": "privatise",
        "kind": "continuous",
        **({"type": type_} if type_ else {}),
        **more,
    }
    return dpdask.Schema.from_dict({"columns": {"income": column}})


def survey(
    design: dict[str, Any],
    *,
    seed: int | None = 3,
    wording: Any = WORDING,
    columns: dpdask.Schema | None = None,
    **more: Any,
) -> Survey:
    seed = None if design["design"] == "progressive" else seed
    return Survey(
        columns or schema(),
        columns={"income": design},
        wording=wording,
        **{"insecure_seed": seed, **more},
    )


def truthful(
    made: Survey, design: dict[str, Any], respondents: list[str], values: np.ndarray
) -> list[dict[str, Any]]:
    """What people would answer who read their questions' anchors and know their values."""
    accepted, told = design.get("acceptable", []), design.get("exact_ranges", [])
    answers = []
    for row, value in zip(made.questions(respondents).itertuples(), values.tolist(), strict=True):
        distinct = sorted(set(row.anchors))
        k = sum(anchor < value for anchor in distinct)
        special = next(
            (i for i, (low, high) in enumerate(accepted, start=1) if low < value <= high), None
        )
        ring = 1 if k == 1 or len(distinct) == 1 else 2
        choice = ring if design["design"] == "ring" else special or len(accepted) + 1 + k
        answer = {"survey": row.survey, "respondent": row.respondent, "income_choice": choice}
        if special or sum(anchor < value for anchor in row.anchors) + 1 in told:
            answer["income_value"] = value
        answers.append(answer)
    return answers


def people(n: int, seed: int = 1) -> tuple[list[str], np.ndarray]:
    values = np.floor(stats.lognorm(s=0.6, scale=40_000).rvs(n, random_state=seed))
    return [f"p{i}" for i in range(n)], values


@pytest.mark.parametrize("name", list(BEFOREHAND))
def test_answers_become_the_mechanism_s_own_ranges(name: str) -> None:
    design, made = BEFOREHAND[name], survey(BEFOREHAND[name])
    respondents, values = people(400)
    if name == "coarse":
        values = values % 5
    released = made.ingest(truthful(made, design, respondents, values))
    step = made._drawn.asked[0].step
    assert isinstance(step, Partition)
    drawn = [
        words(
            stream(RunKey.insecure(3), f"survey/{made.id}/income", respondent), step.words_per_row
        )
        for respondent in respondents
    ]
    lower, upper = step.ranges(values, np.array(drawn))
    assert released["respondent"].tolist() == respondents
    np.testing.assert_array_equal(released["income_lower"], lower)
    np.testing.assert_array_equal(released["income_upper"], upper)
    assert held_by(
        Ranges(lower=lower, upper=upper, is_null=np.zeros(400, dtype=bool)), values
    ).all()
    assert ((lower == upper).any()) == (name in ("exact ranges", "acceptable", "coarse"))


def test_anchors_have_the_mechanism_s_distribution() -> None:
    anchors = np.concatenate(
        survey({"design": "case1", "anchors": INCOME}).questions(4000)["anchors"].to_list()
    )
    distribution = stats.lognorm(s=0.6, scale=40_000)
    assert stats.kstest(anchors, distribution.cdf).pvalue > 1e-6
    assert (
        stats.kstest(anchors * 1.15, distribution.cdf).pvalue < 1e-6
    )  # the test would see a wrong one


def test_spaced_anchors_leave_every_range_its_coverage() -> None:
    design = {"design": "case2", "at_least": 0.2, "reference": INCOME}
    made = survey(design, columns=schema("float64"))
    anchors = np.array(made.questions(300)["anchors"].to_list())
    shares = np.diff(
        stats.lognorm(s=0.6, scale=40_000).cdf(
            np.column_stack([np.zeros(300), anchors, np.full(300, np.inf)])
        ),
        axis=1,
    )
    assert shares.min() >= 0.2


def test_the_same_key_gives_the_same_questions_whoever_else_is_asked() -> None:
    key = RunKey.fresh()
    first, again, other = (
        survey(BEFOREHAND["case2"], seed=None, key=each)
        for each in (key, RunKey(key.reveal()), None)
    )
    whole = first.questions(["a", "b", "c"])
    pd.testing.assert_frame_equal(whole, again.questions(["a", "b", "c"]))
    assert first.questions(["c"])["anchors"][0] == whole["anchors"][2]
    assert other.questions(["a", "b", "c"])["anchors"].tolist() != whole["anchors"].tolist()
    assert first.questions([7, 8])["respondent"].tolist() == ["7", "8"]
    narrower = survey({**BEFOREHAND["case2"], "anchors": UNIFORM}, seed=None, key=key)
    assert narrower.id != first.id


def test_answers_to_another_key_s_questions_are_refused() -> None:
    respondents, values = people(50)
    first, other, seeded = (
        survey(BEFOREHAND["case2"], seed=None),
        survey(BEFOREHAND["case2"], seed=None),
        survey(BEFOREHAND["case2"]),
    )
    answers = truthful(first, BEFOREHAND["case2"], respondents, values)
    assert len(first.ingest(answers)) == 50
    for wrong in (other, seeded):
        with pytest.raises(
            dpdask.DataError,
            match=r"answer 1: it answers another survey, or this one .* with another key",
        ):
            wrong.ingest(answers)
    assert survey(BEFOREHAND["case2"]).id == seeded.id
    assert survey(PROGRESSIVE).id == survey(PROGRESSIVE).id  # forms have no key


def test_questions_are_words() -> None:
    row = survey(BEFOREHAND["case1"]).questions(1).iloc[0]
    assert re.fullmatch(r"Is your yearly income before tax at most [\d,]+ euro\?", row["question"])
    assert row["choices"] == [
        row["question"][36 - 3 : -1],
        row["choices"][0].replace("at most", "more than"),
    ]
    row = survey(BEFOREHAND["acceptable"]).questions(1).iloc[0]
    assert (
        row["question"]
        == "Which of these is true of your yearly income before tax? Choose the first that is."
    )
    assert row["choices"][0] == "more than 10,000 euro and at most 20,000 euro: please give it"
    row = survey(BEFOREHAND["ring"]).questions(1).iloc[0]
    assert row["choices"][1] == "at most {:,.0f} euro, or more than {:,.0f} euro".format(
        *row["anchors"]
    )


def test_dates_are_asked_as_dates() -> None:
    design = {"design": "case1", "anchors": {"name": "uniform", "loc": 0, "scale": 10_000}}
    made = survey(
        design, columns=schema("date32"), wording={"income": {"of": "your date of birth"}}
    )
    row = made.questions(1).iloc[0]
    date = np.datetime64(int(row["anchors"][0]), "D")
    assert row["question"] == f"Is your date of birth on or before {date}?"
    assert row["choices"][1] == f"after {date}"
    with pytest.raises(dpdask.SpecError, match="no date of the years"):
        survey(
            {**design, "anchors": {"name": "uniform", "loc": 0, "scale": 1e7}},
            columns=schema("date32"),
        )
    with pytest.raises(dpdask.SpecError, match="numbers and dates"):
        survey(design, columns=schema("timestamp[us]"))


def test_what_is_shown_is_what_is_released() -> None:
    wording = {"income": Wording(of="your income", decimals=2)}
    made = survey(
        {"design": "case1", "anchors": UNIFORM}, columns=schema("float64"), wording=wording
    )
    table = made.questions(200)
    shown = [
        float(re.search(r"at most ([\d.,]+)\?", text)[1].replace(",", ""))
        for text in table["question"]
    ]  # type: ignore[index]
    assert [anchors[0] for anchors in table["anchors"]] == shown
    released = made.ingest(
        [{"survey": made.id, "respondent": i, "income_choice": 1} for i in table["respondent"]]
    )
    assert released["income_upper"].tolist() == shown
    assert any(number != round(number, 1) for number in shown)
    full = (
        survey({"design": "case1", "anchors": UNIFORM}, columns=schema("float64"))
        .questions(1)
        .iloc[0]
    )
    assert full["choices"][0] == f"at most {full['anchors'][0]:,} euro"


def test_a_release_is_taken_by_npmle_and_regression() -> None:
    pytest.importorskip("sklearn")
    respondents, values = people(3000)
    made = survey(BEFOREHAND["canonical"])
    released = made.ingest(truthful(made, BEFOREHAND["canonical"], respondents, values))
    lower, upper = (released[f"income_{end}"].to_numpy() for end in ("lower", "upper"))
    estimate = npmle(
        RangeCounts.of_batch(grid_of_ranges(lower, upper, 300), lower, upper),
        support=(0.0, 500_000.0),
    )
    for q in (0.25, 0.5, 0.75):  # the cdf, at true quantiles
        assert float(estimate.cdf(np.quantile(values, q))) == pytest.approx(q, abs=0.06)
    covariate = np.sqrt(values)[:, None]
    model = IntervalRegressor().fit(
        covariate, released[["income_lower", "income_upper"]].to_numpy()
    )
    assert np.corrcoef(model.predict(covariate), values)[0, 1] > 0.95


def test_unanswered_says_nothing_and_answers_come_from_anywhere(tmp_path: Path) -> None:
    made = survey(BEFOREHAND["exact ranges"])
    anchors = made.questions(["a", "b", "c"])["anchors"]
    value = anchors[1][0] - 1
    answers = [
        {"survey": made.id, "respondent": "a", "income_choice": 2},
        {"survey": made.id, "respondent": "b", "income_choice": 1, "income_value": value},
        {"survey": made.id, "respondent": "c"},
    ]
    expected = made.ingest(answers)
    assert expected["income_lower"].tolist() == [anchors[0][0], value, -np.inf]
    assert expected["income_upper"].tolist() == [anchors[0][1], value, np.inf]
    content = json.dumps(answers).encode()
    (tmp_path / "all.json").write_bytes(content)
    pd.DataFrame(answers).to_csv(tmp_path / "all.csv", index=False)
    for given_ in (
        pd.DataFrame(answers),
        content,
        tmp_path / "all.json",
        str(tmp_path / "all.csv"),
        [json.dumps(each).encode() for each in answers],
    ):
        pd.testing.assert_frame_equal(made.ingest(given_), expected)
    assert list(made.ingest([]).columns) == ["income_lower", "income_upper"]


SECRET = 31_337


def refused(made: Survey, match: str, *answers: Any) -> None:
    with pytest.raises(dpdask.DataError, match=match) as caught:
        made.ingest(list(answers))
    assert str(SECRET) not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_choices_that_nobody_had_are_refused() -> None:
    made = survey(BEFOREHAND["exact ranges"])
    head = {"survey": made.id, "respondent": "a"}
    for choice in (0, 4, SECRET, -1, 1.5, True, "1", [1], np.inf):
        refused(
            made,
            "answer 1, column 'income': its choice is not one",
            {**head, "income_choice": choice},
        )
    refused(made, "its choice is not one", {**head, "income_value": SECRET})
    refused(
        made, "a number where only its range", {**head, "income_choice": 2, "income_value": SECRET}
    )
    for value in (None, 10.0**7, SECRET + 0.5, "x", np.inf, True):
        refused(
            made,
            "its number is missing, or does not fit",
            {**head, "income_choice": 1, "income_value": value},
        )
    refused(made, "another survey", {**head, "survey": f"{SECRET}", "income_choice": 1})
    refused(made, "another survey", {"respondent": "a", "income_choice": 1})
    refused(made, "another version", {**head, "format": SECRET, "income_choice": 2})
    refused(made, "not asked", {**head, "income_choice": 2, f"name {SECRET}": 1})
    refused(made, "lacks 'respondent'", {"survey": made.id, "income_choice": 2})
    refused(made, "id is not a UTF-8 text", {**head, "respondent": [SECRET]})
    refused(made, "another survey", {**head, "survey": np.array([1, 2])})
    refused(made, "another version", {**head, "format": np.array([1, 2])})
    refused(
        made,
        "one respondent has two answers",
        {**head, "respondent": SECRET},
        {**head, "respondent": str(SECRET)},
    )
    refused(made, "file 1: this is not a file of survey answers", f"{SECRET}".encode())
    refused(made, "file 2: this is not a file of survey answers", {**head}, b"[" * 100_000)
    bounded = survey(BEFOREHAND["exact ranges"], columns=schema(bounds=[0, 200_000]))
    refused(
        bounded,
        "does not fit",
        {"survey": bounded.id, "respondent": "a", "income_choice": 1, "income_value": -1},
    )


def test_what_strangers_write_never_raises_anything_else() -> None:
    made, form = (
        survey(BEFOREHAND["exact ranges"]),
        survey(PROGRESSIVE, wording={"income": {"of": "x"}}, columns=schema("float64")),
    )
    head, good = (
        {"survey": made.id, "respondent": "a"},
        {"survey": made.id, "respondent": "b", "income_choice": 2},
    )
    for number in (10**400, np.float64(1e308), "1e999"):
        refused(
            made,
            "answer 2, column 'income': its choice is not one",
            good,
            {**head, "income_choice": number},
        )
        refused(
            made,
            "answer 2, column 'income': its number is missing",
            good,
            {**head, "income_choice": 1, "income_value": number},
        )
    refused(made, "its choice is not one", json.dumps({**head, "income_choice": 10**400}).encode())
    for lower, upper in ((10**400, "inf"), ("-inf", "1e999"), ("-inf", 10**400)):
        refused(form, "answer 1: .* is not a number", saved(form, lower, upper))
    for respondent in (
        f"{SECRET}\ud800",
        10**5000 + SECRET,
        -(10**300),
        f"{SECRET}" * 100,
        "",
        True,
        1.5,
    ):
        refused(
            made,
            "answer 2: its respondent's id is not a UTF-8 text",
            good,
            {**head, "respondent": respondent, "income_choice": 2},
        )
        refused(
            form,
            "answer 1: its respondent's id is not a UTF-8 text",
            saved(form, "-inf", "inf", respondent=respondent),
        )
    with pytest.raises(dpdask.DataError) as caught:
        made.ingest(
            json.dumps({**head, "respondent": f"{SECRET}\ud800", "income_choice": 2}).encode()
        )
    assert caught.value.__context__ is None  # it would hold the id
    assert made.ingest([{**head, "respondent": "ä" * 200, "income_choice": 2}])[
        "respondent"
    ].tolist() == ["ä" * 200]
    rough = survey(
        {**PROGRESSIVE, "anchors": INCOME},
        columns=schema("float64"),
        wording={"income": {"of": "x", "decimals": 9}},
    )
    refused(rough, "no anchor that could have been drawn", saved(rough, "-inf", 1e308))


@pytest.mark.parametrize(
    "text",
    [
        "4_0000",
        " 40000 ",
        "40000\n",
        "４００００",
        "٤٠٠٠٠",
        "0x9c40",
        "1e",
        ".",
        "",
        "infinity",
        "+inf",
        "-nan",
        "4,0",
        "1e999",
    ],
)
def test_numbers_are_plain(text: str, tmp_path: Path) -> None:
    made = survey(PROGRESSIVE)
    refused(made, "'income_upper' is not a number", saved(made, "-inf", text))
    if text.strip():
        pd.DataFrame([{"survey": made.id, "income_lower": "-inf", "income_upper": text}]).to_csv(
            tmp_path / "one.csv", index=False
        )
        refused(made, "is not a number", tmp_path / "one.csv")
    for plain in ("40000", "+4e4", "40000.", "4.0E+04", "400.e2"):
        assert made.ingest([saved(made, "-inf", plain)])["income_upper"].tolist() == [40_000]


def test_missing_cells_of_a_frame_are_unanswered() -> None:
    made = survey(BEFOREHAND["case1"])
    frame = pd.DataFrame(
        {
            "survey": [made.id] * 2,
            "respondent": ["a", "b"],
            "income_choice": pd.array([1, None], dtype="Int64"),
        }
    )
    for each in (
        frame,
        [
            {**row, "income_choice": pd.NA}
            for row in frame[["survey", "respondent"]].to_dict("records")
        ],
    ):
        assert made.ingest(each)["income_upper"].tolist()[1] == np.inf


def test_only_levels_are_values_of_a_column_with_levels() -> None:
    columns = dpdask.Schema.from_dict(
        {
            "columns": {
                "income": {
                    "role": "privatise",
                    "kind": "discrete",
                    "levels": [10, 20, 50],
                    "type": "int64",
                }
            }
        }
    )
    design = {
        "design": "canonical",
        "n_anchors": 1,
        "anchors": {"name": "uniform", "loc": 0, "scale": 60},
        "acceptable": [[-5, 20]],
    }
    made = survey(design, columns=columns)
    answer = {"survey": made.id, "respondent": "a", "income_choice": 1}
    assert made.ingest([{**answer, "income_value": 20}])["income_lower"].tolist() == [20]
    for value in (0, 13, 19.5, -1):
        refused(made, "does not fit its choice", {**answer, "income_value": value})
    form = survey(
        {**PROGRESSIVE, "anchors": design["anchors"], "reference": design["anchors"], "tau": 0.0},
        columns=columns,
    )
    form.ingest([saved(form, 10, 20), saved(form, 19, 20), saved(form, "-inf", 10)])
    for lower, upper in ((20, 49), (50, "inf"), ("-inf", 9)):
        refused(form, "or no level", saved(form, lower, upper))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    made = survey(BEFOREHAND["case1"])
    with pytest.raises(dpdask.InputError, match="cannot be read"):
        made.ingest(tmp_path / "none.json")
    (tmp_path / "bad.csv").write_text(f'a,b\n"{SECRET}\n')
    with pytest.raises(dpdask.DataError, match="not a CSV table") as caught:
        made.ingest(tmp_path / "bad.csv")
    assert str(SECRET) not in str(caught.value)


def saved(made: Survey, lower: Any, upper: Any, **more: Any) -> dict[str, Any]:
    return {"format": 1, "survey": made.id, "income_lower": lower, "income_upper": upper, **more}


def test_ranges_of_a_form_are_checked() -> None:
    made = survey(PROGRESSIVE)
    good = made.ingest(
        [
            saved(made, "-inf", 40_000),
            saved(made, 20_000, "inf", respondent="b"),
            saved(made, -np.inf, np.inf),
        ]
    )
    assert good["income_lower"].tolist() == [-np.inf, 20_000, -np.inf]
    assert good["respondent"].isna().tolist() == [True, False, True]
    assert list(made.ingest(json.dumps(saved(made, "-inf", 40_000)).encode()).columns) == [
        "income_lower",
        "income_upper",
    ]
    bad = {
        "lower end is not below": [(SECRET, SECRET), (40_000, SECRET), ("inf", "-inf")],
        "no anchor that could have been drawn": [
            (SECRET + 0.5, "inf"),
            (-SECRET, "inf"),
            ("-inf", 10.0**7),
        ],
        "narrower than the design": [(SECRET, SECRET + 1)],
        "is not a number": [
            (f"{SECRET}x", "inf"),
            (None, "inf"),
            (True, "inf"),
            ([SECRET], "inf"),
            (np.nan, "inf"),
            ("inf", "nan"),
        ],
    }
    for match, pairs in bad.items():
        for lower, upper in pairs:
            refused(
                made, f"answer 2.*{match}", saved(made, "-inf", "inf"), saved(made, lower, upper)
            )
    refused(made, "lacks 'income_upper'", {"survey": made.id, "income_lower": SECRET})
    refused(made, "another version", saved(made, "-inf", "inf", convention=str(SECRET)))
    refused(made, "not asked", saved(made, "-inf", "inf", seconds=SECRET))
    bounded = survey(PROGRESSIVE, columns=schema(bounds=[0, 60_000]))
    refused(bounded, "no value within the bounds", saved(bounded, 60_000, "inf"))
    bounded.ingest([saved(bounded, 59_999, "inf")])


@settings(max_examples=25, deadline=None)
@given(
    tau=st.floats(0, 0.4),
    rounds=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    type_=st.sampled_from(["int64", "float64"]),
)
def test_whatever_the_mechanism_can_release_a_form_may_save(
    tau: float, rounds: int, seed: int, type_: str
) -> None:
    design = {**PROGRESSIVE, "tau": tau, "rounds": rounds}
    made = survey(design, columns=schema(type_))
    values = np.floor(stats.lognorm(s=0.6, scale=40_000).rvs(200, random_state=seed))
    step = made._drawn.asked[0].step
    lower, upper = step.ranges(
        values, words(stream(RunKey.insecure(seed), "t", "f"), 200, step.words_per_row)
    )
    released = made.ingest(
        pd.DataFrame({"survey": made.id, "income_lower": lower, "income_upper": upper})
    )
    np.testing.assert_array_equal(released["income_lower"], lower)


def test_the_card_says_what_respondents_decide() -> None:
    made = survey(PROGRESSIVE, seed=None)
    card = made.card
    json.dumps(card, allow_nan=False)
    assert card["guarantee"]["epsilon"] is None
    assert "how soon a respondent stopped" in card["guarantee"]["unprotected"]["what"]
    assert card["survey"]["id"] == made.id
    assert card["mechanism"]["true_of_every_row"] is False
    assert not card["insecure"]
    seeded = survey(BEFOREHAND["case1"]).card
    assert seeded["insecure"]
    assert "left unanswered" in seeded["guarantee"]["text"]
    for text in (card["guarantee"]["text"], seeded["guarantee"]["text"]):
        assert "true of every row" not in text


def rounded(anchors: dict[str, Any], decimals: int, **more: Any) -> Survey:
    design = {
        "design": "case1",
        "reference": {"name": "uniform", "loc": 0, "scale": 2},
        "anchors": anchors,
        **more.pop("design", {}),
    }
    kind = {
        "kind": "continuous",
        "type": "float64",
        **({} if "levels" in more else {"bounds": [0.0, 2.0]}),
    } | more
    columns = dpdask.Schema.from_dict({"columns": {"income": {"role": "privatise", **kind}}})
    return survey(design, columns=columns, wording={"income": {"of": "x", "decimals": decimals}})


def test_no_coverage_is_claimed_of_rounded_anchors() -> None:
    near_two = {"name": "norm", "loc": 1.9, "scale": 0.02}
    made = rounded(near_two, 0)
    anchors = np.concatenate(made.questions(500)["anchors"].to_list())
    assert set(anchors) == {
        1.0
    }  # half of the people on either side, where the anchors as drawn leave nine tenths
    column = made.card["columns"]["income"]
    assert not {"mean_coverage", "leakage"} & set(column)
    assert "0 decimals" in column["anchors"]
    plain = {
        "design": "case1",
        "anchors": near_two,
        "reference": {"name": "uniform", "loc": 0, "scale": 2},
    }
    assert (
        survey(plain, columns=schema("float64", bounds=[0.0, 2.0])).card["columns"]["income"][
            "mean_coverage"
        ]
        > 0.9
    )
    whole = survey(
        {**BEFOREHAND["case1"], "reference": INCOME}, wording={"income": {"of": "x", "decimals": 0}}
    )
    assert "mean_coverage" in whole.card["columns"]["income"]  # whole anchors are what is measured
    with pytest.raises(dpdask.SpecError, match="coverage that is asked for"):
        rounded({"coverage": 0.6, "family": {"name": "norm"}}, 1)


UNIT = {"name": "uniform", "loc": 0, "scale": 1}


@pytest.mark.parametrize(
    ("anchors", "more"),
    [
        (UNIT, {"bounds": [0.0, 1.0]}),
        (UNIT, {"design": {"design": "ring"}, "bounds": [-1.0, 1.0]}),
        (UNIT, {"design": {"design": "progressive", "tau": 0.0}, "bounds": [0.0, 1.0]}),
        ({"name": "uniform", "loc": 1.1, "scale": 0.5}, {"bounds": [1.0, 2.0]}),
        ({"name": "uniform", "loc": 1.1, "scale": 0.5}, {"kind": "discrete", "levels": [1.2, 1.4]}),
    ],
)
def test_anchors_that_say_nothing_once_rounded_are_refused(
    anchors: dict[str, Any], more: dict[str, Any]
) -> None:
    with pytest.raises(
        dpdask.SpecError, match=r"wording.income.decimals: no anchor that is rounded down"
    ):
        rounded(anchors, 0, **more)
    assert rounded(anchors, 2, **more).id


@pytest.mark.parametrize(
    ("anchors", "more"),
    [
        ({"name": "uniform", "loc": 0, "scale": 1.5}, {}),
        ({"name": "uniform", "loc": 0, "scale": 2.5}, {"design": {"design": "ring"}}),
        (UNIT, {"kind": "discrete", "levels": [0.0, 0.5, 1.0]}),
        (UNIT, {"kind": "mixed", "atoms": [0.0], "bounds": [0.0, 1.0]}),
        (UNIT, {"design": {"design": "canonical", "n_anchors": 1, "acceptable": [[0, 0.5]]}}),
    ],
)
def test_anchors_that_say_something_once_rounded_are_taken(
    anchors: dict[str, Any], more: dict[str, Any]
) -> None:
    made = rounded(anchors, 0, **more)
    assert max(len(choices) for choices in made.questions(300)["choices"]) >= 2


N01 = {"name": "norm"}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "this design cannot be asked",
        {"design": "selective", "of": BEFOREHAND["case1"], "tau": 0.1, "reference": INCOME},
        {},
    ),
    ("this design cannot be asked", {"design": "ensemble", "of": [BEFOREHAND["case1"]] * 2}, {}),
    ("use `stop: either`", {**PROGRESSIVE, "stop": "own"}, {}),
    ("has no wording", BEFOREHAND["case1"], {"wording": {}}),
    ("is not asked for", BEFOREHAND["case1"], {"wording": {**WORDING, "age": {"of": "x"}}}),
    (
        "did you mean 'unit'",
        BEFOREHAND["case1"],
        {"wording": {"income": {"of": "x", "units": "y"}}},
    ),
    ("anchors are whole", BEFOREHAND["case1"], {"wording": {"income": {"of": "x", "decimals": 2}}}),
    (
        "need not have the coverage",
        {"design": "case1", "at_least": 0.2, "reference": INCOME},
        {"columns": schema("float64"), "wording": {"income": {"of": "x", "decimals": 2}}},
    ),
    ("both given", BEFOREHAND["case1"], {"key": RunKey.insecure(1)}),
    ("has no key", PROGRESSIVE, {"key": RunKey.insecure(1)}),
    ("no key: its forms draw", PROGRESSIVE, {"insecure_seed": 3}),
    ("has no nulls", {**BEFOREHAND["case1"], "nulls": "public"}, {}),
    (
        "no nulls: whoever",
        {**BEFOREHAND["case1"], "nulls": "public"},
        {"columns": schema(nulls="level")},
    ),
]


@pytest.mark.parametrize(
    ("match", "design", "more"), REFUSED, ids=[match for match, _, _ in REFUSED]
)
def test_surveys_that_cannot_be_asked_are_refused(
    match: str, design: dict[str, Any], more: dict[str, Any]
) -> None:
    with pytest.raises(dpdask.SpecError, match=match):
        survey(design, **more)


def test_other_refusals() -> None:
    kept = dpdask.Schema.from_dict(
        {"columns": {"id": {"role": "keep"}, "income": {"role": "privatise", "kind": "continuous"}}}
    )
    with pytest.raises(dpdask.SpecError, match="private columns alone"):
        survey(BEFOREHAND["case1"], columns=kept)
    two = dpdask.Schema.from_dict(
        {
            "columns": {
                name: {"role": "privatise", "kind": "continuous"} for name in ("income", "cash")
            }
        }
    )
    with pytest.raises(dpdask.SpecError, match="in all columns or in none"):
        Survey(
            two,
            columns={"income": BEFOREHAND["case1"], "cash": PROGRESSIVE},
            wording={**WORDING, "cash": {"of": "your cash"}},
        )
    with pytest.raises(dpdask.SpecError, match="give every respondent the form"):
        survey(PROGRESSIVE).questions(3)
    with pytest.raises(dpdask.SpecError, match="ask the rows of `questions`"):
        survey(BEFOREHAND["case1"]).form(title="x")
    for ids in (["a", "a"], [1, "1"], [""], ["a\ud800"], ["a" * 201], [10**5000], [1.5]):
        with pytest.raises(dpdask.SpecError, match="is repeated, empty"):
            survey(BEFOREHAND["case1"]).questions(ids)
    with pytest.raises(dpdask.SpecError, match="is repeated, empty"):
        survey(PROGRESSIVE).form(title="x", respondent="a\ud800")
    wide = {
        **PROGRESSIVE,
        "anchors": UNIFORM,
        "reference": {"name": "randint", "low": 0, "high": 200_000},
    }
    with pytest.raises(dpdask.SpecError, match="too many values for a page"):
        survey(wide).form(title="x")


def test_the_page_holds_everything_and_asks_for_nothing() -> None:
    made = survey(PROGRESSIVE)
    page = made.form(title="Income </script><script>x", introduction="<b>&", respondent="r&1")
    without_tables = re.sub(r'"[A-Za-z0-9+/=]{100,}"', "", page)
    assert not re.search(
        r"https?:|\b(?:src|href)=|@import|url\(|fetch\(|XMLHttpRequest|localStorage|Date\.now|performance",
        without_tables,
    )
    assert "Income &lt;/script&gt;&lt;script&gt;x" in page
    assert "&lt;b&gt;&amp;" in page
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]  # type: ignore[index]
    assert policy.startswith("default-src 'none'; ")
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]  # type: ignore[index]
        digest = base64.b64encode(sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    data = json.loads(re.search(r'id="survey">(.*?)</script>', page)[1])  # type: ignore[index]
    assert data["respondent"] == "r&1"
    step = range_randomiser("income", made._drawn.release.designs["income"], lattice=True).step
    table = np.frombuffer(base64.b64decode(data["columns"][0]["cdf"]["x"]), dtype="<f8")
    np.testing.assert_array_equal(table, step.cdf.x)  # type: ignore[attr-defined]
    assert len(page) < 300_000


def test_kernel_anchors_are_those_of_its_partition() -> None:
    distribution = kernel.Quantiles(stats.norm.ppf(np.clip(LEVELS, 1e-15, 1 - 1e-15)), LEVELS)
    drawn = words(stream(RunKey.insecure(1), "t", "f"), 300, 3)
    nothing = kernel.Acceptable(np.zeros(0), np.zeros(0), np.zeros(4, dtype=bool))
    for spacing in (0.0, 0.1):
        anchors = kernel.anchors(
            drawn, distribution, np.zeros(3), spacing=spacing, ring=False, lattice=False
        )
        lower, upper = kernel.partition(
            anchors[:, 1].copy(),
            drawn,
            distribution,
            np.zeros(3),
            nothing,
            spacing=spacing,
            ring=False,
            lattice=False,
        )
        np.testing.assert_array_equal(lower, anchors[:, 0])
        np.testing.assert_array_equal(upper, anchors[:, 1])


def test_the_pipeline_makes_a_form_and_ingests_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_form.main(["form", str(tmp_path / "form.html")])
    made = make_form.survey()
    page = (tmp_path / "form.html").read_text(encoding="utf-8")
    assert made.id in page
    (tmp_path / "answers").mkdir()
    truth = {
        "salary": stats.lognorm(s=0.5, scale=60_000),
        "cash": stats.lognorm(s=1.2, scale=8_000),
    }
    n, ranges = 400, {}
    for asked in made._drawn.asked:
        values = np.floor(truth[asked.name].rvs(n, random_state=4))
        ranges[asked.name] = asked.step.ranges(
            values, words(stream(RunKey.insecure(2), "t", asked.name), n, asked.step.words_per_row)
        )
    for row in range(n):
        ends = {
            f"{name}_{end}": float(pair[k][row])
            for name, pair in ranges.items()
            for k, end in enumerate(("lower", "upper"))
        }
        plain = {name: str(end) if np.isinf(end) else end for name, end in ends.items()}
        (tmp_path / "answers" / f"{row}.json").write_text(
            json.dumps({"format": 1, "survey": made.id, **plain}), encoding="utf-8"
        )
    make_form.main(["ingest", str(tmp_path / "answers"), str(tmp_path / "out.parquet")])
    released = pd.read_parquet(tmp_path / "out.parquet")
    assert sorted(released["cash_lower"]) == sorted(ranges["cash"][0])
    assert (
        json.loads((tmp_path / "out.card.json").read_text(encoding="utf-8"))["survey"]["id"]
        == made.id
    )
    assert capsys.readouterr().out.startswith("salary 25%: ")
    for name, distribution in truth.items():
        assert make_form.quarters(released, name)[1] == pytest.approx(
            distribution.median(), rel=0.25
        )


def test_the_readme_s_example_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(make_form.__file__).parent / "README.md").read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]  # type: ignore[index]
    ids = []
    for _ in range(2):  # the second time with the key of the first, as in another process
        found: dict[str, Any] = {}
        exec(compile(example, "README.md", "exec"), found)
        assert "income_upper" in capsys.readouterr().out
        ids.append(found["survey"].id)
    assert ids[0] == ids[1]
    assert Path("survey.key").stat().st_mode & 0o077 == 0
    size = len(make_form.survey().form(title="x")) / 1e6
    assert f"one HTML file of {size:.1f} MB" in text
