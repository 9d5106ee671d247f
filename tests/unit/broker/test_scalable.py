"""Scalable topics over real sockets: layout sessions, registrations and namespace watches, on one broker and on three."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from braid.broker.commands.scalable import dag_message
from braid.broker.consumer_places import Elsewhere
from braid.broker.scalable_consumers import ScalableConsumer
from braid.errors import AlreadyExists, NotAllowed, TopicNotFound
from braid.metadata.api import Span
from braid.model.hashranges import HashRange
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.segments import physical_name
from braid.runtime.config import load
from braid.scalable.config import ScalableConfig
from braid.scalable.records import ScalableTopicMetadata, controller_path, subscriptions_path, topic_path
from braid.testing.raw_client import JAVA, RawClient, payload_of
from braid.web.config import StandaloneConfig
from braid.wire import messages as pb
from braid.wire import requests
from braid.wire.checksum import topics_hash
from braid.wire.commands import encode, enum_value
from braid.wire.types import CommandType, InitialPosition, ScalableConsumerType, ServerError, SubType

TOPIC = TopicName.parse("topic://public/default/orders")
NAME = str(TOPIC)


# What clients say.


async def layout(client: RawClient, name: str = NAME, number: int = 1, *, may_create: bool = False) -> Any:
    client.send(requests.scalable_topic_lookup(number, name, may_create))
    return await update(client, number)


async def update(client: RawClient, number: int = 1) -> Any:
    def mine(event: Any) -> bool:
        return event.type == CommandType.SCALABLE_TOPIC_UPDATE and int(event.body.session_id) == number

    return (await client.take(mine, "a layout")).body


async def epoch(client: RawClient, wanted: int, number: int = 1) -> Any:
    """The update with this epoch; earlier ones are passed over."""
    while (found := await update(client, number)).dag.epoch < wanted:
        pass
    assert found.dag.epoch == wanted
    return found


async def register(client: RawClient, name: str, consumer_id: int = 50, **fields: Any) -> Any:
    request_id = client.next_request()
    body = pb.CommandScalableTopicSubscribe(
        request_id=request_id,
        topic=fields.pop("topic", NAME),
        subscription=fields.pop("subscription", "sub"),
        consumer_name=name,
        consumer_id=consumer_id,
        consumer_type=enum_value(fields.pop("kind", ScalableConsumerType.STREAM)),
        **fields,
    )
    client.send(encode(CommandType.SCALABLE_TOPIC_SUBSCRIBE, body))
    return await client.answer(request_id)


async def assigned(client: RawClient, wanted: set[int], consumer_id: int = 50) -> Any:
    """Wait until the consumer is told to read just these segments."""

    def mine(event: Any) -> bool:
        return (
            event.type == CommandType.SCALABLE_TOPIC_ASSIGNMENT_UPDATE
            and event.body.consumer_id == consumer_id
            and ids(event.body) == wanted
        )

    return (await client.take(mine, f"the segments {wanted}")).body


def ids(body: Any) -> set[int]:
    return {each.segment_id for each in body.assignment.segments}


async def leader(brokers: list[Any], topic: TopicName = TOPIC) -> Any:
    found = await brokers[0].service.scalable.leader_id(topic)
    return next(each for each in brokers if each.ownership.broker_id == found)


async def owner_of(brokers: list[Any], name: TopicName) -> Any:
    found = await brokers[0].ownership.find(name)
    return next(each for each in brokers if each.ownership.broker_id == found.broker.broker_id)


async def split(brokers: list[Any], number: int) -> SegmentLayout:
    controller = await (await leader(brokers)).service.scalable.lead(TOPIC)
    made: SegmentLayout = await controller.split_segment(number)
    return made


@pytest.fixture
async def brokers(world: Any) -> list[Any]:
    made = [await world.broker() for _ in range(3)]
    await made[0].service.create_scalable_topic(TOPIC, 2)
    return made


@pytest.fixture
async def clients(brokers: list[Any]) -> list[RawClient]:
    return [await broker.client() for broker in brokers]


# Layout sessions.


@pytest.mark.req("R468-1", "R468-5", "R468-40")
async def test_every_broker_answers_with_the_same_layout(brokers: list[Any], clients: list[RawClient]) -> None:
    answers = [await layout(client) for client in clients]
    lead = await leader(brokers)
    for answer in answers:
        assert answer.resolved_topic_name == NAME
        assert [(each.segment_id, each.hash_start, each.hash_end) for each in answer.dag.segments] == [
            (0, 0, 0x7FFF),
            (1, 0x8000, 0xFFFF),
        ]
        assert answer.dag.controller_broker_url == lead.url
        assert not answer.dag.HasField("incarnation")  # this client did not say that it knows the field
        owners = {each.segment_id: each.broker_url for each in answer.dag.segment_brokers}
        assert set(owners) == {0, 1}
        for number, url in owners.items():
            owner = next(each for each in brokers if each.url == url)
            assert str(physical_name(TOPIC, SegmentLayout.initial(2, 1).segment(number))) in owner.service.topics


@pytest.mark.req("R468-46")
async def test_a_change_is_pushed_by_whichever_broker_serves_the_session(brokers: list[Any], clients: list[RawClient]) -> None:
    for client in clients:
        await layout(client)
    for number in range(4):
        await split(brokers, number)
    for client in clients:
        last = await epoch(client, 4)
        assert len(last.dag.segments) == 10
        sealed = {each.segment_id: each for each in last.dag.segments if each.state == 1}
        assert sorted(sealed) == [0, 1, 2, 3]
        assert list(sealed[0].child_ids) == [2, 3]
        assert sealed[0].sealed_at_epoch == 1
        assert {each.segment_id for each in last.dag.segment_brokers} == {4, 5, 6, 7, 8, 9}
        assert len({each.broker_url for each in last.dag.segment_brokers}) > 1  # placed by their bundles, not at the leader


@pytest.mark.req("R468-39", "R468-42")
async def test_sessions_are_told_apart_and_leave_nothing_behind(broker: Any, client: RawClient, until: Any) -> None:
    for name in ("a", "b"):
        await broker.service.create_scalable_topic(TopicName.parse(f"topic://public/default/{name}"), 1)
    watches = broker.service.dag_watches
    first = await layout(client, "topic://public/default/a", 1)
    second = await layout(client, "topic://public/default/b", 2)
    assert (first.resolved_topic_name, second.resolved_topic_name) == (
        "topic://public/default/a",
        "topic://public/default/b",
    )
    for number in range(3, 300):
        client.send(requests.scalable_topic_lookup(number, "topic://public/default/a", False))
    await until(lambda: watches.session_count == 299)
    assert len(watches.feeds) == 2
    client.send(requests.scalable_topic_close(2), requests.scalable_topic_close(777))
    await until(lambda: watches.session_count == 298)
    # Closed before it was opened.
    client.send(requests.scalable_topic_lookup(900, "topic://public/default/b", False), requests.scalable_topic_close(900))
    await client.settle(50)
    assert watches.session_count == 298
    client.close()
    await until(lambda: watches.session_count == 0)
    assert watches.feeds == {}


@pytest.mark.req("R468-41")
async def test_a_record_changed_by_anybody_is_pushed(broker: Any, client: RawClient) -> None:
    await broker.service.create_scalable_topic(TOPIC, 1)
    await layout(client)
    key = topic_path(TOPIC)
    record = await broker.service.metadata.get(key)
    changed = msgspec.json.decode(record.value, type=ScalableTopicMetadata)
    changed = changed.with_layout(changed.layout.split(0, 5))
    await broker.service.metadata.put(key, msgspec.json.encode(changed), expected=record.version)
    assert len((await epoch(client, 1)).dag.segments) == 3


@pytest.mark.req("R468-43", "R468-75")
def test_the_wire_form_is_upstreams() -> None:
    """Golden bytes, written down from the tags of scalable.md 4.1."""
    made = dag_message(SegmentLayout.initial(1, 5).split(0, 9))
    made.controller_broker_url, made.controller_broker_url_tls = "pulsar://h:1", "pulsar+ssl://h:3"
    made.segment_brokers.add(segment_id=1, broker_url="pulsar://h:2", broker_url_tls="pulsar+ssl://h:4")
    assert made.SerializeToString().hex() == (
        "0801"
        "1216"
        "0800"
        "1000"
        "18ffff03"
        "2001"
        "3001"
        "3002"
        "3800"
        "4001"
        "4805"
        "5009"
        "1210"
        "0801"
        "1000"
        "18ffff01"
        "2000"
        "2800"
        "3801"
        "4809"
        "1212"
        "0802"
        "10808002"
        "18ffff03"
        "2000"
        "2800"
        "3801"
        "4809"
        "1a22"
        "0801"
        "120c70756c7361723a2f2f683a32"
        "1a1070756c7361722b73736c3a2f2f683a34"
        "220c70756c7361723a2f2f683a31"
        "2a1070756c7361722b73736c3a2f2f683a33"
    )
    numbers = {kind.name: int(kind) for kind in CommandType}
    assert [numbers[f"SCALABLE_TOPIC_{each}"] for each in ("LOOKUP", "UPDATE", "CLOSE", "SUBSCRIBE")] == [70, 71, 72, 73]


async def test_braids_own_clients_learn_incarnation_and_routing(broker: Any) -> None:
    await broker.service.create_scalable_topic(TOPIC, 1)
    client = await broker.client(handshake=False)
    client.send(requests.connect("Braid-Python-v1"))
    assert (await client.expect(CommandType.CONNECTED)).feature_flags.supports_braid
    answer = await layout(client)
    assert answer.dag.incarnation == (await broker.service.scalable.metadata(TOPIC)).incarnation
    assert answer.dag.routing == "high16"


async def test_a_deleted_topic_ends_its_sessions_with_an_error(broker: Any, client: RawClient) -> None:
    await broker.service.create_scalable_topic(TOPIC, 1)
    await layout(client)
    await broker.service.scalable.delete_topic(TOPIC, force=True)
    while not (last := await update(client)).HasField("error"):
        pass
    assert last.error == ServerError.TOPIC_NOT_FOUND
    assert not last.HasField("resolved_topic_name")
    assert broker.service.dag_watches.session_count == 0


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("non-persistent://public/default/x", ServerError.NOT_ALLOWED_ERROR),
        ("segment://public/default/x/0000-ffff-0", ServerError.NOT_ALLOWED_ERROR),
        ("topic://public", ServerError.INVALID_TOPIC_NAME),
        ("nonsense://public/default/x", ServerError.INVALID_TOPIC_NAME),
        ("topic://public/default/" + "x" * 5000, ServerError.INVALID_TOPIC_NAME),
        ("persistent://public/default/x-partition-3", ServerError.TOPIC_NOT_FOUND),
        ("topic://public/default/x-partition-3", ServerError.TOPIC_NOT_FOUND),
        ("topic://public/nowhere/x", ServerError.TOPIC_NOT_FOUND),
        ("topic://public/default/missing", ServerError.TOPIC_NOT_FOUND),
    ],
)
async def test_bad_names_are_answered_and_the_connection_stays(client: RawClient, name: str, error: ServerError) -> None:
    answer = await layout(client, name, 8)
    assert (answer.error, answer.HasField("dag")) == (error, False)
    assert answer.message
    reply = await register(client, "c", topic=name)
    assert reply.HasField("error") or name.startswith("persistent"), reply
    await client.settle()


async def test_a_missing_topic_is_made_with_one_segment_if_the_namespace_allows(broker: Any, client: RawClient) -> None:
    made = await layout(client, may_create=True)
    assert [each.segment_id for each in made.dag.segments] == [0]
    with pytest.raises(AlreadyExists):
        await broker.service.create_scalable_topic(TOPIC, 1)
    await broker.policy("autoTopicCreationOverride", {"allowAutoTopicCreation": False})
    refused = await layout(client, "topic://public/default/other", 2, may_create=True)
    assert refused.error == ServerError.TOPIC_NOT_FOUND
    await broker.policy("autoTopicCreationOverride", None)
    # A name that a regular topic has is not taken.
    await client.producer("persistent://public/default/plain", 1)
    refused = await layout(client, "topic://public/default/plain", 3, may_create=True)
    assert refused.error == ServerError.NOT_ALLOWED_ERROR
    with pytest.raises(AlreadyExists):
        await broker.service.create_scalable_topic(TopicName.parse("topic://public/default/plain"), 1)
    for local in ("-DLQ", "a/b", " x"):
        answer = await layout(client, f"topic://public/default/{local}", 4, may_create=True)
        assert answer.HasField("error") == (local == " x"), local


@pytest.mark.req("R468-87")
async def test_a_regular_topic_has_a_synthetic_layout(broker: Any, client: RawClient) -> None:
    await broker.service.create_partitioned(TopicName.parse("parts"), 3)
    answer = await layout(client, "persistent://public/default/parts")
    assert answer.resolved_topic_name == "topic://public/default/parts"
    assert [each.legacy_topic_name for each in answer.dag.segments] == [
        f"persistent://public/default/parts-partition-{number}" for number in range(3)
    ]
    plain = await layout(client, "persistent://public/default/not-there-yet", 2)
    assert [each.legacy_topic_name for each in plain.dag.segments] == ["persistent://public/default/not-there-yet"]
    assert await broker.service.regular_partitions(TopicName.parse("not-there-yet")) is None
    await broker.service.create_scalable_topic(TOPIC, 2)
    real = await layout(client, "persistent://public/default/orders", 3)
    assert [each.HasField("legacy_topic_name") for each in real.dag.segments] == [False, False]


@pytest.mark.req("R468-89")
async def test_who_asks_for_a_scalable_topic_as_a_whole_is_told_which_clients_can(broker: Any, client: RawClient) -> None:
    """Producer, consumer and reader of a client that passes the name on."""
    await broker.service.create_scalable_topic(TOPIC, 1)
    for attempt in (
        client.producer(NAME),
        client.subscribe(NAME),
        client.subscribe(NAME, "reader", durable=False, start_message_id=pb.MessageIdData(ledgerId=0, entryId=0)),
    ):
        with pytest.raises(NotAllowed, match=r"is a scalable topic: .* a Pulsar 5 client or Braid's SDK"):
            await attempt
    await client.producer("persistent://public/default/plain", 2)
    await client.store(b"x", 0, 2)


async def test_watches_are_bounded_per_connection(world: Any) -> None:
    broker = await world.broker(scalable=ScalableConfig(max_watches_per_connection=2))
    client = await broker.client()
    await broker.service.create_scalable_topic(TOPIC, 1)
    await layout(client, number=1)
    await layout(client, number=2)
    assert (await layout(client, number=3)).error == ServerError.TOO_MANY_REQUESTS
    client.send(requests.scalable_topic_close(1))
    assert not (await layout(client, number=3)).HasField("error")
    assert not (await layout(client, number=3)).HasField("error")  # the same id again replaces the session
    assert broker.service.dag_watches.session_count == 2


@pytest.mark.req("R468-86", "R468-88")
async def test_switched_off_and_on_again(world: Any) -> None:
    off = ScalableConfig(enabled=False)
    broker = await world.broker()
    client = await broker.client()
    await broker.service.create_scalable_topic(TOPIC, 1)
    segment = str(physical_name(TOPIC, SegmentLayout.initial(1, 1).segment(0)))
    await client.producer(segment)
    await client.store(b"kept", 0)
    await broker.stop()
    broker = await world.broker(scalable=off)
    client = await broker.client()
    assert (await layout(client)).error == ServerError.NOT_ALLOWED_ERROR
    assert (await register(client, "c")).error == ServerError.NOT_ALLOWED_ERROR
    client.send(
        encode(CommandType.WATCH_SCALABLE_TOPICS, pb.CommandWatchScalableTopics(watch_id=1, namespace="public/default"))
    )
    assert (await client.expect(CommandType.WATCH_SCALABLE_TOPICS_UPDATE)).error == ServerError.NOT_ALLOWED_ERROR
    with pytest.raises(NotAllowed):
        await broker.service.create_scalable_topic(TOPIC, 1)
    await broker.stop()
    broker = await world.broker()
    client = await broker.client()
    assert not (await layout(client)).HasField("error")
    await client.subscribe(segment, "late", initial=InitialPosition.EARLIEST, permits=10)
    assert await client.payloads(1) == [b"kept"]


@pytest.mark.req("R468-86")
@pytest.mark.parametrize("key", ["enabled", "scalableTopicsEnabled", "scalableTopicEnabled"])
def test_the_switch_has_upstreams_and_the_designs_name(key: str) -> None:
    assert load(StandaloneConfig, None, {}, {}).scalable_topics.enabled
    assert not load(StandaloneConfig, None, {}, {"scalable_topics": {key: False}}).scalable_topics.enabled
    assert not load(StandaloneConfig, None, {f"BRAID__SCALABLE_TOPICS__{key.upper()}": "false"}, {}).scalable_topics.enabled


# Records.


@pytest.mark.req("R468-35", "R468-36", "R468-37")
async def test_what_the_store_shows(world: Any, brokers: list[Any], clients: list[RawClient]) -> None:
    await register(clients[0], "one consumer/ä", subscription="billing")
    store = brokers[1].service.metadata
    record = msgspec.json.decode((await store.get("/topics/public/default/orders", fresh=True)).value)
    assert record["epoch"] == 0
    assert record["nextSegmentId"] == 2
    assert record["segments"]["1"]["hashRange"] == {"start": 0x8000, "end": 0xFFFF}
    assert record["segments"]["1"]["state"] == "ACTIVE"
    subscription = msgspec.json.decode((await store.get("/topics/public/default/orders/subscriptions/billing")).value)
    assert subscription.get("type", "STREAM") == "STREAM"
    consumers = "/topics/public/default/orders/subscriptions/billing/consumers"
    assert await store.get(f"{consumers}/one%20consumer%2F%C3%A4") is not None
    lead = await leader(brokers)
    found = await store.get(controller_path(TOPIC))
    assert (msgspec.json.decode(found.value), found.owner) == (
        lead.ownership.broker_id,
        lead.service.metadata.session.id,
    )
    await lead.kill()
    survivor = next(each for each in brokers if each is not lead)
    found = await survivor.service.metadata.get(controller_path(TOPIC), fresh=True)
    assert found is None or msgspec.json.decode(found.value) != lead.ownership.broker_id


# Registrations.


async def test_any_broker_takes_a_registration_and_its_end(brokers: list[Any], clients: list[RawClient], until: Any) -> None:
    """L-25, L-15: the leader's own client, and those that it hears of through another broker."""
    for number in (0, 1):
        await split(brokers, number)
    lead = await leader(brokers)
    seen: set[int] = set()
    for number, client in enumerate(clients):
        reply = await register(client, f"c{number}")
        assert not reply.HasField("error")
        seen |= ids(reply)
    assert seen >= {2, 3, 4, 5}
    controller = await lead.service.scalable.lead(TOPIC)

    async def spread() -> dict[str, list[int]]:
        consumers = (await controller.stats())["subscriptions"]["sub"]["consumers"]
        return {name: sorted(each["segments"]) for name, each in consumers.items()}

    held = await spread()
    assert sorted(number for each in held.values() for number in each) == [2, 3, 4, 5]  # the parents had nothing to read
    for number, client in enumerate(clients[:2]):
        await client.close_consumer(50)
        assert f"c{number}" not in await spread()
    await assigned(clients[2], {number for each in held.values() for number in each})
    # One that is lost keeps what it has, for a while.
    clients[2].close()
    await until(lambda: controller._term.coordinators["sub"].state().connected_consumers == 0)
    assert set(await spread()) == {"c2"}


async def test_a_second_connection_takes_a_name_over(brokers: list[Any], clients: list[RawClient]) -> None:
    first = ids(await register(clients[0], "same", 50))
    assert ids(await register(clients[1], "same", 51)) == first
    closed = await clients[0].expect(CommandType.CLOSE_CONSUMER)
    assert closed.consumer_id == 50
    clients[0].close()
    # The end of the displaced one says nothing about the one that has the name.
    await clients[1].settle(20)
    assert CommandType.CLOSE_CONSUMER not in clients[1].kinds()
    layout = await split(brokers, 0)
    await assigned(clients[1], set(layout.all_segments) - {0}, 51)


async def test_a_consumer_is_registered_with_the_next_leader_by_its_broker(
    world: Any, brokers: list[Any], clients: list[RawClient], until: Any
) -> None:
    lead = await leader(brokers)
    others = [number for number, each in enumerate(brokers) if each is not lead]
    for number in others:
        await register(clients[number], f"c{number}")
    for number in others:
        await layout(clients[number])
    await lead.kill()
    survivors = [brokers[number] for number in others]

    async def is_led() -> bool:
        found = await survivors[0].service.scalable.leader_id(TOPIC)
        return found is not None and found != lead.ownership.broker_id

    async with asyncio.timeout(10):
        while not await is_led():
            await world.advance(1)
    successor = await leader(survivors)
    controller = await successor.service.scalable.lead(TOPIC)
    async with asyncio.timeout(10):
        while controller._term.coordinators["sub"].state().connected_consumers < 2:
            await world.advance(1)
    for number in others:
        assert not clients[number].is_closed
        assert CommandType.CLOSE_CONSUMER not in clients[number].kinds()


async def next_leader(world: Any, brokers: list[Any], dead: Any) -> Any:
    """Kill the leader and wait until another one leads; returns the controller there."""
    survivors = [each for each in brokers if each is not dead]
    await dead.kill()
    async with asyncio.timeout(10):
        while (found := await survivors[0].service.scalable.leader_id(TOPIC)) in (None, dead.ownership.broker_id):
            await world.advance(1)
    leading = next(each for each in survivors if each.ownership.broker_id == found)
    return await leading.service.scalable.lead(TOPIC)


@pytest.mark.parametrize("which", [0, 1])
async def test_a_consumer_that_closes_while_nobody_leads_is_gone_with_the_next_leader(
    world: Any, brokers: list[Any], clients: list[RawClient], which: int
) -> None:
    lead = await leader(brokers)
    others = [number for number, each in enumerate(brokers) if each is not lead]
    for number in others:
        await register(clients[number], f"c{number}")
        await layout(clients[number])
    # One of the two closes through the next leader itself, the other through a broker that has to tell it.
    await lead.kill()
    leaving = others[which]
    await clients[leaving].close_consumer(50)
    survivors = [brokers[number] for number in others]
    async with asyncio.timeout(10):
        while (found := await survivors[0].service.scalable.leader_id(TOPIC)) in (None, lead.ownership.broker_id):
            await world.advance(1)
    leading = next(each for each in survivors if each.ownership.broker_id == found)
    controller = await leading.service.scalable.lead(TOPIC)
    before = world.clock.monotonic()
    async with asyncio.timeout(10):
        while f"c{leaving}" in (await controller.stats())["subscriptions"]["sub"]["consumers"]:
            await world.advance(0.1)
    assert world.clock.monotonic() - before < 10  # not when its grace period ends


@pytest.mark.inv("INV15")
async def test_a_consumer_is_registered_again_after_an_unforeseen_exception(
    world: Any, brokers: list[Any], clients: list[RawClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = await leader(brokers)
    away = next(number for number, each in enumerate(brokers) if each is not lead)
    await register(clients[away], "c")
    await layout(clients[away])
    calls = {"is_right": 0, "_register": 0}

    def fail_twice(owner: type, method: str) -> None:
        honest = getattr(owner, method)

        async def stand_in(*args: Any) -> Any:
            calls[method] += 1
            if calls[method] <= 2:
                raise KeyError("nobody has thought of this")
            return await honest(*args)

        monkeypatch.setattr(owner, method, stand_in)

    fail_twice(Elsewhere, "is_right")
    fail_twice(ScalableConsumer, "_register")
    async with asyncio.timeout(10):
        while calls["is_right"] < 3:
            await world.advance(5)
    controller = await next_leader(world, brokers, lead)
    async with asyncio.timeout(10):
        while controller._term.coordinators["sub"].state().connected_consumers < 1:
            await world.advance(0.5)
    assert calls["_register"] > 2


async def test_a_half_open_connection_does_not_take_the_name_back_when_the_leader_changes(
    world: Any, brokers: list[Any], clients: list[RawClient]
) -> None:
    lead = await leader(brokers)
    old, new = (number for number, each in enumerate(brokers) if each is not lead)
    await register(clients[old], "same")
    for number in (old, new):
        await layout(clients[number])
    connection = next(each for each in brokers[old].server.connections if each.scalable_consumers)
    connection.scalable_consumers[50].displaced = lambda _place: None  # what the leader says does not arrive
    await register(clients[new], "same")
    del connection.scalable_consumers[50].displaced
    controller = await next_leader(world, brokers, lead)
    async with asyncio.timeout(10):
        while CommandType.CLOSE_CONSUMER not in clients[old].kinds():
            await world.advance(0.5)
            await clients[old].settle()
    async with asyncio.timeout(10):
        while controller._term.coordinators["sub"].state().connected_consumers < 1:
            await world.advance(0.5)
    await clients[new].settle()
    assert CommandType.CLOSE_CONSUMER not in clients[new].kinds()
    made = await controller.split_segment(0)
    await assigned(clients[new], set(made.all_segments) - {0})


@pytest.mark.parametrize(
    "fields",
    [
        {"consumer_name": ""},
        {"consumer_name": "x" * 5000},
        {"subscription": ""},
        {"subscription": "a/b"},
        {"subscription": "pulsar.dedup"},
    ],
)
async def test_bad_registrations_are_answered(broker: Any, client: RawClient, fields: dict[str, Any]) -> None:
    await broker.service.create_scalable_topic(TOPIC, 1)
    reply = await register(client, fields.pop("consumer_name", "c"), **fields)
    assert reply.HasField("error")
    assert reply.message
    names = [name async for name in broker.service.metadata.names(Span(subscriptions_path(TOPIC)))]
    assert names == []


async def test_an_unknown_kind_of_consumer_disturbs_nobody_else(broker: Any, client: RawClient) -> None:
    await broker.service.create_scalable_topic(TOPIC, 1)
    body = pb.CommandScalableTopicSubscribe(
        request_id=9, topic=NAME, subscription="s", consumer_name="c", consumer_id=1, consumer_type=enum_value(0)
    )
    raw = body.SerializeToString().replace(b"\x30\x00", b"\x30\x09")  # a kind nobody knows
    base = pb.BaseCommand(type=enum_value(73))
    frame = base.SerializeToString() + b"\xca\x04" + bytes([len(raw)]) + raw
    client.send((len(frame) + 4).to_bytes(4, "big") + len(frame).to_bytes(4, "big") + frame)
    other = await broker.client()
    await other.settle()


async def test_stream_consumers_of_a_regular_topic_are_coordinated_too(world: Any) -> None:
    brokers = [await world.broker() for _ in range(3)]
    await brokers[0].service.create_partitioned(TopicName.parse("parts"), 4)
    clients = [await broker.client() for broker in brokers]
    given: list[set[int]] = []
    for number, client in enumerate(clients):
        reply = await register(client, f"c{number}", topic="persistent://public/default/parts")
        assert not reply.HasField("error"), reply.message
        given.append(ids(reply))
    assert given[0] == {0, 1, 2, 3}
    made = await register(clients[0], "new", 60, topic="persistent://public/default/made-now")
    assert [each.segment_topic for each in made.assignment.segments] == ["persistent://public/default/made-now"]


# Queue consumers and producers on segments.


@pytest.mark.req("R468-32", "R468-33")
async def test_queue_consumers_attach_to_every_segment_and_share_it(brokers: list[Any], world: Any) -> None:
    await split(brokers, 0)
    clients: dict[str, RawClient] = {}
    shown = await layout(await brokers[2].client())
    received: dict[str, list[bytes]] = {"a": [], "b": []}
    for each in shown.dag.segments:
        name = str(TOPIC.segment(_range(each), each.segment_id))
        owner = await owner_of(brokers, TopicName.parse(name))
        client = clients[owner.url] = clients.get(owner.url) or await owner.client(client_version=JAVA)
        for number, who in enumerate("ab"):
            await client.subscribe(
                name, "queue", SubType.SHARED, each.segment_id * 2 + number, consumer_name=who, initial=InitialPosition.EARLIEST
            )
        if each.state == 0:
            await client.producer(name, each.segment_id)
            for number, _who in enumerate("ab"):
                client.flow(100, each.segment_id * 2 + number)
            for number in range(60):
                await client.store(b"x", number, each.segment_id)
            for delivery in await client.messages(60):
                received["ab"[delivery.command.consumer_id % 2]].append(payload_of(delivery))
    assert min(len(each) for each in received.values()) > 0
    assert sum(len(each) for each in received.values()) == 180
    # Attaching has made the subscription known to the topic, so that the next split gives it a cursor before anybody writes.
    record = await brokers[0].service.records.subscription(TOPIC, "queue")
    assert (record.type, record.initial, record.created_at_epoch) == ("QUEUE", "earliest", 1)
    made = await split(brokers, 1)
    for number in (4, 5):
        child = physical_name(TOPIC, made.segment(number))
        assert (await brokers[0].service.segments.backlog(child, "queue")).messages == 0
        assert await brokers[0].service.segments.subscriptions(child) == ["queue"]


def _range(each: Any) -> HashRange:
    return HashRange.of(each.hash_start, each.hash_end)


@pytest.mark.req("R468-47")
async def test_a_split_and_a_merge_under_raw_producers(brokers: list[Any], until: Any) -> None:
    controller = await (await leader(brokers)).service.scalable.lead(TOPIC)
    await controller.create_subscription("s", "STREAM", "earliest")
    service = brokers[0].service
    for operation in ("split", "merge"):
        before = controller.layout
        parents = [before.segment(0)] if operation == "split" else [before.segment(2), before.segment(3)]
        attached = []
        for each in parents:
            name = physical_name(TOPIC, each)
            owner = await owner_of(brokers, name)
            client = await owner.client()
            await client.producer(str(name))
            await client.store(b"parent", 0)
            attached.append((client, name))
        after = await (controller.split_segment(0) if operation == "split" else controller.merge_segments(2, 3))
        for client, name in attached:
            await client.expect(CommandType.CLOSE_PRODUCER)
            client.publish(b"too late", 1)
            assert (await client.expect(CommandType.SEND_ERROR)).error == ServerError.TOPIC_TERMINATED_ERROR
            backlog = await service.segments.backlog(name, "s")
            assert (backlog.messages, backlog.is_terminated) == (1, True)
        for child in after.all_segments.values():
            if child.created_at_epoch == after.epoch:
                assert await service.segments.subscriptions(physical_name(TOPIC, child)) == ["s"]


@pytest.mark.req("R468-49")
async def test_children_have_their_cursors_before_clients_can_see_them(brokers: list[Any], clients: list[RawClient]) -> None:
    controller = await (await leader(brokers)).service.scalable.lead(TOPIC)
    await controller.create_subscription("s", "STREAM", "earliest")
    await layout(clients[1])
    for number in range(20):
        splitting = asyncio.ensure_future(controller.split_segment(number))
        shown = await epoch(clients[1], number + 1)
        for each in shown.dag.segments:
            if each.state == 0:
                name = TOPIC.segment(_range(each), each.segment_id)
                assert await brokers[0].service.segments.subscriptions(name) == ["s"]
        await splitting


# Namespace watches.


async def test_a_namespace_is_watched(broker: Any, client: RawClient, world: Any, until: Any) -> None:
    async def watch(number: int, **fields: Any) -> None:
        body = pb.CommandWatchScalableTopics(watch_id=number, namespace=fields.pop("namespace", "public/default"), **fields)
        client.send(encode(CommandType.WATCH_SCALABLE_TOPICS, body))

    service = broker.service
    await service.create_scalable_topic(TOPIC, 1, properties={"team": "a"})
    await watch(1)
    await watch(2, property_filters=[pb.KeyValue(key="team", value="b")])
    found = [await client.expect(CommandType.WATCH_SCALABLE_TOPICS_UPDATE) for _ in range(2)]
    assert {each.watch_id: list(each.snapshot.topics) for each in found} == {1: [NAME], 2: []}
    assert all(each.HasField("snapshot") for each in found)
    await watch(3, current_hash=topics_hash([NAME]))
    await client.settle()
    assert client.inbox == []  # it knows already
    client.send(encode(CommandType.WATCH_SCALABLE_TOPICS_CLOSE, pb.CommandWatchScalableTopicsClose(watch_id=3)))
    await service.create_scalable_topic(TopicName.parse("topic://public/default/second"), 1, properties={"team": "b"})
    await world.advance(1)
    for _ in range(2):
        diff = await client.expect(CommandType.WATCH_SCALABLE_TOPICS_UPDATE)
        assert list(diff.diff.added) == ["topic://public/default/second"]
    await service.scalable.delete_topic(TOPIC, force=True)
    await world.advance(1)
    assert list((await client.expect(CommandType.WATCH_SCALABLE_TOPICS_UPDATE)).diff.removed) == [NAME]
    for namespace, error in (("nowhere", ServerError.INVALID_TOPIC_NAME), ("public/nowhere", ServerError.TOPIC_NOT_FOUND)):
        await watch(9, namespace=namespace)
        assert (await client.expect(CommandType.WATCH_SCALABLE_TOPICS_UPDATE)).error == error
    assert service.namespace_watches.session_count == 2
    client.close()
    await until(lambda: service.namespace_watches.session_count == 0)


async def test_a_topic_of_a_missing_namespace_is_not_made(broker: Any) -> None:
    with pytest.raises(TopicNotFound):
        await broker.service.create_scalable_topic(TopicName.parse("topic://public/nowhere/x"), 1)
