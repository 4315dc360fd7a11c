"""Ways through the house: how many files of ours are entered by what users do most.

Run as `python -m tests.benchmarks.walks`; `--list` names the files. A file is entered when one of
its functions is called, by any thread; what imports run (bodies of modules and classes, and what
those call) does not count. Each way is walked in a process of its own, over a store of five
rollouts with two turns, two calls of a tool and an outcome each. The call is a warm one, counted
until its bytes are in the journal.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OWN = tuple(f"{ROOT}/{name}/" for name in ("localtrace", "uploader", "trainer_hooks"))
BEFORE = {"op": 25, "seal": 47, "ls": 43, "show": 43, "upload": 76}
"""The counts of this script at the commit before the rebuild around one trajectory (ad31cb4)."""
COMMANDS = {
    "seal": ["seal"],
    "ls": ["ls"],
    "show": ["show", "1/1/0"],
    "upload": ["upload", "--all", "--to", "weave", "--dry-run"],
}
_IS_FUNCTION = 1
"""Flag of the code of functions, which that of modules and classes lacks."""


class Walk:
    """Counts the files of ours whose functions are called between `start` and `stop`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._seen: set[CodeType] = set()

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen or not code.co_flags & _IS_FUNCTION:
            return
        if _is_importing(frame):
            return
        self._seen.add(code)
        path = os.path.realpath(code.co_filename)  # parts of the package are links
        if path.startswith(OWN):
            self.files.add(path[len(str(ROOT)) + 1 :])

    def start(self) -> None:
        """Count from now on, in this thread and in those that begin."""
        self._seen.clear()
        self.files.clear()
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def stop(self) -> None:
        """Count no more in this thread, nor in those that begin."""
        sys.setprofile(None)
        threading.setprofile(None)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def _record(store: Path) -> None:
    import localtrace
    from localtrace.testing import recording

    @localtrace.op
    def generate(prompt_ids: list[int]) -> dict[str, Any]:
        return {"token_ids": [4, 5, 6], "log_probs": [-0.5, -0.5, -0.5], "text": "some words"}

    @localtrace.op
    def look_up(word: int) -> int:
        return word

    with recording(store, project="walks", run_id="run"):
        for number in range(5):
            with localtrace.trajectory(1, 1, number) as t:
                for turn in range(2):
                    generate([1, 2, 3, *[4, 5, 6, 9] * turn])
                    look_up(turn)
                t.set(reward=1.0)
            localtrace.outcome(t.trace_id, step=1, advantage=0.5, fate="trained")


def _walk_op(store: Path) -> set[str]:
    import localtrace
    from localtrace.testing import recording

    @localtrace.op
    def generate(prompt_ids: list[int]) -> dict[str, Any]:
        return {"token_ids": [4, 5, 6], "log_probs": [-0.5, -0.5, -0.5], "text": "some words"}

    def size() -> int:
        return sum(path.stat().st_size for path in store.rglob("*.journal*"))

    walk = Walk()
    threading.setprofile(walk._called)  # the writer thread begins now
    with recording(store), localtrace.trajectory(step=1):
        for turn in range(5):
            generate([1, 2, 3, *[4, 5, 6, 9] * turn])
        localtrace.flush()
        time.sleep(0.3)  # until the writer thread rests
        before = size()
        assert before
        walk.start()
        generate([1, 2, 3, *[4, 5, 6, 9] * 5])
        sys.setprofile(None)
        while size() == before:
            time.sleep(0.001)
        return set(walk.files)


def _walk_command(store: Path, arguments: list[str]) -> set[str]:
    walk = Walk()
    walk.start()
    from localtrace.cli import main

    with contextlib.suppress(SystemExit):
        main([*arguments, "-s", str(store)], standalone_mode=False)
    walk.stop()
    return walk.files


def _apart(name: str, store: Path, state: Path) -> list[str]:
    """Walk a way in a process of its own, and return the files."""
    environment = {
        **os.environ, "LOCALTRACE_STATE_DIR": str(state), "WANDB_ENTITY": "team",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.benchmarks.walks", name, str(store)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    files: list[str] = json.loads(done.stdout.splitlines()[-1])
    return files


def main() -> None:
    """Print the number of files of each way, beside that before the rebuild."""
    with tempfile.TemporaryDirectory() as folder:
        store, state = Path(folder) / "store", Path(folder) / "state"
        _record(store)
        print("way      files  before")
        for name, before in BEFORE.items():
            files = _apart(name, Path(folder) / "called" if name == "op" else store, state)
            print(f"{name:<8} {len(files):5}  {before:6}")
            if "--list" in sys.argv:
                print(*(f"    {path}" for path in files), sep="\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [name, store] if name in BEFORE:
            walked = _walk_op(Path(store)) if name == "op" else None
            print(json.dumps(sorted(walked or _walk_command(Path(store), COMMANDS[name]))))
        case _:
            main()
