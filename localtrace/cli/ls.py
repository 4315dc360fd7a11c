"""`localtrace ls`: list trajectories by filters."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localtrace.cli.options import FILTERS_HELP, filters_argument, format_option, store_option
from localtrace.errors import QueryError
from localtrace.printing import say

if TYPE_CHECKING:
    import pyarrow as pa

    from localtrace.read.filters import Filters
    from localtrace.read.store import Store

_COLUMNS = (
    "trace_id", "run_id", "step", "sample_index", "rollout_n", "validate", "status", "reward",
    "advantage", "fate", "turn_count", "output_tokens", "started_at", "spans_pruned",
)  # fmt: skip

_ELSEWHERE = (*_COLUMNS, "run_name", "labels", "prompt", "answer")
_KEYS = ("trace_id", "run_id", "step", "sample_index", "rollout_n")
_PLACE = ("step", "sample_index", "rollout_n")
_ADDED = ("run_name", "place", "labels", "prompt", "answer", "reference")
"""Columns that `ls` adds to those of the view `trajectories`."""
_ON_TERMINAL = ("trace_id", "run_name", "place", "validate", "status", "reward", "labels",
                "spans_pruned", "prompt", "answer")  # fmt: skip
"""Columns on a terminal, without those that say nothing."""
_USUAL: dict[str, list[Any]] = {
    "run_name": [None], "validate": [False], "status": ["ok"], "labels": [None],
    "spans_pruned": [None],
}  # fmt: skip
"""Values with which such a column says nothing."""
_REAL = frozenset({"reward", "advantage"})
"""Columns whose values that are not finite are sorted last."""
_FEW = 20_000
"""Trajectories up to which one query for the rows costs less than to find out their ids first."""
_SHARED_MIN = 12
"""Characters of a beginning that all prompts share; a shorter one is printed."""


def _columns(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in (*_COLUMNS, *_ADDED)]
    if unknown:
        from localtrace.read.view_columns import columns_of

        known = [*(column.name for column in columns_of("trajectories")), *_ADDED]
        for name in unknown:
            if name not in known:
                hint = difflib.get_close_matches(name, known, 1)
                meant = f", did you mean {hint[0]}?" if hint else ""
                raise QueryError(
                    f"no column is called {name!r}{meant}: there are {', '.join(known)}"
                )
    return names


@click.command(epilog=FILTERS_HELP)
@filters_argument
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Number of trajectories; 0 for all.",
)
@click.option(
    "--sort",
    default="-started_at",
    show_default=True,
    metavar="COLUMN",
    help="Column to sort by; -COLUMN for descending order.",
)
@click.option("--columns", callback=_columns, metavar="A,B,C",
              help="Columns to print: those of the view trajectories, and "
                   f"{', '.join(_ADDED)}.")  # fmt: skip
@store_option
@format_option
def command(
    filters: Filters,
    limit: int,
    sort: str,
    columns: tuple[str, ...] | None,
    store_paths: tuple[Path, ...],
    form: str,
) -> None:
    """List trajectories, the newest first, with their prompts and answers.

    A terminal shows the columns that fit; elsewhere all are printed. The column place is
    step/sample_index/rollout_n, run_name tells the runs apart, labels are those that people gave,
    and reference is the expected answer.
    """
    from localtrace.cli.no_match import say_nothing_matches
    from localtrace.cli.output import is_for_terminal, print_table
    from localtrace.read.store import open_store

    fits = columns is None and is_for_terminal(form)
    names = columns or (_ON_TERMINAL if fits else _ELSEWHERE)
    with open_store(*store_paths) as store:
        rows, total = _listed(store, filters, limit, sort, names)
        texts = _added(store, rows, names)
        if is_for_terminal(form) and "prompt" in texts:
            texts["prompt"] = _without_shared_beginning(texts["prompt"])
        if fits:
            names = tuple(name for name in names if _says_something(name, rows, texts))
        print_table(rows, form, texts, names)
        if not len(rows):
            say_nothing_matches(store, filters)
        elif total > len(rows):
            said = f"{limit} of {total} trajectories; see more with --limit"
            say(said, err=True)


def _listed(
    store: Store, filters: Filters, limit: int, sort: str, names: Sequence[str]
) -> tuple[pa.Table, int]:
    """Return the rows to print, and the count of all that match."""
    from localtrace.read.trajectories import listed_ids, listed_steps

    column = sort.removeprefix("-")
    if column not in _COLUMNS:
        raise QueryError(f"cannot sort by {column!r}: sort by one of {', '.join(_COLUMNS)}")
    direction = "desc" if sort.startswith("-") else "asc"
    key = f"finite({column})" if column in _REAL else column
    order = f"order by {key} {direction} nulls last, trace_id limit {limit or 'all'}"
    condition, params = filters.where_clause()
    chosen = f"from {filters.relation(column)} where {condition}"
    run = partial(store.own_sql, filters=filters)
    total = run(f"select count(*) as n {chosen}", params).to_dicts()[0]["n"]
    if limit and total > _FEW:
        # Of many, the outcomes of those to print alone are read.
        listed = run(f"select trace_id, step {chosen} {order}", params).to_arrow()
        in_ids, bound = listed_ids(listed["trace_id"].to_pylist())
        chosen_rows = f"{in_ids} and {listed_steps(listed['step'].to_pylist())}"
    else:
        chosen_rows, bound = condition, params
    taken = dict.fromkeys((*_KEYS, *(name for name in names if name not in _ADDED)))
    taken |= {"attributes": None} if "reference" in names else {}
    rows = run(
        f"select {', '.join(taken)} from trajectories where {chosen_rows} {order}", bound
    ).to_arrow()
    return rows, total


def _added(store: Store, rows: pa.Table, names: Sequence[str]) -> dict[str, list[str | None]]:
    """Return those of the columns that the view does not have."""
    from localtrace.read.excerpts import Excerpt, read_excerpts, reference_of
    from localtrace.read.labels import labels_of
    from localtrace.read.run_names import run_names
    from localtrace.values.codec import fields_from_json

    made: dict[str, list[str | None]] = {}
    ids = rows["trace_id"].to_pylist()
    steps = dict(zip(ids, rows["step"].to_pylist(), strict=True))

    def run(sql: str, params: Mapping[str, Any]) -> pa.Table:
        return store.own_sql(sql, params).to_arrow()

    if "labels" in names:
        labels = labels_of(run, steps)
        made["labels"] = [str(labels[one]) if one in labels else None for one in ids]
    if "run_name" in names:
        told_apart = run_names(store)
        made["run_name"] = [told_apart.get(run_id) for run_id in rows["run_id"].to_pylist()]
    if "place" in names:
        places = zip(*(rows[name].to_pylist() for name in _PLACE), strict=True)
        made["place"] = ["/".join("-" if at is None else str(at) for at in one) for one in places]
    if "reference" in names:
        made["reference"] = [
            reference_of(fields_from_json(text)) for text in rows["attributes"].to_pylist()
        ]
    if "prompt" in names or "answer" in names:
        found = read_excerpts(run, store.decode, steps)
        excerpts = [found.get(trace_id, Excerpt(None, None)) for trace_id in ids]
        made["prompt"] = [excerpt.prompt for excerpt in excerpts]
        made["answer"] = [excerpt.answer for excerpt in excerpts]
    return {name: values for name, values in made.items() if name in names}


def _says_something(name: str, rows: pa.Table, texts: Mapping[str, Sequence[str | None]]) -> bool:
    if name not in _USUAL:
        return True
    values = texts[name] if name in texts else rows[name].unique().to_pylist()
    return any(value not in _USUAL[name] for value in values)


def _without_shared_beginning(prompts: list[str | None]) -> list[str | None]:
    """Cut the beginning that all prompts share, such as a system prompt: it tells none apart."""
    from localtrace.store.whole_prompts import shared_prefix

    distinct = {prompt for prompt in prompts if prompt is not None}
    # In sorted order, all others begin with what the first and the last share.
    least, most = min(distinct, default=""), max(distinct, default="")
    shared = least[: shared_prefix(list(least), list(most))] if least != most else ""
    known = 1 + max(shared.rfind(space) for space in " \n")
    if known < _SHARED_MIN:
        return prompts
    return [None if prompt is None else f"…{prompt[known:]}" for prompt in prompts]
