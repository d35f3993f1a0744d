"""Noisy tables as arrays and a header: the same tables, the same bytes."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpdask.errors import InputError, SpecError
from dpdask.mechanisms.marginals.noise import MarginalNoise, NoisyMarginals
from dpdask.privacy.events import CentralEvent, DiscreteGaussian, DiscreteLaplace, from_dict, to_dict
from dpdask.stats import Domain

MARGINALS_FORMAT = 1

# what reading the bytes of something else, or half of the right ones, may raise
UNREADABLE = (ValueError, KeyError, TypeError, IndexError, OSError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error, SpecError)


def noisy_to_arrays(noisy: NoisyMarginals) -> dict[str, Any]:
    """Return noisy tables as arrays that `numpy.savez` takes."""
    header = {
        "format": MARGINALS_FORMAT,
        "names": noisy.domain.names,
        "sizes": noisy.domain.sizes,
        "n_rows": noisy.n_rows,
        "one_way": _event(noisy.noise.one_way),
        "pairs": _event(noisy.noise.pairs),
        "cliques": [[list(clique), to_dict(event)] for clique, event in noisy.noise.cliques.items()],
    }
    tables = {f"clique_{place}": noisy.cliques[clique] for place, clique in enumerate(noisy.noise.cliques)}
    return {"tables": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8), "one_way": noisy.one_way, "pairs": noisy.pairs, **tables}


def noisy_from_arrays(arrays: Mapping[str, Any]) -> NoisyMarginals:
    """Return the noisy tables that arrays hold.

    Raises
    ------
    ValueError, KeyError
        If they are of another format.
    """
    header = json.loads(arrays["tables"].tobytes())
    if header["format"] != MARGINALS_FORMAT:
        raise ValueError("another format")
    events = {tuple(clique): central_event(event) for clique, event in header["cliques"]}
    return NoisyMarginals(
        domain=Domain(names=tuple(header["names"]), sizes=tuple(header["sizes"])),
        n_rows=header["n_rows"],
        noise=MarginalNoise(
            one_way=None if header["one_way"] is None else central_event(header["one_way"]),
            pairs=None if header["pairs"] is None else central_event(header["pairs"]),
            cliques=events,
        ),
        one_way=arrays["one_way"],
        pairs=arrays["pairs"],
        cliques={clique: arrays[f"clique_{place}"] for place, clique in enumerate(events)},
    )


def noisy_to_bytes(noisy: NoisyMarginals) -> bytes:
    """Return noisy tables as bytes."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **noisy_to_arrays(noisy))
    return buffer.getvalue()


def noisy_from_bytes(data: bytes, where: str | None = None) -> NoisyMarginals:
    """Return the noisy tables that bytes hold.

    Raises
    ------
    InputError
        If they are something else.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return noisy_from_arrays({name: arrays[name] for name in arrays.files})
    except UNREADABLE:
        raise InputError("these are no noisy tables of this version", where, "abort the run and begin again") from None


def _event(event: CentralEvent | None) -> dict[str, Any] | None:
    return None if event is None else to_dict(event)


def central_event(data: dict[str, Any]) -> CentralEvent:
    """Return the central event that a mapping holds.

    Raises
    ------
    ValueError, SpecError
        If it holds none.
    """
    event = from_dict(data)
    if not isinstance(event, DiscreteGaussian | DiscreteLaplace):
        raise ValueError("no central event")  # noqa: TRY004 - a wrong file, like every other of its errors
    return event
