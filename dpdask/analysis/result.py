"""What an analysis of a release returns: an estimate of the original table, its standard error, and how far it may be biased."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from dpdask.errors import SpecError
from dpdask.privacy.rounding import write_digits

_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Result:
    """An estimate of a quantity of the original table.

    Attributes
    ----------
    estimate
        A number, a Series or a DataFrame; of dates Timestamps, whose errors are Timedeltas.
    standard_error
        Its standard deviation over drawing the rows from a population and releasing them, of the shape of the estimate. None where
        no standard error is known.
    bias_bound
        The largest possible bias, of the shape of the estimate or one number; 0.0 if there is none. None where no bound is known.
    limits
        What the numbers leave out, in words.
    find_ends
        Of a quantile: from a number of standard errors to the values at the ranks so far below and above it; None of others.
    """

    estimate: Any
    standard_error: Any
    bias_bound: Any = 0.0
    limits: tuple[str, ...] = ()
    find_ends: Callable[[float], tuple[Any, Any]] | None = None

    @classmethod
    def gather(cls, parts: Sequence[Result], index: pd.Index) -> Result:
        """Return several results of numbers as one, with Series.

        Parameters
        ----------
        parts
            The results, one or more.
        index
            What each is of.
        """
        columns = {name: [getattr(part, name) for part in parts] for name in ("estimate", "standard_error", "bias_bound")}
        estimate, error, bias = (None if all(each is None for each in column) else pd.Series(column, index) for column in columns.values())
        bias = None if None in columns["bias_bound"] else bias
        error = error if error is None or error.dtype != object else error.astype(float)
        limits = tuple(dict.fromkeys(limit for part in parts for limit in part.limits))
        finders = [part.find_ends for part in parts if part.find_ends is not None]

        def find_ends(deviations: float) -> tuple[Any, Any]:
            low, high = zip(*(find(deviations) for find in finders), strict=True)
            return pd.Series(low, index), pd.Series(high, index)

        own = find_ends if len(finders) == len(parts) else None
        return cls(estimate=estimate, standard_error=error, bias_bound=bias, limits=limits, find_ends=own)

    def interval(self, confidence: float = 0.95, *, ignore_bias: bool = False) -> tuple[Any, Any]:
        """Return the normal confidence interval, that of a quantile by ranks, widened by the bound on the bias.

        Parameters
        ----------
        confidence
            The probability with which it contains the true value, in (0, 1).
        ignore_bias
            Leave the bias out: the interval then holds the true value with that probability only if there is no bias.

        Raises
        ------
        SpecError
            If no standard error or no bound on the bias is known, or the confidence is not within 0 to 1.
        """
        if not isinstance(confidence, int | float | np.floating) or not 0 < confidence < 1:
            raise SpecError("the confidence is a probability between 0 and 1", "interval", "give a fraction such as 0.95, not a percentage")
        deviations = float(special.ndtri(0.5 + confidence / 2))
        if self.find_ends is not None:
            low, high = self.find_ends(deviations)
        elif self.standard_error is None:
            raise SpecError("no standard error is known, so there is no interval", "interval", "see `limits`")
        else:
            low, high = self.estimate - deviations * self.standard_error, self.estimate + deviations * self.standard_error
        if not ignore_bias:
            if self.bias_bound is None:
                what = "no bound on the bias is known, so no interval is known to hold the true value"
                use = "see `limits`; interval(ignore_bias=True) has the standard error alone"
                raise SpecError(what, "interval", use)
            low, high = low - self.bias_bound, high + self.bias_bound
        return low, high

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each number of the estimate: the estimate, its standard error and the bound on its bias."""
        if isinstance(self.estimate, pd.DataFrame):
            index: pd.Index = pd.MultiIndex.from_product([self.estimate.index, self.estimate.columns])
        else:
            index = self.estimate.index if isinstance(self.estimate, pd.Series) else pd.RangeIndex(1)
        parts = {"estimate": self.estimate, "standard_error": self.standard_error, "bias_bound": self.bias_bound}
        shape = np.shape(self.estimate)
        numbers = {name: np.ravel(np.broadcast_to(np.nan if part is None else part, shape)) for name, part in parts.items()}
        return pd.DataFrame(numbers, index=index)

    def __repr__(self) -> str:
        if isinstance(self.estimate, pd.Series | pd.DataFrame):
            frame = self.to_frame()
            more = f"\n… {len(frame) - _SHOWN:,} more" if len(frame) > _SHOWN else ""
            return str(frame.head(_SHOWN).to_string(float_format=lambda number: f"{number:.4g}")) + more
        if isinstance(self.estimate, pd.Timestamp):
            return self._describe_date(self.estimate)
        error = "no standard error" if self.standard_error is None else f"standard error {write_digits(self.standard_error)}"
        bias = "no bound on its bias" if self.bias_bound is None else f"bias at most {write_digits(self.bias_bound)}"
        bias = "unbiased" if self.bias_bound == 0.0 else bias
        if self.standard_error is None and self.find_ends is not None:
            low, high = self.find_ends(float(special.ndtri(0.975)))
            error, bias = f"at ranks within 1.96 standard errors {low:.6g} to {high:.6g}", "" if self.bias_bound == 0.0 else bias
            return f"{self.estimate:.6g} ({', '.join(filter(None, (error, bias)))})"
        return f"{self.estimate:.6g} ({error}, {bias})"

    def _describe_date(self, estimate: pd.Timestamp) -> str:
        bias = "no bound on its bias" if self.bias_bound is None else f"bias at most {self.bias_bound}" if self.bias_bound else "unbiased"
        return f"{estimate} (standard error {self.standard_error}, {bias})"
