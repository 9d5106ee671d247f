"""The record of one cursor of a regular topic cannot be read: its own subscription is refused by name, the others go on, and
the administrator sees it and removes it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from braid.testing.broker import BackgroundBroker

TOPIC = "/admin/v2/persistent/public/default/spoilt"
KEY = "/managed-ledgers/public/default/persistent/spoilt/bad"


@pytest.fixture
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


def spoil(broker: BackgroundBroker, key: str) -> None:
    async def put() -> None:
        handle = broker.broker.standalone.metadata.handle("somebody")
        await handle.put(key, b'{"position":"x"}')
        await handle.close()

    broker.run(put())


def names_it(answer: httpx.Response) -> bool:
    return answer.status_code == 503 and KEY in answer.text and "delete the subscription bad" in answer.text


def test_it_is_shown_and_removed(broker: BackgroundBroker) -> None:
    with httpx.Client(base_url=broker.http_url, timeout=30) as http:
        assert http.put(TOPIC).status_code == 204
        for name in ("bad", "good"):
            assert http.put(f"{TOPIC}/subscription/{name}").status_code == 204
        assert http.put(f"{TOPIC}/unload").status_code == 204
        spoil(broker, KEY)
        assert http.get(f"{TOPIC}/subscriptions").json() == ["bad", "good"]
        found = http.get(f"{TOPIC}/stats").json()["subscriptions"]
        [why] = found["bad"]["blocked_by"]
        assert why["kind"] == "unreadable-record" and KEY in why["detail"]["error"]
        assert found["good"]["blocked_by"] == []
        assert names_it(http.put(f"{TOPIC}/subscription/bad"))
        assert names_it(http.post(f"{TOPIC}/subscription/bad/skip_all"))
        assert http.post(f"{TOPIC}/subscription/good/skip_all").status_code == 204
        assert http.delete(f"{TOPIC}/subscription/bad").status_code == 204
        assert http.get(f"{TOPIC}/subscriptions").json() == ["good"]
        assert http.put(f"{TOPIC}/subscription/bad").status_code == 204
        assert http.get(f"{TOPIC}/stats").json()["subscriptions"]["bad"]["blocked_by"] == []


def test_deleting_it_from_all_topics_of_a_namespace_removes_it_too(broker: BackgroundBroker) -> None:
    with httpx.Client(base_url=broker.http_url, timeout=30) as http:
        assert http.put(TOPIC).status_code == 204
        assert http.put(f"{TOPIC}/subscription/bad").status_code == 204
        assert http.put(f"{TOPIC}/unload").status_code == 204
        spoil(broker, KEY)
        assert http.post("/admin/v2/namespaces/public/default/unsubscribe/bad").status_code == 204
        assert http.get(f"{TOPIC}/subscriptions").json() == []
