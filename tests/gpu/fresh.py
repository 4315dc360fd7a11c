"""Processes of their own that record tensors, each with a CUDA that nobody has used yet."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import torch

import localtrace
from localtrace import testing
from localtrace.record.outcomes import record_tensors

IDS = [f"{n:032x}" for n in range(8)]


@localtrace.op
def identity(value: Any) -> Any:
    return value


def has_context(device: int) -> bool:
    """Tell whether this process has a context on a device; asking opens none."""
    driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)


def record_on(device: str, store: str) -> None:
    """Record tensors of one device, say which devices have a context, and wait to be ended."""
    torch.cuda.set_device(int(device))
    with testing.recording(Path(store)):
        for n in range(20):
            identity(torch.full((1000,), n, device=f"cuda:{device}"))
            record_tensors(IDS, x=torch.ones(8, 4096, device=f"cuda:{device}"))
            assert localtrace.flush(60)
        assert localtrace.losses()["values"] == {}
        print(*(n for n in range(torch.cuda.device_count()) if has_context(n)), flush=True)
        sys.stdin.read()


def first_tensor(store: str) -> None:
    """Record the first tensor of a process while the GPU is busy; say how it went."""
    tensor = torch.ones(1000, device="cuda")
    for _ in range(2):  # kernels that are loaded at their first use wait for the device
        tensor.to(torch.float32, copy=True)
        torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    before = pinned_bytes()
    with testing.recording(Path(store)):
        at_init = pinned_bytes() - before
        torch.cuda._sleep(1_000_000_000)
        asleep = torch.cuda.Event()
        asleep.record()
        identity(tensor)
        waited = asleep.query()
        assert localtrace.flush(60)
        assert localtrace.losses()["values"] == {}
        print(int(waited), at_init, pinned_bytes() - before, flush=True)


def pinned_bytes() -> int:
    """Return the pinned memory that torch has taken so far."""
    return int(torch.cuda.host_memory_stats()["allocated_bytes.allocated"])


if __name__ == "__main__":
    {"record_on": record_on, "first_tensor": first_tensor}[sys.argv[1]](*sys.argv[2:])
    os._exit(0)
