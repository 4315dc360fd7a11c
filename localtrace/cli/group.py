"""`localtrace group`: compare the rollouts of one group."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localtrace.cli.options import FILTERS_HELP, complete_filter, format_option, store_option
from localtrace.errors import QueryError
from localtrace.printing import say, say_text

if TYPE_CHECKING:
    import pyarrow as pa

    from localtrace.read.store import Store

_SHOWN_MAX = 6
_HEAD_MAX, _TAIL_MAX = 300, 500
"""Characters shown of a prompt's beginning, and of its end, where the question stands."""
_GROUPS_SQL = f"""
select
    run_id, step, validate, any_value(group_id) as group_id,
    any_value(sample_index) as sample_index, any_value(prompt_hash) as prompt_hash, count(*) as n,
    list(trace_id) as trace_ids
from {{relation}}
where group_key is not null and {{condition}}
group by project, experiment, run_id, step, validate, group_key
order by run_id, step, validate, sample_index, group_id, prompt_hash
limit {_SHOWN_MAX + 1}
"""
_ROLLOUTS_SQL = """
select
    if(max(finite(reward)) over () > min(finite(reward)) over (), case reward
        when max(finite(reward)) over () then 'best'
        when min(finite(reward)) over () then 'worst' end, null)
        as mark,
    t.trace_id, rollout_n, status, reward, advantage, fate, turn_count, output_tokens,
    (end_ns - start_ns) / 1e9 as duration_s, finish_type(a.reason) as finish_reason, spans_pruned,
    attributes
from trajectories as t
left join (
    select trace_id, arg_max_null(finish_reason, row(seq, coalesce(batch_index, 0))) as reason
    from stored.spans
    where is_turn and step is not distinct from $step and trace_id in (select unnest($trace_ids))
    group by trace_id
) as a on a.trace_id = t.trace_id
where t.trace_id in (select unnest($trace_ids)) and t.step is not distinct from $step
order by rollout_n, start_ns, t.trace_id
"""
_ONLY_IF_DIFFERENT = {"status", "finish_reason"}
"""Columns that a terminal shows only if the rollouts differ in them."""
_ON_TERMINAL = ("mark", "trace_id", "rollout_n", "status", "reward", "output_tokens",
                "finish_reason", "output")  # fmt: skip


@click.command(epilog=FILTERS_HELP)
@click.argument("words", nargs=-1, metavar="[GROUP] [FILTER]...",
                shell_complete=complete_filter)  # fmt: skip
@click.option("--diff", "differs", is_flag=True,
              help="Also compare the best rollout with each of the others.")  # fmt: skip
@store_option
@format_option
def command(
    words: tuple[str, ...], differs: bool, store_paths: tuple[Path, ...], form: str
) -> None:
    """Compare the rollouts of one group: rewards, lengths, finish reasons and answers.

    The prompt is printed first, and the reference (the expected answer) if it was recorded.

    GROUP is a group id, or a unique beginning of one. Filters that match a single group do as well,
    such as step=3 sample_index=17. --format json, csv and parquet print the rollouts only.
    """
    if not words:
        raise click.UsageError("say which group: its id, or filters such as step=3 sample_index=17")
    if differs and form != "table":
        raise click.UsageError("--diff and --format exclude each other: choose one")
    from localtrace.cli.diff import print_comparison
    from localtrace.cli.output import is_for_terminal, print_table
    from localtrace.read.store import open_store

    with open_store(*store_paths) as store:
        group = _find_group(store, words)
        rollouts, prompts, outputs = _rollouts(store, group)
        hidden = {"attributes"}
        if form == "table":
            _print_head(group, rollouts, prompts)
            hidden |= set() if any(rollouts["mark"].to_pylist()) else {"mark"}
        if rollouts["spans_pruned"].null_count == len(rollouts):
            hidden.add("spans_pruned")
        names = [name for name in (*rollouts.column_names, "output") if name not in hidden]
        if is_for_terminal(form):
            alike = {name for name in _ONLY_IF_DIFFERENT if len(rollouts[name].unique()) < 2}
            names = [name for name in _ON_TERMINAL if name in names and name not in alike]
        print_table(rollouts, form, {"output": outputs}, names)
        if differs:
            best, *others = _best_first(rollouts)
            say()
            print_comparison(store, [best, *others], ["text"])


def _best_first(rollouts: pa.Table) -> list[str]:
    """Return the ids: the one of the highest finite reward, then the others in their order."""
    rewards = rollouts["reward"].to_pylist()
    known, _ = _finite(rewards)
    if len(rewards) < 2 or not known:
        lack = "it has a single rollout" if len(rewards) < 2 else "no rollout has a finite reward"
        raise QueryError(f"the group has no best rollout to compare ({lack}): leave out --diff")
    ids = rollouts["trace_id"].to_pylist()
    best = ids[rewards.index(max(known))]
    return [best, *(trace_id for trace_id in ids if trace_id != best)]


def _finite(rewards: list[float | None]) -> tuple[list[float], int]:
    """Return the finite rewards, and how many others are not null."""
    known = [reward for reward in rewards if reward is not None]
    finite = [reward for reward in known if isfinite(reward)]
    return finite, len(known) - len(finite)


def _find_group(store: Store, words: tuple[str, ...]) -> dict[str, Any]:
    from localtrace.cli.no_match import why_nothing
    from localtrace.read.filters import Filters, key_of

    ids = [word for word in words if not key_of(word)]
    if len(ids) > 1:
        raise QueryError(f"{ids[1]!r} is not a filter: name one group at a time")
    filters = Filters.parse(word for word in words if key_of(word))
    condition, params = filters.where_clause()
    if ids:
        condition += " and starts_with(group_id, $group)"
        params["group"] = ids[0]
    query = _GROUPS_SQL.format(relation=filters.relation(), condition=condition)
    groups = store.own_sql(query, params, filters).to_dicts()
    exact = [group for group in groups if ids and group["group_id"] == ids[0]]
    groups = exact or groups
    if not groups and ids:
        raise QueryError(f"no group is called {ids[0]!r}: {why_nothing(store, filters)}")
    if not groups:
        raise QueryError(f"no group matches: {why_nothing(store, filters)}")
    if len(groups) > 1:
        listed = "; ".join(map(_place, groups[:_SHOWN_MAX]))
        more = "; …" if len(groups) > _SHOWN_MAX else ""
        raise QueryError(f"several groups match, add filters to choose one: {listed}{more}")
    return groups[0]


def _rollouts(store: Store, group: dict[str, Any]) -> tuple[pa.Table, list[str], list[str | None]]:
    """Return the rollouts, their distinct prompts, and the last answer of each rollout."""
    from localtrace.read.excerpts import Excerpt, read_excerpts

    params = {"trace_ids": group["trace_ids"], "step": group["step"]}
    rows = store.own_sql(_ROLLOUTS_SQL, params).to_arrow()
    steps = dict.fromkeys(rows["trace_id"].to_pylist(), group["step"])
    found = read_excerpts(lambda *sql: store.own_sql(*sql).to_arrow(), store.decode, steps)
    excerpts = [found.get(trace_id, Excerpt(None, None)) for trace_id in steps]
    prompts = [excerpt.prompt for excerpt in excerpts if excerpt.prompt is not None]
    return rows, list(dict.fromkeys(prompts)), [excerpt.answer for excerpt in excerpts]


def _print_head(group: dict[str, Any], rollouts: pa.Table, prompts: list[str]) -> None:
    from statistics import fmean, stdev

    rewards, not_finite = _finite(rollouts["reward"].to_pylist())
    say(f"group {_place(group)}")
    marks = [mark for mark in rollouts["spans_pruned"].to_pylist() if mark is not None]
    if marks:
        say(f"the calls of {len(marks)} of {len(rollouts)} rollouts were pruned: {marks[0]}")
    for what, text in (("prompt", _first(prompts)), ("reference", _first(_references(rollouts)))):
        if text is not None:
            say_text(f"{what}: {text}")
    odd = f"; {not_finite} not finite, left out" if not_finite else ""
    if not rewards:
        say(f"no finite reward{odd}" if not_finite else "no rewards yet")
        return
    try:
        mean = f"mean {fmean(rewards):.4g}, "
        spread = f", standard deviation {stdev(rewards):.4g}" if len(rewards) > 1 else ""
    except OverflowError:  # beyond the range of doubles
        mean = spread = ""
    say(f"{len(rewards)} rewards: {mean}{min(rewards):.4g} to {max(rewards):.4g}{spread}{odd}")
    if len(rewards) > 1 and min(rewards) == max(rewards):
        say("zero variance: all rewards are the same, so the group teaches nothing in GRPO")


def _references(rollouts: pa.Table) -> list[str]:
    from localtrace.read.excerpts import reference_of
    from localtrace.values.codec import fields_from_json

    texts = rollouts["attributes"].to_pylist()
    found = (reference_of(fields_from_json(text)) for text in texts)
    return list(dict.fromkeys(one for one in found if one is not None))


def _first(texts: list[str]) -> str | None:
    """Return the first text, shortened; usually there is only one."""
    if not texts:
        return None
    first = texts[0]
    left_out = len(first) - _HEAD_MAX - _TAIL_MAX
    if left_out > 0:
        first = f"{first[:_HEAD_MAX]} …({left_out} characters)… {first[-_TAIL_MAX:]}"
    more = f"\n  (and {len(texts) - 1} others in this group)" if len(texts) > 1 else ""
    return f"{first}{more}"


def _place(group: dict[str, Any]) -> str:
    named = {"run": group["run_id"], **{k: group[k] for k in ("step", "sample_index")}}
    given = [f"{key}={value}" for key, value in named.items() if value is not None]
    given += [f"group={group['group_id']}"] if group["group_id"] is not None else []
    if group["group_id"] is None and group["sample_index"] is None:
        given.append(f"prompt_hash={group['prompt_hash']}")
    return f"{' '.join(given)} validate={str(group['validate']).lower()} ({group['n']} rollouts)"
