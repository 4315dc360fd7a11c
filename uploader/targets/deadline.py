"""A time limit for a whole exchange with a server.

Timeouts of HTTP libraries apply to a single read or write. A server that sends a byte now and then,
of a body or of endless headers, keeps each of them, and would hold an upload for ever.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Event, Lock, Timer
from typing import Any
from weakref import WeakSet

_OPENED = ("connect_tcp.complete", "start_tls.complete")


class Sockets:
    """The open sockets of a session, which can be shut down while other threads wait on them."""

    def __init__(self) -> None:
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._lock = Lock()
        self._is_closed = False

    def note(self, event: str, info: Mapping[str, Any]) -> None:
        """Remember a socket that was opened. httpcore calls this as its extension `trace`."""
        if event.endswith(_OPENED):
            with self._lock:
                self._sockets.add(info["return_value"].get_extra_info("socket"))
            if self._is_closed:
                self.shut()

    @contextmanager
    def ended_after(self, seconds: float) -> Iterator[Event]:
        """Shut all sockets down if the block takes longer; the event says that this happened.

        All of them, because nothing tells which socket the request uses. Requests of other threads
        to the same server fail too, and are repeated.
        """
        is_over = Event()

        def end() -> None:
            is_over.set()
            self.shut()

        timer = Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield is_over
        finally:
            timer.cancel()

    def close(self) -> None:
        """Shut all sockets down, and those that other threads are about to open."""
        self._is_closed = True
        self.shut()

    def shut(self) -> None:
        """Shut all sockets down, so that nobody waits on one any more."""
        with self._lock:
            for one in self._sockets:
                with suppress(OSError):
                    # The method of TLS sockets would discard TLS state that another thread uses.
                    socket.socket.shutdown(one, socket.SHUT_RDWR)
