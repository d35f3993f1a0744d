"""A fitted copula with all that sampling elsewhere needs: no row, no exact count, no key; safe to publish."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from dpdask.archive import Archive, Contents, Named
from dpdask.cells import CutColumns
from dpdask.mechanisms.columns import (
    CHUNK_ROWS,
    ReleasedCounts,
    draw_records,
)
from dpdask.mechanisms.copula.fit import FitReport
from dpdask.mechanisms.copula.model import (
    MOST_MET,
    CopulaModel,
    Node,
    Targets,
    check_latents,
    check_met,
)
from dpdask.mechanisms.copula.places import Places
from dpdask.mechanisms.marginals.noise import NoisyMarginals
from dpdask.rules import CellRules, Condition
from dpdask.stats import Domain
from dpdask.streams import RunKey, Stream, words

if TYPE_CHECKING:
    import pandas as pd

_MAX_FACTOR = 2.0  # rows of a correlation's factor have length 1; with room for rounding
_ROUNDING = 1e-6  # of probabilities that sum to 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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

    @property
    def few_valued(self) -> list[str]:
        """Which columns have few distinct values."""
        return [name for name in self.schema.privatised if self.schema.columns[name].has_levels]

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
        where: Condition | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield synthetic records in the released columns and types.

        Parameters
        ----------
        part
            Not used: a record is a function of the key, its number and the number of all records.
        where
            Which records are wanted, from `condition`; others are drawn again.

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

    def condition(self, where: str) -> Condition:
        """Return which records a text asks for."""
        return Condition.parse(where, self.cells(), self.view.told)

    def draw_blocks(
        self, n: int, key: RunKey, where: Condition | None
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
        self, block: int, n: int, key: RunKey, where: Condition
    ) -> tuple[pa.RecordBatch, float]:
        """Return a block of records that meet a condition, and which part of the model's records meets it.

        Notes
        -----
        First cells are drawn that may meet it, then values inside them; records whose values do not
        meet it are drawn again.
        """
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
            places = {}
            if model.places is not None:
                both, n_beside = (
                    np.concatenate([drawn.beside, drawn.codes], axis=1),
                    drawn.beside.shape[1],
                )
                found = model.places.draw(both, model.domain, open_stream("places"), n_beside)
                places = {name: own[n_beside:] for name, own in found.items()}
            chunks = [drawn.codes]
            types = view.modelled
            for rows in draw_records(
                types, cells, chunks, lambda name: open_stream(f"values/{name}"), places
            ):
                parts.append(view.write(rows.filter(pa.array(where.meet(rows)))))
                n_met, n_drawn = n_met + parts[-1].num_rows, n_drawn + rows.num_rows
            shares.append(drawn.share)
            check_met(n_met * drawn.share, n_drawn, 8 * MOST_MET)
        whole = pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
        return whole.slice(0, n), float(np.mean(shares)) * n_met / n_drawn

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
        for node in sorted(model.nodes, key=_by_latents):
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
            "factor": model.factor[np.tril_indices(model.n_latents)],
            "nodes": np.array(
                [(n.attribute, n.parent, n.first, *n.probabilities.shape) for n in model.nodes],
                dtype=np.int64,
            ),
            "levels": _join([node.levels for node in model.nodes], np.uint16),
            "probabilities": _join([node.probabilities for node in model.nodes], np.float64),
            "offsets": _join([node.offsets for node in model.nodes], np.float32),
        }
        if targets is not None:
            arrays |= {
                "raked_tables": targets.tables,
                "raked_counts": targets.counts,
                "raked_strengths": targets.strengths,
            }
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
        nodes, report = _read_nodes(arrays, noisy.domain), FitReport(**header["report"])
        n_latents, triangle = sum(node.n_latents for node in nodes), arrays["factor"]
        n_entries = n_latents * (n_latents + 1) // 2
        if len(triangle) != n_entries or report.n_latents != n_latents:
            raise ValueError("the factor is of another model")
        if (np.abs(triangle) > _MAX_FACTOR).any():
            raise ValueError("the factor does not give correlations")
        for number in asdict(report).values():
            if type(number) not in (int, float) or not math.isfinite(number):
                raise ValueError("the report holds something else than numbers")
        factor = np.zeros((n_latents, n_latents), dtype=np.float32)
        factor[np.tril_indices(n_latents)] = triangle
        targets = None
        if header["raked"]:
            targets = Targets(
                total=noisy.n_rows,
                tables=arrays["raked_tables"],
                counts=arrays["raked_counts"],
                strengths=arrays["raked_strengths"],
            )
            targets.check(noisy.domain)
        places = None
        if header["format"] > 5 and header["places"]:  # older files have none
            places = Places(
                **{field.name: arrays[f"places_{field.name}"] for field in fields(Places)}
            )
            places.check(noisy.domain)
        model = CopulaModel(
            domain=noisy.domain,
            n_rows=noisy.n_rows,
            nodes=nodes,
            factor=factor,
            targets=targets,
            places=places,
        )
        return cls(**counts, model=model, report=report)


_TYPES = {
    "factor": np.float32,
    "levels": np.uint16,
    "probabilities": np.float64,
    "offsets": np.float32,
}


def _read_nodes(arrays: Named, domain: Domain) -> tuple[Node, ...]:
    """Return the nodes, or raise ValueError: sampling indexes by their numbers without a check."""
    for name, dtype in _TYPES.items():
        array = arrays[name]
        if array.dtype != dtype or array.ndim != 1 or not np.isfinite(array).all():
            raise ValueError("an array has another type, or a number is not finite")
    if arrays["nodes"].dtype != np.int64 or arrays["nodes"].ndim != 2:
        raise ValueError("the tree is not a table of whole numbers")
    nodes: list[Node] = []
    level = cell = 0
    for attribute, parent, first, n_groups, n_levels in arrays["nodes"].tolist():
        if n_groups < 1 or n_levels < 1:
            raise ValueError("a node has no group or no level")
        if not -1 <= parent < len(nodes) or not 0 <= attribute < domain.n_attributes:
            raise ValueError("a node comes before its parent, or is of no attribute")
        if n_groups != (1 if parent < 0 else len(nodes[parent].levels)):
            raise ValueError("a node has other groups than its parent has levels")
        end = cell + n_groups * n_levels
        levels = arrays["levels"][level : level + n_levels]
        probabilities = arrays["probabilities"][cell:end].reshape(n_groups, n_levels)
        if len(levels) < n_levels:
            raise ValueError("the arrays are of other nodes")
        if not (levels[1:] > levels[:-1]).all() or levels[-1] >= domain.sizes[attribute]:
            raise ValueError("a node's levels are not increasing, or outside the domain")
        off = np.abs(probabilities.sum(axis=1) - 1.0)
        if (probabilities < 0.0).any() or (off > _ROUNDING).any():
            raise ValueError("a node's probabilities do not sum to 1")
        node = Node(
            attribute=attribute,
            parent=parent,
            levels=levels,
            first=first,
            probabilities=probabilities,
            offsets=arrays["offsets"][cell:end].reshape(n_groups, n_levels),
        )
        nodes.append(node)
        level, cell = level + n_levels, end
    if [level, cell, cell] != [
        len(arrays[name]) for name in ("levels", "probabilities", "offsets")
    ]:
        raise ValueError("the arrays are of other nodes")
    if sorted(node.attribute for node in nodes) != list(range(domain.n_attributes)):
        raise ValueError("the nodes are not one for each attribute")
    n_latents = 0
    for node in sorted(nodes, key=_by_latents):
        if node.first != n_latents:
            raise ValueError("the latent variables of a node are those of another, or of none")
        n_latents += node.n_latents
    return tuple(nodes)


def _by_latents(node: Node) -> tuple[int, int]:
    """Return what puts nodes in the order of their latent variables; a node without any comes before the one with the same first."""
    return node.first, node.n_latents


def _join(parts: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate([np.empty(0, dtype=dtype), *(part.ravel() for part in parts)])
