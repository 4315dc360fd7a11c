"""Two to eight rollouts of any runs side by side."""

from __future__ import annotations

from localtrace.errors import NotFound, QueryError
from localtrace.read.trajectories import listed_ids
from localtrace.viewer.page import Facts, Page, copies
from localtrace.viewer.page_request import PageRequest
from localtrace.viewer.side_by_side import COLUMNS, side_by_side

_MOST = 8


def read(request: PageRequest) -> Facts:
    """Return the rollouts that the address names, compared with the first of them."""
    given = [one.strip() for one in request.required("ids").split(",") if one.strip()]
    if not 2 <= len(given) <= _MOST:
        raise QueryError(f"{len(given)} rollouts: choose two to {_MOST} to compare")
    whole = request.store.whole_ids(given)
    ids = list(dict.fromkeys(whole.get(one, one) for one in given))
    chosen, params = listed_ids(ids)
    sql = f"select {COLUMNS} from all_trajectories where {chosen}"
    found = {row["trace_id"]: row for row in request.rows(sql, params)}
    for one in ids:
        if one not in found:
            raise NotFound(f"no trajectory has the id {one}: choose them in the table")
    return {
        "title": f"{len(ids)} rollouts compared",
        "runs": len({row["run_id"] for row in found.values()}),
        **side_by_side(request, [found[one] for one in ids]),
        "copies": copies(
            request,
            f"select * from all_trajectories where {chosen}",
            params,
            command=f"diff {' '.join(ids)}",
            python=f"list(store.read({ids!r}))",
        ),
    }


PAGE = Page("/compare", "compare.html", read)
