"""Who serves what: spreading, redirects, unload, transfer, drain, balance, races, and what a lost session does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.broker.balance import emptiest, next_move
from braid.broker.ownership import BundleUnloading, OwnedElsewhere
from braid.errors import Conflict, InvalidArgument, MetadataFailure, NotFound, NotReady, StoreUnavailable, TopicNotFound
from braid.model.bundles import Bundle, find, hash_of, split_evenly
from braid.model.names import NamespaceName, TopicName
from braid.testing.raw_client import RawClient
from braid.wire import requests
from braid.wire.types import CommandType, LookupResult

PUBLIC = NamespaceName.parse("public/default")
BUNDLES = split_evenly(4)
NAMES = [TopicName.parse(f"t{number}") for number in range(40)]


def topic_in(bundle: Bundle) -> TopicName:
    """A topic of this bundle."""
    return next(name for name in NAMES if bundle.contains(hash_of(name)))


async def lookup(client: RawClient, topic: object, authoritative: bool = False) -> Any:
    request_id = client.next_request()
    client.send(requests.lookup(request_id, str(topic), authoritative))
    return await client.answer(request_id)


async def three(world: Any, **settings: Any) -> list[Any]:
    return [await world.broker(balance=False, **settings) for _ in range(3)]


def holder(brokers: list[Any], topic: TopicName) -> Any:
    (owner,) = [broker for broker in brokers if broker.ownership.owns(topic)]
    return owner


async def locate(brokers: list[Any], topic: TopicName, start: int = 0) -> Any:
    """Follow redirects as a client does; returns the broker that owns the topic."""
    broker, authoritative = brokers[start], False
    for _hop in range(5):
        client = await broker.client()
        answer = await lookup(client, topic, authoritative)
        client.close()
        broker = next(each for each in brokers if each.url == answer.brokerServiceUrl)
        if answer.response == LookupResult.CONNECT:
            return broker
        assert answer.response == LookupResult.REDIRECT
        authoritative = answer.authoritative
    raise AssertionError("sent round in circles")


async def test_bundles_spread_over_the_brokers_and_every_broker_names_the_same_owner(world: Any, until: Any) -> None:
    brokers = await three(world)
    owners = [await locate(brokers, topic_in(bundle)) for bundle in BUNDLES]
    assert sorted(len(broker.bundles) for broker in brokers) == [1, 1, 2]
    for start in range(3):
        assert [await locate(brokers, topic_in(bundle), start) for bundle in BUNDLES] == owners
    assert not any(broker.service.topics for broker in brokers), "a lookup loads nothing"
    assert await brokers[0].service.list_topics(PUBLIC) == [], "a lookup creates nothing"
    assert len(await brokers[2].ownership.brokers()) == 3


async def test_lookups_of_an_owned_bundle_cost_no_metadata_call(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = await world.broker()
    client = await broker.client()
    assert (await lookup(client, "t")).response == LookupResult.CONNECT

    async def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("the store was asked")

    monkeypatch.setattr(broker.service.metadata, "get", refuse)
    monkeypatch.setattr(broker.service.metadata, "put", refuse)
    assert (await lookup(client, "t")).authoritative


async def test_a_request_that_was_sent_here_is_taken_instead_of_sent_on(world: Any) -> None:
    brokers = await three(world)
    topic = topic_in(BUNDLES[0])
    *_, other = sorted(brokers, key=lambda each: each.ownership.broker_id)  # of equals the first would be chosen
    answer = await lookup(await other.client(), topic, authoritative=True)
    assert (answer.response, answer.brokerServiceUrl) == (LookupResult.CONNECT, other.url)
    stranger = next(each for each in brokers if each is not other)
    again = await stranger.ownership.find(topic, authoritative=True)
    assert not again.is_mine
    assert again.broker.broker_id == other.ownership.broker_id, "what has an owner is not taken from it"


async def test_clients_of_a_topic_that_another_broker_owns_are_told_to_look_it_up_again(world: Any) -> None:
    brokers = await three(world)
    topic = topic_in(BUNDLES[2])
    owner = await locate(brokers, topic)
    stranger = next(each for each in brokers if each is not owner)
    client = await stranger.client()
    with pytest.raises(NotReady, match="look it up"):
        await client.producer(str(topic))
    with pytest.raises(NotReady, match="look it up"):
        await client.subscribe(str(topic))
    with pytest.raises(OwnedElsewhere) as refused:
        await stranger.service.topic(topic, create=True)
    assert refused.value.owner.broker_id == owner.ownership.broker_id
    await (await owner.client()).producer(str(topic))


async def test_topics_are_created_and_listed_by_any_broker_and_deleted_by_their_owner(world: Any) -> None:
    brokers = await three(world)
    for bundle in BUNDLES:
        await locate(brokers, topic_in(bundle))
    await brokers[0].service.create_partitioned(TopicName.parse("p"), 12)
    names = [TopicName.parse("p").partition(number) for number in range(12)]
    assert await brokers[1].service.list_topics(PUBLIC) == sorted(map(str, names))
    foreign = next(name for name in names if not brokers[2].ownership.owns(name))
    with pytest.raises(OwnedElsewhere):
        await brokers[2].service.delete_topic(foreign, force=True)
    with pytest.raises(OwnedElsewhere):
        await brokers[2].service.delete_partitioned(TopicName.parse("p"), force=True)
    assert len(await brokers[1].service.list_topics(PUBLIC)) == 12, "nothing was deleted"
    await holder(brokers, foreign).service.delete_topic(foreign, force=False)
    assert len(await brokers[1].service.list_topics(PUBLIC)) == 11


@pytest.mark.parametrize("to", [0, 1, 2])
async def test_a_bundle_moves_to_its_destination_and_its_clients_follow(world: Any, until: Any, to: int) -> None:
    brokers = await three(world)
    topic = topic_in(BUNDLES[1])
    owner = await locate(brokers, topic)
    client = await owner.client()
    await client.producer(str(topic), name="p")
    await client.subscribe(str(topic), permits=10)
    await client.store(b"1", 0)
    await owner.ownership.unload(PUBLIC, BUNDLES[1], destination=brokers[to].ownership.broker_id)
    if brokers[to] is owner:
        assert owner.ownership.owns(topic)
        return
    await client.expect(CommandType.CLOSE_PRODUCER)
    await client.expect(CommandType.CLOSE_CONSUMER)
    assert not owner.service.topics
    await until(lambda: brokers[to].ownership.owns(topic))  # without being asked by anybody
    for start in range(3):
        assert await locate(brokers, topic, start) is brokers[to]
    moved = await brokers[to].client()
    await moved.producer(str(topic), name="p")
    await moved.store(b"2", 1)
    assert brokers[to].topic(str(topic)).log.last_index == 1
    await until(lambda: not brokers[0].ownership._table.hints())


async def test_while_a_bundle_is_unloaded_lookups_are_asked_to_wait(world: Any, until: Any) -> None:
    brokers = await three(world)
    topic = topic_in(BUNDLES[0])
    owner = await locate(brokers, topic)
    client, other = await owner.client(), await next(each for each in brokers if each is not owner).client()
    await client.producer(str(topic))
    world.ledgers.hold()
    client.publish(b"slow", 0)
    await client.settle()
    unloading = asyncio.ensure_future(owner.ownership.unload(PUBLIC, BUNDLES[0]))
    await until(lambda: not owner.ownership.owns(topic))
    await client.settle()
    for asked in (client, other):
        answer = await lookup(asked, topic)
        assert (answer.response, answer.error) == (LookupResult.FAILED, MetadataFailure.code)
    with pytest.raises(NotReady):
        await client.producer(str(topic), producer_id=2)
    with pytest.raises(BundleUnloading):
        await owner.ownership.find(topic)
    world.ledgers.release()
    await unloading
    assert not owner.service.topics
    await locate(brokers, topic)


async def test_a_topic_that_is_being_loaded_is_closed_before_its_bundle_is_free(world: Any, until: Any) -> None:
    broker = await world.broker()
    topic = topic_in(BUNDLES[3])
    await (await broker.client()).producer(str(topic))
    await broker.service.unload(broker.topic(str(topic)))
    going, opening = asyncio.Event(), asyncio.Event()
    opened = broker.service.logs.open

    async def slowly(*args: Any, **options: Any) -> Any:
        opening.set()
        await going.wait()
        return await opened(*args, **options)

    broker.service.logs.open = slowly
    loading = asyncio.ensure_future(broker.service.topic(topic, create=False))
    await opening.wait()
    unloading = asyncio.ensure_future(broker.ownership.unload(PUBLIC, BUNDLES[3]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not unloading.done()
    assert broker.bundles == [str(BUNDLES[3])], "the lock is held as long as something of the bundle is open"
    going.set()
    with pytest.raises(NotReady):
        await loading
    await unloading
    assert not broker.service.topics
    assert not broker.bundles


@pytest.mark.parametrize("destination", ["nobody:1", "localhost"])
async def test_a_bundle_or_destination_that_is_not_there_is_refused(broker: Any, destination: str) -> None:
    with pytest.raises(NotFound, match="no broker"):
        await broker.ownership.unload(PUBLIC, BUNDLES[0], destination=destination)
    with pytest.raises(NotFound, match="no bundle"):
        await broker.ownership.unload(PUBLIC, Bundle(1, 2))
    with pytest.raises(TopicNotFound):
        await broker.ownership.unload(NamespaceName.parse("public/nothing"), BUNDLES[0])


async def test_unload_is_refused_by_a_broker_that_does_not_own_the_bundle(world: Any) -> None:
    brokers = await three(world)
    owner = await locate(brokers, topic_in(BUNDLES[0]))
    other = next(each for each in brokers if each is not owner)
    with pytest.raises(OwnedElsewhere) as refused:
        await other.ownership.unload(PUBLIC, BUNDLES[0])
    assert refused.value.owner.service_url == owner.url


async def test_drain_leaves_nothing_and_takes_nothing_until_it_is_undone(world: Any, until: Any) -> None:
    brokers = await three(world)
    for bundle in BUNDLES:
        await locate(brokers, topic_in(bundle))
    drained = max(brokers, key=lambda each: len(each.bundles))
    rest = [each for each in brokers if each is not drained]
    await drained.ownership.drain()
    assert drained.bundles == []
    await until(lambda: sorted(len(each.bundles) for each in rest) == [2, 2])
    for bundle in BUNDLES:
        assert await locate(brokers, topic_in(bundle), brokers.index(drained)) is not drained
    fresh = TopicName.parse("pulsar/system/t")
    assert not (await drained.ownership.find(fresh, authoritative=True)).is_mine
    with pytest.raises(Conflict, match="drained"):
        await rest[0].ownership.unload(PUBLIC, find(BUNDLES, 0), destination=drained.ownership.broker_id)
    await drained.ownership.undrain()
    system = [TopicName.parse(f"pulsar/system/t{number}") for number in range(20)]
    other = next(each for each in system if find(BUNDLES, hash_of(each)) != find(BUNDLES, hash_of(fresh)))
    assert (await drained.ownership.find(other)).is_mine, "it has the fewest"


async def test_the_last_broker_cannot_be_drained(world: Any) -> None:
    broker = await world.broker()
    await broker.client()
    with pytest.raises(Conflict, match="only one"):
        await broker.ownership.drain()
    assert (await broker.ownership.find(NAMES[0])).is_mine


async def test_two_brokers_that_race_for_a_bundle_agree_on_one(world: Any) -> None:
    brokers = await three(world)
    for number, topic in enumerate(NAMES):
        await brokers[0].service.namespaces.create_namespace(
            NamespaceName.parse(f"public/n{number}"), {"bundles": {"numBundles": 1}}
        )
        name = TopicName.parse(f"public/n{number}/{topic.local_name}")
        found = await asyncio.gather(*[broker.ownership.find(name, authoritative=True) for broker in brokers])
        assert sum(each.is_mine for each in found) == 1
        assert len({each.broker.broker_id for each in found}) == 1


async def test_a_stopped_broker_s_bundles_are_free_at_once(world: Any) -> None:
    brokers = await three(world)
    topic = topic_in(BUNDLES[0])
    owner = await locate(brokers, topic)
    client = await owner.client()
    await client.producer(str(topic))
    await client.store(b"1", 0)
    await owner.stop()
    rest = [each for each in brokers if each is not owner]
    assert await locate(rest, topic) in rest
    assert len(await rest[0].ownership.brokers()) == 2


async def test_a_killed_broker_s_bundles_are_free_when_its_session_has_run_out(world: Any, until: Any) -> None:
    brokers = await three(world)
    topic = topic_in(BUNDLES[0])
    owner = await locate(brokers, topic)
    rest = [each for each in brokers if each is not owner]
    client = await owner.client()
    await client.producer(str(topic))
    position = await client.store(b"1", 0)
    await owner.server.kill()
    owner._handle.pause_heartbeat()
    owner.is_down = True
    await world.advance(9)
    assert not (await rest[0].ownership.find(topic)).is_mine
    await world.advance(2)
    taken = await locate(rest, topic)
    loaded = await taken.service.topic(topic, create=False)
    assert loaded.log.last_position == position
    assert len(await rest[0].ownership.brokers()) == 2


async def test_a_broker_that_lost_its_session_serves_nothing_and_comes_back(world: Any, until: Any) -> None:
    """The network is fine; the session expires all the same."""
    brokers = await three(world)
    topic = topic_in(BUNDLES[0])
    owner = await locate(brokers, topic)
    client = await owner.client()
    await client.producer(str(topic), name="p")
    await client.store(b"1", 0)
    written = dict(world.metadata.tables.rows)
    owner._handle.pause_heartbeat()
    await world.advance(10.5)
    await client.expect(CommandType.CLOSE_PRODUCER)
    await until(lambda: not owner.service.topics)
    key = "/managed-ledgers/public/default/persistent/" + topic.local_name
    assert world.metadata.tables.rows[key] == written[key], "nothing was written on the way out"
    owner._handle.resume_heartbeat()
    await until(lambda: owner.ownership._registry.is_registered)
    assert len(await brokers[0].ownership.brokers()) == 3
    assert (await locate(brokers, topic)) in brokers
    losses = owner.ownership.holdings.losses
    assert losses == 1
    await world.advance(30)
    assert owner.ownership.holdings.losses == losses, "the new session lives"


async def test_a_lock_that_was_taken_away_ends_the_service_of_its_bundle(world: Any, until: Any) -> None:
    broker = await world.broker()
    topic = topic_in(BUNDLES[1])
    client = await broker.client()
    await client.producer(str(topic))
    await broker.service.metadata.delete(f"/namespace/public/default/{BUNDLES[1]}")
    await client.expect(CommandType.CLOSE_PRODUCER)
    await until(lambda: not broker.service.topics)
    await client.producer(str(topic), epoch=1)
    assert broker.bundles == [str(BUNDLES[1])]


@pytest.mark.inv("INV15")
async def test_ownership_is_right_again_after_lost_watch_events(world: Any, until: Any) -> None:
    """No event arrives; every hand-over still happens, by the reconcile."""
    brokers = await three(world, reconcile_seconds=5.0)
    topic = topic_in(BUNDLES[0])
    owner = await locate(brokers, topic)
    target = next(each for each in brokers if each is not owner)
    for broker in brokers:
        for task in list(broker.ownership._tasks._running):
            if "mirror" in task.get_name():
                task.cancel()
    await asyncio.sleep(0)
    leader = next(each for each in brokers if each.ownership.is_leader)
    await leader.ownership._table.put_hint(f"/namespace/public/default/{BUNDLES[0]}", target.ownership.broker_id)
    await world.advance(4)
    assert owner.ownership.owns(topic)
    for _ in range(3):
        await world.advance(5)
    await until(lambda: target.ownership.owns(topic))


async def test_a_split_bundle_is_served_in_halves(world: Any, until: Any) -> None:
    brokers = await three(world)
    topic = topic_in(BUNDLES[2])
    owner = await locate(brokers, topic)
    client = await owner.client()
    await client.producer(str(topic))
    await client.store(b"1", 0)
    other = next(each for each in brokers if each is not owner)
    with pytest.raises(OwnedElsewhere):
        await other.ownership.split(PUBLIC, BUNDLES[2])
    await owner.ownership.split(PUBLIC, BUNDLES[2])
    await client.expect(CommandType.CLOSE_PRODUCER)
    bundles = await other.ownership.bundles(PUBLIC)
    assert len(bundles) == 5
    assert set(BUNDLES[2].halves()) <= set(bundles)
    found = await locate(brokers, topic)
    assert (await found.service.topic(topic, create=False)).log.last_index == 0
    with pytest.raises(NotFound):
        await owner.ownership.split(PUBLIC, BUNDLES[2])


async def test_bundles_are_given_at_creation_and_shown_in_the_policies(broker: Any) -> None:
    namespaces = broker.service.namespaces
    by_number, by_boundaries = NamespaceName.parse("public/a"), NamespaceName.parse("public/b")
    await namespaces.create_namespace(by_number, {"bundles": {"numBundles": 2}})
    assert (await namespaces.policies(by_number)).values["bundles"] == {
        "boundaries": ["0x00000000", "0x80000000", "0xffffffff"],
        "numBundles": 2,
    }
    await namespaces.create_namespace(by_boundaries, {"bundles": {"boundaries": ["0x00000000", "0x10000000", "0xffffffff"]}})
    assert [str(each) for each in await broker.ownership.bundles(by_boundaries)] == [
        "0x00000000_0x10000000",
        "0x10000000_0xffffffff",
    ]
    bad: Any
    for bad in ({"numBundles": -1}, {"numBundles": 5000}, {"boundaries": ["0x0"]}, {"boundaries": 3}, [], "x"):
        with pytest.raises(InvalidArgument):
            await namespaces.create_namespace(NamespaceName.parse("public/c"), {"bundles": bad})
    with pytest.raises(TopicNotFound):
        await namespaces.policies(NamespaceName.parse("public/c"))


async def test_policies_set_at_one_broker_reach_the_topics_of_the_others(world: Any, until: Any) -> None:
    brokers = await three(world)
    topic = topic_in(BUNDLES[0])
    owner = await locate(brokers, topic)
    other = next(each for each in brokers if each is not owner)
    await (await owner.client()).producer(str(topic))
    assert owner.topic(str(topic)).dedup is None
    await other.policy("deduplicationEnabled", True)
    await until(lambda: owner.topic(str(topic)).dedup is not None)


async def test_a_deleted_namespace_is_no_longer_served(world: Any, until: Any) -> None:
    brokers = await three(world)
    namespace = NamespaceName.parse("public/gone")
    await brokers[0].service.namespaces.create_namespace(namespace, {})
    topic = TopicName.parse("public/gone/t")
    owner = await locate(brokers, topic)
    other = next(each for each in brokers if each is not owner)
    await other.service.delete_namespace(namespace)
    await world.advance(5.1)
    await until(lambda: namespace not in owner.ownership.owned())
    for broker in brokers:
        with pytest.raises(TopicNotFound):
            await broker.ownership.find(topic)


# Balance.


def test_the_emptiest_broker_is_chosen_the_same_way_by_all() -> None:
    assert emptiest({"b": 1, "a": 1, "c": 2}) == "a"


@pytest.mark.parametrize("counts", [{}, {"a": 5}, {"a": 1, "b": 0}, {"a": 3, "b": 2, "c": 2}])
def test_balanced_brokers_are_left_alone(counts: dict[str, int]) -> None:
    assert next_move({broker: [f"{broker}{number}" for number in range(count)] for broker, count in counts.items()}) is None


@pytest.mark.parametrize("counts", [{"a": 9, "b": 0}, {"a": 4, "b": 4, "c": 0}, {"a": 0, "b": 7, "c": 2, "d": 1}])
def test_moves_end_in_balance_and_each_one_helps(counts: dict[str, int]) -> None:
    bundles = {broker: {f"{broker}{number}" for number in range(count)} for broker, count in counts.items()}
    total = sum(counts.values())
    moves = 0
    while (move := next_move(bundles)) is not None:
        moves += 1
        source = next(broker for broker, keys in bundles.items() if move.key in keys)
        assert len(bundles[source]) - len(bundles[move.destination]) >= 2
        bundles[source].remove(move.key)
        bundles[move.destination].add(move.key)
    sizes = [len(keys) for keys in bundles.values()]
    assert max(sizes) - min(sizes) <= 1
    assert moves < total


async def test_a_broker_that_joins_gets_its_share_within_a_few_rounds(world: Any, until: Any) -> None:
    brokers = [await world.broker(balance_seconds=10.0, default_bundles=12) for _ in range(2)]
    names = {}
    for bundle in await brokers[0].ownership.bundles(PUBLIC):
        name = next(
            TopicName.parse(f"x{number}") for number in range(10_000) if bundle.contains(hash_of(TopicName.parse(f"x{number}")))
        )
        names[bundle] = name
        await (await (await locate(brokers, name)).client()).producer(str(name))
    assert [len(broker.bundles) for broker in brokers] == [6, 6]
    brokers.append(await world.broker(balance_seconds=10.0))
    for _round in range(4):
        await world.advance(10.1)
    await until(lambda: [len(broker.bundles) for broker in brokers] == [4, 4, 4])
    moves = sum(broker.ownership.holdings.moves for broker in brokers)
    assert moves == 4
    for _round in range(10):
        await world.advance(10)
    assert sum(broker.ownership.holdings.moves for broker in brokers) == moves, "balanced brokers are left alone"
    for name in names.values():
        await locate(brokers, name)


async def test_there_is_one_leader_and_another_after_its_end(world: Any, until: Any) -> None:
    brokers = await three(world)
    await until(lambda: sum(broker.ownership.is_leader for broker in brokers) == 1)
    leader = next(each for each in brokers if each.ownership.is_leader)
    for broker in brokers:
        found = await broker.ownership.leader()
        assert found is not None
        assert found.broker_id == leader.ownership.broker_id
        assert await broker.ownership.leading.balance() is False
    await leader.stop()
    rest = [each for each in brokers if each is not leader]
    await until(lambda: sum(broker.ownership.is_leader for broker in rest) == 1)


# A broker that dies while it unloads.

POINTS = ["before telling others", "before closing topics", "after closing topics", "after releasing the lock"]


@pytest.mark.parametrize("destination", [True, False], ids=["transfer", "unload"])
@pytest.mark.parametrize("point", POINTS)
async def test_a_broker_may_die_at_any_step_of_unloading(world: Any, until: Any, point: str, destination: bool) -> None:
    brokers = await three(world, deduplication=True)
    topic = topic_in(BUNDLES[1])
    owner = await locate(brokers, topic)
    rest = [each for each in brokers if each is not owner]
    client = await owner.client()
    await client.producer(str(topic), name="p")
    await client.subscribe(str(topic), permits=10)
    positions = [await client.store(b"%d" % number, number) for number in range(3)]
    await client.messages(3)
    await client.acked(positions[0])
    (held,) = [each for each in owner.ownership.holdings.all() if each.bundle == BUNDLES[1]]
    reached, never = asyncio.Event(), asyncio.Event()

    def stop(work: Any, *, before: bool) -> Any:
        async def stopped(*args: Any) -> Any:
            if not before:
                await work(*args)
            reached.set()
            await never.wait()

        return stopped

    class Lock:
        """The lock whose holder dies in the middle of a call."""

        def __init__(self, lock: Any) -> None:
            self.key, self.value, self.holds = lock.key, lock.value, lock.holds
            self.update = stop(lock.update, before=True) if point == POINTS[0] else lock.update
            self.release = stop(lock.release, before=False) if point == POINTS[3] else lock.release

    held.lock = Lock(held.lock)
    service = owner.service
    if point in POINTS[1:3]:
        service.close_bundle = stop(service.close_bundle, before=point == POINTS[1])
    target = rest[1] if destination else None
    unloading = asyncio.ensure_future(
        owner.ownership.unload(PUBLIC, BUNDLES[1], destination=target and target.ownership.broker_id)
    )
    await reached.wait()
    owner._handle.pause_heartbeat()
    await owner.server.kill()
    owner.is_down = True
    await asyncio.wait([unloading])
    await world.advance(11)
    if target is not None:
        await until(lambda: target.ownership.owns(topic))
    taker = await locate(rest, topic)
    client = await taker.client()
    await client.producer(str(topic), name="p", epoch=1)
    client.publish(b"2", 2)
    assert (await client.receipt()).message_id.entryId == (1 << 64) - 1, "it is stored already"
    await client.store(b"3", 3)
    await client.subscribe(str(topic), permits=10)
    assert await client.payloads(3) == [b"1", b"2", b"3"]


async def test_a_clean_unload_answers_what_was_sent_before_it_sends_the_client_away(world: Any, until: Any) -> None:
    """Without deduplication, too, nothing is sent again that is stored."""
    broker = await world.broker()
    topic = topic_in(BUNDLES[0])
    client = await broker.client()
    await client.producer(str(topic))
    await client.store(b"0", 0)
    world.ledgers.hold()
    for number in range(1, 6):
        client.publish(b"%d" % number, number)
    await client.settle()
    unloading = asyncio.ensure_future(broker.ownership.unload(PUBLIC, BUNDLES[0]))
    await until(lambda: not broker.ownership.owns(topic))
    await until(lambda: broker.topic(str(topic)).is_closing if broker.service.topics else True)
    client.publish(b"6", 6)  # crosses the news on its way; dropped
    await client.settle()
    assert client.kinds() == []
    world.ledgers.release()
    await unloading
    await client.settle()
    assert client.kinds() == [CommandType.SEND_RECEIPT] * 5 + [CommandType.CLOSE_PRODUCER]
    client.inbox.clear()
    await client.producer(str(topic), epoch=1)
    assert await client.store(b"6", 6)
    assert broker.topic(str(topic)).log.last_index == 6


async def test_a_burst_of_lookups_is_spread_too(world: Any) -> None:
    brokers = await three(world)
    for asked in brokers:
        found = await asyncio.gather(*[asked.ownership.find(topic_in(bundle)) for bundle in BUNDLES])
        assert sorted([[each.broker.broker_id for each in found].count(info.ownership.broker_id) for info in brokers]) == [
            1,
            1,
            2,
        ]


@pytest.mark.inv("INV15")
async def test_a_hand_over_that_failed_is_tried_again(world: Any, until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = await three(world)
    topic = topic_in(BUNDLES[0])
    owner = await locate(brokers, topic)
    target = next(each for each in brokers if each is not owner)
    store = target.service.metadata
    put, refused = store.put, asyncio.Event()

    async def refuse_once(key: str, *args: Any, **options: Any) -> Any:
        if key.startswith("/namespace/") and not refused.is_set():
            refused.set()
            raise StoreUnavailable("The metadata store does not answer.")
        return await put(key, *args, **options)

    monkeypatch.setattr(store, "put", refuse_once)
    await owner.ownership.unload(PUBLIC, BUNDLES[0], destination=target.ownership.broker_id)
    await refused.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not target.ownership.owns(topic)
    await world.advance(6)
    await until(lambda: target.ownership.owns(topic))


async def test_a_bundle_that_arrives_while_the_broker_drains_is_given_away_too(
    world: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers = await three(world)
    topic = topic_in(BUNDLES[0])
    drained = brokers[0]
    store = drained.service.metadata
    put, going, asked = store.put, asyncio.Event(), asyncio.Event()

    async def slowly(key: str, *args: Any, **options: Any) -> Any:
        if key.startswith("/namespace/"):
            asked.set()
            await going.wait()
        return await put(key, *args, **options)

    monkeypatch.setattr(store, "put", slowly)
    finding = asyncio.ensure_future(drained.ownership.find(topic, authoritative=True))
    await asked.wait()
    draining = asyncio.ensure_future(drained.ownership.drain())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not draining.done()
    going.set()
    await draining
    with pytest.raises(NotReady):
        await finding
    assert drained.bundles == []
    assert await drained.ownership.owner(PUBLIC, BUNDLES[0], fresh=True) is None
