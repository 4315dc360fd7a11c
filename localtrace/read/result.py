"""The rows of a query, and their conversion to Arrow, pandas, Polars and dicts.

DuckDB's dates and times reach further than Python's: infinity, and years before 1 or after 9999. As
Python values these are texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date
from html import escape as escape_html
from itertools import count
from typing import TYPE_CHECKING, Any, BinaryIO

from localtrace.errors import MissingDependency, QueryError
from localtrace.terminal import escape_line

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa


_SHOWN_ROWS = 20
_SHOWN_CHARACTERS = 200
_SHOWN_NAMES = 8
_OUT_OF_RANGE = (OverflowError, ValueError)
"""Errors of Python for a date that it cannot hold."""
_CYCLE_YEARS, _CYCLE_DAYS = 400, 146_097
"""After so many years the calendar repeats."""


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """The rows of a query, in memory."""

    _table: pa.Table

    @classmethod
    def of(cls, table: pa.Table) -> Result:
        """Return the rows with a number after each column name that came before, as of a join."""
        names: list[str] = table.column_names
        distinct: list[str] = []
        for name in names:
            numbered = (f"{name}_{number}" for number in count(2))
            unused = (one for one in numbered if one not in (*names, *distinct))
            distinct.append(next(unused) if name in distinct else name)
        return cls(table if distinct == names else table.rename_columns(distinct))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._table)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield each row as a dict, few of them in memory at a time."""
        for batch in self._table.to_batches(max_chunksize=1000):
            yield from _dicts(batch)

    def __repr__(self) -> str:
        """Return the size and the columns in one line."""
        names = ", ".join(self.columns[:_SHOWN_NAMES]) + ", …" * (len(self.columns) > _SHOWN_NAMES)
        return f"<Result: {_counted(len(self), 'row')} of {escape_line(names)}>"

    def _repr_html_(self) -> str:
        """Return the first rows as an HTML table for notebooks; recorded text is escaped."""
        names = "".join(f"<th>{_html(name)}</th>" for name in self.columns)
        columns = [
            [value for chunk in column.chunks for value in python_values(chunk)]
            for column in self._table.slice(0, _SHOWN_ROWS).columns
        ]
        rows = (
            "".join(f"<td>{_html(value)}</td>" for value in row)
            for row in zip(*columns, strict=True)
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        said = _counted(len(self), "row")
        if len(self) > _SHOWN_ROWS:
            said = f"the first {_SHOWN_ROWS} of {said}"
        head = f"<thead><tr>{names}</tr></thead>"
        return f"<table>{head}<tbody>{body}</tbody></table><p>{said}</p>"

    @property
    def columns(self) -> list[str]:
        """Column names in order."""
        return list(self._table.column_names)

    def to_arrow(self) -> pa.Table:
        """Return the rows as an Arrow table."""
        return self._table

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a pandas data frame.

        Raises:
            QueryError: pandas cannot hold a date, such as one that is infinite.
            MissingDependency: pandas is not installed.
        """
        try:
            return self._table.to_pandas()
        except ImportError:
            raise MissingDependency("pandas is not installed: run  pip install pandas") from None
        except _OUT_OF_RANGE as error:
            raise QueryError(
                f"pandas cannot hold a value ({error}): cast its column to text, as in x::varchar"
            ) from None

    def to_polars(self) -> polars.DataFrame:
        """Return the rows as a Polars data frame."""
        try:
            import polars
        except ImportError:
            raise MissingDependency("polars is not installed: run  pip install polars") from None
        return polars.DataFrame(polars.from_arrow(self._table))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as one dict each."""
        return list(self)


def _dicts(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    try:
        return list(rows.to_pylist())
    except _OUT_OF_RANGE:
        columns = map(python_values, rows.columns)
        return [
            dict(zip(rows.schema.names, row, strict=True)) for row in zip(*columns, strict=True)
        ]


def python_values(column: pa.Array) -> list[Any]:
    """Return the values of a column; a date or time that Python cannot hold is a text."""
    import pyarrow as pa

    is_utc = pa.types.is_timestamp(column.type) and column.type.tz == "UTC"
    # For dates with a time zone, pyarrow would import pandas, if installed: half a second.
    plain = column.view(pa.timestamp(column.type.unit)) if is_utc else column
    try:
        values = list(plain.to_pylist())
    except _OUT_OF_RANGE:
        return list(map(_python_value, column))
    return [one and one.replace(tzinfo=UTC) for one in values] if is_utc else values


def write_parquet(table: pa.Table, out: BinaryIO) -> None:
    """Write rows as a Parquet file.

    Raises:
        QueryError: Parquet has no such type, such as an interval.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.write_table(table, out)
    except pa.ArrowNotImplementedError as error:
        raise QueryError(
            f"Parquet has no such type ({error}): cast the column to text, as in x::varchar"
        ) from None


def _python_value(scalar: pa.Scalar) -> Any:
    import pyarrow as pa

    kind = scalar.type
    try:
        return scalar.as_py()
    except _OUT_OF_RANGE:
        if pa.types.is_struct(kind):
            return {name: _python_value(scalar[name]) for name in kind.names}
        if pa.types.is_map(kind):
            return [tuple(map(_python_value, item.values())) for item in scalar.values]
        if pa.types.is_nested(kind):
            return [_python_value(item) for item in scalar.values]
        return _far_moment(scalar.value, getattr(kind, "unit", None), getattr(kind, "tz", None))


def _far_moment(value: int, unit: str | None, zone: str | None) -> str:
    """Return a date (unit None, in days) or a time as text, as DuckDB writes it.

    Args:
        value: units since 1970; the ends of its range are the infinities.
        unit: s, ms, us or ns.
        zone: the time zone; the text is in UTC.
    """
    if abs(value) >= (2**31 if unit is None else 2**63) - 1:
        return "infinity" if value > 0 else "-infinity"
    per_s = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}.get(unit or "s", 1)
    seconds, rest = divmod(value, per_s)
    days, second = (value, 0) if unit is None else divmod(seconds, 86400)
    cycles, day = divmod(days + date(1970, 1, 1).toordinal() - 1, _CYCLE_DAYS)
    near = date.fromordinal(day + 1)
    year = near.year + _CYCLE_YEARS * cycles
    text = f"{year:04}-{near:%m-%d}" if year > 0 else f"{1 - year:04}-{near:%m-%d} (BC)"
    if unit is None:
        return text
    fraction = f".{rest:0{len(str(per_s)) - 1}}" if rest else ""
    time = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}{fraction}"
    return f"{text} {time}{'+00' if zone else ''}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _html(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
    return escape_html(escape_line(cut))
