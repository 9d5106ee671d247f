"""Layout sessions: what they are told, in which order, and that nothing of them stays."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from tests.unit.scalable.coordination import TOPIC, World, virtually

from braid.errors import BraidError, NotAllowed, NotReady, StoreUnavailable, TopicNotFound
from braid.metadata.engine import Engine
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.routing import Routing
from braid.scalable.dag_watch import DagUpdate, DagWatches, DagWatchSession
from braid.scalable.records import REGULAR, PendingOperation, ScalableTopicMetadata, controller_path, decode, topic_path

REGULAR_TOPIC = TopicName.parse("persistent://public/default/orders")


class Broker:
    """The watches of one broker, and what its sessions heard."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.store = world.engine.handle("broker")
        self.owners_asked: list[str] = []
        self.campaigns: list[TopicName] = []
        self.partitions: dict[TopicName, int] = {}
        self.watches = DagWatches(
            world.runtime,
            self.store,
            world.config,
            owner_url=self._owner,
            broker_url=self._broker,
            ensure_controller=self._ensure,
            partitions=self._partitions,
        )

    async def open(
        self, topic: TopicName = TOPIC, session_id: int = 1, create: Callable[[], Awaitable[object]] | None = None
    ) -> tuple[DagWatchSession, list[DagUpdate | BraidError]]:
        heard: list[DagUpdate | BraidError] = []
        return await self.watches.open(session_id, topic, heard.append, create=create), heard

    async def _owner(self, name: TopicName) -> str | None:
        self.owners_asked.append(str(name))
        return f"pulsar://owner-of-{name.descriptor}"

    async def _broker(self, broker_id: str) -> str | None:
        return f"pulsar://{broker_id}"

    async def _ensure(self, topic: TopicName) -> None:
        self.campaigns.append(topic)
        if await self.store.get(topic_path(topic)) is not None:
            await self.store.put(controller_path(topic), msgspec.json.encode("leader-1"))

    async def _partitions(self, topic: TopicName) -> int | None:
        return self.partitions.get(topic)


def last(heard: list[DagUpdate | BraidError]) -> DagUpdate:
    update = heard[-1]
    assert isinstance(update, DagUpdate)
    return update


def epochs(heard: list[DagUpdate | BraidError]) -> list[int | str]:
    return [each.layout.epoch if isinstance(each, DagUpdate) else type(each).__name__ for each in heard]


class Deaf(list[DagUpdate | BraidError]):
    """Hears the first update and no other."""

    def __call__(self, heard: DagUpdate | BraidError) -> None:
        self.append(heard)
        if len(self) > 1:
            raise ValueError("cannot be encoded")


@pytest.mark.inv("INV15")
@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_session_that_cannot_be_told_ends_and_the_others_go_on(is_deleted: bool) -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(2, 5)
        await world.put_topic(layout)
        broker, deaf = Broker(world), Deaf()
        session = await broker.watches.open(1, TOPIC, deaf)
        _, heard = await broker.open(session_id=2)
        for change in range(3):
            layout = layout.split(max(layout.active_segments), 9)
            await world.put_topic(layout)
            await asyncio.sleep(world.config.reconcile_seconds)
            assert epochs(heard)[-1] == change + 1
        assert not session.is_open
        assert len(deaf) == 3  # the layout, the next one, and that it ends
        assert broker.watches.session_count == 1
        if is_deleted:
            _, other = await broker.open(session_id=3)
            broken = Deaf([last(heard)])
            with pytest.raises(ValueError, match="encoded"):
                await broker.watches.open(4, TOPIC, broken)
            assert broker.watches.session_count == 2
            await world.store.delete(topic_path(TOPIC))
            await asyncio.sleep(1)
            assert epochs(heard)[-1] == epochs(other)[-1] == "TopicNotFound"

    virtually(main)


@pytest.mark.req("R468-1", "R468-5", "R468-39", "R468-40")
def test_the_first_update_has_the_whole_dag_with_addresses() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(2, 5, Routing.LOW16).split(0, 7)
        await world.put_topic(layout)
        broker = Broker(world)
        session, heard = await broker.open(session_id=77)
        assert session.session_id == 77
        (update,) = heard
        assert isinstance(update, DagUpdate)
        assert update.layout == layout
        assert update.incarnation == "one"
        assert not update.is_synthetic
        assert update.segment_brokers == {
            1: "pulsar://owner-of-8000-ffff-1",
            2: "pulsar://owner-of-0000-3fff-2",
            3: "pulsar://owner-of-4000-7fff-3",
        }
        assert update.controller_url == "pulsar://leader-1"
        assert update.resolved_topic_name == str(TOPIC)
        assert broker.campaigns == [TOPIC]
        other, heard_too = await broker.open(session_id=78)
        assert [each.layout for each in heard_too if isinstance(each, DagUpdate)] == [layout]
        assert len(heard) == 1
        assert broker.watches.session_count == 2
        session.close()
        await world.put_topic(layout.split(1, 9))
        await asyncio.sleep(1)
        assert epochs(heard_too) == [1, 2]
        assert epochs(heard) == [1]
        other.close()

    virtually(main)


@pytest.mark.req("R468-2", "R468-41", "R468-72")
def test_a_change_in_the_store_is_pushed_soon_once_and_in_order() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(2, 5)
        await world.put_topic(layout)
        broker = Broker(world)
        _, heard = await broker.open()
        for _change in range(10):
            layout = layout.split(max(layout.active_segments), 9)
            await world.put_topic(layout)
            await asyncio.sleep(world.runtime.random.random() / 5)
        await asyncio.sleep(1)
        shown = epochs(heard)
        assert shown == sorted(set(shown), key=int)
        assert shown[-1] == 10
        count = len(heard)
        record = await world.store.get(topic_path(TOPIC))
        assert record is not None
        metadata = decode(ScalableTopicMetadata, record.key, record.value)
        pending = PendingOperation(kind="split", operation_id="x", stage="finish")
        await world.store.put(record.key, msgspec.json.encode(msgspec.structs.replace(metadata, pending_operation=pending)))
        await asyncio.sleep(30)
        assert len(heard) == count  # an intent and the reconcile tell nothing new
        broker.owners_asked.clear()
        await world.put_topic(layout.split(max(layout.active_segments), 9))
        await asyncio.sleep(1)
        assert len(broker.owners_asked) == 2  # of the new segments only

    virtually(main)


@pytest.mark.inv("INV15")
def test_a_change_that_no_watch_tells_is_found_by_the_reconcile() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(1, 5)
        await world.put_topic(layout)
        broker = Broker(world)
        _, heard = await broker.open()
        world.engine.watches.end(StoreUnavailable("no more events"))
        original = broker.store.watch

        def deaf(*_arguments: object, **_options: object) -> object:
            raise StoreUnavailable("no watches today")

        broker.store.watch = deaf  # type: ignore[method-assign, assignment]
        await asyncio.sleep(0.1)
        await world.put_topic(layout.split(0, 6))
        await asyncio.sleep(6)
        assert epochs(heard) == [0, 1]
        broker.store.watch = original  # type: ignore[method-assign]

    virtually(main)


def test_a_new_leader_is_announced() -> None:
    async def main(world: World) -> None:
        await world.put_topic(SegmentLayout.initial(1, 5))
        broker = Broker(world)
        _, heard = await broker.open()
        await world.store.put(controller_path(TOPIC), msgspec.json.encode("leader-2"))
        await asyncio.sleep(1)
        assert last(heard).controller_url == "pulsar://leader-2"
        assert epochs(heard) == [0, 0]
        broker.campaigns.clear()
        await world.store.delete(controller_path(TOPIC))
        await asyncio.sleep(1)
        assert broker.campaigns == [TOPIC]  # this broker serves a session, so it is a candidate
        assert last(heard).controller_url == "pulsar://leader-1"

    virtually(main)


def test_a_deleted_topic_ends_its_sessions_and_so_does_one_made_anew() -> None:
    async def main(world: World) -> None:
        await world.put_topic(SegmentLayout.initial(1, 5))
        broker = Broker(world)
        session, heard = await broker.open()
        await world.store.delete(topic_path(TOPIC))
        await asyncio.sleep(1)
        assert epochs(heard) == [0, "TopicNotFound"]
        assert not session.is_open
        assert broker.watches.session_count == 0
        with pytest.raises(TopicNotFound):
            await broker.open()
        await world.put_topic(SegmentLayout.initial(1, 5).split(0, 1), incarnation="one")
        _, heard = await broker.open()
        await world.put_topic(SegmentLayout.initial(1, 5), incarnation="two")
        await asyncio.sleep(1)
        assert epochs(heard) == [1, "TopicNotFound"]
        await asyncio.sleep(10)
        assert broker.watches.feeds == {}

    virtually(main)


def test_a_topic_that_is_being_deleted_is_gone_for_clients() -> None:
    async def main(world: World) -> None:
        metadata = ScalableTopicMetadata(
            epoch=0,
            next_segment_id=0,
            segments={},
            incarnation="one",
            pending_operation=PendingOperation(kind="delete", operation_id="x"),
        ).with_layout(SegmentLayout.initial(1, 5))
        await world.put_topic(SegmentLayout.initial(1, 5))
        broker = Broker(world)
        _, heard = await broker.open()
        await world.store.put(topic_path(TOPIC), msgspec.json.encode(metadata))
        await asyncio.sleep(1)
        assert epochs(heard) == [0, "TopicNotFound"]
        with pytest.raises(TopicNotFound):
            await broker.open()

    virtually(main)


def test_a_lower_epoch_is_never_shown_in_the_same_session() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(1, 5).split(0, 1)
        await world.put_topic(layout)
        broker = Broker(world)
        _, heard = await broker.open()
        await world.put_topic(SegmentLayout.initial(1, 5))  # a store that went back
        await asyncio.sleep(1)
        assert epochs(heard) == [1]
        _, fresh = await broker.open()
        assert epochs(fresh) == [0]

    virtually(main)


def test_missing_topics_are_created_if_that_is_wanted() -> None:
    async def main(world: World) -> None:
        broker = Broker(world)

        async def create() -> None:
            await world.put_topic(SegmentLayout.initial(1, 5))

        with pytest.raises(TopicNotFound, match="orders"):
            await broker.open()
        _, heard = await broker.open(create=create)
        assert epochs(heard) == [0]

        async def refuse() -> None:
            raise NotAllowed("Topics are not created by themselves here.")

        with pytest.raises(NotAllowed):
            await broker.open(TopicName.parse("topic://public/default/other"), create=refuse)
        assert list(broker.watches.feeds) == [TOPIC]

    virtually(main)


def test_regular_topics_have_a_synthetic_layout_that_grows_with_their_partitions() -> None:
    async def main(world: World) -> None:
        broker = Broker(world)
        _, plain = await broker.open(TopicName.parse("persistent://public/default/plain"))
        assert last(plain).is_synthetic
        names = [each.legacy_topic_name for each in last(plain).layout.all_segments.values()]
        assert names == ["persistent://public/default/plain"]
        broker.partitions[REGULAR_TOPIC] = 2
        _, heard = await broker.open(REGULAR_TOPIC)
        assert last(heard).incarnation == ""
        assert last(heard).layout.routing is Routing.MOD_N
        assert last(heard).resolved_topic_name == str(TOPIC)
        assert last(heard).controller_url is None
        assert last(heard).segment_brokers == {}
        broker.partitions[REGULAR_TOPIC] = 3
        await world.store.put(controller_path(TOPIC, REGULAR), msgspec.json.encode("leader-9"))
        await asyncio.sleep(6)
        assert [each.legacy_topic_name for each in last(heard).layout.active_in_order] == [
            f"persistent://public/default/orders-partition-{number}" for number in range(3)
        ]
        assert last(heard).controller_url == "pulsar://leader-9"
        assert broker.campaigns == []  # a producer alone needs no coordination
        await world.put_topic(SegmentLayout.initial(2, 5))
        await asyncio.sleep(1)
        assert not last(heard).is_synthetic
        assert last(heard).incarnation == "one"
        await world.store.delete(topic_path(TOPIC))
        await asyncio.sleep(1)
        assert isinstance(heard[-1], TopicNotFound)

    virtually(main)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("non-persistent://public/default/x", NotAllowed),
        ("segment://public/default/x/0000-ffff-0", NotAllowed),
        ("persistent://public/default/x-partition-3", TopicNotFound),
    ],
)
def test_names_without_a_layout_have_their_error(name: str, error: type[BraidError]) -> None:
    async def main(world: World) -> None:
        broker = Broker(world)
        with pytest.raises(error):
            await broker.open(TopicName.parse(name))
        assert broker.watches.feeds == {}

    virtually(main)


def test_owners_that_are_unknown_or_slow_hold_nothing_up() -> None:
    async def main(world: World) -> None:
        layout = SegmentLayout.initial(3, 5)
        await world.put_topic(layout)
        broker = Broker(world)

        async def odd(name: TopicName) -> str | None:
            if str(name).endswith("-0"):
                raise NotReady("no owner")
            if str(name).endswith("-1"):
                await asyncio.sleep(1000)
            return "pulsar://one"

        broker.watches.owner_url = odd
        began = asyncio.get_running_loop().time()
        _, heard = await broker.open()
        assert asyncio.get_running_loop().time() - began < 1.5
        assert last(heard).segment_brokers == {2: "pulsar://one"}
        await world.put_topic(layout.split(1, 6))
        await asyncio.sleep(0.2)
        assert len(heard) == 2  # producers wait for this one

    virtually(main)


def test_a_store_that_cannot_be_read_is_an_error_of_its_own() -> None:
    async def main(world: World) -> None:
        broker = Broker(world)
        original = broker.store.get

        async def refuse(*_arguments: object, **_options: object) -> None:
            raise StoreUnavailable("down")

        broker.store.get = refuse  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            await broker.open()
        broker.store.get = original  # type: ignore[method-assign]
        assert broker.watches.feeds == {}

    virtually(main)


def watching(engine: Engine) -> int:
    return len(engine.watches)


@pytest.mark.req("R468-42")
@pytest.mark.inv("INV17")
def test_after_a_thousand_sessions_nothing_is_left() -> None:
    async def main(world: World) -> None:
        topics = [TopicName.parse(f"topic://public/default/t{number}") for number in range(10)]
        for topic in topics:
            await world.put_topic(SegmentLayout.initial(2, 5), topic=topic)
        broker = Broker(world)
        await asyncio.sleep(1)
        baseline, tasks = watching(world.engine), len(asyncio.all_tasks())
        sessions = [(await broker.open(topics[number % 10], number))[0] for number in range(1000)]
        assert broker.watches.session_count == 1000
        await asyncio.sleep(1)
        assert watching(world.engine) - baseline <= 2 * len(topics)  # however many sessions
        for session in sessions:
            session.close()
            session.close()
        await asyncio.sleep(1)
        assert broker.watches.session_count == 0
        assert watching(world.engine) == baseline
        assert len(asyncio.all_tasks()) == tasks
        _, heard = await broker.open(topics[0])
        await broker.watches.close()
        await asyncio.sleep(1)
        assert watching(world.engine) == baseline
        assert len(heard) == 1

    virtually(main)
