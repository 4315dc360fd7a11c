"""The seams: functions of a trainer that its hook replaces when their modules are imported.

`Seams.install` registers a post-import hook (wrapt) for each module; those that are imported
already are entered at once. A seam that this version of the trainer lacks is noted for `localtrace
doctor` and otherwise ignored.

Arguments are read by the names of the trainer's parameters, and reach its function untouched.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from localtrace.record.losses import logger
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.homes import hand_out, holders, home_of
from localtrace.trainer_hooks.parameters import Parameters, Reader

Function = Callable[..., Any]
Make = Callable[[Function], Function]
"""A function that makes the replacement from the original."""
Part = Generator[None, Any, None]
"""A generator that runs around a call: it yields once, and is sent the result."""
Call = Callable[[dict[str, Any]], Any]
"""A call with arguments by name."""
_MARK = "__localtrace_seam__"


@dataclass(slots=True)
class Seam:
    """One place in a trainer that its hook enters."""

    module: str
    attribute: str
    """`function` or `Class.method`; else the attribute that matters to `apply`."""
    apply: Callable[[ModuleType], Function | None]
    """Function that enters the module; it returns the original, if there is one."""
    optional: bool = False
    """Whether some supported versions lack it."""
    reads: Sequence[str] = ()
    """Parameters of the function that the hook needs."""
    applied: bool = False
    original: Function | None = None
    """the original, once it is replaced."""

    def lacking(self) -> list[str]:
        """Return the parameters that the hook needs and this version lacks."""
        return [] if self.original is None else Parameters(self.original).lacking(self.reads)

    def passed_by(self) -> list[str]:
        """Return the names under which modules still hold the original, past the hook."""
        return holders(self.original) if self.original and self.is_function else []

    @property
    def is_function(self) -> bool:
        """Whether it is a module's function, which other modules may have imported."""
        return self.original is not None and "." not in self.attribute


class Seams:
    """The seams of one trainer, in the order in which they were registered.

    Args:
        lacks: called with the name of a seam that a loaded module lacks, unless it is optional.
    """

    def __init__(self, lacks: Callable[[str], None] | None = None) -> None:
        self._lacks = lacks
        self._seams: list[Seam] = []
        self._is_installed = False

    def seam(
        self, module: str, attribute: str, *, optional: bool = False, reads: Sequence[str] = ()
    ) -> Callable[[Make], Make]:
        """Replace an attribute of a module or class by what the decorated function returns.

        The decorated function is called with the original."""

        def register(make: Make) -> Make:
            apply = functools.partial(_replace, attribute=attribute, make=make)
            self._seams.append(Seam(module, attribute, apply, optional, reads))
            return make

        return register

    def around(
        self, module: str, attribute: str, *, optional: bool = False
    ) -> Callable[[Callable[..., Part | None]], Callable[..., Part | None]]:
        """Run the decorated generator around every call of an attribute.

        It takes the call's arguments by name, those that it has parameters for. It yields once and
        is sent the result; if the call raises, the error is raised at the `yield`. Its own errors
        are counted and change nothing.
        """

        return self._registering(module, attribute, optional, lambda run: run)

    def before(
        self, module: str, attribute: str, *, optional: bool = False
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Run the decorated function before every call of an attribute.

        It takes the call's arguments by name, those that it has parameters for. Its own errors are
        counted and change nothing.
        """

        def part_of(note: Call) -> Call:
            def part(given: dict[str, Any]) -> Part:
                note(given)
                yield

            return part

        return self._registering(module, attribute, optional, part_of)

    def after(
        self, module: str, attribute: str, *, optional: bool = False
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Run the decorated function after every successful call of an attribute.

        It takes the call's arguments by name, those that it has parameters for, and the result as
        `result`. Its own errors are counted and change nothing.
        """

        def part_of(record: Call) -> Call:
            def part(given: dict[str, Any]) -> Part:
                result = yield
                record(given | {"result": result})

            return part

        return self._registering(module, attribute, optional, part_of)

    def on_import(
        self, module: str, what: str, *, optional: bool = False
    ) -> Callable[[Callable[[ModuleType], None]], Callable[[ModuleType], None]]:
        """Call the decorated function with a module of the trainer, once that is imported.

        Args:
            module: name of the module.
            what: attribute that matters there, shown by `localtrace doctor`.
            optional: whether some supported versions lack it.
        """

        def register(apply: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
            self._seams.append(Seam(module, what, apply, optional))
            return apply

        return register

    def install(self) -> None:
        """Register every seam, once, to be applied as soon as its module is imported."""
        from wrapt import register_post_import_hook

        if self._is_installed:
            return
        self._is_installed = True
        for one in self._seams:
            register_post_import_hook(functools.partial(self._apply, one), one.module)

    def is_entered(self, module: str, attribute: str) -> bool:
        """Return whether the hook has entered this place in this process."""
        return any(
            one.applied for one in self._seams if (one.module, one.attribute) == (module, attribute)
        )

    def status(self) -> list[Seam]:
        """Return every seam, with its state in this process."""
        return list(self._seams)

    def _apply(self, one: Seam, module: ModuleType) -> None:
        try:
            one.original = one.apply(module)
            one.applied = True
        except Exception:
            logger.debug("localtrace: no %s in %s", one.attribute, one.module, exc_info=True)
            if self._lacks is not None and not one.optional:
                self._lacks(f"{one.module}.{one.attribute}")

    def _registering(
        self, module: str, attribute: str, optional: bool, part_of: Callable[[Call], Call]
    ) -> Callable[[Function], Function]:
        """Return the decorator of a function that takes part in the calls of an attribute.

        Args:
            part_of: makes a call's part from the decorated function. Both take the arguments.
        """

        def register(function: Function) -> Function:
            guarded, reader = harmless(function), Reader(function)
            part = part_of(lambda given: guarded(**reader.read(given)))

            def make(original: Function) -> Function:
                begin = functools.partial(_begin, part, Parameters(original))
                wrap = _awaited if inspect.iscoroutinefunction(original) else _called
                return wrap(original, begin)

            reads = [name for name in reader.needed if name != "result"]
            self.seam(module, attribute, optional=optional, reads=reads)(make)
            return guarded

        return register


# -- around a call -------------------------------------------------------------------------

Begin = Callable[[tuple[Any, ...], dict[str, Any]], Part | None]


def _called(original: Function, begin: Begin) -> Function:
    def called(*args: Any, **kwargs: Any) -> Any:
        running = begin(args, kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            _fail(running, error)
            raise
        _end(running, result)
        return result

    return called


def _awaited(original: Function, begin: Begin) -> Function:
    async def called(*args: Any, **kwargs: Any) -> Any:
        running = begin(args, kwargs)
        try:
            result = await original(*args, **kwargs)
        except BaseException as error:
            _fail(running, error)
            raise
        _end(running, result)
        return result

    return called


@harmless
def _begin(
    part: Callable[[dict[str, Any]], Part | None],
    parameters: Parameters,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Part | None:
    running = part(parameters.given(args, kwargs))
    if running is not None:
        next(running, None)
    return running


@harmless
def _end(running: Part | None, result: Any) -> None:
    if running is not None:
        with contextlib.suppress(StopIteration):
            running.send(result)


@harmless
def _fail(running: Part | None, error: BaseException) -> None:
    if running is None:
        return
    traceback = error.__traceback__  # raised once more below, it would grow by our frames
    try:
        running.throw(error)
    except BaseException as raised:
        if raised is not error and not isinstance(raised, StopIteration):
            raise
    finally:
        error.__traceback__ = traceback


# -- in place of what is there -------------------------------------------------------------


def _replace(module: ModuleType, attribute: str, make: Make) -> Function | None:
    *path, name = attribute.split(".")
    home = home_of(module, (*path, name)[0])
    owner: Any = home
    for part in path:
        owner = getattr(owner, part)
    # verl 0.6 makes its worker a Ray actor class, which copies the methods to another class.
    actor = getattr(owner, "__ray_metadata__", None)
    owner = owner if actor is None else actor.modified_class
    found = inspect.getattr_static(owner, name)
    wrap = type(found) if isinstance(found, staticmethod | classmethod) else None
    original: Function = found if wrap is None else found.__func__
    if name not in vars(owner) and is_replacement(original):
        return None  # inherited from a class that the hook has entered
    beneath, auto_await = _beneath_auto_await(original)
    replacement: Any = functools.wraps(beneath)(make(beneath))
    if auto_await is not None:
        replacement = auto_await(replacement)
    setattr(replacement, _MARK, True)
    setattr(owner, name, replacement if wrap is None else wrap(replacement))
    if not path:
        package = module.__name__.partition(".")[0]
        hand_out(original, replacement, package if home is module else None)
    return original


def _beneath_auto_await(function: Any) -> tuple[Any, Any]:
    # verl's `auto_await` inspects its caller's frame to learn whether the result is awaited, so the
    # replacement goes beneath it.
    auto_await = getattr(sys.modules.get("verl.utils.ray_utils"), "auto_await", None)
    code = getattr(function, "__code__", None)
    if auto_await is None or code is not auto_await(function).__code__:
        return function, None
    return function.__wrapped__, auto_await


def is_replacement(function: Any) -> bool:
    """Return whether a function is one of the hook's replacements."""
    return hasattr(function, _MARK)
