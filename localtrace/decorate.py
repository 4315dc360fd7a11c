"""The `op` decorator: one thin wrapper per kind of function around `capture.begin_call`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, ParamSpec, TypeVar, cast, overload

import msgspec

from localtrace import recorder as process
from localtrace.capture import OpenCall, begin_call
from localtrace.signature import Signature

P = ParamSpec("P")
R = TypeVar("R")


@overload
def op(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def op(*, name: str | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def op(function: Any = None, /, *, name: str | None = None) -> Any:
    """Record every call of a function, coroutine, generator or method as a span.

    Args:
        name: what to call the spans; the qualified name of the function when not given.

    Apply it below `@staticmethod` and `@classmethod`, or above them: both work.
    """
    if function is None:
        return functools.partial(_decorate, name=name)
    return _decorate(function, name)


def _decorate(function: Any, name: str | None) -> Any:
    if isinstance(function, staticmethod | classmethod):
        return type(function)(_decorate(function.__func__, name))
    signature = Signature(function, name)
    if inspect.isasyncgenfunction(function):
        return _async_generator(function, signature)
    if inspect.iscoroutinefunction(function):
        return _coroutine(function, signature)
    if inspect.isgeneratorfunction(function):
        return _generator(function, signature)
    return _function(function, signature)


def _function(function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        recorder = process.active
        call = None if recorder is None else begin_call(recorder, signature, args, kwargs)
        if call is None:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            call.finish(None, error)
            raise
        call.finish(result)
        return result

    return recorded


def _coroutine(function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    @functools.wraps(function)
    async def recorded(*args: Any, **kwargs: Any) -> Any:
        recorder = process.active
        call = None if recorder is None else begin_call(recorder, signature, args, kwargs)
        if call is None:
            return await function(*args, **kwargs)
        try:
            result = await function(*args, **kwargs)
        except BaseException as error:
            call.finish(None, error)
            raise
        call.finish(result)
        return result

    return recorded


def _generator(function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        recorder = process.active
        call = None if recorder is None else begin_call(recorder, signature, args, kwargs)
        if call is None:
            return (yield from function(*args, **kwargs))
        call.leave()
        stream = _Stream(call)
        generator = function(*args, **kwargs)
        resume, value = generator.send, None
        while True:
            call.enter()
            try:
                item = resume(value)
            except StopIteration as stop:
                stream.finish(returned=stop.value)
                return stop.value
            except BaseException as error:
                stream.finish(error)
                raise
            finally:
                call.leave()
            stream.add(item)
            try:
                value = yield item
                resume = generator.send
            except GeneratorExit as error:
                stream.finish(error)
                generator.close()
                raise
            except BaseException as error:
                resume, value = generator.throw, cast(Any, error)

    return recorded


def _async_generator(function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    @functools.wraps(function)
    async def recorded(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        recorder = process.active
        call = None if recorder is None else begin_call(recorder, signature, args, kwargs)
        generator = function(*args, **kwargs)
        stream = None
        if call is not None:
            call.leave()
            stream = _Stream(call)
        resume, value = generator.asend, None
        while True:
            if call is not None:
                call.enter()
            try:
                item = await resume(value)
            except StopAsyncIteration:
                if stream is not None:
                    stream.finish()
                return
            except BaseException as error:
                if stream is not None:
                    stream.finish(error)
                raise
            finally:
                if call is not None:
                    call.leave()
            if stream is not None:
                stream.add(item)
            try:
                value = yield item
                resume = generator.asend
            except GeneratorExit as error:
                if stream is not None:
                    stream.finish(error)
                await generator.aclose()
                raise
            except BaseException as error:
                resume, value = generator.athrow, cast(Any, error)

    return recorded


class _Stream:
    """What a generator yielded so far, each item encoded when it was yielded."""

    def __init__(self, call: OpenCall) -> None:
        self._call = call
        self._items: list[Any] = []
        self._size_bytes = 0

    def add(self, item: Any) -> None:
        """Take a snapshot of one item; beyond `record_max_bytes` items are only counted."""
        recorder = self._call.recorder
        if self._size_bytes <= recorder.settings.record_max_bytes:
            data = recorder.values.encode(item)
            self._size_bytes += len(data)
            self._items.append(msgspec.Raw(data))

    def finish(self, error: BaseException | None = None, returned: Any = None) -> None:
        """Record the call with the list of items, and what the generator returned if it did."""
        result: Any = self._items
        if returned is not None:
            result = {"yielded": self._items, "returned": returned}
        self._call.finish(result, error)
