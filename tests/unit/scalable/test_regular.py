"""Stream consumers of regular topics, coordinated by an elected broker."""

import asyncio

import msgspec
import pytest
from tests.unit.scalable.coordination import Client, Stored, World, ids, virtually

from braid.errors import Conflict, InvalidTopicName, LedElsewhere, NotReady, StoreMismatch
from braid.metadata.handle import Handle
from braid.model.names import TopicName
from braid.runtime.tasks import Tasks
from braid.scalable.api import ConsumerAssignment, ConsumerRegistration, PlaceReport
from braid.scalable.config import ScalableConfig
from braid.scalable.records import REGULAR, SubscriptionMetadata, controller_path, decode, subscription_path
from braid.scalable.regular import RegularTopicController

TOPIC = TopicName.parse("persistent://public/default/orders")


class Broker:
    """One broker's controller of the topic."""

    def __init__(
        self, world: World, number: int, count: dict[str, int | None], logs: dict[str, str | None] | None = None
    ) -> None:
        self.handle: Handle = world.engine.handle(f"broker-{number}")
        self.count = count
        self.logs = logs if logs is not None else {}
        self.closed: list[RegularTopicController] = []
        self.controller = RegularTopicController(
            world.runtime,
            self.handle,
            world.config,
            world.segments,
            TOPIC,
            broker_id=lambda: f"broker-{number}",
            partitions=self._partitions,
            log_of=self._log_of,
            on_closed=self.closed.append,
        )

    async def _partitions(self, _topic: TopicName) -> int | None:
        return self.count["partitions"]

    async def _log_of(self, topic: TopicName) -> str | None:
        return self.logs.get(str(topic))

    async def start(self) -> "Broker":
        await self.controller.start()
        return self

    async def join(self, name: str, subscription: str = "sub", kind: str = "STREAM") -> tuple[Client, list[int]]:
        client = Client(name)
        registration = ConsumerRegistration(name, 1, client)
        return client, ids(await self.controller.register_consumer(subscription, registration, kind))  # type: ignore[arg-type]


def partitions(world: World, count: int) -> dict[str, int | None]:
    """The topic with so many partitions."""
    for number in range(count):
        world.segments.topics.setdefault(str(TOPIC.partition(number)), Stored([0, 0]))
    if not count:
        world.segments.topics.setdefault(str(TOPIC), Stored([0, 0]))
    return {"partitions": count}


def test_partitions_are_shared_among_stream_consumers_and_cursors_exist_first() -> None:
    async def main(world: World) -> None:
        broker = await Broker(world, 1, partitions(world, 4)).start()
        a, mine = await broker.join("a")
        assert mine == [0, 1, 2, 3]
        assert all(stored.read == {"sub": 0} for stored in world.segments.topics.values())
        b, mine = await broker.join("b")
        assert mine == [2, 3]
        assert [each.topic for each in a.pushed[-1].segments] == [str(TOPIC.partition(0)), str(TOPIC.partition(1))]
        leader = await world.store.get(controller_path(TOPIC, REGULAR))
        assert leader is not None and msgspec.json.decode(leader.value) == "broker-1"
        assert sorted(await world.registrations(root=REGULAR)) == ["a", "b"]
        assert await world.registrations() == {}
        await broker.controller.unregister_consumer("sub", "a", a)
        assert ids(b.pushed[-1]) == [0, 1, 2, 3]
        broker.controller.consumer_disconnected("sub", "b", b)
        stats = await broker.controller.stats()
        assert stats["subscriptions"]["sub"]["connectedConsumers"] == 0
        assert stats["subscriptions"]["sub"]["blocked_by"][0]["kind"] == "consumer-away"
        assert stats["segments"]["3"]["name"] == str(TOPIC.partition(3))
        await broker.controller.close()

    virtually(main)


def test_a_plain_topic_has_one_segment_and_one_that_becomes_partitioned_is_told_anew() -> None:
    async def main(world: World) -> None:
        count = partitions(world, 0)
        broker = await Broker(world, 1, count).start()
        a, mine = await broker.join("a")
        assert mine == [0]
        count.update(partitions(world, 3))
        await asyncio.sleep(6)
        assert [each.topic for each in a.pushed[-1].segments] == [str(TOPIC.partition(number)) for number in range(3)]
        assert all(world.segments.topics[str(TOPIC.partition(number))].read == {"sub": 0} for number in range(3))
        count.update(partitions(world, 4))
        await asyncio.sleep(6)
        assert ids(a.pushed[-1]) == [0, 1, 2, 3]
        await broker.controller.close()

    virtually(main)


@pytest.mark.inv("INV7")
def test_a_new_partition_has_its_cursors_before_anybody_is_told_of_it() -> None:
    async def main(world: World) -> None:
        count = partitions(world, 2)
        broker = await Broker(world, 1, count).start()
        a, _ = await broker.join("a")
        new, told = str(TOPIC.partition(2)), list[list[int]]()

        def note(operation: str, segment: str) -> None:
            if (operation, segment) == ("create_subscription", new):
                told.append(ids(a.pushed[-1]) if a.pushed else [])

        world.segments.hook = note
        world.segments.fail = lambda operation, segment: NotReady("not now") if segment == new and len(told) < 3 else None
        partitions(world, 3)
        count["partitions"] = 3
        await asyncio.sleep(60)
        assert told[:3] == [[], [], []]
        assert ids(a.pushed[-1]) == [0, 1, 2]
        assert world.segments.topics[new].read == {"sub": 0}
        await broker.controller.close()

    virtually(main)


def test_who_keeps_the_same_number_is_told_that_it_is_another_topic() -> None:
    async def main(world: World) -> None:
        count = partitions(world, 0)
        broker = await Broker(world, 1, count).start()
        a, _ = await broker.join("a")
        b, mine = await broker.join("b")
        assert mine == []
        count.update(partitions(world, 2))
        await asyncio.sleep(6)
        assert [each.topic for each in a.pushed[-1].segments] == [str(TOPIC.partition(0))]
        assert [each.topic for each in b.pushed[-1].segments] == [str(TOPIC.partition(1))]
        await broker.controller.close()

    virtually(main)


def test_bad_requests_have_their_error() -> None:
    async def main(world: World) -> None:
        broker = await Broker(world, 1, partitions(world, 2)).start()
        await broker.join("a")
        with pytest.raises(Conflict, match="STREAM"):
            await broker.join("b", kind="CHECKPOINT")
        with pytest.raises(InvalidTopicName):
            await broker.join("b", subscription="a/b")
        await broker.join("g", subscription="group", kind="CHECKPOINT")
        assert all("group" not in stored.read for stored in world.segments.topics.values())
        await broker.controller.close()

    virtually(main)


@pytest.mark.req("R468-67", "R468-12")
def test_another_broker_goes_on_with_the_same_assignment() -> None:
    async def main(world: World) -> None:
        count = partitions(world, 4)
        first, second = await Broker(world, 1, count).start(), await Broker(world, 2, count).start()
        a, _ = await first.join("a")
        _, before = await first.join("b")
        with pytest.raises(LedElsewhere):
            await second.join("a")
        await first.controller.close()
        assert a.error is not None
        assert first.closed == [first.controller]
        await asyncio.sleep(6)
        assert second.controller.is_leading
        await second.controller.wait_ready()
        assert second.controller.is_ready
        _, mine = await second.join("b")
        assert mine == before
        assert len(second.controller.layout.all_segments) == 4
        await second.controller.close()

    virtually(main)


def test_a_killed_leader_is_replaced() -> None:
    async def main(world: World) -> None:
        count = partitions(world, 4)
        first, second = await Broker(world, 1, count).start(), await Broker(world, 2, count).start()
        _, before = await first.join("a")
        first.controller.kill()
        first.handle.pause_heartbeat()
        await asyncio.sleep(60)
        _, mine = await second.join("a")
        assert mine == before
        await second.controller.close()

    virtually(main)


def test_coordination_that_nobody_needs_is_given_up_and_that_of_a_deleted_topic_removed() -> None:
    async def main(world: World) -> None:
        count = partitions(world, 2)
        broker = await Broker(world, 1, count).start()
        a, _ = await broker.join("a")
        await asyncio.sleep(200)
        assert not broker.controller.is_closed  # somebody is there
        await broker.controller.unregister_consumer("sub", "a", a)
        await asyncio.sleep(100)
        assert broker.controller.is_closed and broker.closed
        assert await world.store.get(controller_path(TOPIC, REGULAR)) is None
        assert await world.subscription(root=REGULAR) is not None
        again = await Broker(world, 2, count).start()
        await again.controller.wait_ready()
        count["partitions"] = None
        world.segments.topics.clear()
        await asyncio.sleep(100)
        assert again.controller.is_closed
        assert await world.subscription(root=REGULAR) is None

    virtually(main)


@pytest.mark.inv("INV17")
def test_a_group_without_members_ends_although_nobody_asks_for_anything() -> None:
    async def main(world: World) -> None:
        broker = await Broker(world, 1, partitions(world, 2)).start()
        member, _ = await broker.join("a", "sub", "CHECKPOINT")
        await broker.controller.unregister_consumer("sub", "a", member)
        await asyncio.sleep(15)
        assert await world.subscription(root=REGULAR) is not None
        await asyncio.sleep(15)
        assert not broker.controller.is_closed
        assert await world.subscription(root=REGULAR) is None

    virtually(main, config=ScalableConfig(group_grace_seconds=20))


def test_one_whose_patience_ended_does_not_shorten_that_of_others() -> None:
    async def main(world: World) -> None:
        broker = await Broker(world, 1, partitions(world, 2)).start()
        await broker.controller.wait_ready()
        term = broker.controller._leading()
        term.changed.clear()
        term.ready.clear()
        tasks = Tasks("callers")
        first = tasks.spawn(broker.controller.wait_ready(), "first")
        await asyncio.sleep(world.config.operation_wait_seconds / 2)
        second = tasks.spawn(broker.controller.wait_ready(), "second")
        await asyncio.wait([first])
        assert isinstance(first.exception(), NotReady)
        assert not second.done()
        term.ready.set()
        term.changed.set()
        await second
        await tasks.close()
        await broker.controller.close()

    virtually(main)


@pytest.mark.inv("INV17")
def test_a_subscription_that_cannot_be_read_costs_the_others_nothing() -> None:
    async def main(world: World) -> None:
        count = partitions(world, 2)
        odd = subscription_path(TOPIC, "odd", REGULAR)
        await world.store.put(odd, b'{"type": 5}')
        broker = await Broker(world, 1, count).start()
        _, mine = await broker.join("a")
        assert mine == [0, 1]
        with pytest.raises(StoreMismatch, match="odd"):
            await broker.join("a", "odd")
        stored = await world.store.get(odd, fresh=True)
        assert stored is not None and stored.value == b'{"type": 5}'
        await broker.controller.close()

    virtually(main)


@pytest.mark.inv("INV15")
def test_an_unexpected_failure_does_not_end_the_coordination() -> None:
    async def main(world: World) -> None:
        count = partitions(world, 2)
        broker = Broker(world, 1, count)
        count["partitions"] = "many"  # type: ignore[assignment]
        await broker.start()
        await asyncio.sleep(3)
        count["partitions"] = 2
        await asyncio.sleep(1)
        a, mine = await broker.join("a")
        assert mine == [0, 1]
        count["partitions"] = "many"  # type: ignore[assignment]
        await asyncio.sleep(20)
        partitions(world, 3)
        count["partitions"] = 3
        await asyncio.sleep(20)
        assert ids(a.pushed[-1]) == [0, 1, 2]
        await broker.controller.close()

    virtually(main)


@pytest.mark.inv("INV17")
def test_a_group_whose_record_cannot_be_changed_does_not_keep_the_others() -> None:
    async def main(world: World) -> None:
        broker = await Broker(world, 1, partitions(world, 2)).start()
        await broker.join("stays", "reading")
        for name in ("first", "second"):
            client, _ = await broker.join("a", name, "CHECKPOINT")
            await broker.controller.unregister_consumer(name, "a", client)
        await world.store.put(subscription_path(TOPIC, "first", REGULAR), b"{")
        await asyncio.sleep(200)
        assert set((await broker.controller.stats())["subscriptions"]) == {"reading", "first"}
        assert await world.store.get(subscription_path(TOPIC, "second", REGULAR), fresh=True) is None
        await broker.controller.close()

    virtually(main, config=ScalableConfig(group_grace_seconds=100))


@pytest.mark.req("R468-38")
def test_waiting_for_the_end_of_a_group_writes_once() -> None:
    async def main(world: World) -> None:
        broker = await Broker(world, 1, partitions(world, 2)).start()
        await broker.join("stays", "reading")
        client, _ = await broker.join("a", "group", "CHECKPOINT")
        await broker.controller.unregister_consumer("group", "a", client)
        await asyncio.sleep(20)
        before = await world.store.get(subscription_path(TOPIC, "group", REGULAR), fresh=True)
        await asyncio.sleep(500)
        after = await world.store.get(subscription_path(TOPIC, "group", REGULAR), fresh=True)
        assert before is not None and after is not None and before.version == after.version
        await broker.controller.close()

    virtually(main)


class Reader(Client):
    """A member of a group that notes where it begins, and lets go when it is asked to."""

    def __init__(self, name: str, broker: Broker) -> None:
        super().__init__(name)
        self.broker = broker
        self.places: dict[int, bytes | None] = {}
        self.owed: tuple[int, ...] = ()
        self.term = 0

    def push(self, assignment: ConsumerAssignment) -> None:
        super().push(assignment)
        self.take(assignment)

    def take(self, assignment: ConsumerAssignment) -> None:
        self.term, self.owed = assignment.term, assignment.owed
        given = {each.segment_id: each.place for each in assignment.segments}
        self.places = {number: self.places.get(number, place) for number, place in given.items()}  # goes on where it is

    async def register(self) -> None:
        registration = ConsumerRegistration(self.name, 1, self, says_goodbye=True, hands_over=True)
        self.take(await self.broker.controller.register_consumer("g", registration, "CHECKPOINT"))

    async def report(self, places: dict[int, bytes | None], *released: int) -> None:
        report = PlaceReport(self.term, places, frozenset(released))
        await self.broker.controller.report_places("g", self.name, self, report)


def logs(count: int, mark: str) -> dict[str, str | None]:
    return {str(TOPIC.partition(number)): f"{mark}{number}" for number in range(count)}


@pytest.mark.inv("INV5")
@pytest.mark.parametrize("is_led", [True, False])
@pytest.mark.parametrize("is_made_later", [True, False])
def test_a_group_has_no_places_in_a_topic_made_anew(is_led: bool, is_made_later: bool) -> None:
    """Nor in one whose log is made by whoever attaches first; the coordinator may be there all the time, or another one."""

    async def main(world: World) -> None:
        count, now = partitions(world, 2), logs(2, "old")
        broker = await Broker(world, 1, count, now).start()
        a = Reader("a", broker)
        await a.register()
        assert a.places == {0: None, 1: None}
        await a.report({0: b"70", 1: b"71"})
        await broker.controller.unregister_consumer("g", "a", a)
        if not is_led:
            await broker.controller.close()
            broker = await Broker(world, 2, count, now).start()
        now[str(TOPIC.partition(0))] = None if is_made_later else "new0"
        b = Reader("b", broker)
        await b.register()
        assert b.places == {0: b"", 1: b"71"}
        now[str(TOPIC.partition(0))] = "new0"
        await asyncio.sleep(20)
        await b.report({0: b"5"})
        await broker.controller.unregister_consumer("g", "b", b)
        c = Reader("c", broker)
        await c.register()
        assert c.places == {0: b"5", 1: b"71"}  # known again
        await broker.controller.close()

    virtually(main)


@pytest.mark.inv("INV5")
@pytest.mark.parametrize("how", ["answers", "is silent", "leader dies", "comes back"])
def test_who_reads_a_topic_made_anew_lets_go_of_it_first(how: str) -> None:
    async def main(world: World) -> None:
        count, now = partitions(world, 2), logs(2, "old")
        broker = await Broker(world, 1, count, now).start()
        a = Reader("a", broker)
        await a.register()
        await a.report({0: b"70", 1: b"71"})
        now[str(TOPIC.partition(0))] = "new0"
        if how == "comes back":
            broker.controller.consumer_disconnected("g", "a", a)
            await a.register()
        else:
            await asyncio.sleep(6)
        assert (list(a.places), a.owed) == ([1], (0,))
        await a.report({0: b"99"})  # by its last checkpoint
        if how == "is silent":
            await asyncio.sleep(70)
        else:
            if how == "leader dies":
                broker.controller.kill()
                await broker.handle.close()
                broker = a.broker = await Broker(world, 2, count, now).start()
                await a.register()
                assert (list(a.places), a.owed) == ([1], (0,))
            await a.report({0: b"99"}, 0)
            await asyncio.sleep(1)
        assert (a.places, a.owed) == ({0: b"", 1: None}, ())
        await a.report({0: b"3"})
        stored = await world.store.get(subscription_path(TOPIC, "g", REGULAR), fresh=True)
        assert stored is not None
        record = decode(SubscriptionMetadata, stored.key, stored.value)
        assert (record.places, record.logs) == ({0: b"3", 1: b"71"}, {0: "new0", 1: "old1"})
        await broker.controller.close()

    virtually(main)
