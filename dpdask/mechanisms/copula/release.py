"""A fitted copula with all that sampling elsewhere needs: no row, no exact count, no key; safe to publish."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Contents, Named, require
from dpdask.arrays import Codes, Flags, freeze_class
from dpdask.cells import CutColumns
from dpdask.errors import SpecError
from dpdask.mechanisms.columns import (
    CHUNK_ROWS,
    ReleasedCounts,
    draw_records,
)
from dpdask.mechanisms.copula.fit import FitReport
from dpdask.mechanisms.copula.model import (
    CopulaModel,
    Targets,
    by_latents,
    check_latents,
    check_met,
    read_factor,
    read_nodes,
    write_factor,
    write_nodes,
)
from dpdask.mechanisms.copula.places import Places
from dpdask.mechanisms.marginals.noise import NoisyMarginals
from dpdask.rules import MOST_MET, CellRules, Condition, Given
from dpdask.streams import RunKey, Stream, words

if TYPE_CHECKING:
    import pandas as pd


@freeze_class(eq=False)
class FittedCopula(ReleasedCounts):
    """A copula with the noisy tables that it was fitted to, and the columns that its codes stand for."""

    archive: ClassVar = Archive(
        kind="copula", format=6, noun="fitted copula", is_compressed=True, oldest=5
    )

    counts_type: ClassVar = NoisyMarginals

    noisy: NoisyMarginals
    model: CopulaModel
    report: FitReport

    @property
    def types(self) -> pa.Schema:
        """The columns that are written."""
        return self.columns

    def n_drawn(self, wanted: int | None) -> int:
        """Return how many records to draw: the number asked for, or by default the number from the tables, at least 1."""
        return max(1, round(self.model.n_rows)) if wanted is None else wanted

    def batches(
        self,
        start: int,
        n_rows: int,
        n_total: int,
        key: RunKey,
        part: str,
        where: Condition | Given | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield synthetic records in the released columns and types.

        Parameters
        ----------
        part
            Not used: a record is a function of the key, its number and the number of all records.
        where
            Which records are wanted, from `condition`; others are drawn again. Of a `Given`, the
            rows of the blocks of these records.

        Notes
        -----
        Records are drawn in blocks, by their numbers: 131,072 together, or 32,768 of more than 256
        columns. A block has a stream for its records, one for their places inside cells, and one
        for what a place leaves open of each column's values. A block that only partly belongs to
        this part is drawn whole.
        """
        if where is not None:
            for block in range(start // MOST_MET, -(-(start + n_rows) // MOST_MET)):
                first = block * MOST_MET
                low, high = max(start - first, 0), min(start + n_rows - first, MOST_MET)
                found, _ = self.draw_met(block, min(MOST_MET, n_total - first), key, where)
                yield found.slice(low, high - low)
            return
        size, cells, workspace = (
            self.model.block_rows,
            self.cells(),
            self.model.workspace(min(self.model.block_rows, n_total)),
        )
        view, rules = self.view, self.rules(cells)
        for block in range(start // size, -(-(start + n_rows) // size)):
            first = block * size
            low, high = max(start - first, 0), min(start + n_rows - first, size)
            rng = self.model.stream(key, f"block {block}/records")
            codes = self.model.draw(min(size, n_total - first), rng, workspace, rules)
            places = {}
            if self.model.places is not None:
                rng = self.model.stream(key, f"block {block}/places")
                found = self.model.places.draw(codes, self.model.domain, rng)
                places = {name: own[low:high] for name, own in found.items()}
            chunks = (
                codes[:, place : min(place + CHUNK_ROWS, high)]
                for place in range(low, high, CHUNK_ROWS)
            )
            open_values = partial(self._open_values, key, block, low)
            for rows in draw_records(view.modelled, cells, chunks, open_values, places):
                yield view.write(rows)

    def rules(self, cells: CutColumns) -> CellRules:
        """Return what all records keep, on the cells that are counted."""
        return CellRules.of(self.view.computed.model(self.schema).rules, cells)

    def condition(self, asked: Any) -> Condition | Given:
        """Return which records a text asks for, or which values the rows of a frame give."""
        cells, told = self.cells(), self.view.told
        if isinstance(asked, Given):
            return asked
        if not hasattr(asked, "columns"):  # no frame
            return Condition.parse(asked, cells, told)
        given = Given.read(asked, cells, told)
        own = dict(zip(given.places, given.codes, strict=True))
        possible = np.ones(given.n_rows, dtype=np.bool_)
        for node in self.model.nodes:
            if node.attribute in own:
                possible &= np.isin(own[node.attribute], node.levels)
        for (first, second), table in self.rules(cells).pairs.items():
            if first in own and second in own:
                possible &= table[own[first], own[second]]
        if not possible.all():
            raise _refuse_row(int(np.argmin(possible)), "no record of the model can have")
        return given

    def draw_blocks(
        self, n: int, key: RunKey, where: Condition | Given | None
    ) -> Iterator[tuple[list[pa.RecordBatch], float]]:
        """Yield the records of `batches` block by block, each with the part of the model's records that meets the condition."""
        size = self.model.block_rows if where is None else MOST_MET
        for start in range(0, n, size):
            n_rows = min(size, n - start)
            if where is None:
                yield list(self.batches(start, n_rows, n, key, "")), 1.0
            else:
                found, share = self.draw_met(start // size, n_rows, key, where)
                yield [found], share

    def draw_met(
        self, block: int, n: int, key: RunKey, where: Condition | Given
    ) -> tuple[pa.RecordBatch, float]:
        """Return a block of records that meet a condition, and which part of the model's records meets it.

        Notes
        -----
        First cells are drawn that may meet it, then values inside them; records whose values do not
        meet it are drawn again.
        """
        if isinstance(where, Given):
            first = block * MOST_MET
            return self._draw_given(where.part(first, first + n), key, block)
        cells, model, rngs = self.cells(), self.model, dict[str, Stream]()
        rules, workspace, view = self.rules(cells), model.workspace(CHUNK_ROWS), self.view

        def open_stream(name: str) -> Stream:
            return rngs.setdefault(name, model.stream(key, f"met {block}/{name}"))

        parts: list[pa.RecordBatch] = []
        n_met, n_drawn, shares = 0, 0, list[float]()
        while n_met < n:
            usual = n_met / n_drawn if n_drawn else 1.0
            wanted = min(math.ceil((n - n_met) / max(usual, n / MOST_MET)), MOST_MET)
            drawn = model.draw_met(wanted, open_stream("records"), where.may_meet, workspace, rules)
            for rows in self._draw_values(drawn.codes, drawn.beside, cells, open_stream):
                parts.append(view.write(rows.filter(pa.array(where.meet(rows)))))
                n_met, n_drawn = n_met + parts[-1].num_rows, n_drawn + rows.num_rows
            shares.append(drawn.share)
            check_met(n_met * drawn.share, n_drawn, 8 * MOST_MET)
        whole = pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
        return whole.slice(0, n), float(np.mean(shares)) * n_met / n_drawn

    def _draw_given(self, given: Given, key: RunKey, block: int) -> tuple[pa.RecordBatch, float]:
        """Return a record for each row of a block, as if records were drawn until one had the row's cells, and which part of the model's records has those of any row."""
        cells, model, rngs = self.cells(), self.model, dict[str, Stream]()
        rules, workspace = self.rules(cells), model.workspace(CHUNK_ROWS)
        own, number = given.number(model.domain.sizes)
        rows, left = np.argsort(own, kind="stable"), np.bincount(own)
        ends, beside = np.cumsum(left), list[Codes]()
        codes = np.empty((model.domain.n_attributes, len(own)), dtype=model.domain.code_dtype)
        share = 0.0

        def open_stream(name: str) -> Stream:
            return rngs.setdefault(name, model.stream(key, f"given {block}/{name}"))

        def is_wanted(codes: Codes) -> Flags:
            found = number(codes)
            return (found >= 0) & (left[found] > 0)

        while n_left := int(left.sum()):
            try:
                drawn = model.draw_met(n_left, open_stream("records"), is_wanted, workspace, rules)
                check_met(drawn.share, 1, 1)
            except SpecError:
                row = given.first + int(rows[ends[np.argmax(left > 0)] - 1])
                what = "fewer than 1 in 1,000,000 of the model's records have"
                raise _refuse_row(row, what) from None
            found = number(drawn.codes)
            order = np.argsort(found, kind="stable")
            found = found[order]
            rank = np.arange(len(found)) - np.searchsorted(found, found)  # among those alike
            used = np.flatnonzero(rank < left[found])
            found = found[used]
            codes[:, rows[(ends - left)[found] + rank[used]]] = drawn.codes[:, order[used]]
            left -= np.bincount(found, minlength=len(left))
            beside.append(drawn.beside)
            share = share or drawn.share  # of the first draw: all rows were wanted
        [drawn_rows] = self._draw_values(codes, beside[0], cells, open_stream)
        arrays = dict(zip(drawn_rows.schema.names, drawn_rows.columns, strict=True))
        arrays |= dict(zip(given.rows.schema.names, given.rows.columns, strict=True))
        whole = pa.RecordBatch.from_arrays(list(arrays.values()), schema=drawn_rows.schema)
        return self.view.write(whole), share

    def _draw_values(
        self, codes: Codes, beside: Codes, cells: CutColumns, open_stream: Callable[[str], Stream]
    ) -> Iterator[pa.RecordBatch]:
        """Yield records with values inside their cells, spread as those of the whole model beside them."""
        places, n_beside = {}, beside.shape[1]
        if self.model.places is not None:
            both = np.concatenate([beside, codes], axis=1)
            rng = open_stream("places")
            found = self.model.places.draw(both, self.model.domain, rng, n_beside)
            places = {name: own[n_beside:] for name, own in found.items()}
        types = self.view.modelled
        yield from draw_records(
            types, cells, [codes], lambda name: open_stream(f"values/{name}"), places
        )

    def _open_values(self, key: RunKey, block: int, n_before: int, name: str) -> Stream:
        """Return the stream of a column's values in a block, behind those of its first records."""
        rng = self.model.stream(key, f"block {block}/values/{name}")
        words(rng, n_before)
        return rng

    def correlations(self) -> pd.DataFrame:
        """Return the correlations of the latent variables, float64; each is named (column, level or range)."""
        import pandas as pd  # slow to import: workers and jobs do not need it

        model, labels = self.model, {name: column.labels() for name, column in self.cells().items()}
        names = []
        for node in sorted(model.nodes, key=by_latents):
            column = model.domain.names[node.attribute]
            names += [
                (column, labels[column][level])
                for level in node.levels[len(node.levels) - node.n_latents :]
            ]
        factor = model.factor.astype(np.float64)
        index = pd.MultiIndex.from_frame(pd.DataFrame(names, columns=["column", "level"]))
        return pd.DataFrame(factor @ factor.T, index=index, columns=index)

    def _contents(self) -> Contents:
        model = self.model
        targets, places = model.targets, model.places
        header, arrays = ReleasedCounts._contents(self)
        header = {
            "report": asdict(self.report),
            "raked": targets is not None,
            "places": places is not None,
            **header,
        }
        arrays = {
            **arrays,
            "factor": write_factor(model.factor),
            "nodes": np.array(
                [(n.attribute, n.parent, n.first, *n.probabilities.shape) for n in model.nodes],
                dtype=np.int64,
            ),
            **write_nodes(model.nodes),
        }
        if targets is not None:
            arrays |= targets.to_arrays()
        if places is not None:
            arrays |= {
                f"places_{field.name}": getattr(places, field.name) for field in fields(places)
            }
        return header, arrays

    @classmethod
    def _of_contents(cls, header: Named, arrays: Named) -> Self:
        counts = cls._read_counts(header, arrays)
        noisy: NoisyMarginals = counts["noisy"]
        check_latents(noisy.domain)
        tree, report = arrays["nodes"], FitReport(**header["report"])
        is_tree = tree.dtype == np.int64 and tree.shape == (len(tree), 5)
        require(is_tree, "nodes of another type or shape")
        nodes = read_nodes(tree.tolist(), arrays, noisy.domain.sizes)
        n_latents = sum(node.n_latents for node in nodes)
        require(report.n_latents == n_latents, "the report is of another model")
        for number in asdict(report).values():
            is_number = type(number) in (int, float) and math.isfinite(number)
            require(is_number, "the report holds something else than numbers")
        targets = places = None
        if header["raked"]:
            targets = Targets.from_arrays(arrays, noisy.n_rows, noisy.domain)
        if header["format"] > 5 and header["places"]:  # older files have none
            places = Places(
                **{field.name: arrays[f"places_{field.name}"] for field in fields(Places)}
            )
            places.check(noisy.domain)
        model = CopulaModel(
            domain=noisy.domain,
            n_rows=noisy.n_rows,
            nodes=nodes,
            factor=read_factor(arrays["factor"], n_latents),
            targets=targets,
            places=places,
        )
        return cls(**counts, model=model, report=report)


def _refuse_row(row: int, what: str) -> SpecError:
    hint = "leave the row or a column out, or see the rules of the schema"
    return SpecError(f"{what} the values of row {row:,} (the first is 0)", "`like`", hint)
