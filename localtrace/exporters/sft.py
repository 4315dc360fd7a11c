"""Rows for supervised fine-tuning, one JSON object per line, of three kinds.

    completions  {"prompt": [message, …], "completion": [{"role": "assistant", "content": …}]}
                 {"prompt": text, "completion": text}
    messages     {"messages": [{"role", "content"[, "weight": 0 or 1], …}, …]}
    tokens       {"input_ids": [id, …], "labels": [id or -100, …]}

TRL trains on completions alone, and on the tokens that have a label. Trainers that read OpenAI's
format train on the messages of weight 1; TRL does not read weights. What the model generated in the
rollout, and no mask rules out, is trained on once, whatever the kind:

    completions  one row per answer, after all that it was given
    messages     one row per conversation, made of its last turn, whose messages repeat the others
    tokens       one row per sequence of turns, each of which begins with the ids of the one before

A turn without messages becomes rows of text, special tokens included: one for each run of generated
tokens. An answer that was discarded, because the same prompt was generated again, gives no row, and
neither does a trajectory whose reward is NaN or infinite.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

from localtrace.exporters.answers import (
    AGAIN,
    UNKNOWN_MASK,
    continues,
    discarded,
    generated_runs,
    is_continued,
    masks_of,
)
from localtrace.exporters.shape import (
    count_no_turn,
    generations,
    given_text,
    given_tool_calls,
    teaches,
)
from localtrace.field_names import REASONING_NAMES
from localtrace.read.conversation import named_text
from localtrace.read.messages import Message
from localtrace.read.turns import prompt_text
from localtrace.store.tokenizers import Decode
from localtrace.types import Span, Trajectory
from localtrace.values.codec import to_json
from localtrace.values.fields import Fields
from localtrace.values.plain_json import plain_json

KINDS = ("completions", "messages", "tokens")
"""Kinds of rows."""
NOT_TRAINED = -100
"""The label of tokens that do not count."""
NO_TOKENIZER = "turns without text: the store keeps no tokenizer for their run"
NO_TEXT = "turns with neither text nor tool calls"
NO_IDS = "turns without token ids"
NOTHING_GENERATED = "turns of which a mask rules out every token"
FAILED = "turns that failed"
REPEATED = "rows that were written already"
MASKED = (
    "answers from the first token on that a mask rules out: messages cannot say so, "
    "--rows tokens can"
)
NOT_TEXT = "reasoning and calls of tools beside a text: rows of text have no place for them"


class Rows:
    """The rows of trajectories, one trajectory at a time.

    Args:
        decode: token ids to text, special tokens included.
        plain: token ids to text, without special tokens.
        kind: what a row is, one of KINDS.
        is_deduped: leave out rows that equal an earlier one.
        has_meta: add trace id, reward, step and labels to each row.
    """

    def __init__(
        self,
        decode: Decode,
        plain: Decode,
        kind: str = "completions",
        *,
        is_deduped: bool = False,
        has_meta: bool = False,
    ) -> None:
        self.left_out: Counter[str] = Counter()
        """Counts of what gave no row, by reason."""
        self._decode = decode
        self._plain = plain
        self._has_meta = has_meta
        self._written: set[bytes] | None = set() if is_deduped else None
        kinds: dict[str, Callable[[list[Span], str], Iterator[Fields]]] = {
            "completions": self._completions,
            "messages": self._conversations,
            "tokens": self._sequences,
        }
        self._rows = kinds[kind]

    def lines(self, trajectory: Trajectory) -> Iterator[bytes]:
        """Yield the JSON lines of a trajectory."""
        if not teaches(trajectory, self.left_out):
            return
        turns, run_id = generations(trajectory), trajectory.run_id
        if not turns:
            count_no_turn(trajectory, self.left_out)
        done = [turn for turn in turns if turn.status == "ok"]
        self.left_out[FAILED] += len(turns) - len(done)
        gone = discarded(done, partial(self._said, run_id))
        self.left_out[AGAIN] += len(gone)
        meta = {"trace_id": trajectory.trace_id, "reward": trajectory.reward,
                "step": trajectory.step, "labels": _labels(trajectory)}  # fmt: skip
        kept = [turn for turn in done if turn.span_id not in gone]
        masks = masks_of(trajectory, kept)
        known = [
            replace(turn, response_mask=masks.get(turn.span_id)) for turn in kept
            if masks.get(turn.span_id, []) is not None
        ]  # fmt: skip
        self.left_out[UNKNOWN_MASK] += len(kept) - len(known)
        for row in self._rows(known, run_id):
            if self._is_new(row):
                whole = plain_json(row | meta if self._has_meta else row)
                yield to_json(whole).encode() + b"\n"

    def _is_new(self, row: Fields) -> bool:
        if self._written is None:
            return True
        digest = sha256(to_json(row).encode()).digest()
        is_new = digest not in self._written
        self._written.add(digest)
        self.left_out[REPEATED] += not is_new
        return is_new

    def _completions(self, turns: list[Span], run_id: str) -> Iterator[Fields]:
        for turn in turns:
            if turn.messages is None:
                yield from self._texts(turn, run_id)
            elif (answer := self._trained(turn, run_id)) is not None:
                tools = _tools(turn)
                offered = {} if tools is None else {"tools": to_json(tools)}
                yield {"prompt": turn.messages, "completion": [answer], **offered}

    def _conversations(self, turns: list[Span], run_id: str) -> Iterator[Fields]:
        said = partial(self._said, run_id)
        told: set[str] = set()
        for place, turn in enumerate(turns):
            if turn.messages is None:
                yield from self._texts(turn, run_id)
            elif not is_continued(turn, turns[place + 1 :], said):
                earlier = {
                    len(one.messages or ()): one for one in turns[:place]
                    if one.span_id not in told and continues(turn, one, said)
                }  # fmt: skip
                told.update(one.span_id for one in earlier.values())
                own = {at for at, one in earlier.items() if _is_whole(one)}
                self.left_out[MASKED] += len(earlier) - len(own)
                answer = self._trained(turn, run_id)
                if answer is not None or own:
                    yield _conversation(turn, own, answer)

    def _sequences(self, turns: list[Span], run_id: str) -> Iterator[Fields]:
        found: list[tuple[list[int], list[int]]] = []
        for turn in turns:
            prompt, output = turn.prompt_ids, turn.output_ids
            if prompt is None or output is None:
                self.left_out[NO_IDS] += 1
                continue
            mask = turn.response_mask or [True] * len(output)
            self.left_out[NOTHING_GENERATED] += True not in mask
            before = next((one for one in found if prompt[: len(one[0])] == one[0]), ([], []))
            found = [one for one in found if one is not before]
            ids, labels = before
            labels = labels + [NOT_TRAINED] * (len(prompt) - len(ids))
            own = (one if counts else NOT_TRAINED for one, counts in zip(output, mask, strict=True))
            found.append((prompt + output, [*labels, *own]))
        for ids, labels in found:
            if set(labels) != {NOT_TRAINED}:
                yield {"input_ids": ids, "labels": labels}

    def _texts(self, turn: Span, run_id: str) -> Iterator[Fields]:
        mask = turn.response_mask or [True] * len(turn.output_ids or ())
        rows = [self._text_of(turn, run_id, *run) for run in generated_runs(mask)]
        if rows and None not in rows:
            yield from filter(None, rows)
        elif not _is_whole(turn):
            self.left_out[NO_TOKENIZER if rows else NOTHING_GENERATED] += 1
        else:
            yield from self._given(turn, run_id)

    def _text_of(self, turn: Span, run_id: str, start: int, end: int) -> Fields | None:
        """Return the row of a run of generated tokens, decoded; its texts join as they were."""
        if turn.prompt_ids is None or turn.output_ids is None:
            return None
        prompt = self._decode(run_id, turn.prompt_ids + turn.output_ids[:start])
        whole = self._decode(run_id, turn.prompt_ids + turn.output_ids[:end])
        if prompt is None or whole is None:
            return None
        if whole.startswith(prompt):
            return {"prompt": prompt, "completion": whole[len(prompt) :]}
        return {"prompt": prompt, "completion": self._decode(run_id, turn.output_ids[start:end])}

    def _given(self, turn: Span, run_id: str) -> Iterator[Fields]:
        prompt = prompt_text(turn, partial(self._decode, run_id))
        completion = given_text(turn) if turn.output_text is None else turn.output_text
        if prompt is None or completion is None:
            self._count_no_text(turn)
            return
        if _decoded(turn, run_id, self._decode) is None:
            more = self._said(run_id, turn) or {}
            self.left_out[NOT_TEXT] += "tool_calls" in more or "reasoning_content" in more
        yield {"prompt": prompt, "completion": completion}

    def _trained(self, turn: Span, run_id: str) -> Message | None:
        """Return an answer as far as it counts: up to the first token that a mask rules out."""
        if _is_whole(turn):
            answer = self._said(run_id, turn)
            if answer is None:
                self._count_no_text(turn)
            return answer
        start, end = next(generated_runs(turn.response_mask or []), (0, 0))
        self.left_out[MASKED if end else NOTHING_GENERATED] += 1
        text = self._plain(run_id, (turn.output_ids or [])[:end]) if end and not start else None
        return None if text is None else {"role": "assistant", "content": text}

    def _said(self, run_id: str, turn: Span) -> Message | None:
        """Return the answer of a turn as a message; None where no text of it is known."""
        text, calls = given_text(turn), given_tool_calls(turn)
        thought = named_text(turn.output_message, REASONING_NAMES)
        thought = named_text(turn.outputs, REASONING_NAMES) if thought is None else thought
        if text is None and calls is None and thought is None:
            # Without special tokens: a chat template adds them again. The decoded ids would repeat
            # calls and reasoning as text.
            text = _decoded(turn, run_id, self._plain)
            text = turn.output_text if text is None else text
            if text is None:
                return None
        # Content is never null: chat templates would write it as "None".
        answer: Message = {"role": "assistant", "content": text or ""}
        answer |= {"reasoning_content": thought} if thought else {}
        return answer | ({"tool_calls": calls} if calls else {})

    def _count_no_text(self, turn: Span) -> None:
        self.left_out[NO_TEXT if turn.output_ids is None else NO_TOKENIZER] += 1


def _conversation(turn: Span, own: Collection[int], answer: Message | None) -> Fields:
    """Return the messages of a conversation; those at the places `own` and the answer count."""
    messages = [
        {**one, "weight": int(at in own)}
        if isinstance(one, Mapping) and one.get("role") == "assistant" else one
        for at, one in enumerate(turn.messages or ())
    ]  # fmt: skip
    messages += [] if answer is None else [{**answer, "weight": 1}]
    tools = _tools(turn)
    return {"messages": messages} | ({} if tools is None else {"tools": tools})


def _is_whole(turn: Span) -> bool:
    """Return whether no mask rules out tokens of an answer."""
    return turn.response_mask is None or all(turn.response_mask)


def _tools(turn: Span) -> list[Any] | None:
    tools = turn.inputs.get("tools") if isinstance(turn.inputs, Mapping) else None
    return tools if isinstance(tools, list) and tools else None


def _labels(trajectory: Trajectory) -> list[Fields]:
    return [{"name": one.name, "value": one.value, "who": one.source} for one in trajectory.labels]


def _decoded(turn: Span, run_id: str, decode: Decode) -> str | None:
    return None if turn.output_ids is None else decode(run_id, turn.output_ids)
