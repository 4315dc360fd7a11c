"""Checks of tensors, made before anything reads their numbers.

Works on any torch tensor without importing torch: that a tensor exists proves that torch is loaded.
"""

from __future__ import annotations

import sys
from typing import Any

from localtrace.values.kinds import is_loaded_kind, package_of


class FreedTensor(ValueError):
    """A tensor's memory was freed before the call."""


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a torch tensor, a parameter, or of another of torch's own classes.

    Those of other packages are not: whatever they are asked runs their `__torch_function__`.
    """
    kind = type(value)
    return is_loaded_kind(kind, "torch", "Tensor") and package_of(kind) == "torch"


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
