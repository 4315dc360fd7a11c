"""A rollout in a process of its own, which takes its next step when a test says so.

An agent calls a model and a tool in turns. The agent's own call returns when the rollout ends.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import localtrace
from localtrace.testing import recording
from tests.crash.processes import Child, child

QUESTION = "How many are there?"
RUN = "live"


def record(store: str, settings: dict[str, Any], place: dict[str, Any]) -> None:
    """Record the rollout; each line of stdin is a step, and is answered once it is recorded."""

    @localtrace.op
    def generate(messages: list[dict[str, str]], ids: list[int], text: str) -> dict[str, Any]:
        return {"output_ids": ids, "output_text": text, "finish_reason": "stop"}

    @localtrace.op
    def look_up(word: str) -> str:
        return f"{word} is known"

    @localtrace.op
    def search(word: str) -> str:
        for line in sys.stdin:  # calls inside come until it returns
            step = json.loads(line)
            if "word" not in step:
                break
            look_up(step["word"])
            _answer("done")
        return f"{word} is found"

    @localtrace.op
    def agent() -> None:
        messages = [{"role": "user", "content": QUESTION}]
        for line in sys.stdin:
            step = json.loads(line)
            if "text" in step:
                generate(messages, step["ids"], step["text"])
                messages = [*messages, {"role": "assistant", "content": step["text"]}]
            elif "word" in step:
                result = look_up(step["word"])
                messages = [*messages, {"role": "tool", "content": result}]
            elif "search" in step:
                _answer("done")
                search(step["search"])
            else:
                return
            _answer("done")

    with recording(Path(store), run_id=RUN, **settings):
        with localtrace.trajectory(**place) as t:
            _answer(t.trace_id)
            agent()
            t.set(reward=1.0)
        _answer("done")
        sys.stdin.readline()  # lives on, as a rollout worker does


def _answer(text: str) -> None:
    localtrace.flush()
    print(text, flush=True)


class LiveRollout:
    """The rollout, from the side of the test."""

    def __init__(self, process: Child) -> None:
        self.process = process
        self.trace_id = self._heard()

    def turn(self, text: str, ids: list[int]) -> None:
        """Let the model answer."""
        self._step(text=text, ids=ids)

    def tool(self, word: str) -> None:
        """Let the agent call its tool."""
        self._step(word=word)

    def open_search(self, word: str) -> None:
        """Let the agent call a tool inside which `tool` is called, until `close_search`."""
        self._step(search=word)

    def close_search(self) -> None:
        """Let that call return."""
        self._step()

    def end(self) -> None:
        """Let the rollout end; its process lives on."""
        self._step()

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()

    def _step(self, **step: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(step)}\n")
        self.process.stdin.flush()
        assert self._heard() == "done"

    def _heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def live_rollout(
    store: Path, settings: dict[str, Any] | None = None, **place: Any
) -> Iterator[LiveRollout]:
    """Start a rollout; kill its process at the end.

    Args:
        store: where it records.
        settings: arguments of `localtrace.init`.
        place: arguments of `localtrace.trajectory`.
    """
    with child(record, store, settings or {}, place) as process:
        yield LiveRollout(process)
