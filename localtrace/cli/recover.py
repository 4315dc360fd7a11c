"""`localtrace recover`: repair a store after a crash."""

from __future__ import annotations

from pathlib import Path

import click

from localtrace.cli.options import one_store, one_store_option
from localtrace.printing import say


@click.command()
@one_store_option
@click.pass_context
def command(context: click.Context, store_paths: tuple[Path, ...]) -> None:
    """Repair torn tables, seal journals of dead processes, and move unfinished files aside.

    Only sealed journals are deleted; unfinished files go to the store's quarantine folder.
    """
    from localtrace.cli.progress import print_notes, print_problems, progress_bar
    from localtrace.maintain.verify import recover
    from localtrace.store.layout import open_layout

    with progress_bar("sealing", " journals") as progress:
        report = recover(open_layout(one_store(store_paths)), progress=progress)
    say(
        f"healed {report.healed} tables, sealed {report.sealed.journals} journals, "
        f"moved {report.strays} unfinished files aside"
    )
    print_notes(report.sealed.foreign)
    print_problems(context, report.problems)
