"""The ASGI application: all routes, one shape of errors.

Owns what is common to every request: paths reach the router still percent-encoded (so that an encoded `/` stays inside a name
and is decoded once, by the call), errors become `{"reason": ...}` with the status of their class, bodies are bounded, and
requests that two readers could understand differently are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from litestar import Litestar, Request
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.response import Response

from braid.broker.ownership import OwnedElsewhere
from braid.errors import BraidError, LedElsewhere, LedgerStoreReadOnly, StorageFull
from braid.web.admin import Admin
from braid.web.calls import JSON_TYPE, MAX_BODY_BYTES, Answered, Ask, Call, Req, respond
from braid.web.leaders import Leaders
from braid.web.openapi import document, page
from braid.web.owners import Owners
from braid.web.remote_segments import ERROR_HEADER
from braid.web.routes_brokers import broker_calls, page_routes
from braid.web.routes_bundles import bundle_calls
from braid.web.routes_clusters import cluster_calls, tenant_calls
from braid.web.routes_lookup import lookup_calls
from braid.web.routes_messages import message_calls
from braid.web.routes_namespaces import namespace_calls
from braid.web.routes_permissions import permission_calls
from braid.web.routes_policies import policy_calls
from braid.web.routes_scalable import scalable_calls
from braid.web.routes_segments import segment_calls
from braid.web.routes_sinks import sink_calls
from braid.web.routes_stats import stats_calls
from braid.web.routes_subscriptions import subscription_calls
from braid.web.routes_topics import topic_calls
from braid.web.routes_transactions import transaction_calls

log = logging.getLogger(__name__)
EMPTY_NAME = "/empty name in a path"
BAD_TARGET = "/not a path"
BAD_PATHS = {
    EMPTY_NAME: (404, "The path has an empty part (// or / at its end); give every name in it."),
    BAD_TARGET: (400, "The request names no path."),
}
NOT_YET = ("/admin/", "/lookup/", "/topics/")
"""Roots of Pulsar's API: what is not found below them exists elsewhere and is not built here."""
ALIASES = {"/admin/v2/scalable-topics/": "/admin/v2/scalable/"}
"""Roots under which the design names what Pulsar serves under another (decision D-6)."""
KNOWN_METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH")
SAFE_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]


def all_calls(admin: Admin) -> list[Call]:
    """Every call of the API."""
    groups = (
        cluster_calls(admin),
        tenant_calls(admin),
        namespace_calls(admin),
        bundle_calls(admin),
        permission_calls(admin),
        policy_calls(admin),
        topic_calls(admin),
        stats_calls(admin),
        message_calls(admin),
        subscription_calls(admin),
        scalable_calls(admin),
        segment_calls(),
        transaction_calls(admin),
        sink_calls(admin),
        broker_calls(admin),
        lookup_calls(admin),
    )
    return [call for group in groups for call in group.all]


def make_app(admin: Admin) -> Any:
    """The application for one broker."""
    calls = all_calls(admin)
    described = msgspec.json.encode(document(calls))
    app = Litestar(
        [*_handlers(admin, calls), *page_routes(admin, described, page(calls))],
        openapi_config=None,
        exception_handlers={BraidError: _refused, Answered: _answered, HTTPException: _http_error, Exception: _unexpected},
        request_max_body_size=MAX_BODY_BYTES,
        logging_config=None,
        debug=False,
    )
    return _Front(app)


def _handlers(admin: Admin, calls: list[Call]) -> Iterator[HTTPRouteHandler]:
    """One handler for each path, whatever its methods: each costs the start of the broker a millisecond."""
    by_route: dict[str, dict[str, Call]] = {}
    for call in calls:
        by_route.setdefault(call.route, {})[call.method] = call
    for route, by_method in by_route.items():
        path = route.replace("}", ":str}")
        yield HTTPRouteHandler(path, http_method=list(by_method), status_code=200)(_handler(admin, by_method))  # type: ignore[arg-type]


def _handler(admin: Admin, by_method: dict[str, Call]) -> Any:
    async def handle(request: Req) -> Response[bytes]:
        return await _answered_call(admin, by_method[request.method], request)

    handle.__annotations__ = {"request": Request, "return": Response}  # what the framework can look up
    return handle


async def _answered_call(admin: Admin, call: Call, request: Req) -> Response[bytes]:
    clock = admin.service.runtime.clock
    started = clock.monotonic()
    admin.requests += 1
    try:
        ask = Ask(admin, call, request)
        await ask.read_body()
        try:
            return respond(call, await call.work(ask))
        except OwnedElsewhere as elsewhere:
            Owners(ask).redirect(elsewhere.owner)
        except LedElsewhere as elsewhere:
            await Leaders(ask).redirect(elsewhere)
        finally:
            await ask.close()
    except Answered as answered:
        admin.redirects += answered.status == 307
        raise
    finally:
        admin.slow.note("admin request", f"{call.method} {request.scope['path'][:200]}", clock.monotonic() - started)


class _Front:
    """What stands before the router."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        has_length = any(name == b"content-length" for name, _value in scope["headers"])
        is_chunked = any(name == b"transfer-encoding" for name, _value in scope["headers"])
        is_odd = (has_length and is_chunked) or scope["http_version"] not in ("1.0", "1.1")
        more = [(b"connection", b"close")] if is_odd else []

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *SAFE_HEADERS, *more]}
            await send(message)

        if is_odd and not is_chunked:
            await _plain_answer(sent, 505, "This is a server of HTTP/1.1.")
        elif is_odd:
            await _plain_answer(sent, 400, "The request has both a length and chunks; nobody can tell where it ends.")
        elif scope["method"] not in KNOWN_METHODS:
            await _plain_answer(sent, 405, f"{scope['method'][:40]} is no method of this API.")
        else:
            inner = {**scope, "path": _path_of(scope["raw_path"].decode("latin-1"))}
            if scope["method"] == "HEAD":  # GET whose body the server leaves out
                inner["method"] = "GET"
            await self._app(inner, receive, sent)


def _path_of(target: str) -> str:
    """The path of a request target, still percent-encoded."""
    if target.lower().startswith(("http://", "https://")):  # absolute form: what a proxy is sent
        rest = target.partition("://")[2]
        target = rest[rest.find("/") :] if "/" in rest else "/"
    if not target.startswith("/"):
        return BAD_TARGET
    for alias, root in ALIASES.items():
        if target.startswith(alias):
            target = root + target.removeprefix(alias)
    return EMPTY_NAME if "//" in target else target  # the router would take an empty name for no name at all


async def _plain_answer(send: Any, status: int, reason: str) -> None:
    body = msgspec.json.encode({"reason": reason})
    headers = [(b"content-type", JSON_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _answer(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response[bytes]:
    body = msgspec.json.encode({"reason": reason})
    return Response(body, status_code=status, media_type=JSON_TYPE, headers=dict(headers or {}))


def _refused(request: Request[Any, Any, Any], error: BraidError) -> Response[bytes]:
    if error.status >= 500 and not isinstance(error, StorageFull | LedgerStoreReadOnly):  # its store tells of a full disk
        log.warning("%s %s failed: %s", request.method, request.scope["path"][:200], error)
    return _answer(error.status, error.message, {ERROR_HEADER: type(error).__name__})


def _answered(request: Request[Any, Any, Any], error: Answered) -> Response[bytes]:
    return _answer(error.status, error.reason, error.headers)


def _http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    status, path, headers = error.status_code, request.scope["path"], error.headers
    asked = f"{request.method} {path[:300]}"
    if status == 404 and path.endswith("/") and path.startswith(NOT_YET):
        path = EMPTY_NAME
    if path in BAD_PATHS:
        status, reason = BAD_PATHS[path]
    elif status == 404 and path.startswith(NOT_YET):
        status, reason = 501, f"{asked} is not available in this version of Braid."
    elif status == 404:
        reason = (
            f"There is nothing at {path[:300]}; the API is below /admin/v2 and described at /docs, metrics are at /metrics."
        )
    elif status == 405:
        reason = f"{asked} is not available in this version of Braid; other methods on this path are."
    elif status == 413:
        reason = f"The body is larger than {MAX_BODY_BYTES} bytes."
    else:
        reason = error.detail or "The request cannot be used."
    return _answer(status, reason, headers)


def _unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("%s %s failed unexpectedly", request.method, request.scope["path"][:200], exc_info=error)
    return _answer(500, "The broker failed to answer; its log says why.")
