"""`localtrace prune`: delete the calls of trajectories that are not needed any more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localtrace.cli.options import (
    FILTERS_HELP,
    filters_argument,
    format_option,
    one_store,
    one_store_option,
)
from localtrace.cli.sizes import show_size
from localtrace.errors import ConfigError
from localtrace.printing import say

if TYPE_CHECKING:
    from localtrace.maintain.prunable import Choice
    from localtrace.maintain.prune import PruneReport
    from localtrace.read.filters import Filters
    from localtrace.store.layout import StoreLayout
    from localtrace.store.sealing.retention_rules import Retention

_SHOWN_MAX = 40
"""Steps that a terminal shows; other output has them all."""
_KEEP_HELP = (
    "Keep groups by rules: errors, truncated, extremes=2 (the highest and lowest rewards of each "
    "step), panel=17;42 (values of sample_index), share=0.05, labelled, uploaded."
)


@click.command(epilog=FILTERS_HELP)
@filters_argument
@click.option(
    "--older-than",
    metavar="AGE",
    help="Only trajectories that ended more than AGE ago, such as 14d.",
)
@click.option("--to-size", metavar="SIZE",
              help="The oldest first, until the store takes no more than this, such as 200GB.",
              )  # fmt: skip
@click.option("--keep-every", metavar="N", help="Keep steps that are multiples of N.")
@click.option("--gathered", is_flag=True, help="Only what another store has gathered.")
@click.option("--keep", metavar="RULES", help=_KEEP_HELP)
@click.option("--dry-run", is_flag=True, help="Only print what would be pruned.")
@click.option("-y", "--yes", is_flag=True, help="Prune without asking.")
@click.option("--now", is_flag=True,
              help="Give the space back at once. Commands that are reading look again by "
                   "themselves; other programs that read these files at this moment may fail.",
              )  # fmt: skip
@one_store_option
@format_option
@click.pass_context
def command(
    context: click.Context,
    /,
    filters: Filters,
    dry_run: bool,
    yes: bool,
    now: bool,
    store_paths: tuple[Path, ...],
    form: str,
    **rules: str | bool | None,
) -> None:
    """Delete the calls of trajectories, whole groups at a time; their rows stay.

    Rewards, lengths, outcomes and metrics stay, so curves do not change. A group goes only if all
    its rollouts match the filters and no rule keeps it. Superseded attempts are considered too.
    Trajectories that are not sealed yet stay. Without rules, everything that matches the filters
    goes. An interrupted pruning is completed by the next one. Damaged files stay as they are, with
    the groups in their partitions; they are named, and all others are pruned.
    """
    from localtrace.cli.progress import print_notes, print_problems
    from localtrace.maintain.prune import alone
    from localtrace.store.layout import open_layout

    retention = _retention(rules)
    if retention.is_empty and not filters.terms:
        raise click.UsageError(
            "say what to prune: --older-than 14d, --to-size 200GB, --keep-every 10, "
            "--keep errors, or a filter such as step=3..10"
        )
    layout = open_layout(one_store(store_paths))
    layout.refuse_bundle()
    if dry_run:
        _tell_begun(layout)
        choice = _choice(layout, retention, filters)
        _preview(choice, form)
        print_problems(context, choice.problems)
        return
    with alone(layout) as healed:
        print_notes(healed)
        problems = _finish_begun(layout)
        choice = _choice(layout, retention, filters)
        _preview(choice, form)
        if not choice.groups or _confirmed(yes):
            problems += _prune(layout, choice, now=now)
    print_problems(context, list(dict.fromkeys([*choice.problems, *problems])))
    if choice.excess_bytes:
        context.exit(1)


def _retention(given: Mapping[str, str | bool | None]) -> Retention:
    """Return the rules that options named, by the names of their parameters."""
    from localtrace.store.sealing.retention_rules import parse_retention

    rules = ["gathered"] if given["gathered"] else []
    for name in ("to_size", "older_than", "keep_every", "keep"):
        if given[name] is not None:  # empty text is refused: a variable of the shell was not set
            rules.append(f"{name.replace('_', '-')}={given[name]}")
    try:
        return parse_retention(",".join(rules))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _tell_begun(layout: StoreLayout) -> None:
    from localtrace.maintain.prune import begun

    if intent := begun(layout):
        say(
            f"an earlier pruning of {len(intent.trace_ids)} trajectories ended early: the next one "
            "completes it first",
            err=True,
        )


def _finish_begun(layout: StoreLayout) -> list[str]:
    from localtrace.maintain.prune import begun, finish

    if intent := begun(layout):
        say("an earlier pruning ended early: completing it", err=True)
        report = _with_bar(lambda progress: finish(layout, intent, progress))
        _say_done(report)
        return report.problems
    return []


def _choice(layout: StoreLayout, retention: Retention, filters: Filters) -> Choice:
    from localtrace.cli.open_with_progress import open_with_bar
    from localtrace.maintain.prunable import CHOOSING_MAX_S, choose

    with open_with_bar([layout.root], CHOOSING_MAX_S) as store:
        store.warn_of_namesakes(filters)
        return choose(store, layout, retention, filters)


def _preview(choice: Choice, form: str) -> None:
    import pyarrow as pa

    from localtrace.cli.output import is_for_terminal, print_table
    from localtrace.maintain.prunable import Part

    parts = choice.parts()
    shown = parts[:_SHOWN_MAX] if is_for_terminal(form) else parts
    if parts or form != "table":
        columns = zip(*shown, strict=True) if shown else ([] for _ in Part._fields)
        print_table(pa.table(dict(zip(Part._fields, map(list, columns), strict=True))), form)
    if len(shown) < len(parts):
        say(f"and {len(parts) - len(shown)} more steps; see them all with --format json", err=True)
    rows = sum(part.rows for part in parts)
    what = f"{len(choice.trace_ids)} trajectories in {len(choice.groups)} groups, {rows} calls"
    say(f"to prune: {what}, about {show_size(choice.size_bytes)}", err=True)
    for reason, count in sorted(choice.left_alone.items()):
        say(f"left alone: {count} trajectories, {reason}", err=True)
    if choice.excess_bytes:
        say(
            f"the store stays about {show_size(choice.excess_bytes)} too large: allow more, with "
            "fewer rules or filters",
            err=True,
        )


def _confirmed(yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        raise click.UsageError("pruning deletes: add --yes to do it without being asked")
    return click.confirm("Delete these calls for good?", err=True)


def _prune(layout: StoreLayout, choice: Choice, *, now: bool) -> list[str]:
    """Prune what was chosen, if anything; return the files that are damaged."""
    from localtrace.maintain.prune import prune
    from localtrace.maintain.upkeep import PRUNING, note

    problems: list[str] = []
    if choice.groups:
        report = _with_bar(lambda progress: prune(layout, choice, progress))
        problems = report.problems
        _say_done(report)
        if not now:
            _say_when_space_is_free()
    if now:
        _give_back(layout)
    if not (problems or choice.problems):
        note(layout.root, PRUNING, None)  # what the sealer tried in vain, went well by hand
    return problems


def _say_done(report: PruneReport) -> None:
    say(
        f"pruned {report.trajectories} trajectories: {report.rows} calls, "
        f"{show_size(report.freed_bytes)}",
        err=True,
    )


def _say_when_space_is_free() -> None:
    from localtrace.store.tables.replacing import GRACE_HOURS

    say(
        f"the old files stay {GRACE_HOURS} hours for readers of the earlier state; then localtrace "
        "compact or the sealer deletes them; --now does it at once",
        err=True,
    )


def _with_bar(work: Callable[[Callable[[int, int], None]], PruneReport]) -> PruneReport:
    from localtrace.cli.progress import progress_bar

    with progress_bar("pruning", " files") as progress:
        return work(progress)


def _give_back(layout: StoreLayout) -> None:
    from localtrace.maintain.prune import give_back

    count, size_bytes = give_back(layout, grace_hours=0)
    say(f"gave back {show_size(size_bytes)}: {count} old files deleted", err=True)
