"""A device that a machine without one can have: its copies arrive when a test says so."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from localtrace.record import active
from localtrace.values.arrays import TensorCopy, copy_tensor
from localtrace.values.placeholder import Placeholder


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device, and that nobody may wait for."""

    @property
    def device(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(type="cuda", index=0)

    def _synchronise(self, *_: object, **__: object) -> Any:
        raise AssertionError("somebody waited for the device")

    item = tolist = cpu = numpy = __float__ = __int__ = __bool__ = __index__ = _synchronise  # type: ignore[assignment]
    data_ptr = _synchronise


OnDevice.__module__ = "torch.tests"


def on_device(tensor: torch.Tensor) -> OnDevice:
    return tensor.detach().as_subclass(OnDevice).requires_grad_(tensor.requires_grad)


class SlowDevice:
    """Moves a batch when `arrive` is true; its other switches are its faults."""

    def __init__(self, arrive: bool = True) -> None:
        self.arrive = arrive
        self.refuses = False
        """To copy, as while a CUDA graph is captured."""
        self.fails: set[str] = set()
        """Methods that raise."""
        self.loses = False
        """Whether it loses the tensors that it moves."""
        self.room = 1000
        """Pieces that a batch may have."""
        self.batches: list[int] = []
        """Pieces in each batch."""
        self._batch: list[TensorCopy] | None = None
        self._contents: list[weakref.ref[Any]] = []

    @property
    def held(self) -> int:
        """Copies whose memory is in use."""
        return sum(content() is not None for content in self._contents)

    def take(self, tensor: Any, dtype: str | None) -> TensorCopy | str:
        self._may("take")
        if self.refuses:
            return "device_tensor"
        copy = copy_tensor(tensor, dtype)
        if isinstance(copy, TensorCopy):
            self._contents.append(weakref.ref(copy.content))
        return copy

    def begin(self, pieces: Iterable[TensorCopy]) -> int:
        self._may("begin")
        assert self._batch is None, "the memory is in use"
        batch = list(itertools.islice(pieces, self.room))
        if batch:
            self._batch = batch
            self.batches.append(len(batch))
        return len(batch)

    def done(self) -> bool:
        self._may("done")
        assert self._batch is not None
        return self.arrive

    def read(self) -> list[bytes | None]:
        self._may("read")
        assert self._batch is not None
        assert self.arrive
        batch, self._batch = self._batch, None
        return [None if self.loses else bytes_of(taken.content) for taken in batch]

    def _may(self, method: str) -> None:
        if method in self.fails:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def use(device: SlowDevice) -> SlowDevice:
    """Make it the device of the process that records."""
    assert active.recorder is not None
    active.recorder.copies.device = device
    return device


def marker_prefix() -> bytes:
    """The bytes that markers of the process that records begin with."""
    assert active.recorder is not None
    marker = active.recorder.copies.start(on_device(torch.ones(1)))
    assert isinstance(marker, msgspec.msgpack.Ext)
    return b"\xd7\x02" + marker.data[:4]


def is_left_out(value: Any) -> bool:
    """Tell whether a placeholder stands for a tensor on a device."""
    return isinstance(value, Placeholder) and value.reason == "device_tensor"


def bytes_of(content: torch.Tensor) -> bytes:
    return bytes(content.as_subclass(torch.Tensor).numpy())
