"""A job and a Python class refuse the same wrong parameters, at construction and with the same substance, each in its own words."""

import pytest
from e2e.helpers import categorical, continuous, discrete, load, refusing, write_job

import dpdask
from dpdask.errors import SpecError
from dpdask.jobs.spec import name_keys
from dpdask.schema import Schema

COLUMNS = {
    "x": discrete([1, 2, 3], type="int64"),
    "c": categorical(["a", "b"], type="string"),
    "y": continuous([0.0, 1.0], type="float64"),
    "who": {"role": "keep", "type": "int64"},
}
COUNTED = {**COLUMNS, "who": {"role": "drop", "type": "int64"}}
NUMBERS = {name: COLUMNS[name] for name in ("x", "y", "who")}
UNIFORM = {"name": "uniform", "loc": 0.0, "scale": 1.0}
KNOWN = {"x": {"probabilities": [0.2, 0.3, 0.5]}, "c": {"probabilities": [0.5, 0.5]}, "y": UNIFORM}
HOLDOUT = {"kind": "holdout", "fraction": 0.5}
CASE1 = {"design": "case1", "anchors": UNIFORM}
RANGES = {
    "x": {"design": "case1", "anchors": {"name": "uniform", "loc": 0.0, "scale": 4.0}},
    "y": CASE1,
}

REFERENCES = {
    "holdout": dpdask.Holdout,
    "known": dpdask.Known,
    "histogram": dpdask.Histogram,
    "chain": dpdask.Chain,
    "tree": dpdask.Tree,
}

DIP = [
    {"epsilon": 0},
    {"epsilon": 101},
    {"epsilon": float("nan")},
    {"epsilon": 1e-9},
    {"epsilon": 90.0},
    {"delta": 1.0},
    {"delta": 1e-6},
    {"unit": {"column": "x", "max_rows": 2}},
    {"unit": {"column": "who", "max_rows": 0}},
    {"channel": "gauss"},
    {"cost": {"x": "rank"}},
    {"cost": {"z": "rank"}, "channel": "optimal"},
    {"cost": {"x": "cheap"}, "channel": "optimal"},
    {"channel": "optimal-unbiased"},
    {"reference": {"kind": "tree"}, "channel": "optimal-unbiased"},
    {"weights": {"x": 1.0}},
    {"weights": {"x": 1.0, "c": 1.0, "y": 0.0}},
    {"weights": {"x": 1.0, "c": 1.0, "y": 1.0, "z": 1.0}},
    {"reference": {"kind": "holdout", "fraction": 0.0}},
    {"reference": {"kind": "holdout", "fraction": 0.5, "bins": 3}},
    {"reference": {"kind": "histogram", "bins": 1}},
    {"reference": {"kind": "histogram", "share": 1.0}},
    {"reference": {"kind": "known", "columns": {"x": KNOWN["x"], "c": KNOWN["c"]}}},
    {"reference": {"kind": "known", "columns": {**KNOWN, "who": UNIFORM}}},
    {"reference": {"kind": "chain", "fraction": 0.5, "order": ["x", "y"]}},
    {"reference": {"kind": "chain", "fraction": 0.5, "min_rows": 1}},
    {"reference": {"kind": "chain", "fraction": 0.5}, "channel": "optimal", "cost": {"x": "value"}},
    {"reference": {"kind": "tree", "share": 0.0}},
    {"reference": {"kind": "tree", "bins": {"y": [0.5, "a"]}}},
]
COUNTS = [
    {"epsilon": 0},
    {"delta": 2},
    {"adjacency": "swap"},
    {"bins": 0},
    {"bins": "x"},
    {"bins": 2**15 + 1},
    {"bins": {"y": [0.5, "a"]}},
    {"unit": {"column": "y", "max_rows": 2}},
]
HISTOGRAM = [
    *COUNTS,
    {"threshold": "low"},
    {"factor": 0.0},
    {"factor": -1.0},
    {"bins": "rule", "adjacency": "add-remove"},
]
MARGINALS = [
    *COUNTS,
    {"cliques": []},
    {"cliques": [["z"]]},
    {"cliques": [["x", "x"]]},
    {"cliques": "x"},
    {"weights": [1.0]},
]
COPULA = [*COUNTS, {"weights": {"one_way": -1.0, "two_way": 1.0}}, {"measured_again": "most"}]
INTERVAL = [
    {"columns": {}},
    {"columns": {"x": RANGES["x"]}},
    {"columns": {**RANGES, "who": CASE1}},
    {"columns": {**RANGES, "y": {"design": "case1", "anchors": {"name": "unheard"}}}},
    {"coverage": True},
    {"coverage": "yes"},
]
CASES = [
    *(("dip", each) for each in DIP),
    *(("copula", each) for each in COPULA),
    *(("marginals", each) for each in MARGINALS),
    *(("histogram", each) for each in HISTOGRAM),
    *(("interval", each) for each in INTERVAL),
]
DEFAULTS = {
    "dip": {"reference": HOLDOUT},
    "copula": {},
    "marginals": {"cliques": [["x"], ["x", "y"]]},
    "histogram": {"output": "rows"},
    "interval": {"columns": RANGES},
}
PROMISE = ("epsilon", "delta", "adjacency", "unit")
SCHEMAS = {"dip": COLUMNS, "interval": refusing(NUMBERS)}


def job_of(kind, changes, folder):
    """Load a job with wrong parameters."""
    (folder / "in").mkdir()
    promised = {"epsilon": 1.0, "delta": 0, "adjacency": "replace-one", "unit": "row"} | {
        k: v for k, v in changes.items() if k in PROMISE
    }
    mechanism = {
        "kind": kind,
        **DEFAULTS[kind],
        **{k: v for k, v in changes.items() if k not in PROMISE},
    }
    privacy = None if kind == "interval" else promised
    return load(
        write_job(
            folder / "job",
            folder / "in",
            folder / "out",
            schema=SCHEMAS.get(kind, COUNTED),
            mechanism=mechanism,
            privacy=privacy,
        )
    )


def python_of(kind, changes):
    """Construct a Python class with the same wrong parameters."""
    schema = Schema.from_dict({"columns": SCHEMAS.get(kind, COUNTED)})
    given = {**DEFAULTS[kind], **changes}
    given.pop("output", None)
    if kind == "interval":
        return dpdask.IntervalMechanism(schema, **given)
    given = {"epsilon": 1.0, **given}
    if isinstance(given.get("unit"), dict):
        given["unit"] = dpdask.UnitColumn(**given["unit"])
    if kind == "dip":
        named = given["reference"]
        given["reference"] = REFERENCES[named["kind"]](
            **{key: value for key, value in named.items() if key != "kind"}
        )
        return dpdask.DIP(schema, **given)
    if kind == "copula":
        return dpdask.GaussianCopula(schema, **given.pop("weights", {}), **given)
    return (dpdask.Marginals if kind == "marginals" else dpdask.PerturbedHistogram)(schema, **given)


def words(text):
    """Return what a message says without the file or class in front of the parameter."""
    return (name_keys(text) or "").replace("`", "").replace("mechanism.reference.", "")


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=lambda value: str(value)[:70])
def test_a_job_and_a_python_class_refuse_the_same(kind, changes, tmp_path):
    with pytest.raises(SpecError) as by_job:
        job_of(kind, changes, tmp_path)
    with pytest.raises(SpecError) as by_class:
        python_of(kind, changes)
    assert words(by_class.value.what) == words(by_job.value.what)
    assert "\n" not in str(by_class.value)
    assert "mechanism." not in str(by_class.value)
    assert "privacy." not in str(by_class.value)
    assert "pydantic" not in str(by_class.value)
