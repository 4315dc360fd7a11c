"""`localtrace query`: named queries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from localtrace.cli.options import format_option, parse_params, store_option

if TYPE_CHECKING:
    import pyarrow as pa


@click.command()
@click.argument("name", required=False)
@click.argument("values", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--queries",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path),
    help="One more folder of .sql files; may be repeated.",
)
@store_option
@format_option
def command(
    name: str | None,
    values: tuple[str, ...],
    folders: tuple[Path, ...],
    store_path: Path,
    form: str,
) -> None:
    """Run a named query, or list them when no NAME is given."""
    from localtrace.cli.output import print_table

    if name is None:
        print_table(_listing(folders), form)
        return
    from localtrace.reader import open_store

    with open_store(store_path) as store:
        print_table(store.query(name, folders=folders, **parse_params(values)).to_arrow(), form)


def _listing(folders: tuple[Path, ...]) -> pa.Table:
    import pyarrow as pa

    from localtrace.sql import load_queries

    rows = [
        {
            "name": query.name,
            "parameters": " ".join(query.parameters),
            "description": query.description,
        }
        for query in load_queries(folders).values()
    ]
    return pa.Table.from_pylist(rows)
