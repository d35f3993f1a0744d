"""One pass over a table for all its contingency tables: exact counts, merged in a tree, for the driver alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from dask import delayed
from numpy.typing import NDArray

from dpdask.cells import Cells
from dpdask.codec import LevelCodec
from dpdask.engine.choose import Chooser
from dpdask.engine.compute import Progress, guarded, run_tasks, task_prefix
from dpdask.engine.reduce import tree_reduce
from dpdask.engine.seal import Seal
from dpdask.engine.work import TableWork
from dpdask.errors import SpecError
from dpdask.io.fragments import Fragment, read_batches
from dpdask.kernels.marginals import MAX_LEVELS
from dpdask.mechanisms.copula.model import MAX_LATENTS, n_latents_of
from dpdask.stats import Clique, Domain, MarginalCounter, Marginals

MAX_CELLS = 2**27  # a gigabyte of counts; each worker holds a few such
_MAX_TABLE = 2**24
_LARGE_CELLS = 2**20
_LARGE_ROWS = 2**19


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Which tables to count.

    Attributes
    ----------
    cliques
        Chosen ones, of any number of attributes.
    two_way
        Whether all pairs are counted.
    """

    cliques: tuple[Clique, ...] = ()
    two_way: bool = True


ALL_PAIRS = Tables()


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What every counting task needs: one node of the graph, however many tasks there are.

    Attributes
    ----------
    work
        The work on the table.
    tables
        What is counted.
    released
        Whether the rows that are counted are released later: then what is seen of them is sealed now.
    """

    work: TableWork
    tables: Tables
    released: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # Dask logs the arguments of a task that failed
class Tabulated:
    """The counts of one pass; private, and kept by the driver.

    Attributes
    ----------
    counts
        The tables.
    n_released
        For each fragment, in order, how many of its rows are counted: all, or with units those within their bounds.
    changed
        For each column, how many values were outside its domain and were changed. It lists only columns with such values, and
        is empty if the writing stage reads the rows again and counts them itself.
    """

    counts: Marginals
    n_released: tuple[int, ...]
    changed: Mapping[str, int] = field(default_factory=dict)


def shared_work(work: TableWork, tables: Tables, *, released: bool = False) -> Any:
    """Return the one node of a graph that all counting tasks share."""
    return delayed(Counted(work=work, tables=tables, released=released), pure=False, traverse=False, name=task_prefix("work"))


def domain_of(cells: Mapping[str, Cells]) -> Domain:
    """Return the attributes and their numbers of levels.

    Raises
    ------
    SpecError
        If one has more cells than a code can tell apart.
    """
    for name, column in cells.items():
        if column.size > MAX_LEVELS:
            raise SpecError(f"has {column.size:,} cells, and {MAX_LEVELS:,} can be told apart", f"column {name!r}", "declare fewer bins for it")
    return Domain(names=tuple(cells), sizes=tuple(column.size for column in cells.values()))


def check_size(domain: Domain, tables: Tables, bins: str = "mechanism.bins") -> None:
    """Check that the tables can be held.

    Parameters
    ----------
    domain
        The attributes.
    tables
        What is to be counted.
    bins
        Where a job says how columns are cut.

    Raises
    ------
    SpecError
        If one table, or all together, are too large; the line names the largest and says how to bin it.
    """
    sizes = sorted(zip(domain.sizes, domain.names, strict=True), reverse=True)
    chosen = [(domain.size_of(clique), clique) for clique in tables.cliques]
    if tables.two_way and len(sizes) > 1:
        chosen.append((sizes[0][0] * sizes[1][0], (sizes[0][1], sizes[1][1])))
    largest, clique = max(chosen, default=(sizes[0][0], (sizes[0][1],)))
    total = sum(size for size, _ in chosen[: len(tables.cliques)])
    if tables.two_way:
        total += (sum(domain.sizes) ** 2 - sum(size * size for size in domain.sizes)) // 2
    if largest <= _MAX_TABLE and total <= MAX_CELLS:
        return
    where = "the table " + " x ".join(repr(name) for name in clique)
    if largest > _MAX_TABLE:
        what = f"it has {largest:,} cells, and {_MAX_TABLE:,} can be held"
    else:
        where, what = f"{where} and the others", f"they have {total:,} cells together, and {MAX_CELLS:,} can be held"
    raise SpecError(what, where, f"lower {bins} for its columns, declare fewer levels, or drop a column")


def check_latents(domain: Domain) -> None:
    """Check that a copula of these attributes can be fitted.

    Raises
    ------
    SpecError
        If its latent variables are too many; the line names the widest column.
    """
    n_latents = sum(map(n_latents_of, domain.sizes))
    if n_latents > MAX_LATENTS:
        widest = domain.names[domain.sizes.index(max(domain.sizes))]
        what = f"its levels and cells and those of the others are {n_latents:,} latent variables, and {MAX_LATENTS:,} can be fitted"
        raise SpecError(what, f"column {widest!r}", "lower mechanism.bins, declare fewer levels, or drop a column")


def encoded(batch: pa.RecordBatch, cells: Mapping[str, Cells], domain: Domain, chosen: NDArray[np.bool_]) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Return the codes of the chosen rows of a batch, shape (n_attributes, n_chosen), after checking every row.

    Raises
    ------
    DataError
        If a value violates the schema.
    """
    every = bool(chosen.all())
    codes = np.empty((domain.n_attributes, batch.num_rows if every else int(chosen.sum())), dtype=domain.code_dtype)
    for place, (name, column) in enumerate(cells.items()):
        array = batch.column(name)
        found = column.codec.encode(array) if isinstance(column.codec, LevelCodec) else column.codes(array)
        codes[place] = found if every else found[chosen]
    return codes


def changed_values(batch: pa.RecordBatch, work: TableWork) -> Counter[str]:
    """Return how many values of each privatised column are outside its domain and are changed: private."""
    found = {name: codec.n_outside(batch.column(name)) for name, codec in work.codecs.items()}
    return Counter({name: n for name, n in found.items() if n})


def tabulate_batches(
    batches: Iterable[pa.RecordBatch], chooser: Chooser, counted: Counted, counter: MarginalCounter
) -> tuple[int, Mapping[str, int]]:
    """Count the chosen rows of one fragment; return their number, and how many values were changed, as in `Tabulated`.

    Raises
    ------
    DataError
        If a value violates the schema, or a row's unit is null.
    """
    work, n_rows, changed = counted.work, 0, Counter[str]()
    domain = domain_of(work.cells)
    for batch in batches:
        codes = encoded(batch, work.cells, domain, chooser.split(batch)[0])
        counter.add(codes)
        n_rows += codes.shape[1]
        changed += Counter() if counted.released else changed_values(batch, work)
    return n_rows, changed


@guarded
def tabulate_fragments(fragments: tuple[Fragment, ...], counted: Counted) -> Tabulated:
    """Return the tables of neighbouring fragments of files; where another pass sees their rows too, each fragment is sealed."""
    work, tables = counted.work, counted.tables
    counter = MarginalCounter(domain_of(work.cells), tables.cliques, two_way=tables.two_way)
    n_released, changed = [], Counter[str]()
    for fragment in fragments:
        chooser = Chooser(work, fragment.id, fragment.number)
        n_rows, found = tabulate_batches(sealed_batches(fragment, work, released=counted.released), chooser, counted, counter)
        n_released.append(n_rows)
        changed += Counter(found)
        if counted.released:
            chooser.keep()
    return Tabulated(counts=counter.result(), n_released=tuple(n_released), changed=changed)


def sealed_batches(fragment: Fragment, work: TableWork, *, released: bool = False) -> Iterator[pa.RecordBatch]:
    """Yield a fragment's rows; where another pass sees them too, they must be the same in both.

    Raises
    ------
    InputError
        At the end, if they are not: then nothing that was counted may be kept.
    """
    if work.unit is None and not released:  # one pass is all that sees the rows
        yield from read_batches(fragment, work.sealed, work.types)
        return
    seal = Seal(work.sealed)
    for batch in read_batches(fragment, work.sealed, work.types):
        seal.add(batch)
        yield batch
    seal.check(work.secrets, fragment.id, fragment.where)


@guarded
def merge_tables(parts: list[Tabulated]) -> Tabulated:
    """Return the tables of neighbouring fragments together."""
    first, *others = (part.counts for part in parts)
    changed = sum((Counter(part.changed) for part in parts), Counter[str]())
    return Tabulated(counts=first.merge(*others), n_released=tuple(n for part in parts for n in part.n_released), changed=changed)


def tabulate(
    fragments: tuple[Fragment, ...], work: TableWork, tables: Tables, progress: Progress | None = None, *, released: bool = False
) -> Tabulated:
    """Return the tables of a whole table of files: one read of the privatised columns.

    Parameters
    ----------
    fragments
        In the order of the rows.
    work, tables, released
        As for `Counted`.
    progress
        Called with (stage, done, total).

    Raises
    ------
    DataError
        If a value violates the schema.
    InputError
        If a file is missing, unreadable, or changed.
    """
    prefix = task_prefix("tabulate")
    shared = shared_work(work, tables, released=released)
    call = delayed(tabulate_fragments, pure=False)
    groups = _grouped(fragments, domain_of(work.cells))
    leaves = [call(group, shared, dask_key_name=f"{prefix}-{number}") for number, group in enumerate(groups)]
    return merged(leaves, progress)


def merged(leaves: Sequence[object], progress: Progress | None = None) -> Tabulated:
    """Compute delayed tables and return them together: the barrier."""
    [result] = run_tasks("tabulate", [tree_reduce(leaves, merge_tables, task_prefix("merge"))], progress)
    assert isinstance(result, Tabulated)
    return result


def _grouped(fragments: tuple[Fragment, ...], domain: Domain) -> list[tuple[Fragment, ...]]:
    """Return the fragments as tasks: one each, or for large tables enough rows to make merging worthwhile; at least one task."""
    large = (sum(domain.sizes) ** 2) // 2 > _LARGE_CELLS
    groups: list[list[Fragment]] = []
    rows = 0
    for fragment in fragments:
        size = _LARGE_ROWS if fragment.n_rows is None else fragment.n_rows
        if not groups or not large or rows + size > _LARGE_ROWS:
            groups.append([])
            rows = 0
        groups[-1].append(fragment)
        rows += size
    return [tuple(group) for group in groups] or [()]
