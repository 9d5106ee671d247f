"""The ASGI application: all routes, one shape of errors.

Owns what is common to every call: paths reach the router still percent-encoded (so that an encoded `/` stays inside a name and
is decoded once, by the handler), errors become `{"reason": ...}` with the status of their class, bodies are bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from litestar import Litestar, Request, Router
from litestar.exceptions import HTTPException
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, OpenAPIType, Schema
from litestar.response import Response

from braid import __version__
from braid.errors import BraidError
from braid.web.admin import MAX_BODY_BYTES, Admin
from braid.web.routes_brokers import broker_routes, root_routes
from braid.web.routes_namespaces import cluster_and_tenant_routes, creation_routes, namespace_routes, policy_routes
from braid.web.routes_subscriptions import move_routes, subscription_routes
from braid.web.routes_topics import listing_routes, topic_routes

log = logging.getLogger(__name__)
EMPTY_NAME = "/empty name in a path"
NOT_YET = ("/admin/", "/lookup/", "/topics/")
"""Roots of Pulsar's API: what is not found below them exists elsewhere and is not built here."""


def make_app(admin: Admin) -> Any:
    """The application for one broker."""
    routes = [
        *cluster_and_tenant_routes(admin),
        *namespace_routes(admin),
        *policy_routes(admin),
        *creation_routes(admin),
        *listing_routes(admin),
        *topic_routes(admin),
        *subscription_routes(admin),
        *move_routes(admin),
        *broker_routes(admin),
    ]
    app = Litestar(
        [Router("/admin/v2", route_handlers=routes), *root_routes(admin)],
        openapi_config=OpenAPIConfig(
            title="Braid admin API",
            version=__version__,
            path="/openapi",
            render_plugins=[JsonRenderPlugin()],
            use_handler_docstrings=True,
        ),
        exception_handlers={BraidError: _refused, HTTPException: _http_error, Exception: _unexpected},
        request_max_body_size=MAX_BODY_BYTES,
        logging_config=None,
        debug=False,
    )

    _show_our_errors(app)

    async def encoded_paths(scope: Any, receive: Any, send: Any) -> None:
        path = scope["raw_path"].decode("latin-1")
        if "//" in path:  # the router would take an empty name for no name at all
            path = EMPTY_NAME
        inner: Any = {**scope, "path": path}
        if scope["method"] == "HEAD":  # GET whose body the server leaves out
            inner["method"] = "GET"
        await app(inner, receive, send)

    return encoded_paths


def _show_our_errors(app: Litestar) -> None:
    """The OpenAPI document promises the errors that `_answer` gives."""
    reason = Schema(type=OpenAPIType.OBJECT, properties={"reason": Schema(type=OpenAPIType.STRING)}, required=["reason"])
    for item in (app.openapi_schema.paths or {}).values():
        for operation in (item.get, item.put, item.post, item.delete):
            if operation is not None:
                content = {"application/json": OpenAPIMediaType(schema=reason)}
                refused = OpenAPIResponse(description="Refused; the status says how", content=content)
                operation.responses = {**(operation.responses or {}), "4XX": refused}
                operation.responses.pop("400", None)


def _answer(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response[bytes]:
    body = msgspec.json.encode({"reason": reason})
    return Response(body, status_code=status, media_type="application/json", headers=dict(headers or {}))


def _refused(request: Request[Any, Any, Any], error: BraidError) -> Response[bytes]:
    if error.status >= 500:
        log.warning("%s %s failed: %s", request.method, request.scope["path"][:200], error)
    return _answer(error.status, error.message)


def _http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    status, path = error.status_code, request.scope["path"]
    if path == EMPTY_NAME:
        return _answer(404, "The path has an empty part (//); give every name in it.")
    if status == 404 and path.startswith(NOT_YET):
        return _answer(501, f"{request.method} {path[:300]} is not available in this version of Braid.")
    if status == 404:
        return _answer(404, f"There is nothing at {path[:300]}; the API is below /admin/v2, metrics are at /metrics.")
    if status == 405:
        reason = f"{request.method} {path[:300]} is not available in this version of Braid; other methods on this path are."
        return _answer(405, reason, error.headers)
    if status == 413:
        return _answer(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    return _answer(status, error.detail or "The request cannot be used.", error.headers)


def _unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("%s %s failed unexpectedly", request.method, request.scope["path"][:200], exc_info=error)
    return _answer(500, "The broker failed to answer; its log says why.")
