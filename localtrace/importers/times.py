"""Times of other tools as ns since the Unix epoch."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, TypeGuard

from localtrace.importers.lines import BadLine

TIME_MAX_NS = 2**62
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def is_time(value: Any) -> TypeGuard[int]:
    """Return whether a value is a time, or a duration, in ns."""
    return type(value) is int and 0 <= value < TIME_MAX_NS


def parsed_ns(text: str) -> int:
    """Return the time that a text tells.

    Raises:
        BadLine: it is none, or not of our age.
    """
    try:
        return time_ns(datetime.fromisoformat(text))
    except ValueError:
        raise BadLine(f"{text[:40]!r} is no time of ISO 8601") from None


def time_ns(time: datetime) -> int:
    """Return a time; one without a zone is UTC.

    Raises:
        BadLine: it is not of our age.
    """
    try:
        since = (time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH
        found = (since // timedelta(microseconds=1)) * 1000
    except OverflowError:
        found = -1
    if not is_time(found):
        raise BadLine(f"{time} is no time of our age")
    return found
