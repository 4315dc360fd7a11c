"""Where the hook enters verl: replacements that are made when verl's modules are imported.

The hook is imported inside `import verl`, before the modules that it changes; `install` leaves a
note for each of them with the import system (wrapt's post-import hooks). A place that this version
of verl does not have is remembered, for `localtrace doctor`, and otherwise passed over.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from localtrace.losses import logger
from localtrace.trainer_hooks.harmless import harmless

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes what verl has and gives what to put in its place."""


@dataclass(slots=True)
class Seam:
    """One place in verl."""

    module: str
    attribute: str
    """`function`, `Class.method`, or what `apply` does when there is no single attribute."""
    apply: Callable[[ModuleType], None]
    optional: bool = False
    """Some versions of verl lack it."""
    loaded: bool = False
    """Its module was imported."""
    applied: bool = False


_seams: list[Seam] = []


def seam(module: str, attribute: str, *, optional: bool = False) -> Callable[[Make], Make]:
    """Replace an attribute of a module or class by what the decorated function makes of it."""

    def register(make: Make) -> Make:
        apply = functools.partial(_replace, attribute=attribute, make=make)
        _seams.append(Seam(module, attribute, apply, optional))
        return make

    return register


def after(
    module: str, attribute: str, *, optional: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Tell the decorated function the result and the arguments of every call of an attribute.

    What it raises is counted and changes nothing.
    """

    def register(record: Callable[..., None]) -> Callable[..., None]:
        guarded = harmless(record)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                guarded(result, *args, **kwargs)
                return result

            return called

        seam(module, attribute, optional=optional)(make)
        return guarded

    return register


def on_import(
    module: str, what: str, *, optional: bool = False
) -> Callable[[Callable[[ModuleType], None]], Callable[[ModuleType], None]]:
    """Call the decorated function with the module, once it is imported.

    Args:
        module: name of the module.
        what: the attribute that matters there, for `localtrace doctor`.
        optional: some versions of verl lack it.
    """

    def register(apply: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        _seams.append(Seam(module, what, apply, optional))
        return apply

    return register


def _replace(module: ModuleType, attribute: str, make: Make) -> None:
    owner: Any = module
    *path, name = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    # verl 0.6 decorates its worker for Ray, which copies the methods to a class of its own.
    actor = getattr(owner, "__ray_metadata__", None)
    owner = owner if actor is None else actor.modified_class
    found = inspect.getattr_static(owner, name)
    wrap = type(found) if isinstance(found, staticmethod | classmethod) else None
    original = found if wrap is None else found.__func__
    original, auto_await = _beneath_auto_await(original)
    replacement: Any = functools.wraps(original)(make(original))
    if auto_await is not None:
        replacement = auto_await(replacement)
    setattr(owner, name, replacement if wrap is None else wrap(replacement))


def _beneath_auto_await(function: Any) -> tuple[Any, Any]:
    # verl's `auto_await` looks at the frame that calls it, to know whether the result is awaited.
    auto_await = getattr(sys.modules.get("verl.utils.ray_utils"), "auto_await", None)
    code = getattr(function, "__code__", None)
    if auto_await is None or code is not auto_await(function).__code__:
        return function, None
    return function.__wrapped__, auto_await


def install() -> None:
    """Have every seam applied as soon as its module is imported."""
    from wrapt import register_post_import_hook

    for one in _seams:
        register_post_import_hook(functools.partial(_apply, one), one.module)


def _apply(one: Seam, module: ModuleType) -> None:
    one.loaded = True
    try:
        one.apply(module)
        one.applied = True
    except Exception:
        logger.debug("localtrace: no %s in %s", one.attribute, one.module, exc_info=True)


def status() -> list[Seam]:
    """Every seam, with what became of it in this process."""
    return list(_seams)
