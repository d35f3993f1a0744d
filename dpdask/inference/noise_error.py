"""The privacy noise's part of an estimate's error. The noise has a public distribution, so it is redrawn; this is post-processing and costs no ε."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from dpdask.errors import SpecError
from dpdask.inference.m_estimators import HINT, WeightedSample

Floats = NDArray[np.float64]
Sampled = TypeVar("Sampled")

_REFUSED = 0.05


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoiseError:
    """The part of an estimate's error that comes from the privacy noise.

    Attributes
    ----------
    standard_error
        float64 array of the estimate's shape: its standard deviation over redrawn noise.
    repeats
        How many redrawn samples were fitted.
    refused
        How many more were not, having no minimum: they are left out, so the errors are somewhat too small if there are any.
    """

    standard_error: Floats
    repeats: int
    refused: int


def noise_error(estimator: Callable[[Sampled], Any], redraw: Callable[[Generator], Sampled], *, repeats: int = 200, rng: Generator) -> NoiseError:
    """Return the standard errors that the privacy noise causes, by a parametric bootstrap of the noise; it costs no ε.

    Parameters
    ----------
    estimator
        From a sample to a number or an array.
    redraw
        Gives the released sample with the noise drawn once more, as `make_redraw` or `NoisyHistogram.redraw` do.
    repeats
        How many times, at least 2.
    rng
        One of numpy's generators: to analyse a release protects nobody.

    Raises
    ------
    SpecError
        If there are fewer than 2 repeats, or more than one in twenty redrawn samples has no estimate.

    Notes
    -----
    The noise is added to counts that have it already. Where the estimate is nearly linear in the counts that is no
    matter; after a threshold, cells that the noise has removed are not there to be removed again. Sampling error and the
    error of taking centres for values are not in it.

    References
    ----------
    Efron and Tibshirani, An introduction to the bootstrap (1993), section 6.5.
    """
    if repeats < 2:
        raise SpecError("the bootstrap needs at least 2 repeats", "repeats", "take 200")
    found: list[Floats] = []
    refused = 0
    while len(found) < repeats:
        try:
            found.append(np.asarray(estimator(redraw(rng)), dtype=np.float64))
        except SpecError as error:
            refused += 1
            if refused > max(1.0, _REFUSED * repeats):
                raise SpecError(f"with the noise alone there is often no estimate: {error.what}", error.where, HINT) from None
    return NoiseError(standard_error=np.std(found, axis=0, ddof=1), repeats=repeats, refused=refused)


def make_redraw(sample: WeightedSample, scale: float, cut: int | None = None) -> Callable[[Generator], WeightedSample]:
    """Return a function for `noise_error` that adds discrete Laplace noise to every weight of a sample, and applies the threshold.

    Parameters
    ----------
    sample
        All cells of the histogram, also those of weight 0, which had noise like the others.
    scale, cut
        The scale of the noise and the least count that was kept (None: all), from the card.
    """
    share = -math.expm1(-1.0 / scale)

    def redraw(rng: Generator) -> WeightedSample:
        first, second = (rng.geometric(share, len(sample.weights)) for _ in range(2))
        weights = sample.weights + (first - second)
        return replace(sample, weights=weights if cut is None else np.where(weights >= cut, weights, 0.0))

    return redraw
