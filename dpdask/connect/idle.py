"""The one page that a scheduler on Kubernetes serves: since when it has had no task. The operator removes a cluster whose driver is gone."""

from __future__ import annotations

from typing import Any

from distributed.http.scheduler.api import CheckIdleHandler

# Dask's configuration names this module as `distributed.scheduler.http.routes`; its other pages
# name tasks, show logs, and can stop workers
routes: list[tuple[str, Any, dict[str, Any]]] = [("/api/v1/check_idle", CheckIdleHandler, {})]
