"""The Gaussian copula with valid records: correlated latent variables, decoded along a tree into one level per attribute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpdask.errors import SpecError
from dpdask.kernels import decode as decode_kernel
from dpdask.kernels import latent as latent_kernel
from dpdask.mechanisms.columns import CHUNK_ROWS
from dpdask.mechanisms.copula.raking import Targets
from dpdask.stats import Domain
from dpdask.streams import Rng, RunKey, Stream, stream, words

MECHANISM_ID = "copula"
MAX_LATENTS = 6000  # an eigendecomposition of minutes, and 800 MB of latent variables in a chunk of records

BLOCK_ROWS = 2**17
_FEW_ATTRIBUTES = 256

Codes = NDArray[np.uint8] | NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """One attribute in the tree.

    Attributes
    ----------
    attribute
        Its place in the domain.
    parent
        The place in the order of its parent, or -1.
    levels
        uint16 array: the levels that a record can have; an empty level has no latent variable.
    first
        Its first latent variable; attributes have theirs in any order. There is one for each level; for two levels, one, of the second.
    probabilities
        float64 array of shape (n_groups, len(levels)): the levels' probabilities given each level of the parent.
    offsets
        float32 array of the same shape: what calibration adds to the latent variables.
    """

    attribute: int
    parent: int
    levels: NDArray[np.uint16]
    first: int
    probabilities: NDArray[np.float64]
    offsets: NDArray[np.float32]

    @property
    def n_latents(self) -> int:
        """How many latent variables it has."""
        return n_latents_of(len(self.levels))

    def utilities(self, latents: latent_kernel.Latents) -> latent_kernel.Latents:
        """Return its latent variables, float32 of shape (n_latents, ...), a view."""
        return latents[self.first : self.first + self.n_latents]


def n_latents_of(n_levels: int) -> int:
    """Return how many latent variables an attribute of so many possible levels has: two levels are one question."""
    return n_levels if n_levels > 2 else n_levels - 1


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
        what = f"its levels and cells and those of the others are {n_latents:,} latent variables; the limit is {MAX_LATENTS:,}"
        raise SpecError(what, f"column {widest!r}", "lower `bins`, declare fewer levels, or drop a column")


class Workspace(NamedTuple):
    """What drawing needs beside the model; one thread may use it for one block after the other."""

    panels: latent_kernel.Panels
    """The factor, packed."""
    latents: latent_kernel.Latents
    """Room for the latent variables of a chunk of records; its pages cost as much as the raking, unless they are used again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopulaModel:
    """A fitted copula: everything that sampling needs; all of it is a function of the noisy tables.

    Attributes
    ----------
    domain
        The attributes and their levels.
    n_rows
        How many rows the table has: exact where it is public, otherwise an estimate.
    nodes
        The attributes, each after its parent.
    factor
        float32 array of shape (n_latents, n_latents): the Cholesky factor of the latent variables' correlations.
    targets
        The tables that records are raked to; None if records are the copula's own.

    Privacy
    -------
    Post-processing of `NoisyMarginals`: it costs nothing more, may be published, and any number of records may be drawn.

    References
    ----------
    Asghar, Ding, Rakotoarivelo, Mrabet and Kaafar, Differentially private release of high-dimensional datasets using the
    Gaussian copula, section 3.3; its thresholds, one for each dummy, are here one choice for each attribute.
    """

    domain: Domain
    n_rows: float
    nodes: tuple[Node, ...]
    factor: NDArray[np.float32]
    targets: Targets | None = None

    @property
    def block_rows(self) -> int:
        """How many records are drawn together; what the memory of a worker depends on."""
        return BLOCK_ROWS if self.domain.n_attributes <= _FEW_ATTRIBUTES else CHUNK_ROWS

    @property
    def n_latents(self) -> int:
        """How many latent variables there are."""
        return len(self.factor)

    def workspace(self, n: int) -> Workspace:
        """Return what it takes to draw n records, or fewer."""
        most = n if self.targets is None else self.targets.n_pool(n, self.n_latents)
        return Workspace(latent_kernel.pack(self.factor), latent_kernel.room_for(self.n_latents, min(CHUNK_ROWS, most)))

    def draw(self, n: int, rng: Rng, workspace: Workspace | None = None) -> Codes:
        """Return a block of records, raked to the tables if there are any; otherwise those of `sample`.

        Parameters
        ----------
        n
            How many, at least 1.
        rng
            A stream; the records are a function of it and of `n`.
        workspace
            From `workspace`, to draw several blocks one after the other.

        Returns
        -------
        uint8 or uint16 array of shape (n_attributes, n), in random order, every code below its attribute's size.
        """
        if self.targets is None:
            return self.sample(n, rng, workspace)
        pool = self.sample(self.targets.n_pool(n, self.n_latents), rng, workspace)
        return self.targets.redraw(pool, n, self.domain, [node.attribute for node in self.nodes], rng)

    def sample(self, n: int, rng: Rng, workspace: Workspace | None = None) -> Codes:
        """Return records of the copula alone.

        Parameters
        ----------
        n
            How many, at least 0.
        rng
            A stream; the records are a function of it and of `n`.
        workspace
            As for `draw`.

        Returns
        -------
        uint8 or uint16 array of shape (n_attributes, n), every code below its attribute's size.
        """
        panels, room = workspace or self.workspace(n)
        result = np.empty((self.domain.n_attributes, n), dtype=self.domain.code_dtype)
        for start in range(0, n, CHUNK_ROWS):
            part = result[:, start : start + CHUNK_ROWS]
            draw_latents(panels, part.shape[1], rng, room)
            self._decode(room, part, rng)
        return result

    def _decode(self, drawn: latent_kernel.Latents, out: Codes, rng: Rng) -> None:
        """Write the records of some rows of latent variables."""
        found: list[NDArray[np.uint16]] = []
        root = np.zeros(out.shape[1], dtype=np.uint16)
        for node in self.nodes:
            groups = root if node.parent < 0 else found[node.parent]
            uniforms = draw_uniforms(rng, len(node.offsets))
            found.append(decode_kernel.decode(node.utilities(drawn), node.offsets, node.probabilities, groups, uniforms))
            every = len(node.levels) == self.domain.sizes[node.attribute]
            out[node.attribute] = found[-1] if every else node.levels[found[-1]]

    def stream(self, key: RunKey, partition: str) -> Stream:
        """Return the random stream of one partition of synthetic records, at its start.

        Parameters
        ----------
        key
            The run key.
        partition
            The name of the partition.
        """
        return stream(key, MECHANISM_ID, partition)


def draw_latents(panels: latent_kernel.Panels, n: int, rng: Rng, room: latent_kernel.Latents) -> None:
    """Draw rows of correlated latent variables.

    Parameters
    ----------
    panels
        The Cholesky factor of the correlations.
    n
        The number of rows.
    rng
        A stream.
    room
        float32 array from `room_for`, for at least n rows; its first n columns are overwritten, and up to a block more.
    """
    for start in range(0, n if panels.n_latents else 0, latent_kernel.BLOCK_ROWS):
        latent_kernel.latents(panels, words(rng, latent_kernel.words_per_block(panels.n_latents)), room, start)


def draw_uniforms(rng: Rng, n: int) -> NDArray[np.float64]:
    """Return n uniform numbers in [0, 1).

    Parameters
    ----------
    rng
        A stream.
    n
        How many.
    """
    result: NDArray[np.float64] = (words(rng, n) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result
