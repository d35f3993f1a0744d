"""A TCP proxy in front of a store that counts requests, and refuses, delays or cuts what it is told to, or answers with an earlier listing."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from socketserver import BaseRequestHandler, ThreadingTCPServer

_REQUEST = re.compile(rb"^(GET|PUT|POST|DELETE|HEAD|PATCH) (\S+) HTTP/1\.1\r\n")
_RANGE = re.compile(rb"\r\n(?:x-ms-)?range: *bytes=(\S+)", re.IGNORECASE)
_LISTING = re.compile(r"[?&](list-type=2|comp=list)(&|$)")  # of S3 and of Azure


@dataclass(frozen=True)
class Request:
    """A request that came to the proxy."""

    method: str
    path: str
    range: str | None

    @property
    def lists(self):
        """Whether it asks for the names of files."""
        return self.method == "GET" and _LISTING.search(self.path) is not None

    def __str__(self):
        return f"{self.method} {self.path}" + (f" [{self.range}]" if self.range else "")


@dataclass
class _Order:
    """What to do with the next requests that match."""

    times: int
    matches: Callable[[Request], bool]
    act: str
    status: int = 0


@dataclass
class Proxy:
    """The proxy's switches; `requests` holds what came, in order.

    Attributes
    ----------
    endpoint
        The URL of the proxy.
    requests
        Everything that was asked for, also what was refused.
    delay_seconds
        How long each request waits before it is passed on.
    """

    endpoint: str
    requests: list[Request] = field(default_factory=list)
    delay_seconds: float = 0.0
    _orders: list[_Order] = field(default_factory=list)
    _listings: dict[str, bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def refuse_next(self, times=1, method="", path=""):
        """Reset the connection of the next requests; the store does not see them."""
        self._order("refuse", times, method, path)

    def cut_response(self, times=1, method="", path=""):
        """Reset the connection when the store has answered: what was asked for is done, and the client does not know."""
        self._order("cut", times, method, path)

    def answer_next(self, status, times=1, method="", path=""):
        """Answer the next requests with an HTTP status; the store does not see them."""
        self._order("answer", times, method, path, status)

    def list_as_before(self, times=1, path=""):
        """Answer the next listings as the same ones were answered first."""
        self._orders.append(
            _Order(times, lambda request: request.lists and path in request.path, "list as before")
        )

    def forget(self):
        """Forget the requests so far, the answers to listings, and what was still to be done."""
        with self._lock:
            self.requests.clear()
            self._listings.clear()
            self._orders.clear()
            self.delay_seconds = 0.0

    def _order(self, act, times, method, path, status=0):
        self._orders.append(
            _Order(
                times,
                lambda request: request.method.startswith(method) and path in request.path,
                act,
                status,
            )
        )

    def take(self, request):
        """Note a request, and return what to do with it."""
        with self._lock:
            self.requests.append(request)
            for order in self._orders:
                if order.times > 0 and order.matches(request):
                    order.times -= 1
                    return order.act, order.status
        return "pass", 0

    def keep_listing(self, request, answer):
        """Return how a listing was answered first, which may be now."""
        with self._lock:
            return self._listings.setdefault(request.path, answer)


@contextmanager
def proxying(upstream, listening=None):
    """Yield a proxy in front of an `http://host:port`; on a socket that listens already, or on a port of the loopback."""
    host, _, port = upstream.removeprefix("http://").rpartition(":")

    class Handler(BaseRequestHandler):
        def handle(self):
            _relay(proxy, self.request, (host, int(port)))

    class Server(ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True
        block_on_close = False

        def handle_error(self, request, client_address):
            """Say nothing of connections that ended."""

    with Server(("127.0.0.1", 0), Handler) as server:
        if listening is not None:
            server.socket.close()
            server.socket = listening
        at, port_of = server.socket.getsockname()[:2]
        proxy = Proxy(f"http://{at}:{port_of}")
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        thread.start()
        yield proxy
        server.shutdown()
        thread.join()


def _relay(proxy, client, upstream):
    with socket.create_connection(upstream) as store:
        for end in (
            client,
            store,
        ):  # else a short body waits 40 ms for the acknowledgement of its head
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        cutting = threading.Event()
        back = threading.Thread(target=_answer, args=(store, client, cutting), daemon=True)
        back.start()
        with suppress(OSError):
            while data := client.recv(2**18):
                found = _REQUEST.match(data)
                if found is not None:
                    ranged = _RANGE.search(data)
                    request = Request(
                        found[1].decode(), found[2].decode(), ranged[1].decode() if ranged else None
                    )
                    act, status = proxy.take(request)
                    time.sleep(proxy.delay_seconds)
                    if act == "refuse":
                        _reset(client)
                        break
                    if act == "answer":
                        client.sendall(
                            b"HTTP/1.1 %d Told\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                            % status
                        )
                        client.shutdown(socket.SHUT_WR)
                        while client.recv(
                            2**18
                        ):  # else the client's unread body would reset the connection before the answer is read
                            pass
                        break
                    if act == "cut":
                        cutting.set()
                    elif request.lists:
                        answer = _ask(upstream, data)
                        first = proxy.keep_listing(request, answer)
                        client.sendall(first if act == "list as before" else answer)
                        break
                store.sendall(data)
        with suppress(OSError):
            store.shutdown(socket.SHUT_RDWR)
        back.join()


def _ask(upstream, request):
    """Return the whole answer to a request that has no body."""
    with socket.create_connection(upstream) as store:
        store.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        return b"".join(iter(lambda: store.recv(2**18), b""))


def _answer(store, client, cutting):
    with suppress(OSError):
        while data := store.recv(2**18):
            if cutting.is_set() and not data.startswith(b"HTTP/1.1 100"):
                _reset(client)
                return
            client.sendall(data)
    with suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


def _reset(client):
    """End a connection by a reset, which a client cannot take for the end of an answer."""
    with suppress(OSError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.shutdown(socket.SHUT_RD)
        client.close()
