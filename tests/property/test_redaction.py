"""No key of a known shape survives, wherever it stands and whatever stands around it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from localtrace.codec import from_json, to_json
from localtrace.types import Span, Trajectory
from localtrace.uploader.redaction import IDS_COUNT, Redaction

KEYS = st.one_of(
    st.from_regex(r"sk-[A-Za-z0-9]{40}", fullmatch=True),
    st.from_regex(r"hf_[A-Za-z0-9]{34}", fullmatch=True),
    st.from_regex(r"AKIA[A-Z0-9]{16}", fullmatch=True),
)
WORDS = st.text(st.characters(blacklist_categories=["Cs"], whitelist_characters=" "), max_size=20)


@st.composite
def values(draw: st.DrawFn, key: str) -> Any:
    """A nested value that holds the key once, between spaces."""
    value: Any = f"{draw(WORDS)} {key} {draw(WORDS)}"
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["list", "value", "key", "text"]))
        if kind == "list":
            value = [draw(WORDS), value, 1.5, None]
        elif kind == "value":
            value = {draw(WORDS): value, "n": [1, 2]}
        elif kind == "key" and isinstance(value, str):
            value = {value: 1}
        elif kind == "text" and isinstance(value, str):
            value = f"{value}\n{draw(WORDS)}"
    return value


def trajectory(attributes: dict[str, Any], spans: list[Span]) -> Trajectory:
    names = ("step", "sample_index", "rollout_n", "group_id", "name", "agent", "data_source")
    return Trajectory(
        trace_id="a" * 32, run_id="r", attempt=0, project="p", experiment="e", validate=False,
        status="ok", error=None, start_ns=1, end_ns=2, reward=None, attributes=attributes,
        spans=spans, **dict.fromkeys(names),
    )  # fmt: skip


def turn(prompt: list[int], output: list[int], inputs: Any, outputs: Any) -> Span:
    return Span(
        trace_id="a" * 32, span_id="b" * 16, parent_id=None, seq=0, op="generate", status="ok",
        error=None, start_ns=1, duration_ns=1, inputs=inputs, outputs=outputs, is_turn=True,
        prompt_ids=prompt, output_ids=output, output_logprobs=None, messages=None,
        output_text=None, finish_reason=None,
    )  # fmt: skip


@given(st.data())
def test_no_key_survives_in_any_value(data: st.DataObject) -> None:
    key = data.draw(KEYS)
    attributes = {"a": data.draw(values(key))}
    inputs, outputs = {"b": data.draw(values(key))}, data.draw(values(key))
    one = trajectory(attributes, [turn([1, 2], [3], inputs, outputs)])
    safe = Redaction.load(None).trajectory(one, lambda *_: None)
    (span,) = safe.spans
    assert key not in to_json([safe.attributes, span.inputs, span.outputs])
    assert span.prompt_ids is None


@given(KEYS, st.text(max_size=100), st.integers(0, 60))
def test_no_key_survives_in_tokens(key: str, before: str, split: int) -> None:
    prompt = [ord(letter) for letter in f"{before} {key[:split]}"]
    output = [ord(letter) for letter in f"{key[split:]} "]
    redaction = Redaction.load(None)
    one = trajectory({}, [turn(prompt, output, {"prompt_ids": prompt}, {"output_ids": output})])
    safe = redaction.trajectory(one, lambda _, ids: "".join(map(chr, ids)))
    (span,) = safe.spans
    assert (span.prompt_ids, span.output_ids) == (None, None)
    assert redaction.counts[IDS_COUNT] == 1


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner), max_leaves=10,
))  # fmt: skip
def test_values_without_a_key_stay_as_they_are(value: Any) -> None:
    redaction = Redaction.load(None)
    assert redaction.value(value) is value or redaction.counts
    assert from_json(to_json(redaction.value(value))) == from_json(to_json(value))
