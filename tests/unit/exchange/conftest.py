"""A store with a run to hand on, recorded once, and room for imports on any disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.exchange.rollouts import record


@pytest.fixture(scope="module", autouse=True)
def _a_full_disk_of_this_machine_stops_no_import() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCALTRACE_MIN_FREE_BYTES", "0")
        yield


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The store and its trace ids by name; tests only read it."""
    folder = tmp_path_factory.mktemp("recorded") / "store"
    return folder, record(folder)
