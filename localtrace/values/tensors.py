"""Checks of tensors, made before anything reads their numbers.

Works on any torch tensor without importing torch: that a tensor exists proves that torch is loaded.
"""

from __future__ import annotations

import sys
from typing import Any


class FreedTensor(ValueError):
    """A tensor's memory was freed before the call."""


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a torch tensor, a parameter, or of another of torch's own classes."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def has_storage(tensor: Any) -> bool:
    """Tell whether a tensor owns its numbers: it is not sparse, quantised, distributed or fake."""
    torch: Any = sys.modules["torch"]
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_quantized
    return plain and tensor.layout is torch.strided


def in_memory(tensor: Any) -> bool:
    """Tell whether a tensor is in main memory, with torch's strided layout."""
    return tensor.device.type == "cpu" and str(tensor.layout) == "torch.strided"


def is_freed(tensor: Any) -> bool:
    """Tell whether a tensor spans more than its storage, as FSDP leaves parameters after a step.

    torch does not check this: it crashes the process, breaks the device, or reads other data.
    """
    try:
        count: int = tensor.numel()
        if not count:
            return False
        last = count - 1
        if not tensor.is_contiguous():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in steps)
        last += tensor.storage_offset()
        held_bytes: int = tensor.untyped_storage().nbytes()
    except Exception:  # without strides or a storage: torch refuses to read it
        return False
    needed_bytes: int = (last + 1) * tensor.element_size()
    return held_bytes < needed_bytes


def is_stand_in(tensor: Any) -> bool:
    """Tell whether a tensor has a size and no memory.

    Lazy zeros are such tensors, and those that `torch.func.functionalize` traces with.
    """
    try:
        return (
            bool(tensor.numel() and has_storage(tensor)) and not tensor.untyped_storage().data_ptr()
        )
    except Exception:
        return True


def is_readable(tensor: Any) -> bool:
    """Tell whether there is memory behind a tensor: it is neither freed nor a stand-in."""
    return not (is_freed(tensor) or is_stand_in(tensor))


def refuse_freed(value: Any) -> None:
    """Refuse a freed tensor, before a number or a text is made of it.

    Raises:
        FreedTensor: it is a freed tensor, or an error that was raised with one.
    """
    for part in (value, *value.args) if isinstance(value, BaseException) else (value,):
        if hasattr(part, "untyped_storage") and not is_readable(part):
            raise FreedTensor


def text_of(value: Any) -> str:
    """Return `str(value)`; of a tensor without dimensions, the text of its number.

    Raises:
        FreedTensor: as `refuse_freed`.
        TypeError: a tensor is on a device, which would have to be waited for.
        Exception: what the value raises.
    """
    refuse_freed(value)
    if is_tensor(value):
        if not in_memory(value):
            raise TypeError("the text of a tensor on a device")
        value = value if value.dim() else value.item()
    return str(value)
