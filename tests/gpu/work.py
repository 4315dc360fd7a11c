"""Work that keeps a GPU busy."""

from __future__ import annotations

import torch


class Matmuls:
    """Matrix products of bfloat16, one after the other on the current stream."""

    def __init__(self, size: int) -> None:
        self._left = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        self._right = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        self._product = torch.empty_like(self._left)

    def add(self, count: int) -> None:
        """Give this much more work to the GPU; does not wait for it."""
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._product)


def sleep(cycles: int = 1_000_000_000) -> None:
    """Let the current stream do nothing for about half a second."""
    torch.cuda._sleep(cycles)
