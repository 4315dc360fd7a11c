"""Objects of JSON as dicts."""

from __future__ import annotations

from typing import Any, TypeAlias

Fields: TypeAlias = dict[str, Any]


def known(fields: Fields) -> Fields:
    """Return the fields that are not null."""
    return {name: value for name, value in fields.items() if value is not None}
