"""The table of admin operations against everything made from it: the asynchronous client, the blocking one, the broker."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from string import Formatter
from typing import Any, get_type_hints

import httpx
import pytest

from braid.client import admin, admin_namespaces, admin_scalable, admin_sinks, admin_topics, admin_transactions, blocking_admin
from braid.client.operations import OPERATIONS, Operation, operations_of
from braid.testing.broker import BackgroundBroker

GROUPS: dict[str, type] = {
    "clusters": admin.Clusters,
    "tenants": admin.Tenants,
    "namespaces": admin_namespaces.Namespaces,
    "topics": admin_topics.Topics,
    "subscriptions": admin_topics.Subscriptions,
    "brokers": admin.Brokers,
    "bundles": admin.Bundles,
    "scalable-topics": admin_scalable.ScalableTopics,
    "segments": admin_scalable.Segments,
    "transactions": admin_transactions.Transactions,
    "sinks": admin_sinks.Sinks,
}


def public(cls: type) -> dict[str, Any]:
    return {name: method for name, method in vars(cls).items() if callable(method) and not name.startswith("_")}


def test_every_operation_has_its_method_and_every_method_its_operation() -> None:
    in_table = {(each.noun, each.method_name) for each in OPERATIONS}
    in_client = {(noun, name) for noun, cls in GROUPS.items() for name in public(cls)}
    assert in_table == in_client


def test_the_parts_of_a_path_come_from_the_methods_arguments() -> None:
    parts_of = {
        "namespace": {"tenant", "namespace"},
        "topic": {"domain", "tenant", "namespace", "topic"},
        "message_id": {"ledger", "entry"},
        "to": {"timestamp"},
        "segment": {"tenant", "namespace", "topic", "descriptor"},
        "transaction": {"most", "least"},
        "sink": {"sink"},
    }
    for each in OPERATIONS:
        parts = {name for _, name, _, _ in Formatter().parse(each.path) if name}
        arguments = list(inspect.signature(getattr(GROUPS[each.noun], each.method_name)).parameters)[1:]
        given = {part for name in arguments for part in {name} | parts_of.get(name, set())}
        assert parts - given <= {"cluster"}, each.name  # the cluster of a broker is found, not given


def test_no_two_operations_are_the_same_call() -> None:
    seen: dict[tuple[str, str], Operation[Any]] = {}
    for each in OPERATIONS:
        before = seen.setdefault((each.method, each.path), each)
        assert before is each or {before.name, each.name} == {"bundles unload", "bundles transfer"}


def test_operations_are_described_like_sentences() -> None:
    for each in OPERATIONS:
        assert each.summary.endswith("."), each.name
        assert "|" not in each.summary
        first = operations_of(each.noun, each.verb)[0]
        if first is each and each.is_destructive:
            assert "--yes" in each.example, each.name
        assert first.is_destructive == each.is_destructive
        assert (each.body is None) or each.method in ("PUT", "POST")


def test_what_is_repeated_after_a_lost_answer() -> None:
    assert all(each.is_repeatable for each in OPERATIONS if each.method == "GET")
    assert all(each.is_repeatable for each in OPERATIONS if each.noun == "segments")  # brokers repeat them (INV6)
    never = {"topics create", "topics delete", "subscriptions create", "subscriptions delete", "subscriptions skip"}
    never |= {f"scalable-topics {verb}" for verb in ("create", "delete", "split-segment", "merge-segments")}
    assert not any(each.is_repeatable for each in OPERATIONS if each.name in never)


def test_the_blocking_client_is_the_same_client() -> None:
    for noun, cls in GROUPS.items():
        waiting = getattr(blocking_admin, cls.__name__)
        assert list(public(waiting)) == list(public(cls)), noun
        for name, method in public(cls).items():
            assert inspect.signature(getattr(waiting, name)) == inspect.signature(method)
            assert getattr(waiting, name).__doc__ == method.__doc__
            assert not inspect.iscoroutinefunction(getattr(waiting, name))
            assert "return" in get_type_hints(method)
    ours, theirs = inspect.signature(blocking_admin.AdminClient), inspect.signature(admin.AdminClient)
    assert [str(each) for each in ours.parameters.values()] == [str(each) for each in theirs.parameters.values()]


# The broker's own list of calls.

NAMESPACE = r"/admin/v2/namespaces/\{tenant\}/\{namespace\}"
TOPIC = r"/admin/v2/persistent/\{tenant\}/\{namespace\}/\{topic\}"
NOT_OFFERED = {
    r"GET /admin/v2/brokers/\{cluster\}": "the brokers of this cluster are `brokers list`",
    r"\w+ /admin/v2/brokers/configuration(?!/runtime).*": "settings that change while the broker runs; there are none",
    r"GET /admin/v2/brokers/internal-configuration": "for Pulsar's own tools",
    r"POST /admin/v2/brokers/shutdown": "always refused: a broker is stopped by whoever started it",
    r"GET /admin/v2/broker-stats/metrics": "metrics are scraped at /metrics",
    rf"\w+ {NAMESPACE}/property/.*": "single properties; `namespaces properties` has all",
    rf"\w+ {NAMESPACE}/permissions/(subscription.*|\{{subscription\}}/.*)": "comes with authentication",
    rf"\w+ {NAMESPACE}/(replication|allowedClusters)": "comes with several clusters",
    rf"\w+ {NAMESPACE}/\{{policy\}}": "policies that nothing applies yet",
    rf"GET {NAMESPACE}/\{{bundle\}}/topicHashPositions": "for Pulsar's own tools",
    rf"\w+ {TOPIC}/\{{topic_policy\}}": "policies that nothing applies yet",
    rf"\w+ {TOPIC}/compaction": "topics are not compacted yet",
    rf"GET {TOPIC}/internal-info": "for Pulsar's own tools; `topics internal-stats` has more",
    rf"PUT {TOPIC}/backlogSize": "for Pulsar's own tools; `topics stats` has the backlog",
    rf"GET {TOPIC}/(examinemessage|getMessageIdByIndex|messageid/\{{timestamp\}})": "`reset` takes times, `peek` reads",
    rf"POST {TOPIC}/subscription/\{{subscription\}}/expireMessages": "`subscriptions reset` goes to a message",
    rf"POST {TOPIC}/subscription/\{{subscription\}}/analyzeBacklog": "for Pulsar's own tools; `topics stats` has the backlog",
    r"GET /admin/v2/non-persistent/.*": "for Pulsar's own tools: there are no such topics",
}
"""Calls of the broker that the client does not make, with the reason."""


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


def _shape(path: str) -> str:
    return re.sub(r"\{[^}]*\}", "{}", path)


def test_the_broker_takes_what_the_client_sends(broker: BackgroundBroker) -> None:
    document = httpx.get(f"{broker.http_url}/openapi/openapi.json").json()
    calls = {
        (method.upper(), _shape(path)): call for path, methods in document["paths"].items() for method, call in methods.items()
    }
    for each in OPERATIONS:
        call = calls[each.method, _shape(each.path)]
        known = {parameter["name"] for parameter in call.get("parameters", []) if parameter["in"] == "query"}
        assert set(each.query) <= known, each.name
        assert (each.body is not None) <= ("requestBody" in call), each.name


def test_the_broker_has_every_operation_and_the_client_every_call(broker: BackgroundBroker) -> None:
    document = httpx.get(f"{broker.http_url}/openapi/openapi.json").json()
    served = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    shapes = {(method, _shape(path)) for method, path in served}
    missing = [f"{each.method} {each.path}" for each in OPERATIONS if (each.method, _shape(each.path)) not in shapes]
    assert missing == []
    made = {(each.method, _shape(each.path)) for each in OPERATIONS}
    left = [f"{method} {path}" for method, path in sorted(served) if (method, _shape(path)) not in made]
    unexplained = [call for call in left if not any(re.fullmatch(pattern, call) for pattern in NOT_OFFERED)]
    assert unexplained == []
    stale = [pattern for pattern in NOT_OFFERED if not any(re.fullmatch(pattern, call) for call in left)]
    assert stale == []
