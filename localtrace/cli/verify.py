"""`localtrace verify`: read everything and say what is wrong."""

from __future__ import annotations

from pathlib import Path

import click

from localtrace.cli.options import store_option


@click.command()
@store_option
@click.pass_context
def command(context: click.Context, store_path: Path) -> None:
    """Check that everything in a store can be read. Writes nothing."""
    from localtrace.cli.progress import print_problems, progress_bar
    from localtrace.store.layout import open_layout
    from localtrace.store.verify import verify

    with progress_bar("verifying", " files") as progress:
        report = verify(open_layout(store_path), progress)
    rows = ", ".join(f"{count} {name}" for name, count in report.rows.items() if count)
    click.echo(f"read {report.files} files and {report.journals} journals{rows and f': {rows}'}")
    if report.quarantined:
        click.echo(f"{report.quarantined} files are in quarantine", err=True)
    print_problems(context, report.problems)
