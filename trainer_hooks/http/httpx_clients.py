"""Recording of httpx: a proxy around the client's transport, a wrapper around each stream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import wrapt

from localtrace.errors import ConfigError
from localtrace.record import active
from localtrace.record.propagation import HEADER
from localtrace.trainer_hooks.harmless import harmless
from localtrace.trainer_hooks.http.exchange import Exchange, begin_exchange


def record_client(client: Any) -> None:
    """Wrap each transport of a client in a recording one, once.

    Raises:
        ConfigError: this version of httpx keeps its transports elsewhere.
    """
    kind = Transport if isinstance(client, httpx.Client) else AsyncTransport
    if not {"_transport", "_mounts"} <= vars(client).keys():
        raise ConfigError(
            f"clients of httpx {httpx.__version__} cannot be recorded: use httpx 0.28, or give an "
            "aiohttp.ClientSession"
        )
    client._transport = _recording(kind, client._transport)
    client._mounts = {url: _recording(kind, mounted) for url, mounted in client._mounts.items()}


def _recording(kind: type[Any], transport: Any) -> Any:
    return transport if transport is None or type(transport) is kind else kind(transport)


class Transport(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A proxy of a `httpx.BaseTransport` that records the requests it sends."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and record it if this process records."""
        exchange = None if active.recorder is None else _begin(request)
        if exchange is None:
            return self.__wrapped__.handle_request(request)  # type: ignore[no-any-return]
        marked = _mark(request, exchange)
        try:
            response: httpx.Response = self.__wrapped__.handle_request(request)
        except BaseException as error:
            exchange.end(error)
            raise
        finally:
            _unmark(request, marked)
        _watch(response, exchange, _Body)
        return response


class AsyncTransport(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A proxy of a `httpx.AsyncBaseTransport` that records the requests it sends."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, and record it if this process records."""
        exchange = None if active.recorder is None else _begin(request)
        if exchange is None:
            return await self.__wrapped__.handle_async_request(request)  # type: ignore[no-any-return]
        marked = _mark(request, exchange)
        try:
            response: httpx.Response = await self.__wrapped__.handle_async_request(request)
        except BaseException as error:
            exchange.end(error)
            raise
        finally:
            _unmark(request, marked)
        _watch(response, exchange, _AsyncBody)
        return response


class _Body(httpx.SyncByteStream):
    """A response stream that passes its bytes to an exchange."""

    def __init__(self, stream: Any, exchange: Exchange) -> None:
        self._stream = stream
        self._exchange = exchange

    def __iter__(self) -> Iterator[bytes]:
        try:
            for data in self._stream:
                self._exchange.receive(data)
                yield data
        except BaseException as error:
            self._exchange.end(error)
            raise
        self._exchange.end()

    def close(self) -> None:
        """Close the stream, read or not."""
        try:
            self._stream.close()
        finally:
            self._exchange.end(GeneratorExit("the answer was closed before its end"))


class _AsyncBody(httpx.AsyncByteStream):
    """A response stream that passes its bytes to an exchange."""

    def __init__(self, stream: Any, exchange: Exchange) -> None:
        self._stream = stream
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._stream:
                self._exchange.receive(data)
                yield data
        except BaseException as error:
            self._exchange.end(error)
            raise
        self._exchange.end()

    async def aclose(self) -> None:
        """Close the stream, read or not."""
        try:
            await self._stream.aclose()
        finally:
            self._exchange.end(GeneratorExit("the answer was closed before its end"))


@harmless
def _begin(request: httpx.Request) -> Exchange | None:
    exchange = begin_exchange(request.method, str(request.url))
    if exchange is not None:
        with contextlib.suppress(httpx.RequestNotRead):  # the body is an iterator
            exchange.send(request.content)
    return exchange


@harmless
def _mark(request: httpx.Request, exchange: Exchange) -> bool:
    """Add the parent header to the request, unless the caller has set it."""
    if exchange.place is None or HEADER in request.headers:
        return False
    request.headers[HEADER] = exchange.place
    return True


@harmless
def _unmark(request: httpx.Request, marked: bool | None) -> None:
    # The caller may send this request again, under another parent.
    if marked:
        del request.headers[HEADER]


@harmless
def _watch(response: httpx.Response, exchange: Exchange, kind: type[Any]) -> None:
    exchange.answered(response.status_code, response.headers)
    if response.is_closed:  # the transport has already read it
        exchange.receive(response.content)
        exchange.end()
    else:
        response.stream = kind(response.stream, exchange)
