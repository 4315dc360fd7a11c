"""Generations of SGLang, recorded where every interface of the engine meets."""

from __future__ import annotations

from localtrace.trainer_hooks.sglang.hook import register, wrap

__all__ = ["register", "wrap"]
