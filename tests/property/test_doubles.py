"""Log-probabilities that floats round are stored once, and come back bit by bit."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import localtrace
from localtrace.read.store import open_store
from localtrace.store.layout import open_layout
from localtrace.store.sealing.seal import seal
from localtrace.testing import recording
from localtrace.values.doubles import exact, floats, rests
from localtrace.values.token_lists import read_doubles

DOUBLES = st.floats(allow_nan=True, allow_infinity=True)
CASES = {
    "exact": [-0.5, -1.25, 0.0, -0.0],
    "rounded": [-0.1, -1e-7, -13.81551055796427, -0.30000000000000004],
    "beyond floats": [-0.1, -1e300],
    "too small for floats": [-0.1, -1e-42, 5e-324],
    "no numbers": [math.nan, math.inf, -math.inf, -0.1],
}


def bits(values: list[float]) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]


@given(st.lists(DOUBLES))
def test_a_float_and_its_rest_are_the_double(values: list[float]) -> None:
    found = rests(values)
    if found is None:
        assert any(abs(value) < 2**-125 or abs(value) > 3e38 or value != value for value in values)
        return
    floats = [struct.unpack("f", struct.pack("f", value))[0] for value in values]
    again = exact(floats, found.to_pylist())
    assert bits(again) == bits(values)


@given(st.lists(DOUBLES | st.integers(-1, 2**40) | st.none()))
def test_lists_of_doubles_are_read_bit_by_bit_and_others_are_not(values: list[Any]) -> None:
    found = read_doubles(msgspec.msgpack.encode(values))
    if not all(isinstance(value, float) for value in values):
        assert found is None
    else:
        assert found is not None
        assert bits(found.tolist()) == bits(values)
        assert floats(values).to_pylist() == floats(found).to_pylist() or "nan" in str(values)


@pytest.mark.parametrize(
    "value", [None, "", b"", {}, 0, -0.5, msgspec.msgpack.Ext(1, b"\xcb" + bytes(8))]
)
def test_what_is_no_list_is_not_an_empty_one(value: Any) -> None:
    assert read_doubles(msgspec.msgpack.encode(value)) is None


@given(st.lists(st.floats(-100, 0).filter(lambda value: abs(value) > 1e-30)))
def test_every_ordinary_logprob_has_a_rest(values: list[float]) -> None:
    assert rests(values) is not None


@pytest.mark.parametrize("name", CASES)
def test_logprobs_come_back_bit_by_bit(tmp_path: Path, name: str) -> None:
    logprobs = CASES[name]

    @localtrace.op
    def generate(prompt_ids: list[int]) -> dict[str, Any]:
        return {"output_ids": list(range(len(logprobs))), "logprobs": logprobs}

    with recording(tmp_path), localtrace.trajectory(step=1) as made:
        generate([1])
    for _ in range(2):
        with open_store(tmp_path) as store:
            (span,) = store.trajectory(made.trace_id).spans
            (row,) = store.sql("select outputs, logprobs_rest from spans").to_dicts()
        assert bits(span.outputs["logprobs"]) == bits(logprobs)
        is_stored_twice = "logprobs" in row["outputs"]
        assert is_stored_twice == (name in ("beyond floats", "too small for floats"))
        assert (row["logprobs_rest"] is None) == (name == "exact" or is_stored_twice)
        seal(open_layout(tmp_path))
