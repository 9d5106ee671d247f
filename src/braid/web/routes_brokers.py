"""REST: the brokers: who is up, who leads, what each owns, health, settings, draining; and pages that are no API."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from litestar import get
from litestar.response import Response

from braid import __version__
from braid.broker.registry import BrokerInfo
from braid.errors import InvalidArgument, NotAllowed, NotFound, NotReady, StorageFull
from braid.model.bundles import Bundle, hash_of
from braid.web.admin import Admin
from braid.web.calls import Ask, Calls, Query
from braid.web.metrics import TOPICS_AT_ONCE, Metrics
from braid.web.owners import Owners
from braid.web.stats import topic_stats

Json = dict[str, Any]
HTML = "text/html; charset=utf-8"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


class Leader(msgspec.Struct, frozen=True, rename="camel"):
    """The broker that balances."""

    broker_id: str
    service_url: str


def broker_calls(admin: Admin) -> Calls:
    """Calls below `/brokers` and `/broker-stats`."""
    calls = Calls("brokers")
    _cluster(admin, calls)
    _state(admin, calls)
    _settings(admin, calls)
    _stats(admin, calls)
    return calls


async def _known(admin: Admin, broker_id: str) -> BrokerInfo:
    for broker in await admin.ownership.brokers():
        if broker.broker_id == broker_id:
            return broker
    raise NotFound(f"There is no broker {broker_id[:200]!r}; the brokers are listed at /admin/v2/brokers.")


async def _here(admin: Admin, ask: Ask, broker_id: str) -> None:
    """Return if this is the broker; else send the caller to it."""
    broker = await _known(admin, broker_id)
    if broker.broker_id != admin.ownership.broker_id:
        Owners(ask).redirect(broker)


def _cluster(admin: Admin, calls: Calls) -> None:
    async def ids() -> list[str]:
        return [broker.broker_id for broker in await admin.ownership.brokers()]

    async def check_cluster(ask: Ask) -> None:
        if ask.text("cluster") != admin.clusters.own:
            raise NotFound(f"The cluster {ask.text('cluster')[:200]} is not this broker's, which is {admin.clusters.own}.")

    @calls.get("/brokers", list[str])
    async def brokers(ask: Ask) -> Any:
        """The brokers of the cluster that are up, by host and HTTP port."""
        return await ids()

    @calls.get("/brokers/{cluster}", list[str])
    async def brokers_of(ask: Ask) -> Any:
        """The brokers of a cluster."""
        await check_cluster(ask)
        return await ids()

    @calls.get("/brokers/leaderBroker", Leader, statuses=(404,))
    async def leader(ask: Ask) -> Any:
        """The broker that balances."""
        found = await admin.ownership.leader()
        if found is None:
            raise NotFound("No broker leads at the moment; try again.")
        return Leader(found.broker_id, found.http_url)

    @calls.get("/brokers/{cluster}/{broker}/ownedNamespaces", Json, owner=True)
    async def owned(ask: Ask) -> Any:
        """The bundles a broker owns."""
        await check_cluster(ask)
        await _here(admin, ask, ask.text("broker"))
        status = {"broker_assignment": "shared", "is_controlled": False, "is_active": True}
        return {f"{name}/{bundle}": status for name, bundles in admin.ownership.owned().items() for bundle in bundles}

    @calls.post("/brokers/{broker}/drain", owner=True)
    async def drain(ask: Ask) -> None:
        """Let a broker give its bundles to the others and take none, until it is undrained. Answers when it has none left."""
        await _here(admin, ask, ask.text("broker"))
        await admin.ownership.drain()

    @calls.post("/brokers/{broker}/undrain", owner=True)
    async def undrain(ask: Ask) -> None:
        """Let a broker take bundles again."""
        await _here(admin, ask, ask.text("broker"))
        await admin.ownership.undrain()

    @calls.post("/brokers/shutdown", statuses=(405,))
    async def shutdown(ask: Ask) -> None:
        """Refused with 405: a broker is stopped by whoever started it; drain it first."""
        raise NotAllowed("A broker is not stopped over HTTP: drain it, then end its process (SIGTERM).")


def _state(admin: Admin, calls: Calls) -> None:
    which = Query("brokerId", "Ask this broker rather than the one that is called")
    version_of_topic = Query("topicVersion", "Has no effect: health is not tested by a topic")

    @calls.get("/brokers/health", str, is_text=True, query=(which, version_of_topic), owner=True, statuses=(404,))
    async def health(ask: Ask) -> Any:
        """`ok`: the metadata store answers, storage takes writes, and the broker is part of the cluster."""
        if (wanted := ask.query["brokerId"]) is not None:
            await _here(admin, ask, wanted)
        await admin.service.namespaces.clusters()
        if not admin.is_writable():
            free, reserved = admin.space()
            raise StorageFull(
                f"The storage takes no entries, because the disk was found nearly full. Now {free:.0f} bytes are free, of "
                f"which {reserved} are kept in reserve. Delete or expire data, or free space otherwise: it resumes by itself."
            )
        me = admin.ownership.broker_id
        if me not in [broker.broker_id for broker in await admin.ownership.brokers()]:
            raise NotReady(f"The broker {me} is not registered with the others at the moment; it serves no topics.")
        return "ok"

    @calls.get("/brokers/warnings", list[str], query=(which,), owner=True, statuses=(404,))
    async def warnings(ask: Ask) -> Any:
        """What an administrator should look at while the broker is healthy, as sentences."""
        if (wanted := ask.query["brokerId"]) is not None:
            await _here(admin, ask, wanted)
        return admin.warnings()

    @calls.get("/brokers/ready", str, is_text=True)
    async def ready(ask: Ask) -> Any:
        """`ok` as soon as the broker serves."""
        return "ok"

    @calls.get("/brokers/version", str, is_text=True)
    async def version(ask: Ask) -> Any:
        """Braid's version, as text."""
        return __version__


def _settings(admin: Admin, calls: Calls) -> None:
    @calls.get("/brokers/configuration", list[str])
    async def dynamic_names(ask: Ask) -> Any:
        """Settings that can change while the broker runs: none in this version."""
        return []

    @calls.get("/brokers/configuration/values", dict[str, str])
    async def dynamic_values(ask: Ask) -> Any:
        """Settings that were changed while the broker runs: none in this version."""
        return {}

    @calls.get("/brokers/configuration/runtime", dict[str, str])
    async def runtime_values(ask: Ask) -> Any:
        """Every setting of section `[broker]` with its value; there are no secrets among them."""
        values = msgspec.to_builtins(admin.service.config)
        return {key: str(value) for key, value in values.items()}

    def fixed(name: str) -> InvalidArgument:
        return InvalidArgument(f"The setting {name[:100]!r} cannot change while the broker runs; set it before the start.")

    @calls.post("/brokers/configuration/{name}/{value}")
    async def set_value(ask: Ask) -> None:
        """Refused with 412: no setting can change while the broker runs."""
        raise fixed(ask.text("name"))

    @calls.delete("/brokers/configuration/{name}")
    async def reset_value(ask: Ask) -> None:
        """Refused with 412: no setting can change while the broker runs."""
        raise fixed(ask.text("name"))

    @calls.get("/brokers/internal-configuration", dict[str, Any])
    async def internal_configuration(ask: Ask) -> Any:
        """How tools reach the stores: not at all, they are inside the process."""
        return {
            "metadataStoreUrl": None,
            "configurationMetadataStoreUrl": None,
            "ledgersRootPath": "/ledgers",
            "bookkeeperMetadataServiceUri": None,
            "stateStorageServiceUrl": None,
        }


def _stats(admin: Admin, calls: Calls) -> None:
    @calls.get("/broker-stats/topics", Json)
    async def topics(ask: Ask) -> Any:
        """Stats of the topics this broker has loaded, by namespace, bundle and domain."""
        owned, found = admin.ownership.owned(), Json()
        for number, topic in enumerate(list(admin.service.topics.values())):
            if number % TOPICS_AT_ONCE == TOPICS_AT_ONCE - 1:
                await asyncio.sleep(0)
            bundles: list[Bundle] = owned.get(topic.name.namespace, [])
            bundle = next((each for each in bundles if each.contains(hash_of(topic.name))), None)
            if bundle is None or topic.is_closing:
                continue
            by_bundle = found.setdefault(str(topic.name.namespace), {}).setdefault(str(bundle), {"persistent": {}})
            by_bundle.setdefault(str(topic.name.domain), {})[str(topic.name)] = topic_stats(admin, topic)
        return found

    @calls.get("/broker-stats/metrics", list[Json])
    async def metrics(ask: Ask) -> Any:
        """The broker's own metrics as JSON; `/metrics` has all of them for Prometheus."""
        return [{"dimensions": {"cluster": admin.clusters.own, "broker": admin.broker_id}, "metrics": Metrics(admin).totals()}]

    @calls.get("/broker-stats/load-report", Json)
    async def load_report(ask: Ask) -> Any:
        """Who this broker is and how much it serves."""
        topics = [topic for topic in admin.service.topics.values() if not topic.is_closing]
        owned = admin.ownership.owned()
        return {
            "webServiceUrl": admin.http_url,
            "pulsarServiceUrl": admin.service.service_url,
            "brokerVersionString": __version__,
            "startTimestamp": admin.service.started_ms,
            "persistentTopicsEnabled": True,
            "nonPersistentTopicsEnabled": False,
            "numTopics": len(topics),
            "numBundles": sum(map(len, owned.values())),
            "numProducers": sum(len(topic.producers) for topic in topics),
            "numConsumers": sum(len(each.consumers) for topic in topics for each in topic.subscriptions.values()),
            "bundles": [f"{name}/{bundle}" for name, bundles in owned.items() for bundle in bundles],
        }


def page_routes(admin: Admin, document: bytes, page: str) -> list[Any]:
    """Pages outside the API."""
    metrics = Metrics(admin)

    @get("/metrics", include_in_schema=False)
    async def scrape() -> Response[bytes]:
        return Response(await metrics.exposition(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    @get("/status.html", media_type=HTML, include_in_schema=False)
    async def status() -> str:
        return "OK"

    @get("/docs", include_in_schema=False)
    async def docs() -> Response[bytes]:
        return Response(page.encode(), media_type=HTML, headers={"content-security-policy": POLICY})

    @get(["/openapi.json", "/openapi/openapi.json"], include_in_schema=False)
    async def openapi() -> Response[bytes]:
        return Response(document, media_type="application/json")

    return [scrape, status, docs, openapi]
