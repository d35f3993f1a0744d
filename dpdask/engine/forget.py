"""Fitted releases leave the memory of this process and of a cluster's workers, when the run or the frames that needed them end."""

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
    """Empty this process's caches of what was read from private folders or computed from it; who still needs it reads again."""
    for cache in CACHES:
        cache.cache_clear()


def forget_everywhere() -> None:
    """Empty the caches of this process and of every worker of the active cluster; one that has gone away is let go."""
    forget_here()
    client = active_client()
    if client is None or client.asynchronous:
        return
    with suppress(Exception):  # what follows is not worth failing for: a lost worker's memory is lost too
        client.run(forget_here, on_error="ignore", callback_timeout=_PATIENCE_SECONDS)
