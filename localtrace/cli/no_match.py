"""Messages for an empty result: which filter excludes everything, and which values exist."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from localtrace.printing import say
from localtrace.read.filter_registry import FILTERS

if TYPE_CHECKING:
    from localtrace.read.filters import Filters
    from localtrace.read.store import Store

_SHOWN_MAX = 6


def say_nothing_matches(store: Store, filters: Filters) -> None:
    """Say on stderr why no trajectory matches."""
    say(f"no trajectory matches: {why_nothing(store, filters)}", err=True)


def why_nothing(store: Store, filters: Filters) -> str:
    """Return one line: why no trajectory matches the filters, and which values exist."""
    runs = _runs(store)
    if not runs:
        hold = "holds" if len(store.paths) == 1 else "hold"
        return f"{', '.join(map(str, store.paths))} {hold} no trajectory yet"
    for key, alone in filters.by_key().items():
        condition, params = alone.where_clause()
        sql = f"select 1 from trajectories where {condition} limit 1"
        if not len(store.own_sql(sql, params, alone)):
            wanted = next(map(str, alone.terms[0].values), "")
            values = "" if FILTERS[key].is_literal else _values(store, key, wanted)
            filter_text = " ".join(str(alone).split())
            is_name = filter_text == f"run={wanted}"
            lacks = f"no run matches {wanted}" if is_name else f"nothing has {filter_text}"
            return f"{lacks}{values}{_pruned(store, key)}"
    together = "each filter matches something alone; no trajectory matches all; "
    together *= len(filters.by_key()) > 1
    return f"{together}there are {', '.join(runs[:_SHOWN_MAX])}{_more(runs)}"


def _pruned(store: Store, key: str) -> str:
    """Return a remark where a filter looks into calls and some were pruned."""
    from localtrace.read.filters import Filters

    if FILTERS[key].view not in ("spans", "stored.spans", "detectors"):
        return ""
    every = Filters().relation(with_superseded=True)
    counted = f"select count(spans_pruned) as n from {every}"
    count = store.own_sql(counted).to_dicts()[0]["n"]
    return f"; the calls of {count} trajectories were pruned" if count else ""


def _runs(store: Store) -> list[str]:
    from localtrace.read.filters import Filters

    every = Filters().relation(with_superseded=True)
    rows = store.own_sql(
        f"select run_id, min(step) as low, max(step) as high from {every} "
        "group by run_id order by min(start_ns)"
    ).to_dicts()
    return [f"run {row['run_id']}{_steps(row)}" for row in rows]


def _steps(row: dict[str, Any]) -> str:
    return "" if row["low"] is None else f" with steps {row['low']}..{row['high']}"


def _values(store: Store, key: str, wanted: str) -> str:
    column, view = FILTERS[key].column, FILTERS[key].view
    if FILTERS[key].is_number:
        extremes = (
            f"select min(finite({column})) as low, max(finite({column})) as high, "
            f"count(*) filter (not isfinite({column})) as odd from {view}"
        )
        (row,) = store.own_sql(extremes).to_dicts()
        parts = [] if row["low"] is None else [_range(row)]
        parts += [f"not finite in {row['odd']} rows"] if row["odd"] else []
        return f": it is {', '.join(parts) or 'null everywhere'}"
    rows = store.own_sql(
        f"select {column}::varchar as value, count(*) as n from {view} where {column} is not null "
        "group by all order by n desc, value"
    ).to_dicts()
    known = [row["value"] for row in rows]
    close = get_close_matches(wanted, known, 1)
    hint = f"Did you mean {close[0]}? " if close else ""
    listed = ", ".join(known[:_SHOWN_MAX]) + _more(known)
    noun = "Runs" if key == "run" else "Values"
    return f". {hint}{noun} here: {listed}" if known else ": it is null everywhere"


def _range(row: dict[str, Any]) -> str:
    low, high = (f"{value:.6g}" for value in (row["low"], row["high"]))
    return low if low == high else f"{low}..{high}"


def _more(listed: list[str]) -> str:
    return f" and {len(listed) - _SHOWN_MAX} more" if len(listed) > _SHOWN_MAX else ""
