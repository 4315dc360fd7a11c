"""Stands in for torchvision, whose wheel refuses a CPU build of torch."""

from __future__ import annotations

from stand_in import accept_submodules, attributes_of

__version__ = "0.0.0"

accept_submodules(__name__)
__getattr__ = attributes_of(__name__)
