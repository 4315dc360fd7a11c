"""Generated values, and the form in which the store gives them back.

`normal` follows the page of the format and shares no code with the codec.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pydantic
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

# -- values --------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"
    NUMBERS = (1, 2.5)


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Message:
    role: Any
    content: Any


class Model(pydantic.BaseModel):
    model_config = {"extra": "allow"}
    first: Any
    second: Any = None


any_text = st.text(st.characters(exclude_categories=()))
integers = st.integers() | st.integers(-(2**70), 2**70) | st.sampled_from(
    [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**300]
)  # fmt: skip
moments = st.datetimes(
    datetime(2, 1, 1), datetime(9998, 1, 1), timezones=st.sampled_from(
        [UTC, timezone(timedelta(hours=5, minutes=30)), timezone(-timedelta(hours=8))]
    ),
)  # fmt: skip
hashable_leaves = (
    st.none() | st.booleans() | integers | st.floats() | any_text | st.binary()
    | st.complex_numbers() | moments | st.just("$type")
)  # fmt: skip
keys = st.recursive(hashable_leaves, lambda inner: st.lists(inner, max_size=3).map(tuple))
array_types = (
    nps.scalar_dtypes() | nps.unicode_string_dtypes(max_len=4) | nps.byte_string_dtypes(max_len=4)
)
arrays = nps.arrays(array_types, nps.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
views = arrays.filter(lambda array: array.ndim > 0).map(lambda array: array[::2]) | arrays.map(
    np.transpose
)
scalars = nps.arrays(nps.scalar_dtypes(), ()).map(lambda array: array[()])
TORCH_TYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64,
)  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(nps.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    count = int(np.prod(shape, dtype=int))
    numbers = draw(st.lists(st.integers(0, 100), min_size=count, max_size=count))
    tensor = torch.tensor(numbers).reshape(shape).to(draw(st.sampled_from(TORCH_TYPES)))
    if tensor.ndim and draw(st.booleans()):
        tensor = tensor[::2] if draw(st.booleans()) else tensor.transpose(0, -1)
    return tensor.requires_grad_(tensor.is_floating_point() and draw(st.booleans()))


leaves = (
    hashable_leaves | st.binary().map(bytearray) | arrays | views | scalars | tensors()
    | st.sampled_from([*Color, *Level]) | st.datetimes()
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.frozensets(hashable_leaves, max_size=4)
        | st.dictionaries(any_text, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.builds(Message, inner, inner)
        | st.builds(Model, first=inner, second=inner, third=inner)
    ),
    max_leaves=12,
)


# -- the normal form, as the page of the format describes it ---------------------------------


def normal(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return normal(value.value)
    if isinstance(value, torch.Tensor):
        value = value.detach()
        half = value.dtype in (torch.float16, torch.bfloat16)
        return normal((value.float() if half else value).numpy())
    if isinstance(value, np.generic | np.ndarray):
        return normal_array(np.asarray(value))
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, list | tuple | frozenset):
        return [normal(item) for item in value]
    if isinstance(value, dict):
        return {normal_key(key): normal(item) for key, item in value.items()}
    if isinstance(value, Message | Model):
        return {name: normal(item) for name, item in vars_of(value).items()}
    if isinstance(value, datetime):
        return value.isoformat() if value.tzinfo is None else value.astimezone(UTC)
    return value


def normal_array(array: Any) -> Any:
    if array.dtype.newbyteorder("=") == np.float16:
        array = array.astype("<f4")
    if array.ndim == 0:
        return str(array) if array.dtype.kind in "mM" else array.item()
    return array.astype(array.dtype.newbyteorder("<"))


def normal_key(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(map(normal_key, key))
    return normal(key)


def vars_of(value: Message | Model) -> dict[str, Any]:
    if isinstance(value, Model):
        return {"first": value.first, "second": value.second, "third": value.third}  # type: ignore[attr-defined]
    return {"role": value.role, "content": value.content}


def same(left: Any, right: Any) -> bool:
    """Equal in type and value, and in every bit but the payload of a NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        both_nan = math.isnan(left) and math.isnan(right)
        return (both_nan or left == right) and math.copysign(1, left) == math.copysign(1, right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape) == (right.dtype, right.shape) and (
            left.tobytes() == right.tobytes()
        )
    return bool(left == right)
