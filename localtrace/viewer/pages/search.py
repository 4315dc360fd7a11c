"""Search: a text, a regular expression or token ids, how often they occur by step, and where."""

from __future__ import annotations

from typing import Any

from localtrace.errors import QueryError
from localtrace.read.filters import Filters
from localtrace.read.trajectories import listed_ids, listed_steps
from localtrace.viewer import hits
from localtrace.viewer.addresses import part, url, with_terms, with_word, words_of
from localtrace.viewer.charts import chart_of, line
from localtrace.viewer.hits import KINDS, PARTS, Counted, Search
from localtrace.viewer.page import Facts, Page, command_filters, copies, python_rows, told
from localtrace.viewer.page_request import PageRequest

_SHOWN = 40
_WALKED_MAX = 50_000
"""The searched rollouts up to which previous and next go from hit to hit: they search again."""
_ROWS_SQL = """
select trace_id, run_id, step, sample_index, rollout_n, validate, status, reward, fate, fate_reason
from trajectories where {chosen}
"""


def read(request: PageRequest) -> Facts:
    """Return the hit rate by step, and the rollouts with a hit, each with its first one."""
    search = Search(
        request.one_of("by", KINDS, "text"),
        request.values.get("find", "").replace("\r\n", "\n"),
        request.one_of("in", PARTS, "generated"),
    )
    facts = {
        "title": "Search",
        "filters": str(request.filters),
        "by": search.by,
        "find": search.find,
        "in": search.inside,
        "kinds": KINDS,
        "parts": PARTS,
        "run_names": request.several_runs,
        "rows": None,
        "why": None,
        "copies": {},
    }
    if not search.find.strip():
        return facts
    try:
        return facts | _found(request, search, hits.count_hits(request, search))
    except QueryError as error:
        return facts | {"why": told(error)}


def _found(request: PageRequest, search: Search, counted: Counted) -> Facts:
    shown = request.number("shown", _SHOWN, hits.SHOWN_MAX)
    total, searched = counted.total("hits"), counted.total("searched")
    hits_q = with_word(request.q, search.hits_term())
    walks = counted.rest is None and searched <= _WALKED_MAX
    address = {"by": search.by, "find": search.find, "in": search.inside}
    rest = counted.rest and with_word(request.q, counted.rest)
    return {
        "rows": _rows(request, search, counted.first(shown), hits_q if walks else request.q),
        "total": total,
        "searched": searched,
        "unsearched": counted.total("rollouts") - searched,
        "steps": [
            {name: value for name, value in row.items() if name != "first_hits"}
            for row in counted.steps
        ],
        "charts": _charts(request, counted, address) if total else [],
        "rest": counted.rest,
        "rest_url": rest and url("/search", **address, q=rest),
        "more": url("/search", **address, q=request.q, shown=min(10 * shown, hits.SHOWN_MAX))
        if shown < min(total, hits.SHOWN_MAX)
        else None,
        "table_url": url("/trajectories", q=hits_q),
        "copies": copies(
            request,
            search.rate_sql(request),
            {**request.params, **search.params()},
            f"ls {command_filters(hits_q)} --limit 0",
            python_rows(Filters.parse(words_of(hits_q))),
        ),
    }


def _rows(
    request: PageRequest, search: Search, steps: dict[str, int | None], q: str
) -> list[dict[str, Any]]:
    if not steps:
        return []
    ids, params = listed_ids(steps)
    chosen = f"{ids} and {listed_steps(steps.values())}"
    rows = {row["trace_id"]: row for row in request.rows(_ROWS_SQL.format(chosen=chosen), params)}
    found = hits.snippets(request, search, steps)
    return [
        rows[trace_id] | _with_links(request, search, rows[trace_id], found[trace_id], q)
        for trace_id in steps
        if trace_id in rows and trace_id in found
    ]


def _with_links(
    request: PageRequest, search: Search, row: dict[str, Any], snippet: dict[str, Any], q: str
) -> dict[str, Any]:
    path = f"/trajectory/{part(row['trace_id'])}"
    kept = {"q": q, "sort": "-step"}
    if search.by == "ids":
        snippet, is_text = hits.decoded(request, row["run_id"], snippet)
        if snippet["place"] == "generated" and snippet["turn"] is not None:
            at = f"{snippet['turn']}.{snippet['hit_at']}"
            return snippet | {"url": url(f"{path}/tokens", **kept, at=at)}
        kept["mark"] = snippet["hit"] if is_text else ""
    elif search.by == "regex":
        kept["mark"] = hits.unescaped(snippet)
    else:
        kept["find"] = search.find
    return snippet | {"url": f"{url(path, **kept, call=snippet['span_id'])}#here"}


def _charts(
    request: PageRequest, counted: Counted, address: dict[str, str]
) -> list[dict[str, Any]]:
    rows = sorted(
        (row for row in counted.steps if row["step"] is not None), key=lambda row: row["step"]
    )
    links = {
        str(row["step"]): url("/search", **address, q=with_terms(request.q, step=row["step"]))
        for row in rows
    }
    runs = list(dict.fromkeys(row["run_id"] for row in rows))
    lines = list(dict.fromkeys((row["run_id"], row["validate"]) for row in rows))
    rates = [
        line(
            ("validation" if validate else "hit rate") + (f" {run}" if runs[1:] else ""),
            [(row["step"], row["hits"] / row["searched"]) for row in rows
             if (row["run_id"], row["validate"]) == (run, validate) and row["searched"]],
            runs.index(run),
            dashed=validate,
        )
        for run, validate in lines[:8]
    ]  # fmt: skip
    charts = [chart_of("Rollouts with a hit", rates, links, "percent")]
    if len(runs) == 1:
        training = [row for row in rows if not row["validate"]]
        rewards = [
            line(name, [(row["step"], row[column]) for row in training], colour, dashed=colour > 0)
            for colour, (name, column) in enumerate(
                {"with a hit": "mean_reward_hits", "others": "mean_reward_others"}.items()
            )
        ]
        odd = sum(row["not_finite"] for row in training)
        charts.append(chart_of("Mean reward", rewards, links, not_finite=odd))
    return charts


PAGE = Page("/search", "search.html", read)
