"""Stands in for SGLang's compiled kernels, whose wheel is for CUDA only."""

from __future__ import annotations

from stand_in import accept_submodules, attributes_of

accept_submodules(__name__)
__getattr__ = attributes_of(__name__)
