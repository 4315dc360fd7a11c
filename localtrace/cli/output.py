"""Rows on stdout: aligned text for people; JSON, CSV or Parquet for programs."""

from __future__ import annotations

import csv
import math
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from localtrace.cli.fitting import Column, fit_columns, width_of
from localtrace.printing import ForPrograms, say, say_text
from localtrace.read.result import python_values, write_parquet
from localtrace.terminal import escape_line, write_any_text
from localtrace.values.plain_json import plain_json, valid_text

if TYPE_CHECKING:
    import pyarrow as pa

_ANSWERS = frozenset({"answer", "output", "output_text"})
"""Columns whose cut cells keep their end, which says most."""
_NO_ROOM = "not shown in {width} characters; widen the window, or add  | less -S  or  --format json"
_PROSE_MIN = 36
"""Characters that prose needs beside the other cells; with fewer it stands below them."""
_NAMES_MAX = 6
_JSON = msgspec.json.Encoder(decimal_format="number", enc_hook=str)


def is_for_terminal(form: str) -> bool:
    """Return whether rows in this format go to a terminal, and so have to fit it."""
    return form == "table" and sys.stdout.isatty()


def print_table(
    table: pa.Table,
    form: str,
    texts: Mapping[str, Sequence[str | None]] | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Print rows in a format: table, json, csv or parquet.

    Args:
        table: the rows.
        form: the format.
        texts: further columns, by name.
        names: the columns to print, in order; None: all.

    Raises:
        click.UsageError: the format is parquet and stdout is a terminal.
    """
    texts = {
        name: [one if one is None else valid_text(one) for one in column]
        for name, column in (texts or {}).items()
    }
    names = [*table.column_names, *texts] if names is None else names
    if form == "parquet":
        _print_parquet(_joined(table, texts, names) if texts else table.select(names))
        return
    rows = _rows(table)
    if texts or list(names) != table.column_names:
        given = {name: texts[name] if name in texts else _column(table, name) for name in names}
        rows = zip(*given.values(), strict=True)
    if form == "json":
        _print_json(names, rows)
    elif form == "csv":
        _print_csv(names, rows)
    else:
        _print_text(names, rows)


def print_listing(table: pa.Table, form: str) -> None:
    """Print rows whose last cell is prose, which a terminal shows wrapped."""
    if not is_for_terminal(form):
        print_table(table, form)
        return
    rows = [[escape_line(_cell(value)) for value in row] for row in _rows(table)]
    widths = [max(map(width_of, column)) for column in list(zip(*rows, strict=True))[:-1]]
    width = shutil.get_terminal_size().columns
    start = sum(widths) + 2 * len(widths)
    beside = width - start >= _PROSE_MIN
    indent = " " * (start if beside else 4)
    for *cells, prose in rows:
        head = "".join(
            cell + " " * (widest - width_of(cell) + 2)
            for cell, widest in zip(cells, widths, strict=True)
        )
        lines = textwrap.wrap(prose, width - len(indent))
        if not beside:
            say(head.rstrip())
            head = indent
        for number, line in enumerate(lines):
            say((indent if number else head) + line)


def _print_text(names: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print aligned text, control characters escaped; on a terminal, as much as fits."""
    values = [list(row) for row in rows]
    columns = [
        Column(
            escape_line(name),
            [_cell(row[place]) for row in values],
            is_text=name != "run_id" and not any(_is_plain_value(row[place]) for row in values),
            shows_end=name in _ANSWERS,
        )
        for place, name in enumerate(names)
    ]
    shown = columns
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        shown = fit_columns(columns, width)
        if left_out := [column.name for column in columns[len(shown) :]]:
            more = len(left_out) - _NAMES_MAX
            said = ", ".join(left_out[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
            say(f"{said}: {_NO_ROOM.format(width=width)}", err=True)
    to_right = [
        any(_is_number(row[place]) for row in values)
        and all(_is_number(row[place]) or row[place] is None for row in values)
        for place in range(len(shown))
    ]
    widths = [column.width for column in shown]
    for line in zip(*([column.name, *column.cells] for column in shown), strict=True):
        padded = (
            " " * (width - width_of(cell)) + cell
            if right
            else cell + " " * (width - width_of(cell))
            for cell, width, right in zip(line, widths, to_right, strict=True)
        )
        say("  ".join(padded).rstrip())


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    for batch in table.to_batches(max_chunksize=1024):
        yield from zip(*map(python_values, batch.columns), strict=True)


def _column(table: pa.Table, name: str) -> list[Any]:
    return [value for chunk in table[name].chunks for value in python_values(chunk)]


def _joined(
    table: pa.Table, texts: Mapping[str, Sequence[str | None]], names: Sequence[str]
) -> pa.Table:
    import pyarrow as pa

    # Without the type, pyarrow would import pandas, if installed, to make the array.
    more = {name: pa.array(values, pa.string()) for name, values in texts.items()}
    return pa.table({name: more[name] if name in more else table[name] for name in names})


def _print_json(columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    write_any_text(sys.stdout, exactly=True)
    separator = "[\n"
    for row in rows:
        text = _JSON.encode(dict(zip(columns, map(plain_json, row), strict=True))).decode()
        say_text(separator + text, end="")
        separator = ",\n"
    say_text("[]" if separator == "[\n" else "\n]")


def _print_csv(columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    write_any_text(sys.stdout, exactly=True)
    writer = csv.writer(ForPrograms(), lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(map(_plain, row) for row in rows)


def _print_parquet(table: pa.Table) -> None:
    if sys.stdout.isatty():
        raise click.UsageError("Parquet is binary: write it to a file, as in  > rows.parquet")
    write_parquet(table, sys.stdout.buffer)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return escape_line(_plain(value))


def _plain(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str) else _JSON.encode(plain_json(value)).decode().strip('"')


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_plain_value(value: Any) -> bool:
    return isinstance(value, int | float | datetime)
