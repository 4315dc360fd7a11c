"""The server: its port, and its life until it is interrupted."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from localtrace.errors import ConfigError
from localtrace.store.sources import find_stores
from localtrace.viewer.app import make_app
from localtrace.viewer.guard import TOKEN, Guard
from localtrace.viewer.page import Page
from localtrace.viewer.page_request import PageRequest
from localtrace.viewer.pages import home, trajectories
from localtrace.viewer.shared_store import SharedStore

if TYPE_CHECKING:
    from localtrace.read.store import Store

_PORTS_TRIED = 20


def serve(
    store: Store, host: str, port: int | None, default_port: int, on_ready: Callable[[str], None]
) -> None:
    """Serve the pages of a store until Ctrl-C.

    Args:
        store: the opened store.
        host: the address to listen at.
        port: the port, 0 for any free one; None: the default or the next free one.
        default_port: the first port to try.
        on_ready: told the address to open, with its token, once the server listens.

    Raises:
        ConfigError: the address cannot be used.
    """
    listening = _listen(host, port, default_port)
    bound = listening.getsockname()[1]
    token = secrets.token_urlsafe(24)
    names = () if is_loopback(host) else (host, socket.gethostname(), socket.getfqdn())
    shared = SharedStore(store, find_stores(list(map(Path, store.paths))))
    pages = make_app(shared)
    config = uvicorn.Config(
        Guard(pages, token, bound, names),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
    )
    shown = f"[{host}]" if ":" in host else host
    on_ready(f"http://{shown}:{bound}/?{TOKEN}={token}")
    warming = WarmUp(shared, (home.PAGE, trajectories.PAGE))
    try:
        warming.start()
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        warming.stop()  # the caller closes the store, which no thread may read then


class WarmUp(threading.Thread):
    """Reads the pages that are opened first, so that nobody waits for what later ones reuse."""

    def __init__(self, shared: SharedStore, pages: Sequence[Page]) -> None:
        super().__init__(daemon=True)
        self._shared, self._pages = shared, pages
        self._ended = threading.Event()
        self._stores: list[Store] = []

    def run(self) -> None:
        """Read the pages."""
        for page in self._pages:
            # Whoever opens the page sees what is wrong.
            with contextlib.suppress(Exception), self._shared.reading() as (store, moment):
                self._stores.append(store)
                if not self._ended.is_set():
                    page.read(PageRequest(store, {}, {}, moment.kept))

    def stop(self) -> None:
        """Stop the query under way, and wait for the end."""
        self._ended.set()
        for store in self._stores:
            store.stop()
        if self.is_alive():
            self.join()


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int | None, default_port: int) -> socket.socket:
    ports = range(default_port, default_port + _PORTS_TRIED) if port is None else [port]
    problem: OSError | None = None
    for one in ports:
        try:
            family, *_, address = socket.getaddrinfo(host, one, type=socket.SOCK_STREAM)[0]
            found = socket.socket(family, socket.SOCK_STREAM)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
        except OSError as error:
            problem = error
        else:
            found.listen(128)
            return found
    tried = f"port {port}" if port is not None else f"ports {ports[0]} to {ports[-1]}"
    reason = problem.strerror if problem else "none is free"
    raise ConfigError(f"cannot listen at {host}, {tried}: {reason}; choose another with --port")
