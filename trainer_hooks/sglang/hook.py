"""The hook into SGLang, around `TokenizerManager.generate_request`.

Every interface of SGLang goes through that method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from localtrace.errors import ConfigError
from localtrace.trainer_hooks.environment import hook_settings, record_this_process, refuse, say
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.sglang.recording import Recording, is_handed_over
from localtrace.trainer_hooks.sglang.requests import is_rollout, keep_prompt
from localtrace.trainer_hooks.streams import RecordedStream

E = TypeVar("E")
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_ROUTER = "sglang.srt.managers.multi_tokenizer_mixin.MultiTokenizerRouter"
_MARK = "_localtrace_records"


def register() -> None:
    """Have every tokenizer manager of this process record; SGLang calls this as its plugin.

    SGLang calls it in each of its processes. Only one of them generates, so nothing is opened here.

    Raises:
        SystemExit: this SGLang has no plugins, and recording is required.
    """
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError:
        text = (
            "this version of SGLang has no plugins, so its generations are not recorded: use 0.5.12"
            " or later, or localtrace.trainer_hooks.sglang.wrap(engine)"
        )
        say(text)
        if hook_settings().required:
            raise SystemExit(f"localtrace: {text}") from None
        return
    HookRegistry.register(f"{_MANAGER}.generate_request", generate_request, HookType.AROUND)
    HookRegistry.register(f"{_MANAGER}.__init__", _made, HookType.AFTER)
    HookRegistry.register(f"{_ROUTER}.__init__", _split, HookType.BEFORE)


def wrap(engine: E) -> E:
    """Have one engine record where the plugin does not, as in versions without plugins.

    Args:
        engine: a `sglang.Engine`, or its tokenizer manager.

    Returns:
        The same engine.

    Raises:
        ConfigError: the engine has no tokenizer manager here.
        LocalTraceError: this process cannot record, and recording is required.
    """
    manager: Any = getattr(engine, "tokenizer_manager", engine)
    original = getattr(manager, "generate_request", None)
    if not callable(original):
        raise ConfigError(
            f"a {type(engine).__qualname__} without a tokenizer manager cannot be recorded: give "
            "the sglang.Engine, or its tokenizer_manager, in the process where it generates"
        )
    if not hasattr(original, _MARK):
        record_this_process("sglang")
        _keep_prompts(manager)
        manager.generate_request = _around(original, manager)
    return engine


def _around(original: Callable[..., Any], manager: Any) -> Callable[..., Any]:
    def unbound(manager: Any, *args: Any) -> Any:
        return original(*args)  # which is bound to the manager already

    @functools.wraps(original)
    def recorded(obj: Any, request: Any = None) -> Any:
        return generate_request(unbound, manager, obj, request)

    setattr(recorded, _MARK, True)
    return recorded


def generate_request(
    original: Callable[..., Any], manager: Any, obj: Any, request: Any = None
) -> Any:
    """Call `TokenizerManager.generate_request` and record what it yields to the caller.

    Args:
        original: the method, as an unbound function.
        manager, obj, request: its arguments.
    """
    recording = _recording(manager, obj, request)
    if recording is None:
        return original(manager, obj, request)
    return RecordedStream(recording.begin, lambda: original(manager, obj, request))


@harmless
def _recording(manager: Any, obj: Any, request: Any) -> Recording | None:
    if not record_this_process("sglang") or is_handed_over(obj):
        return None
    return Recording(manager, obj, request) if is_rollout(manager, obj, request) else None


# -- at start ------------------------------------------------------------------------------


def _made(result: None, manager: Any, *args: Any, **kwargs: Any) -> None:
    """Start recording when a tokenizer manager is made, so that problems show at start-up."""
    if not record_this_process("sglang"):
        return
    _keep_prompts(manager)
    # SGLang's registry wraps the method, unless it found none of this name.
    if not hasattr(type(manager).generate_request, "__wrapped__"):
        refuse(
            "this version of SGLang has no TokenizerManager.generate_request that this hook knows, "
            "so its generations are not recorded: record them at the client, with "
            "localtrace.trainer_hooks.http.record(client)"
        )


def _split(router: Any, *args: Any, **kwargs: Any) -> None:
    """Report that several tokenizer processes cannot be recorded: they load no plugins."""
    if record_this_process("sglang"):
        refuse(
            "with --tokenizer-worker-num above 1 SGLang loads no plugins in its tokenizer workers, "
            "so their generations are not recorded: use 1, or record them at the client, with "
            "localtrace.trainer_hooks.http.record(client)"
        )


@harmless
def _keep_prompts(manager: Any) -> None:
    """Have prompt ids kept in SGLang versions that cannot return them."""
    if "_create_tokenized_object" in vars(manager):
        return
    original = manager._create_tokenized_object

    @functools.wraps(original)
    def keeping(obj: Any, *args: Any, **kwargs: Any) -> Any:
        tokenized = original(obj, *args, **kwargs)
        harmless(keep_prompt)(obj, tokenized)
        return tokenized

    manager._create_tokenized_object = keeping
