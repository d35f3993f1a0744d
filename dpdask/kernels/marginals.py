"""Exact contingency counts of coded columns: all pairs in one pass over the rows, and chosen cliques.

Pairs of attributes with few levels are counted 64 rows at a time: every level but the first becomes
a row of bits, and a cell is the population count of two such rows ANDed. The other pairs are
tallied row by row into small private tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]  # llvmlite ships no types; numba brings it
from numba import types
from numba.extending import intrinsic
from numpy import uint64

from dpdask.arrays import Codes, Flags, Floats, Ints, Shorts, Uint32s, Words
from dpdask.kernels.channel import project_each
from dpdask.kernels.jit import jit

MAX_LEVELS = 1 << 16
BLOCK_WORDS = 512
# a block's columns stay in the second-level cache, and a private table's cell fits uint16
BLOCK_ROWS = 64 * BLOCK_WORDS
BIT_CELLS = 256  # up to so many cells ANDs beat the tally of 64 rows (break-even: about 400 with vpopcntq, 110 with AVX2)
PACK_COST = 4  # tallies of a row that making one word of bits costs, at most
TALLY_CELLS = 1 << 14  # four private tables of so many cells stay in the second-level cache
PANEL = 128  # rows of bits that stay in the second-level cache


class PairLayout(NamedTuple):  # numba takes named tuples apart, not dataclasses
    """Where each pair's table lies in the flat array of all of them: pairs (a, b), a < b, lexicographic, tables C-ordered."""

    groups: Ints
    """int64 of shape (n_attributes + 1,): where the first table of each attribute starts; the last is the length."""
    cumulative: Ints
    """int64 of shape (n_attributes + 1,): levels of all attributes before this one."""


class _Plan(NamedTuple):
    """Which pairs are counted by bits; positions are those of the attributes sorted by their levels."""

    order: Ints  # the attribute at each position
    # position p is counted by bits with the positions p + 1 ... partner_end[p] - 1
    partner_end: Ints
    first_bit: Ints  # (n_narrow + 1,): the first row of bits of each narrow position
    bit_from: Ints  # (n_bits,): the row of bits where the partners of this one start
    bit_to: Ints  # (n_bits,): and where they end


def pair_layout(sizes: Sequence[int] | Ints) -> PairLayout:
    """Return where the tables of all pairs lie, for attributes of these numbers of levels."""
    cumulative = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    cells = np.diff(cumulative) * (cumulative[-1] - cumulative[1:])
    return PairLayout(np.concatenate([[0], np.cumsum(cells)]), cumulative)


@jit
def table_start(layout: PairLayout, a: int, b: int) -> int:
    """Return where the table of pair (a, b), a < b, starts."""
    cumulative = layout.cumulative
    return layout.groups[a] + (cumulative[a + 1] - cumulative[a]) * (
        cumulative[b] - cumulative[a + 1]
    )


def count_pairs(codes: Codes, sizes: Ints, out: Ints | None = None) -> Ints:
    """Return the two-way tables of all pairs of attributes, one after the other as `pair_layout` says.

    Parameters
    ----------
    codes
        C-contiguous uint8 or uint16 array of shape (n_attributes, n_rows), row a below sizes[a].
    sizes
        int64 array of shape (n_attributes,), levels of each attribute, 1 to 65,536.
    out
        int64 array of the tables' length, to which the counts are added in place; new zeros if
        None.
    """
    check_codes(codes, sizes, range(len(sizes)))
    layout = pair_layout(sizes)
    out = np.zeros(layout.groups[-1], dtype=np.int64) if out is None else out
    if len(sizes) > 1:
        _count_pairs(codes, layout, _plan(sizes), out)
    return out


def count_clique(codes: Codes, sizes: Ints, clique: Sequence[int], out: Ints | None = None) -> Ints:
    """Return the contingency table of some of the attributes.

    Parameters
    ----------
    clique
        The positions of its attributes, at least one, in the order of the table's axes.
    out
        int64 array of the table's length, to which the counts are added in place; new zeros if
        None.
    """
    check_codes(codes, sizes, clique)
    positions = np.asarray(clique, dtype=np.int64)
    out = np.zeros(np.prod(sizes[positions]), dtype=np.int64) if out is None else out
    _count_clique(codes, sizes, positions, out)
    return out


def check_codes(codes: Codes, sizes: Ints, attributes: Sequence[int]) -> None:
    """Check that each code is one of its attribute's levels: compiled loops check no bounds."""
    for attribute in attributes:
        # the code itself is private and stays out of the message
        if codes[attribute].max(initial=0) >= sizes[attribute]:
            raise ValueError(
                f"attribute {attribute} has a code that is not below its {sizes[attribute]} levels"
            )


def _plan(sizes: Ints) -> _Plan:
    """Return which pairs are counted by bits: those of few cells, of attributes with enough such pairs to pay for packing."""
    order = np.argsort(sizes, kind="stable")
    bits = sizes[order] - 1
    # how many attributes have few enough levels to be counted with this one: both this and `worth` are prefixes of `order`
    partners = np.searchsorted(bits, BIT_CELLS // np.maximum(bits, 1), side="right")
    worth = bits * PACK_COST <= 64 * partners / 2
    n_narrow = int(np.argmin(worth)) if not worth.all() else len(worth)
    positions = np.arange(len(sizes))
    partner_end = np.maximum(np.minimum(partners, n_narrow), positions + 1)
    first_bit = np.concatenate([[0], np.cumsum(bits[:n_narrow], dtype=np.int64)])
    owner = np.repeat(positions[:n_narrow], bits[:n_narrow])
    return _Plan(order, partner_end, first_bit, first_bit[owner + 1], first_bit[partner_end[owner]])


def _popcount_code(_context: Any, word: Any) -> Any:
    """Return the type and the code of the number of set bits of a word (LLVM's ctpop, which becomes vpopcntq where there is one)."""
    return types.uint64(word), lambda _target, builder, _signature, arguments: builder.ctpop(
        arguments[0]
    )


def _matches_code(_context: Any, codes: Any, _start: Any, _level: Any) -> Any:
    """Return the type and the code of a word whose bit r says whether codes[start + r] == level, for 64 codes, one compare."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        vector = ir.VectorType(context.get_data_type(signature.args[0].dtype), 64)
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
        undefined = ir.Constant(vector, ir.Undefined)
        address = builder.bitcast(builder.gep(array.data, [arguments[1]]), vector.as_pointer())
        found = builder.load(address, align=1)
        sought = builder.insert_element(undefined, arguments[2], ir.Constant(ir.IntType(32), 0))
        equal = builder.icmp_unsigned("==", found, builder.shuffle_vector(sought, undefined, zeros))
        return builder.bitcast(equal, ir.IntType(64))

    return types.uint64(codes, types.intp, codes.dtype), build


_popcount: Callable[[uint64], uint64] = intrinsic(_popcount_code)
_matches: Callable[[Codes, int, np.uint8 | np.uint16], uint64] = intrinsic(_matches_code)


@jit
def _count_pairs(codes: Codes, layout: PairLayout, plan: _Plan, out: Ints) -> None:
    n_rows = codes.shape[1]
    n_bits = len(plan.bit_from)
    padded = (n_bits + 3) // 4 * 4  # whole tiles
    bits = np.zeros((padded, BLOCK_WORDS), dtype=uint64)
    ones = np.zeros(n_bits, dtype=np.int64)
    both = np.zeros((padded, padded), dtype=np.uint32)
    keys = np.zeros(BLOCK_ROWS, dtype=np.uint16)
    tables = np.zeros((4, TALLY_CELLS), dtype=np.uint16)
    for start in range(0, n_rows, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, n_rows)
        _pack(codes, start, stop, plan, bits, ones)
        _intersect(bits, (stop - start + 63) // 64, plan, both)
        _tally_pairs(codes, start, stop, layout, plan, keys, tables, out)
    _add_intersections(both, ones, n_rows, layout, plan, out)


@jit
def _pack(codes: Codes, start: int, stop: int, plan: _Plan, bits: Words, ones: Ints) -> None:
    """Write one row of bits per level but the first, and add their population counts to `ones`."""
    whole = (stop - start) // 64
    for position in range(len(plan.first_bit) - 1):
        column = codes[plan.order[position]]
        for row in range(plan.first_bit[position], plan.first_bit[position + 1]):
            level = column.dtype.type(row - plan.first_bit[position] + 1)
            words = bits[row]
            found = uint64(0)
            for word in range(whole):
                words[word] = _matches(column, start + 64 * word, level)
                found += _popcount(words[word])
            if start + 64 * whole < stop:
                last = uint64(0)
                for bit in range(stop - start - 64 * whole):
                    last |= uint64(column[start + 64 * whole + bit] == level) << uint64(bit)
                words[whole] = last
                found += _popcount(last)
            ones[row] += np.int64(found)


@jit
def _intersect(bits: Words, n_words: int, plan: _Plan, both: Uint32s) -> None:
    """Add to both[i, j] the population count of rows i and j ANDed, for all pairs of rows that the plan counts by bits."""
    n_bits = len(plan.bit_from)
    for panel in range(0, n_bits, PANEL):
        for i in range(0, n_bits, 2):
            # tiles are aligned, so none is counted in two panels
            low = max(panel, plan.bit_from[i] // 4 * 4)
            high = min(panel + PANEL, plan.bit_to[i])
            for j in range(low, high, 4):
                _intersect_tile(bits, i, j, n_words, both)


@jit
def _intersect_tile(bits: Words, i: int, j: int, n_words: int, both: Uint32s) -> None:
    """Count 2 x 4 intersections at once, so that a word is loaded once for several of them."""
    a0, a1 = bits[i], bits[i + 1]
    b0, b1, b2, b3 = bits[j], bits[j + 1], bits[j + 2], bits[j + 3]
    n00 = n01 = n02 = n03 = n10 = n11 = n12 = n13 = uint64(0)
    for word in range(n_words):
        x, y = a0[word], a1[word]
        p, q, r, s = b0[word], b1[word], b2[word], b3[word]
        n00 += _popcount(x & p)
        n01 += _popcount(x & q)
        n02 += _popcount(x & r)
        n03 += _popcount(x & s)
        n10 += _popcount(y & p)
        n11 += _popcount(y & q)
        n12 += _popcount(y & r)
        n13 += _popcount(y & s)
    both[i, j] += n00
    both[i, j + 1] += n01
    both[i, j + 2] += n02
    both[i, j + 3] += n03
    both[i + 1, j] += n10
    both[i + 1, j + 1] += n11
    both[i + 1, j + 2] += n12
    both[i + 1, j + 3] += n13


@jit
def _add_intersections(
    both: Uint32s,
    ones: Ints,
    n_rows: int,
    layout: PairLayout,
    plan: _Plan,
    out: Ints,
) -> None:
    """Add the tables of the pairs counted by bits; the first level's cells follow from the margins by subtraction."""
    for p in range(len(plan.first_bit) - 1):
        for q in range(p + 1, plan.partner_end[p]):
            a, b = min(plan.order[p], plan.order[q]), max(plan.order[p], plan.order[q])
            table = out[table_start(layout, a, b) :]
            size_b = layout.cumulative[b + 1] - layout.cumulative[b]
            step_p, step_q = (size_b, 1) if a == plan.order[p] else (1, size_b)
            first_p, n_p = plan.first_bit[p], plan.first_bit[p + 1] - plan.first_bit[p]
            first_q, n_q = plan.first_bit[q], plan.first_bit[q + 1] - plan.first_bit[q]
            corner = n_rows
            for i in range(n_p):
                rest = ones[first_p + i]
                corner -= rest
                for j in range(n_q):
                    count = np.int64(both[first_p + i, first_q + j])
                    table[(i + 1) * step_p + (j + 1) * step_q] += count
                    rest -= count
                table[(i + 1) * step_p] += rest
            for j in range(n_q):
                rest = ones[first_q + j]
                for i in range(n_p):
                    rest -= np.int64(both[first_p + i, first_q + j])
                table[(j + 1) * step_q] += rest
                corner -= rest
            table[0] += corner


@jit
def _tally_pairs(
    codes: Codes,
    start: int,
    stop: int,
    layout: PairLayout,
    plan: _Plan,
    keys: Shorts,
    tables: Shorts,
    out: Ints,
) -> None:
    """Add a block's counts of the pairs that are not counted by bits."""
    n_attributes = len(plan.order)
    for p in range(n_attributes):
        for q in range(plan.partner_end[p], n_attributes):
            a, b = min(plan.order[p], plan.order[q]), max(plan.order[p], plan.order[q])
            size_b = layout.cumulative[b + 1] - layout.cumulative[b]
            cells = (layout.cumulative[a + 1] - layout.cumulative[a]) * size_b
            first = table_start(layout, a, b)
            table = out[first : first + cells]
            if cells <= TALLY_CELLS:
                _tally(codes[a, start:stop], codes[b, start:stop], size_b, keys, tables, table)
            else:
                _tally_directly(codes[a, start:stop], codes[b, start:stop], size_b, table)


@jit
def _tally(
    first: Codes,
    second: Codes,
    width: int,
    keys: Shorts,
    tables: Shorts,
    out: Ints,
) -> None:
    """Count cells in four private tables: rows of one frequent cell would wait for each other's increment in a single one."""
    n_rows = len(first)
    for row in range(n_rows):  # apart from the counting, so that it is vectorised
        keys[row] = np.uint16(np.uint16(first[row]) * np.uint16(width) + np.uint16(second[row]))
    t0, t1, t2, t3 = tables[0], tables[1], tables[2], tables[3]
    quads = keys.view(uint64)
    mask = uint64(0xFFFF)
    for quad in range(n_rows // 4):
        # one load for four keys; which of them meets which table is all the same
        four = quads[quad]
        t0[four & mask] += np.uint16(1)
        t1[(four >> uint64(16)) & mask] += np.uint16(1)
        t2[(four >> uint64(32)) & mask] += np.uint16(1)
        t3[four >> uint64(48)] += np.uint16(1)
    for row in range(n_rows // 4 * 4, n_rows):
        t0[keys[row]] += np.uint16(1)
    for cell in range(len(out)):
        out[cell] += (
            np.int64(t0[cell]) + np.int64(t1[cell]) + np.int64(t2[cell]) + np.int64(t3[cell])
        )
        t0[cell], t1[cell], t2[cell], t3[cell] = 0, 0, 0, 0


@jit
def _tally_directly(first: Codes, second: Codes, width: int, out: Ints) -> None:
    """Count cells where they are kept: private tables of so many would cost more than they save."""
    columns = uint64(width)
    for row in range(len(first)):
        out[uint64(first[row]) * columns + uint64(second[row])] += 1


@jit
def _count_clique(codes: Codes, sizes: Ints, clique: Ints, out: Ints) -> None:
    n_rows = codes.shape[1]
    keys = np.empty(BLOCK_ROWS, dtype=uint64)
    for start in range(0, n_rows, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, n_rows)
        keys[:] = 0
        for attribute in clique:
            size = uint64(sizes[attribute])
            column = codes[attribute, start:stop]
            for row in range(stop - start):
                keys[row] = keys[row] * size + uint64(column[row])
        for row in range(stop - start):
            out[keys[row]] += 1


_RAKING_STEPS = 2000  # what is nearly deterministic converges slowly; the other tables are left alone long before
_RAKING_TOLERANCE = 1e-7
_CHUNK_CELLS = 2**22


def independence(rows: Floats, columns: Floats, total: float) -> Floats:
    """Return the tables of independent attributes: rows (k, m) and columns (k, n) -> (k, m, n), summing to `total`."""
    return rows[:, :, None] * columns[:, None, :] / total


def estimate(tables: Floats, rows: Floats, columns: Floats, total: float, sigma: float) -> Floats:
    """Return noisy tables with the noise taken out, by two estimates mixed in each table as its own risk asks for.

    Parameters
    ----------
    tables
        float64 array of shape (k, m, n): each cell a count plus independent noise.
    rows, columns
        float64 arrays of shapes (k, m) and (k, n): the margins that are believed, each summing to
        `total`.

    Notes
    -----
    With the believed margins Z is the table: independence plus the departure from it, centred in
    both directions, whose noise has d = (m-1)(n-1) dimensions. `shrink_values` takes the noise out
    of the departure's singular values: best where dependence has low rank. `project_stack` takes
    the nearest table without negative counts: best where most cells are empty, as when one
    attribute says the other, a diagonal of full rank. Stein's estimate of the expected squared
    error of an estimate E is |E - Z|² + 2σ²·div(E) - dσ², unbiased, with div(E) the sum of the
    derivatives of E in Z. For a mixture w·E₁ + (1 - w)·E₂ it is quadratic in w, and the w in [0, 1]
    where it is least is taken.

    References
    ----------
    Stein, Estimation of the mean of a multivariate normal distribution (1981), theorem 1.
    """
    _, m, n = tables.shape
    if min(m, n) < 2:
        return independence(rows, columns, total)
    if m > n:
        return estimate(tables.transpose(0, 2, 1), columns, rows, total, sigma).transpose(0, 2, 1)
    step = max(1, _CHUNK_CELLS // (m * n))
    result = independence(rows, columns, total)
    for start in range(0, len(tables), step):
        part = slice(start, start + step)
        departure = tables[part] - result[part]
        departure -= departure.mean(axis=1, keepdims=True)
        departure -= departure.mean(axis=2, keepdims=True)
        shrunken, shrunken_divergence = shrink_values(departure, sigma)
        centred = result[part] + departure
        projected, divergence = project_stack(centred, total)
        projected -= result[part]
        apart = projected - shrunken
        gain = (apart * (departure - shrunken)).sum(axis=(1, 2)) - sigma**2 * (
            divergence - shrunken_divergence
        )
        share = np.clip(gain / np.maximum((apart**2).sum(axis=(1, 2)), 1e-300), 0.0, 1.0)
        result[part] += shrunken + share[:, None, None] * apart
    return result


def tell_dependence(
    tables: Floats, rows: Floats, columns: Floats, total: float, sigma: float
) -> Flags:
    """Return which tables depart from independence by more than noise alone does: bool array of shape (k,).

    Notes
    -----
    The largest singular value of the centred departure is compared with σ(√(m-1) + √(n-1)), the
    edge of the noise's own.
    """
    _, m, n = tables.shape
    if min(m, n) < 2:
        return np.zeros(len(tables), dtype=np.bool_)
    departure = tables - independence(rows, columns, total)
    departure -= departure.mean(axis=1, keepdims=True)
    departure -= departure.mean(axis=2, keepdims=True)
    largest = np.linalg.svd(departure, compute_uv=False)[:, 0]
    return largest > sigma * (np.sqrt(m - 1.0) + np.sqrt(n - 1.0))


def shrink_values(departures: Floats, sigma: float) -> tuple[Floats, Floats]:
    """Return departures from independence with shrunken singular values, and the divergence of that map at each of them.

    Parameters
    ----------
    departures
        float64 array of shape (k, m, n), 2 <= m <= n, centred in both directions.

    Notes
    -----
    A centred departure is a matrix of p·q free entries, p = m-1 and q = n-1, whose noise has
    singular values up to σ(√p + √q). With y a singular value over σ√q and β = p/q, it becomes f(y)
    = √((y²-β-1)² - 4β) / y where y > 1 + √β, and 0 below: the best possible function of the
    singular values for squared error as the matrix grows. Low rank is what dependence looks like:
    one number per level pair would be drowned. The divergence is Σ f'(yᵢ) + (q - p)·Σ f(yᵢ)/yᵢ +
    2·Σ_{i<j} (yᵢf(yᵢ) - yⱼf(yⱼ)) / (yᵢ² - yⱼ²).

    References
    ----------
    Gavish and Donoho, Optimal shrinkage of singular values (2017), equation 7. Candès, Sing-Long
    and Trzasko, Unbiased risk estimates for singular value thresholding (2013), theorem IV.3, for
    the divergence.
    """
    _, m, n = departures.shape
    p, q = m - 1, n - 1
    scale, beta = sigma * np.sqrt(q), p / q
    left, values, right = np.linalg.svd(departures / scale, full_matrices=False)
    values = np.maximum(values[:, :p], 1e-12)
    above = values > 1.0 + np.sqrt(beta)
    kept = np.where(
        above, np.sqrt(np.maximum((values**2 - beta - 1.0) ** 2 - 4.0 * beta, 0.0)) / values, 0.0
    )
    shrunken: Floats = (left[:, :, :p] * kept[:, None, :]) @ right[:, :p] * scale
    slopes = (
        np.divide(
            2.0 * (values**2 - beta - 1.0),
            kept * values,
            out=np.zeros_like(values),
            where=kept > 0.0,
        )
        - kept / values
    )
    gaps = values[:, :, None] ** 2 - values[:, None, :] ** 2
    rises = (values * kept)[:, :, None] - (values * kept)[:, None, :]
    mixed = np.divide(rises, gaps, out=np.zeros_like(gaps), where=np.abs(gaps) > 1e-9)
    divergence: Floats = (
        slopes.sum(axis=1) + (q - p) * (kept / values).sum(axis=1) + mixed.sum(axis=(1, 2))
    )
    return shrunken, divergence


def project_stack(tables: Floats, total: float) -> tuple[Floats, Floats]:
    """Return for each table the nearest without negative counts and with the total, and the divergence of that map.

    Notes
    -----
    As `project`, for a stack. Near a table with support S the map is the projection to
    {zero outside S, sum 0}. Its trace against the centring C is Σ_S C_ss - (1/|S|)·Σ_{s,t in S}
    C_st.
    """
    k, m, n = tables.shape
    flat = tables.reshape(k, -1)
    projected = project_each(flat, np.full(k, total)).reshape(k, m, n)
    support = projected > 0.0
    size = np.maximum(support.sum(axis=(1, 2)), 1)
    along_rows, along_columns = (support.sum(axis=axis) ** 2.0 for axis in (2, 1))
    spread = size - along_rows.sum(axis=1) / n - along_columns.sum(axis=1) / m + size**2 / (m * n)
    divergence: Floats = size * (1.0 - 1.0 / m) * (1.0 - 1.0 / n) - spread / size
    return projected, divergence


def rake(tables: Floats, rows: Floats, columns: Floats, possible: Flags | None = None) -> Floats:
    """Return the tables with the wanted margins that are nearest, in relative entropy, to the given ones' positive parts.

    Parameters
    ----------
    tables
        float64 array of shape (k, m, n); negative cells count as almost empty, so that a margin can
        always be met.
    rows, columns
        float64 arrays of shapes (k, m) and (k, n), non-negative, with one sum for a table's two
        margins.
    possible
        bool array of the shape of the tables; other cells are 0. All if None.

    Notes
    -----
    Iterative proportional fitting (Deming and Stephan 1940). An emptied cell keeps a billionth of
    its share under independence.
    """
    total = np.maximum(rows.sum(axis=1), 1e-300)
    result: Floats = (
        np.maximum(tables, 0.0) + 1e-9 * independence(rows, columns, 1.0) / total[:, None, None]
    )
    if possible is not None:
        result *= possible
    left = np.arange(len(tables))
    for _ in range(_RAKING_STEPS):
        part = result[left]
        for wanted, axis in ((columns[left], 1), (rows[left], 2)):
            found = part.sum(axis=axis)
            factors = np.divide(wanted, found, out=np.zeros_like(wanted), where=found > 0.0)
            part = part * np.expand_dims(factors, axis)
        result[left] = part
        missed = np.abs(part.sum(axis=1) - columns[left]).max(axis=1)
        left = left[missed > _RAKING_TOLERANCE * total[left]]
        if not len(left):
            break
    return result


def mutual_information(tables: Floats) -> Floats:
    """Return the mutual information, in nats, of each table's two attributes: (k, m, n) -> (k,), non-negative."""
    share = tables / np.maximum(tables.sum(axis=(1, 2), keepdims=True), 1e-300)
    independent = share.sum(axis=2, keepdims=True) * share.sum(axis=1, keepdims=True)
    ratio = np.divide(
        share, independent, out=np.ones_like(share), where=(share > 0.0) & (independent > 0.0)
    )
    information: Floats = (share * np.log(ratio)).sum(axis=(1, 2))
    return np.maximum(information, 0.0)


class PersonPlan(NamedTuple):
    """Where the tables of persons and their rows begin, and what a person of k rows adds to a cell."""

    parents: Ints  # of shape (n_parents,): how many levels each column has
    children: Ints
    bands: Ints  # of shape (max_rows + 1,): the band of each number of rows
    rows: Ints  # of that shape: the weight of each row
    pairs: Ints  # of that shape: the weight of each ordered pair of rows


@jit
def _add_of_parents(own: Ints, sizes: Ints, out: Ints) -> None:
    """Count one person in the table of each two columns, one after the other, or in that of the only column."""
    start, n = 0, len(sizes)
    if n == 1:
        out[own[0]] += 1
    for a in range(n):
        for b in range(a + 1, n):
            out[start + own[a] * sizes[b] + own[b]] += 1
            start += sizes[a] * sizes[b]


@jit
def _add_of_rows(codes: Codes, first: int, last: int, sizes: Ints, weight: int, out: Ints) -> None:
    """Count the rows of one person in the table of each two columns, or in that of the only column."""
    start, n = 0, len(sizes)
    if n == 1:
        for row in range(first, last):
            out[codes[0, row]] += weight
    for c in range(n):
        for d in range(c + 1, n):
            for row in range(first, last):
                out[start + np.int64(codes[c, row]) * sizes[d] + codes[d, row]] += weight
            start += sizes[c] * sizes[d]


@jit
def _add_of_pairs(codes: Codes, first: int, last: int, sizes: Ints, weight: int, out: Ints) -> None:
    """Count the ordered pairs of two rows of one person in the table of each two columns, or of a column and itself."""
    start, n = 0, len(sizes)
    for c in range(n):
        for d in range(c, n):
            size = sizes[d]
            for one in range(first, last):
                place = start + np.int64(codes[c, one]) * size
                for other in range(first, last):
                    if other != one:
                        out[place + codes[d, other]] += weight
            start += sizes[c] * size


@jit
def count_persons(
    parents: Codes,
    children: Codes,
    starts: Ints,
    plan: PersonPlan,
    pp: Ints,
    cc: Ints,
    pc: Ints,
    ww: Ints,
    flags: Ints,
    n_rows: Ints,
) -> None:
    """Add persons to the tables of their columns, flat and one after the other; see `stats.people.PersonCounts`.

    Parameters
    ----------
    parents, children
        Codes of shape (n_parents, n_persons) and (n_children, n_rows): the last parent column is
        not read, since it is the band of the number of rows.
    starts
        int64 array of shape (n_persons + 1,): where the rows of each person begin.
    """
    own = np.empty(len(plan.parents), dtype=np.int64)
    n_bands, n_children = plan.parents[-1], len(plan.children)
    for person in range(len(starts) - 1):
        first, last = starts[person], starts[person + 1]
        k = last - first
        for a in range(len(parents)):
            own[a] = parents[a, person]
        own[len(own) - 1] = plan.bands[k]
        n_rows[k] += 1
        _add_of_parents(own, plan.parents, pp)
        if k == 0:
            continue
        _add_of_rows(children, first, last, plan.children, plan.rows[k], cc)
        start = 0
        for a in range(len(own)):
            for c in range(n_children):
                place = start + own[a] * plan.children[c]
                for row in range(first, last):
                    pc[place + children[c, row]] += plan.rows[k]
                start += plan.parents[a] * plan.children[c]
        if k < 2:
            continue
        _add_of_pairs(children, first, last, plan.children, plan.pairs[k], ww)
        for c in range(n_children):
            row = first + 1
            while row < last and children[c, row] == children[c, first]:
                row += 1
            if row == last:
                flags[c * n_bands + plan.bands[k]] += 1
