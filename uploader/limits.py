"""How much an upload may send, how fast, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one upload."""

    max_bytes: int | None = None
    """Send no more than this; the rest is left for the next upload."""
    rate_bytes_per_s: float | None = None
    patience_s: float = 120.0
    """How long one request is repeated while the target does not answer."""
