"""Skips, which are failures in CI, and how often faults and properties are repeated."""

from __future__ import annotations

from typing import NoReturn

import pytest

from localtrace.record.config import read_environment
from localtrace.record.settings import TestSettings


def unavailable(reason: str) -> NoReturn:
    """Skip the test, or fail it where nothing may be skipped (LOCALTRACE_TEST_ALL=1)."""
    if read_environment(TestSettings).test_all:
        pytest.fail(f"must not be skipped here: {reason}")
    pytest.skip(reason, allow_module_level=True)


def examples(few: int) -> int:
    """Return how often a property is tried: `few` times, or ten times as often by `make soak`."""
    return 10 * few if soaks() else few


def soaks() -> bool:
    """Tell whether faults are repeated more often, as `make soak` asks for."""
    return read_environment(TestSettings).soak


def as_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hooks start and speak as in a process in which none of them has tried before."""
    from localtrace.trainer_hooks import environment

    monkeypatch.setattr(environment, "_tried_in", None)
    environment.say_once.cache_clear()
    environment._understood.cache_clear()
