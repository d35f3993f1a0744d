"""`dpdask.Survey`: questions drawn before any value, answers checked, ranges that are the mechanism's own."""

import base64
import json
import re
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mechanisms.containing import held_by
from scipy import stats

import dpdask
from dpdask.mechanisms.interval.fit import range_randomiser
from dpdask.mechanisms.interval.ranges import Partition, Ranges
from dpdask.streams import RunKey, stream, words
from dpdask.survey import Survey, Wording
from pipelines.survey import make_form

INCOME = {"name": "lognorm", "s": 0.6, "scale": 40_000}
UNIFORM = {"name": "uniform", "loc": 0, "scale": 150_000}
WORDING = {"income": {"of": "your yearly income before tax", "unit": "euro"}}
BEFOREHAND = {
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


def schema(type_="int64", **more):
    column = {
        "role": "privatise",
        "kind": "continuous",
        **({"type": type_} if type_ else {}),
        **more,
    }
    return dpdask.Schema.from_dict({"columns": {"income": column}})


def survey(design, *, seed=3, wording=WORDING, columns=None, **more):
    seed = None if design["design"] == "progressive" else seed
    return Survey(
        columns or schema(),
        columns={"income": design},
        wording=wording,
        **{"insecure_seed": seed, **more},
    )


def truthful(made, design, respondents, values):
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


def people(n, seed=1):
    values = np.floor(stats.lognorm(s=0.6, scale=40_000).rvs(n, random_state=seed))
    return [f"p{i}" for i in range(n)], values


@pytest.mark.parametrize("name", list(BEFOREHAND))
def test_answers_become_the_mechanism_s_own_ranges(name):
    design, made = BEFOREHAND[name], survey(BEFOREHAND[name])
    respondents, values = people(400)
    if name == "coarse":
        values = values % 5
    released = made.ingest(truthful(made, design, respondents, values))
    step = made._drawn.questions[0].step
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


def test_the_same_key_gives_the_same_questions_whoever_else_is_asked():
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


def test_answers_to_another_key_s_questions_are_refused():
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


def test_what_is_shown_is_what_is_released():
    wording = {"income": Wording(of="your income", decimals=2)}
    made = survey(
        {"design": "case1", "anchors": UNIFORM}, columns=schema("float64"), wording=wording
    )
    table = made.questions(200)
    shown = [
        float(re.search(r"at most ([\d.,]+)\?", text)[1].replace(",", ""))
        for text in table["question"]
    ]
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


def test_unanswered_says_nothing_and_answers_come_from_anywhere(tmp_path):
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
    missing = [{**answers[2], "income_choice": pd.NA, "income_value": pd.NA}]
    files = tmp_path / "all.json", str(tmp_path / "all.csv")
    each_content = [json.dumps(each).encode() for each in answers]
    for given_ in ([*answers[:2], *missing], pd.DataFrame(answers), content, each_content, *files):
        pd.testing.assert_frame_equal(made.ingest(given_), expected)
    assert list(made.ingest([]).columns) == ["income_lower", "income_upper"]


@settings(max_examples=25, deadline=None)
@given(
    tau=st.floats(0, 0.4),
    rounds=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    type_=st.sampled_from(["int64", "float64"]),
)
def test_whatever_the_mechanism_can_release_a_form_may_save(tau, rounds, seed, type_):
    design = {**PROGRESSIVE, "tau": tau, "rounds": rounds}
    made = survey(design, columns=schema(type_))
    values = np.floor(stats.lognorm(s=0.6, scale=40_000).rvs(200, random_state=seed))
    step = made._drawn.questions[0].step
    lower, upper = step.ranges(
        values, words(stream(RunKey.insecure(seed), "t", "f"), 200, step.words_per_row)
    )
    released = made.ingest(
        pd.DataFrame({"survey": made.id, "income_lower": lower, "income_upper": upper})
    )
    np.testing.assert_array_equal(released["income_lower"], lower)


def test_the_card_says_what_respondents_decide():
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


def rounded(anchors, decimals, **more):
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


def test_no_coverage_is_claimed_of_rounded_anchors():
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


# ---- what cannot be asked

UNIT = {"name": "uniform", "loc": 0, "scale": 1}
SHIFTED = {"name": "uniform", "loc": 1.1, "scale": 0.5}


@pytest.mark.parametrize(
    ("anchors", "more", "say_something"),
    [
        (UNIT, {"bounds": [0.0, 1.0]}, False),
        (UNIT, {"design": {"design": "ring"}, "bounds": [-1.0, 1.0]}, False),
        (UNIT, {"design": {"design": "progressive", "tau": 0.0}, "bounds": [0.0, 1.0]}, False),
        (SHIFTED, {"bounds": [1.0, 2.0]}, False),
        (SHIFTED, {"kind": "discrete", "levels": [1.2, 1.4]}, False),
        ({**UNIT, "scale": 1.5}, {}, True),
        ({**UNIT, "scale": 2.5}, {"design": {"design": "ring"}}, True),
        (UNIT, {"kind": "discrete", "levels": [0.0, 0.5, 1.0]}, True),
        (UNIT, {"kind": "mixed", "atoms": [0.0], "bounds": [0.0, 1.0]}, True),
        (UNIT, {"design": {"design": "canonical", "n_anchors": 1, "acceptable": [[0, 0.5]]}}, True),
    ],
)
def test_anchors_that_say_nothing_once_rounded_are_refused(anchors, more, say_something):
    if say_something:
        made = rounded(anchors, 0, **more)
        assert max(len(choices) for choices in made.questions(300)["choices"]) >= 2
        return
    with pytest.raises(dpdask.SpecError, match=r"wording.income.decimals: no anchor that is round"):
        rounded(anchors, 0, **more)
    assert rounded(anchors, 2, **more).id


CASE1 = BEFOREHAND["case1"]
KEPT = dpdask.Schema.from_dict(
    {"columns": {"id": {"role": "keep"}, "income": {"role": "privatise", "kind": "continuous"}}}
)
DECIMALS = {"income": {"of": "x", "decimals": 2}}
LEAST = {"design": "case1", "at_least": 0.2, "reference": INCOME}
SELECTIVE = {"design": "selective", "of": CASE1, "tau": 0.1, "reference": INCOME}
FAR_DATES = {"design": "case1", "anchors": {"name": "uniform", "loc": 0, "scale": 1e7}}
REFUSED = [
    ("this design cannot be asked", SELECTIVE, {}),
    ("this design cannot be asked", {"design": "ensemble", "of": [CASE1] * 2}, {}),
    ("use `stop: either`", {**PROGRESSIVE, "stop": "own"}, {}),
    ("has no wording", CASE1, {"wording": {}}),
    ("is not asked for", CASE1, {"wording": {**WORDING, "age": {"of": "x"}}}),
    ("did you mean 'unit'", CASE1, {"wording": {"income": {"of": "x", "units": "y"}}}),
    ("anchors are whole", CASE1, {"wording": DECIMALS}),
    ("need not have the coverage", LEAST, {"columns": schema("float64"), "wording": DECIMALS}),
    ("both given", CASE1, {"key": RunKey.insecure(1)}),
    ("has no key", PROGRESSIVE, {"key": RunKey.insecure(1)}),
    ("no key: its forms draw", PROGRESSIVE, {"insecure_seed": 3}),
    ("has no nulls", {**CASE1, "nulls": "public"}, {}),
    ("no nulls: whoever", {**CASE1, "nulls": "public"}, {"columns": schema(nulls="level")}),
    ("private columns alone", CASE1, {"columns": KEPT}),
    ("no date of the years", FAR_DATES, {"columns": schema("date32")}),
    ("numbers and dates", CASE1, {"columns": schema("timestamp[us]")}),
]


@pytest.mark.parametrize(("match", "design", "more"), REFUSED)
def test_surveys_that_cannot_be_asked_are_refused(match, design, more):
    with pytest.raises(dpdask.SpecError, match=match):
        survey(design, **more)


def test_questions_and_forms_that_cannot_be_made_are_refused():
    income = {"role": "privatise", "kind": "continuous"}
    two = dpdask.Schema.from_dict({"columns": {"income": income, "cash": income}})
    mixed = {"income": CASE1, "cash": PROGRESSIVE}
    with pytest.raises(dpdask.SpecError, match="in all columns or in none"):
        Survey(two, columns=mixed, wording={**WORDING, "cash": {"of": "your cash"}})
    with pytest.raises(dpdask.SpecError, match="give every respondent the form"):
        survey(PROGRESSIVE).questions(3)
    with pytest.raises(dpdask.SpecError, match="ask the rows of `questions`"):
        survey(CASE1).form(title="x")
    for ids in (["a", "a"], [1, "1"], [""], ["a\ud800"], ["a" * 201], [10**5000], [1.5]):
        with pytest.raises(dpdask.SpecError, match="is repeated, empty"):
            survey(CASE1).questions(ids)
    with pytest.raises(dpdask.SpecError, match="is repeated, empty"):
        survey(PROGRESSIVE).form(title="x", respondent="a\ud800")
    wide = {**PROGRESSIVE, "reference": {"name": "randint", "low": 0, "high": 200_000}}
    with pytest.raises(dpdask.SpecError, match="too many values for a page"):
        survey(wide).form(title="x")


def test_questions_are_words():
    row = survey(CASE1).questions(1).iloc[0]
    question = row["question"]
    assert re.fullmatch(r"Is your yearly income before tax at most [\d,]+ euro\?", question)
    at_most = row["choices"][0]
    assert question.endswith(f" {at_most}?")
    assert row["choices"] == [at_most, at_most.replace("at most", "more than")]
    first = survey(BEFOREHAND["acceptable"]).questions(1).iloc[0]["choices"][0]
    assert first == "more than 10,000 euro and at most 20,000 euro: please give it"
    row = survey(BEFOREHAND["ring"]).questions(1).iloc[0]
    ring = "at most {:,.0f} euro, or more than {:,.0f} euro".format(*row["anchors"])
    assert row["choices"][1] == ring
    design = {"design": "case1", "anchors": {"name": "uniform", "loc": 0, "scale": 10_000}}
    wording = {"income": {"of": "your date of birth"}}
    row = survey(design, columns=schema("date32"), wording=wording).questions(1).iloc[0]
    date = np.datetime64(int(row["anchors"][0]), "D")
    assert row["question"] == f"Is your date of birth on or before {date}?"
    assert row["choices"][1] == f"after {date}"


# ---- answers that nobody could have given

SECRET = 31_337


def refused(made, match, *answers):
    """Check that answers are refused in one line that shows nothing of them."""
    with pytest.raises(dpdask.DataError, match=match) as caught:
        made.ingest(list(answers))
    assert str(SECRET) not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__context__ is None or str(SECRET) not in str(caught.value.__context__)


def saved(made, lower, upper, **more):
    ends = {"income_lower": lower, "income_upper": upper}
    return {"format": 1, "survey": made.id, **ends, **more}


CHOICE = "answer 2, column 'income': its choice is not one"
NUMBER = "its number is missing, or does not fit"
ID = "answer 2: its respondent's id is not a UTF-8 text"
LONG_IDS = [
    f"{SECRET}\ud800",
    10**5000 + SECRET,
    -(10**300),
    f"{SECRET}" * 100,
    "",
    True,
    1.5,
    [SECRET],
]
CHOICES = [
    (CHOICE, [{"income_choice": each} for each in (0, 4, SECRET, -1, 1.5, True, "1", [1], np.inf)]),
    (CHOICE, [{"income_choice": each} for each in (10**400, np.float64(1e308), "1e999")]),
    (CHOICE, [{"income_value": SECRET, "income_choice": None}]),
    ("a number where only its range", [{"income_value": SECRET}]),
    (
        NUMBER,
        [{"income_choice": 1, "income_value": each} for each in (None, 10.0**7, SECRET + 0.5)],
    ),
    (NUMBER, [{"income_choice": 1, "income_value": each} for each in ("x", np.inf, True, 10**400)]),
    ("another survey", [{"survey": each} for each in (f"{SECRET}", None, np.array([1, 2]))]),
    ("another version", [{"format": each} for each in (SECRET, np.array([1, 2]))]),
    ("not asked", [{f"name {SECRET}": 1}]),
    ("one respondent has two answers", [{"respondent": "b"}]),
    (ID, [{"respondent": each} for each in LONG_IDS]),
]


@pytest.mark.parametrize(("match", "changes"), CHOICES)
def test_choices_that_nobody_had_are_refused(match, changes):
    made = survey(BEFOREHAND["exact ranges"])
    head = {"survey": made.id, "respondent": "a", "income_choice": 2}
    good = {**head, "respondent": "b"}
    for change in changes:
        refused(made, match, good, {**head, **change})


def test_answers_that_are_no_answers_are_refused(tmp_path):
    made = survey(BEFOREHAND["exact ranges"])
    head = {"survey": made.id, "respondent": "a", "income_choice": 2}
    refused(made, "lacks 'respondent'", {"survey": made.id, "income_choice": 2})
    refused(made, "file 1: this is not a file of survey answers", f"{SECRET}".encode())
    refused(made, "file 2: this is not a file of survey answers", head, b"[" * 100_000)
    refused(made, "its choice is not one", json.dumps({**head, "income_choice": 10**400}).encode())
    with pytest.raises(dpdask.DataError) as caught:
        made.ingest(json.dumps({**head, "respondent": f"{SECRET}\ud800"}).encode())
    assert caught.value.__context__ is None  # it would hold the id
    assert made.ingest([{**head, "respondent": "ä" * 200}])["respondent"].tolist() == ["ä" * 200]
    bounded = survey(BEFOREHAND["exact ranges"], columns=schema(bounds=[0, 200_000]))
    low = {**head, "survey": bounded.id, "income_choice": 1, "income_value": -1}
    refused(bounded, "does not fit", low)
    with pytest.raises(dpdask.InputError, match="cannot be read"):
        made.ingest(tmp_path / "none.json")
    (tmp_path / "bad.csv").write_text(f'a,b\n"{SECRET}\n')
    refused(made, "not a CSV table", tmp_path / "bad.csv")


PLAIN = "income_(lower|upper)'* is not a number"
TEXTS = ["4_0000", " 40000 ", "40000\n", "４００００", "٤٠٠٠٠", "0x9c40", "1e", ".", "", "infinity"]
TEXTS += ["+inf", "-nan", "4,0", "1e999", f"{SECRET}x"]
RANGES = [
    ("lower end is not below", [(SECRET, SECRET), (40_000, SECRET), ("inf", "-inf")]),
    ("no anchor that could have been drawn", [(SECRET + 0.5, "inf"), (-SECRET, "inf"), (0, 1e7)]),
    ("narrower than the design", [(SECRET, SECRET + 1)]),
    (PLAIN, [("-inf", text) for text in TEXTS]),
    (PLAIN, [(each, "inf") for each in (None, True, [SECRET], np.nan, 10**400, "1e999")]),
]


@pytest.mark.parametrize(("match", "pairs"), RANGES)
def test_ranges_that_no_form_saves_are_refused(match, pairs):
    made = survey(PROGRESSIVE)
    for lower, upper in pairs:
        refused(made, f"answer 2.*{match}", saved(made, "-inf", "inf"), saved(made, lower, upper))


def test_ranges_of_a_form_are_read_and_checked(tmp_path):
    made = survey(PROGRESSIVE)
    answers = [saved(made, "-inf", 40_000), saved(made, 20_000, "inf", respondent="b")]
    good = made.ingest([*answers, saved(made, -np.inf, np.inf)])
    assert good["income_lower"].tolist() == [-np.inf, 20_000, -np.inf]
    assert good["respondent"].isna().tolist() == [True, False, True]
    names = ["income_lower", "income_upper"]
    assert list(made.ingest(json.dumps(answers[0]).encode()).columns) == names
    for plain in ("40000", "+4e4", "40000.", "4.0E+04", "400.e2"):
        assert made.ingest([saved(made, "-inf", plain)])["income_upper"].tolist() == [40_000]
    for text in (text for text in TEXTS if text.strip()):
        pd.DataFrame([saved(made, "-inf", text)]).to_csv(tmp_path / "one.csv", index=False)
        refused(made, PLAIN, tmp_path / "one.csv")
    refused(made, "lacks 'income_upper'", {"survey": made.id, "income_lower": SECRET})
    refused(made, "another version", saved(made, "-inf", "inf", convention=str(SECRET)))
    refused(made, "not asked", saved(made, "-inf", "inf", seconds=SECRET))
    for respondent in LONG_IDS:
        refused(made, ID.replace("2", "1"), saved(made, "-inf", "inf", respondent=respondent))
    bounded = survey(PROGRESSIVE, columns=schema(bounds=[0, 60_000]))
    refused(bounded, "no value within the bounds", saved(bounded, 60_000, "inf"))
    bounded.ingest([saved(bounded, 59_999, "inf")])
    wording = {"income": {"of": "x", "decimals": 9}}
    rough = survey({**PROGRESSIVE, "anchors": INCOME}, columns=schema("float64"), wording=wording)
    refused(rough, "no anchor that could have been drawn", saved(rough, "-inf", 1e308))


def test_only_levels_are_values_of_a_column_with_levels():
    column = {"role": "privatise", "kind": "discrete", "levels": [10, 20, 50], "type": "int64"}
    columns = dpdask.Schema.from_dict({"columns": {"income": column}})
    anchors = {"name": "uniform", "loc": 0, "scale": 60}
    design = {"design": "canonical", "n_anchors": 1, "anchors": anchors, "acceptable": [[-5, 20]]}
    made = survey(design, columns=columns)
    answer = {"survey": made.id, "respondent": "a", "income_choice": 1}
    assert made.ingest([{**answer, "income_value": 20}])["income_lower"].tolist() == [20]
    for value in (0, 13, 19.5, -1):
        refused(made, "does not fit its choice", {**answer, "income_value": value})
    narrowing = {**PROGRESSIVE, "anchors": anchors, "reference": anchors, "tau": 0.0}
    form = survey(narrowing, columns=columns)
    form.ingest([saved(form, 10, 20), saved(form, 19, 20), saved(form, "-inf", 10)])
    for lower, upper in ((20, 49), (50, "inf"), ("-inf", 9)):
        refused(form, "or no level", saved(form, lower, upper))


def test_the_page_holds_everything_and_asks_for_nothing():
    made = survey(PROGRESSIVE)
    page = made.form(title="Income </script><script>x", introduction="<b>&", respondent="r&1")
    without_tables = re.sub(r'"[A-Za-z0-9+/=]{100,}"', "", page)
    assert not re.search(
        r"https?:|\b(?:src|href)=|@import|url\(|fetch\(|XMLHttpRequest|localStorage|Date\.now|performance",
        without_tables,
    )
    assert "Income &lt;/script&gt;&lt;script&gt;x" in page
    assert "&lt;b&gt;&amp;" in page
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    assert policy.startswith("default-src 'none'; ")
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[1]
        digest = base64.b64encode(sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    data = json.loads(re.search(r'id="survey">(.*?)</script>', page)[1])
    assert data["respondent"] == "r&1"
    step = range_randomiser("income", made._drawn.release.designs["income"], lattice=True).step
    table = np.frombuffer(base64.b64decode(data["columns"][0]["cdf"]["x"]), dtype="<f8")
    np.testing.assert_array_equal(table, step.cdf.x)
    assert len(page) < 300_000


def test_the_pipeline_makes_a_form_and_ingests_answers(tmp_path, capsys):
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
    for asked in made._drawn.questions:
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


def test_the_readme_s_example_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(make_form.__file__).parent / "README.md").read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]
    ids = []
    for _ in range(2):  # the second time with the key of the first, as in another process
        found = {}
        exec(compile(example, "README.md", "exec"), found)
        assert "income_upper" in capsys.readouterr().out
        ids.append(found["survey"].id)
    assert ids[0] == ids[1]
    assert Path("survey.key").stat().st_mode & 0o077 == 0
    size = len(make_form.survey().form(title="x")) / 1e6
    assert f"one HTML file of {size:.1f} MB" in text
