"""REST: the broker itself: health, version, settings, metrics, and the page that lists every call."""

from __future__ import annotations

from html import escape
from typing import Any

import msgspec
from litestar import Request, get
from litestar.response import Response

from braid import __version__
from braid.errors import NotFound, StorageUnavailable
from braid.model.names import decode
from braid.web.admin import Admin, Part
from braid.web.metrics import Metrics

PLAIN = "text/plain; charset=utf-8"


def broker_routes(admin: Admin) -> list[Any]:
    """Calls below `/brokers`."""

    @get("/brokers")
    async def brokers() -> list[str]:
        """The brokers of the cluster: this one."""
        return [admin.broker_id]

    @get("/brokers/{cluster:str}")
    async def brokers_of(cluster: Part) -> list[str]:
        """The brokers of a cluster."""
        if decode(cluster) not in await admin.service.namespaces.clusters():
            raise NotFound(f"The cluster {decode(cluster)} does not exist.")
        return [admin.broker_id]

    @get("/brokers/health", media_type=PLAIN)
    async def health() -> str:
        """Reads the metadata store, and says no while storage takes no writes."""
        await admin.service.namespaces.clusters()
        if not admin.is_writable():
            raise StorageUnavailable("The storage takes no writes: the disk is full.")
        return "ok"

    @get("/brokers/ready", media_type=PLAIN)
    async def ready() -> str:
        """`ok` as soon as the broker serves."""
        return "ok"

    @get("/brokers/version", media_type=PLAIN)
    async def version() -> str:
        """Braid's version, as text."""
        return __version__

    @get("/brokers/leaderBroker")
    async def leader() -> dict[str, Any]:
        """The broker that leads: this one."""
        return {"brokerId": admin.broker_id, "serviceUrl": admin.http_url}

    @get("/brokers/configuration")
    async def dynamic_names() -> list[str]:
        """Settings that can change while the broker runs: none in this version."""
        return []

    @get("/brokers/configuration/runtime")
    async def runtime_values() -> dict[str, str]:
        """Every setting of section `[broker]` with its value."""
        values = msgspec.to_builtins(admin.service.config)
        return {key: str(value) for key, value in values.items()}

    return [brokers, brokers_of, health, ready, version, leader, dynamic_names, runtime_values]


def root_routes(admin: Admin) -> list[Any]:
    """Pages outside `/admin`."""
    metrics = Metrics(admin)

    @get("/metrics", media_type=PLAIN, include_in_schema=False)
    async def scrape() -> Response[bytes]:
        return Response(metrics.exposition(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    @get("/status.html", media_type="text/html", include_in_schema=False)
    async def status() -> str:
        return "OK"

    @get("/docs", media_type="text/html", include_in_schema=False)
    async def page(request: Request[Any, Any, Any]) -> str:
        return _page(request)

    return [scrape, status, page]


def _page(request: Request[Any, Any, Any]) -> str:
    """Every call of the API as a plain table, with no script and nothing from elsewhere."""
    rows = []
    for path, item in sorted((request.app.openapi_schema.paths or {}).items()):
        for method in ("get", "put", "post", "delete"):
            operation = getattr(item, method)
            if operation is not None:
                text = escape(operation.description or operation.summary or "")
                rows.append(f"<tr><td>{method.upper()}</td><td><code>{escape(path)}</code></td><td>{text}</td></tr>")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Braid admin API</title>"
        f"<h1>Braid {escape(__version__)} admin API</h1><p>As <a href='/openapi/openapi.json'>OpenAPI document</a>.</p>"
        f"<table>{''.join(rows)}</table></html>"
    )
