"""Rows on stdout: aligned text for people, JSON, CSV or Parquet for programs."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

import click
import msgspec

from localtrace.terminal import escape, escape_line

if TYPE_CHECKING:
    import pyarrow as pa

_CELL_MAX = 60
_JSON = msgspec.json.Encoder(decimal_format="number", enc_hook=str)


def print_table(table: pa.Table, form: str) -> None:
    """Print rows in a format: table, json, csv or parquet.

    Raises:
        click.UsageError: Parquet for a terminal.
    """
    if form == "parquet":
        _print_parquet(table)
    elif form == "json":
        _print_json(table.column_names, _rows(table))
    elif form == "csv":
        _print_csv(table.column_names, _rows(table))
    else:
        print_rows(table.column_names, _rows(table))


def print_rows(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print aligned text; numbers to the right, long cells cut, control characters escaped."""
    values = [list(row) for row in rows]
    cells = [[_cell(value) for value in row] for row in values]
    to_right = [
        any(_is_number(row[place]) for row in values)
        and all(_is_number(row[place]) or row[place] is None for row in values)
        for place in range(len(columns))
    ]
    lines = [[escape_line(name) for name in columns], *cells]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = (
            " " * (width - _width(cell)) + cell if right else cell + " " * (width - _width(cell))
            for cell, width, right in zip(line, widths, to_right, strict=True)
        )
        click.echo("  ".join(padded).rstrip())


def _rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    # Not as dicts: a join may give two columns of one name.
    for batch in table.to_batches(max_chunksize=1024):
        yield from zip(*map(_values, batch.columns), strict=True)


def _values(column: pa.Array) -> list[Any]:
    import pyarrow as pa

    if not pa.types.is_timestamp(column.type) or column.type.tz != "UTC":
        return list(column.to_pylist())
    # To make dates with a time zone, pyarrow imports pandas if it is there: half a second.
    naive = column.view(pa.timestamp(column.type.unit)).to_pylist()
    return [date and date.replace(tzinfo=UTC) for date in naive]


def _print_json(columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    separator = "[\n"
    for row in rows:
        text = _JSON.encode(dict(zip(columns, row, strict=True))).decode()
        click.echo(separator + escape(text), nl=False)
        separator = ",\n"
    click.echo("[]" if separator == "[\n" else "\n]")


def _print_csv(columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    safe: Callable[[str], str] = escape if sys.stdout.isatty() else str
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(safe, columns))
    writer.writerows([safe(_plain(value)) for value in row] for row in rows)


def _print_parquet(table: pa.Table) -> None:
    if sys.stdout.isatty():
        raise click.UsageError("Parquet is binary: write it to a file, as in  > rows.parquet")
    import pyarrow.parquet as pq

    pq.write_table(table, sys.stdout.buffer)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    text = escape_line(_plain(value))
    return text if len(text) <= _CELL_MAX else f"{text[: _CELL_MAX - 1]}…"


def _plain(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else _JSON.encode(value).decode().strip('"')


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _width(text: str) -> int:
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)
