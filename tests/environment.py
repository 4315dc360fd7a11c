"""What to do where a test cannot run."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def unavailable(reason: str) -> NoReturn:
    """Skip the test, or fail it where nothing may be skipped (LOCALTRACE_TEST_ALL=1)."""
    if os.environ.get("LOCALTRACE_TEST_ALL") == "1":
        pytest.fail(f"must not be skipped here: {reason}")
    pytest.skip(reason, allow_module_level=True)
