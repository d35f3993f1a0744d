"""Six small releases of a simulated table, and a picture of the table beside one of them.

    python -m pipelines.gallery.make release FOLDER      # FOLDER/NAME is the output of each job
    python -m pipelines.gallery.make picture docs/assets/picture.svg

The table is simulated from a fixed seed, so it is public. The noise is fresh: no two releases are the same.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pandas as pd
import yaml

from dpdask.jobs.run import run_job
from dpdask.jobs.spec import load_job

N_ROWS = 20_000
REGIONS = ["north", "east", "south", "west"]
SMOKES = ["never", "before", "now"]
COLUMNS: dict[str, dict[str, Any]] = {
    "age": {"role": "privatise", "kind": "continuous", "bounds": [18, 95]},
    "region": {"role": "privatise", "kind": "categorical", "levels": REGIONS},
    "smokes": {"role": "privatise", "kind": "categorical", "levels": SMOKES},
    "visits": {"role": "privatise", "kind": "discrete", "levels": list(range(9))},
    "weight": {"role": "privatise", "kind": "continuous", "bounds": [30.0, 160.0]},
    "cost": {"role": "privatise", "kind": "continuous", "bounds": [0.0, 4000.0]},
}
EPSILON = {"epsilon": 1.0, "delta": 1e-6, "adjacency": "replace-one"}


def simulate() -> pd.DataFrame:
    """Return simulated patients, and a key that three rows share."""
    rng = np.random.default_rng(20)
    age = np.clip(
        np.round(np.where(rng.random(N_ROWS) < 0.4, 34, 63) + 11 * rng.normal(size=N_ROWS)), 18, 95
    )
    smokes = np.digitize(rng.random(N_ROWS) + (age - 50) / 200, [0.55, 0.8])
    visits = np.minimum(rng.poisson(0.6 + age / 35 + 0.8 * (smokes == 2)), 8)
    weight = np.clip(74 + 0.08 * (age - 50) + 13 * rng.normal(size=N_ROWS), 30, 160).round(1)
    cost = np.clip(np.exp(4.6 + 0.25 * visits + 0.7 * rng.normal(size=N_ROWS)), 0, 4000).round(2)
    table = {
        "patient": rng.permutation(N_ROWS) // 3,
        "age": age.astype(int),
        "region": rng.choice(REGIONS, N_ROWS, p=[0.4, 0.3, 0.2, 0.1]),
        "smokes": np.array(SMOKES)[smokes],
        "visits": visits,
    }
    return pd.DataFrame(table | {"weight": weight, "cost": cost})


def list_jobs() -> dict[str, dict[str, Any]]:
    """Return by name what differs of each job: its mechanism, its privacy, and columns with another role."""
    keep, drop = {"role": "keep"}, {"role": "drop"}
    anchors = {"name": "uniform", "loc": 0, "scale": 4000}
    unit = {"column": "patient", "max_rows": 3}
    design = {"design": "case2", "anchors": anchors}
    ranges = {**COLUMNS["cost"], "outside": "refuse"}
    return {
        "dip": {
            "mechanism": {"kind": "dip", "reference": {"kind": "histogram"}, "channel": "optimal"},
            "privacy": {**EPSILON, "epsilon": 4.0, "delta": 0},
            "columns": {"region": keep, "age": drop, "weight": drop},
        },
        "copula": {"mechanism": {"kind": "copula"}, "privacy": EPSILON, "columns": {}},
        "patients": {
            "mechanism": {"kind": "copula"},
            "privacy": {**EPSILON, "epsilon": 3.0, "unit": unit},
            "columns": {"patient": drop},
        },
        "marginals": {
            "mechanism": {
                "kind": "marginals",
                "cliques": [["region", "smokes"], ["visits", "smokes"]],
            },
            "privacy": {**EPSILON, "delta": 0},
            "columns": {"age": drop, "weight": drop, "cost": drop},
        },
        "histogram": {
            "mechanism": {"kind": "histogram", "bins": {"cost": 20}},
            "privacy": {**EPSILON, "delta": 0},
            "columns": {"age": drop, "weight": drop, "region": drop, "smokes": drop},
        },
        "interval": {
            "mechanism": {"kind": "interval", "columns": {"cost": design}},
            "columns": dict.fromkeys(COLUMNS, keep) | {"cost": ranges},
        },
    }


def release(folder: Path, names: tuple[str, ...] = ()) -> dict[str, Path]:
    """Run the jobs, or some of them, and return their outputs by name."""
    folder.mkdir(parents=True, exist_ok=True)
    simulate().to_parquet(folder / "patients.parquet", index=False)
    found = {}
    for name, changes in list_jobs().items():
        if names and name not in names:
            continue
        columns = {"patient": {"role": "drop"}, **COLUMNS, **changes["columns"]}
        job = {key: value for key, value in changes.items() if key != "columns"} | {
            "name": name,
            "input": {"path": "patients.parquet"},
            "output": {"path": name},
            "schema": f"{name}.schema.yaml",
        }
        for end, content in ((".schema.yaml", {"columns": columns}), (".yaml", job)):
            (folder / f"{name}{end}").write_text(yaml.safe_dump(content, sort_keys=False))
        with dask.config.set(scheduler="synchronous"):
            run_job(load_job(folder / f"{name}.yaml"))
        found[name] = folder / name
    return found


# ---- the picture

BEFORE, AFTER = "#9aa5b1", "#0f766e"
WIDTH, HEIGHT, GAP, TOP = 200, 96, 24, 58


def draw(original: pd.DataFrame, released: pd.DataFrame) -> str:
    """Return six histograms, in each the original beside the release, as SVG."""
    parts = [
        f'<rect x="4" y="12" width="12" height="12" fill="{BEFORE}"/><text x="22" y="23">original, 20,000 simulated patients</text>',
        f'<rect x="274" y="12" width="12" height="12" fill="{AFTER}"/><text x="292" y="23">synthetic records, ε = 1, every row protected</text>',
    ]
    for place, name in enumerate(COLUMNS):
        left, top = place % 3 * (WIDTH + GAP) + 4, TOP + place // 3 * (HEIGHT + 52)
        parts += [f'<text x="{left}" y="{top - 6}" font-weight="bold">{name}</text>']
        parts += draw_column(name, left, top, [_count(name, rows) for rows in (original, released)])
    size = 3 * WIDTH + 2 * GAP + 8, TOP + 2 * HEIGHT + 52 + 22
    text = "Six histograms, of each column one, with the original table and the synthetic records side by side: they nearly agree"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" role="img" aria-label="{text}" font-family="sans-serif" font-size="13" fill="#1f2933">'
    return "\n".join(
        [head, f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>', *parts, "</svg>", ""]
    )


def _count(name: str, rows: pd.DataFrame) -> np.ndarray:
    """Return the share of each bar."""
    column = COLUMNS[name]
    if "levels" in column:
        counts = rows[name].value_counts().reindex(column["levels"], fill_value=0).to_numpy()
    else:
        low, high = column["bounds"] if name != "cost" else (0.0, 1000.0)
        counts = np.histogram(np.clip(rows[name].astype(float), low, high), 14, (low, high))[0]
    return counts / counts.sum()


def draw_column(name: str, left: float, top: float, shares: list[np.ndarray]) -> Iterator[str]:
    """Yield the bars of a column and the ends of its axis."""
    n, most = len(shares[0]), max(float(each.max()) for each in shares)
    step = WIDTH / n
    for k in range(n):
        for side, (share, colour) in enumerate(zip(shares, (BEFORE, AFTER), strict=True)):
            height = HEIGHT * float(share[k]) / most
            x, y = left + (k + 0.08 + 0.42 * side) * step, top + HEIGHT - height
            yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{0.42 * step:.1f}" height="{height:.1f}" fill="{colour}"/>'
    column: Mapping[str, Any] = COLUMNS[name]
    below = top + HEIGHT + 16
    if "levels" in column:
        for k, level in enumerate(column["levels"]):
            yield f'<text x="{left + (k + 0.5) * step:.1f}" y="{below}" text-anchor="middle" font-size="11">{level}</text>'
        return
    low, high = ("0", "1,000 or more") if name == "cost" else map("{:g}".format, column["bounds"])
    yield f'<text x="{left}" y="{below}" font-size="11">{low}</text>'
    yield f'<text x="{left + WIDTH}" y="{below}" text-anchor="end" font-size="11">{high}</text>'


def main(verb: str, target: str) -> None:
    """Make the releases or the picture."""
    if verb == "release":
        print(*release(Path(target)).values(), sep="\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        out = release(Path(folder), ("copula",))["copula"]
        Path(target).write_text(draw(simulate(), pd.read_parquet(out)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
