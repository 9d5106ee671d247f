"""LOOKUP, PARTITIONED_METADATA, GET_TOPICS_OF_NAMESPACE, schemas, and clear answers for what is not built yet."""

from __future__ import annotations

from typing import Any

import pytest

from braid.errors import BraidError, IncompatibleSchema, NotAllowed, TopicNotFound
from braid.model.names import TopicName
from braid.testing.raw_client import CPP, RawClient, position_of
from braid.wire import messages as pb
from braid.wire import requests
from braid.wire.checksum import topics_hash
from braid.wire.commands import encode, enum_value
from braid.wire.types import CommandType, LookupResult, PartitionsResult, SchemaType, ServerError, TopicsMode

PREFIX = "persistent://public/default/"
TOPIC = PREFIX + "names"


async def partitions(client: RawClient, topic: str, may_create: bool = True) -> Any:
    request_id = client.next_request()
    client.send(requests.partitioned_metadata(request_id, topic, may_create))
    return await client.answer(request_id)


async def lookup(client: RawClient, topic: str, **options: Any) -> Any:
    request_id = client.next_request()
    client.send(requests.lookup(request_id, topic, **options))
    return await client.answer(request_id)


async def listing(client: RawClient, **options: Any) -> Any:
    request_id = client.next_request()
    client.send(requests.topics_of_namespace(request_id, options.pop("namespace", "public/default"), **options))
    return await client.answer(request_id)


# 6.1


@pytest.mark.parametrize("short", ["names", "public/default/names", "persistent://public/default/names"])
async def test_6_1_short_names_mean_the_same_topic(broker: Any, client: RawClient, short: str) -> None:
    await client.producer(short)
    assert list(broker.service.topics) == [TOPIC]


@pytest.mark.parametrize("local", ["a b", "ü", "100%", "x-partition-01", "x-partition--1", "...", "q?x=1&y#z"])
async def test_6_1_local_names_may_be_nearly_anything(world: Any, broker: Any, client: RawClient, local: str) -> None:
    await client.producer(PREFIX + local)
    position = await client.store(b"x", 0)
    assert list((await listing(client)).topics) == [PREFIX + local]
    await broker.stop()
    client = await (await world.broker()).client()
    await client.subscribe(PREFIX + local)
    assert position_of((await client.last_message_id()).last_message_id) == position


@pytest.mark.parametrize("local", [" x", "x ", ".", "..", "a%2Fb", "a\\b", "<script>", "a'b", 'a"b', "x" * 256])
async def test_6_1_a_name_that_means_something_else_elsewhere_is_never_auto_created(client: RawClient, local: str) -> None:
    with pytest.raises(BraidError):
        await client.producer(PREFIX + local)


# 6.2, row by row.


async def test_6_2_a_partitioned_topic_answers_its_count_and_its_partitions_zero(broker: Any, client: RawClient) -> None:
    await broker.service.create_partitioned(TopicName.parse(TOPIC), 4)
    reply = await partitions(client, TOPIC)
    assert (reply.response, reply.partitions) == (PartitionsResult.SUCCESS, 4)
    for number in range(4):
        assert (await partitions(client, f"{TOPIC}-partition-{number}", may_create=False)).partitions == 0


async def test_6_2_a_plain_topic_is_zero(client: RawClient) -> None:
    await client.producer(TOPIC)
    assert (await partitions(client, TOPIC, may_create=False)).partitions == 0


async def test_6_2_an_absent_topic_is_zero_and_not_created(client: RawClient) -> None:
    reply = await partitions(client, TOPIC)
    assert (reply.response, reply.partitions) == (PartitionsResult.SUCCESS, 0)
    assert list((await listing(client)).topics) == []


async def test_6_2_an_absent_topic_is_created_partitioned_where_that_is_the_default(world: Any) -> None:
    broker = await world.broker(auto_topic_partitions=3)
    client = await broker.client()
    assert (await partitions(client, TOPIC)).partitions == 3
    assert list((await listing(client)).topics) == [f"{TOPIC}-partition-{number}" for number in range(3)]
    for special in ("x-DLQ", "x-RETRY", "y-partition-1"):
        assert (await partitions(client, PREFIX + special)).partitions == 0
    assert (await partitions(client, TOPIC)).partitions == 3


@pytest.mark.parametrize("refusal", ["by the client", "by the namespace"])
async def test_6_2_an_absent_topic_that_may_not_be_created_is_topic_not_found(
    broker: Any, client: RawClient, refusal: str
) -> None:
    if refusal == "by the namespace":
        await broker.policy("autoTopicCreationOverride", {"allowAutoTopicCreation": False})
    reply = await partitions(client, TOPIC, may_create=refusal != "by the client")
    assert (reply.response, reply.error) == (PartitionsResult.FAILED, ServerError.TOPIC_NOT_FOUND)


@pytest.mark.parametrize("topic", ["persistent://absent/ns/x", "persistent://public/absent/x"])
async def test_6_2_an_absent_tenant_or_namespace_is_topic_not_found(client: RawClient, topic: str) -> None:
    reply = await partitions(client, topic)
    assert (reply.response, reply.error) == (PartitionsResult.FAILED, ServerError.TOPIC_NOT_FOUND)


# 6.3


async def test_6_3_lookup_connects_to_this_broker_and_creates_nothing(broker: Any, client: RawClient) -> None:
    reply = await lookup(client, TOPIC)
    assert (reply.response, reply.brokerServiceUrl, reply.authoritative) == (LookupResult.CONNECT, broker.url, True)
    assert broker.service.topics == {}
    assert (await lookup(client, TOPIC, listener="")).response == LookupResult.CONNECT


async def test_6_3_an_unknown_listener_is_refused_in_the_words_clients_look_for(client: RawClient) -> None:
    reply = await lookup(client, TOPIC, listener="test")
    assert (reply.response, reply.error) == (LookupResult.FAILED, ServerError.SERVICE_NOT_READY)
    assert "the broker do not have test listener" in reply.message


async def test_6_3_lookup_in_an_absent_namespace_is_topic_not_found(client: RawClient) -> None:
    reply = await lookup(client, "persistent://public/absent/x")
    assert (reply.response, reply.error) == (LookupResult.FAILED, ServerError.TOPIC_NOT_FOUND)


# 6.5


async def test_6_5_auto_creation_follows_the_namespace_and_partitions_their_record(broker: Any, client: RawClient) -> None:
    await broker.service.create_partitioned(TopicName.parse(TOPIC), 2)
    await broker.policy("autoTopicCreationOverride", {"allowAutoTopicCreation": False})
    with pytest.raises(TopicNotFound):
        await client.producer(PREFIX + "new")
    with pytest.raises(TopicNotFound):
        await client.subscribe(PREFIX + "new")
    await broker.service.delete_topic(TopicName.parse(TOPIC + "-partition-1"), force=True)
    await client.producer(TOPIC + "-partition-1")
    with pytest.raises(TopicNotFound):
        await client.producer(TOPIC + "-partition-2", 2)
    await broker.policy("autoTopicCreationOverride", None)
    await client.producer(PREFIX + "new", 3)


async def test_6_5_the_partitioned_parent_itself_takes_no_producer(broker: Any, client: RawClient) -> None:
    await broker.service.create_partitioned(TopicName.parse(TOPIC), 2)
    with pytest.raises(NotAllowed):
        await client.producer(TOPIC)


async def test_6_5_the_broker_s_setting_holds_where_the_namespace_says_nothing(world: Any) -> None:
    broker = await world.broker(allow_auto_topic_creation=False)
    client = await broker.client()
    with pytest.raises(TopicNotFound):
        await client.producer(TOPIC)
    await broker.policy("autoTopicCreationOverride", {"allowAutoTopicCreation": True, "topicType": "non-partitioned"})
    await client.producer(TOPIC)


async def test_creating_partitions_makes_them_list_at_once_and_growing_adds(world: Any, broker: Any, client: RawClient) -> None:
    name = TopicName.parse(TOPIC)
    await broker.service.create_partitioned(name, 2)
    await broker.service.grow_partitioned(name, 3)
    assert len((await listing(client)).topics) == 3
    await broker.kill()
    client = await (await world.broker()).client()
    assert (await partitions(client, TOPIC)).partitions == 3
    assert len((await listing(client)).topics) == 3


# 6.6


async def test_6_6_the_listing_has_partitions_not_parents_and_a_hash(broker: Any, client: RawClient) -> None:
    await broker.service.create_partitioned(TopicName.parse(PREFIX + "p"), 2)
    await client.producer(PREFIX + "a")
    names = [PREFIX + "a", PREFIX + "p-partition-0", PREFIX + "p-partition-1"]
    for mode in (TopicsMode.PERSISTENT, TopicsMode.ALL):
        reply = await listing(client, mode=mode)
        assert sorted(reply.topics) == names
        assert reply.topics_hash == topics_hash(names)
        assert reply.changed
        assert not reply.filtered
    assert list((await listing(client, mode=TopicsMode.NON_PERSISTENT)).topics) == []
    same = await listing(client, topics_hash=topics_hash(names))
    assert (list(same.topics), same.changed) == ([], False)
    other = await listing(client, topics_hash="00000000")
    assert (len(other.topics), other.changed) == (3, True)
    assert len((await listing(client, pattern="public/default/.*")).topics) == 3


@pytest.mark.parametrize("namespace", ["public/absent", "nonsense", "a/b/c", ""])
async def test_6_6_a_bad_namespace_is_an_error_the_client_survives(client: RawClient, namespace: str) -> None:
    with pytest.raises(BraidError):
        await listing(client, namespace=namespace)
    await client.settle()


# 7 Schemas: stored, versioned, answered; no compatibility rules.


def a_schema(data: bytes = b'{"type":"string"}', kind: SchemaType = SchemaType.AVRO, **properties: str) -> pb.Schema:
    made = pb.Schema(name="AVRO", schema_data=data, type=enum_value(kind))
    for key, value in properties.items():
        made.properties.add(key=key, value=value)
    return made


def version(number: int) -> bytes:
    return number.to_bytes(8, "big")


async def schema_of(client: RawClient, topic: str = TOPIC, version: bytes | None = None) -> Any:
    request_id = client.next_request()
    client.send(requests.get_schema(request_id, topic, version))
    return await client.answer(request_id)


async def test_7_versions_start_at_zero_grow_and_the_same_schema_keeps_its_own(broker: Any, client: RawClient) -> None:
    one, two = a_schema(), a_schema(b'{"type":"int"}', a="b")
    assert (await client.producer(TOPIC, 1, schema=one)).schema_version == version(0)
    assert (await client.producer(TOPIC, 2, schema=two)).schema_version == version(1)
    assert (await client.producer(TOPIC, 3, schema=one)).schema_version == version(0)
    await client.subscribe(TOPIC, schema=two)
    latest = await schema_of(client)
    assert latest.schema_version == version(1)
    assert latest.schema.schema_data == b'{"type":"int"}'
    assert {pair.key: pair.value for pair in latest.schema.properties} == {"a": "b"}
    assert latest.schema.type == SchemaType.AVRO
    first = await schema_of(client, version=version(0) + b"more")
    assert first.schema.schema_data == b'{"type":"string"}'


async def test_7_schemas_belong_to_the_base_topic_and_survive_a_kill(world: Any, broker: Any, client: RawClient) -> None:
    await client.producer(TOPIC + "-partition-0", schema=a_schema())
    await broker.kill()
    client = await (await world.broker()).client()
    for topic in (TOPIC, TOPIC + "-partition-1"):
        assert (await schema_of(client, topic)).schema.schema_data == b'{"type":"string"}'
    assert (await client.producer(TOPIC, schema=a_schema())).schema_version == version(0)


async def test_7_a_consumer_s_schema_is_stored_auto_consume_and_none_are_not(client: RawClient) -> None:
    await client.subscribe(TOPIC, schema=a_schema(kind=SchemaType.AUTO_CONSUME))
    assert (await client.producer(TOPIC, schema=a_schema(b"", SchemaType.NONE))).schema_version == b""
    assert (await schema_of(client)).error_code == ServerError.TOPIC_NOT_FOUND
    await client.subscribe(TOPIC, "other", consumer_id=2, schema=a_schema())
    assert (await schema_of(client)).schema_version == version(0)


@pytest.mark.parametrize("bad", [b"", b"1234567"])
async def test_7_3_a_short_schema_version_is_incompatible_and_an_absent_one_not_found(client: RawClient, bad: bytes) -> None:
    await client.producer(TOPIC, schema=a_schema())
    assert (await schema_of(client, version=bad)).error_code == IncompatibleSchema.code
    assert (await schema_of(client, version=version(7))).error_code == ServerError.TOPIC_NOT_FOUND


async def test_7_1_get_or_create_schema_needs_the_topic(client: RawClient) -> None:
    def ask(request_id: int) -> bytes:
        body = pb.CommandGetOrCreateSchema(request_id=request_id, topic=TOPIC, schema=a_schema())
        return encode(CommandType.GET_OR_CREATE_SCHEMA, body)

    client.send(ask(80))
    assert (await client.answer(80)).error_code == ServerError.TOPIC_NOT_FOUND
    await client.producer(TOPIC)
    client.send(ask(81))
    assert (await client.answer(81)).schema_version == version(0)


# 8 and "not now".


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (
            CommandType.WATCH_TOPIC_LIST,
            pb.CommandWatchTopicList(request_id=5, watcher_id=1, namespace="public/default", topics_pattern=".*"),
        ),
        (CommandType.WATCH_TOPIC_LIST_CLOSE, pb.CommandWatchTopicListClose(request_id=5, watcher_id=1)),
    ],
)
async def test_8_what_is_not_built_is_a_plain_not_allowed_error(client: RawClient, kind: CommandType, body: Any) -> None:
    client.send(encode(kind, body))
    reply = await client.expect(CommandType.ERROR)
    assert (reply.request_id, reply.error) == (5, ServerError.NOT_ALLOWED_ERROR)
    assert reply.message
    await client.settle()


async def test_non_persistent_topics_are_refused_by_every_command(client: RawClient) -> None:
    name = "non-persistent://public/default/x"
    for attempt in (client.producer(name), client.subscribe(name)):
        with pytest.raises(NotAllowed):
            await attempt
    assert (await lookup(client, name)).error == ServerError.NOT_ALLOWED_ERROR
    assert (await partitions(client, name)).error == ServerError.NOT_ALLOWED_ERROR
    await client.settle()


async def test_trap_1_no_client_is_sent_a_command_of_the_newer_kind_unasked(broker: Any) -> None:
    """A whole life of a C++ client: nothing but the commands it knows."""
    client = await broker.client(client_version=CPP, protocol_version=20)
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, permits=10)
    position = await client.store(b"x", 0)
    await client.acked(position)
    await broker.topic(TOPIC).terminate()
    await client.settle()
    known = {CommandType.MESSAGE, CommandType.CLOSE_PRODUCER}
    assert set(client.kinds()) <= known
