"""The hook into SGLang, around `TokenizerManager.generate_request`.

Every interface of SGLang goes through that method."""

from __future__ import annotations

from typing import Any, TypeVar

from localtrace.record import active
from localtrace.trainer_hooks.environment import record_this_process, refuse
from localtrace.trainer_hooks.seams import Part, Plugin, System
from localtrace.trainer_hooks.sglang.recording import Recording, is_rollout, keep_prompt

E = TypeVar("E")
_MANAGER = "sglang.srt.managers.tokenizer_manager"
_AT_THE_CLIENT = "record at the client, with localtrace.trainer_hooks.http.record(client)"
SGLANG = System(
    "sglang",
    "sglang",
    ("0.5.12", "0.5.23"),
    Plugin("sglang.srt.plugins", "SGLANG_PLUGINS", "localtrace.trainer_hooks.sglang:register"),
    otherwise=_AT_THE_CLIENT,
)
SGLANG.needs(
    "sglang.srt.plugins.hook_registry",
    "HookRegistry",
    without="it loads no plugins: use 0.5.12 or later, or call "
    "localtrace.trainer_hooks.sglang.register() before it starts",
)


def register() -> None:
    """Have every tokenizer manager of this process record; SGLang calls this as its plugin.

    SGLang calls it in each of its processes. Only one of them generates, so nothing is opened here.
    """
    SGLANG.install()


def wrap(engine: E) -> E:
    """Have one engine record where the plugin does not, as in versions without plugins.

    Args:
        engine: a `sglang.Engine`, or its tokenizer manager, in the process where it generates.

    Returns:
        The same engine.

    Raises:
        ConfigError: the engine has no tokenizer manager here.
        CannotRecord: this process cannot record, and recording is required.
    """
    manager = getattr(engine, "tokenizer_manager", None)
    SGLANG.enter(engine if manager is None else manager, "TokenizerManager")
    record_this_process("sglang")
    return engine


@SGLANG.stream(_MANAGER, "TokenizerManager.generate_request")
def _generate(self: Any, obj: Any, request: Any) -> Recording | None:
    if not record_this_process("sglang") or not is_rollout(self, obj, request):
        return None
    return Recording(self, obj, request)


@SGLANG.around(
    _MANAGER, "TokenizerManager._create_tokenized_object", without="0.5.12 returns no prompt ids"
)
def _tokenize(obj: Any) -> Part:
    tokenized = yield
    if active.recorder is not None:
        keep_prompt(obj, tokenized)


@SGLANG.around(_MANAGER, "TokenizerManager.__init__")
def _start() -> Part:
    """Start recording when a tokenizer manager is made, so that problems show at start-up."""
    yield
    record_this_process("sglang")


@SGLANG.around(
    "sglang.srt.managers.multi_tokenizer_mixin", "MultiTokenizerRouter.__init__", without=""
)
def _split() -> Part:
    """Report that several tokenizer processes cannot be recorded: they load no plugins."""
    if record_this_process("sglang"):
        refuse(
            "with --tokenizer-worker-num above 1 SGLang loads no plugins in its tokenizer workers, "
            f"so their generations are not recorded: use 1, or {_AT_THE_CLIENT}"
        )
    yield
