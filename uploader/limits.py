"""The limits of an upload: bytes, rate and patience."""

from __future__ import annotations

import time
from dataclasses import dataclass
from threading import Event


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one upload."""

    max_bytes: int | None = None
    """Most bytes to send; the rest is left for the next upload."""
    rate_bytes_per_s: float | None = None
    patience_s: float = 120.0
    """Longest time for which one request is repeated while the target does not answer."""


class Pace:
    """Delays that keep the average number of bytes per second at a rate; None: no delays."""

    def __init__(self, rate_bytes_per_s: float | None) -> None:
        self._rate = rate_bytes_per_s
        self._next_s = 0.0

    def wait(self, size_bytes: int, ended: Event) -> None:
        """Wait until this many more bytes may be sent, or until `ended` is set."""
        if self._rate is None:
            return
        now_s = time.monotonic()
        ended.wait(max(0.0, self._next_s - now_s))
        self._next_s = max(self._next_s, now_s) + size_bytes / self._rate
