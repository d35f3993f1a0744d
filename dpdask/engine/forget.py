"""Remove fitted releases from the memory of this process and of a cluster's workers, when a run ends or a release is closed."""

from __future__ import annotations

from contextlib import suppress

from dpdask.channels.optimal import solved_weights
from dpdask.engine.choose import load_bounds
from dpdask.engine.compute import active_client
from dpdask.engine.release import load_release
from dpdask.engine.rows import load_designs
from dpdask.engine.synthesise import load_copula, load_histogram

CACHES = (load_release, load_designs, load_copula, load_histogram, load_bounds, solved_weights)
_PATIENCE_SECONDS = 10.0


def forget_here() -> None:
    """Empty this process's caches of private files and of what was computed from them; a task that still needs them reads them again."""
    for cache in CACHES:
        cache.cache_clear()


def forget_everywhere() -> None:
    """Empty the caches of this process and of every worker of the active cluster; ignore workers that are gone."""
    forget_here()
    client = active_client()
    if client is None or client.asynchronous:
        return
    with suppress(Exception):  # a failure does not matter: if a worker is lost, so is its memory
        client.run(forget_here, on_error="ignore", callback_timeout=_PATIENCE_SECONDS)
