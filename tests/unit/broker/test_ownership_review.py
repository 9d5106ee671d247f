"""Ownership at awkward moments: a session in doubt, splits and hand-overs that cross, brokers that leave, racing deletions."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from braid.broker.bundles import BundleLock
from braid.broker.ownership import BundleUnloading
from braid.broker.registry import BrokerInfo, Registry, broker_key
from braid.broker.topic import Topic
from braid.errors import BraidError, NotFound, NotReady, SessionLost
from braid.metadata.api import SessionState
from braid.metadata.locks import ResourceLocks
from braid.model.bundles import Bundle, find, hash_of, split_evenly
from braid.model.names import NamespaceName, TopicName
from braid.runtime.tasks import Tasks

PUBLIC = NamespaceName.parse("public/default")
BUNDLES = split_evenly(4)
NAMES = [TopicName.parse(f"t{number}") for number in range(40)]


def topic_in(bundle: Bundle) -> TopicName:
    return next(name for name in NAMES if bundle.contains(hash_of(name)))


async def two(world: Any, **settings: Any) -> list[Any]:
    return [await world.broker(balance=False, **settings) for _ in range(2)]


async def test_a_bundle_given_up_while_the_session_was_in_doubt_is_served_again(world: Any, until: Any) -> None:
    """The session was suspended for a moment and is fine again: its lock must not stay without anybody who serves it."""
    brokers = await two(world)
    topic = topic_in(BUNDLES[0])
    owner, other = brokers
    assert (await owner.ownership.find(topic, authoritative=True)).is_mine
    owner._handle._lease.state = SessionState.SUSPENDED
    await owner.ownership.unload(PUBLIC, BUNDLES[0])
    owner._handle._lease.state = SessionState.CONNECTED
    await world.advance(5.1)
    await until(lambda: not owner.ownership._locks._doubts)
    found = [await broker.ownership.find(topic, authoritative=True) for broker in (other, owner)]
    assert [each.broker.broker_id for each in found] == [other.ownership.broker_id] * 2


async def test_a_session_that_is_found_lost_late_does_not_cost_what_was_taken_since(world: Any, until: Any) -> None:
    broker = await world.broker(balance=False)
    topic = topic_in(BUNDLES[0])
    broker._handle.pause_heartbeat()
    ownership = broker.ownership
    lost = ownership._metadata.session
    broker.clock.pause()  # it notices nothing
    await world.clock.advance(11)
    assert lost.state is SessionState.LOST
    await ownership._registry.register()
    assert (await ownership.find(topic, authoritative=True)).is_mine
    broker._handle.resume_heartbeat()
    broker.clock.resume()
    for _ in range(50):
        await asyncio.sleep(0)
    await world.advance(6)
    assert (await ownership.find(topic)).is_mine


async def test_a_split_that_meets_an_unload_is_not_forgotten(world: Any, until: Any) -> None:
    broker = await world.broker(balance=False)
    topic = topic_in(BUNDLES[0])
    client = await broker.client()
    await client.producer(str(topic))
    world.ledgers.hold()
    client.publish(b"slow", 0)
    await client.settle()
    unloading = asyncio.ensure_future(broker.ownership.unload(PUBLIC, BUNDLES[0]))
    await until(lambda: not broker.ownership.owns(topic))
    splitting = asyncio.ensure_future(broker.ownership.split(PUBLIC, BUNDLES[0]))
    for _ in range(20):
        await asyncio.sleep(0)
    world.ledgers.release()
    await unloading
    try:
        await splitting
    except BundleUnloading:
        await broker.ownership.split(PUBLIC, BUNDLES[0])
    assert BUNDLES[0] not in await broker.ownership.bundles(PUBLIC)


async def test_a_split_under_a_lock_that_is_lost_is_not_said_to_be_done(world: Any) -> None:
    """Nothing is split then: somebody else may serve the bundle. The administrator hears it, and asks again."""
    owner = await world.broker(balance=False)
    assert (await owner.ownership.find(topic_in(BUNDLES[0]), authoritative=True)).is_mine
    owner._handle._lease.state = SessionState.SUSPENDED
    with pytest.raises(NotReady, match="was not split"):
        await owner.ownership.split(PUBLIC, BUNDLES[0])
    assert BUNDLES[0] in await owner.ownership.bundles(PUBLIC)
    assert owner.bundles == []
    owner._handle._lease.state = SessionState.CONNECTED
    await owner.ownership.split(PUBLIC, BUNDLES[0])
    assert BUNDLES[0] not in await owner.ownership.bundles(PUBLIC)


async def test_nobody_takes_a_bundle_while_it_is_split(world: Any) -> None:
    splitter, other = await two(world)
    topic = topic_in(BUNDLES[0])
    namespaces = splitter.service.namespaces
    split = namespaces.split_bundle

    async def crossed(namespace: NamespaceName, bundle: Bundle) -> None:
        with pytest.raises(BundleUnloading):
            await other.ownership.find(topic, authoritative=True)
        await split(namespace, bundle)

    namespaces.split_bundle = crossed
    await splitter.ownership.split(PUBLIC, BUNDLES[0])
    assert splitter.bundles == other.bundles == []
    found = await other.ownership.find(topic, authoritative=True)
    assert found.is_mine
    assert other.bundles == [str(find(await other.ownership.bundles(PUBLIC), hash_of(topic)))]


async def test_a_hint_to_a_bundle_that_was_just_split_brings_nothing(world: Any, until: Any) -> None:
    splitter, target = await two(world)
    holdings = target.ownership.holdings
    acquire = holdings.acquire

    async def crossed(namespace: NamespaceName, bundle: Bundle, me: Any) -> Any:
        if bundle in await splitter.ownership.bundles(PUBLIC):
            await splitter.service.namespaces.split_bundle(PUBLIC, bundle)
        return await acquire(namespace, bundle, me)

    holdings.acquire = crossed
    await splitter.ownership.unload(PUBLIC, BUNDLES[0], destination=target.ownership.broker_id)
    await until(lambda: target.ownership.holdings.moves)  # taken, and given back
    assert target.bundles == []
    assert not target.ownership._table.hints()


async def test_a_broker_that_leaves_stays_off_the_list(world: Any) -> None:
    leaving, other = await two(world)
    await leaving.ownership.leave()
    await leaving.ownership.reconcile()
    assert [info.broker_id for info in await other.ownership.brokers()] == [other.ownership.broker_id]


async def test_what_an_earlier_run_left_behind_sends_nobody_round_in_circles(world: Any) -> None:
    """A lock that names a broker which does not hold it: whoever else is asked sends clients to that broker."""
    restarted, other = await two(world)
    await restarted.ownership.find(topic_in(BUNDLES[1]), authoritative=True)  # so that the other one has fewer
    me = restarted.ownership.me
    left = BundleLock(broker_id=me.broker_id, native_url=me.service_url, http_url="", incarnation="earlier")
    grave = world.metadata.handle("earlier", clock=world.clock)
    await grave.put(f"/namespace/public/default/{BUNDLES[0]}", msgspec.json.encode(left), ephemeral=True)
    topic = topic_in(BUNDLES[0])
    assert (await other.ownership.find(topic)).broker.broker_id == me.broker_id
    assert (await restarted.ownership.find(topic)).is_mine
    await grave.close()


async def test_taking_many_bundles_costs_each_of_them_a_few_looks(world: Any) -> None:
    handle = world.metadata.handle("many", clock=world.clock)
    locks = ResourceLocks(handle, world.clock)
    looks = 0
    get = handle.get

    async def counted(key: str, **options: Any) -> Any:
        nonlocal looks
        looks += 1
        return await get(key, **options)

    handle.get = counted
    for number in range(300):
        await locks.acquire(f"/many/{number}", b"me")
    for _ in range(20):
        await asyncio.sleep(0)
    assert looks < 5 * 300
    handle.get = get
    await locks.close()
    await handle.close()


async def test_a_killed_broker_does_nothing_more(world: Any) -> None:
    broker, other = await two(world)
    await broker.ownership.find(topic_in(BUNDLES[0]), authoritative=True)
    await broker.server.kill()
    broker._handle.pause_heartbeat()
    broker.is_down = True
    for _ in range(20):
        await asyncio.sleep(0)
    ownership = broker.ownership
    assert not len(ownership._tasks)
    assert not len(ownership._locks._tasks)
    assert not len(ownership.leading._election._tasks)
    assert not len(broker.service._tasks)
    rows = dict(world.metadata.tables.rows)
    await world.advance(5)
    assert {key for key in rows if "loadbalance/brokers" in key} <= set(world.metadata.tables.rows)
    await world.advance(6)
    assert (await other.ownership.find(topic_in(BUNDLES[0]), authoritative=True)).is_mine


async def test_a_topic_that_was_lost_is_closed_whole_with_deduplication(world: Any, until: Any) -> None:
    broker = await world.broker(balance=False, deduplication=True)
    client = await broker.client()
    await client.producer("t", name="p")
    await client.store(b"1", 0)
    topic = broker.topic("t")
    broker.service.abandon_bundle(PUBLIC, find(BUNDLES, hash_of(topic.name)))
    await until(lambda: not broker.service.topics and not broker.service._closing)
    assert topic.log.is_closed


@pytest.mark.parametrize("kind", ["plain", "partitioned", "used"])
async def test_no_topic_is_left_in_a_namespace_that_is_deleted_meanwhile(world: Any, kind: str) -> None:
    deleter, creator = await two(world)
    namespace = NamespaceName.parse("public/gone")
    name = TopicName.parse("public/gone/t")
    await deleter.service.namespaces.create_namespace(namespace, {})
    await creator.ownership.find(name, authoritative=True)
    stages: dict[str, Any] = {
        "plain": lambda: creator.service.create_topic(name),
        "partitioned": lambda: creator.service.create_partitioned(name, 2),
        "used": lambda: creator.service.topic(name, create=True),
    }
    for steps in range(60):
        creating = asyncio.ensure_future(stages[kind]())
        for _ in range(steps):
            await asyncio.sleep(0)
        deleted = created = True
        try:
            await deleter.service.delete_namespace(namespace)
        except BraidError:
            deleted = False
        try:
            await creating
        except BraidError:
            created = False
        keys = [key for key in world.metadata.tables.rows if "public/gone" in key]
        left = [key for key in keys if key.startswith(("/managed-ledgers", "/admin/partitioned-topics"))]
        assert not (deleted and created), f"after {steps} steps"
        assert not (deleted and left), f"after {steps} steps: {left}"
        assert created == bool(left), f"after {steps} steps"
        if deleted:
            await deleter.service.namespaces.create_namespace(namespace, {})
        if created:
            return
    raise AssertionError("the creation never won")


@pytest.mark.parametrize("kind", ["plain", "used"])
async def test_a_name_is_never_a_plain_and_a_partitioned_topic(world: Any, kind: str) -> None:
    """Created at the same time by two brokers: at most one gets it."""
    one, other = await two(world)
    await one.ownership.find(TopicName.parse("n0"), authoritative=True)
    for steps in range(40):
        name = TopicName.parse(f"n{steps}")
        await one.ownership.find(name, authoritative=True)
        owner = one if one.ownership.owns(name) else other
        plain: Any = owner.service.topic(name, create=True) if kind == "used" else one.service.create_topic(name)
        creating = asyncio.ensure_future(plain)
        for _ in range(steps):
            await asyncio.sleep(0)
        results = await asyncio.gather(other.service.create_partitioned(name, 2), creating, return_exceptions=True)
        is_partitioned = await other.service.namespaces.partitions(name) is not None
        is_plain = await other.service.logs.exists(name.managed_ledger_name)
        refused = [isinstance(each, BraidError) for each in results]
        assert [is_partitioned, is_plain] == [not each for each in refused], f"after {steps} steps: {results}"
        assert not (is_partitioned and is_plain), f"after {steps} steps"


async def test_a_partition_that_was_deleted_is_not_made_anew_before_the_others_are(world: Any) -> None:
    broker = await world.broker(balance=False)
    name = TopicName.parse("p")
    await broker.service.create_partitioned(name, 3)
    logs = broker.service.logs
    delete = logs.delete

    async def crossed(log_name: str, properties: Any = None) -> None:
        await delete(log_name)
        with pytest.raises((NotFound, NotReady)):
            await broker.service.topic(name.partition(0), create=True)  # its producer came back at once

    logs.delete = crossed
    await broker.service.delete_partitioned(name, force=True)
    assert await broker.service.list_topics(PUBLIC) == []


async def test_a_start_that_took_longer_than_its_session_is_tried_again(world: Any) -> None:
    """But not at once: the session is good again only when a heartbeat has had its turn."""
    broker = await world.broker(balance=False)
    metadata, clock = broker.ownership._metadata, broker.clock
    locks = ResourceLocks(metadata, clock)
    honest, began = locks.acquire, clock.monotonic()

    async def slow(*args: Any, **options: Any) -> Any:
        if clock.monotonic() - began < 1.0:
            raise SessionLost("The session ran out.")
        return await honest(*args, **options)

    locks.acquire = slow  # type: ignore[method-assign]
    registry = Registry(metadata, clock, locks)
    tasks = Tasks("test")
    info = BrokerInfo(broker_id="late:1", service_url="pulsar://late:2", http_url="http://late:1")
    starting = asyncio.create_task(registry.start(info, tasks))
    await world.advance(1.1)
    await starting
    assert registry.is_registered
    assert [each.broker_id for each in registry.live() if each.broker_id == "late:1"] == ["late:1"]
    await tasks.close()
    await locks.close()


@pytest.mark.inv("INV15")
async def test_a_broker_whose_name_another_one_took_goes_on_comparing_what_it_holds(world: Any) -> None:
    """A second one was started under its name. It cannot register any more, but what it serves must not go by watches alone."""
    broker = await world.broker(balance=False)
    ownership, topic = broker.ownership, topic_in(BUNDLES[0])
    assert (await ownership.find(topic, authoritative=True)).is_mine
    namesake = await world.broker(balance=False)
    key = broker_key(ownership.broker_id)
    await namesake.service.metadata.delete(key)
    await namesake.service.metadata.put(key, msgspec.json.encode(ownership.me), ephemeral=True)
    assert not await ownership._registry._lock.check()
    held = ownership.holdings.holding(PUBLIC, hash_of(topic))
    held.lock.on_lost = None  # nobody tells
    held.lock.end()
    assert ownership.holdings.all() == [held]
    await ownership.reconcile()
    assert ownership.holdings.all() == []


async def test_a_bundle_is_given_up_after_what_is_being_loaded_of_it(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the load would claim the log under the next owner's feet, whose copy would be outdated from then on."""
    owner, other = await two(world)
    topic = topic_in(BUNDLES[0])
    assert (await owner.ownership.find(topic, authoritative=True)).is_mine
    honest, begun, may_end = Topic.opened, asyncio.Event(), asyncio.Event()

    async def opened(loaded: Topic, managed: Any, **options: Any) -> None:
        if loaded.service is owner.service:
            begun.set()
            await may_end.wait()
        await honest(loaded, managed, **options)

    monkeypatch.setattr(Topic, "opened", opened)
    loading = asyncio.ensure_future(owner.service.topic(topic, create=True))
    await begun.wait()
    unloading = asyncio.ensure_future(owner.ownership.unload(PUBLIC, BUNDLES[0]))
    try:
        for _turn in range(50):
            await asyncio.sleep(0)
        assert not unloading.done()
        with pytest.raises(BundleUnloading):
            await other.ownership.find(topic, authoritative=True)
    finally:
        may_end.set()
    with pytest.raises(NotReady):
        await loading
    await unloading
    assert not owner.service.topics
    assert (await other.ownership.find(topic, authoritative=True)).is_mine
