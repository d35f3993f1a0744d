"""The Gaussian copula and contingency tables on Dask and pandas frames: `fit` is the barrier, `sample` is lazy."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Self

import pandas as pd

from dpdask.cells import DEFAULT_BINS
from dpdask.documents import validate
from dpdask.engine.frames import Frame, bound_frame, forget_secrets, secret_folder
from dpdask.engine.synthesise import write_copula
from dpdask.engine.synthetic_frames import frame_tables_work, sample_frame, tabulate_frame
from dpdask.engine.tabulate import ALL_PAIRS, Tables, check_latents, check_size, domain_of
from dpdask.engine.work import KEY_NAME
from dpdask.errors import DataError, SpecError
from dpdask.io.saved import load_release, save_release
from dpdask.io.storage import Folder, absolute_url
from dpdask.mechanisms.columns import bins_by_column
from dpdask.mechanisms.copula.fit import CopulaOptions, fit_copula
from dpdask.mechanisms.copula.release import FittedCopula, copula_from_bytes, copula_to_bytes
from dpdask.mechanisms.marginals.card import copula_card
from dpdask.mechanisms.marginals.noise import MarginalNoise, NoisyMarginals, measure, plan_noise
from dpdask.privacy import Budget, UnitColumn, noisy_counts_text
from dpdask.privacy.events import Adjacency
from dpdask.schema import Schema
from dpdask.stats import Clique, Marginals
from dpdask.streams import RunKey, stream

_PARTITION_ROWS = 2**17
DEFAULT_OPTIONS = CopulaOptions()
_COPULA = "copula.npz"


@dataclass(frozen=True, slots=True)
class GaussianCopula:
    """Differentially private synthetic records with the table's one- and two-way structure.

    Parameters
    ----------
    schema
        The declared columns: each is privatised or dropped.
    epsilon
        ε, in (0, 100].
    delta
        δ, in [0, 1): above 0 the noise is Gaussian, and much smaller; at 0 it is Laplace. Take it far below 1 / rows.
    adjacency
        `replace-one`: one row has other values, the number of rows is public. `add-remove`: one row is there or not.
    unit
        What is protected: `row`, or `UnitColumn(column=…, max_rows=…)`.
    bins
        How continuous and mixed columns are cut: a number of cells of one width, or for each column such a number or the
        first value of each cell.
    one_way, two_way
        The share of the budget of each one-way and each two-way table, relative to each other.
    options
        What to leave out of the fit, to see what it is worth.
    insecure_seed
        For tests: noise from a seed, which protects nobody.

    Raises
    ------
    SpecError
        If a parameter is invalid.

    Privacy
    -------
    Unit: a row, or all rows that share a column's value. Protected: every row. Sensitivity of each table: 1 (add-remove), or
    L2 √2, L1 2 (replace-one), times max_rows. Events: one noisy table of each column and each pair of columns, composed
    by the accountant. Everything after the noise is post-processing; any number of records may be drawn. ε is spent again
    by every new `fit` on the same rows.

    References
    ----------
    Asghar, Ding, Rakotoarivelo, Mrabet and Kaafar, Differentially private release of high-dimensional datasets using the
    Gaussian copula.

    Examples
    --------
    >>> import pandas as pd, dpdask
    >>> column = {"role": "privatise", "kind": "categorical", "levels": ["a", "b"]}
    >>> schema = dpdask.Schema.from_dict({"columns": {"x": column, "y": column}})
    >>> table = pd.DataFrame({"x": ["a", "b"] * 500, "y": ["a", "b"] * 500})
    >>> copula = dpdask.GaussianCopula(schema, epsilon=1.0, delta=1e-9).fit(table)
    >>> len(copula.sample(2000))
    2000
    """

    schema: Schema
    _: KW_ONLY
    epsilon: float
    delta: float = 0.0
    adjacency: Adjacency = "replace-one"
    unit: UnitColumn | Literal["row"] = "row"
    bins: int | Mapping[str, int | Sequence[float]] = DEFAULT_BINS
    one_way: float = 1.0
    two_way: float = 1.0
    options: CopulaOptions = DEFAULT_OPTIONS
    insecure_seed: int | None = None

    def __post_init__(self) -> None:
        if not self.schema.privatised:
            raise SpecError("the schema privatises no column", "GaussianCopula", "give at least one column the role privatise")
        if self.schema.kept:
            raise SpecError(
                "a synthetic record is nobody's, so no column can be kept", f"column {self.schema.kept[0]!r}", "give it the role privatise, or drop"
            )
        for name, weight in (("one_way", self.one_way), ("two_way", self.two_way)):
            if not 0 <= weight < math.inf or (name == "two_way" and weight == 0):
                raise SpecError("a weight must be finite and positive; that of the one-way tables may be 0", f"GaussianCopula, {name}")
        self._check_noise()

    def _check_noise(self) -> None:
        """Raise a SpecError if the parameters are none that noise can be planned by."""
        _ = self.noise

    @property
    def budget(self) -> Budget:
        """What is promised."""
        return validate(Budget, {"epsilon": self.epsilon, "delta": self.delta, "adjacency": self.adjacency, "unit": self.unit}, "GaussianCopula")

    @property
    def noise(self) -> MarginalNoise:
        """The noise of every table; it depends on no data."""
        return plan_noise(self.budget, len(self.schema.privatised), one_way=self.one_way, pairs=self.two_way)

    def fit(self, frame: Frame, *, folder: str | None = None) -> CopulaRelease:
        """Count, draw the noise, fit: the one barrier. Only noisy tables go on from here.

        Parameters
        ----------
        frame
            A Dask or pandas frame.
        folder
            A folder, as a path or URL, that every worker can read, for the fitted copula; by default a new temporary one of
            this machine, removed when Python ends.

        Raises
        ------
        DataError
            If the frame violates the schema; under replace-one, if it has no rows.
        SpecError
            If the bins are none, or a table is too large to hold.

        Warns
        -----
        UserWarning
            If δ is not below 1 / the number of rows.
        """
        place = secret_folder(folder)
        key = RunKey.fresh() if self.insecure_seed is None else RunKey.insecure(self.insecure_seed)
        place.write(KEY_NAME, key.reveal(), private=True)
        work = frame_tables_work(frame, self.schema, self.bins, place, self.budget.unit_column)
        check_size(domain_of(work.cells), ALL_PAIRS)
        check_latents(domain_of(work.cells))
        counts = tabulate_frame(frame, bound_frame(frame, work), ALL_PAIRS)
        if counts.n_rows == 0 and self.adjacency == "replace-one":
            raise DataError("the frame has no rows", "GaussianCopula", "give it some")
        rng = stream(key, "marginals/noise", "") if self.insecure_seed is not None else None
        noisy = measure(counts, self.noise, n_rows_public=self.adjacency == "replace-one", rng=rng)
        if self.delta * noisy.n_rows >= 1:
            warnings.warn("δ is not below 1 / the number of rows: publishing one random row verbatim would satisfy the same guarantee", stacklevel=2)
        model, report = fit_copula(noisy, stream(key, "copula/calibration", ""), self.options)
        forget_secrets(place)
        bins = bins_by_column(self.bins, work.cells)
        fitted = FittedCopula(schema=self.schema, types=work.released, bins=bins, noisy=noisy, model=model, report=report)
        return CopulaRelease._of(fitted, self.budget, place, insecure=self.insecure_seed is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopulaRelease:
    """A fitted copula; made by `GaussianCopula.fit`, or by `load` elsewhere, without the data.

    Attributes
    ----------
    fitted
        The copula and the noisy tables.
    card
        The release card: what was promised, to whom, and how; safe to publish.
    folder
        Where workers read the copula.
    sha256
        Of it.

    Privacy
    -------
    A function of the noisy tables: it may be published, and any number of records drawn from it, at no further cost.
    """

    fitted: FittedCopula
    card: Mapping[str, Any]
    folder: Folder
    sha256: str

    @classmethod
    def _of(cls, fitted: FittedCopula, budget: Budget, folder: Folder, *, insecure: bool) -> Self:
        guarantee = noisy_counts_text(budget)
        card = copula_card(name="frame", budget=budget, guarantee=guarantee, fitted=fitted, n_records=None, insecure=insecure)
        return cls(fitted=fitted, card=json.loads(card), folder=folder, sha256=write_copula(fitted, folder))

    def sample(self, n_rows: int | None = None, *, rows_per_partition: int = _PARTITION_ROWS, seed: int | None = None) -> Frame:
        """Return synthetic records as a lazy Dask frame.

        Parameters
        ----------
        n_rows
            How many; by default as many as the table has, or under add-remove as the noisy tables say.
        rows_per_partition
            How many in a partition.
        seed
            Decides the records, in [0, 2**64); by default a fresh one. The same frame computed twice is the same records.

        Raises
        ------
        SpecError
            If a number is out of range.
        """
        return sample_frame(self.fitted, self.folder, self.sha256, n_rows, rows_per_partition, seed)

    @property
    def correlation(self) -> pd.DataFrame:
        """The correlations of the latent variables, float64; each is named (column, level or range)."""
        model, cells = self.fitted.model, self.fitted.cells()
        labels = {name: column.labels() for name, column in cells.items()}
        names = []
        for node in model.nodes:
            column = model.domain.names[node.attribute]
            names += [(column, labels[column][level]) for level in node.levels[len(node.levels) - node.n_latents :]]
        factor = model.factor.astype("float64")
        index = pd.MultiIndex.from_frame(pd.DataFrame(names, columns=["column", "level"]))
        return pd.DataFrame(factor @ factor.T, index=index, columns=index)

    @property
    def marginals(self) -> NoisyMarginals:
        """The noisy one- and two-way tables, with their margins of error."""
        return self.fitted.noisy

    def save(self, path: str) -> None:
        """Write the fitted copula to a folder, as a path or any fsspec URL: safe to publish, and enough for `load`.

        The card is written last, with the other file's digest.

        Raises
        ------
        OutputError
            If a release is there already, or it cannot be written.
        """
        save_release(Folder(absolute_url(path)), _COPULA, copula_to_bytes(self.fitted), self.card)

    @classmethod
    def load(cls, path: str, *, folder: str | None = None) -> Self:
        """Return a saved copula.

        Parameters
        ----------
        path
            Where it was saved.
        folder
            As for `GaussianCopula.fit`.

        Raises
        ------
        InputError
            If there is none, or of another version, or its card is another release's.
        """
        data, card = load_release(Folder(absolute_url(path)), _COPULA)
        fitted = copula_from_bytes(data, _COPULA)
        working = secret_folder(folder)
        return cls(fitted=fitted, card=card, folder=working, sha256=write_copula(fitted, working))


def marginals(
    frame: Frame, schema: Schema, cliques: Iterable[Sequence[str]] | None = None, *, bins: int | Mapping[str, int | Sequence[float]] = DEFAULT_BINS
) -> Marginals:
    """Return the EXACT contingency tables of a frame, in one pass: private, for those who may see the rows.

    Parameters
    ----------
    frame
        A Dask or pandas frame.
    schema
        The declared columns; the privatised ones are counted.
    cliques
        The tables, each a tuple of columns; by default every column and every pair of columns.
    bins
        As for `GaussianCopula`.

    Returns
    -------
    Marginals
        `.table(("age", "sex"))` is an int64 array with an axis for each column: levels in the schema's order, null first.

    Raises
    ------
    DataError, SpecError
        If the frame violates the schema, or a table is too large to hold.

    Privacy
    -------
    None: the counts are exact. A job of kind `marginals` releases them with noise.
    """
    place = secret_folder(None)
    try:
        work = frame_tables_work(frame, schema, bins, place)
        chosen = _checked_cliques(cliques, tuple(work.cells)) if cliques is not None else ()
        tables = Tables(cliques=chosen, two_way=cliques is None)
        check_size(domain_of(work.cells), tables)
        return tabulate_frame(frame, work, tables)
    finally:
        place.remove()


def _checked_cliques(cliques: Iterable[Sequence[str]], columns: tuple[str, ...]) -> tuple[Clique, ...]:
    chosen = []
    for clique in cliques:
        if isinstance(clique, str) or not clique or len(set(clique)) < len(clique):
            raise SpecError("a table is a tuple of one or more different columns", f"marginals, {clique!r}", "correct it")
        for name in clique:
            if name not in columns:
                raise SpecError("is not a privatised column", f"marginals, {name!r}", "correct its name, or its role in the schema")
        chosen.append(tuple(clique))
    return tuple(chosen)
