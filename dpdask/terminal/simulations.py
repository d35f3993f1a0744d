"""The verbs of `dpdask simulate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpdask.errors import UsageError, say_count
from dpdask.terminal import options
from dpdask.terminal.echo import echo

if TYPE_CHECKING:
    from dpdask.terminal.progress import LogFormat

_ATTRIBUTES = 27  # of a census, as `dpdask.simulate` has them, which is slow to import


@click.group()
def simulate() -> None:
    """Write a table of a known shape, for demos and benchmarks."""


@simulate.command()
@click.option("--rows", "n_rows", type=int, required=True, help="Number of ratings.")
@click.option(
    "--users",
    "n_users",
    type=int,
    help="Number of users; by default in proportion to the ratings, as in MovieLens-25M.",
)
@click.option("--movies", "n_movies", type=int, help="Number of movies.")
@options.seed
@click.option("--rows-per-file", type=int, default=1_000_000, show_default=True)
@click.option("--out", required=True, help="A new folder.")
@options.log_format
def movielens(out: str, log_format: LogFormat, **sizes: Any) -> None:
    """Write simulated ratings like those of MovieLens-25M: the same rating frequencies, and similarly active users and movies."""
    from dpdask.simulate import simulate_movielens
    from dpdask.terminal.progress import show_progress

    with show_progress(log_format) as report:
        written = simulate_movielens(out, **sizes, on_file=partial(report, "simulate"))
    echo(
        f"{out}: {written['rows']:,} simulated ratings of {written['users']:,} users in {say_count(int(written['files']), 'file')}"
    )


@simulate.command()
@click.option("--rows", "n_rows", type=int, required=True, help="Number of people.")
@click.option(
    "--attributes",
    "n_attributes",
    type=int,
    default=_ATTRIBUTES,
    show_default=True,
    help="Number of columns.",
)
@click.option(
    "--levels",
    "n_levels",
    type=int,
    help="Number of levels of all attributes together; by default in proportion to 674 levels for 27 attributes.",
)
@click.option("--binary", is_flag=True, help="Two levels for every attribute.")
@options.seed
@click.option("--rows-per-file", type=int, default=1 << 20, show_default=True)
@click.option("--out", required=True, help="A new folder; the schema is written beside it.")
@options.log_format
def census(out: str, binary: bool, log_format: LogFormat, **sizes: Any) -> None:
    """Write a simulated census table: columns with strong, weak and no dependence, and pairs of levels that never occur."""
    from dpdask.simulate import simulate_census
    from dpdask.terminal.progress import show_progress

    if binary and sizes["n_levels"] is not None:
        raise UsageError("cannot be combined with --levels", "--binary", "give one of the two")
    if binary:
        sizes["n_levels"] = 2 * sizes["n_attributes"]
    with show_progress(log_format) as report:
        written = simulate_census(out, **sizes, on_file=partial(report, "simulate"))
    size = f"{written['rows']:,} simulated people, {written['attributes']:,} attributes of {written['levels']:,} levels"
    echo(
        f"{out}: {size}, in {say_count(int(written['files']), 'file')}; schema {written['schema']}"
    )


_DEMO = {
    "schema.yaml": """\
columns:
  userId: {role: keep}       # public: copied
  movieId: {role: keep}
  rating: {role: privatise, kind: discrete, levels: [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0]}
  timestamp: {role: drop}    # never released
""",
    "job.yaml": """\
name: ratings
input: {path: ratings}
output: {path: released}
schema: schema.yaml
privacy: {epsilon: 1.0, delta: 0, adjacency: replace-one, unit: row}
mechanism: {kind: dip, reference: {kind: histogram}, channel: optimal}
cluster: {kind: threads}
""",
}
_DEMO_ROWS = 100_000


def write_demo(folder: str) -> Path:
    """Write a simulated table, its schema and a job that covers every row into a folder, and return the job; what is there already stays."""
    from dpdask.documents import write_new
    from dpdask.simulate import simulate_movielens

    place = Path(folder)
    if not any(place.glob("ratings/*.parquet")):
        simulate_movielens(str(place / "ratings"), n_rows=_DEMO_ROWS, seed=0)
    files = {place / name: text for name, text in _DEMO.items()}
    write_new({str(file): text for file, text in files.items() if not file.exists()})
    return place / "job.yaml"
