"""Figure 5 of Bi and Shen, Distribution-invariant differential privacy: the error of a parameter as the sample grows, ε = 1.

    python -m pipelines.papers.dip.figure5 [--replicates 1000] [--picture figure5.svg]

The laws and methods of Table 4 with 100 to 2000 rows. The paper draws the curves and prints no numbers; they are printed here,
and drawn on demand (extra `papers`).
"""

from __future__ import annotations

from pathlib import Path

from pipelines.papers.dip.common import Table, parser, report
from pipelines.papers.dip.table4 import LAWS, rows_of

SIZES = (100, 200, 500, 1000, 1500, 2000)
SHOWN = {
    "NP": "NP",
    "DIP": "DIP",
    "LRM": "LRM",
    "OPM": "OPM",
    "resampling": "EXM as the paper has it",
    "private": "DIP, end to end private",
}


def table(replicates: int, seed: int = 1) -> Table:
    rows = [
        row
        for law in LAWS
        for size in SIZES
        for row in rows_of(law, 1.0, replicates, seed, size, f"{law.label}, n = {size}")
    ]
    return Table(
        name="Figure 5",
        title="the mean of discrete values as the sample grows",
        unit=f"Mean absolute error of a parameter, 10⁻³, ± its standard error; ε = 1, {replicates} replicates (paper: 1000, as curves).",
        rows=rows,
        notes=["The paper's EXM is our resampling; see Table 4."],
    )


def curves(found: Table) -> dict[str, dict[str, list[float]]]:
    """Return by law and method the errors by size; `private` is DIP's last column."""
    curves: dict[str, dict[str, list[float]]] = {law.label: {} for law in LAWS}
    for row in found.rows:
        law = curves[row.setting.rsplit(", n = ")[0]]
        law.setdefault(row.method, []).append(row.ours.mean)
        if row.private is not None:
            law.setdefault("private", []).append(row.private.mean)
    return curves


def draw(found: Table, file: Path) -> None:
    """Draw the curves as SVG, one panel for each law; both axes logarithmic."""
    from pipelines.papers.ding_figures import pyplot

    plt = pyplot()
    figure, panels = plt.subplots(2, 2, figsize=(9, 7), layout="constrained")
    for panel, (law, methods) in zip(panels.flat, curves(found).items(), strict=True):
        for name, label in SHOWN.items():
            panel.loglog(SIZES, methods[name], label=label)
        panel.set(title=law, xlabel="rows", ylabel="mean absolute error, 10⁻³")
    panels[0, 0].legend()
    figure.savefig(file, metadata={"Date": None})


def main(arguments: list[str] | None = None) -> None:
    options = parser(__doc__, 100)
    options.add_argument("--picture", type=Path, help="write the curves to this SVG")
    chosen = options.parse_args(arguments)
    found = report(chosen, lambda: table(chosen.replicates, chosen.seed))
    if chosen.picture is not None:
        draw(found, chosen.picture)


if __name__ == "__main__":
    main()
