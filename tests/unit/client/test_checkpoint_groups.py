"""Checkpoint groups against real brokers: who joins or leaves goes on where the others stopped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import pytest

import braid
from braid.broker.scalable_consumers import ScalableConsumer
from braid.client import Client
from braid.client.checkpoint_consumer import CheckpointConsumer
from braid.client.checkpoint_starts import CheckpointStart
from braid.client.checkpoints import END, write_place
from braid.client.config import ClientConfig
from braid.client.group_places import CHECKPOINT_SECONDS
from braid.client.layouts import LayoutSession
from braid.client.messages import EARLIEST, LATEST, Message, MessageId
from braid.errors import ConnectionLost, NotAllowed, NotReady
from braid.model.names import TopicName
from braid.scalable.api import ConsumerAssignment
from braid.scalable.config import ScalableConfig
from braid.scalable.controller import ScalableTopicController
from braid.testing.broker import InProcessBroker
from braid.web.config import StandaloneConfig, StorageConfig

TOPIC = "topic://public/default/orders"
NAME = TopicName.parse(TOPIC)
SECONDS = 10.0
KEYS = 16


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    config = StandaloneConfig(scalable_topics=ScalableConfig(drain_poll_seconds=0.1, consumer_grace_seconds=0.5))
    async with InProcessBroker(config=config, with_http=False) as one:
        await one.nodes[0].service.create_scalable_topic(NAME, 2)
        yield one


@pytest.fixture
async def client(broker: InProcessBroker) -> AsyncIterator[Client]:
    async with braid.connect(broker.service_url, config=ClientConfig(receiver_queue=64)) as one:
        yield one


async def leader(broker: InProcessBroker) -> ScalableTopicController:
    found = await broker.nodes[0].service.scalable.lead(NAME)
    assert isinstance(found, ScalableTopicController)
    return found


async def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - brokers take their own time, no event tells
            await asyncio.sleep(0.005)


async def produce(client: Client, first: int, last: int) -> None:
    async with client.producer(TOPIC) as producer:
        for number in range(first, last):
            await producer.send_nowait(str(number).encode(), key=f"k{number % KEYS}")
        await producer.flush()


async def drain(members: Sequence[CheckpointConsumer], count: int) -> list[int]:
    """So many messages, from whoever has them."""
    got: list[int] = []
    async with asyncio.timeout(SECONDS):
        while len(got) < count:
            for member in members:
                if len(got) < count:
                    got += numbers(await member.receive_batch(min(50, count - len(got)), 0.01))
    return got


async def rest(members: Sequence[CheckpointConsumer]) -> list[int]:
    """What comes beyond what is expected: nothing, in a quiet group."""
    return [number for member in members for number in numbers(await member.receive_batch(50, 0.2))]


def numbers(messages: Sequence[Message]) -> list[int]:
    return [int(message.payload) for message in messages]


def shared(members: Sequence[CheckpointConsumer], segments: set[int]) -> Callable[[], bool]:
    """Whether everybody has something, and all of it is read."""

    def is_so() -> bool:
        held = [each for member in members for each in member.segments]
        return sorted(held) == sorted(segments) and all(member.segments for member in members)

    return is_so


@pytest.mark.req("R468-31")
@pytest.mark.parametrize("start", [EARLIEST, LATEST])
async def test_a_member_that_joins_goes_on_where_the_other_one_stopped(
    broker: InProcessBroker, client: Client, start: MessageId
) -> None:
    async with client.checkpoint_consumer(TOPIC, group="g", name="a", start=start) as first:
        await produce(client, 0, 200)
        got = await drain([first], 100)
        async with client.checkpoint_consumer(TOPIC, group="g", name="b", start=start) as second:
            await until(shared([first, second], {0, 1}))
            got += await drain([first, second], 100)
            await produce(client, 200, 300)
            got += await drain([first, second], 100)
            assert await rest([first, second]) == []
    assert sorted(got) == list(range(300))


async def test_a_member_that_left_and_comes_back_goes_on(broker: InProcessBroker, client: Client) -> None:
    """Also in the middle of a batch, and with nobody in the group meanwhile."""
    await produce(client, 0, 200)
    got: list[int] = []
    for turn in range(4):
        start = EARLIEST if turn == 0 else random.Random(turn).choice([EARLIEST, LATEST])
        async with client.checkpoint_consumer(TOPIC, group="g", name=f"m{turn % 2}", start=start) as member:
            got += await drain_exactly(member, 37)
    async with client.checkpoint_consumer(TOPIC, group="g", start=LATEST) as member:
        got += await drain([member], 200 - len(got))
        assert await rest([member]) == []
    assert sorted(got) == list(range(200))


async def drain_exactly(member: CheckpointConsumer, count: int) -> list[int]:
    return [int((await member.receive(SECONDS)).payload) for _ in range(count)]


async def test_three_members_come_and_go(broker: InProcessBroker, client: Client) -> None:
    controller = await leader(broker)
    await controller.split_segment(0)
    members: list[CheckpointConsumer] = []
    got: list[int] = []
    sent = 0
    choice = random.Random(7)
    for turn in range(12):
        if len(members) < 3 and (not members or choice.random() < 0.6):
            members.append(
                await client.checkpoint_consumer(TOPIC, group="g", name=f"m{turn}", start=choice.choice([EARLIEST, LATEST]))
            )
        elif len(members) > 1:
            await members.pop(choice.randrange(len(members))).close()
        await produce(client, sent, sent + 30)
        sent += 30
        for member in members:
            got += numbers(await member.receive_batch(choice.randrange(1, 20), 0.05))
    got += await drain(members, sent - len(got))
    assert await rest(members) == []
    assert sorted(got) == list(range(sent))
    for member in members:
        await member.close()


async def test_split_and_merge_while_members_read(broker: InProcessBroker, client: Client) -> None:
    controller = await leader(broker)
    async with (
        client.checkpoint_consumer(TOPIC, group="g", name="a", start=LATEST) as first,
        client.checkpoint_consumer(TOPIC, group="g", name="b", start=LATEST) as second,
    ):
        await produce(client, 0, 60)
        got = await drain([first, second], 20)
        await controller.split_segment(0)
        await produce(client, 60, 120)
        async with client.checkpoint_consumer(TOPIC, group="g", name="c", start=LATEST) as third:
            got += await drain([first, third], 5)
            await controller.merge_segments(2, 3)
            await produce(client, 120, 180)
            await controller.split_segment(1)
            got += await drain([third], 1)
        await produce(client, 180, 200)
        got += await drain([first, second], 200 - len(got))
        assert await rest([first, second]) == []
    assert sorted(got) == list(range(200))


async def test_a_member_that_is_killed_hands_over_what_the_group_knows(broker: InProcessBroker, client: Client) -> None:
    """What it received since the last hand-over, or the last checkpoint but one, comes again; nothing is lost."""
    narrow = braid.connect(broker.service_url, config=ClientConfig(receiver_queue=8))
    async with narrow:
        doomed = await narrow.checkpoint_consumer(TOPIC, group="g", name="doomed", start=LATEST)
        await produce(client, 0, 100)
        got = await drain_exactly(doomed, 30)
        doomed.checkpoint()
        received = await drain_exactly(doomed, 10)
        assert doomed._reports is not None
        doomed.checkpoint()  # the one before is told now
        assert await doomed._reports.flush(SECONDS)
        received += await drain_exactly(doomed, 5)
        await die(doomed)
        async with client.checkpoint_consumer(TOPIC, group="g", name="heir", start=LATEST) as heir:
            again = await drain([heir], 70)
            assert await rest([heir]) == []
        assert sorted(got + again) == list(range(100))
        assert set(received) <= set(again)


async def die(member: CheckpointConsumer) -> None:
    """It is gone without a word."""
    session = member._session
    assert session is not None
    session._is_closed = True  # it does not come back
    session._tasks.cancel()
    assert member._reports is not None
    member._reports.stop()
    (await member.client.connection_for(member.layouts.controller_url)).abort(ConnectionLost("Cut by the test."))


async def test_the_end_of_a_segment_is_not_told_before_a_checkpoint(broker: InProcessBroker, client: Client) -> None:
    """A member that read a sealed segment to its end and took no checkpoint may not have stored anything of it."""
    controller = await leader(broker)
    async with braid.connect(broker.service_url) as doomed_client:
        doomed = await doomed_client.checkpoint_consumer(TOPIC, group="g", name="doomed")
        await produce(client, 0, 100)
        received = await drain_exactly(doomed, 100)
        await controller.split_segment(0)
        await until(lambda: doomed._places[0] is END)
        async with client.checkpoint_consumer(TOPIC, group="g", name="heir", start=LATEST) as heir:
            await until(lambda: bool(doomed.segments) and bool(heir.segments))  # both were told their shares
            assert doomed._reports is not None
            assert await doomed._reports.flush(SECONDS)
            kept = 0 in doomed._assigned
            await die(doomed)
            if kept:
                again = await drain([heir], sum(place == 0 for place in await segments_of(client, received)))
                assert set(again) <= set(received)
            assert kept


async def segments_of(client: Client, received: Sequence[int]) -> list[int]:
    """Where these messages are."""
    async with client.checkpoint_consumer(TOPIC) as reader:
        found = {int(each.payload): each.segment_id for each in [await reader.receive(SECONDS) for _ in received]}
    return [found[number] for number in received]


async def test_checkpoints_are_told_one_late_and_not_too_often(broker: InProcessBroker, client: Client) -> None:
    async with client.checkpoint_consumer(TOPIC, group="g", name="a") as member:
        await produce(client, 0, 100)
        assert member._reports is not None
        known: list[Mapping[int, bytes]] = []
        taken: list[Mapping[int, bytes]] = []
        for turn in range(5):
            await drain_exactly(member, 5)
            if turn == 4:
                member._reports._told_at -= CHECKPOINT_SECONDS
            taken.append({number: write_place(place) for number, place in member.checkpoint().places.items()})
            assert await member._reports.flush(SECONDS)
            known.append((await (await leader(broker))._term.work.subscriptions())["g"].places)  # type: ignore[union-attr]
        assert known[0] not in taken
        assert known[1:] == [taken[0]] * 3 + [taken[3]]


async def test_a_checkpoint_from_before_a_segment_was_away_is_not_told(broker: InProcessBroker, client: Client) -> None:
    """Others have read on from there since: the hand-over is what the group knows."""
    async with client.checkpoint_consumer(TOPIC, group="g", name="a") as first:
        await produce(client, 0, 200)
        await drain_exactly(first, 20)
        first.checkpoint()
        assert first._reports is not None
        async with client.checkpoint_consumer(TOPIC, group="g", name="b") as second:
            await until(shared([first, second], {0, 1}))
            moved = second.segments
            await drain_exactly(second, 10)
        await until(lambda: first.segments == [0, 1])
        record = (await (await leader(broker))._term.work.subscriptions())["g"]  # type: ignore[union-attr]
        before = {number: record.places[number] for number in moved}
        first.checkpoint()
        assert first._reports is not None
        assert await first._reports.flush(SECONDS)
        record = (await (await leader(broker))._term.work.subscriptions())["g"]  # type: ignore[union-attr]
        assert {number: record.places[number] for number in moved} == before


async def test_a_controller_that_does_not_hand_over_is_told_nothing(broker: InProcessBroker, client: Client) -> None:
    """One of an earlier version: it does not know the command."""
    async with client.checkpoint_consumer(TOPIC, group="g", name="a") as member:
        await produce(client, 0, 20)
        await drain_exactly(member, 10)
        session = member._session
        assert session is not None
        told: list[object] = []

        async def report(places: Mapping[int, bytes | None], released: Collection[int]) -> None:
            told.append(places)

        session.report = report  # type: ignore[method-assign]
        session._term = 0
        assert member._reports is not None
        for _ in range(3):
            member._reports._told_at = -100.0
            member.checkpoint()
        assert await member._reports.flush(SECONDS)
        assert told == []


async def test_a_start_is_told_as_the_start(broker: InProcessBroker, client: Client) -> None:
    """Not what the application has received since: it may not have stored that."""
    async with client.checkpoint_consumer(TOPIC, group="g", name="a") as member:
        await produce(client, 0, 100)
        stored = member.checkpoint()
        got = await drain_exactly(member, 40)
        async with client.checkpoint_consumer(TOPIC, group="g", name="b", start=stored) as second:
            await until(shared([member, second], {0, 1}))
            assert second._reports is not None
            assert await second._reports.flush(SECONDS)
            [mine] = second.segments
            known = (await (await leader(broker))._term.work.subscriptions())["g"].places[mine]  # type: ignore[union-attr]
            assert known == write_place(stored.places[mine])
            second._reports.expect(mine)
            await drain_exactly(second, 5)
            await second._tell_start(mine, second._lanes[mine])
            assert await second._reports.flush(SECONDS)
            known = (await (await leader(broker))._term.work.subscriptions())["g"].places[mine]  # type: ignore[union-attr]
            assert known == write_place(stored.places[mine])
        assert got


@pytest.mark.parametrize("takes_checkpoints", [False, True])
async def test_a_member_that_was_set_back_stays_so_when_the_leader_changes(
    broker: InProcessBroker, client: Client, takes_checkpoints: bool
) -> None:
    """The group's place is further until the start is told, or a checkpoint in its place."""
    async with client.checkpoint_consumer(TOPIC, group="g", name="a") as member:
        await produce(client, 0, 100)
        stored = member.checkpoint()
        await drain_exactly(member, 100)
    consumer = CheckpointConsumer(client, TOPIC, start=stored, group="g", name="a")
    session = consumer._session
    assert session is not None
    report, may_tell = session.report, asyncio.Event()

    async def late(places: Mapping[int, bytes | None], released: Collection[int]) -> None:
        await may_tell.wait()
        await report(places, released)

    session.report = late  # type: ignore[method-assign]
    opening = asyncio.create_task(consumer.open())
    await until(lambda: consumer.segments == [0, 1])
    lanes = dict(consumer._lanes)
    if takes_checkpoints:
        consumer.checkpoint()
        consumer.checkpoint()
    session.lost(ConnectionLost("Cut by the test."))  # and it registers again
    await until(lambda: session.is_attached)
    assert consumer._lanes == lanes
    may_tell.set()
    await opening
    assert sorted(await drain([consumer], 100)) == list(range(100))
    await consumer.close()


@pytest.mark.parametrize("is_closing", [True, False])
async def test_what_was_to_be_told_before_others_took_over_is_not_told(
    broker: InProcessBroker, client: Client, is_closing: bool
) -> None:
    """A member that was away for too long and comes back, if only to say farewell, must not set the group back."""
    async with braid.connect(broker.service_url) as away:
        first = await away.checkpoint_consumer(TOPIC, group="g", name="a")
        await produce(client, 0, 100)
        received = await drain_exactly(first, 60)
        first.checkpoint()
        session, may_register = first._session, asyncio.Event()
        assert session is not None
        register = session._register

        async def late() -> None:
            await may_register.wait()
            await register()

        session._register = late  # type: ignore[method-assign]
        (await away.connection_for(first.layouts.controller_url)).abort(ConnectionLost("Cut by the test."))
        closing = asyncio.create_task(first.close()) if is_closing else None
        if closing is None:
            received += await drain_exactly(first, 1)
            first.checkpoint()
        async with client.checkpoint_consumer(TOPIC, group="g", name="b") as second:
            await until(lambda: second.segments == [0, 1])
            assert sorted(await drain([second], 100)) == list(range(100))
            may_register.set()
            if closing is not None:
                await closing
            else:
                await until(shared([first, second], {0, 1}))
                assert first._reports is not None
                assert await first._reports.flush(SECONDS)
                session._is_closed = True
                await die(first)
            await until(lambda: second.segments == [0, 1])
            assert await rest([second]) == []


async def test_a_checkpoint_from_before_others_took_over_is_not_told(broker: InProcessBroker, client: Client) -> None:
    """A member that was away for too long gets its segments back: its last checkpoint is behind the others by now."""
    async with braid.connect(broker.service_url) as away:
        first = await away.checkpoint_consumer(TOPIC, group="g", name="a")
        await produce(client, 0, 100)
        await drain_exactly(first, 60)
        first.checkpoint()
        session, may_register = first._session, asyncio.Event()
        assert session is not None
        register = session._register

        async def late() -> None:
            await may_register.wait()
            await register()

        session._register = late  # type: ignore[method-assign]
        (await away.connection_for(first.layouts.controller_url)).abort(ConnectionLost("Cut by the test."))
        async with client.checkpoint_consumer(TOPIC, group="g", name="b") as second:
            await until(lambda: second.segments == [0, 1])
            assert sorted(await drain([second], 100)) == list(range(100))
        known = (await (await leader(broker))._term.work.subscriptions())["g"].places  # type: ignore[union-attr]
        may_register.set()
        await until(lambda: session.is_attached)
        first.checkpoint()
        assert first._reports is not None
        assert await first._reports.flush(SECONDS)
        assert (await (await leader(broker))._term.work.subscriptions())["g"].places == known  # type: ignore[union-attr]
        await first.close()


async def test_a_member_whose_broker_was_away_goes_on_where_the_group_is(
    broker: InProcessBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers register their members again by themselves: the member is not told that it was given up meanwhile."""
    register, may_register = ScalableConsumer._register, asyncio.Event()

    async def late(consumer: ScalableConsumer) -> ConsumerAssignment:
        if consumer.wanted.consumer_name == "a":
            await may_register.wait()
        return await register(consumer)

    async with client.checkpoint_consumer(TOPIC, group="g", name="a") as first:
        await produce(client, 0, 100)
        await drain_exactly(first, 60)
        connection = next(each for each in broker.nodes[0].server.connections if each.scalable_consumers)
        [consumer] = connection.scalable_consumers.values()
        place = consumer._place
        assert place is not None
        monkeypatch.setattr(ScalableConsumer, "_register", late)
        place.disconnect()
        consumer.ended(place, NotReady("The leader cannot be reached."))
        async with client.checkpoint_consumer(TOPIC, group="g", name="b") as second:
            await until(lambda: second.segments == [0, 1])
            assert sorted(await drain([second], 100)) == list(range(100))
        may_register.set()
        await until(lambda: consumer._place is not None)
        await produce(client, 100, 120)
        assert sorted(await drain([first], 20)) == list(range(100, 120))
        assert await rest([first]) == []


async def test_closing_again_takes_no_time(broker: InProcessBroker, client: Client) -> None:
    await produce(client, 0, 20)
    async with client.checkpoint_consumer(TOPIC, group="g", name="a") as member:
        await drain_exactly(member, 10)
        await member.close()
        assert member._reports is not None
        told: list[int] = []
        member._reports.flush = lambda _seconds: told.append(1)  # type: ignore[method-assign, assignment, return-value]
    assert told == []


async def test_a_restored_member_brings_its_own_place(broker: InProcessBroker, client: Client) -> None:
    async with client.checkpoint_consumer(TOPIC, group="g", name="a") as member:
        await produce(client, 0, 100)
        got = await drain_exactly(member, 40)
        stored = member.checkpoint()
        await drain_exactly(member, 30)
    async with client.checkpoint_consumer(TOPIC, group="g", name="a", start=stored) as member:
        got += await drain([member], 60)
        assert await rest([member]) == []
    assert sorted(got) == list(range(100))


async def test_an_old_checkpoint_does_not_set_the_others_back(broker: InProcessBroker, client: Client) -> None:
    """It counts for the first share of the member that brings it, not for what comes to it later."""
    async with client.checkpoint_consumer(TOPIC, group="g", name="a") as first:
        await produce(client, 0, 100)
        got = await drain_exactly(first, 10)
        stored = first.checkpoint()
        got += await drain([first], 90)
        async with client.checkpoint_consumer(TOPIC, group="g", name="b") as second:
            await until(shared([first, second], {0, 1}))
        first_again = await client.checkpoint_consumer(TOPIC, group="g", name="c", start=stored)
        await until(shared([first, first_again], {0, 1}))
        mine = set(first_again.segments)
        await first.close()
        await until(lambda: first_again.segments == [0, 1])
        again = await rest([first_again])
        assert len(again) < 90
        assert again
        held = [number for number in again if number in got]
        assert held == again
        assert mine
        await first_again.close()


async def test_a_member_of_another_broker_hands_over_through_the_leader() -> None:
    config = StandaloneConfig(scalable_topics=ScalableConfig(drain_poll_seconds=0.1))
    async with InProcessBroker(brokers=3, config=config) as brokers:
        await brokers.nodes[0].service.create_scalable_topic(NAME, 3)
        async with braid.connect(brokers.service_url) as client:
            members = [await client.checkpoint_consumer(TOPIC, group="g", name="m0", start=LATEST)]
            await produce(client, 0, 120)
            got = await drain(members, 50)
            members += [await client.checkpoint_consumer(TOPIC, group="g", name=f"m{each}", start=LATEST) for each in (1, 2)]
            await until(shared(members, {0, 1, 2}))
            got += await drain(members, 70)
            assert await rest(members) == []
            assert sorted(got) == list(range(120))
            for member in members:
                await member.close()


async def test_the_leader_dies_between_the_removal_and_the_answer() -> None:
    config = StandaloneConfig(
        scalable_topics=ScalableConfig(drain_poll_seconds=0.1, reconcile_seconds=0.2),
        storage=StorageConfig(session_timeout_seconds=2),
    )
    async with InProcessBroker(brokers=3, config=config) as brokers:
        await brokers.nodes[0].service.create_scalable_topic(NAME, 2)
        async with braid.connect(brokers.service_urls) as client:
            first = await client.checkpoint_consumer(TOPIC, group="g", name="a", start=LATEST)
            await produce(client, 0, 100)
            got = await drain([first], 60)
            may_answer, session = asyncio.Event(), first._session
            assert session is not None
            report = session.report

            async def late(places: Mapping[int, bytes | None], released: Collection[int]) -> None:
                await may_answer.wait()
                await report(places, released)

            session.report = late  # type: ignore[method-assign]
            second = await client.checkpoint_consumer(TOPIC, group="g", name="b", start=LATEST)
            await until(lambda: len(first.segments) == 1)
            assert second.segments == []
            owner = await brokers.nodes[0].service.scalable.leader_id(NAME)
            await brokers.kill(next(at for at, node in enumerate(brokers.nodes) if node.broker_id == owner))
            survivor = next(node.service.scalable for node in brokers.nodes if node.broker_id != owner)
            async with asyncio.timeout(30):
                while await survivor.leader_id(NAME) in (owner, None):  # noqa: ASYNC110 - sessions end by the clock
                    await asyncio.sleep(0.02)
            may_answer.set()
            await until(shared([first, second], {0, 1}), 30)
            got += await drain([first, second], 40)
            await produce(client, 100, 160)
            got += await drain([first, second], 60)
            assert await rest([first, second]) == []
            assert sorted(got) == list(range(160))
            await first.close()
            await second.close()


@pytest.mark.inv("INV17")
@pytest.mark.parametrize("topic", [TOPIC, "persistent://public/default/plain"])
async def test_groups_end_with_their_last_member(topic: str) -> None:
    """So that jobs with names of their own do not fill the topic."""
    scalable = ScalableConfig(max_subscriptions_per_topic=3, group_grace_seconds=0, prune_seconds=3600, reconcile_seconds=3600)
    async with InProcessBroker(config=StandaloneConfig(scalable_topics=scalable), with_http=False) as broker:
        await broker.nodes[0].service.create_scalable_topic(NAME, 1)
        async with braid.connect(broker.service_url) as client:
            for number in range(7):
                async with client.checkpoint_consumer(topic, group=f"job-{number}"):
                    pass
            async with (
                client.stream_consumer(topic, "s"),
                client.checkpoint_consumer(topic, group="g"),
                client.checkpoint_consumer(topic, group="h"),
            ):
                with pytest.raises(NotAllowed, match="max_subscriptions_per_topic"):
                    await client.checkpoint_consumer(topic, group="i")


async def test_partitions_that_are_added_while_nobody_is_there(client: Client, broker: InProcessBroker) -> None:
    topic, namespaces = TopicName.parse("persistent://public/default/parts"), broker.nodes[0].service.namespaces
    await namespaces.create_partitioned(topic, 1)
    async with client.checkpoint_consumer(str(topic), group="g", start=LATEST):
        pass
    await namespaces.grow_partitions(topic, 3)
    async with client.producer(str(topic)) as producer:
        for number in range(30):
            await producer.send(str(number).encode())
    async with client.checkpoint_consumer(str(topic), group="g", start=LATEST) as member:
        assert sorted(await drain([member], 30)) == list(range(30))


async def test_a_leader_looks_for_groups_that_have_ended(broker: InProcessBroker, client: Client) -> None:
    controller = await leader(broker)
    term = controller._term
    assert term is not None
    await produce(client, 0, 20)
    async with client.checkpoint_consumer(TOPIC, group="g") as member:
        await drain([member], 20)
    await term.end_groups()
    assert list(term.coordinators) == ["g"]  # it may come back
    async with client.checkpoint_consumer(TOPIC, group="g") as member:
        assert await rest([member]) == []
    term.work.config = msgspec.structs.replace(term.work.config, group_grace_seconds=0)
    await term.end_groups()
    assert term.coordinators == {}
    assert await term.work.subscriptions() == {}
    async with client.checkpoint_consumer(TOPIC, group="g") as member:
        assert len(await drain([member], 20)) == 20


@pytest.fixture
def held_layouts(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Layouts newer than the first one of each session wait here until somebody calls them."""
    held: list[Callable[[], None]] = []
    update = LayoutSession.update

    def hold(session: LayoutSession, body: Any) -> None:
        if session.incarnation:
            held.append(lambda: update(session, body))
        else:
            update(session, body)

    monkeypatch.setattr(LayoutSession, "update", hold)
    return held


@pytest.mark.req("R468-31")
async def test_an_assignment_may_come_before_its_layout(
    broker: InProcessBroker, client: Client, held_layouts: list[Callable[[], None]]
) -> None:
    """The member must not take a segment that it does not know yet for one that is gone."""
    async with client.checkpoint_consumer(TOPIC, group="g", name="a", start=EARLIEST) as member:
        await (await leader(broker)).split_segment(0)
        await until(lambda: set(member.segments) >= {2, 3})
        for tell in held_layouts:
            tell()
        await produce(client, 0, 40)
        assert sorted(await drain([member], 40)) == list(range(40))


@pytest.mark.req("R468-31")
async def test_an_assignment_may_come_before_its_layout_to_one_that_opens(
    broker: InProcessBroker, client: Client, held_layouts: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same: it told the group that it had read such segments to their ends."""
    async with client.checkpoint_consumer(TOPIC, group="g", name="a", start=EARLIEST):
        pass
    check = CheckpointStart.check

    async def split_meanwhile(start: CheckpointStart) -> None:
        await check(start)
        await (await leader(broker)).split_segment(0)

    monkeypatch.setattr(CheckpointStart, "check", split_meanwhile)
    async with client.checkpoint_consumer(TOPIC, group="g", name="b", start=LATEST):
        pass
    monkeypatch.undo()
    await produce(client, 0, 40)
    async with client.checkpoint_consumer(TOPIC, group="g", name="c", start=LATEST) as member:
        assert sorted(await drain([member], 40)) == list(range(40))


@pytest.mark.inv("INV5")
@pytest.mark.parametrize("is_partitioned", [False, True])
async def test_a_group_begins_a_topic_made_anew_at_its_beginning(
    client: Client, broker: InProcessBroker, is_partitioned: bool
) -> None:
    """Of its name there was another one, which was terminated and read to its end: places are known, and mean nothing."""
    name, service = TopicName.parse("persistent://public/default/again"), broker.nodes[0].service
    log = name.partition(0) if is_partitioned else name

    async def make() -> None:
        if is_partitioned:
            await service.create_partitioned(name, 1)
        else:
            await service.create_topic(name)

    async def send(count: int) -> None:
        async with client.producer(str(name)) as producer:
            for number in range(count):
                await producer.send(str(number).encode())

    await make()
    await send(20)
    async with client.checkpoint_consumer(str(name), group="g") as member:
        assert await drain([member], 20) == list(range(20))
        await (await service.topic(log, create=False)).terminate()
        await until(lambda: not member.segments)
    if is_partitioned:
        await service.delete_partitioned(name, force=True)
    else:
        await service.delete_topic(name, force=True)
    await make()
    await send(30)
    async with client.checkpoint_consumer(str(name), group="g", start=LATEST) as member:
        assert await drain([member], 30) == list(range(30))
        assert await rest([member]) == []


@pytest.mark.inv("INV5")
async def test_a_member_reads_a_topic_that_is_made_anew_under_it_from_its_beginning() -> None:
    """It had read the former one to its end, and so would not even have looked again."""
    name = TopicName.parse("persistent://public/default/again")
    scalable = ScalableConfig(reconcile_seconds=0.2, consumer_grace_seconds=2)
    async with InProcessBroker(config=StandaloneConfig(scalable_topics=scalable), with_http=False) as broker:
        service = broker.nodes[0].service
        await service.create_topic(name)
        async with braid.connect(broker.service_url) as one, one.checkpoint_consumer(str(name), group="g") as member:
            async with one.producer(str(name)) as producer:
                for number in range(20):
                    await producer.send(str(number).encode())
            assert await drain([member], 20) == list(range(20))
            await (await service.topic(name, create=False)).terminate()
            await until(lambda: not member.segments)
            member.checkpoint()
            await service.delete_topic(name, force=True)
            await service.create_topic(name)
            async with one.producer(str(name)) as producer:
                for number in range(30):
                    await producer.send(str(number).encode())
            got: set[int] = set()
            async with asyncio.timeout(SECONDS):
                while len(got) < 30:
                    got.update(numbers(await member.receive_batch(50, 0.01)))
