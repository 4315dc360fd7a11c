"""Work on long rollouts grows with what their turns add, not with the prompts that they repeat."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, takewhile
from operator import eq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import localtrace
from localtrace.exporters.formats.atif import document_of
from localtrace.read import turns as turns_module
from localtrace.read.store import Store, open_store
from localtrace.read.turns import turns_of
from localtrace.redaction.redaction import Redaction
from localtrace.redaction.rules import Rules
from localtrace.store import whole_prompts
from localtrace.store.whole_prompts import SeenLists, shared_prefix
from localtrace.testing import recording
from localtrace.types import Trajectory
from localtrace.uploader.receipts import TraceReceipt
from localtrace.uploader.records import Records, prompts_bytes
from localtrace.uploader.selection import choose
from localtrace.uploader.targets import Place
from localtrace.uploader.targets.mlflow import MlflowTarget
from localtrace.uploader.transcripts import transcript_of

TURNS = (100, 200)
LINEAR = 2.6
"""Most that twice the turns may cost: whole lists among the deltas come in steps. Work on whole
prompts would cost four times as much."""
OUTPUT = [7] * 10


@localtrace.op
def generate(prompt_ids: list[int]) -> dict[str, Any]:
    """Generate token ids."""
    return {"token_ids": OUTPUT}


@localtrace.op
def chat(messages: list[Any]) -> dict[str, Any]:
    """Answer messages."""
    return {"role": "assistant", "content": f"answer {len(messages)}"}


def roll_out(turns: int, *, is_chat: bool) -> None:
    ids, said = list(range(300, 340)), [{"role": "user", "content": "question " * 20}]
    with localtrace.trajectory(step=turns, sample_index=int(is_chat)):
        for turn in range(turns):
            if is_chat:
                chat(list(said))
                said.append({"role": "assistant", "content": f"answer {len(said)}"})
                said.append({"role": "tool", "content": f"{turn} " + "result " * 30})
            else:
                generate(list(ids))
                ids += [*OUTPUT, *range(1000 * turn, 1000 * turn + 30)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("long") / "store"
    with recording(folder, run_id="long"):
        for turns in TURNS:
            for is_chat in (False, True):
                roll_out(turns, is_chat=is_chat)
    with open_store(folder) as opened:
        yield opened


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts of letters searched, messages encoded, lists compared and ids decoded."""
    done: Counter[str] = Counter()

    def count(owner: Any, name: str, size_of: Any) -> None:
        real = getattr(owner, name)

        def counted(*args: Any, **named: Any) -> Any:
            done[name] += size_of(*args)
            return real(*args, **named)

        monkeypatch.setattr(owner, name, counted)

    count(turns_module, "_message", lambda message: 1)
    count(Rules, "search", lambda rules, text, *before: len(text))
    count(whole_prompts, "encode", lambda message: 1)
    count(whole_prompts, "_elements", lambda items: len(items or ()))
    count(whole_prompts, "shared_prefix", lambda left, right: 1)
    return done


@pytest.mark.parametrize("is_chat", [False, True])
def test_twice_the_turns_are_read_and_searched_with_twice_the_work(
    store: Store, work: Counter[str], is_chat: bool
) -> None:
    costs = []
    for turns in TURNS:
        work.clear()

        def decode(ids: list[int], *, skip_special_tokens: bool = False) -> str:
            work["decode"] += len(ids)
            return " ".join(map(str, ids))

        (one,) = store.trajectories(step=turns, sample_index=int(is_chat))
        trajectory = replace(store.trajectory(one["trace_id"]), decode=decode)
        assert Redaction.load(None).trajectory(trajectory) is trajectory
        if is_chat:
            document_of(trajectory, Counter())
            transcript_of(trajectory)
        given = [turn.new or () for turn in turns_of(trajectory)]
        assert sum(map(len, given)) == (2 * turns - 1 - (turns - 1) if is_chat else turns)
        costs.append(Counter(work))
    few, many = costs
    assert {"shared_prefix", "search"} <= set(few)
    assert ("encode" if is_chat else "decode") in few
    for name, cost in many.items():
        assert cost <= LINEAR * few[name], (name, few[name], cost)


def test_a_rollout_whose_prompts_are_too_long_is_refused_before_it_is_encoded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = store.trajectories(step=TURNS[0], sample_index=1)
    trajectory = store.trajectory(one["trace_id"])
    target = MlflowTarget("http://127.0.0.1:9", assessments=False)
    least = prompts_bytes(trajectory, math.inf)
    place = Place("d", "e", "r")
    assert least <= target.encode(trajectory, place, transcript_of(trajectory)).size_bytes
    monkeypatch.setattr(MlflowTarget, "record_max_bytes", least - 1)
    monkeypatch.setattr(MlflowTarget, "encode", None)
    (part,) = choose(store, [trajectory.trace_id]).runs
    records = Records(store, target, Redaction.load(None))
    (receipt,) = records.of(part.run, [trajectory.trace_id], place)
    assert isinstance(receipt, TraceReceipt)
    assert prompts_bytes(trajectory, 1) == sum(span.is_turn for span in trajectory.spans)
    assert f"{least:.0f} bytes alone, at most {least - 1}" in str(receipt.reason)


numbers = st.lists(st.integers(0, 2), max_size=40)


@given(st.lists(st.tuples(numbers, st.integers(0, 40), numbers), max_size=12))
def test_as_much_is_known_of_a_list_as_it_shares_with_any_earlier_one(
    steps: list[tuple[list[int], int, list[int]]],
) -> None:
    """Lists go on from the one before, whole or cut, or begin anew."""
    seen, every = SeenLists(), [[0] * 20]
    assert seen.known(every[0]) == 0
    seen.add(every[0])
    for fresh, kept, following in steps:
        elements = [*every[-1][:kept], *fresh]
        naive = [sum(1 for _ in takewhile(bool, map(eq, elements, one))) for one in every]
        assert [shared_prefix(elements, one) for one in every] == naive
        assert seen.known(elements) == max(naive)
        seen.add([*elements, *following])
        every.append([*elements, *following])


def test_messages_of_rewritten_lists_are_one_object_each(store: Store) -> None:
    (one,) = store.trajectories(step=TURNS[1], sample_index=1)
    trajectory: Trajectory = store.trajectory(one["trace_id"])
    repeated = chain.from_iterable(turn.messages or () for turn in trajectory.turns)
    assert len(set(map(id, repeated))) == 2 * TURNS[1] - 1
