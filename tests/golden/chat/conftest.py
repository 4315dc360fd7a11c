"""The golden rollouts of a custom loop, recorded once and sealed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from localtrace.read.store import Store, open_store
from localtrace.store.layout import open_layout
from localtrace.store.sealing.seal import seal
from localtrace.testing import recording
from tests.golden.chat.loop import record


@dataclass(frozen=True)
class Golden:
    """A store, and its trace ids by step, sample and number."""

    store: Store
    ids: dict[tuple[int, str, int], str]


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    folder = tmp_path_factory.mktemp("chat") / "store"
    with recording(folder, run_id="golden"):
        ids = record()
    seal(open_layout(folder))
    with open_store(folder) as store:
        yield Golden(store, ids)


@pytest.fixture(scope="session")
def store(golden: Golden) -> Store:
    return golden.store
