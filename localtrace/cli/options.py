"""What several commands share: where the store is, how to print, which trajectories."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localtrace.cli.completing import complete_filter
from localtrace.errors import QueryError

if TYPE_CHECKING:
    from localtrace.filters import Filters

store_option = click.option(
    "-s",
    "--store",
    "store_path",
    type=click.Path(path_type=Path),
    envvar="LOCALTRACE_STORE",
    default=Path("localtrace"),
    show_envvar=True,
    show_default=True,
    help="Folder of the store.",
)

format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv", "parquet"]),
    default="table",
    show_default=True,
    help="How to print the rows.",
)


def _parsed(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> Filters:
    from localtrace.filters import Filters

    return Filters.parse(texts)


filters_argument = click.argument(
    "filters",
    nargs=-1,
    metavar="[FILTER]...",
    callback=_parsed,
    shell_complete=complete_filter,
)
"""Passes `Filters`; a command that uses it appends FILTERS_HELP to its help."""


def parse_params(texts: Iterable[str]) -> dict[str, str]:
    """Read a named query's parameters from texts such as `run=RUN_ID`.

    Raises:
        QueryError: a text has no `=`.
    """
    params = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise QueryError(f"{text!r} is not a parameter: write key=value, such as run=RUN_ID")
        params[key] = value
    return params


FILTERS_HELP = """
\b
Filters are written key=value, and all of them must hold:
  run project experiment group agent data_source fate status op sample_index
              equal, such as status=error
  attempt step rollout_n reward
              a number, a range or a comparison: step=3..10 'reward<0.1'
  validate    true or false
  contains    text inside prompts, outputs, messages, arguments or results
  where       any SQL condition, such as 'where=turn_count > 2'
"""
