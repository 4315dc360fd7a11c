"""Jobs of SkyRL, and a store that they record into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localtrace.trainer_hooks import skyrl as hook
from tests.environment import unavailable
from tests.recorded_jobs import _fresh_process, store

__all__ = ["_fresh_process", "store"]

hook.install()  # before SkyRL is imported, as in a job
try:
    import skyrl.train.trainer  # noqa: F401
except ImportError as error:
    unavailable(f"skyrl cannot be imported: {error}")

from tests.skyrl.script import Engine, Job, make_tokenizer, serving  # noqa: E402


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes a job with an engine of its own."""
    engine = Engine(make_tokenizer().eos_token_id)
    with serving(engine) as address:
        yield lambda **settings: Job(tmp_path, engine, address, **settings)
