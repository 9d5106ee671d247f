"""An owner knows that it is one: every loaded log is compared with its record, what decides on "sealed" and "drained" asks the
record, and a broker whose bundle went to another one serves nothing that it opens after that (INV2, INV15)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from tests.unit.broker.test_segments import LEADER, create, names, put, record_of

from braid.broker.bundles import lock_key
from braid.broker.log_owners import LOOKED_AT_ONCE
from braid.broker.ownership import OwnedElsewhere
from braid.broker.topic import Topic
from braid.errors import BraidError, LedgerFenced, NotReady, StoreUnavailable
from braid.metadata.handle import CAPABILITIES
from braid.model.bundles import find, hash_of, split_evenly
from braid.model.layout import SegmentLayout
from braid.model.names import NamespaceName, TopicName
from braid.model.positions import EARLIEST, LATEST
from braid.testing.raw_client import RawClient, payload_of
from braid.wire.types import CommandType, InitialPosition, SubType

TOPIC = TopicName.parse("t")
BUNDLE = find(split_evenly(4), hash_of(TOPIC))
PUBLIC = NamespaceName.parse("public/default")
RECONCILE = 5.0
"""Seconds between two rounds, as set by default; each log is looked at within two."""


async def reopened(broker: Any, topic: TopicName = TOPIC) -> Topic:
    """The topic, loaded again: no ledger of it is open for writing, so nothing tells its owner that another one fenced it."""
    await broker.service.unload(await broker.service.topic(topic, create=True))
    found = await broker.service.topic(topic, create=False)
    assert isinstance(found, Topic)
    return found


async def usurped(world: Any, topic: TopicName = TOPIC) -> tuple[Any, Topic]:
    """The log as opened by another broker, which takes it for its own."""
    other = await world.broker(believes=True)
    return other, await other.service.topic(topic, create=False)


@pytest.mark.inv("INV15", "INV2")
async def test_a_stale_copy_is_dropped_within_the_bound_and_its_clients_are_sent_away(
    world: Any, broker: Any, until: Any
) -> None:
    stale = await reopened(broker)
    client = await broker.client()
    await client.producer(str(TOPIC), name="p")
    await client.subscribe(str(TOPIC), "sub", sub_type=SubType.SHARED, consumer_id=1)
    await client.subscribe(str(TOPIC), "reader", consumer_id=2, durable=False)
    other, theirs = await usurped(world)
    await theirs.terminate()
    await other.service.unload(theirs)
    assert not stale.log.is_fenced, "nothing has told it"
    await world.advance(2 * RECONCILE)
    await client.expect(CommandType.CLOSE_PRODUCER)
    assert {(await client.expect(CommandType.CLOSE_CONSUMER)).consumer_id for _ in range(2)} == {1, 2}
    await until(lambda: broker.service.topics.get(str(TOPIC)) is not stale)
    assert (await broker.service.topic(TOPIC, create=False)).log.is_terminated


@pytest.mark.inv("INV15")
async def test_what_another_owner_stored_reaches_consumers_without_a_publish(world: Any, broker: Any, until: Any) -> None:
    stale = await reopened(broker)
    client = await broker.client()
    await client.subscribe(str(TOPIC), permits=10, initial=InitialPosition.EARLIEST)
    other, _theirs = await usurped(world)
    writer = await other.client()
    await writer.producer(str(TOPIC), name="p")
    await writer.store(b"from there", 0)
    await other.stop()
    await world.advance(2 * RECONCILE)
    await client.expect(CommandType.CLOSE_CONSUMER)
    await until(lambda: broker.service.topics.get(str(TOPIC)) is not stale)
    await client.subscribe(str(TOPIC), permits=10)
    assert [payload_of(each) for each in await client.messages(1)] == [b"from there"]


@pytest.mark.inv("INV15")
async def test_an_unreachable_store_drops_nothing(world: Any, broker: Any, until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = await reopened(broker)
    other, theirs = await usurped(world)
    await theirs.terminate()
    await other.stop()
    with monkeypatch.context() as patched:

        async def refuse(*args: Any, **options: Any) -> Any:
            raise StoreUnavailable("The metadata store does not answer.")

        patched.setattr(broker.service.metadata, "get", refuse)
        await world.advance(2 * RECONCILE)
        assert broker.service.topics[str(TOPIC)] is stale
        assert not stale.is_closing
    await world.advance(2 * RECONCILE)
    await until(lambda: broker.service.topics.get(str(TOPIC)) is not stale)


@pytest.mark.inv("INV15", "INV17")
async def test_many_logs_are_looked_at_a_few_at_a_time(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = await world.broker(scalable=None, balance=False)
    topics = [TopicName.parse(f"many-{number}") for number in range(3 * LOOKED_AT_ONCE)]
    for each in topics:
        await broker.service.topic(each, create=True)
    await world.advance(RECONCILE)
    looks: dict[float, int] = {}
    honest = broker.service.metadata.get
    keys = {broker.service.topics[str(each)].log._record.key for each in topics}

    async def counted(key: str, **options: Any) -> Any:
        if key in keys:
            now = world.clock.monotonic()
            looks[now] = looks.get(now, 0) + 1
        return await honest(key, **options)

    monkeypatch.setattr(broker.service.metadata, "get", counted)
    for _step in range(20):
        await world.advance(RECONCILE / 10)
    assert max(looks.values()) <= LOOKED_AT_ONCE
    assert sum(looks.values()) >= 2 * len(topics) - LOOKED_AT_ONCE, "each of them once in a round"


@pytest.mark.inv("INV2")
async def test_a_former_owner_that_does_not_know_serves_nothing_that_it_opens(world: Any, until: Any) -> None:
    former, owner = [await world.broker(balance=False) for _ in range(2)]
    assert (await former.ownership.find(TOPIC, authoritative=True)).is_mine
    await reopened(former)
    await former.service.unload(former.topic(str(TOPIC)))
    key = lock_key(PUBLIC, BUNDLE)
    former.ownership._locks._listeners[key].cancel()  # nobody tells it that its lock is gone
    await owner.service.metadata.delete(key)
    assert (await owner.ownership.find(TOPIC, authoritative=True)).is_mine
    served = await owner.service.topic(TOPIC, create=False)
    assert former.ownership.owns(TOPIC)
    with pytest.raises(NotReady, match="look it up again"):
        await former.service.topic(TOPIC, create=False)
    assert not former.service.topics
    assert not former.ownership.owns(TOPIC), "it has found out"
    await world.advance(2 * RECONCILE)  # the claim was in vain, and the rightful owner's copy is loaded anew
    await until(lambda: owner.service.topics.get(str(TOPIC)) is not served)
    assert not (await owner.service.topic(TOPIC, create=False)).log.is_fenced


@pytest.mark.inv("INV2")
async def test_a_log_taken_over_while_it_is_loaded_is_not_served(
    world: Any, broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reopened(broker)
    await broker.service.unload(broker.topic(str(TOPIC)))
    honest = Topic.opened

    async def opened(topic: Topic, managed: Any, **options: Any) -> None:
        await honest(topic, managed, **options)
        if topic.service is broker.service:
            monkeypatch.setattr(Topic, "opened", honest)
            await usurped(world)
            with pytest.raises(LedgerFenced):
                await managed.check_owner()

    monkeypatch.setattr(Topic, "opened", opened)
    with pytest.raises(NotReady):
        await broker.service.topic(TOPIC, create=False)
    assert not broker.service.topics


class Sealing:
    """A segment whose owner has a stale copy of it."""

    def __init__(self, world: Any, broker: Any, segment: TopicName) -> None:
        self.world = world
        self.broker = broker
        self.segment = segment
        self.local = broker.service.local_segments


@pytest.fixture
async def sealing(world: Any, broker: Any) -> Sealing:
    layout = SegmentLayout.initial(1, 1)
    segment = names(layout)[0]
    await put(world, record_of(layout))
    await create(broker, segment, subscriptions={"sub": "earliest"})
    await reopened(broker, segment)
    return Sealing(world, broker, segment)


async def behind_its_back(sealing: Sealing, work: Any) -> None:
    """Another owner does something to the segment, and the layout shows it sealed."""
    other, theirs = await usurped(sealing.world, sealing.segment)
    await work(theirs)
    await other.stop()


@pytest.mark.inv("INV15")
@pytest.mark.parametrize("question", ["backlog", "stats"])
async def test_a_leader_that_asks_a_stale_copy_gets_the_answer_of_a_fresh_one(sealing: Sealing, question: str) -> None:
    """The owner drops its copy; the call is made again, and not given up."""
    await behind_its_back(sealing, Topic.terminate)
    ask = getattr(sealing.broker.service.segments, question)
    asked = asyncio.ensure_future(ask(sealing.segment, "sub") if question == "backlog" else ask(sealing.segment))
    async with asyncio.timeout(10):
        while not asked.done():
            await sealing.world.advance(0.1)
    assert (await asked).is_terminated


@pytest.mark.inv("INV8", "INV15")
@pytest.mark.parametrize("question", ["backlog", "stats"])
async def test_a_segment_sealed_behind_its_owners_back_is_found_to_be_sealed(sealing: Sealing, question: str) -> None:
    await behind_its_back(sealing, Topic.terminate)
    given = ["sub"] if question == "backlog" else []
    ask = getattr(sealing.local, question)
    with pytest.raises(BraidError):
        await ask(sealing.segment, *given)
    assert (await ask(sealing.segment, *given)).is_terminated


@pytest.mark.inv("INV8", "INV15")
async def test_a_segment_reset_behind_its_owners_back_is_not_said_to_be_drained(sealing: Sealing) -> None:
    topic = sealing.broker.topic(str(sealing.segment))
    client: RawClient = await sealing.broker.client()
    await client.producer(str(sealing.segment))
    await client.store(b"x", 0)
    await topic.terminate()
    await topic.subscriptions["sub"].seek(LATEST)
    assert (await sealing.local.backlog(sealing.segment, "sub")).is_drained

    async def reset(theirs: Topic) -> None:
        await theirs.subscriptions["sub"].seek(EARLIEST)

    await behind_its_back(sealing, reset)
    with pytest.raises(BraidError):
        await sealing.local.backlog(sealing.segment, "sub")
    assert (await sealing.local.backlog(sealing.segment, "sub")).messages == 1


@pytest.mark.inv("INV7", "INV15")
async def test_cursors_that_another_owner_made_or_removed_are_not_missed(sealing: Sealing) -> None:
    async def change(theirs: Topic) -> None:
        await theirs.subscription("theirs", is_durable=True, start=None, initial=EARLIEST)
        await theirs.delete_subscription("sub")

    await behind_its_back(sealing, change)
    with pytest.raises(BraidError):
        await sealing.local.subscriptions(sealing.segment)
    assert await sealing.local.subscriptions(sealing.segment) == ["theirs"]
    await behind_its_back(sealing, lambda theirs: theirs.delete_subscription("theirs"))
    with pytest.raises(BraidError):
        await sealing.local.create_subscription(sealing.segment, "theirs", "earliest", **LEADER)
    await sealing.local.create_subscription(sealing.segment, "theirs", "earliest", **LEADER)
    assert await sealing.local.subscriptions(sealing.segment) == ["theirs"]


@pytest.mark.inv("INV15")
async def test_a_cursor_to_be_removed_that_only_another_owner_has_made_is_removed(sealing: Sealing) -> None:
    async def change(theirs: Topic) -> None:
        await theirs.subscription("theirs", is_durable=True, start=None, initial=EARLIEST)

    await behind_its_back(sealing, change)
    for _attempt in range(2):
        try:
            await sealing.local.delete_subscription(sealing.segment, "theirs", **LEADER)
        except BraidError:
            await asyncio.sleep(0)
    assert await sealing.local.subscriptions(sealing.segment) == ["sub"]


@pytest.mark.inv("INV15")
async def test_one_unreadable_record_hides_no_other_owner(
    world: Any, broker: Any, until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are compared all the same, the log names the record, and says it once."""
    odd, stale = await reopened(broker, TopicName.parse("odd")), await reopened(broker)
    key = odd.log._record.key
    await broker.service.metadata.put(key, b'{"formatVersion":"x"}')
    other, theirs = await usurped(world)
    await theirs.terminate()
    await other.stop()
    await world.advance(2 * RECONCILE)
    await until(lambda: broker.service.topics.get(str(TOPIC)) is not stale)
    await world.advance(2 * RECONCILE)
    assert broker.service.topics[str(odd.name)] is odd, "who took it over is unknown"
    assert len([each for each in caplog.messages if key in each]) == 1


@pytest.mark.inv("INV15")
async def test_a_log_made_anew_is_not_taken_for_the_old_one(world: Any, broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where versions may repeat once a record was deleted, an equal one says nothing."""
    stale = await reopened(broker)
    other = await world.broker(believes=True)
    await other.service.logs.delete(TOPIC.managed_ledger_name)
    await other.service.topic(TOPIC, create=True)
    metadata = broker.service.metadata
    honest = metadata.get

    async def repeating(key: str, **options: Any) -> Any:
        found = await honest(key, **options)
        is_log = found is not None and key == stale.log._record.key
        return msgspec.structs.replace(found, version=stale.log._record.version) if is_log else found

    monkeypatch.setattr(metadata, "get", repeating)
    monkeypatch.setattr(
        type(metadata), "capabilities", property(lambda _self: msgspec.structs.replace(CAPABILITIES, unique_versions=False))
    )
    with pytest.raises(LedgerFenced):
        await stale.log.check_owner()


@pytest.mark.inv("INV15")
async def test_the_bound_holds_with_a_store_that_takes_its_time(
    world: Any, broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the looks is part of the period: a round does not take longer because of it."""
    topics = [TopicName.parse(f"slow-{number}") for number in range(3 * LOOKED_AT_ONCE)]
    for each in topics:
        await broker.service.topic(each, create=True)
    await world.advance(2 * RECONCILE)
    keys = {broker.service.topics[str(each)].log._record.key for each in topics}
    looks = dict.fromkeys(keys, 0)
    honest = broker.service.metadata.get

    async def slow(key: str, **options: Any) -> Any:
        if key in looks:
            looks[key] += 1
            await world.clock.sleep(RECONCILE / 20)
        return await honest(key, **options)

    monkeypatch.setattr(broker.service.metadata, "get", slow)
    for _step in range(4 * 20):
        await world.advance(RECONCILE / 20)
    assert min(looks.values()) >= 3, "four periods: once in each but the first, which may have been looked at before"


@pytest.mark.inv("INV2", "INV15")
async def test_a_former_owner_that_does_not_know_deletes_no_topic_in_use(world: Any) -> None:
    former, owner = [await world.broker(balance=False) for _ in range(2)]
    assert (await former.ownership.find(TOPIC, authoritative=True)).is_mine
    await reopened(former)
    key = lock_key(PUBLIC, BUNDLE)
    former.ownership._locks._listeners[key].cancel()  # nobody tells it that its lock is gone
    await owner.service.metadata.delete(key)
    assert (await owner.ownership.find(TOPIC, authoritative=True)).is_mine
    client = await owner.client()
    await client.producer(str(TOPIC), name="p")
    assert former.ownership.owns(TOPIC)
    with pytest.raises(OwnedElsewhere):
        await former.service.delete_topic(TOPIC, force=False)
    await client.store(b"still there", 0)


@pytest.mark.inv("INV2")
async def test_a_topic_whose_bundle_is_lost_while_it_is_loaded_is_not_served(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock went after it was read, and nobody has taken the log over yet: no other than the registry tells."""
    broker = await world.broker(balance=False)
    await reopened(broker)
    await broker.service.unload(broker.topic(str(TOPIC)))
    honest = Topic.opened

    async def opened(topic: Topic, managed: Any, **options: Any) -> None:
        await honest(topic, managed, **options)
        holdings = broker.ownership.holdings
        holdings.lost(holdings.holding(PUBLIC, hash_of(TOPIC)))

    monkeypatch.setattr(Topic, "opened", opened)
    with pytest.raises(NotReady, match="moved to another broker"):
        await broker.service.topic(TOPIC, create=False)
    assert not broker.service.topics


@pytest.mark.inv("INV2", "INV15")
async def test_whose_a_log_and_a_bundle_are_is_not_taken_from_a_cache(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may answer reads that are not fresh from memory, of what was so a while ago."""
    broker = await world.broker(balance=False)
    stale = await reopened(broker)
    metadata, key = broker.service.metadata, lock_key(PUBLIC, BUNDLE)
    before = {each: await metadata.get(each, fresh=True) for each in (key, stale.log._record.key)}
    honest = metadata.get

    async def cached(asked: str, **options: Any) -> Any:
        return before[asked] if asked in before and not options.get("fresh") else await honest(asked, **options)

    monkeypatch.setattr(metadata, "get", cached)
    await broker.service.logs._claim(stale.log._record.key, False, {})
    with pytest.raises(LedgerFenced):
        await stale.log.check_owner()
    broker.ownership._locks._listeners[key].cancel()  # nobody tells it that its lock is gone
    other = await world.broker(balance=False)
    await other.service.metadata.delete(key)
    with pytest.raises(NotReady):
        await broker.ownership.confirm(TOPIC)
