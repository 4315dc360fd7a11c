"""The table of trajectories: every filter in the address, sorted, as many rows as there are."""

from __future__ import annotations

from typing import Any

from localtrace.read.filters import Filters
from localtrace.viewer.asked import Asked, part, url
from localtrace.viewer.labelling import why_read_only
from localtrace.viewer.listing import Listing, rows_of, with_calls
from localtrace.viewer.page import (
    Facts,
    Page,
    bundle_command,
    command_filters,
    copies,
    python_rows,
    upload_command,
)

_FIRST = 60
_ROWS_MAX = 200
_PICKED = '"where=trace_id in (IDS)"'
"""A filter that names exactly some rollouts, quoted for a shell; the page fills the ids in."""
_SCALE_SQL = f"""
select min(finite(reward)) as low, max(finite(reward)) as high, max(output_tokens) as tokens
from {Filters().relation("reward")}
"""


def read(asked: Asked) -> Facts:
    """Return the first rows, the number of all, and what the table needs for the others.

    Texts, badges and the scale of bars take longest to read, so `/trajectories/rows` gives them.
    """
    listing = Listing(asked)
    return {
        "title": "Trajectories",
        "rows": _linked(asked, listing.first_rows(_FIRST)),
        "total": len(listing),
        "run_names": asked.several_runs,
        "sort": listing.sort,
        "rows_url": url("/trajectories/rows", q=asked.q, sort=asked.values.get("sort")),
        "groups_url": url("/groups", q=asked.q),
        "tokens_url": url("/tokens", q=asked.q),
        "copies": copies(
            asked,
            f"select * from trajectories where {asked.condition} order by {listing.order}",
            asked.params,
            f"ls {command_filters(asked.q)} --limit 0",
            python_rows(asked.filters),
        ),
        "upload": upload_command(asked, command_filters(asked.q)),
        "upload_picked": upload_command(asked, _PICKED),
        "bundle_picked": bundle_command(asked, _PICKED),
        "why_read_only": why_read_only(asked.store),
    }


def read_rows(asked: Asked) -> Facts:
    """Return the rows of some places of the table, with their texts and badges."""
    start = asked.number("from", 0)
    end = min(asked.number("to", start + _FIRST), start + _ROWS_MAX)
    listing = Listing(asked)
    rows = rows_of(asked, listing.slice(start, end)) if start else listing.first_rows(end)
    return {
        "rows": _linked(asked, with_calls(asked, rows)),
        "start": start,
        "total": len(listing),
        "run_names": asked.several_runs,
        "scale": _scale(asked),
    }


def _linked(asked: Asked, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    more = {"q": asked.q, "sort": asked.values.get("sort")}
    return [row | {"url": url(f"/trajectory/{part(row['trace_id'])}", **more)} for row in rows]


def _scale(asked: Asked) -> dict[str, Any]:
    # Of the whole store, so that a bar means the same under every filter.
    made: dict[str, Any] = asked.kept("scale", lambda: asked.rows(_SCALE_SQL)[0])
    return made


PAGE = Page("/trajectories", "trajectories.html", read)
ROWS = Page("/trajectories/rows", "rows.html", read_rows)
