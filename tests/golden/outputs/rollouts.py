"""The golden rollouts that every output is made of, recorded by the public calls alone.

Each function is one rollout, and returns its trace id and the outcomes that arrive later. Token n
of the run with a tokenizer is the word `wn`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import localtrace

Tick = Callable[[int], None]
"""Lets so many milliseconds pass."""
Message = dict[str, Any]
WORDS = 200
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwAD"
    "hgGAWjR9awAAAABJRU5ErkJggg=="
)
KEYS = {
    "openai": "sk-proj-Zq8Vn2LrT5xWc7Yd9KfPmB4hJtG6sQaE1uXo3RiN0vZbCwMy",
    "aws": "AKIAZ7QH3TNV5WKXJM2P",
    "header": "Authorization: Bearer Zm9vYmFyMTIzNDU2Nzg5MHF1dXg3",
}
"""Made up, in the shapes of real ones."""
TOOLS = [
    {"type": "function",
     "function": {"name": "look_up", "description": "Look a word up.",
                  "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}}}
]  # fmt: skip
tick: Tick = lambda _: None  # noqa: E731  (replaced by whoever has a clock)


def tokenizer(folder: Path) -> Path:
    """Save a tokenizer of which every token is a word."""
    made = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, "w0"))
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


class Model:
    """Gives the answers that it was made with, one after the other."""

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)

    @localtrace.op(name="generate")
    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Answer in token ids, as verl's server manager does."""
        tick(20)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return {"stop_reason": "completed", "weight_version": "0", **answer}

    @localtrace.op(name="chat")
    def chat(self, messages: list[Message], tools: Any = None, **more: Any) -> Any:
        """Answer a conversation."""
        tick(30)
        return next(self._answers)

    @localtrace.op(name="stream")
    def stream(self, messages: list[Message]) -> Iterator[str]:
        """Answer in pieces."""
        for piece in self._answers:
            tick(5)
            yield piece

    @localtrace.op(name="complete")
    def complete(self, prompt: str) -> Any:
        """Answer a text."""
        tick(10)
        return next(self._answers)


def ids(*token_ids: int, **more: Any) -> dict[str, Any]:
    """Return an answer of token ids."""
    return {"token_ids": list(token_ids), **more}


@localtrace.op(name="look_up")
def look_up(word: str) -> str:
    """Look a word up; some are not in the book. Nothing says that this is a tool."""
    tick(3)
    if word == "nothing":
        raise KeyError(word)
    return f"{word} is known"


@localtrace.op(name="grade", kind="reward")
def grade(reward: float) -> float:
    """Grade an answer."""
    tick(2)
    return reward


@localtrace.op(name="note")
def note(value: Any) -> None:
    """Do something of no kind, with any value."""
    tick(1)


# Token ids, with a tokenizer.


async def turns_of_tokens() -> dict[str, Any]:
    """Two turns and a tool between them; masks and logprobs of the trainer over the response."""
    model = Model(
        ids(10, 11, 12, log_probs=[-0.5, -0.25, -0.125]),
        ids(13, 14, log_probs=[-1.0, -2.0], weight_version="1"),
    )
    with localtrace.trajectory(
        1, 17, 0, group_id="g-17", agent="tool_agent", data_source="words"
    ) as t:
        await model.generate([1, 2, 3], {"temperature": 1.0, "top_p": 0.9})
        look_up("w11")
        await model.generate([1, 2, 3, 10, 11, 12, 90, 91])
        t.set(reward=grade(1.0), ground_truth="w14", reward_extra_info={"format": 1.0, "acc": 1})
    return {
        "trace_id": t.trace_id,
        "response_mask": [1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0],
        "old_log_probs": [-0.5, -0.25, -0.125, 0.0, 0.0, -1.0, -2.0],
        "advantages": [0.5, 0.5, 0.5, 0.0, 0.0, 0.5, 0.5],
        "advantage": 0.5, "fate": "trained", "trained_step": 1,
    }  # fmt: skip


async def odd_logprobs() -> dict[str, Any]:
    """Logprobs that are NaN, infinite or missing; per-token values of the generated alone."""
    model = Model(
        ids(20, 21, 22, 23, log_probs=[-0.5, math.nan, None, -math.inf]),
        ids(24, log_probs=[-0.75], stop_reason="length"),
    )
    with localtrace.trajectory(1, 17, 1, group_id="g-17", agent="tool_agent") as t:
        await model.generate([1, 2, 3])
        await model.generate([1, 2, 3, 20, 21, 22, 23, 92])
        t.set(reward=0.25)
    return {
        "trace_id": t.trace_id,
        "rollout_log_probs": [-0.5, -1.5, -2.5, -3.5, -0.75],
        "advantages": [-0.5, -0.5, -0.5, -0.5, -0.5],
        "reward": 0.5, "advantage": -0.5, "fate": "trained", "trained_step": 2,
    }  # fmt: skip


async def aborted() -> dict[str, Any]:
    """The second turn fails, and the rollout with it."""
    model = Model(ids(30, 31), RuntimeError("the engine ran out of memory"))
    with suppress(RuntimeError), localtrace.trajectory(1, 17, 2, group_id="g-17") as t:
        await model.generate([1, 2, 3])
        await model.generate([1, 2, 3, 30, 31, 93])
    return {"trace_id": t.trace_id, "fate": "aborted", "fate_reason": "engine error"}


async def masked() -> dict[str, Any]:
    """A mask beside the ids, over a whole response with a tool's tokens; the reward is NaN."""
    model = Model(ids(40, 41, 94, 95, 42, response_mask=[1, 1, 0, 0, 1]))
    with localtrace.trajectory(1, 17, 3, group_id="g-17") as t:
        await model.generate([1, 2, 3])
        t.set(reward=math.nan)
    return {"trace_id": t.trace_id, "fate": "filtered"}


async def masked_turns() -> dict[str, Any]:
    """A mask of the trainer over the generated tokens alone, which rules some of them out."""
    model = Model(ids(43, 44), ids(45, 46))
    with localtrace.trajectory(1, 17, 4, group_id="g-17") as t:
        await model.generate([1, 2, 3])
        await model.generate([1, 2, 3, 43, 44, 96, 97, 98])
        t.set(reward=0.125)
    return {"trace_id": t.trace_id, "response_mask": [1.0, 0.0, 1.0, 1.0]}


async def generated_again() -> dict[str, Any]:
    """The first answer is thrown away; logprobs and a mask of other lengths fit nothing."""
    model = Model(ids(50, stop_reason="aborted"), ids(51, 52, log_probs=[-0.5]))
    with localtrace.trajectory(1, 18, 0, group_id="g-18") as t:
        await model.generate([4, 5])
        await model.generate([4, 5])
        t.set(reward=0.0)
    return {"trace_id": t.trace_id, "response_mask": [1.0] * 9, "fate": "stale"}


async def nothing_said() -> dict[str, Any]:
    """The answer is empty."""
    with localtrace.trajectory(1, 18, 1, group_id="g-18") as t:
        await Model(ids(log_probs=[])).generate([4, 5])
        t.set(reward=0.0)
    return {"trace_id": t.trace_id, "fate": "failed"}


@localtrace.op(name="planner", kind="agent")
async def planner(task: str) -> str:
    """Ask two researchers, whose contexts are their own, and answer."""
    model = Model(ids(62, 63), ids(67, min_global_steps=1, max_global_steps=2))
    await model.generate([60, 61])
    parts = [await researcher("w1", [64, 65]), await researcher("w2", [66])]
    await model.generate([60, 61, 62, 63, 96, 97])
    return " ".join(parts)


@localtrace.op(name="researcher", kind="agent")
async def researcher(topic: str, answer: list[int]) -> str:
    """Answer from a context of one's own."""
    await Model(ids(*answer)).generate([70, 71])
    return look_up(topic)


async def sub_agents() -> dict[str, Any]:
    """Agents below an agent, each with turns."""
    with localtrace.trajectory(2, 17, 0, group_id="g-17-2", agent="planner", name="team") as t:
        await planner("w9")
        t.set(reward=0.75)
    return {"trace_id": t.trace_id, "fate": "trained", "trained_step": 2, "advantage": 0.25}


@localtrace.op(name="judge", kind="reward")
async def judge(answer: str) -> float:
    """Ask a model that is not the policy."""
    await Model(ids(81)).generate([80])
    return 0.5


async def judged() -> dict[str, Any]:
    """A model grades the answer of the policy."""
    with localtrace.trajectory(2, 17, 1, group_id="g-17-2") as t:
        await Model(ids(10, 11, 12, log_probs=[-0.5, -0.5, -0.5])).generate([1, 2, 3])
        t.set(reward=await judge("w10 w11 w12"))
    return {"trace_id": t.trace_id}


async def validated() -> dict[str, Any]:
    """A validation rollout."""
    with localtrace.trajectory(2, "v1", 0, validate=True, data_source="held out") as t:
        await Model(ids(14)).generate([1, 2, 3])
        t.set(reward=1.0)
    return {"trace_id": t.trace_id}


async def cancelled() -> dict[str, Any]:
    """The trainer wants no more."""
    with suppress(asyncio.CancelledError), localtrace.trajectory(2, 19, 0) as t:
        await Model(ids(15)).generate([6])
        raise asyncio.CancelledError
    return {"trace_id": t.trace_id}


async def alone() -> dict[str, Any]:
    """A generation outside of any rollout."""
    await Model(ids(16, 17)).generate([7, 8])
    return {}


async def unfinished() -> dict[str, Any]:
    """The process ends before the rollout does."""
    t = localtrace.trajectory(2, 19, 1).__enter__()
    await Model(ids(15, 16)).generate([6])
    return {"trace_id": t.trace_id}


IN_TOKENS = (turns_of_tokens, odd_logprobs, aborted, masked, masked_turns, generated_again,
             nothing_said, sub_agents, judged, validated, cancelled, alone)  # fmt: skip


# Messages and texts, without a tokenizer.


def _completion(message: Message, finish: str, usage: tuple[int, int]) -> dict[str, Any]:
    return {
        "object": "chat.completion",
        "model": "tiny-chat",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]},
    }


def _call(number: int, word: str) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": f'{{"word": "{word}"}}'}
    return {"id": f"call_{number}", "type": "function", "function": function}


def tools() -> dict[str, Any]:
    """Reasoning, two calls at once of which one fails, and the answer."""
    message = {
        "role": "assistant", "content": None, "reasoning_content": "I should look it up.",
        "tool_calls": [_call(0, "France"), _call(1, "nothing")],
    }  # fmt: skip
    answer = {"role": "assistant", "content": "It is **Paris**."}
    model = Model(_completion(message, "tool_calls", (21, 9)), _completion(answer, "stop", (48, 5)))
    asked: list[Message] = [
        {"role": "system", "content": "You look words up."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    with localtrace.trajectory(1, "capital", 0, group_id="g-capital", name="tools") as t:
        model.chat(asked, tools=TOOLS, temperature=0.5)
        replies = [{"role": "tool", "tool_call_id": "call_0", "content": look_up("France")}]
        with suppress(KeyError):
            look_up("nothing")
        replies += [{"role": "tool", "tool_call_id": "call_1", "content": "error: no such word"}]
        tick(4)
        model.chat([*asked, message, *replies], tools=TOOLS)
        t.set(reward=1.0, ground_truth="Paris")
    return {"trace_id": t.trace_id, "fate": "trained", "advantage": 0.5}


def pictures() -> dict[str, Any]:
    """Pictures in a message and beside it; a film that is kept by name."""
    parts = [
        {"type": "text", "text": "What is in this picture?"},
        {"type": "image_url", "image_url": {"url": PICTURE}},
    ]
    shown = {"images": [bytes(600)], "video_data": b"\x00film\xff"}
    with localtrace.trajectory(1, "capital", 1, group_id="g-capital") as t:
        model = Model({"text": "A grey dot.", "finish_reason": "stop"})
        model.chat([{"role": "user", "content": parts}], **shown)
        t.set(reward=0.5)
    return {"trace_id": t.trace_id, "fate": "trained", "advantage": -0.5}


def texts() -> dict[str, Any]:
    """Prompts of a chat template as text, an answer with its thought inside, and a stream."""
    prompt = "<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n"
    with localtrace.trajectory(1, "texts", 0) as t:
        thought = {"text": "<think>2 + 2 = 4</think>\nFour.", "finish_reason": "stop"}
        Model(thought).complete(prompt)
        pieces = Model("one, ", "two").stream([{"role": "user", "content": "Count."}])
        note("".join(pieces))
        localtrace.record_turn(
            "three", messages=[{"role": "user", "content": "Go on."}], inputs={"seed": 7},
            name="batch", duration_ns=5_000_000,
        )  # fmt: skip
        t.set(reward=0.25)
    return {"trace_id": t.trace_id}


async def ids_alone() -> dict[str, Any]:
    """Token ids that nothing in the store can read."""
    model = Model(ids(102, 103, log_probs=[-0.5, -0.25]), ids(105))
    with localtrace.trajectory(1, "ids", 0) as t:
        await model.generate([100, 101])
        await model.generate([100, 101, 102, 103, 104])
        t.set(reward=0.0)
    return {"trace_id": t.trace_id}


@dataclass
class Point:
    """An object of the caller's own."""

    x: int
    label: str


def odd_values() -> dict[str, Any]:
    """Values that no format has a word for, and texts that do harm where they are not escaped."""
    loop: list[Any] = [1]
    loop.append(loop)
    values = {
        "control": "bell\x07 escape \x1b[31mred\x1b[0m nul\x00 bidi\u202egnp",
        "surrogate": "half \ud83d of a pair",
        "huge": 2**80, "minus": -(2**63), "nan": math.nan, "inf": -math.inf, "small": 5e-324,
        "bytes": b"\x00\xff", "array": np.arange(3, dtype=np.int16), "loop": loop, "set": {1},
        "when": datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC), "point": Point(1, "one"),
        "$type": "taken", "ref": "weave:///team/project/object/name:latest", 7: "seven",
    }  # fmt: skip
    with localtrace.trajectory(2, "odd\x1b[2J", 0, name="<b>odd</b>") as t:
        note(values)
        asked = "</script><script>alert(1)</script> \x1b]8;;http://evil\x07 | a\tb\r\nc"
        said = {"role": "assistant", "content": "`x` <img src=x> \ud800 \u200b", "extra": 2**70}
        Model({"message": said}).chat([{"role": "user", "content": asked, "n": math.inf}])
        t.set(reward=math.inf, note={"values": [math.nan, 2**64]})
    return {"trace_id": t.trace_id, "score": "<i>", "length": 1e300}


def keys() -> dict[str, Any]:
    """Keys in every place from which they must not leave, and a customer that a rule names."""
    with localtrace.trajectory(2, "keys", 0, agent="ACME helper") as t:
        asked = [{"role": "user", "content": f"My key is {KEYS['openai']}, says ACME."}]
        message = {
            "role": "assistant", "content": f"Stored {KEYS['aws']}.",
            "tool_calls": [_call(0, KEYS["openai"])],
        }  # fmt: skip
        Model({"message": message}).chat(asked, api_key="hunter2hunter2", headers=KEYS["header"])
        with suppress(ValueError):
            fail("https://user:pa55w0rd@db.internal/acme")
        t.set(reward=0.0, owner="ACME", password="correct horse")
    return {"trace_id": t.trace_id, "comment_of_judge": f"ACME leaked {KEYS['aws']}"}


@localtrace.op(name="fail")
def fail(url: str) -> None:
    """Fail, and say with what."""
    raise ValueError(f"cannot reach {url} with {KEYS['openai']}")


IN_MESSAGES = (tools, pictures, texts, ids_alone, odd_values, keys)


def record(rollout: Callable[[], Any]) -> tuple[str, str]:
    """Do a rollout, and record what is known of it only later; return its name and trace id."""
    tick(100)
    late = asyncio.run(rollout()) if asyncio.iscoroutinefunction(rollout) else rollout()
    tick(50)
    trace_id = late.pop("trace_id", "")
    if late:
        localtrace.outcome(trace_id, source="trainer", **late)
    return rollout.__name__, trace_id
