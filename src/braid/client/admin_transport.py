"""Sends admin operations over HTTP and understands the answers.

Owns the HTTP connections of one `AdminClient`, the choice among its addresses, deadlines, what may be sent again, and the
errors that every failure becomes. An operation that is not repeatable is sent once: after a lost answer nobody knows whether it
was done, and the error says so. Redirects of a broker to the owner (307) are followed. Bounded in bytes and hops (INV17).

The HTTP library comes with the extra `server` and is imported when a client is made: the rest of the SDK does not need it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from braid.client.operations import Operation
from braid.errors import (
    BraidError,
    Closed,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    NotReady,
    ProtocolError,
    TooLarge,
    from_status,
)
from braid.model.names import encode

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
CONNECT_SECONDS = 5.0
MAX_REDIRECTS = 10
MAX_REPLY_BYTES = 256 << 20
MAX_REASON = 500
MAX_URLS = 100


class Reply(msgspec.Struct, frozen=True):
    """A successful answer."""

    url: str
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes


Refusal = Callable[[int, str, Mapping[str, str]], BraidError]
"""The error for a status, what the other side said, and its headers by lower-case name."""


class AdminTransport:
    """The HTTP side of one client; `refusal` chooses the error for what the other side refuses."""

    def __init__(self, urls: Sequence[str], timeout: float, *, refusal: Refusal | None = None) -> None:
        self.urls = urls
        self._timeout = timeout
        self._refusal = refusal or (lambda status, reason, _headers: from_status(status, reason))
        self._first = 0
        """The address that answered last is asked first."""
        self._is_closed = False
        self._httpx = _import_httpx()
        self._http = self._httpx.AsyncClient(
            timeout=self._httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout)),
            follow_redirects=True,
            max_redirects=MAX_REDIRECTS,
            trust_env=False,
            verify=_trust(urls),
        )

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        self._is_closed = True
        await self._http.aclose()

    async def send(
        self, operation: Operation[Any], names: Mapping[str, str], query: Mapping[str, Any] | None = None, body: Any = None
    ) -> Reply:
        """The answer to one call; raises the error a refusal stands for."""
        if self._is_closed:
            raise Closed("The admin client was closed.")
        path = operation.path.format(**{key: encode(value) for key, value in names.items()})
        asked = {key: _text(value) for key, value in (query or {}).items() if value is not None}
        content = None if operation.body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(self._timeout):
                return await self._try_each(operation, path, asked, content)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{operation.name}: {self.urls[self._first]} did not answer within {self._timeout:g} s"
                f"{'.' if operation.is_repeatable else '; whether it was done is not known.'}"
            ) from None

    async def _try_each(
        self, operation: Operation[Any], path: str, query: Mapping[str, str | list[str]], content: bytes | None
    ) -> Reply:
        """Ask one address after the other, beginning with the one that answered last; it is asked again after a lost answer."""
        failures: list[str] = []
        broken: ConnectionLost | ProtocolError | None = None
        count = len(self.urls)
        for number in range(count + 1):
            if number == count and broken is None:
                break
            index = (self._first + number) % count
            try:
                reply = await self._send_once(operation, self.urls[index], path, query, content)
            except ConnectFailed as error:
                failures.append(error.message)
            except (ConnectionLost, ProtocolError) as error:
                if not operation.is_repeatable:
                    raise
                broken = broken or error
            else:
                self._first = index
                return reply
        if broken is not None:
            raise broken
        raise ConnectFailed(
            f"No broker answers at {', '.join(failures)}. "
            "Start one with `braid standalone`, or give the address of its admin API."
        )

    async def _send_once(
        self, operation: Operation[Any], url: str, path: str, query: Mapping[str, str | list[str]], content: bytes | None
    ) -> Reply:
        http = self._httpx
        headers = {"accept": "*/*"} | ({"content-type": "application/json"} if content is not None else {})
        try:
            async with self._http.stream(
                operation.method, f"{url}{path}", params=query or None, content=content, headers=headers
            ) as answer:
                data = await _bounded(operation, answer)
        except (http.ConnectError, http.ConnectTimeout) as error:
            raise ConnectFailed(f"{_reached(error, url)} ({_why(error)})") from error
        except http.TooManyRedirects as error:
            raise NotReady(f"{operation.name} was sent from broker to broker more than {MAX_REDIRECTS} times.") from error
        except http.TimeoutException as error:
            raise TimeoutError from error
        except http.HTTPError as error:
            raise _broken(operation, error, url) from error
        told = {key.lower(): value for key, value in answer.headers.items()}
        if not answer.is_success:
            raise self._refusal(answer.status_code, _reason(operation, url, answer, data), told)
        return Reply(str(answer.url), told, data)


def decode(operation: Operation[T], reply: Reply) -> T:
    """The answer's body as the operation's reply type."""
    kind: Any = operation.reply
    is_json = "json" in reply.headers.get("content-type", "")
    if kind is type(None):
        return None  # type: ignore[return-value]
    try:
        if kind is str and not is_json:
            return reply.body.decode()  # type: ignore[return-value]
        return msgspec.json.decode(reply.body, type=operation.reply)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(
            f"{operation.name}: the answer of {reply.url} cannot be read ({error}); is this the admin API of a broker?"
        ) from None


def parse_urls(urls: str | Sequence[str]) -> list[str]:
    """Addresses such as `http://localhost:8080`, one or several (also separated by commas; then only the first needs to name
    the protocol, as in the addresses of the binary one)."""
    given = urls.split(",") if isinstance(urls, str) else list(urls)
    found: list[str] = []
    for text in given:
        url = text.strip().rstrip("/")
        if found and url and "://" not in url:
            url = f"{found[0].partition('://')[0]}://{url}"
        try:
            parts = urlsplit(url)
            is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.query
        except ValueError:
            is_good = False
            parts = urlsplit("")
        if not is_good:
            hint = " That is the binary protocol; the admin API speaks HTTP." if parts.scheme.startswith("pulsar") else ""
            raise ConfigError(f"The admin URL {text[:200]!r} cannot be used; write http://host:port.{hint}")
        found.append(url)
    if not 1 <= len(found) <= MAX_URLS:
        raise ConfigError(f"Give 1 to {MAX_URLS} admin URLs, not {len(found)}.")
    return found


async def _bounded(operation: Operation[Any], answer: httpx.Response) -> bytes:
    """The whole body, unless it is too large for anything the admin API answers."""
    parts, size = [], 0
    async for part in answer.aiter_bytes():
        size += len(part)
        if size > MAX_REPLY_BYTES:
            raise TooLarge(f"{operation.name}: the answer has more than {MAX_REPLY_BYTES} bytes.")
        parts.append(part)
    return b"".join(parts)


def _reason(operation: Operation[Any], url: str, answer: httpx.Response, data: bytes) -> str:
    """What the other side says; its own words if it is a broker."""
    try:
        found = msgspec.json.decode(data, type=dict[str, Any]).get("reason")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = None
    if isinstance(found, str) and found.strip():
        return found
    text = " ".join(data[: 4 * MAX_REASON].decode(errors="replace").split())[:MAX_REASON]
    asked = f"{operation.method} {operation.path}"
    return f"{operation.name}: {url} answered {answer.status_code} to {asked}{f': {text}' if text else ''}."


def _broken(operation: Operation[Any], error: httpx.HTTPError, url: str) -> ConnectionLost | ProtocolError:
    """The error for an answer that did not come, came in part, or is no HTTP."""
    reached, why = _reached(error, url), str(error)
    unknown = "" if operation.is_repeatable else " Whether it was done is not known; look before you try again."
    hint = "The admin API is at http://host:8080 unless configured otherwise, not at the address of the binary protocol."
    if "without sending a response" in why:
        return ConnectionLost(f"{operation.name}: {reached} closed the connection without an answer. {hint}{unknown}")
    if "closed connection" in why or not isinstance(error, _import_httpx().RemoteProtocolError):
        return ConnectionLost(f"{operation.name}: the connection to {reached} broke ({_why(error)}).{unknown}")
    return ProtocolError(f"{operation.name}: {reached} does not answer in HTTP ({_why(error)}). {hint}{unknown}")


def _reached(error: httpx.HTTPError, url: str) -> str:
    """The address an error happened at: the one asked, or the one it sent us to."""
    try:
        reached = error.request.url
    except RuntimeError:
        return url
    return f"{reached.scheme}://{reached.netloc.decode()}"


def _why(error: Exception) -> str:
    """The cause in a few words; the library's own text often has none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        cause = cause.__cause__ or cause.__context__
    return str(error).rstrip(".") or type(error).__name__


def _trust(urls: Sequence[str]) -> ssl.SSLContext:
    """Whom to trust. Without https among the addresses nobody: reading all the system's certificates takes a while."""
    if any(url.startswith("https:") for url in urls):
        return ssl.create_default_context()
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _text(value: Any) -> str | list[str]:
    """A query parameter; a list is one that is given several times."""
    if isinstance(value, list):
        return [str(each) for each in value]
    return str(value).lower() if isinstance(value, bool) else str(value)


def _import_httpx() -> Any:
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The admin client needs the package {error.name}, which is not installed; "
            "install Braid with its server: braidmq[server]."
        ) from None
    return httpx
