"""The description of a table: its columns, partitions and sort order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, its Arrow type by alias, and what it holds."""

    name: str
    type: str
    """string, int32, int64, double, bool, timestamp, list<int32>, list<int8> or list<float>."""
    about: str


@dataclass(frozen=True, slots=True)
class TableSchema:
    """One table: its partition columns (in path order), columns and sort order."""

    name: str
    partitions: tuple[str, ...]
    columns: tuple[Column, ...]
    sort_by: tuple[str, ...]

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of all columns, partition columns included."""
        return tuple(column.name for column in self.columns)

    @cache  # noqa: B019  (five module-level instances, alive as long as the process)
    def arrow(self) -> pa.Schema:
        """Return the Arrow schema, partition columns included."""
        import pyarrow as pa

        return pa.schema([(column.name, _arrow_type(column.type)) for column in self.columns])

    @cache  # noqa: B019
    def file_arrow(self) -> pa.Schema:
        """Return the Arrow schema of one Parquet file: all columns but the partitions'."""
        import pyarrow as pa

        return pa.schema([field for field in self.arrow() if field.name not in self.partitions])

    def no_rows(self) -> pa.Table:
        """Return a table without rows."""
        import pyarrow as pa

        # To make an empty array, pyarrow imports pandas if it is there, which takes half a second.
        return pa.Table.from_batches([], self.arrow())


def _arrow_type(alias: str) -> pa.DataType:
    import pyarrow as pa

    if alias == "timestamp":
        return pa.timestamp("us", tz="UTC")
    if alias.startswith("list<"):
        return pa.list_(pa.type_for_alias(alias.removeprefix("list<").removesuffix(">")))
    return pa.type_for_alias(alias)
