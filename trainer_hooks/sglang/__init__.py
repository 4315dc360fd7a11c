"""Recording of SGLang's generations: a plugin for every process, or `wrap(engine)` for one."""

from __future__ import annotations

from localtrace.trainer_hooks.sglang.hook import SGLANG, register, wrap

__all__ = ["register", "wrap"]
SYSTEMS = (SGLANG,)
