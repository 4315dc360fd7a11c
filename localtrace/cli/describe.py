"""`localtrace describe`: list the SQL views, or the columns of one."""

from __future__ import annotations

import textwrap
from shutil import get_terminal_size

import click

from localtrace.cli.options import format_option
from localtrace.printing import say_text


def _complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from localtrace.read.view_columns import views

    return [name for name in views() if name.startswith(incomplete)]


@click.command()
@click.argument("view", required=False, shell_complete=_complete)
@format_option
def command(view: str | None, form: str) -> None:
    """Show the SQL views, or the columns of one VIEW with types and meanings.

    All stores have the same views, so this command needs no store.
    """
    import pyarrow as pa

    from localtrace.cli.output import print_listing
    from localtrace.read.view_columns import columns_of, views

    if view is None:
        rows = [{"view": name, "what its rows are": about} for name, about in views().items()]
    else:
        columns = columns_of(view.lower())
        rows = [
            {"column": column.name, "type": column.type, "what it holds": column.about}
            for column in columns
        ]
        say_text(f"{textwrap.fill(views()[view.lower()], get_terminal_size().columns)}\n", err=True)
    print_listing(pa.Table.from_pylist(rows), form)
