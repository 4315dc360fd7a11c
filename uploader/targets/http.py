"""HTTP requests with three kinds of failure.

`TryAgain`: there was no answer, or it said "later". `Refused`: the server understood, and said no.
`UploadError`: the answer makes no sense. This module knows no routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Protocol, TypeVar

import httpx
import msgspec

from localtrace.errors import ConfigError, TargetRejected, TargetUnavailable, UploadError
from localtrace.terminal import escape_line
from localtrace.uploader.targets.answers import (
    AS_IT_IS,
    decode,
    lines_decoder,
    read_body,
    read_words,
)
from localtrace.uploader.targets.deadline import Sockets
from localtrace.uploader.targets.secrets import secrets_sent

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 120.0
EXCHANGE_TIMEOUT_S = 600.0
"""Limit on a whole exchange; the time to send the body at `SLOWEST_BYTES_PER_S` comes on top."""
SLOWEST_BYTES_PER_S = 16 * 2**10
PAGES_MAX = 20_000
"""Enough for ten million trajectories of one run at MLflow."""
PAGE_TOKEN_MAX_CHARS = 8192
_LATER = frozenset({408, 425, 429})
_NEVER = 501
"""Status of a server that lacks what is asked for; all others from 500 on may pass."""
_MESSAGE_MAX_CHARS = 300

T = TypeVar("T")


class TryAgain(TargetUnavailable):
    """The request may or may not have been carried out; asking again may help."""

    status: int = 0
    """The HTTP status; 0 if no answer came."""
    retry_after_s: float | None = None
    """Wait that the server asked for."""


class Doubtful(TryAgain):
    """The server failed to store records, because of a fault of its own or of something in them."""


class Refused(TargetRejected):
    """The server refused the request and did nothing."""

    status: int = 0


class Page(Protocol):
    """One page of a long answer."""

    next_page_token: str
    """Token of the next page; empty on the last one."""


P = TypeVar("P", bound=Page)


class HttpSession:
    """Connections to one server.

    The keys and passwords that it sends are removed from every answer and error that it returns.
    """

    def __init__(
        self,
        base_url: str,
        explain: Callable[[Refused], UploadError | None],
        *,
        headers: Mapping[str, str] | None = None,
        login: tuple[str, str] | None = None,
        secrets: Iterable[str] = (),
        trust_env: bool = True,
    ) -> None:
        """Prepare the connections, without opening one.

        Args:
            base_url: address of the server; a user and password in it are the login.
            explain: returns the error to raise for a refusal that concerns all requests.
            headers: sent with every request; their values are secret.
            login: user and password.
            secrets: further secrets in the requests.
            trust_env: use the proxies that the environment names.

        Raises:
            ConfigError: a header has characters that cannot be sent, or the environment names
                proxies or certificates that cannot be used.
        """
        url = httpx.URL(base_url)
        if url.userinfo:
            login = login or (url.username, url.password)
        headers = dict(headers or {})
        self._secrets = secrets_sent(url, headers, login, secrets, trust_env)
        _refuse_unsendable(headers, url.host)
        with _environment_explained():
            self._client = httpx.Client(
                # Without the login, which httpx would write into its log.
                base_url=without_login(url),
                timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                headers=headers | AS_IT_IS,
                auth=httpx.BasicAuth(*login) if login else None,
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
                trust_env=trust_env,
            )
        self._sockets = Sockets()
        self._explain = explain

    def call(self, method: str, path: str, **request: Any) -> bytes:
        """Make one request, and return the body of a good answer as it is.

        Callers pass it through `words` before they show or keep any of it.
        """
        try:
            response, body = self._exchange(method, path, request)
        except (httpx.LocalProtocolError, httpx.InvalidURL, UnicodeError) as error:
            # Paths and headers contain ids that the server chose.
            raise UploadError(
                "a request cannot be made of what the server answered before "
                f"({self._said(error)}): look into its log"
            ) from None
        except httpx.RequestError as error:
            # Without the cause, which may contain the request and its keys.
            said = self._said(error)
            if "CERTIFICATE_VERIFY_FAILED" in said:
                raise UploadError(
                    f"{self._client.base_url.host} has a certificate that is not trusted ({said}): "
                    "name the file of its authority's certificates in SSL_CERT_FILE"
                ) from None
            raise TryAgain(f"no answer ({said})") from None
        if isinstance(body, bytes):
            return body
        failure = _failure(response, self.words(body))
        explained = self._explain(failure) if isinstance(failure, Refused) else None
        raise self._detour(response, failure) or explained or failure

    def _exchange(
        self, method: str, path: str, options: dict[str, Any]
    ) -> tuple[httpx.Response, bytes | str]:
        """Return an answer, and its body as bytes or the reason in an error answer as text."""
        request = self._client.build_request(
            method, path, **options, extensions={"trace": self._sockets.note}
        )
        size_bytes = int(request.headers.get("content-length", 0))
        limit_s = EXCHANGE_TIMEOUT_S + size_bytes / SLOWEST_BYTES_PER_S
        with self._sockets.ended_after(limit_s) as is_over:
            try:
                response = self._client.send(request, stream=True)
                with closing(response):
                    body = read_body(response) if response.is_success else read_words(response)
            except httpx.RequestError:
                if not is_over.is_set():
                    raise
        if is_over.is_set():
            raise TryAgain(f"no whole answer from {printable(path)} within {limit_s:.0f} s")
        return response, body

    def _detour(self, response: httpx.Response, failure: Exception) -> UploadError | None:
        """Return the error for an answer that comes from something before the server, or None."""
        host = self._client.base_url.host
        if response.has_redirect_location:
            # Without a query, which may hold somebody's key.
            aim = self.words(response.headers["location"].partition("?")[0])
            return UploadError(
                f"{host} answers HTTP {response.status_code}, a redirect to {aim}: give the "
                "address that answers itself, or log in there"
            )
        if response.status_code == httpx.codes.PROXY_AUTHENTICATION_REQUIRED:
            return UploadError(
                f"the proxy before {host} wants a login ({failure}): write "
                "http://USER:PASSWORD@HOST:PORT in HTTP_PROXY or HTTPS_PROXY"
            )
        return None

    def words(self, text: str) -> str:
        """Return a server's text without secrets and safe to print."""
        return printable(self._secrets.removed_from(text))

    def ask(self, answer: type[T], method: str, path: str, **request: Any) -> T:
        """Make one request, and decode its JSON answer as this type."""
        return self._read(msgspec.json.Decoder(answer).decode, answer, method, path, request)

    def ask_lines(self, line: type[T], method: str, path: str, **request: Any) -> list[T]:
        """Make one request, and decode an answer of one JSON value per line."""
        return self._read(lines_decoder(line), list[line], method, path, request)  # type: ignore[valid-type]

    def ask_pages(
        self, answer: type[P], method: str, path: str, query: Mapping[str, Any]
    ) -> Iterator[P]:
        """Yield the pages of an answer until the server names no next one.

        Args:
            query: the body of the first request, or its parameters for GET.

        Raises:
            UploadError: the pages do not end.
        """
        place = "params" if method == "GET" else "json"
        seen: set[str] = set()
        token = ""
        while len(seen) < PAGES_MAX:
            asked = {**query, **({"page_token": token} if token else {})}
            page = self.ask(answer, method, path, **{place: asked})
            yield page
            token = page.next_page_token
            if not token:
                return
            if token in seen or len(token) > PAGE_TOKEN_MAX_CHARS:
                break
            seen.add(token)
        raise UploadError(
            f"{path} answers with pages that do not end: look into the server's log, or upgrade it"
        )

    def _read(
        self, decoder: Callable[[bytes], T], kind: type[T], method: str, path: str, request: Any
    ) -> T:
        value = decode(decoder, self.call(method, path, **request), path)
        if not self._secrets.are_in(msgspec.json.encode(value).decode()):
            return value
        return msgspec.convert(self._secrets.removed_from_all(msgspec.to_builtins(value)), kind)

    def _said(self, error: Exception) -> str:
        return self.words(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Close all connections, also those on which other threads wait for an answer."""
        self._sockets.close()
        self._client.close()


@contextmanager
def _environment_explained() -> Iterator[None]:
    """Say which variable of the environment to correct. Its value may hold a password."""
    proxies = "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY"
    try:
        yield
    except ImportError:
        raise ConfigError(
            f"{proxies} names a SOCKS proxy: run  pip install 'httpx[socks]', or add the server's "
            "name to NO_PROXY"
        ) from None
    except (ValueError, httpx.InvalidURL):
        raise ConfigError(f"{proxies} names no proxy: write http://HOST:PORT") from None
    except OSError as error:
        raise ConfigError(
            f"the certificates named by SSL_CERT_FILE or SSL_CERT_DIR cannot be read "
            f"({error.strerror or error}): correct the variable"
        ) from None


def _refuse_unsendable(headers: Mapping[str, str], host: str) -> None:
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            # The value is not repeated: it may be a key.
            raise ConfigError(
                f"the header {printable(name)} cannot be sent to {host}: take line ends "
                "and characters outside ASCII out of the key"
            )


def http_url(uri: str, what: str) -> httpx.URL:
    """Parse the address of a server.

    Args:
        what: description and example of the address, for the error.

    Raises:
        ConfigError: it is no http(s) uri. The error does not repeat it: it may hold a password.
    """
    try:
        url = httpx.URL(uri)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"this is no {what}")
    return url


def without_login(url: httpx.URL) -> httpx.URL:
    """Return an address that is safe to show, without user, password, query and fragment."""
    return url.copy_with(userinfo=b"", query=None, fragment=None)


def printable(text: str) -> str:
    """Return a server's text as one short line without control characters."""
    return escape_line(" ".join(text[:_MESSAGE_MAX_CHARS].split()))


def _failure(response: httpx.Response, reason: str) -> TryAgain | Refused:
    status = response.status_code
    said = f"HTTP {status}: {reason}"
    later = status in _LATER or (status >= 500 and status != _NEVER)
    failure = TryAgain(said) if later else Refused(said)
    failure.status = status
    if isinstance(failure, TryAgain):
        seconds = response.headers.get("retry-after", "")
        failure.retry_after_s = float(seconds) if seconds.isdecimal() else None
    return failure
