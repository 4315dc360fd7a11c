"""A store of the golden rollouts that is the same byte for byte wherever it is made.

Run as a program: `python -m tests.golden.outputs.store FOLDER`. Ids, clocks and what a recorder
notes of its machine come from here, so this must run in a process of its own, in which localtrace
is imported after they are in place. Time passes only where a rollout says so.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import socket
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

START_NS = 1_760_000_000 * 10**9


class World:
    """Ids that are numbered, and a clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._drawn = Counter[tuple[str, int]]()

    def tick(self, ms: int) -> None:
        self.now_ns += ms * 10**6

    def draw(self, what: str, size: int) -> bytes:
        """Return the next bytes of this kind and size; other kinds do not disturb them."""
        self._drawn[what, size] += 1
        text = f"{what} {size} {self._drawn[what, size]}"
        return hashlib.shake_128(text.encode()).digest(size)

    def take_over(self) -> None:
        """Replace what differs from machine to machine."""
        world = self

        class Ids(random.Random):
            def getrandbits(self, k: int) -> int:
                return int.from_bytes(world.draw("id", k // 8), "big")

        random.Random = Ids
        os.urandom = lambda size: world.draw("bytes", size)
        uuid.uuid4 = lambda: uuid.UUID(bytes=world.draw("uuid", 16), version=4)
        time.time_ns = lambda: START_NS + world.now_ns
        time.perf_counter_ns = time.monotonic_ns = lambda: 10**12 + world.now_ns
        socket.gethostname = lambda: "golden-host"
        os.getpid = lambda: 4242
        platform.python_version = lambda: "3.0.0"
        sys.orig_argv[:] = ["python", "train.py", "--lr", "1e-6"]


def make(folder: Path) -> None:
    """Record the runs into `folder/store`, seal them, and label two rollouts."""
    import importlib.metadata

    import localtrace
    from localtrace.store.layout import open_layout
    from localtrace.store.sealing.seal import seal

    rollouts = _rollouts()
    rollouts.tick = WORLD.tick
    os.chdir(folder)  # no working copy, so no commit to note
    for name in ("numpy", "pyarrow"):
        sys.modules[name].__version__ = "1.0"
    importlib.metadata.version = lambda name: "1.0"
    store = folder / "store"
    grpo = {"algorithm": {"adv_estimator": "grpo"}, "actor": {"lr": 1e-6},
            "model": {"path": "tiny/words"}, "wandb_api_key": rollouts.KEYS["openai"]}  # fmt: skip
    with _run(store, "maths", "grpo-1", config=grpo, tokenizer=rollouts.tokenizer(folder),
              worker="worker-0"):  # fmt: skip
        done = [rollouts.record(one) for one in rollouts.IN_TOKENS]
        for step in (1, 2, 3):
            WORLD.tick(10)
            values = {"reward/mean": step / 4, "loss": float("nan") if step == 2 else -step}
            localtrace.log_metrics(values, step=step)
        done.append(rollouts.record(rollouts.unfinished))
        localtrace.flush()  # what the writer thread cannot use is counted before the run ends
    with _run(store, "chat", "chat-1", config={"model": "tiny-chat"}, keep=("video_data",)):
        done += [rollouts.record(one) for one in rollouts.IN_MESSAGES]
        localtrace.flush()
    ids = dict(done)
    seal(open_layout(store))
    with localtrace.open_store(store) as opened:
        for name, labels in (
            ("turns_of_tokens", {"tags": ["good"], "rating": 4}),
            ("tools", {"comment": "reads <well>", "tags": ["tool"]}),
        ):
            WORLD.tick(1000)
            localtrace.label(opened, [ids[name]], who="ada", **labels)
    seal(open_layout(store))
    (folder / "ids.json").write_text(json.dumps(ids))


def _rollouts() -> Any:
    """Load the module of the rollouts; tracebacks name it without the folder it is in."""
    module = ModuleType("rollouts")
    sys.modules[module.__name__] = module
    path = Path(__file__).with_name("rollouts.py")
    exec(compile(path.read_text(), path.name, "exec"), vars(module))
    return module


def _run(store: Path, project: str, run_id: str, **settings: Any) -> Any:
    from localtrace.testing import recording

    WORLD.tick(1000)
    return recording(store, project=project, experiment=f"{project}-exp", run_id=run_id, **settings)


WORLD = World()

if __name__ == "__main__":
    WORLD.take_over()
    make(Path(sys.argv[1]).absolute())
