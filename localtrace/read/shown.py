"""Chosen trajectories as a notebook shows them: one, those of a group, or several compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from localtrace.types import Trajectory


@dataclass(frozen=True, slots=True, repr=False)
class Shown:
    """Chosen trajectories; see `Store.show`."""

    store: Any
    """The opened `Store`."""
    trace_ids: tuple[str, ...]

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self.trace_ids)

    def __iter__(self) -> Iterator[Trajectory]:
        """Yield the trajectories, read from the store."""
        yield from self.store.read(self.trace_ids)

    def __repr__(self) -> str:
        """Return the number of trajectories and the first ids."""
        ids = ", ".join(one[:8] for one in self.trace_ids[:8]) + ", …" * (len(self) > 8)
        return f"<{len(self)} trajector{'y' if len(self) == 1 else 'ies'}: {ids}>"

    def _repr_html_(self) -> str:
        """Return the trajectories as the package draws them for notebooks."""
        html: str = import_module("localtrace").drawn(self)
        return html
