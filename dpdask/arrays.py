"""Types of arrays by their dtypes, for annotations."""

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
