"""A progressive survey of two amounts, after the one in section IV-C of Ding and Ding: its form, and its release.

    python pipelines/survey/make_form.py form FORM.html [--own-tau]
    python pipelines/survey/make_form.py ingest FOLDER RELEASE.parquet

`form` writes the page that every respondent is given. `ingest` reads the files that respondents saved (`*.json` in FOLDER),
writes their ranges with the release card beside them, and prints what the ranges say of each amount's distribution.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd

import dpdask
from dpdask.inference.range_estimates import npmle
from dpdask.stats.ranges import RangeCounts, grid_of_ranges

AMOUNT = {"role": "privatise", "kind": "continuous", "type": "int64", "bounds": [0, 10_000_000]}
WORDING = {
    "salary": {"of": "your yearly salary before tax", "unit": "dollars"},
    "cash": {"of": "the cash that you could spend today", "unit": "dollars"},
}
# public guesses: they decide how soon a form stops asking, never whether a range is true
REFERENCES = {
    "salary": {"name": "lognorm", "s": 0.7, "scale": 50_000},
    "cash": {"name": "lognorm", "s": 1.5, "scale": 10_000},
}
QUARTERS = (0.25, 0.5, 0.75)


def survey() -> dpdask.Survey:
    """Return the survey: three rounds at most, and no range of less than a twentieth of all people."""
    designs = {
        name: {
            "design": "progressive",
            "anchors": reference,
            "reference": reference,
            "tau": 0.05,
            "rounds": 3,
        }
        for name, reference in REFERENCES.items()
    }
    return dpdask.Survey(
        dpdask.Schema.from_dict({"columns": dict.fromkeys(designs, AMOUNT)}),
        columns=designs,
        wording=WORDING,
    )


def quarters(released: pd.DataFrame, name: str) -> list[float]:
    """Return the quartiles that the ranges of a column are most likely to come from."""
    lower, upper = (released[f"{name}_{end}"].to_numpy() for end in ("lower", "upper"))
    counts = RangeCounts.of_batch(grid_of_ranges(lower, upper), lower, upper)
    return [
        float(quantile)
        for quantile in npmle(
            counts, support=(0.0, AMOUNT["bounds"][1]), max_ambiguity=1.0
        ).quantile(np.array(QUARTERS))
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    form = verbs.add_parser("form")
    form.add_argument("page", type=Path)
    form.add_argument(
        "--own-tau",
        action="store_true",
        help="let respondents choose the least coverage of their ranges",
    )
    ingest = verbs.add_parser("ingest")
    ingest.add_argument("folder", type=Path)
    ingest.add_argument("release", type=Path)
    given = parser.parse_args(arguments)
    made = survey()
    if given.verb == "form":
        given.page.write_text(
            made.form(title="Two questions about money", own_tau=given.own_tau), encoding="utf-8"
        )
        return
    answers = sorted(given.folder.glob("*.json"))
    if not answers:
        parser.error(f"{given.folder}: there is no answer (*.json) here; check the folder")
    released = made.ingest(answers)
    found = {
        name: quarters(released, name) for name in REFERENCES
    }  # before anything is written: it may be refused
    released.to_parquet(given.release, index=False)
    given.release.with_suffix(".card.json").write_text(
        json.dumps(made.card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    for name, quartiles in found.items():
        print(
            name,
            *(f"{q:.0%}: {quartile:,.0f}" for q, quartile in zip(QUARTERS, quartiles, strict=True)),
        )


if __name__ == "__main__":
    main()
