"""The rows of a query, and the forms in which they are handed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localtrace.errors import MissingDependency

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Result:
    """The rows of a query, in memory."""

    _table: pa.Table

    @property
    def columns(self) -> list[str]:
        """Column names in order."""
        return list(self._table.column_names)

    def to_arrow(self) -> pa.Table:
        """The rows as an Arrow table."""
        return self._table

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a pandas data frame."""
        try:
            return self._table.to_pandas()
        except ImportError:
            raise MissingDependency("pandas is not installed: run  pip install pandas") from None

    def to_polars(self) -> polars.DataFrame:
        """The rows as a Polars data frame."""
        try:
            import polars
        except ImportError:
            raise MissingDependency("polars is not installed: run  pip install polars") from None
        return polars.DataFrame(polars.from_arrow(self._table))

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as one dict each."""
        return list(self._table.to_pylist())
