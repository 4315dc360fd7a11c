"""Exceptions as the text of a record."""

from __future__ import annotations

import re
from typing import Any

from localtrace.values.kinds import bases_of, names_of, own_fields
from localtrace.values.objects import message_of

MAX_CHARS = 10_000
WHERE_MARK = "\n\nIn Ray:\n"
"""Line between an error and Ray's report of where it happened: process, address, traceback."""
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_CAUSES_MAX = 16


def error_text(error: BaseException) -> str:
    """Return the type and the message of an exception; never raises.

    The text of an exception that Ray brought from another process begins with the error there, so
    that equal errors have equal beginnings.
    """
    name = names_of(type(error))[1] or "BaseException"
    try:
        text = _of_ray(error) if _is_of_ray(error) else f"{name}: {message_of(error)}"
        return text[:MAX_CHARS].encode("utf-8", "replace").decode()
    except Exception:
        return name


def _is_of_ray(error: Any) -> bool:
    kinds = map(names_of, bases_of(type(error)))
    return any(kind == ("ray.exceptions", "RayTaskError") for kind in kinds)


def _of_ray(error: BaseException) -> str:
    cause: Any = error
    for _ in range(_CAUSES_MAX):
        if not _is_of_ray(cause):
            break
        cause = own_fields(cause)["cause"]
    where = _COLOURS.sub("", message_of(error))
    return f"RayTaskError({names_of(type(cause))[1]}): {message_of(cause)}{WHERE_MARK}{where}"
