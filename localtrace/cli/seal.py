"""`localtrace seal`: journals into table files, by hand."""

from __future__ import annotations

from pathlib import Path

import click

from localtrace.cli.options import store_option


@click.command()
@click.option("--wait-s", type=click.FloatRange(0), default=60.0, show_default=True,
              help="Seconds to wait for another sealer.")  # fmt: skip
@store_option
@click.pass_context
def command(context: click.Context, wait_s: float, store_path: Path) -> None:
    """Turn journals into table files, exactly once."""
    from localtrace.cli.progress import print_problems, progress_bar
    from localtrace.store.layout import open_layout
    from localtrace.store.seal import seal

    with progress_bar("sealing", " journals") as progress:
        report = seal(open_layout(store_path), wait_s=wait_s, progress=progress)
    rows = ", ".join(f"{count} {name}" for name, count in report.rows.items() if count)
    click.echo(f"sealed {report.journals} journals{rows and f': {rows}'}")
    if report.waiting:
        click.echo(f"{report.waiting} journals are still being written", err=True)
    if report.held:
        click.echo(f"{report.held} journals wait until their steps close (sampling)", err=True)
    print_problems(context, report.problems)
