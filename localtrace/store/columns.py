"""Rows gathered column by column, and turned into Arrow."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from localtrace.schema import TableSchema


class Columns:
    """The growing columns of one table."""

    def __init__(self, schema: TableSchema) -> None:
        self._schema = schema
        self._columns: dict[str, list[Any]] = {name: [] for name in schema.column_names}

    def add(self, row: dict[str, Any]) -> None:
        """Append one row; names that it lacks become null."""
        for name, column in self._columns.items():
            column.append(row.get(name))

    def table(self) -> pa.Table:
        """Everything so far, sorted, in the schema's types."""
        schema = self._schema.arrow()
        if not any(self._columns.values()):
            return self._schema.no_rows()
        arrays = [_array(self._columns[field.name], field.type) for field in schema]
        table = pa.table(arrays, schema=schema)
        return table.sort_by([(name, "ascending") for name in self._schema.sort_by])


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    offsets, parts, end = [], [], 0
    for part in values:
        offsets.append(None if part is None else end)
        if part is not None:
            parts.append(part)
            end += len(part)
    offsets.append(end)
    flat = pa.concat_arrays(parts) if parts else pa.array([], kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, type=kind)
