"""Who leads, who owns and who serves are different brokers here, each reached over its sockets, and time stands still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from tests.unit.broker.placement import TOPIC, Placement, layout

from braid.errors import TopicTerminated
from braid.metadata import election
from braid.metadata.api import Span
from braid.metadata.election import LeaderElection
from braid.metadata.tenure import Tenure, take
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.segments import SegmentInfo, physical_name
from braid.runtime.plans import Moment, watching
from braid.scalable.config import ScalableConfig
from braid.scalable.records import controller_path, from_record, subscriptions_path
from braid.testing.broker import InProcessBroker
from braid.testing.clock import ManualClock
from braid.testing.raw_client import RawClient, hello
from braid.web.config import StandaloneConfig
from braid.web.node import BrokerNode
from braid.wire import requests
from braid.wire.types import AckType, CommandType

SESSION_SECONDS = StandaloneConfig().storage.session_timeout_seconds
RECONCILE_SECONDS = ScalableConfig().reconcile_seconds
PUSH_SECONDS = 1.0
"""What a layout change may take to reach a client of another broker."""


@asynccontextmanager
async def placement(config: StandaloneConfig | None = None) -> AsyncIterator[Placement]:
    async with InProcessBroker(brokers=3, clock=ManualClock(), config=config) as brokers:
        made = Placement(brokers)
        yield made
        for client in made.clients:
            client.close()


@pytest.fixture
async def place() -> AsyncIterator[Placement]:
    async with placement() as made:
        yield made


@pytest.fixture
async def without_looks() -> AsyncIterator[Placement]:
    """Nobody looks at a layout from time to time: who hears of a change was told."""
    async with placement(StandaloneConfig(scalable_topics=ScalableConfig(reconcile_seconds=3600))) as made:
        yield made


async def roles(place: Placement, segments: int = 2) -> tuple[BrokerNode, BrokerNode, BrokerNode]:
    """A topic, and three different brokers: its leader, the owner of all its segments, and one that is neither."""
    await place.by_clock(place.nodes[0].service.create_scalable_topic(TOPIC, segments))
    leader = await place.leader()
    owner, third = (node for node in place.nodes if node is not leader)
    await place.own_all(owner)
    return leader, owner, third


async def check_roles(place: Placement, leader: BrokerNode, owner: BrokerNode) -> None:
    """That it is still so, as the store and the brokers themselves say."""
    record = await place.nodes[0].service.scalable.metadata(TOPIC)
    names = {str(physical_name(TOPIC, each)) for each in record.layout.all_segments.values()}
    assert set(await place.owners(record.layout)) == {owner.broker_id}
    for node in place.nodes:
        assert (await node.service.scalable.leader_id(TOPIC) == node.broker_id) == (node is leader)
        if node is not owner:
            assert not names & set(node.service.topics)


async def next_update(client: RawClient, epoch: int) -> Any:
    """The update of an epoch, which is the next one but for such as only tell of addresses."""
    while (found := await client.expect(CommandType.SCALABLE_TOPIC_UPDATE)).dag.epoch < epoch:
        pass
    assert found.dag.epoch == epoch
    return found


# Layout sessions.


@pytest.mark.req("R468-1", "R468-40")
async def test_a_broker_that_neither_leads_nor_owns_answers_from_the_store_alone(place: Placement) -> None:
    leader, owner, third = await roles(place)
    answers = [await layout(await place.client(node)) for node in (leader, owner, third)]
    await check_roles(place, leader, owner)
    for answer in answers:
        assert answer.dag == answers[0].dag
        assert [each.segment_id for each in answer.dag.segments] == [0, 1]
        assert {each.broker_url for each in answer.dag.segment_brokers} == {owner.service_url}
        assert answer.dag.controller_broker_url == leader.service_url
    # Nobody is left whom it could ask; their locks stand, for no time has passed.
    for number, node in enumerate(place.brokers.nodes):
        if node is not third:
            await place.brokers.kill(number)
    alone = await layout(await place.client(third), number=2)
    assert alone.dag == answers[0].dag


@pytest.mark.req("R468-2", "R468-7", "R468-46")
async def test_a_change_by_the_leader_is_pushed_by_another_broker_within_a_second(without_looks: Placement) -> None:
    place = without_looks
    leader, owner, third = await roles(place)
    client = await place.client(third)
    assert (await layout(client)).dag.epoch == 0
    controller = await leader.service.scalable.lead_scalable(TOPIC)
    for change in range(1, 6):
        after = await place.by_clock(controller.split_segment(min(controller.layout.active_segments)))
        done_at = place.clock.monotonic()
        shown = await next_update(client, change)  # and time stands
        assert place.clock.monotonic() - done_at < PUSH_SECONDS
        assert sorted(each.segment_id for each in shown.dag.segments) == sorted(after.all_segments)
    await check_roles(place, leader, owner)  # five splits, and the leader has not come to own anything


def paths(place: Placement) -> list[str]:
    """Everything the metadata store has of the topic."""
    return [path for path in place.brokers.standalone.metadata.tables.rows if "orders" in path]


# Leadership.


class Race:
    """Holds up whoever is about to write the lock of a topic until all brokers are: each of them has seen that nobody leads.
    Counts who comes to lead, be it for a moment."""

    def __init__(self, racers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.key = ""
        self.arrived = 0
        self.won: list[Tenure] = []
        self._racers = racers
        self._all_there = asyncio.Event()
        take_office = LeaderElection._take_office

        async def together(store: Any, clock: Any, key: str, value: bytes, **options: Any) -> Any:
            if key == self.key:
                self.arrived += 1
                if self.arrived >= self._racers:
                    self._all_there.set()
                await self._all_there.wait()
            return await take(store, clock, key, value, **options)

        def won(one: LeaderElection, tenure: Tenure) -> None:
            if tenure.key == self.key:
                self.won.append(tenure)
            take_office(one, tenure)

        monkeypatch.setattr(election, take.__name__, together)
        monkeypatch.setattr(LeaderElection, "_take_office", won)

    def begin(self, key: str) -> None:
        self.key, self.arrived, self.won, self._all_there = key, 0, [], asyncio.Event()


@pytest.mark.req("R468-3")
async def test_three_brokers_race_for_a_topic_and_one_leads(place: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.nodes[0].service.metadata
    race = Race(len(place.nodes), monkeypatch)
    won = set()
    for number in range(12):
        topic = TopicName.parse(f"topic://public/default/race-{number}")
        await place.nodes[number % 3].service.scalable._records.put_new(topic, 1)  # made, and led by nobody yet
        assert await store.get(controller_path(topic), fresh=True) is None
        race.begin(controller_path(topic))
        order = place.nodes[number % 3 :] + place.nodes[: number % 3]
        made = await asyncio.gather(*(node.service.scalable.controller(topic) for node in order))
        assert (race.arrived, len(race.won)) == (len(place.nodes), 1)
        record = await store.get(controller_path(topic), fresh=True)
        assert record is not None
        locks = [name async for name in store.names(Span(controller_path(topic).rpartition("/")[0])) if "controller" in name]
        assert len(locks) == 1
        leading = [node for node, each in zip(order, made, strict=True) if each.is_leading]
        assert [node.broker_id for node in leading] == [msgspec.json.decode(record.value)]
        assert record.owner == leading[0].service.metadata.session.id
        won.add(leading[0].broker_id)
    assert len(won) > 1


@pytest.mark.req("R468-12", "R468-36")
async def test_a_killed_leader_is_replaced_within_the_session_timeout(place: Placement) -> None:
    leader, _owner, third = await roles(place)
    for node in place.nodes:
        await node.service.scalable.controller(TOPIC)  # each has one
    client = await place.client(third)
    await layout(client)
    at = place.brokers.nodes.index(leader)
    before = place.clock.monotonic()
    await place.brokers.kill(at)
    lock = await third.service.metadata.get(controller_path(TOPIC), fresh=True)
    assert lock is not None and msgspec.json.decode(lock.value) == leader.broker_id  # a dead one's lock
    successor = await place.leader()
    assert successor is not leader
    assert place.clock.monotonic() - before <= SESSION_SECONDS
    controller = await place.by_clock(successor.service.scalable.lead_scalable(TOPIC))
    after = await place.by_clock(controller.split_segment(0))
    assert after.epoch == 1
    assert (await place.by_clock(next_update(client, 1))).dag.controller_broker_url == successor.service_url


# Segments elsewhere.


@pytest.mark.req("R468-10")
async def test_create_and_delete_leave_no_ledger_behind(place: Placement) -> None:
    ledgers = place.brokers.standalone.ledgers
    before = {each async for each in ledgers.ledgers()}
    leader, owner, _third = await roles(place, 4)
    controller = await leader.service.scalable.lead_scalable(TOPIC)
    await place.by_clock(controller.create_subscription("s", "STREAM", "earliest"))
    for each in list(controller.layout.active_segments.values()):
        client = await place.client(owner)
        name = str(physical_name(TOPIC, each))
        await client.producer(name)
        for number in range(3):
            await client.store(b"x", number)
        await client.subscribe(name, "s", permits=3)
        await client.messages(2)
        (last,) = await client.messages(1)
        request = client.next_request()
        client.send(requests.ack(1, [last.command.message_id], AckType.INDIVIDUAL, request))
        assert not (await client.answer(request)).HasField("error")
        client.close()
    await place.by_clock(controller.split_segment(0))
    await place.by_clock(controller.merge_segments(1, 2))
    names = [str(physical_name(TOPIC, each)) for each in controller.layout.all_segments.values()]
    # Messages and acknowledgments of four segments, and records: of logs, cursors, the topic, its subscription.
    assert len({each async for each in ledgers.ledgers()} - before) >= 8
    assert len(paths(place)) > 2 * len(names)
    await place.by_clock(leader.service.scalable.delete_topic(TOPIC, force=True))
    assert {each async for each in ledgers.ledgers()} == before
    assert paths(place) == []
    for node in place.nodes:
        assert not set(names) & set(node.service.topics)


@pytest.mark.req("R468-45")
async def test_subscriptions_that_only_a_segments_owner_knows_are_found_here_and_there(place: Placement) -> None:
    leader, far, _third = await roles(place, 4)
    controller = await leader.service.scalable.lead_scalable(TOPIC)
    near_one, far_one = await in_two_bundles(place, controller.layout)
    near_name, far_name = physical_name(TOPIC, near_one), physical_name(TOPIC, far_one)
    await place.own(near_name, leader)
    owners = await place.owners(controller.layout, near_one.segment_id, far_one.segment_id)
    assert owners == [leader.broker_id, far.broker_id]
    for node, name, subscription in ((leader, near_name, "near"), (far, far_name, "far")):
        await node.service.local_segments.create(
            name, subscriptions={subscription: "earliest"}, producers={}, epoch=1 << 60, incarnation=controller.incarnation
        )
    store = leader.service.metadata
    assert [name async for name in store.names(Span(subscriptions_path(TOPIC)), fresh=True)] == []  # only the owners know
    found: list[list[str]] = []

    async def look(step: str, moment: Moment) -> None:
        if (step, moment) == ("split:seal-parent", "before"):  # before anybody can write to the children
            pending = (await leader.service.scalable.metadata(TOPIC)).pending_operation
            assert pending is not None
            children = [physical_name(TOPIC, from_record(child)) for child in pending.children]
            found.extend([await leader.service.segments.subscriptions(child) for child in children])

    for parent, wanted in ((near_one.segment_id, ["near"]), (far_one.segment_id, ["far"])):
        with watching(look):
            after = await place.by_clock(controller.split_segment(parent))
        for number in after.segment(parent).child_ids:
            name = physical_name(TOPIC, after.segment(number))
            assert await leader.service.segments.subscriptions(name) == wanted
    assert found == [["near"], ["near"], ["far"], ["far"]]
    assert str(far_name) not in leader.service.topics
    assert str(far_name) in far.service.topics


@pytest.mark.req("R468-55")
async def test_two_segments_of_different_brokers_are_merged_at_a_third(place: Placement) -> None:
    leader, first_owner, second_owner = await roles(place, 4)
    controller = await leader.service.scalable.lead_scalable(TOPIC)
    await place.by_clock(controller.create_subscription("s", "STREAM", "earliest"))
    first, second = await in_two_bundles(place, controller.layout)
    await place.own(physical_name(TOPIC, second), second_owner)
    owners = await place.owners(controller.layout, first.segment_id, second.segment_id)
    assert owners == [first_owner.broker_id, second_owner.broker_id]
    assert leader.broker_id not in owners
    for each, node in ((first, first_owner), (second, second_owner)):
        client = await place.client(node)
        await client.producer(str(physical_name(TOPIC, each)))
        await client.store(b"x", 0)
    merged = await place.by_clock(controller.merge_segments(first.segment_id, second.segment_id))
    child = merged.segment(max(merged.all_segments))
    assert (child.hash_range.start, child.hash_range.end) == (first.hash_range.start, second.hash_range.end)
    for node, client, each in zip((first_owner, second_owner), place.clients[-2:], (first, second), strict=True):
        await client.expect(CommandType.CLOSE_PRODUCER)
        with pytest.raises(TopicTerminated):
            await client.producer(str(physical_name(TOPIC, each)), 2)
        found = await leader.service.segments.backlog(physical_name(TOPIC, each), "s")
        assert (found.messages, found.is_terminated) == (1, True)
        assert str(physical_name(TOPIC, each)) in node.service.topics
    assert await leader.service.segments.subscriptions(physical_name(TOPIC, child)) == ["s"]


async def in_two_bundles(place: Placement, layout: SegmentLayout) -> tuple[SegmentInfo, SegmentInfo]:
    """Neighbours whose bundles differ, so that they can have different owners."""
    for first, second in pairwise(layout.active_in_order):
        if await place.bundle(physical_name(TOPIC, first)) != await place.bundle(physical_name(TOPIC, second)):
            return first, second
    raise AssertionError("all neighbours lie in one bundle; take another topic name")


# Stream consumers.


async def register(client: RawClient, name: str, number: int = 9) -> Any:
    request_id = client.next_request()
    client.send(requests.scalable_topic_subscribe(request_id, str(TOPIC), "sub", name, number))
    reply = await client.answer(request_id)
    assert not reply.HasField("error"), reply.message
    return reply.assignment


@pytest.mark.req("R468-70")
async def test_an_owner_that_is_killed_and_started_again_changes_no_assignment(place: Placement) -> None:
    leader, owner, third = await roles(place, 4)
    controller = await leader.service.scalable.lead_scalable(TOPIC)
    clients = [await place.client(node) for node in (leader, third)]
    for client, who in zip(clients, "ab", strict=True):
        await register(client, who)

    async def spread() -> dict[str, list[int]]:
        consumers = (await controller.stats())["subscriptions"]["sub"]["consumers"]
        return {who: sorted(each["segments"]) for who, each in consumers.items()}

    before = await spread()
    assert [len(each) for each in before.values()] == [2, 2]
    await clients[0].expect(CommandType.SCALABLE_TOPIC_ASSIGNMENT_UPDATE)  # it had all four
    name = physical_name(TOPIC, controller.layout.segment(0))
    assert await place.owner(name) is owner
    assert {str(physical_name(TOPIC, each)) for each in controller.layout.all_segments.values()} <= set(owner.service.topics)
    await place.brokers.kill(place.brokers.nodes.index(owner))
    restarted = await place.brokers.add_broker()
    await place.clock.advance(SESSION_SECONDS + 2 * RECONCILE_SECONDS)
    await place.own_all(restarted)
    assert await place.owners(controller.layout) == [restarted.broker_id] * 4
    backlog = await place.by_clock(leader.service.segments.backlog(name, "sub"))
    assert backlog.messages == 0
    assert str(name) in restarted.service.topics  # it serves again
    await place.clock.advance(2 * RECONCILE_SECONDS)
    for client in clients:
        await client.settle()
        assert CommandType.SCALABLE_TOPIC_ASSIGNMENT_UPDATE not in client.kinds()
        assert CommandType.CLOSE_CONSUMER not in client.kinds()
    assert await spread() == before
    assert await place.leader() is leader


class Dump(asyncio.Protocol):
    """A socket whose bytes are kept as they came."""

    def __init__(self) -> None:
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data

    def commands(self, number: int) -> list[bytes]:
        """The bodies of a command's frames, told apart by nothing but lengths and tags."""
        rest, found = self.data, []
        while len(rest) >= 8:
            total, size = int.from_bytes(rest[:4], "big"), int.from_bytes(rest[4:8], "big")
            command, rest = rest[8 : 8 + size], rest[4 + total :]
            head = b"\x08" + _varint(number) + _tag(number, 2)
            if command.startswith(head):
                body = command[len(head) :]
                length = next(at for at, byte in enumerate(body) if byte < 0x80) + 1
                assert _varint(len(body) - length) == body[:length]
                found.append(body[length:])
        return found


def _varint(value: int) -> bytes:
    done = b""
    while value > 0x7F:
        done, value = done + bytes([value & 0x7F | 0x80]), value >> 7
    return done + bytes([value])


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _nested(number: int, body: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(body)) + body


def _assigned(epoch: int, *segments: tuple[int, int, int]) -> bytes:
    """`ScalableConsumerAssignment`: layout_epoch = 1, segments = 2 with id = 1, start = 2, end = 3, topic = 4."""
    made = b"\x08" + _varint(epoch)
    for number, start, end in segments:
        name = f"segment://public/default/orders/{start:04x}-{end:04x}-{number}".encode()
        fields = b"\x08" + _varint(number) + b"\x10" + _varint(start) + b"\x18" + _varint(end) + _nested(4, name)
        made += _nested(2, fields)
    return made


@pytest.mark.req("R468-29")
async def test_what_a_consumer_is_told_byte_by_byte(place: Placement) -> None:
    leader, _owner, third = await roles(place)
    address = urlsplit(third.service_url)
    transport, dump = await asyncio.get_running_loop().create_connection(
        Dump, address.hostname or "localhost", address.port or 6650
    )
    transport.write(hello())
    transport.write(requests.scalable_topic_subscribe(7, str(TOPIC), "sub", "c", 9))

    async def arrived(number: int, count: int) -> list[bytes]:
        async def found() -> bool:
            return len(dump.commands(number)) >= count

        await place.until(found)
        return dump.commands(number)

    try:
        whole = ((0, 0x0000, 0x7FFF), (1, 0x8000, 0xFFFF))
        assert await arrived(74, 1) == [b"\x08\x07" + _nested(4, _assigned(0, *whole))]
        controller = await leader.service.scalable.lead_scalable(TOPIC)
        await place.by_clock(controller.split_segment(0))
        halves = ((2, 0x0000, 0x3FFF), (3, 0x4000, 0x7FFF), (1, 0x8000, 0xFFFF))
        told = await arrived(75, 1)
        assert told[-1] == b"\x08\x09" + _nested(2, _assigned(1, *halves))
    finally:
        transport.close()
