"""Exact contingency tables of a frame. They are private: only for those who may see the rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dpdask.cells import DEFAULT_BINS, cut_columns
from dpdask.codec import codec_for
from dpdask.engine.scan import scan
from dpdask.engine.source import Frame, FrameSource, find_meta, find_types
from dpdask.engine.work import TableWork
from dpdask.errors import SpecError
from dpdask.estimators.frames import check_objects, close_secrets, declare_counted, open_secrets
from dpdask.references.histogram import as_fixed_bins
from dpdask.schema import Schema
from dpdask.stats import Clique, MarginalCounts
from dpdask.stats.marginals import TableStatistic


def exact_marginals(
    frame: Frame,
    schema: Schema,
    cliques: Iterable[Sequence[str]] | None = None,
    *,
    bins: int | Mapping[str, int | Sequence[float]] = DEFAULT_BINS,
) -> MarginalCounts:
    """Return the EXACT contingency tables of a frame, in one pass. They are private: only for those who may see the rows.

    Parameters
    ----------
    frame
        A Dask or pandas frame.
    schema
        The declared columns; the privatised ones are counted.
    cliques
        The tables, each a tuple of columns; by default every column and every pair of columns.
    bins
        How continuous and mixed columns are cut: a number of cells of equal width, or for each
        column such a number or a list of the first value of each cell.

    Returns
    -------
    MarginalCounts
        `.table(("age", "sex"))` is an int64 array with an axis for each column: levels in the
        schema's order, null first.

    Raises
    ------
    DataError, SpecError
        If the frame violates the schema, or a table is too large to hold.

    Privacy
    -------
    None: the counts are exact. `dpdask.Marginals` releases tables with noise.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": {"role": "privatise", "kind": "discrete", "levels": [0, 1]}}})
    >>> dpdask.exact_marginals(pd.DataFrame({"x": [0, 1, 1]}), schema).table(("x",)).tolist()
    [1, 2]
    """
    place = open_secrets(None)
    try:
        declared = declare_counted(find_meta(frame), schema)
        types = find_types(frame, declared)
        check_objects(frame, types, declared)
        released = declared.select_released(types)
        codecs = {
            name: codec_for(name, declared.columns[name], released.field(name).type)
            for name in declared.privatised
        }
        try:
            fixed: Any = as_fixed_bins(bins)
        except ValueError as error:
            raise SpecError(str(error), "`bins`", "correct them") from None
        cells = cut_columns(codecs, fixed)
        chosen = _check_cliques(cliques or (), cells)
        statistic = TableStatistic(cells=cells, cliques=chosen, two_way=cliques is None)
        statistic.check_size()
        work = TableWork(
            types=types, released=released, codecs=codecs, fraction=None, secrets=place
        )
        return scan(FrameSource(frame, "frame"), work, statistic, "tabulate").value
    finally:
        close_secrets(place)


def _check_cliques(
    cliques: Iterable[Sequence[str]], columns: Collection[str]
) -> tuple[Clique, ...]:
    chosen = []
    for clique in cliques:
        if isinstance(clique, str) or not clique or len(set(clique)) < len(clique):
            what = "a table is a tuple of one or more different columns"
            raise SpecError(what, f"`cliques`, {clique!r}", "correct it")
        for name in clique:
            if name not in columns:
                hint = "correct its name, or its role in the schema"
                raise SpecError("is not a privatised column", f"`cliques`, {name!r}", hint)
        chosen.append(tuple(clique))
    return tuple(chosen)
