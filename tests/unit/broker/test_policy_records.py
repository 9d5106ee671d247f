"""The record of one namespace that cannot be read costs that namespace only: the brokers' other work goes on, and the error
names the record."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from braid.broker.bundles import lock_key
from braid.broker.dedup import CURSOR_NAME
from braid.errors import StoreMismatch
from braid.model.bundles import split_evenly
from braid.model.names import NamespaceName, TopicName

RECONCILE = 5.0
PUBLIC = NamespaceName.parse("public/default")
ODD = NamespaceName.parse("public/odd")
KEY = "/admin/namespaces/public/odd"
NONSENSE = pytest.mark.parametrize(
    "nonsense",
    [
        b"{",
        b"[]",
        b'{"retention_policies": "x"}',
        b'{"retention_policies": {"retentionTimeInMinutes": "x"}}',
        b'{"bundles": {"boundaries": 7}}',
        b'{"bundles": {"boundaries": ["0x00000000", "x"]}}',
        b'{"bundles": []}',
        b'{"autoTopicCreationOverride": 7}',
        b'{"autoSubscriptionCreationOverride": 7}',
    ],
)


@pytest.fixture(autouse=True)
async def odd(world: Any, broker: Any) -> None:
    """A namespace of whose topics one is loaded, before that of another namespace."""
    await broker.service.namespaces.create_namespace(ODD, {})
    for name in ("persistent://public/odd/t", "t"):
        await broker.service.topic(TopicName.parse(name), create=True)


@NONSENSE
@pytest.mark.inv("INV15")
async def test_policies_of_other_namespaces_are_followed(
    world: Any, broker: Any, until: Any, caplog: pytest.LogCaptureFixture, nonsense: bytes
) -> None:
    await broker.service.metadata.put(KEY, nonsense)
    await world.advance(2 * RECONCILE)
    policy = {"retentionTimeInMinutes": 5, "retentionSizeInMB": -1}
    await broker.service.namespaces.set_policy(PUBLIC, "retention_policies", policy)
    await world.advance(2 * RECONCILE)
    await until(lambda: broker.topic("persistent://public/default/t").log.limits == (5, -1, 0))
    assert not [each for each in caplog.records if each.exc_info], "no task has failed"


@NONSENSE
async def test_who_asks_is_told_which_record(broker: Any, nonsense: bytes) -> None:
    await broker.service.metadata.put(KEY, nonsense)
    with pytest.raises(StoreMismatch, match=KEY):
        policies = await broker.service.namespaces.policies(ODD)
        _read = policies.bundles, policies.limits, policies.auto_topic_creation, policies.auto_subscription_creation


@pytest.mark.inv("INV15")
async def test_hand_overs_of_other_bundles_go_on(world: Any, broker: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    other = await world.broker(balance=False)
    await broker.service.metadata.put(KEY, b'{"bundles": []}')
    (bundle, *_rest) = broker.ownership.owned()[PUBLIC]
    for each in split_evenly(4):  # hints for the namespace that cannot be read come first
        await broker.ownership._table.put_hint(lock_key(ODD, each), other.ownership.broker_id)
    await broker.ownership.unload(PUBLIC, bundle, destination=other.ownership.broker_id)
    await world.advance(2 * RECONCILE)
    assert bundle in other.ownership.owned().get(PUBLIC, [])
    assert not [each for each in caplog.records if "cannot be compared" in each.message]


@pytest.mark.inv("INV15")
async def test_a_topic_that_cannot_follow_a_policy_keeps_it_from_no_other(
    world: Any, broker: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What deduplication remembers of one topic cannot be read: the others of its namespace are deduplicated all the same."""
    spoilt, other = broker.topic("persistent://public/default/t"), TopicName.parse("later")
    await broker.service.unload(spoilt)
    key = f"{spoilt.log._record.key}/{CURSOR_NAME}"
    await broker.service.metadata.put(key, b"{")
    await broker.service.topic(spoilt.name, create=False)
    await broker.service.topic(other, create=True)
    await broker.service.namespaces.set_policy(PUBLIC, "deduplicationEnabled", True)
    await world.advance(2 * RECONCILE)
    await until(lambda: broker.topic(str(other)).dedup is not None)
    assert broker.topic(str(spoilt.name)).dedup is None
    assert [each for each in caplog.records if "tried again" in each.message and key in each.message]
    await broker.service.metadata.delete(key)
    await broker.service.unload(broker.topic(str(spoilt.name)))
    assert (await broker.service.topic(spoilt.name, create=False)).dedup is not None


@pytest.mark.parametrize("key", ["/admin/namespaces/odd", f"{KEY}/below", "/admin/namespaces/public/%FF"])
async def test_a_record_whose_key_is_no_namespaces_is_passed_over(
    broker: Any, until: Any, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    """The watch goes on: changes are followed at once, and not only when policies are compared."""
    await broker.service.metadata.put(key, b"{}")
    policy = {"retentionTimeInMinutes": 5, "retentionSizeInMB": -1}
    await broker.service.namespaces.set_policy(PUBLIC, "retention_policies", policy)
    try:
        await until(lambda: broker.topic("persistent://public/default/t").log.limits == (5, -1, 0))
        assert not [each for each in caplog.records if each.exc_info], "no task has failed"
    finally:
        await broker.service.metadata.delete(key)


@pytest.mark.inv("INV15")
@pytest.mark.parametrize("key", ["a", "odd/0x00000000_0x40000000", "public/default/all", "public/%FF/0x00000000_0x40000000"])
async def test_a_hint_whose_key_is_no_bundles_keeps_no_hand_over_waiting(
    world: Any, broker: Any, until: Any, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    other = await world.broker(balance=False)
    hint = f"/loadbalance/hints/{key}"
    await broker.service.metadata.put(hint, b'{"brokerId":"%s"}' % other.ownership.broker_id.encode())
    (bundle, *_rest) = broker.ownership.owned()[PUBLIC]
    try:
        await broker.ownership.unload(PUBLIC, bundle, destination=other.ownership.broker_id)
        await until(lambda: bundle in other.ownership.owned().get(PUBLIC, []))
        await world.advance(2 * RECONCILE)
        assert not [each for each in caplog.records if "cannot be compared" in each.message or "wait for" in each.message]
    finally:
        await broker.service.metadata.delete(hint)
