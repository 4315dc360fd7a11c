"""Run AReaL's script or module with the hook: `python -m localtrace.trainer_hooks.areal NAME …`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from localtrace.trainer_hooks.areal import install

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m localtrace.trainer_hooks.areal SCRIPT.py|MODULE [ARGUMENTS …]")
    install()
    name = sys.argv[1]
    sys.argv = sys.argv[1:]
    if name.endswith(".py"):
        sys.path.insert(0, str(Path(name).absolute().parent))
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
