"""Calls of the admin API as data: path, parameters, body, answers and the code behind them, in one place.

Owns how a request becomes an `Ask` (names decoded once, query and body checked against what the call declares, before anything
is done) and how a result becomes a response. The OpenAPI document is made from the same declarations (`openapi.py`), so it
cannot promise what is not checked. Must not know any particular call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from litestar import Request
from litestar.response import Response

from braid.errors import InvalidArgument, NotAllowed, Rejected
from braid.model.names import Domain, NamespaceName, TopicName, check_subscription_name, decode

if TYPE_CHECKING:
    from braid.client.admin_transport import AdminTransport
    from braid.web.admin import Admin

T = TypeVar("T")
Json = dict[str, Any]
Req = Request[Any, Any, Any]
Work = Callable[["Ask"], Awaitable[Any]]
JSON_TYPE = "application/json"
PLAIN_TYPE = "text/plain; charset=utf-8"
MAX_BODY_BYTES = 1 << 20
MAX_INT64 = (1 << 63) - 1
MAX_QUERY_CHARACTERS = 4096
MAX_REPEATED = 100
_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)


class BadRequest(Rejected):
    """A body or parameter that cannot be understood."""

    status = 400


class BadContentType(Rejected):
    """A body that is not said to be JSON, or is compressed."""

    status = 415


class Answered(Exception):
    """Ends a call with this very answer: a redirect, or what another broker said."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.headers = dict(headers or {})


class Query(msgspec.Struct, frozen=True):
    """A query parameter. `kind` is the type of its value."""

    name: str
    what: str
    kind: type = str
    default: Any = None
    choices: tuple[str, ...] = ()
    least: int = 0
    most: int = MAX_INT64
    is_many: bool = False
    """May be given several times: the value is the list of texts."""

    def read(self, texts: list[str]) -> Any:
        """The value; the default if it is absent or empty."""
        if self.is_many:
            if len(texts) > MAX_REPEATED or any(len(text) > MAX_QUERY_CHARACTERS for text in texts):
                raise BadRequest(
                    f"The query parameter {self.name} may be given {MAX_REPEATED} times with {MAX_QUERY_CHARACTERS} characters."
                )
            return texts
        if len(set(texts)) > 1:
            raise BadRequest(f"The query parameter {self.name} is given {len(texts)} times with different values.")
        text = texts[0] if texts else ""
        if text == "":
            return self.default
        if len(text) > MAX_QUERY_CHARACTERS:
            raise BadRequest(f"The query parameter {self.name} has {len(text)} characters; {MAX_QUERY_CHARACTERS} are allowed.")
        if self.kind is bool:
            if text.lower() not in ("true", "false"):
                raise BadRequest(f"The query parameter {self.name} must be true or false, not {text[:40]!r}.")
            return text.lower() == "true"
        if self.kind is int:
            return number_of(text, f"value of the query parameter {self.name}", self.least, self.most)
        if self.choices and text not in self.choices:
            raise BadRequest(f"The query parameter {self.name} must be one of {', '.join(self.choices)}, not {text[:40]!r}.")
        return text


AUTHORITATIVE = Query("authoritative", "Set by redirects: take the object rather than send the caller on", bool, False)
HOPS = Query("hops", "Set by redirects: how often the caller was sent on", int, 0, most=100)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call: what it takes, what it answers, and the work behind it."""

    method: str
    path: str
    """Below the group's root; names of parts in braces."""
    work: Work
    tag: str
    status: int
    answer: Any
    """Type of the JSON answer; None: no body, `str` with `is_text`: plain text, bytes: a message."""
    is_text: bool
    is_optional: bool
    """Whether there may be nothing to answer: 204."""
    body: Any
    """Type of the JSON body; None: no body is read."""
    body_default: Any
    """What an empty body means; UNSET: a body is required."""
    query: tuple[Query, ...]
    statuses: tuple[int, ...]
    """Refusals beyond those every call of its kind has."""
    route: str
    """The path the router knows, if it is not `path`."""

    @property
    def text(self) -> str:
        return (self.work.__doc__ or "").strip()

    @property
    def needs_owner(self) -> bool:
        return AUTHORITATIVE in self.query


class Calls:
    """Collects the calls of one subject: `@calls.get("/path", answer=list[str])`."""

    def __init__(self, tag: str, root: str = "/admin/v2") -> None:
        self.tag = tag
        self.root = root
        self.all: list[Call] = []

    def get(self, path: str, answer: Any, **options: Any) -> Callable[[Work], Work]:
        return self._add("GET", path, answer=answer, status=200, **options)

    def put(self, path: str, answer: Any = None, **options: Any) -> Callable[[Work], Work]:
        return self._add("PUT", path, answer=answer, status=options.pop("status", 204), **options)

    def post(self, path: str, answer: Any = None, **options: Any) -> Callable[[Work], Work]:
        return self._add("POST", path, answer=answer, status=options.pop("status", 204), **options)

    def delete(self, path: str, answer: Any = None, **options: Any) -> Callable[[Work], Work]:
        return self._add("DELETE", path, answer=answer, status=options.pop("status", 204), **options)

    def _add(
        self,
        method: str,
        path: str,
        *,
        answer: Any,
        status: int,
        is_text: bool = False,
        is_optional: bool = False,
        body: Any = None,
        body_default: Any = msgspec.UNSET,
        query: tuple[Query, ...] = (),
        statuses: tuple[int, ...] = (),
        owner: bool = False,
        route: str = "",
    ) -> Callable[[Work], Work]:
        def add(work: Work) -> Work:
            self.all.append(
                Call(
                    method=method,
                    path=self.root + path,
                    work=work,
                    tag=self.tag,
                    status=status,
                    answer=answer,
                    is_text=is_text,
                    is_optional=is_optional,
                    body=body,
                    body_default=body_default,
                    query=(*query, AUTHORITATIVE, HOPS) if owner else query,
                    statuses=statuses,
                    route=self.root + (route or path),
                )
            )
            return work

        return add


class Ask:
    """One request: what the caller named and gave, checked."""

    __slots__ = ("admin", "body", "call", "links", "parts", "query", "raw", "request")

    def __init__(self, admin: Admin, call: Call, request: Req) -> None:
        self.admin = admin
        self.call = call
        self.request = request
        self.parts: Mapping[str, str] = request.path_params
        """Of the path, still percent-encoded."""
        self.query: Json = {each.name: each.read(request.query_params.getall(each.name, [])) for each in call.query}
        self.raw = b""
        self.body: Any = None
        self.links: dict[str, AdminTransport] = {}
        """To other brokers, by address, for the time of this call."""

    async def close(self) -> None:
        for link in self.links.values():
            await link.close()

    async def read_body(self) -> None:
        """Decode the body the call declares; a call without one never reads it."""
        if self.call.body is None:
            return
        headers = self.request.headers
        self.raw = await self.request.body()
        if not self.raw.strip():
            if self.call.body_default is msgspec.UNSET:
                raise BadRequest("The request needs a JSON body and has none.")
            self.body = self.call.body_default
            return
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise BadContentType("Compressed bodies are not accepted; send the JSON as it is.")
        kind = headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
        if kind not in ("", JSON_TYPE, "text/json") and not (kind.startswith("application/") and kind.endswith("+json")):
            raise BadContentType(f"The body is said to be {kind[:80]!r}; it must be {JSON_TYPE}.")
        self.body = decoded(self.raw, self.call.body)

    # Names in the path.

    def text(self, part: str) -> str:
        """One part of the path, decoded once."""
        return decode(self.parts[part])

    @property
    def tenant(self) -> str:
        return _namespace(self.text("tenant"), "default").tenant

    @property
    def namespace(self) -> NamespaceName:
        return _namespace(self.text("tenant"), self.text("namespace"))

    @property
    def topic(self) -> TopicName:
        """The persistent topic the path names."""
        return TopicName.parse(f"{Domain.PERSISTENT}://{self.text('tenant')}/{self.text('namespace')}/{self.text('topic')}")

    @property
    def subscription(self) -> str:
        name = self.text("subscription")
        check_subscription_name(name)
        return name

    def number(self, part: str, what: str, least: int = 0, most: int = MAX_INT64) -> int:
        """A number in the path."""
        return number_of(self.parts[part], what, least, most)


def _namespace(tenant: str, namespace: str) -> NamespaceName:
    name = NamespaceName.parse(f"{tenant}/{namespace}")
    TopicName.parse(f"{Domain.PERSISTENT}://{name}/t")  # too long for any topic is too long
    return name


def word_of(text: str, what: str) -> str:
    """A name made of the characters tenants have: of a cluster."""
    try:
        return _namespace(text, "x").tenant
    except Rejected:
        raise InvalidArgument(f"{text[:100]!r} cannot be {what}: letters, digits and - = : . _ are allowed.") from None


def number_of(text: str, what: str, least: int = 0, most: int = MAX_INT64) -> int:
    """A whole number within bounds."""
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise BadRequest(f"{text[:40]!r} is no {what}; a number from {least} to {most} is expected.")
    return int(text)


def decoded(raw: bytes, kind: type[T]) -> T:
    """A JSON body as `kind`; what is not exactly that is refused."""
    try:
        value = msgspec.json.decode(raw, type=kind)
        if b"{" in raw:
            json.loads(raw, object_pairs_hook=_unique)  # msgspec takes the last of two equal keys
        return value
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadRequest(f"The body cannot be used: {str(error)[:500] or type(error).__name__}.") from None


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice in one object")
    return found


def convert(value: Any, kind: type[T], what: str) -> T:
    """A decoded JSON value as `kind`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{what} cannot be used: {error}.") from None


def respond(call: Call, value: Any) -> Response[bytes]:
    """The result of a call as HTTP."""
    if isinstance(value, Response):
        return value
    if value is None:
        return Response(b"", status_code=call.status if call.answer is None else 204)
    if call.is_text:
        return Response(str(value).encode(), status_code=call.status, media_type=PLAIN_TYPE)
    return Response(msgspec.json.encode(value), status_code=call.status, media_type=JSON_TYPE)


def refused(what: str) -> NotAllowed:
    """405 for something Pulsar has and this version does not."""
    return NotAllowed(f"{what} not available in this version of Braid; nothing was changed.")
