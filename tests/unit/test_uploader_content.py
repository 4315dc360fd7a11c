"""Facts that go out beside the record, and facts that are known to be missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from localtrace.types import Span, Trajectory, no_text
from localtrace.uploader.records import left_out, wants_text, with_text
from localtrace.values.placeholder import Placeholder


def span(inputs: Any, outputs: Any) -> Span:
    return Span(
        trace_id="t", span_id="s", parent_id=None, seq=0, op="run", status="ok", error=None,
        start_ns=1, duration_ns=1, inputs=inputs, outputs=outputs, is_turn=False, prompt_ids=None,
        output_ids=None, output_logprobs=None, messages=None, output_text=None, finish_reason=None,
    )  # fmt: skip


def trajectory(*spans: Span, **attributes: Any) -> Trajectory:
    names = ("step", "sample_index", "rollout_n", "group_id", "name", "agent", "data_source")
    return Trajectory(
        trace_id="t", run_id="run", attempt=0, project="p", experiment="e", validate=False,
        status="ok", error=None, start_ns=1, end_ns=2, reward=None, attributes=attributes,
        spans=list(spans), decode=decode, **dict.fromkeys(names),
    )  # fmt: skip


def decode(ids: list[int], *, skip_special_tokens: bool = False) -> str:
    return f"text of {ids}"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"actor_rollout_ref": {"rollout": {"trace": {"token2text": True}}}}, True),
        ({"actor_rollout_ref": {"rollout": {"trace": {"token2text": False}}}}, False),
        ({"actor_rollout_ref": {"rollout": {"trace": None}}}, False),
        ({"actor_rollout_ref": "true"}, False),
        (None, False),
    ],
)
def test_text_is_added_where_the_run_asked_for_it(config, wanted) -> None:
    assert wants_text(config) is wanted


def test_the_results_own_ids_come_before_the_arguments() -> None:
    loop = span({}, {"prompt_ids": [1, 2], "response_ids": [3]})
    turn = span({"prompt_ids": [1]}, {"token_ids": [2]})
    texts = [one.outputs for one in with_text(trajectory(loop, turn)).spans]
    assert texts[0] == {
        **loop.outputs,
        "prompt_text": "text of [1, 2]",
        "response_text": "text of [3]",
    }
    assert texts[1] == {
        **turn.outputs,
        "prompt_text": "text of [1]",
        "response_text": "text of [2]",
    }


@pytest.mark.parametrize(
    "outputs",
    [None, "text", [1], {"a": 1}, {"response_ids": Placeholder("redacted", "list")}],
)
def test_other_results_stay_as_they_are(outputs) -> None:
    one = trajectory(span({}, outputs))
    assert with_text(one).spans == one.spans


def test_nothing_is_added_where_no_tokenizer_was_kept() -> None:
    one = trajectory(span({}, {"response_ids": [1]}))
    assert with_text(replace(one, decode=no_text)) == one


def test_what_recording_left_out_is_counted_by_field_and_reason() -> None:
    dropped = Placeholder("dropped", "PIL.Image")
    one = trajectory(
        span({"image_data": [dropped, dropped]}, {"routed_experts": dropped}),
        span(None, Placeholder("too_large", "dict")),
        note={"image_data": dropped},
    )
    assert left_out(one) == {
        "image_data (dropped)": 3,
        "routed_experts (dropped)": 1,
        "value (too_large)": 1,
    }
