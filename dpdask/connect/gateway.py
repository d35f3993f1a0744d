"""A cluster of a Dask Gateway server; it brings TLS between client, scheduler and workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import dask

from dpdask.connect.address import hide_user, import_extra, silence_dask
from dpdask.connect.spec import Gateway
from dpdask.errors import SpecError, TemporaryError


@contextmanager
def open_workers(cluster: Gateway) -> Iterator[str]:
    """Run the block on a new cluster of a gateway; yield a description of it."""
    gateway = import_extra("dask_gateway", "gateway")
    client_module = import_extra("dask_gateway.client", "gateway")
    where = hide_user(cluster.address)
    with silence_dask():
        try:
            started = gateway.GatewayCluster(
                address=cluster.address,
                proxy_address=cluster.proxy_address,
                cluster_options=None,
                shutdown_on_close=True,
                **cluster.options,
            )
        except (ValueError, TypeError):
            raise SpecError(
                "the gateway refuses the cluster",
                where,
                "check cluster.options and the rights of this user",
            ) from None
        except client_module.GatewayClusterError:
            raise TemporaryError(
                "the gateway could not start the cluster", where, "run again"
            ) from None
        except client_module.aiohttp.ClientResponseError:
            raise SpecError(
                "the gateway refuses this user", where, "set Dask's gateway.auth configuration"
            ) from None
        except (client_module.GatewayServerError, client_module.aiohttp.ClientError, OSError):
            raise TemporaryError(
                "the gateway does not answer", where, "check cluster.address and that it runs"
            ) from None
        with (
            started,
            started.get_client(set_as_default=False) as client,
            dask.config.set(scheduler=client),
        ):
            if cluster.adaptive is None:
                started.scale(cluster.workers)
            else:
                started.adapt(minimum=cluster.adaptive.minimum, maximum=cluster.adaptive.maximum)
            yield f"a cluster of the gateway at {where}"
