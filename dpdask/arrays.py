"""The types that every room shares: arrays by their dtypes, and a few of them, for annotations, and frozen objects."""

from dataclasses import dataclass, field
from typing import Any, dataclass_transform

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]
Indices = NDArray[np.intp]
Words = NDArray[np.uint64]
Uint32s = NDArray[np.uint32]
Shorts = NDArray[np.uint16]
Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Codes = Bytes | Shorts
Pair = tuple[Floats, Floats]
Triple = tuple[Floats, Floats, Floats]
Ends = tuple[float, float]  # of an interval


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def freeze_class(cls: Any = None, /, **options: bool) -> Any:
    """Return a class as a dataclass as nearly all are here: frozen, with slots, and made by keywords."""
    make = dataclass(frozen=True, slots=True, **{"kw_only": True, **options})
    return make if cls is None else make(cls)
