"""Store the noisy histograms of a run as bytes, so that their noise is drawn only once."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dpdask.errors import InputError
from dpdask.privacy.events import DiscreteLaplace

HISTOGRAM_FORMAT = 1


def histograms_to_bytes(noisy: Mapping[str, NDArray[np.int64]], events: Mapping[str, DiscreteLaplace]) -> bytes:
    """Return the noisy counts of every column, and the scale of their noise, as bytes."""
    header = {"format": HISTOGRAM_FORMAT, "columns": list(noisy), "scales": [events[name].scale for name in noisy]}
    buffer = io.BytesIO()
    arrays = {str(place): counts for place, counts in enumerate(noisy.values())}
    np.savez(buffer, header=np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), **arrays)  # type: ignore[arg-type]  # numpy's stub confuses the names with its own
    return buffer.getvalue()


def histograms_from_bytes(data: bytes, events: Mapping[str, DiscreteLaplace], sizes: Mapping[str, int], where: str) -> dict[str, NDArray[np.int64]]:
    """Return the noisy counts that are stored in bytes.

    Parameters
    ----------
    data
        What `histograms_to_bytes` returned.
    events
        The noise that each column should have.
    sizes
        How many counts each column should have.
    where
        The file, for messages.

    Raises
    ------
    InputError
        If they contain something else, or different noise, and so belong to another version of dpdask.
    """
    wrong = InputError(
        "these are not the noisy histograms of this run", where, "resume with the version of dpdask that began it, or `dpdask abort` it"
    )
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            found = {name: arrays[str(place)] for place, name in enumerate(header["columns"])}
        scales = dict(zip(found, header["scales"], strict=True))
        fits = header["format"] == HISTOGRAM_FORMAT and scales == {name: event.scale for name, event in events.items()}
    except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile):
        raise wrong from None
    if not fits or any(counts.dtype != np.int64 or counts.shape != (sizes[name],) for name, counts in found.items()):
        raise wrong
    return found
