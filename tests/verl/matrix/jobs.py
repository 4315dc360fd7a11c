"""Jobs of verl in processes of their own, with the hook and without it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.verl import forking

ROLLOUT = Path(__file__).with_name("rollout.py")
HAS_PLUGINS = tuple(map(int, version("verl").split(".")[:2])) >= (0, 9)
"""Whether this verl loads entry points of the group `verl.plugins`."""
HOOK = {} if HAS_PLUGINS else {"VERL_USE_EXTERNAL_MODULES": "localtrace.trainer_hooks.verl"}
NO_HOOK = {"VERL_USE_EXTERNAL_PLUGINS": "none"}


@dataclass(frozen=True, slots=True)
class Job:
    """A finished job and what it left."""

    folder: Path
    result: dict[str, Any]
    """See `rollout.main`."""
    messages: str
    """Its standard error."""

    @property
    def store(self) -> Path:
        """The store of a job that names none."""
        return self.folder / "localtrace"


def run_job(folder: Path, backend: str, variables: dict[str, str]) -> Job:
    """Run a job in a process of its own, in a folder of its own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("LOCALTRACE", "VERL"))}
    environment = inherited | variables
    environment |= {
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "LOCALTRACE_MIN_FREE_BYTES": "0",
        "LOCALTRACE_SEAL": "0",
    }
    script = f"""
import os, runpy, sys
os.chdir({str(folder)!r})
sys.argv[1:] = [{backend!r}, "result.json"]
runpy.run_path({str(ROLLOUT)!r}, run_name="__main__")
"""
    done, file = forking.python(script, environment), folder / "result.json"
    return Job(folder, json.loads(file.read_text("utf-8")) if file.exists() else {}, done.stderr)
