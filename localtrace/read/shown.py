"""Selected trajectories as a notebook shows them: alone, as a group, or compared."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True, repr=False)
class Shown:
    """Selected trajectories; see `Store.show`."""

    store: Any
    """The opened `Store`."""
    trace_ids: tuple[str, ...]

    def __repr__(self) -> str:
        """Return the number of trajectories and the first ids."""
        count = len(self.trace_ids)
        ids = ", ".join(trace_id[:8] for trace_id in self.trace_ids[:8]) + ", …" * (count > 8)
        return f"<trajectories: {count}: {ids}>"

    def _repr_html_(self) -> str:
        """Return the trajectories as the package draws them for notebooks."""
        html: str = import_module("localtrace").drawn(self)
        return html
