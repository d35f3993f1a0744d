"""What mechanisms that release nothing but noisy counts of all rows have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from dpdask.archive import Archived
from dpdask.errors import DataError, SpecError
from dpdask.mechanisms.mechanism import Columns, Mechanism
from dpdask.privacy import COVERED, UNCOVERED, Budget, delta_warnings, noisy_counts_text
from dpdask.privacy.events import DiscreteLaplace, LocalRelease, leaves
from dpdask.privacy.noise import check_scale
from dpdask.privacy.order import RowOrder
from dpdask.references.bins import check_bins
from dpdask.streams import Noise


def _as_records_wanted(value: object) -> object:
    if value != "input" and (type(value) is not int or value < 1):
        raise ValueError(f"a whole number of at least 1, or `input`, is expected, not {value!r}")
    return value


RecordsWanted = Annotated[Literal["input"] | int, BeforeValidator(_as_records_wanted)]
"""How many records are drawn: a number, or `input`: as many as the table has."""


def no_rows(where: str) -> DataError:
    """Return the error of a table that had rows before, or must have some.

    Parameters
    ----------
    where
        In which pass they are missing.
    """
    return DataError("the table has no rows", where, "leave its files alone until the run ends; persist a Dask frame before its first use")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyCounts(Mechanism):
    """What mechanisms that release nothing but noisy counts of all rows have in common."""

    budget: Budget

    releases_rows: ClassVar[bool] = False
    nobody: ClassVar[str]
    protected: ClassVar[str] = COVERED
    unprotected: ClassVar[str] = UNCOVERED

    def check_parameters(self) -> None:
        """Check that no column has the role keep, since no input row is released, and check the specification.

        Raises
        ------
        SpecError
            If one is, or if the specification does not fit the schema and the budget.
        """
        if self.schema.kept:
            what = f"{self.nobody} do not correspond to input rows, so no column can have the role keep"
            raise SpecError(what, f"column {self.schema.kept[0]!r}", "give it the role privatise, or drop")
        check_bins(getattr(self.spec, "bins", None), self.schema)
        self.check_spec()
        for event in leaves(self.event):  # it cannot be planned for every budget
            if not isinstance(event, LocalRelease):
                check_scale(event.scale if isinstance(event, DiscreteLaplace) else event.sigma)

    @abstractmethod
    def draw(self, counts: Any, columns: Columns, noise: Noise) -> Archived:
        """Draw the noise on the driver and return the noisy counts; see `Mechanism.draw`."""

    @abstractmethod
    def read_drawn(self, data: bytes, columns: Columns) -> Archived:
        """Return noisy counts that an earlier driver kept; see `Mechanism.read_drawn`."""

    @abstractmethod
    def n_records(self, release: Any) -> int:
        """Return how many records a job writes; see `Mechanism.n_records`."""

    def check_spec(self) -> None:
        """Check the mechanism's own parameters, which need no table.

        Raises
        ------
        SpecError
            If something does not fit.
        """

    def cautions(self, columns: Columns, n_rows: int | None) -> tuple[str, ...]:
        """Return a warning if δ is so large that it would allow publishing a row; see `Mechanism.cautions`."""
        del columns
        return delta_warnings(self.budget, n_rows)

    def guarantee(self, order: RowOrder) -> str:
        """Return the promise in words; no row of the input is released, so no order matters."""
        del order
        return noisy_counts_text(self.budget)

    @property
    def n_rows_private(self) -> bool:
        """Whether neighbouring tables differ by the presence of a row."""
        return self.budget.adjacency == "add-remove"
