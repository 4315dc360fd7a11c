"""`localtrace group`: the rollouts of one group beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localtrace.cli.completing import complete_filter
from localtrace.cli.options import FILTERS_HELP, format_option, store_option
from localtrace.errors import QueryError
from localtrace.schema import OUTPUT_TEXT_NAMES

if TYPE_CHECKING:
    import pyarrow as pa

    from localtrace.reader import Store

_SHOWN_MAX = 6
_WORDS_MAX = 200
"""Characters of an output that are read; a table shows fewer."""
_RESULT_TEXTS = ", ".join(f"a.outputs ->> '$.{name}'" for name in OUTPUT_TEXT_NAMES)
_GROUPS_SQL = f"""
select
    run_id, step, validate, any_value(group_id) as group_id,
    any_value(sample_index) as sample_index, any_value(prompt_hash) as prompt_hash, count(*) as n,
    list(trace_id) as trace_ids
from stored.flagged
where not superseded and group_key is not null and {{condition}}
group by project, experiment, run_id, step, validate, group_key
order by run_id, step, validate, sample_index, group_id, prompt_hash
limit {_SHOWN_MAX + 1}
"""
_ROLLOUTS_SQL = f"""
select
    if(max(reward) over () > min(reward) over (), case reward
        when max(reward) over () then 'best' when min(reward) over () then 'worst' end, null)
        as mark,
    t.trace_id, rollout_n, status, reward, advantage, fate, turn_count, output_tokens,
    (end_ns - start_ns) / 1e9 as duration_s, finish_type(a.reason) as finish_reason,
    left(coalesce(a.text, {_RESULT_TEXTS}), {_WORDS_MAX}) as output, run_id,
    a.ids[:{_WORDS_MAX}] as ids
from trajectories as t
left join (
    select
        trace_id, arg_max_null(finish_reason, seq) as reason,
        arg_max_null(output_text, seq) as "text", arg_max_null(output_ids, seq) as ids,
        arg_max_null(outputs, seq) as outputs
    from stored.spans
    where is_turn and step is not distinct from $step and trace_id in (select unnest($trace_ids))
    group by trace_id
) as a on a.trace_id = t.trace_id
where t.trace_id in (select unnest($trace_ids)) and t.step is not distinct from $step
order by rollout_n, start_ns, t.trace_id
"""


@click.command(epilog=FILTERS_HELP)
@click.argument("words", nargs=-1, metavar="[GROUP] [FILTER]...",
                shell_complete=complete_filter)  # fmt: skip
@store_option
@format_option
def command(words: tuple[str, ...], store_paths: tuple[Path, ...], form: str) -> None:
    """Compare the rollouts of one group: rewards, lengths, how they ended, how they answer.

    GROUP is a group id, or the beginning of one as long as it is unique. Filters that leave one
    group do as well, such as step=3 sample_index=17. Other formats than table print the rollouts.
    """
    if not words:
        raise click.UsageError("say which group: its id, or filters such as step=3 sample_index=17")
    from localtrace.cli.output import print_table
    from localtrace.reader import open_store

    with open_store(*store_paths) as store:
        group = _the_one(store, words)
        rollouts = _rollouts(store, group)
    if form == "table":
        _print_head(group, rollouts)
        if not any(rollouts["mark"].to_pylist()):
            rollouts = rollouts.drop_columns(["mark"])
    print_table(rollouts, form)


def _the_one(store: Store, words: tuple[str, ...]) -> dict[str, Any]:
    from localtrace.cli.matching import why_nothing
    from localtrace.filters import Filters, is_filter

    ids = [word for word in words if not is_filter(word)]
    if len(ids) > 1:
        raise QueryError(f"{ids[1]!r} is not a filter: name one group at a time")
    filters = Filters.parse(word for word in words if is_filter(word))
    condition, params = filters.where_clause()
    if not filters.knows_table:
        condition = f"trace_id in (select trace_id from trajectories where {condition})"
    if ids:
        condition += " and starts_with(group_id, $group)"
        params["group"] = ids[0]
    groups = store.sql(_GROUPS_SQL.format(condition=condition), params).to_dicts()
    exact = [group for group in groups if ids and group["group_id"] == ids[0]]
    groups = exact or groups
    if not groups and ids:
        raise QueryError(f"no group is called {ids[0]!r}: {why_nothing(store, filters)}")
    if not groups:
        raise QueryError(f"no group matches: {why_nothing(store, filters)}")
    if len(groups) > 1:
        listed = "; ".join(map(_place, groups[:_SHOWN_MAX]))
        more = "; …" if len(groups) > _SHOWN_MAX else ""
        raise QueryError(f"several groups match, narrow it down to one: {listed}{more}")
    return groups[0]


def _rollouts(store: Store, group: dict[str, Any]) -> pa.Table:
    import pyarrow as pa

    params = {"trace_ids": group["trace_ids"], "step": group["step"]}
    rows = store.sql(_ROLLOUTS_SQL, params).to_arrow()
    outputs = [
        store.decode(run_id, ids) if text is None and ids else text
        for run_id, text, ids in zip(
            *(rows[name].to_pylist() for name in ("run_id", "output", "ids")), strict=True
        )
    ]
    place = rows.column_names.index("output")
    rows = rows.set_column(place, "output", pa.array(outputs, pa.string()))
    return rows.drop_columns(["run_id", "ids"])


def _print_head(group: dict[str, Any], rollouts: pa.Table) -> None:
    from statistics import fmean, stdev

    from localtrace.terminal import escape_line

    rewards = [reward for reward in rollouts["reward"].to_pylist() if reward is not None]
    click.echo(escape_line(f"group {_place(group)}"))
    if not rewards:
        click.echo("no rewards yet")
        return
    spread = f", standard deviation {stdev(rewards):.4g}" if len(rewards) > 1 else ""
    click.echo(
        f"{len(rewards)} rewards: mean {fmean(rewards):.4g}, {min(rewards):.4g} to "
        f"{max(rewards):.4g}{spread}"
    )
    if len(rewards) > 1 and min(rewards) == max(rewards):
        click.echo("zero variance: all rewards are the same, so the group teaches nothing in GRPO")


def _place(group: dict[str, Any]) -> str:
    named = {"run": group["run_id"], **{k: group[k] for k in ("step", "sample_index")}}
    given = [f"{key}={value}" for key, value in named.items() if value is not None]
    given += [f"group={group['group_id']}"] if group["group_id"] is not None else []
    if group["group_id"] is None and group["sample_index"] is None:
        given.append(f"prompt_hash={group['prompt_hash']}")
    return f"{' '.join(given)} validate={str(group['validate']).lower()} ({group['n']} rollouts)"
