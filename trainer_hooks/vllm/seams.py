"""The functions of vLLM that the hook replaces, and the report when a version lacks them.

Functions are replaced when their module is imported. `register` runs in every process of vLLM, and
most of them, such as the workers, never import these modules.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, TypeVar

from localtrace.errors import ConfigError
from localtrace.trainer_hooks.environment import is_asked_for, refuse, say
from localtrace.trainer_hooks.vllm import calls
from localtrace.trainer_hooks.vllm.fields import version

E = TypeVar("E")
_MARK = "_localtrace_records"


@dataclass(frozen=True, slots=True)
class Seam:
    """A function of vLLM to replace."""

    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Function that makes the replacement from the original."""
    arguments: tuple[str, ...] = ()
    """Names of the parameters that the hook reads."""
    is_generator: bool = False


_ASYNC = {
    "generate": Seam(calls.generate, ("prompt", "sampling_params", "request_id"), is_generator=True)
}
_STEPPING = {
    "add_request": Seam(calls.add_request, ("request_id", "prompt", "params")),
    "step": Seam(calls.step),
    "abort_request": Seam(calls.abort_request, ("request_ids",)),
}
CLASSES = {
    "vllm.v1.engine.async_llm": ("AsyncLLM", _ASYNC),
    "vllm.v1.engine.llm_engine": ("LLMEngine", _STEPPING),
}


@functools.cache
def register() -> None:
    """Have vLLM's engines record once they are imported; vLLM calls this as its plugin."""
    from wrapt import register_post_import_hook

    for module, (name, _) in CLASSES.items():
        if _exists(module):
            register_post_import_hook(_install, module)
        elif is_asked_for():
            say(_lack(name, module))


def wrap(engine: E) -> E:
    """Have one engine record where the plugin does not, as when VLLM_PLUGINS leaves it out.

    Args:
        engine: an `LLM`, `LLMEngine` or `AsyncLLM`, or another client whose `generate` is an
            async generator with their arguments.

    Raises:
        ConfigError: the engine is none of these, or this vLLM has other parameters.
    """
    target: Any = getattr(engine, "llm_engine", engine)
    kind = type(target)
    seams = _STEPPING if hasattr(kind, "step") else _ASYNC
    missing = _missing(kind, seams)
    if missing:
        raise ConfigError(
            f"cannot record {kind.__qualname__}: it has no {missing[0]} as vLLM's engines do; "
            "give an LLM, LLMEngine or AsyncLLM"
        )
    for name, seam in seams.items():
        if not _is_marked(kind, name) and name not in vars(target):
            setattr(target, name, MethodType(_replacement(kind, name, seam), target))
    return engine


def _install(module: ModuleType) -> None:
    name, seams = CLASSES[module.__name__]
    owner = getattr(module, name, None)
    missing = _missing(owner, seams)
    if missing:
        if is_asked_for():
            refuse(_lack(f"{name}.{missing[0]}", module.__name__))
        return
    for function, seam in seams.items():
        if not _is_marked(owner, function):
            setattr(owner, function, _replacement(owner, function, seam))


def _replacement(owner: Any, name: str, seam: Seam) -> Callable[..., Any]:
    made = seam.make(getattr(owner, name))
    setattr(made, _MARK, True)
    return made


def _is_marked(owner: Any, name: str) -> bool:
    """Return whether the method is already replaced, in this class or a base class."""
    return any(hasattr(vars(kind).get(name), _MARK) for kind in owner.__mro__)


def _missing(owner: Any, seams: dict[str, Seam]) -> list[str]:
    return [name for name, seam in seams.items() if not _fits(getattr(owner, name, None), seam)]


def _fits(function: Any, seam: Seam) -> bool:
    if not callable(function):
        return False
    named = set(inspect.signature(function).parameters)
    is_generator = inspect.isasyncgenfunction(inspect.unwrap(function))
    return named.issuperset(seam.arguments) and is_generator == seam.is_generator


def _exists(module: str) -> bool:
    # `importlib.util.find_spec` would import the parent packages, and torch with them.
    folders = getattr(sys.modules.get("vllm"), "__path__", ())
    path = Path(*module.split(".")[1:]).with_suffix(".py")
    return not folders or any(Path(folder, path).is_file() for folder in folders)


def _lack(what: str, module: str) -> str:
    return (
        f"vLLM {version()} has no {what} in {module} that this hook knows, so its generations are "
        "not recorded: record them at the client, with localtrace.trainer_hooks.http.record(client)"
    )
