"""A custom rollout loop in OpenAI's chat format, recorded by `op` and `trajectory` alone.

The functions are called what users call them: nothing says that a tool is a tool. The rollouts of
one group run in threads, all others as tasks of one event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import localtrace
from tests.golden.chat.script import SESSIONS, TOOLS, Said, Session

THREADED = "double"
"""The sample whose rollouts run in threads."""
_tools: dict[str, Callable[..., Any]] = {
    name: localtrace.op(name=name)(function) for name, function in TOOLS.items()
}


class Model:
    """Says what the script says, as a chat completion."""

    def __init__(self, answers: Iterable[Said]) -> None:
        self._answers = iter(answers)

    def _next(self) -> dict[str, Any]:
        said = next(self._answers)
        choice = {"index": 0, "message": said.message(), "finish_reason": said.finish}
        return {"object": "chat.completion", "model": "tiny", "choices": [choice]}

    @localtrace.op(name="chat")
    async def chat(self, messages: list[dict[str, Any]], temperature: float = 1.0) -> Any:
        await asyncio.sleep(0)
        return self._next()

    @localtrace.op(name="chat_in_a_thread")
    def chat_in_a_thread(self, messages: list[dict[str, Any]]) -> Any:
        return self._next()


@localtrace.op(name="grade")
def grade(reward: float) -> float:
    return reward


@localtrace.op(name="publish")
def publish(reward: float) -> None:
    """Tell a service that is not there; no tool of the model's."""
    raise ConnectionError("nobody listens")


async def _converse(session: Session) -> None:
    model = Model(session.answers)
    messages: list[dict[str, Any]] = [{"role": "user", "content": session.question}]
    for _ in session.answers:
        completion = await model.chat(messages)
        message = completion["choices"][0]["message"]
        messages.append(message)
        replies = await asyncio.gather(*map(_answer, message.get("tool_calls", ())))
        messages += replies


async def _answer(call: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0)
    try:
        said = _tools[call["function"]["name"]](**call["function"]["arguments"])
    except Exception as error:
        said = f"error: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "content": said}


def _trajectory(session: Session) -> localtrace.trajectory:
    return localtrace.trajectory(
        step=session.step, sample_index=session.sample, rollout_n=session.rollout_n,
        group_id=f"{session.step}-{session.sample}", validate=session.validate,
    )  # fmt: skip


async def _roll_out(session: Session) -> tuple[Session, str]:
    with _trajectory(session) as trajectory:
        await _converse(session)
        trajectory.set(reward=grade(session.reward), ground_truth=session.question)
        if session.reward == 1.0 and not session.validate:
            with suppress(ConnectionError):
                publish(session.reward)
    return session, trajectory.trace_id


def _roll_out_in_a_thread(session: Session, pool: ThreadPoolExecutor) -> tuple[Session, str]:
    with _trajectory(session) as trajectory:
        model, messages = Model(session.answers), [{"role": "user", "content": session.question}]
        context = contextvars.copy_context()
        pool.submit(context.run, model.chat_in_a_thread, messages).result()
        trajectory.set(reward=grade(session.reward), ground_truth=session.question)
    return session, trajectory.trace_id


async def _all(sessions: list[Session]) -> list[tuple[Session, str]]:
    return await asyncio.gather(*map(_roll_out, sessions))


def record() -> dict[tuple[int, str, int], str]:
    """Do all rollouts and say what became of them; return the trace ids by session key."""
    threaded = [one for one in SESSIONS if one.sample == THREADED]
    done = asyncio.run(_all([one for one in SESSIONS if one.sample != THREADED]))
    with ThreadPoolExecutor(2) as pool:
        done += [_roll_out_in_a_thread(session, pool) for session in threaded]
    for session, trace_id in done:
        if session.fate is not None:
            localtrace.outcome(trace_id, step=session.step, fate=session.fate)
        if session.advantage is not None:
            localtrace.outcome(
                trace_id, step=session.step, advantage=session.advantage, trained_step=1
            )
    return {session.key: trace_id for session, trace_id in done}
